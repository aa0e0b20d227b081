"""Swin Transformer, first and second version, with torchvision's keys.

Liu et al. 2021, "Swin Transformer: Hierarchical Vision Transformer using Shifted Windows"; Liu et al. 2022, "Swin
Transformer V2: Scaling Up Capacity and Resolution".

A block attends within windows of a feature map. In every second block, the windows are shifted by half their size, so
that information crosses the borders of the windows. Between stages, 2x2 positions are merged into one position with
twice the channels. Images can have any size: feature maps are padded to whole windows. If one window covers the whole
map, windows are not shifted.

    model = swin_t(weights="IMAGENET1K_V1").eval()

Every builder accepts `weights` and the options of `SwinTransformer`. `weights` is a published name, "DEFAULT" for the
newest weights, or a file (`rooftop.models.weights`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rooftop.kernels import window_attention
from rooftop.launch.operators import is_exporting
from rooftop.launch.symbolic import proxy_in, recorded_whole
from rooftop.models.class_counts import check_classes
from rooftop.models.registry import register
from rooftop.models.weights.files import load_weights
from rooftop.nn import LayerNorm, LinearAct
from rooftop.nn.constants import constant
from rooftop.nn.hooks import is_plain
from rooftop.nn.norms import norm_of_sum

Norm = Callable[[int], nn.Module]
Size = tuple[int, int]


class Permute(nn.Module):
    """Permute the dimensions of a tensor."""

    def __init__(self, dims: Sequence[int]) -> None:
        super().__init__()
        self.dims = tuple(dims)

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(self.dims)


class GlobalAverage(nn.AdaptiveAvgPool2d):
    """Global average pooling: (B, C, H, W) -> (B, C, 1, 1).

    For inputs that are channels last, torch's own pooling would return strides that ONNX cannot express.
    """

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3), keepdim=True)


class StochasticDepth(nn.Module):
    """Stochastic depth (Huang et al. 2016).

    In training, each image of a batch is set to zero with probability p; otherwise it is divided by 1 - p.

    Raises:
        ValueError: p is not a probability.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0 <= p <= 1:
            raise ValueError(f"a probability of stochastic depth must be between 0 and 1, got {p}")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return stochastic_depth(x, self.p, self.training)

    def extra_repr(self) -> str:
        return f"p={self.p}"


@recorded_whole
def stochastic_depth(x: Tensor, p: float, training: bool) -> Tensor:
    """Stochastic depth as a function.

    torch.fx records this function in training and in evaluation mode, so that nodes have the same names in both modes.
    """
    if not training or p == 0:
        return x
    kept = x.new_empty((x.shape[0],) + (1,) * (x.dim() - 1)).bernoulli_(1 - p)
    return x * (kept.div_(1 - p) if p < 1 else kept)


class PatchMerging(nn.Module):
    """Merge 2x2 positions into one: (B, H, W, C) -> (B, ceil(H / 2), ceil(W / 2), 2 * C)."""

    def __init__(self, channels: int, norm: Norm) -> None:
        super().__init__()
        self.reduction = nn.Linear(4 * channels, 2 * channels, bias=False)
        self.norm = norm(self.normalized(channels))

    @staticmethod
    def normalized(channels: int) -> int:
        """The number of features that the norm gets: 4 * C, because the norm comes before the linear reduction."""
        return 4 * channels

    def forward(self, x: Tensor) -> Tensor:
        return self.reduction(self.norm(gathered(x)))


class PatchMergingV2(PatchMerging):
    """Patch merging of Swin V2: the norm comes after the linear reduction."""

    @staticmethod
    def normalized(channels: int) -> int:
        return 2 * channels

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.reduction(gathered(x)))


@recorded_whole
def gathered(x: Tensor) -> Tensor:
    """Concatenate the channels of 2x2 positions, in column-major order.

    The result is (B, ceil(H / 2), ceil(W / 2), 4 * C); positions beyond the map are zeros.
    """
    batch, height, width, channels = x.shape
    down, across = (height + 1) // 2, (width + 1) // 2
    # a trace always pads, so that it is valid for all sizes
    traced = is_exporting() or torch._C._get_tracing_state() is not None
    if traced or 2 * down > height or 2 * across > width:
        x = nn.functional.pad(x, (0, 0, 0, 2 * across - width, 0, 2 * down - height))
    squares = x.reshape(batch, down, 2, across, 2, channels)
    return squares.permute(0, 1, 3, 4, 2, 5).reshape(batch, down, across, 4 * channels)


class ShiftedWindowAttention(nn.Module):
    """Attention in shifted windows, (B, H, W, C) -> (B, H, W, C).

    The module consists of linear layers around `rooftop.kernels.window_attention`.

    The bias of a pair of positions depends on the offset between the positions. A table has a row for each of the
    (2 h - 1)(2 w - 1) offsets, and `relative_position_index` (N * N,) maps each pair to a row.

    Args:
        channels: C.
        window, shift: (h, w) in positions.
        heads: the number of heads, which divides C.
        dropout: dropout probability of the result.
        attention_dropout: dropout probability of the attention weights in training. If it is above 0, PyTorch operators
            compute attention in training; the kernel still computes it in evaluation.

    Raises:
        ValueError: the heads do not divide the channels, or attention_dropout is not a probability.
    """

    relative_position_index: Tensor

    def __init__(
        self,
        channels: int,
        window: Size,
        shift: Size,
        heads: int,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if channels % heads:
            raise ValueError(f"{heads} heads do not divide {channels} channels")
        if not 0 <= attention_dropout <= 1:
            raise ValueError(f"a probability of attention_dropout must be between 0 and 1, got {attention_dropout}")
        self.attention_dropout = attention_dropout
        self.window, self.shift, self.heads, self.dropout = window, shift, heads, dropout
        self.qkv = nn.Linear(channels, 3 * channels)
        self.proj = nn.Linear(channels, channels)
        self._define_bias()
        self.register_buffer("relative_position_index", relative_positions(window))

    def _define_bias(self) -> None:
        table = torch.zeros((2 * self.window[0] - 1) * (2 * self.window[1] - 1), self.heads)
        self.relative_position_bias_table = nn.Parameter(table)
        nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)

    @constant
    def position_bias(self) -> Tensor:
        """The bias of each pair of positions in a window: (heads, N, N)."""
        return self._by_pair(self.relative_position_bias_table)

    def _by_pair(self, table: Tensor) -> Tensor:
        """Look up the bias of each pair of positions: (offsets, heads) -> (heads, N, N)."""
        positions = self.window[0] * self.window[1]
        return table[self.relative_position_index].view(positions, positions, -1).permute(2, 0, 1).contiguous()

    def attend(self, x: Tensor) -> Tensor:
        """Compute attention without the last linear layer.

        In the padding of a map, queries, keys and values equal the bias of the first linear layer.
        """
        return self._attention(self.qkv(x), padding=self.qkv.bias)

    def _attention(self, qkv: Tensor, **options: Any) -> Tensor:
        dropout = self.attention_dropout if self.training else 0.0
        bias = self.position_bias()
        return window_attention(qkv, bias, self.heads, self.window, self.shift, dropout=dropout, **options)

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj(self.attend(x))
        return nn.functional.dropout(x, self.dropout, self.training)


class ShiftedWindowAttentionV2(ShiftedWindowAttention):
    """Cosine attention with a learned scale per head; a small network computes the bias from logarithmic offsets."""

    relative_coords_table: Tensor

    def __init__(
        self,
        channels: int,
        window: Size,
        shift: Size,
        heads: int,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
    ) -> None:
        super().__init__(channels, window, shift, heads, dropout, attention_dropout)
        self.logit_scale = nn.Parameter(torch.log(10 * torch.ones(heads, 1, 1)))
        self.cpb_mlp = nn.Sequential(nn.Linear(2, 512), nn.ReLU(inplace=True), nn.Linear(512, heads, bias=False))
        nn.init.zeros_(self.qkv.bias[channels : 2 * channels].data)

    def _define_bias(self) -> None:
        self.register_buffer("relative_coords_table", log_offsets(self.window))

    @constant
    def position_bias(self) -> Tensor:
        table = self.cpb_mlp(self.relative_coords_table).view(-1, self.heads)
        return 16 * torch.sigmoid(self._by_pair(table))

    def attend(self, x: Tensor) -> Tensor:
        bias, scale = self._bias_and_scale()
        return self._attention(nn.functional.linear(x, self.qkv.weight, bias), padding=bias, cosine_scale=scale)

    @constant
    def _bias_and_scale(self) -> tuple[Tensor, Tensor]:
        """The bias (3 * C,) of the packed projection to queries, keys and values, and the factor of each head's scores,
        (heads,). The keys' part of the bias is zero."""
        query_bias, key_bias, value_bias = self.qkv.bias.chunk(3)
        bias = torch.cat((query_bias, torch.zeros_like(key_bias), value_bias))  # keys have no bias
        return bias, self.logit_scale.clamp(max=math.log(100.0)).exp().flatten()


def relative_positions(window: Size) -> Tensor:
    """Return the row in the bias table for each pair of positions in a window: (N * N,)."""
    high, wide = window
    row, column = (t.flatten() for t in torch.meshgrid(torch.arange(high), torch.arange(wide), indexing="ij"))
    down = row[:, None] - row[None, :] + high - 1  # from 0
    across = column[:, None] - column[None, :] + wide - 1
    return (down * (2 * wide - 1) + across).flatten()


def log_offsets(window: Size) -> Tensor:
    """Return sign(x) log2(|x| + 1) / 3, (1, 2 h - 1, 2 w - 1, 2). Here x is the offset between two positions of a
    window, scaled to -8..8."""
    axes = [torch.arange(-(size - 1), size, dtype=torch.float32) / max(1, size - 1) for size in window]
    offsets = 8 * torch.stack(torch.meshgrid(*axes, indexing="ij"), -1)[None]
    return torch.sign(offsets) * torch.log2(torch.abs(offsets) + 1.0) / 3.0


class SwinBlock(nn.Module):
    """A block: x + attention(norm(x)), then x + mlp(norm(x)): (B, H, W, C) -> (B, H, W, C).

    Args:
        channels: C.
        heads, window, shift: settings of the attention.
        mlp_ratio: width of the MLP's hidden layer, as a multiple of C.
        dropout: dropout probability after attention and MLP.
        stochastic_depth_prob: probability that an image skips attention or MLP.
        norm: creates a norm from a number of channels.
        attention_dropout: dropout probability of the attention weights in training.
    """

    attention: type[ShiftedWindowAttention] = ShiftedWindowAttention

    def __init__(
        self,
        channels: int,
        heads: int,
        window: Size,
        shift: Size,
        mlp_ratio: float,
        dropout: float,
        stochastic_depth_prob: float,
        norm: Norm,
        attention_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.norm1 = norm(channels)
        self.attn = self.attention(channels, window, shift, heads, dropout, attention_dropout)
        self.stochastic_depth = StochasticDepth(stochastic_depth_prob)
        self.norm2 = norm(channels)
        hidden = int(channels * mlp_ratio)
        first = LinearAct(channels, hidden, activation="gelu")
        gelu = nn.Identity()  # the first layer computes the activation; the identity keeps the later layers' names
        self.mlp = nn.Sequential(first, gelu, nn.Dropout(dropout), nn.Linear(hidden, channels), nn.Dropout(dropout))
        for layer in self.mlp:
            if isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight)
                nn.init.normal_(layer.bias, std=1e-6)

    def forward(self, x: Tensor, branch: Tensor | None = None, summed: bool = True) -> Tensor | tuple[Tensor, Tensor]:
        """Run the block on x, or on x + branch.

        Returns the result; with `summed` False, the two terms of the last sum instead of their sum.
        """
        y, x = (self.norm1(x), x) if branch is None else norm_of_sum(self.norm1, branch, x)
        y, x = norm_of_sum(self.norm2, self.stochastic_depth(self.attn(y)), x)
        branch = self.stochastic_depth(self.mlp(y))
        return x + branch if summed else (x, branch)


class SwinBlockV2(SwinBlock):
    """A block of Swin V2, in which norms come last: x + norm(attention(x))."""

    attention = ShiftedWindowAttentionV2

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        x = x + self.stochastic_depth(self.norm1(self.attn(x)))
        return x + self.stochastic_depth(self.norm2(self.mlp(x)))


class Stage(nn.Sequential):
    """A stack of blocks.

    One kernel computes the last sum of a `SwinBlock` and the first norm of the next block. The fusion of sum and norm
    is off if a block has hooks or was replaced, or if torch.fx traces the block.
    """

    def forward(self, x: Tensor) -> Tensor:
        watched = proxy_in((x,)) is not None or not all(is_plain(block, SwinBlock) for block in self)
        if watched or len(self) == 0:
            return super().forward(x)
        branch, (*earlier, last) = None, self
        for block in earlier:
            x, branch = block(x, branch, summed=False)
        return last(x, branch)


class SwinTransformer(nn.Module):
    """A Swin Transformer, from patches to a linear head: (B, 3, H, W) -> (B, num_classes).

    Args:
        patch_size: (h, w) of a patch in pixels; pixels beyond whole patches are ignored.
        embed_dim: channels of the first stage.
        depths: blocks of each stage.
        num_heads: heads in each stage.
        window_size: (h, w) of a window in positions.
        mlp_ratio: width of the MLP's hidden layer, as a multiple of the block's channels.
        dropout: dropout probability after attention and MLP.
        attention_dropout: dropout probability of the attention weights in training. If it is above 0, PyTorch operators
            compute attention in training, much more slowly than the kernel. No published model uses this dropout.
        stochastic_depth_prob: probability of stochastic depth of the last block; the probability grows linearly from 0
            at the first block.
        num_classes: number of output logits.
        norm_layer: creates a norm from a number of channels; None: LayerNorm with eps 1e-5.
        block: SwinBlock or SwinBlockV2.
        downsample_layer: PatchMerging or PatchMergingV2.

    Raises:
        ValueError: `depths` and `num_heads` have different lengths, a size is not a pair, the heads do not divide the
            channels, or a probability is invalid.
    """

    def __init__(
        self,
        patch_size: Sequence[int],
        embed_dim: int,
        depths: Sequence[int],
        num_heads: Sequence[int],
        window_size: Sequence[int],
        mlp_ratio: float = 4.0,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        stochastic_depth_prob: float = 0.1,
        num_classes: int = 1000,
        norm_layer: Norm | None = None,
        block: type[SwinBlock] = SwinBlock,
        downsample_layer: type[PatchMerging] = PatchMerging,
    ) -> None:
        super().__init__()
        check_classes(num_classes)
        if len(depths) != len(num_heads) or len(patch_size) != 2 or len(window_size) != 2:
            raise ValueError(
                "expected as many depths as num_heads, and two numbers each for patch_size and window_size, got "
                f"{list(depths)}, {list(num_heads)}, {list(patch_size)} and {list(window_size)}"
            )
        norm = norm_layer or partial(LayerNorm, eps=1e-5)
        patch, window = (patch_size[0], patch_size[1]), (window_size[0], window_size[1])
        half = (window[0] // 2, window[1] // 2)
        patches = nn.Conv2d(3, embed_dim, patch, patch)
        layers: list[nn.Module] = [nn.Sequential(patches, Permute((0, 2, 3, 1)), norm(embed_dim))]
        channels, number, last = embed_dim, 0, max(1, sum(depths) - 1)
        for stage, (depth, heads) in enumerate(zip(depths, num_heads, strict=True)):
            if stage > 0:
                layers.append(downsample_layer(channels, norm))
                channels *= 2
            blocks = []
            for place in range(depth):
                shift, probability = half if place % 2 else (0, 0), stochastic_depth_prob * number / last
                sizes, rates = (channels, heads, window, shift, mlp_ratio), (dropout, probability)
                blocks.append(block(*sizes, *rates, norm, attention_dropout))
                number += 1
            layers.append(Stage(*blocks))
        self.features = nn.Sequential(*layers)
        self.norm = norm(channels)
        self.permute = Permute((0, 3, 1, 2))
        self.avgpool = GlobalAverage(1)
        self.flatten = nn.Flatten(1)
        self.head = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.features(x))  # (B, H / 32, W / 32, 8 * embed_dim) with four stages
        x = self.flatten(self.avgpool(self.permute(x)))  # (B, 8 * embed_dim)
        return self.head(x)


@register
def swin_t(*, weights: str | Path | None = None, **options: Any) -> SwinTransformer:
    """Swin-T: 28,288,354 parameters."""
    return _built("swin_t", weights, {"depths": (2, 2, 6, 2), "stochastic_depth_prob": 0.2, **options})


@register
def swin_s(*, weights: str | Path | None = None, **options: Any) -> SwinTransformer:
    """Swin-S: 49,606,258 parameters."""
    return _built("swin_s", weights, {"depths": (2, 2, 18, 2), "stochastic_depth_prob": 0.3, **options})


@register
def swin_b(*, weights: str | Path | None = None, **options: Any) -> SwinTransformer:
    """Swin-B: 87,768,224 parameters."""
    return _built("swin_b", weights, {**BASE, "depths": (2, 2, 18, 2), "stochastic_depth_prob": 0.5, **options})


@register
def swin_v2_t(*, weights: str | Path | None = None, **options: Any) -> SwinTransformer:
    """Swin V2-T: 28,351,570 parameters."""
    return _built("swin_v2_t", weights, {**V2, "depths": (2, 2, 6, 2), "stochastic_depth_prob": 0.2, **options})


@register
def swin_v2_s(*, weights: str | Path | None = None, **options: Any) -> SwinTransformer:
    """Swin V2-S: 49,737,442 parameters."""
    return _built("swin_v2_s", weights, {**V2, "depths": (2, 2, 18, 2), "stochastic_depth_prob": 0.3, **options})


@register
def swin_v2_b(*, weights: str | Path | None = None, **options: Any) -> SwinTransformer:
    """Swin V2-B: 87,930,848 parameters."""
    both = {**V2, **BASE, "depths": (2, 2, 18, 2), "stochastic_depth_prob": 0.5}
    return _built("swin_v2_b", weights, {**both, **options})


SMALL: dict[str, Any] = {"patch_size": (4, 4), "embed_dim": 96, "num_heads": (3, 6, 12, 24), "window_size": (7, 7)}
BASE: dict[str, Any] = {"embed_dim": 128, "num_heads": (4, 8, 16, 32)}
V2: dict[str, Any] = {"window_size": (8, 8), "block": SwinBlockV2, "downsample_layer": PatchMergingV2}


def _built(name: str, weights: str | Path | None, options: dict[str, Any]) -> SwinTransformer:
    model = SwinTransformer(**{**SMALL, **options})
    if weights is not None:
        load_weights(model, name, weights)
    return model
