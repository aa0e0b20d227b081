"""Tokens: the same sequence from any kind of file. Files without tokens are refused by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rooftop.errors import InputError
from rooftop.train import Tokens, open_tokens
from rooftop.train.tokens import token_files
from rooftop.train.tokens.mixtures import paths_of

ROW = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3], np.uint16)


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize(("name", "kind"), [("a.bin", "uint16"), ("a.bin", "uint32"), ("a.npy", "uint16")])
def test_files_of_tokens_are_read_as_they_were_written(
    name: str, kind: str, mapped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_files, "MAPPED_BYTES", 0 if mapped else 1 << 20)
    path = tmp_path / name
    if name.endswith(".npy"):
        np.save(path, ROW)
    else:
        ROW.astype(kind).tofile(path)
    found = open_tokens(path, kind)
    assert isinstance(found.parts[0], np.memmap) == (mapped or name.endswith(".npy"))
    assert (len(found), found.text) == (10, False)
    assert torch.equal(found.read(2, 9), torch.from_numpy(ROW[2:9].astype(np.int64)))


def test_a_folder_is_its_texts_in_the_order_of_their_paths(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name, content in {"b/a.txt": b"two ", "c.md": "drei ü".encode(), "a.txt": b"one ", "e.txt": b""}.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / ".hidden").write_bytes(b"no")
    (tmp_path / "d.png").write_bytes(b"no\0")
    found = open_tokens(tmp_path)
    assert bytes(found.read(0, len(found)).tolist()).decode() == "one two drei ü"
    assert found.text


def test_a_row_in_parts_reads_as_one_in_a_piece() -> None:
    whole = np.arange(20)
    parts = Tokens([whole[:3], whole[3:3], whole[3:4], whole[4:20]], "parts")
    for start in range(21):
        for stop in range(start, 21):
            assert parts.read(start, stop).tolist() == list(range(start, stop))
    for start, stop in ((-1, 3), (5, 21), (4, 3)):
        with pytest.raises(IndexError, match="parts has 20 tokens"):
            parts.read(start, stop)


def test_a_vocabulary_must_have_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rooftop.train.tokens.tokens.SCANNED", 4)
    seen: list[float] = []
    Tokens([ROW], "row").check_vocabulary(10, lambda what, fraction: seen.append(fraction))
    assert seen == [0.4, 0.8, 1.0]
    Tokens([ROW], "row").check_vocabulary(
        1 << 16, lambda what, fraction: pytest.fail("the dtype bounds the tokens, so nothing is read")
    )
    with pytest.raises(
        InputError, match="row has the token 9, but in a vocabulary of 9, tokens are 0 to 8: enlarge the"
    ):
        Tokens([ROW], "row").check_vocabulary(9)
    with pytest.raises(InputError, match="row has the token -1"):
        Tokens([np.array([0, -1])], "row").check_vocabulary(9)
    with pytest.raises(InputError, match="for text, use a vocabulary of at least 256"):
        Tokens([np.array([200], np.uint8)], "row", text=True).check_vocabulary(128)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.bin", b"123", "has 3 bytes, which is not a whole number of 16-bit tokens"),
        ("a.npy", b"text", "is not a .npy file of numbers"),
        ("a.txt", b"a\0b", "is not text: it has bytes that are 0"),
        ("nothing/", b"", "has no text in it"),
        ("missing", None, "does not exist"),
    ],
)
def test_what_is_no_row_of_tokens_is_refused(name: str, content: bytes | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if name.endswith("/"):
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=words):
        open_tokens(path)


@pytest.mark.parametrize("array", [np.zeros((2, 2), int), np.zeros(3)])
def test_an_array_of_another_kind_is_refused(array: np.ndarray, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(InputError, match="expected integers of one dimension"):
        open_tokens(tmp_path / "a.npy")


def test_the_folder_of_the_process_may_be_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_bytes(b"one ")
    monkeypatch.chdir(tmp_path)
    assert len(open_tokens(Path())) == len(open_tokens(".")) == 4
    assert paths_of(["."])[0] == Path()
