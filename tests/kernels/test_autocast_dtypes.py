"""Under autocast a public function's result has the dtype of the PyTorch function that it stands for.

PyTorch is the oracle: directly on the CPU, and for a GPU with fake tensors, which PyTorch's autocast casts like real
ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode

from rooftop import kernels, nn
from rooftop.kernels.norms.norms import _layer_norm, _rms_norm
from rooftop.kernels.norms.sum_norms import _add_layer_norm
from rooftop.kernels.operands.autocasting import result_dtype
from rooftop.testing import assert_as_accurate

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
Function = Callable[[Tensor, Tensor, Tensor], Any]  # functions of rows (4, 8), a parameter (8,) and targets (4,)


def total_and_norm(norm: Callable[..., Tensor], x: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
    return norm(x + x, (8,), *parameters), x + x


PAIRS: dict[str, tuple[Function, Function]] = {
    "layer_norm": (lambda x, w, t: kernels.layer_norm(x, 8, w, w), lambda x, w, t: F.layer_norm(x, (8,), w, w)),
    "layer_norm alone": (lambda x, w, t: kernels.layer_norm(x, 8), lambda x, w, t: F.layer_norm(x, (8,))),
    "rms_norm": (lambda x, w, t: kernels.rms_norm(x, 8, w), lambda x, w, t: F.rms_norm(x, (8,), w)),
    "add_layer_norm": (
        lambda x, w, t: kernels.add_layer_norm(x, x, 8, w, w),
        lambda x, w, t: total_and_norm(F.layer_norm, x, w, w),
    ),
    "add_layer_norm_cuda": (
        lambda x, w, t: kernels.add_layer_norm_cuda(x, x, 8, w, w),
        lambda x, w, t: total_and_norm(F.layer_norm, x, w, w),
    ),
    "add_rms_norm": (
        lambda x, w, t: kernels.add_rms_norm(x, x, 8, w),
        lambda x, w, t: total_and_norm(F.rms_norm, x, w),
    ),
    "softmax": (lambda x, w, t: kernels.softmax(x), lambda x, w, t: F.softmax(x, -1)),
    "softmax to a dtype": (
        lambda x, w, t: kernels.softmax(x, dtype=torch.bfloat16),
        lambda x, w, t: F.softmax(x, -1, dtype=torch.bfloat16),
    ),
    "log_softmax": (lambda x, w, t: kernels.log_softmax(x, 0), lambda x, w, t: F.log_softmax(x, 0)),
    "cross_entropy": (lambda x, w, t: kernels.cross_entropy(x, t), lambda x, w, t: F.cross_entropy(x, t)),
    "cross_entropy of rows": (
        lambda x, w, t: kernels.cross_entropy(x, t, reduction="none"),
        lambda x, w, t: F.cross_entropy(x, t, reduction="none"),
    ),
    "linear_cross_entropy": (
        lambda x, w, t: kernels.linear_cross_entropy(x, x, t),
        lambda x, w, t: F.cross_entropy(F.linear(x, x), t),
    ),
    "sum": (lambda x, w, t: kernels.sum(x, 1), lambda x, w, t: x.sum(1)),
    "mean": (lambda x, w, t: kernels.mean(x, 1), lambda x, w, t: x.mean(1)),
    "amax": (lambda x, w, t: kernels.amax(x, 1), lambda x, w, t: x.amax(1)),
    "norm": (lambda x, w, t: kernels.norm(x, 2, 1), lambda x, w, t: torch.linalg.vector_norm(x, 2, 1)),
    "linear_act": (lambda x, w, t: kernels.linear_act(x, x, None, "gelu"), lambda x, w, t: F.gelu(F.linear(x, x))),
    "matmul": (lambda x, w, t: kernels.matmul(x, x.mT), lambda x, w, t: x @ x.mT),
    "swiglu": (lambda x, w, t: kernels.swiglu(x, x), lambda x, w, t: F.silu(x) * x),
    "embedding": (lambda x, w, t: kernels.embedding(t, x), lambda x, w, t: F.embedding(t, x)),
    "gelu": (lambda x, w, t: kernels.gelu(x), lambda x, w, t: F.gelu(x)),
    "LayerNorm": (lambda x, w, t: of(nn.LayerNorm, x), lambda x, w, t: of(torch.nn.LayerNorm, x)),
    "RMSNorm": (lambda x, w, t: of(nn.RMSNorm, x), lambda x, w, t: of(torch.nn.RMSNorm, x)),
    "Softmax": (lambda x, w, t: nn.Softmax(-1)(x), lambda x, w, t: torch.nn.Softmax(-1)(x)),
    "LogSoftmax": (lambda x, w, t: nn.LogSoftmax(-1)(x), lambda x, w, t: torch.nn.LogSoftmax(-1)(x)),
    "CrossEntropyLoss": (
        lambda x, w, t: nn.CrossEntropyLoss()(x, t),
        lambda x, w, t: torch.nn.CrossEntropyLoss()(x, t),
    ),
}


def of(kind: Callable[..., torch.nn.Module], x: Tensor) -> Tensor:
    """The function with float32 parameters, as in a model under autocast, on the device of x."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    module = kind(8, device="meta")
    for name, parameter in module.named_parameters():
        setattr(module, name, torch.nn.Parameter(torch.empty(parameter.shape, device=x.device, dtype=dtype)))
    result: Tensor = module(x)
    return result


@contextmanager
def autocasting(device: str, *enabled: bool) -> Iterator[None]:
    """Nested `with torch.autocast` blocks. A PyTorch without CUDA refuses to enter autocast for a GPU."""
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, enabled[-1])
    torch.set_autocast_dtype(device, torch.bfloat16)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])


def dtypes_of(function: Function, device: str, dtype: torch.dtype, parameter: torch.dtype) -> list[torch.dtype]:
    x, weight = torch.empty(4, 8, device=device, dtype=dtype), torch.empty(8, device=device, dtype=parameter)
    found = function(x, weight, torch.zeros(4, dtype=torch.int64, device=device))
    return [y.dtype for y in (found if isinstance(found, tuple) else (found,))]


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("enabled", [(True,), (True, False), (False, True)], ids=["on", "off within", "on within"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", PAIRS)
def test_the_dtype_is_pytorchs(name: str, device: str, enabled: tuple[bool, ...]) -> None:
    ours, theirs = PAIRS[name]
    # Without CUDA, autograd stops the process where a fake tensor of a GPU needs a gradient.
    with torch.no_grad(), FakeTensorMode() if device == "cuda" else nullcontext(), autocasting(device, *enabled):
        for dtype in DTYPES:
            for parameter in {dtype, torch.float64 if dtype == torch.float64 else torch.float32}:
                try:
                    expected = dtypes_of(theirs, device, dtype, parameter)
                except RuntimeError:
                    continue  # calls that PyTorch refuses
                assert dtypes_of(ours, device, dtype, parameter) == expected, (dtype, parameter)


def test_nested_as_a_user_writes_it() -> None:
    x = torch.randn(4, 8).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert kernels.layer_norm(x, 8).dtype == torch.bfloat16
        assert kernels.cross_entropy(x, torch.arange(4)).dtype == torch.float32
        with torch.autocast("cpu", enabled=False):
            assert kernels.cross_entropy(x, torch.arange(4)).dtype == torch.bfloat16
        assert kernels.cross_entropy(x, torch.arange(4)).dtype == torch.float32
    with autocasting("cuda", True):  # the autocast of another device
        assert kernels.layer_norm(x, 8).dtype == kernels.softmax(x).dtype == torch.bfloat16
    assert result_dtype("layer_norm", torch.empty(2, device="meta", dtype=torch.bfloat16)) == torch.bfloat16


WIDE: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "layer_norm": (
        lambda x, w: _layer_norm(x, w, w, 1e-5, torch.float32)[:1],
        lambda x, w: (F.layer_norm(x, w.shape, w, w),),
    ),
    "rms_norm": (
        lambda x, w: _rms_norm(x, w, 1e-5, torch.float32)[:1],
        lambda x, w: (F.rms_norm(x, w.shape, w, 1e-5),),
    ),
    "add_layer_norm": (
        lambda x, w: _add_layer_norm(x, x.detach(), None, w, w, 1e-5, torch.float32)[:2],
        lambda x, w: (F.layer_norm(x + x.detach(), w.shape, w, w), x + x.detach()),
    ),
}


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("shape", [(5, 48), (16, 131), (3, 40)])
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_half_precision_is_not_rounded_before_a_result_in_float32(
    name: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Under autocast, a GPU reads half precision and writes float32, and the gradient is half precision."""
    torch.manual_seed(0)
    rows, parameter = torch.randn(shape).mul(4).to(dtype), torch.randn(shape[1])

    def results(function: Callable[..., Any], inside: torch.dtype) -> list[Tensor]:
        x, w = rows.clone().requires_grad_(), parameter.clone().requires_grad_()
        y, *total = function(x.to(inside) if inside != dtype else x, w.to(inside) if inside == torch.float64 else w)
        torch.manual_seed(1)
        (torch.randn(shape) * y).sum().backward()
        assert x.grad is not None
        assert w.grad is not None
        return [y.detach(), *(t.detach() for t in total), x.grad, w.grad]

    ours, theirs = WIDE[name]
    found, plain, exact = results(ours, dtype), results(theirs, torch.float32), results(theirs, torch.float64)
    assert found[0].dtype == torch.float32
    if len(found) == 4:
        assert found[1].dtype == dtype  # the sum keeps the dtype of the addend
        return
    for mine, eager, truth in zip(found, plain, exact, strict=True):
        assert_as_accurate(mine, eager, truth.double())
