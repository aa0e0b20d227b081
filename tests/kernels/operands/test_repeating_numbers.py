"""Tables of repeating numbers: their contents and their lifetime."""

from __future__ import annotations

import gc
import struct
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from rooftop.kernels.operands import repeating_numbers
from rooftop.kernels.operands.repeating_numbers import COLUMNS, table_of

CPU = torch.device("cpu")


def test_each_line_has_the_numbers_from_its_own_on() -> None:
    numbers = torch.tensor([5, -7, 9], dtype=torch.int16)
    table, _ = table_of(numbers.numpy().tobytes(), torch.int16, CPU)
    assert table.shape == (3, COLUMNS)
    for line in range(3):
        expected = [[5, -7, 9][(line + column) % 3] for column in range(COLUMNS)]
        assert table[line].tolist() == expected


def test_zeros_of_both_signs_and_dtypes_are_told_apart() -> None:
    zeros = [table_of(struct.pack("<f", zero), torch.float32, CPU).numbers for zero in (0.0, -0.0)]
    assert [bool(each.signbit().all()) for each in zeros] == [False, True]
    assert table_of(struct.pack("<f", 0.0), torch.int32, CPU).numbers.dtype == torch.int32


def test_what_is_kept_stays_and_the_rest_is_its_holders(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph contains the addresses of the kept tables."""
    monkeypatch.setattr(repeating_numbers, "_tables", {})
    monkeypatch.setattr(repeating_numbers, "MOST_BYTES", 3 * COLUMNS)
    kept = [table_of(bytes([number]), torch.uint8, CPU) for number in range(3)]
    assert all(each.is_kept for each in kept)
    beyond = table_of(bytes([3]), torch.uint8, CPU)
    assert not beyond.is_kept
    assert table_of(bytes([1]), torch.uint8, CPU).numbers is kept[1].numbers
    held = weakref.ref(beyond.numbers)
    del beyond
    gc.collect()
    assert held() is None
    assert not table_of(bytes([3]), torch.uint8, CPU).is_kept


def test_two_threads_get_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both threads look for the table before one of them has stored it. Neither may replace the other's kept table."""
    monkeypatch.setattr(repeating_numbers, "_tables", {})
    both = threading.Barrier(2)
    frombuffer = torch.frombuffer

    def together(*arguments: Any, **options: Any) -> torch.Tensor:
        both.wait(timeout=60)
        return frombuffer(*arguments, **options)

    monkeypatch.setattr(torch, "frombuffer", together)
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda _: table_of(bytes([5, 6]), torch.uint8, CPU), range(2))
    assert one.is_kept
    assert other.numbers is one.numbers
