"""Remember the parameters of a model at their places, and find out whether others have replaced them.

`load_state_dict(..., assign=True)` and `module.weight = nn.Parameter(...)` replace tensors that an optimizer, hooks and
CUDA graphs refer to. The optimizer, hooks and graphs would continue with the old tensors, and training would have no
effect.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class WeightPlaces:
    """The places of a model's parameters, with the parameters at the time of creation.

    Args:
        model: the model to whose parameters an optimizer, hooks or graphs refer.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (module._parameters, key, f"{prefix}.{key}" if prefix else key, parameter)
            for prefix, module in model.named_modules()
            for key, parameter in module._parameters.items()
            if parameter is not None
        ]

    def check(self, who: str) -> None:
        """Check that each place still has its original parameter.

        Raises:
            RuntimeError: a place now has a different parameter. The message begins with `who` and has the remedy.
        """
        for name, _, found in self._replaced():
            what = "nothing" if found is None else "another tensor"
            raise RuntimeError(
                f"{who}: the model has {what} in the place of the parameter {name}, so training the parameter would "
                "have no effect: load without assign=True, copy_ into the parameter, or create the optimizer or "
                "wrapper again"
            )

    @torch.no_grad()
    def take_back(self, who: str) -> dict[nn.Parameter, Tensor]:
        """Put the original parameters back in their places, with the present values.

        Returns: for each parameter that was restored, the tensor that had replaced it.

        Raises:
            RuntimeError: a parameter has another shape, or is missing; tied parameters got different values; data ranks
                share the model (FSDP2). Then nothing has changed.
        """
        taken: dict[nn.Parameter, Tensor] = {}
        replaced = list(self._replaced())
        for name, known, found in replaced:
            if found is None or found.shape != known.shape or isinstance(known, DTensor):
                self.check(who)
            assert found is not None
            other = taken.setdefault(known, found)
            if other is not found and not torch.equal(other, found):
                raise RuntimeError(f"{who}: the model's tied parameter {name} has different values in its places")
        for known, found in taken.items():
            known.copy_(found)
        if replaced:
            for places, key, _, known in self._places:
                places[key] = known
        return taken

    def _replaced(self) -> list[tuple[str, nn.Parameter, Tensor | None]]:
        """Name, original parameter, and present one. A temporarily gathered sharded parameter is not a replacement."""
        return [
            (name, known, places.get(key))
            for places, key, name, known in self._places
            if places.get(key) is not known and not _is_gathered(known, places.get(key))
        ]


def _is_gathered(known: Tensor, found: Tensor | None) -> bool:
    return isinstance(known, DTensor) and found is not None and not isinstance(found, DTensor)
