"""Tokens of text: bytes, files of Hugging Face, text that comes token by token."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooftop.errors import InputError, MissingExtraError
from rooftop.models.gpt.tokenizing import ByteTokenizer, Decoder, FileTokenizer, stop_tokens


@given(st.text())
def test_bytes_are_what_they_were(text: str) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.text(min_size=1), st.text())
def test_text_that_comes_token_by_token_is_the_same_text(prompt: str, text: str) -> None:
    tokenizer = ByteTokenizer()
    decoder = Decoder(tokenizer, tokenizer.encode(prompt))
    parts = [decoder.add(token) for token in tokenizer.encode(text)]
    assert "".join(parts) + decoder.rest() == text
    assert decoder.rest() == ""


def test_a_character_is_told_when_it_is_whole() -> None:
    decoder = Decoder(ByteTokenizer(), [65])
    assert [decoder.add(token) for token in "aü€".encode()] == ["a", "", "ü", "", "", "€"]
    assert decoder.add("ü".encode()[0]) == ""
    assert decoder.rest() == "\N{REPLACEMENT CHARACTER}"


def test_what_is_no_byte_is_shown_by_its_number() -> None:
    assert ByteTokenizer().decode([72, 105, 1000]) == "Hi<1000>"


def saved(path: Path, spaces: str) -> FileTokenizer:
    """A tokenizer of words that treats spaces like GPT-2's ("before") or Llama's ("joined")."""
    tokenizers = pytest.importorskip("tokenizers")
    words = (
        ["<s>", "▁a", "▁roof", "▁of", "tiles", "▁"]
        if spaces == "joined"
        else ["<s>", "Ġa", "Ġroof", "Ġof", "tiles", "Ġ"]
    )
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(dict(zip(words, range(6), strict=True)), "<s>"))
    tokenizer.decoder = tokenizers.decoders.Metaspace() if spaces == "joined" else tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.save(str(path))
    return FileTokenizer(path)


@pytest.mark.parametrize("spaces", ["before", "joined"])
def test_spaces_between_tokens_are_those_of_the_whole_text(spaces: str, tmp_path: Path) -> None:
    tokenizer = saved(tmp_path / "tokenizer.json", spaces)
    tokens = [0, 1, 2, 3, 4, 1, 4, 4, 2, 2, 1, 3]
    for first in (1, 2, 5):
        decoder = Decoder(tokenizer, tokens[:first])
        parts = [decoder.add(token) for token in tokens[first:]]
        assert tokenizer.decode(tokens[:first]) + "".join(parts) == tokenizer.decode(tokens)
    assert tokenizer.decode(tokens).strip() == "a roof oftiles atilestiles roof roof a of"


def test_a_text_is_neither_truncated_nor_padded(tmp_path: Path) -> None:
    """A tokenizer that was saved after a training may have the training's truncation and padding."""
    tokenizer = saved(tmp_path / "tokenizer.json", "before")._tokenizer
    tokenizer.pre_tokenizer = pytest.importorskip("tokenizers").pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert FileTokenizer(tmp_path / "tokenizer.json").encode("tiles a roof of a roof") == [4, 1, 2, 3, 1, 2]


def test_files_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"tokenizer.json is missing: .*--bytes"):
        FileTokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(InputError, match=r"save_pretrained\(FOLDER\) of transformers makes it from tokenizer.model"):
        FileTokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match=r"tokenizer.json is damaged"):
        FileTokenizer(tmp_path / "tokenizer.json")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtraError, match=r'pip install "rooftop\[text\]"'):
        FileTokenizer(tmp_path / "tokenizer.json")


def test_what_ends_a_text(tmp_path: Path) -> None:
    assert stop_tokens(tmp_path) == []
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert stop_tokens(tmp_path) == [7]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [8, 9]}')
    assert stop_tokens(tmp_path) == [8, 9]
    (tmp_path / "generation_config.json").write_text("{}")
    assert stop_tokens(tmp_path) == [7]
    (tmp_path / "generation_config.json").write_text("[")
    with pytest.raises(InputError, match=r"generation_config\.json cannot be read"):
        stop_tokens(tmp_path)


@pytest.mark.parametrize("given", ["7", 7.0, True, -1, {"a": 7}, [7, [8]], [None]], ids=str)
def test_what_ends_a_text_is_a_token(given: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": given}))
    message = r"eos_token_id of .*config\.json must be a token ID or a list of token IDs, got"
    with pytest.raises(InputError, match=message):
        stop_tokens(tmp_path)
