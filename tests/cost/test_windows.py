"""The part of an input under sliding windows is counted by its definition, also for long signals and windows."""

from __future__ import annotations

import time

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from rooftop.cost.formulas.windows import _touched, touched_bytes

SMALL = st.integers(0, 6)


@example(9, 5, 3, 2, 12, 12)  # the first of the three taps is in the padding for all windows
@example(5, 1, 5, 2, 4, 2)
@given(st.integers(0, 30), SMALL, SMALL, st.integers(1, 6), SMALL, st.integers(1, 4))
def test_positions_under_windows(
    size: int, windows: int, kernel: int, stride: int, padding: int, dilation: int
) -> None:
    places = {w * stride - padding + k * dilation for w in range(windows) for k in range(kernel)}
    assert _touched(size, windows, kernel, stride, padding, dilation) == len(places & set(range(size)))


def test_long_windows_over_long_signals_are_counted_at_once() -> None:
    signal = torch.empty(1, 1, 2_000_000, device="meta")
    began = time.process_time()
    assert touched_bytes(signal, [1_999_001], [1000], [1], [0], [1]) == 4 * 2_000_000
    assert touched_bytes(signal, [1_998_001], [1000], [1], [0], [2]) == 4 * (1_998_001 + 1998)
    assert time.process_time() - began < 10
