"""Every script of benchmarks/ and examples/ that takes options explains them."""

from __future__ import annotations

import json
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import io, json, runpy, sys
from contextlib import redirect_stdout

wrong, right = {}, 0
for path in sys.argv[1:]:
    folder = path.rpartition("/")[0]
    before = set(sys.modules)
    places = sys.path[:]
    sys.path.insert(0, folder)
    sys.argv = [path, "--help"]
    said = io.StringIO()
    try:
        with redirect_stdout(said):
            runpy.run_path(path, run_name="__main__")
        wrong[path] = "did not end"
    except SystemExit as end:
        if end.code or "usage:" not in said.getvalue().lower():
            wrong[path] = f"status {end.code}: {said.getvalue()[-200:]}"
        right += 1
    except ModuleNotFoundError as error:
        if error.name not in ("accelerate", "lightning"):  # peers, which are not installed
            wrong[path] = f"{error!r}, because {error.__cause__!r}"
    except Exception as error:
        wrong[path] = repr(error)
    sys.path[:] = places
    for name in set(sys.modules) - before:  # scripts of two folders may have the same name
        if str(getattr(sys.modules[name], "__file__", "")).startswith(folder):
            del sys.modules[name]
print(json.dumps([wrong, right]))
"""


def test_every_script_explains_its_options(tmp_path: Path, fork: Callable[..., BaseProcess]) -> None:
    scripts = sorted(
        str(path)
        for folder in ("benchmarks", "examples")
        for path in (ROOT / folder).rglob("*.py")
        if "argparse" in (text := path.read_text(encoding="utf-8")) and "__main__" in text
    )
    output, errors = tmp_path / "output", tmp_path / "errors"
    fork(PROGRAM, *scripts, environment={}, folder=tmp_path, output=output, errors=errors).join()
    assert output.read_text(), errors.read_text()[-2000:]
    wrong, right = json.loads(output.read_text().splitlines()[-1])
    assert not wrong
    assert right > 40
