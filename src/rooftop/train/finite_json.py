"""Write NaN and infinities as null, because JSON has only finite numbers.

json.dumps(finite({"loss": nan}))  # {"loss": null}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def finite(value: Any) -> Any:
    """Return a copy of JSON values in which None replaces each number that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite(each) for name, each in value.items()}
    return [finite(each) for each in value] if isinstance(value, list | tuple) else value


def with_nan(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a mapping in which NaN replaces each None. Nested values stay as they are."""
    return {name: math.nan if value is None else value for name, value in values.items()}
