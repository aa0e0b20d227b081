"""Import PyAV, which includes FFmpeg's libraries, and check its version. All other modules call `load_av` first."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from rooftop.errors import MissingExtraError

if TYPE_CHECKING:
    import av


MAJOR = 18  # later versions of PyAV have other arguments


def load_av() -> ModuleType:
    """Import and return the module `av`, which is PyAV.

    Raises:
        MissingExtraError: PyAV is not installed, or has another major version than `MAJOR`.
    """
    try:
        import av
    except ImportError as error:
        raise MissingExtraError('video needs PyAV: pip install "rooftop[media]"') from error
    if int(av.__version__.partition(".")[0]) != MAJOR:
        raise MissingExtraError(
            f'video needs PyAV {MAJOR}, and PyAV {av.__version__} is installed: pip install "rooftop[media]"'
        )
    return av


__all__ = ["av", "load_av"]
