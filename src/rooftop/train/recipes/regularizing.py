"""Switch on dropout and stochastic depth in an existing model.

    regularize(model, recipe.model)  # a probability of 0 leaves the model unchanged

Dropout (Srivastava et al. 2014) is set in all dropout layers of the model. A model without dropout layers, such as a
ResNet, gets dropout before its last linear layer. Stochastic depth (Huang et al. 2016, arXiv:1603.09382) skips the last
residual block with the given probability and never the first block; in between, the probability rises linearly (section
3).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from rooftop.errors import InputError
from rooftop.models.vision.resnet import Block
from rooftop.models.vision.swin import stochastic_depth
from rooftop.train.recipes.recipe import Model

DROPPING = {"StochasticDepth": "p", "DropPath": "drop_prob"}
"""Classes of this library, torchvision and timm that skip a branch, and the attribute that holds the probability."""


def regularize(model: nn.Module, section: Model) -> list[str]:
    """Switch on dropout and stochastic depth if the recipe sets them above 0. A second call with the same section
    changes nothing more.

    Returns:
        Descriptions of the changes.

    Raises:
        InputError: the model has no layer for dropout, or no residual block.
    """
    said = []
    if section.dropout:
        said.append(f"dropout {section.dropout:g} in {_set_dropout(model, section.dropout)}")
    if section.stochastic_depth:
        blocks = _set_stochastic_depth(model, section.stochastic_depth)
        said.append(f"stochastic depth up to {section.stochastic_depth:g} in {blocks} blocks")
    return said


class InputDropout:
    """Forward pre-hook: dropout of a layer's input in training."""

    def __init__(self, p: float) -> None:
        self.p = p

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *others = args
        return (nn.functional.dropout(x, self.p, module.training), *others)


class BranchDropout:
    """Forward hook of a branch's last module: in training, set the output to 0 for each sample with probability p, and
    divide the other samples' output by 1 - p (stochastic depth)."""

    def __init__(self, p: float) -> None:
        self.p = p

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return stochastic_depth(output, self.p, module.training)


def _set_dropout(model: nn.Module, p: float) -> str:
    """Set p of all dropout layers, or add dropout before the last linear layer; return a description of these
    layers."""
    count = 0
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = p
            count += 1
        elif isinstance(getattr(module, "dropout", None), float):  # attention and recurrent layers store a float
            module.dropout = p  # type: ignore[assignment]
            count += 1
    if count:
        return f"{count} layers"
    named = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not named:
        raise InputError(f"{type(model).__name__} has no dropout and no linear layer: set model.dropout=0")
    name, last = named[-1]
    hook = next((each for each in last._forward_pre_hooks.values() if isinstance(each, InputDropout)), None)
    if hook is None:
        last.register_forward_pre_hook(InputDropout(p))
    else:
        hook.p = p
    return f"the input of {name or 'the model'}"


def _set_stochastic_depth(model: nn.Module, highest: float) -> int:
    """Set the probability of skipping each residual block; returns the number of blocks."""
    blocks: list[list[nn.Module]] = []  # for each block, the modules that can skip its branches
    for module in model.modules():
        own = [child for child in module.children() if type(child).__name__ in DROPPING]
        if isinstance(module, Block):
            own = [module.last_norm]
        if own:
            blocks.append(own)
    if not blocks:
        raise InputError(f"{type(model).__name__} has no residual blocks to skip: set model.stochastic_depth=0")
    for number, parts in enumerate(blocks):
        p = highest * number / max(1, len(blocks) - 1)
        for part in parts:
            if type(part).__name__ in DROPPING:
                setattr(part, DROPPING[type(part).__name__], p)
            else:
                _set_hook(part, p)
    return len(blocks)


def _set_hook(norm: nn.Module, p: float) -> None:
    hook = next((each for each in norm._forward_hooks.values() if isinstance(each, BranchDropout)), None)
    if hook is not None:
        hook.p = p
    elif p:
        norm.register_forward_hook(BranchDropout(p))
