"""Blocks count their headers correctly, and memory comes from the requested allocator."""

from __future__ import annotations

import copy
import threading

import numpy as np
import pytest
import torch

from rooftop import mat
from rooftop.mat import CV_8U, CV_8UC3, CV_32FC1, Mat, MatAllocator, MatDataFlag


class Arena:
    """An allocator that counts its blocks, and places them one after another in one tensor."""

    def __init__(self) -> None:
        self.memory = torch.zeros(1 << 16, dtype=torch.uint8)
        self.used, self.asked = 64, []

    def get_bytes(self, size_bytes: int) -> torch.Tensor:
        self.asked.append(size_bytes)
        first, self.used = self.used, self.used + -(-size_bytes // 64) * 64
        return self.memory[first : first + size_bytes]


def test_headers_are_counted() -> None:
    m = Mat.zeros(4, 5, CV_8UC3)
    data = m.data
    assert data is not None
    assert data.headers == 1
    views = [m.row(0), m[1:3, 2:4], m.reshape(1), copy.copy(m), Mat(m)]
    assert data.headers == 6
    assert all(view.data is data for view in views)
    tensor, array = m.tensor(), m.numpy()  # these view the memory and are not headers
    assert data.headers == 6
    clone = m.clone()
    assert data.headers == 6
    assert clone.data is not None
    assert clone.data.headers == 1
    views.pop()
    assert data.headers == 5
    views.clear()
    m.release()
    assert data.headers == 0
    tensor.fill_(3)
    assert array[0, 0, 0] == 3


def test_what_a_block_says() -> None:
    m = Mat(4, 5, CV_32FC1)
    assert m.data is not None
    assert (m.data.size_bytes, m.data.device.type, m.data.mapping) == (80, "cpu", "host")
    assert m.data.flags is MatDataFlag.NONE
    assert m.data.allocator is mat.getDefaultAllocator()
    assert m.data.data_ptr() == m.data_ptr()
    array = np.zeros((4, 5), np.float32)
    given = Mat(array).data
    assert given is not None
    assert given.allocator is None
    assert given.user_given
    assert repr(given) == "MatData(80 bytes on cpu, headers: 0, USER_GIVEN)"


def test_an_allocator_of_ones_own() -> None:
    arena = Arena()
    allocator = MatAllocator("arena", "cpu", arena.get_bytes)  # type: ignore[arg-type]
    m = Mat(3, 5, CV_8UC3, 7, allocator=allocator)
    assert arena.asked == [45]
    assert m.data_ptr() == arena.memory.data_ptr() + 64
    assert arena.memory[64 : 64 + 45].tolist() == [7] * 45
    assert arena.memory.sum() == 7 * 45
    assert m[1:3, 1:4].locateROI() == ((5, 3), (1, 1))
    other = m.clone()  # clone uses the same allocator
    assert other.data_ptr() == arena.memory.data_ptr() + 128
    other.push_back(m)
    assert len(arena.asked) == 3
    assert (other.numpy() == 7).all()
    m.create(2, 2, CV_32FC1)
    assert arena.asked[-1] == 16


def test_the_default_allocator() -> None:
    arena = Arena()
    allocator = MatAllocator("arena", torch.device("cpu"), arena.get_bytes)
    standard = mat.getDefaultAllocator()
    assert standard is mat.getStdAllocator("cpu")
    seen = []
    with mat.using_allocator(allocator):
        assert mat.getDefaultAllocator() is allocator
        m = Mat.zeros(2, 2, CV_8U)
        thread = threading.Thread(target=lambda: seen.append(mat.getDefaultAllocator()))
        thread.start()
        thread.join()
        mat.merge([m, m])
        m.convertTo(CV_32FC1)
    assert arena.asked == [4, 8, 16]
    assert seen == [standard]  # only the thread of the `with` block uses the allocator
    assert mat.getDefaultAllocator() is standard
    mat.setDefaultAllocator(allocator)
    try:
        assert mat.getDefaultAllocator() is allocator
        Mat(1, 1, CV_8U)
        assert arena.asked == [4, 8, 16, 1]
    finally:
        mat.setDefaultAllocator(None)
    assert mat.getDefaultAllocator() is standard


def test_allocators_that_give_something_else() -> None:
    def allocator(gives: object) -> MatAllocator:
        return MatAllocator("wrong", torch.device("cpu"), lambda size_bytes: gives)  # type: ignore[arg-type, return-value]

    for gives, what in (
        (torch.zeros(3, dtype=torch.uint8), r"got torch.uint8 \(3,\) on cpu"),
        (torch.zeros(9), r"got torch.float32 \(9,\)"),
        (torch.zeros(8, 2, dtype=torch.uint8)[:, 0], "contiguous"),
        (None, "got NoneType"),
    ):
        with pytest.raises(ValueError, match=what):
            Mat(2, 2, CV_8U, allocator=allocator(gives))
    with pytest.raises(ValueError, match="1 bytes past a multiple of 8: align it"):
        Mat(2, 2, CV_32FC1, allocator=allocator(torch.zeros(64, dtype=torch.uint8)[1:]))
    with pytest.raises(TypeError, match="expected a MatAllocator as allocator, got str"):
        mat.setDefaultAllocator("pinned")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="only host memory can be pinned,"):
        mat.getStdAllocator("cuda", pinned=True)
    with pytest.raises(ValueError, match="got device meta and an allocator of cpu"):
        Mat(2, 2, CV_8U, device="meta", allocator=mat.getStdAllocator())
    m = Mat.zeros(2, 2, CV_8U)
    for call in (lambda: Mat(2, 2, CV_8U, device="foo"), lambda: m.to("foo"), lambda: mat.getStdAllocator("foo")):
        with pytest.raises(ValueError, match=r"a device is 'cpu', 'cuda', 'cuda:0' .* got 'foo'"):
            call()
    with pytest.raises(TypeError, match=r"a device is 'cpu', .* got 3\.5"):
        Mat(2, 2, CV_8U, device=3.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got 'cuda:-1'"):
        m.cuda(-1)
    if torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"no device cuda:99 here: torch can use \d+ GPUs"):
            m.cuda(99)
    else:
        with pytest.raises(ValueError, match=r"no CUDA device here .*: use device='cpu'"):
            m.cuda()
        with pytest.raises(ValueError, match=r"no GPU here .* for which to pin memory: leave out pinned=True"):
            mat.getStdAllocator(pinned=True)
    with pytest.raises(TypeError, match="apply to new memory, but this Mat shares the memory of its argument"):
        Mat(np.zeros((2, 2)), device="cpu")


def test_host_memory_is_mapped_as_it_is() -> None:
    m = Mat.zeros(2, 3, CV_8U)
    with m.mapped() as array:
        array[1, 2] = 9
        assert array.ctypes.data == m.data_ptr()
    assert m[1, 2] == 9
    with m.mapped(write=False) as array:
        assert not array.flags.writeable
    assert m.to("cpu").data is m.data
    assert m.cpu().data is m.data
