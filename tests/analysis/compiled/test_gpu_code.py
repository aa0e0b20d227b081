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


Kernels = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def kernels(fork: Callable[..., BaseProcess], made_once: Callable[[str, Callable[[Path], None]], Path]) -> Kernels:
    """The kernels of each network, from a separate process, where torch believes that there is a GPU."""
    networks = ("convolutions", "text")

    def make(folder: Path) -> None:
        path = Path(__file__).with_name("gpu_code.py")
        program = f"import runpy\nrunpy.run_path({str(path)!r}, run_name='__main__')"
        streams = {"output": folder / "output", "errors": folder / "errors"}
        process = fork(program, *networks, environment={}, folder=folder, **streams)
        process.join(300)
        assert process.exitcode == 0, streams["errors"].read_text()[-2000:]

    lines = (made_once("gpu_code", make) / "output").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return {name: [kernel for kernel in found if kernel["network"] == name] for name in networks}


def named(kernels: list[dict[str, Any]], *parts: str) -> list[list[int]]:
    return [kernel["moved"] for kernel in kernels if all(part in kernel["name"] for part in parts)]


def test_convolutions_norms_and_pooling(kernels: Kernels) -> None:
    found = kernels["convolutions"]
    assert [kernel for kernel in found if kernel["moved"] is None] == []
    large, small = 2 * 8 * 64 * 32 * 32, 2 * 8 * 64 * 16 * 16  # bytes of the stem's images, and of the pooled ones
    indices = small // 2
    assert [large, small + indices] in named(found, "max_pool2d")
    fill, scatter = named(found, "max_pool2d_with_indices_backward")[:2]
    assert fill == [0, 2 * large]  # sums in float32
    assert scatter == [small + indices, 2 * small]


def test_attention_norms_and_embeddings(kernels: Kernels) -> None:
    found = kernels["text"]
    assert [kernel for kernel in found if kernel["moved"] is None] == []
    gradient = 4 * 1000 * 256  # bytes of the gradient of the token table, in float32
    assert [0, gradient] in named(found, "embedding_dense_backward")  # filled with zeros
    assert [gradient, gradient // 2] in named(found, "embedding_dense_backward")  # and cast at the end
