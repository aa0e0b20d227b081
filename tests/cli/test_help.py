"""Help appears at once: it loads neither torch nor a verb's implementation. Options that several verbs share have the
same names and texts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from rooftop.cli import commands, targets
from rooftop.cli.commands import names
from rooftop.cli.main import command, main
from rooftop.cli.outputs import STANDARD_OUTPUT, check_outputs, write_json
from rooftop.cluster.items import KINDS as ITEM_KINDS
from rooftop.hardware.crossovers import DTYPES, OPERATIONS
from rooftop.ladder import LADDERS
from rooftop.models import builtin_models
from rooftop.models.gpt.configs import PRESETS
from rooftop.parallel import TRANSPORTS
from rooftop.parallel.recomputing import GRANULARITIES
from rooftop.parallel.schedules import SCHEDULES
from rooftop.scene.gbuffers import OUTPUTS
from rooftop.train.gpt.training import DECAYS
from rooftop.train.gpt.training import DTYPES as TRAINED
from rooftop.train.tokens.mixtures import WEIGHT
from rooftop.train.tokens.number_widths import KINDS
from rooftop.train.tokens.tokens import BYTES

HEAVY = ("torch", "PIL", "rich", "scipy", "rooftop.models", "rooftop.analysis", "rooftop.hardware", "rooftop.kernels")


def verbs_of(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        assert found is not None
        yield (*path, name), found
        if isinstance(found, click.Group):
            yield from verbs_of(found, (*path, name))


VERBS = dict(verbs_of(command))


def test_no_help_loads_torch() -> None:
    """All verbs run in one process, which is faster: if all together do not load torch, no single verb does."""
    program = f"""
import sys
from rooftop.cli.main import main
for words in {[[*path, "--help"] for path in [(), *VERBS]]!r}:
    assert main(words) == 0, words
    loaded = [name for name in {HEAVY!r} if name in sys.modules]
    assert not loaded, (words, loaded)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", [("analyse",), ("analyze", "--jsno"), ("ladder", "matmull"), ("crossover",)])
def test_no_wrong_call_loads_torch(words: tuple[str, ...]) -> None:
    program = f"""
import sys
from rooftop.cli.main import main
assert main({list(words)!r}) == 2
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_names_are_those_of_what_they_name() -> None:
    assert list(names.FLOATS) == targets.FLOATS
    assert {targets.DTYPES[name] for name in names.FLOATS} == set(DTYPES)
    assert list(names.CLASSIFIERS) == list(builtin_models())
    assert list(names.GPTS) == list(PRESETS)
    assert names.ITEM_KINDS == ITEM_KINDS
    assert list(names.OPERATIONS) == list(OPERATIONS)
    assert {name: (entry.summary, entry.what) for name, entry in LADDERS.items()} == names.LADDERS
    assert not names.LADDERS.keys() & names.OTHER_LADDERS.keys()
    assert names.SURFACES == OUTPUTS
    assert list(names.TOKENS) == list(KINDS)
    assert WEIGHT.pattern == names.WEIGHT
    assert names.BYTE_TOKENS == BYTES
    assert list(names.DECAYS) == list(DECAYS)
    assert list(names.SCHEDULES) == list(SCHEDULES)
    assert names.TRANSPORTS == TRANSPORTS
    assert names.GRANULARITIES == GRANULARITIES
    assert list(names.TRAINED_DTYPES) == list(TRAINED)


def test_detectors_are_there() -> None:
    from rooftop.cli.detect import BUILDERS

    assert tuple(BUILDERS) == names.DETECTORS


# ---- --json ----------------------------------------------------------------------------------------------------------

JSON = {path: option for path, verb in VERBS.items() for option in verb.params if "--json" in option.opts}


def test_the_option_is_the_same_everywhere() -> None:
    assert len(JSON) == 19
    for path, option in JSON.items():
        assert isinstance(option, click.Option)
        assert (option.name, option.is_flag, option.metavar) == ("json_path", False, "[FILE]"), path
        assert isinstance(option.type, click.Path), path


@pytest.mark.parametrize("path", JSON, ids=" ".join)
@pytest.mark.parametrize("given", [(), ("-",), ("out.json",)], ids=["alone", "-", "FILE"])
def test_it_takes_a_file_or_none(
    path: tuple[str, ...], given: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    option = JSON[path]
    seen: list[Path | None] = []

    @click.command(params=[option])
    def alone(json_path: Path | None) -> None:
        seen.append(json_path)

    alone.main(["--json", *given], standalone_mode=False)
    assert seen == [Path("out.json") if given == ("out.json",) else STANDARD_OUTPUT]


@pytest.mark.parametrize("path", JSON, ids=" ".join)
def test_it_overwrites_nothing_but_json(path: tuple[str, ...], tmp_path: Path) -> None:
    """A file named after --json by mistake, such as a photograph, stays unchanged."""
    photograph, before = tmp_path / "cat.png", tmp_path / "before.json"
    photograph.write_bytes(b"\x89PNG")
    before.write_text("{}")
    option = JSON[path]
    context = click.Context(click.Command("verb"))
    with pytest.raises(click.BadParameter, match=r"cat\.png is not JSON, and is not overwritten: give another name"):
        option.process_value(context, str(photograph))
    with pytest.raises(click.BadParameter, match="there is no folder"):
        option.process_value(context, str(tmp_path / "no" / "out.json"))
    assert option.process_value(context, str(before)) == before


@pytest.mark.parametrize("option", ["-o", "--trace"])
def test_an_output_overwrites_only_a_file_of_its_kind(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`rooftop analyze train.py -o train.py` wrote the page over the program."""
    program, text = tmp_path / "train.py", "print('my only copy')\n"
    program.write_text(text)
    assert main(["analyze", str(program), "--device", "cpu", option, str(program)]) == 2
    assert re.search(r"train\.py is not (HTML|JSON), and is not overwritten", capsys.readouterr().err)
    assert program.read_text() == text


def test_pages_and_empty_files_are_overwritten(tmp_path: Path) -> None:
    page, empty, named = (tmp_path / name for name in ("page", "empty", "r.html"))
    page.write_text("\n<!DOCTYPE html>\n")
    empty.touch()
    named.write_text("anything")
    check_outputs({"HTML": [page, empty, named, tmp_path / "new", None]}, STANDARD_OUTPUT)
    with pytest.raises(click.BadParameter, match="page is not JSON"):
        check_outputs({"JSON": [page]})


def test_only_json_goes_to_standard_output() -> None:
    """`rooftop ladder vector --out -` wrote a file with the name "-"."""
    for outputs in ({"HTML": [STANDARD_OUTPUT]}, {"JSON": [STANDARD_OUTPUT]}):
        with pytest.raises(click.BadParameter, match="expected a path"):
            check_outputs(outputs)


def test_a_value_is_written_or_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not write_json(None, {"a": 1})
    assert not write_json(tmp_path / "out.json", {"a": 1})
    assert json.loads((tmp_path / "out.json").read_text()) == {"a": 1}
    assert capsys.readouterr().out == ""
    assert write_json(STANDARD_OUTPUT, {"a": 1})
    assert json.loads(capsys.readouterr().out) == {"a": 1}


def test_devices_and_findings_as_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a path, --json writes a file and the table is still printed. Without one, JSON replaces the table."""
    path = tmp_path / "device.json"
    assert main(["device", "--json", str(path)]) == 0
    assert capsys.readouterr().out
    assert main(["device", "--json"]) == 0
    assert json.loads(capsys.readouterr().out).keys() == json.loads(path.read_text()).keys()


def test_commands_are_declared_apart_from_their_work() -> None:
    folder = Path(commands.__file__).parent
    for file in folder.glob("*.py"):
        head = [line for line in file.read_text().splitlines() if line.startswith(("import ", "from "))]
        assert not any("torch" in line or "rooftop.models" in line for line in head), file
