"""The training loop: train a task by a recipe, in one process or data parallel under torchrun.

    fitted = fit(task, Recipe.of({"run": {"epochs": 5}}), out=Path("runs/first"))

`stepping.Stepper` runs each step. The loop decides when to read losses, evaluate the model, save the state, and end.
The loop reads the results of steps from the device once every `interval` steps, before each evaluation and save, and
after the first and the last step. Between evaluations and saves the next step is launched before the loop waits for the
results, so that the device never waits for Python.

`resume=True` continues a killed training from its last checkpoint. The results are bit-identical to those of an
uninterrupted training; on a GPU this needs run.deterministic. Sample order and augmentation depend only on seed,
epoch, sample index, step and position in the batch. Dropout depends on seed, step and rank.

With gradient accumulation, each forward pass has its own batch-norm statistics, over all ranks. Dropout masks depend on
the number of ranks and on the number of parts of a step.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rooftop.data.pieces import Damaged
from rooftop.errors import DivergedError, InputError
from rooftop.parallel import World, join, report
from rooftop.train.checkpoints.agreements import Agreement
from rooftop.train.checkpoints.locks import locked
from rooftop.train.fitting.batch_norms import batch_norms_over_ranks
from rooftop.train.fitting.evaluating import Evaluator
from rooftop.train.fitting.exports import check_exportable, export_weights
from rooftop.train.fitting.faults import first_not_finite, memory_explained
from rooftop.train.fitting.feeding import Feed
from rooftop.train.fitting.lengths import Lengths
from rooftop.train.fitting.metric_lines import METRICS, MetricLines, evaluation_of, plain_of
from rooftop.train.fitting.readings import Reading
from rooftop.train.fitting.records import EvaluationRecord, Facts, Fitted, Observer, StepRecord
from rooftop.train.fitting.run_folders import BEST, LAST, RunFolder, identity_of
from rooftop.train.fitting.stepping import FAULT, LOSS, NORM, SKIPPED, Stepper
from rooftop.train.gpt.speeds import peak_bytes
from rooftop.train.recipes import prepare_model, rate_factor
from rooftop.train.recipes.recipe import Recipe
from rooftop.train.stopping import Stop, stop_on_signals
from rooftop.train.tasks.calls import calling, check_task
from rooftop.train.tasks.task import Task
from rooftop.user_paths import user_path

INTERVAL = 10  # number of steps whose results are read from a GPU at once
COMPILER = "inductor"
DONE = "done"


def fit(
    task: Task,
    recipe: Recipe,
    *,
    device: str | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    observers: Sequence[Observer] = (),
    save_every: int | None = None,
    keep_last: int = 2,
    interval: int | None = None,
    stop: Stop | None = None,
) -> Fitted:
    """Train a task by a recipe. Under torchrun every rank must call this.

    Args:
        task: the task; its model is moved to the device. At the end the model has the last weights, not their moving
            average.
        device: "cuda" or "cpu"; None: a GPU if there is one.
        out: folder for checkpoints, metrics and weights, the same folder for all ranks; None: nothing is written.
        resume: continue from the last checkpoint in `out`; without a checkpoint the training starts at its first step.
        observers: are notified of events on rank 0.
        save_every: steps between checkpoints; None: one epoch.
        keep_last: number of checkpoints to keep.
        interval: number of steps that are read from the device and reported together; None: 10 on a GPU, 1 on a CPU.
        stop: once `stop.requested` is set on any rank, all ranks end the training after the same step. None: SIGTERM
            and Ctrl-C end the training, if `out` is given.

    Returns:
        The result. If `out` is given, a training that was stopped early is saved there.

    Raises:
        InputError: the recipe does not fit the task or the ranks, `out` holds another training, or another process
            trains in `out`.
        DivergedError: a loss or a gradient is not finite, and the recipe does not skip such steps; or too many steps
            in a row, or all steps, were skipped.
        ModelRunError: memory ran out, or a function of the task raised.
        OSError: a checkpoint cannot be written; the previous one is kept.
        RankError: another rank failed.
    """
    for name, value in (("save_every", save_every), ("keep_last", keep_last), ("interval", interval)):
        if value is not None and value < 1:
            raise InputError(f"{name} is {value}: expected 1 or more")
    if resume and out is None:
        raise InputError("resume needs out, the folder of the training to continue")
    recipe.check()
    check_task(task)
    identity = identity_of(task, recipe)
    settings = {"training": identity, "out": str(out), "resume": resume, "save_every": save_every}
    with ExitStack() as around:
        if stop is None:
            stop = around.enter_context(stop_on_signals()) if out is not None else Stop()
        world = around.enter_context(join(settings=settings, device=device))
        around.enter_context(_settings_of_torch(recipe, world.device))
        folder = None if out is None else RunFolder(user_path(out), keep_last)
        fitting = _Fitting(task, recipe, world, folder, identity, observers if world.rank == 0 else (), stop)
        try:
            return fitting.run(resume, save_every, interval or (INTERVAL if world.device.type == "cuda" else 1))
        except DivergedError as error:
            diverged = error
    # Raised outside `join`, which would report that one rank failed. But all ranks raise this error, and can train
    # again.
    raise diverged


CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def _settings_of_torch(recipe: Recipe, device: torch.device) -> Iterator[None]:
    """Use deterministic algorithms within the block if the recipe sets run.deterministic, otherwise autotuned
    convolutions; then restore all settings."""
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark, workspace = torch.backends.cudnn.benchmark, os.environ.get(CUBLAS_WORKSPACE)
    if recipe.run.deterministic:
        os.environ.setdefault(CUBLAS_WORKSPACE, ":4096:8")  # cuBLAS is deterministic only with this setting
        torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = not recipe.run.deterministic
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before, warn_only=warns)
            torch.backends.cudnn.benchmark = benchmark
            if workspace is None:
                os.environ.pop(CUBLAS_WORKSPACE, None)


@contextmanager
def _compiled(model: torch.nn.Module) -> Iterator[None]:
    """Within the block, calls of the model run compiled. The model keeps its attributes and the names of its tensors.

    A function in this file calls the model, because torch.compile skips calls that begin in torch.nn: `Module.compile`
    has no effect on a torch.nn.Sequential.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)

    vars(model)["_compiled_call_impl"] = torch.compile(call, backend=COMPILER)
    try:
        yield
    finally:
        vars(model)["_compiled_call_impl"] = None


class _Fitting:
    """A rank's part of a training, from the first to the last step in this process."""

    def __init__(
        self,
        task: Task,
        recipe: Recipe,
        world: World,
        folder: RunFolder | None,
        identity: dict[str, Any],
        observers: Sequence[Observer],
        stop: Stop,
    ) -> None:
        self.task, self.recipe, self.world, self.folder = task, recipe, world, folder
        self.identity, self.observers, self.stop = identity, observers, stop
        self.first = world.rank == 0
        self.agreement = Agreement(1)
        self.best: EvaluationRecord | None = None
        self.last: EvaluationRecord | None = None
        self.worse = 0  # number of evaluations since the best one
        self.skipped = 0  # number of consecutive skipped steps
        self.reason = ""  # why the training ends, as in `Fitted`; "" while it runs
        self.before = 0  # number of steps of earlier runs, up to the loaded checkpoint
        self._looked_at: Counter[str] = Counter()  # number of entries of each loader's `skipped` that were reported
        self._damaged: set[tuple[str, int]] = set()  # damaged samples that were already reported
        self._loading_told = False
        self._unread: list[Tensor] = []
        self._reading: Reading | None = None

    def run(self, resume: bool, save_every: int | None, interval: int) -> Fitted:
        """Train from the first step, or from the last checkpoint."""
        began = time.perf_counter()
        model, ranks = self.task.model, self.world.size
        self.interval = interval
        self.lengths = Lengths.of(self.recipe, len(self.task.train), ranks, save_every)
        group = dist.group.WORLD if ranks > 1 else None
        with ExitStack() as ending:
            ending.callback(self.agreement.close)
            notes = self._prepare(model, resume)
            if self.recipe.run.sync_norms:
                ending.enter_context(batch_norms_over_ranks(model, group))
            sums = dist.new_group() if ranks > 1 else None
            self.stepper = Stepper(
                self.task, self.recipe, self.lengths.steps, self.world.device, group, self.world.rank, sums
            )
            self._open(resume, ending)
            if self.recipe.run.compile:
                ending.enter_context(_compiled(model))
            self.feed = Feed(self.task, self.recipe, self.lengths, self.world)
            ending.callback(self.feed.close)
            self.evaluator = self._evaluator()
            if self.evaluator is not None:
                ending.callback(self.evaluator.loader.close)
            self._tell("began", self._facts(), self.task)
            for note in notes:
                self._tell("noted", note)
            self._restart_clock()
            step = self.before if self.reason else self._steps()
            self.agreement.finish()
            seconds = time.perf_counter() - began
            out = None if self.folder is None else self.folder.out
            fitted = Fitted(step, seconds, self.reason, self.last, self.best, out)
            with self.stepper.mean_weights():
                model.eval()
                self._tell("ended", fitted, model)
        return fitted

    # ---- before the first step -------------------------------------------------------------------------------------

    def _prepare(self, model: torch.nn.Module, resume: bool) -> list[str]:
        """Change the model as the recipe says, and move it to the device; all ranks begin with the weights of rank 0.

        Returns:
            Descriptions of the model's changes.
        """
        begins = not resume or self.folder is None or self.folder.last() is None
        device = self.world.device.type
        notes = prepare_model(self.task, self.recipe, ranks=self.world.size, begins=begins, device=device)
        model.to(self.world.device)
        if self.recipe.run.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._share(chain(model.parameters(), model.buffers()))
        return notes

    def _share(self, tensors: Iterator[Tensor]) -> None:
        """Copy the values of rank 0's tensors into the same tensors of all other ranks (broadcast)."""
        if self.world.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor.detach(), 0)

    def _open(self, resume: bool, ending: ExitStack) -> None:
        """Create the folder of the run, or read its last checkpoint."""
        self.lines: MetricLines | None = None
        if self.folder is None:
            return
        # raises now, not after hours of training
        check_exportable(self.task.model, self.task.metadata)
        self.folder.check(self.stepper.state())
        if self.first:
            ending.enter_context(locked(self.folder.out))
        saved = self.folder.load(self.identity) if resume else None
        if not resume and (there := self.folder.last()) is not None:
            raise InputError(
                f"{self.folder.out} already holds a training ({there.name}): resume it, or give another folder"
            )
        if saved is not None:
            report(f"loading {saved.folder}")
            self.stepper.load(saved.state)
            self._take_over(saved.progress)
        self.agreement.gathered(None)  # rank 0 writes only after all ranks have read
        if self.first:
            self.folder.begin(self.recipe)
            self.lines = MetricLines(self.folder.out / METRICS, self.before)
            ending.callback(self.lines.close)

    def _evaluator(self) -> Evaluator | None:
        if self.task.valid is None or len(self.task.valid) == 0:
            return None
        batch = self.recipe.evaluation.batch or self.lengths.batch // self.lengths.parts
        gathered = self.agreement.gathered
        return Evaluator(self.task, self.recipe, batch, self.world, self.stepper.autocast, gathered)

    def _facts(self) -> Facts:
        parameters = list(self.task.model.parameters())
        return Facts(
            parameters=sum(each.numel() for each in parameters),
            trained=sum(each.numel() for each in parameters if each.requires_grad),
            samples=len(self.task.train),
            held_out=0 if self.task.valid is None else len(self.task.valid),
            steps=self.lengths.steps,
            steps_per_epoch=self.lengths.per_epoch,
            before=self.before,
            ranks=self.world.size,
            device=str(self.world.device),
            loading=self._loading(),
        )

    def _loading(self) -> str:
        """Describe how samples are loaded, with measurements; "" until the loader has chosen a method, and again after
        the choice was reported."""
        loader = self.feed.loader
        if loader.chosen is None or self._loading_told:
            return ""
        self._loading_told = True
        return loader.description

    # ---- the steps ---------------------------------------------------------------------------------------------------

    def _steps(self) -> int:
        """Train until the last step, early stopping or a request to stop. Return the number of the last step that
        ran."""
        again = None if self.world.size > 1 else self.feed.parts
        for step in range(self.before + 1, self.lengths.steps + 1):
            report(f"step {step}")
            with memory_explained(self.stepper, step, None if again is None else partial(again, step)):
                self._unread.append(self.stepper.step(step, self.feed.parts(step)))
            self._finish_reading()
            stopping = self._stopping()
            evaluating = self.lengths.evaluates(step) and self.evaluator is not None
            ended = step == self.lengths.steps
            saving = self.folder is not None and (self.lengths.saves(step) or stopping)
            first_or_last = step in (self.before + 1, self.lengths.steps)
            now = first_or_last or evaluating or saving or stopping or self.interval == 1
            if now or step % self.interval == 0:
                self._reading = Reading(step, self._unread)
                self._unread = []
            if now:
                self._finish_reading()
            if evaluating or ended:
                with memory_explained(self.stepper, step, None):
                    self._evaluate(step, ended)
            if self.reason:
                self._save(step)
                return step
            if stopping:
                self.reason = f"stopped by {self._by()}"
            if saving:
                saved = self._save(step)
            if stopping:
                if saving:
                    self._tell(
                        "noted", f"{self.reason} after step {step:,}; saved in {saved}: --resume continues from there"
                    )
                return step
            if evaluating or saving:
                self._restart_clock()
        return self.before

    def _stopping(self) -> bool:
        """Whether any rank was asked to end the training; the result is the same on all ranks. With several ranks, the
        result is one step old.
        """
        if self.world.size == 1:
            return self.stop.requested
        return bool(self.agreement.exchange([-int(self.stop.requested)])[0])

    def _by(self) -> str:
        return next((by for by in self.agreement.gathered(self.stop.by) if by), "the program")

    def _finish_reading(self) -> None:
        """Wait until the copy of step results to the host is complete, and report these results. Do nothing if no copy
        was started.

        Raises:
            DivergedError: a loss or gradient was not finite and the recipe does not skip such steps; or more than
                faults.most_skipped consecutive steps, or all steps of the training, were skipped.
        """
        if self._reading is None:
            return
        step, rows = self._reading.step, self._reading.rows()
        self._reading = None
        seconds = (time.perf_counter() - self._clock) / len(rows)
        waiting = (self.feed.loader.waited_s - self._waited) / (seconds * len(rows))
        records: list[StepRecord] = []
        notes: list[str] = []
        trouble = ""
        for number, row in enumerate(rows, step - len(rows) + 1):
            fault, skipped = bool(row[FAULT]), bool(row[SKIPPED])
            if fault and self.recipe.faults.not_finite == "stop":
                trouble = self._words_of_fault(number, row)
                break
            records.append(self._record(number, row, seconds, min(1.0, max(0.0, waiting))))
            self.skipped = self.skipped + 1 if skipped else 0
            if skipped:
                notes.append(f"step {number} was skipped: its loss is {row[LOSS]:g}, its gradient's norm {row[NORM]:g}")
            if self.skipped == number == self.lengths.steps:
                trouble = f"{self._words_of_fault(number, row)}; all {number} steps were skipped"
                break
            if self.skipped > self.recipe.faults.most_skipped:
                trouble = f"{self._words_of_fault(number, row)}; {self.skipped} steps in a row were skipped"
                break
        if self.lines is not None and records:
            self.lines.add(records)
        if records:
            self._tell("stepped", records)
        for note in notes:
            self._tell("noted", note)
        if loading := self._loading():
            self._tell("noted", f"loading {loading}")
        if self.first:  # later, `_evaluate` and `_save` report the damaged samples of all ranks
            self._tell_of_damage([self._damage()])
        if trouble:
            raise DivergedError(trouble)
        self._restart_clock()

    def _record(self, step: int, row: list[float], seconds: float, waiting: float) -> StepRecord:
        return StepRecord(
            step=step,
            epoch=self.lengths.epochs_after(step),
            loss=row[LOSS],
            grad_norm=row[NORM],
            learning_rate=self.recipe.optimizer.lr * rate_factor(self.recipe.schedule, step, self.lengths.steps),
            samples_per_s=self.lengths.batch / seconds,
            waiting=waiting,
            peak_bytes=peak_bytes(self.world.device),
            skipped=bool(row[SKIPPED]),
        )

    def _words_of_fault(self, step: int, row: list[float]) -> str:
        """Describe a step with a non-finite loss or gradient in one line. Run the step again, to name the first batch,
        output, loss or gradient that is not finite."""
        words = f"step {step}: the loss is {row[LOSS]:g}, and its gradient's norm is {row[NORM]:g}"
        found = self.agreement.gathered(first_not_finite(self.stepper, step, self.feed.parts(step)))
        first = min((each for each in found if each is not None), default=None)
        words += (
            f"; first not finite: {first[1]}"
            if first is not None
            else "; the value of each part is finite, but their sum is not"
        )
        saved = None if self.folder is None else self.folder.last()
        words += f". {saved} is the last checkpoint" if saved is not None else ""
        return f"{words}. A smaller optimizer.lr may help; faults.not_finite=skip skips such steps"

    def _damage(self) -> list[tuple[str, Damaged]]:
        """List the damaged training and validation samples that this rank has skipped since the last call of this
        method."""
        loaders = {"sample": self.feed.loader}
        if self.evaluator is not None:
            loaders["validation sample"] = self.evaluator.loader
        found = [(kind, each) for kind, loader in loaders.items() for each in loader.skipped[self._looked_at[kind] :]]
        self._looked_at = Counter({kind: len(loader.skipped) for kind, loader in loaders.items()})
        return found

    def _tell_of_damage(self, of_ranks: Sequence[list[tuple[str, Damaged]]]) -> None:
        """Report each damaged sample to the observer, with its name and the reason, unless it was reported before."""
        for kind, (index, name, reason) in chain.from_iterable(of_ranks):
            if (kind, index) not in self._damaged:
                self._tell("noted", f"{kind} {index}{f' ({name})' if name else ''} was skipped: {reason}")
                self._damaged.add((kind, index))

    def _restart_clock(self) -> None:
        self._clock, self._waited = time.perf_counter(), self.feed.loader.waited_s

    # ---- evaluations and checkpoints ---------------------------------------------------------------------------------

    def _evaluate(self, step: int, ended: bool) -> None:
        """Evaluate the model, with the averaged weights if there are any. Export the weights as "best" if the result is
        better than all earlier results, and as "last" if the training ends here."""
        self._share(self.task.model.buffers())
        with self.stepper.mean_weights():
            if ended:
                self._settle()
            improved = self._judge(step)
            patience = self.recipe.evaluation.patience
            if ended:
                self.reason = DONE
            elif patience and self.worse >= patience:
                self.reason = f"no improvement for {patience} evaluations"
                if self.task.settle is not None:
                    self._settle()
                    improved |= self._judge(step)
            if improved:
                self._export(BEST)
            if self.reason:
                self._export(LAST)
        self._tell_of_damage(self.agreement.gathered(self._damage()))

    def _settle(self) -> None:
        if self.task.settle is not None:
            with calling("settle"):
                self.task.settle(self.task.model)

    def _judge(self, step: int) -> bool:
        """Evaluate the model on the validation data, and return whether the result is the best so far. Without an
        evaluator, only switch the model to evaluation mode and return False."""
        if self.evaluator is None:
            self.task.model.eval()
            return False
        report(f"evaluating after step {step}")
        values = self.evaluator.evaluate()
        value, sign = values[self.task.best], 1 if self.task.maximize else -1
        improved = self.best is None or sign * value > sign * self.best.values[self.task.best]
        if value != value:  # NaN
            improved = False
        self.last = EvaluationRecord(step, self.lengths.epochs_after(step), values, improved)
        self.best = self.last if improved else self.best
        self.worse = 0 if improved else self.worse + 1
        if self.lines is not None:
            self.lines.add([self.last])
        self._tell("evaluated", self.last)
        return improved

    def _export(self, name: str) -> None:
        if self.folder is not None and self.first:
            export_weights(self.folder.out / name, self.task.model, self.task.metadata)

    def _save(self, step: int) -> Path | None:
        """Save the state after this step."""
        if self.folder is None:
            return None
        report(f"saving after step {step}")
        self._share(self.task.model.buffers())  # a resumed training loads the buffers of rank 0 on all ranks
        saved = (
            self.folder.save(step, self.identity, self._progress(step), self.stepper.state()) if self.first else None
        )
        self._tell_of_damage(self.agreement.gathered(self._damage()))
        return self.agreement.gathered(saved)[0]

    def _progress(self, step: int) -> dict[str, Any]:
        return {
            "step": step,
            "best": None if self.best is None else plain_of(self.best),
            "last": None if self.last is None else plain_of(self.last),
            "worse": self.worse,
            "skipped": self.skipped,
            "reason": self.reason if not self.reason.startswith("stopped") else "",
        }

    def _take_over(self, progress: Any) -> None:
        self.before = progress["step"]
        self.best, self.last = (
            None if progress[name] is None else evaluation_of(progress[name]) for name in ("best", "last")
        )
        self.worse, self.skipped, self.reason = progress["worse"], progress["skipped"], progress["reason"]

    def _tell(self, event: str, *what: Any) -> None:
        for observer in self.observers:
            getattr(observer, event)(*what)
