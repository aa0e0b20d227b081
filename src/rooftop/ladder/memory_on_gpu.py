"""Measure the memory of a GPU: registers, shared memory, L1, L2, device memory, and the host's memory over the bus.

A latency comes from the difference between the times of two chains of loads by one thread. One chain is twice as long
as the other. So the latency includes neither the launch nor the misses of the first round in a small ring.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rooftop.analysis.formats import percent_text
from rooftop.hardware import compare, occupancy
from rooftop.hardware.ceilings import Progress
from rooftop.hardware.load import other_load
from rooftop.hardware.occupancies import MULTIPROCESSORS
from rooftop.ladder.memory_levels import Flight, Level, MemoryClimb, expected_rate
from rooftop.ladder.rungs import kernel

FILE = "memory.cu"
LINE_BYTES = 128
THROUGH_L1, FROM_L2 = 0, 1
NEAR_BYTES = 16 << 10  # for the levels of shared memory and of L1: size of the memory that one block loads from
MOST_FAR_BYTES, HOST_BYTES = 1 << 30, 64 << 20
BEYOND = 8  # for the level of device memory: size of the memory to load from, as a multiple of L2's size
FMA_BYTES = 16  # a multiply-add reads three registers of 4 bytes and writes one
REGISTER_CHAINS, FLIGHT = 8, 4
WIDE_BLOCK, BLOCK = 1024, 256  # threads
RESIDENT = 2048 // BLOCK
CONCURRENCY, BLOCKS_EACH = (1, 2, 4, 8), (1, 2, 4, 8)
NEAR_HOPS, FAR_HOPS, BUS_HOPS = 1 << 15, 1 << 12, 1 << 10
SECONDS = 0.05
VECTOR_BYTES = 16


def ring(size_bytes: int, line_bytes: int, device: torch.device | str) -> Tensor:
    """Indices that lead once through all lines of `size_bytes`, in random order.

    The indices are int32, one at the beginning of each line. The rest of a line is not used.
    """
    step = line_bytes // 4
    lines = max(2, size_bytes // line_bytes)
    order = torch.randperm(lines, generator=torch.Generator().manual_seed(0)).mul_(step)
    following = torch.zeros(lines * step, dtype=torch.int32)
    following[order] = order.roll(-1).int()
    return following.to(device)


@dataclass(frozen=True)
class Chain:
    """A chain of dependent loads (or multiply-adds) that one thread follows.

    Attributes:
        run: function that follows the chain for `hops` hops.
        place: index that the chain has reached, (1,).
    """

    run: Callable[[int], None]
    place: Tensor


def register_chain(device: torch.device) -> Chain:
    """A chain of dependent multiply-adds in one thread's registers. The value starts at 1, and each multiply-add
    increases it by 1. So at the end `place` holds 1 + hops.
    """
    place = torch.zeros(1, device=device)
    return Chain(lambda hops: kernel(FILE, "chain_registers", device).launch(1, 1, place, 1.0, 1.0, 1.0, hops), place)


def shared_chain(following: Tensor, device: torch.device) -> Chain:
    """A chain of dependent loads through a ring of indices, `following`, that a thread block has copied to its shared
    memory.
    """
    place = torch.zeros(1, dtype=torch.int32, device=device)
    count = following.numel()
    return Chain(lambda hops: kernel(FILE, "chain_shared", device).launch(1, 32, following, place, count, hops), place)


def memory_chain(following: Tensor, level: int, device: torch.device) -> Chain:
    """A chain through a ring in any memory that the GPU can address. With THROUGH_L1 as `level`, loads may hit L1; with
    FROM_L2, they bypass it.
    """
    place = torch.zeros(1, dtype=torch.int32, device=device)
    name = f"chain<{level}>"

    def run(hops: int) -> None:
        kernel(FILE, name, device).launch(1, 1, following.data_ptr(), place, hops)

    return Chain(run, place)


@dataclass(frozen=True)
class Stream:
    """Independent loads by many threads.

    Attributes:
        run: function that launches the loads.
        sums: the sum of the values that each thread loaded, (threads,).
        loaded_bytes: bytes loaded in one call.
    """

    run: Callable[[], None]
    sums: Tensor
    loaded_bytes: int


def register_stream(blocks: int, times: int, device: torch.device) -> Stream:
    """Multiply-adds in registers by many threads. Each thread has enough independent chains to hide the latency of a
    multiply-add.
    """
    sums = torch.empty(blocks * BLOCK, device=device)
    name = f"stream_registers<{REGISTER_CHAINS}>"
    return Stream(
        lambda: kernel(FILE, name, device).launch(blocks, BLOCK, sums, 1.0, 1.0, times),
        sums,
        sums.numel() * REGISTER_CHAINS * times * FMA_BYTES,
    )


def shared_stream(values: Tensor, blocks: int, times: int, device: torch.device) -> Stream:
    """Each thread block copies the values to its shared memory and then reads them `times` times from there."""
    sums = torch.empty(blocks * WIDE_BLOCK, device=device)
    vectors = values.nbytes // VECTOR_BYTES
    return Stream(
        lambda: kernel(FILE, "stream_shared", device).launch(blocks, WIDE_BLOCK, values, sums, vectors, times),
        sums,
        blocks * times * values.nbytes,
    )


def memory_stream(
    values: Tensor,
    level: int,
    blocks: int,
    block: int,
    times: int,
    device: torch.device,
    apart: int = 0,
    flight: int = 1,
) -> Stream:
    """The blocks of a GPU kernel read the values from memory `times` times. With apart = 0, the blocks divide the
    values among them. With apart > 0, each block reads its own `apart` vectors of 16 bytes."""
    sums = torch.empty(blocks * block, device=device)
    vectors = apart or values.nbytes // VECTOR_BYTES
    name = f"stream<{level}, {flight}>"

    def run() -> None:
        kernel(FILE, name, device).launch(blocks, block, values.data_ptr(), sums, vectors, apart, times)

    return Stream(run, sums, VECTOR_BYTES * vectors * times * (blocks if apart else 1))


# ---- measured ----------------------------------------------------------------------------------------------------


def on_gpu(device: torch.device, progress: Progress) -> MemoryClimb:
    """Measure all levels, and test Little's law in device memory.

    Raises:
        MissingExtraError: NVRTC or `cuda.core` is not installed.
        torch.cuda.OutOfMemoryError: the memory to load from (up to 1 GiB) does not fit into the free memory.
    """
    properties = torch.cuda.get_device_properties(device)
    units, l2 = properties.multi_processor_count, properties.L2_cache_size
    far = min(MOST_FAR_BYTES, BEYOND * l2)
    with other_load() as load:
        levels = []
        for done, (name, measured) in enumerate(_levels(device, units, l2, far).items()):
            progress(name, done / 8)
            chain, hops, stream, size = measured()
            levels.append(Level(name, size, latency_ns(chain, hops, device), rate(stream, device), units, LINE_BYTES))
            del chain, stream
        progress("concurrency and parallelism", 6 / 8)
        level = next(each for each in levels if each.name == "device memory")
        flights = _flights(level, far, units, device)
    return MemoryClimb(
        device=properties.name,
        kind="cuda",
        unit="multiprocessor",
        levels=tuple(levels),
        flown=level.name,
        flights=tuple(flights),
        other_cores=round(load.cores, 1),
        remarks=tuple(_remarks(level, device)),
    )


Measured = tuple[Chain, int, Stream, int]


def _levels(device: torch.device, units: int, l2: int, far: int) -> dict[str, Callable[[], Measured]]:
    """A function for each level, the nearest level first. Each function returns a `Chain` to measure latency, its
    number of hops, a `Stream` to measure bandwidth, and the size in bytes of the memory that the chain reads."""
    wide = 2 * units  # two blocks of 1,024 threads per multiprocessor, which holds no more

    def registers() -> Measured:
        return register_chain(device), NEAR_HOPS, register_stream(RESIDENT * units, 4096, device), 0

    def shared() -> Measured:
        values = torch.ones(NEAR_BYTES // 4, device=device)
        chain = shared_chain(ring(NEAR_BYTES, 4, device), device)
        return chain, NEAR_HOPS, shared_stream(values, wide, 512, device), NEAR_BYTES

    def l1() -> Measured:
        values = torch.ones(wide * NEAR_BYTES // 4, device=device)
        chain = memory_chain(ring(NEAR_BYTES, LINE_BYTES, device), THROUGH_L1, device)
        apart = NEAR_BYTES // VECTOR_BYTES
        return chain, NEAR_HOPS, memory_stream(values, THROUGH_L1, wide, WIDE_BLOCK, 512, device, apart), NEAR_BYTES

    def level_2() -> Measured:
        size = l2 // 4
        values = torch.ones(size // 4, device=device)
        stream = memory_stream(values, FROM_L2, RESIDENT * units, BLOCK, 16, device, flight=FLIGHT)
        return memory_chain(ring(size, LINE_BYTES, device), FROM_L2, device), FAR_HOPS, stream, size

    def device_memory() -> Measured:
        values = torch.ones(far // 4, device=device)
        stream = memory_stream(values, FROM_L2, RESIDENT * units, BLOCK, 1, device, flight=FLIGHT)
        return memory_chain(ring(far, LINE_BYTES, device), FROM_L2, device), FAR_HOPS, stream, far

    def host_memory() -> Measured:
        values = torch.ones(HOST_BYTES // 4).pin_memory()
        following = ring(HOST_BYTES, LINE_BYTES, "cpu").pin_memory()
        stream = memory_stream(values, FROM_L2, RESIDENT * units, BLOCK, 1, device, flight=FLIGHT)
        return memory_chain(following, FROM_L2, device), BUS_HOPS, stream, HOST_BYTES

    return {
        "registers": registers,
        "shared memory": shared,
        "L1": l1,
        "L2": level_2,
        "device memory": device_memory,
        "host memory": host_memory,
    }


def latency_ns(chain: Chain, hops: int, device: torch.device) -> float:
    """The latency of one hop in ns."""
    calls = {"short": lambda: chain.run(hops), "long": lambda: chain.run(2 * hops)}
    found = compare(calls, device=device, seconds=SECONDS, graph=True)
    return (found["long"].best_ms - found["short"].best_ms) * 1e6 / hops


def rate(stream: Stream, device: torch.device) -> float:
    """The rate of a stream, in bytes/s."""
    return stream.loaded_bytes / (
        1e-3 * compare({"": stream.run}, device=device, seconds=SECONDS, graph=True)[""].best_ms
    )


def _flights(level: Level, far: int, units: int, device: torch.device) -> list[Flight]:
    values, found = torch.ones(far // 4, device=device), []
    for each in BLOCKS_EACH:
        for loads in CONCURRENCY:
            blocks = each * units
            stream = memory_stream(values, FROM_L2, blocks, BLOCK, 1, device, flight=loads)
            in_flight = loads * blocks * BLOCK * VECTOR_BYTES
            found.append(
                Flight(loads, blocks * BLOCK, VECTOR_BYTES, rate(stream, device), expected_rate(in_flight, level))
            )
    return found


def _remarks(level: Level, device: torch.device) -> list[str]:
    """Remarks that compare the loads in flight that Little's law requires with the loads in flight that occupancy
    provides."""
    each = level.in_flight_bytes / level.units
    said = [
        f"Little's law: {level.rate / 1e12:.3g} TB/s at {level.latency_ns:.0f} ns need "
        f"{level.in_flight_bytes / 1e6:.3g} MB in flight, {each / 1e3:.3g} KB for each of {level.units} "
        "multiprocessors."
    ]
    capability = torch.cuda.get_device_capability(device)
    if capability not in MULTIPROCESSORS:
        return said
    most = MULTIPROCESSORS[capability].max_warps * 32
    registers = kernel(FILE, f"stream<{FROM_L2}, {FLIGHT}>", device).binary.registers or 0
    share = occupancy(BLOCK, registers, 0, capability).fraction
    said.append(
        f"A multiprocessor holds {most:,} threads. At full occupancy, one load of 4 bytes per thread puts "
        f"{4 * most / 1e3:.3g} KB in flight, and one of 16 bytes {16 * most / 1e3:.3g} KB. To keep the memory busy, a "
        f"kernel needs {percent_text(100 * each / (4 * most))} of the threads with loads of 4 bytes, "
        f"{percent_text(100 * each / (16 * most))} with loads of 16 bytes, and "
        f"{percent_text(100 * each / (16 * FLIGHT * most))} with {FLIGHT} loads of 16 bytes per thread. The kernel "
        f"here uses {registers} registers, with which {percent_text(100 * share)} of the threads fit."
    )
    return said
