"""Replay a function on a GPU from a CUDA graph, after a few ordinary calls.

    gradients = Replayed(gradients_of_step, device)
    loss, norm = gradients(tokens, step)

A training step launches thousands of kernels. If the layers are small, or split over ranks, the host needs more time to
launch the kernels than the GPU needs to run them. A replay is a single launch. Every replay reads and writes the memory
addresses of the capture. So all data that change from step to step must be input tensors, which each call copies to
these addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rooftop.hardware.graphs import captured_into
from rooftop.words import in_a_line

WARM_UP = 3
"""Default number of calls before the capture. The first call compiles kernels, and initializes libraries and NCCL."""


class Replayed:
    """Calls a function, or replays it from a CUDA graph; outputs are detached from autograd.

    Args:
        function: a function of tensors on the device that returns tensors. The function may have side effects, such as
            gradients, but must not wait for the GPU. The Python code of the function runs for the last time during the
            capture, so later changes of a module's mode or hooks have no effect. After the capture, the addresses of
            the model's tensors must not change.
        device: a GPU.
        warm_up: number of ordinary calls before the capture, on the same stream.

    Attributes:
        captured: whether the graph is captured, so that calls are replays. Keep the tensors that the function stored
            during the capture, such as gradients, because each replay writes to them again.

    Raises:
        ValueError: the device is not a GPU, or `warm_up` is negative.
    """

    def __init__(
        self, function: Callable[..., tuple[Tensor, ...]], device: torch.device, warm_up: int = WARM_UP
    ) -> None:
        if device.type != "cuda":
            raise ValueError(f"Replayed: a CUDA graph needs a GPU, got {device}: call the function directly instead")
        if warm_up < 0:
            raise ValueError(f"Replayed: warm_up must be 0 or more calls, got {warm_up}")
        self._function, self._device, self._left = function, device, warm_up
        self._stream = torch.cuda.Stream(device)  # for warm-up and capture: backward runs on its forward's stream
        self._graph: torch.cuda.CUDAGraph | None = None

    @property
    def captured(self) -> bool:
        return self._graph is not None

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs of the function for these inputs.

        Args:
            *inputs: tensors on the device, or on the CPU (in pinned memory if the host must not wait). Every call needs
                the same shapes and dtypes.

        Raises:
            ValueError: the number, shapes or dtypes of the inputs differ from those of the capture.
            OutOfMemoryError: the GPU has too little memory for the graph. The graph has its own memory pool, separate
                from the memory that the allocator keeps from earlier calls.
            RuntimeError: the function cannot be captured; the message gives the reason. After this error, tensors that
                the function stored, such as gradients, have no valid values: release them.
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
                f"Replayed: the function cannot be captured in a CUDA graph: {in_a_line(error)}; leave the graph out"
            ) from error
        self._graph = graph

    def _replay(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        assert self._graph is not None
        captured, given = _described(self._inputs), _described(inputs)
        if captured != given:
            raise ValueError(
                f"Replayed: captured with {captured}, got {given}: give inputs with the same shapes and dtypes, or "
                "create another Replayed"
            )
        for place, tensor in zip(self._inputs, inputs, strict=True):
            place.copy_(tensor.detach(), non_blocking=True)
        self._graph.replay()
        return tuple(output.detach().clone() for output in self._outputs)


def _described(tensors: Sequence[Tensor]) -> str:
    return ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors) or "nothing"
