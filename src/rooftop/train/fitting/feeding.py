"""Feed the training data to each step, in parts for gradient accumulation.

A step of `parts` forward and backward passes reads `parts` consecutive batches of the loader. So a step has the same
samples, at the same positions, for any number of parts and ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rooftop.data import Loader, Samples
from rooftop.errors import InputError
from rooftop.parallel import World
from rooftop.train.fitting.lengths import Lengths
from rooftop.train.recipes.recipe import Recipe
from rooftop.train.tasks.calls import batches_of, calling
from rooftop.train.tasks.task import Task


@dataclass(frozen=True)
class Part:
    """The samples of one forward and backward pass of a rank.

    Attributes:
        batch: the batch, on the device.
        places: (N,) int64 on the CPU; positions of the samples in the whole batch of the step.
        indices: (N,) int64 on the CPU; indices of the samples in the data.
        weight: weight of this part's mean loss in the mean over the whole batch.
        last: whether this is the last part of the step.
    """

    batch: Any
    places: Tensor
    indices: Tensor
    weight: float
    last: bool = True


def loader_of(data: Samples, batch: int, task: Task, recipe: Recipe, world: World, *, training: bool) -> Loader:
    """Create the loader of a task's data.

    In training, samples are shuffled and repeated as the recipe says, and all batches are full.
    """
    collate = task.collate_train if training and task.collate_train is not None else task.collate
    return Loader(
        data,
        batch,
        shuffle=training,
        seed=recipe.run.seed,
        how=recipe.loading.how,
        workers=recipe.loading.workers,
        ahead=recipe.loading.ahead,
        collate=collate,
        arrive=task.arrive if training else None,
        drop_last=training,
        repeats=recipe.augment.repeats if training else 1,
        rank=world.rank,
        ranks=world.size,
        device=world.device,
        on_damage=recipe.faults.damaged,
    )


class Feed:
    """Reads the training data.

    Attributes:
        loader: the loader of the training data.
    """

    def __init__(self, task: Task, recipe: Recipe, lengths: Lengths, world: World) -> None:
        self.lengths, self.rank, self.ranks = lengths, world.rank, world.size
        self._prepare = task.prepare
        self.loader = loader_of(task.train, lengths.batch // lengths.parts, task, recipe, world, training=True)
        self._batches: Iterator[Any] = iter(())
        self._next = 0  # number of the step whose batches the loader yields next; 0 if unknown
        # Whether the end of each of the loader's epochs is also the end of a step. If False, the batches after an
        # epoch's last whole step are skipped.
        self._joined_epochs = len(self.loader) == lengths.per_epoch * lengths.parts

    def parts(self, step: int) -> Iterator[Part]:
        """Yield the parts of a step. The caller must take all parts of a step before it takes parts of the next step.

        Raises:
            InputError: no sample of a part can be read. (If damaged samples are not skipped, the first damaged sample
                raises.)
        """
        if step != self._next or (self.lengths.epoch_of(step)[1] == 0 and not self._joined_epochs):
            self._go_to(step)
        self._next = 0  # unknown until all parts are taken
        size = self.lengths.batch // self.lengths.parts
        for number in range(self.lengths.parts):
            loaded = next(self._batches)
            if loaded.value is None:
                raise InputError(self._words_of_nothing(step))
            if number == self.lengths.parts - 1:
                self._next = step + 1
            share = len(loaded.places) / self.lengths.batch
            with calling("prepare"):
                value = loaded.value if self._prepare is None else self._prepare(loaded.value)
            yield Part(value, loaded.places + number * size, loaded.indices, share, number == self.lengths.parts - 1)

    def _words_of_nothing(self, step: int) -> str:
        last = self.loader.skipped[-1]
        count = len(self.loader.skipped)
        return (
            f"step {step} has no readable sample on rank {self.rank}; {count} were skipped so far, the last one is "
            f"sample {last.sample}: {last.reason}. Repair the data, or use a larger run.batch"
        )

    def _go_to(self, step: int) -> None:
        self._end_reading()
        epoch, number = self.lengths.epoch_of(step)
        epochs = self.lengths.epoch_of(self.lengths.steps)[0] - epoch + 1 if self._joined_epochs else 1
        batches = self.loader.batches(epoch, number * self.lengths.parts, max(1, epochs))
        self._batches = batches_of("train", batches)
        self._next = 0

    def close(self) -> None:
        """Stop reading ahead, and end the loader's processes."""
        self._end_reading()
        self.loader.close()

    def _end_reading(self) -> None:
        end = getattr(self._batches, "close", None)
        if end is not None:
            end()
        self._batches = iter(())


def in_memory_format(batch: Any, memory_format: torch.memory_format) -> Any:
    """Convert the images of a batch, (N, C, H, W) floating point, to a memory format."""
    return torch.utils._pytree.tree_map_only(
        Tensor,
        lambda each: each.to(memory_format=memory_format) if each.dim() == 4 and each.is_floating_point() else each,
        batch,
    )
