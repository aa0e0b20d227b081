"""Run one optimizer step: sum gradients over parts and ranks, clip them, and apply them if they are finite.

The host does not wait for the device.

`rooftop.parallel.ModelGradients` sums gradients over ranks during the last backward pass, instead of
DistributedDataParallel. `ModelGradients` has three advantages over DistributedDataParallel. The task's loss gets the
model itself, with its attributes, and may call the model several times. A parameter that the loss of a batch does not
use gets a zero gradient instead of an error. Gradient accumulation needs no special mode. The sums use their own
process group, because ranks may compute gradients in different orders while batch norms communicate. The loss is summed
too, so that each rank's device has the loss of the whole batch.

The device checks whether the loss and the gradients are finite. All ranks make the same decision, because one
non-finite number makes the sum over ranks non-finite. A skipped step changes no weights, optimizer state or buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rooftop.errors import InputError
from rooftop.parallel import ModelGradients
from rooftop.parallel.exchanges import Group, start_sum
from rooftop.train.fitting.feeding import Part, in_memory_format
from rooftop.train.fitting.put_back import PutBack
from rooftop.train.fitting.replaying import ReplayedModel
from rooftop.train.recipes import MeanWeights, optimizer_of, rate_factor, set_rates
from rooftop.train.recipes.recipe import Recipe
from rooftop.train.tasks.calls import calling, loss_of
from rooftop.train.tasks.task import Task

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
READ_FREELY = ("cpu",)
"""Device types whose tensors the host reads without synchronization."""
LOSS, NORM, SKIPPED, FAULT = range(4)
"""Columns of the tensor that a step returns."""


class Stepper:
    """Runs the steps of a rank.

    Args:
        steps: number of steps of the whole run, for the schedule of the learning rate.
        group: process group of the ranks; None: there is only one rank.
        sums: a second process group of the ranks in `group`, for sums of gradients.

    Attributes:
        optimizer, scaler: the optimizer, and the gradient scaler, which is active only in fp16.
        mean: the moving average of the weights; None: the recipe averages no weights.
    """

    def __init__(
        self, task: Task, recipe: Recipe, steps: int, device: torch.device, group: Group, rank: int, sums: Group = None
    ) -> None:
        self.task, self.recipe, self.steps, self.device = task, recipe, steps, device
        self.group, self.rank = group, rank
        self.trained = [each for each in task.model.parameters() if each.requires_grad]
        groups = {"dp-cp": sums if sums is not None else group}
        self._sums = None if group is None else ModelGradients(task.model, groups)
        self.optimizer = optimizer_of(task.model, recipe)
        self.mean = MeanWeights(task.model, recipe.ema.decay, recipe.ema.every) if recipe.ema.decay else None
        self.scaler = torch.amp.GradScaler(device.type, enabled=recipe.run.precision == "fp16")
        self._stuck = torch.zeros((), dtype=torch.bool, device=device)  # set after a fault that ends the training
        self._buffers, self._weights = PutBack(), PutBack()
        self._replayed = ReplayedModel(task.model, device) if recipe.run.replay else None

    def step(self, number: int, parts: Iterable[Part]) -> Tensor:
        """Run a step.

        Args:
            number: number of the step, from 1.

        Returns:
            (4,) float64 on the device: the loss of the whole batch, the norm of the gradient before clipping, whether
            the step was skipped, and whether the step is a fault: its loss or gradient is not finite. In fp16, only the
            loss counts as a fault, because overflows of the gradient are usual.
        """
        set_rates(self.optimizer, rate_factor(self.recipe.schedule, number, self.steps))
        self._buffers.take(self.task.model.buffers())
        total = self.gradients(number, parts, summing=self.recipe.run.sum_in_backward, replayed=True)
        gradients, (loss, weight) = self._summed(total)
        # If damaged samples were left out, `weight`, a sum over ranks, is the fraction of the batch that remains.
        if self.recipe.faults.damaged == "skip":
            loss = loss / weight
            torch._foreach_mul_(gradients, 1 / weight)
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.recipe.optimizer.clip:
            torch.nn.utils.clip_grads_with_norm_(self.trained, self.recipe.optimizer.clip, norm)
        skip, fault = self._judged(loss, norm)
        self._apply(skip)
        self._buffers.put_back(skip)
        if self.scaler.is_enabled():
            self.scaler.update()
        if self.mean is not None:
            self.mean.update(number)
        return torch.stack([loss, norm.double(), skip.double(), fault.double()])

    def gradients(
        self, number: int, parts: Iterable[Part], scaled: bool = True, summing: bool = False, replayed: bool = False
    ) -> Tensor:
        """Accumulate the gradients of this rank's parts in `.grad`.

        Args:
            scaled: whether the losses are multiplied by the scale of the gradient scaler; without fp16, the scale is 1.
            summing: whether the last backward pass starts to sum gradients over the ranks; `_summed` completes the
                sums.
            replayed: whether to replay the model, if the recipe sets run.replay. Hooks of modules do not run in a
                replay.

        Returns:
            (2,) float64: this rank's contribution to the mean loss of the whole batch, and the fraction of the whole
            batch that this rank's parts hold.

        Raises:
            InputError: with `summing`, the backward of a loss computes the gradient of a parameter in several backward
                passes, as with `torch.utils.checkpoint(use_reentrant=True)`.
            InputError: the model cannot be replayed.
        """
        self.task.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        self._seed(dropout_seed(self.recipe.run.seed, number, self.rank))
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        for part in parts:
            if part.weight == 0:  # all samples of the part are damaged
                continue
            batch = self.altered(number, part)
            replays = self._replayed.active() if replayed and self._replayed is not None else nullcontext()
            with self.autocast(), replays:
                share = loss_of(self.task, batch) * part.weight
            with self._summing() if summing and part.last else nullcontext():
                (self.scaler.scale(share) if scaled else share).backward()
            total[0].add_(share.detach())
            total[1].add_(part.weight)
        return total

    @contextmanager
    def _summing(self) -> Iterator[None]:
        try:
            with self._sums.summing() if self._sums is not None else nullcontext():
                yield
        except RuntimeError as error:
            if "a second backward within summing()" not in str(error):
                raise
            raise InputError(
                "the loss computes the gradient of a parameter in several backward passes, such as by "
                "torch.utils.checkpoint with use_reentrant=True: set run.sum_in_backward=false, or use "
                "use_reentrant=False"
            ) from error

    @contextmanager
    def buffers_kept(self) -> Iterator[None]:
        """Context manager that restores the model's buffers after the block."""
        self._buffers.take(self.task.model.buffers())
        try:
            yield
        finally:
            self._buffers.put_back(torch.ones_like(self._stuck))

    def altered(self, number: int, part: Part) -> Any:
        """Mix the batch of step `number` as the recipe says (mixup, CutMix), and apply the recipe's memory format."""
        batch = part.batch
        if self.task.alter is not None:
            with calling("alter"):
                batch = self.task.alter(batch, part.places, generator_of(self.recipe.run.seed, number))
        if self.recipe.run.channels_last:
            batch = in_memory_format(batch, torch.channels_last)
        return batch

    def autocast(self) -> AbstractContextManager[Any]:
        """Context manager that runs operators in the recipe's precision (autocast)."""
        dtype = AUTOCAST.get(self.recipe.run.precision)
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    def _summed(self, total: Tensor) -> tuple[list[Tensor], Tensor]:
        """Sum the gradients, and the result of `gradients`, over ranks.

        A parameter without a gradient gets zeros, because another rank may have a gradient for it.
        """
        for each in self.trained:
            if each.grad is None:
                each.grad = torch.zeros_like(each)
        pending = start_sum(total, self.group)
        if self._sums is not None:
            self._sums.sum_()
        return [each.grad for each in self.trained if each.grad is not None], pending()

    def _seed(self, seed: int) -> None:
        """Seed the generators of this rank. `torch.manual_seed` would also seed the generators of all other GPUs."""
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                torch.cuda.manual_seed(seed)

    def _judged(self, loss: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        """Return two bool tensors on the device: whether to skip the step, and whether the step counts as a fault. With
        a GradScaler, only a non-finite loss is a fault; without one, also a non-finite gradient norm."""
        wrong_loss = ~loss.isfinite()
        wrong = wrong_loss | ~norm.isfinite()
        fault = wrong_loss if self.scaler.is_enabled() else wrong
        if self.recipe.faults.not_finite == "stop":
            self._stuck |= fault  # until the host reads the flag, the weights keep their values from before the fault
        return wrong | self._stuck, fault

    @torch.no_grad()
    def _apply(self, skip: Tensor) -> None:
        """Step the optimizer if `skip` is False."""
        if skip.device.type in READ_FREELY:
            if not skip:
                self.optimizer.step()
            return
        before = {id(each) for each in self._stepped()}
        if getattr(self.optimizer, "_step_supports_amp_scaling", False):  # fused: the kernel checks the flag
            self.optimizer.found_inf, self.optimizer.grad_scale = skip.float(), None  # type: ignore[attr-defined]
            self.optimizer.step()
            del self.optimizer.found_inf, self.optimizer.grad_scale  # type: ignore[attr-defined]
        else:
            self._weights.take(self._stepped())
            self.optimizer.step()
            self._weights.put_back(skip)
        for new in self._stepped():  # a state that this step created is set to 0 if the step is skipped
            if id(new) not in before:
                new.copy_(torch.where(skip, torch.zeros_like(new), new))

    def _stepped(self) -> Iterator[Tensor]:
        """The tensors on the device that a step of the optimizer changes."""
        yield from self.trained
        for state in self.optimizer.state.values():
            yield from (each for each in state.values() if isinstance(each, Tensor) and each.device == self.device)

    # ---- the state -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The complete state that determines later steps."""
        return {
            "model": dict(self.task.model.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "mean": None if self.mean is None else self.mean.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Load a state."""
        self.task.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.mean is not None:
            self.mean.load_state_dict(state["mean"])
        self.scaler.load_state_dict(state["scaler"])

    def mean_weights(self) -> AbstractContextManager[Any]:
        """Within the block, the model has the averaged weights, if the recipe sets ema.decay."""
        return nullcontext() if self.mean is None else self.mean.swapped()


def dropout_seed(seed: int, step: int, rank: int) -> int:
    """The seed of torch's generators for a step of a rank; a resumed training gets the same seeds."""
    return int(np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)[0] >> np.uint64(1))


def generator_of(seed: int, step: int) -> Callable[[int], np.random.Generator]:
    """Return a function that makes the NumPy generator of a position in the whole batch of a step."""
    return lambda place: np.random.default_rng((seed, step, place))
