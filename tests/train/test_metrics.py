"""The metrics file has each step once, in order, wherever a process was killed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooftop.cli.main import main
from rooftop.errors import InputError
from rooftop.train.gpt.metrics import add_lines, kept_lines, metrics_file
from rooftop.train.gpt.running import StepReport


def report(step: int, loss: float = 1.0) -> StepReport:
    return StepReport(step, loss, 1.0, 1e-3, 1e4, None, None, 0)


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


@given(st.integers(0, 9), st.data())
def test_whereever_it_was_cut_off_it_goes_on_from_the_checkpoint(
    tmp_path_factory: pytest.TempPathFactory, after: int, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("run") / "m"
    with metrics_file(path) as file:
        add_lines(file, map(report, range(1, 10)))
    size = path.stat().st_size
    cut = data.draw(st.integers(len("".join(path.read_text().splitlines(True)[:after])), size))
    os.truncate(path, cut)
    with metrics_file(path, after) as file:
        add_lines(file, map(report, range(after + 1, 12)))
    assert steps(path) == list(range(1, 12))
    assert [each.name for each in path.parent.iterdir()] == ["m"]


def test_a_file_that_cannot_be_written_is_named() -> None:
    path = Path("/proc/x")
    with pytest.raises(InputError, match=r"^/proc/x cannot be written \(.*\): expected a path"), metrics_file(path):
        pass


def test_a_loss_that_is_not_finite_is_null(tmp_path: Path) -> None:
    with metrics_file(tmp_path / "m") as file:
        add_lines(file, [report(1, float("nan"))])
    assert json.loads((tmp_path / "m").read_text(), parse_constant=pytest.fail)["loss"] is None


def test_of_a_step_made_twice_the_last_line_counts(tmp_path: Path) -> None:
    """Files written by earlier versions may contain a step twice."""
    path = tmp_path / "m"
    with path.open("w") as file:
        add_lines(file, [*map(report, range(1, 71)), *(report(step, 2.0) for step in range(61, 101))])
    found = [json.loads(line) for line in kept_lines(path, 90)]
    assert [each["step"] for each in found] == list(range(1, 91))
    assert [each["loss"] for each in found] == [1.0] * 60 + [2.0] * 30


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b'{"step": 1}\n{"step": 2, "lo{"step": 2}\n', 2),
        (b'{"step": 1}\n\0\0\n{"step": 2}\n', 2),
        (b"my notes\n", 1),
        (b'{"loss": 1}\n', 1),
    ],
)
def test_lines_of_others_are_refused_and_stay(content: bytes, line: int, tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_bytes(content)
    with pytest.raises(InputError, match=f"line {line} has no step: move the file away"), metrics_file(path, 1):
        pass
    assert path.read_bytes() == content


@pytest.mark.parametrize("torn", [b"", b'{"st', b"\xc3", b"\0\0\0"])
def test_what_is_torn_is_taken_out(torn: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_bytes(b'{"step": 1}\n' + torn)
    with metrics_file(path, 5) as file:
        add_lines(file, [report(6)])
    assert steps(path) == [1, 6]


def test_a_pipe_is_written_to_as_it_is(tmp_path: Path) -> None:
    with metrics_file(Path("/dev/null"), 3) as file:
        add_lines(file, [report(4)])
    assert Path("/dev/null").is_char_device()
    with metrics_file(tmp_path / "new", 3) as file:
        add_lines(file, [report(4)])
    assert steps(tmp_path / "new") == [4]


def test_the_command_goes_on_after_a_crash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("up and down " * 20)
    sizes = "--num-layers 1 --hidden-size 16 --seq-length 8 --log-interval 1"
    words = (
        f"train gpt --device cpu --no-roof --data-path a.txt --metrics m --save run --save-interval 2 {sizes}".split()
    )
    assert main([*words, "--train-iters", "3"]) == 0
    whole = Path("m").read_text().splitlines()
    assert main([*words, "--train-iters", "4"]) == 2
    assert "run already holds a training: expected --load run to continue it, or another" in capsys.readouterr().err
    assert Path("run/latest").read_text() == "step-00000003\n"
    Path("run/latest").write_text("step-00000002\n")  # as if it had been killed in step 3
    Path("m").write_text("\n".join(whole) + '\n{"step": 4, "lo')
    assert main([*words, "--train-iters", "4", "--load", "run/step-00000002", "--dry-run"]) == 0, (
        "a step of the same run"
    )
    assert main([*words, "--train-iters", "4", "--load", "run"]) == 0
    assert steps(Path("m")) == [1, 2, 3, 4]
    assert Path("m").read_text().splitlines()[:2] == whole[:2]
    Path("m").write_text("notes\n")
    assert main([*words, "--train-iters", "5", "--load", "run"]) == 2
    assert "m is not JSON, and is not overwritten" in capsys.readouterr().err
    assert Path("m").read_text() == "notes\n"
