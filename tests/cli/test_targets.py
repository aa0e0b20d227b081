"""The meaning of TARGET, --input and the options of `rooftop analyze`, and one line for contradictory options."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rooftop.analysis import Report
from rooftop.cli import analyze as verb
from rooftop.cli.commands.analyze import command
from rooftop.cli.main import main
from rooftop.cli.targets import DTYPES, make_input, resolve_target
from rooftop.errors import InputError, ModelRunError, TargetError
from rooftop.hardware import ceilings_of

CPU = torch.device("cpu")
NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)
    def forward(self, x):
        return self.convolution(x).mean((2, 3))

pair = lambda: (nn.Linear(8, 4), torch.ones(2, 8))
several = lambda: [nn.Bilinear(3, 4, 5), (torch.ones(2, 3), torch.ones(2, 4))]
tupled = lambda: (nn.Bilinear(3, 4, 5), (torch.ones(2, 3), torch.ones(2, 4)))
class Named(nn.Module):
    def forward(self, x=None, *, ids, scale=1.0, nested=None):
        return (ids + (0 if x is None else x) + (0 if nested is None else nested["y"])) * scale

named = lambda: (Named(), {"ids": torch.ones(2, 3), "nested": {"y": torch.ones(2, 3)}})
both = lambda: (Named(), torch.ones(2, 3), {"ids": torch.ones(2, 3), "scale": 2.0})
keywords_alone = lambda: (Named(), None, {"ids": torch.ones(2, 3)})
four = lambda: (Named(), (), {}, {})
alone = lambda: (Named(),)
reversed_ = lambda: (torch.ones(2), Named())
no_keywords = lambda: (Named(), (), (torch.ones(2),))
numbered = lambda: (Named(), {0: torch.ones(2)})
taken = lambda: (Named(), {"ids": torch.ones(2), "train": True})
def raises(): raise KeyError("weights")
def leaves(): raise SystemExit(0)
empty = None
"""


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module in the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = f"targets_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(NET)
    (tmp_path / f"{name}_broken.py").write_text("import nowhere_at_all")
    (tmp_path / f"{name}_raises.py").write_text("1 / 0")
    (tmp_path / f"{name}_leaves.py").write_text("raise SystemExit(0)")
    yield name
    sys.modules.pop(name, None)


def test_callables_bring_their_inputs_or_take_those_given(net: str) -> None:
    found = resolve_target(f"{net}:pair", (), CPU, None)
    assert isinstance(found.model, nn.Linear)
    assert [tuple(arg.shape) for arg in found.args] == [(2, 8)]
    assert [tuple(a.shape) for a in resolve_target(f"{net}:pair", ["5x8"], CPU, None).args] == [(5, 8)]
    assert [tuple(a.shape) for a in resolve_target(f"{net}:tupled", (), CPU, None).args] == [(2, 3), (2, 4)]
    half = resolve_target(f"{net}:pair", (), CPU, torch.bfloat16)
    assert {half.model.weight.dtype, half.args[0].dtype} == {torch.bfloat16}  # type: ignore[attr-defined]


def test_callables_bring_keywords(net: str) -> None:
    found = resolve_target(f"{net}:named", (), CPU, torch.bfloat16)
    assert found.args == ()
    assert list(found.kwargs) == ["ids", "nested"]
    assert {found.kwargs["ids"].dtype, found.kwargs["nested"]["y"].dtype} == {torch.bfloat16}
    assert found.model(**found.kwargs).unique().tolist() == [2.0]
    found = resolve_target(f"{net}:both", (), CPU, None)
    assert found.model(*found.args, **found.kwargs).unique().tolist() == [4.0]
    assert resolve_target(f"{net}:keywords_alone", (), CPU, None).kwargs["ids"].shape == (2, 3)
    given = resolve_target(f"{net}:both", ["5x8"], CPU, None)  # options of the builder stay
    assert [tuple(arg.shape) for arg in given.args] == [(5, 8)]
    assert given.kwargs["scale"] == 2.0
    given = resolve_target(f"{net}:named", ["5x8"], CPU, None)
    assert [tuple(arg.shape) for arg in given.args] == [(5, 8)]
    assert given.kwargs == {}


@pytest.mark.parametrize("options", [(), ("--predict", "h200")], ids=["analyze", "predict"])
def test_keywords_of_a_builder_are_analyzed(
    options: tuple[str, ...], net: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The test checks the values passed to `analyze` and `predict`, without a measurement."""
    seen: list[dict[str, object]] = []

    def watching(model: nn.Module, *args: object, **kwargs: object) -> Report:
        seen.append({"args": len(args), **kwargs})
        raise InputError("seen")

    for name in ("analyze", "predict"):
        function = getattr(verb, name)
        monkeypatch.setattr(verb, name, functools.wraps(function)(watching))
    assert main(["analyze", f"{net}:both", "--no-html", *options]) == 2
    assert seen[0]["args"] == 1
    assert seen[0]["scale"] == 2.0
    assert seen[0]["ids"].shape == (2, 3)
    assert main(["analyze", f"{net}:taken", "--no-html", *options]) == 2
    assert "returned the keyword 'train', which is also an argument of rooftop." in capsys.readouterr().err
    assert len(seen) == 1


@pytest.mark.parametrize("path", ["{}.py", "./{}.py", "inner/{}_inner.py", "../beside/{}_beside.py", "{tmp}/{}.py"])
def test_a_module_may_be_named_by_its_file(path: str, net: str, tmp_path: Path) -> None:
    """A relative or absolute path, as shells complete it."""
    here = tmp_path / "here"
    for folder, name in ((here, net), (here / "inner", f"{net}_inner"), (tmp_path / "beside", f"{net}_beside")):
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.py").write_text(NET)
    os.chdir(here)
    found = resolve_target(f"{path.format(net, tmp=here)}:pair", (), CPU, None)
    assert isinstance(found.model, nn.Linear)


def test_channels_last_is_for_images(net: str) -> None:
    found = resolve_target(f"{net}:Net", ["2x3x8x8"], CPU, None, channels_last=True)
    assert found.model.convolution.weight.is_contiguous(memory_format=torch.channels_last)  # type: ignore[attr-defined]
    assert found.args[0].is_contiguous(memory_format=torch.channels_last)
    assert resolve_target(f"{net}:pair", (), CPU, None, channels_last=True).args[0].is_contiguous()


def test_builtin_models_have_an_example() -> None:
    found = resolve_target("resnet18", (), None, None)
    assert found.classifies
    assert [tuple(arg.shape) for arg in found.args] == [(8, 3, 224, 224)]


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        ("NET:Net", InputError, "returned a module without inputs: give their shapes"),
        ("NET:several", TargetError, "returned list, expected an nn.Module, "),
        (
            "NET:four",
            TargetError,
            r"returned \(Named, tuple, dict, dict\), expected an nn.Module, \(nn.Module, inputs\)",
        ),
        ("NET:alone", TargetError, r"returned \(Named\), expected"),
        ("NET:reversed_", TargetError, r"returned \(Tensor, Named\), expected"),
        (
            "NET:no_keywords",
            TargetError,
            r"\(Named, tuple, tuple\), whose keywords are not a dict from names to inputs: expected",
        ),
        ("NET:numbered", TargetError, r"\(Named, dict\), whose keywords are not a dict from names to inputs: expected"),
        ("NET:raises", ModelRunError, "raised KeyError: 'weights'"),
        ("NET:leaves", ModelRunError, "raised SystemExit: 0"),
        ("NET_leaves:Net", ModelRunError, "raised SystemExit"),
        ("nowhere/NET.py:Net", TargetError, "no such file"),
        ("../NET:Net", TargetError, "expected package.module:callable"),
        ("NET:empty", TargetError, "has no 'empty'; it has Net, pair, several"),
        ("NET:missing", TargetError, "has no 'missing'"),
        ("NET_broken:Net", ModelRunError, "No module named 'nowhere_at_all'"),
        ("NET_raises:Net", ModelRunError, "raised ZeroDivisionError"),
        ("NET.inner:Net", TargetError, "no module"),
        ("NET:", TargetError, "expected package.module:callable"),
        ("resnet5", TargetError, "resnet50"),
    ],
)
def test_targets_that_are_none(target: str, error: type[Exception], message: str, net: str) -> None:
    with pytest.raises(error, match=message):
        resolve_target(target.replace("NET", net), (), CPU, None)


@settings(deadline=None)
@given(
    shape=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    dtype=st.sampled_from(sorted(DTYPES)),
    high=st.one_of(st.none(), st.integers(1, 200)),
)
def test_an_input_has_the_shape_dtype_and_bound_that_it_says(shape: list[int], dtype: str, high: int | None) -> None:
    text = f"{'x'.join(map(str, shape))}:{dtype}{'' if high is None else f':{high}'}"
    made = make_input(text, torch.float32)
    assert (tuple(made.shape), made.dtype) == (tuple(shape), DTYPES[dtype])
    if not made.is_floating_point() and made.numel():
        assert int(made.min()) >= 0
        assert int(made.max()) < (2 if dtype == "bool" else high or 2)


@pytest.mark.parametrize("text", ["", "8x", "x8", "8,3", "2x3:", "2x3:int64:", "2x3:int64:x", "-1x3", "2x3:complex9"])
def test_inputs_that_are_none(text: str) -> None:
    with pytest.raises(InputError, match="--input"):
        make_input(text, torch.float32)


@pytest.mark.parametrize("text", ["99999999999x99999999", "9" * 30])
def test_inputs_that_no_memory_holds(text: str) -> None:
    with pytest.raises(InputError, match="this tensor cannot be made here"):
        make_input(text, torch.float32)


@pytest.mark.parametrize("bound", ["int64:0", "uint8:257", f"int32:{2**31 + 1}", f"int64:{'9' * 30}"])
def test_an_integer_input_needs_a_bound_that_its_dtype_holds(bound: str) -> None:
    with pytest.raises(InputError, match="upper bound"):
        make_input(f"2x3:{bound}", torch.float32)


def test_the_largest_bounds() -> None:
    assert make_input("2x3:uint8:256", torch.float32).dtype == torch.uint8
    assert make_input(f"2x3:int32:{2**31}", torch.float32).min() >= 0


@pytest.mark.parametrize(
    ("words", "mode"),
    [
        ([], None),
        (["--compile"], "default"),
        (["--compile", "reduce-overhead"], "reduce-overhead"),
        (["--compile=max-autotune"], "max-autotune"),
        (["--compile", "--no-html"], "default"),
    ],
)
def test_compile_takes_a_mode_or_none(words: list[str], mode: str | None) -> None:
    with command.make_context("analyze", ["resnet18", *words], obj=[]) as context:
        assert (context.params["target"], context.params["compile_mode"]) == ("resnet18", mode)


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(net: str, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*words: str) -> tuple[int, str, str]:
        status = main(["analyze", *(word.replace("NET", net) for word in words)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def test_predictions_of_a_known_machine_and_of_a_file_agree(run: Run, tmp_path: Path) -> None:
    ceilings_of("h200").save(tmp_path / "there.json")
    reports = []
    for machine in ("h200", "there.json"):
        words = ["NET:Net", "--input", "2x3x8x8", "--train", "--predict", machine, "--json", "r.json", "--no-html"]
        status, out, err = run(*words)
        assert (status, err) == (0, "")
        assert "predicted" in out
        reports.append(Report.from_json(tmp_path / "r.json"))
    assert reports[0].ops == reports[1].ops
    assert reports[0].predicted
    assert {row.phase for row in reports[0].ops} == {"forward", "backward", "optimizer"}
    assert not list(tmp_path.glob("*.html"))


def test_a_trace_is_one_that_chrome_reads(run: Run, tmp_path: Path) -> None:
    replace(ceilings_of("h200"), kind="cpu").save(tmp_path / "there.json")  # the ceilings' figures do not matter here
    words = ["NET:pair", "--device", "cpu", "--ceilings", "there.json", "--trace", "trace.json", "--no-html"]
    status, out, _ = run(*words)
    assert status == 0
    assert "trace: trace.json" in out
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    operators = [event for event in events if event.get("cat") == "cpu_op"]
    assert {"aten::addmm"} <= {event["name"] for event in operators}
    assert all(event["ph"] == "X" and event["dur"] >= 0 for event in operators)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["NET:pair", "--predict", "b9000"], "'b9000' is neither a known machine (h100, h200) nor a ceilings file"),
        (["NET:pair", "--predict", "h200", "--compile"], "nothing to compile"),
        (["NET:pair", "--predict", "h200", "--trace", "t.json"], "nothing to compile or to trace"),
        (["NET:pair", "--predict", "h200", "--channels-last"], "--channels-last cannot be combined with --predict"),
        (["NET:pair", "--predict", "h200", "--device", "cpu"], "--device cannot be combined with --predict"),
        (
            ["NET:pair", "--predict", "h200", "--counters"],
            "--counters needs a model in one process: it excludes scripts, --predict and",
        ),
        (["train.py", "--counters"], "--counters needs a model in one process: it excludes scripts, --predict and"),
        (
            ["train.py", "--predict", "h200"],
            "a script runs unchanged: name a callable in the script instead, train.py:NAME",
        ),
        (["train.py", "--compile"], "--compile needs a model"),
        (["train.py", "--train", "--input", "2x3"], "--input, --train: not for a whole script"),
        (
            ["train.py", "--dtype", "bf16"],
            "--dtype: not for a whole script, which runs unchanged; name a callable in the script instead, train.py:NA",
        ),
        (["net.build"], "did you mean net:build?"),
        (["train.py", "--epochs", "1"], "put the script's own arguments after --: train.py -- --epochs"),
        (["NET:pair", "--compile", "fastest"], "'fastest' is not one of default"),
        (["--compile", "NET:pair"], "is not one of default"),
        (["NET:pair", "--rows", "-1"], "-1 is not in the range x>=0"),
        (["NET:pair", "--dtype", "int64"], "'int64' is not one of 'bf16'"),
        (["NET:pair", "--json", "same", "-o", "./same"], "same is given for two outputs"),
        (["NET:pair", "--trace", "pipe"], "pipe is not a regular file"),
        (["NET:pair", "--", "--epochs", "1"], "only scripts accept arguments, got '--epochs 1'"),
    ],
)
def test_what_does_not_go_together_is_one_line(words: list[str], message: str, run: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('was run')")
    os.mkfifo(tmp_path / "pipe")
    before = set(tmp_path.iterdir())
    status, out, err = run(*words)
    assert (status, out) == (2, "")
    assert message in err
    assert err.startswith("rooftop: error: ")
    assert len(err.splitlines()) == 1
    assert set(tmp_path.iterdir()) == before


def test_exit_status_of_a_script(run: Run, tmp_path: Path) -> None:
    replace(ceilings_of("h200"), kind="cpu").save(tmp_path / "there.json")
    words = ["train.py", "--device", "cpu", "--ceilings", "there.json", "--no-html", "--", "7"]
    (tmp_path / "train.py").write_text("import sys, torch\ntorch.ones(3).relu()\nsys.exit(int(sys.argv[1]) - 7)")
    assert run(*words)[0] == 0
    (tmp_path / "train.py").write_text("import sys\nsys.exit(int(sys.argv[1]))")
    status, _, err = run(*words)
    assert status == 7  # the output of a plain run
    assert "train.py ended with exit status 7" in err
    assert len(err.splitlines()) == 1


def test_a_script_leaves_its_caller_as_it_was(run: Run, tmp_path: Path) -> None:
    """A program that calls the verb continues afterwards, and processes that it then starts must not run the script
    again."""
    (tmp_path / "elsewhere").mkdir()
    text = "import os, sys, torch\ntorch.ones(3).relu()\nos.chdir('elsewhere')\nsys.path.append('elsewhere')\n"
    (tmp_path / "train.py").write_text(text)

    def surroundings() -> tuple[object, ...]:
        return sys.modules["__main__"], sys.argv, list(sys.path), Path.cwd()

    replace(ceilings_of("h200"), kind="cpu").save(tmp_path / "there.json")
    before = surroundings()
    assert run("train.py", "--device", "cpu", "--ceilings", "there.json", "--no-html")[0] == 0
    assert surroundings() == before


def test_no_words_at_all_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "Commands:\n  analyze " in capsys.readouterr().err
