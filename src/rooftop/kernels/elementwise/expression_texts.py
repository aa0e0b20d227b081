"""Parse elementwise expressions from text: `t0 = sigmoid(a1); a0 * t0 + 3` becomes the tree whose `text_of` is this
text.

Grammar: statements `t0 = expression`, separated by `;`, and at the end one or more expressions, separated by commas.
Expressions contain arguments a0, a1, ..., names that an earlier statement defines, numbers, inf, nan, True, False,
operators, calls of `OPERATIONS` and parentheses. The precedence of operators is that of Python. Comparisons cannot be
chained. The parser evaluates nothing, and uses two stacks instead of recursion (Dijkstra 1961, the shunting-yard
algorithm). So only memory limits how deeply expressions can be nested.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple, NoReturn

from rooftop.kernels.elementwise.expressions import (
    BY_SYMBOL,
    OPERATIONS,
    Expression,
    apply,
    argument,
    constant,
)


@lru_cache(maxsize=1024)
def parse(text: str) -> tuple[Expression, ...]:
    """Parse a text, and return the trees of its results.

    Raises:
        ValueError: the text is not in the grammar of the module's docstring.
    """
    *statements, last = text.split(";")
    names: dict[str, Expression] = {}
    for statement in statements:
        match = re.fullmatch(r"\s*(t\d+)\s*=(?!=)(.*)", statement, re.DOTALL)
        if match is None:
            raise ValueError(f"fused: expected 't0 = ...' before the results, got {_shown(statement)}")
        found = _Reader(match[2], names).expressions()
        if len(found) != 1:
            raise ValueError(f"fused: expected one expression for a name, got {_shown(statement)}")
        names[match[1]] = found[0]
    return tuple(_Reader(last, names).expressions())


_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(?![\w.])|(?P<call>[A-Za-z_]\w*)\s*\("
    r"|(?P<name>[A-Za-z_]\w*)|(?P<symbol>\*\*|[<>=!]=|[-+*/&|^~<>(),]))\s*"
)
_LEVELS = ("< <= > >= == !=", "|", "^", "&", "+ -", "* /", "prefix", "**")
_BINDING = {symbol: level for level, symbols in enumerate(_LEVELS, 1) for symbol in symbols.split()}
"""Operators of each precedence, the weakest first, as in Python; "prefix" stands for operators with one operand."""
_WORDS = {"inf": math.inf, "nan": math.nan, "True": True, "False": False}


class _Waiting(NamedTuple):
    """An operator, a call or a parenthesis that waits for operands.

    `operation`: "" for grouping parentheses. `binding`: precedence; 0 for calls and parentheses. `before`: the number
    of values on the stack when the operator was pushed.
    """

    operation: str
    arity: int
    binding: int
    before: int


class _Reader:
    """Parses expressions, separated by commas, from left to right."""

    def __init__(self, text: str, names: dict[str, Expression]) -> None:
        self.text, self.names = text, names
        self.values: list[Expression] = []
        self.waiting: list[_Waiting] = []

    def expressions(self) -> list[Expression]:
        """Parse the text and return its expressions in order."""
        needs_operand = True
        for kind, token in self._tokens():
            needs_operand = self._start(kind, token) if needs_operand else self._continue(token)
        self._apply_waiting(1)
        if needs_operand or self.waiting:
            self._refuse("an operand" if needs_operand else "')'", "the end")
        return self.values

    def _tokens(self) -> Iterator[tuple[str, str]]:
        """(kind, text) of each token. A function's name and its opening parenthesis are one token."""
        position = 0
        while position < len(self.text):
            match = _TOKEN.match(self.text, position)
            if match is None or match.lastgroup is None:
                self._refuse("an expression", repr(self.text[position : position + 20]))
            position = match.end()
            yield match.lastgroup, match[match.lastgroup]

    def _start(self, kind: str, token: str) -> bool:
        """Process a token where the text must have an operand. Return whether an operand is still expected after it:
        True after a function's name, a parenthesis or a prefix operator.
        """
        if kind == "call":
            if token not in OPERATIONS:
                self._refuse("an operation", repr(token))
            self._wait(token, OPERATIONS[token].arity, 0)
        elif token == "(":
            self._wait("", 1, 0)
        elif token in ("-", "~"):
            self._wait(BY_SYMBOL[token, 1], 1, _BINDING["prefix"])
        else:
            self.values.append(self._value(kind, token))
            return False
        return True

    def _continue(self, token: str) -> bool:
        """Handle a token after a complete operand. Returns whether another operand is expected."""
        if token in _BINDING:
            binding = _BINDING[token]
            self._apply_waiting(binding + (token == "**" or binding == 1))  # `**` is right-associative
            if binding == 1 and self.waiting and self.waiting[-1].binding == 1:
                self._refuse("comparisons of two", repr(token))
            self._wait(BY_SYMBOL[token, 2], 2, binding)
            return True
        self._apply_waiting(1)
        if token == "," and (not self.waiting or self.waiting[-1].operation):
            return True
        if token != ")" or not self.waiting:
            self._refuse("an operator", repr(token))
        opened = self.waiting.pop()
        if opened.operation:
            given = len(self.values) - opened.before
            if given != opened.arity:
                raise ValueError(f"fused: {opened.operation} takes {opened.arity} operands, got {given}")
            self._apply(opened)
        return False

    def _wait(self, operation: str, arity: int, binding: int) -> None:
        self.waiting.append(_Waiting(operation, arity, binding, len(self.values)))

    def _apply_waiting(self, binding: int) -> None:
        """Apply the operators that wait for their right operand and have at least the precedence `binding`. The
        operator that was read last is applied first.
        """
        while self.waiting and self.waiting[-1].binding >= binding:
            self._apply(self.waiting.pop())

    def _apply(self, waiting: _Waiting) -> None:
        operands = self.values[-waiting.arity :]
        del self.values[-waiting.arity :]
        value = operands[0].value if operands[0].operation == "constant" else None
        if waiting.operation == "neg" and value is not None and repr(value)[0] != "-":
            self.values.append(constant(-value))
        else:
            self.values.append(apply(waiting.operation, *operands))

    def _value(self, kind: str, token: str) -> Expression:
        if kind == "number":
            if not token.isdigit():
                return constant(float(token))
            if len(token) > 20:
                raise ValueError(
                    f"fused: a number of {len(token)} digits is more than a tensor can hold: write a float"
                )
            return constant(int(token))
        if token in self.names:
            return self.names[token]
        if token in _WORDS:
            return constant(_WORDS[token])
        if re.fullmatch(r"a\d{1,3}", token):
            return argument(int(token[1:]))
        return self._refuse("an argument, a name defined before or a number", repr(token))

    def _refuse(self, expected: str, got: str) -> NoReturn:
        raise ValueError(f"fused: expected {expected}, got {got} in {_shown(self.text)}")


def _shown(text: str) -> str:
    """The text for an error message, shortened if it is long."""
    return repr(text if len(text) <= 80 else f"{text[:77]}...")
