"""Pipeline schedules: the order in which each rank computes micro-batches at its stages. Schedules are pure data,
without torch.

    schedule = schedule_of("1f1b", ranks=2, micro_batches=3)
    print(schedule.drawn())
    simulate(schedule).bubble        # 0.25

A pipeline splits a model into stages, and a batch into micro-batches. A schedule is a list of instructions for each
rank. `simulate` computes when each instruction runs and how long ranks are idle. The executor
(`rooftop.parallel.pipelines`) and the simulation follow the same lists, so a schedule can be evaluated and tested
without processes.

| schedule | stages per rank | idle share of a step, F = 1, B = 2 | activations on the first rank, in micro-batches |
|---|---|---|---|
| gpipe | 1 | (p - 1) / (m + p - 1) | m |
| 1f1b | 1 | (p - 1) / (m + p - 1) | p |
| interleaved | v | (p - 1) / (v * m + p - 1), where p divides m | p + (p - 1) / v |
| zb-h1 | 1 | (p - 1) / (3 * m + p - 1), where m >= p | p |
| zbv | 2 | (p - 1) / (6 * m + p - 1), where m >= 2 * p - 1 | p |

The table uses p for ranks, m for micro-batches and v for stages per rank. F and B are the times of a forward and a
backward. zb-h1 and zbv split a backward B into the gradient of the input, I, and the gradients of the weights, W. No
rank waits for W, so W fills idle time. The table's idle shares of zb-h1 and zbv assume F = I = W = 1. The last column
is for m of at least 2 * p (for interleaved, also a multiple of p).

Sources: Huang et al. 2019, "GPipe" (arXiv:1811.06965); Narayanan et al. 2021, "Efficient Large-Scale Language Model
Training" (arXiv:2104.04473), 1F1B and interleaving; Qi et al. 2023, "Zero Bubble Pipeline Parallelism"
(arXiv:2401.10241), ZB-H1 and, in section 6, ZB-V.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from numbers import Real
from typing import NamedTuple

from rooftop.words import did_you_mean

KINDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradients"}
UNITS: Mapping[str, float] = {"F": 1, "B": 2, "I": 1, "W": 1}
"""Default durations of instructions. Backward has two matrix products for each product in forward."""


class Instruction(NamedTuple):
    """One instruction of a rank: forward (F), backward (B), input gradient (I) or weight gradients (W) of one
    micro-batch at one stage.

    Attributes:
        kind: one of `KINDS`: "F" (forward), "B" (a whole backward), or the halves of a backward, "I" and "W".
        stage: index of the stage in the whole pipeline, from 0.
        micro_batch: index of the micro-batch in the step, from 0.
    """

    kind: str
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind} of micro-batch {self.micro_batch} at stage {self.stage}"

    @property
    def words(self) -> str:
        """The description in messages, such as "forward of micro-batch 3 at stage 1"."""
        return f"{KINDS[self.kind]} of micro-batch {self.micro_batch} at stage {self.stage}"


@dataclass(frozen=True)
class Schedule:
    """The instructions of all ranks of a pipeline for one step.

    Attributes:
        name: a name in `SCHEDULES`, or any other name.
        micro_batches: number of micro-batches in a step.
        placement: the stages of each rank, ascending.
        instructions: the instructions of each rank, in order.

    Raises:
        ValueError: a stage has no rank or two ranks; an instruction is missing, repeated, or on a rank without its
            stage; or the ranks would wait for each other forever. The message names the instructions.
    """

    name: str
    micro_batches: int
    placement: tuple[tuple[int, ...], ...]
    instructions: tuple[tuple[Instruction, ...], ...]

    def __post_init__(self) -> None:
        _check_placement(self)
        _check_complete(self)
        simulate(self)

    @property
    def ranks(self) -> int:
        return len(self.placement)

    @cached_property
    def stages(self) -> int:
        """The number of stages of all ranks."""
        return sum(map(len, self.placement))

    @cached_property
    def rank_of(self) -> Mapping[int, int]:
        """The rank of each stage, by stage number."""
        return {stage: rank for rank, stages in enumerate(self.placement) for stage in stages}

    @cached_property
    def splits_backward(self) -> bool:
        """Whether some weight gradients are computed by instructions of their own, apart from the input gradients."""
        return any(each.kind == "W" for instructions in self.instructions for each in instructions)

    @cached_property
    def _gradients(self) -> Mapping[tuple[int, int], Instruction]:
        """For each (stage, micro-batch), the instruction that computes the gradient of the stage's input."""
        every = (each for instructions in self.instructions for each in instructions)
        return {(each.stage, each.micro_batch): each for each in every if each.kind in ("B", "I")}

    def needs(self, instruction: Instruction) -> list[Instruction]:
        """The instructions whose results an instruction needs. The instruction at the adjacent stage comes first."""
        kind, stage, micro_batch = instruction
        if kind == "W":
            return [self._gradients[stage, micro_batch]]
        if kind == "F":
            return [Instruction("F", stage - 1, micro_batch)] if stage > 0 else []
        behind = [self._gradients[stage + 1, micro_batch]] if stage + 1 < self.stages else []
        return [*behind, Instruction("F", stage, micro_batch)]

    def drawn(self, units: Mapping[str, int] | None = None) -> str:
        """Draw the step as text: a row for each rank, a column for each unit of time, and dots where a rank is idle.

        If ranks have several stages, a letter shows which of its rank's stages an instruction is for: a is the first.

        Args:
            units: integer duration of each kind of instruction; None: `UNITS`.

        Raises:
            ValueError: a unit is for an unknown kind or is not a positive integer, or a kind in the schedule has no
                unit.
        """
        for kind, number in (units or {}).items():
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ValueError(
                    f"drawn: units must be integers of 1 or more, in columns per instruction; got {kind!r}: {number!r}"
                )
        timeline = simulate(self, units or UNITS)
        several = max(map(len, self.placement)) > 1
        columns = round(timeline.makespan)
        width = len(str(self.micro_batches - 1)) + 1 + several
        rows = []
        for rank, instructions in enumerate(self.instructions):
            cells = ["." + " " * (width - 1)] * columns
            for each in instructions:
                start, end = (round(at) for at in timeline.times[each])
                letter = chr(ord("a") + self.placement[rank].index(each.stage)) if several else ""
                cells[start] = f"{each.kind}{each.micro_batch}{letter}".ljust(width)
                cells[start + 1 : end] = ["-" * width] * (end - start - 1)
            rows.append(f"rank {rank:<{len(str(self.ranks - 1))}}  {' '.join(cells)}".rstrip())
        held = ", ".join(map(str, timeline.held))
        said = f"idle {100 * timeline.bubble:.1f}% of {columns} units; activations held of at most {held} forwards"
        return "\n".join([*rows, said])


# ---- simulation ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timeline:
    """When each instruction of a schedule runs.

    Attributes:
        times: (start, end) of each instruction.
        makespan: time from the first start to the last end over all ranks.
        idle: idle time, summed over all ranks.
        held: for each rank, the maximum number of (stage, micro-batch) pairs whose activations it holds at a time. A
            rank holds activations from the start of the forward to the end of the backward or, if the backward is
            split, to the end of the weight gradients.
    """

    times: Mapping[Instruction, tuple[float, float]]
    makespan: float
    idle: float
    held: tuple[int, ...]

    @property
    def bubble(self) -> float:
        """The idle share of all ranks' time, from 0 to 1; 0 if no instruction takes any time."""
        return self.idle / (self.makespan * len(self.held)) if self.makespan else 0.0


def simulate(
    schedule: Schedule,
    seconds: Mapping[str, float] | Callable[[Instruction], float] = UNITS,
    transfer: float = 0,
) -> Timeline:
    """Simulate a schedule. Each rank runs its next instruction as soon as the instruction's inputs are ready.

    Args:
        seconds: the duration of each kind of instruction, by letter, or a function that returns an instruction's
            duration.
        transfer: seconds that the result of an instruction takes to reach another rank.

    Raises:
        TypeError: the schedule is not a `Schedule`, or `seconds` is neither a mapping nor a function.
        ValueError: a kind is unknown or lacks a duration; a time is not a finite number of 0 or more; or ranks would
            wait for each other forever (the message names the instructions).
    """
    takes = _checked_seconds(schedule, seconds)
    _check_time("transfer", transfer)
    times: dict[Instruction, tuple[float, float]] = {}
    free, following = [0.0 for _ in range(schedule.ranks)], [0] * schedule.ranks
    moved = True
    while moved:
        moved = False
        for rank, instructions in enumerate(schedule.instructions):
            while following[rank] < len(instructions):
                each = instructions[following[rank]]
                needed = schedule.needs(each)
                if not all(before in times for before in needed):
                    break
                there = [
                    times[before][1] + (transfer if schedule.rank_of[before.stage] != rank else 0) for before in needed
                ]
                start = max([free[rank], *there])
                free[rank] = start + takes(each)
                times[each] = (start, free[rank])
                following[rank] += 1
                moved = True
    if any(at < len(own) for at, own in zip(following, schedule.instructions, strict=True)):
        raise ValueError(_said_of_deadlock(schedule, following, times))
    makespan = max(free)
    busy = sum(end - start for start, end in times.values())
    held = tuple(_most_held(instructions) for instructions in schedule.instructions)
    return Timeline(times, makespan, makespan * schedule.ranks - busy, held)


def _checked_seconds(
    schedule: Schedule, seconds: Mapping[str, float] | Callable[[Instruction], float]
) -> Callable[[Instruction], float]:
    if not isinstance(schedule, Schedule):
        raise TypeError(
            f"simulate: expected a Schedule, got {type(schedule).__name__} {schedule!r}: schedule_of(name, ranks, "
            "micro_batches) returns one"
        )
    if callable(seconds):

        def told(each: Instruction) -> float:
            time = seconds(each)
            _check_time(f"seconds of {each}", time)
            return time

        return told
    kinds = ", ".join(f"{kind} ({words})" for kind, words in KINDS.items())
    if not isinstance(seconds, Mapping):
        raise TypeError(
            f"simulate: seconds must be a dict by kind, such as {dict(UNITS)}, or a function of an instruction; got "
            f"{type(seconds).__name__} {seconds!r}"
        )
    for kind, time in seconds.items():
        if kind not in KINDS:
            raise ValueError(
                f"simulate: seconds has the key {kind!r}, which is no kind of instruction: expected {kinds}"
            )
        _check_time(f"seconds of {kind}", time)
    missing = {each.kind for own in schedule.instructions for each in own} - seconds.keys()
    if missing:
        raise ValueError(
            f"simulate: the schedule {schedule.name} has instructions of the kinds {', '.join(sorted(missing))}, but "
            f"their seconds are missing: give the seconds of each kind that the schedule uses; the kinds are {kinds}"
        )
    by_kind = dict(seconds)
    return lambda each: by_kind[each.kind]


def _check_time(name: str, time: object) -> None:
    if isinstance(time, bool) or not isinstance(time, Real) or not 0 <= float(time) < math.inf:
        raise ValueError(f"simulate: {name} must be a finite number of seconds, 0 or more, got {time!r}")


def _most_held(instructions: Sequence[Instruction]) -> int:
    held = most = 0
    for each in instructions:
        held += each.kind == "F"
        most = max(most, held)
        held -= each.kind in ("B", "W")
    return most


def _said_of_deadlock(
    schedule: Schedule, following: Sequence[int], times: Mapping[Instruction, tuple[float, float]]
) -> str:
    """Describe the cycle of ranks that wait for each other, and what each rank waits for."""
    rank = next(rank for rank, own in enumerate(schedule.instructions) if following[rank] < len(own))
    waits: dict[int, str] = {}
    while rank not in waits:
        mine = schedule.instructions[rank][following[rank]]
        missing = next(before for before in schedule.needs(mine) if before not in times)
        other = schedule.rank_of[missing.stage]
        waits[rank] = f"rank {rank} waits at {mine} for {missing} of rank {other}"
        rank = other
    circle = list(waits.values())[list(waits).index(rank) :]
    return f"the schedule {schedule.name} would never end: {'; '.join(circle)}. Change the order of these instructions"


def _check_placement(schedule: Schedule) -> None:
    if schedule.micro_batches < 1 or not schedule.placement:
        raise ValueError(
            f"a schedule needs at least one rank and one micro-batch, got {len(schedule.placement)} and "
            f"{schedule.micro_batches}"
        )
    if sorted(stage for stages in schedule.placement for stage in stages) != list(range(schedule.stages)):
        raise ValueError(
            f"the schedule {schedule.name} has the stages {schedule.placement} at its ranks: expected each of 0 to "
            f"{schedule.stages - 1} at exactly one rank"
        )
    if len(schedule.instructions) != schedule.ranks:
        raise ValueError(
            f"the schedule {schedule.name} places stages at {schedule.ranks} ranks but has instructions for "
            f"{len(schedule.instructions)}"
        )


def _check_complete(schedule: Schedule) -> None:
    for rank, instructions in enumerate(schedule.instructions):
        found: dict[tuple[int, int], list[str]] = {}
        for each in instructions:
            if schedule.rank_of.get(each.stage) != rank or not 0 <= each.micro_batch < schedule.micro_batches:
                raise ValueError(
                    f"the schedule {schedule.name} has {each} at rank {rank}, which has the stages "
                    f"{schedule.placement[rank]} and the micro-batches 0 to {schedule.micro_batches - 1}"
                )
            found.setdefault((each.stage, each.micro_batch), []).append(each.kind)
        for stage in schedule.placement[rank]:
            for micro_batch in range(schedule.micro_batches):
                kinds = "".join(sorted(found.get((stage, micro_batch), [])))
                if kinds not in ("BF", "FIW"):
                    raise ValueError(
                        f"the schedule {schedule.name} has {', '.join(kinds) or 'nothing'} of micro-batch "
                        f"{micro_batch} at stage {stage}: expected F and B, or F, I and W, each once"
                    )


# ---- the schedules -------------------------------------------------------------------------------------------------


def gpipe(ranks: int, micro_batches: int) -> Schedule:
    """Run all forwards, then all backwards. GPipe is simple, but holds the activations of all micro-batches."""
    every = range(micro_batches)
    return _one_stage_each(
        "gpipe", micro_batches, [[*_all("F", rank, every), *_all("B", rank, every)] for rank in range(ranks)]
    )


def one_f_one_b(ranks: int, micro_batches: int) -> Schedule:
    """Each rank first runs one forward for each later rank, then alternates forwards and backwards. A rank holds the
    activations of at most `ranks` micro-batches."""
    lists = []
    for rank in range(ranks):
        ahead = min(ranks - 1 - rank, micro_batches)
        own = list(_all("F", rank, range(ahead)))
        for number in range(micro_batches):
            own += _all("F", rank, [number + ahead] if number + ahead < micro_batches else [])
            own += _all("B", rank, [number])
        lists.append(own)
    return _one_stage_each("1f1b", micro_batches, lists)


def interleaved(ranks: int, micro_batches: int, stages_per_rank: int) -> Schedule:
    """1F1B with several stages per rank: a micro-batch passes through all ranks once per stage of a rank. The bubble is
    smaller than in 1F1B, but there are more transfers than in 1F1B.

    Micro-batches pass through a rank's stages in groups of `ranks` micro-batches. If `ranks` does not divide
    `micro_batches`, some groups are larger than `ranks`, and the sizes of the groups are as equal as possible.
    """
    rounds = max(1, micro_batches // ranks)
    groups = _shared_out(micro_batches, rounds)
    places = range(stages_per_rank)
    forwards = [(place, each) for group in groups for place in places for each in group]
    backwards = [(place, each) for group in groups for place in reversed(places) for each in group]
    placement = tuple(tuple(rank + ranks * place for place in places) for rank in range(ranks))
    lists = []
    for rank, stages in enumerate(placement):
        ahead = min((stages_per_rank - 1) * len(groups[0]) + 2 * (ranks - 1 - rank), len(forwards))
        own = [Instruction("F", stages[place], each) for place, each in forwards[:ahead]]
        for number, (place, each) in enumerate(backwards):
            own += [Instruction("F", stages[at], of) for at, of in forwards[number + ahead : number + ahead + 1]]
            own.append(Instruction("B", stages[place], each))
        lists.append(tuple(own))
    return Schedule("interleaved", micro_batches, placement, tuple(lists))


def zb_h1(ranks: int, micro_batches: int) -> Schedule:
    """1F1B with split backward: a third of 1F1B's bubble. The rank with the highest peak memory needs as much as in
    1F1B. Weight gradients wait until a rank would be idle.

    Rank r computes weight gradients r micro-batches late, so that it holds as many activations as the first rank.
    """
    lists = []
    for rank in range(ranks):
        ahead, late = min(ranks - 1 - rank, micro_batches), rank
        own = list(_all("F", rank, range(ahead)))
        for number in range(micro_batches):
            own += _all("F", rank, [number + ahead] if number + ahead < micro_batches else [])
            own += _all("I", rank, [number])
            own += _all("W", rank, [number - late] if number >= late else [])
        own += _all("W", rank, range(max(0, micro_batches - late), micro_batches))
        lists.append(own)
    return _one_stage_each("zb-h1", micro_batches, lists)


def zbv(ranks: int, micro_batches: int) -> Schedule:
    """Two stages per rank, placed in the shape of a V, with split backward. Ranks are idle only at the start and the
    end of a step. Each rank holds at most as many activations as the first rank of 1F1B.

    The first half of the model is placed from the first rank to the last, the second half from the last rank to the
    first. So the first rank has both ends, including embedding and head. The order is optimal if forwards, input
    gradients and weight gradients take equally long.
    """
    placement = tuple((rank, 2 * ranks - 1 - rank) for rank in range(ranks))
    lists = []
    for rank in range(ranks):
        own = _zbv_of(rank, ranks, micro_batches)
        named = (Instruction(kind, placement[rank][place], number) for kind, place, number in own)
        lists.append(tuple(each for each in named if each.micro_batch < micro_batches))
    return Schedule("zbv", micro_batches, placement, tuple(lists))


def _zbv_of(rank: int, ranks: int, micro_batches: int) -> Iterator[tuple[str, int, int]]:
    """Yield (kind, which of the rank's two stages: 0 or 1, micro-batch). If the step has fewer micro-batches than fill
    the pipeline, also yield instructions for the missing ones, which the caller drops.
    """
    most = max(2 * ranks - 1, micro_batches)
    made: Counter[tuple[str, int]] = Counter()

    def of(kinds: str, place: int) -> Iterator[tuple[str, int, int]]:
        for kind in kinds:
            yield kind, place, made[kind, place]
            made[kind, place] += 1

    for _ in range(2 * (ranks - rank) - 1):
        yield from of("F", 0)
    for _ in range(rank):
        yield from of("F", 1)
        yield from of("F", 0)
    for _ in range(ranks - rank):
        yield from of("FIW", 1)
    while made["F", 1] < most:
        if made["F", 0] < most:
            yield from of("F", 0)
        yield from of("IW", 0)
        yield from of("FIW", 1)
    for _ in range(rank):
        yield from of("I", 0)
        yield from of("I", 1)
    for _ in range(ranks - rank):
        yield from of("IW", 0)
    for place in (1, 0):
        while made["W", place] < most:
            yield from of("W", place)


def _one_stage_each(name: str, micro_batches: int, lists: Sequence[Sequence[Instruction]]) -> Schedule:
    return Schedule(name, micro_batches, tuple((rank,) for rank in range(len(lists))), tuple(map(tuple, lists)))


def _all(kind: str, stage: int, micro_batches: Sequence[int]) -> Iterator[Instruction]:
    return (Instruction(kind, stage, each) for each in micro_batches)


def _shared_out(number: int, parts: int) -> list[range]:
    """Split the numbers from 0 on into consecutive parts of nearly equal length. Longer parts come first."""
    least, more = divmod(number, parts)
    ends = [least * part + min(part, more) for part in range(parts + 1)]
    return [range(a, b) for a, b in pairwise(ends)]


@dataclass(frozen=True)
class ScheduleKind:
    """A schedule that can be requested by name.

    Attributes:
        make: function of (ranks, micro-batches, stages per rank) that returns the schedule.
        stages: stages per rank; None: any number of at least 2.
    """

    make: Callable[[int, int, int], Schedule]
    stages: int | None


SCHEDULES = {
    "gpipe": ScheduleKind(lambda ranks, micro_batches, _: gpipe(ranks, micro_batches), 1),
    "1f1b": ScheduleKind(lambda ranks, micro_batches, _: one_f_one_b(ranks, micro_batches), 1),
    "interleaved": ScheduleKind(interleaved, None),
    "zb-h1": ScheduleKind(lambda ranks, micro_batches, _: zb_h1(ranks, micro_batches), 1),
    "zbv": ScheduleKind(lambda ranks, micro_batches, _: zbv(ranks, micro_batches), 2),
}


def schedule_of(name: str, ranks: int, micro_batches: int, stages_per_rank: int | None = None) -> Schedule:
    """Create the schedule with this name.

    Args:
        name: a name in `SCHEDULES`.
        ranks: number of ranks of the pipeline.
        micro_batches: number of micro-batches in a step, which may be smaller than the number of ranks.
        stages_per_rank: number of stages per rank; None: the schedule's own number, 1 or 2. An interleaved schedule
            needs a number.

    Raises:
        TypeError: the name is not a str, or a size is not an int.
        ValueError: the name is unknown, a size is not positive, or the schedule does not support that many stages.
    """
    if not isinstance(name, str):
        raise TypeError(
            f"schedule_of: name must be a str, one of {', '.join(SCHEDULES)}; got {type(name).__name__} {name!r}"
        )
    if name not in SCHEDULES:
        raise ValueError(
            f"{name!r} is not a pipeline schedule: expected one of "
            f"{', '.join(SCHEDULES)}{did_you_mean(name, SCHEDULES)}"
        )
    for what, number in (("ranks", ranks), ("micro_batches", micro_batches), ("stages_per_rank", stages_per_rank)):
        if number is None and what == "stages_per_rank":
            continue
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"schedule_of: {what} must be an int, got {type(number).__name__} {number!r}")
        if number < 1:
            raise ValueError(f"a pipeline schedule needs {what} of at least 1, got {number!r}")
    kind = SCHEDULES[name]
    if kind.stages is None and (stages_per_rank is None or stages_per_rank < 2):
        raise ValueError(
            f"the schedule {name} needs at least 2 stages a rank, got {stages_per_rank}: give stages_per_rank (in "
            "commands, --num-layers-per-virtual-pipeline-stage), or use 1f1b"
        )
    if kind.stages is not None and stages_per_rank not in (None, kind.stages):
        others = " or ".join(other for other, each in SCHEDULES.items() if each.stages in (None, stages_per_rank))
        raise ValueError(
            f"the schedule {name} has {kind.stages} stage{'s' if kind.stages > 1 else ''} a rank, got "
            f"{stages_per_rank}: use {others}, or leave out stages_per_rank (in commands, "
            "--num-layers-per-virtual-pipeline-stage)"
        )
    return kind.make(ranks, micro_batches, stages_per_rank or kind.stages or 1)
