"""Compiled loops agree with PyTorch: exactly at the size of the video, and up to rounding where they interpolate."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftop.media import VideoReader, frame_tensors
from rooftop.media.colours import WEIGHTS, Colours, yuv_to_rgb

pytest.importorskip("numba")
from rooftop.media.plane_loops import Plane, planes_to_rgb
from rooftop.media.resizing import resized, taps

SAMPLING = [(2, 2), (1, 2), (1, 1), (1, 4), (2, 1)]


def random_planes(height: int, width: int, down: int, across: int, bits: int, seed: int) -> list[np.ndarray]:
    """Rows followed by data that must not be read as pixels."""
    rng = np.random.default_rng(seed)
    small = (-(-height // down), -(-width // across))
    dtype = np.uint8 if bits == 8 else np.uint16
    return [rng.integers(0, 1 << bits, (h, w + 7), dtype=dtype) for h, w in ((height, width), small, small)]


def plane(rows: np.ndarray) -> Plane:
    height, step = rows.shape
    return Plane(rows.reshape(-1), step, height, step - 7)


def tensors(rows: list[np.ndarray]) -> list[torch.Tensor]:
    return [torch.from_numpy(each[:, :-7].astype(np.int32)) for each in rows]


sizes = st.tuples(st.integers(1, 23), st.integers(1, 40))


@settings(max_examples=120, deadline=None)
@given(
    size=sizes,
    sampling=st.sampled_from(SAMPLING),
    bits=st.sampled_from([8, 10, 12]),
    matrix=st.sampled_from(sorted(WEIGHTS)),
    full=st.booleans(),
    seed=st.integers(0, 99),
)
def test_colours_bit_for_bit(
    size: tuple[int, int], sampling: tuple[int, int], bits: int, matrix: str, full: bool, seed: int
) -> None:
    rows = random_planes(*size, *sampling, bits, seed)
    y, u, v = map(plane, rows)
    colours = Colours(matrix, full)
    for dtype in (torch.uint8, torch.float32):
        assert torch.equal(
            planes_to_rgb(y, u, v, colours, bits, dtype), yuv_to_rgb(*tensors(rows), colours, bits, dtype)
        )


@settings(max_examples=120, deadline=None)
@given(
    size=sizes,
    wanted=st.tuples(st.integers(1, 50), st.integers(2, 50)),
    sampling=st.sampled_from(SAMPLING),
    bits=st.sampled_from([8, 10]),
    seed=st.integers(0, 99),
)
def test_resized_as_torch_interpolates(
    size: tuple[int, int], wanted: tuple[int, int], sampling: tuple[int, int], bits: int, seed: int
) -> None:
    """Each direction may be enlarged or reduced. PyTorch is wrong about pictures of one column, so the test has no such
    pictures."""
    rows = random_planes(size[0], size[1] + 1, *sampling, bits, seed)
    y, u, v = map(plane, rows)
    colours = Colours("bt709", False)
    frame = yuv_to_rgb(*tensors(rows), colours, bits, torch.float32)
    expected = torch.nn.functional.interpolate(frame[None].double(), wanted, mode="bilinear", antialias=True)[0]
    found = planes_to_rgb(y, u, v, colours, bits, torch.float32, wanted)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)
    rounded = planes_to_rgb(y, u, v, colours, bits, torch.uint8, wanted)
    assert float((rounded - expected * 255).abs().max()) <= 0.501
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)
    normal = planes_to_rgb(y, u, v, colours, bits, torch.float32, wanted, (mean, std))
    expected = (expected - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    torch.testing.assert_close(normal.double(), expected, rtol=0, atol=1e-4)


def test_threads_share_a_frame_without_a_seam() -> None:
    rows = random_planes(1080, 1920, 2, 2, 8, 1)
    y, u, v = map(plane, rows)
    colours = Colours("bt709", False)
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append([planes_to_rgb(y, u, v, colours, 8, torch.uint8, size) for size in (None, (227, 301))])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_memory_that_is_too_short_is_not_read_beyond() -> None:
    y, u, v = map(plane, random_planes(8, 8, 2, 2, 8, 1))
    short = Plane(v.memory[: 3 * v.step + 3], v.step, 4, 4)
    with pytest.raises(ValueError, match="a plane of 4 x 4 has memory for only 36 samples"):
        planes_to_rgb(y, u, short, Colours("bt709", False), 8, torch.uint8)


def test_weights_sum_up_to_one() -> None:
    for pixels, results in ((1, 1), (1, 9), (9, 1), (1080, 224), (224, 1080), (7, 7)):
        first, end, weights = taps(pixels, results)
        np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-6)
        assert (first >= 0).all()
        assert (end <= pixels).all()
        assert (np.diff(first) >= 0).all()
        assert (np.diff(end) >= 0).all()


@pytest.mark.parametrize(
    ("size", "wanted"), [((5, 2), (3, 1)), ((1, 1), (4, 3)), ((7, 100), (1, 1)), ((40, 30), (7, 5))]
)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
def test_resized_by_torch_too_and_in_one_column(
    size: tuple[int, int], wanted: tuple[int, int], dtype: torch.dtype
) -> None:
    """Each result is a weighted mean of pixels, with the weights written out here."""
    x = torch.rand(3, *size, dtype=torch.float64) * 255
    x = x.round().to(dtype) if dtype == torch.uint8 else x.to(dtype)
    expected = x.double().numpy()
    for axis, (pixels, results) in enumerate(zip(size, wanted, strict=True), 1):
        by = pixels / results
        rows = []
        for n in range(results):
            weights = [max(0.0, 1 - abs(i + 0.5 - (n + 0.5) * by) / max(by, 1)) for i in range(pixels)]
            rows.append(np.array(weights) / sum(weights))
        expected = np.moveaxis(np.tensordot(np.array(rows), expected, (1, axis)), 0, axis)
    found = resized(x, wanted)
    assert found.dtype == dtype
    assert np.abs(found.double().numpy() - expected).max() <= (0.5001 if dtype == torch.uint8 else 1e-3)


def test_without_numba_torch_does_the_same(monkeypatch: pytest.MonkeyPatch, any_video: object) -> None:
    mean_std = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    forms = [{}, {"dtype": torch.float32, "resize": (20, 30), "normalize": mean_std}, {"dtype": torch.float16}]
    by_loops = [VideoReader(any_video, **form)[3] for form in forms]  # type: ignore[arg-type]
    monkeypatch.setattr(frame_tensors, "numba_works", lambda: False)
    by_torch = [VideoReader(any_video, **form)[3] for form in forms]  # type: ignore[arg-type]
    assert torch.equal(by_loops[0], by_torch[0])
    torch.testing.assert_close(by_loops[1], by_torch[1], rtol=0, atol=1e-4)
    assert torch.equal(by_loops[2], by_torch[2])
