"""The stages of a recording's steps, and which of these steps count as usual ones."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rooftop.analysis.instruments import Labelled, Plain
from rooftop.analysis.stages import (
    BEFORE_STEPS,
    COMPILED_WARM_UP,
    LABELLED,
    LEAST_TIMED,
    NEEDED,
    RANK_STEPS,
    UNDISTURBED,
    WARM_UP,
    Lap,
    Laps,
    StepClock,
    stages,
    steps_needed,
)

flags = st.booleans()


@given(found=flags, compiled=flags, ranks=flags, stays=flags)
def test_laws_of_the_stages(found: bool, compiled: bool, ranks: bool, stays: bool) -> None:
    planned = stages(found=found, compiled=compiled, ranks=ranks, stays=stays)
    names = [stage.name for stage in planned]
    assert names[-1] == "timed"
    assert all(stage.steps > 0 for stage in planned[:-1])
    assert ("ranks" in names) == ranks
    assert ("early" in names) == (found and not stays)
    warm_up = COMPILED_WARM_UP if compiled else WARM_UP
    extra = (RANK_STEPS if ranks else 0) + (BEFORE_STEPS if stays else 0)
    assert sum(stage.steps for stage in planned[: names.index("warm") + 1]) == warm_up
    assert next(stage.steps for stage in planned if stage.name == "labelled") == LABELLED
    if compiled:
        assert "whole" not in names, "PyTorch never compiles code that it has met under labels"
    if stays:
        first = min(names.index(name) for name in ("plain", "labelled", "ranks") if name in names)
        assert set(names[:first]) == {"unwatched", "warm", "before"}, "a profiler that stays attached begins late"
    assert steps_needed(planned) == warm_up + extra + 1 + LABELLED + 1 + LEAST_TIMED


def test_needed_is_what_most_programs_need() -> None:
    assert steps_needed(stages(found=False, compiled=False, ranks=False)) == NEEDED
    assert steps_needed(stages(found=True, compiled=False, ranks=False)) == NEEDED


TRAINED, EVALUATED = (1, 1), (9, 1)


def make_laps(timed: list[tuple[float, tuple[int, int]]]) -> Laps:
    laps = Laps(timed_ms=[ms for ms, _ in timed], timed_calls=[calls for _, calls in timed])
    laps.plain, laps.labelled = Plain(0.0, [], [], 0.0, 0.0, compiled=False), [Labelled([], [], 0.0)]  # type: ignore[list-item]
    return laps


def test_a_step_with_an_evaluation_in_it_is_not_timed() -> None:
    laps = make_laps([(5, TRAINED), (90, EVALUATED), (6, TRAINED), (7, TRAINED), (95, EVALUATED)])
    assert laps.usual_calls == TRAINED
    assert laps.steady_ms == [5, 6, 7]
    assert laps.is_unusual(EVALUATED)
    assert not laps.is_unusual(TRAINED)
    assert laps.is_complete


def test_steps_that_all_differ_are_all_timed() -> None:
    """A loop with a random number of micro-batches."""
    laps = make_laps([(5, (1, 1)), (6, (2, 2)), (7, (3, 3))])
    assert laps.usual_calls is None
    assert laps.steady_ms == [5, 6, 7]
    assert not laps.is_unusual((4, 4))


def test_the_first_step_says_nothing_of_what_is_usual() -> None:
    laps = Laps(laps=[Lap(1, "whole", 9, EVALUATED), Lap(2, "early", 9, EVALUATED), Lap(3, "warm", 1, TRAINED)])
    assert laps.usual_calls is None
    laps.laps += [Lap(4, "plain", 1, TRAINED)]
    assert laps.usual_calls == TRAINED


@given(st.lists(st.sampled_from(["whole", "early", "warm", "plain", "labelled", "settling", "timed"]), max_size=12))
def test_what_was_watched_is_not_undisturbed(names: list[str]) -> None:
    laps = Laps(laps=[Lap(number, name, float(number), TRAINED) for number, name in enumerate(names, 1)])
    undisturbed = [number for number, name in enumerate(names, 1) if name in UNDISTURBED and number > 1]
    later = [number for number in undisturbed if number > 2]
    assert laps.undisturbed_ms == [float(number) for number in later or undisturbed]


def test_the_clock_times_from_mark_to_mark() -> None:
    outside = time.perf_counter()
    clock = StepClock(torch.device("cpu"))
    inside = time.perf_counter()
    pauses = [0.01, 0.03, 0.0]
    for pause in pauses:
        time.sleep(pause)
        least_s = time.perf_counter() - inside
        clock.mark()
    most_s = time.perf_counter() - outside
    durations = clock.durations_ms()
    assert clock.steps == 3
    assert all(ms >= 1e3 * pause for ms, pause in zip(durations, pauses, strict=True))
    assert sum(durations) <= 1e3 * clock.elapsed_s
    assert 1e3 * least_s <= sum(durations) <= 1e3 * most_s


@pytest.mark.gpu
def test_on_a_gpu_the_clock_times_the_device_and_never_waits() -> None:
    x = torch.ones(4096, 4096, device="cuda")
    x @ x
    torch.cuda.synchronize()
    clock = StepClock(torch.device("cuda"))
    began = time.perf_counter()
    for _ in range(5):
        for _ in range(20):
            x @ x
        clock.mark()
    marked_s = time.perf_counter() - began
    torch.cuda.synchronize()
    took_s = time.perf_counter() - began
    assert marked_s < 0.5 * took_s
    assert sum(clock.durations_ms()) == pytest.approx(1e3 * took_s, rel=0.2)
