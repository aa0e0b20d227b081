"""The rule for memory: checkpointing, where backward recomputes the results of blocks."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from rooftop.rewrites.candidates import Candidate, Rule, Times, counted_kinds, only_on_gpu
from rooftop.rewrites.compiler_rules import repeated_blocks

LIMIT = 0.8
"""Memory is the limit if a step needs more than this share of a GPU's memory, since the allocator needs the rest for
fragmentation."""


class Checkpointing(Rule):
    """Keep only the inputs of repeated blocks, and compute their other activations again in the backward
    (`torch.utils.checkpoint`). Checkpointing takes the time of about one more forward of these blocks.
    """

    name = "checkpointing"
    trains = True
    infers = False
    exact = True
    saves_memory = True

    def refusal(self, candidate: Candidate) -> str | None:
        return only_on_gpu(candidate)

    def absent(self, times: Times) -> str | None:
        if times.memory is None or times.memory.peak_bytes > LIMIT * times.memory.total_bytes:
            return None
        peak, total = times.memory.peak_bytes / 1e9, times.memory.total_bytes / 1e9
        return f"memory is not the limit: a step needs {peak:.1f} of {total:.1f} GB"

    def apply(self, candidate: Candidate) -> str:
        blocks = repeated_blocks(candidate.model)
        for block in blocks:
            block.__dict__["forward"] = _Recomputed(block)
        return counted_kinds(type(block).__name__ for block in blocks)


class _Recomputed:
    """The replaced `forward` of a block. It keeps only the block's inputs; backward computes the block again, with the
    same random numbers.
    """

    def __init__(self, block: nn.Module) -> None:
        self.forward = block.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)
