"""The reduction ladder: the sum of n float32 numbers. The sum takes one addition for each 4 bytes, so memory bounds it
at every size.

The elements are small integers, whose partial sums float32 holds exactly. Every order of the additions gives the same
sum to the last bit, so a missing element is noticed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rooftop.cost import Cost
from rooftop.ladder.rungs import CPU, CUDA, PYTORCH, TRITON, Ladder, Rung, interleave, kernel, triton_rungs
from rooftop.launch.triton_launch import launch, processors

FILE = "reduction.cu"
BLOCK = 256  # threads
RESIDENT = 8  # this many blocks of 256 threads fill a multiprocessor, which holds 2,048 threads
FLIGHT = 4
# Largest magnitude of the elements, which are integers. Their signs are random, so the sum of 2^30 elements is far
# below 2^24, and float32 represents all sums exactly.
LARGEST = 4
DIVERGENT, NEIGHBOURED, SEQUENTIAL = "interleaved pairs, divergent", "interleaved pairs, neighbouring threads", "halves"
UNROLLED = {unroll: f"{unroll} elements a thread" for unroll in (2, 4, 8)}
TEMPLATES, SHUFFLE, ONE_PASS = "loops unrolled by templates", "warp shuffles", "16-byte loads, one pass"
OWN = "Triton adds within a program itself"


def make(size: int, device: torch.device) -> Ladder:
    """The reduction ladder for `size` elements."""
    x = torch.randint(-LARGEST, LARGEST + 1, (size,), device=device, dtype=torch.int8).float()
    result = torch.empty(1, device=device)
    # two buffers, used in turns: a launch reads the sums of blocks from one, and writes their sums to the other
    sums = [torch.empty(-(-size // BLOCK), device=device) for _ in range(2)]
    names = (SEQUENTIAL, *UNROLLED.values(), ONE_PASS)
    without = tuple(Rung(name, TRITON, None, note=OWN) for name in (DIVERGENT, NEIGHBOURED, TEMPLATES, SHUFFLE))
    triton = triton_rungs(device, lambda: in_triton(x, result, sums), names)
    return Ladder(
        name="reduction",
        work=f"the sum of {size:,} float32",
        unit="B/s",
        source=FILE,
        cost=Cost(4 * size, 4, {"fp32": size}),
        exact=x.sum(dtype=torch.float64).reshape(1),
        rungs=(
            *on_cpu(x),
            *interleave(in_cuda(x, result, sums), (*triton, *without)),
            Rung("torch.sum", PYTORCH, lambda: torch.sum(x, 0, keepdim=True, out=result)),
        ),
        poisoned=(result, *sums),
    )


def on_cpu(x: Tensor) -> tuple[Rung, ...]:
    """The rungs on the CPU."""
    host = x.cpu()
    array = host.numpy()
    return (
        Rung("NumPy", CPU, lambda: torch.tensor([array.sum()]), "host", note="one thread"),
        Rung("PyTorch", CPU, lambda: host.sum(0, keepdim=True), "host", note=f"{torch.get_num_threads()} threads"),
    )


def staged(
    x: Tensor, result: Tensor, sums: list[Tensor], per_block: int, stage: Callable[[int, Tensor, Tensor, int], None]
) -> Tensor:
    """Sum x in several launches. Each launch, `stage(blocks, source, target, elements)`, sums `per_block` elements in
    each block; its source is x, then the sums of the launch before. The last launch writes `result`.
    """
    source, count, turn = x, x.numel(), 0
    while True:
        blocks = -(-count // per_block)
        target = result if blocks == 1 else sums[turn % 2]
        stage(blocks, source, target, count)
        if blocks == 1:
            return result
        source, count, turn = target, blocks, turn + 1


def in_cuda(x: Tensor, result: Tensor, sums: list[Tensor]) -> tuple[Rung, ...]:
    """The rungs in CUDA C++."""
    device = x.device
    done = torch.zeros(1, dtype=torch.int32, device=device)
    programs = processors(x) * RESIDENT
    partial = torch.empty(programs, device=device)
    vectors = f"one_pass<{FLIGHT}, {BLOCK}>"

    def stages(name: str, instance: str, unroll: int) -> Rung:
        def stage(blocks: int, source: Tensor, target: Tensor, count: int) -> None:
            kernel(FILE, instance, device).launch(blocks, BLOCK, source, target, count)

        return Rung(
            name,
            CUDA,
            lambda: staged(x, result, sums, unroll * BLOCK, stage),
            kernels=(instance,),
            note=launches(unroll),
        )

    def launches(unroll: int) -> str:
        count, number = x.numel(), 0
        while count > 1 or not number:
            count, number = -(-count // (unroll * BLOCK)), number + 1
        return f"{number} launches" if number > 1 else "1 launch"

    def once() -> Tensor:
        kernel(FILE, vectors, device).launch(programs, BLOCK, x, partial, result, done, x.numel())
        return result

    return (
        stages(DIVERGENT, f"divergent<{BLOCK}>", 1),
        stages(NEIGHBOURED, f"neighboured<{BLOCK}>", 1),
        stages(SEQUENTIAL, f"sequential<1, {BLOCK}>", 1),
        *(stages(name, f"sequential<{unroll}, {BLOCK}>", unroll) for unroll, name in UNROLLED.items()),
        stages(TEMPLATES, f"unrolled<8, {BLOCK}>", 8),
        stages(SHUFFLE, f"shuffled<8, {BLOCK}>", 8),
        Rung(ONE_PASS, CUDA, once, kernels=(vectors,), note="1 launch"),
    )


def in_triton(x: Tensor, result: Tensor, sums: list[Tensor]) -> tuple[Rung, ...]:
    """The counterparts of `in_cuda`'s rungs in Triton."""
    from rooftop.ladder import reduction_kernels as kernels

    done = torch.zeros(1, dtype=torch.int32, device=x.device)
    programs = processors(x) * RESIDENT
    partial = torch.empty(programs, device=x.device)

    def stages(name: str, block: int) -> Rung:
        def stage(blocks: int, source: Tensor, target: Tensor, count: int) -> None:
            launch(kernels.sum_blocks, (blocks,), x.device, source, target, count, BLOCK=block, num_warps=8)

        return Rung(name, TRITON, lambda: staged(x, result, sums, block, stage))

    def once() -> Tensor:
        constants = {"BLOCK": 4 * FLIGHT * BLOCK, "PROGRAMS": 1 << (programs - 1).bit_length(), "num_warps": 8}
        launch(kernels.sum_one_pass, (programs,), x.device, x, partial, result, done, x.numel(), **constants)
        return result

    return (
        stages(SEQUENTIAL, BLOCK),
        *(stages(name, unroll * BLOCK) for unroll, name in UNROLLED.items()),
        Rung(ONE_PASS, TRITON, once),
    )
