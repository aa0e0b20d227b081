"""Kernels on the CPU: Triton's through its interpreter, those in CUDA C++ through the C++ compiler, both by the
operators' own launch code."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rooftop.launch import cuda

SHIM = Path(__file__).with_name("cuda_on_cpu.h")
COMPILE = cuda.compile
BY_VALUE = {"int": ctypes.c_int, "long long": ctypes.c_longlong, "float": ctypes.c_float}


@pytest.fixture
def interpreted() -> Callable[[str], int]:
    """Runs a file of tests where the CPU launches the Triton kernels, in a new process, since Triton decides at import.

    Gives how many passed; all but the calling test must.
    """

    def run(file: str) -> int:
        pytest.importorskip("triton")
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        # NumPy, which the interpreter computes with, warns of NaN and infinity where a GPU does not.
        command = [sys.executable, "-m", "pytest", "-v", "-m", "not gpu", "-W", "ignore::RuntimeWarning", file]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, done.stdout[-3000:]
        counts = re.search(r"(\d+) passed, 1 skipped", done.stdout)
        assert counts is not None, done.stdout[-500:]
        return int(counts[1])

    return run


class KernelOnCpu:
    """Launches as `rooftop.launch.cuda.Kernel`, with the same checks of arguments and configuration."""

    def __init__(self, source: str, name: str, folder: Path, launches: Counter[str]) -> None:
        self.real = COMPILE(source, name, arch="sm_90")
        self.launches = launches
        types = self.real.binary.types
        (folder / "cuda_fp16.h").write_text(SHIM.read_text())
        (folder / "cuda_bf16.h").write_text("")
        parameters = ", ".join(f"{type_} a{i}" for i, type_ in enumerate(types))
        arguments = ", ".join(f"a{i}" for i in range(len(types)))
        run = f"run_blocks(grid, x, y, [=] {{ {name}({arguments}); }});"
        entry = f'\nextern "C" void run(unsigned grid, unsigned x, unsigned y, {parameters}) {{ {run} }}\n'
        (folder / "kernel.cpp").write_text('#include "cuda_fp16.h"\n' + source + entry)
        command = ["g++", "-std=c++20", "-O1", "-w", "-fPIC", "-shared", "-pthread", f"-I{folder}"]
        subprocess.run([*command, str(folder / "kernel.cpp"), "-o", str(folder / "kernel.so")], check=True)
        self.run = ctypes.CDLL(str(folder / "kernel.so")).run
        self.run.argtypes = [ctypes.c_uint] * 3 + [BY_VALUE.get(each, ctypes.c_void_p) for each in types]

    def launch(self, grid: int, block: tuple[int, int], *arguments: Any) -> None:
        self.real.check(grid, block)
        values = self.real._signature.values(arguments, -1)  # the CPU, as torch numbers devices
        self.run(grid, *block, *values)
        self.launches[self.real.name.partition("<")[0]] += 1


@pytest.fixture
def cuda_on_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Counter[str]:
    """Kernels of CUDA C++ run on CPU tensors; gives the number of launches by name."""
    pytest.importorskip("cuda.core")
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    launches: Counter[str] = Counter()

    def compile_for_cpu(source: str, name: str, **options: Any) -> KernelOnCpu:
        key = (source, name)
        if key not in _compiled:
            _compiled[key] = KernelOnCpu(source, name, tmp_path_factory.mktemp("kernel"), launches)
        _compiled[key].launches = launches
        return _compiled[key]

    monkeypatch.setattr(cuda, "compile", compile_for_cpu)
    monkeypatch.setattr(cuda, "runs_on", lambda tensor: tensor.device.type == "cpu")
    return launches


_compiled: dict[tuple[str, str], KernelOnCpu] = {}
