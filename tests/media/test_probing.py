"""`probe` and `rooftop media probe`: the contents of a file, and one line for files that are not videos."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from PIL import Image

from rooftop.cli.main import main
from rooftop.errors import InputError
from rooftop.media import VideoReader, VideoWriter, probe

pytest.importorskip("av")
MakeVideo = Callable[..., Path]


def test_what_is_said_of_a_video(make_video: MakeVideo) -> None:
    path = make_video("probed.mp4", options={"bf": "2", "g": "8", "sc_threshold": "0"}, degrees=90)
    info = probe(path)
    assert (info.codec, info.pixel_format, info.bits) == ("h264", "yuv420p", 8)
    assert (info.height, info.width, info.coded_height, info.coded_width) == (48, 32, 32, 48)
    assert (info.rotation_degrees, info.mirrored) == (90, False)
    assert (info.frames, info.key_frames, info.longest_gop) == (30, 4, 8)
    assert (info.fps, info.start_s, info.duration_s) == (25.0, 0.0, pytest.approx(1.2))
    assert (info.variable_frame_rate, info.seekable, info.damage, info.audio) == (False, True, None, ())
    assert info.colours is not None
    assert info.colours.assumed == ("matrix", "range")
    assert info.size_bytes == path.stat().st_size
    uneven = make_video("probed-uneven.mkv", frames=5, ticks=[0, 10, 300, 310, 900], tick=Fraction(1, 1000))
    assert probe(uneven).variable_frame_rate


def test_the_rate_of_raw_dv(tmp_path: Path) -> None:
    """FFmpeg states the rate of the clock, 60,000 ticks a second, as the average rate of raw DV."""
    path = tmp_path / "raw.dv"
    with VideoWriter(path, 25, "dvvideo", pixel_format="yuv420p") as writer:
        writer.write(torch.rand(3, 3, 576, 720))
    info = probe(path)
    assert info.fps == VideoReader(path).fps == 25
    assert info.duration_s == pytest.approx(0.12)


def test_motion_jpeg_of_larger_pictures_is_a_video(tmp_path: Path) -> None:
    """FFmpeg takes a file of JPEG pictures for one picture if it sees only the first when it guesses the format."""
    content = io.BytesIO()
    Image.effect_noise((640, 480), 100).convert("RGB").save(content, "jpeg")
    path = tmp_path / "raw.mjpeg"
    path.write_bytes(content.getvalue() * 3)
    info = probe(path)
    assert (info.container, info.frames) == ("mjpeg", 3)
    assert len(list(VideoReader(path))) == 3
    with pytest.raises(InputError, match="is not a video that FFmpeg can read"):
        VideoReader(content.getvalue())


def test_the_command(make_video: MakeVideo, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = make_video("probed.mp4", options={"bf": "2", "g": "8", "sc_threshold": "0"}, degrees=90)
    assert main(["media", "probe", str(path)]) == 0
    out = capsys.readouterr().out
    assert "32 x 48, stored 48 x 32" in out
    assert "bt601 (assumed), limited range (assumed)" in out
    assert "30, 4 of them key frames; reading one frame decodes at most 8" in out
    assert main(["media", "probe", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["frames"] == 30
    (tmp_path / "words.mp4").write_text("words " * 99)
    assert main(["media", "probe", str(tmp_path / "words.mp4")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "is not a video that FFmpeg can read" in error
