"""A training saved in one layout continues in any other, with differences below 1e-10 in float64 and with dropout. If
the training is saved again without a step, the values are equal bit for bit."""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as ShardedAlong

from rooftop.errors import InputError
from rooftop.models import GptConfig
from rooftop.parallel import Layout, Shard, shards_of
from rooftop.train import (
    GptTrainer,
    GptTraining,
    Saver,
    Tokens,
    find_training,
    load_training,
    run_steps,
    save_training,
)
from rooftop.train.checkpoints.distributed_reader import CheckpointReader
from rooftop.train.checkpoints.saved_tensors import whole_tensor
from rooftop.train.checkpoints.training_records import plain_training, read_record
from rooftop.train.checkpoints.trainings import open_tensors
from rooftop.train.stopping import stop_on_sigterm

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
    "dp=2": (Layout(2), False),
    "dp=2 tp=2": (Layout(2, 2), False),
    "cp=2 tp=2": (Layout(cp=2, tp=2), False),
    "cp=2 shared": (Layout(cp=2), True),
    "pp=2": (Layout(pp=2), False),
    "pp=2 tp=2": (Layout(pp=2, tp=2), False),
    "pp=2 dp=2 shared": (Layout(pp=2, dp=2), True),
    "dp=2 tp=2 pp=2": (Layout(dp=2, tp=2, pp=2), False),
    "tp=4 cp=2": (Layout(tp=4, cp=2), False),
}
"""Layouts, and whether their data ranks share the model. With pp=2 the first and the last stage both have a tied
embedding. A vocabulary of 17 is padded to 18 with 2 ranks and to 20 with 4; with 4 ranks, each of the llama's heads of
keys is on two ranks."""
COUNTING = Tokens([np.arange(500) % 17], "counting")
CLOSE = 1e-10


def training_of(kind: str, dtype: torch.dtype = torch.float64) -> GptTraining:
    return GptTraining(config=CONFIGS[kind], length=8, global_batch=8, micro_batch=4, learning_rate=0.01, clip=0.5,
                       dtype=dtype)  # fmt: skip


def trainer(training: GptTraining, name: str, device: str = "cpu") -> GptTrainer:
    layout, shared = LAYOUTS[name]
    groups = layout.process_groups()
    return GptTrainer(training, COUNTING, layout, groups, torch.device(device), fully_shard=shared)


def numbers(of: GptTrainer, steps: int) -> Numbers:
    """Loss and norm of each step."""
    return [[float(number) for number in of.advance()] for _ in range(steps)]


def gone_on(training: GptTraining, name: str, folder: Path, steps: int, to: Path) -> Numbers:
    """Some steps that continue from a folder, if given, and are saved in another folder."""
    one = trainer(training, name)
    if folder.exists():
        load_training(find_training(folder, training)[0], one)
    found = numbers(one, steps)
    save_training(to, one)
    return found


def tensors(folder: Path) -> dict[str, Tensor]:
    """Tensors by name, of weights and optimizer, from the last training in a folder or from the folder of a step."""
    saved = open_tensors(read_record(folder))
    return {name: whole_tensor(saved, name) for name in saved.entries}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, msg=name)


@both
def test_a_training_goes_from_layout_to_layout(kind: str, on_ranks: Run, tmp_path: Path) -> None:
    training = training_of(kind)
    order = ["pp=2 tp=2", "dp=2 tp=2 shared", "alone", "cp=2 shared", "tp=4", "pp=2 dp=2 shared", "cp=2 tp=2"]
    expected = numbers(trainer(training, "alone"), len(order))
    for step, name in enumerate(order):
        words = (training, name, tmp_path / f"{step}", 1, tmp_path / f"{step + 1}")
        ranks = LAYOUTS[name][0].world_size
        for found in [gone_on(*words)] if ranks == 1 else on_ranks(ranks, gone_on, *words):
            np.testing.assert_allclose(found, expected[step : step + 1], rtol=0, atol=CLOSE, err_msg=f"{step}: {name}")


THERE = ["dp=2 tp=2 pp=2", "tp=4 cp=2", "dp=2 shared", "alone", "pp=2 dp=2 shared"]
BACK = ["pp=2 dp=2 shared", "dp=2 tp=2 shared", "cp=2 shared", "dp=2", "dp=2 tp=2 pp=2"]


@pytest.mark.parametrize(
    ("kind", "dtype", "names"), [("llama", torch.bfloat16, THERE), ("tied gpt", torch.float64, BACK)]
)
def test_there_and_back_is_the_same_bit_for_bit(
    kind: str, dtype: torch.dtype, names: list[str], on_ranks: Run, tmp_path: Path
) -> None:
    """Weights and moments pass through every layout. In bfloat16, the float32 values are compared."""
    training = training_of(kind, dtype)
    gone_on(training, "alone", tmp_path / "none", 2, tmp_path / "0")
    expected = tensors(tmp_path / "0")
    assert len(expected) == 4 * len(trainer(training, "alone").weights.named)  # two moments and a count of each
    assert all(tensor.ne(0).any() for tensor in expected.values())
    for number, name in enumerate(names):
        words = (training, name, tmp_path / f"{number}", 0, tmp_path / f"{number + 1}")
        ranks = LAYOUTS[name][0].world_size
        _ = [gone_on(*words)] if ranks == 1 else on_ranks(ranks, gone_on, *words)
        assert_same(tensors(tmp_path / f"{number + 1}"), expected)


def gone_on_twice(training: GptTraining, name: str, folder: Path) -> tuple[Numbers, Numbers]:
    """The second and third step, without a stop and from the checkpoint after the first step."""
    one = trainer(training, name)
    numbers(one, 1)
    save_training(folder, one)
    again = trainer(training, name)
    load_training(find_training(folder, training)[0], again)
    return numbers(one, 2), numbers(again, 2)


@pytest.mark.parametrize(
    "name",
    ["alone", "dp=2 tp=2 shared", "tp=4", "dp=2 tp=2", "cp=2 tp=2", "cp=2 shared", "pp=2 tp=2", "pp=2 dp=2 shared"],
)
def test_in_the_same_layout_losses_are_the_same_bit_for_bit(name: str, on_ranks: Run, tmp_path: Path) -> None:
    ranks = LAYOUTS[name][0].world_size
    words = (training_of("llama"), name, tmp_path)
    for whole, again in [gone_on_twice(*words)] if ranks == 1 else on_ranks(ranks, gone_on_twice, *words):
        assert again == whole


def test_ranks_share_the_writing_evenly(on_ranks: Run, tmp_path: Path) -> None:
    """The four ranks form two pairs, and the ranks of a pair hold the same tensors. Each rank writes about a quarter,
    and no byte is written twice."""
    on_ranks(4, gone_on, training_of("tied gpt"), "dp=2 tp=2", tmp_path / "none", 1, tmp_path)
    files = sorted((tmp_path / "step-00000001").glob("rank-*.safetensors"))
    contents = [sum(map(data_bytes, [file])) for file in files]
    assert len(files) == 4
    assert sum(contents) == sum(tensor.nbytes for tensor in tensors(tmp_path).values())
    assert max(contents) < 1.1 * sum(contents) / 4


def data_bytes(file: Path) -> int:
    return file.stat().st_size - 8 - int.from_bytes(file.read_bytes()[:8], "little")


# ---- format 1 ----------------------------------------------------------------------------------------------------


def records(shards: dict[str, Shard]) -> dict[str, Any]:
    """Records of format 1: for each piece the whole shape, start, size and whether it is the first; then padding."""
    return {
        name: ([(p.box.shape, p.box.start, p.box.size, p.first) for p in shard.pieces], shard.padding)
        for name, shard in shards.items()
    }


def saved_as_before(training: GptTraining, name: str, to: Path, steps: int, without_shards: bool = False) -> Numbers:
    """Some steps, saved in format 1 as written by src/rooftop/train/checkpoints.py at 4023728, and one further step."""
    one = trainer(training, name)
    numbers(one, steps)

    def whole(tensor: Tensor) -> Tensor:
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()

    states = one.optimizer.state_dict()["state"].items()
    part = {
        "step": one.step,
        "shards": records(shards_of(one.model)),
        "weights": {name: whole(weight) for name, weight in one.weights.named.items()},
        "optimizer": {number: {key: whole(value) for key, value in state.items()} for number, state in states},
    }
    if without_shards:
        del part["shards"]
    folder = to / f"step-{one.step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    if one.place["dp"] == 0:
        torch.save(part, folder / f"tensor-{one.place['tp']}.pt")
    described = {
        "format": 1,
        "step": one.step,
        "layout": {**asdict(one.layout), "words": str(one.layout)},
        "training": plain_training(training),
        "data": {"source": "counting", "tokens": 500, "fingerprint": COUNTING.fingerprint(), "text": None},
    }
    if one.rank == 0:
        (folder / "training.json").write_text(json.dumps(described, indent=1) + "\n")
        (to / "latest").write_text(f"{folder.name}\n")
    return numbers(one, 1)


def read_alone(training: GptTraining, folder: Path) -> Numbers:
    one = trainer(training, "alone")
    load_training(find_training(folder, training)[0], one)
    return numbers(one, 1)


@pytest.mark.parametrize(("kind", "name"), [("tied gpt", "alone"), ("tied gpt", "dp=2 tp=2 shared"), ("llama", "tp=4")])
def test_folders_of_format_1_are_gone_on_with(kind: str, name: str, on_ranks: Run, tmp_path: Path) -> None:
    training, (layout, _) = training_of(kind), LAYOUTS[name]
    words = (training, name, tmp_path, 1)
    expected = saved_as_before(*words) if name == "alone" else on_ranks(layout.world_size, saved_as_before, *words)[0]
    np.testing.assert_allclose(read_alone(training, tmp_path), expected, rtol=0, atol=CLOSE)
    words = (training, name, tmp_path, 1, tmp_path / "again")
    same = [gone_on(*words)] if name == "alone" else on_ranks(layout.world_size, gone_on, *words)
    assert all(found == expected for found in same)  # bit for bit in the same layout
    assert read_record(tmp_path / "again").format == 2
    assert len(tensors(tmp_path)) == len(tensors(tmp_path / "again"))


def test_format_1_without_pieces_is_gone_on_with_by_as_many_ranks_alone(on_ranks: Run, tmp_path: Path) -> None:
    training = training_of("llama")
    expected = on_ranks(4, saved_as_before, training, "tp=4", tmp_path, 1, True)
    assert on_ranks(4, gone_on, training, "tp=4", tmp_path, 1, tmp_path / "again") == expected
    with pytest.raises(
        InputError, match="4 tensor parallel ranks, in a format that does not record the pieces of each rank"
    ):
        read_alone(training, tmp_path)


def test_parts_of_format_1_that_are_missing_or_damaged_are_said(on_ranks: Run, tmp_path: Path) -> None:
    training = training_of("llama")
    on_ranks(2, saved_as_before, training, "tp=2", tmp_path, 1)
    found, _ = find_training(tmp_path, training)
    part = torch.load(found / "tensor-1.pt", weights_only=True)

    def refused(match: str) -> None:
        with pytest.raises(InputError, match=match):
            load_training(found, trainer(training, "alone"))

    for key, wrong in [("shards", {}), ("shards", {"layers.0": 1}), ("weights", {}), ("optimizer", {})]:
        torch.save({**part, key: wrong}, found / "tensor-1.pt")
        refused("cannot be read as a part of a training")
    (found / "tensor-1.pt").write_bytes(b"nothing")
    refused(r"tensor-1\.pt cannot be read")
    (found / "tensor-1.pt").unlink()
    refused(r"tensor-1\.pt cannot be read as a part of a training \(FileNotFoundError\)")


# ---- saves during the steps --------------------------------------------------------------------------------------


def saved_beside(
    training: GptTraining, name: str, folder: Path, at: int, fails: int | None
) -> tuple[str, int, Numbers]:
    """(the error, the step after which it was raised, two further steps), if the disk of one rank is full, or no disk
    is full."""
    one = trainer(training, name)
    numbers(one, at)
    saver = Saver(folder, one)
    try:
        saver.prepare()
        if one.rank == fails:
            resource.setrlimit(resource.RLIMIT_FSIZE, (200, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        saver.begin()
        found = []
        for _ in range(2 if fails is None else 200):
            found += numbers(one, 1)
            saver.after_step()
        saver.wait()
        return "", one.step, found
    except OSError as error:
        return str(error), one.step, []
    finally:
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
        )
        saver.close()


@pytest.mark.parametrize("name", ["dp=2 tp=2 shared", "dp=2"])
def test_beside_the_steps_of_ranks_what_was_there_is_saved(name: str, on_ranks: Run, tmp_path: Path) -> None:
    training, ranks = training_of("tied gpt"), LAYOUTS[name][0].world_size
    said = on_ranks(ranks, saved_beside, training, name, tmp_path, 2, None)
    on_ranks(ranks, gone_on, training, name, tmp_path / "none", 2, tmp_path / "at once")
    assert_same(tensors(tmp_path), tensors(tmp_path / "at once"))
    whole = trainer(training, "alone")
    numbers(whole, 2)
    expected = numbers(whole, 2)
    for _, step, found in said:
        assert step == 4
        np.testing.assert_allclose(found, expected, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("fails", [0, 1])
def test_a_full_disk_of_one_rank_is_said_by_all_after_the_same_step(fails: int, on_ranks: Run, tmp_path: Path) -> None:
    training = training_of("llama")
    on_ranks(2, gone_on, training, "tp=2", tmp_path / "none", 1, tmp_path)
    expected = tensors(tmp_path)
    said = on_ranks(2, saved_beside, training, "tp=2", tmp_path, 2, fails)
    assert len({(words, step) for words, step, _ in said}) == 1, said
    assert f"(rank {fails}: [Errno 27] File too large" in said[0][0]
    assert_same(tensors(tmp_path), expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001"]


def stopped(training: GptTraining, name: str, folder: Path, asked: int) -> tuple[int, int]:
    """(the step after which training stopped, the saved step), if one rank receives SIGTERM after its third step."""
    one = trainer(training, name)
    with stop_on_sigterm() as stop:
        for reports in run_steps(one, 1000, save=folder, interval=1, stop=stop):
            if one.rank == asked and reports[-1].step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
    return one.step, read_record(folder).step


@pytest.mark.parametrize("asked", [0, 1])
def test_sigterm_at_one_rank_stops_all_after_the_same_step(asked: int, on_ranks: Run, tmp_path: Path) -> None:
    said = on_ranks(2, stopped, training_of("llama"), "dp=2", tmp_path, asked)
    assert len(set(said)) == 1
    assert said[0][0] == said[0][1]
    assert 4 <= said[0][0] <= 6


def dies(training: GptTraining, folder: Path) -> None:
    """A rank ends while the others save at every step."""
    one = trainer(training, "dp=2")
    for reports in run_steps(one, 1000, save=folder, save_interval=1, interval=1):
        if one.rank == 1 and reports[-1].step == 3:
            os._exit(1)


def test_a_rank_that_is_gone_ends_the_others_and_leaves_what_was_saved(
    on_ranks: Run, ranks_failed: type[Exception], tmp_path: Path
) -> None:
    began = time.monotonic()
    with pytest.raises(ranks_failed) as raised:
        on_ranks(2, dies, training_of("llama"), tmp_path)
    assert "rank 1 of 2 is gone without an error" in raised.value.errors[0]  # type: ignore[attr-defined]
    assert time.monotonic() - began < 150
    assert 1 <= read_record(tmp_path).step <= 3
    assert all(tensor.isfinite().all() for tensor in tensors(tmp_path).values())


# ---- by torch.distributed.checkpoint -----------------------------------------------------------------------------


def read_by_pytorch(folder: Path, shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """This rank's part of each tensor: rows if their number is even, columns of others, or the whole tensor."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        even = next((dim for dim, extent in enumerate(shape) if extent % 2 == 0), None)
        placement = Replicate() if even is None else ShardedAlong(even)
        state[name] = distribute_tensor(torch.full(shape, -1.0, dtype=torch.float64), mesh, [placement])
    state["optimizer.step.head.norm.weight"] = torch.tensor(-1.0)
    dcp.load(state, storage_reader=CheckpointReader(folder))
    return {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in state.items()}


def test_pytorch_reads_what_any_layout_has_saved(on_ranks: Run, tmp_path: Path) -> None:
    on_ranks(2, gone_on, training_of("llama"), "tp=2", tmp_path / "none", 1, tmp_path)
    expected = tensors(tmp_path)
    shapes = {name: tuple(tensor.shape) for name, tensor in expected.items() if tensor.dim()}
    for found in on_ranks(2, read_by_pytorch, tmp_path, shapes):
        assert len(found) == len(shapes) + 1
        assert_same(found, {name: expected[name] for name in found})


# ---- refused checkpoints -----------------------------------------------------------------------------------------


def test_what_no_layout_may_change_is_still_refused(on_ranks: Run, tmp_path: Path) -> None:
    training = training_of("llama")
    on_ranks(2, gone_on, training, "tp=2", tmp_path / "none", 1, tmp_path)
    with pytest.raises(InputError, match="heads is 8 in the checkpoint and 4 now"):
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
