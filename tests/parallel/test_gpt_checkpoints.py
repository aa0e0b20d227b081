"""A training that was saved in one layout goes on in any other as if it had always been there: to 1e-10 in float64,
with dropout on; and what is saved again without a step is the same, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rooftop.errors import InputError
from rooftop.models import GptConfig
from rooftop.parallel import Layout
from rooftop.train import GptTrainer, GptTraining, Tokens, find_training, load_training, save_training

Run = Callable[..., list[Any]]
Numbers = list[list[float]]

GPT = GptConfig(vocabulary=17, layers=2, width=16, heads=8, kv_heads=8, hidden=24, positions=8, dropout=0.2,
                attention_dropout=0.1)  # fmt: skip
LLAMA = GptConfig(vocabulary=17, layers=2, width=16, heads=8, kv_heads=2, hidden=16, positions=8, norm="rms",
                  position="rope", activation="swiglu", dropout=0.2, tied=False)  # fmt: skip
CONFIGS = {"tied gpt": GPT, "llama": LLAMA}
both = pytest.mark.parametrize("kind", CONFIGS)
LAYOUTS = {
    "alone": (Layout(), False),
    "tp=2": (Layout(tp=2), False),
    "dp=2 tp=2 shared": (Layout(2, 2, sequence_parallel=True), True),
    "tp=4": (Layout(tp=4, sequence_parallel=True), False),
    "dp=2 shared": (Layout(2), True),
}
"""Of each whether data ranks share. A vocabulary of 17 is padded at 2 and 4 ranks, to 18 and 20; at 4 two ranks have
each of the llama's heads of keys."""
COUNTING = Tokens([np.arange(500) % 17], "counting")
CLOSE = 1e-10


def training_of(kind: str, dtype: torch.dtype = torch.float64) -> GptTraining:
    return GptTraining(config=CONFIGS[kind], length=8, global_batch=8, micro_batch=2, learning_rate=0.01, clip=0.5,
                       dtype=dtype)  # fmt: skip


def trainer(training: GptTraining, name: str, device: str = "cpu") -> GptTrainer:
    layout, shared = LAYOUTS[name]
    groups = layout.process_groups()
    return GptTrainer(training, COUNTING, layout, groups, torch.device(device), fully_shard=shared)


def numbers(of: GptTrainer, steps: int) -> Numbers:
    """Loss and norm of each step."""
    return [[float(number) for number in of.advance()] for _ in range(steps)]


def gone_on(training: GptTraining, name: str, folder: Path, steps: int, to: Path) -> Numbers:
    """Some steps from what is in a folder, if that is there, and saved in another."""
    one = trainer(training, name)
    if folder.exists():
        load_training(find_training(folder, training)[0], one)
    found = numbers(one, steps)
    save_training(to, one)
    return found


def tensors(folder: Path, rank: int = 0) -> dict[str, Tensor]:
    """Of the last training in a folder, weights and the optimizer's, by names."""
    part = torch.load(folder / (folder / "latest").read_text().strip() / f"tensor-{rank}.pt", weights_only=True)
    states = {f"{number} {key}": value for number, state in part["optimizer"].items() for key, value in state.items()}
    return {**part["weights"], **states}


@both
def test_a_training_goes_from_layout_to_layout(kind: str, on_ranks: Run, tmp_path: Path) -> None:
    training = training_of(kind)
    order = ["tp=2", "dp=2 tp=2 shared", "alone", "tp=4", "dp=2 shared", "tp=2"]
    expected = numbers(trainer(training, "alone"), len(order))
    for step, name in enumerate(order):
        words = (training, name, tmp_path / f"{step}", 1, tmp_path / f"{step + 1}")
        ranks = LAYOUTS[name][0].world_size
        for found in [gone_on(*words)] if ranks == 1 else on_ranks(ranks, gone_on, *words):
            np.testing.assert_allclose(found, expected[step : step + 1], rtol=0, atol=CLOSE, err_msg=f"{step}: {name}")


@both
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_there_and_back_is_the_same_bit_for_bit(kind: str, dtype: torch.dtype, on_ranks: Run, tmp_path: Path) -> None:
    training, first, last = training_of(kind, dtype), tmp_path / "alone", tmp_path / "again"
    gone_on(training, "alone", tmp_path / "none", 2, first)
    on_ranks(4, gone_on, training, "tp=4", first, 0, tmp_path / "tp=4")
    on_ranks(2, gone_on, training, "tp=2", tmp_path / "tp=4", 0, tmp_path / "tp=2")
    gone_on(training, "alone", tmp_path / "tp=2", 0, last)
    before, after = tensors(first), tensors(last)
    assert before.keys() == after.keys()
    assert len(before) > 3 * len(tensors(tmp_path / "tp=4")) / 4 > 0
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=0, atol=0, msg=name)
        assert tensor.dim() == 0 or tensor.ne(0).any(), name


def test_parts_that_are_missing_damaged_or_older_are_said(on_ranks: Run, tmp_path: Path) -> None:
    training = training_of("llama")
    on_ranks(2, gone_on, training, "tp=2", tmp_path / "none", 1, tmp_path)
    found, _ = find_training(tmp_path, training)
    part = torch.load(found / "tensor-1.pt", weights_only=True)

    def refused(match: str) -> None:
        with pytest.raises(InputError, match=match):
            load_training(found, trainer(training, "alone"))

    for key, wrong in [("shards", {}), ("shards", {"layers.0": 1}), ("weights", {}), ("optimizer", {})]:
        torch.save({**part, key: wrong}, found / "tensor-1.pt")
        refused("cannot be read as this rank's part of a training")
    torch.save({key: value for key, value in part.items() if key != "shards"}, found / "tensor-1.pt")
    refused("2 tensor parallel ranks, saved before Rooftop wrote which pieces each has: go on with as many")
    (found / "tensor-1.pt").write_bytes(b"nothing")
    refused(r"tensor-1\.pt cannot be read")
    (found / "tensor-1.pt").unlink()
    refused(r"tensor-1\.pt cannot be read as this rank's part of a training \(FileNotFoundError\)")


def test_what_no_layout_may_change_is_still_refused(on_ranks: Run, tmp_path: Path) -> None:
    training = training_of("llama")
    on_ranks(2, gone_on, training, "tp=2", tmp_path / "none", 1, tmp_path)
    with pytest.raises(InputError, match="heads is 8 there, 4 here"):
        find_training(tmp_path, replace(training, config=replace(LLAMA, heads=4)))


@pytest.mark.gpu
@both
def test_a_gpu_goes_on_with_what_two_ranks_saved(kind: str, on_ranks: Run, tmp_path: Path) -> None:
    training = training_of(kind)
    expected = numbers(trainer(training, "alone"), 3)
    on_ranks(2, gone_on, training, "tp=2", tmp_path / "none", 1, tmp_path)
    on_gpu = trainer(training, "alone", "cuda")
    load_training(find_training(tmp_path, training)[0], on_gpu)
    assert {state.device.type for states in on_gpu.optimizer.state.values() for state in states.values()} == {"cuda"}
    np.testing.assert_allclose(numbers(on_gpu, 2), expected[1:], rtol=0, atol=1e-9)
