"""The result of `rooftop.optimize`: the faster module, and the rules that were tried."""

from __future__ import annotations

import copy
import json
import operator
import os
import warnings
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from rooftop.nn.contents import OWN, REGISTERS, Contents
from rooftop.nn.fused_steps import notice_fused_steps
from rooftop.optimization import draws
from rooftop.optimization.draws import Arguments, in_words, key_of, names_of, without_shapes
from rooftop.rewrites.candidates import Candidate
from rooftop.rewrites.splitting import OtherPathError
from rooftop.user_paths import user_path
from rooftop.whole_files import write_whole
from rooftop.words import first_line

PLAN_VERSION = 1
LEAST_BYTES = 1_000_000
"""Changes of memory below this size are not printed."""
OF_CONTAINERS = ("__len__", "__getitem__", "__iter__", "__contains__", "__setitem__", "__delitem__")
HOOKS_OF_STATE = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
MARKS = ("_is_torch_compile", "__overloads__")
"""Attributes that PyTorch adds to a module when it is compiled or scripted."""
VERSION = operator.attrgetter("_version")
QUICK = frozenset((bool, int, str, type(None)))
"""Types whose constants are interchangeable if they are equal. Floats are not: 0.0 equals -0.0."""


@dataclass(frozen=True)
class Change:
    """The outcome of one rule.

    Attributes:
        rule: the rule's name.
        verdict: "kept", "refused" (it cannot be applied, or is wrong), "no gain", "not tried", "failed".
        reason: the reason for the verdict.
        where: a description of the parts of the model that the rule changed.
        predicted_ms: predicted time saved per step.
        measured_ms: measured time saved per step, compared with the best candidate so far. Both times are scaled to the
            speed of the machine at which a step of the original takes `Optimized.before_ms`.
        error: largest error as a multiple of the allowed error, at most 1; None if it was not checked.
        first_call_s: time of the first call in seconds, including compilation and capture.
        bytes: additional peak memory of a step, on a GPU.
    """

    rule: str
    verdict: str
    reason: str = ""
    where: str = ""
    predicted_ms: float = 0.0
    measured_ms: float | None = None
    error: float | None = None
    first_call_s: float | None = None
    bytes: int | None = None

    def scaled(self, factor: float) -> Change:
        """The same outcome with both times multiplied by a factor."""
        measured = None if self.measured_ms is None else factor * self.measured_ms
        return replace(self, predicted_ms=factor * self.predicted_ms, measured_ms=measured)

    def __str__(self) -> str:
        figures = [f"predicted {_ms(self.predicted_ms)}"] if self.predicted_ms > 0 else []
        if self.measured_ms is not None:
            figures.append(f"measured {_ms(self.measured_ms)}")
        if self.error is not None:
            figures.append(f"error {self.error:.2f} of what is allowed")
        if self.first_call_s is not None and self.first_call_s >= 1:
            figures.append(f"first call {self.first_call_s:.0f} s")
        if self.bytes is not None and abs(self.bytes) >= LEAST_BYTES:
            figures.append(f"{self.bytes / 1e6:+.0f} MB of GPU memory")
        words = [part for part in (self.where, self.reason) if part]
        tail = f" ({', '.join(figures)})" if figures else ""
        return f"{self.verdict:9} {self.rule:24} {'; '.join(words)}{tail}"


@dataclass
class Optimized:
    """A model made faster.

    Attributes:
        module: the faster module, which runs the faster model for proven calls, and the original for all other calls.
        optimizer: for a training step, the faster optimizer, or the given optimizer if no rule has replaced it.
        changes: the outcome of each rule, in the order of trials.
        before_ms, after_ms: times of a step of the original and of the faster module, timed in turns at the end.
        noise: spread of the gain over the rounds at the end, as a share of a step. If no rule was kept, spread of the
            times of a step.
        checked: inputs on which every change was compared with the original.
        unchecked: inputs that were skipped, with the reason.
        proven: shapes for which the faster module runs.
        surroundings: the model, inputs, device and versions of this result.
        without_ms: time of a step without the kept rules that compile or capture graphs. None unless both such rules
            and other rules are kept.
        differs: how this machine, model and inputs differ from the plan's, if a plan was given.
    """

    module: OptimizedModule
    optimizer: torch.optim.Optimizer | None
    changes: list[Change]
    before_ms: float
    after_ms: float
    noise: float
    checked: list[str]
    unchecked: dict[str, str]
    proven: list[str]
    surroundings: dict[str, str] = field(default_factory=dict)
    differs: list[str] = field(default_factory=list)
    without_ms: float | None = None

    @property
    def kept(self) -> list[str]:
        """Names of the rules that the search kept: the faster module applies them."""
        return [change.rule for change in self.changes if change.verdict == "kept"]

    def undo(self) -> nn.Module:
        """Return the original module. From now on, the faster module also runs the original in every call."""
        self.module.stop("because undo() was called")
        return self.module.original

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the kept rules to a plan file, which `optimize(..., plan=path)` applies without a search."""
        plan = {
            "version": PLAN_VERSION,
            "rules": self.kept,
            "before_ms": self.before_ms,
            "after_ms": self.after_ms,
            "surroundings": self.surroundings,
        }
        write_whole(user_path(path), json.dumps(plan, indent=1) + "\n")

    def to_dict(self) -> dict[str, Any]:
        """Everything except the module, the optimizer and `differs`, as numbers and text."""
        return {
            "before_ms": self.before_ms,
            "after_ms": self.after_ms,
            "noise": self.noise,
            "without_ms": self.without_ms,
            "changes": [asdict(change) for change in self.changes],
            "checked": self.checked,
            "unchecked": self.unchecked,
            "proven": self.proven,
            "surroundings": self.surroundings,
        }

    def __str__(self) -> str:
        ratio = self.before_ms / self.after_ms
        lines = [f"{_ms(self.before_ms)} -> {_ms(self.after_ms)} ({ratio:.2f}x, noise {self.noise:.1%})"]
        if self.without_ms is not None:
            lines.append(f"{_ms(self.without_ms)} without compiler and graphs")
        lines += [str(change) for change in self.changes]
        if self.checked:
            lines.append(f"checked on {', '.join(self.checked)}")
        lines.append(f"proven for {'; '.join(self.proven)}")
        lines += [f"not checked on {what}: {why}" for what, why in self.unchecked.items()]
        lines += [f"unlike the plan's: {each}" for each in self.differs]
        return "\n".join(lines)


def _ms(ms: float) -> str:
    """A time as text, such as "1,234 ms" or "12.3 ms"."""
    return f"{ms:,.0f} ms" if abs(ms) >= 1000 else f"{ms:.3g} ms"


class OptimizedModule(nn.Module):
    """A module that runs the faster model for proven calls, and the original for all others.

    The module has the original's state dict, parameters and attributes. Unproven calls are counted in `unproven`, and
    the first call for each reason warns. If no rule was kept, all calls run the original.

    Args:
        original: the user's model.
        candidate: the faster model, which runs instead of the original.
        proven: arguments for which the candidate was proven.
    """

    def __new__(cls, original: nn.Module, *args: Any) -> OptimizedModule:
        """Create an object whose class has two kinds of the original's methods: special methods of containers, such as
        `__len__`, because Python looks them up in the class; and overrides of methods of `nn.Module`, such as
        `parameters`.
        """
        names = [name for name in OF_CONTAINERS if hasattr(type(original), name)]
        names += [name for name in PUBLIC if getattr(type(original), name) is not getattr(nn.Module, name)]
        kind = type(cls.__name__, (cls,), {name: _of_original(name) for name in names}) if names else cls
        return super().__new__(kind)

    def __init__(self, original: nn.Module, candidate: Candidate, proven: list[Arguments]) -> None:
        super().__init__()
        self.__dict__["_own"] = _State(original, candidate, {key_of(given) for given in proven})
        # shares the original's dicts, so that tracers find its submodules under their names, and its hooks run
        for register in (*REGISTERS, *HOOKS_OF_STATE):
            self.__dict__[register] = vars(original)[register]

    @property
    def training(self) -> bool:  # type: ignore[override]
        """Whether the original is in training mode."""
        own = self.__dict__.get("_own")
        return own is None or own.original.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "_own" in self.__dict__:
            self._own.original.training = mode

    @property
    def unproven(self) -> dict[str, int]:
        """How many calls ran the original instead of the faster model, by reason."""
        return dict(self._own.unproven)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        own = self._own
        if own.unchanged or torch.compiler.is_compiling():
            return own.original(*args, **kwargs)
        why = own.why_not((args, kwargs))
        if not why and own.looks_first:
            why = own.changed()
        if not why:
            before = own.versions_of((args, kwargs))
            try:
                result = own.candidate.call(*args, **kwargs)
            except OtherPathError as error:
                if own.changed() or before != own.versions_of((args, kwargs)):
                    raise  # the original must not run on tensors that this call has changed
                why = f"because {first_line(error)}"
            finally:
                why = why or ("" if own.looks_first else own.changed())
            if not why:
                return result
        if not own.unproven[why]:
            warnings.warn(f"rooftop.optimize: the original model runs, {why}", RuntimeWarning, stacklevel=2)
        own.unproven[why] += 1
        return own.original(*args, **kwargs)

    def stop(self, why: str) -> None:
        """Run the original from now on, for the reason `why` (see `unproven`)."""
        self._own.stopped = why

    # ---- the original's interface ---------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__.get("_own")
        if own is None:
            raise AttributeError(name)
        return own.original if name == "original" else getattr(own.original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(nn.Module, name) or name in OWN or "_own" not in self.__dict__:
            object.__setattr__(self, name, value)
        else:
            setattr(self.original, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.original, name)

    def register_buffer(self, *args: Any, **kwargs: Any) -> None:
        self.original.register_buffer(*args, **kwargs)

    def register_parameter(self, *args: Any, **kwargs: Any) -> None:
        self.original.register_parameter(*args, **kwargs)

    def add_module(self, *args: Any, **kwargs: Any) -> None:
        self.original.add_module(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        return self.original.named_modules(*args, **kwargs)

    def named_children(self) -> Any:
        return self.original.named_children()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self.original.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        return self.original.named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.original.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("assign") or args[2:3] == (True,):
            self.stop("because its weights were replaced: optimize it again")
        return self.original.load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load as the original does, if `load_state_dict` of a module around this one calls."""
        self.original._load_from_state_dict(*args, **kwargs)

    def train(self, mode: bool = True) -> OptimizedModule:
        self.original.train(mode)
        return self

    def _apply(self, *args: Any, **kwargs: Any) -> OptimizedModule:
        self.original._apply(*args, **kwargs)
        if self._own.moved():
            self.stop("because the model was moved or cast: optimize it again")
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A copy of the original: graphs and compiled code are not copied."""
        return copy.deepcopy(self.original, memo)

    def __getstate__(self) -> object:
        raise TypeError(
            "rooftop.optimize: an optimized module cannot be pickled or copied by copy.copy: save its state_dict and "
            "the plan (`Optimized.save`), and call optimize(..., plan=...) after loading"
        )


def _of_original(name: str) -> Callable[..., Any]:
    """A method that calls the original's method of the same name, and returns the optimized module instead of the
    original.
    """

    def method(self: OptimizedModule, *args: Any, **kwargs: Any) -> Any:
        result = getattr(type(self.original), name)(self.original, *args, **kwargs)
        return self if result is self.original else result

    return method


PUBLIC = [
    name
    for name, method in vars(nn.Module).items()
    if callable(method) and name[0] != "_" and name not in vars(OptimizedModule)
]
"""Methods of `nn.Module`, such as `parameters`, that `OptimizedModule` does not define itself."""


@dataclass
class _State:
    """The state of an optimized module, which `nn.Module` does not see."""

    original: nn.Module
    candidate: Candidate
    proven: set[Hashable]
    stopped: str = ""
    unproven: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        contents = Contents.of(self.original)
        self.tensors = list(contents.tensors.values())
        if self.candidate.frozen:
            notice_fused_steps(self.tensors)
        self.strided = [tensor for tensor in self.tensors if tensor.layout == torch.strided]
        self.versions, self.addresses, self.kinds = self._versions(), self._addresses(), self._kinds()
        self.hooks = RemovableHandle.next_id
        self.unchanged = not any(self.candidate.changes.values())
        self._quick: set[Hashable] = set()  # the `_quick_key`s of proven calls
        self.modules = contents.modules
        self.modes = [module.training for module in self.modules]
        # On a GPU, the host first launches the faster model, and checks the call while the GPU runs. If a check
        # fails, a graph or a compiled model has run in vain, but has changed nothing.
        self.looks_first = self.candidate.training or self.candidate.device.type == "cpu"
        self._watch()

    def _watch(self) -> None:
        """Record the contents of all modules, in lists that each call can compare by loops in C."""
        plain = vars(nn.Module()).keys() - {"training"}  # hooks and the like, which other checks cover
        self.dicts = [vars(each) for each in self.modules]
        self.dicts += [part[name] for part in self.dicts for name in REGISTERS]
        self.sizes = list(map(len, self.dicts))
        places = [(part, key) for part in self.dicts for key in part if not (key in plain and "training" in part)]
        self.places, self.keys = [part for part, _ in places], [key for _, key in places]
        self.values = list(map(operator.getitem, self.places, self.keys))

    def versions_of(self, given: Arguments) -> list[object]:
        """The version counters of the tensors in a call's arguments, to detect changes; [] unless the candidate is
        `frozen` (see `Candidate`). An inference tensor has no version counter, so it always counts as changed.
        """
        if not self.candidate.frozen:
            return []
        return [object() if tensor.is_inference() else tensor._version for tensor in draws.tensors_of(given)]

    def _versions(self) -> list[int]:
        return list(map(VERSION, self.strided))

    def _addresses(self) -> list[int]:
        return list(map(Tensor.data_ptr, self.strided))

    def _kinds(self) -> list[tuple[torch.dtype, torch.device]]:
        return [(tensor.dtype, tensor.device) for tensor in self.tensors]

    def _as_it_was(self) -> bool:
        """Whether all modules still have the objects (attributes, parameters, buffers, submodules) that they had when
        the model was proven.
        """
        try:
            same = list(map(len, self.dicts)) == self.sizes
            same = same and all(map(operator.is_, map(operator.getitem, self.places, self.keys), self.values))
        except KeyError:  # an entry was removed, and another was added
            same = False
        return same or self._equal_again()

    def _equal_again(self) -> bool:
        """Whether all changes are harmless: a constant was replaced by an equal constant, as torch.export does with
        tuples, or PyTorch added the attributes in `MARKS`. If so, later calls are compared with the present objects.
        """
        watched = self.dicts, self.sizes, self.places, self.keys, self.values
        before = self._contents()
        self._watch()
        now = self._contents()
        same = before.keys() == now.keys() and all(_equal(before[place], now[place]) for place in before)
        if not same:
            self.dicts, self.sizes, self.places, self.keys, self.values = watched
        return same

    def _contents(self) -> dict[tuple[int, str], Any]:
        found = zip(self.places, self.keys, self.values, strict=True)
        return {(id(part), key): value for part, key, value in found if key not in MARKS}

    def _remedy(self, given: Arguments) -> str:
        if without_shapes(key_of(given)) in map(without_shapes, self.proven):
            return "pass shapes=[...] to optimize"
        if names_of(key_of(given)) not in map(names_of, self.proven):
            return "give the same arguments by position and by name as in the call of optimize"
        return "a dtype, a device, requires_grad or another argument differs: optimize again with such arguments"

    def why_not(self, given: Arguments) -> str:
        """Why the original must run this call; "" if the faster model may run it."""
        if self.stopped:
            return self.stopped
        training = self.candidate.training
        if self.original.training != training:
            return f"because it is in {'evaluation' if training else 'training'} mode"
        if training and not torch.is_grad_enabled():
            return "because gradients are off: it was optimized for training"
        if not training and torch.is_grad_enabled() and self._wants_gradients(given):
            return "because gradients are on: call it under torch.no_grad() or torch.inference_mode()"
        if why := unusual_context():
            return f"because {why}"
        quick = _quick_key(given)
        if quick is None or quick not in self._quick:
            try:
                proven = key_of(given) in self.proven
            except TypeError:
                return "because an argument is not a plain tensor, number, string or structure of these"
            if not proven:
                return f"because it was not proven for {in_words(given)}: {self._remedy(given)}"
            if quick is not None:
                self._quick.add(quick)
        if RemovableHandle.next_id != self.hooks:
            if hooked(self.original):
                return "because hooks were registered"
            self.hooks = RemovableHandle.next_id
        return ""

    def moved(self) -> bool:
        """Whether the model is on another device or has another dtype than when it was proven."""
        return self._kinds() != self.kinds

    def changed(self) -> str:
        """What changed in the original since this module was proven; "" if nothing did."""
        if not self._as_it_was():
            if [module.training for module in self.modules] != self.modes:
                return "because some of its modules are in another mode: optimize the model in this mode"
            return "because one of its attributes, tensors or modules was replaced: optimize it again"
        if self._addresses() != self.addresses:
            if self.moved():
                return "because the model was moved or cast: optimize it again"
            if self.candidate.frozen:
                return "because its weights were changed: optimize it again"
            if self.candidate.placed:
                return "because its weights are in other memory: optimize it again"
            self.addresses = self._addresses()
        if self.candidate.frozen and self._versions() != self.versions:
            return "because its weights were changed: optimize it again"
        return ""

    def _wants_gradients(self, given: Arguments) -> bool:
        return any(t.requires_grad for t in self.tensors) or any(t.requires_grad for t in draws.tensors_of(given))


def _equal(one: Any, other: Any) -> bool:
    """Whether two values are the same object, or equal constants."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if type(one) is tuple:
        return len(one) == len(other) and all(map(_equal, one, other))
    return type(one) in QUICK and one == other


def _quick_key(given: Arguments) -> Hashable | None:
    """A key for calls with only plain tensors and constants, which takes a tenth of the time of `key_of`; None for
    other calls.
    """
    args, kwargs = given
    values = (*args, *kwargs.values())
    key: list[Hashable] = [len(args), *kwargs]
    for value in values:
        kind = type(value)
        if kind is Tensor:
            if value.is_nested:
                return None
            key.append((value.shape, value.dtype, value.device, value.layout, value.requires_grad))
        elif kind in QUICK:
            key.append((kind, value))
        else:
            return None
    return tuple(key) if len(values) == 1 or len(set(map(id, values))) == len(values) else None


def unusual_context() -> str:
    """A description of the active context if proofs do not cover it: autocast, a transform, tracing; "" otherwise."""
    if torch._C._is_any_autocast_enabled():
        return "autocast is on"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a transform of torch.func is active"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode differentiation is active"
    if torch._C._get_tracing_state() is not None:
        return "it is traced"
    return ""


def hooked(model: nn.Module) -> str:
    """The name and class of a module with hooks; "" if there is none."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    for name, module in model.named_modules():
        if any(getattr(module, kind) for kind in kinds):
            return f"{name or 'the model'} ({type(module).__name__})"
    return ""
