"""Find out whether a program runs other operators while it is compiled or captured into a CUDA graph.

A program may ask PyTorch whether it is being compiled or captured, and then run other operators. For example,
transformers omits an attention mask that masks nothing, but keeps it if reading the mask would break the capture.
Attention with a mask is slower. Advice to compile or to capture must count such operators. So this module detects
whether a program asks. If it does, some steps run with "yes" as the answer.

PyTorch itself asks as well (its optimizers refuse to be captured unprepared), and gets the true answer. A program with
compiled parts is not watched, because the replaced functions would be compiled into these parts, in a separate graph.
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
        """Answer truthfully, and note that the program asked."""

        def notice(original: Callable[..., bool], *args: Any) -> bool:
            self.asked = True
            return original(*args)

        with _answered(notice):
            yield

    @contextmanager
    def affirmed(self) -> Iterator[None]:
        """Tell the program that it is being compiled and captured."""
        with _answered(lambda original, *args: True):
            yield


@contextmanager
def _answered(answer: Callable[..., bool]) -> Iterator[None]:
    """Replace PyTorch's functions by `answer(original, *arguments)`, except for callers that always get the true
    answer.

    A module that is first imported in the block keeps the replacement. After the block, the replacement answers like
    the original.
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
