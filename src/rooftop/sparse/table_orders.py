"""What the kernels of sparse convolution want of a table of neighbours beside it: in which order to work on its rows,
and the list of its pairs. `Rulebook` makes each once, for all layers that share it.

As operators of `torch.library`, so that compiled programs make them too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rooftop.cost import Call, Cost, cost_of, distinct_bytes
from rooftop.kernels import sparse_conv_launches
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


@operator("sparse_row_order")
def row_order(neighbours: Tensor) -> Tensor:
    """What `sparse_conv` takes as the order of a table (M, T); of few rows, as they are."""
    return sparse_conv_launches.row_order(neighbours)


@torch.library.register_fake("rooftop::sparse_row_order")
def _(neighbours: Tensor) -> Tensor:
    return neighbours.new_empty(sparse_conv_launches.row_order_shape(*neighbours.shape))


@operator("sparse_row_pairs")
def row_pairs(neighbours: Tensor, sites: int) -> tuple[Tensor, Tensor]:
    """The pairs (2, T, min(M, N)) int32 of each tap of a table (M, T) of N sites, and how many they are, (T,) int32."""
    return sparse_conv_launches.pairs_of(neighbours, sites)


@torch.library.register_fake("rooftop::sparse_row_pairs")
def _(neighbours: Tensor, sites: int) -> tuple[Tensor, Tensor]:
    rows, taps = neighbours.shape
    return neighbours.new_empty(2, taps, torch.sym_min(rows, sites)), neighbours.new_empty(taps)


@cost_of("rooftop::sparse_row_order")
@cost_of("rooftop::sparse_row_pairs")
def _table_cost(call: Call) -> Cost:
    """The table read once, what is made of it written once."""
    made = [call.out] if isinstance(call.out, Tensor) else list(call.out)
    return Cost(distinct_bytes([call["neighbours"]]), distinct_bytes(made))
