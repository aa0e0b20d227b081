"""All missing packages are in one message, with one command."""

from __future__ import annotations

import sys

import pytest

from rooftop.doctor.extras import Extra, check_extras, missing
from rooftop.errors import MissingExtraError

HERE = Extra("here", "json", "json", "text")
ONE = Extra("one", "no_such_module_1", "package-1", "the first")
TWO = Extra("two", "no_such_module_2", "package-2", "the second")
THREE = Extra("two", "no_such_module_3", "package-3", "the third")


def test_what_is_installed_is_not_named() -> None:
    assert missing([HERE, ONE, TWO]) == [ONE, TWO]
    assert check_extras("it", [HERE], [HERE]) == ""


def test_a_module_that_is_blocked_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "json", None)
    assert missing([HERE]) == [HERE]


@pytest.mark.parametrize(
    ("needed", "useful", "words"),
    [
        ([ONE], [], 'it needs package-1 (the first): pip install "rooftop[one]"'),
        (
            [ONE, HERE, TWO, THREE],
            [],
            "it needs package-1 (the first), package-2 (the second) and package-3 (the third): "
            'pip install "rooftop[one,two]"',
        ),
        (
            [ONE],
            [TWO, HERE],
            'it needs package-1 (the first); package-2 (the second) is useful: pip install "rooftop[one,two]"',
        ),
        (
            [ONE],
            [TWO, THREE],
            "it needs package-1 (the first); package-2 (the second) and package-3 (the third) are useful: "
            'pip install "rooftop[one,two]"',
        ),
    ],
)
def test_an_error_names_all(needed: list[Extra], useful: list[Extra], words: str) -> None:
    with pytest.raises(MissingExtraError) as caught:
        check_extras("it", needed, useful)
    assert str(caught.value) == words


def test_what_is_only_useful_is_a_note() -> None:
    note = check_extras("it", [HERE], [ONE, TWO])
    words = "without package-1 (the first) and package-2 (the second), which are not installed: "
    assert note == words + 'pip install "rooftop[one,two]"'
    assert check_extras("it", [], [ONE]) == (
        'without package-1 (the first), which is not installed: pip install "rooftop[one]"'
    )
