"""Find the size from which the GPU beats the CPU, for one operation, with and without transfers.

The measurement times three variants of the same eager call on the same random values, as they occur in programs:

- CPU: operands in the host's memory.
- GPU: operands are already on the device, the result stays there, and the host does not wait (a step in the middle of a
  model).
- GPU with transfers: the inputs come from pinned host memory, the result goes back into it, and the host waits for it
  (one operation handed to the GPU). Parameters (the weights of linear and layer_norm) are already on the device.

Operands are in the caches on both sides, as if the program had just written them. Each call allocates its result, as in
eager mode. torch keeps freed device and pinned memory for the next call. The CPU's memory goes back to the system if it
is large (over 32 MiB with glibc), and the next call pays for fresh pages: a real jump in the CPU's time.

The break-even size is where the times cross. Times are close to power laws of the size. So between two measured sizes,
the logarithm of the ratio of the times is taken as linear in the logarithm of the size. No prediction is made beyond
the measured sizes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear

from rooftop.errors import MeasurementError, did_you_mean
from rooftop.hardware.ceilings import Progress
from rooftop.hardware.device import cpu, gpu, versions
from rooftop.hardware.figures import DISTURBED_SPREAD
from rooftop.hardware.timing import MEASURE_S, Timing, compare, measure

FORMAT = 1
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FEATURES = 1024  # width for linear and layer_norm, as in a small transformer
# default sizes end after the first CPU call that takes longer, because larger sizes take seconds per call
LONG_MS = 100.0
NEEDS_GPU = (
    "a crossover needs an NVIDIA GPU, and torch can use none on this machine: run it on a machine with one, or check "
    "the driver (nvidia-smi) and that torch is a CUDA build (rooftop device)"
)

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Operation:
    """The operation at a size n.

    Attributes:
        unit: the unit of n.
        sizes: the default sizes, ascending.
        inputs: shapes of the tensors that are transferred at each call.
        parameters: shapes of those that are already on the device.
        call: takes inputs and parameters, returns one tensor.
    """

    unit: str
    sizes: tuple[int, ...]
    inputs: Callable[[int], tuple[Shape, ...]]
    parameters: Callable[[int], tuple[Shape, ...]]
    call: Callable[..., Tensor]


OPERATIONS = {
    "add": Operation(
        unit="elements",
        sizes=tuple(4**k for k in range(5, 13)),  # 1,024 to 16,777,216: 4 KiB to 64 MiB a vector in fp32
        inputs=lambda n: ((n,), (n,)),
        parameters=lambda n: (),
        call=torch.add,
    ),
    "matmul": Operation(
        unit="rows and columns",
        sizes=tuple(2**k for k in range(4, 12)),  # 16 to 2,048: 8 kFLOP to 17 GFLOP
        inputs=lambda n: ((n, n), (n, n)),
        parameters=lambda n: (),
        call=torch.matmul,
    ),
    "linear": Operation(
        unit=f"rows of {FEATURES}",
        sizes=tuple(4**k for k in range(7)),  # 1 to 4,096
        inputs=lambda n: ((n, FEATURES),),
        parameters=lambda n: ((FEATURES, FEATURES), (FEATURES,)),
        call=linear,
    ),
    "layer_norm": Operation(
        unit=f"rows of {FEATURES}",
        sizes=tuple(4**k for k in range(8)),  # 1 to 16,384
        inputs=lambda n: ((n, FEATURES),),
        parameters=lambda n: ((FEATURES,), (FEATURES,)),
        call=lambda x, weight, bias: layer_norm(x, (FEATURES,), weight, bias),
    ),
}


@dataclass(frozen=True)
class CrossoverPoint:
    """The three variants at one size."""

    size: int
    cpu: Timing
    gpu: Timing
    gpu_with_transfers: Timing


@dataclass(frozen=True)
class BreakEven:
    """Whether the GPU beats the CPU among the sizes measured, and from which size on.

    Attributes:
        verdict: "always" (at every size), "never" (at none), "from" (at all sizes from `size` on, but not at the next
            smaller one measured), or "mixed" (at some sizes, but not at the largest).
        size: interpolated; None unless the verdict is "from".
    """

    verdict: Literal["always", "never", "from", "mixed"]
    size: float | None = None


@dataclass(frozen=True)
class Crossover:
    """CPU against GPU over sizes.

    Attributes:
        operation, dtype: "matmul", "float32".
        unit: the unit of a size.
        host, threads: name of the CPU, threads that torch used on it.
        device: name of the GPU.
        versions: versions of all software that could change the figures.
        measured_at: UTC, ISO 8601.
        points: rising in size.
    """

    operation: str
    dtype: str
    unit: str
    host: str
    threads: int
    device: str
    versions: dict[str, str]
    measured_at: str
    points: tuple[CrossoverPoint, ...]

    @property
    def break_even(self) -> BreakEven:
        """The break-even size if operands are already on the GPU."""
        return find_break_even([(p.size, p.cpu.median_ms, p.gpu.median_ms) for p in self.points])

    @property
    def break_even_with_transfers(self) -> BreakEven:
        """The break-even size if operands come from the host and the result goes back."""
        return find_break_even([(p.size, p.cpu.median_ms, p.gpu_with_transfers.median_ms) for p in self.points])

    @property
    def unsteady(self) -> tuple[int, ...]:
        """The sizes at which a variant's time varied by more than 10%."""
        return tuple(
            p.size
            for p in self.points
            if any(timing.spread > DISTURBED_SPREAD for timing in (p.cpu, p.gpu, p.gpu_with_transfers))
        )

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, break-even sizes included."""
        found = {
            "break_even": asdict(self.break_even),
            "break_even_with_transfers": asdict(self.break_even_with_transfers),
            "unsteady": self.unsteady,
        }
        plain: dict[str, Any] = json.loads(json.dumps({"format": FORMAT, **asdict(self), **found}))
        return plain


def find_break_even(times: Sequence[tuple[int, float, float]]) -> BreakEven:
    """The size from which the second time is smaller.

    Args:
        times: (size, CPU ms, GPU ms), rising in size; at least one, all positive.
    """
    logs = [(math.log(size), math.log(gpu_ms / cpu_ms)) for size, cpu_ms, gpu_ms in times]  # < 0: the GPU is faster
    slower = [position for position, (_, ratio) in enumerate(logs) if ratio >= 0]
    if not slower:
        return BreakEven("always")
    if len(slower) == len(logs):
        return BreakEven("never")
    if slower[-1] == len(logs) - 1:
        return BreakEven("mixed")
    (left, above), (right, below) = logs[slower[-1] : slower[-1] + 2]
    return BreakEven("from", math.exp(left + (right - left) * above / (above - below)))


def measure_crossover(
    operation: str,
    sizes: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cuda",
    progress: Progress = lambda what, fraction: None,
    seconds: float = MEASURE_S,
) -> Crossover:
    """Time an operation on the CPU, on a GPU, and on the GPU with transfers (see the top of this file).

    Args:
        operation: one of `OPERATIONS`.
        sizes: the sizes to measure; None takes the operation's own, up to the first slow CPU call.
        dtype: one of `DTYPES`.
        device: the GPU. "cpu" is also accepted: it compares the CPU with itself, as a test of this function.
        progress: called with (the current measurement, fraction done).
        seconds: about how long to time each variant at each size.

    Raises:
        ValueError: the operation, dtype or device does not exist, or a size is not a positive integer.
        MeasurementError: there is no GPU, or it lacks the memory.
    """
    if operation not in OPERATIONS:
        raise ValueError(
            f"no operation {operation!r}: expected one of {', '.join(OPERATIONS)}{did_you_mean(operation, OPERATIONS)}"
        )
    if dtype not in DTYPES:
        raise ValueError(f"a crossover takes {', '.join(map(_name, DTYPES))}, got {_name(dtype)}")
    if sizes is not None and (not sizes or any(not isinstance(size, int) or size < 1 for size in sizes)):
        raise ValueError(f"expected sizes as positive integers, got {list(sizes)}")
    where = _checked(torch.device(device))
    op = OPERATIONS[operation]
    rising = sorted(set(sizes or op.sizes))
    points = []
    with torch.no_grad(), torch.cuda.device(where) if where.type == "cuda" else nullcontext():
        for done, size in enumerate(rising):
            progress(f"{operation}, {size:,} {op.unit}", done / len(rising))
            try:
                points.append(_point(op, size, dtype, where, seconds))
            except torch.cuda.OutOfMemoryError as error:
                raise MeasurementError(
                    f"{operation} of {size:,} {op.unit} does not fit into the free memory of {where}: end other "
                    "programs that use it, or measure smaller sizes"
                ) from error
            if sizes is None and points[-1].cpu.median_ms > LONG_MS:
                break
        if where.type == "cuda":
            torch.cuda.empty_cache()
    progress("done", 1.0)
    return Crossover(
        operation=operation,
        dtype=_name(dtype),
        unit=op.unit,
        host=cpu().name,
        threads=torch.get_num_threads(),
        device=gpu(where.index or 0).name if where.type == "cuda" else cpu().name,
        versions=versions(),
        measured_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        points=tuple(points),
    )


def _checked(device: torch.device) -> torch.device:
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"a crossover can be measured with a cuda device, got {device}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise MeasurementError(NEEDS_GPU)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"{device} does not exist: torch can use {torch.cuda.device_count()} GPUs on this machine")
    return device


def _point(op: Operation, size: int, dtype: torch.dtype, device: torch.device, seconds: float) -> CrossoverPoint:
    """All variants at one size: the CPU's by the host's clock, the GPU's interleaved and by device events."""
    random = torch.Generator().manual_seed(size)
    inputs, parameters = (
        [torch.randn(shape, generator=random, device="cpu").to(dtype) for shape in shapes(size)]
        for shapes in (op.inputs, op.parameters)
    )
    on_host = measure(lambda: op.call(*inputs, *parameters), device="cpu", seconds=seconds)
    # The time between device events includes the host's work between them, here the wait for the result.
    on_device = compare(
        {
            "alone": _resident(op, inputs, parameters, device),
            "with transfers": _transferred(op, inputs, parameters, device),
        },
        device=device,
        seconds=seconds,
    )
    return CrossoverPoint(size, on_host, on_device["alone"], on_device["with transfers"])


def _resident(
    op: Operation, inputs: Sequence[Tensor], parameters: Sequence[Tensor], device: torch.device
) -> Callable[[], Tensor]:
    """The call with all operands on the device."""
    operands = [operand.to(device) for operand in (*inputs, *parameters)]
    return lambda: op.call(*operands)


def _transferred(
    op: Operation, inputs: Sequence[Tensor], parameters: Sequence[Tensor], device: torch.device
) -> Callable[[], Tensor]:
    """The call with inputs from the host; returns the result in the host's memory, complete."""
    cuda = device.type == "cuda"
    sources = [each.pin_memory() if cuda else each for each in inputs]
    kept = [parameter.to(device) for parameter in parameters]
    result = op.call(*inputs, *parameters)
    target = torch.empty_like(result, pin_memory=cuda)

    def call() -> Tensor:
        moved = [source.to(device, non_blocking=True, copy=True) for source in sources]
        target.copy_(op.call(*moved, *kept), non_blocking=True)
        if cuda:
            torch.cuda.current_stream().synchronize()
        return target

    return call


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
