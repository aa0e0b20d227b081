"""Fold batch norms into the convolution or linear layer before them.

With constant statistics a batch norm is y = s x + t for each channel (Ioffe and Szegedy 2015, section 3.1). A
convolution followed by a batch norm is equal to a convolution with other weights:

    s = weight / sqrt(running_var + eps),  t = bias - running_mean s
    norm(W x + b) = (s W) x + (s b + t)

When is folding allowed? `torch.fx` traces the model, or the largest submodules that it can trace. A norm is folded if
its only call takes the output of the only call of a convolution or linear layer, directly or through `nn.Identity`, and
nothing else uses that output. A trace shows a single path through the code, so each call checks the path again: a
folded convolution wraps its result, and only its norm unwraps the result. Code on another path raises `OtherPathError`
instead of computing wrong numbers.
"""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from rooftop.hardware.observing import LightMode
from rooftop.nn.hidden_methods import check_methods
from rooftop.nn.hooks import has_hooks
from rooftop.rewrites.splitting import (
    PART,
    TENSORS,
    Chain,
    OtherPathError,
    is_split,
    returns_its_input,
    split,
    unsplit,
)
from rooftop.rewrites.stand_ins import SPECIAL_METHODS
from rooftop.rewrites.tracing import OwnThreadTracer
from rooftop.rewrites.type_questions import answered, was_asked
from rooftop.words import in_a_line

# For each class of layers, the number of dimensions of an output whose second dimension is the channels. A layer must
# have exactly one of these classes, since a subclass may do anything.
CONVOLUTIONS: dict[type[nn.Module], int] = {
    nn.Linear: 2,
    nn.Conv1d: 3,
    nn.Conv2d: 4,
    nn.Conv3d: 5,
    nn.ConvTranspose1d: 3,
    nn.ConvTranspose2d: 4,
    nn.ConvTranspose3d: 5,
}
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
# Possible numbers of dimensions of each norm's input.
NORMS: dict[type[nn.Module], tuple[int, ...]] = {
    nn.BatchNorm1d: (2, 3),
    nn.BatchNorm2d: (4,),
    nn.BatchNorm3d: (5,),
    nn.SyncBatchNorm: (2, 3, 4, 5),
}
ANY = (1, 2, 3, 4, 5)
FROZEN = {"weight", "bias", "running_mean", "running_var"}


@dataclass
class Folding:
    """What `fold_norms` has done with each batch norm, by the norm's module name.

    Attributes:
        folded: for each removed norm, the module it was folded into.
        left: for each remaining batch norm, why it stays.
    """

    folded: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{norm}: folded into {convolution}" for norm, convolution in self.folded.items()]
        lines += [f"{norm}: left alone, {why}" for norm, why in self.left.items()]
        return "\n".join(lines) or "no batch norms"


class CannotFoldError(Exception):
    """Raised with the reason why a norm cannot be folded; caught in this file."""


@torch.no_grad()
def fold_norms(model: nn.Module, into: Collection[type[nn.Module]] = CONVOLUTIONS.keys()) -> Folding:
    """Fold the batch norms of a model in evaluation mode, in place. Afterwards the model is only for inference.

    This function folds BatchNorm1d, 2d, 3d, SyncBatchNorm, subclasses that normalize and then call their own modules
    (such as timm's BatchNormAct2d), and frozen norms. A frozen norm is a module with only the buffers weight, bias,
    running_mean and running_var, which multiplies each channel by a constant and then adds a constant. A trial run
    confirms this. The new weights are computed in float64 and rounded once. Keys of the state dict change.

    While torch.fx traces, it replaces methods of all modules of the process, so other threads must not run models.

    Args:
        into: types of layers into which norms may be folded; a subset of `CONVOLUTIONS`.

    Raises:
        TypeError: model is not a module, cannot be copied, or has an attribute that hides a method of `nn.Module`.
        ValueError: a parameter has no size yet, or the model is on the meta device.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"fold_norms: model must be a torch.nn.Module, got {type(model).__name__}")
    check_methods(model, "fold_norms")
    before = {id(each) for module in model.modules() if is_split(module) for each in (module, _plain(module))}
    norms = {name: module for name, module in model.named_modules() if _is_norm(module) and id(module) not in before}
    result = Folding()
    if not norms:
        return result
    check_traceable(model, "fold_norms")
    if global_hooks():
        return Folding(left=dict.fromkeys(norms, "hooks for all modules are registered"))
    try:
        for name, norm in norms.items():
            if isinstance(norm, _BatchNorm) and type(norm) not in NORMS and (why_not := split(norm)) is not None:
                result.left[name] = why_not
        structure = Structure(model)
        for name, norm in norms.items():
            if name in result.left:
                continue
            try:
                convolution = structure.convolution_before(name, norm, into)
                _fold(structure.modules[convolution], _plain(norm), convolution, name)
                result.folded[name] = convolution
            except CannotFoldError as why:
                result.left[name] = str(why)
    finally:
        for name, norm in norms.items():
            if is_split(norm) and name in result.folded:
                _empty(norm)
            elif is_split(norm):
                unsplit(norm)
    return result


def _plain(norm: nn.Module) -> nn.Module:
    """The plain batch norm that `split` put into a norm with more operations; for any other norm, the norm itself."""
    return norm.get_submodule(PART) if is_split(norm) else norm


def _empty(norm: nn.Module) -> None:
    """Remove the parameters and buffers of a norm that was folded into a convolution. Code outside the trace that still
    reads them then fails instead of computing a wrong result.
    """
    for tensors in (norm._parameters, norm._buffers):
        tensors.update(dict.fromkeys(tensors.keys() & {*TENSORS, "num_batches_tracked"}))
    if isinstance(norm, _BatchNorm):
        # else `load_state_dict` adds "num_batches_tracked" to a state dict without version
        norm.track_running_stats = False
    if isinstance(chain := vars(norm).get("forward"), Chain):
        chain.note_attributes()


def global_hooks() -> bool:
    """Whether hooks are registered that run at the calls of all modules. Such hooks may change results, and a trace
    must not call them. Even a backward hook reads the output of a call in forward.
    """
    hooks = torch.nn.modules.module
    return bool(
        hooks._global_forward_hooks
        or hooks._global_forward_pre_hooks
        or hooks._global_backward_hooks
        or hooks._global_backward_pre_hooks
    )


def check_traceable(model: nn.Module, name: str) -> None:
    """Check that a model can be copied without its values, and that its tensors have values.

    Raises:
        TypeError: the model cannot be copied.
        ValueError: a parameter has no size yet, or the model is on the meta device.
    """
    tensors = [*model.parameters(), *model.buffers()]
    if any(map(nn.parameter.is_lazy, tensors)):
        raise ValueError(f"{name}: some parameters have no size yet: call the model once first")
    if any(tensor.is_meta for tensor in tensors):
        raise ValueError(f"{name}: the model is on the meta device, without values: load weights first")
    try:
        _without_data(model)
    except Exception as error:
        raise TypeError(
            f"{name}: {type(model).__name__} cannot be copied for its trace ({in_a_line(error)}): remove the "
            "attributes that cannot be copied"
        ) from error


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) or _is_frozen(module)


def _is_frozen(module: nn.Module) -> bool:
    buffers = {name: buffer for name, buffer in module.named_buffers() if name != "num_batches_tracked"}
    plain = not any(True for _ in module.parameters()) and not any(True for _ in module.children())
    return plain and buffers.keys() == FROZEN and len({tuple(b.shape) for b in buffers.values()}) == 1


# ---- order of modules ----------------------------------------------------------------------------------------------


class Structure:
    """The calls of modules that torch.fx finds in a model.

    Attributes:
        modules: modules by each of their names.
        calls: number of calls of each module (by id), over all traces.
        before: for each module (by id), the node that calls the module, and the name of the traced module. The node's
            graph names modules relative to the traced module.
        read: modules (by id) whose parameters or buffers are read by code outside the module.
        untraced: the error for each module that could not be traced.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.names = Counter(map(id, self.modules.values()))
        self.calls: Counter[int] = Counter()
        self.before: dict[int, tuple[fx.Node, str]] = {}
        self.read: set[int] = set()
        self.untraced: dict[str, str] = {}
        copied = _without_data(model)
        with _Reads(copied) as reads:
            traces = _traces(copied, self.untraced)
        for name, graph in traces:
            for node in graph.nodes:
                self._note(node, name)
        self.read.update(id(self.modules[name]) for name in reads.found)

    def _note(self, node: fx.Node, prefix: str) -> None:
        if node.op == "call_module":
            module = self.modules[_joined(prefix, str(node.target))]
            self.calls[id(module)] += 1
            self.before[id(module)] = (node, prefix)
        elif node.op == "get_attr":
            owner = _joined(prefix, str(node.target)).rpartition(".")[0]
            if owner in self.modules:
                self.read.add(id(self.modules[owner]))

    def convolution_before(self, name: str, norm: nn.Module, kinds: Collection[type[nn.Module]]) -> str:
        """Return the name of the layer before this norm. The layer must be of one of the given kinds, and only this
        norm may use its output.

        Raises:
            CannotFoldError: there is no such convolution.
        """
        plain = _plain(norm)
        self._check_once(plain, "it")
        if id(norm) in self.read:
            raise CannotFoldError("its tensors are read by other code")
        if id(plain) not in self.before:
            raise CannotFoldError(f"no trace shows which module it follows{self._why_untraced(name)}")
        node, prefix = self.before[id(plain)]
        source = self.behind(node.args[0], prefix) if len(node.args) == 1 and not node.kwargs else None
        if not isinstance(source, fx.Node) or source.op != "call_module":
            what = getattr(source, "name", "a value that no trace shows")
            raise CannotFoldError(f"it follows {what}, not a convolution")
        before = _joined(prefix, str(source.target))
        convolution = self.modules[before]
        if type(convolution) not in kinds:
            raise CannotFoldError(f"it follows {before}, a {type(convolution).__name__}")
        self._check_once(convolution, before)
        if was_asked(source):
            raise CannotFoldError(f"a forward asks for the type of the output of {before}")
        if len(source.users) > 1:
            raise CannotFoldError(f"the output of {before} is used elsewhere, too")
        if len(source.args) != 1 or source.kwargs:
            raise CannotFoldError(f"{before} is called with other arguments besides its input")
        return before

    def behind(self, node: Any, prefix: str) -> Any:
        """Go back from a node over calls of `nn.Identity` with a single user, and return the first other node."""
        while self.passes_on(node, prefix) and len(node.users) == 1:
            node = node.args[0]
        return node

    def passes_on(self, node: Any, prefix: str) -> bool:
        """Whether a node is the call of a module that returns its only argument."""
        if not isinstance(node, fx.Node) or node.op != "call_module" or len(node.args) != 1 or node.kwargs:
            return False
        return returns_its_input(self.modules[_joined(prefix, str(node.target))])

    def _check_once(self, module: nn.Module, called: str) -> None:
        if self.names[id(module)] > 1:
            raise CannotFoldError(f"{called} has {self.names[id(module)]} names in the model")
        if self.calls[id(module)] > 1:
            raise CannotFoldError(f"{called} is called {self.calls[id(module)]} times")
        if id(module) in self.read:
            raise CannotFoldError(f"{_of(called, 'tensors')} are read by other code")
        if has_hooks(module):
            raise CannotFoldError(f"{called} has hooks")
        if "forward" in vars(module):
            raise CannotFoldError(f"{_of(called, 'forward')} was replaced")

    def _why_untraced(self, name: str) -> str:
        """The error of the innermost module around `name` that could not be traced."""
        while name:
            name = name.rpartition(".")[0]
            if name in self.untraced:
                return f" ({name or 'the model'} cannot be traced: {self.untraced[name]})"
        return ""


def _of(called: str, what: str) -> str:
    return f"its {what}" if called == "it" else f"the {what} of {called}"


class _Reads(LightMode):
    """Record the modules whose tensors a traced forward gets in another way than as an attribute (`self.weight`), for
    example by `parameters()`.

    Attributes:
        found: names of these modules.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        self.owners = {id(tensor): name.rpartition(".")[0] for name, tensor in tensors}
        self.found: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for tensor in torch.utils._pytree.tree_leaves((args, kwargs)):
            if id(tensor) in self.owners:
                self.found.add(self.owners[id(tensor)])
        return func(*args, **(kwargs or {}))


class _Tracer(OwnThreadTracer):
    """Trace into modules that have submodules and no hooks, and can be traced. Other modules become single nodes."""

    proxy_buffer_attributes = True

    def __init__(self, opaque: set[nn.Module]) -> None:
        super().__init__()
        self.opaque = opaque

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        without_parts = not any(True for _ in m.children())
        leaf = without_parts or m in self.opaque or has_hooks(m)  # a hook must not be called by a trace
        return leaf or super().is_leaf_module(m, module_qualified_name)


def _traces(model: nn.Module, untraced: dict[str, str]) -> list[tuple[str, fx.Graph]]:
    """The graphs of the largest modules that can be traced, by name. None of these modules contains another.

    A module with optional arguments is traced only within its caller, whose call shows which arguments are given. A
    module whose forward was replaced is also traced only within its caller: at the root of a trace, torch.fx would use
    the forward of the module's class.
    """
    graphs: dict[str, fx.Graph] = {}
    opaque: set[nn.Module] = set()
    optional: set[nn.Module] = set()
    modules = dict(model.named_modules())
    with answered(model, lambda module: type(module) in CONVOLUTIONS):
        for name, module in reversed(modules.items()):  # submodules first
            if not any(True for _ in module.children()) or _is_container(module) or is_split(module):
                continue
            try:
                if (why := _why_no_part(module)) is not None:
                    untraced[name] = why
                    optional.add(module)
                    continue
                graphs[name] = _traced(module, opaque, optional & set(module.modules()))
            except Exception as error:  # a forward may fail in any way on inputs that are not tensors
                untraced[name] = in_a_line(error)
                opaque.add(module)
    return [(name, graphs[name]) for name in _outermost(model, graphs, opaque, "", False)]


def _outermost(
    module: nn.Module, graphs: dict[str, fx.Graph], opaque: set[nn.Module], name: str, inside: bool
) -> Iterator[str]:
    """Yield the names of the traced modules that no other traced module contains. `inside`: whether the graph of an
    enclosing module already shows the operations of this module.
    """
    if module in opaque or has_hooks(module):
        inside = False
    if name in graphs and module not in opaque and not inside:
        inside = True
        yield name
    for child_name, child in module.named_children():
        yield from _outermost(child, graphs, opaque, _joined(name, child_name), inside)


def _is_container(module: nn.Module) -> bool:
    """Whether a module is never called, such as a ModuleList."""
    return getattr(type(module), "forward", None) is nn.Module.forward


def _why_no_part(module: nn.Module) -> str | None:
    """Why a trace of this module alone might not show what the model's calls of it do; None if it would show it."""
    if "forward" in vars(module):
        return "its forward was replaced"
    for parameter in inspect.signature(module.forward).parameters.values():
        if parameter.default is not parameter.empty or parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            return f"its argument {parameter.name} may be left out"
    return None


def _traced(module: nn.Module, opaque: set[nn.Module], doubtful: set[nn.Module]) -> fx.Graph:
    """Trace a forward. If that fails, trace the forward again with the doubtful modules as single nodes, and add these
    modules to `opaque`.

    Raises:
        Exception: any error that the forward raises for inputs that are not tensors.
    """
    with warnings.catch_warnings(), torch.random.fork_rng([]):
        warnings.simplefilter("ignore")
        try:
            return _Tracer(opaque).trace(module)
        except Exception:
            if not doubtful - opaque:
                raise
        graph = _Tracer(opaque | doubtful).trace(module)
        opaque |= doubtful
        return graph


def _without_data(model: nn.Module) -> nn.Module:
    """A copy on the meta device, so that tracing its forward changes nothing in the model."""
    tensors: dict[int, Any] = {}
    for parameter in model.parameters():
        tensors[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
    for buffer in model.buffers():
        tensors[id(buffer)] = buffer.detach().to("meta")
    return copy.deepcopy(model, tensors)


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


# ---- the arithmetic ------------------------------------------------------------------------------------------------


def _fold(convolution: nn.Module, norm: nn.Module, convolution_name: str, norm_name: str) -> None:
    """Fold a norm into a convolution, or raise CannotFoldError before any change."""
    for module, called in ((convolution, convolution_name), (norm, "it")):
        if plain := sorted(vars(module).keys() & {*TENSORS}):
            raise CannotFoldError(f"{_of(called, plain[0])} is a plain attribute, neither a parameter nor a buffer")
    dimensions = CONVOLUTIONS[type(convolution)]
    old, old_bias = convolution.weight, convolution.bias
    assert isinstance(old, Tensor)
    scale, shift = _scale_and_shift(norm, dimensions)  # (C,) float64
    channels = convolution.out_features if isinstance(convolution, nn.Linear) else convolution.out_channels
    if len(scale) != channels:
        raise CannotFoldError(f"it has {len(scale)} channels, but {convolution_name} returns {channels}")
    if not old.is_floating_point() or old.device != scale.device:
        raise CannotFoldError(f"{convolution_name} is {old.dtype} on {old.device}, the norm on {scale.device}")
    weight = _scaled(convolution, old.double(), scale).to(old.dtype)
    bias = shift if old_bias is None else shift + scale * old_bias.double()  # type: ignore[operator]
    bias = bias.to(old.dtype)
    if not (weight.isfinite().all() and bias.isfinite().all()):
        raise CannotFoldError("the folded weights would not be finite")
    # The old tensors are removed instead of changed, so that code outside the trace fails if it reads them.
    folded = copy.copy(convolution)
    folded._parameters, folded._modules = {}, {}
    weight = torch.empty_like(old.detach()).copy_(weight)  # in the layout of the old weight, such as channels last
    folded._parameters["weight"] = nn.Parameter(weight, requires_grad=False)
    folded._parameters["bias"] = nn.Parameter(bias, requires_grad=False)
    for tensors in (convolution._parameters, convolution._buffers):
        tensors.update(dict.fromkeys(tensors))
    _empty(norm)
    convolution.add_module("folded", folded)
    convolution.forward = Sealing(folded, dimensions, NORMS.get(type(norm), ANY), norm_name)
    norm.forward = Opening(folded, convolution_name, norm_name)


def _scaled(convolution: nn.Module, weight: Tensor, scale: Tensor) -> Tensor:
    """The weight with each output channel multiplied by its scale (C,)."""
    spatial = (1,) * (weight.dim() - 2)
    if not isinstance(convolution, TRANSPOSED):
        return weight * scale.view(-1, 1, *spatial)  # (C, in / groups, ...)
    groups = convolution.groups
    by_group = weight.unflatten(0, (groups, -1))  # (groups, in / groups, C / groups, ...)
    return (by_group * scale.view(groups, 1, -1, *spatial)).flatten(0, 1)


def _scale_and_shift(norm: nn.Module, dimensions: int) -> tuple[Tensor, Tensor]:
    """(scale, shift), each (C,) float64. norm(x) = scale x + shift for x with this number of dimensions."""
    if not isinstance(norm, _BatchNorm):
        return _measured(norm, dimensions)
    if type(norm) not in NORMS:
        raise CannotFoldError(f"it is a {type(norm).__name__}, which may do more than a batch norm")
    if dimensions not in NORMS[type(norm)]:
        raise CannotFoldError(f"a {type(norm).__name__} does not accept tensors of {dimensions} dimensions")
    if norm.training:
        raise CannotFoldError("it is in training mode")
    if norm.running_mean is None or norm.running_var is None:
        raise CannotFoldError("it normalizes by the statistics of each batch")
    scale = (norm.running_var.double() + norm.eps).rsqrt()
    if norm.weight is not None:
        scale = scale * norm.weight.double()
    shift = -norm.running_mean.double() * scale
    return scale, shift if norm.bias is None else shift + norm.bias.double()


def _measured(norm: nn.Module, dimensions: int) -> tuple[Tensor, Tensor]:
    """Return (scale, shift) of a frozen norm, found by running it, since its class decides its eps. They are computed
    from the results for inputs of 0 and 1 in float64, and checked with other inputs.
    """
    example = norm.running_mean
    assert isinstance(example, Tensor)
    shape = (1, example.numel(), *(1,) * (dimensions - 2))
    zeros = torch.zeros(shape, dtype=torch.float64, device=example.device)
    sizes = (8, example.numel(), *(3,) * (dimensions - 2))
    try:
        probe = nn.Module.double(copy.deepcopy(norm))
        shift = probe(zeros)
        scale = probe(zeros + 1) - shift
        affine = True
        for size in (1.0, 1e3):  # all values differ
            others = torch.arange(math.prod(sizes), dtype=torch.float64, device=example.device).mul(0.7).sin()
            others = size * others.view(sizes)
            found, expected = probe(others.clone()), scale * others + shift
            affine &= found.shape == others.shape and torch.allclose(found, expected, rtol=1e-6, atol=1e-6 * size)
    except Exception as error:
        raise CannotFoldError(f"trying it failed: {in_a_line(error)}") from error
    if not affine:
        raise CannotFoldError(f"it is a {type(norm).__name__}, which does more than multiply and add")
    return scale.flatten().double(), shift.flatten().double()


# ---- the sealed output ---------------------------------------------------------------------------------------------


class _Sealed:
    """A wrapper of the output of a convolution into which a norm was folded. Only that norm, whose operation is already
    done, unwraps it. Any other use is an error.
    """

    def __init__(self, value: Tensor, convolution: nn.Module, norm: str) -> None:
        self.value, self.convolution, self.norm = value, convolution, norm

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        raise OtherPathError(OTHER_PATH.format(what="the output of a folded convolution goes to another function"))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._elsewhere()

    def _elsewhere(self) -> OtherPathError:
        return OtherPathError(OTHER_PATH.format(what=f"the input of {self.norm} is used elsewhere"))


def _refused(sealed: _Sealed, *arguments: Any) -> Any:
    raise sealed._elsewhere()


OTHER_PATH = (
    "{what}: this call takes another path through the model than the trace used for folding (an Engine with fold=False "
    "does not fold)"
)
for _name in (*SPECIAL_METHODS, "__add__", "__radd__", "__iadd__"):
    setattr(_Sealed, _name, _refused)


class Sealing:
    """The replaced `forward` of a folded convolution: it wraps the output, so that only the folded norm can use it.

    Args:
        dimensions: number of dimensions of an output whose second dimension is the channels.
        taken: numbers of dimensions that the norm accepts. If an output has another number of dimensions than
            `dimensions`, and the norm accepts this number, the call raises OtherPathError, because the norm would use
            another dimension as channels. If the norm does not accept this number, the call raises ValueError.
    """

    def __init__(self, folded: nn.Module, dimensions: int, taken: tuple[int, ...], norm: str) -> None:
        self.folded, self.dimensions, self.taken, self.norm = folded, dimensions, taken, norm

    def __call__(self, input: Tensor) -> _Sealed:
        output = self.folded(input)
        if output.dim() != self.dimensions:
            what = f"{self.norm}: expected {self.dimensions}D input (got {output.dim()}D input)"
            if output.dim() not in self.taken:
                raise ValueError(what)  # as the norm does
            raise OtherPathError(OTHER_PATH.format(what=what))
        return _Sealed(output, self.folded, self.norm)


class Opening:
    """The replaced `forward` of a norm that was folded into a convolution: it only unwraps the convolution's output."""

    def __init__(self, folded: nn.Module, convolution: str, norm: str) -> None:
        self.folded, self.convolution, self.norm = folded, convolution, norm

    def __call__(self, input: Any) -> Tensor:
        if type(input) is not _Sealed or input.convolution is not self.folded:
            what = f"{self.norm} was folded into {self.convolution}, but is called on something else"
            raise OtherPathError(OTHER_PATH.format(what=what))
        value: Tensor = input.value
        return value
