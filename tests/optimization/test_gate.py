"""How accurate results and gradients must be: each of them as accurate as the original's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import reduce
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from rooftop.optimization import tensor_floats
from rooftop.optimization.accuracy import Errors, RefusedError
from rooftop.optimization.draws import Draw, draws, neighbour, others
from rooftop.optimization.gate import Gate
from rooftop.optimization.outcomes import Known, Outcome, Step
from rooftop.rewrites.candidates import Candidate

ERROR = 1e-3


def outcome(errors: dict[str, float]) -> Outcome:
    """Values of 1 with these errors in units of `ERROR`, of both signs."""
    signs = torch.tensor([1.0, -1.0]).repeat(8)
    values: dict[str, Tensor] = {name: 1 + ERROR * size * signs for name, size in errors.items()}
    return Outcome(values, (), {}, frozenset(), ())


def judged(sizes: dict[str, float]) -> float:
    """The gate's answer to a change with these errors, if the original's errors are 1."""
    names = list(sizes)
    exact = outcome(dict.fromkeys(names, 0.0))
    exact = replace(exact, values={name: value.double() for name, value in exact.values.items()})
    given: Any = ((), {})
    known = Known(Draw("the given inputs", given), outcome(dict.fromkeys(names, 1.0)), exact)
    gate = Gate(nn.Identity(), Step(True), [known])
    return gate._compare(outcome(sizes), known, Candidate.of(nn.Identity(), None, training=True))


def gradients(*sizes: float) -> dict[str, float]:
    return {f"gradient of {i}": size for i, size in enumerate(sizes)}


def test_each_gradient_may_be_off_by_twice_the_original() -> None:
    assert judged(gradients(1.9, *[1.1] * 9)) == pytest.approx(0.95, abs=1e-3)
    with pytest.raises(RefusedError, match="gradient of 3 is off by"):
        judged(gradients(1.0, 1.0, 1.0, 2.1, *[1.0] * 9))


class Noisy(nn.Module):
    """A scale of each row, with an error of `size` that depends on the values as rounding errors do."""

    def __init__(self, size: float, seed: int) -> None:
        super().__init__()
        self.size, self.seed = size, seed
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        exact = (x * self.weight).sum(1)
        if x.dtype == torch.float64:
            return exact
        generator = torch.Generator().manual_seed(self.seed + int(x.double().sum() * 1e6))
        return exact + self.size * torch.randn(len(x), generator=generator)


def noisy(seed: int, size: float = ERROR, rows: int = 1, special: bool = False) -> tuple[Gate, Candidate]:
    """A gate for a few results with random errors of `ERROR`, and a change with errors of `size`."""
    generator = torch.Generator().manual_seed(seed)
    drawn = lambda like=None: Draw("other values", ((torch.rand(rows, 64, generator=generator),), {}))  # noqa: E731
    first = replace(drawn(), what="the given inputs")
    tried = [
        first,
        Draw("constant inputs", ((torch.full((rows, 64), 0.5 + seed / 1e3),), {}), special=True, uniform=True),
    ]
    gate = Gate.of(Noisy(ERROR, 0), Step(False), tried[: 1 + special], 60.0, more=drawn)
    return gate, Candidate.of(Noisy(size, 1000 + seed), None, training=False)


def verdicts(**options: Any) -> list[bool]:
    """Whether the change is right, for 20 seeds."""
    found = []
    for seed in range(20):
        gate, candidate = noisy(seed, **options)
        try:
            assert gate.judge(candidate) <= 1
            found.append(True)
        except RefusedError:
            found.append(False)
    return found


@pytest.mark.parametrize("special", [False, True])
def test_bad_luck_with_a_few_elements_is_told_from_a_larger_error(special: bool) -> None:
    """One element has twice another one's error in every third case, and sometimes a hundred times."""
    assert sum(verdicts(special=special)) >= 17
    assert sum(verdicts(special=special, size=5 * ERROR, rows=4)) <= 1


class Gained(nn.Module):
    """Blocks with gains, whose gradients have one element each. `split`: sums in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(8))
        self.gains = nn.ParameterList(torch.tensor(0.3) for _ in range(8))
        self.split = False

    def forward(self, x: Tensor) -> Tensor:
        for layer, gain in zip(self.layers, self.gains, strict=True):
            first, second = functional.layer_norm(x, (32,)).split(16, -1)
            if self.split:
                weights = layer.weight.split(16, 1)
                x = x + gain * (first @ weights[0].t() + functional.linear(second, weights[1], layer.bias)).tanh()
            else:
                x = x + gain * layer(torch.cat([first, second], -1)).tanh()
        return x


def test_sums_in_another_order_are_right_for_gradients_of_one_element() -> None:
    found = []
    for seed in range(4):
        torch.manual_seed(seed)
        model, x, target = Gained(), torch.randn(4, 12, 32), torch.randn(4, 12, 32)
        step = Step(True, lambda y, target=target: ((y - target) ** 2).mean())
        generator = torch.Generator().manual_seed(seed)
        tried = draws(((x,), {}), generator)
        gate = Gate.of(model, step, tried, 60.0, more=lambda like, own=generator: others(like, own))
        candidate = Candidate.of(model, None, training=True)
        candidate.model.split = True
        with suppress(RefusedError):
            found.append(gate.judge(candidate))
    assert len(found) >= 3
    assert max(found) > 0.9, "no case had bad luck"


@pytest.mark.parametrize("share", [0.2, 0.05])
def test_an_error_near_the_given_inputs_is_found_in_one_element(share: float) -> None:
    """The result may be almost 0 for other inputs. Relative to its size, the original's error is then large."""
    accepted, count = 0, 0
    for seed in range(15):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).bfloat16()
        x = torch.randn(1, 64).bfloat16()
        generator = torch.Generator().manual_seed(seed)
        gate = Gate.of(
            model, Step(False), draws(((x,), {}), generator), 60.0, more=lambda g, own=generator: others(g, own)
        )
        with torch.no_grad():
            right = model(x)
        if float(right.abs()) < 0.1:
            continue  # the original's rounding errors have this size
        count += 1

        def wrong(x: Tensor, model: nn.Module = model, right: Tensor = right) -> Tensor:
            y: Tensor = model(x)
            near = (y - right).abs() <= 0.05 * right.abs()
            return torch.where(near, y * (1 + share), y)

        with suppress(RefusedError):
            gate.judge(replace(Candidate.of(model, None, training=False), call=wrong))
            accepted += 1
    assert count > 7
    assert accepted <= (1 if share < 0.1 else 0)


@pytest.mark.parametrize(
    ("dtype", "times", "right"), [(torch.float32, 7, True), (torch.bfloat16, 2, True), (torch.bfloat16, 7, False)]
)
def test_luck_for_constant_inputs_is_limited(dtype: torch.dtype, times: float, right: bool) -> None:
    """For constant inputs the original is almost exact by luck, and a change is off by `times` the limit."""
    x = torch.linspace(-2, 900, 24 * 8).cos().view(8, 24).to(dtype)
    constant = Draw("constant inputs", ((torch.full_like(x, 1.25),), {}), special=True, uniform=True)
    original = nn.Linear(24, 24).to(dtype)
    generator = torch.Generator().manual_seed(0)
    given = Draw("the given inputs", ((x,), {}))
    gate = Gate.of(original, Step(False), [given, constant], 60.0, more=lambda like: others(like, generator))
    known = gate.known[1]
    assert known.truth is not None
    exact = known.truth.values["result 0"]
    limit = (
        2 * float((known.eager.values["result 0"].double() - exact).abs().max()) + torch.finfo(dtype).eps * exact.abs()
    )
    off = (exact + times * 0.9 * limit).to(dtype)

    def changed(x: Tensor) -> Tensor:
        return off if bool((x == 1.25).all()) else original(x)  # type: ignore[no-any-return]

    candidate = replace(Candidate.of(original, None, training=False), call=changed)
    if right:
        assert gate.judge(candidate) <= 1
    else:
        with pytest.raises(RefusedError, match="constant inputs"):
            gate.judge(candidate)


def test_errors_add_up() -> None:
    exact = torch.tensor([1.0, -2.0, 4.0], dtype=torch.float64)
    errors = Errors() + Errors.of("", exact.float(), exact.float(), exact, "")
    assert errors.share(0.0) == 0.0
    errors += Errors.of("", exact[:1].float() + 0.25, exact[:1].float() - 0.25, exact[:1], "")
    assert (errors.count, errors.worst, errors.largest, errors.plain) == (4, 0.25, 0.25, 0.25)
    assert 0.499 < errors.share(0.0) < 0.5
    assert errors.share(0.5) < 0.25
    assert Errors().share(0.0) == 0.0
    tiny = torch.full((4,), 1.3e-180, dtype=torch.float64)  # squares of its roundings are 0
    assert Errors.of("", tiny.nextafter(tiny + 1), tiny, tiny, "").share(0.0) <= 1
    empty = torch.full((2,), torch.nan)
    assert Errors.of("", empty, empty, empty.double(), "").count == 0


def test_without_more_inputs_bad_luck_counts() -> None:
    for seed in range(10):
        gate, candidate = noisy(seed)
        gate.more = None
        with suppress(RefusedError):
            gate.judge(candidate)
            continue
        return
    pytest.fail("no case had bad luck")


def test_a_change_that_is_far_off_needs_no_more_inputs() -> None:
    gate, candidate = noisy(0, size=1e6 * ERROR)
    gate.more = lambda like: pytest.fail("asks for more inputs")
    with pytest.raises(RefusedError, match="the given inputs: result 0 is off by"):
        gate.judge(candidate)


def test_results_may_be_off_by_twice_the_original() -> None:
    assert judged({"result 0": 1.9, **gradients(1.0)}) == pytest.approx(0.95, abs=1e-3)
    with pytest.raises(RefusedError, match="result 0 is off by"):
        judged({"result 0": 2.1, **gradients(1.0)})


class OrderOfSums(nn.Module):
    """A linear layer whose sum has another order in every fourth call, as with atomic additions; `swaps` says in which
    calls."""

    def __init__(self, swaps: Callable[[int], bool]) -> None:
        super().__init__()
        self.weight, self.swaps = nn.Parameter(torch.linspace(-1, 100, 33 * 5).sin().view(5, 33)), swaps
        self.calls = [0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        products = (x[:, None] * self.weight).unbind(-1)
        return reduce(torch.add, products[::-1] if self.swaps(self.calls[0]) else products)


@pytest.mark.parametrize("swaps", [False, True])
def test_a_change_may_differ_from_call_to_call_as_the_original_does(swaps: bool) -> None:
    original = OrderOfSums(lambda call: swaps and call % 4 == 0)
    given: Any = ((torch.linspace(-2, 300, 33 * 9).cos().view(9, 33),), {})
    gate = Gate.of(original, Step(False), [Draw("the given inputs", given)], 60.0)
    assert gate.repeats
    candidate = Candidate.of(original, None, training=False)
    candidate.model.swaps = lambda call: call % 2 == 0
    if not swaps:
        with pytest.raises(RefusedError, match="two calls with the same inputs give different results"):
            gate.judge(candidate)
        return
    assert gate.judge(candidate) <= 1
    assert not gate.repeats
    assert not gate.exact_only


class Unsure(nn.Module):
    """A linear layer that adds 0.5 in the calls that `adds` names, also in float64."""

    def __init__(self, adds: Callable[[int], bool]) -> None:
        super().__init__()
        self.weight, self.adds = nn.Parameter(torch.linspace(-1, 100, 33 * 5).sin().view(5, 33)), adds

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(x, self.weight)
        CALLS.append(len(CALLS))
        return y + 0.5 if self.adds(len(CALLS)) else y


CALLS: list[int] = []


@pytest.mark.parametrize("every", [2, 3, 5])
def test_a_model_that_differs_by_more_than_the_order_of_sums_allows_only_equal_bits(every: int) -> None:
    CALLS.clear()
    original = Unsure(lambda call: call > 20 and call % every == 0)
    given: Any = ((torch.linspace(-2, 300, 33 * 9).cos().view(9, 33),), {})
    gate = Gate.of(original, Step(False), [Draw("the given inputs", given)], 60.0)
    assert gate.repeats
    CALLS.extend([0] * 20)
    candidate = Candidate.of(OrderOfSums(lambda call: call % 2 == 0), None, training=False)
    with pytest.raises(RefusedError, match="differ from call to call, so only bit-identical results count"):
        gate.judge(candidate)
    assert gate.exact_only


class Normalized(nn.Module):
    """A layer norm of rows of 768 values."""

    def forward(self, x: Tensor) -> Tensor:
        return normalized(x, x.sum(1))


def normalized(x: Tensor, sums: Tensor) -> Tensor:
    apart = x - sums[:, None] / 768
    return apart * torch.rsqrt(apart.square().mean(1, keepdim=True) + 1e-5)


@pytest.mark.parametrize("wrong", [0.0, 0.01])
def test_constant_inputs_show_rounding_errors_magnified(wrong: float) -> None:
    """The variance is 0 but for rounding. Another order of sums is correct, and a wrong result is still refused."""
    x = torch.linspace(-2, 900, 768 * 4).cos().view(4, 768) + 1.7
    constant = Draw("constant inputs", ((torch.full_like(x, 2.3333),), {}), special=True)
    original = Normalized()
    gate = Gate.of(original, Step(False), [Draw("the given inputs", ((x,), {})), constant], 60.0)

    def changed(x: Tensor) -> Tensor:
        if float(x.std()) > 0:
            return original(x)  # type: ignore[no-any-return]
        return normalized(x, reduce(torch.add, x.view(-1, 96, 8).sum(2).unbind(1))) + wrong

    candidate = replace(Candidate.of(original, None, training=False), call=changed)
    (values,) = constant.given[0]
    assert float((changed(values) - original(values)).abs().max()) > 1e-4  # a thousand times a result's rounding
    if wrong:
        with pytest.raises(RefusedError, match="constant inputs: result 0 is off by"):
            gate.judge(candidate)
    else:
        assert gate.judge(candidate) <= 1
    assert list(gate.shifts) == ["constant inputs"]


class OwnDouble(nn.Linear):
    """A model with a method that has the name of one of PyTorch's."""

    def double(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return x * 2


class NoDoubles(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            raise TypeError("no doubles here")
        return super().forward(x)


def test_a_model_is_cast_by_pytorchs_own_method() -> None:
    step, given = Step(False), Draw("the given inputs", ((torch.randn(3, 4),), {}))
    gate = Gate.of(OwnDouble(4, 2), step, [given], 1.0, exact=False)
    assert not gate.exact_only
    assert gate.precise is not None
    gate = Gate.of(NoDoubles(4, 2), step, [given], 1.0, exact=False)
    assert "does not run in float64 (TypeError: no doubles here)" in gate.exact_only


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.conv(x).mean((2, 3)))  # type: ignore[no-any-return]


def without_last_bits(bits: int) -> Callable[[Candidate], None]:
    """Let the convolution drop the last bits of its operands, as tensor cores do."""

    def change(candidate: Candidate) -> None:
        conv: Any = candidate.model.conv

        def forward(x: Tensor) -> Tensor:
            x, weight = ((t.view(torch.int32) >> bits << bits).view(torch.float32) for t in (x, conv.weight.detach()))
            return functional.conv2d(x, weight, conv.bias)

        conv.forward = forward

    return change


@pytest.mark.parametrize("allowed", [False, True])
def test_a_convolution_may_use_tf32_if_pytorch_may(allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands keep only the bits of TF32, or only those of bfloat16."""
    precisions = {True: "tf32" if allowed else "fp32", False: "fp32"}
    monkeypatch.setattr(tensor_floats, "matrix_precision", lambda tensor, convolution: precisions[convolution])
    torch.manual_seed(0)
    original, step = Convolved().eval(), Step(False)
    given: Any = ((torch.randn(2, 3, 9, 9),), {})
    other: Any = ((torch.randn(2, 3, 9, 9),), {})
    gate = Gate.of(original, step, [Draw("the given inputs", given), Draw("other values", other)], 60.0)
    for bits, right in ((13, allowed), (16, False)):
        candidate = Candidate.of(original, None, training=False)
        without_last_bits(bits)(candidate)
        if right:
            assert 0.1 < gate.judge(candidate) <= 1
            gate.judge_on(candidate, Draw("other values", ((torch.randn(2, 3, 9, 9) * 9,), {})))
        else:
            with pytest.raises(RefusedError, match="the given inputs: result 0 is off by"):
                gate.judge(candidate)


def test_only_operands_lose_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_floats, "matrix_precision", lambda tensor, convolution: "tf32")
    x, w = torch.full((1, 1, 3), 1 + 2.0**-20, requires_grad=True), torch.full((1, 1, 1), 1 + 2.0**-20)
    with tensor_floats.InTensorFloats() as mode:
        assert torch.equal(x + 0.0, x)
        assert not mode.used
        y = functional.conv1d(x, w)
        y.backward(torch.full_like(y, 1 + 2.0**-20))
        square = torch.full((2, 2), 1 + 2.0**-20)
        assert torch.equal(torch.addmm(square, square, square), square + 2)
    assert mode.used
    assert torch.equal(y, torch.ones(1, 1, 3))
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(1, 1, 3)), "the backward pass, too"
    with tensor_floats.InTensorFloats() as mode:
        assert torch.equal(functional.conv1d(x.detach().double(), w.double())[0, 0, 0], w.double()[0, 0, 0] ** 2)
    assert not mode.used


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_neighbours_differ_by_a_few_roundings(dtype: torch.dtype) -> None:
    x = torch.linspace(-3, 900, 700).cos().to(dtype).view(7, 100)[:, ::2].requires_grad_()
    odd = torch.tensor([0.0, torch.inf, 1.0, torch.nan, 0.5, -torch.inf, torch.finfo(dtype).max]).to(dtype)
    named = {"zeros": torch.zeros(3), "empty": torch.empty(0, 4), "odd": odd, "nan": torch.tensor(torch.nan)}
    given: Any = ((x, torch.arange(5), 2.5), named)
    (other, numbers, scalar), named = neighbour(given, torch.Generator().manual_seed(0))
    apart = ((other.double() - x.double()) / x.double()).detach().abs() / torch.finfo(dtype).eps
    assert 3 < float(apart.max()) <= 5
    assert bool((apart > 0).double().mean() > 0.5)
    assert (other.requires_grad, other.is_leaf, other.dtype) == (True, True, dtype)
    assert numbers is given[0][1]
    assert scalar == 2.5
    assert float(other.detach().max()) <= float(x.detach().max())
    assert torch.equal(named["zeros"], torch.zeros(3))
    assert torch.equal(named["odd"].isfinite(), odd.isfinite())
    assert torch.equal(named["odd"].isnan(), odd.isnan())
    assert named["nan"].isnan()
    assert named["empty"].shape == (0, 4)
