"""The README in both languages: the same commands and links, and a page that names every command."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from rooftop.cli.main import command

ROOT = Path(__file__).resolve().parents[1]
ENGLISH, CHINESE, COMMANDS = (ROOT / name for name in ("README.md", "README.zh.md", "docs/commands.md"))


def code_blocks(page: Path) -> list[str]:
    return re.findall(r"```(?:sh|python)\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def links(page: Path) -> list[str]:
    return re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8"))


def verbs(group: click.Group, words: str = "rooftop") -> set[str]:
    """Every command below a group as typed: "rooftop media probe"."""
    context = click.Context(group)
    found = {name: group.get_command(context, name) for name in group.list_commands(context)}
    below = [verbs(each, f"{words} {name}") if isinstance(each, click.Group) else {f"{words} {name}"}
             for name, each in found.items()]  # fmt: skip
    return set().union(*below)


@pytest.mark.parametrize("page", [ENGLISH, CHINESE, COMMANDS], ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    missing = [link for link in links(page) if not (page.parent / link).exists()]
    assert links(page)
    assert not missing


def test_both_languages_have_the_same_code_and_links() -> None:
    assert code_blocks(ENGLISH)
    assert code_blocks(CHINESE) == code_blocks(ENGLISH)
    assert set(links(CHINESE)) - {ENGLISH.name} == set(links(ENGLISH)) - {CHINESE.name}
    for page, other in ((ENGLISH, CHINESE), (CHINESE, ENGLISH)):
        assert f"({other.name})" in "".join(page.read_text(encoding="utf-8").splitlines()[:4])


def test_both_languages_have_the_same_figures() -> None:
    """10 billion is 100 times 10^8 in Chinese, and 500,000 is 50 times 10^4; all others are written alike."""
    english, chinese = (
        set(re.findall(r"\d[\d,.]*\d", page.read_text(encoding="utf-8"))) for page in (ENGLISH, CHINESE)
    )
    assert english - chinese <= {"10", "500,000"}
    assert chinese - english <= {"100", "50"}


@pytest.mark.parametrize("page", [ENGLISH, CHINESE, COMMANDS], ids=lambda page: page.name)
def test_typed_commands_exist(page: Path) -> None:
    known = verbs(command)
    typed = [line for block in code_blocks(page) for line in block.splitlines() if line.startswith("rooftop ")]
    assert typed
    for line in typed:
        words = line.split()
        own_task = words[:2] == ["rooftop", "train"] and words[2].endswith(":build")
        assert own_task or {" ".join(words[:2]), " ".join(words[:3])} & known, line


def test_the_page_of_commands_names_all_of_them() -> None:
    text = "\n".join(code_blocks(COMMANDS))
    assert not [verb for verb in verbs(command) if f"{verb} " not in f"{text} "]
