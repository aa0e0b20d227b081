"""Plans of softmax match what is launched, and each names its deciding fact. No kernel runs here."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from rooftop.kernels import softmax_plan
from rooftop.kernels.operands.launch_data import Device
from rooftop.kernels.softmaxes import clusters, launches, plans, tables
from rooftop.kernels.softmaxes.plans import Problem, SoftmaxPlan, choose
from rooftop.launch import INTERPRETED, cuda

BFLOAT16, SINGLE = torch.bfloat16, torch.float32
H200 = Device(triton=True, processors=132, shared_bytes=232_448, cuda=9)


class Launched(NamedTuple):
    """A kernel, its grid, the first of its scalar arguments, and its constants."""

    kernel: str
    grid: Any
    sizes: tuple[int, ...]
    constants: dict[str, Any]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Launched]:
    """The launches on a simulated H200, which runs as many clusters as it has multiprocessors."""
    found: list[Launched] = []

    def numbers_of(arguments: tuple[Any, ...]) -> tuple[int, ...]:
        return tuple(each for each in arguments if isinstance(each, int | float))

    def launch(kernel: Any, grid: Any, device: object, *arguments: Any, **constants: Any) -> None:
        found.append(Launched(kernel.fn.__name__, grid, numbers_of(arguments)[:3], constants))

    class Kernel:
        def __init__(self, name: str) -> None:
            self.name = name

        def active_clusters(self, *_: object) -> int:
            return H200.processors

        def launch(self, grid: int, block: int, *arguments: Any, shared_bytes: int, cluster: int) -> None:
            sizes = {"block": block, "shared_bytes": shared_bytes, "cluster": cluster}
            found.append(Launched(self.name, grid, numbers_of(arguments)[:4], sizes))

    monkeypatch.setattr(launches, "launch", launch)
    monkeypatch.setattr(cuda, "compile", lambda source, name, **options: Kernel(name))
    monkeypatch.setattr(plans, "device_facts", lambda device: H200)
    return found


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretend that the compiler of the clusters' kernels is installed."""
    plans.forget()
    monkeypatch.setattr(clusters, "is_installed", lambda: True)
    yield
    plans.forget()


def as_planned(plan: SoftmaxPlan, problem: Problem) -> Launched:
    """The launch that a plan promises."""
    if plan.clusters is None:
        return Launched(plan.kernel, plan.grid, plan.sizes, plan.constants)
    config, rows = plan.clusters.config, problem.rows
    name = clusters.kernel_name(plan.kernel.removesuffix("_cluster"), problem.made, problem.log, config)
    sizes = {"block": config.threads, "shared_bytes": plan.clusters.shared_bytes, "cluster": config.blocks}
    numbers = (rows, problem.columns, problem.stride, plan.clusters.part_groups)
    return Launched(name, min(rows, H200.processors) * config.blocks, numbers, sizes)


def matrix(rows: int, columns: int, dtype: torch.dtype, apart: int = 0, lead: int = 0) -> Tensor:
    """Rows with this distance in elements; the first begins this many elements after a multiple of 16 bytes."""
    memory = torch.empty(rows * (columns + apart) + lead, dtype=dtype)
    return memory.as_strided((rows, columns), (columns + apart, 1), lead)


def edges(element_bytes: int) -> list[int]:
    """The numbers of columns at which a table's entry begins or ends, and their neighbours."""
    found = set()
    for value in vars(tables).values():
        for entry in value if isinstance(value, tuple) else ():
            found |= {getattr(entry, name, 0) // element_bytes for name in ("row_bytes", "above_bytes")}
    return sorted(size + more for size in found if 8 < size < 1 << 20 for more in (-1, 0, 1, 4, 8))


def problem_of(rows: int, columns: int, **facts: Any) -> Problem:
    """A softmax of contiguous rows in half precision; `apart` and `lead` are those of `matrix`."""
    dtype = facts.pop("dtype", BFLOAT16)
    apart, lead = facts.pop("apart", 0), facts.pop("lead", 0)
    start = (lead * dtype.itemsize % 16, (columns + apart) * dtype.itemsize % 16)
    known = Problem("forward", rows, columns, (dtype,), dtype, columns + apart, (start,), 0, True, False, H200)
    return known._replace(**facts)


def gradient_of(rows: int, columns: int, **facts: Any) -> Problem:
    dtype = facts.get("dtype", BFLOAT16)
    problem = problem_of(rows, columns, **facts)
    start = (0, columns * dtype.itemsize % 16)  # of y
    return problem._replace(direction="backward", read=(dtype, dtype), starts=(*problem.starts, start))


@pytest.mark.parametrize(("apart", "lead"), [(0, 0), (3, 0), (8, 0), (0, 1), (0, 4)])
@pytest.mark.parametrize("dtype", [BFLOAT16, SINGLE])
@pytest.mark.parametrize("log", [False, True])
def test_what_runs_is_what_the_plan_says(
    log: bool, dtype: torch.dtype, apart: int, lead: int, launched: list[Launched]
) -> None:
    facts = {"dtype": dtype, "apart": apart, "lead": lead, "log": log}
    for columns in edges(dtype.itemsize):
        for rows in (2, 5):
            x, y = matrix(rows, columns, dtype, apart, lead), matrix(rows, columns, dtype)
            launches.forward(x, None, 0.5, log, dtype)
            launches.backward(x, y, None, 0.5, log, dtype)
            problems = problem_of(rows, columns, **facts), gradient_of(rows, columns, **facts)
            assert launched == [as_planned(choose(each), each) for each in problems], (rows, columns)
            launched.clear()


@pytest.mark.parametrize("kind", [1, 2])
def test_masks_run_as_planned(kind: int, launched: list[Launched]) -> None:
    x, mask = matrix(3, 8200, BFLOAT16), torch.ones(8200, dtype=torch.bool if kind == 2 else SINGLE)
    launches.forward(x, mask, 1.0, False, SINGLE)
    problem = problem_of(3, 8200, mask=kind, made=SINGLE)
    assert launched == [as_planned(choose(problem), problem)]
    assert launched[0].constants["MASK"] == kind


@pytest.mark.parametrize(
    ("columns", "facts", "backend", "reason"),
    [
        (1, {}, "tiles", "up to 256 bytes"),
        (128, {}, "tiles", "up to 256 bytes"),
        (129, {}, "tiles", "up to 512 bytes"),
        (2048, {}, "tiles", "up to 4096 bytes"),
        (2049, {}, "clusters", "4096 to 12000 bytes that are not whole groups of 16 bytes"),
        (2052, {}, "clusters", "4096 to 12000 bytes that are not whole groups of 16 bytes"),
        (2056, {}, "tiles", "up to 8192 bytes"),
        (6004, {}, "tiles", "up to 16384 bytes"),
        (6001, {}, "clusters", "12000 to 32768"),
        (16_384, {}, "tiles", "up to 32768 bytes"),
        (16_392, {}, "clusters", "32768 to 65536 bytes of whole groups of 16 bytes are faster read once, by 4 blocks"),
        (16_392, {"device": H200._replace(cuda=8)}, "tiles", "up to 65536 bytes"),
        (262_144, {}, "clusters", "262144 to 524288"),
        (262_152, {}, "long", "a row of 524304 bytes: each row is read twice"),
        (64, {"dtype": torch.float64}, "reference", "float64"),
        (64, {"device": H200._replace(triton=False)}, "reference", "no kernels for the CPU"),
        (0, {}, "tiles", "no elements"),
    ],
)
def test_the_reason_names_what_decided(columns: int, facts: dict[str, Any], backend: str, reason: str) -> None:
    plan = choose(problem_of(64, columns, **facts))
    assert plan.backend == backend, plan
    assert reason in plan.reason
    assert str(plan).startswith(backend)
    assert reason in str(plan)


@pytest.mark.parametrize(
    ("facts", "refusal"),
    [
        ({"mask": 1}, "there is a mask"),
        ({"mask": 2}, "there is a mask"),
        ({"normal": False}, "not a normal float32"),
        ({"made": SINGLE}, "differ in dtype"),
        ({"lead": 1}, "have different alignments within 16 bytes"),
        ({"apart": 1}, "have different alignments within 16 bytes"),
        ({"device": H200._replace(cuda=8)}, "compute capability 9"),
        ({"device": H200._replace(shared_bytes=2048)}, "has no room"),
    ],
)
def test_a_refusal_of_clusters_names_what_they_cannot_take(facts: dict[str, Any], refusal: str) -> None:
    assert choose(problem_of(64, 4999)).backend == "clusters"
    assert choose(problem_of(64, 4999)).refused == {}
    plan = choose(problem_of(64, 4999, **facts))
    assert (plan.backend, plan.clusters) == ("tiles", None)
    assert refusal in plan.refused["clusters"]


def test_without_a_compiler_there_are_no_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "is_installed", lambda: False)
    assert choose(problem_of(64, 4999)).refused == {"clusters": "cuda.core or NVRTC is not installed"}


def test_gradients_of_two_dtypes_go_to_triton() -> None:
    problem = gradient_of(64, 16_384)
    assert choose(problem).backend == "clusters"
    plan = choose(problem._replace(read=(BFLOAT16, SINGLE)))
    assert "differ in dtype" in plan.refused["clusters"]


@pytest.mark.skipif(INTERPRETED, reason="concerns the CPU without the interpreter")
def test_the_public_plan_is_that_of_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.empty(2, 3, 4999, dtype=BFLOAT16)
    plan = softmax_plan(x)
    assert (plan.backend, plan.reason, plan.kernel) == ("reference", "no kernels for the CPU", "")
    monkeypatch.setattr(plans, "device_facts", lambda device: H200)
    assert softmax_plan(x).backend == softmax_plan(x, direction="backward").backend == "clusters"
    assert softmax_plan(x, 1).sizes == (2 * 4999, 3, 3)
    assert softmax_plan(x, dtype=SINGLE).refused == {"clusters": "the result and the rows differ in dtype"}
    assert softmax_plan(x, scale=0.0).refused == {"clusters": "the scale is not a normal float32"}
    keep = torch.ones(4999, dtype=torch.bool)
    assert softmax_plan(x, mask=keep, direction="backward").refused == {"clusters": "there is a mask"}
    assert softmax_plan(x, mask=keep.to(BFLOAT16), direction="backward").backend == "clusters"
    assert softmax_plan(torch.tensor(1.0)).sizes == (1, 1, 1)


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="direction must be 'forward' or 'backward', got 'up'"):
        softmax_plan(torch.empty(2, 4), direction="up")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="softmax_plan: dim 2 is out of range"):
        softmax_plan(torch.empty(2, 4), 2)
