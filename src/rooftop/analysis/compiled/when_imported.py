"""Act on a module as soon as a program imports it. PyTorch's compiler takes seconds to import, and most programs never
use it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class WhenImported(MetaPathFinder):
    """Calls `action` once with a module: at once if the module is imported already, else when it is first imported in
    the `with` block, before the importing code continues."""

    def __init__(self, name: str, action: Callable[[Any], None]) -> None:
        self._name, self._action = name, action

    def __enter__(self) -> WhenImported:
        module = sys.modules.get(self._name)
        if module is not None:
            self._action(module)
        else:
            sys.meta_path.insert(0, self)
        return self

    def __exit__(self, *exception: object) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the module as Python would without this finder, and let its loader call the action."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        loader = spec.loader if spec is not None else None
        if loader is None:
            return None
        run = loader.exec_module

        def run_and_act(module: ModuleType) -> None:
            run(module)
            self._action(module)

        loader.exec_module = run_and_act  # type: ignore[method-assign]
        return spec
