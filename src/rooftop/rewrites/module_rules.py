"""Rules for modules: Rooftop's kernels for norms and similar modules, and cached constants."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from rooftop.kernels import layer_norm, rms_norm, softmax
from rooftop.nn import KINDS, replace
from rooftop.nn.constants import keep_constants
from rooftop.rewrites.candidates import Call, Candidate, Rule, Times, counted_kinds, only_on_gpu, some
from rooftop.rewrites.timed_alone import alone_ms, filled, launch_ms, with_backward

OPERATORS_OF_A_NORM = ("aten::pow", "aten::mean", "aten::rsqrt")
"""Three of the seven operators of an RMS norm that is written by hand. The other four, two products and two dtype
conversions, take about 1.5 times as long as these three."""
BY_HAND, CALLS = 2.5, 7
LAYER_NORM, SOFTMAX = "aten::native_layer_norm", "aten::_softmax"
OF_NORMS = ("layer_norm", "rms_norm", "vector_norm", "sqrt", "pow")
"""Parts of names of operators. Every layer norm and RMS norm calls an operator with one of these parts."""
Run = Callable[[], object]
OF_KERNELS = (*OF_NORMS, "softmax", "embedding", "nll_loss", "cross_entropy")


@dataclass(frozen=True)
class Norms:
    """Kernels of norms, to time them alone.

    Attributes:
        layer_norm: takes the arguments of `aten::native_layer_norm`.
        rms_norm: takes the input.
    """

    layer_norm: Callable[..., object]
    rms_norm: Callable[[Tensor], object]


class Kernels(Rule):
    """Compute norms, softmaxes, embeddings and losses by Rooftop's kernels (`rooftop.nn.replace`)."""

    name = "kernels"
    kind = "kernels"
    opaque = True
    trains = True

    def refusal(self, candidate: Candidate) -> str | None:
        return only_on_gpu(candidate)

    def absent(self, times: Times) -> str | None:
        return times.lack(*OF_KERNELS)

    def predicted_ms(self, times: Times) -> float:
        return gain_norms(times, OURS, share_of(times, SOFTMAX, _softmax) * times.of(SOFTMAX))

    def apply(self, candidate: Candidate) -> str:
        return counted_kinds(replace(candidate.model, only=KINDS).swapped.values())


def gain_norms(times: Times, by: Norms, more_ms: float = 0.0) -> float:
    """The time in ms that a step saves if one kernel computes each norm.

    Each layer norm is timed alone, with and without the kernel: its device time, and the host's time to launch it. In
    training, backward is timed with forward, because a kernel may be fast in one and slow in the other. For an RMS norm
    of several operators, the kernel is assumed to take half as long as the norm's first operator, which reads and
    writes float32. The norm's backward is assumed to gain the same share of device time as its forward.

    Args:
        by: the kernels that compute the norms.
        more_ms: additional device time that is saved.
    """
    saved_ms = more_ms + share_of(times, LAYER_NORM, by.layer_norm) * times.of(LAYER_NORM)
    host_ms = launches_ms(times, LAYER_NORM, by.layer_norm)
    by_hand = times.count("aten::rsqrt")
    if by_hand:
        saved_ms += BY_HAND * times.of(*OPERATORS_OF_A_NORM) - times.of("aten::pow") / 2
        every = sum(call.count for call in times.calls)
        squares = [call for call in times.calls if _is_square(call)]
        launch = launch_ms(partial(by.rms_norm, filled(squares[0])[0]), squares[0].device) if squares else 0.0
        host_ms += by_hand * ((times.host_ms or 0.0) * CALLS / every - launch)
    return times.gain_of(saved_ms, host_ms)


def _is_square(call: Call) -> bool:
    """Whether a call squares a floating-point tensor with at least one dimension, as an RMS norm does."""
    if "aten::pow" not in call.operator.name() or len(call.arguments) != 2:
        return False
    base, exponent = call.arguments
    if not isinstance(base, Tensor) or isinstance(exponent, Tensor):
        return False
    return base.is_floating_point() and base.dim() > 0 and exponent == 2


def share_of(times: Times, name: str, make: Callable[..., object]) -> float:
    """The share of the time of an operator's calls that a kernel saves. Each forward call is timed alone, with its
    backward if the step has one.

    Args:
        name: part of the operator's name.
        make: runs the kernel on the operator's arguments.
    """
    now_ms = after_ms = 0.0
    for call, now, after in _runs(times, name, make):
        now_ms += call.count * alone_ms(now, call.device)
        after_ms += call.count * alone_ms(after, call.device)
    return 1 - after_ms / now_ms if now_ms > 0 else 0.0


def launches_ms(times: Times, name: str, make: Callable[..., object]) -> float:
    """The time in ms that the host saves per step if it launches Rooftop's kernels instead of PyTorch's operators. The
    arguments are those of `share_of`.
    """
    runs = _runs(times, name, make)
    return sum(call.count * (launch_ms(now, call.device) - launch_ms(after, call.device)) for call, now, after in runs)


def _runs(times: Times, name: str, make: Callable[..., object]) -> Iterator[tuple[Call, Run, Run]]:
    """Yield for each forward call: the call, a function that runs its operator, and a function that runs the kernel of
    `make` instead. With backward in the step, both functions also run backward.
    """
    trains = times.count(f"{name}_backward") > 0
    for call in times.calls:
        if name in call.operator.name() and "backward" not in call.operator.name():
            given = filled(call)
            if trains:
                yield call, with_backward(call.operator, given), with_backward(make, given)
            else:
                yield call, partial(call.operator, *given), partial(make, *given)


def _layer_norm(x: Any, shape: Any, weight: Any, bias: Any, eps: float) -> object:
    return layer_norm(x, shape, weight, bias, eps)


def _rms_norm(x: Tensor) -> object:
    return rms_norm(x, x.shape[-1])


OURS = Norms(_layer_norm, _rms_norm)


def _softmax(x: Any, dim: int, to_float: bool) -> object:
    return softmax(x, dim)


class Constants(Rule):
    """Compute the results of methods only once if the results depend only on parameters and sizes
    (`rooftop.nn.constants`).
    """

    name = "constants"
    exact = True

    def apply(self, candidate: Candidate) -> str:
        kept = keep_constants(candidate.model)
        candidate.frozen |= bool(kept)
        return some(len(kept), "method") and f"{some(len(kept), 'method')} computed once"
