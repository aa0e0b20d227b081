"""Files with a wrong clock, length or counter: index, loop, `len` and times agree, and the fault is reported."""

from __future__ import annotations

import io
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from rooftop.errors import InputError
from rooftop.media import DamagedVideoError, VideoReader, VideoWriter, probe
from rooftop.media.file_ends import declared_end

av = pytest.importorskip("av")

MakeVideo = Callable[..., Path]
Picture = Callable[[int, int, int], np.ndarray]
ReadNumber = Callable[[Tensor], int]

FRAMES, PIECE = 20, 188  # bytes of a transport stream's packet
REORDERED = {"bf": "2", "g": "8"}


def stream(make_video: MakeVideo, begin: int, options: dict[str, str] = REORDERED) -> bytes:
    """A transport stream whose clock begins at the time of this frame."""
    name = f"{begin}-{''.join(options.values())}.ts"
    return make_video(name, frames=FRAMES, options=options, ticks=[begin + n for n in range(FRAMES)]).read_bytes()


def assert_whole(content: bytes, numbers: list[int], number_of: ReadNumber) -> VideoReader:
    """Reading in order and by position gives these pictures, at increasing times."""
    reader = VideoReader(content)
    seen = list(reader.timed())
    assert [number_of(frame.pixels) for frame in seen] == numbers
    assert len(reader) == len(numbers)
    assert reader.times.tolist() == pytest.approx([frame.time for frame in seen])
    assert all(a < b for a, b in pairwise(reader.times.tolist()))
    for position in (len(numbers) - 1, 0, len(numbers) // 2, FRAMES, FRAMES - 1):
        assert number_of(reader[position]) == numbers[position]
    assert reader.index.damage is None
    return reader


@pytest.mark.parametrize(
    "begins", [(99, 99, 99), (99, 109, 129), (300, 99), (99, 119, 139), (99, 119, 500), (400, 99, 440)]
)
def test_streams_that_were_joined_are_whole(
    make_video: MakeVideo, read_number: ReadNumber, begins: tuple[int, ...]
) -> None:
    """Clocks that start again, overlap, go back by 8 s, continue and jump ahead."""
    content = b"".join(stream(make_video, begin) for begin in begins)
    reader = assert_whole(content, list(range(FRAMES)) * len(begins), read_number)
    info = probe(content)
    assert info.damage is None
    assert "files were joined" in (info.discontinuity or "")
    goes_back = any(b < a + FRAMES for a, b in pairwise(begins))
    assert ("the clock goes back" in (info.discontinuity or "")) == goes_back
    assert reader.index.seekable == (not goes_back)


def test_a_whole_stream_has_no_discontinuity(make_video: MakeVideo) -> None:
    assert probe(stream(make_video, 0)).discontinuity is None


@pytest.mark.parametrize("options", [REORDERED, {"bf": "0", "g": "8"}])
@pytest.mark.parametrize("lost", [1, 4])
def test_pieces_that_are_lost_are_damage(
    make_video: MakeVideo, read_number: ReadNumber, options: dict[str, str], lost: int
) -> None:
    content = stream(make_video, 0, options)
    pieces = [content[at : at + PIECE] for at in range(0, len(content), PIECE)]
    whole, broken = list(VideoReader(content)), 0
    for first in range(5, len(pieces) - lost, 3):
        spoilt = b"".join([*pieces[:first], *pieces[first + lost :]])
        reader, seen = VideoReader(spoilt), []
        try:
            for frame in reader:
                seen.append(frame)  # noqa: PERF402 - those before the error
        except DamagedVideoError:
            assert reader.index.damage is not None
        else:
            assert reader.index.damage is None
            assert len(seen) == len(reader)
        if reader.index.discontinuity is None:
            continue  # whole packets are missing, and FFmpeg detects no gap
        # No returned frame depends on a lost frame: all are frames of the file, in order.
        numbers = [read_number(frame) for frame in seen]
        assert numbers == sorted(numbers)
        assert all(torch.equal(whole[number], frame) for number, frame in zip(numbers, seen, strict=True))
        broken += 1
    assert broken > 3


def test_random_mixtures(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`joined_streams.py` checks 30 files here, and more when run by hand."""
    program = Path(__file__).with_name("joined_streams.py")
    monkeypatch.setattr(sys, "argv", [program.name, "--files", "30"])
    monkeypatch.setattr(sys, "path", [*sys.path])  # the program adds its folder
    status = runpy.run_path(str(program))["main"]()
    sys.modules.pop("conftest", None)
    assert (status, capsys.readouterr().out) == (0, "30 files, 0 findings\n")


# ---- lengths -----------------------------------------------------------------------------------------------------


def held_gif(path: Path, make_picture: Picture) -> Path:
    pictures = [Image.fromarray(make_picture(number, 32, 48)) for number in range(5)]
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=[100] * 4 + [3000], loop=0)
    return path


def test_a_file_whose_last_frame_is_held_is_whole(
    tmp_path: Path, make_picture: Picture, read_number: ReadNumber
) -> None:
    """The files are a GIF, its packets in Matroska (where FFmpeg marks no key frames), and files of `VideoWriter`."""
    paths = [held_gif(tmp_path / "a.gif", make_picture)]
    for suffix in ("mkv", "mp4", "avi", "webm"):
        paths.append(tmp_path / f"b.{suffix}")
        codec = {"webm": "libvpx-vp9", "avi": "mpeg4"}.get(suffix, "libx264")
        with VideoWriter(paths[-1], 10, codec) as writer:
            for number in range(5):
                pixels = torch.from_numpy(make_picture(number, 32, 48)).permute(2, 0, 1)
                writer.write(pixels, times=[number / 10], until=3.4 if number == 4 else None)
    if ffmpeg := shutil.which("ffmpeg"):
        paths.append(tmp_path / "a.mkv")
        subprocess.run([ffmpeg, "-v", "error", "-i", str(paths[0]), "-c", "copy", str(paths[-1])], check=True)
    for path in paths:
        reader = VideoReader(path)
        frames = list(reader.timed())
        assert [read_number(frame.pixels) for frame in frames] == list(range(5)), path
        assert [frame.time for frame in frames] == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])
        assert (len(reader), reader.index.damage) == (5, None)
        assert reader.durations.tolist() == pytest.approx([frame.duration for frame in frames])
        if path.suffix != ".avi":  # AVI stores no durations
            assert (frames[-1].duration, reader.duration) == pytest.approx((3.0, 3.4)), path


@pytest.mark.parametrize(
    "tag", [b"00:00:09.040000000", b"00:00:00.040000000", b"not a duration at ", b"00:00:1/0         "]
)
def test_a_wrong_duration_of_a_matroska_file_is_no_damage(make_video: MakeVideo, tag: bytes) -> None:
    whole = make_video("tagged.mkv").read_bytes()
    place = whole.index(b"DURATION") + len(b"DURATION")
    place = whole.index(b"00:00:", place)
    reader = VideoReader(whole[:place] + tag + whole[place + len(tag) :])
    assert len(list(reader)) == len(reader) == 30
    assert reader.index.damage is None
    assert reader.duration == pytest.approx(1.2)


@pytest.mark.parametrize("live", [False, True])
def test_a_matroska_file_that_was_cut_off_is_seen_by_its_structure(
    make_video: MakeVideo, tmp_path: Path, live: bool
) -> None:
    path = make_video("cut.mkv")
    if live:  # sizes that are not yet known when they are written
        with av.open(str(path)) as given, av.open(str(tmp_path / "live.mkv"), "w", options={"live": "1"}) as out:
            to = out.add_stream_from_template(given.streams.video[0])
            for packet in given.demux(video=0):
                if packet.size:
                    packet.stream = to
                    out.mux(packet)
        path = tmp_path / "live.mkv"
    whole = path.read_bytes()
    assert declared_end(io.BytesIO(whole), "matroska,webm", len(whole)) == len(whole)
    assert VideoReader(whole).index.damage is None
    cut = whole[: int(len(whole) * 0.6)]
    with pytest.raises(DamagedVideoError, match=r"the file ends after .* bytes"):
        list(VideoReader(cut))
    assert "the file ends after" in (probe(cut).damage or "")


def test_an_avi_whose_header_says_a_frame_too_many_is_whole(make_video: MakeVideo) -> None:
    content = bytearray(make_video("header.avi", "mjpeg", pixel_format="yuvj420p").read_bytes())
    for name, place in ((b"avih", 16), (b"strh", 32)):
        at = content.index(name) + 8 + place
        content[at : at + 4] = (int.from_bytes(content[at : at + 4], "little") + 1).to_bytes(4, "little")
    reader = VideoReader(bytes(content))
    assert len(list(reader)) == len(reader) == 30
    assert reader.index.damage is None


@pytest.mark.parametrize(
    ("codec", "options"),
    [("mpeg4", {"bf": "0"}), ("mpeg4", {"bf": "2"}), ("libx264", {"bf": "2"}), ("mjpeg", {})],
)
def test_times_of_an_avi_follow_its_places(
    make_video: MakeVideo, read_number: ReadNumber, codec: str, options: dict[str, str]
) -> None:
    """Dropped frames leave gaps in the positions, even for frames that are shown in another order."""
    ticks = [n for n in range(40) if n % 10 not in (3, 4, 5)]
    name = f"dropped-{codec}-{options.get('bf', '')}.avi"
    pixel_format = "yuvj420p" if codec == "mjpeg" else "yuv420p"
    path = make_video(name, codec, frames=len(ticks), ticks=ticks, options=options, pixel_format=pixel_format)
    reader = VideoReader(path)
    frames = list(reader.timed())
    assert [read_number(frame.pixels) for frame in frames] == list(range(len(ticks)))
    assert [frame.time for frame in frames] == pytest.approx([tick / 25 for tick in ticks])
    assert reader.times.tolist() == pytest.approx([tick / 25 for tick in ticks])
    assert read_number(reader[17]) == 17


# ---- pictures that move ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["png", "gif", "avif"])
def test_animations_are_videos(tmp_path: Path, make_picture: Picture, read_number: ReadNumber, suffix: str) -> None:
    """An AVIF file gives its sequence, not its cover."""
    pictures = [Image.fromarray(make_picture(number, 64, 96)) for number in range(5)]
    path = tmp_path / f"a.{suffix}"
    try:
        pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=100)
    except (KeyError, OSError, ValueError):
        pytest.skip(f"this Pillow writes no {suffix}")
    frames = list(VideoReader(path).timed())
    assert [read_number(frame.pixels) for frame in frames] == list(range(5))
    assert [frame.time for frame in frames] == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])


def test_webp_is_refused_with_what_reads_it(tmp_path: Path, make_picture: Picture) -> None:
    pictures = [Image.fromarray(make_picture(number, 32, 48)) for number in range(3)]
    pictures[0].save(tmp_path / "a.webp", save_all=True, append_images=pictures[1:], duration=100)
    with pytest.raises(InputError, match=r"is a WebP picture.* Convert it with Pillow"):
        VideoReader(tmp_path / "a.webp")


# ---- grey --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pixel_format", ["gray", "gray10le", "gray12le", "gray16le"])
@pytest.mark.parametrize("codec", ["ffv1", "rawvideo", "ffvhuff", "libx265"])
@pytest.mark.parametrize("extent", [0, 1, 2])
def test_luma_alone_has_full_range(tmp_path: Path, codec: str, pixel_format: str, extent: int) -> None:
    """FFmpeg also shows grey video in full range, whatever range the file declares."""
    names = [each.name for each in av.Codec(codec, "w").video_formats or []]
    if names and pixel_format not in names:
        pytest.skip(f"{codec} has no {pixel_format}")
    deep = pixel_format != "gray"
    ramp = np.tile(np.linspace(0, 65535 if deep else 255, 256).round(), (64, 1))
    frame = av.VideoFrame.from_ndarray(ramp.astype("u2" if deep else "u1"), format="gray16le" if deep else "gray")
    if deep:
        frame = frame.reformat(format=pixel_format)
    path = tmp_path / "grey.nut"
    with av.open(str(path), "w") as container:
        options = {"x265-params": "lossless=1:bframes=0:log-level=none"} if codec == "libx265" else {}
        to = container.add_stream(codec, rate=25, options=options)
        to.width, to.height, to.pix_fmt = 256, 64, pixel_format
        to.codec_context.color_range = extent
        frame.pts, frame.time_base = 0, Fraction(1, 25)
        container.mux([*to.encode(frame), *to.encode(None)])
    reader = VideoReader(path, dtype=torch.float32)
    assert reader.colours.full_range
    with av.open(str(path)) as container:
        shown = next(container.decode(video=0)).reformat(format="rgb24").to_ndarray()
    assert (shown.min(), shown.max()) == (0, 255)
    ours = 255 * reader[0].permute(1, 2, 0).numpy()
    assert np.abs(ours - shown).max() <= 1.3  # swscale drops the lower bits
    assert np.abs(ours[0, :, 0] - np.linspace(0, 255, 256)).max() <= (0.51 if not deep else 1)
