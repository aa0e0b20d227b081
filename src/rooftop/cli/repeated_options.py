"""Refuse a repeated option that takes one value: click would silently keep only the last value."""

from __future__ import annotations

from collections import Counter
from typing import Any

import click


def refuse_repeated_options(command: click.Command) -> click.Command:
    """Make a command, or all commands of a group, refuse a repeated option with `click.UsageError`.

    Options with `multiple` or `count`, and flags without an opposite (such as --no-x), may be repeated.
    """
    if isinstance(command, click.Group):
        for each in command.commands.values():
            refuse_repeated_options(each)
    if "make_parser" not in vars(command):  # patch once: a group may contain the same command twice
        make = command.make_parser

        def make_parser(ctx: click.Context) -> Any:
            parser = make(ctx)
            parse = parser.parse_args

            def parse_once(args: list[str]) -> Any:
                found = parse(args)
                _check(found[2], ctx)
                return found

            parser.parse_args = parse_once  # type: ignore[method-assign]
            return parser

        command.make_parser = make_parser  # type: ignore[method-assign]
    return command


def _check(given: list[click.Parameter], ctx: click.Context) -> None:
    """Raise UsageError if an option with one value is given twice. `given` is in the order typed."""
    options = [each for each in given if isinstance(each, click.Option) and not (each.multiple or each.count)]
    valued = [each for each in options if not each.is_flag or each.secondary_opts]
    for option, times in Counter(valued).items():
        if times > 1:
            names = " and ".join([*option.opts, *option.secondary_opts]) if option.is_flag else option.opts[-1]
            raise click.UsageError(
                f"{names} was given {times} times, expected once: only the last value would count", ctx
            )
