"""Embeddings: look up rows of a table. The gradient is deterministic, and fast for any distribution of tokens.

Forward copies rows, and is bound by memory. Each program copies some columns of several rows. Backward adds up the
gradients of equal tokens. If `input` has few tokens, one program computes some columns of the sum for one distinct
token: it finds all positions of the token and adds their rows of gradients. If `input` has many tokens, backward sorts
the tokens (stably, so that equal tokens keep their order), and splits the sorted list into chunks. Each program adds
the runs of equal tokens in one chunk, in float32. The sum of a run that lies within one chunk is then complete. Runs
that cross a chunk's boundary leave at most two partial sums per chunk. The partial sums form a sorted list again, which
is 16 times shorter than the previous list. The same kernel adds up the shorter list, and so on until one chunk is left.
So several programs share the work on a frequent token. No addition is atomic, and the order of additions depends only
on the tokens. Backward is bound by memory: it reads the gradients once, fills the table of gradients with zeros, and
then writes the rows of looked-up tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rooftop.cost import Cost, distinct_bytes, precision_of
from rooftop.kernels.lookups import launches
from rooftop.kernels.operands.checks import check_tensors
from rooftop.kernels.operands.dtypes import FLOATS, INDICES, accumulator_dtype
from rooftop.kernels.operands.references import by_reference
from rooftop.launch.operators import declare
from rooftop.launch.repeated_calls import repeated
from rooftop.launch.symbolic import recorded_whole

# ---- operators -------------------------------------------------------------------------------------------------


class Kept(NamedTuple):
    """The values that backward needs: the tokens, the table's number of rows, and the padding token, whose row gets no
    gradient.
    """

    input: Tensor
    rows: int
    padding: int


class Embedding(NamedTuple):
    """weight[input]. The row of the token `padding` gets no gradient; if `padding` is -1, every row gets a gradient."""

    input: Tensor
    weight: Tensor
    padding: int

    def run(self) -> Tensor:
        input, weight, _ = self
        rows, width = weight.shape
        pitch, size = weight.stride(0), weight.element_size()
        whole = weight.stride(1) == 1 and (width * size | pitch * size | weight.data_ptr()) % 16 == 0
        if by_reference(weight) or not whole or not input.numel():
            try:
                return torch.embedding(weight, input)
            except IndexError:
                raise _out_of_range(input, rows) from None
        if input.is_cpu and not bool(((input >= 0) & (input < rows)).all()):
            raise _out_of_range(input, rows)
        return launches.gather(input, weight)

    def fake(self) -> Tensor:
        return self.weight.new_empty((*self.input.shape, self.weight.shape[1]))

    def in_pytorch(self) -> Tensor:
        return torch.nn.functional.embedding(self.input, self.weight)

    def formula(self) -> Tensor:
        padding = None if self.padding < 0 else self.padding
        return torch.nn.functional.embedding(self.input, self.weight, padding)

    def keep(self, made: Tensor) -> Kept:
        return Kept(self.input, self.weight.shape[0], self.padding)

    @staticmethod
    def gradients(kept: Kept, wanted: Sequence[bool], dy: Tensor) -> tuple[None, Tensor]:
        return None, _embedding_backward(dy, *kept)

    def cost(self, made: Tensor) -> Cost:
        """The same cost as `aten::embedding`: all looked-up rows count as different, up to the size of the table."""
        read = min(distinct_bytes([self.weight]), made.numel() * made.element_size())
        return Cost(read + distinct_bytes([self.input]), distinct_bytes([made]))


class EmbeddingBackward(NamedTuple):
    """The gradient (V, D) of a table of V rows, from dy (*input.shape, D)."""

    dy: Tensor
    input: Tensor
    rows: int
    padding: int

    def run(self) -> Tensor:
        compute = embedding_backward_reference if by_reference(self.dy) else launches.add_rows
        return compute(*self._flat(), self.rows, self.padding)

    def fake(self) -> Tensor:
        return self.dy.new_empty((self.rows, self.dy.shape[-1]))

    def formula(self) -> Tensor:
        dy, tokens = self._flat()
        values = dy.to(accumulator_dtype(dy.dtype)).masked_fill((tokens == self.padding)[:, None], 0.0)
        return values.new_zeros(self.rows, dy.shape[1]).index_add(0, tokens, values).to(dy.dtype)

    def _flat(self) -> tuple[Tensor, Tensor]:
        """View dy as (N, D), and tokens as (N,)."""
        tokens = self.input.reshape(-1)
        return self.dy.reshape(tokens.shape[0], self.dy.shape[-1]), tokens

    def cost(self, made: Tensor) -> Cost:
        """Each element of dy is added once, and the gradient of the whole table is written."""
        flops = {precision_of(self.dy.dtype): self.dy.numel()}
        return Cost(distinct_bytes([self.dy, self.input]), distinct_bytes([made]), flops)


_embedding = declare("embedding", Embedding, known=True)
_embedding_backward = declare("embedding_backward", EmbeddingBackward, known=True)


def embedding_backward_reference(dy: Tensor, tokens: Tensor, rows: int, padding: int) -> Tensor:
    """The gradient (V, D) of the table from dy (N, D) and tokens (N,); added up in float32, or float64 for float64."""
    inside = accumulator_dtype(dy.dtype)
    values = dy.to(inside).masked_fill((tokens == padding)[:, None], 0.0)
    return torch.zeros(rows, dy.shape[1], dtype=inside, device=dy.device).index_add_(0, tokens, values).to(dy.dtype)


# ---- public ----------------------------------------------------------------------------------------------------


@repeated
@recorded_whole
def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """weight[input], with the arguments of `torch.nn.functional.embedding`.

    Args:
        input: any shape, int32 or int64, tokens from 0 to V - 1. Out-of-range tokens raise on the CPU. On a GPU,
            out-of-range tokens stop the program with a device error, as in PyTorch.
        weight: (V, D), bfloat16, float16, float32 or float64.
        padding_idx: a token whose row gets no gradient; a negative number counts from the end of the table.
        max_norm, scale_grad_by_freq, sparse: only PyTorch's defaults are accepted.
        norm_type: has no effect, since it is an argument of max_norm.

    Returns:
        (*input.shape, D). The gradient of the weight is added up in float32 (float64 for float64). The order of the
        additions depends only on the tokens, so the gradient has the same bits in each run.

    Raises:
        TypeError: a tensor's layout is not `torch.strided`, or its dtype is wrong.
        ValueError: shapes or devices do not match, or padding_idx is outside the table.
        IndexError: on the CPU, a token is out of range.
        NotImplementedError: max_norm, scale_grad_by_freq or sparse is given.
    """
    check_unsupported(max_norm, scale_grad_by_freq, sparse)
    _check(input, weight, padding_idx)
    padding = -1 if padding_idx is None else padding_idx % weight.shape[0]
    return _embedding(input, weight, padding)


def check_unsupported(max_norm: float | None, scale_grad_by_freq: bool, sparse: bool) -> None:
    """Raise NotImplementedError if one of these arguments of `torch.nn.functional.embedding` is given."""
    for name, given in (("max_norm", max_norm), ("scale_grad_by_freq", scale_grad_by_freq), ("sparse", sparse)):
        if given is not None and given is not False:
            raise NotImplementedError(f"embedding: {name} is not supported: use torch.nn.functional.embedding for it")


def _out_of_range(input: Tensor, rows: int) -> IndexError:
    return IndexError(
        f"embedding: index out of range: input must be from 0 to {rows - 1}, the rows of weight, got {input.min()} to "
        f"{input.max()}"
    )


def _check(input: Tensor, weight: Tensor, padding_idx: int | None) -> None:
    check_tensors("embedding", INDICES, input=input)
    check_tensors("embedding", FLOATS, (), ("input", input), weight=weight)
    if weight.dim() != 2:
        raise ValueError(f"embedding: expected a weight of shape (V, D), got {tuple(weight.shape)}")
    rows = weight.shape[0]
    if rows == 0 and input.numel():
        raise ValueError(f"embedding: weight of shape {tuple(weight.shape)} has no rows, but input has tokens")
    if padding_idx is not None and not isinstance(padding_idx, (int, torch.SymInt)):
        raise TypeError(f"embedding: padding_idx must be an int or None, got {type(padding_idx).__name__}")
    if padding_idx is not None and not -rows <= padding_idx < rows:
        raise ValueError(f"embedding: padding_idx {padding_idx} is out of range for {rows} rows")
