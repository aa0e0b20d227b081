"""Image networks trained from JPEG files: the loop and loader of `rooftop train` compared with torchvision's recipe and
a compiled model.

    python benchmarks/image_training.py [--model resnet50 swin_t] [--out benchmarks/results/h200/image_training.json]
    python benchmarks/image_training.py --photographs FOLDER      a folder for each class, instead of generated ones
    python benchmarks/image_training.py --ways "cpu, threads" "gpu, processes" --sides     rooftop's ways to load, alone

Photographs are generated as in `benchmarks/mapping.py`: JPEG, 500 x 375, quality 90, crops of real ones if scikit-image
or scikit-learn is installed. Both sides use a random crop to 224 x 224, a flip, bfloat16 autocast, channels last, the
same optimizer and the same number of CPU cores. torchvision's side is its reference recipe: `DataLoader` with a process
for each core and pinned memory, Pillow, torchvision's transforms, and a compiled model. Ours is `fit` with
`run.compile`.

    loaded      images a second with the loader, over the steps after the first `--warm-up`
    resident    the step alone, on a batch that is already on the GPU: ms and images a second
    busy        the resident step's time over the step's time with the loader: the share of time in which the GPU is
                busy
    waiting     the share of time in which the loop waited for data; measured only for Rooftop
    first_step_s  seconds from the call of `fit` to the result of the first step; includes the compilation, unless
                PyTorch's caches on disk have the compiled code

Then one step of Rooftop, compiled once, runs with each way to load data (`--ways`). The CPU or the GPU decodes JPEGs,
and threads or processes make samples; "auto" chooses both by measuring. Each way is a row, with

    loop_cpu_ms, loader_cpu_ms   CPU ms per image of the training's process, and of the loader's processes
    cores_in_use  the share of all cores that these processes use
    gpu_active    the share of time in which a kernel runs on the GPU, as NVML samples it
    item        the cost of an image: CPU ms to read, decode and augment it, while one process per core does only this;
                the part of these ms spent in the operating system's kernel; page faults; wall time (`all_ms`); and
                `hand_over_ms` of the one thread that joins and copies batches, or `gpu_ms` if that thread also lets the
                GPU decode

If torchvision is not installed, only Rooftop runs, and the results say so. `--quick` tests the script on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from mapping import CORES, crop, sources
from programs import Results, imported
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import default_collate

from rooftop.data import Part as PartOfSamples
from rooftop.data.device_images import EncodedImages
from rooftop.data.handing_over import Copies
from rooftop.data.pieces import Made, collated, joined
from rooftop.errors import InputError
from rooftop.hardware import ceilings_of, measure_ceilings
from rooftop.hardware.page_faults import keep_memory
from rooftop.media.nvjpeg import NoImageDecoderError
from rooftop.parallel import World
from rooftop.train.fitting import fit
from rooftop.train.fitting.feeding import Feed, Part
from rooftop.train.fitting.lengths import Lengths
from rooftop.train.fitting.loop import INTERVAL
from rooftop.train.fitting.records import EvaluationRecord, Facts, Fitted, StepRecord
from rooftop.train.fitting.stepping import Stepper
from rooftop.train.recipes import Recipe
from rooftop.train.tasks import Task, find_task

CLASSES = 10
MODELS = ("resnet50", "swin_t")
SIDES = ("rooftop", "torchvision")
RESIDENT_STEPS, ROUNDS = 20, 3
ITEM_S = 1.5  # seconds for which all processes work, to measure the cost of an image

WAYS: dict[str, dict[str, dict[str, Any]]] = {
    "auto": {"augment": {"decode": "auto"}, "loading": {"how": "auto"}},
    "cpu, threads": {"augment": {"decode": "cpu"}, "loading": {"how": "threads"}},
    "cpu, processes": {"augment": {"decode": "cpu"}, "loading": {"how": "processes"}},
    "cpu, processes, half detail": {"augment": {"decode": "cpu", "detail": 0.5}, "loading": {"how": "processes"}},
    "gpu, threads": {"augment": {"decode": "gpu"}, "loading": {"how": "threads"}},
    "gpu, processes": {"augment": {"decode": "gpu"}, "loading": {"how": "processes"}},
    **{
        f"gpu {share:.0%}, processes": {
            "augment": {"decode": "gpu", "gpu_share": share},
            "loading": {"how": "processes"},
        }
        for share in (0.25, 0.5)
    },
}
"""Ways to load data, as settings of a recipe."""
LISTED = "; ".join(WAYS).replace("%", "%%")  # for argparse


class Recorder:
    """Keeps the reports of the loop."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.loading = ""
        self.created, self.first_step_s = time.perf_counter(), 0.0

    def began(self, facts: Facts, task: Any) -> None:
        self.loading = facts.loading

    def stepped(self, records: list[StepRecord]) -> None:
        if not self.records:
            self.first_step_s = time.perf_counter() - self.created
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
    parser.add_argument("--photographs", type=Path, help="a folder with one subfolder of JPEGs for each class")
    parser.add_argument(
        "--count", type=int, default=6000, help="number of photographs to generate (default %(default)s)"
    )
    parser.add_argument(
        "--repeat", type=int, default=1, help="number of file names for each photograph; more names make longer epochs"
    )
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS), metavar="WAY", help=LISTED)
    parser.add_argument("--sides", nargs="*", choices=SIDES, default=SIDES, help="the sides to compare")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--size", type=int, default=224, help="side of an image in pixels")
    parser.add_argument(
        "--decode", choices=("cpu", "gpu", "auto"), default="auto", help="what decodes Rooftop's photographs"
    )
    parser.add_argument("--replay", action="store_true", help="replay Rooftop's steps from CUDA graphs (run.replay)")
    parser.add_argument("--steps", type=int, default=80, help="number of timed steps with the loader")
    parser.add_argument("--warm-up", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/image_training.json"))
    parser.add_argument("--quick", action="store_true", help="a small run on the CPU, to test the script")
    options = parser.parse_args()
    if not options.quick and not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU; --quick tests the script on a CPU")
    if options.quick:
        options.model, options.count, options.batch, options.size = ["resnet18"], 40, 2, 32
        options.steps, options.warm_up = 2, 1
    ceilings = ceilings_of("h200") if options.quick else measure_ceilings("cuda")
    results = Results(options.out, ceilings)
    with tempfile.TemporaryDirectory() as folder:
        photographs = options.photographs or made(Path(folder), options.count, options.repeat)
        for name in options.model:
            compared(name, photographs, options, results)
    return 0


def made(folder: Path, count: int, repeat: int) -> Path:
    """Generate photographs in a folder for each class. Each photograph has `repeat` file names."""
    pictures = sources()

    def make(number: int) -> None:
        kind = folder / f"class{number % CLASSES}"
        kind.mkdir(exist_ok=True)
        path = kind / f"{number:06}.jpg"
        crop(pictures[number % len(pictures)], np.random.default_rng(number)).save(path, quality=90)
        for again in range(1, repeat):
            os.link(path, kind / f"{number:06}_{again}.jpg")

    with ThreadPoolExecutor(CORES) as pool:
        for _ in pool.map(make, range(count)):
            pass
    return folder


def compared(name: str, photographs: Path, options: argparse.Namespace, results: Results) -> None:
    """Measure each side and add its row."""
    device = torch.device("cpu" if options.quick else "cuda")
    torchvision = imported("torchvision")
    same = {"model": name, "batch": options.batch, "cores": CORES, "replay": options.replay}
    if "rooftop" in options.sides:
        results.add({**same, "side": "rooftop", **busy(ours(name, photographs, options, device), options)})
        forget(device)
    if "torchvision" in options.sides and isinstance(torchvision, str):
        results.add({**same, "side": "torchvision", "absent": torchvision})
    elif "torchvision" in options.sides:
        row = theirs(torchvision, name, photographs, options, device)
        results.add({**same, "replay": False, "side": "torchvision", **busy(row, options)})
        forget(device)
    if options.ways:
        for row in by_ways(name, photographs, options, device):
            results.add({**same, "side": "rooftop", **(busy(row, options) if "loaded" in row else row)})
        forget(device)


def busy(row: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """The row, with the share of time in which the GPU computes steps."""
    return {**row, "busy": row["resident_ms"] / (1e3 * options.batch / row["loaded"])}


def forget(device: torch.device) -> None:
    gc.collect()
    torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# ---- ours --------------------------------------------------------------------------------------------------------


def recipe_of(
    name: str,
    photographs: Path,
    options: argparse.Namespace,
    device: torch.device,
    way: Mapping[str, Any] | None = None,
) -> tuple[Task, Recipe]:
    """The task and its recipe. With "auto", the faster way to decode is measured, as in `rooftop train`."""
    build, defaults = find_task(name, str(photographs), device.type)
    values = {
        "run": {
            "batch": options.batch,
            "steps": options.warm_up + options.steps,
            "compile": device.type == "cuda",
            "replay": options.replay and device.type == "cuda",
            "precision": "bf16" if device.type == "cuda" else "fp32",
            "channels_last": True,
        },
        "evaluation": {"every": 1e6},
        "augment": {"size": options.size, "decode": options.decode},
        "model": {"options": {"channels": 8} if options.quick else {}},
    }
    recipe = Recipe.of(defaults).updated(values).updated(way or {})
    task = build(str(photographs), recipe)
    if recipe.augment.decode == "auto":
        assert task.decoding is not None
        choice = task.decoding(device)
        print("decoding:", choice, file=sys.stderr)
        recipe = recipe.updated({"augment": {"decode": choice.device}})
        task = build(str(photographs), recipe)
    return task, recipe


def ours(name: str, photographs: Path, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    task, recipe = recipe_of(name, photographs, options, device)
    task.valid = None
    recorder = Recorder()
    began = time.perf_counter()
    fit(task, recipe, device=device.type, observers=[recorder])
    seconds = time.perf_counter() - began
    timed = [record for record in recorder.records if record.step > options.warm_up]
    step = resident_ours(stepper_of(name, photographs, options, device), options, device)
    return {
        "loaded": options.batch / statistics.mean(options.batch / record.samples_per_s for record in timed),
        "waiting": statistics.mean(record.waiting for record in timed),
        "loading": recorder.loading,
        "decode": recipe.augment.decode,
        "first_step_s": recorder.first_step_s,
        "run_s": seconds,
        **resident(step, options, device),
    }


def stepper_of(name: str, photographs: Path, options: argparse.Namespace, device: torch.device) -> Stepper:
    """The step of Rooftop's training loop."""
    task, recipe = recipe_of(name, photographs, options, device, WAYS["cpu, threads"])
    task.model.to(device, memory_format=torch.channels_last)
    if recipe.run.compile:
        task.model.compile()
    return Stepper(task, recipe, 10_000, device, None, 0)


def resident_ours(stepper: Stepper, options: argparse.Namespace, device: torch.device) -> Callable[[], Tensor]:
    """A call of the loop's step on a resident batch. The call returns the loss."""
    images, labels = batch_of(options, device)
    places = torch.arange(options.batch)
    numbers = iter(range(1, 10_000))
    return lambda: stepper.step(next(numbers), [Part((images, labels), places, places, 1.0)])[0]


def batch_of(options: argparse.Namespace, device: torch.device) -> tuple[Tensor, Tensor]:
    images = torch.randn(options.batch, 3, options.size, options.size, device=device).contiguous(
        memory_format=torch.channels_last
    )
    return images, torch.randint(CLASSES, (options.batch,), device=device)


# ---- ways to load ------------------------------------------------------------------------------------------------


def by_ways(
    name: str, photographs: Path, options: argparse.Namespace, device: torch.device
) -> Iterator[dict[str, Any]]:
    """A row for each way to load data. The batches of all ways are fed to the same step, which is compiled once."""
    stepper = stepper_of(name, photographs, options, device)
    alone = resident(resident_ours(stepper, options, device), options, device)
    for way in options.ways:
        try:
            task, recipe = recipe_of(name, photographs, options, device, WAYS[way])
            yield {
                "way": way,
                **fed(stepper, task, recipe, options, device),
                **alone,
                "item": item(task, options, device),
            }
        except (InputError, NoImageDecoderError) as error:
            yield {"way": way, "absent": str(error)}


def fed(
    stepper: Stepper, task: Task, recipe: Recipe, options: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    """Images a second with the loader, after the warm-up."""
    feed = Feed(task, recipe, Lengths.of(recipe, len(task.train), 1), World(0, 1, device))
    try:
        for number in range(1, options.warm_up + 1):
            last = stepper.step(number, feed.parts(number))
        last.cpu()
        load = Load(device)
        began, waited = time.perf_counter(), feed.loader.waited_s
        for number in range(options.warm_up + 1, options.warm_up + options.steps + 1):
            last = stepper.step(number, feed.parts(number))
            if number % INTERVAL == 0:
                last.cpu()
        last.cpu()
        seconds = time.perf_counter() - began
        return {
            "loaded": options.batch * options.steps / seconds,
            **load.ended(options.batch * options.steps),
            "waiting": (feed.loader.waited_s - waited) / seconds,
            "loading": feed.loader.description,
            "decode": recipe.augment.decode,
        }
    finally:
        feed.close()


class Load:
    """Measures the load of the CPUs and of the GPU from now on."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = Utilization(device)
        self._began, self._cpu = time.perf_counter(), self._cpu_s()

    def _cpu_s(self) -> tuple[float, float]:
        """CPU seconds of this process, and of the processes that it has started."""
        began = [each.cpu_times() for each in psutil.Process().children(recursive=True)]
        return time.process_time(), sum(each.user + each.system for each in began)

    def ended(self, images: int) -> dict[str, float]:
        """CPU ms of the loop's process and of the loader's processes per image; the share of all cores in use; and the
        share of time in which NVML saw a kernel on the GPU, if NVML works."""
        seconds = time.perf_counter() - self._began
        here, there = (after - before for after, before in zip(self._cpu_s(), self._cpu, strict=True))
        found = {
            "loop_cpu_ms": 1e3 * here / images,
            "loader_cpu_ms": 1e3 * there / images,
            "cores_in_use": (here + there) / seconds / CORES,
        }
        active = self._gpu.mean()
        return found if active is None else {**found, "gpu_active": active}


class Utilization:
    """Samples NVML's utilization of a GPU in a thread: the share of time in which a kernel runs."""

    def __init__(self, device: torch.device) -> None:
        self._samples: list[int] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        if device.type == "cuda":
            self._thread.start()

    def _sample(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
        while not self._end.wait(0.1):
            self._samples.append(pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu)

    def mean(self) -> float | None:
        self._end.set()
        return statistics.mean(self._samples) / 100 if self._samples else None


def item(task: Task, options: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """The cost of an image, by part."""
    assert isinstance(task.train, PartOfSamples)
    data = task.train.samples
    seconds = 0.2 if options.quick else ITEM_S
    processes = 2 if options.quick else CORES
    context = multiprocessing.get_context("fork")
    begin, found = context.Barrier(processes), context.SimpleQueue()
    began = [context.Process(target=work, args=(data, number, seconds, begin, found)) for number in range(processes)]
    for each in began:
        each.start()
    costs = [found.get() for _ in began]
    for each in began:
        each.join()
    means = {part: sum(each[part] for each in costs) / processes for part in costs[0]}
    return {**means, **handed_over(task, data, options, device)}


def work(data: Any, number: int, seconds: float, begin: Any, found: Any) -> None:
    """Make samples in a separate process, and measure each part."""
    torch.set_num_threads(1)
    keep_memory()
    times, count = {"read": 0.0, "decode": 0.0, "change": 0.0}, 0
    before = resource.getrusage(resource.RUSAGE_SELF)
    files = isinstance(data, EncodedImages)
    begin.wait(60)
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        index, generator = (number * 977 + count) % len(data), np.random.default_rng(count)
        marks = [time.thread_time()]
        if files:
            data.draw(index, generator)
            marks += [time.thread_time()] * 3
        else:
            content = data.content(index)
            marks.append(time.thread_time())
            decoded = data.decoded(index, content, generator)
            marks.append(time.thread_time())
            data.changed(index, decoded, generator)
            marks.append(time.thread_time())
        for part, (start, end) in zip(times, pairwise(marks), strict=True):
            times[part] += end - start
        count += 1
    wall = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_SELF)
    found.put(
        {
            **{f"{part}_ms": 1e3 * value / count for part, value in times.items()},
            "kernel_ms": 1e3 * (after.ru_stime - before.ru_stime) / count,
            "faults": (after.ru_minflt - before.ru_minflt) / count,
            "all_ms": 1e3 * wall / count,
        }
    )


def handed_over(task: Task, data: Any, options: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """ms per image in the one thread that joins and copies batches. If samples are files, this thread also lets the GPU
    decode."""
    collate = task.collate_train or default_collate
    size = min(options.batch, len(data))
    samples = [data.draw(number, np.random.default_rng(number)) for number in range(size)]
    pieces = 1 if task.collate_train else CORES
    bounds = [size * piece // pieces for piece in range(pieces + 1)]
    made = [
        Made(collated(samples[start:end], collate), np.arange(start, end), np.arange(start, end))
        for start, end in pairwise(bounds)
        if end > start
    ]
    copies = Copies(device)

    def once() -> None:
        whole = joined(made, copies.pins, copy=not task.collate_train)
        if task.arrive is not None:
            with copies.stream():
                whole = task.arrive(whole, device, False)
        copies.begin(whole.value)

    for _ in range(2):
        once()
    seconds, count = 0.0, 0
    while seconds < (0.1 if options.quick else 1.0):
        began = time.perf_counter()
        once()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds, count = seconds + time.perf_counter() - began, count + 1
    return {("gpu_ms" if task.arrive else "hand_over_ms"): 1e3 * seconds / count / size}


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
    """Time a step on a resident batch: ms (the median of rounds), images a second, and peak memory."""
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
