"""A rank's mask is its part of the whole mask, for parts of the batch, of the sequence and of the heads."""

from __future__ import annotations

import pytest
import torch

from rooftop.models import GptConfig, parallel_gpt
from rooftop.parallel import CounterDropouts
from rooftop.parallel.dropouts import Place

BATCH, LENGTH, HEADS, WIDTH = 4, 6, 8, 5


@pytest.mark.parametrize("name", ["layers.0.mlp.dropout", "layers.1.attention.weights_dropout"])
@pytest.mark.parametrize(("batches", "parts"), [(1, 2), (2, 1), (4, 2), (2, 2)])
def test_masks_are_parts_of_the_whole(name: str, batches: int, parts: int) -> None:
    of_heads = name.endswith("weights_dropout")
    shape = (BATCH, HEADS, LENGTH, LENGTH) if of_heads else (BATCH, LENGTH, WIDTH)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    whole = CounterDropouts(seed=5)
    whole.step = 3
    expected = whole(0.4, name)(x)
    assert 0.2 < float((expected == 0).float().mean()) < 0.6
    rows = []
    for batch in range(batches):
        row = []
        for part in range(parts):
            at, other = (part, parts), (1, 2)  # a wrong part, which this kind of dropout does not use
            here = CounterDropouts(5, (batch, batches), other if of_heads else at, at if of_heads else other)
            here.step = 3
            row.append(here(0.4, name)(x.chunk(batches, 0)[batch].chunk(parts, 1)[part]))
        rows.append(torch.cat(row, 1))
    assert torch.equal(torch.cat(rows), expected)


def test_step_seed_name_and_mode() -> None:
    x, made = torch.ones(4, 6, 5), CounterDropouts(seed=5)
    dropout = made(0.4, "a")
    first = dropout(x)
    assert torch.equal(dropout(x), first)
    with made.at(Place(step=1)):
        second = dropout(x)
    assert torch.equal(dropout(x), first)
    others = [second, made(0.4, "b")(x), CounterDropouts(seed=6)(0.4, "a")(x)]
    assert not any(torch.equal(other, first) for other in others)
    made.step = 1
    assert torch.equal(dropout(x), second)
    assert dropout.eval()(x) is x
    assert "p=0.4, a" in repr(dropout)


@pytest.mark.parametrize("recompute", [False, True, "selective"])
def test_a_model_takes_a_step_in_a_tensor_and_finds_that_it_changed(recompute: bool | str) -> None:
    config = GptConfig(
        vocabulary=31, layers=2, width=16, heads=2, kv_heads=2, hidden=16, positions=8, attention_dropout=0.5
    )
    model = parallel_gpt(config, seed=1, recompute=recompute, dtype=torch.float64)
    tokens, step = torch.arange(8)[None], torch.tensor(3)
    gradients = []
    for given in (3, step):
        model.zero_grad()
        model(tokens, tokens, step=given).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    loss = model(tokens, tokens, step=step)
    step += 1
    with pytest.raises(
        RuntimeError, match="changed before backward" if recompute else "modified by an inplace operation"
    ):
        loss.backward()
