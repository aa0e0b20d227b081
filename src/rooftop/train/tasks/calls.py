"""Call the functions of a task: name the function that raises, and check what it returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from rooftop.debugging import memory_error_in_words
from rooftop.errors import InputError, ModelRunError, RooftopError
from rooftop.train.tasks.task import Task
from rooftop.user_code import place_in_user_code

T = TypeVar("T")


@contextmanager
def calling(name: str) -> Iterator[None]:
    """Say within the block which attribute of the task raised, and where.

    Raises:
        ModelRunError: code of the user raised an error other than Rooftop's errors and errors of memory.
    """
    try:
        yield
    except RooftopError:
        raise
    except Exception as error:
        place = place_in_user_code(error)
        if place is None or memory_error_in_words(error) is not None:
            raise
        notes = "".join(f"; {note}" for note in getattr(error, "__notes__", []) if "\n" not in note)
        raise ModelRunError(f"the task's {name} raised {type(error).__name__}: {error}{notes} ({place})") from error


def batches_of(name: str, batches: Iterator[T]) -> Iterator[T]:
    """Yield the batches of the task's data with this name, "train" or "valid"."""
    with calling(f"{name} data"):
        yield from batches


def check_task(task: Task) -> None:
    """Check a task before its training.

    Raises:
        InputError: the data have no length, or the model has uninitialized parameters or meta tensors.
    """
    for name, data in (("train", task.train), ("valid", task.valid)):
        if data is None:
            continue
        try:
            len(data)
        except (TypeError, NotImplementedError) as error:
            raise InputError(
                f"the task's {name} is of type {type(data).__name__}, which has no len(): expected numbered samples "
                f"with len() and [index]. Give a map-style data set, or list({name}) of data that fit into memory"
            ) from error
    tensors = [*task.model.named_parameters(), *task.model.named_buffers()]
    lazy = next((name for name, each in tensors if is_lazy(each)), None)
    if lazy is not None:
        raise InputError(
            f"the task's model has the uninitialized parameter {lazy}: call the model once on a batch in build(), or "
            "give its layer the size of the input"
        )
    meta = next((name for name, each in tensors if each.is_meta), None)
    if meta is not None:
        raise InputError(
            f"the task's model has {meta} on the meta device, without values: build the model on the CPU, or call "
            'to_empty(device="cpu") and initialize its weights in build()'
        )


def loss_of(task: Task, batch: Any) -> Tensor:
    """The task's loss, ().

    Raises:
        InputError: the loss is no scalar tensor, or has no gradient although gradients are on.
        ModelRunError: see `calling`.
    """
    with calling("loss"):
        loss = task.loss(task.model, batch)
    remedy = ""
    if not isinstance(loss, Tensor):
        remedy = "leave out .item() or float()" if isinstance(loss, float) else "return the loss"
    elif loss.ndim or not loss.is_floating_point():
        remedy = 'use .mean(), or leave out reduction="none"' if loss.ndim else "return a floating-point loss"
    elif torch.is_grad_enabled() and not loss.requires_grad:
        remedy = "it has no gradient: leave out detach() and no_grad(), and compute it from the model's outputs"
    if remedy:
        raise InputError(
            f"the task's loss returned {_in_words(loss)}: expected the mean over the samples, a tensor of shape () "
            f"with a gradient; {remedy}"
        )
    return loss


def metrics_of(task: Task, batch: Any) -> Mapping[str, Tensor]:
    """The task's metrics of a batch by name, with a value for each sample, (N,).

    Raises:
        InputError: the metrics are not a dict of tensors, a metric is one number for the whole batch, or a metric has
            the name "loss".
        ModelRunError: see `calling`.
    """
    if task.metrics is None:
        return {}
    with calling("metrics"):
        found = task.metrics(task.model, batch)
    wrong = "" if isinstance(found, Mapping) else _in_words(found)
    if not wrong:
        scalars = ((name, v) for name, v in found.items() if not isinstance(v, Tensor) or v.ndim == 0)
        wrong = next((f"{name!r}: {_in_words(value)}" for name, value in scalars), "")
    if wrong:
        raise InputError(
            f"the task's metrics returned {wrong}: expected a dict from name to a tensor with the value of each "
            'sample, (N,), e.g. {"accuracy": logits.argmax(1) == labels}'
        )
    if "loss" in found:
        raise InputError(
            'the task\'s metrics returned "loss", the name of the validation loss: give this metric another name'
        )
    return found


def judged_by(task: Task, model: nn.Module, device: torch.device) -> dict[str, float]:
    """The values of the task's `judge` by name.

    Raises:
        InputError: `judge` does not return a dict of numbers.
        ModelRunError: see `calling`.
    """
    assert task.judge is not None
    with calling("judge"):
        found = task.judge(model, device)
    try:
        return {name: float(value) for name, value in found.items()}
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise InputError(
            f'the task\'s judge returned {_in_words(found)}: expected a dict from name to number, e.g. {{"AP": 0.4}}'
        ) from error


def _in_words(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    return "None" if value is None else type(value).__name__
