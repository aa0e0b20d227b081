"""`import rooftop` is cheap: it adds little to `import torch` and loads heavy libraries when they are needed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

HEAVY = {"triton", "plotly", "PIL", "rich", "click", "jinja2", "pynvml", "torch.profiler", "torch.distributed.run"}

IMPORTS = """
import json, sys, time
import torch
before = set(sys.modules)
began = time.process_time()  # other programs on this machine do not affect process time
import rooftop
said = {"seconds": time.process_time() - began, "modules": sorted(set(sys.modules) - before)}
said["device"] = rooftop.hardware.ceilings_of("h200").device
said["name"] = rooftop.cost.__name__
import rooftop.cli.analyze
said["compiler after importing"] = "torch._dynamo" in sys.modules
"""
CALLS = """
import sys
import torch
from torch import nn
from rooftop import kernels
from rooftop.cost import CountingMode
from rooftop.inference import Engine
from rooftop.launch import known_calls
from rooftop.models import GptConfig, parallel_gpt
from rooftop.parallel import Layout

x = torch.ones(2, 8, requires_grad=True)
for _ in range(5):
    kernels.layer_norm(x, 8).sum().backward()
engine = Engine(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()), fuse=True)
for _ in range(5):
    engine(torch.ones(1, 3, 9, 9))
config = GptConfig(vocabulary=7, layers=1, width=8, heads=1, kv_heads=1, hidden=8, positions=4)
model = parallel_gpt(config, Layout(), seed=0)  # made on the meta device
model(torch.zeros(1, 3, dtype=torch.int64))
with CountingMode() as counted:
    torch.ones(2, 8) @ torch.ones(8, 2)
assert counted.records
"""
OBSERVING = """
said["compiler after calling"] = "torch._dynamo" in sys.modules
mode = known_calls.Observer([x])
import torch._dynamo
with mode, torch.no_grad():
    x + 1
    with mode:
        said["protected"] = getattr(type(mode).__torch_dispatch__, "_torchdynamo_disable", False)
    assert isinstance(mode, known_calls.Observer)
assert type(mode) is known_calls.Observer
said["why"] = mode.why
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said() -> dict[str, Any]:
    """What one process finds out: it imports torch and this library, calls operators, then imports the compiler."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", IMPORTS + CALLS + OBSERVING]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_importing_adds_little_and_nothing_heavy(said: dict[str, Any]) -> None:
    assert not HEAVY & set(said["modules"])
    ours = {name for name in said["modules"] if name.startswith("rooftop")}
    assert ours <= {"rooftop", "rooftop.errors", "rooftop.first_use"}
    assert said["seconds"] < 0.3


def test_hardware_names_are_loaded_when_used_and_none_needs_more_than_torch() -> None:
    """`rooftop doctor` imports the package even if torch is broken."""
    import rooftop.hardware as hardware

    program = "import sys, rooftop.hardware, rooftop.cli.commands.doctor; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    places = ("rooftop.hardware.", "rooftop.doctor.", "rooftop.debugging.")
    for name in hardware.__all__:
        assert getattr(hardware, name).__module__.startswith(places) or name == "Device", name


@pytest.mark.parametrize("name", ["", ".cluster", ".hardware", ".ladder", ".parallel", ".scene"])
def test_public_names_are_there_on_first_use(name: str) -> None:
    package = importlib.import_module(f"rooftop{name}")
    assert dir(package) == sorted(package.__all__)
    for each in package.__all__:
        assert getattr(package, each) is not None
        # importing a file with this name would replace the attribute
        is_file = importlib.util.find_spec(f"{package.__name__}.{each}") is not None
        assert is_file == isinstance(getattr(package, each), ModuleType), each


def test_what_hardware_does_not_have_is_said() -> None:
    import rooftop.hardware as hardware

    with pytest.raises(AttributeError, match=r"'rooftop\.hardware' has no attribute 'mesure'"):
        hardware.mesure  # noqa: B018


def test_packages_are_reached_through_the_name_alone(said: dict[str, Any]) -> None:
    """Names are used as in messages and docstrings: rooftop.hardware.ceilings_of("h200"). Importing all names, and
    analyzing, must not import torch's compiler, which takes seconds."""
    assert (said["device"], said["name"]) == ("NVIDIA H200", "rooftop.cost")
    assert not said["compiler after importing"]


def test_calls_do_not_import_the_compiler(said: dict[str, Any]) -> None:
    """PyTorch's dispatch modes import it at their first operator. Rooftop observes the second call of an operator.
    PyTorch also imports it to draw values on the meta device, where Rooftop draws none."""
    assert not said["compiler after calling"]
    assert (said["why"], said["protected"]) == ("aten.add.Tensor", True)


def test_interpreted_calls_do_not_import_the_compiler() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", CALLS + 'print("torch._dynamo" in sys.modules)']
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.stdout == "False\n", done.stderr[-2000:]
