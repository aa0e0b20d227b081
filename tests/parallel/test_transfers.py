"""Posted sends and receives never wait for ever, even if each rank performs one operation after the other and a send
ends only when the other rank has reached it, as in NCCL."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rooftop.parallel import transfers
from rooftop.parallel.schedules import Instruction, Schedule, schedule_of
from rooftop.parallel.transfers import Receive, Send, Step, program_of, stage_after, transfers_of

ALL = [("gpipe", None), ("1f1b", None), ("interleaved", 2), ("interleaved", 3), ("zb-h1", None), ("zbv", None)]
schedules = st.builds(
    lambda name, ranks, micro_batches: schedule_of(name[0], ranks, micro_batches, name[1]),
    st.sampled_from(ALL),
    st.integers(1, 5),
    st.integers(1, 12),
)


def ends(schedule: Schedule, programs: list[list[Step]]) -> bool:
    """Whether all ranks reach the end. A rank's operations run in the order in which they were posted, each together
    with its counterpart on the other rank."""
    at, posted, done = [0] * schedule.ranks, [list[int]() for _ in programs], set[Instruction]()
    there = {each.number: each for each in transfers_of(schedule)}
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while at[rank] < len(program):
                step = program[at[rank]]
                if isinstance(step, Receive | Send):
                    posted[rank].append(step.transfer.number)
                elif any(
                    before not in done and schedule.rank_of[before.stage] != rank for before in schedule.needs(step)
                ):
                    break
                at[rank] += 1
                moved = True
        for queue in posted:
            while queue:
                transfer = there[queue[0]]
                both = [posted[transfer.source], posted[transfer.target]]
                if not all(each and each[0] == transfer.number for each in both):
                    break
                for each in both:
                    each.pop(0)
                done.add(transfer.made_by)
                moved = True
    return all(at[rank] == len(program) for rank, program in enumerate(programs)) and not any(posted)


def programs_of(schedule: Schedule, ahead: int = transfers.AHEAD) -> list[list[Step]]:
    return [program_of(schedule, rank, ahead) for rank in range(schedule.ranks)]


@given(schedule=schedules)
def test_no_rank_waits_for_ever(schedule: Schedule) -> None:
    assert ends(schedule, programs_of(schedule))


def meet(schedule: Schedule, programs: list[list[Step]]) -> bool:
    """Whether all ranks reach the end if posting an operation waits for the other rank, as in NCCL when two ranks
    connect."""
    at, done, moved = [0] * schedule.ranks, set[Instruction](), True

    def next_of(rank: int) -> Step | None:
        return programs[rank][at[rank]] if at[rank] < len(programs[rank]) else None

    while moved:
        moved = False
        for rank in range(schedule.ranks):
            step = next_of(rank)
            if isinstance(step, Instruction):
                outside = [each for each in schedule.needs(step) if schedule.rank_of[each.stage] != rank]
                if any(each not in done for each in outside):
                    return False  # the computation's input was not received
                at[rank] += 1
                moved = True
            elif isinstance(step, Send):
                other = next_of(step.transfer.target)
                if isinstance(other, Receive) and other.transfer == step.transfer:
                    done.add(step.transfer.made_by)
                    at[rank] += 1
                    at[step.transfer.target] += 1
                    moved = True
    return all(next_of(rank) is None for rank in range(schedule.ranks))


@given(schedule=schedules)
def test_no_rank_waits_for_ever_where_even_posting_waits(schedule: Schedule) -> None:
    assert meet(schedule, programs_of(schedule))


@given(schedule=schedules, ahead=st.integers(0, 5))
def test_however_far_ahead_receives_are_posted(schedule: Schedule, ahead: int) -> None:
    programs = programs_of(schedule, ahead)
    assert ends(schedule, programs)
    if ahead < 2:  # what pipelines use
        assert meet(schedule, programs)


@given(schedule=schedules)
def test_all_that_crosses_ranks_is_sent_once_and_received_once(schedule: Schedule) -> None:
    expected = {
        each
        for own in schedule.instructions
        for each in own
        if (to := stage_after(each, schedule.stages)) is not None
        and schedule.rank_of[to] != schedule.rank_of[each.stage]
    }
    for kind in (Send, Receive):
        found = [step.transfer.made_by for own in programs_of(schedule) for step in own if isinstance(step, kind)]
        assert len(found) == len(set(found))
        assert set(found) == expected
    for own, program in zip(schedule.instructions, programs_of(schedule), strict=True):
        assert [step for step in program if isinstance(step, Instruction)] == list(own)


def test_receives_are_posted_ahead_of_what_needs_them() -> None:
    """The activations of the next micro-batch are transferred while this one is computed."""
    words = [
        f"{type(step).__name__} {step.transfer.made_by}" if isinstance(step, Receive | Send) else str(step)
        for step in program_of(schedule_of("1f1b", 2, 3), 1)
    ]
    assert words[:6] == [
        "Receive F of micro-batch 0 at stage 0",
        "F of micro-batch 0 at stage 1",
        "Receive F of micro-batch 1 at stage 0",
        "B of micro-batch 0 at stage 1",
        "Send B of micro-batch 0 at stage 1",
        "F of micro-batch 1 at stage 1",
    ]
    when_needed = [type(step) for step in program_of(schedule_of("1f1b", 2, 3), 1, ahead=0)]
    assert when_needed[:6] == [Receive, Instruction, Instruction, Receive, Send, Instruction]


def test_the_check_sees_an_order_that_waits_for_ever() -> None:
    """A rank that posts all its receives first delays its sends."""
    schedule = schedule_of("1f1b", 2, 3)
    programs = programs_of(schedule)
    programs[0] = sorted(programs[0], key=lambda step: not isinstance(step, Receive))
    assert not ends(schedule, programs)
    assert not meet(schedule, programs)
