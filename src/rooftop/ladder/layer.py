"""The layer ladder: y = sigmoid(x W^T + b) in float32, for n rows with n input and n output features, on the CPU and on
the GPU.

The layer takes 2 n^3 flops for 12 n^2 bytes, so arithmetic bounds the layer if n is in the hundreds or more. TF32 is
off: all rungs multiply in float32. The same kernels also train a network: see `digits.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rooftop.cost import Cost
from rooftop.ladder.digits import PLAIN, SIGMOID, train_and_compare
from rooftop.ladder.rungs import (
    CPU,
    CUDA,
    PYTORCH,
    TRITON,
    Ladder,
    Rung,
    interleave,
    kernel,
    triton_missing,
    triton_rungs,
)
from rooftop.launch.triton_launch import launch

FILE = "layer.cu"
# Threads of a block in CUDA C++, and elements of a program in Triton; Triton's `bias_sigmoid` has four times as many.
BLOCK = 256
TILE = 64  # rows and columns of a tile of the CUDA C++ product
TRITON_TILE = (64, 64, 32, 4, 2)  # rows, columns and depth of a tile, warps, stages; not tuned
EACH, APART, FUSED = "one thread per output", "tiles; bias and sigmoid apart", "tiles; bias and sigmoid fused"


def make(size: int, device: torch.device) -> Ladder:
    """The layer ladder for `size` rows of `size` features."""
    x, bias = torch.randn(size, size, device=device), torch.randn(size, device=device)
    weight = torch.randn(size, size, device=device) / size**0.5
    y = torch.empty(size, size, device=device)
    triton = triton_rungs(device, lambda: _products(TRITON, TritonOperations(), x, weight, bias, y), (APART, FUSED))
    without = Rung(EACH, TRITON, None, note="Triton's programs compute tiles")
    return Ladder(
        name="layer",
        work=f"y = sigmoid(x W^T + b), {size:,} rows of {size:,} features to {size:,}, float32",
        unit="FLOP/s",
        source=FILE,
        cost=Cost(4 * (2 * size * size + size), 4 * size * size, {"fp32": 2 * size**3}),
        exact=torch.sigmoid(x.double() @ weight.double().t() + bias.double()),
        rungs=(
            *on_cpu(x, weight, bias),
            *interleave(
                (_each(x, weight, bias, y), *_products(CUDA, CudaOperations(), x, weight, bias, y)), (without, *triton)
            ),
            Rung("linear, then sigmoid", PYTORCH, lambda: torch.sigmoid(torch.nn.functional.linear(x, weight, bias))),
        ),
        rtol=1e-5,
        atol=1e-5,
        poisoned=(y,),
        remarks=lambda ceilings: digits(device),
    )


def on_cpu(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Rung, ...]:
    """The rungs on the CPU."""
    hosts = [t.cpu() for t in (x, weight, bias)]
    a, w, b = (t.numpy() for t in hosts)

    def in_numpy() -> Tensor:
        import numpy

        return torch.from_numpy(1 / (1 + numpy.exp(-(a @ w.T + b))))

    def in_pytorch() -> Tensor:
        return torch.sigmoid(torch.nn.functional.linear(*hosts))

    return (
        Rung("NumPy", CPU, in_numpy, "host"),
        Rung("PyTorch", CPU, in_pytorch, "host", note=f"{torch.get_num_threads()} threads"),
    )


def _each(x: Tensor, weight: Tensor, bias: Tensor, y: Tensor) -> Rung:
    def run() -> Tensor:
        (rows, columns), depth = y.shape, x.shape[1]
        grid = (-(-columns // 32), -(-rows // 8))
        kernel(FILE, "layer_each", y.device).launch(grid, (32, 8), x, weight, bias, y, rows, columns, depth)
        return y

    return Rung(EACH, CUDA, run, kernels=("layer_each",))


def _products(
    tool: str, operations: CudaOperations | TritonOperations, x: Tensor, weight: Tensor, bias: Tensor, y: Tensor
) -> tuple[Rung, ...]:
    def apart() -> Tensor:
        operations.product(x, weight.t(), y, PLAIN)
        operations.bias_sigmoid(y, bias)
        return y

    def fused() -> Tensor:
        operations.product(x, weight.t(), y, SIGMOID, bias)
        return y

    instances = (f"product<{PLAIN}>", "bias_sigmoid"), (f"product<{SIGMOID}>",)
    return (
        Rung(APART, tool, apart, kernels=instances[0], note="y written, read and written again"),
        Rung(FUSED, tool, fused, kernels=instances[1]),
    )


def digits(device: torch.device) -> Sequence[str]:
    """Train the network of `digits.py` with CUDA C++ (on a GPU), Triton (if available) and PyTorch. Return a sentence
    that compares the accuracies.
    """
    tools: dict[str, CudaOperations | TritonOperations] = {}
    if device.type == "cuda":
        tools[CUDA] = CudaOperations()
    if not triton_missing(device):
        tools[TRITON] = TritonOperations()
    return train_and_compare(tools, device)


# ---- the kernels as operations, for the ladder and for training --------------------------------------------------


@dataclass(frozen=True)
class CudaOperations:
    """The operations of `digits.Operations` in CUDA C++."""

    def product(
        self, a: Tensor, b: Tensor, c: Tensor, epilogue: int, extra: Tensor | None = None, rate: float = 0.0
    ) -> None:
        rows, columns, depth = *c.shape, a.shape[1]
        grid = (-(-columns // TILE), -(-rows // TILE))
        sizes = (rows, columns, depth, *a.stride(), *b.stride())
        kernel(FILE, f"product<{epilogue}>", c.device).launch(grid, 256, a, b, extra, c, *sizes, rate)

    def bias_sigmoid(self, y: Tensor, bias: Tensor) -> None:
        count = y.numel()
        kernel(FILE, "bias_sigmoid", y.device).launch(-(-count // BLOCK), BLOCK, y, bias, count, y.shape[1])

    def output_gradient(self, y: Tensor, target: Tensor, dz: Tensor) -> None:
        grid = -(-y.numel() // BLOCK)
        kernel(FILE, "output_gradient", y.device).launch(grid, BLOCK, y, target, dz, *y.shape)

    def bias_step(self, dz: Tensor, bias: Tensor, rate: float) -> None:
        kernel(FILE, "bias_step", dz.device).launch(-(-dz.shape[1] // BLOCK), BLOCK, dz, bias, *dz.shape, rate)


@dataclass(frozen=True)
class TritonOperations:
    """The operations of `digits.Operations` in Triton."""

    def product(
        self, a: Tensor, b: Tensor, c: Tensor, epilogue: int, extra: Tensor | None = None, rate: float = 0.0
    ) -> None:
        from rooftop.ladder import layer_kernels as kernels

        rows, columns, depth = *c.shape, a.shape[1]
        tall, wide, deep, warps, stages = TRITON_TILE
        constants = {"EPILOGUE": epilogue, "ROWS": tall, "COLUMNS": wide, "DEPTH": deep}
        arguments = (a, b, c if extra is None else extra, c, rows, columns, depth, *a.stride(), *b.stride(), rate)
        grid = (-(-columns // wide), -(-rows // tall))
        launch(kernels.product, grid, c.device, *arguments, **constants, num_warps=warps, num_stages=stages)

    def bias_sigmoid(self, y: Tensor, bias: Tensor) -> None:
        from rooftop.ladder import layer_kernels as kernels

        grid = (-(-y.numel() // (4 * BLOCK)),)
        launch(kernels.bias_sigmoid, grid, y.device, y, bias, y.numel(), y.shape[1], BLOCK=4 * BLOCK)

    def output_gradient(self, y: Tensor, target: Tensor, dz: Tensor) -> None:
        from rooftop.ladder import layer_kernels as kernels

        launch(kernels.output_gradient, (-(-y.numel() // BLOCK),), y.device, y, target, dz, *y.shape, BLOCK=BLOCK)

    def bias_step(self, dz: Tensor, bias: Tensor, rate: float) -> None:
        from rooftop.ladder import layer_kernels as kernels

        rows, columns = (1 << (size - 1).bit_length() for size in dz.shape)
        launch(kernels.bias_step, (1,), dz.device, dz, bias, *dz.shape, rate, ROWS=rows, COLUMNS=columns)
