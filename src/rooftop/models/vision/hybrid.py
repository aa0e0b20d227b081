"""A hybrid network: convolutions on fine feature maps, attention on coarse feature maps.

Dai et al. 2021, "CoAtNet: Marrying Convolution and Attention for All Data Sizes", found this order best: two stages of
convolutions, then two stages of attention. Fine maps contain edges and textures, for which small receptive fields
suffice; their many positions would make attention expensive. On coarse maps attention is cheap, and relates whole
objects to each other.

The first half has the stem and the stages of a ResNet; the second half has the patch mergings and the stages of a Swin
Transformer.

    model = hybrid_t(num_classes=10)

Every builder accepts `weights`, a file, and the options of `Hybrid`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rooftop.models.class_counts import check_classes
from rooftop.models.registry import register
from rooftop.models.vision.resnet import BasicBlock, Variant, conv3x3
from rooftop.models.vision.swin import GlobalAverage, PatchMerging, Permute, Stage, SwinBlock
from rooftop.models.weights.files import load_weights
from rooftop.nn import LayerNorm


class Hybrid(nn.Module):
    """Two stages of residual blocks, then two stages of blocks with window attention: (B, 3, H, W) -> (B, num_classes).

    A stem comes first; a global average and a linear head come last.

    Args:
        channels: channels of the first stage; each later stage has twice as many channels as the previous stage.
        depths: blocks in each of the four stages.
        num_heads: heads in the third and in the fourth stage.
        window_size: (h, w) of a window in positions.
        mlp_ratio: width of the MLP's hidden layer in a block with attention, as a multiple of the block's channels.
        dropout: dropout probability of the blocks with attention.
        stochastic_depth_prob: probability of stochastic depth of the last block; the probability grows linearly from 0
            at the first block with attention.
        num_classes: number of output logits.
        small_images: use a 3x3 stem that keeps the size, for images of about 64 pixels or less.

    Raises:
        ValueError: `depths` does not have four numbers, `num_heads` or `window_size` does not have two numbers, or the
            heads do not divide the channels.
    """

    def __init__(
        self,
        channels: int,
        depths: Sequence[int],
        num_heads: Sequence[int],
        window_size: Sequence[int] = (7, 7),
        mlp_ratio: float = 4.0,
        dropout: float = 0.0,
        stochastic_depth_prob: float = 0.1,
        num_classes: int = 1000,
        small_images: bool = False,
    ) -> None:
        super().__init__()
        check_classes(num_classes)
        if len(depths) != 4 or len(num_heads) != 2 or len(window_size) != 2:
            raise ValueError(
                "expected 4 depths, 2 num_heads and 2 numbers for window_size, got "
                f"{list(depths)}, {list(num_heads)} and {list(window_size)}"
            )
        norm = partial(LayerNorm, eps=1e-5)
        self.stem = _stem(channels, small_images)
        self.layer1 = _residual_stage(channels, channels, 1, depths[0])
        self.layer2 = _residual_stage(channels, 2 * channels, 2, depths[1])
        self.permute = Permute((0, 2, 3, 1))
        window = (window_size[0], window_size[1])
        half, last, number = (window[0] // 2, window[1] // 2), max(1, sum(depths[2:]) - 1), 0
        stages, width = [], 2 * channels
        for depth, heads in zip(depths[2:], num_heads, strict=True):
            merging = PatchMerging(width, norm)
            width *= 2
            blocks = []
            for place in range(depth):
                shift, probability = half if place % 2 else (0, 0), stochastic_depth_prob * number / last
                blocks.append(SwinBlock(width, heads, window, shift, mlp_ratio, dropout, probability, norm))
                number += 1
            stages.append(nn.Sequential(merging, Stage(*blocks)))
        self.layer3, self.layer4 = stages
        self.norm = norm(width)
        self.permute_back = Permute((0, 3, 1, 2))
        self.avgpool = GlobalAverage(1)
        self.head = nn.Linear(width, num_classes)
        _initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        # (B, C, H / 4, W / 4). With small_images, this map and all later maps are 4 times as high and wide as stated
        # here.
        x = self.stem(x)
        x = self.layer1(x)  # (B, C, H / 4, W / 4)
        x = self.layer2(x)  # (B, 2 * C, H / 8, W / 8)
        x = self.layer3(self.permute(x))  # (B, H / 16, W / 16, 4 * C)
        x = self.norm(self.layer4(x))  # (B, H / 32, W / 32, 8 * C)
        return self.head(torch.flatten(self.avgpool(self.permute_back(x)), 1))


def _stem(channels: int, small_images: bool) -> nn.Sequential:
    if small_images:
        return nn.Sequential(conv3x3(3, channels), nn.BatchNorm2d(channels), nn.ReLU(inplace=True))
    return nn.Sequential(
        nn.Conv2d(3, channels, kernel_size=7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
    )


def _residual_stage(channels: int, planes: int, stride: int, depth: int) -> nn.Sequential:
    blocks = [
        BasicBlock(channels if place == 0 else planes, planes, stride if place == 0 else 1, 1, Variant())
        for place in range(depth)
    ]
    return nn.Sequential(*blocks)


def _initialize(model: nn.Module) -> None:
    """Initialize convolutions as in a ResNet, and linear layers as in a Swin Transformer."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


@register
def hybrid_t(*, weights: str | Path | None = None, **options: Any) -> Hybrid:
    """A hybrid with about as many parameters as ResNet-18: 12,912,376 parameters."""
    return _built("hybrid_t", weights, {"channels": 64, "depths": (2, 2, 6, 2), "num_heads": (8, 16), **options})


@register
def hybrid_s(*, weights: str | Path | None = None, **options: Any) -> Hybrid:
    """A hybrid with about as many parameters as ResNet-50 and Swin-T: 30,115,840 parameters.

    The last two stages are the same as in Swin-T.
    """
    return _built("hybrid_s", weights, {"channels": 96, "depths": (3, 4, 6, 2), "num_heads": (12, 24), **options})


def _built(name: str, weights: str | Path | None, options: dict[str, Any]) -> Hybrid:
    model = Hybrid(**options)
    if weights is not None:
        load_weights(model, name, weights)
    return model
