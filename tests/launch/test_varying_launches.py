"""Driver launches whose grid and scalar arguments are formulas, with a stand-in driver that prints its arguments."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rooftop.launch import cpp_extensions, native_calls

DRIVER = r"""
#include <cstdio>
#include <cstring>
struct Config { unsigned grid[3], block[3], shared; void *stream, *attributes; unsigned count; };
extern "C" {
int cuLaunchKernelEx(const Config* config, void*, void** values, void**) {
  int narrow; long long wide;
  std::memcpy(&narrow, values[1], 4);
  std::memcpy(&wide, values[2], 8);
  std::printf("launch %u %u %u, %d %lld\n", config->grid[0], config->grid[1], config->grid[2], narrow, wide);
  return std::fflush(stdout);
}
int cuFuncGetParamInfo(void*, size_t i, size_t* offset, size_t* size) {
  *offset = 0;
  *size = i == 1 ? 4 : 8;
  return i >= 3;
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
    "python": None, "function": 1, "grid": (4, 2, 1), "threads": 128, "shared": 0, "early": False,
    "parameters": parameters, "offsets": [0, 8, 16], "sizes": [8, 4, 8], "patches": [(0, 1, 0)], "maps": [],
    "grid_formulas": codes_of((-(-rows // 32), 2)), "numbers": [(1, code_of(rows)), (2, code_of(rows * 3))],
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real driver")
@pytest.mark.skipif(cpp_extensions.compiler() is None, reason="no C++ compiler")
def test_grid_numbers_and_memory_follow_the_rows(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    native_calls._extension.build()
    (tmp_path / "driver.cpp").write_text(DRIVER)
    command = [*(cpp_extensions.compiler() or ()), "-shared", "-fPIC", "driver.cpp", "-o", "libcuda.so.1"]
    subprocess.run(command, cwd=tmp_path, check=True)
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path), "TRITON_INTERPRET": "1"}
    found = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == [
        *("launch 4 2 1, 100 300", "(100, 8)"),
        *("launch 2 2 1, 64 192", "(64, 8)"),
        *("launch 3 2 1, 65 195", "(65, 8)"),
        "Python",
        *("launch 32 2 1, 1000 3000", "(1000, 8)"),
    ]
