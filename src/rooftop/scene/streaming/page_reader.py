"""The C++ part of streaming, `page_reader.cpp`: threads that read pages, and plans, without Python's lock.

It is compiled in the background when the first pool is made, and stored in Rooftop's cache. Until then, and on machines
without a C++ compiler, Python does the same: `loading.PythonReader` and `plans.plan_in_python`, with the same results.
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
    """The module, or None as long as Python does its work. The first call has it compiled."""
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
