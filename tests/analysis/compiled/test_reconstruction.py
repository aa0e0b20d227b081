"""An operator reconstructed on meta tensors is the call that was recorded. Missing information raises an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from rooftop.analysis.compiled.reconstruction import (
    DTYPES,
    NotReconstructedError,
    RecordedTensor,
    RecordedTensors,
    has_formula,
    reconstructed,
    recorded_tensors,
    tensors_of,
)
from rooftop.analysis.instruments import CompiledInstrument
from rooftop.cost import CountingMode
from rooftop.cost.counting import counted

aten = torch.ops.aten


@dataclass
class Event:
    """An event with the interface of the profiler's."""

    label: str
    kinds: Sequence[str]
    sizes: Sequence[Any]
    values: Sequence[Any] = ()
    steps: Sequence[Any] = field(default_factory=list)
    correlation: int = 1

    def correlation_id(self) -> int:
        return self.correlation

    def name(self) -> str:
        return self.label

    def dtypes(self) -> list[str]:
        return list(self.kinds)

    def structured_input_shapes(self) -> list[Any]:
        return list(self.sizes)

    def structured_input_strides(self) -> list[Any]:
        return list(self.steps) or [[] for _ in self.sizes]

    def concrete_inputs(self) -> list[Any]:
        return list(self.values)


def recorded(name: str, run: Callable[[], Any]) -> tuple[Any, RecordedTensors]:
    """Profile a run; return its first event of this name, and the tensors that operators received."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as profiled:
        run()
    results: Any = profiled.profiler
    event = next(e for e in results.kineto_results.events() if e.name() == name)
    return event, recorded_tensors(results.kineto_results)


def described(value: Any) -> Any:
    """Nested arguments, with a description in place of each tensor."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return [described(item) for item in value]
    return value


f32, bf16 = torch.float32, torch.bfloat16


def some(dtype: torch.dtype) -> list[Tensor]:
    return [torch.ones(4, 3, dtype=dtype), torch.ones(7, dtype=dtype)]


RATES = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}
ADAMW: dict[str, Any] = {**RATES, "amsgrad": False, "maximize": False}
CALLS: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (aten.mm.default, (torch.ones(3, 4).t(), torch.ones(3, 5)), {}),
    (aten.addmm.default, (torch.ones(3), torch.ones(2, 5), torch.ones(5, 3)), {"beta": 2, "alpha": 0.5}),
    (aten.bmm.default, (torch.ones(2, 3, 4, dtype=bf16), torch.ones(2, 4, 5, dtype=bf16)), {}),
    (aten.sum.dim_IntList, (torch.ones(2, 3, 4), [0, 2]), {}),
    (aten._softmax.default, (torch.ones(3, 4), -1, False), {}),
    (aten.add.Tensor, (torch.ones(3, 4), torch.ones(4)), {"alpha": 2}),
    (aten.clamp.default, (torch.ones(3), 0, None), {}),
    (aten.embedding.default, (torch.ones(10, 4), torch.ones(3, dtype=torch.long)), {}),
    (aten.native_layer_norm.default, (torch.ones(3, 4), [4], torch.ones(4), None, 1e-5), {}),
    (aten.cat.default, ([torch.ones(2, 3), torch.ones(4, 3)], 0), {}),
    (aten.cat.default, ([torch.ones(2, 3, dtype=bf16), torch.ones(4, 3, dtype=bf16)], 0), {}),
    (aten.cat.default, ([torch.ones(2, 3), torch.ones(4, 3, dtype=bf16)], 0), {}),  # a separate type for each
    (aten.cat.default, ([torch.ones(5, dtype=torch.long), torch.ones(3, dtype=torch.long)], 0), {}),
    (aten.stack.default, (some(bf16)[:1], 0), {}),
    (aten._foreach_add_.Scalar, (some(bf16), 1), {}),
    (aten._foreach_add_.List, (some(f32), some(f32)), {"alpha": 2}),
    (aten._foreach_copy_.default, (some(f32), some(bf16)), {}),
    # The steps are float32 whatever the parameters' dtype; maxima that are not requested are an empty list.
    (aten._fused_adamw_.default, (*(some(bf16) for _ in range(4)), [], [torch.ones(()), torch.ones(())]), ADAMW),
    (aten.add_.Tensor, (torch.ones(3), torch.ones(3)), {}),
    (aten._local_scalar_dense.default, (torch.ones(()),), {}),
    (aten.bitwise_and.Tensor, (torch.ones(5, dtype=torch.bool), torch.ones(5, dtype=torch.bool)), {}),
    (
        aten.convolution.default,
        (torch.ones(2, 3, 8, 8), torch.ones(5, 3, 3, 3), None, [2, 1], [1, 0], [1, 1], False, [0, 0], 1),
        {},
    ),
]


@pytest.mark.parametrize(("func", "args", "kwargs"), CALLS, ids=[str(func) for func, *_ in CALLS])
def test_what_the_profiler_records_is_made_again(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    call = reconstructed(*recorded(func._schema.name, lambda: func(*args, **kwargs)))
    assert call.func is func
    assert described(call.args)[: len(args)] == described(args)
    assert {name: call.kwargs[name] for name in kwargs} == kwargs
    assert all(t.is_meta for t in call.read_tensors)
    with CountingMode() as mode:
        func(*args, **kwargs)
    (record,) = mode.records
    assert counted(call) == (record.cost, "")


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(3, 4),
        lambda: torch.rand(5, dtype=torch.float64),
        lambda: torch.randint(10, (8,)),
        lambda: torch.randperm(6),
        lambda: torch.empty(4).normal_(),
    ],
    ids=["randn", "rand", "randint", "randperm", "normal_"],
)
def test_random_numbers_are_not_drawn_again(make: Callable[[], Tensor]) -> None:
    """New random draws would change the state of the program's generator, and large tensors would take its memory."""
    made: list[Tensor] = []
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as profiled:
        made.append(make())
    events = [e for e in profiled.profiler.kineto_results.events() if e.name().startswith("aten::")]
    before = torch.get_rng_state()
    calls = [reconstructed(event) for event in events]
    assert torch.equal(torch.get_rng_state(), before)
    assert any(described(call.out) == described(made[0]) for call in calls)
    assert all(call.out.is_meta for call in calls if isinstance(call.out, Tensor))


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 5), min_size=0, max_size=4), st.sampled_from(sorted(DTYPES)), st.data())
def test_shapes_strides_and_types_are_those_of_the_tensor(shape: list[int], kind: str, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    tensor = torch.empty(shape, dtype=DTYPES[kind], device="meta").permute(order)
    event = Event("aten::clone", [kind, ""], [list(tensor.shape), []], ["", ""], [list(tensor.stride()), []])
    call = reconstructed(event)
    assert described(call.args[0]) == described(tensor)
    assert (call.out.shape, call.out.dtype) == (tensor.shape, tensor.dtype)


def test_values_that_older_profilers_record_as_text_are_read() -> None:
    kinds = ["float", "ScalarList", "Scalar", ""]
    call = reconstructed(Event("aten::sum", kinds, [[2, 3, 4], [], [], []], ["", "[0, 2]", "True", ""]))
    assert call.args[1:] == ([0, 2], True)
    assert call.out.shape == (1, 3, 1)
    threshold = Event("aten::softplus", ["float", "Scalar", "Scalar"], [[3], [], []], ["", "1", "20"])
    assert reconstructed(threshold).args[1:] == (1, 20)


def in_a_list(dtype: torch.dtype, shapes: Sequence[tuple[int, ...]], first: int = 10) -> tuple[RecordedTensor, ...]:
    """Contiguous tensors with the numbers first, first + 1, ..."""
    strides = [torch.empty(shape, device="meta").stride() for shape in shapes]
    return tuple(
        RecordedTensor(dtype, first + i, shape, stride)
        for i, (shape, stride) in enumerate(zip(shapes, strides, strict=True))
    )


PAIR = [(2, 3), (4, 3)]


@pytest.mark.parametrize("known", [{}, {2: [in_a_list(bf16, PAIR), None]}, {1: [None, None]}, {1: []}])
def test_the_tensors_of_a_list_are_not_guessed(known: RecordedTensors) -> None:
    event = Event("aten::cat", ["TensorList", "Scalar"], [[[2, 3], [4, 3]], []], ["", "0"])
    with pytest.raises(NotReconstructedError, match="the tensors in a list were not recorded"):
        reconstructed(event, known)


def test_tensors_of_events_without_strides_are_those_that_were_recorded() -> None:
    """PyTorch 2.11 records strides, but its events do not have them."""
    event = Event("aten::mm", ["float", "float"], [[2, 3], [3, 4]])
    known = {1: [(RecordedTensor(f32, 10, (2, 3), (3, 1)),), (RecordedTensor(f32, 11, (3, 4), (1, 3)),)]}
    assert [tensor.stride() for tensor in reconstructed(event, known).args] == [(3, 1), (1, 3)]


@pytest.mark.parametrize("dtype", [torch.float64, f32, bf16, torch.float16, torch.int64, torch.bool])
def test_a_list_moves_bytes_of_its_own_type(dtype: torch.dtype) -> None:
    event = Event("aten::cat", ["TensorList", "Scalar"], [[[2, 3], [4, 3]], []], ["", "0"])
    cost, uncovered = counted(reconstructed(event, {1: [in_a_list(dtype, PAIR), None]}))
    assert cost is not None, uncovered
    assert (cost.read_bytes, cost.write_bytes) == (18 * dtype.itemsize, 18 * dtype.itemsize)


@pytest.mark.parametrize("func", [aten._foreach_addcdiv_.ScalarList, aten._foreach_addcdiv_.Scalar])
def test_a_number_for_each_tensor_is_not_one_number_for_all(func: Any) -> None:
    scalars = [0.5, 2.0] if func._overloadname == "ScalarList" else 0.5
    args = some(f32), some(f32), some(f32), scalars
    call = reconstructed(*recorded("aten::_foreach_addcdiv_", lambda: func(*args)))
    assert call.func is func
    with CountingMode() as mode:
        func(*args)
    assert counted(call) == (mode.records[0].cost, "")


def test_a_tensor_that_is_listed_twice_is_read_once() -> None:
    kinds, sizes = ["TensorList", "TensorList", "TensorList", "Scalar"], [[[6]], [[6]], [[6]], []]
    event = Event("aten::_foreach_addcmul_", kinds, sizes, ["", "", "", 1])

    def read_bytes(*numbers: int) -> int:
        cost, uncovered = counted(
            reconstructed(event, {1: [*(in_a_list(bf16, [(6,)], number) for number in numbers), None]})
        )
        assert cost is not None, uncovered
        return cost.read_bytes

    assert read_bytes(10, 11, 12) == 3 * 6 * 2
    assert read_bytes(10, 11, 11) == 2 * 6 * 2


def sgd(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=True)


def adamw(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    # AdamW's step counts are float32, and it computes squares as products
    return torch.optim.AdamW(parameters, foreach=True)


def fused(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True)


@pytest.mark.parametrize(
    ("make", "types"),
    [(sgd, {"bfloat16"}), (adamw, {"bfloat16", "float32"}), (fused, {"bfloat16", "float32"})],
)
def test_an_optimizer_beside_compiled_code_costs_what_a_mode_counts(make: Callable[..., Any], types: set[str]) -> None:
    parameters = [torch.nn.Parameter(tensor) for tensor in some(bf16)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = make(parameters)
    optimizer.step()  # creates the optimizer's state
    with CountingMode() as mode:
        optimizer.step()
    with CompiledInstrument(torch.device("cpu"), {}) as instrument:
        optimizer.step()
    expected, found = (
        [(r.name, r.dtype, r.cost) for r in records if r.name.startswith(("aten::_foreach_", "aten::_fused_"))]
        for records in (mode.records, instrument.result.records)
    )
    assert {dtype for _, dtype, _ in expected} == types
    assert found == expected


@pytest.fixture
def group_of_four() -> Iterator[None]:
    """A group with only this rank, whose collectives return at once."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def tensor(rows: int) -> Tensor:
    return torch.ones(rows, 5, dtype=bf16)


def tensors(*rows: int) -> list[Tensor]:
    return [tensor(count) for count in rows]


def waited(collective: Callable[..., Any], *args: Any) -> None:
    functional.wait_tensor(collective(*args, dist.group.WORLD))


COLLECTIVES: list[tuple[str, Callable[[], Any]]] = [
    ("c10d::allreduce_", lambda: dist.all_reduce(tensor(6))),
    ("c10d::broadcast_", lambda: dist.broadcast(tensor(6), 0)),
    ("c10d::reduce_", lambda: dist.reduce(tensor(6), 0)),
    ("c10d::send", lambda: dist.send(tensor(6), 1)),
    ("c10d::recv_", lambda: dist.recv(tensor(6), 1)),
    ("c10d::barrier", lambda: dist.barrier()),
    ("c10d::_allgather_base_", lambda: dist.all_gather_into_tensor(tensor(24), tensor(6))),
    ("c10d::_reduce_scatter_base_", lambda: dist.reduce_scatter_tensor(tensor(6), tensor(24))),
    ("c10d::alltoall_", lambda: dist.all_to_all(tensors(2, 2, 2, 2), tensors(2, 2, 2, 2))),
    ("c10d::alltoall_base_", lambda: dist.all_to_all_single(tensor(8), tensor(8))),
    ("_c10d_functional::all_reduce", lambda: waited(functional.all_reduce, tensor(6), "sum")),
    ("_c10d_functional::broadcast", lambda: waited(functional.broadcast, tensor(6), 0)),
    ("_c10d_functional::all_gather_into_tensor", lambda: waited(functional.all_gather_tensor, tensor(6), 0)),
    ("_c10d_functional::reduce_scatter_tensor", lambda: waited(functional.reduce_scatter_tensor, tensor(8), "sum", 0)),
    ("_c10d_functional::all_to_all_single", lambda: waited(functional.all_to_all_single, tensor(8), [2] * 4, [2] * 4)),
    ("_c10d_functional::wait_tensor", lambda: waited(functional.all_reduce, tensor(6), "sum")),
]


@pytest.mark.usefixtures("group_of_four")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(("name", "run"), COLLECTIVES, ids=[name for name, _ in COLLECTIVES])
def test_a_collective_is_made_again_without_its_group(name: str, run: Callable[[], Any]) -> None:
    call = reconstructed(*recorded(name, run))
    with CountingMode() as mode:
        run()
    record = next(record for record in mode.records if record.name == name)
    assert counted(call) == (record.cost, "")
    assert tuple(tuple(tensor.shape) for tensor in call.read_tensors) == record.shapes


@pytest.mark.usefixtures("group_of_four")
def test_tensors_in_lists_of_lists_are_not_made_up() -> None:
    """The profiler does not show the tensors that `all_gather` fills."""
    seen = recorded("c10d::allgather_", lambda: dist.all_gather(tensors(6, 6, 6, 6), tensor(6)))
    with pytest.raises(NotReconstructedError, match="was not recorded"):
        reconstructed(*seen)


def test_only_events_that_do_not_describe_their_tensors_are_looked_up() -> None:
    event, known = recorded("aten::mm", lambda: aten.mm.default(torch.ones(2, 3), torch.ones(3, 4)))
    assert bool(known) is not hasattr(event, "structured_input_strides")


def test_a_list_in_which_tensors_may_be_missing_is_not_made_up() -> None:
    """The profiler does not show the indices of `x[indices]`."""
    event, lists = recorded("aten::index", lambda: aten.index.Tensor(torch.ones(5, 6), [torch.tensor([1, 2])]))
    with pytest.raises(NotReconstructedError, match="was not recorded"):
        reconstructed(event, lists)


def test_an_argument_that_is_a_word_is_not_made_up() -> None:
    """The profiler does not record the approximation of GELU."""
    event, _ = recorded("aten::gelu", lambda: aten.gelu.default(torch.ones(3, 4), approximate="tanh"))
    with pytest.raises(NotReconstructedError, match="approximate"):
        reconstructed(event)


@pytest.mark.parametrize("name", ["aten::no_such_operator", "nowhere::mm", "ProfilerStep", "", "aten::"])
def test_an_unknown_operator_says_so(name: str) -> None:
    with pytest.raises(NotReconstructedError, match="no such operator"):
        reconstructed(Event(name, ["float"], [[3]]))
    assert not has_formula(name)


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (Event("aten::mm", ["float"], [[3, 4]]), "1 arguments were recorded, but the operator takes 2"),
        (Event("aten::mm", ["float", "float"], [[3, 4], [5, 6]]), "aten.mm.default"),
        (
            Event("aten::mm", ["float", "Scalar"], [[3, 4], []], ["", "2"]),
            "Scalar was recorded, but the operator takes Tensor",
        ),
        (Event("aten::mm", ["float", "TensorList"], [[3, 4], [[4, 5]]]), "a list of tensors was recorded"),
        (Event("aten::cat", ["float", "Scalar"], [[3], []], ["", "0"]), "a tensor was recorded"),
    ],
)
def test_a_call_that_no_overload_takes_says_why(event: Event, message: str) -> None:
    with pytest.raises(NotReconstructedError, match=message):
        reconstructed(event)


def test_operators_with_a_formula_are_known_by_name() -> None:
    assert has_formula("aten::mm")
    assert has_formula("aten::add_")


def test_pointers_of_a_launch_are_told_with_their_positions() -> None:
    event = Event(
        "triton_poi_fused_0",
        ["c10::BFloat16", "Scalar", "float"],
        [[4, 6], [], [3]],
        ["", "24", ""],
        [[1, 4], [], [1]],
    )
    assert [(position, described(tensor)) for position, tensor in tensors_of(event)] == [
        (0, ((4, 6), (1, 4), bf16)),
        (2, ((3,), (1,), f32)),
    ]
    known = {1: [(RecordedTensor(bf16, 10, (4, 6), (0, 1)),), None, (RecordedTensor(f32, 11, (3,), (1,)),)]}
    event.steps = []
    assert [described(tensor) for _, tensor in tensors_of(event, known)] == [((4, 6), (0, 1), bf16), ((3,), (1,), f32)]
