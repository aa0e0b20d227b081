"""A loader that makes the batches of a training ahead of the steps that need them.

    loader = Loader(ImageFolder("photographs/train", transform), 64, shuffle=True, device="cuda")
    for epoch in range(10):
        for images, labels in (batch.value for batch in loader.batches(epoch)): ...

The order is a random permutation seeded by (seed, epoch). The augmentation of each sample is seeded by (seed, epoch,
index), and for repeated copies also by the number of the copy. So the batches are bit-identical for every value of
`how`, any number of workers, and any start within an epoch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import default_collate

from rooftop.data.choosing import Choice
from rooftop.data.handing_over import Copied, Copies
from rooftop.data.loader_processes import Processes
from rooftop.data.orders import Order
from rooftop.data.pieces import Damaged, Job, Made, pieces_of
from rooftop.data.prefetching import prefetched
from rooftop.data.samples import Samples
from rooftop.data.ways import Here, Threads, Way
from rooftop.errors import InputError
from rooftop.hardware.cpus import usable_cpus

WAYS = ("here", "threads", "processes")
TRIAL_HERE = 2  # number of batches to time "here"; the first batch includes warm-up
MOST_TRIAL = 4  # maximum number of batches to time "threads" and "processes"
MOST_WORKERS = 32  # maximum number of workers if workers=0
WORKERS_OF_A_CPU = 16  # maximum workers per CPU; more workers take memory but are not faster, even with a slow disk


class LoadedBatch(NamedTuple):
    """A batch.

    Attributes:
        value: the collated samples on the loader's device; None if this rank has no sample of the batch.
        places: (N,) int64 on the CPU, each sample's position in the whole batch of all ranks.
        indices: (N,) int64 on the CPU, indices of the samples in the data set.
    """

    value: Any
    places: Tensor
    indices: Tensor


class Loader:
    """Loads the batches of a data set.

    Args:
        samples: the data set; `draw(index, generator)` is called if it exists.
        batch: number of samples in a batch, summed over all ranks.
        shuffle, seed: whether to shuffle; the seed of the order and of the augmentation.
        how: where to make batches: "here" (in the training loop itself), "threads", "processes", or "auto". "auto"
            times the first batches of these ways, and chooses a fast one (`choosing`).
        workers: number of threads or processes of this rank, at most 16 per CPU; 0: the number of CPUs divided by the
            number of ranks on this machine, at most 32.
        ahead: number of batches that the threads or processes of this rank make in advance, all together.
        collate: makes a batch from a list of samples. With PyTorch's `default_collate`, all workers share the work of
            each batch. With another function, one worker makes a whole batch, and at least one batch per worker is made
            in advance.
        drop_last: whether to leave out the last samples of an epoch if they do not fill a batch.
        repeats: copies of each sample in a batch, each with its own augmentation ("repeated augmentation"). Repeats
            need drop_last. Repeats do not change the number of batches in an epoch, so an epoch has fewer different
            samples than without repeats.
        rank, ranks: this rank, and the number of ranks. Each rank gets consecutive samples of each batch, divided as
            evenly as possible.
        arrive: called with (batch as a `Made`, loader's device, whether damaged samples are skipped) in the thread that
            copies batches; returns the changed `Made`. Example: `DeviceImages` decodes files on a GPU. None: batches
            are not changed.
        device: device of the batches. Batches are copied from pinned memory while the steps run. None: batches stay on
            the CPU.
        on_damage: "stop" raises at a sample that cannot be read; "skip" leaves the sample out, so that its batch is
            smaller.

    Attributes:
        epoch: epoch of the next `for batch in loader`; the caller may set it.
        waited_s: seconds that the consumer has waited for batches.
        skipped: (index, name, reason) of each sample that this rank skipped.

    Raises:
        InputError: an argument is out of range.
    """

    def __init__(
        self,
        samples: Samples,
        batch: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        how: str = "auto",
        workers: int = 0,
        ahead: int = 4,
        collate: Callable[[list[Any]], Any] = default_collate,
        drop_last: bool = False,
        repeats: int = 1,
        rank: int = 0,
        ranks: int = 1,
        arrive: Callable[[Made, torch.device | None, bool], Made] | None = None,
        device: str | torch.device | None = None,
        on_damage: str = "stop",
    ) -> None:
        if how not in ("auto", *WAYS):
            raise InputError(f'how is {how!r}: expected "auto", "here", "threads" or "processes"')
        if on_damage not in ("stop", "skip"):
            raise InputError(f'on_damage is {on_damage!r}: expected "stop" or "skip"')
        if workers < 0 or ahead < 1:
            raise InputError(f"workers={workers}, ahead={ahead}: expected workers of 0 or more and ahead of 1 or more")
        if workers > WORKERS_OF_A_CPU * (cpus := usable_cpus()):
            raise InputError(
                f"workers={workers}: expected at most {WORKERS_OF_A_CPU * cpus}, since this process may use {cpus} "
                "CPUs; 0 chooses a number"
            )
        order = Order(len(samples), batch, shuffle, seed, drop_last, rank, ranks, repeats)
        self.workers, self.ahead = workers or _usual_workers(ranks), ahead
        self._job = Job(samples, order, collate, pieces_of(collate, self.workers), on_damage == "skip")
        self.device = None if device is None else torch.device(device)
        self._copies, self._arrive = Copies(self.device), arrive
        safe = getattr(samples, "thread_safe", True)
        ways = (how,) if how != "auto" else _worth_trying(self.workers, self._copies.pins, safe)
        self._choice = Choice(ways, self.workers, self._copies.pins)
        self._processes: Processes | None = None  # kept for the next iteration
        self._in_use = False  # whether an iteration that has not ended uses `_processes`
        self.epoch, self.waited_s = 0, 0.0
        self.skipped: list[Damaged] = []

    def __len__(self) -> int:
        """The number of batches in an epoch."""
        return len(self._job.order)

    @property
    def description(self) -> str:
        """Text that describes how batches are made, with the measurements."""
        return str(self._choice)

    @property
    def chosen(self) -> str | None:
        """The chosen way of making batches ("here", "threads" or "processes"); None while the loader still times
        them."""
        return self._choice.chosen

    def __iter__(self) -> Iterator[LoadedBatch]:
        """Yield the batches of epoch `self.epoch`, then increase that number."""
        epoch, self.epoch = self.epoch, self.epoch + 1
        return self.batches(epoch)

    def batches(self, epoch: int, start: int = 0, epochs: int = 1) -> Iterator[LoadedBatch]:
        """Yield the batches of one or more epochs, from batch `start` of the first epoch.

        The first batches of an epoch are made while the consumer uses the last batches of the previous epoch. Several
        iterations may run at the same time, each with its own threads or processes.

        Raises:
            InputError: the call itself raises if `start` is not in 0..`len(self)`, `epoch` is below 0, or `epochs` is
                below 1. The iteration raises at a damaged sample that is not skipped, and at the end of an epoch in
                which all samples of this rank were damaged.
            LoadingError: a worker process of the loader was killed or ended.
            Exception: any other error of the data set.
        """
        if not 0 <= start <= len(self) or epoch < 0:
            raise InputError(
                f"batch {start} of epoch {epoch}: an epoch has {len(self)} batches; batches and epochs are counted "
                "from 0"
            )
        if epochs < 1:
            raise InputError(f"epochs is {epochs}: expected 1 or more")
        return self._batches(epoch, start, epochs * len(self))

    def _batches(self, epoch: int, start: int, end: int) -> Iterator[LoadedBatch]:
        """Yield batches `start` to `end - 1`, counted from the beginning of `epoch` on through the epochs after it."""
        number, found, skipped = start, 0, len(self.skipped)
        while number < end:
            way = self._choice.trial
            try:
                for batch in self._some(way, epoch, number, end):
                    number += 1
                    found += len(batch.indices)
                    yield batch
                    if number % len(self) == 0:
                        self._check_readable(found, skipped)
                        found, skipped = 0, len(self.skipped)
            except Exception as error:
                if way in (None, "here") or isinstance(error, InputError):
                    raise
                # a failed trial only excludes this way from the choice
                self._choice.failed(str(way), f"{type(error).__name__}: {error}")

    def _check_readable(self, found: int, skipped: int) -> None:
        if not found and len(self.skipped) > skipped:
            raise InputError(
                f"none of {len(self.skipped) - skipped} samples can be read; the last: {self.skipped[-1].reason}"
            )

    def _some(self, trial: str | None, epoch: int, start: int, end: int) -> Iterator[LoadedBatch]:
        """If `trial` names a way of making batches, time this way: make and yield only a few batches, from batch
        `start` on. If `trial` is None, yield all batches from `start` to `end - 1` in the chosen way.
        """
        name = trial or self._choice.chosen
        assert name is not None
        way = self._way(name)
        count = end - start
        if trial is not None:
            count = min(count, TRIAL_HERE if name == "here" else min(way.in_flight, MOST_TRIAL))
        delivered = 0
        try:
            made = self._timed(way, trial, epoch, range(start, start + count))
            for batch in self._delivered(made, count, None if name == "here" else way):
                delivered += 1
                yield batch
        finally:  # the processes survive for the next epoch if every batch was delivered
            if delivered < count or way is not self._processes or self._choice.chosen not in (None, "processes"):
                self._close(way)
            else:
                self._in_use = False

    def _timed(self, way: Way, trial: str | None, epoch: int, numbers: range) -> Iterator[tuple[Made, Copied]]:
        """Make batches. In a trial, also record the seconds per batch: the time from the first task to the end of the
        last batch, divided by the number of batches. "here" is timed on the last batch alone."""
        began = last = time.monotonic()
        begun = 0
        for done in range(len(numbers)):
            while begun < min(len(numbers), done + way.in_flight):
                later, number = divmod(numbers[begun], len(self))
                way.begin(epoch + later, number)
                begun += 1
            if trial == "here":
                began = time.monotonic()
            made = way.take(self._copies.pins)
            last = max(last, made.finished)
            if trial is not None and done == len(numbers) - 1:
                self._choice.timed(trial, (last - began) / (1 if trial == "here" else len(numbers)))
            if self._arrive is not None:
                with self._copies.stream():
                    made = self._arrive(made, self.device, self._job.skip)
            yield made, self._copies.begin(made.value)

    def _delivered(self, made: Iterator[tuple[Made, Copied]], count: int, way: Way | None) -> Iterator[LoadedBatch]:
        """Deliver batches to the consumer and add up its waiting time.

        `way` is None if the consumer's own thread makes batches.
        """
        items = made if way is None else prefetched(made, count, way.interrupt)
        with closing(items):  # type: ignore[type-var]
            for _ in range(count):
                began = time.perf_counter()
                try:
                    whole, copied = next(items)
                finally:
                    self.waited_s += time.perf_counter() - began
                self.skipped += whole.damaged
                value = self._copies.hand_over(copied)
                yield LoadedBatch(value, torch.from_numpy(whole.places), torch.from_numpy(whole.indices))

    def _way(self, name: str) -> Way:
        if name == "here":
            return Here(self._job)
        if name == "threads":
            return Threads(self._job, self.workers, self.ahead)
        if self._in_use:  # a second iteration at the same time has its own processes
            return Processes(self._job, self.workers, self.ahead)
        if self._processes is None:
            self._processes = Processes(self._job, self.workers, self.ahead)
        self._in_use = True
        return self._processes

    def _close(self, way: Way) -> None:
        if way is self._processes:
            self._processes, self._in_use = None, False
        way.close()

    @property
    def copied_bytes(self) -> int:
        """The number of bytes copied to the device so far."""
        return self._copies.copied_bytes

    def close(self) -> None:
        """End the worker processes that wait for the next epoch.

        Without this call, the processes wait until the loader is deleted or the program ends. A loop over batches that
        is left early ends its own processes.
        """
        if self._processes is not None:
            self._close(self._processes)

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _worth_trying(workers: int, on_gpu: bool, thread_safe: bool) -> tuple[str, ...]:
    """The ways of making batches that are worth timing. If the training runs on the CPU, a single worker is no faster
    than the training loop itself."""
    if workers == 1 and not on_gpu:
        return ("here",)
    return WAYS if thread_safe else ("here", "processes")


def _usual_workers(ranks: int) -> int:
    """The number of workers of a rank: the CPUs that this process may use, divided by the number of ranks on this
    machine; at least 1 and at most MOST_WORKERS."""
    return max(1, min(MOST_WORKERS, usable_cpus() // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))))
