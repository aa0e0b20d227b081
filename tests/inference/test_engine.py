"""An engine returns what its model returns, leaves the model unchanged, and keeps a limited number of graphs."""

from __future__ import annotations

import copy
import hashlib
import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from rooftop.cost import CountingMode
from rooftop.inference import Engine
from rooftop.models.detr.network import Detr
from rooftop.models.vision.resnet import BasicBlock, ResNet
from rooftop.rewrites.graphs import Graph, Graphs, UncapturedError
from rooftop.rewrites.structures import signature
from rooftop.testing import assert_as_accurate


def network(**options: Any) -> ResNet:
    torch.manual_seed(0)
    return ResNet(BasicBlock, (1, 1, 1, 1), 10, **options)


def state_hash(model: nn.Module) -> str:
    """A model's names, values, gradients, training flags and identities."""
    found = hashlib.sha256()
    for name, tensor in model.state_dict(keep_vars=True).items():
        found.update(f"{name} {id(tensor)} {tensor.requires_grad} {tensor.dtype} {tensor.stride()}".encode())
        found.update(tensor.detach().numpy().tobytes())
        found.update(b"" if tensor.grad is None else tensor.grad.numpy().tobytes())
    for name, module in model.named_modules():
        found.update(f"{name} {id(module)} {module.training} {sorted(vars(module))}".encode())
    return found.hexdigest()


class Pair(NamedTuple):
    first: Tensor
    rest: Any


@dataclass
class Named:
    value: Tensor
    count: int = 3


class Nested(nn.Module):
    """A module whose arguments and results are nested structures."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, pair: Pair, *, more: dict[str, Any], scale: float = 1.0) -> Any:
        x = self.linear(pair.first) * scale
        if pair.rest is not None:
            x = x + pair.rest[0]
        return OrderedDict(a=x, b=(x.argmax(-1), None, [more["x"] + x]), c=Pair(x, "text"), d=Named(x))


def nested_call(rest: Any = None, scale: float = 1.0) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (Pair(torch.randn(2, 4), rest),), {"more": {"x": torch.randn(2, 4)}, "scale": scale}


@torch.no_grad()
def test_the_model_is_not_changed() -> None:
    model = network()
    model.requires_grad_(True)
    with torch.enable_grad():
        model(torch.randn(2, 3, 32, 32)).sum().backward()
    model.layer1.eval()
    before = state_hash(model)
    engine = Engine(model, dtype=torch.bfloat16, channels_last=True)
    engine(torch.randn(2, 3, 32, 32))
    assert state_hash(model) == before
    assert model.training
    assert not model.layer1.training


@torch.no_grad()
def test_a_model_in_training_mode_runs_as_in_evaluation() -> None:
    model = network()
    x = torch.randn(2, 3, 32, 32)
    model(x)  # moves the running statistics
    got = Engine(model.train())(x)
    torch.testing.assert_close(got, model.eval()(x), rtol=1e-5, atol=1e-5)
    changed = Engine(model)
    nn.init.zeros_(model.fc.weight)
    assert torch.equal(changed(x), got)  # later changes do not affect the engine


@torch.no_grad()
def test_batches_of_different_sizes_an_empty_one_and_a_wrong_one() -> None:
    model = network().eval()
    engine = Engine(model)
    for size in (1, 3, 0, 2):
        x = torch.randn(size, 3, 32, 40)
        torch.testing.assert_close(engine(x), model(x), rtol=1e-5, atol=1e-5)
    wrong = torch.randn(2, 4, 32, 32)
    with pytest.raises(RuntimeError) as theirs:
        model(wrong)
    with pytest.raises(RuntimeError) as ours:
        engine(wrong)
    assert str(ours.value) == str(theirs.value)


def test_results_carry_no_gradients_and_can_be_trained_on() -> None:
    engine = Engine(network())
    x = torch.randn(2, 3, 32, 32, requires_grad=True)
    features = engine(x)
    assert not features.requires_grad
    assert not features.is_inference()
    nn.Linear(10, 1)(features).sum().backward()
    assert x.grad is None


@torch.no_grad()
def test_half_precision_within_the_gate_and_results_in_float32() -> None:
    model = network().eval()
    x = torch.randn(2, 3, 32, 32)
    engine = Engine(model, dtype=torch.bfloat16, channels_last=True)
    got = engine(x)
    assert got.dtype == torch.float32
    weight = engine.model.layer1[0].conv1.folded.weight
    assert weight.dtype == torch.bfloat16
    assert weight.is_contiguous(memory_format=torch.channels_last)
    raw = Engine(model, dtype=torch.bfloat16, channels_last=True, output_dtype=None)(x)
    assert raw.dtype == torch.bfloat16
    assert torch.equal(raw.float(), got)
    exact = model.double()(x.double())
    eager = Engine(model.float(), dtype=torch.bfloat16, fold=False, output_dtype=None)(x)
    assert_as_accurate(raw, eager, exact)


@torch.no_grad()
def test_norms_and_softmaxes_by_rooftops_kernels() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Softmax(-1)).eval()
    nn.init.normal_(model[1].weight)
    x = torch.randn(3, 8)
    engine = Engine(model, replace=True)
    assert engine.report.replaced == {"1": "LayerNorm", "2": "Softmax"}
    assert "by Rooftop's kernels: 1 LayerNorm, 1 Softmax" in str(engine.report)
    assert type(model[1]) is nn.LayerNorm, "the model itself must be unchanged"
    torch.testing.assert_close(engine(x), model(x))
    assert Engine(model).report.replaced == {}, "on a CPU, modules are replaced only if requested"


@torch.no_grad()
def test_max_pools_by_rooftops_kernel() -> None:
    """A pooling is replaced only if the kernel returns the same result: without indices, and with the `forward` of
    its class."""

    class Pool(nn.MaxPool2d):
        pass

    pools = [nn.MaxPool2d(3, 2, 1), Pool(2, 1), nn.MaxPool2d(2, ceil_mode=True), nn.MaxPool2d((2, 1), (1, 2))]
    model = nn.Sequential(nn.Conv2d(3, 8, 3), *pools).eval()
    seen: list[Tensor] = []
    model[1].register_forward_hook(lambda _, inputs, output: seen.append(output))
    engine = Engine(model, replace=True, fuse=True, channels_last=True)
    assert engine.report.replaced == {"1": "MaxPool2d", "3": "MaxPool2d", "4": "MaxPool2d"}
    for x in (torch.randn(2, 3, 33, 40), torch.randn(3, 33, 40)):
        torch.testing.assert_close(engine(x), model(x))
    assert len(seen) == 4
    x = torch.randn(2, 3, 33, 40)
    for wanted in (False, True):
        engine = Engine(model, replace=wanted)
        with CountingMode() as counted:
            engine(x)
        assert sum(record.name == "rooftop::max_pool2d" for record in counted.records) == (3 if wanted else 0)
    with pytest.raises(RuntimeError) as theirs:
        model[1](torch.zeros(1, 2, 3, 4, 5))
    with pytest.raises(RuntimeError) as ours:
        Engine(model[1], replace=True)(torch.zeros(1, 2, 3, 4, 5))
    assert str(ours.value) == str(theirs.value)


@torch.no_grad()
def test_norms_that_stay_keep_their_statistics_in_float32() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3)).eval()
    model[0].running_mean += 1000.1
    x = torch.randn(2, 3, 8, 8) + 1000
    engine = Engine(model, dtype=torch.bfloat16)
    assert engine.model[0].running_mean.dtype == torch.float32
    eager = model(x.bfloat16().float())
    assert (engine(x) - eager).abs().max() < 0.05 * eager.abs().max()


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("given", [torch.float32, torch.float64])
def test_norms_that_stay_take_what_the_engine_computes_in(given: torch.dtype, dtype: torch.dtype) -> None:
    model, x = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3)).eval().to(given), torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(Engine(model, dtype=dtype)(x), model(x.to(given)).float())


def test_scripted_models() -> None:
    model = torch.jit.script(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval())
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(Engine(model)(x), model(x).detach())


@pytest.mark.parametrize("function", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_engine_is_not_copied(function: Callable[[Engine], object]) -> None:
    with pytest.raises(TypeError, match=r"cannot be copied or pickled.*: copy or save the model"):
        function(Engine(nn.Linear(2, 2)))


@torch.no_grad()
def test_caller_s_autocast_changes_nothing() -> None:
    engine, x = Engine(network()), torch.randn(2, 3, 32, 32)
    with torch.autocast("cpu", torch.bfloat16):
        inside = engine(x)
    assert torch.equal(inside, engine(x))


@torch.no_grad()
def test_nested_inputs_and_results_keep_their_kinds() -> None:
    model = Nested().eval()
    engine = Engine(model, dtype=torch.bfloat16)
    for args, kwargs in (nested_call(), nested_call((torch.ones(4),), 2.0)):
        got, expected = engine(*args, **kwargs), model(*args, **kwargs)
        assert type(got) is OrderedDict
        assert list(got) == list("abcd")
        assert type(got["c"]) is Pair
        assert got["c"].rest == "text"
        assert type(got["d"]) is Named
        assert got["d"].count == 3
        assert got["d"].value is got["a"]  # two references to one tensor stay the same tensor
        assert got["b"][0].dtype == torch.int64
        assert got["b"][1] is None
        torch.testing.assert_close(got["b"][2][0], expected["b"][2][0], rtol=0.05, atol=0.05)


def test_wrong_options_say_what_is_expected() -> None:
    model = network()
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module, got function"):
        Engine(lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"dtype must have at least 16 bits, got torch\.float8_e4m3fn"):
        Engine(nn.Linear(2, 2), dtype=torch.float8_e4m3fn)
    with pytest.raises(TypeError, match=r"dtype must be a floating-point torch\.dtype or None, got torch\.int8"):
        Engine(model, dtype=torch.int8)
    with pytest.raises(ValueError, match="most_shapes must be an integer of at least 1, got 0"):
        Engine(model, most_shapes=0)
    with pytest.raises(ValueError, match="graphs=True needs a model on a CUDA device, this one is on cpu"):
        Engine(model, graphs=True)
    with pytest.raises(ValueError, match=r"an input is on meta, the model on cpu"):
        Engine(model)(torch.empty(1, 3, 32, 32, device="meta"))
    model.layer4.to("meta")
    with pytest.raises(ValueError, match=r"on cpu, meta: use model\.to"):
        Engine(model)


def test_threads_wait_for_each_other() -> None:
    class Alone(nn.Module):
        inside = 0

        def forward(self, x: Tensor) -> Tensor:
            self.inside += 1
            assert self.inside == 1
            y = x.square().sum(0)
            self.inside -= 1
            return y

    engine = Engine(Alone())
    wrong: list[int] = []

    def work(seed: int) -> None:
        x = torch.full((64, 64), float(seed))
        expected = x.square().sum(0)
        wrong.extend(seed for _ in range(50) if not torch.equal(engine(x), expected))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert engine.report.eager_calls == 200


# ---- graphs, with a capture that needs no GPU ----------------------------------------------------------------------


class FakeGraphs(Graphs):
    """Graphs whose replay runs the call again and writes to the outputs of the capture."""

    captures, fails = 0, False

    @contextmanager
    def in_order(self, refusal: str) -> Iterator[None]:
        yield

    def _wait(self) -> None:
        pass

    def _capture(self, inputs: Sequence[Tensor], call: Callable[[], Any]) -> Graph:
        outputs = call()
        if self.fails:
            raise UncapturedError("RuntimeError: waits", outputs)
        self.captures += 1

        def replay() -> None:
            for old, new in zip(*(signature(each, hash)[1] for each in (outputs, call())), strict=True):
                old.copy_(new)

        return Graph(inputs, outputs, torch.no_grad()(replay), None, 100)


def with_fake_graphs(model: nn.Module, most: int = 8, **options: Any) -> tuple[Engine, FakeGraphs]:
    engine = Engine(model, **options)
    engine._graphs = graphs = FakeGraphs(engine.device, most, engine._state)
    return engine, graphs


@torch.no_grad()
def test_a_signature_is_captured_once_and_the_least_recently_used_goes() -> None:
    model = nn.Linear(4, 2)
    engine, graphs = with_fake_graphs(model, most=2)
    captures = []
    for size in (1, 2, 1, 3, 1, 2, 2, 3):
        x = torch.randn(size, 4)
        assert torch.equal(engine(x), model(x))
        captures.append(graphs.captures)
        assert len(engine.report.graphs or ()) <= 2
    # At the first 3, the graph of 2 is dropped, because 1 was used later. When 2 comes again, it is captured again and
    # 3 is dropped. The last 3 is captured again and 1 is dropped.
    assert captures == [1, 2, 2, 3, 3, 4, 4, 5]
    held = engine.report.graphs
    assert held is not None
    assert [(each.inputs, each.replays) for each in held] == [("2x4 float32", 2), ("3x4 float32", 1)]
    assert engine.report.graphs_bytes == 200
    assert "graph of 3x4 float32" in str(engine.report)


@torch.no_grad()
def test_results_are_the_caller_s_own_unless_told_otherwise() -> None:
    x, y = torch.randn(2, 4), torch.randn(2, 4)
    model = nn.Linear(4, 2)
    engine, _ = with_fake_graphs(model)
    first = engine(x)
    engine(y)
    assert torch.equal(first, model(x))
    engine, _ = with_fake_graphs(model, copy_outputs=False)
    first = engine(x)
    assert torch.equal(first, model(x))
    assert engine(y) is first
    assert torch.equal(first, model(y))


@torch.no_grad()
def test_what_makes_a_signature() -> None:
    engine, graphs = with_fake_graphs(Nested())

    def captures(rest: Any, scale: Any) -> int:
        args, kwargs = nested_call(rest, scale)
        engine(*args, **kwargs)
        return graphs.captures

    assert captures(None, 1.0) == 1
    assert captures(None, 1.0) == 1
    assert captures(None, 2.0) == 2  # a graph contains the number as a constant
    assert captures(None, 1) == 3
    assert captures([torch.ones(4)], 1.0) == 4
    assert captures((torch.ones(4),), 1.0) == 5
    assert captures((torch.zeros(4, dtype=torch.float64),), 1.0) == 5  # the value is converted anyway
    assert captures((torch.zeros(4, dtype=torch.int64),), 1.0) == 6
    with pytest.raises(TypeError, match=r"got a builtins\.object: pass its tensors"):
        captures(object(), 1.0)
    x = torch.randn(2, 4)
    engine(Pair(x, None), more={"x": torch.randn(2, 4)})
    engine(Pair(x, None), more={"x": x})  # a call with the same tensor twice differs from a call with two tensors
    assert graphs.captures == 8


@torch.no_grad()
def test_inputs_of_any_strides_share_a_graph() -> None:
    model = network().eval()
    engine, graphs = with_fake_graphs(model, channels_last=True)
    x = torch.randn(3, 32, 40, 2)
    for given in (
        x.permute(3, 0, 1, 2),
        x.permute(3, 0, 1, 2).contiguous(),
        torch.randn(2, 3, 1, 1).expand(2, 3, 32, 40),
    ):
        torch.testing.assert_close(engine(given), model(given), rtol=1e-5, atol=1e-5)
    assert graphs.captures == 1


@torch.no_grad()
def test_a_model_s_own_error_is_not_remembered() -> None:
    model = network().eval()
    engine, graphs = with_fake_graphs(model, most=1)
    good, wrong = torch.randn(2, 3, 32, 32), torch.randn(2, 4, 32, 32)
    expected = engine(good)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="expected input"):
            engine(wrong)
    assert torch.equal(engine(good), expected)
    assert graphs.captures == 1
    assert not engine.report.refused


@torch.no_grad()
def test_an_empty_batch_is_no_graph() -> None:
    engine, graphs = with_fake_graphs(network())
    assert engine(torch.randn(0, 3, 32, 32)).shape == (0, 10)
    assert graphs.captures == 0
    assert engine.report.eager_calls == 1


@torch.no_grad()
def test_what_cannot_be_captured_runs_and_is_told_once() -> None:
    model = nn.Linear(4, 2)
    engine, graphs = with_fake_graphs(model)
    graphs.fails = True
    x = torch.randn(2, 4)
    with pytest.warns(RuntimeWarning, match=r"2x4 float32 runs without a CUDA graph.*RuntimeError: waits") as told:
        assert torch.equal(engine(x), model(x))
    assert told[0].filename == __file__
    assert torch.equal(engine(x), model(x))  # pytest raises other warnings as errors
    assert torch.equal(engine(x[:1]), model(x[:1]))
    assert engine.report.refused == dict.fromkeys(("2x4 float32", "1x4 float32"), "RuntimeError: waits")
    assert engine.report.graphs == ()
    assert engine.report.eager_calls == 3
    assert "no graph for 2x4 float32: RuntimeError: waits" in str(engine.report)


def test_a_state_is_noticed() -> None:
    class Counting(nn.Module):
        def __init__(self, rebinds: bool) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))
            self.rebinds = rebinds

        def forward(self, x: Tensor) -> Tensor:
            if self.rebinds:
                self.count = self.count + 1
            else:
                self.count += 1
            return x

    for rebinds in (False, True):
        engine = Engine(Counting(rebinds))
        before = engine._state()
        assert engine._state() == before
        with torch.inference_mode():
            engine.model(torch.ones(1))
        assert engine._state() != before


# ---- on a GPU ------------------------------------------------------------------------------------------------------


def eager_twin(engine: Engine) -> Callable[..., Any]:
    """The engine's model in its format, without graphs."""

    @torch.no_grad()
    def run(*args: Any, **kwargs: Any) -> Any:
        return engine._eager(args, kwargs)

    return run


@pytest.fixture
def gpu_engine() -> Engine:
    return Engine(network().eval().cuda(), most_shapes=3)


@pytest.mark.gpu
def test_on_a_gpu_the_defaults_are_its_own(gpu_engine: Engine) -> None:
    report = gpu_engine.report
    assert (report.dtype, report.channels_last, report.graphs) == (torch.bfloat16, True, ())
    weight = gpu_engine.model.layer2[0].conv2.folded.weight
    assert weight.dtype == torch.bfloat16
    assert weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.gpu
@torch.no_grad()
def test_replays_are_as_accurate_as_eager_pytorch() -> None:
    model = network().eval().cuda()
    engine = Engine(model, output_dtype=None)
    x = torch.randn(8, 3, 64, 64, device="cuda")
    twin = network().eval().cuda().bfloat16()
    exact = network().eval().cuda().double()(x.double())
    for _ in range(3):
        assert_as_accurate(engine(x), twin(x.bfloat16()), exact)
    (graph,) = engine.report.graphs or ()
    assert graph.replays == 3
    assert graph.bytes > 8 * 3 * 64 * 64 * 2


@pytest.mark.gpu
@torch.no_grad()
def test_repeated_calls_see_the_inputs_of_each(gpu_engine: Engine) -> None:
    eager = eager_twin(gpu_engine)
    results = []
    for seed in range(6):
        x = torch.randn(4, 3, 64, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
        results.append((gpu_engine(x), eager(x)))
        x.fill_(float("nan"))  # a later write on the same stream is not seen
    for got, expected in results:  # all outputs still belong to the caller
        torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)
    assert not torch.equal(results[0][0], results[1][0])
    x = torch.randn(4, 3, 64, 64, device="cuda")
    assert torch.equal(gpu_engine(x), gpu_engine(x))  # deterministic


@pytest.mark.gpu
@torch.no_grad()
def test_several_shapes_and_the_oldest_goes(gpu_engine: Engine) -> None:
    eager = eager_twin(gpu_engine)
    for size in (1, 4, 2, 1, 7, 4, 1, 2, 7, 7):
        x = torch.randn(size, 3, 64, 64, device="cuda")
        torch.testing.assert_close(gpu_engine(x), eager(x), rtol=1e-2, atol=1e-2)
        assert len(gpu_engine.report.graphs or ()) <= 3
    held = [each.inputs.partition("x")[0] for each in gpu_engine.report.graphs or ()]
    assert held == ["1", "2", "7"]
    assert gpu_engine(torch.randn(0, 3, 64, 64, device="cuda")).shape == (0, 10)


@pytest.mark.gpu
@torch.no_grad()
def test_graphs_share_memory_and_eviction_gives_it_back() -> None:
    engine = Engine(network().eval().cuda(), most_shapes=1)
    torch.cuda.synchronize()
    allocated = []
    for size in (32, 16, 32, 16, 32, 16, 32, 16):
        engine(torch.randn(size, 3, 64, 64, device="cuda"))
        allocated.append(torch.cuda.memory_allocated())
    assert allocated[-1] <= allocated[1] + 2**20
    many = Engine(network().eval().cuda(), most_shapes=8)
    for size in (32, 31, 30, 29):
        many(torch.randn(size, 3, 64, 64, device="cuda"))
    first, *others = (each.bytes for each in many.report.graphs or ())
    assert max(others) < first


@pytest.mark.gpu
@torch.no_grad()
def test_calls_from_several_streams_and_threads(gpu_engine: Engine) -> None:
    eager = eager_twin(gpu_engine)
    xs = [torch.randn(size, 3, 64, 64, device="cuda") for size in (4, 2, 4, 1, 2, 4)]
    expected = [eager(x) for x in xs]
    torch.cuda.synchronize()
    got: dict[int, list[Tensor]] = {}
    errors: list[BaseException] = []

    def work(place: int) -> None:
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream), torch.no_grad():
                got[place] = [gpu_engine(xs[place]) for _ in range(20)]
            stream.synchronize()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(xs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for place, results in got.items():
        for result in results:
            torch.testing.assert_close(result, expected[place], rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
@torch.no_grad()
def test_a_second_stream_waits_for_the_first(gpu_engine: Engine) -> None:
    x, y = (torch.randn(4, 3, 64, 64, device="cuda") for _ in range(2))
    expected = gpu_engine(x)
    torch.cuda.synchronize()
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(one):
        torch.cuda._sleep(50_000_000)
        first = gpu_engine(x)
    with torch.cuda.stream(two):
        gpu_engine(y)
    torch.cuda.synchronize()
    assert torch.equal(first, expected)


@pytest.mark.gpu
def test_a_model_that_changes_its_input_leaves_the_caller_s_alone() -> None:
    engine = Engine(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)).cuda())
    x = torch.randn(3, 4, device="cuda", requires_grad=True)
    for given in (x, x.detach(), -x):
        before = given.detach().clone()
        got = engine(given)
        with torch.inference_mode():
            assert torch.equal(engine(given), got)
        assert torch.equal(given, before)
        assert not got.requires_grad
        assert not got.is_inference()
    assert torch.equal(engine(x), engine(x.detach().relu()))


@pytest.mark.gpu
@torch.no_grad()
def test_views_are_valid_until_the_next_call() -> None:
    engine = Engine(network().eval().cuda(), copy_outputs=False)
    x, y = (torch.randn(4, 3, 64, 64, device="cuda") for _ in range(2))
    view = engine(x)
    assert view.dtype == torch.float32
    kept = view.clone()
    assert engine(y) is view
    assert not torch.equal(view, kept)
    engine(x)
    assert torch.equal(view, kept)


@pytest.mark.gpu
@torch.no_grad()
def test_detr_with_its_lists_and_masks_is_captured() -> None:
    torch.manual_seed(0)
    model = Detr(BasicBlock, (1, 1, 1, 1), 5, 7, 32, 4, 2, 3, 48).eval().cuda()
    engine = Engine(model, dtype=torch.float32)
    for seed in range(3):
        torch.manual_seed(seed)
        images = [torch.randn(3, 70, 101, device="cuda"), torch.randn(3, 96, 64, device="cuda")]
        batch, padding = torch.randn(2, 3, 64, 64, device="cuda"), torch.zeros(2, 64, 64, device="cuda").bool()
        padding[:, :, 40 + seed :] = True
        for args in ((images,), (batch, padding), (batch,)):
            got, expected = engine(*args), model(*args)
            torch.testing.assert_close(got.logits, expected.logits, rtol=1e-2, atol=1e-2)
            torch.testing.assert_close(got.boxes, expected.boxes, rtol=1e-2, atol=1e-2)
            assert len(got.auxiliary) == 2
    assert not engine.report.refused
    assert len(engine.report.graphs or ()) == 3


@pytest.mark.gpu
@torch.no_grad()
def test_what_is_computed_once_outlives_the_graphs_that_read_it() -> None:
    """There are more sizes than the engine keeps graphs and constants. Several streams request the first sizes
    again."""
    torch.manual_seed(0)
    model = Detr(BasicBlock, (1, 1, 1, 1), 5, 7, 32, 4, 2, 3, 48).eval().cuda()
    engines = [Engine(model, dtype=torch.float32, most_shapes=3), Engine(model, dtype=torch.float32, graphs=False)]
    images = [torch.randn(2, 3, 64, 32 * i, device="cuda") for i in range(1, 12)]
    expected = [model(each).logits for each in images]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    for turn, place in enumerate([*range(11), 0, 1, 2, 0, 9, 0, 10, 0]):
        with torch.cuda.stream(streams[turn % 3]):
            found = [engine(images[place]).logits for engine in engines]
            torch.cuda.current_stream().synchronize()
        for each in found:
            torch.testing.assert_close(each, expected[place], rtol=1e-2, atol=1e-2)
    assert len(engines[0].report.graphs or ()) == 3
    assert engines[0].report.constants_bytes == engines[1].report.constants_bytes


class Waiting(nn.Module):
    """A model in which the host needs a value from the GPU, or waits for the GPU. Such a model cannot be captured."""

    def __init__(self, explicitly: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.explicitly = explicitly

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.explicitly:
            torch.cuda.synchronize()
            return y
        return y if y.sum().item() > 0 else -y


@pytest.mark.gpu
@pytest.mark.parametrize("explicitly", [False, True])
@torch.no_grad()
def test_a_model_that_waits_runs_without_graphs_and_says_so(explicitly: bool) -> None:
    model = Waiting(explicitly).cuda()
    engine = Engine(model, dtype=torch.float32)
    stream = torch.cuda.current_stream()
    x = torch.randn(2, 4, device="cuda")
    with pytest.warns(RuntimeWarning, match="runs without a CUDA graph, since the model cannot be captured"):
        first = engine(x)
    assert torch.cuda.current_stream() == stream  # the failed capture left its memory
    assert torch.cuda.get_sync_debug_mode() == 0
    torch.testing.assert_close(first, model(x))
    torch.testing.assert_close(engine(-x), model(-x))
    (why,) = engine.report.refused.values()
    assert ("Error" if explicitly else "test_engine.py") in why
    # The GPU works as before, and so do its random numbers and captures.
    other = Engine(network().eval().cuda())
    images = torch.randn(2, 3, 64, 64, device="cuda")
    torch.testing.assert_close(other(images), eager_twin(other)(images), rtol=1e-2, atol=1e-2)
    assert len(other.report.graphs or ()) == 1
    assert not other.report.refused


class Remembering(nn.Module):
    """A module that returns the sum of all inputs so far."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.total = self.total + x
        return self.total


@pytest.mark.gpu
@torch.no_grad()
def test_a_model_with_a_state_runs_without_graphs_and_counts_right() -> None:
    engine = Engine(Remembering().cuda())
    x = torch.ones(3, device="cuda")
    with pytest.warns(RuntimeWarning, match="changes its buffers in each call"):
        totals = [engine(x).tolist() for _ in range(3)]
    assert totals == [[1.0] * 3, [2.0] * 3, [3.0] * 3]


@pytest.mark.gpu
@torch.no_grad()
def test_wrong_shapes_and_devices_do_not_poison_an_engine(gpu_engine: Engine) -> None:
    good = torch.randn(2, 3, 64, 64, device="cuda")
    expected = gpu_engine(good)
    with pytest.raises(ValueError, match=r"expected input \(N, C, H, W\) .* got \(2, 4, 64, 64\)"):
        gpu_engine(torch.randn(2, 4, 64, 64, device="cuda"))
    with pytest.raises(ValueError, match="an input is on cpu, the model on cuda:0"):
        gpu_engine(good.cpu())
    assert torch.equal(gpu_engine(good), expected)
    assert len(gpu_engine.report.graphs or ()) == 1


@pytest.mark.gpu
@torch.no_grad()
def test_a_caller_s_capture_is_refused(gpu_engine: Engine) -> None:
    x = torch.randn(2, 3, 64, 64, device="cuda")
    gpu_engine(x)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.add_(0)  # an empty graph causes a warning
        with pytest.raises(RuntimeError, match="graphs=False"):
            gpu_engine(x)
