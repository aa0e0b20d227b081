"""The modules of a model that is built already, computed by Rooftop from now on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rooftop.errors import did_you_mean
from rooftop.nn.embeddings import Embedding
from rooftop.nn.losses import CrossEntropyLoss
from rooftop.nn.norms import LayerNorm, RMSNorm
from rooftop.nn.softmaxes import LogSoftmax, Softmax

SUBSTITUTES: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    torch.nn.LayerNorm: LayerNorm,
    torch.nn.RMSNorm: RMSNorm,
    torch.nn.Softmax: Softmax,
    torch.nn.LogSoftmax: LogSoftmax,
    torch.nn.Embedding: Embedding,
    torch.nn.CrossEntropyLoss: CrossEntropyLoss,
}


@dataclass
class Replacement:
    """What `replace` did, by the modules' names in the model ("" is the model itself).

    Attributes:
        swapped: kinds of the modules that Rooftop computes now.
        left: why modules of these kinds stay PyTorch's.
    """

    swapped: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{name or 'the model'}: {kind}" for name, kind in self.swapped.items()]
        lines += [f"{name or 'the model'}: left alone, {why}" for name, why in self.left.items()]
        return "\n".join(lines) or "nothing to replace"


def replace(model: torch.nn.Module, *, only: Iterable[str] | None = None) -> Replacement:
    """Make Rooftop compute a model's layer norms, RMS norms, softmaxes, embeddings and cross entropies, in place.

    Modules change their class and nothing else: parameters (shared ones, too), their names, dtypes and devices, hooks,
    the training flag and the optimizer that holds the parameters stay as they are. Do it before `torch.compile`.
    Second derivatives and the transforms of `torch.func` work as before, by PyTorch's own operators; only cross
    entropies on a GPU have no second derivative.

    Args:
        model: any module; those within it whose class is exactly one of `torch.nn` are looked at. Subclasses (of which
            nothing is known) and what is called as a function stay as they are; so does a Linear and what follows it,
            since modules do not show the order of calls: write `rooftop.nn.LinearAct` there.
        only: kinds to replace, of "LayerNorm", "RMSNorm", "Softmax", "LogSoftmax", "Embedding", "CrossEntropyLoss".

    Returns:
        What was swapped and what was left alone, and why; printed, one line a module.

    Raises:
        TypeError: model is no module.
        ValueError: a kind in `only` that there is not.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"replace: model must be a torch.nn.Module, got {type(model).__name__}")
    kinds = sorted(kind.__name__ for kind in SUBSTITUTES)
    wanted = _listed(only, kinds)
    done = Replacement()
    for name, module in model.named_modules():
        substitute = SUBSTITUTES.get(type(module))
        if substitute is None or substitute.__name__ not in wanted:
            continue
        reason = _reason_to_leave(module)
        if reason is not None:
            done.left[name] = reason
            continue
        module.__class__ = substitute
        if isinstance(module, CrossEntropyLoss):
            module.z_loss = 0.0
        done.swapped[name] = substitute.__name__
    return done


def _listed(only: Iterable[str] | None, kinds: list[str]) -> list[str]:
    if only is None:
        return kinds
    wanted = None if isinstance(only, str) or not isinstance(only, Iterable) else list(only)
    if wanted is None or any(each not in kinds for each in wanted):
        given = only if wanted is None else wanted
        wrong = next((each for each in wanted or () if each not in kinds), given)
        raise ValueError(f"replace: only must be some of {', '.join(kinds)}, got {given!r}{did_you_mean(wrong, kinds)}")
    return wanted


FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


def _reason_to_leave(module: torch.nn.Module) -> str | None:
    """Why this module would not give the same through Rooftop's operators."""
    if "forward" in vars(module):
        return "its forward was replaced"
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if type(tensor) not in PLAIN:
            return f"{name} is a {type(tensor).__name__}"
        if tensor.dtype not in FLOATS or tensor.device.type not in ("cpu", "cuda", "meta"):
            return f"{name} is {tensor.dtype} on {tensor.device.type}"
    if isinstance(module, torch.nn.Softmax | torch.nn.LogSoftmax) and module.dim is None:
        return "it does not say its dimension"
    if isinstance(module, torch.nn.Embedding):
        options = {
            "max_norm": module.max_norm,
            "scale_grad_by_freq": module.scale_grad_by_freq,
            "sparse": module.sparse,
        }
        used = [name for name, value in options.items() if value]
        return f"it uses {' and '.join(used)}" if used else None
    return None
