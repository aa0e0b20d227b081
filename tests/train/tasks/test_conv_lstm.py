"""ConvLSTMs on moving digits and on videos, and files that `rooftop predict-video` accepts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rooftop.cli.main import main
from rooftop.data.samples import sample
from rooftop.errors import InputError
from rooftop.train.fitting.exports import export_weights
from rooftop.train.recipes import Recipe
from rooftop.train.tasks import Task, find_task
from rooftop.train.tasks.conv_lstm import errors

TINY = ("augment.size=16", "model.options={filters=4, frames=6}", "run.batch=2")


def built(data: str | None, *values: str) -> Task:
    build, defaults = find_task("conv_lstm", data)
    torch.manual_seed(0)
    return build(data, Recipe.of(defaults).with_values(values))


def trained(task: Task, steps: int, rate: float) -> list[float]:
    """The loss of each step, of four samples each."""
    optimizer = torch.optim.AdamW(task.model.parameters(), rate, weight_decay=0.0)
    losses = []
    for step in range(steps):
        numbers = [(4 * step + place) % len(task.train) for place in range(4)]
        loss = task.loss(task.model.train(), task.collate([sample(task.train, number, 0, 0) for number in numbers]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty frames in which a red square moves."""
    pytest.importorskip("av")
    from rooftop.media import VideoWriter

    path = tmp_path_factory.mktemp("clips") / "clip.mp4"
    frames = torch.zeros(40, 3, 24, 32, dtype=torch.uint8)
    for number, frame in enumerate(frames):
        frame[0, 8:16, number % 24 : number % 24 + 8] = 255
    with VideoWriter(path, 25) as writer:
        writer.write(frames)
    return path


def test_moving_digits_are_learned_and_predicted(
    clip: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("safetensors")
    task = built("digits", *TINY)
    losses = trained(task, 12, 0.02)
    assert losses[-1] < 0.8 * losses[0]
    assert task.settle is not None
    assert task.valid is not None
    assert task.metrics is not None
    assert task.examples is not None
    before = [each.clone() for each in task.model.buffers()]
    task.settle(task.model.eval())
    assert not task.model.training
    assert any(not torch.equal(one, other) for one, other in zip(before, task.model.buffers(), strict=True))
    batch = task.collate([task.valid[number] for number in range(4)])
    with torch.no_grad():
        found = task.metrics(task.model, batch)
        assert found["BCE"].mean() == pytest.approx(task.loss(task.model, batch).item(), rel=1e-5)
    assert {name: tuple(each.shape) for name, each in found.items()} == dict.fromkeys(
        ("BCE", "MAE", "MSE", "BCE of copying"), (4,)
    )
    pictures = task.examples(task.model, torch.device("cpu"))
    assert [picture.size for _, picture in pictures] == [(3 * 98, 3 * 98)] * 2
    weights = tmp_path / "best.safetensors"
    export_weights(weights, task.model, task.metadata)
    words = ["--frames", "3", "--size", "16x16", "-o", str(tmp_path / "out.mp4"), "--json", "-", "--device", "cpu"]
    assert main(["predict-video", str(clip), "--weights", str(weights), *words]) == 0
    assert json.loads(capsys.readouterr().out)["colours"] == "grey"


def test_digits_move_anew_in_each_epoch_and_held_out_ones_do_not() -> None:
    pytest.importorskip("sklearn")
    task = built(None, *TINY)
    one, same, other = (sample(task.train, 5, 0, epoch) for epoch in (0, 0, 1))
    assert one.shape == (6, 16, 16, 1)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert task.valid is not None
    assert torch.equal(sample(task.valid, 1, 0, 0), sample(task.valid, 1, 7, 3))


def test_the_last_fifth_of_a_video_is_held_out(clip: Path) -> None:
    task = built(str(clip.parent), *TINY)
    assert task.valid is not None
    assert (len(task.train), len(task.valid)) == (40 * 4 // 5 - 6 + 1, 1)
    assert task.train[0].shape == (6, 16, 21, 3)
    assert task.metadata["model"] == "colour_next_frame_network"
    assert trained(task, 3, 0.003)[0] > 0
    batch = task.collate([task.valid[0]])
    with torch.no_grad():
        found = errors(task.model.eval(), batch)
    assert found["MAE of copying"].item() == pytest.approx((batch[:, -1] - batch[:, -2]).abs().mean().item(), rel=1e-5)


def test_what_are_no_videos(clip: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"does not exist: expected digits, a video, or"):
        built("nowhere")
    with pytest.raises(InputError, match=r"has no videos"):
        built(str(tmp_path))
    with pytest.raises(InputError, match=r"has 40 frames: expected at least 60"):
        built(str(clip), "model.options={frames=12}")
    with pytest.raises(InputError, match=r"model.name is 'resnet18': these data need colour_next_frame_network"):
        built(str(clip), *TINY, 'model.name="resnet18"')
    for name, value, least in (("frames", "1", 2), ("frames", '"x"', 2), ("together", "0", 1)):
        with pytest.raises(InputError, match=rf"model.options has {name}=.*: expected an integer of {least} or more"):
            built("digits", f"model.options={{{name}={value}}}")
