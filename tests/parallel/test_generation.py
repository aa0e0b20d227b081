"""Tensor parallel ranks generate the tokens of one process, greedy and drawn, the same on all ranks. Each rank has its
part of the weights and of the cache. `rooftop generate` prints only on the first rank."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from dataclasses import replace
from itertools import permutations, takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rooftop.cli import generate as verb
from rooftop.cli.main import main
from rooftop.hardware import ceilings_of
from rooftop.kernels.norms.rank_sums import norm_of_rank_sum_reference
from rooftop.models import Gpt, GptConfig, generate
from rooftop.models.gpt import generation as generation_module
from rooftop.models.gpt.generation import Generation, step_cost
from rooftop.models.gpt.sampling import Sampling, choose, choose_on_ranks
from rooftop.models.gpt.weights import empty_gpt, save_gpt
from rooftop.models.weights.safetensors_files import TensorFiles
from rooftop.nn import RMSNorm
from rooftop.parallel import Layout, shards_of
from rooftop.parallel.exchanges import start_gather
from rooftop.parallel.norm_sums import NormSums
from rooftop.train.checkpoints.trainings import save_training
from rooftop.train.gpt.trainer import GptTrainer
from rooftop.train.gpt.training import GptTraining
from rooftop.train.tokens.tokens import Tokens

Run = Callable[..., list[Any]]

GPT = GptConfig(vocabulary=97, layers=2, width=24, heads=4, kv_heads=4, hidden=40, positions=40)
LLAMA = GptConfig(vocabulary=127, layers=2, width=24, heads=4, kv_heads=2, hidden=40, positions=40, norm="rms",
                  position="rope", activation="swiglu", biases=False, tied=False)  # fmt: skip
CONFIGS = {
    "gpt": GPT,
    "gpt untied": replace(GPT, vocabulary=17, tied=False),
    "llama": LLAMA,
    "llama of one head of keys": replace(LLAMA, kv_heads=1, tied=True),
    "wide heads, norms and a window": replace(
        LLAMA, vocabulary=9, head_size=10, head_norms=True, qkv_biases=True, window=5, window_layers=(1,)
    ),
}
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_k": 12, "top_p": 0.9, "seed": 3}
LENGTHS, NEW = [7, 1, 19, 33], 6
EVERYWHERE = ("--max-new-tokens", "6", "--device", "cpu")
DRAWN = ("--temperature", 0.8, "--seed", 2)


def whole(config: GptConfig, dtype: torch.dtype = torch.float64) -> Gpt:
    """A model whose text does not repeat itself, with the same values on each rank."""
    model, generator = Gpt(config, dtype=dtype).eval(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                deviation = 0.5 if "embedding" in name else parameter.shape[1] ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * deviation)
            else:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def part_of(model: Gpt, device: str = "cpu") -> Gpt:
    """This rank's part of a model."""
    part = empty_gpt(model.config, dtype=next(model.parameters()).dtype, group=dist.group.WORLD, device=device)
    shards = shards_of(part)
    with torch.no_grad():
        for name, parameter in part.named_parameters():
            value = model.get_parameter(name)
            parameter.copy_(shards[name].of(value) if name in shards else value)
    return part.eval()


def prompts_of(config: GptConfig) -> list[list[int]]:
    made = torch.Generator().manual_seed(1)
    return [torch.randint(config.vocabulary, (length,), generator=made).tolist() for length in LENGTHS]


# ---- tokens --------------------------------------------------------------------------------------------------------


def texts_of(model: Gpt) -> list[list[list[int]]]:
    """Greedy texts with shared rows and pages, ended by the third token of the longest prompt; and drawn texts."""
    prompts = prompts_of(model.config)
    stop = generate(model, prompts[3:], 3)[0][2]
    return [generate(model, prompts, NEW, batch=2, page=4, stop=[stop]), generate(model, prompts, NEW, **SAMPLED)]


def texts_on_ranks(kinds: list[str], dtype: torch.dtype) -> dict[str, list[list[list[int]]]]:
    return {kind: texts_of(part_of(whole(CONFIGS[kind], dtype))) for kind in kinds}


@pytest.mark.parametrize(
    ("ranks", "dtype", "kinds"),
    [(2, torch.float32, list(CONFIGS)[:4]), (4, torch.float64, list(CONFIGS)[3:])],
    ids=["2 ranks", "4 ranks"],
)
def test_tokens_are_those_of_one_process(ranks: int, dtype: torch.dtype, kinds: list[str], on_ranks: Run) -> None:
    expected = {kind: texts_of(whole(CONFIGS[kind], dtype)) for kind in kinds}
    for greedy, drawn in expected.values():
        assert len(greedy[3]) <= 3
        assert max(map(len, greedy)) > 3
        assert greedy[0] != drawn[0]
    for found in on_ranks(ranks, texts_on_ranks, kinds, dtype):
        assert found == expected


class GatheredSums(NormSums):
    """Norm sums in PyTorch and gloo, which are counted."""

    calls = 0

    def summed_and_normed(
        self, norm: nn.Module, x: Tensor | None, part: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        GatheredSums.calls += 1
        parts = list(start_gather(part[None], 0, dist.group.WORLD)())
        rms, shift = isinstance(norm, RMSNorm), getattr(norm, "bias", None)
        normed, total = norm_of_rank_sum_reference(
            parts,
            x,
            norm.weight,
            shift,
            norm.eps,
            input_bias=bias,
            rms=rms,  # type: ignore[arg-type]
        )
        return total, normed


def texts_with_norm_sums(kinds: list[str]) -> dict[str, tuple[list[list[int]], bool, int, int]]:
    """For each kind of model: its texts, whether it uses norm sums, and the numbers of calls and steps."""
    found = {}
    for kind in kinds:
        model = part_of(whole(CONFIGS[kind]))
        generation = Generation(model, prompts_of(model.config), NEW)
        generation._sums, GatheredSums.calls = GatheredSums(), 0
        new: list[list[int]] = [[] for _ in LENGTHS]
        for index, token in generation:
            new[index].append(token)
        found[kind] = new, model.takes_norm_sums(), GatheredSums.calls, len(generation.steps)
    return found


@pytest.mark.parametrize(
    ("ranks", "kinds"), [(2, list(CONFIGS)[:4]), (4, list(CONFIGS)[3:])], ids=["2 ranks", "4 ranks"]
)
def test_each_norm_of_a_step_may_compute_the_sum_before_it(ranks: int, kinds: list[str], on_ranks: Run) -> None:
    """Sums come after the embedding, the attentions and the MLPs. Models have learned positions, biases, layer norm and
    RMS norm."""
    expected = {kind: generate(whole(CONFIGS[kind]), prompts_of(CONFIGS[kind]), NEW) for kind in kinds}
    for found in on_ranks(ranks, texts_with_norm_sums, kinds):
        for kind, (texts, takes, calls, steps) in found.items():
            assert texts == expected[kind]
            assert takes
            assert calls == steps * (2 * CONFIGS[kind].layers + 1)


def takes_norm_sums(change: str) -> bool:
    model = part_of(whole(LLAMA))
    block = model.layers["1"]
    if change == "hook":
        block.attention.register_forward_hook(lambda *_: None)
    elif change == "hook of a norm":
        model.head.norm.register_forward_pre_hook(lambda *_: None)  # type: ignore[union-attr]
    elif change == "forward":
        block.mlp.forward = lambda x: x  # type: ignore[method-assign]
    elif change == "layer":
        block.mlp.down = nn.Linear(20, 24)
    return model.takes_norm_sums()


@pytest.mark.parametrize("change", ["hook", "hook of a norm", "forward", "layer"])
def test_hooks_and_other_parts_are_left_to_the_modules(change: str, on_ranks: Run) -> None:
    assert on_ranks(2, takes_norm_sums, change) == [False, False]
    assert on_ranks(2, takes_norm_sums, "nothing") == [True, True]


def logits_of(vocabulary: int) -> Tensor:
    """Logits with few different values, so that many tie for the maximum; rows in which no token can be chosen; and
    rows in which a few tied maxima are at any place."""
    logits = torch.randint(3, (40, vocabulary), generator=torch.Generator().manual_seed(vocabulary)).double()
    logits[0] = -torch.inf
    logits[1, vocabulary // 2] = torch.nan
    logits[2] = -torch.inf
    logits[2, -1] = -5.0
    logits[3] = -1.0  # less than padding
    logits[4] = torch.inf
    return logits.bfloat16() if vocabulary % 2 else logits


CHOICES = [Sampling(), Sampling(0.7, seed=1), Sampling(1.0, top_k=4), Sampling(2.0, top_p=0.8)]


def chosen_on_ranks(vocabulary: int) -> list[Tensor]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    columns = -(-vocabulary // ranks)
    padded = torch.nn.functional.pad(logits_of(vocabulary), (0, ranks * columns - vocabulary))
    own = padded[:, rank * columns : (rank + 1) * columns]
    return [choose_on_ranks(own, numbers(), each, vocabulary, dist.group.WORLD) for each in CHOICES]


def numbers() -> Tensor:
    return torch.rand(40, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("vocabulary", [17, 9, 12])
def test_choices_are_those_of_the_whole_logits(vocabulary: int, on_ranks: Run) -> None:
    """If the vocabulary has nine tokens, the last of four ranks has none."""
    expected = [choose(logits_of(vocabulary), numbers(), each) for each in CHOICES]
    assert expected[0][:5].tolist() == [-1, -1, vocabulary - 1, 0, -1]
    for found in on_ranks(4, chosen_on_ranks, vocabulary):
        for choice, tokens in zip(CHOICES, found, strict=True):
            assert torch.equal(tokens, expected[CHOICES.index(choice)]), choice


def drawn_otherwise() -> list[list[int]]:
    """The rank's sums differ in their last bits."""

    def other(logits: Tensor, numbers: Tensor, sampling: Sampling) -> Tensor:
        return (choose(logits, numbers, sampling) + dist.get_rank()) % logits.shape[1]

    with patch("rooftop.models.gpt.sampling.choose", other):
        return generate(part_of(whole(LLAMA)), prompts_of(LLAMA), NEW, **SAMPLED)


def test_ranks_go_on_with_the_same_tokens_whatever_they_draw(on_ranks: Run) -> None:
    expected = generate(whole(LLAMA), prompts_of(LLAMA), NEW, **SAMPLED)
    assert on_ranks(2, drawn_otherwise) == [expected, expected]


def failed_alike() -> str:
    broken = whole(LLAMA)
    with torch.no_grad():
        broken.head.output.weight[0] = torch.nan  # this row is on the first rank
    with pytest.raises(FloatingPointError) as error:
        generate(part_of(broken), prompts_of(LLAMA), NEW)
    return str(error.value)


def test_no_numbers_on_one_rank_are_an_error_on_all(on_ranks: Run) -> None:
    (said,) = set(on_ranks(2, failed_alike))
    assert "the model gives NaN or infinity" in said


# ---- memory and cost -----------------------------------------------------------------------------------------------


def held_on_ranks() -> dict[str, tuple[int, int, float]]:
    """For each kind: elements of weights, bytes of a page, and bytes of the steps if a byte takes a millisecond."""
    found = {}
    for kind, config in CONFIGS.items():
        model = part_of(whole(config, torch.float32))
        generation = Generation(model, prompts_of(config)[:1], 3)
        list(generation)
        assert generation.ranks == dist.get_world_size()
        elements = sum(parameter.numel() for parameter in model.parameters())
        with patch("rooftop.models.gpt.generation.roof", lambda cost, _: SimpleNamespace(ms=cost.read_bytes)):
            found[kind] = elements, generation.cache.page_bytes, generation.decode_roof_ms(H200)
    return found


H200 = ceilings_of("h200")


def test_each_rank_has_its_part_of_weights_and_cache(on_ranks: Run) -> None:
    """Each rank has one key head. The roof counts the rank's own weights, but only those rows of embeddings that are
    looked up."""
    for held in on_ranks(4, held_on_ranks):
        for kind, config in CONFIGS.items():
            elements, page_bytes, read_bytes = held[kind]
            assert elements == config.of_rank(4).parameters, kind
            assert page_bytes == 2 * 2 * config.head_features * 16 * 4
            tables = (1 if config.tied else 2) * -(-config.vocabulary // 4)  # the head's part is read completely
            tables += config.positions if config.position == "learned" else 0
            looked_up = (2 if config.position == "learned" else 1) - tables + -(-config.vocabulary // 4)
            before = [7 + 8, (7 + 8) if config.window is None else (5 - 1) * 2]  # positions read in two steps, by layer
            cache = 2 * config.head_features * (before[0] + before[1])
            assert read_bytes == 4 * (2 * (elements + looked_up * config.width) + cache), kind
    assert CONFIGS["llama"].of_rank(1) is CONFIGS["llama"]
    config = replace(LLAMA, width=4096, heads=32, kv_heads=8, hidden=11008, vocabulary=32000)
    whole_bytes, part_bytes = (
        step_cost(each, 1, 30, torch.bfloat16).read_bytes for each in (config, config.of_rank(2))
    )
    norms_and_looked_up = 2 * 4096 * (2 * config.layers + 1 + 1)
    assert part_bytes - norms_and_looked_up == (whole_bytes - norms_and_looked_up) / 2


# ---- the verb ------------------------------------------------------------------------------------------------------


def called(*words: object, prompts: tuple[str, ...] = ()) -> tuple[int, str, str, int]:
    """The verb on this rank: status, output, and number of elements read from files."""
    out, err, read = io.StringIO(), io.StringIO(), [0]
    part = TensorFiles.part

    def counted(self: TensorFiles, *where: Any) -> Tensor:
        found = part(self, *where)
        read[0] += found.numel()
        return found

    own = ["--prompt", prompts[verb.launched().rank]] if prompts else []
    ceilings = patch.object(verb, "measure_ceilings", lambda *_, **__: H200)
    with patch.object(TensorFiles, "part", counted), ceilings, redirect_stdout(out), redirect_stderr(err):
        status = main(["generate", *map(str, words), *own, *EVERYWHERE])
    return status, out.getvalue(), err.getvalue(), read[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("safetensors")
    path = tmp_path_factory.mktemp("weights") / "llama"
    save_gpt(whole(replace(LLAMA, vocabulary=256), torch.float32), path)
    return path


def test_the_first_rank_tells_the_text_of_one_process(folder: Path, on_ranks: Run) -> None:
    words = ("--weights", folder, "--bytes", "--prompt", "Hello you", "--prompt", "b", *DRAWN)
    status, expected, _, all_elements = called(*words)
    assert status == 0
    first, second = on_ranks(2, called, *words, "--tensor-parallel-size", 2, joined=False)
    assert first[:2] == (0, expected)
    assert second[:3] == (0, "", "")
    for line in ("float32 on 2 x cpu; cache of", "bytes on each", "% of roof", "each rank reads its part"):
        assert line in first[2]
    assert first[3] == second[3] < 0.6 * all_elements


def test_json_of_ranks(folder: Path, on_ranks: Run) -> None:
    words = ("--weights", folder, "--bytes", "--prompt", "Hello you", "--json", "-")
    alone = json.loads(called(*words)[1])
    (status, out, err, _), *others = on_ranks(4, called, *words, "--tensor-parallel-size", 4, joined=False)
    told = json.loads(out)
    assert (status, err, [each[:3] for each in others]) == (0, "", [(0, "", "")] * 3)
    assert told["texts"] == alone["texts"]
    assert told["figures"]["tensor_parallel_size"] == 4
    assert (
        told["figures"]["cache_bytes"] == alone["figures"]["cache_bytes"] / 2
    )  # each of the two key heads is on two of the four ranks


def test_a_training_is_read_by_other_ranks_than_saved_it(tmp_path: Path, on_ranks: Run) -> None:
    tokens = Tokens([np.frombuffer(b"The roof of a house. " * 20, np.uint8)], "text", text=True)
    training = GptTraining(
        config=replace(GPT, vocabulary=257), length=16, global_batch=2, micro_batch=2, learning_rate=0.01
    )
    trainer = GptTrainer(training, tokens, Layout(), Layout().process_groups(), torch.device("cpu"))
    trainer.advance()
    save_training(tmp_path / "run", trainer)
    words = ("--weights", tmp_path / "run", "--prompt", "The roof", "--no-roof", *DRAWN)
    expected = called(*words)[:2]
    assert expected[0] == 0
    assert on_ranks(2, called, *words, "--tensor-parallel-size", 2, joined=False)[0][:2] == expected


def test_an_untrained_model_has_the_values_of_one_process(on_ranks: Run) -> None:
    assert on_ranks(2, untrained, joined=False)[0] == untrained()


def untrained() -> tuple[int, str]:
    small = replace(LLAMA, vocabulary=257, heads=12, kv_heads=1, head_size=2)
    words = ("--model", "llama-1b", "--random-weights", 5, "--prompt", "The roof", "--no-roof", *DRAWN)
    with patch.dict(verb.PRESETS, {"llama-1b": small}):
        return called(*words, "--tensor-parallel-size", verb.launched().size)[:2]


def test_ranks_with_other_prompts_do_not_start(folder: Path, on_ranks: Run) -> None:
    words = ("--weights", folder, "--bytes", "--tensor-parallel-size", 2)
    found = on_ranks(2, called_with_own_prompts, *words, joined=False)
    assert [each[0] for each in found] == [1, 1]
    assert (
        "the ranks have different settings: prompts is [[97]] at rank 0, [[98]] at rank 1" in found[0][2] + found[1][2]
    )


def called_with_own_prompts(*words: object) -> tuple[int, str, str, int]:
    return called(*words, prompts=("a", "b"))


# ---- on GPUs -------------------------------------------------------------------------------------------------------

ON_GPUS = {
    kind: replace(config, width=64, head_size=None if config.head_size is None else 32)
    for kind, config in CONFIGS.items()
}
KEPT: list[Generation] = []
"""Generations that stay referenced, together with their graphs. The graphs must be freed before the group
nevertheless."""


def all_reach_each_other(gpus: int) -> bool:
    """Whether each of the first GPUs can access the memory of the others."""
    return all(torch.cuda.can_device_access_peer(*pair) for pair in permutations(range(gpus), 2))


def texts_on_gpus(dtype: torch.dtype, options: dict[str, Any]) -> dict[tuple[str, str], list[list[int]]]:
    """Texts by single launches, by replays of a graph whose rows are reused for other texts, and with sums by NCCL."""
    found = {}
    by_nccl = patch.object(generation_module, "norm_sums", lambda *_: NormSums(reason="the test asks for NCCL"))
    for kind, config in ON_GPUS.items():
        model = part_of(whole(config, dtype), f"cuda:{torch.cuda.current_device()}")
        for way in ("launched", "replayed", "by NCCL"):
            generation = Generation(model, prompts_of(config), NEW, Sampling(**options), batch=2)
            KEPT.append(generation)
            new: list[list[int]] = [[] for _ in LENGTHS]
            launched = patch.object(Generation, "_captured_step", lambda self: self._decode)
            with {"launched": launched, "replayed": nullcontext(), "by NCCL": by_nccl}[way]:
                for index, token in generation:
                    new[index].append(token)
            found[kind, way] = new
            reached = all_reach_each_other(dist.get_world_size())
            expected = "the test asks for NCCL" if way == "by NCCL" else "" if reached else None
            assert expected in (None, generation.norm_sums_refused), generation.norm_sums_refused
    return found


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "options", "margin"),
    [(torch.float32, {}, 1e-4), (torch.float32, SAMPLED, 0.0), (torch.bfloat16, {}, 0.2)],
    ids=["float32", "float32 drawn", "bfloat16"],
)
def test_on_gpus_tokens_are_those_of_one_process(
    dtype: torch.dtype, options: dict[str, Any], margin: float, on_ranks: Run
) -> None:
    """Texts are compared up to the first token that depends on rounding: two logits there are closer than the
    margin."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    first, second = on_ranks(2, texts_on_gpus, dtype, options, device="cuda", limit_s=240.0)
    assert first == second
    for (kind, _), texts in first.items():
        model = whole(ON_GPUS[kind], dtype).cuda()
        prompts = prompts_of(model.config)
        alone = generate(model, prompts, NEW, **options)
        for prompt, new, expected in zip(prompts, texts, alone, strict=True):
            assert_same_but_for_ties(model, prompt, new, expected, margin)


def assert_same_but_for_ties(model: Gpt, prompt: list[int], new: list[int], expected: list[int], margin: float) -> None:
    assert len(new) == len(expected)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(new, expected, strict=True)))
    if same < len(new):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + new[:same]], device="cuda"))[0, -1].double()
        assert abs(logits[new[same]] - logits[expected[same]]) < margin, (same, new, expected)
