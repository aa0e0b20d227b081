"""Mixtures: each source gets its share of the sequences, begins again when it is used up, and resumes at its
position."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from rooftop.cli.main import main
from rooftop.errors import InputError
from rooftop.models import GptConfig
from rooftop.parallel import Layout
from rooftop.train import (
    Batches,
    GptTrainer,
    GptTraining,
    Mixture,
    Tokens,
    find_training,
    load_training,
    open_mixture,
    other_data,
    save_training,
)

LONG, SHORT = Tokens([np.arange(0, 401)], "long"), Tokens([np.arange(1000, 1013)], "short")


def read(mixture: Mixture | Tokens, steps: range, batch: int = 7) -> torch.Tensor:
    found = Batches(mixture, length=4, batch=batch, seed=1)
    return torch.cat([found.read(step, range(batch)) for step in steps])


def test_rows_have_their_shares_and_short_ones_begin_anew_in_another_order() -> None:
    """The short source has 3 sequences. The source must give 21 of 70 sequences, which are seven passes over its 3."""
    starts = read(Mixture([LONG, SHORT], [0.7, 0.3]), range(10))[:, 0].tolist()
    short = [start for start in starts if start >= 1000]
    assert len(short) == 21
    passes = [tuple(short[place : place + 3]) for place in range(0, 21, 3)]
    assert all(sorted(each) == [1000, 1004, 1008] for each in passes)
    assert len(set(passes)) > 1
    long = [start for start in starts if start < 1000]
    assert len(long) == len(set(long)) == 49  # of 100


def test_without_weights_a_pass_has_every_sequence_once() -> None:
    starts = read(Mixture([LONG, SHORT]), range(103), batch=1)[:, 0].tolist()
    assert sorted(starts) == [*range(0, 400, 4), 1000, 1004, 1008]


def test_sequences_follow_from_the_step_and_the_place_alone() -> None:
    mixture = Mixture([LONG, SHORT, Tokens([np.arange(50)], "third")], [0.123, 0.5, 1])
    whole = read(mixture, range(20))
    assert torch.equal(read(mixture, range(13, 20)), whole[13 * 7 :])
    parts = [Batches(mixture, 4, 7, 1).read(3, places) for places in (range(2), range(2, 7))]
    assert torch.equal(torch.cat(parts), whole[21:28])
    assert torch.equal(read(mixture, range(140), batch=1), whole)


def test_one_row_alone_is_as_without_a_mixture() -> None:
    assert torch.equal(read(Mixture([LONG], [3]), range(20)), read(LONG, range(20)))
    assert torch.equal(read(Mixture([LONG, SHORT], [1, 0]), range(5))[:, 0] < 1000, torch.ones(35, dtype=torch.bool))


def test_rows_that_do_not_go_together_are_refused() -> None:
    text = Tokens([np.frombuffer(b"abc" * 9, np.uint8)], "a.txt", text=True)
    with pytest.raises(InputError, match=r"a\.txt is text, so its tokens are bytes, but long has other tokens"):
        Mixture([LONG, text])
    with pytest.raises(InputError, match=r"different vocabularies \(65 in a, 70 in b\)"):
        Mixture([Tokens([np.arange(9)], name, vocabulary=size) for name, size in (("a", 65), ("b", 70))])
    with pytest.raises(ValueError, match="a weight for each row, got 1 rows and 2 weights"):
        Mixture([LONG], [1, 2])
    with pytest.raises(InputError, match="short has 13 tokens, but a sequence of 13 needs 14"):
        Batches(Mixture([LONG, SHORT]), 13, 1, 0)


def test_what_a_mixture_says_of_itself() -> None:
    mixture = Mixture([LONG, SHORT], [0.1, Fraction(1, 4)])
    assert (mixture.source, len(mixture), mixture.kind, mixture.text) == ("0.1 long + 0.25 short", 414, "int64", False)
    assert mixture.shares([1, 1]) == [Fraction(2, 7), Fraction(5, 7)]
    prints = {
        each.fingerprint()
        for each in (mixture, Mixture([LONG, SHORT]), Mixture([SHORT, LONG]), Mixture([LONG, SHORT], [0.1, 0.3]))
    }
    assert len(prints) == 4
    with pytest.raises(InputError, match="short has the token 1012"):
        mixture.check_vocabulary(500)


CONFIG = GptConfig(vocabulary=16, layers=1, width=16, heads=2, kv_heads=2, hidden=32, positions=8)
TRAINING = GptTraining(config=CONFIG, length=8, global_batch=4, micro_batch=2, dtype=torch.float64)


def test_a_training_goes_on_with_the_sequences_that_would_have_come(tmp_path: Path) -> None:
    mixture = Mixture([Tokens([np.arange(n) % 13], str(n)) for n in (300, 20)], [0.6, 0.4])

    def trainer(training: GptTraining = TRAINING) -> GptTrainer:
        return GptTrainer(training, mixture, Layout(), Layout().process_groups(), torch.device("cpu"))

    whole = trainer()
    expected = [float(whole.advance()[0]) for _ in range(6)]
    first = trainer()
    for _ in range(3):
        first.advance()
    found = save_training(tmp_path, first)
    second = trainer(replace(TRAINING, micro_batch=1))
    load_training(find_training(tmp_path, TRAINING)[0], second)
    assert [float(second.advance()[0]) for _ in range(3)] == pytest.approx(expected[3:], abs=1e-12)
    assert other_data(found, mixture) is None
    assert "its sequences differ" in (other_data(found, Mixture(mixture.rows, [0.5, 0.5])) or "")


# ---- the command line ----------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "A").write_text("up and down " * 40)
    (tmp_path / "B").write_text("left " * 40)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def called(*words: str) -> int:
    sizes = ["--num-layers", "1", "--hidden-size", "16", "--seq-length", "8", "--train-iters", "2"]
    return main(["train", "gpt", "--device", "cpu", "--no-roof", *sizes, *words])


@pytest.mark.parametrize(
    ("words", "shares"),
    [
        ("--data-path 0.7 A 0.3 B", ("70%", "30%")),
        ("--data-path 7 A --data-path 3 B --micro-batch-size 2", ("70%", "30%")),
        ("--data-path=1e-1 A 0.1 B", ("50%", "50%")),
        ("--data-path A B", ("71%", "29%")),
        ("--data-path A --data-path B", ("71%", "29%")),
    ],
)
def test_all_paths_count(words: str, shares: tuple[str, str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert called(*words.split()) == 0
    out = capsys.readouterr().out
    for share, name, count in zip(shares, "AB", (59, 24), strict=True):
        assert f"  {share} from {name}, {count} sequences\n" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("0.7", "the weight 0.7 has no path"),
        ("0.7 A 0.3", "the weight 0.3 has no path: expected a path after each weight, as 0.7 A 0.3 B"),
        ("0.7 0.3 A", "the weight 0.7 has no path"),
        ("A 0.3 B", "A has no weight, but other paths have"),
        ("0.3 B A", "A has no weight, but other paths have"),
        ("0 A 0 B", "all weights are 0"),
        ("1.5 A -0.5 B", "a weight must be finite and 0 or more, got -0.5"),
        ("nan A 1 B", "a weight must be finite and 0 or more, got nan"),
        ("inf A 1 B", "got inf"),
        ("0.5 A 0.5 C", "C does not exist"),
        ("A C", "C does not exist"),
    ],
)
def test_a_wrong_mixture_is_refused_before_training(
    words: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called("--data-path", *words.split(), "--metrics", "m", "--save", "run") == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert sorted(path.name for path in folder.iterdir()) == ["A", "B"]


def test_a_mixture_of_no_paths_is_refused() -> None:
    with pytest.raises(InputError, match="--data-path is empty: expected a path, or several paths"):
        open_mixture([])


def test_a_folder_whose_name_is_a_number_is_a_path(folder: Path) -> None:
    (folder / "2024").mkdir()
    (folder / "2024" / "a.txt").write_text("text " * 20)
    for words in (["2024"], ["./2024", "A"], ["0.5", "./2024", "0.5", "A"]):
        assert len(open_mixture(words)) in (100, 580)


def test_what_any_of_the_paths_has_is_not_written_over(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert called("--data-path", "0.5", "A", "0.5", "B", "--metrics", "B") == 2
    assert "is an input: give another name" in capsys.readouterr().err
    assert called("--data-path", "A", "B", "--metrics", "m") == 0
    assert [json.loads(line)["step"] for line in (folder / "m").read_text().splitlines()] == [1, 2]
