"""Fuse a sum over tensor parallel ranks with the operations that follow in a transformer: the residual connection and a
norm.

A decoding step has two such sums in each layer, with one row per sequence. NCCL and a separate norm take two
latency-bound kernels for each sum. `rooftop.kernels.norms.rank_sums` is one kernel that computes the sum and the norm.
In this kernel, ranks write directly into each other's memory.

    sums = norm_sums(group, device)                           # called by all ranks
    if not sums.refused(rows, columns, dtype):
        total, normed = Summand(part, bias, sums).summed_and_normed(norm, x)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from rooftop.errors import MissingExtraError
from rooftop.kernels.norms.rank_sums import MOST_RANKS, Mailboxes, norm_of_rank_sum
from rooftop.launch.nvrtc import require_cuda_core
from rooftop.nn import LayerNorm, RMSNorm
from rooftop.nn.hooks import is_plain
from rooftop.parallel.exchanges import Group
from rooftop.parallel.peer_memory import of_all, peer_memory, stop_of_waits

WORDS = 32_768
"""Maximum number of 4-byte words that a rank sends for one sum: 128 KiB, such as 16 rows of 4096 numbers in half
precision. NCCL computes larger sums, since it does not send a sequence number with every word. For 128 KiB on two
H200s, the kernel takes 5.6 µs, and NCCL with a norm takes 12.6 µs (benchmarks/norm_sums.py). Larger limits were not
tried.
"""


@dataclass(frozen=True)
class NormSums:
    """Computes sums over a process group's ranks, and norms of these sums, with the kernel
    `rooftop.kernels.norms.rank_sums`. As with NCCL, all ranks must make the same calls in the same order, on one stream
    at a time.

    Attributes:
        mailboxes: the memory through which the ranks' kernels exchange summands; None: this group cannot use the
            kernel.
        reason: why this group cannot use the kernel, such as "there is one rank"; "" if it can.
    """

    mailboxes: Mailboxes | None = None
    reason: str = ""

    def refused(self, rows: int, columns: int, dtype: torch.dtype) -> str:
        """Why `summed_and_normed` cannot sum a tensor (rows, columns) of this dtype over the ranks; "" if it can. The
        reason is the same on all ranks."""
        return self.reason if self.mailboxes is None else self.mailboxes.refused(rows, columns, dtype)

    def summed_and_normed(
        self, norm: nn.Module, x: Tensor | None, part: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Compute (total, norm(total)). The total is the sum of all ranks' `part`, plus `bias` and `x`, which are the
        same on all ranks.

        Args:
            norm: a plain `LayerNorm` or `RMSNorm` (see `takes`).
            x: (..., N), the residual connection; None: the total is without x.
            part: (..., N), this rank's summand.
            bias: (N,); None: the total is without a bias.
        """
        assert self.mailboxes is not None
        assert isinstance(norm, LayerNorm | RMSNorm)
        shift = norm.bias if isinstance(norm, LayerNorm) else None
        normed, total = norm_of_rank_sum(
            part, x, self.mailboxes, norm.weight, shift, norm.eps, input_bias=bias, rms=isinstance(norm, RMSNorm)
        )
        return total, normed


class Summand(NamedTuple):
    """This rank's summand in a sum over tensor parallel ranks that is not computed yet. The kernel of the norm that
    follows also computes the sum.

    Attributes:
        part: (B, S, W), this rank's summand, different on each rank.
        bias: (W,), added to the sum once; None: no bias.
        sums: the object that computes the sum.
    """

    part: Tensor
    bias: Tensor | None
    sums: NormSums

    def summed_and_normed(self, norm: nn.Module, x: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute (x + sum, norm(x + sum)), where the sum is over all ranks' `part`, plus `bias`. If x is None, the sum
        alone takes the place of x + sum."""
        return self.sums.summed_and_normed(norm, x, self.part, self.bias)


def takes(norm: nn.Module) -> bool:
    """Whether the kernel `rank_sums` can compute this norm: a LayerNorm or RMSNorm over the last dimension, without
    hooks."""
    return (is_plain(norm, LayerNorm) or is_plain(norm, RMSNorm)) and len(norm.normalized_shape) == 1  # type: ignore[arg-type]


_of_groups: WeakKeyDictionary[ProcessGroup, NormSums] = WeakKeyDictionary()


def norm_sums(group: Group, device: torch.device) -> NormSums:
    """Return the `NormSums` of a process group. The first call for a group creates the group's `NormSums` and waits for
    all of its ranks, so all of its ranks must make this call."""
    if group is None or group.size() == 1:
        return NormSums(reason="there is one rank")
    if device.type != "cuda":
        return NormSums(reason=f"the ranks are on a {device.type.upper()}")
    if group.size() > MOST_RANKS:
        return NormSums(reason=f"there are {group.size()} ranks, the kernel is for {MOST_RANKS} at most")
    if group not in _of_groups:
        _of_groups[group] = _made(group, device)
    return _of_groups[group]


def first_refusal(own: str, group: Group) -> str:
    """The reason of the group's first rank that cannot use the kernel, with its index in the group; "" if all
    ranks can. `own` is the calling rank's reason; "" if it can. All ranks must make this call."""
    if group is None:
        return own
    return next((f"rank {rank}: {each}" for rank, each in enumerate(of_all(own, group)) if each), "")


def _made(group: ProcessGroup, device: torch.device) -> NormSums:
    memory = peer_memory(Mailboxes.bytes_of(group.size(), WORDS), group, device, _lacking())
    if memory.refused:
        return NormSums(reason=memory.refused)
    return NormSums(Mailboxes.at(memory.addresses, stop_of_waits(), group.rank(), WORDS, device))


def _lacking() -> str:
    """Why this rank cannot compile the kernel `rank_sums`; "" if it can."""
    try:
        require_cuda_core()
    except MissingExtraError as error:
        return str(error)
    return ""
