"""The measured ceilings beside plain torch loops for the same quantities, in the same process.

    python benchmarks/ceilings.py [--device cuda] [--out benchmarks/results/h200/ceilings.json]

A ceiling is an upper bound: no plain loop may be more than 5% above it. Exits with 1 if one is.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from rooftop.hardware import Ceilings, measure, measure_ceilings

GIB = 1 << 30
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16}
DTYPES["bf16"] = torch.bfloat16


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    began = time.perf_counter()
    ceilings = measure_ceilings(device, refresh=True)
    seconds = time.perf_counter() - began
    print(f"{ceilings.device}: measured in {seconds:.1f} s, disturbed: {', '.join(ceilings.disturbed) or 'nothing'}")
    for point in ceilings.memory:
        rates = (point.read, point.write, point.copy, point.triad)
        print(
            f"{point.working_set_bytes / 2**20:8.2f} MiB " + " ".join(f"{rate / 1e9:8.1f}" for rate in rates) + " GB/s"
        )
    print(*(f"{p}: {rate / 1e12:.1f} TFLOP/s" for p, rate in ceilings.flops.items()), sep="  ")
    launches = (ceilings.launch_eager_ms, ceilings.launch_graph_ms, ceilings.kernel_floor_ms)
    print("launch eager {:.2f} us, graph {:.2f} us, kernel floor {:.2f} us".format(*(1e3 * ms for ms in launches)))
    print(*(f"{name}: {rate / 1e9:.1f} GB/s" for name, rate in ceilings.transfers.items()), sep="  ")
    rows = []
    for name, ceiling, plain in loops(device, ceilings):
        ratio = ceiling / plain
        rows.append({"name": name, "ceiling": ceiling, "plain_loop": plain, "ratio": ratio})
        print(f"{name:24} ceiling {ceiling:12.4g}  plain loop {plain:12.4g}  ratio {ratio:.3f}")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        result = {"seconds": seconds, "ceilings": ceilings.to_dict(), "beside_plain_loops": rows}
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    too_low = [row["name"] for row in rows if row["ratio"] < 0.95]
    if too_low:
        print("FAILED: below a plain loop by more than 5%:", ", ".join(map(str, too_low)))
    return 1 if too_low else 0


def loops(device: torch.device, ceilings: Ceilings) -> list[tuple[str, float, float]]:
    """(name, ceiling, what a plain loop reaches): bytes/s and flop/s."""
    size = GIB if device.type == "cuda" else GIB // 8
    x, z, y = (torch.randn(size // 4, device=device) for _ in range(3))

    def rate(amount: float, fn: Callable[[], object]) -> float:
        return amount / (measure(fn, device=device).best_ms / 1e3)

    largest = ceilings.memory[-1]
    rows = [
        ("copy", largest.copy, rate(2 * size, lambda: y.copy_(x))),
        ("read (sum)", largest.read, rate(size, lambda: x.sum())),
        ("write (fill_)", largest.write, rate(size, lambda: y.fill_(1.5))),
        ("triad", largest.triad, rate(3 * size, lambda: torch.add(x, z, alpha=0.5, out=y))),
    ]
    side = 8192 if device.type == "cuda" else 1024
    for precision, dtype in DTYPES.items():
        if precision not in ceilings.flops:
            continue
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        plain = rate(2 * side**3, lambda a=a, b=b: a @ b)
        rows.append((f"matmul {precision}", ceilings.flops[precision], plain))
    torch.backends.cuda.matmul.allow_tf32 = False
    if device.type == "cuda":
        for memory in ("pageable", "pinned"):
            host = torch.ones(size, dtype=torch.uint8, pin_memory=memory == "pinned")
            there = torch.empty(size, dtype=torch.uint8, device=device)
            up = rate(size, lambda there=there, host=host: there.copy_(host, non_blocking=True))
            down = rate(size, lambda there=there, host=host: host.copy_(there, non_blocking=True))
            rows.append((f"to device {memory}", ceilings.transfers[f"host_to_device_{memory}"], up))
            rows.append((f"to host {memory}", ceilings.transfers[f"device_to_host_{memory}"], down))
    return rows


if __name__ == "__main__":
    sys.exit(main())
