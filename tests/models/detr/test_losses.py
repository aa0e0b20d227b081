"""Losses of a DETR equal Hugging Face's, term by term, even without objects or finite values."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rooftop.models.detr.losses import (
    Matcher,
    SetCriterion,
    corners,
    generalized_iou,
    pad_targets,
    to_detections,
)
from rooftop.models.detr.network import Detr, Predictions
from rooftop.models.vision.resnet import BasicBlock
from rooftop.testing import no_waiting_for_gpu

CLASSES, QUERIES, LAYERS = 9, 12, 6


def some_targets(*counts: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """Objects inside of their images, with the given number for each image."""
    random = torch.Generator().manual_seed(seed)
    targets = []
    for count in counts:
        low, high = torch.rand(2, count, 2, generator=random).mul(0.9).sort(dim=0).values
        boxes = torch.cat(((low + high + 0.1) / 2, high - low + 0.1), dim=1)
        targets.append({"labels": torch.randint(CLASSES, (count,), generator=random), "boxes": boxes})
    return targets


def some_predictions(images: int, layers: int = LAYERS, seed: int = 1, device: str = "cpu") -> Predictions:
    """Predictions of all layers, as leaves of autograd."""
    random = torch.Generator().manual_seed(seed)
    all_layers = []
    for _ in range(layers):
        logits = torch.randn(images, QUERIES, CLASSES + 1, generator=random).to(device)
        boxes = torch.rand(images, QUERIES, 4, generator=random).to(device)
        all_layers.append(Predictions(logits.requires_grad_(), boxes.requires_grad_()))
    return all_layers[-1]._replace(auxiliary=(*all_layers[:-1],))


def leaves(predictions: Predictions) -> list[Tensor]:
    return [x for each in (*predictions.auxiliary, predictions) for x in (each.logits, each.boxes)]


@pytest.fixture(scope="session")
def object_detection(torchvision_models: ModuleType) -> Any:
    """transformers' losses: (predictions, targets) -> (total, each term)."""
    transformers = pytest.importorskip("transformers")
    losses = pytest.importorskip("transformers.loss.loss_for_object_detection")

    def compute(predictions: Predictions, targets: Sequence[dict[str, Tensor]]) -> tuple[Tensor, dict[str, Tensor]]:
        layers = (*predictions.auxiliary, predictions)
        config = transformers.DetrConfig(num_labels=CLASSES, auxiliary_loss=True, decoder_layers=len(layers))
        logits = torch.stack([each.logits for each in layers])
        boxes = torch.stack([each.boxes for each in layers])
        theirs = [{"class_labels": each["labels"], "boxes": each["boxes"]} for each in targets]
        total, terms, _ = losses.ForObjectDetectionLoss(logits[-1], theirs, "cpu", boxes[-1], config, logits, boxes)
        return total, terms

    return compute


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("counts", [(3, 5), (4, 0, 7), (0, 0), (1,), (15, 2)])
def test_all_terms_and_gradients_are_hugging_faces(
    counts: tuple[int, ...], batched: bool, object_detection: Any
) -> None:
    predictions, targets = some_predictions(len(counts)), some_targets(*counts)
    criterion = SetCriterion(CLASSES, Matcher(batched=batched))
    found = criterion(predictions, targets)
    total, expected = object_detection(predictions, targets)
    assert len(found) == 24
    assert set(found) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5, msg=name)
    torch.testing.assert_close(criterion.total(found), total, rtol=1e-5, atol=1e-5)
    ours = torch.autograd.grad(criterion.total(found), leaves(predictions))
    theirs = torch.autograd.grad(total, leaves(predictions))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_costs_and_matches_are_hugging_faces(torchvision_models: ModuleType) -> None:
    losses = pytest.importorskip("transformers.loss.loss_for_object_detection")
    predictions, targets = some_predictions(3, layers=1), some_targets(6, 0, 3)
    theirs = losses.HungarianMatcher(class_cost=1, bbox_cost=5, giou_cost=2)(
        {"logits": predictions.logits, "pred_boxes": predictions.boxes},
        [{"class_labels": each["labels"], "boxes": each["boxes"]} for each in targets],
    )
    for batched in (False, True):
        ours = Matcher(batched=batched)(predictions, pad_targets(targets, CLASSES))
        for row, (queries, objects) in zip(ours, theirs, strict=True):
            assert row[objects].tolist() == queries.tolist()
            assert (row >= 0).sum() == len(objects)


def test_predictions_that_are_right_cost_nothing() -> None:
    targets = some_targets(4, 2)
    logits = torch.full((2, QUERIES, CLASSES + 1), -30.0)
    logits[..., -1] = 0
    boxes = torch.rand(2, QUERIES, 4)
    for image, target in enumerate(targets):
        for place, (label, box) in enumerate(zip(target["labels"], target["boxes"], strict=True), start=3):
            logits[image, place, -1] = -30
            logits[image, place, label] = 30
            boxes[image, place] = box
    losses = SetCriterion(CLASSES)(Predictions(logits, boxes), targets)
    assert max(losses.values()) < 1e-5


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_with_infinite_logits(dtype: torch.dtype, batched: bool) -> None:
    """Infinite logits do not stop the matcher. Images with finite values get the same queries as before."""
    predictions, targets = some_predictions(2, layers=1), some_targets(3, 4)
    logits, boxes = predictions.logits.detach().to(dtype), predictions.boxes.detach().to(dtype)
    matcher, padded = Matcher(batched=batched), pad_targets(targets, CLASSES)
    expected = matcher(Predictions(logits, boxes), padded)
    logits[0] = torch.inf
    boxes[0, 1] = torch.nan
    found = matcher(Predictions(logits, boxes), padded)
    assert torch.equal(found[1], expected[1])
    assert len(found[0, :3].unique()) == 3
    assert found[0, :3].min() >= 0
    losses = SetCriterion(CLASSES, matcher)(Predictions(logits, boxes), targets)
    assert losses["loss_ce"].dtype == torch.float32
    assert not losses["loss_ce"].isfinite()  # so a gradient scaler skips the step


def test_generalized_iou_of_known_boxes() -> None:
    box = torch.tensor([0.0, 0.0, 2.0, 2.0])
    others = torch.tensor([[0.0, 0, 2, 2], [1, 1, 3, 3], [0, 0, 1, 1], [4, 0, 6, 2], [1, 1, 1, 1]])
    expected = torch.tensor([1, 1 / 7 - 2 / 9, 1 / 4, -2 / 6, 0])
    torch.testing.assert_close(generalized_iou(box, others), expected)
    torch.testing.assert_close(generalized_iou(others, box), expected)
    torch.testing.assert_close(corners(torch.tensor([3.0, 5, 2, 4])), torch.tensor([2.0, 3, 4, 7]))


def test_boxes_are_divided_by_their_number_in_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    predictions, targets = some_predictions(1), some_targets(3)
    alone = SetCriterion(CLASSES)(predictions, targets)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_reduce", lambda count: count.add_(9))  # the other process has 9 objects
    together = SetCriterion(CLASSES)(predictions, targets)
    for name, loss in together.items():
        share = 3 / 6 if "bbox" in name or "giou" in name else 1
        torch.testing.assert_close(loss, alone[name] * share)


def test_a_process_group_is_used() -> None:
    predictions, targets = some_predictions(1), some_targets(3)
    alone = SetCriterion(CLASSES)(predictions, targets)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.testing.assert_close(SetCriterion(CLASSES)(predictions, targets), alone)
    finally:
        dist.destroy_process_group()


def test_no_step_asks_what_was_found() -> None:
    """Meta tensors have no values, so this shows that the batched matcher never waits for values of a GPU."""
    predictions = Predictions(
        torch.empty(2, QUERIES, CLASSES + 1, device="meta"), torch.empty(2, QUERIES, 4, device="meta")
    )
    targets = [{name: value.to("meta") for name, value in each.items()} for each in some_targets(3, 5)]
    criterion = SetCriterion(CLASSES, Matcher(batched=True)).to("meta")
    assert criterion.total(criterion(predictions._replace(auxiliary=(predictions,)), targets)).is_meta
    assert to_detections(predictions, [(3, 4), (5, 6)])[0].boxes.is_meta


@pytest.mark.gpu
def test_the_gpu_is_not_waited_for() -> None:
    predictions, targets = some_predictions(2, device="cuda"), some_targets(3, 5)
    expected = SetCriterion(CLASSES)(some_predictions(2), targets)
    on_gpu = [{name: value.cuda() for name, value in each.items()} for each in targets]
    criterion = SetCriterion(CLASSES, Matcher(batched=True)).cuda()
    with no_waiting_for_gpu():
        found = criterion(predictions, on_gpu)
        criterion.total(found).backward()
        to_detections(predictions, [(3, 4), (5, 6)])
    for name, loss in expected.items():
        torch.testing.assert_close(found[name].cpu(), loss, rtol=1e-4, atol=1e-5)


def test_images_with_and_without_objects_train() -> None:
    torch.manual_seed(0)
    model = Detr(
        BasicBlock, (1, 1, 1, 1), num_classes=3, queries=3, width=32, heads=2, encoder_layers=1, decoder_layers=2,
        feed_forward=32, dropout=0.0, norm=lambda channels: nn.GroupNorm(8, channels),
    )  # fmt: skip
    model.backbone.requires_grad_(False)
    criterion, optimizer = SetCriterion(3), torch.optim.AdamW(model.parameters(), 3e-3)
    images = torch.zeros(2, 3, 64, 64)
    images[0, :, 16:48, 8:40] = 1
    box = torch.tensor([[0.375, 0.5, 0.5, 0.5]])
    targets = [{"labels": torch.tensor([2]), "boxes": box}, {"labels": torch.tensor([]).long(), "boxes": box[:0]}]
    totals = []
    for _ in range(40):
        optimizer.zero_grad()
        total = criterion.total(criterion(model(images), targets))
        total.backward()
        optimizer.step()
        totals.append(total.item())
    some, none = to_detections(model.eval()(images), [(128, 256)] * 2, threshold=0.5)
    assert totals[-1] < totals[0] / 4
    assert len(none.scores) == 0
    assert set(some.labels.tolist()) == {2}
    wanted = torch.tensor([32.0, 32, 160, 96])
    assert generalized_iou(some.boxes, wanted).max() > 0.7


def test_detections_are_in_pixels() -> None:
    logits = torch.tensor([[[2.0, 0.0, 1.0], [0.0, 1.0, 5.0]], [[0.0, 3.0, 0.0], [0.0, 0.0, 0.0]]])
    boxes = torch.tensor([[[0.5, 0.5, 1.0, 1.0], [0.25, 0.5, 0.5, 0.2]], [[0.5, 0.25, 0.1, 0.5], [0.5, 0.5, 0.2, 0.2]]])
    for sizes in ([(100, 200), (50, 30)], torch.tensor([(100, 200), (50, 30)])):
        first, second = to_detections(Predictions(logits, boxes), sizes)
        assert first.labels.tolist() == [0, 1]
        torch.testing.assert_close(first.scores, logits[0].softmax(-1)[[0, 1], [0, 1]])
        torch.testing.assert_close(first.boxes, torch.tensor([[0.0, 0, 200, 100], [0, 40, 100, 60]]))
        torch.testing.assert_close(second.boxes[0], torch.tensor([13.5, 0, 16.5, 25]))
    kept, _ = to_detections(Predictions(logits, boxes), [(1, 1)] * 2, threshold=0.5)
    assert kept.labels.tolist() == [0]
    with pytest.raises(ValueError, match="expected \\(height, width\\) for each of 2 images"):
        to_detections(Predictions(logits, boxes), [(1, 1)])
    with pytest.raises(ValueError, match="must be positive"):
        to_detections(Predictions(logits, boxes), [(1, 1), (0, 1)])


def test_detections_are_hugging_faces(torchvision_models: ModuleType) -> None:
    transformers = pytest.importorskip("transformers")
    predictions = some_predictions(2, layers=1)
    theirs = transformers.DetrImageProcessor().post_process_object_detection(
        transformers.models.detr.modeling_detr.DetrObjectDetectionOutput(
            logits=predictions.logits, pred_boxes=predictions.boxes
        ),
        threshold=0.2,
        target_sizes=[(480, 640), (333, 500)],
    )
    ours = to_detections(predictions, [(480, 640), (333, 500)], threshold=0.2)
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found._asdict(), dict(expected), check_dtype=False)


LABELS, BOXES = torch.tensor([1]), torch.tensor([[0.5, 0.5, 0.2, 0.2]])


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"labels": LABELS}, "target 0 has no boxes"),
        ({"labels": LABELS, "boxes": BOXES[0]}, "labels \\(1,\\) and boxes \\(4,\\)"),
        ({"labels": LABELS, "boxes": BOXES.repeat(2, 1)}, "labels \\(1,\\) and boxes \\(2, 4\\)"),
        ({"labels": LABELS.float(), "boxes": BOXES}, "labels of torch.float32"),
        ({"labels": LABELS, "boxes": BOXES.long()}, "boxes of torch.int64"),
        ({"labels": LABELS + CLASSES, "boxes": BOXES}, "labels 10 to 10, expected 0 to 8"),
        ({"labels": -LABELS, "boxes": BOXES}, "labels -1 to -1"),
        ({"labels": LABELS, "boxes": BOXES * 100}, "box 0 of target 0 is \\[50.0"),
        ({"labels": LABELS, "boxes": BOXES + torch.tensor([0.41, 0, 0, 0])}, "inside the image"),
        ({"labels": LABELS, "boxes": BOXES * torch.tensor([1, 1, 0, 1])}, "with area"),
        ({"labels": LABELS, "boxes": BOXES * torch.tensor([1, 1, -1, 1])}, "with area"),
        ({"labels": LABELS, "boxes": BOXES * torch.nan}, "box 0 of target 0 is \\[nan"),
    ],
)
def test_wrong_targets(target: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SetCriterion(CLASSES)(some_predictions(1), [target])


def test_wrong_calls() -> None:
    with pytest.raises(ValueError, match="targets for 1 images, but predictions for 2"):
        SetCriterion(CLASSES)(some_predictions(2), some_targets(1))
    with pytest.raises(ValueError, match="predictions have 10 classes, expected 92"):
        SetCriterion(91)(some_predictions(1), some_targets(1))
    with pytest.raises(ValueError, match="zero images"):
        SetCriterion(CLASSES)(some_predictions(0), [])
    with pytest.raises(TypeError, match="target 0 has labels of type list and boxes of type Tensor: expected tensors"):
        SetCriterion(CLASSES)(some_predictions(1), [{"labels": [1], "boxes": BOXES}])  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="class_cost, box_cost and giou_cost are all 0"):
        Matcher(0, 0, 0)


def test_images_without_objects_cost_nothing_where_no_object_weighs_nothing() -> None:
    predictions = some_predictions(2)
    logits, boxes = (each.detach().requires_grad_() for each in predictions[:2])
    nothing = [{"labels": torch.empty(0, dtype=torch.int64), "boxes": torch.empty(0, 4)}] * 2
    criterion = SetCriterion(CLASSES, no_object=0.0)
    total = criterion.total(criterion(Predictions(logits, boxes), nothing))
    total.backward()
    assert total == 0
    assert logits.grad is not None
    assert not logits.grad.any()
