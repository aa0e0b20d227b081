"""Scale-out: map a target over many inputs, by processes on this machine or by a Dask scheduler's workers.

    from rooftop.cluster import map_items, model_target

    map_items("my.py:caption", ["photographs/"], "captions.parquet")
    map_items(model_target("resnet50"), ["photographs/"], "classes.parquet")

The package imports each name at its first use, so a worker whose target needs no torch does not load torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rooftop.first_use import on_first_use

if TYPE_CHECKING:
    from rooftop.cluster.items import KINDS
    from rooftop.cluster.mapping import MapReport, map_items
    from rooftop.cluster.model_targets import model_target
    from rooftop.cluster.targets import callable_target

__all__ = ["KINDS", "MapReport", "callable_target", "map_items", "model_target"]

__getattr__, __dir__ = on_first_use(
    __name__,
    {
        ".items": "KINDS",
        ".mapping": "MapReport map_items",
        ".model_targets": "model_target",
        ".targets": "callable_target",
    },
)
