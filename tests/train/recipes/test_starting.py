"""Fine-tuning begins from a file in which everything except the head fits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from rooftop.errors import InputError, WeightsError
from rooftop.models import Detr
from rooftop.models.vision.resnet import BasicBlock, Bottleneck, ResNet
from rooftop.train.recipes.starting import start_from

SMALL = {"width": 16, "heads": 2, "encoder_layers": 1, "decoder_layers": 1, "feed_forward": 16, "queries": 3}


def resnet(classes: int, layers: int = 1, block: type[BasicBlock | Bottleneck] = BasicBlock) -> ResNet:
    return ResNet(block, (layers, 1, 1, 1), num_classes=classes)


def saved(model: nn.Module, path: Path, *without: str) -> Path:
    torch.save({key: each for key, each in model.state_dict().items() if not key.startswith(without or (" ",))}, path)
    return path


def test_a_head_for_other_classes_is_new(tmp_path: Path) -> None:
    torch.manual_seed(0)
    source, model = resnet(10), resnet(7)
    head = model.fc.weight.detach().clone()
    started = start_from(model, saved(source, tmp_path / "some.pth"), 7)
    assert started.renewed == ("fc.weight", "fc.bias")
    assert str(started) == (
        f"{tmp_path / 'some.pth'} (torchvision or timm): 72 of the model's 74 keys are loaded; "
        "new for 7 classes: fc.weight, fc.bias"
    )
    assert torch.equal(model.fc.weight, head)
    for key, each in model.state_dict().items():
        assert key.startswith("fc.") or torch.equal(each, source.state_dict()[key])


def test_a_head_for_as_many_classes_is_kept(tmp_path: Path) -> None:
    source, model = resnet(7), resnet(7)
    started = start_from(model, saved(source, tmp_path / "some.pth"), 7)
    assert started.renewed == ()
    assert torch.equal(model.fc.weight, source.fc.weight)


def test_a_backbone_has_no_head(tmp_path: Path) -> None:
    source, model = resnet(10), resnet(7)
    started = start_from(model, saved(source, tmp_path / "body.pth", "fc."), 7)
    assert started.renewed == ("fc.weight", "fc.bias")
    assert torch.equal(model.conv1.weight, source.conv1.weight)


def test_a_detector_has_one_class_more(tmp_path: Path) -> None:
    source, model = (Detr(BasicBlock, (1, 1, 1, 1), num_classes=n, **SMALL) for n in (4, 2))
    started = start_from(model, saved(source, tmp_path / "detr.pth"), 2)
    assert started.renewed == ("class_embed.weight", "class_embed.bias")
    assert torch.equal(model.query_embed.weight, source.query_embed.weight)


def test_a_users_model_by_its_own_keys(tmp_path: Path) -> None:
    def network(classes: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, classes))

    source, model = network(5), network(2)
    path = tmp_path / "own.pth"
    torch.save({**source.state_dict(), "extra": torch.zeros(1)}, path)
    started = start_from(model, path, 2)
    assert torch.equal(model[0].weight, source[0].weight)
    assert str(started).endswith(
        "new for 2 classes: 2.weight, 2.bias; 1 of the file's keys are not in the model: extra"
    )


def test_what_is_no_start(tmp_path: Path) -> None:
    model = resnet(7)
    before = model.conv1.weight.detach().clone()
    with pytest.raises(WeightsError, match=r"does not fit ResNet: .*in the file.*Only the head"):
        start_from(model, saved(resnet(7, 1, Bottleneck), tmp_path / "other.pth"), 7)
    with pytest.raises(WeightsError, match=r"layer1\.0\.conv1\.weight is missing"):
        start_from(model, saved(resnet(7), tmp_path / "part.pth", "layer1."), 7)
    with pytest.raises(InputError, match="is neither a file nor the name"):
        start_from(model, "IMAGENET", 7, name="resnet18")
    assert torch.equal(model.conv1.weight, before)
