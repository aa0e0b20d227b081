"""Idle decoders return the right frames of the next video, whatever they decoded before. In these tests, FFmpeg's CPU
decoders stand in for NVDEC."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import av
import pytest
import torch

from rooftop.media import nvdec_decoders
from rooftop.media.decoding import Broken, Decoder
from rooftop.media.forms import form_of
from rooftop.media.frame_tensors import to_tensor
from rooftop.media.nvdec_decoders import Kind, given_back, kind_of, release_decoders, says_otherwise, taken
from rooftop.media.opening import Source

MakeVideo = Callable[..., Path]
DEVICE = torch.device("cuda", 0)
RGB = form_of("rgb", torch.uint8, None, None)
H264 = {"bf": "2", "g": "5", "preset": "ultrafast"}
HEVC = {"x265-params": "log-level=none:keyint=5:min-keyint=5"}


@pytest.fixture(autouse=True)
def decoders(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The idle decoders, without a GPU. No decoder is idle before a test or after it."""
    monkeypatch.setattr(nvdec_decoders, "acceleration", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    release_decoders()
    yield nvdec_decoders._idle
    release_decoders()


def frames(path: Path, device: torch.device | None) -> list[torch.Tensor]:
    """All frames; the decoder is closed afterwards."""
    decoder = Decoder(Source(path), device, threads=False)
    try:
        return [to_tensor(frame, RGB) for _, frame in decoder.frames()]
    finally:
        decoder.close()


def video_of(path: Path, number: int = 0) -> tuple[Kind, bytes]:
    """The kind of a video, and a key packet."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        kind = kind_of(stream.codec_context, DEVICE)
        keys = [packet for packet in container.demux(stream) if packet.is_keyframe and packet.size]
        return kind, bytes(keys[number])


CODECS = {
    "h264.mp4": ("libx264", H264),
    "h264.ts": ("libx264", H264),
    "h264.mkv": ("libx264", {**H264, "x264-params": "repeat-headers=1"}),
    "hevc.mp4": ("libx265", HEVC),
    "vp9.webm": ("libvpx-vp9", {"g": "5", "deadline": "realtime", "cpu-used": "8"}),
}


@pytest.mark.parametrize("name", CODECS)
def test_the_next_video_of_a_kind_goes_on_with_the_decoder(
    name: str, make_video: MakeVideo, decoders: list[Any]
) -> None:
    codec, options = CODECS[name]
    one, other = (make_video(f"{n}-{name}", codec, options=options, frames=n, width=96) for n in (11, 14))
    for path in (one, other, one):
        assert all(map(torch.equal, frames(path, DEVICE), frames(path, None)))
        assert len(decoders) == 1


def test_a_pass_that_was_left_in_the_middle(make_video: MakeVideo, decoders: list[Any]) -> None:
    path = make_video("long.mp4", "libx264", options=H264, frames=14)
    decoder = Decoder(Source(path), DEVICE)
    for _ in zip(range(4), decoder.frames(), strict=False):
        pass
    del decoder
    assert len(decoders) == 1
    assert all(map(torch.equal, frames(path, DEVICE), frames(path, None)))
    assert len(decoders) == 1


def test_seeking_begins_anew(make_video: MakeVideo) -> None:
    path = make_video("long.mp4", "libx264", options=H264, frames=14)
    expected = frames(path, None)
    decoder = Decoder(Source(path), DEVICE)
    ticks = [tick for tick, _ in decoder.frames()]
    decoder.seek(ticks[5])
    assert all(
        torch.equal(to_tensor(frame, RGB), other)
        for (_, frame), other in zip(decoder.frames(ticks[5]), expected[5:], strict=True)
    )
    decoder.close()


def test_other_kinds_have_others(make_video: MakeVideo, decoders: list[Any]) -> None:
    one, wide = (make_video(f"{width}.mp4", "libx264", options=H264, width=width) for width in (96, 128))
    for path in (one, wide):
        assert all(map(torch.equal, frames(path, DEVICE), frames(path, None)))
    assert len(decoders) == 2


def test_of_a_decoder_that_failed_nobody_goes_on(make_video: MakeVideo, decoders: list[Any]) -> None:
    path = make_video("clips.mp4", "libx264", options=H264)
    decoder = Decoder(Source(path), DEVICE)

    class Failing:
        def decode(self, packet: object) -> object:
            raise av.InvalidDataError(1, "wrong")

    decoder.context = Failing()  # type: ignore[assignment]
    with pytest.raises(Broken):
        next(decoder.frames())
    decoder.close()
    assert not decoders


@pytest.mark.parametrize("name", ["h264.mp4", "h264.ts", "hevc.mp4"])
def test_headers_of_another_video_are_seen(name: str, make_video: MakeVideo) -> None:
    codec, options = CODECS[name]
    one, wide = (make_video(f"{width}-{name}", codec, options=options, width=width) for width in (96, 128))
    kind, packet = video_of(one)
    assert not says_otherwise(packet, kind)
    if kind.headers[:1] == b"\1":  # MP4: units with their lengths
        sets = next(bytes(each) for each in units_with_start_codes(wide, codec) if len(each))
        strange = len(sets).to_bytes(4, "big") + sets
    else:
        strange = video_of(wide)[1]
    assert says_otherwise(strange, kind)
    assert says_otherwise(strange + packet, kind)


def units_with_start_codes(path: Path, codec: str) -> list[bytes]:
    """The sequence parameter sets of a video in MP4."""
    name = "h264_mp4toannexb" if codec == "libx264" else "hevc_mp4toannexb"
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        filtered = av.bitstream.BitStreamFilterContext(name, stream)
        packet = next(packet for packet in container.demux(stream) if packet.is_keyframe)
        units = bytes(filtered.filter(packet)[0]).split(b"\0\0\1")[1:]
    wanted = (lambda unit: unit[0] & 31 == 7) if codec == "libx264" else (lambda unit: unit[0] >> 1 & 63 == 33)
    return [unit.rstrip(b"\0") for unit in units if wanted(unit)]


def test_who_brought_other_headers_keeps_them(make_video: MakeVideo, decoders: list[Any], monkeypatch: Any) -> None:
    path = make_video("clips.mp4", "libx264", options=H264)
    monkeypatch.setattr("rooftop.media.decoding.says_otherwise", lambda packet, kind: True)
    frames(path, DEVICE)
    assert not decoders


def of_size(kind: Kind) -> av.VideoCodecContext:
    context = av.CodecContext.create("h264", "r")
    assert isinstance(context, av.VideoCodecContext)
    context.width, context.height = kind.width, kind.height
    return context


def test_only_so_many_wait(monkeypatch: pytest.MonkeyPatch, decoders: list[Any]) -> None:
    kinds = [Kind(DEVICE, "h264", bytes([number]), 1920, 1088, (1, 1, 1, 1)) for number in range(40)]
    for kind in kinds:
        given_back(kind, of_size(kind), os.getpid())
    assert [kind for kind, _ in decoders] == kinds[-nvdec_decoders.MOST :]
    large = Kind(DEVICE, "h264", b"large", 7680, 4320, (1, 1, 1, 1))
    given_back(large, of_size(large), os.getpid())
    kept = 1 + (nvdec_decoders.MOST_PIXELS - 7680 * 4320) // (1920 * 1088)
    assert [kind for kind, _ in decoders] == [*kinds[1 - kept :], large]
    assert release_decoders() == kept
    assert not decoders


def test_headers_that_are_not_known_are_nobody_elses(decoders: list[Any]) -> None:
    for codec, headers in (("h264", b""), ("mpeg4", b"headers")):
        kind = Kind(DEVICE, codec, headers, 64, 48, (1, 1, 1, 1))
        given_back(kind, taken(kind, {}), os.getpid())
    assert not decoders


def test_headers_that_are_too_short_are_trusted_in_nothing() -> None:
    for codec, headers in (("h264", b"\1"), ("hevc", b"\1" * 10)):
        assert says_otherwise(b"\0\0\0\1\x65", Kind(DEVICE, codec, headers, 64, 48, (1, 1, 1, 1)))


def test_of_another_process_nobody_goes_on(decoders: list[Any]) -> None:
    """After a fork, the child has its parent's readers, but cannot use the GPU."""
    kind = Kind(DEVICE, "h264", b"headers", 64, 48, (1, 1, 1, 1))
    given_back(kind, of_size(kind), os.getpid() + 1)
    assert not decoders


def test_frames_that_wait_for_others_where_the_headers_do_not_say_how_many(
    make_video: MakeVideo, tmp_path: Path
) -> None:
    """H.264 without a VUI does not state how many frames wait. FFmpeg finds the number when it opens and examines the
    file."""
    options = {"bf": "3", "g": "12", "x264-params": "b-adapt=0:b-pyramid=normal"}
    path = make_video("pyramid.mp4", "libx264", options=options, width=96)
    plain = tmp_path / "plain.mp4"
    with av.open(str(path)) as source, av.open(str(plain), "w") as target:
        stream = source.streams.video[0]
        headers = stream.codec_context.extradata
        assert headers is not None
        copy = target.add_stream_from_template(stream)
        length = int.from_bytes(headers[6:8], "big")
        parameters = without_vui(headers[8 : 8 + length])
        size = len(parameters).to_bytes(2, "big")
        copy.codec_context.extradata = headers[:6] + size + parameters + headers[8 + length :]
        for packet in source.demux(stream):
            if packet.size:
                packet.stream = copy
                target.mux(packet)
    with av.open(str(plain)) as container:
        assert container.streams.video[0].codec_context.extradata != headers
    expected = frames(plain, None)
    assert len(expected) == 30
    for _ in range(2):
        found = frames(plain, DEVICE)
        assert len(found) == 30
        assert all(map(torch.equal, found, expected))


def without_vui(parameters: bytes) -> bytes:
    """A sequence parameter set of H.264 (7.3.2.1.1) that ends before the optional part."""
    bits = "".join(f"{byte:08b}" for byte in parameters.replace(b"\0\0\3", b"\0\0"))
    place = 8 + 24

    def number() -> int:
        """Exponential Golomb."""
        nonlocal place
        zeros = bits.index("1", place) - place
        value = int(bits[place + zeros : place + 2 * zeros + 1], 2) - 1
        place += 2 * zeros + 1
        return value

    number()  # its name
    if parameters[1] in (100, 110, 122, 244):
        assert [number(), number(), number()] == [1, 0, 0]  # 4:2:0 of 8 bits
        place += 2
    number()
    if number() == 0:
        number()
    number()
    place += 1
    number(), number()
    place += 1 if bits[place] == "1" else 2
    place += 1
    if bits[place] == "1":
        place += 1
        number(), number(), number(), number()
    else:
        place += 1
    kept = bits[:place] + "0" + "1"
    kept += "0" * (-len(kept) % 8)
    plain = bytes(int(kept[at : at + 8], 2) for at in range(0, len(kept), 8))
    return plain.replace(b"\0\0\1", b"\0\0\3\1").replace(b"\0\0\0", b"\0\0\3\0")


def test_headers_in_the_middle_of_a_file_stay_with_it(
    make_video: MakeVideo, tmp_path: Path, decoders: list[Any]
) -> None:
    """An FLV file joined from two. The headers of the second part come with that part's first packet."""
    one = make_video("one.flv", "libx264", options=H264, frames=10, width=96)
    other = make_video("other.flv", "libx264", options=H264, frames=10, width=128)
    joined = tmp_path / "joined.flv"
    joined.write_bytes(one.read_bytes() + shifted(other.read_bytes(), 400))
    expected = frames(joined, None)
    assert {frame.shape for frame in expected} == {(3, 32, 96), (3, 32, 128)}
    for _ in range(2):
        assert all(map(torch.equal, frames(joined, DEVICE), expected))
        assert not decoders
    assert all(map(torch.equal, frames(one, DEVICE), frames(one, None)))


def shifted(flv: bytes, by_ms: int) -> bytes:
    """The video tags of an FLV file, moved to a later time."""
    place, tags = 13, b""
    while place + 11 <= len(flv):
        size = 11 + int.from_bytes(flv[place + 1 : place + 4], "big") + 4
        tag = bytearray(flv[place : place + size])
        if tag[0] == 9:
            time = by_ms + int.from_bytes(tag[4:7], "big")
            tag[4:7] = time.to_bytes(3, "big")
            tags += tag
        place += size
    return tags


def test_how_pictures_are_turned_stays_with_them(make_video: MakeVideo, tmp_path: Path, decoders: list[Any]) -> None:
    """HEVC with a rotation in its data, and with the same headers as a video without rotation."""
    path, turned = make_video("plain.mp4", "libx265", options=HEVC, frames=10, width=96), tmp_path / "turned.mp4"
    # prefix SEI 47 (H.265, D.2.17): a quarter turn that persists
    orientation = bytes([39 << 1, 1, 47, 3, 0x08, 0x00, 0x18, 0x80])
    with av.open(str(path)) as source, av.open(str(turned), "w") as target:
        stream = source.streams.video[0]
        copy = target.add_stream_from_template(stream)
        for packet in source.demux(stream):
            if packet.size:
                content = bytes(packet)
                if packet.is_keyframe:
                    content = len(orientation).to_bytes(4, "big") + orientation + content
                changed = av.Packet(content)
                changed.pts, changed.dts, changed.time_base = packet.pts, packet.dts, packet.time_base
                changed.is_keyframe, changed.stream = packet.is_keyframe, copy
                target.mux(changed)
    for each in (turned, path, turned, path):
        decoders.clear()
        assert [frame.shape for frame in frames(each, DEVICE)] == [frame.shape for frame in frames(each, None)]
    assert frames(turned, None)[0].shape == (3, 96, 32)
    frames(turned, DEVICE)
    assert frames(path, DEVICE)[0].shape == (3, 32, 96)


def test_headers_at_the_end_of_a_file_stay_with_it(make_video: MakeVideo, tmp_path: Path, decoders: list[Any]) -> None:
    """The headers come after the pictures of a packet that is not a key frame."""
    path = make_video("plain-end.mp4", "libx264", options={**H264, "bf": "0"}, frames=12, width=96)
    strange = make_video("strange.mp4", "libx264", options={**H264, "preset": "medium"}, frames=2, width=96)
    with av.open(str(strange)) as container:
        headers = container.streams.video[0].codec_context.extradata
        assert headers is not None
    # size of the sequence parameter set; then a count, then the size of the picture parameter set
    end = 8 + int.from_bytes(headers[6:8], "big")
    size = 2 + int.from_bytes(headers[end + 1 : end + 3], "big")
    picture = headers[end + 3 : end + 1 + size]
    assert picture[0] & 31 == 8
    changed = tmp_path / "changed.mp4"
    with av.open(str(path)) as source, av.open(str(changed), "w") as target:
        stream = source.streams.video[0]
        copy = target.add_stream_from_template(stream)
        packets = [packet for packet in source.demux(stream) if packet.size]
        assert not packets[-1].is_keyframe
        for packet in packets:
            content = bytes(packet)
            if packet is packets[-1]:
                content += len(picture).to_bytes(4, "big") + picture
            new = av.Packet(content)
            new.pts, new.dts, new.time_base, new.is_keyframe = (
                packet.pts,
                packet.dts,
                packet.time_base,
                packet.is_keyframe,
            )
            new.stream = copy
            target.mux(new)
    expected = frames(path, None)
    for each in (changed, path, changed, changed, path):
        found = frames(each, DEVICE)
        assert len(found) == 12
        assert all(map(torch.equal, found, expected))
        assert len(decoders) == (each is path)
        release_decoders()
    for each in (changed, path):
        assert all(map(torch.equal, frames(each, DEVICE), expected))
