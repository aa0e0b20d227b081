"""Cost of operators with sparse operands: flops count stored elements, and only the addressed part of dense operands is
moved.

A cost does not read the values of indices. As in `indexing`, all indices count as different, up to the size of the
indexed dimension. The bytes of indices count wherever a tensor's pattern is read or written.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from rooftop.cost.accounting import Call, distinct_bytes, is_sparse, parts, stored_elements, tensor_bytes


def addressed_bytes(dense: Tensor, count: int) -> int:
    """Bytes of `count` elements of a tensor, but never more than the bytes of all its elements."""
    return min(count * dense.element_size(), tensor_bytes(dense))


def value_bytes(sparse: Tensor) -> int:
    """Bytes of a sparse tensor's values, without its indices."""
    return tensor_bytes(parts(sparse)[-1])


def index_bytes(sparse: Tensor) -> int:
    """Bytes of a sparse tensor's indices, without its values."""
    return distinct_bytes(parts(sparse)[:-1])


def new_bytes(written: Sequence[Tensor], read: Sequence[Tensor]) -> int:
    """Bytes of those results that do not share memory with an operand. For example, a sparse conversion may reuse the
    memory of the operand's values.
    """
    return distinct_bytes([*read, *written]) - distinct_bytes(read)


def multiply_adds(left: Tensor, right: Tensor, out: Tensor) -> int:
    """Number of multiply-adds in `left @ right`, (..., m, k) @ (..., k, n) or (..., m, k) @ (k,).

    For two sparse operands, the number depends on the positions of the elements. So the least possible number is
    counted: one multiply-add for each stored element of the result.
    """
    if is_sparse(left) and is_sparse(right):
        return stored_elements(out)
    if is_sparse(left):
        return stored_elements(left) * (right.shape[-1] if right.ndim > 1 else 1)
    if is_sparse(right):
        return left.shape[-2] * stored_elements(right)
    return out.numel() * left.shape[-1]


def factor_bytes(left: Tensor, right: Tensor, *addends: Tensor) -> int:
    """Bytes of both factors and of the addends. If one factor is sparse, only a part of the dense factor counts: the
    rows (of a right factor) or columns (of a left factor) that the sparse factor addresses."""
    if is_sparse(left) == is_sparse(right):
        return distinct_bytes([left, right, *addends])
    if is_sparse(left):
        columns = right.shape[-1] if right.ndim > 1 else 1
        factors = tensor_bytes(left) + addressed_bytes(right, _lines(left, -1) * columns)
    else:
        factors = tensor_bytes(right) + addressed_bytes(left, _lines(right, -2) * left.shape[-2])
    return factors + distinct_bytes(addends)


def _lines(sparse: Tensor, dimension: int) -> int:
    """An upper bound of the total number of rows (-2) or columns (-1) with a stored element, over all matrices of a
    batch. Each stored element, or each row or column of each block, counts as a different row or column."""
    values = parts(sparse)[-1]
    if sparse.layout in (torch.sparse_bsr, torch.sparse_bsc):  # (..., blocks, rows, columns)
        stored = values.numel() // (values.shape[-2] * values.shape[-1]) * values.shape[dimension]
    else:
        stored = values.numel()
    return min(stored, prod(sparse.shape[:-2]) * sparse.shape[dimension])


def elementwise_bytes(call: Call, read: Sequence[Tensor], written: Sequence[Tensor]) -> tuple[int, int]:
    """Bytes that an operator reads and writes if it reads each tensor once, and some tensors are sparse.

    For a sparse result, a dense operand is read only at the result's positions. An in-place operator changes a
    dense tensor only at the positions of the sparse operand. The earlier content of a sparse tensor that was changed in
    place is gone, so its earlier size is assumed to equal its present size.
    """
    target = written[0]
    sparse = [tensor for tensor in read if is_sparse(tensor)]
    dense = [tensor for tensor in read if not is_sparse(tensor)]
    if not call.in_place:
        places = stored_elements(target)
        dense_bytes = sum(addressed_bytes(t, places) for t in dense) if is_sparse(target) else distinct_bytes(dense)
        return distinct_bytes(sparse) + dense_bytes, new_bytes(written, sparse)
    if not is_sparse(target):
        places = sum(map(stored_elements, sparse))
        return distinct_bytes(sparse) + sum(addressed_bytes(t, places) for t in dense), addressed_bytes(target, places)
    # A sparse sum in place: each stored element of the result was stored in `target`, in the other operand, or in both.
    # So the bytes of the result count as read. An operator that only overwrites `target` reads just the operands.
    if any(tensor is not target for tensor in sparse):
        overwritten = all(tensor is not target for tensor in sparse)
        return distinct_bytes(sparse if overwritten else [target]), tensor_bytes(target)
    # The pattern stays. A number is applied to the values directly; a dense operand is read at the indices.
    lookup = index_bytes(target) if any(tensor.ndim for tensor in dense) else 0
    read_bytes = value_bytes(target) * len(sparse)
    return read_bytes + lookup + sum(addressed_bytes(t, stored_elements(target)) for t in dense), value_bytes(target)
