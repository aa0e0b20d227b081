"""Memory that a kernel may still read is not given to anything else."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

pytest.importorskip("warp")

from rooftop.scene.rendering.host_rows import HostRows


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_dropped_memory_goes_to_the_next_rows_of_its_shape(device: str) -> None:
    def made() -> HostRows:
        return HostRows((5, 3), torch.int64, torch.device(device))

    first, second = made(), made()
    address = first.rows.ctypes.data
    assert second.rows.ctypes.data != address
    assert first.there.ptr == address
    first.launched()
    del first
    gc.collect()
    other = HostRows((5, 4), torch.int64, torch.device(device))
    third = made()
    third.wait()
    third.rows[:] = 7
    assert third.rows.ctypes.data == address != other.rows.ctypes.data
    assert (np.asarray(third.there.numpy()) == 7).all()
