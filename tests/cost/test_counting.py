"""The counting mode sees every operator that runs, once, and never disturbs the program."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from rooftop.cost import FREE, Call, Cost, CountingMode, cost_of


def names(run: Callable[[], object]) -> list[str]:
    with CountingMode() as counted:
        run()
    return [record.name.removeprefix("aten::") for record in counted.records]


def test_a_record_says_what_ran() -> None:
    source, weight = torch.rand(3, 5, dtype=torch.float64), torch.rand(5, 7, dtype=torch.float64)
    with CountingMode() as counted:
        source @ weight
    (record,) = counted.records
    assert record.name == "aten::mm"
    assert record.shapes == ((3, 5), (5, 7))
    assert (record.dtype, record.device) == ("float64", "cpu")
    assert (record.scope, record.phase, record.uncovered) == ("", "forward", "")
    assert record.cost == Cost((15 + 35) * 8, 21 * 8, {"fp64": 2 * 3 * 7 * 5})


def test_the_dtype_is_that_of_the_first_floating_input() -> None:
    indices, table = torch.tensor([1, 2]), torch.rand(4, 3, dtype=torch.float16)
    with CountingMode() as counted:
        F.embedding(indices, table)
        torch.arange(3)
    assert [record.dtype for record in counted.records] == ["float16", "int64"]


def test_backward_and_optimizer_are_seen() -> None:
    weight = torch.rand(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1, foreach=True)

    def step() -> None:
        F.relu(weight).sum().backward()
        optimizer.step()

    assert {"relu", "threshold_backward", "_foreach_add_"} <= set(names(step))


def test_scope_and_phase_come_from_outside() -> None:
    places = iter([("net.0", "forward"), ("net.1", "backward")])
    source = torch.rand(3)
    with CountingMode(locate=lambda: next(places)) as counted:
        F.relu(source)
        source.exp()
    assert [(record.scope, record.phase) for record in counted.records] == [
        ("net.0", "forward"),
        ("net.1", "backward"),
    ]


def test_each_operator_runs_inside_the_context_of_its_index() -> None:
    entered: list[int] = []

    @contextmanager
    def label(index: int) -> Iterator[None]:
        entered.append(index)
        yield

    source = torch.rand(3)
    with CountingMode(around=label) as counted:
        F.relu(source).exp().sum()
    assert entered == list(range(len(counted.records))) == [0, 1, 2]


PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: F.linear(x, torch.rand(4, 8), torch.rand(4)),
    "convolution": lambda x: F.conv1d(x, torch.rand(3, 6, 3), padding=1),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "resize": lambda x: F.interpolate(x, scale_factor=2),
    "pool": lambda x: F.max_pool1d(x, 2),
    "rms_norm": lambda x: F.rms_norm(x, (8,)),
    "maximum": lambda x: torch.max(x, x + 1),
    "cross entropy": lambda x: F.cross_entropy(x[0], torch.arange(6)),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_inference_mode_counts_the_same_operators(program: str) -> None:
    """Under inference_mode, composite operators arrive as one call. In other modes they arrive decomposed."""
    source = torch.rand(2, 6, 8)
    with torch.no_grad():
        usual = names(lambda: PROGRAMS[program](source))
    with torch.inference_mode():
        inference = names(lambda: PROGRAMS[program](source))
    assert inference == usual


def test_the_program_computes_what_it_computes_without() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))
    source = torch.rand(2, 3, 8, 8)
    network.eval()
    expected = network(source)
    with CountingMode():
        assert torch.equal(network(source), expected)
    with torch.inference_mode(), CountingMode():
        assert torch.equal(network(source), expected)


def test_fake_tensors_count_as_real_ones() -> None:
    def program() -> None:
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.0)
        layer(torch.rand(2, 5, 16)).sum().backward()

    with CountingMode() as real:
        program()
    with FakeTensorMode(), CountingMode() as fake:
        program()
    # Fake tensors take different intermediate views, which are free.
    real_work, fake_work = ([record for record in mode.records if record.cost != FREE] for mode in (real, fake))
    assert len(real_work) > 20
    assert fake_work == real_work


def test_an_operator_without_a_formula_is_listed() -> None:
    @torch.library.custom_op("rooftop_test_counting::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return 2 * x

    source = torch.eye(3)
    with CountingMode() as counted:
        twice(source)
    uncovered = [record for record in counted.records if record.cost is None]
    assert [(record.name, record.uncovered) for record in uncovered] == [("rooftop_test_counting::twice", "no formula")]


@pytest.mark.parametrize(
    ("name", "cost", "reason"),
    [
        ("negative", Cost(-5), "integers of 0 or more"),
        ("nan", Cost(8, 8, {"fp32": float("nan")}), "integers of 0 or more"),  # type: ignore[dict-item]
        ("tensor", Cost(torch.tensor(3)), "integers of 0 or more"),  # type: ignore[arg-type]
        ("precision", Cost(8, 8, {"fp4": 3}), "expected flops in fp64, .* got fp4"),
        ("nothing", None, "AttributeError"),
    ],
)
def test_a_formula_that_gives_no_cost_is_listed(name: str, cost: Cost, reason: str) -> None:
    schema = "(Tensor x) -> Tensor"
    function = torch.library.custom_op(f"rooftop_test_counting::{name}", torch.clone, mutates_args=(), schema=schema)
    cost_of(f"rooftop_test_counting::{name}")(lambda call: cost)
    with CountingMode() as counted:
        function(torch.ones(3))
    assert counted.records[-1].cost is None
    assert re.search(f"formula failed: .*{reason}", counted.records[-1].uncovered)


def test_a_formula_that_fails_is_listed_and_the_program_goes_on() -> None:
    @torch.library.custom_op("rooftop_test_counting::identity", mutates_args=())
    def identity(source: Tensor) -> Tensor:
        return source.clone()

    @cost_of("rooftop_test_counting::identity")
    def formula(call: Call) -> Cost:
        raise KeyError("weight")

    with CountingMode() as counted:
        out = identity(torch.ones(3))
    assert torch.equal(out, torch.ones(3))
    assert counted.records[-1].cost is None
    assert counted.records[-1].uncovered == "formula failed: KeyError: 'weight'"


def test_an_error_that_cannot_be_printed_does_not_end_the_program() -> None:
    class SilentError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    def formula(call: Call) -> Cost:
        raise SilentError

    schema = "(Tensor x) -> Tensor"
    function = torch.library.custom_op("rooftop_test_counting::silent", torch.clone, mutates_args=(), schema=schema)
    cost_of("rooftop_test_counting::silent")(formula)
    with CountingMode() as counted:
        function(torch.ones(3))
    assert counted.records[-1].uncovered == "formula failed: SilentError: <it cannot be printed>"


def test_an_operator_of_higher_order_is_listed_and_the_program_goes_on() -> None:
    a, b = torch.ones(4, 8, dtype=torch.int8), torch.ones(8, 2, dtype=torch.int8)
    with torch.no_grad(), CountingMode() as counted:
        out = torch.ops.higher_order.out_dtype(torch.ops.aten.mm.default, torch.int32, a, b)
    assert out.tolist() == [[8, 8]] * 4
    (record,) = [record for record in counted.records if record.cost is None]
    assert (record.name, record.uncovered) == ("higher_order::out_dtype", "no formula")


def test_nested_tensors_are_listed_and_the_program_goes_on() -> None:
    """The inference path of an encoder with a padding mask packs its input into nested tensors."""
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
    source, padding = torch.rand(2, 5, 16), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):
        encoder = nn.TransformerEncoder(layer, 1).eval()
        expected = encoder(source, src_key_padding_mask=padding)
        with CountingMode() as counted:
            out = encoder(source, src_key_padding_mask=padding)
    assert torch.equal(out, expected)
    uncovered = {record.name: record.uncovered for record in counted.records if record.cost is None}
    assert "nested tensor" in uncovered["aten::_transformer_encoder_layer_fwd"]


def test_wrapper_tensors_count_what_they_wrap() -> None:
    pair = TwoTensor(torch.rand(3), torch.rand(3))
    assert names(lambda: pair * 2) == ["mul", "mul"]


def test_counting_nests() -> None:
    source = torch.rand(3)
    with CountingMode() as outer, CountingMode() as inner:
        F.relu(source)
    assert [record.name for record in outer.records] == [record.name for record in inner.records] == ["aten::relu"]


def test_memory_changed_in_place_counts_once_in_the_working_set() -> None:
    x, y = torch.randn(1000), torch.randn(1000)
    with CountingMode() as counted:
        x.relu_()
        x.add_(y)
        x.relu()
        x.copy_(y)
    costs = [record.cost for record in counted.records]
    assert [cost.bytes for cost in costs if cost] == [8000, 12000, 8000, 8000]
    assert [cost.working_set_bytes for cost in costs if cost] == [4000, 8000, 8000, 8000]
