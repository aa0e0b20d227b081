"""Times are formatted in a readable way."""

from __future__ import annotations

import pytest

from rooftop.analysis.formats import quantity_text, time_text


@pytest.mark.parametrize(
    ("ms", "text"),
    [(0.0, "0 us"), (0.25, "250 us"), (0.9996, "1 ms"), (1.5, "1.5 ms"), (999.4, "999 ms"), (999.6, "1,000 ms")],
)
def test_times_have_no_exponents(ms: float, text: str) -> None:
    assert time_text(ms) == text
    assert time_text(2716.4) == "2,716 ms"


@pytest.mark.parametrize(
    ("value", "text"), [(999.4, "999 "), (999.6, "1 k"), (65.7e9, "65.7 G"), (999_400, "999 k"), (999_999, "1 M")]
)
def test_quantities_have_no_exponents(value: float, text: str) -> None:
    assert quantity_text(value) == text
