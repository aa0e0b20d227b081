"""Turn TARGET and --input into a model and its arguments.

TARGET   resnet50                  a built-in model
         my_pkg.net:build          a module, a module class, or a callable that returns a module, (module, inputs) or
                                   (module, arguments, keywords); inputs that are a dict are keywords
--input  8x3x224x224               shape of normally distributed values, in the model's dtype
         8x128:int64:50257         shape, dtype and, for integers, the exclusive upper bound (default: 2)
         photographs/ or cat.jpg   a batch of photographs, preprocessed for image models
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from rooftop import models
from rooftop.debugging import memory_error_as
from rooftop.errors import InputError, ModelRunError, TargetError
from rooftop.user_code import named_object
from rooftop.words import did_you_mean, first_line

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
    "int64": torch.int64,
    "int32": torch.int32,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
"""Names of dtypes for --input."""
FLOATS = [name for name, dtype in DTYPES.items() if dtype.is_floating_point]
"""Names of dtypes for --dtype."""
OTHER_INPUTS = (
    "If the model needs other inputs: --input 8x3x224x224, or --input 2x16:int64:HIGH for integers below HIGH"
)
"""Advice after an error that a model raised."""


@dataclass(frozen=True)
class Target:
    """A model ready to run on a device.

    Attributes:
        name: name in the report.
        model: the module or callable.
        args, kwargs: arguments of the model.
        classifies: whether the model's outputs are class logits. If so, training uses cross-entropy with random labels.
    """

    name: str
    model: Callable[..., Any]
    args: tuple[Any, ...]
    classifies: bool = False
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def resolve_target(
    text: str,
    inputs: Sequence[str],
    device: torch.device | None,
    dtype: torch.dtype | None,
    channels_last: bool = False,
) -> Target:
    """Build the model that `text` names and the tensors that `inputs` describe, on the device and in the dtype.

    Without a device, the model and its inputs stay on the device and in the dtype in which they were built. This is
    enough for `rooftop analyze --predict`, which runs nothing.
    `inputs` replace the positional arguments that the target returns. Its keyword arguments are kept, but if it returns
    only keyword arguments, `inputs` replace them, as positional arguments.

    Raises:
        TargetError: no such target exists.
        InputError: an input is malformed or unreadable, or is missing and the target has no default.
        ModelRunError: the user's code raised while it was imported or called.
    """
    model, brought, example, classifies = _find(text)
    args, kwargs = brought or (None, {})
    if inputs:
        if args == ():
            kwargs = {}
        args = tuple(make_input(item, dtype or torch.float32) for item in inputs)
    elif args is None:
        if example is None:
            raise InputError(
                f"{text!r} returned a module without inputs: give their shapes, e.g. --input 8x3x224x224, "
                "or return (module, inputs) or (module, {name: input})"
            )
        args = (make_input("x".join(map(str, example)), dtype or torch.float32),)
    if device is None:
        return Target(text, model, args, classifies, kwargs)
    memory_format = torch.channels_last if channels_last else torch.preserve_format
    message = f"{text} and its inputs do not fit into the memory of {device}"
    with memory_error_as(lambda words: ModelRunError(f"{message}: {words}")):
        if isinstance(model, nn.Module):
            model = model.to(device=device, dtype=dtype, memory_format=memory_format)  # type: ignore[call-overload]
        args, kwargs = tree_map_only(Tensor, lambda t: _placed(t, device, dtype, channels_last), (args, kwargs))
    return Target(text, model, args, classifies, kwargs)


def make_input(text: str, float_dtype: torch.dtype) -> Tensor:
    """Make a tensor on the CPU from one --input. The docstring of this file lists the formats.

    Raises:
        InputError: the text is neither a shape nor a photograph.
    """
    match = re.fullmatch(r"(\d+(?:x\d+)*)(?::([a-z0-9]+))?(?::(\d+))?", text)
    if match is None:
        if text and Path(text).exists():
            return models.load_images([text])
        raise InputError(
            f"--input {text!r} is neither a shape (8x3x224x224, 8x128:int64:50257) nor an existing photograph or folder"
        )
    shape = tuple(int(size) for size in match[1].split("x"))
    if match[2] is not None and match[2] not in DTYPES:
        raise InputError(
            f"--input {text!r}: unknown dtype {match[2]!r}, expected one of {', '.join(DTYPES)}"
            f"{did_you_mean(match[2], DTYPES)}"
        )
    dtype = DTYPES[match[2]] if match[2] else float_dtype
    if not dtype.is_floating_point:
        high, most = (2, 2) if dtype == torch.bool else (int(match[3] or 2), torch.iinfo(dtype).max + 1)
        if not 1 <= high <= most:
            raise InputError(
                f"--input {text!r}: the exclusive upper bound is {high}, expected 1 to {most} for {match[2]}"
            )
        return _made(text, lambda: torch.randint(high, shape).to(dtype))
    return _made(text, lambda: torch.randn(shape).to(dtype))


def _made(text: str, make: Callable[[], Tensor]) -> Tensor:
    try:
        return make()
    # the tensor does not fit into memory, or a size exceeds 64 bits
    except (RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"--input {text!r}: this tensor cannot be made here ({first_line(error)})") from error


EXAMPLE_BATCH = 8

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional arguments and keywords."""


def _find(text: str) -> tuple[Callable[..., Any], Inputs | None, tuple[int, ...] | None, bool]:
    """Return (model, inputs or None, shape of an example input or None, whether the model classifies).

    Only built-in models have an example shape.
    """
    if ":" in text:
        model, inputs = _imported(text)
        return model, inputs, None, False
    entry = models.model_entry(text)
    return entry.build(), None, (EXAMPLE_BATCH, *entry.input_shape), entry.classifies


def _imported(text: str) -> tuple[Callable[..., Any], Inputs | None]:
    """Find an object by `named_object`. Call the object unless it is an nn.Module."""
    found = named_object(text, "my_pkg.net:build")
    if isinstance(found, nn.Module):
        return found, None
    if not callable(found):
        raise TargetError(f"{text!r} is a {type(found).__name__}, expected a callable or an nn.Module")
    try:
        built = found()
    except (Exception, SystemExit) as error:
        raise ModelRunError(f"{text} raised {type(error).__name__}: {error}") from error
    return _taken_apart(text, built)


EXPECTED = "expected an nn.Module, (nn.Module, inputs) or (nn.Module, arguments, {name: argument})"


def _taken_apart(text: str, built: Any) -> tuple[nn.Module, Inputs | None]:
    """Split the return value of a callable into the module and its inputs.

    Raises:
        TargetError: the callable returned neither a module nor a tuple of a module and its inputs.
    """
    if isinstance(built, nn.Module):
        return built, None
    if not isinstance(built, tuple) or len(built) not in (2, 3) or not isinstance(built[0], nn.Module):
        raise TargetError(f"{text!r} returned {_described(built)}, {EXPECTED}")
    model, inputs, *rest = built
    if inputs is None and not rest:
        return model, None
    keywords = rest[0] if rest else inputs if isinstance(inputs, Mapping) else {}
    if not isinstance(keywords, Mapping) or not all(isinstance(name, str) for name in keywords):
        raise TargetError(
            f"{text!r} returned {_described(built)}, whose keywords are not a dict from names to inputs: {EXPECTED}"
        )
    if inputs is keywords:
        return model, ((), dict(keywords))
    arguments = tuple(inputs) if isinstance(inputs, (tuple, list)) else () if inputs is None else (inputs,)
    return model, (arguments, dict(keywords))


def _described(value: Any) -> str:
    """Describe the type of a value or, for a tuple, the types of its elements."""
    if isinstance(value, tuple) and len(value) <= 4:
        return f"({', '.join(type(each).__name__ for each in value)})"
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else type(value).__name__


def _placed(value: Tensor, device: torch.device, dtype: torch.dtype | None, channels_last: bool) -> Tensor:
    """Move a tensor to the device. Cast a floating-point tensor to `dtype`, if given. If `channels_last` is set, make a
    tensor with four dimensions channels last."""
    value = value.to(device=device, dtype=dtype if value.is_floating_point() else None)
    return value.to(memory_format=torch.channels_last) if channels_last and value.dim() == 4 else value
