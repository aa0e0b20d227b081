"""Compile the C++ part of streaming, `page_reader.cpp`: threads that read pages, and a planner, without the GIL.

The module is compiled in the background when the first pool is made, and stored in Rooftop's cache. Until then, and on
machines without a C++ compiler, `loading.PythonReader` and `plans.plan_in_python` compute the same results in Python.
"""

from __future__ import annotations

from pathlib import Path
from threading import Lock
from typing import Any

from rooftop.launch.cpp_extensions import Extension, asked

extension = Extension("page_reader", Path(__file__).with_suffix(".cpp"))
_module: Any = None
_asked = False
_asking = Lock()


def compiled() -> Any:
    """The compiled C++ module of `page_reader.cpp`, or None while it is not available. The first call starts the
    compilation."""
    global _asked
    if asked() == "0":
        return None
    with _asking:
        if not _asked:
            _asked = True
            extension.ask(_keep, "Python reads all pages")
    return _module


def _keep(module: Any) -> None:
    global _module
    _module = module
