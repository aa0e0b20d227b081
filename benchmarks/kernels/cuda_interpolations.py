"""Trilinear interpolation in CUDA C++ and Triton compared with torch and torch.compile, in TB/s of the bytes that must
move.

    python benchmarks/kernels/cuda_interpolations.py [--out benchmarks/results/h200/cuda_interpolations.json]

Features (B, 8, C) have 2^26 elements for each C, and points are float32. Three values of C are drawn at run time.
Forward and backward (gradients of features and points) are timed. Variants are interleaved, with two sets of inputs,
replayed from a CUDA graph and called eagerly; figures are medians. The roof follows from the operator's own cost and
the ceilings measured in the same run. Variants that cannot run a size are left out with a message. No size is started
after `--seconds`; the file is written after each size.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from repeating import after_repeats
from torch import Tensor

from rooftop.cost import Cost, roof
from rooftop.hardware import Ceilings, compare, measure_ceilings
from rooftop.hardware.graphs import captured
from rooftop.hardware.timing import rotated
from rooftop.kernels import trilinear_interpolate, trilinear_interpolate_cuda
from rooftop.launch import repeated_calls
from rooftop.whole_files import write_json

DRAWN = tuple(random.randint(*span) for span in ((3, 16), (16, 64), (64, 512)))
CHANNELS = tuple(dict.fromkeys((32, 128, *DRAWN, 8, 256, 2)))
ELEMENTS = 1 << 26
Interpolation = Callable[[Tensor, Tensor], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--channels", type=int, nargs="+", default=CHANNELS, help="other sizes C")
    parser.add_argument("--seconds", type=float, default=45, help="seconds after which no further size is started")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU")
    began = time.perf_counter()
    repeated_calls.build()
    ceilings = measure_ceilings("cuda")
    environment = {"device": ceilings.device, "versions": dict(ceilings.versions)}
    rows: list[dict[str, Any]] = []
    for channels, dtype in [(c, d) for c in options.channels for d in (torch.float16, torch.float32)]:
        if time.perf_counter() - began > options.seconds:
            print(f"{options.seconds:.0f} s have passed: C={channels} {dtype} and the following cases are left out")
            break
        rows += measure_size(channels, dtype, ceilings)
        if options.out:
            found = {"environment": environment, "elements": ELEMENTS, "unit": "TB/s", "rows": rows}
            write_json(options.out, found)


@cache
def stream() -> torch.cuda.Stream:
    """The stream on which all variants run."""
    return torch.cuda.Stream()


def plain(features: Tensor, points: Tensor) -> Tensor:
    """Interpolate as a user would write it in PyTorch."""
    upper = ((points + 1) * 0.5).to(features.dtype)
    u, v, w = torch.stack((1 - upper, upper), 2).unbind(1)  # (B, 2) each
    weights = (u[:, :, None, None] * v[:, None, :, None] * w[:, None, None, :]).flatten(1)  # (B, 8)
    return (weights[:, :, None] * features).sum(1)


def measure_size(channels: int, dtype: torch.dtype, ceilings: Ceilings) -> list[dict[str, Any]]:
    """A row for each direction: TB/s of each variant, replayed and eager."""
    torch._dynamo.reset()
    count = ELEMENTS // (8 * channels)
    sets = [_inputs(count, channels, dtype) for _ in range(2)]  # the second set evicts the first from L2
    variants: dict[str, Interpolation] = {
        "cuda": trilinear_interpolate_cuda,
        "triton": trilinear_interpolate,
        "torch": plain,
        "compile": torch.compile(plain, dynamic=False),
    }
    size = sets[0][0].element_size()
    features, out, points = 8 * count * channels * size, count * channels * size, 12 * count
    costs = {"forward": (features + points, out), "backward": (features + points + out, features + points)}
    results = []
    for direction, (read, written) in costs.items():
        eager: dict[str, Callable[[], object]] = {}
        replayed: dict[str, Callable[[], object]] = {}
        for name, variant in variants.items():
            try:
                call, arguments = _call(direction, variant, sets)
                replay = captured(lambda c=call, a=arguments: [c(*each) for each in a], stream())  # type: ignore[misc]
            except Exception as error:
                print(f"{name} cannot do {direction} of C={channels}: {type(error).__name__}: {str(error)[:100]}")
                continue
            eager[name], replayed[name] = rotated(call, arguments), replay
        with torch.cuda.stream(stream()):
            times = [compare(each, device="cuda", seconds=0.03, warm_up_seconds=0.02) for each in (replayed, eager)]
        moved = read + written
        graph = {name: len(sets) * moved / t.median_ms / 1e9 for name, t in times[0].items()}
        called = {name: moved / t.median_ms / 1e9 for name, t in times[1].items()}
        roof_tb = moved / roof(Cost(read, written), ceilings).ms / 1e9
        row = {"channels": channels, "count": count, "dtype": str(dtype).removeprefix("torch."), "direction": direction}
        results.append({**row, "roof": roof_tb, "graph": graph, "eager": called})
        rates = "  ".join(f"{name} {rate:.2f} (eager {called[name]:.2f})" for name, rate in graph.items())
        print(f"C={channels:4} {row['dtype']:8} {direction:8} roof {roof_tb:.2f} TB/s  {rates}", flush=True)
    return results


def _call(
    direction: str, variant: Interpolation, sets: list[tuple[Tensor, ...]]
) -> tuple[Callable[..., object], list[Any]]:
    """The timed function, and its arguments for each set of inputs."""
    if direction == "forward":
        return variant, [(features.detach(), points.detach()) for features, points, _ in sets]
    with torch.cuda.stream(stream()):  # autograd runs a backward on the stream of its forward
        taped = [(after_repeats(variant, *each[:2]), *each) for each in sets]
    return _backward, taped


def _backward(out: Tensor, features: Tensor, points: Tensor, dout: Tensor) -> None:
    torch.autograd.grad(out, (features, points), dout, retain_graph=True)


def _inputs(count: int, channels: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    features = torch.randn(count, 8, channels, device="cuda", dtype=dtype, requires_grad=True)
    points = (2 * torch.rand(count, 3, device="cuda") - 1).requires_grad_()
    return features, points, torch.randn(count, channels, device="cuda", dtype=dtype)


if __name__ == "__main__":
    main()
