"""The host time of `Engine(graphs=False)` on ResNet-50, compared with PyTorch's model and with a replayed graph.

    python benchmarks/engine_calls.py [--out benchmarks/results/h100/engine_calls.json] [--batches 1 8 256]

Weights and images are bfloat16 and channels last. Variants take turns. Figures are median milliseconds per call:

    rooftop                  `Engine(graphs=False)`
    rooftop, in Python       the same, with all calls of Rooftop's functions made by Python
    rooftop, replayed        `Engine()`, whose calls are CUDA graphs
    PyTorch                  the model in plain PyTorch: torchvision's if it is installed, else ours

`host_ms` is the time until the call returns, `ms` the time until the GPU has finished. Calls follow one another with an
idle GPU in between. For a call of the engine without graphs, `in_cpp` is the number of Rooftop's calls made in C++, and
`convolutions` the number of convolutions. `us_per_convolution` is the host's time per convolution. `operators` is the
number of operators that PyTorch's profiler records when Python makes all calls.

`--quick` tests the script on a CPU, in float32 with small images and without a graph.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from programs import Results
from torch import Tensor, nn

from rooftop.hardware import ceilings_of, measure_ceilings
from rooftop.hardware.sequences import synchronize
from rooftop.inference import Engine
from rooftop.launch import repeated_calls
from rooftop.models import resnet50

Run = Callable[[], Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h100/engine_calls.json"))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 256])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--quick", action="store_true", help="run on the CPU, to test the script")
    options = parser.parse_args()
    if not options.quick and not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU; --quick tests the script on a CPU")
    device = torch.device("cpu" if options.quick else "cuda")
    if not options.quick:
        repeated_calls.build()
    results = Results(options.out, ceilings_of("h200") if options.quick else measure_ceilings("cuda"))
    model = resnet50().eval()
    for batch in options.batches:
        size = 32 if options.quick else 224
        dtype = torch.float32 if options.quick else torch.bfloat16
        x = torch.randn(batch, 3, size, size, device=device, dtype=dtype).to(memory_format=torch.channels_last)
        results.add(row_of(model, x, 3 if options.quick else options.rounds))
    return 0


def row_of(model: nn.Module, x: Tensor, rounds: int) -> dict[str, Any]:
    engine = Engine(model.to(x.device), dtype=x.dtype, channels_last=True, graphs=False)
    peer, name = torch_model(model)
    peer = peer.to(x.device, x.dtype, memory_format=torch.channels_last).eval()  # type: ignore[call-overload]
    runs: dict[str, Run] = {
        "rooftop": lambda: engine(x),
        "rooftop, in Python": lambda: engine(x),
        "PyTorch": torch.no_grad()(lambda: peer(x)),
    }
    if x.is_cuda:
        replayed = Engine(model, dtype=x.dtype)
        runs["rooftop, replayed"] = lambda: replayed(x)
    check(runs["rooftop"](), runs["PyTorch"](), peer, x)
    taken = in_turn(runs, x.device, rounds)
    row: dict[str, Any] = {"case": f"resnet50, batch {x.shape[0]}", "unit": "ms", "peer": name}
    for key in ("host_ms", "ms"):
        row[key] = {each: statistics.median(time[key] for time in times) for each, times in taken.items()}
    convolutions = sum(isinstance(module, nn.Conv2d) for module in model.modules())
    before = repeated_calls.calls_made()
    engine(x)
    row |= {"in_cpp": repeated_calls.calls_made() - before, "operators": operators_of(lambda: engine(x))}
    row |= {"convolutions": convolutions, "us_per_convolution": 1e3 * row["host_ms"]["rooftop"] / convolutions}
    return row | {"why": dict(repeated_calls.reasons)}


def check(ours: Tensor, theirs: Tensor, peer: nn.Module, x: Tensor) -> None:
    """Check, before timing, that the engine is as accurate as PyTorch's model. Compared with the same weights and
    images in float64, its root mean square error is at most twice as large.
    """
    with torch.no_grad():
        exact = copy.deepcopy(peer).double()(x.double())
    mine, plain = ((each.double() - exact).square().mean().sqrt().item() for each in (ours, theirs))
    if not mine <= 2 * plain + 1e-6 * exact.abs().max().item():
        raise AssertionError(f"the engine's error is {mine:.3g}, that of PyTorch's model {plain:.3g}")


def torch_model(model: nn.Module) -> tuple[nn.Module, str]:
    """PyTorch's model with the same weights, and the name of its library."""
    try:
        from torchvision.models import resnet50 as other
    except (ImportError, RuntimeError):  # not installed, or for another PyTorch
        other, name = resnet50, "rooftop.models"
    else:
        name = "torchvision"
    peer: nn.Module = other()
    peer.load_state_dict(model.state_dict())
    return peer, name


def in_turn(runs: dict[str, Run], device: torch.device, rounds: int) -> dict[str, list[dict[str, float]]]:
    """The times of each variant in each round."""
    for run in runs.values():
        for _ in range(6):  # compiles kernels, and records the calls for C++
            run()
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    for number in range(rounds):
        for name in sorted(runs, reverse=number % 2 == 1):
            with repeated_calls.in_python() if name.endswith("in Python") else nullcontext():
                taken[name].append(timed(runs[name], device))
    return taken


def timed(run: Run, device: torch.device) -> dict[str, float]:
    synchronize(device)
    began = time.perf_counter()
    run()
    returned = time.perf_counter()
    synchronize(device)
    return {"host_ms": 1e3 * (returned - began), "ms": 1e3 * (time.perf_counter() - began)}


def operators_of(run: Run) -> int:
    """How many operators the profiler records on the host."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    return sum(each.count for each in profile.key_averages())


if __name__ == "__main__":
    sys.exit(main())
