"""Frames decoded by NVDEC equal those of the CPU within 2 of 255, in whatever order they are requested."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rooftop.media import DamagedVideoError, NoVideoDecoderError, VideoReader, release_decoders

pytestmark = pytest.mark.gpu

MakeVideo = Callable[..., Path]
FRAMES = 30
H264 = {"bf": "3", "g": "8", "preset": "fast"}
UNEVEN = [number * 40 + (number * number * 7) % 31 for number in range(FRAMES)]  # in units of 1/1000 s
LARGE: dict[str, Any] = {"height": 240, "width": 320}
HEVC = {"g": "8", "x265-params": "log-level=none:open-gop=1"}
VP9 = {"g": "8", "lag-in-frames": "10", "deadline": "realtime", "cpu-used": "8"}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "large-b-frames.mp4": ("libx264", {"options": H264}),
    "large-b-frames.mkv": ("libx264", {"options": H264}),
    "large-b-frames.ts": ("libx264", {"options": H264}),
    "large-raw.h264": ("libx264", {"options": H264}),
    "large-variable.mp4": ("libx264", {"options": H264, "ticks": UNEVEN, "tick": Fraction(1, 1000)}),
    "large-open-gop.mkv": (
        "libx264",
        {"options": {**H264, "x264-params": "open-gop=1:scenecut=0:keyint=8:min-keyint=8"}},
    ),
    "large-odd-height.mp4": ("libx264", {"options": H264, "height": 242, "width": 318}),
    "large-turned.mp4": ("libx264", {"options": H264, "degrees": 90}),
    "large-hevc.mp4": ("libx265", {"options": HEVC}),
    "large-hevc-10.mp4": ("libx265", {"options": HEVC, "pixel_format": "yuv420p10le"}),
    "large-hevc-444.mp4": ("libx265", {"options": HEVC, "pixel_format": "yuv444p"}),
    "large-vp9.webm": ("libvpx-vp9", {"options": VP9}),
}


@pytest.fixture(params=KINDS)
def video(request: pytest.FixtureRequest, make_video: MakeVideo) -> Path:
    codec, given_settings = KINDS[request.param]
    return make_video(request.param, codec, **{**LARGE, **given_settings})


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, in levels of 255."""
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    return (found.cpu().double() - expected.double()).abs().max().item() * (1 if found.dtype == torch.uint8 else 255)


def test_every_frame_in_order_by_position_and_by_time(video: Path) -> None:
    cpu, gpu = VideoReader(video), VideoReader(video, device="cuda")
    assert gpu.device == torch.device("cuda", 0)
    assert gpu.fallback_reason is None
    expected = list(cpu)
    assert len(gpu) == len(expected) == FRAMES
    for position, (frame, other) in enumerate(zip(gpu, expected, strict=True)):
        assert frame.is_cuda
        assert apart(frame, other) <= 2, position
    together = torch.stack(expected)
    assert apart(gpu[:], together) <= 2
    assert apart(gpu.frames_at(gpu.times), together) <= 2
    assert apart(torch.stack([frame for frame, _, _ in gpu.timed(11)]), together[11:]) <= 2
    for position in (29, 3, 29, 28, 0, 17, 16, 29):  # backward jumps, even after the end
        assert apart(gpu[position], expected[position]) <= 2, position


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(positions=st.lists(st.integers(-FRAMES, FRAMES - 1), min_size=1, max_size=8))
def test_any_frames_in_any_order(video: Path, positions: list[int]) -> None:
    cpu, gpu = VideoReader(video), VideoReader(video, device="cuda")
    assert apart(gpu.take(positions), cpu.take(positions)) <= 2


@pytest.mark.parametrize("size", [(224, 224), (100, 131), (300, 500)])
def test_resized_and_normalized(video: Path, size: tuple[int, int]) -> None:
    how: dict[str, Any] = {"resize": size, "dtype": torch.float32}
    assert apart(VideoReader(video, device="cuda", **how)[::7], VideoReader(video, **how)[::7]) <= 2
    how["normalize"] = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert apart(VideoReader(video, device="cuda", **how)[::7], VideoReader(video, **how)[::7]) <= 2 / 0.224
    assert apart(VideoReader(video, device="cuda", resize=size)[::7], VideoReader(video, resize=size)[::7]) <= 2


def test_nv12(make_video: MakeVideo) -> None:
    path = make_video("large-b-frames.mp4", "libx264", options=H264, **LARGE)
    assert apart(VideoReader(path, device="cuda", output="nv12")[:], VideoReader(path, output="nv12")[:]) == 0


def test_sizes_one_after_another(make_video: MakeVideo) -> None:
    """A decoder for 1280 x 530 must not be used again for 1280 x 532."""
    readers = []
    for height in (530, 532, 530):
        path = make_video(f"wide-{height}.mp4", "libx264", height=height, width=1280, frames=6, options=H264)
        readers.append((VideoReader(path, device="cuda"), VideoReader(path)))
    for gpu, cpu in readers:
        assert apart(gpu[5], cpu[5]) <= 2
    for gpu, cpu in readers:
        assert apart(gpu[1], cpu[1]) <= 2


def test_streams_and_threads(make_video: MakeVideo) -> None:
    path = make_video("large-b-frames.mp4", "libx264", options=H264, **LARGE)
    expected = torch.stack(list(VideoReader(path)))

    def read(number: int) -> float:
        with torch.cuda.stream(torch.cuda.Stream()):
            frames = torch.stack(list(VideoReader(path, device="cuda")))
            torch.cuda.current_stream().synchronize()
        return apart(frames, expected)

    with ThreadPoolExecutor(8) as pool:
        assert max(pool.map(read, range(16))) <= 2
    shared = VideoReader(path, device="cuda")
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda position: shared[position], range(FRAMES)))
    torch.cuda.synchronize()
    assert apart(torch.stack(found), expected) <= 2


def test_frames_stay_while_others_are_decoded(make_video: MakeVideo) -> None:
    path = make_video("long.mp4", "libx264", frames=200, options=H264, **LARGE)
    gpu = list(VideoReader(path, device="cuda", output="nv12"))
    for frame, other in zip(gpu, VideoReader(path, output="nv12"), strict=True):
        assert torch.equal(frame.cpu(), other)


def test_a_decoder_that_waits_is_used_again(make_video: MakeVideo) -> None:
    one, other = (make_video(f"again-{n}.mp4", "libx264", frames=n, options=H264, **LARGE) for n in (17, 23))
    release_decoders()
    for path in (one, other, one):
        reader = VideoReader(path, device="cuda")
        for _ in range(2):
            assert apart(torch.stack(list(reader)), torch.stack(list(VideoReader(path)))) <= 2
        next(iter(reader))
    assert release_decoders() == 1
    assert apart(VideoReader(one, device="cuda")[:], VideoReader(one)[:]) <= 2


def test_damage_comes_after_the_frames_before_it(make_video: MakeVideo) -> None:
    content = make_video("large-b-frames.mkv", "libx264", options=H264, **LARGE).read_bytes()
    content = content[: len(content) * 2 // 3]
    for read in (iter, VideoReader.timed, lambda reader: reader.clips(1)):
        given: dict[str, list[object]] = {"cpu": [], "cuda": []}
        for device, frames in given.items():
            with pytest.raises(DamagedVideoError, match="last good frame is at"):
                frames.extend(read(VideoReader(content, device=device)))  # type: ignore[operator]
        assert len(given["cpu"]) == len(given["cuda"]) > 0


def test_no_frame_goes_through_the_host(make_video: MakeVideo) -> None:
    path = make_video("large-b-frames.mp4", "libx264", options=H264, **LARGE)
    reader = VideoReader(path, device="cuda", dtype=torch.float16, resize=(224, 224))
    list(reader)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        list(reader)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    # batches of 1, 2, 4, 8, 8 and 7 frames
    assert sum("frame_to_resized_rgb" in name for name in names) == 1 + 1 + 1 + 1 + 2
    assert not [name for name in names if "HtoD" in name or "DtoH" in name]


def test_what_nvdec_does_not_decode(make_video: MakeVideo) -> None:
    for name, pixels in (("large-ten.mp4", "yuv420p10le"), ("large-422.mp4", "yuv422p")):
        path = make_video(name, "libx264", pixel_format=pixels, options=H264, height=720, width=1280, frames=4)
        with pytest.raises(NoVideoDecoderError, match=r'NVDEC does not decode this.* Use device="cpu"'):
            VideoReader(path, device="cuda")
        auto = VideoReader(path, device="auto")
        assert auto.device.type == "cpu"
        assert "NVDEC does not decode" in (auto.fallback_reason or "")
        assert torch.equal(auto[3], VideoReader(path)[3])


def test_odd_sizes_are_left_to_the_cpu(make_video: MakeVideo) -> None:
    path = make_video("large-odd.webm", "libvpx-vp9", options=VP9, height=721, width=1281, frames=3)
    with pytest.raises(NoVideoDecoderError, match="odd size"):
        VideoReader(path, device="cuda")
    auto = VideoReader(path, device="auto")
    assert auto.device.type == "cpu"
    assert "odd size" in (auto.fallback_reason or "")
    assert torch.equal(auto[2], VideoReader(path)[2])


def test_auto_takes_the_faster_one(make_video: MakeVideo) -> None:
    small = VideoReader(make_video("clips.mp4"), device="auto")
    assert small.device.type == "cpu"
    assert "faster" in (small.fallback_reason or "")


def test_a_device_that_is_not_there(make_video: MakeVideo) -> None:
    with pytest.raises(NoVideoDecoderError, match="there is no cuda:63"):
        VideoReader(make_video("clips.mp4"), device="cuda:63")


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_a_file_that_was_cut_off_gives_what_is_left(make_video: MakeVideo, share: float) -> None:
    content = make_video("large-b-frames.mkv", "libx264", options=H264, **LARGE).read_bytes()
    content = content[: int(len(content) * share)]
    read: dict[str, list[torch.Tensor]] = {}
    for device in ("cpu", "cuda"):
        frames = iter(VideoReader(content, device=device))
        read[device] = []
        with pytest.raises(DamagedVideoError, match="last good frame is at"):
            read[device].extend(frames)
    assert len(read["cuda"]) == len(read["cpu"]) > 0
    assert apart(torch.stack(read["cuda"]), torch.stack(read["cpu"])) <= 2


def test_wrong_bytes_neither_hang_nor_crash(make_video: MakeVideo) -> None:
    content = make_video("large-b-frames.mkv", "libx264", options=H264, **LARGE).read_bytes()
    generator = torch.Generator().manual_seed(5)
    for _ in range(30):
        damaged = bytearray(content)
        for place in torch.randint(len(content), (8,), generator=generator).tolist():
            damaged[place] ^= 0x55
        try:
            reader = VideoReader(bytes(damaged), device="cuda")
            assert sum(1 for _ in reader) <= 2 * FRAMES
        except (DamagedVideoError, NoVideoDecoderError, ValueError):
            continue
    whole = VideoReader(content, device="cuda")
    assert apart(whole[7], VideoReader(content)[7]) <= 2
