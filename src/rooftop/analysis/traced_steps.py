"""Find out whether a program runs other operators while it is compiled or captured into a CUDA graph.

A program may ask PyTorch whether it is being compiled or captured, and then run other operators. For example,
transformers reads an attention mask, and omits it if it masks nothing. During compilation or capture, transformers does
not read the mask, and so keeps it. Attention with a mask is slower. Advice to compile or to capture must count the
operators that run when the answer is "yes". So this module detects whether a program asks. If a program asks, a few of
its steps are measured with "yes" as the answer.

PyTorch itself asks as well (its optimizers refuse to be captured unprepared), and gets the true answer. A program with
compiled parts is not watched, because torch.compile would break its graphs at the replaced functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rooftop.hardware.tracing_questions import answered


class TracingQuestions:
    """Answer the program's questions whether it is being compiled or captured.

    Attributes:
        asked: whether the program has asked inside `noticed`.
    """

    def __init__(self) -> None:
        self.asked = False

    @contextmanager
    def noticed(self) -> Iterator[None]:
        """Answer truthfully, and note that the program asked."""

        def notice(original: Callable[..., bool], *args: Any) -> bool:
            self.asked = True
            return original(*args)

        with answered(notice):
            yield

    @contextmanager
    def affirmed(self) -> Iterator[None]:
        """Tell the program that it is being compiled and captured."""
        with answered(lambda original, *args: True):
            yield
