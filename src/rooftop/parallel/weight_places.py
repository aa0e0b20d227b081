"""Where a model has its parameters, and whether somebody has put others there since.

`load_state_dict(..., assign=True)` and `module.weight = nn.Parameter(...)` put new tensors in the places of those that
an optimizer, hooks and CUDA graphs know. Those would go on with the old ones, and training would have no effect.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class WeightPlaces:
    """The places of a model's parameters, with what was there when this was made.

    Args:
        model: whose parameters are known elsewhere too.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (module._parameters, key, f"{prefix}.{key}" if prefix else key, parameter)
            for prefix, module in model.named_modules()
            for key, parameter in module._parameters.items()
            if parameter is not None
        ]

    def check(self, who: str) -> None:
        """See that each place has the parameter that it had.

        Raises:
            RuntimeError: one has not; the message begins with `who`, and says what to do.
        """
        for name, _, found in self._replaced():
            what = "nothing" if found is None else "another tensor"
            raise RuntimeError(
                f"{who}: the model has {what} in the place of the parameter {name}, which would be trained in vain: "
                "load without assign=True, copy_ into the parameter, or make what trains the model anew"
            )

    @torch.no_grad()
    def take_back(self, who: str) -> dict[nn.Parameter, Tensor]:
        """Put parameters back in their places, with the values of what stands there.

        Returns:
            of each that was put back what had its place.

        Raises:
            RuntimeError: it has another shape, or is gone; tied parameters got different values; data ranks share the
                model (FSDP2). Then nothing has changed.
        """
        taken: dict[nn.Parameter, Tensor] = {}
        replaced = list(self._replaced())
        for name, known, found in replaced:
            if found is None or found.shape != known.shape or isinstance(known, DTensor):
                self.check(who)
            assert found is not None
            other = taken.setdefault(known, found)
            if other is not found and not torch.equal(other, found):
                raise RuntimeError(f"{who}: the model's tied parameter {name} has got different values in its places")
        for known, found in taken.items():
            known.copy_(found)
        if replaced:
            for places, key, _, known in self._places:
                places[key] = known
        return taken

    def _replaced(self) -> list[tuple[str, nn.Parameter, Tensor | None]]:
        """Name, what was there, and what is. Of a shared parameter what is gathered for a while is no other one."""
        return [
            (name, known, places.get(key))
            for places, key, name, known in self._places
            if places.get(key) is not known and not _is_gathered(known, places.get(key))
        ]


def _is_gathered(known: Tensor, found: Tensor | None) -> bool:
    return isinstance(known, DTensor) and found is not None and not isinstance(found, DTensor)
