"""Validation of a GPT: which sequences it reads, its loss compared with one computed by hand, and its absence of
effects on the training."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rooftop.cli.main import main
from rooftop.errors import InputError
from rooftop.models import GptConfig
from rooftop.parallel import Layout
from rooftop.train import GptTrainer, GptTraining, Mixture, Tokens, Validation, run_steps, split_tokens

CONFIG = GptConfig(vocabulary=11, layers=2, width=16, heads=2, kv_heads=2, hidden=32, positions=8, dropout=0.3)
TRAINING = GptTraining(config=CONFIG, length=8, global_batch=4, micro_batch=2, learning_rate=0.01, dtype=torch.float64)
COUNTING = Tokens([np.arange(300) % 11, np.arange(200) % 7], "counting")
HELD_OUT = Tokens([np.arange(90) * 3 % 11], "held out")  # 11 sequences: the last batch has three


def trainer(training: GptTraining = TRAINING) -> GptTrainer:
    layout = Layout()
    return GptTrainer(training, COUNTING, layout, layout.process_groups(), torch.device("cpu"))


def steps_of(one: GptTrainer, validation: Validation | None, until: int = 6) -> list[Any]:
    return [report for reports in run_steps(one, until, validation=validation, interval=4) for report in reports]


# ---- the loss --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_the_loss_is_the_mean_over_each_sequence_once_without_dropout(micro_batch: int) -> None:
    one = trainer(replace(TRAINING, micro_batch=micro_batch))
    text = HELD_OUT.read(0, 89).unfold(0, 9, 8)  # (11, 9)
    model = one.model.eval()
    with torch.no_grad():
        logits = model(text[:, :-1])
    expected = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).item()
    model.train()
    validation = Validation(HELD_OUT, TRAINING)
    assert one.validation_loss(validation.batches, validation.sequences) == pytest.approx(expected, abs=1e-12)
    assert all(module.training for module in model.modules())


def test_targets_after_an_end_do_not_count() -> None:
    masked = replace(TRAINING, document_end=5, mask_ends=True)
    one = trainer(masked)
    found = one.validation_loss(Validation(HELD_OUT, masked).batches, 11)
    text = HELD_OUT.read(0, 89).unfold(0, 9, 8)
    total, count = 0.0, 0
    for sequence in text:
        single = Tokens([sequence.numpy()], "one")
        counted = int(sequence[:-1].ne(5).sum())
        total += one.validation_loss(Validation(single, masked).batches, 1) * counted
        count += counted
    assert 0 < count < 88
    assert found == pytest.approx(total / count, abs=1e-12)


def test_a_part_that_was_in_evaluation_mode_stays_there() -> None:
    one = trainer()
    block = next(iter(one.model.layers.values()))
    block.eval()
    one.validation_loss(Validation(HELD_OUT, TRAINING).batches, 3)
    assert one.model.training
    assert not block.training


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_is_the_same_with_and_without_it(dtype: torch.dtype) -> None:
    training = replace(TRAINING, dtype=dtype)
    plain, validated = trainer(training), trainer(training)
    expected = steps_of(plain, None)
    found = steps_of(validated, Validation(HELD_OUT, training, interval=2, iters=2))
    assert [(each.loss, each.grad_norm) for each in found] == [(each.loss, each.grad_norm) for each in expected]
    assert all(torch.equal(weight, validated.weights.named[name]) for name, weight in plain.weights.named.items())
    assert [each.step for each in found if each.valid_loss is not None] == [2, 4, 6]
    assert all(each.valid_loss is None for each in expected)


@pytest.mark.gpu
def test_replayed_steps_are_the_same_with_and_without_it() -> None:
    """Validations between the steps of a CUDA graph, before and after its capture."""
    gpu, training = torch.device("cuda"), replace(TRAINING, cuda_graph=True)
    plain, validated = (GptTrainer(training, COUNTING, Layout(), Layout().process_groups(), gpu) for _ in range(2))
    expected = steps_of(plain, None, 9)
    found = steps_of(validated, Validation(HELD_OUT, training, interval=2, iters=2), 9)
    # The sums of attention's gradient come in any order.
    assert [each.loss for each in found] == pytest.approx([each.loss for each in expected], abs=1e-9)
    on_cpu = trainer(replace(TRAINING, cuda_graph=False))
    losses = [each.valid_loss for each in steps_of(on_cpu, Validation(HELD_OUT, TRAINING, interval=2, iters=2), 9)]
    assert [each.valid_loss for each in found if each.valid_loss is not None] == pytest.approx(
        [loss for loss in losses if loss is not None], abs=1e-9
    )


def test_it_is_lower_after_training() -> None:
    quick = replace(TRAINING, learning_rate=0.03, config=replace(CONFIG, dropout=0.0))
    one = trainer(quick)
    validation = Validation(Tokens([np.arange(100) % 11], "counting on"), quick)
    before = one.validation_loss(validation.batches, validation.sequences)
    assert before == pytest.approx(np.log(11), abs=0.2)
    assert steps_of(one, validation, 40)[-1].valid_loss < before / 2


# ---- choice of sequences ---------------------------------------------------------------------------------------------


def test_the_sequences_are_the_same_each_time_and_for_each_seed() -> None:
    for seed in (0, 5):
        validation = Validation(HELD_OUT, replace(TRAINING, seed=seed), iters=2)
        assert validation.sequences == 8
        assert torch.equal(validation.batches.read(1, [3]), Validation(HELD_OUT, TRAINING).batches.read(1, [3]))
    whole = Validation(HELD_OUT, TRAINING, iters=1000)
    read = [whole.batches.read(number // 4, [number % 4])[0].tolist() for number in range(whole.sequences)]
    assert sorted(read) == sorted(HELD_OUT.read(0, 89).unfold(0, 9, 8).tolist())


def test_it_is_due_at_its_interval_and_at_the_end() -> None:
    validation = Validation(HELD_OUT, TRAINING, interval=3)
    assert [step for step in range(1, 8) if validation.due(step, 7)] == [3, 6, 7]


@pytest.mark.parametrize(("name", "value"), [("interval", 0), ("iters", -1)])
def test_numbers_of_a_validation_are_positive(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{name} must be positive, got {value}"):
        Validation(HELD_OUT, TRAINING, **{name: value})


@pytest.mark.parametrize(
    ("parts", "ends"), [((90, 10), (450, 500)), ((0.5, 0.25, 0.25), (250, 375)), ((3, 2), (300, 500))]
)
def test_a_split_reads_the_front_and_what_follows(parts: Sequence[float], ends: tuple[int, int]) -> None:
    train, valid = split_tokens(COUNTING, parts)
    whole = COUNTING.read(0, 500)
    assert isinstance(train, Tokens)
    assert isinstance(valid, Tokens)
    assert torch.equal(train.read(0, len(train)), whole[: ends[0]])
    assert torch.equal(valid.read(0, len(valid)), whole[ends[0] : ends[1]])
    assert (train.source, valid.source) == ("counting (training part)", "counting (validation part)")


def test_each_row_of_a_mixture_is_split() -> None:
    train, valid = split_tokens(Mixture([COUNTING, HELD_OUT], [0.3, 0.7]), (9, 1))
    assert isinstance(train, Mixture)
    assert isinstance(valid, Mixture)
    assert [len(row) for row in (*train.rows, *valid.rows)] == [450, 81, 50, 9]
    assert train.weights == valid.weights


@pytest.mark.parametrize("parts", [(1,), (1, 0), (0, 1), (2, -1), (1, 1, 1, 1), (1, 1, -1)])
def test_a_split_that_is_none(parts: Sequence[float]) -> None:
    with pytest.raises(InputError, match="expected two numbers above 0"):
        split_tokens(COUNTING, parts)


# ---- the command line ------------------------------------------------------------------------------------------------

SMALL = [
    *("--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "2", "--seq-length", "16"),
    *("--device", "cpu", "--no-roof", "--train-iters", "5"),
]


def called(folder: Path, *words: str) -> int:
    return main(["train", "gpt", "--data-path", str(folder), *SMALL, *words])


def events(folder: Path) -> Any:
    """The event files of a folder."""
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    read = accumulators.EventAccumulator(str(folder))
    read.Reload()
    return read


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("up and down and " * 60)
    return folder


def test_the_command_validates_prints_and_draws(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")
    curves, metrics = tmp_path / "curves", tmp_path / "metrics.jsonl"
    words = ["--split", "90,10", "--eval-interval", "2", "--tensorboard-dir", str(curves), "--metrics", str(metrics)]
    assert called(texts, *words) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert f"53 sequences of 16 tokens in {texts} (training part), 1 a step" in out
    assert f"validation on 5 of 5 sequences in {texts} (validation part), every 2 steps" in out
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    found = {line["step"]: line["valid_loss"] for line in lines if line["valid_loss"] is not None}
    assert [*found] == [2, 4, 5]
    for line in lines:
        if line["step"] in found:
            assert (
                f"step {line['step']}/5  loss {line['loss']:.6f}  valid loss {found[line['step']]:.6f}  grad norm"
                in out
            )
    read = events(curves)
    assert [(each.step, each.value) for each in read.Scalars("valid/loss")] == [
        (step, pytest.approx(loss, rel=1e-6)) for step, loss in found.items()
    ]
    assert [each.step for each in read.Scalars("train/loss")] == [1, 2, 3, 4, 5]
    assert "speed/percent_of_roof" not in read.Tags()["scalars"]


def test_curves_of_a_resumed_training_have_each_step_once(texts: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run, curves = str(tmp_path / "run"), str(tmp_path / "curves")
    words = ["--save", run, "--save-interval", "2", "--tensorboard-dir", curves]
    assert called(texts, *words) == 0
    (tmp_path / "run" / "latest").write_text("step-00000002\n")  # as if killed after step 2
    time.sleep(1.1)  # event files are read in the order of their names, which begin with the time in seconds
    assert called(texts, *words, "--load", run) == 0
    read = events(Path(curves))
    assert [each.step for each in read.Scalars("train/loss")] == [1, 2, 3, 4, 5]


def test_several_validation_paths_are_mixed(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(texts / "a.txt")
    assert called(texts, "--valid-data-path", "0.5", file, "0.5", str(texts), "--eval-iters", "3") == 0
    assert f"validation on 3 of 118 sequences in 0.5 {file} + 0.5 {texts}, every 1,000 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--eval-interval", "5"], "--eval-interval needs validation data: expected --valid-data-path or --split"),
        (["--eval-iters", "5"], "--eval-iters needs validation data"),
        (["--split", "9,1", "--valid-data-path", "x"], "--valid-data-path and --split both say what to validate on"),
        (["--split", "nine,1"], "--split nine,1: expected numbers with commas between them, e.g. 95,5"),
        (["--split", "100"], "the split 100: expected two numbers above 0"),
        (["--split", "1/0,1"], "--split 1/0,1: expected numbers"),
        (["--split", "inf,1"], "--split inf,1: expected numbers"),
        (["--split", "1,nan"], "--split 1,nan: expected numbers"),
        (["--split", "1e999999999,1"], "--split 1e999999999,1: expected numbers"),
        (["--split", ""], "--split : expected numbers"),
        (["--valid-data-path", "0.5", "a", "b"], "--valid-data-path 0.5 a b: b has no weight, but other paths have"),
        (["--valid-data-path", "0.5", "a", "-1", "b"], "--valid-data-path 0.5 a -1 b: a weight must be finite"),
        (["--split", "9999,1"], "(validation part) has 1 token, but a sequence of 16 needs 17"),
        (["--split", "1,9999"], "(training part) has 0 tokens, but a sequence of 16 needs 17"),
        (["--split", "9,1", "--eval-interval", "0"], "--eval-interval"),
        (["--valid-data-path", "no.txt"], "no.txt does not exist"),
        (["--valid-data-path", "NUMBERS"], "is text, so its tokens are bytes, but"),
    ],
)
def test_a_wrong_call_is_one_line(
    words: list[str], said: str, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "numbers.npy", np.arange(100))
    words = [str(tmp_path / "numbers.npy") if word == "NUMBERS" else word for word in words]
    assert called(texts, *words) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_validation_tokens_must_be_in_the_vocabulary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "train.npy", np.arange(100) % 11)
    np.save(tmp_path / "valid.npy", np.arange(100) % 12)
    words = ["--vocab-size", "11", "--valid-data-path", str(tmp_path / "valid.npy")]
    assert called(tmp_path / "train.npy", *words) == 2
    assert "valid.npy has the token 11, but in a vocabulary of 11, tokens are 0 to 10" in capsys.readouterr().err


def test_a_folder_for_curves_that_cannot_be_made(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorboard")
    assert called(texts, "--tensorboard-dir", str(texts / "a.txt" / "curves")) == 2
    assert "a.txt/curves cannot be created" in capsys.readouterr().err
