"""Tables from which kernels load numbers that repeat along a row, such as one for each channel of interleaved
images.

A program may begin at any channel. So a table has one row for each start, which repeats the numbers from that start on.
A program's numbers are contiguous, and its loads are as wide as those of images.
"""

from __future__ import annotations

from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

COLUMNS = 2048
"""The maximum number of values that a program takes from a table."""
MOST_BYTES = 64 << 20  # tables kept in the cache

_tables: dict[tuple[bytes, torch.dtype, torch.device], Tensor] = {}
_making = Lock()


class Table(NamedTuple):
    """Numbers on a device.

    Attributes:
        numbers: (period, COLUMNS): line p has the numbers from number p on.
        is_kept: whether the table stays in memory forever, for all streams and CUDA graphs. Otherwise it belongs to the
            current stream, and lives as long as anything refers to it.
    """

    numbers: Tensor
    is_kept: bool


def table_of(numbers: bytes, dtype: torch.dtype, device: torch.device) -> Table:
    """The table of the given numbers; its contents are written before this function returns.

    Args:
        numbers: the numbers as bytes. As keys, -0.0 and 0.0 differ, and a NaN equals itself.
        dtype: dtype of the numbers.
        device: the device for the table.

    Raises:
        RuntimeError: a CUDA graph is being captured, and no such table is kept.
    """
    key = (numbers, dtype, device)
    found = _tables.get(key)
    if found is not None:
        return Table(found, True)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "per-channel numbers are copied to the GPU at their first use, and a CUDA graph would record this copy: "
            "run the call once before the capture"
        )
    period = torch.frombuffer(bytearray(numbers), dtype=dtype)
    places = torch.arange(len(period), device="cpu")[:, None] + torch.arange(COLUMNS, device="cpu")
    made = period[places % len(period)].to(device)
    with _making:
        has_room = sum(each.nbytes for each in _tables.values()) + made.nbytes <= MOST_BYTES
        if has_room:
            _tables[key] = made
    return Table(made, has_room)
