"""Reductions compared with torch and torch.compile, in microseconds.

    python benchmarks/kernels/reductions.py [--out benchmarks/results/h200/reductions.json] [--seed 1]

The first case is the sum of all elements in float32, in the listed sizes and three random ones (`--seed` repeats them).
Other cases reduce rows, columns, a middle dimension, or all dimensions except the channels, or compute a norm, the
indices of extremes, or the gradient of an extreme (alone and with its forward pass). For extremes, torch.compile's
forward stores one byte per element that says whether it ties. Its backward reads these bytes instead of the input, so
the backward alone may beat the roof. Variants are interleaved, and figures are medians. Inputs rotate, so that they
come from memory and not from L2. Each variant is replayed from a CUDA graph, which shows the kernels, and called
eagerly. The roof follows from the operator's cost and the ceilings measured in the same run. The file is written after
each case.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from repeating import after_repeats
from torch import Tensor
from torch._functorch import config as functorch_config

from rooftop import kernels
from rooftop.cost import CountingMode, roof
from rooftop.hardware import Ceilings, compare, measure_ceilings
from rooftop.hardware.graphs import captured
from rooftop.hardware.timing import rotated, rotated_copies
from rooftop.launch import repeated_calls
from rooftop.whole_files import write_json

SIZES = (1 << 20, 1 << 24, 1 << 28)
SPANS = ((10_000, 1 << 18), (1 << 18, 1 << 23), (1 << 23, 1 << 28))
SECONDS, WARM_UP_SECONDS = 0.03, 0.01  # for each variant
Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """A reduction of a tensor. `dim` None reduces all dimensions. `direction` says whether forward, backward or both
    are timed."""

    name: str
    shape: tuple[int, ...]
    dim: int | tuple[int, ...] | None
    dtype: torch.dtype = torch.bfloat16
    direction: Literal["forward", "backward", "both"] = "forward"


CASES = (
    Case("sum", (1 << 17, 1024), 1),
    Case("sum", (1 << 14, 8192), 1),
    Case("sum", (1 << 17, 1024), 0),
    Case("mean", (64, 2048, 1024), 1),
    Case("sum", (64, 256, 56, 56), (0, 2, 3)),
    Case("norm", (1 << 28,), None, torch.float32),
    Case("argmax", (1024, 128256), 1),
    Case("amax", (1 << 17, 1024), 1, direction="backward"),
    Case("amax", (1 << 17, 1024), 1, direction="both"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument(
        "--seed", type=int, default=random.SystemRandom().randrange(1 << 16), help="seed of the drawn sizes"
    )
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU")
    drawn = [random.Random(options.seed + i).randint(*span) for i, span in enumerate(SPANS)]
    repeated_calls.build()
    ceilings = measure_ceilings("cuda")
    sums = [Case("sum", (n,), None, torch.float32) for n in (*SIZES, *drawn)]
    found: dict[str, Any] = {"environment": {"device": ceilings.device, "versions": dict(ceilings.versions)}}
    found |= {"unit": "us", "seed": options.seed, "drawn": drawn, "rows": []}
    for case in (*sums, *CASES):
        found["rows"].append(measure_case(case, ceilings))
        if options.out:
            write_json(options.out, found)


def functions(case: Case) -> dict[str, Function]:
    """The variants."""
    dim, name = case.dim, case.name
    if name == "norm":
        plain: Function = lambda x: torch.linalg.vector_norm(x, 2, dim)  # noqa: E731
    elif name in ("amax", "amin"):
        plain = lambda x: getattr(torch, name)(x, () if dim is None else dim)  # noqa: E731
    else:
        plain = lambda x: getattr(torch, name)(x, dim)  # noqa: E731
    mine = getattr(kernels, name)
    return {
        "rooftop": lambda x: mine(x, dim=dim),
        "torch": plain,
        "compile": torch.compile(plain, dynamic=False),
    }


def measure_case(case: Case, ceilings: Ceilings) -> dict[str, Any]:
    """Times of each variant, replayed and eager, and the roof."""
    torch._dynamo.reset()
    x = torch.randn(case.shape, device="cuda").to(case.dtype).requires_grad_(case.direction != "forward")
    sets = rotated_copies([x], torch.cuda.get_device_properties(x.device).L2_cache_size)
    variants = {name: _calls(function, sets, case.direction) for name, function in functions(case).items()}
    eager = _times({name: calls["eager"] for name, calls in variants.items()}, 1)
    replayed = _times({name: calls["replay"] for name, calls in variants.items()}, len(sets))
    dtype = str(case.dtype).removeprefix("torch.")
    row = {"operator": case.name, "shape": case.shape, "dim": case.dim, "dtype": dtype, "direction": case.direction}
    row |= {"roof": _roof_us(case, x, ceilings), "graph": replayed, "eager": eager}
    times = "  ".join(f"{name} {us:.1f} (eager {eager[name]:.1f})" for name, us in replayed.items())
    print(f"{case.name} {case.direction} {case.shape} over {case.dim}: roof {row['roof']:.1f} us  {times}", flush=True)
    return row


def _times(variants: dict[str, Callable[[], object]], calls: int) -> dict[str, float]:
    """us per call of each variant. One sample times this many calls."""
    with torch.cuda.stream(STREAM):
        found = compare(variants, device="cuda", seconds=SECONDS, warm_up_seconds=WARM_UP_SECONDS)
    return {name: 1e3 * timing.median_ms / calls for name, timing in found.items()}


def _calls(function: Function, sets: list[list[Tensor]], direction: str) -> dict[str, Callable[[], object]]:
    """One eager call, and the replay of a graph that holds one call for each set of inputs."""
    if direction == "forward":
        plain = [[x.detach()] for (x,) in sets]
        return {"eager": rotated(function, plain), "replay": captured(lambda: [function(x) for (x,) in plain], STREAM)}
    with torch.cuda.stream(STREAM):  # autograd runs a backward on the stream of its forward
        taped = [[after_repeats(function, x), x] for (x,) in sets]
    gradients = [[y, x, torch.randn_like(y)] for y, x in taped]
    if direction == "both":
        inputs = [[x, dy] for _, x, dy in gradients]
        both = lambda x, dy: _backward(function(x), x, dy)  # noqa: E731
        replay = captured(lambda: [both(*each) for each in inputs], STREAM)
        return {"eager": rotated(both, inputs), "replay": replay}
    return {
        "eager": rotated(_backward, gradients),
        "replay": captured(lambda: [_backward(*each) for each in gradients], STREAM),
    }


def _backward(y: Tensor, x: Tensor, dy: Tensor) -> object:
    return torch.autograd.grad(y, x, dy, retain_graph=True)


def _roof_us(case: Case, x: Tensor, ceilings: Ceilings) -> float:
    with CountingMode() as counted:
        y = functions(case)["rooftop"](x)
        if case.direction != "forward":
            y.backward(torch.ones_like(y))
    costs = [r.cost for r in counted.records if r.name.startswith("rooftop::reduce")]
    timed = costs[-1:] if case.direction == "backward" else costs
    return sum(math.nan if cost is None else 1e3 * roof(cost, ceilings).ms for cost in timed)


if __name__ == "__main__":
    functorch_config.donated_buffer = False  # backward runs many times on the same tensors
    STREAM = torch.cuda.Stream() if torch.cuda.is_available() else None
    main()
