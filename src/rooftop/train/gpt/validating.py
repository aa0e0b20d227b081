"""Validate a training regularly, on the same sequences for every seed and layout.

training, validation = split_tokens(open_tokens(Path("text/")), (95, 5))
run_steps(trainer, 1000, validation=Validation(validation, trainer.training, interval=100))
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import overload

from rooftop.errors import InputError
from rooftop.train.gpt.training import GptTraining
from rooftop.train.tokens.batches import Batches
from rooftop.train.tokens.mixtures import Mixture
from rooftop.train.tokens.tokens import Tokens

SEED = 0  # fixed seed of the order: all trainings validate on the same sequences
INTERVAL, ITERS = 1000, 100  # Megatron-LM's defaults


class Validation:
    """The validation data of a training, and how often to validate.

    Args:
        tokens: validation data.
        training: the training, which determines the length of the sequences and the size of the batches.
        interval: steps between two validations; the last step is always validated.
        iters: number of batches per validation; with fewer data, a validation reads all sequences once.

    Attributes:
        batches: the data, in batches.
        sequences: number of sequences per validation.

    Raises:
        InputError: there are too few tokens for one sequence.
        ValueError: `interval` or `iters` is not positive.
    """

    def __init__(
        self, tokens: Tokens | Mixture, training: GptTraining, *, interval: int = INTERVAL, iters: int = ITERS
    ) -> None:
        for name, value in (("interval", interval), ("iters", iters)):
            if value < 1:
                raise ValueError(f"Validation: {name} must be positive, got {value}")
        self.interval = interval
        self.batches = Batches(tokens, training.length, training.global_batch, SEED)
        self.sequences = min(iters * training.global_batch, self.batches.sequences)

    def due(self, step: int, until: int) -> bool:
        """Whether to validate after step `step` of a training whose last step is `until`."""
        return step == until or step % self.interval == 0


@overload
def split_tokens(tokens: Tokens, parts: Sequence[float | Fraction]) -> tuple[Tokens, Tokens]: ...
@overload
def split_tokens(tokens: Mixture, parts: Sequence[float | Fraction]) -> tuple[Mixture, Mixture]: ...
def split_tokens(
    tokens: Tokens | Mixture, parts: Sequence[float | Fraction]
) -> tuple[Tokens, Tokens] | tuple[Mixture, Mixture]:
    """Split tokens into training data at the front and validation data after them.

    Args:
        tokens: the tokens to split. Each row (data set) of a mixture is split separately.
        parts: relative sizes of the training data, the validation data and, optionally, unused test data.

    Raises:
        InputError: there are not two or three parts, a part is negative, or the training or validation data would be
            empty.
    """
    exact = [Fraction(str(part)) if isinstance(part, float) else Fraction(part) for part in parts]
    if len(exact) not in (2, 3) or any(part < 0 for part in exact) or 0 in exact[:2]:
        raise InputError(
            f"the split {','.join(f'{float(part):g}' for part in exact)}: expected two numbers above 0, for training "
            "and validation, and possibly a third for a test, e.g. 95,5 or 969,30,1"
        )
    ends = [exact[0] / sum(exact), (exact[0] + exact[1]) / sum(exact)]
    if isinstance(tokens, Tokens):
        return _split(tokens, ends)
    pairs = [_split(row, ends) for row in tokens.rows]
    return Mixture([train for train, _ in pairs], tokens.weights), Mixture(
        [valid for _, valid in pairs], tokens.weights
    )


def _split(row: Tokens, ends: Sequence[Fraction]) -> tuple[Tokens, Tokens]:
    middle, end = (int(len(row) * each) for each in ends)
    return row.part(0, middle, "training part"), row.part(middle, end, "validation part")
