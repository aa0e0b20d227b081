"""max_pool2d, both ways: the CPU implementation, and (by `test_transformers_interpreted.py`) the Triton kernel."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftop.kernels import max_pool2d
from rooftop.launch import INTERPRETED, count_launches

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LAST = torch.channels_last
CASES: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((2, 64, 9, 11), {"kernel_size": 3, "stride": 2, "padding": 1}),  # the pooling after the stem of a ResNet
    ((1, 5, 7, 6), {"kernel_size": 2}),
    ((1, 70, 6, 20), {"kernel_size": (3, 1), "stride": (1, 3), "padding": (1, 0)}),
    ((3, 1, 8, 5), {"kernel_size": (2, 3), "stride": 1, "dilation": (3, 1), "padding": 1}),
    ((0, 4, 6, 6), {"kernel_size": 2}),
    ((2, 8, 1, 1), {"kernel_size": 1}),
    ((2, 6, 8, 9), {"kernel_size": 3, "stride": 2, "ceil_mode": True}),  # the pools of GoogLeNet and SqueezeNet
    ((1, 3, 7, 6), {"kernel_size": (2, 3), "stride": (3, 5), "padding": 1, "ceil_mode": True}),
    ((1, 2, 4, 3), {"kernel_size": 5, "stride": 4, "ceil_mode": True}),  # no window is wholly inside
    ((1, 2, 9, 8), {"kernel_size": 2, "stride": 3, "dilation": 3, "padding": 1, "ceil_mode": True}),
]


def image(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.randn(*shape).to(device, dtype).contiguous(memory_format=LAST)


def assert_as_torch(x: Tensor, **options: Any) -> None:
    """The results are exact, because a maximum is not rounded."""
    with count_launches() as launches:
        y = max_pool2d(x, **options)
    expected = F.max_pool2d(x, **options)
    torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)
    assert y.is_contiguous(memory_format=LAST) or not x.is_contiguous(memory_format=LAST) or not len(x)
    by_kernel = (INTERPRETED or x.is_cuda) and x.is_contiguous(memory_format=LAST) and x.dtype != torch.float64
    assert launches["max_pool"] == (1 if by_kernel and y.numel() else 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "options"), CASES, ids=str)
def test_the_largest_of_each_window(shape: tuple[int, ...], options: dict[str, Any], dtype: torch.dtype) -> None:
    torch.manual_seed(sum(shape))
    assert_as_torch(image(*shape, dtype=dtype), **options)


@settings(deadline=None)
@given(st.data())
def test_rounding_up_is_that_of_torch(data: st.DataObject) -> None:
    size, kernel, stride, dilation = (data.draw(st.integers(1, most)) for most in (12, 5, 6, 3))
    options = {"kernel_size": kernel, "stride": stride, "padding": data.draw(st.integers(0, kernel // 2))}
    options |= {"dilation": dilation, "ceil_mode": True}
    x = image(1, 2, size, data.draw(st.integers(1, 12)))
    try:
        expected = F.max_pool2d(x, **options)
    except RuntimeError:
        with pytest.raises(ValueError, match="the window does not fit"):
            max_pool2d(x, **options)
        return
    assert torch.equal(max_pool2d(x, **options), expected)


def test_windows_wholly_below_zero_and_what_is_not_finite() -> None:
    x = image(1, 4, 6, 6) - 100
    x[0, 0, 0, 0], x[0, 1, 3, 3], x[0, 2, :, :], x[0, 3, 2, 2] = math.nan, math.inf, -math.inf, math.nan
    for padding in (0, 1):
        assert_as_torch(x, kernel_size=3, stride=2, padding=padding)
    assert max_pool2d(x, 3, 2, 1)[0, 0].isnan().sum() == 1


@pytest.mark.parametrize("layout", ["contiguous", "every second pixel", "float64", "large window"])
def test_what_the_kernel_does_not_take_is_pytorchs(layout: str) -> None:
    x = image(2, 6, 16, 17)
    options = {"kernel_size": 3, "stride": 2, "padding": 1}
    if layout == "contiguous":
        x = x.contiguous()
        assert_as_torch(x, **options)
        assert max_pool2d(x, **options).is_contiguous()
    elif layout == "every second pixel":
        assert_as_torch(x[:, :, ::2, ::2], **options)
    elif layout == "float64":
        assert_as_torch(x.double(), **options)
    else:
        with count_launches() as launches:
            y = max_pool2d(x, 7, 1, 3)
        assert torch.equal(y, F.max_pool2d(x, 7, 1, 3))
        assert not launches


def test_operator_checks_of_torch_library() -> None:
    operator = torch.ops.rooftop.max_pool2d.default
    for x in (image(2, 3, 7, 8), image(2, 3, 7, 8).contiguous()):
        for ceil_mode in (False, True):
            torch.library.opcheck(operator, (x, [3, 2], [2, 1], [1, 1], [1, 2], ceil_mode))


def test_compiled_whole() -> None:
    x = image(2, 3, 8, 8)
    compiled = torch.compile(lambda x: max_pool2d(x, 3, 2, 1) * 2, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), 2 * max_pool2d(x, 3, 2, 1))


def test_it_has_no_gradient_and_says_so() -> None:
    x = image(1, 2, 4, 4).requires_grad_()
    with pytest.raises(NotImplementedError, match=r"no gradient: use torch\.nn\.functional\.max_pool2d to train"):
        max_pool2d(x, 2)
    with torch.no_grad():
        assert not max_pool2d(x, 2).requires_grad
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(lambda x: max_pool2d(x, 2), (x.detach(),), (x.detach(),))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([1.0], 2), TypeError, "input must be a tensor, got list"),
        ((torch.zeros(1, 1, 4, 4).to_sparse(), 2), TypeError, "input must be dense"),
        ((torch.ones(1, 1, 4, 4).int(), 2), TypeError, "input must be bfloat16"),
        ((torch.zeros(1, 4, 4), 2), ValueError, r"expected input \(N, C, H, W\)"),
        ((torch.zeros(1, 0, 4, 4), 2), ValueError, "with channels and pixels"),
        ((torch.zeros(1, 1, 4, 4), 5), ValueError, "the window does not fit"),
        ((torch.zeros(1, 1, 4, 4), 2, 2, 2), ValueError, r"at most half of kernel_size \[2, 2\], got \[2, 2\]"),
        ((torch.zeros(1, 1, 4, 4), 2.0), TypeError, "kernel_size must be one integer or a pair of integers, got 2.0"),
        ((torch.zeros(1, 1, 4, 4), 2, 0), ValueError, "stride must be at least 1, got 0"),
        ((torch.zeros(1, 1, 4, 4), (2, 2, 2)), TypeError, "kernel_size must be one integer or a pair of integers"),
        ((torch.zeros(1, 1, 4, 4), 2, 2, 0, 1, 1), TypeError, "ceil_mode must be True or False, got 1"),
    ],
)
def test_wrong_arguments(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^max_pool2d: .*{message}"):
        max_pool2d(*arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64, 400, 608), (3, 64, 112, 112), (2, 100, 33, 47), (1, 3, 5, 300)], ids=str)
def test_the_largest_of_each_window_on_a_gpu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = image(*shape, dtype=dtype, device="cuda")
    assert_as_torch(x, kernel_size=3, stride=2, padding=1)
    assert_as_torch(x, kernel_size=2)
    assert_as_torch(x, kernel_size=3, stride=2, ceil_mode=True)
    x[0, 0, 2, 2] = math.nan
    assert_as_torch(x, kernel_size=3, stride=2, padding=1)


@pytest.mark.gpu
@pytest.mark.large
def test_more_than_two_billion_elements_on_a_gpu() -> None:
    x = torch.empty(33, 64, 1024, 1024, device="cuda", dtype=torch.bfloat16).to(memory_format=LAST)
    x.normal_()  # 2^31 + 2^26
    y = max_pool2d(x, 3, 2, 1)
    assert torch.equal(y[-1:], F.max_pool2d(x[-1:], 3, 2, 1))
