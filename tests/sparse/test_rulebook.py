"""The rulebook obeys its law: it has a pair (input, output, offset) exactly once if both sites are active and
`input == stride * output + dilation * offset - padding`, and otherwise not at all. For a transposed convolution, input
and output change places in this formula."""

from __future__ import annotations

import math
import pickle
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftop.errors import MissingExtraError
from rooftop.launch import INTERPRETED, count_launches, warp_launch
from rooftop.sparse import (
    Geometry,
    Rulebook,
    bitmaps,
    build_rulebook,
    geometry,
    get_indice_pairs,
    rulebook,
)
from rooftop.sparse.rulebook import rulebook_reference

FORMS = ("out_indices", "neighbours", "reverse", "indice_pairs", "indice_pair_num", "num_outputs")
KINDS = ["submanifold", "regular", "strided", "transposed"]
SURFACE = 60  # active cells of a column are those near a wavy surface


def random_sites(count: int, batch_size: int, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Different sites (count, 1 + dims), int32, in random order."""
    cells = np.random.default_rng(seed).choice(batch_size * math.prod(shape), count, replace=False)
    return torch.from_numpy(np.stack(np.unravel_index(cells, (batch_size, *shape)), 1)).int()


def surface_sites(rows: int, columns: int) -> tuple[Tensor, tuple[int, ...]]:
    """Sites (2 * rows * columns, 4) of a wavy surface, two in each column, in no order, and their grid."""
    y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    z = (SURFACE / 2 * (1 + torch.sin(x / 11) * torch.cos(y / 7))).long()
    lower = torch.stack([torch.zeros_like(z), z, y, x], -1).view(-1, 4)
    sites = torch.cat([lower, lower + torch.tensor([0, 1, 0, 0])])
    order = torch.randperm(len(sites), generator=torch.Generator().manual_seed(0))
    return sites[order].int(), (SURFACE + 2, rows, columns)


def of_kind(kind: str, batch_size: int, shape: tuple[int, ...]) -> Geometry:
    sizes: dict[str, Any] = {
        "submanifold": {"ksize": 3, "subm": True},
        "regular": {"ksize": 3, "padding": 1},
        "strided": {"ksize": 3, "stride": 2, "padding": 1},
        "transposed": {"ksize": 3, "stride": 2, "padding": 1, "out_padding": 1, "transpose": True},
    }[kind]
    return geometry(batch_size, shape, **sizes)


def keys(sites: np.ndarray, batch_size: int, grid: tuple[int, ...]) -> np.ndarray:
    return np.ravel_multi_index(tuple(sites.T), (batch_size, *grid))


def law(sites: np.ndarray, shape: Geometry) -> np.ndarray:
    """(N, K): the key of the output of each input at each offset, or -1, written directly from the definition. An input
    and an offset give at most one output, so this is the set of pairs."""
    stride, padding, dilation, size = map(np.array, (shape.stride, shape.padding, shape.dilation, shape.out_shape))
    reached = np.full((len(sites), shape.kernel_volume), -1)
    for k, offset in enumerate(np.ndindex(*shape.ksize)):
        shift = dilation * offset - padding
        if shape.transpose:
            there, whole = stride * sites[:, 1:] + shift, True
        else:
            there, remainder = np.divmod(sites[:, 1:] - shift, stride)
            whole = (remainder == 0).all(1)
        valid = whole & ((there >= 0) & (there < size)).all(1)
        reached[valid, k] = keys(np.column_stack([sites[:, :1], there])[valid], shape.batch_size, shape.out_shape)
    if shape.subm:
        reached[~np.isin(reached, keys(sites, shape.batch_size, shape.in_shape))] = -1
    return reached


def assert_law(rulebook: Rulebook, indices: Tensor, shape: Geometry) -> None:
    """The pairs are those of the definition, each once; the outputs are sorted and are exactly those in pairs; tables
    and pairs agree."""
    outputs = keys(rulebook.out_indices.cpu().numpy().astype(np.int64), shape.batch_size, shape.out_shape)
    rows, numbers = rulebook.indice_pairs.cpu().numpy(), rulebook.indice_pair_num.cpu().numpy()
    is_pair = np.arange(rows.shape[2]) < numbers[:, None]  # (K, N)
    assert ((rows >= 0) == is_pair).all()
    k, (inputs, reached) = np.nonzero(is_pair)[0], rows[:, is_pair]
    found = np.full(rulebook.reverse.shape, -1)
    found[inputs, k] = outputs[reached]
    expected = law(indices.numpy().astype(np.int64), shape)
    np.testing.assert_array_equal(found, expected)
    assert len(k) == (expected >= 0).sum()  # each once
    assert (np.diff(k * len(indices) + inputs) > 0).all()  # pairs of each offset are ordered by input row
    if shape.subm:
        assert rulebook.out_indices is rulebook.in_indices
    else:
        np.testing.assert_array_equal(outputs, np.unique(expected[expected >= 0]))
    neighbours, reverse = rulebook.neighbours.cpu().numpy(), rulebook.reverse.cpu().numpy()
    np.testing.assert_array_equal(neighbours[reached, k], inputs)
    np.testing.assert_array_equal(reverse[inputs, k], reached)
    assert (neighbours >= 0).sum() == (reverse >= 0).sum() == len(k)


def assert_same(actual: Rulebook, expected: Rulebook) -> None:
    for form in FORMS:
        torch.testing.assert_close(getattr(actual, form).cpu(), getattr(expected, form).cpu(), rtol=0, atol=0)


# ---- the law ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "columns", "voxels"),
    [("submanifold", 250, 50_000), ("strided", 250, 50_000), ("regular", 50, 10_000), ("transposed", 50, 10_000)],
)
def test_thousands_of_voxels(kind: str, columns: int, voxels: int) -> None:
    indices, grid = surface_sites(100, columns)
    assert len(indices) == voxels
    shape = of_kind(kind, 1, grid)
    with count_launches() as launches:
        rulebook = build_rulebook(indices, shape)
    expected = {"pair_submanifold"} if shape.subm else {"reach_outputs", "number_outputs", "pair_outputs"}
    assert set(launches) == {"insert_sites", *expected}
    assert_law(rulebook, indices, shape)
    assert_same(rulebook, rulebook_reference(indices, shape))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, Geometry]:
    dims = draw(st.integers(1, 4))

    def sizes(least: int, most: int) -> list[int]:
        return [draw(st.integers(least, most)) for _ in range(dims)]

    batch_size, grid, kind = draw(st.integers(1, 3)), tuple(sizes(1, 7)), draw(st.sampled_from(KINDS))
    cells = batch_size * math.prod(grid)
    indices = random_sites(draw(st.integers(0, min(cells, 40))), batch_size, grid, draw(st.integers(0, 99)))
    if draw(st.booleans()):
        indices = indices.long()
    dilation = sizes(1, 3)
    if kind == "submanifold":
        return indices, geometry(batch_size, grid, [2 * k + 1 for k in sizes(0, 2)], dilation=dilation, subm=True)
    ksize, stride, padding, transpose = sizes(1, 5), sizes(1, 3), sizes(0, 2), kind == "transposed"
    for dim in range(dims):  # make the window fit
        reach = dilation[dim] * (ksize[dim] - 1) + 1
        if transpose:
            padding[dim] = min(padding[dim], (reach - 1) // 2)
        elif reach > grid[dim] + 2 * padding[dim]:
            ksize[dim] = 1
    return indices, geometry(batch_size, grid, ksize, stride, padding, dilation, transpose=transpose)


@settings(max_examples=120, deadline=None)
@given(case=cases())
def test_any_kernel_stride_padding_dilation_and_dimension(case: tuple[Tensor, Geometry]) -> None:
    indices, shape = case
    rulebook = build_rulebook(indices, shape)
    assert rulebook.out_indices.dtype == indices.dtype
    assert_law(rulebook, indices, shape)
    assert_same(rulebook, rulebook_reference(indices, shape))


@pytest.mark.parametrize(("dims", "ksize"), [(1, 5), (2, 3), (3, 3), (4, 3)])
def test_submanifold_offsets_mirror_each_other_about_the_identity(dims: int, ksize: int) -> None:
    indices = random_sites(60, 2, (6,) * dims if dims > 1 else (40,))
    rulebook = build_rulebook(indices, geometry(2, (6,) * dims if dims > 1 else (40,), ksize, subm=True))
    centre = rulebook.kernel_volume // 2
    assert rulebook.neighbours[:, centre].tolist() == list(range(60))
    pairs, numbers = rulebook.indice_pairs, rulebook.indice_pair_num
    assert numbers.sum() > 60
    for k in range(centre):
        there, back = ({*zip(*pairs[:, n, : numbers[n]].tolist(), strict=True)} for n in (k, 2 * centre - k))
        assert there == {(i, o) for o, i in back}


def test_offsets_are_numbered_as_the_weights_of_conv3d_are() -> None:
    """Offsets are numbered row by row, with the last dimension fastest: offset 1 of 3 x 3 x 3 is (0, 0, 1), so the
    input is at (-1, -1, 0)."""
    indices = torch.tensor([[0, 1, 1, 1], [0, 0, 0, 1]])
    rulebook = build_rulebook(indices, geometry(1, (3, 3, 3), 3, subm=True))
    assert {k: row for k, row in enumerate(rulebook.neighbours[0].tolist()) if row >= 0} == {1: 1, 13: 0}


@pytest.mark.parametrize("kind", KINDS)
def test_it_convolves_as_torch_does_on_the_dense_grid(kind: str) -> None:
    grid, channels = (7, 6, 8), 3
    indices, shape = random_sites(90, 2, grid), of_kind(kind, 2, grid)
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(90, channels, dtype=torch.float64, generator=generator)
    weight = torch.randn(2, channels, 3, 3, 3, dtype=torch.float64, generator=generator)
    rulebook = build_rulebook(indices, shape)
    zero = torch.cat([features, features.new_zeros(1, channels)])  # row -1
    out = torch.einsum("okc,dck->od", zero[rulebook.neighbours], weight.flatten(2))
    dense = features.new_zeros(2, *grid, channels)
    dense[indices.long().unbind(1)] = features
    dense = dense.movedim(-1, 1)
    if shape.transpose:
        arguments: dict[str, Any] = {"stride": 2, "padding": 1, "output_padding": 1}
        full = torch.nn.functional.conv_transpose3d(dense, weight.transpose(0, 1), **arguments)
    else:
        full = torch.nn.functional.conv3d(dense, weight, stride=shape.stride, padding=shape.padding)
    assert tuple(full.shape[2:]) == shape.out_shape
    at = rulebook.out_indices.long().unbind(1)
    torch.testing.assert_close(out, full.movedim(1, -1)[at])
    if not shape.subm:  # without outputs there are no pairs
        assert full.abs().sum() == pytest.approx(float(out.abs().sum()))


# ---- forms of a rulebook ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ksize", "words"), [(1, 1), (3, 1), (5, 4)])
def test_masks_have_a_bit_for_each_neighbour(ksize: int, words: int) -> None:
    indices = random_sites(150, 1, (6, 6, 6))
    rulebook = build_rulebook(indices, geometry(1, (6, 6, 6), ksize, padding=ksize // 2))
    for masks, table in ((rulebook.masks, rulebook.neighbours), (rulebook.reverse_masks, rulebook.reverse)):
        assert masks.shape == (len(table), words)
        assert masks.dtype == torch.int32
        unsigned = masks.long() & 0xFFFFFFFF
        bits = [unsigned[:, k // 32] >> (k % 32) & 1 for k in range(ksize**3)]
        assert torch.equal(torch.stack(bits, 1) == 1, table >= 0)
        assert (unsigned.sum() > 0).item()


def test_the_inverse_convolution_restores_the_sites() -> None:
    indices = random_sites(80, 2, (9, 9))
    rulebook = build_rulebook(indices, geometry(2, (9, 9), 3, 2, 1))
    back = rulebook.swapped()
    assert back.out_indices is indices
    assert back.out_shape == (9, 9)
    assert back.in_shape == (5, 5)
    forward = {*map(tuple, (rulebook.neighbours >= 0).nonzero().tolist())}
    pairs, numbers = back.indice_pairs, back.indice_pair_num
    assert forward == {(int(pairs[0, k, n]), k) for k in range(9) for n in range(int(numbers[k]))}
    assert torch.equal(back.masks, rulebook.reverse_masks)
    assert_same(back.swapped(), rulebook)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_transposed_is_the_adjoint(dims: int) -> None:
    """A transposed convolution has the reversed pairs of a convolution, and pairs to sites that were not active."""
    grid = (9,) * dims  # (9 - 1) * 2 - 2 + 3 is what transposed makes of 5: again 9
    indices = random_sites(8, 1, grid)
    forward = build_rulebook(indices, geometry(1, grid, 3, 2, 1))
    back = build_rulebook(forward.out_indices, geometry(1, forward.out_shape, 3, 2, 1, transpose=True))
    assert back.out_shape == grid
    place = {tuple(site): row for row, site in enumerate(indices.tolist())}
    rows = [place.get(tuple(site), -1) for site in back.out_indices.tolist()]
    assert set(rows) >= set(range(8))
    active = torch.tensor(rows) >= 0
    ordered = torch.empty_like(forward.reverse)
    ordered[torch.tensor(rows)[active]] = back.neighbours[active]
    assert torch.equal(ordered, forward.reverse)


def test_permuting_the_inputs_permutes_rows_and_nothing_else() -> None:
    indices = random_sites(70, 2, (8, 8))
    order = torch.randperm(70, generator=torch.Generator().manual_seed(3))
    for kind in KINDS:
        shape = of_kind(kind, 2, (8, 8))
        plain, permuted = build_rulebook(indices, shape), build_rulebook(indices[order], shape)
        rows = torch.where(permuted.neighbours >= 0, order[permuted.neighbours], -1)
        if shape.subm:
            assert torch.equal(rows.int(), plain.neighbours[order])
        else:
            assert torch.equal(permuted.out_indices, plain.out_indices)
            assert torch.equal(rows.int(), plain.neighbours)


def test_spconv_s_function_gives_plain_tensors() -> None:
    indices = torch.tensor([[0, 0], [0, 3], [1, 2]], dtype=torch.int32)
    out, pairs, numbers = get_indice_pairs(indices, 2, [4], 2, 2, 0, 1, 0, False, False)
    assert out.tolist() == [[0, 0], [0, 1], [1, 1]]
    assert pairs.tolist() == [[[0, 2, -1], [1, -1, -1]], [[0, 2, -1], [1, -1, -1]]]
    assert numbers.tolist() == [2, 1]
    assert {out.dtype, pairs.dtype, numbers.dtype} == {torch.int32}


def test_a_rulebook_pickles() -> None:
    rulebook = build_rulebook(random_sites(20, 1, (6, 6)), of_kind("strided", 1, (6, 6)))
    assert_same(pickle.loads(pickle.dumps(rulebook)), rulebook)


# ---- legal edges -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dims", [1, 2, 3, 4])
def test_no_sites(kind: str, dims: int) -> None:
    indices = torch.empty((0, 1 + dims), dtype=torch.int32)
    rulebook = build_rulebook(indices, of_kind(kind, 2, (4,) * dims))
    assert rulebook.out_indices.shape == (0, 1 + dims)
    assert rulebook.indice_pairs.shape == (2, 3**dims, 0)
    assert rulebook.masks.shape == (0, -(-(3**dims) // 32))
    assert not rulebook.indice_pair_num.any()
    assert rulebook.num_outputs == 0


@pytest.mark.parametrize("kind", KINDS)
def test_one_site(kind: str) -> None:
    indices, shape = torch.tensor([[1, 2, 3, 0]]), of_kind(kind, 2, (4, 4, 4))
    assert_law(build_rulebook(indices, shape), indices, shape)


def test_all_outputs_vanish() -> None:
    indices = torch.tensor([[0, 1, 0], [0, 3, 1]])
    rulebook = build_rulebook(indices, geometry(1, (5, 5), 1, 2))
    assert rulebook.out_indices.shape == (0, 3)
    assert rulebook.reverse.tolist() == [[-1], [-1]]
    assert rulebook.indice_pairs.tolist() == [[[-1, -1]], [[-1, -1]]]


@pytest.mark.parametrize("kind", KINDS)
def test_keys_beyond_int32_and_coordinates_near_2_to_20(kind: str) -> None:
    side = 2**20 - 8 if kind == "transposed" else 2**20  # doubles the size, and 2^63 cells would be too many
    near = torch.cartesian_prod(*[torch.arange(side - 3, side)] * 3)
    # batch elements 1 and 2 have no sites
    indices = torch.cat([torch.nn.functional.pad(near, (1, 0), value=b) for b in (0, 3)])
    shape = of_kind(kind, 4 if kind != "transposed" else 1, (side,) * 3)
    indices = indices[indices[:, 0] < shape.batch_size]
    assert_law(build_rulebook(indices, shape), indices, shape)


def test_outputs_beyond_int32_need_int64_indices() -> None:
    indices = torch.tensor([[0, 2**30]], dtype=torch.int32)
    shape = geometry(1, (2**31 - 1,), 2, 2, transpose=True)
    for build in (build_rulebook, rulebook_reference):
        for bound in (None, 5):
            with pytest.raises(ValueError, match=r"output's shape \(4294967294,\) exceeds 2\^31.*use indices.long\(\)"):
                build(indices, shape, bound)
        assert build(indices.long(), shape).out_indices.tolist() == [[0, 2**31], [0, 2**31 + 1]]
    just = geometry(1, (2**30,), 2, 2, transpose=True)  # an output of 2^31 cells
    assert build_rulebook(indices - torch.tensor([0, 1]).int(), just).out_indices.tolist() == [
        [0, 2**31 - 2],
        [0, 2**31 - 1],
    ]
    same = geometry(1, (2**32,), 3, subm=True)  # keeps the sites of its inputs
    assert build_rulebook(indices, same).out_indices is indices


def test_batch_elements_do_not_see_each_other() -> None:
    sites = torch.tensor([[0, 0], [0, 1], [0, 2]])
    both = torch.cat([sites, sites + torch.tensor([2, 0])])  # element 1 has no sites
    for kind in KINDS:
        one, two = (build_rulebook(indices, of_kind(kind, 3, (3,))) for indices in (sites, both))
        inputs, outputs = one.reverse.shape[0], len(one.out_indices)
        assert len(two.out_indices) == 2 * outputs
        shifted = torch.where(one.neighbours >= 0, one.neighbours + inputs, -1)
        assert torch.equal(two.neighbours, torch.cat([one.neighbours, shifted]))


def test_strided_indices_are_read_as_they_are() -> None:
    indices = random_sites(30, 1, (6, 6))
    apart = torch.cat([indices, indices + 1], 1)[:, :3]
    assert not apart.is_contiguous()
    shape = of_kind("strided", 1, (6, 6))
    assert_same(build_rulebook(apart, shape), build_rulebook(indices, shape))


def test_a_table_that_is_too_small_grows() -> None:
    """A single site reaches 125 outputs, more than the first table has room for."""
    indices = torch.tensor([[0, 50, 50, 50]])
    with count_launches() as launches:
        rulebook = build_rulebook(indices, geometry(1, (100,) * 3, 5))
    assert launches["reach_outputs"] > 1
    assert_law(rulebook, indices, geometry(1, (100,) * 3, 5))


# ---- a fixed number of outputs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["regular", "strided", "transposed"])
@pytest.mark.parametrize("spare", [0, 1, 50])
def test_a_bound_pads_the_outputs(kind: str, spare: int) -> None:
    indices, shape = random_sites(40, 2, (7, 7)), of_kind(kind, 2, (7, 7))
    free = build_rulebook(indices, shape)
    outputs = len(free.out_indices)
    bounded = build_rulebook(indices, shape, outputs + spare)
    assert torch.equal(bounded.out_indices[:outputs], free.out_indices)
    assert (bounded.out_indices[outputs:] == -1).all()
    assert (bounded.neighbours[outputs:] == -1).all()
    assert bounded.num_outputs == outputs
    assert torch.equal(bounded.indice_pairs, free.indice_pairs)
    assert_same(bounded, rulebook_reference(indices, shape, outputs + spare))
    with pytest.raises(ValueError, match=f"more outputs than num_out_act_bound {outputs - 1}: pass a larger"):
        build_rulebook(indices, shape, outputs - 1)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_padding_are_no_sites(kind: str) -> None:
    """The result of a bounded convolution is the input of the next."""
    indices, shape = random_sites(30, 1, (8, 8)), of_kind(kind, 1, (8, 8))
    padded = torch.nn.functional.pad(indices, (0, 0, 0, 5), value=-1)
    rulebook, plain = build_rulebook(padded, shape), build_rulebook(indices, shape)
    assert_same(rulebook, rulebook_reference(padded, shape))
    assert torch.equal(rulebook.neighbours[: len(plain.neighbours)], plain.neighbours)
    assert (rulebook.reverse[30:] == -1).all()
    assert rulebook.num_outputs == len(plain.out_indices)


# ---- errors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bound", [None, 60])
def test_wrong_sites(kind: str, bound: int | None) -> None:
    shape = of_kind(kind, 2, (4, 4))
    repeated = torch.tensor([[0, 1, 1], [0, 2, 2], [1, 0, 0], [0, 2, 2], [0, 1, 1]])
    with pytest.raises(ValueError, match=r"rows 1 and 3 of indices are the same site \[0, 2, 2\].*coalesce"):
        build_rulebook(repeated, shape, bound)
    for wrong in ([0, 4, 0], [0, 0, -1], [2, 0, 0], [-1, 0, 0]):
        indices = torch.tensor([[0, 1, 1], wrong, [0, 0, 9]])
        with pytest.raises(ValueError, match=r"row 1 of indices is .*at least 0 and below \(2, 4, 4\)") as raised:
            build_rulebook(indices, shape, bound)
        assert str(wrong) in str(raised.value)


def test_faults_that_wait_are_raised_when_asked_for() -> None:
    """On a GPU, only `check` raises errors found by kernels. The rulebook of the inverse convolution raises the errors,
    too."""
    rulebook = build_rulebook(random_sites(9, 1, (6, 6)), of_kind("strided", 1, (6, 6)))
    rulebook.check()
    outputs, repeated = len(rulebook.out_indices), rulebook.in_indices[[0, 1, 2, 3, 1, 5, 6, 7, 8]]
    for faults, message in (
        ([1, 0, 0], "rows 1 and 4"),
        ([0, 0, 1], f"more outputs than num_out_act_bound {outputs}:"),
    ):
        wrong = replace(rulebook, in_indices=repeated, faults=torch.tensor(faults))
        for each in (wrong, wrong.swapped()):
            with pytest.raises(ValueError, match=message):
                each.check()


def test_wrong_sites_of_a_convolution_without_outputs() -> None:
    with pytest.raises(ValueError, match="rows 0 and 1 of indices are the same site"):
        build_rulebook(torch.tensor([[0, 1], [0, 1]]), geometry(1, (5,), 1, 2))


WRONG_INDICES = [
    (torch.zeros(3, 4), TypeError, r"torch\.int32 or torch\.int64, got torch\.float32: convert"),
    (torch.zeros(3, 4, dtype=torch.int64), ValueError, r"\(N, 3\).*spatial_shape has 2 dimensions; got \(3, 4\)"),
    (torch.zeros(3, dtype=torch.int32), ValueError, r"got \(3,\)"),
    ([[0, 0, 0]], TypeError, "a tensor, got list"),
    (torch.zeros(3, 3, dtype=torch.int32, device="meta"), ValueError, "on the CPU or an NVIDIA GPU, got meta"),
]


@pytest.mark.parametrize(("indices", "error", "message"), WRONG_INDICES)
def test_wrong_tensors(indices: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build_rulebook(indices, geometry(1, (4, 4), 3, subm=True))


WRONG_SIZES: list[tuple[dict[str, Any], str]] = [
    ({"spatial_shape": (4,) * 5}, r"1 to 4 dimensions, got \(4, 4, 4, 4, 4\)"),
    ({"spatial_shape": ()}, r"1 to 4 dimensions, got \(\)"),
    ({"spatial_shape": (4, 0)}, r"spatial_shape must be at least 1 in each dimension, got \(4, 0\)"),
    ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
    ({"ksize": (3, 3, 3)}, r"ksize must be one integer, or 2 integers \(one per dimension\), got \(3, 3, 3\)"),
    ({"stride": 0}, "stride must be at least 1"),
    ({"padding": -1}, "padding must be at least 0"),
    ({"ksize": 9}, r"a kernel of \(9, 9\).*does not fit into spatial_shape \(4, 4\).*\(-4, -4\)"),
    ({"out_padding": 1}, "out_padding must be 0 except for transposed convolutions"),
    ({"ksize": 2**16}, r"a kernel of \(65536, 65536\) has more offsets than int32 can number"),
    ({"subm": True, "ksize": 2}, r"ksize must be odd, got \(2, 2\)"),
    ({"subm": True, "stride": 2}, r"stride must be 1, got \(2, 2\)"),
    ({"subm": True, "transpose": True}, "submanifold or transposed, not both"),
    ({"spatial_shape": (2**31, 2**31), "batch_size": 4}, r"is 2\^63 cells or more"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG_SIZES)
def test_wrong_sizes(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        geometry(**{"batch_size": 1, "spatial_shape": (4, 4), "ksize": 3, **wrong})


def test_wrong_bounds() -> None:
    indices = random_sites(5, 1, (4, 4))
    with pytest.raises(ValueError, match=r"num_out_act_bound must be from 0 to \d+, got -1"):
        build_rulebook(indices, of_kind("strided", 1, (4, 4)), -1)
    for bound in ("5", True, 2.5, float("nan")):
        with pytest.raises(TypeError, match="num_out_act_bound must be an integer, got"):
            build_rulebook(random_sites(5, 1, (8,)), geometry(1, (8,), 3, 2, 1), bound)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"num_out_act_bound must be from 5 to \d+, got 4"):
        build_rulebook(indices, of_kind("submanifold", 1, (4, 4)), 4)


def test_without_warp_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "warp", None)
    with pytest.raises(MissingExtraError, match=r'pip install "rooftop\[sparse\]"'):
        build_rulebook(random_sites(5, 1, (4, 4)), of_kind("strided", 1, (4, 4)))


# ---- on a GPU --------------------------------------------------------------------------------------------------


def test_a_first_launch_loads_the_kernels_in_one_thread_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """If two threads load kernels at once, Warp itself sometimes raises `KeyError`."""
    import warp

    launch, loading, met = warp.launch, [True], []

    def slow_at_first(*arguments: Any, **options: Any) -> None:
        met.append(loading[0])
        if len(met) == 1:
            time.sleep(0.05)
            loading[0] = False
        launch(*arguments, **options)

    monkeypatch.setattr(warp, "launch", slow_at_first)
    monkeypatch.setattr(warp_launch, "_LOADED", set())
    sites = random_sites(20, 1, (5, 5))
    with ThreadPoolExecutor(4) as threads:
        built = list(threads.map(lambda _: build_rulebook(sites, geometry(1, (5, 5), 3, subm=True)), range(4)))
    assert met == [True] + [False] * 7
    assert all(torch.equal(each.neighbours, built[0].neighbours) for each in built)


# ---- by bitmaps --------------------------------------------------------------------------------------------------


def by_both(indices: Tensor, shape: Geometry, bound: int | None, monkeypatch: pytest.MonkeyPatch) -> list[Rulebook]:
    """The rulebook built with bitmaps and with hash tables."""
    found = []
    for fit, kernel in ((True, "mark_sites"), (False, "insert_sites")):
        monkeypatch.setattr(rulebook, "fit_bitmaps", lambda *_, fit=fit: fit)
        with count_launches() as launches:
            found.append(build_rulebook(indices, shape, bound))
        assert kernel in launches
    return found


@pytest.mark.skipif(not INTERPRETED, reason="without kernels the CPU uses hash tables")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grid", [(70,), (5, 6, 7), (3, 4, 5, 3)], ids=str)
def test_bitmaps_give_what_hash_tables_give(kind: str, grid: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    shape = of_kind(kind, 2, grid)
    for dtype in (torch.int32, torch.int64):
        indices = random_sites(50, 2, grid).to(dtype)
        indices[25::9] = -1
        plain = by_both(indices, shape, None, monkeypatch)
        assert_same(*plain)
        if not shape.subm:
            assert_same(*by_both(indices, shape, len(plain[0].out_indices) + 3 * (dtype == torch.int32), monkeypatch))


@pytest.mark.skipif(not INTERPRETED, reason="without kernels the CPU uses hash tables")
@pytest.mark.parametrize("kind", KINDS)
def test_bitmaps_find_what_is_wrong(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rulebook, "checks_values", lambda _: False)  # as on a GPU
    shape = of_kind(kind, 1, (8, 8))
    right = random_sites(20, 1, (8, 8)).long()
    wrong = {
        "off the grid": (torch.tensor([[0, 3, 8]]), 1),
        "before it": (torch.tensor([[0, -1, 3]]), 1),
        "in no batch": (torch.tensor([[1, 3, 3]]), 1),
        "beyond 32 bits": (torch.tensor([[0, 3, 2**32 + 1]]), 1),
        "half missing": (torch.tensor([[-1, 3, -1]]), 1),
        "a batch before all and nothing else": (torch.tensor([[-2, -1, -1]]), 1),
        "a batch beyond 32 bits and nothing else": (torch.tensor([[2**32, -1, -1]]), 1),
        "a place beyond 32 bits and nothing else": (torch.tensor([[-1, -1, -(2**40)]]), 1),
        "there twice": (right[:1], 0),
    }
    for what, (row, flag) in wrong.items():
        expected = [int(flag == place) for place in range(3)]
        assert build_rulebook(torch.cat([right, row]), shape, 300).faults.tolist() == expected, what
    assert build_rulebook(right, shape, 300).faults.tolist() == [0, 0, 0]
    if not shape.subm:
        outputs = len(build_rulebook(right, shape).out_indices)
        few = build_rulebook(right, shape, outputs - 1)
        assert few.faults.tolist() == [0, 0, 1]
        for table in (few.out_indices, few.neighbours, few.reverse):
            assert (table == -1).all()


def test_bitmaps_are_for_grids_that_are_not_too_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bitmaps, "INTERPRETED", True)
    few, many = random_sites(9, 1, (4, 4, 4)), random_sites(9, 1, (4, 4, 4)).repeat(2000, 1)
    for sites, side, fit in ((few, 256, True), (few, 257, False), (many, 400, True), (many, 1291, False)):
        assert bitmaps.fit_bitmaps(sites, geometry(1, (side,) * 3, 3, subm=True)) is fit
        assert bitmaps.fit_bitmaps(sites, geometry(1, (side,) * 3, 3, 2, 1)) is fit
    assert not bitmaps.fit_bitmaps(few[:0], geometry(1, (8, 8, 8), 3, subm=True))
    assert not bitmaps.fit_bitmaps(few, geometry(1, (8, 8, 8), 3, subm=True, dilation=2**30))
    assert not bitmaps.fit_bitmaps(few[:, :2], geometry(1, (8,), 1 << 21, padding=1 << 21))  # above MAX_VOLUME
    assert bitmaps.fit_bitmaps(few[:, :2], geometry(1, (8,), 1 << 20, padding=1 << 20))
    for transpose in (False, True):
        assert not bitmaps.fit_bitmaps(few[:1, :2], geometry(1, (1,), 3, 2**31, 1, transpose=transpose))
        assert bitmaps.fit_bitmaps(few[:1, :2], geometry(1, (1,), 3, 2**31 - 1, 1, transpose=transpose))
    monkeypatch.setattr(bitmaps, "INTERPRETED", False)
    assert not bitmaps.fit_bitmaps(few, geometry(1, (8, 8, 8), 3, subm=True))


@pytest.mark.parametrize("stride", [2**31 - 1, 2**31, 2**40])
@pytest.mark.parametrize("transpose", [False, True])
def test_strides_of_any_size_by_bitmaps_or_hash_tables(stride: int, transpose: bool) -> None:
    shape = geometry(2, (1 if transpose else 8,), 3, stride, 1, transpose=transpose)
    sites = torch.tensor([[1, 0], [0, 0]])
    assert_same(build_rulebook(sites, shape), rulebook_reference(sites, shape))


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreted run")
def test_bitmaps_through_the_interpreter(interpreted: Callable[..., int]) -> None:
    assert interpreted(__file__, "-k", "bitmaps") > 15


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_bitmaps_give_what_hash_tables_give_on_a_gpu(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    indices, grid = surface_sites(300, 300)
    shape = of_kind(kind, 1, grid)
    outputs = len(build_rulebook(indices.cuda(), shape).out_indices)
    for bound in (None, max(outputs, len(indices)), outputs + 1000):
        assert_same(*by_both(indices.cuda(), shape, bound, monkeypatch))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_half_a_million_voxels_on_a_gpu(kind: str) -> None:
    indices, grid = surface_sites(500, 500)
    shape = of_kind(kind, 1, grid)
    rulebook = build_rulebook(indices.cuda(), shape)
    assert_law(rulebook, indices, shape)
    assert_same(rulebook, build_rulebook(indices, shape))
    for _ in range(9):
        assert_same(build_rulebook(indices.cuda(), shape), rulebook)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_wrong_sites_on_a_gpu(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that waits for the GPU raises; for other calls, check() raises, or with ROOFTOP_CHECK=1 the call
    itself."""
    shape = of_kind(kind, 1, (4, 4))
    repeated = torch.tensor([[0, 1, 1], [0, 2, 2], [0, 1, 1]], device="cuda")
    outside = torch.tensor([[0, 1, 1], [0, 2, 4]], device="cuda")
    for indices, message in ((repeated, "rows 0 and 2"), (outside, "row 1 of indices")):
        rulebook = build_rulebook(indices, shape, 60)
        with pytest.raises(ValueError, match=message):
            rulebook.check()
        with pytest.raises(ValueError, match=message):
            rulebook.swapped().check()
        if not shape.subm:
            with pytest.raises(ValueError, match=message):
                build_rulebook(indices, shape)
    monkeypatch.setenv("ROOFTOP_CHECK", "1")
    with pytest.raises(ValueError, match="rows 0 and 2"):
        build_rulebook(repeated, shape, 60)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_legal_edges_on_a_gpu(kind: str) -> None:
    for sites in ([], [[0, 1, 1]], [[1, 3, 3], [0, 0, 0]]):
        indices, shape = torch.tensor(sites, dtype=torch.int64).view(-1, 3), of_kind(kind, 2, (4, 4))
        for bound in (None, 40):
            rulebook, expected = (build_rulebook(t, shape, bound) for t in (indices.cuda(), indices))
            assert_same(rulebook, expected)
            assert torch.equal(rulebook.masks.cpu(), expected.masks)
    vanished = build_rulebook(torch.tensor([[0, 1, 0], [0, 3, 1]], device="cuda"), geometry(1, (5, 5), 1, 2))
    assert vanished.out_indices.shape == (0, 3)
    assert build_rulebook(indices[:0].cuda(), of_kind("strided", 2, (4, 4)), 0).out_indices.shape == (0, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["regular", "strided", "transposed"])
def test_a_bound_that_is_too_small_on_a_gpu_leaves_no_outputs(kind: str) -> None:
    indices, shape = random_sites(2000, 1, (64, 64)).cuda(), of_kind(kind, 1, (64, 64))
    for bound in (1, len(build_rulebook(indices, shape).out_indices) - 1):
        rulebook = build_rulebook(indices, shape, bound)
        assert (rulebook.out_indices == -1).all()
        assert (rulebook.neighbours == -1).all()
        assert (rulebook.reverse == -1).all()
        with pytest.raises(ValueError, match=f"more outputs than num_out_act_bound {bound}"):
            rulebook.check()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_captured_in_a_graph(kind: str) -> None:
    """A rulebook is captured once and replayed on other sites, on a separate stream."""
    shape, many = of_kind(kind, 1, (32, 32, 32)), 30_000
    first, second = (random_sites(1000, 1, (32, 32, 32), seed) for seed in (1, 2))
    indices = first.cuda()

    def build() -> dict[str, Tensor]:
        rulebook = build_rulebook(indices, shape, many)
        return {name: getattr(rulebook, name) for name in (*FORMS, "masks")}

    build()  # a kernel cannot be loaded within a capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forms = build()
    for sites in (second, first):
        indices.copy_(sites)
        graph.replay()
        expected = build_rulebook(sites, shape, many)
        for name, form in forms.items():
            assert torch.equal(form.cpu(), getattr(expected, name)), name


@pytest.mark.gpu
def test_on_the_current_stream() -> None:
    """Sites that a busy stream has not written yet are read after they are written."""
    shape, sites = of_kind("submanifold", 1, (32, 32, 32)), random_sites(1000, 1, (32, 32, 32))
    wrong, right = random_sites(1000, 1, (32, 32, 32), 5).cuda(), sites.cuda()
    build_rulebook(wrong, shape)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        wrong.copy_(right)
        rulebook = build_rulebook(wrong, shape)
    stream.synchronize()
    assert_same(rulebook, build_rulebook(sites, shape))
