"""Import PyAV, which includes FFmpeg's libraries; no other module imports it."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from rooftop.errors import MissingExtraError

if TYPE_CHECKING:
    import av


def load_av() -> ModuleType:
    """The module `av`.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import av
    except ImportError as error:
        raise MissingExtraError('video needs PyAV: pip install "rooftop[media]"') from error
    return av


__all__ = ["av", "load_av"]
