"""Find the size above which the GPU beats the CPU, for one operation, with and without transfers.

The measurement runs the same operation of eager PyTorch in three ways, on the same random values, and times each:

- CPU: operands in the host's memory.
- GPU: operands are already on the device, the result stays there, and the host does not wait (a step in the middle of a
  model).
- GPU with transfers: the inputs are copied from pinned host memory, the result is copied back, and the host waits for
  it (one operation handed to the GPU). Parameters (the weights of linear and layer_norm) are already on the device.

Operands are in the caches of CPU and GPU, as if the program had just written them. Each call allocates its result, as
in eager mode. torch keeps freed device and pinned memory for the next call. The CPU's allocator returns large blocks to
the system (over 32 MiB with glibc), and the next call pays for fresh pages. So the CPU's time jumps at the size where
blocks exceed this limit.

The break-even size is where the times cross. Times are close to power laws of the size. So between two measured sizes,
the ratio of the times is interpolated linearly in log-log scale. Nothing is extrapolated beyond the measured sizes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear

from rooftop.errors import MeasurementError
from rooftop.hardware.ceilings import Progress
from rooftop.hardware.device import cpu, gpu, versions
from rooftop.hardware.figures import DISTURBED_SPREAD
from rooftop.hardware.timing import MEASURE_S, Timing, compare, measure
from rooftop.words import counted, did_you_mean, utc_now

FORMAT = 1
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FEATURES = 1024  # width for linear and layer_norm, as in a small transformer
# the default sizes end with the first whose CPU call takes longer than this, since larger ones take seconds per call
LONG_MS = 100.0
NEEDS_GPU = (
    "a crossover needs an NVIDIA GPU, and torch can use none on this machine: run it on a machine with one, or check "
    "the driver (nvidia-smi) and that torch is a CUDA build (rooftop device)"
)

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Operation:
    """An operation that can be timed at any size n.

    Attributes:
        unit: the unit of n.
        sizes: the values of n that are measured by default, ascending.
        inputs: a function from n to the shapes of the tensors that are transferred each time the operation runs.
        parameters: a function from n to the shapes of the tensors that are already on the device.
        call: runs the operation: takes the inputs and then the parameters, and returns one tensor.
    """

    unit: str
    sizes: tuple[int, ...]
    inputs: Callable[[int], tuple[Shape, ...]]
    parameters: Callable[[int], tuple[Shape, ...]]
    call: Callable[..., Tensor]


OPERATIONS = {
    "add": Operation(
        unit="elements",
        sizes=tuple(4**k for k in range(5, 13)),  # 1,024 to 16,777,216 elements: 4 KiB to 64 MiB per fp32 vector
        inputs=lambda n: ((n,), (n,)),
        parameters=lambda n: (),
        call=torch.add,
    ),
    "matmul": Operation(
        unit="rows and columns",
        sizes=tuple(2**k for k in range(4, 12)),  # 16 to 2,048 rows: 8 kFLOP to 17 GFLOP
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
    """The times of an operation at one size: on the CPU, on the GPU, and on the GPU with transfers. The size counts
    `Operation.unit`."""

    size: int
    cpu: Timing
    gpu: Timing
    gpu_with_transfers: Timing


@dataclass(frozen=True)
class BreakEven:
    """Whether the GPU beats the CPU at the measured sizes, and from which size on.

    Attributes:
        verdict: at which measured sizes the GPU is faster: "always" (at all), "never" (at none), "from" (at all above
            `size`, but not at the next one below; at still smaller ones either may be faster), or "mixed" (at some, but
            not at the largest).
        size: the size at which the times are equal, interpolated between two measured sizes; None unless the verdict is
            "from".
    """

    verdict: Literal["always", "never", "from", "mixed"]
    size: float | None = None


@dataclass(frozen=True)
class Crossover:
    """Times of an operation on CPU and GPU, by size.

    Attributes:
        operation, dtype: names of the operation and the dtype, such as "matmul" and "float32".
        unit: what a size counts, such as "elements".
        host, threads: name of the CPU, and number of threads that torch used.
        device: name of the GPU.
        versions: versions of all software that could change the times.
        measured_at: time of the measurement in UTC, in the form of ISO 8601.
        points: the measured times, in rising order of size.
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
        """The break-even size if operands are copied from the host and the result is copied back."""
        return find_break_even([(p.size, p.cpu.median_ms, p.gpu_with_transfers.median_ms) for p in self.points])

    @property
    def unsteady(self) -> tuple[int, ...]:
        """The sizes at which the CPU's, the GPU's, or the GPU's time with transfers was unsteady: (75th - 25th
        percentile) / median is more than 10%."""
        return tuple(
            p.size
            for p in self.points
            if any(timing.spread > DISTURBED_SPREAD for timing in (p.cpu, p.gpu, p.gpu_with_transfers))
        )

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, including the break-even sizes."""
        found = {
            "break_even": asdict(self.break_even),
            "break_even_with_transfers": asdict(self.break_even_with_transfers),
            "unsteady": self.unsteady,
        }
        plain: dict[str, Any] = json.loads(json.dumps({"format": FORMAT, **asdict(self), **found}))
        return plain


def find_break_even(times: Sequence[tuple[int, float, float]]) -> BreakEven:
    """The size from which the GPU's time is smaller than the CPU's.

    Args:
        times: at least one (size, CPU ms, GPU ms), in rising order of size; all numbers are positive.
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
        sizes: the sizes to measure; None: the operation's default sizes, up to and including the first at which the CPU
            takes more than 100 ms.
        dtype: one of `DTYPES`.
        device: the GPU. "cpu" is also accepted, and compares the CPU with itself, to test this function.
        progress: called with (the current measurement, fraction done).
        seconds: about how long to time the operation at each size in each of the three ways.

    Raises:
        ValueError: the operation, dtype or device does not exist, or a size is not a positive integer.
        MeasurementError: there is no GPU, or the GPU lacks the memory.
    """
    if operation not in OPERATIONS:
        raise ValueError(
            f"no operation {operation!r}: expected one of {', '.join(OPERATIONS)}{did_you_mean(operation, OPERATIONS)}"
        )
    if dtype not in DTYPES:
        raise ValueError(f"a crossover takes the dtypes {', '.join(map(_name, DTYPES))}, got {_name(dtype)}")
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
        measured_at=utc_now(),
        points=tuple(points),
    )


def _checked(device: torch.device) -> torch.device:
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"expected a cuda device (or cpu, to test this function), got {device}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise MeasurementError(NEEDS_GPU)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"{device} does not exist: torch can use {counted(torch.cuda.device_count(), 'GPU')} on this machine"
        )
    return device


def _point(op: Operation, size: int, dtype: torch.dtype, device: torch.device, seconds: float) -> CrossoverPoint:
    """Time an operation at one size in all three ways. The CPU is timed by the host's clock. The GPU without and with
    transfers is timed by device events, with runs of the two in turn. `seconds` is about how long to time each way."""
    random = torch.Generator().manual_seed(size)
    inputs, parameters = (
        [torch.randn(shape, generator=random, device="cpu").to(dtype) for shape in shapes(size)]
        for shapes in (op.inputs, op.parameters)
    )
    on_host = measure(lambda: op.call(*inputs, *parameters), device="cpu", seconds=seconds)
    # The time between device events includes the host's work in between, here the wait for the result.
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
    """Copy all operands of an operation to the device. Return a function that runs the operation on these copies,
    without waiting for the result."""
    operands = [operand.to(device) for operand in (*inputs, *parameters)]
    return lambda: op.call(*operands)


def _transferred(
    op: Operation, inputs: Sequence[Tensor], parameters: Sequence[Tensor], device: torch.device
) -> Callable[[], Tensor]:
    """Return a function that runs an operation with transfers. It copies the inputs from the host's memory to the
    device, runs the operation, copies the result back, and waits until the result is in the host's memory. The
    parameters are copied to the device only once, before the function is returned."""
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
