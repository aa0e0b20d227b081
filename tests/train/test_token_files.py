"""Token files are read as their writers intended, according to an index, a header or their contents, or are refused."""

from __future__ import annotations

import gzip
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftop.cli.main import main
from rooftop.errors import InputError
from rooftop.train import open_tokens
from rooftop.train.tokens.number_widths import LOOKED_AT, PLACES, found_kind

RANDOM = np.random.default_rng(0)


def row_of(path: Path, kind: str | None = None) -> list[int]:
    found = open_tokens(path, kind)
    return found.read(0, len(found)).tolist()


# ---- numbers alone -------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["uint16", "uint32", "int64"]),
    st.sampled_from([4, 65, 256, 50257, 65536, 128256, 262144]),
    st.integers(200, 2000),
    st.integers(0, 2**32),
    st.booleans(),
)
def test_the_width_of_numbers_is_found(
    tmp_path_factory: pytest.TempPathFactory, kind: str, vocabulary: int, count: int, seed: int, rare: bool
) -> None:
    """Any number of tokens of any vocabulary, distributed uniformly or like words."""
    if kind == "uint16":
        vocabulary = min(vocabulary, 65536)
    share = np.random.default_rng(seed).random(count)
    tokens = (vocabulary * (share**4 if rare and vocabulary > 4 else share)).astype(kind)
    path = tmp_path_factory.mktemp("row") / "a.bin"
    tokens.tofile(path)
    assert row_of(path) == tokens.tolist()


@pytest.mark.parametrize("kind", ["uint16", "uint32", "int64"])
def test_the_width_of_a_large_file_is_found_by_places_all_over_it(kind: str, tmp_path: Path) -> None:
    """The file begins with padding, so the reader must look further into it."""
    count = PLACES * LOOKED_AT
    tokens = RANDOM.integers(0, 50257, count).astype(kind)
    tokens[: count // 4] = 0
    tokens.tofile(tmp_path / "a.bin")
    assert found_kind(tmp_path / "a.bin") == kind


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (np.zeros(100, np.uint16).tobytes(), "all of it is 0"),
        (RANDOM.integers(0, 50257, 999).astype(">u4").tobytes(), "big-endian"),
        (RANDOM.integers(0, 255, 999).astype(">u2").tobytes(), "big-endian"),
        (np.tile([1600, 100], 500).astype(np.uint16).tobytes(), "could be uint16 or uint32"),
        (b"this is a text " * 9, "is text, not numbers"),
        (("grün" * 5000).encode(), "is text, not numbers"),
        (RANDOM.integers(0, 97, 1 << 16).astype(np.uint8).tobytes(), "look like bytes"),
        (RANDOM.integers(0, 65, 10_000).astype(np.uint8).tobytes(), "look like bytes"),
        (gzip.compress(RANDOM.bytes(1000)), "compressed by gzip"),
        (b"LITPKDS" + struct.pack("<QBQ", 1, 8, 1000) + bytes(2000), "LitGPT's packed data set"),
        (b"\x93NUMPY\x01\x00" + RANDOM.bytes(2000), "a NumPy array: rename it to .npy"),
    ],
)
def test_what_cannot_be_told_is_refused(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(InputError, match=words):
        open_tokens(tmp_path / "a.bin")


@pytest.mark.parametrize("kind", ["uint8", "uint16", "uint32", "int32", "int64"])
def test_what_the_caller_says_of_numbers_alone_counts(kind: str, tmp_path: Path) -> None:
    np.arange(100).astype(kind).tofile(tmp_path / "a.bin")
    assert row_of(tmp_path / "a.bin", kind) == list(range(100))
    with pytest.raises(ValueError, match=r"kind must be one of uint8, uint16, .* got 'float32'"):
        open_tokens(tmp_path / "a.bin", "float32")


def test_the_command_finds_the_width(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Random uint32 tokens have the loss of the vocabulary, not that of data with every second token 0."""
    RANDOM.integers(0, 1000, 5000).astype(np.uint32).tofile(tmp_path / "l.bin")
    sizes = ["--num-layers", "1", "--hidden-size", "16", "--seq-length", "16", "--vocab-size", "1000"]
    words = ["train", "gpt", "--device", "cpu", "--no-roof", "--train-iters", "1", *sizes]
    assert main([*words, "--data-path", str(tmp_path / "l.bin")]) == 0
    out = capsys.readouterr().out
    assert f"312 sequences of 16 tokens in {tmp_path / 'l.bin'} (uint32), 1 a step" in out


# ---- Megatron-LM's index -------------------------------------------------------------------------------------------

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}
LENGTHS = [3, 5, 0, 2]


def index_of(kind: str, lengths: list[int] = LENGTHS, **changed: object) -> bytes:
    """Written like Megatron's `IndexedDatasetBuilder.finalize`, with one document for each sequence."""
    lengths_, size = np.array(lengths, np.int32), np.dtype(kind).itemsize
    starts = np.array([sum(lengths[:place]) * size for place in range(len(lengths))], np.int64)
    values = {"magic": b"MMIDIDX\0\0", "version": 1, "code": CODES[kind], "starts": starts} | changed
    documents = np.arange(len(lengths) + 1, dtype=np.int64)
    header = struct.pack("<9sQBQQ", values["magic"], values["version"], values["code"], len(lengths), len(documents))
    return header + lengths_.tobytes() + values["starts"].tobytes() + documents.tobytes()  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize("name", ["text.bin", "text.idx", "text"])
def test_megatrons_index_says_the_dtype(kind: str, name: str, tmp_path: Path) -> None:
    """The path names either file of the pair, or the prefix of both, as in Megatron."""
    tokens = np.arange(10).astype(kind)
    tokens.tofile(tmp_path / "text.bin")
    (tmp_path / "text.idx").write_bytes(index_of(kind))
    assert row_of(tmp_path / name) == list(range(10))
    (tmp_path / "text.idx").write_bytes(index_of(kind) + bytes(4))  # the modes of multimodal data
    assert row_of(tmp_path / name) == list(range(10))


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (index_of("int32", magic=b"TNTIDX\0\0\0"), "has Megatron's old format"),
        (index_of("int32", magic=b"SOMETHING"), "is not an index of Megatron-LM"),
        (b"", "is not an index of Megatron-LM"),
        (index_of("int32", version=2), "has version 2, expected 1"),
        (index_of("int32", code=7), "its numbers are float32: expected integers"),
        (index_of("int32", code=9), "of the unknown code 9"),
        (index_of("int32")[:20], "is cut off after 20 bytes"),
        (index_of("int32")[:-8], r"bytes, but 4 sequences and 5 document entries need 122"),
        (index_of("int32", [3, 5, 0, 3]), "has 40 bytes, .* describes 44: are they from different runs"),
        (index_of("uint16"), "has 40 bytes, .* describes 20"),
        (index_of("int32", starts=np.array([0, 20, 0, 32])), "do not lie one after another"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(index: bytes, words: str, tmp_path: Path) -> None:
    np.arange(10).astype(np.int32).tofile(tmp_path / "text.bin")
    (tmp_path / "text.idx").write_bytes(index)
    with pytest.raises(InputError, match=words):
        open_tokens(tmp_path / "text.bin")


def test_a_dtype_that_the_file_contradicts_is_refused(tmp_path: Path) -> None:
    np.arange(10).astype(np.int32).tofile(tmp_path / "text.bin")
    (tmp_path / "text.idx").write_bytes(index_of("int32"))
    assert row_of(tmp_path / "text.bin", "int32") == list(range(10))
    np.save(tmp_path / "a.npy", np.arange(10))
    (tmp_path / "a.txt").write_text("text")
    for name, words in (
        ("text.bin", "int32 tokens, as the index text.idx says: --token-dtype uint16 does not fit"),
        ("a.npy", "int64 tokens, as its header says"),
        ("a.txt", "--token-dtype uint16 is only for .bin files"),
    ):
        with pytest.raises(InputError, match=words):
            open_tokens(tmp_path / name, "uint16")


# ---- llm.c's header ------------------------------------------------------------------------------------------------


def headed(magic: int, version: int, tokens: np.ndarray, count: int | None = None) -> bytes:
    header = np.zeros(256, np.int32)
    header[:3] = magic, version, len(tokens) if count is None else count
    return header.tobytes() + tokens.tobytes()


@pytest.mark.parametrize(("magic", "version", "kind"), [(20240520, 1, np.uint16), (20240801, 7, np.uint32)])
def test_the_header_of_llm_c_is_no_token(
    magic: int, version: int, kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = RANDOM.integers(0, 50000, 333).astype(kind)
    path = tmp_path / "fineweb_train_000001.bin"
    path.write_bytes(headed(magic, version, tokens))
    for mapped in (0, 1 << 20):
        monkeypatch.setattr("rooftop.train.tokens.token_files.MAPPED_BYTES", mapped)
        assert row_of(path) == tokens.tolist()
    for content, words in (
        (headed(magic, version + 1, tokens), f"llm.c's header {magic} of version {version + 1}: expected {version}"),
        (headed(magic, version, tokens, 400), "which announces 400 tokens"),
        (headed(magic, version, tokens)[:-1], "which announces 333 tokens"),
        (headed(magic, version, tokens)[:99], "is cut off after 99 bytes"),
        (headed(20240522, 1, tokens), "questions of HellaSwag of llm.c"),
        (headed(20240326, 3, tokens), "a model of llm.c"),
    ):
        path.write_bytes(content)
        with pytest.raises(InputError, match=words.replace("expected", "expected version")):
            open_tokens(path)


# ---- nanoGPT -------------------------------------------------------------------------------------------------------


class Harmful:
    def __reduce__(self) -> tuple[object, ...]:
        return (pytest.fail, ("ran",))


def test_nanogpts_meta_says_how_many_characters_there_are(tmp_path: Path) -> None:
    tokens = RANDOM.integers(0, 65, 400).astype(np.uint16)
    tokens.tofile(tmp_path / "train.bin")
    meta = {"vocab_size": 65, "itos": {0: "a"}, "stoi": {"a": 0}}
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta))
    found = open_tokens(tmp_path / "train.bin")
    assert (found.vocabulary, found.read(0, 400).tolist()) == (65, tokens.tolist())
    for other in (pickle.dumps(Harmful()), pickle.dumps([1]), b"damaged", b"", b"K\x01K\x02R."):
        (tmp_path / "meta.pkl").write_bytes(other)
        assert open_tokens(tmp_path / "train.bin").vocabulary is None
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta))
    tokens.astype(np.uint32).tofile(tmp_path / "train.bin")
    with pytest.raises(InputError, match=r"looks like uint32, but meta.pkl beside it is from nanoGPT"):
        open_tokens(tmp_path / "train.bin")
    assert open_tokens(tmp_path / "train.bin", "uint32").vocabulary == 65


def test_a_folder_with_files_of_tokens_is_not_read_as_the_text_beside_them(tmp_path: Path) -> None:
    """The folder may contain train.bin and val.bin."""
    (tmp_path / "readme.txt").write_text("text")
    for name in ("train.bin", "val.bin"):
        np.arange(9).astype(np.uint16).tofile(tmp_path / name)
    with pytest.raises(InputError, match=r"has files of tokens \(train.bin, val.bin\): list the files to train on"):
        open_tokens(tmp_path)
