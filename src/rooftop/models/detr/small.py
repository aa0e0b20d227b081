"""A small DETR for small pictures, which can be trained from random initial values.

With the published settings, a DETR needs hundreds of epochs until its queries attend to the right cells. This network
learns faster for four reasons:
- Small pictures with few objects, ten queries and a narrow transformer. In a picture of 64 x 64 pixels, a query attends
  to 64 cells instead of 1000.
- Coordinates in the feature map. In DETR's attention, only queries and keys contain positions; values do not. In this
  network the feature map has two more channels, x and y, so that an object can read its position from the cells that
  it attends to.
- A backbone whose norms are trained, because frozen norms are for pretrained weights. The norms are group norms, which
  also work for small batches.
- No dropout.

    model = detr_small(num_classes=3)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rooftop.models.detr.network import Detr
from rooftop.models.detr.weights import load_detr_weights
from rooftop.models.vision.resnet import BasicBlock, Variant
from rooftop.models.weights.files import options_of, weights_file

GROUPS = 8  # channel groups of the group norms


class Places(nn.Module):
    """Append the position of each cell, x and y from -1 to 1, to its channels: (B, C, h, w) -> (B, C + 2, h, w)."""

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = (torch.linspace(-1, 1, n, dtype=x.dtype, device=x.device) for n in x.shape[-2:])
        places = torch.stack(torch.meshgrid(columns, rows, indexing="xy"))  # (2, h, w)
        return torch.cat((x, places.expand(len(x), -1, -1, -1)), dim=1)


def detr_small(*, weights: str | Path | None = None, **options: Any) -> Detr:
    """A small DETR. Each stage of its backbone is one residual block of stride 2.

    Args:
        weights: a weights file. A file that `rooftop train` wrote also contains the options.
        options: `channels` of the backbone's stages, each a multiple of `GROUPS`; `layers`, the number of encoder
            layers and of decoder layers; and options of `Detr`.

    Raises:
        InputError: `weights` is not a file.
        WeightsError: a file cannot be read, is damaged or belongs to another model.
    """
    model = _built(**({} if weights is None else options_of("detr_small", weights)) | options)
    if weights is not None:
        load_detr_weights(model, weights_file("detr_small", weights))
    return model


def _built(
    channels: Sequence[int] = (16, 32, 64), width: int = 64, layers: int = 2, queries: int = 10, **options: Any
) -> Detr:
    sizes = {"heads": 4, "feed_forward": 4 * width, "dropout": 0.0, **options}
    model = Detr(
        BasicBlock, (1, 1, 1, 1), queries=queries, width=width, encoder_layers=layers, decoder_layers=layers, **sizes
    )
    stages = [BasicBlock(a, b, 2, 1, Variant(norm=partial(nn.GroupNorm, GROUPS))) for a, b in pairwise((3, *channels))]
    model.backbone = nn.Sequential(*stages, Places())
    model.input_proj = nn.Conv2d(channels[-1] + 2, width, kernel_size=1)
    return model
