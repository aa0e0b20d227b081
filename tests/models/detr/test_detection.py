"""Objects on photographs: from files to boxes in their pixels, and the pictures of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from rooftop.errors import InputError, ModelRunError
from rooftop.models.detr import detection
from rooftop.models.detr.detection import FoundObject, coco_classes, detect, draw_objects, load_detector
from rooftop.models.detr.network import Detr, Predictions, detr_resnet50
from rooftop.models.vision.resnet import Bottleneck, resnet18


@pytest.fixture
def small() -> Detr:
    torch.manual_seed(0)
    return Detr(Bottleneck, (1, 1, 1, 1), num_classes=5, queries=7).eval()


@pytest.fixture
def photographs(tmp_path: Path) -> list[Path]:
    generator = np.random.default_rng(0)
    paths = []
    for name, (width, height) in {"wide": (90, 40), "high": (33, 70)}.items():
        paths.append(tmp_path / f"{name}.png")
        Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(paths[-1])
    return paths


def says(model: Detr, boxes: list[list[float]], scores: list[list[float]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The model finds these boxes (center x, center y, width, height), with these probabilities of each class."""
    logits = torch.tensor(scores).clamp(min=1e-9).log()

    def forward(images: list[torch.Tensor]) -> Predictions:
        count = len(images)
        return Predictions(logits.expand(count, -1, -1), torch.tensor(boxes).expand(count, -1, -1))

    monkeypatch.setattr(model, "forward", forward)


def test_boxes_are_in_the_pixels_of_each_photograph_and_the_best_comes_first(
    small: Detr, photographs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    boxes = [[0.5, 0.5, 0.2, 0.4], [0.9, 0.5, 0.4, 1.0], [0.5, 0.5, 1.0, 1.0]]
    scores = [[0.75, 0.1, 0.05, 0, 0, 0.1], [0, 0, 0.9, 0, 0, 0.1], [0.3, 0, 0, 0, 0, 0.7]]
    says(small, boxes, scores, monkeypatch)
    first, second = detect(small, photographs, threshold=0.7, classes=["a", "b", "c", "", "e"])
    assert [(each.label, each.name) for each in first.objects] == [(2, "c"), (0, "a")]
    assert [each.score for each in first.objects] == pytest.approx([0.9, 0.75])
    assert (first.size, second.size) == ((90, 40), (33, 70))
    assert first.objects[0].box == pytest.approx((63, 0, 90, 40))  # cut off at the edge
    assert first.objects[1].box == pytest.approx((36, 12, 54, 28))
    assert second.objects[1].box == pytest.approx((13.2, 21, 19.8, 49), rel=1e-5)
    assert len(detect(small, photographs, threshold=0)[0].objects) == 3
    assert detect(small, photographs, threshold=0.95)[0].objects == ()


def test_photographs_of_one_size_do_not_see_each_other(small: Detr, photographs: list[Path]) -> None:
    wide, other = photographs[0], photographs[0].with_name("other.png")
    Image.new("RGB", (90, 40), "red").save(other)
    done: list[float] = []
    options = {"threshold": 0, "shorter": 64, "progress": lambda _, part: done.append(part)}
    alone = detect(small, [wide, other], batch_size=1, **options)  # type: ignore[arg-type]
    together = detect(small, [wide, other], batch_size=2, **options)  # type: ignore[arg-type]
    assert done == [0.5, 1.0, 1.0]
    for one, both in zip(alone, together, strict=True):
        for a, b in zip(one.objects, both.objects, strict=True):
            assert (a.label, a.name) == (b.label, b.name)
            assert a.box == pytest.approx(b.box, abs=0.02)
            assert a.score == pytest.approx(b.score, abs=1e-4)
    small.train()
    detect(small, [wide])
    assert small.training


def test_the_sides_that_a_model_sees() -> None:
    sizes = {(640, 480): (1067, 800), (480, 640): (800, 1067), (3000, 300): (1333, 133), (1, 1000): (1, 1333)}
    for size, expected in sizes.items():
        assert detection.resized(Image.new("RGB", size), 800, 1333).size == expected


def test_names_are_those_of_coco_where_there_are_as_many() -> None:
    assert len(coco_classes()) == 91
    assert coco_classes()[1] == "person"
    assert coco_classes()[90] == "toothbrush"
    assert detection.class_names(None, 91) == coco_classes()
    names = detection.class_names(None, 80)
    assert names is not None
    assert (names[0], names[16], names[79]) == ("person", "dog", "toothbrush")
    assert detection.class_names(None, 5) is None


def test_a_detector_has_the_classes_of_its_weights(tmp_path: Path) -> None:
    file = tmp_path / "five.pth"
    torch.save({"model": detr_resnet50(num_classes=5).state_dict()}, file)
    model = load_detector("detr_resnet50", file)
    assert model.class_embed.out_features == 6
    assert not model.training
    torch.save(resnet18().state_dict(), file)
    with pytest.raises(InputError, match="resnet18 is not a detector"):
        load_detector("resnet18", file)


def test_pictures_have_boxes_and_the_photograph_stays_as_it_is() -> None:
    photo = Image.new("RGB", (200, 100), "gray")
    objects = [
        FoundObject(3, "cat", 0.9, (20.0, 30.0, 120.0, 90.0)),
        FoundObject(1, None, 0.5, (0.0, 0.0, 200.0, 100.0)),
    ]
    picture = draw_objects(photo, objects)
    assert picture.size == photo.size
    assert picture.getpixel((20, 60)) == detection._colour(3)
    assert picture.getpixel((199, 60)) == detection._colour(1)
    assert picture.getpixel((70, 80)) == (128, 128, 128)
    assert photo.getcolors() == [(200 * 100, (128, 128, 128))]
    assert len({detection._colour(label) for label in range(91)}) == 91
    draw_objects(Image.new("L", (1, 1)), [FoundObject(0, "x" * 50, 1.0, (0.0, 0.0, 1.0, 1.0))])  # larger than it


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"threshold": 1.5}, ValueError, "threshold is 1.5, expected a score from 0 to 1"),
        ({"batch_size": 0}, ValueError, "expected batch_size, shorter and longer of at least 1"),
        ({"classes": ["a"]}, InputError, "got 1 names of classes, but the model has 5 classes"),
        ({"paths": ["no.png"]}, InputError, "no.png does not exist"),
    ],
)
def test_wrong_arguments(
    options: dict[str, object], error: type[Exception], message: str, small: Detr, photographs: list[Path]
) -> None:
    with pytest.raises(error, match=message):
        detect(small, **{"paths": photographs, **options})  # type: ignore[arg-type]


def test_an_output_that_is_not_finite_names_the_photograph(
    small: Detr, photographs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    says(small, [[0.5, 0.5, float("nan"), 1.0]], [[1.0, 0, 0, 0, 0, 0]], monkeypatch)
    with pytest.raises(ModelRunError, match=r"output for .*wide.png is not finite"):
        detect(small, photographs)
