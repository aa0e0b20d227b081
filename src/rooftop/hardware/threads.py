"""Start work on several devices from one process. Each device has a thread with the calling thread's modes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from rooftop.words import counted


def places_of(named: Sequence[torch.device | str] | None) -> list[torch.device]:
    """The given devices, with indices. If no devices are given: all GPUs, or the CPU if there are none.

    Raises:
        TypeError: a single device is given instead of a list.
        ValueError: the list is empty, or a device does not exist.
    """
    if isinstance(named, str | int | torch.device):
        raise TypeError(f"devices is {str(named)!r}, expected a list of devices, such as [{str(named)!r}]")
    if named is None:
        named = [f"cuda:{index}" for index in range(torch.cuda.device_count())] or ["cpu"]
    if not named:
        raise ValueError("devices is empty: name at least one device, or leave the argument out to use all GPUs")
    places = [with_index(_device(name)) for name in named]
    missing = [p for p in places if p.type == "cuda" and (p.index or 0) >= torch.cuda.device_count()]
    if missing:
        raise ValueError(
            f"{', '.join(map(str, missing))}: torch {torch.__version__} can use "
            f"{counted(torch.cuda.device_count(), 'GPU')} here"
        )
    return places


def _device(name: torch.device | str) -> torch.device:
    try:
        return torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{name!r} is no device of this machine: expected names such as 'cuda:0' or 'cpu'") from error


def with_index(device: torch.device) -> torch.device:
    """The device as tensors name it: a GPU with its index, the CPU without an index."""
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if device.type == "cpu" else device


@dataclass(frozen=True)
class Modes:
    """The part of a thread's state that affects operators: grad mode, inference mode and autocast."""

    grad: bool
    inference: bool
    autocasts: tuple[tuple[str, torch.dtype], ...]  # device type, dtype
    autocast_cache: bool

    @classmethod
    def of_this_thread(cls) -> Modes:
        """The current modes of the calling thread."""
        kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds),
            torch.is_autocast_cache_enabled(),
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Set these modes in this thread."""
        with ExitStack() as stack:
            # inference_mode also sets the grad mode; the next line sets it again
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, dtype in self.autocasts:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self.autocast_cache))
            yield


def caller_stream(device: torch.device) -> torch.cuda.Stream | None:
    """This thread's current stream on the device; None for a device without streams."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


@contextmanager
def current(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Make the stream, its device and the device's CUDA context current in this thread. None changes nothing."""
    if stream is None:
        yield
        return
    with torch.cuda.stream(stream):
        stream.record_event()  # a thread's first CUDA call makes the context current; without it, cuBLAS warns
        yield


@contextmanager
def noted(note: str) -> Iterator[None]:
    """Add `note`, which says where an exception comes from, to an exception raised in the block."""
    try:
        yield
    except BaseException as error:
        error.add_note(note)
        raise


def run_together(
    threads: ThreadPoolExecutor, calls: Sequence[Callable[[], None]], cancel: Callable[[], None] = lambda: None
) -> None:
    """Run each call in a thread. When all calls have ended, raise the exception that came first.

    Args:
        threads: a pool with at least one thread per call.
        cancel: called when a call raises, or when this thread is interrupted while it waits for the calls.
    """
    failures: list[BaseException] = []

    def guarded(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            failures.append(error)
            cancel()

    running = [threads.submit(guarded, call) for call in calls]
    try:
        wait(running)
    except BaseException:
        cancel()
        wait(running)
        raise
    try:
        if failures:
            raise failures[0]
    finally:
        failures.clear()  # break the cycle: the exceptions hold this frame, and the frame holds the exceptions
