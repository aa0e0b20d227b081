"""The arguments of a step have the same values at each run, and after the last run."""

from __future__ import annotations

import threading
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn.attention.flex_attention import flex_attention
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils.checkpoint import checkpoint

import rooftop
from rooftop.analysis import held_objects
from rooftop.analysis.given_objects import GivenObjects
from rooftop.analysis.held_objects import Held, left_as_they_were
from rooftop.analysis.program import Program
from rooftop.analysis.report import Report
from rooftop.errors import InputError
from rooftop.hardware import Ceilings


@dataclass
class Layer:
    keys: Tensor | None = None
    seen: int = 0


@dataclass
class Cache:
    """A cache that grows at each step, like those of language models."""

    layers: list[Layer] = field(default_factory=lambda: [Layer()])
    length: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64))
    static: Tensor = field(default_factory=lambda: torch.zeros(4, 2048))

    def update(self, new: Tensor) -> Tensor:
        layer = self.layers[0]
        layer.keys = new if layer.keys is None else torch.cat([layer.keys, new])
        layer.seen += 1
        self.length.add_(1)
        self.static[:, : new.shape[1]] = new[:1]
        return layer.keys


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)
        self.lengths: list[int] = []

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        keys: Tensor = cache.update(self.project(x))
        return x @ keys.T


def filled() -> Cache:
    return Cache([Layer(torch.ones(5, 8), 1)])


def test_each_run_begins_with_what_was_given() -> None:
    cache, lengths = filled(), []
    program = Program(Attends(), (torch.ones(1, 8), cache), {})
    with program.preserved():
        for _ in range(5):
            program.step(lambda output: lengths.append((output.shape[1], int(cache.length), cache.layers[0].seen)))
    assert lengths == [(6, 1, 2)] * 5
    assert program.notes == [
        "The step changes its arguments (Layer), restored before each run.",
        "The step writes to its inputs: each run began with the values that the previous run left.",
    ]


def test_afterwards_everything_is_as_it_was() -> None:
    cache = filled()
    keys, layers = cache.layers[0].keys, cache.layers
    program = Program(Attends(), (torch.ones(1, 8), cache), {})
    with program.preserved():
        for _ in range(4):
            program.step()
    assert cache.layers is layers
    assert cache.layers[0].keys is keys
    assert (int(cache.length), cache.layers[0].seen, float(cache.static.abs().sum())) == (0, 1, 0.0)


def test_afterwards_also_where_the_step_raises() -> None:
    class Raises(Attends):
        def forward(self, x: Tensor, cache: Any) -> Tensor:
            super().forward(x, cache)
            raise ValueError("no")

    cache = filled()
    program = Program(Raises(), (torch.ones(1, 8), cache), {})
    with pytest.raises(rooftop.errors.ModelRunError), program.preserved():
        program.step()
    assert (cache.layers[0].seen, int(cache.length)) == (1, 0)


def test_plain_tensors_that_are_written_to_are_put_back_at_the_end() -> None:
    small, large = torch.zeros(3), torch.zeros(2000)

    def step(small: Tensor, large: Tensor) -> None:
        small.add_(1)
        large.add_(1)

    program = Program(step, (small, large), {})
    with program.preserved():
        for _ in range(3):
            program.step()
        assert (float(small[0]), float(large[0])) == (1.0, 3.0)
    assert (float(small[0]), float(large[0])) == (0.0, 0.0)
    (note,) = program.notes
    assert "each run began with the values that the previous run left." in note


@torch.inference_mode()
def test_tensors_without_versions_are_put_back_as_well() -> None:
    x = torch.zeros(3)
    program = Program(lambda t: t.add_(1), (x,), {})
    with program.preserved():
        program.step()
    assert (x.tolist(), program.notes) == ([0.0] * 3, [])


class Slotted:
    __slots__ = ("later", "value")

    def __init__(self) -> None:
        self.value = 1


class Remembers(UserDict[str, int]):
    pass


class Picky(OrderedDict[str, int]):
    """An object that refuses changes except by its own methods."""

    def __setitem__(self, key: str, value: int) -> None:
        if key in self:
            raise KeyError("set already")
        super().__setitem__(key, value)


def change_slots(slotted: Slotted) -> None:
    slotted.value, slotted.later = 2, 3  # type: ignore[attr-defined]


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], object], Callable[[Any], Any]]] = {
    "list": (lambda: [1, 2], lambda v: v.append(3), list),
    "dict": (lambda: {"a": 1, "b": 2}, lambda v: v.pop("a"), lambda v: list(v.items())),
    "set": (lambda: {1, 2}, lambda v: v.add(3), set),
    "deque": (lambda: deque([1, 2], maxlen=2), lambda v: v.append(3), list),
    "ordered": (lambda: OrderedDict(a=1, b=2), lambda v: v.move_to_end("a"), lambda v: list(v.items())),
    "picky": (lambda: Picky(a=1), lambda v: v.update(b=2), lambda v: list(v.items())),
    "UserDict": (lambda: Remembers(a=1), lambda v: v.update(b=2), dict),
    "namespace": (lambda: SimpleNamespace(a=1), lambda v: vars(v).update(a=2, b=3), lambda v: dict(vars(v))),
    "slots": (Slotted, change_slots, lambda v: (v.value, hasattr(v, "later"))),
    "inside a tuple": (lambda: ([1],), lambda v: v[0].clear(), lambda v: list(v[0])),
    "cyclic": (lambda: _cyclic(), lambda v: vars(v).clear(), lambda v: list(vars(v))),
}


def _cyclic() -> SimpleNamespace:
    value = SimpleNamespace(a=1)
    value.itself = value
    return value


@pytest.mark.parametrize("kind", CHANGES)
def test_containers_of_any_kind_are_put_back(kind: str) -> None:
    make, change, seen = CHANGES[kind]
    value = make()
    before = seen(value)
    given = GivenObjects(([value],))
    for _ in range(3):
        given.put_back()
        assert seen(value) == before
        change(value)
        given.look()
        assert seen(value) != before
    given.put_all_back()
    assert seen(value) == before


class Private:
    __slots__ = ("__hidden",)

    def __init__(self) -> None:
        self.__hidden = 1

    def change(self) -> None:
        self.__hidden += 1

    @property
    def seen(self) -> int:
        return self.__hidden


def test_private_slots_are_put_back() -> None:
    private = Private()
    given = GivenObjects((private,))
    private.change()
    given.look()
    given.put_back()
    assert private.seen == 1


IN_PLACE: dict[str, Callable[[Tensor], object]] = {
    "resize": lambda t: t.resize_(7),
    "set": lambda t: t.set_(torch.ones(3)),
    "transpose": lambda t: t.t_(),
    "unsqueeze": lambda t: t.unsqueeze_(0),
    "out": lambda t: torch.mm(torch.ones(3, 2), torch.ones(2, 5), out=t),
    "a graph": lambda t: t.mul_(torch.ones(1, requires_grad=True)),
    "requires_grad": lambda t: t.requires_grad_(),
}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("size", [2, 60])  # a small one is copied before each run, a large one is not
@pytest.mark.parametrize("change", IN_PLACE)
def test_shapes_and_graphs_of_given_tensors_are_put_back(change: str, size: int) -> None:
    x, shapes = torch.arange(float(size * size)).reshape(size, size).clone(), []
    before, storage = x.clone(), x.untyped_storage()._cdata

    def step(x: Tensor) -> None:
        shapes.append((x.shape, x.stride(), x.requires_grad))
        IN_PLACE[change](x)

    program = Program(step, (x,), {})
    with program.preserved():
        for _ in range(3):
            program.step()
    assert set(shapes) == {(before.shape, before.stride(), False)}
    assert torch.equal(x, before)
    assert (x.untyped_storage()._cdata, x.requires_grad, x.grad_fn) == (storage, False, None)


def test_a_step_that_changes_nothing_is_not_mentioned() -> None:
    given = GivenObjects((filled(), {"a": [1]}, threading.Lock()))
    given.look()
    assert (given.changed, given.notes) == ([], [])


def test_iterators_threads_and_training_go_on() -> None:
    """Objects that cannot be restored completely are left alone, because half-restored objects would be
    inconsistent."""
    loader = iter(torch.utils.data.DataLoader(range(9)))  # type: ignore[arg-type]
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    numbers = (n for n in range(9))
    held = Held([SimpleNamespace(a=loader, b=optimizer, c=numbers, d=threading.Thread(), e=nn.Linear(1, 1))])
    assert [type(container.owner) for container in held.containers] == [SimpleNamespace]


def test_the_state_of_pytorch_itself_is_none_of_the_programs() -> None:
    """An analysis must not restore PyTorch's registries and caches."""

    def program(x: Tensor) -> Any:
        return checkpoint(lambda y: flex_attention(y, y, y), x), torch.cond, torch.compile

    owners = {type(container.owner).__module__ for container in Held([program], everything=True).containers}
    functions = [c.owner for c in Held([program], everything=True).containers if callable(c.owner)]
    assert not [owner for owner in owners if owner.startswith("torch")]
    assert {function.__module__ for function in functions} <= {__name__}


def test_more_than_can_be_watched_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_objects, "MOST_ENTRIES", 3)
    assert "more than 3 objects" in GivenObjects(([[1], [2], [3, 4], [5]],)).notes[0]


def test_tensors_of_an_unknown_kind_end_no_program() -> None:
    class Refuses(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise RuntimeError("not this one")

    given = GivenObjects((torch.ones(3).as_subclass(Refuses), torch.ones(2).to_sparse()))
    given.look()
    given.put_all_back()


# ---- predictions --------------------------------------------------------------------------------------------------


def test_a_prediction_works_on_copies_and_counts_the_problem_that_was_given(ceilings: Ceilings) -> None:
    cache = filled()
    keys = cache.layers[0].keys
    for train in (False, True):  # a training step is counted twice
        report = rooftop.predict(Attends(), torch.ones(1, 8), cache, ceilings=ceilings, train=train)
        (product,) = [row for row in report.ops if row.name == "aten::mm" and row.phase == "forward"]
        assert product.shapes == ((1, 8), (8, 6))
        assert cache.layers[0].keys is keys
        assert (type(cache.length), cache.layers[0].seen) == (Tensor, 1)


def test_the_tensors_of_an_argument_are_cast_and_stay_the_same_twice(ceilings: Ceilings) -> None:
    seen: list[tuple[torch.dtype, bool]] = []

    class Looks(nn.Linear):
        def forward(self, x: Tensor, state: Any, again: Any) -> Tensor:  # type: ignore[override]
            seen.append((state.h.dtype, state is again[0] and state.h is again[1]))
            return super().forward(x) + state.h

    state = SimpleNamespace(h=torch.zeros(2, 8))
    rooftop.predict(Looks(8, 8), torch.ones(2, 8), state, [state, state.h], ceilings=ceilings, dtype=torch.float64)
    assert set(seen) == {(torch.float64, True)}


class Uncopyable:
    def __init__(self, tensor: Tensor | None) -> None:
        self.lock, self.tensor = threading.Lock(), tensor


def test_an_argument_that_cannot_be_copied_is_refused_only_if_it_holds_tensors(ceilings: Ceilings) -> None:
    class Ignores(nn.Linear):
        def forward(self, x: Tensor, other: Any) -> Tensor:  # type: ignore[override]
            return super().forward(x)

    rooftop.predict(Ignores(8, 8), torch.ones(2, 8), Uncopyable(None), ceilings=ceilings)
    with pytest.raises(InputError, match=r"cannot pickle '_thread.lock' object.*analyze it on a real machine"):
        rooftop.predict(Ignores(8, 8), torch.ones(2, 8), Uncopyable(torch.ones(1)), ceilings=ceilings)


COUNT = 0
STATE = SimpleNamespace(cache=None)


def test_what_a_callable_holds_is_the_same_after_its_prediction(ceilings: Ceilings) -> None:
    net, x, cache, outputs, calls = Attends(), torch.ones(1, 8), filled(), list[Tensor](), 0

    def step() -> None:
        nonlocal calls
        global COUNT
        calls += 1
        COUNT += 1
        STATE.cache = net(x, cache)
        net.lengths.append(1)
        outputs.append(STATE.cache)

    rooftop.predict(step, ceilings=ceilings)
    assert (cache.layers[0].seen, outputs, calls, COUNT, STATE.cache, net.lengths) == (1, [], 0, 0, None, [])


class KeepsOutputs(nn.Module):
    """A module that stores its outputs. If `lazily`, the first run creates the list."""

    masks: ClassVar[dict[int, Tensor]] = {}

    def __init__(self, lazily: bool = False) -> None:
        super().__init__()
        self.layer, self.lazily = nn.Linear(8, 8), lazily
        self.outputs: list[Tensor] | None = None if lazily else []
        self.calls, self.shapes = 0, list[torch.Size]()
        self.register_buffer("position", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.shapes.append(x.shape)
        self.position += 1
        if self.outputs is None:
            self.outputs = []
        if len(x) not in self.masks:
            self.masks[len(x)] = torch.ones(len(x), len(x)).tril()
        self.outputs.append(self.layer(self.masks[len(x)] @ x))
        return torch.cat(self.outputs)[: 2 * int(positions(8).shape[0])]


@lru_cache
def positions(count: int) -> Tensor:
    return torch.arange(count)


HAND_COUNT = 2 * 2 * 2 * 8 + 2 * 2 * 8 * 8 + 2 * 8
"""Flops of a mask (2, 2) times (2, 8), and of a linear layer with bias."""


def products(report: Report) -> int:
    return sum(row.flops for row in report.ops if row.name in ("aten::mm", "aten::addmm"))


@pytest.mark.parametrize("lazily", [False, True])
def test_what_a_module_keeps_is_the_same_for_each_run_and_afterwards(lazily: bool, ceilings: Ceilings) -> None:
    net, x = KeepsOutputs(lazily), torch.ones(2, 8)
    for report in (rooftop.analyze(net, x, ceilings=ceilings), rooftop.analyze(lambda: net(x), ceilings=ceilings)):
        concatenated = next(row for row in report.ops if row.name == "aten::cat")
        assert products(report) == HAND_COUNT
        assert concatenated.bytes == 2 * 2 * 8 * 4
        assert "The step changes its own state" in " ".join(report.notes)
    assert (net.calls, net.outputs, net.position.item()) == (0, None if lazily else [], 0)
    assert set(net.shapes) == {x.shape}


@pytest.mark.parametrize("decorator", [lambda f: f, torch.no_grad(), torch.inference_mode(), partial])
def test_a_cache_is_as_given_whichever_way_it_is_held(decorator: Any) -> None:
    net, cache, x = Attends(), filled(), torch.ones(1, 8)

    class Session:
        def __init__(self) -> None:
            self.cache = cache

        def step(self) -> Tensor:
            return net(x, self.cache)

    for step in (lambda: net(x, cache), Session().step, partial(net, x, cache=cache)):
        outputs, program = list[Tensor](), Program(decorator(step), (), {})
        with program.preserved():
            for _ in range(4):
                program.step(outputs.append)
        # The first run may create what later runs use, so only the second run can reveal changes.
        rows = [output.shape[1] for output in outputs]
        assert (rows[0], *rows[2:]) == (6, 6, 6)
        assert (cache.layers[0].seen, cache.length.item()) == (1, 0)


def test_what_a_modules_first_run_makes_is_used_by_the_later_ones(ceilings: Ceilings) -> None:
    KeepsOutputs.masks.clear()
    report = rooftop.analyze(KeepsOutputs(), torch.ones(2, 8), ceilings=ceilings)
    assert "aten::tril" not in [row.name for row in report.ops]


def test_a_prediction_leaves_no_fake_tensor_behind(ceilings: Ceilings) -> None:
    """A copy also reaches hooks, attributes that instances of a class share, and caches of functions."""
    KeepsOutputs.masks.clear()
    positions.cache_clear()
    seen: dict[str, Any] = {}
    net, x = KeepsOutputs(), torch.ones(2, 8)
    net.layer.register_forward_hook(lambda module, inputs, output: seen.update(output=output))
    net.layer.weight.register_hook(lambda gradient: seen.update(gradient=gradient))
    rooftop.predict(net, x, ceilings=ceilings, train=True, loss=lambda output: seen.setdefault("loss", output.sum()))
    assert (seen, KeepsOutputs.masks, net.outputs) == ({}, {}, [])
    assert not isinstance(positions(8), FakeTensor)


def test_hooks_of_a_weight_are_part_of_a_prediction(ceilings: Ceilings) -> None:
    net, x = nn.Linear(8, 8), torch.ones(2, 8)

    def squared(weight: Tensor) -> None:
        assert weight.grad is not None
        weight.grad = weight.grad @ weight.grad

    net.weight.register_hook(lambda gradient: gradient @ gradient)
    net.weight.register_post_accumulate_grad_hook(squared)
    report = rooftop.predict(net, x, ceilings=ceilings, train=True)
    layer = 2 * (2 * 2 * 8 * 8) + 2 * 8
    assert products(report) == layer + 2 * (2 * 8 * 8 * 8)


@pytest.mark.parametrize("fused", [False, True])
def test_a_callable_that_trains_goes_on_as_its_weights_do(ceilings: Ceilings, fused: bool) -> None:
    """Fused steps of PyTorch do not raise the version counter of the weight. The analysis leaves that as it is."""
    weight, losses, x = nn.Parameter(torch.ones(8, 8)), list[Tensor](), torch.ones(2, 8)
    optimizer = torch.optim.SGD([weight], lr=1e-5, fused=fused)
    hooks = len(_global_optimizer_post_hooks)

    def step() -> None:
        optimizer.zero_grad()
        loss = (x @ weight).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())

    rooftop.analyze(step, ceilings=ceilings)
    assert len(losses) > 3
    assert not torch.equal(weight, torch.ones(8, 8))
    assert (weight._version == 0) == fused
    assert len(_global_optimizer_post_hooks) == hooks


def test_optimizers_that_a_module_steps_itself_leave_no_trace(ceilings: Ceilings) -> None:
    """An optimizer in the backward pass, which frees each gradient at once."""
    net, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(2, 8)
    optimizers = {weight: torch.optim.Adam([weight], lr=0.1) for weight in net.parameters()}

    def step(weight: Tensor) -> None:
        optimizers[weight].step()
        optimizers[weight].zero_grad()

    for weight in net.parameters():
        weight.register_post_accumulate_grad_hook(step)
    before = [weight.detach().clone() for weight in net.parameters()]
    rooftop.analyze(net, x, ceilings=ceilings, train=True)
    assert all(torch.equal(*pair) for pair in zip(before, net.parameters(), strict=True))
    assert not any(optimizer.state for optimizer in optimizers.values())


def test_a_prediction_refuses_to_take_the_data_of_a_weight(ceilings: Ceilings) -> None:
    layer = nn.Linear(8, 8)
    before = layer.weight.detach().clone()

    def decay(x: Tensor) -> Tensor:
        layer.weight.data = layer.weight.data * 0.9
        return layer(x)

    with pytest.raises(InputError, match=r"assigns to \.data"):
        rooftop.predict(decay, torch.ones(2, 8), ceilings=ceilings)
    assert torch.equal(layer.weight, before)


def test_a_method_is_followed_to_its_object() -> None:
    class Engine:
        def __init__(self) -> None:
            self.cache = filled()

        def __call__(self) -> Iterator[int]:
            self.cache = filled()
            yield 1

        def step(self) -> None:
            self.cache = filled()

    engine = Engine()
    before = engine.cache
    for target in (engine, engine.step, lambda: engine.step()):
        with left_as_they_were([target]):
            engine.step()
        assert engine.cache is before


def test_what_could_not_be_copied_is_named_if_the_step_writes_to_it(ceilings: Ceilings) -> None:
    """The note names the sparse tensor that the step writes to, and not the one that it only reads."""
    written, read = torch.eye(3).to_sparse(), torch.eye(3).to_sparse()

    def step(x: Tensor, sparse: Tensor, other: Tensor) -> Tensor:
        sparse.mul_(2.0)
        return x + sparse.to_dense() + other.to_dense()

    def notes_of(target: Callable[..., Tensor], *arguments: Tensor) -> list[str]:
        return [n for n in rooftop.analyze(target, *arguments, ceilings=ceilings).notes if "restored" in n]

    notes = notes_of(step, torch.ones(3, 3), written, read)
    assert len(notes) == 1
    assert notes[0].count("a Tensor (sparse_coo) could not be copied beforehand") == 1
    assert not notes_of(lambda x: x + read.to_dense(), torch.ones(3, 3))
