"""DETRs on shapes and on folders in COCO's format, and files that `rooftop detect` accepts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from rooftop.cli.main import main
from rooftop.data.samples import sample
from rooftop.errors import InputError
from rooftop.models import CocoDataset
from rooftop.train.fitting.exports import export_weights
from rooftop.train.recipes import Recipe
from rooftop.train.tasks import Task, find_task
from rooftop.train.tasks.detr import DrawnShapes, MirroredPictures
from rooftop.train.tasks.generated import shapes

pytest.importorskip("scipy")
pytest.importorskip("pycocotools")


def built(data: str | None, *values: str) -> Task:
    build, defaults = find_task("detr", data)
    torch.manual_seed(0)
    return build(data, Recipe.of(defaults).with_values(values))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("shapes")
    shapes.write(shapes.draw(12, 48, seed=5), found)
    return found


def test_shapes_are_learned_by_heart_and_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("safetensors")
    task = built("shapes", "augment.size=48")
    batch = task.collate([sample(task.train, number, 0, 0) for number in range(2)])
    optimizer = torch.optim.AdamW(task.model.parameters(), 2e-3, betas=(0.9, 0.98))
    losses = []
    for _ in range(30):
        losses.append(task.loss(task.model.train(), batch))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.8 * losses[0]
    assert task.judge is not None
    assert task.examples is not None
    figures = task.judge(task.model.eval(), torch.device("cpu"))
    assert 0 <= figures["AP"] <= figures["AP50"] <= 1
    assert [picture.size for _, picture in task.examples(task.model, torch.device("cpu"))] == [(512, 256)] * 8
    weights = tmp_path / "best.safetensors"
    export_weights(weights, task.model, task.metadata)
    shapes.write(shapes.draw(1, 96, seed=0), tmp_path / "pictures")
    words = ["--weights", str(weights), "--threshold", "0", "-o", str(tmp_path / "out")]
    assert main(["detect", str(tmp_path / "pictures" / "0000.png"), *words, "--json", "-", "--device", "cpu"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["model"] == "detr_small"
    assert {each["name"] for each in said["photographs"][0]["objects"]} <= set(shapes.NAMES)


def test_new_shapes_are_other_ones_in_each_epoch_and_held_out_ones_are_not() -> None:
    task = built("new-shapes", "augment.size=32")
    one, same, other = (sample(task.train, 5, 0, epoch) for epoch in (0, 0, 1))
    assert torch.equal(one[0], same[0])
    assert not torch.equal(one[0], other[0])
    assert task.valid is not None
    assert len(task.valid) == 256
    assert torch.equal(sample(task.valid, 1, 0, 0)[0], sample(task.valid, 1, 7, 3)[0])


def test_a_drawn_picture_is_the_one_that_a_file_would_hold(folder: Path) -> None:
    drawn, read = DrawnShapes(12, 48, seed=5), CocoDataset(folder, folder / "instances.json", shorter=48, longer=48)
    for (image, target), (expected, boxes) in zip(drawn, read, strict=True):
        assert torch.equal(image, expected)
        assert torch.equal(target["boxes"], boxes["boxes"])


def test_a_folder_has_its_names_and_a_part_that_is_held_out(folder: Path) -> None:
    task = built(str(folder), 'model.name="detr_small"', "augment.size=48")
    assert task.valid is not None
    assert (len(task.train), len(task.valid)) == (11, 1)
    assert task.metadata["classes"] == list(shapes.NAMES)
    assert task.metadata["sides"] == [48, 80]
    assert isinstance(task.valid, CocoDataset)
    assert {each["image_id"] for each in task.valid.annotations["annotations"]} == {task.valid.images[0]["id"]}


def test_a_mirrored_picture_has_mirrored_boxes(folder: Path) -> None:
    plain = CocoDataset(folder, folder / "instances.json", shorter=48, longer=48)
    (image, target), (other, mirrored) = plain[3], MirroredPictures(plain, 1.0).draw(3, np.random.default_rng(0))
    assert torch.equal(other, image.flip(2))
    assert torch.equal(mirrored["boxes"][:, 1:], target["boxes"][:, 1:])
    torch.testing.assert_close(mirrored["boxes"][:, 0], 1 - target["boxes"][:, 0])
    assert torch.equal(MirroredPictures(plain, 0.0).draw(3, np.random.default_rng(0))[0], image)


def test_training_pictures_travel_as_bytes_and_are_normalized_alike(folder: Path) -> None:
    """Training pictures, mirrored or not, are normalized on the device. Held-out pictures are normalized when they are
    read."""
    task = built(str(folder), 'model.name="detr_small"', "augment.size=48", "augment.flip=0.5")
    assert task.prepare is not None
    assert task.valid is not None
    mirrored = 0
    plain = MirroredPictures(CocoDataset(folder, folder / "instances.json", shorter=48, longer=80), 0.5)
    plain.pictures.images = task.train.pictures.images  # type: ignore[attr-defined]
    for epoch in range(4):
        samples = [sample(task.train, number, 0, epoch) for number in range(3)]
        assert {image.dtype for image, _ in samples} == {torch.uint8}
        images, targets = task.prepare(task.collate(samples))
        for number, (image, target) in enumerate(zip(images, targets, strict=True)):
            expected, its_target = sample(plain, number, 0, epoch)
            assert torch.equal(image, expected)
            assert torch.equal(target["boxes"], its_target["boxes"])
            mirrored += not torch.equal(image, sample(plain, number, 0, epoch + 1)[0])
    assert mirrored > 0
    held_out = task.collate([task.valid[0]])
    assert held_out[0][0].dtype == torch.float32
    assert task.prepare(held_out)[0][0] is held_out[0][0]


def test_the_command_trains_on_a_folder(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command trains a DETR, validates it by COCO's figures, and exports it for `rooftop detect`."""
    pytest.importorskip("safetensors")
    out = tmp_path / "run"
    words = ["run.steps=2", "run.batch=2", "model.name=detr_small", "augment.size=48", "loading.how=here"]
    sets = [each for word in words for each in ("--set", word)]
    assert main(["train", "detr", "--data", str(folder), "--out", str(out), *sets, "--device", "cpu", "--no-page"]) == 0
    said = capsys.readouterr().out
    assert "11 pictures, 1 held out; 2 steps of 2" in said
    assert "AP50" in said
    words = ["--weights", str(out / "best.safetensors"), "--threshold", "0", "-o", str(tmp_path / "found")]
    assert main(["detect", str(folder / "0000.png"), *words, "--json", "-", "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["photographs"][0]["objects"]


def test_cocos_own_folders_are_found(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "annotations").mkdir()
    for part in ("train", "val"):
        (tmp_path / f"{part}2017").symlink_to(folder)
        (tmp_path / "annotations" / f"instances_{part}2017.json").symlink_to(folder / "instances.json")
    task = built(str(tmp_path), 'model.name="detr_small"', "augment.size=48")
    assert task.valid is not None
    assert (len(task.train), len(task.valid)) == (12, 12)


def test_what_is_no_data_or_no_detector(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is not a folder: expected shapes, new-shapes, or"):
        built("nowhere")
    with pytest.raises(InputError, match=r"has neither annotations/instances_train\*\.json"):
        built(str(tmp_path))
    with pytest.raises(InputError, match=r"model.name is 'resnet18': expected detr_small, detr_resnet50"):
        built("shapes", 'model.name="resnet18"')
    with pytest.raises(InputError, match=r"model.num_classes is 2, but the data have labels up to 2"):
        built("shapes", "model.num_classes=2")
