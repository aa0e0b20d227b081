"""A ladder: a computation, its reference result, and several implementations, called rungs. `LADDERS` names the file
that builds each ladder.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from rooftop.cost import Cost
from rooftop.hardware import Ceilings
from rooftop.launch import cuda
from rooftop.launch.triton_launch import INTERPRETED
from rooftop.words import did_you_mean

CUDA, TRITON, PYTORCH, CPU = "CUDA C++", "Triton", "PyTorch", "CPU"
Clock = Literal["graph", "device", "host"]


@dataclass(frozen=True)
class Rung:
    """One implementation of the ladder's work.

    Attributes:
        name: what the rung adds to the previous rung.
        tool: CUDA, TRITON, CPU, or PYTORCH (or the name of the library that PyTorch calls).
        run: function that does the work and returns the result. None if the rung cannot run; `note` says why.
        clock: how the rung is timed if there is a GPU. "graph": replayed from a CUDA graph. "device": called between
            events on the GPU. "host": timed by the CPU's clock.
        kernels: names of the kernel instances in the ladder's CUDA C++ source that the rung launches.
        note: a remark in a few words.
    """

    name: str
    tool: str
    run: Callable[[], Tensor] | None
    clock: Clock = "graph"
    kernels: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Ladder:
    """A computation and the rungs, its implementations.

    Attributes:
        name: the name on the command line.
        work: the formula, sizes and dtypes.
        unit: unit of the rates, "B/s" or "FLOP/s".
        source: the CUDA C++ source.
        cost: bytes and flops that every rung needs at least.
        exact: the correct result.
        rtol, atol: how far an element may differ; 0 if every order of the sums gives the same result.
        rungs: in the order of the table.
        poisoned: output tensors of the rungs, which are filled with NaN before each rung is checked.
        remarks: function that takes the GPU's ceilings (None if they were not measured), may run further tests, and
            returns sentences to print below the table.
    """

    name: str
    work: str
    unit: str
    source: str
    cost: Cost
    exact: Tensor
    rungs: tuple[Rung, ...]
    rtol: float = 0.0
    atol: float = 0.0
    poisoned: tuple[Tensor, ...] = ()
    remarks: Callable[[Ceilings | None], Sequence[str]] = lambda ceilings: ()


@dataclass(frozen=True)
class Entry:
    """A ladder that can be built.

    Attributes:
        module: the ladder's file.
        summary: one line for the help text.
        size: default size on a GPU.
        small: default size if Triton's interpreter runs the kernels.
        most: the largest size, limited by 16 GB of GPU memory or by the 32-bit loop indices of Triton kernels.
        what: what the size counts, such as "elements".
        multiple: number of which the size must be a multiple.
    """

    module: str
    summary: str
    what: str
    size: int
    small: int
    most: int
    multiple: int = 1


LADDERS = {  # in the order of learning
    "vector": Entry("vector", "z = x + y", "elements", 1 << 26, 10_001, 1 << 29),
    "indexing": Entry("indexing", "matrices added with 1-D, 2-D and 3-D grids", "rows and columns", 8192, 70, 16384),
    "reduction": Entry("reduction", "the sum of a vector", "elements", 1 << 28, 10_001, 1 << 30),
    "matmul": Entry("matmul", "the product of two square matrices", "rows and columns", 4096, 136, 16384, multiple=8),
    "layer": Entry("layer", "y = sigmoid(x W^T + b), CPU against GPU", "rows and features", 2048, 70, 16384),
}


def build(name: str, size: int | None = None, device: torch.device | str | None = None) -> Ladder:
    """Make a ladder, with its inputs on the device.

    Args:
        name: one of `LADDERS`.
        size: the size. If None, the ladder's default size, or without a GPU its small size.
        device: if None, the GPU if there is one, else the CPU. On "cpu" the Triton rungs run in Triton's interpreter
            if this process started with TRITON_INTERPRET=1, else not at all. The rungs in CUDA C++ can then be
            compiled, but not run.

    Raises:
        ValueError: there is no such ladder or device, or the ladder cannot have this size.
    """
    where = _device(device)
    size = checked_size(name, size, where)
    module = importlib.import_module(f"rooftop.ladder.{LADDERS[name].module}")
    ladder: Ladder = module.make(size, where)
    return ladder


def checked_size(name: str, size: int | None, device: torch.device) -> int:
    """The size of the ladder that `build` would make with these arguments.

    Raises:
        ValueError: there is no such ladder, or it cannot have this size.
    """
    if name not in LADDERS:
        raise ValueError(f"no ladder {name!r}: expected one of {', '.join(LADDERS)}{did_you_mean(name, LADDERS)}")
    entry = LADDERS[name]
    size = (entry.size if device.type == "cuda" else entry.small) if size is None else size
    if type(size) is not int:
        raise ValueError(f"the {name} ladder takes an integer number of {entry.what}, got {size!r}")
    if not 1 <= size <= entry.most:
        raise ValueError(f"the {name} ladder takes 1 to {entry.most:,} {entry.what}, got {size:,}")
    if size % entry.multiple:
        raise ValueError(f"the {name} ladder takes a multiple of {entry.multiple} {entry.what}, got {size:,}")
    return size


def _device(device: torch.device | str | None) -> torch.device:
    there = torch.cuda.is_available()
    where = torch.device(device if device is not None else "cuda" if there else "cpu")
    if where.type != "cpu" and not (where.type == "cuda" and there):
        expected = "'cpu' or 'cuda'" if there else "'cpu', because torch finds no GPU"
        raise ValueError(f"device={str(where)!r}: expected {expected}")
    return where


@cache
def source(file: str) -> str:
    """The text of a CUDA C++ file in this folder."""
    return Path(__file__).with_name(file).read_text(encoding="utf-8")


def kernel(file: str, name: str, device: torch.device) -> cuda.Kernel:
    """Compile the kernel `name` of a CUDA C++ file in this folder for the device."""
    return cuda.compile(source(file), name, device=device)


NEEDS_INTERPRETER = "Triton needs a GPU, or TRITON_INTERPRET=1"
NEEDS_TRITON = 'needs Triton: pip install "rooftop[triton]"'


def triton_missing(device: torch.device) -> str:
    """Why Triton's kernels cannot run on the device; empty if they can."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return NEEDS_TRITON
    return "" if device.type == "cuda" or INTERPRETED else NEEDS_INTERPRETER


def triton_rungs(device: torch.device, make: Callable[[], Sequence[Rung]], names: Sequence[str]) -> tuple[Rung, ...]:
    """The Triton rungs. If Triton cannot run, the rungs have only their names and the reason, and `make`, which imports
    the kernels, is not called.
    """
    missing = triton_missing(device)
    return tuple(Rung(name, TRITON, None, note=missing) for name in names) if missing else tuple(make())


def interleave(*groups: Sequence[Rung]) -> tuple[Rung, ...]:
    """All rungs in the order of the first group. After each rung come the rungs of the same name in other tools."""
    order = {name: place for place, name in enumerate(dict.fromkeys(r.name for group in groups for r in group))}
    return tuple(sorted((rung for group in groups for rung in group), key=lambda rung: order[rung.name]))
