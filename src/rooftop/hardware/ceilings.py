"""Ceilings: the measured limits of a machine, as data and as a file.

A ceiling is an upper bound: the fastest rate measured so far, with any pattern or shape. If an operator is faster than
a ceiling, the ceiling was measured too low, and the operator raises it.
"""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, asdict, astuple, dataclass, field, fields, replace
from functools import cached_property
from importlib import resources
from itertools import accumulate
from typing import Any

from rooftop.errors import CeilingsFileError
from rooftop.hardware.figures import KINDS, LAUNCHES, PRECISIONS, Raise, memory_figure, part_in_words
from rooftop.user_paths import user_path
from rooftop.whole_files import write_whole
from rooftop.words import did_you_mean, utc_now

FORMAT = 2
FORMATS = (1, 2)  # format 1 had no rates of casts and updates, no sustained rates and no causes of raised ceilings
Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class MemoryPoint:
    """Bandwidths over one working set, in bytes/s (bytes read plus bytes written). 0 means not measured.

    `read` is a sum, `write` a fill, `triad` a = b + s * c, and `cast` a conversion between four-byte and two-byte
    elements. `update` is a = s * a in place, which reads and writes the same memory. `raised` (out of place) and
    `raised_in_place` are the rates of a program's operators that exceeded the measured rates; 0 if none did.
    """

    working_set_bytes: int
    read: float
    write: float
    copy: float
    triad: float
    cast: float = 0.0
    update: float = 0.0
    raised: float = 0.0
    raised_in_place: float = 0.0

    def measured(self, in_place: bool = False) -> bool:
        """Whether a probe measured at least one of this working set's rates. `update` counts only with `in_place`. The
        raised rates do not count, because operators of a program reached them, not a probe."""
        return any((self.read, self.write, self.copy, self.triad, self.cast, in_place and self.update))

    @property
    def best(self) -> float:
        """The best rate of work that reads and writes different memory."""
        return max(self.read, self.write, self.copy, self.triad, self.cast, self.raised)

    @property
    def best_in_place(self) -> float:
        """The best rate of any work, in place or out of place: the limit for work that overwrites its input. Such work
        reads and then writes each address, so the write finds the address in a cache."""
        return max(self.best, self.update, self.raised_in_place)


@dataclass(frozen=True)
class MemoryLevel:
    """A level of the memory hierarchy: its capacity (None: DRAM) and the fastest rate measured in it, bytes/s."""

    name: str
    capacity_bytes: int | None
    rate: float


@dataclass(frozen=True)
class Ceilings:
    """The limits of one device.

    Attributes:
        device, device_id, kind: name, UUID (GPU) or model (CPU), "cuda" or "cpu".
        threads: number of CPU threads that were used; 1 on a GPU.
        versions: versions of all software that could change the measured values (*figures*, see
            `rooftop.hardware.figures`).
        measured_at: UTC, ISO 8601.
        memory: bandwidths by working set, in rising order.
        levels: a summary of `memory` by level of the hierarchy.
        flops: best matrix rate for each precision, flop/s. Only measured precisions are present.
        kernel_floor_ms: duration of the shortest kernel; on a CPU, of the cheapest operator.
        launch_eager_ms, launch_graph_ms: time per kernel in a series of many tiny kernels, launched eagerly and from a
            graph.
        transfers: bytes/s between host and device, pageable and pinned.
        links: bytes/s between GPUs, for copies and for collectives (as bus bandwidth). Empty until they are requested.
        spread: for each figure, the relative distance of its best two samples.
        disturbed: texts that name the figures whose best sample was not reproduced within 10%, or that were measured
            while other programs used the machine.
        sustained: for each precision, the matrix rate of a product that runs continuously, under the power limit.
        pulse: the speed of a CPU over time (see `pulse`).
        conditions: conditions of the last measurement (see `conditions`).
        raises: the figures that a program's operators raised.
    """

    device: str
    device_id: str
    kind: str
    threads: int
    versions: Mapping[str, str]
    measured_at: str
    memory: tuple[MemoryPoint, ...]
    levels: tuple[MemoryLevel, ...]
    flops: Mapping[str, float]
    kernel_floor_ms: float
    launch_eager_ms: float
    launch_graph_ms: float
    transfers: Mapping[str, float]
    links: Mapping[str, float]
    spread: Mapping[str, float]
    disturbed: tuple[str, ...]
    sustained: Mapping[str, float] = field(default_factory=dict)
    pulse: Mapping[str, float] = field(default_factory=dict)
    conditions: Mapping[str, float] = field(default_factory=dict)
    raises: tuple[Raise, ...] = ()

    def rate(self, working_set_bytes: int, in_place: bool = False) -> float:
        """Upper bound of the bandwidth for work of this size, bytes/s.

        Start at the largest measured working set that is not larger than this working set. The bound is the fastest
        rate of any pattern at that or at any larger working set. So the bound is never too low, and never rises with
        the working set. A rate that an operator reached at a working set that no probe measured also counts for larger
        working sets, up to the next measured one.

        Args:
            in_place: whether the work overwrites its input.
        """
        sizes, rates = self._rates[in_place]
        return rates[bisect_right(sizes, working_set_bytes)]

    @cached_property
    def _rates(self) -> tuple[tuple[list[int], list[float]], tuple[list[int], list[float]]]:
        """Best rate by working set, as a pair (out-of-place, in-place). Each item is (sizes, rates). `sizes` are the
        measured working sets in bytes, ascending. `rates` has one item more: rates[i + 1] is the best rate at
        sizes[i] or a larger size; rates[0], for working sets below all sizes, is the best rate of all.
        """
        found = []
        for in_place in (False, True):
            best = [point.best_in_place if in_place else point.best for point in self.memory]
            onwards = list(accumulate(reversed(best), max))[::-1]
            measured = [number for number, point in enumerate(self.memory) if point.measured(in_place)]
            sizes = [self.memory[number].working_set_bytes for number in measured]
            found.append((sizes, [onwards[0], *(onwards[number] for number in measured)]))
        return found[0], found[1]

    def peak(self, precision: str) -> float:
        """Best matrix rate in a precision, flop/s.

        Raises:
            ValueError: the precision was not measured on this device.
        """
        if precision not in self.flops:
            known = ", ".join(each for each in PRECISIONS if each in self.flops)
            raise ValueError(f"no {precision} rate was measured on {self.device}; known rates are {known}")
        return self.flops[precision]

    def disturbed_of(self, parts: Collection[str]) -> tuple[str, ...]:
        """The disturbed figures that belong to the given parts of a measurement.

        Args:
            parts: "memory", "launches", "transfers", "links", and precisions.
        """
        return tuple(name for name in self.disturbed if part_in_words(name) in parts)

    def raised(self, precision: str, flops_per_s: float, by: str) -> Ceilings:
        """Return ceilings so high that an operator with this matrix rate is not faster than its roof.

        Args:
            by: text that names the operator in the history ("aten::mm (8192, 4096) x (4096, 1024) bf16").

        Raises:
            ValueError: the precision was not measured, or the rate is not a positive number.
        """
        before = self.peak(precision)
        flops = {**self.flops, precision: max(before, _positive(flops_per_s))}
        return self._with(f"flops {precision}", before, flops[precision], by, flops=flops)

    def raised_memory(self, working_set_bytes: int, rate: float, by: str, in_place: bool = False) -> Ceilings:
        """Return ceilings so high that an operator with this working set and bandwidth is not faster than its roof.

        Args:
            rate: the bandwidth that the operator reached, bytes/s.
            by: text that names the operator in the history, as in `raised`.
            in_place: whether the operator overwrites its input.

        Raises:
            ValueError: the rate is not a positive number.
        """
        before, pattern = self.rate(working_set_bytes, in_place), "raised_in_place" if in_place else "raised"
        if _positive(rate) <= before:
            return self
        points = {point.working_set_bytes: point for point in self.memory}
        point = points.get(working_set_bytes, MemoryPoint(working_set_bytes, 0.0, 0.0, 0.0, 0.0))
        points[working_set_bytes] = replace(point, raised_in_place=rate) if in_place else replace(point, raised=rate)
        memory = tuple(points[size] for size in sorted(points))
        caches = {level.name: level.capacity_bytes for level in self.levels if level.capacity_bytes is not None}
        levels = levels_of(memory, caches)
        return self._with(memory_figure(working_set_bytes, pattern), before, rate, by, memory=memory, levels=levels)

    def lowered_floor(self, ms: float, by: str) -> Ceilings:
        """Return ceilings whose kernel floor is so low that a kernel of this duration is not faster than its roof.

        Raises:
            ValueError: the duration is not a positive number.
        """
        floor = min(self.kernel_floor_ms, _positive(ms))
        return self._with("kernel_floor_ms", self.kernel_floor_ms, floor, by, kernel_floor_ms=floor)

    def _with(self, figure: str, before: float, after: float, by: str, **changes: Any) -> Ceilings:
        """Return these ceilings with one figure changed, and with a record of the change. If the figure does not
        change, return these ceilings themselves.
        """
        if before == after:
            return self
        return replace(self, raises=(*self.raises, Raise(figure, before, after, by, utc_now())), **changes)

    def require_kind(self, kind: str) -> None:
        """Check that a step on this kind of device can be compared with these ceilings.

        Raises:
            CeilingsFileError: the ceilings are for another kind of device.
        """
        if kind != self.kind:
            raise CeilingsFileError(
                f"the ceilings are those of {self.device} ({self.kind}), but the step runs on a {kind} device: leave "
                f"them out to measure this machine, or predict for {self.device} (rooftop analyze --predict, "
                "rooftop.predict)"
            )

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        plain: dict[str, Any] = json.loads(json.dumps({"format": FORMAT, **asdict(self)}))
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Ceilings:
        """Read the result of `to_dict`, even in an earlier format.

        Raises:
            ValueError: the data are not ceilings, or their format version is unknown.
        """
        if isinstance(plain, Mapping) and "ops" in plain and "ceilings" in plain:
            raise ValueError("it holds a report, expected ceilings: `rooftop ceilings -o FILE` writes them")
        if not isinstance(plain, Mapping) or plain.get("format") not in FORMATS:
            found = plain.get("format") if isinstance(plain, Mapping) else type(plain).__name__
            raise ValueError(f"expected ceilings of format {' or '.join(map(str, FORMATS))}, got {found!r}")
        try:
            needed = [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]
            values = {name: plain[name] for name in needed}
            values |= {f.name: plain[f.name] for f in fields(cls) if f.name in plain}
            values["memory"] = tuple(MemoryPoint(**point) for point in plain["memory"])
            values["levels"] = tuple(MemoryLevel(**level) for level in plain["levels"])
            values["disturbed"] = tuple(plain["disturbed"])
            values["raises"] = tuple(Raise(**each) for each in plain.get("raises", ()))
            rates = [point.best_in_place for point in values["memory"]] + list(plain["flops"].values())
            rates += [float(rate) for rate in values.get("pulse", {}).values()]
            figures = [
                *(plain[name] for name in LAUNCHES),
                *(rate for each in values["memory"] for rate in astuple(each)),
            ]
            figures += [rate for kind in KINDS for rate in values.get(kind, {}).values()]
            if wrong := [figure for figure in figures if not _is_number(figure)]:
                raise ValueError(f"a figure in the ceilings is {wrong[0]!r}, expected a finite number")
            if not all(rate > 0 for rate in rates) or not any(point.measured() for point in values["memory"]):
                raise ValueError("a rate in the ceilings is missing or not positive")
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        return cls(**values)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON form completely or not at all."""
        write_whole(user_path(path), json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Ceilings:
        """Read what `save` wrote.

        Raises:
            OSError: the file cannot be read.
            CeilingsFileError: the file does not hold ceilings.
        """
        try:
            return cls.from_dict(json.loads(user_path(path).read_text(encoding="utf-8")))
        except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
            raise CeilingsFileError(
                f"{os.fspath(path)} is not a usable ceilings file ({error}); "
                f"measure again with: rooftop ceilings -o FILE"
            ) from error


def levels_of(memory: Sequence[MemoryPoint], caches: Mapping[str, int]) -> tuple[MemoryLevel, ...]:
    """For each cache, the fastest rate among the working sets that fit into this cache but into no smaller cache. For
    DRAM, the fastest rate among the working sets of at least `BEYOND` times the largest cache; if there are none, the
    rate of the largest working set.
    """
    levels, floor = [], 0
    for name, capacity in caches.items():
        inside = [point.best for point in memory if floor < point.working_set_bytes <= capacity and point.best > 0]
        if inside:
            levels.append(MemoryLevel(name, capacity, max(inside)))
            floor = capacity
    # If a working set is somewhat larger than a cache, the cache still serves a part of it.
    rates = [(point.working_set_bytes, point.best) for point in memory if point.best > 0]
    beyond = [rate for size, rate in rates if size >= BEYOND * floor] or [rates[-1][1]]
    return (*levels, MemoryLevel("DRAM", None, max(beyond)))


# Working sets of at least this many times the largest cache count as DRAM: at most an eighth of them is in the cache.
BEYOND = 8


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _positive(value: float) -> float:
    if not 0 < value < float("inf"):
        raise ValueError(f"expected a positive number to raise a ceiling to, got {value!r}")
    return value


def require_ceilings(given: object, caller: str) -> Ceilings:
    """Return `given`, the ceilings passed to `caller`, if they are Ceilings.

    Raises:
        TypeError: `given` is not Ceilings (but a machine's name, for example).
    """
    if not isinstance(given, Ceilings):
        raise TypeError(
            f"{caller}(ceilings={given!r}): expected Ceilings, such as "
            'rooftop.hardware.ceilings_of("h200") for a known machine, or '
            'rooftop.hardware.ceilings_of("file.json") for a file'
        )
    return given


def known_machines() -> list[str]:
    """Names of the machines whose measured ceilings come with Rooftop ("h100", "h200")."""
    folder = resources.files("rooftop.hardware") / "machines"
    return sorted(file.name.removesuffix(".json") for file in folder.iterdir() if file.name.endswith(".json"))


def ceilings_of(machine: str | os.PathLike[str]) -> Ceilings:
    """Read the ceilings of this or another machine, by a known name ("h200") or from a file that `Ceilings.save` wrote.

    Raises:
        ValueError: `machine` is neither a known machine nor a file.
        CeilingsFileError: the file does not hold ceilings.
    """
    if str(machine) in known_machines():
        file = resources.files("rooftop.hardware") / "machines" / f"{machine}.json"
        return Ceilings.from_dict(json.loads(file.read_text(encoding="utf-8")))
    if not user_path(machine).is_file():
        raise ValueError(
            f"{os.fspath(machine)!r} is neither a known machine ({', '.join(known_machines())}) nor a ceilings "
            f"file{did_you_mean(machine, known_machines())}; create a file on that machine with: rooftop ceilings -o "
            "FILE"
        )
    return Ceilings.load(machine)
