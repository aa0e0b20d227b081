"""A transformer's MLP whose hidden features are split over tensor parallel ranks.

A gated MLP packs its two input projections into one weight. A rank holds one range of features, the same in both.

Source: Shoeybi et al., "Megatron-LM" (arXiv:1909.08053), section 3; Shazeer, "GLU Variants" (arXiv:2002.05202).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rooftop.kernels import swiglu
from rooftop.kernels.matmuls.matmuls import activation_of
from rooftop.parallel.exchanges import Group
from rooftop.parallel.norm_sums import NormSums, Summand
from rooftop.parallel.recomputing import made_again
from rooftop.parallel.tensor_linears import ColumnParallelLinear, RowParallelLinear
from rooftop.parallel.turns import Phases


class ParallelMLP(nn.Module):
    """Two linear layers with an activation between them: (B, S, W) -> (B, S, W).

    With sequence parallelism, input and output are this rank's part of the sequence.

    Args:
        width: W, features of a position.
        hidden: total number of hidden features.
        activation: "swiglu", which is gated, or an activation of `rooftop.nn.LinearAct`.
        bias: whether the linear layers have a bias.
        dropout: the dropout that is applied to the result.
        group: the ranks; None: only this rank.
        sequence_parallel: whether the ranks split activations outside the MLP along the sequence.
        selective: whether backward recomputes the activated features (`rooftop.parallel.recomputing`).

    Raises:
        ValueError: the hidden features cannot be split among the ranks, or the activation is unknown.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        activation: str = "gelu_tanh",
        *,
        bias: bool = True,
        dropout: nn.Module | None = None,
        group: Group = None,
        sequence_parallel: bool = False,
        selective: bool = False,
    ) -> None:
        super().__init__()
        self.gated = activation == "swiglu"
        self.up = ColumnParallelLinear(
            width,
            {"gate": hidden, "up": hidden} if self.gated else hidden,
            bias,
            "none" if self.gated else activation,
            group=group,
            sequence_parallel=sequence_parallel,
        )
        self.down = RowParallelLinear(hidden, width, bias, group=group, sequence_parallel=sequence_parallel)
        self.dropout, self.selective = dropout, selective
        self.up.gathers_again = selective

    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP to x (B, S, W)."""
        if self.selective and torch.is_grad_enabled():
            return self._dropped(self._made_again(x).view(x.shape))
        hidden = self.up(self._rows(x))  # (..., hidden features here, twice if gated)
        return self._dropped(self.down(swiglu(hidden) if self.gated else hidden).view(x.shape))

    def summand(self, x: Tensor, sums: NormSums) -> Summand:
        """Run `forward` for inference, but return this rank's summand. The kernel of the norm that follows sums over
        the ranks."""
        hidden = self.up(x)
        return Summand(self.down.summand(swiglu(hidden) if self.gated else hidden), self.down.bias, sums)

    def in_phases(self, x: Tensor) -> Phases[Tensor]:
        """Run `forward` in phases, for `rooftop.parallel.turns`."""
        entering = self.up.begin(self._rows(x))
        yield
        hidden = self.up.product_of(entering.arrived())
        yield
        leaving = self.down.begin(swiglu(hidden) if self.gated else hidden)
        yield
        return self._dropped(self.down.with_bias(leaving.arrived()).view(x.shape))

    def _made_again(self, x: Tensor) -> Tensor:
        """Compute both linear layers. Autograd saves the input of the activation between them instead of its result,
        which backward computes again."""
        if self.gated:
            hidden = self.up(self._rows(x))
            activated = swiglu(hidden)
            with made_again((activated,), lambda before: (swiglu(before),), hidden):
                return self.down(activated)  # type: ignore[no-any-return]
        activated, before = self.up(self._rows(x), with_before=True)
        shape, activation = activated.shape, self.up.activation
        with made_again((activated,), lambda before: (activation_of(before, activation).view(shape),), before):
            return self.down(activated)  # type: ignore[no-any-return]

    # An MLP computes each position independently. So with sequence parallelism, the gathered rows stay in the order of
    # the ranks: all rows of rank 0, of all sequences, then those of rank 1, and so on. This saves the copies that would
    # put the positions of each sequence together.

    def _rows(self, x: Tensor) -> Tensor:
        return x.flatten(0, -2) if self.up.sequence_parallel else x

    def _dropped(self, out: Tensor) -> Tensor:
        return out if self.dropout is None else self.dropout(out)
