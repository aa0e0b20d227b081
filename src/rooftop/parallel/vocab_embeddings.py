"""An embedding whose rows are split over tensor parallel ranks. Each rank looks up its own tokens, and the ranks' sum
is the result.

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
    """An embedding whose rows are divided among the ranks.

    All ranks have the same number of rows. If the number of ranks does not divide the vocabulary, the last rows are
    padding, which no token uses.

    Args:
        vocabulary: number of tokens of the whole table.
        features: features of each token.
        group: the ranks; None: an ordinary embedding.
        sequence_parallel: whether the ranks split the result along the sequence.

    Attributes:
        start: the token to which this rank's first row belongs.
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
        """Look up tokens (..., S), int32 or int64, the same on all ranks. Returns (..., S, D) or, with sequence
        parallelism, this rank's part of S.

        Raises:
            IndexError: a token is invalid (on the CPU). On a GPU, an invalid token causes a device-side assertion.
            ValueError: the sequence cannot be split among the ranks.
        """
        if self.group is None:
            return embedding(input, self.weight)
        _check(input, self.vocabulary)
        found = self.summand(input)
        if self.sequence_parallel:
            return scattered_sum_of_ranks(found, SEQUENCE, self.group)
        return sum_of_ranks(found, self.group)

    def summand(self, input: Tensor) -> Tensor:
        """This rank's summand of the sum in `forward`, with zeros for other ranks' tokens. The tokens are not
        checked."""
        row = input - self.start
        elsewhere = (row < 0) | (row >= self.num_embeddings)
        return embedding(row.masked_fill(elsewhere, 0), self.weight).masked_fill(elsewhere[..., None], 0.0)

    def extra_repr(self) -> str:
        """The size of the embedding table, this rank's index, and the number of the table's rows on each rank."""
        if self.group is None:
            return super().extra_repr()
        index, count = place_in(self.group)
        padding = count * self.num_embeddings - self.vocabulary
        said = f"{self.num_embeddings} rows each" + (f", the last {padding} are padding" if padding else "")
        return f"{self.vocabulary}, {self.embedding_dim}, rank {index} of {count}, {said}"


def _check(tokens: Tensor, vocabulary: int) -> None:
    inside = ((tokens >= 0) & (tokens < vocabulary)).all()
    if tokens.device.type != "cpu":
        torch._assert_async(inside)  # an invalid token causes a device-side assertion; the host does not wait for it
    elif not inside:
        wrong = tokens[(tokens < 0) | (tokens >= vocabulary)][0].item()
        raise IndexError(f"VocabParallelEmbedding: index out of range: token {wrong} of a vocabulary of {vocabulary}")
