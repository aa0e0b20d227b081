"""Save checkpoints in the background.

The data are copied during the next step. A process writes the copy to the disk. The step gets its final name once all
ranks have written.

    saver = Saver(folder, trainer)
    for step in range(1, 1001):
        trainer.advance()
        saver.after_step()
        if step % 100 == 0:
            saver.begin()
    saver.wait()

| part | who | when |
|---|---|---|
| a copy of the data that this rank writes | a stream of the GPU, or a thread | during the next forward and backward |
| the file, on the disk, with checksums | a process | during later steps |
| index, names, `latest` | a thread of rank 0 | after the step at which all ranks agree that all have written |

Only one save is in progress at a time; the next save waits for the current one. A failure on any rank is raised on all
ranks, after the same step.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rooftop.train.checkpoints.agreements import Agreement
from rooftop.train.checkpoints.files import FilePiece
from rooftop.train.checkpoints.folders import complete, file_name, remove, remove_unfinished, unfinished
from rooftop.train.checkpoints.plans import Held, part_of, planned
from rooftop.train.checkpoints.staging import Staging
from rooftop.train.checkpoints.trainer_tensors import tensors_of
from rooftop.train.checkpoints.training_records import described
from rooftop.train.checkpoints.writing import WritingProcess, write_now
from rooftop.train.gpt.trainer import GptTrainer
from rooftop.train.replays import WARM_UP
from rooftop.user_paths import user_path

POLL_S = 0.005
"""Seconds between polls while ranks wait for a save."""
WRITING, NAMING, NOTHING = "writing", "naming", ""


class Saver:
    """Saves a training. The methods are collective: every rank must create a saver and call them after
    the same steps.

    Args:
        folder: the folder of the steps; created if missing. Unfinished folders of killed trainings are removed.
        trainer: the training to save.
        asynchronous: write in the background from a copy. If False, `begin` makes no copy, and returns once all data
            are on the disk.
        keep_last: number of steps to keep in the folder, including the new one; None: all.

    Attributes:
        saved: the folder of the last complete step; None: no step is complete yet.
        bytes: the number of bytes that this rank writes for a step.
        blocked_s: total seconds that the host has waited for saves.
        written_s: seconds from the end of the copy until this rank's file of the last save was on the disk.
        saving: whether a save is in progress; the same on all ranks.

    Raises:
        ValueError: `keep_last` is below 1.
        OSError: the folder cannot be created; all ranks raise this.
    """

    def __init__(
        self, folder: str | Path, trainer: GptTrainer, *, asynchronous: bool = True, keep_last: int | None = None
    ) -> None:
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"Saver: keep_last must be 1 or more, got {keep_last}")
        self.folder = folder = user_path(folder)
        self.trainer, self.asynchronous, self.keep_last = trainer, asynchronous, keep_last
        self.saved: Path | None = None
        self.bytes, self.blocked_s, self.written_s = 0, 0.0, 0.0
        self._agreement = Agreement(3)
        self._token = self._agreement.gathered(secrets.token_hex(4))[0]
        self._steps, self._saves = 0, 0
        self._asked = False  # whether a rank asked to end the training; `_finish` may learn this before `after_step`
        self._phase = NOTHING  # phase of the save; `_phase` and `_parts` are equal on all ranks
        self._parts = 0  # number of phases that were started, in all saves together
        self._task: _Task | None = None
        self._process: WritingProcess | None = None
        self._staging: Staging | None = None
        self._hook: Any = None
        self._temporary = folder
        self._described: Mapping[str, Any] = {}
        self._named: Path | None = None
        self._held: list[Held] | None = None
        self._pieces: list[FilePiece] = []
        self._files: list[str] = []
        self._on_all_ranks(self._tidy if self._agreement.rank == 0 else _nothing)

    def _tidy(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_unfinished(self.folder)

    @property
    def saving(self) -> bool:
        return bool(self._phase)

    # ---- once a save -----------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Plan what each rank writes, and allocate memory for the copy, so that the first save does not wait for
        either.

        Raises:
            OSError: the memory for the copy cannot be allocated; all ranks raise this.
        """
        held = [each.held for each in tensors_of(self.trainer)]
        if any(self._agreement.gathered(held != self._held)):
            plans = planned(self._agreement.gathered(held))
            self._held, self._pieces = held, plans[self._agreement.rank]
            self._files = [file_name(rank) for rank, pieces in enumerate(plans) if pieces]
            self.bytes = sum(piece.bytes for piece in self._pieces)
        if self.asynchronous:
            self._on_all_ranks(self._take_memory)

    def _take_memory(self) -> None:
        if self._staging is not None and self._staging.size >= self.bytes:
            return
        if self._staging is not None:
            self._staging.close()
            self._staging = None
        self._staging = Staging(self.bytes, self.trainer.device)
        if self._hook is None:
            self._hook = self.trainer.optimizer.register_step_pre_hook(lambda *_: self._wait_to_change())

    def begin(self) -> None:
        """Begin to save the state after this step. Until the optimizer's next step, the weights must not change.

        Raises:
            OSError: the previous save cannot be written, or (if `asynchronous` is False) the new save cannot be
                written; all ranks raise this.
        """
        with self._blocking():
            self._finish()
            self.trainer.weights.adopt()
            self.prepare()
            self._saves += 1
            self._temporary = unfinished(self.folder, self.trainer.step, f"{self._token}-{self._saves}")
            self._described = described(self.trainer) if self._agreement.rank == 0 else {}
            self._start(WRITING, self._writing())
            if not self.asynchronous:
                self._finish()

    def _writing(self) -> Callable[[], None]:
        """Return the function that writes this rank's data to the disk. If `asynchronous`, start to copy the data."""
        if not self._pieces:
            return _nothing
        path, sources = self._temporary / file_name(self._agreement.rank), self._sources()
        if self._staging is None:
            if self.trainer.device.type == "cuda":
                torch.cuda.current_stream(self.trainer.device).synchronize()  # another thread will read `sources`
            return partial(write_now, path, self._pieces, sources)
        self._staging.begin(sources)
        if self.trainer.training.cuda_graph and self._steps <= WARM_UP + 1:
            self._staging.wait()  # while a graph is captured, no other thread may wait for an event
        self._process = WritingProcess(path, self._pieces, self._staging, sources)
        return self._process

    def _sources(self) -> list[Tensor]:
        there = {each.held.name: each for each in tensors_of(self.trainer)}
        return [part_of(piece, there[piece.name].local, there[piece.name].held) for piece in self._pieces]

    def _wait_to_change(self) -> None:
        with self._blocking():
            if self._staging is not None:
                self._staging.wait_to_change()

    # ---- once a step -----------------------------------------------------------------------------------------------

    def after_step(self, stop: bool = False) -> bool:
        """Continue a save in progress. Every rank must call this once after each step.

        Args:
            stop: whether this rank was asked to end the training.

        Returns:
            Whether any rank passed `stop` at the previous call; the same on all ranks.

        Raises:
            OSError: a save cannot be written; raised on all ranks.
        """
        self._steps += 1
        with self._blocking():
            self._agree(stop)
        asked, self._asked = self._asked, False
        return asked

    def wait(self) -> Path | None:
        """Wait for the save in progress; return `saved`.

        Raises:
            OSError: the save cannot be written; raised on all ranks.
        """
        with self._blocking():
            self._finish()
            self._agreement.finish()
        return self.saved

    def _finish(self) -> None:
        while self._phase:
            if self._task is not None:
                self._task.join(POLL_S)  # a short wait, because the other ranks need this rank's next exchange
            self._agree(False)

    def _agree(self, stop: bool) -> None:
        """Tell all ranks whether this rank was asked to end the training, and which phase of the save it has finished.
        If all ranks have finished the current phase, start the next one."""
        task = self._task
        ended, failed = (True, False) if task is None else (task.ended, task.error is not None)
        done = self._parts if ended and not failed else self._parts - 1
        stopping, failing, all_done = self._agreement.exchange([-int(stop), -int(ended and failed), done])
        self._asked = self._asked or bool(stopping)
        if failing:
            self._raise_on_all_ranks(task.error if task is not None and task.ended else None)
        if self._phase and all_done == self._parts:
            self._go_on()

    def _go_on(self) -> None:
        """Start the next phase of a save (see the table at the top of this file), as all ranks have finished the
        current one."""
        if self._phase == WRITING:
            if self._staging is not None:
                self._staging.ready()
            if self._process is not None:
                self.written_s = self._process.seconds
            self._start(NAMING, self._name if self._agreement.rank == 0 else _nothing)
            return
        name = self._agreement.gathered("" if self._named is None else self._named.name)[0]
        self._phase, self._task, self._process, self.saved = NOTHING, None, None, self.folder / name

    def _name(self) -> None:
        self._named = complete(self._temporary, self._files, self._described, keep_last=self.keep_last)

    def _start(self, phase: str, work: Callable[[], None]) -> None:
        self._phase = phase
        self._parts += 1
        self._task = _Task(work)

    # ---- errors and the end ----------------------------------------------------------------------------------------

    def _on_all_ranks(self, work: Callable[[], None]) -> None:
        """Call a function on this rank; raise on all ranks if it fails on any rank."""
        error = None
        try:
            work()
        except Exception as raised:
            error = raised
        if any(self._agreement.gathered(error is not None)):
            self._raise_on_all_ranks(error)

    def _raise_on_all_ranks(self, error: BaseException | None) -> None:
        """Raise on all ranks if any rank failed, with the same message.

        Args:
            error: the error on this rank.

        Raises:
            OSError: all failures are `OSError`.
            RuntimeError: a rank failed in another way.
        """
        self._end_task()
        said = self._agreement.gathered(None if error is None else (isinstance(error, OSError), _words(error)))
        # receive and drop what the ranks sent in their previous exchange: it may report the same failure again
        self._agreement.exchange([0, 0, self._parts])
        self._phase, self._task, self._process = NOTHING, None, None
        if self._staging is not None:
            self._staging.wait_to_change()
            self._staging.ready()
        if self._agreement.rank == 0 and self._temporary != self.folder:
            remove(self._temporary)  # no process writes to this folder any more
        failures = [(rank, *each) for rank, each in enumerate(said) if each is not None]
        words = "; ".join(f"rank {rank}: {text}" if len(said) > 1 else text for rank, _, text in failures)
        message = (
            f"a checkpoint could not be written to {self.folder} ({words}). Is there enough room? Earlier checkpoints "
            "are kept."
        )
        raise (OSError if all(expected for _, expected, _ in failures) else RuntimeError)(message) from error

    def _end_task(self) -> None:
        if self._process is not None:
            self._process.give_up()
        if self._task is not None:
            self._task.join()

    def close(self) -> None:
        """Release memory and abort a save in progress, without waiting for other ranks.

        Call `wait` first to finish the save.
        """
        self._end_task()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if self._staging is not None:
            self._staging.close()
            self._staging = None
        self._agreement.close()

    @contextmanager
    def _blocking(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.blocked_s += time.perf_counter() - began


class _Task:
    """A function that runs in a separate thread.

    Attributes:
        ended: whether the function has returned or raised.
        error: the exception that the function raised.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self.ended = False
        self.error: BaseException | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, name="rooftop checkpoint")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # all ranks raise this exception together
            self.error = error
        self.ended = True

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until the function has ended, for at most `timeout_s` seconds; None: without a limit."""
        self._thread.join(timeout_s)


def _nothing() -> None:
    """Do nothing, on a rank that has no work in a phase of a save."""


def _words(error: BaseException) -> str:
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
