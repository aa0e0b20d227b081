"""Networks of images trained from JPEG files: the loop and loader of `rooftop train` compared with torchvision's
recipe, compiled.

    python benchmarks/image_training.py [--model resnet50 swin_t] [--out benchmarks/results/h100/image_training.json]
    python benchmarks/image_training.py --photographs FOLDER      a folder for each class, instead of generated ones

Photographs are generated as in `benchmarks/mapping.py`: JPEG, 500 x 375, quality 90, crops of real ones if scikit-image
or scikit-learn is installed. Both sides have a random crop to 224 x 224, a flip, bfloat16 autocast, channels last, the
same optimizer and the same number of CPU cores. torchvision's side is its reference recipe: `DataLoader` with a process
for each core and pinned memory, Pillow, torchvision's transforms, and a compiled model. Ours is `fit` with
`run.compile`.

    loaded      images a second with the loader, over the steps after the first `--warm-up`
    resident    the step alone, on a batch that is already on the GPU: ms and images a second
    busy        the resident step's time over the time with the loader: the share of time in which the GPU is busy
    waiting     for ours, the share of the time in which the loop waited for data

Without torchvision only ours runs, and the results say so. `--quick` tests the script on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mapping import CORES, crop, sources
from programs import Results
from torch import Tensor
from torch.nn.functional import cross_entropy

from models import imported
from rooftop.hardware import ceilings_of, measure_ceilings
from rooftop.train.fitting import fit
from rooftop.train.fitting.feeding import Part
from rooftop.train.fitting.records import EvaluationRecord, Facts, Fitted, StepRecord
from rooftop.train.fitting.stepping import Stepper
from rooftop.train.recipes import Recipe
from rooftop.train.tasks import Task, find_task

CLASSES = 10
MODELS = ("resnet50", "swin_t")
RESIDENT_STEPS, ROUNDS = 20, 3


class Recorder:
    """Keeps the reports of the loop."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.loading = ""

    def began(self, facts: Facts, task: Any) -> None:
        self.loading = facts.loading

    def stepped(self, records: list[StepRecord]) -> None:
        self.records += records

    def evaluated(self, record: EvaluationRecord) -> None: ...

    def noted(self, note: str) -> None:
        if note.startswith("loading "):
            self.loading = note.removeprefix("loading ")
        print("note:", note, file=sys.stderr)

    def ended(self, fitted: Fitted, model: Any) -> None: ...


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--photographs", type=Path, help="a folder for each class, with JPEGs")
    parser.add_argument(
        "--count", type=int, default=6000, help="number of photographs to generate (default %(default)s)"
    )
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--size", type=int, default=224, help="side of an image in pixels")
    parser.add_argument("--decode", choices=("cpu", "gpu"), default="cpu", help="what decodes rooftop's photographs")
    parser.add_argument("--steps", type=int, default=80, help="with the loader, after the warm-up")
    parser.add_argument("--warm-up", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/image_training.json"))
    parser.add_argument("--quick", action="store_true", help="tiny, and on the CPU, to test the script")
    options = parser.parse_args()
    if not options.quick and not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU; --quick tests the script on a CPU")
    if options.quick:
        options.model, options.count, options.batch, options.size = ["resnet18"], 40, 2, 32
        options.steps, options.warm_up = 2, 1
    ceilings = ceilings_of("h200") if options.quick else measure_ceilings("cuda")
    results = Results(options.out, ceilings)
    with tempfile.TemporaryDirectory() as folder:
        photographs = options.photographs or made(Path(folder), options.count)
        for name in options.model:
            compared(name, photographs, options, results)
    return 0


def made(folder: Path, count: int) -> Path:
    """Generate a folder with photographs for each class."""
    pictures = sources()

    def make(number: int) -> None:
        kind = folder / f"class{number % CLASSES}"
        kind.mkdir(exist_ok=True)
        crop(pictures[number % len(pictures)], np.random.default_rng(number)).save(
            kind / f"{number:06}.jpg", quality=90
        )

    with ThreadPoolExecutor(CORES) as pool:
        for _ in pool.map(make, range(count)):
            pass
    return folder


def compared(name: str, photographs: Path, options: argparse.Namespace, results: Results) -> None:
    """Add a row for each side."""
    device = torch.device("cpu" if options.quick else "cuda")
    torchvision = imported("torchvision")
    rows: dict[str, dict[str, Any]] = {"rooftop": ours(name, photographs, options, device)}
    forget(device)
    if isinstance(torchvision, str):
        rows["torchvision"] = {"absent": torchvision}
    else:
        rows["torchvision"] = theirs(torchvision, name, photographs, options, device)
        forget(device)
    for side, row in rows.items():
        if "loaded" in row:
            row["busy"] = row["resident_ms"] / (1e3 * options.batch / row["loaded"])
        results.add({"model": name, "side": side, "batch": options.batch, "cores": CORES, **row})


def forget(device: torch.device) -> None:
    gc.collect()
    torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# ---- ours --------------------------------------------------------------------------------------------------------


def recipe_of(name: str, photographs: Path, options: argparse.Namespace, device: torch.device) -> tuple[Task, Recipe]:
    build, defaults = find_task(name, str(photographs), device.type)
    values = {
        "run": {
            "batch": options.batch,
            "steps": options.warm_up + options.steps,
            "compile": device.type == "cuda",
            "precision": "bf16" if device.type == "cuda" else "fp32",
            "channels_last": True,
        },
        "evaluation": {"every": 1e6},
        "augment": {"size": options.size, "decode": options.decode},
    }
    recipe = Recipe.of(defaults).updated(values)
    return build(str(photographs), recipe), recipe


def ours(name: str, photographs: Path, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    task, recipe = recipe_of(name, photographs, options, device)
    task.valid = None
    recorder = Recorder()
    began = time.perf_counter()
    fit(task, recipe, device=device.type, observers=[recorder], interval=5)
    seconds = time.perf_counter() - began
    timed = [record for record in recorder.records if record.step > options.warm_up]
    step = resident_ours(name, photographs, options, device)
    return {
        "loaded": options.batch / statistics.mean(options.batch / record.samples_per_s for record in timed),
        "waiting": statistics.mean(record.waiting for record in timed),
        "loading": recorder.loading,
        "run_s": seconds,
        **resident(step, options, device),
    }


def resident_ours(
    name: str, photographs: Path, options: argparse.Namespace, device: torch.device
) -> Callable[[], Tensor]:
    """The loop's step on a resident batch."""
    task, recipe = recipe_of(name, photographs, options, device)
    task.model.to(device, memory_format=torch.channels_last)
    if recipe.run.compile:
        task.model.compile()
    stepper = Stepper(task, recipe, 10_000, device, None, 0)
    images, labels = batch_of(options, device)
    places = torch.arange(options.batch)
    numbers = iter(range(1, 10_000))
    return lambda: stepper.step(next(numbers), [Part((images, labels), places, places, 1.0)])[0]


def batch_of(options: argparse.Namespace, device: torch.device) -> tuple[Tensor, Tensor]:
    images = torch.randn(options.batch, 3, options.size, options.size, device=device).contiguous(
        memory_format=torch.channels_last
    )
    return images, torch.randint(CLASSES, (options.batch,), device=device)


# ---- torchvision's -----------------------------------------------------------------------------------------------


def theirs(
    torchvision: Any, name: str, photographs: Path, options: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    step = step_of(torchvision, name, device)
    batches = endless(loader_of(torchvision, photographs, options, device), device)
    for _ in range(options.warm_up):
        step(*next(batches)).item()
    began = time.perf_counter()
    losses = [step(*next(batches)) for _ in range(options.steps)]
    losses[-1].item()
    rate = options.batch * options.steps / (time.perf_counter() - began)
    batches.close()
    images, labels = batch_of(options, device)
    return {"loaded": rate, **resident(lambda: step(images, labels), options, device)}


def loader_of(torchvision: Any, photographs: Path, options: argparse.Namespace, device: torch.device) -> Any:
    """The data loader of torchvision's reference recipe."""
    of = torchvision.transforms
    transform = of.Compose(
        [
            of.RandomResizedCrop(options.size, interpolation=of.InterpolationMode.BILINEAR),
            of.RandomHorizontalFlip(),
            of.PILToTensor(),
            of.ConvertImageDtype(torch.float32),
            of.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    data = torchvision.datasets.ImageFolder(photographs, transform)
    workers = 2 if options.quick else CORES
    return torch.utils.data.DataLoader(
        data,
        options.batch,
        shuffle=True,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        drop_last=True,
        persistent_workers=True,
    )


def endless(loader: Any, device: torch.device) -> Iterator[Sequence[Tensor]]:
    while True:
        for batch in loader:
            yield [each.to(device, non_blocking=True) for each in batch]


def step_of(torchvision: Any, name: str, device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    """A step of the compiled model."""
    model = getattr(torchvision.models, name)(num_classes=CLASSES).to(device, memory_format=torch.channels_last)
    parameters = list(model.parameters())
    optimizer: torch.optim.Optimizer
    if name == "resnet50":
        optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=5e-5, nesterov=True, fused=True)
    else:
        optimizer = torch.optim.AdamW(parameters, 1e-3, weight_decay=0.05, fused=True)
    compiled = torch.compile(model) if device.type == "cuda" else model

    def step(images: Tensor, labels: Tensor) -> Tensor:
        images = images.contiguous(memory_format=torch.channels_last)
        with torch.autocast(device.type, torch.bfloat16):
            loss = cross_entropy(compiled(images), labels, label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


# ---- the step alone ----------------------------------------------------------------------------------------------


def resident(step: Callable[[], Tensor], options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """ms of a step on a resident batch, the median of rounds; images a second; peak memory."""
    count, rounds = (1, 1) if options.quick else (RESIDENT_STEPS, ROUNDS)
    for _ in range(2 if options.quick else 8):
        step().item()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(count):
            last = step()
        last.item()
        times.append(1e3 * (time.perf_counter() - began) / count)
    ms = statistics.median(times)
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
    return {
        "resident_ms": ms,
        "resident": 1e3 * options.batch / ms,
        "spread": max(times) / min(times),
        "peak_gib": peak,
    }


if __name__ == "__main__":
    raise SystemExit(main())
