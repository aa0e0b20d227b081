"""conv_act, both ways: the CPU implementation, and (in a separate process) the Triton kernels interpreted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from rooftop.cost import CountingMode
from rooftop.kernels import conv_act, conv_act_plan
from rooftop.kernels.convolutions import launches
from rooftop.kernels.convolutions import tables as conv_act_tables
from rooftop.kernels.convolutions.launches import box_of, channels_fastest, copied, forward
from rooftop.kernels.convolutions.tables import (
    FEW,
    LONG_RUN,
    MANY,
    RUNS_OF_CHANNELS,
    SHORT_RUN,
    ConvPlan,
    ConvTile,
    Entry,
    Geometry,
    Problem,
    choose,
    depthwise_tile,
    fitted,
)
from rooftop.kernels.operands.activations import ACTIVATIONS, activated
from rooftop.launch import INTERPRETED, count_launches, fast_path, operators
from rooftop.testing import assert_as_accurate

HALVES = [torch.bfloat16, torch.float16]
SINGLE = ConvTile("single", 32, 32, 16, 4, 2, group=2)
TILES = {
    "persistent": replace(SINGLE, kernel="persistent"),
    "persistent, in four parts": replace(SINGLE, kernel="persistent", parts=4, columns=16),
    "single": SINGLE,
    "single, K in three, in two parts": replace(SINGLE, split=3, parts=2),
    "gathered": replace(SINGLE, kernel="gathered"),
    "gathered, K in three": replace(SINGLE, kernel="gathered", split=3),
}
# N, C, H, W, O, kernel, stride, padding, dilation
Shape = tuple[int, int, int, int, int, int | tuple[int, int], int | tuple[int, int], int | tuple[int, int], int]
SHAPES: dict[str, Shape] = {
    "1 x 1": (3, 16, 7, 5, 40, 1, 1, 0, 1),
    "1 x 1, stride 2, odd": (2, 32, 7, 9, 24, 1, 2, 0, 1),
    "3 x 3": (2, 32, 5, 6, 40, 3, 1, 1, 1),
    "3 x 3, stride 2": (2, 16, 8, 6, 24, 3, 2, 1, 1),
    "3 x 3, dilated": (1, 16, 6, 6, 24, 3, 1, 2, 2),
    "3 x 2, two strides": (2, 16, 6, 9, 24, (3, 2), (2, 3), (1, 2), 1),
    "the stem": (2, 3, 13, 12, 24, 7, 2, 3, 1),
    "five channels, dilated": (1, 5, 9, 10, 24, 3, 2, 1, 2),
    "five channels, 1 x 1, dilated": (2, 5, 6, 7, 24, 1, 1, 0, 2),
}
# ResNet-50's convolutions: channels, size, out channels, kernel, stride, whether there is a residual, activation
RESNET_50 = [
    (3, 224, 64, 7, 2, False, "relu"),
    *[(64, 56, 64, k, 1, False, "relu") for k in (1, 3)],
    (64, 56, 256, 1, 1, True, "relu"),
    (64, 56, 256, 1, 1, False, "none"),
    (256, 56, 64, 1, 1, False, "relu"),
    *[
        case
        for width, size in ((128, 28), (256, 14), (512, 7))
        for case in (
            (2 * width, 2 * size, width, 1, 1, False, "relu"),
            (width, 2 * size, width, 3, 2, False, "relu"),
            (width, size, width, 3, 1, False, "relu"),
            (width, size, 4 * width, 1, 1, True, "relu"),
            (2 * width, 2 * size, 4 * width, 1, 2, False, "none"),
            (4 * width, size, width, 1, 1, False, "relu"),
        )
    ],
]


def by_torch(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, activation: str = "none",
    **options: object,
) -> Tensor:  # fmt: skip
    """The reference in PyTorch, one call after the other."""
    y = functional.conv2d(x, weight, bias, **options)  # type: ignore[arg-type]
    return activated(y if residual is None else y + residual, activation)


def pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return value if isinstance(value, tuple) else (value, value)


class Case:
    """Operands of a convolution, and the number of its calls."""

    def __init__(
        self, shape: Shape, dtype: torch.dtype = torch.float32, *, bias: bool = True, residual: bool = True,
        last: bool = True, device: str = "cpu", groups: int = 1,
    ) -> None:  # fmt: skip
        batch, channels, height, width, out, kernel, stride, padding, dilation = shape
        generator = torch.Generator().manual_seed(sum(shape[:5]))

        def random(*size: int) -> Tensor:
            t = torch.randn(*size, generator=generator).to(device=device, dtype=dtype)
            return t.contiguous(memory_format=torch.channels_last) if last and len(size) == 4 else t

        taps = pair(kernel)[0] * pair(kernel)[1]
        self.g = Geometry(
            batch, channels, height, width, out, pair(kernel), pair(stride), pair(padding), pair(dilation), groups
        )
        weight = random(out, channels // groups, *pair(kernel)) / max(1, taps * channels // groups) ** 0.5
        added = random(batch, out, *self.g.out) if residual else None
        self.tensors = (random(batch, channels, height, width), weight, random(out) if bias else None, added)
        self.options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}

    def torch(self, activation: str, double: bool = False) -> Tensor:
        x, weight, bias, residual = (t.double() if double and t is not None else t for t in self.tensors)
        assert x is not None
        assert weight is not None
        return by_torch(x, weight, bias, residual, activation, **self.options)

    def ours(self, activation: str) -> Tensor:
        return conv_act(*self.tensors, activation=activation, **self.options)  # type: ignore[arg-type]

    def plan(self, tile: ConvTile) -> ConvPlan:
        """The plan with this tile, if the tile fits."""
        x, weight, _, residual = self.tensors
        seen = copied(x, weight, residual, self.g)
        found = fitted(tile, problem_of(self.g, residual is not None, dtype=x.dtype, copied=seen))
        return ConvPlan(found.kernel, found, "")

    def planned(self, plan: ConvPlan, activation: str) -> Tensor:
        return forward(plan, *self.tensors, self.g, activation, False)[0]

    def check(self, y: Tensor, activation: str) -> None:
        assert_as_accurate(y, self.torch(activation), self.torch(activation, double=True), what=f"{self.g}")


# ---- the numerics gate --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gate(activation: str, dtype: torch.dtype) -> None:
    for last in (False, True):
        case = Case(SHAPES["3 x 3"], dtype, last=last)
        case.check(case.ours(activation), activation)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_gate_of_any_shape(shape: Shape) -> None:
    for given in ({"residual": False}, {"bias": False}, {"last": False}):
        case = Case(shape, torch.bfloat16, **given)  # type: ignore[arg-type]
        with count_launches() as launches:
            y = case.ours("relu")
        assert bool(launches) == INTERPRETED
        case.check(y, "relu")


@pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter")
@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        *[("the stem", kernel) for kernel in TILES],
        *[(shape, kernel) for shape in SHAPES if shape != "the stem" for kernel in TILES if "three" in kernel],
    ],
)
def test_every_kernel_of_several_tiles(name: str, kernel: str) -> None:
    shape, tile = SHAPES[name], TILES[kernel]
    case = Case(shape, torch.float16, residual=shape[4] == 40)
    assert tile.kernel == "gathered" or copied(*case.tensors[:2], case.tensors[3], case.g)
    with count_launches() as launches:
        y = case.planned(case.plan(tile), "relu")
    assert launches[f"conv_act_{tile.kernel}"] == 1
    assert launches["conv_act_pack"] == (2 if case.g.channels < 8 and tile.kernel != "gathered" else 0)
    assert y.is_contiguous(memory_format=torch.channels_last)
    case.check(y, "relu")


@pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter")
@pytest.mark.parametrize("channels", [20, 9])
def test_gathered_takes_any_channels(channels: int) -> None:
    case = Case((1, channels, 5, 6, 13, 3, 2, 1, 1), torch.float16)
    assert not copied(*case.tensors[:2], None, case.g)
    for split in (1, 2):
        tile = replace(SINGLE, kernel="gathered", split=split)
        case.check(case.planned(case.plan(tile), "silu"), "silu")


@pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter")
def test_programs_that_share_k_leave_their_counters_zero() -> None:
    case, tile = Case(SHAPES["3 x 3"], torch.float16), replace(SINGLE, split=3)
    plan = case.plan(tile)
    first, second = case.planned(plan, "relu"), case.planned(plan, "relu")
    assert torch.equal(first, second)


@pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter")
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("last", [False, True], ids=["", "channels last"])
def test_one_pass_follows_a_library(last: bool, keep: bool) -> None:
    case = Case((3, 8, 5, 7, 12, 3, 1, 1, 1), last=last)
    with count_launches() as launches:
        y, before = forward(ConvPlan("library", None, ""), *case.tensors, case.g, "silu", keep)
    assert launches == {"conv_act_finish": 1}
    case.check(y, "silu")
    if keep:
        case.check(before, "none")


def test_the_pass_after_a_library_takes_images_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA limits a grid to 65535 in all dimensions except the first."""
    grids: list[tuple[int, ...]] = []
    monkeypatch.setattr(launches, "launch", lambda kernel, grid, *_, **__: grids.append(grid))
    sums = torch.empty(1, 3, 8192, 8192, device="meta")
    launches.finish(sums, torch.empty(3, device="meta"), None, "relu", sums, None)
    assert [max(grid[1:], default=1) <= 65535 for grid in grids] == [True]


@pytest.mark.parametrize(
    ("rows", "size", "expected"),
    [
        (128, (1, 1, 401_408), (1, 1, 128)),  # 1 x 1: the rows are used unchanged
        (128, (256, 56, 56), (2, 8, 8)),
        (128, (256, 28, 28), (8, 4, 4)),
        (128, (256, 14, 14), (32, 2, 2)),
        (128, (256, 7, 7), (128, 1, 1)),
        (64, (1, 7, 7), (1, 8, 8)),
        (64, (1, 14, 14), (1, 4, 16)),
    ],
)
def test_boxes_waste_as_few_pixels_as_can_be(
    rows: int, size: tuple[int, int, int], expected: tuple[int, int, int]
) -> None:
    assert box_of(rows, *size) == expected


# ---- laws ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_without_images_it_is_as_in_pytorch(dtype: torch.dtype) -> None:
    case = Case((0, 16, 5, 5, 3, 3, 2, 1, 1), dtype)
    torch.testing.assert_close(case.ours("relu"), case.torch("relu"))
    leaves = [t.requires_grad_() for t in case.tensors if t is not None]
    ours, theirs = (torch.autograd.grad(call("relu").sum(), leaves) for call in (case.ours, case.torch))
    torch.testing.assert_close(ours, theirs)


def test_a_shift_of_the_input_shifts_the_result() -> None:
    case = Case((1, 16, 6, 12, 8, 3, 1, 1, 1), residual=False)
    x, *others = case.tensors
    y, shifted = case.ours("silu"), conv_act(x.roll(2, dims=3), *others, activation="silu", padding=1)
    torch.testing.assert_close(shifted[..., 3:-1], y[..., 1:-3])


def test_the_residual_comes_before_the_activation() -> None:
    case = Case(SHAPES["1 x 1"])
    x, weight, bias, _ = case.tensors
    y = conv_act(x, weight, bias, -by_torch(x, weight, bias), activation="sigmoid")
    torch.testing.assert_close(y, torch.full_like(y, 0.5))


@pytest.mark.parametrize("groups", [2, 16])
def test_groups(groups: int) -> None:
    for last in (False, True):
        case = Case((2, 16, 6, 5, 32, 3, 2, 1, 1), torch.bfloat16, groups=groups, last=last)
        case.check(case.ours("relu"), "relu")


@pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter")
@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        ((2, 96, 5, 6, 96, 3, 1, 1, 1), 4),  # of 24 channels
        ((1, 112, 5, 7, 112, (3, 1), (2, 1), (1, 0), 1), 2),  # of 56
        ((2, 160, 4, 3, 96, 1, 1, 0, 1), 2),  # of 80, in two steps of a tap, to 48
        ((1, 34, 6, 5, 34, 3, 1, 2, 2), 2),  # of 17
        ((1, 64, 5, 5, 256, 3, 1, 1, 1), 2),  # to 128, in two tiles
    ],
    ids=str,
)
@pytest.mark.parametrize("split", [1, 3])
def test_the_kernel_takes_groups(shape: Shape, groups: int, split: int) -> None:
    case = Case(shape, torch.bfloat16, groups=groups)
    plan = case.plan(ConvTile("gathered", 32, 64, 64, 4, 2, split=split))
    assert plan.backend == "gathered"
    case.check(case.planned(plan, "silu"), "silu")


@pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter")
def test_a_nan_stays_in_its_group() -> None:
    case = Case((1, 112, 4, 4, 112, 3, 1, 1, 1), torch.bfloat16, groups=2, residual=False)
    case.tensors[0][0, 56, 1, 1] = math.nan  # the first channel of the second group
    y = case.planned(case.plan(ConvTile("gathered", 32, 64, 64, 4, 2)), "none")
    assert torch.equal(y.isnan(), case.torch("none").isnan())
    assert not y[:, :56].isnan().any()
    assert y[:, 56:].isnan().any()


DEPTHWISE: list[Shape] = [
    (1, 20, 5, 14, 20, 7, 1, 3, 1),
    (1, 8, 9, 9, 8, 3, 2, 1, 1),
    (2, 12, 9, 10, 12, 3, (1, 2), 2, 2),
    (1, 70, 10, 7, 70, (5, 1), (2, 1), (2, 0), 1),
    (0, 8, 9, 9, 8, 3, 2, 1, 1),
]


@pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter")
@pytest.mark.parametrize("shape", DEPTHWISE, ids=str)
@pytest.mark.parametrize(("run", "fastest"), [(1, True), (4, False), (7, False), (7, True)])
def test_a_group_for_each_channel(shape: Shape, run: int, fastest: bool) -> None:
    case = Case(shape, torch.bfloat16, groups=shape[1])
    assert case.g.depthwise
    x, weight, *others = case.tensors
    assert x is not None
    assert weight is not None
    if fastest:
        other = channels_fastest(weight)
        assert torch.equal(other, weight)
        assert other.stride(0) == 1
        case.tensors = (x, other, *others)  # type: ignore[assignment]
    for rows in (4, 32):
        tile = replace(depthwise_tile(case.g, 132), rows=rows, depth=run)
        case.check(case.planned(ConvPlan("depthwise", tile, ""), "gelu"), "gelu")


def test_the_tile_of_a_depthwise_convolution_fits_its_sizes() -> None:
    def tile(batch: int, channels: int, size: int, stride: int = 1) -> tuple[int, int, int]:
        pairs = ((each, each) for each in (3, stride, 1, 1))
        found = depthwise_tile(Geometry(batch, channels, size, size, channels, *pairs, channels), 132)
        assert found.rows * found.columns == RUNS_OF_CHANNELS
        return found.rows, found.columns, found.depth

    assert tile(1, 96, 14) == (16, 32, SHORT_RUN), "few programs"
    assert tile(128, 96, 28) == (16, 32, LONG_RUN), "no program computes channels that do not exist"
    assert tile(128, 192, 28) == (8, 64, LONG_RUN)
    assert tile(128, 192, 28, stride=2) == (8, 64, SHORT_RUN), "windows do not overlap much"
    assert tile(128, 12, 112) == (32, 16, LONG_RUN)
    assert not Geometry(1, 4, 8, 8, 8, (3, 3), (1, 1), (1, 1), (1, 1), 4).depthwise


def test_a_large_offset_does_not_swamp_the_differences() -> None:
    case = Case(SHAPES["1 x 1"], residual=False)
    x, weight, bias, _ = case.tensors
    case.tensors = (1e4 + x, weight - weight.mean(1, keepdim=True), bias, None)
    case.check(case.ours("relu"), "relu")


def test_nan_stays_where_its_windows_are() -> None:
    case = Case(SHAPES["3 x 3"], torch.float16, residual=False)
    case.tensors[0][0, 3, 0, 0] = math.nan
    y = case.ours("relu")
    assert torch.equal(y.isnan(), case.torch("relu").isnan())
    assert y.isnan().sum() == 4 * y.shape[1]


def test_views_with_any_strides() -> None:
    base = torch.randn(2, 8, 9, 20).half()
    weight = torch.randn(12, 3, 3, 8).half().permute(0, 3, 1, 2) / 9
    views = (base[..., ::2], base[:, :, 1:].transpose(2, 3), base[:1].expand(3, 8, 9, 20), base.permute(0, 1, 3, 2))
    for x in views:
        residual = torch.randn(x.shape[0], 2 * 12, *x.shape[2:]).half()[:, ::2]
        y = conv_act(x, weight, None, residual, padding=1, activation="relu")
        exact = by_torch(x.double(), weight.double(), None, residual.double(), "relu", padding=1)
        assert_as_accurate(y, by_torch(x, weight, None, residual, "relu", padding=1), exact)


@pytest.mark.parametrize("which", ["neither", "input", "weight"])
def test_the_result_is_channels_last_if_an_operand_is(which: str) -> None:
    case = Case(SHAPES["3 x 3"], torch.bfloat16, last=False)
    x, weight, *others = case.tensors
    if which == "input":
        x = x.contiguous(memory_format=torch.channels_last)
    elif which == "weight":
        weight = weight.contiguous(memory_format=torch.channels_last)
    y = conv_act(x, weight, *others, activation="relu", padding=1)
    assert y.is_contiguous(memory_format=torch.contiguous_format if which == "neither" else torch.channels_last)
    case.check(y, "relu")


def test_five_runs_give_the_same_bits() -> None:
    case = Case(SHAPES["3 x 3"], torch.bfloat16)
    first, *others = [case.ours("gelu") for _ in range(5)]
    assert all(torch.equal(first, other) for other in others)


# ---- gradients, torch.library, compile, autocast --------------------------------------------------------------------


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_against_finite_differences(activation: str) -> None:
    case = Case((2, 4, 4, 3, 2, 3, 1, 1, 1), torch.float64, groups=2)
    tensors = [t.requires_grad_() for t in case.tensors if t is not None]
    assert torch.autograd.gradcheck(
        lambda *each: conv_act(*each, activation=activation, **case.options),  # type: ignore[arg-type]
        tensors,
    )


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
def test_gradients_are_those_of_pytorch(activation: str, residual: bool) -> None:
    found = []
    for call in (Case.ours, Case.torch):
        case = Case(SHAPES["3 x 3, stride 2"], residual=residual)
        leaves = [t.requires_grad_() for t in case.tensors if t is not None]
        found.append(torch.autograd.grad(call(case, activation).square().sum(), leaves))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_only_the_gradients_that_are_wanted_are_made() -> None:
    x, weight, bias, residual = Case(SHAPES["1 x 1"]).tensors
    assert residual is not None
    with CountingMode() as counted:
        y = conv_act(x, weight, bias, residual.requires_grad_(), activation="relu")
        (gradient,) = torch.autograd.grad(y.sum(), residual)
    torch.testing.assert_close(gradient, (y > 0).to(y.dtype))
    assert not [r for r in counted.records if "convolution_backward" in r.name]
    expected = torch.autograd.grad(conv_act(x.requires_grad_(), weight, bias, residual, activation="silu").sum(), x)
    unkept = torch.ops.rooftop.conv_act(x, weight, bias, residual, [1, 1], [0, 0], [1, 1], 1, "silu", False)[0]
    torch.testing.assert_close(torch.autograd.grad(unkept.sum(), x), expected)  # computed again


def test_a_second_derivative_and_forward_mode_are_refused() -> None:
    case = Case(SHAPES["1 x 1"])
    x = case.tensors[0].requires_grad_()
    with pytest.raises(NotImplementedError, match=r"conv_act has no second derivative: .*functional\.conv2d"):
        torch.autograd.grad(case.ours("relu").sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(lambda t: conv_act(t, case.tensors[1]), (x.detach(),), (x.detach(),))


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_operator_checks_of_torch_library(activation: str) -> None:
    case = Case(SHAPES["3 x 3, stride 2"], last=activation == "relu")
    tensors = [t.requires_grad_() for t in case.tensors if t is not None]
    options = ([2, 2], [1, 1], [1, 1], 1, activation, activation == "gelu")
    given = tensors if activation == "relu" else [*tensors[:2], None, None]
    torch.library.opcheck(torch.ops.rooftop.conv_act.default, (*given, *options))


def test_compiled_whole() -> None:
    case = Case(SHAPES["3 x 3"])
    leaves = [t.requires_grad_() for t in case.tensors if t is not None]

    def call(*each: Tensor) -> Tensor:
        return conv_act(*each, padding=1, activation="gelu") * 2

    y = torch.compile(call, fullgraph=True, backend="aot_eager")(*leaves)
    torch.testing.assert_close(y, call(*leaves))
    ours, theirs = (torch.autograd.grad(each.square().sum(), leaves) for each in (y, 2 * case.torch("gelu")))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_compiled_for_sizes_that_change() -> None:
    compiled = torch.compile(
        lambda x, weight, bias, residual: conv_act(x, weight, bias, residual, padding=1, activation="relu"),
        fullgraph=True, dynamic=True, backend="aot_eager",
    )  # fmt: skip
    for shape in (SHAPES["3 x 3"], (3, 8, 9, 5, 24, 3, 1, 1, 1)):
        case = Case(shape)
        torch.testing.assert_close(compiled(*case.tensors), case.torch("relu"), rtol=1e-4, atol=1e-4)


def test_an_eager_call_past_the_dispatcher_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(SHAPES["3 x 3"])
    leaves = [t.requires_grad_() for t in case.tensors if t is not None]
    assert operators._declared["conv_act"].recorded is not None
    direct = torch.autograd.grad(case.ours("silu").square().sum(), leaves)
    monkeypatch.setattr(fast_path, "is_plain", lambda arguments: False)
    dispatched = torch.autograd.grad(case.ours("silu").square().sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(direct, dispatched, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_casts_as_it_does_for_conv2d(dtype: torch.dtype) -> None:
    x, weight, bias, residual = Case(SHAPES["3 x 3"]).tensors
    assert residual is not None
    residual, x = residual.to(dtype), x.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        alone = conv_act(x, weight, bias, padding=1, activation="silu")
        added = conv_act(x, weight, bias, residual, padding=1, activation="silu")
        theirs = by_torch(x, weight, bias, residual, "silu", padding=1)
    assert alone.dtype == torch.bfloat16
    assert added.dtype == theirs.dtype == dtype
    torch.testing.assert_close(added, theirs, rtol=3e-2, atol=3e-2)
    added.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32


def test_on_meta_tensors_only_shapes_are_made() -> None:
    x, weight = torch.empty(2, 6, 9, 8, device="meta"), torch.empty(4, 3, 3, 3, device="meta")
    assert conv_act(x, weight, stride=2, groups=2, activation="silu").shape == (2, 4, 4, 3)


def test_cost_is_what_a_person_counts() -> None:
    case = Case((2, 6, 8, 8, 4, 1, 2, 0, 1))
    with CountingMode() as counted:
        case.ours("silu")
    (cost,) = [r.cost for r in counted.records if r.name == "rooftop::conv_act"]
    assert cost is not None
    results = 2 * 4 * 4 * 4
    assert cost.total_flops == 2 * results * 6 + (4 + 1 + 1) * results
    assert cost.read_bytes == 4 * (2 * 6 * 4 * 4 + 4 * 6 + 4 + results)  # a quarter of the input
    assert cost.write_bytes == 4 * results


# ---- the choice of a plan --------------------------------------------------------------------------------------------


def problem(batch: int, shape: tuple[int, int, int, int, int], residual: bool = False, **other: object) -> Problem:
    channels, size, out, kernel, stride = shape
    padding = (kernel // 2,) * 2
    geometry = Geometry(batch, channels, size, size, out, (kernel,) * 2, (stride,) * 2, padding, (1, 1))
    return problem_of(geometry, residual, **other)


def problem_of(geometry: Geometry, residual: bool, **other: object) -> Problem:
    """A case on an H200, channels last in bfloat16, except for `other`."""
    found: dict[str, object] = {"keep": False, "dtype": torch.bfloat16, "device": "cuda", "kernels": True}
    found |= {"channels_last": True, "copied": True, "cudnn": True, "sms": 132, "capability": 9}
    return Problem(geometry, residual, **{**found, **other})  # type: ignore[arg-type]


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the table of measurements be empty."""
    monkeypatch.setattr(conv_act_tables, "MEASURED_ON_HOPPER", ())
    choose.cache_clear()
    yield
    choose.cache_clear()


@pytest.mark.usefixtures("unmeasured")
def test_plans_depend_on_the_shape_and_the_gpu() -> None:
    spatial = (64, 56, 64, 3, 1)
    assert choose(problem(256, spatial)).backend == "persistent"
    few = choose(problem(1, (512, 7, 512, 3, 1)))
    assert (few.backend, few.tile) == ("single", replace(FEW, split=8))
    assert choose(problem(256, (64, 56, 256, 1, 1))).backend == "product"
    assert choose(problem(256, (64, 56, 256, 1, 1), residual=True)).backend == "persistent"
    assert choose(problem(256, spatial, dtype=torch.float32)).backend == "library"
    assert choose(problem(256, spatial, channels_last=False)).backend == "library"
    assert choose(problem(256, spatial, capability=8)).backend == "cudnn"
    assert choose(problem(256, spatial, capability=8, cudnn=False)).backend == "library"
    assert choose(problem(256, spatial, copied=False)).backend == "cudnn"
    assert choose(problem(1 << 20, spatial)).reason == "2^31 pixels or more"


@pytest.mark.usefixtures("unmeasured")
def test_tiles_are_no_larger_than_what_there_is() -> None:
    tile = choose(problem(256, (96, 56, 64, 3, 1))).tile
    assert tile is not None
    assert (tile.columns, tile.depth) == (64, 32)
    assert choose(problem(256, (64, 56, 128, 3, 1))).tile == MANY


def test_the_nearest_measured_shape_of_the_same_kind_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = ConvTile("persistent", 256, 64, 64, 8, 4)
    monkeypatch.setattr(
        conv_act_tables,
        "MEASURED_ON_HOPPER",
        (
            Entry((802_816, 64, 64, 9, 1, False), "persistent", taken, 0.2, 0.3),
            Entry((200_704, 128, 128, 9, 1, False), "cudnn", None, 0.1, 0.3),
            Entry((802_816, 64, 64, 9, 1, True), "library", None, 0.3, 0.3),
            Entry((802_816, 64, 64, 1, 1, False), "product", None, 0.1, 0.3),
        ),
    )
    choose.cache_clear()
    try:
        plan = choose(problem(256, (64, 56, 64, 3, 1)))
        assert plan.tile == taken
        assert plan.reason.startswith("0.2 ms at 802816 x 64 to 64 of 9 taps, stride 1, 0.3 ms with cuDNN")
        assert choose(problem(128, (64, 56, 64, 3, 1))).tile == taken
        assert choose(problem(256, (128, 28, 128, 3, 1))).backend == "cudnn"
        assert choose(problem(256, (128, 28, 128, 3, 1), cudnn=False)).backend == "library"
        assert choose(problem(256, (64, 56, 64, 3, 1), residual=True)).backend == "library"
        assert choose(problem(256, (64, 56, 64, 3, 1), copied=False)).tile == replace(taken, kernel="gathered")
        pointwise = problem(256, (64, 56, 64, 1, 1))
        assert choose(pointwise).reason.startswith("0.1 ms")
        padded = pointwise._replace(geometry=pointwise.geometry._replace(padding=(1, 1)))
        assert choose(padded).backend == "persistent"
        assert choose(problem(256, (512, 7, 512, 3, 1))).reason == "not measured near this shape"
        assert choose(problem(256, (64, 112, 64, 3, 2))).reason == "not measured near this shape"
    finally:
        choose.cache_clear()


def test_a_plan_says_what_is_taken_and_why() -> None:
    case = Case(SHAPES["3 x 3"], torch.bfloat16)
    plan = conv_act_plan(*case.tensors, activation="relu", padding=1)
    assert plan.backend == ("single" if INTERPRETED else "reference")
    assert str(plan).startswith(plan.backend)
    assert plan.reason in str(plan)
    x, weight, *_ = case.tensors
    assert conv_act_plan(x.double(), weight.double()).reason == "float64"
    if INTERPRETED:
        assert conv_act_plan(x.contiguous(), weight).reason == "x is not channels last"
        assert conv_act_plan(x.requires_grad_(), weight, activation="gelu").backend == "library"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"input": [1.0]}, TypeError, "input must be a tensor, got list"),
        ({"weight": None}, TypeError, "weight must be a tensor, got NoneType"),
        ({"input": torch.ones(1, 4, 5, 5, dtype=torch.int64)}, TypeError, "input must be bfloat16, .* torch.int64"),
        ({"weight": torch.eye(4).to_sparse()}, TypeError, "weight must be dense"),
        ({"weight": torch.ones(6, 4, 3, 3).half()}, TypeError, "input is torch.float32, weight torch.float16: cast"),
        ({"input": torch.ones(4, 5, 5)}, ValueError, r"expected input \(N, C, H, W\) .* got \(4, 5, 5\)"),
        ({"weight": torch.ones(6, 3, 3, 3)}, ValueError, r"got \(1, 4, 5, 5\) and \(6, 3, 3, 3\) with groups=1"),
        ({"groups": 4}, ValueError, "with groups=4"),
        ({"groups": 0}, ValueError, "groups must be an integer of at least 1, got 0"),
        (
            {"weight": torch.ones(6, 4, 0, 3)},
            ValueError,
            r"every size of input and weight except N must be at least 1, got \(1, 4, 5, 5\) and \(6, 4, 0, 3\)",
        ),
        ({"weight": torch.ones(0, 4, 3, 3)}, ValueError, "every size of input and weight except N"),
        ({"input": torch.ones(1, 4, 0, 5), "padding": 2}, ValueError, r"at least 1, got \(1, 4, 0, 5\) and"),
        ({"weight": torch.ones(6, 4, 6, 6)}, ValueError, "the window does not fit into the input, .*: pad"),
        ({"bias": torch.ones(4)}, ValueError, r"expected bias of shape \(6,\), got \(4,\)"),
        ({"bias": torch.ones(6, device="meta")}, ValueError, "input is on cpu, bias on meta"),
        ({"residual": torch.ones(6, 1, 1)}, ValueError, r"expected residual of shape \(1, 6, 3, 3\).* use .expand"),
        ({"stride": 0}, ValueError, "stride must be at least 1, got 0"),
        ({"padding": "same"}, TypeError, "padding must be one integer or a pair of integers, got 'same'"),
        ({"dilation": (1, 2, 3)}, TypeError, r"dilation must be one integer or a pair of integers, got \(1, 2, 3\)"),
        ({"padding": -1}, ValueError, "padding must be at least 0, got -1"),
        ({"activation": "tanh"}, ValueError, "activation must be None or one of none, relu, .* got 'tanh'"),
    ],
)
def test_wrong_arguments(arguments: dict[str, object], error: type[Exception], message: str) -> None:
    given = {"input": torch.randn(1, 4, 5, 5), "weight": torch.randn(6, 4, 3, 3), **arguments}
    for function in (conv_act, conv_act_plan):
        with count_launches() as launches, pytest.raises(error, match=message):
            function(**given)  # type: ignore[arg-type]
        assert not launches


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreted run")
def test_all_of_the_above_through_the_interpreter(interpreted: Callable[[str], int]) -> None:
    assert interpreted(__file__) > 115


# ---- on a GPU --------------------------------------------------------------------------------------------------------

ON_A_GPU = {
    "persistent": MANY,
    "persistent, 8 warps": ConvTile("persistent", 128, 256, 64, 8, 3, parts=2),
    "single": ConvTile("single", 128, 128, 64, 4, 3),
    "single, K in four": replace(FEW, split=4),
    "gathered": ConvTile("gathered", 128, 128, 64, 8, 3),
    "gathered, K in four": ConvTile("gathered", 64, 64, 64, 4, 4, split=4, early=True),
}


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("given", RESNET_50, ids=str)
def test_every_convolution_of_resnet_50_on_a_gpu(given: tuple[int, int, int, int, int, bool, str], batch: int) -> None:
    channels, size, out, kernel, stride, residual, activation = given
    shape = (batch, channels, size, size, out, kernel, stride, kernel // 2, 1)
    for dtype in HALVES:
        case = Case(shape, dtype, residual=residual, device="cuda")
        case.check(case.ours(activation), activation)
        plans = [ConvPlan("library", None, "")]
        plans += [ConvPlan("cudnn", None, "")] if activation == "relu" else []
        plans += [case.plan(tile) for tile in ON_A_GPU.values()]
        for plan in plans:
            case.check(case.planned(plan, activation), activation)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("last", [False, True], ids=["", "channels last"])
def test_gate_on_a_gpu(last: bool, dtype: torch.dtype, activation: str) -> None:
    for shape in SHAPES.values():
        for residual in (False, True):
            case = Case(shape, dtype, residual=residual, last=last, device="cuda")
            case.check(case.ours(activation), activation)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", ON_A_GPU.values(), ids=ON_A_GPU.keys())
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_every_kernel_of_any_shape_on_a_gpu(shape: Shape, tile: ConvTile) -> None:
    wide = (shape[0], shape[1] * 4 if shape[1] >= 8 else shape[1], *shape[2:4], shape[4] * 5, *shape[5:])
    for residual in (False, True):
        case = Case(wide, torch.bfloat16, residual=residual, device="cuda")  # type: ignore[arg-type]
        case.check(case.planned(case.plan(tile), "silu"), "silu")


@pytest.mark.gpu
def test_ten_runs_that_share_k_have_the_same_bits_on_a_gpu() -> None:
    case = Case((1, 512, 7, 7, 512, 3, 1, 1, 1), torch.bfloat16, device="cuda")
    for tile in (replace(FEW, split=8), ConvTile("gathered", 64, 64, 64, 4, 4, split=8, early=True)):
        first, *others = [case.planned(case.plan(tile), "relu") for _ in range(10)]
        assert all(torch.equal(first, other) for other in others)


@pytest.mark.gpu
def test_replayed_from_a_graph_on_a_gpu() -> None:
    """Kernels that are launched early wait for their inputs: each convolution here reads the previous result."""
    case = Case((1, 256, 14, 14, 256, 3, 1, 1, 1), torch.bfloat16, residual=False, device="cuda")
    x, weight, bias, _ = case.tensors

    def chain() -> Tensor:
        y = x
        for _ in range(8):
            y = conv_act(y, weight, bias, y, padding=1, activation="relu")
        return y

    expected = chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain()
    for _ in range(5):
        y.fill_(math.nan)
        graph.replay()
        assert torch.equal(y, expected)


@pytest.mark.gpu
@pytest.mark.large
def test_more_than_two_billion_elements_on_a_gpu() -> None:
    batch = (1 << 31) // (64 * 112 * 112) + 2
    x = torch.randn(batch, 64, 112, 112, device="cuda", dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    weight = (torch.randn(64, 64, 3, 3, device="cuda", dtype=torch.bfloat16) / 24).to(memory_format=torch.channels_last)
    geometry = Geometry(batch, 64, 112, 112, 64, (3, 3), (1, 1), (1, 1), (1, 1))
    for tile in (replace(MANY, columns=64), ConvTile("gathered", 128, 64, 64, 4, 3)):
        y, _ = forward(ConvPlan(tile.kernel, tile, ""), x, weight, None, None, geometry, "relu", False)
        for image in (0, batch // 2, batch - 1):
            expected = by_torch(x[image : image + 1], weight, None, None, "relu", padding=1)
            torch.testing.assert_close(y[image : image + 1], expected, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_compiled_by_inductor_on_a_gpu() -> None:
    case = Case((4, 64, 56, 56, 64, 3, 1, 1, 1), torch.bfloat16, device="cuda")
    compiled = torch.compile(lambda *each: conv_act(*each, padding=1, activation="relu").square(), fullgraph=True)
    torch.testing.assert_close(compiled(*case.tensors), case.ours("relu").square())
