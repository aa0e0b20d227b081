"""Explain what fills a GPU's memory: list the tensors, each with the module and line that allocated it, and give
advice.

An active `explained_memory` records every allocation with its Python stack (`torch.cuda.memory`'s history), and marks
each allocation with the running module. If memory runs out, `explained_memory` adds a note to the error. The note lists
the largest live tensors. Parameters, gradients, buffers and optimizer states are identified by their addresses. Other
memory that a forward pass allocated counts as activations.
"""

from __future__ import annotations

import gc
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from rooftop.hardware.memory import DeviceMemory, gpu_memory
from rooftop.hardware.module_paths import ModulePaths, joined
from rooftop.hardware.running_calls import RunningCalls, caller_of_hook
from rooftop.hardware.source_lines import SourceLine, user_line

PARAMETER, GRADIENT, BUFFER, OPTIMIZER_STATE = "parameters", "gradients", "buffers", "optimizer states"
ACTIVATION, BACKWARD, OTHER = "activations", "backward pass", "other tensors"

ADVICE = {
    PARAMETER: "hold them in bfloat16, or shard them over several GPUs (FSDP)",
    GRADIENT: "free them before the forward pass (zero_grad(set_to_none=True)), or shard them over several GPUs (FSDP)",
    OPTIMIZER_STATE: "use an optimizer with a smaller state (SGD, Adafactor, 8-bit Adam), or shard it (FSDP)",
    ACTIVATION: "use a smaller batch, activation checkpointing (torch.utils.checkpoint) or bfloat16 autocast; "
    "without a backward pass, torch.inference_mode()",
    BACKWARD: "use a smaller batch or bfloat16 autocast",
    OTHER: "look at the lines above for inputs, losses or outputs that are kept from step to step",
}
"""Advice for each kind of memory."""

ADVISED_SHARE = 0.2  # a kind of tensors with a smaller share of all allocated bytes gets no advice
# share of the GPU's memory above which memory outside PyTorch is mentioned; a CUDA context takes less
OTHERS_SHARE = 0.1
MOST_ENTRIES = 200_000
"""Maximum number of allocations in the allocator's history, each with a stack of about 1 KB. With more allocations, the
module of the oldest tensors is lost.
"""

MODULE_MARK, OPTIMIZER_MARK = "module ", "optimizer"


@dataclass(frozen=True)
class KnownTensor:
    """A tensor whose storage starts at an allocation's address. `kind` and `name` are None if no module or optimizer
    owns the tensor."""

    kind: str | None
    name: str | None
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class LiveTensor:
    """An allocation that a tensor holds.

    Attributes:
        size_bytes: requested size, before the allocator's rounding.
        kind: one of the constants of this file, such as PARAMETER ("parameters").
        name: name of a parameter, gradient, buffer or optimizer state: "encoder.layers.3.linear1.weight".
        module: path of the module that was running at the allocation; None: no module was running, or the allocation
            was not recorded.
        line: line of the user's program that allocated; None: the allocation was not recorded, or an autograd thread
            made it.
        shape, dtype: shape and dtype; None if no Python object holds the tensor (autograd saved it).
    """

    size_bytes: int
    kind: str
    name: str | None
    module: str | None
    line: SourceLine | None
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None


@dataclass(frozen=True)
class MemoryGroup:
    """Live tensors of one kind that the same line allocated in the same module."""

    kind: str
    module: str | None
    line: SourceLine | None
    count: int
    total_bytes: int


@dataclass(frozen=True)
class MemoryExplanation:
    """The memory of one GPU, and the tensors that fill it. `str(explanation)` is a readable text.

    Attributes:
        memory: allocated, reserved, free and total bytes.
        requested_bytes: size of the failed allocation; None: memory has not run out.
        module, line: the module and the line in which the allocation failed.
        by_kind: kind -> bytes, largest first. The sum is the number of bytes that live tensors requested.
        tensors: the largest tensors, in descending order of size.
        groups: the largest groups, in descending order of size.
        advice: sentences, the most helpful first.
    """

    memory: DeviceMemory
    requested_bytes: int | None
    module: str | None
    line: SourceLine | None
    by_kind: dict[str, int]
    tensors: tuple[LiveTensor, ...]
    groups: tuple[MemoryGroup, ...]
    advice: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(_text(self))


class MemoryRecording:
    """The value that `explained_memory` yields.

    Attributes:
        explanation: explanation of the out-of-memory error that ended the block, or None.
    """

    def __init__(self) -> None:
        self.explanation: MemoryExplanation | None = None
        self._watched = _Watched()

    def explain(self, device: int | None = None, *, most: int = 10) -> MemoryExplanation:
        """Explain which tensors hold the memory now (see `explain_memory`)."""
        return _explain(self._watched, device, most, error=None)


def explain_memory(
    module: nn.Module | None = None,
    *,
    optimizers: Sequence[Optimizer] = (),
    device: int | None = None,
    most: int = 10,
) -> MemoryExplanation:
    """Explain which tensors hold the memory of a GPU now.

    Modules and lines are known only for memory that was allocated inside `explained_memory`.

    Args:
        module: a module whose parameters, gradients and buffers are named.
        optimizers: optimizers whose states are named.
        device: index of the GPU; by default the current GPU.
        most: maximum number of tensors, and of groups, to list.

    Raises:
        RuntimeError: there is no GPU.
    """
    watched = _Watched()
    if module is not None:
        watched.add_root(module)
    for optimizer in optimizers:
        watched.add_optimizer(optimizer)
    return _explain(watched, device, most, error=None)


def memory_error_in_words(error: BaseException) -> str | None:
    """A short text about an out-of-memory error of a GPU or of the CPU; None for any other error.

    The text is the beginning of the first line of the error's message. For PyTorch's RuntimeError on the CPU, the text
    says how much memory the CPU could not allocate.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return ". ".join(str(error).split(". ")[:2]).split("\n")[0].rstrip(".") or type(error).__name__
    if isinstance(error, MemoryError):
        return str(error).split("\n")[0].rstrip(".") or type(error).__name__
    asked = re.search(r"DefaultCPUAllocator: .*tried to allocate (\d+) bytes", str(error))
    if isinstance(error, RuntimeError) and asked:
        return f"the CPU cannot allocate {_size(int(asked[1]))} more"
    return None


@contextmanager
def memory_error_as(other: Callable[[str], Exception]) -> Iterator[None]:
    """Within the block, an out-of-memory error of a GPU or of the CPU becomes the error `other(words)`.

    Args:
        other: makes the error to raise; `words` is the text of `memory_error_in_words`.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        words = memory_error_in_words(error)
        if words is None:
            raise
        raise other(words) from error


@contextmanager
def explained_memory(module: nn.Module | None = None, *, most: int = 10) -> Iterator[MemoryRecording]:
    """Within the block, an out-of-memory error gets a note that explains which tensors hold the memory.

    Within the block, each allocation takes a few microseconds longer than usual. Without a GPU the context does
    nothing. If a history is already being recorded (`torch.cuda.memory._record_memory_history`), this history is used
    and left running. Tensors that only the failing expression held are freed too early to be counted.

    Args:
        module: the module at which the paths of submodules start; by default the first module that is called.
        most: maximum number of tensors, and of groups, to list.

    Raises:
        torch.OutOfMemoryError: the original error, with the explanation as a note (`add_note`).
    """
    recording = MemoryRecording()
    if module is not None:
        recording._watched.add_root(module)
    if not torch.cuda.is_available():
        yield recording
        return
    torch.cuda.init()  # initialize CUDA, since recording needs an allocator
    with ExitStack() as ending:
        if not torch._C._cuda_isHistoryEnabled():
            torch.cuda.memory._record_memory_history(
                context="alloc",
                stacks="python",
                max_entries=MOST_ENTRIES,
                clear_history=True,
                skip_actions=["free_requested", "free_completed", "segment_alloc", "segment_free", "snapshot"],
            )
            ending.callback(torch.cuda.memory._record_memory_history, None)
        ending.enter_context(_marking(recording._watched, torch.cuda.memory._set_memory_metadata))
        try:
            yield recording
        except torch.OutOfMemoryError as error:
            try:
                recording.explanation = _explain(recording._watched, None, most, error)
                error.add_note(str(recording.explanation))
            except Exception as trouble:  # a failed explanation must not hide the original error
                error.add_note(f"rooftop could not explain the error: {type(trouble).__name__}: {trouble}")
            raise


class _Watched:
    """The root modules and the optimizers whose tensors the explanation names. This object keeps no module alive, since
    the program may drop a module to free memory."""

    def __init__(self) -> None:
        self._paths = ModulePaths()
        self._roots: WeakValueDictionary[str, nn.Module] = WeakValueDictionary()  # scope -> module
        self._optimizers: list[ref[Optimizer]] = []

    @property
    def roots(self) -> list[tuple[str, nn.Module]]:
        """The roots, as (scope, module)."""
        return list(self._roots.items())

    @property
    def optimizers(self) -> list[Optimizer]:
        return [optimizer for each in self._optimizers if (optimizer := each()) is not None]

    def add_root(self, module: nn.Module) -> None:
        self._roots[self._paths.adopt(module)] = module

    def add_optimizer(self, optimizer: Optimizer) -> None:
        if not any(known is optimizer for known in self.optimizers):
            self._optimizers.append(ref(optimizer))

    def scope(self, module: nn.Module, running: Sequence[str]) -> str:
        """The scope of a module that is called inside calls of other modules (see `ModulePaths.of_call`). A module that
        is in no known root becomes a root."""
        if not self._paths.knows(module):
            self.add_root(module)
        return self._paths.of_call(module, running)


@contextmanager
def _marking(watched: _Watched, mark: Callable[[str], object]) -> Iterator[None]:
    """In the block, call `mark` in a thread whenever another module or optimizer becomes the innermost that runs there.
    The argument is MODULE_MARK with the module's scope, OPTIMIZER_MARK, or "" if neither runs."""
    threads = threading.local()  # per thread, as torch's mark is: backward passes run in other threads

    def calls() -> tuple[RunningCalls, RunningCalls]:
        """Return this thread's stacks of running calls: the scopes of its modules, and the arguments of `mark` for its
        modules and optimizers."""
        if not hasattr(threads, "calls"):
            threads.calls = RunningCalls(), RunningCalls()
        scopes, marks = threads.calls
        return scopes, marks

    def leaves(caller: FrameType) -> None:
        scopes, marks = calls()
        scopes.leave(caller)
        marks.leave(caller)  # finds no mark if the call began before the hooks were set
        marks.settle(caller)
        mark(marks.innermost or "")

    def module_enters(module: nn.Module, args: Any) -> None:
        scopes, marks = calls()
        call = caller_of_hook(sys._getframe(1))
        scopes.settle(call.f_back)
        marks.settle(call.f_back)
        scope = watched.scope(module, scopes.names)
        scopes.enter(scope, call)
        marks.enter(MODULE_MARK + (scope or type(module).__name__), call)
        mark(marks.innermost or "")

    def module_leaves(module: nn.Module, args: Any, output: Any) -> None:
        leaves(sys._getframe(1))

    def optimizer_enters(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        watched.add_optimizer(optimizer)
        _, marks = calls()
        step = sys._getframe(1)
        marks.settle(step.f_back)
        marks.enter(OPTIMIZER_MARK, step)
        mark(OPTIMIZER_MARK)

    def optimizer_leaves(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        leaves(sys._getframe(1))

    with ExitStack() as hooks:
        hooks.callback(mark, "")
        for handle in (
            register_module_forward_pre_hook(module_enters),
            register_module_forward_hook(module_leaves, always_call=True),
            register_optimizer_step_pre_hook(optimizer_enters),
            register_optimizer_step_post_hook(optimizer_leaves),
        ):
            hooks.callback(handle.remove)
        yield


def _explain(watched: _Watched, device: int | None, most: int, error: Exception | None) -> MemoryExplanation:
    if not torch.cuda.is_available():
        raise RuntimeError("the allocator's snapshot needs an NVIDIA GPU, and torch finds none")
    snapshot = torch.cuda.memory._snapshot()
    if device is None:
        found = re.search(r"GPU (\d+) has", str(error or ""))
        device = int(found[1]) if found else torch.cuda.current_device()
    free, _ = torch.cuda.mem_get_info(device)
    known = _known_tensors(watched.roots, watched.optimizers)
    return explanation_of(snapshot, gpu_memory(device, free), known, device, out=error is not None, most=most)


def explanation_of(
    snapshot: Mapping[str, Any],
    memory: DeviceMemory,
    known: Mapping[int, KnownTensor],
    device: int,
    *,
    out: bool,
    most: int = 10,
) -> MemoryExplanation:
    """The explanation of an allocator's snapshot (`torch.cuda.memory._snapshot`).

    Args:
        snapshot: the allocator's snapshot. The "user_metadata" of each trace entry names the module or optimizer that
            was running.
        memory: allocated, reserved, free and total bytes of the GPU.
        known: maps an address to the tensor that starts at this address.
        device: index of the GPU in the snapshot.
        out: whether memory ran out. If so, the trace's last "oom" entry has the line of the failed allocation.
        most: maximum number of tensors, and of groups, to list.
    """
    traces = snapshot["device_traces"]
    trace = traces[device] if device < len(traces) else []
    # the last allocation at each address
    allocations = {entry["addr"]: entry for entry in trace if entry["action"] == "alloc"}
    tensors = [
        _live_tensor(block, address, allocations.get(address), known.get(address))
        for segment in snapshot["segments"]
        if segment["device"] == device
        for address, block in _addressed(segment)
        if block["state"] == "active_allocated"
    ]
    tensors.sort(key=lambda tensor: tensor.size_bytes, reverse=True)
    by_kind: dict[str, int] = {}
    grouped: dict[tuple[str, str | None, SourceLine | None], list[int]] = {}
    for tensor in tensors:
        by_kind[tensor.kind] = by_kind.get(tensor.kind, 0) + tensor.size_bytes
        grouped.setdefault((tensor.kind, tensor.module, tensor.line), []).append(tensor.size_bytes)
    by_kind = dict(sorted(by_kind.items(), key=lambda item: -item[1]))
    groups = [MemoryGroup(*key, len(sizes), sum(sizes)) for key, sizes in grouped.items()]
    groups.sort(key=lambda group: group.total_bytes, reverse=True)

    free = [
        block["size"]
        for segment in snapshot["segments"]
        if segment["device"] == device
        for block in segment["blocks"]
        if block["state"] == "inactive"
    ]
    last: Mapping[str, Any] = next((entry for entry in reversed(trace) if out and entry["action"] == "oom"), {})
    requested = last.get("size")
    return MemoryExplanation(
        memory=memory,
        requested_bytes=requested,
        module=_module(last),
        line=_line(last),
        by_kind=by_kind,
        tensors=tuple(tensors[:most]),
        groups=tuple(groups[:most]),
        advice=_advice(memory, requested, free, by_kind),
    )


def _addressed(segment: Mapping[str, Any]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    address = segment["address"]
    for block in segment["blocks"]:
        yield block.get("address", address), block
        address += block["size"]


def _live_tensor(
    block: Mapping[str, Any], address: int, allocation: Mapping[str, Any] | None, known: KnownTensor | None
) -> LiveTensor:
    record = allocation or block  # block and trace entry both have frames, but only the trace entry has the mark
    return LiveTensor(
        size_bytes=block.get("requested_size", block["size"]),
        kind=_kind(allocation) if known is None or known.kind is None else known.kind,
        name=None if known is None else known.name,
        module=_module(record),
        line=_line(record) or _line(block),
        shape=None if known is None else known.shape,
        dtype=None if known is None else known.dtype,
    )


def _kind(allocation: Mapping[str, Any] | None) -> str:
    """The kind of a tensor that belongs to no module or optimizer, from the call stack of its allocation: backward,
    activation or other.
    """
    if allocation is None:
        return OTHER
    frames = allocation.get("frames", [])
    if not frames or any(frame["name"] == "_engine_run_backward" for frame in frames):
        return BACKWARD  # autograd's own threads have no Python frames
    return ACTIVATION if _module(allocation) is not None else OTHER


def _module(record: Mapping[str, Any]) -> str | None:
    mark = str(record.get("user_metadata", ""))
    return mark.removeprefix(MODULE_MARK) if mark.startswith(MODULE_MARK) else None


def _line(record: Mapping[str, Any]) -> SourceLine | None:
    return user_line((frame["filename"], frame["line"]) for frame in record.get("frames", []))


def _known_tensors(roots: Iterable[tuple[str, nn.Module]], optimizers: Iterable[Optimizer]) -> dict[int, KnownTensor]:
    """One tensor on a GPU for each storage, by the storage's address. A named tensor of a module or optimizer takes
    precedence over other tensors in Python that share its storage.
    """
    found: dict[int, KnownTensor] = {}

    def note(kind: str | None, name: str | None, tensor: object) -> None:
        if not issubclass(type(tensor), Tensor):  # isinstance could run a proxy's own code
            return
        try:
            if not tensor.is_cuda or tensor.layout is not torch.strided:  # type: ignore[attr-defined]
                return
            storage = tensor.untyped_storage()  # type: ignore[attr-defined]
            shape, dtype = tuple(tensor.shape), tensor.dtype  # type: ignore[attr-defined]
            if name is None and tensor.nbytes != storage.nbytes():  # type: ignore[attr-defined]
                return  # a view of a part of the storage does not describe the whole storage
            found.setdefault(storage.data_ptr(), KnownTensor(kind, name, shape, dtype))
        except (RuntimeError, NotImplementedError, ReferenceError):  # a tensor subclass without a storage
            return

    names: dict[int, str] = {}
    for scope, root in roots:
        for name, parameter in root.named_parameters():
            names[id(parameter)] = joined(scope, name)
            note(PARAMETER, joined(scope, name), parameter)
            note(GRADIENT, joined(scope, name), parameter.grad)
        for name, buffer in root.named_buffers():
            note(BUFFER, joined(scope, name), buffer)
    for optimizer in optimizers:
        for owner, state in optimizer.state.items():
            for key, value in state.items() if isinstance(state, dict) else ():
                note(OPTIMIZER_STATE, f"{names.get(id(owner), '?')} ({key})", value)
    for tensor in gc.get_objects():
        note(None, None, tensor)
    return found


def _advice(
    memory: DeviceMemory, requested: int | None, free: Sequence[int], by_kind: Mapping[str, int]
) -> tuple[str, ...]:
    """Advice, the most helpful first; `free` are the sizes of the allocator's free blocks."""
    most = memory.limit_bytes or memory.total_bytes
    found = []
    if requested is not None and requested > most:
        found.append(f"The request alone ({_size(requested)}) exceeds the {_size(most)} available.")
    # A free block that is large enough became free after the request failed, as the exception unwound the frames that
    # held it.
    elif requested is not None and max(free, default=0) < requested <= sum(free):
        found.append(
            f"{_size(sum(free))} are reserved and free, but no free block is larger than {_size(max(free))}: "
            "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the program starts."
        )
    free_bytes = memory.total_bytes if memory.free_bytes is None else memory.free_bytes
    others = memory.total_bytes - free_bytes - (memory.reserved_bytes or 0)
    if others > OTHERS_SHARE * memory.total_bytes:
        found.append(f"{_size(others)} are held outside PyTorch's allocator: by other processes or libraries.")
    total = sum(by_kind.values())
    for kind, size in by_kind.items():
        if kind in ADVICE and size >= ADVISED_SHARE * total:
            found.append(f"{kind.capitalize()} take {_size(size)} ({size / total:.0%}): {ADVICE[kind]}.")
    return tuple(found)


def _text(explanation: MemoryExplanation) -> Iterator[str]:
    memory = explanation.memory
    if explanation.requested_bytes is not None:
        where = _where(explanation.module, explanation.line)
        yield f"{memory.device} is out of memory: {_size(explanation.requested_bytes)} requested {where}"
    else:
        yield f"memory of {memory.device}:"
    figures = [
        f"{_size(memory.total_bytes)} in total",
        *([f"{_size(memory.limit_bytes)} of them for this process"] if memory.limit_bytes is not None else []),
        *([f"{_size(memory.free_bytes)} free"] if memory.free_bytes is not None else []),
        f"{_size(memory.reserved_bytes or 0)} reserved by PyTorch",
        f"{_size(memory.allocated_bytes or 0)} allocated by tensors",
    ]
    yield "  " + ", ".join(figures)
    yield "  " + ", ".join(f"{kind} {_size(size)}" for kind, size in explanation.by_kind.items())
    yield "largest tensors:"
    for tensor in explanation.tensors:
        what = tensor.kind if tensor.name is None else f"{tensor.name} ({tensor.kind})"
        shape = "" if tensor.shape is None else f" {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        yield f"  {_size(tensor.size_bytes):>10}  {what}{shape} {_where(tensor.module, tensor.line)}"
    yield "by module and line:"
    for group in explanation.groups:
        place = _where(group.module, group.line)
        yield f"  {_size(group.total_bytes):>10}  {group.count} x {group.kind} {place}"
    if explanation.advice:
        yield "what would help:"
        yield from (f"  {sentence}" for sentence in explanation.advice)


def _where(module: str | None, line: SourceLine | None) -> str:
    parts = ([] if module is None else [f"in {module}"]) + ([] if line is None else [f"at {line}"])
    return " ".join(parts) or "(place not recorded)"


def _size(size_bytes: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.2f} {unit}"
    return f"{size_bytes} B"
