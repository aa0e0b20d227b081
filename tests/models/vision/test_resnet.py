"""Every ResNet is torchvision's: keys, shapes, order, outputs, gradients and running statistics."""

from __future__ import annotations

from functools import partial
from types import ModuleType

import pytest
import torch
from torch import nn

from rooftop import models

NAMES = sorted(name for name in models.builtin_models() if "resne" in name)


@pytest.mark.parametrize("name", NAMES)
def test_state_dict_is_torchvisions_and_its_size_is_documented(name: str, torchvision_models: ModuleType) -> None:
    with torch.device("meta"):
        ours, theirs = getattr(models, name)(), getattr(torchvision_models, name)()
    assert [(k, v.shape, v.dtype) for k, v in ours.state_dict().items()] == [
        (k, v.shape, v.dtype) for k, v in theirs.state_dict().items()
    ]
    assert [name for name, _ in ours.named_modules()] == [name for name, _ in theirs.named_modules()]
    count = sum(p.numel() for p in ours.parameters())
    assert f"{count:,} parameters" in (getattr(models, name).__doc__ or "")


def test_resnet50_has_the_published_size() -> None:
    model = models.resnet50()
    assert sum(p.numel() for p in model.parameters()) == 25_557_032
    assert len(model.state_dict()) == 320


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("resnet18", {}),
        ("resnet18", {"zero_init_residual": True, "num_classes": 7}),
        ("resnet50", {"replace_stride_with_dilation": (False, True, True)}),
        ("resnext50_32x4d", {}),
    ],
)
def test_outputs_gradients_and_statistics_are_torchvisions(
    name: str, options: dict[str, object], torchvision_models: ModuleType
) -> None:
    torch.manual_seed(0)
    with torch.device("meta"):
        pair = getattr(models, name)(**options), getattr(torchvision_models, name)(**options)
    ours, theirs = (model.to_empty(device="cpu") for model in pair)
    with torch.no_grad():
        for key, value in ours.state_dict().items():
            if value.dim() > 1:
                value.uniform_(-1, 1).mul_((3 / value[0].numel()) ** 0.5)
            else:
                value.fill_(key.endswith(("weight", "running_var")))
    theirs.load_state_dict(ours.state_dict(), strict=True)
    x = torch.randn(2, 3, 65, 47)
    for train in (False, True):
        outputs, gradients = [], []
        for model in (ours, theirs):
            out = model.train(train)(x)
            outputs.append(out.detach())
            gradients.append(torch.autograd.grad(out.square().sum(), list(model.parameters())))
        assert outputs[0].std() > 0
        assert torch.equal(*outputs)
        assert all(map(torch.equal, *gradients))
        assert all(map(torch.equal, ours.buffers(), theirs.buffers()))


def test_initialization_follows_the_same_random_numbers(torchvision_models: ModuleType) -> None:
    torch.manual_seed(3)
    ours = models.resnet18()
    torch.manual_seed(3)
    theirs = torchvision_models.resnet18()
    for (name, a), b in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_an_empty_batch_gives_an_empty_result() -> None:
    assert models.resnet18().eval()(torch.randn(0, 3, 64, 64)).shape == (0, 1000)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replace_stride_with_dilation": (True,)}, "expected 4 layers and None or 3 values"),
        ({"replace_stride_with_dilation": ()}, "expected 4 layers and None or 3 values"),
        ({"groups": 2}, "BasicBlock has no groups"),
        ({"width_per_group": 128}, "got groups=1, width_per_group=128"),
    ],
)
def test_wrong_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        models.resnet18(**options)


def test_a_norm_without_weights_needs_no_zeros() -> None:
    for norm in (nn.InstanceNorm2d, partial(nn.BatchNorm2d, affine=False)):
        model = models.resnet18(norm_layer=norm, zero_init_residual=True)
        assert not any("bn" in name for name, _ in model.named_parameters())


def test_norm_layer_is_used() -> None:
    model = models.resnet18(norm_layer=lambda channels: nn.GroupNorm(4, channels))
    assert not any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
