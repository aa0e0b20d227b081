"""An exponential moving average of a model's weights and buffers, used for evaluation and export.

    mean = MeanWeights(model, decay=0.999)
    mean.update(step)          # after each optimizer step, from 1
    with mean.swapped():       # the model has the averaged weights
        evaluate(model)

    mean <- d * mean + (1 - d) * weights, with d = min(decay, (1 + n) / (10 + n)) at update n

Polyak and Juditsky 1992; Tarvainen and Valpola 2017, "Mean teachers" (arXiv:1703.01780). As in TensorFlow's
ExponentialMovingAverage with `num_updates`, d starts low and rises. So even in a short run the mean soon forgets the
initial weights.

Means are kept in float32 or wider: in bfloat16, a change by 1 - decay would be rounded away. Integer buffers are
copied. The arithmetic is `torch._foreach_lerp_`, as in `torch.optim.swa_utils.AveragedModel`, but that class keeps a
second module in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rooftop.errors import InputError


class MeanWeights:
    """The moving average of all tensors in the model's state dict.

    Args:
        model: a model on its final device. The model's tensors must stay the same objects, as usual in training.
        decay: the maximum of the factor d, the weight of the old mean in an update (see the top of this file).
        every: steps between two updates.

    Raises:
        InputError: the decay is below 0, or is 1 or more. With 1, the mean would never change.
    """

    def __init__(self, model: nn.Module, decay: float, every: int = 1) -> None:
        if not 0 <= decay < 1:
            raise InputError(
                f"ema.decay is {decay:g}: expected at least 0 and below 1; with 1, the mean would never change"
            )
        self.decay, self.every = decay, every
        kept = {id(tensor): (name, tensor) for name, tensor in _tensors(model).items()}  # a shared tensor counts once
        self._live = {name: tensor for name, tensor in kept.values() if tensor.is_floating_point()}
        self._copied = {name: tensor for name, tensor in kept.values() if not tensor.is_floating_point()}
        self._mean = {name: _wide(tensor) for name, tensor in self._live.items()}
        self._copies = {name: tensor.clone() for name, tensor in self._copied.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """If `step` is a multiple of `every`, include the current weights in the running mean."""
        if step % self.every:
            return
        number = step // self.every
        decay = min(self.decay, (1 + number) / (10 + number))
        for means, live in self._by_dtype():
            torch._foreach_lerp_(
                means, [tensor.to(mean.dtype) for tensor, mean in zip(live, means, strict=True)], 1 - decay
            )
        for name, tensor in self._copied.items():
            self._copies[name].copy_(tensor)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Within the block, the model has the averaged weights. Afterwards it has its own weights again, bit for
        bit."""
        own = {name: tensor.clone() for name, tensor in {**self._live, **self._copied}.items()}
        try:
            self._give({**self._mean, **self._copies})
            yield
        finally:
            self._give(own)

    def state_dict(self) -> dict[str, Tensor]:
        """The averaged weights by the model's names, without copies: later updates change these tensors."""
        return {**self._mean, **self._copies}

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`.

        Raises:
            InputError: names or shapes differ from the model's.
        """
        own = self.state_dict()
        wrong = [name for name in own if name not in tensors or tensors[name].shape != own[name].shape]
        if wrong := wrong + [name for name in tensors if name not in own]:
            raise InputError(f"the loaded mean of the weights does not fit the model: {', '.join(sorted(wrong)[:3])}")
        for name, tensor in own.items():
            tensor.copy_(tensors[name])

    def _by_dtype(self) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        groups: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], list[Tensor]]] = {}
        for name, mean in self._mean.items():
            means, live = groups.setdefault((mean.dtype, mean.device), ([], []))
            means.append(mean)
            live.append(self._live[name].detach())
        yield from groups.values()

    @torch.no_grad()
    def _give(self, values: Mapping[str, Tensor]) -> None:
        for name, tensor in {**self._live, **self._copied}.items():
            tensor.copy_(values[name])


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """All tensors of the model's state dict, without copies."""
    return model.state_dict(keep_vars=True)


def _wide(tensor: Tensor) -> Tensor:
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return tensor.detach().to(wide, copy=True)
