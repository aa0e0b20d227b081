"""`Candidate`, which rewrites change, and `Rule`, the base class of all rewrites.

A rule changes a `Candidate`: a copy of the user's model that shares each tensor with the original until a rule replaces
the tensor. The original never changes. To undo a rule, the candidate is built again without the rule, so a rule that
fails midway leaves nothing behind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rooftop.nn.copies import copy_sharing_tensors
from rooftop.words import counted

NOTHING = "there is nothing to change"
"""The reason why a rule has no gain if the model has nothing that the rule could change."""


@dataclass(frozen=True)
class Call:
    """The equal calls of one PyTorch operator in a step of the model. In equal calls, the tensors have the same shapes
    and dtypes, and the other arguments are equal.

    Attributes:
        operator: an overload, such as `torch.ops.aten.convolution.default`.
        arguments: the arguments of the first of these calls, with tensors replaced by meta tensors of the same shapes,
            strides and dtypes.
        device: the device on which the operator runs.
        count: number of equal calls in the step.
        ms: time in ms of all `count` calls together.
        alone: time in ms of one such call that runs by itself, by the memory layout in which it was timed, such as
            "channels last". The time is stored because several rules need it.
    """

    operator: Any
    arguments: tuple[Any, ...]
    device: torch.device
    count: int
    ms: float
    alone: dict[str, float] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True)
class Fusable:
    """The operators of a step that a compiler would fuse into fewer kernels.

    Attributes:
        operators: number of these operators.
        kernels: number of kernels that a compiler would write for these operators.
        now_ms, after_ms: device time of these operators now, and predicted device time of the fused kernels.
        launches: number of kernels that the whole step launches now.
        channels_last: whether the compiler would also lay out convolutions channels last.
    """

    operators: int
    kernels: int
    now_ms: float
    after_ms: float
    launches: int
    channels_last: bool


@dataclass(frozen=True)
class Compiled:
    """The measured times of a step of compiled code.

    Attributes:
        wall_ms: wall time of the step.
        device_ms, host_ms: as in `Times`.
        whole: True if the whole model was compiled, False if its repeated blocks were.
    """

    wall_ms: float
    device_ms: float | None
    host_ms: float | None
    whole: bool


@dataclass(frozen=True)
class OptimizerStep:
    """Times of the optimizer's part of a training step.

    Attributes:
        wall_ms: wall time of this part.
        device_ms, host_ms: as in `Times`.
    """

    wall_ms: float = 0.0
    device_ms: float = 0.0
    host_ms: float = 0.0


@dataclass(frozen=True)
class Memory:
    """Bytes of GPU memory: the peak during a step, including all other allocations of this process, and the GPU's
    total.
    """

    peak_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Times:
    """The times of a step, from which rules predict their gain.

    Attributes:
        wall_ms: wall time of a step.
        calls: the calls of PyTorch's operators in the step, with their times.
        optimizer: times of the optimizer's step, if there is one.
        fused: times of the same optimizer's step with the option `fused=True`; None if it has no such option.
        device_ms: device time of a step on a GPU, if the host is far ahead; None on a CPU.
        host_ms: time in which the host launches a step's kernels; 0 if CUDA graphs are replayed, None on a CPU.
        fusable: the operators that a compiler could fuse; None if they are not known.
        launch_ms: the host's time to launch a small operator on a GPU; 0 on a CPU.
        compiled: times of the same step with compiled code, if it was measured before.
        memory: GPU memory; None on a CPU.
        blocks: (number of the model's repeated blocks, number of different kinds of these blocks). Each kind is
            compiled once. None: not counted.
        copies_ms: device time of copying the model's arguments and results once, as CUDA graphs do; 0 on a CPU.
    """

    wall_ms: float
    calls: tuple[Call, ...]
    optimizer: OptimizerStep = OptimizerStep()
    fused: OptimizerStep | None = None
    device_ms: float | None = None
    host_ms: float | None = None
    fusable: Fusable | None = None
    launch_ms: float = 0.0
    compiled: Compiled | None = None
    memory: Memory | None = None
    blocks: tuple[int, int] | None = None
    copies_ms: float = 0.0

    def of(self, *names: str) -> float:
        """Time in ms of the operators whose names contain any of `names`."""
        return sum(call.ms for call in self.calls if any(name in call.operator.name() for name in names))

    def count(self, *names: str) -> int:
        """Number of calls of the operators whose names contain any of `names`."""
        return sum(call.count for call in self.calls if any(name in call.operator.name() for name in names))

    def lack(self, *names: str) -> str | None:
        """`NOTHING` if no operator of the step has a name that contains any of `names`. None if there is such an
        operator, or if the operators are not known.
        """
        return NOTHING if self.calls and not self.count(*names) else None

    def gain_ms(self, device_ms: float, calls: int = 0) -> float:
        """The time in ms by which a step becomes shorter if it saves `device_ms` of device time and `calls` calls of
        PyTorch's operators.

        A GPU works while the host launches, so the longer of device time and host time is the time of a step. If the
        times of operators timed alone add up to more than the step's device time, they are scaled down to the step's
        device time. If the GPU replays CUDA graphs, each saved operator also saves its share of the time in which the
        GPU waits (`idle_ms`).
        """
        if self.device_ms is None or self.host_ms is None:
            return device_ms
        every, all_ms = self._totals()
        scale = min(1.0, self.device_ms / all_ms) if all_ms > 0 else 1.0
        return self.gain_of(scale * device_ms + self.idle_ms * calls, self.host_ms * calls / max(1, every))

    @property
    def idle_ms(self) -> float:
        """The time in ms for which a GPU that replays CUDA graphs waits before each operator. Without CUDA graphs the
        result is 0, because the host's launch time is counted instead.
        """
        if self.host_ms != 0 or not self.calls:
            return 0.0
        every, all_ms = self._totals()
        return max(0.0, self.wall_ms - all_ms) / max(1, every)

    def _totals(self) -> tuple[int, float]:
        """The number of all operator calls in the step, and the sum of their times in ms."""
        return sum(call.count for call in self.calls), sum(call.ms for call in self.calls)

    def gain_of(self, device_ms: float, host_ms: float) -> float:
        """The time in ms by which a step becomes shorter if it saves `device_ms` of device time and `host_ms` of the
        host's launch time."""
        if self.device_ms is None or self.host_ms is None:
            return device_ms
        left_ms = max(self.device_ms - device_ms, self.host_ms - host_ms if self.host_ms > 0 else 0.0)
        return self.wall_ms * (1 - left_ms / max(self.device_ms, self.host_ms))


@dataclass
class Candidate:
    """A copy of a model; rules change the copy.

    Attributes:
        model: the copy. The copy shares the original's tensors until a rule replaces one.
        call: a function with the model's arguments that runs the model. Rules may wrap this function.
        optimizer: optimizer of a training step; rules may replace it. None: there is no optimizer.
        training: whether a step is a forward and a backward pass in training mode.
        device: the device on which the model runs.
        frozen: whether a rule keeps values that were computed from parameters or buffers.
        placed: whether a rule relies on the current addresses of parameters and buffers.
        attention: the back end of attention that a rule prefers; "" for PyTorch's own choice.
        changes: what each rule changed, in words, by the rule's name.
        prepared: the function that `prepare` set last, if this function runs the whole model; else None.
    """

    model: nn.Module
    call: Callable[..., Any]
    optimizer: torch.optim.Optimizer | None
    training: bool
    device: torch.device
    frozen: bool = False
    placed: bool = False
    attention: str = ""
    changes: dict[str, str] = field(default_factory=dict)
    prepared: Callable[..., Any] | None = None

    def prepare(self, call: Callable[..., Any]) -> None:
        """Replace the attribute `call` by a wrapper of it. The wrapper changes only the model's arguments or results,
        or the context in which the model runs."""
        self.prepared = call if self.runs_model else None
        self.call = call

    @property
    def runs_model(self) -> bool:
        """Whether `call` runs the model as a whole. Compiling the model then compiles all of its work."""
        return self.call is self.model or self.call is self.prepared

    @classmethod
    def of(
        cls,
        original: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        training: bool,
        arguments: Sequence[Tensor] = (),
    ) -> Candidate:
        """Copy the model `original` for rules to change. The copy is in training or evaluation mode.

        Args:
            arguments: the tensors that the user passes to the model. They determine the device of a model without
                parameters and buffers: the GPU if one of them is there.

        Raises:
            TypeError: the model cannot be copied.
            ValueError: the model is on several devices.
        """
        devices = {t.device for t in tensors_of(original)}
        devices = devices or {t.device for t in arguments if t.device.type != "cpu"} or {torch.device("cpu")}
        if len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            raise ValueError(f"optimize: a model must be on one device, but this one is on {names}: use model.to(...)")
        model = copy_sharing_tensors(original, "optimize", unregistered=True)
        set_mode(model, training)
        return cls(model, model, optimizer, training, devices.pop())


def tensors_of(model: nn.Module) -> list[Tensor]:
    """A model's parameters and buffers."""
    return [*model.parameters(), *model.buffers()]


def set_mode(model: nn.Module, training: bool) -> None:
    """Set training or evaluation mode. If the model already has this mode, its submodules keep their modes, which may
    differ from the model's mode (frozen norms).
    """
    if model.training != training:
        model.train(training)


class Rule(ABC):
    """A change that may make a model faster.

    Attributes:
        name: the rule's name for users, such as "fold-norms".
        trains: whether the rule can be applied to a training step.
        infers: whether the rule can be applied to inference.
        exact: whether the rule by design keeps results identical bit for bit.
        opt_in: whether the rule is tried only if the user names it, because it lowers the precision.
        kind: at most one rule of each kind is kept; "" for a rule that excludes no other.
        opaque: whether the rule calls kernels that torch.compile cannot look into.
        saves_memory: whether the rule is kept for the memory that it saves, although it makes a step slower.
    """

    name: str
    trains: ClassVar[bool] = False
    infers: ClassVar[bool] = True
    exact: ClassVar[bool] = False
    opt_in: ClassVar[bool] = False
    kind: ClassVar[str] = ""
    opaque: ClassVar[bool] = False
    saves_memory: ClassVar[bool] = False

    def refusal(self, candidate: Candidate) -> str | None:
        """Why the rule cannot be applied to this candidate; None if it can."""
        return None

    def absent(self, times: Times) -> str | None:
        """Why a step has no work that the rule could make faster; None if the step has such work, or if only `apply`
        can find out.
        """
        return None

    def predicted_ms(self, times: Times) -> float:
        """The predicted time in ms that the rule saves per step, from the step's times."""
        return 0.0

    def seconds(self, times: Times) -> float:
        """Approximate seconds of preparation, such as compiling, until the candidate's first call is done."""
        return 0.0

    @abstractmethod
    def apply(self, candidate: Candidate) -> str:
        """Change the candidate. Return the changes in words, or "" if there was nothing to change."""


NEEDS_A_GPU = "needs a GPU"
"""Begins the text that says why a rule is refused if the model is not on a GPU."""


def only_on_gpu(candidate: Candidate) -> str | None:
    """Why a rule that needs a GPU cannot be applied to this candidate; None if the candidate is on a GPU."""
    return None if candidate.device.type == "cuda" else f"{NEEDS_A_GPU}, but the model is on {candidate.device}"


def some(count: int, what: str) -> str:
    """The number of objects that a rule has changed, such as "3 norms"; "" for none."""
    return counted(count, what) if count else ""


def counted_kinds(kinds: Iterable[str]) -> str:
    """The number of modules of each kind, such as "2 LayerNorm, 1 Softmax"; "" for no modules."""
    return ", ".join(f"{count} {kind}" for kind, count in Counter(kinds).items())
