"""The source tree matches docs/architecture.md and the tables of files. Source files import each other without
cycles."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "rooftop"
PAGE = ROOT / "docs" / "architecture.md"
TABLES = [ROOT / "docs" / name for name in ("files.md", "files-programs.md")]
MOST_LINES = 60  # limit for code that readers can take in at a glance


def modules() -> dict[str, Path]:
    """All source files by their names in imports."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        parts = ("rooftop", *path.relative_to(SOURCE).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(tree: ast.AST, known: set[str]) -> set[str]:
    """Files that a file imports, including imports within functions, except imports only for types."""
    found: set[str] = set()
    for each in statements(tree):
        if isinstance(each, ast.Import):
            found |= {name.name for name in each.names} & known
        elif isinstance(each, ast.ImportFrom) and each.module is not None:
            files = {f"{each.module}.{name.name}" for name in each.names}
            found |= files & known
            if files - known:  # names of the package itself
                found |= {each.module} & known
    return found


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    left = [tree]
    while left:
        for each in ast.iter_child_nodes(left.pop()):
            if isinstance(each, ast.If) and isinstance(each.test, ast.Name) and each.test.id == "TYPE_CHECKING":
                continue
            if not isinstance(each, ast.expr):  # which no import is in
                yield each
                left.append(each)


def circle(imports: dict[str, set[str]]) -> list[str]:
    """A cycle of files, each of which imports the one before it, with the first also at the end; empty if there is
    none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_files_import_each_other_in_one_direction() -> None:
    known = modules()
    imports = {name: imported(ast.parse(path.read_bytes()), set(known)) for name, path in known.items()}
    assert len(imports["rooftop.mat.matrix"]) > 5
    assert not circle(imports), "move their common code to a file below them"


def test_a_circle_through_a_function_is_seen() -> None:
    one = "from __future__ import annotations\n\ndef f():\n    from here import other\n"
    assert imported(ast.parse(one), {"here", "here.other"}) == {"here.other"}
    for_types = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from here.other import Name\n"
    assert imported(ast.parse(for_types), {"here.other"}) == set()
    assert sorted(circle({"a": {"b"}, "b": {"c"}, "c": {"a"}})[1:]) == ["a", "b", "c"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_the_page_names_every_file_and_every_folder() -> None:
    """A file by its name, or by its folder (`formulas/`)."""
    page = "".join(each.read_text(encoding="utf-8") for each in (PAGE, *TABLES))
    files = [path.relative_to(SOURCE) for path in SOURCE.rglob("*.py") if not path.name.startswith("__")]
    by_folder = ("formulas", "page_files")
    unnamed = [str(path) for path in files if path.name not in page and path.parent.name not in by_folder]
    assert not unnamed, "docs/files.md or files-programs.md should say in a few words what these are for"
    there = {path.name for folder in ("src", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")}
    for name in re.findall(r"\w+\.py", page):
        assert name in there, f"docs/architecture.md names {name}, which does not exist"
    folders = {parent for path in files for parent in path.parents if parent != Path()}
    for folder in folders:
        assert f"{folder.name}/" in page, f"the pages do not name {folder}/"


def test_each_map_fits_one_screen() -> None:
    page = PAGE.read_text(encoding="utf-8")
    packages = re.search(r"```\nsrc/rooftop/\n(.*?)```", page, re.DOTALL)
    assert packages is not None
    named = re.findall(r"^  (\w+)/", packages[1], re.MULTILINE)
    there = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert sorted(named) == sorted(there)
    text = "".join(each.read_text(encoding="utf-8") for each in (PAGE, *TABLES))
    maps = [packages[1], *re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)]
    assert max(len(each.splitlines()) for each in maps) <= MOST_LINES


def test_each_family_of_kernels_has_a_row() -> None:
    """The files' names must come from their family, except for those that have the same role in all families."""
    kernels = TABLES[0].read_text(encoding="utf-8").partition("\n## kernels\n")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)/` \| (.*)", kernels, re.MULTILINE))
    families = {path.parent for path in (SOURCE / "kernels").glob("*/__init__.py")}
    assert rows.keys() == {family.name for family in families}
    for family in families:
        files = {path.name for path in family.iterdir() if path.suffix in (".py", ".cu")}
        named = set(re.findall(r"`(\w+\.(?:py|cu))`", rows[family.name]))
        own = files - {"__init__.py", "tables.py", "launches.py", "triton_kernels.py"}
        assert own <= named, f"docs/files.md, the row of {family.name}/"
        assert named - files <= {path.name for path in family.glob("triton_kernels/*")}, family.name


@pytest.mark.parametrize("package", ["rooftop.doctor", "rooftop.debugging", "rooftop.models.gpt"])
def test_packages_have_what_they_say(package: str) -> None:
    module = pytest.importorskip(package)
    assert module.__all__ == sorted(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)
