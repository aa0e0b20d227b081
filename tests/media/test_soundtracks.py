"""Sound of a written video is copied packet for packet, or encoded. The file also tests the video encoder that "auto"
selects."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from rooftop.errors import InputError
from rooftop.media import DamagedVideoError, VideoReader, VideoWriteError, VideoWriter, probe, read_sound
from rooftop.media.nvenc import why_no_nvenc

av = pytest.importorskip("av")

RATE = 48_000
FRAMES = torch.rand(50, 3, 32, 48, generator=torch.Generator().manual_seed(0))  # two seconds at 25 a second


def tones(seconds: float = 3.0, rate_hz: int = RATE, channels: int = 2) -> Tensor:
    """(C, N): a chirp, another in each channel."""
    at = torch.arange(int(seconds * rate_hz)) / rate_hz
    return torch.stack([0.5 * torch.sin(400 * (each + 1) * at * (1 + at)) for each in range(channels)])


def packets_of(path: Path) -> list[tuple[float, bytes]]:
    """The packets of the sound: the time of each relative to the first picture, and its bytes."""
    with av.open(str(path)) as container:
        found = [
            (packet.stream.type, packet.pts * packet.time_base, bytes(packet))
            for packet in container.demux(video=0, audio=0)
            if packet.size
        ]
    shown = min(at for kind, at, _ in found if kind == "video")
    return [(float(at - shown), data) for kind, at, data in found if kind == "audio"]


def source(tmp_path: Path, suffix: str = ".mp4", codec: str | None = None) -> Path:
    path = tmp_path / f"source{suffix}"
    with VideoWriter(path, 25, "libvpx-vp9" if suffix == ".webm" else "libx264") as writer:
        writer.write_sound(tones(), RATE, codec)
        writer.write(FRAMES)
    return path


@pytest.mark.parametrize(
    ("suffix", "codec", "to"),
    [
        (".mp4", "aac", ".mp4"),
        (".mp4", "aac", ".mkv"),
        (".mkv", "flac", ".mkv"),
        (".mkv", "pcm_s16le", ".mov"),
        (".webm", "libopus", ".mkv"),
        (".mkv", "libmp3lame", ".mp4"),
    ],
)
def test_copied_sound_is_the_same_packet_for_packet(tmp_path: Path, suffix: str, codec: str, to: str) -> None:
    given, path = source(tmp_path, suffix, codec), tmp_path / f"copy{to}"
    with VideoWriter(path, 25, sound_from=given) as writer:
        writer.write(FRAMES)
    before, after = packets_of(given), packets_of(path)
    assert b"".join(data for _, data in after) == b"".join(data for _, data in before)
    if codec != "pcm_s16le":  # FFmpeg changes the sizes of these packets when reading
        assert [data for _, data in after] == [data for _, data in before]
        assert [at for at, _ in after] == pytest.approx([at for at, _ in before], abs=2e-3)
    samples, heard = read_sound(given).samples, read_sound(path)
    # An MP4 file marks sound to be skipped. FFmpeg keeps this sound in Matroska, where it plays before the first
    # picture.
    early = 1024 if (given.suffix, to) == (".mp4", ".mkv") else 0
    assert float(VideoReader(path).times[0]) - heard.start_s == pytest.approx(early / RATE, abs=2e-3)
    if (given.suffix, to) != (".mkv", ".mp4"):  # the MP4's edit list takes Matroska's milliseconds for samples
        assert torch.equal(heard.samples[:, early:][:, :RATE], samples[:, :RATE])
    assert len(VideoReader(path)) == len(FRAMES)
    with av.open(str(path)) as container:
        assert [each.type for each in container.streams] == ["video", "audio"]


def test_sound_is_cut_only_if_asked(tmp_path: Path) -> None:
    given = source(tmp_path)
    for cut, seconds in ((False, 3.0), (True, 2.0)):
        path = tmp_path / "cut.mkv"
        with VideoWriter(path, 25, sound_from=given, cut_sound=cut) as writer:
            writer.write(FRAMES[:25], times=[number / 25 for number in range(25)])
            writer.write(FRAMES[25:], times=[1 + number / 25 for number in range(25)])
        assert read_sound(path).samples.shape[1] / RATE == pytest.approx(seconds, abs=0.03)


def test_sound_from_a_later_start_stays_with_its_pictures(tmp_path: Path) -> None:
    given, path = source(tmp_path, ".mkv", "pcm_s16le"), tmp_path / "later.mkv"
    with VideoWriter(path, 25, sound_from=given, sound_start_s=1.0) as writer:
        writer.write(FRAMES[25:])
    begin = float(VideoReader(path).times[0])
    whole, later = read_sound(given), read_sound(path)
    missing = later.start_s - begin  # less than a packet is missing
    assert 0 <= missing < 0.03
    first = round((1.0 + missing) * RATE)
    ours = later.samples[:, :40_000]
    misses = [float((whole.samples[:, at : at + 40_000] - ours).abs().max()) for at in range(first - 60, first + 60)]
    assert min(misses) == 0  # within Matroska's clock, of milliseconds


@pytest.mark.parametrize(
    ("suffix", "codec", "channels"),
    [(".mp4", None, 2), (".mkv", "flac", 6), (".mkv", "pcm_s16le", 1), (".webm", None, 2), (".avi", None, 1)],
)
def test_written_sound_is_heard_again(tmp_path: Path, suffix: str, codec: str | None, channels: int) -> None:
    path, sound = tmp_path / f"written{suffix}", tones(2.0, channels=channels)
    video = {".webm": "libvpx-vp9", ".avi": "mpeg4"}.get(suffix, "libx264")
    with VideoWriter(path, 25, video) as writer:
        for part in sound.split(7001, 1):
            writer.write_sound(part, RATE, codec)
        writer.write(FRAMES)
    heard = read_sound(path)
    assert (heard.rate_hz, heard.samples.shape[0]) == (RATE, channels)
    assert heard.start_s == pytest.approx(0, abs=0.03)
    assert heard.samples.shape[1] == pytest.approx(sound.shape[1], abs=0.05 * RATE)
    if codec is not None:
        assert float((heard.samples - sound).abs().max()) <= 1 / 32768
    elif suffix != ".avi":  # the container does not record the encoder's initial padding
        middle = slice(RATE // 2, RATE)
        assert float((heard.samples[:, middle] - sound[:, middle]).abs().max()) < 0.1
    assert len(VideoReader(path)) == len(FRAMES)


def test_wrong_sound_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    given, path = source(tmp_path), tmp_path / "out.mp4"
    silent = tmp_path / "silent.mp4"
    with VideoWriter(silent, 25) as writer:
        writer.write(FRAMES[:2])
    kept = sorted([given, silent])
    for settings, said in (
        ({"sound_from": tmp_path / "missing.mp4"}, "does not exist"),
        ({"sound_from": silent}, "has no sound, only video"),
        ({"sound_from": given, "sound_start_s": -1.0}, "expected 0 seconds or more"),
    ):
        with pytest.raises(InputError, match=said):
            VideoWriter(path, 25, **settings)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"a webm file cannot hold the aac sound .* write an \.mkv file"):
        VideoWriter(tmp_path / "out.webm", 25, "libvpx-vp9", sound_from=given)
    with VideoWriter(path, 25, sound_from=given) as writer:
        with pytest.raises(InputError, match="leave out sound_from"):
            writer.write_sound(tones(), RATE)
        writer.write(FRAMES[:2])
    path.unlink()
    writer = VideoWriter(path, 25)
    for samples, rate_hz, codec, said in (
        (torch.zeros(100), RATE, None, r"expected \(C, N\)"),
        (torch.zeros(2, 100, dtype=torch.int16), RATE, None, r"expected \(C, N\), floating"),
        (torch.full((2, 100), float("nan")), RATE, None, "not finite"),
        (torch.zeros(9, 100), RATE, None, "9 channels of sound: expected 1 to 8"),
        (torch.zeros(2, 100), 12_345, None, "aac does not encode 12345 Hz: expected one of"),
        (torch.zeros(2, 100), RATE, "abacus", "no encoder 'abacus'"),
        (torch.zeros(2, 100), RATE, "libx264", "encodes video"),
    ):
        with pytest.raises(InputError, match=said):
            writer.write_sound(samples, rate_hz, codec)
    writer.write_sound(tones(), RATE)
    with pytest.raises(InputError, match="a stream cannot change these"):
        writer.write_sound(tones(), 44_100)
    with pytest.raises(VideoWriteError, match="no frames"):
        writer.close()
    with VideoWriter(path, 25) as writer:
        writer.write(FRAMES[:2])
        with pytest.raises(InputError, match="before the first frame"):
            writer.write_sound(tones(), RATE)
    path.unlink()
    writer = VideoWriter(path, 25, sound_from=given)
    writer.write(FRAMES)
    writer.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    assert sorted(tmp_path.iterdir()) == kept


def test_sound_that_is_damaged_leaves_no_file(tmp_path: Path) -> None:
    given = source(tmp_path, ".mp4", "aac")
    with av.open(str(given)) as container:
        places = [packet.pos for packet in container.demux(audio=0) if packet.size]
    front = tmp_path / "front.mp4"  # the index is before the packets, so the file can be read without its end
    with av.open(str(given)) as taken, av.open(str(front), "w", options={"movflags": "faststart"}) as copy:
        stream = copy.add_stream_from_template(taken.streams.audio[0], opaque=True)
        for packet in taken.demux(audio=0):
            if packet.dts is not None:
                packet.stream = stream
                copy.mux(packet)
    front.write_bytes(front.read_bytes()[: front.stat().st_size // 2])
    assert len(places) > 10
    writer = VideoWriter(tmp_path / "out.mkv", 25, sound_from=front)
    words = r"the sound of .* (cannot be read further|is damaged|has a damaged|ends)"
    with pytest.raises(DamagedVideoError, match=words):  # noqa: PT012
        writer.write(FRAMES)
        writer.close()
    assert sorted(tmp_path.iterdir()) == [front, given]


def test_auto_says_which_encoder_it_took_and_why(tmp_path: Path) -> None:
    path = tmp_path / "auto.mp4"
    with VideoWriter(path, 25, "auto") as writer:
        writer.write(FRAMES[:3])
    reason = why_no_nvenc("yuv420p")
    if reason is None:  # a GPU has NVENC, but NVENC refuses such small pictures
        reason = why_no_nvenc("yuv420p", 32, 48)
    assert writer.fallback_reason == reason
    assert writer.encoder == ("libx264" if reason else "h264_nvenc")
    assert probe(path).codec == "h264"
    plain = VideoWriter(path, 25)
    assert (plain.encoder, plain.fallback_reason) == ("libx264", None)
    plain.discard()
    with pytest.raises(InputError, match='pass its name as codec, not "auto"'):
        VideoWriter(path, 25, "auto", options={"crf": "20"})


def test_auto_takes_nvenc_after_a_trial_and_the_other_where_the_size_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A software encoder replaces NVENC, which few machines have."""
    trials: list[tuple[int, int] | None] = []

    def trial(pixel_format: str, *size: int) -> str | None:
        trials.append(size or None)  # type: ignore[arg-type]
        return "too small" if size and min(size) < 100 else None

    monkeypatch.setattr("rooftop.media.writing.why_no_nvenc", trial)
    monkeypatch.setattr("rooftop.media.writing.ENCODER", "mpeg4")
    for size, encoder, codec, reason in ((128, "mpeg4", "mpeg4", None), (32, "libx264", "h264", "too small")):
        path = tmp_path / "out.mp4"
        with VideoWriter(path, 25, "auto") as writer:
            writer.write(torch.rand(3, size, size))
        assert (writer.encoder, writer.fallback_reason, probe(path).codec) == (encoder, reason, codec)
    assert trials == [None, (128, 128), None, (32, 32)]


@pytest.mark.gpu
def test_nvenc_is_tried_on_the_gpu_itself(tmp_path: Path) -> None:
    path = tmp_path / "auto.mp4"
    with VideoWriter(path, 25, "auto") as writer:
        writer.write(torch.rand(5, 3, 256, 256, device="cuda"))
    assert (writer.encoder == "h264_nvenc") == (writer.fallback_reason is None)
    assert len(VideoReader(path)) == 5
