"""Formulas are registered, and the formula of an operator is found."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch

from rooftop.cost import FREE, Call, Cost, CountingMode, cost_of, covered_operators
from rooftop.cost.lookup import formula_for
from rooftop.cost.registry import FORMULAS

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
    with pytest.raises(ValueError, match="already has a formula"):
        cost_of("aten::mm")(free)


def test_formulas_count_the_elements_of_arguments_that_operators_have() -> None:
    importlib.import_module("torch._inductor.inductor_prims")  # defines some of the operators
    counted = {
        name: inspect.getclosurevars(formula).nonlocals.get("per")
        for name in covered_operators()
        if not name.startswith("torchvision::") and (formula := FORMULAS[name]).__name__ == "formula"
    }
    assert sum(argument is not None for argument in counted.values()) > 30
    for name, argument in counted.items():
        namespace, operator = name.split("::")
        packet = getattr(getattr(torch.ops, namespace), operator, None)  # None: an operator of a newer PyTorch
        schemas = [getattr(packet, each)._schema for each in packet.overloads()] if packet is not None else []
        for schema in schemas if argument is not None else ():
            assert argument in [each.name for each in schema.arguments], schema


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
