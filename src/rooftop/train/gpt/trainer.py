"""Train a GPT step by step, with the same results in every layout of ranks, up to the rounding of sums.

    training = GptTraining(config=config, length=256, global_batch=16, micro_batch=4)
    trainer = GptTrainer(training, open_tokens(Path("text/")), layout, layout.process_groups(), world.device)
    while trainer.step < 100:
        loss, norm = trainer.advance()

Sequences and dropout masks depend only on the seed, the step and the position in the whole batch. Sequences and masks
are independent of the rank that computes a sequence and of the micro-batch size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
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
from rooftop.nn.modes import evaluating
from rooftop.parallel import Layout, ModelGradients
from rooftop.parallel.contexts import Context
from rooftop.parallel.deferred import defer_weight_gradients
from rooftop.parallel.documents import Documents
from rooftop.parallel.exchanges import Group, start_sum
from rooftop.parallel.packings import Packing
from rooftop.parallel.pipelines import Pipeline
from rooftop.parallel.schedules import Schedule
from rooftop.parallel.sharded_data import free_gathered, sum_in_backward
from rooftop.parallel.uploads import uploaded
from rooftop.train.gpt.initial_weights import fill_from
from rooftop.train.gpt.training import GptTraining
from rooftop.train.optimizers.adamw import AdamW
from rooftop.train.optimizers.main_weights import Held, MainWeights
from rooftop.train.replays import Replayed
from rooftop.train.tokens.batches import Batches
from rooftop.train.tokens.mixtures import Mixture
from rooftop.train.tokens.tokens import Tokens

BETAS = (0.9, 0.95)  # Adam's betas for GPT-3 and Llama
IGNORED = -100  # a target that the loss ignores


class GptTrainer:
    """This rank's part of a training. All ranks must create the trainer and make the same calls.

    Args:
        training: the description of the training.
        tokens: the data, the same on all ranks.
        layout: layout of the ranks.
        groups: `layout.process_groups()`.
        device: device of this rank.
        fully_shard: whether data parallel ranks shard parameters, gradients and optimizer state
            (`rooftop.parallel.fully_sharded`).
        initial: a folder of Hugging Face (config.json, .safetensors files) with the initial weights; None: random
            weights from the seed.

    The caller may write to the model between steps, by `load_state_dict` (also with assign=True), `copy_` or `.data`.
    Training then continues from the written values; the optimizer keeps its moments.

    Attributes:
        step: number of steps so far.
        weights: the weights that the optimizer updates; float32 copies if the model's dtype is narrower.
        narrow: whether the model computes in a narrower dtype than `weights`.
        schedule: schedule of the pipeline; None without a pipeline.

    Raises:
        InputError: a data set is too short for one sequence.
        InputError, WeightsError, MissingExtraError: `initial` cannot be read or does not fit `training.config`.
        ValueError: see `GptTraining.check`.
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
        # the model's parameters, each with the memory that the CUDA graph reads
        self._captured: list[tuple[Tensor, Tensor]] = []

    def _made_model(self, dtype: torch.dtype, device: torch.device, fully_shard: bool) -> Gpt | GptStages:
        """Create this rank's part of the model.

        Sharded parameters have the wide dtype and are gathered in the narrow dtype.
        """
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
        """Run one step; return two scalar tensors: the batch's mean loss before the step, and the norm of the gradient
        before clipping.

        Both tensors are the same on all ranks. Both tensors stay on the device; reading their values waits for the
        device.
        """
        self.weights.adopt(contents=False)  # the optimizer's step finds the values written to the model
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

    @torch.no_grad()
    def validation_loss(self, batches: Batches, sequences: int) -> float:
        """Compute the mean loss over the first sequences of some data, without dropout; the same on all ranks.

        All ranks must call this. Validation does not change the results of later steps. The host waits for the device.

        Args:
            batches: the data, in batches of `training.global_batch` sequences of `training.length` tokens.
            sequences: number of sequences to read, at least 1. Each sequence counts once, even if the last batch is not
                full.
        """
        size, length = self.training.micro_batch, self.training.length
        places = torch.tensor([[part * size + place for place in range(size)] for part in self._parts])
        total = torch.zeros(2, device=self.device, dtype=torch.float64)  # sum of the losses, and number of targets
        with self._evaluating():
            for number in range(-(-sequences // batches.batch)):
                text = batches.read(number, places.flatten().tolist()).view(*places.shape, length + 1)
                real = places < sequences - number * batches.batch  # (parts, B)
                packings = [self._packing_of(each) for each in text]
                sums = self._losses_of(uploaded(text, self.device), uploaded(real, self.device), packings)
                counts = real.sum() * length
                if self.training.mask_ends:
                    counts = (text[..., :-1].ne(self._end) & real[..., None]).sum()
                total += torch.stack([sums.double(), counts.to(self.device)])
        loss = start_sum(start_sum(total[:1], self.groups["pp"])(), self.groups["dp-cp"])()
        counted: Tensor = start_sum(total[1:], self.groups["dp"])()
        return float(loss / counted.clamp(min=1))

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Put the model in evaluation mode within the block.

        After the block, the modules have the modes from before the block. Sharded parameters do not stay gathered:
        otherwise the next step would ignore values that the user loads in between.
        """
        try:
            with evaluating(self.model):
                yield
        finally:
            if self.fully_shard:
                free_gathered(self.model)

    def _losses_of(self, text: Tensor, real: Tensor, packings: Sequence[Packing]) -> Tensor:
        """Sum the losses of this rank's micro-batches, (parts, B, S + 1), at this rank's positions; returns a scalar.

        Only sequences whose entry in `real`, (parts, B), is True are counted.
        """
        if self._pipeline is not None:
            losses = self._pipeline.forward(partial(self._loss_at_stage, text, real, packings), len(self._parts))
        else:
            losses = []
            for sequences, counting, packing in zip(text, real, packings, strict=True):
                tokens, targets = self._here(sequences, packing)
                targets = targets.masked_fill(~counting[:, None], IGNORED)
                losses.append(self.model(tokens, targets, **self._options(packing, self.step)))
        return torch.stack(losses).sum() if losses else torch.zeros((), device=self.device)

    def _loss_at_stage(
        self,
        text: Tensor,
        real: Tensor,
        packings: Sequence[Packing],
        stage: int,
        number: int,
        given: Tensor | None,
    ) -> Tensor:
        """Run one pipeline stage on a micro-batch, for `_losses_of`; see `Pipeline.forward`."""
        assert self.schedule is not None
        tokens, targets = self._here(text[number], packings[number])
        aim = targets.masked_fill(~real[number][:, None], IGNORED) if stage + 1 == self.schedule.stages else None
        made: Tensor = self.model(
            stage, tokens if given is None else given, aim, **self._options(packings[number], self.step)
        )
        return made

    def _replay(self, replayed: Replayed, text: Tensor) -> tuple[Tensor, ...]:
        """Replay the CUDA graph of `_gradients_of`, which writes gradients to the addresses of the capture. The first
        steps call `_gradients_of` itself, before the capture."""
        if self._held is None:
            self.optimizer.zero_grad()  # without this, backward would add to existing gradients
        with torch.no_grad():
            for parameter, memory in self._captured:
                if parameter.data_ptr() != memory.data_ptr():  # the caller has set `.data`
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
        """Describe how the positions and documents of a micro-batch, (B, S + 1) on the CPU, are divided over context
        parallel ranks."""
        end = self.training.document_end
        if end is None:
            return self._packing
        documents = Documents.of_tokens(sequences[:, :-1], end)
        return self.context.packing(self.training.length, documents, self._parts_of_positions)

    def _gradients_of(
        self, text: Tensor, step: int | Tensor, packings: Sequence[Packing] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute and keep the gradients of a step; returns the scalar tensors (loss, gradient norm before clipping,
        clipping factor).

        `text`, (parts, B, S + 1) int64, holds this rank's micro-batches; `packings` has one packing for each
        micro-batch. `step` may be a tensor, () int64 on the device.
        """
        loss = torch.zeros((), device=self.device, dtype=next(iter(self.weights.named.values())).dtype)
        counted, packings = self._targets_of(text), packings or [self._packing] * len(self._parts)
        if self._pipeline is not None:
            assert isinstance(self.model, GptStages)
            self.model.begin_step()
            for share in self._pipeline.run(partial(self._at_stage, text, step, packings, counted)):
                loss += share
            self.model.end_step()
            loss = start_sum(loss, self.groups["pp"])()  # only the last stage has the losses
        else:
            for part, sequences, packing in zip(self._parts, text, packings, strict=True):
                loss += self._with_gradients(part, sequences, step, packing, counted)
        self.gradients.sum_()
        norm, scale = self.gradients.scale_for(self.training.clip or float("inf"))
        return start_sum(loss, self.groups["dp-cp"])(), norm, scale

    def _targets_of(self, text: Tensor) -> int | Tensor:
        """Number of target tokens that count in the loss of the whole batch. If end-of-document tokens are masked, the
        number depends on the batch and is a scalar tensor on the device."""
        if not self.training.mask_ends:
            return self.training.tokens_per_step
        counted: Tensor = start_sum(text[..., :-1].ne(self._end).sum(), self.groups["dp"])()
        return counted.clamp(min=1)

    @property
    def _end(self) -> int:
        """The token that ends a document."""
        assert self.training.document_end is not None
        return self.training.document_end

    def _with_gradients(
        self, part: int, sequences: Tensor, step: int | Tensor, packing: Packing, counted: int | Tensor
    ) -> Tensor:
        """Run forward and backward of micro-batch number `part`, which adds to the gradients. Return the micro-batch's
        share of the batch's loss, a scalar."""
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
        """Run one pipeline stage on a micro-batch, for `_gradients_of`; see `Pipeline.run`."""
        assert self.schedule is not None
        self._take_place(self._parts[number])
        tokens, targets = self._here(text[number], packings[number])
        last = stage + 1 == self.schedule.stages
        input, aim = tokens if given is None else given, targets if last else None
        made: Tensor = self.model(stage, input, aim, **self._options(packings[number], step))
        return made / counted if last else made

    def _take_place(self, part: int) -> None:
        """Set the position of a micro-batch in the whole batch, which determines the next dropout masks."""
        parts = self.training.global_batch // self.training.micro_batch
        if self.model.masks is not None:
            self.model.masks.place = replace(self.model.masks.place, batch=(part, parts))

    def _here(self, sequences: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
        """Select the tokens and targets at the positions that this context parallel rank holds."""
        chunks = packing.held[self.context.index]
        tokens, targets = (chunks.of(each, 1) for each in (sequences[:, :-1], sequences[:, 1:]))
        if self.training.mask_ends:
            targets = targets.masked_fill(tokens.eq(self._end), IGNORED)
        return tokens, targets

    def _options(self, packing: Packing, step: int | Tensor) -> dict[str, Any]:
        """The model's keyword arguments for a micro-batch."""
        return {
            "positions": self._positions_of(packing),
            "packing": packing if self.context.ranks > 1 or packing.documents is not None else None,
            "reduction": "sum",
            "step": step,
        }

    def _positions_of(self, packing: Packing) -> Tensor:
        """Positions of the tokens that this context parallel rank holds: (S,), or (B, S) if positions restart at each
        document."""
        chunks = packing.held[self.context.index]
        if not self.training.reset_positions or packing.documents is None:
            return chunks.positions(self.device)
        return uploaded(chunks.of(packing.documents.positions(), 1), self.device)

    def _sent(self, numbers: Tensor) -> Tensor:
        """Copy a tensor to pinned memory if the device is a GPU. From there, `Replayed` copies it to the GPU without a
        wait of the host."""
        return numbers.pin_memory() if self.device.type == "cuda" else numbers


def _with_wide_loss(model: Gpt | GptStages, device: torch.device) -> None:
    """Compute the loss of a bfloat16 model in float32, because bfloat16 has only three digits."""
    if model.head is None:  # only the last stage has the head
        return
    wide = torch.autocast(device.type, torch.bfloat16)
    model.head.forward = wide(model.head.forward)  # type: ignore[method-assign]


def _decaying(parameters: Iterable[Tensor], decay: float) -> list[dict[str, Any]]:
    every = list(parameters)
    return [
        {"params": [parameter for parameter in every if parameter.dim() > 1], "weight_decay": decay},
        {"params": [parameter for parameter in every if parameter.dim() < 2], "weight_decay": 0.0},
    ]
