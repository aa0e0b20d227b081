"""Integers that remember how they were computed from sizes that vary."""

from __future__ import annotations

import pytest

from rooftop.launch.row_counts import BY_16, IS_ZERO, NUMBER, VARIABLE, Condition, Count, code_of, value_of


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 128, 1000])
def test_formulas_have_the_values_of_their_operations(rows: int) -> None:
    count = Count.of(77, (VARIABLE, 0), [])
    formulas = {
        "tiles": (-(-count // 32) * 3, -(-rows // 32) * 3),
        "less": (5 - count + 2, 5 - rows + 2),
        "share": (-(-1000 // count), -(-1000 // rows)),
        "product": (count * count - 7, rows * rows - 7),
    }
    for name, (made, expected) in formulas.items():
        assert type(made) is Count
        assert value_of(made.formula, [rows]) == expected, name
    assert value_of(code_of(9), []) == 9


def test_comparisons_are_conditions() -> None:
    conditions: list[Condition] = []
    one, other = Count.of(64, (VARIABLE, 0), conditions), Count.of(48, (VARIABLE, 1), conditions)
    assert min(one, other) is other
    assert one >= 64
    assert not one < 10
    assert one != 5
    assert one.is_by_16()
    assert len(conditions) == 5
    assert [each.kind for each in conditions[-2:]] == [IS_ZERO, BY_16]
    for values, all_hold in (
        ([64, 48], True),
        ([80, 79], True),
        ([63, 48], False),
        ([64, 65], False),
        ([72, 48], False),
    ):
        holds = [_holds(each, values) for each in conditions]
        assert all(holds) == all_hold, (values, holds)


def _holds(condition: Condition, values: list[int]) -> bool:
    value = value_of(condition.formula, values)
    found = value < 0 if condition.kind == 0 else value == 0 if condition.kind == IS_ZERO else value % 16 == 0
    return found == condition.held


@pytest.mark.parametrize(
    "operation", [hash, lambda n: n % 3, lambda n: n.bit_length(), lambda n: 1 << n, lambda n: n / 2]
)
def test_operations_without_a_formula_raise(operation: object) -> None:
    with pytest.raises(TypeError):
        operation(Count.of(7, (VARIABLE, 0), []))  # type: ignore[operator]


def test_numbers_stay_numbers_outside_of_lessons() -> None:
    assert code_of(3) == (NUMBER, 3)
    assert isinstance(Count.of(3, (VARIABLE, 0), []), int)
