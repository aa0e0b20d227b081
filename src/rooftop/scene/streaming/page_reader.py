"""The C++ part of streaming, `page_reader.cpp`: threads that read pages, and plans, without Python's lock.

It is compiled in the background when the first pool is made, and stored in Rooftop's cache. Until then, and on machines
without a C++ compiler, Python does the same: `loading.PythonReader` and `plans.plan_in_python`, with the same results.
`ROOFTOP_COMPILED_CALLS=0` leaves it out, and `ROOFTOP_COMPILED_CALLS=wait` waits for it.
"""

from __future__ import annotations

import os
from pathlib import Path
from threading import Lock
from typing import Any

from rooftop.launch.cpp_extensions import Extension

extension = Extension("page_reader", Path(__file__).with_suffix(".cpp"))
_module: Any = None
_asked = False
_asking = Lock()


def compiled() -> Any:
    """The module, or None as long as Python does its work. The first call has it compiled."""
    global _asked
    how = os.environ.get("ROOFTOP_COMPILED_CALLS", "1")
    if how == "0":
        return None
    with _asking:
        if not _asked:
            _asked = True
            if how == "wait":
                _keep(extension.build())
            else:
                extension.load_when_built(_keep)
    return _module


def _keep(module: Any) -> None:
    global _module
    _module = module
