"""Plans of norms match what is launched, and each names its deciding fact. No kernel runs here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from rooftop.kernels import layer_norm_plan
from rooftop.kernels.norms import clusters, launches, plans, tables
from rooftop.kernels.norms.plans import Backward, Forward, NormPlan, choose_backward, choose_forward
from rooftop.kernels.operands.launch_data import Device
from rooftop.launch import INTERPRETED, cuda

BFLOAT16, SINGLE = torch.bfloat16, torch.float32
H200 = Device(triton=True, processors=132, shared_bytes=232_448, cuda=9)
CLUSTERS = 33  # clusters that fit on the H200 at once


class Launched(NamedTuple):
    """A kernel, its grid, its scalar arguments and its constants."""

    kernel: str
    grid: Any
    numbers: tuple[int | float, ...]
    constants: dict[str, Any]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launched]]:
    """The launches on a simulated H200."""
    found: list[Launched] = []

    def numbers_of(arguments: tuple[Any, ...]) -> tuple[int | float, ...]:
        return tuple(each for each in arguments if isinstance(each, int | float))

    def launch(kernel: Any, grid: Any, device: object, *arguments: Any, **constants: Any) -> None:
        found.append(Launched(kernel.fn.__name__, grid, numbers_of(arguments), constants))

    class Kernel:
        def __init__(self, name: str) -> None:
            self.name = name

        def active_clusters(self, *_: object) -> int:
            return CLUSTERS

        def launch(self, grid: int, block: int, *arguments: Any, shared_bytes: int, cluster: int | None) -> None:
            sizes = {"block": block, "shared_bytes": shared_bytes, "cluster": cluster}
            found.append(Launched(self.name, grid, numbers_of(arguments), sizes))

    monkeypatch.setattr(launches, "launch", launch)
    monkeypatch.setattr(cuda, "compile", lambda source, name, **options: Kernel(name))
    monkeypatch.setattr(plans, "device_facts", lambda device: H200)
    clusters.ready.cache_clear()
    yield found
    clusters.ready.cache_clear()


def as_planned(plan: NormPlan, after: tuple[float, ...]) -> list[Launched]:
    """The launches that a plan promises; `after` are the kernels' arguments after the sizes."""
    found = []
    for each in plan.launches:
        if each.staged is not None:
            s = each.staged
            count = max(s.multiple, min(s.rows, s.most or CLUSTERS) // s.multiple * s.multiple)
            sizes = {"block": s.threads, "shared_bytes": s.shared_bytes, "cluster": s.blocks if s.blocks > 1 else None}
            found.append(Launched(s.kernel, count * s.blocks, (*each.sizes, *after), sizes))
        else:
            found.append(Launched(each.kernel, each.grid, (*each.sizes, *after), each.constants))
    return found


def matrix(rows: int, columns: int, dtype: torch.dtype, apart: int = 0, lead: int = 0) -> Tensor:
    """Rows with this distance in elements; the first begins this many elements after a multiple of 16 bytes."""
    memory = torch.empty(rows * (columns + apart) + lead, dtype=dtype)
    return memory.as_strided((rows, columns), (columns + apart, 1), lead)


def edges() -> list[int]:
    """The numbers of columns at which a table's entry begins or ends, and their neighbours."""
    found = {tables.SHIFTED_FROM, tables.FOURS_FROM, 1 << 18}
    for value in vars(tables).values():
        for entry in value if isinstance(value, tuple) else (value,):
            found |= {getattr(entry, name) for name in ("columns", "least", "most") if hasattr(entry, name)}
    sizes = sorted(size + more for size in found if isinstance(size, int) for more in (-4, -1, 0, 1, 2))
    return [size for size in sizes if size > 0]


LAYOUTS = [(0, 0), (3, 0), (8, 0), (0, 1), (0, 4)]


@pytest.mark.parametrize(("apart", "lead"), LAYOUTS)
@pytest.mark.parametrize("dtype", [BFLOAT16, SINGLE])
@pytest.mark.parametrize("adds", [False, True])
def test_what_runs_is_what_the_plan_says(
    adds: bool, dtype: torch.dtype, apart: int, lead: int, launched: list[Launched]
) -> None:
    for columns in edges():
        for rows in (1, 8, 19):
            x, beside = matrix(rows, columns, dtype, apart, lead), matrix(rows, columns, dtype) if adds else None
            weight, bias = torch.empty(columns, dtype=dtype), torch.empty(columns, dtype=dtype)
            kinds = (dtype, dtype if adds else None)
            plan = choose_forward(
                Forward(rows, columns, dtype, dtype, dtype, dtype, kinds[1], (columns + apart, columns * adds),
                        lead == 0, adds, False, H200)
            )  # fmt: skip
            launches.forward(x, beside, None, weight, bias, 1e-5, False, dtype)
            assert launched == as_planned(plan, (1e-5,)), (rows, columns)
            launched.clear()
            strides = (columns + apart, columns * adds, columns)
            plan = choose_backward(
                Backward(rows, columns, dtype, dtype, dtype, kinds[1], strides, lead == 0, (True, True), False, H200)
            )
            mean, rstd = torch.empty(rows), torch.empty(rows)
            slopes = torch.empty(columns, dtype=dtype), torch.empty(columns, dtype=dtype)
            launches.backward(x, beside, matrix(rows, columns, dtype), weight, mean, rstd, *slopes)
            *promised, last = as_planned(plan, ())
            assert launched[:-1] == promised, (rows, columns)
            assert launched[-1]._replace(numbers=()) == last._replace(numbers=())
            assert launched[-1].numbers[1] == columns
            assert sum(each.stop - each.start for each in plan.launches if each.kernel != "norm_row_sums") == 2 * rows
            launched.clear()


HALF_ROWS = Forward(64, 1024, BFLOAT16, BFLOAT16, BFLOAT16, BFLOAT16, None, (1024, 0), True, False, False, H200)


def forward_plan(columns: int, apart: int = 0, **facts: Any) -> NormPlan:
    return choose_forward(HALF_ROWS._replace(columns=columns, strides=(columns + apart, 0))._replace(**facts))


@pytest.mark.parametrize(
    ("columns", "facts", "backend", "reason"),
    [
        (1, {}, "tiles", "up to 128 elements"),
        (128, {}, "tiles", "up to 128 elements"),
        (129, {}, "shifted", "unaligned addresses"),
        (129, {"rows": 7}, "tiles", "up to 256 elements"),
        (129, {"dtype": SINGLE, "result": SINGLE}, "tiles", "up to 256 elements"),
        (255, {"apart": 1}, "tiles", "up to 256 elements"),
        (255, {"aligned": False}, "tiles", "up to 256 elements"),
        (257, {}, "tiles", "multiples of 2 bytes"),
        (260, {}, "tiles", "multiples of 8 bytes"),
        (1024, {}, "tiles", "up to 1024 elements"),
        (4096, {}, "tiles", "up to 4096 elements"),
        (4097, {}, "clusters", "4097 to 8184 elements that are not whole groups of 16 bytes"),
        (4100, {}, "tiles", "multiples of 8 bytes"),
        (16_388, {}, "clusters", "13305 to 24568"),
        (16_388, {"rms": True}, "tiles", "up to 24568 elements are faster in registers"),
        (32_768, {}, "tiles", "up to 32768 elements"),
        (32_776, {}, "clusters", "32769 to 65536 elements of whole groups of 16 bytes"),
        (32_776, {"device": H200._replace(cuda=8)}, "tiles", "whole groups of 16 bytes: 32 warps"),
        (32_769, {"device": H200._replace(cuda=8)}, "long", "no program holds a row of 32769 elements"),
        (131_072, {}, "clusters", "65537 to 131072"),
        (131_080, {}, "long", "no program holds a row of 131080 elements"),
        (64, {"dtype": torch.float64}, "reference", "float64"),
        (0, {}, "reference", "no elements"),
        (64, {"device": H200._replace(triton=False)}, "reference", "no kernels for the CPU"),
    ],
)
def test_the_reason_names_what_decided(columns: int, facts: dict[str, Any], backend: str, reason: str) -> None:
    plan = forward_plan(columns, **facts)
    assert plan.backend == backend, plan
    assert reason in plan.reason
    assert str(plan).startswith(backend)
    assert reason in str(plan)


@pytest.mark.parametrize(
    ("facts", "refusal"),
    [
        ({"adds": True}, "a sum precedes"),
        ({"result": SINGLE}, "differ in dtype"),
        ({"bias": SINGLE}, "weight and bias differ in dtype"),
        ({"weight": torch.float64, "bias": None}, "float64"),
        ({"dtype": SINGLE, "result": SINGLE}, "not of half precision"),
        ({"aligned": False}, "multiple of 16 bytes"),
        ({"apart": 1}, "are not contiguous"),
        ({"rows": 0}, "no rows"),
        ({"device": H200._replace(cuda=8)}, "compute capability 9"),
        ({"device": H200._replace(shared_bytes=10_000)}, "shared memory"),
    ],
)
def test_a_refusal_of_clusters_names_what_they_cannot_take(facts: dict[str, Any], refusal: str) -> None:
    assert forward_plan(4999).backend == "clusters"
    assert forward_plan(4999).refused == {}
    plan = forward_plan(4999, **facts)
    assert plan.backend in ("tiles", "long")
    assert refusal in plan.refused["clusters"]


def backward_plan(columns: int, **facts: Any) -> NormPlan:
    strides = (columns, columns if facts.get("added") else 0, columns)
    call = Backward(64, columns, BFLOAT16, BFLOAT16, BFLOAT16, None, strides, True, (True, True), False, H200)
    return choose_backward(call._replace(**facts))


@pytest.mark.parametrize(
    ("columns", "facts", "backend", "reason", "refusal"),
    [
        (128, {}, "tiles", "up to 128 elements", ""),
        (130, {}, "tiles", "pairs of elements", ""),
        (131, {}, "shifted", "unaligned addresses", ""),
        (4097, {}, "clusters", "4097 to 8184", ""),
        (4097, {"sums": (False, False)}, "shifted", "unaligned addresses", "no gradient of weight or bias"),
        (4097, {"added": BFLOAT16}, "shifted", "unaligned addresses", "another gradient is added"),
        (4097, {"slope": SINGLE}, "tiles", "up to 6144", "differ in dtype"),
        (8192, {}, "tiles", "up to 8192", ""),
        (8200, {}, "clusters", "8193 to 16384 elements of whole groups", ""),
        (65_544, {}, "long", "no program holds a row of 65544 elements", ""),
        (64, {"dtype": torch.float64}, "reference", "float64", ""),
    ],
)
def test_backward_names_what_decided(
    columns: int, facts: dict[str, Any], backend: str, reason: str, refusal: str
) -> None:
    plan = backward_plan(columns, **facts)
    assert plan.backend == backend, plan
    assert reason in plan.reason
    assert refusal in plan.refused.get("clusters", "")
    assert bool(refusal) == bool(plan.refused)


def test_rows_that_eight_does_not_divide_end_without_a_shift() -> None:
    plan = forward_plan(131, rows=19)
    assert [(each.kernel, each.start, each.stop) for each in plan.launches] == [
        ("norm_forward_shifted", 0, 16),
        ("norm_forward", 16, 19),
    ]


@pytest.mark.skipif(INTERPRETED, reason="concerns the CPU without the interpreter")
def test_the_public_plan_is_that_of_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.empty(2, 3, 4097, dtype=BFLOAT16), torch.empty(4097, dtype=BFLOAT16)
    plan = layer_norm_plan(x, 4097, weight)
    assert (plan.backend, plan.reason, plan.launches) == ("reference", "no kernels for the CPU", ())
    monkeypatch.setattr(plans, "device_facts", lambda device: H200)
    assert layer_norm_plan(x, 4097, weight).backend == "clusters"
    assert layer_norm_plan(x, 4097, weight, residual=x).refused == {"clusters": "a sum precedes the norm"}
    added = layer_norm_plan(x, 4097, weight, residual=x, rms=True, direction="backward")
    assert added.refused == {"clusters": "another gradient is added"}
    assert layer_norm_plan(x, 4097, direction="backward").refused == {
        "clusters": "no gradient of weight or bias is needed"
    }
    assert layer_norm_plan(x[..., ::2], 2049).launches[0].sizes[2] == 2049, "the norm reads a contiguous copy"


def test_wrong_arguments() -> None:
    x = torch.empty(2, 4)
    with pytest.raises(ValueError, match="direction must be 'forward' or 'backward', got 'up'"):
        layer_norm_plan(x, 4, direction="up")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="an RMS norm has no bias"):
        layer_norm_plan(x, 4, None, torch.empty(4), rms=True)
    with pytest.raises(ValueError, match="layer_norm_plan: expected input of shape"):
        layer_norm_plan(x, 5)
