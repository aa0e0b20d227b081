"""Groups list their commands without importing them, each with the command's own help text."""

from __future__ import annotations

import importlib
import subprocess
import sys

import click
import pytest

from rooftop.cli.lazy_groups import LazyGroup
from rooftop.cli.main import command, main

FOUND = {name: command.get_command(None, name) for name in ("data", "media", "scene")}  # type: ignore[arg-type]
GROUPS = {name: found for name, found in FOUND.items() if isinstance(found, LazyGroup)}


def test_there_are_groups_in_groups() -> None:
    assert set(GROUPS) == {"data", "media", "scene"}


@pytest.mark.parametrize(("group", "verb"), [(group, verb) for group, found in GROUPS.items() for verb in found.verbs])
def test_the_line_of_a_verb_begins_its_own_help(group: str, verb: str) -> None:
    place, line = GROUPS[group].verbs[verb]
    module, _, name = place.partition(":")
    found = getattr(importlib.import_module(module), name)
    assert isinstance(found, click.Command)
    assert found.name == verb
    assert line == (found.help or "").split("\n\n")[0].replace("\n", " ")


@pytest.mark.parametrize(
    "words", [["--help"], ["media", "--help"], ["scene", "--help"], ["media", "prove"]], ids=" ".join
)
def test_no_torch_for_help_and_wrong_verbs(words: list[str]) -> None:
    code = f"import sys; from rooftop.cli.main import main; main({words!r}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_a_verb_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["media", "prove"]) == 2
    assert "prove" in capsys.readouterr().err
