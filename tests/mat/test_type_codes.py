"""Type codes are OpenCV's: version 5 by default, version 4 on request."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from rooftop import mat
from rooftop.mat.type_codes import DEPTHS

cv2 = pytest.importorskip("cv2")

# From opencv2/core/hal/interface.h of OpenCV 4: depth | (channels - 1) << 3.
OPENCV4 = {"CV_8UC1": 0, "CV_8UC3": 16, "CV_8UC4": 24, "CV_16SC2": 11, "CV_32FC1": 5, "CV_32FC3": 21, "CV_64FC4": 30}


def test_every_constant_that_opencv_has_has_its_number() -> None:
    names = [name for name in dir(cv2) if re.fullmatch(r"CV_(8|16|32|64)?(U|S|F|Bool)(C[1-4])?", name)]
    assert len(names) == 60
    assert {name: getattr(mat, name) for name in names} == {name: getattr(cv2, name) for name in names}


@pytest.mark.parametrize("depth", range(len(DEPTHS)))
def test_a_type_is_its_depth_and_its_channels(depth: int) -> None:
    for channels in (1, 2, 3, 4, 5, 10, 127, 128, 129, 512):
        type = mat.CV_MAKETYPE(depth, channels)
        assert (mat.CV_MAT_DEPTH(type), mat.CV_MAT_CN(type)) == (depth, channels)
        assert mat.CV_ELEM_SIZE(type) == channels * DEPTHS[depth].dtype.itemsize == channels * mat.CV_ELEM_SIZE1(type)
        if channels <= 128:  # the most that OpenCV 5 allows
            assert type == cv2.CV_MAKETYPE(depth, channels)
        maker = getattr(mat, f"CV_{DEPTHS[depth].name}C")
        assert maker(channels) == type


def test_names_are_those_that_opencv_prints() -> None:
    assert mat.typeToString(mat.CV_8UC3) == "CV_8UC3"
    assert mat.typeToString(mat.CV_16BFC1) == "CV_16BFC1"
    assert mat.typeToString(mat.CV_BoolC2) == "CV_BoolC2"
    assert mat.typeToString(mat.CV_32FC(10)) == "CV_32FC(10)"
    assert mat.depthToString(mat.CV_64S) == "CV_64S"


def test_codes_of_opencv_4() -> None:
    for name, code in OPENCV4.items():
        assert mat.type_code(getattr(mat, name), opencv=4) == code
        assert mat.from_opencv4(code) == getattr(mat, name)
    for channels in (1, 3, 512):
        type = mat.CV_16FC(channels)
        assert mat.from_opencv4(mat.type_code(type, opencv=4)) == type
    with pytest.raises(ValueError, match="OpenCV 4 has no CV_64SC1"):
        mat.type_code(mat.CV_64SC1, opencv=4)
    with pytest.raises(ValueError, match="OpenCV 4: codes are 0 to 4095"):
        mat.from_opencv4(4096)


def test_dtypes_are_types_and_back() -> None:
    for number, depth in enumerate(DEPTHS):
        assert mat.type_code(depth.dtype, 3) == mat.CV_MAKETYPE(number, 3)
        assert mat.torch_dtype(mat.type_code(depth.dtype, 3)) == depth.dtype
        assert depth.carrier.itemsize == depth.dtype.itemsize
        if depth.numpy is not None:
            assert mat.type_code(depth.numpy) == number
            assert mat.numpy_dtype(number) == depth.numpy
            assert torch.from_numpy(np.zeros(1, depth.numpy)).dtype == depth.dtype
    assert mat.type_code(np.uint8, 4) == mat.CV_8UC4
    assert mat.type_code(mat.CV_8UC3, 4) == mat.CV_8UC4
    with pytest.raises(TypeError, match=r"NumPy has no dtype for CV_16BFC1: convertTo\(CV_32F\)"):
        mat.numpy_dtype(mat.CV_16BF)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: mat.CV_MAKETYPE(13, 1), "13 is not a depth"),
        (lambda: mat.CV_8UC(0), "1 to 512 channels, got 0"),
        (lambda: mat.CV_8UC(513), "1 to 512 channels, got 513"),
        (lambda: mat.typeToString(31), "31 is not the code of a type"),
        (lambda: mat.type_code(mat.CV_8U, opencv=3), "4 or 5, got 3"),
    ],
)
def test_numbers_that_are_no_types(wrong: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrong()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        (torch.complex64, "no depth has the dtype torch.complex64"),
        (np.longdouble, r"no depth has NumPy's dtype float128: .*astype\('float32'\)"),
        (np.dtype(">f4"), r"this machine's byte order: .* array.astype\(array.dtype.newbyteorder\('='\)\)"),
        ("a dtype", "expected a type, or a dtype of torch or NumPy, got 'a dtype'"),
    ],
)
def test_dtypes_that_no_depth_holds(dtype: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        mat.type_code(dtype)  # type: ignore[arg-type]
