"""Numbers that repeat along a row, one for each channel of interleaved images, as kernels load them.

A program may begin with any of the channels. So a table has a line for each, with the numbers from that one on, again
and again: what a program needs lies side by side, and is loaded as wide as images are.
"""

from __future__ import annotations

from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

COLUMNS = 2048
"""Of a table: numbers that a program takes from it at most."""
MOST_BYTES = 64 << 20  # of tables that are kept

_tables: dict[tuple[bytes, torch.dtype, torch.device], Tensor] = {}
_making = Lock()


class Table(NamedTuple):
    """Numbers on a device.

    Attributes:
        numbers: (period, COLUMNS): line p has those from number p on.
        is_kept: whether it is there for good, for all streams and for CUDA graphs. Else it is the current stream's, as
            long as somebody holds it.
    """

    numbers: Tensor
    is_kept: bool


def table_of(numbers: bytes, dtype: torch.dtype, device: torch.device) -> Table:
    """The table of some numbers; it is there when this returns.

    Args:
        numbers: in the bytes that they have in memory: -0.0 is not 0.0, and NaN is what it is.
        dtype: of the numbers.
        device: where the table shall be.

    Raises:
        RuntimeError: no such table is kept, and a CUDA graph is captured.
    """
    key = (numbers, dtype, device)
    found = _tables.get(key)
    if found is not None:
        return Table(found, True)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a number for each channel is copied to the GPU when it is first used, which a CUDA graph would record: do "
            "it once before it is captured"
        )
    period = torch.frombuffer(bytearray(numbers), dtype=dtype)
    places = torch.arange(len(period), device="cpu")[:, None] + torch.arange(COLUMNS, device="cpu")
    made = period[places % len(period)].to(device)
    with _making:
        has_room = sum(each.nbytes for each in _tables.values()) + made.nbytes <= MOST_BYTES
        if has_room:
            _tables[key] = made
    return Table(made, has_room)
