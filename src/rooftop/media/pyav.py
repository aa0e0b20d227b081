"""Import PyAV, which includes FFmpeg's libraries; no other module imports PyAV."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from rooftop.errors import MissingExtraError

if TYPE_CHECKING:
    import av


def load_av() -> ModuleType:
    """Import and return the module `av`, which is PyAV.

    Raises:
        MissingExtraError: PyAV is not installed.
    """
    try:
        import av
    except ImportError as error:
        raise MissingExtraError('video needs PyAV: pip install "rooftop[media]"') from error
    return av


__all__ = ["av", "load_av"]
