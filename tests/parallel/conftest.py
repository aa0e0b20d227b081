"""Processes for the tests of `rooftop.parallel`. A whole session has one pool, from which each test takes as many ranks
as it needs. The ranks are forks of a process that has already imported torch, so eight ranks cost little more than one.

Each test gets a separate store and process group, and so a world of the requested size. Processes that do not answer in
time are killed, and are replaced when needed again.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import inspect
import io
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

LIMIT_S = 180.0
GRACE_S = 60.0  # seconds for the other ranks after one has failed

# ---- in all processes --------------------------------------------------------------------------------------------


class Packing(pickle.Pickler):
    """Pickles plain tensors as NumPy arrays, because PyTorch takes 0.3 ms to read each, NumPy 0.01 ms."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.requires_grad:
            return NotImplemented
        if value.device.type != "cpu" or value.layout is not torch.strided or value.dtype not in AS_ARRAYS:
            return NotImplemented
        return torch.from_numpy, (value.contiguous().numpy(),)


AS_ARRAYS = (torch.float64, torch.float32, torch.int64, torch.int32, torch.bool)


def packed(value: Any) -> bytes:
    file = io.BytesIO()
    Packing(file).dump(value)
    return file.getvalue()


# ---- in the processes of the ranks -------------------------------------------------------------------------------


@dataclass
class Outcome:
    """The answer of a rank: the pickled value, or the error."""

    value: bytes = b""
    error: str = ""  # the name of the exception's type
    message: str = ""
    traceback: str = ""


def serve(connection: Connection) -> None:
    """Perform one task after another until the other end is closed."""
    faulthandler.enable()  # prints the stack of a process that crashes
    torch.set_num_threads(1)
    gc.freeze()  # garbage collections skip the objects of torch and other libraries
    while True:
        try:
            task = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        before = dict(os.environ)
        os.environ.update(task["environment"])
        torch.default_generator.manual_seed(1)  # random numbers do not depend on earlier tasks
        try:
            answer = Outcome(value=packed(_performed(**task)))
        except BaseException as error:
            answer = Outcome(b"", type(error).__name__, str(error), traceback.format_exc())
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()  # groups kept alive by a cycle would keep other ranks waiting
        os.environ.clear()
        os.environ.update(before)
        connection.send_bytes(pickle.dumps(vars(answer)))


def _performed(
    module: str, file: str, function: str, arguments: bytes, joined: bool, device: str, **rest: object
) -> Any:
    """Calls a function of a test module by name; module, name and arguments are pickled."""
    from rooftop.parallel import join

    call = loaded(module, file)
    for part in function.split("."):
        call = getattr(call, part)
    with join(device=device, patience_s=LIMIT_S) if joined else nullcontext():
        return call(*pickle.loads(arguments))  # type: ignore[operator]


def loaded(name: str, file: str) -> ModuleType:
    """A test module, loaded under the name that pytest uses."""
    if name not in sys.modules:
        for parent in (name.rsplit(".", depth)[0] for depth in range(name.count("."), 0, -1)):
            sys.modules.setdefault(parent, ModuleType(parent)).__dict__.setdefault("__path__", [])
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
        gc.collect()
        gc.freeze()
    return sys.modules[name]


# ---- in the process of the tests ---------------------------------------------------------------------------------


class RanksFailed(AssertionError):
    """Some rank raised or did not answer.

    Attributes:
        errors: "Type: message" by rank; "killed" for a rank that did not answer.
    """

    def __init__(self, errors: Mapping[int, str], tracebacks: str) -> None:
        super().__init__(tracebacks)
        self.errors = dict(errors)


@dataclass
class Pool:
    """Processes that act as ranks; more are started when a test needs them."""

    processes: list[tuple[BaseProcess, Connection]] = field(default_factory=list)
    tasks: int = 0

    def run(
        self,
        world_size: int,
        function: Callable[..., Any],
        *arguments: Any,
        joined: bool = True,
        device: str = "cpu",
        environments: Mapping[int, Mapping[str, str]] | None = None,
        limit_s: float = LIMIT_S,
    ) -> list[Any]:
        """Calls a function of a test module, `function(*arguments)`, on every rank.

        Args:
            joined: whether to call inside `rooftop.parallel.join(device=device)`. If not, only the launcher's variables
                are set.
            device: "cpu" with gloo, or "cuda" with NCCL and a GPU for each rank.
            environments: variables by rank, in addition to the launcher's. A rank that is not in this dict does not
                start.
            limit_s: the time after which all ranks without an answer are killed.

        Returns:
            The results of the function, by rank.

        Raises:
            RanksFailed: with the traceback of every failed rank.
        """
        self.tasks += 1
        store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=limit_s)
        )
        extra = environments or {rank: {} for rank in range(world_size)}
        call = {
            "module": function.__module__,
            "file": inspect.getfile(function),
            "function": function.__qualname__,
            "arguments": packed(arguments),
            "joined": joined,
            "device": device,
        }
        waiting: dict[Connection, int] = {}
        for rank, connection in zip(extra, self._connections(len(extra)), strict=True):
            variables = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": str(self.tasks),
                **extra[rank],
            }
            connection.send_bytes(pickle.dumps({**call, "environment": variables}))
            waiting[connection] = rank
        return self._gathered(waiting, limit_s)

    def _connections(self, count: int) -> list[Connection]:
        while len(self.processes) < count:
            context = get_context("forkserver")
            ours, theirs = context.Pipe()
            start = f"import runpy; runpy.run_path({__file__!r}, run_name='ranks')['serve'](connection)"
            process = context.Process(target=exec, args=(start, {"connection": theirs}), daemon=True)
            process.start()
            theirs.close()
            self.processes.append((process, ours))
        return [connection for _, connection in self.processes[:count]]

    def _gathered(self, waiting: dict[Connection, int], limit_s: float) -> list[Any]:
        values: dict[int, Any] = {}
        errors: dict[int, str] = {}
        said = []
        until = time.monotonic() + limit_s
        while waiting and (left := until - time.monotonic()) > 0:
            for connection in wait(list(waiting), left):
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    answer = Outcome(**pickle.loads(connection.recv_bytes()))
                except (EOFError, ConnectionResetError):
                    answer = Outcome(b"", "died", "", "it ended without an answer\n")
                    self._end(connection)
                if not answer.error:
                    values[rank] = pickle.loads(answer.value)
                    continue
                errors[rank] = f"{answer.error}: {answer.message}" if answer.message else answer.error
                said.append(f"rank {rank}:\n{answer.traceback}")
                until = min(until, time.monotonic() + GRACE_S)
        for connection, rank in waiting.items():
            errors[rank] = "killed"
            said.append(f"rank {rank} did not answer in time, and was killed\n")
            self._end(connection)
        if errors:
            raise RanksFailed(errors, "\n" + "\n".join(said))
        return [values[rank] for rank in sorted(values)]

    def _end(self, connection: Connection) -> None:
        for process, ours in self.processes:
            if ours is connection:
                process.kill()
                process.join()
        self.processes = [pair for pair in self.processes if pair[1] is not connection]
        connection.close()

    def close(self) -> None:
        for _, connection in list(self.processes):
            self._end(connection)


Run = Callable[..., list[Any]]


@pytest.fixture(scope="session")
def pool(fork: object) -> Iterator[Pool]:
    """The pool of ranks, forked from the process that `fork` has started."""
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def on_ranks(pool: Pool) -> Run:
    """`on_ranks(4, function, *arguments)`: the results of the function on four ranks (see `Pool.run`)."""
    return pool.run


@pytest.fixture(scope="session")
def ranks_failed() -> type[RanksFailed]:
    """The exception of `on_ranks`; its `errors` has the error of each rank."""
    return RanksFailed
