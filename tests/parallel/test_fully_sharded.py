"""Data ranks that share a model (FSDP2) train like one process. Initial values are equal bit for bit; loss, gradients,
their norm and five steps agree to 1e-10, with dropout, tied embeddings, and tensor and sequence parallel ranks.
Deliberate faults are found."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from rooftop.cli.main import main
from rooftop.models.gpt import layouts as gpt_layouts
from rooftop.models.gpt.configs import GptConfig
from rooftop.models.gpt.layouts import fully_sharded_gpt, parallel_gpt
from rooftop.models.gpt.network import Gpt
from rooftop.parallel import Layout, ModelGradients, Shard, sharded_data, shards_of, targets_of_all_ranks
from rooftop.parallel.exchanges import Group, start_sum
from rooftop.parallel.sharded_data import fully_sharded, local_of, part_like, shard_here
from rooftop.testing import assert_as_accurate
from rooftop.train import (
    AdamW,
    GptTrainer,
    GptTraining,
    Tokens,
    Validation,
    find_training,
    load_training,
    save_training,
    step_cost,
)

Run = Callable[..., list[Any]]
Tensors = dict[str, Tensor]

GPT = GptConfig(vocabulary=17, layers=2, width=16, heads=8, kv_heads=8, hidden=24, positions=8, dropout=0.2,
                attention_dropout=0.1)  # fmt: skip
LLAMA = GptConfig(vocabulary=31, layers=3, width=16, heads=8, kv_heads=1, hidden=16, positions=8, norm="rms",
                  position="rope", activation="swiglu", dropout=0.2, tied=False)  # fmt: skip
CONFIGS = {"tied gpt": GPT, "llama": LLAMA}
RECOMPUTED = {"tied gpt": "selective", "llama": "full"}
both = pytest.mark.parametrize("kind", CONFIGS)
BATCH, LENGTH, STEPS, SEED = 8, 8, 2, 3
CLOSE, FAR = 1e-10, 1e-7
LAYOUTS = {2: Layout(2), 4: Layout(2, 2, sequence_parallel=True)}
"""The layout for each number of ranks. With four ranks, two tensor ranks share the llama's only head of keys and
values."""


@dataclass
class Trained:
    """Tensors by name, of the whole model or of a rank's part."""

    initial: Tensors
    losses: list[float]
    norms: list[float]
    gradients: list[Tensors]
    parameters: Tensors


def text(config: GptConfig, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and targets (BATCH, LENGTH). Some targets do not count; their number differs between sequences."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(config.vocabulary, (BATCH, LENGTH + 1), generator=generator)
    unknown = torch.rand(BATCH, LENGTH, generator=generator) < torch.linspace(0, 0.6, BATCH)[:, None]
    return tokens[:, :-1], tokens[:, 1:].masked_fill(unknown, -100)


def device_here() -> torch.device:
    return torch.device("cuda" if dist.is_initialized() and "nccl" in dist.get_backend() else "cpu")


def copied(model: Gpt, gradients: bool = False) -> Tensors:
    tensors = {name: p.grad if gradients else p for name, p in model.named_parameters()}
    return {name: local_of(tensor.detach()).cpu().clone() for name, tensor in tensors.items()}


def built(config: GptConfig, layout: Layout, groups: Mapping[str, Group], **options: Any) -> Gpt:
    """The model, shared if there are data ranks."""
    make = fully_sharded_gpt if layout.dp > 1 else parallel_gpt
    return make(config, layout, groups, seed=SEED, device=device_here(), **options)


def trained(
    kind: str, layout: Layout, groups: Mapping[str, Group], recompute: bool | str, steps: int = STEPS
) -> Trained:
    """Train for some steps on this rank."""
    config = CONFIGS[kind]
    model = built(config, layout, groups, recompute=recompute, dtype=torch.float64)
    found = Trained(copied(model), [], [], [], {})
    with torch.no_grad():
        for parameter in model.parameters():
            local_of(parameter).mul_(8 if parameter.dim() > 1 else 1)  # so that no value stays nearly zero
    gradients = ModelGradients(model, groups, sequence_parallel=layout.sequence_parallel)
    optimizer = AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    at = layout.coordinates(dist.get_rank())["dp"] if dist.is_initialized() else 0
    tokens, targets = (each.chunk(layout.dp)[at].to(device_here()) for each in text(config))
    count = targets_of_all_ranks(targets, groups["dp-cp"])
    for step in range(steps):
        loss = model(tokens, targets, reduction="sum", label_smoothing=0.1, z_loss=0.01, step=step) / count
        optimizer.zero_grad()
        loss.backward()
        gradients.sum_()
        found.norms.append(float(gradients.clip_(0.5)))
        found.gradients.append(copied(model, gradients=True))
        found.losses.append(float(start_sum(loss.detach().clone(), groups["dp-cp"])()))
        optimizer.step()
    found.parameters = copied(model)
    return found


@cache
def references() -> dict[str, Trained]:
    """The results of one process."""
    return {kind: trained(kind, Layout(), Layout().process_groups(), recompute=False) for kind in CONFIGS}


def differences(found: Trained, expected: Trained, model: Gpt) -> dict[str, float]:
    """The largest difference of each kind, between this rank's part and the same part of the whole model."""
    records, parameters = shards_of(model), dict(model.named_parameters())

    def largest(ours: Tensors, whole: Tensors) -> float:
        assert ours.keys() == whole.keys()
        held = {name: shard_here(parameters[name], records.get(name)) for name in ours}
        return max(float((ours[name] - held[name].of(whole[name])).abs().sum()) for name in ours)

    return {
        "initial": largest(found.initial, expected.initial),
        "loss": max(abs(a - b) for a, b in zip(found.losses, expected.losses, strict=False)),
        "norm": max(abs(a - b) for a, b in zip(found.norms, expected.norms, strict=False)),
        "gradient": max(map(largest, found.gradients, expected.gradients)),
        "parameter": largest(found.parameters, expected.parameters) if len(found.losses) == STEPS else 0.0,
    }


def all_differences(layout: Layout, expected: dict[str, Trained]) -> dict[str, dict[str, float]]:
    """Differences by kind on this rank. The cases are recomputed in different ways, or not at all."""
    groups = layout.process_groups()
    return {
        kind: differences(
            trained(kind, layout, groups, RECOMPUTED.get(kind, False)), expected[kind], built(config, layout, groups)
        )
        for kind, config in CONFIGS.items()
    }


# ---- the law, and faults -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", LAYOUTS)
def test_training_is_that_of_one_process(world: int, on_ranks: Run) -> None:
    for found in on_ranks(world, all_differences, LAYOUTS[world], references()):
        for kind in CONFIGS:
            assert found[kind]["initial"] == 0, kind
            assert max(found[kind].values()) < CLOSE, (kind, found[kind])


def averaged(self: Any, factor: float) -> None:
    """The fault of PyTorch's default: the mean over the data ranks."""


def of_own_rows(self: ModelGradients) -> Any:
    return start_sum(torch.stack([part.square().sum() for part in self._counted()]).sum(), self.tensor)().sqrt()


def by_local_rows(parameter: Tensor, shard: Shard | None) -> Shard:
    """The fault that every rank draws its rows as if they were the first rows of the tensor."""
    held = shard_here(parameter, shard)
    return Shard(tuple(replace(piece, box=replace(piece.box, start=(0,) * parameter.dim())) for piece in held.pieces))


FAULTS: dict[str, tuple[str, Callable[[], Any]]] = {
    "gradients are averaged": ("gradient", lambda: patch.object(FSDPModule, "set_gradient_divide_factor", averaged)),
    "the norm is that of a rank's rows": ("norm", lambda: patch.object(ModelGradients, "norm", of_own_rows)),
    "initial values by the place in a rank's rows": (
        "initial", lambda: patch.object(sharded_data, "shard_here", by_local_rows),
    ),
}  # fmt: skip


def shown(expected: Trained) -> dict[str, float]:
    """The difference that each fault makes on this rank."""
    layout = LAYOUTS[2]
    groups = layout.process_groups()
    parts, found = built(GPT, layout, groups), {}
    for name, (shown_by, put_in) in FAULTS.items():
        with put_in():
            made = trained("tied gpt", layout, groups, recompute=False, steps=1)
        found[name] = differences(made, expected, parts)[shown_by]
    return found


def test_faults_are_found(on_ranks: Run) -> None:
    of_ranks = on_ranks(2, shown, references()["tied gpt"])
    for name in FAULTS:
        assert max(found[name] for found in of_ranks) > FAR, name


# ---- places of the tensors ---------------------------------------------------------------------------------------


def held(config: GptConfig) -> tuple[int, int, int, list[bool], bool]:
    """(elements that were filled; elements of all parameters on this rank; of the whole model; which blocks keep their
    parameters after forward; whether a gathered weight splits into the same parts)."""
    layout, sizes, fill = Layout(2), list[int](), gpt_layouts.Stream.normal_
    groups = layout.process_groups()

    def watched(self: Any, tensor: Tensor, *rest: Any) -> Tensor:
        sizes.append(0 if tensor.is_meta else tensor.numel())
        return fill(self, tensor, *rest)

    with patch.object(gpt_layouts.Stream, "normal_", watched):
        model = fully_sharded_gpt(config, layout, groups, seed=SEED)
    weight = model.layers["0"].mlp.up.weight
    again = torch.equal(local_of(part_like(weight, weight.detach().full_tensor())), local_of(weight))
    parameters = list(model.parameters())
    here = sum(local_of(parameter).numel() for parameter in parameters)
    model(*text(config))
    kept = [not isinstance(block.mlp.up.weight, DTensor) for block in model.layers.values()]
    return sum(sizes), here, sum(parameter.numel() for parameter in parameters), kept, again


@both
def test_a_rank_holds_its_rows_and_gathers_block_by_block(kind: str, on_ranks: Run) -> None:
    config = replace(CONFIGS[kind], vocabulary=64)
    whole = dict(parallel_gpt(config, seed=SEED).named_parameters())
    elements = sum(parameter.numel() for parameter in whole.values())
    drawn = sum(parameter.numel() for parameter in whole.values() if parameter.dim() > 1)
    for filled, here, all_there, kept, again in on_ranks(2, held, config):
        assert all_there == elements
        assert here == elements // 2
        assert filled == drawn // 2
        assert kept == [False] * (config.layers - 1) + [True]
        assert again


def refused() -> list[str]:
    said = []
    for layout in (Layout(1, 2), Layout(1, 1, 2)):
        with pytest.raises(ValueError, match="ranks") as error:
            fully_sharded_gpt(GPT, layout, seed=0)
        said.append(str(error.value))
    return said


def test_without_data_ranks_there_is_nothing_to_share(on_ranks: Run) -> None:
    for said in on_ranks(2, refused):
        assert "there are no other data parallel ranks" in said[0]
        assert "has pp ranks, but this function splits a model along dp, tp and cp" in said[1]


def refused_models() -> list[str]:
    half, one = nn.Linear(2, 2).bfloat16(), nn.Linear(2, 2)
    pair = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    said = []
    for model, units, kept in (
        (nn.Sequential(half, one), [half, one], []),
        (nn.ReLU(), [], []),
        (pair, [pair], []),
        (pair, [one], []),
        (pair, [pair[0], pair[0]], []),
        (pair, [pair[0]], [pair[1]]),
    ):
        with pytest.raises(ValueError, match=r"^fully_sharded: ") as error:
            fully_sharded(model, units, Layout(dp=2).process_groups()["dp"], device_type="cpu", kept=kept)
        said.append(str(error.value))
    return said


def test_what_cannot_be_shared_is_refused(on_ranks: Run) -> None:
    expected = [
        *("got torch.bfloat16 and torch.float32", "got none", "units that are modules in the model"),
        *("units that are modules in the model", "a unit is given twice", "to contain only units"),
    ]
    for said in on_ranks(2, refused_models):
        assert all(words in text for words, text in zip(expected, said, strict=True)), said


# ---- training and checkpoints ------------------------------------------------------------------------------------

TRAINING = GptTraining(config=GPT, length=LENGTH, global_batch=8, micro_batch=2, learning_rate=0.01, clip=0.5,
                       dtype=torch.float64)  # fmt: skip
COUNTING = Tokens([np.arange(500) % 17], "counting")


def trainer(training: GptTraining, layout: Layout, fully_shard: bool) -> GptTrainer:
    groups = layout.process_groups()
    return GptTrainer(training, COUNTING, layout, groups, torch.device("cpu"), fully_shard=fully_shard)


def numbers(of: GptTrainer, steps: int) -> list[list[float]]:
    """Loss and norm of each step."""
    return [[float(number) for number in of.advance()] for _ in range(steps)]


def stepped(make: Callable[..., torch.optim.AdamW]) -> tuple[list[Tensor], list[dict[str, Any]], list[int]]:
    """This rank's parts after three steps of sharded parameters, the optimizer's state, and how often a step has raised
    each version counter. Some ranks have no row of the first; the second has no gradient in the second step."""
    torch.manual_seed(0)
    model = nn.ParameterList(torch.randn(shape, dtype=torch.float64) for shape in ((1, 3), (5, 2), (4,)))
    sharded_data.fully_sharded(model, [], dist.group.WORLD, device_type=device_here().type)
    every = list(model.parameters())
    optimizer = make([{"params": every[:2]}, {"params": every[2:], "weight_decay": 0.0}], lr=0.01, weight_decay=0.1)
    raised: list[int] = []
    for step in range(3):
        for number, each in enumerate(every):
            whole = torch.randn(each.shape, dtype=torch.float64) * 10.0**number
            each.grad = None if step == number == 1 else part_like(each, whole)
        before = [each._version for each in every]
        optimizer.step()
        raised += [int(each._version > was) for each, was in zip(every, before, strict=True)]
    states = [{name: optimizer.state[each][name] for name in ("step", "exp_avg", "exp_avg_sq")} for each in every]
    assert all(isinstance(state["exp_avg"], DTensor) and state["exp_avg"].shape == each.shape
               for state, each in zip(states, every, strict=True))  # fmt: skip
    return (
        [local_of(each.detach()) for each in every],
        [{name: local_of(value) for name, value in state.items()} for state in states],
        raised,
    )


def stepped_by_both() -> tuple[Any, Any]:
    return stepped(AdamW), stepped(torch.optim.AdamW)


def test_sharded_parameters_are_stepped_as_by_pytorch_bit_for_bit(on_ranks: Run) -> None:
    for ours, theirs in on_ranks(2, stepped_by_both):
        torch.testing.assert_close(ours[:2], theirs[:2], rtol=0, atol=0)
        assert ours[2] == theirs[2] == [1, 1, 1, 1, 0, 1, 1, 1, 1]


def saved_and_gone_on(training: GptTraining, folder: Path) -> tuple[list[list[float]], list[list[float]], int, int]:
    """(numbers of four steps; numbers of the last two steps, repeated from the checkpoint after step two; the least
    bytes that a step writes if the data ranks shard the weights; the same if each data rank has all weights)."""
    layout = LAYOUTS[4]
    first = trainer(training, layout, fully_shard=True)
    found = numbers(first, 2)
    save_training(folder, first)
    found += numbers(first, 2)
    second = trainer(training, layout, fully_shard=True)
    load_training(find_training(folder, training)[0], second)
    unshared = trainer(training, layout, fully_shard=False)
    return found, numbers(second, 2), step_cost(second).write_bytes, step_cost(unshared).write_bytes


def validated_between() -> tuple[list[float], list[bool]]:
    """(the loss of validation: as it is, with other weights, with the first ones again; whether all parameters are
    sharded after it)."""
    one = trainer(TRAINING, LAYOUTS[2], fully_shard=True)
    held_out = Validation(COUNTING, TRAINING, iters=1)
    found, sharded = [], []
    for factor in (1.0, 3.0, 1 / 3):
        with torch.no_grad():
            for parameter in one.model.parameters():
                local_of(parameter).mul_(factor)
        found.append(one.validation_loss(held_out.batches, held_out.sequences))
        sharded.append(all(isinstance(parameter, DTensor) for parameter in one.model.parameters()))
    return found, sharded


def test_a_validation_sees_weights_that_were_written_since_the_last(on_ranks: Run) -> None:
    for (first, other, again), sharded in on_ranks(2, validated_between):
        assert sharded == [True] * 3
        assert abs(other - first) > 0.01
        assert again == pytest.approx(first, abs=1e-12)


def test_a_training_goes_on_bit_for_bit_and_also_where_nothing_is_shared(on_ranks: Run, tmp_path: Path) -> None:
    training = TRAINING
    for found, again, shared, unshared in on_ranks(4, saved_and_gone_on, training, tmp_path):
        assert again == found[2:]
        assert shared == pytest.approx(unshared / 2, rel=0.01)
        np.testing.assert_allclose(
            found, numbers(trainer(training, Layout(), fully_shard=False), 4), rtol=0, atol=CLOSE
        )
    for others in on_ranks(2, gone_on_alone, training, tmp_path):
        np.testing.assert_allclose(others, found[2:], rtol=0, atol=CLOSE)


class Sums(TorchDispatchMode):
    """Counts reduce-scatters, whose sums are divided among the ranks."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace == "c10d" and "reduce_scatter" in func._opname
        return func(*args, **(kwargs or {}))


def summed(training: GptTraining) -> tuple[list[list[float]], int]:
    """Two steps of data ranks that share the model, and the number of sums in the second step."""
    of = trainer(training, LAYOUTS[2], fully_shard=True)
    found = numbers(of, 1)
    with Sums() as sums:
        found += numbers(of, 1)
    return found, sums.count


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradients_are_summed_once_a_step_where_that_is_wanted(on_ranks: Run, dtype: torch.dtype) -> None:
    """Summing once a step halves the sums of two micro-batches, and training is the same."""
    training = replace(TRAINING, dtype=dtype)
    once = replace(training, sum_once=True)
    for (often, sums), (found, fewer) in zip(on_ranks(2, summed, training), on_ranks(2, summed, once), strict=True):
        np.testing.assert_allclose(found, often, rtol=0, atol=CLOSE if dtype == torch.float64 else 1e-2)
        assert sums == 2 * fewer > 0


def gone_on_alone(training: GptTraining, folder: Path) -> list[list[float]]:
    """The steps after a checkpoint, with tensor parallel ranks only."""
    layout = Layout(1, 2, sequence_parallel=True)
    alone = trainer(training, layout, fully_shard=False)
    load_training(find_training(folder, training)[0], alone)
    return numbers(alone, 2)


def called(words: list[str]) -> tuple[int, str]:
    """The command line, in this process: (exit status, standard error)."""
    said = StringIO()
    with redirect_stdout(StringIO()), redirect_stderr(said):
        return main(words), said.getvalue()


def test_the_command_trains_so_and_refuses_where_there_are_no_data_ranks(on_ranks: Run, tmp_path: Path) -> None:
    data = tmp_path / "tokens.npy"
    np.save(data, (np.arange(400) % 31).astype(np.uint16))
    words = ["train", "gpt", "--device", "cpu", "--no-roof", "--num-layers", "2", "--hidden-size", "16",
             "--num-attention-heads", "4", "--seq-length", "8", "--vocab-size", "31", "--train-iters", "3",
             "--global-batch-size", "4", "--lr", "0.01",
             "--dtype", "bfloat16", "--dropout", "0.1", "--data-path", str(data)]  # fmt: skip
    losses = []
    for flags in (["--use-torch-fsdp2"], []):
        metrics = tmp_path / f"metrics-{len(losses)}.jsonl"
        said = on_ranks(2, called, [*words, *flags, "--metrics", str(metrics)], joined=False)
        assert said == [(0, ""), (0, "")]
        losses.append([json.loads(line)["loss"] for line in metrics.read_text().splitlines()])
    np.testing.assert_allclose(losses[0], losses[1], rtol=0, atol=0.01)
    assert losses[0][2] < losses[0][0] - 0.05
    said = on_ranks(2, called, [*words, "--use-torch-fsdp2", "--tensor-parallel-size", "2"], joined=False)
    assert [status for status, _ in said] == [2, 2]
    assert "shards the model over data and context parallel ranks" in "".join(err for _, err in said)


# ---- bfloat16 ----------------------------------------------------------------------------------------------------


# number of texts whose largest gradient errors are compared; with one, the error of a small bias would be luck
TEXTS = 4


def whole_of(tensor: Tensor) -> Tensor:
    """A sharded tensor gathered on every rank; other tensors unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def steps(kind: str, layout: Layout, groups: Mapping[str, Group], dtype: torch.dtype) -> Tensors:
    """Gradients (TEXTS, ...) of the same parameters, computed in a dtype, with one step for each text."""
    config = replace(CONFIGS[kind], dropout=0.0, attention_dropout=0.0)
    shares = {"compute_dtype": dtype} if layout.dp > 1 else {}
    model = built(config, layout, groups, **shares)
    with torch.no_grad():
        for parameter in model.parameters():
            local_of(parameter).mul_(8 if parameter.dim() > 1 else 1).copy_(local_of(parameter).bfloat16())
    if not shares:
        model.to(dtype)
    at = layout.coordinates(dist.get_rank())["dp"] if dist.is_initialized() else 0
    found: list[Tensors] = []
    for seed in range(TEXTS):
        tokens, targets = (each.chunk(layout.dp)[at].to(device_here()) for each in text(config, seed))
        total = model(tokens, targets, reduction="sum", label_smoothing=0.1)
        (total / targets_of_all_ranks(targets, groups["dp-cp"])).backward()
        ModelGradients(model, groups, sequence_parallel=layout.sequence_parallel).sum_()
        found.append({name: whole_of(p.grad).cpu().clone() for name, p in model.named_parameters()})
        model.zero_grad()
    return {name: torch.stack([each[name] for each in found]) for name in found[0]}


def in_bfloat16() -> dict[str, Tensors]:
    """The gathered gradients of data ranks that share the model, by kind."""
    layout = LAYOUTS[2]
    groups = layout.process_groups()
    return {kind: steps(kind, layout, groups, torch.bfloat16) for kind in CONFIGS}


def assert_bfloat16_is_as_accurate(of_ranks: list[dict[str, Tensors]]) -> None:
    alone = Layout().process_groups()
    for kind in CONFIGS:
        plain, exact = (steps(kind, Layout(), alone, dtype) for dtype in (torch.bfloat16, torch.float64))
        for found in of_ranks:
            for name, gradient in exact.items():
                assert found[kind][name].dtype == torch.float32
                assert_as_accurate(found[kind][name].to(torch.bfloat16), plain[name], gradient, what=name)


def test_bfloat16_is_as_accurate_as_on_one_process(on_ranks: Run) -> None:
    assert_bfloat16_is_as_accurate(on_ranks(2, in_bfloat16))


@pytest.mark.gpu
def test_on_gpus_training_is_that_of_one_process(on_ranks: Run) -> None:
    """With NCCL, float64 agrees to 1e-10, initial values have the same bits as on the CPU, and bfloat16 is within the
    gate."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for found in on_ranks(2, all_differences, LAYOUTS[2], references(), device="cuda", limit_s=240.0):
        for kind in CONFIGS:
            assert found[kind]["initial"] == 0, kind
            assert max(found[kind].values()) < CLOSE, (kind, found[kind])
    assert_bfloat16_is_as_accurate(on_ranks(2, in_bfloat16, device="cuda", limit_s=240.0))
