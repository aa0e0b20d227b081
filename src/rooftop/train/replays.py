"""A function on a GPU that is launched by the host a few times, and from then on replayed from a CUDA graph.

    gradients = Replayed(gradients_of_step, device)
    loss, norm = gradients(tokens, step)

A step of a model has thousands of launches. Where its layers are small, or each is cut into pieces, the host takes
longer for these than the GPU computes; a replay is one launch. It reads and writes the same memory as what was
captured: whatever changes from step to step must come in by tensors, and is copied to where it was then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rooftop.hardware.graphs import captured_into, in_a_line

WARM_UP = 3
"""Calls before the capture: kernels are compiled in the first, and libraries and NCCL set themselves up."""


class Replayed:
    """Gives what a function gives, for autograd numbers of which it knows nothing more.

    Args:
        function: of tensors on the device, that gives tensors; it may do more, such as leave gradients behind. The host
            waits for nothing within. What it reads of Python, a model's modes and hooks among it, is read for the last
            time when it is captured; and a model's memory must stay where it was then.
        device: a GPU.
        warm_up: calls that are made as they are, on the stream on which it is captured later.

    Attributes:
        captured: whether calls are replays by now. What the function has left behind then, such as gradients, belongs
            to the graph and must not be let go of: a replay writes it anew, there.

    Raises:
        ValueError: the device is no GPU, or a negative `warm_up`.
    """

    def __init__(
        self, function: Callable[..., tuple[Tensor, ...]], device: torch.device, warm_up: int = WARM_UP
    ) -> None:
        if device.type != "cuda":
            raise ValueError(f"Replayed: a CUDA graph needs a GPU, got {device}: call the function itself there")
        if warm_up < 0:
            raise ValueError(f"Replayed: warm_up must be 0 or more calls, got {warm_up}")
        self._function, self._device, self._left = function, device, warm_up
        self._stream = torch.cuda.Stream(device)  # a backward runs on the stream of its forward
        self._graph: torch.cuda.CUDAGraph | None = None

    @property
    def captured(self) -> bool:
        return self._graph is not None

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """What the function gives for these.

        Args:
            *inputs: on the device, or on the CPU (pinned, where the host shall not wait); in each call of the same
                shapes and dtypes.

        Raises:
            ValueError: a replay is given others, or more or fewer.
            OutOfMemoryError: beside what calls left in the allocator, the graph has memory of its own.
            RuntimeError: the function cannot be captured; the message says what it does that cannot. What it has left
                behind then, such as gradients, has no values: let go of it.
        """
        with torch.cuda.device(self._device):
            if self._graph is None and self._left:
                self._left -= 1
                return self._launched([self._here(each) for each in inputs])
            if self._graph is None:
                self._capture(inputs)
            return self._replay(inputs)

    def _here(self, given: Tensor) -> Tensor:
        return given.detach().to(self._device, non_blocking=True)

    def _launched(self, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            outputs = self._function(*inputs)
        current.wait_stream(self._stream)
        return tuple(output.detach() for output in outputs)

    def _capture(self, inputs: tuple[Tensor, ...]) -> None:
        self._inputs = [self._here(each).clone() for each in inputs]
        graph = torch.cuda.CUDAGraph()
        try:
            with captured_into(graph, self._stream):
                self._outputs = self._function(*self._inputs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise RuntimeError(
                f"Replayed: this cannot be captured as a CUDA graph: {in_a_line(error)}; leave the graph out"
            ) from error
        self._graph = graph

    def _replay(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        assert self._graph is not None
        captured, given = _described(self._inputs), _described(inputs)
        if captured != given:
            raise ValueError(
                f"Replayed: captured with {captured}, got {given}: call it with the same shapes and dtypes, or make "
                "another"
            )
        for place, tensor in zip(self._inputs, inputs, strict=True):
            place.copy_(tensor.detach(), non_blocking=True)
        self._graph.replay()
        return tuple(output.detach().clone() for output in self._outputs)


def _described(tensors: Sequence[Tensor]) -> str:
    return ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors) or "nothing"
