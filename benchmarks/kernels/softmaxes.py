"""Softmax compared with torch, torch.compile and Liger, forward and backward, in TB/s of the bytes that must move.

    python benchmarks/kernels/softmaxes.py [--out benchmarks/results/h200/softmaxes.json] [--sizes 4096 128256]

Tensors have 2^28 elements in bfloat16, in rows of the listed sizes N and three random ones (`--seed` repeats them).
Variants are interleaved, with two sets of inputs; figures are medians. Each direction is replayed from a CUDA graph,
which shows the kernels, and called eagerly. The roof follows from the operator's own cost and the ceilings measured in
the same run. Peers that are not installed, or cannot run a size, are left out with a message. No size is started after
`--seconds`; the file is written after each size.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from repeating import after_repeats
from torch import Tensor

from rooftop.cost import Cost, roof
from rooftop.hardware import Ceilings, compare, measure_ceilings
from rooftop.hardware.graphs import captured
from rooftop.hardware.timing import rotated
from rooftop.kernels import log_softmax, softmax
from rooftop.launch import repeated_calls
from rooftop.whole_files import write_json

SIZES = (128256, 32768, 1024, 8192, 4096, 50257, 512, 16384, 65536, 128, 262144)
SPANS = ((64, 4096), (4096, 65536), (65536, 262144))
ELEMENTS = 1 << 28
OPERATORS = ("softmax", "log_softmax")
Function = Callable[[Tensor], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="other sizes N")
    parser.add_argument(
        "--seed", type=int, default=random.SystemRandom().randrange(1 << 16), help="seed of the drawn sizes"
    )
    parser.add_argument("--operators", nargs="+", choices=OPERATORS, default=OPERATORS, help="softmax, log_softmax")
    parser.add_argument("--seconds", type=float, default=45, help="seconds after which no further size is started")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU")
    began = time.perf_counter()
    drawn = [random.Random(options.seed + i).randint(*span) for i, span in enumerate(SPANS)]
    repeated_calls.build()
    ceilings = measure_ceilings("cuda")
    environment = {"device": ceilings.device, "versions": dict(ceilings.versions)}
    found: dict[str, Any] = {"environment": environment, "dtype": "bfloat16", "elements": ELEMENTS}
    found |= {"seed": options.seed, "drawn": drawn, "rows": []}
    sizes = tuple(dict.fromkeys((*options.sizes[:3], *drawn, *options.sizes[3:])))
    for name, columns in [(name, n) for name in options.operators for n in sizes]:
        if time.perf_counter() - began > options.seconds:
            print(f"{options.seconds:.0f} s have passed: {name} N={columns} and the following cases are left out")
            break
        found["rows"] += measure_size(name, columns, ceilings)
        if options.out:
            write_json(options.out, found)


def functions(name: str) -> dict[str, Function]:
    """The variants."""
    plain: Function = lambda x: getattr(torch, name)(x, -1)  # noqa: E731
    found: dict[str, Function] = {
        "rooftop": softmax if name == "softmax" else log_softmax,
        "torch": plain,
        "compile": torch.compile(plain, dynamic=False),
    }
    if name == "softmax":
        try:
            from liger_kernel.ops.softmax import LigerSoftmaxFunction

            found["liger"] = LigerSoftmaxFunction.apply
        except ImportError:
            print("liger-kernel is not installed, or has no softmax: left out")
    return found


def measure_size(name: str, columns: int, ceilings: Ceilings) -> list[dict[str, Any]]:
    """A row for each direction: TB/s of each variant, replayed and eager."""
    rows = ELEMENTS // columns
    sets = [_inputs(rows, columns) for _ in range(2)]  # 512 MiB per tensor: the second set evicts the first from L2
    forward, backward = _variants(name, columns, sets)
    results = []
    for direction, variants, tensors in (("forward", forward, 2), ("backward", backward, 3)):
        tensor_bytes = 2 * rows * columns
        moved = tensors * tensor_bytes
        eager = {key: moved / t.median_ms / 1e9 for key, t in _compare(variants, "eager").items()}
        replayed = {key: len(sets) * moved / t.median_ms / 1e9 for key, t in _compare(variants, "replay").items()}
        roof_tb = moved / roof(Cost(moved - tensor_bytes, tensor_bytes), ceilings).ms / 1e9
        row = {"operator": name, "columns": columns, "rows": rows, "direction": direction, "roof": roof_tb}
        results.append({**row, "unit": "TB/s", "graph": replayed, "eager": eager})
        rates = "  ".join(f"{key} {rate:.2f} (eager {eager[key]:.2f})" for key, rate in replayed.items())
        print(f"{name} N={columns:6} {direction:8} roof {roof_tb:.2f} TB/s  {rates}", flush=True)
    return results


Inputs = tuple[Tensor, Tensor]  # x, dy
Variants = dict[str, dict[str, Callable[[], object]]]  # variant -> "eager" or "replay" (of all sets) -> call


def _variants(name: str, columns: int, sets: list[Inputs]) -> tuple[Variants, Variants]:
    """Forward and backward calls of each function that can run this size."""
    torch._dynamo.reset()
    forward: Variants = {}
    backward: Variants = {}
    for key, function in functions(name).items():
        try:
            plain = [(function, x.detach()) for x, _ in sets]
            ahead = _both(_forward, plain)
            with torch.cuda.stream(STREAM):  # autograd runs a backward on the stream of its forward
                taped = [(after_repeats(function, x), x, dy) for x, dy in sets]
            back = _both(_backward, taped)
        except Exception as error:
            print(f"{key} cannot do N={columns}: {type(error).__name__}: {str(error)[:100]}")
            continue
        forward[key], backward[key] = ahead, back
    return forward, backward


def _both(fn: Callable[..., object], sets: list[Any]) -> dict[str, Callable[[], object]]:
    return {"eager": rotated(fn, sets), "replay": captured(lambda: [fn(*each) for each in sets], STREAM)}


def _compare(variants: Variants, how: str) -> dict[str, Any]:
    with torch.cuda.stream(STREAM):
        return compare(
            {name: both[how] for name, both in variants.items()}, device="cuda", seconds=0.03, warm_up_seconds=0.02
        )


def _inputs(rows: int, columns: int) -> Inputs:
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    return x, torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)


def _forward(function: Function, x: Tensor) -> Tensor:
    return function(x)


def _backward(y: Tensor, x: Tensor, dy: Tensor) -> None:
    torch.autograd.grad(y, x, dy, retain_graph=True)


if __name__ == "__main__":
    STREAM = torch.cuda.Stream() if torch.cuda.is_available() else None
    main()
