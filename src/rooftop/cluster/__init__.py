"""Scale-out: maps a target over many inputs, by processes of this machine or workers of a Dask scheduler.

    from rooftop.cluster import map_items, model_target

    map_items("my.py:caption", ["photographs/"], "captions.parquet")
    map_items(model_target("resnet50"), ["photographs/"], "classes.parquet")

Names are loaded at their first use, so a worker whose target needs no torch starts without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rooftop.cluster.items import KINDS
    from rooftop.cluster.mapping import MapReport, map_items
    from rooftop.cluster.model_targets import model_target
    from rooftop.cluster.targets import callable_target

__all__ = ["KINDS", "MapReport", "callable_target", "map_items", "model_target"]

_HOME = {
    "KINDS": "items",
    "MapReport": "mapping",
    "callable_target": "targets",
    "map_items": "mapping",
    "model_target": "model_targets",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'rooftop.cluster' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"rooftop.cluster.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
