"""What is mapped: a callable of the user, or a model of Rooftop's own, made once in each worker.

A target is made where the run is started, goes to each worker once, and is loaded there into a function of a list of
values that gives as many results.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

from rooftop.errors import InputError, ModelRunError, TargetError, did_you_mean

Call = Callable[[list[Any]], Sequence[Any]]
"""Values of as many items -> their results, in the same order."""


@runtime_checkable
class Target(Protocol):
    """What goes to the workers.

    Attributes:
        name: as the record of the results has it; `arguments`: what else changes its results.
        batch: how many values it gets at once, at most; None: one.
        columns: a pyarrow.Schema of the results, or None: the first result says it.
        prepare: of a target that takes photographs: what threads make of each, as Pillow's image, before the call.
    """

    @property
    def name(self) -> str: ...

    @property
    def arguments(self) -> dict[str, Any]: ...

    @property
    def batch(self) -> int | None: ...

    @property
    def columns(self) -> Any | None: ...

    @property
    def prepare(self) -> Callable[[Any], Any] | None: ...

    def load(self, device: str) -> Call:
        """In a worker, once: the function that is called for each batch, on "cpu" or "cuda"."""

    def sent(self) -> Target:
        """As workers on other machines take it: with all that it needs inside."""


@dataclass(frozen=True)
class CallableTarget:
    """A function of one value (or of a list of them, with `batch`), or a class that is made once in each worker.

    Attributes:
        name: "my.py:fn", "package.module:fn", or what stands for an object.
        place: where workers import it, (file or module, name); None: `pickled` is it.
        batch: None: it is called with one value.
    """

    name: str
    place: tuple[str, str] | None
    batch: int | None = None
    pickled: bytes | None = None
    columns: None = None
    prepare: None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """None."""
        return {}

    def load(self, device: str) -> Call:
        """The callable, a class made.

        Raises:
            ModelRunError: importing or making it raised.
        """
        if self.place is not None:
            found = imported(*self.place)
        else:
            import cloudpickle

            assert self.pickled is not None
            found = cloudpickle.loads(self.pickled)
        if isinstance(found, type):
            try:
                found = found()
            except (Exception, SystemExit) as error:
                raise ModelRunError(f"making {self.name} raised {type(error).__name__}: {error}") from error
        if self.batch is not None:
            return lambda values: _as_many(found(values), len(values))
        return lambda values: [found(value) for value in values]

    def sent(self) -> CallableTarget:
        """A file of the user goes along by its content; a module is imported there.

        Raises:
            TargetError: something in the file cannot be pickled.
        """
        if self.place is None or not self.place[0].endswith(".py"):
            return self
        import cloudpickle

        found = imported(*self.place)
        module = sys.modules[found.__module__] if getattr(found, "__module__", None) in sys.modules else None
        if module is not None:
            cloudpickle.register_pickle_by_value(module)
        try:
            return CallableTarget(self.name, None, self.batch, pickled(found, self.name))
        finally:
            if module is not None:
                cloudpickle.unregister_pickle_by_value(module)


def _as_many(results: Any, count: int) -> Sequence[Any]:
    if isinstance(results, (str, bytes, dict)) or not hasattr(results, "__len__") or len(results) != count:
        got = f"{len(results)} results" if isinstance(results, (list, tuple)) else f"a {type(results).__name__}"
        raise ValueError(f"the target gave {got} for a batch of {count}, expected a list of as many results")
    return list(results)


def callable_target(given: str | Callable[..., Any], batch: int | None = None) -> CallableTarget:
    """The target of "my.py:fn", "package.module:fn", or of a function or class itself.

    Raises:
        TargetError: there is no such file, module or name, or it is not callable, or cannot go to other processes.
        ModelRunError: importing it raised.
        InputError: `batch` is below 1.
    """
    if batch is not None and batch < 1:
        raise InputError(f"batch is {batch}, expected a number from 1 on")
    if not isinstance(given, str):
        if not callable(given):
            raise TargetError(f"target is a {type(given).__name__}, expected a callable, or text such as 'my.py:fn'")
        name = f"{getattr(given, '__module__', '')}:{getattr(given, '__qualname__', type(given).__qualname__)}"
        return CallableTarget(name, None, batch, pickled(given, name))
    where, _, attribute = given.rpartition(":")
    if not where or not attribute:
        raise TargetError(f"{given!r}: expected a model's name, my.py:function or package.module:function")
    if where.endswith(".py"):
        where = os.path.abspath(where)
    if not callable(found := imported(where, attribute)):
        raise TargetError(f"{given!r} is a {type(found).__name__}, expected a function or a class")
    return CallableTarget(given, (where, attribute), batch)


def pickled(target: Any, name: str) -> bytes:
    """A callable with all that it needs.

    Raises:
        TargetError: it cannot be pickled.
    """
    import cloudpickle

    try:
        found: bytes = cloudpickle.dumps(target)
    except Exception as error:
        raise TargetError(
            f"{name} cannot go to other processes ({type(error).__name__}: {error}): make what it holds in the "
            "__init__ of a class, which is made in each worker"
        ) from error
    return found


def imported(where: str, attribute: str) -> Any:
    """What a file or a module has by that name.

    Raises:
        TargetError: there is no such file, module or name.
        ModelRunError: importing it raised.
    """
    try:
        module = _of_file(Path(where)) if where.endswith(".py") else _of_name(where)
    except TargetError:
        raise
    except ModuleNotFoundError as error:
        if error.name and (where == error.name or where.startswith(error.name + ".")):
            raise TargetError(f"no module {error.name!r} here ({os.getcwd()}) or in this environment") from error
        raise ModelRunError(f"importing {where} failed: {error}") from error
    except (Exception, SystemExit) as error:
        raise ModelRunError(f"importing {where} raised {type(error).__name__}: {error}") from error
    if not hasattr(module, attribute):
        public = [name for name in vars(module) if not name.startswith("_") and callable(getattr(module, name))]
        raise TargetError(
            f"{where} has no {attribute!r}; it has {', '.join(public[:8]) or 'nothing callable'}"
            f"{did_you_mean(attribute, public)}"
        )
    return getattr(module, attribute)


def _of_name(name: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return importlib.import_module(name)


def _of_file(path: Path) -> ModuleType:
    """A file as a module of its name; what lies beside it can be imported, too."""
    if not path.is_file():
        raise TargetError(f"{path}: there is no such file")
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    name = path.stem if known is None else f"{path.stem}_of_{abs(hash(str(path)))}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
