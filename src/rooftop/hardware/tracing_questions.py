"""Answer a program that asks whether it is being traced (compiled or captured). Its choice of operators may depend on
the answer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

Question = tuple[ModuleType, str]

CAPTURING: Question = (torch.cuda, "is_current_stream_capturing")
QUESTIONS: Sequence[Question] = (
    (torch.compiler, "is_compiling"),
    (torch.compiler, "is_dynamo_compiling"),
    CAPTURING,
)
TOLD_THE_TRUTH = frozenset({"torch", "rooftop"})


@contextmanager
def answered(
    answer: Callable[..., bool],
    questions: Sequence[Question] = QUESTIONS,
    told_the_truth: Collection[str] = TOLD_THE_TRUTH,
) -> Iterator[None]:
    """Replace the functions that say whether a program is being traced. In the block, the replacements return
    `answer(original, *arguments)`.

    A module that imports such a function by name in the block keeps the replacement. After the block, the replacement
    answers like the original.

    Args:
        questions: the functions to replace, each by its module and name.
        told_the_truth: packages whose calls always get the original's answer.
    """
    is_over = False

    def answering(original: Callable[..., bool]) -> Callable[..., bool]:
        @wraps(original)
        def question(*args: Any) -> bool:
            asker = str(sys._getframe(1).f_globals.get("__name__", "")).partition(".")[0]
            return original(*args) if is_over or asker in told_the_truth else answer(original, *args)

        return question

    try:
        with ExitStack() as patched:
            for module, name in questions:
                patched.enter_context(patch.object(module, name, answering(getattr(module, name))))
            yield
    finally:
        is_over = True
