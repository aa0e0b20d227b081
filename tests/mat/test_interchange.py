"""Memory is shared with NumPy, OpenCV-Python, torch and DLPack in both directions at the same address, or refused with
the remedy."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from rooftop import mat
from rooftop.mat import CV_8U, CV_8UC3, CV_32FC1, CV_32FC3, Mat
from rooftop.mat.type_codes import DEPTHS

cv2 = pytest.importorskip("cv2")

DTYPES = ["u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8", "?"]
SHAPES = st.one_of(
    st.tuples(st.integers(1, 9)),
    st.tuples(st.integers(1, 6), st.integers(1, 6)),
    st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 10)),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
)


@settings(max_examples=80, deadline=None)
@given(SHAPES, st.sampled_from(DTYPES))
def test_numpy_both_ways(shape: tuple[int, ...], dtype: str) -> None:
    array = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    m = Mat(array)
    assert m.data_ptr() == array.ctypes.data
    assert m.channels() == (shape[2] if len(shape) == 3 else 1)
    assert m.type() == mat.type_code(array.dtype, m.channels())
    for back in (m.numpy(), np.asarray(m), np.from_dlpack(m)):
        assert back.dtype == array.dtype
        assert back.shape == (shape[:2] if len(shape) == 3 and shape[2] == 1 else shape)
        assert np.shares_memory(back, array)
        assert np.array_equal(back.reshape(shape), array)
    m.setTo(1)
    assert (array == 1).all()


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.sampled_from(range(len(DEPTHS))))
def test_torch_both_ways(shape: tuple[int, ...], depth: int) -> None:
    x = torch.randint(0, 2, shape).to(DEPTHS[depth].dtype)
    m = Mat(x)
    assert m.data_ptr() == x.data_ptr()
    back = m.tensor()
    assert back.dtype == x.dtype
    assert back.data_ptr() == x.data_ptr()
    assert back.shape == (shape if len(shape) == 3 else (*shape, 1))
    assert back.stride()[-1] == 1
    front = m.tensor(layout="chw")
    assert front.data_ptr() == x.data_ptr()
    assert front.shape == (back.shape[-1], *back.shape[:-1])
    assert torch.equal(front.movedim(0, -1).double(), back.double())
    through = torch.from_dlpack(m)
    assert through.data_ptr() == x.data_ptr()
    assert through.shape == (shape[:2] if len(shape) == 3 and shape[2] == 1 else shape)
    assert Mat.from_dlpack(x).data_ptr() == x.data_ptr()
    assert Mat(back).type() == m.type()


def test_regions_of_an_image_are_mats_and_arrays_with_the_same_gaps() -> None:
    array = np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3)
    cut = array[1:4, 2:5]
    m = Mat(cut)
    assert not m.isContinuous()
    assert not m.isSubmatrix()  # the source of an array's slice is not known
    assert m.step == (21, 3)
    assert m.numpy().strides == cut.strides
    assert m[1:, 1:].numpy().ctypes.data == cut[1:, 1:].ctypes.data
    x = torch.from_numpy(array)[1:4, 2:5]
    assert Mat(x).step == (21, 3)
    assert Mat(x).data_ptr() == cut.ctypes.data


def test_channels_in_front_that_lie_last_in_memory() -> None:
    batch = torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    m = Mat(batch[1], layout="chw")
    assert m.type() == CV_32FC3
    assert tuple(m.size) == (4, 5)
    assert m.data_ptr() == batch[1].data_ptr()
    assert torch.equal(m.tensor("chw"), batch[1])
    front = torch.rand(3, 4, 5)
    with pytest.raises(
        ValueError, match=r"are 80 bytes apart .*: copy the array by x\.permute\(1, 2, 0\)\.contiguous\(\), passed"
    ):
        Mat(front, layout="chw")
    assert torch.equal(Mat(front.permute(1, 2, 0).contiguous()).tensor("chw"), front)
    with pytest.raises(ValueError, match=r"array\.transpose\(1, 2, 0\)\.copy\(\), passed without layout="):
        Mat(front.numpy(), layout="chw")
    assert np.array_equal(Mat(front.numpy().transpose(1, 2, 0).copy()).tensor("chw").numpy(), front.numpy())
    with pytest.raises(ValueError, match="layout='chw' takes three dimensions"):
        Mat(torch.rand(4, 5), layout="chw")
    with pytest.raises(ValueError, match="layout must be 'hwc' or 'chw', got 'nhwc'"):
        Mat(torch.rand(4, 5, 3), layout="nhwc")  # type: ignore[arg-type]


def test_opencv_python_reads_and_writes_the_same_memory() -> None:
    m = Mat.zeros(20, 30, CV_8UC3)
    cv2.rectangle(m.numpy(), (5, 4), (9, 7), (1, 2, 3), -1)
    assert m[4, 5] == (1, 2, 3)
    assert m[3, 5] == (0, 0, 0)
    grey = cv2.cvtColor(m[2:10, 3:12].numpy(), cv2.COLOR_BGR2GRAY)
    assert Mat(grey).data_ptr() == grey.ctypes.data
    assert m.roi(*cv2.boundingRect(grey)).numpy().tolist() == m[2:6, 2:7].numpy().tolist()
    cv2.add(m.numpy(), 1, dst=m.numpy())
    assert m[0, 0] == (1, 1, 1)


def test_a_type_says_what_the_last_dimension_is() -> None:
    array = np.zeros((4, 5, 3), np.float32)
    assert Mat(array).type() == CV_32FC3
    assert Mat(array, CV_32FC1).dims == 3
    assert Mat(np.zeros((4, 3), np.float32), CV_32FC3).dims == 1
    assert Mat(np.zeros((2, 4, 5, 3), np.float32), CV_32FC3).size == (2, 4, 5)
    assert Mat(np.zeros((2, 2, 513), np.uint8)).dims == 3
    with pytest.raises(TypeError, match="numbers of CV_32F cannot be seen as CV_8UC3: leave out the type"):
        Mat(array, CV_8UC3)
    with pytest.raises(ValueError, match=r"CV_32FC\(5\) needs 5 as the last dimension, got shape \(4, 5, 3\)"):
        Mat(array, mat.CV_32FC(5))


ARRAY = np.zeros((6, 8, 3), np.uint8)
REFUSED = {
    "reversed rows": (ARRAY[::-1], r"dimension 0 of \(6, 8\) is reversed: .*opy the array by np.ascontiguousarray"),
    "RGB of BGR": (ARRAY[..., ::-1], "-1 bytes apart"),
    "one channel": (ARRAY[..., 0], "dimension 1 of .* is not contiguous: a step of 3 bytes"),
    "two channels of three": (ARRAY[..., :2], "is not contiguous: a step of 3 bytes, where a Mat needs 2"),
    "every other column": (ARRAY[:, ::2], "is not contiguous: a step of 6 bytes"),
    "transposed": (np.zeros((4, 5), np.float32).T, "is not contiguous: a step of 20 bytes, where a Mat needs 4"),
    "Fortran order": (np.zeros((4, 5, 3), np.float32, order="F"), "channels of an element must be contiguous"),
    "broadcast": (np.broadcast_to(np.zeros((1, 5)), (4, 5)), "dimension 0 .* is broadcast: a step of 0 bytes"),
    "overlapping": (np.lib.stride_tricks.sliding_window_view(np.zeros(9), 4), "transposed or overlapping"),
    "swapped axes": (np.zeros((4, 5, 6)).swapaxes(0, 1), "transposed or overlapping"),
    "not aligned": (np.frombuffer(b"x" * 17, np.uint8)[1:].view(np.float32), "is not aligned to its float32 numbers"),
    "a number": (np.array(3.0), "at least one dimension"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_header_can_lie_on_names_the_copy(name: str) -> None:
    array, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        Mat(array, mat.type_code(array.dtype) if name == "swapped axes" else None)
    if name != "a number":
        copied = array.copy() if name == "not aligned" else np.ascontiguousarray(array)
        assert np.array_equal(Mat(copied).numpy(), array)  # the fix that the message names


@pytest.mark.parametrize(
    ("thing", "error", "message"),
    [
        (Image.new("RGB", (4, 4)), TypeError, r"Image returns a copy of its memory: pass np.array\(...\)"),
        (np.zeros(3, np.longdouble), TypeError, "no depth has NumPy's dtype float128"),
        (np.zeros(3, ">i4"), TypeError, "not in this machine's byte order"),
        (np.zeros(3, np.complex64), TypeError, "no depth has NumPy's dtype complex64"),
        (np.zeros(3, "u1, f4"), TypeError, "no depth has"),
        (np.array([None]), TypeError, "no depth has NumPy's dtype object"),
        (torch.zeros(3, dtype=torch.complex64), TypeError, "no depth has the dtype torch.complex64"),
        (torch.zeros(3, requires_grad=True), ValueError, r"requires grad, .* pass x.detach\(\)"),
        (torch.zeros(2, 2).to_sparse(), TypeError, r"use x.to_dense\(\)"),
        (torch.zeros(4, 5).T, ValueError, r"opy the array by x.contiguous\(\)"),
        (torch.zeros(2, dtype=torch.complex64).conj().imag, TypeError, "resolve_neg"),
        ("text", TypeError, "or an array, got 'text'"),
        (cv2.UMat(np.zeros((4, 4))), TypeError, r"got .*UMat.*; its get\(\) copies it to an array"),
    ],
)
def test_what_cannot_be_a_mat(thing: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Mat(thing)


def read_only() -> np.ndarray:
    array = np.arange(12, dtype=np.uint8).reshape(3, 4)
    array.flags.writeable = False
    return array


def test_arrays_that_may_not_be_written_to_are_read() -> None:
    array = read_only()
    m = Mat(array)
    assert m.data_ptr() == array.ctypes.data
    assert m.data is not None
    assert m.data.read_only
    assert "read-only" in repr(m)
    assert m[1, 2] == 6
    assert not m.numpy().flags.writeable
    assert not m[1:].numpy().flags.writeable
    assert np.array_equal(m.clone().setTo(1).numpy(), np.ones((3, 4)))
    assert np.array_equal(m.convertTo(CV_32FC1).numpy(), array)
    m.push_back(Mat.zeros(1, 4, CV_8U))  # moves to separate memory
    assert len(array) == 3
    m.setTo(5)


@pytest.mark.parametrize(
    "write",
    [
        lambda m: m.setTo(1),
        lambda m: m[1:].setTo(1),
        lambda m: m.__setitem__((0, 0), 3),
        lambda m: Mat.zeros(3, 4, CV_8U).copyTo(m),
        lambda m: Mat.zeros(3, 4, CV_8U).convertTo(CV_8U, 2, dst=m),
        lambda m: mat.insertChannel(Mat.zeros(3, 4, CV_8U), m, 0),
        lambda m: m.tensor(),
        lambda m: m.__dlpack__(),
    ],
)
def test_writes_to_them_are_refused(write: object) -> None:
    array = read_only()
    with pytest.raises((ValueError, BufferError), match=r"clone\(\) first"):
        write(Mat(array))  # type: ignore[operator]
    assert array.ravel().tolist() == list(range(12))


def test_memory_lives_as_long_as_somebody_looks_at_it() -> None:
    array = np.arange(12, dtype=np.float32)
    m = Mat(array)
    del array
    gc.collect()
    assert m.numpy().tolist() == list(range(12))
    view = m.numpy()
    tensor = m.tensor()
    block = weakref.ref(m.data)
    del m
    gc.collect()
    assert block() is None  # no header is left
    assert view.tolist() == tensor.flatten().tolist() == list(range(12))  # but the memory still exists


def test_array_protocol() -> None:
    m = Mat(np.arange(6, dtype=np.int16).reshape(2, 3))
    assert np.asarray(m, np.float64).dtype == np.float64
    assert not np.shares_memory(np.array(m), m.numpy())
    assert (np.asarray(m) + 1).tolist() == [[1, 2, 3], [4, 5, 6]]
    with pytest.raises(ValueError, match="without a copy"):
        np.asarray(m, np.float64, copy=False)
    with pytest.raises(TypeError, match="NumPy has no dtype for CV_16BFC1"):
        Mat(2, 2, mat.CV_16BF, 1).numpy()


def test_only_cuda_mats_have_the_cuda_array_interface() -> None:
    assert not hasattr(Mat.zeros(2, 2, CV_8U), "__cuda_array_interface__")


def test_inference_mode_leaves_no_mark() -> None:
    """PyTorch forbids writing to inference tensors outside of inference mode, so Mats must not be such tensors."""
    with torch.inference_mode():
        m = Mat(2, 2, CV_8U, 1)
        other = Mat(torch.zeros(2, 2))
    assert m.setTo(3)[0, 0] == 3
    assert other.setTo(3)[0, 0] == 3
    m.tensor().add_(1)
    assert m[1, 1] == 4


def test_what_is_done_to_a_tensor_is_not_done_to_the_mat() -> None:
    m = Mat(np.zeros((2, 2), np.float32))
    m.tensor().requires_grad_()
    m.tensor().resize_(0)
    assert m.setTo(2).numpy().tolist() == [[2, 2], [2, 2]]


def test_importing_brings_no_heavy_package() -> None:
    program = """
import sys, json
from rooftop import mat
mat.Mat.zeros(2, 2, mat.CV_8UC3).convertTo(mat.CV_32F)
print(json.dumps([name for name in ("cv2", "triton", "warp", "numba", "rooftop.kernels") if name in sys.modules]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
