"""An AdamW step that keeps float32 weights beside a model's bfloat16 weights, compared with PyTorch and the roof.

    python benchmarks/adamw.py [--out benchmarks/results/h200/adamw.json] [--variants]

The weights are those of Llama blocks and of a ResNet-50, with gradients in bfloat16. Times are in ms, the median of
several steps. A step starts from the gradients of the backward pass and ends with the weights for the next forward
pass:

    rooftop            `rooftop.train.AdamW`: one kernel launch for all weights
    rooftop, clipped   the same, with gradients scaled by a number on the GPU
    PyTorch            casts gradients to float32, runs fused AdamW, casts weights to bfloat16 by `_foreach_copy_`
    PyTorch, clipped   the same, with gradients scaled by `_foreach_mul_`
    ..., float32       the same, with float32 weights and gradients, as on data ranks that share a model

The roof is the time to move 28 bytes a weight. For each weight, a step reads the gradient and three 32-bit numbers, and
writes the three numbers and the bfloat16 weight. A float32 model also moves 28 bytes a weight. `--variants` times
kernels with other numbers of elements and warps per program. `--quick` tests the script on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from programs import Results
from torch import Tensor, nn

from rooftop.cost import Cost, roof
from rooftop.hardware import ceilings_of, measure_ceilings
from rooftop.models import resnet50
from rooftop.train import AdamW, MainWeights
from rooftop.train.optimizers import adamw_launches

OPTIONS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
BYTES_READ, BYTES_WRITTEN = 2 + 3 * 4, 3 * 4 + 2
STEPS = 12


def llama_blocks(width: int, hidden: int, blocks: int) -> list[tuple[int, ...]]:
    """The shapes of the blocks' weights, with as many key and value heads as query heads."""
    block = [(3 * width, width), (width, width), (2 * hidden, width), (width, hidden), (width,), (width,)]
    return block * blocks


def cases(small: bool) -> dict[str, list[tuple[int, ...]]]:
    if small:
        return {"Llama, small": llama_blocks(32, 48, 2)}
    return {
        "Llama 7 B, 8 blocks": llama_blocks(4096, 11008, 8),
        "Llama 1 B, 16 blocks": llama_blocks(2048, 8192, 16),
        "ResNet-50": [tuple(each.shape) for each in resnet50().parameters()],
    }


class Weights(nn.Module):
    def __init__(self, shapes: list[tuple[int, ...]], device: str) -> None:
        super().__init__()
        self.every = nn.ParameterList([torch.randn(shape, device=device) for shape in shapes])

    def gradients(self) -> list[Tensor]:
        return [torch.randn_like(each, dtype=torch.bfloat16) for each in self.every]


def rooftop_step(shapes: list[tuple[int, ...]], device: str, clipped: bool) -> Callable[[], object]:
    model = Weights(shapes, device)
    weights = MainWeights(model, torch.bfloat16, keep_narrow=True)
    optimizer = AdamW(weights.named.values(), **OPTIONS, weights=weights)
    gradients, scale = model.gradients(), torch.tensor(0.5, device=device) if clipped else None

    def step() -> None:
        for main, gradient in zip(weights.named.values(), gradients, strict=True):
            weights.add(main, gradient)
        optimizer.step(scale=scale)
        optimizer.zero_grad()

    return step


def pytorch_step(shapes: list[tuple[int, ...]], device: str, clipped: bool) -> Callable[[], object]:
    model = Weights(shapes, device)
    weights = MainWeights(model, torch.bfloat16)
    mains = [*weights.named.values()]
    optimizer = torch.optim.AdamW(mains, **OPTIONS, fused=True)
    gradients, scale = model.gradients(), torch.tensor(0.5, device=device)

    def step() -> None:
        for main, gradient in zip(mains, gradients, strict=True):
            weights.add(main, gradient)
        if clipped:
            torch._foreach_mul_([each.grad for each in mains], scale)
        optimizer.step()
        optimizer.zero_grad()
        weights.publish()

    return step


def wide_step(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.randn_like(parameter)
    return optimizer.step


def variants(shapes: list[tuple[int, ...]], device: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Make the variants one after another, so that each has the GPU's memory to itself while it is timed."""
    for name, make in {"rooftop": rooftop_step, "PyTorch": pytorch_step}.items():
        yield name, make(shapes, device, False)
        yield f"{name}, clipped", make(shapes, device, True)
    yield "rooftop, float32", wide_step(AdamW(Weights(shapes, device).parameters(), **OPTIONS))
    plain = torch.optim.AdamW(Weights(shapes, device).parameters(), **OPTIONS, fused=True)
    yield "PyTorch, float32", wide_step(plain)


def timed(step: Callable[[], object], device: str) -> list[float]:
    """The times in ms of steps that run one after another; 0 without a GPU."""
    for _ in range(3):
        step()
    if device == "cpu":
        return [0.0]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
    torch.cuda.synchronize()
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(marks)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200/adamw.json"))
    parser.add_argument(
        "--variants", action="store_true", help="time other launch parameters of the kernel and print only these"
    )
    parser.add_argument("--quick", action="store_true", help="a tiny run on the CPU, to test the script")
    options = parser.parse_args()
    device = "cpu" if options.quick else "cuda"
    if not options.quick and not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU; --quick tests the script on a CPU")
    if options.variants:
        return try_launches(device)
    ceilings = ceilings_of("h200") if options.quick else measure_ceilings("cuda")
    results = Results(options.out, ceilings)
    for name, shapes in cases(options.quick).items():
        count = sum(torch.Size(shape).numel() for shape in shapes)
        best = roof(Cost(BYTES_READ * count, BYTES_WRITTEN * count, {}), ceilings).ms
        ms: dict[str, float] = {}
        for variant, step in variants(shapes, device):
            ms[variant] = statistics.median(timed(step, device))
            del step
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
        results.add({"case": name, "weights": len(shapes), "elements": count, "ms": ms, "roof_ms": best})
    return 0


def try_launches(device: str) -> int:
    shapes = cases(device == "cpu")[next(iter(cases(device == "cpu")))]
    for block, warps in ((1024, 4), (1024, 8), (2048, 4), (2048, 8), (4096, 8), (4096, 16), (8192, 16)):
        adamw_launches.BLOCK, adamw_launches.WARPS = block, warps
        print(block, warps, statistics.median(timed(rooftop_step(shapes, device, False), device)), flush=True)
        if device == "cuda":
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
