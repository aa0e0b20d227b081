"""An embedding whose rows are split over tensor parallel ranks: each looks up its own tokens, and the sum is the
result.

Source: Shoeybi et al., "Megatron-LM" (arXiv:1909.08053), section 3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rooftop.kernels import embedding
from rooftop.nn import Embedding
from rooftop.parallel.exchanges import Group, place_in, scattered_sum_of_ranks, sum_of_ranks
from rooftop.parallel.shards import padded_rows_of
from rooftop.parallel.tensor_linears import SEQUENCE


class VocabParallelEmbedding(Embedding):
    """An embedding; each rank has some of the rows.

    All ranks have equally many rows. If the ranks do not divide the vocabulary, the last rows are padding, which no
    token uses.

    Args:
        vocabulary: number of tokens of the whole table.
        features: features of each token.
        group: the ranks; None: an ordinary embedding.
        sequence_parallel: whether the result is split along the sequence.

    Attributes:
        start: the token of this rank's first row.
    """

    def __init__(self, vocabulary: int, features: int, *, group: Group = None, sequence_parallel: bool = False) -> None:
        index, count = place_in(group)
        shard = padded_rows_of((vocabulary, features), index, count)
        rows = -(-vocabulary // count)
        super().__init__(rows, features)
        self.vocabulary, self.start = vocabulary, index * rows
        self.group, self.sequence_parallel = group, sequence_parallel
        self.shards = {"weight": shard} if count > 1 else {}

    def forward(self, input: Tensor) -> Tensor:
        """Tokens (..., S), int32 or int64, all on every rank; returns (..., S, D), with sequence parallelism a part of
        S.

        Raises:
            IndexError: a token is invalid (on the CPU; on a GPU the program stops with a device error).
            ValueError: a sequence that cannot be split among the ranks.
        """
        if self.group is None:
            return embedding(input, self.weight)
        _check(input, self.vocabulary)
        found = self.summand(input)
        if self.sequence_parallel:
            return scattered_sum_of_ranks(found, SEQUENCE, self.group)
        return sum_of_ranks(found, self.group)

    def summand(self, input: Tensor) -> Tensor:
        """This rank's part of the sum in `forward`: zeros for tokens of other ranks. Tokens are not checked."""
        row = input - self.start
        elsewhere = (row < 0) | (row >= self.num_embeddings)
        return embedding(row.masked_fill(elsewhere, 0), self.weight).masked_fill(elsewhere[..., None], 0.0)

    def extra_repr(self) -> str:
        """The table, and this rank's part of it."""
        if self.group is None:
            return super().extra_repr()
        index, count = place_in(self.group)
        padding = count * self.num_embeddings - self.vocabulary
        said = f"{self.num_embeddings} rows each" + (f", the last {padding} are padding" if padding else "")
        return f"{self.vocabulary}, {self.embedding_dim}, rank {index} of {count}, {said}"


def _check(tokens: Tensor, vocabulary: int) -> None:
    inside = ((tokens >= 0) & (tokens < vocabulary)).all()
    if tokens.device.type != "cpu":
        torch._assert_async(inside)  # an invalid token stops the device; the host does not wait here
    elif not inside:
        wrong = tokens[(tokens < 0) | (tokens >= vocabulary)][0].item()
        raise IndexError(f"VocabParallelEmbedding: index out of range: token {wrong} of a vocabulary of {vocabulary}")
