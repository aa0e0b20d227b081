"""Fuse convolutions with the bias, shortcut sum and activation that follow (`kernels.conv_act`).

    relu(convolution(x) + shortcut)

When is fusing allowed? The traces of `folding.py` show which convolutions' results are used only once, by an activation
or by a sum that only an activation uses. The operations between the convolution and the activation must be known to
change no other tensor. Such a convolution returns a promise, which stands for its result. A sum is recorded in the
promise, and the activation computes everything at once. Any other use of a promise computes the tensor for which it
stands, without an activation. So the trace affects only the speed: a call on another path also returns correct numbers.
Only code that changes an inference tensor in place may get wrong numbers, since such tensors have no version counter.
Shapes are known only in the call. If a shortcut then needs broadcasting or a cast, PyTorch computes the sum.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from rooftop.kernels import conv_act
from rooftop.kernels.convolutions.launches import channels_fastest
from rooftop.kernels.operands.dtypes import FLOATS, HALVES
from rooftop.nn.hidden_methods import check_methods
from rooftop.nn.hooks import has_hooks
from rooftop.rewrites.folding import CONVOLUTIONS, NORMS, Opening, Sealing, Structure, check_traceable, global_hooks
from rooftop.rewrites.splitting import OtherPathError
from rooftop.rewrites.stand_ins import SPECIAL_METHODS
from rooftop.rewrites.structures import mapped
from rooftop.rewrites.type_questions import was_asked

Function = Callable[..., Any]
Sizes = tuple[int, ...]
ACTIVATIONS: dict[Function, str] = {
    functional.relu: "relu",
    functional.relu_: "relu",
    torch.relu: "relu",
    torch.relu_: "relu",
    Tensor.relu: "relu",
    Tensor.relu_: "relu",
    functional.gelu: "gelu",
    functional.silu: "silu",
    functional.relu6: "relu6",
    functional.hardswish: "hardswish",
    functional.hardsigmoid: "hardsigmoid",
    torch.sigmoid: "sigmoid",
    Tensor.sigmoid: "sigmoid",
}
MODULES: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.SiLU: "silu",
    nn.Sigmoid: "sigmoid",
    nn.GELU: "gelu",
    nn.ReLU6: "relu6",
    nn.Hardswish: "hardswish",
    nn.Hardsigmoid: "hardsigmoid",
}
SUMS: tuple[Function, ...] = (operator.add, torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)
SUMS_IN_PLACE: tuple[Function, ...] = (operator.iadd, Tensor.add_, Tensor.__iadd__)
METHODS = ("relu", "relu_", "sigmoid", "add", "add_")
# Modules that change no tensor. Only these may run between a convolution and its activation.
PURE = (*CONVOLUTIONS, *NORMS, nn.Identity, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d)


@dataclass
class Fusing:
    """The result of `fuse_convolutions`, by module name.

    Attributes:
        fused: for each convolution that Rooftop computes, the fused operations ("bias, sum, relu").
        left: for each other 2-D convolution, why PyTorch computes it.
    """

    fused: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{name}: with {what}" for name, what in self.fused.items()]
        lines += [f"{name}: left alone, {why}" for name, why in self.left.items()]
        return "\n".join(lines) or "no convolutions"


@torch.no_grad()
def fuse_convolutions(model: nn.Module) -> Fusing:
    """Let `kernels.conv_act` compute the 2-D convolutions of a model with their bias, sum and activation, in place.

    The model is then only for inference. To fold norms as well, call `fold_norms` first. Modules keep their parameters,
    and keys of the state dict do not change. While torch.fx traces, it replaces methods of all modules of the process,
    so other threads must not run models.

    Raises:
        TypeError: model is not a module, cannot be copied, or has an attribute that hides a method of `nn.Module`.
        ValueError: a parameter has no size yet, or the model is on the meta device.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"fuse_convolutions: model must be a torch.nn.Module, got {type(model).__name__}")
    check_methods(model, "fuse_convolutions")
    convolutions = {name: module for name, module in model.named_modules() if isinstance(module, nn.Conv2d)}
    inner = {id(_folded(module)) for module in convolutions.values() if _folded(module) is not module}
    candidates = {name: module for name, module in convolutions.items() if id(module) not in inner}
    result = Fusing()
    if not candidates:
        return result
    check_traceable(model, "fuse_convolutions")
    if global_hooks():
        return Fusing(left=dict.fromkeys(candidates, "hooks for all modules are registered"))
    left = {name: why for name, module in candidates.items() if (why := _why_not(module))}
    followers = Followers(model)
    steps: dict[str, tuple[str, ...]] = {}
    for name, module in reversed(candidates.items()):  # the later of two summed convolutions computes the sum
        steps[name] = () if name in left else followers.of(module)
    for name, module in candidates.items():
        folded = _folded(module)
        bias = ("bias",) if folded.bias is not None else ()
        if name in left:
            result.left[name] = left[name]
        elif bias or steps[name]:
            result.fused[name] = ", ".join(bias + steps[name])
            folded.__dict__["forward"] = _Computing(folded, steps[name])
        else:
            result.left[name] = "no operation follows that could be fused with it"
    for activation in followers.activations:
        activation.__dict__["forward"] = _Activating(activation)
    return result


def lay_out_depthwise(model: nn.Module) -> None:
    """Store the weights of fused depthwise convolutions in half precision as (KH, KW, C), which their kernel reads
    fastest. The depthwise kernel needs a GPU and images that are channels last: the caller checks this.
    """
    for module in model.modules():
        if isinstance(vars(module).get("forward"), _Computing):
            weight = module._parameters.get("weight")
            if weight is not None and _is_depthwise(module) and weight.dtype in HALVES:
                faster = channels_fastest(weight.detach())
                module._parameters["weight"] = nn.Parameter(faster, requires_grad=weight.requires_grad)


def _folded(convolution: nn.Conv2d) -> nn.Conv2d:
    """The convolution with the folded norm, if `Sealing` replaced this convolution's forward; else this convolution."""
    forward = vars(convolution).get("forward")
    return forward.folded if isinstance(forward, Sealing) else convolution  # type: ignore[return-value]


def _is_depthwise(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv2d) and 1 < module.groups == module.in_channels == module.out_channels


def _why_not(module: nn.Conv2d) -> str | None:
    """Why `conv_act` cannot compute a convolution; None if it can."""
    folded = _folded(module)
    if type(module) is not nn.Conv2d:
        return f"it is a {type(module).__name__}, which may do more than a Conv2d"
    if has_hooks(module):
        return "it has hooks"
    if "forward" in vars(folded):
        return "its forward was replaced"
    if folded.padding_mode != "zeros" or isinstance(folded.padding, str):
        return f"its padding is {folded.padding_mode}, {folded.padding!r}"
    if folded.weight.dtype not in FLOATS:
        return f"its weights are {folded.weight.dtype}"
    return None


# ---- the following operations --------------------------------------------------------------------------------------


class Followers:
    """The operations that follow each convolution, as far as torch.fx can trace the model."""

    def __init__(self, model: nn.Module) -> None:
        self.structure = Structure(model)
        self.taken: set[fx.Node] = set()  # sums assigned to a convolution
        self.activations: set[nn.Module] = set()  # modules fused with a convolution

    def of(self, module: nn.Conv2d) -> tuple[str, ...]:
        """The operations to fuse with a convolution, such as ("relu",) or ("sum", "relu"). () if nothing can be fused,
        for example because the convolution is called several times.
        """
        structure = self.structure
        if structure.names[id(module)] > 1 or structure.calls[id(module)] != 1:
            return ()
        begin, prefix = structure.before[id(module)]
        result = begin
        if _folded(module) is not module:
            opened = self._opened(begin, prefix)
            if opened is None:
                return ()
            result = opened
        chain = self._passed_on(result, prefix)
        user = following = _only(chain[-1])
        steps: tuple[str, ...] = ()
        if user is not None and user not in self.taken and _is_sum_with(user, chain[-1]):
            chain += self._passed_on(user, prefix)
            following = _only(chain[-1])
            steps = ("sum",)
        name = self._activation(following, chain[-1], prefix)
        if following is None or name is None or not self._nothing_between(begin, following, chain, prefix):
            return ()
        if any(map(was_asked, (begin, *chain))):
            return ()
        if user is not None and steps:
            self.taken.add(user)
        if following.op == "call_module":
            self.activations.add(self._module(following, prefix))
        return (*steps, name)

    def _opened(self, node: fx.Node, prefix: str) -> fx.Node | None:
        """The call of the folded norm that takes a folded convolution's result. None if this trace has no such call,
        because this trace follows another path through the model than the trace by which the norm was folded.
        """
        while (user := _only(node)) is not None and user.op == "call_module":
            if isinstance(vars(self._module(user, prefix)).get("forward"), Opening):
                return user
            if not self.structure.passes_on(user, prefix):
                return None
            node = user
        return None

    def _passed_on(self, node: fx.Node, prefix: str) -> list[fx.Node]:
        """A node, followed by the calls of `nn.Identity` that pass its value on and are its only users."""
        chain = [node]
        while (user := _only(chain[-1])) is not None and self.structure.passes_on(user, prefix):
            chain.append(user)
        return chain

    def _activation(self, node: fx.Node | None, source: fx.Node, prefix: str) -> str | None:
        if node is None or tuple(node.args) != (source,):
            return None
        if node.op == "call_module":
            module = self._module(node, prefix)
            replaced = not isinstance(vars(module).get("forward"), _Activating | None)
            return None if replaced or has_hooks(module) else _activation_by(module)
        function = getattr(Tensor, str(node.target), None) if node.op == "call_method" else node.target
        return _activation_of(function, node.kwargs)

    def _nothing_between(self, begin: fx.Node, end: fx.Node, chain: list[fx.Node], prefix: str) -> bool:
        nodes = list(begin.graph.nodes)
        for node in nodes[nodes.index(begin) + 1 : nodes.index(end)]:
            pure = node.op == "get_attr" or (node.op == "call_module" and self._is_pure(self._module(node, prefix)))
            if node not in chain and not pure:
                return False
        return True

    def _is_pure(self, module: nn.Module) -> bool:
        forward = vars(module).get("forward")
        known = type(module) in PURE or isinstance(forward, Opening)
        return known and not has_hooks(module) and (forward is None or isinstance(forward, Sealing | Opening))

    def _module(self, node: fx.Node, prefix: str) -> nn.Module:
        return self.structure.modules[f"{prefix}.{node.target}" if prefix else str(node.target)]


def _only(node: fx.Node) -> fx.Node | None:
    """The only user of a node's value; None if there are several, or if the model returns the value."""
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].op != "output" else None


def _is_sum_with(node: fx.Node, result: fx.Node) -> bool:
    """Whether a node computes `result` + another tensor. If it adds in place, it must change `result`."""
    function = getattr(Tensor, str(node.target), None) if node.op == "call_method" else node.target
    if len(node.args) != 2 or node.kwargs or not all(isinstance(each, fx.Node) for each in node.args):
        return False
    if node.args[0] is node.args[1]:
        return False
    return function in SUMS or (function in SUMS_IN_PLACE and node.args[0] is result)


def _activation_of(function: Any, options: dict[str, Any]) -> str | None:
    """The name of the activation that a function computes with these options; None if it computes anything else."""
    name = ACTIVATIONS.get(function) if isinstance(function, Callable) else None  # type: ignore[arg-type]
    if name == "gelu":
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(options.get("approximate", "none"))
    return name if set(options) <= {"inplace"} else None


def _activation_by(module: nn.Module) -> str | None:
    """The name of the activation that a module computes; None if it computes anything else."""
    name = MODULES.get(type(module))
    return "gelu_tanh" if name == "gelu" and module.approximate != "none" else name


# ---- the promise ---------------------------------------------------------------------------------------------------


class _Computing:
    """The function that replaces the `forward` of a convolution. Rooftop's kernels compute the convolution when this
    function is called, or, if operations are to be fused with it, when these operations are called.
    """

    def __init__(self, convolution: nn.Conv2d, steps: tuple[str, ...]) -> None:
        self.convolution, self.steps = convolution, steps

    def __call__(self, input: Any) -> Any:
        input = value_of(input)
        # an unbatched image, arguments that PyTorch refuses, or a padding such as "same", which was set later
        if not isinstance(input, Tensor) or input.dim() != 4 or isinstance(self.convolution.padding, str):
            return nn.Conv2d.forward(self.convolution, input)
        return _Promise(self.convolution, input) if self.steps else _computed(self.convolution, input, None, None)


class _Activating:
    """The forward of an activation that follows a convolution.

    The activation's own forward would compute the same. But PyTorch would first look up `__torch_function__`, which
    takes several microseconds.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, input: Any) -> Tensor:
        module = self.module
        if type(input) is _Promise and input.settled is None and (name := _activation_by(module)) is not None:
            return input.activated(name, bool(getattr(module, "inplace", False)))
        return type(module).forward(module, input)  # type: ignore[no-any-return]


def _computed(module: nn.Conv2d, input: Tensor, residual: Tensor | None, activation: str | None) -> Tensor:
    padding: Any = module.padding
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")  # `module.weight` takes longer
    return conv_act(
        input, module.weight if weight is None else weight, module.bias if bias is None else bias, residual,
        stride=module.stride, padding=padding, dilation=module.dilation, groups=module.groups, activation=activation,
    )  # fmt: skip


class _Promise:
    """The output of a convolution that will be computed with the following operations. Access to an attribute of a
    tensor, except `dim` and METHODS, computes the output at once, without an activation.
    """

    def __init__(self, convolution: nn.Conv2d, input: Tensor, residual: Tensor | None = None) -> None:
        self.convolution, self.input, self.residual = convolution, input, residual
        self.settled: Tensor | None = None
        self.versions = _version(input), _version(residual)
        self.autocast = _autocast(input.device.type)

    def dim(self) -> int:
        return 4

    def value(self) -> Tensor:
        """The convolution's output, with the addend if there is one, but without an activation."""
        if self.settled is None:
            self.settled = self._with(None)
        return self.settled

    def _with(self, activation: str | None) -> Tensor:
        if self.versions != (_version(self.input), _version(self.residual)):
            raise OtherPathError(
                "the input of a convolution was changed before its activation: this call takes another path through "
                "the model than the trace used for fusing (an Engine with fuse=False does not fuse)"
            )
        kind = self.input.device.type
        if self.autocast is _autocast(kind):
            return _computed(self.convolution, self.input, self.residual, activation)
        # use autocast's settings at the time when the convolution was called
        with torch.autocast(kind, self.autocast, self.autocast is not None):
            return _computed(self.convolution, self.input, self.residual, activation)

    def plus(self, other: Any, in_place: bool) -> Any:
        if self.settled is not None or self.residual is not None or not self._can_add(other):
            return self.value().add_(other) if in_place else self.value() + other
        if not in_place:
            promise = _Promise(self.convolution, self.input, other)
            promise.versions, promise.autocast = (self.versions[0], promise.versions[1]), self.autocast
            return promise
        self.residual, self.versions = other, (self.versions[0], _version(other))
        return self

    def _can_add(self, other: Any) -> bool:
        """Whether the sum with `other` has the shape and dtype of the convolution's result."""
        module, input = self.convolution, self.input
        if type(other) is not Tensor and type(other) is not nn.Parameter:
            return False
        sizes = map(_pair, (module.kernel_size, module.stride, module.padding, module.dilation))
        same = other.dtype is input.dtype and other.device == input.device
        return same and tuple(other.shape) == _shape_of_result(input.shape, module.out_channels, *sizes)

    def activated(self, name: str, in_place: bool) -> Tensor:
        result = self._with(name)
        if in_place:
            self.settled = result
        return result

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        first = arguments[0] if arguments else None
        if isinstance(first, _Promise) and first.settled is None and len(arguments) == 1:
            name = _activation_of(function, options)
            if name is not None:
                in_place = bool(options.get("inplace")) or function.__name__.endswith("_")
                return first.activated(name, in_place)
        if len(arguments) == 2 and not options:
            second = arguments[1]
            if isinstance(first, _Promise) and function in (*SUMS, *SUMS_IN_PLACE) and not isinstance(second, _Promise):
                return first.plus(second, function in SUMS_IN_PLACE)
            if isinstance(second, _Promise) and function in SUMS and not isinstance(first, _Promise):
                return second.plus(first, False)
        arguments, options = torch.utils._pytree.tree_map(value_of, (arguments, options))
        return function(*arguments, **options)

    def __add__(self, other: Any) -> Any:
        return self.plus(value_of(other), False)

    def __radd__(self, other: Any) -> Any:
        return self.plus(other, False)

    def __iadd__(self, other: Any) -> Any:
        return self.plus(value_of(other), True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in METHODS:
            method = getattr(Tensor, name)
            return lambda *arguments, **options: self.__torch_function__(method, (), (self, *arguments), options)
        return getattr(self.value(), name)


def _special(name: str) -> Function:
    method = getattr(Tensor, name)
    return lambda promise, *arguments, **options: method(promise.value(), *arguments, **options)


for _name in SPECIAL_METHODS:
    setattr(_Promise, _name, _special(_name))


def settled(results: Any) -> Any:
    """Replace each `_Promise` (a convolution that is not computed yet) in a model's results by its tensor. A call may
    return promises if it takes another path through the model than the trace.
    """
    return mapped(results, _Promise.value, of_type=_Promise)


def _pair(sizes: Any) -> Sizes:
    """The vertical and the horizontal size. A program may set an attribute of a convolution to a list or a number."""
    if type(sizes) is tuple:
        return sizes
    return (sizes, sizes) if isinstance(sizes, int) else tuple(sizes)


@lru_cache(maxsize=4096)
def _shape_of_result(
    shape: torch.Size, channels: int, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes
) -> Sizes:
    sizes = zip(shape[2:], kernel, stride, padding, dilation, strict=True)
    return (shape[0], channels, *((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sizes))


def _autocast(kind: str) -> torch.dtype | None:
    """Autocast's dtype for this device type; None if autocast is off, and for meta tensors."""
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None


def _version(tensor: Tensor | None) -> int | None:
    """A tensor's version counter; None for an inference tensor, which has no counter."""
    return None if tensor is None or tensor.is_inference() else tensor._version


def value_of(part: Any) -> Any:
    """Compute the convolution that a `_Promise` stands for, and return the result. Return any other value unchanged."""
    return part.value() if isinstance(part, _Promise) else part
