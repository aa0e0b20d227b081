"""One training of a GPT, step by step: the same numbers in every layout of ranks, up to the rounding of sums.

    training = GptTraining(config=config, length=256, global_batch=16, micro_batch=4)
    trainer = GptTrainer(training, open_tokens(Path("text/")), layout, layout.process_groups(), world.device)
    while trainer.step < 100:
        loss, norm = trainer.advance()

Sequences and dropout masks follow from the seed, the step and the place in the whole batch: neither which rank takes a
sequence nor how many it takes at once changes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rooftop.errors import did_you_mean
from rooftop.models.gpt import Gpt
from rooftop.models.gpt_layouts import fully_sharded_gpt, parallel_gpt
from rooftop.models.gpt_stages import GptStages, layers_of_stages, parallel_gpt_stages
from rooftop.models.gpt_switches import GptConfig
from rooftop.parallel import Layout, ModelGradients
from rooftop.parallel.contexts import Context
from rooftop.parallel.deferred import defer_weight_gradients
from rooftop.parallel.documents import Documents
from rooftop.parallel.exchanges import Group, start_sum
from rooftop.parallel.packings import Packing
from rooftop.parallel.pipelines import Pipeline
from rooftop.parallel.schedules import Schedule, schedule_of
from rooftop.parallel.sharded_data import sum_in_backward
from rooftop.parallel.transport_plans import Exchange, choose_transport
from rooftop.train.adamw import AdamW
from rooftop.train.batches import Batches
from rooftop.train.initial_weights import fill_from
from rooftop.train.main_weights import Held, MainWeights
from rooftop.train.mixtures import Mixture
from rooftop.train.replays import Replayed
from rooftop.train.tokens import Tokens

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
DECAYS: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1 - done,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
}
"""Which share of the learning rate, above its least one, is left when a share of the steps is done."""
BETAS = (0.9, 0.95)  # of Adam, as GPT-3 and Llama were trained


@dataclass(frozen=True, kw_only=True)
class GptTraining:
    """What is trained, and how; the same in every layout.

    Attributes:
        config: of the model.
        length: tokens of a sequence.
        global_batch: sequences of a step, of all ranks.
        micro_batch: sequences that a rank computes at once. Changes memory and speed only.
        learning_rate, weight_decay: of AdamW; weights of one dimension (norms and biases) do not decay.
        warmup: steps in which the rate grows evenly to `learning_rate`, which the last of them has.
        decay: how it falls afterwards: a name of `DECAYS`.
        decay_steps: the first step, counted from 1, that has `least_rate`; all that follow have it too.
        least_rate: at the end.
        clip: the largest norm that a step's gradient may have; 0: any.
        seed: of initial values, dropout and the order of the data.
        dtype: in which is computed; with bfloat16 weights, gradients and optimizer are float32.
        recompute: keep only what goes from block to block, and compute the rest again in backward.
        halves: compute the two halves of a micro-batch in turn: what tensor parallel ranks exchange of one is on its
            way while they compute the other. Twice as many launches: with `cuda_graph`, or the host is too slow.
        sum_once: where data ranks share the model, sum gradients once a step and not after each micro-batch. Each rank
            then holds the gradients of all that it computes with, 4 bytes a parameter.
        pipeline_schedule: in which order pipeline ranks compute micro-batches: a name of
            `rooftop.parallel.schedules.SCHEDULES`; None: "1f1b", or with `layers_per_virtual_stage` "interleaved".
        layers_per_virtual_stage: of an interleaved schedule, whose ranks have several stages: how many layers a stage
            has, on average.
        transport: how context parallel ranks exchange keys and values, a name of `rooftop.parallel.TRANSPORTS`; None:
            the one that `choose_transport` gives.
        near: with the transport a2a+p2p, how many neighbours exchange heads.
        document_end: the token with which a document ends. Attention then sees a position's own document only. None:
            each sequence is one document.
        reset_positions: whether positions are counted from the beginning of each document.
        mask_ends: whether the targets of tokens that end a document are left out of the loss: they begin the next one.
        cuda_graph: after three steps replay forward and backward from a CUDA graph (`rooftop.train.Replayed`). What is
            then done to the model's modes, hooks or memory has no effect on its training.

    Raises:
        ValueError: sizes that are not positive, a rate or seed out of range, a sequence longer than the model's
            positions, another dtype; a rate that does not fall to its least one after the warm-up; halves of an odd
            micro-batch, or with `recompute`.
    """

    config: GptConfig
    length: int
    global_batch: int
    micro_batch: int
    learning_rate: float = 3e-4
    weight_decay: float = 0.1
    warmup: int = 0
    decay: str = "constant"
    decay_steps: int | None = None
    least_rate: float = 0.0
    clip: float = 1.0
    seed: int = 0
    dtype: torch.dtype = torch.float32
    recompute: bool = False
    halves: bool = False
    sum_once: bool = False
    pipeline_schedule: str | None = None
    layers_per_virtual_stage: int | None = None
    transport: str | None = None
    near: int | None = None
    document_end: int | None = None
    reset_positions: bool = False
    mask_ends: bool = False
    cuda_graph: bool = False

    def __post_init__(self) -> None:
        for name in ("length", "global_batch", "micro_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"GptTraining: {name} must be positive, got {getattr(self, name)}")
        for name in ("learning_rate", "weight_decay", "clip", "warmup", "least_rate"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"GptTraining: {name} must be finite and 0 or more, got {getattr(self, name)}")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 1 << 64:
            raise ValueError(f"GptTraining: seed must be an int from 0 to 2^64 - 1, got {self.seed}")
        self._check_decay()
        if self.length > self.config.positions:
            raise ValueError(
                f"GptTraining: sequences of {self.length} tokens, but the model has {self.config.positions} positions"
            )
        if self.halves and self.micro_batch % 2:
            raise ValueError(
                f"GptTraining: a micro_batch of {self.micro_batch} has no halves (--tp-comm-overlap): use an even one, "
                "or leave halves out"
            )
        if self.halves and self.recompute:
            raise ValueError(
                "GptTraining: halves (--tp-comm-overlap) cannot be computed again in backward: leave out halves or "
                "recompute"
            )
        if self.dtype not in DTYPES.values():
            raise ValueError(f"GptTraining: dtype must be one of {', '.join(DTYPES)}, got {self.dtype}")
        self._check_documents()

    def _check_documents(self) -> None:
        if self.transport is not None:
            Context(None, self.transport)  # it is one
        end = self.document_end
        if end is not None and (isinstance(end, bool) or not isinstance(end, int)):
            raise ValueError(f"GptTraining: document_end must be a token, an int, got {end!r}")
        if end is None:
            if self.reset_positions or self.mask_ends:
                raise ValueError(
                    "GptTraining: reset_positions and mask_ends (--reset-position-ids, --eod-mask-loss) are of "
                    "documents: give document_end (--eod-token), the token with which one ends"
                )
            return
        if not 0 <= end < self.config.vocabulary:
            raise ValueError(
                f"GptTraining: document_end (--eod-token) must be a token from 0 to {self.config.vocabulary - 1}, got "
                f"{end}"
            )
        if self.halves or self.cuda_graph:
            what = "halves (--tp-comm-overlap)" if self.halves else "a CUDA graph (--enable-cuda-graph)"
            raise ValueError(
                f"GptTraining: documents (document_end, --eod-token) differ from step to step, and cannot have {what}: "
                "leave out one of both"
            )

    def _check_decay(self) -> None:
        if self.decay not in DECAYS:
            raise ValueError(
                f"GptTraining: decay must be one of {', '.join(DECAYS)}, got {self.decay!r}"
                f"{did_you_mean(self.decay, DECAYS)}"
            )
        if self.decay == "constant":
            if self.decay_steps is not None or self.least_rate:
                raise ValueError(
                    "GptTraining: decay_steps and least_rate (--lr-decay-iters, --min-lr) are of a rate that falls: "
                    f"expected decay (--lr-decay-style) {' or '.join([*DECAYS][1:])}, got constant"
                )
            return
        if self.decay_steps is None or self.decay_steps <= self.warmup:
            raise ValueError(
                f"GptTraining: decay_steps (--lr-decay-iters) must be more than the {self.warmup} steps of the "
                f"warm-up, got {self.decay_steps}"
            )
        if self.least_rate > self.learning_rate:
            raise ValueError(
                f"GptTraining: least_rate (--min-lr) must be at most the learning_rate {self.learning_rate}, got "
                f"{self.least_rate}"
            )

    def rate_at(self, step: int) -> float:
        """The learning rate of a step, counted from 1."""
        if step <= self.warmup:
            return self.learning_rate * step / self.warmup
        if self.decay_steps is None:
            return self.learning_rate
        done = min(1.0, (step - self.warmup) / (self.decay_steps - self.warmup))
        return self.least_rate + (self.learning_rate - self.least_rate) * DECAYS[self.decay](done)

    def schedule_of(self, layout: Layout) -> Schedule | None:
        """The order in which the pipeline ranks of a layout compute; None: it has none.

        Raises:
            ValueError: options that do not go with each other or with the layout.
        """
        name, layers = self.pipeline_schedule, self.layers_per_virtual_stage
        if layout.pp == 1:
            if name is not None or layers is not None:
                raise ValueError(
                    "pipeline_schedule and layers_per_virtual_stage (--pipeline-schedule, "
                    f"--num-layers-per-virtual-pipeline-stage) are for pipeline ranks, and the layout {layout} has "
                    "none: leave them out, or give --pipeline-parallel-size"
                )
            return None
        stages = None
        if layers is not None and name not in (None, "interleaved"):
            raise ValueError(
                f"layers_per_virtual_stage={layers} (--num-layers-per-virtual-pipeline-stage) is for the schedule "
                f"interleaved; {name} has its own number of stages a rank: leave one of both out"
            )
        if layers is not None:
            if layers < 1 or self.config.layers % (layout.pp * layers):
                most = self.config.layers // (2 * layout.pp)  # of two stages a rank
                fitting = [n for n in range(1, most + 1) if self.config.layers % (layout.pp * n) == 0]
                instead = f"use one of {', '.join(map(str, fitting))}" if fitting else "use another number of ranks"
                raise ValueError(
                    f"layers_per_virtual_stage={layers} (--num-layers-per-virtual-pipeline-stage): "
                    f"{self.config.layers} layers cannot be divided into stages of {layers} at each of {layout.pp} "
                    f"pipeline ranks; {instead}"
                )
            stages = self.config.layers // (layout.pp * layers)
        micro_batches = self.global_batch // (self.micro_batch * layout.dp)
        schedule = schedule_of(name or ("1f1b" if layers is None else "interleaved"), layout.pp, micro_batches, stages)
        layers_of_stages(self.config, schedule.stages, self.length)  # there are enough
        return schedule

    @property
    def tokens_per_step(self) -> int:
        """Of all ranks."""
        return self.global_batch * self.length

    def batches(self, tokens: Tokens | Mixture) -> Batches:
        """Its sequences.

        Raises:
            InputError: the tokens are too few for one.
        """
        return Batches(tokens, self.length, self.global_batch, self.seed)

    def check(self, layout: Layout, world_size: int, device: str, *, fully_shard: bool = False) -> None:
        """Refuse a layout in which this cannot be trained. Communicates with nobody.

        Args:
            layout: of the ranks.
            world_size: that there are.
            device: where they compute, such as "cuda" or "cpu".
            fully_shard: whether data ranks share the model.

        Raises:
            ValueError: what does not fit, and the nearest layouts that do.
        """
        config = self.config
        layout.check(
            world_size,
            heads=config.heads,
            kv_heads=config.kv_heads,
            hidden=config.width,
            feed_forward=config.hidden,
            vocabulary=config.vocabulary,
            layers=config.layers,
            sequence=self.length,
            batch=self.global_batch,
            micro_batch=self.micro_batch,
        )
        self._check_context(layout)
        self.schedule_of(layout)
        if self.cuda_graph and torch.device(device).type != "cuda":
            raise ValueError(
                f"a CUDA graph (cuda_graph, --enable-cuda-graph) needs a GPU, and this is trained on {device}: leave "
                "the graph out"
            )
        if self.halves and layout.tp == 1:
            raise ValueError(
                f"the layout {layout} has no tensor parallel ranks, whose exchanges halves (--tp-comm-overlap) would "
                "hide: leave them out, or split the layers with tp"
            )
        if layout.pp > 1 and self.cuda_graph:
            raise ValueError(
                f"pipeline ranks (the layout {layout}) cannot have a CUDA graph (--enable-cuda-graph) yet: leave it "
                "out, or use tensor and data parallel ranks"
            )
        if self.sum_once and not fully_shard:
            raise ValueError(
                "sum_once (--accumulate-whole-gradients) is for data ranks that share the model (fully_shard, "
                "--use-torch-fsdp2): others sum once a step already; leave it out"
            )
        if not fully_shard:
            return
        if layout.dp * layout.cp == 1:
            raise ValueError(
                f"the layout {layout} has no data or context parallel ranks to share the model (fully_shard, "
                "--use-torch-fsdp2): leave that out, or start more processes"
            )
        if self.halves or self.cuda_graph:
            what = "halves (--tp-comm-overlap)" if self.halves else "a CUDA graph (--enable-cuda-graph)"
            raise ValueError(
                f"data ranks that share the model (fully_shard, --use-torch-fsdp2) cannot have {what}: leave out one "
                "of both"
            )

    def _check_context(self, layout: Layout) -> None:
        """Refuse what context parallel ranks cannot compute."""
        if layout.cp == 1:
            if self.near is not None or self.transport is not None:
                raise ValueError(
                    f"the layout {layout} has no context parallel ranks, of which transport and near (--cp-comm-type, "
                    "--hierarchical-context-parallel-sizes) say how they exchange: leave them out, or give "
                    "--context-parallel-size"
                )
            return
        transport = self.transport_in(layout)
        if self.near is not None and transport != "a2a+p2p":
            raise ValueError(
                f"near={self.near} (--hierarchical-context-parallel-sizes) is for the transport a2a+p2p, and this is "
                f"{transport}: give --cp-comm-type a2a+p2p, or leave the sizes out"
            )
        if self.halves or self.cuda_graph:
            what = "halves (--tp-comm-overlap)" if self.halves else "a CUDA graph (--enable-cuda-graph)"
            raise ValueError(f"context parallel ranks cannot have {what}: leave out one of both")
        if transport in ("p2p", "a2a+p2p") and self._has_windows:
            raise ValueError(
                f"the transport {transport} (--cp-comm-type) computes no windows, which this model has: use "
                "all_gather or a2a"
            )
        if transport == "a2a+p2p" and (self.near is None or layout.cp % self.near):
            raise ValueError(
                f"the transport a2a+p2p (--cp-comm-type) needs near, a number of neighbours that divides "
                f"cp={layout.cp} (--hierarchical-context-parallel-sizes), got {self.near}"
            )
        ranks = layout.cp if transport == "a2a" else self.near if transport == "a2a+p2p" else 1
        heads, kv_heads = self._heads_in(layout)
        assert ranks is not None
        if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
            raise ValueError(
                f"the transport {transport} (--cp-comm-type) exchanges {heads} heads of queries and {kv_heads} of "
                f"keys of a tensor parallel rank among {ranks} ranks, which do not divide them: use p2p or all_gather"
            )

    def transport_in(self, layout: Layout) -> str:
        """How context parallel ranks of a layout exchange keys and values."""
        if self.transport is not None:
            return self.transport
        heads, kv_heads = self._heads_in(layout)
        sizes = (heads, kv_heads, self.config.head_features, self.length, layout.cp)
        return choose_transport(Exchange(*sizes, windows=self._has_windows)).transport

    def _heads_in(self, layout: Layout) -> tuple[int, int]:
        """Heads of queries, and of keys and values, of a tensor parallel rank."""
        return self.config.heads // layout.tp, max(1, self.config.kv_heads // layout.tp)

    @property
    def _has_windows(self) -> bool:
        return any(self.config.window_of(layer) is not None for layer in range(self.config.layers))


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
        initial: Path | None = None,
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
            loss, norm, scale = self._gradients_of(
                self._sent(text).to(self.device, non_blocking=True), self.step, packings
            )
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
        return self._sent(chunks.of(packing.documents.positions(), 1)).to(self.device, non_blocking=True)

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
