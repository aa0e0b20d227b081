"""Sum the gradients of a split model over the ranks that hold the same parameters, and compute their norm over all
ranks.

    gradients = ModelGradients(model, layout.process_groups(), sequence_parallel=layout.sequence_parallel)
    with gradients.summing():
        loss.backward()
    gradients.sum_()
    norm = gradients.clip_(1.0)
    optimizer.step()

| parameter | gradient from a rank's backward | summed over |
|---|---|---|
| split | the whole gradient | |
| not split, with sequence parallelism (norms, row layers' biases, positions) | of the rank's positions | tensor ranks |
| not split, without sequence parallelism | the whole gradient | |
| heads of keys and values that several ranks hold | of the rank's queries | these ranks |
| any | of the rank's sequences | data ranks |
| tied, with a pipeline | of the embedding, or of the head | the first and the last stage |

Gradients are summed once a step, however many micro-batches the step has. The sums run after backward; over the data
ranks, the sums may run during the last backward (`summing`). If the parameters are sharded over the data ranks
(`fully_sharded`), backward itself sums over the data ranks, and each rank holds some rows of the sums.

Data ranks may use different parameters, such as different experts. All ranks sum all parameters in the same order. A
parameter without a gradient counts as 0. A parameter that no rank has used keeps the gradient None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import takewhile

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rooftop.parallel.exchanges import Group, place_in, start_sum
from rooftop.parallel.sharded_data import local_of, shard_here
from rooftop.parallel.shards import shards_of
from rooftop.parallel.sums import Sums
from rooftop.parallel.weight_places import WeightPlaces

ZERO = 1e-6  # added to the norm before `clip_` divides by it, as in torch.nn.utils.clip_grad_norm_


class ModelGradients:
    """Sums, norm and clipping of a model's gradients after backward.

    All ranks must create this object and call its methods together, because the calls communicate.

    Args:
        model: this rank's model. The `shards` of its layers say which parameters are split. The parameters may be
            sharded over the data ranks (`fully_sharded`).
        groups: groups by name, as from `Layout.process_groups`: "tp" and "dp-cp", and with a pipeline also "tp-pp" and
            "embedding".
        sequence_parallel: whether the tensor ranks' activations were split along the sequence.
        tied: the name of the parameter that the first and the last stage of a pipeline hold on different ranks
            (`rooftop.models.gpt.stages.GptStages.tied`); None if this rank has no such parameter.

    Attributes:
        parameters: the parameters that require gradients, by name.
        gradient_of: function that returns a parameter's gradient, in any dtype, or None if there is no gradient.
        widen: function that is called with a parameter before its gradient is changed. The function must leave the
            gradient in `.grad`.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Mapping[str, Group] | None = None,
        *,
        sequence_parallel: bool = False,
        tied: str | None = None,
    ) -> None:
        groups = groups or {}
        self.tensor, self.data = groups.get("tp"), groups.get("dp-cp")
        self.of_model = groups.get("tp-pp", self.tensor)  # the group of ranks that together hold one model
        self.sequence_parallel = sequence_parallel
        self.tied, self.tied_group = tied, groups.get("embedding") if tied is not None else None
        shards = shards_of(model)
        self._places = WeightPlaces(model)
        # A tied parameter is listed once, under its first name.
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._own = dict(self.parameters)
        self._during: _During | None = None
        self._used_nowhere: frozenset[str] = frozenset()  # in the last sum that was not captured
        self.gradient_of: Callable[[Tensor], Tensor | None] = lambda parameter: parameter.grad
        self.widen: Callable[[Tensor], None] = lambda parameter: None
        self.data_shares = any(isinstance(parameter, DTensor) for parameter in self.parameters.values())
        self.shards = {name: shard_here(p, shards[name]) for name, p in self.parameters.items() if name in shards}
        holders = {piece.holders for name in self.shards for piece in shards[name].pieces} - {1}
        self._sharing = {count: self._group_of(count) for count in sorted(holders)}

    def _group_of(self, holders: int) -> Group:
        """The group of `holders` adjacent tensor ranks that hold the same part of a parameter as this rank."""
        index, count = place_in(self.tensor)
        if holders == count or self.tensor is None:
            return self.tensor
        start = index // holders * holders
        ranks = dist.get_process_group_ranks(self.tensor)[start : start + holders]
        return dist.new_group(ranks, use_local_synchronization=True)  # type: ignore[no-any-return]

    @contextmanager
    def summing(self) -> Iterator[None]:
        """Within the block, backward starts to sum each gradient over the data ranks as soon as the gradient is ready.
        `sum_` later waits for the sums.

        Use `summing` on all ranks or on none, and only for the last backward of a step. Do not change gradients before
        `sum_`.

        Raises:
            RuntimeError: a second backward runs within the block, or earlier sums are not finished.
        """
        if self._during is not None:
            raise RuntimeError("ModelGradients: the last summing() is not complete: call sum_ before the next one")
        if self.data_shares or not _are_several(self.data):
            yield
            return
        hooks = [
            own.register_post_accumulate_grad_hook(partial(self._is_there, name))
            for name, own in self._own.items()
            if self._is_trained(name)
        ]
        self._during = _During(self._in_order(), Sums(self.data))
        try:
            yield
        except BaseException:
            self._during = None
            raise
        finally:
            for hook in hooks:
                hook.remove()

    def _is_there(self, name: str, _: Tensor) -> None:
        """Mark the gradient of the parameter `name` as ready, and start every sum over the ranks that can now start.
        All ranks must start their sums in the same order, so a gradient waits for the gradients before it in that
        order."""
        assert self._during is not None
        self._during.add(name, self._changed)

    @torch.no_grad()
    def sum_(self) -> None:
        """Sum all gradients over the ranks that hold the same parameters, in place.

        The loss must be a mean over the whole batch: use `reduction="sum"`, and divide by the number of targets on all
        ranks (`targets_of_all_ranks`).

        Raises:
            RuntimeError: other tensors have replaced the model's parameters (`load_state_dict` with assign=True), so
                this object cannot find their gradients.
            TypeError: a gradient is sparse.
        """
        self._places.check("ModelGradients.sum_")
        during, self._during = self._during or _During(self._in_order(), Sums(self.data)), None
        if not self.data_shares and _are_several(self.data):
            self._sum_over_data_ranks(during)
        for holders, group in self._sharing.items():
            _sum(self._shared(holders), group)
        if self.sequence_parallel:
            _sum((self._changed(name) for name, _ in self._here() if name not in self.shards), self.tensor)
        _sum((self._changed(name) for name, _ in self._here() if name == self.tied), self.tied_group)

    def _sum_over_data_ranks(self, during: _During) -> None:
        """Sum the gradients of all trained parameters, and how many ranks have used each parameter."""
        there = {name for name, _ in self._here()}
        trained = [name for name in self._in_order() if name in there or self._is_trained(name)]
        if not trained:
            return
        captured = self.parameters[trained[0]].is_cuda and torch.cuda.is_current_stream_capturing()
        if captured:  # the host cannot read which parameters are unused: use those of the last sum without capture
            trained = [name for name in trained if name not in self._used_nowhere]
        lacking = {name: place for place, name in enumerate(trained) if name not in there}
        for name in lacking:
            self.parameters[name].grad = torch.zeros_like(self.parameters[name])
        left = set(during.left)
        for name in trained:
            if name in left:
                during.sums.add(self._changed(name))
        users = self._changed(trained[0]).new_ones(len(trained))  # of the gradients' dtype, to share their bucket
        for place in lacking.values():
            users[place] = 0
        during.sums.add(users)
        during.sums.finish()
        if not captured:
            counts = users.tolist() if lacking else []
            self._used_nowhere = frozenset(name for name, place in lacking.items() if counts[place] == 0)
            for name in self._used_nowhere:
                self.parameters[name].grad = None

    def _is_trained(self, name: str) -> bool:
        """Whether the model's parameter still requires a gradient. It may have been frozen since `__init__`."""
        return name in self._own and self._own[name].requires_grad

    def _in_order(self) -> list[str]:
        """The names of the parameters, in the order in which backward usually computes their gradients."""
        return [*reversed(self.parameters)]

    def _here(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, gradient) of each parameter with a gradient; for sharded parameters, only this rank's rows."""
        for name, parameter in self.parameters.items():
            gradient = self.gradient_of(parameter)
            if gradient is not None:
                yield name, _dense(name, gradient)

    def _changed(self, name: str) -> Tensor:
        """Return this rank's rows of the gradient of the parameter `name`, to be changed in place. `widen` is called
        first. The gradient must exist."""
        self.widen(self.parameters[name])
        gradient = self.parameters[name].grad
        assert gradient is not None
        return _dense(name, gradient)

    def _shared(self, holders: int) -> Iterator[Tensor]:
        for name, _ in self._here():
            if name in self.shards and any(piece.holders == holders for piece in self.shards[name].pieces):
                parts = self.shards[name].parts(self._changed(name))
                yield from (part for piece, part in parts if piece.holders == holders)

    @torch.no_grad()
    def norm(self) -> Tensor:
        """The 2-norm of the whole model's gradient, (), the same on all ranks. The norm is float32, or float64 if a
        parameter is float64.

        Tensors that several ranks hold count once.
        """
        counted = list(self._counted())
        every = list(self.parameters.values())  # not only the counted ones, so that all ranks sum in the same dtype
        wide = torch.float64 if any(each.dtype == torch.float64 for each in every) else torch.float32
        device = every[0].device if every else torch.device("cpu")
        norms = _norms(counted, wide)
        total = torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=wide, device=device)
        total = start_sum(total, self.of_model)()
        return (start_sum(total, self.data)() if self.data_shares else total).sqrt()

    def _counted(self) -> Iterator[Tensor]:
        """Yield the gradients, or parts of gradients, that this rank adds to the model's gradient norm. If several
        tensor or pipeline ranks have the same gradient, only one of them adds it."""
        first = place_in(self.tensor)[0] == 0
        for name, gradient in self._here():
            if name == self.tied and place_in(self.tied_group)[0] > 0:
                continue  # the first stage adds this gradient
            if name in self.shards:
                yield from (part for piece, part in self.shards[name].parts(gradient) if piece.first)
            elif first:
                yield gradient

    @torch.no_grad()
    def clip_(self, most: float) -> Tensor:
        """Scale all gradients in place, so that their norm is at most `most`. Return the norm before scaling.

        Raises:
            ValueError: `most` is NaN, 0 or negative. (A negative value would reverse the gradients.)
        """
        norm, scale = self.scale_for(most)
        gradients = [self._changed(name) for name, _ in self._here()]
        if gradients:
            torch._foreach_mul_(gradients, scale)
        return norm

    @torch.no_grad()
    def scale_for(self, most: float) -> tuple[Tensor, Tensor]:
        """Return the norm, and the factor by which `clip_` would multiply all gradients, () each. `scale_for` is for
        optimizers that scale gradients themselves.

        Raises:
            ValueError: as in `clip_`.
        """
        if not most > 0:
            raise ValueError(f"ModelGradients: the maximum norm must be above 0 (inf: no limit), got {most}")
        norm = self.norm()
        return norm, (most / (norm + ZERO)).clamp(max=1.0) if most < math.inf else torch.ones_like(norm)


def targets_of_all_ranks(targets: Tensor, data: Group, ignore_index: int = -100) -> Tensor:
    """The number of targets that are not ignored, over all data ranks: (), int64. Each rank divides the sum of its own
    targets' losses by this number.

    The number is at least 1. So if all targets are ignored, the loss and its gradient are 0.
    """
    counted: Tensor = start_sum((targets != ignore_index).sum(), data)()
    return counted.clamp(min=1)


def _dense(name: str, gradient: Tensor) -> Tensor:
    """This rank's rows of a parameter's gradient, which must be dense."""
    if gradient.layout != torch.strided:
        raise TypeError(
            f"ModelGradients: the gradient of {name} has the layout {gradient.layout}, expected dense gradients: "
            "create embeddings without sparse=True"
        )
    return local_of(gradient)


def _are_several(group: Group) -> bool:
    return group is not None and group.size() > 1


def _sum(tensors: Iterable[Tensor], group: Group) -> None:
    """Sum each tensor over the group's ranks, in place."""
    if not _are_several(group):
        return
    sums = Sums(group)
    for tensor in tensors:
        sums.add(tensor)
    sums.finish()


class _During:
    """The sums that backward has started, and the sums that backward has not started yet.

    Args:
        order: names in the order in which all ranks sum.
    """

    def __init__(self, order: list[str], sums: Sums) -> None:
        self.left, self.sums = order, sums
        self._there: set[str] = set()

    def add(self, name: str, gradient_of: Callable[[str], Tensor]) -> None:
        """Mark a gradient as ready. Then start the sums of all gradients that precede, in the common order, the first
        gradient that is not ready.
        """
        if name in self._there:
            raise RuntimeError(
                f"ModelGradients: a second backward within summing(), for {name}: use summing() only for the last "
                "backward of a step"
            )
        self._there.add(name)
        ready = list(takewhile(self._there.__contains__, self.left))
        self.left = self.left[len(ready) :]
        for each in ready:
            self.sums.add(gradient_of(each))


def _norms(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The 2-norm of each tensor, as a scalar tensor, in a few launches for each dtype. The results are grouped by
    dtype, and not in the tensors' order.
    """
    of_dtypes: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        of_dtypes.setdefault(tensor.dtype, []).append(tensor)
    return [norm for alike in of_dtypes.values() for norm in torch._foreach_norm(alike, 2.0, dtype)]
