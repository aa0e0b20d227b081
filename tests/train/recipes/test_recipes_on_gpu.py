"""On a GPU the numbers are those of the CPU up to rounding, and the host never waits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

from rooftop.testing import no_waiting_for_gpu
from rooftop.train.recipes import MeanWeights, Recipe, mixer, optimizer_of, set_rates
from rooftop.train.recipes.recipe import Mix

pytestmark = pytest.mark.gpu


@pytest.fixture
def _never_waits() -> Iterator[None]:
    with no_waiting_for_gpu():
        yield


def generator_of(place: int) -> np.random.Generator:
    return np.random.default_rng((3, place))


@pytest.mark.usefixtures("_never_waits")
@pytest.mark.parametrize("name", ["sgd", "adamw", "muon"])
def test_steps_and_the_mean(name: str) -> None:
    torch.manual_seed(0)
    models, means = [], []
    grads = [torch.randn(5, 4, 3, 3), torch.randn(5), torch.randn(6, 5, 1, 1), torch.randn(6)]
    recipe = Recipe.of({"optimizer": {"name": name, "lr": 0.01}})
    weights = nn.Sequential(nn.Conv2d(4, 5, 3), nn.Conv2d(5, 6, 1)).state_dict()
    for device in ("cpu", "cuda"):
        model = nn.Sequential(nn.Conv2d(4, 5, 3), nn.Conv2d(5, 6, 1))
        model.load_state_dict(weights)
        model.to(device, memory_format=torch.channels_last, non_blocking=True)  # type: ignore[call-overload]
        mean = MeanWeights(model, 0.9)
        optimizer = optimizer_of(model, recipe)
        for step in (1, 2, 3):
            for parameter, grad in zip(model.parameters(), grads, strict=True):
                # Gradients have the layout of their parameter, as from autograd, because fused optimizers refuse other
                # layouts.
                parameter.grad = torch.empty_like(parameter).copy_(grad, non_blocking=True)
            set_rates(optimizer, 1 / step)
            optimizer.step()
            mean.update(step)
        models.append(model)
        means.append(mean.state_dict())
    torch.cuda.set_sync_debug_mode("default")
    for one, two in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, two.cpu(), rtol=1e-4, atol=1e-3 if name == "muon" else 1e-5)
    for key, each in means[0].items():
        torch.testing.assert_close(each, means[1][key].cpu(), rtol=1e-4, atol=1e-3 if name == "muon" else 1e-5)


@pytest.mark.usefixtures("_never_waits")
def test_mixing() -> None:
    alter = mixer(Mix(mixup=0.5, cutmix=1.0), 10)
    assert alter is not None
    images = torch.rand(16, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    labels, places = torch.arange(16) % 10, torch.arange(16)
    there = images.to("cuda", non_blocking=True), labels.to("cuda", non_blocking=True)
    mixed, targets = alter(there, places, generator_of)
    assert mixed.is_contiguous(memory_format=torch.channels_last)
    torch.cuda.set_sync_debug_mode("default")
    expected = alter((images, labels), places, generator_of)
    torch.testing.assert_close(mixed.cpu(), expected[0])
    torch.testing.assert_close(targets.cpu(), expected[1])
