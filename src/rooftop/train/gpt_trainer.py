"""One training of a GPT, step by step: the same numbers in every layout of ranks, up to the rounding of sums.

    training = GptTraining(config=config, length=256, global_batch=16, micro_batch=4)
    trainer = GptTrainer(training, open_tokens(Path("text/")), layout, layout.process_groups(), world.device)
    while trainer.step < 100:
        loss, norm = trainer.advance()

Sequences and dropout masks follow from the seed, the step and the place in the whole batch: neither which rank takes a
sequence nor how many it takes at once changes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rooftop.models.gpt.layouts import fully_sharded_gpt, parallel_gpt
from rooftop.models.gpt.network import Gpt
from rooftop.models.gpt.stages import GptStages, parallel_gpt_stages
from rooftop.parallel import Layout, ModelGradients
from rooftop.parallel.contexts import Context
from rooftop.parallel.deferred import defer_weight_gradients
from rooftop.parallel.documents import Documents
from rooftop.parallel.exchanges import Group, start_sum
from rooftop.parallel.packings import Packing
from rooftop.parallel.pipelines import Pipeline
from rooftop.parallel.schedules import Schedule
from rooftop.parallel.sharded_data import sum_in_backward
from rooftop.parallel.uploads import uploaded
from rooftop.train.adamw import AdamW
from rooftop.train.gpt_training import GptTraining
from rooftop.train.initial_weights import fill_from
from rooftop.train.main_weights import Held, MainWeights
from rooftop.train.mixtures import Mixture
from rooftop.train.replays import Replayed
from rooftop.train.tokens import Tokens

BETAS = (0.9, 0.95)  # of Adam, as GPT-3 and Llama were trained


class GptTrainer:
    """This rank's part of a training. All ranks make it, and call its methods, together: they communicate.

    Args:
        training: what is trained.
        tokens: the same at all ranks.
        layout: of the ranks.
        groups: `layout.process_groups()`.
        device: where this rank computes.
        fully_shard: whether data ranks share parameters, gradients and optimizer (`rooftop.parallel.fully_sharded`).
        initial: a folder of Hugging Face (config.json, .safetensors files) with the weights to begin from; None: those
            of the seed.

    What is written into the model between steps, by `load_state_dict` (also with assign=True), `copy_` or `.data`, is
    trained on; the optimizer's averages stay.

    Attributes:
        step: steps that have been made.
        weights: what the optimizer steps; float32 where the model is narrower.
        narrow: whether the model computes in a narrower dtype than that of `weights`.
        schedule: of the pipeline; None: there is none.

    Raises:
        InputError: too few tokens in a row.
        InputError, WeightsError, MissingExtraError: `initial` cannot be read or does not fit `training.config`.
        ValueError: that of `GptTraining.check`.
    """

    def __init__(
        self,
        training: GptTraining,
        tokens: Tokens | Mixture,
        layout: Layout,
        groups: Mapping[str, Group],
        device: torch.device,
        *,
        fully_shard: bool = False,
        initial: str | Path | None = None,
    ) -> None:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        training.check(layout, ranks, device.type, fully_shard=fully_shard)
        self.training, self.layout, self.groups, self.device, self.step = training, layout, groups, device, 0
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.place = layout.coordinates(self.rank)
        self.batches = training.batches(tokens)
        self.fully_shard = fully_shard
        wide = torch.float64 if training.dtype == torch.float64 else torch.float32
        self.context = (
            Context.of(groups["cp"], training.transport_in(layout), training.near) if layout.cp > 1 else Context()
        )
        self.schedule = training.schedule_of(layout)
        self.model = self._made_model(wide, device, fully_shard)
        if initial is not None:
            fill_from(self.model, initial, lambda: self._made_model(wide, torch.device("meta"), fully_shard=False))
        self.weights = MainWeights(self.model, wide if fully_shard else training.dtype, keep_narrow=True)
        self.narrow = training.dtype != wide
        if self.narrow:
            _with_wide_loss(self.model, device)
        tied = self.model.tied if isinstance(self.model, GptStages) else None
        self.gradients = ModelGradients(self.model, groups, sequence_parallel=layout.sequence_parallel, tied=tied)
        self.weights.answer_for(self.gradients)
        self.optimizer = AdamW(
            _decaying(self.weights.named.values(), training.weight_decay),
            lr=training.learning_rate,
            betas=BETAS,
            weights=self.weights,
        )
        self._parts_of_positions = layout.tp if layout.sequence_parallel else 1
        self._packing = self.context.packing(training.length, parts=self._parts_of_positions)
        self._parts = range(self.place["dp"], training.global_batch // training.micro_batch, layout.dp)
        self._pipeline = self._made_pipeline(self.schedule) if self.schedule is not None else None
        self._replayed = Replayed(self._gradients_of, device) if training.cuda_graph else None
        self._held: Held | None = None
        self._captured: list[tuple[Tensor, Tensor]] = []  # the model's parameters, and the memory that a graph reads

    def _made_model(self, dtype: torch.dtype, device: torch.device, fully_shard: bool) -> Gpt | GptStages:
        """This rank's part. Of a shared one parameters have that dtype, and are gathered in the narrow one."""
        training, layout, groups = self.training, self.layout, self.groups
        options: dict[str, Any] = {"seed": training.seed, "recompute": training.recompute, "context": self.context}
        options |= {"device": device, "dtype": dtype}
        if self.schedule is not None:
            return parallel_gpt_stages(
                training.config,
                layout,
                groups,
                self.schedule,
                **options,
                length=training.length,
                halves=training.halves,
                fully_shard=fully_shard,
                compute_dtype=training.dtype,
            )
        if fully_shard:
            return fully_sharded_gpt(training.config, layout, groups, **options, compute_dtype=training.dtype)
        return parallel_gpt(training.config, layout, groups, **options, halves=training.halves)

    def _made_pipeline(self, schedule: Schedule) -> Pipeline:
        assert isinstance(self.model, GptStages)
        return Pipeline(
            schedule,
            group=self.groups["pp"],
            shape=self.model.shape_between(self.training.micro_batch, self.training.length),
            dtype=self.training.dtype,
            device=self.device,
            deferral=defer_weight_gradients(self.model) if schedule.splits_backward else None,
        )

    def advance(self) -> tuple[Tensor, Tensor]:
        """One step: the mean loss of its batch before it, and the norm of its gradient, () both, as on all ranks.

        They stay on the device: reading them waits for it.
        """
        self.weights.adopt(contents=False)  # contents are seen by the optimizer
        size = self.training.micro_batch
        places = [part * size + place for part in self._parts for place in range(size)]
        text = self.batches.read(self.step, places).view(len(self._parts), size, -1)  # (parts, B, S + 1)
        if self._replayed is None:
            packings = [self._packing_of(sequences) for sequences in text]
            loss, norm, scale = self._gradients_of(uploaded(text, self.device), self.step, packings)
        else:
            loss, norm, scale = self._replay(self._replayed, self._sent(text))
        for group in self.optimizer.param_groups:
            group["lr"] = self.training.rate_at(self.step + 1)
        self.optimizer.step(scale=scale if self.training.clip else None)
        self.optimizer.zero_grad()
        self.step += 1
        return loss, norm

    def _replay(self, replayed: Replayed, text: Tensor) -> tuple[Tensor, ...]:
        """`_gradients_of`, from a CUDA graph where there is one by now: that writes gradients where they lay first."""
        if self._held is None:
            self.optimizer.zero_grad()  # what somebody else has left would become a part of it
        with torch.no_grad():
            for parameter, memory in self._captured:
                if parameter.data_ptr() != memory.data_ptr():  # somebody has set `.data`
                    memory.copy_(parameter)
                    parameter.data = memory
        loss, norm, scale = replayed(text, self._sent(torch.tensor(self.step)))
        if self._held is None and replayed.captured:
            self._held = self.weights.held()
            self._captured = [(parameter, parameter.detach()) for parameter in self.model.parameters()]
        if self._held is not None:
            self.weights.hold(self._held)
        return loss, norm, scale

    def _packing_of(self, sequences: Tensor) -> Packing:
        """Of a micro-batch (B, S + 1) on the CPU."""
        end = self.training.document_end
        if end is None:
            return self._packing
        documents = Documents.of_tokens(sequences[:, :-1], end)
        return self.context.packing(self.training.length, documents, self._parts_of_positions)

    def _gradients_of(
        self, text: Tensor, step: int | Tensor, packings: Sequence[Packing] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Leaves the gradients of a step; (loss, their norm, what clips them), () each.

        text (parts, B, S + 1) int64, this rank's micro-batches, and of each its packing; a step that is a tensor is ()
        int64, there.
        """
        loss = torch.zeros((), device=self.device, dtype=next(iter(self.weights.named.values())).dtype)
        counted, packings = self._targets_of(text), packings or [self._packing] * len(self._parts)
        if self._pipeline is not None:
            assert isinstance(self.model, GptStages)
            self.model.begin_step()
            for share in self._pipeline.run(partial(self._at_stage, text, step, packings, counted)):
                loss += share
            self.model.end_step()
            loss = start_sum(loss, self.groups["pp"])()  # the last stage's
        else:
            for part, sequences, packing in zip(self._parts, text, packings, strict=True):
                loss += self._with_gradients(part, sequences, step, packing, counted)
        self.gradients.sum_()
        norm, scale = self.gradients.scale_for(self.training.clip or float("inf"))
        return start_sum(loss, self.groups["dp-cp"])(), norm, scale

    def _targets_of(self, text: Tensor) -> int | Tensor:
        """How many tokens of the step's whole batch count in the loss; () on the device where that depends on them."""
        if not self.training.mask_ends:
            return self.training.tokens_per_step
        counted: Tensor = start_sum(text[..., :-1].ne(self._end).sum(), self.groups["dp"])()
        return counted.clamp(min=1)

    @property
    def _end(self) -> int:
        """The token with which a document ends."""
        assert self.training.document_end is not None
        return self.training.document_end

    def _with_gradients(
        self, part: int, sequences: Tensor, step: int | Tensor, packing: Packing, counted: int | Tensor
    ) -> Tensor:
        """A micro-batch's share of the loss, (); its gradients are added to those before."""
        self._take_place(part)
        tokens, targets = self._here(sequences, packing)
        total: Tensor = self.model(tokens, targets, **self._options(packing, step))
        loss = total / counted
        last = part == self._parts[-1]
        if self.training.sum_once:
            sum_in_backward(self.model, last)
        with self.gradients.summing() if last else nullcontext():
            loss.backward()
        return loss.detach()

    def _at_stage(
        self,
        text: Tensor,
        step: int | Tensor,
        packings: Sequence[Packing],
        counted: int | Tensor,
        stage: int,
        number: int,
        given: Tensor | None,
    ) -> Tensor:
        """What a stage makes of a micro-batch, by its number among those of this rank: see `Pipeline.run`."""
        assert self.schedule is not None
        self._take_place(self._parts[number])
        tokens, targets = self._here(text[number], packings[number])
        last = stage + 1 == self.schedule.stages
        input, aim = tokens if given is None else given, targets if last else None
        made: Tensor = self.model(stage, input, aim, **self._options(packings[number], step))
        return made / counted if last else made

    def _take_place(self, part: int) -> None:
        """The next forward drops by the place of a micro-batch in the whole batch."""
        parts = self.training.global_batch // self.training.micro_batch
        if self.model.masks is not None:
            self.model.masks.place = replace(self.model.masks.place, batch=(part, parts))

    def _here(self, sequences: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
        """Tokens and targets of this rank's positions."""
        chunks = packing.held[self.context.index]
        tokens, targets = (chunks.of(each, 1) for each in (sequences[:, :-1], sequences[:, 1:]))
        if self.training.mask_ends:
            targets = targets.masked_fill(tokens.eq(self._end), -100)
        return tokens, targets

    def _options(self, packing: Packing, step: int | Tensor) -> dict[str, Any]:
        """What the model is told of a micro-batch beside its tokens."""
        return {
            "positions": self._positions_of(packing),
            "packing": packing if self.context.ranks > 1 or packing.documents is not None else None,
            "reduction": "sum",
            "step": step,
        }

    def _positions_of(self, packing: Packing) -> Tensor:
        """Of this rank's tokens, (S,) or (B, S)."""
        chunks = packing.held[self.context.index]
        if not self.training.reset_positions or packing.documents is None:
            return chunks.positions(self.device)
        return uploaded(chunks.of(packing.documents.positions(), 1), self.device)

    def _sent(self, numbers: Tensor) -> Tensor:
        """From where a GPU gets them while Python goes on."""
        return numbers.pin_memory() if self.device.type == "cuda" else numbers


def _with_wide_loss(model: Gpt | GptStages, device: torch.device) -> None:
    """Makes the loss float32 where the model is bfloat16, in which a sum has three digits."""
    if model.head is None:  # of a stage that is not the last
        return
    wide = torch.autocast(device.type, torch.bfloat16)
    model.head.forward = wide(model.head.forward)  # type: ignore[method-assign]


def _decaying(parameters: Iterable[Tensor], decay: float) -> list[dict[str, Any]]:
    every = list(parameters)
    return [
        {"params": [parameter for parameter in every if parameter.dim() > 1], "weight_decay": decay},
        {"params": [parameter for parameter in every if parameter.dim() < 2], "weight_decay": 0.0},
    ]
