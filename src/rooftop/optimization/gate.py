"""Decide whether a change of a model is correct: on the given inputs, on similar inputs, and in its side effects.

A change is correct if its results are as accurate as the original's, measured against the model in float64
(`rooftop.testing.assert_as_accurate`). A change must not alter anything else: shapes, dtypes, strides, gradients,
buffers, changed arguments, shared memory. If the float64 model does not run, only bit-identical results are correct.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from rooftop.optimization.accuracy import InaccurateError, RefusedError, as_accurate
from rooftop.optimization.doubts import Doubts, MoreInputs, is_hopeless, may_be_luck
from rooftop.optimization.draws import Arguments, Draw, same_kinds, tensors_of
from rooftop.optimization.outcomes import (
    SEED,
    Known,
    Outcome,
    Step,
    anew,
    copied,
    outcome_of,
    overlaps,
    poison,
    preserved,
    same_each,
    seed_all,
)
from rooftop.optimization.tensor_floats import InTensorFloats
from rooftop.rewrites.candidates import Candidate
from rooftop.rewrites.structures import mapped
from rooftop.words import in_a_line

ROUNDED_64 = 1e-9
"""Allowed difference between float64 sums that are computed in different orders, relative to the largest value."""
MORE_CALLS = 6
"""Number of calls of the original that must agree before a change whose own calls differ is refused."""
SHIFT = 16.0
"""Relative change, in roundings, of float32 inputs with special values. The difference that this change causes in a
float64 result is allowed as an error, because some results are sensitive to rounding. For example, a layer norm of
constant inputs divides the rounding error of a mean by almost 0, and the original's rounding error may be 0 by luck."""
SAME_DRAWS = 0.03
"""Two models have drawn the same random numbers if their results differ by at most this share. Rounding to half
precision causes a much smaller difference, and another dropout mask a much larger one."""


def check_taken(original: nn.Module, step: Step, drawn: Sequence[Draw]) -> None:
    """Run the original on the given inputs, and on the draws that it must accept (`Draw.needed`), so that errors are
    raised before the search.

    Args:
        drawn: the inputs of all draws; the given inputs come first.

    Raises:
        ValueError: the model refuses a draw that it must accept, or a training step has no gradients.
        Exception: any error that the model raises on the given inputs.
    """
    given = outcome_of(step, original, original, drawn[0].given)
    if step.training and not any(name.startswith("gradient of") for name in given.values):
        raise ValueError("optimize: no result has a gradient, so nothing is trained: leave train=True out")
    for draw in drawn[1:]:
        if draw.needed:
            try:
                outcome_of(step, original, original, draw.given)
            except Exception as error:
                raise ValueError(f"optimize: the model does not take {draw.needed} ({in_a_line(error)})") from error


@dataclass
class Gate:
    """The original's behaviour, with which every change is compared.

    Attributes:
        original: the model; its buffers are restored after each run.
        step: how the model is run.
        known: the original's results for each draw.
        dropped: draws that the original refuses or that there was no time for, with the reason.
        random: whether the original's results depend on the random state.
        repeats: whether the original returns identical bits in each call.
        exact_only: the reason why only bit-identical results are correct; "" if other results can be correct.
        precise: the original in float64; None if that does not run, or is not needed.
        first_truth: the float64 outcome on the given inputs.
        shifts: for each draw, the float64 outcome on inputs changed by `SHIFT`; only for draws where this was needed.
        in_tensor_floats: for each draw, the original's outcome in TF32; only for draws where this was needed.
        usual: the original's errors on the given inputs, by the result's name; only those that were needed.
        lowered: the original in a lower precision, which the user has allowed. A change must be as accurate as this
            model.
        more: draws inputs that resemble given arguments, to compare doubtful results on them. None: doubtful results
            count as wrong.
        more_s: approximate seconds for comparing doubtful results on more inputs.
        ends: the time by `time.perf_counter` at which the comparison on more inputs must end.
    """

    original: nn.Module
    step: Step
    known: list[Known] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    random: bool = False
    repeats: bool = True
    exact_only: str = ""
    precise: nn.Module | None = None
    first_truth: Outcome | None = None
    shifts: dict[str, Outcome | None] = field(default_factory=dict)
    in_tensor_floats: dict[str, tuple[Draw, Outcome | None]] = field(default_factory=dict)
    usual: dict[str, float] = field(default_factory=dict)
    lowered: Candidate | None = None
    more: Callable[[Arguments], Draw] | None = None
    more_s: float = 0.0
    ends: float = math.inf

    @classmethod
    def of(
        cls,
        original: nn.Module,
        step: Step,
        drawn: Sequence[Draw],
        seconds: float,
        exact: bool = False,
        more: Callable[[Arguments], Draw] | None = None,
    ) -> Gate:
        """Run the original on each draw, in its own dtype and in float64.

        Args:
            drawn: the given inputs come first.
            seconds: approximate time limit, after which draws with special values are skipped. Each comparison of
                doubtful results on more inputs has the same limit.
            exact: whether only bit-identical results are correct.
            more: see the class.
        """
        gate = cls(original, step, more=more, more_s=seconds)
        gate.exact_only = "only bit-identical results were requested" if exact else ""
        gate.precise = None if exact else gate._in_float64(drawn[0])
        ends = time.perf_counter() + seconds
        for draw in drawn:
            truth = gate.first_truth if draw is drawn[0] else None
            if draw.special and time.perf_counter() > ends:
                gate.dropped[draw.what] = "no time was left"
                continue
            try:
                gate.known.append(gate._known(draw, truth))
            except Exception as error:
                if draw is drawn[0] or draw.needed:
                    raise
                gate.dropped[draw.what] = f"the model does not take them ({in_a_line(error)})"
        gate._look_at_repeats()
        return gate

    def _known(self, draw: Draw, truth: Outcome | None = None) -> Known:
        """The original's results for a draw, or for the first of its replacements (`Draw.otherwise`) that runs.

        Args:
            truth: the outcome in float64, if it is known.

        Raises:
            Exception: the model's error on the draw's last replacement, or on the draw itself if it has none.
        """
        try:
            eager = self._eager(self.lowered, draw.given)
        except Exception:
            if not draw.otherwise:
                raise
            first, *rest = draw.otherwise
            return self._known(replace(draw, given=first, otherwise=tuple(rest)))
        try:
            truth = truth or self._truth(draw)
        except Exception:  # for example out of memory: this draw then requires identical bits
            truth = None
        return Known(draw, eager, truth)

    def _truth(self, draw: Draw) -> Outcome | None:
        precise = self.precise
        return None if precise is None else outcome_of(self.step, precise, precise, doubled(draw.given))

    def _in_float64(self, given: Draw) -> nn.Module | None:
        try:
            model = nn.Module.double(copy.deepcopy(self.original))  # a model may have its own `double`
            self.first_truth = outcome_of(self.step, model, model, doubled(given.given))
        except Exception as error:
            self.exact_only = (
                f"the model does not run in float64 ({in_a_line(error)}), so only bit-identical results count"
            )
            return None
        return model

    def _look_at_repeats(self) -> None:
        first = self.known[0]
        again = outcome_of(self.step, self.original, self.original, first.draw.given)
        other = outcome_of(self.step, self.original, self.original, first.draw.given, SEED + 1)
        self.repeats = _same_bits(first.eager, again)
        self.random = self.repeats and not _same_bits(first.eager, other)
        if self.random and not self.exact_only and not all(map(_same_draws, self.known)):
            self.exact_only = "the model draws other random numbers in float64, so only bit-identical results count"
        self._check_sums(1)

    def _repeats_again(self) -> bool:
        """Check with `MORE_CALLS` calls whether the original repeats its results. The order of atomic additions may
        differ in only some calls, so two calls may have agreed by luck.
        """
        given = self.known[0].draw.given
        first, *others = (outcome_of(self.step, self.original, self.original, given) for _ in range(MORE_CALLS))
        self.repeats = all(_same_bits(first, other) for other in others)
        self._check_sums(MORE_CALLS)
        return self.repeats

    def _check_sums(self, calls: int) -> None:
        """If the original does not repeat its results, check in float64 that only the order of sums differs."""
        if not self.repeats and not self.exact_only and not all(self._repeats_in_float64() for _ in range(calls)):
            self.exact_only = "the model's results differ from call to call, so only bit-identical results count"

    def _repeats_in_float64(self) -> bool:
        """Whether two calls of the original in float64 agree up to the order of sums. They do if the original draws no
        random numbers.
        """
        first = self.known[0]
        again = self._truth(first.draw)
        if first.truth is None or again is None or first.truth.values.keys() != again.values.keys():
            return False
        return all(
            value.shape == again.values[name].shape
            and _difference(value, again.values[name]) <= ROUNDED_64 * (1 + float(value.abs().max()))
            for name, value in first.truth.values.items()
            if value.is_floating_point() and value.numel()
        )

    def lower(self, lowered: Candidate) -> Gate:
        """A gate for candidates that run in the same lower precision as the candidate `lowered`."""
        known = [replace(each, eager=self._eager(lowered, each.draw.given)) for each in self.known]
        return replace(self, known=known, usual={}, lowered=lowered)

    def _eager(self, lowered: Candidate | None, given: Arguments) -> Outcome:
        if lowered is None:
            return outcome_of(self.step, self.original, self.original, given)
        return outcome_of(self.step, lowered.call, _Renamed(lowered.model, self.original), given)

    def judge(self, candidate: Candidate) -> float:
        """Compare a change with the original's behaviour.

        Returns:
            The largest error, as a fraction of the allowed error, at most 1.

        Raises:
            RefusedError: the change is not correct.
            Exception: any error that the changed model raises.
        """
        worst, model = 0.0, _Renamed(candidate.model, self.original)
        before: tuple[Known, Outcome] | None = None
        for known in self.known:
            poison(known.eager)
            got = outcome_of(self.step, candidate.call, model, known.draw.given)
            worst = max(worst, self._compare(got, known, candidate))
            if before is not None:
                _unchanged(*before)
            before = known, got
        first = self.known[0]
        again = outcome_of(self.step, candidate.call, model, first.draw.given)
        other = outcome_of(self.step, candidate.call, model, first.draw.given)
        if self.repeats and not _same_bits(again, other):
            if self._repeats_again():
                raise RefusedError("two calls with the same inputs give different results")
            if self.exact_only:  # `_repeats_again` may have set `exact_only` after the comparisons above
                raise RefusedError(f"two calls with the same inputs give different results, and {self.exact_only}")
        self._compare(again, first, candidate, "the given inputs again")
        self._in_the_same_memory(candidate, model)
        return worst

    def judge_on(self, candidate: Candidate, draw: Draw) -> None:
        """Check a proven change on one more draw, after the many runs that timed it.

        Raises:
            RefusedError: the change is no longer correct.
        """
        known = self._known(draw)
        self._compare(self._changed(candidate, known.draw), known, candidate)

    def _changed(self, candidate: Candidate, draw: Draw) -> Outcome:
        return outcome_of(self.step, candidate.call, _Renamed(candidate.model, self.original), draw.given)

    def _in_the_same_memory(self, candidate: Candidate, model: nn.Module) -> None:
        """Run the candidate on new values at the same addresses, to detect results cached by address."""
        first, others = self.known[0], [k for k in self.known[1:] if not k.draw.special and _alike(self.known[0], k)]
        if not others:
            return
        places = mapped(copied(first.draw.given), _apart)
        own = tensors_of(places)
        with preserved(model):
            seed_all(SEED, model)
            self.step.run(candidate.call, model, anew(places))
            with torch.no_grad():
                pairs = zip(own, tensors_of(others[0].draw.given), strict=True)
                for place, value in pairs:
                    if place.layout == torch.strided:  # tensors of other layouts keep their values
                        place.detach().copy_(value)
        with preserved(model):
            seed_all(SEED, model)
            output, _ = self.step.run(candidate.call, model, anew(places))
        values = {}
        for i, result in enumerate(tensors_of(output)):
            values[f"result {i}"] = result.detach() if result.layout == torch.strided else result.detach().to_dense()
        self._compare_values(values, others[0], candidate, "inputs in the same memory")

    def _compare(self, got: Outcome, known: Known, candidate: Candidate, what: str = "") -> float:
        """Compare all parts of an outcome with the original's. Return the error as a fraction of the allowed error."""
        what = what or known.draw.what
        eager = known.eager
        missing, more = sorted(eager.values.keys() - got.values.keys()), sorted(got.values.keys() - eager.values.keys())
        if missing or more:
            raise RefusedError(
                f"{what}: the change has no {missing[0]}"
                if missing
                else f"{what}: the change also has {more[0]}, which the original does not have"
            )
        if got.shared != eager.shared:
            one, other = sorted(got.shared ^ eager.shared)[0]
            how = "do not share memory, but the original's do"
            if got.shared - eager.shared:
                how = "share memory, but the original's do not"
            raise RefusedError(f"{what}: {one} and {other} {how}")
        if got.strides != eager.strides:
            name = next(n for n, s in eager.strides.items() if got.strides.get(n) != s)
            raise RefusedError(
                f"{what}: {name} has strides {got.strides.get(name)}, the original's {eager.strides[name]}"
            )
        if got.structure != eager.structure:
            raise RefusedError(
                f"{what}: the results, or the arguments after the call, differ from the original's in a value that is "
                "not a tensor, or in a tensor's layout or class"
            )
        return self._compare_values({name: got.values[name] for name in eager.values}, known, candidate, what)

    def _compare_values(self, got: Mapping[str, Tensor], known: Known, candidate: Candidate, what: str) -> float:
        """The largest error of the results, as a fraction of the allowed error. Results whose error is somewhat larger
        than allowed are doubtful, and are compared on more inputs.
        """
        worst, doubtful = 0.0, {}
        same = same_each([(value, known.eager.values[name]) for name, value in got.items()])
        for name, value in (pair for pair, equal in zip(got.items(), same, strict=True) if not equal):
            try:
                worst = max(worst, self._compare_one_of(known, name, value, what))
            except InaccurateError as error:
                if is_hopeless(error):
                    raise
                doubtful[name] = error
        return max(worst, self._on_more_draws(got, known, candidate, doubtful, what)) if doubtful else worst

    def _on_more_draws(
        self,
        got: Mapping[str, Tensor],
        known: Known,
        candidate: Candidate,
        doubtful: Mapping[str, InaccurateError],
        what: str,
    ) -> float:
        """The largest error of doubtful results over more inputs (see `doubts.py`), as a multiple of the allowed error.

        Raises:
            InaccurateError: a result's error is larger than allowed over all these inputs together.
        """
        first, base, near = next(iter(doubtful.values())), known, None
        lucky = known.draw.uniform and all(may_be_luck(error, got[name].dtype) for name, error in doubtful.items())
        inputs = MoreInputs(self._known, self.more)
        if not lucky:
            near = inputs.near(known, doubtful)
        if lucky or (known.draw.special and near is None):
            base = self.known[0]
            near = inputs.near(base, doubtful)
        if known.truth is None or base.truth is None or self.more is None or doubtful.keys() - base.truth.values.keys():
            raise first
        in_tensor_floats = {name: self._error_in_tensor_floats(base, name) for name in doubtful}
        usual = {name: self._usual_error(name) for name in doubtful}
        doubts = Doubts(doubtful, in_tensor_floats, usual, base.truth.values, near is not None)
        if base is known:
            doubts.note(got, known.eager.values, known.truth.values, known.draw.what)
        following, count = inputs.following(base.draw, near), 0
        ends = min(time.perf_counter() + self.more_s, self.ends)
        while doubts.need_more(count, ends):
            other = next(following)
            if other is None:
                raise first
            truth = None if other.truth is None else other.truth.values
            doubts.note(self._changed(candidate, other.draw).values, other.eager.values, truth, other.draw.what)
            count += 1
        worst = doubts.judge(f"{what} and {count} {'others' if near is None else 'inputs of almost the same values'}")
        for name in () if lucky or base is known else doubtful:
            eager, truths = known.eager.values[name], known.truth.values
            worst = max(worst, as_accurate(name, got[name], eager, truths[name], what, doubts.usual[name]))
        return worst

    def _compare_one_of(self, known: Known, name: str, got: Tensor, what: str) -> float:
        eager, truth = known.eager.values[name], None if known.truth is None else known.truth.values.get(name)
        try:
            return self._compare_one(name, got, eager, truth, what)
        except RefusedError:
            if truth is None or self.exact_only:
                raise
            allowed = max(self._sensitivity(known, name), self._error_in_tensor_floats(known, name))
            if not allowed:
                raise
            return as_accurate(name, got, eager, truth, what, max(allowed, self._usual_error(name)))

    def _error_in_tensor_floats(self, known: Known, name: str) -> float:
        """The original's error with TF32 in all convolutions and matrix products for which PyTorch's settings allow
        TF32. The result is 0 if TF32 is allowed for none of them.
        """
        if known.truth is None or self.lowered is not None or known.eager.values[name].dtype != torch.float32:
            return 0.0
        draw, found = self.in_tensor_floats.get(known.draw.what, (None, None))
        if draw is not known.draw:
            try:
                with InTensorFloats() as mode:
                    found = outcome_of(self.step, self.original, self.original, known.draw.given)
                found = found if mode.used else None
            except Exception:
                found = None
            self.in_tensor_floats[known.draw.what] = known.draw, found
        return _error(found, known.truth, name)

    def _sensitivity(self, known: Known, name: str) -> float:
        """The largest absolute change of a float64 result if the float32 inputs of a special draw (`Draw.special`)
        change by up to `SHIFT` roundings.

        Returns 0 for draws that are not special, for results that are not float32, and if the float64 result is
        unknown. Results in half precision need no such allowance, because kernels sum in float32.
        """
        if not known.draw.special or known.truth is None or known.eager.values[name].dtype != torch.float32:
            return 0.0
        what = known.draw.what
        if what not in self.shifts:
            try:
                self.shifts[what] = self._truth(replace(known.draw, given=mapped(known.draw.given, _shifted)))
            except Exception:
                self.shifts[what] = None
        return _error(self.shifts[what], known.truth, name)

    def _compare_one(self, name: str, got: Tensor, eager: Tensor, truth: Tensor | None, what: str) -> float:
        if got.shape != eager.shape or got.dtype != eager.dtype or got.device != eager.device:
            raise RefusedError(f"{what}: {name} is {_kind(got)}, the original's {_kind(eager)}")
        if truth is None or not got.is_floating_point() or self.exact_only:
            why = f": {self.exact_only}" if self.exact_only else ""
            raise RefusedError(
                f"{what}: {name} differs from the original's by up to {_difference(got, eager):.3g}{why}"
            )
        return as_accurate(name, got, eager, truth, what, self._usual_error(name))

    def _usual_error(self, name: str) -> float:
        """The original's largest error in the result `name` on the user's own inputs. Drawn inputs are not used: on
        constant inputs the original may be exact by luck.
        """
        if name not in self.usual:
            self.usual[name] = _error(self.known[0].eager, self.known[0].truth, name)
        return self.usual[name]


def doubled(given: Arguments) -> Arguments:
    """The arguments with floating-point tensors in float64."""

    def double(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        return tensor.detach().double().requires_grad_(tensor.requires_grad)

    return mapped(given, double)  # type: ignore[no-any-return]


def _shifted(tensor: Tensor) -> Tensor:
    """A float32 tensor in float64, with each value changed at random by at most `SHIFT` roundings (float32's eps)."""
    if tensor.dtype != torch.float32 or tensor.layout != torch.strided:
        return tensor
    generator = torch.Generator(tensor.device).manual_seed(SEED)
    share = torch.rand(tensor.shape, generator=generator, dtype=torch.float64, device=tensor.device) * 2 - 1
    changed = tensor.detach().double() * (1 + SHIFT * torch.finfo(torch.float32).eps * share)
    return changed.requires_grad_(tensor.requires_grad)


class _Renamed(nn.Module):
    """A changed model whose parameters have the original's names. Parameters that the changed model lacks, and all
    buffers, are the original's.
    """

    def __init__(self, changed: nn.Module, original: nn.Module) -> None:
        super().__init__()
        self._changed, self._original = [changed], [original]

    def named_parameters(self, *_: Any, **__: Any) -> Any:
        own = dict(self._changed[0].named_parameters())
        return ((name, own.get(name, p)) for name, p in self._original[0].named_parameters())

    def named_buffers(self, *_: Any, **__: Any) -> Any:
        return self._original[0].named_buffers()


def _apart(tensor: Tensor) -> Tensor:
    """A tensor that can be written: a copy if several elements share an address, as in an expanded tensor, otherwise
    the tensor itself.
    """
    return tensor.detach().clone().requires_grad_(tensor.requires_grad) if overlaps(tensor) else tensor


def _unchanged(known: Known, before: Outcome) -> None:
    """Raise RefusedError if a second call has overwritten the results of the first, which the caller owns. `before` is
    the outcome of the first call.
    """
    strided = {i: result.detach() for i, result in enumerate(before.results) if result.layout == torch.strided}
    same = same_each([(result, before.values[f"result {i}"]) for i, result in strided.items()])
    for i, equal in zip(strided, same, strict=True):
        if not equal:
            raise RefusedError(f"{known.draw.what}: result {i} was changed by the next call")


def _same_draws(known: Known) -> bool:
    """Whether the original and its float64 copy drew the same random numbers, for example in dropout. If they did not,
    their results are far apart.
    """
    if known.truth is None or known.draw.special:
        return True  # for large or constant inputs, the distance of the results says nothing about random numbers
    for name, value in known.eager.values.items():
        truth = known.truth.values.get(name)
        if truth is None or truth.shape != value.shape:
            return False
        if name.startswith("result") and value.is_floating_point() and value.numel():
            apart, size = _rms(value.double() - truth.double()), _rms(truth.double())
            if not bool(apart <= SAME_DRAWS * size):
                return False
    return True


def _alike(one: Known, other: Known) -> bool:
    return same_kinds(one.draw, other.draw) and other.draw.what == "other values"


def _same_bits(one: Outcome, other: Outcome) -> bool:
    return (
        one.structure == other.structure
        and one.values.keys() == other.values.keys()
        and all(same_each([(value, other.values[name]) for name, value in one.values.items()]))
    )


def _difference(one: Tensor, other: Tensor, finite: bool = False) -> float:
    """The largest difference between two tensors' elements. `finite`: ignore NaN and infinities."""
    if one.numel() == 0:
        return 0.0
    apart = (one.double() - other.to(one.device).double()).abs()
    return float(apart.nan_to_num(0.0, 0.0).max() if finite else apart.nan_to_num(torch.inf).max())


def _error(outcome: Outcome | None, truth: Outcome | None, name: str) -> float:
    """The largest difference of a result from the float64 model's, without NaN and infinities; 0 if one of the outcomes
    lacks the result, or has it in another shape.
    """
    got = None if outcome is None else outcome.values.get(name)
    exact = None if truth is None else truth.values.get(name)
    return 0.0 if got is None or exact is None or got.shape != exact.shape else _difference(got, exact, finite=True)


def _rms(values: Tensor) -> Tensor:
    return values.square().mean().sqrt()


def _kind(tensor: Tensor) -> str:
    return (
        f"{'x'.join(map(str, tensor.shape)) or 'scalar'} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
    )
