"""The two ways in which a rank writes its file of a checkpoint: at once, or by a process from a copy."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from rooftop.train import checkpoint_files
from rooftop.train.checkpoint_files import FilePiece, request, write_file
from rooftop.train.staging import Staging


def write_now(path: Path, pieces: Sequence[FilePiece], sources: Sequence[Tensor]) -> None:
    """Write pieces from where they are, one after another; of what is on a GPU one is copied at a time.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(exist_ok=True)
    write_file(path, pieces, _contents(sources))


@torch.no_grad()
def _contents(sources: Sequence[Tensor]) -> Iterator[memoryview]:
    for source in sources:
        yield source.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


class WritingProcess:
    """Writes pieces from a copy, in a process; to be called once, in any thread.

    Args:
        path: of the file.
        pieces: that the copy has, one after another.
        staging: the copy, which may still be under way.
        sources: what is copied; kept until it is.

    Attributes:
        seconds: from the copy to the file being on the disk.

    Raises:
        OSError: it cannot be written.
        RuntimeError: the process has failed otherwise.
    """

    def __init__(self, path: Path, pieces: Sequence[FilePiece], staging: Staging, sources: Sequence[Tensor]) -> None:
        self.path, self.pieces, self.staging, self.sources = path, pieces, staging, sources
        self._process: subprocess.Popen[str] | None = None
        self._given_up, self.seconds = False, 0.0

    def __call__(self) -> None:
        """Until the file is on the disk."""
        self.staging.wait()
        began, self.sources = time.perf_counter(), ()
        self.path.parent.mkdir(exist_ok=True)
        # Isolated: neither this library nor torch is imported, and nothing of the environment changes it.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", checkpoint_files.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=[self.staging.descriptor],
            start_new_session=True,  # what Ctrl-C and schedulers send to all does not end it
        )
        if self._given_up:
            self._process.kill()
        said, errors = self._process.communicate(request(self.path, self.pieces, self.staging.descriptor))
        if self._process.returncode == 1 and said:
            raise OSError(said.strip())
        if self._process.returncode:
            last = (errors.strip().splitlines() or ["it said nothing"])[-1]
            raise RuntimeError(f"the process that writes {self.path} ended with {self._process.returncode}: {last}")
        self.seconds = time.perf_counter() - began

    def give_up(self) -> None:
        """End the process, if it runs or will."""
        self._given_up = True
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
