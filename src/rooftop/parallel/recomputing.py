"""Activation recomputation: backward recomputes tensors that forward does not save, which trades compute for memory.

| recompute | saved for a block | recomputed in backward |
|---|---|---|
| False | everything that autograd needs | nothing |
| "selective" | tensors that are expensive to compute | large tensors that are cheap to compute: see below |
| True or "full" | the block's input | the whole block, a third more flops |

Selective recomputation drops tensors that elementwise work can recompute from tensors that are saved anyway:

| dropped tensor | needed by | recomputed from |
|---|---|---|
| the results of both norms | weight gradients of qkv and of the MLP's first layer | the inputs that the norms save |
| normed or rotated queries and keys | attention | the projections, which are saved for the values |
| attention's result in the order of positions | the output layer's weight gradient | attention's result |
| the MLP's activated features | the last layer's weight gradient | the activation's input |
| attention weights after dropout | attention in plain PyTorch | queries, keys and values, by two products |

With sequence parallelism, the layers after the norms would save all positions. Instead, backward recomputes this rank's
positions. Backward gathers the other ranks' positions while it computes the gradient of the input.

Gradients are the same bit for bit as without recomputation, because the same kernels compute the same tensors, and
backward uses forward's dropout masks.

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv:2205.05198).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from rooftop.parallel.dropouts import CounterDropouts, Place
from rooftop.words import did_you_mean

Recompute = bool | str
"""What backward recomputes: nothing (False), whole blocks (True or "full"), or cheap, large tensors ("selective")."""
GRANULARITIES = ("full", "selective")
Result = TypeVar("Result")


def granularity_of(recompute: Recompute, caller: str) -> str | None:
    """Normalize the setting to "full", "selective", or None (nothing is recomputed).

    Raises:
        ValueError: the value is not a valid setting.
    """
    if recompute is False or recompute is None:
        return None
    if recompute is True:
        return "full"
    if recompute not in GRANULARITIES:
        hint = did_you_mean(recompute, GRANULARITIES) if isinstance(recompute, str) else ""
        raise ValueError(f"{caller}: recompute must be False, True, 'full' or 'selective', got {recompute!r}{hint}")
    return recompute


# ---- whole functions -----------------------------------------------------------------------------------------------


def recomputed(function: Callable[..., Result], masks: CounterDropouts | None, *given: Tensor | None) -> Result:
    """Call a function and return its result. Backward recomputes the result, with the same dropout masks.

    Args:
        masks: the function's dropouts, if they are counter-based. None: other dropouts or none; backward then restores
            the generators' states.
        given: the function's arguments, which are saved for backward.
    """
    place = masks.place if masks is not None else Place()
    step = place.step
    version = step._version if isinstance(step, Tensor) else 0

    def run(*arguments: Tensor | None) -> Result:
        if isinstance(step, Tensor) and step._version != version:
            raise RuntimeError(
                "recompute: the step tensor was changed before backward, which needs forward's masks: change it "
                "after backward"
            )
        with masks.at(place) if masks is not None else nullcontext():
            return function(*arguments)

    # Counter-based masks need no generator state.
    return checkpoint(run, *given, use_reentrant=False, preserve_rng_state=masks is None)  # type: ignore[no-any-return]


# ---- single tensors ------------------------------------------------------------------------------------------------


@contextmanager
def made_again(made: Sequence[Tensor], make: Callable[..., Sequence[Tensor]], *sources: Tensor) -> Iterator[None]:
    """Within the block, autograd does not save the tensors in `made`; backward recomputes them by make(*sources).

    A tensor that shares memory with a source is saved, because dropping it would free nothing.

    Args:
        made: the results of make(*sources).
        make: recomputes the same tensors, without gradients.
        sources: the tensors to recompute from, preferably tensors that are saved anyway.
    """
    if not torch.is_grad_enabled():
        yield
        return
    held = {_memory(source) for source in sources}
    places = {_memory(each): place for place, each in enumerate(made) if _memory(each) not in held}
    recipes = [_Recipe(make, sources, made)] if places else []

    def keep(tensor: Tensor) -> _Kept | _Dropped:
        place = places.get(_memory(tensor)) if recipes else None
        return _Kept(tensor) if place is None else _Dropped(recipes[0], place, tensor)

    try:
        with saved_tensors_hooks(keep, _needed):
            yield
    finally:
        recipes.clear()  # PyTorch may keep the hooks alive, but the hooks must not keep the sources alive


def as_multiplied(x: Tensor) -> Tensor:
    """Cast x to the dtype in which linear layers compute under autocast. Without autocast, return x."""
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x


def _memory(tensor: Tensor) -> int:
    """A key that is equal for tensors that share memory, also on the meta device."""
    return tensor.untyped_storage()._cdata


class _Kept:
    """A saved tensor, with a check that it was not modified. PyTorch has no such check for saved tensors with hooks."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor, tensor._version

    def needed(self) -> Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"a tensor {tuple(self.tensor.shape)} that backward needs was modified by an inplace operation after "
                f"forward: call backward first, or change a copy"
            )
        return self.tensor


class _Recipe:
    """Recomputes tensors that were dropped together.

    Attributes:
        wanted: indices in `made` of the dropped tensors.
        ready: tensors that are recomputed and not yet taken, by their indices in `made`.
    """

    def __init__(
        self, make: Callable[..., Sequence[Tensor]], sources: Sequence[Tensor], made: Sequence[Tensor]
    ) -> None:
        self.make, self.sources = make, [_Kept(source.detach()) for source in sources]
        self.layouts = [(each.shape, each.stride(), each.dtype) for each in made]
        self.wanted: set[int] = set()
        self.ready: dict[int, Tensor] = {}
        self.autocast = _autocast_of(made[0].device.type)

    def take(self, place: int) -> Tensor:
        if place not in self.ready:
            with torch.no_grad(), self.autocast():
                made = self.make(*(source.needed() for source in self.sources))
            if [(each.shape, each.stride(), each.dtype) for each in made] != self.layouts:
                raise RuntimeError(
                    f"recompute: backward recomputed {[tuple(each.shape) for each in made]}, but forward had computed "
                    f"{[tuple(shape) for shape, *_ in self.layouts]}, or the dtype or memory layout differs: the model "
                    f"has changed in between. Leave recompute out, or change the model after backward"
                )
            self.ready = {other: each for other, each in enumerate(made) if other in self.wanted}
        return self.ready.pop(place)


class _Dropped:
    """Stands for a saved tensor that is a view of a dropped tensor. Backward recomputes the dropped tensor."""

    __slots__ = ("place", "recipe", "view")

    def __init__(self, recipe: _Recipe, place: int, tensor: Tensor) -> None:
        self.recipe, self.place = recipe, place
        self.view = (tensor.shape, tensor.stride(), tensor.storage_offset())
        recipe.wanted.add(place)

    def needed(self) -> Tensor:
        return self.recipe.take(self.place).as_strided(*self.view)


def _needed(packed: _Kept | _Dropped) -> Tensor:
    return packed.needed()


def _autocast_of(device: str) -> Callable[[], AbstractContextManager[Any]]:
    """Return a function that restores the current state of autocast."""
    if not torch.amp.is_autocast_available(device):  # the meta device has no autocast
        return nullcontext
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    cached = torch.is_autocast_cache_enabled()
    return lambda: torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cached)
