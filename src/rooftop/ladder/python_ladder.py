"""The python ladder: find the nearest centre of each point, from plain Python to the roof.

With 64 centres, a point takes 576 operations and moves 16 bytes (the point and its result). So arithmetic limits the
work on every machine, and each rung has a clear roof: the measured float32 rate of one core, of all cores, or of the
GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rooftop.cost import Cost
from rooftop.ladder import nearest
from rooftop.ladder.nearest import CENTRES, FLOPS_PER_PAIR, Array, made_points
from rooftop.ladder.rungs import CUDA, PYTORCH, kernel
from rooftop.ladder.worker_processes import MOST, Workers, bounds, pickled_bytes
from rooftop.launch import cuda

PYTHON, NUMPY, NUMBA, PROCESSES, DASK = "Python", "NumPy", "Numba", "processes", "Dask"
ONE, ALL, GPU = "one core", "all cores", "GPU"
Clock = Literal["host", "graph", "device"]

# default, smallest and largest number of points; for the largest, plain Python takes a minute or more
SIZE, LEAST, LARGEST_SIZE = 1 << 15, 64, 1 << 22
PIECE_POINTS = 4096  # Ctrl-C waits for the piece of each thread; plain Python takes 30 ms for a piece
PART_POINTS = 128  # plain Python takes a millisecond for these points, short enough that some samples are undisturbed
FILE = "nearest.cu"
POINTS, THREADS = 4, 128  # points per thread, threads per block
NEEDS_NUMBA = 'not installed: pip install "rooftop[ladder]"'
NEEDS_DASK = 'not installed: pip install "rooftop[cluster]"'
NEEDS_GPU = "needs an NVIDIA GPU"


@dataclass(frozen=True)
class SpeedRung:
    """One implementation of the work.

    Attributes:
        name, tool: what the rung does, and with which tool.
        run: function that returns the distances (n,) as a list, an array or a tensor. None if the rung cannot run;
            `note` says why.
        roof: the unit whose rate limits the rung: ONE, ALL or GPU.
        stop: the condition under which this rung is fast enough, in words.
        copied: function that returns the bytes that one call copies between processes, or between host and GPU. None
            if nothing is copied.
        clock: how the rung is timed: called on the host, replayed from a CUDA graph, or called between events on the
            GPU.
        note: a remark in a few words.
        part: function that computes one of many equal parts, which all take the same time. Other programs disturb the
            timing of a part less than the timing of a whole call.
    """

    name: str
    tool: str
    run: Callable[[], Any] | None
    roof: str
    stop: str
    copied: Callable[[], int] | None = None
    clock: Clock = "host"
    note: str = ""
    part: Callable[[int], Any] | None = None


@dataclass(frozen=True)
class SpeedLadder:
    """The rungs of the python ladder; the first is the reference.

    Attributes:
        work: a description of the work.
        cost: bytes and flops that every rung needs at least.
        processes: number of processes that the ladder uses.
        rungs: usually from the slowest to the fastest.
        parts: number of equal parts of the work, for rungs that have a `part` function.
    """

    work: str
    cost: Cost
    processes: int
    rungs: tuple[SpeedRung, ...]
    parts: int = 1


@contextmanager
def python_ladder(size: int | None = None, device: torch.device | str | None = None) -> Iterator[SpeedLadder]:
    """Make the points and start the processes. The processes end with the `with` block.

    Args:
        size: number of points, from `LEAST` to `LARGEST_SIZE`; None means `SIZE`.
        device: device of the rungs on a GPU; None means the GPU if there is one.

    Raises:
        ValueError: the size is not from `LEAST` to `LARGEST_SIZE`.
    """
    count = checked_count(size)
    where = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    points, centres = made_points(count)
    processes = min(torch.get_num_threads(), MOST)
    with ExitStack() as stack:
        rungs = (
            *in_plain_python(points, centres, processes, stack),
            *in_numpy(points, centres),
            *in_numba(points, centres, processes, stack),
            *in_processes(points, centres, processes, stack),
            in_torch(points, centres),
            *on_gpu(points, centres, where),
        )
        pairs = count * CENTRES
        yield SpeedLadder(
            work=f"the nearest of {CENTRES} centres for each of {count:,} points in space, float32",
            cost=Cost(12 * count + 12 * CENTRES, 4 * count, {"fp32": FLOPS_PER_PAIR * pairs}),
            processes=processes,
            rungs=rungs,
            parts=max(1, count // PART_POINTS),
        )


def checked_count(size: int | None) -> int:
    """The number of points of a ladder of this size; None means `SIZE`.

    Raises:
        ValueError: the size is not an integer from `LEAST` to `LARGEST_SIZE`.
    """
    count = SIZE if size is None else size
    if type(count) is not int:
        raise ValueError(f"the python ladder takes an integer number of points, got {count!r}")
    if not LEAST <= count <= LARGEST_SIZE:
        raise ValueError(f"the python ladder takes {LEAST} to {LARGEST_SIZE:,} points, got {count:,}")
    return count


def tuples(points: Array) -> list[Any]:
    """Convert points (3, n) to the form of plain Python: a list of n tuples."""
    return list(map(tuple, points.T.tolist()))


# ---- in a single process -----------------------------------------------------------------------------------------


def in_plain_python(points: Array, centres: Array, threads: int, stack: ExitStack) -> tuple[SpeedRung, ...]:
    """The rungs in plain Python: a loop, and the same loop in threads."""
    listed, targets = tuples(points), tuples(centres.T)
    pool = stack.enter_context(ThreadPoolExecutor(threads))

    def one_by_one(parts: int = 1) -> list[float]:
        return nearest.in_python(listed[: len(listed) // parts], targets)

    def in_threads(parts: int = 1) -> list[float]:
        count = len(listed) // parts
        pieces = [listed[first:last] for first, last in bounds(count, max(threads, count // PIECE_POINTS))]
        return [each for piece in pool.map(partial(nearest.in_python, centres=targets), pieces) for each in piece]

    return (
        SpeedRung("loops", PYTHON, one_by_one, ONE, "it runs rarely, or a second does not matter", part=one_by_one),
        SpeedRung(
            "loops in threads",
            PYTHON,
            in_threads,
            ALL,
            "threads wait for files or the network and do not compute: the GIL lets only one run Python at a time",
            note=f"{threads} threads",
            part=in_threads,
        ),
    )


def in_numpy(points: Array, centres: Array) -> tuple[SpeedRung, ...]:
    """The rungs in NumPy, which process whole arrays at a time."""
    temporaries = 4 * CENTRES * points.shape[1] * 7
    return (
        SpeedRung(
            "one expression",
            NUMPY,
            lambda: nearest.broadcast(points, centres),
            ONE,
            "the temporaries fit in a cache; otherwise memory sets the time",
            note=f"{temporaries / 1e6:,.0f} MB of temporaries",
        ),
        SpeedRung(
            "in place, in blocks",
            NUMPY,
            lambda: nearest.in_place(points, centres),
            ONE,
            "the work already uses whole arrays: each operation is one pass over a cache",
        ),
    )


def in_numba(points: Array, centres: Array, threads: int, stack: ExitStack) -> tuple[SpeedRung, ...]:
    """The rungs in Numba: compiled loops, on one core and on all cores."""
    names = {
        "the same loops, compiled": (ONE, "it is fast enough: the function itself stays unchanged"),
        "loops for vectors": (ONE, "it is near the roof of one core, or other programs use the other cores"),
        "... in threads without the GIL": (ALL, "the program already uses threads"),
        "... parallel": (ALL, "it is near the roof of all cores: only another machine or less work is faster"),
    }
    if find_spec("numba") is None:
        return tuple(SpeedRung(name, NUMBA, None, roof, stop, note=NEEDS_NUMBA) for name, (roof, stop) in names.items())
    import numba

    from rooftop.ladder.nearest_loops import as_written, for_vectors, parallel_loop

    distances = np.empty(points.shape[1], np.float32)
    count, pool = distances.size, stack.enter_context(ThreadPoolExecutor(threads))
    before = torch.get_num_threads()
    in_parallel, most = parallel_loop(), numba.get_num_threads()
    torch.set_num_threads(before)  # Numba changes torch's number of threads if it starts its own OpenMP

    def on_one_core(loop: Callable[..., None]) -> Array:
        distances.fill(np.nan)
        loop(points, centres, distances, 0, count)
        return distances

    def in_threads() -> Array:
        distances.fill(np.nan)
        for _ in pool.map(lambda part: for_vectors(points, centres, distances, *part), bounds(count, threads)):
            pass
        return distances

    def on_all_cores() -> Array:
        distances.fill(np.nan)
        before = torch.get_num_threads()
        numba.set_num_threads(min(before, most))
        in_parallel(points, centres, distances)
        torch.set_num_threads(before)
        return distances

    runs: tuple[Callable[[], Array], ...] = (
        partial(on_one_core, as_written),
        partial(on_one_core, for_vectors),
        in_threads,
        on_all_cores,
    )
    return tuple(
        SpeedRung(name, NUMBA, run, roof, stop) for (name, (roof, stop)), run in zip(names.items(), runs, strict=True)
    )


def in_torch(points: Array, centres: Array) -> SpeedRung:
    """The rung in PyTorch, which processes whole tensors at a time, on all cores."""
    x = torch.from_numpy(points)
    return SpeedRung(
        "in place",
        PYTORCH,
        torch_call(x, torch.from_numpy(centres)),
        ALL,
        "the data are already tensors, or a GPU or gradients come next",
    )


def torch_call(points: Tensor, centres: Tensor) -> Callable[[], Tensor]:
    """Return a function that does the work with PyTorch operators on these points (3, n) and centres (k, 3), on any
    device. The function returns (n,).
    """
    best, difference, distance = torch.empty(3, points.shape[1], device=points.device)
    targets = centres.tolist()

    def run() -> Tensor:
        best.fill_(torch.inf)
        for centre in targets:
            for axis in range(3):
                torch.sub(points[axis], centre[axis], out=difference)
                if axis == 0:
                    torch.mul(difference, difference, out=distance)
                else:
                    distance.addcmul_(difference, difference)
            torch.minimum(best, distance, out=best)
        return best

    return run


# ---- processes ---------------------------------------------------------------------------------------------------


def in_processes(points: Array, centres: Array, count: int, stack: ExitStack) -> tuple[SpeedRung, ...]:
    """The rungs in processes: plain Python in a Pool, the compiled loop with each of Python's ways to pass data, and
    Dask.
    """
    numba = find_spec("numba") is not None
    started: list[Workers] = []

    def workers() -> Workers:
        if not started:
            started.append(Workers.start(count, points, centres))
            stack.callback(started[0].close)
        return started[0]

    listed, targets, places = tuples(points), tuples(centres.T), bounds(points.shape[1], count)
    lists = [(listed[first:last], targets) for first, last in places]
    arrays = [(np.ascontiguousarray(points[:, first:last]), centres) for first, last in places]
    of_results = sum(pickled_bytes([np.empty(last - first, np.float32)]) for first, last in places)

    def loops_in_pool() -> list[float]:
        return [each for part in workers().in_pool(nearest.in_python, lists) for each in part]

    def of_lists() -> int:
        return pickled_bytes(lists) + pickled_bytes(
            nearest.in_python(part[:1], targets) * len(part) for part, _ in lists
        )

    def of_arrays() -> int:
        return pickled_bytes(arrays) + of_results

    def compiled_in_pool() -> Array:
        from rooftop.ladder.nearest_loops import of_part

        return np.concatenate(workers().in_pool(of_part, arrays))

    def shared() -> Array:
        workers().distances.fill(np.nan)
        return workers().through_shared_memory(places)

    parts = [part for part, _ in arrays]
    compiled: tuple[tuple[str, Callable[[], Any], Callable[[], int], str], ...] = (
        ("Pool, compiled", compiled_in_pool, of_arrays, "a call takes far longer than its bytes take to copy"),
        (
            "Queue, compiled",
            lambda: np.concatenate(workers().through_queue(parts, centres)),
            of_arrays,
            "some parts take longer: a free process takes the next part",
        ),
        (
            "Pipe, compiled",
            lambda: np.concatenate(workers().through_pipes(parts, centres)),
            of_arrays,
            "each process has its own part, so copies cost the least",
        ),
        (
            "share_memory_, compiled",
            shared,
            lambda: pickled_bytes(places) + pickled_bytes([True] * count),
            "processes are necessary and the data are large: only a message is copied",
        ),
    )
    return (
        SpeedRung(
            "loops in a Pool",
            PROCESSES,
            loops_in_pool,
            ALL,
            "the code cannot be compiled (strings, dicts): N cores make it at most N times faster",
            of_lists,
            note=f"{count} processes",
        ),
        *(
            SpeedRung(name, PROCESSES, run if numba else None, ALL, stop, copied, note="" if numba else NEEDS_NUMBA)
            for name, run, copied, stop in compiled
        ),
        *in_dask(points, centres, listed, targets, lists, of_lists, count, workers),
    )


def in_dask(
    points: Array,
    centres: Array,
    listed: list[Any],
    targets: list[Any],
    lists: Sequence[tuple[Any, Any]],
    of_lists: Callable[[], int],
    count: int,
    workers: Callable[[], Workers],
) -> tuple[SpeedRung, ...]:
    """The rungs that use Dask on one machine: a bag in processes, an array in threads, and delayed calls in threads."""
    names = {
        "bag": "the data are Python objects from many files",
        "array": "the arrays are larger than memory",
        "delayed": "the calls depend on each other, or one machine is not enough",
    }
    numba, dask = find_spec("numba") is not None, find_spec("dask") is not None
    missing = dict.fromkeys(names, "" if dask else NEEDS_DASK)
    missing["delayed"] = missing["delayed"] or ("" if numba else NEEDS_NUMBA)

    def bag() -> list[float]:
        import dask.bag

        found = dask.bag.from_sequence(listed, npartitions=count).map_partitions(nearest.in_python, targets)
        return found.compute(scheduler="processes", pool=workers().pool, chunksize=1)  # type: ignore[no-any-return]

    def array() -> Array:
        import dask.array

        parts = dask.array.from_array(points, chunks=(3, -(-points.shape[1] // count)))
        found = parts.map_blocks(nearest.in_place, centres, drop_axis=0, dtype=np.float32, meta=np.empty(0, np.float32))
        return found.compute(scheduler="threads", num_workers=count)  # type: ignore[no-any-return]

    def calls() -> Array:
        from dask.base import compute
        from dask.delayed import delayed

        from rooftop.ladder.nearest_loops import of_part

        parts = [delayed(of_part)(points[:, first:last], centres) for first, last in bounds(points.shape[1], count)]
        return np.concatenate(compute(*parts, scheduler="threads", num_workers=count))

    runs: dict[str, tuple[Callable[[], Any], Callable[[], int], str]] = {
        "bag": (bag, of_lists, "plain Python in processes"),
        "array": (array, lambda: 0, "NumPy in threads"),
        "delayed": (calls, lambda: 0, "Numba in threads"),
    }
    return tuple(
        SpeedRung(
            name,
            DASK,
            None if missing[name] else runs[name][0],
            ALL,
            stop,
            runs[name][1],
            note=missing[name] or runs[name][2],
        )
        for name, stop in names.items()
    )


# ---- a GPU -------------------------------------------------------------------------------------------------------


def on_gpu(points: Array, centres: Array, device: torch.device) -> tuple[SpeedRung, ...]:
    """The rungs on a GPU: the operators of `torch_call`, a kernel, and the kernel together with its transfers."""
    names: dict[str, tuple[str, str]] = {
        "in place, on the GPU": (PYTORCH, "the data are on the GPU, and the rest of the program takes longer"),
        "one kernel": (CUDA, "it is near the roof of the GPU"),
        "one kernel, with transfers": (
            CUDA,
            "the GPU has more work to do with the data; otherwise the copies take the time",
        ),
    }
    x, targets = torch.from_numpy(points), torch.from_numpy(centres)
    if device.type != "cuda" and not cuda.runs_on(x):
        return tuple(SpeedRung(name, tool, None, GPU, stop, note=NEEDS_GPU) for name, (tool, stop) in names.items())
    there, centres_there = x.to(device), targets.to(device)
    pinned = device.type == "cuda"
    given = x.pin_memory() if pinned else x
    result = torch.full((x.shape[1],), torch.nan, device=device)  # NaN reveals elements that no rung writes
    taken = torch.full((x.shape[1],), torch.nan, pin_memory=pinned)

    def one_kernel() -> Tensor:
        grid = max(1, -(-result.numel() // (POINTS * THREADS)))
        compiled = kernel(FILE, f"nearest<{POINTS}>", device)
        compiled.launch(grid, THREADS, there, centres_there, result, result.numel(), centres.shape[0])
        return result

    def with_transfers() -> Tensor:
        there.copy_(given, non_blocking=True)
        taken.copy_(one_kernel(), non_blocking=True)
        if pinned:
            torch.cuda.current_stream(device).synchronize()
        return taken

    runs: tuple[tuple[Callable[[], Tensor], Clock], ...] = (
        (torch_call(there, centres_there), "graph"),
        (one_kernel, "graph"),
        (with_transfers, "device"),
    )
    bytes_moved = x.nbytes + result.nbytes
    return tuple(
        SpeedRung(name, tool, run, GPU, stop, (lambda: bytes_moved) if clock == "device" else None, clock)
        for (name, (tool, stop)), (run, clock) in zip(names.items(), runs, strict=True)
    )
