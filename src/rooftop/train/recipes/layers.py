"""Assign each parameter to a layer of the model, counted from the input.

The structure of the modules determines the layers: a chain is an `nn.Sequential` or `nn.ModuleList` of blocks.
Each block is a layer. Everything before the first block is one layer (the stem), and everything after the last block is
one layer (the head with the norm before it). A module between two chains, such as a patch merging of Swin, belongs to
the preceding block.

| model | layers |
|---|---|
| ResNet-50 | conv1 and bn1, 16 blocks, fc |
| Swin-T | patches, 12 blocks (and 3 mergings), norm and head |
| ViT | embeddings, blocks, norm and head |
| `nn.Sequential(Linear, ReLU, Linear)` | one per member that has parameters; a norm belongs to the preceding member |

The counting of layers follows Bao et al. 2021, "BEiT" (arXiv:2106.08254), and Xie et al. 2022, "SimMIM"
(arXiv:2111.09886), for Swin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import nn

from rooftop.errors import InputError
from rooftop.train.recipes.parameter_kinds import is_norm

CHAINS = (nn.Sequential, nn.ModuleList)
REPEATED = ("blocks", "layer", "layers", "stages")
"""Names of inner chains whose members are layers, e.g. the blocks inside a stage, which is itself a member of a chain.
An inner chain with any other name is part of a block.
"""


_Test = Callable[[nn.Module], bool]


@dataclass(frozen=True)
class _Unit:
    """A module that no layer boundary divides; or the parameters that a divided module holds directly.

    Attributes:
        names: names of the unit's parameters.
        chained: whether the unit is a whole member of a chain.
        between: whether the unit is chained, and a later member of the same chain contains layers.
        leaf: whether the unit has no submodules.
        norm, own: whether the unit is a norm; whether it consists of the direct parameters of a divided module.
    """

    names: list[str]
    chained: bool
    between: bool = False
    leaf: bool = True
    norm: bool = False
    own: bool = False


def layers_of(model: nn.Module) -> list[list[str]]:
    """List the parameter names of each layer, from the first layer to the last.

    Raises:
        InputError: the model has no chain of layers, or several chains whose order is unknown.
    """
    for divides in (_is_chain, _is_sequence):
        parents = {path.rpartition(".")[0] for path in _outermost_chains(model, "", divides)}
        if parents:
            break
    if len(parents) > 1:
        where = ", ".join(sorted(parent or "the model itself" for parent in parents))
        raise InputError(
            f"the layers of {type(model).__name__} are in several parts ({where}), and its structure does not say "
            "which comes first: set optimizer.layer_decay=1"
        )
    layers = _merged(list(_units(model, "", divides, inside=divides(model)))) if parents else []
    if len(layers) < 2:
        raise InputError(
            f"{type(model).__name__} has no consecutive layers, i.e. no nn.Sequential or nn.ModuleList of layers: "
            "set optimizer.layer_decay=1"
        )
    return layers


def _is_sequence(module: nn.Module) -> bool:
    return isinstance(module, CHAINS) and sum(_has_parameters(child) for child in module.children()) > 1


def _is_chain(module: nn.Module) -> bool:
    """Whether a module is a chain: a sequence in which some members have submodules."""
    return _is_sequence(module) and any(_has_parts(child) for child in module.children())


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _has_parts(module: nn.Module) -> bool:
    return any(_has_parameters(child) for child in module.children())


def _outermost_chains(module: nn.Module, path: str, divides: _Test) -> Iterator[str]:
    if divides(module):
        yield path
        return
    for name, child in module.named_children():
        yield from _outermost_chains(child, _joined(path, name), divides)


def _is_divided(module: nn.Module, divides: _Test, inside: bool) -> bool:
    """Whether a module is or contains a chain of layers.

    Args:
        inside: whether the module is in a chain. If so, a chain below the module counts only if its attribute name is
            in `REPEATED`. A member of a chain that has no such chain below it is a block, i.e. one layer.
    """
    if divides(module):
        return True
    for name, child in module.named_children():
        if divides(child) and inside and name not in REPEATED:
            continue
        if _is_divided(child, divides, inside):
            return True
    return False


def _units(module: nn.Module, path: str, divides: _Test, inside: bool) -> Iterator[_Unit]:
    own = [_joined(path, name) for name, _ in module.named_parameters(recurse=False)]
    if own:
        yield _Unit(own, chained=False, own=True)
    children = [(name, child) for name, child in module.named_children() if _has_parameters(child)]
    divided = [_is_divided(child, divides, inside) for _, child in children]
    for place, (name, child) in enumerate(children):
        whole = _joined(path, name)
        if divided[place]:
            yield from _units(child, whole, divides, inside or divides(child))
            continue
        between = divides(module) and any(divided[place + 1 :])
        names = [_joined(whole, each) for each, _ in child.named_parameters()]
        yield _Unit(names, divides(module), between, leaf=not _has_parts(child), norm=is_norm(child))


def _merged(units: list[_Unit]) -> list[list[str]]:
    """Merge units of modules into layers: the stem, then the blocks, then the head. Each layer is a list of parameter
    names."""
    blocks = [place for place, unit in enumerate(units) if unit.chained and not unit.norm]
    if not blocks:
        return []
    first, end = blocks[0], blocks[-1] + 1
    stem = [name for unit in units[:first] for name in unit.names]
    layers = [stem] if stem else []
    after_leaf = True
    waiting: list[str] = []  # names of norms that are counted with the next block
    for unit in units[first:end]:
        if layers and (not unit.chained or unit.between or (unit.norm and after_leaf)):
            layers[-1] += unit.names
        elif unit.norm:
            waiting += unit.names
        else:
            layers.append([*waiting, *unit.names])
            waiting, after_leaf = [], unit.leaf
    head = units[end:]
    names = [name for unit in head for name in unit.names]
    if all(unit.own or unit.norm for unit in head):
        layers[-1] += names
    else:
        layers.append(names)
    return layers


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
