"""What would make the step faster, and by how much: computed from what was measured, never canned.

Each rule looks at the measured operators, predicts a gain in ms and names its evidence. Gains are predicted one at a
time; two that save the same time (fusion and a faster kernel) do not add up.
"""

from __future__ import annotations

from collections.abc import Callable

from rooftop.analysis.advice.format_rules import channels_last, half_precision
from rooftop.analysis.advice.host_rules import HOST_RULES
from rooftop.analysis.advice.kernel_rules import layer_norms, pointwise_fusion, uneven_kernels
from rooftop.analysis.findings import LEAST_GAIN, Findings
from rooftop.analysis.report import Advice


def advise(findings: Findings) -> list[Advice]:
    """All advice worth giving, by falling gain."""
    advice = [item for rule in RULES for item in rule(findings)]
    worth_it = [item for item in advice if item.gain_ms >= LEAST_GAIN * findings.summary.wall_ms]
    return sorted(worth_it, key=lambda item: -item.gain_ms)


RULES: tuple[Callable[[Findings], list[Advice]], ...] = (
    *HOST_RULES,
    half_precision,
    channels_last,
    pointwise_fusion,
    layer_norms,
    uneven_kernels,
)
