"""The numerics gate holds for every draw, not only for the seeds of other tests: for few and many rows, and for values
far from zero.

Each test takes many small draws with an odd number of columns. PyTorch in float64 is the reference, and its error in
float32 is the limit. A mean rounded to float32, or statistics rounded before backward uses them, fail in some of these
draws.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rooftop import kernels
from rooftop.launch import INTERPRETED
from rooftop.sparse.site_norms import site_norm
from rooftop.testing import assert_as_accurate

EPS = 1e-5
Function = Callable[..., Any]  # functions of x (M, N), weight (N,), bias (N,) and targets (M,)


def pair(name: str, **keywords: Any) -> tuple[Function, Function]:
    """A function of rows that Rooftop and PyTorch have under the same name."""
    theirs = torch.linalg.vector_norm if name == "norm" else getattr(torch, name)
    return (
        lambda x, w, b, t: getattr(kernels, name)(x, **keywords),
        lambda x, w, b, t: theirs(x, **keywords),
    )


def loss(**keywords: Any) -> tuple[Function, Function]:
    theirs = {key: value for key, value in keywords.items() if key != "fused"}
    return (
        lambda x, w, b, t: kernels.cross_entropy(x, t, **keywords),
        lambda x, w, b, t: F.cross_entropy(x, t, **theirs),
    )


PAIRS: dict[str, tuple[Function, Function]] = {
    "layer_norm": (
        lambda x, w, b, t: kernels.layer_norm(x, w.shape, w, b),
        lambda x, w, b, t: F.layer_norm(x, w.shape, w, b),
    ),
    "layer_norm alone": (
        lambda x, w, b, t: kernels.layer_norm(x, w.shape),
        lambda x, w, b, t: F.layer_norm(x, w.shape),
    ),
    "rms_norm": (
        lambda x, w, b, t: kernels.rms_norm(x, w.shape, w, EPS),
        lambda x, w, b, t: F.rms_norm(x, w.shape, w, EPS),
    ),
    "add_layer_norm": (
        lambda x, w, b, t: kernels.add_layer_norm(x, x.flip(0), w.shape, w, b),
        lambda x, w, b, t: (F.layer_norm(x + x.flip(0), w.shape, w, b), x + x.flip(0)),
    ),
    "softmax": pair("softmax", dim=-1),
    "log_softmax": pair("log_softmax", dim=-1),
    "cross_entropy": loss(),
    "cross_entropy, separable": loss(fused=False),
    "cross_entropy of rows": loss(reduction="none"),
    "cross_entropy, smoothed": loss(label_smoothing=0.1, reduction="sum"),
    "sum": pair("sum", dim=1),
    "sum of columns": pair("sum", dim=0),
    "mean": pair("mean", dim=1),
    "norm": pair("norm", ord=2, dim=1),
    "site_norm": (
        lambda x, w, b, t: site_norm(x, torch.ones(len(x), dtype=torch.bool), w, b, None, None, EPS)[0],
        lambda x, w, b, t: F.batch_norm(x, None, None, w, b, True, eps=EPS),
    ),
}
SHAPES = [(3, 7), (16, 33)] if INTERPRETED else [(2, 7), (4, 64), (3, 133), (5, 769), (301, 33)]
DRAWS = 12 if INTERPRETED else 25


def results(function: Function, x: Tensor, weight: Tensor, bias: Tensor, target: Tensor, seed: int) -> list[Tensor]:
    """The result, and the gradients of x, weight and bias."""
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    found = function(*leaves, target)
    outputs = found if isinstance(found, tuple) else (found,)
    generator = torch.Generator().manual_seed(seed)
    slopes = [torch.randn(y.shape, generator=generator).to(y.dtype) for y in outputs]
    torch.autograd.backward(outputs, slopes)
    return [*(y.detach() for y in outputs), *(t.grad for t in leaves if t.grad is not None)]


@pytest.mark.parametrize("offset", [0.0, 50.0, 1e4])
@pytest.mark.parametrize("name", PAIRS)
def test_every_draw_is_within_the_gate(name: str, offset: float) -> None:
    ours, theirs = PAIRS[name]
    for rows, columns in SHAPES:
        for seed in range(DRAWS if rows < 100 else 3):
            generator = torch.Generator().manual_seed(1000 * columns + seed)
            x = 3 * torch.randn(rows, columns, generator=generator) + offset
            weight, bias = torch.randn(2, columns, generator=generator)
            target = torch.randint(columns, (rows,), generator=generator)
            inputs = (x, weight, bias)
            found, plain = (results(each, *inputs, target, seed) for each in (ours, theirs))
            exact = results(theirs, *(t.double() for t in inputs), target, seed)
            for number, values in enumerate(zip(found, plain, exact, strict=True)):
                assert_as_accurate(*values, what=f"{name}, {number} of {(rows, columns)}, seed {seed}")


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreted run")
def test_all_of_the_above_through_the_interpreter(interpreted: Callable[[str], int]) -> None:
    assert interpreted(__file__) == 3 * len(PAIRS)
