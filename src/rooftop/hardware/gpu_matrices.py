"""Measure a GPU's matrix rate for each precision: the best of many shapes and layouts, in bursts too short to heat the
chip.

A chip at its power limit lowers its clocks within milliseconds. A matrix product in the middle of a program, between
memory-bound kernels, runs at high clocks. So each call runs a few times after a pause, and the rate is that of the
fastest call. The best candidates run again after longer pauses. The sustained rate of one product that runs
continuously is measured separately.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from rooftop.errors import MeasurementError
from rooftop.hardware.figures import Samples
from rooftop.hardware.kernel_times import Variant, kernel_times

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
}

# n of the n x n x n matrix product that gives a first estimate of a precision's rate; on an H100 this product takes
# longer than a launch
PILOT = 2048
LONGEST_CALL_S = 8e-3  # products that take longer than this are not tried, because their rate is no higher
BURST_S, PAUSE_S = 1e-3, 1e-3  # burst and pause of each candidate in the first round
FINALISTS, FINAL_REPEATS, FINAL_PAUSE_S = 12, 8, 0.02
SUSTAINED_S = 0.3
MOST_ELEMENTS = 1 << 27  # largest number of elements of an operand

SQUARES = (1024, 1536, 2048, 3072, 4096, 6144, 8192)
TOKENS = (4096, 8192, 16384)
LAYERS = (
    *((768, 768), (768, 2304), (768, 3072), (3072, 768), (1024, 4096), (4096, 1024)),
    *((4096, 4096), (4096, 12288), (4096, 11008), (11008, 4096), (8192, 8192)),
)
"""(in, out) of linear layers of transformers."""
TILES = ((128, 128), (128, 256), (256, 128))  # tiles of the fast kernels on Ampere, Hopper and Blackwell
WAVES = (1, 2, 4)
DEPTHS = (4096, 8192)  # k of the products that fill all multiprocessors with whole tiles
BATCHED = ((32, 1024, 1024, 1024), (64, 1024, 1024, 128), (128, 512, 512, 64), (16, 2048, 2048, 2048))  # b, m, n, k
CONVOLUTIONS = ((256, 64, 56, 3), (256, 128, 28, 3), (256, 256, 14, 3), (256, 512, 7, 3), (128, 256, 56, 1))
"""(batch, input and output channels, image side, kernel side)"""
CONVOLVED = ("tf32", "fp16", "bf16")
"""Precisions in which convolutions are tried. float32 is left out, because cuDNN's Winograd algorithm needs fewer
operations than are counted: on an H100 such a convolution seems to reach twice the rate of any product, and all
products would seem to reach at most half of their roof."""

Call = Callable[[], object]


@dataclass(frozen=True)
class Product:
    """A matrix product to try: (m, k) times (k, n).

    Attributes:
        layout: "nn", "nt" or "tn": a letter for the left and one for the right operand; "t" is a transposed view.
        bias: whether the same call adds a bias.
        batch: batch size of `bmm`.
    """

    m: int
    n: int
    k: int
    layout: str = "nn"
    bias: bool = False
    batch: int = 1

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def most_elements(self) -> int:
        return self.batch * max(self.m * self.k, self.k * self.n, self.m * self.n)


@dataclass(frozen=True)
class _Candidate:
    call: Call
    flops: int


def precisions_of(device: torch.device) -> tuple[str, ...]:
    """The precisions to measure on this GPU: those in which its tensor cores or its ordinary units multiply
    matrices.
    """
    capability = torch.cuda.get_device_capability(device)
    recent = (*(("tf32", "bf16") if capability >= (8, 0) else ()), *(("fp8",) if capability >= (8, 9) else ()))
    return ("fp64", "fp32", "fp16", *recent)


def measure_matrices(samples: Samples, device: torch.device, precision: str) -> None:
    """Add samples of the burst rate and of the sustained rate."""
    operands = _Operands(device, precision)
    pilot = _Candidate(operands.call(Product(PILOT, PILOT, PILOT, "nt")), 2 * PILOT**3)
    per_s = pilot.flops / _seconds(pilot.call, 5)
    longest = LONGEST_CALL_S * per_s  # flops
    products = [p for p in products_to_try(_processors(device), precision) if operands.hold(p) and p.flops <= longest]
    candidates = [pilot, *(_Candidate(operands.call(product), product.flops) for product in products)]
    if precision in CONVOLVED:
        candidates += [c for c in _convolutions(device, precision) if c.flops <= longest]
    best = _race(samples, device, precision, candidates, per_s)
    rates = sustained_rates(best.call, best.flops, device)
    samples.add(f"sustained {precision}", rates)
    samples.add(f"flops {precision}", rates)  # a ceiling must not be below the sustained rate


def _race(
    samples: Samples, device: torch.device, precision: str, candidates: list[_Candidate], per_s: float
) -> _Candidate:
    """Time all candidates in short bursts, then time the fastest candidates again after longer pauses. Return the
    fastest candidate.
    """
    for candidate in candidates:  # warm up: libraries choose and load their kernels
        candidate.call()
    variants = [
        Variant(c.call, repeats=max(2, min(8, int(BURST_S * per_s / c.flops))), pause_s=PAUSE_S) for c in candidates
    ]
    rates = _rates(variants, candidates, device)
    for values in rates:
        samples.add(f"flops {precision}", values)
    order = sorted(range(len(candidates)), key=lambda i: max(rates[i]), reverse=True)[:FINALISTS]
    finalists = [candidates[i] for i in order]
    again = [replace(variants[i], repeats=FINAL_REPEATS, pause_s=FINAL_PAUSE_S) for i in order]
    final_rates = _rates(again, finalists, device)
    for values in final_rates:
        samples.add(f"flops {precision}", values)
    return finalists[max(range(len(finalists)), key=lambda i: max(final_rates[i]))]


def _rates(variants: list[Variant], candidates: list[_Candidate], device: torch.device) -> list[list[float]]:
    times = kernel_times(variants, device)
    return [[c.flops / (sum(call) / 1e3) for call in calls] for c, calls in zip(candidates, times, strict=True)]


def products_to_try(processors: int, precision: str) -> list[Product]:
    """Shapes and layouts for a GPU with this many multiprocessors."""
    shapes = [(side, side, side) for side in SQUARES]
    shapes += [(tokens, n, k) for k, n in LAYERS for tokens in TOKENS]
    shapes += [(m, n, k) for m, n in _whole_waves(processors) for k in DEPTHS]
    if precision == "fp8":  # fp8 kernels need the second operand transposed
        return [Product(m, n, k, "nt") for m, n, k in shapes]
    products = [Product(m, n, k, layout) for m, n, k in shapes for layout in ("nt", "nn", "tn")]
    products += [Product(m, n, k, "nt", bias=True) for m, n, k in shapes]
    products += [Product(m, n, k, layout, batch=b) for b, m, n, k in BATCHED for layout in ("nt", "nn")]
    return products


def _whole_waves(processors: int) -> Iterator[tuple[int, int]]:
    """Sizes (m, n) of results, as square as possible, whose tiles fill all multiprocessors in whole waves."""
    for tile_m, tile_n in TILES:
        for waves in WAVES:
            tiles = processors * waves
            rows = min(
                (r for r in range(1, tiles + 1) if tiles % r == 0),
                key=lambda r: abs(math.log(r * tile_m / (tiles // r * tile_n))),
            )
            yield rows * tile_m, tiles // rows * tile_n


class _Operands:
    """Random numbers for operands of any shape (zeros would be multiplied faster), and memory for results."""

    def __init__(self, device: torch.device, precision: str) -> None:
        self._precision, self._dtype = precision, DTYPES[precision]
        free_bytes, _ = torch.cuda.mem_get_info(device)
        self._elements = min(MOST_ELEMENTS, free_bytes // (8 * self._dtype.itemsize))
        if self._elements < PILOT**2:
            needed = 8 * self._dtype.itemsize * PILOT**2
            raise MeasurementError(
                f"the {precision} rate of {device} needs {needed / 2**20:.0f} MiB of free memory, but only "
                f"{free_bytes / 2**20:.0f} are free: measure while the GPU has room, with: rooftop ceilings"
            )
        self._left, self._right = (self._random(device) for _ in range(2))
        out_dtype = torch.bfloat16 if precision == "fp8" else self._dtype
        self._out = torch.empty(self._elements, dtype=out_dtype, device=device)
        self._one = torch.ones((), device=device)

    def _random(self, device: torch.device) -> Tensor:
        if self._precision in ("fp64", "fp32", "tf32"):
            return torch.randn(self._elements, dtype=self._dtype, device=device)
        return torch.randn(self._elements, dtype=torch.float16, device=device).to(self._dtype)

    def hold(self, product: Product) -> bool:
        return product.most_elements <= self._elements

    def call(self, product: Product) -> Call:
        """A function that computes the product. The function sets PyTorch's precision switches at each call, because
        measurements of several precisions alternate."""
        b, m, n, k = product.batch, product.m, product.n, product.k
        left = self._taken(self._left, b, m, k, product.layout[0] == "t")
        right = self._taken(self._right, b, k, n, product.layout[1] == "t")
        out = self._taken(self._out, b, m, n, False)
        if self._precision == "fp8":
            one = self._one
            return lambda: torch._scaled_mm(
                left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
            )
        bias = self._right[:n]
        in_tf32 = self._precision == "tf32"

        def multiply() -> None:
            torch.backends.cuda.matmul.allow_tf32 = in_tf32
            if b > 1:
                torch.bmm(left, right, out=out)
            elif product.bias:
                torch.addmm(bias, left, right, out=out)
            else:
                torch.mm(left, right, out=out)

        return multiply

    @staticmethod
    def _taken(source: Tensor, batch: int, rows: int, columns: int, transposed: bool) -> Tensor:
        """View the first numbers of `source` as a matrix (rows, columns), or as a batch of such matrices. With
        `transposed`, each matrix is stored by columns.
        """
        stored = (columns, rows) if transposed else (rows, columns)
        matrices = source[: batch * rows * columns].view(batch, *stored)
        matrices = matrices.transpose(1, 2) if transposed else matrices
        return matrices if batch > 1 else matrices[0]


def _convolutions(device: torch.device, precision: str) -> list[_Candidate]:
    """Convolutions to try. Convolutions use a different library than matrix products do, and its algorithms may need
    fewer operations than are counted."""
    dtype, candidates = DTYPES[precision], []
    for batch, channels, side, kernel in CONVOLUTIONS:
        x = torch.randn(batch, channels, side, side, device=device).to(dtype, memory_format=torch.channels_last)
        weight = torch.randn(channels, channels, kernel, kernel, device=device)
        weight = weight.to(dtype, memory_format=torch.channels_last)
        flops = 2 * x.numel() * channels * kernel**2
        candidates.append(_Candidate(_convolution(x, weight, precision == "tf32"), flops))
    return candidates


def _convolution(x: Tensor, weight: Tensor, allow_tf32: bool) -> Call:
    def convolve() -> None:
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=allow_tf32):
            functional.conv2d(x, weight, padding=weight.shape[-1] // 2)

    return convolve


def sustained_rates(call: Call, flops: int, device: torch.device) -> list[float]:
    """Flop/s of a call that runs without a pause for `SUSTAINED_S`, measured in the second half, when the chip is
    hot."""
    count = max(8, math.ceil(SUSTAINED_S / _seconds(call, 3)))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(5)]
    for _ in range(count // 2):
        call()
    marks[0].record()
    each = math.ceil(count / 8)
    for mark in marks[1:]:
        for _ in range(each):
            call()
        mark.record()
    torch.cuda.synchronize(device)
    return [flops * each / (start.elapsed_time(end) / 1e3) for start, end in pairwise(marks)]


def _seconds(call: Call, calls: int) -> float:
    """The approximate seconds of a call, after a first call that does not count."""
    call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return max(start.elapsed_time(end) / 1e3 / calls, 1e-6)


def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
