"""Schedules are complete, terminate, and wait as long as their formulas predict. Instructions have the order of
PyTorch's tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torchs

from rooftop.parallel.schedules import SCHEDULES, Instruction, Schedule, schedule_of, simulate

ALL = [("gpipe", None), ("1f1b", None), ("interleaved", 2), ("interleaved", 3), ("zb-h1", None), ("zbv", None)]
named = st.sampled_from(ALL)
ranks_and_micro_batches = {"ranks": st.integers(1, 6), "micro_batches": st.integers(1, 20)}


def bubble(schedule: Schedule) -> Fraction:
    timeline = simulate(schedule)
    return Fraction(int(timeline.idle), int(timeline.makespan) * schedule.ranks)


# ---- laws --------------------------------------------------------------------------------------------------------


@given(name=named, **ranks_and_micro_batches)
def test_each_instruction_runs_once_after_what_it_needs(
    name: tuple[str, int | None], ranks: int, micro_batches: int
) -> None:
    """There may be fewer micro-batches than ranks, or a number that the ranks do not divide."""
    schedule = schedule_of(name[0], ranks, micro_batches, name[1])
    times = simulate(schedule, {"F": 3, "B": 7, "I": 5, "W": 2}, transfer=1).times
    assert sorted(times) == sorted(each for own in schedule.instructions for each in own)
    for each, (start, _) in times.items():
        for before in schedule.needs(each):
            apart = schedule.rank_of[before.stage] != schedule.rank_of[each.stage]
            assert start >= times[before][1] + apart
    for own in schedule.instructions:
        ends = [times[each] for each in own]
        assert all(before[1] <= after[0] for before, after in pairwise(ends))


@given(name=named, **ranks_and_micro_batches)
def test_a_weight_s_gradient_is_summed_in_the_order_of_micro_batches(
    name: tuple[str, int | None], ranks: int, micro_batches: int
) -> None:
    schedule = schedule_of(name[0], ranks, micro_batches, name[1])
    for rank, own in enumerate(schedule.instructions):
        for stage in schedule.placement[rank]:
            made = [each.micro_batch for each in own if each.stage == stage and each.kind in "BW"]
            assert made == list(range(micro_batches))


FORMULAS = {  # the idle share, and the least number of micro-batches for which it holds
    "gpipe": (lambda p, m, v: Fraction(p - 1, m + p - 1), lambda p: 1),
    "1f1b": (lambda p, m, v: Fraction(p - 1, m + p - 1), lambda p: 1),
    "interleaved": (lambda p, m, v: Fraction(p - 1, v * m + p - 1), lambda p: p),
    "zb-h1": (lambda p, m, v: Fraction(p - 1, 3 * m + p - 1), lambda p: p),
    "zbv": (lambda p, m, v: Fraction(p - 1, 6 * m + p - 1), lambda p: 2 * p - 1),
}


@pytest.mark.parametrize(("name", "stages"), ALL)
def test_the_bubble_is_that_of_the_formula(name: str, stages: int | None) -> None:
    formula, least = FORMULAS[name]
    for ranks in range(1, 9):
        for micro_batches in range(least(ranks), 25):
            if name == "interleaved" and micro_batches % ranks:
                continue
            schedule = schedule_of(name, ranks, micro_batches, stages)
            assert bubble(schedule) == formula(ranks, micro_batches, stages), (ranks, micro_batches)


def test_the_bubbles_of_the_specification() -> None:
    """The shares of idle time with 4 ranks and 8 micro-batches."""
    found = {
        name: round(100 * float(bubble(schedule_of(name, 4, 8, stages))), 1) for name, stages in ALL[1:3] + ALL[4:]
    }
    assert found == {"1f1b": 27.3, "interleaved": 15.8, "zb-h1": 11.1, "zbv": 5.9}


def test_how_many_micro_batches_are_held() -> None:
    for ranks in range(1, 7):
        held = {name: simulate(schedule_of(name, ranks, 24, stages)).held for name, stages in ALL}
        assert held["gpipe"] == (24,) * ranks
        assert held["1f1b"] == tuple(range(ranks, 0, -1))
        assert held["zb-h1"] == (ranks,) * ranks
        assert held["zbv"] == (2 * ranks,) * ranks
    two = simulate(schedule_of("interleaved", 4, 24, 2)).held
    assert two == (4 + 7, 4 + 5, 4 + 3, 4 + 1)


def test_costs_may_be_of_each_instruction() -> None:
    """With a slow last stage, the other stages wait for it."""
    schedule = schedule_of("1f1b", 2, 4)
    timeline = simulate(schedule, lambda each: 4 if each.stage == 1 else 1)
    assert timeline.makespan == 1 + 4 * 8 + 1
    assert timeline.idle == timeline.makespan - 8 + 2
    assert simulate(schedule, transfer=2).makespan > simulate(schedule).makespan


# ---- PyTorch's tables --------------------------------------------------------------------------------------------


def as_ours(actions: Sequence[Any]) -> list[Instruction]:
    """PyTorch's table in our form, without idle slots, communication and sums over data ranks."""
    return [
        Instruction(each.computation_type.value, each.stage_index, each.microbatch_index)
        for each in actions
        if each is not None and each.computation_type.value in "FBIW"
    ]


def of_torch(name: str, ranks: int, micro_batches: int, stages: int, rank: int) -> list[Instruction]:
    """A rank's list from `torch.distributed.pipelining.schedules`, whose functions read sizes from `self`."""
    rounds = max(1, micro_batches // ranks)
    sizes = SimpleNamespace(
        pp_group_size=ranks,
        _num_stages=ranks * stages,
        num_stages=ranks * stages,
        n_local_stages=stages,
        _n_microbatches=micro_batches,
        number_of_rounds=rounds,
        microbatches_per_round=micro_batches // rounds,
        rank=rank,
    )
    if name == "gpipe":
        return as_ours(torchs.ScheduleGPipe._get_pipeline_order(sizes)[rank])
    if name == "1f1b":  # PyTorch's 1F1B table counts the last rank's forwards from 1
        ahead = torchs._get_warmup_ops(rank, 1, micro_batches, ranks, micro_batches, multiply_factor=1)
        return as_ours(
            torchs._get_1f1b_rank_ops(
                1, ranks, ahead, micro_batches - ahead, ahead, rank, lambda step: rank, lambda step: rank
            )
        )
    table = {
        "interleaved": torchs.ScheduleInterleaved1F1B,
        "zb-h1": torchs.ScheduleInterleavedZeroBubble,
        "zbv": torchs.ScheduleZBVZeroBubble,
    }[name]
    return as_ours(table._calculate_single_rank_operations(sizes, rank))


@pytest.mark.parametrize(("name", "stages"), ALL)
def test_the_order_is_that_of_pytorch_s_table(name: str, stages: int | None) -> None:
    for ranks in range(1, 6):
        for micro_batches in range(1, 14):
            if name == "interleaved" and micro_batches % max(1, micro_batches // ranks):
                continue  # PyTorch refuses this
            schedule = schedule_of(name, ranks, micro_batches, stages)
            for rank, own in enumerate(schedule.instructions):
                size = len(schedule.placement[rank])
                assert list(own) == of_torch(name, ranks, micro_batches, size, rank), (ranks, micro_batches, rank)


# ---- refusals ----------------------------------------------------------------------------------------------------


def changed(schedule: Schedule, rank: int, own: Sequence[Instruction]) -> Schedule:
    instructions = list(schedule.instructions)
    instructions[rank] = tuple(own)
    return replace(schedule, instructions=tuple(instructions))


def test_a_schedule_that_would_never_end_is_refused_with_who_waits_for_whom() -> None:
    schedule = schedule_of("1f1b", 2, 2)
    first = [Instruction(kind, 0, number) for kind, number in (("F", 0), ("B", 0), ("F", 1), ("B", 1))]
    changed(schedule, 0, first)  # ends, because rank 1 runs the backward of 0 before the forward of 1
    second = [Instruction(kind, 1, number) for kind, number in (("F", 0), ("F", 1), ("B", 0), ("B", 1))]
    with pytest.raises(ValueError, match="would never end") as refused:
        changed(changed(schedule, 1, second), 0, first)
    assert (
        "rank 0 waits at B of micro-batch 0 at stage 0 for B of micro-batch 0 at stage 1 of rank 1; "
        "rank 1 waits at F of micro-batch 1 at stage 1 for F of micro-batch 1 at stage 0 of rank 0"
    ) in str(refused.value)


def test_a_rank_that_waits_for_itself_is_refused() -> None:
    schedule = schedule_of("gpipe", 1, 1)
    with pytest.raises(ValueError, match="rank 0 waits at B of micro-batch 0 at stage 0 for F of micro-batch 0"):
        changed(schedule, 0, schedule.instructions[0][::-1])


@given(name=named, ranks=st.integers(1, 4), micro_batches=st.integers(1, 6), data=st.data())
def test_an_instruction_that_is_missing_or_twice_is_refused(
    name: tuple[str, int | None], ranks: int, micro_batches: int, data: st.DataObject
) -> None:
    schedule = schedule_of(name[0], ranks, micro_batches, name[1])
    rank = data.draw(st.integers(0, ranks - 1))
    own = list(schedule.instructions[rank])
    place = data.draw(st.integers(0, len(own) - 1))
    for wrong in (own[:place] + own[place + 1 :], own[: place + 1] + own[place:]):
        with pytest.raises(ValueError, match=f"of micro-batch {own[place].micro_batch} at stage {own[place].stage}"):
            changed(schedule, rank, wrong)


def test_what_is_at_the_wrong_rank_is_refused() -> None:
    schedule = schedule_of("1f1b", 2, 2)
    with pytest.raises(ValueError, match="F of micro-batch 0 at stage 1 at rank 0, which has the stages"):
        changed(schedule, 0, [Instruction("F", 1, 0)])
    with pytest.raises(ValueError, match="expected each of 0 to 1 at exactly one"):
        replace(schedule, placement=((0,), (0,)))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("1f1B", 2, 2), "'1f1B' is not a pipeline schedule: expected one of gpipe, 1f1b"),
        (("1f1b", 0, 2), "needs ranks of at least 1, got 0"),
        (("1f1b", 2, 0), "needs micro_batches of at least 1, got 0"),
        (("interleaved", 2, 2), "needs at least 2 stages a rank, got None"),
        (("interleaved", 2, 2, 1), "needs at least 2 stages a rank, got 1"),
        (("1f1b", 2, 2, 2), "has 1 stage a rank, got 2: use interleaved or zbv"),
        (("zbv", 2, 2, 3), "has 2 stages a rank, got 3: use interleaved"),
    ],
)
def test_what_a_schedule_does_not_have_is_refused(arguments: tuple[str, int, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        schedule_of(*arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((None, 2, 2), "name must be a str, one of gpipe, .* got NoneType None"),
        (("1f1b", 2.0, 2), "ranks must be an int, got float 2.0"),
        (("1f1b", True, 2), "ranks must be an int, got bool True"),
        (("1f1b", 2, "4"), "micro_batches must be an int, got str '4'"),
        (("1f1b", 2, None), "micro_batches must be an int, got NoneType None"),
        (("interleaved", 2, 2, 2.0), "stages_per_rank must be an int, got float 2.0"),
    ],
)
def test_names_and_sizes_of_another_type_are_refused(arguments: tuple[Any, ...], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        schedule_of(*arguments)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"seconds": {"F": 1}}, ValueError, "1f1b has instructions of the kinds B, but their seconds are missing:"),
        ({"seconds": {"F": 1, "X": 2}}, ValueError, r"key 'X', which is no kind of instruction: expected .*F \(forw"),
        ({"seconds": {"F": -1, "B": 2}}, ValueError, "seconds of F must be a finite number of .* or more, got -1"),
        ({"seconds": {"F": "1", "B": 2}}, ValueError, "seconds of F must be a finite number .* got '1'"),
        ({"seconds": {"F": math.nan, "B": 2}}, ValueError, "seconds of F must be .* got nan"),
        ({"seconds": lambda each: None}, ValueError, "seconds of F of micro-batch 0 at stage 0 must be .* got None"),
        ({"seconds": 1.0}, TypeError, "seconds must be a dict by kind, such as .* got float 1.0"),
        ({"seconds": None}, TypeError, "seconds must be a dict by kind, such as .* got NoneType None"),
        ({"transfer": -1}, ValueError, "transfer must be a finite number of seconds, 0 or more, got -1"),
        ({"transfer": "1 ms"}, ValueError, "transfer must be a finite number of seconds, 0 or more, got '1 ms'"),
    ],
)  # fmt: skip
def test_times_that_are_none_are_refused(options: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        simulate(schedule_of("1f1b", 2, 3), **options)


def test_without_any_time_no_rank_is_idle() -> None:
    assert simulate(schedule_of("1f1b", 2, 3), {"F": 0, "B": 0}).bubble == 0


def test_what_is_no_schedule_is_not_simulated() -> None:
    with pytest.raises(TypeError, match="expected a Schedule, got str '1f1b': schedule_of"):
        simulate("1f1b")  # type: ignore[arg-type]
    for units in ({"F": 1.5, "B": 2}, {"F": "1", "B": 2}, {"F": 0, "B": 2}):
        with pytest.raises(ValueError, match="units must be integers of 1 or more, in columns"):
            schedule_of("1f1b", 2, 3).drawn(units)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kinds B, but their seconds are missing:"):
        schedule_of("1f1b", 2, 3).drawn({"F": 1})


# ---- pictures ----------------------------------------------------------------------------------------------------


def test_the_picture_of_1f1b() -> None:
    assert schedule_of("1f1b", 2, 3).drawn() == "\n".join(
        [
            "rank 0  F0 F1 .  .  B0 -- F2 B1 -- .  B2 --",
            "rank 1  .  F0 B0 -- F1 B1 -- F2 B2 -- .  .",
            "idle 25.0% of 12 units; activations held of at most 2, 1 forwards",
        ]
    )


def test_the_picture_of_a_v_tells_its_stages_apart() -> None:
    first, second, last = schedule_of("zbv", 2, 3).drawn().split("\n")
    assert first.startswith("rank 0  F0a F1a F2a F0b I0b W0b")
    assert second.startswith("rank 1  .   F0a F0b F1a F1b I0b W0b")
    assert last.startswith("idle")
    assert set(SCHEDULES) == {name for name, _ in ALL}
