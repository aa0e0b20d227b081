"""Report the training of a GPT to TensorBoard.

| tag | |
|---|---|
| train/loss, train/grad_norm, train/learning_rate | of each step |
| speed/tokens_per_s, speed/percent_of_roof | of each step |
| valid/loss | of each validation |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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
"""For each TensorBoard tag, the field of a StepReport that has its value."""


class GptTensorBoard:
    """Writes the reports of steps to event files. If a write fails, e.g. on a full disk, the training continues.

    Args:
        folder: folder of the event files; files of an earlier run stay.
        after: the step of the loaded checkpoint; TensorBoard then hides an earlier run's values of later steps. None:
            no checkpoint was loaded.
        warn: prints a note.

    Raises:
        MissingExtraError: tensorboard is not installed.
    """

    def __init__(self, folder: Path, after: int | None, warn: Callable[[str], None]) -> None:
        writer_class, self._warn = summary_writer(), warn
        self._writer: Any = None
        with self._shielded():
            self._writer = writer_class(str(folder), purge_step=after + 1 if after else None)

    def add(self, reports: Iterable[StepReport]) -> None:
        """Write the values of reports to the disk at once, so that they are there before the next checkpoint."""
        if self._writer is None:
            return
        with self._shielded():
            for report in reports:
                for tag, name in TAGS.items():
                    if (value := getattr(report, name)) is not None:
                        self._writer.add_scalar(tag, value, report.step)
            self._writer.flush()

    def close(self) -> None:
        """Close the files."""
        if self._writer is not None:
            with self._shielded():
                self._writer.close()

    @contextmanager
    def _shielded(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._writer = None
            self._warn(f"note: event files end here, and the training continues: {error}")
