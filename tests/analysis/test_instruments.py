"""A labelled step keeps the program's settings of garbage collection, and makes no garbage itself."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from rooftop.analysis.attribution import ModuleTracker
from rooftop.analysis.instruments import RECORDED_OBJECTS, LabelledInstrument
from rooftop.cost import CountingMode

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _collection_as_it_was() -> Iterator[None]:
    threshold, enabled = gc.get_threshold(), gc.isenabled()
    yield
    gc.set_threshold(*threshold)
    if enabled:
        gc.enable()


def test_garbage_is_looked_for_less_often_inside_and_as_before_after() -> None:
    gc.set_threshold(500, 7, 3)
    with ModuleTracker(None) as tracker, LabelledInstrument(CPU, tracker):
        assert gc.get_threshold() == (RECORDED_OBJECTS, 7, 3)
        torch.ones(3).relu()
    assert gc.get_threshold() == (500, 7, 3)
    with pytest.raises(KeyError), ModuleTracker(None) as tracker, LabelledInstrument(CPU, tracker):
        raise KeyError("inside")
    assert gc.get_threshold() == (500, 7, 3)


@pytest.mark.parametrize("threshold", [(0, 0, 0), (RECORDED_OBJECTS + 1, 5, 5)])
def test_a_program_that_wants_fewer_collections_has_fewer(threshold: tuple[int, int, int]) -> None:
    gc.set_threshold(*threshold)
    with ModuleTracker(None) as tracker, LabelledInstrument(CPU, tracker):
        assert gc.get_threshold() == threshold
    assert gc.get_threshold() == threshold


def test_what_the_program_sets_inside_stays() -> None:
    gc.set_threshold(700, 10, 10)
    with ModuleTracker(None) as tracker, LabelledInstrument(CPU, tracker):
        gc.set_threshold(123, 4, 5)
        gc.disable()
    assert gc.get_threshold() == (123, 4, 5)
    assert not gc.isenabled()


def test_counting_leaves_no_cycles() -> None:
    x, y = torch.ones(3, 4), torch.ones(3, 4)
    with CountingMode() as counted:
        torch.cat([x, y]).relu()
        gc.collect()
        gc.disable()
        for _ in range(50):
            torch.cat([x, y]).relu()
        found = gc.collect()
    assert found < 50, "each operator left a cycle"
    assert len(counted.records) == 102
