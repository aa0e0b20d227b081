"""Layers are divided among stages so that the slowest stage is as fast as possible, including embedding and head."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, combinations, pairwise, permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rooftop.models.gpt.configs import GptConfig, gpt_config
from rooftop.models.gpt.layouts import parallel_gpt
from rooftop.models.gpt.stages import divided, layers_of_stages, parallel_gpt_stages
from rooftop.parallel import Layout
from rooftop.parallel.schedules import schedule_of

GPT = GptConfig(vocabulary=17, layers=4, width=16, heads=4, kv_heads=4, hidden=24, positions=8, dropout=0.2)


@given(
    costs=st.lists(st.integers(1, 20), min_size=1, max_size=9),
    parts=st.integers(1, 5),
    first=st.integers(0, 30),
    last=st.integers(0, 30),
)
def test_the_slowest_part_is_as_fast_as_can_be_and_the_others_as_equal(
    costs: list[int], parts: int, first: int, last: int
) -> None:
    parts = min(parts, len(costs))

    def of_parts(ends: tuple[int, ...]) -> tuple[int, int]:
        """(largest cost of a part, sum of squares)."""
        sums = [sum(costs[a:b]) for a, b in pairwise((0, *ends, len(costs)))]
        sums[0] += first
        sums[-1] += last
        return max(sums), sum(each * each for each in sums)

    found = divided(costs, [[part] for part in range(parts)], first, last)
    assert [each for part in found for each in part] == list(range(len(costs)))
    assert all(found)
    best = min(of_parts(ends) for ends in combinations(range(1, len(costs)), parts - 1))
    assert of_parts(tuple(part.stop for part in found[:-1])) == best


def test_equal_layers_are_divided_evenly() -> None:
    assert divided([1] * 8, [[0], [1], [2], [3]]) == [range(2), range(2, 4), range(4, 6), range(6, 8)]
    assert [len(part) for part in divided([1] * 7, [[0], [1], [2]])] == [3, 2, 2]


def test_the_last_stage_has_fewer_layers_where_the_head_is_large() -> None:
    """GPT-2's head takes as long as three of its layers."""
    config = gpt_config("gpt2")
    assert [len(each) for each in layers_of_stages(config, [[0], [1]], 1024)] == [7, 5]
    assert [len(each) for each in layers_of_stages(replace(config, vocabulary=16), [[0], [1]], 1024)] == [6, 6]
    assert [len(each) for each in layers_of_stages(gpt_config("llama-7b"), [[0], [1], [2], [3]], 4096)] == [8, 8, 8, 8]


@given(
    costs=st.lists(st.integers(1, 20), min_size=4, max_size=10),
    placement=st.sampled_from([[[0, 2], [1, 3]], [[0, 3], [1, 2]], [[0, 1, 2, 3]]]),
    last=st.integers(0, 30),
)
def test_ranks_with_several_stages_are_as_equal_as_moves_of_a_layer_make_them(
    costs: list[int], placement: list[list[int]], last: int
) -> None:
    def of_ranks(sizes: list[int]) -> tuple[int, int]:
        """(largest cost of a rank, largest cost of a stage)."""
        ends = [0, *accumulate(sizes)]
        of_stages = [sum(costs[a:b]) for a, b in pairwise(ends)]
        of_stages[-1] += last
        return max(sum(of_stages[stage] for stage in held) for held in placement), max(of_stages)

    found = divided(costs, placement, 0, last)
    assert [each for part in found for each in part] == list(range(len(costs)))
    sizes = [len(part) for part in found]
    for giver, taker in permutations(range(4), 2):
        if sizes[giver] > 1:
            moved = [size - (part == giver) + (part == taker) for part, size in enumerate(sizes)]
            assert of_ranks(sizes) <= of_ranks(moved)


def test_the_rank_with_the_head_has_fewer_layers_in_all() -> None:
    """The layers of both stages of a rank count. In a V-shaped schedule, the first rank has the head."""
    first, second, third, last = map(len, layers_of_stages(gpt_config("gpt2"), [[0, 3], [1, 2]], 1024))
    assert (first + last, second + third) == (5, 7)


def test_too_few_layers_are_refused() -> None:
    with pytest.raises(
        ValueError, match="4 layers cannot be divided among 5 stages, because each stage needs a layer:"
    ):
        layers_of_stages(GPT, [[0], [1, 2], [3, 4]], 8)


def test_a_rank_alone_has_all_stages_of_the_same_model() -> None:
    """All stages on one rank together have the parameters, names and ties of the whole model."""
    schedule = schedule_of("zbv", 1, 2)
    groups = Layout().process_groups()
    model = parallel_gpt_stages(GPT, Layout(), groups, schedule, length=8, seed=3)
    whole = parallel_gpt(GPT, seed=3)
    assert model.state_dict().keys() == whole.state_dict().keys()
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in whole.state_dict().items())
    assert model.head.output.weight is model.embedding.tokens.weight
    assert model.tied is None
    tokens = torch.arange(8)[None]
    model.eval(), whole.eval()
    for stage in model.stages.values():
        stage.eval()
    assert torch.equal(model(1, model(0, tokens)), whole(tokens))


def test_a_schedule_for_other_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="is for 2 ranks, but the layout dp=1 tp=1 pp=1 cp=1 has pp=1"):
        parallel_gpt_stages(GPT, Layout(), {}, schedule_of("1f1b", 2, 2), length=8, seed=3)
