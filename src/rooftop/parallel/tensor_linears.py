"""Linear layers that tensor parallel ranks split by the features of the result or by the features of the input.

                      ColumnParallelLinear        RowParallelLinear
    x  --------------+-- x @ A0.T -- h0 -- ... -- h0 @ B0.T --+
      the same, or   |                                        | sum, whole or
      parts of the   |                                        | each rank's part of
      sequence       +-- x @ A1.T -- h1 -- ... -- h1 @ B1.T --+ the sequence

Input and output are the same on all ranks. With sequence parallelism, input and output are split along the sequence,
dimension -2. Nothing is communicated between the two layers. In backward, the input gradient is summed over ranks while
the weight's gradient is computed.

Source: Shoeybi et al., "Megatron-LM" (arXiv:1909.08053), section 3; Korthikanti et al. (arXiv:2205.05198), section 4.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from rooftop.kernels import Box, linear_act
from rooftop.kernels.matmuls.matmuls import linear_act_and_before
from rooftop.kernels.operands.autocasting import cast_by_autocast
from rooftop.nn import LinearAct
from rooftop.parallel.deferred import Deferral, Deferring
from rooftop.parallel.exchanges import (
    Group,
    copy_to_ranks,
    gather_of_ranks,
    place_in,
    scattered_sum_of_ranks,
    start_gather,
    start_scattered_sum,
    start_sum,
    sum_of_ranks,
)
from rooftop.parallel.shards import Piece, Shard, padded_rows_of, rows_of
from rooftop.parallel.turns import OnItsWay, begin_copy, begin_gather, begin_scattered_sum, begin_sum

Split = tuple[bool, bool]
"""Whether the input is split along the sequence, and whether backward gathers it again."""
KEPT = ("gelu", "gelu_tanh", "silu")
"""Activations whose backward needs their input."""
SEQUENCE = -2  # the dimension of positions in (B, S, W) and (S, W)


class ColumnParallelLinear(Deferring, LinearAct):
    """A linear layer with an activation, split by output features. Each rank computes some of the output features.

    Args:
        in_features: features of the input. Every rank has all input features.
        out_features: features of the whole result. For several linear layers with the same input, a dict (name ->
            features) in the order of the weight's rows. Each of these layers is split separately.
        bias: whether the layer has a bias, which is split like the result's features.
        activation: as in `rooftop.nn.LinearAct`.
        blocks: name -> number of equal blocks, such as heads, into which the layer's features may be split. If there
            are fewer blocks than ranks, several ranks hold the same block.
        padded: whether the number of features need not be a multiple of the number of ranks (only for a single layer).
            All ranks then have the same number of features, and the last ranks pad with 0.
        group: the ranks; None: an ordinary layer.
        sequence_parallel: whether the input is split along dimension -2.

    Attributes:
        parts: name -> number of features on this rank, in order.
        deferral: the deferral that may defer the weight's gradient (`rooftop.parallel.deferred`); None: backward
            computes the gradient.
        gathers_again: with sequence parallelism, whether only this rank's part of the input is saved for backward,
            which gathers the other parts again.

    Raises:
        ValueError: features or blocks cannot be split among the ranks.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | Mapping[str, int],
        bias: bool = True,
        activation: str = "none",
        *,
        blocks: Mapping[str, int] | None = None,
        padded: bool = False,
        group: Group = None,
        sequence_parallel: bool = False,
    ) -> None:
        widths = {"features": out_features} if isinstance(out_features, int) else dict(out_features)
        if padded and len(widths) > 1:
            raise ValueError(f"ColumnParallelLinear: padded allows only a single layer, got {', '.join(widths)}")
        index, count = place_in(group)
        whole = (sum(widths.values()), in_features)
        if padded:
            shard = padded_rows_of(whole, index, count)
        else:
            pieces, start = [], 0
            for name, width in widths.items():
                said = f"ColumnParallelLinear: {name}={width}"
                number = (blocks or {}).get(name, width)
                pieces.append(rows_of(said, whole, start, width, number, index, count))
                start += width
            shard = Shard(tuple(pieces))
        rows = [piece.box.size[0] for piece in shard.pieces]
        super().__init__(in_features, sum(rows) + shard.padding, bias, activation)
        self.parts = dict(zip(widths, [sum(rows) + shard.padding] if padded else rows, strict=True))
        self.group, self.sequence_parallel = group, sequence_parallel
        self.gathers_again = False
        self.shards = {}
        if count > 1:
            self.shards["weight"] = shard
            if bias:
                self.shards["bias"] = Shard(tuple(_first_column(piece) for piece in shard.pieces), shard.padding)

    def forward(  # type: ignore[override]
        self, input: Tensor, residual: Tensor | None = None, *, with_before: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Map input (..., S, in_features) to (..., S, features here). With sequence parallelism, the input is this
        rank's part of S.

        With `with_before`, also return the activation's input, without a gradient, as in `linear_act_and_before`.

        Raises:
            ValueError: a residual is given to a layer with a group, or with `with_before`.
        """
        if residual is not None and (self.group is not None or with_before):
            raise ValueError(
                "ColumnParallelLinear: a residual cannot be given with with_before, or to a layer with a group, since "
                "each rank computes only a part of the features: add it after a row layer"
            )
        if self.group is not None or (with_before and self.deferral is not None):
            y, before = self._product(input)
            return (y, before) if with_before else y
        if with_before:
            return linear_act_and_before(input, self.weight, self.bias, self.activation)
        return product(input, self.weight, self.bias, self.activation, residual, self.deferral)

    def _product(self, input: Tensor) -> tuple[Tensor, Tensor]:
        split = (self.sequence_parallel, self.gathers_again)
        return _column_product(input, self.weight, self.bias, self.activation, self.group, split, self.deferral)

    def entered(self, input: Tensor) -> Tensor:
        """The input of this layer's matrix product. With sequence parallelism, the input is gathered from all ranks."""
        if self.sequence_parallel:
            return gather_of_ranks(input, SEQUENCE, self.group)
        return copy_to_ranks(input, self.group)

    def begin(self, input: Tensor) -> OnItsWay:
        """Start the communication of `entered`. Pass the tensor that arrives to `product_of`."""
        (input,) = cast_by_autocast(input)  # so that ranks exchange the narrower dtype, as in `forward`
        if self.sequence_parallel:
            return begin_gather(input, SEQUENCE, self.group)
        return begin_copy(input, self.group)

    def product_of(self, entered: Tensor) -> Tensor:
        """Compute the result of `forward` from the gathered input, without communication."""
        return product(entered, self.weight, self.bias, self.activation, None, self.deferral)

    def extra_repr(self) -> str:
        """The `extra_repr` of `rooftop.nn.LinearAct`, followed by this rank's index, the number of ranks,
        `sequence_parallel` if it is set, and `parts`. An ordinary layer has only the text of `LinearAct`, and `parts`.
        """
        return f"{super().extra_repr()}{_said(self.group, self.sequence_parallel)}, parts={self.parts}"


class RowParallelLinear(Deferring, LinearAct):
    """A linear layer, split by input features. Each rank multiplies some input features, and the result is the sum over
    the ranks.

    Args:
        in_features: features of the whole input. Each rank holds some of these features.
        out_features: features of the result.
        bias: whether the layer has a bias. Every rank has the whole bias, which is added to the sum.
        group: the ranks; None: an ordinary layer.
        sequence_parallel: whether the result is split along dimension -2.

    Raises:
        ValueError: the input features cannot be split among the ranks.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: Group = None,
        sequence_parallel: bool = False,
    ) -> None:
        index, count = place_in(group)
        if in_features % count:
            raise ValueError(
                f"RowParallelLinear: in_features={in_features} cannot be split among {count} ranks: use a number of "
                "ranks that divides it, or change the size"
            )
        super().__init__(in_features // count, out_features, bias)
        self.group, self.sequence_parallel = group, sequence_parallel
        self.shards = {}
        if count > 1:
            self.shards["weight"] = Shard((Piece(Box.shard((out_features, in_features), 1, index, count)),))

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """Map input (..., S, features here) to (..., S, out_features). With sequence parallelism, the result is this
        rank's part of S.

        Raises:
            ValueError: a residual is given to a layer with a group, or the sequence cannot be split among the ranks.
        """
        if self.group is None:
            return product(input, self.weight, self.bias, self.activation, residual, self.deferral)
        if residual is not None:
            raise ValueError("RowParallelLinear does not accept a residual: add it to the result")
        partial = self.summand(input)
        if self.sequence_parallel:
            total = scattered_sum_of_ranks(partial, SEQUENCE, self.group)
        elif torch.is_grad_enabled():
            total = sum_of_ranks(partial, self.group)
        else:  # summed in place without a copy, since nothing else uses the partial sum
            total = start_sum(partial, self.group)()
        return self.with_bias(total)

    def begin(self, input: Tensor) -> OnItsWay:
        """Start the sum in `forward`. Pass the tensor that arrives to `with_bias`."""
        partial = self.summand(input)
        if self.sequence_parallel:
            return begin_scattered_sum(partial, SEQUENCE, self.group)
        return begin_sum(partial, self.group)

    def summand(self, input: Tensor) -> Tensor:
        """This rank's summand of the sum in `forward`."""
        return product(input, self.weight, deferral=self.deferral)

    def with_bias(self, total: Tensor) -> Tensor:
        """Add the bias, which is the last step of `forward`."""
        return total if self.bias is None else total + self.bias.to(total.dtype)

    def extra_repr(self) -> str:
        """The `extra_repr` of `rooftop.nn.LinearAct`, followed by this rank's index, the number of ranks, and
        `sequence_parallel` if it is set. An ordinary layer has only the text of `LinearAct`.
        """
        return f"{super().extra_repr()}{_said(self.group, self.sequence_parallel)}"


def _said(group: Group, sequence_parallel: bool) -> str:
    index, count = place_in(group)
    return f", rank {index} of {count}{', sequence_parallel' if sequence_parallel else ''}" if group else ""


def _first_column(piece: Piece) -> Piece:
    """Convert a piece of a weight to the piece of the bias for the same rows."""
    box = piece.box
    return Piece(Box(box.shape[:1], box.start[:1], box.size[:1]), piece.holders, piece.first)


def is_traced() -> bool:
    """Whether torch.jit.trace records this call. A trace cannot contain Python autograd functions. Tracing by
    torch.compile does not count.
    """
    return not torch.compiler.is_compiling() and torch._C._is_tracing()


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
    deferral: Deferral | None = None,
) -> Tensor:
    """Run `rooftop.kernels.linear_act`. A deferral may defer the weight's gradient.

    In training without a residual, an activation in `KEPT` (gelu, gelu_tanh or silu) is computed as in
    `linear_act_and_before`. So y is the same bit for bit whether or not the MLP recomputes the activation.
    """
    training = torch.is_grad_enabled() and not is_traced()
    if deferral is None and activation in KEPT and residual is None and training:
        return linear_act_and_before(x, weight, bias, activation)[0]
    if deferral is None:
        return linear_act(x, weight, bias, activation, residual)
    y, _ = _deferrable_product(x, weight, bias, activation, None, (False, False), deferral)
    return y if residual is None else y + residual


def _column_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    group: Group,
    split: Split,
    deferral: Deferral | None,
) -> tuple[Tensor, Tensor]:
    if deferral is not None:
        return _deferrable_product(x, weight, bias, activation, group, split, deferral)
    x, weight, bias = cast_by_autocast(x, weight, bias)
    return _ColumnProduct.apply(x, weight, bias, activation, group, split, None)  # type: ignore[no-any-return]


@_disable_dynamo  # unlike torch.compiler.disable, this imports the compiler only when it is needed
def _deferrable_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    group: Group,
    split: Split,
    deferral: Deferral,
) -> tuple[Tensor, Tensor]:
    """Compute the product of a column-parallel layer, and leave the weight's gradient to `deferral`. Backward then has
    a side effect, so torch.compile must not trace this function."""
    x, weight, bias = cast_by_autocast(x, weight, bias)
    if not weight.requires_grad or not torch.is_grad_enabled():
        return _ColumnProduct.apply(x, weight, bias, activation, group, split, None)  # type: ignore[no-any-return]
    # The graph must not lead to the weight, whose hooks would run without a gradient. An empty tensor that requires a
    # gradient (the ticket) replaces the weight, so that autograd still calls backward.
    ticket, later = x.new_empty(0).requires_grad_(), (deferral, get_gradient_edge(weight))
    return _ColumnProduct.apply(  # type: ignore[no-any-return]
        x, weight.detach(), bias, activation, group, split, later, ticket
    )


class _ColumnProduct(torch.autograd.Function):
    """Computes activation(x @ weight.T + bias) for a part of the features, and returns the activation's input, too,
    without a gradient.

    x is saved in gathered form, with all positions, unless `split` says that backward gathers x again. Gathering again
    saves memory, but costs GPU time."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str,
        group: Group,
        split: Split,
        later: tuple[Deferral, GradientEdge] | None,
        ticket: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        ctx.split, gathers_again = split
        whole = start_gather(x, SEQUENCE, group)() if ctx.split else x
        keep = activation != "none"
        y, before = torch.ops.rooftop.linear_act(
            whole.reshape(-1, whole.shape[-1]), weight, bias, activation, None, keep, keep
        )
        ctx.gathers = ctx.split and gathers_again
        ctx.save_for_backward(x if ctx.gathers else whole, weight, before)
        ctx.activation, ctx.group, ctx.has_bias = activation, group, bias is not None
        ctx.later = later
        ctx.mark_non_differentiable(before)
        ctx.set_materialize_grads(False)  # does not create zeros for the gradient of the activation's input
        return y.view(*whole.shape[:-1], weight.shape[0]), before

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, _before: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * 8
        x, weight, before = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad[:3]
        # The gather overlaps with the computation of x's gradient. If the weight's gradient is deferred, only this
        # rank's part of x is kept until that gradient is computed, which takes less memory.
        gathering = start_gather(x, SEQUENCE, ctx.group) if ctx.gathers and for_weight else None
        shape = (*dy.shape[:-1], weight.shape[1])
        dz, dbias = dy.reshape(-1, dy.shape[-1]), None
        activated, sums = ctx.activation != "none", ctx.has_bias and for_bias
        if activated or sums:
            saved = before if activated else dz
            made, dbias = torch.ops.rooftop.linear_act_backward(dz.contiguous(), saved, ctx.activation, False, sums)
            dz = made if activated else dz
        summing = None
        if for_x:
            dx = (dz @ weight).view(shape)
            summing = start_scattered_sum(dx, SEQUENCE, ctx.group) if ctx.split else start_sum(dx, ctx.group)

        def of_weight() -> Tensor:
            if gathering is not None:
                whole = gathering()
            else:
                whole = start_gather(x, SEQUENCE, ctx.group)() if ctx.gathers else x
            return dz.t() @ whole.reshape(-1, whole.shape[-1])

        if ctx.later is not None:
            deferral, edge = ctx.later
            deferral.add(edge, of_weight)
        dweight = of_weight() if for_weight else None
        return summing() if summing else None, dweight, dbias if sums else None, None, None, None, None, None
