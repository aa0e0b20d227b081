"""Choose the next token: the most probable token, or a random one (temperature, top-k, top-p).

The random number for a token depends only on the seed, the sequence number and the position (counter-based generator of
`rooftop.kernels`). So a random token does not depend on the other sequences of a batch or on the device, except for
rare cases: the last bits of the logits may depend on both, and a random number very close to the border between two
tokens may then choose either token.

Tensor parallel ranks share the vocabulary and choose the same token. For a greedy choice, each rank finds the best of
its own tokens, and the ranks exchange that token and its logit for each sequence. For a random choice, the ranks gather
the logits of all tokens for each sequence.

Fan et al. 2018, "Hierarchical Neural Story Generation" (top-k); Holtzman et al. 2020, "The Curious Case of Neural Text
Degeneration" (top-p). As in transformers, the temperature is applied first, then top-k, then top-p to the remaining
tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from rooftop.kernels import Box, random_key, random_uniform
from rooftop.parallel.exchanges import Group, place_in, start_gather

SEQUENCES = POSITIONS = 1 << 31
"""Shape of the virtual tensor of random numbers: a row per sequence, a column per position."""


@dataclass(frozen=True)
class Sampling:
    """Settings for the choice of the next token.

    Attributes:
        temperature: divisor of the logits; 0: always choose the most probable token.
        top_k: draw from this many of the most probable tokens; None: from all. Among equal logits, tokens with lower
            numbers come first.
        top_p: draw from the smallest set of tokens whose total probability reaches this value.
        seed: seed of the random choice, from 0 to 2^64 - 1.

    Raises:
        TypeError, ValueError: a number has a wrong type or is out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in (("temperature", self.temperature), ("top_p", self.top_p)):
            if not isinstance(value, Real) or isinstance(value, bool):
                raise TypeError(f"{name} must be a number, got {value!r}")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(
                f"temperature must be 0 (the most probable token) or a positive finite number, got {self.temperature}"
            )
        if self.top_k is not None and (not isinstance(self.top_k, int) or isinstance(self.top_k, bool)):
            raise TypeError(f"top_k must be an int or None, got {self.top_k!r}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}; None for all tokens")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be more than 0 and at most 1, got {self.top_p}")
        random_key(self.seed, "")  # raises an error if the seed is out of range

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def numbers_of(seed: int, sequence: int, positions: int, device: torch.device | str) -> Tensor:
    """The random numbers of a sequence: (positions,), float64, uniform in [0, 1).

    Raises:
        TypeError, ValueError: see `check_sequence`.
    """
    check_sequence(sequence)
    box = Box((SEQUENCES, POSITIONS), (sequence, 0), (1, positions))
    return random_uniform(box, random_key(seed, "generation"), dtype=torch.float64, device=device)[0]


def check_sequence(number: int) -> None:
    """Raise TypeError if a sequence number is not an int, ValueError if it is not in 0..2^31 - 1."""
    if not isinstance(number, int) or isinstance(number, bool):
        raise TypeError(f"a sequence number must be an int, got {number!r}")
    if not 0 <= number < SEQUENCES:
        raise ValueError(f"a sequence number must be from 0 to {SEQUENCES - 1}, got {number}")


def choose(logits: Tensor, numbers: Tensor, sampling: Sampling) -> Tensor:
    """Choose the next tokens, without waiting for the device.

    Args:
        logits: (B, V).
        numbers: (B,), float64, uniform in [0, 1); unused for a greedy choice.
        sampling: the settings.

    Returns:
        The chosen tokens, (B,), int64. -1: no token can be chosen, because a logit is NaN or inf, or all logits are
        -inf.
    """
    if sampling.greedy:
        best, token = logits.max(-1)
        return torch.where(best.isfinite(), token, -1)  # `max` returns NaN if a logit is NaN
    scores = logits.double()
    # scores of at most 0 never become inf, whatever the temperature
    scores = (scores - scores.amax(-1, keepdim=True)) / sampling.temperature
    tokens: Tensor | None = None
    if sampling.top_k is not None or sampling.top_p < 1:
        scores, tokens = scores.sort(dim=-1, descending=True, stable=True)
        scores = scores[:, : sampling.top_k]
    weights = scores.softmax(-1)
    reached = weights.cumsum(-1)
    if sampling.top_p < 1:  # keep a token if the total probability before it is below top_p
        reached = torch.where(reached - weights < sampling.top_p, reached, 0.0).cummax(-1).values
    end = reached[:, -1:]
    place = torch.searchsorted(reached, numbers[:, None] * end, right=True)  # (B, 1)
    place = torch.minimum(place, (reached < end).sum(-1, keepdim=True))  # needed because numbers * end may round to end
    found = place if tokens is None else tokens.gather(1, place)
    return torch.where(end > 0, found, -1)[:, 0]  # `end > 0` is False if end is NaN


def choose_on_ranks(logits: Tensor, numbers: Tensor, sampling: Sampling, vocabulary: int, group: Group) -> Tensor:
    """Choose the next tokens, the same on all tensor parallel ranks, as `choose` would from the logits of all ranks.

    Args:
        logits: (B, v), logits of the v tokens that this rank holds. All ranks have the same number of columns; columns
            beyond the vocabulary are padding.
        numbers: (B,), as in `choose`.
        sampling: the settings.
        vocabulary: V, number of tokens on all ranks together.
        group: the ranks; None: this process has all tokens.

    Returns:
        (B,), int64; -1 as in `choose`.
    """
    if group is None:
        return choose(logits, numbers, sampling)
    if sampling.greedy:
        return _best_on_ranks(logits, vocabulary, group)
    whole = start_gather(logits, -1, group)()[:, :vocabulary]
    # All ranks use the first rank's choice, because the ranks' sums on GPUs may differ in their last bits.
    return start_gather(choose(whole, numbers, sampling)[None], 0, group)()[0]


def _best_on_ranks(logits: Tensor, vocabulary: int, group: Group) -> Tensor:
    """Choose the best token of all ranks.

    Among equal logits the first token wins: `max` returns the first of equal values, and the ranks are in the order of
    their tokens.
    """
    start = place_in(group)[0] * logits.shape[-1]
    if start + logits.shape[-1] > vocabulary:
        tokens = torch.arange(start, start + logits.shape[-1], device=logits.device)
        logits = logits.masked_fill(tokens >= vocabulary, -torch.inf)
    best, column = logits.max(-1)  # (B,)
    own = torch.stack((best.double(), (start + column).double()), -1)  # (B, 2), exact in float64
    bests, places = start_gather(own[None], 0, group)().unbind(-1)  # (ranks, B)
    most, rank = bests.max(0)
    token = places.gather(0, rank[None])[0].long()
    return torch.where(most.isfinite(), token, -1)  # `max` returns NaN if a value is NaN
