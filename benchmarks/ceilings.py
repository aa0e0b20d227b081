"""Compare the measured ceilings with plain torch calls that need the same resource, and time each part of the
measurement.

    python benchmarks/ceilings.py [--device cuda] [--quick] [--out benchmarks/results/h200/ceilings.json]

Each ceiling is compared with two other measurements made in the same process:

- "kernel": the shortest kernel of plain torch calls, timed by the profiler as operators are, with shapes that the
  ceilings do not try. No kernel's rate may be more than 2% above its ceiling. On a CPU, "kernel" is the fastest call.
- "loop": the same calls, run back to back between two CUDA events for a longer time. By then the chip is hot, and gaps
  between kernels count.

The script exits with 1 if a kernel's rate is more than 2% above its ceiling.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from rooftop.hardware import Ceilings, measure, measure_ceilings
from rooftop.hardware.kernel_times import Variant, kernel_times
from rooftop.whole_files import write_json

MIB = 1 << 20
DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
PRODUCTS = [(8192, 1024, 4096), (8192, 5120, 5120), (12288, 3072, 768), (5000, 5000, 5000), (2048, 50304, 768)]
CPU_PRODUCTS = [(1024, 1024, 1024), (768, 768, 768), (1000, 1500, 700)]
TOLERANCE = 0.02

Work = tuple[str, float, float, Callable[[], object]]  # name, bytes or flops of a call, the ceiling, the call


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="measure only bf16 and fp32, and no transfers or links")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    with tempfile.TemporaryDirectory() as cache:  # an empty cache, so that the ceilings are measured as on a first call
        os.environ["ROOFTOP_CACHE"] = cache
        needs = {"precisions": ("fp32", "bf16"), "transfers": False, "links": False} if options.quick else {}
        began = time.perf_counter()
        ceilings = measure_ceilings(device, **needs)
        seconds = time.perf_counter() - began
    show(ceilings, seconds)
    rows = []
    for name, work, ceiling, call in works(device, ceilings):
        kernel, loop = (work / s for s in (fastest_s(call, device), loop_s(call, device)))
        rows.append({"name": name, "ceiling": ceiling, "kernel": kernel, "loop": loop, "share": kernel / ceiling})
        print(f"{name:34} ceiling {ceiling:10.4g}  kernel {kernel:10.4g} ({kernel / ceiling:6.1%})  loop {loop:10.4g}")
    if options.out:
        result = {"seconds": seconds, "ceilings": ceilings.to_dict(), "beside_plain_work": rows}
        write_json(options.out, result)
    above = [str(row["name"]) for row in rows if float(str(row["share"])) > 1 + TOLERANCE]
    if above:
        print("FAILED: a plain torch call is faster than its ceiling:", ", ".join(above))
    return 1 if above else 0


def show(ceilings: Ceilings, seconds: float) -> None:
    print(f"{ceilings.device}: measured in {seconds:.1f} s, disturbed: {', '.join(ceilings.disturbed) or 'nothing'}")
    print(*(f"{name} {value:.4g}" for name, value in ceilings.conditions.items()), sep=", ")
    for p in ceilings.memory:
        rates = " ".join(f"{rate / 1e9:8.1f}" for rate in (p.read, p.write, p.copy, p.triad, p.cast, p.update))
        print(
            f"{p.working_set_bytes / MIB:8.2f} MiB {rates} GB/s, bound {ceilings.rate(p.working_set_bytes) / 1e9:.0f}"
        )
    for precision, rate in ceilings.flops.items():
        sustained = ceilings.sustained.get(precision)
        print(f"{precision}: {rate / 1e12:.1f} TFLOP/s", f"sustained {sustained / 1e12:.1f}" if sustained else "")
    launches = (ceilings.launch_eager_ms, ceilings.launch_graph_ms, ceilings.kernel_floor_ms)
    print("launch eager {:.2f} us, graph {:.2f} us, kernel floor {:.3f} us".format(*(1e3 * ms for ms in launches)))
    print(*(f"{name}: {rate / 1e9:.1f} GB/s" for name, rate in {**ceilings.transfers, **ceilings.links}.items()))


def works(device: torch.device, ceilings: Ceilings) -> Iterator[Work]:
    """Plain torch calls, with sizes between those at which the ceilings are measured."""
    on_gpu = device.type == "cuda"
    for size in (m * MIB for m in ((6, 22, 37, 55, 70, 110, 180, 700) if on_gpu else (3, 12, 48, 200))):
        x = torch.randn(size // 8, device=device)
        y, half = torch.empty_like(x), torch.empty(x.numel(), dtype=torch.bfloat16, device=device)
        three, two = 2 * x.nbytes, x.nbytes + half.nbytes
        yield f"copy {size // MIB} MiB", three, ceilings.rate(three), lambda x=x, y=y: y.copy_(x)
        yield f"gelu {size // MIB} MiB", three, ceilings.rate(three), lambda x=x: torch.nn.functional.gelu(x)
        yield f"cast {size // MIB} MiB", two, ceilings.rate(two), lambda x=x, half=half: half.copy_(x)
        yield f"sum {size // MIB} MiB", x.nbytes, ceilings.rate(x.nbytes), lambda x=x: x.sum()
        in_place = ceilings.rate(x.nbytes, in_place=True)
        yield f"add_ {size // MIB} MiB", 2 * x.nbytes, in_place, lambda x=x: x.add_(1.0)
    for precision in (p for p in DTYPES if p in ceilings.flops):
        for m, n, k in PRODUCTS if on_gpu else CPU_PRODUCTS:
            if precision == "fp64" and m * n * k > 2e11:
                continue
            a, b = (torch.randn(*shape, device=device).to(DTYPES[precision]) for shape in ((m, k), (n, k)))
            name, flops = f"linear {precision} {m}x{n}x{k}", 2 * m * n * k

            def linear(a: torch.Tensor = a, b: torch.Tensor = b, precision: str = precision) -> None:
                torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
                torch.nn.functional.linear(a, b)

            yield name, flops, ceilings.peak(precision), linear


def fastest_s(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cpu":
        return measure(call, device=device).best_ms / 1e3
    call()
    (calls,) = kernel_times([Variant(call, repeats=10, pause_s=0.01)], device)
    return min(sum(kernels) for kernels in calls) / 1e3


def loop_s(call: Callable[[], object], device: torch.device) -> float:
    return measure(call, device=device, seconds=0.04, warm_up_seconds=0.02).best_ms / 1e3


if __name__ == "__main__":
    sys.exit(main())
