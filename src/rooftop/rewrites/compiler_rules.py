"""Rules about `torch.compile`: the whole model, or its repeated blocks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn

from rooftop.rewrites.candidates import Candidate, Rule, Times, only_on_gpu

LEAST_BLOCKS = 3
"""Of a class within one container; these are compiled once for all."""
START_S, SECONDS_A_CALL = 5.0, 0.12
"""Measured compile time of models with 60 to 600 operator calls, on two cores of a server: a start and a time for each
call.
"""


class Compile(Rule):
    """The whole model through `torch.compile`, for the shapes of its calls."""

    trains = True
    kind = "compile"

    def __init__(self, mode: str = "default") -> None:
        self.mode = mode
        self.name = "compile" if mode == "default" else f"compile-{mode}"

    def refusal(self, candidate: Candidate) -> str | None:
        return only_on_gpu(candidate) if self.mode == "reduce-overhead" else None

    def predicted_ms(self, times: Times) -> float:
        return _between_products(times) * (0.8 if self.mode == "reduce-overhead" else 0.5)

    def seconds(self, times: Times) -> float:
        return START_S + SECONDS_A_CALL * sum(call.count for call in times.calls)

    def apply(self, candidate: Candidate) -> str:
        run = candidate.call
        compiled = torch.compile(run, dynamic=False, mode=None if self.mode == "default" else self.mode)
        if self.mode != "reduce-overhead":
            candidate.call = compiled
            return "the whole model"

        def call(*args: Any, **kwargs: Any) -> Any:
            torch.compiler.cudagraph_mark_step_begin()
            return torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, compiled(*args, **kwargs))

        candidate.call = call
        return "the whole model, its kernels in CUDA graphs"


class CompileBlocks(Rule):
    """Repeated blocks of a model through `torch.compile`, which compiles one for all."""

    name = "compile-blocks"
    trains = True
    kind = "compile"

    def predicted_ms(self, times: Times) -> float:
        return 0.45 * _between_products(times)

    def seconds(self, times: Times) -> float:
        return START_S + SECONDS_A_CALL / 2 * sum(call.count for call in times.calls)

    def apply(self, candidate: Candidate) -> str:
        blocks = repeated_blocks(candidate.model)
        for block in blocks:
            block.compile(dynamic=False)
        kinds = Counter(type(block).__name__ for block in blocks)
        return ", ".join(f"{count} {kind}" for kind, count in kinds.items())


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Blocks that one container holds at least `LEAST_BLOCKS` times. A block has submodules; none is inside another."""
    found: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            counts = Counter(type(part) for part in child if any(True for _ in part.children()))
            taken = [part for part in child if counts[type(part)] >= LEAST_BLOCKS]
            found += taken
            found += [block for part in child if part not in taken for block in repeated_blocks(part)]
        else:
            found += repeated_blocks(child)
    return found


def _between_products(times: Times) -> float:
    """Time of everything except products, convolutions and attention, which the compiler leaves to libraries: of other
    operators, and of the host between them."""
    return max(0.0, times.wall_ms - times.of("convolution", "mm", "linear", "attention"))
