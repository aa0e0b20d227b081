"""In every pipeline and schedule the model is the same. Initial values are equal bit for bit; loss, gradients, norm and
training agree with one process to 1e-10, with dropout and tied embeddings. Deliberate faults are found."""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from rooftop.models.gpt import stages as gpt_stages
from rooftop.models.gpt.configs import GptConfig
from rooftop.models.gpt.layouts import parallel_gpt
from rooftop.models.gpt.stages import GptStages, parallel_gpt_stages
from rooftop.parallel import (
    Layout,
    ModelGradients,
    exchanges,
    gradients,
    join,
    pipelines,
    shards_of,
    watching,
)
from rooftop.parallel.deferred import Deferral, Later, defer_weight_gradients
from rooftop.parallel.dropouts import CounterDropouts, Place
from rooftop.parallel.exchanges import Group
from rooftop.parallel.pipelines import Pipeline
from rooftop.parallel.schedules import Instruction, Schedule, schedule_of, simulate
from rooftop.parallel.sharded_data import local_of
from rooftop.train import AdamW, Replayed

Run = Callable[..., list[Any]]
Tensors = dict[str, Tensor]

GPT = GptConfig(vocabulary=17, layers=4, width=16, heads=4, kv_heads=4, hidden=24, positions=8, dropout=0.2,
                attention_dropout=0.1)  # fmt: skip
LLAMA = GptConfig(vocabulary=31, layers=4, width=16, heads=4, kv_heads=2, hidden=16, positions=8, norm="rms",
                  position="rope", activation="swiglu", dropout=0.2)  # fmt: skip
CONFIGS = {
    "gpt": GPT,
    "llama": LLAMA,
    "untied": replace(GPT, tied=False, layers=5),  # a prime number of layers
    "gpt of 8": replace(GPT, layers=8),
    "llama of 8": replace(LLAMA, layers=8),
}
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
    schedule: str
    micro_batches: int
    stages: int | None = None
    recompute: bool | str = False
    halves: bool = False
    shared: bool = False


TWO = Layout(pp=2)
SEQUENCE = Layout(tp=2, pp=2, sequence_parallel=True)
# Each schedule on each number of ranks; with and without recomputation, with and without tensor, sequence and data
# parallel ranks; with fewer micro-batches than stages, as many, and more; both models, tied and untied.
CASES = {
    2: [
        Case("gpt", TWO, "gpipe", 4, recompute=True),
        Case("llama", TWO, "1f1b", 4),
        Case("untied", TWO, "1f1b", 1, recompute=True),
        Case("gpt", TWO, "interleaved", 4, 2),
        Case("llama", TWO, "interleaved", 2, 2, recompute="selective"),
        Case("gpt", TWO, "zb-h1", 8, recompute="selective"),
        Case("llama", TWO, "zb-h1", 4),
        Case("gpt", TWO, "zbv", 4),
        Case("untied", TWO, "zbv", 2, recompute="selective"),
    ],
    4: [
        Case("gpt", SEQUENCE, "interleaved", 4, 2, recompute="selective"),
        Case("llama", SEQUENCE, "zb-h1", 4, recompute="selective"),
        Case("llama", SEQUENCE, "zbv", 4, halves=True),
        Case("gpt", Layout(tp=2, pp=2), "zbv", 2, recompute=True),
        Case("llama", Layout(2, pp=2), "gpipe", 2),
        Case("gpt", Layout(2, pp=2), "zbv", 4, recompute="selective", shared=True),
        Case("gpt", Layout(2, pp=2), "zb-h1", 4, shared=True),
        Case("gpt", Layout(pp=4), "1f1b", 2),
        Case("gpt", Layout(pp=4), "zb-h1", 2, recompute=True),
    ],
    8: [
        Case("gpt", Layout(2, 2, 2, sequence_parallel=True), "1f1b", 4, recompute=True),
        Case("llama", Layout(2, 2, 2, sequence_parallel=True), "zb-h1", 2, recompute="selective", shared=True),
        Case("llama of 8", Layout(1, 2, 4, sequence_parallel=True), "zbv", 8),
        Case("llama of 8", Layout(2, pp=4), "interleaved", 4, 2, recompute=True),
        Case("gpt of 8", Layout(pp=8), "zb-h1", 4),
    ],
}


# ---- one training ------------------------------------------------------------------------------------------------


@dataclass
class Trained:
    """The tensors to compare by name, of the whole model or of a rank's part."""

    initial: Tensors
    losses: list[float]
    norms: list[float]
    gradients: list[Tensors]
    parameters: Tensors


def text(config: GptConfig) -> tuple[Tensor, Tensor]:
    """Tokens and targets (BATCH, LENGTH). Some targets do not count; their number differs between sequences."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocabulary, (BATCH, LENGTH + 1), generator=generator)
    unknown = torch.rand(BATCH, LENGTH, generator=generator) < torch.linspace(0, 0.6, BATCH)[:, None]
    return tokens[:, :-1], tokens[:, 1:].masked_fill(unknown, -100)


def whole_of(tensor: Tensor) -> Tensor:
    """A sharded tensor gathered on every rank; other tensors unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def copied(model: nn.Module) -> Tensors:
    return {name: whole_of(parameter.detach()).cpu().clone() for name, parameter in model.named_parameters()}


def trained_with(
    model: nn.Module, all_gradients: ModelGradients, backward: Callable[[int], Tensor], steps: int
) -> Trained:
    """Trains for some steps; `backward(step)` computes gradients and returns the loss."""
    found = Trained(copied(model), [], [], [], {})
    with torch.no_grad():
        for parameter in model.parameters():  # matrices large enough that no value becomes nearly zero
            local_of(parameter).mul_(8 if parameter.dim() > 1 else 1)
    optimizer = AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        found.losses.append(float(backward(step)))
        all_gradients.sum_()
        found.norms.append(float(all_gradients.clip_(0.5)))
        made = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
        found.gradients.append({name: whole_of(gradient).cpu().clone() for name, gradient in made.items()})
        optimizer.step()
    found.parameters = copied(model)
    return found


OPTIONS = {"label_smoothing": 0.1, "z_loss": 0.01, "reduction": "sum"}


@cache
def reference(kind: str, steps: int) -> Trained:
    """Trains the whole model with the whole batch on one process."""
    config = CONFIGS[kind]
    model = parallel_gpt(config, seed=SEED, dtype=torch.float64)
    tokens, targets = text(config)
    count = (targets != -100).sum()

    def backward(step: int) -> Tensor:
        loss = model(tokens, targets, step=step, **OPTIONS) / count
        loss.backward()
        return loss.detach()

    return trained_with(model, ModelGradients(model), backward, steps)


def references(cases: Iterable[Case], steps: int) -> dict[str, Trained]:
    """Results on one process for the models of some cases."""
    return {kind: reference(kind, steps) for kind in {case.kind for case in cases}}


def made_stages(case: Case, groups: Mapping[str, Group], schedule: Schedule, device: str = "cpu") -> GptStages:
    return parallel_gpt_stages(
        CONFIGS[case.kind],
        case.layout,
        groups,
        schedule,
        length=LENGTH,
        seed=SEED,
        recompute=case.recompute,
        halves=case.halves,
        fully_shard=case.shared,
        device=device,
        dtype=torch.float64,
    )


def trained(case: Case, groups: Mapping[str, Group], steps: int) -> tuple[Trained, GptStages]:
    """Train on this rank."""
    layout, config = case.layout, CONFIGS[case.kind]
    at = layout.coordinates(dist.get_rank())
    device = torch.device("cuda" if "nccl" in dist.get_backend() else "cpu")
    schedule = schedule_of(case.schedule, layout.pp, case.micro_batches, case.stages)
    model = made_stages(case, groups, schedule, device.type)
    size = BATCH // layout.dp // case.micro_batches
    pipeline = Pipeline(
        schedule,
        group=groups["pp"],
        shape=model.shape_between(size, LENGTH),
        dtype=torch.float64,
        device=device,
        deferral=defer_weight_gradients(model) if schedule.splits_backward else None,
    )
    tokens, targets = (each.to(device) for each in text(config))
    count = (targets != -100).sum()
    parts = BATCH // size  # this rank has the rows from its data rank's first row on

    def backward(step: int) -> Tensor:
        def at_stage(stage: int, number: int, given: Tensor | None) -> Tensor:
            part = at["dp"] * case.micro_batches + number
            model.masks.place = Place(step, (part, parts))
            own = slice(part * size, (part + 1) * size)
            if stage + 1 < schedule.stages:
                return model(stage, tokens[own] if given is None else given, step=step)
            return model(stage, given, targets[own], step=step, **OPTIONS) / count

        total = torch.zeros((), dtype=torch.float64, device=device)
        model.begin_step()
        for share in pipeline.run(at_stage):
            total += share
        model.end_step()
        return exchanges.start_sum(exchanges.start_sum(total, groups["pp"])(), groups["dp-cp"])()

    all_gradients = ModelGradients(model, groups, sequence_parallel=layout.sequence_parallel, tied=model.tied)
    return trained_with(model, all_gradients, backward, steps), model


def differences(found: Trained, model: GptStages, expected: Trained) -> dict[str, float]:
    """The largest difference of each kind, between this rank's part and the same part of the whole model, after as many
    steps."""
    shards = shards_of(model)

    def largest(ours: Tensors, whole: Tensors) -> float:
        apart = []
        for name, parameter in model.named_parameters():
            tensor = ours.get(name, torch.zeros(parameter.shape))  # a missing gradient is 0
            same = whole["embedding.tokens.weight" if name == model.tied else name]
            apart.append(float((tensor - (shards[name].of(same) if name in shards else same)).abs().max()))
        return max(apart)

    return {
        "initial": largest(found.initial, expected.initial),
        "loss": max(abs(a - b) for a, b in zip(found.losses, expected.losses, strict=True)),
        "norm": max(abs(a - b) for a, b in zip(found.norms, expected.norms, strict=True)),
        "gradient": max(map(largest, found.gradients, expected.gradients)),
        "parameter": largest(found.parameters, expected.parameters),
    }


def groups_of(layouts: list[Layout]) -> dict[str, dict[str, Group]]:
    """The groups for each layout."""
    made: dict[str, dict[str, Group]] = {}
    for layout in layouts:
        sizes = str(replace(layout, sequence_parallel=False))
        if sizes not in made:
            made[sizes] = layout.process_groups()
    return {str(layout): made[str(replace(layout, sequence_parallel=False))] for layout in layouts}


def all_differences(cases: list[Case], expected: dict[str, Trained], steps: int) -> list[dict[str, float]]:
    """The differences of each case on a rank."""
    groups = groups_of([case.layout for case in cases])
    return [differences(*trained(case, groups[str(case.layout)], steps), expected[case.kind]) for case in cases]


# ---- the laws ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", CASES)
def test_training_is_that_of_one_process(world: int, on_ranks: Run) -> None:
    cases, steps = CASES[world], STEPS
    of_ranks = on_ranks(world, all_differences, cases, references(cases, steps), steps, limit_s=900.0)
    for number, case in enumerate(cases):
        for rank, found in enumerate(of_ranks):
            assert found[number]["initial"] == 0, (case, rank)
            assert max(found[number].values()) < CLOSE, (case, rank, found[number])


@dataclass(frozen=True)
class Fault:
    """A deliberate fault on these ranks, and the kind of value in which it must show."""

    case: Case
    shown_by: str
    put_in: Callable[[], AbstractContextManager[Any]]


PLAIN, RECOMPUTED = Case("gpt", TWO, "1f1b", 4), Case("gpt", TWO, "1f1b", 4, recompute=True)
SPLIT = Case("llama", TWO, "zb-h1", 4)


def backwards_stages(*arguments: Any) -> list[range]:
    return layers_of_stages(*arguments)[::-1]


layers_of_stages = gpt_stages.layers_of_stages


def unsummed(tensors: Any, group: Group) -> None:
    return None


def summed_twice(tensors: Any, group: Group) -> None:
    for tensor in tensors:
        exchanges.start_sum(tensor, group)()
        exchanges.start_sum(tensor, group)()


def started(x: Tensor, *_: Any) -> Callable[[], Tensor]:
    return lambda: x


def all_counted(self: ModelGradients) -> Iterator[Tensor]:
    return (gradient for _, gradient in self._here())


def wherever_it_is(self: CounterDropouts, place: Place) -> AbstractContextManager[None]:
    return nullcontext()


def local_name(self: GptStages, name: str) -> str:
    return name


def nothing_made(self: Later) -> None:
    self._left.clear()


given_to = pipelines._Step._given


def of_the_first(self: Any, made_by: Instruction) -> Tensor:
    """The gradient of one micro-batch replaces those of others."""
    found = given_to(self, made_by)
    if made_by.kind == "F":
        return found
    self.first = getattr(self, "first", found)
    return self.first


FAULTS = {
    "stages swapped": Fault(PLAIN, "loss", lambda: patch.object(gpt_stages, "layers_of_stages", backwards_stages)),
    "the tied gradient is not summed": Fault(PLAIN, "gradient", lambda: patch.object(gradients, "_sum", unsummed)),
    "the tied gradient is summed twice": Fault(
        PLAIN, "gradient", lambda: patch.object(gradients, "_sum", summed_twice)
    ),
    "the norm counts the tied gradient twice": Fault(
        PLAIN, "norm", lambda: patch.object(ModelGradients, "_counted", all_counted)
    ),
    "the norm leaves out other stages": Fault(PLAIN, "norm", lambda: patch.object(gradients, "start_sum", started)),
    "a tied head begins with values of its own": Fault(
        PLAIN, "initial", lambda: patch.object(GptStages, "whole_name", local_name)
    ),
    "recomputation has the masks of the latest micro-batch": Fault(
        RECOMPUTED, "gradient", lambda: patch.object(CounterDropouts, "at", wherever_it_is)
    ),
    "the gradient of another micro-batch": Fault(
        PLAIN, "gradient", lambda: patch.object(pipelines._Step, "_given", of_the_first)
    ),
    "weight gradients are left out": Fault(SPLIT, "gradient", lambda: patch.object(Later, "make", nothing_made)),
}


def shown(expected: dict[str, Trained]) -> dict[str, float]:
    """The difference that each fault makes on this rank."""
    groups = TWO.process_groups()
    found = {}
    for name, fault in FAULTS.items():
        with fault.put_in():
            made, model = trained(fault.case, groups, steps=1)
        found[name] = differences(made, model, expected[fault.case.kind])[fault.shown_by]
    return found


def test_faults_are_found(on_ranks: Run) -> None:
    of_ranks = on_ranks(2, shown, references((fault.case for fault in FAULTS.values()), steps=1))
    for name in FAULTS:
        assert max(found[name] for found in of_ranks) > FAR, name


# ---- memory of a rank --------------------------------------------------------------------------------------------


def held(name: str, stages: int | None, micro_batches: int) -> int:
    """The maximum number of micro-batches whose inputs and outputs (or what weight gradients still need of them) this
    rank held at a time."""
    schedule = schedule_of(name, dist.get_world_size(), micro_batches, stages)
    weight, most, do = torch.ones(2, requires_grad=True), [0], pipelines._Step.do

    def watched(self: Any, instruction: Instruction) -> None:
        do(self, instruction)
        assert len(self.receiving) <= 2  # receives for this instruction and the next one
        most[0] = max(most[0], len(self.outputs) + len(self.later))

    options = {"shape": (2,), "dtype": torch.float32, "device": torch.device("cpu"), "deferral": Deferral()}
    pipeline = Pipeline(schedule, group=Layout(pp=schedule.ranks).process_groups()["pp"], **options)
    with patch.object(pipelines._Step, "do", watched):
        losses = pipeline.run(
            lambda stage, number, given: (
                (weight if given is None else given * weight).sum()
                if stage + 1 == schedule.stages
                else weight * number
                if given is None
                else given * weight
            )
        )
    last = schedule.rank_of[schedule.stages - 1] == dist.get_rank()
    assert [float(loss) for loss in losses] == [2.0 * number for number in range(micro_batches)] * last
    return most[0]


@pytest.mark.parametrize(("name", "stages"), [("gpipe", None), ("1f1b", None), ("interleaved", 2), ("zb-h1", None)])
def test_a_rank_holds_what_the_simulation_says(name: str, stages: int | None, on_ranks: Run) -> None:
    assert on_ranks(3, held, name, stages, 6) == list(simulate(schedule_of(name, 3, 6, stages)).held)


def refusals() -> list[str]:
    """Errors that a pipeline raises, before it communicates and during communication."""
    group, said = Layout(pp=2).process_groups()["pp"], []
    options = {"group": group, "shape": (2,), "dtype": torch.float32, "device": torch.device("cpu")}
    for schedule in (schedule_of("1f1b", 3, 2), schedule_of("zb-h1", 2, 2)):
        with pytest.raises(ValueError, match="Pipeline: the schedule") as refused:
            Pipeline(schedule, **options)
        said.append(str(refused.value))
    return said


def test_what_does_not_fit_a_pipeline_is_refused(on_ranks: Run) -> None:
    first, second = on_ranks(2, refusals)
    assert first == second
    assert "is for 3 ranks, but the group has 2" in first[0]
    assert "give the deferral from rooftop.parallel.defer_weight_gradients(model)" in first[1]


def of_another_shape() -> None:
    group = Layout(pp=2).process_groups()["pp"]
    options = {"group": group, "shape": (2,), "dtype": torch.float32, "device": torch.device("cpu")}
    weight = torch.ones(3, requires_grad=True)
    Pipeline(schedule_of("1f1b", 2, 2), **options).run(lambda stage, number, given: weight if given is None else given)


def test_a_stage_that_gives_another_shape_ends_all_ranks(on_ranks: Run, ranks_failed: type[Exception]) -> None:
    with pytest.raises(ranks_failed) as caught:
        on_ranks(2, of_another_shape)
    errors = caught.value.errors
    assert "stage 0 returned (3,) torch.float32, expected (2,) torch.float32" in errors[0]
    assert errors[1].startswith("RankError: rank 0 of 2 failed: RuntimeError: Pipeline: stage 0 returned")


def of_a_frozen_stage(name: str, how: str) -> float:
    """The gradient of the last stage's weight, if the first stage is frozen or the last stage ignores it."""
    schedule = schedule_of(name, 2, 2)
    weights = [torch.full((), 3.0 + stage, requires_grad=stage > 0) for stage in range(schedule.stages)]
    if how == "unused":
        weights[0].requires_grad_()
    options = {"shape": (2,), "dtype": torch.float32, "device": torch.device("cpu"), "deferral": Deferral()}

    def at_stage(stage: int, number: int, given: Tensor | None) -> Tensor:
        last = stage + 1 == schedule.stages
        if how == "vector" and last:
            return weights[stage] * torch.ones(2)
        if how == "text" and last:
            return "loss"  # type: ignore[return-value]
        if how == "unused" and last:
            return weights[stage] * (1.0 + number)
        made = weights[stage] * (torch.full((2,), 1.0 + number) if given is None else given)
        return made.sum() if last else made

    Pipeline(schedule, group=Layout(pp=2).process_groups()["pp"], **options).run(at_stage)
    of_rank = [weight for stage, weight in enumerate(weights) if schedule.rank_of[stage] == dist.get_rank()]
    return sum(float(weight.grad) for weight in of_rank if weight.grad is not None)


@pytest.mark.parametrize(
    ("name", "how", "gradients"),
    [("1f1b", "frozen", [0.0, 18.0]), ("zb-h1", "frozen", [0.0, 18.0]), ("1f1b", "unused", [0.0, 3.0])],
)
def test_a_stage_may_be_frozen_or_ignore_its_input(name: str, how: str, gradients: list[float], on_ranks: Run) -> None:
    assert on_ranks(2, of_a_frozen_stage, name, how) == gradients


@pytest.mark.parametrize(
    ("how", "said"),
    [("vector", r"returned \(2,\) torch.float32, expected the loss"), ("text", "a value of the type str")],
)
def test_a_loss_is_a_scalar(how: str, said: str, on_ranks: Run, ranks_failed: type[Exception]) -> None:
    with pytest.raises(ranks_failed, match=said):
        on_ranks(2, of_a_frozen_stage, "1f1b", how)


# ---- on GPUs -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_on_gpus_training_is_that_of_one_process(on_ranks: Run) -> None:
    """The ranks communicate through NCCL."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    cases, steps = CASES[2], STEPS
    of_ranks = on_ranks(2, all_differences, cases, references(cases, steps), steps, device="cuda", limit_s=240.0)
    for number, case in enumerate(cases):
        for rank, found in enumerate(of_ranks):
            assert found[number]["initial"] == 0, (case, rank)
            assert max(found[number].values()) < CLOSE, (case, rank, found[number])


# ---- ranks that fail ---------------------------------------------------------------------------------------------


def failing(name: str, stages: int | None, wrong: int, how: str) -> None:
    """Rank `wrong` raises, ends or is stopped at its second forward."""
    size = int(os.environ["WORLD_SIZE"])
    with (
        patch.multiple(watching, STOPPED_S=1.0, TELLING_S=30.0, ARRIVING_S=20.0),  # a busy machine answers late
        join(device="cpu", timeout_s=50) as world,
    ):
        groups = Layout(pp=size).process_groups()
        schedule = schedule_of(name, size, 4, stages)
        weight, deferral, done = torch.ones(2, requires_grad=True), Deferral(), list[int]()

        def at_stage(stage: int, number: int, given: Tensor | None) -> Tensor:
            done.append(number)
            if world.rank == wrong and len(done) == 2:
                if how == "raise":
                    raise KeyError("no such voxel")
                os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
            made = weight if given is None else given * weight
            return made.sum() if stage + 1 == schedule.stages else made

        options = {"shape": (2,), "dtype": torch.float32, "device": world.device, "deferral": deferral}
        pipeline = Pipeline(schedule, group=groups["pp"], **options)
        with patch.object(Later, "make", nothing_made):
            pipeline.run(at_stage)
        dist.barrier()  # finished ranks wait here


FAILURES = [
    *(("raise", name, stages, 1) for name, stages in
      (("gpipe", None), ("1f1b", None), ("interleaved", 2), ("zb-h1", None), ("zbv", None))),
    *(("kill", name, stages, 2) for name, stages in (("1f1b", None), ("zbv", None))),
    *(("stop", name, stages, 0) for name, stages in (("interleaved", 2), ("zb-h1", None))),
]  # fmt: skip


@pytest.mark.parametrize(("how", "name", "stages", "wrong"), FAILURES)
def test_a_rank_that_fails_is_named_at_all_with_what_was_awaited(
    how: str, name: str, stages: int | None, wrong: int, on_ranks: Run, ranks_failed: type[Exception]
) -> None:
    began = time.monotonic()
    with pytest.raises(ranks_failed) as caught:
        on_ranks(3, failing, name, stages, wrong, how, joined=False)
    assert time.monotonic() - began < 150
    errors = caught.value.errors
    own = errors.pop(wrong)
    # A stopped rank is woken, so that it learns that it has failed.
    assert own.startswith(
        {"raise": "KeyError", "kill": "died", "stop": f"RankError: rank {wrong} of 3 has given no"}[how]
    )
    said = {
        "raise": "failed: KeyError: 'no such voxel'; this rank was awaiting ",
        "kill": "is gone without an error (",
        "stop": "has given no sign of life for 1 s: it is suspended; rank ",
    }[how]
    assert sorted(errors) == [rank for rank in range(3) if rank != wrong]
    for error in errors.values():
        assert error.startswith(f"RankError: rank {wrong} of 3 {said}")
        assert re.search(r"awaiting .*(forward|backward|input gradient) of micro-batch \d at stage \d", error), error
        if how != "raise":
            assert re.search(r"; ranks? .* awaits? the .*; rank \d was last at .*, in \w+", error), error


def replaying(name: str, graph: bool, how: str) -> None:
    """Rank 1 raises or is stopped between two steps, which rank 0 has launched by then."""
    with patch.object(watching, "STOPPED_S", 3.0), join(device="cuda", timeout_s=50) as world:
        group, schedule = Layout(pp=2).process_groups()["pp"], schedule_of(name, 2, 4)
        weight, deferral = torch.ones(2, device=world.device, requires_grad=True), Deferral()
        options = {"shape": (2,), "dtype": torch.float32, "device": world.device, "deferral": deferral}
        pipeline = Pipeline(schedule, group=group, **options)

        def step() -> tuple[Tensor, ...]:
            weight.grad = None

            def at_stage(stage: int, number: int, given: Tensor | None) -> Tensor:
                made = weight * number if given is None else given * weight
                return made.sum() if stage + 1 == schedule.stages else made

            return tuple(pipeline.run(at_stage))

        with patch.object(Later, "make", nothing_made):
            run = Replayed(step, world.device) if graph else step
            for number in range(8):
                losses = run()
                torch.cuda.synchronize()
                assert [float(loss) for loss in losses] == [2.0 * each for each in range(4)] * world.rank
                if number == 6 and world.rank == 1:
                    if how == "raise":
                        raise KeyError("no such voxel")
                    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("how", ["raise", "stop"])
@pytest.mark.parametrize(("name", "graph"), [("1f1b", False), ("1f1b", True), ("zb-h1", True)])
def test_on_gpus_it_is_said_what_the_gpu_awaited(
    name: str, graph: bool, how: str, on_ranks: Run, ranks_failed: type[Exception]
) -> None:
    """Rank 0 does not wait in Python: its GPU waits for work that rank 1 never launches."""
    began = time.monotonic()
    with pytest.raises(ranks_failed) as caught:
        on_ranks(2, replaying, name, graph, how, joined=False)
    assert time.monotonic() - began < 150  # even on a busy machine
    said = "failed: KeyError: 'no such voxel'" if how == "raise" else "has given no sign of life for 3 s: .*"
    gone = r"this rank was awaiting the (backward|input gradient) of micro-batch 0 at stage 1 of rank 1"
    assert re.match(f"RankError: rank 1 of 2 {said}; {gone}", caught.value.errors[0]), caught.value.errors


class Collectives(TorchDispatchMode):
    """Counts what is communicated, by the operator's name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func._opname] += 1
        return func(*args, **(kwargs or {}))


def communicated(name: str, micro_batches: int) -> tuple[dict[str, int], int]:
    """Counts of what a step of a fully sharded model communicates on a rank, and of the parts that it gathers
    singly."""
    case, groups = Case("gpt", Layout(2, pp=2), name, micro_batches, shared=True), Layout(2, pp=2).process_groups()
    with Collectives() as collectives:
        _, model = trained(case, groups, steps=1)
    return dict(collectives.counts), sum(isinstance(each, FSDPModule) for each in model.modules()) - 1


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_a_shared_model_is_gathered_and_summed_once_a_step(name: str, on_ranks: Run) -> None:
    for one, four in zip(*(on_ranks(4, communicated, name, number) for number in (1, 4)), strict=True):
        counts, parts = four
        assert counts["send"] == 4 * one[0]["send"]
        assert {each: count for each, count in counts.items() if each not in ("send", "recv_")} == {
            each: count for each, count in one[0].items() if each not in ("send", "recv_")
        }
        assert counts["_reduce_scatter_base_"] == parts
