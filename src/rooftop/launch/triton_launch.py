"""Launch Triton kernels on their tensors' device, count launches, and raise a clear error if Triton is missing.

Under TRITON_INTERPRET=1 kernels run on the CPU, one program after another. The tests run each operator this way, and
check by `count_launches` that the kernel ran instead of the reference.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rooftop.errors import MissingExtraError
from rooftop.launch.compiled_kernels import start

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton's interpreter runs the kernels on the CPU. Triton decides this when a kernel is defined, so the value
is fixed at import.
"""

_counters: list[Counter[str]] = []
_observer: Any = None  # the object that is observing a call (known_calls.py)


@contextmanager
def count_launches() -> Iterator[Counter[str]]:
    """Count the launches in the `with` block, by kernel name."""
    counter: Counter[str] = Counter()
    _counters.append(counter)
    try:
        yield counter
    finally:
        _counters.remove(counter)


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *args: Any, **parameters: Any) -> None:
    """Launch a Triton kernel on a device's current stream; an empty grid launches nothing.

    Args:
        kernel: a `triton.jit` function.
        grid: programs in each dimension.
        device: the device of the kernel's tensors.
        *args, **parameters: the kernel's arguments, constants and launch parameters (num_warps, ...).
    """
    if 0 in grid:
        return
    if _observer is None:
        _launch(kernel, grid, device, args, parameters)
    else:
        _observer.launch(_launch, kernel, grid, device, args, parameters)
    if _counters:
        _count(kernel.fn.__name__)


def _launch(
    kernel: Any, grid: tuple[int, ...], device: torch.device, args: Sequence[Any], parameters: dict[str, Any]
) -> Any:
    """Launch the kernel. Return the result of `compiled_kernels.start`; None if Triton interprets the kernel."""
    if INTERPRETED:
        kernel.run(*args, grid=grid, warmup=False, **parameters)
        return None
    if not _is_cuda(device):
        return start(kernel, grid, -1, args, parameters)
    if torch._C._cuda_getDevice() == device.index:
        return start(kernel, grid, device.index, args, parameters)
    with torch.cuda.device(device):
        return start(kernel, grid, torch._C._cuda_getDevice(), args, parameters)


class Repeated:
    """A kernel that is launched repeatedly with different pointers. All other arguments are the same at each launch.

    Triton inspects all arguments at each launch to find the compiled kernel. With this class, Triton inspects them only
    at the first launch for each combination of pointers that are divisible by 16.

    Args:
        kernel: a `triton.jit` function.
        grid: programs in each dimension, none of them 0.
        device: the device of the tensors.
        arguments: all arguments that are not constants, with arbitrary values in place of the pointers.
        places: indices of the pointers among the arguments.
        **parameters: constants and launch parameters (num_warps, ...).
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], device: torch.device, arguments: Sequence[Any],
        places: Sequence[int], **parameters: Any,
    ) -> None:  # fmt: skip
        self.kernel, self.grid, self.device, self.parameters = kernel, grid, device, parameters
        self.arguments, self.places = list(arguments), tuple(places)
        self._compiled: dict[tuple[bool, ...], Any] = {}  # compiled kernels, by whether 16 divides each pointer

    def __call__(self, *pointers: Any) -> None:
        """Launch the kernel on the device's current stream.

        Args:
            *pointers: tensors, or objects with a tensor's `data_ptr` and `dtype`. The dtypes must be the same at each
                launch.
        """
        if self.at([each.data_ptr() for each in pointers]):
            return
        with self._on_device():
            arguments = self._arguments(pointers)
            found = self.kernel.run(*arguments, grid=self.grid, warmup=False, **self.parameters)
        if not INTERPRETED:
            constants = [self.parameters[name] for name in self.kernel.arg_names[len(arguments) :]]
            self._compiled[_aligned(each.data_ptr() for each in pointers)] = found[(*self.grid, 1, 1)[:3]], constants
        record_launch(self.kernel.fn.__name__)

    def at(self, addresses: Sequence[int]) -> bool:
        """Launch with addresses instead of tensors, if an earlier launch had pointers with the same divisibility by 16.

        Returns:
            Whether the kernel was launched; always False for interpreted kernels.
        """
        found = self._compiled.get(_aligned(addresses))
        if found is None:
            return False
        compiled, constants = found
        with self._on_device():
            compiled(*self._arguments(addresses), *constants)
        record_launch(self.kernel.fn.__name__)
        return True

    def _arguments(self, pointers: Sequence[Any]) -> list[Any]:
        arguments = self.arguments.copy()
        for place, pointer in zip(self.places, pointers, strict=True):
            arguments[place] = pointer
        return arguments

    def _on_device(self) -> AbstractContextManager[None]:
        if _is_cuda(self.device) and torch._C._cuda_getDevice() != self.device.index:
            return torch.cuda.device(self.device)
        return nullcontext()


def _aligned(addresses: Iterable[int]) -> tuple[bool, ...]:
    return tuple([address % 16 == 0 for address in addresses])


def record_launch(name: str, made: Any = None, grid: tuple[int, ...] = (), args: Sequence[Any] = ()) -> None:
    """Count a launch that was not made by `launch`, in all active `count_launches` blocks.

    Args:
        name: name of the kernel.
        made: an object that can repeat the launch (`cuda.Configured`). None: observed calls with this launch are not
            replayed.
        grid, args: the launch's grid in three dimensions, and the kernel's arguments.
    """
    if _observer is not None:
        if made is None:
            _observer.foreign()
        else:
            _observer.was_launched(made, grid, args)
    _count(name)


def _count(name: str) -> None:
    for counter in _counters:
        counter[name] += 1


@cache
def _is_cuda(device: torch.device) -> bool:  # cached, because `device.type` creates a string at each call
    return device.type == "cuda"


def require_triton() -> None:
    """Raise `MissingExtraError` with the command that installs Triton if it cannot be imported."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise MissingExtraError('this kernel needs Triton: pip install "rooftop[triton]"') from error


@cache
def has_triton() -> bool:
    """Whether Triton can be imported."""
    try:
        require_triton()
    except MissingExtraError:
        return False
    return True


def processors(tensor: Tensor) -> int:
    """Number of multiprocessors of the tensor's device. A small number if Triton's interpreter runs the kernels."""
    return int(_properties(tensor.device).multi_processor_count) if tensor.is_cuda else 2


def shared_memory_bytes(tensor: Tensor) -> int:
    """The maximum shared memory of a program on the tensor's device. A large number if Triton's interpreter runs the
    kernels.
    """
    return int(_properties(tensor.device).shared_memory_per_block_optin) if tensor.is_cuda else 1 << 20


@cache
def _properties(device: torch.device) -> Any:
    return torch.cuda.get_device_properties(device)


@cache
def launches_early(device: torch.device) -> bool:
    """Whether the device supports programmatic dependent launch: a kernel starts while the previous kernel
    still runs.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
