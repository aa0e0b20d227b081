"""Numbers within limits as values of options."""

from __future__ import annotations

from typing import Any

import click


class NumberRange(click.FloatRange):
    """A number within limits. `click.FloatRange` also accepts NaN, because NaN is below no limit and above none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found: float = super().convert(value, param, ctx)
        if found != found:
            self.fail(f"{value!r} is not a number", param, ctx)
        return found
