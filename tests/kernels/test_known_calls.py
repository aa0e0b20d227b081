"""What is decided once for calls of known shapes, strides and dtypes: any sequence of calls gives the bits that it
gives where nothing is known.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from rooftop import kernels
from rooftop.kernels.elementwise import elementwise
from rooftop.launch import INTERPRETED, count_launches

pytest.importorskip("triton")
KNOWN: tuple[Any, ...] = (elementwise._known,)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def forget() -> None:
    for known in KNOWN:
        known.clear()


class Inputs:
    """Makes tensors with a few shapes and any strides, offsets and dtypes."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def one(self, *choices: Any) -> Any:
        return self.rng.choice(choices)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, learned: bool = True) -> Tensor:
        """Dense, transposed, with gaps, or off a multiple of 16 bytes."""
        kind = self.one("dense", "dense", "transposed", "gaps", "offset")
        values = torch.randn(shape, generator=self.generator).to(dtype)
        if kind == "transposed" and len(shape) > 1:
            values = values.transpose(0, -1).contiguous().transpose(0, -1)
        elif kind == "gaps" and shape:
            wide = torch.zeros(*shape[:-1], shape[-1] + 3, dtype=dtype)
            wide[..., : shape[-1]] = values
            values = wide[..., : shape[-1]]
        elif kind == "offset":
            memory = torch.zeros(values.numel() + 1, dtype=dtype)
            memory[1:] = values.flatten()
            values = memory[1:].view(shape)
        return values.requires_grad_(learned and self.one(True, True, False))


@kernels.fused
def gated(x, gate, scale):  # type: ignore[no-untyped-def]
    return x * torch.sigmoid(gate) * scale, x + scale


class Call(NamedTuple):
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


def of_elementwise(make: Inputs) -> Call:
    dtype, shape = make.one(*DTYPES[:3]), make.one((4, 6), (3, 16), (2, 3, 5), (0, 4))
    x = make.tensor(shape, dtype)
    if make.one(True, False):
        return Call(make.one(kernels.silu, kernels.gelu, kernels.tanh), (x,))
    other = make.tensor(make.one(shape, shape[-1:], ()), make.one(dtype, torch.float32))
    return Call(gated, (x, other, make.one(2, 0.5, 1.5, True)))


CALLS = {"elementwise": of_elementwise}


def bits(made: Any) -> list[Any]:
    made = made if isinstance(made, tuple | list) else (made,)
    return [(t.dtype, t.shape, t.stride(), t.detach().contiguous().view(-1).view(torch.uint8).tolist()) for t in made]


def both_directions(call: Call) -> list[Any]:
    made = call.function(*call.arguments)
    given = [t for t in call.arguments if isinstance(t, Tensor) and t.requires_grad]
    outputs = [t for t in (made if isinstance(made, tuple) else (made,)) if t.requires_grad]
    found = bits(made)
    if given and outputs:
        slopes = [torch.full_like(t, 0.5) for t in outputs]
        found += bits([t for t in torch.autograd.grad(outputs, given, slopes, allow_unused=True) if t is not None])
    with torch.no_grad():
        return found + bits(call.function(*call.arguments))


@pytest.mark.parametrize("family", CALLS)
@pytest.mark.parametrize("seed", [0, 1])
def test_any_sequence_of_calls_gives_the_bits_of_single_calls(family: str, seed: int) -> None:
    make = Inputs(seed)
    forget()
    calls = [CALLS[family](make) for _ in range(40)]
    with count_launches() as first:
        known = [both_directions(call) for call in (*calls, *calls)]
    for call, made in zip((*calls, *calls), known, strict=True):
        forget()
        assert both_directions(call) == made
    if INTERPRETED:
        assert sum(first.values()) > len(calls)


@pytest.mark.skipif(not INTERPRETED, reason="without kernels nothing is planned")
def test_a_second_call_plans_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.silu(torch.ones(4, 4))

    def refuse(*_: Any) -> None:
        raise AssertionError("planned again")

    monkeypatch.setattr(elementwise, "planned", refuse)
    assert kernels.silu(torch.zeros(4, 4)).equal(torch.zeros(4, 4))


def test_few_enough_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elementwise, "MOST_KNOWN", 3)
    forget()
    for size in range(1, 9):
        kernels.silu(torch.ones(size, 4))
        assert len(elementwise._known) <= 3
    forget()


@pytest.mark.skipif(INTERPRETED, reason="this is the outer process")
def test_all_through_the_interpreter(interpreted: Callable[..., int]) -> None:
    assert interpreted(__file__) >= 4
