"""The errors that are Rooftop's own; everything else is a `ValueError` or a `TypeError`.

Each message says what was given, what was expected and how to fix it.
The command line prints it as one line: exit status 2 for a wrong call, 1 for a failure.
"""

from __future__ import annotations


class RooftopError(Exception):
    """Base of the errors below."""


class TargetError(RooftopError, ValueError):
    """What was named to be analyzed does not exist or is no model (a wrong call)."""


class InputError(RooftopError, ValueError):
    """An input shape, dtype or file that cannot be made into a tensor (a wrong call)."""


class ModelRunError(RooftopError, RuntimeError):
    """The user's own model raised while it ran; `__cause__` is its exception."""


class CeilingsFileError(RooftopError, ValueError):
    """Ceilings that cannot be compared with: a corrupt file, another format version, another kind of device."""


class MeasurementError(RooftopError, RuntimeError):
    """A measurement could not be made: no GPU, no permission, or a process of it failed or was not done in time."""


class WeightsError(RooftopError, RuntimeError):
    """A weights file that cannot be fetched, does not match its checksum or does not fit the model."""


class MissingExtraError(RooftopError, ImportError):
    """An optional dependency is not installed; the message carries the command that installs it."""


class CompilationError(RooftopError, RuntimeError):
    """A CUDA C++ source does not compile; the message has the kernel's name, the first wrong line and the log."""


class LaunchError(RooftopError, RuntimeError):
    """A CUDA C++ kernel could not be launched, or (with ROOFTOP_SYNC=1) failed while it ran; the message names it."""


class GeometryFileError(RooftopError, ValueError):
    """A geometry file that is damaged, cut off or of another format; the message says what is wrong and where.

    Attributes:
        path: of the file.
        offset: in bytes from its beginning, where what is wrong stands.
    """

    def __init__(self, path: object, what: str, offset: int) -> None:
        super().__init__(f"{path} cannot be used: {what} (at byte {offset:,}); build it again")
        self.path, self.offset = path, offset
