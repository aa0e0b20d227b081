"""Copy a checkpoint's data to memory shared with the writing process, during the next forward and backward pass.

    training   step 7 | forward, backward of step 8 | optimizer of step 8
    copying           |-- weights, moments -->|     ^ waits for the copy, not for the disk
    process                                    |---- writes --------------------->

On a GPU a separate CUDA stream copies to pinned memory; the optimizer's stream waits for the copy's event, and the host
never waits. On a CPU a thread copies. All saves reuse the same memory.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from collections.abc import Sequence

import torch
from torch import Tensor


class Staging:
    """Shared memory for all bytes that a rank writes.

    Args:
        size: the size in bytes.
        device: device of the tensors that will be copied.

    Attributes:
        descriptor: file descriptor of the memory; a child process can inherit the descriptor.

    Raises:
        OSError: the host has too little memory, or CUDA cannot pin the memory.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self.device = size, device
        self.descriptor = _memory_file(size)
        self._memory = mmap.mmap(self.descriptor, max(size, 1))
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._pinned = False
        self._thread: threading.Thread | None = None
        self._event: torch.cuda.Event | None = None
        self._error: BaseException | None = None
        if device.type == "cuda":
            self._pin()
            self._stream = torch.cuda.Stream(device)

    def _pin(self) -> None:
        status = torch.cuda.cudart().cudaHostRegister(self._bytes.data_ptr(), self._bytes.numel(), 0)
        if int(status):
            raise OSError(
                f"{self.device} cannot pin the {self.size:,} bytes of host memory that receive the copies of "
                f"checkpoints (CUDA error {int(status)}): raise the limit (ulimit -l, the container's memory), or "
                "use --no-async-save"
            )
        self._pinned = True

    def begin(self, sources: Sequence[Tensor]) -> None:
        """Start to copy the tensors, one after another, into the staging memory. Do not change the tensors before
        `wait_to_change`."""
        assert self._thread is None
        if self.device.type == "cuda":
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._stream):
                self._copy(sources)
            # blocking: the thread that waits for this event must not keep a core busy
            self._event = torch.cuda.Event(blocking=True)
            self._event.record(self._stream)
            return
        self._thread = threading.Thread(target=self._copy_guarded, args=(sources,), name="rooftop staging")
        self._thread.start()

    def _copy_guarded(self, sources: Sequence[Tensor]) -> None:
        try:
            self._copy(sources)
        except BaseException as error:  # `wait` raises this error in the waiting thread
            self._error = error

    @torch.no_grad()
    def _copy(self, sources: Sequence[Tensor]) -> None:
        end = 0
        for source in sources:
            content = source.detach().contiguous().reshape(-1).view(torch.uint8)
            begin, end = end, end + content.numel()
            self._bytes[begin:end].copy_(content, non_blocking=True)

    def wait_to_change(self) -> None:
        """Make the current stream wait for the copy, so that later work on the stream may change the tensors."""
        if self._event is not None:
            torch.cuda.current_stream(self.device).wait_event(self._event)
        self._join()

    def wait(self) -> None:
        """Wait until the copy is complete.

        Raises:
            The exception that the copy raised.
        """
        if self._event is not None:
            self._event.synchronize()
        self._join()
        if self._error is not None:
            raise self._error

    def _join(self) -> None:
        thread = self._thread
        if thread is not None:
            thread.join()

    def ready(self) -> None:
        """Forget the completed copy, so that the next copy can begin."""
        self._event, self._thread, self._error = None, None, None

    def close(self) -> None:
        """Wait for a copy in progress, then release the staging memory."""
        self._join()
        if self._event is not None:
            self._event.synchronize()
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())
            self._pinned = False
        os.close(self.descriptor)


def _memory_file(size: int) -> int:
    """A descriptor of a zeroed file in memory, or of a temporary file if the system has no memory files."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("rooftop checkpoint")
    else:
        descriptor, path = tempfile.mkstemp()
        os.unlink(path)
    os.ftruncate(descriptor, max(size, 1))
    if hasattr(os, "posix_fallocate"):
        # too little memory raises an error here, instead of a signal (SIGBUS) later
        os.posix_fallocate(descriptor, 0, max(size, 1))
    return descriptor
