"""`rooftop map`: what it prints, writes and returns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from rooftop.cli.main import main

pq = pytest.importorskip("pyarrow.parquet")

TARGETS = """
def upper(text):
    if text == "bad":
        raise ValueError("it is bad")
    return {"upper": text.upper()}


def never(text):
    raise ValueError("never")


def mean(image):
    return image.float().mean().item()
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.py").write_text(TARGETS)
    Path("a.txt").write_text("one\nbad\nthree\n")


def test_a_function_over_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["map", "my.py:upper", "a.txt", "-o", "out.parquet", "--workers", "1", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "out.parquet: 3 rows, 1 of them with an error (column error)" in out
    assert "the first error: a.txt, line 1 (the first is 0): ValueError: it is bad" in out
    assert pq.read_table("out.parquet")["upper"].to_pylist() == ["ONE", None, "THREE"]
    assert main(["map", "my.py:upper", "a.txt", "-o", "out.parquet", "--json", "-"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["items"], told["before"], told["errors_before"], told["out"]) == (0, 3, 1, "out.parquet")


def test_errors_are_tried_again_if_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["map", "my.py:upper", "a.txt", "-o", "out.parquet", "--workers", "1", "--device", "cpu"]
    assert main(words) == 0
    Path("my.py").write_text("def upper(text):\n    return {'upper': text.upper() + '!'}\n")
    assert main(words) == 0
    assert "nothing to do, 3 rows from before" in capsys.readouterr().out
    assert main([*words, "--retry-errors"]) == 0
    assert sorted(pq.read_table("out.parquet")["upper"].to_pylist()) == ["BAD!", "ONE", "THREE"]


def test_the_status_is_1_if_nothing_has_a_result(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["map", "my.py:never", "a.txt", "-o", "out.parquet", "--workers", "1", "--device", "cpu"]
    assert main([*words, "--json", "figures.json"]) == 1
    assert "3 rows, 3 of them with an error" in capsys.readouterr().out
    assert json.loads(Path("figures.json").read_text())["errors"] == 3
    assert main(words) == 1  # the workers exist, but none has a result yet


def test_the_status_is_1_if_a_file_cannot_be_read_to_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    Path("good.csv").write_text("a,b\n1,2\n")
    Path("twice.csv").write_text("a,a\n1,2\n")
    Path("my.py").write_text("def cells(row):\n    return len(row)\n")
    words = ["map", "my.py:cells", "good.csv", "twice.csv", "-o", "out.parquet", "--workers", "1", "--device", "cpu"]
    said = "twice.csv could not be read to its end: its later lines or rows are missing\n"
    assert main(words) == 1
    assert said in capsys.readouterr().out
    assert main(words) == 1
    assert said in capsys.readouterr().out
    assert sorted(pq.read_table("out.parquet")["result"].to_pylist(), key=str) == [2, None]


def test_a_model_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    Image.new("RGB", (30, 20)).save("a.png")
    words = ["map", "resnet18", "a.png", "-o", "out.parquet", "--random-weights", "0", "--top", "2", "--device", "cpu"]
    assert main([*words, "--workers", "1"]) == 0
    assert "random weights: the results mean nothing" in capsys.readouterr().out
    (row,) = pq.read_table("out.parquet").to_pylist()
    assert len(row["labels"]) == 2
    assert main([*words[:-3], "1", "--device", "cpu"]) == 2
    assert "top was 2 and is 1" in capsys.readouterr().err


def test_wrong_calls_are_refused_before_anything_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["my.py:upper", "a.txt"], "Missing option '-o'"),
        (["my.py:uper", "a.txt", "-o", "out"], "did you mean upper?"),
        (["my.py:upper", "b.txt", "-o", "out"], "b.txt does not exist"),
        (["my.py:upper", "a.txt", "my.py", "-o", "out"], "give the kind (kind=, --as): image, clip"),
        (["my.py:upper", "a.txt", "-o", "out", "--as", "txet"], "did you mean text?"),
        (["my.py:upper", "a.txt", "-o", "out", "--weights", "w.pth"], "is your own target"),
        (["my.py:upper", "a.txt", "-o", "a.txt"], "a.txt is a file"),
        (["my.py:upper", "a.txt", "-o", "out", "--workers", "1", "--scheduler", "tcp://h:1"], "its own workers"),
        (["my.py:upper", "a.txt", "-o", "out", "--json", "a.txt"], "a.txt"),
        (["resnet81", "a.png", "-o", "out"], "a.png does not exist"),
    ):
        assert main(["map", *words]) == 2, words
        assert said in capsys.readouterr().err
    assert not Path("out").exists()
