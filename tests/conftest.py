"""Shared fixtures of all tests: the choice of tests that run here, torchvision, and kernels on the CPU. Triton's
kernels run through its interpreter, those in CUDA C++ through the C++ compiler; both use the same launch code as on a
GPU."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import gc
import hashlib
import inspect
import itertools
import json
import multiprocessing
import os
import pickle
import random
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import hypothesis
import psutil
import pytest
import torch

from rooftop.analysis import profiling
from rooftop.hardware import Ceilings, cpu_probes, measure_ceilings
from rooftop.kernels.operands import launch_data
from rooftop.launch import INTERPRETED, cuda, known_calls, nvrtc, repeated_calls
from rooftop.launch.triton_launch import record_launch

# A first call imports and compiles. The same tree gives the same result; `--hypothesis-profile=random` looks further.
hypothesis.settings.register_profile("same", deadline=None, derandomize=True)
hypothesis.settings.register_profile("random", deadline=None)
hypothesis.settings.load_profile("same")

SCRIPTS = tuple(str(Path(__file__).parents[1] / name) + os.sep for name in ("benchmarks", "examples"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if INTERPRETED:  # compiled code is the same with and without the interpreter
        compiled = [item for item in items if item.name.startswith("test_compiled_")]
        config.hook.pytest_deselected(items=compiled)
        items[:] = [item for item in items if item not in compiled]
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Garbage collection is off during imports: there is hardly any garbage, and each collection takes longer."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Freeze the million objects that exist before the first test, so that later garbage collections skip them."""
    if left := [each for each in sys.path if os.path.join(each, "").startswith(SCRIPTS)]:
        raise pytest.UsageError(f"a test module has put {left} into sys.path for all tests; let its tests do so")
    freeze()


FROZEN = 0
"""The number of imported modules when all objects were last frozen."""


def freeze() -> None:
    global FROZEN
    FROZEN = len(sys.modules)
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def imports_frozen() -> Iterator[None]:
    """Freeze the modules that a test has imported, too: a compiler or a library of models has 300,000 objects, which
    take 0.15 s in each collection."""
    yield
    if len(sys.modules) > FROZEN + 100:
        freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Fixtures draw the same random numbers whatever tests this process has run before."""
    seed(1)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    """The test draws the same random numbers too, whichever of its fixtures already existed. The test's numbers differ
    from its fixtures' numbers."""
    seed(2)


def seed(number: int) -> None:
    torch.default_generator.manual_seed(number)  # `torch.manual_seed` takes a millisecond to prepare GPUs
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)


def pytest_configure(config: pytest.Config) -> None:
    """Use a separate cache for this run, because the ceilings of a machine that is busy with tests are not for its
    user. Compiled code stays for the next run: its file names are made of sources and versions.

    Use one thread for each worker and for each process that tests start, because more threads would wait for each
    other's cores.

    Keep ranks from querying a name server. Each connection between ranks looks up a name that is not needed, and a lost
    query takes five seconds.

    Byte code is written even if the shell forbids it. Without it, each worker would compile all tests, which takes five
    seconds, and each process that a test starts would compile this library.
    """
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    use_a_gpu_each()
    if "ROOFTOP_CACHE" not in os.environ:  # workers and other processes use the first process's cache
        cache = tempfile.TemporaryDirectory(prefix="rooftop-tests-", ignore_cleanup_errors=True)
        os.environ["ROOFTOP_CACHE"] = cache.name
        config.add_cleanup(cache.cleanup)
        for kind in ("extensions", "kernels"):
            Path(cache.name, kind).symlink_to(kept_builds(kind))
        if not torch.cuda.is_available() and vectors_work():
            os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("RES_OPTIONS", "attempts:0")
    if not torch.cuda.is_available():  # each `torch.manual_seed` would format three stacks for devices not here: 1 ms
        for devices in (torch.cuda, torch.xpu, torch.mtia):
            devices._lazy_call = lambda *_, **__: None  # type: ignore[attr-defined]
    if INTERPRETED:
        # The checks of an operator that depend on its kernels.
        torch.library.opcheck = functools.partial(torch.library.opcheck, test_utils=("test_schema", "test_faketensor"))
        runpy.run_path(str(Path(__file__).with_name("quick_interpreter.py")))["quicken"]()


KEPT = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "rooftop-tests")
KEPT_DAYS = 7


def kept_builds(kind: str) -> Path:
    """A folder for compiled code of this kind. Code that no run has used for a week is deleted."""
    folder = KEPT / kind
    folder.mkdir(parents=True, exist_ok=True)
    for each in folder.iterdir():
        with suppress(OSError):  # another run deletes it
            if time.time() - each.stat().st_mtime > KEPT_DAYS * 86_400:
                shutil.rmtree(each) if each.is_dir() else each.unlink()
    return folder


VECTORS = """
from torch._inductor import config, cpu_vec_isa
tried = cpu_vec_isa.valid_vec_isa_list()
config.cpp.vec_isa_ok = True
print(tried != [] and tried == cpu_vec_isa.valid_vec_isa_list.__wrapped__())
"""


def vectors_work() -> bool:
    """Whether PyTorch's compiler can use all vector instructions of this CPU. Each process that compiles would find out
    by ten programs, which take 1.7 s; a later run of the tests knows the answer."""
    flags = re.search("^flags.*", Path("/proc/cpuinfo").read_text(), re.MULTILINE) if sys.platform == "linux" else None
    key = hashlib.sha256(f"{torch.__version__} {shutil.which('g++')} {flags and flags[0]}".encode()).hexdigest()

    def make(folder: Path) -> None:
        done = subprocess.run([sys.executable, "-c", VECTORS], capture_output=True, text=True, check=True)
        (folder / "answer").write_text(done.stdout.strip())

    return (built_once(kept_builds("vectors") / key, make) / "answer").read_text() == "True"


def use_a_gpu_each() -> None:
    """Let each worker's `cuda:0` be another GPU, as long as there are enough. All GPUs stay visible."""
    count, worker = torch.cuda.device_count(), os.environ.get("PYTEST_XDIST_WORKER", "")
    if count > 1 and worker:
        os.environ["CUDA_VISIBLE_DEVICES"] = in_turn(
            os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count))), int(worker.removeprefix("gw"))
        )


def in_turn(gpus: str, number: int) -> str:
    """The same GPUs, rotated by this number: "0,1,2" rotated by 4 is "1,2,0"."""
    names = gpus.split(",")
    first = number % len(names)
    return ",".join(names[first:] + names[:first])


@pytest.fixture(autouse=True)
def share_of_the_gpu(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Workers share one GPU: a test's memory is released after it, and tests marked `large` run one after another.

    A test marked `alone` compares durations. It begins when no other test uses a GPU, and the others wait for its end.
    """
    if "gpu" not in request.keywords:
        yield
        return
    shared = tmp_path_factory.getbasetemp().parent
    with ExitStack() as held:
        with locked(shared / "turn"):  # a test that waits to be alone keeps its turn: no later test overtakes it
            held.enter_context(locked(shared / "users", "alone" in request.keywords))
        if "large" in request.keywords:
            gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0]
            held.enter_context(locked(shared / f"large{gpu}"))
        yield
        gc.collect()
        torch.cuda.empty_cache()


@contextmanager
def locked(path: Path, exclusive: bool = True) -> Iterator[None]:
    """Hold a lock between processes: alone, or together with others that are not exclusive."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough: a process forked meanwhile has the file open too


@pytest.fixture(autouse=True)
def nothing_known() -> None:
    """Forget decisions that calls of other tests have made, since tests change the conditions of decisions."""
    known_calls.forget()


SHORTENED = {
    "rooftop.analysis.profiling.BLOCK_S": profiling.BLOCK_S / 40,
    "rooftop.analysis.profiling.BLOCKS_S": profiling.BLOCKS_S / 40,
    "rooftop.analysis.profiling.LABELLED_S": profiling.LABELLED_S / 40,
    "rooftop.analysis.repeating.MOST_SECONDS": 0.1,
    "rooftop.hardware.pulse.SIDE": 64,
    "rooftop.hardware.pulse.READ_BYTES": 1 << 20,
    "rooftop.hardware.pulse.LEAST_S": 0.0,
}


@pytest.fixture(scope="session", autouse=True)
def short_measurements() -> Iterator[None]:
    """On a CPU, a step is timed for moments instead of seconds, because tests check what is computed from its times."""
    if torch.cuda.is_available():
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SHORTENED.items():
            patch.setattr(name, value)
        yield


@pytest.fixture(autouse=True)
def threads_of_torch() -> Iterator[None]:
    """Restore the number of threads. Code that changes this number also changes it for the user, and slows all later
    tests: two workers with two threads each wait for each other's cores at every operator."""
    yield
    left = torch.get_num_threads()
    torch.set_num_threads(1)
    assert left == 1, f"a test left torch with {left} threads"


@pytest.fixture(autouse=True)
def names_of_scripts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Remove folders that a script or the command line put into `sys.path`. If these entries stayed, `import sparse` in
    other tests would import benchmarks/sparse.py, and a test would import the net.py of an earlier one."""
    before = set(sys.path)
    yield
    sys.path[:] = [each for each in sys.path if each in before and not os.path.join(each, "").startswith(SCRIPTS)]
    forgotten = (*SCRIPTS, str(tmp_path_factory.getbasetemp()) + os.sep)
    for name in list(itertools.takewhile(lambda name: name != _newest[0], reversed(sys.modules))):
        if str(getattr(sys.modules[name], "__file__", None)).startswith(forgotten):
            del sys.modules[name]
    _newest[0] = next(reversed(sys.modules))


_newest = [""]
"""The module that was imported last when all were last looked at: to look at all after each test takes milliseconds."""


TORCHVISION = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
"""The operators of the compiled part that the Python parts need when they are imported."""

ORACLES = Path(sys.prefix, "oracles")
"""The folder in which `make` puts packages whose Python parts alone are used."""


@pytest.fixture(scope="session")
def torchvision_models() -> Iterator[ModuleType]:
    """torchvision as a reference; its models are Python. If no build fits this torch, the operators of its compiled
    part are declared, so that it can be imported."""
    if find_spec("torchvision") is None and ORACLES.exists():
        sys.path.append(str(ORACLES))
    library = torch.library.Library("torchvision", "FRAGMENT")
    if find_spec("torchvision") is not None and not torchvision_loads():
        for schema in TORCHVISION:
            library.define(schema)
    yield pytest.importorskip("torchvision.models")  # noqa: PT022 (the library must outlive the tests)


def torchvision_loads() -> bool:
    """Whether torchvision's compiled part fits this torch; loads it."""
    spec = find_spec("torchvision")
    folders = spec.submodule_search_locations if spec is not None and spec.submodule_search_locations else ()
    for part in (part for folder in folders for part in Path(folder).glob("_C*.so")):
        try:
            torch.ops.load_library(str(part))
        except OSError:
            continue
        return True
    return False


SHIM = Path(__file__).with_name("cuda_on_cpu.h")
COMPILE = cuda.compile
# A copy of a library counts as another library with separate state, unless its symbols are unique in the process.
GXX = ("g++", "-std=c++17", "-Og", "-w", "-fPIC", "-fno-gnu-unique")
Size = int | tuple[int, ...]
BY_VALUE = {"int": ctypes.c_int, "long long": ctypes.c_longlong, "float": ctypes.c_float}


BUILDS = "ROOFTOP_TESTS_BUILDS"

INTERPRETING = """
import gc, json, os, signal, sys
gc.disable()  # collections during the imports take a quarter of their time
import hypothesis, psutil, pytest, torch, torch._dynamo, triton
import rooftop.analysis.profiling, rooftop.kernels, rooftop.nn, rooftop.testing

gc.freeze()
gc.enable()
for line in sys.stdin:
    words, output = json.loads(line)
    child = os.fork()
    if child == 0:
        signal.alarm(900)
        for stream in (1, 2):
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        code = pytest.main(words)
        sys.stdout.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="session")
def interpreting(shared_builds: Path) -> Iterator[subprocess.Popen[str]]:
    """A process in which the CPU launches the Triton kernels, since Triton decides this at import. The process has
    imported torch and this library once, and runs requested programs in forks. They need no plugins of pytest, which
    take 0.6 s to load."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", BUILDS: str(shared_builds)}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", INTERPRETING], env=environment, text=True, **pipes) as process:
        yield process


@pytest.fixture
def interpreted(interpreting: subprocess.Popen[str], tmp_path: Path) -> Callable[..., int]:
    """Run files of tests in a separate process where the CPU launches the Triton kernels. Options of pytest may follow.

    Return the number of passed tests; all except the calling test must pass.
    """

    def run(*files: str) -> int:
        # NumPy, which the interpreter computes with, warns of NaN and infinity where a GPU does not.
        # With its own folder, the process does not look through the folders of earlier runs and delete them.
        words = ["-v", f"--basetemp={tmp_path / 'interpreted'}", "-m", "not gpu"]
        words += ["-W", "ignore::RuntimeWarning", *files]
        assert interpreting.stdin is not None
        assert interpreting.stdout is not None
        print(json.dumps((words, str(tmp_path / "output"))), file=interpreting.stdin, flush=True)
        code = interpreting.stdout.readline().strip()
        said = (tmp_path / "output").read_text()
        assert code == "0", said[-3000:]
        counts = re.search(r"(\d+) passed, 1 skipped", said)
        assert counts is not None, said[-500:]
        return int(counts[1])

    return run


PRELOADED = (
    # Importing the compiler queries GPUs, after which no fork may use a GPU.
    "torch._dynamo" if torch.cuda.is_available() else "torch._inductor.compile_fx",
    *("torch.distributed.run", "torch.distributed.device_mesh", "torch.profiler"),
    "pytest",
    *("rooftop.cli.analyze", "rooftop.cli.train", "rooftop.analysis.page", "rooftop.parallel.processes"),
)
PRELOADING = f"""
import gc, os, sys
gc.disable()  # collections during the imports take a quarter of their time
sys.path.remove(os.path.dirname(__file__))
import {", ".join(PRELOADED)}
gc.freeze()  # forks skip these objects
gc.enable()
"""
"""The one module that the process of `fork` imports."""
Fork = Callable[..., BaseProcess]


@pytest.fixture(scope="session")
def fork(tmp_path_factory: pytest.TempPathFactory) -> Fork:
    """Run a program as `python program` would, in a fork of a process that has imported torch and this library once,
    because the import takes longer than most such programs. Measurements are as short as in this process."""
    shortened = {} if torch.cuda.is_available() else SHORTENED
    context = multiprocessing.get_context("forkserver")
    folder, path = tmp_path_factory.mktemp("preloading"), os.environ.get("PYTHONPATH")
    restored = "" if path is None else f"os.environ['PYTHONPATH'] = {path!r}\n"
    (folder / "preloading.py").write_text(f"{PRELOADING}del os.environ['PYTHONPATH']\n{restored}")
    context.set_forkserver_preload(["preloading"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        patch.setenv("KINETO_LOG_LEVEL", "99")
        patch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # NVML counts GPUs, because CUDA does not work after a fork
        forkserver.ensure_running()

    def start(
        program: str, *words: str, environment: dict[str, str], folder: Path, output: Path, errors: Path
    ) -> BaseProcess:
        streams = [(1, str(output)), (2, str(errors))]
        prologue = f"""
import importlib, os, sys
import torch
torch.set_num_threads(1)
os.environ.update({environment!r})
os.chdir({str(folder)!r})
sys.argv[:] = {["program", *words]!r}
sys.path[:] = [each for each in sys.path if each != {str(ORACLES)!r}]  # its packages lack compiled parts
sys.path[:0] = os.environ.get("PYTHONPATH", "").split(os.pathsep)
for stream, path in {streams!r}:
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
for name, value in {shortened!r}.items():
    module, _, name = name.rpartition(".")
    setattr(importlib.import_module(module), name, value)
"""
        process = context.Process(target=exec, args=(prologue + program, {"__name__": "__main__"}))
        process.start()
        return process

    return start


@pytest.fixture
def forked(fork: Fork, tmp_path: Path) -> Callable[..., tuple[int | None, str, str]]:
    """Run a program by `fork` to its end; return its status, stdout and stderr."""

    def run(program: str, *words: str) -> tuple[int | None, str, str]:
        said = {"output": tmp_path / "forked.out", "errors": tmp_path / "forked.err"}
        process = fork(program, *words, environment={}, folder=tmp_path, **said)
        process.join(300)
        return process.exitcode, said["output"].read_text(), said["errors"].read_text()

    return run


class KernelOnCpu:
    """A kernel that is launched like `rooftop.launch.cuda.Kernel`, with the same checks of arguments and
    configuration."""

    def __init__(self, real: cuda.Kernel, library: Path, symbol: str) -> None:
        self.real, self.binary, self.launches = real, real.binary, Counter[str]()
        self.library, self.symbol = library, symbol
        self.run = getattr(ctypes.CDLL(str(library)), symbol)
        self.run.argtypes = [ctypes.c_uint * 8] + [BY_VALUE.get(each, ctypes.c_void_p) for each in real.binary.types]

    def copied_to(self, library: Path) -> KernelOnCpu:
        """The same kernel with separate state, so that it may run at the same time in another thread."""
        if not library.exists():
            shutil.copy(self.library, library)
        return KernelOnCpu(self.real, library, self.symbol)

    def launch(
        self, grid: Size, block: Size, *arguments: Any, shared_bytes: int = 0, cluster: int | None = None
    ) -> None:
        blocks = self.real.check(grid, block, shared_bytes, cluster)
        sizes = (*blocks, *_three(block), cluster or 1, shared_bytes)
        values = self.real._signature.values(arguments, -1)  # the CPU, as torch numbers devices
        made = ConfiguredOnCpu(self, (ctypes.c_uint * 8)(*sizes), values)
        made.start(values)
        record_launch(made.name, made, blocks, arguments)

    def active_clusters(self, block: Size, cluster: Size, shared_bytes: int, device: torch.device) -> int:
        self.real.check(cluster, block, shared_bytes, cluster)
        return 2


class ConfiguredOnCpu(NamedTuple):
    """What `rooftop.launch.cuda.Configured` is for a kernel on a GPU."""

    kernel: KernelOnCpu
    sizes: ctypes.Array[ctypes.c_uint]
    values: list[Any]

    takes_descriptors = False

    @property
    def name(self) -> str:
        return self.kernel.real.name

    def launch(self, grid: tuple[int, ...], given: Sequence[Any]) -> None:
        self.start(self.kernel.real.values_at(self.values, given))

    def start(self, values: Sequence[Any]) -> None:
        self.kernel.run(self.sizes, *values)
        self.kernel.launches[self.name.partition("<")[0]] += 1


def _three(size: Size) -> Size:
    return (*(size if isinstance(size, tuple) else (size,)), 1, 1)[:3]


@pytest.fixture(scope="session")
def shared_builds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for results of this run that take long to compute, shared by all workers and their processes."""
    if BUILDS in os.environ:
        return Path(os.environ[BUILDS])
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "builds"
    folder.mkdir(exist_ok=True)
    return folder


def built_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """`folder`, filled by the first worker that requests it; the others wait."""
    with locked(folder.with_suffix(".lock")):
        if not folder.exists():
            unfinished = folder.with_suffix(".unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            make(unfinished)
            unfinished.rename(folder)
        os.utime(folder)  # see `kept_builds`
    return folder


@pytest.fixture(scope="session")
def made_once(shared_builds: Path) -> Callable[[str, Callable[[Path], None]], Path]:
    """`made_once(name, make)`: the folder of that name, filled by `make(folder)` in one of the workers."""
    return lambda name, make: built_once(shared_builds / name, make)


@pytest.fixture(scope="session")
def kept_once() -> Callable[[str, str, Callable[[Path], None]], Path]:
    """`kept_once(kind, key, make)`: the folder of this key, filled by `make(folder)`, which stays for later runs."""
    folder = functools.cache(kept_builds)
    return lambda kind, key, make: built_once(folder(kind) / key, make)


@pytest.fixture(scope="session")
def spilled_bytes(kept_once: Callable[[str, str, Callable[[Path], None]], Path]) -> Callable[[str], int]:
    """`spilled_bytes(ptx)`: bytes that a kernel stores outside registers on an H100, as its assembler says."""
    ptxas = pytest.importorskip("triton").knobs.nvidia.ptxas

    def found(ptx: str) -> int:
        def make(folder: Path) -> None:
            command = [ptxas.path, "-v", "-arch=sm_90a", "-o", os.devnull, "-"]
            log = subprocess.run(command, input=ptx, capture_output=True, text=True, check=True).stderr
            (folder / "log").write_text(log)

        key = hashlib.sha256(f"{ptxas.version} {ptx}".encode()).hexdigest()
        log = (kept_once("ptxas", key, make) / "log").read_text()
        (stored,) = re.findall(r"(\d+) bytes spill stores", log)
        return int(stored)

    return found


@pytest.fixture(scope="session")
def compiled_calls(made_once: Callable[[str, Callable[[Path], None]], Path]) -> None:
    """The C++ part that makes repeated calls, compiled by the first worker that needs it."""
    made_once("compiled_calls", lambda _: repeated_calls.build())
    repeated_calls.build()


@pytest.fixture(scope="session")
def free_port(shared_builds: Path) -> Callable[[], int]:
    """Gives ports at which processes that begin later can listen.

    A port chosen by the system could be taken by then: the system gives it to any connection, and ranks make many.
    Therefore the ports of this fixture are below the range that Linux chooses from, and each is given out once in this
    run.
    """

    def take() -> int:
        with open(shared_builds / "ports", "a+") as given, socket.socket() as found:
            fcntl.flock(given, fcntl.LOCK_EX)
            given.seek(0)
            before = {int(line) for line in given}
            while (port := random.SystemRandom().randrange(16_384, 32_768)) in before or not _binds(found, port):
                pass
            print(port, file=given)
        return port

    return take


def _binds(given: socket.socket, port: int) -> bool:
    try:
        given.bind(("127.0.0.1", port))
    except OSError:
        return False
    return True


@pytest.fixture(scope="session")
def children() -> Callable[..., list[psutil.Process]]:
    """`children("spawn_main")`: processes that this process has started and whose command contains this text.

    A killed process remains a child until it is waited for, but has no command any more, so it is left out.
    """

    def named(words: str, recursive: bool = False) -> list[psutil.Process]:
        found = []
        for each in psutil.Process().children(recursive):
            with suppress(psutil.Error):
                if words in " ".join(each.cmdline()):
                    found.append(each)
        return found

    return named


Switches = dict[str, object]
Measurement = tuple[Ceilings, Switches, Switches]


def switches() -> Switches:
    """All global settings of torch that a measurement could have changed."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch._C._cuda_clearCublasWorkspaces()  # cuBLAS keeps this memory for each stream that has multiplied matrices
    return {
        "matmul tf32": torch.backends.cuda.matmul.allow_tf32,
        "reduced bf16": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "reduced fp16": torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        "cudnn tf32": torch.backends.cudnn.allow_tf32,
        "cudnn benchmark": torch.backends.cudnn.benchmark,
        "matmul precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
        "random": torch.get_rng_state().tolist(),
        "random on the GPU": torch.cuda.get_rng_state().tolist() if cuda else None,
        "device": torch.cuda.current_device() if cuda else None,
        "allocated": torch.cuda.memory_allocated() if cuda else None,
    }


@pytest.fixture(scope="session")
def measured_with_switches_turned() -> Callable[[str], Measurement]:
    """Measure the ceilings of a device; return them, and the global settings before and after."""

    def measured(device: str) -> Measurement:
        usual = (torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark)
        dtype = torch.get_default_dtype()
        try:
            torch.set_float32_matmul_precision("high")
            torch.backends.cudnn.benchmark = True
            torch.set_default_dtype(torch.float64)
            before = switches()
            with torch.device("meta"):
                found = measure_ceilings(device, refresh=True)
            return found, before, switches()
        finally:
            torch.set_float32_matmul_precision(usual[0])
            torch.backends.cudnn.benchmark = usual[1]
            torch.set_default_dtype(dtype)

    return measured


@pytest.fixture(scope="session")
def measurement(shared_builds: Path, measured_with_switches_turned: Callable[[str], Measurement]) -> Measurement:
    """Measure this CPU, which takes a while. The first worker that needs the ceilings measures them, and stores them in
    the cache of this run.

    The rates need not be as exact as for a user, so they are measured in a twelfth of the time, and by products that
    take less than 0.1 s.
    """

    def make(folder: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cpu_probes, "BURST_S", cpu_probes.BURST_S / 4)
            patch.setattr(cpu_probes, "ROUNDS", 1)
            patch.setattr(cpu_probes, "SHAPES", cpu_probes.SHAPES[:-2])
            (folder / "measurement").write_bytes(pickle.dumps(measured_with_switches_turned("cpu")))

    folder = built_once(shared_builds / "ceilings", make)
    found: Measurement = pickle.loads((folder / "measurement").read_bytes())
    return found


@pytest.fixture(scope="session")
def measured(measurement: Measurement) -> Ceilings:
    """The ceilings of this CPU, which `measure_ceilings` now finds in its cache."""
    return measurement[0]


@pytest.fixture
def ctrl_c_raises() -> Iterator[None]:
    """Ctrl-C raises even if the shell has started the tests in the background, where SIGINT is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def compile_at_once(source: str, names: Sequence[str]) -> None:
    """Kernels of one source, compiled for a GPU together, each into the cache where `COMPILE` finds it."""
    options = nvrtc.Options("sm_90")
    signatures = {name: f"rooftop_signature<decltype(&{name})>" for name in names}
    compiled, log = nvrtc._run(source + nvrtc.SIGNATURE, names[0], options, (*names, *signatures.values()))
    symbols = {name: nvrtc._text(symbol) for name, symbol in compiled.symbol_mapping.items()}
    for name, signature in signatures.items():
        types = nvrtc.parameter_types(nvrtc._demangled(symbols[signature]))
        resources = nvrtc._resources(log, symbols[name])
        code = bytes(compiled.code)
        binary = nvrtc.Binary(name, options.arch, symbols[name], types, **resources, log=log, cubin=code)
        nvrtc._save(binary, nvrtc._folder() / f"{nvrtc._key(source, name, options)}.kernel")


def compiled_for_cpu(source: str, names: Sequence[str], headers: Path) -> dict[str, KernelOnCpu]:
    """Kernels of one source, by name; each compiler is started once for all of them, by one worker."""

    def make(folder: Path) -> None:
        compile_at_once(source, names)
        text = '#include "cuda_fp16.h"\n' + source
        for number, name in enumerate(names):
            types = COMPILE(source, name, arch="sm_90").binary.types
            parameters = ", ".join(f"{type_} a{i}" for i, type_ in enumerate(types))
            arguments = ", ".join(f"a{i}" for i in range(len(types)))
            run = f"run_blocks(sizes, [=] {{ {name}({arguments}); }});"
            text += f'\nextern "C" void run_{number}(const unsigned* sizes, {parameters}) {{ {run} }}\n'
        (folder / "kernels.cpp").write_text(text)
        command = [*GXX, "-shared", f"-I{headers}", str(folder / "kernels.cpp"), "-o", str(folder / "kernels.so")]
        subprocess.run(command, check=True)

    key = hashlib.sha256("\n".join((headers.name, *names, source)).encode()).hexdigest()
    library = built_once(headers.parent / key, make) / "kernels.so"
    reals = {name: COMPILE(source, name, arch="sm_90") for name in names}
    return {name: KernelOnCpu(real, library, f"run_{i}") for i, (name, real) in enumerate(reals.items())}


@pytest.fixture(scope="session")
def cuda_headers() -> Path:
    """A folder with the shim under the names of CUDA's headers, compiled once for all kernels. The folder's name is a
    hash of the shim, the compiler's version and options, and the code around kernels."""
    pytest.importorskip("cuda.core")
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    version = subprocess.run(["g++", "--version"], check=True, capture_output=True, text=True).stdout
    parts = (version, *GXX, SHIM.read_text(), inspect.getsource(compiled_for_cpu))
    name = hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def make(folder: Path) -> None:
        (folder / "cuda_fp16.h").write_text(SHIM.read_text())
        (folder / "cuda_bf16.h").write_text("")
        subprocess.run([*GXX, "-x", "c++-header", str(folder / "cuda_fp16.h")], check=True)

    return built_once(kept_builds("cuda_on_cpu") / name, make)


@pytest.fixture
def compile_for_cpu(cuda_headers: Path) -> Callable[[str, Sequence[str]], None]:
    """Compile kernels (source, names) for `cuda_on_cpu` together, which is faster than one by one at launch."""

    def compile_all(source: str, names: Sequence[str]) -> None:
        new = [name for name in names if (source, name) not in _compiled]
        if new:
            found = compiled_for_cpu(source, new, cuda_headers)
            _compiled.update({(source, name): kernel for name, kernel in found.items()})

    return compile_all


@pytest.fixture
def cuda_on_cpu(
    monkeypatch: pytest.MonkeyPatch, compile_for_cpu: Callable[[str, Sequence[str]], None]
) -> Iterator[Counter[str]]:
    """Kernels of CUDA C++ run on CPU tensors; gives the number of launches by name."""
    launches: Counter[str] = Counter()

    def compile(source: str, name: str, **options: Any) -> KernelOnCpu:
        compile_for_cpu(source, [name])
        _compiled[source, name].launches = launches
        return _compiled[source, name]

    monkeypatch.setattr(cuda, "compile", compile)
    monkeypatch.setattr(cuda, "runs_on", lambda tensor: tensor.device.type == "cpu")
    launch_data.device_facts.cache_clear()  # forget the cached fact that these kernels run, or do not run, on the CPU
    yield launches
    launch_data.device_facts.cache_clear()


_compiled: dict[tuple[str, str], KernelOnCpu] = {}


RanksOnCpu = Callable[[int, Callable[[int], Any]], list[Any]]


@pytest.fixture
def cuda_of_ranks(
    monkeypatch: pytest.MonkeyPatch, compile_for_cpu: Callable[[str, Sequence[str]], None], tmp_path: Path
) -> RanksOnCpu:
    """`cuda_of_ranks(3, call)`: the results of call(0), call(1), call(2), each in a thread of its own. The calls' CUDA
    C++ kernels run on CPU tensors at the same time, and may wait for each other."""
    here, lock = threading.local(), threading.Lock()
    copies: dict[tuple[int, str, str], KernelOnCpu] = {}

    def compile(source: str, name: str, **options: Any) -> KernelOnCpu:
        key = (here.rank, source, name)
        with lock:
            if key not in copies:
                compile_for_cpu(source, [name])
                kernel = _compiled[source, name]
                copies[key] = kernel.copied_to(tmp_path / f"{kernel.library.parent.name}-{here.rank}.so")
            return copies[key]

    def numbered(call: Callable[[int], Any], rank: int) -> Any:
        here.rank = rank
        return call(rank)

    def run(ranks: int, call: Callable[[int], Any]) -> list[Any]:
        with ThreadPoolExecutor(ranks) as threads:
            return [each.result() for each in [threads.submit(numbered, call, rank) for rank in range(ranks)]]

    monkeypatch.setattr(cuda, "compile", compile)
    monkeypatch.setattr(cuda, "runs_on", lambda tensor: tensor.device.type == "cpu")
    return run
