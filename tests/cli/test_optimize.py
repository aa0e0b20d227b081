"""`rooftop optimize`: what it prints and writes, and the calls that it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rooftop.cli.main import main
from rooftop.optimization import rounds

Run = Callable[..., tuple[int, str, str]]

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())

    def forward(self, x, scale=1.0):
        return self.layers(x) * scale

def build():
    return Net(), (torch.randn(2, 3, 9, 9),), {"scale": 2.0}

def function():
    return lambda x: x, (torch.randn(2),)

class Picks(nn.Linear):
    def forward(self, x, part="weights"):
        return super().forward(x) * {}[part]

def picks():
    return Picks(3, 3), (torch.randn(2, 3),)

def embeds():
    return nn.Embedding(5, 3), (torch.tensor([9]),)
"""


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(rounds, "ROUND_S", 0.02)

    def run_words(*words: str) -> tuple[int, str, str]:
        status = main(["optimize", *words, "--device", "cpu"])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run_words


@pytest.fixture
def net(tmp_path: Path) -> str:
    name = f"optimized_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(NET)
    return name


def test_it_says_what_was_tried_and_writes_a_plan(run: Run, net: str, tmp_path: Path) -> None:
    words = ["--rule", "fold-norms", "--rule", "cuda-graphs", "--budget", "60"]
    status, out, err = run(f"{net}:build", *words, "--save", "plan.json", "--json", "found.json")
    assert (status, err) == (0, "")
    assert "cuda-graphs" in out
    assert "Only on a GPU: " in out
    assert "Proven for 2x3x9x9 float32: only these calls run the faster model" in out
    found = json.loads((tmp_path / "found.json").read_text())
    (fold,) = [change for change in found["changes"] if change["rule"] == "fold-norms"]
    assert fold["where"] == "1 norm folded"
    assert fold["verdict"] in ("kept", "no gain") or "together they are slower" in fold["reason"]
    assert fold["verdict"] == "no gain" or 0 <= fold["error"] <= 1
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["rules"] == (["fold-norms"] if fold["verdict"] == "kept" else [])
    plan["rules"] = ["fold-norms"]
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    status, out, err = run(f"{net}:build", "--plan", "plan.json", "--shape", "1x3x5x5")
    assert (status, err) == (0, "")
    assert "1 norm folded; by the plan" in out
    assert "Proven for 2x3x9x9 float32; 1x3x5x5 float32: only" in out


def test_json_goes_to_standard_output(run: Run, net: str) -> None:
    status, out, _ = run(f"{net}:build", "--rule", "constants", "--json", "-")
    assert status == 0
    assert json.loads(out)["changes"][0]["verdict"] == "no gain"


def test_what_a_model_prints_does_not_mix_with_json(run: Run, tmp_path: Path) -> None:
    (tmp_path / "talks.py").write_text(
        "import torch\nclass Talks(torch.nn.Linear):\n    def forward(self, x):\n        print('forward')\n"
        "        return super().forward(x)\n"
        "def build():\n    print('build')\n    return Talks(4, 4), torch.randn(2, 4)\n"
    )
    status, out, err = run("talks.py:build", "--rule", "constants", "--json", "-")
    assert status == 0
    assert "changes" in json.loads(out)
    assert err.startswith("build\nforward\n")


def test_it_says_why_nothing_was_kept(run: Run, net: str, tmp_path: Path) -> None:
    _, out, _ = run(f"{net}:build", "--rule", "constants", "--save", "plan.json")
    assert "no change saves time" in out
    _, out, _ = run(f"{net}:build", "--plan", "plan.json")
    assert "the plan has no changes" in out
    (tmp_path / "folds.json").write_text(json.dumps({"version": 1, "rules": ["fold-norms"], "surroundings": {}}))
    _, out, _ = run(f"{net}:build", "--train", "--plan", "folds.json")
    assert "no change saves time" in out
    assert "not for training" in out
    _, out, _ = run(f"{net}:build", "--rule", "constants", "--budget", "1e-6")
    assert "nothing was kept, and 1 rule not tried" in " ".join(out.split())
    assert "the budget was used up: give a larger one" in " ".join(out.split())


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["NET:function"], 2, "expected an nn.Module"),
        (["NET.py"], 2, "is a script: expected a model"),
        (["NET:build", "--rule", "fold"], 2, "'fold' is not one of fold-norms"),
        (["NET:build", "--shape", "2,3"], 2, "'2,3' is not a shape such as 8x3x224x224"),
        (["NET:build", "--plan", "none.json"], 2, "none.json"),
        (["NET:build", "--plan", "NET.py"], 2, "is not a plan of rooftop.optimize"),
        (["NET:build", "--plan", "NET.py", "--rule", "compile"], 2, "leave --rule out"),
        (["NET:build", "--budget", "0"], 2, "--budget"),
        (["NET:build", "--save", "no/plan.json"], 2, "no"),
        (["nothing50"], 2, "nothing50"),
        (["NET:build", "--input", "4x5x9x9"], 1, "the inputs 4x5x9x9 float32. If the model needs other inputs: --"),
        (["NET:picks"], 1, "raised KeyError: 'weights' for the inputs 2x3 float32"),
        (["NET:embeds"], 1, "raised IndexError: index out of range in self for the inputs 1 int64"),
    ],
)
def test_wrong_calls(run: Run, net: str, words: list[str], status: int, said: str) -> None:
    got, out, err = run(*(word.replace("NET", net) for word in words))
    assert got == status
    assert said in err
    assert err.count("\n") <= 1 or status == 2
    assert out == ""


def test_a_page_shows_before_and_after_and_each_reason(run: Run, net: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"version": 1, "rules": ["fold-norms"], "surroundings": {}}))
    status, out, err = run(f"{net}:build", "--plan", "plan.json", "-o", "page.html")
    assert (status, err) == (0, "")
    assert "page: page.html" in out
    page = (tmp_path / "page.html").read_text()
    assert "1 of 1 changes was kept: fold-norms" in page
    assert "1 norm folded; by the plan" in page
    assert "NaN in the inputs" in page
    assert "http" not in page, "the page must not need the network"
    run(f"{net}:build", "--rule", "cuda-graphs", "--rule", "constants", "-o", "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "No change was kept" in page
    assert "needs a GPU, but the model is on cpu" in page
