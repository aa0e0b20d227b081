"""Rooftop: how far a deep-learning program is from the roof of its hardware, and what closes the gap.

    import rooftop
    report = rooftop.analyze(model, x)
    print(report.table())
    report.to_html("report.html")

Names are loaded when they are first used, so `import rooftop` costs almost nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rooftop.first_use import on_first_use

if TYPE_CHECKING:
    from rooftop import cost, hardware
    from rooftop.analysis import Report, analyze, predict, recording
    from rooftop.optimization import Optimized, optimize

__version__ = "0.1.0"
__all__ = ["Optimized", "Report", "__version__", "analyze", "cost", "hardware", "optimize", "predict", "recording"]

__getattr__, __dir__ = on_first_use(
    __name__,
    {
        ".analysis": "Report analyze predict recording",
        ".cost": "cost",
        ".hardware": "hardware",
        ".optimization": "Optimized optimize",
    },
)
