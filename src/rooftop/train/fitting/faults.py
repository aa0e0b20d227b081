"""Explain failed steps: find the first value that is not finite, such as a module's output, or list the contents of the
GPU's memory.

The functions run the batch of the failed step a second time, because checks in every step would cost time. On several
ranks, or if memory runs out during an evaluation, the contents of the memory are listed without a second run.
"""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rooftop.debugging import explain_memory, explained_memory, memory_error_as
from rooftop.errors import ModelRunError
from rooftop.train.fitting.feeding import Part
from rooftop.train.fitting.stepping import Stepper

MEMORY_ADVICE = (
    "use a smaller run.batch, more parts with run.accumulate, or run.precision=bf16; --debug shows what uses the memory"
)


def first_not_finite(stepper: Stepper, number: int, parts: Iterable[Part]) -> tuple[int, str] | None:
    """Run the batch of a step again, and find the first value that is not finite.

    Each batch, output of a module, loss and gradient of a parameter is one value.

    Weights, optimizer state and buffers stay unchanged, but gradients change.

    Returns:
        (number of values checked before this value, description of the value), or None if all values are finite. On
        several ranks, the smallest number belongs to the rank that has the first non-finite value.
    """
    found: list[tuple[int, str]] = []
    looked = count()

    def note(values: Any, what: Callable[[], str]) -> None:
        if not found and not _finite(values):
            found.append((next(looked), what()))
        next(looked)

    def watched_parts() -> Iterator[Part]:
        for part in parts:
            note(part.batch, partial(_batch_in_words, part))
            yield part

    def watched_loss(model: nn.Module, batch: Any) -> Tensor:
        loss = unwatched(model, batch)
        note(loss, lambda: "the loss itself")
        return loss

    unwatched = stepper.task.loss
    with ExitStack() as hooks:
        stepper.task.loss = watched_loss
        hooks.callback(setattr, stepper.task, "loss", unwatched)
        for name, module in stepper.task.model.named_modules():
            hooks.callback(module.register_forward_hook(_output_hook(note, name)).remove)
        for name, parameter in stepper.task.model.named_parameters():
            if parameter.requires_grad:
                hooks.callback(parameter.register_post_accumulate_grad_hook(_gradient_hook(note, name)).remove)
        hooks.enter_context(torch.compiler.set_stance("force_eager"))
        hooks.enter_context(stepper.buffers_kept())
        stepper.gradients(number, watched_parts(), scaled=False)
    return found[0] if found else None


def _output_hook(note: Callable[..., None], name: str) -> Callable[[nn.Module, Any, Any], None]:
    return lambda module, _, output: note(
        output, lambda: f"the output of {name or 'the model'} ({type(module).__name__})"
    )


def _gradient_hook(note: Callable[..., None], name: str) -> Callable[[Tensor], None]:
    return lambda parameter: note(parameter.grad, lambda: f"the gradient of {name}")


def _finite(values: Any) -> bool:
    tensors = [each for each in pytree.tree_leaves(values) if isinstance(each, Tensor) and each.is_floating_point()]
    return all(bool(each.isfinite().all()) for each in tensors)


def _batch_in_words(part: Part) -> str:
    indices = part.indices.tolist()
    return f"the batch itself, samples {', '.join(map(str, indices[:8]))}{', ...' if len(indices) > 8 else ''}"


@contextmanager
def memory_explained(stepper: Stepper, number: int, again: Callable[[], Iterable[Part]] | None) -> Iterator[None]:
    """Turn an out-of-memory error of a step into one line; for a GPU, a note lists what uses the memory.

    Args:
        again: yields the parts of the step again. The step then runs a second time under `explained_memory`, which
            finds the modules and source lines that use the memory. None: the step does not run again, because other
            ranks would have to take part.

    Raises:
        ModelRunError: memory ran out.
    """

    def in_one_line(words: str) -> ModelRunError:
        error = sys.exception()
        assert error is not None
        traceback.clear_frames(error.__traceback__)  # the traceback's frames keep activations in memory
        raised = ModelRunError(f"out of memory in step {number} ({words}): {MEMORY_ADVICE}")
        if isinstance(error, torch.OutOfMemoryError) and torch.cuda.is_available():
            raised.add_note(_explanation(stepper, number, again))
        return raised

    with memory_error_as(in_one_line):
        yield


def _explanation(stepper: Stepper, number: int, again: Callable[[], Iterable[Part]] | None) -> str:
    model = stepper.task.model
    if again is not None:
        stepper.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()
        try:
            with explained_memory(model):
                stepper.gradients(number, again())
        except torch.OutOfMemoryError as error:
            return "\n".join(error.__notes__)
    return str(explain_memory(model, optimizers=[stepper.optimizer]))
