"""Rooftop: how far a deep-learning program is from the roof of its hardware, and what closes the gap.

    import rooftop
    report = rooftop.analyze(model, x)
    print(report.table())
    report.to_html("report.html")

Names are loaded when they are first used, so `import rooftop` costs almost nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rooftop import cost, hardware
    from rooftop.analysis import Report, analyze, predict, recording
    from rooftop.optimization import Optimized, optimize

__version__ = "0.1.0"
__all__ = ["Optimized", "Report", "__version__", "analyze", "cost", "hardware", "optimize", "predict", "recording"]

_PACKAGES = ("cost", "hardware")
_HOME = {
    **dict.fromkeys(("Report", "analyze", "predict", "recording"), "rooftop.analysis"),
    **dict.fromkeys(("Optimized", "optimize"), "rooftop.optimization"),
}


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"rooftop.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'rooftop' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
