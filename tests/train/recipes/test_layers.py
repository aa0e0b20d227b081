"""Layers are counted from the input as in the publications on layer decay."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from rooftop.errors import InputError
from rooftop.models import detr_resnet50, minkunet18, model_entry, resnet18, swin_t, swin_v2_t
from rooftop.train.recipes.layers import layers_of
from rooftop.train.recipes.parameter_kinds import kinds_of


@pytest.fixture(autouse=True)
def _without_values() -> Iterator[None]:
    """Build a model without values, because only its structure matters."""
    with torch.device("meta"):
        yield


class Vit(nn.Module):
    """A small model with timm's structure."""

    def __init__(self) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 4))
        self.pos_embed = nn.Parameter(torch.zeros(5, 4))
        self.patch_embed = nn.Sequential(nn.Conv2d(3, 4, 2, 2), nn.Flatten(2))
        block = [nn.TransformerEncoderLayer(4, 2, 8, batch_first=True) for _ in range(3)]
        self.blocks = nn.Sequential(*block)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 2)


class Staged(nn.Module):
    """Stages are modules that contain blocks, and blocks have nested parts."""

    def __init__(self) -> None:
        super().__init__()

        def stage() -> nn.Module:
            held = nn.Module()
            held.blocks = nn.ModuleList(block() for _ in range(2))
            held.downsample = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
            return held

        def block() -> nn.Module:
            held = nn.Module()
            held.body = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Sequential(nn.Linear(4, 4)))
            return held

        self.stem = nn.Linear(4, 4)
        self.stages = nn.Sequential(stage(), stage())
        self.head = nn.Linear(4, 2)


def firsts(model: nn.Module) -> list[str]:
    layers = layers_of(model)
    assert sorted(name for layer in layers for name in layer) == sorted(name for name, _ in model.named_parameters())
    return [layer[0] for layer in layers]


def test_resnet() -> None:
    assert firsts(resnet18())[:3] == ["conv1.weight", "layer1.0.conv1.weight", "layer1.1.conv1.weight"]
    layers = layers_of(resnet18())
    assert len(layers) == 10
    assert layers[0] == ["conv1.weight", "bn1.weight", "bn1.bias"]
    assert layers[-1] == ["fc.weight", "fc.bias"]
    assert "layer2.0.downsample.0.weight" in layers[3]


@pytest.mark.parametrize("build", [swin_t, swin_v2_t])
def test_swin_has_its_mergings_in_the_block_before(build: type[nn.Module]) -> None:
    layers = layers_of(build())
    assert len(layers) == 14  # SimMIM: the sum of depths (2, 2, 6, 2), and two
    assert all(name.startswith("features.0.") for name in layers[0])
    assert {name.rsplit(".", 2)[0] for name in layers[2]} >= {"features.1.1", "features.2"}
    assert layers[-1] == ["norm.weight", "norm.bias", "head.weight", "head.bias"]


def test_a_hybrid_has_its_mergings_in_the_block_before() -> None:
    layers = layers_of(model_entry("hybrid_t").build())
    assert len(layers) == 14  # stem, 4 blocks of convolutions, 8 of attention, head
    assert "layer3.0.reduction.weight" in layers[4]


def test_vit() -> None:
    layers = layers_of(Vit())
    assert len(layers) == 5
    assert layers[0] == ["cls_token", "pos_embed", "patch_embed.0.weight", "patch_embed.0.bias"]
    assert layers[-1] == ["norm.weight", "norm.bias", "head.weight", "head.bias"]


def test_blocks_of_stages_are_layers_and_parts_of_blocks_are_not() -> None:
    layers = layers_of(Staged())
    assert len(layers) == 6
    assert "stages.0.downsample.1.weight" in layers[2]
    assert sum(name.startswith("stages.1.blocks.0.") for name in layers[3]) == 4


def test_plain_sequence() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    assert layers_of(model)[0] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert firsts(model) == ["0.weight", "3.weight", "5.weight"]


def test_what_comes_first_must_be_known() -> None:
    small = {"num_classes": 2, "width": 16, "heads": 2, "encoder_layers": 1, "decoder_layers": 1}
    with pytest.raises(InputError, match=r"several parts \(backbone.*layer_decay=1"):
        layers_of(detr_resnet50(**{**small, "encoder_layers": 2, "decoder_layers": 2, "feed_forward": 16}))
    with pytest.raises(InputError, match=r"Linear has no consecutive layers.*layer_decay=1"):
        layers_of(nn.Linear(3, 2))


def test_a_u_net_counts_down_and_up() -> None:
    found = firsts(minkunet18(4, 5))
    assert found[0].startswith("stem")
    assert found[-1].startswith("head")
    assert found.index(next(name for name in found if name.startswith("decoder"))) > len(found) // 3


def test_kinds() -> None:
    kinds = kinds_of(swin_v2_t())
    assert kinds["features.1.0.norm1.weight"] == "norm"
    assert kinds["features.1.0.norm1.bias"] == "norm"
    assert kinds["head.weight"] == "weight"
    assert kinds["head.bias"] == "bias"
    assert kinds["features.1.0.attn.logit_scale"] == "bias"
    assert kinds_of(swin_t())["features.1.0.attn.relative_position_bias_table"] == "bias"
    vit = kinds_of(Vit())
    assert {vit["cls_token"], vit["pos_embed"], vit["blocks.0.self_attn.in_proj_bias"]} == {"bias"}
    assert vit["blocks.0.self_attn.in_proj_weight"] == "weight"
    assert set(kinds_of(nn.LSTM(2, 3)).values()) == {"weight", "bias"}
