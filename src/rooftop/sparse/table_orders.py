"""Neighbour tables in the forms that sparse convolution kernels need: ordered rows, and pair lists.

Each form is computed once for all layers that share a rulebook. An ordered table replaces the unordered table, which
saves 54 MB for half a million sites and 27 offsets. `torch.library` operators compute all forms, so that compiled
programs can use these forms.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rooftop.cost import Cost, distinct_bytes
from rooftop.kernels.sites import launches as sparse_conv_launches
from rooftop.kernels.sites import tables
from rooftop.launch.lessons import FIRST, ITSELF, LAST, NONE
from rooftop.launch.operators import declare
from rooftop.launch.repeated_calls import repeated_rows
from rooftop.launch.row_counts import given
from rooftop.launch.triton_launch import INTERPRETED


def by_kernels(table: Tensor) -> bool:
    """Whether Triton kernels compute convolutions on the device of `table`. Only kernels use row orders and pair
    lists."""
    return not table.is_cpu or INTERPRETED


def are_many(rows: int, least: int) -> bool:
    """Whether `rows` is at least `least`. In compiled code, where `rows` may be symbolic, the result is True unless the
    compiler knows that there are fewer rows.
    """
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        return not statically_known_true(rows < least)
    return rows >= least


def to_keep() -> AbstractContextManager[object]:
    """Return a context in which to create tensors that later calls reuse. The context leaves inference mode, because
    autograd cannot save inference tensors. In compiled code, the context does nothing: a compiled program is either
    entirely in inference mode or not at all."""
    return nullcontext() if torch.compiler.is_compiling() else torch.inference_mode(False)


class RowOrder(NamedTuple):
    """Compute the result of `launches.row_order` for a neighbour table (M, T): the order of its rows for `sparse_conv`,
    or the table in this order. Tables with few rows keep their order."""

    neighbours: Tensor

    def run(self) -> Tensor:
        return sparse_conv_launches.row_order(self.neighbours)

    def fake(self) -> Tensor:
        from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

        rows, taps = self.neighbours.shape
        if free_unbacked_symbols(rows):  # with more rows, the result would have another shape
            torch._check(rows <= tables.MOST_SORTED)
        return self.neighbours.new_empty(sparse_conv_launches.row_order_shape(rows, taps))

    def cost(self, made: Tensor) -> Cost:
        """Bytes: one read of the neighbour table, and one write of the order."""
        return Cost(distinct_bytes(self), distinct_bytes([made]))


class RowPairs(NamedTuple):
    """List and count the pairs of each tap in a table (M, T) of N sites: (2, T, min(M, N)) int32 and (T,) int32."""

    neighbours: Tensor
    sites: int

    def run(self) -> tuple[Tensor, Tensor]:
        return sparse_conv_launches.pairs_of(self.neighbours, given(self.sites))

    def fake(self) -> tuple[Tensor, Tensor]:
        rows, taps = self.neighbours.shape
        pairs = self.neighbours.new_empty(2, taps, torch.sym_min(rows, self.sites))
        return pairs, self.neighbours.new_empty(taps)

    def cost(self, made: tuple[Tensor, Tensor]) -> Cost:
        """Bytes: one read of the neighbour table, and one write of the pairs and of their number at each tap."""
        return Cost(distinct_bytes([self.neighbours]), distinct_bytes(made))


class RowBlocks(NamedTuple):
    """For each tap, list the row blocks of an ordered table that have a neighbour at this tap, (T, blocks) int32, and
    count these blocks, (T,) int32."""

    order: Tensor
    taps: int

    def run(self) -> tuple[Tensor, Tensor]:
        return sparse_conv_launches.blocks_of(*self)

    def fake(self) -> tuple[Tensor, Tensor]:
        order, taps = self
        return order.new_empty(taps, -(-order.shape[1] // tables.BLOCK_ROWS)), order.new_empty(taps)

    def cost(self, made: tuple[Tensor, Tensor]) -> Cost:
        """The kernel reads the masks of the table's rows once, and writes the lists once."""
        masks = self.order[1 : self.order.shape[0] - self.taps]
        return Cost(distinct_bytes([masks]), distinct_bytes(made))


_row_order = declare("sparse_row_order", RowOrder, known="itself")
_row_pairs = declare("sparse_row_pairs", RowPairs, known="itself")
_row_blocks = declare("sparse_row_blocks", RowBlocks, known="itself")


@repeated_rows(FIRST)
def row_order(neighbours: Tensor) -> Tensor:
    """Compute the result of `RowOrder`."""
    return _row_order(neighbours)


@repeated_rows(FIRST, ITSELF)
def row_pairs(neighbours: Tensor, sites: int) -> tuple[Tensor, Tensor]:
    """Compute the results of `RowPairs`."""
    return _row_pairs(neighbours, sites)


@repeated_rows(LAST, NONE)
def row_blocks(order: Tensor, taps: int) -> tuple[Tensor, Tensor]:
    """Compute the results of `RowBlocks`."""
    return _row_blocks(order, taps)


@dataclass(eq=False)
class NeighbourTable:
    """A neighbour table (M, T) of M rows among N sites. The table is stored in its own row order (`by_row`) until a
    kernel first needs ordered rows. Then `ordered` is computed, and replaces `by_row` if it contains the table.

    Attributes:
        by_row: the site at each tap, or -1, (M, T) int32, contiguous. None if only `ordered` contains the table.
        sites: N, the number of sites.
        ordered: the result of `row_order` for the table; None until it is needed.
        lists: the result of `row_pairs` or `row_blocks` for the table; None until it is needed.
    """

    by_row: Tensor | None
    sites: int
    ordered: Tensor | None = None
    lists: tuple[Tensor, Tensor] | None = None

    def rows(self) -> Tensor:
        """The neighbour table in its original row order, (M, T) int32. It is recomputed at each call if only the
        ordered table is stored.
        """
        if self.by_row is not None:
            return self.by_row
        assert self.ordered is not None
        return sparse_conv_launches.unsorted_table(self.ordered, self.taps)

    @property
    def taps(self) -> int:
        if self.by_row is not None:
            return self.by_row.shape[1]
        assert self.ordered is not None
        lines = self.ordered.shape[0] - 1  # besides the row numbers: a line of masks per 32 taps, and a line per tap
        return lines - -(-lines // 33)

    @property
    def order(self) -> Tensor | None:
        """The row order for `sparse_conv`. None if `sparse_conv` is as fast without an order."""
        if self.ordered is not None or self.by_row is None:
            return self.ordered
        if not by_kernels(self.by_row) or not are_many(self.by_row.shape[0], tables.SORTED_FROM):
            return None
        with to_keep():
            self.ordered = row_order(self.by_row)
        if sparse_conv_launches.has_table(self.ordered):
            self.by_row = None
        return self.ordered

    @property
    def pairs(self) -> tuple[Tensor, Tensor] | None:
        """The pair lists for `sparse_conv`. None if `sparse_conv` is as fast without lists."""
        if self.lists is None:
            order = self.order
            if order is not None and sparse_conv_launches.has_table(order):
                with to_keep():
                    self.lists = row_blocks(order, self.taps)
                return self.lists
            assert self.by_row is not None  # `by_row` is None only if `ordered` contains the table
            if by_kernels(self.by_row) and are_many(self.by_row.shape[0], tables.LISTED_FROM):
                with to_keep():
                    self.lists = row_pairs(self.by_row, self.sites)
        return self.lists
