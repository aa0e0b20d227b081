"""Tensors in files that models compute themselves: equal ones are ignored silently, others are named."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rooftop.models import load, load_report, swin_t
from rooftop.models.vision.left_out import _hides_across_edges

TO_MICROSOFT = {
    "features.0.0.": "patch_embed.proj.",
    "features.0.2.": "patch_embed.norm.",
    ".mlp.0.": ".mlp.fc1.",
    ".mlp.3.": ".mlp.fc2.",
    **{f"features.{2 * stage + 1}.": f"layers.{stage}.blocks." for stage in range(4)},
    **{f"features.{2 * stage + 2}.": f"layers.{stage}.downsample." for stage in range(3)},
}
SMALL: dict[str, Any] = {"num_classes": 3, "embed_dim": 24}


def microsofts_mask(side: int, window: int) -> Tensor:
    """The mask that swin_transformer.py of microsoft/Swin-Transformer creates."""
    shift, image, count = window // 2, torch.zeros(1, side, side, 1), 0
    slices = (slice(0, -window), slice(-window, -shift), slice(-shift, None))
    for rows in slices:
        for columns in slices:
            image[:, rows, columns] = count
            count += 1
    parts = (
        image.view(1, side // window, window, side // window, window, 1).transpose(2, 3).reshape(-1, window * window)
    )
    difference = parts[:, None, :] - parts[:, :, None]
    return torch.zeros_like(difference).masked_fill(difference != 0, -100.0)


@pytest.fixture
def file() -> dict[str, Tensor]:
    """A file of a small Swin Transformer in Microsoft's format."""
    tensors = {}
    for key, value in swin_t(**SMALL).state_dict().items():
        for ours, theirs in TO_MICROSOFT.items():
            key = key.replace(ours, theirs)
        tensors[key] = value.view(49, 49) if key.endswith("index") else value
    return tensors | {f"layers.{n}.blocks.1.attn_mask": microsofts_mask(56 >> n, 7) for n in range(3)}


@pytest.mark.parametrize("window", [3, 4, 7])
@pytest.mark.parametrize("windows", [1, 2, 5])
def test_masks_of_shifted_windows(window: int, windows: int) -> None:
    mask = microsofts_mask(window * windows, window)
    assert _hides_across_edges(mask, (window, window))
    assert not _hides_across_edges(mask.transpose(1, 2) - 1, (window, window))
    assert not _hides_across_edges(mask[:, 1:], (window, window))
    assert not _hides_across_edges(mask, (window + 1, window))


def test_true_ones_are_left_out(file: dict[str, Tensor], tmp_path: Path) -> None:
    torch.save(file, tmp_path / "swin.pth")
    with warnings.catch_warnings(action="error"):
        load("swin_t", tmp_path / "swin.pth", **SMALL)
    report = load_report("swin_t", tmp_path / "swin.pth", **SMALL)
    assert (len(report.unneeded_keys), report.differing_keys) == (12 + 3, ())


@pytest.mark.parametrize("key", ["layers.1.blocks.1.attn_mask", "layers.2.blocks.5.attn.relative_position_index"])
def test_others_are_named(key: str, file: dict[str, Tensor], tmp_path: Path) -> None:
    torch.save(file | {key: file[key].flip(0)}, tmp_path / "swin.pth")
    with pytest.warns(UserWarning, match=f"{key} of the file are left out, but the model computes other values"):
        load("swin_t", tmp_path / "swin.pth", **SMALL)
    assert load_report("swin_t", tmp_path / "swin.pth", **SMALL).differing_keys == (key,)
