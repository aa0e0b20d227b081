"""Targets: a user's callable, or one of Rooftop's models. Each worker loads its target once.

The process that starts the run creates the target and sends it to each worker once. From the target, the worker loads a
function that maps a list of values to a list with one result per value.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

from rooftop.cluster.items import check_count
from rooftop.errors import ModelRunError, TargetError
from rooftop.user_code import found_in
from rooftop.words import whole_message

Call = Callable[[list[Any]], Sequence[Any]]
"""A function from the values of several items to their results, in the same order."""


@runtime_checkable
class PipelinedCall(Protocol):
    """A call in two halves, so that the device gets a batch before the host reads the results of the previous batch.

    Attributes:
        device_s: seconds that the device has spent on finished batches.
    """

    @property
    def device_s(self) -> float: ...

    def begin(self, values: list[Any]) -> Any:
        """Start to compute a batch, without waiting for it."""

    def finish(self, begun: Any) -> Any:
        """Wait for the results of a batch that `begin` returned: a pyarrow.RecordBatch or a sequence. The caller must
        finish batches in the order of `begin`."""

    def __call__(self, values: list[Any]) -> Sequence[Any]:
        """Compute a batch, and wait for its results."""


@runtime_checkable
class Reads(Protocol):
    """A `prepare` that reads photographs itself, because it depends on the worker's device."""

    def read(self, path: str, device: str) -> Any:
        """Read a photograph's file for a worker on "cpu" or "cuda"."""


@runtime_checkable
class Target(Protocol):
    """A target, in the form in which it is sent to workers.

    Attributes:
        name: the name that is recorded with the results. `arguments` are the settings besides the name that affect the
            results.
        batch: maximum number of values per call; None: one.
        columns: a pyarrow.Schema of the results, or None: the first result sets it.
        prepare: for targets that take photographs: the function that decoding threads or processes apply to each Pillow
            image. See also `Reads`.
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
        """Return the function that computes the results of a batch on "cpu" or "cuda". The function may be a
        `PipelinedCall`. Each worker calls `load` once."""

    def sent(self) -> Target:
        """Return the target for workers on other machines, with all the data that it needs."""


@dataclass(frozen=True)
class CallableTarget:
    """A target made from a function of one value (with `batch`, of a list of values), or from a class that each worker
    instantiates once.

    Attributes:
        name: "my.py:fn", "package.module:fn", or a description of the callable.
        place: (file or module, name), from which workers import the callable; None: workers unpickle `pickled`.
        batch: maximum values per call; None: the function is called with one value.
    """

    name: str
    place: tuple[str, str] | None
    batch: int | None = None
    pickled: bytes | None = None
    columns: None = None
    prepare: None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """The settings that affect the results, apart from the target's name. The target is a callable, so there are
        none."""
        return {}

    def load(self, device: str) -> Call:
        """Import or unpickle the callable, and instantiate it if it is a class.

        Raises:
            ModelRunError: the import or the constructor raised.
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
            except BaseException as error:  # also KeyboardInterrupt: workers ignore Ctrl-C
                raise ModelRunError(f"creating {self.name} raised {_said(error)}") from error
        if self.batch is not None:
            return lambda values: _as_many(found(values), len(values))
        return lambda values: [found(value) for value in values]

    def sent(self) -> CallableTarget:
        """Return the target with its callable pickled, including the code of the user's file. Workers import installed
        modules themselves.

        Raises:
            TargetError: an object in the file cannot be pickled.
        """
        if self.place is None or not self.place[0].endswith(".py"):
            return self
        import cloudpickle

        found, file = imported(*self.place), Path(self.place[0])
        # an object may be of a class of an installed package, such as functools.partial, which workers import
        modules = {_of_file(file)}
        own = sys.modules.get(getattr(found, "__module__", ""))
        if own is not None and Path(getattr(own, "__file__", None) or "").parent == file.parent:
            modules.add(own)
        for module in modules:
            cloudpickle.register_pickle_by_value(module)
        try:
            return CallableTarget(self.name, None, self.batch, pickled(found, self.name))
        finally:
            for module in modules:
                cloudpickle.unregister_pickle_by_value(module)


def _as_many(results: Any, count: int) -> Sequence[Any]:
    # iteration over a mapping or a table (pandas, pyarrow, polars) gives names or columns, and a set has no order
    is_list = hasattr(results, "__len__") and not isinstance(results, (str, bytes, Mapping, Set))
    if not is_list or hasattr(results, "columns") or len(results) != count:
        got = f"{len(results)} results" if isinstance(results, (list, tuple)) else f"a {type(results).__name__}"
        raise ValueError(f"the target returned {got} for a batch of {count}, expected a list of {count} results")
    return list(results)


def callable_target(given: str | Callable[..., Any], batch: int | None = None) -> CallableTarget:
    """Make a target from "my.py:fn", "package.module:fn", or a function or class.

    Raises:
        TargetError: there is no such file, module or name, the object is not callable, or the object cannot be sent to
            other processes.
        ModelRunError: importing the module raised.
        InputError: `batch` is not an integer of 1 or more.
    """
    if batch is not None:
        check_count("batch", batch, 1)
    if not isinstance(given, str):
        if not callable(given):
            raise TargetError(f"target is a {type(given).__name__}, expected a callable, or text such as 'my.py:fn'")
        _check_class(given)
        name = f"{getattr(given, '__module__', '')}:{getattr(given, '__qualname__', type(given).__qualname__)}"
        return CallableTarget(name, None, batch, pickled(given, name))
    where, _, attribute = given.rpartition(":")
    if not where or not attribute:
        raise TargetError(
            f"{given!r}: expected my.py:function or package.module:function (in Python, one of Rooftop's models is "
            "model_target(name))"
        )
    if where.endswith(".py"):
        where = os.path.abspath(where)
    if not callable(found := imported(where, attribute)):
        raise TargetError(f"{given!r} is a {type(found).__name__}, expected a function or a class")
    _check_class(found)
    return CallableTarget(given, (where, attribute), batch)


def _check_class(found: Any) -> None:
    """Refuse a class whose instances cannot be called, because workers call an instance."""
    if isinstance(found, type) and not any("__call__" in vars(each) for each in found.__mro__):
        raise TargetError(
            f"{found.__qualname__} is a class without the method __call__, which gets the items: add the method, or "
            "give a function"
        )


def pickled(target: Any, name: str) -> bytes:
    """Pickle a callable with all the objects that it needs.

    Raises:
        TargetError: the callable cannot be pickled.
    """
    import cloudpickle

    try:
        found: bytes = cloudpickle.dumps(target)
    except Exception as error:
        raise TargetError(
            f"{name} cannot be sent to other processes ({_said(error)}): give a class instead, whose "
            f"__init__ runs in each worker and creates the objects that cannot be sent"
        ) from error
    return found


def imported(where: str, attribute: str) -> Any:
    """Import a name from a file or a module.

    Raises:
        TargetError: there is no such file, module or name.
        ModelRunError: importing the module raised.
    """
    try:
        module = _of_file(Path(where)) if where.endswith(".py") else _of_name(where)
    except (TargetError, KeyboardInterrupt):
        raise
    except ModuleNotFoundError as error:
        if error.name and (where == error.name or where.startswith(error.name + ".")):
            raise TargetError(f"no module {error.name!r} here ({os.getcwd()}) or in this environment") from error
        raise ModelRunError(f"importing {where} failed: {whole_message(error)}") from error
    except BaseException as error:
        raise ModelRunError(f"importing {where} raised {_said(error)}") from error
    return found_in(module, f"{where}:{attribute}")


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {whole_message(error)}".removesuffix(": ")


def _of_name(name: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return importlib.import_module(name)


def _of_file(path: Path) -> ModuleType:
    """Import a file as a module with the file's name, or with a longer name if another module has this name. The module
    can import other files in the same folder."""
    if not path.is_file():
        raise TargetError(f"{path}: no such file")
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
