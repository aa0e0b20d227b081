"""COCO's format: reading annotations, and the figures of a detector."""

from __future__ import annotations

import json
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from PIL import Image

from rooftop.errors import InputError
from rooftop.models.detr.coco import FIGURES, CocoDataset, as_lists, average_precision
from rooftop.models.detr.losses import Detections

BOXES = {  # two photographs of 200 x 100 and 60 x 90 pixels: category, left, top, width, height
    3: [(7, 10.0, 20.0, 50.0, 40.0), (2, 150.0, 50.0, 80.0, 80.0), (7, 190.0, 90.0, 0.0, 5.0)],
    8: [(2, 5.0, 5.0, 20.0, 30.0)],
}


def described() -> dict[str, Any]:
    return {
        "images": [
            {"id": 8, "file_name": "b.png", "width": 60, "height": 90},
            {"id": 3, "file_name": "a.png", "width": 200, "height": 100},
        ],
        "annotations": [
            {"image_id": image, "category_id": category, "bbox": [*box]}
            for image, boxes in BOXES.items()
            for category, *box in boxes
        ],
        "categories": [{"id": 7, "name": "star"}, {"id": 2, "name": "disc"}],
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Image.new("RGB", (200, 100), "red").save(tmp_path / "a.png")
    Image.new("RGB", (60, 90), "blue").save(tmp_path / "b.png")
    (tmp_path / "boxes.json").write_text(json.dumps(described()))
    return tmp_path


def test_boxes_are_shares_of_the_image_within_its_edges(folder: Path) -> None:
    data = CocoDataset(folder, folder / "boxes.json", shorter=50, longer=90)
    assert len(data) == 2
    assert data.names == ("", "", "disc", "", "", "", "", "star")
    (image, target), (other, _) = data[0], data[1]
    assert image.shape == (3, 45, 90)  # the longer side decides
    assert other.shape == (3, 75, 50)
    assert target["labels"].tolist() == [7, 2]  # the third object has no area
    expected = torch.tensor([[35 / 200, 0.4, 0.25, 0.4], [175 / 200, 0.75, 0.25, 0.5]])
    torch.testing.assert_close(target["boxes"], expected)
    images, targets = as_lists([data[0], data[1]])
    assert [each.shape[0] for each in images] == [3, 3]
    assert targets[1]["labels"].tolist() == [2]


def test_contiguous_labels_and_crowds(folder: Path) -> None:
    changed = described()
    changed["annotations"][0]["iscrowd"] = 1
    (folder / "boxes.json").write_text(json.dumps(changed))
    data = CocoDataset(folder, folder / "boxes.json", contiguous=True)
    assert data.names == ("disc", "star")
    assert data[0][1]["labels"].tolist() == [0]


def found(data: CocoDataset, moved: float = 0.0) -> list[Detections]:
    """The boxes of the file, moved to the right."""
    every = []
    for image in data.images:
        boxes = [(c, x + moved, y, x + moved + w, y + h) for c, x, y, w, h in BOXES[image["id"]]]
        labels = torch.tensor([data.label_of[each[0]] for each in boxes])
        every.append(Detections(torch.full((len(boxes),), 0.9), labels, torch.tensor([each[1:] for each in boxes])))
    return every


@pytest.mark.parametrize("contiguous", [False, True])
def test_what_the_file_says_is_found_wholly(folder: Path, contiguous: bool) -> None:
    pytest.importorskip("pycocotools")
    changed = described()
    changed["annotations"] = [each for each in changed["annotations"] if each["bbox"][2] > 0]
    (folder / "boxes.json").write_text(json.dumps(changed))
    data = CocoDataset(folder, folder / "boxes.json", contiguous=contiguous)
    detections = [
        Detections(*(part[: len(each.scores) - (i == 0)] for part in each)) for i, each in enumerate(found(data))
    ]
    figures = average_precision(data, detections)
    assert tuple(figures) == FIGURES
    assert figures["AP"] == figures["AP50"] == figures["AR100"] == pytest.approx(1.0)
    assert figures["AP_large"] == -1  # -1: there are no large objects


def test_boxes_moved_by_a_quarter_count_at_half_and_not_at_three_quarters(folder: Path) -> None:
    pytest.importorskip("pycocotools")
    changed = described()
    changed["annotations"] = changed["annotations"][:1]  # 50 pixels wide: moved by 12, the IoU is 38 / 62
    (folder / "boxes.json").write_text(json.dumps(changed))
    data = CocoDataset(folder, folder / "boxes.json")
    box = torch.tensor([[22.0, 20.0, 72.0, 60.0]])
    nothing = Detections(torch.zeros(0), torch.zeros(0, dtype=torch.int64), torch.zeros(0, 4))
    figures = average_precision(data, [Detections(torch.tensor([0.5]), torch.tensor([7]), box), nothing])
    assert figures["AP50"] == pytest.approx(1.0)
    assert figures["AP75"] == 0
    assert figures["AP"] == pytest.approx(0.3)  # of the ten thresholds, 0.5, 0.55 and 0.6 are met
    empty = average_precision(data, [nothing, nothing])
    assert empty["AP"] == 0
    assert empty["AP_large"] == -1


def test_wrong_detections(folder: Path) -> None:
    pytest.importorskip("pycocotools")
    data = CocoDataset(folder, folder / "boxes.json")
    with pytest.raises(ValueError, match="detections for 1 photographs, but the dataset has 2"):
        average_precision(data, found(data)[:1])
    wrong = found(data)
    wrong[0].labels[0] = 5
    with pytest.raises(ValueError, match=r"label 5 is not one of the dataset's \[2, 7\]"):
        average_precision(data, wrong)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("images"), "has no list 'images': expected annotations in COCO's format"),
        (lambda d: d.update(categories={}), "has no list 'categories'"),
        (lambda d: d["images"][0].pop("file_name"), r"images\[0\] has file_name None, expected str"),
        (lambda d: d["annotations"][1].update(image_id=99), "annotation 1 has image_id 99, which does not exist"),
        (lambda d: d["annotations"][0].update(category_id=1), "annotation 0 has category_id 1, which does not exist"),
        (lambda d: d["annotations"][0].update(bbox=[1, 2, 3]), r"bbox \[1, 2, 3\], expected left, top, width, height"),
        (lambda d: d["images"][0].update(id=3), "two images or two categories have the same id"),
        (lambda d: d["categories"][0].update(id=-1), "annotation|category id -1"),
    ],
)
def test_files_that_are_not_in_the_format(change: Any, message: str, folder: Path) -> None:
    changed = described()
    change(changed)
    (folder / "boxes.json").write_text(json.dumps(changed))
    with pytest.raises(InputError, match=message):
        CocoDataset(folder, folder / "boxes.json")


def test_annotations_in_memory(folder: Path) -> None:
    assert len(CocoDataset(folder, MappingProxyType(described()))) == len(described()["images"])
    changed = described()
    changed["images"][0].update(id=3)
    with pytest.raises(InputError, match=r"^annotations: two images or two categories have the same id$"):
        CocoDataset(folder, changed)


def test_wrong_sides(folder: Path) -> None:
    with pytest.raises(ValueError, match="expected shorter and longer of at least 1, got 0 and 1333"):
        CocoDataset(folder, described(), shorter=0)


def test_files_that_are_not_there_or_no_json(folder: Path) -> None:
    with pytest.raises(InputError, match=r"none\.json cannot be read: No such file"):
        CocoDataset(folder, folder / "none.json")
    (folder / "boxes.json").write_text("{")
    with pytest.raises(InputError, match="is not JSON"):
        CocoDataset(folder, folder / "boxes.json")
    (folder / "boxes.json").write_text("[1]")
    with pytest.raises(InputError, match="has no list 'images'"):
        CocoDataset(folder, folder / "boxes.json")
    (folder / "boxes.json").write_text(json.dumps(described()))
    (folder / "a.png").unlink()
    with pytest.raises(InputError, match=r"a\.png"):
        CocoDataset(folder, folder / "boxes.json")[0]
