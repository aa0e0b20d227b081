"""`rooftop checkpoint` shows the contents of a checkpoint, checks that it is complete, and rewrites it bit for bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rooftop.cli.main import main
from rooftop.errors import InputError
from rooftop.models import GptConfig
from rooftop.models.gpt.weights import load_gpt
from rooftop.parallel import Layout
from rooftop.train import GptTrainer, GptTraining, Tokens, find_training, load_training, save_training
from rooftop.train.checkpoints.saved_tensors import whole_tensor
from rooftop.train.checkpoints.trained_models import load_trained_gpt
from rooftop.train.checkpoints.training_records import plain_training, read_record
from rooftop.train.checkpoints.trainings import open_tensors

LLAMA = GptConfig(vocabulary=31, layers=2, width=16, heads=4, kv_heads=2, hidden=24, positions=8, norm="rms",
                  position="rope", activation="swiglu", biases=False, tied=False)  # fmt: skip
TRAINING = GptTraining(config=LLAMA, length=8, global_batch=2, micro_batch=2, learning_rate=0.01)
COUNTING = Tokens([np.arange(500) % 31], "counting")
Said = Callable[..., tuple[int, str, str]]


def trainer() -> GptTrainer:
    return GptTrainer(TRAINING, COUNTING, Layout(), Layout().process_groups(), torch.device("cpu"))


def tensors(folder: Path) -> dict[str, Tensor]:
    saved = open_tensors(read_record(folder))
    return {name: whole_tensor(saved, name) for name in saved.entries}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, msg=name)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> GptTrainer:
    one = trainer()
    for _ in range(2):
        one.advance()
    return one


@pytest.fixture
def run(trained: GptTrainer, tmp_path: Path) -> Path:
    save_training(tmp_path / "run", trained)
    return tmp_path / "run"


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    def call(*words: object) -> tuple[int, str, str]:
        status = main(["checkpoint", *map(str, words)])
        return status, *capsys.readouterr()

    return call


# ---- inspect -----------------------------------------------------------------------------------------------------


def test_inspect_says_what_is_there(run: Path, said: Said) -> None:
    status, out, err = said("inspect", run)
    assert (status, err) == (0, "")
    for words in (
        "step-00000002 (format 2)",
        "dp=1 tp=1 pp=1 cp=1",
        f"{LLAMA.parameters:,} parameters: 2 layers, width 16, 4 heads, 2 of keys and values, vocabulary 31",
        "float32, seed 0, 2 sequences of 8 tokens a step",
        "counting, 500 tokens",
        "not compared; --verify compares them",
        "31 x 16",
        f"{31 * 16 * 4:,}",
        f"{2 * 31 * 16 * 4 + 4:,}",
    ):
        assert words in " ".join(out.split())
    assert "all bytes are as they were written" in " ".join(said("inspect", run, "--verify")[1].split())


def test_inspect_as_json_has_all_tensors_and_where_they_are(run: Path, trained: GptTrainer, said: Said) -> None:
    status, out, _ = said("inspect", run, "--verify", "--json")
    found: dict[str, Any] = json.loads(out)
    assert (status, found["step"], found["verified"], found["format"]) == (0, 2, True, 2)
    folder = run / "step-00000002"
    for name, weight in trained.weights.named.items():
        about = found["tensors"][name]
        assert (about["dtype"], about["shape"]) == ("float32", list(weight.shape))
        (piece,) = about["pieces"]
        content = (folder / piece["file"]).read_bytes()[piece["offset"] : piece["offset"] + about["bytes"]]
        torch.testing.assert_close(
            torch.frombuffer(bytearray(content), dtype=torch.float32).view(weight.shape),
            weight.detach(),
            rtol=0,
            atol=0,
        )
    assert found["files"] == {file.name: file.stat().st_size for file in folder.glob("*.safetensors")}


def test_a_changed_byte_is_named_with_its_tensor_and_file(run: Path, said: Said) -> None:
    folder = run / "step-00000002"
    about = json.loads(said("inspect", run, "--json")[1])["tensors"]["optimizer.exp_avg.layers.1.mlp.up.weight"]
    (piece,) = about["pieces"]
    content = bytearray((folder / piece["file"]).read_bytes())
    content[piece["offset"] + 5] ^= 1
    (folder / piece["file"]).write_bytes(content)
    assert said("inspect", run)[0] == 0  # the length is right
    words = "is damaged: a byte of optimizer.exp_avg.layers.1.mlp.up.weight has changed"
    for call in (("inspect", run, "--verify"), ("convert", run, "-o", run.parent / "out")):
        status, out, err = said(*call)
        assert (status, out) == (2, "")
        assert words in err
        assert "rank-00000.safetensors" in err
    assert {path.name for path in run.parent.iterdir()} == {"run"}  # nothing half-written
    assert said("export-hf", run, "-o", run.parent / "out")[0] == 0  # the export needs only the weights


def test_what_is_no_checkpoint_is_said(tmp_path: Path, said: Said) -> None:
    for verb in (["inspect"], ["convert", "-o", "out"], ["export-hf", "-o", "out"]):
        status, _, err = said(verb[0], tmp_path, *verb[1:])
        assert status == 2
        assert f"no training was saved in {tmp_path}" in err
    (tmp_path / "training.json").write_text('{"format": 9}')
    assert "has format 9, but this version of Rooftop reads 1 and 2" in said("inspect", tmp_path)[2]


def test_a_checkpoint_of_a_task_is_named_as_such(tmp_path: Path, said: Said) -> None:
    step = tmp_path / "checkpoints" / "step-00000002"
    step.mkdir(parents=True)
    (step / "training.json").write_text('{"kind": "task", "step": 2}')
    for folder in (tmp_path, step.parent, step):
        status, _, errors = said("inspect", folder)
        assert status == 2
        assert "holds the training of a task, not of a GPT" in errors
        assert f"rooftop train TASK --out {tmp_path} --resume" in errors
        with pytest.raises(InputError, match="of a task, not of a GPT"):
            find_training(folder, TRAINING)


# ---- convert -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_conversion_changes_no_bit_and_goes_on(ranks: int, run: Path, trained: GptTrainer, said: Said) -> None:
    out = run.parent / "out"
    assert said("convert", run, "-o", out, "--tensor-parallel-size", ranks)[0] == 0
    assert_same(tensors(out), tensors(run))
    assert len([*(out / "step-00000002").glob("*.safetensors")]) == ranks
    assert read_record(out).layout["tp"] == ranks
    one, other = trainer(), trainer()
    load_training(find_training(run, TRAINING)[0], one)
    load_training(find_training(out, TRAINING)[0], other)
    assert [float(one.advance()[0]) for _ in range(2)] == [float(other.advance()[0]) for _ in range(2)]


def test_a_tensor_rank_finds_what_it_holds_in_its_own_file(run: Path, said: Said) -> None:
    """Each of two pairs of ranks shares one key head, and one rank of the pair writes it."""
    out = run.parent / "out"
    said("convert", run, "-o", out, "--tensor-parallel-size", 4)
    found = json.loads(said("inspect", out, "--json")[1])["tensors"]
    down = {piece["file"]: (piece["start"], piece["size"]) for piece in found["layers.0.mlp.down.weight"]["pieces"]}
    assert down == {f"rank-{rank:05d}.safetensors": ([0, 6 * rank], [16, 6]) for rank in range(4)}
    up = [(piece["file"], piece["start"][0]) for piece in found["layers.0.mlp.up.weight"]["pieces"]]
    assert sorted(up) == sorted(
        (f"rank-{rank:05d}.safetensors", start + 6 * rank) for rank in range(4) for start in (0, 24)
    )
    vocabulary = sorted(piece["size"][0] for piece in found["head.output.weight"]["pieces"])
    assert vocabulary == [7, 8, 8, 8]  # 31, without padding


def as_before(run: Path, trained: GptTrainer) -> Path:
    """The same checkpoint, in format 1."""
    folder = run.parent / "before"
    shutil.copytree(run, folder)
    step = folder / "step-00000002"
    for file in (*step.glob("*.safetensors"), step / "index.json"):
        file.unlink()
    state = trained.optimizer.state_dict()["state"]
    part = {"step": 2, "shards": {}, "weights": dict(trained.weights.named), "optimizer": state}
    torch.save(part, step / "tensor-0.pt")
    described = {"format": 1, "step": 2, "layout": {"dp": 1, "tp": 1, "words": "dp=1 tp=1 pp=1 cp=1"}}
    (step / "training.json").write_text(json.dumps({**described, "training": plain_training(TRAINING)}))
    return folder


def test_the_older_format_is_inspected_and_converted(run: Path, trained: GptTrainer, said: Said) -> None:
    before, out = as_before(run, trained), run.parent / "out"
    assert "format 1" in said("inspect", before)[1]
    status, _, err = said("inspect", before, "--verify")
    assert status == 2
    assert "has no checksums; to add them: rooftop checkpoint convert" in err
    assert said("convert", before, "-o", out)[0] == 0
    assert_same(tensors(out), tensors(run))
    assert "all bytes are as they were written" in " ".join(said("inspect", out, "--verify")[1].split())


def test_a_wrong_place_or_layout_is_said_before_anything_is_written(run: Path, said: Said) -> None:
    out = run.parent / "out"
    for words, expected in (
        (["export-hf", run, "-o", out / "in" / "nowhere"], "there is no folder"),
        *(
            ([verb, run, "-o", path], f"cannot be written: {why}")
            for verb in ("convert", "export-hf")
            for path, why in (
                (run.parent / ("o" * 300), "no folder can be created there (File name too long); give another path"),
                ("/proc/model", "no folder can be created there (No such file or directory); give another path"),
                (run / "latest" / "model", "there is no folder"),
                ("..", "expected a new or empty folder"),
                ("/", "expected a new or empty folder"),
            )
        ),
        (["convert", run, "-o", run], "already exists: give a new or empty folder"),
        (["export-hf", run, "-o", run], "already exists: give a new or empty folder"),
        (["convert", run, "-o", out / "in" / "nowhere"], "there is no folder"),
        (["convert", run, "-o", out, "--tensor-parallel-size", 3], "heads=4 is not divisible by tp=3"),
    ):
        status, _, err = said(*words)
        assert status == 2
        assert expected in err
    assert {path.name for path in run.parent.iterdir()} == {"run"}


# ---- export ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_is_what_transformers_and_generate_load(
    dtype: str, run: Path, said: Said, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("safetensors")
    out = run.parent / "model"
    status, words, _ = said("export-hf", run, "-o", out, "--dtype", dtype)
    assert (status, words) == (0, f"{LLAMA.parameters:,} parameters of step 2, {dtype}: {out}\n")
    expected = load_trained_gpt(run, dtype=getattr(torch, dtype)).state_dict()
    assert_same(load_gpt(out, dtype=getattr(torch, dtype)).state_dict(), expected)
    generate = ["generate", "--device", "cpu", "--no-roof", "--prompt", "\1\2", "--bytes", "--max-new-tokens", "3"]
    texts = []
    for weights in (run, out):
        assert main([*generate, "--dtype", "fp32", "--json", "-", "--weights", str(weights)]) == 0
        texts.append(json.loads(capsys.readouterr().out)["texts"][0]["tokens"])
    assert dtype == "bfloat16" or texts[0] == texts[1]
    assert len(texts[1]) == 3
