"""Softmax and its logarithm, both ways: the CPU implementation, and (in a separate process) the Triton kernels
interpreted."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftop.cost import CountingMode
from rooftop.kernels import log_softmax, softmax, softmax_plan
from rooftop.launch import INTERPRETED, count_launches
from rooftop.testing import assert_as_accurate

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OURS = {"softmax": softmax, "log_softmax": log_softmax}
GPU_SIZES = (1, 7, 64, 200, 512, 1000, 1024, 2048, 4096, 5120, 8192, 16384, 32768, 50257, 65536, 128256, 262144)
Function = Callable[..., Tensor]


def by_torch(name: str) -> Function:
    """The reference in PyTorch: scale, mask, softmax."""

    def apply(x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
        x = x if scale == 1.0 else x * scale
        if mask is not None:
            x = x.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else x + mask
        return torch.softmax(x, -1) if name == "softmax" else torch.log_softmax(x, -1)

    return apply


def output_and_gradient(
    function: Function, x: Tensor, dy: Tensor, mask: Tensor | None = None, scale: float = 1.0
) -> list[Tensor]:
    x = x.detach().clone().requires_grad_()
    y = function(x, mask=mask, scale=scale)
    y.backward(dy.to(y.dtype))
    assert x.grad is not None
    return [y.detach(), x.grad]


def assert_gate(
    name: str,
    x: Tensor,
    mask: Tensor | None = None,
    scale: float = 1.0,
    kernels: tuple[str, ...] = (),
    device: str = "cpu",
) -> None:
    """Output and gradient pass the numerics gate, and (interpreted, or on a GPU) come from the kernels."""
    x = x.to(device)
    mask = mask.to(device) if mask is not None else None
    dy = torch.randn_like(x)
    with count_launches() as launches:
        ours = output_and_gradient(OURS[name], x, dy, mask, scale)
    if (INTERPRETED or device == "cuda") and x.numel():
        both = [softmax_plan(x, mask=mask, scale=scale, direction=each) for each in ("forward", "backward")]
        assert {name.partition("<")[0]: count for name, count in launches.items()} == {each.kernel: 1 for each in both}
        assert set(kernels) <= launches.keys()
    wide_mask = mask.double() if mask is not None and mask.is_floating_point() else mask
    eager = output_and_gradient(by_torch(name), x, dy, mask, scale)
    exact = output_and_gradient(by_torch(name), x.double(), dy.double(), wide_mask, scale)
    for what, *values in zip(("y", "dx"), ours, eager, exact, strict=True):
        assert_as_accurate(*values, what=f"{what} of {name} {tuple(x.shape)} {x.dtype}")


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(sum(shape))
    return (2 * torch.randn(*shape) + 1).to(dtype)


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 1), (5, 7), (2, 3, 64), (9, 768), (5, 1000), (0, 16), (3, 0), (3, 2048)])
def test_gate(shape: tuple[int, ...], dtype: torch.dtype, name: str) -> None:
    assert_gate(name, rows(*shape, dtype=dtype), kernels=("softmax_forward", "softmax_backward"))


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("columns", [33_024, 33_001])
def test_gate_of_rows_longer_than_a_tile(columns: int, name: str) -> None:
    kernels = ("softmax_forward_long", "softmax_backward_long")
    assert_gate(name, rows(5, columns, dtype=torch.float16), kernels=kernels)


# The gate is not used, because for few elements PyTorch's largest error can be 0 by luck.
@given(st.integers(1, 20), st.integers(1, 300), st.sampled_from(sorted(OURS)), st.floats(-2, 2))
@settings(max_examples=15, deadline=None)
def test_any_shape_and_scale(rows_: int, columns: int, name: str, scale: float) -> None:
    x = rows(rows_, columns)
    dy = torch.randn_like(x)
    ours = output_and_gradient(OURS[name], x, dy, scale=scale)
    exact = output_and_gradient(by_torch(name), x.double(), dy.double(), scale=scale)
    for mine, truth in zip(ours, exact, strict=True):
        torch.testing.assert_close(mine.double(), truth, rtol=1e-5, atol=2e-5)


MASKS = {
    "of the last dimensions": (4, 36),
    "of columns": (36,),
    "of rows": (2, 3, 4, 1),
    "repeated over heads": (2, 1, 4, 36),
    "of heads": (3, 1, 1),
    "one number": (),
}


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS.keys())
def test_gate_of_masks_that_broadcast(shape: tuple[int, ...], name: str) -> None:
    x = rows(2, 3, 4, 36)
    assert_gate(name, x, torch.randn(shape), 0.3)
    keep = torch.rand(shape) > 0.3
    assert_gate(name, x, keep, 0.3)


@pytest.mark.parametrize("name", OURS)
def test_gate_of_masked_long_rows(name: str) -> None:
    x = rows(2, 2, 33_001, dtype=torch.bfloat16)
    assert_gate(name, x, torch.randn(2, 1, 33_001).bfloat16())
    assert_gate(name, x, torch.rand(2, 33_001) > 0.5)


def test_a_mask_of_more_dimensions_than_strides_can_say() -> None:
    x, mask = rows(2, 3, 2, 3, 2, 5), torch.randn(2, 1, 2, 1, 2, 5)
    torch.testing.assert_close(softmax(x, mask=mask), torch.softmax(x + mask, -1))


@pytest.mark.parametrize("name", OURS)
def test_the_gradient_of_a_mask_of_numbers(name: str) -> None:
    x = rows(3, 4, 20).requires_grad_()
    mask, other = (torch.linspace(-1, 1, 80).reshape(4, 20).requires_grad_() for _ in range(2))
    dy = torch.randn(3, 4, 20)
    ours = torch.autograd.grad(OURS[name](x, mask=mask, scale=0.5), (x, mask), dy)
    theirs = torch.autograd.grad(by_torch(name)(x, other, 0.5), (x, other), dy)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_rows_sum_to_one_and_a_shift_changes_nothing() -> None:
    x = rows(17, 300)
    y = softmax(x)
    torch.testing.assert_close(y.sum(-1), torch.ones(17))
    torch.testing.assert_close(softmax(x + 64), y, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(log_softmax(x).exp(), y)
    assert torch.equal(softmax(rows(5, 1)), torch.ones(5, 1))


@pytest.mark.parametrize("columns", [777, 33_001])
@pytest.mark.parametrize("name", OURS)
def test_a_large_offset_does_not_swamp_the_differences(name: str, columns: int) -> None:
    assert_gate(name, 1e4 + torch.randn(3, columns))


@pytest.mark.parametrize("columns", [50, 33_001])
@pytest.mark.parametrize("name", OURS)
def test_infinities_and_nan_do_what_they_do_in_pytorch(name: str, columns: int) -> None:
    x = rows(7, columns)
    x[1, 3], x[2, 4], x[4, ::2], x[6, 0] = math.nan, math.inf, -math.inf, -math.inf
    x[3] = -math.inf
    ours, theirs = OURS[name](x), by_torch(name)(x)
    torch.testing.assert_close(ours, theirs, equal_nan=True, rtol=1e-4, atol=1e-6)
    assert ours[[1, 2, 3]].isnan().all()
    assert not ours[[0, 4, 5, 6]].isnan().any()


def test_what_is_excluded_gets_nothing_and_passes_no_gradient() -> None:
    x, keep = rows(4, 30), torch.arange(30) < 20
    x[:, 25] = math.nan  # excluded, so its NaN does not spread
    for function in OURS.values():
        y, dx = output_and_gradient(function, x, torch.randn(4, 30), keep)
        assert (y[:, 20:] == (0 if function is softmax else -math.inf)).all()
        assert (dx[:, 20:] == 0).all()
        torch.testing.assert_close(y[:, :20], function(x[:, :20]))


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("dim", [0, 1, -2, 2, -1])
def test_any_dimension(dim: int, name: str) -> None:
    x, dy = rows(5, 6, 7), torch.randn(5, 6, 7)
    keep = (torch.arange(x.shape[dim]) > 0).reshape([-1 if d == dim % 3 else 1 for d in range(3)])
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    y = OURS[name](ours, dim, mask=keep)
    expected = getattr(torch, name)(theirs.masked_fill(~keep, -math.inf), dim)
    y.backward(dy)
    expected.backward(dy)
    torch.testing.assert_close((y, ours.grad), (expected, theirs.grad))


def test_a_tensor_without_dimensions() -> None:
    assert softmax(torch.tensor(3.0), 0) == 1
    assert log_softmax(torch.tensor(3.0), -1) == 0


def test_views_with_any_strides() -> None:
    base = torch.randn(40, 130)
    for view in (base[::2], base[:, 5:70], base.t(), base[:, ::2], base[3:4].expand(7, 130)):
        torch.testing.assert_close(softmax(view), torch.softmax(view, -1))
    x = torch.randn(6, 40, requires_grad=True)
    log_softmax(x).sum().backward()  # an expanded gradient: all strides 0
    torch.testing.assert_close(x.grad, 1 - 40 * torch.softmax(x, -1), rtol=1e-4, atol=1e-5)


def test_a_dtype_is_what_pytorch_casts_to_first() -> None:
    x = rows(8, 96, dtype=torch.bfloat16)
    for dtype in (torch.float32, torch.float64, torch.float16):
        assert_as_accurate(softmax(x, dtype=dtype), torch.softmax(x, -1, dtype), torch.softmax(x.double(), -1))
    assert softmax(torch.arange(4), dtype=torch.float32).dtype == torch.float32
    t = x.clone().requires_grad_()
    log_softmax(t, dtype=torch.float32)[:, 0].sum().backward()
    assert t.grad is not None
    assert t.grad.dtype == torch.bfloat16


def test_ten_runs_give_the_same_bits() -> None:
    x, dy = rows(9, 200), torch.randn(9, 200)
    first, *others = [output_and_gradient(softmax, x, dy) for _ in range(10)]
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("name", OURS)
def test_gradients_against_finite_differences(name: str) -> None:
    x, mask = rows(3, 5).double().requires_grad_(), torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, m: OURS[name](x, mask=m, scale=0.7), (x, mask))
    keep = torch.tensor([True, True, False, True, True])
    assert torch.autograd.gradcheck(lambda x: softmax(x, mask=keep, scale=0.7), (x,))


def test_on_meta_tensors_only_shapes_are_made() -> None:
    assert softmax(torch.empty(3, 5, device="meta"), 0).shape == (3, 5)


def test_operator_checks_of_torch_library() -> None:
    x, operator = rows(4, 6).requires_grad_(), torch.ops.rooftop.softmax.default
    torch.library.opcheck(operator, (x, None, 1.0, False, torch.float32))
    torch.library.opcheck(operator, (x, torch.randn(6, requires_grad=True), 0.5, True, torch.float32))
    torch.library.opcheck(operator, (x.detach().bfloat16(), torch.rand(4, 6) < 2, 0.5, False, torch.float32))


def test_compiled_whole() -> None:
    x, mask = rows(6, 32).requires_grad_(), torch.randn(32)
    compiled = torch.compile(lambda x: softmax(x, mask=mask) * 2, fullgraph=True, backend="aot_eager")
    y = compiled(x)
    torch.testing.assert_close(y, 2 * softmax(x, mask=mask))
    y[:, 0].sum().backward()
    assert x.grad is not None


def test_a_wider_result_is_not_rounded_to_the_dtype_of_the_input() -> None:
    x = rows(4, 32, dtype=torch.bfloat16).requires_grad_()
    y = softmax(x, dtype=torch.float32)
    assert_as_accurate(y, torch.softmax(x, -1, torch.float32), torch.softmax(x.double(), -1))
    y[:, 0].sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16


def test_cost_is_what_a_person_counts() -> None:
    x, mask = rows(10, 40).requires_grad_(), torch.randn(40)
    with CountingMode() as counted:
        softmax(x, mask=mask, scale=0.5).backward(torch.ones(10, 40))
    costs = {r.name: r.cost for r in counted.records}
    forward, backward = costs["rooftop::softmax"], costs["rooftop::softmax_backward"]
    assert forward is not None
    assert backward is not None
    assert (forward.total_flops, forward.read_bytes, forward.write_bytes) == (7 * 400, 4 * 440, 4 * 400)
    assert (backward.total_flops, backward.read_bytes, backward.write_bytes) == (5 * 400, 4 * 800, 4 * 400)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dim": 2}, ValueError, r"dim 2 is out of range for an input of shape \(3, 4\)"),
        ({"dim": None}, TypeError, "dim must be an int, got None"),
        ({"input": [1.0]}, TypeError, "input must be a tensor, got list"),
        ({"input": torch.arange(4)}, TypeError, "input must be bfloat16, .* got torch.int64; or give dtype"),
        ({"input": torch.eye(4).to_sparse()}, TypeError, "input must be dense"),
        ({"dtype": torch.int32}, TypeError, "dtype must be"),
        ({"mask": torch.ones(4, dtype=torch.int64)}, TypeError, "mask must be boolean or floating point"),
        ({"mask": torch.ones(3)}, ValueError, r"mask of shape \(3,\) does not broadcast to \(3, 4\)"),
        ({"mask": torch.ones(1, 3, 4)}, ValueError, "does not broadcast"),
        ({"mask": torch.ones(4, device="meta")}, ValueError, "input is on cpu, mask on meta"),
        ({"scale": math.inf}, ValueError, "scale must be finite"),
    ],
)
def test_wrong_arguments(arguments: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        softmax(**{"input": torch.randn(3, 4), **arguments})  # type: ignore[arg-type]


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreted run")
def test_all_of_the_above_through_the_interpreter(interpreted: Callable[[str], int]) -> None:
    assert interpreted(__file__) > 100


@pytest.mark.gpu
@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", GPU_SIZES)
def test_gate_on_a_gpu(columns: int, dtype: torch.dtype, name: str) -> None:
    assert_gate(name, rows(67, columns, dtype=dtype), device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [100, 4096, 128_256])
def test_gate_of_masks_on_a_gpu(columns: int) -> None:
    x = rows(3, 5, columns, dtype=torch.bfloat16)
    for name in OURS:
        assert_gate(name, x, torch.randn(5, columns).bfloat16(), 0.3, device="cuda")
        assert_gate(name, x, torch.rand(3, 1, columns) > 0.3, 0.3, device="cuda")


@pytest.mark.gpu
@pytest.mark.large
def test_more_than_two_billion_elements_on_a_gpu() -> None:
    x = torch.randn(131_073, 16_384, device="cuda", dtype=torch.bfloat16)  # 2^31 + 16384
    y = softmax(x)
    for row in (0, 65_536, 131_072):
        torch.testing.assert_close(y[row], torch.softmax(x[row], -1))


@pytest.mark.gpu
def test_compiled_by_inductor_on_a_gpu() -> None:
    x = rows(64, 768).cuda()
    compiled = torch.compile(lambda x: softmax(x).square(), fullgraph=True)
    torch.testing.assert_close(compiled(x), softmax(x).square())
