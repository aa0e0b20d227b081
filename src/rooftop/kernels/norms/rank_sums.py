"""Layer norm or RMS norm of a sum over ranks, in one CUDA C++ kernel: the last operation of a sublayer that is sharded
over ranks.

total = partial of rank 0 + partial of rank 1 + ... + input_bias + residual, y = norm(total). The kernel replaces an
all-reduce followed by `add_layer_norm` or `add_rms_norm`. The kernel is for few rows, as in a decoding step, where
latency matters more than bandwidth. Each rank writes its partial rows into the memory of all other ranks, as words of
4 bytes of data followed by the 4-byte number of the call. Then the rank waits until the other ranks' rows have arrived.
The exchange of rows takes one trip over the link, without a fence or a barrier, as in NCCL's protocol "LL". All ranks
add the rows in float32, in the order of the ranks, and round once, so the ranks' results are identical bit for bit.

Source: Hu et al. 2025, "Demystifying NCCL" (arXiv:2507.04786), section 3.2, for words with flags.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rooftop.kernels.norms.cuda_norms import CUDA_FILES, alike
from rooftop.kernels.norms.norms import LayerNorm, RmsNorm, check_norm, contiguous, norm_rows, rms_eps
from rooftop.kernels.norms.sum_norms import add_reference
from rooftop.kernels.norms.tables import RANK_SUM_CHUNKS, RANK_SUM_WARPS
from rooftop.kernels.operands.cuda_texts import cuda_text
from rooftop.kernels.operands.dtypes import CPP_TYPES, accumulator_dtype
from rooftop.launch import cuda

RANK_SUM_FILES = (*CUDA_FILES, "norms/rank_sums.cu")
WORD_BYTES = 8
"""The size of a word in a mailbox: four bytes of data, and four bytes for the number of the call."""
MOST_RANKS = 8


@dataclass(frozen=True)
class Mailboxes:
    """The mailboxes of all ranks. A mailbox is the memory of a rank to which the other ranks write; a new mailbox must
    be filled with zeros.

    All ranks must make the same calls in the same order. On each rank, a call must end before a call on another stream
    begins.

    Attributes:
        addresses: (ranks + 1,), int64, on this rank's device: the address of each rank's mailbox, followed by the
            address of `stop`, all as this rank's GPU sees them.
        state: (2,), int32, zeros at first: the number of calls so far, and how many blocks of the current call have
            already read this number.
        stop: (1,), int32, in pinned memory of the host. If this value is not 0, kernels no longer wait for other ranks,
            and the kernels' results are undefined.
        rank: index of this rank.
        words: the maximum number of words that a rank may send to a mailbox in one call; a word has `WORD_BYTES` bytes.
    """

    addresses: Tensor
    state: Tensor
    stop: Tensor
    rank: int
    words: int

    @classmethod
    def at(cls, addresses: Sequence[int], stop: Tensor, rank: int, words: int, device: torch.device) -> Mailboxes:
        """Create `Mailboxes` from the address of each rank's mailbox."""
        places = torch.tensor([*addresses, stop.data_ptr()], dtype=torch.int64, device=device)
        return cls(places, torch.zeros(2, dtype=torch.int32, device=device), stop, rank, words)

    @property
    def ranks(self) -> int:
        return len(self.addresses) - 1

    @staticmethod
    def bytes_of(ranks: int, words: int) -> int:
        """The size of a mailbox in bytes. A mailbox has room for the words of all ranks in two successive calls."""
        return 2 * ranks * words * WORD_BYTES

    def refused(self, rows: int, columns: int, dtype: torch.dtype) -> str:
        """The reason why the kernel cannot add these rows; empty if it can. The result is the same on all ranks."""
        if dtype not in CPP_TYPES:
            return f"the kernel adds float32 and half precision, not {dtype}"
        if not 0 < columns <= 32 * RANK_SUM_WARPS[-1] * width_of(columns, dtype) * _most_chunks(columns, dtype):
            return f"a row of {columns:,} elements does not fit in a block's registers"
        needed = rows * words_of(columns, dtype)
        if needed > self.words:
            return f"{rows} rows of {columns:,} elements take {needed:,} words, a mailbox has {self.words:,} per rank"
        return ""


def width_of(columns: int, dtype: torch.dtype) -> int:
    """The number of neighbouring elements, up to 16 bytes, that a thread loads at once. The number depends on nothing
    but the arguments, because all ranks must use the same number.
    """
    return math.gcd(16 // dtype.itemsize, columns)


def words_of(columns: int, dtype: torch.dtype) -> int:
    """The number of 32-bit words that a row of `columns` elements takes in a mailbox. If a thread loads one half
    precision element at a time, each of these elements takes a whole word.
    """
    width = width_of(columns, dtype)
    return columns // width * max(1, width * dtype.itemsize // 4)


def kernel_of(columns: int, dtype: torch.dtype, parameters: torch.dtype, ranks: int, rms: bool) -> tuple[str, int]:
    """Return the kernel's name and the number of threads of a block."""
    width = width_of(columns, dtype)
    packs = columns // width
    warps = next((each for each in RANK_SUM_WARPS if packs <= 32 * each), RANK_SUM_WARPS[-1])
    chunks = next(each for each in RANK_SUM_CHUNKS if packs <= 32 * warps * each)
    types = f"{CPP_TYPES[dtype]}, {CPP_TYPES[parameters]}"
    return f"norm_of_rank_sum<{types}, {width}, {chunks}, {warps}, {ranks}, {str(rms).lower()}>", 32 * warps


def _most_chunks(columns: int, dtype: torch.dtype) -> int:
    """The maximum number of packs of a row that a thread holds; a pack is the elements of one load (`width_of`). The
    thread adds each pack over the ranks. All its packs together have at most `RANK_SUM_CHUNKS[-1]` elements.
    """
    return RANK_SUM_CHUNKS[-1] // width_of(columns, dtype)


def norm_of_rank_sum(
    partial: Tensor,
    residual: Tensor | None,
    mailboxes: Mailboxes,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = 1e-5,
    *,
    input_bias: Tensor | None = None,
    rms: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute the sum of `partial` over all ranks, plus `input_bias` and `residual`, and the norm of this sum.

    All ranks must call this function with the same shapes, and with the same values of all arguments except `partial`
    and `mailboxes`. Like NCCL's kernels, the kernel waits for the other ranks; setting `mailboxes.stop` ends the wait.
    The function does not support autograd.

    Args:
        partial: (..., N), float32 or half precision, on a GPU.
        residual: like partial; None adds nothing.
        mailboxes: the mailboxes of this rank.
        weight, bias, input_bias: (N,).
        eps: added to the variance; None as in `torch.nn.functional.rms_norm`.
        rms: compute an RMS norm, which has no bias, instead of a layer norm.

    Returns:
        (y, total), both like partial. total is the sum, rounded once, and y is the norm of total.

    Raises:
        TypeError, ValueError: dtypes, shapes or devices do not match, or `Mailboxes.refused` returns a reason.
        MissingExtraError: NVRTC or `cuda.core` is not installed.
    """
    if rms and bias is not None:
        raise ValueError("norm_of_rank_sum: an RMS norm has no bias: leave out bias or rms")
    given = {"weight": weight, "bias": bias, "input_bias": input_bias}
    shape = check_norm("norm_of_rank_sum", partial.shape[-1], partial, residual, **given)
    rows, columns = norm_rows(partial, shape).shape
    eps = rms_eps("norm_of_rank_sum", partial, eps)
    refused = mailboxes.refused(rows, columns, partial.dtype)
    if refused:
        raise ValueError(f"norm_of_rank_sum: {refused}")
    if not cuda.runs_on(partial):
        raise ValueError(f"norm_of_rank_sum: expected tensors on a GPU, got {partial.device}: use torch.distributed")
    parameters = alike([contiguous(t) for t in (input_bias, weight, bias)], partial.dtype)
    parameter_dtype = next((t.dtype for t in parameters if t is not None), partial.dtype)
    name, threads = kernel_of(columns, partial.dtype, parameter_dtype, mailboxes.ranks, rms)
    kernel = cuda.compile(cuda_text(*RANK_SUM_FILES), name, device=partial.device)
    y, total = (torch.empty(partial.shape, dtype=partial.dtype, device=partial.device) for _ in range(2))
    width = width_of(columns, partial.dtype)
    tensors = [_aligned(t, width) for t in (partial, residual, *parameters)]
    places = (mailboxes.addresses, mailboxes.state, mailboxes.rank)
    half_words = mailboxes.ranks * mailboxes.words
    kernel.launch(rows, threads, *tensors, y, total, *places, columns, half_words, eps)
    return y, total


def _aligned(tensor: Tensor | None, width: int) -> Tensor | None:
    """The tensor itself if it is contiguous and aligned to `width` elements, which a thread loads at once; else
    a copy.
    """
    if tensor is None:
        return None
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % min(16, width * tensor.element_size()) else tensor


def norm_of_rank_sum_reference(
    partials: Sequence[Tensor],
    residual: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = 1e-5,
    *,
    input_bias: Tensor | None = None,
    rms: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute (norm, sum) in PyTorch from the partial rows of all ranks, in any floating point dtype.

    The sum is computed in float32 (float64 for float64), in the order of the ranks, and rounded once.
    """
    dtype, shape = partials[0].dtype, partials[0].shape
    wide = partials[0].to(accumulator_dtype(dtype))
    for partial in partials[1:]:
        wide = wide + partial
    total = add_reference(wide, residual, input_bias).to(dtype).reshape(-1, shape[-1])
    eps = rms_eps("norm_of_rank_sum", total, eps)
    y = (RmsNorm(total, weight, eps, dtype) if rms else LayerNorm(total, weight, bias, eps, dtype)).in_pytorch()[0]
    return y.reshape(shape), total.reshape(shape)
