"""Tune the gates of a ConvLSTM: tables FORWARD and BACKWARD of `recurrent/tables.py`.

    python benchmarks/tuning/conv_lstms.py [--out conv_lstms.json] [--seconds 100] [--quick]

The first tasks are the gates of one step of Keras's example, (8, 64, 64, 64 filters), channels last. They run as in a
layer: forward keeps the convolutions' sums, and backward gets both gradients of the hidden state. The other tasks are a
whole layer of three steps, for each kernel size of the example, in TFLOP/s of its convolutions. Their peers are the
convolutions without the gates, and the layer with algorithms that cuDNN chooses by trial
(`torch.backends.cudnn.benchmark`). TF32 is on, as in the benchmark of this example.
"""

from __future__ import annotations

from functools import partial

import torch
from candidates import QUICK, Call, Settings, Task, copies_past_cache, main, randn
from torch import Tensor

from rooftop.kernels.operands.launch_data import ElementsConfig
from rooftop.kernels.recurrent import conv_lstm_sequences, conv_lstms, tables

BATCH, FILTERS, SIDE = (1, 8, 3) if QUICK else (8, 64, 64)
STEPS = 2 if QUICK else 3
ACTIVATIONS = ("relu", "sigmoid")  # the activations of the layers in Keras's example
CELLS = BATCH * FILTERS * SIDE * SIDE
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def maps(channels: int, dtype: torch.dtype, batch: int = BATCH) -> Tensor:
    """(N, channels, H, W), channels last."""
    return randn(batch, SIDE, SIDE, channels, dtype=dtype).permute(0, 3, 1, 2)


# ---- the gates of a step ---------------------------------------------------------------------------------------

# Channels of each tensor in a step. "d" marks gradients.
FORWARD = (FILTERS, FILTERS, 4 * FILTERS, FILTERS, 4 * FILTERS, 4 * FILTERS)  # hidden, cell, gates, cell, added, sums
BACKWARD = (4 * FILTERS, *4 * (FILTERS,), 4 * FILTERS, FILTERS)  # dgates, dcell, dhidden twice, dcell, sums, cell


def repeats(dtype: torch.dtype) -> int:
    """How many problems to time in turn, so that they do not come from L2."""
    return copies_past_cache(19 * CELLS * dtype.itemsize)


def problems(dtype: torch.dtype, count: int | None, *channels: int) -> list[list[Tensor]]:
    return [[maps(c, dtype) for c in channels] for _ in range(count or repeats(dtype))]


def forward(dtype: torch.dtype, count: int | None = None) -> Call:
    given = problems(dtype, count, *FORWARD)

    def call() -> object:
        for hidden, following, gates, cell, added, sums in given:
            conv_lstms.step_into(hidden, following, gates, cell, added, None, sums, *ACTIVATIONS)
        hidden, following, *_, sums = given[0]
        return hidden, following, sums

    return call


def backward(dtype: torch.dtype, count: int | None = None) -> Call:
    given = problems(dtype, count, *BACKWARD)

    def call() -> object:
        for tensors in given:
            conv_lstms.step_backward_into(*tensors, None, *ACTIVATIONS)
        return given[0][:2]

    return call


def check_gates(made: object, dtype: torch.dtype) -> None:
    """Compare the kernel's result for a random problem with the reference's result."""
    torch.manual_seed(1)
    found = made(dtype, 1)()  # type: ignore[operator]
    torch.manual_seed(1)
    if made is forward:
        _, _, gates, cell, added, _ = problems(dtype, 1, *FORWARD)[0]
        expected = conv_lstms.conv_lstm_gates_reference(gates, cell, added, *ACTIVATIONS)
        expected = (*expected, gates.float() + added.float())
    else:
        _, _, first, second, dcell, sums, cell = problems(dtype, 1, *BACKWARD)[0]
        dhidden = first.float() + second.float()
        expected = conv_lstms.conv_lstm_gates_backward_reference(dhidden, dcell, sums, cell, None, *ACTIVATIONS)
    for mine, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.float(), exact.float(), rtol=2e-2, atol=2e-2)


def configs(table: str, *found: tuple[int, int]) -> dict[str, Settings]:
    """Candidates: elements per program, warps."""
    return {f"{e} elements {w}w": {(tables, table): ElementsConfig(e, w)} for e, w in found}


def gate_tasks(dtype: torch.dtype) -> tuple[Task, Task]:
    forwards = configs("FORWARD", (1024, 4), (512, 4), (2048, 8), (512, 2), (2048, 4), (1024, 8), (256, 2), (4096, 8))
    backwards = configs("BACKWARD", (512, 4), (1024, 8), (256, 2), (1024, 4), (512, 2), (256, 4), (2048, 8), (512, 8))
    moved, count = CELLS * dtype.itemsize, repeats(dtype)
    kind = NAMES[dtype]
    return (
        Task(
            f"gates forward {kind}",
            16 * moved,  # reads gates, added and cell; writes hidden, cell and sums
            forwards,
            partial(forward, dtype),
            partial(check_gates, forward, dtype),
            goal="copy",
            repeats=count,
        ),
        Task(
            f"gates backward {kind}",
            13 * moved,  # reads three gradients, sums and cell; writes the gradients of gates and cell
            backwards,
            partial(backward, dtype),
            partial(check_gates, backward, dtype),
            goal="copy",
            repeats=count,
        ),
    )


# ---- a layer ---------------------------------------------------------------------------------------------------


def layer(size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(gates of all steps, convolution kernel)."""
    gates = maps(4 * FILTERS, dtype, STEPS * BATCH).unflatten(0, (STEPS, BATCH))
    kernel = randn(4 * FILTERS, FILTERS, size, size, dtype=dtype) / (FILTERS * size * size) ** 0.5
    return gates, kernel.contiguous(memory_format=torch.channels_last)


def layer_forward(size: int, dtype: torch.dtype) -> Call:
    gates, kernel = layer(size, dtype)
    return lambda: conv_lstm_sequences._forward(gates, kernel, None, None, None, *ACTIVATIONS, True)


def layer_backward(size: int, dtype: torch.dtype) -> Call:
    gates, kernel = layer(size, dtype)
    outputs, cell, cells, sums = conv_lstm_sequences._forward(gates, kernel, None, None, None, *ACTIVATIONS, True)
    douts = randn(STEPS, BATCH, SIDE, SIDE, FILTERS, dtype=dtype).permute(0, 1, 4, 2, 3)
    given = (sums, kernel, None, None, outputs, cells, douts, torch.zeros_like(cell))
    return lambda: conv_lstm_sequences.ConvLstmSequenceBackward(*given, *ACTIVATIONS).run()


def convolutions(size: int, dtype: torch.dtype, of_backward: bool) -> Call:
    """The layer's convolutions without the gates."""
    gates, kernel = layer(size, dtype)
    hidden = [maps(FILTERS, dtype) for _ in range(STEPS - 1)]
    if not of_backward:
        return lambda: [conv_lstm_sequences.recurrent_convolution(h, kernel) for h in hidden]
    states = maps(FILTERS, dtype, (STEPS - 1) * BATCH)

    def call() -> object:
        found = [conv_lstm_sequences._input_gradient(g, h, kernel) for g, h in zip(gates[1:], hidden, strict=True)]
        return *found, conv_lstm_sequences._kernel_gradient(gates[1:].flatten(0, 1), states, kernel)

    return call


def by_trial(made: object, size: int, dtype: torch.dtype) -> Call:
    """Let cuDNN choose its algorithm for each shape by trial."""
    call = made(size, dtype)  # type: ignore[operator]

    def with_trial() -> object:
        before = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = True
        try:
            return call()
        finally:
            torch.backends.cudnn.benchmark = before

    return with_trial


def check_layer(made: object, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    found = made(size, dtype)()  # type: ignore[operator]
    torch.manual_seed(1)
    gates, kernel = (t.double().requires_grad_() for t in layer(size, dtype))
    outputs, cell = conv_lstm_sequences.conv_lstm_sequence_reference(gates, kernel, None, None, *ACTIVATIONS)
    expected = (outputs, cell)
    if made is layer_backward:
        douts = randn(STEPS, BATCH, SIDE, SIDE, FILTERS, dtype=dtype).permute(0, 1, 4, 2, 3)
        expected = torch.autograd.grad(outputs, (gates, kernel), douts.double())
    for mine, exact in zip(found[:2], expected, strict=True):
        # A few elements may differ, since rounding changes the gradient at an activation's kink.
        apart, largest = (mine.double() - exact.detach()).abs(), float(exact.detach().abs().max())
        share = float((apart > 0.03 * largest).double().mean())
        assert share < 1e-4, f"{share:.2g} of the elements differ by more than 3% of the largest"
        assert float(apart.norm() / exact.detach().norm()) < 0.03


def layer_task(size: int, dtype: torch.dtype, of_backward: bool) -> Task:
    made = layer_backward if of_backward else layer_forward
    table = "BACKWARD" if of_backward else "FORWARD"
    found = ((512, 4), (1024, 8), (256, 2)) if of_backward else ((1024, 4), (512, 2), (2048, 8))
    flops = (2 if of_backward else 1) * 2 * (STEPS - 1) * 4 * CELLS * FILTERS * size * size
    return Task(
        f"layer {size}x{size} {'backward' if of_backward else 'forward'} {NAMES[dtype]}",
        0,
        configs(table, *found),
        partial(made, size, dtype),
        partial(check_layer, made, size, dtype),
        {
            "convolutions": partial(convolutions, size, dtype, of_backward),
            "algorithms by trial": partial(by_trial, made, size, dtype),
        },
        goal="the convolutions",
        flops=flops,
    )


DTYPES = (torch.float32, torch.bfloat16)
LAYERS = [layer_task(size, d, backward_too) for size in (5, 3, 1) for d in DTYPES for backward_too in (False, True)]
TASKS = (*(task for dtype in DTYPES for task in gate_tasks(dtype)), *LAYERS)

if __name__ == "__main__":
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    main(TASKS, __doc__)
