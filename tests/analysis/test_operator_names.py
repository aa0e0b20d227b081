"""Operators that share a schema name have different names in a report."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import rooftop
from rooftop.hardware import ceilings_of

H200 = ceilings_of("h200")


def names_of(report: rooftop.analysis.Report) -> set[str]:
    return {row.name.removeprefix("aten::") for row in report.ops if "conv" in row.name and "fused" not in row.name}


@pytest.mark.parametrize("dimensions", [1, 2, 3])
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_a_transposed_convolution_has_its_name(dimensions: int, train: bool) -> None:
    """A convolution of the same shapes keeps a separate row."""
    plain, transposed = (getattr(nn, f"{name}{dimensions}d")(3, 3, 3, padding=1) for name in ("Conv", "ConvTranspose"))
    x = torch.rand(2, 3, *(8,) * dimensions, requires_grad=True)
    expected = {"convolution", f"conv_transpose{dimensions}d"}
    if train:
        expected |= {f"{name}_backward" for name in expected}
    report = rooftop.predict(nn.Sequential(plain, transposed), x, ceilings=H200, train=train)
    assert names_of(report) == expected
    assert {row.calls for row in report.ops if "conv" in row.name} == {1}
    assert report.to_dict()["ops"][0]["name"] in {f"aten::{name}" for name in expected}


def test_under_a_compiler_too() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ConvTranspose2d(3, 3, 3, padding=1))
    x, ceilings = (
        torch.rand(2, 3, 8, 8),
        replace(H200, kind="cpu"),
    )  # arbitrary ceilings: measuring this machine takes longer
    report = rooftop.analyze(model, x, train=True, compile=True, ceilings=ceilings)
    every = {f"{name}{part}" for name in ("convolution", "conv_transpose2d") for part in ("", "_backward")}
    assert names_of(report) == every
