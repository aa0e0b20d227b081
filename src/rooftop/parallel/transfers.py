"""Order the sends and receives of a pipeline's ranks in one common order, so that no rank can wait forever.

    steps = program_of(schedule, rank=1)

Between a pair of ranks, activations move one way and gradients the other way. NCCL runs a rank's posted operations one
by one. So both ends must post in the same order, and a rank that posts a receive too early delays the sends after it.
The common order is the order in which the simulated schedule computes the data. Everything that a transfer waits for is
earlier in that order. So the first unfinished transfer can always complete, however long instructions really take.

On a CPU, a rank posts a receive before the previous instruction, as far as the order allows, so that the data arrive
during that instruction. On a GPU, a waiting receive occupies multiprocessors that the instruction needs, so a rank
posts it only when the data are needed.
"""

from __future__ import annotations

from dataclasses import dataclass

from rooftop.parallel.schedules import Instruction, Schedule, simulate

# number of following instructions whose receives are posted in advance; each such receive needs one more buffer
AHEAD = 1


@dataclass(frozen=True)
class Transfer:
    """The transfer of an instruction's result to the next or the previous stage.

    Attributes:
        number: index of the transfer in the common order.
        made_by: the instruction that computes the result.
        source, target: ranks of the pipeline.
    """

    number: int
    made_by: Instruction
    source: int
    target: int


@dataclass(frozen=True)
class Receive:
    """A step of a rank's program: start to receive a transfer from another rank."""

    transfer: Transfer


@dataclass(frozen=True)
class Send:
    """A step of a rank's program: start to send a transfer to another rank."""

    transfer: Transfer


Step = Receive | Send | Instruction
"""A step of a rank's program."""


def transfers_of(schedule: Schedule) -> list[Transfer]:
    """All transfers between different ranks, in order."""
    times, found = simulate(schedule).times, list[Transfer]()
    for each in sorted(times, key=lambda each: (times[each][1], each)):
        towards = stage_after(each, schedule.stages)
        if towards is None:
            continue
        source, target = schedule.rank_of[each.stage], schedule.rank_of[towards]
        if source != target:
            found.append(Transfer(len(found), each, source, target))
    return found


def stage_after(instruction: Instruction, stages: int) -> int | None:
    """The stage that needs an instruction's result; None if no stage does."""
    if instruction.kind == "W":
        return None
    stage = instruction.stage + (1 if instruction.kind == "F" else -1)
    return stage if 0 <= stage < stages else None


def program_of(schedule: Schedule, rank: int, ahead: int = AHEAD) -> list[Step]:
    """A rank's program for a step: its instructions, sends and receives. Receives are posted up to `ahead` instructions
    early, even if other ranks post their sends later.

    Receives and sends are in the order of `transfers_of`. An instruction's receives precede it, and its send precedes
    the next instruction.
    """
    waiting = [each for each in transfers_of(schedule) if rank in (each.source, each.target)]
    sends = {each.made_by: each for each in waiting if each.source == rank}
    receives = {each.made_by: each.number for each in waiting if each.target == rank}
    own, program = schedule.instructions[rank], list[Step]()

    def post_receives(until: int) -> None:
        """Append receives to the program, up to and including transfer `until`. Stop earlier if a send must come
        first."""
        while waiting and waiting[0].number <= until and waiting[0].target == rank:
            program.append(Receive(waiting.pop(0)))

    for place, each in enumerate(own):
        soon = own[place : place + 1 + ahead]
        needed = [receives[before] for later in soon for before in schedule.needs(later) if before in receives]
        post_receives(max(needed, default=-1))
        program.append(each)
        if each in sends:
            post_receives(sends[each].number)
            assert waiting[0] == sends[each], (rank, each, waiting[0])
            program.append(Send(waiting.pop(0)))
    assert not waiting, (rank, waiting)
    return program
