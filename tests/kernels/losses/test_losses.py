"""Cross entropy, both ways: the CPU implementation, and (in a separate process) the Triton kernels interpreted."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftop.cost import CountingMode
from rooftop.kernels import cross_entropy
from rooftop.kernels.losses import losses
from rooftop.launch import INTERPRETED, count_launches
from rooftop.testing import assert_as_accurate

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
GPU_SIZES = (1, 2, 7, 200, 1000, 1024, 8192, 32_000, 50_257, 65_536, 128_256, 262_144)
IGNORED = -100


def by_torch(x: Tensor, target: Tensor, weight: Tensor | None = None, z_loss: float = 0.0, **options: Any) -> Tensor:
    """The reference in PyTorch; the z-loss is averaged or summed like the rest."""
    loss = F.cross_entropy(x, target, weight, **options)
    if not z_loss:
        return loss
    counted = target != options.get("ignore_index", IGNORED)
    row_weight = (weight[target.where(counted, 0)] if weight is not None else torch.ones_like(x[:, 0])) * counted
    rows = z_loss * row_weight * x.logsumexp(1).square()
    reduction = options.get("reduction", "mean")
    return loss + (rows if reduction == "none" else rows.sum() / (row_weight.sum() if reduction == "mean" else 1))


def loss_and_gradient(
    function: Any, x: Tensor, target: Tensor, dloss: Tensor | float = 1.0, **options: Any
) -> list[Tensor]:
    x = x.detach().clone().requires_grad_()
    loss = function(x, target, **options)
    loss.backward(torch.as_tensor(dloss, dtype=loss.dtype, device=loss.device).expand(loss.shape))
    assert x.grad is not None
    return [loss.detach(), x.grad]


def assert_gate(
    x: Tensor,
    target: Tensor,
    kernels: tuple[str, ...] = (),
    dloss: Tensor | float = 1.0,
    weight: Tensor | None = None,
    fused: bool | None = None,
    **options: Any,
) -> None:
    """Loss and gradient pass the numerics gate, and (interpreted, or on a GPU) come from the kernels."""
    with count_launches() as launches:
        ours = loss_and_gradient(cross_entropy, x, target, dloss, weight=weight, fused=fused, **options)
    if (INTERPRETED or x.device.type == "cuda") and x.numel():
        assert launches
        assert set(kernels) <= launches.keys()
    narrow, wide = (None, None) if weight is None else (weight.to(x.dtype), weight.double())
    eager = loss_and_gradient(by_torch, x, target, dloss, weight=narrow, **options)
    exact = loss_and_gradient(by_torch, x.double(), target, dloss, weight=wide, **options)
    for what, mine, plain, truth in zip(("loss", "dx"), ours, eager, exact, strict=True):
        if mine.dim():
            assert_as_accurate(mine, plain, truth, what=f"{what} of {tuple(x.shape)} {x.dtype}")
        else:  # one number: PyTorch's error can be 0 by luck
            rounding = 4 * torch.finfo(x.dtype).eps
            expected = truth if target.numel() else torch.zeros_like(truth)  # PyTorch's mean of no elements is NaN
            torch.testing.assert_close(mine.double(), expected, rtol=rounding, atol=rounding, equal_nan=True)


def logits(rows: int, classes: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Logits, and targets some of which are ignored."""
    torch.manual_seed(rows + classes)
    target = torch.randint(classes, (rows,))
    target[1::4] = IGNORED
    return (2 * torch.randn(rows, classes) + 1).to(dtype).to(device), target.to(device)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 7), (33, 64), (6, 1000), (0, 16)])
def test_gate(shape: tuple[int, int], dtype: torch.dtype, fused: bool) -> None:
    kernels = ("cross_entropy_rows", "scale_unless_one" if fused else "cross_entropy_gradient")
    assert_gate(*logits(*shape, dtype=dtype), kernels, fused=fused)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 1e-3}], ids=["plain", "smooth"])
def test_gate_of_rows_longer_than_a_tile(options: dict[str, float], fused: bool) -> None:
    x, target = logits(2, 33_001, dtype=torch.float16)
    weight = torch.rand(33_001).half() if options else None
    assert_gate(x, target, ("cross_entropy_rows_long",), weight=weight, fused=fused, reduction="sum", **options)


# Nine rows of odd length begin at every possible offset from a multiple of 16 bytes.
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 1e-3}], ids=["plain", "smooth"])
def test_gate_of_long_rows_at_any_address(options: dict[str, float], fused: bool) -> None:
    x, _ = logits(9, 16_399, dtype=torch.float16)
    target = torch.tensor([0, 16_398, 1, 7, 8, IGNORED, 16_392, 16_391, 3])
    assert_gate(x, target, ("cross_entropy_rows_long",), fused=fused, reduction="sum", **options)


def test_the_gradient_of_long_rows_takes_the_place_of_the_logits_and_of_nothing_else() -> None:
    x, target = logits(9, 8_201)
    terms = losses.Terms(None, IGNORED, 0.1, 0.0)
    dx = torch.empty_like(x)
    expected = losses.losses_of_rows(x, target, terms, None, dx)[0]
    for before in (0, 4, 3):  # elements before the first row, which determine the address of each row
        memory = torch.full((before + x.numel() + 8,), 5.0)
        place = memory[before:-8].view(x.shape)
        found = losses.losses_of_rows(place.copy_(x), target, terms, None, place)[0]
        torch.testing.assert_close((found, place), (expected, dx))
        assert (memory[:before] == 5).all()
        assert (memory[-8:] == 5).all()


@pytest.mark.parametrize("columns", [129, 8_201])
def test_rows_that_are_apart_are_written_in_place(columns: int) -> None:
    x, target = logits(9, columns)
    terms = losses.Terms(None, IGNORED, 0.1, 0.0)
    dx = torch.empty_like(x)
    expected = losses.losses_of_rows(x, target, terms, None, dx)[0]
    around = torch.full((9, columns + 7), 5.0)
    place = around[:, :columns]
    found = losses.losses_of_rows(place.copy_(x), target, terms, None, place)[0]
    torch.testing.assert_close((found, place), (expected, dx))
    assert (around[:, columns:] == 5).all()


CASES = itertools.product((False, True), (0.0, 0.1), (0.0, 1e-2), ("mean", "sum", "none"), (True, False))


@pytest.mark.parametrize(
    ("weighted", "smoothing", "z_loss", "reduction", "fused"), [c for c in CASES if c[3] != "none" or not c[4]]
)
def test_gate_of_all_that_a_loss_can_have(
    weighted: bool, smoothing: float, z_loss: float, reduction: str, fused: bool
) -> None:
    x, target = logits(16, 50)
    assert_gate(
        x,
        target,
        dloss=torch.rand(16) if reduction == "none" else 1.7,
        weight=torch.rand(50) if weighted else None,
        fused=fused,
        label_smoothing=smoothing,
        z_loss=z_loss,
        reduction=reduction,
    )


# The gate is not used, because for few elements PyTorch's largest error can be 0 by luck.
@given(st.integers(1, 20), st.integers(1, 200), st.booleans(), st.floats(0, 1), st.integers(-3, 5))
@settings(max_examples=15, deadline=None)
def test_any_shape_smoothing_and_ignored_class(
    rows: int, classes: int, fused: bool, smoothing: float, ignored: int
) -> None:
    x, _ = logits(rows, classes)
    target = torch.randint(classes, (rows,))
    options = {"label_smoothing": smoothing, "ignore_index": ignored, "reduction": "sum"}
    ours = loss_and_gradient(cross_entropy, x, target, fused=fused, **options)
    exact = loss_and_gradient(by_torch, x.double(), target, **options)
    for mine, truth in zip(ours, exact, strict=True):
        torch.testing.assert_close(mine.double(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("classes", [1, 2, 40, 16_392])
def test_gate_of_rows_that_are_certain(classes: int, fused: bool) -> None:
    x, target = logits(9, classes)
    x[torch.arange(9), target.clamp(0)] += 14
    options = {"label_smoothing": 0.1, "z_loss": 1e-3, "reduction": "sum", "fused": fused}
    assert_gate(x, target, weight=torch.rand(classes), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("columns", [300, 33_000])
@pytest.mark.parametrize("fused", [True, False])
def test_a_large_offset_does_not_swamp_the_differences(fused: bool, columns: int) -> None:
    x, target = logits(2, columns)
    assert_gate(x + 1e4, target, fused=fused, label_smoothing=0.1, reduction="sum")


def test_gradients_of_a_row_sum_to_zero_and_a_shift_changes_nothing() -> None:
    x, target = logits(12, 300)
    loss, dx = loss_and_gradient(cross_entropy, x, target, label_smoothing=0.1)
    torch.testing.assert_close(dx.sum(1), torch.zeros(12), rtol=0, atol=1e-6)
    torch.testing.assert_close(cross_entropy(x + 8, target, label_smoothing=0.1), loss)
    assert (dx[1::4] == 0).all()  # ignored
    assert (dx[0::4] != 0).all()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_where_no_target_counts_the_mean_and_its_gradient_are_zero(fused: bool, dtype: torch.dtype) -> None:
    """All targets are ignored, there are none, or their weights are 0."""
    x, none = torch.randn(3, 5, dtype=dtype), torch.full((3,), IGNORED)
    weightless = {"weight": torch.tensor([0, 1, 1, 1, 1], dtype=dtype)}
    for logits, target, options in (
        (x, none, {"label_smoothing": 0.1, "z_loss": 0.01}),
        (x[:0], none[:0], {}),
        (x, torch.zeros(3, dtype=torch.int64), weightless),
    ):
        loss, dx = loss_and_gradient(cross_entropy, logits, target, fused=fused, **options)
        assert loss == 0
        assert (dx == 0).all()
        again = functools.partial(cross_entropy, target=target, fused=fused, **options)
        leaf = logits.clone().requires_grad_()
        assert (torch.autograd.grad(again(leaf), leaf, create_graph=True)[0] == 0).all()
        assert all((t == 0).all() for t in torch.func.grad_and_value(again)(logits))


@pytest.mark.parametrize("columns", [50, 17_001])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_infinities_and_nan_do_what_they_do_in_pytorch(columns: int, smoothing: float) -> None:
    x, _ = logits(7, columns)
    target = torch.tensor([0, 1, 2, 3, 4, 5, IGNORED])
    x[1, 7], x[2, 8], x[4, 10], x[5, 5] = math.nan, math.inf, -math.inf, -math.inf  # x[5, 5] is the target's logit
    x[3] = -math.inf
    options = {"reduction": "none", "label_smoothing": smoothing}
    ours, theirs = (loss_and_gradient(f, x, target, **options) for f in (cross_entropy, by_torch))
    torch.testing.assert_close(ours, theirs, equal_nan=True, rtol=1e-4, atol=1e-6)
    assert ours[0].isnan().sum() == 3


def test_a_backward_that_keeps_the_graph_can_be_repeated() -> None:
    x, target = logits(6, 40)
    x.requires_grad_()
    loss = cross_entropy(x, target)
    exact = torch.autograd.grad(by_torch(x, target), x)[0]
    for factor in (2.0, 1.0, 0.0, 3.0):
        (dx,) = torch.autograd.grad(loss * factor, x, retain_graph=True)
        torch.testing.assert_close(dx, exact * factor)
    (dx,) = torch.autograd.grad(loss * 5, x)
    torch.testing.assert_close(dx, exact * 5)


def test_a_gradient_of_one_is_not_multiplied_again() -> None:
    x, target = logits(6, 40)
    loss = cross_entropy(x.requires_grad_(), target)
    made = loss.grad_fn.saved_tensors[0].data_ptr()  # type: ignore[union-attr]
    loss.backward()
    assert x.grad is not None
    assert x.grad.data_ptr() == made


def test_views_with_any_strides() -> None:
    base, target = torch.randn(40, 130), torch.randint(40, (80,))[::2]
    for view in (base[:, 5:70], base[:, :80:2], base[:, 3:4].expand(40, 41)[:, :40], base.t()[:40, :40]):
        for fused in (True, False):
            ours = loss_and_gradient(lambda x, t, f=fused: cross_entropy(x, t, fused=f), view, target)
            torch.testing.assert_close(ours, loss_and_gradient(F.cross_entropy, view, target))
            x = base.clone().requires_grad_()
            cross_entropy(x.t()[:40, :40], target, fused=fused).backward()
            assert x.grad is not None


def test_one_row_and_rows_of_images() -> None:
    x, target = torch.randn(5, 7, 3, 2), torch.randint(7, (5, 3, 2))
    for reduction in ("mean", "none"):
        ours = loss_and_gradient(cross_entropy, x, target, reduction=reduction)
        torch.testing.assert_close(ours, loss_and_gradient(F.cross_entropy, x, target, reduction=reduction))
        ours = loss_and_gradient(cross_entropy, x[0, :, 0, 0], target[0, 0, 0], reduction=reduction)
        theirs = loss_and_gradient(F.cross_entropy, x[0, :, 0, 0], target[0, 0, 0], reduction=reduction)
        torch.testing.assert_close(ours, theirs)


def test_small_gradients_of_float16_survive_a_loss_scale() -> None:
    """A gradient of 3e-8 is 0 in float16. A loss scale of 2^15 preserves this gradient."""
    x, target = torch.full((200, 20), -12, dtype=torch.float16), torch.zeros(200, dtype=torch.int64)
    x[:, 0] = 0
    _, dx = loss_and_gradient(cross_entropy, x, target, 2.0**15)
    exact = loss_and_gradient(F.cross_entropy, x.double(), target, 2.0**15)[1]
    assert exact[0, 1] / 2**15 < torch.finfo(torch.float16).smallest_normal / 2**10
    torch.testing.assert_close(dx.double(), exact, rtol=2e-3, atol=0)


def test_all_runs_give_the_same_bits() -> None:
    for fused in (True, False):
        first, *others = [loss_and_gradient(cross_entropy, *logits(35, 100), fused=fused) for _ in range(3)]
        assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("fused", [True, False])
def test_gradients_against_finite_differences(fused: bool) -> None:
    x, target = logits(5, 6)
    options = {"label_smoothing": 0.2, "z_loss": 0.1, "fused": fused, "weight": torch.rand(6)}
    assert torch.autograd.gradcheck(
        lambda x: cross_entropy(x, target, **options),  # type: ignore[arg-type]
        (x.double().requires_grad_(),),
    )


def test_on_meta_tensors_only_shapes_are_made() -> None:
    x, target = (t.to("meta") for t in logits(3, 5))
    assert cross_entropy(x.requires_grad_(), target).shape == ()
    assert cross_entropy(x, target, reduction="none").shape == (3,)


def test_operator_checks_of_torch_library() -> None:
    x, target = logits(4, 6)
    numbers = (IGNORED, 0.1, 0.01)
    for reduction in ("mean", "none"):
        arguments = (x.requires_grad_(), target, torch.rand(6), *numbers, reduction)
        torch.library.opcheck(torch.ops.rooftop.cross_entropy.default, arguments)
    arguments = (x.requires_grad_(), target, None, *numbers, True)
    torch.library.opcheck(torch.ops.rooftop.cross_entropy_with_gradient.default, arguments)
    for name in ("scale_gradient", "scale_gradient_"):
        torch.library.opcheck(getattr(torch.ops.rooftop, name).default, (torch.randn(3, 4), torch.tensor(2.0)))


@pytest.mark.parametrize("fused", [True, False])
def test_compiled_whole(fused: bool) -> None:
    x, target = logits(6, 32)
    compiled = torch.compile(lambda x, t: cross_entropy(x * 2, t, fused=fused) * 3, fullgraph=True, backend="aot_eager")
    ours = loss_and_gradient(compiled, x, target, 1.5)
    torch.testing.assert_close(ours, loss_and_gradient(lambda x, t: F.cross_entropy(x * 2, t) * 3, x, target, 1.5))


def test_autocast_gives_float32_as_pytorch_does() -> None:
    x, target = logits(4, 32, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        loss = cross_entropy(x, target)
        torch.testing.assert_close(loss, F.cross_entropy(x, target))
    assert loss.dtype == torch.float32


def test_without_a_gradient_none_is_made() -> None:
    x, target = logits(4, 32)
    with CountingMode() as counted:
        cross_entropy(x, target)
        with torch.no_grad():
            cross_entropy(x.requires_grad_(), target)
    assert {r.name for r in counted.records if r.name.startswith("rooftop")} == {"rooftop::cross_entropy"}


def test_cost_is_what_a_person_counts() -> None:
    x, target = logits(10, 40)
    x.requires_grad_()
    with CountingMode() as counted:
        cross_entropy(x, target, fused=False).backward()
        cross_entropy(x, target).backward()
    costs = {r.name: r.cost for r in counted.records}
    forward, backward = costs["rooftop::cross_entropy"], costs["rooftop::cross_entropy_backward"]
    fused = costs["rooftop::cross_entropy_with_gradient"]
    assert forward is not None
    assert backward is not None
    assert fused is not None
    targets = 8 * 10
    assert (forward.total_flops, forward.read_bytes, forward.write_bytes) == (4 * 400, 1600 + targets, 4 * 22)
    assert (backward.total_flops, backward.read_bytes) == (3 * 400, 1600 + targets + 4 * 22)
    assert backward.write_bytes == 1600
    assert (fused.total_flops, fused.read_bytes, fused.write_bytes) == (5 * 400, 1600 + targets, 1604)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"input": [1.0]}, TypeError, "input must be a tensor, got list"),
        ({"input": torch.ones(3, 4, dtype=torch.int64)}, TypeError, "input must be bfloat16"),
        ({"target": torch.rand(3, 4)}, TypeError, "class indices of int64, got torch.float32; for class probabilities"),
        ({"target": torch.ones(3, dtype=torch.int32)}, TypeError, r"got torch.int32; pass target.long\(\)"),
        ({"target": torch.zeros(4, dtype=torch.int64)}, ValueError, r"expected target of shape \(3,\)"),
        ({"target": torch.tensor([0, 4, 1])}, ValueError, "target 4 at index 1 is not a class: expected 0 to 3"),
        ({"target": torch.tensor([0, 1, -1])}, ValueError, "target -1 at index 2 is not a class"),
        ({"input": torch.randn(3, 0)}, ValueError, "at least one class"),
        ({"weight": torch.ones(3)}, ValueError, r"expected class weights of shape \(4,\)"),
        ({"weight": torch.ones(4, device="meta")}, ValueError, "input is on cpu, weight on meta"),
        ({"reduction": "average"}, ValueError, "reduction must be"),
        ({"reduction": "none", "fused": True}, ValueError, "fused needs a reduction"),
        ({"label_smoothing": 1.5}, ValueError, "label_smoothing must be from 0 to 1"),
        ({"z_loss": math.nan}, ValueError, "z_loss must be finite"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {"input": torch.randn(3, 4), "target": torch.tensor([0, 1, 2]), **arguments}
    with pytest.raises(error, match=message):
        cross_entropy(**given)


@pytest.mark.skipif(not INTERPRETED, reason="on the CPU such targets are refused")
@pytest.mark.parametrize(("columns", "weighted"), [(7, False), (7, True), (17_000, True)])
@pytest.mark.parametrize("fused", [True, False])
def test_a_target_that_is_no_class_makes_nan_of_its_row_and_the_loss(
    fused: bool, columns: int, weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "check_targets", lambda *_: None)  # as on a GPU
    x, target = torch.randn(6, columns), torch.tensor([0, columns, -1, 2**40, 3, IGNORED])
    weight = torch.rand(columns) if weighted else None
    loss, dx = loss_and_gradient(cross_entropy, x, target, fused=fused, weight=weight)
    assert loss.isnan()
    assert dx[1:4].isnan().all()
    _, expected = loss_and_gradient(F.cross_entropy, x[[0, 4]], target[[0, 4]], weight=weight)
    torch.testing.assert_close(dx[[0, 4]], expected)  # a mean over the targets that are not ignored
    assert (dx[5] == 0).all()


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreted run")
def test_all_of_the_above_through_the_interpreter(interpreted: Callable[[str], int]) -> None:
    assert interpreted(__file__) > 90


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", GPU_SIZES)
def test_gate_on_a_gpu(classes: int, dtype: torch.dtype, fused: bool) -> None:
    x, target = logits(67, classes, dtype=dtype, device="cuda")
    assert_gate(x, target, fused=fused, reduction="sum")
    weight = torch.rand(classes, device="cuda").to(dtype)
    assert_gate(x, target, weight=weight, fused=fused, label_smoothing=0.1, z_loss=1e-3, reduction="sum")


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [True, False])
def test_targets_that_are_no_class_are_nan_on_a_gpu(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x, target = torch.randn(5, 7, device="cuda"), torch.tensor([0, 7, -1, 2**40, 3], device="cuda")
    loss, dx = loss_and_gradient(cross_entropy, x, target, fused=fused)
    assert loss.isnan()
    assert torch.equal(dx.isnan().all(1).cpu(), torch.tensor([False, True, True, True, False]))
    monkeypatch.setenv("ROOFTOP_CHECK", "1")
    with pytest.raises(ValueError, match="target 7 at index 1 is not a class"):
        cross_entropy(x, target)


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("fused", [True, False])
def test_more_than_two_billion_elements_on_a_gpu(fused: bool) -> None:
    x = torch.randn(131_073, 16_384, device="cuda", dtype=torch.bfloat16)  # 2^31 + 16384
    target = torch.randint(16_384, (131_073,), device="cuda")
    _, dx = loss_and_gradient(cross_entropy, x, target, fused=fused, reduction="sum")
    for row in (0, 65_536, 131_072):
        _, expected = loss_and_gradient(F.cross_entropy, x[row : row + 1], target[row : row + 1])
        torch.testing.assert_close(dx[row : row + 1], expected)


@pytest.mark.gpu
def test_compiled_by_inductor_on_a_gpu() -> None:
    x, target = logits(64, 1000, device="cuda")
    compiled = torch.compile(lambda x, t: cross_entropy(x.relu(), t), fullgraph=True)
    ours = loss_and_gradient(compiled, x, target, 2.0)
    torch.testing.assert_close(ours, loss_and_gradient(lambda x, t: F.cross_entropy(x.relu(), t), x, target, 2.0))


def test_the_scaled_gradient_is_differentiated_in_both() -> None:
    gradient, factor = torch.randn(3, 4, dtype=torch.float64), torch.tensor(0.5, dtype=torch.float64)
    leaves = (gradient.requires_grad_(), factor.requires_grad_())
    assert torch.autograd.gradcheck(torch.ops.rooftop.scale_gradient, leaves)
    assert torch.autograd.gradgradcheck(torch.ops.rooftop.scale_gradient, leaves)
