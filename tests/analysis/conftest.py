"""A machine with round figures, so that roofs can be computed mentally, and models of other libraries."""

from __future__ import annotations

import itertools
import sys
from types import ModuleType

import pytest

from rooftop.hardware.ceilings import Ceilings, MemoryLevel, MemoryPoint


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Number the graphs of each test from 0. Inductor writes the number into its C++ code, so with the same numbers the
    compiled code of earlier runs is found, whatever tests this process has run before."""
    if compiler := sys.modules.get("torch._inductor.compile_fx"):
        compiler._graph_counter = itertools.count()  # type: ignore[attr-defined]


def make_ceilings(**changes: object) -> Ceilings:
    """1 GB/s whatever the working set, 1 GFLOP/s in every precision but bf16 (4), 1 us kernel floor."""
    rate = 1e9
    values: dict[str, object] = {
        "device": "Test machine",
        "device_id": "test",
        "kind": "cpu",
        "threads": 1,
        "versions": {},
        "measured_at": "2026-01-01T00:00:00Z",
        "memory": tuple(MemoryPoint(size, rate, rate, rate, rate) for size in (1 << 14, 1 << 24, 1 << 30)),
        "levels": (MemoryLevel("DRAM", None, rate),),
        "flops": {"fp64": 1e9, "fp32": 1e9, "tf32": 2e9, "fp16": 4e9, "bf16": 4e9},
        "kernel_floor_ms": 0.001,
        "launch_eager_ms": 0.01,
        "launch_graph_ms": 0.002,
        "transfers": {},
        "links": {},
        "spread": {},
        "disturbed": (),
    }
    return Ceilings(**{**values, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def round_ceilings() -> Ceilings:
    return make_ceilings()


@pytest.fixture
def ceilings(round_ceilings: Ceilings) -> Ceilings:
    return round_ceilings


@pytest.fixture(scope="session")
def transformers(torchvision_models: ModuleType) -> ModuleType:
    """The library transformers, which imports torchvision if that is installed."""
    module: ModuleType = pytest.importorskip("transformers")
    return module
