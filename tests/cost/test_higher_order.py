"""Operators that take functions: control flow is counted operator by operator, attention by its block mask."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch._higher_order_ops.map import map as torch_map
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

import rooftop
from rooftop.cost import CountingMode, Record
from rooftop.cost.formulas import flex_attention as formulas
from rooftop.cost.formulas.softmaxes import SOFTMAX_BACKWARD_FLOPS, SOFTMAX_FLOPS
from rooftop.errors import InputError
from rooftop.hardware import Ceilings
from rooftop.hardware.ceilings import ceilings_of
from rooftop.torch_versions import torch_at_least

H200 = ceilings_of("h200")
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

Program = Callable[[Tensor], Any]


def conditional(x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda y: y @ y, lambda y: y - 1, (x,))


def mapped(x: Tensor) -> Any:
    return torch_map(lambda row: row.sin(), x)


def looped(x: Tensor) -> Any:
    return while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y @ y), (torch.tensor(0), x))


def scanned(x: Tensor) -> Any:
    return scan(lambda carry, row: (carry + row, carry.sin() * row), torch.zeros(4), x)


def added_up(x: Tensor) -> Any:
    return associative_scan(lambda a, b: a + b, x, 0, combine_mode="generic")


PROGRAMS: dict[str, tuple[Program, str, int]] = {  # an operator that they run, and its flops
    "cond": (conditional, "aten::mm", 2 * 4**3),
    "map": (mapped, "aten::sin", 4 * 4),
    "while_loop": (looped, "aten::mm", 3 * 2 * 4**3),
    "scan": (scanned, "aten::sin", 4 * 4),
    "associative_scan": (added_up, "aten::add", 4 * 4),
}


def flops(records: list[Record], name: str) -> int:
    return sum(record.cost.total_flops for record in records if record.name == name and record.cost is not None)


@pytest.mark.parametrize("kind", PROGRAMS)
def test_control_flow_costs_what_it_runs_and_works_afterwards(kind: str) -> None:
    run, name, expected = PROGRAMS[kind]
    x = torch.rand(4, 4)
    with CountingMode() as counted:
        found = run(x)
    torch.testing.assert_close(found, run(x))  # would fail if PyTorch had cached a failed compilation
    assert flops(counted.records, name) == expected
    assert not [record.name for record in counted.records if record.name.startswith("higher_order")]


@pytest.mark.parametrize("kind", ["cond", "map", "scan"])
def test_gradients_of_control_flow_are_counted_without_their_tracing(kind: str) -> None:
    if kind == "scan" and not torch_at_least(2, 13):
        pytest.skip("PyTorch's own gradient of scan is wrong")
    run, _, _ = PROGRAMS[kind]
    x = torch.rand(4, 4, requires_grad=True)
    with CountingMode() as counted:
        out = run(x)
        (out[0] if isinstance(out, tuple) else out).sum().backward()
    (expected, x.grad) = (x.grad, None)
    out = run(x)
    (out[0] if isinstance(out, tuple) else out).sum().backward()
    torch.testing.assert_close(expected, x.grad)
    assert all(record.cost is not None for record in counted.records), counted.records
    if kind == "cond":  # one product forward, two backward
        assert flops(counted.records, "aten::mm") == 3 * 2 * 4**3


AFTERWARDS = """
import os, sys, torch
from torch import compile
from rooftop.cost import CountingMode

def program(x):
    return torch.cond(x.sum() > 0, lambda y: y @ y, lambda y: y - 1, (x,))

def compiled(x):
    return x.sin() + 1

def compiles_afterwards(text):
    finders = list(sys.meta_path)
    compiles = []
    def backend(graph, inputs):
        compiles.append(graph)
        return graph
    with CountingMode() as counted:
        program(torch.ones(4, 4))
        second = eval(text)(backend=backend)(compiled)
        second(torch.ones(3))
    assert [r.name for r in counted.records][-2:] == ["aten::sin", "aten::add"] and not compiles
    program(torch.ones(4, 4))
    second(torch.ones(3))
    assert len(compiles) == 1
    assert sys.meta_path == finders

for text in sys.argv[1:]:
    assert "torch._dynamo" not in sys.modules
    child = os.fork()
    if child == 0:
        compiles_afterwards(text)
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, text
"""


def test_a_program_that_first_compiles_while_it_is_counted_can_compile_afterwards() -> None:
    """The programs run in separate processes, which have not imported the compiler yet."""
    ways = ("compile", "torch._dynamo.optimize")
    subprocess.run([sys.executable, "-c", AFTERWARDS, *ways], check=True, timeout=300)


def test_what_is_compiled_is_compiled_after_it_was_counted() -> None:
    compiles: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiles.append(graph)
        return graph

    compiled, x = torch.compile(lambda x: x.cos() * 2, backend=backend), torch.ones(3)
    with CountingMode() as counted:
        compiled(x)
    assert ([r.name for r in counted.records], compiles) == (["aten::cos", "aten::mul"], [])
    compiled(x)
    assert len(compiles) == 1


class Model(nn.Module):
    def __init__(self, run: Program) -> None:
        super().__init__()
        self.run = run

    def forward(self, x: Tensor) -> Any:
        return self.run(x)


@pytest.mark.parametrize("kind", ["map", "scan", "while_loop"])
def test_control_flow_is_predicted(kind: str) -> None:
    run, name, expected = PROGRAMS[kind]
    report = rooftop.predict(Model(run), torch.rand(4, 4), ceilings=H200)
    assert sum(row.flops for row in report.ops if row.name == name) == expected


def test_a_branch_that_depends_on_values_cannot_be_predicted() -> None:
    with pytest.raises(InputError, match="depend on values"):
        rooftop.predict(Model(conditional), torch.rand(4, 4), ceilings=H200)


# ---- flex_attention -----------------------------------------------------------------------------------------------

BATCH, HEADS, LENGTH, WIDTH = 2, 3, 300, 16  # 3 blocks, the last of 44 positions


def attended(mask: Any, score: Any = None) -> list[Record]:
    q, k, v = torch.rand(3, BATCH, HEADS, LENGTH, WIDTH).unbind()
    with CountingMode() as counted:
        flex_attention(q, k, v, score, block_mask=mask)
    return [record for record in counted.records if record.name == "higher_order::flex_attention"]


def block_mask(rule: Callable[..., Any], batch: int | None = None, heads: int | None = None) -> Any:
    return create_block_mask(rule, batch, heads, LENGTH, LENGTH, device="cpu")


def only_the_first_sequence(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return b == 0


MASKS: dict[str, tuple[Callable[[], Any], int]] = {  # block mask, and the number of pairs in its blocks
    "none": (lambda: None, BATCH * HEADS * LENGTH * LENGTH),
    "all": (lambda: block_mask(lambda b, h, q, k: q >= 0), BATCH * HEADS * LENGTH * LENGTH),
    "causal": (
        lambda: block_mask(lambda b, h, q, k: q >= k),
        BATCH * HEADS * (128 * 128 + 128 * 256 + 44 * 300),
    ),
    "of one sequence": (lambda: block_mask(only_the_first_sequence, BATCH, HEADS), HEADS * LENGTH * LENGTH),
    "nothing": (lambda: block_mask(lambda b, h, q, k: q < 0), 0),
}


@pytest.mark.parametrize("kind", MASKS)
def test_attention_costs_the_pairs_in_the_blocks_of_its_mask(kind: str) -> None:
    make, pairs = MASKS[kind]
    (record,) = attended(make())
    assert record.cost is not None, record.uncovered
    assert record.cost.total_flops == 2 * pairs * 2 * WIDTH + pairs * SOFTMAX_FLOPS
    tensor = 4 * BATCH * HEADS * LENGTH * WIDTH
    assert (record.cost.read_bytes, record.cost.write_bytes) == (3 * tensor, tensor + tensor // WIDTH)


def test_backward_costs_five_products() -> None:
    q, k, v, out, gradient = torch.rand(5, BATCH, HEADS, LENGTH, WIDTH).unbind()
    mask = block_mask(lambda b, h, q, k: q >= k).as_tuple()
    arguments = (q, k, v, out, torch.rand(BATCH, HEADS, LENGTH), gradient, None, None, None, mask, 1.0, {}, (), ())
    pairs = MASKS["causal"][1]
    cost = formulas.backward(arguments, (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), ()))()
    assert cost.total_flops == 2 * pairs * 5 * WIDTH + pairs * (2 + SOFTMAX_BACKWARD_FLOPS)


class Attends(nn.Module):
    def __init__(self, mask: Any) -> None:
        super().__init__()
        self.project, self.mask = nn.Linear(WIDTH, WIDTH), mask

    def forward(self, x: Tensor) -> Tensor:
        q = self.project(x)
        return flex_attention(q, q, q, block_mask=self.mask)  # type: ignore[return-value]


@pytest.mark.parametrize("train", [False, True])
def test_attention_with_a_mask_is_predicted_for_a_gpu(train: bool) -> None:
    model = Attends(block_mask(lambda b, h, q, k: q >= k))
    report = rooftop.predict(model, torch.rand(BATCH, HEADS, LENGTH, WIDTH), ceilings=H200, train=train)
    (row,) = [row for row in report.ops if row.name == "higher_order::flex_attention"]
    assert row.flops == MASKS["causal"][1] * (4 * WIDTH + SOFTMAX_FLOPS)
    assert ("higher_order::flex_attention_backward" in {r.name for r in report.ops}) is train
    assert not any("missing from the prediction" in note for note in report.notes)


def test_analysis_of_attention_ends_nothing(measured: Ceilings) -> None:
    report = rooftop.analyze(Attends(None), torch.rand(1, 1, 64, WIDTH), ceilings=measured)
    (row,) = [row for row in report.ops if row.name == "higher_order::flex_attention"]
    assert row.flops == 64 * 64 * (4 * WIDTH + SOFTMAX_FLOPS)
    with pytest.raises(NotImplementedError, match="backward on CPU"):  # the same error as without counting
        Attends(None)(torch.rand(1, 1, 64, WIDTH))


# ---- programs that a mode must not change --------------------------------------------------------------------------


def nested_scan(x: Tensor) -> Any:
    def combine(carry: list[Tensor], row: Tensor) -> tuple[list[Tensor], dict[str, Tensor]]:
        return [carry[0] + row], {"doubled": (carry[0] * 2).clone()}

    return scan(combine, [torch.zeros(4)], x)


NESTS: dict[str, Program] = {
    "vmap of cond": lambda x: torch.vmap(lambda row: torch.cond(row.sum() > 2, torch.sin, torch.cos, (row,)))(x),
    "cond of a dict": lambda x: torch.cond(
        x.sum() > 0, lambda d: {"b": d["a"].sin()}, lambda d: {"b": d["a"] + 1}, ({"a": x},)
    ),
    "scan of a list": nested_scan,
    "scan backwards along the second dimension": lambda x: scan(
        lambda carry, row: (carry + row, carry.clone() * 2), torch.zeros(4), x, dim=1, reverse=True
    ),
    "a loop that does not begin": lambda x: while_loop(lambda y: y.sum() < 0, lambda y: (y + 1,), (x,)),
    "map of a dict": lambda x: torch_map(lambda d, y: {"c": d["a"] + y}, {"a": x}, x[0].clone()),
}


@pytest.mark.parametrize("name", NESTS)
def test_nests_come_out_as_without_a_mode(name: str) -> None:
    x = torch.arange(16.0).reshape(4, 4) / 8
    with CountingMode():
        found = NESTS[name](x)
    expected = NESTS[name](x)
    torch.testing.assert_close(found, expected)
    assert type(found) is type(expected)


def compiles_now() -> bool:
    compiles: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiles.append(graph)
        return graph

    torch.compile(lambda x: x.cos() * 3, backend=backend)(torch.ones(3))
    return len(compiles) == 1


def test_two_threads_that_count_at_once_leave_the_compiler_as_it_was() -> None:
    entered, left = threading.Event(), threading.Event()

    def other() -> None:
        with CountingMode():
            entered.set()
            left.wait()

    thread = threading.Thread(target=other)
    with CountingMode():
        thread.start()
        entered.wait()
    left.set()
    thread.join()
    assert not is_in_torch_dispatch_mode()
    assert compiles_now()
    conditional(torch.ones(4, 4))


def test_a_stance_that_outlives_the_block_goes_back_to_what_was_before_it() -> None:
    mode = CountingMode()
    mode.__enter__()
    stance = torch.compiler.set_stance("eager_on_recompile")
    mode.__exit__(None, None, None)
    stance.__exit__(None, None, None)
    assert compiles_now()
