"""Changes that are faster but wrong are refused, each with the reason."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rooftop
from rooftop.optimization import Optimized
from rooftop.optimization.draws import Draw
from rooftop.optimization.gate import Gate
from rooftop.rewrites import Candidate, Rule

Call = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("clock")


class Cheat(Rule):
    """A user's rule that replaces the call by `make(call, candidate)`."""

    name = "cheat"
    trains = True

    def __init__(self, make: Callable[[Call, Candidate], Call]) -> None:
        self.make = make

    def apply(self, candidate: Candidate) -> str:
        candidate.call = self.make(candidate.call, candidate)
        return "the whole model"


class Slow(nn.Module):
    """A slow model, so that a change which does less is faster."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.002)
        return self.second(self.first(x).relu())  # type: ignore[no-any-return]


def tried(
    make: Callable[[Call, Candidate], Call], x: Tensor | None = None, **options: Any
) -> tuple[Optimized, str, str]:
    """The answers of `optimize` to a cheat: the whole report, the verdict and the reason."""
    torch.manual_seed(0)
    model = Slow().train(options.get("train", False))
    found = rooftop.optimize(model, torch.randn(4, 8) if x is None else x, rules=[Cheat(make)], **options)
    (change,) = found.changes
    assert model.first.weight.grad is None
    return found, change.verdict, change.reason


def quick(candidate: Candidate) -> Callable[[Tensor], Tensor]:
    model = candidate.model
    assert isinstance(model, Slow)
    return lambda x: model.second(model.first(x).relu())  # type: ignore[no-any-return]


def test_what_is_right_and_faster_is_kept() -> None:
    found, verdict, reason = tried(lambda call, candidate: quick(candidate))
    assert (verdict, reason) == ("kept", "")
    assert found.after_ms < found.before_ms
    assert len(found.checked) == 7
    assert not found.unchecked


def right_on_the_sample_only(call: Call, candidate: Candidate) -> Call:
    known: list[Tensor] = []

    def cheat(x: Tensor) -> Tensor:
        if not known:
            known.append(call(x))
        return known[0].clone()

    return cheat


def gives_back_the_memory_of_its_input(call: Call, candidate: Candidate) -> Call:
    compute = quick(candidate)
    return lambda x: x.copy_(compute(x))


def gives_stale_memory(call: Call, candidate: Candidate) -> Call:
    return lambda x: torch.empty_like(x)


def writes_where_it_wrote_before(call: Call, candidate: Candidate) -> Call:
    compute, place = quick(candidate), torch.empty(4, 8)
    return lambda x: place.copy_(compute(x))


def keeps_results_by_address(call: Call, candidate: Candidate) -> Call:
    compute, known = quick(candidate), dict[int, Tensor]()

    def cheat(x: Tensor) -> Tensor:
        address = x.data_ptr()
        held.append(x)  # so that no other tensor gets this address
        if address not in known:
            known[address] = compute(x)
        return known[address].clone()

    held: list[Tensor] = []
    return cheat


def computes_in_bfloat16(call: Call, candidate: Candidate) -> Call:
    compute = quick(candidate)

    def cheat(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return compute(x).float()

    return cheat


def drops_nan(call: Call, candidate: Candidate) -> Call:
    compute = quick(candidate)
    return lambda x: compute(x.nan_to_num())


def takes_what_is_contiguous_only(call: Call, candidate: Candidate) -> Call:
    compute = quick(candidate)
    return lambda x: compute(x.as_strided(x.shape, (x.shape[1], 1)))


def gives_another_dtype(call: Call, candidate: Candidate) -> Call:
    compute = quick(candidate)
    return lambda x: compute(x).double()


def gives_another_layout(call: Call, candidate: Candidate) -> Call:
    compute = quick(candidate)
    return lambda x: compute(x).t().contiguous().t()


def changes_its_input(call: Call, candidate: Candidate) -> Call:
    compute = quick(candidate)

    def cheat(x: Tensor) -> Tensor:
        result = compute(x)
        x.add_(1)
        return result

    return cheat


def counts_its_calls(call: Call, candidate: Candidate) -> Call:
    compute, calls = quick(candidate), [0]

    def cheat(x: Tensor) -> Tensor:
        calls[0] += 1
        return compute(x) + (calls[0] > 12)

    return cheat


def is_off_by_a_little(call: Call, candidate: Candidate) -> Call:
    compute = quick(candidate)
    return lambda x: compute(x) * (1 + 3e-6)


CHEATS = {
    right_on_the_sample_only: "other values: result 0 is off by",
    gives_back_the_memory_of_its_input: "result 0 and argument 0 share memory, but the original's do not",
    gives_stale_memory: "result 0",
    writes_where_it_wrote_before: "result 0 was changed by the next call",
    keeps_results_by_address: "inputs in the same memory: result 0 is off by",
    computes_in_bfloat16: "the given inputs: result 0 is off by",
    drops_nan: "NaN in the inputs: result 0 lacks",
    takes_what_is_contiguous_only: "non-contiguous inputs: result 0 ",
    gives_another_dtype: "result 0 is 4x8 float64 on cpu, the original's 4x8 float32 on cpu",
    gives_another_layout: "result 0 has strides (1, 4), the original's (8, 1)",
    changes_its_input: "argument 0 afterwards",
    counts_its_calls: "result 0",
    is_off_by_a_little: "the given inputs: result 0 is off by",
}


@pytest.mark.parametrize("cheat", CHEATS, ids=lambda cheat: cheat.__name__)
def test_it_is_refused(cheat: Callable[[Call, Candidate], Call]) -> None:
    found, verdict, reason = tried(cheat)
    assert (verdict, found.kept) == ("refused", [])
    assert CHEATS[cheat] in reason
    x = torch.randn(4, 8)
    with torch.no_grad():
        assert torch.equal(found.module(x), found.undo()(x))


def test_slower_in_the_model_is_no_gain() -> None:
    def slower(call: Call, candidate: Candidate) -> Call:
        def cheat(x: Tensor) -> Tensor:
            time.sleep(0.002)
            return call(x)  # type: ignore[no-any-return]

        return cheat

    _, verdict, reason = tried(slower)
    assert verdict == "no gain"
    assert "which does not exceed the noise and 2%" in reason


def fixed_to_four_rows(call: Call, candidate: Candidate) -> Call:
    compute = quick(candidate)
    return lambda x: torch.cat([compute(x[:4]), x.new_zeros(max(0, len(x) - 4), 8)])


def wrong_for_one_row(call: Call, candidate: Candidate) -> Call:
    compute = quick(candidate)
    return lambda x: compute(x) if len(x) > 1 else compute(x) + 1


@pytest.mark.parametrize(("cheat", "rows"), [(fixed_to_four_rows, 6), (wrong_for_one_row, 1)])
def test_sizes_that_are_claimed_are_tried_and_others_run_the_original(
    cheat: Callable[[Call, Candidate], Call], rows: int
) -> None:
    _, verdict, reason = tried(cheat, shapes=[(rows, 8)])
    assert verdict == "refused"
    assert f"inputs of {rows}x8 float32: result 0" in reason
    found, verdict, _ = tried(cheat)
    assert verdict == "kept"
    x = torch.randn(rows, 8)
    with torch.no_grad(), pytest.warns(RuntimeWarning, match=f"not proven for {rows}x8 float32"):
        assert torch.equal(found.module(x), found.undo()(x))


def test_a_gradient_that_is_skipped_is_missed() -> None:
    def without_one(call: Call, candidate: Candidate) -> Call:
        model = candidate.model
        assert isinstance(model, Slow)
        return lambda x: nn.functional.linear(model.first(x).relu(), model.second.weight, model.second.bias.detach())

    _, verdict, reason = tried(without_one, train=True)
    assert verdict == "refused"
    assert "no gradient of second.bias" in reason


def test_a_gradient_that_is_wrong_is_seen() -> None:
    def doubled(call: Call, candidate: Candidate) -> Call:
        model = candidate.model
        assert isinstance(model, Slow)

        def cheat(x: Tensor) -> Tensor:
            hidden = model.first(x).relu()
            return model.second(2 * hidden - hidden.detach())  # type: ignore[no-any-return]

        return cheat

    _, verdict, reason = tried(doubled, train=True)
    assert verdict == "refused"
    assert "gradient of first." in reason


def test_what_raises_is_said() -> None:
    def raises(call: Call, candidate: Candidate) -> Call:
        def cheat(x: Tensor) -> Tensor:
            raise torch.OutOfMemoryError("no room for it\nand a long tale")

        return cheat

    found, verdict, reason = tried(raises)
    assert (verdict, reason) == ("failed", "OutOfMemoryError: no room for it")
    assert found.kept == []


def test_only_the_same_bits_where_they_are_asked_for() -> None:
    def other_order(call: Call, candidate: Candidate) -> Call:
        model = candidate.model
        assert isinstance(model, Slow)

        def change(x: Tensor) -> Tensor:
            return (
                model.first(x).relu().double() @ model.second.weight.double().t() + model.second.bias.double()
            ).float()

        return change

    assert tried(other_order)[1] == "kept"
    _, verdict, reason = tried(other_order, exact=True)
    assert verdict == "refused"
    assert reason.endswith("only bit-identical results were requested")
    assert tried(lambda call, candidate: quick(candidate), exact=True)[1] == "kept"


class Sleepy(nn.Module):
    """A linear layer with two pauses, which changes may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.pauses = [0.002, 0.001]

    def forward(self, x: Tensor) -> Tensor:
        for pause in self.pauses:
            time.sleep(pause)
        return self.layer(x)  # type: ignore[no-any-return]


class WithoutPause(Rule):
    """Leave out one pause, and pass the result to `then`."""

    def __init__(self, name: str, place: int, then: Call) -> None:
        self.name, self.place, self.then = name, place, then

    def apply(self, candidate: Candidate) -> str:
        model, call = candidate.model, candidate.call
        assert isinstance(model, Sleepy)
        model.pauses = [pause for pause in model.pauses if pause != Sleepy().pauses[self.place]]
        candidate.call = lambda x: self.then(call(x))
        return "a pause"


@pytest.mark.parametrize("first", [False, True])
def test_what_turns_wrong_at_the_end_is_left_out_and_the_rest_stays(first: bool) -> None:
    ended = [False]

    def progress(what: str, fraction: float) -> None:
        ended[0] |= what == "the result"

    right = WithoutPause("right", 1 - first, lambda y: y)
    tires = WithoutPause("tires", int(first), lambda y: y + 1 if ended[0] else y * (1 + 2**-22))
    x, model = torch.randn(4, 8), Sleepy().eval()
    found = rooftop.optimize(model, x, rules=[right, tires], progress=progress)
    assert {change.rule: change.verdict for change in found.changes} == {"right": "kept", "tires": "refused"}
    assert "other values, after many calls: result 0 is off by" in found.changes[-1].reason + found.changes[0].reason
    assert found.after_ms < found.before_ms
    with torch.no_grad():
        assert torch.equal(found.module(x), found.undo()(x))


@pytest.mark.parametrize("wrong_once", [False, True])
def test_an_inexact_rule_is_not_blamed_for_a_wrong_one(wrong_once: bool) -> None:
    """The wrong rule is exact until the end. There, it is wrong for one draw, or from then on."""
    ended, seen = [False], list[Tensor]()

    def progress(what: str, fraction: float) -> None:
        ended[0] |= what == "the result"

    def turns_wrong(y: Tensor) -> Tensor:
        if not ended[0] or (wrong_once and not any(torch.equal(y, each) for each in seen)):
            return y
        return y + 1

    def last_draw(self: Gate, candidate: Candidate, draw: Draw) -> None:
        if ended[0]:
            with torch.no_grad():
                seen.append(self.original(*draw.given[0]))
        judge_on(self, candidate, draw)

    judge_on = Gate.judge_on
    inexact = WithoutPause("inexact", 0, lambda y: y * (1 + 2**-22))
    wrong = WithoutPause("wrong", 1, turns_wrong)
    x, model = torch.randn(4, 8), Sleepy().eval()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Gate, "judge_on", last_draw)
        found = rooftop.optimize(model, x, rules=[wrong, inexact], progress=progress)
    verdicts = {change.rule: change.verdict for change in found.changes}
    assert verdicts["wrong"] == "refused", verdicts
