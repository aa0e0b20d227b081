"""Create a rank's part of a `Gpt`.

The model is the same in any layout, because initial values and dropout masks depend on seed, name and global position.

    layout = Layout.of_world(launched().size, tp=2, sequence_parallel=True)
    with join(layout) as world:
        groups = layout.process_groups()
        model = parallel_gpt(config, layout, groups, seed=1, device=world.device)
        gradients = ModelGradients(model, groups, sequence_parallel=layout.sequence_parallel)
        loss = model(tokens, targets, reduction="sum", step=step) / targets_of_all_ranks(targets, groups["dp-cp"])
        with gradients.summing():  # over data ranks, during backward
            loss.backward()
        gradients.sum_()
        gradients.clip_(1.0)
        optimizer.step()

The input of a data parallel rank is its part of the batch; a context parallel rank gets only its positions of the
sequences. The tensor parallel ranks of one group get the same input. Use `fully_sharded_gpt` instead of `parallel_gpt`
to shard parameters, gradients and optimizer over the data ranks; no other change to the program is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rooftop.models.gpt.network import Gpt, initial_values
from rooftop.models.gpt.switches import GptConfig
from rooftop.parallel.contexts import Context
from rooftop.parallel.dropouts import CounterDropouts
from rooftop.parallel.exchanges import Group
from rooftop.parallel.layouts import Layout
from rooftop.parallel.randomness import Boxes, Constant, Init, Normal, Stream, materialize
from rooftop.parallel.recomputing import Recompute
from rooftop.parallel.shards import Shard, shards_of


@dataclass(frozen=True)
class OfPieces:
    """An initialization rule for a rank's part of a parameter. It applies `rule` to each range of rows of the whole
    parameter that the part contains (`Shard.pieces`), and sets padding to 0."""

    rule: Init
    shard: Shard

    def __call__(self, stream: Stream, tensor: Tensor, name: str, box: Boxes | None) -> Tensor:
        """Fill the tensor piece by piece. `box` is not used: `shard` says where each piece lies in the whole
        parameter."""
        tensor.detach().zero_()
        for piece, part in self.shard.parts(tensor.detach()):
            self.rule(stream, part, name, piece.box)
        return tensor


def parallel_gpt(
    config: GptConfig,
    layout: Layout | None = None,
    groups: Mapping[str, Group] | None = None,
    *,
    seed: int,
    recompute: Recompute = False,
    halves: bool = False,
    context: Context | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Gpt:
    """Create this rank's part of a model, with initial values; no rank creates more than its part.

    Args:
        config: config of the whole model.
        layout: the layout of the ranks (`dp`, `tp` and `cp`); None: one process.
        groups: `layout.process_groups()`; None: this function creates the groups.
        seed: seed of initial values and of dropout, from 0 to 2^64 - 1.
        recompute: activations that backward recomputes, as in `Gpt`.
        halves: whether tensor parallel ranks compute the two halves of a batch alternately, to overlap the
            communication of one half with the computation of the other; as in `Gpt`.
        context: how context parallel ranks exchange keys and values; None: `Context(groups["cp"])`.
        device, dtype: device and dtype of the parameters. Initial values are computed in float32 and rounded to the
            dtype, so models of different dtypes differ only by this rounding.

    Returns:
        A `Gpt`, whose dropout masks depend on the argument `step` of `forward`.

    Raises:
        ValueError: the layout has pipeline ranks, or does not fit the processes or the model (the message suggests the
            nearest layouts that fit). All ranks raise the same error, before any communication.
    """
    layout = layout or Layout()
    world = dist.get_world_size() if dist.is_initialized() else 1
    config.check_layout(layout, world)
    if layout.pp > 1:
        raise ValueError(
            f"parallel_gpt: the layout {layout} has pp ranks, but this function splits a model along dp, tp and cp; "
            "use parallel_gpt_stages for a pipeline"
        )
    groups = layout.process_groups() if groups is None else groups
    at = layout.coordinates(dist.get_rank() if dist.is_initialized() else 0)
    model = Gpt(
        config,
        dropouts=dropouts_of(layout, at, seed),
        group=groups["tp"] if layout.tp > 1 else None,
        sequence_parallel=layout.sequence_parallel,
        recompute=recompute,
        halves=halves,
        context=context or Context(groups["cp"] if layout.cp > 1 else None),
        device="meta",
        dtype=dtype,
    )
    materialize(model, rules_of(model), Stream(seed), device=device)
    return model


def dropouts_of(layout: Layout, at: Mapping[str, int], seed: int) -> CounterDropouts:
    """The dropouts for the rank at these coordinates of a layout."""
    tensor = (at["tp"], layout.tp)
    return CounterDropouts(
        seed,
        batch=(at["dp"], layout.dp),
        split=tensor if layout.sequence_parallel else (0, 1),
        heads=tensor,
    )


def fully_sharded_gpt(
    config: GptConfig,
    layout: Layout,
    groups: Mapping[str, Group] | None = None,
    *,
    seed: int,
    recompute: Recompute = False,
    context: Context | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    compute_dtype: torch.dtype | None = None,
) -> Gpt:
    """Create this rank's part of a model sharded over data ranks (FSDP2), with initial values.

    The whole model is never created.

    The initial values are the same as in `parallel_gpt`. The parameters of the blocks are gathered one block at a time.
    Embedding and head are gathered one at a time as well, or both at once if their weights are tied. The last block and
    the head stay gathered until backward, because backward begins with these modules.

    Args:
        config, layout, groups, seed, recompute, context, device: as in `parallel_gpt`; the layout needs at least two
            data or context parallel ranks, which share the parameters.
        dtype: dtype of parameters, their gradients and the optimizer's state.
        compute_dtype: dtype of the gathered parameters and of the computation, e.g. bfloat16; None: `dtype`.

    Returns:
        A `Gpt`. Call the model itself, because calls of submodules do not gather parameters. The parameters are
            DTensors; `ModelGradients` sums their gradients, computes the norm, and clips.

    Raises:
        ValueError: as in `parallel_gpt`, or there are fewer than two data and context parallel ranks.
    """
    from rooftop.parallel.sharded_data import fully_sharded  # imports PyTorch's DTensor, which takes most of a second

    groups = layout.process_groups() if groups is None else groups
    model = parallel_gpt(
        config, layout, groups, seed=seed, recompute=recompute, context=context, device="meta", dtype=dtype
    )
    assert model.embedding is not None
    assert model.head is not None
    blocks = list(model.layers.values())
    tied = model.head.output.weight is model.embedding.tokens.weight
    units = blocks if tied else [model.embedding, *blocks, model.head]
    fully_sharded(
        model,
        units,
        groups["dp-cp"],
        device_type=torch.device(device).type,
        dtype=compute_dtype,
        kept=units[-1:] if tied else units[-2:],
    )
    model.to_empty(device=device)
    model.tie()
    fill_shared(model, config, seed)
    return model


@torch.no_grad()
def fill_shared(
    model: nn.Module, config: GptConfig, seed: int, whole_name: Callable[[str], str] = lambda name: name
) -> None:
    """Fill this rank's part of a sharded model with the initial values of a seed.

    Args:
        whole_name: for pipeline stages, maps a parameter's name in the stage to its name in the whole model.
    """
    from rooftop.parallel.sharded_data import local_of, shard_here

    rules, shards, stream = _whole_rules_of(config), shards_of(model), Stream(seed)
    for name, parameter in model.named_parameters():
        held, known = shard_here(parameter, shards.get(name)), whole_name(name)
        OfPieces(_rule_of(known, rules), held)(stream, local_of(parameter), known, None)


def rules_of(model: Gpt) -> list[tuple[str, Init]]:
    """The rules of `initial_values` for the model's parameters, in the form for `rooftop.parallel.materialize`."""
    return rules_of_parts(model.config, shards_of(model))


def rules_of_parts(config: GptConfig, shards: Mapping[str, Shard]) -> list[tuple[str, Init]]:
    """The initialization rules for a rank's parts of parameters, by the parameters' names in the whole model."""
    rules = _whole_rules_of(config)
    return [(name, OfPieces(_rule_of(name, rules), shard)) for name, shard in shards.items()] + rules


def _whole_rules_of(config: GptConfig) -> list[tuple[str, Init]]:
    return [(pattern, Normal(mean, std) if std else Constant(mean)) for pattern, mean, std in initial_values(config)]


def _rule_of(name: str, rules: list[tuple[str, Init]]) -> Init:
    return next(rule for pattern, rule in rules if fnmatchcase(name, pattern))
