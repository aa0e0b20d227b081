"""The training of a GPT in TensorBoard.

| tag | |
|---|---|
| train/loss, train/grad_norm, train/learning_rate | of each step |
| speed/tokens_per_s, speed/percent_of_roof | of each step |
| valid/loss | of each validation |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rooftop.train.gpt.running import StepReport
from rooftop.train.reports.tensorboard import summary_writer

TAGS = {
    "train/loss": "loss",
    "train/grad_norm": "grad_norm",
    "train/learning_rate": "learning_rate",
    "speed/tokens_per_s": "tokens_per_s",
    "speed/percent_of_roof": "percent_of_roof",
    "valid/loss": "valid_loss",
}
"""Tag to field of a StepReport."""


class GptTensorBoard:
    """Writes the reports of steps to event files."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def add(self, reports: Iterable[StepReport]) -> None:
        """Add what the reports have, so that it is on the disk before the next checkpoint."""
        for report in reports:
            for tag, name in TAGS.items():
                if (value := getattr(report, name)) is not None:
                    self._writer.add_scalar(tag, value, report.step)
        self._writer.flush()


@contextmanager
def gpt_tensorboard(folder: Path, after: int | None = None) -> Iterator[GptTensorBoard]:
    """Open event files.

    Args:
        folder: for the event files; those of an earlier run stay.
        after: the loaded step; TensorBoard then hides earlier values of later steps. None: nothing was loaded.

    Raises:
        MissingExtraError: tensorboard is not installed.
        OSError: the folder cannot be made or written to.
    """
    writer = summary_writer()(str(folder), purge_step=after + 1 if after else None)
    try:
        yield GptTensorBoard(writer)
    finally:
        writer.close()
