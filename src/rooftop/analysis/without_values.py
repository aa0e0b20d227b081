"""Replacements for library functions that read values. The replacements also accept fake tensors, which have no values.

| function | why it reads values | for fake tensors |
|---|---|---|
| `torch.nn.init.trunc_normal_` | draws until all values fit | draws nothing, as for meta tensors |
| transformers' `find_packed_sequence_indices` | several sequences in a row need a separate mask | one sequence a row |
| `_ctc_loss`, and backward | the longest target sets the number of states | padded length, or mean length |
| `coalesce` of sparse tensors | equal indices become one | all indices count as different |
| `to_sparse` of dense tensors, sparse times sparse | only nonzero values are stored | refused, like `nonzero` |

`_grouped_mm` (mixture of experts) reads no values, but PyTorch's own function for fake tensors refuses all dtypes other
than bfloat16. PyTorch's operator accepts float32 and float16 too, and so does the replacement.

Without the replacement of `find_packed_sequence_indices`, transformers would build a mask for every fake tensor, and a
decoder would be counted without its causal kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor


@contextmanager
def answered_without_values() -> Iterator[None]:
    """Within the block, let the functions in `ANSWERED` accept fake tensors. Results for real tensors do not change."""
    with ExitStack() as stack:
        for module, name, answered in ANSWERED:
            loaded = sys.modules.get(module)
            if hasattr(loaded, name):
                stack.enter_context(mock.patch.object(loaded, name, answered(getattr(loaded, name))))
        yield


def _draw_none(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def draw_real(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else draw(tensor, *args, **kwargs)

    return draw_real


def _find_one_sequence(find: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    def find_real(positions: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
        # `find` runs even if its result is unused, because the operators inside it are counted
        found = find(positions, *args, **kwargs)
        return None if isinstance(found, FakeTensor) else found

    return find_real


ANSWERED = (
    (nn.init.__name__, "_no_grad_trunc_normal_", _draw_none),
    ("transformers.masking_utils", "find_packed_sequence_indices", _find_one_sequence),
)
"""(module, function, its replacement)"""


def _ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, *settings: Any
) -> tuple[Tensor, Tensor]:
    """(loss of each sequence, logarithms of the probabilities of all states at all steps)"""
    steps, batch, _ = log_probs.shape  # (T, N, C)
    if isinstance(target_lengths, Tensor):
        labels = targets.shape[1] if targets.dim() == 2 else -(-targets.shape[0] // batch)
    else:
        labels = max(target_lengths)
    return log_probs.new_empty(batch), log_probs.new_empty((batch, steps, 2 * labels + 1))


def _ctc_loss_backward(grad: Tensor, log_probs: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(log_probs)


def _thnn_fused_lstm_cell(input_gates: Tensor, hidden_gates: Tensor, cx: Tensor, *biases: Any) -> Any:
    """(h', c', workspace). PyTorch's own function for fake tensors requires biases."""
    return torch.empty_like(cx), torch.empty_like(cx), torch.empty_like(input_gates)


def _grouped_mm(left: Tensor, right: Tensor, offs: Tensor | None = None, *rest: Any, **settings: Any) -> Tensor:
    """A product for each group of rows. PyTorch's own function for fake tensors accepts only bfloat16."""
    if left.dtype == torch.bfloat16 or left.dtype != right.dtype or not left.is_floating_point():
        made: Tensor = torch.ops.aten._grouped_mm.default(left, right, offs, *rest, **settings)
        return made
    if left.shape[-1] != right.shape[-2]:
        raise RuntimeError(f"contracted dimensions of {tuple(left.shape)} and {tuple(right.shape)} are not equal")
    if left.dim() == right.dim() == 2 and offs is not None:  # the groups divide the contracted dimension
        return left.new_empty((offs.shape[0], left.shape[0], right.shape[1]))
    groups = left.shape[:1] if left.dim() == right.dim() == 3 else ()
    return left.new_empty((*groups, left.shape[-2], right.shape[-1]))


def _clone(source: Tensor, **memory_format: Any) -> Tensor:
    """Clone a sparse fake tensor. PyTorch's own function for fake tensors makes a clone without entries."""
    if source.layout == torch.sparse_coo:
        return _of_the_same_entries(source, source.is_coalesced())
    made: Tensor = torch.ops.aten.clone.default(source, **memory_format)
    return made


def _of_the_same_entries(sparse: Tensor, is_coalesced: bool = True) -> Tensor:
    made: Tensor = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors.default(
        sparse.sparse_dim(),
        sparse.dense_dim(),
        sparse.shape,
        sparse._indices(),
        torch.empty_like(sparse._values()),
        dtype=sparse.dtype,
        device=sparse.device,
        layout=torch.sparse_coo,
        is_coalesced=is_coalesced,
    )
    return made


def _sparse_mask(source: Tensor, mask: Tensor) -> Tensor:
    """The values of a dense tensor where the mask has entries."""
    if source.layout == torch.strided and mask.layout == torch.sparse_coo:
        return _of_the_same_entries(mask, mask.is_coalesced())
    made: Tensor = torch.ops.aten.sparse_mask.default(source, mask)
    return made


def _stores_what_is_not_zero(operator: Any) -> Callable[..., Tensor]:
    def result(source: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if source.layout == torch.strided or operator is torch.ops.aten._sparse_sparse_matmul.default:
            raise DynamicOutputShapeException(operator)
        made: Tensor = operator(source, *args, **kwargs)
        return made

    return result


_BY_VALUES = (
    torch.ops.aten._to_sparse.default,
    torch.ops.aten._to_sparse.sparse_dim,
    torch.ops.aten._to_sparse_csr.default,
    torch.ops.aten._to_sparse_csc.default,
    torch.ops.aten._to_sparse_bsr.default,
    torch.ops.aten._to_sparse_bsc.default,
    torch.ops.aten._sparse_sparse_matmul.default,
)

RESULTS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._ctc_loss.default: _ctc_loss,
    torch.ops.aten._ctc_loss.Tensor: _ctc_loss,
    torch.ops.aten._ctc_loss_backward.default: _ctc_loss_backward,
    torch.ops.aten._ctc_loss_backward.Tensor: _ctc_loss_backward,
    torch.ops.aten._thnn_fused_lstm_cell.default: _thnn_fused_lstm_cell,
    torch.ops.aten._grouped_mm.default: _grouped_mm,
    torch.ops.aten._coalesce.default: _of_the_same_entries,
    torch.ops.aten.clone.default: _clone,
    torch.ops.aten.sparse_mask.default: _sparse_mask,
    **{operator: _stores_what_is_not_zero(operator) for operator in _BY_VALUES},
}
"""Operators that have no result for PyTorch's fake tensors, with their replacements."""
