"""`rooftop map` compared with a plain loop over a DataLoader and Dask's own map_partitions: items a second.

    python benchmarks/mapping.py [--out benchmarks/results/h100/mapping.json] [--only resnet50 detr clips]
    python benchmarks/mapping.py --photographs FOLDER      your own photographs, instead of generated ones
    python benchmarks/mapping.py --repeat 8                each photograph and video under eight names: a longer run

ResNet-50 classifies photographs and clips of a video, and DETR finds objects in photographs, with random weights.
Photographs are JPEG, 500 x 375, quality 90: crops of real ones if scikit-image or scikit-learn is installed, else noise
of all scales. All ways decode to the same pixels, use the same network and batches, and write Parquet:

    rooftop                `map_items` with its defaults, with two workers on a GPU that share the cores, with decoding
                           threads, and through a local Dask scheduler
    DataLoader             a loop over torch's DataLoader with a process for each core; photographs are resized by
                           Pillow, as in torchvision's recipes
    DataLoader, GPU        the same loop with Rooftop's resize on the GPU
    Dask map_partitions    a bag of file names; one worker per GPU with a thread for each core; Pillow resizes

Each way's items a second count from the first result on, since models are loaded and processes start before it.
`seconds` is the whole time, and `start` has the parts before the first result. When the first result is ready, other
items are already in progress and count too. So a run needs many items.

There are two ceilings. `decoding` is the rate of one process per core that only decodes, while all of them work; for
`decoding_alone`, one process works and the other cores are idle. `computing` is the rate by the device's time for
batches that are ready; `calling` counts the whole call, with copies and rows. `percent` is relative to the lower
ceiling. `item` and `item_alone` are the costs of an item in a decoding process: CPU milliseconds, milliseconds in the
operating system's kernel, and page faults.

`--quick` tests the script on a CPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from rooftop.cluster import map_items
from rooftop.cluster.arrow import load_arrow
from rooftop.cluster.items import Decoding, Item, list_items
from rooftop.cluster.model_targets import model_target
from rooftop.cluster.targets import Call, PipelinedCall, Target, callable_target
from rooftop.cluster.working import Job
from rooftop.hardware.device import versions
from rooftop.hardware.page_faults import keep_memory
from rooftop.inference import Engine
from rooftop.models import model_entry
from rooftop.models.images import MEAN, STD
from rooftop.whole_files import write_json

WIDTH, HEIGHT, FRAMES, FRAMES_OF_A_CLIP = 500, 375, 240, 8
CORES = len(os.sched_getaffinity(0))
PATIENCE_S = 120  # time limit of one way
DECODING_S = 4.0  # seconds for which all processes decode, to measure the ceiling


class ClipClasses:
    """A user-defined target, for example: the class that most frames of a clip show."""

    def __init__(self) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(0)
        self.engine = Engine(model_entry("resnet50").build().eval().to(self.device))
        self.mean, self.std = (torch.tensor(each, device=self.device).view(3, 1, 1) for each in (MEAN, STD))

    @torch.inference_mode()
    def __call__(self, clips: list[Tensor]) -> list[dict[str, Any]]:
        frames = torch.cat([clip.to(self.device) for clip in clips]).float()  # (B * T, 3, H, W)
        small = torch.nn.functional.interpolate(frames, size=(224, 224), mode="bilinear", antialias=True)
        labels = self.engine((small / 255 - self.mean) / self.std).argmax(1)
        return [{"label": label} for label in labels.view(len(clips), -1).mode(1).values.tolist()]


@dataclass(frozen=True)
class Measured:
    """The measurement of one way: the counted items, the seconds for them, and the seconds of each part before them."""

    items: int
    seconds: float
    start: dict[str, float] = field(default_factory=dict)
    decoding: str = ""


@dataclass(frozen=True)
class Work:
    """A target, its items, and its batch size."""

    name: str
    target: Target
    files: tuple[Path, ...]
    decoding: Decoding
    batch: int

    def items(self) -> list[Item]:
        return list(list_items(self.files, self.decoding))

    def job(self) -> Job:
        return Job(self.target, self.decoding, self.batch)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h100/mapping.json"))
    parser.add_argument("--only", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--photographs", type=Path, help="a folder of JPEGs")
    parser.add_argument(
        "--count", type=int, default=6000, help="number of photographs to generate (default %(default)s)"
    )
    parser.add_argument(
        "--repeat", type=int, default=4, help="number of names for each photograph and video (default %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="a few items on the CPU, to test the script")
    options = parser.parse_args()
    if not options.quick and not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU; --quick tests the script on a CPU")
    device = "cpu" if options.quick else "cuda"
    name = "CPU" if options.quick else torch.cuda.get_device_name()
    found: dict[str, Any] = {"device": name, "versions": versions(), "cores": CORES}
    found["torch"], found["rows"] = torch.__version__, []
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only:
            work = WORKS[name](Path(folder), options)
            for row in rows_of(work, Path(folder), device, options.ways):
                failed |= "failed" in row
                found["rows"].append(row)
                print(json.dumps(row), flush=True)
                write_json(options.out, found)
    return int(failed)


# ---- the mapped items --------------------------------------------------------------------------------------------


def photographs(folder: Path, options: argparse.Namespace) -> tuple[Path, ...]:
    if options.photographs:
        return tuple(sorted(options.photographs.rglob("*.jp*g")))
    made = folder / "photographs"
    count = 8 if options.quick else options.count
    if not made.exists():
        made.mkdir()
        pictures = sources()

        def make(number: int) -> None:
            picture = crop(pictures[number % len(pictures)], np.random.default_rng(number))
            picture.save(made / f"{number:06}.jpg", quality=90)

        with ThreadPoolExecutor(CORES) as pool:
            for _ in pool.map(make, range(count)):
                pass
        for path in list(made.iterdir()):
            for number in range(1, 1 if options.quick else options.repeat):
                path.with_stem(f"{path.stem}-{number}").hardlink_to(path)
    return tuple(sorted(made.iterdir()))


def crop(picture: Image.Image, random: np.random.Generator) -> Image.Image:
    share = random.uniform(0.6, 1.0)
    wide, high = (int(share * each) for each in picture.size)
    left, top = (
        int(random.integers(0, 1 + whole - part)) for whole, part in zip(picture.size, (wide, high), strict=True)
    )
    return picture.crop((left, top, left + wide, top + high)).resize((WIDTH, HEIGHT))


@cache
def sources() -> list[Image.Image]:
    """Photographs from installed packages, or pictures of noise if there are none."""
    found = []
    for package, names in {
        "skimage": ("data/astronaut.png", "data/chelsea.png", "data/coffee.png", "data/rocket.jpg"),
        "sklearn": ("datasets/images/china.jpg", "datasets/images/flower.jpg"),
    }.items():
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            found += [path for name in names if (path := Path(spec.origin).parent / name).exists()]
    if found:
        return [Image.open(path).convert("RGB") for path in found]
    random = np.random.default_rng(0)
    picture = np.full((480, 640, 3), 128.0)
    for octave in range(7):
        coarse = random.normal(size=(2 + 480 // 2**octave, 2 + 640 // 2**octave, 3)) * 8 * 1.3**octave
        planes = [Image.fromarray(coarse[:, :, k].astype(np.float32)).resize((640, 480)) for k in range(3)]
        picture += np.stack([np.asarray(each) for each in planes], 2)
    return [Image.fromarray(picture.clip(0, 255).astype(np.uint8))]


def video(folder: Path, options: argparse.Namespace) -> tuple[Path, ...]:
    from rooftop.media import VideoWriter

    made, frames = folder / "videos", 2 * FRAMES_OF_A_CLIP if options.quick else FRAMES
    if not made.exists():
        made.mkdir()
        picture = np.asarray(sources()[0].resize((640, 360)))
        moved = [np.roll(picture, 3 * number, axis=1) for number in range(frames)]
        pixels = torch.from_numpy(np.stack(moved)).permute(0, 3, 1, 2)

        def make(number: int) -> None:
            with VideoWriter(made / f"{number:03}.mp4", fps=30) as writer:
                writer.write(pixels.roll(number, 0))

        with ThreadPoolExecutor(4) as pool:
            for _ in pool.map(make, range(2 if options.quick else CORES)):
                pass
        for path in list(made.iterdir()):
            for number in range(1, 1 if options.quick else options.repeat):
                path.with_stem(f"{path.stem}-{number}").hardlink_to(path)
    return tuple(sorted(made.iterdir()))


def classified(folder: Path, options: argparse.Namespace) -> Work:
    batch = 2 if options.quick else 64
    target = model_target("resnet18" if options.quick else "resnet50", seed=0, batch=batch)
    return Work("resnet50", target, photographs(folder, options), Decoding("image"), batch)


def searched(folder: Path, options: argparse.Namespace) -> Work:
    batch = 2 if options.quick else 8
    target = model_target("detr_resnet50", seed=0, threshold=0.02, batch=batch)
    files = photographs(folder, options)
    return Work("detr", target, files[: 4 if options.quick else 8000], Decoding("image"), batch)


def clips(folder: Path, options: argparse.Namespace) -> Work:
    batch = 2 if options.quick else 8
    target = callable_target(f"{__file__}:ClipClasses", batch)
    return Work("clips", target, video(folder, options), Decoding("clip", frames=FRAMES_OF_A_CLIP), batch)


WORKS: dict[str, Callable[[Path, argparse.Namespace], Work]] = {
    "resnet50": classified,
    "detr": searched,
    "clips": clips,
}

WAYS = (
    "rooftop",
    "rooftop, two workers",
    "rooftop, threads",
    "rooftop, Dask",
    "DataLoader",
    "DataLoader, GPU",
    "Dask map_partitions",
)

# ---- ways --------------------------------------------------------------------------------------------------------


def rows_of(work: Work, folder: Path, device: str, wanted: Sequence[str]) -> Iterator[dict[str, Any]]:
    try:
        items = work.items()
        alone, costs_alone = decoded_per_s(work, items, 1, device)
        decoding, costs = decoded_per_s(work, items, CORES, device)
        ceilings = {"decoding_alone": alone, "decoding": decoding, **computed_per_s(work, items, device)}
    except Exception as error:
        yield {"work": work.name, "failed": said(error)}
        return
    row: dict[str, Any] = {"work": work.name, "items": len(items), "batch": work.batch, **ceilings}
    yield row | {"item_alone": costs_alone, "item": costs}
    ways: tuple[Callable[[Path], Measured], ...] = (
        partial(by_map, work, device, {} if device == "cuda" else {"decoders": CORES}),
        partial(by_map, work, device, {"workers": 2} | ({} if device == "cuda" else {"decoders": CORES // 2})),
        partial(by_map, work, device, {"decoders": 0}),
        partial(by_dask_map, work, device),
        partial(by_loader, work, items, device, "cpu"),
        partial(by_loader, work, items, device, device),
        partial(by_partitions, work, items, device),
    )
    for name, way in zip(WAYS, ways, strict=True):
        if name not in wanted:
            continue
        out = folder / f"{work.name}-{name.replace(', ', '-').replace(' ', '-')}.parquet"
        row = {"work": work.name, "way": name}
        began = time.perf_counter()
        try:
            with at_most(PATIENCE_S if device == "cuda" else 0):
                found = way(out)
            seconds = time.perf_counter() - began
            check(out, len(items))
        except Exception as error:
            yield row | {"failed": said(error), "seconds": time.perf_counter() - began}
            continue
        rate = found.items / found.seconds
        row |= {
            "items_per_s": rate,
            "percent": 100 * rate / min(ceilings["decoding"], ceilings["computing"]),
            "seconds": seconds,
            "start": {part: round(took, 2) for part, took in found.start.items()},
        }
        yield row | ({"decoding": found.decoding} if found.decoding else {})


def said(error: Exception) -> str:
    traceback.print_exc()
    return f"{type(error).__name__}: {' '.join(str(error).split())[-300:]}"


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Raise TimeoutError after this many seconds (0: never), so that the row of a peer that hangs says so."""

    def late(*_: object) -> None:
        raise TimeoutError(f"not finished after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def check(out: Path, items: int) -> None:
    """Check that each item has one row, without an error."""
    load_arrow()
    from pyarrow import parquet

    table = parquet.read_table(out)
    errors = [each for each in table.column("error").to_pylist() if each] if "error" in table.column_names else []
    assert table.num_rows == items, (out, table.num_rows, items)
    assert not errors, errors[0]


def by_map(work: Work, device: str, options: dict[str, Any], out: Path) -> Measured:
    report = map_items(
        work.target,
        list(work.files),
        out,
        kind=work.decoding.kind,
        frames=work.decoding.frames,
        device=device,
        **options,
    )
    assert not report.errors, report.first_error
    assert report.items_per_s is not None
    return Measured(report.items, report.items / report.items_per_s, report.start, report.decoding)


def by_dask_map(work: Work, device: str, out: Path) -> Measured:
    from distributed import LocalCluster

    workers = max(1, torch.cuda.device_count() if device == "cuda" else 1)
    began = time.perf_counter()
    with LocalCluster(n_workers=workers, threads_per_worker=CORES, dashboard_address=":0") as cluster:
        started = time.perf_counter() - began
        found = by_map(work, "auto", {"scheduler": cluster.scheduler_address}, out)
    return replace(found, start={"cluster": started, **found.start})


class Decoded(Dataset[Any]):
    """A dataset that decodes items and prepares them for the target."""

    def __init__(self, work: Work, items: Sequence[Item], resizes: str) -> None:
        self.work, self.items, self.resizes = work, items, resizes
        self.decode: Callable[[Item], Any] | None = None

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        if self.decode is None:
            self.decode = self.work.job().decoder(self.resizes)
        return self.decode(self.items[index])


def collated(values: list[Any]) -> Any:
    """Stack photographs of one size into one tensor, which needs only one block of shared memory; leave other items
    unchanged."""
    from rooftop.cluster.photographs import Shown

    if not all(isinstance(each, Shown) for each in values) or len({each.pixels.shape for each in values}) > 1:
        return values
    return [(each.size, each.resized) for each in values], torch.stack([each.pixels for each in values])


def separated(batch: Any) -> list[Any]:
    """Split a collated batch into its items."""
    from rooftop.cluster.photographs import Shown

    if isinstance(batch, list):
        return batch
    return [Shown(size, pixels, resized) for (size, resized), pixels in zip(*batch, strict=True)]


def by_loader(work: Work, items: Sequence[Item], device: str, resizes: str, out: Path) -> Measured:
    """Map by a DataLoader with forked processes, its default. Spawned processes would start one after another: a list
    of items does not fit into a pipe, so each start waits for the imports of the process before."""
    began = time.perf_counter()
    call = work.target.load(device)
    start = {"target": time.perf_counter() - began}
    began = time.perf_counter()
    loader = DataLoader(
        Decoded(work, items, resizes), work.batch, num_workers=CORES, collate_fn=collated, prefetch_factor=2,
        multiprocessing_context="fork",
    )  # fmt: skip
    batches = iter(loader)
    start["processes"] = time.perf_counter() - began
    rows: list[dict[str, Any]] = []
    counted, first_at = 0, 0.0
    for batch in batches:
        rows += [dict(each) for each in call(separated(batch))]
        if not counted:
            first_at, counted = time.perf_counter(), len(rows)
            start["first results"] = first_at - began - start["processes"]
    write(rows, out)
    return Measured(len(rows) - counted, time.perf_counter() - first_at, start)


def by_partitions(work: Work, items: Sequence[Item], device: str, out: Path) -> Measured:
    import dask.bag
    from distributed import Client, LocalCluster

    workers = max(1, torch.cuda.device_count() if device == "cuda" else 1)
    parts = [items[first : first + work.batch] for first in range(0, len(items), work.batch)]
    start_at = time.perf_counter()
    with (
        LocalCluster(n_workers=workers, threads_per_worker=CORES, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        sent = client.scatter(work, broadcast=True)
        client.submit(of_partition, parts[0], sent, device).result()  # loads the model
        began = time.perf_counter()
        bag = dask.bag.from_sequence(parts, npartitions=len(parts))
        made = bag.map_partitions(lambda given, work: of_partition(given[0], work, device), sent).compute()
        write(made, out)
        return Measured(len(made), time.perf_counter() - began, {"cluster and target": began - start_at})


def of_partition(items: Sequence[Item], work: Work, device: str) -> list[dict[str, Any]]:
    decode, call = _loaded(work.name, device, work)
    return [dict(each) for each in call([decode(item) for item in items])]


_loading = threading.Lock()
_made: dict[tuple[str, str], tuple[Callable[[Item], Any], Call]] = {}


def _loaded(name: str, device: str, work: Work) -> tuple[Callable[[Item], Any], Call]:
    with _loading:
        if (name, device) not in _made:
            _made[name, device] = work.job().decoder("cpu"), work.target.load(device)
        return _made[name, device]


def write(rows: list[dict[str, Any]], out: Path) -> None:
    pa = load_arrow()
    from pyarrow import parquet

    parquet.write_table(pa.Table.from_pylist(rows), out)


# ---- ceilings ----------------------------------------------------------------------------------------------------


def decoded_per_s(work: Work, items: Sequence[Item], processes: int, device: str) -> tuple[float, dict[str, float]]:
    """Items a second of processes that only decode, and the costs of an item. All processes decode for the same
    seconds, each its part of the items, in order."""
    seconds = DECODING_S if device == "cuda" else 0.3
    context = multiprocessing.get_context("fork")
    begin, counts = context.Barrier(processes), context.SimpleQueue()
    began = []
    for number in range(processes):
        own = items[number * len(items) // processes : (number + 1) * len(items) // processes] or items
        began.append(context.Process(target=decode_for, args=(work, own, device, seconds, begin, counts), daemon=True))
        began[-1].start()
    for each in began:
        each.join()
        assert each.exitcode == 0, f"a process that decodes ended with status {each.exitcode}"
    found = [counts.get() for _ in began]
    costs = {name: sum(each[name] for _, each in found) / processes for name in found[0][1]}
    return sum(rate for rate, _ in found), costs


def decode_for(work: Work, items: Sequence[Item], device: str, seconds: float, begin: Any, rates: Any) -> None:
    torch.set_num_threads(1)
    keep_memory()  # as in the decoding processes of `rooftop map`
    decode = work.job().decoder(device)
    decode(items[0])
    begin.wait(60)
    before = resource.getrusage(resource.RUSAGE_SELF)
    began, count = time.perf_counter(), 0
    while (passed := time.perf_counter() - began) < seconds:
        decode(items[count % len(items)])
        count += 1
    after = resource.getrusage(resource.RUSAGE_SELF)
    user_s, system_s = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
    costs = {
        "core_ms": 1e3 * (user_s + system_s) / count,
        "kernel_ms": 1e3 * system_s / count,
        "faults": (after.ru_minflt - before.ru_minflt) / count,
    }
    rates.put((count / passed, costs))


def computed_per_s(work: Work, items: Sequence[Item], device: str) -> dict[str, float]:
    """Items a second for batches that are ready in host memory: `computing` by the device's time, `calling` by wall
    time."""
    decode, call = work.job().decoder(device), work.target.load(device)
    values = [decode(item) for item in items[: work.batch]]
    for _ in range(3):
        call(values)
    device_s = call.device_s if isinstance(call, PipelinedCall) else 0.0
    begun: deque[Any] = deque()
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < (3.0 if device == "cuda" else 0.3):
        count += len(values)
        if isinstance(call, PipelinedCall):
            begun.append(call.begin(values))
            if len(begun) > 1:
                call.finish(begun.popleft())
        else:
            call(values)
    while isinstance(call, PipelinedCall) and begun:
        call.finish(begun.popleft())
    calling = count / (time.perf_counter() - began)
    computing = count / (call.device_s - device_s) if isinstance(call, PipelinedCall) else calling
    return {"computing": computing, "calling": calling}


if __name__ == "__main__":  # imports this file as a module, because workers import its functions by name
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    import mapping

    sys.exit(mapping.main())
