"""Time the ways to compute a grouped convolution with bias and relu, for `kernels/convolutions/tables.py`.

    python benchmarks/tuning/grouped_convs.py --out grouped_convs.json [--batch 1 128] [--seconds 120]
    python benchmarks/tuning/grouped_convs.py --quick

The shapes are those of RegNet, ResNeXt, MobileNet, EfficientNet and ConvNeXt, in bfloat16. The ways are: `cudnn`, one
call of cuDNN for everything; `library`, its convolution and one pass for bias and relu; `conv`, its convolution alone;
`library, contiguous`, with images that are not channels last; and Rooftop's kernel with several tiles ("rows x columns
x depth"; for depthwise convolutions "lines x columns x pixels of a line"), each checked against PyTorch first. "Usual
weights" have PyTorch's layout instead of the one that the depthwise kernel reads fastest. Figures are microseconds, in
CUDA graphs whose operands do not stay in L2. `--depthwise` times only groups of one channel. `--quick` runs tiny sizes
on the CPU, through the interpreter.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
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
from rooftop.kernels.convolutions.launches import channels_fastest, forward, plan_of
from rooftop.kernels.convolutions.tables import (
    LEAST_OF_GROUP,
    ConvPlan,
    ConvTile,
    Geometry,
    Problem,
    depthwise_tile,
    fitted,
)

L2_BYTES = 120_000_000  # no GPU's L2 holds operands of this many bytes
PROCESSORS = 132  # SMs of an H100 or H200
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
TINY = {"tiny": [(8, 6, 3, 1, 2), (6, 5, 3, 2, 6), (48, 5, 3, 1, 2)]}


DEPTHWISE = [
    ConvTile("depthwise", rows, columns, run, warps, 1)
    for rows, columns, run, warps in (
        (8, 64, 7, 4), (16, 32, 7, 4), (8, 64, 4, 4), (16, 32, 4, 4), (8, 64, 2, 4), (8, 64, 14, 4), (4, 64, 7, 2),
        (4, 64, 4, 2),
    )
]  # fmt: skip
GATHERED = [
    ConvTile("gathered", rows, columns, depth, warps, stages)
    for rows, columns, depth, warps, stages in (
        (128, 64, 64, 4, 3), (128, 64, 64, 8, 3), (64, 64, 64, 4, 4), (256, 64, 64, 8, 3), (128, 128, 64, 8, 3),
    )
]  # fmt: skip
Shape = tuple[int, ...]


def geometry_of(shape: Shape, batch: int) -> Geometry:
    channels, size, window, stride, groups = shape
    pairs = ((each, each) for each in (window, stride, window // 2, 1))
    return Geometry(batch, channels, size, size, channels, *pairs, groups)


def tiles_of(shape: Shape, batch: int, quick: bool) -> list[ConvTile]:
    geometry = geometry_of(shape, batch)
    if geometry.depthwise:
        found = DEPTHWISE
    elif geometry.of_group[0] >= LEAST_OF_GROUP:
        problem = Problem(geometry, False, False, torch.bfloat16, "cuda", True, True, False, True, PROCESSORS, 9)
        found = list(dict.fromkeys(fitted(tile, problem) for tile in GATHERED))
    else:
        return []
    return found[:2] if quick else found


def label(tile: ConvTile) -> str:
    return f"{tile.rows} x {tile.columns} x {tile.depth}, {tile.warps} warps, {tile.stages} stages"


def images(device: str, *sizes: int) -> Tensor:
    return torch.randn(sizes, dtype=torch.bfloat16, device=device).contiguous(memory_format=torch.channels_last)


def operands(shape: Shape, batch: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    geometry, (channels, size, window, *_) = geometry_of(shape, batch), shape
    weight = images(device, channels, geometry.of_group[0], window, window) / (window * geometry.of_group[0] ** 0.5)
    weight = channels_fastest(weight) if geometry.depthwise else weight
    return images(device, batch, channels, size, size), weight, torch.randn(channels, device=device).bfloat16()


def compile_one(task: tuple[Shape, int, ConvTile]) -> str:
    """Launch a kernel once, in a separate process, so that Triton's cache has it."""
    shape, batch, tile = task
    try:
        x, weight, bias = operands(shape, 1, "cuda")
        x = x.expand(batch, -1, -1, -1).contiguous(memory_format=torch.channels_last)
        forward(ConvPlan(tile.kernel, tile, ""), x, weight, bias, None, geometry_of(shape, batch), "relu", False)
        torch.cuda.synchronize()
        return ""
    except Exception as error:
        return f"{shape} {label(tile)}: {type(error).__name__}: {str(error)[:200]}"


def measure(shape: Shape, batch: int, device: str, seconds: float) -> dict[str, Any]:
    geometry = geometry_of(shape, batch)
    first, weight, bias = operands(shape, batch, device)
    one = 2 * first.numel() * first.element_size()
    count = max(1, min(16, -(-L2_BYTES // one))) if device == "cuda" else 1
    sets = [first, *(images(device, *first.shape) for _ in range(count - 1))]
    plain = [each.contiguous() for each in sets]
    usual = weight.contiguous(memory_format=torch.channels_last)

    def by(backend: Any, tile: ConvTile | None = None) -> Callable[[Tensor], Tensor]:
        own = weight if backend == "depthwise" else usual
        return lambda x: forward(ConvPlan(backend, tile, ""), x, own, bias, None, geometry, "relu", False)[0]

    options = (geometry.stride, geometry.padding, geometry.dilation, geometry.groups)
    ways: dict[str, tuple[Callable[[Tensor], Tensor], list[Tensor]]] = {
        "library": (by("library"), sets),
        "conv": (lambda x: functional.conv2d(x, usual, None, *options), sets),
        "library, contiguous": (by("library"), plain),
    }
    if device == "cuda":
        ways["cudnn"] = by("cudnn"), sets
    ways |= {label(tile): (by(tile.kernel, tile), sets) for tile in tiles_of(shape, batch, device == "cpu")}
    if geometry.depthwise:
        tile = depthwise_tile(geometry, PROCESSORS)
        plan = ConvPlan("depthwise", tile, "")
        forward_usual = lambda x: forward(plan, x, usual, bias, None, geometry, "relu", False)[0]  # noqa: E731
        ways["usual weights: " + label(tile)] = forward_usual, sets
    planned = plan_of(first, weight, bias, None, geometry, "relu", False)  # the plan's tile may not be one of these
    taken = label(planned.tile) if planned.tile else planned.backend
    if planned.tile:
        ways[taken] = by(planned.backend, planned.tile), sets
    expected = functional.conv2d(first.float(), usual.float(), bias.float(), *options).relu()
    calls: dict[str, Callable[[], object]] = {}
    failed: dict[str, str] = {}
    for name, (run, given) in ways.items():
        try:
            got = run(given[0])
            wrong = (got.float() - expected).abs().max() > 1e-2 * (1 + expected.abs().max())
            assert name == "conv" or not wrong, "wrong"
            replay = lambda run=run, given=given: [run(x) for x in given]  # noqa: E731
            calls[name] = captured(replay) if device == "cuda" else replay
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {str(error)[:150]}"
    times = compare(calls, device=device, seconds=seconds, warm_up_seconds=seconds / 3)
    us = {name: round(t.median_ms / count * 1e3, 2) for name, t in times.items()}
    names = ("channels", "size", "window", "stride", "groups")
    return dict(zip(names, shape, strict=True)) | {"batch": batch, "us": us, "taken": taken, "failed": failed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 128])
    parser.add_argument("--seconds", type=float, default=120.0, help="no row starts later")
    parser.add_argument("--processes", type=int, default=15)
    parser.add_argument("--depthwise", action="store_true", help="only groups of one channel")
    parser.add_argument("--quick", action="store_true", help="run tiny sizes on the CPU, to test the script")
    options = parser.parse_args()
    began = time.perf_counter()
    device, networks = ("cpu", TINY) if options.quick else ("cuda", SHAPES)
    if options.depthwise:
        networks = {name: [shape for shape in shapes if shape[0] == shape[4]] for name, shapes in networks.items()}
    rows: list[dict[str, Any]] = []
    errors: list[str] = []
    if device == "cuda":
        assert not torch.cuda.is_initialized()  # after CUDA's initialization, forked processes cannot use the GPU
        tasks = [
            (shape, batch, tile)
            for shapes in networks.values()
            for shape in shapes
            for batch in options.batch
            for tile in tiles_of(shape, batch, False)
        ]
        with multiprocessing.get_context("fork").Pool(options.processes) as pool:
            errors = [error for error in pool.map(compile_one, tasks, chunksize=1) if error]
        print(*errors, f"{len(tasks)} kernels after {time.perf_counter() - began:.1f} s", sep="\n", flush=True)
    for batch in [2] if options.quick else options.batch:
        for network, shapes in networks.items():
            for shape in shapes:
                if time.perf_counter() - began > options.seconds:
                    print(f"out of time before {network} {shape}, batch {batch}")
                    continue
                row = {"network": network, **measure(shape, batch, device, 0.03 if device == "cuda" else 0.002)}
                rows.append(row)
                peers = {name: us for name, us in row["us"].items() if " x " not in name}
                ours = sorted((us, name) for name, us in row["us"].items() if " x " in name)[:3]
                print(f"{network} {shape}, batch {batch}: {peers} | {ours} | chosen: {row['taken']}", flush=True)
                for name, error in row["failed"].items():
                    print("  failed:", name, error)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
        options.out.write_text(
            json.dumps({"device": name, "torch": torch.__version__, "rows": rows, "errors": errors}, indent=1) + "\n"
        )
    for row in rows:
        own = row["us"].get(row["taken"], row["us"]["library"])
        us, best = min((us, name) for name, us in row["us"].items() if name != "conv")
        if own > 1.05 * us:
            job = f"{row['network']} {row['channels']}, batch {row['batch']}"
            print(f"not the fastest for {job}: {row['taken']} takes {own}, {best} {us}")
    print(f"{time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
