"""Replay the forward and backward pass of a training step from CUDA graphs.

    replays = ReplayedModel(model, device)
    with replays.active():
        loss = task.loss(model, batch)     # the calls of the model are replays
    loss.backward()

A network launches hundreds of kernels for a step. If the host shares its cores with processes that decode images, it
launches the kernels too late, and the GPU waits. A replay is one launch. Only the model is replayed: the loss, the sums
of gradients over ranks, and the optimizer's step run as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rooftop.errors import InputError
from rooftop.rewrites.graphs import UncapturedError
from rooftop.rewrites.training_graphs import Recorder, TrainingReplays


class ReplayedModel:
    """Replays the calls of a model within `active`, with graphs for each of the last few shapes of its inputs.

    Args:
        device: a GPU.
        record: captures the graphs; tests pass another function.

    If the model is called again before the backward pass of its first call, this second call runs without a graph.
    """

    def __init__(self, model: nn.Module, device: torch.device, record: Recorder | None = None) -> None:
        self._model, self._device, self._record = model, device, record
        self._addresses: list[int] = []
        self._replays: TrainingReplays | None = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within the block, calls of the model are replays.

        Raises:
            InputError: a call cannot be captured; the message gives the reason.
        """
        plain = vars(self._model).get("_compiled_call_impl")
        vars(self._model)["_compiled_call_impl"] = self._replays_of(plain or self._model._call_impl)
        try:
            yield
        except UncapturedError as error:
            raise InputError(
                f"run.replay is true, but this model cannot be replayed ({error}): set run.replay=false"
            ) from error
        finally:
            vars(self._model)["_compiled_call_impl"] = plain

    def _replays_of(self, run: Callable[..., Any]) -> TrainingReplays:
        """Return the CUDA graphs of the training step. Graphs read weights and buffers at fixed addresses, so a changed
        address requires new graphs."""
        tensors = (*self._model.parameters(), *self._model.buffers())
        addresses = [each.data_ptr() for each in tensors]
        if self._replays is None or addresses != self._addresses:
            self._addresses = addresses
            self._replays = TrainingReplays(run, self._model, self._device, self._record)
        return self._replays
