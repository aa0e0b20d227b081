"""DataParallel gives the results of its module for the whole batch. Most tests name the CPU two or three times in place
of GPUs."""

from __future__ import annotations

import copy
import gc
import io
import json
import math
import pickle
import runpy
import sys
import time
import traceback
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import Barrier, get_ident
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from rooftop.hardware import collectives
from rooftop.parallel import device_copies
from rooftop.parallel.containers import leaves
from rooftop.parallel.data_parallel import (
    DataParallel,
    _give_different_seeds,
    gather,
    parallel_apply,
    replicate,
    scatter,
)
from rooftop.testing import no_waiting_for_gpu

# A warning of PyTorch's own, once in a process: gradients come from other devices.
TWO, THREE = ["cpu"] * 2, ["cpu"] * 3
CPU = torch.device("cpu")
PATIENCE_S = 120  # seconds; a test that waits longer than this for another thread fails
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "data_parallel.py"
BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "parallel_data.py"

quickly = settings(max_examples=25, deadline=None)

Pair = namedtuple("Pair", "left right")


@dataclass
class Sample:
    image: Tensor
    label: Any


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(0)
        yield


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 3)).double()


def trained(model: nn.Module, batches: list[Tensor], device: str = "cpu") -> list[Tensor]:
    """The losses of some steps with momentum."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = (model(batch).to(device) - batch.to(device)[:, :3]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def assert_same_parameters(one: nn.Module, other: nn.Module) -> None:
    for ours, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
        assert (ours.grad is None) == (theirs.grad is None)
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-12)


# The whole


@pytest.mark.parametrize("devices", [["cpu"], TWO, THREE])
def test_training_is_that_of_one_device(devices: list[str]) -> None:
    alone = network()
    parallel = DataParallel(copy.deepcopy(alone), devices)
    batches = [torch.randn(size, 4, dtype=torch.float64) for size in (7, 6, 1, 2, 11)]
    torch.testing.assert_close(trained(parallel, batches), trained(alone, batches), rtol=0, atol=1e-12)
    assert_same_parameters(parallel, alone)


def test_weights_that_are_shared_stay_shared() -> None:
    model = Tied().double()
    parallel = DataParallel(copy.deepcopy(model), TWO)
    replica = replicate(parallel.module, TWO)[1]
    assert replica.first.weight is replica.second.weight
    assert replica.first is replica.again
    assert len(list(replica.parameters())) == len(list(model.parameters()))
    batches = [torch.randn(5, 4, dtype=torch.float64) for _ in range(3)]
    torch.testing.assert_close(trained(parallel, batches), trained(model, batches), rtol=0, atol=1e-12)
    assert_same_parameters(parallel, model)


class Tied(nn.Module):
    """One weight in two modules, one module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.again = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.second(self.first(x).tanh()).tanh())[:, :3]


def test_batch_norms_keep_the_statistics_of_the_first_share() -> None:
    parallel = DataParallel(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)).double(), TWO)
    alone = copy.deepcopy(parallel.module)
    x = torch.randn(9, 4, dtype=torch.float64)
    out = parallel(x)
    first = alone(x[:5])
    torch.testing.assert_close(parallel.module[1].state_dict(), alone[1].state_dict(), rtol=0, atol=1e-14)
    assert parallel.module[1].num_batches_tracked == 1
    torch.testing.assert_close(out, torch.cat((first, alone(x[5:]))), rtol=0, atol=1e-14)


def test_dropout_differs_between_replicas() -> None:
    parallel = DataParallel(nn.Dropout(0.5), TWO)
    one, other = parallel(torch.ones(2, 200))
    assert not torch.equal(one, other)
    one, other = parallel.eval()(torch.ones(2, 200))
    assert torch.equal(one, other)


def test_gpus_of_one_seed_get_different_ones_and_keep_them(monkeypatch: pytest.MonkeyPatch) -> None:
    generators = [torch.Generator().manual_seed(seed) for seed in (5, 5, 9, 5)]
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    devices = [torch.device("cuda", index) for index in (0, 1, 2, 3, 1)]
    _give_different_seeds([CPU, *devices])
    assert [generator.initial_seed() for generator in generators] == [5, 6, 9, 7]
    drawn = [torch.rand(3, generator=generator) for generator in generators]
    _give_different_seeds(devices)
    again = [torch.Generator().manual_seed(seed) for seed in (5, 6, 9, 7)]
    for number, generator in enumerate(again):
        assert torch.equal(torch.rand(3, generator=generator), drawn[number])
        assert torch.equal(generator.get_state(), generators[number].get_state())


def test_a_state_dict_has_the_prefix_and_goes_both_ways() -> None:
    parallel = DataParallel(network(), TWO)
    assert set(parallel.state_dict()) == {f"module.{name}" for name in parallel.module.state_dict()}
    other = DataParallel(network(), THREE)
    other.load_state_dict(parallel.state_dict())
    assert_same_parameters(other, parallel)
    assert set(nn.DataParallel(network()).state_dict()) == set(parallel.state_dict())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_and_pickles_are_models_of_their_own(copied: Callable[[nn.Module], nn.Module]) -> None:
    parallel = DataParallel(network(), TWO)
    x = torch.randn(5, 4, dtype=torch.float64)
    parallel(x).sum().backward()
    other = copied(parallel)
    assert torch.equal(other(x), parallel(x))
    trained(other, [x])
    assert not torch.equal(other(x), parallel(x))


def test_a_saved_model_runs_again() -> None:
    parallel = DataParallel(network(), TWO)
    file = io.BytesIO()
    torch.save(parallel, file)
    file.seek(0)
    x = torch.randn(5, 4, dtype=torch.float64)
    assert torch.equal(torch.load(file, weights_only=False)(x), parallel(x))


def test_replicas_are_let_go_of_after_each_step() -> None:
    seen: list[weakref.ref[Any]] = []

    class Watched(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.extend((weakref.ref(self), weakref.ref(self.weight)))
            return super().forward(x)

    parallel = DataParallel(Watched(4, 3), THREE)
    gc.collect()
    gc.disable()
    try:
        out = parallel(torch.randn(6, 4))
        out.sum().backward()
        del out
        alive = {id(there) for ref in seen if (there := ref()) is not None}
    finally:
        gc.enable()
    assert len(seen) == 6
    assert alive == {id(parallel.module), id(parallel.module.weight)}


def test_without_gradients() -> None:
    parallel = DataParallel(network(), TWO)
    x = torch.randn(5, 4, dtype=torch.float64)
    with torch.no_grad():
        assert not parallel(x).requires_grad
    with torch.inference_mode():
        assert parallel(x).is_inference()
    assert torch.equal(parallel(x).detach(), parallel(x).detach())
    assert parallel(x).requires_grad


def test_parameters_that_are_frozen_or_unused_have_no_gradient() -> None:
    model = network()
    model[0].weight.requires_grad_(False)
    model.register_parameter("unused", nn.Parameter(torch.ones(2)))
    parallel = DataParallel(model, TWO)
    parallel(torch.randn(5, 4, dtype=torch.float64)).sum().backward()
    none = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert none == {"0.weight", "unused"}


def test_sparse_gradients_are_summed() -> None:
    model = nn.Embedding(10, 3, sparse=True)
    parallel = DataParallel(model, THREE)
    rows = torch.tensor([1, 1, 2, 1, 7, 7])
    parallel(rows).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.is_sparse
    assert torch.equal(model.weight.grad.to_dense()[:, 0], torch.bincount(rows, minlength=10).float())


def test_gradients_flow_to_inputs_and_twice() -> None:
    model = DataParallel(network(), TWO)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(model, x)
    assert torch.autograd.gradgradcheck(model, x)


def test_hooks_run_for_each_replica_and_those_of_parameters_once() -> None:
    model = network()
    calls: list[str] = []
    model.register_forward_pre_hook(lambda module, args: calls.append("before"))
    model[0].register_forward_hook(lambda module, args, out: calls.append("after"))
    model[0].register_full_backward_hook(lambda module, inputs, outputs: calls.append("backward"))
    model[0].weight.register_hook(lambda gradient: calls.append("gradient"))
    model[0].weight.register_post_accumulate_grad_hook(lambda weight: calls.append("accumulated"))
    parallel = DataParallel(model, TWO)
    parallel.register_forward_hook(lambda module, args, out: calls.append("whole"))
    parallel(torch.randn(4, 4, dtype=torch.float64, requires_grad=True)).sum().backward()
    counts = {name: calls.count(name) for name in calls}
    assert counts == {"before": 2, "after": 2, "backward": 2, "whole": 1, "gradient": 1, "accumulated": 1}


class HookedWhenFirstCalled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.hooked = False
        self.calls: list[None] = []

    def forward(self, x: Tensor) -> Tensor:
        if not self.hooked:
            self.linear.register_forward_hook(lambda *args: self.calls.append(None))
            self.hooked = True
        return self.linear(x)


def test_hooks_that_a_forward_registers_are_of_its_replica() -> None:
    model = HookedWhenFirstCalled()
    parallel = DataParallel(model, THREE)
    for step in range(1, 3):
        parallel(torch.ones(3, 4))
        assert len(model.linear._forward_hooks) == 1
        assert len(model.calls) == 3 * step
    model(torch.ones(3, 4))
    assert len(model.calls) == 7


class Scale(nn.Module):
    def forward(self, x: Tensor, by: float = 1.0, *, mask: Tensor | None = None, names: Any = None) -> dict[str, Any]:
        return {"x": x * by if mask is None else x * by * mask, "by": by, "names": names, "share": len(x)}


def test_arguments_of_all_kinds() -> None:
    parallel = DataParallel(Scale(), TWO)
    x, mask = torch.randn(4, 3), torch.tensor([[1.0], [0], [1], [0]])
    out = parallel(x, 2.0, mask=mask, names=["a", "b"])
    assert torch.equal(out["x"], 2 * x * mask)
    assert (out["by"], out["names"], out["share"]) == (2.0, ["a", "b"], 2)
    assert torch.equal(parallel(x=x, by=3.0)["x"], 3 * x)
    with pytest.raises(ValueError, match="replicas returned different values, 3, 2: return them as tensors"):
        parallel(torch.ones(5, 1))


def test_without_tensors_all_run_and_without_arguments_the_first() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value = nn.Parameter(torch.ones(()))

        def forward(self, factor: float = 1.0) -> Tensor:
            return factor * self.value

    parallel = DataParallel(Constant(), THREE)
    assert parallel().tolist() == [1]
    assert parallel(2.0).tolist() == parallel(factor=2.0).tolist() == [2, 2, 2]
    parallel(2.0).sum().backward()
    assert parallel.module.value.grad == 6


def test_an_empty_batch_gives_an_empty_result() -> None:
    parallel = DataParallel(network(), TWO)
    out = parallel(torch.empty(0, 4, dtype=torch.float64))
    assert out.shape == (0, 3)
    out.sum().backward()
    assert not parallel.module[0].weight.grad.any()


def test_batches_along_another_dimension() -> None:
    model = nn.LSTM(4, 5).double()
    parallel = DataParallel(copy.deepcopy(model), THREE, dim=1)
    x = torch.randn(6, 7, 4, dtype=torch.float64)
    (out, states), (expected, expected_states) = parallel(x), model(x)
    torch.testing.assert_close((out, *states), (expected, *expected_states), rtol=0, atol=1e-12)
    for y in (out, expected):
        y.square().sum().backward()
    assert_same_parameters(parallel, model)


# Contents of modules


def test_parametrizations_and_norms_of_weights_by_hooks() -> None:
    for wrapped in (
        parametrizations.weight_norm(nn.Linear(4, 3)),
        parametrizations.orthogonal(nn.Linear(4, 3)),
        parametrizations.spectral_norm(nn.Linear(4, 3)).eval(),
        nn.utils.spectral_norm(nn.Linear(4, 3)).eval(),
    ):
        alone = wrapped.double()
        parallel = DataParallel(copy.deepcopy(alone), TWO)
        batches = [torch.randn(5, 4, dtype=torch.float64) for _ in range(3)]
        torch.testing.assert_close(trained(parallel, batches), trained(alone, batches), rtol=0, atol=1e-12)
        assert_same_parameters(parallel, alone)


class Attributes(nn.Module):
    """A module that reaches its tensors in every way except by their registered names."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(3, 3)) for _ in range(2)])
        self.by_name = nn.ParameterDict({"a": nn.Parameter(torch.randn(3))})
        self.linear = nn.Linear(3, 3)
        self.in_list = [self.linear.weight, {"bias": self.linear.bias}]
        self.module_in_tuple = (self.linear,)
        self.activation = self.squashed
        self.unregistered = torch.randn(3)
        self.computed = self.by_name["a"].exp()
        self.register_buffer("none", None)

    def squashed(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weights[0]) * self.unregistered

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(x) @ self.weights[1] + self.by_name["a"]
        weight, biases = self.in_list
        x = nn.functional.linear(x, weight, biases["bias"])
        assert next(self.parameters()).dtype == x.dtype
        assert self.activation.__self__ is self
        assert {id(leaf) for leaf in leaves(self.in_list)} == {id(tensor) for tensor in self.linear.parameters()}
        return self.module_in_tuple[0](x) * self.computed


def test_tensors_modules_and_methods_in_attributes_are_the_replicas_own() -> None:
    alone = Attributes()
    parallel = DataParallel(alone, TWO)
    x = torch.randn(4, 3)
    replicas = replicate(alone, TWO)
    pointers = [
        {
            leaf.data_ptr()
            for module in each.modules()
            for leaf in leaves([vars(module), list(module.parameters())])
            if isinstance(leaf, Tensor)
        }
        for each in replicas
    ]
    assert len(pointers[0]) == len(pointers[1]) == 7
    assert not pointers[0] & pointers[1]
    expected = alone(x)
    torch.testing.assert_close(parallel(x), expected)
    gradients = [
        torch.autograd.grad(y.square().sum(), list(alone.parameters()), retain_graph=True)
        for y in (expected, parallel(x))
    ]
    torch.testing.assert_close(*gradients)


class Cached(nn.Module):
    """Keeps a computed tensor, like hooks of weight norm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.weight.exp()
        return x * self.last


def test_a_result_kept_from_the_step_before_is_not_walked_again() -> None:
    parallel = DataParallel(Cached(), TWO)
    for _ in range(2):
        parallel(torch.ones(4, 3)).sum().backward()
    assert parallel.module.last is not None  # the tensor of the first replica
    torch.testing.assert_close(parallel.module.weight.grad, 2 * 4 * torch.ones(3).exp())


class Masked(nn.Module):
    """Autograd keeps one buffer, and afterwards another buffer of the same dtype is written."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0]))
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        out = self.weight * self.mask * x
        self.count += len(x)
        return out


def test_a_buffer_may_be_written_to_while_autograd_keeps_another() -> None:
    parallel = DataParallel(Masked(), TWO)
    parallel(torch.ones(5, 3)).sum().backward()
    assert parallel.module.weight.grad.tolist() == [5, 0, 5]
    assert parallel.module.count == 3


def test_modules_that_cannot_be_replicated_are_refused() -> None:
    inside = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    inside[1].weight = nn.Parameter(torch.empty(2, 2, device="meta"))
    with pytest.raises(ValueError, match=r"1\.weight is on meta, but the first device is cpu: move .* module\.to"):
        replicate(inside, TWO)
    compiled = nn.Sequential(nn.Linear(2, 2))
    # the attribute that Module.compile sets, without its compilation time
    compiled[0]._compiled_call_impl = compiled[0]._call_impl
    with pytest.raises(TypeError, match=r"0 \(Linear\) is compiled for its own parameters"):
        DataParallel(compiled, TWO)(torch.ones(2, 2))
    with pytest.raises(RuntimeError, match="uninitialized parameters"):
        replicate(nn.LazyLinear(3), TWO)
    for devices, message in (
        ([], "devices is empty"),
        (["meta"], "run on GPUs and on the CPU, got the device 'meta'"),
        (["gpu"], "'gpu' is no device of this machine"),
        ("cpu", r"devices is 'cpu', expected a list of devices, such as \['cpu'\]"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            replicate(nn.Linear(2, 2), devices)
        with pytest.raises((ValueError, TypeError), match=message):
            DataParallel(nn.Linear(2, 2), devices)


def test_detached_replicas_share_the_memory_of_the_first_only() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    replicas = replicate(model, TWO, detach=True)
    for replica in replicas:
        assert not any(tensor.requires_grad for tensor in replica.parameters())
        assert [name for name, _ in replica.named_parameters()] == [name for name, _ in model.named_parameters()]
        replica(torch.randn(4, 3))
    assert replicas[0][0].weight.data_ptr() == model[0].weight.data_ptr()
    assert replicas[1][0].weight.data_ptr() != model[0].weight.data_ptr()
    assert model[1].num_batches_tracked == 1
    assert replicate(model, TWO)[0] is model


# Copies


def tensors() -> st.SearchStrategy[list[Tensor]]:
    """Tensors of several dtypes and layouts, some empty, some smaller and some larger than the buffer."""
    shapes = st.lists(st.integers(0, 5), max_size=4)
    dtypes = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool])
    layouts = st.sampled_from(["contiguous", "channels last", "transposed", "expanded", "strided"])

    def made(shape: list[int], dtype: torch.dtype, layout: str) -> Tensor:
        tensor = (10 * torch.randn(shape, dtype=torch.complex64 if dtype.is_complex else torch.float64)).to(dtype)
        if layout == "channels last" and tensor.dim() == 4:
            tensor = tensor.to(memory_format=torch.channels_last)
        elif layout == "transposed" and tensor.dim() > 1:
            tensor = tensor.transpose(0, -1)
        elif layout == "expanded":
            tensor = tensor.expand(3, *tensor.shape)
        elif layout == "strided" and tensor.dim():
            tensor = tensor[::2]
        return tensor.detach().requires_grad_(tensor.is_floating_point() or tensor.is_complex())

    return st.lists(st.builds(made, shapes, dtypes, layouts), max_size=6)


@quickly
@given(tensors=tensors(), count=st.integers(1, 3), limit=st.sampled_from([0, 100, 1 << 20]))
def test_copies_are_equal_and_their_gradients_are_summed(tensors: list[Tensor], count: int, limit: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_copies, "COALESCED_BYTES", limit)
        found = device_copies.copies(tensors, [CPU] * count)
        pointers = [tensor.data_ptr() for row in [tensors, *found] for tensor in row if tensor.numel()]
        assert len(set(pointers)) == len(pointers)
        for row in found:
            for made, tensor in zip(row, tensors, strict=True):
                assert torch.equal(made, tensor)
                assert (made.dtype, made.requires_grad) == (tensor.dtype, tensor.requires_grad)
                if tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last):
                    assert made.stride() == tensor.stride()
                assert made.data_ptr() % 16 == 0
        loss = sum((number + 1) * made.sum().real for number, row in enumerate(found) for made in row[::2])
        if any(tensor.requires_grad for tensor in tensors[::2]):
            loss.backward()  # type: ignore[union-attr]
        for number, tensor in enumerate(tensors):
            if number % 2 or not tensor.requires_grad:
                assert tensor.grad is None
            else:
                assert torch.equal(tensor.grad, torch.full_like(tensor, count * (count + 1) / 2))  # type: ignore[arg-type]


def test_the_derivatives_of_copies() -> None:
    one, other = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def mixed(one: Tensor, other: Tensor) -> Tensor:
        (a, b), (c, _) = device_copies.copies([one, other], [CPU, CPU])
        return a * b + c.square() * b

    assert torch.autograd.gradcheck(mixed, (one, other))
    assert torch.autograd.gradgradcheck(mixed, (one, other))


# Scatter and gather


@quickly
@given(
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    batch=st.integers(0, 9),
    count=st.integers(1, 4),
    data=st.data(),
)
def test_what_is_scattered_is_gathered_again(sizes: list[int], batch: int, count: int, data: st.DataObject) -> None:
    dim = data.draw(st.integers(-len(sizes), len(sizes) - 1))
    shape = list(sizes)
    shape[dim] = batch
    x = torch.randn(shape)
    whole = (Pair([x, None], {"b": x + 1, 2: "text"}), Sample(x.double(), 7), OrderedDict(z=x, a=(x.long(),)), [], ())
    shares = scatter(whole, ["cpu"] * count, dim)
    rows = [share[0].left[0].shape[dim] for share in shares]
    assert len(rows) == min(count, max(1, batch))
    assert sum(rows) == batch
    assert max(rows) - min(rows) <= 1
    assert rows == sorted(rows, reverse=True)
    for share in shares:
        assert type(share[0]) is Pair
        assert list(share[2]) == ["z", "a"]
        assert share[0].left[0] is share[2]["z"]
        assert {leaf.shape[dim] for leaf in leaves(share) if isinstance(leaf, Tensor)} == {share[0].left[0].shape[dim]}
    again = gather(shares, "cpu", dim)
    assert type(again[0]) is Pair
    assert isinstance(again[1], Sample)
    assert type(again[2]) is OrderedDict
    for ours, theirs in zip(leaves(again), leaves(whole), strict=True):
        assert torch.equal(ours, theirs) if isinstance(ours, Tensor) else ours == theirs


def test_scatter_copies_what_has_no_dimensions_and_hands_on_what_is_no_tensor() -> None:
    marker = object()
    shares = scatter((torch.arange(3), torch.tensor(4.0), marker), TWO)
    assert [share[0].tolist() for share in shares] == [[0, 1], [2]]
    assert [share[1].item() for share in shares] == [4, 4]
    assert all(share[2] is marker for share in shares)
    assert scatter((marker, None), THREE) == [(marker, None)] * 3
    assert [len(share) for share in scatter(torch.arange(8), THREE)] == [3, 3, 2]


def test_scatter_refuses_what_cannot_be_one_batch() -> None:
    with pytest.raises(
        ValueError, match=r"have the same size there, got the shapes \(4, 2\), \(1, 2\): expand .*, or make them"
    ):
        scatter({"x": torch.ones(4, 2), "mask": torch.ones(1, 2)}, TWO)
    with pytest.raises(ValueError, match=r"along dim 1, but a tensor of shape \(4,\) has no such"):
        scatter(torch.ones(4), TWO, dim=1)
    with pytest.raises(ValueError, match="devices is empty"):
        scatter(torch.ones(4), [])


def test_gather_keeps_nan_if_all_replicas_return_it() -> None:
    (found,) = gather([(float("nan"),), (float("nan"),)], "cpu")
    assert math.isnan(found)


def test_gather_makes_vectors_of_scalars_and_keeps_their_gradients() -> None:
    losses = [torch.tensor(float(number), requires_grad=True) for number in range(3)]
    vector = gather(losses, "cpu", dim=1)
    assert vector.tolist() == [0, 1, 2]
    (vector * torch.tensor([1.0, 2, 3])).sum().backward()
    assert [loss.grad.item() for loss in losses] == [1, 2, 3]  # type: ignore[union-attr]
    assert gather([{"b": 1, "a": torch.ones(1)}, {"a": torch.zeros(1), "b": 1}], "cpu")["a"].tolist() == [1, 0]


@pytest.mark.parametrize(
    ("outputs", "error", "message"),
    [
        ([], ValueError, "no outputs"),
        (
            [torch.ones(2, 3), torch.ones(2, 4)],
            ValueError,
            r"\(2, 3\) torch.float32, \(2, 4\).*along dim 0|along dim 0",
        ),
        ([torch.ones(2), torch.ones(2).double()], ValueError, "torch.float64; they must have the same dtype"),
        ([torch.ones(2), torch.ones(())], ValueError, r"\(2,\) torch.float32, \(\) torch.float32"),
        (
            [{"a": 1}, {"b": 1}],
            ValueError,
            r"replica 1 returned a dict with the keys \['b'\], replica 0 returned \['a'\]",
        ),
        ([[1], [1, 2]], ValueError, "replica 1 returned a list of 2 values, but replica 0 returned one of 1"),
        ([[1], (1,)], TypeError, "replica 1 returned a tuple where replica 0 returned a list"),
        ([None, torch.ones(1)], TypeError, "replica 1 returned a Tensor where replica 0 returned a NoneType"),
        (["a", "b"], ValueError, "different values, 'a', 'b'"),
        ([object(), object()], TypeError, "outputs of the type builtins.object cannot be gathered"),
    ],
)
def test_gather_says_what_does_not_fit(outputs: list[Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        gather(outputs, "cpu")


# Threads


def test_modules_run_at_the_same_time_in_the_modes_of_the_caller() -> None:
    both = Barrier(2)

    def look(x: Tensor, scale: float = 1.0) -> dict[str, Any]:
        both.wait(PATIENCE_S)  # passes only if two threads are here at the same time
        return {
            "thread": get_ident(),
            "grad": torch.is_grad_enabled(),
            "inference": torch.is_inference_mode_enabled(),
            "autocast": torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
            "dtype": (x @ x).dtype,
            "scale": scale,
        }

    def looks() -> list[dict[str, Any]]:
        x = torch.ones(2, 2)
        return parallel_apply([look, look], [x, (x,)], [{"scale": 2.0}, {}])

    found = looks()
    assert len({found[0].pop("thread"), found[1].pop("thread"), get_ident()}) == 3
    assert found[0] == {"grad": True, "inference": False, "autocast": None, "dtype": torch.float32, "scale": 2.0}
    assert found[1]["scale"] == 1
    with torch.no_grad():
        assert [each["grad"] for each in looks()] == [False, False]
    with torch.inference_mode():
        assert [each["inference"] for each in looks()] == [True, True]
    with torch.autocast("cpu", dtype=torch.float16):
        assert [(each["autocast"], each["dtype"]) for each in looks()] == [(torch.float16, torch.float16)] * 2


def test_one_module_runs_in_the_calling_thread_and_none_gives_nothing() -> None:
    assert parallel_apply([lambda x: (get_ident(), x)], [None]) == [(get_ident(), None)]
    assert parallel_apply([], []) == []


def test_the_first_exception_comes_out_with_its_place_when_all_have_ended() -> None:
    ended: list[str] = []

    def slow(x: Tensor) -> None:
        time.sleep(0.05)
        ended.append("slow")
        raise ValueError("later")

    def fails_here(x: Tensor) -> None:
        raise KeyError("first")

    with pytest.raises(KeyError, match="first") as caught:
        parallel_apply([slow, fails_here], [torch.ones(1)] * 2)
    assert ended == ["slow"]
    assert caught.value.__notes__ == ["replica 1 on cpu"]
    assert traceback.extract_tb(caught.tb)[-1].name == "fails_here"


def test_parallel_apply_wants_one_of_everything() -> None:
    with pytest.raises(ValueError, match="2 modules need 2 inputs, got 1"):
        parallel_apply([abs, abs], [1])
    with pytest.raises(ValueError, match="1 modules need 1 dicts of keyword arguments, got 2"):
        parallel_apply([abs], [1], [{}, {}])
    with pytest.raises(ValueError, match="1 modules need 1 devices, got 2"):
        parallel_apply([abs], [1], devices=TWO)


# The scripts


def run_script(script: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", [script.name, *words])
    runpy.run_path(str(script), run_name="__main__")


def test_the_example_shows_the_four_steps_and_the_same_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_script(EXAMPLE, monkeypatch, "--devices", "cpu", "cpu", "--steps", "5", "--batch", "10")
    out = capsys.readouterr().out
    assert "scatter: 10 samples -> 5 on " in out
    for step in ("replicate:", "parallel_apply:", "gather:"):
        assert step in out
    apart = [float(line.rpartition(" ")[2]) for line in out.splitlines() if "differ by" in line]
    assert len(apart) == 2
    assert max(apart) < 1e-12


def test_the_benchmark_measures_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARK.parent)
    monkeypatch.setattr(device_copies, "COALESCED_BYTES", device_copies.COALESCED_BYTES)  # restored after the script
    monkeypatch.setattr(collectives, "collective_rates", lambda devices, sizes: {"all_reduce": {sizes[0]: 1e6}})
    out = tmp_path / "parallel_data.json"
    words = ("--quick", "--only", "small_mlp-8", "--peers", "none", "--limits", "0", "--seconds", "0.001")
    with pytest.raises(SystemExit) as ended:
        run_script(BENCHMARK, monkeypatch, *words, "--out", str(out))
    assert ended.value.code == 0
    rows = {row["variant"]: row for row in json.loads(out.read_text())["results"]}
    ours = "rooftop DataParallel"
    assert list(rows) == [ours, "one device", "one device, its share", f"{ours}, up to 0 bytes together"]
    assert [row["batch"] for row in rows.values()] == [8, 8, 4, 8]
    for row in rows.values():
        assert row["images_per_s"] == pytest.approx(1e3 * row["batch"] / row["ms"])
        assert row["share_ms"] == rows["one device, its share"]["ms"] > 0
        assert row["gradients_bytes"] == 4 * (2 * (32 * 32 + 32) + 32 * 10 + 10)
        assert row["collective_ms"] == pytest.approx(row["gradients_bytes"] / 1e3)  # two devices send each byte once


# GPUs


@pytest.fixture
def two_gpus() -> list[str]:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return ["cuda:0", "cuda:1"]


def convolutions() -> nn.Module:
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)).double().cuda(0)


@pytest.mark.gpu
def test_it_trains_as_torchs_data_parallel_does(two_gpus: list[str]) -> None:
    ours = convolutions()
    theirs = copy.deepcopy(ours)
    losses = []
    for model in (DataParallel(ours, two_gpus), nn.DataParallel(theirs, [0, 1])):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        generator = torch.Generator().manual_seed(3)
        for _ in range(4):
            x = torch.randn(8, 3, 9, 9, dtype=torch.float64, generator=generator)  # from the CPU
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    torch.testing.assert_close(losses[:4], losses[4:], rtol=1e-10, atol=0)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=1e-12)
    assert_same_parameters(ours, theirs)


@pytest.mark.gpu
def test_a_recurrent_network_on_two_gpus(two_gpus: list[str]) -> None:
    alone = nn.LSTM(4, 5, batch_first=True).double().cuda(0)
    parallel = DataParallel(copy.deepcopy(alone), two_gpus)
    x = torch.randn(8, 6, 4, dtype=torch.float64)  # states can be joined only if the parts are equal
    outs = [parallel(x)[0], alone(x.cuda(0))[0]]
    torch.testing.assert_close(*outs, rtol=0, atol=1e-12)
    for out in outs:
        out.square().sum().backward()
    assert_same_parameters(parallel, alone)


@pytest.mark.gpu
def test_on_streams_of_the_caller(two_gpus: list[str]) -> None:
    """Each stream is kept busy before its part, so work that does not wait for the stream reads zeros."""
    alone = network()
    expected = copy.deepcopy(alone)
    x = torch.randn(64, 4, dtype=torch.float64)
    trained(expected, [x] * 4)
    with ExitStack() as stack:
        for name in two_gpus:
            stack.enter_context(torch.cuda.stream(torch.cuda.Stream(name)))
        parallel = DataParallel(alone, two_gpus)
        parallel.module.register_forward_hook(lambda module, args, out: torch.cuda._sleep(20_000_000))
        parallel.module[2].register_full_backward_hook(lambda module, *gradients: torch.cuda._sleep(20_000_000))
        trained(parallel, [x] * 4, device="cuda:0")
        torch.cuda.synchronize("cuda:0")
    for ours, theirs in zip(parallel.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=1e-12)


@pytest.mark.gpu
def test_devices_of_replicas_results_and_exceptions(two_gpus: list[str]) -> None:
    class Where(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            assert x.device == self.weight.device == torch.device("cuda", torch.cuda.current_device())
            if len(x) == 1:
                raise KeyError("one sample")
            return super().forward(x), torch.tensor(x.device.index, device=x.device)

    model = DataParallel(Where(4, 3), two_gpus, output_device="cpu")
    out, index = model(torch.randn(5, 4))
    assert (out.device, out.shape, index.tolist()) == (CPU, (5, 3), [0, 1])
    with pytest.raises(KeyError, match="one sample") as caught:
        model(torch.randn(3, 4))
    assert caught.value.__notes__ == ["replica 1 on cuda:1"]


@pytest.mark.gpu
def test_dropout_differs_between_gpus_and_repeats_with_the_seed(two_gpus: list[str]) -> None:
    parallel = DataParallel(nn.Dropout(0.5), two_gpus)
    drawn = []
    for _ in range(2):
        torch.manual_seed(1)
        drawn.append([parallel(torch.ones(2, 500)) for _ in range(2)])
    for step in drawn[0]:
        assert not torch.equal(step[0], step[1])
    assert all(torch.equal(one, other) for one, other in zip(*drawn, strict=True))


@pytest.mark.gpu
def test_no_step_waits_for_a_gpu(two_gpus: list[str]) -> None:
    parallel = DataParallel(convolutions(), two_gpus)
    x = torch.randn(8, 3, 9, 9, dtype=torch.float64, device="cuda:0")
    parallel(x).square().mean().backward()
    with no_waiting_for_gpu():
        parallel(x).square().mean().backward()
