"""Rooftop's own models as targets: the same results as `classify` and `detect`, with shared weights."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from rooftop.cluster import map_items, model_target
from rooftop.cluster.model_targets import PackedModel
from rooftop.errors import InputError, TargetError
from rooftop.models import classify, detr_resnet50, model_entry
from rooftop.models.detr.detection import found_objects, resized
from rooftop.models.images import normalized, read_image
from rooftop.models.vision.classification import guessed

pq = pytest.importorskip("pyarrow.parquet")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Four photographs of noise, and a damaged one."""
    folder = tmp_path / "photos"
    folder.mkdir()
    generator = np.random.default_rng(0)
    for number in range(4):
        Image.fromarray(generator.integers(0, 255, (40, 50 + number, 3), np.uint8)).save(folder / f"{number}.png")
    (folder / "4.png").write_bytes(b"no photograph")
    return folder


def test_workers_say_what_classify_says(photos: Path, tmp_path: Path) -> None:
    report = map_items(
        model_target("resnet18", seed=3, top=3, batch=2), [photos], tmp_path / "out", workers=1, device="cpu"
    )
    assert (report.items, report.errors) == (5, 1)
    rows = sorted(pq.read_table(tmp_path / "out").to_pylist(), key=lambda row: row["input"])
    assert rows[4]["error"] is not None
    torch.manual_seed(3)
    model = model_entry("resnet18").build().eval()
    for row, photo in zip(rows, classify(model, [photos / f"{n}.png" for n in range(4)], top=3), strict=False):
        assert row["input"] == str(photo.path)
        assert row["labels"] == [guess.index for guess in photo.guesses]
        assert row["names"] == [guess.name for guess in photo.guesses]
        assert row["probabilities"] == pytest.approx([guess.probability for guess in photo.guesses], rel=1e-4)
        assert (row["label"], row["name"]) == (row["labels"][0], row["names"][0])


def test_a_detector_gives_boxes_in_pixels_of_the_photograph(photos: Path) -> None:
    target = model_target("detr_resnet50", seed=0, threshold=0.0)
    image = read_image(photos / "0.png").resize((400, 12))  # narrow, so that the network is quick
    (row,) = target.load("cpu")([target.prepare(image)])
    torch.manual_seed(0)
    model = detr_resnet50().eval()
    (objects,) = found_objects(model, [normalized(resized(image, 800, 1333))], [image.size], ["it"], 0.0)
    assert (row["width"], row["height"]) == (400, 12)
    assert len(row["boxes"]) == len(objects) == 100
    assert torch.allclose(torch.tensor(row["scores"]), torch.tensor([each.score for each in objects]), rtol=1e-3)
    assert set(row) == set(target.columns.names)


def test_a_packed_model_has_all_its_weights_in_one_shared_tensor() -> None:
    model = model_entry("resnet18").build().eval()
    packed = PackedModel.of(model)
    assert packed.weights.is_shared()
    assert len(packed.structure) < 0.01 * packed.weights.nbytes
    first, second = packed.unpacked(), packed.unpacked()
    for name, weight in model.state_dict().items():
        assert torch.equal(first.state_dict()[name], weight)
    whole = packed.weights.untyped_storage().data_ptr()
    for one in (first, second):
        assert {each.untyped_storage().data_ptr() for each in one.parameters()} == {whole}
    images = torch.rand(2, 3, 224, 224)
    assert guessed(first, images, "ab", None, 3, "images") == guessed(model, images, "ab", None, 3, "images")


def test_what_is_sent_elsewhere_has_weights_of_its_own() -> None:
    target = model_target("resnet18", seed=0)
    there = pickle.loads(pickle.dumps(target.sent()))
    assert not there.packed.weights.is_shared()
    assert torch.equal(there.packed.weights, target.packed.weights)


def test_models_and_options_that_do_not_go_together() -> None:
    for name, options, error, said in (
        ("resnet81", {}, TargetError, "did you mean resnet18"),
        ("detr_resnet50", {}, InputError, r"needs weights \(or"),
        ("resnet18", {"weights": "DEFAULT", "seed": 1}, InputError, "got both"),
        ("resnet18", {"seed": 1, "batch": 0}, InputError, "batch is 0"),
        ("resnet18", {"seed": 1, "top": 0}, InputError, "top is 0"),
        ("detr_resnet50", {"seed": 1, "threshold": "0.5"}, InputError, "threshold is '0.5', expected a number"),
        ("resnet18", {"seed": 1, "dtype": "float16"}, InputError, "dtype is 'float16', expected a floating-point"),
    ):
        with pytest.raises(error, match=said):
            model_target(name, **options)


def test_a_model_takes_photographs_only(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="resnet18 accepts photographs, not items of kind text"):
        map_items(model_target("resnet18", seed=0), [photos], tmp_path / "out", kind="text")


def test_the_batch_of_a_model_is_not_silently_ignored(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"got batch=3, but the target resnet18 was made with a batch of 16: .*model_target"
    ):
        map_items(model_target("resnet18", seed=0), [photos], tmp_path / "out", batch=3)
    assert not (tmp_path / "out").exists()
