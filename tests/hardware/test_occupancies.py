"""Occupancy agrees with examples computed by hand, with general laws, with NVIDIA's calculator, and with the driver of
a real GPU."""

from __future__ import annotations

import ctypes
import importlib.util
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rooftop.hardware.occupancies import MULTIPROCESSORS, Occupancy, occupancy

HOPPER = (9, 0)


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "capability", "blocks", "warps", "limiters"),
    [
        (256, 32, 0, (9, 0), 8, 64, ("warps", "registers")),
        (1024, 64, 0, (9, 0), 1, 32, ("registers",)),
        (1024, 65, 0, (9, 0), 0, 0, ("registers",)),  # 72 allocated x 1024 > 65,536
        (32, 16, 0, (9, 0), 32, 32, ("blocks",)),
        (128, 255, 0, (9, 0), 2, 8, ("registers",)),
        (256, 40, 0, (9, 0), 6, 48, ("registers",)),  # 12 warps of 1,280 registers in each quarter of 16,384
        # 3 warps in each quarter: 12 in all, not the 12.19 of the undivided registers
        (96, 168, 0, (9, 0), 4, 12, ("registers",)),
        (128, 32, 64 * 1024, (9, 0), 3, 12, ("shared memory",)),  # 65 KiB each of 228
        (256, 32, 113 * 1024, (9, 0), 2, 16, ("shared memory",)),  # 114 KiB each: all of it
        (256, 32, 113 * 1024 + 1, (9, 0), 1, 8, ("shared memory",)),
        (256, 32, 227 * 1024, (9, 0), 1, 8, ("shared memory",)),
        (100, 32, 0, (9, 0), 16, 64, ("warps", "registers")),  # 4 warps, the last one with 4 threads
        (1024, 32, 0, (8, 6), 1, 32, ("warps",)),  # 48 warps do not hold two blocks of 32
        (256, 32, 0, (8, 9), 6, 48, ("warps",)),
        (64, 32, 0, (8, 6), 16, 32, ("blocks",)),
        (64, 32, 0, (8, 9), 24, 48, ("warps", "blocks")),
        (128, 32, 40 * 1024, (8, 0), 4, 16, ("shared memory",)),  # 41 KiB each of 164
        (128, 32, 32 * 1024, (7, 5), 2, 8, ("shared memory",)),  # nothing reserved before 8.0
        (128, 32, 257, (7, 0), 16, 64, ("warps", "registers")),
        (32, 32, 3072, (7, 0), 32, 32, ("blocks", "shared memory")),
        (32, 32, 3073, (7, 0), 29, 29, ("shared memory",)),  # 3,328: units of 256
        (32, 32, 3073 - 1024, (9, 0), 32, 32, ("blocks",)),
        (1024, 32, 0, (12, 0), 1, 32, ("warps",)),
    ],
)
def test_examples_worked_by_hand(
    threads: int,
    registers: int,
    shared: int,
    capability: tuple[int, int],
    blocks: int,
    warps: int,
    limiters: tuple[str, ...],
) -> None:
    found = occupancy(threads, registers, shared, capability)
    assert (found.blocks_per_multiprocessor, found.active_warps, found.limiters) == (blocks, warps, limiters)
    assert found.limiter == limiters[0]
    assert found.fraction == warps / MULTIPROCESSORS[capability].max_warps


def test_every_limit_is_named() -> None:
    assert occupancy(256, 40, 20_000, HOPPER).limits == {"warps": 8, "blocks": 32, "registers": 6, "shared memory": 11}
    unused = occupancy(256, 0, 0, (7, 0)).limits
    assert unused["registers"] is None
    assert unused["shared memory"] is None
    assert occupancy(256, 0, 0, HOPPER).limits["shared memory"] == 228  # reserved by the driver


@pytest.mark.parametrize(
    ("capability", "kib"), [((7, 0), 96), ((7, 5), 64), ((8, 0), 163), ((8, 9), 99), (HOPPER, 227)]
)
def test_a_block_can_opt_in_to_what_the_programming_guide_states(capability: tuple[int, int], kib: int) -> None:
    assert MULTIPROCESSORS[capability].max_shared_bytes_per_block == kib * 1024
    assert occupancy(128, 32, kib * 1024, capability).blocks_per_multiprocessor == 1


def test_the_carve_out_is_the_smallest_that_holds_all_blocks() -> None:
    assert occupancy(1024, 32, 0, HOPPER).shared_carveout == 8 * 1024  # 2 blocks of 1 KiB
    assert occupancy(1024, 32, 31 * 1024, HOPPER).shared_carveout == 64 * 1024
    assert occupancy(1024, 32, 32 * 1024, HOPPER).shared_carveout == 100 * 1024
    assert occupancy(1024, 255, 32 * 1024, HOPPER).shared_carveout == 0  # no block runs


CAPABILITIES = st.sampled_from(list(MULTIPROCESSORS))


@st.composite
def launches(draw: st.DrawFn) -> Occupancy:
    capability = draw(CAPABILITIES)
    shared = draw(st.integers(0, MULTIPROCESSORS[capability].max_shared_bytes_per_block))
    return occupancy(draw(st.integers(1, 1024)), draw(st.integers(0, 255)), shared, capability)


@given(launches(), st.integers(0, 255), st.floats(0, 1))
def test_more_registers_or_shared_memory_never_hold_more_blocks(launch: Occupancy, registers: int, part: float) -> None:
    shared = int(part * launch.shared_bytes_per_block)
    registers = min(registers, launch.registers_per_thread)
    less = occupancy(launch.threads_per_block, registers, shared, launch.capability)
    assert less.blocks_per_multiprocessor >= launch.blocks_per_multiprocessor


@given(launches())
def test_what_is_active_fits_and_one_block_more_would_not(launch: Occupancy) -> None:
    sm, blocks = launch.multiprocessor, launch.blocks_per_multiprocessor
    warps = (launch.threads_per_block + 31) // 32
    assert 0 <= launch.fraction <= 1
    assert launch.active_warps == blocks * warps <= sm.max_warps
    assert launch.active_warps * 32 * launch.registers_per_thread <= sm.registers
    assert blocks * (launch.shared_bytes_per_block + sm.reserved_shared_bytes) <= launch.shared_carveout
    assert launch.limits[launch.limiter] == blocks


@given(launches())
def test_each_change_raises_the_occupancy_and_is_the_smallest_that_does(launch: Occupancy) -> None:
    def changed(resource: str, value: int) -> Occupancy:
        values = {
            "threads per block": launch.threads_per_block,
            "registers per thread": launch.registers_per_thread,
            "bytes of shared memory per block": launch.shared_bytes_per_block,
        }
        assert resource in values
        return occupancy(*{**values, resource: value}.values(), launch.capability)

    for change in launch.changes():
        reached = changed(change.resource, change.after)
        assert reached.fraction == change.fraction > launch.fraction
        if change.resource == "threads per block":
            assert change.after % 32 == 0
        else:
            assert change.after < change.before
            assert changed(change.resource, change.after + 1).fraction <= launch.fraction
    assert [change.size for change in launch.changes()] == sorted(change.size for change in launch.changes())
    nearest = launch.nearest_change()
    assert nearest is None or (nearest == launch.changes()[0] and str(nearest) in launch.advice)
    assert launch.fraction < 1 or nearest is None


@given(launches())
def test_where_no_change_is_named_none_helps(launch: Occupancy) -> None:
    named = {change.resource for change in launch.changes()}
    threads, registers, shared = launch.threads_per_block, launch.registers_per_thread, launch.shared_bytes_per_block
    if "registers per thread" not in named:
        assert occupancy(threads, min(registers, 1), shared, launch.capability).fraction <= launch.fraction
    if "bytes of shared memory per block" not in named:
        assert occupancy(threads, registers, 0, launch.capability).fraction <= launch.fraction
    if "threads per block" not in named:
        for size in range(32, 1025, 32):
            assert occupancy(size, registers, shared, launch.capability).fraction <= launch.fraction


@pytest.mark.parametrize(
    "arguments",
    [(2.5, 32, 0, (9, 0)), (256, "32", 0, (9, 0)), (256, 32, None, (9, 0)), (256, 32, 0, "9.0"), (256, 32, 0, [9, 0])],
)
def test_what_is_no_count_is_refused(arguments: Any) -> None:
    with pytest.raises(TypeError, match=r"expected threads, registers and bytes as integers.*\(9, 0\), got"):
        occupancy(*arguments)


def test_advice_in_words() -> None:
    assert occupancy(256, 40, 0, HOPPER).advice == (
        "48 of 64 warps (75%), limited by registers: 32 registers per thread instead of 40 reach 100%"
    )
    assert occupancy(128, 64, 100 * 1024, HOPPER).advice == (
        "8 of 64 warps (12%), limited by shared memory: "
        "76,800 bytes of shared memory per block instead of 102,400 reach 19%"
    )
    assert occupancy(256, 32, 0, HOPPER).advice == "64 of 64 warps (100%), limited by warps and registers"


def test_advice_leads_out_of_a_launch_that_fails() -> None:
    failing = occupancy(1024, 72, 0, HOPPER)
    assert failing.fraction == 0
    change = failing.nearest_change()
    assert change is not None
    assert (change.resource, change.before, change.after) == ("registers per thread", 72, 64)
    assert {other.resource for other in failing.changes()} == {"registers per thread", "threads per block"}


def test_with_two_limits_no_single_change_may_help() -> None:
    assert occupancy(1024, 64, 227 * 1024, HOPPER).nearest_change() is None
    assert "changing one resource alone" in occupancy(1024, 64, 227 * 1024, HOPPER).advice


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1025, 32, 0, HOPPER), "1025 threads.*1 to 1024.*fewer threads"),
        ((0, 32, 0, HOPPER), "0 threads"),
        ((256, 256, 0, HOPPER), "256 registers.*0 to 255.*spills"),
        ((256, -1, 0, HOPPER), "-1 registers"),
        ((256, 32, 227 * 1024 + 1, HOPPER), "232,449 bytes.*9.0 allows 0 to 232,448.*smaller tile"),
        ((256, 32, -1, HOPPER), "-1 bytes"),
        ((256, 32, 0, (6, 1)), r"capability 6\.1 is not known.*7\.0, .*12\.0"),
    ],
)
def test_what_no_launch_can_have_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        occupancy(*arguments)


CALCULATOR = r"""
#include <limits.h>
#include <stddef.h>
#include <cuda_occupancy.h>
extern "C" int blocks(int major, int minor, int warps, int sharedBytes, int reserved, int threads, int registers,
                      int staticBytes, int dynamicBytes)
{
    cudaOccDeviceProp device;
    device.computeMajor = major, device.computeMinor = minor;
    device.maxThreadsPerBlock = 1024, device.maxThreadsPerMultiprocessor = 32 * warps, device.warpSize = 32;
    device.regsPerBlock = device.regsPerMultiprocessor = 65536, device.numSms = 100;
    device.sharedMemPerBlock = 48 << 10, device.sharedMemPerMultiprocessor = sharedBytes;
    device.sharedMemPerBlockOptin = sharedBytes - reserved, device.reservedSharedMemPerBlock = reserved;
    cudaOccFuncAttributes kernel;
    kernel.maxThreadsPerBlock = INT_MAX, kernel.numRegs = registers, kernel.sharedSizeBytes = staticBytes;
    kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN, kernel.numBlockBarriers = 1;
    kernel.maxDynamicSharedSizeBytes = sharedBytes - reserved - staticBytes;
    cudaOccDeviceState state;
    cudaOccResult result;
    if (cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &kernel, &state, threads, dynamicBytes))
        return -1;
    return result.activeBlocksPerMultiprocessor;
}
"""


def test_equals_the_calculator_of_the_cuda_toolkit(tmp_path: Path) -> None:
    triton = importlib.util.find_spec("triton")  # the wheel contains the toolkit's headers
    include = Path(triton.origin).parent / "backends/nvidia/include" if triton and triton.origin else None
    compiler = shutil.which("g++") or shutil.which("clang++")
    if include is None or not (include / "cuda_occupancy.h").exists() or compiler is None:
        pytest.skip("needs cuda_occupancy.h (Triton's wheel) and a C++ compiler")
    (tmp_path / "calculator.cpp").write_text(CALCULATOR)
    command = [compiler, "-shared", "-fPIC", "-w", f"-I{include}", "calculator.cpp", "-o", "calculator.so"]
    subprocess.run(command, cwd=tmp_path, check=True)
    calculator = ctypes.CDLL(str(tmp_path / "calculator.so"))
    draw, seen = random.Random(0), set()
    for capability, sm in MULTIPROCESSORS.items():
        for _ in range(500):
            threads, registers = draw.randint(1, 1024), draw.randint(0, 255)
            static = draw.choice([0, draw.randint(0, 48 * 1024)])
            dynamic = draw.choice([0, draw.randint(0, 8192), draw.randint(0, sm.max_shared_bytes_per_block)])
            dynamic = min(dynamic, sm.max_shared_bytes_per_block - static)
            expected = calculator.blocks(
                *capability,
                *(sm.max_warps, sm.shared_bytes, sm.reserved_shared_bytes),
                *(threads, registers, static, dynamic),
            )
            found = occupancy(threads, registers, static + dynamic, capability)
            assert found.blocks_per_multiprocessor == expected, (found, expected)
            seen.add(found.limiter)
    assert seen == {"warps", "blocks", "registers", "shared memory"}


# The driver of this machine's GPU


KERNEL = r"""
extern "C" __global__ void kernel(float *data)
{
    extern __shared__ float dynamic[];
#if STATIC_FLOATS
    __shared__ float fixed[STATIC_FLOATS];
    fixed[threadIdx.x % STATIC_FLOATS] = data[threadIdx.x];
#endif
    float live[VALUES];
#pragma unroll
    for (int i = 0; i < VALUES; ++i)
        live[i] = data[1024 * i + threadIdx.x];
    __syncthreads();  // no load may move below it: all values are live at once
#pragma unroll
    for (int i = 0; i < VALUES; ++i)
        data[1024 * i + threadIdx.x] = live[i] * live[VALUES - 1 - i];
#if STATIC_FLOATS
    data[threadIdx.x] += fixed[(threadIdx.x + 1) % STATIC_FLOATS];
#endif
}
"""

MAX_DYNAMIC_SHARED, NUM_REGS, STATIC_SHARED = 8, 4, 1  # CU_FUNC_ATTRIBUTE_*


def checked(result: int, call: str) -> None:
    assert result == 0, f"{call} failed with {result}"


def nvrtc() -> Any:
    """The NVRTC that torch brings, or the one on the library path."""
    packages = Path(torch.__file__).parents[1]
    names = ["libnvrtc.so.13", "libnvrtc.so.12"]
    for name in [*(str(path) for each in names for path in packages.glob(f"nvidia/*/lib/{each}")), *names]:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    pytest.skip("needs NVRTC")


def compiled(library: Any, capability: tuple[int, int], registers: int, static_floats: int) -> bytes:
    """The kernel's cubin, held to a number of registers."""
    options = [
        f"--gpu-architecture=sm_{capability[0]}{capability[1]}",
        f"--maxrregcount={registers}",
        f"-DVALUES={max(1, registers - 12)}",
        f"-DSTATIC_FLOATS={static_floats}",
    ]
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    checked(
        library.nvrtcCreateProgram(ctypes.byref(program), KERNEL.encode(), b"kernel.cu", 0, None, None), "nvrtcCreate"
    )
    arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    checked(library.nvrtcCompileProgram(program, len(options), arguments), f"nvrtcCompileProgram {options}")
    checked(library.nvrtcGetCUBINSize(program, ctypes.byref(size)), "nvrtcGetCUBINSize")
    image = ctypes.create_string_buffer(size.value)
    checked(library.nvrtcGetCUBIN(program, image), "nvrtcGetCUBIN")
    checked(library.nvrtcDestroyProgram(ctypes.byref(program)), "nvrtcDestroyProgram")
    return image.raw


class Kernel:
    """A kernel loaded by the driver: its resources, and the driver's occupancy."""

    def __init__(self, driver: Any, image: bytes, capability: tuple[int, int]) -> None:
        self.driver, self.function, module = driver, ctypes.c_void_p(), ctypes.c_void_p()
        checked(driver.cuModuleLoadData(ctypes.byref(module), image), "cuModuleLoadData")
        checked(driver.cuModuleGetFunction(ctypes.byref(self.function), module, b"kernel"), "cuModuleGetFunction")
        self.registers, self.static_bytes = self.attribute(NUM_REGS), self.attribute(STATIC_SHARED)
        self.most_dynamic = MULTIPROCESSORS[capability].max_shared_bytes_per_block - self.static_bytes
        result = driver.cuFuncSetAttribute(self.function, MAX_DYNAMIC_SHARED, self.most_dynamic)
        checked(result, "cuFuncSetAttribute")

    def attribute(self, number: int) -> int:
        value = ctypes.c_int()
        checked(self.driver.cuFuncGetAttribute(ctypes.byref(value), number, self.function), "cuFuncGetAttribute")
        return value.value

    def blocks(self, threads: int, dynamic: int) -> int:
        value = ctypes.c_int()
        result = self.driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
            ctypes.byref(value), self.function, ctypes.c_int(threads), ctypes.c_size_t(dynamic)
        )
        checked(result, f"cuOccupancyMaxActiveBlocksPerMultiprocessor({threads}, {dynamic})")
        return value.value


@pytest.mark.gpu
def test_equals_the_driver() -> None:
    capability = torch.cuda.get_device_capability()
    if capability not in MULTIPROCESSORS:
        pytest.skip(f"compute capability {capability} has no row")
    torch.zeros(1, device="cuda")  # creates the context that the driver's calls use
    library, driver = nvrtc(), ctypes.CDLL("libcuda.so.1")
    kernels = [
        Kernel(driver, compiled(library, capability, registers, static_floats), capability)
        for registers in (16, 24, 32, 40, 56, 64, 80, 96, 128, 168, 200, 255)
        for static_floats in (0, 1000)
    ]
    assert len({kernel.registers for kernel in kernels}) >= 8
    assert {kernel.static_bytes for kernel in kernels} == {0, 4000}
    draw, seen = random.Random(0), set()
    for number in range(200):
        kernel = kernels[number % len(kernels)]
        threads = draw.choice([draw.randint(1, 1024), 32 * draw.randint(1, 8)])
        dynamic = draw.choice([0, draw.randint(0, 16 * 1024), draw.randint(0, kernel.most_dynamic)])
        found = occupancy(threads, kernel.registers, kernel.static_bytes + dynamic, capability)
        assert found.blocks_per_multiprocessor == kernel.blocks(threads, dynamic), found
        seen.add(found.limiter)
    assert seen == {"warps", "blocks", "registers", "shared memory"}


@pytest.mark.gpu
def test_the_table_has_what_torch_says_of_this_gpu() -> None:
    properties: Any = torch.cuda.get_device_properties(0)
    sm = MULTIPROCESSORS.get((properties.major, properties.minor))
    if sm is None:
        pytest.skip(f"compute capability {properties.major}.{properties.minor} has no row")
    assert properties.max_threads_per_multi_processor == 32 * sm.max_warps
    assert properties.regs_per_multiprocessor == sm.registers
    assert properties.shared_memory_per_multiprocessor == sm.shared_bytes
    assert properties.shared_memory_per_block_optin == sm.max_shared_bytes_per_block
