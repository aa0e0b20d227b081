"""Time the ways to compute a grouped convolution with bias and relu, for `kernels/convolutions/tables.py`.

    python benchmarks/tuning/grouped_convs.py --out grouped_convs.json [--batch 1 128] [--seconds 60]
    python benchmarks/tuning/grouped_convs.py --quick

The shapes are those of RegNet, ResNeXt, MobileNet, EfficientNet and ConvNeXt, in bfloat16. The ways are: `cudnn`, one
call of cuDNN for everything; `library`, its convolution and one pass for bias and relu; `conv`, its convolution alone;
and `library, contiguous`, with images that are not channels last. Figures are microseconds, in CUDA graphs whose
operands do not stay in L2. `--quick` runs tiny sizes on the CPU, through the interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if "--quick" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor
from torch.nn import functional

from rooftop.hardware import compare
from rooftop.hardware.graphs import captured
from rooftop.kernels.convolutions.launches import forward, plan_of
from rooftop.kernels.convolutions.tables import ConvPlan, Geometry

L2_BYTES = 120_000_000  # no GPU's L2 holds operands of this many bytes
# Channels, size of the image, window, stride, groups
SHAPES = {
    "regnet_y_8gf": [(224, 56, 3, 1, 4), (448, 28, 3, 1, 8), (896, 14, 3, 1, 16), (2016, 14, 3, 2, 36)],
    "regnet_y_1_6gf": [(48, 56, 3, 1, 2), (120, 28, 3, 1, 5), (336, 14, 3, 1, 14)],
    "regnet_y_16gf": [(224, 56, 3, 1, 2), (1232, 14, 3, 1, 11)],
    "regnet_y_400mf": [(48, 112, 3, 2, 6), (208, 14, 3, 1, 26)],
    "resnext50_32x4d": [(128, 56, 3, 1, 32), (256, 28, 3, 1, 32), (512, 14, 3, 1, 32), (1024, 7, 3, 1, 32)],
    "resnext101_64x4d": [(256, 56, 3, 1, 64), (1024, 14, 3, 1, 64)],
    "groups of 64 and 128": [(256, 28, 3, 1, 4), (256, 28, 3, 1, 2)],
    "mobilenet_v3_large": [(64, 112, 3, 2, 64), (120, 28, 5, 1, 120), (480, 14, 3, 1, 480), (960, 7, 5, 1, 960)],
    "efficientnet_b0": [(32, 112, 3, 1, 32), (144, 56, 3, 1, 144), (240, 28, 5, 1, 240), (672, 14, 5, 1, 672)],
    "convnext_tiny": [(96, 56, 7, 1, 96), (192, 28, 7, 1, 192), (384, 14, 7, 1, 384), (768, 7, 7, 1, 768)],
}
TINY = {"tiny": [(8, 6, 3, 1, 2), (6, 5, 3, 2, 6)]}


def measure(shape: tuple[int, ...], batch: int, device: str, seconds: float) -> dict[str, Any]:
    channels, size, window, stride, groups = shape
    pairs = ((each, each) for each in (window, stride, window // 2, 1))
    geometry = Geometry(batch, channels, size, size, channels, *pairs, groups)

    def images(*sizes: int) -> Tensor:
        t = torch.randn(sizes, dtype=torch.bfloat16, device=device)
        return t.contiguous(memory_format=torch.channels_last)

    weight = images(channels, channels // groups, window, window) / window
    bias = torch.randn(channels, dtype=torch.bfloat16, device=device)
    first = images(batch, channels, size, size)
    one = 2 * first.numel() * first.element_size()
    count = max(1, min(16, -(-L2_BYTES // one))) if device == "cuda" else 1
    sets = [first, *(images(batch, channels, size, size) for _ in range(count - 1))]
    plain = [each.contiguous() for each in sets]

    def by(backend: Any) -> Callable[[Tensor], object]:
        return lambda x: forward(ConvPlan(backend, None, ""), x, weight, bias, None, geometry, "relu", False)

    options = (geometry.stride, geometry.padding, geometry.dilation, groups)
    ways: dict[str, tuple[Callable[[Tensor], object], list[Tensor]]] = {
        "library": (by("library"), sets),
        "conv": (lambda x: functional.conv2d(x, weight, None, *options), sets),
        "library, contiguous": (by("library"), plain),
    }
    if device == "cuda":
        ways["cudnn"] = by("cudnn"), sets
    calls: dict[str, Callable[[], object]] = {}
    for name, (run, given) in ways.items():
        replay = lambda run=run, given=given: [run(x) for x in given]  # noqa: E731
        run(given[0])
        calls[name] = captured(replay) if device == "cuda" else replay
    times = compare(calls, device=device, seconds=seconds, warm_up_seconds=seconds / 3)
    us = {name: round(t.median_ms / count * 1e3, 2) for name, t in times.items()}
    taken = plan_of(first, weight, bias, None, geometry, "relu", False).backend
    return {
        "channels": channels,
        "size": size,
        "window": window,
        "stride": stride,
        "groups": groups,
        "batch": batch,
    } | {
        "us": us,
        "taken": taken,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 128])
    parser.add_argument("--seconds", type=float, default=60.0, help="no row starts later")
    parser.add_argument("--quick", action="store_true", help="run tiny sizes on the CPU, to test the script")
    options = parser.parse_args()
    began = time.perf_counter()
    device, networks = ("cpu", TINY) if options.quick else ("cuda", SHAPES)
    rows: list[dict[str, Any]] = []
    for batch in [2] if options.quick else options.batch:
        for network, shapes in networks.items():
            for shape in shapes:
                if time.perf_counter() - began > options.seconds:
                    print(f"out of time before {network} {shape}, batch {batch}")
                    continue
                row = {"network": network, **measure(shape, batch, device, 0.03 if device == "cuda" else 0.002)}
                rows.append(row)
                print(f"{network} {shape}, batch {batch}: {row['us']}, chosen: {row['taken']}", flush=True)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
        options.out.write_text(json.dumps({"device": name, "torch": torch.__version__, "rows": rows}, indent=1) + "\n")
    slower = [
        row for row in rows if row["us"].get("cudnn", 0.0) > 1.02 * row["us"]["library"] and row["taken"] == "cudnn"
    ]
    for row in slower:
        print("cuDNN's fused call is chosen, but slower:", row)
    print(f"{time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
