"""Name the calls of modules by paths ("blocks.3.norm").

A module with several parents runs under each parent, so the name depends on the call, not on the object. The name
begins with the name of the innermost running module that contains the called module. The rest of the name is the path
from that running module to the called module. If no running module contains the called module, its name is the first
path under which the model contains it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from weakref import WeakValueDictionary

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

OUTSIDE = None
"""The caller's scope for a module that is called from outside any module."""


class ModulePaths:
    """The scopes (names of calls) of modules, and the scopes that own parameters. The tables keep neither modules nor
    parameters alive.

    The first root that `adopt` names has the scope "". The scope of a later root is its class name, and the scopes of
    the modules inside it begin with that name.
    """

    def __init__(self) -> None:
        self._first = WeakIdKeyDictionary()  # module -> its scope, from its first path below its root
        self._roots = WeakIdKeyDictionary()  # module -> the scope of its root
        self._called = WeakIdKeyDictionary()  # module -> scope of the caller -> scope of the module in that call
        # scope -> the first module whose call had this scope; if that module is gone, the next such module
        self._running: WeakValueDictionary[str, nn.Module] = WeakValueDictionary()
        self._taken: set[str] = set()  # scopes already used, also by modules that no longer exist
        self._owners = WeakIdKeyDictionary()  # parameter -> the first scope that owns it

    def adopt(self, root: nn.Module) -> str:
        """Name a root module, and each module below it that has no name yet. Return the scope of the root: the prefix
        of these names, "" for the first root.
        """
        prefix = "" if not self._taken else type(root).__name__
        while prefix in self._taken:
            prefix += "'"
        for name, child in inner_modules(root):
            path = self._first.setdefault(child, joined(prefix, name))
            self._roots.setdefault(child, prefix)
            self._taken.add(path)
            for parameter in own_parameters(child):
                self._owners.setdefault(parameter, path)
        return prefix

    def knows(self, module: nn.Module) -> bool:
        """Whether an adopted root contains the module."""
        return module in self._first

    def owner(self, parameter: object) -> str | None:
        """The first scope that owns a parameter; None if no adopted module contains it."""
        found: str | None = self._owners.get(parameter)
        return found

    def of_call(self, module: nn.Module, running: Sequence[str]) -> str:
        """The scope of a module that is called inside calls of other modules. `running`: the scopes of those other
        modules, the outermost first.
        """
        if not self.knows(module):
            self.adopt(module)
        scopes = self._called.setdefault(module, {})
        caller = running[-1] if running else OUTSIDE
        scope: str | None = scopes.get(caller)
        if scope is None:
            scope = scopes[caller] = self._found(module, running)
            self._taken.add(scope)
        if scope not in self._running:
            self._running[scope] = module
        return scope

    def _found(self, module: nn.Module, running: Sequence[str]) -> str:
        for scope in reversed(running):
            holder = self._running.get(scope)
            if holder is not None and self._roots[holder] == self._roots[module]:
                path = path_below(holder, module)
                if path is not None:
                    return joined(scope, path)
        first: str = self._first[module]
        return first


def path_below(holder: nn.Module, module: nn.Module) -> str | None:
    """The shortest path from `holder` to a `module` inside it; "" if both are the same module; None if `holder` does
    not contain `module`.
    """
    seen = {id(holder)}
    left = deque([("", holder)])
    while left:
        path, current = left.popleft()
        if current is module:
            return path
        for name, child in _children(current):
            if id(child) not in seen:
                seen.add(id(child))
                left.append((joined(path, name), child))
    return None


def inner_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """A module and all modules below it, each once and with its path, even if a subclass overrides `named_modules`."""
    seen = set[int]()
    left = [("", module)]
    while left:
        path, current = left.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield path, current
        left += [(joined(path, name), child) for name, child in reversed(_children(current))]


def own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The module's own parameters, even if a subclass overrides `parameters`."""
    return [parameter for parameter in module._parameters.values() if parameter is not None]


def joined(scope: str, path: str) -> str:
    """Join two paths with a dot; either may be empty."""
    return f"{scope}.{path}" if scope and path else scope or path


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, child) for name, child in module._modules.items() if child is not None]
