"""Let several processes analyze one program together, without a hang if one process fails.

A step of a distributed program contains collectives, so it only ends if every rank runs it. A measurement repeats a
step until its timing is accurate enough, and the number of repetitions differs from rank to rank. So one rank leads:
`SharedProgram.lead` measures on rank 0, and the other ranks run each of its steps.

Outcomes are exchanged through the store of torch.distributed, not by a collective: a failed rank might never join a
collective, but it can still report the reason. All ranks report the first failure; later failures are mostly
"connection closed" on ranks that were waiting. A rank that waits inside a collective continues when the failed process
ends (gloo), when a thread that watches the store aborts the communicators (NCCL), or at the group's timeout.
"""

from __future__ import annotations

import gc
import os
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import wraps
from itertools import count
from typing import Any, TypeVar, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rooftop.analysis.program import Program
from rooftop.errors import MeasurementError, RooftopError
from rooftop.words import counted, whole_message

T = TypeVar("T")

# timeout of a collective in the groups created here; only a lost rank makes a collective last that long
GLOO_TIMEOUT = timedelta(minutes=2)
LEADER_TIMEOUT = timedelta(hours=2)  # timeout between two steps of the leading rank, which may be compiling
# maximum time for which a rank that has finished a common piece of work waits for the other ranks
OUTCOME_TIMEOUT = timedelta(minutes=15)
STORE_TIMEOUT = timedelta(seconds=10)  # timeout for reaching the store of an existing torchrun
WATCH_S = 0.2

_STEP, _STOP = b"step", b"stop"


def several_ranks() -> bool:
    """Whether this process is one of several in an initialised torch.distributed."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def first_rank() -> bool:
    """Whether this process prints and writes files (rank 0). Works also before torch.distributed is initialised, and
    after it is destroyed."""
    if several_ranks():
        return dist.get_rank() == 0
    return int(os.environ.get("RANK", "0")) == 0


def first_to_say(message: str) -> bool:
    """Whether this process is the first of the processes of a `torchrun` to call this function with this message;
    always True for a single process.

    This function needs no process group. `torchrun` ends all ranks as soon as one rank has failed. So the first rank to
    fail must print the reason, whichever rank it is. Different `torchrun`s, and restarts, are independent.
    """
    start = "/".join(os.environ.get(name, "0") for name in ("GROUP_RANK", "TORCHELASTIC_RESTART_COUNT"))
    try:
        store = agent_store()
        return store is None or bool(store.add(f"rooftop/said/{start}/{message}", 1) == 1)
    except RuntimeError:  # without the store, print: printing twice is better than not at all
        return True


def agent_store() -> Any:
    """The store that `torchrun` itself serves. The store needs no process group. None if there is no store or it has
    ended."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return dist.TCPStore(  # type: ignore[attr-defined]
            address, port, is_master=False, timeout=STORE_TIMEOUT, wait_for_workers=False
        )
    except (KeyError, ValueError, RuntimeError):
        return None


@contextmanager
def process_group(device: torch.device) -> Iterator[torch.device]:
    """Set up torch.distributed as `torchrun` requests. A group that is created here is destroyed after the block; an
    existing group stays.

    Args:
        device: its type selects the backend: NCCL for "cuda", gloo for "cpu".

    Yields:
        This rank's device: the GPU number LOCAL_RANK if `torchrun` started several ranks, else `device`.

    Raises:
        MeasurementError: this machine has fewer GPUs than it has ranks.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1 or not dist.is_available():
        yield device
        return
    if device.type == "cuda":
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if local >= torch.cuda.device_count():
            raise MeasurementError(
                f"rank {os.environ.get('RANK', '?')} is number {local} on this machine, which has "
                f"{counted(torch.cuda.device_count(), 'GPU')}: expected --nproc-per-node of at most the number of "
                "GPUs, or --device cpu"
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    if dist.is_initialized():
        yield device
        return
    if device.type == "cuda":
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo", timeout=GLOO_TIMEOUT)
    try:
        yield device
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def process_groups_kept() -> Iterator[None]:
    """Keep process groups that a program destroys in the block alive until the block ends and the program's variables
    are gone.

    A DistributedDataParallel that outlives its group frees the group while it holds the GIL. Freeing waits for gloo's
    threads, one of which may still need the GIL to free its own context, which holds Python objects. In rare cases
    PyTorch 2.13 then hangs. If Python itself frees the group, as here, the GIL is released during the wait.
    """
    if not dist.is_available():
        yield
        return
    kept: list[Any] = []
    destroy = dist.destroy_process_group

    @wraps(destroy)
    def keep_and_destroy(group: Any = None) -> None:
        kept.extend(dist.distributed_c10d._world.pg_map)
        destroy(group)

    with (
        patch.object(dist, "destroy_process_group", keep_and_destroy),
        patch.object(dist.distributed_c10d, "destroy_process_group", keep_and_destroy),
    ):
        yield
    if kept:
        gc.collect()  # objects that use the groups may be part of a reference cycle
        kept.clear()


def distributed(target: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Wrap a module in DistributedDataParallel, which averages the gradients, for data-parallel training.

    A target is returned unchanged if it is not a module, is already distributed, has nothing to train or runs in a
    single process. Every rank must call this: the wrapper sends rank 0's parameters to the others.
    """
    if not several_ranks() or not isinstance(target, nn.Module):
        return target
    if any(_is_distributed(part) for part in target.modules()) or not any(p.requires_grad for p in target.parameters()):
        return target
    return DistributedDataParallel(target, device_ids=[device] if device.type == "cuda" else None)


def _is_distributed(part: nn.Module) -> bool:
    """Whether a module is distributed: DistributedDataParallel, FullyShardedDataParallel, `fully_shard`, or tensor
    parallelism (sharded parameters).
    """
    return type(part).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel") or any(
        type(p).__name__ == "DTensor" for p in part.parameters(recurse=False)
    )


def rank_name(device: torch.device | str) -> str:
    """The device's name in a row of the table, with the host's name if there are several hosts."""
    here, everywhere = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("WORLD_SIZE")
    several_hosts = here is not None and here != everywhere
    return f"{socket.gethostname()}/{device}" if several_hosts else str(device)


def barrier(device: torch.device) -> None:
    """Wait for all ranks; with NCCL, on this rank's device."""
    dist.barrier(device_ids=[device.index or 0] if "nccl" in dist.get_backend() and device.type == "cuda" else None)


def on_all_ranks(work: Callable[[], T]) -> list[T]:
    """Run a function on every rank. Every rank gets the outcomes of all ranks, in order.

    Every rank must call this equally often and in the same order, because the n-th calls of all ranks belong together.
    Outcomes must be picklable.

    Raises:
        MeasurementError: the work raised on some rank; the message has the rank and the reason. The failed rank does
            not wait for the others.
    """
    # each rank counts its calls, so the number of this call is the same on every rank
    number = _store().add(f"rooftop/calls/{dist.get_rank()}", 1)
    with _watching(number):
        try:
            outcome = pickle.dumps(work())
        except Exception as error:
            raise _failure(number, error) from error
    return cast(list[T], _exchanged(number, outcome))


def _exchanged(number: int, outcome: bytes) -> list[Any]:
    store, rank, ranks = _store(), dist.get_rank(), range(dist.get_world_size())
    store.set(f"rooftop/{number}/{rank}", outcome)
    outcomes = []
    for other in ranks:
        try:
            store.wait([f"rooftop/{number}/{other}"], OUTCOME_TIMEOUT)
        except Exception as error:  # rank 0 or torchrun serves the store, and may have ended
            what = f"did not finish within {OUTCOME_TIMEOUT} of rank {rank}"
            raise MeasurementError(f"rank {other} of {len(ranks)} {what} ({error})") from error
        outcomes.append(store.get(f"rooftop/{number}/{other}"))
    if any(not plain for plain in outcomes):
        raise _failure(number, None)
    return [pickle.loads(plain) for plain in outcomes]


def _failure(number: int, error: Exception | None) -> MeasurementError:
    """The first failure of any rank, as an error. If no rank has recorded a failure yet, record this rank's as the
    first."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = f"rank {rank} of {ranks} failed: {_reason(error)}" if error is not None else "a rank failed"
    if isinstance(error, MeasurementError) and str(error).startswith("rank "):
        mine = str(error)  # an inner call's error already names the rank
    try:
        store = _store()
        first = store.compare_set(f"rooftop/{number}/failed", "", mine).decode()
        if error is not None:
            store.set(f"rooftop/{number}/{rank}", b"")
    except Exception:  # rank 0, which serves the store, has ended and reports its failure
        why = "" if error is None else f"; rank {rank} could not report its own error: {_reason(error)}"
        first = mine if rank == 0 else f"rank 0 of {ranks} failed: it has ended{why}"
    return MeasurementError(first or mine)


def _reason(error: Exception) -> str:
    text = whole_message(error)
    return text if isinstance(error, RooftopError) and text else f"{type(error).__name__}: {text}"


@contextmanager
def _watching(number: int) -> Iterator[None]:
    """With NCCL, if any rank records a failure during the block, abort this rank's communicators. A collective in which
    this rank waits for the failed rank then ends.

    gloo has no abort; its collectives fail when the failed process ends.
    """
    if "nccl" not in dist.get_backend():
        yield
        return
    done = threading.Event()
    store = _store().clone()  # a separate connection, because the first connection may be waiting

    def watch() -> None:
        try:
            while not done.wait(WATCH_S):
                if store.check([f"rooftop/{number}/failed"]):
                    break
            else:
                return
            groups = sorted(dist.distributed_c10d._world.pg_names.items(), key=lambda item: item[1], reverse=True)
            for group, _ in groups:
                group.abort()
        except RuntimeError:  # the program is ending: the store or the groups are gone
            return

    thread = threading.Thread(target=watch, name="rooftop watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(timeout=10 * WATCH_S)


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


class SharedProgram(Program):
    """A program whose step all ranks run together. Every rank creates a `SharedProgram` for the same target (see
    `Program`).

    Outside `lead` each rank starts its steps itself, and every rank must run the same number of steps.
    """

    _announced: Iterator[str] | None = None

    def lead(self, work: Callable[[], T]) -> T:
        """Run a function on rank 0, while the other ranks run each of its steps too. All ranks get the function's
        result.

        Raises:
            MeasurementError: a step failed on some rank, or the function failed on rank 0; the message has the rank and
                the reason.
        """
        run = str(_store().add(f"rooftop/runs/{dist.get_rank()}", 1))
        keys = (f"rooftop/run {run}/step {number}" for number in count())
        if dist.get_rank() == 0:
            return on_all_ranks(lambda: self._led(work, keys))[0]
        return cast(T, on_all_ranks(lambda: self._follow(keys))[0])

    def step(self, observe: Callable[[Any], None] = lambda output: None) -> None:
        """Run one step. Within `lead`, all ranks run the step (see `Program.step`)."""
        if self._announced is not None:
            _store().set(next(self._announced), _STEP)
        super().step(observe)

    def _led(self, work: Callable[[], T], keys: Iterator[str]) -> T:
        self._announced = keys
        try:
            return work()
        finally:
            self._announced = None
            _store().set(next(keys), _STOP)

    def _follow(self, keys: Iterator[str]) -> Any:
        store = _store()
        with self.preserved():
            for key in keys:
                store.wait([key], LEADER_TIMEOUT)
                if store.get(key) == _STOP:
                    break
                super().step()
