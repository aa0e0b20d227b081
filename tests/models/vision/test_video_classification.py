"""Frames of a video get the same classes as photographs, in the order of time, up to the damage if there is any."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from skimage import data
from torch import Tensor, nn

from rooftop.errors import InputError, ModelRunError
from rooftop.inference import Engine
from rooftop.models import SampledVideo, classify, classify_video, load_images, resnet18
from rooftop.models.images import STD, Preprocessing
from rooftop.models.vision.video_classification import _sampled

pytest.importorskip("av")
from rooftop.media import DamagedVideoError, VideoReader, VideoWriter

FPS, FRAMES = 10, 35
COLOURS = ("red", "green", "blue")
SMALL = Preprocessing(resize=32, crop=28)


class Means(nn.Module):
    """Logits are the means of the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3)
        self.head.weight.data = torch.eye(3)
        nn.init.zeros_(self.head.bias)
        self.batches: list[int] = []

    def forward(self, x: Tensor) -> Tensor:  # (B, 3, H, W)
        self.batches.append(len(x))
        return self.head(x.mean((2, 3)))


def colour_of(number: int) -> int:
    return number // 5 % 3  # colours of COLOURS, two a second


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3.5 s of colours that change every half second, with a key frame every second."""
    path = tmp_path_factory.mktemp("videos") / "colours.mp4"
    with VideoWriter(path, FPS, options={"g": "10", "bf": "2"}) as writer:
        for number in range(FRAMES):
            frame = torch.zeros(3, 48, 64, dtype=torch.uint8)
            frame[colour_of(number)] = 200
            writer.write(frame)
    return path


@pytest.fixture(scope="module")
def photo_clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A photograph that moves, as a video."""
    path = tmp_path_factory.mktemp("videos") / "cat.mp4"
    cat = torch.from_numpy(data.chelsea())
    with VideoWriter(path, FPS, options={"crf": "12"}) as writer:
        for number in range(3):
            writer.write(cat[: 2 * 149, 10 * number : 10 * number + 400].permute(2, 0, 1).contiguous())
    return path


@pytest.fixture(scope="module")
def photographs(photo_clip: Path) -> list[Path]:
    """The frames of `photo_clip`."""
    paths = []
    for number, frame in enumerate(VideoReader(photo_clip)):
        paths.append(photo_clip.with_name(f"{number}.png"))
        Image.fromarray(frame.permute(1, 2, 0).numpy()).save(paths[-1])
    return paths


@pytest.mark.parametrize("every", [0.5, 1.0, 0.1, 0.01, 1e-300, 2.4, 100.0])
def test_each_frame_has_the_classes_of_what_it_shows(every: float, clip: Path) -> None:
    model = Means()
    frames = SampledVideo(clip, SMALL, every=every)
    found = list(classify_video(model, frames, classes=COLOURS, top=2, batch_size=4))
    step = max(1, round(every * FPS))
    assert [frame.position for frame in found] == frames.positions == list(range(0, FRAMES, step))
    assert [frame.time for frame in found] == pytest.approx([number / FPS for number in range(0, FRAMES, step)])
    for frame in found:
        assert frame.guesses[0].name == COLOURS[colour_of(frame.position)]
        assert len(frame.guesses) == 2
    assert model.batches == [4] * (len(found) // 4) + [len(found) % 4] * (len(found) % 4 > 0)


def test_of_a_variable_frame_rate_it_is_the_frame_shown_then() -> None:
    times = torch.tensor([5.0, 5.1, 5.9, 6.0, 8.5, 8.9996, 9.3], dtype=torch.float64)
    durations = torch.cat((times.diff(), torch.tensor([0.5], dtype=torch.float64)))
    # 5.0 | 6.0 | 7.0 and 8.0, both shown by the frame of 6.0 | 9.0, 0.4 ms after the beginning of its frame
    assert _sampled(times, durations, 1.0) == [0, 3, 5]
    assert _sampled(times, durations, 0.25) == [0, 1, 3, 4, 5, 6]
    assert _sampled(times[:0], durations[:0], 1.0) == []


@pytest.mark.parametrize(
    ("preprocessing", "levels"),
    [
        (Preprocessing(), 1.7),  # smaller
        (Preprocessing(resize=400, crop=256), 1.7),  # larger
        (Preprocessing(64, 64, Image.Resampling.BICUBIC), 2.5),
        (Preprocessing(resize=100, crop=120), 1.7),  # black beyond the edges above and below
        (Preprocessing(resize=100, crop=201), 1.7),  # and beside
    ],
)
def test_a_frame_is_prepared_as_a_photograph_of_it(
    preprocessing: Preprocessing, levels: float, photo_clip: Path, photographs: list[Path]
) -> None:
    expected = load_images(photographs, preprocessing)
    frames = SampledVideo(photo_clip, preprocessing, every=0.1)
    (found,) = frames.batches(len(photographs))
    assert (found.shape, found.dtype) == (expected.shape, torch.float32)
    torch.testing.assert_close(found, expected, rtol=0, atol=levels / 255 / min(STD))
    assert (found - expected).abs().mean() < 0.5 / 255 / min(STD)


def test_logits_are_those_of_the_photographs(photo_clip: Path, photographs: list[Path]) -> None:
    torch.manual_seed(0)
    model = resnet18(num_classes=10).eval()
    photos = classify(model, photographs, top=10)
    frames = list(classify_video(model, SampledVideo(photo_clip, every=0.1), top=10))
    assert len(frames) == len(photos) == 3
    for frame, photo in zip(frames, photos, strict=True):
        ours, theirs = ({guess.index: guess.probability for guess in each.guesses} for each in (frame, photo))
        assert [ours[index] for index in range(10)] == pytest.approx([theirs[index] for index in range(10)], rel=2e-2)
    once = list(classify_video(model, photo_clip, top=1))  # one frame a second
    assert [frame.position for frame in once] == [0]
    (guess,), first = once[0].guesses, frames[0].guesses[0]
    assert guess.index == first.index
    # batches of one frame compared with batches of three
    assert guess.probability == pytest.approx(first.probability, rel=1e-5)
    assert list(classify_video(model, photo_clip.read_bytes(), top=1)) == once


def until_damage(things: Iterator[Any]) -> tuple[list[Any], DamagedVideoError]:
    """All results, and the error after them."""
    found = []
    try:
        for each in things:
            found.append(each)  # noqa: PERF402
    except DamagedVideoError as error:
        return found, error
    pytest.fail("no damage was reported")


def test_a_video_that_was_cut_off_gives_all_its_frames_and_then_the_error(clip: Path, tmp_path: Path) -> None:
    with VideoWriter(tmp_path / "whole.mkv", FPS, options={"g": "10", "bf": "0"}) as writer:
        writer.write(torch.stack(list(VideoReader(clip))))
    content = (tmp_path / "whole.mkv").read_bytes()
    cut = tmp_path / "cut.mkv"
    cut.write_bytes(content[: len(content) * 2 // 3])
    readable = len(VideoReader(cut))
    assert 5 < readable < FRAMES
    found, error = until_damage(
        classify_video(Means(), SampledVideo(cut, SMALL, every=0.2), classes=COLOURS, batch_size=4)
    )
    assert [frame.position for frame in found] == list(range(0, readable, 2))
    assert all(frame.guesses[0].name == COLOURS[colour_of(frame.position)] for frame in found)
    assert "cut.mkv is damaged: " in str(error)
    assert error.last_good_time == pytest.approx((readable - 1) / FPS, abs=0.01)


def test_frames_before_damage_in_the_middle_and_then_the_error(clip: Path) -> None:
    content = bytearray(clip.read_bytes())
    middle = slice(len(content) * 3 // 8, len(content) // 2)
    content[middle] = b"\xff" * (middle.stop - middle.start)
    damaged = bytes(content)
    expected, _ = until_damage(VideoReader(damaged)[number] for number in range(FRAMES))
    assert 0 < len(expected) < FRAMES
    found, _ = until_damage(classify_video(Means(), SampledVideo(damaged, SMALL, every=0.1), batch_size=64))
    assert [frame.position for frame in found] == list(range(len(expected)))


def test_what_goes_wrong(clip: Path, tmp_path: Path) -> None:
    for every in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match="expected a number of seconds above 0"):
            SampledVideo(clip, every=every)
    with pytest.raises(InputError, match="expected BILINEAR or BICUBIC"):
        SampledVideo(clip, Preprocessing(interpolation=Image.Resampling.BOX))
    with pytest.raises(InputError, match="does not exist"):
        SampledVideo(tmp_path / "missing.mp4")
    with pytest.raises(ValueError, match="expected top and batch_size of at least 1"):
        classify_video(Means(), clip, top=0)
    with pytest.raises(InputError, match="got 1 names of classes, but the model has 3 classes"):
        list(classify_video(Means(), SampledVideo(clip, SMALL), classes=["a"]))
    broken = Means()
    broken.head.bias.data[0] = float("nan")
    with pytest.raises(ModelRunError, match=r"output for the frame at 0\.000 s is not finite"):
        list(classify_video(broken, SampledVideo(clip, SMALL)))
    with pytest.raises(ModelRunError, match=r"gave shape \(4, 3, 28, 28\) for 4 frames"):
        list(classify_video(nn.Identity(), SampledVideo(clip, SMALL)))


def test_progress_is_told_after_each_batch(clip: Path) -> None:
    told: list[tuple[str, float]] = []
    note: Callable[[str, float], None] = lambda *step: told.append(step)  # noqa: E731
    list(classify_video(Means(), SampledVideo(clip, SMALL), batch_size=3, progress=note))
    assert told == [("classified 3 of 4 frames", 0.75), ("classified 4 of 4 frames", 1.0)]


@pytest.mark.gpu
@pytest.mark.parametrize("interpolation", [Image.Resampling.BILINEAR, Image.Resampling.BICUBIC])
def test_on_a_gpu_no_frame_crosses_the_bus(interpolation: Image.Resampling, tmp_path: Path) -> None:
    path = tmp_path / "large.mp4"
    picture = torch.from_numpy(data.astronaut()).permute(2, 0, 1).repeat(1, 2, 3)[:, :720, :1280]
    with VideoWriter(path, FPS, options={"preset": "ultrafast", "crf": "40"}) as writer:
        for number in range(32):
            writer.write(picture.roll(8 * number, 2).contiguous())
    torch.manual_seed(0)
    network = resnet18(num_classes=10).eval()
    engine = Engine(copy.deepcopy(network).cuda())

    class ByEngine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = engine.model

        def forward(self, images: Tensor) -> Tensor:
            return engine(images)  # type: ignore[no-any-return]

    model, how = ByEngine(), Preprocessing(interpolation=interpolation)
    # graphs are captured
    list(classify_video(model, SampledVideo.for_model(model, path, how, every=0.2), batch_size=8))
    frames = SampledVideo.for_model(model, path, how, every=0.1)
    assert (frames.device.type, frames.fallback_reason) == ("cuda", None)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        found = list(classify_video(model, frames, top=10, batch_size=8))
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    copies = [(each["name"], each["args"]["bytes"]) for each in events if each.get("cat") == "gpu_memcpy"]
    to_host = [size for name, size in copies if "DtoH" in name]
    assert max(to_host) <= 8 * 10 * 4  # logits of a batch
    assert sum(to_host) <= 32 * 10 * 4 + 1024
    to_device = [size for name, size in copies if "HtoD" in name]
    assert max(to_device, default=0) < 128 * 1024  # packets, if they are seen at all; a frame has 147 KiB when cropped
    on_cpu = list(classify_video(network, SampledVideo(path, how, every=0.1), top=10))
    for ours, theirs in zip(found, on_cpu, strict=True):
        probability = {guess.index: guess.probability for guess in theirs.guesses}
        for guess in ours.guesses:
            assert guess.probability == pytest.approx(probability[guess.index], abs=0.02)
