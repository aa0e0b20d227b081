"""The layer norm of a sum in CUDA C++ compared with Triton, torch and torch.compile, in TB/s of the bytes that must
move.

    python benchmarks/kernels/cuda_norms.py [--out benchmarks/results/h200/cuda_norms.json]

The operator writes x + input_bias + residual and the norm of this sum. Tensors have 2^26 elements in float16 or
bfloat16, in rows of several sizes N (three are drawn at run time). The Triton kernel is `add_layer_norm`. `norm alone`
computes only the norm, without the sum. Variants are interleaved, with two sets of inputs, replayed from a graph and
called eagerly; figures are medians. The roof follows from the operator's own cost and the ceilings measured in the same
run.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rooftop.cost import Cost, roof
from rooftop.hardware import Ceilings, compare, measure_ceilings
from rooftop.hardware.graphs import captured
from rooftop.hardware.timing import rotated
from rooftop.kernels import add_layer_norm, add_layer_norm_cuda, layer_norm
from rooftop.launch import repeated_calls
from rooftop.whole_files import write_json

DRAWN = tuple(random.randint(*span) for span in ((64, 1024), (1024, 4096), (4096, 16384)))
SIZES = sorted({768, 1024, 4096, 8192, 50257, *DRAWN})
ELEMENTS = 1 << 26
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # x, residual, input_bias, weight, bias
Norm = Callable[..., object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="other sizes N")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU")
    repeated_calls.build()
    ceilings = measure_ceilings("cuda")
    rows: list[dict[str, Any]] = []
    environment = {"device": ceilings.device, "versions": dict(ceilings.versions)}
    found = {"environment": environment, "elements": ELEMENTS, "unit": "TB/s", "rows": rows}
    for columns in options.sizes:
        for dtype in (torch.float16, torch.bfloat16):
            rows += measure_size(columns, dtype, ceilings)
            if options.out:  # written after each size, so that a failure does not lose earlier ones
                write_json(options.out, found)


def fused(columns: int) -> dict[str, Norm]:
    """The variants. All take x, residual, input_bias, weight, bias and return (y, total)."""

    def plain(x: Tensor, residual: Tensor, input_bias: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        total = x + input_bias + residual
        return F.layer_norm(total, (columns,), weight, bias), total

    def twin(x: Tensor, residual: Tensor, input_bias: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return add_layer_norm(x, residual, columns, weight, bias, input_bias=input_bias)

    def ours(x: Tensor, residual: Tensor, input_bias: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return add_layer_norm_cuda(x, residual, columns, weight, bias, input_bias=input_bias)

    return {"cuda": ours, "twin": twin, "torch": plain, "compile": torch.compile(plain, dynamic=False)}


def alone(columns: int) -> dict[str, Norm]:
    return {
        "cuda": lambda x, r, i, w, b: add_layer_norm_cuda(x, None, columns, w, b)[0],
        "twin": lambda x, r, i, w, b: layer_norm(x, columns, w, b),
        "torch": lambda x, r, i, w, b: F.layer_norm(x, (columns,), w, b),
        "compile": torch.compile(lambda x, r, i, w, b: F.layer_norm(x, (columns,), w, b), dynamic=False),
    }


def measure_size(columns: int, dtype: torch.dtype, ceilings: Ceilings) -> list[dict[str, Any]]:
    """A row for the fused sum and one for the norm alone: TB/s of each variant, replayed and eager."""
    torch._dynamo.reset()
    rows = ELEMENTS // columns
    sets = [_inputs(rows, columns, dtype) for _ in range(2)]  # the second set evicts the first from L2
    tensor_bytes = 2 * rows * columns
    results = []
    for what, variants, read, written in (("fused", fused(columns), 2, 2), ("norm alone", alone(columns), 1, 1)):
        moved = (read + written) * tensor_bytes
        eager = {name: rotated(variant, sets) for name, variant in variants.items()}
        replayed = {name: captured(lambda v=v: [v(*each) for each in sets]) for name, v in variants.items()}  # type: ignore[misc]
        times = [compare(each, device="cuda", seconds=0.06) for each in (replayed, eager)]
        graph = {name: len(sets) * moved / t.median_ms / 1e9 for name, t in times[0].items()}
        called = {name: moved / t.median_ms / 1e9 for name, t in times[1].items()}
        roof_tb = moved / roof(Cost(read * tensor_bytes, written * tensor_bytes), ceilings).ms / 1e9
        row = {"what": what, "columns": columns, "rows": rows, "dtype": str(dtype).removeprefix("torch.")}
        results.append({**row, "roof": roof_tb, "graph": graph, "eager": called})
        rates = "  ".join(f"{name} {rate:.2f} (eager {called[name]:.2f})" for name, rate in graph.items())
        print(f"N={columns:6} {row['dtype']:8} {what:10} roof {roof_tb:.2f} TB/s  {rates}", flush=True)
    return results


def _inputs(rows: int, columns: int, dtype: torch.dtype) -> Inputs:
    shapes = ((rows, columns), (rows, columns), (columns,), (columns,), (columns,))
    return tuple(torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes)  # type: ignore[return-value]


if __name__ == "__main__":
    with torch.no_grad():
        main()
