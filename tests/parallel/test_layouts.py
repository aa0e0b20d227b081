"""Rank tables as Megatron publishes them, their inverses and partitions, and what a layout refuses."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftop.parallel import Layout
from rooftop.parallel.layouts import AXES

# ---- the tables --------------------------------------------------------------------------------------------------


def test_tensor_and_context_parallel_on_four() -> None:
    groups = Layout(tp=2, cp=2).groups()
    assert groups["tp"] == [[0, 1], [2, 3]]
    assert groups["cp"] == [[0, 2], [1, 3]]
    assert groups["tp-cp"] == [[0, 1, 2, 3]]
    assert groups["dp"] == [[0], [1], [2], [3]]


def test_tensor_and_pipeline_parallel_on_sixteen() -> None:
    groups = Layout.of_world(16, tp=2, pp=4).groups()
    assert groups["tp"] == [[first, first + 1] for first in range(0, 16, 2)]
    assert groups["pp"] == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]
    assert groups["dp"] == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]
    assert groups["tp-pp"] == [[0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15]]
    assert groups["embedding"] == [[0, 12], [1, 13], [2, 14], [3, 15]]


def test_gradients_are_averaged_over_data_and_context_ranks() -> None:
    """Megatron's own example for context parallelism: 16 GPUs, tp=2, cp=2, pp=2."""
    groups = Layout.of_world(16, tp=2, cp=2, pp=2).groups()
    assert groups["dp"] == [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]]
    assert groups["cp"] == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]
    assert groups["dp-cp"] == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]


def test_another_order_puts_other_ranks_side_by_side() -> None:
    groups = Layout(dp=2, tp=2, pp=2, order="pp-dp-tp-cp").groups()
    assert groups["pp"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert groups["dp"] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert groups["tp"] == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_one_stage_is_first_and_last() -> None:
    assert Layout(dp=3).groups()["embedding"] == [[0], [1], [2]]


# ---- laws --------------------------------------------------------------------------------------------------------

layouts = st.builds(
    Layout,
    dp=st.integers(1, 3),
    tp=st.integers(1, 4),
    pp=st.integers(1, 3),
    cp=st.integers(1, 3),
    order=st.sampled_from(["-".join(axes) for axes in permutations(AXES)]),
)


@given(layouts)
@settings(deadline=None)
def test_ranks_and_coordinates_are_each_others_inverse(layout: Layout) -> None:
    places = [layout.coordinates(rank) for rank in range(layout.world_size)]
    assert [layout.rank(**place) for place in places] == list(range(layout.world_size))
    assert layout.world_size == layout.dp * layout.tp * layout.pp * layout.cp


@given(layouts)
@settings(deadline=None)
def test_groups_part_the_world_and_differ_in_their_axes_alone(layout: Layout) -> None:
    for name, groups in layout.groups().items():
        members = [rank for group in groups for rank in group]
        assert len(set(members)) == len(members)
        assert groups == sorted(sorted(group) for group in groups)
        if name == "embedding":
            stages = {layout.coordinates(rank)["pp"] for rank in members}
            assert stages == {0, layout.pp - 1}
            continue
        assert len(members) == layout.world_size
        for group in groups:
            assert len(group) == layout.size(name) == math.prod(getattr(layout, axis) for axis in name.split("-"))
            for axis in set(AXES) - set(name.split("-")):
                assert len({layout.coordinates(rank)[axis] for rank in group}) == 1


@given(layouts, st.integers(1, 64), st.sampled_from([None, 1, 2, 8]), st.booleans())
@settings(deadline=None)
def test_a_layout_that_an_error_names_is_right(layout: Layout, heads: int, kv: int | None, sequence: bool) -> None:
    layout = Layout(layout.dp, layout.tp, layout.pp, layout.cp, sequence, layout.order)
    sizes = {"heads": heads * (kv or 1), "kv_heads": kv or 1, "layers": 4, "vocabulary": 17, "sequence": 96}
    said = ""
    try:
        layout.check(12, **sizes)
    except ValueError as error:
        said = str(error)
    _, _, nearest = said.partition("Nearest for 12 ranks: ")
    assert nearest or "No layout of 12 ranks fits" in said or (not said and layout.world_size == 12)
    for text in filter(None, nearest.split(", or ")):
        words = dict(word.split("=") for word in text.removesuffix(" sequence_parallel").split())
        named = Layout(**{axis: int(words[axis]) for axis in AXES}, sequence_parallel=sequence, order=layout.order)
        named.check(12, **sizes)
        assert str(named) == text


# ---- refused layouts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [{"tp": 0}, {"dp": -1}, {"pp": 1.5}, {"cp": True}, {"tp": "2"}])
def test_sizes_are_positive_integers(sizes: dict[str, Any]) -> None:
    (name,) = sizes
    with pytest.raises(ValueError, match=rf"{name}=.*expected a positive integer"):
        Layout(**sizes)


@pytest.mark.parametrize("order", ["tp-cp-dp", "tp-cp-dp-pp-tp", "tp,cp,dp,pp", "", 3])
def test_an_order_names_each_axis_once(order: Any) -> None:
    with pytest.raises(ValueError, match="each of tp, cp, dp, pp once"):
        Layout(order=order)


def test_ranks_coordinates_and_names_that_are_not_there() -> None:
    layout = Layout(dp=2, tp=2)
    for rank in (-1, 4, True, 1.0):
        with pytest.raises(ValueError, match="ranks 0 to 3"):
            layout.coordinates(rank)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"tp=2: the layout .* has indices 0 to 1 on this axis"):
        layout.rank(tp=2)
    with pytest.raises(ValueError, match="axes among tp, cp, dp, pp"):
        layout.rank(stage=0)
    for name in ("ep", "tp-tp", ""):
        with pytest.raises(ValueError, match="axes among tp, cp, dp, pp"):
            layout.groups_along(name)


def test_a_world_that_cannot_be_split_names_the_nearest_sizes() -> None:
    assert Layout.of_world(8, tp=2, cp=2) == Layout(dp=2, tp=2, cp=2)
    with pytest.raises(
        ValueError, match="a world of 8 cannot be split by tp=3 pp=1 cp=1: 3 does not divide the world size"
    ) as error:
        Layout.of_world(8, tp=3)
    assert str(error.value).endswith(
        "Nearest for 8 ranks: dp=2 tp=4 pp=1 cp=1, or dp=4 tp=2 pp=1 cp=1, or dp=1 tp=8 pp=1 cp=1"
    )
    with pytest.raises(ValueError, match="Nearest for 1 rank: dp=1 tp=1 pp=1 cp=1"):
        Layout.of_world(1, tp=2)


def test_the_nearest_layouts_have_pipelines_and_context_ranks_where_the_given_one_has_or_nothing_else_fits() -> None:
    with pytest.raises(ValueError, match=r"heads=4.*: dp=2 tp=4 pp=1 cp=1, or dp=4 tp=2 pp=1 cp=1, or dp=8 tp=1 pp=1"):
        Layout(tp=8).check(heads=4)
    with pytest.raises(ValueError, match=r"Nearest for 8 ranks: dp=1 tp=2 pp=1 cp=4, or dp=1 tp=4 pp=1 cp=2"):
        Layout(tp=4, cp=4).check(8)
    with pytest.raises(ValueError, match=r"Nearest for 4 ranks: dp=1 tp=2 pp=1 cp=2"):
        Layout(tp=4).check(heads=2, batch=1)


@pytest.mark.parametrize(
    ("layout", "sizes", "said"),
    [
        (Layout(tp=3), {"heads": 8}, "heads=8 is not divisible by tp=3"),
        (Layout(tp=8), {"kv_heads": 6}, "kv_heads=6 neither divides tp=8 nor is divisible by it"),
        (Layout(tp=8), {"hidden": 100}, "hidden=100 is not divisible by tp=8"),
        (Layout(tp=4), {"feed_forward": 11006}, "feed_forward=11006 is not divisible by tp=4"),
        (Layout(tp=4), {"vocabulary": 3}, "vocabulary=3 is less than tp=4"),
        (Layout(pp=4), {"layers": 3}, "layers=3 is less than pp=4"),
        (Layout(cp=4), {"sequence": 4}, r"sequence=4 is not divisible by 8 \(two chunks for each of the cp=4 ranks\)"),
        (
            Layout(tp=3, cp=2, sequence_parallel=True),
            {"sequence": 8},
            "sequence=8 is not divisible by 12 .* tp=3 parts",
        ),
        (Layout(dp=4), {"batch": 6}, "batch=6 is not divisible by dp=4"),
        (
            Layout(dp=2),
            {"batch": 6, "micro_batch": 2},
            "batch=6 is not divisible by 4, that is dp=2 times micro_batch=2",
        ),
        (
            Layout(),
            {"batch": 6, "micro_batch": 4},
            "by micro_batch=4. One rank has no other layout: change the sizes that do",
        ),
        (Layout(tp=4), {"world_size": 8}, "it has 4 ranks and the world 8. Nearest for 8 ranks: dp=2 tp=4 pp=1 cp=1"),
    ],
)
def test_what_cannot_be_split_is_refused(layout: Layout, sizes: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        layout.check(**sizes)


def test_all_that_does_not_fit_is_said_at_once() -> None:
    with pytest.raises(ValueError, match=r"ranks and the world 8; heads=8 .* tp=3; batch=5 .* dp=2\. Nearest"):
        Layout(tp=3, dp=2).check(8, heads=8, batch=5)


def test_a_model_that_no_layout_fits() -> None:
    with pytest.raises(ValueError, match="No layout of 7 ranks fits"):
        Layout(tp=7).check(7, heads=4, batch=3, sequence=4, layers=2)
    with pytest.raises(ValueError, match="kv_heads=3: all KV heads must serve the same number of heads"):
        Layout().check(heads=8, kv_heads=3)
    with pytest.raises(ValueError, match="layers=0: expected a positive integer"):
        Layout().check(layers=0)


def test_what_fits_is_accepted() -> None:
    layout = Layout(dp=1, tp=8, pp=2, cp=2, sequence_parallel=True)
    layout.check(32, heads=32, kv_heads=2, hidden=4096, feed_forward=11008, vocabulary=31123, layers=3, sequence=4096)
    Layout(tp=8).check(vocabulary=17)
    Layout(tp=3).check(sequence=97)  # without sequence parallelism, each tensor rank has the whole sequence


def test_layouts_need_no_torch() -> None:
    program = (
        "import sys, rooftop.parallel; print(rooftop.parallel.Layout(tp=2).groups()['tp'], 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[[0, 1]] False\n"


# ---- groups of torch.distributed ---------------------------------------------------------------------------------


def groups_of_this_rank(layout: Layout) -> dict[str, Any]:
    mesh = layout.mesh()
    groups = layout.process_groups(mesh)
    rank = dist.get_rank()
    sums = {}
    for name, group in groups.items():
        mine = torch.tensor([float(2**rank)])
        dist.all_reduce(mine, group=group)
        sums[name] = [other for other in range(8) if int(mine) >> other & 1]
    coordinates = {name: mesh.get_local_rank(name) for name in mesh.mesh_dim_names or ()}
    shared = groups["tp-cp"] is groups["tp"]
    return {"sums": sums, "coordinates": coordinates, "shared": shared, "world": groups["dp"] is dist.group.WORLD}


@pytest.mark.parametrize(
    "layout", [Layout(tp=2, pp=4), Layout(tp=2, cp=2, order="cp-tp-dp-pp"), Layout(dp=2), Layout()], ids=str
)
def test_ranks_communicate_in_the_groups_of_the_table(layout: Layout, on_ranks: Callable[..., list[Any]]) -> None:
    table = layout.groups()
    for rank, found in enumerate(on_ranks(layout.world_size, groups_of_this_rank, layout)):
        expected = {name: next((g for g in groups if rank in g), None) for name, groups in table.items()}
        assert found["sums"] == {name: group for name, group in expected.items() if group is not None}
        assert found["coordinates"] == layout.coordinates(rank)
        assert found["shared"] == (layout.cp == 1)


def test_a_mesh_of_another_size_is_refused_by_all(
    on_ranks: Callable[..., list[Any]], ranks_failed: type[Exception]
) -> None:
    with pytest.raises(ranks_failed) as failed:
        on_ranks(2, groups_of_this_rank, Layout(tp=4))
    errors = failed.value.errors  # type: ignore[attr-defined]
    assert "the layout dp=1 tp=4 pp=1 cp=1 does not fit: it has 4 ranks and the world 2" in errors[0]
    assert errors.keys() == {0, 1}


def test_a_process_by_itself_has_nobody_to_communicate_with() -> None:
    assert set(Layout().process_groups().values()) == {None}
    with pytest.raises(RuntimeError, match=r"with rooftop\.parallel\.join\(layout\)"):
        Layout().mesh()
    with pytest.raises(RuntimeError, match=r"with rooftop\.parallel\.join\(layout\)"):
        Layout(tp=2).process_groups()
