"""Errors suggest the nearest existing name, wherever a user chooses a name."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rooftop.nn
from rooftop.cli.main import VERBS, main
from rooftop.hardware.ceilings import ceilings_of
from rooftop.models import builtin_models
from rooftop.words import _typing_errors, did_you_mean, nearest

WORDS = st.text("abcdefg_", min_size=4, max_size=10)


@given(st.sets(WORDS, min_size=1), st.data())
def test_a_name_with_one_typing_error_is_found(names: set[str], data: st.DataObject) -> None:
    """The right name is found unless another one is equally near."""
    name = data.draw(st.sampled_from(sorted(names)))
    place = data.draw(st.integers(0, len(name) - 2))
    changed = data.draw(
        st.sampled_from(
            (
                name[:place] + name[place + 1 :],
                name[:place] + "z" + name[place:],
                name[:place] + "z" + name[place + 1 :],
                name[:place] + name[place + 1] + name[place] + name[place + 2 :],
            )
        )
    )
    found = nearest(changed, sorted(names))
    assert len(found) <= 3
    others = [each for each in names if each != name and edits(changed, each) <= 1]
    if not others and len(name.replace("_", "")) > 3:
        assert found == [name] or any(each.replace("_", "").startswith(changed.replace("_", "")) for each in names)


def edits(a: str, b: str) -> int:
    """Typing errors between two words, by the definition."""
    a, b = a.replace("_", ""), b.replace("_", "")

    @cache
    def count(i: int, j: int) -> int:
        if i == 0 or j == 0:
            return i + j
        ways = [count(i - 1, j) + 1, count(i, j - 1) + 1, count(i - 1, j - 1) + (a[i - 1] != b[j - 1])]
        if i > 1 and j > 1 and (a[i - 1], a[i - 2]) == (b[j - 2], b[j - 1]):
            ways.append(count(i - 2, j - 2) + 1)
        return min(ways)

    return count(len(a), len(b))


@given(st.text("abc", max_size=6), st.text("abc", max_size=6))
def test_typing_errors_are_counted_as_defined(a: str, b: str) -> None:
    assert _typing_errors(a, b) == edits(a, b)


@pytest.mark.parametrize(
    ("given_", "names", "expected"),
    [
        # a longer name with the same ending is further away
        ("resnet5", ["resnet18", "resnet50", "resnet152"], ["resnet50"]),
        ("Layer-Norm", ["layer_norm", "rms_norm"], ["layer_norm"]),
        ("matmlu", ["matmul", "mul"], ["matmul"]),
        ("swin_tiny", ["swin_b", "swin_t", "swin_v2_t"], ["swin_t"]),
        ("res", ["resnet18", "resnet34", "swin_t"], ["resnet18", "resnet34"]),
        ("IMAGENET1K_V3", ["DEFAULT", "IMAGENET1K_V1", "IMAGENET1K_V2"], ["IMAGENET1K_V2"]),
        ("quite_another", ["resnet18", "swin_t"], []),
        ("", ["a", "ab"], []),
        ("a", [], []),
    ],
)
def test_the_nearest_name(given_: str, names: list[str], expected: list[str]) -> None:
    assert nearest(given_, names) == expected


def test_a_message_ends_with_it() -> None:
    assert did_you_mean("gleu", ["gelu", "relu"]) == " (did you mean gelu?)"
    assert did_you_mean(None, ["gelu", "relu"]) == did_you_mean(3, ["gelu"]) == ""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("analyse resnet18", "No such command 'analyse' (did you mean analyze?)"),
        ("predict_vide", "(did you mean predict-video?)"),
        ("media decod", "No such command 'decod' (did you mean decode?)"),
        ("scene rendr", "(did you mean render?)"),
        ("analyze resnet18 --jsno x", "No such option --jsno (did you mean --json?)"),
        ("ceilings --refesh", "(did you mean --refresh?)"),
        ("media bench x --divece cpu", "(did you mean --device?)"),
        ("ladder matmull", "'matmull' is not one of"),
        ("ladder matmull", "(did you mean matmul?)"),
        ("crossover laier_norm", "(did you mean layer_norm?)"),
        ("analyze resnet18 --dtype bf61", "(did you mean bf16?)"),
        ("analyze resnet18 --predict h20", "(did you mean h200?)"),
        ("analyze resnet18 --compile=max-autotne", "(did you mean max-autotune?)"),
        ("analyze resnet18 --input 2x3:flaot32", "(did you mean float32?)"),
        ("analyze resnet5", "(did you mean resnet50?)"),
        ("generate --random-weights 0 --model gtp2 --prompt x", "(did you mean gpt2?)"),
        ("quite-another", "No such command 'quite-another' (try: rooftop --help)"),
    ],
)
def test_the_command_line_names_the_nearest(words: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_is_found_without_its_last_letter(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb[:-1]]) == 2
    assert f"(did you mean {verb}" in capsys.readouterr().err


def test_functions_name_the_nearest_too() -> None:
    with pytest.raises(ValueError, match=r"got 'gleu' \(did you mean gelu\?\)"):
        rooftop.nn.LinearAct(2, 2, activation="gleu")
    with pytest.raises(ValueError, match=r"\(did you mean LayerNorm\?\)"):
        rooftop.nn.replace(rooftop.nn.SwiGLU(), only=["layernorm"])
    with pytest.raises(ValueError, match=r"\(did you mean h100\?\)"):
        ceilings_of("H-100x")
    for name in builtin_models():
        assert nearest(name + "x", builtin_models()) == [name]
