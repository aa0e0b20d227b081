"""Rules for modules: Rooftop's kernels for norms and similar modules, and cached constants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rooftop.kernels import layer_norm, rms_norm, softmax
from rooftop.nn import KINDS, replace
from rooftop.nn.constants import keep_constants
from rooftop.rewrites.candidates import Call, Candidate, Rule, Times, names_of, only_on_gpu, some
from rooftop.rewrites.timed_alone import alone_ms, filled, launch_ms, repeated

OPERATORS_OF_A_NORM = ("aten::pow", "aten::mean", "aten::rsqrt")
"""Three of the seven operators of an RMS norm that is written by hand. The other four, two products and two dtype
conversions, take about 1.5 times as long as these three."""
BY_HAND, CALLS = 2.5, 7
LAYER_NORM, SOFTMAX = "aten::native_layer_norm", "aten::_softmax"
OF_NORMS = ("layer_norm", "rms_norm", "vector_norm", "sqrt", "pow")
"""Parts of names of operators. Every layer norm and RMS norm calls an operator with one of these parts."""
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
        return names_of(replace(candidate.model, only=KINDS).swapped)


def gain_norms(times: Times, by: Norms, more_ms: float = 0.0) -> float:
    """The gain of a step if each norm takes one kernel.

    Each norm is timed alone, with and without the kernel: its device time, and the host's time to launch it. The
    backward is assumed to gain the same share of device time as the forward. An RMS norm of several operators is
    assumed to take half as long as its first operator, which reads and writes float32.

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
        squares = [call for call in times.calls if "aten::pow" in call.operator.name() and call.arguments[1:] == (2,)]
        launch = launch_ms(_by(lambda x, _: by.rms_norm(x), squares[0]), squares[0].device) if squares else 0.0
        host_ms += by_hand * ((times.host_ms or 0.0) * CALLS / every - launch)
    return times.gain_of(saved_ms, host_ms)


def share_of(times: Times, name: str, make: Callable[..., object]) -> float:
    """The share of the time of an operator's forward calls that a kernel saves. Each call is timed alone.

    Args:
        name: part of the operator's name.
        make: runs the kernel on the operator's arguments.
    """
    calls = [call for call in times.calls if name in call.operator.name() and "backward" not in call.operator.name()]
    now_ms = sum(call.count * alone_ms(repeated(call), call.device) for call in calls)
    after_ms = sum(call.count * alone_ms(_by(make, call), call.device) for call in calls)
    return 1 - after_ms / now_ms if now_ms > 0 else 0.0


def launches_ms(times: Times, name: str, make: Callable[..., object]) -> float:
    """The time in ms that the host saves if it launches a kernel instead of an operator's forward calls."""
    calls = [call for call in times.calls if name in call.operator.name() and "backward" not in call.operator.name()]
    return sum(
        call.count * (launch_ms(repeated(call), call.device) - launch_ms(_by(make, call), call.device))
        for call in calls
    )


def _by(make: Callable[..., object], call: Call) -> Callable[[], object]:
    given = filled(call)
    return lambda: make(*given)


def _layer_norm(x: Any, shape: Any, weight: Any, bias: Any, eps: float) -> object:
    return layer_norm(x, shape, weight, bias, eps)


def _rms_norm(x: Tensor) -> object:
    return rms_norm(x, x.shape[-1])


OURS = Norms(_layer_norm, _rms_norm)


def _softmax(x: Any, dim: int, to_float: bool) -> object:
    return softmax(x, dim)


class Constants(Rule):
    """Compute results of modules only once if they depend only on parameters and sizes (`rooftop.nn.constants`)."""

    name = "constants"
    exact = True

    def apply(self, candidate: Candidate) -> str:
        kept = keep_constants(candidate.model)
        candidate.frozen |= bool(kept)
        return some(len(kept), "method") and f"{some(len(kept), 'method')} computed once"
