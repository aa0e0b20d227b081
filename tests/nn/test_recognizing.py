"""RMS norms of other libraries are recognized by their computation, and no other module is mistaken for one."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rooftop.cost import CountingMode
from rooftop.nn import replace
from rooftop.nn.recognizing import RmsNorm, recognized
from rooftop.nn.replacing import ON_CPU
from rooftop.testing import assert_as_accurate


class Norm(nn.Module):
    """A norm like Llama's: computed in float32, and rounded before the product with the weight."""

    def __init__(self, columns: int = 24, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(columns))
        self.variance_epsilon = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.to(hidden_states.dtype)


class Offset(Norm):
    """A norm like Gemma's: weights begin at zero, and the result is rounded once."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (x * (1.0 + self.weight.float())).type_as(hidden_states)


@pytest.mark.parametrize("columns", [2, 24, 1000])
@pytest.mark.parametrize("eps", [1e-5, 1e-6, 1e-8, 0.01])
@pytest.mark.parametrize(("kind", "offset"), [(Norm, 0), (Offset, 1)])
def test_what_it_computes_is_found(kind: type[Norm], offset: int, columns: int, eps: float) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        module = kind(columns, eps).to(dtype)
        before, state = module.weight.detach().clone(), torch.get_rng_state()
        assert recognized(module) == RmsNorm(eps, offset)
        assert torch.equal(module.weight, before)
        assert torch.equal(torch.get_rng_state(), state)


def changed(change: Callable[[Norm, Tensor, Tensor], Any]) -> nn.Module:
    """A module whose forward is `change(self, input, result of the norm)`."""

    class Other(Norm):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return change(self, hidden_states, super().forward(hidden_states))  # type: ignore[no-any-return]

    return Other()


def with_bias() -> nn.Module:
    module = Norm()
    module.bias = nn.Parameter(torch.zeros(24))
    return module


def with_buffer() -> nn.Module:
    module = Norm()
    module.register_buffer("seen", torch.zeros(1))
    return module


def with_hook() -> nn.Module:
    module = Norm()
    module.register_forward_hook(lambda *_: None)
    return module


def with_another_forward() -> nn.Module:
    module = Norm()
    module.forward = lambda x: x  # type: ignore[method-assign]
    return module


class TwoArguments(Norm):
    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(hidden_states) if gate is None else super().forward(hidden_states) * gate


OTHERS = {
    "another input": lambda: changed(lambda norm, x, y: y + 1e-3 * x),
    "the mean taken away": lambda: changed(lambda norm, x, y: y - y.mean(-1, keepdim=True)),
    "a sum": lambda: changed(lambda norm, x, y: y * 24**0.5),
    "in training only": lambda: changed(lambda norm, x, y: y * 2 if norm.training else y),
    "in evaluation only": lambda: changed(lambda norm, x, y: y if norm.training else y * 2),
    "for large values only": lambda: changed(lambda norm, x, y: y.clamp(-9, 9) if x.abs().max() > 50 else y),
    "one row alone": lambda: changed(lambda norm, x, y: y.squeeze() if x.dim() == 1 else y * (x.dim() < 3)),
    "another dtype": lambda: changed(lambda norm, x, y: y.double()),
    "a tuple": lambda: changed(lambda norm, x, y: (y, x)),
    "its input changed": lambda: changed(lambda norm, x, y: x.add_(1) * 0 + y),
    "an error": lambda: changed(lambda norm, x, y: 1 / 0),
    "numbers of zero": lambda: changed(lambda norm, x, y: y.where(x != 0, 1.0)),
    "a bias": with_bias,
    "a buffer": with_buffer,
    "a hook": with_hook,
    "another forward": with_another_forward,
    "two arguments": TwoArguments,
    "PyTorch's": lambda: nn.LayerNorm(24),
    "a scale alone": lambda: nn.PReLU(24),
    "a weight of one number": lambda: Norm(1),
}


@pytest.mark.parametrize("other", OTHERS)
def test_nothing_else_is_taken_for_one(other: str) -> None:
    module = OTHERS[other]()
    assert recognized(module) is None
    kind = type(module)
    if not isinstance(module, nn.LayerNorm):
        assert replace(module, only=["RMSNorm"]).swapped == {}
        assert type(module) is kind


@pytest.mark.parametrize("kind", [Norm, Offset])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_is_as_accurate_with_gradients(kind: type[Norm], dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    module = kind(40, 1e-5).to(dtype)
    x = torch.randn(6, 5, 40).to(dtype).requires_grad_()
    slope = torch.randn(6, 5, 40)

    def outcome(norm: nn.Module, x: Tensor) -> list[Tensor]:
        y = norm(x)
        return [y, *torch.autograd.grad(y, [x, *norm.parameters()], slope.to(y.dtype))]

    eager = outcome(module, x)
    ours = copy.deepcopy(module)
    assert replace(ours, only=["RMSNorm"]).swapped == {"": "RMSNorm"}

    def exactly(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * (weight + (kind is Offset))

    x64, w64 = (t.detach().double().requires_grad_() for t in (x, module.weight))
    y64 = exactly(x64, w64)
    exact = [y64, *torch.autograd.grad(y64, [x64, w64], slope.to(dtype).double())]
    for what, (got, plain, truth) in enumerate(zip(outcome(ours, x), eager, exact, strict=True)):
        assert_as_accurate(got, plain, truth, what=f"tensor {what}")


def test_it_stays_the_module_that_it_was() -> None:
    module = Norm()
    parameter, keys = module.weight, list(module.state_dict())
    replace(module, only=["RMSNorm"])
    assert module.weight is parameter
    assert list(module.state_dict()) == keys
    assert isinstance(module, Norm)
    assert type(module).__name__ == "Norm"
    with CountingMode() as counted:
        module(torch.randn(2, 24, requires_grad=True))
    assert "rooftop::rms_norm" in {record.name for record in counted.records}
    assert replace(module, only=["RMSNorm"]).swapped == {}, "it is Rooftop's already"


def test_other_dtypes_and_autocast_are_as_before() -> None:
    plain = Norm()
    module = copy.deepcopy(plain)
    replace(module, only=["RMSNorm"])
    half = torch.randn(3, 24, dtype=torch.bfloat16)
    assert module(half).dtype == plain(half).dtype == torch.float32  # the weight is float32
    with torch.autocast("cpu", torch.bfloat16):
        x = torch.randn(3, 24)
        assert torch.equal(module(x), plain(x))
    assert torch.equal(module(hidden_states=x), module(x))
    with pytest.raises(TypeError, match="other"):
        module(other=x)
    with pytest.raises(TypeError, match="takes 2 positional arguments"):
        module(x, x)


def test_copies_and_pickles_are_recognized_norms_too() -> None:
    module = Norm()
    replace(module, only=["RMSNorm"])
    x = torch.randn(3, 24, requires_grad=True)
    held = io.BytesIO()
    torch.save(module, held)
    held.seek(0)
    for same in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(held, weights_only=False)):
        assert type(same) is type(module)
        assert torch.equal(same(x), module(x))
        assert same.weight is not module.weight


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "t5"])
def test_models_of_transformers(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    if family == "t5":
        config = transformers.T5Config(vocab_size=50, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
        model = transformers.T5EncoderModel(config)
    else:
        name = {"llama": "Llama", "qwen3": "Qwen3", "gemma2": "Gemma2"}[family]
        config = getattr(transformers, f"{name}Config")(**sizes)
        model = getattr(transformers, f"{name}Model")(config)
    model.eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.normal_()
    tokens = torch.randint(50, (2, 7))
    with torch.no_grad():
        expected = model(input_ids=tokens).last_hidden_state
        swapped = replace(model, only=["RMSNorm"]).swapped
        found = model(input_ids=tokens).last_hidden_state
    norms = [
        name for name, module in model.named_modules() if type(module).__name__.endswith(("RMSNorm", "T5LayerNorm"))
    ]
    assert list(swapped) == norms
    assert len(norms) >= 5
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_named_neither_kinds_nor_inputs_a_cpu_keeps_its_own() -> None:
    model = nn.Sequential(Norm(), Offset())
    done = replace(model)
    assert done.swapped == {}
    assert done.left == {"0": ON_CPU, "1": ON_CPU}
    assert [type(module) for module in model] == [Norm, Offset]


@pytest.mark.gpu
def test_named_neither_kinds_nor_inputs_a_gpu_gets_one_launch() -> None:
    model = nn.Sequential(Norm(), Offset(), nn.LayerNorm(24)).cuda()
    assert replace(model).swapped == {"0": "RMSNorm", "1": "RMSNorm"}
