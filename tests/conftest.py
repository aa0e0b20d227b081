"""What all tests share: which of them run here, torchvision, and kernels on the CPU: Triton's through its interpreter,
those in CUDA C++ through the C++ compiler, both by the launch code that a GPU gets."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from rooftop.launch import cuda


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(autouse=True)
def memory_of_the_gpu(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Workers share one GPU: what a test took is given back after it, and those marked `large` follow one another."""
    if "gpu" not in request.keywords:
        yield
        return
    with ExitStack() as held:
        if "large" in request.keywords:
            lock = held.enter_context(open(tmp_path_factory.getbasetemp().parent / "large", "w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        gc.collect()
        torch.cuda.empty_cache()


TORCHVISION = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


@pytest.fixture(scope="session")
def torchvision_models() -> Iterator[ModuleType]:
    """torchvision as an oracle. Its published builds are CUDA builds, which fail to import beside a CPU torch until the
    operators of their compiled part are declared; the models themselves are Python."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    if torch.version.cuda is None and not hasattr(torch.ops.torchvision, "nms"):
        for schema in TORCHVISION:
            library.define(schema)
    yield pytest.importorskip("torchvision.models")  # noqa: PT022 (the library must outlive the tests)


SHIM = Path(__file__).with_name("cuda_on_cpu.h")
COMPILE = cuda.compile
GXX = ("g++", "-std=c++20", "-O1", "-w", "-fPIC", "-pthread")
Size = int | tuple[int, ...]
BY_VALUE = {"int": ctypes.c_int, "long long": ctypes.c_longlong, "float": ctypes.c_float}


@pytest.fixture
def interpreted() -> Callable[..., int]:
    """Runs files of tests where the CPU launches the Triton kernels, in a new process, since Triton decides at import.
    Options of pytest may follow.

    Gives how many passed; all but the calling test must.
    """

    def run(*files: str) -> int:
        pytest.importorskip("triton")
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        # NumPy, which the interpreter computes with, warns of NaN and infinity where a GPU does not.
        command = [sys.executable, "-m", "pytest", "-v", "-m", "not gpu", "-W", "ignore::RuntimeWarning", *files]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, done.stdout[-3000:]
        counts = re.search(r"(\d+) passed, 1 skipped", done.stdout)
        assert counts is not None, done.stdout[-500:]
        return int(counts[1])

    return run


class KernelOnCpu:
    """Launches as `rooftop.launch.cuda.Kernel`, with the same checks of arguments and configuration."""

    def __init__(self, real: cuda.Kernel, run: Any) -> None:
        self.real, self.binary, self.launches = real, real.binary, Counter[str]()
        self.run = run
        self.run.argtypes = [ctypes.c_uint * 8] + [BY_VALUE.get(each, ctypes.c_void_p) for each in real.binary.types]

    def launch(
        self, grid: Size, block: Size, *arguments: Any, shared_bytes: int = 0, cluster: int | None = None
    ) -> None:
        sizes = (*self.real.check(grid, block, shared_bytes, cluster), *_three(block), cluster or 1, shared_bytes)
        values = self.real._signature.values(arguments, -1)  # the CPU, as torch numbers devices
        self.run((ctypes.c_uint * 8)(*sizes), *values)
        self.launches[self.real.name.partition("<")[0]] += 1

    def active_clusters(self, block: Size, cluster: Size, shared_bytes: int, device: torch.device) -> int:
        self.real.check(cluster, block, shared_bytes, cluster)
        return 2


def _three(size: Size) -> Size:
    return (*(size if isinstance(size, tuple) else (size,)), 1, 1)[:3]


def compiled_for_cpu(source: str, names: Sequence[str], folder: Path, headers: Path) -> dict[str, KernelOnCpu]:
    """Kernels of one source, by name; the C++ compiler is started once for all of them."""
    reals = {name: COMPILE(source, name, arch="sm_90") for name in names}
    text = '#include "cuda_fp16.h"\n' + source
    for number, (name, real) in enumerate(reals.items()):
        parameters = ", ".join(f"{type_} a{i}" for i, type_ in enumerate(real.binary.types))
        arguments = ", ".join(f"a{i}" for i in range(len(real.binary.types)))
        run = f"run_blocks(sizes, [=] {{ {name}({arguments}); }});"
        text += f'\nextern "C" void run_{number}(const unsigned* sizes, {parameters}) {{ {run} }}\n'
    (folder / "kernels.cpp").write_text(text)
    command = [*GXX, "-shared", f"-I{headers}", str(folder / "kernels.cpp"), "-o", str(folder / "kernels.so")]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(folder / "kernels.so"))
    return {name: KernelOnCpu(real, getattr(library, f"run_{i}")) for i, (name, real) in enumerate(reals.items())}


@pytest.fixture(scope="session")
def cuda_headers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the shim under the names of CUDA's headers, compiled once for all kernels."""
    pytest.importorskip("cuda.core")
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("headers")
    (folder / "cuda_fp16.h").write_text(SHIM.read_text())
    (folder / "cuda_bf16.h").write_text("")
    subprocess.run([*GXX, "-x", "c++-header", str(folder / "cuda_fp16.h")], check=True)
    return folder


@pytest.fixture
def compile_for_cpu(
    cuda_headers: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, Sequence[str]], None]:
    """Compiles kernels (source, names) for `cuda_on_cpu` at once: faster than one by one when launched."""

    def compile_all(source: str, names: Sequence[str]) -> None:
        new = [name for name in names if (source, name) not in _compiled]
        if new:
            found = compiled_for_cpu(source, new, tmp_path_factory.mktemp("kernels"), cuda_headers)
            _compiled.update({(source, name): kernel for name, kernel in found.items()})

    return compile_all


@pytest.fixture
def cuda_on_cpu(monkeypatch: pytest.MonkeyPatch, compile_for_cpu: Callable[[str, Sequence[str]], None]) -> Counter[str]:
    """Kernels of CUDA C++ run on CPU tensors; gives the number of launches by name."""
    launches: Counter[str] = Counter()

    def compile(source: str, name: str, **options: Any) -> KernelOnCpu:
        compile_for_cpu(source, [name])
        _compiled[source, name].launches = launches
        return _compiled[source, name]

    monkeypatch.setattr(cuda, "compile", compile)
    monkeypatch.setattr(cuda, "runs_on", lambda tensor: tensor.device.type == "cpu")
    return launches


_compiled: dict[tuple[str, str], KernelOnCpu] = {}
