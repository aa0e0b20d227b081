"""Tune the merging of attention states: tables MERGE_FORWARD and MERGE_BACKWARD of `attentions/tables.py`.

python benchmarks/tuning/attention_states.py [--out attention_states.json] [--seconds 10] [--quick]
"""

from __future__ import annotations

from functools import partial

import torch
from candidates import QUICK, Call, Settings, Task, main, randn
from torch import Tensor

from rooftop.kernels.attentions import states as attention_states
from rooftop.kernels.operands.launch_data import ElementsConfig

Shape = tuple[int, int, int]  # B, H, S


def measured(width: int) -> Shape:
    return (1, 2, 3) if QUICK else (8, 32, 4096 * 128 // width)


def small() -> Shape:
    return (1, 2, 3) if QUICK else (1, 32, 128)


def states(shape: Shape, width: int) -> list[Tensor]:
    """(out_a, lse_a, out_b, lse_b)."""
    return [t for _ in range(2) for t in gradients(shape, width)]


def gradients(shape: Shape, width: int) -> tuple[Tensor, Tensor]:
    """(dout, dlse)."""
    return randn(*shape, width), randn(*shape, dtype=torch.float32)


def forward(width: int) -> Call:
    tensors = states(measured(width), width)
    return lambda: attention_states._states(*tensors)


def backward(width: int) -> Call:
    tensors, (dout, dlse) = states(measured(width), width), gradients(measured(width), width)
    return lambda: attention_states._states_backward(dout, dlse, *tensors)


def check_forward(width: int) -> None:
    tensors = states(small(), width)
    exact = attention_states.merge_reference(*(t.double() for t in tensors))
    for found, expected in zip(attention_states._states(*tensors), exact, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=1e-2)


def check_backward(width: int) -> None:
    tensors, (dout, dlse) = states(small(), width), gradients(small(), width)
    exact = attention_states.merge_backward_reference(dout.double(), dlse.double(), *(t.double() for t in tensors))
    for found, expected in zip(attention_states._states_backward(dout, dlse, *tensors), exact, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=2e-2)


def configs(table: str, *found: tuple[int, int]) -> dict[str, Settings]:
    """Candidates: elements per tile, warps."""
    return {f"{n} {w}w": {(attention_states, table): ElementsConfig(n, w)} for n, w in found}


def tasks(width: int) -> tuple[Task, Task]:
    width = 16 if QUICK else width
    batch, heads, positions = measured(width)
    elements = batch * heads * positions * width
    forwards = configs(
        "MERGE_FORWARD", (1024, 2), (2048, 4), (512, 1), (512, 2), (1024, 1), (256, 1), (2048, 2), (4096, 8), (8192, 8)
    )
    backwards = configs("MERGE_BACKWARD", (1024, 4), (512, 2), (2048, 8), (1024, 2))
    back = partial(backward, width), partial(check_backward, width)
    return (
        Task(
            f"forward {width}",
            6 * elements,
            forwards,
            partial(forward, width),
            partial(check_forward, width),
            goal="copy",
        ),
        Task(f"backward {width}", 10 * elements, backwards, *back, goal="copy"),
    )


TASKS = (*tasks(128), *tasks(64))

if __name__ == "__main__":
    main(TASKS, __doc__)
