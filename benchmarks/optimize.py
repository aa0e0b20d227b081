"""`rooftop.optimize` compared with eager PyTorch and torch.compile, on models that are not ours.

    python benchmarks/optimize.py [--only resnet50 ...] [--train] [--out benchmarks/results/h100/optimize.json]

Each case is a public model at one batch, in bfloat16. The eager model, `torch.compile` (default and reduce-overhead;
for training only default) and the module that `rooftop.optimize` gives are called in turns in this process, as users
call them. The search has its 60 s. `without` is what it finds when no rule compiles or captures a graph. Rows are
written as they come: a run that is cut off leaves what it had. Models that are not installed are left out, which is
said.

Exits with 1 where the optimized module is slower than the faster of eager and torch.compile's default by more than the
spread of the timings.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import rooftop
from rooftop.hardware import compare, devices
from rooftop.optimization import Optimized

SECONDS = 0.5
BUDGET_S = 60.0
COMPILERS = ("compile", "compile-blocks", "compile-reduce-overhead", "cuda-graphs")
WITHOUT = ("fold-norms", "fuse-convolutions", "pools", "kernels", "constants", "channels-last", "fused-optimizer")
Row = dict[str, Any]
Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A public model.

    Attributes:
        name, package: the model's, and where it comes from.
        build: from the batch to the model and a call's arguments.
        batches: small and large.
    """

    name: str
    package: str
    build: Callable[[int], Built]
    batches: tuple[int, int]


def images(package: str, name: str, size: int = 224) -> Callable[[int], Built]:
    def build(batch: int) -> Built:
        module: Any = importlib.import_module("torchvision.models" if package == "torchvision" else package)
        model = getattr(module, name)() if package == "torchvision" else module.create_model(name)
        return model, (torch.randn(batch, 3, size, size),), {}

    return build


def texts(kind: str, tokens: int = 512, **config: Any) -> Callable[[int], Built]:
    def build(batch: int) -> Built:
        transformers: Any = importlib.import_module("transformers")
        made = getattr(transformers, f"{kind}Config")(**config)
        model = getattr(transformers, f"{kind}Model")(made)
        given = torch.randint(made.vocab_size, (batch, tokens))
        return model, (), {"input_ids": given, "use_cache": False} if kind != "Bert" else {"input_ids": given}

    return build


LLAMA = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}
CASES = (
    Case("resnet50", "torchvision", images("torchvision", "resnet50"), (1, 128)),
    Case("vit_base_patch16_224", "timm", images("timm", "vit_base_patch16_224"), (1, 128)),
    Case("swin_t", "torchvision", images("torchvision", "swin_t"), (1, 128)),
    Case("convnext_tiny", "torchvision", images("torchvision", "convnext_tiny"), (1, 128)),
    Case("efficientnet_b0", "torchvision", images("torchvision", "efficientnet_b0"), (1, 128)),
    Case("gpt2", "transformers", texts("GPT2"), (1, 16)),
    Case("bert", "transformers", texts("Bert"), (1, 32)),
    Case("llama_300m", "transformers", texts("Llama", **LLAMA), (1, 16)),
    Case("mobilenet_v3_large", "torchvision", images("torchvision", "mobilenet_v3_large"), (1, 128)),
    Case("densenet121", "torchvision", images("torchvision", "densenet121"), (1, 64)),
    Case("regnet_y_8gf", "torchvision", images("torchvision", "regnet_y_8gf"), (1, 128)),
    Case("mixer_b16_224", "timm", images("timm", "mixer_b16_224"), (1, 128)),
)
QUICK = (Case("tiny_gpt2", "transformers", texts("GPT2", 8, n_layer=2, n_head=2, n_embd=16, vocab_size=50), (1, 2)),)


def measured(case: Case, batch: int, train: bool, device: torch.device, dtype: torch.dtype, budget_s: float) -> Row:
    """One row: ms of each way, what the search kept, and how long it took."""
    torch.manual_seed(0)
    model, args, kwargs = case.build(batch)
    model = model.to(device, dtype).train(train)
    given = [moved(each, device, dtype) for each in args]
    named = {name: moved(each, device, dtype) for name, each in kwargs.items()}
    ways: dict[str, Callable[[], Any]] = {"eager": step(model, given, named, train)}
    seconds: dict[str, float] = {}
    for mode in ("default",) if train or device.type == "cpu" else ("default", "reduce-overhead"):
        torch._dynamo.reset()
        compiled = torch.compile(model, mode=None if mode == "default" else mode)
        name = f"compile {mode}"
        ways[name] = step(compiled, given, named, train, mode == "reduce-overhead")
        seconds[name] = timed(ways[name], device)
    found = searched(model, given, named, train, budget_s, None, seconds, "optimize")
    ways["optimize"] = step(found.module, given, named, train)
    plain = searched(model, given, named, train, budget_s, WITHOUT, seconds, "without")
    ways["without"] = step(plain.module, given, named, train)
    for way in ways.values():
        way()
    times = compare(ways, device=device, seconds=SECONDS)
    assert not found.module.unproven, found.module.unproven
    return {
        "model": case.name,
        "batch": batch,
        "mode": "training" if train else "inference",
        "ms": {name: timing.median_ms for name, timing in times.items()},
        "spread": {name: timing.spread for name, timing in times.items()},
        "seconds": seconds,
        "kept": found.kept,
        "kept_without": plain.kept,
        "changes": found.to_dict()["changes"],
        "checked": found.checked,
        "unchecked": found.unchecked,
    }


def searched(
    model: nn.Module,
    args: list[Any],
    kwargs: dict[str, Any],
    train: bool,
    budget_s: float,
    rules: tuple[str, ...] | None,
    seconds: dict[str, float],
    name: str,
) -> Optimized:
    began = time.perf_counter()
    found = rooftop.optimize(model, *args, train=train, rules=rules, budget_s=budget_s, **kwargs)
    seconds[name] = time.perf_counter() - began
    return found


def moved(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.to(device, dtype) if value.is_floating_point() else value.to(device)


def step(
    model: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], train: bool, marks: bool = False
) -> Callable[[], Any]:
    """A call as users make it: without gradients, or forward and backward from the sum of what comes first."""

    def infer() -> Any:
        with torch.no_grad():
            if marks:
                torch.compiler.cudagraph_mark_step_begin()
            return model(*args, **kwargs)

    def training() -> None:
        output = model(*args, **kwargs)
        first = output if isinstance(output, Tensor) else output[0]
        first.float().square().mean().backward()

    return training if train else infer


def timed(run: Callable[[], Any], device: torch.device) -> float:
    """Seconds of the first three calls: compiling, warming up, capturing."""
    began = time.perf_counter()
    for _ in range(3):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def slower(row: Row) -> bool:
    """Whether the optimized module is slower than eager and the compiler's default, beyond the spread."""
    ms, spread = row["ms"], row["spread"]
    best = min(("eager", "compile default"), key=lambda name: ms[name])
    return bool(ms["optimize"] > ms[best] * (1 + max(spread[best], spread["optimize"])))


def main() -> int:
    """Measure, write, and say whether something is slower."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="MODEL", help="only these models")
    parser.add_argument("--batch", choices=("small", "large", "both"), default="both")
    parser.add_argument("--train", action="store_true", help="training steps instead of inference")
    parser.add_argument("--budget", type=float, default=BUDGET_S, metavar="SECONDS", help="of each search")
    parser.add_argument("--quick", action="store_true", help="a tiny model on the CPU, to try the script")
    parser.add_argument("--out", type=Path, help="where the results go, as JSON")
    options = parser.parse_args()
    device = torch.device("cpu" if options.quick else "cuda")
    rows: list[Row] = []
    for case in QUICK if options.quick else CASES:
        if options.only and case.name not in options.only:
            continue
        if importlib.util.find_spec(case.package) is None:
            print(f"{case.name}: left out, {case.package} is not installed", flush=True)
            continue
        small, large = case.batches
        for batch in {"small": (small,), "large": (large,), "both": (small, large)}[options.batch]:
            dtype = torch.float32 if options.quick else torch.bfloat16
            row = measured(case, batch, options.train, device, dtype, options.budget)
            rows.append(row)
            figures = ", ".join(f"{name} {ms:.3g}" for name, ms in row["ms"].items())
            print(f"{case.name} batch {batch}: {figures} ms; kept {', '.join(row['kept']) or 'nothing'}", flush=True)
            if options.out is not None:
                found = {"device": str(devices()[0].name), "torch": torch.__version__, "results": rows}
                options.out.write_text(json.dumps(found, indent=1) + "\n")
            del row
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return int(any(slower(row) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
