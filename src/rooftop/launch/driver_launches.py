"""Describe launches of kernels of Triton and CUDA C++ for the CUDA driver: the bytes of a kernel's parameters, and the
offsets of pointers in these bytes.

`call_plans.py` makes plans of such launches, and `cpp/running.h` passes them to the driver.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import torch

from rooftop.launch.compiled_kernels import Compiled
from rooftop.launch.cuda import Configured
from rooftop.launch.kernel_arguments import FLOATS, INTEGERS
from rooftop.launch.known_calls import Step
from rooftop.launch.lessons import Varied

_FORMATS = {
    "i1": "?", "i8": "b", "u8": "B", "i16": "h", "u16": "H", "i32": "i", "u32": "I", "i64": "q", "u64": "Q",
    "fp32": "f", "fp64": "d",
}  # fmt: skip


_OF_DTYPES = {
    torch.int8: "b", torch.uint8: "B", torch.int16: "h", torch.uint16: "H", torch.int32: "i", torch.uint32: "I",
    torch.int64: "q", torch.uint64: "Q", torch.float16: "e", torch.float32: "f", torch.float64: "d",
}  # fmt: skip
_CPP_FORMATS = {name: _OF_DTYPES[dtype] for name, dtype in (INTEGERS | FLOATS).items()} | {"bool": "?"}


def for_driver(step: Step, varied: Varied | None = None) -> dict[str, Any] | None:
    """Describe a recorded launch for the C++ code, which repeats it through the CUDA driver. `varied` has formulas for
    the grid and for integer arguments of the kernel that vary from call to call. Return None if the driver cannot
    launch the kernel without Python.
    """
    if isinstance(step.compiled, Configured):
        return _of_cuda(step, step.compiled)
    return _of_triton(step, step.compiled, varied) if isinstance(step.compiled, Compiled) else None


def _of_cuda(step: Step, made: Configured) -> dict[str, Any]:
    pointers = {each.place: each for each in step.pointers}
    packed, patches = _Parameters(), []
    for i, (kind, value) in enumerate(zip(made.kernel.binary.types, step.given, strict=True)):
        if i in pointers:
            patches.append((i, pointers[i].source, pointers[i].offset))
        packed.add(bytes(8) if kind.endswith("*") else struct.pack(_CPP_FORMATS[kind], value))
    return {
        "python": None,
        "function": made.handle,
        "name": step.name,
        "owner": made.kernel,
        "in_all_contexts": True,
        "grid": step.grid,
        "block": made.threads,
        "cluster": made.cluster,
        "shared": made.shared_bytes,
        "early": False,
        "cooperative": made.cooperative,
        "parameters": packed.values,
        "offsets": packed.offsets,
        "sizes": packed.sizes,
        "patches": patches,
        "maps": [],
        "grid_formulas": [],
        "numbers": [],
    }


def _of_triton(step: Step, made: Compiled, varied: Varied | None) -> dict[str, Any] | None:
    compiled: Any = made.whole
    about = compiled.metadata
    scratch = about.global_scratch_size or about.profile_scratch_size
    if about.num_ctas != 1 or about.launch_cooperative_grid or scratch:
        return None
    pointers = {each.place: each for each in step.pointers}
    maps = iter(getattr(about, "tensordesc_meta", None) or ())
    packed, patches, replaced = _Parameters(), [], []
    numbers, formulas = [], {} if varied is None else varied.numbers
    values = [*step.given, *made.constants]
    for i, (name, value) in enumerate(zip(step.kernel.arg_names, values, strict=True)):
        kind = compiled.src.signature[name]
        if kind == "constexpr":
            continue
        if kind.startswith("tensordesc"):
            tensor_map = _tensor_map(step, i, next(maps, None))
            if tensor_map is None:
                return None
            replaced.append((len(packed.offsets), pointers[i].source, pointers[i].offset))
            packed.add(tensor_map, 64)
            for size in value.shape:
                packed.add(struct.pack("i", size))
            for stride in value.strides:
                packed.add(struct.pack("q", stride))
        elif kind.startswith("*"):
            if i in pointers:
                patches.append((len(packed.offsets), pointers[i].source, pointers[i].offset))
            elif value:
                return None
            packed.add(bytes(8))
        elif kind in _FORMATS:
            if i in formulas:
                numbers.append((len(packed.offsets), formulas[i]))
            packed.add(struct.pack(_FORMATS[kind], value))
        else:
            return None
    for _ in range(2):  # null pointers for Triton's scratch memory, which the kernel does not use
        packed.add(bytes(8))
    return {
        "python": None,
        "function": compiled.function,
        "name": step.name,
        "owner": compiled,
        "in_all_contexts": False,
        "grid": (*step.grid, 1, 1)[:3],
        "block": (32 * about.num_warps, 1, 1),
        "cluster": None,
        "shared": about.shared,
        "early": bool(about.launch_pdl),
        "cooperative": False,
        "parameters": packed.values,
        "offsets": packed.offsets,
        "sizes": packed.sizes,
        "patches": patches,
        "maps": replaced,
        "grid_formulas": [] if varied is None else varied.grid,
        "numbers": numbers,
    }


class _Parameters:
    """The bytes of a kernel's parameters; each parameter is aligned to its size unless `alignment` is given."""

    def __init__(self) -> None:
        self.values, self.offsets, self.sizes = b"", list[int](), list[int]()

    def add(self, value: bytes, alignment: int | None = None) -> None:
        self.values += bytes(-len(self.values) % (alignment or len(value)))
        self.offsets.append(len(self.values))
        self.sizes.append(len(value))
        self.values += value


TENSOR_MAP_BYTES = 128  # size of the driver's CUtensorMap


def _tensor_map(step: Step, place: int, about: Any) -> bytes | None:
    """A tensor descriptor that the driver encodes for a placeholder address. The C++ code later replaces
    the address.
    """
    from triton.backends.nvidia import driver

    if about is None:
        return None  # the kernel's argument is a pointer instead of a CUtensorMap
    device = torch.device("cuda", torch._C._cuda_getDevice())
    pointer = next(each for each in step.pointers if each.place == place)
    dtype, shape, strides = pointer.view
    size = 1 + sum((n - 1) * d for n, d in zip(shape, strides, strict=True))
    memory = torch.empty(size, dtype=dtype, device=device).as_strided(shape, strides)
    made = driver.make_tensordesc_arg(step.given[place].of(memory), about)[0]
    if type(made).__name__ != "PyCUtensorMap":
        return None
    return ctypes.string_at(id(made) + type(made).__basicsize__ - TENSOR_MAP_BYTES, TENSOR_MAP_BYTES)
