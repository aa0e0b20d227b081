"""A ladder: a piece of work, its reference, and the rungs that do it. Each other file in this folder builds one
ladder.
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
from rooftop.errors import did_you_mean
from rooftop.hardware import Ceilings
from rooftop.launch import cuda
from rooftop.launch.triton_launch import INTERPRETED

CUDA, TRITON, PYTORCH, CPU = "CUDA C++", "Triton", "PyTorch", "CPU"
Clock = Literal["graph", "device", "host"]


@dataclass(frozen=True)
class Rung:
    """One way to do the work.

    Attributes:
        name: what it adds to the previous rung.
        tool: CUDA, TRITON, PYTORCH (or the library it calls) or CPU.
        run: does the work and gives the result; None where `note` says why it cannot run.
        clock: how it is timed on a GPU: replayed from a graph ("graph"), called between events ("device"), or on the
            CPU ("host").
        kernels: instances of the ladder's CUDA C++ source that it launches.
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
    """One piece of work and the rungs that do it.

    Attributes:
        name: as on the command line.
        work: the formula, sizes and dtypes.
        unit: unit of its rate, "B/s" or "FLOP/s".
        source: its CUDA C++.
        cost: bytes and flops that any rung needs.
        exact: the correct result.
        rtol, atol: how far an element may differ; 0 where every order of the sums gives the same result.
        rungs: from the first to the best.
        poisoned: output tensors of the rungs: filled with NaN before each rung is checked.
        remarks: function that is called with the ceilings, tries something, and gives sentences to print below the
            table.
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
        module: its file. summary: one line for the help text.
        size: default on a GPU. small: default where Triton is interpreted. most: the largest size, limited by 16 GB of
            GPU memory or by the indices.
        what: the quantity that the size counts. multiple: the size must be a multiple of this.
    """

    module: str
    summary: str
    what: str
    size: int
    small: int
    most: int
    multiple: int = 1


LADDERS = {  # in the order in which one learns
    "vector": Entry("vector", "z = x + y", "elements", 1 << 26, 10_001, 1 << 29),
    "indexing": Entry("indexing", "matrices added with 1-D, 2-D and 3-D grids", "rows and columns", 8192, 70, 16384),
    "reduction": Entry("reduction", "the sum of a vector", "elements", 1 << 28, 10_001, 1 << 30),
    "matmul": Entry("matmul", "the product of two square matrices", "rows and columns", 4096, 136, 16384, multiple=8),
    "layer": Entry("layer", "y = sigmoid(x W^T + b), CPU against GPU", "rows and features", 2048, 70, 16384),
}


def build(name: str, size: int | None = None, device: torch.device | str | None = None) -> Ladder:
    """A ladder, with its inputs on the device.

    Args:
        name: one of `LADDERS`.
        size: None means the ladder's own size, or a small one without a GPU.
        device: None means the GPU if there is one. On "cpu" the Triton rungs run through Triton's interpreter (in a
            process with TRITON_INTERPRET=1), and those in CUDA C++ can be compiled.

    Raises:
        ValueError: there is no such ladder, or it cannot have this size.
    """
    if name not in LADDERS:
        raise ValueError(f"no ladder {name!r}: expected one of {', '.join(LADDERS)}{did_you_mean(name, LADDERS)}")
    entry = LADDERS[name]
    where = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    size = (entry.size if where.type == "cuda" else entry.small) if size is None else size
    if not 1 <= size <= entry.most:
        raise ValueError(f"the {name} ladder takes 1 to {entry.most:,} {entry.what}, got {size:,}")
    if size % entry.multiple:
        raise ValueError(f"the {name} ladder takes a multiple of {entry.multiple} {entry.what}, got {size:,}")
    module = importlib.import_module(f"rooftop.ladder.{entry.module}")
    ladder: Ladder = module.make(size, where)
    return ladder


@cache
def source(file: str) -> str:
    """A file of CUDA C++ in this folder."""
    return Path(__file__).with_name(file).read_text(encoding="utf-8")


def kernel(file: str, name: str, device: torch.device) -> cuda.Kernel:
    """An instance of a kernel, for launching on the device."""
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
    """The Triton rungs. Where Triton cannot run, the rungs have only their names and the reason; `make`, which imports
    the kernels, is not called.
    """
    missing = triton_missing(device)
    return tuple(Rung(name, TRITON, None, note=missing) for name in names) if missing else tuple(make())


def interleave(*groups: Sequence[Rung]) -> tuple[Rung, ...]:
    """All rungs, in the order of names in the first group: a rung with the same name in another tool follows it
    directly.
    """
    order = {name: place for place, name in enumerate(dict.fromkeys(r.name for group in groups for r in group))}
    return tuple(sorted((rung for group in groups for rung in group), key=lambda rung: order[rung.name]))
