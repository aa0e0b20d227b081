"""`rooftop.nn.replace` changes how a model is computed and nothing else."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rooftop.nn
from rooftop.cost import CountingMode
from rooftop.nn import KINDS, replace
from rooftop.nn.replacing import CALLS


class OwnNorm(nn.LayerNorm):
    """A user's subclass of a layer norm."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8, padding_idx=1)
        self.norm = nn.LayerNorm(8)
        self.rms = nn.RMSNorm(8)
        self.own = OwnNorm(8)
        self.head = nn.Linear(8, 10)
        self.again = self.norm
        self.loss = nn.CrossEntropyLoss(label_smoothing=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.again(self.rms(self.norm(self.own(self.embedding(tokens)))))
        return self.loss(self.head(x), tokens)


TOKENS = torch.tensor([1, 2, 3, 9, 2])


def gradients(model: nn.Module) -> list[Tensor]:
    loss = model(TOKENS)
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


def test_all_that_it_knows_is_swapped_and_gives_the_same() -> None:
    model = Model()
    expected = gradients(model)
    done = replace(model, only=KINDS)
    assert done.swapped == {
        "embedding": "Embedding", "norm": "LayerNorm", "rms": "RMSNorm", "loss": "CrossEntropyLoss"
    }  # fmt: skip
    assert done.left == {}
    with CountingMode() as counted:
        found = gradients(model)
    torch.testing.assert_close(found, expected)
    names = {record.name for record in counted.records}
    assert names >= {f"rooftop::{n}" for n in ("embedding", "layer_norm", "rms_norm", "cross_entropy_with_gradient")}
    assert str(done).splitlines()[0] == "embedding: Embedding"
    assert replace(model, only=KINDS).swapped == {}, "a second call finds nothing to replace"
    assert str(replace(model, only=KINDS)) == "nothing to replace"


def test_nothing_else_of_the_model_changes() -> None:
    model = Model().eval()
    model.norm.train()
    model.rms.to(torch.bfloat16)
    calls: list[Any] = []
    model.norm.register_forward_hook(lambda module, inputs, output: calls.append(type(module)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    parameters, flags = list(model.parameters()), [m.training for m in model.modules()]
    state = copy.deepcopy(model.state_dict())
    replace(model, only=KINDS)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert [m.training for m in model.modules()] == flags
    assert model.again is model.norm
    assert type(model.own) is OwnNorm
    assert model.rms.weight.dtype == torch.bfloat16
    model.norm(torch.randn(3, 8))
    assert calls == [rooftop.nn.LayerNorm]
    torch.testing.assert_close(dict(model.state_dict()), dict(state), rtol=0, atol=0)
    model.rms.float()
    before = model.norm.weight.detach().clone()
    model(TOKENS).backward()
    optimizer.step()
    assert not torch.equal(model.norm.weight, before), "the optimizer still holds the parameters"


def test_a_replaced_model_is_copied_saved_and_compiled() -> None:
    model = Model()
    replace(model, only=KINDS)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    expected = model(TOKENS)
    loaded = torch.load(file, weights_only=False)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for other in (copy.deepcopy(model), loaded, compiled):
        torch.testing.assert_close(other(TOKENS), expected)


def test_the_model_itself_can_be_one() -> None:
    norm = nn.LayerNorm(4)
    assert replace(norm, only=KINDS).swapped == {"": "LayerNorm"}
    assert type(norm) is rooftop.nn.LayerNorm
    assert str(replace(nn.Softmax(0), only=KINDS)) == "the model: Softmax"


def test_without_kinds_and_inputs_it_swaps_only_what_is_never_slower() -> None:
    model = Model()
    done = replace(model)
    assert done.swapped == {}
    assert set(done.left) == {"embedding", "norm", "rms", "loss"}
    assert set(done.left.values()) == {CALLS}
    assert type(model.norm) is nn.LayerNorm
    structural = replace(nn.Sequential(nn.Softmax()))
    assert structural.left == {"0": "its dimension is unknown"}


def hooked_norm() -> nn.Module:
    norm = nn.LayerNorm(4)
    norm.forward = lambda x: x
    return norm


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (nn.Embedding(4, 2, max_norm=1.0), "it uses max_norm"),
        (nn.Embedding(4, 2, sparse=True, scale_grad_by_freq=True), "it uses scale_grad_by_freq and sparse"),
        (nn.Softmax(), "its dimension is unknown"),
        (hooked_norm(), "its forward was replaced"),
        (nn.RMSNorm(4, dtype=torch.complex64), "weight is torch.complex64 on cpu"),
    ],
)
def test_what_would_not_give_the_same_is_left_alone(module: nn.Module, why: str) -> None:
    kind = type(module)
    done = replace(nn.Sequential(module), only=KINDS)
    assert done.left == {"0": why}
    assert str(done) == f"0: left alone, {why}"
    assert type(module) is kind


def test_parametrized_modules_and_those_of_other_libraries_are_not_looked_at() -> None:
    norm = nn.LayerNorm(4)
    nn.utils.parametrize.register_parametrization(norm, "weight", nn.Identity())
    done = replace(nn.Sequential(norm, OwnNorm(4), rooftop.nn.LayerNorm(4)), only=KINDS)
    assert done.swapped == done.left == {}


def test_only_some_kinds() -> None:
    model = Model()
    assert set(replace(model, only=(kind for kind in ["LayerNorm"])).swapped.values()) == {"LayerNorm"}
    assert set(replace(model, only=["RMSNorm"]).swapped.values()) == {"RMSNorm"}
    with pytest.raises(ValueError, match=r"`only` must be a list of some of .*LayerNorm.*, got \['Linear'\]"):
        replace(model, only=["Linear"])
    with pytest.raises(ValueError, match=r"got 'LayerNorm'; pass a list: \['LayerNorm'\]"):
        replace(model, only="LayerNorm")
    with pytest.raises(ValueError, match="`only` must be a list of some of"):
        replace(model, only=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got function"):
        replace(gradients)  # type: ignore[arg-type]


def test_targets_of_bytes_still_work() -> None:
    loss, x, target = nn.CrossEntropyLoss(ignore_index=3), torch.randn(3, 5), torch.tensor([1, 3, 4], dtype=torch.uint8)
    expected = loss(x, target)
    replace(loss, only=KINDS)
    torch.testing.assert_close(loss(x, target), expected)


def test_class_probabilities_still_work() -> None:
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    x, probabilities = torch.randn(3, 5), torch.rand(3, 5)
    expected = loss(x, probabilities)
    replace(loss, only=KINDS)
    torch.testing.assert_close(loss(x, probabilities), expected)
    with pytest.raises(TypeError, match="class indices"):
        rooftop.nn.CrossEntropyLoss(z_loss=0.1)(x, probabilities)


def test_transformers_of_torch_keep_their_results() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    x = torch.randn(2, 3, 16)
    for training in (True, False):
        layer.train(training)
        expected, other = layer(x), copy.deepcopy(layer)
        assert set(replace(other, only=KINDS).swapped) == {"norm1", "norm2"}
        torch.testing.assert_close(other(x), expected)
