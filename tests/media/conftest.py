"""Videos created with PyAV for the tests. Each frame shows its number, which can be read back from the pixels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

if find_spec("av") is not None:
    import av
else:  # skipping here would end the whole session if this folder is one of several arguments
    collect_ignore_glob = ["test_*.py"]


def pytest_report_header() -> str | None:
    return None if find_spec("av") is not None else "tests/media is left out: PyAV is missing (pip install av)"


BITS = 6
MakeVideo = Callable[..., Path]


def picture(number: int, height: int, width: int) -> np.ndarray:
    """(H, W, 3) uint8: the number as black and white columns above, a moving ramp below."""
    image = np.empty((height, width, 3), dtype=np.uint8)
    image[:] = ((np.arange(width) * 2 + 5 * number) % 256)[None, :, None]
    column = width // BITS
    for bit in range(BITS):
        image[: height // 2, bit * column : (bit + 1) * column] = 255 * (number >> bit & 1)
    return image


def number_of(frame: Tensor) -> int:
    """The number of a frame (3, H, W) of `picture`."""
    height, width = frame.shape[1:]
    column, row = width // BITS, height // 4
    middles = [frame[1, row, bit * column + column // 2] for bit in range(BITS)]
    return sum(1 << bit for bit, value in enumerate(middles) if value > (127 if not frame.is_floating_point() else 0.5))


def write_video(
    path: Path,
    codec: str,
    *,
    frames: int = 30,
    height: int = 32,
    width: int = 48,
    pixel_format: str = "yuv420p",
    options: dict[str, str] | None = None,
    ticks: Sequence[int] | None = None,
    tick: Fraction = Fraction(1, 25),
    degrees: int = 0,
) -> Path:
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=25, options=options or {})
        stream.height, stream.width, stream.pix_fmt = height, width, pixel_format
        stream.codec_context.time_base = tick
        if degrees:
            stream.set_display_rotation(degrees)
        for number in range(frames):
            frame = av.VideoFrame.from_ndarray(picture(number, height, width)).reformat(format=pixel_format)
            frame.pts, frame.time_base = ticks[number] if ticks else number, tick
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


@pytest.fixture(scope="session")
def make_video(tmp_path_factory: pytest.TempPathFactory) -> MakeVideo:
    """`write_video` by a name. Each video is created once in a session; the same name with other settings is another
    video."""
    made: dict[str, Path] = {}

    def make(name: str, codec: str = "libx264", **settings: object) -> Path:
        key = repr((name, codec, sorted(settings.items())))
        if key not in made:
            path = tmp_path_factory.mktemp("video") / name
            made[key] = write_video(path, codec, **settings)  # type: ignore[arg-type]
        return made[key]

    return make


@pytest.fixture(scope="session")
def make_picture() -> Callable[[int, int, int], np.ndarray]:
    return picture


@pytest.fixture(scope="session")
def read_number() -> Callable[[Tensor], int]:
    return number_of


H264 = {"bf": "3", "g": "8", "preset": "fast"}
UNEVEN = [number * 40 + (number * number * 7) % 31 for number in range(30)]  # in units of 1/1000 s

KINDS: dict[str, tuple[str, dict[str, object]]] = {
    "b-frames.mp4": ("libx264", {"options": H264}),
    "b-frames.mkv": ("libx264", {"options": H264}),
    "b-frames.ts": ("libx264", {"options": H264}),
    "b-frames.avi": ("mpeg4", {"options": {"bf": "2", "g": "8"}}),
    "b-frames.wmv": ("libx264", {"options": H264}),
    "b-frames.mxf": ("libx264", {"options": H264}),
    "raw.h264": ("libx264", {"options": H264}),
    "variable.mp4": ("libx264", {"options": H264, "ticks": UNEVEN, "tick": Fraction(1, 1000)}),
    "open-gop.mkv": ("libx264", {"options": {**H264, "x264-params": "open-gop=1:scenecut=0:keyint=8:min-keyint=8"}}),
    "refresh.mkv": ("libx264", {"options": {"g": "8", "bf": "0", "x264-params": "intra-refresh=1"}}),
    "mpeg4.mp4": ("mpeg4", {"options": {"bf": "2", "g": "8"}}),
    "odd.webm": ("libvpx-vp9", {"height": 33, "width": 49, "options": {"g": "8", "lag-in-frames": "10"}}),
    "vp8.webm": ("libvpx", {"options": {"g": "8", "auto-alt-ref": "1", "lag-in-frames": "10"}}),
    "ten-bit.mp4": ("libx264", {"pixel_format": "yuv420p10le", "options": H264}),
    # x265 writes beyond its memory where pictures are narrower than 64.
    "hevc.mp4": ("libx265", {"width": 96, "options": {"g": "8", "x265-params": "log-level=none:open-gop=1"}}),
    "pictures.avi": ("mjpeg", {"pixel_format": "yuvj420p"}),
}


@pytest.fixture(scope="session", params=KINDS)
def any_video(request: pytest.FixtureRequest, make_video: MakeVideo) -> Path:
    """One video of each kind, with 30 numbered frames."""
    codec, settings = KINDS[request.param]
    return make_video(request.param, codec, **settings)
