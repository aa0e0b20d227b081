"""The rule for CUDA graphs, with which the host makes one launch per call."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from rooftop.rewrites.candidates import Candidate, Rule, Times, only_on_gpu
from rooftop.rewrites.graphs import Graph, Graphs, UncapturedError
from rooftop.rewrites.structures import mapped, signature
from rooftop.rewrites.training_graphs import TrainingReplays

MOST_GRAPHS = 8
GAP_MS = 0.5e-3
"""A rough estimate of the time that a graph saves between two kernels, even if the host is far ahead. At batch 128 on
an H200, graphs saved 0.2 to 0.6 ms in four networks, whose kernels were not counted. Training saves more than
inference."""

IN_A_CAPTURE = (
    "optimize: the model was called while a CUDA graph is being captured, which cannot contain the model's own graphs: "
    "pass rules= without cuda-graphs"
)
"""Message of the error if a caller captures `Replays`."""


class CudaGraphs(Rule):
    """Replay each call of the model from a CUDA graph. There is one graph for each set of input shapes, strides and
    dtypes; in training there are two, one for forward and one for backward. The optimizer's step is not captured.
    """

    name = "cuda-graphs"
    exact = True
    trains = True
    kind = "graphs"

    def refusal(self, candidate: Candidate) -> str | None:
        if "compile-reduce-overhead" in candidate.changes:
            return "the compiler already replays graphs"
        return only_on_gpu(candidate)

    def predicted_ms(self, times: Times) -> float:
        if times.device_ms is None:
            return 0.0
        gaps_ms = GAP_MS * times.fusable.launches if times.fusable is not None else 0.0
        return times.wall_ms - max(times.device_ms - gaps_ms + times.copies_ms, times.optimizer.host_ms)

    def apply(self, candidate: Candidate) -> str:
        if candidate.training:
            candidate.call = TrainingReplays(candidate.call, candidate.model, candidate.device)
            candidate.placed = True
            return "forward and backward"
        buffers = [buffer for buffer in candidate.model.buffers() if not buffer.is_inference()]
        candidate.call = Replays(candidate.call, candidate.device, lambda: tuple(b._version for b in buffers))
        candidate.frozen = True  # a graph reads parameters at the addresses that they had at the capture
        return "every call"


class Replays:
    """Run a function of tensors by replaying CUDA graphs. Results are copies.

    Args:
        run: function to capture, once for each signature of its arguments.
        device: the device on which all of `run` runs.
        state: returns a value that must be the same before and after a call (see `rooftop.rewrites.graphs.capture`).

    A call raises the errors of `run`. The first call raises `UncapturedError` if `run` cannot be captured. Later calls
    that cannot be captured run `run` without a graph.
    """

    def __init__(self, run: Callable[..., Any], device: torch.device, state: Callable[[], Hashable]) -> None:
        self.run = run
        self.graphs = Graphs(device, MOST_GRAPHS, state, compared=True)
        self._lock = Lock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock, self.graphs.in_order(IN_A_CAPTURE):
            key, given = signature((args, kwargs), lambda t: (tuple(t.shape), t.stride(), t.dtype))
            entry = self.graphs.find(key)
            if entry is None:
                first = not self.graphs.entries
                try:
                    entry = self._captured(key, given, args, kwargs)
                except UncapturedError as error:
                    if first:
                        raise
                    return error.outputs
            return mapped(entry(given), torch.clone) if isinstance(entry, Graph) else self.run(*args, **kwargs)

    def _captured(self, key: Hashable, given: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Graph:
        with torch.no_grad():
            places = [torch.clone(tensor) for tensor in given]
        place_of = {id(tensor): place for tensor, place in zip(given, places, strict=True)}
        own_args, own_kwargs = mapped((args, kwargs), lambda tensor: place_of[id(tensor)])

        def call() -> Any:
            return mapped(self.run(*own_args, **own_kwargs), lambda t: t, strict=True)

        return self.graphs.add(key, places, call)

    def bytes(self) -> int:
        """Bytes of memory of all graphs."""
        return sum(entry.bytes for entry in self.graphs.entries.values() if isinstance(entry, Graph))
