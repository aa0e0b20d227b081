"""The memory ladder: chains go around once, loads add up, and Little's law joins rate and latency."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rooftop.errors import MissingExtraError
from rooftop.hardware import Timing
from rooftop.ladder import memory_on_cpu, memory_on_gpu
from rooftop.ladder.memory_climbing import climb_memory
from rooftop.ladder.memory_levels import Flight, Level, MemoryClimb, expected_rate
from rooftop.ladder.memory_shown import flight_table, heading, latency_text, page, said, size_text, table
from rooftop.ladder.rungs import source

CPU = torch.device("cpu")
KERNELS = ("chain_registers", "chain_shared", "chain<0>", "chain<1>", "stream_registers<8>", "stream_shared")
STREAMS = tuple(f"stream<1, {flight}>" for flight in memory_on_gpu.CONCURRENCY)
LEVEL = Level("DRAM", 1 << 27, 100.0, 2e10, 2, 64)
FOUND = MemoryClimb(
    device="a <CPU>",
    kind="cpu",
    unit="core",
    levels=(Level("L1", 1 << 14, 1.25, 1e11, 2, 64), LEVEL),
    flown="DRAM",
    flights=(Flight(1, 1, 64, 6e8, 6.4e8), Flight(16, 2, 64, 2.2e10, 2e10)),
    other_cores=1.5,
    remarks=("a [remark]",),
)


def test_a_ring_goes_once_around() -> None:
    for following, step in ((memory_on_cpu.ring(64 * 100), 8), (memory_on_gpu.ring(128 * 100, 128, CPU).numpy(), 32)):
        places = [0]
        while len(places) < 100:
            places.append(int(following[places[-1]]))
        assert sorted(places) == [step * n for n in range(100)]
        assert int(following[places[-1]]) == 0
        assert places != sorted(places)


def test_loops_of_the_cpu() -> None:
    pytest.importorskip("numba")
    from rooftop.ladder.memory_loops import chase, chase_several, read

    following = memory_on_cpu.ring(64 * 50)
    place, places = 0, [0, 8, 16]
    for _ in range(7):
        place, places = int(following[place]), [int(following[each]) for each in places]
    moved = np.array([0, 8, 16], np.int64)
    chase_several(following, moved, 7)
    assert chase(following, 0, 7) == place
    assert moved.tolist() == places
    values = np.arange(100, dtype=np.int64)
    assert read(values, 3) == sum(int((values ^ turn).sum()) for turn in range(3))


def test_little_s_law() -> None:
    """100 ns at 20 GB/s: 2,000 bytes in flight; half of them give half of the rate."""
    assert LEVEL.in_flight_bytes == pytest.approx(2000)
    assert expected_rate(1000, LEVEL) == pytest.approx(1e10)
    assert expected_rate(64_000, LEVEL) == LEVEL.rate
    assert FOUND.flights[1].in_flight_bytes == 16 * 2 * 64


def test_the_levels_of_this_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test uses small working sets. Every level has its figures, and the law has its points."""
    pytest.importorskip("numba")
    monkeypatch.setattr(memory_on_cpu, "SECONDS", 0.005)
    monkeypatch.setattr(memory_on_cpu, "working_sets", lambda caches: {"L1": 8192, "DRAM": 1 << 20})
    found = climb_memory(CPU)
    assert [level.name for level in found.levels] == ["L1", "DRAM"]
    assert all(0.1 < level.latency_ns < 1e5 and 1e7 < level.rate < 1e13 for level in found.levels)
    parallelisms = len({1, torch.get_num_threads()})
    assert len(found.flights) == parallelisms * len(memory_on_cpu.CHAINS)
    assert all(flight.rate > 0 for flight in found.flights)
    assert json.loads(json.dumps(found.to_dict()))["levels"][0]["in_flight_bytes"] > 0
    assert any("Little's law" in remark for remark in found.remarks)


def test_the_rate_of_an_array_that_is_read_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of one call divided by a made-up time."""
    pytest.importorskip("numba")
    monkeypatch.setattr(memory_on_cpu, "READ_BYTES", 1 << 16)

    def one_ms(call: Callable[[], None]) -> float:
        call()
        return 1.0

    monkeypatch.setattr(memory_on_cpu, "_best_ms", one_ms)
    with ThreadPoolExecutor(2) as pool:
        assert memory_on_cpu.rate(1 << 14, 2, pool) == pytest.approx(2 * (1 << 16) * 1e3)
        assert memory_on_cpu.rate(4 << 20, 2, pool) == pytest.approx(2 * (1 << 16) * 1e3)


def test_working_sets_fit_their_caches() -> None:
    sizes = memory_on_cpu.working_sets({"L1d": 32768, "L2": 1 << 20, "L3": 32 << 20})
    assert sizes == {"L1": 16384, "L2": 1 << 19, "L3": 16 << 20, "DRAM": 128 << 20}
    assert memory_on_cpu.working_sets({}) == {"DRAM": 64 << 20}


def test_without_numba_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_on_cpu, "numba_works", lambda: False)
    with pytest.raises(MissingExtraError, match=r"rooftop\[ladder\]"):
        climb_memory(CPU)


# ---- the kernels of a GPU, on the CPU ----------------------------------------------------------------------------


def follow(following: torch.Tensor, hops: int) -> int:
    place = 0
    for _ in range(hops):
        place = int(following[place])
    return place


def test_chains_go_on_where_they_were(cuda_on_cpu: Counter[str]) -> None:
    ring = memory_on_gpu.ring(128 * 60, 128, CPU)
    small = memory_on_gpu.ring(4 * 60, 4, CPU)
    chains = {
        "L1": (memory_on_gpu.memory_chain(ring, memory_on_gpu.THROUGH_L1, CPU), ring),
        "L2": (memory_on_gpu.memory_chain(ring, memory_on_gpu.FROM_L2, CPU), ring),
        "shared": (memory_on_gpu.shared_chain(small, CPU), small),
    }
    for chain, following in chains.values():
        chain.run(7)
        assert int(chain.place) == follow(following, 7)
        chain.run(13)
        assert int(chain.place) == follow(following, 20)
    registers = memory_on_gpu.register_chain(CPU)
    registers.run(1000)
    assert float(registers.place) == 1001
    assert cuda_on_cpu == {"chain": 4, "chain_shared": 2, "chain_registers": 1}


@pytest.mark.parametrize(("vectors", "blocks", "flight"), [(1000, 3, 1), (1001, 2, 4), (7, 2, 8)])
def test_streams_load_every_element(vectors: int, blocks: int, flight: int, cuda_on_cpu: Counter[str]) -> None:
    values = torch.arange(4 * vectors).remainder(5).float()
    for level in (memory_on_gpu.THROUGH_L1, memory_on_gpu.FROM_L2):
        stream = memory_on_gpu.memory_stream(values, level, blocks, 64, 2, CPU, flight=flight)
        stream.run()
        assert float(stream.sums.sum()) == 2 * float(values.sum())
        assert stream.loaded_bytes == 2 * 16 * vectors


def test_blocks_with_pieces_of_their_own_and_near_memory(cuda_on_cpu: Counter[str]) -> None:
    values = torch.arange(4 * 90).remainder(5).float()
    apart = memory_on_gpu.memory_stream(values, memory_on_gpu.THROUGH_L1, 3, 64, 2, CPU, apart=30)
    apart.run()
    per_block = apart.sums.view(3, 64).sum(1)
    torch.testing.assert_close(per_block, 2 * values.view(3, 120).sum(1), rtol=0, atol=0)
    assert apart.loaded_bytes == 2 * values.nbytes
    shared = memory_on_gpu.shared_stream(values, 2, 3, CPU)
    shared.run()
    assert float(shared.sums.sum()) == 2 * 3 * float(values.sum())
    registers = memory_on_gpu.register_stream(2, 10, CPU)
    registers.run()
    chains = range(memory_on_gpu.REGISTER_CHAINS)
    assert set(registers.sums.tolist()) == {float(sum(first + 10 for first in chains))}
    assert registers.loaded_bytes == 2 * memory_on_gpu.BLOCK * memory_on_gpu.REGISTER_CHAINS * 10 * 16


def test_a_latency_is_the_difference_of_two_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """The made-up times are 5 us for a launch and 2 ns for a hop."""
    hops: list[int] = []

    def compare(calls: dict[str, Callable[[], None]], **options: object) -> dict[str, Timing]:
        found = {}
        for name, call in calls.items():
            call()
            ms = 5e-3 + 2e-6 * hops[-1]
            found[name] = Timing(ms, ms, 0.0, 5)
        return found

    monkeypatch.setattr(memory_on_gpu, "compare", compare)
    chain = memory_on_gpu.Chain(hops.append, torch.zeros(1))
    assert memory_on_gpu.latency_ns(chain, 1000, CPU) == pytest.approx(2.0)


def test_all_levels_of_a_gpu_with_times_that_are_made_up(
    cuda_on_cpu: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the kernels to the report, with kernels on the CPU and made-up times: 1 us for a launch, 3 ns for a hop, 1
    ms for a stream."""
    timed: list[str] = []

    def compare(calls: dict[str, Callable[[], None]], **options: object) -> dict[str, Timing]:
        for name, call in calls.items():
            call()
            timed.append(name)
        hops = {"short": memory_on_gpu.NEAR_HOPS, "long": 2 * memory_on_gpu.NEAR_HOPS}
        ms = {name: 1e-3 + 3e-6 * hops[name] if name in hops else 1.0 for name in calls}
        return {name: Timing(each, each, 0.0, 5) for name, each in ms.items()}

    for name, value in {"NEAR_HOPS": 64, "FAR_HOPS": 64, "BUS_HOPS": 64, "HOST_BYTES": 1 << 16}.items():
        monkeypatch.setattr(memory_on_gpu, name, value)
    properties = SimpleNamespace(multi_processor_count=1, L2_cache_size=1 << 16, name="a GPU")
    monkeypatch.setattr(memory_on_gpu, "compare", compare)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    found = memory_on_gpu.on_gpu(CPU, lambda what, fraction: None)
    assert [level.latency_ns for level in found.levels] == [pytest.approx(3.0)] * 6
    rates = {level.name: level.rate for level in found.levels}
    assert rates["device memory"] == pytest.approx(8 * (1 << 16) * 1e3)
    assert rates["L1"] == pytest.approx(2 * 512 * memory_on_gpu.NEAR_BYTES * 1e3)
    assert len(found.flights) == 16
    assert found.flights[-1].in_flight_bytes == 8 * 8 * 256 * 16
    assert found.flights[0].expected == pytest.approx(min(rates["device memory"], 256 * 16 / 3e-9))
    assert "A multiprocessor holds 2,048 threads" in found.remarks[1]
    assert timed.count("short") == timed.count("long") == 6
    assert flight_table(found).row_count == 16
    assert "host memory" in page(found)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_all_kernels_compile_without_spills(arch: str) -> None:
    pytest.importorskip("cuda.core")
    from rooftop.launch import cuda

    for name in (*KERNELS, "stream<0, 1>", *STREAMS):
        assert cuda.compile(source(memory_on_gpu.FILE), name, arch=arch).binary.spill_bytes == 0


@pytest.mark.gpu
@pytest.mark.alone
def test_the_levels_of_a_gpu() -> None:
    """Nearer levels have a lower latency and a higher rate."""
    found = climb_memory(torch.device("cuda"))
    names = [level.name for level in found.levels]
    assert names == ["registers", "shared memory", "L1", "L2", "device memory", "host memory"]
    latencies = {level.name: level.latency_ns for level in found.levels}
    assert 1 < latencies["registers"] < latencies["shared memory"] < latencies["L2"] < latencies["device memory"]
    assert latencies["L1"] < latencies["L2"]
    rates = {level.name: level.rate for level in found.levels}
    assert rates["registers"] > rates["shared memory"] > rates["L2"] > rates["device memory"] > rates["host memory"]
    assert len(found.flights) == 16
    assert "A multiprocessor holds" in found.remarks[1]


# ---- the output --------------------------------------------------------------------------------------------------


def test_tables_and_chart() -> None:
    cells = [list(column.cells) for column in table(FOUND).columns]
    assert cells[0] == ["L1", "DRAM"]
    assert cells[1] == ["16 KiB", "128 MiB"]
    assert cells[2] == ["1.25 ns", "100 ns"]
    assert cells[5] == ["125 B", "1.95 KiB"]
    law = [list(column.cells) for column in flight_table(FOUND).columns]
    assert law[5] == ["94%", "110% (!)"]
    assert "a <CPU>" in heading(FOUND)
    drawn = page(FOUND)
    assert "a &lt;CPU&gt;" in drawn
    assert "ladder-memory-levels" in drawn
    assert "ladder-memory-law" in drawn
    assert said(FOUND)[1].startswith("Other programs kept 1.5 cores busy")
    assert said(replace(FOUND, other_cores=0.0)) == ["a [remark]"]
    assert (size_text(0), size_text(3 << 30), latency_text(2100)) == ("", "3 GiB", "2.1 us")
