"""The pipeline stages of a `Gpt` on one rank, with the same initial values and dropout masks as in a single process.

    schedule = schedule_of("1f1b", layout.pp, micro_batches=8)
    model = parallel_gpt_stages(config, layout, groups, schedule, length=256, seed=1, device=world.device)
    pipeline = Pipeline(schedule, group=groups["pp"], shape=model.shape_between(micro_batch, length), ...)
    losses = pipeline.run(lambda stage, number, x: model(stage, tokens[number] if x is None else x, ...))

Layers are divided among stages so that the slowest rank is as fast as possible. Among divisions that are equal in this
respect, the slowest stage is as fast as possible. The first stage also has the embedding, and the last stage the head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise, permutations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rooftop.models.gpt.layouts import dropouts_of, fill_shared, rules_of_parts
from rooftop.models.gpt.network import Gpt
from rooftop.models.gpt.switches import GptConfig
from rooftop.parallel.contexts import Context
from rooftop.parallel.exchanges import Group
from rooftop.parallel.layouts import Layout
from rooftop.parallel.randomness import Stream, materialize
from rooftop.parallel.recomputing import Recompute
from rooftop.parallel.schedules import Schedule
from rooftop.parallel.shards import shards_of

EMBEDDING, HEAD = "embedding.tokens.weight", "head.output.weight"
"""The two names of a tied weight."""


SLOWER_ATTENTION = ((64, 2.5), (math.inf, 1.5))
"""Pairs of (maximum number of features of a head, weight of a flop of attention).

In a training step, attention has 3.5 times the flops of its forward pass, and matrix products have 3 times the flops of
their forward pass. The flops rate of attention is 0.46 times the rate of matrix products for heads of up to 64
features, and 0.77 times for heads of more features (`results/h100/context_attention.json`).
"""
FLOPS_OF_BYTE = 250
"""The number of matrix-product flops that take as long as one byte of memory traffic, on an H100 and an H200."""
ELEMENT = 2  # bytes


def whole_name(config: GptConfig, name: str) -> str:
    """The name of a stage's parameter in the whole model.

    A tied weight has the embedding's name, even in a stage without an embedding.
    """
    return EMBEDDING if config.tied and name == HEAD else name


# ---- layers of a stage ---------------------------------------------------------------------------------------------


def layers_of_stages(config: GptConfig, placement: Sequence[Sequence[int]], length: int) -> list[range]:
    """Divide the layers among stages, so that the slowest rank takes the least time.

    The cost model measures time in flops of matrix products. A flop of attention counts more than one flop, because
    attention kernels are slower than matrix products. Norms, residual sums, rotations and activations take the time of
    their memory traffic: each byte counts as the flops that take the same time. The embedding is a lookup; its bytes
    are counted in the same way. On an H100, with 4,096 tokens, the head of llama-1b takes as long as 0.85 layers; the
    cost model's estimate is 0.86.

    Args:
        config: config of the whole model.
        placement: the stages of each rank (`Schedule.placement`).
        length: tokens per sequence; attention's flops per token grow with this length.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    stages = sum(map(len, placement))
    if config.layers < stages:
        raise ValueError(
            f"{config.layers} layers cannot be divided among {stages} stages, because each stage needs a layer: use "
            "fewer pipeline ranks or fewer stages a rank, or a model with more layers"
        )
    costs = [_cost_of_layer(config, layer, length) for layer in range(config.layers)]
    embedding = FLOPS_OF_BYTE * ELEMENT * 2 * config.width
    return divided(costs, placement, first=embedding, last=2 * config.vocabulary * config.width)


def _cost_of_layer(config: GptConfig, layer: int, length: int) -> float:
    """Cost of a layer's forward pass per token, in flops of matrix products. Backward costs about twice as much in all
    layers, so it does not change the ratios."""
    window = config.window_of(layer)
    seen = min(length, window or length)
    pairs = seen * (seen + 1) // 2 + (length - seen) * seen
    attention = 4 * config.query_width * pairs / length
    hidden = config.hidden * (3 if config.activation == "swiglu" else 2)
    elements = 13 * config.width + hidden  # per token: read or written by norms, sums, rotation, activation
    slower = next(times for features, times in SLOWER_ATTENTION if config.head_features <= features)
    return 2 * config.layer_weights + slower * attention + FLOPS_OF_BYTE * ELEMENT * elements


def divided(
    costs: Sequence[float], placement: Sequence[Sequence[int]], first: float = 0, last: float = 0
) -> list[range]:
    """Divide consecutive items into parts of at least one item, to minimize the cost of the most expensive rank.

    With one part per rank, the result is optimal. Among the optimal divisions, the result has the least sum of squared
    costs, so that the cheaper parts are as equal as possible. If the sums of squared costs are equal too, the first
    parts get more items. With several parts per rank, the result is a local optimum. Divisions are compared by the
    highest cost of a rank, then by the highest cost of a part, then by the sum of the squared costs of ranks and parts.
    Moving one item to another part (and shifting the items in between) gives no better division.

    Args:
        costs: cost of each item; at least as many items as parts.
        placement: the indices of each rank's parts.
        first, last: costs of the first and of the last part, in addition to the costs of their items.
    """
    sums, parts = [0.0, *accumulate(costs)], sum(map(len, placement))

    def cost(part: int, start: int, end: int) -> float:
        return sums[end] - sums[start] + (first if part == 0 else 0) + (last if part == parts - 1 else 0)

    def measured(ends: Sequence[int]) -> tuple[float, float, float]:
        """Return, for a division with these ends, the highest cost of a rank and of a part. The third number is the sum
        of the squared costs of all ranks and all parts."""
        of_parts = [cost(part, *span) for part, span in enumerate(pairwise([0, *ends]))]
        of_ranks = [sum(of_parts[part] for part in held) for held in placement]
        return max(of_ranks), max(of_parts), sum(each * each for each in (*of_ranks, *of_parts))

    most = _best(len(costs), parts, cost, max, math.inf)[0]
    ends = _best(len(costs), parts, lambda *place: cost(*place) ** 2, lambda a, b: a + b, most**2)[1]
    while any(len(held) > 1 for held in placement):
        better = min(_neighbours(ends), key=measured, default=ends)
        if measured(better) >= measured(ends):
            break
        ends = better
    return [range(a, b) for a, b in pairwise([0, *ends])]


def _neighbours(ends: Sequence[int]) -> Iterator[list[int]]:
    """Yield each division in which one part has one item less, and another part one item more, than in the division
    with these ends."""
    sizes = [end - start for start, end in pairwise([0, *ends])]
    for giver, taker in permutations(range(len(sizes)), 2):
        if sizes[giver] > 1:
            yield list(accumulate(size - (part == giver) + (part == taker) for part, size in enumerate(sizes)))


def _best(
    items: int,
    parts: int,
    cost: Callable[[int, int, int], float],
    joined: Callable[[float, float], float],
    limit: float,
) -> tuple[float, list[int]]:
    """Find the cheapest division of the items into consecutive parts that each cost at most `limit`. Return (total
    cost, end of each part)."""
    # best[end]: the best division of the items before `end` into the parts so far
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for part in range(parts):
        found: dict[int, tuple[float, list[int]]] = {}
        for end in range(part + 1, items - (parts - 1 - part) + 1):
            for start, (before, ends) in best.items():
                if start < end and (here := cost(part, start, end)) <= limit * (1 + 1e-12):
                    total = joined(before, here)
                    if end not in found or total <= found[end][0]:
                        found[end] = (total, [*ends, end])
        best = found
    return best[items]


# ---- the stages of a rank ------------------------------------------------------------------------------------------


class GptStages(nn.Module):
    """The stages of a `Gpt` on a pipeline rank: one stage, or several that are not adjacent.

    Parameters have the same names as in the whole model. If the first and last stage are on different ranks and the
    head is tied to the embedding, both ranks hold the tied weight: `ModelGradients(..., tied=model.tied)` sums the
    gradients of this weight.

    Args:
        config: config of the whole model.
        stages: stages by number, created by `Gpt`.
        total: number of stages of the whole pipeline.

    Attributes:
        stages: stages of this rank, by number.
        embedding, layers, head: the modules of all stages on this rank; None if this rank has no such module.
        masks: the dropouts of all stages on this rank; their `place` determines the masks of the next forward pass.
        tied: the name of the tied weight that another rank also holds; None if no other rank holds the weight.
        shared: whether the parameters are sharded over data ranks.
    """

    def __init__(self, config: GptConfig, stages: Mapping[int, Gpt], total: int) -> None:
        super().__init__()
        self.config, self.stages = config, dict(stages)
        first, last = self.stages.get(0), self.stages.get(total - 1)
        self.embedding = first.embedding if first is not None else None
        self.layers = nn.ModuleDict({name: block for stage in stages.values() for name, block in stage.layers.items()})
        self.head = last.head if last is not None else None
        some = next(iter(self.stages.values()))
        self.masks, self.group, self.split_along = some.masks, some.group, some.split_along
        self.context = some.context
        self.shared = False
        apart = config.tied and (self.embedding is None) != (self.head is None)
        self.tied = (EMBEDDING if self.head is None else HEAD) if apart else None
        self.tie()

    def tie(self) -> None:
        """Tie the head's weight to the embedding's, if the config says so and this rank has both."""
        if self.config.tied and self.embedding is not None and self.head is not None:
            self.head.output.weight = self.embedding.tokens.weight

    def whole_name(self, name: str) -> str:
        """The name of a parameter in the whole model."""
        return whole_name(self.config, name)

    def shape_between(self, batch: int, length: int) -> tuple[int, int, int]:
        """Shape (B, S, W) of the tensors between stages; S counts only this rank's positions.

        Raises:
            ValueError: the sequence cannot be split among the ranks.
        """
        ranks = self.context.ranks * (1 if self.split_along is None else self.split_along.size())
        if length % ranks:
            raise ValueError(
                f"a sequence of {length} cannot be split among {ranks} context and sequence parallel ranks: pad "
                "it to a multiple of their number"
            )
        return batch, length // ranks, self.config.width

    def begin_step(self) -> None:
        """Begin a step of a sharded model: keep gathered parameters, and do not sum gradients until `end_step`."""
        if self.shared:
            self._at_the_end(False)

    def end_step(self) -> None:
        """End a step of a sharded model: sum the gradients of all micro-batches, and free the gathered parameters.

        The method runs forward and backward of this module, which holds all stages of the rank, without calling a
        stage. In this backward pass, FSDP reduces and frees each part that was not reduced yet.
        """
        if self.shared:
            self._at_the_end(True)
            device = next(self.parameters()).device
            self(None, torch.zeros((), device=device, requires_grad=True)).backward()

    def _at_the_end(self, last: bool) -> None:
        from torch.distributed.fsdp import FSDPModule

        assert isinstance(self, FSDPModule)
        self.set_is_last_backward(last)
        self.set_reshard_after_backward(last)
        self.set_requires_gradient_sync(last)

    def forward(self, stage: int | None, input: Tensor, targets: Tensor | None = None, **options: object) -> Tensor:
        """Run a stage on tokens or on the previous stage's result; see `Gpt.forward` for the arguments.

        If `stage` is None, nothing is computed (see `end_step`).
        """
        if stage is None:
            return input + 1
        result: Tensor = self.stages[stage](input, targets, **options)
        return result


def parallel_gpt_stages(
    config: GptConfig,
    layout: Layout,
    groups: Mapping[str, Group],
    schedule: Schedule,
    *,
    length: int,
    seed: int,
    recompute: Recompute = False,
    halves: bool = False,
    fully_shard: bool = False,
    context: Context | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    compute_dtype: torch.dtype | None = None,
) -> GptStages:
    """Create this rank's pipeline stages of a model, with initial values; no process ever holds the whole model.

    Args:
        config: config of the whole model.
        layout: the layout of the ranks; the schedule must be for its `pp`.
        groups: `layout.process_groups()`.
        schedule: the pipeline schedule, which determines the stages of this rank.
        length: tokens of a sequence, which influence the division of layers among stages.
        seed, recompute, halves, context, device, dtype: as in `rooftop.models.parallel_gpt`.
        fully_shard: whether each stage is sharded over data ranks (`rooftop.parallel.fully_sharded`). Parameters are
            then gathered once per step, and gradients summed once per step, between `begin_step` and `end_step`.
        compute_dtype: for a sharded model, as in `rooftop.models.fully_sharded_gpt`.

    Raises:
        ValueError: the layout does not fit the processes, the model or the schedule, or there are fewer layers than
            stages. All ranks raise the same error, before any communication.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    config.check_layout(layout, world, layers=config.layers)
    if schedule.ranks != layout.pp:
        raise ValueError(
            f"parallel_gpt_stages: the schedule {schedule.name} is for {schedule.ranks} ranks, but the layout "
            f"{layout} has pp={layout.pp}: create the schedule for that number"
        )
    layers = layers_of_stages(config, schedule.placement, length)
    at = layout.coordinates(dist.get_rank() if dist.is_initialized() else 0)
    dropouts = dropouts_of(layout, at, seed)
    stages = {
        stage: Gpt(
            config,
            layers=layers[stage],
            pre_process=stage == 0,
            post_process=stage == schedule.stages - 1,
            dropouts=dropouts,
            group=groups["tp"] if layout.tp > 1 else None,
            sequence_parallel=layout.sequence_parallel,
            recompute=recompute,
            halves=halves,
            context=context or Context(groups["cp"] if layout.cp > 1 else None),
            device="meta",
            dtype=dtype,
        )
        for stage in schedule.placement[at["pp"]]
    }
    model = GptStages(config, stages, schedule.stages)
    if fully_shard:
        _share(model, groups["dp-cp"], torch.device(device), compute_dtype, seed)
        return model
    shards = {model.whole_name(name): shard for name, shard in shards_of(model).items()}
    rules = rules_of_parts(config, shards)
    materialize(model, rules, Stream(seed), device=device, whole_name=model.whole_name)
    return model


def _share(model: GptStages, data: Group, device: torch.device, dtype: torch.dtype | None, seed: int) -> None:
    """Shard the parameters of a meta-device model over data ranks, and fill them with initial values."""
    from rooftop.parallel.sharded_data import fully_sharded  # imports PyTorch's DTensor, which takes most of a second

    ends = [end for end in (model.embedding, model.head) if end is not None]
    tied_here = model.config.tied and len(ends) == 2
    units = [*model.layers.values(), *([] if tied_here else ends)]
    fully_sharded(model, units, data, device_type=device.type, dtype=dtype, kept=units)
    model.shared = True
    model.to_empty(device=device)
    model.tie()
    fill_shared(model, model.config, seed, model.whole_name)
