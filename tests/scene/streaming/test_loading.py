"""Readers in C++ and in Python return the same words and raise the same errors."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rooftop.scene import Geometry
from rooftop.scene.streaming.loading import SLOT_WORDS, Loader
from rooftop.scene.streaming.page_graph import PageGraph

BOTH = pytest.mark.parametrize("reader", ["compiled", "in Python"], indirect=True)


@BOTH
def test_every_page_arrives_or_is_named(paged_ball: Geometry, tmp_path: Path, reader: str) -> None:
    """One of two files has a changed page and is cut off within another page. So many pages are read that reads are
    merged."""
    path = tmp_path / "copy.rtg"
    path.write_bytes(paged_ball.path.read_bytes())
    graph = PageGraph([Geometry.open(path), paged_ball])
    words = torch.zeros(graph.count * SLOT_WORDS + 2, dtype=torch.int32)
    loader = Loader(graph, words, threads=3)
    changed, cut = 30, paged_ball.pages - 10
    with path.open("r+b") as file:
        file.truncate(int(paged_ball.page_offsets[cut]) + 100)
        file.seek(int(paged_ball.page_offsets[changed]) + 60)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 64]))
    pages = np.random.default_rng(0).permutation(graph.count)
    slots = np.arange(graph.count)
    loader.load(pages, slots, 0.0, pages.astype(np.float64))
    arrivals = loader.wait()
    assert loader.in_flight == 0
    assert sorted(arrivals.pages.tolist()) == list(range(graph.count))
    assert sorted(arrivals.errors) == [changed, *range(cut, paged_ball.pages)]
    assert f"checksum of page {changed} does not match" in str(arrivals.errors[changed])
    assert f"page {cut} is cut off after 100 of" in str(arrivals.errors[cut])
    for page, slot in zip(pages.tolist(), slots.tolist(), strict=True):
        expected = paged_ball.page(page % paged_ball.pages)
        found = words[slot * SLOT_WORDS : slot * SLOT_WORDS + len(expected)].numpy()
        assert (found == expected).all() or (page in arrivals.errors and not found.any())
    loader.close()


@pytest.mark.parametrize("reader", ["compiled"], indirect=True)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(size=st.integers(0, 700), seed=st.integers(0, 2**32 - 1))
def test_checksums_are_those_of_zlib(compiled_reader: Any, size: int, seed: int, reader: str) -> None:
    data = np.random.default_rng(seed).bytes(size)
    assert compiled_reader.crc_of(data) == zlib.crc32(data)


@BOTH
def test_a_fork_may_drop_a_loader(paged_ball: Geometry, reader: str) -> None:
    """A forked child has none of the reader's threads, and must not wait for them."""
    loader = Loader(PageGraph([paged_ball]), torch.zeros(SLOT_WORDS, dtype=torch.int32))
    child = os.fork()
    if child == 0:
        loader.close()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    loader.close()
