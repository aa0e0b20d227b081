"""Detect state that calls keep outside of buffers, because a copy of the model would have its own copy of this state.

    self.steps += 1                         # a number
    self.attention = weights.detach()       # a tensor that is not a buffer
    self.mean = 0.9 * self.mean + ...       # a buffer that is replaced, not changed in place

The calls of the faster module would change only this copy. Its results could then depend on how often it has run in
trials, and code that reads the state from the original model would find old values. A value that only the first call
computes, such as a mask of the inputs' size, is not state.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from rooftop.nn.contents import Contents
from rooftop.optimization.draws import Draw
from rooftop.optimization.outcomes import Step, outcome_of, same_each


def check_nothing_is_carried(original: nn.Module, step: Step, drawn: Sequence[Draw]) -> None:
    """Run a copy of a model on drawn inputs, and check that nothing except buffers changes from call to call.

    Args:
        drawn: the given inputs, then other inputs. The model may refuse the other inputs.

    Raises:
        TypeError: the model cannot be copied.
        ValueError: a call changes a parameter, or state outside of buffers, which the message names.
        Exception: any error that the model raises on the given inputs.
    """
    try:
        model = copy.deepcopy(original)
    except Exception as error:
        raise TypeError(
            f"optimize: {type(original).__name__} cannot be copied ({type(error).__name__}: {error}): give its "
            "modules a __deepcopy__, or remove the attributes that cannot be copied"
        ) from error
    outcome_of(step, model, model, drawn[0].given)  # the first call may compute values that later calls reuse
    originals = dict(original.named_parameters())  # `parameters` may be the model's own method
    parameters = dict(model.named_parameters())
    for name, same in zip(parameters, same_each([(p, originals[n]) for n, p in parameters.items()]), strict=True):
        if not same:
            raise ValueError(
                f"optimize: a call changes the parameter {name}, but only an optimizer should change parameters"
            )
    before = _state(model)
    for draw in (*drawn[1:], drawn[0]):
        try:
            outcome_of(step, model, model, draw.given)
        except Exception:  # the search reports the error when it runs the model on these inputs
            continue
        if changed := _changed(before, _state(model)):
            raise ValueError(
                f"optimize: a call changes {changed} of {type(original).__name__}, but the faster module has its own "
                "copy: keep this state in a buffer and change the buffer in place, or return it as a result"
            )


def _state(model: nn.Module) -> dict[str, Any]:
    contents = Contents.of(model)
    buffers = {id(buffer): buffer for buffer in model.buffers()}
    state: dict[str, Any] = {**contents.plain, **{where: _values(part) for where, part in contents.arrays.items()}}
    for where, tensor in contents.tensors.items():
        state[where] = tensor if id(tensor) in buffers else tensor.detach().clone()
    return state


def _values(array: Any) -> Hashable:
    """The values of an array of NumPy, an `array.array` or a `bytearray`, to compare them later."""
    values = bytes(array) if isinstance(array, bytearray) else array.tobytes()
    return type(array), str(getattr(array, "dtype", None)), getattr(array, "shape", None), values


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    names = sorted(before.keys() | after.keys())
    pairs = {where: (before.get(where), after.get(where)) for where in names}
    tensors: dict[str, Any] = {where: pair for where, pair in pairs.items() if all(isinstance(t, Tensor) for t in pair)}
    same = dict(zip(tensors, same_each(list(tensors.values())), strict=True))
    for where, (one, other) in pairs.items():
        if where in same:
            if one is not other and not same[where]:
                return where
        elif isinstance(one, Tensor) or isinstance(other, Tensor) or one != other:
            return where
    return ""
