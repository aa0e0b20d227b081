"""Layer norm beside torch, torch.compile and Liger, forward and backward, in TB/s of the bytes that must move.

    python benchmarks/kernels/norms.py [--out benchmarks/results/h200/norms.json]

bfloat16, 2^27 elements, each size N (four of them drawn at random, the same each time). Variants interleaved, two sets
of inputs, medians. Each direction is replayed from a CUDA graph, which shows the kernels, and called eagerly, which
adds what the host needs (it shows where it takes longer than the kernels: `small` has the eager calls of 64 rows, in
us). The roof is that of the operator's own cost at the ceilings measured in the same run. What is not installed, or
cannot do a size, is left out and said to be.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rooftop.cost import Cost, roof
from rooftop.hardware import Ceilings, compare, measure_ceilings
from rooftop.hardware.timing import captured, rotated
from rooftop.kernels import layer_norm

DRAWN = tuple(random.Random(0).randint(*span) for span in ((64, 1024), (1024, 4096), (4096, 8192), (8192, 32768)))
SIZES = sorted({128, 256, 512, 768, 1000, 1024, 2048, 4096, 5120, 8192, 11008, 16384, 50257, 262144, *DRAWN})
ELEMENTS = 1 << 27
Norm = Callable[[Tensor, Tensor, Tensor], Tensor]
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]  # x, weight, bias, dy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="other sizes N")
    options = parser.parse_args()
    ceilings = measure_ceilings("cuda")
    rows = [row for size in options.sizes for row in measure_size(size, ceilings)]
    for direction in ("forward", "backward"):
        ratios = [math.log(row["graph"]["rooftop"] / best_peer(row)) for row in rows if row["direction"] == direction]
        print(f"{direction}: geometric mean over the best peer {math.exp(sum(ratios) / len(ratios)):.2f}x")
    small = measure_small(1024)
    if options.out:
        environment = {"device": ceilings.device, "versions": dict(ceilings.versions)}
        found = {"environment": environment, "dtype": "bfloat16", "elements": ELEMENTS, "rows": rows, "small": small}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=1) + "\n")


def best_peer(row: dict[str, Any]) -> float:
    return max(rate for name, rate in row["graph"].items() if name != "rooftop")


def norms(columns: int) -> dict[str, Norm]:
    """The variants; all take (x, weight, bias)."""
    shape = (columns,)
    plain: Norm = lambda x, w, b: F.layer_norm(x, shape, w, b)  # noqa: E731
    found: dict[str, Norm] = {
        "rooftop": lambda x, w, b: layer_norm(x, shape, w, b),
        "torch": plain,
        "compile": torch.compile(plain, dynamic=False),
    }
    try:
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction

        found["liger"] = lambda x, w, b: LigerLayerNormFunction.apply(x, w, b, 1e-5)
    except ImportError:
        print("liger-kernel is not installed: left out")
    return found


def measure_size(columns: int, ceilings: Ceilings) -> list[dict[str, Any]]:
    """A row for each direction: TB/s of each variant, replayed and eager."""
    rows = ELEMENTS // columns
    sets = [_inputs(rows, columns) for _ in range(2)]  # 256 MiB a tensor: the second set pushes the first out of L2
    forward, backward = _variants(columns, sets)
    results = []
    for direction, variants, tensors in (("forward", forward, 2), ("backward", backward, 3)):
        tensor_bytes = 2 * rows * columns
        moved = tensors * tensor_bytes
        eager = {name: moved / t.median_ms / 1e9 for name, t in _compare(variants, "eager").items()}
        replayed = {name: len(sets) * moved / t.median_ms / 1e9 for name, t in _compare(variants, "replay").items()}
        roof_tb = moved / roof(Cost(moved - tensor_bytes, tensor_bytes), ceilings).ms / 1e9
        row = {"columns": columns, "rows": rows, "direction": direction, "roof": roof_tb, "unit": "TB/s"}
        results.append({**row, "graph": replayed, "eager": eager})
        rates = "  ".join(f"{name} {rate:.2f} (eager {eager[name]:.2f})" for name, rate in replayed.items())
        print(f"N={columns:6} {direction:8} roof {roof_tb:.2f} TB/s  {rates}", flush=True)
    return results


def measure_small(columns: int) -> dict[str, dict[str, float]]:
    """us of a call on 64 rows: the host's time, since the kernels need less."""
    forward, backward = _variants(columns, [_inputs(64, columns)])
    found = {
        f"{direction}, {how}": {name: 1e3 * t.median_ms for name, t in _compare(variants, how).items()}
        for direction, variants in (("forward", forward), ("backward", backward))
        for how in ("eager", "replay")
    }
    for name, times in found.items():
        print(f"64 x {columns}, {name}: " + "  ".join(f"{variant} {us:.1f} us" for variant, us in times.items()))
    return found


Variants = dict[str, dict[str, Callable[[], object]]]  # name -> "eager" and "replay" (of all sets) -> call


def _variants(columns: int, sets: list[Inputs]) -> tuple[Variants, Variants]:
    """Forward and backward of each norm, with what cannot do this size left out."""
    torch._dynamo.reset()
    forward: Variants = {}
    backward: Variants = {}
    for name, norm in norms(columns).items():
        try:
            plain = [(norm, x.detach(), w.detach(), b.detach()) for x, w, b, _ in sets]
            ahead = _both(_forward, plain)
            with torch.cuda.stream(STREAM):  # autograd runs a backward on the stream of its forward
                taped = [(norm(x, w, b), x, w, b, dy) for x, w, b, dy in sets]
            back = _both(_backward, taped)
        except Exception as error:
            print(f"{name} cannot do N={columns}: {type(error).__name__}: {str(error)[:100]}")
            continue
        forward[name], backward[name] = ahead, back
    return forward, backward


def _both(fn: Callable[..., object], sets: list[Any]) -> dict[str, Callable[[], object]]:
    return {"eager": rotated(fn, sets), "replay": captured(lambda: [fn(*each) for each in sets], STREAM)}


def _compare(variants: Variants, how: str) -> dict[str, Any]:
    with torch.cuda.stream(STREAM):
        return compare({name: both[how] for name, both in variants.items()}, device="cuda", seconds=0.06)


def _inputs(rows: int, columns: int) -> Inputs:
    make = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.randn(rows, columns, **make, requires_grad=True)  # type: ignore[call-overload]
    weight, bias = (torch.randn(columns, **make, requires_grad=True) for _ in range(2))  # type: ignore[call-overload]
    return x, weight, bias, torch.randn(rows, columns, **make)  # type: ignore[call-overload]


def _forward(norm: Norm, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return norm(x, weight, bias)


def _backward(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor) -> None:
    torch.autograd.grad(y, (x, weight, bias), dy, retain_graph=True)


if __name__ == "__main__":
    STREAM = torch.cuda.Stream()
    main()
