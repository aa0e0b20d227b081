"""Choose the fastest of PyTorch's attention back ends that support a call, from a table measured on an H200."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from rooftop.kernels.attentions.states import MOST_FEATURES
from rooftop.kernels.operands.dtypes import HALVES

Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class Shape:
    """The properties of an attention call on which the choice of a back end depends: sizes, dtype and mask."""

    query: tuple[int, int, int, int]  # B, H, S_q, D
    key_heads: int
    keys: int
    value_features: int
    dtype: torch.dtype
    is_causal: bool
    masked: bool


def shape_of(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool) -> Shape:
    """The shape of a call with query (B, H, S_q, D), key (B, H_k, S_k, D) and value (B, H_k, S_k, D_v)."""
    batches, heads, queries, features = query.shape
    shape = (batches, heads, queries, features)
    return Shape(shape, key.shape[1], key.shape[2], value.shape[3], query.dtype, is_causal, mask is not None)


@dataclass(frozen=True)
class Rule:
    """An order of preference for attention calls that meet the conditions in all other fields. The first back end in
    `order` that can compute the call is used.
    """

    direction: Direction
    order: tuple[str, ...]
    capability: tuple[int, int] = (0, 0)  # minimum compute capability
    most_features: int = MOST_FEATURES
    least_positions: int = 0  # minimum number of queries
    causal: bool | None = None  # None: causal or not


# Measured on an H200 at 64 to 16384 positions of 32 to 128 features (benchmarks/results/h200/tune_attentions.json).
# cuDNN's kernels, which use Hopper's matrix instructions, are the fastest in forward and backward, causal or not. Next
# fastest is flash-2, which does not use these instructions, and then the memory-efficient kernels. With fewer than
# about 128 queries and up to 64 features, the memory-efficient kernels are the fastest in both directions.
_CUDNN_FIRST, _EFFICIENT_FIRST = ("cudnn", "flash", "efficient"), ("efficient", "cudnn", "flash")
RULES = (
    Rule("forward", _CUDNN_FIRST, capability=(9, 0), least_positions=128),
    Rule("forward", _EFFICIENT_FIRST, capability=(9, 0), most_features=64),
    Rule("forward", _CUDNN_FIRST, capability=(9, 0), most_features=128),
    Rule("backward", _CUDNN_FIRST, capability=(9, 0), least_positions=129),
    Rule("backward", _CUDNN_FIRST, capability=(9, 0), least_positions=128, causal=False),
    Rule("backward", _EFFICIENT_FIRST, capability=(9, 0), most_features=64),
    Rule("backward", _CUDNN_FIRST, capability=(9, 0), most_features=128),
    Rule("forward", ("flash", "cudnn", "efficient")),
    Rule("backward", ("flash", "cudnn", "efficient")),
)


@dataclass(frozen=True)
class AttentionPlan:
    """The back end that computes a call.

    Attributes:
        backend: "flash", "cudnn", "efficient", or "reference" (plain PyTorch).
        reason: why this back end was chosen.
        refused: for each back end that would have been preferred but cannot compute the call, the reason.
    """

    backend: str
    reason: str
    refused: dict[str, str] = field(default_factory=dict)


def plan_of(shape: Shape, device: torch.device, direction: Direction, settings: bool = True) -> AttentionPlan:
    """Choose the back end for a call of this shape on a device.

    With `settings`, back ends that are disabled in PyTorch (for example by `torch.nn.attention.sdpa_kernel`) are
    excluded.
    """
    if device.type != "cuda":
        return AttentionPlan("reference", f"on {device.type}")
    capability = _capability(device)
    rule = next(rule for rule in RULES if rule.direction == direction and _applies(rule, shape, capability))
    refused: dict[str, str] = {}
    for place, name in enumerate(rule.order):
        why = _refusal(name, shape, capability, settings)
        if why is None:
            reason = "fastest by the table" if place == 0 else "fastest by the table among those that support this call"
            return AttentionPlan(name, reason, refused)
        refused[name] = why
    return AttentionPlan("reference", "no back end supports this call", refused)


def _applies(rule: Rule, shape: Shape, capability: tuple[int, int]) -> bool:
    """Whether a rule is for a call of this shape on a GPU of this compute capability."""
    features = max(shape.query[3], shape.value_features)
    return (
        capability >= rule.capability
        and features <= rule.most_features
        and shape.query[2] >= rule.least_positions
        and rule.causal in (None, shape.is_causal)
    )


def _refusal(name: str, shape: Shape, capability: tuple[int, int], settings: bool) -> str | None:
    """The reason why the attention back end `name` cannot compute a call; None if it can. `settings`: also check
    whether PyTorch's settings allow the back end.
    """
    for asks, why in _LIMITS[name]:
        if (settings or why not in _BY_SETTINGS) and not asks(shape, capability):
            return why
    return None


_DISABLED, _NOT_DETERMINISTIC = _BY_SETTINGS = "it is disabled", "it is not deterministic"
Limit = tuple[Callable[[Shape, tuple[int, int]], bool], str]
"""(whether a back end can compute a call on a GPU of this compute capability, the reason if it cannot)"""

_NOT_EMPTY: Limit = (lambda s, c: 0 not in (*s.query, s.key_heads, s.keys, s.value_features), "an input is empty")
_SQUARE: Limit = (lambda s, c: not s.is_causal or s.query[2] == s.keys, "a causal mask must be square")
_HALF: Limit = (lambda s, c: s.dtype in HALVES, "it needs bfloat16 or float16")
_UNMASKED: Limit = (lambda s, c: not s.masked, "it supports no mask here")
_SAME_FEATURES: Limit = (lambda s, c: s.query[3] == s.value_features, "values must have as many features as keys")

_LIMITS: dict[str, tuple[Limit, ...]] = {
    "flash": (
        (lambda s, c: torch.backends.cuda.flash_sdp_enabled(), _DISABLED),
        (lambda s, c: torch.backends.cuda.is_flash_attention_available(), "PyTorch was built without it"),
        (lambda s, c: c >= (8, 0), "it needs compute capability 8.0"),
        *(_NOT_EMPTY, _HALF, _UNMASKED, _SQUARE, _SAME_FEATURES),
        (lambda s, c: s.query[3] <= 256, "it supports up to 256 features"),
    ),
    "cudnn": (
        (lambda s, c: torch.backends.cuda.cudnn_sdp_enabled(), _DISABLED),
        (lambda s, c: torch.backends.cudnn.is_available(), "there is no cuDNN"),
        (lambda s, c: c >= (8, 0), "it needs compute capability 8.0"),
        (lambda s, c: not torch.are_deterministic_algorithms_enabled(), _NOT_DETERMINISTIC),
        *(_NOT_EMPTY, _HALF, _UNMASKED, _SQUARE, _SAME_FEATURES),
        (lambda s, c: s.query[3] <= 128, "it supports up to 128 features"),
        (lambda s, c: min(s.query[2], s.keys) >= 64, "it needs 64 positions or more"),
    ),
    "efficient": (
        (lambda s, c: torch.backends.cuda.mem_efficient_sdp_enabled(), _DISABLED),
        *(_NOT_EMPTY, (lambda s, c: s.dtype != torch.float64, "it needs single or half precision")),
    ),
}


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
