"""Errors that a process raised can be read by another process."""

from __future__ import annotations

import importlib
import inspect
import pickle

import pytest

from rooftop.debugging.stream_races import StreamRaceError
from rooftop.errors import GeometryFileError
from rooftop.media.errors import DamagedSoundError

ERRORS = {
    GeometryFileError: ("a.rtg", "it is cut off", 7),
    StreamRaceError: ((),),
    DamagedSoundError: ("it ends early", 0.5, "sound"),
}


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_with_attributes_survives_a_copy(kind: type[Exception]) -> None:
    error = kind(*ERRORS[kind])
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


def test_other_errors_need_only_their_message() -> None:
    for name in ("errors", "media.errors", "parallel.errors", "hardware.select", "debugging.stream_races"):
        for kind in vars(importlib.import_module(f"rooftop.{name}")).values():
            if inspect.isclass(kind) and issubclass(kind, Exception) and kind not in ERRORS and kind is not ImportError:
                assert str(pickle.loads(pickle.dumps(kind("message")))) == str(kind("message"))
