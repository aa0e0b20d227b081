"""Clips have the same frames and the same order, whichever thread decodes them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from rooftop.errors import InputError
from rooftop.media import ClipDataset, ClipLoader, DamagedVideoError, VideoReader

MakeVideo = Callable[..., Path]
ReadNumber = Callable[[Tensor], int]
H264 = {"bf": "3", "g": "8", "preset": "fast"}


@pytest.fixture
def paths(make_video: MakeVideo) -> list[Path]:
    lengths = (30, 5, 23)
    return [make_video(f"of-{length}.mp4", "libx264", frames=length, options=H264) for length in lengths]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({"frames": 8}, [(0, 0), (0, 8), (0, 16), (2, 0), (2, 8)]),
        ({"frames": 5, "step": 3}, [(0, 0), (0, 15), (2, 0)]),
        ({"frames": 5, "stride": 10}, [(0, 0), (0, 10), (0, 20), (1, 0), (2, 0), (2, 10)]),
        ({"frames": 30}, [(0, 0)]),
    ],
)
def test_clips_are_the_frames_of_their_places(
    paths: list[Path], read_number: ReadNumber, how: dict[str, int], expected: list[tuple[int, int]]
) -> None:
    clips = ClipDataset(paths, **how)  # type: ignore[arg-type]
    assert [clips.place(number) for number in range(len(clips))] == expected
    for number, (file, first) in enumerate(expected):
        clip = clips[number]
        assert (clip.file, clip.first) == (file, first)
        numbers = [first + frame * how.get("step", 1) for frame in range(how["frames"])]
        assert [read_number(frame) for frame in clip.pixels] == numbers
        assert torch.equal(clip.pixels, VideoReader(paths[file]).take(numbers))
    assert torch.equal(clips[-1].pixels, clips[len(clips) - 1].pixels)
    with pytest.raises(IndexError, match=f"there are {len(expected)}"):
        clips[len(expected)]


def batches(loader: ClipLoader) -> list[tuple[Tensor, list[tuple[int, int]]]]:
    return [(pixels, list(zip(files.tolist(), firsts.tolist(), strict=True))) for pixels, files, firsts in loader]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_pass_has_every_clip_once_in_the_order_of_its_seed(paths: list[Path], threads: int, shuffle: bool) -> None:
    clips = ClipDataset(paths, frames=4, resize=(16, 24), dtype=torch.float32)
    loader = ClipLoader(clips, batch=3, shuffle=shuffle, seed=5, threads=threads, ahead=2)
    first, second = batches(loader), batches(loader)
    assert len(first) == len(loader) == -(-len(clips) // 3)
    places = [place for _, of_batch in first for place in of_batch]
    assert sorted(places) == [clips.place(number) for number in range(len(clips))]
    again = [place for _, of_batch in second for place in of_batch]
    assert (places == again) != shuffle  # with shuffle, each pass has another order
    alone = ClipLoader(clips, batch=3, shuffle=shuffle, seed=5, threads=2, ahead=1)
    for (pixels, of_batch), (others, places_alone) in zip(first, batches(alone), strict=True):
        assert of_batch == places_alone
        assert torch.equal(pixels, others)
        for place, clip in zip(of_batch, pixels, strict=True):
            expected = VideoReader(paths[place[0]], dtype=torch.float32, resize=(16, 24))
            assert torch.equal(clip, expected[place[1] : place[1] + 4])


def test_what_fills_no_batch_can_be_left_out(paths: list[Path]) -> None:
    clips = ClipDataset(paths, frames=4)
    loader = ClipLoader(clips, batch=5, drop_last=True)
    assert [len(files) for _, files, _ in loader] == [5] * (len(clips) // 5) == [5] * len(loader)


def test_a_loop_that_is_left_early_leaves_no_thread_that_decodes(paths: list[Path]) -> None:
    loader = ClipLoader(ClipDataset(paths, frames=2), batch=1, ahead=4)
    for _ in loader:
        break
    assert sum(1 for _ in loader) == len(loader)


def test_worker_processes_of_a_data_loader(paths: list[Path]) -> None:
    clips = ClipDataset(paths, frames=6)
    assert torch.equal(pickle.loads(pickle.dumps(clips))[1].pixels, clips[1].pixels)
    found = DataLoader(clips, batch_size=2, num_workers=2, multiprocessing_context="fork")
    expected = ClipLoader(clips, batch=2)
    for (pixels, files, firsts), batch in zip(found, expected, strict=True):
        assert torch.equal(pixels, batch.pixels)
        assert (files.tolist(), firsts.tolist()) == (batch.files.tolist(), batch.firsts.tolist())


def test_a_damaged_file_is_named_at_its_batch(make_video: MakeVideo, tmp_path: Path) -> None:
    whole = make_video("for-damage.mkv", options={"bf": "0", "g": "8", "sc_threshold": "0"})
    with pytest.importorskip("av").open(str(whole)) as container:
        at, size = next((each.pos, each.size) for each in container.demux(video=0) if each.pts and each.pts >= 400)
    content = bytearray(whole.read_bytes())
    content[at + 12 : at + size] = bytes(size - 12)
    damaged = tmp_path / "damaged.mkv"
    damaged.write_bytes(content)
    clips = ClipDataset([whole, damaged], frames=10)
    loader = iter(ClipLoader(clips, batch=3, threads=2))
    assert torch.equal(next(loader).pixels[2], clips[2].pixels)
    with pytest.raises(DamagedVideoError, match=r"damaged\.mkv"):
        list(loader)
    some = ClipDataset([whole, damaged], frames=10, on_error="skip")
    with pytest.warns(UserWarning, match=r"skipped clip \d: .*damaged\.mkv"):
        found = list(ClipLoader(some, batch=1, threads=2))
    kept = [(int(each.files), int(each.firsts)) for each in found]
    assert kept[:3] == [(0, 0), (0, 10), (0, 20)]
    assert 3 <= len(kept) < 6
    for each, (file, first) in zip(found, kept, strict=True):
        assert torch.equal(each.pixels[0], VideoReader((whole, damaged)[file])[first : first + 10])


def test_files_that_cannot_be_read_are_named_or_skipped(make_video: MakeVideo, tmp_path: Path) -> None:
    whole = make_video("for-damage.mkv", options={"bf": "0", "g": "8", "sc_threshold": "0"})
    content = whole.read_bytes()
    text, cut = tmp_path / "text.mp4", tmp_path / "cut.mkv"
    text.write_text("no video")
    cut.write_bytes(content[: len(content) * 2 // 3])
    with pytest.raises(InputError, match=r"text\.mp4 is not a video"):
        ClipDataset([whole, text], frames=4)
    with pytest.warns(UserWarning, match=r"skipped: .*text\.mp4 is not a video"):
        clips = ClipDataset([text, whole, text], frames=4, on_error="skip")
    assert [path for path, _ in clips.skipped] == [text, text]
    assert clips.counts == [7]
    assert len(list(ClipLoader(clips, batch=7))) == 1
    with pytest.warns(UserWarning, match=r"cut\.mkv is damaged \(the file ends after .* readable frames"):
        assert 0 < ClipDataset([cut], frames=4).counts[0] < 7
    with (
        pytest.warns(UserWarning, match="skipped"),
        pytest.raises(InputError, match="none of 1 file can be read"),
    ):
        ClipDataset([text], frames=4, on_error="skip")


def test_a_gpu_that_is_not_there_is_named_before_the_first_batch(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="there is no GPU here"):
        ClipLoader(ClipDataset(paths, frames=4), batch=2, to="cuda")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"frames": 0}, "expected 1 or more"),
        ({"frames": 4, "step": 0}, "expected 1 or more"),
        ({"frames": 31}, "the longest has 30"),
        ({"frames": 4, "resize": 7}, "expected \\(height, width\\)"),
        ({"frames": 4, "on_error": "ignore"}, 'expected "raise" or "skip"'),
    ],
)
def test_what_is_no_clip_is_refused(paths: list[Path], how: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        ClipDataset(paths, **how)


def test_other_mistakes(paths: list[Path], make_video: MakeVideo) -> None:
    with pytest.raises(InputError, match="expected a list of video files"):
        ClipDataset([], frames=2)
    with pytest.raises(InputError, match="expected a list of video files"):
        ClipDataset(str(paths[0]), frames=2)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="to='tpu' is not a device"):
        ClipLoader(ClipDataset((path for path in paths), frames=2), batch=1, to="tpu")
    larger = make_video("larger.mp4", "libx264", height=64, width=80)
    with pytest.raises(InputError, match=r"48 x 32, 80 x 64\): pass resize="):
        ClipDataset([*paths, larger], frames=2)
    assert len(ClipDataset([*paths, larger], frames=2, resize=(16, 16))) > 0
    with pytest.raises(InputError, match="batch=0"):
        ClipLoader(ClipDataset(paths, frames=2), batch=0)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_clips_on_a_gpu_are_those_of_the_cpu(make_video: MakeVideo, device: str) -> None:
    settings: dict[str, Any] = {"options": H264, "height": 240, "width": 320}
    videos = [make_video(f"gpu-{frames}.mp4", "libx264", frames=frames, **settings) for frames in (40, 60)]
    how: dict[str, Any] = {"frames": 4, "resize": (112, 112), "dtype": torch.float32}
    expected, clips = ClipDataset(videos, **how), ClipDataset(videos, **how, device=device)
    loader = ClipLoader(clips, batch=5, shuffle=True, threads=4, ahead=3, to="cuda")
    work = torch.randn(2048, 2048, device="cuda")
    for pixels, files, firsts in loader:
        work = torch.nn.functional.normalize(work @ work)  # a step that is still running
        assert pixels.is_cuda
        for clip, file, first in zip(pixels.cpu(), files.tolist(), firsts.tolist(), strict=True):
            other = expected.readers[file][first : first + 4]
            assert (clip - other).abs().max() * 255 <= 2
