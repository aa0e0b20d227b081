"""Report a training to TensorBoard; `tensorboard --logdir runs` compares all runs.

| tag | |
|---|---|
| train/loss, train/grad_norm, train/learning_rate | of each step |
| speed/samples_per_s, speed/waiting | of each step |
| valid/NAME | loss and metrics of each evaluation |
| examples/N | pictures of the task, at the end |
| recipe | the recipe as text |
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from rooftop.errors import MissingExtraError
from rooftop.train.fitting.records import EvaluationRecord, Facts, Fitted, StepRecord
from rooftop.train.recipes.recipe import Recipe
from rooftop.train.reports.pictures import example_pictures

STEP_TAGS = {
    "train/loss": "loss",
    "train/grad_norm": "grad_norm",
    "train/learning_rate": "learning_rate",
    "speed/samples_per_s": "samples_per_s",
    "speed/waiting": "waiting",
}
"""For each TensorBoard tag, the field of a StepRecord that has its value."""


class TensorBoard:
    """An observer that writes event files.

    Args:
        folder: folder of the event files. Files of an earlier run stay. If a resumed training repeats steps,
            TensorBoard shows only the new values of these steps.
        recipe: the recipe of the training.

    Raises:
        MissingExtraError: tensorboard is not installed.
    """

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        self._writer_class = summary_writer()
        self._folder, self._recipe = folder, recipe
        self._writer: Any = None
        self._task: Any = None

    def began(self, facts: Facts, task: Any) -> None:
        self._task = task
        self._writer = self._writer_class(str(self._folder), purge_step=facts.before + 1 if facts.before else None)
        self._writer.add_text("recipe", f"```toml\n{self._recipe.toml()}\n```")

    def stepped(self, records: list[StepRecord]) -> None:
        for record in records:
            for tag, name in STEP_TAGS.items():
                self._writer.add_scalar(tag, getattr(record, name), record.step)

    def evaluated(self, record: EvaluationRecord) -> None:
        for name, value in record.values.items():
            self._writer.add_scalar(f"valid/{name}", value, record.step)
        self._writer.flush()

    def noted(self, note: str) -> None:
        self._writer.add_text("notes", note)

    def ended(self, fitted: Fitted, model: Any) -> None:
        for number, (caption, picture) in enumerate(example_pictures(self._task, model)):
            pixels = np.asarray(picture.convert("RGB"))
            self._writer.add_image(f"examples/{number} {caption}", pixels, fitted.steps, dataformats="HWC")
        self._writer.close()


def summary_writer() -> Any:
    """Return a subclass of TensorBoard's `SummaryWriter` that reports write errors only once.

    If the writer's thread cannot write, the thread prints no traceback; the next call of the writer raises the error.

    Raises:
        MissingExtraError: tensorboard is not installed.
    """
    try:
        from tensorboard.summary.writer import event_file_writer
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingExtraError('TensorBoard is not installed: pip install "rooftop[train]"') from error

    class Thread(event_file_writer._AsyncWriterThread):  # type: ignore[misc]
        def run(self) -> None:
            with suppress(Exception):  # the writer keeps the error, and the next call raises it
                super().run()

    class Writer(SummaryWriter):
        def _get_file_writer(self) -> Any:
            before = event_file_writer._AsyncWriterThread
            event_file_writer._AsyncWriterThread = Thread
            try:
                return super()._get_file_writer()
            finally:
                event_file_writer._AsyncWriterThread = before

    return Writer
