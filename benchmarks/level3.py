"""Twelve networks of KernelBench's level 3, in KernelBench's sizes (Ouyang et al. 2025, arXiv:2502.10517).

The code is new, written after the networks' public descriptions: GoogLeNet (Szegedy et al. 2015), VGG (Simonyan and
Zisserman 2015), SqueezeNet (Iandola et al. 2016), MobileNet (Howard et al. 2017), ShuffleNet (Zhang et al. 2018), ViT
(Dosovitskiy et al. 2021), GPT (Radford et al. 2018), U-Net (Ronneberger et al. 2015), NetVLAD (Arandjelovic et al.
2016) and Mamba-2 (Dao and Gu 2024). `NETWORKS` has each network, its number in KernelBench, and the shape of its input.
All run in float32, as in KernelBench.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, pad


def mlp(sizes: Sequence[int]) -> nn.Sequential:
    """Linear layers of these sizes, with ReLU between them."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


# ---- networks of convolutions --------------------------------------------------------------------------------------


class Concatenated(nn.Module):
    """Branches with the same input; their outputs are concatenated along the channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def inception(channels: int, one: int, three: tuple[int, int], five: tuple[int, int], pooled: int) -> nn.Module:
    return Concatenated(
        nn.Conv2d(channels, one, 1),
        nn.Sequential(nn.Conv2d(channels, three[0], 1), nn.Conv2d(three[0], three[1], 3, padding=1)),
        nn.Sequential(nn.Conv2d(channels, five[0], 1), nn.Conv2d(five[0], five[1], 5, padding=2)),
        nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(channels, pooled, 1)),
    )


def googlenet() -> nn.Sequential:
    """Inception v1, with ReLU only in the stem, as in KernelBench."""
    return nn.Sequential(
        *(nn.Conv2d(3, 64, 7, 2, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
        *(nn.Conv2d(64, 64, 1), nn.ReLU(), nn.Conv2d(64, 192, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
        inception(192, 64, (96, 128), (16, 32), 32),
        inception(256, 128, (128, 192), (32, 96), 64),
        nn.MaxPool2d(3, 2, 1),
        inception(480, 192, (96, 208), (16, 48), 64),
        inception(512, 160, (112, 224), (24, 64), 64),
        inception(512, 128, (128, 256), (24, 64), 64),
        inception(512, 112, (144, 288), (32, 64), 64),
        inception(528, 256, (160, 320), (32, 128), 128),
        nn.MaxPool2d(3, 2, 1),
        inception(832, 256, (160, 320), (32, 128), 128),
        inception(832, 384, (192, 384), (48, 128), 128),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1024, 1000)),
    )


def vgg16() -> nn.Sequential:
    layers: list[nn.Module] = []
    channels = 3
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), mlp((512 * 7 * 7, 4096, 4096, 1000)))


def fire(channels: int, squeezed: int, expanded: int) -> nn.Sequential:
    wide = Concatenated(nn.Conv2d(squeezed, expanded, 1), nn.Conv2d(squeezed, expanded, 3, padding=1))
    return nn.Sequential(nn.Conv2d(channels, squeezed, 1), nn.ReLU(), wide, nn.ReLU())


def squeezenet() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(3, 96, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True)),
        *(fire(96, 16, 64), fire(128, 16, 64), fire(128, 32, 128), nn.MaxPool2d(3, 2, ceil_mode=True)),
        *(fire(256, 32, 128), fire(256, 48, 192), fire(384, 48, 192), fire(384, 64, 256)),
        *(nn.MaxPool2d(3, 2, ceil_mode=True), fire(512, 64, 256)),
        *(nn.Conv2d(512, 1000, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    )


def normed(channels: int, width: int, size: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """A convolution without bias, followed by batch norm and ReLU."""
    convolution = nn.Conv2d(channels, width, size, stride, size // 2, groups=groups, bias=False)
    return [convolution, nn.BatchNorm2d(width), nn.ReLU()]


def mobilenet() -> nn.Sequential:
    """MobileNet v1."""
    layers = normed(3, 32, 3, 2)
    channels = 32
    strides = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1))
    for width, stride in strides:
        layers += [*normed(channels, channels, 3, stride, channels), *normed(channels, width, 1)]
        channels = width
    return nn.Sequential(*layers, nn.AvgPool2d(7), nn.Flatten(), nn.Linear(1024, 1000))


class ShuffleUnit(nn.Module):
    """Two grouped 1x1 convolutions around a depthwise one. After the first convolution, the channels of the groups are
    interleaved."""

    def __init__(self, channels: int, width: int, groups: int = 3) -> None:
        super().__init__()
        middle = width // 4
        self.groups = groups
        self.first = nn.Sequential(*normed(channels, middle, 1, groups=groups))
        self.second = nn.Sequential(*normed(middle, middle, 3, groups=middle)[:-1])
        self.third = nn.Sequential(*normed(middle, width, 1, groups=groups))
        self.shortcut = nn.Sequential(*([] if channels == width else normed(channels, width, 1)[:-1]))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).unflatten(1, (self.groups, -1)).transpose(1, 2).flatten(1, 2)
        return self.third(self.second(y)) + self.shortcut(x)  # type: ignore[no-any-return]


def shufflenet() -> nn.Sequential:
    """ShuffleNet v1 without strides in its units, as in KernelBench."""
    layers = [*normed(3, 24, 3, 2), nn.MaxPool2d(3, 2, 1)]
    channels = 24
    for width, count in ((240, 4), (480, 8), (960, 4)):
        for _ in range(count):
            layers.append(ShuffleUnit(channels, width))
            channels = width
    return nn.Sequential(*layers, *normed(960, 1024, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1024, 1000))


class UNet(nn.Module):
    """A U-Net whose activation is a softmax over the last dimension."""

    def __init__(self, channels: int = 8, classes: int = 4, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        widths = [width << i for i in range(depth + 1)]
        self.down = nn.ModuleList(self.double(a, b) for a, b in zip([channels, *widths], widths, strict=False))
        pairs = list(zip(widths[1:], widths, strict=False))[::-1]
        self.raised = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, 2) for a, b in pairs)
        self.up = nn.ModuleList(self.double(a, b) for a, b in pairs)
        self.last = nn.Conv2d(width, classes, 1)

    @staticmethod
    def double(channels: int, width: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for before in (channels, width):
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.BatchNorm2d(width), nn.Softmax(-1)]
        return nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for i, block in enumerate(self.down):
            x = block(x if i == 0 else nn.functional.max_pool2d(x, 2))
            kept.append(x)
        kept.pop()
        for raised, block in zip(self.raised, self.up, strict=True):
            x = block(torch.cat([raised(x), kept.pop()], 1))
        return self.last(x)  # type: ignore[no-any-return]


# ---- attention, clusters and a state space ---------------------------------------------------------------------------


class Patches(nn.Module):
    """A vision transformer built from PyTorch's layers, with a class token."""

    def __init__(self, size: int = 224, patch: int = 16, width: int = 512, depth: int = 6, classes: int = 10) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, (size // patch) ** 2 + 1, width))
        block = nn.TransformerEncoderLayer(width, 8, 2048, 0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, depth, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.Linear(width, 2048), nn.GELU(), nn.Linear(2048, classes))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), tokens], 1) + self.places
        return self.head(self.blocks(tokens)[:, 0])  # type: ignore[no-any-return]


class CausalAttention(nn.Module):
    """Causal attention by two matrix products and a mask. `weights` turns scores into weights."""

    def __init__(self, width: int, heads: int, tokens: int, weights: Callable[[Tensor], Tensor], out: bool) -> None:
        super().__init__()
        self.heads, self.weights = heads, weights
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width) if out else nn.Identity()
        self.register_buffer("mask", torch.ones(tokens, tokens).tril().bool())
        self.mask: Tensor

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(2, (self.heads, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, 2))
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])  # (B, H, T, T)
        scores = scores.masked_fill(~self.mask[: x.shape[1], : x.shape[1]], -torch.inf)
        return self.out((self.weights(scores) @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class TanhGelu(nn.Module):
    """GELU by tanh, written out."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class MiniGptBlock(nn.Module):
    def __init__(self, width: int = 768, heads: int = 8, tokens: int = 1024) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads, tokens, lambda scores: scores.softmax(-1), out=True)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), TanhGelu(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.feed(self.second(x))  # type: ignore[no-any-return]


def relu_attention() -> nn.Module:
    return CausalAttention(768, 12, 1024, torch.relu, out=False)


class NetVlad(nn.Module):
    """Assign features to clusters softly, and return the normalized sums of their residuals."""

    def __init__(self, clusters: int = 32, width: int = 512) -> None:
        super().__init__()
        scale = 1 / math.sqrt(width)
        self.assigned = nn.Parameter(scale * torch.randn(width, clusters))
        self.norm = nn.BatchNorm1d(clusters)
        self.centers = nn.Parameter(scale * torch.randn(1, width, clusters))

    def forward(self, x: Tensor) -> Tensor:  # (B, N, D)
        soft = self.norm(x.flatten(0, 1) @ self.assigned).softmax(1).unflatten(0, x.shape[:2])  # (B, N, K)
        left = (soft.transpose(1, 2) @ x).transpose(1, 2) - soft.sum(1, keepdim=True) * self.centers  # (B, D, K)
        return normalize(normalize(left).flatten(1))


class StateSpace(nn.Module):
    """Mamba-2's scan by chunks of a sequence, with constant A, B and C."""

    def __init__(
        self, batch: int, tokens: int = 128, heads: int = 8, width: int = 64, state: int = 16, chunk: int = 64
    ) -> None:
        super().__init__()
        self.chunk = chunk
        self.A = nn.Parameter(torch.randn(batch, tokens, heads))
        self.B = nn.Parameter(torch.randn(batch, tokens, heads, state))
        self.C = nn.Parameter(torch.randn(batch, tokens, heads, state))

    @staticmethod
    def decays(x: Tensor) -> Tensor:
        """exp of the sums of `x` between each two positions: (..., T) to (..., T, T), with 0 above the diagonal."""
        sums = x.cumsum(-1)
        between = sums[..., :, None] - sums[..., None, :]
        below = torch.ones(x.shape[-1], x.shape[-1], dtype=torch.bool, device=x.device).tril()
        return between.masked_fill(~below, -torch.inf).exp()

    def forward(self, x: Tensor) -> Tensor:  # (B, T, H, P)
        x, b, c = (each.unflatten(1, (-1, self.chunk)) for each in (x, self.B, self.C))
        a = self.A.unflatten(1, (-1, self.chunk)).permute(0, 3, 1, 2)  # (B, H, C, L)
        sums = a.cumsum(-1)
        within = torch.einsum("bclhn,bcshn,bhcls,bcshp->bclhp", c, b, self.decays(a), x)
        states = torch.einsum("bclhn,bhcl,bclhp->bchpn", b, (sums[..., -1:] - sums).exp(), x)
        states = torch.cat([torch.zeros_like(states[:, :1]), states], 1)
        carried = torch.einsum("bhzc,bchpn->bzhpn", self.decays(pad(sums[..., -1], (1, 0))), states)[:, :-1]
        across = torch.einsum("bclhn,bchpn,bhcl->bclhp", c, carried, sums.exp())
        return (within + across).flatten(1, 2)


NETWORKS: dict[str, tuple[int, Callable[[], nn.Module], tuple[int, ...]]] = {
    "deep_narrow_mlp": (3, lambda: mlp((8192, *[1024] * 16, 8192)), (1024, 8192)),
    "googlenet": (7, googlenet, (10, 3, 224, 224)),
    "vgg16": (11, vgg16, (10, 3, 224, 224)),
    "squeezenet": (18, squeezenet, (64, 3, 512, 512)),
    "mobilenet_v1": (19, mobilenet, (10, 3, 224, 224)),
    "shufflenet": (26, shufflenet, (10, 3, 224, 224)),
    "vision_transformer": (28, Patches, (2, 3, 224, 224)),
    "mini_gpt_block": (44, MiniGptBlock, (128, 512, 768)),
    "unet_softmax": (45, UNet, (8, 8, 64, 512)),
    "net_vlad": (46, NetVlad, (2048, 100, 512)),
    "mamba2": (48, lambda: StateSpace(2048), (2048, 128, 8, 64)),
    "relu_attention": (50, relu_attention, (16, 1024, 768)),
}
