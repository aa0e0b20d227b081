"""Launches by the driver: those whose grid and scalar arguments are formulas, and those of kernels in CUDA C++. A
stand-in driver prints its arguments."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rooftop.launch import cpp_extensions, native_calls

DRIVER = r"""
#include <cstdio>
#include <cstring>
struct Attribute { int id, padding; unsigned values[16]; };
struct Config { unsigned grid[3], block[3], shared; void* stream; const Attribute* attributes; unsigned count; };
extern "C" {
int cuLaunchKernelEx(const Config* config, void* function, void** values, void**) {
  int narrow; long long wide;
  std::memcpy(&narrow, values[1], 4);
  std::memcpy(&wide, values[2], 8);
  std::printf("launch %u %u %u, %d %lld\n", config->grid[0], config->grid[1], config->grid[2], narrow, wide);
  if (size_t(function) == 2) {
    const unsigned* block = config->block;
    std::printf("block %u %u %u, %u bytes\n", block[0], block[1], block[2], config->shared);
  }
  for (unsigned i = 0; i < config->count; ++i) {
    const Attribute& each = config->attributes[i];
    std::printf("attribute %d: %u %u %u\n", each.id, each.values[0], each.values[1], each.values[2]);
  }
  return std::fflush(stdout);
}
int layout(size_t i, size_t* offset, size_t* size) {
  *offset = 0;
  *size = i == 1 ? 4 : 8;
  return i >= 3;
}
int cuFuncGetParamInfo(void* function, size_t i, size_t* offset, size_t* size) {
  return size_t(function) != 1 || layout(i, offset, size);
}
int cuKernelGetParamInfo(void* kernel, size_t i, size_t* offset, size_t* size) {
  return size_t(kernel) != 2 || layout(i, offset, size);
}
int cuTensorMapReplaceAddress(void*, void*) { return 0; }
int cuGetErrorName(int, const char** name) { *name = "none"; return 0; }
}
"""

# A kernel with a pointer, the rows as int32, and three times the rows as int64; at least 64 rows; 32 in a program.
PROGRAM = """
import struct, torch
from rooftop.launch import native_calls
from rooftop.launch.row_counts import Condition, Count, code_of, codes_of

native_calls.build()
native, conditions, seen = native_calls.module, [], []

def miss(facts, x):
    seen.append(facts)

calls = native.make_calls(lambda x: None, miss, [0])
calls(torch.zeros(100, 4))
rows = Count.of(100, (0, 0), conditions)
assert rows >= 64
parameters = struct.pack("QiiQ", 0, 100, 0, 300)
launch = {
    "python": None, "name": "k", "function": 1, "owner": None, "in_all_contexts": False, "grid": (4, 2, 1),
    "block": (128, 1, 1),
    "cluster": None, "shared": 0, "early": False, "cooperative": False, "parameters": parameters, "offsets": [0, 8, 16],
    "sizes": [8, 4, 8], "patches": [(0, 1, 0)], "maps": [], "grid_formulas": codes_of((-(-rows // 32), 2)),
    "numbers": [(1, code_of(rows)), (2, code_of(rows * 3))],
}
plan = native.Plan({
    "device": torch.device("cpu"), "memory": [((100, 8), (8, 1), torch.float32, -1, codes_of((rows, 8)))],
    "launches": [launch], "results": [(1, (-1,), (-1,), 0)], "kind": "t", "recording": None, "varies": True,
    "conditions": conditions,
})
native.keep(calls, seen[0], plan)
for count in (100, 64, 65, 63, 1000):
    made = calls(torch.zeros(count, 4))
    print("Python" if made is None else tuple(made.shape), flush=True)
"""


# A kernel (float*, int, double) in CUDA C++, whose handle is 2, on clusters of two blocks that all run at once.
CUDA_PROGRAM = """
import weakref
from types import SimpleNamespace
import torch
from rooftop.launch import native_calls
from rooftop.launch.cuda import Configured
from rooftop.launch.driver_launches import for_driver
from rooftop.launch.known_calls import Pointer, Step

class Kernel(SimpleNamespace):  # to which weak references are possible
    pass

native_calls.build()
native, seen = native_calls.module, []

def miss(facts, x):
    seen.append(facts)

calls = native.make_calls(lambda x: None, miss, [])
calls(torch.zeros(4))
types = ("float*", "int", "double")
kernel = Kernel(name="k", binary=SimpleNamespace(types=types), _loaded=SimpleNamespace(handle=2))
made = Configured(kernel, 0, None, [], (64, 2, 1), 1024, (2, 1, 1), True)
pointer = Pointer(0, 1, 0, (torch.float32, torch.Size((4,)), (1,)))
step = Step(made, made, (6, 1, 1), [None, -5, 0.5], (pointer,), {})
plan = native.Plan({
    "device": torch.device("cpu"), "memory": [((4,), (1,), torch.float32, -1, [])], "launches": [for_driver(step)],
    "results": [(1, (4,), (1,), 0)], "kind": "t", "recording": None, "varies": False, "conditions": [],
})
native.keep(calls, seen[0], plan)
loaded = weakref.ref(kernel)
del kernel, made, step, plan
print(tuple(calls(torch.zeros(4)).shape), loaded() is not None, flush=True)
native.forget(calls)
print("unloaded" if loaded() is None else "kept", flush=True)
"""


def printed(program: str, folder: Path) -> list[str]:
    """What a program prints beside the stand-in driver."""
    pytest.importorskip("triton")
    native_calls._extension.build()
    (folder / "driver.cpp").write_text(DRIVER)
    command = [*(cpp_extensions.compiler() or ()), "-shared", "-fPIC", "driver.cpp", "-o", "libcuda.so.1"]
    subprocess.run(command, cwd=folder, check=True)
    environment = os.environ | {"LD_LIBRARY_PATH": str(folder), "TRITON_INTERPRET": "1"}
    found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return found.stdout.splitlines()


no_driver = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real driver")
needs_compiler = pytest.mark.skipif(cpp_extensions.compiler() is None, reason="no C++ compiler")


@no_driver
@needs_compiler
def test_grid_numbers_and_memory_follow_the_rows(tmp_path: Path) -> None:
    assert printed(PROGRAM, tmp_path) == [
        *("launch 4 2 1, 100 300", "(100, 8)"),
        *("launch 2 2 1, 64 192", "(64, 8)"),
        *("launch 3 2 1, 65 195", "(65, 8)"),
        "Python",
        *("launch 32 2 1, 1000 3000", "(1000, 8)"),
    ]


@no_driver
@needs_compiler
def test_a_kernel_in_cuda_keeps_its_configuration(tmp_path: Path) -> None:
    """Attribute 2 of the driver's launches is "cooperative"; attribute 4 has the blocks of a cluster. `cuda.core`
    unloads kernels to which nothing refers, so the plan refers to its kernel."""
    half = struct.unpack("q", struct.pack("d", 0.5))[0]
    assert printed(CUDA_PROGRAM, tmp_path) == [
        *(f"launch 6 1 1, -5 {half}", "block 64 2 1, 1024 bytes"),
        *("attribute 2: 1 0 0", "attribute 4: 2 1 1"),
        *("(4,) True", "unloaded"),
    ]
