"""DETR: object detection as set prediction by one transformer, with the state dict keys of facebookresearch/detr.

Carion et al. 2020, "End-to-End Object Detection with Transformers". A ResNet with frozen norms computes a feature map.
An encoder applies self-attention to the cells (pixels) of the feature map. A decoder turns learned queries into
objects, each with a class (or "no object") and a box:

    images -> ResNet -> 1x1 projection (+ sine positions) -> encoder -> decoder(queries) -> class head, box head

Images of different sizes share a batch with a padding mask: positions and attention ignore the padding.

    model = detr_resnet50(weights="COCO").eval()
    found = model([photo, another])  # normalized, (3, H, W) each
    detections = to_detections(found, [(480, 640), (375, 500)])  # rooftop.models.detr.losses

`rooftop.models.detr.losses` has the losses for training; `rooftop.models.detr.weights` reads weights from other
libraries.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rooftop.launch.symbolic import refuse_proxies
from rooftop.models.class_counts import check_classes
from rooftop.models.detr.weights import load_detr_weights
from rooftop.models.vision.resnet import BasicBlock, Bottleneck, Norm, ResNet
from rooftop.models.weights.files import load_into, options_of, read_weights, weights_file
from rooftop.nn import LayerNorm, LinearAct
from rooftop.nn.constants import constant
from rooftop.nn.norms import norm_of_sum


class Predictions(NamedTuple):
    """A DETR's predictions for B images with Q queries and K classes.

    Attributes:
        logits: (B, Q, K + 1); the last logit is the logit of "no object".
        boxes: (B, Q, 4) as (center x, center y, width, height), as fractions of the image without its padding.
        auxiliary: the predictions of the earlier decoder layers, first layer first.
    """

    logits: Tensor
    boxes: Tensor
    auxiliary: tuple[Predictions, ...] = ()


def pad_images(images: Sequence[Tensor], multiple: int = 1) -> tuple[Tensor, Tensor]:
    """Combine images of different sizes to one batch, with zeros to the right and below.

    Args:
        images: (C, H, W) each, with the same dtype and device.
        multiple: height and width of the batch are rounded up to multiples of this number.

    Returns:
        (B, C, H, W), and the padding mask (B, H, W): True outside the image.

    Raises:
        ValueError: there are no images, an image is not (C, H, W), or channels, dtypes or devices differ.
    """
    if not images:
        raise ValueError("got zero images: a batch needs at least one")
    first = images[0]
    channels = first.shape[0] if first.dim() == 3 else None
    for index, image in enumerate(images):
        if image.dim() != 3 or image.shape[0] != channels:
            raise ValueError(f"image {index} is {tuple(image.shape)}, expected ({channels or 'C'}, H, W)")
        if image.dtype != first.dtype or image.device != first.device:
            raise ValueError(
                f"image {index} is {image.dtype} on {image.device}, and image 0 is {first.dtype} on {first.device}: "
                "convert all images to one dtype and device"
            )
    height, width = (-(-max(image.shape[axis] for image in images) // multiple) * multiple for axis in (1, 2))
    batch = first.new_zeros((len(images), first.shape[0], height, width))
    padding = torch.ones((len(images), height, width), dtype=torch.bool, device=first.device)
    for image, place, mask in zip(images, batch, padding, strict=True):
        _, h, w = image.shape
        place[:, :h, :w] = image
        mask[:h, :w] = False
    return batch, padding


class FrozenBatchNorm(nn.Module):
    """Batch norm of (B, channels, H, W) whose statistics and affine parameters are constants, in four buffers."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(channels))
        self.register_buffer("bias", torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, training=False, eps=1e-5)


class Features(ResNet):
    """A ResNet without its head: (B, 3, H, W) -> (B, channels, H / 32, W / 32).

    With frozen norms, the stem and the first stage are frozen too: they recognize edges and colours, which detection
    need not learn again.
    """

    def __init__(
        self, block: type[BasicBlock | Bottleneck], layers: Sequence[int], dilation: bool, norm: Norm = FrozenBatchNorm
    ) -> None:
        super().__init__(block, layers, 1, replace_stride_with_dilation=(False, False, dilation), norm_layer=norm)
        del self.avgpool, self.fc
        self.channels = 512 * block.expansion
        if norm is FrozenBatchNorm:
            for part in (self.conv1, self.layer1):
                part.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))  # (B, 64, H / 4, W / 4)
        return self.layer4(self.layer3(self.layer2(self.layer1(x))))


def sine_positions(padding: Tensor, width: int, temperature: float = 10_000.0) -> Tensor:
    """Encode the position of each cell in its image as sines and cosines: first `width / 2` features for y, then for x.

    Args:
        padding: (B, H, W), True outside the image. Positions start at 1 in the image's first cell, and are scaled so
            that the last position is 2 pi.
        width: width of the encoding, a multiple of 4.

    Returns:
        float32 (B, H * W, width).
    """
    image = (~padding).float()
    steps = torch.arange(width // 4, dtype=torch.float32, device=padding.device)
    frequencies = temperature ** (-4 * steps / width)
    axes = []
    for axis in (1, 2):
        places = image.cumsum(axis)  # (B, H, W)
        places = places / (places.select(axis, -1).unsqueeze(axis) + 1e-6) * (2 * math.pi)
        angles = places.unsqueeze(-1) * frequencies  # (B, H, W, width / 4)
        axes.append(torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2))
    return torch.cat(axes, dim=-1).flatten(1, 2)


class Attention(nn.Module):
    """Multi-head attention with packed projections, batch first, with the state dict of `nn.MultiheadAttention`."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.width, self.heads, self.dropout = width, heads, dropout
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj = nn.Linear(width, width)
        nn.init.zeros_(self.out_proj.bias)

    def projection(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """The rows of the packed weight and bias from part `first` to part `last`, inclusive. Part 0 projects to
        queries, part 1 to keys, part 2 to values."""
        rows = slice(first * self.width, (last + 1) * self.width)
        return self.in_proj_weight[rows], self.in_proj_bias[rows]

    def attended(self, query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Attend with projected queries (B, T, D), keys and values (B, S, D) -> (B, T, D).

        `allowed` (B, 1, 1, S) is True for visible keys.
        """
        q, k, v = (
            x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in (query, key, value)
        )  # (B, heads, T or S, D / heads)
        dropout = self.dropout if self.training else 0.0
        x = F.scaled_dot_product_attention(q, k, v, allowed, dropout)
        return self.out_proj(x.transpose(1, 2).flatten(2))


class SelfAttention(Attention):
    """Self-attention of items with positions: values come from x, queries and keys from x plus positions."""

    def forward(self, x: Tensor, placed: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Attend among x (B, T, D). `placed` is x plus positions; `allowed` (B, 1, 1, T) is True for visible items."""
        query, key = F.linear(placed, *self.projection(0, 1)).chunk(2, dim=-1)
        return self.attended(query, key, F.linear(x, *self.projection(2, 2)), allowed)


class CrossAttention(Attention):
    """Cross-attention of objects to the cells of a feature map. The keys and values are already projected."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Attend with queries (B, Q, D) to keys, values (B, S, D); `allowed` (B, 1, 1, S) is True for visible cells."""
        return self.attended(query, key, value, allowed)


class EncoderLayer(nn.Module):
    """Self-attention of a feature map's cells, then a feed-forward network. A norm follows each residual sum
    ("post-norm")."""

    def __init__(self, width: int, heads: int, feed_forward: int, dropout: float) -> None:
        super().__init__()
        self.self_attn = SelfAttention(width, heads, dropout)
        self.linear1 = LinearAct(width, feed_forward, activation="relu")
        self.dropout = nn.Dropout(dropout)
        self.linear2 = nn.Linear(feed_forward, width)
        self.norm1 = LayerNorm(width)
        self.norm2 = LayerNorm(width)

    def forward(self, x: Tensor, positions: Tensor, allowed: Tensor | None) -> Tensor:
        """Map cells (B, S, D), with positions (B or 1, S, D), to (B, S, D)."""
        attended = self.self_attn(x, x + positions, allowed)
        x, _ = norm_of_sum(self.norm1, self.dropout(attended), x)
        hidden = self.dropout(self.linear1(x))  # (B, S, feed_forward)
        x, _ = norm_of_sum(self.norm2, self.dropout(self.linear2(hidden)), x)
        return x


class DecoderLayer(nn.Module):
    """Self-attention of objects, cross-attention to the cells, and a feed-forward network; post-norm."""

    def __init__(self, width: int, heads: int, feed_forward: int, dropout: float) -> None:
        super().__init__()
        self.self_attn = SelfAttention(width, heads, dropout)
        self.multihead_attn = CrossAttention(width, heads, dropout)
        self.linear1 = LinearAct(width, feed_forward, activation="relu")
        self.dropout = nn.Dropout(dropout)
        self.linear2 = nn.Linear(feed_forward, width)
        self.norm1 = LayerNorm(width)
        self.norm2 = LayerNorm(width)
        self.norm3 = LayerNorm(width)

    def forward(self, x: Tensor | None, queries: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None) -> Tensor:
        """Map objects (B, Q, D), with queries (Q, D), to (B, Q, D).

        Args:
            x: the objects; None in the first layer, where all objects are zeros.
            key, value: cells (B, S, D), projected for this layer.
            allowed: (B, 1, 1, S), the visible cells.
        """
        if x is None:
            # With dropout, the objects differ between the images of a batch. Without dropout, the objects are the same
            # for all images until the objects attend to the cells.
            x, query = self.beginning(queries, len(key) if self.training else 1)
            x, query = (t.expand(len(key), -1, -1).contiguous() for t in (x, query))
        else:
            x, _ = norm_of_sum(self.norm1, self.dropout(self.self_attn(x, x + queries)), x)
            query = self.asking(x, queries)
        x, _ = norm_of_sum(self.norm2, self.dropout(self.multihead_attn(query, key, value, allowed)), x)
        hidden = self.dropout(self.linear1(x))  # (B, Q, feed_forward)
        x, _ = norm_of_sum(self.norm3, self.dropout(self.linear2(hidden)), x)
        return x

    @constant
    def beginning(self, queries: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        """Run the self-attention of the first layer, whose objects are zeros.

        Returns the objects before they attend to the cells, and their queries for the cells; (B, Q, D) each.
        """
        placed = queries.expand(batch, -1, -1)  # (B, Q, D)
        x = self.norm1(self.dropout(self.self_attn(torch.zeros_like(placed), placed)))
        return x, self.asking(x, queries)

    def asking(self, x: Tensor, queries: Tensor) -> Tensor:
        """Project objects (B, Q, D) to the queries of the cross-attention."""
        return F.linear(x + queries, *self.multihead_attn.projection(0, 0))


class Encoder(nn.Module):
    """A stack of encoder layers."""

    def __init__(self, layers: int, width: int, heads: int, feed_forward: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer(width, heads, feed_forward, dropout) for _ in range(layers))

    def forward(self, x: Tensor, positions: Tensor, allowed: Tensor | None) -> Tensor:
        for layer in self.layers:
            x = layer(x, positions, allowed)
        return x


class Decoder(nn.Module):
    """A stack of decoder layers; one shared norm is applied to the results of all layers."""

    def __init__(self, layers: int, width: int, heads: int, feed_forward: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(width, heads, feed_forward, dropout) for _ in range(layers))
        self.norm = LayerNorm(width)

    def forward(self, queries: Tensor, memory: Tensor, positions: Tensor, allowed: Tensor | None) -> list[Tensor]:
        """Return the objects (B, Q, D) after each layer, before the norm."""
        # All layers attend to the same cells. So one matrix product computes the keys of all layers, and a second
        # matrix product computes the values of all layers.
        (key_weight, key_bias), (value_weight, value_bias) = (self.packed_projection(part) for part in (1, 2))
        keys = F.linear(memory + positions, key_weight, key_bias).chunk(len(self.layers), dim=-1)
        values = F.linear(memory, value_weight, value_bias).chunk(len(self.layers), dim=-1)  # (B, S, D) each
        x, objects = None, []
        for layer, key, value in zip(self.layers, keys, values, strict=True):
            x = layer(x, queries, key, value, allowed)
            objects.append(x)
        return objects

    @constant
    def packed_projection(self, part: int) -> tuple[Tensor, Tensor]:
        """Weights (layers * D, D), biases (layers * D,) that project cells to keys (1) or values (2) of all layers."""
        layers = cast(Iterable[DecoderLayer], self.layers)
        weights, biases = zip(*(layer.multihead_attn.projection(part, part) for layer in layers), strict=True)
        return torch.cat(weights), torch.cat(biases)


class Transformer(nn.Module):
    """Encoder and decoder: cells (B, S, D) -> objects (B, Q, D) after each decoder layer."""

    def __init__(
        self, width: int, heads: int, encoder_layers: int, decoder_layers: int, feed_forward: int, dropout: float
    ) -> None:
        super().__init__()
        self.encoder = Encoder(encoder_layers, width, heads, feed_forward, dropout)
        self.decoder = Decoder(decoder_layers, width, heads, feed_forward, dropout)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    def forward(self, cells: Tensor, positions: Tensor, queries: Tensor, allowed: Tensor | None) -> list[Tensor]:
        memory = self.encoder(cells, positions, allowed)  # (B, S, D)
        return self.decoder(queries, memory, positions, allowed)


class BoxHead(nn.Module):
    """Three linear layers with relu in between: (..., D) -> (..., 4), the logits of a box."""

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = (LinearAct(width, width, activation="relu") for _ in range(2))
        self.layers = nn.ModuleList((*hidden, nn.Linear(width, 4)))

    def forward(self, x: Tensor) -> Tensor:
        first, second, last = self.layers
        return last(second(first(x)))


class Detr(nn.Module):
    """Images -> `Predictions`.

    Args:
        block, layers: block type and layer counts of the ResNet, as in `rooftop.models.vision.resnet.ResNet`.
        num_classes: K, one more than the highest label; COCO's highest label is 90.
        queries: Q, the maximum number of objects in one image.
        width, heads, feed_forward: sizes of the transformer; `width` is a multiple of `heads` and of 4.
        encoder_layers, decoder_layers: numbers of layers.
        dropout: dropout probability of the transformer in training.
        dilation: the fourth stage keeps the resolution of the third stage ("DC5"), which doubles the cells per axis.
        auxiliary: also return the predictions of the earlier decoder layers; training needs them, detection does not.
        norm: makes a norm layer of the ResNet for a number of channels. Frozen norms suit pretrained weights. A network
            with random initial weights needs `nn.BatchNorm2d` or a group norm; all of its layers are then trained.

    Raises:
        ValueError: `width` is not a multiple of `heads` and of 4, or there are no decoder layers.
    """

    def __init__(
        self,
        block: type[BasicBlock | Bottleneck],
        layers: Sequence[int],
        num_classes: int = 91,
        queries: int = 100,
        width: int = 256,
        heads: int = 8,
        encoder_layers: int = 6,
        decoder_layers: int = 6,
        feed_forward: int = 2048,
        dropout: float = 0.1,
        dilation: bool = False,
        auxiliary: bool = True,
        norm: Norm = FrozenBatchNorm,
    ) -> None:
        super().__init__()
        check_classes(num_classes)
        if width % heads or width % 4:
            raise ValueError(f"width {width} is not a multiple of heads ({heads}) and of 4")
        if decoder_layers < 1:
            raise ValueError(
                f"got decoder_layers={decoder_layers}: expected at least one, because the last one predicts the objects"
            )
        self.num_classes, self.width, self.auxiliary = num_classes, width, auxiliary
        self.transformer = Transformer(width, heads, encoder_layers, decoder_layers, feed_forward, dropout)
        self.class_embed = nn.Linear(width, num_classes + 1)
        self.bbox_embed = BoxHead(width)
        self.query_embed = nn.Embedding(queries, width)
        features = Features(block, layers, dilation, norm)
        self.input_proj = nn.Conv2d(features.channels, width, kernel_size=1)
        self.backbone = nn.Sequential(nn.Sequential(OrderedDict(body=features)))

    def forward(self, images: Tensor | Sequence[Tensor], padding: Tensor | None = None) -> Predictions:
        """Detect objects.

        Args:
            images: a batch (B, 3, H, W), or a list of images (3, H, W), which `pad_images` combines into a batch;
                normalized as for a ResNet.
            padding: for a batch, bool (B, H, W), True outside the image; None if there is no padding. In an image that
                is entirely padding, all cells are visible.

        Raises:
            ValueError: there are no images, or the shape or dtype of images or mask is wrong.
            ValueError: a padding mask is given together with a list of images.
        """
        refuse_proxies(self, images)
        if isinstance(images, Tensor):
            batch = images
        elif padding is None:
            batch, padding = pad_images(images)
            if all(image.shape == images[0].shape for image in images):
                padding = None  # all images have the same size, so none is padded
        else:
            raise ValueError("a padding mask is for a batch; a list of images gets its mask automatically")
        _check_batch(batch, padding)
        x = self.input_proj(self.backbone(batch))  # (B, D, H / 32, W / 32)
        positions, allowed = self._places(x, padding)
        objects = self.transformer(x.flatten(2).transpose(1, 2), positions, self.query_embed.weight, allowed)
        wanted = torch.stack(objects) if self.auxiliary else objects[-1][None]
        *earlier, last = self._heads(wanted)
        return Predictions(last.logits, last.boxes, (*earlier,))  # PyTorch 2.11 does not compile `_replace`

    def _places(self, x: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The positions (B or 1, S, D) of the cells of x (B, D, h, w), and the mask (B, 1, 1, S) of visible cells."""
        if padding is None:
            return self.unpadded_positions(x.shape[-2], x.shape[-1], x.dtype, x.device), None
        cells = F.interpolate(padding[None].float(), size=x.shape[-2:])[0].bool()  # (B, h, w)
        # Attention needs at least one visible key. So in an image that is entirely padding, all cells are visible.
        allowed = ~cells | cells.all(dim=(1, 2), keepdim=True)
        return sine_positions(cells, self.width).to(x.dtype), allowed.flatten(1)[:, None, None]

    @constant
    def unpadded_positions(self, height: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The positions of a feature map without padding, (1, S, D)."""
        everywhere = torch.zeros((1, height, width), dtype=torch.bool, device=device)
        return sine_positions(everywhere, self.width).to(dtype)

    def _heads(self, objects: Tensor) -> list[Predictions]:
        """Predict classes and boxes from the objects (layers, B, Q, D) of each layer."""
        objects = self.transformer.decoder.norm(objects)
        logits, boxes = self.class_embed(objects), self.bbox_embed(objects).sigmoid()
        return [Predictions(*each) for each in zip(logits, boxes, strict=True)]


def detr_resnet50(
    *, weights: str | Path | None = None, backbone_weights: str | Path | None = None, **options: Any
) -> Detr:
    """DETR on a ResNet-50: 41,524,768 parameters.

    Args:
        weights: "COCO" (also "DEFAULT") or "COCO_DC5", as published by facebookresearch/detr; or a weights file in any
            dialect that `rooftop.models.detr.weights` knows.
        backbone_weights: initial weights of the ResNet alone, for training: a name or a file, as for `resnet50`.
        options: options of `Detr`. DETR-DC5 needs `dilation=True`, which is the default for "COCO_DC5".

    Raises:
        InputError: `weights` or `backbone_weights` is neither a name nor a file.
        WeightsError: a file cannot be fetched or read, is damaged, belongs to another model or has a different number
            of classes.
    """
    return _built("detr_resnet50", (3, 4, 6, 3), weights, backbone_weights, options)


def detr_resnet101(
    *, weights: str | Path | None = None, backbone_weights: str | Path | None = None, **options: Any
) -> Detr:
    """DETR on a ResNet-101: 60,464,672 parameters. Arguments and errors are the same as for `detr_resnet50`."""
    return _built("detr_resnet101", (3, 4, 23, 3), weights, backbone_weights, options)


def _built(
    name: str,
    layers: Sequence[int],
    weights: str | Path | None,
    backbone_weights: str | Path | None,
    options: dict[str, Any],
) -> Detr:
    known = {} if weights is None else options_of(name, weights)
    model = Detr(Bottleneck, layers, **known | options)
    if backbone_weights is not None:
        path = weights_file(name.removeprefix("detr_"), backbone_weights)
        tensors = read_weights(path)
        unused = ("fc.weight", "fc.bias")
        body = {k: v for k, v in tensors.items() if k not in unused and not k.endswith("num_batches_tracked")}
        load_into(model.backbone.get_submodule("0.body"), body, path)
    if weights is not None:
        load_detr_weights(model, weights_file(name, weights))
    return model


def _check_batch(batch: Tensor, padding: Tensor | None) -> None:
    if batch.dim() != 4 or batch.shape[1] != 3:
        raise ValueError(f"images are {tuple(batch.shape)}, expected (B, 3, H, W), or a list of (3, H, W)")
    if not batch.numel():
        raise ValueError(f"got zero images, or images without pixels: {tuple(batch.shape)}")
    if not batch.is_floating_point():
        raise ValueError(f"images are {batch.dtype}, expected floating point, normalized as for a ResNet")
    if padding is None:
        return
    expected = (batch.shape[0], *batch.shape[2:])
    if padding.dtype != torch.bool or padding.shape != expected:
        raise ValueError(
            f"the padding mask is {padding.dtype} {tuple(padding.shape)}, expected torch.bool {expected}, True where "
            "there is no image"
        )
