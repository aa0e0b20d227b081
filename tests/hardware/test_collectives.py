"""Collectives are measured in separate processes, which never outlive the call."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from rooftop.errors import MeasurementError
from rooftop.hardware import collectives
from rooftop.hardware.collectives import collective_rates

SIZES = (64 << 10, 1024 << 10)

Left = Callable[[], list[psutil.Process]]


@pytest.fixture
def left(children: Callable[..., list[psutil.Process]]) -> Left:
    """Processes that outlive their measurement."""
    return lambda: children("rooftop.hardware.collectives")


def test_every_collective_at_every_size(left: Left) -> None:
    rates = collective_rates(["cpu"] * 2, SIZES)
    assert set(rates) == {"all_reduce", "all_gather"}
    for by_size in rates.values():
        assert list(by_size) == list(SIZES)
        assert all(1e5 < rate < 1e12 for rate in by_size.values())
    assert not left()


def test_processes_that_take_too_long_are_ended(left: Left) -> None:
    began = time.monotonic()
    with pytest.raises(MeasurementError, match=r"process 0 of 2 had not finished after 0\.1 s"):
        collective_rates(["cpu", "cpu"], SIZES, timeout_s=0.1)
    assert time.monotonic() - began < 60  # even on a busy machine
    assert not left()


FAILING = """#!{python} -S
import sys, time
if sys.argv[-1] == "1":
    raise RuntimeError("no way to the other device")
time.sleep(600)
"""


def test_the_first_failure_ends_all_and_is_named(left: Left, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for Python, which fails as the second process and hangs as the first one."""
    script = tmp_path / "python"
    script.write_text(FAILING.format(python=sys.executable))
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(MeasurementError, match="process 1 of 2 failed: RuntimeError: no way to the other device"):
        collective_rates(["cpu", "cpu"])
    assert not left()


@pytest.mark.parametrize("devices", [[], ["cpu"], ["cpu", "cuda:0"], ["meta", "meta"]])
def test_wrong_devices(devices: list[str]) -> None:
    with pytest.raises(ValueError, match="expected two or more GPUs"):
        collective_rates(devices)


@pytest.mark.parametrize("sizes", [[], [0], [12], [-8]])
def test_wrong_sizes(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="divisible by 8"):
        collective_rates(["cpu", "cpu"], sizes)


def test_the_default_sizes_suit_any_number_of_devices(left: Left, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "SIZES", SIZES)
    count = 3
    for by_size in collective_rates(["cpu"] * count).values():
        assert all(0 <= size - found < 4 * count for size, found in zip(SIZES, by_size, strict=True))
    assert not left()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_between_gpus_large_messages_are_faster_than_the_host() -> None:
    rates = collective_rates([f"cuda:{index}" for index in range(torch.cuda.device_count())])
    for by_size in rates.values():
        assert by_size[256 << 20] > by_size[1 << 20]
        assert by_size[256 << 20] > 5e9
