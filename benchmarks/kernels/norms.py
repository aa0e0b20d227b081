"""The norms compared with torch, torch.compile and Liger, forward and backward, in TB/s of the bytes that must move.

    python benchmarks/kernels/norms.py [--norm rms_norm] [--all-sizes] [--out benchmarks/results/h200/norms.json]

Tensors have 2^27 elements in bfloat16, in rows of the listed sizes N and three random ones (`--seed` repeats them).
Variants are interleaved, with two sets of inputs; figures are medians. Each direction is replayed from a CUDA graph,
which shows the kernels' time, and called eagerly, where the host may be the limit. `small` has the eager calls of 64
rows, in us. The roof follows from the operator's own cost and the ceilings measured in the same run. Peers that are not
installed, or cannot run a size, are left out with a message.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from repeating import after_repeats
from torch import Tensor

from rooftop.cost import Cost, roof
from rooftop.hardware import Ceilings, compare, measure_ceilings
from rooftop.hardware.graphs import captured
from rooftop.hardware.timing import rotated
from rooftop.kernels import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from rooftop.launch import repeated_calls
from rooftop.whole_files import write_json

SIZES = (1024, 4096, 16384, 50257)
ALL_SIZES = (128, 256, 512, 768, 1000, 1024, 2048, 2601, 4096, 5120, 8192, 11008, 16384, 32768, 50257, 262144)
SPANS = ((64, 2048), (2048, 8192), (8192, 32768))
ELEMENTS = 1 << 27
TENSORS = {  # how many tensors a kernel must read and write: (read, written) forward and backward
    "layer_norm": ((1, 1), (2, 1)),
    "rms_norm": ((1, 1), (2, 1)),
    "add_layer_norm": ((2, 2), (3, 1)),
    "add_rms_norm": ((2, 2), (3, 1)),
}
Norm = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]
Inputs = tuple[Tensor, ...]  # x, weight, bias, residual, dy, dtotal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--norm", choices=TENSORS, default="layer_norm", help="the norm to time")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="other sizes N")
    parser.add_argument("--all-sizes", action="store_true", help="measure all sizes that the documentation shows")
    parser.add_argument(
        "--seed", type=int, default=random.SystemRandom().randrange(1 << 16), help="seed of the drawn sizes"
    )
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU")
    drawn = [random.Random(options.seed + i).randint(*span) for i, span in enumerate(SPANS)]
    repeated_calls.build()
    ceilings = measure_ceilings("cuda")
    environment = {"device": ceilings.device, "versions": dict(ceilings.versions)}
    rows: list[dict[str, Any]] = []
    found: dict[str, Any] = {"environment": environment, "norm": options.norm, "dtype": "bfloat16"}
    found |= {"elements": ELEMENTS, "seed": options.seed, "drawn": drawn, "rows": rows}
    for size in sorted({*(ALL_SIZES if options.all_sizes else options.sizes), *drawn}):
        rows += measure_size(options.norm, size, ceilings)
        if options.out:  # written after each size, so that a failure does not lose earlier ones
            write_json(options.out, found)
    for direction in ("forward", "backward"):
        ratios = [math.log(row["graph"]["rooftop"] / best_peer(row)) for row in rows if row["direction"] == direction]
        print(f"{direction}: geometric mean over the best peer {math.exp(sum(ratios) / len(ratios)):.2f}x")
    found["small"] = measure_small(options.norm, 1024)
    if options.out:
        write_json(options.out, found)


def best_peer(row: dict[str, Any]) -> float:
    return max(rate for name, rate in row["graph"].items() if name != "rooftop")


def norms(name: str, columns: int) -> dict[str, Norm]:
    """The variants, which all take (x, weight, bias, residual)."""
    shape = (columns,)
    normal = (
        (lambda x, w, b: F.rms_norm(x, shape, w, 1e-5))
        if name.endswith("rms_norm")
        else (lambda x, w, b: F.layer_norm(x, shape, w, b))
    )

    def plain(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> tuple[Tensor, ...]:
        if not name.startswith("add"):
            return (normal(x, w, b),)
        total = x + r
        return normal(total, w, b), total

    ours: dict[str, Norm] = {
        "layer_norm": lambda x, w, b, r: (layer_norm(x, shape, w, b),),
        "rms_norm": lambda x, w, b, r: (rms_norm(x, shape, w, 1e-5),),
        "add_layer_norm": lambda x, w, b, r: add_layer_norm(x, r, shape, w, b),
        "add_rms_norm": lambda x, w, b, r: add_rms_norm(x, r, shape, w, 1e-5),
    }
    return {"rooftop": ours[name], "torch": plain, "compile": torch.compile(plain, dynamic=False), **of_liger(name)}


def of_liger(name: str) -> dict[str, Norm]:
    try:
        if name == "layer_norm":
            from liger_kernel.ops.layer_norm import LigerLayerNormFunction

            return {"liger": lambda x, w, b, r: (LigerLayerNormFunction.apply(x, w, b, 1e-5),)}
        if name == "rms_norm":
            from liger_kernel.ops.rms_norm import LigerRMSNormFunction

            return {"liger": lambda x, w, b, r: (LigerRMSNormFunction.apply(x, w, 1e-5, 0.0, "llama", False),)}
        if name == "add_rms_norm":
            from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

            return {"liger": lambda x, w, b, r: LigerFusedAddRMSNormFunction.apply(x, r, w, 1e-5, 0.0, "llama", False)}
    except ImportError as error:
        print(f"liger-kernel is not installed, or has no {name}: left out ({error})")
    return {}


def measure_size(name: str, columns: int, ceilings: Ceilings) -> list[dict[str, Any]]:
    """A row for each direction: TB/s of each variant, replayed and eager."""
    rows = ELEMENTS // columns
    sets = [_inputs(rows, columns) for _ in range(2)]  # 256 MiB per tensor: the second set evicts the first from L2
    results = []
    directions = zip(("forward", "backward"), _variants(name, columns, sets), TENSORS[name], strict=True)
    for direction, variants, (read, written) in directions:
        tensor_bytes = 2 * rows * columns
        moved = (read + written) * tensor_bytes
        eager = {key: moved / t.median_ms / 1e9 for key, t in _compare(variants, "eager").items()}
        replayed = {key: len(sets) * moved / t.median_ms / 1e9 for key, t in _compare(variants, "replay").items()}
        roof_tb = moved / roof(Cost(read * tensor_bytes, written * tensor_bytes), ceilings).ms / 1e9
        row = {"columns": columns, "rows": rows, "direction": direction, "roof": roof_tb, "unit": "TB/s"}
        results.append({**row, "graph": replayed, "eager": eager})
        rates = "  ".join(f"{key} {rate:.2f} (eager {eager[key]:.2f})" for key, rate in replayed.items())
        print(f"N={columns:6} {direction:8} roof {roof_tb:.2f} TB/s  {rates}", flush=True)
    return results


def measure_small(name: str, columns: int) -> dict[str, dict[str, float]]:
    """us of a call on 64 rows. This is the host's time, since the kernels take less."""
    forward, backward = _variants(name, columns, [_inputs(64, columns)])
    found = {
        f"{direction}, {how}": {key: 1e3 * t.median_ms for key, t in _compare(variants, how).items()}
        for direction, variants in (("forward", forward), ("backward", backward))
        for how in ("eager", "replay")
    }
    for what, times in found.items():
        print(
            f"{name} of 64 x {columns}, {what}: " + "  ".join(f"{variant} {us:.1f} us" for variant, us in times.items())
        )
    return found


Variants = dict[str, dict[str, Callable[[], object]]]  # variant -> "eager" or "replay" (of all sets) -> call


def _variants(name: str, columns: int, sets: list[Inputs]) -> tuple[Variants, Variants]:
    """Forward and backward calls of each norm that can run this size."""
    torch._dynamo.reset()
    forward: Variants = {}
    backward: Variants = {}
    for key, norm in norms(name, columns).items():
        try:
            plain = [(norm, *(t.detach() for t in inputs[:4])) for inputs in sets]
            ahead = _both(_forward, plain)
            with torch.cuda.stream(STREAM):  # autograd runs a backward on the stream of its forward
                taped = [(after_repeats(norm, *inputs[:4]), inputs) for inputs in sets]
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
        return compare({name: both[how] for name, both in variants.items()}, device="cuda", seconds=0.04)


def _inputs(rows: int, columns: int) -> Inputs:
    shapes = ((rows, columns), (columns,), (columns,), (rows, columns), (rows, columns), (rows, columns))
    made = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    return tuple(t.requires_grad_(i < 4) for i, t in enumerate(made))


def _forward(norm: Norm, *inputs: Tensor) -> tuple[Tensor, ...]:
    return norm(*inputs)


def _backward(outputs: tuple[Tensor, ...], inputs: Inputs) -> None:
    """Compute the gradients of all inputs. For norms of a sum, the sum is an output and has a gradient, too."""
    gradients = inputs[4 : 4 + len(outputs)]
    torch.autograd.grad(outputs, inputs[:4], gradients, retain_graph=True, allow_unused=True)


if __name__ == "__main__":
    STREAM = torch.cuda.Stream() if torch.cuda.is_available() else None
    main()
