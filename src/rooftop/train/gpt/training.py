"""The description of a GPT training (sizes, rates and schedules), and checks whether a layout of ranks fits.

    training = GptTraining(config=config, length=256, global_batch=16, micro_batch=4)
    training.check(layout, world_size=8, device="cuda")    # without communication

`rooftop.train.gpt.trainer` runs the steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from rooftop.models.gpt.stages import layers_of_stages
from rooftop.models.gpt.switches import GptConfig
from rooftop.parallel import Layout
from rooftop.parallel.contexts import Context
from rooftop.parallel.recomputing import Recompute, granularity_of
from rooftop.parallel.schedules import Schedule, schedule_of
from rooftop.parallel.transport_plans import Exchange, choose_transport
from rooftop.train.tokens.batches import Batches
from rooftop.train.tokens.mixtures import Mixture
from rooftop.train.tokens.tokens import Tokens
from rooftop.words import did_you_mean

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
LAUNCHED_FLOPS = 1.5e12
"""Below this number of flops per layer and micro-batch, in 16 bits, kernel launches limit a step. Python needs 2 to 3
ms to launch a layer's forward and backward; in this time an H100 or H200 computes 1 to 1.5e12 flops."""
STATE_BYTES = 18
"""Bytes per parameter in bfloat16 training: 2 for the weight, 4 for its float32 copy, 4 for its gradient, 8 for AdamW's
state.
"""
ACTIVATION_BYTES = 40
"""Bytes that autograd saves in 16-bit training, per token, per layer and per feature of the layer's width. On an H200,
GPT-2 with 12 layers of 768 features needs 10.7 GiB for 32,768 tokens, including all weights."""
DECAYS: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1 - done,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
}
"""Decay functions by name. A decay function maps the finished fraction of the decay steps to a fraction of the learning
rate's range: 1 is the highest rate, 0 the lowest.
"""


@dataclass(frozen=True, kw_only=True)
class GptTraining:
    """The settings of a GPT training; they do not depend on the layout of ranks.

    Attributes:
        config: config of the model.
        length: tokens per sequence.
        global_batch: sequences per step, summed over all ranks.
        micro_batch: sequences in one forward pass of a rank. The micro-batch size affects only memory and speed.
        learning_rate, weight_decay: settings of AdamW; 1-D weights (norms and biases) do not decay.
        warmup: number of steps of linear warmup; the last of these steps has `learning_rate`.
        decay: schedule of the learning rate after the warmup, a name in `DECAYS`.
        decay_steps: the step, counted from 1, at which the learning rate reaches `least_rate`. The rate then stays
            constant.
        least_rate: the final learning rate.
        clip: maximum norm of the gradient; 0: gradients are not clipped.
        seed: seed of initial values, dropout and data order.
        dtype: compute dtype; with bfloat16, weights, gradients and optimizer state are float32.
        recompute: activations that backward recomputes instead of keeping them (`rooftop.parallel.recomputing`). False:
            none; True or "full": the activations of whole blocks; "selective": large tensors that are cheap to compute.
        halves: compute the two halves of a micro-batch alternately, so that tensor parallel ranks communicate one half
            while they compute the other. Halves double the number of launches, so on GPUs `halves` needs `cuda_graph`
            or a sharded model.
        sum_once: with a sharded model, sum gradients once per step instead of after each micro-batch. Each rank then
            holds the unsharded gradients of its tensor parallel part of its stages, 4 bytes per parameter of this part.
        pipeline_schedule: order in which pipeline ranks compute micro-batches, a name in
            `rooftop.parallel.schedules.SCHEDULES`. None: "1f1b", or "interleaved" with `layers_per_virtual_stage`.
        layers_per_virtual_stage: average number of layers per stage in an interleaved schedule, whose ranks have
            several stages.
        transport: how context parallel ranks exchange keys and values, a name in `rooftop.parallel.TRANSPORTS`; None:
            `choose_transport` chooses.
        near: number of neighbouring ranks that exchange heads, for the transport a2a+p2p.
        document_end: the token that ends a document; attention then stays within each document. None: each sequence is
            one document.
        reset_positions: whether positions restart at each document.
        mask_ends: whether the loss ignores the target of each end token, because this target belongs to the next
            document.
        cuda_graph: from the fourth step on, replay forward and backward from a CUDA graph (`rooftop.train.Replayed`).
            Later changes of the model's modes and hooks have no effect. The weights stay at their memory addresses: if
            the caller sets `.data`, the next step copies the values to the weight's old address.

    Raises:
        ValueError: a size is not positive, a rate or seed is out of range, the dtype is not supported, or a sequence is
            longer than the model's positions.
        ValueError: `decay` is unknown, `decay_steps` or `least_rate` is set with a constant rate, a rate that falls has
            no `decay_steps` after the warm-up, or `least_rate` is above `learning_rate`.
        ValueError: `halves` is set with an odd micro-batch or with `recompute`, or the options of documents do not fit
            each other, `halves` or `cuda_graph`.
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
    recompute: Recompute = False
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
                f"GptTraining: a micro_batch of {self.micro_batch} cannot be halved (halves, --tp-comm-overlap): use "
                "an even number, or leave halves out"
            )
        if granularity_of(self.recompute, "GptTraining") and self.halves:
            raise ValueError(
                "GptTraining: halves (--tp-comm-overlap) cannot be combined with recompute: leave out one of them"
            )
        if self.dtype not in DTYPES.values():
            raise ValueError(f"GptTraining: dtype must be one of {', '.join(DTYPES)}, got {self.dtype}")
        self._check_documents()

    def _check_documents(self) -> None:
        if self.transport is not None:
            Context(None, self.transport)  # raises for an unknown transport
        end = self.document_end
        if end is not None and (isinstance(end, bool) or not isinstance(end, int)):
            raise ValueError(f"GptTraining: document_end must be a token (an int), got {end!r}")
        if end is None:
            if self.reset_positions or self.mask_ends:
                raise ValueError(
                    "GptTraining: reset_positions and mask_ends (--reset-position-ids, --eod-mask-loss) need "
                    "documents: give document_end (--eod-token), the token that ends a document"
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
                "GptTraining: documents (document_end, --eod-token) differ from step to step and cannot be combined "
                f"with {what}: leave out one of them"
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
                    "GptTraining: decay_steps and least_rate (--lr-decay-iters, --min-lr) need a learning rate that "
                    f"falls: expected decay (--lr-decay-style) {' or '.join([*DECAYS][1:])}, got constant"
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
        """Return the learning rate of a step, counted from 1."""
        if step <= self.warmup:
            return self.learning_rate * step / self.warmup
        if self.decay_steps is None:
            return self.learning_rate
        done = min(1.0, (step - self.warmup) / (self.decay_steps - self.warmup))
        return self.least_rate + (self.learning_rate - self.least_rate) * DECAYS[self.decay](done)

    def schedule_of(self, layout: Layout) -> Schedule | None:
        """Return the pipeline schedule for a layout; None without a pipeline.

        Raises:
            ValueError: `pipeline_schedule` and `layers_per_virtual_stage` exclude each other, or one of them does not
                fit the layout or the number of layers.
        """
        name, layers = self.pipeline_schedule, self.layers_per_virtual_stage
        if layout.pp == 1:
            if name is not None or layers is not None:
                raise ValueError(
                    "pipeline_schedule and layers_per_virtual_stage (--pipeline-schedule, "
                    f"--num-layers-per-virtual-pipeline-stage) are for pipeline ranks, but the layout {layout} has "
                    "none: leave them out, or give --pipeline-parallel-size"
                )
            return None
        stages = None
        if layers is not None and name not in (None, "interleaved"):
            raise ValueError(
                f"layers_per_virtual_stage={layers} (--num-layers-per-virtual-pipeline-stage) is for the schedule "
                f"interleaved; {name} sets its own number of stages per rank: leave out one of them"
            )
        if layers is not None:
            if layers < 1 or self.config.layers % (layout.pp * layers):
                most = self.config.layers // (2 * layout.pp)  # at least two stages per rank
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
        layers_of_stages(self.config, schedule.placement, self.length)  # raises if there are fewer layers than stages
        return schedule

    @property
    def tokens_per_step(self) -> int:
        """The number of tokens per step, summed over all ranks."""
        return self.global_batch * self.length

    def is_limited_by_launches(self, layout: Layout, device: str) -> bool:
        """Whether a CUDA graph probably saves time: one GPU computes the layers faster than Python launches their
        kernels.

        False for several ranks, and with `document_end`, because documents differ from step to step.
        """
        if torch.device(device).type != "cuda" or layout.world_size > 1 or self.document_end is not None:
            return False
        tokens = self.micro_batch * self.length
        of_layer = self.config.flops_per_token(self.length) * tokens / max(1, self.config.layers)
        return of_layer < LAUNCHED_FLOPS * (1 if self.dtype.itemsize == 2 else 0.25)

    @property
    def graph_bytes(self) -> int:
        """Approximate GPU memory of a training on one rank that replays a CUDA graph: weights, gradients, optimizer
        state, and twice the activations. The graph has its own activation memory, in addition to the memory that the
        allocator keeps from the steps before the capture."""
        config, tokens = self.config, self.micro_batch * self.length
        activations = config.layers * tokens * config.width * ACTIVATION_BYTES * self.dtype.itemsize // 2
        return STATE_BYTES * config.parameters + 2 * activations

    def batches(self, tokens: Tokens | Mixture) -> Batches:
        """Return the `Batches`, which choose the sequences of each step.

        Raises:
            InputError: there are too few tokens for one sequence.
        """
        return Batches(tokens, self.length, self.global_batch, self.seed)

    def check(self, layout: Layout, world_size: int, device: str, *, fully_shard: bool = False) -> None:
        """Check without communication that a layout can run this training.

        Args:
            layout: layout of the ranks.
            world_size: number of ranks.
            device: device of the ranks, "cuda" or "cpu".
            fully_shard: whether data parallel ranks shard the model.

        Raises:
            ValueError: the layout does not fit; the message suggests the nearest layouts that fit.
        """
        config = self.config
        if self.global_batch % self.micro_batch:
            fitting = [n for n in range(1, self.global_batch + 1) if self.global_batch % n == 0]
            raise ValueError(
                f"global_batch={self.global_batch} (--global-batch-size) is not divisible by "
                f"micro_batch={self.micro_batch} (--micro-batch-size), the sequences that a rank computes at once: use "
                f"a micro-batch of {_or_of(fitting, self.micro_batch)}, or another global batch"
            )
        config.check_layout(
            layout,
            world_size,
            layers=config.layers,
            sequence=self.length,
            batch=self.global_batch,
            micro_batch=self.micro_batch,
        )
        self._check_context(layout)
        self.schedule_of(layout)
        if self.cuda_graph and torch.device(device).type != "cuda":
            raise ValueError(
                f"a CUDA graph (cuda_graph, --enable-cuda-graph) needs a GPU, but the training runs on {device}: "
                "leave the graph out"
            )
        if self.halves and layout.tp == 1:
            raise ValueError(
                f"halves (--tp-comm-overlap) hide the communication of tensor parallel ranks, but the layout {layout} "
                "has no such ranks: leave halves out, or split the layers with tp"
            )
        if self.halves and not (self.cuda_graph or fully_shard) and torch.device(device).type == "cuda":
            raise ValueError(
                "halves (--tp-comm-overlap) double the launches, so a step that the host launches takes twice as long "
                "as without them: also set cuda_graph (--enable-cuda-graph), or leave halves out"
            )
        if self.sum_once and not fully_shard:
            raise ValueError(
                "sum_once (--accumulate-whole-gradients) needs fully_shard (--use-torch-fsdp2): data parallel ranks "
                "without fully_shard already sum once a step; leave sum_once out"
            )
        if not fully_shard:
            return
        if layout.dp * layout.cp == 1:
            raise ValueError(
                "fully_shard (--use-torch-fsdp2) shards the model over data and context parallel ranks, but the "
                f"layout {layout} has none: leave out fully_shard, or start more processes"
            )
        if self.halves or self.cuda_graph:
            what = "halves (--tp-comm-overlap)" if self.halves else "a CUDA graph (--enable-cuda-graph)"
            raise ValueError(f"fully_shard (--use-torch-fsdp2) cannot be combined with {what}: leave out one of them")

    def _check_context(self, layout: Layout) -> None:
        """Raise ValueError for options that context parallel ranks do not support, or that need such ranks."""
        if layout.cp == 1:
            if self.near is not None or self.transport is not None:
                raise ValueError(
                    "transport and near (--cp-comm-type, --hierarchical-context-parallel-sizes) need context "
                    f"parallel ranks, but the layout {layout} has none: leave them out, or give "
                    "--context-parallel-size"
                )
            return
        transport = self.transport_in(layout)
        if self.near is not None and transport != "a2a+p2p":
            raise ValueError(
                f"near={self.near} (--hierarchical-context-parallel-sizes) is for the transport a2a+p2p, but the "
                f"transport is {transport}: give --cp-comm-type a2a+p2p, or leave the sizes out"
            )
        if self.halves or self.cuda_graph:
            what = "halves (--tp-comm-overlap)" if self.halves else "a CUDA graph (--enable-cuda-graph)"
            raise ValueError(f"context parallelism cannot be combined with {what}: leave out one of them")
        if transport in ("p2p", "a2a+p2p") and self._has_windows:
            raise ValueError(
                f"the transport {transport} (--cp-comm-type) does not support the attention windows of this model: "
                "use all_gather or a2a"
            )
        if transport == "a2a+p2p" and (self.near is None or layout.cp % self.near):
            raise ValueError(
                "the transport a2a+p2p (--cp-comm-type) needs near (--hierarchical-context-parallel-sizes), a number "
                f"of neighbours that divides cp={layout.cp}, got {self.near}"
            )
        ranks = layout.cp if transport == "a2a" else self.near if transport == "a2a+p2p" else 1
        heads, kv_heads = self._heads_in(layout)
        assert ranks is not None
        if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
            raise ValueError(
                f"the transport {transport} (--cp-comm-type) divides the heads of a tensor parallel rank among {ranks} "
                f"ranks: expected query heads that are divisible by {ranks}, and key heads that are divisible by "
                f"{ranks} or divide {ranks}, got {heads} query heads and {kv_heads} key heads. Use p2p or all_gather"
            )

    def transport_in(self, layout: Layout) -> str:
        """Return the method by which the context parallel ranks of a layout exchange keys and values."""
        if self.transport is not None:
            return self.transport
        heads, kv_heads = self._heads_in(layout)
        sizes = (heads, kv_heads, self.config.head_features, self.length, layout.cp)
        return choose_transport(Exchange(*sizes, windows=self._has_windows)).transport

    def _heads_in(self, layout: Layout) -> tuple[int, int]:
        """How many query heads and how many key-value heads a tensor parallel rank has."""
        return self.config.heads // layout.tp, max(1, self.config.kv_heads // layout.tp)

    @property
    def _has_windows(self) -> bool:
        return any(self.config.window_of(layer) is not None for layer in range(self.config.layers))


def _or_of(numbers: list[int], near: int) -> str:
    """Return the valid numbers nearest to `near`, below and above, as "A or B"."""
    below, above = [n for n in numbers if n < near][-1:], [n for n in numbers if n > near][:1]
    return " or ".join(map(str, below + above))
