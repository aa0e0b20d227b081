"""Choose GPUs, and use several of them at a time from one process.

`select_devices` chooses by free memory, compute capability and NVLink; `on_each` gives jobs to devices as they become
free; `Ensemble` runs one model on each device.

The host starts the work of each device from a separate thread, in the grad mode, inference mode and autocast of the
calling thread. Other thread state is not carried over: a TorchDispatchMode of the calling thread (such as a counting
mode) does not see the operators of these threads. Threads suffice for two to eight devices if each piece of work takes
some milliseconds. A training loop needs a process for each device (torchrun).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from rooftop.errors import RooftopError
from rooftop.hardware.device import Gpu, devices
from rooftop.hardware.threads import Modes, caller_stream, current, noted, places_of, run_together, with_index
from rooftop.words import counted

Result = TypeVar("Result")

NVLINK_PATHS = ("NVLink", "NVLink switch")
"""The values of `rooftop.hardware.topology.Peer.path` for a path over NVLink."""


class DeviceSelectionError(RooftopError, ValueError):
    """Fewer GPUs qualify than requested. The message gives the reason for each GPU that does not qualify."""


def select_devices(
    count: int = 1,
    min_free_bytes: int = 0,
    min_capability: tuple[int, int] | None = None,
    near: torch.device | str | int | None = None,
) -> list[torch.device]:
    """Choose GPUs that qualify. Without `near`, GPUs with the most free memory come first.

    Args:
        count: the number of GPUs.
        min_free_bytes: bytes that must be free on each GPU. The driver counts memory that torch caches in this process
            as used.
        min_capability: lowest compute capability, e.g. (9, 0).
        near: a GPU with which the chosen GPUs will work. `near` itself is not chosen. GPUs that NVLink connects to
            `near` come first, then GPUs whose memory `near` can access directly, then all others. In each group,
            GPUs with the most free memory come first.

    Raises:
        DeviceSelectionError: fewer than `count` GPUs qualify.
        ValueError: `count` is below 1, `min_capability` is not a pair of integers, or `near` is not a GPU of this
            machine.
    """
    if not isinstance(count, int) or count < 1:
        raise ValueError(f"count is the number of GPUs to choose: expected 1 or more, got {count!r}")
    if min_capability is not None and not _is_capability(min_capability):
        raise ValueError(f"min_capability is a compute capability like (9, 0), got {min_capability!r}")
    gpus = [device for device in devices() if isinstance(device, Gpu)]
    partner = None if near is None else _gpu_of(near, gpus)
    free = {gpu.index: _free_bytes(gpu) for gpu in gpus}
    reasons = {gpu.index: _reasons(gpu, free[gpu.index], min_free_bytes, min_capability, partner) for gpu in gpus}
    fit = [gpu for gpu in gpus if not reasons[gpu.index]]
    if len(fit) < count:
        raise DeviceSelectionError(_refusal(gpus, reasons, count, min_free_bytes, min_capability))
    fit.sort(key=lambda gpu: (_distance(partner, gpu), -free[gpu.index], gpu.index))
    return [torch.device("cuda", gpu.index) for gpu in fit[:count]]


def _is_capability(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(isinstance(number, int) for number in value)


def _gpu_of(near: torch.device | str | int, gpus: list[Gpu]) -> Gpu:
    with suppress(RuntimeError):  # no device has this name or index
        device = torch.device("cuda", near) if isinstance(near, int) else with_index(torch.device(near))
        for gpu in gpus:
            if device == torch.device("cuda", gpu.index):
                return gpu
    raise ValueError(
        f"near={near!r} is not a GPU of this machine: torch can use {counted(len(gpus), 'GPU')}, from cuda:0"
    )


def _free_bytes(gpu: Gpu) -> int:
    """Free bytes from NVML; without NVML from CUDA, which creates a context on that GPU (some 100 MB)."""
    return torch.cuda.mem_get_info(gpu.index)[0] if gpu.free_bytes is None else gpu.free_bytes


def _reasons(
    gpu: Gpu, free: int, min_free_bytes: int, min_capability: tuple[int, int] | None, partner: Gpu | None
) -> list[str]:
    """The reasons why a GPU does not meet the caller's requirements; empty if the GPU meets them."""
    reasons = []
    if free < min_free_bytes:
        reasons.append(f"{_size(free)} free of {_size(gpu.memory_bytes)}")
    if min_capability is not None and gpu.compute_capability < min_capability:
        reasons.append(f"compute capability {_dotted(gpu.compute_capability)}")
    if partner is not None and gpu.index == partner.index:
        reasons.append("the GPU that the others should be near")
    return reasons


def _distance(partner: Gpu | None, gpu: Gpu) -> int:
    peer = None if partner is None else partner.topology.get(f"cuda:{gpu.index}")
    if peer is None:
        return 0 if partner is None else 2
    return 0 if peer.path in NVLINK_PATHS else 1 if peer.peer_access else 2


def _refusal(
    gpus: list[Gpu],
    reasons: dict[int, list[str]],
    count: int,
    min_free_bytes: int,
    min_capability: tuple[int, int] | None,
) -> str:
    wanted = [f"{_size(min_free_bytes)} free"] if min_free_bytes else []
    wanted += [f"compute capability {_dotted(min_capability)}"] if min_capability else []
    asked = f"{count} GPU{'s' if count > 1 else ''}" + (f" with at least {' and '.join(wanted)}" if wanted else "")
    if not gpus:
        return f"asked for {asked}, but torch can use no GPU on this machine: check the driver (nvidia-smi)"
    each = [f"cuda:{g.index} ({g.name}): {', '.join(reasons[g.index]) or 'qualifies'}" for g in gpus]
    fit = sum(not why for why in reasons.values())
    return f"asked for {asked}, {fit} of {len(gpus)} qualify: {'; '.join(each)}"


def _size(count: int) -> str:
    return f"{count / 2**30:.3g} GiB" if count >= 2**30 else f"{count / 2**20:.3g} MiB"


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def on_each(
    jobs: Sequence[Callable[[torch.device], Result]], devices: Sequence[torch.device | str] | None = None
) -> list[Result]:
    """Run jobs on several devices at a time. Each device takes the next job from a queue when it is free.

    Each device has a thread and, on a GPU, its own stream. Device and stream are current in the thread. The stream
    first waits for the work that the calling thread has launched on its current streams of all devices in `devices`. A
    job ends when its work on the stream has ended.

    Args:
        jobs: functions that take a device. A result may be on that device.
        devices: the devices to use. By default all GPUs that torch can use, or the CPU if there are none. A device that
            is named twice runs two jobs at a time.

    Returns:
        The results, in the order of the jobs. Tensors in the results (in lists, tuples and dicts) are safe to use on
        the calling thread's current stream.

    Raises:
        ValueError: there are no devices.
        BaseException: the first exception in time, with the job's number and device as a note. After this exception no
            job is started, and the exception is raised when the running jobs have ended.
    """
    places = places_of(devices)
    modes = Modes.of_this_thread()
    waiting = deque(enumerate(jobs))
    results: dict[int, Result] = {}

    def serve(device: torch.device, stream: torch.cuda.Stream | None) -> None:
        with modes.entered(), current(stream):
            for caller in callers:
                if stream is not None and caller is not None:
                    stream.wait_stream(caller)
            while waiting:
                try:
                    number, job = waiting.popleft()
                except IndexError:  # another device took the last job
                    return
                with noted(f"job {number} on {device}"):
                    results[number] = job(device)
                    if stream is not None:
                        stream.synchronize()

    callers = {caller_stream(device) for device in places}
    calls = [partial(serve, device, _own_stream(device, n)) for n, device in enumerate(places[: len(jobs)])]
    with ThreadPoolExecutor(max(1, len(calls)), "rooftop-on-each") as threads:
        run_together(threads, calls, cancel=waiting.clear)
    ordered = [results[number] for number in range(len(jobs))]
    for tensor in tree_leaves(ordered):
        # the allocator ties a result's memory to the job's stream, on which it was allocated
        if isinstance(tensor, Tensor) and tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return ordered


class Ensemble(nn.Module):
    """Run several models on the same input at the same time, each model on its own device.

    Each model runs on the calling thread's current stream of the model's device. `forward` does not wait for the GPUs.
    Two models on one GPU run one after the other. Gradients flow back to the input and to every model.

    Args:
        modules: the models, which are moved to their devices in place. Models on different devices must not share
            parameters or buffers.
        devices: one device for each model. By default the choice of `select_devices`, or the CPU if there are no GPUs.
        combine: function that makes one result from the list of outputs, which are all on the first device. By default
            `torch.stack`.

    Raises:
        ValueError: there are no modules, the numbers of devices and modules differ, or two modules on different devices
            share a parameter or a buffer.
        DeviceSelectionError: no devices are named, and there are fewer GPUs than modules.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        devices: Sequence[torch.device | str] | None = None,
        combine: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        super().__init__()
        if not modules:
            raise ValueError("an ensemble needs at least one module")
        if devices is None and torch.cuda.is_available():
            devices = select_devices(len(modules))
        self.devices = places_of(["cpu"] * len(modules) if devices is None else devices)
        if len(self.devices) != len(modules):
            raise ValueError(
                f"{len(modules)} modules need {len(modules)} devices, got {len(self.devices)}: name a device for each "
                "module (a device may be named twice)"
            )
        self.combine = _stacked if combine is None else combine
        self.models = nn.ModuleList(module.to(device) for module, device in zip(modules, self.devices, strict=True))
        self._check_places()
        self._threads: ThreadPoolExecutor | None = None  # created at the first call
        self._process = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run all models on the same arguments.

        Args:
            *args, **kwargs: arguments of each model. Tensors in the arguments (in lists, tuples and dicts) are copied
                to the model's device, from any device.

        Returns:
            (models, *shape of an output) on the first device, or the result of `combine`.

        Raises:
            TypeError: an output is not a tensor, and `combine` is not given.
            BaseException: the first exception in time, with the model's number and device as a note, after all models
                have ended.
        """
        modes = Modes.of_this_thread()
        streams = [caller_stream(device) for device in self.devices]
        # A copy from a GPU runs on that GPU's stream, so launch the copy before that GPU's own model.
        inputs = [_copied((args, kwargs), device, from_gpu=True) for device in self.devices]
        outputs: dict[int, Any] = {}

        def run(number: int, device: torch.device) -> None:
            with modes.entered(), current(streams[number]), noted(f"model {number} on {device}"):
                # A copy from pageable memory keeps the host busy, so each thread copies its own arguments.
                own_args, own_kwargs = _copied(inputs[number], device, from_gpu=False)
                outputs[number] = self.models[number](*own_args, **own_kwargs)

        run_together(
            self._running_threads(), [partial(run, number, device) for number, device in enumerate(self.devices)]
        )
        first = self.devices[0]
        gathered = [_copied(outputs[n], first, from_gpu=None) for n in range(len(self.devices))]
        return self.combine(gathered)

    def _running_threads(self) -> ThreadPoolExecutor:
        """The threads, which are kept between calls, because starting a thread takes longer than passing it a call."""
        if self._threads is None or self._process != os.getpid():  # threads do not survive a fork
            self._threads = ThreadPoolExecutor(len(self.devices), "rooftop-ensemble")
            self._process = os.getpid()
        return self._threads

    def __getstate__(self) -> dict[str, Any]:
        """The state for copies and pickles, without the threads."""
        return {**self.__dict__, "_threads": None}

    def _check_places(self) -> None:
        """Check that each parameter and buffer is on its model's device. The check fails for a parameter that two
        models share, because the parameter is on the last model's device.
        """
        for number, (model, device) in enumerate(zip(self.models, self.devices, strict=True)):
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if tensor.device != device:
                    raise ValueError(
                        f"{name} of module {number} is on {tensor.device}, not on {device}: modules on different "
                        "devices cannot share a parameter; give the ensemble copies (copy.deepcopy)"
                    )


def _stacked(outputs: list[Any]) -> Tensor:
    for number, output in enumerate(outputs):
        if not isinstance(output, Tensor):
            raise TypeError(
                f"model {number} returned a {type(output).__name__}, but only tensors can be stacked: pass combine=, "
                "a function of the list of outputs"
            )
    return torch.stack(outputs)


def _copied(values: Any, device: torch.device, from_gpu: bool | None) -> Any:
    """The values with their tensors moved to the device. `from_gpu`: move only tensors on a GPU (True), only tensors
    on the CPU (False), or all tensors (None).
    """

    def copy(tensor: Tensor) -> Tensor:
        if from_gpu is not None and tensor.is_cuda != from_gpu:
            return tensor
        # A copy to the host must block, because its reader cannot know when a non-blocking copy is complete.
        return tensor.to(device, non_blocking=device.type == "cuda")

    return tree_map_only(Tensor, copy, values)


@cache
def _own_stream(device: torch.device, worker: int) -> torch.cuda.Stream | None:
    """A cached stream of the device. Libraries keep a workspace for every stream that they have used, so new streams
    would cost memory."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None
