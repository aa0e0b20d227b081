"""Each kernel that inductor makes for a GPU has a cost, and kernels with known names cost the bytes that they move."""

from __future__ import annotations

import json
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

PINNED = "2.13"

pytestmark = pytest.mark.skipif(
    not torch.__version__.startswith(PINNED) or torch.cuda.is_available(),
    reason=f"pretends that a GPU is there, deep in torch {PINNED}; where there is one, test_graphs.py uses it",
)


@pytest.fixture
def kernels_of(fork: Callable[..., BaseProcess], tmp_path: Path) -> Callable[[str], list[dict[str, Any]]]:
    """Run in a separate process, where torch believes that there is a GPU."""

    def kernels(network: str) -> list[dict[str, Any]]:
        path = Path(__file__).with_name("gpu_code.py")
        program = f"import runpy\nrunpy.run_path({str(path)!r}, run_name='__main__')"
        streams = {"output": tmp_path / "output", "errors": tmp_path / "errors"}
        process = fork(program, network, environment={}, folder=tmp_path, **streams)
        process.join(300)
        assert process.exitcode == 0, streams["errors"].read_text()[-2000:]
        return [json.loads(line) for line in streams["output"].read_text().splitlines()]

    return kernels


def named(kernels: list[dict[str, Any]], *parts: str) -> list[list[int]]:
    return [kernel["moved"] for kernel in kernels if all(part in kernel["name"] for part in parts)]


def test_convolutions_norms_and_pooling(kernels_of: Callable[[str], list[dict[str, Any]]]) -> None:
    kernels = kernels_of("convolutions")
    assert [kernel for kernel in kernels if kernel["moved"] is None] == []
    large, small = 2 * 8 * 64 * 32 * 32, 2 * 8 * 64 * 16 * 16  # bytes of the stem's images, and of the pooled ones
    indices = small // 2
    assert [large, small + indices] in named(kernels, "max_pool2d")
    fill, scatter = named(kernels, "max_pool2d_with_indices_backward")[:2]
    assert fill == [0, 2 * large]  # sums in float32
    assert scatter == [small + indices, 2 * small]


def test_attention_norms_and_embeddings(kernels_of: Callable[[str], list[dict[str, Any]]]) -> None:
    kernels = kernels_of("text")
    assert [kernel for kernel in kernels if kernel["moved"] is None] == []
    gradient = 4 * 1000 * 256  # bytes of the gradient of the token table, in float32
    assert [0, gradient] in named(kernels, "embedding_dense_backward")  # filled with zeros
    assert [gradient, gradient // 2] in named(kernels, "embedding_dense_backward")  # and cast at the end
