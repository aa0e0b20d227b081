"""Convert text to tokens and back, with the `tokenizer.json` in the folder of the weights, or with one token per byte.

When tokens are decoded one by one, a character can be incomplete. `Decoder` returns the character once it is complete.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from rooftop.errors import InputError, MissingExtraError

TOKENIZER = "tokenizer.json"
OTHERS = ("tokenizer.model", "vocab.json", "vocab.txt")
"""Files of tokenizers in older formats, which folders may have instead of a `tokenizer.json`."""

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # a tokenizer decodes an incomplete character to this


class Tokenizer(Protocol):
    """Converts text to tokens and back."""

    def encode(self, text: str) -> list[int]:
        """Convert a text to tokens, including the special tokens that a model expects at the beginning."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Convert tokens to text, without special tokens; an incomplete character at the end becomes U+FFFD."""


class ByteTokenizer:
    """A tokenizer with one token per byte of UTF-8; a token above 255 is decoded to its number, such as <1234>."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return b"".join(bytes([t]) if t < 256 else f"<{t}>".encode() for t in tokens).decode(errors="replace")


class FileTokenizer:
    """The tokenizer in a `tokenizer.json`, as Hugging Face writes it.

    Settings of the file that truncate or pad texts are ignored, as in transformers: they were made for training.

    Args:
        path: the file.

    Raises:
        InputError: the file does not exist or is damaged.
        MissingExtraError: `tokenizers` is not installed.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            other = next((name for name in OTHERS if (path.parent / name).is_file()), None)
            remedy = "--bytes uses each byte as a token, for models trained that way"
            if other is not None:
                remedy = (
                    f"AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER) of transformers makes it from {other}"
                )
            raise InputError(f"{path} is missing: expected the tokenizer beside the weights; {remedy}")
        try:
            import tokenizers
        except ImportError as error:
            raise MissingExtraError('tokenizer.json needs tokenizers: pip install "rooftop[text]"') from error
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises plain Exception
            raise InputError(f"{path} is damaged or not a tokenizer ({error})") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens)))


def stop_tokens(folder: Path) -> list[int]:
    """Read the tokens that end a text, from the folder's generation_config.json or, if that names none, config.json.

    The result is empty if neither file names such a token.

    Raises:
        InputError: a file cannot be read, or `eos_token_id` is invalid.
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
                    f"eos_token_id of {path} must be a token ID or a list of token IDs, got {given!r}: correct it"
                )
            return tokens
    return []


class Decoder:
    """Decodes tokens to text one by one.

    Args:
        tokenizer: the model's tokenizer.
        prompt: the preceding tokens; the text of the first new token may depend on these, e.g. a leading space.
    """

    CONTEXT = 5  # number of earlier tokens to decode again, because a tokenizer may alter the first tokens of a text

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer, self._tokens = tokenizer, list(prompt)
        self._told = len(self._tokens)  # number of tokens whose text was returned
        self._begin = max(0, self._told - self.CONTEXT)

    def add(self, token: int) -> str:
        """Return the text that the token adds; the empty string while a character is incomplete."""
        self._tokens.append(token)
        text = self._new()
        if not text or text.endswith(UNFINISHED):
            return ""
        self._begin, self._told = max(self._begin, self._told - self.CONTEXT), len(self._tokens)
        return text

    def rest(self) -> str:
        """Return the text that `add` held back because a character is incomplete. Call this after the last token."""
        text = self._new()
        self._told = len(self._tokens)
        return text

    def _new(self) -> str:
        before = self._tokenizer.decode(self._tokens[self._begin : self._told])
        return self._tokenizer.decode(self._tokens[self._begin :])[len(before) :]
