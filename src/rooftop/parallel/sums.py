"""Sum many tensors over ranks, and start each sum as soon as the tensor is ready.

A contiguous tensor that is large enough for full bandwidth is summed in place. Other tensors are copied into a bucket.
The bucket's sum starts when the bucket is full, and the results are copied back at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rooftop.parallel.exchanges import Group, Pending, start_sum

LARGE_BYTES = 4 << 20
BUCKET_BYTES = 32 << 20


class Sums:
    """Sums tensors over the ranks of a group, in place.

    All ranks must add tensors of the same shapes and dtypes in the same order. A tensor must not be used between `add`
    and `finish`.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self._large: list[Pending] = []
        self._begun: list[tuple[list[Tensor], Pending]] = []
        self._buckets: dict[torch.dtype, list[Tensor]] = {}

    @torch.no_grad()
    def add(self, tensor: Tensor) -> None:
        """Start to sum a large contiguous tensor immediately. Put any other tensor into a bucket; if the bucket has no
        room, start the bucket's sum first.
        """
        if tensor.nbytes >= LARGE_BYTES and tensor.is_contiguous():
            self._large.append(start_sum(tensor, self.group))
            return
        bucket = self._buckets.setdefault(tensor.dtype, [])
        if bucket and sum(each.nbytes for each in bucket) + tensor.nbytes > BUCKET_BYTES:
            self._begin(self._buckets.pop(tensor.dtype))
        self._buckets.setdefault(tensor.dtype, []).append(tensor)

    @torch.no_grad()
    def finish(self) -> None:
        """Start the remaining sums, and wait for all sums."""
        for bucket in self._buckets.values():
            self._begin(bucket)
        self._buckets.clear()
        for pending in self._large:
            pending()
        for bucket, pending in self._begun:
            parts = pending().split([tensor.numel() for tensor in bucket])
            torch._foreach_copy_(bucket, [part.view_as(tensor) for tensor, part in zip(bucket, parts, strict=True)])
        self._large.clear()
        self._begun.clear()

    def _begin(self, bucket: list[Tensor]) -> None:
        self._begun.append((bucket, start_sum(torch.cat([tensor.reshape(-1) for tensor in bucket]), self.group)))
