"""Render the result of `rooftop.optimize` as one self-contained HTML page: times before and after, and each change with
its reason.
"""

from __future__ import annotations

from importlib import resources

import jinja2

from rooftop.analysis.formats import time_text
from rooftop.optimization.optimized import Optimized


def render_page(found: Optimized, target: str) -> str:
    """The HTML page, which needs neither JavaScript nor a network.

    Args:
        target: name of the model.
    """
    text = (resources.files("rooftop.optimization") / "page_files" / "page.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["time"] = time_text
    bars = [("before", "before", found.before_ms)]
    if found.without_ms is not None:
        bars.append(("without", "without compiler and graphs", found.without_ms))
    bars.append(("after", "after", found.after_ms))
    plain = found.to_dict()
    ordered = sorted(plain["changes"], key=lambda change: (change["verdict"] != "kept", change["measured_ms"] is None))
    return environment.from_string(text).render(
        target=target,
        ratio=f"{found.before_ms / found.after_ms:.2f}",
        bars=bars,
        longest_ms=max(ms for _, _, ms in bars),
        kept=found.kept,
        differs=found.differs,
        ordered=ordered,
        **plain,
    )
