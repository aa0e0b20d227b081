"""A decoder-only transformer, whole or a stage of it: GPT-2 and GPT-3, Llama, by the switches of a `GptConfig`.

    model = Gpt(gpt_config("gpt2"))
    loss = model(tokens[:, :-1], tokens[:, 1:])   # the logits are never stored
    logits = model(tokens)                        # (B, S, V)

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"; Touvron et al. 2023, "Llama 2: Open
Foundation and Fine-Tuned Chat Models"; Shoeybi et al. 2019, "Megatron-LM" (the initial values of residual layers).

A sublayer does not add its result to what it was given: it hands on both, `x` and `update`, and the norm that follows
takes their sum in its own kernel, also across blocks. Queries, keys and values are one matrix product, and so are a
SwiGLU's gate and what it lets through; `PackedLinear.parts` says which rows of such a weight are whose.

A stage owns some of the layers, under the keys that they have in the whole model; the first one also the embedding
(`pre_process`), the last one the final norm and the head (`post_process`). Between stages goes the sum (B, S, W).

Dropout is made by a factory, which is told the name of its place in the whole model: pass another for masks that do not
depend on how a model is split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from rooftop.kernels import attention, linear_cross_entropy, rope_pair, swiglu
from rooftop.models.gpt_configs import GptConfig
from rooftop.nn import Embedding, LayerNorm, LinearAct, RMSNorm
from rooftop.nn.norms import norm_of_sum

Dropouts = Callable[[float, str], nn.Module]
"""Makes the dropout of a place: its probability, more than 0, and its name, e.g. "layers.3.mlp.dropout"."""

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of the positions' angles, each (S, D / 2) or (B, S, D / 2)."""


def plain_dropouts(probability: float, name: str) -> nn.Module:
    """PyTorch's dropout, whatever the place."""
    return nn.Dropout(probability)


def _dropout(make: Dropouts, probability: float, name: str) -> nn.Module | None:
    return make(probability, name) if probability else None


def _dropped(dropout: nn.Module | None, x: Tensor) -> Tensor:
    return x if dropout is None else dropout(x)


# ---- the cache -----------------------------------------------------------------------------------------------------


class Cache:
    """Keys and values of the positions so far, each layer's in one tensor; without gradients.

    Memory is taken when a layer first writes, in the dtype and on the device of its keys.

    Args:
        positions: the most that it can hold.

    Attributes:
        length: positions that it holds.

    Raises:
        ValueError: no room for one position.
    """

    def __init__(self, positions: int) -> None:
        if positions < 1:
            raise ValueError(f"Cache: positions must be positive, got {positions}")
        self.positions, self.length = positions, 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def extended(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values (B, H, S, D) behind those of a layer; (B, H, length + S, D) of all, views.

        Raises:
            ValueError: autograd watches them, they are of another batch than the first ones, or there is no room.
        """
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            raise ValueError("Cache: keys and values are kept without gradients: call the model under torch.no_grad()")
        end = self.length + key.shape[2]
        if end > self.positions:
            raise ValueError(f"Cache: {end} positions do not fit into {self.positions}: make it larger")
        if layer not in self._layers:
            shape = (*key.shape[:2], self.positions, key.shape[3])
            self._layers[layer] = key.new_empty(shape), value.new_empty(shape)
        keys, values = self._layers[layer]
        if keys.shape[:2] != key.shape[:2]:
            expected, got = tuple(keys.shape[:2]), tuple(key.shape[:2])
            raise ValueError(f"Cache: it is of batch and heads {expected}, got {got}: make one for each batch")
        keys[:, :, self.length : end] = key
        values[:, :, self.length : end] = value
        return keys[:, :, :end], values[:, :, :end]


# ---- pieces --------------------------------------------------------------------------------------------------------


class PackedLinear(LinearAct):
    """Linear layers of one input as one product.

    Args:
        in_features: of the input.
        parts: name -> features, in the order in which they lie in the result and in the rows of the weight.
        bias: whether each has one.
    """

    def __init__(self, in_features: int, parts: Mapping[str, int], bias: bool = True) -> None:
        super().__init__(in_features, sum(parts.values()), bias)
        self.parts = dict(parts)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, parts={self.parts}"


def _norm(config: GptConfig) -> nn.Module:
    if config.norm == "rms":
        return RMSNorm(config.width, eps=config.epsilon)
    return LayerNorm(config.width, eps=config.epsilon, bias=config.biases)


def summed_and_normed(norm: nn.Module, x: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor]:
    """(x + update, norm(x + update)); without an update (x, norm(x))."""
    if update is None:
        return x, norm(x)
    normed, total = norm_of_sum(norm, update, x)
    return total, normed


class TokenEmbedding(nn.Module):
    """A vector for each token, and where positions are learned one for each position."""

    def __init__(self, config: GptConfig, dropouts: Dropouts = plain_dropouts) -> None:
        super().__init__()
        self.tokens = Embedding(config.vocabulary, config.width)
        self.positions = Embedding(config.positions, config.width) if config.position == "learned" else None
        self.dropout = _dropout(dropouts, config.dropout, "embedding.dropout")

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """tokens (B, S), positions (S,) or (B, S), int64; (B, S, W)."""
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions(positions)
        return _dropped(self.dropout, x)


def rotation_of(positions: Tensor, config: GptConfig) -> Rotation:
    """Of positions (S,) or (B, S): each pair of a head's features turns by position / rope_base ** (2 i / D).

    In float32, as in the models that were trained so: at a large position the angles are not exact.
    """
    powers = torch.arange(0, config.head_features, 2, device=positions.device).float() / config.head_features
    angles = positions[..., None].float() * (1.0 / config.rope_base**powers)  # (S, D / 2)
    return angles.cos(), angles.sin()


class SelfAttention(nn.Module):
    """Causal attention of a sequence to itself, and to what a cache holds: (B, S, W) -> (B, S, W).

    Args:
        config: of the model.
        layer: its number in the whole model.
        dropouts: see `Dropouts`.
    """

    def __init__(self, config: GptConfig, layer: int, dropouts: Dropouts = plain_dropouts) -> None:
        super().__init__()
        self.layer, self.head_features = layer, config.head_features
        parts = {"query": config.width, "key": config.kv_width, "value": config.kv_width}
        self.qkv = PackedLinear(config.width, parts, config.biases)
        self.out = LinearAct(config.width, config.width, config.biases)
        name = f"layers.{layer}.attention"
        self.weights_dropout = _dropout(dropouts, config.attention_dropout, f"{name}.weights_dropout")
        self.dropout = _dropout(dropouts, config.dropout, f"{name}.dropout")

    def forward(self, x: Tensor, rotation: Rotation | None = None, cache: Cache | None = None) -> Tensor:
        """x (B, S, W); rotation: of queries and keys, if their positions turn them."""
        parts = self.qkv(x).split(list(self.qkv.parts.values()), -1)
        # (B, H, S, D), and of fewer heads if these are in groups
        query, key, value = (part.unflatten(-1, (-1, self.head_features)).transpose(1, 2) for part in parts)
        if rotation is not None:
            query, key = rope_pair(query, key, *rotation)
        if cache is not None:
            key, value = cache.extended(self.layer, key, value)
        seen = self.attend(query, key, value).transpose(1, 2).flatten(2)  # (B, S, W)
        return _dropped(self.dropout, self.out(seen))

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Queries (B, H, S, D), the last of the positions of keys and values (B, H_k, T, D); (B, H, S, D)."""
        if self.weights_dropout is not None and self.training:
            return self._attend_with_dropout(query, key, value, self.weights_dropout)
        queries, keys = query.shape[2], key.shape[2]
        if queries == keys:
            return attention(query, key, value, is_causal=True, enable_gqa=True)
        mask = None if queries == 1 else _seen(queries, keys, query.device)
        return attention(query, key, value, attn_mask=mask, enable_gqa=True)

    @staticmethod
    def _attend_with_dropout(query: Tensor, key: Tensor, value: Tensor, dropout: nn.Module) -> Tensor:
        """In plain PyTorch: the weights (B, H, S, T) are there as a tensor."""
        groups = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(groups, 1) if groups > 1 else t for t in (key, value))
        scores = query @ key.mT * query.shape[3] ** -0.5
        scores = scores.masked_fill(~_seen(query.shape[2], key.shape[2], query.device), -math.inf)
        weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        return dropout(weights).to(value.dtype) @ value


def _seen(queries: int, keys: int, device: torch.device) -> Tensor:
    """(queries, keys): True for the keys up to a query's own; the queries are the last of the positions."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


class Mlp(nn.Module):
    """Two linear layers and the activation between them: (B, S, W) -> (B, S, W)."""

    def __init__(self, config: GptConfig, layer: int, dropouts: Dropouts = plain_dropouts) -> None:
        super().__init__()
        self.gated = config.activation == "swiglu"
        if config.activation == "swiglu":
            parts = {"gate": config.hidden, "up": config.hidden}
            self.up: LinearAct = PackedLinear(config.width, parts, config.biases)
        else:
            self.up = LinearAct(config.width, config.hidden, config.biases, config.activation)
        self.down = LinearAct(config.hidden, config.width, config.biases)
        self.dropout = _dropout(dropouts, config.dropout, f"layers.{layer}.mlp.dropout")

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        return _dropped(self.dropout, self.down(swiglu(hidden) if self.gated else hidden))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); the last sum is left to the norm that follows."""

    def __init__(self, config: GptConfig, layer: int, dropouts: Dropouts = plain_dropouts) -> None:
        super().__init__()
        self.attention_norm = _norm(config)
        self.attention = SelfAttention(config, layer, dropouts)
        self.mlp_norm = _norm(config)
        self.mlp = Mlp(config, layer, dropouts)

    def forward(
        self, x: Tensor, update: Tensor | None = None, rotation: Rotation | None = None, cache: Cache | None = None
    ) -> tuple[Tensor, Tensor]:
        """x and update (B, S, W), whose sum is the input; two such, whose sum is the result."""
        x, normed = summed_and_normed(self.attention_norm, x, update)
        x, normed = summed_and_normed(self.mlp_norm, x, self.attention(normed, rotation, cache))
        return x, self.mlp(normed)


class Head(nn.Module):
    """The final norm, and the logits of each token or their loss."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.norm = _norm(config)
        self.output = LinearAct(config.width, config.vocabulary, bias=False)

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
        """x and update (B, S, W); logits (B, S, V), or of targets (B, S) the loss (), whose options are those of
        `rooftop.kernels.linear_cross_entropy`."""
        _, hidden = summed_and_normed(self.norm, x, update)
        if targets is None:
            return self.output(hidden)
        return linear_cross_entropy(
            hidden,
            self.output.weight,
            targets,
            reduction=reduction,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
        )


# ---- the model -----------------------------------------------------------------------------------------------------


class Gpt(nn.Module):
    """A decoder, or a stage of one.

    On the meta device nothing has values, and `to_empty` unties what is tied: call `tie()` after it, and then
    `initialize()` or load weights.

    Args:
        config: of the whole model.
        layers: which of its layers this stage owns; None: all.
        pre_process: whether it owns the embedding, and takes tokens.
        post_process: whether it owns the final norm and the head, and gives logits or a loss.
        dropouts: makes the modules that drop; see `Dropouts`.
        device, dtype: of the parameters; PyTorch's defaults if not given. They are cast once all are there: a model
            that fits only in a narrow dtype is built on the meta device.

    Raises:
        ValueError: layers that the model does not have, or not in order.
    """

    def __init__(
        self,
        config: GptConfig,
        *,
        layers: range | None = None,
        pre_process: bool = True,
        post_process: bool = True,
        dropouts: Dropouts = plain_dropouts,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        owned = range(config.layers) if layers is None else layers
        if owned.step != 1 or (len(owned) and not 0 <= owned.start < owned.stop <= config.layers):
            raise ValueError(f"Gpt: expected some of the layers {range(config.layers)}, one after another, got {owned}")
        self.config = config
        with torch.device(device) if device is not None else torch.device(torch.get_default_device()):
            self.embedding = TokenEmbedding(config, dropouts) if pre_process else None
            self.layers = nn.ModuleDict({str(layer): Block(config, layer, dropouts) for layer in owned})
            self.head = Head(config) if post_process else None
        if dtype is not None:
            self.to(dtype)
        self.tie()
        self.initialize()

    def tie(self) -> None:
        """Make the head's weight the embedding's, where the config says so and this stage owns both."""
        if self.config.tied and self.embedding is not None and self.head is not None:
            self.head.output.weight = self.embedding.tokens.weight

    @torch.no_grad()
    def initialize(self, generator: torch.Generator | None = None) -> None:
        """Give all parameters new values, by the rules of `initial_values`."""
        rules = initial_values(self.config)
        for name, parameter in self.named_parameters():
            mean, deviation = next((mean, std) for pattern, mean, std in rules if fnmatchcase(name, pattern))
            if deviation:
                parameter.normal_(mean, deviation, generator=generator)
            else:
                parameter.fill_(mean)

    def forward(
        self,
        input: Tensor,
        targets: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        cache: Cache | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> Tensor:
        """Logits, a loss, or what the next stage takes.

        Args:
            input: tokens (B, S), int64 or int32; without the embedding what the stage before gave, (B, S, W).
            targets: the token that follows each, (B, S), int64; -100 where there is none to learn.
            positions: of the tokens, (S,) or (B, S), int64; None: one after another, behind those of the cache.
            cache: the positions before, which are seen too; these are added.
            reduction, label_smoothing, z_loss: of the loss, as of `rooftop.kernels.linear_cross_entropy`.

        Returns:
            (B, S, V); with targets (), their mean or sum; without the head (B, S, W).

        Raises:
            TypeError, ValueError: an input of another shape or dtype, more positions than the model has, targets for a
                stage without the head; and what `Cache` and `linear_cross_entropy` refuse.
        """
        self._check(input, targets, positions, cache)
        if positions is None:
            start = cache.length if cache is not None else 0
            positions = torch.arange(start, start + input.shape[1], device=input.device)
        x, update = self._through_layers(input, positions, cache)
        if self.head is not None:
            options = {"label_smoothing": label_smoothing, "z_loss": z_loss}
            return self.head(x, update, targets, reduction=reduction, **options)
        return x if update is None else x + update

    def _through_layers(
        self, input: Tensor, positions: Tensor, cache: Cache | None
    ) -> tuple[Tensor, Tensor | None]:  # (B, S, W) both
        x = input if self.embedding is None else self.embedding(input, positions)
        update: Tensor | None = None
        rotation = rotation_of(positions, self.config) if self.config.position == "rope" else None
        for block in self.layers.values():
            x, update = block(x, update, rotation, cache)
        if cache is not None:
            cache.length += input.shape[1]
        return x, update

    def _check(self, input: Tensor, targets: Tensor | None, positions: Tensor | None, cache: Cache | None) -> None:
        first, width = self.embedding is not None, self.config.width
        expected = "tokens (B, S)" if first else f"what the stage before gave, (B, S, {width})"
        if not isinstance(input, Tensor):
            raise TypeError(f"Gpt: expected {expected}, got {type(input).__name__}")
        given = tuple(input.shape)
        if len(given) != (2 if first else 3) or given[2:] not in ((), (width,)):
            raise ValueError(f"Gpt: expected {expected}, got {given}")
        if first and input.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"Gpt: tokens must be int64 or int32, got {input.dtype}")
        if targets is not None and self.head is None:
            raise ValueError("Gpt: a stage without the head gives no loss: targets belong to the last stage")
        if positions is not None and tuple(positions.shape) not in (given[1:2], given[:2]):
            raise ValueError(f"Gpt: expected positions {given[1:2]} or {given[:2]}, got {tuple(positions.shape)}")
        end = given[1] + (cache.length if cache is not None else 0)
        if positions is None and end > self.config.positions:
            raise ValueError(
                f"Gpt: {end} positions, the model has {self.config.positions}: shorten the sequence, or build the "
                "model with more"
            )


def initial_values(config: GptConfig) -> tuple[tuple[str, float, float], ...]:
    """What parameters begin with, as rules: (pattern of names in the whole model, mean, standard deviation).

    The first pattern that matches counts, as of a shell. 0.02 for matrices and embeddings; less by sqrt(2 L) for those
    whose results are added to the residual, so that its variance does not grow with the number of layers.
    """
    residual = 0.02 / math.sqrt(2 * config.layers)
    return (
        ("*.bias", 0.0, 0.0),
        ("*norm.weight", 1.0, 0.0),
        ("*.attention.out.weight", 0.0, residual),
        ("*.mlp.down.weight", 0.0, residual),
        ("*", 0.0, 0.02),
    )


def parts_of(model: nn.Module) -> dict[str, dict[str, int]]:
    """Of each parameter that packs several, by its name: part -> rows, in their order."""
    return {
        f"{name}.{parameter}": module.parts
        for name, module in model.named_modules()
        if isinstance(module, PackedLinear)
        for parameter, _ in module.named_parameters()
    }


# ---- generation ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def continue_greedily(model: Gpt, tokens: Tensor, count: int) -> Tensor:
    """Append the most probable token, again and again, with a cache.

    Args:
        model: a whole one, in eval mode.
        tokens: (B, S), int64, S at least 1.
        count: tokens to append.

    Returns:
        (B, S + count).

    Raises:
        ValueError: a stage, a model in training mode, no tokens, a negative count, or more positions than the model
            has.
    """
    if model.embedding is None or model.head is None or len(model.layers) != model.config.layers:
        raise ValueError("continue_greedily: expected a whole model, got a stage")
    if model.training:
        raise ValueError("continue_greedily: the model is in training mode: call model.eval()")
    if tokens.dim() != 2 or tokens.shape[1] == 0 or count < 0:
        raise ValueError(f"continue_greedily: expected tokens (B, S) and a count, got {tuple(tokens.shape)}, {count}")
    end = tokens.shape[1] + count
    if end > model.config.positions:
        raise ValueError(f"continue_greedily: {end} positions, the model has {model.config.positions}")
    cache, step = Cache(end), tokens
    for _ in range(count):
        positions = torch.arange(cache.length, cache.length + step.shape[1], device=tokens.device)
        x, update = model._through_layers(step, positions, cache)
        last = model.head(x[:, -1:], update[:, -1:] if update is not None else None)  # (B, 1, V)
        step = last.argmax(-1)
        tokens = torch.cat((tokens, step), 1)
    return tokens
