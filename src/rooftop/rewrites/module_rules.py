"""Rules about modules: Rooftop's kernels for norms and similar modules, and results that are computed once."""

from __future__ import annotations

from rooftop.nn import KINDS, replace
from rooftop.nn.constants import keep_constants
from rooftop.rewrites.candidates import Candidate, Rule, Times, counted, names_of, only_on_gpu


class Kernels(Rule):
    """Norms, softmaxes, embeddings and losses computed by Rooftop's kernels (`rooftop.nn.replace`)."""

    name = "kernels"
    opaque = True
    trains = True

    def refusal(self, candidate: Candidate) -> str | None:
        return only_on_gpu(candidate)

    def predicted_ms(self, times: Times) -> float:
        return times.gain_ms(times.of("layer_norm", "rms_norm", "softmax", "embedding") / 3)

    def apply(self, candidate: Candidate) -> str:
        return names_of(replace(candidate.model, only=KINDS).swapped)


class Constants(Rule):
    """Module results that depend only on parameters and sizes, computed once (`rooftop.nn.constants`)."""

    name = "constants"
    exact = True

    def apply(self, candidate: Candidate) -> str:
        kept = keep_constants(candidate.model)
        candidate.frozen |= bool(kept)
        return counted(len(kept), "method") and f"{counted(len(kept), 'method')} computed once"
