"""Deferred weight gradients equal those of an ordinary backward, and do not exist before they are computed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from rooftop.models.gpt.blocks import Block
from rooftop.models.gpt.configs import GptConfig
from rooftop.models.gpt.layouts import parallel_gpt
from rooftop.parallel import ColumnParallelLinear, RowParallelLinear
from rooftop.parallel.deferred import defer_weight_gradients

CONFIG = GptConfig(vocabulary=17, layers=2, width=16, heads=4, kv_heads=4, hidden=24, positions=8, dropout=0.2)
LLAMA = GptConfig(vocabulary=17, layers=2, width=16, heads=4, kv_heads=2, hidden=24, positions=8, norm="rms",
                  position="rope", activation="swiglu", biases=False)  # fmt: skip
TEXT = torch.randint(17, (2, 9), generator=torch.Generator().manual_seed(0))


def model_and_loss(config: GptConfig, **options: bool | str) -> tuple[nn.Module, Callable[[], Tensor]]:
    model = parallel_gpt(config, seed=1, dtype=torch.float64, **options)
    return model, lambda: model(TEXT[:, :-1], TEXT[:, 1:], step=3)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def linear_weights(model: nn.Module) -> set[str]:
    linear = ColumnParallelLinear | RowParallelLinear
    return {f"{name}.weight" for name, each in model.named_modules() if isinstance(each, linear) and "layers" in name}


@pytest.mark.parametrize("config", [CONFIG, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("recompute", [False, True, "selective"])
def test_later_gradients_are_those_of_backward_at_once(config: GptConfig, recompute: bool | str) -> None:
    plain, loss = model_and_loss(config, recompute=recompute)
    loss().backward()
    expected = gradients(plain)
    model, loss = model_and_loss(config, recompute=recompute)
    deferral = defer_weight_gradients(model)
    with deferral.collecting() as later:
        loss().backward()
    assert len(later) == 4 * config.layers  # qkv, out, up, down
    assert expected.keys() - gradients(model).keys() == linear_weights(model)
    later.make()
    assert len(later) == 0
    found = gradients(model)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-14)
    model.zero_grad()
    loss().backward()  # outside of the context, everything is computed at once
    assert all(torch.equal(found[name], gradient) for name, gradient in gradients(model).items())


def test_later_gradients_are_added_and_run_the_hooks_of_parameters() -> None:
    layer = ColumnParallelLinear(3, 2, bias=False)
    deferral, x, seen = defer_weight_gradients(layer), torch.ones(5, 3), []
    layer.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    with deferral.collecting() as first:
        layer(x).sum().backward()
    with deferral.collecting() as second:
        layer(2 * x).sum().backward()
    assert layer.weight.grad is None
    first.make()
    second.make()
    assert [float(each.max()) for each in seen] == [5.0, 15.0]
    layer(x).sum().backward()
    assert float(seen[2].max()) == 20.0


def test_a_frozen_weight_gets_none() -> None:
    layer = RowParallelLinear(3, 2)
    layer.weight.requires_grad_(False)
    deferral, x = defer_weight_gradients(layer), torch.ones(5, 3, requires_grad=True)
    with deferral.collecting() as later:
        layer(x).sum().backward()
    assert len(later) == 0
    assert x.grad is not None
    assert layer.bias.grad is not None


def test_collecting_within_collecting_is_refused() -> None:
    deferral = defer_weight_gradients(nn.Linear(2, 2))
    with deferral.collecting(), pytest.raises(RuntimeError, match="block is already active"), deferral.collecting():
        pass
    with deferral.collecting():
        pass


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # PyTorch's tracer reads it
def test_compiled_blocks_leave_them_to_later_too() -> None:
    """PyTorch's zero bubble refuses compiled blocks. Rooftop's blocks are compiled around their linear layers."""
    plain, loss = model_and_loss(CONFIG)
    loss().backward()
    expected = gradients(plain)
    model, loss = model_and_loss(CONFIG)
    deferral = defer_weight_gradients(model)
    for block in model.layers.values():
        assert isinstance(block, Block)
        block.compile(backend="aot_eager")
    with deferral.collecting() as later:
        loss().backward()
    assert len(later) == 4 * CONFIG.layers
    later.make()
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients(model)[name], gradient, rtol=0, atol=1e-14)
