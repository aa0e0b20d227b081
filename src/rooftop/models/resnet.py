"""ResNet, ResNeXt and Wide ResNet, with torchvision's keys.

He et al. 2015, "Deep Residual Learning for Image Recognition"; the stride of a bottleneck sits in its 3x3 convolution
("v1.5", Goyal et al. 2017). Xie et al. 2016 add groups (ResNeXt); Zagoruyko and Komodakis 2016 widen the 3x3.

A block computes relu(f(x) + shortcut(x)); the shortcut is the identity unless shape or stride changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

Norm = Callable[[int], nn.Module]


def conv3x3(channels: int, out: int, stride: int = 1, groups: int = 1, dilation: int = 1) -> nn.Conv2d:
    """3x3 convolution that keeps the size (at stride 1)."""
    return nn.Conv2d(channels, out, 3, stride, dilation, dilation, groups, bias=False)


def conv1x1(channels: int, out: int, stride: int = 1) -> nn.Conv2d:
    """1x1 convolution."""
    return nn.Conv2d(channels, out, 1, stride, bias=False)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions: (B, C, H, W) -> (B, planes, H / stride, W / stride).

    Raises:
        ValueError: groups, width or dilation, which only the bottleneck has.
    """

    expansion: ClassVar[int] = 1

    def __init__(
        self,
        channels: int,
        planes: int,
        stride: int,
        downsample: nn.Module | None,
        groups: int,
        base_width: int,
        dilation: int,
        norm: Norm,
    ) -> None:
        super().__init__()
        if groups != 1 or base_width != 64 or dilation != 1:
            raise ValueError(
                "BasicBlock has no groups, width or dilation: use a ResNet of bottlenecks (resnet50 and deeper); "
                f"got groups={groups}, width_per_group={base_width}, dilation={dilation}"
            )
        self.conv1 = conv3x3(channels, planes, stride)
        self.bn1 = norm(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = conv3x3(planes, planes)
        self.bn2 = norm(planes)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))  # (B, planes, H / stride, W / stride)
        x = self.bn2(self.conv2(x))
        x += shortcut
        return self.relu(x)


class Bottleneck(nn.Module):
    """1x1 down, 3x3, 1x1 up: (B, C, H, W) -> (B, 4 * planes, H / stride, W / stride)."""

    expansion: ClassVar[int] = 4

    def __init__(
        self,
        channels: int,
        planes: int,
        stride: int,
        downsample: nn.Module | None,
        groups: int,
        base_width: int,
        dilation: int,
        norm: Norm,
    ) -> None:
        super().__init__()
        width = int(planes * (base_width / 64)) * groups
        self.conv1 = conv1x1(channels, width)
        self.bn1 = norm(width)
        self.conv2 = conv3x3(width, width, stride, groups, dilation)
        self.bn2 = norm(width)
        self.conv3 = conv1x1(width, planes * self.expansion)
        self.bn3 = norm(planes * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))  # (B, width, H, W)
        x = self.relu(self.bn2(self.conv2(x)))  # (B, width, H / stride, W / stride)
        x = self.bn3(self.conv3(x))  # (B, 4 * planes, H / stride, W / stride)
        x += shortcut
        return self.relu(x)


class ResNet(nn.Module):
    """Stem, four stages of blocks, global average, linear head: (B, 3, H, W) -> (B, num_classes).

    Args:
        block: BasicBlock or Bottleneck.
        layers: blocks in each of the four stages.
        num_classes: width of the head.
        zero_init_residual: start each block as the identity (the last norm's weight is 0).
        groups, width_per_group: of the bottleneck's 3x3 (ResNeXt, Wide ResNet).
        replace_stride_with_dilation: for stages 2 to 4, keep the resolution and dilate instead.
        norm_layer: makes a norm from a number of channels.

    Raises:
        ValueError: `layers` or `replace_stride_with_dilation` of another length.
    """

    def __init__(
        self,
        block: type[BasicBlock | Bottleneck],
        layers: Sequence[int],
        num_classes: int = 1000,
        zero_init_residual: bool = False,
        groups: int = 1,
        width_per_group: int = 64,
        replace_stride_with_dilation: Sequence[bool] | None = None,
        norm_layer: Norm | None = None,
    ) -> None:
        super().__init__()
        dilate = list(replace_stride_with_dilation or (False, False, False))
        if len(layers) != 4 or len(dilate) != 3:
            raise ValueError(
                "expected 4 layers and None or 3 values for replace_stride_with_dilation, "
                f"got {list(layers)} and {replace_stride_with_dilation!r}"
            )
        self._norm = norm_layer or nn.BatchNorm2d
        self._channels, self._dilation = 64, 1
        self._groups, self._base_width = groups, width_per_group
        self.conv1 = nn.Conv2d(3, 64, kernel_size=7, stride=2, padding=3, bias=False)
        self.bn1 = self._norm(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.layer1 = self._make_layer(block, 64, layers[0])
        self.layer2 = self._make_layer(block, 128, layers[1], stride=2, dilate=dilate[0])
        self.layer3 = self._make_layer(block, 256, layers[2], stride=2, dilate=dilate[1])
        self.layer4 = self._make_layer(block, 512, layers[3], stride=2, dilate=dilate[2])
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(512 * block.expansion, num_classes)
        self._initialize(zero_init_residual)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))  # (B, 64, H / 2, W / 2)
        x = self.maxpool(x)  # (B, 64, H / 4, W / 4)
        x = self.layer1(x)  # (B, 64 e, H / 4, W / 4), e = block.expansion
        x = self.layer2(x)  # (B, 128 e, H / 8, W / 8)
        x = self.layer3(x)  # (B, 256 e, H / 16, W / 16)
        x = self.layer4(x)  # (B, 512 e, H / 32, W / 32)
        x = torch.flatten(self.avgpool(x), 1)  # (B, 512 e)
        return self.fc(x)

    def _make_layer(
        self, block: type[BasicBlock | Bottleneck], planes: int, blocks: int, stride: int = 1, dilate: bool = False
    ) -> nn.Sequential:
        """One stage; its first block changes stride and width, and keeps the dilation of the stage before."""
        first_dilation = self._dilation
        if dilate:
            self._dilation *= stride
            stride = 1
        out = planes * block.expansion
        downsample = None
        if stride != 1 or self._channels != out:
            downsample = nn.Sequential(conv1x1(self._channels, out, stride), self._norm(out))
        shape = (self._groups, self._base_width)
        stage = [block(self._channels, planes, stride, downsample, *shape, first_dilation, self._norm)]
        self._channels = out
        stage += [block(out, planes, 1, None, *shape, self._dilation, self._norm) for _ in range(1, blocks)]
        return nn.Sequential(*stage)

    def _initialize(self, zero_init_residual: bool) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, (nn.BatchNorm2d, nn.GroupNorm)):
                nn.init.ones_(module.weight)
                nn.init.zeros_(module.bias)
        if zero_init_residual:
            for module in self.modules():
                if isinstance(module, (BasicBlock, Bottleneck)):
                    last = module.bn3 if isinstance(module, Bottleneck) else module.bn2
                    nn.init.zeros_(last.weight)  # type: ignore[arg-type]


def resnet18(**options: Any) -> ResNet:
    """ResNet-18: 11,689,512 parameters. Options as in `ResNet`."""
    return ResNet(BasicBlock, (2, 2, 2, 2), **options)


def resnet34(**options: Any) -> ResNet:
    """ResNet-34: 21,797,672 parameters."""
    return ResNet(BasicBlock, (3, 4, 6, 3), **options)


def resnet50(**options: Any) -> ResNet:
    """ResNet-50: 25,557,032 parameters."""
    return ResNet(Bottleneck, (3, 4, 6, 3), **options)


def resnet101(**options: Any) -> ResNet:
    """ResNet-101: 44,549,160 parameters."""
    return ResNet(Bottleneck, (3, 4, 23, 3), **options)


def resnet152(**options: Any) -> ResNet:
    """ResNet-152: 60,192,808 parameters."""
    return ResNet(Bottleneck, (3, 8, 36, 3), **options)


def resnext50_32x4d(**options: Any) -> ResNet:
    """ResNeXt-50 with 32 groups of width 4: 25,028,904 parameters."""
    return ResNet(Bottleneck, (3, 4, 6, 3), **{"groups": 32, "width_per_group": 4, **options})


def resnext101_32x8d(**options: Any) -> ResNet:
    """ResNeXt-101 with 32 groups of width 8: 88,791,336 parameters."""
    return ResNet(Bottleneck, (3, 4, 23, 3), **{"groups": 32, "width_per_group": 8, **options})


def resnext101_64x4d(**options: Any) -> ResNet:
    """ResNeXt-101 with 64 groups of width 4: 83,455,272 parameters."""
    return ResNet(Bottleneck, (3, 4, 23, 3), **{"groups": 64, "width_per_group": 4, **options})


def wide_resnet50_2(**options: Any) -> ResNet:
    """Wide ResNet-50, 3x3 twice as wide: 68,883,240 parameters."""
    return ResNet(Bottleneck, (3, 4, 6, 3), **{"width_per_group": 128, **options})


def wide_resnet101_2(**options: Any) -> ResNet:
    """Wide ResNet-101, 3x3 twice as wide: 126,886,696 parameters."""
    return ResNet(Bottleneck, (3, 4, 23, 3), **{"width_per_group": 128, **options})
