"""Command groups that import a command only when it is used, so that help and errors appear without loading torch."""

from __future__ import annotations

import importlib
import select
from collections.abc import Mapping
from typing import Any, NamedTuple

import click

from rooftop.cli.repeated_options import refuse_repeated_options
from rooftop.words import did_you_mean


class Verb(NamedTuple):
    """A command of a group.

    Attributes:
        place: "module:name" of the command.
        line: the command's line in the help of the group, and the first line of the command's own help.
    """

    place: str
    line: str


class LazyGroup(click.Group):
    """A group that knows the names and help lines of its commands, and imports a command when it is used.

    Args:
        verbs: the commands by name. **attributes: as in `click.Group`.
    """

    def __init__(self, *args: Any, verbs: Mapping[str, Verb], **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.verbs = verbs

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.verbs)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.verbs:
            return None
        module, _, attribute = self.verbs[name].place.partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return refuse_repeated_options(command)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the first word names, as click does.

        Raises:
            click.UsageError: no command has that name; the message suggests the nearest command.
        """
        if args and args[0] not in self.verbs and not args[0].startswith("-"):
            near = did_you_mean(args[0], self.verbs)
            raise click.UsageError(f"No such command {args[0]!r}{near}", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, as click does.

        Raises:
            BrokenPipeError: the program that reads the output has ended. click then ends the process without a message.
            RuntimeError: another pipe broke, such as a worker process's.
        """
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            if _reader_has_ended():
                raise
            raise RuntimeError(f"a pipe broke, because the process at its other end has ended: {error}") from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, verb.line) for name, verb in self.verbs.items()])


def _reader_has_ended() -> bool:
    """Whether a program that reads this process's stdout or stderr (head, less) has ended."""
    outputs = select.poll()
    for descriptor in (1, 2):
        outputs.register(descriptor, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in outputs.poll(0))
