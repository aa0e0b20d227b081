"""One model on several GPUs: which rank computes which part, and ranks that start and fail together.

    from rooftop.parallel import Layout, join, launched

    layout = Layout.of_world(launched().size, tp=2)
    with join(layout) as world:
        groups = layout.process_groups()

Names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rooftop.parallel.data_parallel import DataParallel, gather, parallel_apply, scatter
    from rooftop.parallel.errors import RankError
    from rooftop.parallel.launchers import Launch, launched
    from rooftop.parallel.layouts import Layout
    from rooftop.parallel.processes import World, join
    from rooftop.parallel.randomness import Constant, Normal, Stream, Uniform, init_on_meta, materialize
    from rooftop.parallel.replicas import replicate

__all__ = [
    "Constant",
    "DataParallel",
    "Launch",
    "Layout",
    "Normal",
    "RankError",
    "Stream",
    "Uniform",
    "World",
    "gather",
    "init_on_meta",
    "join",
    "launched",
    "materialize",
    "parallel_apply",
    "replicate",
    "scatter",
]

_NAMES = {
    "data_parallel": "DataParallel gather parallel_apply scatter",
    "errors": "RankError",
    "launchers": "Launch launched",
    "layouts": "Layout",
    "processes": "World join",
    "randomness": "Constant Normal Stream Uniform init_on_meta materialize",
    "replicas": "replicate",
}
_HOME = {name: f"{__name__}.{file}" for file, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
