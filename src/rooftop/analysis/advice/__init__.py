"""Find changes that would make the step faster, and predict their gains from measurements.

Each rule reads the measured operators, predicts a gain in ms and names its evidence. Each gain is predicted as if its
change were the only one. Two gains that save the same time (fusion and a faster kernel) do not add up. `advise` drops a
gain that is smaller than the noise of the wall time, or smaller than `LEAST_GAIN` (2%) of the wall time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rooftop.analysis.advice.format_rules import channels_last, half_precision
from rooftop.analysis.advice.host_rules import HOST_RULES
from rooftop.analysis.advice.kernel_rules import layer_norms, pointwise_fusion, uneven_kernels
from rooftop.analysis.advice.optimizer_rules import fused_optimizer
from rooftop.analysis.advice.shape_rules import padded_products
from rooftop.analysis.findings import LEAST_GAIN, Findings
from rooftop.analysis.report_contents import Advice


def advise(findings: Findings) -> list[Advice]:
    """All useful advice, the largest gain first. The interval of each gain extends as many ms below and above the gain
    as the wall time's interval below and above the wall time."""
    advice = [item for rule in RULES for item in rule(findings)]
    least_ms = max(LEAST_GAIN * findings.summary.wall_ms, findings.noise_ms)
    worth_it = [_with_interval(item, findings) for item in advice if item.gain_ms >= least_ms]
    return sorted(worth_it, key=lambda item: -item.gain_ms)


def _with_interval(item: Advice, findings: Findings) -> Advice:
    """Add an interval to a gain, as described in `advise`. If the rule itself has set a lower end that is lower, this
    lower end stays.
    """
    low_ms, high_ms = findings.summary.wall_low_ms, findings.summary.wall_high_ms
    if low_ms is None or high_ms is None:
        return replace(item, low_ms=None)
    wall_ms = findings.summary.wall_ms
    least_ms = item.gain_ms - (wall_ms - low_ms)
    if item.low_ms is not None:
        least_ms = min(least_ms, item.low_ms)
    return replace(item, low_ms=least_ms, high_ms=item.gain_ms + (high_ms - wall_ms))


RULES: tuple[Callable[[Findings], list[Advice]], ...] = (
    *HOST_RULES,
    half_precision,
    channels_last,
    padded_products,
    pointwise_fusion,
    fused_optimizer,
    layer_norms,
    uneven_kernels,
)
