"""Hybrids: convolutions on fine maps, attention on coarse ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rooftop.errors import InputError
from rooftop.models import Hybrid, builtin_models, hybrid_s, hybrid_t
from rooftop.models.vision.resnet import BasicBlock, ResNet
from rooftop.models.vision.swin import SwinBlock


def small(**options: object) -> Hybrid:
    sizes: dict[str, object] = {"channels": 8, "depths": (1, 1, 2, 1), "num_heads": (2, 4), "num_classes": 5}
    return Hybrid(**{**sizes, **options})  # type: ignore[arg-type]


def test_sizes_are_those_of_its_parents() -> None:
    with torch.device("meta"):
        counts = {build.__name__: sum(p.numel() for p in build().parameters()) for build in (hybrid_t, hybrid_s)}
    assert counts == {"hybrid_t": 12_912_376, "hybrid_s": 30_115_840}
    assert {"hybrid_t", "hybrid_s"} <= set(builtin_models())


@pytest.mark.parametrize(("size", "small_images"), [((64, 96), False), ((8, 8), True), ((17, 11), True)])
def test_maps_halve_and_attention_is_on_the_coarse_ones(size: tuple[int, int], small_images: bool) -> None:
    model = small(small_images=small_images, window_size=(2, 2)).eval()
    seen: dict[str, tuple[int, ...]] = {}
    for name, module in model.named_children():
        module.register_forward_hook(lambda _, __, y, name=name: seen.update({name: tuple(y.shape)}))
    with torch.no_grad():
        assert model(torch.randn(2, 3, *size)).shape == (2, 5)
    down = 1 if small_images else 4
    high, wide = (-(-side // down) for side in size)
    assert seen["layer1"] == (2, 8, high, wide)
    assert seen["layer2"] == (2, 16, -(-high // 2), -(-wide // 2))
    assert seen["layer3"] == (2, -(-high // 4), -(-wide // 4), 32)
    assert seen["layer4"] == (2, -(-high // 8), -(-wide // 8), 64)
    for stage, kind in ((model.layer1, BasicBlock), (model.layer2, BasicBlock), (model.layer3, SwinBlock)):
        assert any(isinstance(each, kind) for each in stage.modules())


def test_every_parameter_is_trained() -> None:
    model = small(small_images=True, window_size=(2, 2))
    model(torch.randn(4, 3, 16, 16)).square().sum().backward()
    assert not [name for name, each in model.named_parameters() if each.grad is None]


def test_stochastic_depth_grows_to_the_last_block() -> None:
    model = small(stochastic_depth_prob=0.4)
    rates = [each.stochastic_depth.p for each in model.modules() if isinstance(each, SwinBlock)]
    assert rates == pytest.approx([0, 0.2, 0.4])


@pytest.mark.parametrize("wrong", [{"depths": (1, 1)}, {"num_heads": (2,)}, {"window_size": (7,)}])
def test_wrong_numbers_of_stages(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="expected 4 depths, 2 num_heads and 2 numbers for window_size"):
        small(**wrong)


def test_it_has_no_published_weights() -> None:
    with pytest.raises(InputError, match="hybrid_t has none of these: give a file"):
        hybrid_t(weights="DEFAULT")


def test_a_resnet_for_small_images_keeps_the_size_and_may_be_narrow() -> None:
    model = ResNet(BasicBlock, (1, 1, 1, 1), num_classes=3, small_images=True, channels=4).eval()
    assert isinstance(model.maxpool, nn.Identity)
    with torch.no_grad():
        assert model.layer1(model.maxpool(model.conv1(torch.randn(1, 3, 8, 8)))).shape == (1, 4, 8, 8)
    assert model.fc.in_features == 32
