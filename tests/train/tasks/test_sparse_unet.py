"""Sparse U-Nets on simulated scans."""

from __future__ import annotations

import pytest
import torch

from rooftop.data.samples import sample
from rooftop.errors import InputError
from rooftop.train.recipes import Recipe
from rooftop.train.tasks import Task, find_task
from rooftop.train.tasks.sparse_unet import confusion, joined, overlaps, voxels_of

TINY = "model.options={beams=16, turn=128, scans=2, held_out=2, planes=[8, 16], voxel_m=0.3}"


def built(data: str | None, *values: str) -> Task:
    build, defaults = find_task("sparse_unet", data)
    torch.manual_seed(0)
    return build(data, Recipe.of(defaults).with_values(values))


@pytest.fixture(scope="module")
def task() -> Task:
    pytest.importorskip("warp")
    return built("scans:room", TINY)


def test_rooms_are_learned(task: Task) -> None:
    assert task.valid is not None
    assert task.metrics is not None
    assert task.judge is not None
    assert task.examples is not None
    batch = task.collate([task.train[0], task.train[1]])
    optimizer = torch.optim.AdamW(task.model.parameters(), 0.03)
    losses = []
    for _ in range(12):
        losses.append(task.loss(task.model.train(), batch))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.6 * losses[0]
    task.model.eval()
    with torch.no_grad():
        found = task.metrics(task.model, batch)
    assert found["accuracy"].shape == (2,)
    assert ((found["accuracy"] >= 0) & (found["accuracy"] <= 1)).all()
    figures = task.judge(task.model, torch.device("cpu"))
    assert 0 < figures["mIoU"] <= 1
    assert "IoU floor" in figures
    ((caption, picture),) = task.examples(task.model, torch.device("cpu"))
    assert "labelled correctly" in caption
    assert picture.width > picture.height / 2


def test_accuracy_of_a_scan_does_not_depend_on_its_batch(task: Task) -> None:
    assert task.metrics is not None
    rows = [task.train[0], task.train[1]]
    model = task.model.eval()
    with torch.no_grad():
        both = task.metrics(model, joined(rows))["accuracy"]
        alone = torch.cat([task.metrics(model, joined([each]))["accuracy"] for each in rows])
    torch.testing.assert_close(both, alone, rtol=0, atol=0.02)


def test_training_scans_are_varied_and_held_out_ones_are_not(task: Task) -> None:
    one, same, other = (sample(task.train, 1, 0, epoch) for epoch in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert not torch.equal(one, task.train[1])
    assert task.valid is not None
    assert torch.equal(sample(task.valid, 1, 0, 0), task.valid[1])
    voxels = voxels_of(joined([one, other]))
    assert voxels.sites.batch_size == 2
    assert len(voxels.of_point) == len(one) + len(other)


def test_overlaps_by_hand() -> None:
    truth, said = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0, 0, 1, 1, 0])
    found = overlaps(confusion(truth, said, 3))
    torch.testing.assert_close(found[:2], torch.tensor([2 / 4, 1 / 3]))
    assert found[2].isnan()


def test_what_is_no_data() -> None:
    with pytest.raises(InputError, match=r"expected scans, or scans:street, scans:room"):
        built("clouds/")
    with pytest.raises(InputError, match=r"model.options has 'depth': expected beams, turn"):
        built("scans", "model.options={depth=3}")
    for option in ("planes=5", "planes=[0]", "scans=0", 'beams="x"', "turn=1.5", "voxel_m=-1.0", 'voxel_m="x"'):
        with pytest.raises(InputError, match=rf"model.options has {option.partition('=')[0]}=.*: expected"):
            built("scans", f"model.options={{{option}}}")
