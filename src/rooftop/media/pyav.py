"""PyAV, which brings FFmpeg's libraries: the one place that imports it."""

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


def lenient_metadata(av: ModuleType) -> dict[str, str]:
    """Keywords of `av.open` with which titles and comments that are not UTF-8 are no error; from PyAV 19 on they are
    none, and there is no such keyword."""
    return {"metadata_errors": "replace"} if int(av.__version__.split(".")[0]) < 19 else {}


__all__ = ["av", "lenient_metadata", "load_av"]
