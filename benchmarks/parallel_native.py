"""The peer for `benchmarks/parallel.py`: the same Llama in plain torch.nn, split by PyTorch's fastest methods.

Tensor parallel ranks use DTensor with sequence parallelism, and compute the loss on their parts of the vocabulary
(`loss_parallel`). Data ranks use FSDP2. Each block is compiled separately. The loss is compiled if there are no tensor
parallel ranks. The model starts from the weights of Rooftop's model with the same seed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

from rooftop.kernels import Box
from rooftop.models.gpt.blocks import rotation_of
from rooftop.models.gpt.configs import GptConfig
from rooftop.models.gpt.network import initial_values
from rooftop.parallel import Stream

BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Back ends of attention, in order of speed on Hopper."""

# ---- the model -----------------------------------------------------------------------------------------------------


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D / 2) of x (B, S, H, D); cos and sin are (S, D / 2) in float32."""
    a, b = x.float().chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).type_as(x)


class Attention(nn.Module):
    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.features = config.head_features
        self.wq = nn.Linear(config.width, config.width, bias=False)
        self.wk = nn.Linear(config.width, config.kv_width, bias=False)
        self.wv = nn.Linear(config.width, config.kv_width, bias=False)
        self.wo = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Run attention on x (B, S, W). The result has the same shape."""
        query, key, value = (layer(x).unflatten(-1, (-1, self.features)) for layer in (self.wq, self.wk, self.wv))
        query, key = rotated(query, cos, sin), rotated(key, cos, sin)
        with sdpa_kernel(BACKENDS, set_priority=True):
            seen = scaled_dot_product_attention(
                query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True, enable_gqa=True
            )
        out: Tensor = self.wo(seen.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.width, config.hidden, bias=False)
        self.w2 = nn.Linear(config.hidden, config.width, bias=False)
        self.w3 = nn.Linear(config.width, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(silu(self.w1(x)) * self.w3(x))
        return out


class LlamaBlock(nn.Module):
    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, config.epsilon)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.width, config.epsilon)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleDict({str(layer): LlamaBlock(config) for layer in range(config.layers)})
        self.norm = nn.RMSNorm(config.width, config.epsilon)
        self.output = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Compute the logits (B, S, V) of tokens (B, S). With tensor parallel ranks, they are a DTensor, split along
        V."""
        x = self.tok_embeddings(tokens)
        # given an AsyncCollectiveTensor, a compiled block would compute a gradient that DTensor does not accept
        if isinstance(x, AsyncCollectiveTensor):
            x = x.clone()
        for block in self.layers.values():
            x = block(x, cos, sin)
        logits: Tensor = self.output(self.norm(x))
        return logits


# ---- split, and with weights ---------------------------------------------------------------------------------------

EDGES = {
    "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
}


def block_plan() -> dict[str, Any]:
    """The plan by which tensor parallel ranks split a block. Between layers, the ranks split the sequence."""
    return {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward.w3": ColwiseParallel(),
    }


def named_as_ours(config: GptConfig) -> dict[str, tuple[str, Box]]:
    """Map the end of a parameter's name here to the name of Rooftop's parameter and the part of it."""
    width, kv, hidden = config.width, config.kv_width, config.hidden
    packed = {
        "attention.wq": ("attention.qkv", width + 2 * kv, 0, width),
        "attention.wk": ("attention.qkv", width + 2 * kv, width, kv),
        "attention.wv": ("attention.qkv", width + 2 * kv, width + kv, kv),
        "feed_forward.w1": ("mlp.up", 2 * hidden, 0, hidden),
        "feed_forward.w3": ("mlp.up", 2 * hidden, hidden, hidden),
    }
    found = {
        name: (theirs, Box((rows, width), (start, 0), (count, width)))
        for name, (theirs, rows, start, count) in packed.items()
    }
    return {
        **found,
        "attention.wo": ("attention.out", Box.whole((width, width))),
        "feed_forward.w2": ("mlp.down", Box.whole((width, hidden))),
        "attention_norm": ("attention_norm", Box.whole((width,))),
        "ffn_norm": ("mlp_norm", Box.whole((width,))),
        "tok_embeddings": ("embedding.tokens", Box.whole((config.vocabulary, width))),
        "output": ("head.output", Box.whole((config.vocabulary, width))),
        "norm": ("head.norm", Box.whole((width,))),
    }


@torch.no_grad()
def fill(model: Llama, config: GptConfig, seed: int, device: torch.device) -> None:
    """Load the weights of Rooftop's model, one whole parameter at a time. A rank keeps only its part."""
    known, rules, stream = named_as_ours(config), initial_values(config), Stream(seed)
    for name, parameter in model.named_parameters():
        place, _, end = name.removesuffix(".weight").rpartition(".")
        prefix, key = "", end
        if place.startswith("layers."):
            _, layer, *rest = name.removesuffix(".weight").split(".")
            prefix, key = f"layers.{layer}.", ".".join(rest)
        ours, box = known[key]
        full = f"{prefix}{ours}.weight"
        mean, deviation = next((mean, std) for pattern, mean, std in rules if fnmatchcase(full, pattern))
        whole = torch.full(box.size, mean, dtype=torch.float32, device=device)
        if deviation:
            stream.normal_(whole, full, box, mean, deviation)
        if isinstance(parameter, DTensor):
            (placement,) = parameter.placements
            if isinstance(placement, Shard):
                mesh = parameter.device_mesh
                whole = whole.chunk(mesh.size(), placement.dim)[mesh.get_local_rank()]
            parameter.to_local().copy_(whole)
        else:
            parameter.copy_(whole)


class WideWeights:
    """float32 copies of a bfloat16 model's weights, for the optimizer. A DTensor's copy is this rank's part."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.wide = [nn.Parameter(local_of(p).detach().clone()) for p in model.parameters()]
        model.to(dtype)
        self.narrow = list(model.parameters())

    @torch.no_grad()
    def take_gradients(self) -> None:
        for wide, parameter in zip(self.wide, self.narrow, strict=True):
            gradient = parameter.grad
            assert gradient is not None
            if isinstance(gradient, DTensor):  # a norm's gradient still has to be summed over the ranks
                assert isinstance(parameter, DTensor)
                gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
            wide.grad = local_of(gradient).to(wide.dtype)
            parameter.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        torch._foreach_copy_([local_of(parameter) for parameter in self.narrow], [*self.wide])


def local_of(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Native:
    """A rank's part of PyTorch's training. `step` makes a step and returns its loss, () on the device.

    Args:
        mesh: the device mesh, with dimensions "dp" and "tp".
        dtype: dtype of the computation. Weights, sums of gradients over ranks, and the optimizer are float32.
        backend: back end of torch.compile.
        async_tensor_parallel: whether matrix products are split, so that they overlap with communication.
        whole: whether forward and loss are compiled as one, with CUDA graphs, instead of each block.
        shared: whether data ranks share the model (FSDP2); False: DistributedDataParallel sums bfloat16 gradients.
    """

    def __init__(
        self,
        config: GptConfig,
        mesh: DeviceMesh,
        *,
        seed: int,
        device: torch.device,
        dtype: torch.dtype,
        length: int,
        backend: str,
        learning_rate: float,
        async_tensor_parallel: bool = False,
        whole: bool = False,
        shared: bool = False,
    ) -> None:
        self.tensor = mesh["tp"].size() > 1
        with torch.device("meta"):
            model = Llama(config)
        if self.tensor:
            parallelize_module(model, mesh["tp"], EDGES)
            for block in model.layers.values():
                parallelize_module(block, mesh["tp"], block_plan())
        model.to_empty(device=device)
        fill(model, config, seed, device)
        if async_tensor_parallel:
            from torch.distributed._symmetric_memory import enable_symm_mem_for_group

            torch._inductor.config._micro_pipeline_tp = True
            with warnings.catch_warnings():  # newer versions do not need this call, and warn about it
                warnings.simplefilter("ignore", FutureWarning)
                enable_symm_mem_for_group(mesh["tp"].get_group().group_name)
        self.whole: Callable[[Tensor, Tensor], Tensor] | None = None
        if whole:
            options = {"mode": "reduce-overhead"} if backend == "inductor" else {}
            self.whole = torch.compile(self._loss_of, backend=backend, **options)
        for block in model.layers.values() if not whole else ():
            block.forward = torch.compile(block.forward, backend=backend)  # type: ignore[method-assign]
        self.loss = cross_entropy_of if self.tensor else torch.compile(cross_entropy_of, backend=backend)
        self.weights: WideWeights | None = None
        if shared:
            share(model, mesh["dp"], dtype)
        else:
            self.weights = WideWeights(model, dtype)
        stepped: Iterable[Tensor] = self.weights.wide if self.weights else model.parameters()
        self.optimizer = torch.optim.AdamW(stepped, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        self.rotation = rotation_of(torch.arange(length, device=device), config)
        self.model: nn.Module = model
        if mesh["dp"].size() > 1 and not shared:
            self.model = nn.parallel.DistributedDataParallel(
                model, process_group=mesh["dp"].get_group(), gradient_as_bucket_view=True
            )

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Make a step on tokens and targets (B, S), and return the mean loss of this rank's sequences."""
        around: AbstractContextManager[Any] = loss_parallel() if self.tensor else nullcontext()
        with around:
            if self.whole is None:
                loss: Tensor = self.loss(self.model(tokens, *self.rotation), targets)
            else:
                torch.compiler.cudagraph_mark_step_begin()
                loss = self.whole(tokens, targets)
            loss.backward()
        if self.weights:
            self.weights.take_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.weights:
            self.weights.publish()
        return local_of(loss.detach())

    def _loss_of(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy_of(self.model(tokens, *self.rotation), targets)


def cross_entropy_of(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1).float(), targets.flatten(0, 1))


def share(model: Llama, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Shard each block separately by FSDP2. The parameters of the last layers stay gathered until backward."""
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False),
    }
    blocks = list(model.layers.values())
    fully_shard(model.tok_embeddings, **options, reshard_after_forward=True)
    for block in blocks:
        fully_shard(block, **options, reshard_after_forward=block is not blocks[-1])
    fully_shard([model.norm, model.output], **options, reshard_after_forward=False)
    fully_shard(model, **options)
