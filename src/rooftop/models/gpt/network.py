"""A decoder-only transformer, whole or one pipeline stage: GPT-2, GPT-3, Llama, Mistral, Qwen2 or Qwen3.

    model = Gpt(gpt_config("gpt2"))
    loss = model(tokens[:, :-1], tokens[:, 1:])   # the logits are never stored
    logits = model(tokens)                        # (B, S, V)

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"; Touvron et al. 2023, "Llama 2: Open
Foundation and Fine-Tuned Chat Models"; Shoeybi et al. 2019, "Megatron-LM" (the initial values of residual layers).

A sublayer does not add its result to its input. Instead it returns the input, `x`, and the result, `update`. The kernel
of the next norm adds these two tensors, even across blocks. One matrix product computes queries, keys and values, and
one matrix product computes both halves of a SwiGLU; `ColumnParallelLinear.parts` lists the rows of each part of such a
weight.

The layers come from `rooftop.parallel`: tensor parallel ranks split each layer; a single process has whole layers.
`rooftop.models.parallel_gpt` creates a rank's part of a model.

A pipeline stage owns some of the layers, with the same state dict keys as in the whole model. The first stage also has
the embedding (`pre_process`), and the last stage the final norm and the head (`post_process`). A stage passes
x + update, (B, S, W), to the next stage.

A factory creates each dropout module from the module's name in the whole model. With the factory `CounterDropouts`, the
masks do not depend on how the model is split.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import Tensor, nn

from rooftop.errors import WeightsError
from rooftop.launch.symbolic import refuse_proxies
from rooftop.models.gpt.blocks import (
    Block,
    Dropouts,
    Head,
    TokenEmbedding,
    plain_dropouts,
    rotation_of,
)
from rooftop.models.gpt.switches import GptConfig
from rooftop.nn.hooks import is_plain
from rooftop.parallel.contexts import Context, ContextAttention
from rooftop.parallel.dropouts import CounterDropouts
from rooftop.parallel.exchanges import Group, place_in
from rooftop.parallel.norm_sums import NormSums, Summand, takes
from rooftop.parallel.packings import Packing
from rooftop.parallel.recomputing import Recompute, granularity_of, recomputed
from rooftop.parallel.self_attentions import ParallelSelfAttention, Remembered, Rotation
from rooftop.parallel.shards import shards_of
from rooftop.parallel.tensor_linears import ColumnParallelLinear
from rooftop.parallel.turns import Phases, take_turns
from rooftop.parallel.vocab_embeddings import VocabParallelEmbedding

# ---- the cache -----------------------------------------------------------------------------------------------------


class Cache:
    """Cached keys and values of all earlier positions, one pair of tensors per layer; without gradients.

    A layer's memory is allocated when the layer first writes, with the dtype and on the device of its keys.

    Args:
        positions: the maximum number of positions.

    Attributes:
        length: the number of cached positions.

    Raises:
        ValueError: `positions` is below 1.
    """

    def __init__(self, positions: int) -> None:
        if positions < 1:
            raise ValueError(f"Cache: positions must be positive, got {positions}")
        self.positions, self.length = positions, 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def attended(self, attention: ParallelSelfAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend to all positions so far, as in `Remembered`."""
        return attention.attend(query, *self.extended(attention.layer, key, value))

    def extended(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values (B, H, S, D) to a layer's cache; return all so far, as views (B, H, length + S, D).

        Raises:
            ValueError: keys or values require gradients, their batch size or heads differ from the cached ones, or the
                cache is full.
        """
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            raise ValueError("Cache: a cache supports no gradients: call the model under torch.no_grad()")
        end = self.length + key.shape[2]
        if end > self.positions:
            raise ValueError(f"Cache: {end} positions do not fit into {self.positions}: create a larger cache")
        if layer not in self._layers:
            shape = (*key.shape[:2], self.positions, key.shape[3])
            self._layers[layer] = key.new_empty(shape), value.new_empty(shape)
        keys, values = self._layers[layer]
        if keys.shape[:2] != key.shape[:2]:
            expected, got = tuple(keys.shape[:2]), tuple(key.shape[:2])
            raise ValueError(
                f"Cache: expected batch and heads {expected}, got {got}: create a new cache for each batch"
            )
        keys[:, :, self.length : end] = key
        values[:, :, self.length : end] = value
        return keys[:, :, :end], values[:, :, :end]


# ---- the model -----------------------------------------------------------------------------------------------------


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of a model's parameters."""


class Gpt(nn.Module):
    """A decoder-only transformer, or a pipeline stage of one.

    A model on the meta device has no values. `to_empty` unties tied weights, so after `to_empty` call `tie()`, then
    call `initialize()` or load weights.

    Args:
        config: config of the whole model.
        layers: the layers that this stage owns; None: all.
        pre_process: whether this stage owns the embedding, so that its input is tokens.
        post_process: whether this stage owns the final norm and the head and returns logits or a loss.
        dropouts: creates the dropout modules; see `Dropouts`.
        group: tensor parallel ranks that share the layers; None: this process has whole layers. A rank's part must be
            built on the meta device; `parallel_gpt` fills it with values.
        sequence_parallel: whether the ranks of `group` also split the tensors between layers along the sequence. Each
            rank then passes only its part to the next pipeline stage.
        recompute: activations that backward recomputes instead of keeping them (`rooftop.parallel.recomputing`). False:
            none; True or "full": all except the tensors between blocks; "selective": large tensors that are cheap to
            compute.
        halves: compute the two halves of a batch alternately: tensor parallel ranks communicate one half while they
            compute the other (`rooftop.parallel.turns`). Without tensor parallel ranks, or with a cache, the batch is
            computed as a whole. Hooks of a block and of its modules do not run, because blocks run in phases.
        context: the ranks that share sequences (`rooftop.parallel.contexts`); None: this process has whole sequences.
        device, dtype: device and dtype of the parameters; PyTorch's defaults if not given. All parameters are created
            in PyTorch's default dtype, then cast. If the memory is too small for the model in PyTorch's default dtype,
            build the model on the meta device.

    Raises:
        TypeError: `dtype` is not in `DTYPES`.
        ValueError: `layers` are not consecutive layers of the config, the ranks cannot split a size, or a rank's part
            is not on the meta device.
        ValueError: `halves` is combined with `recompute` or with context parallel ranks.
    """

    def __init__(
        self,
        config: GptConfig,
        *,
        layers: range | None = None,
        pre_process: bool = True,
        post_process: bool = True,
        dropouts: Dropouts = plain_dropouts,
        group: Group = None,
        sequence_parallel: bool = False,
        recompute: Recompute = False,
        halves: bool = False,
        context: Context | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        owned = range(config.layers) if layers is None else layers
        if owned.step != 1 or (len(owned) and not 0 <= owned.start < owned.stop <= config.layers):
            raise ValueError(f"Gpt: expected consecutive layers of {range(config.layers)}, got {owned}")
        if group is not None and torch.device(device or torch.get_default_device()).type != "meta":
            raise ValueError(
                "Gpt: build a rank's part of a model with device='meta', or by rooftop.models.parallel_gpt"
            )
        if dtype is not None and dtype not in DTYPES:
            known = ", ".join(map(str, DTYPES))
            raise TypeError(f"Gpt: dtype must be one of {known}, got {dtype!r}")
        granularity = granularity_of(recompute, "Gpt")
        if halves and granularity:
            raise ValueError("Gpt: halves=True cannot be combined with recompute: leave out one of them")
        if halves and context is not None and context.ranks > 1:
            raise ValueError("Gpt: halves=True cannot be combined with context parallel ranks: leave out one of them")
        self.config, self.group, self.recompute = config, group, granularity
        self.halves = halves and group is not None
        self.context = context or Context()
        self.split_along = group if sequence_parallel else None
        self.masks = dropouts if isinstance(dropouts, CounterDropouts) else None
        with torch.device(device) if device is not None else torch.device(torch.get_default_device()):
            self.embedding = TokenEmbedding(config, dropouts, group, sequence_parallel) if pre_process else None
            again = granularity == "selective"
            blocks = {str(layer): Block(config, layer, dropouts, group, sequence_parallel, again) for layer in owned}
            self.layers = nn.ModuleDict(blocks)
            self.head = Head(config, group, sequence_parallel) if post_process else None
        if dtype is not None:
            self.to(dtype)
        self.tie()
        self.register_load_state_dict_pre_hook(_check_tied_head)
        if group is None:
            self.initialize()

    def tie(self) -> None:
        """Tie the head's weight to the embedding's, if the config says so and this stage owns both."""
        if self.config.tied and self.embedding is not None and self.head is not None:
            self.head.output.weight = self.embedding.tokens.weight

    @torch.no_grad()
    def initialize(self, generator: torch.Generator | None = None) -> None:
        """Initialize all parameters by the rules of `initial_values`.

        Args:
            generator: a generator on the device of the parameters; None: PyTorch's own. If tensor parallel ranks share
                the layers, the generators of all these ranks must have the same state: each rank draws one whole
                parameter at a time, and keeps its part.

        Raises:
            ValueError: tensor parallel ranks share the layers, and no generator was passed, so these ranks would draw
                different values.
        """
        if self.group is not None and generator is None:
            raise ValueError(
                "Gpt: this rank holds only a part of the model: let rooftop.models.parallel_gpt initialize it, or pass "
                "a generator that has the same state on all ranks"
            )
        rules, shards = initial_values(self.config), shards_of(self)
        for name, parameter in self.named_parameters():
            if parameter.is_meta:  # it has no values, and PyTorch would import its compiler to draw them
                continue
            mean, deviation = next((mean, std) for pattern, mean, std in rules if fnmatchcase(name, pattern))
            shard = shards.get(name)
            if shard is None and deviation:
                parameter.normal_(mean, deviation, generator=generator)
            elif shard is None or not deviation:
                parameter.fill_(mean)
            else:
                shape = shard.pieces[0].box.shape if shard.pieces else (self.config.vocabulary, parameter.shape[1])
                whole = parameter.new_empty(shape).normal_(mean, deviation, generator=generator)
                parameter.copy_(shard.of(whole))

    def forward(
        self,
        input: Tensor,
        targets: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        packing: Packing | None = None,
        cache: Cache | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        step: int | Tensor = 0,
    ) -> Tensor:
        """Compute logits, a loss, or the input of the next stage.

        Args:
            input: tokens (B, S), int64 or int32. A stage without the embedding takes the previous stage's result, (B,
                S, W).
            targets: the next token of each position, (B, S), int64; -100 for positions to ignore.
            positions: positions of the tokens, (S,) or (B, S), int64; None: consecutive positions after those in the
                cache, or this rank's positions in the packing.
            packing: the documents of the sequences, and the positions of each context parallel rank. The input then
                contains only this rank's tokens. None: each sequence is one document, split as in `Context.packing`.
            cache: keys and values of the earlier positions, to which the new positions also attend. The new keys and
                values are appended to the cache.
            reduction, label_smoothing, z_loss: options of the loss, as in `rooftop.kernels.linear_cross_entropy`.
            step: number of the training step. It determines the masks of `CounterDropouts`; other dropouts ignore it.
                If a step has several micro-batches, give each micro-batch its own number. For a CUDA graph, pass a
                tensor, () int64 on the device: see `rooftop.kernels.counter_dropout`.

        Returns:
            Logits (B, S, V), or with targets the mean or summed loss, (). A stage without the head returns the input of
            the next stage, (B, S, W); sequence parallel ranks return their part of S. Logits and losses are the same on
            all tensor parallel ranks.

        Raises:
            TypeError, ValueError: the input has a wrong shape or dtype, the sequence is longer than the model's
                positions, or a stage without the head gets targets. The errors of `Cache.extended` and
                `linear_cross_entropy` are raised too.
        """
        refuse_proxies(self, input)
        self._check(input, targets, positions, cache, packing)
        if packing is None and self.context.ranks > 1:
            packing = self.context.packing(self._length(input) * self.context.ranks)
        chunks = None if packing is None else packing.held[self.context.index]
        if positions is None:
            start = cache.length if cache is not None else 0
            positions = torch.arange(start, start + self._length(input), device=input.device)
            if chunks is not None:
                positions = chunks.positions(input.device)
        if self.masks is not None:
            self.masks.place = replace(self.masks.place, step=step, chunks=chunks)
        x, update = self.through_layers(input, positions, cache, packing)
        if cache is not None:
            cache.length += input.shape[1]
        if self.head is not None:
            options = {"label_smoothing": label_smoothing, "z_loss": z_loss}
            return self.head(x, update, targets, reduction=reduction, **options)
        return x if update is None else x + update

    def through_layers(
        self,
        input: Tensor,
        positions: Tensor,
        cache: Remembered | None = None,
        packing: Packing | None = None,
        rotation: Rotation | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the head's input, (x, update), (B, S, W) each; update is None if there are no layers.

        Arguments are the same as for `forward`, but they are not checked.

        Args:
            rotation: `rotation_of(positions, config)`; None: this method computes the rotation.

        Raises:
            ValueError: a cache is combined with sequence parallelism.
        """
        if cache is not None and self.split_along is not None:
            raise ValueError("Gpt: a cache cannot be used with sequence_parallel: build the model without it")
        x = input if self.embedding is None else self.embedding(input, positions)
        update: Tensor | None = None
        if rotation is None and self.config.position == "rope":
            rotation = rotation_of(positions, self.config)
        if self.halves and cache is None and len(self.layers):
            return self._in_turns(x, rotation)
        others = cache if packing is None else ContextAttention(self.context, packing)
        for block in self.layers.values():
            if self.recompute == "full" and cache is None and torch.is_grad_enabled():
                x, update = recomputed(partial(_through, block, rotation, others), self.masks, x, update)
            else:
                x, update = block(x, update, rotation, others)
        return x, update

    def with_norm_sums(
        self, tokens: Tensor, positions: Tensor, cache: Remembered, rotation: Rotation | None, sums: NormSums
    ) -> tuple[Tensor | None, Summand]:
        """Compute `through_layers` for inference on tensor parallel ranks; arguments are not checked.

        One kernel computes each sum over the ranks and the norm after it. The returned x is None if there are no layers
        and no learned positions.
        """
        assert self.embedding is not None
        x, update = self.embedding.summand(tokens, positions, sums)
        for block in self.layers.values():
            assert isinstance(block, Block)
            x, update = block.with_norm_sums(x, update, rotation, cache, sums)
        return x, update

    def takes_norm_sums(self) -> bool:
        """Whether `with_norm_sums` and `through_layers` have the same result.

        The results are the same if no submodule was replaced and no submodule has hooks.
        """
        if self.embedding is None or self.head is None:
            return False
        return (
            is_plain(self.embedding, TokenEmbedding)
            and is_plain(self.embedding.tokens, VocabParallelEmbedding)
            and all(isinstance(block, Block) and block.takes_norm_sums() for block in self.layers.values())
            and takes(self.head.norm)
        )

    def _in_turns(self, x: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor]:
        """Run the layers on the two halves of the batch alternately."""
        cosines = [None, None] if rotation is None else _halves_of(rotation)
        halves = [self._half(part, turned) for part, turned in zip(x.chunk(2), cosines, strict=True)]
        turn_of = self.masks.in_half if self.masks is not None else (lambda place: nullcontext())
        parts, updates = zip(*take_turns(halves, turn_of), strict=True)
        return torch.cat(parts), torch.cat(updates)

    def _half(self, x: Tensor, rotation: Rotation | None) -> Phases[tuple[Tensor, Tensor]]:
        update: Tensor | None = None
        for block in self.layers.values():
            assert isinstance(block, Block)
            x, update = yield from block.in_phases(x, update, rotation)
        assert update is not None
        return x, update

    def _length(self, input: Tensor) -> int:
        """The number of positions on this context parallel rank.

        If sequence parallel ranks divide these positions, the input of a later stage has only one rank's part.
        """
        return input.shape[1] * (1 if self.embedding is not None else place_in(self.split_along)[1])

    def _check(
        self,
        input: Tensor,
        targets: Tensor | None,
        positions: Tensor | None,
        cache: Cache | None,
        packing: Packing | None,
    ) -> None:
        first, width = self.embedding is not None, self.config.width
        expected = "tokens (B, S)" if first else f"the output of the previous stage, (B, S, {width})"
        if not isinstance(input, Tensor):
            raise TypeError(f"Gpt: expected {expected}, got {type(input).__name__}")
        given = tuple(input.shape)
        if len(given) != (2 if first else 3) or given[2:] not in ((), (width,)):
            raise ValueError(f"Gpt: expected {expected}, got {given}")
        if first and input.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"Gpt: tokens must be int64 or int32, got {input.dtype}")
        if targets is not None and self.head is None:
            raise ValueError("Gpt: a stage without the head computes no loss: give targets to the last stage")
        length, ranks = self._length(input), place_in(self.split_along)[1]
        if cache is not None and (packing is not None or self.context.ranks > 1):
            raise ValueError(
                "Gpt: with a cache, each sequence must be one whole document: leave out the packing and the context"
            )
        if packing is not None:
            self._check_packing(packing, given[0], length)
        if positions is not None and tuple(positions.shape) not in ((length,), (given[0], length)):
            raise ValueError(
                f"Gpt: expected positions {(length,)} or {(given[0], length)}, got {tuple(positions.shape)}"
            )
        if length % ranks:
            raise ValueError(
                f"Gpt: {length} positions cannot be split among {ranks} ranks: with sequence_parallel, pad the "
                "sequence to a multiple of the ranks"
            )
        if self.halves and cache is None and given[0] % 2:
            raise ValueError(
                f"Gpt: a batch of {given[0]} cannot be halved: with halves=True give an even number of sequences, or "
                "build the model without halves"
            )
        end = length * self.context.ranks + (cache.length if cache is not None else 0)
        if positions is None and end > self.config.positions:
            raise ValueError(
                f"Gpt: a sequence needs {end} positions, but the model has {self.config.positions}: shorten it, or "
                "build the model with more positions"
            )

    def _check_packing(self, packing: Packing, batch: int, length: int) -> None:
        ranks, index = self.context.ranks, self.context.index
        if len(packing.held) != ranks or len(packing.held[index]) != length:
            here = len(packing.held[index]) if index < len(packing.held) else 0
            raise ValueError(
                f"Gpt: the packing is for {len(packing.held)} ranks and gives this rank {here} positions, but the "
                f"model has {ranks} context parallel ranks and its input has {length} positions"
            )
        if packing.documents is not None and len(packing.documents.spans) != batch:
            raise ValueError(
                f"Gpt: the packing has {len(packing.documents.spans)} sequences, but the batch has {batch}"
            )
        if self.halves:
            raise ValueError("Gpt: halves=True does not take packed sequences: build the model without halves")


def _through(
    block: nn.Module, rotation: Rotation | None, others: Remembered | None, x: Tensor, update: Tensor | None
) -> tuple[Tensor, Tensor]:
    return block(x, update, rotation, others)  # type: ignore[no-any-return]


def _check_tied_head(model: nn.Module, state_dict: Mapping[str, Tensor], prefix: str, *_: object) -> None:
    """Raise WeightsError, before any tensor is loaded, if a state dict has two different values for a tied weight."""
    assert isinstance(model, Gpt)
    both = [state_dict.get(f"{prefix}{name}.weight") for name in ("embedding.tokens", "head.output")]
    if model.head is None or model.embedding is None or model.head.output.weight is not model.embedding.tokens.weight:
        return
    embedding, head = both
    if embedding is None or head is None or embedding is head or embedding.is_meta or head.is_meta:
        return
    if not torch.equal(embedding, head):
        raise WeightsError(
            f"in the state dict, {prefix}head.output.weight differs from {prefix}embedding.tokens.weight, but the "
            "model ties them: build it with tied=False (dataclasses.replace(config, tied=False))"
        )


def _halves_of(rotation: Rotation) -> list[Rotation]:
    """Split the rotation for the two halves of a batch; with positions (S,), both halves use the same rotation."""
    if rotation[0].dim() == 2:
        return [rotation, rotation]
    (cosines, others), (sines, other_sines) = (each.chunk(2) for each in rotation)
    return [(cosines, sines), (others, other_sines)]


def initial_values(config: GptConfig) -> tuple[tuple[str, float, float], ...]:
    """The initialization rules of the parameters: (pattern of names in the whole model, mean, standard deviation).

    Patterns are shell patterns, and the first match counts. The standard deviation is 0.02 for matrices and embeddings.
    For matrices whose results are added to the residual, the standard deviation is 0.02 / sqrt(2 L), so that the
    variance of the residual does not grow with the number of layers.
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
    """Map the name of each packed parameter to {part: number of rows}, in order."""
    return {
        f"{name}.{parameter}": module.parts
        for name, module in model.named_modules()
        if isinstance(module, ColumnParallelLinear) and len(module.parts) > 1
        for parameter, _ in module.named_parameters()
    }


# ---- generation ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def continue_greedily(model: Gpt, tokens: Tensor, count: int) -> Tensor:
    """Append the most probable token repeatedly, with a cache.

    Args:
        model: a whole model, in eval mode.
        tokens: (B, S), int64, S at least 1.
        count: number of tokens to append.

    Returns:
        (B, S + count).

    Raises:
        ValueError: the model is a pipeline stage or in training mode, there are no tokens, the count is negative, or
            the result is longer than the model's positions.
    """
    if model.embedding is None or model.head is None or len(model.layers) != model.config.layers:
        raise ValueError("continue_greedily: expected a whole model, got a pipeline stage")
    if model.training:
        raise ValueError("continue_greedily: the model is in training mode: call model.eval()")
    if tokens.dim() != 2 or tokens.shape[1] == 0 or count < 0:
        raise ValueError(
            "continue_greedily: expected tokens (B, S) with S of at least 1, and a count of at least 0, got "
            f"{tuple(tokens.shape)} and {count}"
        )
    end = tokens.shape[1] + count
    if end > model.config.positions:
        raise ValueError(
            f"continue_greedily: prompt and new tokens take {end} positions, but the model has {model.config.positions}"
        )
    cache, step = Cache(end), tokens
    for _ in range(count):
        positions = torch.arange(cache.length, cache.length + step.shape[1], device=tokens.device)
        x, update = model.through_layers(step, positions, cache)
        cache.length += step.shape[1]
        last = model.head(x[:, -1:], update[:, -1:] if update is not None else None)  # (B, 1, V)
        step = last.argmax(-1)
        tokens = torch.cat((tokens, step), 1)
    return tokens
