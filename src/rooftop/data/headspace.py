"""Measure the rate of each stage of a training alone, and find the slowest stage.

    found = headspace(ImageFolder("photographs/train", transform), 64, step, device="cuda")
    print(found.bounds, found.why)

Each stage is measured alone, with its inputs in memory. Each of the stages disk, decode and augment runs in all
workers together; collate runs in one thread; copy and model run on the device. The loader runs all stages except the
model, as in training. So compare the rate of "loader" with the rate of "model".
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from rooftop.data.handing_over import Copies
from rooftop.data.loader import Loader
from rooftop.data.pieces import collated
from rooftop.data.samples import Samples, StagedSamples, sample
from rooftop.errors import InputError
from rooftop.hardware.timing import measure

STAGES = {
    "disk": "read files",
    "decode": "compressed images to pixels",
    "augment": "crop, resize and change",
    "sample": "all work of the data set",
    "collate": "samples joined to a batch, by one thread",
    "loader": "all of the above together, by the loader",
    "copy": "a batch copied to the device",
    "model": "forward, backward and step on a batch on the device",
}
"""The stages of the pipeline in order, with descriptions."""
OF_WORKERS = ("disk", "decode", "augment", "sample")
ENDLESS = 1 << 40  # epochs
KEPT = 64  # number of samples to measure with, except for "disk"; their contents and decoded forms stay in memory


@dataclass(frozen=True)
class Row:
    """One stage of data loading, and how many samples per second it reaches when it runs alone."""

    stage: str
    samples_per_s: float


@dataclass(frozen=True)
class Headspace:
    """The measurements.

    Attributes:
        rows: the measured stages, in the order of `STAGES`.
        workers: number of workers in the loader and in the stages before collate. Exception: if the samples are not
            thread-safe, one thread runs the stage "sample".
        loading: a text that describes how the loader made batches.
        bounds: name of the slowest stage, which bounds the speed of the training.
        why: a text that explains why this stage is the slowest.
    """

    rows: tuple[Row, ...]
    workers: int
    loading: str
    bounds: str
    why: str


def headspace(
    samples: Samples,
    batch: int,
    step: Callable[[Any], object] | None = None,
    device: str | torch.device = "cpu",
    *,
    how: str = "auto",
    workers: int = 0,
    ahead: int = 4,
    collate: Callable[[list[Any]], Any] = default_collate,
    seconds: float = 1.0,
    show: Callable[[str, float], None] = lambda what, fraction: None,
) -> Headspace:
    """Measure each stage alone, and the loader, which runs all stages except the model.

    Args:
        samples: the data set. A data set that is not a `StagedSamples` has one stage, "sample", instead of disk, decode
            and augment.
        batch: number of samples in a batch.
        step: runs a training step on a batch that is on the device; None: no model is measured.
        device: the device of the batches.
        how, workers, ahead, collate: as in `Loader`.
        seconds: approximate time for each stage.
        show: called with (stage, fraction done).

    Raises:
        InputError: there are no samples, or `Loader` raises.
        Exception: any error that a sample or the step raises.
    """
    if not len(samples):
        raise InputError("there are no samples to measure")
    device = torch.device(device)
    loader = Loader(samples, batch, shuffle=True, how=how, workers=workers, ahead=ahead, collate=collate, device=device)
    rates: dict[str, float] = {}
    stages = len(STAGES)
    some = np.random.default_rng(0).permutation(len(samples))[:KEPT].tolist()
    with loader:
        for stage, rate in _of_samples(samples, some, batch, collate, loader.workers, seconds):
            rates[stage] = rate
            show(stage, len(rates) / stages)
        show("loader", len(rates) / stages)
        rates["loader"], value = loader_rate(loader, seconds)
        loading = loader.description
    if device.type != "cpu":
        show("copy", (stages - 2) / stages)
        rates["copy"] = _of_copies(samples, some, batch, collate, device, seconds)
    if step is not None:
        show("model", (stages - 1) / stages)
        size = min(batch, len(samples))
        rates["model"] = size * 1e3 / measure(lambda: step(value), device=device, seconds=seconds).median_ms
    rows = tuple(Row(stage, rates[stage]) for stage in STAGES if stage in rates)
    return Headspace(rows, loader.workers, loading, *bound(rates))


def bound(rates: Mapping[str, float]) -> tuple[str, str]:
    """Find the slowest stage from each stage's samples per second; return (stage, explanation).

    Each worker runs disk, decode and augment one after another, so the workers' time per sample is the sum of the times
    of these stages. One thread collates meanwhile, so collate is slowest if it takes longer than this sum.
    """
    loader, model = rates["loader"], rates.get("model", float("inf"))
    copy = rates.get("copy", float("inf"))
    if model <= min(loader, copy):
        return "model", f"the loader can supply {loader / model:.1f} times as many samples as the model uses"
    waiting = f", and the model waits {1 - min(loader, copy) / model:.0%} of the time" if model < float("inf") else ""
    if copy < loader:
        return "copy", f"the device gets only {copy:,.0f} samples/s{waiting}"
    times = {stage: 1 / rates[stage] for stage in OF_WORKERS if stage in rates}
    if 1 / rates["collate"] > sum(times.values()):
        return "collate", f"the one thread that collates is slower than the workers that read{waiting}"
    stage = max(times, key=times.__getitem__)
    return stage, f"{stage} is {times[stage] / sum(times.values()):.0%} of the workers' time{waiting}"


def _of_samples(
    samples: Samples,
    some: Sequence[int],
    batch: int,
    collate: Callable[[list[Any]], Any],
    workers: int,
    seconds: float,
) -> list[tuple[str, float]]:
    """Measure the samples per second of the workers' stages and of collate."""
    found = []
    if isinstance(samples, StagedSamples):
        staged = samples
        contents = {index: staged.content(index) for index in some}
        decoded = {index: staged.decoded(index, contents[index], _generator(index)) for index in some}
        everywhere = np.random.default_rng(1).permutation(len(samples)).tolist()
        found = [
            ("disk", _rate(staged.content, everywhere, workers, seconds)),
            ("decode", _rate(lambda i: staged.decoded(i, contents[i], _generator(i)), some, workers, seconds)),
            ("augment", _rate(lambda i: staged.changed(i, decoded[i], _generator(i)), some, workers, seconds)),
        ]
    else:
        threads = workers if getattr(samples, "thread_safe", True) else 1
        found = [("sample", _rate(lambda i: sample(samples, i, 0, 0), some, threads, seconds))]
    made = _batch_of(samples, some, batch)
    found.append(("collate", len(made) * _rate(lambda _: collated(made, collate), [0], 1, seconds)))
    return found


def _batch_of(samples: Samples, some: Sequence[int], batch: int) -> list[Any]:
    """Make a batch of samples; if `some` has fewer samples than a batch, the samples repeat."""
    made = [sample(samples, index, 0, 0) for index in some[:batch]]
    return list(itertools.islice(itertools.cycle(made), min(batch, len(samples))))


def _generator(index: int) -> np.random.Generator:
    return np.random.default_rng((0, 0, index))


def _rate(work: Callable[[int], object], indices: Sequence[int], workers: int, seconds: float) -> float:
    """Measure how often per second `workers` threads together call `work`; each thread has its own indices."""
    work(indices[0])
    counts, failures = [0] * workers, list[BaseException]()
    until = time.perf_counter() + seconds

    def run(number: int) -> None:
        own = itertools.cycle(indices[number % len(indices) :: workers] or indices)
        try:
            while not failures and (counts[number] == 0 or time.perf_counter() < until):
                work(next(own))
                counts[number] += 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(workers)]
    began = time.perf_counter()
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    if failures:
        raise failures[0]
    return sum(counts) / (time.perf_counter() - began)


def loader_rate(loader: Loader, seconds: float) -> tuple[float, Any]:
    """Return (samples per second, first batch) of a loader, timed after the loader has chosen how to load."""
    count, began, value = 0, 0.0, None
    for batch in loader.batches(0, epochs=ENDLESS):
        value = batch.value if value is None else value
        if began:
            count += len(batch.indices)
            if (took := time.perf_counter() - began) >= seconds:
                return count / took, value
        elif loader.chosen:
            began = time.perf_counter()
    raise AssertionError  # epochs without end


def _of_copies(
    samples: Samples,
    some: Sequence[int],
    batch: int,
    collate: Callable[[list[Any]], Any],
    device: torch.device,
    seconds: float,
) -> float:
    made = _batch_of(samples, some, batch)
    value, copies = collated(made, collate), Copies(device)
    timing = measure(lambda: copies.hand_over(copies.begin(value)), device=device, seconds=seconds)
    return len(made) * 1e3 / timing.median_ms
