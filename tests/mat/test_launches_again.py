"""Cached launches of expressions, conversions and masked copies, which are repeated with other addresses.

These launches must be the same as without a cache. Without a GPU the launches are checked; on a GPU, their results.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rooftop import mat
from rooftop.launch import INTERPRETED
from rooftop.launch.triton_launch import Repeated
from rooftop.mat import CV_32F, CV_32FC3, Mat, MatExpr, Scalar, converting, copies, evaluation, masked_copies, planning

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(INTERPRETED or os.name == "nt", reason="interpreted kernels are not kept")

Kind = Callable[[Mat, Mat, Mat, Mat], Any]  # operations on a, b and a mask, into out
SIDE, ROOM = 6, 24  # sides of regions, and of the image that contains them
FORMS: dict[str, Kind] = {
    "sum": lambda a, b, mask, out: out.assign(a + b),
    "numbers": lambda a, b, mask, out: out.assign(a * 0.25 - b),
    "other numbers": lambda a, b, mask, out: out.assign(a * -0.5 - b),
    "minus nothing": lambda a, b, mask, out: out.assign(a * -0.0 + b),
    "nothing": lambda a, b, mask, out: out.assign(a * 0.0 + b),
    "each channel": lambda a, b, mask, out: out.assign(a + Scalar(1, 2, 3)),
    "turned": lambda a, b, mask, out: out.assign(a.t() + b),
    "twice": lambda a, b, mask, out: out.assign(mat.maximum(a, a - b)),
    "in place": lambda a, b, mask, out: out.__iadd__(a),
    "bits": lambda a, b, mask, out: out.assign(~a if a.depth() != CV_32F else a + 1),
    "converted": lambda a, b, mask, out: a.convertTo(out.depth(), 0.5, 3, out),
    "converted by minus nothing": lambda a, b, mask, out: a.convertTo(out.depth(), -0.0, 3, out),
    "converted by nothing": lambda a, b, mask, out: a.convertTo(out.depth(), 0.0, 3, out),
    "masked": lambda a, b, mask, out: a.copyTo(out, mask),
}
sides = st.sampled_from([0, SIDE, 2 * SIDE, 3 * SIDE]) | st.integers(0, ROOM - SIDE)  # side by side, or at any place
places = st.tuples(sides, sides)
placements = st.tuples(places, places, places, places)


def launched(form: str, image: Mat, mask: Mat, placement: tuple[tuple[int, int], ...]) -> None:
    wholes = (image, image, image, mask)
    a, b, out, chosen = (whole.roi(x, y, SIDE, SIDE) for whole, (y, x) in zip(wholes, placement, strict=True))
    FORMS[form](a, b, chosen, out)


def forget() -> None:
    from rooftop.mat import kernel_programs

    for kept in (kernel_programs._launches, kernel_programs._conversions, masked_copies._launches, planning._plans):
        kept.clear()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """All launches as (kernel, grid, arguments), without running kernels."""
    found: list[tuple[Any, ...]] = []

    def call(self: Repeated, *pointers: torch.Tensor) -> None:
        addresses = [each.data_ptr() for each in pointers]

        def note(*arguments: Any) -> None:
            rows = [tuple(each.flatten().tolist()) if isinstance(each, torch.Tensor) else each for each in arguments]
            found.append((self.kernel, self.grid, *map(repr, rows), repr(self.parameters)))

        self._compiled[tuple(address % 16 == 0 for address in addresses)] = (note, ())
        assert self.at(addresses)

    monkeypatch.setattr(Repeated, "__call__", call)
    for module in (converting, copies, evaluation):
        monkeypatch.setattr(module, "INTERPRETED", True)  # as for a GPU
    forget()
    yield found
    forget()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    form=st.sampled_from(list(FORMS)),
    dtype=st.sampled_from([torch.uint8, torch.float32]),
    before=placements,
    now=placements | st.none(),
    same=st.booleans(),
)
@example("turned", torch.float32, ((0, 0), (6, 0), (12, 0), (0, 0)), ((0, 0), (6, 0), (0, 0), (0, 0)), False)
def test_a_launch_made_again_is_the_one_that_would_be_made(
    seen: list[tuple[Any, ...]], form: str, dtype: torch.dtype, before: Any, now: Any, same: bool
) -> None:
    """Regions of one image have equal strides and some overlap. Operands that are copied first are in other memory."""
    image, mask = Mat(torch.zeros(ROOM, ROOM, 3, dtype=dtype)), Mat(torch.ones(ROOM, ROOM, dtype=torch.uint8))
    now = now or before
    if same:  # stores into the first operand's own elements
        now = (now[0], now[1], now[0], now[3])
    forget()
    for each in FORMS:
        launched(each, image, mask, before)
    seen.clear()
    launched(form, image, mask, now)
    warm = within(seen, image, mask)
    forget()
    seen.clear()
    launched(form, image, mask, now)
    assert warm == within(seen, image, mask)
    assert len(warm) == 1


def within(seen: list[tuple[Any, ...]], *mats: Mat) -> list[tuple[Any, ...]]:
    """The launches, with addresses relative to the start of a Mat. An address outside all Mats belongs to a copy."""

    def told(argument: Any) -> Any:
        if not isinstance(argument, str) or not argument.isdecimal() or int(argument) < 1 << 20:
            return argument
        for n, each in enumerate(mats):
            if 0 <= int(argument) - each.data_ptr() < each.total() * each.elemSize():
                return n, int(argument) - each.data_ptr()
        return "a copy"

    return [tuple(told(each) for each in launch) for launch in seen]


def test_what_is_kept_is_launched(seen: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    image, mask = Mat(torch.zeros(ROOM, ROOM, 3)), Mat(torch.ones(ROOM, ROOM, dtype=torch.uint8))
    for form in FORMS:
        launched(form, image, mask, ((0, 0), (0, 6), (6, 0), (6, 6)))
    seen.clear()
    monkeypatch.setattr(Repeated, "__init__", None)  # no further launch is made
    for form in FORMS:
        launched(form, image, mask, ((0, 0), (0, 6), (6, 0), (6, 6)))
    assert len(seen) == len(FORMS)


def test_matrix_products_are_computed_anew(seen: list[tuple[Any, ...]]) -> None:
    """Launches after a product read the product's result, whose address changes each time."""
    a, b, out = (Mat(torch.ones(4, 4)) for _ in range(3))
    for _ in range(3):
        out.assign(mat.maximum(a @ b, b))
        b.assign(mat.maximum(b, a))
    assert len(seen) == 6
    products = [within([each], a, b, out)[0] for each in seen[::2]]
    assert all("a copy" in each for each in products)


@pytest.mark.gpu
@settings(max_examples=60, deadline=None)
@given(
    form=st.sampled_from(list(FORMS)),
    dtype=st.sampled_from([torch.uint8, torch.float32]),
    order=st.lists(placements, min_size=2, max_size=4),
    seed=st.integers(0, 99),
)
def test_on_a_gpu_the_results_are_the_cpus(form: str, dtype: torch.dtype, order: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    numbers = torch.from_numpy(rng.integers(0, 256, (ROOM, ROOM, 3))).to(dtype)
    chosen = torch.from_numpy(rng.integers(0, 2, (ROOM, ROOM)).astype(np.uint8))
    host, device = Mat(numbers.clone()), Mat(numbers.cuda())
    masks = Mat(chosen), Mat(chosen.cuda())
    for placement in [*order, order[0], order[0]]:
        launched(form, host, masks[0], placement)
        launched(form, device, masks[1], placement)
        assert torch.equal(device.tensor().cpu(), host.tensor())


@pytest.mark.gpu
def test_on_a_gpu_a_launch_is_made_again_within_a_graph() -> None:
    a, b = Mat(torch.rand(5, 7, 3, device="cuda")), Mat(torch.rand(5, 7, 3, device="cuda"))
    out = Mat.zeros(5, 7, CV_32FC3, device="cuda")
    expression: MatExpr = a * 2 + b
    out.assign(expression)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.assign(expression)
    a.setTo((1, 2, 3))
    graph.replay()
    assert torch.equal(out.tensor(), a.tensor() * 2 + b.tensor())
