"""Tables on a device for numbers that repeat along a row, such as one number per channel of interleaved images.

A program may begin at any channel. So a table has one row for each possible first channel: row p repeats the numbers,
beginning with number p. The numbers of neighbouring elements are then contiguous in memory, so a thread loads several
numbers at once, as it loads several elements at once.
"""

from __future__ import annotations

from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

COLUMNS = 2048
"""The maximum number of values that a program reads from a table."""
MOST_BYTES = 64 << 20  # maximum size of all cached tables together

_tables: dict[tuple[bytes, torch.dtype, torch.device], Tensor] = {}
_making = Lock()


class Table(NamedTuple):
    """A table of repeating numbers on a device.

    Attributes:
        numbers: (period, COLUMNS): row p repeats the numbers, beginning with number p.
        is_kept: whether the table stays in memory forever, for all streams and CUDA graphs. If False, the table's
            memory belongs to the current stream, and is freed with the last reference to the table.
    """

    numbers: Tensor
    is_kept: bool


def table_of(numbers: bytes, dtype: torch.dtype, device: torch.device) -> Table:
    """Return the table of the given numbers. The table's contents are on the device when this function returns.

    Args:
        numbers: the numbers as bytes, which are the cache's key. As bytes, -0.0 differs from 0.0, and a NaN equals
            itself.
        dtype: dtype of the numbers.
        device: the device for the table.

    Raises:
        RuntimeError: a CUDA graph is being captured, and the cache has no such table.
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
        kept = _tables.get(key)
        if kept is not None:  # another thread has made this table; to replace it would free memory that is in use
            return Table(kept, True)
        has_room = sum(each.nbytes for each in _tables.values()) + made.nbytes <= MOST_BYTES
        if has_room:
            _tables[key] = made
    return Table(made, has_room)
