"""Join the outputs of replicas into the output of the whole batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from rooftop.parallel.caches import is_cache, joined_caches
from rooftop.parallel.containers import full_name, opened
from rooftop.parallel.replicas import places_of
from rooftop.parallel.scattering import moved

COMPARABLE = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
"""Types of values that outputs may have besides tensors. Such values must be equal in all replicas."""


def gather(outputs: Sequence[Any], device: torch.device | str, dim: int = 0) -> Any:
    """Join the replicas' outputs.

    Args:
        outputs: one per replica, all with the same structure. An output consists of tensors in tuples, named tuples,
            lists, Mappings (with the same keys) and dataclasses, including Hugging Face's ModelOutput and caches. Other
            values, such as None, numbers and strings, must be equal in all outputs.
        device: the device of the result.
        dim: the dimension along which tensors are joined, which may be negative. Scalar tensors become a vector
            (replicas,).

    Returns:
        The joined values, in the structure of the outputs.

    Raises:
        ValueError: there are no outputs; tensors lack the dimension `dim`, or differ in dtype or in the size of another
            dimension; containers have different keys or numbers of values; or other values differ.
        TypeError: the structures differ, or values cannot be joined.
    """
    place = places_of([device])[0]
    if not outputs:
        raise ValueError("no outputs to gather: expected one for each replica")
    return _joined(list(outputs), place, dim)


def _joined(parts: list[Any], device: torch.device, dim: int) -> Any:
    first = parts[0]
    for number, part in enumerate(parts):
        if type(part) is not type(first) and not (isinstance(part, Tensor) and isinstance(first, Tensor)):
            raise TypeError(
                f"replica {number} returned a {type(part).__name__} where replica 0 returned a "
                f"{type(first).__name__}: all must return the same structure"
            )
    if isinstance(first, Tensor):
        return _joined_tensors(parts, device, dim)
    if is_cache(first):
        return joined_caches(parts, device, lambda values, batch_dim: _joined(values, device, batch_dim))
    found = opened(first)
    if found is None:
        return _same_value(parts)
    return found.made([_joined(list(column), device, dim) for column in zip(*_rows(parts), strict=True)])


def _rows(parts: list[Any]) -> list[list[Any]]:
    """For each container in `parts`, list its values in the order of the first container's names. Raise ValueError if
    the containers' names differ."""
    all_opened = [found for part in parts if (found := opened(part)) is not None]
    first = all_opened[0]
    kind = type(parts[0]).__name__
    for number, found in enumerate(all_opened):
        if set(found.names) == set(first.names):
            continue
        if isinstance(parts[0], Mapping):
            raise ValueError(
                f"replica {number} returned a {kind} with the keys {found.names}, replica 0 returned {first.names}: "
                "all must return the same keys"
            )
        raise ValueError(
            f"replica {number} returned a {kind} of {len(found.names)} values, but replica 0 returned one of "
            f"{len(first.names)}: all replicas must return equally many values"
        )
    by_name = [dict(zip(found.names, found.values, strict=True)) for found in all_opened]
    return [[values[name] for name in first.names] for values in by_name]


def _joined_tensors(parts: list[Tensor], device: torch.device, dim: int) -> Tensor:
    kinds = {(part.dtype, _without(part.shape, dim)) for part in parts}
    if len(kinds) > 1 or not (parts[0].dim() == 0 or -parts[0].dim() <= dim < parts[0].dim()):
        given = ", ".join(f"{tuple(part.shape)} {part.dtype}" for part in parts)
        raise ValueError(
            f"outputs of the replicas cannot be joined along dim {dim}: {given}; they must have the same dtype and the "
            f"same sizes in all other dimensions (pad them inside the module)"
        )
    there = [moved(part, device) for part in parts]
    return torch.stack(there) if parts[0].dim() == 0 else torch.cat(there, dim)


def _without(shape: torch.Size, dim: int) -> tuple[int, ...]:
    """(number of dimensions, size of each dimension except `dim`): equal for tensors that can be concatenated along
    `dim`.
    """
    kept = [size for number, size in enumerate(shape) if number not in (dim, dim + len(shape))]
    return len(shape), *kept


def _same_value(parts: list[Any]) -> Any:
    first = parts[0]
    # by `repr`, NaN equals NaN
    if first is None or (isinstance(first, COMPARABLE) and all(p == first or repr(p) == repr(first) for p in parts)):
        return first
    if isinstance(first, COMPARABLE):
        raise ValueError(
            f"the replicas returned different values, {', '.join(map(repr, parts))}: return them as tensors"
        )
    if isinstance(first, PackedSequence):
        raise TypeError(
            "outputs of the type torch.nn.utils.rnn.PackedSequence cannot be gathered, since their rows are sorted by "
            "time. Return the padded tensor (torch.nn.utils.rnn.pad_packed_sequence, with total_length)"
        )
    raise TypeError(
        f"outputs of the type {full_name(first)} cannot be gathered: return tensors, or tuples, lists, dicts or "
        f"dataclasses of tensors"
    )
