"""The error of a changed model's results, relative to the error that is allowed.

A result may have at most twice the original's error, measured against float64, plus one rounding of the float64 result
(`rooftop.testing.assert_as_accurate`). The limit applies both to the worst element's error and to the root mean square
of all errors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

ALLOWED = 2.0
"""The allowed error of a change, as a multiple of the original's error, as in `rooftop.testing`."""


class RefusedError(Exception):
    """A change is not correct, or a rule cannot be applied; the message is the reason. The search catches this."""


class InaccurateError(RefusedError):
    """Raised for a result with a larger error than allowed.

    Attributes:
        share: the error as a multiple of the allowed error; above 1.
        count: number of finite elements of the result.
    """

    def __init__(self, what: str, name: str, errors: Errors, usual: float, relative: bool = False) -> None:
        super().__init__(f"{what}: {name} is {errors}{', relative to its size' if relative else ''}")
        self.share, self.count = errors.share(usual), errors.count


@dataclass(frozen=True)
class Errors:
    """Errors of one result, computed by a change and by the original, on one or more inputs.

    Attributes:
        count: number of finite elements.
        worst, rounding: the change's error at one element, and the size of one rounding of the true value there. It is
            the element where the error exceeds the rounding most.
        largest, plain: the largest error of the change, and of the original.
        squares, plain_squares, rounding_squares: sums of the squared errors of the change, of the original, and of one
            rounding.
    """

    count: int = 0
    worst: float = 0.0
    rounding: float = 0.0
    largest: float = 0.0
    plain: float = 0.0
    squares: float = 0.0
    plain_squares: float = 0.0
    rounding_squares: float = 0.0

    @classmethod
    def of(cls, name: str, got: Tensor, eager: Tensor, truth: Tensor, what: str) -> Errors:
        """Measure the errors of one result, computed by a change and by the original.

        Args:
            got, eager: results of the change and of the original.
            truth: the float64 model's result.

        Raises:
            RefusedError: the change's result has a NaN or an infinity where the original's result has none, or lacks
                one that both the original's and the float64 model's result have.
        """
        kind = torch.finfo(got.dtype)
        got, eager, truth = got.double(), eager.double(), truth.to(got.device).double()
        finite = got.isfinite() & eager.isfinite() & truth.isfinite()
        if not bool(finite.all()):
            _check_specials(name, got, eager, truth, what)
            got, eager, truth = got[finite], eager[finite], truth[finite]
        if got.numel() == 0:
            return cls()
        rounding = kind.eps * truth.abs() + kind.tiny
        error, plain = (got - truth).abs(), (eager - truth).abs()
        worst = (error - rounding).argmax()  # used by `take`, because an index in brackets would wait for the GPU
        sums = (each.square().sum() for each in (error, plain, rounding))
        found = torch.stack([error.take(worst), rounding.take(worst), error.max(), plain.max(), *sums])
        return cls(got.numel(), *found.tolist())

    def relative_to(self, size: float) -> Errors:
        """The errors divided by `size`, for example by the root mean square of a result."""
        return Errors(
            self.count,
            *(each / size for each in (self.worst, self.rounding, self.largest, self.plain)),
            *(each / size / size for each in (self.squares, self.plain_squares, self.rounding_squares)),
        )

    def __add__(self, other: Errors) -> Errors:
        """The errors of one result on two sets of inputs together: the sums of squares are added, and the larger of the
        largest errors is taken.
        """
        if not self.count:
            return other
        worst = max(self, other, key=lambda each: each.worst - each.rounding)
        return Errors(
            self.count + other.count,
            worst.worst,
            worst.rounding,
            max(self.largest, other.largest),
            max(self.plain, other.plain),
            self.squares + other.squares,
            self.plain_squares + other.plain_squares,
            self.rounding_squares + other.rounding_squares,
        )

    def share(self, usual: float) -> float:
        """The error as a multiple of the allowed error.

        Args:
            usual: counts as the original's error if the original's error is smaller.
        """
        if not self.count:
            return 0.0
        rms, plain, rounding = self._means()
        of_worst = _ratio(self.worst, ALLOWED * max(self.plain, usual) + self.rounding)
        return max(of_worst, _ratio(rms, ALLOWED * max(plain, usual) + rounding))

    def _means(self) -> tuple[float, float, float]:
        """Root mean squares of three errors against the float64 model: the changed module's, the original's, and the
        error of rounding the float64 result once to the result's dtype.
        """
        rms, plain, rounding = (
            math.sqrt(each / self.count) for each in (self.squares, self.plain_squares, self.rounding_squares)
        )
        return rms, plain, rounding

    def __str__(self) -> str:
        rms, plain, _ = self._means()
        return (
            f"off by up to {self.largest:.3g}, the original by {self.plain:.3g} "
            f"(root mean square {rms:.3g} and {plain:.3g})"
        )


def _check_specials(name: str, got: Tensor, eager: Tensor, truth: Tensor, what: str) -> None:
    """Raise RefusedError if NaNs or infinities differ; see `Errors.of`."""
    for special, test in (("NaN", torch.isnan), ("infinite", torch.isinf)):
        mine, expected, exact = test(got), test(eager), test(truth)
        if bool((mine & ~expected).any()):
            raise RefusedError(f"{what}: {name} has {int((mine & ~expected).sum())} {special} elements too many")
        if bool((~mine & expected & exact).any()):
            raise RefusedError(f"{what}: {name} lacks {int((~mine & expected & exact).sum())} {special} elements")


def as_accurate(name: str, got: Tensor, eager: Tensor, truth: Tensor, what: str, usual: float) -> float:
    """The error of a result as a multiple of the allowed error, at most 1.

    Args:
        got, eager: results of the change and of the original.
        truth: the float64 model's result.
        usual: counts as the original's error if the original's error is smaller. `gate.py` passes the original's
            largest error on the user's inputs. If the result is then too inaccurate, `gate.py` calls this again with
            the largest of three: the same `usual`, the original's error in TF32, and the change of the float64 result
            if the inputs of a special draw change by a few roundings (`SHIFT`). If the result is still too inaccurate,
            but not hopeless, it is compared on more inputs (`doubts.py`), and `usual` then also covers the original's
            errors on these.

    Raises:
        InaccurateError: the error is larger than allowed.
        RefusedError: NaN or infinities differ; see `Errors.of`.
    """
    errors = Errors.of(name, got, eager, truth, what)
    share = errors.share(usual)
    if not share <= 1:
        raise InaccurateError(what, name, errors, usual)
    return share


def _ratio(error: float, allowed: float) -> float:
    """The error divided by the allowed error. The allowed root mean square may be 0, because squares of tiny float64
    numbers underflow. In that case this returns 0, so that the largest error of an element decides.
    """
    return error / allowed if allowed else 0.0
