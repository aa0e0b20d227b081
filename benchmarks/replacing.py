"""`rooftop.nn.replace` on public models, run as users run them: milliseconds of a step before and after.

    python benchmarks/replacing.py [--out benchmarks/results/h200/replacing.json] [--only gpt2 swin_t] [--seconds 0.4]

The models are those of `optimize.py`: bfloat16, random weights, no dropout, texts of 512 tokens. Four cases are timed:
inference and training (forward and backward), at batch 1 and at a large batch. Nothing is compiled or captured. The
variants take turns:

    before     the model as its library creates it
    after      after `replace(model)`, which swaps only modules whose replacement is never slower
    all        after `replace(model, only=KINDS)`, which swaps every kind of module that it knows

`calls_in_cpp` is the number of calls in a step of `all` that were made in C++ (launch/repeated_calls.py). The script
compares outputs first, and stops if they differ by more than 0.05 of the largest value.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from optimize import CASES, loss_of, moved, step
from programs import Results
from torch import Tensor, nn

from rooftop.hardware import ceilings_of, compare, measure_ceilings
from rooftop.launch import repeated_calls
from rooftop.nn import KINDS, replace

MODELS = ("gpt2", "bert", "llama_300m", "swin_t", "vit_base_patch16_224")
MOST_ERROR = 0.05


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200/replacing.json"))
    parser.add_argument("--only", nargs="+", choices=[*MODELS, "tiny_gpt2"], metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument(
        "--seconds", type=float, default=0.4, help="seconds for each variant of a row (default %(default)s)"
    )
    parser.add_argument("--small-training", action="store_true", help="measure only training at batch 1")
    parser.add_argument("--quick", action="store_true", help="a tiny model on the CPU, to test the script")
    options = parser.parse_args()
    if not options.quick and not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU; --quick tests the script on a CPU")
    device = torch.device("cpu" if options.quick else "cuda")
    if device.type == "cuda":
        repeated_calls.build()
    results = Results(options.out, ceilings_of("h200") if options.quick else measure_ceilings("cuda"))
    for name in options.only or (("tiny_gpt2",) if options.quick else MODELS):
        case = CASES[name]
        small, large = case.batches
        for batch, train in ((small, False), (large, False), (small, True), (case.training, True)):
            if options.small_training and (batch, train) != (small, True):
                continue
            results.add(row_of(name, batch, train, device, options.seconds))
    return 0


def row_of(name: str, batch: int, train: bool, device: torch.device, seconds: float) -> dict[str, Any]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    model, args, kwargs = CASES[name].build(batch)
    model = model.to(device, dtype).train(train)
    given = [moved(each, device, dtype) for each in args]
    named = {key: moved(each, device, dtype) for key, each in kwargs.items()}
    models = dict(variants(model))
    ways = {
        key: training(each, given, named) if train else step(each, given, named, None) for key, each in models.items()
    }
    for _ in range(5):  # compiles the call and records it for C++
        made = {key: way() for key, way in ways.items()}
    error = max(error_of(made["before"], made[key]) for key in ("after", "all"))
    if error > MOST_ERROR:
        raise AssertionError(f"{name}, batch {batch}: outputs differ by {error:.3f} of the largest value")
    before = repeated_calls.calls_made()
    ways["all"]()
    calls = repeated_calls.calls_made() - before
    times = compare(ways, device=device, seconds=seconds)
    ms = {key: timing.median_ms for key, timing in times.items()}
    return {
        "model": name,
        "batch": batch,
        "mode": "training" if train else "inference",
        "ms": ms,
        "spread": {key: timing.spread for key, timing in times.items()},
        "after_by_before": ms["after"] / ms["before"],
        "all_by_before": ms["all"] / ms["before"],
        "calls_in_cpp": calls,
        "error": error,
    }


def training(model: nn.Module, args: list[Any], kwargs: dict[str, Any]) -> Callable[[], None]:
    """A training step without its optimizer, which `replace` does not change."""

    def forward_and_backward() -> None:
        model.zero_grad()
        loss_of(model(*args, **kwargs)).backward()

    return forward_and_backward


def variants(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    yield "before", model
    after, everything = copy.deepcopy(model), copy.deepcopy(model)
    replace(after)
    replace(everything, only=KINDS)
    yield "after", after
    yield "all", everything


def error_of(expected: Any, made: Any) -> float:
    """The largest difference of the first outputs, as a share of their largest value; 0 for training steps."""
    if expected is None:
        return 0.0
    one, other = (each if isinstance(each, Tensor) else each[0] for each in (expected, made))
    return float((one.float() - other.float()).abs().max() / one.float().abs().max())


if __name__ == "__main__":
    sys.exit(main())
