"""The tensors of a frame's outputs, and the structs through which stages write these tensors.

The stages write every pixel, including background, so the memory is not initialized.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import warp as wp
from torch import Tensor

from rooftop.scene.rendering import buffers

# Values that stages write for background; outputs that are not listed have -1.
BACKGROUND = {
    "depth": torch.inf,
    "uv": torch.nan,
    "vertex_color": torch.nan,
    "velocity": 0.0,
    "normal": 0.0,
    "color": 0.0,
    "base_color": torch.nan,
    "shadow": torch.nan,
    "material_depth": 0.0,
    "coverage": False,
}
CHANNELS = {"normal": 3, "uv": 2, "velocity": 2, "color": 3, "vertex_color": 3, "base_color": 3}


class Outputs:
    """Allocate new tensors for the outputs of each frame. All frames have outputs of the same dtypes and sizes.

    Args:
        names: names of outputs; "overdraw" is ignored, because the rasterizer writes it to `Frame.fragments`.
        texels: pixels of all cameras.
        lights: number of the scene's lights.
        device: device of the tensors.

    Attributes:
        targets: `buffers.Targets` with the addresses of the tensors that the last call of `new` returned.
    """

    def __init__(self, names: Sequence[str], texels: int, lights: int, device: torch.device) -> None:
        self.targets: Any = buffers.Targets()
        self._device = device
        self._kinds: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        channels = CHANNELS | {"shadow": lights}
        for name in names:
            if name != "overdraw":
                sizes = (texels, *([channels[name]] if name in channels else []))
                self._kinds[name] = sizes, _dtype(name)
                array = wp.from_torch(torch.empty(sizes, dtype=_dtype(name), device=device), return_ctype=True)
                setattr(self._packed, name, array)

    @property
    def _packed(self) -> Any:
        """The targets in the packed form that kernels accept."""
        return self.targets.__ctype__()

    def new(self) -> dict[str, Tensor]:
        """Allocate the uninitialized tensors (pixels[, C]) of one frame, by name."""
        packed, pictures = self._packed, {}
        for name, (sizes, dtype) in self._kinds.items():
            pictures[name] = torch.empty(sizes, dtype=dtype, device=self._device)
            # only addresses change; sizes and strides stay the same
            getattr(packed, name).data = pictures[name].data_ptr()
        return pictures

    def background(self) -> dict[str, Tensor]:
        """The tensors of a frame that shows only background."""
        return {
            name: torch.full(sizes, BACKGROUND.get(name, -1), dtype=dtype, device=self._device)
            for name, (sizes, dtype) in self._kinds.items()
        }


def _dtype(name: str) -> torch.dtype:
    if BACKGROUND.get(name) is False:
        return torch.bool
    return torch.float32 if name in BACKGROUND else torch.int32
