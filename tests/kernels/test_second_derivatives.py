"""Derivatives of derivatives, forward mode and the transforms of `torch.func` are correct, or are refused with a
remedy.

PyTorch's functions are the oracle, in float64, by the table of `test_robustness.py`; `torch.autograd.gradgradcheck`
compares with finite differences. Nothing may give a second derivative that lacks a term.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rooftop import kernels
from rooftop.launch import INTERPRETED, count_launches
from rooftop.nn import KINDS, replace

TWICE = {
    *("layer_norm", "rms_norm", "add_layer_norm", "add_layer_norm_cuda", "add_rms_norm", "softmax", "log_softmax"),
    *("cross_entropy", "linear_cross_entropy", "linear_act", "matmul", "swiglu", "embedding", "sum", "mean", "amax"),
    *("amin", "norm", "relu", "sigmoid", "tanh", "silu", "gelu", "add", "mul", "axpy"),
}
"""Functions whose derivatives and transforms are all supported and correct. For other functions they are correct or
refused."""
TABLE = runpy.run_path(str(Path(__file__).with_name("test_robustness.py")))
LEARNED = [public for public in TABLE["PUBLIC"] if public.name not in TABLE["WITHOUT_GRADIENT"]]
Loss = Callable[..., Tensor]


def loss_of(function: Callable[..., Any], tensors: dict[str, Tensor], names: list[str]) -> Loss:
    """A nonlinear scalar function of the named tensors."""

    def loss(*values: Tensor) -> Tensor:
        found = function(**{**tensors, **dict(zip(names, values, strict=True))})
        outputs = found if isinstance(found, tuple) else (found,)
        total = values[0].new_zeros(())
        for y in outputs:
            total = total + (y * torch.linspace(0.5, 1, y.numel(), dtype=y.dtype).reshape(y.shape)).sin().sum()
        return total

    return loss


def penalty(loss: Loss, values: list[Tensor]) -> tuple[Tensor, ...]:
    """The derivative of the squared length of the gradient."""
    leaves = [t.clone().requires_grad_() for t in values]
    first = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
    return torch.autograd.grad(torch.stack([g.square().sum() for g in first]).sum(), leaves)


def all_of(values: list[Tensor]) -> tuple[int, ...]:
    return tuple(range(len(values)))


def grad_of_grad(loss: Loss, values: list[Tensor]) -> tuple[Tensor, ...]:
    first = torch.func.grad(loss, all_of(values))
    return torch.func.grad(lambda *x: torch.stack([g.square().sum() for g in first(*x)]).sum(), all_of(values))(*values)  # type: ignore[no-any-return]


def forward_over_reverse(loss: Loss, values: list[Tensor]) -> tuple[Tensor, ...]:
    """A product with the Hessian, as `torch.func.hessian` takes it."""
    along = tuple(torch.ones_like(t) for t in values)
    return torch.func.jvp(torch.func.grad(loss, all_of(values)), tuple(values), along)[1]  # type: ignore[no-any-return]


def forward_mode(loss: Loss, values: list[Tensor]) -> tuple[Tensor, ...]:
    return (torch.func.jvp(loss, tuple(values), tuple(torch.ones_like(t) for t in values))[1],)


def two(values: list[Tensor]) -> list[Tensor]:
    return [torch.stack((t, 1.5 * t)) for t in values]


def batch(loss: Loss, values: list[Tensor]) -> tuple[Tensor, ...]:
    return (torch.func.vmap(loss)(*two(values)),)


def batch_of_gradients(loss: Loss, values: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.func.vmap(torch.func.grad(loss, all_of(values)))(*two(values))  # type: ignore[no-any-return]


def gradients_of_a_batch(loss: Loss, values: list[Tensor]) -> tuple[Tensor, ...]:
    leaves = [t.clone().requires_grad_() for t in values]
    y = loss(*leaves)
    return torch.autograd.grad(y, leaves, torch.tensor([1.0, 2.0], dtype=y.dtype), is_grads_batched=True)


WAYS = [penalty, grad_of_grad, forward_over_reverse, forward_mode, batch, batch_of_gradients, gradients_of_a_batch]


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("public", LEARNED, ids=lambda public: public.name)
def test_right_or_refused(public: Any, way: Callable[..., tuple[Tensor, ...]]) -> None:
    tensors = {n: t.double() if t.is_floating_point() else t for n, t in TABLE["tensors_of"](public).items()}
    names = [n for n in TABLE["learned"](public, tensors) if tensors[n].is_floating_point()]
    values = [tensors[n] for n in names]
    refusal, found = None, None
    try:
        found = way(loss_of(public.ours, tensors, names), values)
    except NotImplementedError as error:
        refusal = str(error)
    if refusal is not None:
        assert public.name not in TWICE
        assert "use " in refusal or "differentiate " in refusal, refusal
        return
    expected = way(loss_of(public.peer, tensors, names), values)
    torch.testing.assert_close(found, expected)


TARGET = torch.tensor([1, 0, 3, -100])
ROWS: dict[str, tuple[list[tuple[int, ...]], Callable[..., Any]]] = {
    "layer_norm": ([(4, 5), (5,), (5,)], lambda x, w, b: kernels.layer_norm(x, 5, w, b)),
    "layer_norm of planes": ([(2, 3, 4)], lambda x: kernels.layer_norm(x, (3, 4))),
    "rms_norm": ([(4, 5), (5,)], lambda x, w: kernels.rms_norm(x, 5, w)),
    "add_layer_norm": (
        [(4, 5), (4, 5), (5,), (5,), (5,)],
        lambda x, r, i, w, b: kernels.add_layer_norm(x, r, 5, w, b, input_bias=i),
    ),
    "add_rms_norm": ([(4, 5), (4, 5), (5,)], lambda x, r, w: kernels.add_rms_norm(x, r, 5, w)),
    "softmax": ([(4, 5), (5,)], lambda x, m: kernels.softmax(x, 0, mask=m, scale=0.7)),
    "log_softmax": (
        [(4, 5)],
        lambda x: kernels.log_softmax(x, mask=torch.tensor([True, True, False, True, True]))[:, :2],
    ),
    "cross_entropy": ([(4, 5)], lambda x: kernels.cross_entropy(x, TARGET, label_smoothing=0.1, z_loss=0.2)),
    "cross_entropy, weighted": (
        [(4, 5)],
        lambda x: kernels.cross_entropy(x, TARGET, torch.arange(1.0, 6.0).double(), label_smoothing=0.1),
    ),
    "cross_entropy of rows": ([(4, 5)], lambda x: kernels.cross_entropy(x, TARGET, z_loss=0.2, reduction="none")),
    "cross_entropy, separable": ([(4, 5)], lambda x: kernels.cross_entropy(x, TARGET, fused=False, z_loss=0.2)),
    "linear_cross_entropy": (
        [(4, 3), (5, 3), (5,)],
        lambda h, w, b: kernels.linear_cross_entropy(h, w, TARGET, b, label_smoothing=0.1, z_loss=0.2),
    ),
    "swiglu": ([(4, 6)], kernels.swiglu),
    "embedding": ([(5, 3)], lambda w: kernels.embedding(torch.tensor([[1, 4], [1, 0]]), w).square()),
    "norm": ([(4, 5)], lambda x: kernels.norm(x, 2, 1)),
}


@pytest.mark.parametrize("name", ROWS)
def test_second_derivatives_are_those_of_finite_differences(name: str) -> None:
    shapes, function = ROWS[name]
    torch.manual_seed(0)
    inputs = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


def test_third_derivatives_and_hessians() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)

    def written_out(x: Tensor) -> Tensor:
        """A layer norm of single operators, because third derivatives of PyTorch's layer norm are wrong."""
        apart = x - x.mean(1, keepdim=True)
        return apart / (apart.square().mean(1, keepdim=True) + 1e-5).sqrt() * weight

    for ours, theirs in (
        (lambda x: kernels.layer_norm(x, 4, weight), written_out),
        (lambda x: kernels.rms_norm(x, 4, weight, 1e-5), lambda x: F.rms_norm(x, (4,), weight, 1e-5)),
        (kernels.softmax, lambda x: F.softmax(x, -1)),
        (lambda x: kernels.cross_entropy(x, torch.arange(3)), lambda x: F.cross_entropy(x, torch.arange(3))),
    ):
        found, expected = (torch.func.hessian(lambda x, f=f: f(x).sin().sum())(x) for f in (ours, theirs))  # type: ignore[misc]
        torch.testing.assert_close(found, expected)

        def third(function: Callable[[Tensor], Tensor]) -> Tensor:
            leaf = x.clone().requires_grad_()
            y = function(leaf).sin().sum()
            for _ in range(2):
                (gradient,) = torch.autograd.grad(y, leaf, create_graph=True)
                y = gradient.square().sum()
            return torch.autograd.grad(y, leaf)[0]

        torch.testing.assert_close(third(ours), third(theirs))


def critic() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 8), nn.RMSNorm(8), nn.Softmax(-1))


def test_a_gradient_penalty_trains_a_critic_as_pytorchs() -> None:
    """The gradient penalty of WGAN-GP, in float32. Interpreted kernels compute the first derivatives."""
    found = []
    for model in (critic(), critic()):
        if not found:
            replace(model, only=KINDS)
        torch.manual_seed(4)
        x = torch.randn(5, 6, requires_grad=True)
        (gradient,) = torch.autograd.grad(model(x)[:, :3].sum(), x, create_graph=True)
        (gradient.norm(dim=1) - 1).square().mean().backward()
        found.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_fused_kernel_of_a_loss_has_derivatives_of_any_order(reduction: str) -> None:
    """The kernel computes the first derivative. For the second one, PyTorch computes the first again from the
    logits."""
    torch.manual_seed(0)
    weight, x = torch.randn(5, 3), torch.randn(4, 3)
    options = {"label_smoothing": 0.1, "reduction": reduction}
    found = []
    for function in (kernels.cross_entropy, F.cross_entropy):
        leaf = weight.clone().requires_grad_()
        with count_launches() as launches:
            logits = F.linear(x, leaf)
            value = function(logits, TARGET, **options)
        assert bool(launches) == (INTERPRETED and not found)
        for _ in range(3):
            (gradient,) = torch.autograd.grad(value, leaf, create_graph=True)
            value = gradient.square().sum()
            found.append(gradient.detach())
    for ours, theirs in zip(found[:3], found[3:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(not INTERPRETED, reason="on the CPU the logits are kept")
@pytest.mark.parametrize("lost", ["gone", "changed", "another shape"])
def test_the_fused_kernel_of_a_loss_refuses_where_its_logits_are_lost(lost: str) -> None:
    leaf = torch.randn(4, 5, requires_grad=True)
    logits = leaf * 2
    if lost == "another shape":
        loss = kernels.cross_entropy(logits[..., None], TARGET[:, None])
    else:
        loss = kernels.cross_entropy(logits, TARGET)
    if lost == "changed":
        with torch.no_grad():
            logits.add_(1)
    elif lost == "gone":
        del logits
    with pytest.raises(NotImplementedError, match="use fused=False"):
        torch.autograd.grad(loss, leaf, create_graph=True)


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreted run")
def test_gradients_of_kernels_through_the_interpreter(interpreted: Callable[..., int]) -> None:
    assert interpreted(__file__, "-k", "penalty_trains or fused_kernel or interpreter") == 6
