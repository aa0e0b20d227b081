"""Recognize and join the key-value caches that Hugging Face's models return.

A cache contains layers, and a layer contains tensors and values that describe them. `BATCH_DIMS` lists the sample
dimension of each tensor. Any other tensor raises TypeError, except the tensors in `CONSTANTS`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

from rooftop.parallel.containers import full_name, holds_tensors

BATCH_DIMS = {
    "keys": 0,  # (B, heads, T, D), like the values
    "values": 0,
    "conv_states": 0,  # of linear attention: a dict from the state's index to (B, channels, kernel)
    "recurrent_states": 0,
    "indexer_keys": 0,  # of sparse attention: (B, T, D)
    "indexer_position_ids": 1,  # (kinds of position, B, T)
}

CONSTANTS = frozenset({"_sliding_window_tensor"})
"""Tensors that hold only a copy of a setting of the layer, such as its window size. The setting is compared between
the replicas, so the tensor is not.
"""

PARTS = frozenset({"layers", "self_attention_cache", "cross_attention_cache"})
"""Attributes of a cache that contain layers or other caches."""

Join = Callable[[list[Any], int], Any]


def is_cache(value: Any) -> bool:
    """Whether a value is a key-value cache of the library transformers (an instance of its class `Cache`)."""
    module = sys.modules.get("transformers.cache_utils")  # no cache can exist before transformers is imported
    kind = getattr(module, "Cache", None)
    return kind is not None and isinstance(value, kind)


def joined_caches(caches: Sequence[Any], device: torch.device, join: Join) -> Any:
    """Join several caches of one class into a cache with the samples of all.

    Args:
        caches: the replicas' caches, in order.
        device: the device of the resulting tensors.
        join: called with the replicas' values and the sample dimension; joins the values along this dimension.

    Raises:
        TypeError: the caches differ in class, attributes or number of layers, or the sample dimension of a tensor is
            unknown.
    """
    first = caches[0]
    kinds = set(map(type, caches))
    if len(kinds) > 1 or any(vars(cache).keys() != vars(first).keys() for cache in caches):
        raise TypeError(
            "the replicas returned caches of different classes, or with different attributes: "
            f"{', '.join(sorted(set(map(full_name, caches))))}. Call the module with use_cache=False"
        )
    made = copy(first)
    for name in vars(first):
        vars(made)[name] = _attribute(name, first, [vars(cache)[name] for cache in caches], device, join)
    return made


def _attribute(name: str, owner: Any, values: list[Any], device: torch.device, join: Join) -> Any:
    first = values[0]
    if name in BATCH_DIMS:
        return join(values, BATCH_DIMS[name])
    if name in PARTS:
        if not isinstance(first, list):
            return joined_caches(values, device, join)
        counts = {len(layers) for layers in values}
        if len(counts) > 1:
            raise TypeError(
                f"the replicas returned caches with {', '.join(map(str, sorted(counts)))} layers, expected the same "
                f"number in each"
            )
        return [joined_caches(layers, device, join) for layers in zip(*values, strict=True)]
    if name in CONSTANTS and isinstance(first, Tensor):
        return first.to(device)
    if isinstance(first, torch.device):
        return device
    if any(map(holds_tensors, values)):
        raise TypeError(
            f"outputs of the type {full_name(owner)} cannot be gathered: the sample dimension of its "
            f"attribute {name!r} is unknown. Call the module with use_cache=False"
        )
    return first if isinstance(first, type) else join(values, 0)
