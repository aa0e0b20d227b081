"""Reports on loading: which key of a model each key of a weights file fills."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

Shape = tuple[int, ...]

COMPUTED = ("num_batches_tracked", "relative_position_index", "relative_coords_table")
"""Endings of keys that a model does not need from a file.

The window size of a Swin Transformer determines the model's tables, and timm does not save the tables. A batch counter
of a norm does not affect the results, and files from before torch 0.4.1 have no such counters.
"""


@dataclass(frozen=True)
class LoadReport:
    """The use of each key of a weights file, and the source of each key of the model.

    Keys of the file whose tensors do not fit are in `mismatched` or `quantized`, under the model's names.

    Attributes:
        path: the file.
        origin: the library whose names the file uses, e.g. "timm".
        used: maps a key of the model to the keys of the file that form the tensor. Several keys of the file form one
            tensor if the model packs tensors that the file stores separately.
        missing_keys: keys of the model that the file lacks.
        unexpected_keys: keys of the file that the model lacks.
        mismatched: maps a key of the model to its shape in the file and in the model.
        quantized: maps a floating-point key of the model to its dtype in the file, an integer or an 8-bit float.
            Quantized weights are not loaded, because they are useless without their scales.
        computed_keys: keys of the model that are not in the file, but that the model computes itself.
        unneeded_keys: ignored keys of the file, whose tensors the model computes itself or does not need.
        differing_keys: the unneeded keys whose tensors differ from the model's own.
        taken: a text that names the chosen weights of the file, and says whether they are averaged.
        averaged: whether the weights are averages over training steps.
        others: names of other weights in the file, as values for `part`.
    """

    path: Path
    origin: str
    used: dict[str, tuple[str, ...]]
    missing_keys: tuple[str, ...] = ()
    unexpected_keys: tuple[str, ...] = ()
    mismatched: dict[str, tuple[Shape, Shape]] = field(default_factory=dict)
    quantized: dict[str, torch.dtype] = field(default_factory=dict)
    computed_keys: tuple[str, ...] = ()
    unneeded_keys: tuple[str, ...] = ()
    differing_keys: tuple[str, ...] = ()
    taken: str = ""
    averaged: bool = False
    others: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether a strict load would succeed."""
        return not (self.missing_keys or self.unexpected_keys or self.mismatched or self.quantized)

    def problems(self) -> str:
        """Describe the problems: their number, and the first three of each kind; "" if everything fits."""
        shapes = [f"{key} (file {found}, model {expected})" for key, (found, expected) in self.mismatched.items()]
        dtypes = [f"{key} ({dtype})" for key, dtype in self.quantized.items()]
        kinds = {
            "missing": self.missing_keys,
            "unexpected": self.unexpected_keys,
            "of another shape": shapes,
            "quantized": dtypes,
        }
        return "; ".join(f"{len(keys)} {kind}: {_first(keys)}" for kind, keys in kinds.items() if keys)

    def differences(self) -> str:
        """Describe the ignored tensors that differ from the model's own; "" if there are none."""
        if not self.differing_keys:
            return ""
        return (
            f"{_first(self.differing_keys)} of the file are left out, but the model computes other values than the "
            "file has: the results may differ from those of the saved model"
        )

    def __str__(self) -> str:
        places = len(self.used) + len(self.missing_keys) + len(self.mismatched) + len(self.quantized)
        places += len(self.computed_keys)
        parts = [f"{self.path} ({self.origin}): {len(self.used)} of the model's {places} keys are loaded"]
        if self.averaged or self.others or not self.taken.startswith("all tensors"):
            parts += [f"taken: {self.taken}"] if self.taken else []
        if self.others:
            parts.append(f"not taken: {_first(self.others)}")
        if self.computed_keys:
            parts.append(f"{len(self.computed_keys)} are computed by the model: {_first(self.computed_keys)}")
        if self.unneeded_keys:
            parts.append(f"{len(self.unneeded_keys)} of the file are not needed: {_first(self.unneeded_keys)}")
        if self.differing_keys:
            parts.append(self.differences())
        return "; ".join([*parts, self.problems() or "all fits"])


def compared(
    expected: Mapping[str, Tensor],
    found: Mapping[str, Tensor],
    path: Path,
    origin: str = "",
    sources: Mapping[str, tuple[str, ...]] | None = None,
    unneeded: Collection[str] = (),
    differing: Collection[str] = (),
) -> LoadReport:
    """Compare tensors with a model's state dict, and report which tensors would be loaded.

    Args:
        expected: the model's state dict; only its shapes and dtypes are read.
        found: tensors by the model's keys.
        path, origin: as in `LoadReport`.
        sources: the file's keys that form each tensor of `found`; None: the keys of `found`.
        unneeded: keys of the file that are not in `found`.
        differing: the unneeded keys whose tensors differ from the model's own.
    """
    sources = sources or {key: (key,) for key in found}
    shapes = {key: (tuple(found[key].shape), tuple(expected[key].shape)) for key in expected if key in found}
    fitting = {key for key, (file, model) in shapes.items() if file == model}
    quantized = {key for key in fitting if _is_quantized(found[key], expected[key])}
    absent = [key for key in expected if key not in found]
    return LoadReport(
        path,
        origin,
        used={key: sources[key] for key in shapes if key in fitting and key not in quantized},
        missing_keys=tuple(key for key in absent if not key.endswith(COMPUTED)),
        unexpected_keys=tuple(source for key in found if key not in expected for source in sources[key]),
        mismatched={key: pair for key, pair in shapes.items() if pair[0] != pair[1]},
        quantized={key: found[key].dtype for key in shapes if key in quantized},
        computed_keys=tuple(key for key in absent if key.endswith(COMPUTED)),
        unneeded_keys=tuple(unneeded),
        differing_keys=tuple(differing),
    )


def _is_quantized(found: Tensor, expected: Tensor) -> bool:
    """Whether the model expects floating-point values, and the file has integers, or 8-bit floats of another dtype."""
    if not expected.is_floating_point() or found.dtype == expected.dtype:
        return False
    return not found.is_floating_point() or found.itemsize == 1


def _first(keys: Sequence[str]) -> str:
    return ", ".join(keys[:3]) + (", and so on" if len(keys) > 3 else "")
