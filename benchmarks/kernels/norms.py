"""Layer norm beside torch, torch.compile and Liger, forward and backward, in TB/s of the bytes that must move.

    python benchmarks/kernels/norms.py [--out benchmarks/results/h200/norms.json]

bfloat16, 2^27 elements, each size N. Variants interleaved, inputs rotated past L2, medians; the roof is that of the
operator's own cost at the ceilings measured in the same run. Liger is left out, and said to be, where not installed.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rooftop.cost import Cost, roof
from rooftop.hardware import Ceilings, compare, measure_ceilings
from rooftop.hardware.timing import rotated
from rooftop.kernels import layer_norm

SIZES = (512, 768, 1000, 1024, 4096, 5120, 8192, 11008, 16384, 50257, 262144)
ELEMENTS = 1 << 27
Norm = Callable[[Tensor, Tensor, Tensor], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    ceilings = measure_ceilings("cuda")
    rows = [row for size in SIZES for row in measure_size(size, ceilings)]
    for direction in ("forward", "backward"):
        ratios = [
            row["rooftop"] / max(v for k, v in row["peers"].items()) for row in rows if row["direction"] == direction
        ]
        print(
            f"{direction}: geometric mean over the best peer {math.exp(sum(map(math.log, ratios)) / len(ratios)):.2f}x"
        )
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        environment = {"device": ceilings.device, "versions": dict(ceilings.versions)}
        text = json.dumps(
            {"environment": environment, "dtype": "bfloat16", "elements": ELEMENTS, "rows": rows}, indent=1
        )
        options.out.write_text(text + "\n")


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
    torch._dynamo.reset()
    rows = ELEMENTS // columns
    sets = [_inputs(rows, columns) for _ in range(2)]  # 256 MiB a tensor: the second set pushes the first out of L2
    forward, backward = {}, {}
    for name, norm in norms(columns).items():
        try:
            forward[name] = rotated(lambda x, w, b, dy, norm=norm: norm(x.detach(), w.detach(), b.detach()), sets)
            backward[name] = rotated(_backward, [(norm(x, w, b), x, w, b, dy) for x, w, b, dy in sets])
            forward[name](), backward[name]()
        except Exception as error:
            forward.pop(name, None), backward.pop(name, None)
            print(f"{name} cannot do N={columns}: {type(error).__name__}: {str(error)[:100]}")
    element_bytes = 2 * rows * columns
    results = []
    for direction, variants, tensors in (("forward", forward, 2), ("backward", backward, 3)):
        moved = tensors * element_bytes
        timings = compare(variants, device="cuda", seconds=0.1)
        rates = {name: moved / timing.median_ms / 1e9 for name, timing in timings.items()}
        roof_ms = roof(Cost((tensors - 1) * element_bytes, element_bytes), ceilings).ms
        results.append(
            {
                "columns": columns,
                "rows": rows,
                "direction": direction,
                "rooftop": rates["rooftop"],
                "peers": {name: rate for name, rate in rates.items() if name != "rooftop"},
                "percent_of_roof": 100 * roof_ms / timings["rooftop"].median_ms,
                "unit": "TB/s",
            }
        )
        peers = "  ".join(f"{name} {rate:.2f}" for name, rate in results[-1]["peers"].items())
        print(f"N={columns:6} {direction:8} rooftop {rates['rooftop']:.2f} TB/s "
              f"({results[-1]['percent_of_roof']:.0f}% of roof)  {peers}", flush=True)  # fmt: skip
    return results


def _inputs(rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    make = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.randn(rows, columns, **make, requires_grad=True)  # type: ignore[call-overload]
    weight, bias = (torch.randn(columns, **make, requires_grad=True) for _ in range(2))  # type: ignore[call-overload]
    return x, weight, bias, torch.randn(rows, columns, **make)  # type: ignore[call-overload]


def _backward(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor) -> None:
    torch.autograd.grad(y, (x, weight, bias), dy, retain_graph=True)


if __name__ == "__main__":
    main()
