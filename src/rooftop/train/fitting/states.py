"""Nested states (`state_dict()` of anything) as named tensors and JSON, without pickle.

    {"state": {0: {"step": tensor(3.), "momentum_buffer": tensor(...)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}

becomes the tensors "optimizer.state.0.step" and "optimizer.state.0.momentum_buffer", and JSON with {"tensor": name} in
the place of each. JSON keeps floats exactly. It has neither numeric keys nor tuples, so these are marked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

PLAIN = (str, bool, int, float, type(None))


def taken_apart(state: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Describe a state as JSON, and add its tensors to `tensors`.

    Args:
        name: prefix of the names of its tensors.

    Raises:
        TypeError: the state has a value that is not a tensor, a number, a text or a container of these.
    """
    if isinstance(state, Tensor):
        tensors[name] = state.detach()
        return {"tensor": name}
    if isinstance(state, PLAIN):
        return state
    if isinstance(state, Mapping):
        pairs = [[key, taken_apart(value, _under(name, key), tensors)] for key, value in state.items()]
        if any(not isinstance(key, str | int) for key, _ in pairs):
            raise TypeError(f"{name} has the keys {list(state)}: a checkpoint keeps texts and integers as keys")
        return {"pairs": pairs}
    if isinstance(state, list | tuple):
        parts = [taken_apart(value, _under(name, index), tensors) for index, value in enumerate(state)]
        return parts if isinstance(state, list) else {"tuple": parts}
    raise TypeError(
        f"{name} is a {type(state).__name__}: a checkpoint keeps tensors, numbers, texts, and dicts, lists and tuples "
        "of these"
    )


def _under(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


def put_together(described: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Rebuild the state from the result of `taken_apart`."""
    if isinstance(described, list):
        return [put_together(each, tensors) for each in described]
    if not isinstance(described, dict):
        return described
    if "tensor" in described:
        return tensors[described["tensor"]]
    if "tuple" in described:
        return tuple(put_together(each, tensors) for each in described["tuple"])
    return {key: put_together(each, tensors) for key, each in described["pairs"]}


def same_state(one: Any, other: Any) -> bool:
    """Whether two states are equal, tensors bit for bit (a NaN equals itself)."""
    ours: dict[str, Tensor] = {}
    theirs: dict[str, Tensor] = {}
    if repr(taken_apart(one, "", ours)) != repr(taken_apart(other, "", theirs)) or ours.keys() != theirs.keys():
        return False
    return all(_same_bits(ours[name], theirs[name]) for name in ours)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    flat = (each.cpu().contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(*flat)
