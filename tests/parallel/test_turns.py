"""Halves of a batch alternate: while data of one half are exchanged, the other half is computed, forward and
backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rooftop.models import GptConfig
from rooftop.models.gpt.layouts import parallel_gpt
from rooftop.parallel import Layout, tensor_linears, turns
from rooftop.parallel.turns import Phases, begin_gather, begin_scattered_sum, take_turns

Run = Callable[..., list[Any]]
LLAMA = GptConfig(vocabulary=31, layers=3, width=16, heads=4, kv_heads=4, hidden=16, positions=8, norm="rms",
                  position="rope", activation="swiglu", biases=False)  # fmt: skip
Event = tuple[str, int]
BARE = 4  # exchanges without overlap: the first and the last one, forward and backward


def steps(name: str, count: int, seen: list[str]) -> Phases[str]:
    for step in range(count):
        seen.append(f"{name}{step}")
        yield
    return name


def test_the_first_is_a_phase_ahead() -> None:
    seen: list[str] = []
    places: list[int] = []

    @contextmanager
    def turn_of(place: int) -> Iterator[None]:
        places.append(place)
        yield

    assert take_turns([steps("a", 4, seen), steps("b", 4, seen)], turn_of) == ["a", "b"]
    assert seen == ["a0", "a1", "b0", "a2", "b1", "a3", "b2", "b3"]
    assert places[:5] == [0, 0, 1, 0, 1]


def events_of_a_step() -> list[Event]:
    """The time at which each exchange began and ended on this rank, and at which each linear layer computed its product
    or gradient."""
    events: list[Event] = []

    def watched(start: Callable[..., Any]) -> Callable[..., Any]:
        def begin(*given: Any) -> Callable[[], Tensor]:
            number = len(events)
            events.append(("begin", number))
            pending = start(*given)

            def end() -> Tensor:
                events.append(("end", number))
                return pending()  # type: ignore[no-any-return]

            return end

        return begin

    real = tensor_linears.linear_act

    def product(*given: Any) -> Tensor:
        events.append(("product", len(events)))
        y = real(*given)
        y.register_hook(lambda dy: events.append(("product", len(events))))
        return y

    groups = Layout(1, 2, sequence_parallel=True).process_groups()
    model = parallel_gpt(LLAMA, Layout(1, 2, sequence_parallel=True), groups, seed=1, halves=True)
    tokens = torch.randint(31, (2, 8), generator=torch.Generator().manual_seed(0))
    with (
        patch.object(turns, "start_gather", watched(turns.start_gather)),
        patch.object(turns, "start_scattered_sum", watched(turns.start_scattered_sum)),
        patch.object(tensor_linears, "linear_act", product),
    ):
        model(tokens, tokens).backward()
    return events


def test_something_is_computed_while_something_is_exchanged(on_ranks: Run) -> None:
    """Each exchange overlaps with a linear layer's product, except for the first and the last, which have no other half
    to overlap with."""
    for events in on_ranks(2, events_of_a_step):
        begun = [number for what, number in events if what == "begin"]
        assert len(begun) == 2 * 2 * 4 * LLAMA.layers  # two halves, forward and back, four in each layer
        bare = 0
        for number in begun:
            meanwhile = events[events.index(("begin", number)) : events.index(("end", number))]
            bare += not any(what == "product" for what, _ in meanwhile)
        assert bare <= BARE
        open_at_once = [0]
        for what, _ in events:
            open_at_once.append(open_at_once[-1] + {"begin": 1, "end": -1, "product": 0}[what])
        assert max(open_at_once) >= 2
        assert open_at_once[-1] == 0


def there_and_back(kind: str) -> tuple[Tensor, Tensor]:
    x = torch.arange(4.0).reshape(4, 1).add(10 * dist.get_rank()).requires_grad_()
    begin = begin_gather if kind == "gather" else begin_scattered_sum
    y = begin(x * 1, 0, dist.group.WORLD).arrived()
    (y * torch.arange(1.0, 1 + len(y))[:, None]).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


def test_exchanges_on_their_way_are_those_of_exchanges(on_ranks: Run) -> None:
    first, second = on_ranks(2, there_and_back, "gather")
    assert first[0].flatten().tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    assert second[1].flatten().tolist() == [10, 12, 14, 16]
    first, second = on_ranks(2, there_and_back, "sum")
    assert first[0].flatten().tolist() == [10, 12]
    assert second[0].flatten().tolist() == [14, 16]
    assert first[1].flatten().tolist() == [1, 2, 1, 2]


def refused() -> list[str]:
    groups = Layout(1, 2).process_groups()
    model = parallel_gpt(LLAMA, Layout(1, 2), groups, seed=1, halves=True)
    said = []
    for make in (
        lambda: model(torch.zeros(3, 8, dtype=torch.long)),
        lambda: parallel_gpt(LLAMA, Layout(1, 2), groups, seed=1, halves=True, recompute=True),
    ):
        with pytest.raises(ValueError, match="halves") as error:
            make()
        said.append(str(error.value))
    assert model(torch.zeros(0, 8, dtype=torch.long)).shape == (0, 8, 31)
    return said


def test_what_has_no_halves_is_refused(on_ranks: Run) -> None:
    odd, again = on_ranks(2, refused)[0]
    assert "a batch of 3 cannot be halved" in odd
    assert "cannot be combined with recompute" in again


def by_both() -> list[tuple[Tensor, Tensor]]:
    """Losses and gradients of the model in halves and as a whole. The cases have positions for each sequence, two
    backward passes, or no gradients."""
    layout = Layout(1, 2, sequence_parallel=True)
    groups, generator = layout.process_groups(), torch.Generator().manual_seed(0)
    tokens = torch.randint(31, (4, 8), generator=generator)
    positions = torch.randint(8, (4, 8), generator=generator)
    found = []
    for halves in (False, True):
        model = parallel_gpt(LLAMA, layout, groups, seed=1, halves=halves, dtype=torch.float64)
        loss = model(tokens, tokens, positions=positions)
        loss.backward(retain_graph=True)
        loss.backward()
        with torch.no_grad():
            assert torch.equal(model(tokens, tokens, positions=positions), loss)
        gradient = model.layers["0"].attention.qkv.weight.grad
        assert gradient is not None
        found.append((loss.detach(), gradient))
    return found


def test_halves_are_the_whole(on_ranks: Run) -> None:
    for whole, halves in on_ranks(2, by_both):
        torch.testing.assert_close(halves, whole, rtol=1e-12, atol=1e-14)
