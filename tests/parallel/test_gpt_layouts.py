"""In every layout the model is the same. Initial values are equal bit for bit; loss, gradients and training agree to
1e-10, with dropout and tied embeddings. Deliberate faults are found, which shows that each law can be broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rooftop.models.gpt import blocks as gpt_blocks
from rooftop.models.gpt import layouts as gpt_layouts
from rooftop.models.gpt import network as gpt
from rooftop.models.gpt.configs import GptConfig
from rooftop.models.gpt.layouts import parallel_gpt, rules_of
from rooftop.models.gpt.network import Gpt, continue_greedily
from rooftop.parallel import (
    Context,
    Documents,
    Layout,
    ModelGradients,
    Packing,
    contexts,
    exchanges,
    gradients,
    init_on_meta,
    shards_of,
    sums,
    targets_of_all_ranks,
    tensor_linears,
    turns,
    vocab_embeddings,
    vocab_losses,
)
from rooftop.parallel.dropouts import CounterDropout, CounterDropouts
from rooftop.parallel.exchanges import Group
from rooftop.testing import assert_as_accurate

Run = Callable[..., list[Any]]
Tensors = dict[str, Tensor]

GPT = GptConfig(vocabulary=17, layers=2, width=16, heads=8, kv_heads=8, hidden=24, positions=8, dropout=0.2,
                attention_dropout=0.1)  # fmt: skip
LLAMA = GptConfig(vocabulary=31, layers=2, width=16, heads=8, kv_heads=2, hidden=16, positions=8, norm="rms",
                  position="rope", activation="swiglu", dropout=0.2)  # fmt: skip
CONFIGS = {"gpt": GPT, "llama": LLAMA}
both = pytest.mark.parametrize("kind", CONFIGS)
BATCH, LENGTH, SEED = 8, 8, 3
STEPS = 2
"""The second step is the first that uses kept state."""
CLOSE = 1e-10
FAR = 1e-7  # the least difference that a fault must make


@dataclass(frozen=True)
class Case:
    """A training whose results are compared."""

    kind: str
    layout: Layout
    recompute: bool | str = False
    halves: bool = False
    transport: str = "p2p"
    documents: bool = False


# Cases with one sequence or one head for each rank, with heads of keys and values that four ranks share, and with both
# kinds of ranks. They include each value that `cases_of` combines.
ON_EIGHT = [
    Case("llama", Layout(8)),
    Case("gpt", Layout(4, 2, sequence_parallel=True)),
    Case("llama", Layout(2, 4), recompute=True),
    Case("gpt", Layout(1, 8), recompute="selective"),
    Case("llama", Layout(1, 8, sequence_parallel=True), recompute="selective"),
    Case("llama", Layout(2, 4, sequence_parallel=True), halves=True),
    Case("gpt", Layout(1, 2, cp=4), transport="all_gather", documents=True),
    Case("llama", Layout(2, 2, cp=2), recompute="selective", transport="p2p", documents=True),
    Case("llama", Layout(1, 2, cp=4), transport="a2a"),
]
ON_TWO = [
    Case("llama", Layout(cp=2), transport="p2p", documents=True),
    Case("gpt", Layout(cp=2), transport="all_gather", recompute="selective"),
    Case("llama", Layout(cp=2), transport="a2a"),
]
ON_FOUR = [
    Case("gpt", Layout(2, cp=2), transport="p2p", documents=True),
    Case("llama", Layout(cp=4), transport="a2a+p2p", documents=True, recompute=True),
    Case("gpt", Layout(1, 2, cp=2, sequence_parallel=True), transport="a2a", recompute="selective"),
    Case(
        "llama",
        Layout(1, 2, cp=2, sequence_parallel=True),
        transport="all_gather",
        documents=True,
        recompute="selective",
    ),
]

KINDS = ("selective", "full")  # kinds of recomputation
OF_CONTEXTS = {1: [Case("llama", Layout(), documents=True)], 2: ON_TWO, 4: ON_FOUR}


def cases_of(world: int) -> list[Case]:
    """All numbers of data and tensor parallel ranks, with and without sequence parallelism, each on both models.
    Alternately, one model recomputes activations and the other alternates the halves of a batch. Further cases have
    context parallel ranks with each transport. Whole blocks and selected tensors are recomputed alternately."""
    if world == 8:
        return ON_EIGHT
    splits = [
        Layout(world // tp, tp, sequence_parallel=sequence)
        for tp in (1, 2, 4)
        if world % tp == 0
        for sequence in ((False, True) if tp > 1 else (False,))
    ]
    return OF_CONTEXTS[world] + [
        Case(
            kind,
            split,
            recompute=KINDS[(number // 2 + turn) % 2] if (number + turn) % 2 == 0 else False,
            halves=(number + turn) % 2 == 1,
        )
        for (number, split), (turn, kind) in product(enumerate(splits), enumerate(CONFIGS))
    ]


# ---- one training ------------------------------------------------------------------------------------------------


@dataclass
class Trained:
    """The tensors to compare by name, of the whole model or of a rank's part."""

    initial: Tensors
    losses: list[Tensor]
    norms: list[Tensor]
    gradients: list[Tensors]
    parameters: Tensors


def text(config: GptConfig) -> tuple[Tensor, Tensor]:
    """Tokens and targets (BATCH, LENGTH). Some targets do not count; their number differs between sequences."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocabulary, (BATCH, LENGTH + 1), generator=generator)
    unknown = torch.rand(BATCH, LENGTH, generator=generator) < torch.linspace(0, 0.6, BATCH)[:, None]
    return tokens[:, :-1], tokens[:, 1:].masked_fill(unknown, -100)


def documents(config: GptConfig) -> Documents:
    """Two positions of each sequence end a document."""
    generator = torch.Generator().manual_seed(1)
    ends = torch.rand(BATCH, LENGTH, generator=generator).argsort(1)[:, :2].sort(1).values + 1
    return Documents.of_ends(LENGTH, ends.tolist())


def enlarged(model: Gpt) -> Gpt:
    """A model with matrices large enough that no value becomes nearly zero."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.dim() > 1 else 1)
    return model


def trained(case: Case, groups: Mapping[str, Group], steps: int) -> tuple[Trained, Gpt]:
    """Train for some steps on this rank."""
    config, layout = CONFIGS[case.kind], case.layout
    rank = dist.get_rank() if dist.is_initialized() else 0
    at, device = layout.coordinates(rank)["dp"], device_here()
    options = {"recompute": case.recompute, "halves": case.halves, "device": device, "dtype": torch.float64}
    options["context"] = context = Context.of(groups["cp"], case.transport, near=2)
    model = parallel_gpt(config, layout, groups, seed=SEED, **options)
    found = Trained(copied(model), [], [], [], {})
    enlarged(model)
    all_gradients = ModelGradients(model, groups, sequence_parallel=layout.sequence_parallel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, foreach=True)
    packed = Documents(LENGTH, documents(config).spans[at * BATCH // layout.dp : (at + 1) * BATCH // layout.dp])
    packing = context.packing(LENGTH, packed if case.documents else None, layout.tp if layout.sequence_parallel else 1)
    chunks = packing.held[context.index]
    tokens, targets = (chunks.of(each.chunk(layout.dp)[at], 1).to(device) for each in text(config))
    positions = chunks.of(packed.positions(), 1).to(device) if case.documents else None
    count = targets_of_all_ranks(targets, groups["dp-cp"])
    for step in range(steps):
        options = {"label_smoothing": 0.1, "z_loss": 0.01, "step": step}
        if case.documents or layout.cp > 1:
            options |= {"packing": packing, "positions": positions}
        loss = model(tokens, targets, reduction="sum", **options) / count
        optimizer.zero_grad()
        with all_gradients.summing():
            loss.backward()
        all_gradients.sum_()
        found.norms.append(all_gradients.clip_(0.5))
        with_gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.gradients.append({name: gradient.cpu().clone() for name, gradient in with_gradients.items()})
        found.losses.append(exchanges.start_sum(loss.detach().clone(), groups["dp-cp"])())
        optimizer.step()
    found.parameters = copied(model)
    return found, model


def copied(model: nn.Module) -> Tensors:
    return {name: parameter.detach().cpu().clone() for name, parameter in model.named_parameters()}


def device_here() -> torch.device:
    return torch.device("cuda" if dist.is_initialized() and "nccl" in dist.get_backend() else "cpu")


@cache
def references(steps: int) -> dict[tuple[str, bool], Trained]:
    """The results of one process, by kind and whether documents are packed."""
    return {
        (kind, packed): trained(Case(kind, Layout(), documents=packed), Layout().process_groups(), steps)[0]
        for kind in CONFIGS
        for packed in (False, True)
    }


def differences(found: Trained, expected: Trained, model: nn.Module) -> dict[str, float]:
    """The largest difference of each kind, between this rank's part and the same part of the whole model, after as many
    steps."""
    shards = shards_of(model)

    def part(name: str, whole: Tensor) -> Tensor:
        return shards[name].of(whole) if name in shards else whole

    def largest(ours: Tensors, whole: Tensors) -> float:
        assert ours.keys() == whole.keys()
        return max(float((ours[name] - part(name, whole[name])).abs().max()) for name in ours)

    def largest_of(ours: list[Tensor], theirs: list[Tensor]) -> float:
        return max(abs(float(a) - float(b)) for a, b in zip(ours, theirs, strict=True))

    return {
        "initial": largest(found.initial, expected.initial),
        "loss": largest_of(found.losses, expected.losses),
        "norm": largest_of(found.norms, expected.norms),
        "gradient": max(map(largest, found.gradients, expected.gradients)),
        "parameter": largest(found.parameters, expected.parameters),
    }


def groups_of(layouts: list[Layout]) -> dict[tuple[int, int, int], dict[str, Group]]:
    """The groups for each number of data, tensor and context ranks."""
    made: dict[tuple[int, int, int], dict[str, Group]] = {}
    for layout in layouts:
        if (layout.dp, layout.tp, layout.cp) not in made:
            made[layout.dp, layout.tp, layout.cp] = layout.process_groups()
    return made


def all_differences(cases: list[Case], expected: dict[tuple[str, bool], Trained], steps: int) -> list[dict[str, float]]:
    """The differences of each case on a rank."""
    groups = groups_of([case.layout for case in cases])
    found = []
    for case in cases:
        made, model = trained(case, groups[case.layout.dp, case.layout.tp, case.layout.cp], steps)
        found.append(differences(made, expected[case.kind, case.documents], model))
    return found


# ---- the laws ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_training_is_that_of_one_process(world: int, on_ranks: Run) -> None:
    cases, steps = cases_of(world), STEPS
    of_ranks = on_ranks(world, all_differences, cases, references(steps), steps, limit_s=900.0)
    for number, case in enumerate(cases):
        for rank, found in enumerate(of_ranks):
            assert found[number]["initial"] == 0, (case, rank)
            assert max(found[number].values()) < CLOSE, (case, rank, found[number])


@dataclass(frozen=True)
class Fault:
    """A deliberate fault on these ranks that breaks a law, and the kind of value in which it must show."""

    case: Case
    shown_by: str
    put_in: Callable[[], AbstractContextManager[Any]]


TWO, SEQUENCE, DATA = Layout(1, 2), Layout(1, 2, sequence_parallel=True), Layout(2)
CONTEXT = Layout(cp=2)
FOUR = Layout(1, 4)  # each head of keys and values is shared by two of them


def unsummed(x: Any, *_: Any) -> Any:
    return x


def started(x: Tensor, *_: Any) -> Callable[[], Tensor]:
    return lambda: x


def of_own_part(x: Tensor, dim: int, group: Group) -> Callable[[], Tensor]:
    return lambda: exchanges.own_part(x, dim, group)


def backward_alone(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
    return dy, None


def with_weight_detached(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, weight, *rest, **options: function(x, weight.detach(), *rest, **options)


def by_local_place(self: CounterDropout, x: Tensor) -> Tensor:
    return self.made_by.stream.dropout(x, self.name, self.probability, self.made_by.step, None, self.training)


def no_half(self: CounterDropouts, place: int) -> AbstractContextManager[None]:
    return nullcontext()


def heads_as_if_alone(self: CounterDropouts, probability: float, name: str) -> CounterDropout:
    return CounterDropout(probability, name, self, of_weights=False)


def initially_by_local_place(self: gpt_layouts.OfPieces, stream: Any, tensor: Tensor, name: str, box: Any) -> Tensor:
    self.rule(stream, tensor, name, None)
    return tensor


def nothing_shared(self: ModelGradients, holders: int) -> Iterator[Tensor]:
    return iter(())


def whole_ones_on_all(self: ModelGradients) -> Iterator[Tensor]:
    return (p.grad for p in self.parameters.values() if p.grad is not None)


def shared_ones_on_all(self: ModelGradients) -> Iterator[Tensor]:
    first = exchanges.place_in(self.tensor)[0] == 0
    return (p.grad for name, p in self.parameters.items() if p.grad is not None and (first or name in self.shards))


def nothing_seen(self: Packing, rank: int, spans: Any) -> list[Any]:
    return []


def rotation_by_local_place(positions: Tensor, config: GptConfig) -> tuple[Tensor, Tensor]:
    return gpt_blocks.rotation_of(torch.arange(positions.shape[-1], device=positions.device), config)


def not_sent_back(*_: Any) -> Callable[[Tensor, Tensor], None]:
    return lambda to_key, to_value: None


whole_sequences = ((None, ((0, LENGTH),)),)
HEAD_LOSS = "vocab_parallel_linear_cross_entropy"
FAULTS = {
    "the input's gradient of a column layer is not summed": Fault(
        Case("gpt", TWO), "gradient", lambda: patch.object(tensor_linears, "start_sum", started)
    ),
    "the gradient of what the head takes is not summed": Fault(
        Case("llama", TWO), "gradient", lambda: patch.object(exchanges._Copy, "backward", backward_alone)
    ),
    "the result of a row layer is not summed": Fault(
        Case("gpt", TWO), "loss", lambda: patch.object(tensor_linears, "sum_of_ranks", unsummed)
    ),
    "the found rows of the embedding are not summed": Fault(
        Case("gpt", TWO), "loss", lambda: patch.object(vocab_embeddings, "sum_of_ranks", unsummed)
    ),
    "the input's gradient of a half is not summed": Fault(
        Case("llama", TWO, halves=True), "gradient", lambda: patch.object(turns, "start_sum", started)
    ),
    "the result of a half is not summed": Fault(
        Case("gpt", SEQUENCE, halves=True), "loss", lambda: patch.object(turns, "start_scattered_sum", of_own_part)
    ),
    "masks by the place in a half": Fault(
        Case("gpt", TWO, halves=True), "loss", lambda: patch.object(CounterDropouts, "in_half", no_half)
    ),
    "a part of the sequence gets no sum in backward": Fault(
        Case("gpt", SEQUENCE), "gradient", lambda: patch.object(tensor_linears, "start_scattered_sum", of_own_part)
    ),
    "norms and biases get no sum over the parts of the sequence": Fault(
        Case("gpt", SEQUENCE), "gradient", lambda: patch.object(gradients, "_sum", unsummed)
    ),
    "data ranks do not sum": Fault(
        Case("llama", DATA), "gradient", lambda: patch.object(sums, "start_sum", started)
    ),
    "a data rank divides by its own targets": Fault(
        Case("llama", DATA), "loss", lambda: patch.object(gradients, "start_sum", started)
    ),
    "the exponentials of other ranks are left out": Fault(
        Case("gpt", TWO), "loss", lambda: patch.object(vocab_losses, "start_sum", started)
    ),
    "the head's share of a tied gradient is left out": Fault(
        Case("gpt", TWO),
        "gradient",
        lambda: patch.object(gpt_blocks, HEAD_LOSS, with_weight_detached(getattr(gpt_blocks, HEAD_LOSS))),
    ),
    "the embedding's share of a tied gradient is left out": Fault(
        Case("gpt", TWO),
        "gradient",
        lambda: patch.object(vocab_embeddings, "embedding", with_weight_detached(vocab_embeddings.embedding)),
    ),
    "masks by the place in a data rank's batch": Fault(
        Case("gpt", DATA), "loss", lambda: patch.object(CounterDropout, "forward", by_local_place)
    ),
    "masks by the place among a rank's heads": Fault(
        Case("gpt", TWO), "loss", lambda: patch.object(CounterDropouts, "__call__", heads_as_if_alone)
    ),
    "masks by the place in a part of the sequence": Fault(
        Case("llama", SEQUENCE), "loss", lambda: patch.object(CounterDropout, "forward", by_local_place)
    ),
    "initial values by the place in a rank's part": Fault(
        Case("gpt", TWO), "initial", lambda: patch.object(gpt_layouts.OfPieces, "__call__", initially_by_local_place)
    ),
    "the norm counts what all ranks hold on each": Fault(
        Case("gpt", TWO), "norm", lambda: patch.object(ModelGradients, "_counted", whole_ones_on_all)
    ),
    "shared heads of keys and values are not summed": Fault(
        Case("llama", FOUR), "gradient", lambda: patch.object(ModelGradients, "_shared", nothing_shared)
    ),
    "the norm counts shared heads twice": Fault(
        Case("llama", FOUR), "norm", lambda: patch.object(ModelGradients, "_counted", shared_ones_on_all)
    ),
    "a context rank does not see the chunks before its last": Fault(
        Case("llama", CONTEXT), "loss", lambda: patch.object(Packing, "full_blocks", nothing_seen)
    ),
    "documents are not told apart": Fault(
        Case("llama", CONTEXT, documents=True), "loss", lambda: patch.object(Packing, "spans", whole_sequences)
    ),
    "masks by the place in a context rank's chunks": Fault(
        Case("gpt", CONTEXT), "loss", lambda: patch.object(CounterDropout, "forward", by_local_place)
    ),
    "positions by the place in a context rank's chunks": Fault(
        Case("llama", CONTEXT), "loss", lambda: patch.object(gpt, "rotation_of", rotation_by_local_place)
    ),
    "a context rank divides by its own targets": Fault(
        Case("llama", CONTEXT), "loss", lambda: patch.object(gradients, "start_sum", started)
    ),
    "gradients of keys stay with the rank that used them": Fault(
        Case("llama", CONTEXT), "gradient", lambda: patch.object(contexts, "_send_back", not_sent_back)
    ),
}  # fmt: skip


def shown(world: int, expected: dict[tuple[str, bool], Trained]) -> dict[str, float]:
    """For each fault whose layout has this many ranks: the difference that it makes to this rank's results."""
    faults = {name: fault for name, fault in FAULTS.items() if fault.case.layout.world_size == world}
    groups = groups_of([fault.case.layout for fault in faults.values()])
    found = {}
    for name, fault in faults.items():
        case, layout = fault.case, fault.case.layout
        here = groups[layout.dp, layout.tp, layout.cp]
        parts = parallel_gpt(CONFIGS[case.kind], case.layout, here, seed=SEED, device="meta")
        with fault.put_in():
            made, _ = trained(case, here, steps=1)
        found[name] = differences(made, expected[case.kind, case.documents], parts)[fault.shown_by]
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_faults_are_found(world: int, on_ranks: Run) -> None:
    of_ranks = on_ranks(world, shown, world, references(steps=1))
    assert of_ranks[0]
    for name in of_ranks[0]:
        assert max(found[name] for found in of_ranks) > FAR, name


def by_ddp(expected: Trained) -> tuple[float, float]:
    """Differences of the first gradient and its norm if PyTorch's DDP sums over the data ranks."""
    layout = Layout(2, 2, sequence_parallel=True)
    groups = layout.process_groups()
    model = enlarged(parallel_gpt(LLAMA, layout, groups, seed=SEED, dtype=torch.float64))
    wrapped = nn.parallel.DistributedDataParallel(model, process_group=groups["dp"])
    tokens, targets = (each.chunk(2)[layout.coordinates(dist.get_rank())["dp"]] for each in text(LLAMA))
    count = targets_of_all_ranks(targets, groups["dp"])
    loss = wrapped(tokens, targets, reduction="sum", label_smoothing=0.1, z_loss=0.01) / count
    (loss * layout.dp).backward()  # DDP divides by the number of ranks
    all_gradients = ModelGradients(model, {"tp": groups["tp"]}, sequence_parallel=True)
    all_gradients.sum_()
    norm, shards = all_gradients.clip_(0.5), shards_of(model)
    apart = []
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        whole = expected.gradients[0][name]
        apart.append(float((parameter.grad - (shards[name].of(whole) if name in shards else whole)).abs().max()))
    return max(apart), abs(float(norm) - float(expected.norms[0]))


def test_ddp_may_sum_over_the_data_ranks(on_ranks: Run) -> None:
    for apart, norm in on_ranks(4, by_ddp, references(steps=1)["llama", False]):
        assert apart < CLOSE
        assert norm < CLOSE


# ---- initial values and refusals ---------------------------------------------------------------------------------


@both
def test_initial_values_are_those_of_the_rules(kind: str) -> None:
    config = CONFIGS[kind]
    model = parallel_gpt(config, seed=SEED)
    expected = init_on_meta(lambda: Gpt(config, device="meta"), rules_of(model), SEED)
    assert model.state_dict().keys() == expected.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))
    assert model.head.output.weight is model.embedding.tokens.weight
    wide = parallel_gpt(config, seed=SEED, dtype=torch.float64)
    assert all(torch.equal(a.double(), b) for a, b in zip(model.parameters(), wide.parameters(), strict=True))
    other = parallel_gpt(config, seed=SEED + 1)
    assert not torch.equal(model.layers["0"].mlp.up.weight, other.layers["0"].mlp.up.weight)


def made(config: GptConfig, layout: Layout) -> tuple[int, int]:
    """The most elements that were filled at once, and the number of elements of all parameters, on this rank."""
    sizes: list[int] = []
    fill = gpt_layouts.Stream.normal_

    def watched(self: Any, tensor: Tensor, *rest: Any) -> Tensor:
        sizes.append(tensor.numel())
        return fill(self, tensor, *rest)

    with patch.object(gpt_layouts.Stream, "normal_", watched):
        model = parallel_gpt(config, layout, seed=SEED)
    return max(sizes), sum(parameter.numel() for parameter in model.parameters())


def test_only_a_rank_s_part_is_made(on_ranks: Run) -> None:
    config = replace(LLAMA, vocabulary=64)
    whole, width = sum(parameter.numel() for parameter in Gpt(config, device="meta").parameters()), config.width
    on_all = 5 * width + config.layers * 2 * width  # norms, biases of row layers
    key_and_value = config.layers * 2 * config.kv_width * (width + 1)  # each rank has one head of these, which is half
    for largest, total in on_ranks(4, made, config, Layout(1, 4)):
        assert largest == 64 // 4 * width
        assert total == (whole - on_all - key_and_value) // 4 + on_all + key_and_value // 2


def refusals() -> list[str]:
    """The errors of wrong layouts of two ranks, and the display of a vocabulary that the ranks do not divide."""
    wrong = [
        (replace(GPT, width=18, heads=9, kv_heads=9), Layout(1, 2)),
        (replace(GPT, hidden=23), Layout(1, 2)),
        (replace(GPT, vocabulary=1), Layout(1, 2)),
        (GPT, Layout(1, 4)),
        (GPT, Layout(1, 1, 2)),
    ]
    said = []
    for config, layout in wrong:
        with pytest.raises(ValueError, match="layout") as error:
            parallel_gpt(config, layout, seed=0)
        said.append(str(error.value))
    model = parallel_gpt(GPT, Layout(1, 2), seed=0)
    with pytest.raises(ValueError, match="build a rank's part of a model with device='meta'") as error:
        Gpt(GPT, group=model.head.group)
    said.append(str(error.value))
    with pytest.raises(ValueError, match="this rank holds only a part of the model") as error:
        model.initialize()
    return [*said, repr(model.embedding.tokens)]


def test_a_wrong_layout_is_refused_on_every_rank(on_ranks: Run) -> None:
    first, second = on_ranks(2, refusals, limit_s=150.0)
    assert first[:-1] == second[:-1]
    parts = [
        "heads=9 is not divisible by tp=2",
        "feed_forward=23 is not divisible by tp=2",
        "vocabulary=1 is less than tp=2",
        "it has 4 ranks and the world 2",
        "this function splits a model along dp, tp and cp",
        "or by rooftop.models.parallel_gpt",
    ]
    for said, part in zip(first, parts, strict=False):
        assert part in said
    assert all("Nearest" in said for said in first[:2])
    assert "17, 16, rank 0 of 2, 9 rows each, the last 1 are padding" in first[-1]


# ---- logits, masks, recomputation --------------------------------------------------------------------------------


def answers(kind: str) -> tuple[float, bool, list[str]]:
    """The difference between the logits of a split model and of the whole model, whether both continue equally, and the
    refused calls."""
    config, layout = replace(CONFIGS[kind], positions=16), Layout(1, 2)
    groups, sequence = layout.process_groups(), replace(layout, sequence_parallel=True)
    whole = parallel_gpt(config, Layout(2), {"tp": None}, seed=SEED, dtype=torch.float64)
    models = [parallel_gpt(config, each, groups, seed=SEED, dtype=torch.float64) for each in (layout, sequence)]
    whole, model, split = (enlarged(each).eval() for each in (whole, *models))
    tokens = text(config)[0]
    with torch.no_grad():
        apart = max(float((each(tokens) - whole(tokens)).abs().max()) for each in (model, split))
    alike = torch.equal(continue_greedily(model, tokens, 6), continue_greedily(whole, tokens, 6))
    said = []
    for refused in (lambda: continue_greedily(split, tokens, 1), lambda: split(tokens[:, :7])):
        with pytest.raises(ValueError, match="sequence_parallel") as error:
            refused()
        said.append(str(error.value))
    return apart, alike, said


@both
def test_logits_and_greedy_text_are_those_of_one_process(kind: str, on_ranks: Run) -> None:
    for apart, alike, said in on_ranks(2, answers, kind):
        assert apart < 1e-12
        assert alike
        assert "a cache cannot be used with sequence_parallel" in said[0]
        assert "7 positions cannot be split among 2 ranks" in said[1]


@both
def test_recomputation_has_the_masks_of_its_own_step(kind: str) -> None:
    """The masks are the same even if the next micro-batch's forward ran in between."""
    tokens, targets = text(CONFIGS[kind])
    found = []
    for recompute in (False, "full", "selective"):
        model = parallel_gpt(CONFIGS[kind], seed=SEED, recompute=recompute, dtype=torch.float64)
        losses = [model(tokens, targets, step=step) for step in (3, 4)]
        assert float(losses[0].detach()) != float(losses[1].detach())
        found.append(torch.autograd.grad(losses[0], list(model.parameters())))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_recomputation_keeps_less() -> None:
    tokens, targets = text(GPT)
    kept = []
    for recompute in (False, True):
        model = parallel_gpt(GPT, seed=SEED, recompute=recompute)
        parameters, sizes = {p.data_ptr() for p in model.parameters()}, []

        def keep(x: Tensor, parameters: set[int] = parameters, sizes: list[int] = sizes) -> Tensor:
            sizes.append(0 if x.data_ptr() in parameters else x.numel())
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            model(tokens, targets)
        kept.append(sum(sizes))
    assert kept[1] < kept[0] / 2


def test_masks_change_with_the_step_and_are_off_in_eval() -> None:
    model, (tokens, _) = parallel_gpt(GPT, seed=SEED), text(GPT)
    with torch.no_grad():
        assert torch.equal(model(tokens, step=1), model(tokens, step=1))
        assert not torch.equal(model(tokens, step=1), model(tokens, step=2))
        model.eval()
        assert torch.equal(model(tokens, step=1), model(tokens, step=2))


# ---- bfloat16 ----------------------------------------------------------------------------------------------------


def one_step(kind: str, layout: Layout, groups: Mapping[str, Group], dtype: torch.dtype) -> Tensors:
    """Loss and gradients in a dtype, for the same bfloat16 parameters."""
    model = enlarged(parallel_gpt(CONFIGS[kind], layout, groups, seed=SEED, dtype=torch.bfloat16)).to(dtype)
    tokens, targets = text(CONFIGS[kind])
    loss = model(tokens, targets, label_smoothing=0.1)
    loss.backward()
    ModelGradients(model, groups, sequence_parallel=layout.sequence_parallel).sum_()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


def in_bfloat16(kind: str) -> tuple[list[Tensors], dict[str, Any]]:
    """On a rank: its results with and without sequence parallelism, and the part of the whole that they are."""
    groups = TWO.process_groups()
    found = [one_step(kind, layout, groups, torch.bfloat16) for layout in (TWO, SEQUENCE)]
    return found, shards_of(parallel_gpt(CONFIGS[kind], TWO, groups, seed=SEED, device="meta"))


@both
def test_bfloat16_is_as_accurate_as_on_one_process(kind: str, on_ranks: Run) -> None:
    alone = Layout().process_groups()
    plain, exact = (one_step(kind, Layout(), alone, dtype) for dtype in (torch.bfloat16, torch.float64))
    of_ranks = on_ranks(2, in_bfloat16, kind)
    for way, (name, tensor) in product(range(2), exact.items()):
        whole = of_ranks[0][0][way][name]
        if name in of_ranks[0][1]:
            whole = torch.full_like(plain[name], torch.nan)
            for found, shards in of_ranks:
                for piece, part in shards[name].parts(found[way][name]):
                    piece.box.of(whole).copy_(part)
        assert_as_accurate(whole, plain[name], tensor, what=name)


# ---- on GPUs -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_on_gpus_training_is_that_of_one_process(on_ranks: Run) -> None:
    """The ranks communicate through NCCL. Initial values have the same bits as on the CPU."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    cases = cases_of(2)
    of_ranks = on_ranks(2, all_differences, cases, references(STEPS), STEPS, device="cuda", limit_s=240.0)
    for number, case in enumerate(cases):
        for rank, found in enumerate(of_ranks):
            assert found[number]["initial"] == 0, (case, rank)
            assert max(found[number].values()) < CLOSE, (case, rank, found[number])
