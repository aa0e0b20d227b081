"""Replace modules of an existing model by Rooftop's modules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rooftop.nn import recognizing
from rooftop.nn.copies import copy_sharing_tensors
from rooftop.nn.embeddings import Embedding
from rooftop.nn.losses import CrossEntropyLoss
from rooftop.nn.measuring import Measured, worthwhile
from rooftop.nn.norms import LayerNorm, RMSNorm
from rooftop.nn.softmaxes import LogSoftmax, Softmax
from rooftop.words import did_you_mean

SUBSTITUTES: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    torch.nn.LayerNorm: LayerNorm,
    torch.nn.RMSNorm: RMSNorm,
    torch.nn.Softmax: Softmax,
    torch.nn.LogSoftmax: LogSoftmax,
    torch.nn.Embedding: Embedding,
    torch.nn.CrossEntropyLoss: CrossEntropyLoss,
}
KINDS = tuple(sorted(kind.__name__ for kind in SUBSTITUTES.values()))
"""All kinds of modules that `replace` can swap."""

CALLS = (
    "a call on small inputs can be slower than PyTorch's: give `inputs` to time the call, or name the kind in `only`"
)
ON_CPU = "on a CPU a call on small inputs can be slower: give `inputs` to time the call, or name the kind in `only`"


@dataclass
class Replacement:
    """The changes that `replace` made, by module name ("" is the model itself).

    Attributes:
        swapped: the kind of each module that Rooftop computes now.
        left: for each module of a replaceable kind that was not replaced, the reason.
        measured: for each timed kind, the times of a step before and after its replacement.
    """

    swapped: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    measured: dict[str, Measured] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{name or 'the model'}: {kind}" for name, kind in self.swapped.items()]
        lines += [f"{name or 'the model'}: left alone, {why}" for name, why in self.left.items()]
        lines += [f"{kind}: {times.words}" for kind, times in self.measured.items() if times.pays]
        return "\n".join(lines) or "nothing to replace"


def replace(model: torch.nn.Module, *, only: Iterable[str] | None = None, inputs: Any = None) -> Replacement:
    """Make Rooftop compute a model's layer norms, RMS norms, softmaxes, embeddings and cross entropies, in place.

    Without `only` and `inputs`, only RMS norms of other libraries on a GPU are replaced, because they never get slower:
    one launch replaces the seven launches of PyTorch's operators in such a norm. For all other kinds, a call takes the
    host longer than a call of PyTorch's module, so the gain depends on sizes and on the whole model.

    Only the class of a module changes. Parameters (including shared ones), their names, dtypes and devices, hooks, the
    training flag, and optimizers of the parameters stay the same. Call `replace` before `torch.compile`. Second
    derivatives and the transforms of `torch.func` still work, because PyTorch's own operators compute them. A second
    derivative of a cross entropy on a GPU needs the logits (N, V), of which Rooftop keeps only a weak reference: keep
    them in a variable, and do not change them in place.

    Args:
        model: any module. Modules are replaced if their class is a class of `torch.nn` itself. RMS norms of any library
            are recognized by their results (`recognizing.py`) and replaced as well. Subclasses of `torch.nn` classes,
            and functions, are not replaced. A Linear is not fused with the operation after it, since a model does not
            show the order of its calls: use `rooftop.nn.LinearAct` for this.
        only: kinds to replace, some of `rooftop.nn.KINDS`. Without `inputs`, these kinds are replaced without being
            timed, which suits models that a CUDA graph replays.
        inputs: inputs of a typical call: a tensor, a tuple of arguments, or a dict of keyword arguments. With inputs,
            each kind is timed in the whole model, in the model's current mode, and is replaced only if this saves time.
            In training mode, forward and backward are timed. Timing changes no weights, buffers or random state.

    Returns:
        A `Replacement`, which prints one line per module.

    Raises:
        TypeError: model is not a module, or cannot be copied for timing.
        ValueError: `only` names an unknown kind.
        Exception: with `inputs`, any error that the model raises for these inputs.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"replace: model must be a torch.nn.Module, got {type(model).__name__}")
    wanted = _listed(only, KINDS)
    if inputs is not None:
        return _replace_what_pays(model, wanted, inputs)
    done = Replacement()
    for name, module in model.named_modules():
        substitute = SUBSTITUTES.get(type(module))
        if substitute is None and RMSNorm.__name__ in wanted and (norm := recognizing.recognized(module)) is not None:
            if only is None and next(module.parameters()).device.type == "cpu":
                done.left[name] = ON_CPU
                continue
            recognizing.substitute(module, norm)
            done.swapped[name] = RMSNorm.__name__
        if substitute is None or substitute.__name__ not in wanted:
            continue
        reason = _reason_to_leave(module) or (CALLS if only is None else None)
        if reason is not None:
            done.left[name] = reason
            continue
        module.__class__ = substitute
        if isinstance(module, CrossEntropyLoss):
            module.z_loss = 0.0
        done.swapped[name] = substitute.__name__
    return done


def _replace_what_pays(model: torch.nn.Module, wanted: list[str], inputs: Any) -> Replacement:
    """Replace the kinds of modules whose replacement makes a call with these inputs faster."""
    possible = replace(copy_sharing_tensors(model, "replace"), only=wanted)
    kinds = list(dict.fromkeys(possible.swapped.values()))
    measured = worthwhile(model, kinds, inputs, lambda same, names: replace(same, only=names))
    done = replace(model, only=[kind for kind in kinds if measured[kind].pays])
    slower = {name: kind for name, kind in possible.swapped.items() if not measured[kind].pays}
    done.left = possible.left | {name: f"it is not faster: {measured[kind].words}" for name, kind in slower.items()}
    done.measured = measured
    return done


def _listed(only: Iterable[str] | None, kinds: Sequence[str]) -> list[str]:
    if only is None:
        return list(kinds)
    wanted = None if isinstance(only, str) or not isinstance(only, Iterable) else list(only)
    if wanted is None or any(each not in kinds for each in wanted):
        given = only if wanted is None else wanted
        wrong = next((each for each in wanted or () if each not in kinds), given)
        close = f"; pass a list: [{only!r}]" if only in kinds else did_you_mean(wrong, kinds)
        raise ValueError(f"replace: `only` must be a list of some of {', '.join(kinds)}, got {given!r}{close}")
    return wanted


FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


def _reason_to_leave(module: torch.nn.Module) -> str | None:
    """The reason why Rooftop's operators cannot compute this module's results; None if they can."""
    if "forward" in vars(module):
        return "its forward was replaced"
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if type(tensor) not in PLAIN:
            return f"{name} is a {type(tensor).__name__}"
        if tensor.dtype not in FLOATS or tensor.device.type not in ("cpu", "cuda", "meta"):
            return f"{name} is {tensor.dtype} on {tensor.device.type}"
    if isinstance(module, torch.nn.Softmax | torch.nn.LogSoftmax) and module.dim is None:
        return "its dimension is unknown"
    if isinstance(module, torch.nn.Embedding):
        options = {
            "max_norm": module.max_norm,
            "scale_grad_by_freq": module.scale_grad_by_freq,
            "sparse": module.sparse,
        }
        used = [name for name, value in options.items() if value]
        return f"it uses {' and '.join(used)}" if used else None
    return None
