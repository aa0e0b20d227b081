"""Compare doubtful results on more inputs. A result is doubtful if its error is larger than allowed, but not
hopeless (`is_hopeless`).

A gradient with a few elements is a small sample of errors. Among the gradients of a hundred layers, some have twice the
original's error by chance. Summed over more inputs, only the errors of a result that really is less accurate stay twice
as large as the original's.

The best further inputs are neighbours of the first input: each value differs from the first input's by a few roundings.
The results for neighbours have almost the same size as the first results, but different rounding errors. Without
floating-point inputs there are no neighbours, so other inputs of the same shapes are drawn, and errors are compared
relative to the size of the results.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterator, Mapping

import torch
from torch import Tensor

from rooftop.optimization.accuracy import Errors, InaccurateError
from rooftop.optimization.draws import Arguments, Draw, neighbour, same_kinds
from rooftop.optimization.outcomes import SEED, Known

MORE_DRAWS, MOST_DRAWS = 8, 24
"""Doubtful results are compared on `MORE_DRAWS` more inputs. While an error is too large, the comparison continues with
`MORE_DRAWS` inputs at a time, up to `MOST_DRAWS` in all."""
LEAST_DRAWS = 3
"""If time is short, doubtful results are compared on only this number of further inputs."""
HOPELESS, HOPELESS_OF_FEW, FEW = 8.0, 100.0, 16
"""A result with an error above this multiple of the allowed error is wrong, not doubtful. `HOPELESS_OF_FEW` applies to
results with at most `FEW` elements, because the original's error of a single element may be almost 0 by chance."""
LUCK_IN_HALF = 3.0
"""For half-precision inputs whose values are all equal, an error up to this multiple of the allowed error may be bad
luck."""
SAME_SIZE = 1.5
"""Two results have almost the same size if the ratio of their sizes is below this."""


def is_hopeless(error: InaccurateError) -> bool:
    """Whether a result's error is so far above the allowed error that it cannot be chance, so no more inputs are
    compared."""
    return error.share > (HOPELESS if error.count > FEW else HOPELESS_OF_FEW)


def may_be_luck(error: InaccurateError, dtype: torch.dtype) -> bool:
    """Whether bad luck alone may explain an error on inputs whose values are all equal.

    For such inputs, all elements of the result may have the same rounding error, which the original may avoid by luck.
    So the result is compared on inputs that resemble the user's given inputs instead (see `MoreInputs`).
    """
    return torch.finfo(dtype).bits >= 32 or error.share <= LUCK_IN_HALF


class Doubts:
    """Errors of doubtful results, summed over inputs. The first input is the input that all other inputs resemble.

    Args:
        errors: for each doubtful result, by name, the error that made it doubtful.
        in_tensor_floats: the original's error in TF32 on the first input; 0 if no operator may use TF32.
        usual: the original's largest error on the given inputs.
        truth: the float64 model's results on the first input.
        near: whether the other inputs are neighbours of the first input, so that results have almost the same size.

    Attributes:
        usual: the original's largest error on the given inputs (the argument `usual`) and on the inputs noted so far.
    """

    def __init__(
        self,
        errors: Mapping[str, InaccurateError],
        in_tensor_floats: Mapping[str, float],
        usual: Mapping[str, float],
        truth: Mapping[str, Tensor],
        near: bool,
    ) -> None:
        self._errors, self.usual, self._near = errors, dict(usual), near
        self._sizes = {name: size(truth[name]) for name in errors}
        self._in_tensor_floats = {name: in_tensor_floats[name] / self._sizes[name] for name in errors}
        self._found = {name: Errors() for name in errors}

    def note(
        self, got: Mapping[str, Tensor], eager: Mapping[str, Tensor], truth: Mapping[str, Tensor] | None, what: str
    ) -> None:
        """Add the errors on one input, relative to the size of each result.

        Args:
            got, eager, truth: results of the change, of the original, and of the float64 model. `truth` is None if the
                float64 model does not run.
            what: a description of the input.

        Raises:
            InaccurateError: the float64 model does not run, or a result is missing or has another shape than the
                original's. The error is the one that made the result doubtful.
            RefusedError: NaN or infinities differ; see `Errors.of`.
        """
        for name, error in self._errors.items():
            if truth is None or name not in got or got[name].shape != eager[name].shape:
                raise error
            errors = Errors.of(name, got[name], eager[name], truth[name], what)
            self.usual[name] = max(self.usual[name], errors.plain)
            self._found[name] += errors.relative_to(self._sizes[name] if self._near else size(truth[name]))

    def need_more(self, count: int, ends: float) -> bool:
        """Whether another input is needed.

        Args:
            count: number of inputs so far.
            ends: when the comparison should end, by `time.perf_counter`.
        """
        if time.perf_counter() > ends:
            return count < LEAST_DRAWS
        return count < MORE_DRAWS or (count < MOST_DRAWS and (count % MORE_DRAWS > 0 or self._worst()[0] > 1))

    def judge(self, what: str) -> float:
        """The largest error of the results over all inputs so far, as a multiple of the allowed error.

        Raises:
            InaccurateError: the largest error is above the allowed error.
        """
        share, name = self._worst()
        if not share <= 1:
            raise InaccurateError(what, name, self._found[name], self._in_tensor_floats[name], relative=True)
        return share

    def _worst(self) -> tuple[float, str]:
        return max((errors.share(self._in_tensor_floats[name]), name) for name, errors in self._found.items())


class MoreInputs:
    """The original's results for inputs that resemble those of a draw.

    Args:
        known_of: returns the original's results for a draw.
        more: returns a draw of other values for the arguments that it gets; None: other values cannot be drawn.
    """

    def __init__(self, known_of: Callable[[Draw], Known], more: Callable[[Arguments], Draw] | None) -> None:
        self._known_of, self._more = known_of, more

    def near(self, known: Known, doubtful: Collection[str]) -> Known | None:
        """The original's results for inputs that differ from a draw's inputs by a few roundings.

        None if these inputs do not serve for a comparison: the original or the float64 model does not run on them, or a
        doubtful result is missing, has another shape or is identical to the draw's; or the draw is special and a
        doubtful result has another size (root mean square).
        """
        other = self._neighbour(known.draw, 0)
        if other is None or other.truth is None or known.truth is None:
            return None
        ours, theirs = known.truth.values, other.truth.values
        pairs = [(ours[name], theirs[name]) for name in doubtful if name in ours and name in theirs]
        alike = all(one.shape == other.shape and not torch.equal(one, other) for one, other in pairs)
        same_sizes = not known.draw.special or all(have_one_size(*pair) for pair in pairs)
        return other if alike and same_sizes and len(pairs) == len(doubtful) else None

    def following(self, draw: Draw, near: Known | None) -> Iterator[Known | None]:
        """Yield the original's results for the neighbours of a draw, beginning with `near`. If `near` is None, yield
        them for inputs with other values. Yield None for inputs on which the original does not run.
        """
        if near is None:
            while True:
                yield self._with_other_values(draw)
        yield near
        for number in itertools.count(1):
            yield self._neighbour(draw, number)

    def _neighbour(self, draw: Draw, number: int) -> Known | None:
        generator = torch.Generator().manual_seed(SEED + number)
        try:
            return self._known_of(Draw("almost the same values", neighbour(draw.given, generator)))
        except Exception:  # the doubtful result is then refused
            return None

    def _with_other_values(self, draw: Draw) -> Known | None:
        try:
            found = self._known_of(self._more(draw.given)) if self._more is not None else None
        except Exception:  # the doubtful result is then refused
            return None
        return found if found is not None and same_kinds(found.draw, draw) else None


def have_one_size(one: Tensor, other: Tensor) -> bool:
    """Whether two results in float64 have almost the same size (root mean square)."""
    return 1 / SAME_SIZE < size(one) / size(other) < SAME_SIZE


def size(truth: Tensor) -> float:
    """The root mean square of the finite elements; 1 if no element is finite, or if all finite elements are 0."""
    finite = truth[truth.isfinite()].double()
    return float(finite.square().mean().sqrt()) or 1.0 if finite.numel() else 1.0
