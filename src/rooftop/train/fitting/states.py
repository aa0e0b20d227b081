"""Convert nested states (any `state_dict()`) to named tensors and JSON, and back, without pickle.

    {"state": {0: {"step": tensor(3.), "momentum_buffer": tensor(...)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}

becomes the tensors "optimizer.state.0.step" and "optimizer.state.0.momentum_buffer", and JSON in which {"tensor": name}
replaces each tensor. Tensors of dtypes without a name in checkpoints, such as complex64, are stored as bytes. JSON
keeps floats exactly. JSON supports neither numeric keys nor tuples, so each dict becomes {"pairs": [[key, value],
...]}, and each tuple becomes {"tuple": [...]}.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rooftop.data.pieces import flat_bytes
from rooftop.train.checkpoints.saved_tensors import KINDS

PLAIN = (str, bool, int, float, type(None))


def taken_apart(state: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Describe a state as JSON, and add its tensors to `tensors`.

    Args:
        name: prefix of the tensors' names.

    Raises:
        TypeError: the state has a value other than dense tensors, numbers, strings, and containers of them.
    """
    if isinstance(state, Tensor):
        if state.layout is not torch.strided or state.is_quantized:
            kind = "quantized" if state.is_quantized else str(state.layout)
            raise TypeError(f"{name} is a tensor of layout {kind}: a checkpoint stores only dense tensors")
        if state.dtype in KINDS:
            tensors[name] = state.detach()
            return {"tensor": name}
        tensors[name] = flat_bytes(state.detach())
        return {"tensor": name, "dtype": str(state.dtype).removeprefix("torch."), "shape": list(state.shape)}
    if isinstance(state, PLAIN):
        return state
    if isinstance(state, Mapping):
        pairs = [[key, taken_apart(value, _under(name, key), tensors)] for key, value in state.items()]
        if any(not isinstance(key, str | int) for key, _ in pairs):
            raise TypeError(f"{name} has the keys {list(state)}: a checkpoint stores only strings and integers as keys")
        return {"pairs": pairs}
    if isinstance(state, list | tuple):
        parts = [taken_apart(value, _under(name, index), tensors) for index, value in enumerate(state)]
        return parts if isinstance(state, list) else {"tuple": parts}
    raise TypeError(
        f"{name} is a {type(state).__name__}: a checkpoint stores only tensors, numbers, strings, dicts, lists and "
        "tuples"
    )


def _under(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


def put_together(described: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Rebuild a state from the two results of `taken_apart`: its description and its tensors."""
    if isinstance(described, list):
        return [put_together(each, tensors) for each in described]
    if not isinstance(described, dict):
        return described
    if "dtype" in described:
        return tensors[described["tensor"]].view(getattr(torch, described["dtype"])).view(described["shape"])
    if "tensor" in described:
        return tensors[described["tensor"]]
    if "tuple" in described:
        return tuple(put_together(each, tensors) for each in described["tuple"])
    return {key: put_together(each, tensors) for key, each in described["pairs"]}


def same_state(one: Any, other: Any) -> bool:
    """Whether two states are equal; tensors are compared bit for bit, so a NaN equals itself."""
    ours: dict[str, Tensor] = {}
    theirs: dict[str, Tensor] = {}
    if repr(taken_apart(one, "", ours)) != repr(taken_apart(other, "", theirs)) or ours.keys() != theirs.keys():
        return False
    return all(_same_bits(ours[name], theirs[name]) for name in ours)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(flat_bytes(one.cpu()), flat_bytes(other.cpu()))
