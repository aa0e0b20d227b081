"""One training of a GPT, step by step: the same numbers in every layout of ranks, up to the rounding of sums.

    training = GptTraining(config=config, length=256, global_batch=16, micro_batch=4)
    trainer = GptTrainer(training, open_tokens(Path("text/")), layout, layout.process_groups(), world.device)
    while trainer.step < 100:
        loss, norm = trainer.advance()

Sequences and dropout masks follow from the seed, the step and the place in the whole batch: neither which rank takes a
sequence nor how many it takes at once changes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rooftop.models.gpt import Gpt
from rooftop.models.gpt_configs import GptConfig
from rooftop.models.gpt_layouts import fully_sharded_gpt, parallel_gpt
from rooftop.parallel import Layout, ModelGradients
from rooftop.parallel.dropouts import CounterDropout
from rooftop.parallel.exchanges import Group, start_sum
from rooftop.train.adamw import AdamW
from rooftop.train.batches import Batches
from rooftop.train.main_weights import MainWeights
from rooftop.train.tokens import Tokens

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
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
        clip: the largest norm that a step's gradient may have; 0: any.
        seed: of initial values, dropout and the order of the data.
        dtype: in which is computed; with bfloat16 weights, gradients and optimizer are float32.
        recompute: keep only what goes from block to block, and compute the rest again in backward.

    Raises:
        ValueError: sizes that are not positive, a negative rate, a sequence longer than the model's positions, another
            dtype.
    """

    config: GptConfig
    length: int
    global_batch: int
    micro_batch: int
    learning_rate: float = 3e-4
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    dtype: torch.dtype = torch.float32
    recompute: bool = False

    def __post_init__(self) -> None:
        for name in ("length", "global_batch", "micro_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"GptTraining: {name} must be positive, got {getattr(self, name)}")
        for name in ("learning_rate", "weight_decay", "clip"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"GptTraining: {name} must be 0 or more, got {getattr(self, name)}")
        if self.length > self.config.positions:
            raise ValueError(
                f"GptTraining: sequences of {self.length} tokens, but the model has {self.config.positions} positions"
            )
        if self.dtype not in DTYPES.values():
            raise ValueError(f"GptTraining: dtype must be one of {', '.join(DTYPES)}, got {self.dtype}")

    @property
    def tokens_per_step(self) -> int:
        """Of all ranks."""
        return self.global_batch * self.length

    def batches(self, tokens: Tokens) -> Batches:
        """Its sequences.

        Raises:
            InputError: the tokens are too few for one.
        """
        return Batches(tokens, self.length, self.global_batch, self.seed)

    def check(self, layout: Layout, world_size: int) -> None:
        """Refuse a layout in which this cannot be trained. Communicates with nobody.

        Raises:
            ValueError: what does not fit, and the nearest layouts that do.
        """
        if layout.pp > 1 or layout.cp > 1:
            raise ValueError(
                f"pipeline and context parallel ranks cannot train yet: the layout {layout} must have pp=1 and cp=1; "
                "use tensor and data parallel ranks"
            )
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


class GptTrainer:
    """This rank's part of a training. All ranks make it, and call its methods, together: they communicate.

    Args:
        training: what is trained.
        tokens: the same at all ranks.
        layout: of the ranks; fits (`GptTraining.check`).
        groups: `layout.process_groups()`.
        device: where this rank computes.
        fully_shard: whether data ranks share parameters, gradients and optimizer (`rooftop.parallel.fully_sharded`).

    Attributes:
        step: steps that have been made.
        weights: what the optimizer steps; float32 where the model is narrower.
        narrow: whether the model computes in a narrower dtype than that of `weights`.

    Raises:
        InputError: too few tokens.
        ValueError: `fully_shard` without data ranks.
    """

    def __init__(
        self,
        training: GptTraining,
        tokens: Tokens,
        layout: Layout,
        groups: Mapping[str, Group],
        device: torch.device,
        *,
        fully_shard: bool = False,
    ) -> None:
        self.training, self.layout, self.groups, self.device, self.step = training, layout, groups, device, 0
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.place = layout.coordinates(self.rank)
        self.batches = training.batches(tokens)
        self.fully_shard = fully_shard
        wide = torch.float64 if training.dtype == torch.float64 else torch.float32
        options: dict[str, Any] = {"seed": training.seed, "recompute": training.recompute, "device": device}
        if fully_shard:  # parameters are float32, and gathered in the narrow dtype
            self.model = fully_sharded_gpt(
                training.config, layout, groups, **options, dtype=wide, compute_dtype=training.dtype
            )
            self.weights = MainWeights(self.model, wide, keep_narrow=True)
        else:
            self.model = parallel_gpt(training.config, layout, groups, **options, dtype=wide)
            self.weights = MainWeights(self.model, training.dtype, keep_narrow=True)
        self.narrow = training.dtype != wide
        if self.narrow:
            _with_wide_loss(self.model, device)
        self.gradients = ModelGradients(self.model, groups, sequence_parallel=layout.sequence_parallel)
        self.weights.answer_for(self.gradients)
        self.optimizer = AdamW(
            _decaying(self.weights.named.values(), training.weight_decay),
            lr=training.learning_rate,
            betas=BETAS,
            weights=self.weights,
        )
        self._dropouts = [module for module in self.model.modules() if isinstance(module, CounterDropout)]
        self._positions = torch.arange(training.length, device=device)

    def advance(self) -> tuple[Tensor, Tensor]:
        """One step: the mean loss of its batch before it, and the norm of its gradient, () both, as on all ranks.

        They stay on the device: reading them waits for it.
        """
        training, ranks = self.training, self.layout.dp
        parts = training.global_batch // training.micro_batch
        loss = torch.zeros((), device=self.device, dtype=next(iter(self.weights.named.values())).dtype)
        for part in range(self.place["dp"], parts, ranks):
            loss += self._with_gradients(part, parts)
        self.gradients.sum_()
        norm, scale = self.gradients.scale_for(training.clip or float("inf"))
        self.optimizer.step(scale=scale if training.clip else None)
        self.optimizer.zero_grad()
        self.step += 1
        return start_sum(loss, self.groups["dp-cp"])(), norm

    def _with_gradients(self, part: int, parts: int) -> Tensor:
        """A micro-batch's share of the loss, (); its gradients are added to those before."""
        size = self.training.micro_batch
        text = self._here(self.batches.read(self.step, range(part * size, (part + 1) * size)))  # (B, S + 1)
        for dropout in self._dropouts:  # masks by the place in the whole batch
            dropout.parts = ((part, parts), dropout.parts[1])
        total: Tensor = self.model(
            text[:, :-1], text[:, 1:], positions=self._positions, reduction="sum", step=self.step
        )
        loss = total / self.training.tokens_per_step
        loss.backward()
        return loss.detach()

    def _here(self, text: Tensor) -> Tensor:
        """On the device; from pinned memory, so that Python goes on meanwhile."""
        return text.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else text


def _with_wide_loss(model: Gpt, device: torch.device) -> None:
    """Makes the loss float32 where the model is bfloat16, in which a sum has three digits."""
    assert model.head is not None
    wide = torch.autocast(device.type, torch.bfloat16)
    model.head.forward = wide(model.head.forward)  # type: ignore[method-assign]


def _decaying(parameters: Iterable[Tensor], decay: float) -> list[dict[str, Any]]:
    every = list(parameters)
    return [
        {"params": [parameter for parameter in every if parameter.dim() > 1], "weight_decay": decay},
        {"params": [parameter for parameter in every if parameter.dim() < 2], "weight_decay": 0.0},
    ]
