"""What AdamW's kernels go through, and how they are launched: a kernel for each large weight, one for all small ones.

A launch takes the host longer than the GPU needs for the step of a million elements. So small weights share one, which
finds them by a table of addresses in the GPU's memory. The table goes there again only when an address has changed:
mostly gradients lie where those of the step before lay.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from rooftop.launch.triton_launch import INTERPRETED, Repeated
from rooftop.parallel.sharded_data import local_of

# The fastest on an H200 of `benchmarks/adamw.py --variants`: a thread has eight elements, 16 bytes of bfloat16.
BLOCK, WARPS = 1024, 4
SMALL = 1 << 22  # elements of a weight that shares a launch: of more the GPU has as much to do as the host


@dataclass(eq=False, slots=True)
class SteppedWeight:
    """What a step changes for one parameter: this rank's part, all with elements at the same places.

    Attributes:
        parameter, average, square: as the optimizer has them.
        model_has: the model's own weight beside it, or None.
        step: (), how many there have been.
    """

    parameter: Tensor
    model_has: Tensor | None
    step: Tensor
    average: Tensor
    square: Tensor
    weight: Tensor = field(init=False)
    narrow: Tensor | None = field(init=False)  # the model's weight, where it has its elements at the same places
    addresses: tuple[int, ...] = field(init=False)
    dtypes: tuple[torch.dtype, ...] = field(init=False)
    elements: int = field(init=False)
    changed: list[Tensor] = field(init=False)
    kept: tuple[Tensor, Tensor] = field(init=False)  # average and square, this rank's
    _seen: tuple[Any, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.weight = local_of(self.parameter)
        own = self.model_has
        self.narrow = own.detach() if own is not None and own.stride() == self.weight.stride() else None
        self.kept = local_of(self.average), local_of(self.square)
        every = (self.weight, *self.kept, self.weight if self.narrow is None else self.narrow)
        self.addresses = tuple([each.data_ptr() for each in every])
        self.dtypes = tuple([each.dtype for each in every])
        self.elements = self.weight.numel()
        changed = (self.parameter, self.average, self.square, self.narrow)
        self.changed = [each for each in changed if each is not None]
        self._seen = self._place()

    def is_still(self, model_has: Tensor | None, state: dict[str, Any]) -> bool:
        """Whether all of it is where it was; a user may move a model, load a state or change one."""
        return (
            state.get("step") is self.step
            and state.get("exp_avg") is self.average
            and state.get("exp_avg_sq") is self.square
            and model_has is self.model_has
            and self._place() == self._seen
        )

    def _place(self) -> tuple[Any, ...]:
        weight, own, (average, square) = local_of(self.parameter), self.model_has, self.kept
        return (
            weight.data_ptr(), weight.shape, weight.stride(), average.data_ptr(), square.data_ptr(), weight.dtype,
            None if own is None else (own.data_ptr(), own.stride(), own.dtype),
        )  # fmt: skip


class AdamWLaunches:
    """Those of a group of parameters, which keeps what it can for the next step."""

    def __init__(self) -> None:
        self._alone: dict[tuple[Any, ...], Repeated] = {}
        self._together: dict[tuple[Any, ...], _Together] = {}

    def __call__(
        self, weights: Sequence[SteppedWeight], gradients: Sequence[Tensor], numbers: Tensor, scale: Tensor | None,
        eps: float,
    ) -> None:  # fmt: skip
        """The step of all.

        Args:
            weights: on one device.
            gradients: of them, with elements at the same places.
            numbers: (weights, 8) float64 there, rows as `adamw_step` takes them.
            scale: (), or None.
            eps: of AdamW.
        """
        # A graph would copy its table from the host at each replay. It needs none: it launches without the host.
        share = not (numbers.is_cuda and torch.cuda.is_current_stream_capturing())
        shared: dict[tuple[Any, ...], list[tuple[int, ...]]] = {}
        for place, (each, gradient) in enumerate(zip(weights, gradients, strict=True)):
            if not each.elements:
                continue
            if share and each.elements <= SMALL:
                weight, average, square, narrow = each.addresses
                address = gradient.data_ptr()
                aligned = (weight | address | average | square | narrow) % 16 == 0
                key = (each.dtypes, gradient.dtype, each.narrow is not None, aligned)
                row = (weight, address, average, square, narrow, each.elements, place)
                shared.setdefault(key, []).append(row)
            else:
                self._step(each, gradient, numbers[place], scale, eps)
        for (dtypes, gradient_dtype, has_narrow, aligned), rows in shared.items():
            if len(rows) == 1:
                place = rows[0][-1]
                self._step(weights[place], gradients[place], numbers[place], scale, eps)
                continue
            options = (gradient_dtype, *dtypes, has_narrow, aligned, None if scale is None else scale.dtype, eps)
            together = self._together.get(options)
            if together is None:
                together = self._together[options] = _Together(*options)
            together(rows, numbers, scale)

    def _step(self, weight: SteppedWeight, gradient: Tensor, numbers: Tensor, scale: Tensor | None, eps: float) -> None:
        from rooftop.train.adamw_kernels import adamw_step

        none = numbers  # in the place of what there is not
        narrow, factor = (each if each is not None else none for each in (weight.narrow, scale))
        pointers = (weight.weight, gradient, *weight.kept, narrow, numbers, factor)
        constants = (eps, weight.narrow is not None, scale is not None)
        key = (weight.elements, *(each.dtype for each in pointers), *constants)
        launch = self._alone.get(key)
        if launch is None:
            launch = self._alone[key] = Repeated(
                adamw_step,
                (-(-weight.elements // BLOCK),),
                numbers.device,
                [*[0] * len(pointers), weight.elements],
                range(len(pointers)),
                **_constants(weight.weight.dtype, *constants),
            )
        launch(*pointers)


class _Together:
    """One launch for small weights of the same dtypes."""

    def __init__(
        self, gradient: torch.dtype, weight: torch.dtype, average: torch.dtype, square: torch.dtype,
        model: torch.dtype, has_narrow: bool, aligned: bool, scale: torch.dtype | None, eps: float,
    ) -> None:  # fmt: skip
        named = {"WEIGHT": weight, "GRADIENT": gradient, "AVERAGE": average, "SQUARE": square, "MODEL": model}
        self.constants = {name: _triton_dtype(dtype) for name, dtype in named.items()}
        self.constants |= {"ALIGNED": aligned, **_constants(weight, eps, has_narrow, scale is not None)}
        self._place: tuple[torch.device, int] | None = None
        self._rows: list[tuple[int, ...]] = []
        self._elements: list[int] = []

    def __call__(self, rows: list[tuple[int, ...]], numbers: Tensor, scale: Tensor | None) -> None:
        """Of rows of `adamw_steps`, without the first program."""
        place = (numbers.device, _stream(numbers.device))
        if place != self._place:  # memory is used anew by the stream for which it was made
            self._place, self._rows, self._elements = place, [], []
        if rows != self._rows:
            self._take(rows, numbers.device)
        self._launch(self._table, self._row_of, numbers, numbers if scale is None else scale)

    def _take(self, rows: list[tuple[int, ...]], device: torch.device) -> None:
        elements = [row[-2] for row in rows]
        if elements != self._elements:
            from rooftop.train.adamw_kernels import adamw_steps

            programs = torch.tensor([-(-each // BLOCK) for each in elements], device="cpu")
            self._firsts = (programs.cumsum(0) - programs).tolist()
            places = torch.arange(len(rows), dtype=torch.int32, device="cpu")
            self._row_of = _on(places.repeat_interleave(programs), device)
            self._launch = Repeated(adamw_steps, (len(self._row_of),), device, [0] * 4, range(4), **self.constants)
        whole = [(*row[:-1], first, row[-1]) for row, first in zip(rows, self._firsts, strict=True)]
        self._table = _on(torch.frombuffer(array("q", chain.from_iterable(whole)), dtype=torch.int64), device)
        self._rows, self._elements = rows, elements


def _constants(weight: torch.dtype, eps: float, has_narrow: bool, scaled: bool) -> dict[str, Any]:
    """Those that both kernels have, and launch parameters."""
    import triton.language as tl

    wide = tl.float64 if weight == torch.float64 else tl.float32
    return {"eps": eps, "WIDE": wide, "NARROW": has_narrow, "SCALED": scaled, "BLOCK": BLOCK, "num_warps": WARPS}


def _triton_dtype(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return getattr(tl, str(dtype).removeprefix("torch."))


def _on(tensor: Tensor, device: torch.device) -> Tensor:
    """There; the host does not wait for it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _stream(device: torch.device) -> int:
    return 0 if INTERPRETED else int(torch._C._cuda_getCurrentRawStream(device.index))
