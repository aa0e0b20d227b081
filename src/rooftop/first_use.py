"""Import the modules of a package when their names are first used.

__getattr__, __dir__ = on_first_use(__name__, {".timing": "Timing compare measure"})
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def on_first_use(package: str, files: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Create the functions `__getattr__` and `__dir__` of a package.

    Args:
        package: the package's name. `dir` of the package lists the names in its `__all__`.
        files: maps each module, such as ".timing" (relative to the package), to the names that it defines, separated by
            spaces. The module's own name among these names, such as "timing", means the module itself.
    """
    homes = {name: file for file, names in files.items() for name in names.split()}

    def loaded(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(homes[name], package)
        value = module if homes[name].endswith(f".{name}") else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    def public() -> list[str]:
        return sorted(sys.modules[package].__all__)

    return loaded, public
