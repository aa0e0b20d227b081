"""The arithmetic of `benchmarks/context.py` and `benchmarks/pipelines.py`."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

Script = Callable[[str], ModuleType]


def test_efficiency_is_that_of_one_gpu_by_the_ranks(script: Script) -> None:
    rows = [
        {"case": "a", "ranks": 1, "variant": "rooftop", "ms": 100.0},
        {"case": "a", "ranks": 4, "variant": "rooftop, p2p", "ms": 30.0},
        {"case": "a", "ranks": 4, "variant": "PyTorch", "failed": "it cannot"},
    ]
    script("context").with_efficiency(rows)
    assert rows[1]["efficiency"] == pytest.approx(100 / 30 / 4)
    assert "efficiency" not in rows[0]
    assert "efficiency" not in rows[2]


def test_documents_are_of_the_lengths_that_are_told(script: Script) -> None:
    context = script("context")
    lengths = context.lengths_of(context.documents_of(65536), 65536)
    assert sum(lengths) == 65536
    assert all(1024 <= length <= 32768 for length in lengths[:-1])
    assert len(set(lengths)) > 3


def test_layers_of_an_interleaved_stage_divide_the_model(script: Script) -> None:
    pipelines = script("pipelines")
    config = pipelines.training_of(quick=False).config
    (layers,) = pipelines.layers_of("interleaved", 2, config.layers).values()
    assert config.layers % (2 * layers) == 0
    assert pipelines.layers_of("1f1b", 2, config.layers) == {}
