"""`import rooftop` is cheap: it adds little to `import torch` and loads heavy libraries when they are needed."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import json, sys, time
import torch
before = set(sys.modules)
began = time.perf_counter()
import rooftop
print(json.dumps([time.perf_counter() - began, sorted(set(sys.modules) - before)]))
"""
HEAVY = {"triton", "plotly", "PIL", "rich", "click", "jinja2", "pynvml", "torch.profiler", "torch.distributed.run"}


def test_importing_adds_little_and_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    seconds, modules = json.loads(done.stdout)
    assert not HEAVY & set(modules)
    ours = {name for name in modules if name.startswith("rooftop")}
    assert ours <= {"rooftop", "rooftop.errors"}
    assert seconds < 0.3
