"""Rooftop's own errors. All other errors that Rooftop raises are Python's built-in ones: mostly `ValueError` or
`TypeError` for a wrong argument, and `KeyError`, `IndexError` or `RuntimeError` where Python would raise these.

Each message says what was given, what was expected and how to fix it.
The command line prints the message as one line, and exits with status 2 after a wrong call and 1 after a failure.
"""

from __future__ import annotations

from typing import Any

FAILURE = "rooftop_failure"
"""Name of the attribute that marks exceptions which end all ranks. The attribute's text says which rank failed first
and why, and is the same on all ranks."""


def reduced(error: Exception) -> tuple[Any, ...]:
    """A `__reduce__` for errors whose constructor takes more arguments than the message. It makes them picklable, so
    that they can pass between processes."""
    return _restored, (type(error), error.args, vars(error))


def _restored(kind: type[Exception], args: tuple[Any, ...], attributes: dict[str, Any]) -> Exception:
    error = kind.__new__(kind)
    error.args = args
    vars(error).update(attributes)
    return error


class RooftopError(Exception):
    """Base class of Rooftop's errors."""


class TargetError(RooftopError, ValueError):
    """The named target does not exist or is not a model (a wrong call)."""


class InputError(RooftopError, ValueError):
    """An input shape, dtype, file or option value that cannot be used (a wrong call)."""


class ModelRunError(RooftopError, RuntimeError):
    """The user's model or function failed: it raised, gave results that cannot be used, did not fit into memory, or its
    process ended. `__cause__` is the original exception, if there is one."""


class DivergedError(ModelRunError):
    """A training diverged: a loss or a gradient is not finite. All ranks raise it after the same step."""


class CeilingsFileError(RooftopError, ValueError):
    """A file of measured hardware limits cannot be used: it is corrupt, has an unsupported format, or belongs to
    another device type."""


class MeasurementError(RooftopError, RuntimeError):
    """A measurement failed: no GPU, no permission, or a measuring process failed or took too long."""


class WeightsError(RooftopError, RuntimeError):
    """A weights file that cannot be fetched, does not match its checksum or does not fit the model."""


class MissingExtraError(RooftopError, ImportError):
    """An optional dependency is not installed. The message contains the command that installs it."""


class CompilationError(RooftopError, RuntimeError):
    """A CUDA C++ source does not compile. The message has the kernel's name, the first wrong line and the log."""


class LaunchError(RooftopError, RuntimeError):
    """A CUDA C++ kernel could not be launched, or (with ROOFTOP_SYNC=1) failed while it ran; the message names the
    kernel."""


class SchedulerError(RooftopError, RuntimeError):
    """No Dask scheduler answers at the address, or the scheduler disappeared and did not come back. The output folder
    keeps the results so far."""


class BuildError(RooftopError, RuntimeError):
    """A scene could not be built: a worker process was killed, or raised an error that cannot be pickled."""


class LoadingError(RooftopError, RuntimeError):
    """A process that loads samples ended or was killed. The message says how the process ended, and at which batch."""


class OutputError(RooftopError, OSError):
    """A file of results cannot be written, for example because the disk is full. Earlier results are kept."""


class GeometryFileError(RooftopError, ValueError):
    """A geometry file that is damaged, cut off or of another format; the message says what is wrong and where.

    Attributes:
        path: path of the file.
        offset: position of the error, in bytes from the beginning of the file.
    """

    def __init__(self, path: object, what: str, offset: int, remedy: str = "build the file again") -> None:
        super().__init__(f"{path} cannot be used: {what} (at byte {offset:,}); {remedy}")
        self.path, self.offset = path, offset

    __reduce__ = reduced
