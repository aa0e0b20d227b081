"""`VideoReader`: any frame, requested in any order, equals that of decoding from the beginning, bit by bit."""

from __future__ import annotations

import gc
import io
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftop.errors import InputError
from rooftop.media import NoVideoDecoderError, VideoReader, reading

MakeVideo = Callable[..., Path]
ReadNumber = Callable[[Tensor], int]
FRAMES = 30

some = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def test_all_frames_in_order_with_the_last(any_video: Path, read_number: ReadNumber) -> None:
    reader = VideoReader(any_video)
    assert [read_number(frame) for frame in reader] == list(range(FRAMES))
    assert len(reader) == FRAMES
    assert read_number(reader[-1]) == FRAMES - 1


@pytest.fixture
def sequential(any_video: Path) -> list[Tensor]:
    """All frames of a video, in order."""
    return list(VideoReader(any_video))


@some
@given(positions=st.lists(st.integers(-FRAMES, FRAMES - 1), min_size=1, max_size=10))
def test_any_frame_in_any_order(any_video: Path, sequential: list[Tensor], positions: list[int]) -> None:
    reader = VideoReader(any_video)
    for position in positions:
        assert torch.equal(reader[position], sequential[position])
    assert torch.equal(reader.take(positions), torch.stack([sequential[position] for position in positions]))


@some
@given(first=st.integers(-40, 40), last=st.integers(-40, 40), step=st.integers(-7, 7).filter(bool))
def test_slices_are_those_of_a_list(
    any_video: Path, sequential: list[Tensor], first: int, last: int, step: int
) -> None:
    reader, numbers = VideoReader(any_video), range(FRAMES)[first:last:step]
    taken = reader[first:last:step]
    assert taken.shape == (len(numbers), 3, reader.height, reader.width)
    for frame, number in zip(taken, numbers, strict=True):
        assert torch.equal(frame, sequential[number])


@pytest.mark.parametrize("name", ["mpeg2.wmv", "mpeg2.mxf", "mpeg4.wmv"])
def test_formats_that_store_decoding_times(make_video: MakeVideo, read_number: ReadNumber, name: str) -> None:
    """FFmpeg derives the times at which frames are shown for MPEG-4 in ASF and MPEG-2 in MXF, not for MPEG-2 in ASF."""
    codec = "mpeg4" if "mpeg4" in name else "mpeg2video"
    reader = VideoReader(make_video(name, codec, options={"bf": "2", "g": "8"}))
    timed = list(reader.timed())
    assert [read_number(pixels) for pixels, *_ in timed] == list(range(FRAMES))
    assert [time for _, time, _ in timed] == pytest.approx([timed[0].time + 0.04 * n for n in range(FRAMES)])
    assert [read_number(reader[position]) for position in (17, 3, -1)] == [17, 3, FRAMES - 1]


def test_times_and_durations_follow_each_other(any_video: Path, read_number: ReadNumber) -> None:
    reader = VideoReader(any_video)
    timed = list(reader.timed())
    assert torch.equal(torch.tensor([each.time for each in timed], dtype=torch.float64), reader.times)
    assert torch.allclose(torch.tensor([each.duration for each in timed], dtype=torch.float64), reader.durations)
    assert torch.allclose(reader.times[:-1] + reader.durations[:-1], reader.times[1:])
    assert reader.duration == pytest.approx(float(reader.times[-1] + reader.durations[-1] - reader.times[0]))
    middles = reader.times + reader.durations / 2
    assert [read_number(frame) for frame in reader.frames_at(middles)] == list(range(FRAMES))
    assert [read_number(each.pixels) for each in reader.timed(start=17)] == list(range(17, FRAMES))


def test_key_frames_are_where_a_group_begins(make_video: MakeVideo) -> None:
    options = {"g": "8", "bf": "2", "sc_threshold": "0"}
    assert VideoReader(make_video("keys.mp4", options=options)).key_frames == [0, 8, 16, 24]


def test_a_variable_frame_rate_keeps_its_times(make_video: MakeVideo, read_number: ReadNumber) -> None:
    ticks = [0, 10, 500, 510, 520, 2000]
    path = make_video("uneven.mp4", frames=6, ticks=ticks, tick=Fraction(1, 1000), options={"bf": "2"})
    reader = VideoReader(path)
    assert reader.times.tolist() == pytest.approx([tick / 1000 for tick in ticks])
    assert reader.durations[:-1].tolist() == pytest.approx([0.01, 0.49, 0.01, 0.01, 1.48])
    assert [read_number(frame) for frame in reader.frames_at([0.0, 0.009, 0.01, 0.4999, 1.999])] == [0, 0, 1, 1, 4]


def test_a_time_that_the_clock_of_the_file_cannot_hold_is_that_of_its_frame(
    make_video: MakeVideo, read_number: ReadNumber
) -> None:
    """Matroska counts milliseconds: at 30 frames a second, frame 2 is at 0.067 s in the file, which is after 2 / 30
    s."""
    path = make_video("thirty.mkv", tick=Fraction(1, 30), options={"bf": "2"})
    reader = VideoReader(path)
    assert float(reader.times[2]) > 2 / 30
    assert [read_number(frame) for frame in reader.frames_at([n / 30 for n in range(30)])] == list(range(30))
    for time in (-0.01, 1.1, float("nan"), float("inf")):
        with pytest.raises(InputError, match=r"is shown at .* s: expected 0 to 1"):
            reader.frames_at([time])


@pytest.mark.parametrize(
    ("frames", "stride", "starts"),
    [(8, None, [0, 8, 16]), (8, 5, [0, 5, 10, 15, 20]), (4, 10, [0, 10, 20]), (30, 1, [0]), (31, 1, [])],
)
def test_clips(
    make_video: MakeVideo, read_number: ReadNumber, frames: int, stride: int | None, starts: list[int]
) -> None:
    clips = list(VideoReader(make_video("clips.mp4")).clips(frames, stride))
    numbers = [[read_number(frame) for frame in clip] for clip in clips]
    assert numbers == [list(range(start, start + frames)) for start in starts]


def test_clips_need_frames(make_video: MakeVideo) -> None:
    with pytest.raises(InputError, match="expected 1 or more"):
        VideoReader(make_video("clips.mp4")).clips(0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_floating_frames_are_the_bytes_over_255(make_video: MakeVideo, dtype: torch.dtype) -> None:
    path = make_video("clips.mp4")
    exact, rounded = VideoReader(path, dtype=dtype)[7], VideoReader(path)[7]
    assert exact.dtype == dtype
    assert float(exact.min()) >= 0
    assert float(exact.max()) <= 1
    slack = 0.51 + 255 * torch.finfo(dtype).eps
    assert float((exact.double() * 255 - rounded).abs().max()) <= slack


def test_resized_frames(make_video: MakeVideo, read_number: ReadNumber) -> None:
    path = make_video("clips.mp4")
    plain, resized = VideoReader(path, dtype=torch.float32), VideoReader(path, dtype=torch.float32, resize=(20, 30))
    assert (resized.height, resized.width) == (20, 30)
    expected = torch.nn.functional.interpolate(plain[5][None], (20, 30), mode="bilinear", antialias=True)[0]
    torch.testing.assert_close(resized[5], expected, rtol=0, atol=1e-5)
    assert [read_number(frame) for frame in VideoReader(path, resize=(64, 96))] == list(range(FRAMES))
    for wrong in ((0, 3), (3,), "ab", (2.5, 3)):
        with pytest.raises(InputError, match=r"expected \(height, width\)"):
            VideoReader(path, resize=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("degrees", [90, 180, -90])
def test_a_turned_video_is_given_upright(make_video: MakeVideo, degrees: int) -> None:
    plain = VideoReader(make_video("upright.mp4", frames=2, options={"qp": "0"}))[1]
    reader = VideoReader(
        make_video(f"turned{degrees}.mp4", frames=2, options={"qp": "0"}, degrees=degrees), dtype=torch.uint8
    )
    turned = torch.rot90(plain, degrees // 90, (1, 2))
    assert (reader.height, reader.width) == turned.shape[1:]
    assert torch.equal(reader[1], turned)
    resized = VideoReader(reader.source.path, resize=(40, 20))
    assert resized[0].shape == (3, 40, 20)


def test_photographs_that_say_how_they_are_turned(tmp_path: Path) -> None:
    """EXIF's orientation 6: the top row in the file is the right side. PyAV does not expose EXIF as side data of a
    frame."""
    av, image = pytest.importorskip("av"), pytest.importorskip("PIL.Image")
    pixels = np.zeros((32, 64, 3), np.uint8)
    pixels[:16] = 255
    exif, jpeg = image.Exif(), io.BytesIO()
    exif[0x0112] = 6
    image.fromarray(pixels).save(jpeg, "jpeg", exif=exif)
    source = av.open(io.BytesIO(jpeg.getvalue()))
    with av.open(str(tmp_path / "turned.mkv"), "w") as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        for number in range(2):
            packet = av.Packet(jpeg.getvalue())
            packet.pts = packet.dts = 1000 * number
            packet.time_base, packet.stream, packet.is_keyframe = stream.time_base, stream, True
            target.mux(packet)
    source.close()
    frame = VideoReader(tmp_path / "turned.mkv")[1]
    assert frame.shape == (3, 64, 32)
    assert frame[:, :, 16:].min() > 240
    assert frame[:, :, :16].max() < 15


def test_bytes_are_read_as_files_are(make_video: MakeVideo) -> None:
    path = make_video("clips.mp4")
    from_bytes = VideoReader(path.read_bytes())
    assert torch.equal(from_bytes[11:13], VideoReader(path)[11:13])


def test_loops_and_positions_do_not_disturb_each_other(make_video: MakeVideo, read_number: ReadNumber) -> None:
    reader = VideoReader(make_video("clips.mp4"))
    seen = []
    for one, other in zip(reader, reader, strict=True):
        seen.append((read_number(one), read_number(other), read_number(reader[-1])))
    assert seen == [(number, number, FRAMES - 1) for number in range(FRAMES)]


def test_threads_and_workers_share_a_reader(make_video: MakeVideo, read_number: ReadNumber) -> None:
    reader = VideoReader(make_video("clips.mp4"))
    reader[3]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda n: read_number(reader[n]), range(29, -1, -1))) == list(range(29, -1, -1))
    copied = pickle.loads(pickle.dumps(reader))
    assert torch.equal(copied[9], reader[9])
    with reader:
        pass
    assert read_number(reader[4]) == 4  # opened again


def test_a_position_that_is_not_there(make_video: MakeVideo) -> None:
    reader = VideoReader(make_video("clips.mp4"))
    for position in (30, -31):
        with pytest.raises(IndexError, match="it has 30 frames, 0 to 29"):
            reader[position]
    with pytest.raises(TypeError):
        reader["3"]  # type: ignore[index]


def test_the_device_is_told_and_cuda_refused(make_video: MakeVideo) -> None:
    path = make_video("clips.mp4")
    cpu, auto = VideoReader(path), VideoReader(path, device="auto")
    assert (cpu.device.type, cpu.fallback_reason) == ("cpu", None)
    assert auto.device.type == "cpu"
    assert "NVDEC" in (auto.fallback_reason or "")
    with pytest.raises(NoVideoDecoderError, match=r'no NVDEC.* Use device="cpu"'):
        VideoReader(path, device="cuda")
    with pytest.raises(InputError, match='expected "cpu", "auto", "cuda" or "cuda:1"'):
        VideoReader(path, device="abacus")
    with pytest.raises(InputError, match=r"expected one of torch\.uint8"):
        VideoReader(path, dtype=torch.int32)
    with pytest.raises(InputError, match='expected "rgb"'):
        VideoReader(path, output="bgr")


def test_nv12_is_what_the_video_has(make_video: MakeVideo) -> None:
    path = make_video("clips.mp4")
    reader = VideoReader(path, output="nv12")
    with pytest.importorskip("av").open(str(path)) as container:
        frames = [frame.reformat(format="nv12").to_ndarray() for frame in container.decode(video=0)]
    assert torch.equal(reader[:], torch.from_numpy(np.stack(frames)))
    assert torch.equal(torch.stack(list(reader)), reader[:])
    odd = make_video("odd-nv12.webm", "libvpx-vp9", height=33, width=49)
    deep = make_video("deep-nv12.mp4", pixel_format="yuv420p10le")
    for path in (odd, deep):
        with pytest.raises(InputError, match=r'8 bits of 4:2:0 in even sizes.* use output="rgb"'):
            VideoReader(path, output="nv12")[0]


def test_normalized_frames(make_video: MakeVideo) -> None:
    path = make_video("clips.mp4")
    mean, std = torch.tensor((0.485, 0.456, 0.406)), torch.tensor((0.229, 0.224, 0.225))
    plain = VideoReader(path, dtype=torch.float32, resize=(20, 30))
    normal = VideoReader(path, dtype=torch.float32, resize=(20, 30), normalize=(mean.tolist(), std.tolist()))
    expected = (plain[3:9] - mean[:, None, None]) / std[:, None, None]
    torch.testing.assert_close(normal[3:9], expected, rtol=0, atol=1e-5)
    half = VideoReader(path, dtype=torch.float16, resize=(20, 30), normalize=(mean.tolist(), std.tolist()))
    torch.testing.assert_close(half[3:9].float(), expected, rtol=0, atol=5e-3)


@pytest.mark.parametrize("together", [1, 3, 8])
def test_a_frame_that_cannot_be_converted_comes_after_those_before_it(
    together: int, make_video: MakeVideo, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = VideoReader(make_video("clips.mp4"))
    expected, converted = list(reader), reading.to_tensor

    def refused(frame: Any, *rest: Any) -> torch.Tensor:
        if frame.pts == expected_tick:
            raise InputError("no such colours")
        return converted(frame, *rest)

    expected_tick = reader.index.pts[10]
    monkeypatch.setattr(VideoReader, "_at_once", together)
    monkeypatch.setattr(reading, "to_tensor", refused)
    monkeypatch.setattr(reading, "to_tensors", lambda frames, *rest: [refused(frame, *rest) for frame in frames])
    found: list[torch.Tensor] = []
    with pytest.raises(InputError, match="no such colours"):
        found.extend(reader)
    assert len(found) == 10
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("together", [2, 8])
def test_frames_that_are_converted_together_are_the_same(
    together: int, make_video: MakeVideo, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = VideoReader(make_video("clips.mp4"))
    expected = reader[:]
    monkeypatch.setattr(VideoReader, "_at_once", together)
    assert torch.equal(torch.stack(list(reader)), expected)
    assert torch.equal(torch.stack([each.pixels for each in reader.timed(7)]), expected[7:])
    positions = [9, 3, -1, 9, 0, 3, 17, 16]
    assert torch.equal(reader.take(positions), expected[positions])
    assert reader.take([]).shape == (0, *expected.shape[1:])
    for frames, stride in ((4, 4), (3, 7), (5, 2)):
        starts = range(0, len(expected) - frames + 1, stride)
        for clip, start in zip(reader.clips(frames, stride), starts, strict=True):
            assert torch.equal(clip, expected[start : start + frames])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("degrees", [0, 90])
def test_frames_that_were_read_leave_at_once(make_video: MakeVideo, device: str, degrees: int) -> None:
    """The frames' memory belongs to a decoder. A reference cycle would keep the decoder until Python collects
    garbage."""
    from av import VideoFrame

    reader = VideoReader(make_video(f"gone{degrees}.mp4", width=64, degrees=degrees), device=device, resize=(20, 30))
    _ = reader[0], len(reader)
    gc.collect()
    gc.disable()
    try:
        given = [*reader, reader[-1], reader[3], *reader.take([4, 2])]
        del reader, given
        frames = [each for each in gc.get_objects() if type(each) is VideoFrame]
        assert not [each for each in frames if each.width]  # a decoder keeps an empty frame ready
    finally:
        gc.enable()
