"""Damaged files in processes with limits (`fuzz.py`): 30 files, or the number in ROOFTOP_FUZZ_FILES."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("av")
FILES = int(os.environ.get("ROOFTOP_FUZZ_FILES", "30"))
SECONDS_A_FILE = 10.0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc and sets limits of Linux")
def test_spoilt_files_crash_and_hang_nothing(tmp_path: Path) -> None:
    program = Path(__file__).with_name("fuzz.py")
    seed = os.environ.get("ROOFTOP_FUZZ_SEED", "0")
    done = subprocess.run(
        [sys.executable, str(program), "--files", str(FILES), "--seed", seed, "--keep", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60 + SECONDS_A_FILE * FILES,
        check=False,
    )
    assert done.stdout, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert report["findings"] == []
    assert done.returncode == 0
    assert report["files"] == FILES
    # There are both kinds of files: those with visible damage, and those whose damage does not show.
    assert report["read without an error"] > 0
    assert report["with errors"] > 0
