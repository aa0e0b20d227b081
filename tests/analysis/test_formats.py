"""Times are formatted in a readable way."""

from __future__ import annotations

import pytest

from rooftop.analysis.formats import time_text


@pytest.mark.parametrize(
    ("ms", "text"),
    [(0.0, "0 us"), (0.25, "250 us"), (0.9996, "1 ms"), (1.5, "1.5 ms"), (999.4, "999 ms"), (999.6, "1,000 ms")],
)
def test_times_have_no_exponents(ms: float, text: str) -> None:
    assert time_text(ms) == text
    assert time_text(2716.4) == "2,716 ms"
