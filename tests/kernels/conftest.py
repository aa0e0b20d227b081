"""CUDA C++ kernels on the CPU: the operators' own launch code, with the kernels compiled by the C++ compiler."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rooftop.launch import cuda

SHIM = Path(__file__).with_name("cuda_on_cpu.h")
COMPILE = cuda.compile
BY_VALUE = {"int": ctypes.c_int, "long long": ctypes.c_longlong, "float": ctypes.c_float}


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
