"""Record which tensor each parameter of a model is, to detect that a program has replaced it.

`load_state_dict(..., assign=True)` and `module.weight = nn.Parameter(...)` replace tensors to which an optimizer, hooks
and CUDA graphs refer. The optimizer would continue with the old tensors, and training would have no effect.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class WeightPlaces:
    """For each parameter of a model: its module and name, and the tensor that it had when this object was created.

    Args:
        model: the model whose parameters an optimizer, hooks or graphs use.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (module._parameters, key, f"{prefix}.{key}" if prefix else key, parameter)
            for prefix, module in model.named_modules()
            for key, parameter in module._parameters.items()
            if parameter is not None
        ]

    def check(self, who: str) -> None:
        """Check that each attribute that held a parameter still holds the original parameter.

        Raises:
            RuntimeError: an attribute now holds another parameter. The message begins with `who` and names a remedy.
        """
        if replaced := self._replaced():
            name, _, found = replaced[0]
            what = "nothing" if found is None else "another tensor"
            raise RuntimeError(
                f"{who}: the model now has {what} in place of the parameter {name}, so training the original parameter "
                f"would have no effect: load without assign=True, copy_ into the parameter, or create the optimizer or "
                "wrapper again"
            )

    @torch.no_grad()
    def take_back(self, who: str) -> dict[nn.Parameter, Tensor]:
        """Put the original parameters back in their places, with the values of the tensors that replaced them.

        Returns:
            For each restored parameter, the tensor that had replaced it.

        Raises:
            RuntimeError: a parameter was removed, or its replacement has another shape; tied parameters have different
                values; or an original parameter that was replaced is sharded (FSDP2). In these cases, no parameter is
                changed.
        """
        taken: dict[nn.Parameter, Tensor] = {}
        replaced = self._replaced()
        for name, known, found in replaced:
            if found is None or found.shape != known.shape or isinstance(known, DTensor):
                self.check(who)
            assert found is not None
            other = taken.setdefault(known, found)
            if other is not found and not torch.equal(other, found):
                raise RuntimeError(f"{who}: the model's tied parameter {name} has different values under its names")
        for known, found in taken.items():
            known.copy_(found)
        if replaced:
            for places, key, _, known in self._places:
                places[key] = known
        return taken

    def _replaced(self) -> list[tuple[str, nn.Parameter, Tensor | None]]:
        """For each replaced parameter: (name, original parameter, current parameter). A gathered sharded parameter does
        not count as a replacement.
        """
        return [
            (name, known, places.get(key))
            for places, key, name, known in self._places
            if places.get(key) is not known and not _is_gathered(known, places.get(key))
        ]


def _is_gathered(known: Tensor, found: Tensor | None) -> bool:
    return isinstance(known, DTensor) and found is not None and not isinstance(found, DTensor)
