"""`rooftop media decode`, `transcode` and `bench`: their files, their output, and that they leave nothing else
behind."""

from __future__ import annotations

import json
from fractions import Fraction
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from rooftop.cli.main import main
from rooftop.media import VideoReader, VideoWriter, probe, read_sound

av = pytest.importorskip("av")

FRAMES, RATE = 20, 48_000
LOSSLESS = {"qp": "0"}


@pytest.fixture(scope="session")
def video(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 frames of 32 x 48 at 25 per second, each with one brightness, and 0.8 s of sound."""
    path = tmp_path_factory.mktemp("media") / "in.mkv"
    with VideoWriter(path, 25, options=LOSSLESS) as writer:
        writer.write_sound(torch.sin(torch.arange(0.8 * RATE) / 20).expand(2, -1), RATE, "pcm_s16le")
        for number in range(FRAMES):
            writer.write(torch.full((3, 32, 48), number / FRAMES))
    return path


@pytest.fixture(scope="session")
def damaged(video: Path) -> Path:
    path = video.with_name("damaged.mkv")
    path.write_bytes(video.read_bytes()[: int(video.stat().st_size * 0.6)])
    return path


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


@pytest.mark.parametrize("suffix", [".wmv", ".mxf"])
def test_transcode_keeps_all_frames_of_formats_with_a_decoding_clock(tmp_path: Path, suffix: str) -> None:
    """These formats store no times at which frames are shown, although B-frames are stored out of order."""
    given, out = tmp_path / f"in{suffix}", tmp_path / "out.mp4"
    options = {"x264-params": "bframes=2:b-adapt=0:scenecut=0:keyint=10"}
    with VideoWriter(given, 25, options=options) as writer:
        writer.write(torch.rand(FRAMES, 3, 32, 48, generator=torch.Generator().manual_seed(0)))
    assert main(["media", "transcode", str(given), str(out)]) == 0
    assert len(VideoReader(out)) == FRAMES


def test_frames_that_are_missing_without_an_error_are_an_error(
    video: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    timed = VideoReader.timed
    monkeypatch.setattr(VideoReader, "timed", lambda reader, start=0: islice(timed(reader, start), FRAMES - 1 - start))
    for command in (["transcode", str(video), str(tmp_path / "out.mkv")], ["decode", str(video), "-o", str(tmp_path)]):
        assert main(["media", *command]) == 1
        assert "lists 20 frames, but decoding ended after 19" in capsys.readouterr().err
    assert not (tmp_path / "out.mkv").exists()


@pytest.mark.parametrize("suffix", ["png", "npy", "jpg"])
def test_decode_names_files_by_the_number_of_the_frame(video: Path, tmp_path: Path, suffix: str) -> None:
    out = tmp_path / "frames"
    assert main(["media", "decode", str(video), "-o", str(out), "--every", "7", "--format", suffix]) == 0
    assert names(out) == [f"{number:06}.{suffix}" for number in (0, 7, 14)]
    reader = VideoReader(video)
    for number in (0, 7, 14):
        path = out / f"{number:06}.{suffix}"
        array = np.load(path) if suffix == "npy" else np.asarray(Image.open(path)).transpose(2, 0, 1)
        difference = np.abs(array.astype(int) - reader[number].numpy().astype(int)).max()
        assert difference <= (3 if suffix == "jpg" else 0)


def test_decode_writes_one_array_of_a_part(video: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "part.npy"
    arguments = ["--start", "0.2", "--end", "0.48", "--resize", "24x16"]
    assert main(["media", "decode", str(video), "-o", str(out), *arguments]) == 0
    expected = VideoReader(video, resize=(16, 24))[5:12]
    assert np.array_equal(np.load(out), expected.numpy())
    assert names(tmp_path) == ["part.npy"]
    assert capsys.readouterr().out.startswith("7 frames of 24 x 16 in ")


def test_decode_of_a_damaged_video_says_what_stays(
    damaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = len(VideoReader(damaged))
    assert 0 < there < FRAMES
    assert main(["media", "decode", str(damaged), "-o", str(tmp_path / "frames")]) == 1
    assert names(tmp_path / "frames") == [f"{number:06}.png" for number in range(there)]
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith(f"kept: {there} frames in ")
    assert "the last good frame is at" in said[1]
    assert main(["media", "decode", str(damaged), "-o", str(tmp_path / "all.npy")]) == 1
    assert names(tmp_path) == ["frames"]


def test_transcode_copies_the_sound_and_keeps_the_times(video: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.mov"
    assert main(["media", "transcode", str(video), str(out), "--crf", "0", "--resize", "96x64"]) == 0
    before, after = probe(video), probe(out)
    assert (after.frames, after.height, after.width, after.codec) == (FRAMES, 64, 96, "h264")
    assert (after.fps, after.variable_frame_rate) == (before.fps, False)
    assert VideoReader(out).times.tolist() == pytest.approx(VideoReader(video).times.tolist(), abs=1e-3)
    assert torch.equal(read_sound(out).samples, read_sound(video).samples)
    assert names(tmp_path) == ["out.mov"]


def test_transcode_of_a_part_at_another_rate(video: Path, tmp_path: Path) -> None:
    out = tmp_path / "part.mkv"
    arguments = ["--start", "0.2", "--end", "0.6", "--fps", "50", "--no-sound", "--crf", "0"]
    assert main(["media", "transcode", str(video), str(out), *arguments]) == 0
    reader, given = VideoReader(out), VideoReader(video)
    assert (len(reader), probe(out).audio) == (20, ())
    for position in range(20):
        assert float((reader[position].float() - given[5 + position // 2].float()).abs().max()) <= 2


def test_transcode_with_start_keeps_sound_beside_its_pictures(video: Path, tmp_path: Path) -> None:
    out = tmp_path / "part.mov"
    assert main(["media", "transcode", str(video), str(out), "--start", "0.3", "--end", "0.6"]) == 0
    reader, sound, whole = VideoReader(out), read_sound(out), read_sound(video).samples
    assert len(reader) == 7  # from frame 8, at 0.32 s
    first = round((0.32 + sound.start_s - float(reader.times[0])) * RATE)
    near = [
        float((whole[:, at : at + 4000] - sound.samples[:, :4000]).abs().max()) for at in range(first - 60, first + 60)
    ]
    assert min(near) == 0  # within a tick of Matroska's clock
    assert 0.2 < sound.samples.shape[1] / RATE < 0.28 + 4096 / RATE  # to a packet


def test_transcode_keeps_variable_times_ten_bits_and_turns(tmp_path: Path) -> None:
    given, out = tmp_path / "phone.mp4", tmp_path / "upright.mp4"
    times = [0.0, 0.1, 0.15, 0.4, 1.0]
    ramp = torch.linspace(0, 1, 48).expand(3, 32, 48)
    with av.open(str(given), "w") as container:
        stream = container.add_stream("libx264", rate=25, options=LOSSLESS)
        stream.height, stream.width, stream.pix_fmt = 32, 48, "yuv420p10le"
        stream.codec_context.time_base = Fraction(1, 1000)
        stream.set_display_rotation(90)
        for time in times:
            array = (ramp * 65535).to(torch.int32).permute(1, 2, 0).numpy().astype(np.uint16)
            frame = av.VideoFrame.from_ndarray(array, format="rgb48le").reformat(format="yuv420p10le")
            frame.pts, frame.time_base = round(time * 1000), stream.codec_context.time_base
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    assert main(["media", "transcode", str(given), str(out), "--crf", "1"]) == 0
    info = probe(out)
    assert (info.height, info.width, info.rotation_degrees, info.bits) == (48, 32, 0, 10)
    assert info.variable_frame_rate
    assert VideoReader(out).times.tolist() == pytest.approx(times, abs=1e-4)
    before, after = (VideoReader(path, dtype=torch.float32)[0] for path in (given, out))
    assert float((before - after).abs().mean()) < 2 / 1023


TIMES = {
    "held.gif": [0, 10, 20, 30, 40, 340],  # times in hundredths of a second, and the end
    "coarse.mp4": [0, 8, 12, 16, 24, 28],  # a clock of 1/25 s, where frames were dropped
    "dropped.avi": [0, 4, 8, 24, 28, 32],
    "held.mkv": [0, 4, 8, 12, 16, 604],
    "constant.mp4": [0, 4, 8, 12, 16, 20],
}


@pytest.mark.parametrize("suffix", ["mp4", "mkv", "webm", "mov", "avi"])
@pytest.mark.parametrize("name", TIMES)
def test_transcode_keeps_the_time_of_each_frame(tmp_path: Path, name: str, suffix: str) -> None:
    *hundredths, end = TIMES[name]
    given, out = tmp_path / name, tmp_path / f"out.{suffix}"
    if name.endswith("gif"):
        pictures = [Image.new("RGB", (64, 48), (40 * n, 80, 200 - 30 * n)) for n in range(5)]
        steps = [10 * (b - a) for a, b in pairwise(TIMES[name])]
        pictures[0].save(given, save_all=True, append_images=pictures[1:], duration=steps, loop=0)
    else:
        codec = "mjpeg" if name.endswith("avi") else "libx264"
        with av.open(str(given), "w", options={"video_track_timescale": "25"} if name == "coarse.mp4" else {}) as file:
            stream = file.add_stream(codec, rate=25)
            stream.width, stream.height, stream.pix_fmt = 64, 48, "yuvj420p" if codec == "mjpeg" else "yuv420p"
            stream.codec_context.time_base = Fraction(1, 25)
            for number, hundredth in enumerate(hundredths):
                frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 40 * number, np.uint8))
                frame.pts, frame.time_base = hundredth // 4, Fraction(1, 25)
                file.mux(stream.encode(frame))
            for packet in stream.encode(None):
                if packet.pts == hundredths[-1] // 4:
                    packet.duration = (end - hundredths[-1]) // 4
                file.mux(packet)
    assert VideoReader(given).times.tolist() == pytest.approx([each / 100 for each in hundredths], abs=0.001)
    assert main(["media", "transcode", str(given), str(out)]) == 0
    reader = VideoReader(out)
    assert reader.times.tolist() == pytest.approx([each / 100 for each in hundredths], abs=0.001)
    if suffix != "avi" and name != "dropped.avi":  # AVI does not store how long the last frame is shown
        assert reader.duration == pytest.approx(end / 100, abs=0.001)


@pytest.mark.parametrize(
    "times", [[0.0, 0.1, 0.2, 0.3, 0.4], [0.0, 0.08, 0.12, 0.16, 0.36], [0.04 * n for n in range(5)]]
)
def test_transcode_keeps_sound_beside_its_pictures(tmp_path: Path, times: list[float]) -> None:
    """The sound has a click at each white picture, and clicks and pictures stay together."""
    given, out = tmp_path / "clicks.mkv", tmp_path / "out.mkv"
    samples = torch.zeros(1, RATE)
    for time in times[1::2]:
        samples[0, round(time * RATE) : round(time * RATE) + 40] = 0.9
    with VideoWriter(given, 25, options=LOSSLESS) as writer:
        writer.write_sound(samples, RATE, "pcm_s16le")
        for number, time in enumerate(times):
            until = 1.0 if number == len(times) - 1 else None
            writer.write(torch.full((3, 32, 48), float(number % 2)), times=[time], until=until)
    assert main(["media", "transcode", str(given), str(out)]) == 0
    reader = VideoReader(out)
    sound = read_sound(out).samples[0]
    for frame in reader.timed():
        heard = bool(sound[max(0, round(frame.time * RATE) - 100) : round(frame.time * RATE) + 100].abs().max() > 0.5)
        assert heard == bool(frame.pixels.float().mean() > 127)
    assert reader.duration == pytest.approx(1.0, abs=0.002)


def test_a_failure_leaves_no_output(damaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["media", "transcode", str(damaged), str(tmp_path / "out.mp4"), "--no-sound"]) == 1
    assert "cannot be decoded" in capsys.readouterr().err
    assert names(tmp_path) == []


WRONG = [
    (["decode", "IN"], "Missing option"),
    (["decode", "IN", "-o", "OUT", "--resize", "32"], "expected WIDTHxHEIGHT"),
    (["decode", "IN", "-o", "OUT", "--resize", "0x32"], "expected WIDTHxHEIGHT"),
    (["decode", "IN", "-o", "OUT", "--start", "3", "--end", "2"], "is not after"),
    (["decode", "IN", "-o", "OUT", "--start", "60"], "no frame of"),
    (["decode", "IN", "-o", "OUT.npy", "--format", "png"], "is for a folder"),
    (["decode", "missing.mp4", "-o", "OUT"], "does not exist"),
    (["decode", "IN", "-o", "OUT", "--device", "abacus"], "is not known"),
    (["transcode", "IN", "IN"], "is the input file"),
    (["transcode", "IN", "OUT.mp4", "--codec", "abacus"], "no encoder 'abacus'"),
    (["transcode", "IN", "OUT.mp4", "--codec", "mpeg4", "--crf", "20"], "--crf does not apply to mpeg4"),
    (["transcode", "IN", "OUT.webm"], "cannot hold the pcm_s16le sound"),
    (["transcode", "IN", "OUT.abacus"], "FFmpeg writes no format with this suffix"),
    (["transcode", "IN", "OUT.mp4", "--start", "60"], "no frame of"),
    (["bench", "IN", "--streams", "0"], "expected numbers from 1"),
    (["bench", "IN", "--device", "abacus"], "is not known"),
]


@pytest.mark.parametrize(("arguments", "said"), WRONG)
def test_a_wrong_call_is_one_line_and_status_2(
    video: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    words = [each.replace("IN", str(video)).replace("OUT", str(tmp_path / "out")) for each in arguments]
    assert main(["media", *words]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert said in lines[0]
    assert names(tmp_path) == []


def test_bench_counts_frames_by_device_and_streams(video: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["media", "bench", str(video), "--device", "cpu,cuda", "--streams", "1,2", "--seconds", "0.2"]
    assert main([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(each["device"], each["streams"]) for each in told["rates"]] == [
        ("cpu", 1),
        ("cpu", 2),
        ("cuda", 1),
        ("cuda", 2),
    ]
    for each in told["rates"]:
        assert each["reason"] or (each["frames"] > 0 and each["seconds"] >= 0.2)
        assert each["fps"] == pytest.approx(each["frames"] / each["seconds"] if each["seconds"] else 0.0)
    assert told["rates"][0]["reason"] is None
    assert told["auto"]["device"] == "cpu"  # small pictures even with a GPU
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[0].split()[2:] == [
        "frames/s",
        *["frames/s", "a", "stream"],
        *["ms", "a", "frame,", "all", "streams"],
    ]
    assert 'device="auto" chooses cpu: ' in printed


@pytest.mark.parametrize("verb", ["decode", "transcode", "bench"])
def test_help_has_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["media", verb, "--help"]) == 0
    assert f"rooftop media {verb} walk.m" in capsys.readouterr().out
