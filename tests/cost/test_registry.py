"""Registering formulas, and finding the one of an operator."""

from __future__ import annotations

import pytest
import torch

from rooftop.cost import FREE, Call, Cost, CountingMode, cost_of, covered_operators
from rooftop.cost.registry import formula_for

aten = torch.ops.aten


def free(call: Call) -> Cost:
    return FREE


def test_overloads_and_in_place_variants_share_a_formula() -> None:
    assert formula_for(aten.add.Tensor) is not None
    assert formula_for(aten.add.Tensor) is formula_for(aten.add_.Tensor)
    assert formula_for(aten.add.Tensor) is formula_for(aten.add.out)


def test_an_in_place_operator_may_have_its_own() -> None:
    assert formula_for(aten.masked_fill_.Scalar) is not formula_for(aten.masked_fill.Scalar)


def test_a_name_needs_its_namespace() -> None:
    with pytest.raises(ValueError, match="namespace::operator"):
        cost_of("mm")(free)


def test_an_operator_has_one_formula() -> None:
    covered_operators()
    with pytest.raises(ValueError, match="has a formula already"):
        cost_of("aten::mm")(free)


def test_a_formula_registered_after_the_first_use_counts() -> None:
    @torch.library.custom_op("rooftop_test_registry::double", mutates_args=())
    def double(source: torch.Tensor) -> torch.Tensor:
        return source * 2

    name = "rooftop_test_registry::double"
    with CountingMode() as before:
        double(torch.ones(3))
    assert [(record.name, record.cost) for record in before.records if record.name == name] == [(name, None)]

    @cost_of(name)
    def formula(call: Call) -> Cost:
        return Cost(4 * call["source"].numel(), 4 * call.out.numel(), {"fp32": call.out.numel()})

    with CountingMode() as after:
        double(torch.ones(3))
    assert [record.cost for record in after.records if record.name == name] == [Cost(12, 12, {"fp32": 3})]
    assert name in covered_operators()
