"""A table of neighbours as the kernels of sparse convolution want it: its rows in an order, and lists of its pairs.

Each is made once, for all layers that share a rulebook. A table that is there in its order is not kept by rows as well:
for half a million sites and 27 offsets that is 60 MB. What is made, is made by operators of `torch.library`, so that
compiled programs make it too.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from rooftop.cost import Call, Cost, cost_of, distinct_bytes
from rooftop.kernels.sites import launches as sparse_conv_launches
from rooftop.kernels.sites import tables
from rooftop.launch.operators import operator
from rooftop.launch.triton_launch import INTERPRETED


def by_kernels(table: Tensor) -> bool:
    """Whether convolutions by a table on this device are computed by kernels, which orders and pairs are for."""
    return not table.is_cpu or INTERPRETED


def are_many(rows: int, least: int) -> bool:
    """Whether there are as many rows; where only a run of a compiled program knows, there may be."""
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        return not statically_known_true(rows < least)
    return rows >= least


def to_keep() -> AbstractContextManager[object]:
    """Where tensors are made that later calls use too: what inference mode makes, autograd cannot save. Compiled code
    is in that mode throughout or not at all."""
    return nullcontext() if torch.compiler.is_compiling() else torch.inference_mode(False)


@operator("sparse_row_order")
def row_order(neighbours: Tensor) -> Tensor:
    """What `sparse_conv` takes as the order of a table (M, T); of few rows, as they are."""
    return sparse_conv_launches.row_order(neighbours)


@torch.library.register_fake("rooftop::sparse_row_order")
def _(neighbours: Tensor) -> Tensor:
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    rows, taps = neighbours.shape
    if free_unbacked_symbols(rows):  # which only a run knows: with so many more there would be no table
        torch._check(rows <= tables.MOST_SORTED)
    return neighbours.new_empty(sparse_conv_launches.row_order_shape(rows, taps))


@operator("sparse_row_pairs")
def row_pairs(neighbours: Tensor, sites: int) -> tuple[Tensor, Tensor]:
    """The pairs (2, T, min(M, N)) int32 of each tap of a table (M, T) of N sites, and how many they are, (T,) int32."""
    return sparse_conv_launches.pairs_of(neighbours, sites)


@torch.library.register_fake("rooftop::sparse_row_pairs")
def _(neighbours: Tensor, sites: int) -> tuple[Tensor, Tensor]:
    rows, taps = neighbours.shape
    return neighbours.new_empty(2, taps, torch.sym_min(rows, sites)), neighbours.new_empty(taps)


@operator("sparse_row_blocks")
def row_blocks(order: Tensor, taps: int) -> tuple[Tensor, Tensor]:
    """Which blocks of a table that is in its order have a neighbour at each tap, (T, blocks) int32, and how many they
    are, (T,) int32."""
    return sparse_conv_launches.blocks_of(order, taps)


@torch.library.register_fake("rooftop::sparse_row_blocks")
def _(order: Tensor, taps: int) -> tuple[Tensor, Tensor]:
    return order.new_empty(taps, -(-order.shape[1] // tables.BLOCK_ROWS)), order.new_empty(taps)


@cost_of("rooftop::sparse_row_order")
@cost_of("rooftop::sparse_row_pairs")
def _table_cost(call: Call) -> Cost:
    """The table read once, what is made of it written once."""
    made = [call.out] if isinstance(call.out, Tensor) else list(call.out)
    return Cost(distinct_bytes([call["neighbours"]]), distinct_bytes(made))


@cost_of("rooftop::sparse_row_blocks")
def _blocks_cost(call: Call) -> Cost:
    """The masks of the table's rows read once, the lists written once."""
    table, taps = call["order"], call["taps"]
    return Cost(distinct_bytes([table[1 : table.shape[0] - taps]]), distinct_bytes(list(call.out)))


@dataclass(eq=False)
class NeighbourTable:
    """The neighbours (M, T) of M rows among N sites, in whichever form was asked for last.

    Attributes:
        by_row: (M, T) int32, contiguous: a site at each tap, or -1; None while `ordered` has them.
        sites: N.
        ordered: what `row_order` made of them.
        lists: what `row_pairs` or `row_blocks` made of them.
    """

    by_row: Tensor | None
    sites: int
    ordered: Tensor | None = None
    lists: tuple[Tensor, Tensor] | None = None

    def rows(self) -> Tensor:
        """(M, T) int32; made again where only the ordered table is kept."""
        if self.by_row is not None:
            return self.by_row
        assert self.ordered is not None
        return sparse_conv_launches.unsorted_table(self.ordered, self.taps)

    @property
    def taps(self) -> int:
        if self.by_row is not None:
            return self.by_row.shape[1]
        assert self.ordered is not None
        lines = self.ordered.shape[0] - 1  # T and one for each 32 of them
        return lines - -(-lines // 33)

    @property
    def order(self) -> Tensor | None:
        """What `sparse_conv` takes as its order. None where it does as well without."""
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
        """What `sparse_conv` takes as its pairs. None where it does as well without."""
        if self.lists is None:
            order = self.order
            if order is not None and sparse_conv_launches.has_table(order):
                with to_keep():
                    self.lists = row_blocks(order, self.taps)
                return self.lists
            assert self.by_row is not None  # without its order, or with an order alone
            if by_kernels(self.by_row) and are_many(self.by_row.shape[0], tables.LISTED_FROM):
                with to_keep():
                    self.lists = row_pairs(self.by_row, self.sites)
        return self.lists
