"""Write a rank's file: directly from the tensors, or in a separate process from a copy of the tensors."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from rooftop.train.checkpoints import files as checkpoint_files
from rooftop.train.checkpoints.files import FilePiece, request, write_file
from rooftop.train.checkpoints.staging import Staging


def write_now(path: Path, pieces: Sequence[FilePiece], sources: Sequence[Tensor]) -> None:
    """Write pieces directly from their tensors; pieces on a GPU are copied to the host one at a time.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(exist_ok=True)
    write_file(path, pieces, _contents(sources))


@torch.no_grad()
def _contents(sources: Sequence[Tensor]) -> Iterator[memoryview]:
    for source in sources:
        yield source.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


class WritingProcess:
    """Writes a rank's file from a copy of the tensors, in a separate process. Call the object once, in any thread.

    Args:
        path: path of the file.
        pieces: the pieces that the copy contains, in order.
        staging: the copy, which may still be in progress.
        sources: the tensors that are copied; the object keeps them alive until the copy is complete.

    Attributes:
        seconds: time from the end of the copy until the file is on the disk.

    Raises:
        OSError: the file cannot be written.
        RuntimeError: the process failed for a reason other than an OSError.
    """

    def __init__(self, path: Path, pieces: Sequence[FilePiece], staging: Staging, sources: Sequence[Tensor]) -> None:
        self.path, self.pieces, self.staging, self.sources = path, pieces, staging, sources
        self._process: subprocess.Popen[str] | None = None
        self._given_up, self.seconds = False, 0.0

    def __call__(self) -> None:
        """Write the file, and return once it is on the disk."""
        self.staging.wait()
        began, self.sources = time.perf_counter(), ()
        self.path.parent.mkdir(exist_ok=True)
        # -I isolates the process from PYTHON* variables and the user's packages; the process imports only the standard
        # library.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", checkpoint_files.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=[self.staging.descriptor],
            start_new_session=True,  # Ctrl-C and schedulers signal the training's whole process group
        )
        if self._given_up:
            self._process.kill()
        said, errors = self._process.communicate(request(self.path, self.pieces, self.staging.descriptor))
        if self._process.returncode == 1 and said:
            raise OSError(said.strip())
        if self._process.returncode:
            last = (errors.strip().splitlines() or ["it said nothing"])[-1]
            raise RuntimeError(
                f"the process that writes {self.path} ended with status {self._process.returncode}: {last}"
            )
        self.seconds = time.perf_counter() - began

    def give_up(self) -> None:
        """Kill the process that writes the file. If the process has not started yet, it is killed when it starts."""
        self._given_up = True
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
