"""A stand-in for a capture, so that code with CUDA graphs is tested on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftop.rewrites.training_graphs import Backward, Forward, Recorded


def run_again(forward: Forward, backward: Backward) -> Recorded:
    """A stand-in for a capture: replays write into the same memory."""
    current: list[list[Tensor]] = []
    backward(forward())
    outputs = forward()
    current[:] = [outputs]
    gradients = backward(outputs)

    def replay_forward() -> None:
        with torch.enable_grad():
            current[:] = [forward()]
        for place, value in zip(outputs, current[0], strict=True):
            place.data.copy_(value.detach())

    def replay_backward() -> None:
        for place, value in zip(gradients, backward(current[0]), strict=True):
            if place is not None and value is not None:
                place.copy_(value)

    return Recorded(outputs, gradients, replay_forward, replay_backward)
