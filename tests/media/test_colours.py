"""Colours follow the formula of the standards, whatever the matrix, the range, the depth, the sampling and the size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftop.errors import InputError
from rooftop.media import VideoReader
from rooftop.media.colours import CODES, WEIGHTS, Colours, rgb_to_yuv, usual_matrix, yuv_to_rgb
from rooftop.media.forms import form_of
from rooftop.media.frame_tensors import to_tensor

av = pytest.importorskip("av")

SWSCALE = {"bt601": 5, "bt709": 1, "bt2020": 9}
matrices = st.sampled_from(sorted(SWSCALE))
SAMPLING = {"yuv420p": (2, 2), "yuv422p": (1, 2), "yuv444p": (1, 1), "yuv411p": (1, 4)}


def by_the_standard(y: np.ndarray, u: np.ndarray, v: np.ndarray, matrix: str, full: bool, bits: int) -> np.ndarray:
    """(3, H, W) float64 in 0..255, by solving the definition of Y, Cb and Cr for R, G and B. Planes of one size."""
    kr, kb = WEIGHTS[matrix]
    unit = 2 ** (bits - 8)
    luma = y / (2**bits - 1) if full else (y - 16.0 * unit) / (219 * unit)
    chroma = (2**bits - 1) if full else 224 * unit
    definition = np.array(
        [
            [kr, 1 - kr - kb, kb],
            [-kr / (2 * (1 - kb)), -(1 - kr - kb) / (2 * (1 - kb)), 0.5],
            [0.5, -(1 - kr - kb) / (2 * (1 - kr)), -kb / (2 * (1 - kr))],
        ]
    )
    values = np.stack([luma, (u - 128.0 * unit) / chroma, (v - 128.0 * unit) / chroma])
    return np.clip(np.tensordot(np.linalg.inv(definition), values, 1), 0, 1) * 255


def frame_of(planes: list[np.ndarray], pixel_format: str) -> object:
    height, width = planes[0].shape
    frame = av.VideoFrame(width, height, pixel_format)
    for plane, data in zip(frame.planes, planes, strict=True):
        rows = np.zeros((plane.height, plane.line_size), np.uint8)
        raw = np.ascontiguousarray(data).view(np.uint8).reshape(plane.height, -1)
        rows[:, : raw.shape[1]] = raw
        plane.update(rows.tobytes())
    return frame


def random_planes(height: int, width: int, sampling: str, bits: int, seed: int) -> list[np.ndarray]:
    down, across = SAMPLING[sampling]
    rng = np.random.default_rng(seed)
    small = (-(-height // down), -(-width // across))
    dtype = np.uint8 if bits == 8 else np.uint16
    return [rng.integers(0, 1 << bits, size, dtype=dtype) for size in ((height, width), small, small)]


def spread(plane: np.ndarray, height: int, width: int, sampling: str) -> np.ndarray:
    down, across = SAMPLING[sampling]
    return plane.repeat(down, 0).repeat(across, 1)[:height, :width].astype(np.float64)


@settings(max_examples=60, deadline=None)
@given(
    height=st.integers(1, 19),
    width=st.integers(1, 19),
    sampling=st.sampled_from(sorted(SAMPLING)),
    matrix=st.sampled_from(sorted(WEIGHTS)),
    full=st.booleans(),
    bits=st.sampled_from([8, 10, 12]),
    seed=st.integers(0, 99),
)
def test_any_planes_are_the_colours_of_the_standard(
    height: int, width: int, sampling: str, matrix: str, full: bool, bits: int, seed: int
) -> None:
    planes = random_planes(height, width, sampling, bits, seed)
    y, u, v = (spread(each, height, width, s) for each, s in zip(planes, ("yuv444p", sampling, sampling), strict=True))
    expected = by_the_standard(y, u, v, matrix, full, bits)
    tensors = [torch.from_numpy(each.astype(np.int32)) for each in planes]
    colours = Colours(matrix, full)
    rounded = yuv_to_rgb(*tensors, colours, bits, torch.uint8)
    assert np.abs(rounded.numpy() - expected).max() <= 0.501
    exact = yuv_to_rgb(*tensors, colours, bits, torch.float32)
    assert np.abs(exact.numpy() * 255 - expected).max() <= 1e-3


@settings(max_examples=20, deadline=None)
@given(
    pixel_format=st.sampled_from(["yuv420p", "yuv422p", "yuv444p", "nv12", "yuv420p10le", "yuv444p10le"]),
    matrix=matrices,
    full=st.booleans(),
    seed=st.integers(0, 99),
)
def test_frames_are_what_swscale_says_where_it_is_exact(pixel_format: str, matrix: str, full: bool, seed: int) -> None:
    """For even sizes, nearest chroma and accurate rounding, swscale is within 1.2 of the standard."""
    bits = 10 if "10" in pixel_format else 8
    sampling = pixel_format.removesuffix("10le").replace("nv12", "yuv420p")
    planes = [each.clip(64 << bits - 8, 180 << bits - 8) for each in random_planes(16, 24, sampling, bits, seed)]
    frame = frame_of(planes, sampling + ("10le" if bits == 10 else ""))
    flags = av.video.reformatter.Interpolation
    swscale = frame.reformat(  # type: ignore[attr-defined]
        format="gbrp",
        src_colorspace=SWSCALE[matrix],
        dst_colorspace=1,
        src_color_range=2 if full else 1,
        dst_color_range=2,
        interpolation=flags.POINT | flags.ACCURATE_RND,
    ).to_ndarray()
    if pixel_format == "nv12":
        frame = frame.reformat(format="nv12")  # type: ignore[attr-defined]
    frame.colorspace, frame.color_range = CODES[matrix], 2 if full else 1  # type: ignore[attr-defined]
    ours = to_tensor(frame, form_of("rgb", torch.uint8, None, None)).permute(1, 2, 0).numpy()  # type: ignore[arg-type]
    assert np.abs(ours.astype(int) - swscale).max() <= 2


@pytest.mark.parametrize("matrix", sorted(SWSCALE))
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("bits", [8, 10])
def test_colours_of_files_are_honoured(tmp_path: Path, matrix: str, full: bool, bits: int) -> None:
    """Lossless H.264 that declares its matrix and range returns the written colours within 2 of 255, also with 10
    bits."""
    rgb = torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    name = "yuv444p" if bits == 8 else "yuv444p10le"
    dtype = torch.uint8 if bits == 8 else torch.int32
    planes = rgb_to_yuv(rgb, Colours(matrix, full), bits, 1, 1, dtype)
    frame = frame_of([each.numpy().astype(np.uint8 if bits == 8 else "<u2") for each in planes], name)
    frame.colorspace, frame.color_range = CODES[matrix], 2 if full else 1  # type: ignore[attr-defined]
    path = tmp_path / "colours.mkv"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=25, options={"qp": "0"})
        stream.height = stream.width = 32
        stream.pix_fmt = name
        stream.codec_context.colorspace, stream.codec_context.color_range = CODES[matrix], 2 if full else 1
        frame.pts = 0  # type: ignore[attr-defined]
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    reader = VideoReader(path)
    assert reader.colours == Colours(matrix, full)
    assert float((reader[0] - rgb * 255).abs().max()) <= 2
    finer = float((VideoReader(path, dtype=torch.float32)[0] - rgb).abs().max()) * 255
    assert finer <= (2 if bits == 8 else 0.5)


def test_what_a_file_does_not_say_is_assumed_by_its_size_and_named(tmp_path: Path) -> None:
    path = tmp_path / "unsaid.mkv"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("ffv1", rate=25)
        stream.height, stream.width, stream.pix_fmt = 8, 8, "yuv420p"
        frame = frame_of([np.full(size, 100, np.uint8) for size in ((8, 8), (4, 4), (4, 4))], "yuv420p")
        frame.pts = 0  # type: ignore[attr-defined]
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    assert VideoReader(path).colours == Colours("bt601", False, ("matrix", "range"))
    assert [usual_matrix(*size) for size in ((576, 720), (720, 1280), (1080, 1920))] == ["bt601", "bt709", "bt709"]


def test_a_matrix_that_is_none_is_refused() -> None:
    frame = frame_of([np.zeros((4, 4), np.uint8)] * 3, "yuv444p")
    frame.colorspace = 8  # type: ignore[attr-defined]  # YCgCo
    with pytest.raises(InputError, match=r"colour matrix 8 of ITU-T H\.273 is not supported"):
        to_tensor(frame, form_of("rgb", torch.uint8, None, None))  # type: ignore[arg-type]


@pytest.mark.parametrize("pixel_format", ["rgb24", "bgr24", "gbrp", "rgba", "gray", "gbrp10le"])
@pytest.mark.parametrize("width", [8, 11])
def test_pixels_that_are_red_green_and_blue_already(pixel_format: str, width: int) -> None:
    grey = pixel_format == "gray"
    image = np.random.default_rng(0).integers(0, 256, (6, width, 1 if grey else 3), dtype=np.uint8)
    image = np.broadcast_to(image, (6, width, 3)).copy()
    frame = av.VideoFrame.from_ndarray(image, "rgb24").reformat(format=pixel_format, dst_color_range=2)
    frame.color_range = 2
    for dtype, slack in ((torch.uint8, 1), (torch.float32, 1)):
        tensor = to_tensor(frame, form_of("rgb", dtype, None, None)).double() * (1 if dtype == torch.uint8 else 255)
        assert float((tensor - torch.from_numpy(image).permute(2, 0, 1)).abs().max()) <= slack


@settings(max_examples=20, deadline=None)
@given(
    matrix=st.sampled_from(sorted(WEIGHTS)), full=st.booleans(), down=st.sampled_from([1, 2]), seed=st.integers(0, 9)
)
def test_back_and_forth(matrix: str, full: bool, down: int, seed: int) -> None:
    """If pixels that share chroma have the same colour, only rounding errors remain."""
    rgb = torch.rand(3, 6, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rgb = rgb.repeat_interleave(2, 1).repeat_interleave(2, 2)
    planes = rgb_to_yuv(rgb, Colours(matrix, full), 10, down, 2, torch.int32)
    back = yuv_to_rgb(*planes, Colours(matrix, full), 10, torch.float64)
    assert float((back - rgb).abs().max()) < 2 / 1023


@pytest.mark.parametrize(
    ("pixel_format", "size"),
    [("bayer_rggb8", (5, 4)), ("bayer_gbrg16le", (4, 7)), ("bayer_bggr8", (2, 2)), ("yaf32le", (8, 8))],
)
def test_what_would_end_the_process_is_an_error(pixel_format: str, size: tuple[int, int]) -> None:
    if pixel_format not in av.video.format.names:
        pytest.skip("this FFmpeg has no such format")
    frame = av.VideoFrame(*size, pixel_format)
    with pytest.raises(InputError, match=f"pixels of format {pixel_format} in {size[0]} x {size[1]} are not supported"):
        to_tensor(frame, form_of("rgb", torch.uint8, None, None))


@pytest.mark.parametrize("pixel_format", ["yuv444p10msble", "gray32le", "rgb96le", "bgr4"])
def test_formats_are_right_or_named(pixel_format: str) -> None:
    """White is white, or an error names the format."""
    if pixel_format not in av.video.format.names:
        pytest.skip("this FFmpeg has no such format")
    frame = av.VideoFrame(16, 8, pixel_format)
    for plane in frame.planes:
        plane.update(b"\0" * plane.buffer_size)
    try:
        pixels = to_tensor(frame, form_of("rgb", torch.uint8, None, None))
    except InputError as error:
        assert f"pixels of format {pixel_format}" in str(error)  # noqa: PT017
    else:
        assert pixels.shape == (3, 8, 16)
        assert int(pixels[0].max()) <= 2  # all bits are 0, so there is no red
