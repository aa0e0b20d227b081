"""Convert text to tokens and back, with the `tokenizer.json` in the weights' folder, or with one token per byte.

Text that arrives token by token can end within a character: `Decoder` holds back incomplete characters.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from rooftop.errors import InputError, MissingExtraError

TOKENIZER = "tokenizer.json"
UNFINISHED = "�"  # a decoder's output for bytes that are not a whole character


class Tokenizer(Protocol):
    """Text to tokens and back."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, including those that a model expects at its beginning."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special tokens; U+FFFD if they end within a character."""


class ByteTokenizer:
    """A token for each byte of UTF-8; tokens beyond 255 are shown by their number, as <1234>."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return b"".join(bytes([t]) if t < 256 else f"<{t}>".encode() for t in tokens).decode(errors="replace")


class FileTokenizer:
    """The tokenizer in a `tokenizer.json`, as Hugging Face writes it.

    Args:
        path: the file.

    Raises:
        InputError: it does not exist or is damaged.
        MissingExtraError: `tokenizers` is not installed.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise InputError(
                f"{path} is missing: expected the tokenizer beside the weights; --bytes uses each byte as a token, "
                "for models trained that way"
            )
        try:
            import tokenizers
        except ImportError as error:
            raise MissingExtraError('tokenizer.json needs tokenizers: pip install "rooftop[text]"') from error
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library has no error class of its own
            raise InputError(f"{path} is damaged or not a tokenizer ({error})") from error

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens)))


def stop_tokens(folder: Path) -> list[int]:
    """The tokens that end a text, from the folder's generation_config.json or, without that, config.json; empty if
    neither has any.

    Raises:
        InputError: one of them cannot be read.
    """
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if not path.is_file():
            continue
        try:
            given = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError) as error:
            raise InputError(f"{path} cannot be read as a JSON object: {error}") from error
        if given is not None:
            tokens = given if isinstance(given, list) else [given]
            if not all(type(token) is int and token >= 0 for token in tokens):
                raise InputError(
                    f"eos_token_id of {path} must be a token or a list of tokens, got {given!r}: correct it"
                )
            return tokens
    return []


class Decoder:
    """The text of tokens as they arrive.

    Args:
        tokenizer: the model's tokenizer.
        prompt: the preceding tokens; the text of the first new token may depend on them, such as its space.
    """

    CONTEXT = 5  # earlier tokens that are decoded again, because a decoder joins or cuts text at the beginning

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer, self._tokens = tokenizer, list(prompt)
        self._told = len(self._tokens)  # tokens whose text was returned
        self._begin = max(0, self._told - self.CONTEXT)

    def add(self, token: int) -> str:
        """Return the text that the token adds; nothing while a character is incomplete."""
        self._tokens.append(token)
        text = self._new()
        if not text or text.endswith(UNFINISHED):
            return ""
        self._begin, self._told = max(self._begin, self._told - self.CONTEXT), len(self._tokens)
        return text

    def rest(self) -> str:
        """At the end, return the text that was held back."""
        text = self._new()
        self._told = len(self._tokens)
        return text

    def _new(self) -> str:
        before = self._tokenizer.decode(self._tokens[self._begin : self._told])
        return self._tokenizer.decode(self._tokens[self._begin :])[len(before) :]
