"""Times, quantities, shapes and reasons in readable form."""

from __future__ import annotations

import re


def time_text(value: float) -> str:
    """Milliseconds as "1.5 ms", "230 us" or "2,720 ms"."""
    if abs(value) >= 999.5:
        return f"{value:,.0f} ms"
    return f"{value:.3g} ms" if abs(value) >= 0.9995 else f"{1e3 * value:.3g} us"


def percent_text(value: float) -> str:
    """ "61%". Percents below 10 get one more digit, so that 0.3% does not become 0%."""
    return f"{value:.0f}%" if value >= 9.95 or value == 0 else f"{value:.1f}%" if value >= 0.05 else "<0.1%"


def percent_interval_text(value: float, low: float, high: float) -> str:
    """ "14.9%", with its interval if that is wider than a twentieth of the value: "14.9% (14.1 to 15.8)"."""
    text = f"{value:.1f}%"
    return f"{text} ({low:.1f} to {high:.1f})" if high - low > 0.05 * value else text


def quantity_text(value: float) -> str:
    """ "65.7 G": a quantity with a decimal prefix, to be followed by a unit."""
    for limit, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * limit:  # three digits would round a value just below the limit up to "1e+03"
            return f"{value / limit:.3g} {prefix}"
    return f"{value:.3g} "


def shapes_text(shapes: tuple[tuple[int, ...], ...]) -> str:
    """ "8x3x224x224, 64x3x7x7": the shapes of an operator's inputs."""
    return ", ".join("x".join(map(str, shape)) or "scalar" for shape in shapes)


def shortened(text: str, width: int, tail: int = 0) -> str:
    """The text cut to at most this many columns; its last `tail` characters stay: "fused_native_ba…mean_silu"."""
    return text if len(text) <= width else f"{text[: width - tail - 1]}…{text[len(text) - tail :]}"


def short_reason(reason: str) -> str:
    """The reason that torch.compile gives for a graph break or recompilation, without hints, source line and stack
    trace."""
    return re.split(r"\n|\s{2,}#|\s*\(HINT:", reason.strip(), maxsplit=1)[0].strip()
