"""Launch a Triton kernel again with arguments of the same dtypes and alignment, by passing addresses and numbers
directly to the compiled kernel.

At each launch, Triton inspects all arguments, builds a key as a string and looks up the compiled kernel. This look-up
takes the host longer than all other work of a call. In this module, the key has only the properties of arguments on
which Triton specializes: dtypes, divisibility by 16, the width of integers, constants. Triton still compiles all
kernels, and makes the launches that this module cannot make.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from torch import Tensor
from torch.nn import Parameter

MOST_COMPILED = 16384
_compiled: dict[tuple[Any, ...], Compiled] = {}
"""Compiled kernels. A key has the kernel's id, the device, the properties of the arguments (`facts_of`), and the
constants and launch parameters.
"""

_NUMBERS = frozenset((float, bool))  # Triton does not specialize on values of these types
_SMALL = 1 << 31  # integers from -2^31 to 2^31 - 1 have 32 bits in a kernel


class Compiled:
    """A compiled kernel on one device, with the constants that follow its arguments."""

    __slots__ = (
        "constants",
        "device",
        "function",
        "kernel",
        "metadata",
        "run",
        "stream_of",
        "takes_descriptors",
        "whole",
    )

    def __init__(self, kernel: Any, compiled: Any, constants: tuple[Any, ...], takes_descriptors: bool = False) -> None:
        from triton.runtime import driver

        self.takes_descriptors = takes_descriptors  # if True, `launch` cannot launch the kernel
        self.kernel = kernel  # a reference, so that no other kernel gets the id of this kernel
        self.whole = compiled
        self.constants = constants
        self.run, self.function, self.metadata = compiled.run, compiled.function, compiled.packed_metadata
        self.device: int = driver.active.get_current_device()
        self.stream_of = driver.active.get_current_stream

    def launch(self, grid: tuple[int, ...], given: Sequence[Any]) -> None:
        """Launch the kernel on the current stream. `given`: the addresses and numbers that are its arguments before the
        constants. The kernel's device must be the current device.
        """
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        stream = self.stream_of(self.device)
        self.run(x, y, z, stream, self.function, self.metadata, None, None, None, *given, *self.constants)


def start(
    kernel: Any, grid: tuple[int, ...], index: int, args: Sequence[Any], parameters: dict[str, Any]
) -> Compiled | None:
    """Launch a kernel on the current stream of the current device.

    Args:
        kernel: a `triton.jit` function, not interpreted.
        grid: programs in one to three dimensions.
        index: index of the current device, on which the tensors are; -1 if the tensors are on the CPU.
        args: positional arguments of the kernel.
        parameters: the kernel's constants and launch parameters.

    Returns:
        The compiled kernel, if it can be launched without Triton with other arguments of the same dtypes and alignment
        (by `Compiled.launch`, or with tensor descriptors by C++ code); else None.
    """
    seen = facts_of(args, index)
    if seen is None or is_watched():
        made = kernel.run(*args, grid=grid, warmup=False, **parameters)
        return _with_descriptors(kernel, made, args, parameters) if seen is None else None
    facts, given = seen
    key = (id(kernel), index, *facts, None, *parameters, *parameters.values())
    found = _compiled.get(key)
    if found is None:
        return _keep(key, kernel, kernel.run(*args, grid=grid, warmup=False, **parameters), len(args), parameters)
    found.launch(grid, given)
    return found


def facts_of(args: Sequence[Any], index: int) -> tuple[list[Any], list[Any]] | None:
    """Return a pair: the properties on which Triton specializes, and the addresses and numbers for Triton's launcher.
    Return None for arguments that Triton has to inspect: tensors on a device other than `index`, tensor descriptors,
    and unknown types.

    Args:
        args: positional arguments of a launch.
        index: index of the device; -1 for the CPU.
    """
    facts: list[Any] = []
    given = list(args)
    for place, each in enumerate(args):
        kind = type(each)
        if kind is Tensor or kind is Parameter:
            if each.get_device() != index:
                return None
            given[place] = address = each.data_ptr()
            facts += (each.dtype, not address & 15)
        elif kind is int:  # properties: is the integer 1, is it a multiple of 16, and its width in bits
            if each == 1:
                facts.append(1)
            elif -_SMALL <= each < _SMALL:
                facts.append(8 if each & 15 else 16)
            else:
                facts.append((64 if each < 1 << 63 else 128) + (8 if each & 15 else 16))
        elif each is None:
            facts.append(None)
        elif kind in _NUMBERS:
            facts.append(kind)
        else:
            return None
    return facts, given


def is_descriptor(argument: Any) -> bool:
    """Whether an argument of a launch is a Triton tensor descriptor."""
    return type(argument).__name__ == "TensorDescriptor"


def _with_descriptors(kernel: Any, made: Any, args: Sequence[Any], parameters: dict[str, Any]) -> Compiled | None:
    """The compiled kernel if its arguments include tensor descriptors, which `Compiled.launch` cannot pass;
    else None.
    """
    constants = _constants(kernel, made, len(args), parameters)
    if constants is None or is_watched() or not any(map(is_descriptor, args)):
        return None
    return Compiled(kernel, made, constants, takes_descriptors=True)


def _keep(key: tuple[Any, ...], kernel: Any, compiled: Any, count: int, parameters: dict[str, Any]) -> Compiled | None:
    """Cache a compiled kernel and return it; None if it cannot be cached. It can be cached if its constants follow its
    other arguments, and the caller passes all constants by name.
    """
    constants = _constants(kernel, compiled, count, parameters)
    if constants is None or any(each.is_constexpr for each in kernel.params[:count]):
        return None
    if len(_compiled) >= MOST_COMPILED:
        _compiled.clear()
    found = _compiled[key] = Compiled(kernel, compiled, constants)
    return found


def _constants(kernel: Any, compiled: Any, count: int, parameters: dict[str, Any]) -> tuple[Any, ...] | None:
    """The values of a kernel's parameters after the first `count`, which must be constants that the caller passes by
    name. None if they are not, or if only Triton can launch the kernel.
    """
    constants = kernel.params[count:]
    if not hasattr(compiled, "packed_metadata") or kernel.pre_run_hooks:
        return None
    if not all(each.is_constexpr and each.name in parameters for each in constants):
        return None
    return tuple([parameters[each.name] for each in constants])


def is_watched() -> bool:
    """Whether launch hooks of Triton's profilers, or Triton's debug mode, must see each launch. False without Triton,
    when kernels in CUDA C++ are the only ones.
    """
    runtime = _settings()
    if runtime is None:
        return False
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    if enter is not None and getattr(enter, "calls", True):
        return True
    return bool(runtime.debug or (leave is not None and getattr(leave, "calls", True)))


@cache
def _settings() -> Any:
    """Triton's settings of launches, `triton.knobs.runtime`; None if Triton cannot be imported."""
    try:
        from triton import knobs
    except ImportError:
        return None
    return knobs.runtime
