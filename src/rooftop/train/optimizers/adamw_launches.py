"""Launch AdamW: one launch updates all weights of the same dtypes; a table on the GPU lists their addresses.

The dtypes are those of the weight, its gradient, its moments and the model's weight.

One launch costs the host more time than the GPU needs to update a million elements. Python code per weight would cost
as much time as a launch per weight. So the plan of a step is kept for the next step, and the addresses of all weights
are compared at once. Usually no address has changed: gradients keep the previous step's addresses, and the table on the
GPU stays valid.

A CUDA graph would copy the table from the host at each replay. So a captured step launches a kernel for each weight,
which costs the host nothing in a replay.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import attrgetter, is_, methodcaller
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rooftop.launch.strides import same_layout
from rooftop.launch.triton_launch import INTERPRETED, Repeated, launch
from rooftop.parallel.sharded_data import local_of
from rooftop.parallel.uploads import uploaded
from rooftop.train.optimizers.main_weights import adopt_into

# The fastest choice in `benchmarks/adamw.py --variants` on an H200: a thread has eight elements, which are 16 bytes of
# bfloat16.
BLOCK, WARPS = 1024, 4
WEIGHTS = 128  # weights per program of `adamw_numbers`

_dtype = attrgetter("dtype")
_kept = [methodcaller("get", name) for name in ("step", "exp_avg", "exp_avg_sq")]  # read the entries of a state


@dataclass(frozen=True)
class AdamWOptions:
    """The options of a parameter group.

    Attributes:
        rate: the learning rate: a number, or a tensor of one element on a GPU.
        betas, eps, decay: constants of AdamW; `decay` is the weight decay.
    """

    rate: float | Tensor
    betas: tuple[float, ...]
    eps: float
    decay: float

    @classmethod
    def of(cls, group: dict[str, Any]) -> AdamWOptions:
        """Read the options of a PyTorch parameter group."""
        rate = group["lr"]
        rate = rate if isinstance(rate, Tensor) and rate.is_cuda else float(rate)
        return cls(rate, tuple(map(float, group["betas"])), group["eps"], group["weight_decay"])

    def constants(self, device: torch.device) -> Tensor:
        """The constants for `adamw_numbers`, (8,) float64: rate, 1 - rate * decay, beta1, 1 - beta1, beta2, 1 - beta2,
        log(beta1) and log(beta2)."""
        rate = 0.0 if isinstance(self.rate, Tensor) else self.rate
        beta1, beta2 = self.betas
        logarithms = [math.log(beta) if beta else -math.inf for beta in self.betas]
        numbers = [rate, 1 - rate * self.decay, beta1, 1 - beta1, beta2, 1 - beta2, *logarithms]
        made = _float64(numbers, device)
        if isinstance(self.rate, Tensor):
            made[0].copy_(self.rate.squeeze())
            made[1].sub_(made[0] * self.decay)
        return made


class AdamWPlan:
    """The plan of a step on one device: tables of addresses, and launches.

    Args:
        parameters: floating-point parameters without gaps in memory. For a sharded parameter, the plan updates this
            rank's part.
        states: states of the parameters: "step" () float32 on the device; "exp_avg" and "exp_avg_sq" with the memory
            layout of the parameter.
        models: for each parameter, the model's narrow weight; None if the model uses the parameter itself.
    """

    def __init__(
        self, parameters: Sequence[Tensor], states: Sequence[dict[str, Any]], models: Sequence[Tensor | None]
    ) -> None:
        self.parameters, self._states = list(parameters), list(states)
        self.device = self.parameters[0].device
        self._shared = any(isinstance(each, DTensor) for each in parameters)
        self.weights = [*map(local_of, self.parameters)]
        self._kept = [[*map(get, states)] for get in _kept]
        self.steps, averages, squares = self._kept
        self.averages, self.squares = [*map(local_of, averages)], [*map(local_of, squares)]
        self._models = [own for own in models if own is not None]
        self.narrow: list[Tensor | None] = []  # the model's weight; None for a pair in `_apart`
        # pairs whose memory layouts differ: (the model's weight, the updated tensor)
        self._apart: list[tuple[Tensor, Tensor]] = []
        for own, weight in zip(models, self.weights, strict=True):
            alike = own is not None and same_layout(own, weight)
            self.narrow.append(own.detach() if own is not None and alike else None)
            if own is not None and not alike:
                self._apart.append((own, weight))
        written = chain(self.parameters, averages, squares, self.narrow)
        self._written = [each for each in written if each is not None]
        self._strides = [*map(Tensor.stride, self.weights)]
        self._places = self._looked_at()
        self._stream: int | None = None
        self._options: AdamWOptions | None = None
        self._seen: tuple[Any, ...] = ()
        self._tables: dict[tuple[Any, ...], _Table] = {}

    def holds(self, parameters: Sequence[Tensor]) -> bool:
        """Whether the plan is for these parameters, and their addresses are unchanged.

        Addresses change if a user moves a model or replaces a state.
        """
        return (
            len(parameters) == len(self.parameters)
            and all(map(is_, parameters, self.parameters))
            and all(all(map(is_, map(get, self._states), kept)) for get, kept in zip(_kept, self._kept, strict=True))
            and self._looked_at() == self._places
        )

    def _looked_at(self) -> tuple[list[Any], ...]:
        weights = [*map(local_of, self.parameters)] if self._shared else self.parameters
        formed = [*weights, *self._models]
        return (
            [*map(Tensor.data_ptr, chain(formed, self.steps, self.averages, self.squares))],
            [*map(Tensor.size, formed)],
            [*map(Tensor.stride, formed)],
            [*map(_dtype, formed)],
        )

    def step(self, gradients: Sequence[Tensor], options: AdamWOptions, scale: Tensor | None) -> None:
        """Run one step on the current stream of the device.

        Args:
            gradients: gradients of the parameters, in any floating dtype.
            options: options of AdamW.
            scale: factor for all gradients, () on the device; or None.
        """
        if self._shared:
            gradients = [*map(local_of, gradients)]
        if any(map(Tensor.is_neg, gradients)) or any(map(Tensor._is_zerotensor, gradients)):
            gradients = [*map(_written_out, gradients)]  # the kernel reads plain memory
        if [*map(Tensor.stride, gradients)] != self._strides:
            gradients = [*map(_alike, gradients, self.weights)]
        for own, weight in self._apart:
            adopt_into(weight, own)
        if capturing(self.device):
            self._step_alone(gradients, options, scale)
        else:
            self._step_together(gradients, options, scale)
        for own, weight in self._apart:
            own.copy_(weight)
        torch.autograd.graph.increment_version(self._written)  # so that autograd detects the changes

    def _step_alone(self, gradients: Sequence[Tensor], options: AdamWOptions, scale: Tensor | None) -> None:
        from rooftop.train.optimizers.adamw_kernels import adamw_numbers, adamw_step

        torch._foreach_add_(self.steps, 1)
        numbers = torch.empty(len(self.steps), 8, dtype=torch.float64, device=self.device)
        launch(
            adamw_numbers, (-(-len(self.steps) // WEIGHTS),), self.device,
            torch.stack(self.steps), options.constants(self.device), numbers, len(self.steps), COUNTING=False,
            BLOCK=WEIGHTS,
        )  # fmt: skip
        every = zip(self.weights, gradients, self.averages, self.squares, self.narrow, numbers, strict=True)
        for weight, gradient, average, square, narrow, row in every:
            launch(
                adamw_step, (-(-weight.numel() // BLOCK),), self.device,
                weight, gradient, average, square, weight if narrow is None else narrow, row,
                row if scale is None else scale, weight.numel(),
                **_constants(weight.dtype, options.eps, narrow is not None, scale is not None),
            )  # fmt: skip

    def _step_together(self, gradients: Sequence[Tensor], options: AdamWOptions, scale: Tensor | None) -> None:
        stream = _stream(self.device)
        if stream != self._stream:
            self._move_to(stream)
        if isinstance(options.rate, Tensor) or options != self._options:
            self._options, self._of_options = options, options.constants(self.device)
        self._count(self._step_places, self._of_options, self._numbers)
        factor = None if scale is None else scale.dtype
        seen = ([*map(Tensor.data_ptr, gradients)], [*map(_dtype, gradients)], factor, options.eps)
        if seen != self._seen:
            self._seen, self._launches = seen, self._launches_for(gradients, factor, options.eps)
        for each in self._launches:
            each(self._numbers, self._numbers if scale is None else scale)

    def _move_to(self, stream: int) -> None:
        """Allocate the tables on the GPU again for another stream, because the allocator ties memory to a stream."""
        self._stream, self._options, self._seen = stream, None, ()
        self._tables.clear()
        from rooftop.train.optimizers.adamw_kernels import adamw_numbers

        count = len(self.steps)
        self._step_places = _int64([step.data_ptr() for step in self.steps], self.device)
        self._numbers = torch.empty(count, 8, dtype=torch.float64, device=self.device)
        self._count = Repeated(
            adamw_numbers,
            (-(-count // WEIGHTS),),
            self.device,
            [0, 0, 0, count],
            range(3),
            COUNTING=True,
            BLOCK=WEIGHTS,
        )

    def _launches_for(self, gradients: Sequence[Tensor], scale: torch.dtype | None, eps: float) -> list[_Table]:
        rows: dict[tuple[Any, ...], list[tuple[int, ...]]] = {}
        every = zip(self.weights, gradients, self.averages, self.squares, self.narrow, strict=True)
        for place, (weight, gradient, average, square, narrow) in enumerate(every):
            if not weight.numel():
                continue
            tensors = (weight, gradient, average, square, weight if narrow is None else narrow)
            addresses = [each.data_ptr() for each in tensors]
            aligned = all(address % 16 == 0 for address in addresses)
            key = (*map(_dtype, tensors), narrow is not None, aligned, scale, eps)
            rows.setdefault(key, []).append((*addresses, weight.numel(), place))
        for key, found in rows.items():
            if key not in self._tables:
                self._tables[key] = _Table(*key)
            self._tables[key].take(found, self.device)
        return [self._tables[key] for key in rows]


class _Table:
    """Table of the weights that one launch of `adamw_steps` updates. All these weights, and their states, have the same
    dtypes."""

    def __init__(
        self, weight: torch.dtype, gradient: torch.dtype, average: torch.dtype, square: torch.dtype,
        model: torch.dtype, has_narrow: bool, aligned: bool, scale: torch.dtype | None, eps: float,
    ) -> None:  # fmt: skip
        named = {"WEIGHT": weight, "GRADIENT": gradient, "AVERAGE": average, "SQUARE": square, "MODEL": model}
        self.constants = {name: _triton_dtype(dtype) for name, dtype in named.items()}
        self.constants |= {"ALIGNED": aligned, **_constants(weight, eps, has_narrow, scale is not None)}
        self._elements: list[int] = []

    def take(self, rows: Sequence[tuple[int, ...]], device: torch.device) -> None:
        """Build the table for `adamw_steps` from one row per weight, and add a column: the number of the weight's first
        program."""
        elements = [row[-2] for row in rows]
        if elements != self._elements:
            from rooftop.train.optimizers.adamw_kernels import adamw_steps

            programs = [-(-each // BLOCK) for each in elements]
            *self._firsts, count = accumulate(programs, initial=0)
            places = torch.arange(len(rows), dtype=torch.int32, device="cpu")
            self._row_of = uploaded(places.repeat_interleave(torch.tensor(programs, device="cpu")), device)
            self._launch = Repeated(adamw_steps, (count,), device, [0] * 4, range(4), **self.constants)
            self._elements = elements
        self._rows = _int64(
            chain.from_iterable((*row[:-1], first, row[-1]) for row, first in zip(rows, self._firsts, strict=True)),
            device,
        )

    def __call__(self, numbers: Tensor, scale: Tensor) -> None:
        self._launch(self._rows, self._row_of, numbers, scale)


def capturing(device: torch.device) -> bool:
    """Whether the device's current stream captures a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _constants(weight: torch.dtype, eps: float, has_narrow: bool, scaled: bool) -> dict[str, Any]:
    """The constants of `adamw_step` and of `adamw_steps`, and launch parameters."""
    import triton.language as tl

    wide = tl.float64 if weight == torch.float64 else tl.float32
    return {"eps": eps, "WIDE": wide, "NARROW": has_narrow, "SCALED": scaled, "BLOCK": BLOCK, "num_warps": WARPS}


def _triton_dtype(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return getattr(tl, str(dtype).removeprefix("torch."))


def _alike(gradient: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient in the memory layout of the weight; a gradient in a different layout is copied."""
    if same_layout(gradient, weight):
        return gradient
    return torch.empty_like(weight, dtype=gradient.dtype).copy_(gradient)


def _written_out(gradient: Tensor) -> Tensor:
    return torch.zeros_like(gradient) if gradient._is_zerotensor() else gradient.resolve_neg()


def _int64(numbers: Iterable[int], device: torch.device) -> Tensor:
    return uploaded(torch.frombuffer(array("q", numbers), dtype=torch.int64), device)


def _float64(numbers: Sequence[float], device: torch.device) -> Tensor:
    if capturing(device):  # a captured graph must not copy from the host
        return torch.stack([torch.full((), each, dtype=torch.float64, device=device) for each in numbers])
    return uploaded(torch.tensor(numbers, dtype=torch.float64, device="cpu"), device)


def _stream(device: torch.device) -> int:
    return 0 if INTERPRETED else int(torch._C._cuda_getCurrentRawStream(device.index))
