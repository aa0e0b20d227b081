"""A fused model computes what the model computes, whatever it contains; parts that must not be fused stay separate."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune

from rooftop.cost import CountingMode
from rooftop.inference import Engine, fold_norms, fuse_convolutions
from rooftop.kernels.convolutions.launches import is_fastest
from rooftop.launch import count_launches
from rooftop.models.vision import resnet
from rooftop.rewrites import Candidate, ChannelsLast, FuseConvolutions, Rule, convolution_rules

# Like the published variants with these names, but with fewer blocks.
VARIANTS: dict[str, tuple[type[resnet.Block], dict[str, Any]]] = {
    "basic": (resnet.BasicBlock, {}),
    "bottleneck": (resnet.Bottleneck, {}),
    "resnext": (resnet.Bottleneck, {"groups": 32, "width_per_group": 4}),
    "dilated": (resnet.Bottleneck, {"replace_stride_with_dilation": (False, True, True)}),
}


def calls(model: nn.Module, *inputs: Tensor) -> list[str]:
    """The operators that a call runs, by name."""
    with torch.no_grad(), CountingMode() as counted:
        model(*inputs)
    return [record.name for record in counted.records]


def fused_with(model: nn.Module, *inputs: Tensor) -> dict[str, str]:
    """The operators fused with each convolution, after a check that results are nearly the same as before."""
    model = model.double().eval()
    own = copy.deepcopy(model)
    fusing = fuse_convolutions(own)
    inputs = tuple(x.double() for x in inputs)
    with torch.no_grad():
        expected = model(*(x.clone() for x in inputs))
        torch.testing.assert_close(own(*(x.clone() for x in inputs)), expected, rtol=1e-12, atol=1e-12)
    return fusing.fused


class Net(nn.Module):
    """Two convolutions and a function of them and the input."""

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        super().__init__()
        self.a = nn.Conv2d(4, 4, 3, padding=1, **options)
        self.b = nn.Conv2d(4, 4, 1)
        self.relu = nn.ReLU(inplace=True)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


X = torch.linspace(-2, 2, 2 * 4 * 5 * 5).reshape(2, 4, 5, 5).sin()


# ---- networks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_every_convolution_of_a_resnet_is_one_operator(name: str) -> None:
    torch.manual_seed(0)
    block, options = VARIANTS[name]
    model = resnet.ResNet(block, (2, 1, 1, 1), num_classes=5, **options).double().eval()  # type: ignore[arg-type]
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    x = torch.randn(1, 3, 33, 47, dtype=torch.float64)
    own = copy.deepcopy(model)
    fold_norms(own)
    convolutions = sum(isinstance(module, nn.Conv2d) for module in model.modules())
    with torch.no_grad():
        folded = own(x)
        fusing = fuse_convolutions(own)
        torch.testing.assert_close(own(x), folded, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(folded, model(x), rtol=1e-9, atol=1e-9)
    assert not fusing.left
    assert len(fusing.fused) == convolutions
    blocks = [module for module in model.modules() if isinstance(module, resnet.Block)]
    steps = list(fusing.fused.values())
    assert steps.count("bias, sum, relu") == len(blocks)
    assert steps.count("bias") == sum(block.downsample is not None for block in blocks)
    found = calls(own, x)
    assert found.count("rooftop::conv_act") == convolutions
    assert not {"aten::add", "aten::add_", "aten::relu", "aten::relu_"} & set(found)


def test_those_of_torchvision(torchvision_models: Any) -> None:
    model = torchvision_models.resnet18(weights=None, num_classes=3)
    fold_norms(model.eval())
    assert list(fused_with(model, torch.randn(1, 3, 32, 32)).values()).count("bias, sum, relu") == 8


def test_engine_fuses_what_it_is_told_to() -> None:
    torch.manual_seed(0)
    model, x = resnet.resnet18(num_classes=3).eval(), torch.randn(2, 3, 32, 32)
    engine = Engine(model, fuse=True, dtype=torch.float64, output_dtype=torch.float64)
    plain = Engine(model, dtype=torch.float64, output_dtype=torch.float64)
    torch.testing.assert_close(engine(x), plain(x), rtol=1e-12, atol=1e-12)
    assert len(engine.report.fused) == 20
    assert engine.report.fused["layer1.0.conv2"] == "bias, sum, relu"
    assert "20 convolutions fused" in str(engine.report)
    assert plain.report.fused == {}
    assert "fused" not in str(plain.report)


# ---- fused operations ----------------------------------------------------------------------------------------------

FUSED: dict[str, tuple[Callable[..., Any], dict[str, str]]] = {
    "a module": (lambda m, x: m.relu(m.a(x)), {"a": "bias, relu"}),
    "a function": (lambda m, x: functional.silu(m.a(x)), {"a": "bias, silu"}),
    "another function": (lambda m, x: torch.sigmoid(m.a(x)), {"a": "bias, sigmoid"}),
    "a method": (lambda m, x: m.a(x).relu(), {"a": "bias, relu"}),
    "a method in place": (lambda m, x: m.a(x).relu_(), {"a": "bias, relu"}),
    "a sum": (lambda m, x: (m.a(x) + x).relu(), {"a": "bias, sum, relu"}),
    "a sum from the left": (lambda m, x: torch.relu(x + m.a(x)), {"a": "bias, sum, relu"}),
    "a sum by a method": (lambda m, x: m.a(x).add_(x).relu_(), {"a": "bias, sum, relu"}),
    "a sum of two": (lambda m, x: (m.a(x) + m.b(x)).relu(), {"a": "bias", "b": "bias, sum, relu"}),
    "one after the other": (lambda m, x: m.b(m.a(x).relu()), {"a": "bias, relu", "b": "bias"}),
    "gelu": (lambda m, x: functional.gelu(m.a(x), approximate="tanh"), {"a": "bias, gelu_tanh"}),
    "relu6": (lambda m, x: functional.relu6(m.a(x), inplace=True), {"a": "bias, relu6"}),
    "hardswish": (lambda m, x: functional.hardswish(m.a(x)), {"a": "bias, hardswish"}),
    "hardsigmoid": (lambda m, x: functional.hardsigmoid(m.a(x)), {"a": "bias, hardsigmoid"}),
}


@pytest.mark.parametrize("name", FUSED)
def test_a_chain_is_one_operator(name: str) -> None:
    function, expected = FUSED[name]
    model = Net(function)
    assert {"b": "bias"} | fused_with(model, X) == {"b": "bias"} | expected
    fuse_convolutions(model)
    assert set(calls(model, X.double())) == {"rooftop::conv_act"}


# ---- separate operations -------------------------------------------------------------------------------------------


def used_twice(model: Net, x: Tensor) -> Tensor:
    y = model.a(x)
    return y.relu() + y


def activated_in_place_and_shared(model: Net, x: Tensor) -> Tensor:
    y = model.a(x)
    z = y.relu_()
    return y + 2 * z


def sum_used_twice(model: Net, x: Tensor) -> Tensor:
    y = model.a(x) + x
    return y.relu() - y


def input_changed_between(model: Net, x: Tensor) -> Tensor:
    y = model.a(x)
    x.mul_(2)
    return y.relu() + x


def scaled_sum(model: Net, x: Tensor) -> Tensor:
    return torch.add(model.a(x), x, alpha=2).relu()


def given_out(model: Net, x: Tensor) -> Tensor:
    return model.a(x)


def of_two_calls(model: Net, x: Tensor) -> Tensor:
    return model.a(model.a(x).relu()).relu()


NOT_FUSED = [
    used_twice, activated_in_place_and_shared, sum_used_twice, input_changed_between, scaled_sum, given_out,
    of_two_calls,
]  # fmt: skip


@pytest.mark.parametrize("function", NOT_FUSED)
def test_what_may_not_be_fused_stays_apart(function: Callable[..., Any]) -> None:
    assert fused_with(Net(function), X)["a"] == "bias"


def test_a_sum_in_place_changes_the_tensor_that_it_is_added_to() -> None:
    """A trace cannot distinguish `z += y` from `z = z + y`, but the call can."""

    def added(model: Net, x: Tensor) -> tuple[Tensor, Tensor]:
        same = z = x * 2
        z += model.a(x)
        return z.relu(), same

    fused_with(Net(added), X)


@pytest.mark.parametrize("other", [torch.ones(4, 1, 1), torch.ones(2, 4, 1, 5), 3.0, torch.ones(2, 4, 5, 5).int()])
def test_a_sum_that_is_broadcast_or_cast_is_that_of_pytorch(other: Any) -> None:
    class Shifted(Net):
        def forward(self, x: Tensor, other: Any) -> Tensor:
            return (self.a(x) + other).relu()

    model = Shifted(given_out).double()
    expected = model(X.double(), other)
    assert fuse_convolutions(model).fused["a"] == "bias, sum, relu"
    torch.testing.assert_close(model(X.double(), other), expected, rtol=1e-12, atol=1e-12)


def test_hooks_stay() -> None:
    model, seen = Net(lambda m, x: m.relu(m.a(x))), []
    model.a.register_forward_hook(lambda module, args, output: seen.append(type(output)))
    fusing = fuse_convolutions(model)
    assert fusing.left == {"a": "it has hooks"}
    assert "a: left alone, it has hooks" in str(fusing)
    model(X)
    assert seen == [Tensor]
    backward = Net(lambda m, x: m.relu(m.a(x)))
    backward.a.register_full_backward_hook(lambda *_: seen.append(None))
    assert fuse_convolutions(backward).left == {"a": "it has hooks"}
    other = Net(lambda m, x: m.relu(m.a(x)))
    other.relu.register_forward_pre_hook(lambda module, args: seen.append(type(args[0])))
    assert fuse_convolutions(other).fused["a"] == "bias"
    other(X)
    assert seen == [Tensor, Tensor]


def test_what_conv_act_cannot_compute_is_left() -> None:
    for options in ({"padding_mode": "reflect"}, {}):
        model = Net(lambda m, x: m.relu(m.a(x)), **options)
        model.b.padding = "same"
        left = fuse_convolutions(model).left
        assert left.keys() == ({"a", "b"} if options else {"b"})
        assert "'same'" in left["b"]
    model = Net(given_out, bias=False)
    assert fuse_convolutions(model).left == {"a": "no operation follows that could be fused with it"}
    replaced = Net(lambda m, x: m.relu(m.a(x)))
    replaced.a.forward = lambda x: x  # type: ignore[method-assign]
    assert fuse_convolutions(replaced).left == {"a": "its forward was replaced"}

    class Twice(nn.Conv2d):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    subclass = nn.Sequential(Twice(4, 4, 1), nn.ReLU())
    assert fuse_convolutions(subclass).left == {"0": "it is a Twice, which may do more than a Conv2d"}
    of_complex = nn.Sequential(nn.Conv2d(4, 4, 1, dtype=torch.complex64), nn.Sigmoid())
    expected = of_complex(X.to(torch.complex64))
    assert fuse_convolutions(of_complex).left == {"0": "its weights are torch.complex64"}
    torch.testing.assert_close(of_complex(X.to(torch.complex64)), expected)


def test_a_trace_is_of_calls_without_gradients() -> None:
    def by_gradients(model: Net, x: Tensor) -> Tensor:
        return model.a(x).relu() if torch.is_grad_enabled() else model.a(x) * 2

    assert fused_with(Net(by_gradients), X)["a"] == "bias"


def test_autocast_is_that_of_the_convolution() -> None:
    def within(model: Net, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = model.a(x)
        return (y + x).relu() if model.training else y.relu()

    model = Net(within).eval()
    expected = model(X)
    assert fuse_convolutions(model).fused["a"] == "bias, relu"
    for found, plain in ((model(X), expected), (model.train()(X), expected.new_zeros((), dtype=torch.float32))):
        assert found.dtype == plain.dtype
    torch.testing.assert_close(model.eval()(X), expected, rtol=0.02, atol=0.02)


def test_what_cannot_be_traced_is_fused_as_far_as_it_can_be() -> None:
    def branches(model: Net, x: Tensor) -> Tensor:
        return model.a(x).relu() if x.sum() > 0 else model.a(x)

    assert fused_with(Net(branches), X)["a"] == "bias"
    inner = Net(lambda m, x: m.relu(m.a(x)))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) if float(x.sum()) != 0.5 else x

    assert fused_with(Outer(), X)["inner.a"] == "bias, relu"


# ---- another way than the trace ------------------------------------------------------------------------------------


def promised(function: Callable[..., Any]) -> tuple[Any, Any]:
    """A function of a convolution's promise, and of its result."""
    model = Net(lambda m, x: m.relu(m.a(x)))
    plain = model.a(X)
    fuse_convolutions(model)
    with torch.no_grad():
        return function(model.a(X)), function(plain.detach())


@pytest.mark.parametrize(
    "function",
    [
        lambda y: y.shape,
        lambda y: y.mean(dim=1),
        lambda y: torch.cat([y, y]),
        lambda y: functional.max_pool2d(y, 2),
        lambda y: (y.relu_(), y.sum())[1],
        lambda y: (y + 1, y.relu(), y - 1 if isinstance(y, Tensor) else y.sub(1))[2],
        lambda y: (y.add_(X), y.sum())[1],
        lambda y: (y.sum(), y.relu())[1],
        lambda y: functional.relu(functional.relu(y).add(y)),
        lambda y: (1 - y * 2) / (y**2 + 1),
        lambda y: (-y)[:, 1:] @ abs(y[0, 0]),
        lambda y: torch.where((y > 0) & (y != 1), y, torch.zeros(())),
        lambda y: torch.stack([len(y) * row for row in y]),
        lambda y: (y.__setitem__((slice(None), 0), 7.0), y.relu())[1],
        lambda y: (y.__imul__(2), y.relu())[1],
        lambda y: torch.from_numpy(np.asarray(y)),
        lambda y: nn.Conv2d(4, 4, 1).requires_grad_(False).eval()(y).mean() * 0 + y,
    ],
)
def test_whatever_is_done_with_a_promise_gets_the_right_numbers(function: Callable[..., Any]) -> None:
    ours, theirs = promised(function)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_promise_whose_input_was_changed_is_an_error() -> None:
    model, x = Net(lambda m, x: m.relu(m.a(x))), X.clone()
    fuse_convolutions(model)
    y = model.a(x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match=r"changed before its activation: .* fuse=False"):
        y.relu()
    y = model.a(x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="changed before its activation"):
        (y + X).relu()


@pytest.mark.parametrize("function", [lambda y: y, lambda y: {"result": [y]}, lambda y: y * 2])
def test_an_engine_whose_model_goes_another_way_gives_tensors(function: Callable[..., Any]) -> None:
    class Switched(Net):
        other = False

        def forward(self, x: Tensor) -> Any:
            return function(self.b(self.a(x))) if self.other else self.relu(self.b(self.relu(self.a(x))))

    model = Switched(given_out).eval()
    engine = Engine(model, fuse=True)
    assert engine.report.fused == {"a": "bias, relu", "b": "bias, relu"}
    model.other = engine.model.other = True  # type: ignore[assignment]
    with torch.no_grad():
        torch.testing.assert_close(engine(X), model(X))


def test_a_copy_of_a_fused_model_has_its_own_weights() -> None:
    model = Net(lambda m, x: m.relu(m.a(x)))
    fuse_convolutions(model)
    own = copy.deepcopy(model)
    own.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()})
    assert not own(X).any()
    assert model(X).any()


def test_a_single_image() -> None:
    model = Net(lambda m, x: m.relu(m.a(x)))
    expected = model(X[0])
    fuse_convolutions(model)
    torch.testing.assert_close(model(X[0]), expected)
    with pytest.raises(TypeError, match="conv2d"):
        model([1.0])


def test_no_module() -> None:
    with pytest.raises(TypeError, match=r"must be a torch.nn.Module, got list"):
        fuse_convolutions([])  # type: ignore[arg-type]
    assert str(fuse_convolutions(nn.Linear(2, 2))) == "no convolutions"


# ---- depthwise convolutions ----------------------------------------------------------------------------------------


def depthwise_network() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 48, 3, 2, 1)]
    for kernel, stride in ((3, 1), (5, 2), (7, 1)):
        layers += [nn.Conv2d(48, 48, kernel, stride, kernel // 2, groups=48), nn.BatchNorm2d(48), nn.Hardswish()]
        layers += [nn.Conv2d(48, 48, 1, bias=False), nn.BatchNorm2d(48), nn.ReLU()]
    return nn.Sequential(*layers)


def calibrated(model: nn.Module, x: Tensor) -> nn.Module:
    """The model in evaluation mode, with statistics of these images in its norms."""
    model.train()(x)
    return model.eval()


def laid_out(model: nn.Module) -> list[bool]:
    """For each depthwise convolution, whether its weights are stored as (KH, KW, C)."""
    found = [each for each in model.modules() if isinstance(each, nn.Conv2d) and each.groups == 48]
    return [is_fastest(each.weight) for each in found if each.weight is not None]


@pytest.mark.parametrize("order", [(ChannelsLast, FuseConvolutions), (FuseConvolutions, ChannelsLast)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rules_in_either_order_lay_out_depthwise_weights(
    order: tuple[type[Rule], type[Rule]], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convolution_rules, "only_on_gpu", lambda candidate: None)
    torch.manual_seed(0)
    x = torch.randn(4, 3, 30, 26)
    model = calibrated(depthwise_network(), x).to(dtype)
    candidate = Candidate.of(model, None, training=False)
    for kind in order:
        candidate.changes[kind.name] = kind().apply(candidate)
    assert laid_out(candidate.model) == [dtype is torch.bfloat16] * 3
    assert laid_out(model) == [False] * 3
    assert candidate.frozen
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())
        error, allowed = ((call(x.to(dtype)) - exact).abs().max() for call in (candidate.call, model))
    assert error <= 2 * allowed + 1e-6


# ---- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_a_fused_engine_on_a_gpu_is_as_accurate_as_a_plain_one(name: str, batch: int) -> None:
    torch.manual_seed(0)
    model, x = getattr(resnet, name)().cuda().eval(), torch.randn(batch, 3, 224, 224, device="cuda")
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())
    fused, plain = Engine(model), Engine(model, fuse=False)
    assert len(fused.report.fused) == sum(isinstance(module, nn.Conv2d) for module in model.modules())
    assert plain.report.fused == {}
    for _ in range(2):
        error, allowed = (fused(x) - exact).abs().max(), (plain(x) - exact).abs().max()
        assert error <= 2 * allowed
    assert fused.report.graphs is not None
    assert len(fused.report.graphs) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 32])
def test_depthwise_convolutions_have_a_kernel(batch: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(batch, 3, 60, 52, device="cuda")
    model = calibrated(depthwise_network().cuda(), x)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())
    fused, plain = Engine(model), Engine(model, fuse=False)
    assert laid_out(fused.model) == [True] * 3
    with count_launches() as launched:
        fused(x)
    if torch.cuda.get_device_capability() == (9, 0):
        assert launched["conv_act_depthwise"] in range(3, 30, 3), launched
    for _ in range(2):
        error, allowed = (fused(x) - exact).abs().max(), (plain(x) - exact).abs().max()
        assert error <= 2 * allowed


# ---- changes after fusing ------------------------------------------------------------------------------------------


def relu_of_sum(net: Net, x: Tensor) -> Tensor:
    result: Tensor = net.relu(net.a(x) + x)
    return result


CHANGES: dict[str, Callable[[Net], Any]] = {
    "pruned": lambda net: prune.l1_unstructured(net.a, "weight", 0.5),
    "parametrized": lambda net: parametrizations.weight_norm(net.a),
    "bias as a buffer": lambda net: (net.a.__delattr__("bias"), net.a.register_buffer("bias", torch.ones(4).double())),
    "lists": lambda net: net.a.__dict__.update(stride=[1, 1], padding=[1, 1], dilation=[1, 1]),
    "numbers": lambda net: net.a.__dict__.update(stride=1, padding=1, dilation=1),
    "padding by name": lambda net: net.a.__dict__.update(padding="same"),
    "an activation that is not in place": lambda net: setattr(net.relu, "inplace", False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_convolution_may_change_after_fusing(change: str) -> None:
    torch.manual_seed(0)
    model = Net(relu_of_sum).double().eval()
    own = copy.deepcopy(model)
    assert fuse_convolutions(own).fused == {"a": "bias, sum, relu", "b": "bias"}
    for each in (model, own):
        CHANGES[change](each)
    with torch.no_grad():
        torch.testing.assert_close(own(X.double()), model(X.double()), rtol=1e-12, atol=1e-12)


def test_an_activation_may_change_after_fusing() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.GELU()).double().eval()
    own = copy.deepcopy(model)
    assert fuse_convolutions(own).fused == {"0": "bias, gelu"}
    for each in (model, own):
        each[1].approximate = "tanh"
    with torch.no_grad():
        torch.testing.assert_close(own(X.double()), model(X.double()), rtol=1e-12, atol=1e-12)
        plain = torch.linspace(-2, 2, 9)
        assert torch.equal(own[1](plain), model[1](plain))


def test_a_promise_takes_attributes_and_weak_references() -> None:
    def marks(net: Net, x: Tensor) -> Tensor:
        y = net.a(x)
        y.mark = 1
        assert weakref.ref(y)() is y
        result: Tensor = net.relu(y)
        return result

    model = Net(marks).double().eval()
    own = copy.deepcopy(model)
    fuse_convolutions(own)
    with torch.no_grad():
        torch.testing.assert_close(own(X.double()), model(X.double()), rtol=1e-12, atol=1e-12)


def test_a_forward_that_asks_for_a_tensor_goes_the_same_way() -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.act = nn.Conv2d(3, 4, 3), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            if isinstance(y, Tensor):
                y = y * 2
            return self.act(y)  # type: ignore[no-any-return]

    assert fused_with(Asks(), torch.randn(2, 3, 9, 9)) == {"conv": "bias"}


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", ["ReLU", "SiLU", "ReLU6", "Hardswish", "Hardsigmoid"])
@torch.no_grad()
def test_modules_of_activations(name: str, inplace: bool) -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3), getattr(nn, name)(inplace=inplace), nn.Conv2d(4, 4, 1)).double()
    expected = model(X.double())
    assert fuse_convolutions(model).fused == {"0": f"bias, {name.lower()}", "2": "bias"}
    torch.testing.assert_close(model(X.double()), expected)
