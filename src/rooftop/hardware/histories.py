"""The history of a machine's ceilings: measurements and raises, dated, and each measurement with its conditions.

A ceiling is the best value in its history. So a measurement under load lowers no ceiling. If two processes measure at
the same time, no measurement is lost: histories are merged like sets, so the order does not matter. A history with too
many measurements drops the oldest, but never one that has the best value of a figure.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from rooftop.hardware.ceilings import FORMAT, Ceilings, MemoryPoint, levels_of
from rooftop.hardware.conditions import busy
from rooftop.hardware.figures import (
    DISTURBED_SPREAD,
    KINDS,
    LAUNCHES,
    PATTERNS,
    Raise,
    best_of,
    better,
    distance,
    in_words,
    memory_figure,
    part_of,
    size_in_words,
)

MOST_MEASUREMENTS = 20
"""How many measurements of a machine are kept, in addition to the measurements with the best value of a figure."""

LOWER_BY = 0.03
"""A figure that is less than this share below its best value counts as unchanged."""


@dataclass(frozen=True)
class Machine:
    """The measured machine. `caches`: bytes by name, ascending."""

    device: str
    device_id: str
    kind: str
    threads: int
    versions: Mapping[str, str]
    caches: Mapping[str, int]


@dataclass(frozen=True)
class Measurement:
    """Figures by name (see `figures`) that were measured together.

    Attributes:
        at: UTC, ISO 8601.
        spread: for each figure, the relative distance of its best two samples.
        conditions: see `rooftop.hardware.conditions`.
        disturbed: the disturbed figures. If None, `spread` and `conditions` determine which figures are disturbed.
    """

    at: str
    figures: Mapping[str, float]
    spread: Mapping[str, float]
    conditions: Mapping[str, float]
    disturbed: tuple[str, ...] | None = None

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Measurement:
        """Read the result of `asdict`, even after a round trip through JSON."""
        disturbed = plain.get("disturbed")
        return cls(**{**plain, "disturbed": None if disturbed is None else tuple(disturbed)})

    def is_disturbed(self, name: str, kind: str) -> bool:
        """Whether a figure (of a "cpu" or "cuda" machine) may be wrong: its best two samples differ by more than
        `DISTURBED_SPREAD`, or other processes used the machine.
        """
        if self.disturbed is not None:
            return name in self.disturbed
        return busy(self.conditions, kind) or self.spread.get(name, 0.0) > DISTURBED_SPREAD


@dataclass(frozen=True)
class Lower:
    """A rate or a time whose newest value is worse than an earlier value: a lower rate, or a longer time. The ceilings
    keep the earlier value."""

    figure: str
    new: float
    kept: float
    kept_at: str


@dataclass(frozen=True)
class History:
    """The measurements of one machine, and its raises: ceilings that were raised because a program exceeded them. The
    history keeps only the last `MOST_MEASUREMENTS` measurements, and older ones that have the best value of a
    figure."""

    machine: Machine
    measurements: tuple[Measurement, ...]
    raises: tuple[Raise, ...] = field(default=())

    def merged(self, other: History) -> History:
        """The measurements and raises of two histories, with the description of the machine from the newer history."""
        newer = max(self, other, key=lambda history: (history.measurements[-1].at, _text(history.machine)))
        measurements = _union(self.measurements, other.measurements)
        return History(newer.machine, _kept(measurements), _union(self.raises, other.raises))

    @property
    def figures(self) -> dict[str, float]:
        """The best value of each figure, including raises."""
        raised = ({each.figure: each.after} for each in self.raises)
        return best_of([*(measurement.figures for measurement in self.measurements), *raised])

    @property
    def parts(self) -> set[str]:
        """The measured parts."""
        return {part_of(name) for measurement in self.measurements for name in measurement.figures}

    def ceilings(self) -> Ceilings:
        """The best value of each figure, as ceilings."""
        figures, last = self.figures, self.measurements[-1]
        measured = best_of(measurement.figures for measurement in self.measurements)
        memory, kinds = _memory(figures), _by_kind(figures)
        return Ceilings(
            device=self.machine.device,
            device_id=self.machine.device_id,
            kind=self.machine.kind,
            threads=self.machine.threads,
            versions=self.machine.versions,
            measured_at=last.at,
            memory=memory,
            levels=levels_of(memory, self.machine.caches),
            flops=kinds["flops"],
            kernel_floor_ms=figures["kernel_floor_ms"],
            launch_eager_ms=figures["launch_eager_ms"],
            launch_graph_ms=figures["launch_graph_ms"],
            transfers=kinds["transfers"],
            links=kinds["links"],
            spread={name: spread for name in measured if (spread := self._holder(name).spread.get(name)) is not None},
            disturbed=self._disturbed_in_words(measured),
            sustained=kinds["sustained"],
            pulse=kinds["pulse"],
            conditions=last.conditions,
            # only the raises that determine a present ceiling
            raises=tuple(r for r in self.raises if figures[r.figure] == r.after != measured.get(r.figure)),
        )

    def lower(self) -> list[Lower]:
        """Figures of the last measurement that are worse (a lower rate or a longer time) than the history's best
        measured values. The best values stay.

        For each working set, only two bandwidth figures are compared: the out-of-place and the in-place figure with the
        highest values in the whole history. The largest differences come first.
        """
        last, best = self.measurements[-1], best_of(measurement.figures for measurement in self.measurements)
        deciding = {name for names in _by_working_set(best).values() for name in _deciding(names, best)}
        found = [
            Lower(name, value, best[name], self._holder(name).at)
            for name, value in last.figures.items()
            if distance(value, best[name]) > LOWER_BY
            and (part_of(name) != "memory" or name in deciding)
            and not name.startswith("pulse")
        ]
        return sorted(found, key=lambda each: -distance(each.new, each.kept))

    def _holder(self, name: str) -> Measurement:
        """The first measurement that has the best value of a figure."""
        holders = [measurement for measurement in self.measurements if name in measurement.figures]
        best = best_of({name: measurement.figures[name]} for measurement in holders)[name]
        return next(measurement for measurement in holders if measurement.figures[name] == best)

    def _disturbed(self, name: str) -> bool:
        """Whether the best value of a figure may be wrong: its measurement was disturbed, and no other measurement
        reproduced it. If other processes used the machine during both measurements, the value is not reproduced."""
        holder, kind = self._holder(name), self.machine.kind
        if not holder.is_disturbed(name, kind):
            return False
        best = holder.figures[name]
        others = [m for m in self.measurements if m is not holder and name in m.figures]
        reproduced = [m for m in others if distance(best, m.figures[name]) <= DISTURBED_SPREAD]
        alone = not busy(holder.conditions, kind)
        return not any(alone or not busy(m.conditions, kind) for m in reproduced)

    def _disturbed_in_words(self, measured: Mapping[str, float]) -> tuple[str, ...]:
        """The disturbed figures, as names for readers. Of each working set, only the best out-of-place rate
        counts. If all working sets are disturbed, the single name "memory" replaces the names of the working sets.
        """
        others = sorted(name for name in measured if part_of(name) != "memory" and not name.startswith("pulse"))
        names = [name for name in others if self._disturbed(name)]
        by_size = _by_working_set(measured)
        points = [
            f"memory {size_in_words(size)}"
            for size, patterns in by_size.items()
            if self._disturbed(_deciding(patterns, measured)[0])
        ]
        of_memory = ["memory"] if points and len(points) == len(by_size) else points
        return (*of_memory, *dict.fromkeys(in_words(name) for name in names))

    def to_dict(self) -> dict[str, Any]:
        """The JSON form: the ceilings (for older versions and for people), with the history as an additional entry."""
        plain = json.loads(json.dumps({"machine": asdict(self.machine), "raises": [asdict(r) for r in self.raises]}))
        plain["measurements"] = [json.loads(json.dumps(asdict(measurement))) for measurement in self.measurements]
        return {**self.ceilings().to_dict(), "history": plain}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> History:
        """Read the result of `to_dict`, or of `Ceilings.to_dict` as one measurement.

        Raises:
            ValueError: the data are not ceilings, or are ceilings in the first format, whose figures were measured
                differently.
        """
        ceilings = Ceilings.from_dict(plain)
        if plain["format"] != FORMAT:
            raise ValueError(f"expected a history of format {FORMAT}, got ceilings of format {plain['format']}")
        if "history" not in plain:
            return history_of(ceilings)
        try:
            history = plain["history"]
            measurements = tuple(Measurement.from_dict(each) for each in history["measurements"])
            raises = tuple(Raise(**each) for each in history["raises"])
            found = cls(Machine(**history["machine"]), measurements, raises)
            found.ceilings()
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        return found


def history_of(ceilings: Ceilings) -> History:
    """Make a history of one measurement from ceilings without a history."""
    figures = figures_of(ceilings)
    for each in reversed(ceilings.raises):  # undo the raises
        if part_of(each.figure) == "memory":
            figures.pop(each.figure, None)
        else:
            figures[each.figure] = each.before
    caches = {level.name: level.capacity_bytes for level in ceilings.levels if level.capacity_bytes is not None}
    machine = Machine(ceilings.device, ceilings.device_id, ceilings.kind, ceilings.threads, ceilings.versions, caches)
    spread = {name: value for name, value in ceilings.spread.items() if name in figures}
    disturbed = tuple(name for name in figures if _words_of(name) & {*ceilings.disturbed})
    measurement = Measurement(ceilings.measured_at, figures, spread, ceilings.conditions, disturbed)
    return History(machine, (measurement,), ceilings.raises)


def _words_of(name: str) -> set[str]:
    """The texts in `Ceilings.disturbed` that mean the figure `name`. For a memory rate: "memory" (all working sets), or
    "memory" with the size of its working set. For any other figure: only its own name for readers."""
    if part_of(name) == "memory":
        return {"memory", f"memory {size_in_words(int(name.split()[1]))}"}
    return {in_words(name)}


def figures_of(ceilings: Ceilings) -> dict[str, float]:
    """All figures by name: rates per second, launches in ms."""
    figures = {name: float(getattr(ceilings, name)) for name in LAUNCHES}
    for point in ceilings.memory:
        for pattern in PATTERNS:
            if value := float(getattr(point, pattern)):
                figures[memory_figure(point.working_set_bytes, pattern)] = value
    for kind in KINDS:
        figures |= {f"{kind} {name}": value for name, value in getattr(ceilings, kind).items()}
    return figures


def _memory(figures: Mapping[str, float]) -> tuple[MemoryPoint, ...]:
    points: dict[int, dict[str, float]] = defaultdict(lambda: dict.fromkeys(PATTERNS, 0.0))
    for name, value in figures.items():
        kind, _, rest = name.partition(" ")
        if kind == "memory":
            size, _, pattern = rest.partition(" ")
            points[int(size)][pattern] = value
    return tuple(MemoryPoint(size, **points[size]) for size in sorted(points))


def _by_working_set(figures: Mapping[str, float]) -> dict[int, list[str]]:
    """The names of the bandwidth figures by working set in bytes, the smallest working set first."""
    found: dict[int, list[str]] = defaultdict(list)
    for name in figures:
        if part_of(name) == "memory":
            found[int(name.split()[1])].append(name)
    return {size: found[size] for size in sorted(found)}


def _deciding(names: list[str], figures: Mapping[str, float]) -> list[str]:
    """Of the names of one working set's bandwidth figures, the two with the best rates: the best of out-of-place work,
    then the best of in-place work."""
    in_place = [name for name in names if name.endswith(("update", "in_place"))]
    others = [name for name in names if name not in in_place]
    return [max(group, key=lambda name: figures[name]) for group in (others, in_place) if group]


def _by_kind(figures: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Group figures whose names begin with one of `KINDS`: {first word: {rest of the name: value}}."""
    kinds: dict[str, dict[str, float]] = {kind: {} for kind in KINDS}
    for name, value in figures.items():
        kind, _, rest = name.partition(" ")
        if kind in kinds:
            kinds[kind][rest] = value
    return kinds


Entry = TypeVar("Entry", Measurement, Raise)


def _union(some: Iterable[Entry], others: Iterable[Entry]) -> tuple[Entry, ...]:
    """The distinct entries of both (each a `Measurement`, or each a `Raise`), in order of time."""
    by_text = {_text(each): each for entries in (some, others) for each in entries}
    return tuple(by_text[text] for text in sorted(by_text, key=lambda text: (by_text[text].at, text)))


def _kept(measurements: tuple[Measurement, ...]) -> tuple[Measurement, ...]:
    """The measurements to keep: the last `MOST_MEASUREMENTS`, and each one that has the best value of a figure."""
    holders: dict[str, int] = {}
    for number, measurement in enumerate(measurements):
        for name, value in measurement.figures.items():
            held = measurements[holders[name]].figures[name] if name in holders else None
            if held is None or better(name, held, value) != held:
                holders[name] = number
    first_of_last = len(measurements) - MOST_MEASUREMENTS
    return tuple(m for i, m in enumerate(measurements) if i >= first_of_last or i in holders.values())


def _text(entry: Any) -> str:
    return json.dumps(asdict(entry), sort_keys=True)
