"""Find tensors that one CUDA stream uses before another stream has written them, or whose memory is reused too early.

As in `torch.cuda._sanitizer`, the check records, for each stream, the streams that it has waited for. In addition, each
finding names lines of the user's program, and the program continues. The check also handles three cases that
torch's sanitizer gets wrong. It does not report views that use different bytes of one storage. It knows that operators
such as `zeros_like` do not read the values of their argument. It reports memory that is freed and reused while another
stream still uses it (a missing `record_stream`).

The check cannot see kernels that PyTorch does not launch (custom kernels, Triton), work inside a CUDA graph or compiled
code, waits in other libraries, or host memory (`non_blocking` copies from it). Work before the block counts as
finished. The check is meant for one thread and one GPU.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.utils import _pytree as pytree

from rooftop.errors import reduced
from rooftop.hardware.observing import ObservingMode
from rooftop.hardware.source_lines import SourceLine, current_user_line

READS, WRITES = "reads", "writes"
DEFAULT_STREAM = 0


@dataclass(frozen=True)
class StreamAccess:
    """One use of a tensor.

    Attributes:
        operator: name of the operator that used the tensor, such as "aten::sum".
        action: "reads" or "writes".
        stream: handle of the CUDA stream; 0: the default stream.
        line: line of the user's program; None: no Python code made the access (autograd's threads).
        shape: shape of the tensor, or of the view.
    """

    operator: str
    action: str
    stream: int
    line: SourceLine | None
    shape: tuple[int, ...]

    def __str__(self) -> str:
        stream = "the default stream" if self.stream == DEFAULT_STREAM else f"stream {self.stream:#x}"
        return f"{self.operator} {self.action} {list(self.shape)} on {stream} at {self.line or '(no Python line)'}"


@dataclass(frozen=True)
class StreamRace:
    """Two uses of the same bytes on two streams. At least one use is a write, and the second stream does not wait for
    the first.

    Attributes:
        first, second: the uses, in the order of their launches.
        reused: whether the first tensor was freed, and the second use is of another tensor in the same memory.
    """

    first: StreamAccess
    second: StreamAccess
    reused: bool

    @property
    def message(self) -> str:
        """A message that says what happened and how to fix it."""
        if self.reused:
            head = "memory was freed and reused while another stream may still use it"
            fix = "call record_stream on the first tensor (rooftop.hardware.streams does), or keep the tensor longer"
        else:
            head = "a stream uses a tensor without waiting for the other stream that used it earlier"
            fix = "let the stream wait between the two uses: stream.wait_stream(other), or rooftop.hardware.streams"
        return f"{head}:\n  first:  {self.first}\n  second: {self.second}\n  {fix}"


class StreamRaceError(RuntimeError):
    """The error that `check_streams` raises. `races` has all races that were found."""

    def __init__(self, races: Iterable[StreamRace]) -> None:
        self.races = tuple(races)
        super().__init__("\n".join(race.message for race in self.races))

    __reduce__ = reduced


@dataclass
class StreamCheck:
    """The value that `check_streams` yields. `races`: the races found so far, each once, in the order of their second
    use.
    """

    races: list[StreamRace] = field(default_factory=list)


@contextmanager
def check_streams(*, raises: bool = True) -> Iterator[StreamCheck]:
    """Watch the block's operators and the waits between streams. Without CUDA this does nothing.

    Every operator is much slower in the block than outside. PyTorch cannot switch its tracing of streams and
    allocations off again. So until the process ends, each traced call takes about a microsecond longer, and running out
    of memory raises SystemError instead of torch.OutOfMemoryError (seen with torch 2.11). Use this only in a process
    where these effects do not matter.

    Args:
        raises: raise an error at the end if a race was found.

    Raises:
        StreamRaceError: a race was found. If the block itself raises, that exception is raised instead.
    """
    check = StreamCheck()
    if torch.cuda.is_available():
        torch.cuda.init()
        _listen()
        watcher = _Watcher(check.races)
        _active.append(watcher)
        try:
            with _Launches(watcher, "cuda", lambda: torch.cuda.current_stream().cuda_stream):
                yield check
        finally:
            _active.remove(watcher)
    else:
        yield check
    if raises and check.races:
        raise StreamRaceError(check.races)


@dataclass(frozen=True)
class _Use:
    """One use of a storage by an operator. The operator accesses the bytes [begin, end) of the storage."""

    written: bool
    begin: int
    end: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Launch:
    """An operator that was launched on a stream, and how it uses each storage, by the storage's address. torch's
    sanitizer keeps this object in its records.
    """

    operator: str
    line: SourceLine | None
    uses: Mapping[int, _Use]
    in_backward: bool = False


class _Watcher:
    """Record the last uses of each storage, and the streams that each stream has waited for. Hooks report launches,
    allocations and synchronization to this object.
    """

    def __init__(self, races: list[StreamRace]) -> None:
        self._races = races
        self._events = _sanitizer().EventHandler()
        self._left: dict[int, list[Any]] = {}  # address -> uses of the freed tensor at this address
        self._allocated: dict[int, int] = {}  # address -> number of the last launch before this allocation
        self._recorded: dict[int, set[int]] = {}  # address -> streams that `record_stream` has named for this address

    def hear(self, event: str, *args: int) -> None:
        """Handle an event of torch's GPU trace, by the event's name."""
        if event == "memory_allocation":
            self._allocation(*args)
        elif event == "memory_deallocation":
            self._deallocation(*args)
        else:
            getattr(self._events, f"_handle_{event}")(*args)

    def record_stream(self, address: int, stream: int) -> None:
        """Record a call of `record_stream`: when the storage is freed, the allocator waits for this stream's work."""
        self._recorded.setdefault(address, set()).add(stream)

    def launch(self, stream: int, launch: _Launch) -> None:
        """Record that an operator was launched."""
        written = {address for address, use in launch.uses.items() if use.written}
        read = set(launch.uses) - written
        aliases: dict[int, list[str]] = {address: [] for address in launch.uses}
        for error in self._events._handle_kernel_launch(stream, read, written, set(), launch, aliases):
            self._report(error)

    def _allocation(self, address: int) -> None:
        tensors = self._events.tensors_accessed
        tensors.ensure_tensor_does_not_exist(address)
        tensors.create_tensor(address, None)
        # A stream that writes the new tensor must wait for the streams that used the freed tensor at this address.
        tensors.accesses[address].reads.extend(self._left.pop(address, []))
        self._allocated[address] = self._events.seq_num

    def _deallocation(self, address: int) -> None:
        info = self._events.tensors_accessed.accesses.pop(address, None)
        recorded = self._recorded.pop(address, set())
        if info is not None:
            uses = [*info.reads, *([] if info.write is None else [info.write])]
            # Uses in backward are left out: autograd calls `record_stream` for them in C++, which is not visible here.
            self._left[address] = [use for use in uses if use.stream not in recorded and not use.operator.in_backward]

    def _report(self, error: Any) -> None:
        before, after = error.previous_access, error.current_access
        ours, theirs = before.operator.uses[error.data_ptr], after.operator.uses[error.data_ptr]
        if ours.begin >= theirs.end or theirs.begin >= ours.end:
            return  # the uses access different parts of one storage
        reused = before.seq_num <= self._allocated.get(error.data_ptr, -1)
        race = StreamRace(_access(before, ours), _access(after, theirs), reused)
        if race not in self._races:
            self._races.append(race)


def _access(access: Any, use: _Use) -> StreamAccess:
    launch = access.operator
    return StreamAccess(launch.operator, WRITES if use.written else READS, access.stream, launch.line, use.shape)


class _Launches(ObservingMode):
    """Report to the watcher each operator on tensors of one kind of device."""

    def __init__(self, watcher: _Watcher, device_type: str, current_stream: Callable[[], int]) -> None:
        super().__init__()
        self._watcher, self._device_type, self._current_stream = watcher, device_type, current_stream

    def observe(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is torch.ops.aten.record_stream.default:
            tensor, stream = args
            handle = torch.cuda.Stream(
                stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
            ).cuda_stream
            self._watcher.record_stream(tensor.untyped_storage().data_ptr(), handle)
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if isinstance(func, HigherOrderOperator):  # without a schema, the written arguments are unknown
            return result
        uses = _uses(func._schema, args, kwargs, result, self._device_type)
        if uses:
            in_backward = torch._C._current_autograd_node() is not None
            launch = _Launch(func._schema.name, current_user_line(), uses, in_backward)
            self._watcher.launch(self._current_stream(), launch)
        return result


METADATA_ONLY = re.compile(r"aten::(new_.*|.*_like)")
"""Operators that read only the shape, dtype and device of their arguments."""


def _uses(schema: Any, args: Any, kwargs: Any, result: Any, device_type: str) -> dict[int, _Use]:
    """Map the address of each storage to how the operator uses the storage. Making a view of an argument is not a
    use."""
    found: dict[int, _Use] = {}

    def note(tree: Any, written: bool) -> None:
        for leaf in pytree.tree_leaves(tree):
            if isinstance(leaf, Tensor) and leaf.device.type == device_type and leaf.layout is torch.strided:
                address = leaf.untyped_storage().data_ptr()
                if leaf.numel() and address:
                    use = _use_of(leaf, written)
                    found[address] = _joined(found[address], use) if address in found else use

    for index, argument in enumerate(schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        written = argument.alias_info is not None and argument.alias_info.is_write
        if written or (argument.alias_info is None and not METADATA_ONLY.match(schema.name)):
            note(value, written)
    results = result if len(schema.returns) > 1 else (result,)
    for returned, value in zip(schema.returns, results, strict=False):
        if returned.alias_info is None or returned.alias_info.is_write:
            note(value, True)
    return found


def _use_of(tensor: Tensor, written: bool) -> _Use:
    begin = int(tensor.storage_offset()) * tensor.element_size()
    reach = sum(int(size - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return _Use(written, begin, begin + reach * tensor.element_size(), tuple(tensor.shape))


def _joined(one: _Use, other: _Use) -> _Use:
    shape = other.shape if other.written and not one.written else one.shape
    return _Use(one.written or other.written, min(one.begin, other.begin), max(one.end, other.end), shape)


EVENTS = (
    *("event_creation", "event_deletion", "event_record", "event_wait", "event_synchronization"),
    *("memory_allocation", "memory_deallocation"),
    *("stream_creation", "stream_synchronization", "device_synchronization"),
)
"""The events of torch's GPU trace. The names of torch's registering functions and of the handler's methods contain
these names.
"""

_active: list[_Watcher] = []
"""Watchers of the running `check_streams` blocks. One listener in torch serves all watchers."""


@functools.cache
def _listen() -> None:
    """Register listeners with torch's GPU trace, once, because they cannot be removed."""
    from torch.cuda import _gpu_trace

    _sanitizer()
    torch._C._activate_gpu_trace()
    for event in EVENTS:
        getattr(_gpu_trace, f"register_callback_for_{event}")(functools.partial(_heard, event))


def _heard(event: str, *args: int) -> None:
    for watcher in _active:
        watcher.hear(event, *args)


@functools.cache
def _sanitizer() -> ModuleType:
    """Import torch's sanitizer without the listeners that this import registers, since they would slow down every later
    allocation.
    """
    from torch.cuda import _gpu_trace

    name = "torch.cuda._sanitizer"
    if name in sys.modules:  # the program itself uses the sanitizer
        return sys.modules[name]
    registries = [registry for attribute, registry in vars(_gpu_trace).items() if attribute.endswith("Callbacks")]
    before = [list(registry.callback_list) for registry in registries]
    from torch.cuda import _sanitizer as module

    for registry, callbacks in zip(registries, before, strict=True):
        registry.callback_list = callbacks
    return module
