"""The rule for attention: another back end of PyTorch's `scaled_dot_product_attention`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from rooftop.rewrites.candidates import Call, Candidate, Rule, Times, only_on_gpu
from rooftop.rewrites.timed_alone import alone_ms, filled, repeated

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
"""Back ends of attention. Each key is a word in the names of the back end's operators."""


class AttentionBackend(Rule):
    """Prefer one back end of attention. Other back ends and the plain formula compute the calls that this back end
    does not support.

    PyTorch uses the first back end, in a fixed order, that can compute a call. But the fastest back end depends on the
    GPU, the sequence lengths and the head dimension.
    """

    trains = True
    kind = "attention"

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.name = f"attention-{backend}"

    def refusal(self, candidate: Candidate) -> str | None:
        return only_on_gpu(candidate)

    def absent(self, times: Times) -> str | None:
        names = {call.operator.name() for call in times.calls if "scaled_dot_product" in call.operator.name()}
        if not names:
            return "the model does not call scaled_dot_product_attention"
        return "it is already used" if all(f"_{self.backend}_" in name for name in names) else None

    def predicted_ms(self, times: Times) -> float:
        """The predicted gain. The forward calls are timed alone, with the present and with the new back end. The
        backward is assumed to gain the same share.
        """
        forward = [call for call in times.calls if _is_forward(call)]
        now_ms = sum(call.count * alone_ms(repeated(call), call.device) for call in forward)
        after_ms = sum(call.count * alone_ms(_by(self.backend, call), call.device) for call in forward)
        share = 1 - after_ms / now_ms if now_ms > 0 else 0.0
        return times.gain_ms(share * times.of("scaled_dot_product"))

    def apply(self, candidate: Candidate) -> str:
        run = candidate.call
        order = _order(self.backend)

        def call(*args: Any, **kwargs: Any) -> Any:
            with sdpa_kernel(order, set_priority=True):
                return run(*args, **kwargs)

        candidate.prepare(call)
        candidate.attention = self.backend
        return "the whole model"


def _order(backend: str) -> list[SDPBackend]:
    first = BACKENDS[backend]
    return [first, *(each for each in BACKENDS.values() if each != first), SDPBackend.MATH]


def _is_forward(call: Call) -> bool:
    name = call.operator.name()
    return "scaled_dot_product" in name and "backward" not in name


def _by(backend: str, call: Call) -> Callable[[], object]:
    """A function that computes the attention of a call by the given back end."""
    given = filled(call)
    named = {each.name: value for each, value in zip(call.operator._schema.arguments, given, strict=False)}
    bias = named.get("attn_bias", named.get("attn_mask"))
    causal = bool(named.get("is_causal", False))
    q, k, v = given[:3]
    order = _order(backend)

    def run() -> object:
        with sdpa_kernel(order, set_priority=True), torch.no_grad():
            return scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=causal)

    return run
