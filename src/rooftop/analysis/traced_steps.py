"""What a program does otherwise while it is compiled, or captured into a CUDA graph.

A program may ask whether it is, and run other operators then: transformers leaves out an attention mask that masks
nothing, but not where looking at it would break the capture, and attention with a mask is slower. Advice to compile or
to capture must know. So it is noticed whether a program asks, and if it does, some steps run with "yes" for an answer.

PyTorch itself asks as well (its optimizers refuse to be captured unprepared): it is told the truth. A program with
compiled parts is not asked: what is put in place here would be compiled into them, in a graph of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch

QUESTIONS = (
    (torch.compiler, "is_compiling"),
    (torch.compiler, "is_dynamo_compiling"),
    (torch.cuda, "is_current_stream_capturing"),
)
TOLD_THE_TRUTH = {"torch", "rooftop"}


class TracingQuestions:
    """Attributes:
    asked: whether the program has asked while `noticed`.
    """

    def __init__(self) -> None:
        self.asked = False

    @contextmanager
    def noticed(self) -> Iterator[None]:
        """Answers as ever."""

        def notice(original: Callable[..., bool], *args: Any) -> bool:
            self.asked = True
            return original(*args)

        with _answered(notice):
            yield

    @contextmanager
    def affirmed(self) -> Iterator[None]:
        """Says to the program that it is compiled and captured."""
        with _answered(lambda original, *args: True):
            yield


@contextmanager
def _answered(answer: Callable[..., bool]) -> Iterator[None]:
    """`answer` (of the original and its arguments) in place of the originals, for those who are not told the truth.

    A module that is first imported in the block keeps what is in their place: it answers as the originals afterwards.
    """
    is_over = False

    def answering(original: Callable[..., bool]) -> Callable[..., bool]:
        @wraps(original)
        def question(*args: Any) -> bool:
            asker = str(sys._getframe(1).f_globals.get("__name__", "")).partition(".")[0]
            return original(*args) if is_over or asker in TOLD_THE_TRUTH else answer(original, *args)

        return question

    try:
        with ExitStack() as patched:
            for module, name in QUESTIONS:
                patched.enter_context(patch.object(module, name, answering(getattr(module, name))))
            yield
    finally:
        is_over = True
