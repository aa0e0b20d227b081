"""Whole models in training: every operator has a cost, no cost is zero by mistake, and totals agree with PyTorch's
counter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from rooftop.cost import FREE, CountingMode, Record
from rooftop.cost.formulas import metadata

TOUCH_NOTHING = {
    *(
        f"aten::{name}"
        for names in (metadata.VIEWS, metadata.ALLOCATIONS, metadata.QUESTIONS)
        for name in names.split()
    ),
    *metadata.OUTSIDE_ATEN.split(),
}


class Residual(nn.Module):
    """A bottleneck of a ResNet with a strided shortcut."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(True)),
            *(nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)),
        )
        self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride=2, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, source: Tensor) -> Tensor:
        return F.relu(self.body(source) + self.shortcut(source))


class ConvNeXtBlock(nn.Module):
    """Depthwise convolution, layer norm over channels, two linear layers with gelu, scaled residual."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.expand, self.shrink = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)
        self.scale = nn.Parameter(torch.full((channels,), 1e-6))

    def forward(self, source: Tensor) -> Tensor:
        mixed = self.norm(self.depthwise(source).permute(0, 2, 3, 1))  # (B, H, W, C)
        return source + (self.scale * self.shrink(F.gelu(self.expand(mixed)))).permute(0, 3, 1, 2)


class Decoder(nn.Module):
    """Token and position embeddings, causal attention by hand, a tied head."""

    def __init__(self, vocabulary: int = 50, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(16, width)
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.RMSNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, ids: Tensor) -> Tensor:
        batch, length = ids.shape
        hidden = self.tokens(ids) + self.positions(torch.arange(length))
        packed = self.qkv(self.norm_1(hidden)).view(batch, length, 3, self.heads, -1)  # (B, T, 3, H, D)
        query, key, value = packed.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.project(mixed.transpose(1, 2).reshape(batch, length, -1))
        hidden = hidden + self.mlp(self.norm_2(hidden))
        return F.linear(hidden, self.tokens.weight)


def convolutional_network() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 7, stride=2, padding=3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
        *(Residual(8, 16), ConvNeXtBlock(16), nn.Upsample(scale_factor=2, mode="bilinear"), nn.GroupNorm(4, 16)),
        *(nn.ConvTranspose2d(16, 8, 2, stride=2), nn.Hardswish(), nn.AvgPool2d(2), nn.Dropout(0.1)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)),
    )


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, activation="gelu", norm_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(32, 10))


def images() -> tuple[Tensor, Tensor]:
    return torch.rand(2, 3, 32, 32), torch.randint(10, (2,))


def sequences() -> tuple[Tensor, Tensor]:
    return torch.rand(2, 8, 32), torch.randint(10, (2, 8))


def text() -> tuple[Tensor, Tensor]:
    return torch.randint(50, (2, 8)), torch.randint(50, (2, 8))


MODELS = {"convnet": (convolutional_network, images), "encoder": (encoder, sequences), "decoder": (Decoder, text)}

OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4, "foreach": False}),
    "adam foreach": (torch.optim.Adam, {"foreach": True}),
    "adam fused": (torch.optim.Adam, {"fused": True}),
    "adamw": (torch.optim.AdamW, {"foreach": False}),
}


def train(model: str, optimizer: str, *, autocast: bool) -> list[Record]:
    """Two steps of training: the first creates the optimizer's state, the second uses it."""
    build, data = MODELS[model]
    network = build()
    make, options = OPTIMIZERS[optimizer]
    stepper = make(network.parameters(), **options)
    source, target = data()
    with CountingMode() as counted:
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = F.cross_entropy(network(source).flatten(0, -2), target.flatten(), label_smoothing=0.1)
            stepper.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            stepper.step()
    return counted.records


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_no_operator_of_training_is_uncovered_or_silently_zero(model: str, optimizer: str, autocast: bool) -> None:
    records = train(model, optimizer, autocast=autocast)
    assert {(record.name, record.uncovered) for record in records if record.cost is None} == set()
    silent = {r.name for r in records if r.cost is not None and not r.cost.bytes and r.name not in TOUCH_NOTHING}
    # An in-place operator (detach_) on a view is still a view.
    assert {name for name in silent if name.removesuffix("_") not in TOUCH_NOTHING} == set()
    assert len({record.name for record in records if record.cost != FREE}) > 20


@pytest.mark.parametrize("model", MODELS)
def test_inference_is_covered_too(model: str) -> None:
    build, data = MODELS[model]
    network = build().eval()
    source, _ = data()
    with torch.inference_mode(), CountingMode() as counted:
        network(source)
    assert {record.name for record in counted.records if record.cost is None} == set()


# The operators of these models that FlopCounterMode counts; it omits additions of biases.
PRODUCTS = ("mm", "bmm")
PRODUCTS_WITH_BIAS = ("addmm", "convolution", "convolution_backward")


def _product_flops(records: list[Record]) -> int:
    """Flops of products alone; in a bfloat16 model only products count as bf16 flops, because additions are done in
    fp32."""
    covered = [(record.name.removeprefix("aten::"), record.cost) for record in records if record.cost is not None]
    return sum(cost.total_flops for name, cost in covered if name in PRODUCTS) + sum(
        cost.flops.get("bf16", 0) for name, cost in covered if name in PRODUCTS_WITH_BIAS
    )


def _flop_counter(step: Callable[[], object]) -> dict[str, int]:
    with FlopCounterMode(display=False) as counter:
        step()
    return {operator.__name__: flops for operator, flops in counter.get_flop_counts()["Global"].items()}


def _network_without_groups() -> nn.Module:
    """FlopCounterMode counts the weight gradient of a grouped convolution as if it had no groups."""
    network = convolutional_network()
    return nn.Sequential(*(layer for layer in network if not isinstance(layer, ConvNeXtBlock)))


@pytest.mark.parametrize("model", ["convnet", "encoder", "decoder"])
def test_products_and_convolutions_agree_with_the_flop_counter_of_pytorch(model: str) -> None:
    build, data = MODELS[model]
    network = (_network_without_groups if model == "convnet" else build)().to(torch.bfloat16)
    source, target = data()
    source = source.to(torch.bfloat16) if source.is_floating_point() else source

    def step() -> None:
        F.cross_entropy(network(source).flatten(0, -2).float(), target.flatten()).backward()

    with CountingMode() as counted:
        step()
    theirs = _flop_counter(step)
    assert {"mm", "addmm"} <= set(theirs)
    assert _product_flops(counted.records) == sum(
        theirs[name] for name in PRODUCTS + PRODUCTS_WITH_BIAS if name in theirs
    )


@pytest.mark.parametrize("causal", [False, True])
def test_attention_agrees_with_the_flop_counter_of_pytorch_up_to_the_causal_half(causal: bool) -> None:
    length = 64
    query, key, value, out, gradient = (
        torch.empty(2, 4, length, 16, dtype=torch.bfloat16, device="meta") for _ in range(5)
    )
    logsumexp, seed = torch.empty(2, 4, length, device="meta"), torch.empty((), dtype=torch.int64, device="meta")
    mask = [True, True, True, False]
    forward = torch.ops.aten._scaled_dot_product_efficient_attention
    backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward

    def step() -> None:
        forward(query, key, value, None, True, 0.0, causal)
        backward(gradient, query, key, value, None, out, logsumexp, seed, seed, 0.0, mask, causal)

    with CountingMode() as counted:
        step()
    ours = {r.name.removeprefix("aten::"): r.cost.flops["bf16"] for r in counted.records if r.cost is not None}
    theirs = _flop_counter(step)
    assert set(ours) == set(theirs) == {forward.__name__, backward.__name__}
    # FlopCounterMode counts the whole square.
    counted_pairs, all_pairs = (length * (length + 1) // 2 if causal else length**2), length**2
    for name, flops in theirs.items():
        assert ours[name] * all_pairs == flops * counted_pairs
