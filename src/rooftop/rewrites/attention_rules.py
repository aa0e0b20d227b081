"""The rule about attention: another back end of PyTorch's `scaled_dot_product_attention`."""

from __future__ import annotations

from typing import Any

from torch.nn.attention import SDPBackend, sdpa_kernel

from rooftop.rewrites.candidates import Candidate, Rule, Times, only_on_gpu

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
"""Back ends by the word that their operators have in their names."""


class AttentionBackend(Rule):
    """Attention that tries one back end first. The others and the plain formula remain for calls that it does not
    support.

    PyTorch takes the first of a fixed order that can compute a call. Which is fastest depends on the GPU, the lengths
    and the features of a head.
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
        return times.of("scaled_dot_product") / 4

    def apply(self, candidate: Candidate) -> str:
        run = candidate.call
        first = BACKENDS[self.backend]
        order = [first, *(each for each in BACKENDS.values() if each != first), SDPBackend.MATH]

        def call(*args: Any, **kwargs: Any) -> Any:
            with sdpa_kernel(order, set_priority=True):
                return run(*args, **kwargs)

        candidate.call = call
        return "the whole model"
