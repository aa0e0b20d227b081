"""CUDA graphs of a model, one for each signature of its inputs, the most recently used ones kept.

A graph reads its inputs where they were when it was captured and writes its outputs where they were: a call copies in,
replays, and the caller copies out. All of them share one pool of memory, so that together they need little more than
the largest. That is safe because they never overlap: one lock holds the calls of a model apart on the host, and a
stream that comes after another waits for it.
"""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

import torch
from torch import Tensor

from rooftop.hardware.graphs import captured_into, in_a_line

_capturing = threading.Lock()  # one capture at a time in a process


@dataclass(frozen=True)
class GraphReport:
    """A graph that is held.

    Attributes:
        inputs: shapes and dtypes.
        bytes: of its inputs, and by how much its capture made the shared pool grow.
        replays: how often it ran.
    """

    inputs: str
    bytes: int
    replays: int


@dataclass
class Graph:
    """One captured call: `inputs` it reads, `outputs` (any structure) it writes."""

    inputs: Sequence[Tensor]
    outputs: Any
    replay: Callable[[], None]
    pool: Any
    bytes: int
    replays: int = 0

    def __call__(self, given: Sequence[Tensor]) -> Any:
        """Copies the given tensors in and replays, on the current stream; gives `outputs`, which the next call
        overwrites."""
        with torch.inference_mode():
            for place, tensor in zip(self.inputs, given, strict=True):
                place.copy_(tensor, non_blocking=True)
        self.replay()
        self.replays += 1
        return self.outputs


@dataclass(frozen=True)
class Refusal:
    """Why a call cannot be a graph."""

    why: str


class UncapturedError(Exception):
    """A call that ran, but could not be captured: `outputs` are those of the run."""

    def __init__(self, why: str, outputs: Any) -> None:
        super().__init__(why)
        self.outputs = outputs


class Graphs:
    """Graphs by signature, at most `most` of them: the one that was not used for longest goes.

    Args:
        device: of the model.
        most: how many graphs.
        state: what must not change from call to call (see `capture`).
    """

    def __init__(self, device: torch.device, most: int, state: Callable[[], Hashable]) -> None:
        self.device, self.most, self.state = device, most, state
        self.entries: OrderedDict[Hashable, Graph | Refusal] = OrderedDict()
        self._stream: torch.cuda.Stream | None = None
        self._previous: torch.cuda.Stream | None = None

    def find(self, key: Hashable) -> Graph | Refusal | None:
        """The entry of a signature, now the most recently used one."""
        entry = self.entries.get(key)
        if entry is not None:
            self.entries.move_to_end(key)
        return entry

    def add(self, key: Hashable, inputs: Sequence[Tensor], call: Callable[[], Any]) -> Graph:
        """Captures `call`, which reads `inputs` and gives its outputs.

        Raises:
            UncapturedError: it runs but cannot be captured; the signature is remembered as refused.
            Exception: what the call itself raises when it runs; nothing is remembered.
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
            self._wait()  # its memory must not be given to others while it runs
            self.entries.popitem(last=False)

    def _wait(self) -> None:
        torch.cuda.synchronize(self.device)

    def _capture(self, inputs: Sequence[Tensor], call: Callable[[], Any]) -> Graph:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        pools = (entry.pool for entry in self.entries.values() if isinstance(entry, Graph))
        return capture(inputs, call, self._stream, next(pools, None), self.state)

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """A call on the current stream, after the call before and what was launched on its stream since.

        Raises:
            RuntimeError: the caller is capturing a graph, of which replays cannot be a part.
        """
        with torch.cuda.device(self.device):
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError("Engine: called while a CUDA graph is captured: build it with graphs=False for that")
            current = torch.cuda.current_stream()
            if self._previous is not None and self._previous != current:
                current.wait_stream(self._previous)
                for entry in self.entries.values():
                    for place in entry.inputs if isinstance(entry, Graph) else ():
                        place.record_stream(current)  # an engine may go while its last call runs
            self._previous = current
            yield


def capture(
    inputs: Sequence[Tensor],
    call: Callable[[], Any],
    stream: torch.cuda.Stream,
    pool: Any,
    state: Callable[[], Hashable],
) -> Graph:
    """Run a call twice, then capture it under inference mode, all on `stream`; the current stream waits for it.

    The first run is for lazy initialization, which must not fall into a capture, and for the call's own errors. The
    second is watched for waits of the host, since a capture that fails leaves traces in the allocator.

    Args:
        inputs: what the call reads; they have their values.
        stream: the same for all graphs of a model: libraries keep workspaces for each stream.
        pool: of another graph, to share its memory; None: one of its own.
        state: must give the same before and after the first run. A state that a model carries from call to call would
            be replayed, not carried on.

    Raises:
        UncapturedError: the first run went well, but it changed the state, or the host waits, or the capture failed.
        OutOfMemoryError: in a run or in the capture.
        Exception: what a run raises.
    """
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    try:
        # This context of the stream also sets it back where that of a failed capture does not.
        with _capturing, torch.cuda.stream(stream):
            with torch.no_grad():
                before = state()
                outputs = call()
                if state() != before:
                    raise UncapturedError("the model changes its buffers in each call", outputs)
                if waits := _waits(call):
                    raise UncapturedError(f"the host waits for the GPU at {waits[0]}", outputs)
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.inference_mode(), captured_into(graph, stream, pool):
                    reserved = torch.cuda.memory_reserved(stream.device)
                    captured = call()
                    grown = torch.cuda.memory_reserved(stream.device) - reserved
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                _free_generator(stream.device)
                raise UncapturedError(in_a_line(error), outputs) from error
    finally:
        current.wait_stream(stream)
    held = sum(tensor.numel() * tensor.element_size() for tensor in inputs)
    return Graph(inputs, captured, graph.replay, graph.pool(), held + grown)


def _waits(call: Callable[[], Any]) -> list[str]:
    """The lines of Python at which the host waits for the GPU, as far as torch notices (an explicit synchronization it
    does not)."""
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
            if threading.get_ident() == here:  # the mode is the whole process's
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


def _free_generator(device: torch.device) -> None:
    """After a capture that could not be ended the random numbers of the device may still wait for its end, and refuse
    all use: then their generator goes on from a copy of its state."""
    generator = torch.cuda.default_generators[device.index]
    try:
        torch.empty(1, device=device).uniform_(generator=generator)
    except RuntimeError:
        generator.graphsafe_set_state(generator.clone_state())
