"""Ceilings: what this machine can do, measured; as data and as a file.

A ceiling is an upper bound: the fastest rate that was ever measured, whichever pattern or shape reached it. An operator
above a ceiling means that the ceiling was measured badly: it raises it.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from functools import cached_property
from importlib import resources
from itertools import accumulate
from pathlib import Path
from typing import Any

from rooftop.errors import CeilingsFileError, did_you_mean
from rooftop.hardware.figures import PRECISIONS, Raise, memory_figure, part_in_words

FORMAT = 2
FORMATS = (1, 2)  # the first knew neither casts nor updates, neither sustained rates nor what raised a ceiling
Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class MemoryPoint:
    """Bandwidths at one working set, bytes/s (read plus written).

    Sum, fill, copy, a = b + s * c, a cast between four and two bytes; a = s * a in place, which reads and writes the
    same memory; and what operators of programs have reached, in place or not. 0 is what was not measured.
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
        """Whether anything but an operator of a program was seen here."""
        return any((self.read, self.write, self.copy, self.triad, self.cast, in_place and self.update))

    @property
    def best(self) -> float:
        """Of work that reads and writes different memory."""
        return max(self.read, self.write, self.copy, self.triad, self.cast, self.raised)

    @property
    def best_in_place(self) -> float:
        """Of work that writes what it has read: a cache serves each of its bytes twice."""
        return max(self.best, self.update, self.raised_in_place)


@dataclass(frozen=True)
class MemoryLevel:
    """A level of the memory hierarchy: its capacity (None: DRAM) and the fastest rate measured in it, bytes/s."""

    name: str
    capacity_bytes: int | None
    rate: float


@dataclass(frozen=True)
class Ceilings:
    """What one device can do.

    Attributes:
        device, device_id, kind: name, UUID (GPU) or model (CPU), "cuda" or "cpu".
        threads: CPU threads that were used, 1 on a GPU.
        versions: of everything that could change the figures.
        measured_at: UTC, ISO 8601.
        memory: bandwidths over the working set, rising. levels: their summary.
        flops: best matrix rate for each precision, flop/s. Only those that somebody has asked for.
        kernel_floor_ms: duration of the shortest kernel; on a CPU of the cheapest operator.
        launch_eager_ms, launch_graph_ms: time for each of many tiny kernels, launched eagerly and from a graph.
        transfers: bytes/s between host and device, pageable and pinned. links: between GPUs, copies and the bus
            bandwidth of collectives. Empty until somebody asks for them.
        spread: by figure, the relative distance of the best two samples. disturbed: in words, the figures whose best
            was not reproduced within 10%, or that were measured while others used the machine.
        sustained: matrix rate for each precision of a product that runs on and on, under the power limit.
        pulse: of a CPU, how fast it has been (see `pulse`).
        conditions: of the last measurement (see `conditions`). raises: what operators of programs have raised.
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

        The fastest pattern at the largest measured working set that is not larger than this one, or at any larger one:
        never pessimistic, and never rising with the working set. What an operator has reached counts from the measured
        working set below it, too.

        Args:
            in_place: the work writes what it has read.
        """
        sizes, rates = self._rates[in_place]
        return rates[bisect_right(sizes, working_set_bytes)]

    @cached_property
    def _rates(self) -> tuple[tuple[list[int], list[float]], tuple[list[int], list[float]]]:
        """Measured working sets; the best rate of any, then of any from each of them on. The same in place."""
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
            ValueError: not measured on this device.
        """
        if precision not in self.flops:
            known = ", ".join(each for each in PRECISIONS if each in self.flops)
            raise ValueError(f"no {precision} rate was measured on {self.device}; there are {known}")
        return self.flops[precision]

    def disturbed_of(self, parts: Collection[str]) -> tuple[str, ...]:
        """Those of the disturbed figures that belong to some parts.

        Args:
            parts: "memory", "launches", "transfers", "links", and precisions.
        """
        return tuple(name for name in self.disturbed if part_in_words(name) in parts)

    def raised(self, precision: str, flops_per_s: float, by: str) -> Ceilings:
        """Ceilings under which an operator with this matrix rate is not above its roof.

        Args:
            by: the operator in words, for the history ("aten::mm (8192, 4096) x (4096, 1024) bf16").

        Raises:
            ValueError: the precision was not measured, or the rate is no positive number.
        """
        before = self.peak(precision)
        flops = {**self.flops, precision: max(before, _positive(flops_per_s))}
        return self._with(f"flops {precision}", before, flops[precision], by, flops=flops)

    def raised_memory(self, working_set_bytes: int, rate: float, by: str, in_place: bool = False) -> Ceilings:
        """Ceilings under which an operator with this working set and bandwidth, bytes/s, is not above its roof.

        Raises:
            ValueError: the rate is no positive number.
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
        """Ceilings under which a kernel of this duration is not above its roof.

        Raises:
            ValueError: the duration is no positive number.
        """
        floor = min(self.kernel_floor_ms, _positive(ms))
        return self._with("kernel_floor_ms", self.kernel_floor_ms, floor, by, kernel_floor_ms=floor)

    def _with(self, figure: str, before: float, after: float, by: str, **changes: Any) -> Ceilings:
        """These with a figure changed, if it has changed, and with a note of it."""
        if before == after:
            return self
        at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return replace(self, raises=(*self.raises, Raise(figure, before, after, by, at)), **changes)

    def require_kind(self, kind: str) -> None:
        """See that a step on this kind of device can be compared with these ceilings.

        Raises:
            CeilingsFileError: they are those of the other kind.
        """
        if kind != self.kind:
            raise CeilingsFileError(
                f"the ceilings are those of {self.device} ({self.kind}), but the step runs on a {kind} device: leave "
                "them out to measure this machine, or predict for that one (rooftop analyze --predict, rooftop.predict)"
            )

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        plain: dict[str, Any] = json.loads(json.dumps({"format": FORMAT, **asdict(self)}))
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Ceilings:
        """What `to_dict` gave, now or in an earlier format.

        Raises:
            ValueError: not ceilings, or of another format version.
        """
        if isinstance(plain, Mapping) and "ops" in plain and "ceilings" in plain:
            raise ValueError("it holds a report; ceilings are what `rooftop ceilings -o FILE` writes")
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
            if not all(rate > 0 for rate in rates) or not any(point.measured() for point in values["memory"]):
                raise ValueError("a rate is missing or not positive")
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        return cls(**values)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON form, whole or not at all."""
        write_whole(Path(path), json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Ceilings:
        """Read what `save` wrote.

        Raises:
            OSError: the file cannot be read.
            CeilingsFileError: it holds something else.
        """
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
            raise CeilingsFileError(
                f"{os.fspath(path)} is not a usable ceilings file ({error}); "
                f"measure again with: rooftop ceilings --refresh"
            ) from error


def levels_of(memory: Sequence[MemoryPoint], caches: Mapping[str, int]) -> tuple[MemoryLevel, ...]:
    """The fastest rate among the working sets that fit each cache but not a smaller one, and beyond all of them."""
    levels, floor = [], 0
    for name, capacity in caches.items():
        inside = [point.best for point in memory if floor < point.working_set_bytes <= capacity and point.best > 0]
        if inside:
            levels.append(MemoryLevel(name, capacity, max(inside)))
            floor = capacity
    # A working set somewhat larger than the cache is still served by it in part.
    rates = [(point.working_set_bytes, point.best) for point in memory if point.best > 0]
    beyond = [rate for size, rate in rates if size >= BEYOND * floor] or [rates[-1][1]]
    return (*levels, MemoryLevel("DRAM", None, max(beyond)))


BEYOND = 8  # times the largest cache: less than an eighth of what is touched can be in it


def _positive(value: float) -> float:
    if not 0 < value < float("inf"):
        raise ValueError(f"expected a positive number to raise a ceiling to, got {value!r}")
    return value


def write_whole(target: Path, text: str) -> None:
    """Write a file, whole or not at all."""
    if target.exists() and not target.is_file():  # a device or a pipe: a renamed file would take its place
        target.write_text(text, encoding="utf-8")
        return
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, target)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def require_ceilings(given: object, caller: str) -> Ceilings:
    """What was given to `caller` as ceilings, if that is what it is.

    Raises:
        TypeError: it is something else (a machine's name, for example).
    """
    if not isinstance(given, Ceilings):
        raise TypeError(
            f"{caller}(ceilings={given!r}): expected Ceilings, those of a known machine or of a file are "
            'rooftop.hardware.ceilings_of("h200"), rooftop.hardware.ceilings_of("file.json")'
        )
    return given


def known_machines() -> list[str]:
    """Names of the machines whose measured ceilings come with Rooftop ("h100", "h200")."""
    folder = resources.files("rooftop.hardware") / "machines"
    return sorted(file.name.removesuffix(".json") for file in folder.iterdir() if file.name.endswith(".json"))


def ceilings_of(machine: str | os.PathLike[str]) -> Ceilings:
    """Ceilings of a machine that need not be this one: a known name ("h200"), or a file that `Ceilings.save` wrote.

    Raises:
        ValueError: neither a known machine nor a file.
        CeilingsFileError: the file holds something else.
    """
    if str(machine) in known_machines():
        file = resources.files("rooftop.hardware") / "machines" / f"{machine}.json"
        return Ceilings.from_dict(json.loads(file.read_text(encoding="utf-8")))
    if not Path(machine).is_file():
        raise ValueError(
            f"{os.fspath(machine)!r} is neither a known machine ({', '.join(known_machines())}) nor a ceilings file"
            f"{did_you_mean(machine, known_machines())}; "
            "write one on that machine with: rooftop ceilings -o FILE"
        )
    return Ceilings.load(machine)
