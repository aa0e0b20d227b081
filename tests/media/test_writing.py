"""`VideoWriter`: written files can be read again, and no incomplete file is left behind."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rooftop.errors import InputError
from rooftop.media import VideoReader, VideoWriteError, VideoWriter, probe, read_sound
from rooftop.user_paths import user_path

av = pytest.importorskip("av")


def smooth(frames: int = 5, height: int = 16, width: int = 24) -> torch.Tensor:
    """(T, 3, H, W) float32: noise in blocks of 4 pixels, so that halved chroma loses nothing."""
    noise = torch.rand(frames, 3, height // 4, width // 4, generator=torch.Generator().manual_seed(0))
    return noise.repeat_interleave(4, 2).repeat_interleave(4, 3)


LOSSLESS = {
    "libx264": {"qp": "0"},
    "libx265": {"x265-params": "lossless=1:log-level=none"},
    "libvpx-vp9": {"lossless": "1"},
    "ffv1": {},
}


@pytest.mark.parametrize("codec", LOSSLESS)
@pytest.mark.parametrize("matrix", [None, "bt709", "bt2020"])
def test_colours_come_back(tmp_path: Path, codec: str, matrix: str | None) -> None:
    frames = smooth(height=32, width=96)
    path = tmp_path / "out.mkv"
    with VideoWriter(path, 25, codec, options=LOSSLESS[codec], matrix=matrix, pixel_format="yuv420p") as writer:
        writer.write(frames[0])
        writer.write((frames[1:] * 255).round().to(torch.uint8))
    reader = VideoReader(path)
    assert reader.colours.matrix == (matrix or "bt601")
    assert float((reader[:].float() - frames * 255).abs().max()) <= 3
    assert list(tmp_path.iterdir()) == [path]


def test_ten_bits_keep_more_of_floating_frames(tmp_path: Path) -> None:
    frames = smooth()
    errors = []
    for name in ("yuv444p", "yuv444p10le"):
        path = tmp_path / f"{name}.mkv"
        with VideoWriter(path, 25, options={"qp": "0"}, pixel_format=name, full_range=True) as writer:
            writer.write(frames)
        errors.append(float((VideoReader(path, dtype=torch.float32)[:] - frames).abs().max()))
    assert errors[1] < errors[0] / 3


def test_times_and_rates(tmp_path: Path) -> None:
    times = [0.0, 0.1, 0.15, 1.0, 1.001]
    with VideoWriter(tmp_path / "times.mp4", 30) as writer:
        writer.write(smooth()[:3], times=times[:3])
        writer.write(smooth()[3:], times=torch.tensor(times[3:], dtype=torch.float64))
    assert VideoReader(tmp_path / "times.mp4").times.tolist() == pytest.approx(times, abs=1e-4)
    with VideoWriter(tmp_path / "ntsc.mp4", 30000 / 1001) as writer:
        writer.write(smooth())
    assert VideoReader(tmp_path / "ntsc.mp4").fps == pytest.approx(30000 / 1001, rel=1e-6)
    for wrong in ([0.2, 0.1], [0.5, 0.5], [-1.0, 0.0], [float("nan"), 1.0]):
        with VideoWriter(tmp_path / "wrong.mp4", 30) as writer:
            with pytest.raises(InputError, match=r"expected times that increase|finite and 0 or more"):
                writer.write(smooth()[:2], times=wrong)
            writer.write(smooth())


def test_an_odd_size_is_refused_with_the_remedies_or_padded(tmp_path: Path) -> None:
    frames = smooth()[..., :15, :21]
    with (
        pytest.raises(InputError, match=r"yuv420p needs a multiple of 2x2.*pad=True"),
        VideoWriter(tmp_path / "odd.mp4", 25) as writer,
    ):
        writer.write(frames)
    with VideoWriter(tmp_path / "padded.mkv", 25, pad=True, options={"qp": "0"}) as writer:
        writer.write(frames)
    padded = VideoReader(tmp_path / "padded.mkv")[:]
    assert padded.shape[-2:] == (16, 22)
    assert float((padded[..., :15, :21].float() - frames * 255).abs().max()) <= 3
    assert float((padded[..., 15, :].int() - padded[..., 14, :].int()).abs().max()) <= 1
    with VideoWriter(tmp_path / "odd.mkv", 25, pixel_format="yuv444p", options={"qp": "0"}) as writer:
        writer.write(frames)
    assert VideoReader(tmp_path / "odd.mkv")[0].shape == (3, 15, 21)


def test_pictures_too_narrow_for_x265_are_refused(tmp_path: Path) -> None:
    """x265 would write beyond its memory, and the process would die some time later."""
    with (
        pytest.raises(InputError, match="libx265 needs a width of 64 or more"),
        VideoWriter(tmp_path / "narrow.mp4", 25, "libx265") as writer,
    ):
        writer.write(smooth(height=64, width=60))


class Untimed:
    """A stream of x265, whose decoding times are those of uninitialized memory if a video has one or two frames."""

    def __init__(self, stream: Any, dts: int) -> None:
        self._stream, self._dts = stream, dts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def encode(self, frame: Any) -> Any:
        packets = self._stream.encode(frame)
        for number, packet in enumerate(packets):
            packet.dts = self._dts + number
        return packets


@pytest.mark.parametrize("suffix", [".mp4", ".mov", ".mkv"])
@pytest.mark.parametrize("frames", [1, 2])
@pytest.mark.parametrize("dts", [2048, -274877907008, -5135868584551137600])
def test_few_frames_by_x265(
    tmp_path: Path, suffix: str, frames: int, dts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = VideoWriter._add_video

    def add_untimed(writer: VideoWriter) -> Any:
        stream = add(writer)
        if not isinstance(stream, Untimed):
            writer._stream = Untimed(stream, dts)  # type: ignore[assignment]
        return stream

    monkeypatch.setattr(VideoWriter, "_add_video", add_untimed)
    path = tmp_path / f"few{suffix}"
    with VideoWriter(path, 25, "libx265") as writer:
        writer.write(smooth(frames, height=64, width=64))
    reader = VideoReader(path)
    assert reader.times.tolist() == pytest.approx([0.0, 0.04][:frames], abs=1e-3)
    assert probe(path).duration_s == pytest.approx(0.04 * frames, abs=1e-3)


def test_an_error_leaves_no_file_and_an_older_one_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "out.mp4"
    path.write_bytes(b"older")
    writer = VideoWriter(path, 25)
    writer.write(smooth())
    writer.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    with pytest.raises(VideoWriteError, match="no frames were written"), VideoWriter(path, 25):
        pass
    with (
        pytest.raises(VideoWriteError, match=r"libx264 with yuv420p and options .*says"),
        VideoWriter(path, 25, options={"preset": "abacus"}) as writer,
    ):
        writer.write(smooth())
    dropped = VideoWriter(path, 25)
    dropped.write(smooth())
    del dropped
    assert path.read_bytes() == b"older"
    assert list(tmp_path.iterdir()) == [path]
    with VideoWriter(path, 25) as writer:
        writer.write(smooth())
        assert path.read_bytes() == b"older"
    assert len(VideoReader(path)) == 5
    with pytest.raises(VideoWriteError, match="closed already"):
        writer.write(smooth())


@pytest.mark.parametrize(
    ("name", "codec", "frames", "said"),
    [
        ("a.ts", "ffv1", 5, r'a .ts file with ffv1 cannot be read: .*codec="mpeg2video", which suits'),
        ("a.ts", "libvpx-vp9", 5, "suffix .mkv, which suits most codecs"),
        ("a.mov", "rawvideo", 5, 'codec="h264"'),
        ("a.mpg", "gif", 5, 'codec="mpeg1video"'),
        ("a.yuv", "rawvideo", 5, "Use the suffix .mkv"),
        ("a.apng", "apng", 1, "an animation needs two frames"),
        ("a.png", "mpeg1video", 1, 'codec="png"'),
        ("a.png", "png", 2, "2 frames for .*holds one picture"),
        ("a.m3u8", "libx264", 5, "only lists other files"),
    ],
)
def test_a_file_that_nothing_reads_is_an_error(tmp_path: Path, name: str, codec: str, frames: int, said: str) -> None:
    with pytest.raises((VideoWriteError, InputError), match=said), VideoWriter(tmp_path / name, 25, codec) as writer:
        writer.write(smooth(frames))
    assert list(tmp_path.iterdir()) == []


def test_names_that_ffmpeg_would_read_as_more_than_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a:b").mkdir()
    for name in ("2024-05-01T12:30.mp4", "a:b/out.mp4", "http:x.mp4", "o%d.mp4", "n" * 244 + ".mp4"):
        with VideoWriter(name, 25) as writer:
            writer.write(smooth())
        assert len(VideoReader(name)) == 5
    with VideoWriter("o%d.png", 25, "png") as writer:
        writer.write(smooth(1))
    assert (tmp_path / "o%d.png").read_bytes().startswith(b"\x89PNG")
    for name in ("a." + "x" * 250, "n" * 300 + ".mp4"):
        with pytest.raises(InputError, match=r"no format with this suffix|File name too long"):
            VideoWriter(name, 25)
        with pytest.raises(InputError, match="does not exist"):
            VideoReader(name)
    assert len(list(tmp_path.iterdir())) == 6


@pytest.mark.parametrize("suffix", [".avi", ".mkv", ".mov", ".mjpeg"])
def test_motion_jpeg_has_full_range(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"out{suffix}"
    with VideoWriter(path, 25, "mjpeg", options={"q:v": "2"}) as writer:
        writer.write(smooth())
    assert writer.full_range
    assert VideoReader(path).colours.full_range
    assert float((VideoReader(path)[0].float() / 255 - smooth()[0]).abs().mean()) < 0.02


@pytest.mark.parametrize(("code", "said"), [(errno.ENOSPC, "the disk is full"), (errno.EIO, "Input/output error")])
def test_an_error_of_the_disk_names_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, said: str
) -> None:
    def refuse(writer: VideoWriter, frame: object) -> None:
        av.error.err_check(-code)

    monkeypatch.setattr(VideoWriter, "_encode", refuse)
    path = tmp_path / "out.mp4"
    with pytest.raises(VideoWriteError, match=said) as raised, VideoWriter(path, 25) as writer:
        writer.write(smooth())
    assert str(tmp_path) in str(raised.value)
    assert "codec" not in str(raised.value)


def test_a_frame_rate_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    for wrong in ("25", None, -1, float("nan"), 1e-9):
        with pytest.raises(InputError, match="expected a number above 0"):
            VideoWriter(tmp_path / "out.mp4", wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="32-bit integers, so expected a lower fps"):
        VideoWriter(tmp_path / "out.mp4", 1e300)
    for suffix, codec, fps in ((".avi", "mpeg4", 5000), (".mkv", "libx264", 1001), (".webm", "libvpx", 1200)):
        with pytest.raises(InputError, match="at most 1000 frames a second"):
            VideoWriter(tmp_path / f"out{suffix}", fps, codec)
    with VideoWriter(tmp_path / "out.avi", 1000, "mpeg4") as writer:
        writer.write(smooth())
    assert VideoReader(tmp_path / "out.avi").times.tolist() == pytest.approx([0.0, 0.001, 0.002, 0.003, 0.004])
    assert [path.name for path in tmp_path.iterdir()] == ["out.avi"]


def test_numbers_as_users_give_them(tmp_path: Path) -> None:
    """NumPy's numbers are a frame rate, options may be numbers, and samples may come in empty pieces."""
    with VideoWriter(tmp_path / "out.mp4", np.float32(25), options={"crf": 18}) as writer:  # type: ignore[arg-type, dict-item]
        writer.write_sound(torch.zeros(1, 8000), 8000)
        writer.write_sound(torch.zeros(1, 0), 8000)
        writer.write(smooth())
    assert VideoReader(tmp_path / "out.mp4").fps == 25
    with VideoWriter(tmp_path / "no.mp4", 25, bit_rate_bps=10**30) as writer, pytest.raises(VideoWriteError):
        writer.write(smooth())


def test_a_name_that_begins_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell leaves "~name" as it is if there is no such user."""
    monkeypatch.chdir(tmp_path)
    with VideoWriter("~nobody-of-this-name.mp4", 25) as writer:
        writer.write_sound(torch.zeros(1, 8000), 8000)
        writer.write(smooth())
    assert len(VideoReader("~nobody-of-this-name.mp4")) == probe("~nobody-of-this-name.mp4").frames == 5
    assert read_sound("~nobody-of-this-name.mp4").rate_hz == 8000
    with pytest.raises(InputError, match=r"~nobody\.mp4 does not exist"):
        VideoReader("~nobody.mp4")
    assert user_path("~/a.mp4") == Path.home() / "a.mp4"


def test_what_cannot_be_written_is_refused_before(tmp_path: Path) -> None:
    path = tmp_path / "out.mp4"
    for settings, said in (
        ({"codec": "abacus"}, "no encoder 'abacus'.*libx264"),
        ({"codec": "aac"}, "encodes audio"),
        ({"pixel_format": "yuv411p"}, "expected one of yuv420p"),
        ({"fps": 0}, "expected a number above 0"),
        ({"matrix": "abacus"}, "expected one of bt601"),
    ):
        with pytest.raises(InputError, match=said):
            VideoWriter(path, **{"fps": 25, **settings})  # type: ignore[arg-type]
    for where, said in (
        ("out.abacus", "FFmpeg writes no format with this suffix"),
        ("missing/out.mp4", "is not a folder"),
        ("", "a folder"),
        ("/", "a folder"),
    ):
        with pytest.raises(InputError, match=said):
            VideoWriter(tmp_path / where, 25)
    with VideoWriter(path, 25) as writer:
        for frames, said in (
            (torch.zeros(16, 24), r"expected \(3, H, W\) or"),
            (torch.zeros(1, 16, 24), r"expected \(3, H, W\) or"),
            (torch.zeros(3, 16, 24, dtype=torch.int64), "expected uint8, or floating"),
            (torch.zeros(3, 16, 24).to(torch.float8_e4m3fn), "expected uint8, or floating"),
            (torch.full((3, 16, 24), float("nan")), "not finite"),
        ):
            with pytest.raises(InputError, match=said):
                writer.write(frames)
        for times, until, said in (
            (1.0, None, "expected a sequence of seconds"),
            ([1e20], None, "a frame at 1e[+]20 s: expected at most"),
            ([0.0], 1e30, "until=1e[+]30"),
        ):
            with pytest.raises(InputError, match=said):
                writer.write(smooth()[0], times, until)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="samples are ndarray: expected a tensor"):
            writer.write_sound(np.zeros((2, 8), np.float32), 8000)  # type: ignore[arg-type]
        writer.write(smooth())
        with pytest.raises(InputError, match="all frames of a video must have one size"):
            writer.write(torch.zeros(3, 32, 24))
        with pytest.raises(InputError, match="some frames have times"):
            writer.write(smooth()[0], times=[9.0])
    assert probe(path).frames == 5
    assert list(tmp_path.iterdir()) == [path]
