"""The rulebook of a sparse convolution: which input site contributes to which output site at which offset of the
kernel.

Definition: (input i, output o, offset k) is a pair if and only if input and output are active and, in each dimension,

    input[i] == stride * output[o] + dilation * k - padding          (for transposed convolutions, input and output are
                                                                     swapped)

An output is active if an input reaches it. For a submanifold convolution, the output sites are the input sites.
Offsets are numbered in row-major order, k = (kz * ksize_y + ky) * ksize_x + kx, like the weights of
`torch.nn.functional.conv3d`.
Graham et al. 2018, "3D Semantic Segmentation with Submanifold Sparse Convolutional Networks", section 3.

A site is packed into one int64 key, ((batch * Z + z) * Y + y) * X + x. Outputs are sorted by key and pairs by input
row, so results do not depend on the order in which threads run. `bitmaps.py` builds the rulebook on a GPU.
`hash_tables.py` builds the rulebook on the CPU, and on a GPU for grids that are too large for one bit per cell.
`rulebook_reference` is the definition in plain PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from rooftop.cost import Cost, distinct_bytes
from rooftop.launch.fast_path import only_infers, unwatched
from rooftop.launch.lessons import FIRST, ITSELF, NONE
from rooftop.launch.operators import declare, is_exporting
from rooftop.launch.repeated_calls import repeated_rows
from rooftop.launch.row_counts import given
from rooftop.launch.warp_launch import launch_warp
from rooftop.sparse.bitmaps import (
    all_outputs,
    fit_bitmaps,
    pair_by_bitmap,
    reach_by_bitmap,
    regular_by_bitmap,
    submanifold_by_bitmap,
)
from rooftop.sparse.geometries import MAX_ROWS, NO_KEY, Geometry, PerDimension, geometry, whole_number
from rooftop.sparse.hash_tables import Tables, load_kernels, regular_by_hash, submanifold_by_hash
from rooftop.sparse.sites import check_indices, check_int32, check_sites, checks_values, keys_of, sites_of
from rooftop.sparse.table_orders import NeighbourTable, row_pairs

WORD_BITS = 32


# ---- state of a rulebook ---------------------------------------------------------------------------------------


class Faults(NamedTuple):
    """Errors that were found in the sites while a rulebook was built, and the data for the error messages.

    Attributes:
        flags: (3,) int32 on the device of the indices. A flag is 1 if its error occurred: an input row repeats a site;
            an input row is out of range; or `num_out_act_bound` is too small (all output rows are then -1).
        indices: the input sites, (N, 1 + dims).
        shape: the convolution's geometry.
        outputs: number of output rows.
    """

    flags: Tensor
    indices: Tensor
    shape: Geometry
    outputs: int

    def check(self) -> None:
        """Raise `ValueError` if a flag is set. The message names the first wrong row, or the bound that is too small.
        The host waits for the device."""
        repeated, outside, beyond = self.flags.tolist()
        if repeated or outside:
            check_sites(self.indices, self.shape.batch_size, self.shape.in_shape)
        if beyond:
            raise ValueError(_beyond(self.outputs))


@dataclass(eq=False)
class Rulebook:
    """All (input, output, offset) pairs of a convolution with N inputs, O outputs and K offsets, as tables for kernels.

    A row of indices that consists of -1 is not a site and has no pairs. With `num_out_act_bound`, the last output rows
    may be -1.

    Attributes:
        shape: the geometry of the convolution. For an inverse convolution, the geometry of the convolution that is
            inverted.
        in_indices: (N, 1 + dims) int32 or int64, batch first.
        out_indices: (O, 1 + dims), sorted, with the dtype of in_indices. Equal to in_indices if `subm`.
        table: the table `neighbours` (the input row at each offset of each output) and the forms derived from it (row
            orders, pair lists), shared by all layers that use this rulebook.
        reached: the table `reverse` (the output row at each offset of each input) and the forms derived from it; None
            for a submanifold convolution.
        faults: `Faults.flags`, (3,) int32 on the device of the indices. `check()` raises an error if a flag is set.
        bounded: whether a bound fixed the number of output rows, so that there may be rows that are not sites.
        inverse: whether this rulebook is the `swapped()` of another rulebook.
        version: the version counter of in_indices, which in-place changes increment. None for a copied rulebook, or if
            PyTorch does not count versions.
    """

    shape: Geometry
    in_indices: Tensor
    out_indices: Tensor
    table: NeighbourTable
    reached: NeighbourTable | None
    faults: Tensor
    bounded: bool = False
    inverse: bool = False
    version: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to copy, without `version`: copied tensors have their own version counters."""
        return {name: value for name, value in self.__dict__.items() if name != "version"}

    @property
    def batch_size(self) -> int:
        return self.shape.batch_size

    @property
    def in_shape(self) -> tuple[int, ...]:
        """Sizes of the inputs' grid."""
        return self.shape.out_shape if self.inverse else self.shape.in_shape

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Sizes of the outputs' grid."""
        return self.shape.in_shape if self.inverse else self.shape.out_shape

    @property
    def ksize(self) -> tuple[int, ...]:
        return self.shape.ksize

    @property
    def subm(self) -> bool:
        """Whether the output sites are the input sites. If so, site i has neighbour j at an offset if and only if j
        has neighbour i at the opposite offset."""
        return self.shape.subm

    @property
    def kernel_volume(self) -> int:
        return self.shape.kernel_volume

    @property
    def told_faults(self) -> Faults:
        """The errors that were found in the sites while the rulebook was built, as `Faults`, with the data for their
        messages.
        """
        inputs, outputs = self.in_indices, self.out_indices
        if self.inverse:
            inputs, outputs = outputs, inputs
        return Faults(self.faults, inputs, self.shape, outputs.shape[0])

    def check(self) -> None:
        """Raise `ValueError` if an error in the sites was found while the rulebook was built. The message names the
        first wrong row, or the bound that is too small. The host waits for the device.
        """
        self.told_faults.check()

    @property
    def num_outputs(self) -> Tensor:
        """The number of output rows that are sites, a 0-dimensional int64 tensor on the device."""
        return (self.out_indices[:, 0] >= 0).sum()

    @property
    def neighbours(self) -> Tensor:
        """The input row at each offset of each output, or -1: (O, K) int32, contiguous."""
        return self.table.rows()

    @property
    def reverse(self) -> Tensor:
        """The output row that each input reaches at each offset, or -1: (N, K) int32, contiguous."""
        return self.neighbours.flip(1) if self.reached is None else self.reached.rows()

    @cached_property
    def masks(self) -> Tensor:
        """Bit masks of `neighbours`, (O, ceil(K / 32)) int32: bit `k % 32` of word `k // 32` is set if offset k has an
        input."""
        return bit_masks(self.neighbours)

    @cached_property
    def reverse_masks(self) -> Tensor:
        """Bit masks of `reverse`, (N, ceil(K / 32)) int32, in the format of `masks`."""
        return bit_masks(self.reverse)

    @cached_property
    def indice_pairs(self) -> Tensor:
        """The pairs in spconv's format, (2, K, N) int32: the input rows and the output rows of each offset's pairs, in
        the order of input rows, followed by -1."""
        listed, counts = row_pairs(self.reverse, self.out_indices.shape[0])  # row numbers of outputs, then of inputs
        beyond = torch.arange(listed.shape[2], device=counts.device) >= counts[:, None]  # (K, min(N, O))
        pairs = listed.flip(0).masked_fill_(beyond, -1)
        return torch.nn.functional.pad(pairs, (0, self.in_indices.shape[0] - pairs.shape[2]), value=-1)

    @cached_property
    def indice_pair_num(self) -> Tensor:
        """The number of pairs at each offset, (K,) int32."""
        return (self.reverse >= 0).sum(0, dtype=torch.int32)

    def swapped(self) -> Rulebook:
        """The rulebook of the inverse convolution, from this rulebook's outputs back to its inputs, with the same
        offsets."""
        return Rulebook(
            self.shape,
            self.out_indices,
            self.in_indices,
            NeighbourTable(self.reverse, self.out_indices.shape[0]) if self.reached is None else self.reached,
            self.table,
            self.faults,
            self.bounded,
            not self.inverse,
        )


def bit_masks(table: Tensor) -> Tensor:
    """Convert a table (rows, K) int32 to bit masks (rows, ceil(K / 32)) int32, with a bit for each entry except -1."""
    kernels = load_kernels()
    masks = table.new_empty((table.shape[0], -(-table.shape[1] // WORD_BITS)))
    launch_warp(kernels.set_bits, tuple(masks.shape), table, masks)
    return masks


# ---- reference -------------------------------------------------------------------------------------------------


def rulebook_reference(indices: Tensor, shape: Geometry, num_out_act_bound: int | None = None) -> Rulebook:
    """Build the rulebook by its definition in plain PyTorch, on any device, by sort, unique and searchsorted on keys.

    Arguments and errors are those of `build_rulebook`, but every error is raised immediately.
    """
    check_indices(indices, shape.dims)
    _check_outputs(indices, shape)
    check_sites(indices, shape.batch_size, shape.in_shape)
    sites = indices.long()
    reached, valid = _reached(sites, shape)  # (N, K)
    if shape.subm:
        out_indices = indices
        active, order = torch.where(sites[:, 0] >= 0, keys_of(sites, shape.in_shape), NO_KEY).sort()
    else:
        active = reached[valid].unique()
        order = torch.arange(len(active), device=indices.device)
        out_indices = sites_of(active, shape.out_shape).to(indices.dtype)
        if num_out_act_bound is not None:
            if len(active) > num_out_act_bound:
                raise ValueError(_beyond(num_out_act_bound))
            missing = num_out_act_bound - len(active)
            out_indices = torch.nn.functional.pad(out_indices, (0, 0, 0, missing), value=-1)
    reverse = torch.full_like(reached, -1)
    if len(active):
        place = torch.searchsorted(active, reached).clamp_(max=len(active) - 1)
        reverse = torch.where((active[place] == reached) & valid, order[place], -1)
    neighbours = torch.full((len(out_indices), shape.kernel_volume), -1, dtype=torch.int32, device=indices.device)
    row, offset = (reverse >= 0).nonzero(as_tuple=True)
    neighbours[reverse[row, offset], offset] = row.int()
    bounded = num_out_act_bound is not None and not shape.subm
    table = NeighbourTable(neighbours, len(indices))
    reached_table = NeighbourTable(reverse.int(), len(out_indices))
    return Rulebook(shape, indices, out_indices, table, reached_table, neighbours.new_zeros(3), bounded)


def _reached(sites: Tensor, shape: Geometry) -> tuple[Tensor, Tensor]:
    """For each input and each offset of the convolution's kernel, return the key of the output to which the input
    contributes, (N, K) int64, and whether that output is on the grid, (N, K) bool.
    """
    device = sites.device
    offset = torch.cartesian_prod(*(torch.arange(k, device=device) for k in shape.ksize)).view(-1, shape.dims)
    step, spread, pad, size = (
        torch.tensor(values, device=device) for values in (shape.stride, shape.dilation, shape.padding, shape.out_shape)
    )
    here, shift = sites[:, None, 1:], spread * offset - pad  # (N, 1, dims), (K, dims)
    if shape.transpose:
        there = here * step + shift  # (N, K, dims)
        valid = torch.ones_like(there, dtype=torch.bool)
    else:
        there = (here - shift).div(step, rounding_mode="floor")
        valid = there * step == here - shift
    valid = (valid & (there >= 0) & (there < size)).all(-1) & (sites[:, :1] >= 0)
    batch = sites[:, None, :1].expand(*there.shape[:2], 1)
    return keys_of(torch.cat([batch, there], -1), shape.out_shape), valid


# ---- by kernels ------------------------------------------------------------------------------------------------


def build_rulebook(indices: Tensor, shape: Geometry, num_out_act_bound: int | None = None) -> Rulebook:
    """Build the `Rulebook` of a convolution by kernels on PyTorch's current stream.

    Args:
        indices: (N, 1 + dims) int32 or int64, batch first, on a GPU or the CPU. Rows of -1 are not sites.
        shape: the convolution's geometry.
        num_out_act_bound: the fixed number of output rows. Rows beyond the number of outputs are -1. With a bound, the
            host does not wait for the device, so a CUDA graph can capture the call after a first call has loaded the
            kernels. A submanifold convolution has as many outputs as inputs and never waits. For a submanifold
            convolution, num_out_act_bound must be at least N.

    Raises:
        MissingExtraError: Warp is not installed.
        TypeError, ValueError: the shape, dtype or device of the indices is wrong, int32 indices cannot store all
            coordinates of the output's grid, or the bound is invalid.
        ValueError: a site is out of range or repeated, or there are more outputs than the bound. On the CPU, this
            call raises the error. On a GPU, this call raises the error only if the host waits for the GPU anyway, or
            with ROOFTOP_CHECK=1 in the environment. Otherwise, `Rulebook.check()` raises the error. Until the error is
            raised, a site out of range has no pairs, pairs of a repeated site may belong to either row, and all output
            rows are -1 if the bound is too small.
    """
    check_indices(indices, shape.dims)
    if indices.device.type not in ("cpu", "cuda"):
        raise ValueError(f"indices must be on the CPU or an NVIDIA GPU, got {indices.device}")
    _check_outputs(indices, shape)
    if num_out_act_bound is not None:
        if not isinstance(num_out_act_bound, torch.SymInt):
            num_out_act_bound = whole_number("num_out_act_bound", num_out_act_bound)
        least = indices.shape[0] if shape.subm else 0
        if not least <= num_out_act_bound <= MAX_ROWS:
            raise ValueError(f"num_out_act_bound must be from {least} to {MAX_ROWS}, got {num_out_act_bound}")
    bounded = num_out_act_bound is not None and not shape.subm
    sizes = (shape.in_shape, shape.out_shape, shape.ksize, shape.stride, shape.padding, shape.dilation)
    arguments: tuple[Any, ...] = (indices, shape.batch_size, *map(list, sizes), shape.subm, shape.transpose)
    if shape.subm:
        neighbours, faults = _submanifold(*arguments)
    elif bounded:
        out_indices, neighbours, reached, faults = _bounded(*arguments, num_out_act_bound)
    elif _is_traced_by_dynamo():
        out_indices, neighbours, reached, faults = without_num_out_act_bound(*arguments, None)
    elif _is_unseen(indices) and fit_bitmaps(indices, shape) and not checks_values(indices):
        out_indices, neighbours, reached, faults = _counted(indices, shape, arguments)
    else:
        out_indices, neighbours, reached, faults = _sparse_rulebook(*(*arguments, None))
    version, table = version_of(indices), NeighbourTable(neighbours, indices.shape[0])
    if shape.subm:
        return Rulebook(shape, indices, indices, table, None, faults, version=version)
    reached_table = NeighbourTable(reached, out_indices.shape[0])
    return Rulebook(shape, indices, out_indices, table, reached_table, faults, bounded, version=version)


def _check_outputs(indices: Tensor, shape: Geometry) -> None:
    """Raise `ValueError` if the dtype of `indices` cannot store all coordinates of the output's grid. The output
    indices have this dtype."""
    if indices.dtype == torch.int32 and not shape.subm:
        check_int32("the output's shape", shape.out_shape, "use indices.long()")


def version_of(indices: Tensor) -> int | None:
    """The number of in-place changes of a tensor. None in compiled code and in inference mode, where PyTorch does not
    count changes."""
    return None if torch.compiler.is_compiling() or indices.is_inference() else indices._version


class SparseRulebook(NamedTuple):
    """Operator that computes output indices, neighbours, reverse table and faults.

    For a submanifold convolution, output indices and reverse table are empty.
    """

    indices: Tensor
    batch_size: int
    in_shape: list[int]
    out_shape: list[int]
    ksize: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    subm: bool
    transpose: bool
    bound: int | None

    def run(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        indices, subm, bound = self.indices, self.subm, self.bound
        shape = _shape_of(*self[1:-1])
        by_bitmap = fit_bitmaps(indices, shape)
        if subm:
            tables = submanifold_by_bitmap(indices, shape) if by_bitmap else submanifold_by_hash(indices, shape)
        else:
            tables = (regular_by_bitmap if by_bitmap else regular_by_hash)(indices, shape, bound)
        if checks_values(indices):
            Faults(tables[3], indices, shape, len(tables[0])).check()
        return tables

    def fake(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        indices, subm, bound = self.indices, self.subm, self.bound
        rows, columns = indices.shape
        offsets = math.prod(self.ksize)
        outputs: int | torch.SymInt = rows
        if not subm:
            outputs = torch.library.get_ctx().new_dynamic_size(max=MAX_ROWS) if bound is None else bound
        return (
            indices.new_empty(0 if subm else outputs, columns),
            indices.new_empty(outputs, offsets, dtype=torch.int32),
            indices.new_empty(0 if subm else rows, offsets, dtype=torch.int32),
            indices.new_empty(3, dtype=torch.int32),
        )

    def cost(self, made: tuple[Tensor, ...]) -> Cost:
        """Bytes: one read of the site indices and one write of the rulebook's tables. The traffic of the hash table
        does not count, because other algorithms need no hash table.
        """
        return Cost(distinct_bytes([self.indices]), distinct_bytes(made))


_sparse_rulebook = declare("sparse_rulebook", SparseRulebook, known="itself")


@repeated_rows(FIRST)
def _submanifold(*arguments: Any) -> tuple[Tensor, Tensor]:
    """The neighbours and faults of a submanifold convolution."""
    _, neighbours, _, faults = _sparse_rulebook(*(*arguments, None))
    return neighbours, faults


@repeated_rows(FIRST)
def _bounded(*arguments: Any) -> Tables:
    return _sparse_rulebook(*arguments)


def _is_unseen(indices: Tensor) -> bool:
    """Whether no tracer or dispatch mode has to see the rulebook operator as a whole. In this case, its steps may run
    as separate calls.
    """
    return unwatched(indices) or (not torch.compiler.is_compiling() and only_infers((indices,)))


def _counted(indices: Tensor, shape: Geometry, arguments: tuple[Any, ...]) -> Tables:
    """Build the tables of all outputs in two functions, whose repeated calls run without Python (`repeated_rows`).
    Between the two, the host waits for the number of outputs."""
    cells, words, counts, faults = _reached_cells(*arguments)
    outputs = all_outputs(indices, shape, counts, faults)
    out_indices, neighbours = _paired(indices, cells, words, counts, faults, outputs, *arguments[1:])
    return out_indices, neighbours, cells, faults


@repeated_rows(FIRST)
def _reached_cells(indices: Tensor, *sizes: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return reach_by_bitmap(indices, _shape_of(*sizes))


@repeated_rows(FIRST, FIRST, NONE, NONE, NONE, ITSELF)
def _paired(
    indices: Tensor, cells: Tensor, words: Tensor, counts: Tensor, faults: Tensor, outputs: int, *sizes: Any
) -> tuple[Tensor, Tensor]:
    return pair_by_bitmap(indices, cells, words, counts, faults, _shape_of(*sizes), given(outputs))


def _shape_of(batch_size: Any, *rest: Any) -> Geometry:
    """Rebuild the geometry from the operator's arguments, whose sizes are lists."""
    in_shape, out_shape, ksize, stride, padding, dilation = map(tuple, rest[:6])
    return Geometry(batch_size, in_shape, out_shape, ksize, stride, padding, dilation, *rest[6:])


def _is_traced_by_dynamo() -> bool:
    return torch.compiler.is_compiling() and not is_exporting()


@_disable_dynamo  # unlike torch.compiler.disable, this imports the compiler only when it is needed
def without_num_out_act_bound(*arguments: Any) -> Tables:
    """Run the operator outside the graphs of a compiled program: the compiler ends one graph before this call, and
    starts another after it, when the number of outputs is known.

    With fullgraph=True, the compiler's error shows the name of this function.
    """
    return _sparse_rulebook(*arguments)


def _beyond(bound: int) -> str:
    return f"the convolution has more outputs than num_out_act_bound {bound}: pass a larger bound, or None"


# ---- public ----------------------------------------------------------------------------------------------------


def get_indice_pairs(
    indices: Tensor,
    batch_size: int,
    spatial_shape: Sequence[int],
    ksize: PerDimension,
    stride: PerDimension,
    padding: PerDimension,
    dilation: PerDimension,
    out_padding: PerDimension,
    subm: bool,
    transpose: bool,
    num_out_act_bound: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the pairs of a sparse convolution. Argument names and their order are spconv's.

    Args:
        indices: (N, 1 + dims) int32 or int64: batch and then 1 to 4 coordinates of each active site.
        batch_size: number of batch elements, some of which may have no sites.
        spatial_shape: sizes of the dense grid.
        ksize, stride, padding, dilation, out_padding: one value for all dimensions or one per dimension, as in
            `torch.nn.functional.conv3d` and, for out_padding, `conv_transpose3d`. A submanifold convolution needs
            stride 1 and an odd ksize, and ignores `padding`.
        subm: whether the output sites are the input sites.
        transpose: whether the convolution is transposed.
        num_out_act_bound: the fixed number of output rows; see `build_rulebook`.

    Returns:
        Three tensors. Output indices (O, 1 + dims), sorted, or for a submanifold convolution the input indices. Pairs
        (2, kernel volume, N) int32: input rows and output rows at each offset, followed by -1. The number of pairs at
        each offset, (kernel volume,) int32.

    Raises:
        MissingExtraError, TypeError, ValueError: as in `build_rulebook`; or batch_size, spatial_shape or an
            argument of the kernel is too small, there are more than 4 sizes, the kernel does not fit into the grid, or
            the input's or the output's grid has 2^63 cells or more.
    """
    shape = geometry(batch_size, spatial_shape, ksize, stride, padding, dilation, out_padding, subm, transpose)
    rulebook = build_rulebook(indices, shape, num_out_act_bound)
    return rulebook.out_indices, rulebook.indice_pairs, rulebook.indice_pair_num
