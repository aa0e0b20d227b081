"""`rooftop analyze`: real reports, and one clear line for whatever goes wrong, before or after the work."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rooftop.analysis.report_contents import FLAGGED_PERCENT
from rooftop.cli.main import main
from rooftop.hardware import Ceilings

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="session")
def ceilings_file(measured: Ceilings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ceilings") / "ceilings.json"
    measured.save(path)
    return path


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ceilings_file: Path
) -> Run:
    """Runs `rooftop analyze ...` in an empty folder, returns (status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def call(*words: str, ceilings: str | None = None) -> tuple[int, str, str]:
        status = main(["analyze", *words, "--device", "cpu", "--ceilings", ceilings or str(ceilings_file)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(100, 16)
        self.head = nn.Linear(16, 4)
    def forward(self, tokens):
        return self.head(self.embed(tokens).mean(1))

def build(): return Net()
def build_with_input(): return nn.Linear(8, 4), torch.randn(2, 8)
ready = nn.Linear(8, 4)
def broken(): raise RuntimeError("no such file: weights.bin")
def nothing(): return None
def needs(argument): return Net()
class Raises(nn.Module):
    def forward(self, x):
        raise KeyError("missing feature")
number = 3
"""


@pytest.fixture
def net(tmp_path: Path) -> str:
    name = f"net_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(NET)
    return name


@pytest.mark.parametrize(
    ("model", "flops", "features", "parameters", "train", "size"),  # flops of an image of 224x224
    [("resnet50", 8.18e9, 2048, 25_557_032, False, 64), ("resnet18", 3.63e9, 512, 11_689_512, True, 32)],
)
def test_resnets_are_covered_and_counted(
    run: Run, model: str, flops: float, features: int, parameters: int, train: bool, size: int, tmp_path: Path
) -> None:
    words = [model, "--input", f"2x3x{size}x{size}", "--json", "r.json", "--no-html"]
    status, out, _ = run(*words, *(["--train"] if train else []))
    assert status == 0
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["coverage"] >= 0.98
    forward = sum(op["flops"] for op in report["ops"] if op["phase"] == "forward")
    linear = 2 * features * 1000
    assert forward == pytest.approx(2 * ((flops - linear) * (size / 224) ** 2 + linear), rel=0.01)
    assert report["summary"]["parameters"] == parameters
    for op in report["ops"]:
        assert op.get("flagged", False) == ((op["percent_of_roof"] or 0) > FLAGGED_PERCENT)
    blocks = {child["name"] for child in report["modules"]["children"]}
    assert {"conv1", "layer1", "layer4", "fc"} <= blocks
    assert "convolution" in out
    assert "r.json" in out


def test_callables_modules_and_their_inputs(run: Run, net: str, tmp_path: Path) -> None:
    for words in (
        [f"{net}:build", "--input", "3x7:int64:100"],
        [f"{net}:Net", "--input", "3x7:int64:100", "--train"],
        [f"{net}:build_with_input"],
        [f"{net}:ready", "--input", "5x8"],
    ):
        status, _, err = run(*words, "--no-html", "--json", "r.json")
        assert (status, err) == (0, ""), words
        assert json.loads((tmp_path / "r.json").read_text())["target"] == words[0]


def test_html_report_is_written_where_it_says(run: Run, net: str, tmp_path: Path) -> None:
    status, out, _ = run(f"{net}:build_with_input")
    assert status == 0
    (page,) = tmp_path.glob("*.html")
    assert page.name in out
    assert page.read_text().lstrip().lower().startswith("<!doctype html>")


def test_a_prediction_of_training_keeps_the_measured_page(run: Run, net: str, tmp_path: Path) -> None:
    for more in ([], ["--train"]):
        status, _, err = run(f"{net}:build_with_input", *more)
        assert status == 0, err
    assert main(["analyze", f"{net}:build_with_input", "--train", "--predict", "h200"]) == 0
    names = sorted(page.stem for page in tmp_path.glob("*.html"))
    assert [name.partition("build_with_input")[2] for name in names] == ["", "-training", "-training-on-h200"]


def test_photographs_are_an_input(run: Run, tmp_path: Path) -> None:
    from skimage import data

    folder = tmp_path / "photographs"
    folder.mkdir()
    from PIL import Image

    for name in ("astronaut", "coffee"):
        Image.fromarray(getattr(data, name)()).save(folder / f"{name}.png")
    status, _, _ = run("resnet18", "--input", str(folder), "--no-html", "--json", "r.json")
    assert status == 0
    assert json.loads((tmp_path / "r.json").read_text())["inputs"] == ["2x3x224x224 float32"]


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["resnet5"], 2, "resnet50"),
        (["no_such_pkg:build"], 2, "no module 'no_such_pkg'"),
        (["NET:nothing_there"], 2, "has no 'nothing_there'; it has"),
        (["NET:number"], 2, "expected a callable or an nn.Module"),
        (["NET:nothing"], 2, "returned NoneType"),
        (["NET:build"], 2, "give their shapes"),
        ([":build"], 2, "expected package.module:callable"),
        (["model.py"], 2, "no such script"),
        (["NET:broken"], 1, "no such file: weights.bin"),
        (["NET:needs"], 1, "missing 1 required positional argument"),
        (["NET:Raises", "--input", "2x2"], 1, "Raises raised KeyError for inputs 2x2:float32: 'missing feature'"),
        (["NET:ready", "--input", "2x3"], 1, "Linear raised RuntimeError for inputs 2x3:float32"),
        (["resnet18", "--input", "2x4x224x224"], 1, "for inputs 2x4x224x224:float32"),
        (["resnet18", "--input", "2x4x32x32"], 1, "If the model needs other inputs: --input 8x3x224x224"),
        (["resnet18", "--input", "2x-3"], 2, "neither a shape"),
        (["resnet18", "--input", "2x3:complex9"], 2, "unknown dtype 'complex9'"),
        (["resnet18", "--input", "missing/"], 2, "nor an existing photograph"),
        (["resnet18", "-o", "no/such/folder/r.html"], 2, "there is no folder no/such/folder"),
        (["resnet18", "--json", "."], 2, "is a folder"),
        (["resnet18", "--dtype", "int3"], 2, "int3"),
        (["resnet18", "--bogus"], 2, "--bogus"),
        ([], 2, "TARGET"),
    ],
)
def test_what_goes_wrong_is_one_line(
    run: Run, net: str, tmp_path: Path, words: list[str], status: int, message: str
) -> None:
    before = set(os.listdir(tmp_path))
    got, out, err = run(*(word.replace("NET", net) for word in words))
    assert got == status, err
    assert message in err
    assert err.startswith("rooftop: error: ")
    assert len(err.splitlines()) == 1
    assert out == ""
    assert set(os.listdir(tmp_path)) - before <= {"__pycache__"}


def test_debug_shows_the_traceback(run: Run, net: str) -> None:
    _, _, err = run(f"{net}:broken", "--debug")
    assert "Traceback" in err
    assert "in broken" in err


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"format": 1}', '{"format": 99}'])
def test_corrupt_ceilings_file(run: Run, tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    status, _, err = run("resnet18", "--input", "1x3x64x64", "--no-html", ceilings=str(path))
    assert status in (1, 2)
    assert "bad.json" in err
    assert len(err.splitlines()) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_folder(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "locked"
    folder.mkdir()
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    status, _, err = run("resnet18", "-o", str(folder / "r.html"))
    assert status == 2
    assert "permission denied" in err


def test_a_page_and_no_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", "resnet18", "-o", "r.html", "--no-html"]) == 2
    assert "--no-html writes no page, and -o names one (r.html): leave out one of them" in capsys.readouterr().err


def test_a_gpu_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = f"cuda:{torch.cuda.device_count()}"
    assert main(["analyze", "resnet18", "--device", missing, "--no-html"]) == 2
    assert f"{missing} does not exist" in capsys.readouterr().err
    assert main(["analyze", "resnet18", "--device", "tpu", "--no-html"]) == 2
    assert "expected cpu, cuda or cuda:N" in capsys.readouterr().err


@pytest.mark.gpu
def test_out_of_memory_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    status = main(["analyze", "resnet50", "--train", "--input", "20000x3x224x224", "--device", "cuda", "--no-html"])
    err = capsys.readouterr().err
    assert status == 1
    assert "out of memory" in err
    assert "smaller batch" in err
    # on a busy machine, the step takes so long that its progress is also printed
    assert sum("working for" not in line and "% done after" not in line for line in err.splitlines()) == 1
