"""The vector ladder: z = x + y in float32. One addition moves 12 bytes, so memory bounds this work at every size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from rooftop.cost import Cost
from rooftop.ladder.rungs import CPU, CUDA, PYTORCH, TRITON, Ladder, Rung, interleave, kernel, source, triton_rungs
from rooftop.launch import cuda
from rooftop.launch.triton_launch import launch, processors

FILE = "vector.cu"
BLOCK = 256  # threads
RESIDENT = 8  # this many blocks of 256 threads fill a multiprocessor, which holds 2,048 threads
FLIGHT = 4
ALONE, NARROW, EACH = "one block", "one thread per element, blocks of 32", "one thread per element, blocks of 256"
STRIDE, WIDE, IN_FLIGHT = "grid-stride loop", "16-byte accesses", f"16-byte accesses, {FLIGHT} in flight"
PAGEABLE, PINNED = "with transfers", "with transfers, pinned"
WRONG_THREADS = 500_000


def make(size: int, device: torch.device) -> Ladder:
    """Make the vector ladder: several implementations (rungs) of z = x + y for vectors of `size` elements."""
    x, y, z = torch.randn(size, device=device), torch.randn(size, device=device), torch.empty(size, device=device)
    on_host = [torch.empty(size, pin_memory=pinned) for pinned in ((False, True) if z.is_cuda else (False,))]
    names = (ALONE, NARROW, EACH, STRIDE, WIDE, IN_FLIGHT)
    return Ladder(
        name="vector",
        work=f"z = x + y of {size:,} float32",
        unit="B/s",
        source=FILE,
        cost=Cost(8 * size, 4 * size, {"fp32": size}),
        exact=x + y,
        rungs=(
            *on_cpu(x, y, on_host[0]),
            *interleave(in_cuda(x, y, z), triton_rungs(device, lambda: in_triton(x, y, z), names)),
            Rung("torch.add", PYTORCH, lambda: torch.add(x, y, out=z)),
            *with_transfers(x, y, z, on_host),
        ),
        poisoned=(z, *on_host),
        remarks=lambda ceilings: wrong_launches(x, y, z),
    )


def on_cpu(x: Tensor, y: Tensor, result: Tensor) -> tuple[Rung, ...]:
    """The rungs on the CPU, which write the sum into `result`."""
    hosts = [t.cpu() for t in (x, y)]
    a, b, c = (t.numpy() for t in (*hosts, result))

    def in_numpy() -> Tensor:
        import numpy

        numpy.add(a, b, out=c)
        return result

    def in_numba() -> Tensor:
        _numba_add()(a, b, c)
        return result

    if find_spec("numba") is None:
        numba = Rung("Numba", CPU, None, "host", note='not installed: pip install "rooftop[ladder]"')
    else:
        numba = Rung("Numba", CPU, in_numba, "host", note=f"{torch.get_num_threads()} threads")
    return (
        Rung("NumPy", CPU, in_numpy, "host", note="one thread"),
        numba,
        Rung("PyTorch", CPU, lambda: torch.add(*hosts, out=result), "host", note=f"{torch.get_num_threads()} threads"),
    )


@cache
def _numba_add() -> Callable[..., None]:
    import numba

    @numba.njit(parallel=True)  # type: ignore[misc]
    def add(a, b, c):  # type: ignore[no-untyped-def]
        for i in numba.prange(a.size):
            c[i] = a[i] + b[i]

    threads = torch.get_num_threads()
    numba.set_num_threads(min(threads, numba.get_num_threads()))
    torch.set_num_threads(threads)  # Numba changes torch's number of threads if it starts its own OpenMP
    return add  # type: ignore[no-any-return]


def in_cuda(x: Tensor, y: Tensor, z: Tensor) -> tuple[Rung, ...]:
    """The rungs in CUDA C++."""
    n = z.numel()

    def rung(name: str, instance: str, grid: int, block: int = BLOCK) -> Rung:
        def run() -> Tensor:
            kernel(FILE, instance, z.device).launch(grid, block, x, y, z, n)
            return z

        return Rung(name, CUDA, run, kernels=(instance,))

    return (
        rung(ALONE, "one_block", 1, 1024),
        rung(NARROW, "one_each", -(-n // 32), 32),
        rung(EACH, "one_each", -(-n // BLOCK)),
        rung(STRIDE, "grid_stride", processors(z) * RESIDENT),
        rung(WIDE, "wide<1>", max(1, -(-n // (4 * BLOCK)))),
        rung(IN_FLIGHT, f"wide<{FLIGHT}>", max(1, -(-n // (4 * FLIGHT * BLOCK)))),
    )


def in_triton(x: Tensor, y: Tensor, z: Tensor) -> tuple[Rung, ...]:
    """The counterparts of `in_cuda`'s rungs in Triton."""
    from rooftop.ladder import vector_kernels as kernels

    n = z.numel()

    def rung(name: str, function: object, block: int, warps: int, programs: int | None = None) -> Rung:
        def run() -> Tensor:
            grid = (-(-n // block) if programs is None else programs,)
            launch(function, grid, z.device, x, y, z, n, BLOCK=block, num_warps=warps)
            return z

        return Rung(name, TRITON, run)

    return (
        rung(ALONE, kernels.add_alone, 1024, 32, programs=1),
        rung(NARROW, kernels.add_block, 32, 1),
        rung(EACH, kernels.add_block, BLOCK, 8),
        rung(STRIDE, kernels.add_grid_stride, BLOCK, 8, programs=processors(z) * RESIDENT),
        rung(WIDE, kernels.add_block, 4 * BLOCK, 8),
        rung(IN_FLIGHT, kernels.add_block, 4 * FLIGHT * BLOCK, 8),
    )


def with_transfers(x: Tensor, y: Tensor, z: Tensor, targets: Sequence[Tensor]) -> tuple[Rung, ...]:
    """The rungs with transfers: x and y are copied from the host's memory; z is copied back, and the host waits for
    z. On a GPU, `targets` has the two tensors that receive z, first the one in pageable memory.
    """
    if not z.is_cuda:
        return tuple(Rung(name, CUDA, None, note="needs a GPU") for name in (PAGEABLE, PINNED))

    def rung(name: str, pinned: bool, target: Tensor, note: str) -> Rung:
        sources = [t.cpu().pin_memory() if pinned else t.cpu() for t in (x, y)]

        def run() -> Tensor:
            x.copy_(sources[0], non_blocking=pinned)
            y.copy_(sources[1], non_blocking=pinned)
            kernel(FILE, "wide<1>", z.device).launch(max(1, -(-z.numel() // (4 * BLOCK))), BLOCK, x, y, z, z.numel())
            target.copy_(z, non_blocking=pinned)
            torch.cuda.current_stream(z.device).synchronize()
            return target

        return Rung(name, CUDA, run, "device", ("wide<1>",), note)

    pageable, page_locked = targets
    return (
        rung(PAGEABLE, False, pageable, "pageable memory"),
        rung(PINNED, True, page_locked, "page-locked memory"),
    )


def wrong_launches(x: Tensor, y: Tensor, z: Tensor) -> Sequence[str]:
    """Try two wrong launches, one that no GPU allows and one that leaves elements out. Return remarks on these
    launches."""
    n, found = z.numel(), []
    if cuda.runs_on(z):
        add = kernel(FILE, "one_each", z.device)
    else:
        try:
            add = cuda.compile(source(FILE), "one_each", arch="sm_90")
        except ImportError:
            return ()
    try:
        if cuda.runs_on(z):
            add.launch(1, WRONG_THREADS, x, y, z, n)
        else:
            add.check(1, WRONG_THREADS)
    except ValueError as error:
        found.append(f"a block of {WRONG_THREADS:,} threads is refused before it is launched: {error}")
    if cuda.runs_on(z) and n > BLOCK:
        z.fill_(torch.nan)
        add.launch(n // BLOCK - (n % BLOCK == 0), BLOCK, x, y, z, n)
        left = int(z.isnan().sum())
        found.append(
            f"a grid that is one block too small runs without an error; {left:,} of {n:,} elements are still "
            "the NaN that filled the result before: fill results with NaN, then compare"
        )
    return found
