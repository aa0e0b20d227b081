"""Scaling of rotary frequencies, for models whose context was extended by further training on longer texts.

    scaling = RopeScaling(kind="llama3", factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0,
                          original_positions=8192)
    scaling.scaled(frequencies)

| kind | a frequency becomes |
|---|---|
| `linear` | frequency / factor: positions are counted in smaller steps |
| `llama3` | unchanged for short wavelengths, frequency / factor for long wavelengths, a mixture in between |

Sources: Chen et al. 2023, "Extending Context Window of Large Language Models via Positional Interpolation"; Llama 3.1's
reference code (`apply_scaling` in meta-llama/llama-models), which transformers calls "llama3".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

REFUSED = {
    "dynamic": "its frequencies depend on how long the text is",
    "yarn": "it also scales the scores of attention",
    "longrope": "its frequencies differ between short and long texts",
}
"""Kinds of scaling in transformers that Rooftop does not support, with the reasons."""


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """A scaling of rotary frequencies.

    Attributes:
        kind: "linear" or "llama3".
        factor: the ratio of the new context length to the original context length.
        low_frequency_factor, high_frequency_factor: only for "llama3". A wavelength above original_positions /
            low_frequency_factor is scaled; a wavelength below original_positions / high_frequency_factor is not scaled.
        original_positions: only for "llama3": the context length before the extension.

    Raises:
        ValueError: the kind is unknown, a number is not positive, or factors for "llama3" are missing or out of order.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_frequency_factor: float | None = None
    high_frequency_factor: float | None = None
    original_positions: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3"):
            raise ValueError(f"RopeScaling: kind must be linear or llama3, got {self.kind!r}")
        needed = ("low_frequency_factor", "high_frequency_factor", "original_positions")
        for name in ("factor", *needed):
            value, wanted = getattr(self, name), name == "factor" or self.kind == "llama3"
            if not wanted and value is not None:
                raise ValueError(f"RopeScaling: {name} is only for kind 'llama3', not for {self.kind}: leave it out")
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if wanted and not (number and 0 < value < math.inf):
                raise ValueError(f"RopeScaling: {name} must be a positive number, got {value!r}")
        if self.kind == "llama3" and self._factors[0] >= self._factors[1]:
            raise ValueError(
                f"RopeScaling: low_frequency_factor must be less than high_frequency_factor, got {self._factors}"
            )

    @property
    def _factors(self) -> tuple[float, float]:
        assert self.low_frequency_factor is not None
        assert self.high_frequency_factor is not None
        return self.low_frequency_factor, self.high_frequency_factor

    def scaled(self, frequencies: Tensor) -> Tensor:
        """Scale frequencies (D / 2,), in radians per position; the dtype stays the same."""
        if self.kind == "linear":
            return frequencies / self.factor
        assert self.original_positions is not None
        low, high = self._factors
        turns = self.original_positions * frequencies / (2 * math.pi)  # rotations within the original positions
        kept = ((turns - low) / (high - low)).clamp(0, 1)  # 0 for long wavelengths, 1 for short ones
        return (1 - kept) * frequencies / self.factor + kept * frequencies


# ---- Hugging Face --------------------------------------------------------------------------------------------------


def scaling_of(given: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Read the base of the rotary angles and their scaling from a `config.json`.

    The entries are `rope_theta` and `rope_scaling` in transformers 4, and `rope_parameters` in transformers 5.

    Raises:
        ValueError: the scaling is not supported, or only some features have rotary embeddings.
        KeyError: a number that the scaling needs is missing.
    """
    # transformers also prefers rope_scaling to rope_parameters
    name = "rope_scaling" if given.get("rope_scaling") else "rope_parameters"
    rope = given.get(name) or {}
    if not isinstance(rope, Mapping):
        raise ValueError(f"{name} is {rope!r}: expected an object with rope_type")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ValueError(f"{name} has separate parameters for each type of layer, which is not supported")
    base = rope.get("rope_theta", given.get("rope_theta", 1e4))
    partial = rope.get("partial_rotary_factor", given.get("partial_rotary_factor"))
    if partial not in (None, 1.0):
        raise ValueError(f"partial_rotary_factor is {partial!r}: only rotary embeddings of all features are supported")
    if kind == "default":
        return base, None
    if kind == "linear":
        return base, RopeScaling(kind="linear", factor=rope["factor"])
    if kind == "llama3":
        positions = rope.get("original_max_position_embeddings", given["max_position_embeddings"])
        return base, RopeScaling(
            kind="llama3",
            factor=rope["factor"],
            low_frequency_factor=rope["low_freq_factor"],
            high_frequency_factor=rope["high_freq_factor"],
            original_positions=given.get("original_max_position_embeddings", positions),
        )
    why = f" ({REFUSED[kind]})" if kind in REFUSED else ""
    raise ValueError(
        f"{name} is of rope_type {kind!r}, which is not supported{why}: expected 'default', 'linear' or 'llama3'"
    )


def hugging_face_rope(base: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """The entries of `config.json` for this scaling, for transformers 4 and 5."""
    found: dict[str, Any] = {"rope_type": "default"}
    if scaling is not None:
        found = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling is not None and scaling.kind == "llama3":
        found["low_freq_factor"] = scaling.low_frequency_factor
        found["high_freq_factor"] = scaling.high_frequency_factor
        found["original_max_position_embeddings"] = scaling.original_positions
    older = {} if scaling is None else {"rope_scaling": found}
    return {"rope_theta": base, "rope_parameters": found | {"rope_theta": base}} | older
