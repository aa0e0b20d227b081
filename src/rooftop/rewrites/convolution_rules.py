"""Rules for convolutions: fold norms into them, fuse the operations after them, and compute max pools without
indices.
"""

from __future__ import annotations

from typing import Any

from rooftop.rewrites.candidates import Candidate, Rule, Times, counted, only_on_gpu
from rooftop.rewrites.folding import fold_norms
from rooftop.rewrites.fusing import fuse_convolutions, settled
from rooftop.rewrites.pooling import replace_pools


class FoldNorms(Rule):
    """Fold batch norms into the convolution or linear layer before them."""

    name = "fold-norms"

    def predicted_ms(self, times: Times) -> float:
        return times.gain_ms(times.of("batch_norm"), times.count("batch_norm"))

    def apply(self, candidate: Candidate) -> str:
        folded = fold_norms(candidate.model).folded
        candidate.frozen |= bool(folded)
        return counted(len(folded), "norm") and f"{counted(len(folded), 'norm')} folded"


class FuseConvolutions(Rule):
    """Fuse 2-D convolutions with bias, sum and activation in one of Rooftop's kernels."""

    name = "fuse-convolutions"
    opaque = True

    def refusal(self, candidate: Candidate) -> str | None:
        return only_on_gpu(candidate)

    def predicted_ms(self, times: Times) -> float:
        if not times.count("convolution"):
            return 0.0
        joined = ("relu", "gelu", "silu", "sigmoid", "aten::add")
        return times.gain_ms(times.of(*joined), times.count(*joined))

    def apply(self, candidate: Candidate) -> str:
        fused = fuse_convolutions(candidate.model).fused
        if not fused:
            return ""
        run = candidate.call

        def call(*args: Any, **kwargs: Any) -> Any:
            return settled(run(*args, **kwargs))

        candidate.prepare(call)
        return f"{counted(len(fused), 'convolution')} fused with the operators after them"


class Pools(Rule):
    """Compute max pools without writing the positions of the maxima."""

    name = "pools"
    opaque = True

    def refusal(self, candidate: Candidate) -> str | None:
        return only_on_gpu(candidate)

    def predicted_ms(self, times: Times) -> float:
        return times.gain_ms(times.of("max_pool") / 2)

    def apply(self, candidate: Candidate) -> str:
        return counted(len(replace_pools(candidate.model)), "max pool")
