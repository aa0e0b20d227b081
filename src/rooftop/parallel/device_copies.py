"""Copy tensors to other devices, and sum the copies' gradients on the tensors' own device.

Forward copies every tensor to every device. Backward copies the gradients back and adds them. Forward is a broadcast
and backward a reduction, and each is the derivative of the other. The link between two devices limits the speed of
large copies; the launch of each copy limits the speed of small copies. So tensors of up to `COALESCED_BYTES` are copied
together, in one buffer per dtype. Larger tensors are copied directly, without a second pass through memory.

Each copy has its tensor's strides (channels last stays channels last), and an address that is aligned for vector loads
(`ALIGNMENT_BYTES`). Each copy has its own version counter, so that a program may write to one copy while autograd has
saved another copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from rooftop.hardware.threads import caller_stream, current

COALESCED_BYTES = 1 << 20
"""Tensors of at most this size are copied together. Copying this size takes 10 us at 100 GB/s. An H200's host launches
an operator in 6.6 us (`machines/h200.json`)."""

ALIGNMENT_BYTES = 256
"""The alignment of copies. CUDA's own allocations also have this alignment."""

Streams = dict[torch.device, torch.cuda.Stream]


def copies(tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> list[list[Tensor]]:
    """Copy each tensor to each device. In grad mode, gradients flow back through the copies to the tensor.

    If no copy of a tensor is used, the tensor gets no gradient (None instead of zeros). The host waits for a GPU only
    to copy tensors from a GPU to the CPU.

    Args:
        tensors: the tensors to copy, all on one device.
        devices: the devices, with indices. Repeated devices, and the tensors' own device, also get separate copies.

    Returns:
        For each device, the copies in the order of the tensors.
    """
    learning = [n for n, tensor in enumerate(tensors) if tensor.requires_grad and torch.is_grad_enabled()]
    # A non-leaf tensor gets a separate autograd node. With a common node, each backward would traverse the graphs of
    # all tensors.
    computed = [n for n in learning if tensors[n].grad_fn is not None]
    leaves = [n for n in learning if tensors[n].grad_fn is None]
    fixed = [n for n in range(len(tensors)) if n not in set(learning)]
    broadcast = _Copies.apply(devices, *(tensors[n] for n in leaves))[1:] if leaves else ()
    found = []
    for number, device in enumerate(devices):
        made = dict(zip(leaves, broadcast[number * len(leaves) :], strict=False))
        made |= dict(zip(fixed, _copied([tensors[n] for n in fixed], device), strict=True))
        made |= {n: tensors[n].to(device, non_blocking=device.type == "cuda", copy=True) for n in computed}
        found.append([made[n] for n in range(len(tensors))])
    return found


class _Copies(torch.autograd.Function):
    """Copies the tensors of one device. The results are an empty tensor on that device, then all copies on the first of
    `devices`, then all copies on the second, and so on.

    The empty tensor tells autograd that the gradients of backward are on the tensors' own device. Otherwise PyTorch
    warns that gradients come from another stream than the stream on which PyTorch adds them to `.grad`.
    """

    @staticmethod
    def forward(ctx: Any, devices: Sequence[torch.device], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.home, ctx.count = tensors[0].device, len(tensors)
        # The forward and the backward of the replicas run on these streams.
        ctx.streams = _current_streams([ctx.home, *devices])
        ctx.set_materialize_grads(False)
        first = torch.empty(0, dtype=tensors[0].dtype, device=ctx.home)
        return first, *chain.from_iterable(_copied(tensors, device) for device in devices)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        with _entered(ctx.streams, ctx.home):
            return None, *_Sums.apply(ctx.home, ctx.count, *gradients[1:])


class _Sums(torch.autograd.Function):
    """Computes `count` sums over several devices, on the device `home`. The summands are given device by device, in the
    order of `_Copies`' results without the empty tensor.

    A summand of None counts as zero. If all summands are None, the sum is None.
    """

    @staticmethod
    def forward(ctx: Any, home: torch.device, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.count, ctx.devices = count, [None if tensor is None else tensor.device for tensor in tensors]
        ctx.set_materialize_grads(False)
        sums: list[Tensor | None] = [None] * count
        for start in range(0, len(tensors), count):
            there = {n: tensor for n, tensor in enumerate(tensors[start : start + count]) if tensor is not None}
            for n, tensor in zip(there, _moved(list(there.values()), home), strict=True):
                known = sums[n]
                sums[n] = tensor if known is None else known + tensor
        return tuple(sums)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        found: list[Tensor | None] = []
        for number, device in enumerate(ctx.devices):
            gradient = gradients[number % ctx.count]
            found.append(None if device is None or gradient is None else gradient.to(device))
        return None, None, *found


def _moved(tensors: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
    """Copy tensors from one device to another. Tensors on the target device are returned unchanged."""
    return tensors if not tensors or tensors[0].device == device else _copied(tensors, device)


@torch.no_grad()
def _copied(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy tensors with their values and strides. For a copy to the host, the host waits, since a pending copy is not
    safe to read."""
    to_gpu = device.type == "cuda"
    together: dict[torch.dtype, list[int]] = {}
    made: dict[int, Tensor] = {}
    for number, tensor in enumerate(tensors):
        if _may_go_with_others(tensor):
            together.setdefault(tensor.dtype, []).append(number)
        else:
            made[number] = tensor.to(device, non_blocking=to_gpu, copy=True)
    for dtype, numbers in together.items():
        group = [tensors[number] for number in numbers]
        starts, size = _places_in_buffer(group)
        buffer = torch.empty(size, dtype=dtype, device=group[0].device)
        torch._foreach_copy_(_slices(buffer, group, starts), group)
        arrived = buffer.to(device, non_blocking=to_gpu)
        # .data: unlike slices, the results are no views, and have separate version counters.
        made |= {n: part.data for n, part in zip(numbers, _slices(arrived, group, starts), strict=True)}
    return [made[number] for number in range(len(tensors))]


def _may_go_with_others(tensor: Tensor) -> bool:
    """Whether a tensor may be copied in one buffer with others: it is strided and small (at most `COALESCED_BYTES`),
    has no gaps or overlaps in memory, and its class is `Tensor` or `nn.Parameter`."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.numel() * tensor.element_size() <= COALESCED_BYTES
        and (tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last))
    )


def _places_in_buffer(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """(start of each tensor in a common buffer, size of the buffer), both in elements."""
    step = ALIGNMENT_BYTES // tensors[0].element_size()
    starts, size = [], 0
    for tensor in tensors:
        starts.append(size)
        size += -(-tensor.numel() // step) * step
    return starts, size


def _slices(buffer: Tensor, tensors: Sequence[Tensor], starts: Sequence[int]) -> list[Tensor]:
    """A slice of the buffer for each tensor, with the tensor's shape and strides."""
    return [buffer.as_strided(t.shape, t.stride(), start) for t, start in zip(tensors, starts, strict=True)]


def _current_streams(devices: Sequence[torch.device]) -> Streams:
    streams = {device: caller_stream(device) for device in devices}
    return {device: stream for device, stream in streams.items() if stream is not None}


@contextmanager
def _entered(streams: Streams, home: torch.device) -> Iterator[None]:
    """Make these streams current within an autograd node. Autograd itself handles the streams of only one device per
    node.

    Autograd accumulates gradients on a device's default stream unless it knows the right stream. Autograd assumes that
    a node's results are ready on the device's default stream or on the node's own stream. So, at the start, each given
    stream waits for autograd's streams on its device. At the end, autograd's streams on all given devices wait for the
    given stream of `home`.
    """
    autograds = [(torch.cuda.current_stream(device), torch.cuda.default_stream(device)) for device in streams]
    for stream, others in zip(streams.values(), autograds, strict=True):
        for other in others:
            stream.wait_stream(other)
    with ExitStack() as stack:
        for stream in streams.values():
            stack.enter_context(current(stream))
        yield
    if home in streams:
        for other in chain.from_iterable(autograds):
            other.wait_stream(streams[home])
