"""CUDA C++ from Python: `compile` a source, and `launch` its kernel on tensors, without a build step. The only compiler
is NVRTC.

    kernel = cuda.compile(SOURCE, "scale<float>")
    kernel.launch(-(-n // 256), 256, x, y, n, 0.5)

The kernel is launched on PyTorch's current stream of the tensors' device. A launch neither allocates on the device nor
waits for the device, so operators can launch these kernels, and CUDA graphs can capture the launches. Before a launch,
arguments are checked against the kernel's C++ signature, and the configuration against the limits of the kernel and the
architecture.

An error inside a running kernel, such as an invalid address, is raised at a later synchronization, in an unrelated
call. With ROOFTOP_SYNC=1 in the environment, each launch waits for the kernel to end, and the error message names the
kernel.
"""

from __future__ import annotations

import math
import operator
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch

from rooftop.errors import LaunchError
from rooftop.hardware.occupancies import MULTIPROCESSORS, WARP
from rooftop.launch import nvrtc, triton_launch
from rooftop.launch.kernel_arguments import Signature, first_device, signature
from rooftop.launch.triton_launch import record_launch
from rooftop.words import first_line

SYNCHRONOUS = os.environ.get("ROOFTOP_SYNC") == "1"
"""Whether each launch waits for its kernel."""

Size = int | tuple[int, ...]
"""A grid or a block: one to three dimensions."""

# Limits from the CUDA C++ Programming Guide, technical specifications; unchanged since compute capability 3.0.
GRID_LIMITS = (2**31 - 1, 65535, 65535)
BLOCK_LIMITS = (1024, 1024, 64)
PORTABLE_CLUSTER_LIMIT = 8  # blocks
CLUSTER_LIMIT = 16  # maximum blocks of a cluster on sm_90, if the kernel opts in
DEFAULT_SHARED_BYTES = 48 * 1024  # maximum shared memory per block without opting in
CONFIGURATIONS_KEPT = 1024  # cached configurations per kernel

_kernels: dict[tuple[Any, ...], Kernel] = {}
_streams: dict[tuple[int, int], Any] = {}
_thread = threading.local()
_loading = threading.Lock()


def compile(
    source: str,
    name: str,
    *,
    arch: str | None = None,
    device: torch.device | int | None = None,
    defines: Mapping[str, str | int] | None = None,
    fast_math: bool = False,
    fused_multiply_add: bool = True,
    max_registers: int | None = None,
) -> Kernel:
    """Compile one kernel of a CUDA C++ source.

    Only the first call with the same arguments compiles. Later calls in this process look up the kernel, and later
    processes read the compiled kernel from a file. So the caller may call `compile` before each launch.

    Args:
        source: the whole source. A source may include CUDA's headers, but not headers of the C++ standard library.
        name: name of a `__global__` function; `scale<float, 4>` instantiates a template.
        arch: architecture, such as "sm_90"; None: the architecture of `device`. Compiling for a named architecture
            needs no GPU.
        device: the device; None: the current device.
        defines: macros.
        fast_math: approximate division, roots and transcendental functions, and flush denormals to zero.
        fused_multiply_add: allow the compiler to fuse a product and a sum into one operation, which rounds once.
        max_registers: maximum number of registers of a thread; None lets the compiler choose.

    Raises:
        CompilationError: the compiler failed; the message has the compiler's log and the line of the source.
        MissingExtraError: NVRTC, `cuda.core` or a CUDA header is not installed; the message has the command to install
            it.
        TypeError: source or name is not a str, or a kernel parameter has a type that Python cannot pass.
        ValueError: there is no GPU to compile for, or NVRTC does not know the architecture.
    """
    for what, text in (("source", source), ("name", name)):
        if not isinstance(text, str):
            raise TypeError(f"compile: {what} must be a str, got {type(text).__name__}")
    arch = arch or _arch_of(device)
    macros = tuple((key, str(value)) for key, value in defines.items()) if defines else ()
    key = (source, name, arch, macros, fast_math, fused_multiply_add, max_registers)
    kernel = _kernels.get(key)
    if kernel is None:
        options = nvrtc.Options(arch, macros, fast_math, fused_multiply_add, max_registers)
        # another thread may have compiled the same kernel in the meantime
        kernel = _kernels.setdefault(key, Kernel(nvrtc.binary(source, name, options), source, options))
    return kernel


def runs_on(tensor: torch.Tensor) -> bool:
    """Whether CUDA C++ kernels can process the tensor: it is on a GPU."""
    return tensor.device.type == "cuda"


_archs: dict[int, str] = {}  # by device


def _arch_of(device: torch.device | int | None) -> str:
    if not torch.cuda.is_available():
        raise ValueError('no GPU here to compile for: name an architecture, compile(..., arch="sm_90")')
    index = device.index if isinstance(device, torch.device) else device
    index = torch.cuda.current_device() if index is None else index
    if index not in _archs:
        major, minor = torch.cuda.get_device_capability(index)
        _archs[index] = f"sm_{major}{minor}"
    return _archs[index]


class Kernel:
    """A compiled kernel, which is loaded at its first launch.

    Attributes:
        binary: machine code and its properties: registers, shared memory, the compiler's log.
        name, arch: the kernel's name, and the architecture for which it is compiled.
        max_threads_per_block: the maximum that the kernel's registers allow. A lower maximum that `__launch_bounds__`
            sets is not considered.
    """

    def __init__(self, binary: nvrtc.Binary, source: str, options: nvrtc.Options) -> None:
        self.binary, self.name, self.arch = binary, binary.name, binary.arch
        self.capability = divmod(int(binary.arch.removeprefix("sm_").rstrip("af")), 10)
        self.max_threads_per_block = _threads_with(binary.registers, self.capability)
        self._source, self._options = source, options
        self._signature: Signature = signature(binary.name, binary.types)
        self._kernel: Any = None
        self._configurations: dict[tuple[Any, ...], Any] = {}
        self._active_clusters: dict[tuple[Any, ...], int] = {}

    def __repr__(self) -> str:
        registers = "" if self.binary.registers is None else f", {self.binary.registers} registers"
        return f"<CUDA kernel {self.name}({', '.join(self.binary.types)}) for {self.arch}{registers}>"

    @cached_property
    def ptx(self) -> str:
        """The kernel's PTX, compiled on first access."""
        return nvrtc.ptx(self._source, self.name, self._options)

    def launch(
        self,
        grid: Size,
        block: Size,
        *arguments: Any,
        shared_bytes: int = 0,
        cluster: Size | None = None,
        cooperative: bool = False,
    ) -> None:
        """Launch the kernel on the current stream; an empty grid launches nothing.

        Args:
            grid: blocks in each dimension.
            block: threads in each dimension.
            *arguments: tensors (or None) for pointers, numbers for the other parameters. The kernel does not see
                strides.
            shared_bytes: bytes of dynamic shared memory per block, up to the GPU's maximum.
            cluster: blocks of a thread block cluster, in each dimension.
            cooperative: whether all blocks must run at the same time, so that blocks may wait for each other.

        Raises:
            TypeError, ValueError: invalid arguments or configuration; nothing is launched.
            LaunchError: the driver refuses the launch, or (with ROOFTOP_SYNC=1) the kernel fails.
        """
        device = first_device(arguments)
        if device is None:
            device = self._without_tensors(arguments, grid, block, shared_bytes, cluster)
        values = self._signature.values(arguments, device)
        try:
            key = (grid, block, shared_bytes, cluster, cooperative, device)
            configuration = self._configurations.get(key)
        except TypeError:  # a list is not hashable
            self.check(grid, block, shared_bytes, cluster)  # raises an error that names the list
            raise
        if configuration is None:
            if 0 in self.check(grid, block, shared_bytes, cluster):
                return
            configuration = self._configure(*key)
        with nullcontext() if torch._C._cuda_getDevice() == device else torch.cuda.device(device):
            self._start(device, configuration, values)
        if triton_launch._observer is None or SYNCHRONOUS:
            record_launch(self.name)
        else:
            blocks, threads, sizes = self._dimensions(grid, block, cluster)
            made = Configured(self, device, configuration, values, threads, shared_bytes, sizes, cooperative)
            record_launch(self.name, made, blocks, arguments)

    def check(
        self, grid: Size, block: Size, shared_bytes: int = 0, cluster: Size | None = None
    ) -> tuple[int, int, int]:
        """Check a launch configuration against the kernel and its architecture, and return the grid in three
        dimensions. This method needs no GPU.

        Raises:
            TypeError, ValueError: the configuration is invalid; the message names the value and the limit.
        """
        what = f"kernel {self.name}"
        blocks, threads = _three(what, "grid", grid, least=0), _three(what, "block", block, least=1)
        if math.prod(threads) > self.max_threads_per_block:
            raise ValueError(self._too_many_threads(threads))
        for kind, sizes, limits in (("block", threads, BLOCK_LIMITS), ("grid", blocks, GRID_LIMITS)):
            for axis, size, limit in zip("xyz", sizes, limits, strict=True):
                if size > limit:
                    raise ValueError(f"{what}: the {kind} {sizes} has {size:,} in {axis}, expected at most {limit:,}")
        self._check_shared_memory(shared_bytes)
        if cluster is not None:
            self._check_cluster(blocks, _three(what, "cluster", cluster, least=1))
        return blocks

    def _dimensions(
        self, grid: Size, block: Size, cluster: Size | None
    ) -> tuple[tuple[int, int, int], tuple[int, int, int], tuple[int, int, int] | None]:
        """A valid grid, block and cluster in three dimensions."""
        what = f"kernel {self.name}"
        sizes = None if cluster is None else _three(what, "cluster", cluster, least=1)
        return _three(what, "grid", grid, least=0), _three(what, "block", block, least=1), sizes

    def values_at(self, values: Sequence[Any], given: Sequence[Any]) -> list[Any]:
        """The arguments of an earlier launch, `values`, with the addresses that `given` has in their places."""
        kinds = self.binary.types
        return [
            (new if isinstance(new, int) else 0) if kind.endswith("*") else old
            for kind, old, new in zip(kinds, values, given, strict=True)
        ]

    def _too_many_threads(self, threads: tuple[int, int, int]) -> str:
        count, most = math.prod(threads), self.max_threads_per_block
        why = f" with {self.binary.registers} registers each" if most < BLOCK_LIMITS[0] else ""
        return (
            f"kernel {self.name}: a block of {threads} has {count:,} threads, expected at most {most:,}{why}: for "
            f"{count:,} threads launch a grid of {-(-count // 256):,} blocks of 256"
        )

    def _check_shared_memory(self, dynamic: int) -> None:
        try:
            dynamic = operator.index(dynamic)
        except TypeError:
            raise TypeError(f"kernel {self.name}: shared_bytes must be an int, got {dynamic!r}") from None
        if dynamic < 0:
            raise ValueError(f"kernel {self.name}: shared_bytes must not be negative, got {dynamic:,}")
        unit = MULTIPROCESSORS.get(self.capability)
        static = self.binary.static_shared_bytes or 0
        if unit is not None and static + dynamic > unit.max_shared_bytes_per_block:
            raise ValueError(
                f"kernel {self.name}: a block needs {static:,} + {dynamic:,} bytes of shared memory (static + "
                f"dynamic), but {self.arch} has {unit.max_shared_bytes_per_block:,} per block"
            )

    def _check_cluster(self, grid: tuple[int, int, int], cluster: tuple[int, int, int]) -> None:
        if self.capability < (9, 0):
            raise ValueError(
                f"kernel {self.name}: clusters need sm_90 or later, but the kernel is compiled for {self.arch}"
            )
        if math.prod(cluster) > CLUSTER_LIMIT:
            raise ValueError(f"kernel {self.name}: a cluster of {cluster} has more than {CLUSTER_LIMIT} blocks")
        if any(blocks % size for blocks, size in zip(grid, cluster, strict=True)):
            raise ValueError(f"kernel {self.name}: the grid {grid} is not a multiple of the cluster {cluster}")

    # ---- on a GPU ------------------------------------------------------------------------------------------------

    def active_clusters(self, block: Size, cluster: Size, shared_bytes: int, device: torch.device) -> int:
        """The number of clusters that can run on the device at the same time. All further clusters of a grid wait until
        running clusters end.

        Raises:
            TypeError, ValueError: an invalid configuration.
            LaunchError: the driver refuses the configuration.
        """
        index = torch.cuda.current_device() if device.index is None else device.index
        key = (block, cluster, shared_bytes, index)
        if key not in self._active_clusters:
            configuration = self._configure(cluster, block, shared_bytes, cluster, False, index)
            with torch.cuda.device(index):
                try:
                    occupancy = self._loaded.occupancy
                    found = occupancy.max_active_clusters(configuration, stream=_current_stream(index))
                except Exception as error:
                    if not _is_of_the_driver(error):
                        raise
                    raise LaunchError(f"kernel {self.name}: clusters of {cluster} blocks: {error}") from error
            self._active_clusters[key] = int(found)
        return self._active_clusters[key]

    def _without_tensors(self, arguments: tuple[Any, ...], *configuration: Any) -> int:
        """Return the current device, for a launch without tensors. If there is no GPU, raise an error, but first report
        wrong arguments.
        """
        if not torch.cuda.is_available():
            self.check(*configuration)
            self._signature.values(arguments, -1)
            raise LaunchError(f"kernel {self.name}: no GPU here to launch it on")
        return torch.cuda.current_device()

    @property
    def _loaded(self) -> Any:
        """The loaded kernel, valid in all CUDA contexts."""
        if self._kernel is None:
            with _loading:  # a kernel that was loaded twice would have its attributes in only one of the copies
                if self._kernel is None:
                    self._kernel = self._load()
        return self._kernel

    def _load(self) -> Any:
        """Load the kernel. This does not invalidate a graph capture that is in progress."""
        core = nvrtc.require_cuda_core()
        from cuda.bindings import driver

        relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        mode = self._driver(driver.cuThreadExchangeStreamCaptureMode(relaxed))
        try:
            return core.ObjectCode.from_cubin(self.binary.cubin, name=self.name).get_kernel(self.binary.symbol)
        except Exception as error:
            if not _is_of_the_driver(error):
                raise
            raise LaunchError(f"kernel {self.name} for {self.arch} cannot be loaded: {error}") from error
        finally:
            self._driver(driver.cuThreadExchangeStreamCaptureMode(mode))

    def _configure(
        self, grid: Size, block: Size, shared_bytes: int, cluster: Size | None, cooperative: bool, device: int
    ) -> Any:
        """The configuration as an object of `cuda.core`, cached for the next launch."""
        core = nvrtc.require_cuda_core()
        if _arch_of(device) != self.arch.rstrip("af"):
            raise ValueError(
                f"kernel {self.name} is compiled for {self.arch}, but cuda:{device} is {_arch_of(device)}: "
                "compile(..., device=tensor.device)"
            )
        what = f"kernel {self.name}"
        with torch.cuda.device(device):
            _bind_context(device)
            self._allow(math.prod(_three(what, "block", block, least=1)), shared_bytes, device)
            blocks = self.check(grid, block, shared_bytes, cluster)
            settings = {"block": block, "shmem_size": shared_bytes, "is_cooperative": cooperative}
            if cluster is not None:
                sizes = settings["cluster"] = _three(what, "cluster", cluster, least=1)
                if math.prod(sizes) > PORTABLE_CLUSTER_LIMIT:
                    self._allow_large_clusters(device)
                # `cuda.core` expects the numbers of clusters as the grid
                blocks = tuple(n // size for n, size in zip(blocks, sizes, strict=True))  # type: ignore[assignment]
            configuration = core.LaunchConfig(grid=blocks, **settings)
        if len(self._configurations) >= CONFIGURATIONS_KEPT:
            self._configurations.clear()
        self._configurations[grid, block, shared_bytes, cluster, cooperative, device] = configuration
        return configuration

    def _allow(self, threads: int, shared_bytes: int, device: int) -> None:
        """Check the driver's thread limit of the kernel, and opt in to more than 48 KiB of shared memory."""
        from cuda.bindings import driver

        attribute, handle = driver.CUfunction_attribute, self._loaded.handle
        number = self._driver(driver.cuDeviceGet(device))
        limit = attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
        most = int(self._driver(driver.cuKernelGetAttribute(limit, handle, number)))
        if threads > most:
            raise ValueError(
                f"kernel {self.name}: a block has {threads:,} threads, but its registers and __launch_bounds__ allow "
                f"at most {most:,}"
            )
        if shared_bytes + (self.binary.static_shared_bytes or 0) > DEFAULT_SHARED_BYTES:
            dynamic = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            allowed = int(self._driver(driver.cuKernelGetAttribute(dynamic, handle, number)))
            if shared_bytes > allowed:
                self._driver(driver.cuKernelSetAttribute(dynamic, shared_bytes, handle, number))

    def _allow_large_clusters(self, device: int) -> None:
        from cuda.bindings import driver

        large = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
        self._driver(
            driver.cuKernelSetAttribute(large, 1, self._loaded.handle, self._driver(driver.cuDeviceGet(device)))
        )

    def _driver(self, results: tuple[Any, ...]) -> Any:
        """The result of a driver call.

        Raises:
            LaunchError: the call failed.
        """
        status, *values = results
        if int(status) != 0:
            raise LaunchError(f"kernel {self.name} on {self.arch}: the driver says {status.name}")
        return values[0] if values else None

    def _start(self, device: int, configuration: Any, values: list[Any]) -> None:
        _bind_context(device)
        wait = SYNCHRONOUS and not torch.cuda.is_current_stream_capturing()
        if wait:
            self._wait(device, f"work before kernel {self.name} failed")
        try:
            _launch(_current_stream(device), configuration, self._loaded, *values)
        except Exception as error:
            if not _is_of_the_driver(error):
                raise
            raise LaunchError(
                f"kernel {self.name} was not launched with {configuration}: {error}. The error may come from earlier "
                "work: ROOFTOP_SYNC=1 shows which"
            ) from error
        if wait:
            self._wait(device, f"kernel {self.name} failed, launched with {configuration}")

    def _wait(self, device: int, what: str) -> None:
        try:
            torch.cuda.current_stream(device).synchronize()
        except RuntimeError as error:
            raise LaunchError(f"{what}: {first_line(error)}") from error


@dataclass(frozen=True)
class Configured:
    """A kernel with all that a launch on one device needs, except the addresses of its tensors. known_calls.py and
    the C++ code in `cpp/` repeat launches with it.

    Attributes:
        configuration: grid, block and so on, as an object of `cuda.core`.
        values: the kernel's arguments, as `cuda.core.launch` takes them. The addresses are those of the first launch.
        threads: threads of a block in three dimensions.
        cluster: blocks of a cluster in three dimensions, or None.
    """

    kernel: Kernel
    device: int
    configuration: Any
    values: list[Any]
    threads: tuple[int, int, int]
    shared_bytes: int
    cluster: tuple[int, int, int] | None
    cooperative: bool

    takes_descriptors: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """The kernel's name, by which launches are counted."""
        return self.kernel.name

    @property
    def handle(self) -> int:
        """The loaded kernel's handle (a CUkernel), which is valid in all contexts."""
        return int(self.kernel._loaded.handle)

    def launch(self, grid: tuple[int, ...], given: Sequence[Any]) -> None:
        """Launch the kernel on the current stream. The kernel's device must be the current device.

        Args:
            grid: the grid of the first launch.
            given: the kernel's arguments, with addresses for pointers.
        """
        self.kernel._start(self.device, self.configuration, self.kernel.values_at(self.values, given))


def _is_of_the_driver(error: Exception) -> bool:
    """Whether `cuda.core` raised an error for a failed driver call. `cuda.core` does not export the class of such
    errors.
    """
    return type(error).__name__ == "CUDAError"


def _launch(*arguments: Any) -> None:
    """Import `cuda.core`, replace this function by `cuda.core.launch`, and launch."""
    global _launch
    _launch = nvrtc.require_cuda_core().launch
    _launch(*arguments)


def _current_stream(device: int) -> Any:
    """PyTorch's current stream as a stream of `cuda.core`. The result is cached, since PyTorch's streams live as long
    as the process.
    """
    key = (device, torch._C._cuda_getCurrentRawStream(device))
    stream = _streams.get(key)
    if stream is None:
        stream = _streams[key] = nvrtc.require_cuda_core().Stream.from_handle(key[1])
    return stream


def _bind_context(device: int) -> None:
    """Make the device's CUDA context current in this thread. Calls of the CUDA runtime do this by themselves, but
    launches through the driver do not.
    """
    if not getattr(_thread, "bound", False):
        nvrtc.require_cuda_core().Device(device).set_current()
        _thread.bound = True


def _threads_with(registers: int | None, capability: tuple[int, int]) -> int:
    """The maximum number of threads of a block if each thread uses `registers` registers, with the same number of warps
    on each sub-partition of the multiprocessor.
    """
    unit = MULTIPROCESSORS.get(capability)
    if unit is None or not registers:
        return BLOCK_LIMITS[0]
    of_warp = -(-registers * WARP // unit.register_unit) * unit.register_unit
    warps = unit.registers // unit.sub_partitions // of_warp * unit.sub_partitions
    return min(unit.max_threads_per_block, warps * WARP)


def _three(what: str, kind: str, size: Size, least: int) -> tuple[int, int, int]:
    sizes = size if isinstance(size, tuple) else (size,)
    try:
        x, y, z = (*(operator.index(each) for each in sizes), *(1,) * (3 - len(sizes)))
    except (TypeError, ValueError):
        raise TypeError(f"{what}: {kind} must be an int or a tuple of one to three ints, got {size!r}") from None
    if min(x, y, z) < least:
        raise ValueError(f"{what}: {kind} must be at least {least} in each dimension, got {size!r}")
    return x, y, z
