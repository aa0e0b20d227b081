"""Files that are damaged, cut off, hostile or not a video raise one clear error, and all earlier frames are correct."""

from __future__ import annotations

import io
import time
import wave
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftop.errors import InputError, MissingExtraError, RooftopError
from rooftop.media import DamagedVideoError, VideoReader, probe
from rooftop.media.decoding import Decoder, usual_duration
from rooftop.media.opening import Source

av = pytest.importorskip("av")
MakeVideo = Callable[..., Path]
H264 = {"bf": "3", "g": "8", "preset": "fast"}

some = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def read_all(content: bytes) -> tuple[dict[float, Tensor], RooftopError | None]:
    """Frames by their times, and the error that ended the reading."""
    frames: dict[float, Tensor] = {}
    try:
        for pixels, at, _ in VideoReader(content).timed():
            frames[round(at, 3)] = pixels
    except RooftopError as error:
        return frames, error
    return frames, None


@some
@given(share=st.floats(0, 1, exclude_max=True))
@example(share=0.8125)  # cuts an AVI between a frame and later stored frames that are shown earlier
def test_a_file_that_was_cut_off_gives_what_is_left(any_video: Path, share: float) -> None:
    whole = any_video.read_bytes()
    expected, _ = read_all(whole)
    cut = whole[: int(share * len(whole))]
    frames, error = read_all(cut)
    # If the last frame of a raw stream or a TS file was cut, the decoder fills it in and does not always report this.
    last = max(frames, default=None)
    untold = sorted(frames)[-4:] if any_video.suffix in (".ts", ".h264") else []
    for at, pixels in frames.items():
        assert torch.equal(pixels, expected[at]) or at in untold
    if isinstance(error, DamagedVideoError) and frames:
        assert error.last_good_time == pytest.approx(last, abs=1e-3)
        assert f"the last good frame is at {last:.3f} s" in str(error)


@some
@given(data=st.data())
def test_a_file_with_wrong_bytes_neither_hangs_nor_crashes(any_video: Path, data: st.DataObject) -> None:
    content = bytearray(any_video.read_bytes())
    for _ in range(data.draw(st.integers(1, 20))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    began = time.perf_counter()
    frames, _ = read_all(bytes(content))
    try:
        reader = VideoReader(bytes(content))
        for position in (0, len(reader) // 2, -1):
            if len(reader):
                reader[position]
    except RooftopError:
        pass
    assert len(frames) < 200
    assert time.perf_counter() - began < 120


def test_a_cut_matroska_file_says_so_and_stays_readable(make_video: MakeVideo) -> None:
    whole = make_video("cut.mkv", options={"bf": "2", "g": "8"})
    content = whole.read_bytes()
    reader = VideoReader(content[: int(len(content) * 0.7)])
    count, seen = len(reader), []
    assert 0 < count < 30
    with pytest.raises(DamagedVideoError, match="the last good frame is at") as raised:
        seen.extend(reader)
    assert len(seen) == count
    assert raised.value.last_good_time == pytest.approx(float(reader.times[-1]))
    assert torch.equal(reader[0], seen[0])
    assert "ends after" in (probe(content[: int(len(content) * 0.7)]).damage or "")


@pytest.mark.parametrize("name", ["chance.ts", "chance.h264"])
def test_a_cut_stream_reads_the_same_each_time(make_video: MakeVideo, name: str) -> None:
    """FFmpeg's threads may return a damaged frame before they mark it as damaged."""
    content = make_video(name, frames=40, height=120, width=160, options={"preset": "medium"}).read_bytes()
    for share in (0.2, 0.4, 0.6, 0.85):
        cut, results = content[: int(share * len(content))], []
        for _ in range(8):
            frames, error = read_all(cut)
            results.append((list(frames), str(error), len(VideoReader(cut))))
        assert results == results[:1] * 8


def test_frames_after_a_doubt_are_read_and_counted(make_video: MakeVideo) -> None:
    """A broadcast may begin with frames that depend on a missing picture. Several threads read on after them."""
    kind = {"options": {**H264, "x264-params": "open-gop=1:scenecut=0:keyint=8:min-keyint=8"}}
    content = make_video("open.ts", **kind).read_bytes()
    with av.open(io.BytesIO(content)) as container:
        keys = [packet.pos for packet in container.demux(video=0) if packet.size and packet.is_keyframe]
    later = content[: 3 * 188] + content[keys[1] // 188 * 188 :]
    frames, error = read_all(later)
    assert error is None
    assert len(frames) == len(VideoReader(later))
    expected = list(VideoReader(content))
    assert all(torch.equal(a, b) for a, b in zip(reversed(frames.values()), reversed(expected), strict=False))


@pytest.mark.parametrize("name", ["b-frames.wmv", "b-frames.mxf"])
def test_a_cut_asf_or_mxf_file_says_so(make_video: MakeVideo, name: str) -> None:
    content = make_video(name, options={"bf": "2", "g": "8"}).read_bytes()
    assert probe(content).damage is None
    reader = VideoReader(content[: int(len(content) * 0.7)])
    with pytest.raises(DamagedVideoError, match=r"the file ends after [\d,]+ of [\d,]+ bytes"):
        list(reader)


def test_frames_after_the_damage_are_found_by_position(make_video: MakeVideo) -> None:
    """Decoding starts again at a key frame, so only the damaged frame's group is lost."""
    path = make_video("spoilt.mkv", options={"bf": "0", "g": "8", "sc_threshold": "0"})
    with av.open(str(path)) as container:
        places = [(packet.pos, packet.size) for packet in container.demux(video=0) if packet.size]
    whole, content = VideoReader(path), bytearray(path.read_bytes())
    at, size = places[10]
    content[at + 12 : at + size] = bytes(size - 12)
    reader = VideoReader(bytes(content))
    seen = []
    with pytest.raises(DamagedVideoError):
        seen.extend(reader)
    assert len(seen) == 10
    with pytest.raises(DamagedVideoError, match=r"frame 12 of .* cannot be decoded"):
        reader[12]
    for position in (3, 9, 16, 29):
        assert torch.equal(reader[position], whole[position])


def test_threads_lose_no_frame_before_the_damage(make_video: MakeVideo) -> None:
    """Several threads have begun frames when a packet turns out to be damaged; all earlier frames are still
    returned."""
    path = make_video("threads.mkv", options={"bf": "3", "g": "8", "preset": "fast"})
    whole, content = list(VideoReader(path)), path.read_bytes()
    with av.open(str(path)) as container:
        places = [(packet.pos, packet.size) for packet in container.demux(video=0) if packet.size]
        container.seek(0)
        ticks = [packet.pts for packet in container.demux(video=0) if packet.size]
    noticed = 0
    for wrong in range(3, 30):
        at, size = places[wrong]
        damaged = bytearray(content)
        damaged[at + 12 : at + size] = bytes(size - 12)
        seen: list[Tensor] = []
        try:
            seen.extend(VideoReader(bytes(damaged)))
        except DamagedVideoError:  # the loss of some small packets goes unnoticed
            noticed += 1
        certain = sum(1 for tick in ticks if tick < min(ticks[wrong:]))  # shown before all lost or later frames
        assert len(seen) >= certain, wrong
        assert all(torch.equal(a, b) for a, b in zip(seen[:certain], whole, strict=False))
    assert noticed > 10


def test_frames_before_the_first_key_frame_are_left_out(make_video: MakeVideo) -> None:
    """A stream whose beginning is missing, like a broadcast."""
    path = make_video("joined.ts", options={"bf": "2", "g": "8", "sc_threshold": "0"})
    with av.open(str(path)) as container:
        packets = [packet for packet in container.demux(video=0) if packet.size]
    later = next(packet for packet in packets[3:] if packet.pos)
    content = path.read_bytes()[later.pos // 188 * 188 :]
    tables = path.read_bytes()[: 3 * 188]  # packets of the program tables, without which there is no stream
    reader = VideoReader(tables + content)
    frames = list(reader)
    assert 0 < len(frames) < 30
    assert len(reader) == len(frames)
    assert torch.equal(reader[0], frames[0])
    assert torch.equal(frames[-1], VideoReader(path)[-1])


def test_what_is_no_video_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "words.mp4").write_text("no video at all\n" * 100)
    (tmp_path / "zeros.mp4").write_bytes(bytes(10_000))
    with wave.open(str(tmp_path / "sound.wav"), "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", ""))
        sound.writeframes(bytes(16000))
    cases = {
        "missing.mp4": "does not exist",
        ".": "is not a regular file",
        "empty.mp4": "is empty",
        "words.mp4": "is not a video that FFmpeg can read",
        "zeros.mp4": "is not a video that FFmpeg can read",
        "sound.wav": "has no video, only audio",
    }
    for name, said in cases.items():
        with pytest.raises(InputError, match=said):
            VideoReader(tmp_path / name)
    with pytest.raises(InputError, match="is empty"):
        VideoReader(b"")
    with pytest.raises(TypeError, match="expected a path or bytes"):
        VideoReader(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "content",
    [
        "#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:1.6,\nsecret.ts\n#EXT-X-ENDLIST\n",
        "ffconcat version 1.0\nfile secret.ts\n",
        "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 96\n"
        "a=rtpmap:96 H264/90000\n",
    ],
    ids=["hls", "concat", "sdp"],
)
def test_a_file_that_points_elsewhere_is_not_followed(make_video: MakeVideo, content: str) -> None:
    secret = make_video("secret.ts")
    path = secret.with_name("list.mp4")
    path.write_text(content)
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        with pytest.raises(InputError, match="is not a video that FFmpeg can read"):
            VideoReader(path)
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 5  # no wait for the network, where FFmpeg would take 10 s each time


def test_a_small_file_cannot_ask_for_a_huge_frame(tmp_path: Path) -> None:
    path = tmp_path / "huge.y4m"
    path.write_bytes(b"YUV4MPEG2 W30000 H30000 F25:1 C420\nFRAME\n" + bytes(1000))
    with pytest.raises(RooftopError):
        VideoReader(path)


def test_without_pyav_the_error_says_what_to_install(make_video: MakeVideo, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_video("clips.mp4")
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    with pytest.raises(MissingExtraError, match=r'pip install "rooftop\[media\]"'):
        VideoReader(path)


def test_frames_that_change_their_size_need_one_to_be_named(tmp_path: Path) -> None:
    """Two streams one after the other, like a video call that changes its resolution."""
    path = tmp_path / "changing.mjpeg"
    content = b""
    for height in (16, 32):
        context = av.CodecContext.create("mjpeg", "w")
        context.height, context.width, context.pix_fmt = height, 24, "yuvj420p"
        context.time_base = Fraction(1, 25)
        frame = av.VideoFrame(24, height, "yuvj420p")
        frame.pts = 0
        content += b"".join(bytes(packet) for packet in [*context.encode(frame), *context.encode(None)])
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"change from 24 x 16 to 24 x 32 pixels: use VideoReader\(\.\.\., resize="):
        list(VideoReader(path))
    assert [frame.shape[1:] for frame in VideoReader(path, resize=(8, 12))] == [(8, 12), (8, 12)]


def test_an_avi_with_an_empty_chunk_is_whole(make_video: MakeVideo, tmp_path: Path) -> None:
    """A chunk without bytes repeats a frame and does not count as a frame. If all chunks end correctly but the header
    promises more frames, the header is wrong, and the file is whole. In a file that was cut off, the last chunk ends
    early."""
    whole = make_video("chunks.avi", "mpeg4", options={"bf": "0"}).read_bytes()
    begin = whole.index(b"movi") + 4
    chunks, at = [], begin
    while whole[at : at + 4] == b"00dc":
        size = int.from_bytes(whole[at + 4 : at + 8], "little")
        chunks.append(whole[at + 8 : at + 8 + size])
        at += 8 + size + size % 2

    def written(some: list[bytes]) -> bytes:
        data, index = b"", b""
        for n, chunk in enumerate(some):
            place = (len(data) + 4).to_bytes(4, "little") + len(chunk).to_bytes(4, "little")
            index += b"00dc" + (16 * (n == 0)).to_bytes(4, "little") + place
            data += b"00dc" + len(chunk).to_bytes(4, "little") + chunk + b"\0" * (len(chunk) % 2)
        head = whole[: begin - 8] + (len(data) + 4).to_bytes(4, "little") + b"movi"
        file = head + data + b"idx1" + len(index).to_bytes(4, "little") + index
        return file[:4] + (len(file) - 8).to_bytes(4, "little") + file[8:]

    assert len(VideoReader(written(chunks))) == len(chunks)
    frames, error = read_all(written([*chunks[:7], b"", *chunks[8:]]))
    assert error is None
    assert len(frames) == len(chunks) - 1
    fewer = written(chunks[:-2])
    frames, error = read_all(fewer)
    assert error is None
    assert len(frames) == len(VideoReader(fewer)) == len(chunks) - 2
    cut = fewer[: fewer.index(chunks[-3]) + len(chunks[-3]) + len(chunks[-3]) % 2]
    frames, error = read_all(cut)
    assert isinstance(error, DamagedVideoError)
    assert len(frames) == len(chunks) - 3  # the last available frame may have waited for a missing one
    assert f"the file ends after {len(chunks) - 2} of {len(chunks)} frames" in str(error)


def test_nothing_is_asked_of_a_closed_file(make_video: MakeVideo) -> None:
    """The reader needs the frame rate after its first decoder is closed. By then FFmpeg would read freed memory."""
    decoder = Decoder(Source(make_video("closed.mp4")))
    rate = decoder.rate()
    decoder.close()
    del decoder.stream
    assert decoder.rate() == rate
    assert usual_duration(decoder) > 0
