"""The start and end of each document that is packed in a sequence.

    documents = Documents.of_tokens(tokens, end=0)   # tokens (B, S): each token 0 ends a document
    documents.spans[0]                               # ((0, 5), (5, 9), ...) of the first sequence

A query attends only to positions of its own document. The borders are plain numbers on the host, because they
decide which kernels run and which rows ranks exchange.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

Span = tuple[int, int]
"""(first, end): the positions from `first` to `end` - 1."""


@dataclass(frozen=True)
class Documents:
    """The documents in a batch of sequences, which all have the same length.

    Attributes:
        length: number of positions in a sequence.
        spans: for each sequence, (first, end) of its documents in order. The documents of a sequence cover the whole
            sequence.

    Raises:
        ValueError: the spans do not follow each other from 0 to `length`, or a span is empty.
    """

    length: int
    spans: tuple[tuple[Span, ...], ...]

    def __post_init__(self) -> None:
        if not all(isinstance(spans, tuple) and all(_is_span(span) for span in spans) for spans in self.spans):
            raise ValueError(
                f"Documents: expected a tuple of (first, end) pairs of ints for each sequence, got {self.spans}"
            )
        for number, spans in enumerate(self.spans):
            borders = [0, *(end for _, end in spans)]
            whole = borders[-1] == self.length and [first for first, _ in spans] == borders[:-1]
            if not whole or any(end <= first for first, end in pairwise(borders)):
                raise ValueError(
                    f"Documents: the documents of sequence {number} must cover 0 to {self.length} in order, none of "
                    f"them empty, got {spans}"
                )

    @staticmethod
    def of_tokens(tokens: Tensor, end: int) -> Documents:
        """Find the documents in tokens (B, S). A document ends after each token `end`, and at the end of the sequence.

        Tokens on a GPU are copied to the host, which waits for the copy.
        """
        if isinstance(end, bool) or not isinstance(end, int):
            raise ValueError(f"Documents: end must be a token (an int), got {end!r}")
        if tokens.dim() != 2:
            raise ValueError(f"Documents: expected tokens (B, S), got {tuple(tokens.shape)}")
        length = tokens.shape[1]
        found: list[list[int]] = [[] for _ in range(tokens.shape[0])]
        for row, position in (tokens.detach().cpu() == end).nonzero().tolist():
            found[row].append(position + 1)
        return Documents.of_ends(length, found)

    @staticmethod
    def of_ends(length: int, ends: list[list[int]]) -> Documents:
        """Create documents from the ascending ends in each sequence. A last end that equals `length` may be omitted."""
        rows = (
            [0, *each] if each and each[-1] == length else [0, *each, *([length] if length else [])] for each in ends
        )
        return Documents(length, tuple(tuple(pairwise(row)) for row in rows))

    def starts(self) -> Tensor:
        """The first position of each position's document, (B, S) int64 on the CPU."""
        rows = [
            torch.repeat_interleave(
                torch.tensor([first for first, _ in spans], dtype=torch.int64),
                torch.tensor([end - first for first, end in spans], dtype=torch.int64),
            )
            for spans in self.spans
        ]
        return torch.stack(rows) if rows else torch.zeros(0, self.length, dtype=torch.int64)

    def positions(self) -> Tensor:
        """The index of each position within its document, (B, S) int64 on the CPU."""
        return torch.arange(self.length) - self.starts()


def _is_span(span: object) -> bool:
    return isinstance(span, tuple) and len(span) == 2 and all(isinstance(each, int) for each in span)
