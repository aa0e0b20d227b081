"""Ceilings: what this machine can do, measured; as data and as a file.

A ceiling is an upper bound: the fastest rate that was reproduced, whichever pattern or shape reached it. Figures above
a ceiling elsewhere mean that the ceiling was measured badly, so every doubt is resolved upwards.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

from rooftop.errors import CeilingsFileError

FORMAT = 1
Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class MemoryPoint:
    """Bandwidths at one working set, bytes/s (read plus written): sum, fill, copy, and a = b + s * c."""

    working_set_bytes: int
    read: float
    write: float
    copy: float
    triad: float

    @property
    def best(self) -> float:
        return max(self.read, self.write, self.copy, self.triad)


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
        flops: best matrix rate for each precision, flop/s.
        kernel_floor_ms: duration of an empty kernel inside a CUDA graph; on a CPU of the cheapest operator.
        launch_eager_ms, launch_graph_ms: time for each of many tiny kernels, launched eagerly and from a graph.
        transfers: bytes/s between host and device, pageable and pinned. links: between GPUs, copies and the bus
            bandwidth of collectives.
        spread: relative spread of each measurement. disturbed: those above 10%.
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

    def rate(self, working_set_bytes: int) -> float:
        """Upper bound of the bandwidth for work of this size, bytes/s.

        The fastest pattern at the largest measured working set that is not larger than this one, or at any larger one:
        never pessimistic, and never rising with the working set.
        """
        position = bisect_right([point.working_set_bytes for point in self.memory], working_set_bytes) - 1
        return max(point.best for point in self.memory[max(0, position) :])

    def peak(self, precision: str) -> float:
        """Best matrix rate in a precision, flop/s.

        Raises:
            ValueError: not measured on this device.
        """
        if precision not in self.flops:
            raise ValueError(f"no {precision} rate was measured on {self.device}; there are {', '.join(self.flops)}")
        return self.flops[precision]

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
        """What `to_dict` gave.

        Raises:
            ValueError: not ceilings, or of another format version.
        """
        if not isinstance(plain, Mapping) or plain.get("format") != FORMAT:
            found = plain.get("format") if isinstance(plain, Mapping) else type(plain).__name__
            raise ValueError(f"expected ceilings of format {FORMAT}, got {found!r}")
        try:
            values = {field.name: plain[field.name] for field in fields(cls)}
            values["memory"] = tuple(MemoryPoint(**point) for point in plain["memory"])
            values["levels"] = tuple(MemoryLevel(**level) for level in plain["levels"])
            values["disturbed"] = tuple(plain["disturbed"])
            rates = [point.best for point in values["memory"]] + list(plain["flops"].values())
            if not values["memory"] or not all(rate > 0 for rate in rates):
                raise ValueError("a rate is missing or not positive")
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        return cls(**values)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON form, whole or not at all."""
        target, text = Path(path), json.dumps(self.to_dict(), indent=1) + "\n"
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
    """Names of the machines whose measured ceilings come with Rooftop ("h200")."""
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
            f"{os.fspath(machine)!r} is neither a known machine ({', '.join(known_machines())}) nor a ceilings file; "
            "write one on that machine with: rooftop ceilings -o FILE"
        )
    return Ceilings.load(machine)
