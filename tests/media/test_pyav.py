"""The version of PyAV that is installed."""

from __future__ import annotations

import re
from pathlib import Path

import av
import pytest

from rooftop.errors import MissingExtraError
from rooftop.media import pyav


@pytest.mark.parametrize("version", ["17.1.0", "19.0.2"])
def test_another_version_is_named(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(av, "__version__", version)
    with pytest.raises(MissingExtraError, match=rf'needs PyAV 18, and PyAV {version} is installed: pip install "rooft'):
        pyav.load_av()


def test_the_extra_installs_the_version_that_is_accepted() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    (low, high) = map(int, re.findall(r'"av>=(\d+)\.0,<(\d+)"', project)[0])
    assert (low, high) == (pyav.MAJOR, pyav.MAJOR + 1)
    assert pyav.load_av() is av
