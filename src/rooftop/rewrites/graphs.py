"""CUDA graphs of a model, one per signature of the inputs, in an LRU cache.

A graph reads its inputs and writes its outputs at the addresses of the capture. So a call copies inputs in and replays,
and the caller copies outputs out. All graphs share one memory pool, and together need little more than the largest
graph. Sharing is safe because replays never overlap: a lock serializes the calls of a model on the host, and each
stream waits for the stream of the previous call.
"""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO, TypeVar

import torch
from torch import Tensor

from rooftop.hardware.graphs import captured_into
from rooftop.hardware.tracing_questions import CAPTURING, answered
from rooftop.words import in_a_line

T = TypeVar("T")

capturing = threading.Lock()  # a process makes one capture at a time


@dataclass(frozen=True)
class GraphReport:
    """What a report shows of a captured CUDA graph.

    Attributes:
        inputs: shapes and dtypes of the inputs.
        bytes: size of the inputs, plus the growth of the shared pool by the capture.
        replays: number of replays.
    """

    inputs: str
    bytes: int
    replays: int


@dataclass
class Graph:
    """One call of the model, captured as a CUDA graph. The graph reads the tensors `inputs` and writes `outputs`, which
    may be any structure of tensors."""

    inputs: Sequence[Tensor]
    outputs: Any
    replay: Callable[[], None]
    pool: Any
    bytes: int
    replays: int = 0

    def __call__(self, given: Sequence[Tensor]) -> Any:
        """Copy the given tensors into the graph's inputs, and replay the graph on the current stream. Return `outputs`,
        which the next call overwrites.
        """
        with torch.inference_mode():
            for place, tensor in zip(self.inputs, given, strict=True):
                place.copy_(tensor, non_blocking=True)
        self.replay()
        self.replays += 1
        return self.outputs


@dataclass(frozen=True)
class Refusal:
    """The reason why a call of the model cannot be captured as a CUDA graph."""

    why: str


class UncapturedError(Exception):
    """A call of the model ran, but could not be captured as a CUDA graph. `outputs` are the results of the run."""

    def __init__(self, why: str, outputs: Any) -> None:
        super().__init__(why)
        self.outputs = outputs


class Graphs:
    """A model's CUDA graphs, and its refusals, by the signature of a call's inputs. If there are more than `most` of
    them, the least recently used one is dropped.

    Args:
        device: device of the model.
        most: largest number of graphs and refusals together.
        state: returns a value that must not change from call to call (see `capture`).
        compared: see `capture`.
    """

    def __init__(self, device: torch.device, most: int, state: Callable[[], Hashable], compared: bool = False) -> None:
        self.device, self.most, self.state, self.compared = device, most, state, compared
        self.entries: OrderedDict[Hashable, Graph | Refusal] = OrderedDict()
        self._stream: torch.cuda.Stream | None = None
        self._previous: torch.cuda.Stream | None = None

    def find(self, key: Hashable) -> Graph | Refusal | None:
        """Return the graph or refusal with the signature `key`; None if there is none. Mark it as the most recently
        used one."""
        entry = self.entries.get(key)
        if entry is not None:
            self.entries.move_to_end(key)
        return entry

    def add(self, key: Hashable, inputs: Sequence[Tensor], call: Callable[[], Any]) -> Graph:
        """Capture `call`, which reads `inputs` and returns its outputs.

        Raises:
            UncapturedError: the call runs but cannot be captured. The call's signature is then stored as refused.
            Exception: any error that the call itself raises; nothing is stored.
        """
        try:
            graph = self._capture(inputs, call)
        except UncapturedError as error:
            self._keep(key, Refusal(str(error)))
            raise
        self._keep(key, graph)
        return graph

    def _keep(self, key: Hashable, entry: Graph | Refusal) -> None:
        self.entries[key] = entry
        while len(self.entries) > self.most:
            self._wait()  # a graph's memory must not be reused while the graph runs
            self.entries.popitem(last=False)

    def _wait(self) -> None:
        torch.cuda.synchronize(self.device)

    def _capture(self, inputs: Sequence[Tensor], call: Callable[[], Any]) -> Graph:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        pools = (entry.pool for entry in self.entries.values() if isinstance(entry, Graph))
        return capture(inputs, call, self._stream, next(pools, None), self.state, self.compared)

    @contextmanager
    def in_order(self, refusal: str) -> Iterator[None]:
        """Run a call on the current stream, after all work on the stream of the previous call.

        Args:
            refusal: the message of the RuntimeError.

        Raises:
            RuntimeError: the caller is capturing a graph, which cannot contain replays.
        """
        with torch.cuda.device(self.device):
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(refusal)
            current = torch.cuda.current_stream()
            if self._previous is not None and self._previous != current:
                current.wait_stream(self._previous)
                for entry in self.entries.values():
                    for place in entry.inputs if isinstance(entry, Graph) else ():
                        # the memory stays allocated until this call ends, even if the engine is deleted
                        place.record_stream(current)
            self._previous = current
            yield


def capture(
    inputs: Sequence[Tensor],
    call: Callable[[], Any],
    stream: torch.cuda.Stream,
    pool: Any,
    state: Callable[[], Hashable],
    compared: bool = False,
) -> Graph:
    """Run a call twice, then capture it in inference mode, all on `stream`. The current stream waits for `stream`.

    The first run does lazy initialization, which must not happen in a capture, and raises errors of the call itself.
    The second run detects GPU synchronization before the capture, because a capture that fails leaves the allocator
    changed.

    Args:
        inputs: the tensors that the call reads, with their values.
        stream: the same stream for all graphs of a model, because libraries keep a workspace per stream.
        pool: memory pool of another graph, to share; None: a new pool.
        state: must return the same value before and after the first run. If the values differ, a graph would replay
            stale state that the model keeps from call to call.
        compared: whether the user of the graph compares the graph's results and time with those of the call. If so, a
            call that synchronizes only outside of captures is also captured (see `waits_in_a_capture`), although its
            graph takes another path through the model.

    Raises:
        UncapturedError: the first run succeeded, but the state changed, the host synchronizes with the GPU, or the
            capture failed.
        OutOfMemoryError: a run or the capture needs more memory.
        Exception: any error that a run raises.
    """
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)

    def record() -> tuple[torch.cuda.CUDAGraph, Any, int]:
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), captured_into(graph, stream, pool):
            reserved = torch.cuda.memory_reserved(stream.device)
            captured = call()
            return graph, captured, torch.cuda.memory_reserved(stream.device) - reserved

    try:
        # This context resets the current stream even if a failed capture does not.
        with capturing, torch.cuda.stream(stream), torch.no_grad():
            before = state()
            outputs = call()
            if state() != before:
                raise UncapturedError("the model changes its buffers in each call", outputs)
            graph, captured, grown = recorded(record, call, outputs, stream, compared)
    finally:
        current.wait_stream(stream)
    held = sum(tensor.numel() * tensor.element_size() for tensor in inputs)
    return Graph(inputs, captured, graph.replay, graph.pool(), held + grown)


def recorded(
    record: Callable[[], T], call: Callable[[], Any], outputs: Any, stream: torch.cuda.Stream, compared: bool
) -> T:
    """Capture `call` on `stream` by `record()`, and return its result. First run the call again, to detect GPU
    synchronization.

    Some models run other operators in a capture: older versions of transformers then build an attention mask that masks
    nothing, and attention with a mask is slower. So if the call does not wait for the GPU, the model is told that there
    is no capture. If the call waits for the GPU, or this capture fails, the model is told truthfully that a capture is
    running.

    Args:
        outputs: results of the call, for the error.
        compared: see `capture`.

    Raises:
        UncapturedError: the host synchronizes with the GPU, or the capture failed.
        OutOfMemoryError: the capture needs more memory.
    """
    # `waits` also runs the model inside `unaware`, which replaces `torch.cuda.is_current_stream_capturing`. So compiled
    # code that calls this function is compiled again in `waits`, before the capture.
    with unaware(stream) as audience:
        found = waits(call)
        try:
            if not found:
                return _recorded_once(record, outputs, stream)
        except UncapturedError:
            if not audience.asked:
                raise
    if found and compared:
        found = waits_in_a_capture(call, found)
    if found:
        raise UncapturedError(f"the host waits for the GPU at {found[0]}", outputs)
    return _recorded_once(record, outputs, stream)


def _recorded_once(record: Callable[[], T], outputs: Any, stream: torch.cuda.Stream) -> T:
    try:
        return record()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        free_generator(stream.device)
        raise UncapturedError(in_a_line(error), outputs) from error


@dataclass
class Audience:
    """Records whether the model has asked PyTorch if the current stream is being captured as a CUDA graph."""

    asked: bool = False


@contextmanager
def unaware(stream: torch.cuda.Stream) -> Iterator[Audience]:
    """In the block, tell the model that `stream` captures no graph. PyTorch, Rooftop and code on other streams get the
    true answer.
    """
    audience = Audience()

    def answer(original: Callable[[], bool]) -> bool:
        audience.asked = True
        return original() and torch.cuda.current_stream() != stream

    with answered(answer, [CAPTURING]):
        yield audience


def waits_in_a_capture(call: Callable[[], Any], found: list[str]) -> list[str]:
    """The lines at which the host would wait during a capture of a call that waits at `found` outside of captures.

    Some models wait for the GPU only outside of captures. Models of transformers read from the GPU whether they need a
    mask, but use a mask in each capture. So the call runs twice more, while all code in this thread is told that a
    capture is running. The first of these two runs does one-time work, such as compiling. The function returns the
    waits of the second run.
    """
    here = threading.get_ident()
    try:
        with answered(lambda original: threading.get_ident() == here or original(), [CAPTURING], told_the_truth=()):
            call()
            return waits(call)
    except Exception:  # the call refuses captures
        return found


def waits(call: Callable[[], Any]) -> list[str]:
    """The Python lines at which the host waits for the GPU, as far as PyTorch detects them. PyTorch does not detect an
    explicit `torch.cuda.synchronize`.
    """
    here, found = threading.get_ident(), []
    mode = torch.cuda.get_sync_debug_mode()

    def note(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if "called a synchronizing CUDA operation" in str(message):
            if threading.get_ident() == here:  # other threads warn as well: the debug mode is of the process
                found.append(f"{filename}:{lineno}")
        elif "Synchronization debug mode is a prototype" not in str(message):
            shown(message, category, filename, lineno, file, line)

    with warnings.catch_warnings():
        shown = warnings.showwarning
        warnings.simplefilter("always")
        warnings.showwarning = note
        try:
            torch.cuda.set_sync_debug_mode("warn")
            call()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    return found


def free_generator(device: torch.device) -> None:
    """Replace the device's random generator by a copy if a failed capture has left it unusable."""
    generator = torch.cuda.default_generators[device.index]
    try:
        torch.empty(1, device=device).uniform_(generator=generator)
    except RuntimeError:
        generator.graphsafe_set_state(generator.clone_state())
