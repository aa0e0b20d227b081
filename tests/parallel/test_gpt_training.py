"""`python -m rooftop.train gpt` on several ranks: every layout trains like one process to 1e-10, with dropout. A
continued training is equal bit for bit. Every rank checks for errors itself, so errors are reported once and no rank
waits."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rooftop.cli.main import main
from rooftop.errors import WeightsError
from rooftop.models import Gpt, GptConfig
from rooftop.models.gpt.weights import save_gpt
from rooftop.train import GptTrainer

Run = Callable[..., list[Any]]
Said = tuple[int, str, str]
"""Exit status, standard output and standard error."""

VOCABULARY, STEPS, CLOSE = 31, 3, 1e-10
WORDS = [
    "train", "gpt", "--device", "cpu", "--no-roof", "--log-interval", "1", "--num-layers", "2", "--hidden-size", "16",
    "--num-attention-heads", "4", "--seq-length", "8", "--vocab-size", str(VOCABULARY), "--global-batch-size", "8",
    "--lr", "0.01", "--clip-grad", "0.5", "--dropout", "0.2", "--seed", "3",
]  # fmt: skip
LAYOUTS = {
    "tp=2": (2, ["--tensor-parallel-size", "2", "--micro-batch-size", "8"]),
    "tp=2 halves": (
        2, ["--tensor-parallel-size", "2", "--sequence-parallel", "--micro-batch-size", "4", "--tp-comm-overlap"],
    ),
    "dp=2": (2, ["--micro-batch-size", "2"]),
    "dp=2 tp=2 sequence": (
        4, ["--tensor-parallel-size", "2", "--sequence-parallel", "--micro-batch-size", "2",
            "--recompute-granularity", "selective"],
    ),
    "pp=2 dp=2": (4, ["--pipeline-parallel-size", "2", "--micro-batch-size", "4"]),
    "pp=2 tp=2 sequence": (
        4, ["--pipeline-parallel-size", "2", "--pipeline-schedule", "zb-h1", "--tensor-parallel-size", "2",
            "--sequence-parallel", "--micro-batch-size", "2", "--recompute-granularity", "selective"],
    ),
    "pp=2 cp=2 shared": (
        4, ["--pipeline-parallel-size", "2", "--pipeline-schedule", "zb-h1", "--context-parallel-size", "2",
            "--use-torch-fsdp2", "--micro-batch-size", "2", "--recompute-granularity", "full"],
    ),
    "cp=2": (2, ["--context-parallel-size", "2", "--micro-batch-size", "4"]),
    "cp=2 tp=2 sequence": (
        4,
        [
            *("--context-parallel-size", "2", "--tensor-parallel-size", "2", "--sequence-parallel"),
            *("--cp-comm-type", "all_gather", "--micro-batch-size", "8", "--recompute-granularity", "selective"),
        ],
    ),
    "cp=2 dp=2 shared": (
        4, ["--context-parallel-size", "2", "--use-torch-fsdp2", "--cp-comm-type", "a2a", "--micro-batch-size", "2"],
    ),
    "cp=4": (
        4,
        [
            *("--context-parallel-size", "4", "--cp-comm-type", "a2a+p2p", "--micro-batch-size", "8"),
            *("--hierarchical-context-parallel-sizes", "2", "2"),
        ],
    ),
}  # fmt: skip
PACKED = ["--eod-token", "5", "--reset-position-ids", "--eod-mask-loss"]
"""Each token occurs about once in VOCABULARY / 2 tokens, so most sequences of eight tokens have one or two
documents."""
PACKED_LAYOUTS = {
    "pp=2 cp=2": (
        4,
        ["--pipeline-parallel-size", "2", "--context-parallel-size", "2", "--micro-batch-size", "2", "--recompute"],
    ),
    "dp=2": (2, ["--micro-batch-size", "2"]),
    "cp=2": (2, ["--context-parallel-size", "2", "--micro-batch-size", "4"]),
    "cp=2 dp=2 shared": (
        4,
        [
            *("--context-parallel-size", "2", "--use-torch-fsdp2", "--cp-comm-type", "all_gather"),
            *("--micro-batch-size", "4", "--recompute-granularity", "selective"),
        ],
    ),
    "cp=2 tp=2 sequence": (
        4,
        [
            *("--context-parallel-size", "2", "--tensor-parallel-size", "2", "--sequence-parallel"),
            *("--cp-comm-type", "a2a", "--micro-batch-size", "2"),
        ],
    ),
}


def called(words: list[str]) -> Said:
    """The command line, in this process."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main(words)
    return status, out.getvalue(), err.getvalue()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def numbers(path: Path) -> list[tuple[int, float, float]]:
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines(path)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens in which the next depends on the last, so that there is something to learn."""
    steps = np.random.default_rng(0).integers(1, 4, 400)
    path = tmp_path_factory.mktemp("data") / "tokens.npy"
    tokens = (np.cumsum(steps) % VOCABULARY).astype(np.uint16)
    np.save(path, tokens)
    np.save(path.with_name("valid.npy"), tokens[: 9 * 8 + 1])
    return path


def valid_losses(path: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["valid_loss"]) for line in lines(path) if line["valid_loss"] is not None]


def validated(data: Path) -> list[str]:
    """All nine sequences, the last of them in a batch of its own."""
    return ["--valid-data-path", str(data.with_name("valid.npy")), "--eval-interval", "2", "--eval-iters", "2"]


@pytest.fixture(scope="module")
def valid_alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, list[tuple[int, float]]]:
    """The validations of one process, with and without packed documents."""
    found = {}
    for packed in (False, True):
        path = tmp_path_factory.mktemp("valid") / "metrics.jsonl"
        words = ["--data-path", str(data), "--metrics", str(path), "--micro-batch-size", "8", "--dtype", "float64"]
        words += ["--train-iters", str(STEPS), *validated(data), *(PACKED if packed else [])]
        assert called([*WORDS, *words])[0] == 0
        found[packed] = valid_losses(path)
    return found


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float, float]]:
    """Five steps of one process, half a batch at a time."""
    path = tmp_path_factory.mktemp("alone") / "metrics.jsonl"
    words = ["--data-path", str(data), "--metrics", str(path), "--micro-batch-size", "4", "--dtype", "float64"]
    status, _, err = called([*WORDS, *words, "--train-iters", "5"])
    assert (status, err) == (0, "")
    return numbers(path)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains_as_one_process(
    name: str,
    on_ranks: Run,
    data: Path,
    alone: list[tuple[int, float, float]],
    valid_alone: dict[bool, list[tuple[int, float]]],
    tmp_path: Path,
) -> None:
    """The ranks also validate between the steps, which the training in `alone` does not."""
    ranks, layout = LAYOUTS[name]
    words = ["--data-path", str(data), "--metrics", str(tmp_path / "metrics.jsonl"), "--dtype", "float64"]
    words += validated(data)
    said: list[Said] = on_ranks(ranks, called, [*WORDS, *layout, *words, "--train-iters", str(STEPS)], joined=False)
    assert [status for status, _, _ in said] == [0] * ranks
    assert [bool(out) for _, out, _ in said] == [True] + [False] * (ranks - 1)
    assert [line for line, *_ in numbers(tmp_path / "metrics.jsonl")] == list(range(1, STEPS + 1))
    for (_, *found), (_, *expected) in zip(numbers(tmp_path / "metrics.jsonl"), alone[:STEPS], strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=CLOSE)
    for step, loss, _ in alone[:STEPS]:
        assert f"step {step}/{STEPS}  loss {loss:.6f}" in said[0][1]
    np.testing.assert_allclose(valid_losses(tmp_path / "metrics.jsonl"), valid_alone[False], rtol=0, atol=CLOSE)


def test_in_bfloat16_a_zero_bubble_trains_as_one_process(on_ranks: Run, data: Path, tmp_path: Path) -> None:
    """Deferred weight gradients also reach weights that have more bits than the model."""
    words = [*WORDS, "--data-path", str(data), "--dtype", "bfloat16", "--micro-batch-size", "2", "--train-iters", "3"]
    assert called([*words, "--metrics", str(tmp_path / "alone")])[0] == 0
    pipeline = ["--pipeline-parallel-size", "2", "--pipeline-schedule", "zb-h1"]
    said = on_ranks(2, called, [*words, *pipeline, "--metrics", str(tmp_path / "two")], joined=False)
    assert [status for status, *_ in said] == [0, 0], said
    np.testing.assert_allclose(numbers(tmp_path / "two"), numbers(tmp_path / "alone"), rtol=2e-2)
    assert "pipeline zb-h1: stages of 1, 1 layers, 4 micro-batches; ranks wait for 7.7% of a step" in said[0][1]


@pytest.fixture(scope="module")
def packed_alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float, float]]:
    """One process, a sequence at a time."""
    path = tmp_path_factory.mktemp("packed") / "metrics.jsonl"
    words = ["--data-path", str(data), "--metrics", str(path), "--micro-batch-size", "1", "--dtype", "float64"]
    status, _, err = called([*WORDS, *PACKED, *words, "--train-iters", str(STEPS)])
    assert (status, err) == (0, "")
    return numbers(path)


@pytest.mark.parametrize("name", PACKED_LAYOUTS)
def test_every_layout_trains_on_packed_documents_as_one_process(
    name: str,
    on_ranks: Run,
    data: Path,
    packed_alone: list[tuple[int, float, float]],
    valid_alone: dict[bool, list[tuple[int, float]]],
    tmp_path: Path,
) -> None:
    ranks, layout = PACKED_LAYOUTS[name]
    words = ["--data-path", str(data), "--metrics", str(tmp_path / "metrics.jsonl"), "--dtype", "float64"]
    words += validated(data)
    words = [*WORDS, *PACKED, *layout, *words, "--train-iters", str(STEPS)]
    said: list[Said] = on_ranks(ranks, called, words, joined=False)
    assert [status for status, _, _ in said] == [0] * ranks, said
    np.testing.assert_allclose(numbers(tmp_path / "metrics.jsonl"), packed_alone, rtol=0, atol=CLOSE)
    np.testing.assert_allclose(valid_losses(tmp_path / "metrics.jsonl"), valid_alone[True], rtol=0, atol=CLOSE)


@pytest.mark.parametrize("left_out", ["--eod-token", "--reset-position-ids", "--eod-mask-loss"])
def test_each_switch_of_documents_changes_the_training(
    left_out: str, data: Path, packed_alone: list[tuple[int, float, float]], tmp_path: Path
) -> None:
    path = tmp_path / "metrics.jsonl"
    packed = [word for word in PACKED if word != left_out] if left_out != "--eod-token" else []
    words = ["--data-path", str(data), "--metrics", str(path), "--micro-batch-size", "2", "--dtype", "float64"]
    assert called([*WORDS, *packed, *words, "--train-iters", "2"])[0] == 0
    assert np.abs(np.array(numbers(path)) - np.array(packed_alone[:2])).max() > 1e-5


@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_ranks_with_several_stages_validate_as_one_process(
    schedule: str, on_ranks: Run, data: Path, tmp_path: Path
) -> None:
    """Four stages on two ranks, in the order 0, 1, 0, 1 or 0, 1, 1, 0."""
    deep = [*WORDS]
    deep[deep.index("--num-layers") + 1] = "4"
    words = [*deep, "--data-path", str(data), *validated(data), "--dtype", "float64", "--micro-batch-size", "2"]
    words += ["--train-iters", "3"]
    assert called([*words, "--metrics", str(tmp_path / "alone")])[0] == 0
    pipeline = ["--pipeline-parallel-size", "2", "--pipeline-schedule", schedule, "--metrics", str(tmp_path / "two")]
    if schedule == "interleaved":
        pipeline += ["--num-layers-per-virtual-pipeline-stage", "1"]
    said = on_ranks(2, called, [*words, *pipeline], joined=False)
    assert [status for status, *_ in said] == [0, 0], said
    assert [step for step, _ in valid_losses(tmp_path / "alone")] == [2, 3]
    np.testing.assert_allclose(valid_losses(tmp_path / "two"), valid_losses(tmp_path / "alone"), rtol=0, atol=CLOSE)
    np.testing.assert_allclose(numbers(tmp_path / "two"), numbers(tmp_path / "alone"), rtol=0, atol=CLOSE)


PIPELINES = {
    "zb-h1": (2, ["--pipeline-parallel-size", "2", "--pipeline-schedule", "zb-h1", "--micro-batch-size", "2"]),
    "shared": (4, ["--pipeline-parallel-size", "2", "--use-torch-fsdp2", "--micro-batch-size", "2"]),
    "tp=2": (4, ["--pipeline-parallel-size", "2", "--tensor-parallel-size", "2", "--micro-batch-size", "4"]),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_goes_on_with_what_one_process_saved_and_the_other_way_round(
    name: str, on_ranks: Run, data: Path, alone: list[tuple[int, float, float]], tmp_path: Path
) -> None:
    """Embedding and head are tied, and are on different ranks."""
    ranks, pipeline = PIPELINES[name]
    words = [*WORDS, "--data-path", str(data), "--dtype", "float64"]
    one, folder = [*words, "--micro-batch-size", "4"], str(tmp_path / "run")
    assert called([*one, "--train-iters", "2", "--save", folder])[0] == 0
    more = ["--load", folder, "--save", folder, "--metrics", str(tmp_path / "middle")]
    said = on_ranks(ranks, called, [*words, *pipeline, *more, "--train-iters", "4"], joined=False)
    assert [status for status, *_ in said] == [0] * ranks, said
    np.testing.assert_allclose(numbers(tmp_path / "middle"), alone[2:4], rtol=0, atol=CLOSE)
    status, _, err = called([*one, "--train-iters", "5", "--load", folder, "--metrics", str(tmp_path / "end")])
    assert (status, err) == (0, "")
    np.testing.assert_allclose(numbers(tmp_path / "end"), alone[4:], rtol=0, atol=CLOSE)


def test_a_dry_run_draws_the_schedule_and_begins_nothing(data: Path, tmp_path: Path) -> None:
    words = [*WORDS, "--data-path", str(data), "--pipeline-parallel-size", "2", "--micro-batch-size", "2", "--dry-run"]
    status, out, err = called([*words, "--metrics", str(tmp_path / "metrics.jsonl")])
    assert (status, err) == (0, "")
    said = "stages of 1, 1 layers, 4 micro-batches; ranks wait for 20% of a step if all stages take the same time"
    assert out.splitlines() == [
        "7,216 parameters on 2 ranks: dp=1 tp=1 pp=2 cp=1",
        f"pipeline 1f1b: {said}",
        "rank 0  F0 F1 .  .  B0 -- F2 B1 -- F3 B2 -- .  B3 --",
        "rank 1  .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .  .",
        "idle 20.0% of 15 units; activations held of at most 2, 1 forwards",
    ]
    assert not (tmp_path / "metrics.jsonl").exists()
    status, _, err = called([*words, "--pipeline-schedule", "zbv"])
    assert status == 2
    assert "2 layers cannot be divided among 4 stages" in err


def test_a_step_without_targets_is_said(tmp_path: Path) -> None:
    np.save(tmp_path / "ends.npy", np.full(100, 5, np.uint16))
    words = [*WORDS, *PACKED, "--data-path", str(tmp_path / "ends.npy"), "--train-iters", "1"]
    status, out, err = called(words)
    assert status == 0
    assert "loss 0.000000" in out
    assert "step 1 has no targets: all its tokens are --eod-token" in err


def instead(words: list[str], change: list[str]) -> list[str]:
    """The arguments with other values of some options, each option once."""
    kept, options, dropped = list[str](), {word for word in change if word.startswith("--")}, False
    for word in words:
        if word.startswith("--"):
            dropped = word in options
        if not dropped:
            kept.append(word)
    return [*kept, *change]


@pytest.mark.parametrize("change", [["--seed", "4"], ["--dropout", "0.21"], ["--global-batch-size", "4"]])
def test_the_comparison_sees_another_seed_dropout_or_batch(
    change: list[str], data: Path, alone: list[tuple[int, float, float]], tmp_path: Path
) -> None:
    path = tmp_path / "metrics.jsonl"
    words = ["--data-path", str(data), "--metrics", str(path), "--micro-batch-size", "4", "--dtype", "float64"]
    assert called(instead([*WORDS, *words, "--train-iters", "2"], change))[0] == 0
    found, expected = np.array(numbers(path)), np.array(alone[:2])
    assert np.abs(found - expected).max() > 1e-5


def test_a_training_goes_on_bit_for_bit_in_its_layout_and_about_in_another(
    on_ranks: Run, data: Path, tmp_path: Path
) -> None:
    """In bfloat16, the saved weights and optimizer state have more bits than the weights that the model uses."""
    one, folder = [*WORDS, "--data-path", str(data), "--dtype", "bfloat16", "--micro-batch-size", "8"], tmp_path / "run"
    words = [*one, "--tensor-parallel-size", "2", "--sequence-parallel"]
    runs = {
        "whole": ["--train-iters", "4"],
        "first": ["--train-iters", "2", "--save", str(folder)],
        "second": ["--train-iters", "4", "--load", str(folder), "--save", str(folder)],
    }
    for name, more in runs.items():
        said = on_ranks(2, called, [*words, *more, "--metrics", str(tmp_path / name)], joined=False)
        assert [status for status, *_ in said] == [0, 0], said
    assert numbers(tmp_path / "first") + numbers(tmp_path / "second") == numbers(tmp_path / "whole")
    assert (folder / "latest").read_text() == "step-00000004\n"

    more = ["--train-iters", "5", "--load", str(folder), "--metrics", str(tmp_path / "alone")]
    status, out, _ = called([*one, *more])
    assert status == 0
    assert "step 5/5" in out
    on_ranks(2, called, [*words, *more[:-1], str(tmp_path / "two")], joined=False)
    np.testing.assert_allclose(numbers(tmp_path / "alone"), numbers(tmp_path / "two"), rtol=2e-2)


def test_a_training_goes_on_with_as_many_data_parallel_ranks_as_there_are(
    on_ranks: Run, data: Path, tmp_path: Path
) -> None:
    words = [*WORDS, "--data-path", str(data), "--dtype", "float64", "--micro-batch-size", "4"]
    folder = tmp_path / "run"
    assert called([*words, "--train-iters", "4", "--metrics", str(tmp_path / "whole")])[0] == 0
    assert called([*words, "--train-iters", "2", "--save", str(folder)])[0] == 0
    more = [*words, "--train-iters", "4", "--load", str(folder), "--metrics"]
    assert called([*more, str(tmp_path / "alone")])[0] == 0
    assert numbers(tmp_path / "alone") == numbers(tmp_path / "whole")[2:]
    assert [status for status, *_ in on_ranks(2, called, [*more, str(tmp_path / "two")], joined=False)] == [0, 0]
    np.testing.assert_allclose(numbers(tmp_path / "two"), numbers(tmp_path / "alone"), rtol=0, atol=CLOSE)


@pytest.mark.parametrize(
    "layout",
    [
        ["--tensor-parallel-size", "2"],
        ["--use-torch-fsdp2"],
        ["--pipeline-parallel-size", "2"],
        ["--pipeline-parallel-size", "2", "--use-torch-fsdp2"],
    ],
    ids=str,
)
def test_every_layout_begins_from_weights_in_a_folder_and_a_mixture(
    layout: list[str], on_ranks: Run, data: Path, tmp_path: Path
) -> None:
    pytest.importorskip("safetensors")
    config = GptConfig(vocabulary=32, layers=2, width=16, heads=4, kv_heads=4, hidden=64, positions=8)
    model = Gpt(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    save_gpt(model, tmp_path / "model")
    np.save(tmp_path / "few.npy", np.arange(40, dtype=np.uint16) % 7)
    words = [
        *("train", "gpt", "--device", "cpu", "--no-roof", "--seq-length", "8", "--dtype", "float64", "--lr", "0.01"),
        *("--init-from", str(tmp_path / "model"), "--data-path", "0.7", str(data), "0.3", str(tmp_path / "few.npy")),
        *("--global-batch-size", "4", "--micro-batch-size", "2", "--train-iters", "3", "--metrics"),
    ]
    status, _, err = called([*words, str(tmp_path / "alone")])
    assert (status, err) == (0, "")
    ranks = 4 if len(layout) == 3 else 2
    said = on_ranks(ranks, called, [*words, str(tmp_path / "two"), *layout], joined=False)
    assert [status for status, *_ in said] == [0] * ranks, said
    np.testing.assert_allclose(numbers(tmp_path / "two"), numbers(tmp_path / "alone"), rtol=0, atol=CLOSE)
    assert numbers(tmp_path / "alone")[0][1] > 3.6  # the loss of these weights; random ones have log(32)


WRONG = {
    "layout": (["--tensor-parallel-size", "3"], "a world of 2 cannot be split by tp=3"),
    "heads": (["--tensor-parallel-size", "2", "--num-attention-heads", "1"], "heads=1 is not divisible by tp=2"),
    "halves": (
        ["--tp-comm-overlap", "--micro-batch-size", "1"],
        "a micro_batch of 1 cannot be halved (halves, --tp-comm-overlap)",
    ),
    "halves again": (
        ["--tp-comm-overlap", "--micro-batch-size", "2", "--recompute"],
        "cannot be combined with recompute",
    ),
    "halves alone": (
        ["--tp-comm-overlap", "--micro-batch-size", "2"],
        "hide the communication of tensor parallel ranks",
    ),
    "shared graph": (["--enable-cuda-graph"], "a CUDA graph (cuda_graph, --enable-cuda-graph) needs a GPU"),
    "batch": (["--micro-batch-size", "3"], "is not divisible by micro_batch=3 (--micro-batch-size)"),
    "layers": (["--pipeline-parallel-size", "2", "--num-layers", "1"], "layers=1 is less than pp=2"),
    "stages": (
        ["--pipeline-parallel-size", "2", "--pipeline-schedule", "zbv"],
        "2 layers cannot be divided among 4 stages",
    ),
    "schedule alone": (["--pipeline-schedule", "1f1b"], "are for pipeline ranks, but the layout dp=2 tp=1 pp=1 cp=1"),
    "interleaved": (
        ["--pipeline-parallel-size", "2", "--pipeline-schedule", "interleaved"],
        "needs at least 2 stages a rank",
    ),
    "virtual": (
        ["--pipeline-parallel-size", "2", "--num-layers", "4", "--num-layers-per-virtual-pipeline-stage", "3"],
        "4 layers cannot be divided into stages of 3 at each of 2 pipeline ranks; use one of 1",
    ),
    "1f1b": (
        [
            "--pipeline-parallel-size",
            "2",
            "--num-layers",
            "4",
            "--num-layers-per-virtual-pipeline-stage",
            "1",
            "--pipeline-schedule",
            "1f1b",
        ],
        "is for the schedule interleaved; 1f1b sets its own number of stages per rank",
    ),
    "context": (["--context-parallel-size", "2", "--seq-length", "6"], "sequence=6 is not divisible by 4"),
    "context halves": (
        ["--context-parallel-size", "2", "--tp-comm-overlap", "--micro-batch-size", "2"],
        "context parallelism cannot be combined with halves",
    ),
    "exchanged heads": (
        ["--context-parallel-size", "2", "--cp-comm-type", "a2a", "--num-attention-heads", "1"],
        "key heads that are divisible by 2 or divide 2, got 1 query heads and 1 key heads",
    ),
    "neighbours": (
        ["--context-parallel-size", "2", "--cp-comm-type", "a2a+p2p"],
        "needs near (--hierarchical-context-parallel-sizes), a number of neighbours that divides cp=2",
    ),
    "product of neighbours": (
        ["--context-parallel-size", "2", "--hierarchical-context-parallel-sizes", "2", "2"],
        "expected two sizes whose product is --context-parallel-size 2",
    ),
    "sums of none that share": (["--accumulate-whole-gradients"], "needs fully_shard (--use-torch-fsdp2)"),
    "transport of none": (["--cp-comm-type", "a2a"], "need context parallel ranks, but the layout"),
    "neighbours of another transport": (
        ["--context-parallel-size", "2", "--hierarchical-context-parallel-sizes", "1", "2", "--cp-comm-type", "p2p"],
        "is for the transport a2a+p2p, but the transport is p2p",
    ),
    "a file to save in": (["--dry-run", "--save", __file__], "is not a folder"),
    "end of documents": (["--eod-token", "31"], "must be a token from 0 to 30, got 31"),
    "no end of documents": (["--reset-position-ids"], "give document_end (--eod-token)"),
    "replayed documents": (
        ["--eod-token", "3", "--enable-cuda-graph"],
        "differ from step to step and cannot be combined with a",
    ),
    "short": (["--seq-length", "400"], "has 400 tokens, but a sequence of 400 needs 401"),
    "vocabulary": (["--vocab-size", "30"], "has the token 30, but in a vocabulary of 30, tokens are 0 to 29"),
    "missing": (["--data-path", "nowhere.bin"], "nowhere.bin does not exist"),
    "load": (["--load", "nowhere"], "no training was saved in nowhere"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_everywhere_is_said_once_and_nobody_waits(name: str, on_ranks: Run, data: Path) -> None:
    change, words = WRONG[name]
    said: list[Said] = on_ranks(
        2, called, instead([*WORDS, "--data-path", str(data)], change), joined=False, limit_s=150
    )
    assert [status for status, _, _ in said] == [2, 2]
    errors = [err for _, _, err in said if err]
    assert len(errors) == 1
    assert words in errors[0]
    assert "Traceback" not in errors[0]


def failing_at_rank_one(words: list[str]) -> Said:
    """Only rank 1 cannot create the model, and the others learn this."""
    real = GptTrainer.__init__

    def fail(self: GptTrainer, *given: Any, **options: Any) -> None:
        if dist.get_rank() == 1:
            raise WeightsError("rank 1's weights\nare not on its machine")
        real(self, *given, **options)
        dist.barrier()

    with patch.object(GptTrainer, "__init__", fail):
        return called(words)


@pytest.mark.parametrize("everywhere", [True, False], ids=["all ranks", "one rank"])
def test_what_fails_once_ranks_have_met_is_said_once(
    everywhere: bool, on_ranks: Run, data: Path, tmp_path: Path
) -> None:
    words = [*WORDS, "--data-path", str(data)]
    if everywhere:
        sizes = {"n_embd": 16, "n_head": 4, "n_layer": 2, "n_positions": 8, "vocab_size": VOCABULARY}
        gpt2 = {"model_type": "gpt2", "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}
        (tmp_path / "config.json").write_text(json.dumps({**gpt2, **sizes}))
        sized = ("--num-layers", "--hidden-size", "--num-attention-heads", "--vocab-size")
        places = [words.index(name) for name in sized]
        words = [word for at, word in enumerate(words) if at not in places and at - 1 not in places]
        words += ["--init-from", str(tmp_path)]
    said: list[Said] = on_ranks(2, called if everywhere else failing_at_rank_one, words, joined=False, limit_s=150)
    assert all(status in (1, 2) for status, _, _ in said)
    errors = [err for _, _, err in said if err]
    assert len(errors) == 1, errors
    assert ("is not a .safetensors file" if everywhere else "rank 1's weights") in errors[0]
    assert "Traceback" not in errors[0]


# ---- on GPUs -----------------------------------------------------------------------------------------------------

REPLAYED = {
    "one": (1, ["--micro-batch-size", "4"]),
    "dp=2": (2, ["--micro-batch-size", "2"]),
    "tp=2 halves": (
        2, ["--tensor-parallel-size", "2", "--sequence-parallel", "--micro-batch-size", "4", "--tp-comm-overlap"],
    ),
    "pp=2": (2, ["--pipeline-parallel-size", "2", "--micro-batch-size", "2"]),
    "pp=2 zb-h1": (
        2, ["--pipeline-parallel-size", "2", "--pipeline-schedule", "zb-h1", "--micro-batch-size", "2", "--recompute"],
    ),
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("name", REPLAYED)
def test_on_gpus_steps_from_a_graph_are_those_of_one_process(
    name: str, on_ranks: Run, data: Path, alone: list[tuple[int, float, float]], tmp_path: Path
) -> None:
    """The results are compared with the CPU's, which launches each step. On the GPU, three of the five steps are
    launched and two replayed."""
    ranks, layout = REPLAYED[name]
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    words = instead(
        [*WORDS, *layout, "--data-path", str(data), "--dtype", "float64", "--enable-cuda-graph"], ["--device", "cuda"]
    )
    path = tmp_path / "metrics.jsonl"
    said: list[Said] = on_ranks(
        ranks, called, [*words, "--train-iters", "5", "--metrics", str(path)], joined=False, limit_s=240.0
    )
    assert [status for status, *_ in said] == [0] * ranks, said
    np.testing.assert_allclose(numbers(path), alone, rtol=0, atol=1e-9)


def under_torchrun(words: list[str], folder: Path) -> subprocess.Popen[str]:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*start, "-m", "rooftop", *instead(words, ["--device", "cuda"]), "--enable-cuda-graph"]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("name", ["dp=2", "tp=2 halves", "pp=2"])
def test_on_gpus_a_training_from_a_graph_ends_by_itself(name: str, dtype: str, data: Path, tmp_path: Path) -> None:
    words = [*WORDS, *REPLAYED[name][1], "--data-path", str(data), "--dtype", dtype, "--train-iters", "8"]
    started = under_torchrun([*words, "--metrics", str(tmp_path / "metrics.jsonl")], tmp_path)
    out, _ = started.communicate(timeout=60)
    assert started.returncode == 0, out
    last = lines(tmp_path / "metrics.jsonl")[-1]
    assert last["step"] == 8
    assert time.time() - (tmp_path / "metrics.jsonl").stat().st_mtime < 15  # time to end, including torchrun's shutdown


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_gpus_ctrl_c_ends_replayed_steps(data: Path, tmp_path: Path) -> None:
    words = [*WORDS, *REPLAYED["dp=2"][1], "--data-path", str(data), "--train-iters", "1000000"]
    started = under_torchrun([*words, "--metrics", str(tmp_path / "metrics.jsonl")], tmp_path)
    until = time.monotonic() + 60
    while not (tmp_path / "metrics.jsonl").exists() or (tmp_path / "metrics.jsonl").read_text().count("\n") < 20:
        assert started.poll() is None, started.communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.1)
    started.send_signal(signal.SIGINT)
    began = time.monotonic()
    out, _ = started.communicate(timeout=60)
    assert started.returncode not in (None, 0), out
    assert time.monotonic() - began < 45  # even on a busy machine
