"""The modules of a decoder-only transformer: the embedding, a block, the head, and rotary positions.

`rooftop.models.gpt.network.Gpt` consists of these modules. A block also gets the index of its layer in the whole model.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from rooftop.models.gpt.switches import GptConfig
from rooftop.nn import Embedding, LayerNorm, RMSNorm
from rooftop.nn.hooks import is_plain
from rooftop.nn.norms import norm_of_sum
from rooftop.parallel.exchanges import Group, join_of_ranks, own_part
from rooftop.parallel.mlps import ParallelMLP
from rooftop.parallel.norm_sums import NormSums, Summand, takes
from rooftop.parallel.recomputing import as_multiplied, made_again
from rooftop.parallel.self_attentions import ParallelSelfAttention, Remembered, Rotation
from rooftop.parallel.tensor_linears import ColumnParallelLinear, RowParallelLinear
from rooftop.parallel.turns import Phases
from rooftop.parallel.vocab_embeddings import VocabParallelEmbedding
from rooftop.parallel.vocab_losses import vocab_parallel_linear_cross_entropy

Dropouts = Callable[[float, str], nn.Module]
"""A function that creates a dropout module from its probability (above 0) and its name in the model, e.g.
"layers.3.mlp.dropout".
"""


def plain_dropouts(probability: float, name: str) -> nn.Module:
    """Create PyTorch's dropout module. `name` is ignored; other functions of the type `Dropouts` use it."""
    return nn.Dropout(probability)


def _dropout(make: Dropouts, probability: float, name: str) -> nn.Module | None:
    return make(probability, name) if probability else None


def _dropped(dropout: nn.Module | None, x: Tensor) -> Tensor:
    return x if dropout is None else dropout(x)


def _norm(config: GptConfig) -> nn.Module:
    if config.norm == "rms":
        return RMSNorm(config.width, eps=config.epsilon)
    return LayerNorm(config.width, eps=config.epsilon, bias=config.biases)


def summed_and_normed(norm: nn.Module, x: Tensor | None, update: Tensor | Summand | None) -> tuple[Tensor, Tensor]:
    """Return (x + update, norm(x + update)), or (x, norm(x)) if update is None.

    x is the residual connection, and update the result of a sublayer. If update is a `Summand`, the sum of its parts
    over the tensor parallel ranks is added instead.
    """
    if isinstance(update, Summand):
        return update.summed_and_normed(norm, x)
    assert x is not None
    if update is None:
        return x, norm(x)
    normed, total = norm_of_sum(norm, update, x)
    return total, normed


class TokenEmbedding(nn.Module):
    """The embedding of tokens and, if positions are learned, of positions."""

    def __init__(
        self,
        config: GptConfig,
        dropouts: Dropouts = plain_dropouts,
        group: Group = None,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.split_along = group if sequence_parallel else None
        self.tokens = VocabParallelEmbedding(
            config.vocabulary, config.width, group=group, sequence_parallel=sequence_parallel
        )
        self.positions = Embedding(config.positions, config.width) if config.position == "learned" else None
        self.dropout = _dropout(dropouts, config.dropout, "embedding.dropout")

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Embed int64 tokens (B, S) at positions (S,) or (B, S): (B, S, W).

        With sequence parallelism, each rank returns its part of S.
        """
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions(own_part(positions, -1, self.split_along))
        return _dropped(self.dropout, x)

    def summand(self, tokens: Tensor, positions: Tensor, sums: NormSums) -> tuple[Tensor | None, Summand]:
        """Return (x, update) for inference: x plus the sum of update over the ranks is the result of `forward`.

        Tokens are not checked against the vocabulary size.
        """
        x = None if self.positions is None else self.positions(positions).expand(*tokens.shape, -1)
        return x, Summand(self.tokens.summand(tokens), None, sums)


def rotation_of(positions: Tensor, config: GptConfig) -> Rotation:
    """Cosines and sines of the rotary angles for positions (S,) or (B, S).

    Feature pair i of a head is rotated by position / rope_base ** (2 i / D). If the config has a `rope_scaling`, it
    changes these angles.

    Angles are computed in float32, as in the training of these models, so the angles of large positions are not exact.
    Powers, cosines and sines are computed in float64 and rounded, so that they are the same on all devices.
    """
    angles = positions[..., None].float() * rotary_frequencies(config, positions.device)  # (S, D / 2)
    return angles.double().cos().float(), angles.double().sin().float()


def rotary_frequencies(config: GptConfig, device: torch.device | str = "cpu") -> Tensor:
    """The rotation angle of each feature pair of a head from one position to the next: (D / 2,), float32."""
    powers = torch.arange(0, config.head_features, 2, device=device).double() / config.head_features
    frequencies = 1.0 / config.rope_base**powers
    return (frequencies if config.rope_scaling is None else config.rope_scaling.scaled(frequencies)).float()


def _attention(
    config: GptConfig, layer: int, dropouts: Dropouts, group: Group, sequence_parallel: bool, selective: bool
) -> ParallelSelfAttention:
    name = f"layers.{layer}.attention"
    return ParallelSelfAttention(
        config.width,
        config.heads,
        config.kv_heads,
        head_features=config.head_features,
        bias=config.has_qkv_biases,
        out_bias=config.has_out_bias,
        norms_epsilon=config.epsilon if config.head_norms else None,
        window=config.window_of(layer),
        layer=layer,
        weights_dropout=_dropout(dropouts, config.attention_dropout, f"{name}.weights_dropout"),
        dropout=_dropout(dropouts, config.dropout, f"{name}.dropout"),
        group=group,
        sequence_parallel=sequence_parallel,
        selective=selective,
    )


def _mlp(
    config: GptConfig, layer: int, dropouts: Dropouts, group: Group, sequence_parallel: bool, selective: bool
) -> ParallelMLP:
    return ParallelMLP(
        config.width,
        config.hidden,
        config.activation,
        bias=config.has_mlp_biases,
        dropout=_dropout(dropouts, config.dropout, f"layers.{layer}.mlp.dropout"),
        group=group,
        sequence_parallel=sequence_parallel,
        selective=selective,
    )


class Block(nn.Module):
    """A transformer block: x + attention(norm(x)), then x + mlp(norm(x)). The kernel of the next block's norm computes
    the second sum.

    With `selective`, backward recomputes tensors that are large and cheap (`rooftop.parallel.recomputing`).
    """

    def __init__(
        self,
        config: GptConfig,
        layer: int,
        dropouts: Dropouts = plain_dropouts,
        group: Group = None,
        sequence_parallel: bool = False,
        selective: bool = False,
    ) -> None:
        super().__init__()
        self.selective = selective
        self.attention_norm = _norm(config)
        self.attention = _attention(config, layer, dropouts, group, sequence_parallel, selective)
        self.mlp_norm = _norm(config)
        self.mlp = _mlp(config, layer, dropouts, group, sequence_parallel, selective)

    def forward(
        self, x: Tensor, update: Tensor | None = None, rotation: Rotation | None = None, cache: Remembered | None = None
    ) -> tuple[Tensor, Tensor]:
        """Map (x, update), whose sum is the block's input, to two tensors whose sum is the block's result. All four are
        (B, S, W)."""
        if self.selective:
            return self._selective(x, update, rotation, cache)
        x, normed = summed_and_normed(self.attention_norm, x, update)
        x, normed = summed_and_normed(self.mlp_norm, x, self.attention(normed, rotation, cache))
        return x, self.mlp(normed)

    def with_norm_sums(
        self,
        x: Tensor | None,
        update: Summand,
        rotation: Rotation | None,
        cache: Remembered | None,
        sums: NormSums,
    ) -> tuple[Tensor, Summand]:
        """Run `forward` for inference, but let the kernels of the norms sum over the ranks."""
        x, normed = summed_and_normed(self.attention_norm, x, update)
        x, normed = summed_and_normed(self.mlp_norm, x, self.attention.summand(normed, rotation, cache, sums))
        return x, self.mlp.summand(normed, sums)

    def takes_norm_sums(self) -> bool:
        """Whether `with_norm_sums` has the same result as `forward`: no submodule was replaced, and none has hooks."""
        parts = (
            (self, Block),
            (self.attention, ParallelSelfAttention),
            (self.attention.out, RowParallelLinear),
            (self.mlp, ParallelMLP),
            (self.mlp.down, RowParallelLinear),
        )
        return all(is_plain(part, kind) for part, kind in parts) and takes(self.attention_norm) and takes(self.mlp_norm)

    @_disable_dynamo  # runs eagerly, because in compiled code the compiler chooses what backward recomputes
    def _selective(
        self, x: Tensor, update: Tensor | None, rotation: Rotation | None, cache: Remembered | None
    ) -> tuple[Tensor, Tensor]:
        x, normed = summed_and_normed(self.attention_norm, x, update)
        normed = as_multiplied(normed)
        with _normed_again(self.attention_norm, x, normed):
            update = self.attention(normed, rotation, cache)
        x, normed = summed_and_normed(self.mlp_norm, x, update)
        normed = as_multiplied(normed)
        with _normed_again(self.mlp_norm, x, normed):
            return x, self.mlp(normed)

    def in_phases(
        self, x: Tensor, update: Tensor | None = None, rotation: Rotation | None = None
    ) -> Phases[tuple[Tensor, Tensor]]:
        """Run `forward` in phases, for `rooftop.parallel.turns`."""
        x, normed = summed_and_normed(self.attention_norm, x, update)
        update = yield from self.attention.in_phases(normed, rotation)
        x, normed = summed_and_normed(self.mlp_norm, x, update)
        return x, (yield from self.mlp.in_phases(normed))


def _normed_again(norm: nn.Module, x: Tensor, normed: Tensor) -> AbstractContextManager[None]:
    """Within the block, autograd does not save `normed`, the result of norm(x); backward recomputes it from x."""
    return made_again((normed,), lambda x: (as_multiplied(norm(x)),), x)


class Head(nn.Module):
    """The final norm, and the logits of each token or the loss."""

    def __init__(self, config: GptConfig, group: Group = None, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.norm = _norm(config)
        self.vocabulary, self.group = config.vocabulary, group
        self.output = ColumnParallelLinear(
            config.width,
            config.vocabulary,
            bias=False,
            padded=True,
            group=group,
            sequence_parallel=sequence_parallel,
        )

    def forward(
        self,
        x: Tensor,
        update: Tensor | None = None,
        targets: Tensor | None = None,
        *,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> Tensor:
        """Compute logits (B, S, V), or for targets (B, S) the loss (), from x and update (B, S, W).

        `rooftop.kernels.linear_cross_entropy` describes the options of the loss.
        """
        if targets is None:
            logits = self.own_logits(x, update)
            return logits if self.group is None else join_of_ranks(logits, -1, self.group)[..., : self.vocabulary]
        _, hidden = summed_and_normed(self.norm, x, update)
        return vocab_parallel_linear_cross_entropy(
            self.output.entered(hidden),
            self.output.weight,
            targets,
            self.group,
            vocabulary=self.vocabulary,
            reduction=reduction,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
        )

    def own_logits(self, x: Tensor | None, update: Tensor | Summand | None = None) -> Tensor:
        """Compute the logits (B, S, v) from x and update (B, S, W), for the v tokens that this rank holds.

        The logits of the last ranks may end in padding.
        """
        _, hidden = summed_and_normed(self.norm, x, update)
        logits: Tensor = self.output(hidden)
        return logits
