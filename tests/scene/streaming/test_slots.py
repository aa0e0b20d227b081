"""Laws of slots and plans after any sequence of loads, failures and frames."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rooftop.scene.dependencies import PageNeeds
from rooftop.scene.streaming.page_graph import PageGraph
from rooftop.scene.streaming.plans import Plan, Planner, Use, best_that_fit, plan_all, plan_in_python, rows_in_python
from rooftop.scene.streaming.slots import ABSENT, ARRIVED, LOADING, RESIDENT, Slots


def graph_of(needs: list[list[int]], roots: list[int]) -> PageGraph:
    """Pages without files."""
    graph = PageGraph.__new__(PageGraph)
    fine = np.repeat(np.arange(len(needs)), [len(each) for each in needs])
    graph.count, graph.needs = (
        len(needs),
        PageNeeds.between(len(needs), fine, np.array([each for row in needs for each in row], np.int64)),
    )
    graph.roots = np.isin(np.arange(len(needs)), roots)
    graph.limits = np.arange(4 * len(needs)).reshape(-1, 4)
    return graph


@st.composite
def graphs(draw: st.DrawFn) -> PageGraph:
    count = draw(st.integers(1, 30))
    needs = [
        sorted(draw(st.sets(st.integers(0, page - 1), min_size=1, max_size=3))) if page else [] for page in range(count)
    ]
    return graph_of(needs, [0])


def wishes(graph: PageGraph) -> st.SearchStrategy[np.ndarray]:
    """The pixels (from 0 to 8) of each page, half of them 0."""
    drawn = st.binary(min_size=graph.count, max_size=graph.count)
    return drawn.map(lambda each: np.frombuffer(each, np.int8).clip(0).astype(np.float32) / 16)


def taken(slots: Slots, *pages: int) -> np.ndarray:
    """The pages that start loading now."""
    slots.take(np.array(pages))
    return np.array(pages)


def check(slots: Slots) -> None:
    """Check the two laws, and that the records agree with each other."""
    held = slots.state != ABSENT
    assert held.sum() + slots.free == slots.count
    assert (slots.slot_of >= 0).tolist() == held.tolist()
    assert len(set(slots.slot_of[held].tolist())) == held.sum()
    dependents = np.zeros(slots.graph.count, int)
    for page in np.flatnonzero(held).tolist():
        needs = slots.graph.needs.of(page)
        dependents[needs] += 1
        assert held[needs].all()
        if slots.state[page] == RESIDENT:
            assert (slots.state[needs] == RESIDENT).all()
    assert (dependents == slots.dependents).all()


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(graph=graphs(), data=st.data())
def test_any_order_of_arrivals_failures_and_wishes(graph: PageGraph, data: st.DataObject) -> None:
    """No page is resident without the pages it needs, no slot is lost, and root pages stay."""
    slots = Slots(graph, data.draw(st.integers(1, graph.count)))
    slots.arrive(taken(slots, 0))
    slots.publish()
    ages = np.zeros(graph.count, np.int32)
    for _ in range(data.draw(st.integers(1, 12))):
        pixels = data.draw(wishes(graph))
        ages = np.where(pixels > 0, 0, ages + 1).astype(np.int32)
        missing = np.flatnonzero((slots.state != RESIDENT) & (pixels > 0))
        missing = missing[np.argsort(-pixels[missing], kind="stable")]
        before = slots.state.copy()
        use = Use(pixels, ages)
        most = data.draw(st.integers(0, 8))
        plan = plan_in_python(slots, missing, pixels[missing], most, lambda use=use: use, True)
        assert len(plan.pages) <= most
        assert (before[plan.pages] != LOADING).all()
        assert (slots.slot_of[plan.pages] == plan.slots).all()
        check(slots)
        loading = np.flatnonzero(slots.state == LOADING).tolist()
        for page in data.draw(st.permutations(loading)):
            fate = data.draw(st.sampled_from(["comes", "fails", "later"]))
            if fate == "comes":
                slots.arrive(np.array([page]))
            elif fate == "fails":
                slots.lose(np.array([page]))
            slots.publish()
            check(slots)
        assert slots.state[0] == RESIDENT


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(graph=graphs(), data=st.data())
def test_a_target_that_fits_is_loaded_whatever_was_there(graph: PageGraph, data: st.DataObject) -> None:
    slots = Slots(graph, data.draw(st.integers(1, graph.count)))
    for _ in range(3):
        wanted = data.draw(wishes(graph))
        target = best_that_fit(slots, wanted)
        assert target.sum() <= slots.count
        assert (graph.with_needs(target) == target).all()
        left_out = wanted[~target & (wanted > 0)]
        if len(left_out):  # the pages that fit have at least the priority of the others
            chosen = [page for page in np.flatnonzero(target).tolist() if page and not needed_in(graph, page, target)]
            assert all(wanted[page] >= left_out.max() for page in chosen)
        slots.arrive(plan_all(slots, target, Use(wanted, np.zeros(graph.count, np.int32))).pages)
        slots.publish()
        check(slots)
        assert (slots.state[target] == RESIDENT).all()


def needed_in(graph: PageGraph, page: int, pages: np.ndarray) -> bool:
    return any(page in graph.needs.of(each) for each in np.flatnonzero(pages).tolist())


def test_a_page_that_has_arrived_waits_for_what_it_needs() -> None:
    slots = Slots(graph_of([[], [0], [1]], [0]), 3)
    taken(slots, 0, 1, 2)
    for page, published in ((2, []), (0, [0]), (1, [1, 2])):
        slots.arrive(np.array([page]))
        assert slots.publish().tolist() == published


def test_what_is_wanted_now_goes_only_for_what_is_wanted_much_more() -> None:
    slots = Slots(graph_of([[], [0], [0]], [0]), 2)
    slots.arrive(taken(slots, 0, 1))
    slots.publish()
    for wanted, goes in ((2.4, False), (2.6, True)):
        use = Use(np.array([9, 2, wanted], np.float32), np.zeros(3, np.int32))
        for urgent in (False, True):
            plan = plan_in_python(slots, np.array([2]), use.pixels[2:], 4, lambda use=use: use, urgent)
            assert plan.given_up.tolist() == ([1] if goes and urgent else [])


def test_a_page_is_lost_and_read_again_for_the_page_that_needs_it() -> None:
    slots = Slots(graph_of([[], [0], [1]], [0]), 3)
    taken(slots, 0, 1, 2)
    slots.lose(np.array([1]))
    slots.arrive(np.array([2, 0]))
    assert slots.publish().tolist() == [0]
    assert slots.state[2] == ARRIVED
    assert slots.lacking(2) == [1]
    slots.arrive(taken(slots, 1))
    assert slots.publish().tolist() == [1, 2]


def test_needs_of_several_files_and_entries_that_cannot_be() -> None:
    one = PageNeeds.between(3, np.array([2, 1, 2, 1, 1]), np.array([1, 0, 0, 0, 1]))
    assert [one.of(page).tolist() for page in range(3)] == [[], [0], [0, 1]]
    both = PageNeeds.joined([one, one])
    assert [both.of(page).tolist() for page in range(6)] == [[], [0], [0, 1], [], [3], [3, 4]]
    assert both.wrong_at() is None
    assert PageNeeds(np.array([0, 0, 1, 3]), np.array([0, 0, 1])).wrong_at() is None
    for starts, pages, wrong in (
        ([1, 1, 1, 3], [0, 0, 1], 0),
        ([0, 2, 1, 3], [0, 0, 1], 1),
        ([0, 0, 1, 2], [0, 0, 1], 2),
        ([0, 0, 1, 3], [1, 0, 1], 1),
        ([0, 0, 1, 3], [0, 2, 1], 2),
    ):
        assert PageNeeds(np.array(starts), np.array(pages)).wrong_at() == wrong


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_the_books_of_one_page(slots: int) -> None:
    books = Slots(graph_of([[], [0]], [0]), slots)
    taken(books, 0)
    check(books)
    assert not len(books.candidates())


@pytest.mark.parametrize("reader", ["compiled"], indirect=True)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(graph=graphs(), data=st.data())
def test_plans_in_cpp_are_those_in_python(graph: PageGraph, data: st.DataObject, reader: str) -> None:
    """C++ and Python have the same pages in the same slots, and the same records, after any plans, arrivals and
    failures."""
    count = data.draw(st.integers(1, graph.count))
    ours, theirs = Slots(graph, count), Slots(graph, count)
    planner = Planner(ours)
    for slots in (ours, theirs):
        slots.arrive(taken(slots, 0))
        slots.publish()
    ages = np.zeros(graph.count, np.int32)
    for _ in range(data.draw(st.integers(1, 12))):
        use = Use(data.draw(wishes(graph)), ages)
        missing = np.flatnonzero((ours.state != RESIDENT) & (use.pixels > 0))
        missing = missing[np.argsort(-use.pixels[missing], kind="stable")]
        most, urgent = data.draw(st.integers(-1, 8)), data.draw(st.booleans())
        plan = planner.plan_some(missing, use.pixels[missing], most, lambda use=use: use, urgent)
        check(ours)
        assert same(plan, plan_in_python(theirs, missing, use.pixels[missing], most, lambda use=use: use, urgent))
        loading = np.array(data.draw(st.permutations(np.flatnonzero(ours.state == LOADING).tolist())), np.int64)
        comes, fails, _ = np.split(loading, sorted(data.draw(st.integers(0, len(loading))) for _ in range(2)))
        for slots in (ours, theirs):
            slots.lose(fails)
        theirs.arrive(comes)
        assert planner.publish(comes).tolist() == theirs.publish().tolist()
        told = np.array(data.draw(st.lists(st.integers(0, graph.count - 1), max_size=6)), np.int64)
        rows, expected = np.full((2, 8, 6), 7)
        planner.write_rows(told, rows)
        rows_in_python(theirs, told, expected)
        expected[len(told) :, 1:] = 7
        assert (rows == expected).all()
        assert sorted(ours.arrived.tolist()) == sorted(theirs.arrived.tolist())
        for name in ("state", "slot_of", "dependents", "page_in", "free_count"):
            assert (getattr(ours, name) == getattr(theirs, name)).all()
        assert (ours.free_slots[: ours.free] == theirs.free_slots[: theirs.free]).all()
        ages = (
            np.where(use.pixels > 0, 0, ages + data.draw(st.sampled_from([1, 2**29]))).clip(max=2**30).astype(np.int32)
        )


def same(one: Plan, other: Plan) -> bool:
    return all(
        getattr(one, name).tolist() == getattr(other, name).tolist()
        for name in ("given_up", "pages", "slots", "orders")
    )
