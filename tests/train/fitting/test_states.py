"""Any state dict survives conversion to tensors and JSON and back."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rooftop.train.fitting.states import put_together, same_state, taken_apart

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint16)
tensors = st.builds(
    lambda dtype, sizes: torch.arange(math.prod(sizes)).view(sizes).to(dtype),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
)
plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | tensors
states = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=8,
)


def through_json(state: Any) -> Any:
    found: dict[str, Tensor] = {}
    described = json.loads(json.dumps(taken_apart(state, "", found)))
    return put_together(described, found)


@settings(max_examples=25)
@given(states)
def test_a_state_comes_back(state: Any) -> None:
    assert same_state(through_json(state), state)


def test_an_optimizer_goes_on_with_its_state() -> None:
    def stepped(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()

    model = nn.Linear(3, 2)
    one = torch.optim.AdamW(model.parameters(), betas=(0.8, 0.9))
    stepped(one, model)
    other = torch.optim.AdamW(model.parameters())
    other.load_state_dict(through_json(one.state_dict()))
    assert other.param_groups[0]["betas"] == (0.8, 0.9)
    assert same_state(other.state_dict(), one.state_dict())


def test_states_that_differ_are_not_the_same() -> None:
    assert not same_state({"a": torch.zeros(2)}, {"a": torch.zeros(2, dtype=torch.float64)})
    assert not same_state({"a": torch.zeros(2)}, {"a": -torch.zeros(2)})  # bit for bit
    assert not same_state([1, 2], (1, 2))
    assert same_state(torch.tensor(math.nan), torch.tensor(math.nan))


def test_what_json_cannot_hold_is_named() -> None:
    with pytest.raises(TypeError, match=r"optimizer\.state is a set: a checkpoint stores only tensors"):
        taken_apart({"optimizer": {"state": {1}}}, "", {})
    with pytest.raises(TypeError, match="only strings and integers as keys"):
        taken_apart({(1, 2): 3}, "state", {})
