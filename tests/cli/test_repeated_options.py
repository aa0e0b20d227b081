"""No option of any command drops its earlier values when it is repeated."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest

from rooftop.cli.main import command, main
from rooftop.cli.repeated_options import refuse_repeated_options


def leaves(group: click.Group, words: list[str]) -> Iterator[tuple[list[str], click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        assert found is not None
        if isinstance(found, click.Group):
            yield from leaves(found, [*words, name])
        else:
            yield [*words, name], found


COMMANDS = list(leaves(command, []))


@pytest.mark.parametrize(("words", "found"), COMMANDS, ids=[" ".join(words) for words, _ in COMMANDS])
def test_every_option_of_every_command_is_given_once(
    words: list[str], found: click.Command, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [each for each in found.params if isinstance(each, click.Option)]
    names = [each.name for each in found.params]
    assert len(set(names)) == len(names)  # no two options set the same value
    for option in options:
        if option.multiple or option.count or (option.is_flag and not option.secondary_opts):
            continue
        once = [option.opts[-1]] if option.is_flag else [option.opts[-1], *["1"] * option.nargs]
        again = [(option.secondary_opts or option.opts)[-1], *once[1:]]
        assert main([*words, *once, *again]) == 2
        err = capsys.readouterr().err
        assert f"{option.opts[-1]}" in err
        assert "was given 2 times, expected once" in err


def test_flags_and_lists_may_be_given_again(capsys: pytest.CaptureFixture[str]) -> None:
    @click.command()
    @click.option("--flag", is_flag=True)
    @click.option("--each", multiple=True)
    @click.option("-v", count=True)
    @click.option("--one", "--uno")
    def say(flag: bool, each: tuple[str, ...], v: int, one: str | None) -> None:
        click.echo(f"{flag} {each} {v} {one}")

    for _ in range(2):  # the second call changes nothing
        refuse_repeated_options(say)
    say.main(["--flag", "--flag", "--each", "a", "--each", "b", "-vv", "--one", "1"], standalone_mode=False)
    assert capsys.readouterr().out == "True ('a', 'b') 2 1\n"
    with pytest.raises(click.UsageError, match="--uno was given 2 times"):
        say.main(["--one", "1", "--uno=2"], standalone_mode=False)


@pytest.mark.parametrize(("words", "found"), COMMANDS, ids=[" ".join(words) for words, _ in COMMANDS])
def test_no_option_with_limits_takes_nan(
    words: list[str], found: click.Command, capsys: pytest.CaptureFixture[str]
) -> None:
    for option in found.params:
        if isinstance(option.type, click.FloatRange):
            assert main([*words, option.opts[-1], "nan"]) == 2
            assert "'nan' is not a number" in capsys.readouterr().err
