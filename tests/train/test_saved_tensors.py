"""Files of a checkpoint are safetensors files. Any part of a tensor is read exactly from any pieces. If a byte changes,
the error names the tensor that contains this byte."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftop.errors import InputError
from rooftop.kernels import Box
from rooftop.train.checkpoints import files as checkpoint_files
from rooftop.train.checkpoints.files import FilePiece, checksum, header_of, write_file
from rooftop.train.checkpoints.folders import TRAINING, write_described
from rooftop.train.checkpoints.plans import Held, part_of, planned
from rooftop.train.checkpoints.saved_tensors import DTYPES, KINDS, SavedTensors, entry_of, whole_tensor

BLOCK = 64
"""Bytes of a block, so few that even small tensors have several blocks."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_files, "BLOCK_BYTES", BLOCK)


def counted(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(1, prod(shape) + 1).view(shape).to(dtype)


def written(folder: Path, held: list[list[tuple[Held, Tensor]]]) -> SavedTensors:
    """A checkpoint of the ranks' parts."""
    folder.mkdir(exist_ok=True)
    plans = planned([[each for each, _ in rank] for rank in held])
    files = []
    for rank, pieces in enumerate(plans):
        there = {each.name: (each, tensor) for each, tensor in held[rank]}
        parts = [part_of(piece, there[piece.name][1], there[piece.name][0]) for piece in pieces]
        if pieces:
            files.append(f"rank-{rank}.safetensors")
            contents = (part.contiguous().reshape(-1).view(torch.uint8).numpy().data for part in parts)
            write_file(folder / files[-1], pieces, contents)
    write_described(folder, files, {"step": 3})
    return opened(folder)


def opened(folder: Path) -> SavedTensors:
    return SavedTensors(folder, json.loads((folder / TRAINING).read_text())["index_crc32"])


def whole(name: str, tensor: Tensor) -> tuple[Held, Tensor]:
    return Held.of(name, KINDS[tensor.dtype], tuple(tensor.shape), None), tensor


# ---- exact -------------------------------------------------------------------------------------------------------

SIZES = st.tuples(st.integers(1, 13), st.integers(1, 9))


def parts_of(size: int, cuts: list[int]) -> Iterator[tuple[int, int]]:
    """Ranges between the cuts."""
    edges = sorted({0, size, *(cut % size for cut in cuts)})
    yield from pairwise(edges)


@settings(max_examples=60, deadline=None)
@given(
    size=SIZES,
    rows=st.lists(st.integers(0, 50), max_size=3),
    columns=st.lists(st.integers(0, 50), max_size=2),
    dtype=st.sampled_from([*DTYPES.values()]),
    data=st.data(),
)
def test_any_part_of_any_pieces(
    size: tuple[int, int],
    rows: list[int],
    columns: list[int],
    dtype: torch.dtype,
    data: st.DataObject,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Pieces form a grid over the tensor, one on each rank; the part is any box of the tensor."""
    tensor = counted(size, dtype)
    held = []
    for first, last in parts_of(size[0], rows):
        for left, right in parts_of(size[1], columns):
            pieces = (((first, left), (last - first, right - left)),)
            held.append([(Held("it", KINDS[dtype], size, pieces), tensor[first:last, left:right])])
    saved = written(tmp_path_factory.mktemp("grid"), held)
    start = tuple(data.draw(st.integers(0, extent - 1)) for extent in size)
    counts = tuple(data.draw(st.integers(1, extent - at)) for extent, at in zip(size, start, strict=True))
    box = Box(size, start, counts)
    found = torch.full(counts, -1, dtype=dtype)
    saved.fill(found, "it", box)
    torch.testing.assert_close(found, box.of(tensor), rtol=0, atol=0)
    torch.testing.assert_close(whole_tensor(saved, "it"), tensor, rtol=0, atol=0)


def test_safetensors_reads_the_files(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = {"wide": counted((5, 7), torch.float64), "a.weight": counted((40, 3)), "step": torch.tensor(4.0)}
    written(tmp_path, [[whole(name, tensor) for name, tensor in tensors.items()]])
    found = safetensors.load_file(tmp_path / "rank-0.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)


def test_a_part_is_named_by_its_ranges() -> None:
    assert FilePiece("up", "F32", (8, 4), (2, 0), (2, 4)).key == "up[2:4, 0:4]"
    assert FilePiece("up", "F32", (8, 4), (0, 0), (8, 4)).key == "up"
    assert FilePiece("step", "F32", (), (), ()).key == "step"


def test_the_header_is_as_long_before_the_checksums_are_known() -> None:
    piece = FilePiece("up", "F32", (99, 4), (0, 0), (99, 4))
    assert piece.blocks == 25
    lengths = {len(header_of([piece], [[digits * 8] * piece.blocks])) for digits in "0f"}
    assert len(lengths) == 1
    assert lengths.pop() % 8 == 0


# ---- damaged -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks have half the rows of a tensor each, and one of them another tensor."""
    tensor, folder = counted((40, 3)), tmp_path_factory.mktemp("two")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(checkpoint_files, "BLOCK_BYTES", BLOCK)
        halves = [
            (Held("up", "F32", (40, 3), (((first, 0), (20, 3)),)), tensor[first : first + 20]) for first in (0, 20)
        ]
        written(folder, [[halves[0], whole("norm", counted((11,)))], [halves[1]]])
    return folder


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_changed_byte_is_named_with_its_tensor(two_files: Path, data: st.DataObject) -> None:
    """Damage is found wherever it is in the bytes that are read; elsewhere it does not matter. If the header of a file
    has changed, nothing is read."""
    file = two_files / f"rank-{data.draw(st.integers(0, 1))}.safetensors"
    before = file.read_bytes()
    at = data.draw(st.integers(0, len(before) - 1))
    after = bytearray(before)
    after[at] ^= data.draw(st.integers(1, 255))
    saved = opened(two_files)
    pieces = {
        name: (piece.offset, piece.offset + prod(piece.size) * entry.dtype.itemsize)
        for name, entry in saved.entries.items()
        for piece in entry.pieces
        if piece.file == file.name
    }
    damaged = [name for name, (begin, end) in pieces.items() if begin <= at < end]
    file.write_bytes(after)
    try:
        with pytest.raises(InputError, match=damaged[0] if damaged else "header") as raised:
            opened(two_files).verify()
        assert file.name in str(raised.value)
        for name in saved.entries:
            if name in damaged:
                with pytest.raises(InputError, match=f"{file.name} is damaged: a byte of {name} has changed"):
                    whole_tensor(opened(two_files), name)
            elif name in pieces and not damaged:
                with pytest.raises(InputError, match="header"):
                    whole_tensor(opened(two_files), name)
            else:
                whole_tensor(opened(two_files), name)
    finally:
        file.write_bytes(before)
    opened(two_files).verify()


def test_a_file_that_is_cut_off_missing_or_of_another_save_is_said(two_files: Path) -> None:
    file, index = two_files / "rank-1.safetensors", two_files / "index.json"
    content, text = file.read_bytes(), index.read_text()
    file.write_bytes(content[:-1])
    with pytest.raises(
        InputError, match=rf"rank-1.safetensors, which has the tensor up, has {len(content) - 1} bytes, expected"
    ):
        whole_tensor(opened(two_files), "up")
    whole_tensor(opened(two_files), "norm")  # norm is in the other file
    file.unlink()
    with pytest.raises(InputError, match=r"rank-1\.safetensors, which has the tensor up, is missing"):
        opened(two_files).check_files()
    file.write_bytes(content)
    index.write_text(text.replace('"step":3', '"step":4'))
    with pytest.raises(
        InputError, match=r"index\.json was changed: its checksum differs from the one in the training's record;"
    ):
        opened(two_files)
    index.unlink()
    with pytest.raises(InputError, match=r"index\.json cannot be read \(No such file"):
        opened(two_files)
    index.write_text(text)
    opened(two_files).verify()


def test_another_shape_or_dtype_is_refused_by_name(two_files: Path) -> None:
    saved = opened(two_files)
    for dtype, shape, words in (
        (
            torch.float32,
            (40, 4),
            r"does not fit: up is float32 \(40, 3\) in the checkpoint and float32 .* in the model",
        ),
        (torch.float64, (40, 3), r"up is float32 \(40, 3\) in the checkpoint and float64 .* in the model"),
    ):
        with pytest.raises(InputError, match=words):
            entry_of(saved, two_files, "up", dtype, shape)
    with pytest.raises(InputError, match="has no tensor down: it belongs to another model"):
        entry_of(saved, two_files, "down", torch.float32, (1,))


def test_a_file_whose_checksums_were_not_written_yet_is_not_taken(tmp_path: Path) -> None:
    """A file without final checksums is incomplete, like a truncated file."""
    tensor = counted((40, 3))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(checkpoint_files, "checksum", lambda block: checkpoint_files.WAITING_CHECKSUM)
        saved = written(tmp_path, [[whole("up", tensor)]])
    with pytest.raises(InputError, match="a byte of up has changed"):
        whole_tensor(saved, "up")
    assert checksum(b"") == "00000000"
