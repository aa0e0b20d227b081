"""The README in both languages, the index of the documentation, the page of words, and a page that names every
command."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from pathlib import Path

import click
import pytest

from rooftop.analysis.text import PARTS
from rooftop.cli.main import command
from rooftop.ladder.table import STATUS
from rooftop.train.reports.ablations import Worth

ROOT = Path(__file__).resolve().parents[1]
ENGLISH, CHINESE, COMMANDS = (ROOT / name for name in ("README.md", "README.zh.md", "docs/commands.md"))
DOCS = ROOT / "docs"
INDEX, WORDS = DOCS / "README.md", DOCS / "glossary.md"
MOST_WORDS = 4000  # limit for a guide, so that it can be read in one sitting


def code_blocks(page: Path) -> list[str]:
    return re.findall(r"```(?:sh|py|python)\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def links(page: Path) -> list[str]:
    return re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8"))


def verbs(group: click.Group, words: str = "rooftop") -> set[str]:
    """Every command below a group as typed: "rooftop media probe"."""
    context = click.Context(group)
    found = {name: group.get_command(context, name) for name in group.list_commands(context)}
    below = [verbs(each, f"{words} {name}") if isinstance(each, click.Group) else {f"{words} {name}"}
             for name, each in found.items()]  # fmt: skip
    return set().union(*below)


@pytest.mark.parametrize("page", [ENGLISH, CHINESE, COMMANDS, INDEX], ids=lambda page: str(page.relative_to(ROOT)))
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


def test_the_index_leads_to_every_page() -> None:
    pages = {str(page.relative_to(DOCS)) for page in (*DOCS.glob("*.md"), *DOCS.glob("measurements/*.md"))} - {
        INDEX.name
    }
    of_kernels = {
        page for page in pages if page.startswith("measurements/kernels-")
    }  # measurements/kernels.md has them
    assert pages - of_kernels <= set(links(INDEX))
    assert {page.removeprefix("measurements/") for page in of_kernels} <= set(
        links(DOCS / "measurements" / "kernels.md")
    )


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_a_guide_is_short_and_begins_with_what_it_is_for(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(text.split()) < MOST_WORDS
    title, blank, first, *_ = text.splitlines()
    assert title.startswith("# ")
    assert not blank
    assert re.match(r"[\w`*\[]", first)  # a sentence; no heading, table or code


def test_marks_and_verdicts_of_tables_are_explained() -> None:
    ladder = (DOCS / "ladder.md").read_text(encoding="utf-8")
    assert all(f"`{mark}`" in ladder for mark in STATUS.values())
    verdict = ast.parse(textwrap.dedent(inspect.getsource(Worth.verdict.fget)))  # type: ignore[attr-defined]
    returned = [node.value for node in ast.walk(verdict) if isinstance(node, ast.Return)]
    verdicts = {each.value for node in returned for each in ast.walk(node) if isinstance(each, ast.Constant)}
    train = " ".join((DOCS / "train.md").read_text(encoding="utf-8").lower().split())
    assert {"within noise", "helps"} < {each for each in verdicts if isinstance(each, str)}
    assert [each for each in verdicts if isinstance(each, str) and each.partition(":")[0] not in train] == []


def test_the_page_of_words_has_those_of_a_report() -> None:
    explained = {
        word
        for cell in re.findall(r"^\| ([^|]+) \|", WORDS.read_text(encoding="utf-8"), re.MULTILINE)
        for word in cell.split(", ")
    }
    of_ranks = {"communication", "exposed", "waited", "own", "straggler", "imbalance"}
    of_a_step = {"op roof", "fused roof", "percent of roof", "wall time", "busy time", "coverage", "bound", "disturbed"}
    assert of_ranks | of_a_step | {label for label, *_ in PARTS} - {"roof"} <= explained
    assert "## Roof" in WORDS.read_text(encoding="utf-8")
