"""Load weights of sparse convolutions that any version of spconv has saved, whatever the layout of that version.

    report = load_spconv_state_dict(network, torch.load("checkpoint.pth")["state_dict"])

| layout | shape of a weight | saved by |
|---|---|---|
| `KRSC` | (out, *kernel, in), as in this library | spconv 2 |
| `RSKC` | (*kernel, out, in) | spconv 2.0 and 2.1, for layers with `ConvAlgo.Native` |
| `RSCK` | (*kernel, in, out) | spconv 1 |

The shape of each layer's weight determines its layout. If a shape fits several layouts, for example if there are as
many input as output channels, the layouts of the network's other layers decide. In a plain `load_state_dict`, a layer
knows only its own weight. The layer converts the weight if the shape determines the layout. The layer refuses an
ambiguous weight (such as three output channels and kernel size three), unless the version in the state dict shows that
this library saved the weight.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from rooftop.sparse.convolutions import SparseConvolution
from rooftop.sparse.weight_layouts import LAYOUTS, OWN_VERSION, as_krsc, fitting
from rooftop.words import did_you_mean


@dataclass(frozen=True)
class LayoutReport:
    """The layouts of the convolution weights in a state dict, and the keys that did not match the module.

    Attributes:
        layouts: layout of each convolution weight in the state dict, by key.
        missing_keys: keys that the module has and the state dict lacks; empty if `strict` was True.
        unexpected_keys: keys in the state dict that were ignored; empty if `strict` was True.
    """

    layouts: Mapping[str, str]
    missing_keys: tuple[str, ...] = ()
    unexpected_keys: tuple[str, ...] = ()

    @property
    def converted(self) -> list[str]:
        """Keys of the weights that were permuted."""
        return [key for key, layout in self.layouts.items() if layout != "KRSC"]

    def __str__(self) -> str:
        counts = [(layout, sum(each == layout for each in self.layouts.values())) for layout in LAYOUTS]
        told = ", ".join(f"{count} in {layout}" for layout, count in counts if count)
        parts = [
            f"{len(self.layouts)} weights of sparse convolutions: {told or 'none'}; {len(self.converted)} converted"
        ]
        for what, keys in (("missing", self.missing_keys), ("left out", self.unexpected_keys)):
            if keys:
                parts.append(f"{len(keys)} {what}: {', '.join(keys[:3])}{', and so on' if len(keys) > 3 else ''}")
        return "; ".join(parts)


def load_spconv_state_dict(
    module: nn.Module, state_dict: Mapping[str, Tensor], layout: str | None = None, strict: bool = True
) -> LayoutReport:
    """Run `module.load_state_dict(state_dict, strict)` with weights of sparse convolutions in any of spconv's layouts.

    Args:
        layout: layout of all weights, one of `LAYOUTS`. None: the layout is determined from the weights' shapes.

    Raises:
        TypeError, ValueError: as `convert_state_dict`.
        RuntimeError: as `torch.nn.Module.load_state_dict`.
    """
    converted, report = convert_state_dict(module, state_dict, layout)
    kept = module.load_state_dict(converted, strict=strict)
    return replace(report, missing_keys=tuple(kept.missing_keys), unexpected_keys=tuple(kept.unexpected_keys))


def convert_state_dict(
    module: nn.Module, state_dict: Mapping[str, Tensor], layout: str | None = None
) -> tuple[OrderedDict[str, Tensor], LayoutReport]:
    """Copy the state dict, and convert weights of the module's sparse convolutions to (out, *kernel, in). The copy is
    marked, so that `load_state_dict` does not convert it again.

    Args:
        layout: as in `load_spconv_state_dict`.

    Raises:
        TypeError: a weight is not a tensor.
        ValueError: the layout is unknown, a weight fits no layout, or a weight fits several layouts and no other weight
            decides.
    """
    if layout is not None and layout not in LAYOUTS:
        raise ValueError(
            f"layout must be one of {', '.join(LAYOUTS)} or None, got {layout!r}{did_you_mean(layout, LAYOUTS)}"
        )
    wanted = {
        f"{name}.weight" if name else "weight": tuple(each.weight.shape)
        for name, each in module.named_modules(remove_duplicate=False)  # a module may have several names
        if isinstance(each, SparseConvolution)
    }
    for key in wanted:
        if key in state_dict and not isinstance(state_dict[key], Tensor):
            raise TypeError(f"{key} must be a tensor, got {type(state_dict[key]).__name__}")
    noted: Mapping[str, Any] = getattr(state_dict, "_metadata", {})
    fits = {key: fitting(state_dict[key], shape) for key, shape in wanted.items() if key in state_dict}
    for key, found in fits.items():
        if "KRSC" in found and noted.get(_module_of(key), {}).get("version", 1) >= OWN_VERSION:
            fits[key] = ["KRSC"]
    if layout is not None:
        fits = {key: [each for each in found if each == layout] for key, found in fits.items()}
    for key, found in fits.items():
        if not found:
            raise ValueError(
                f"{key} has shape {tuple(state_dict[key].shape)}. The network needs {wanted[key]}, as (out, *kernel, "
                f"in), and {'no layout of spconv' if layout is None else f'the layout {layout} does not'} "
                f"{'turns' if layout is None else 'turn'} one shape into the other; check that the network is the one "
                "that was saved"
            )
    certain = {found[0] for found in fits.values() if len(found) == 1}
    layouts = {}
    for key, found in fits.items():
        left = found if len(found) == 1 else [each for each in found if each in certain]
        if len(left) != 1:
            raise ValueError(
                f"{key} of shape {tuple(state_dict[key].shape)} may be in the layout {' or '.join(left or found)}, and "
                f"no other weight decides: pass layout="
            )
        layouts[key] = left[0]
    changed = {key: as_krsc(state_dict[key], each).contiguous() for key, each in layouts.items()}
    converted = OrderedDict({**state_dict, **changed})
    own = {_module_of(key): {"version": OWN_VERSION} for key in layouts}
    converted._metadata = {**noted, **own}  # type: ignore[attr-defined]
    return converted, LayoutReport(layouts)


def _module_of(key: str) -> str:
    return key.removesuffix("weight").removesuffix(".")
