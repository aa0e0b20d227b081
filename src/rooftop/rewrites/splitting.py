"""Split a norm that also does something else into a plain batch norm and the modules after it.

Libraries join a batch norm with its activation in one class, such as timm's `BatchNormAct2d`: a subclass of
`nn.BatchNorm2d` whose forward normalizes, and then calls its modules `drop` and `act`. No rule may fold a subclass,
since its forward may do anything. So torch.fx traces this forward alone. The trace may contain only one `batch_norm` of
the module's own tensors, and then a chain of calls of the module's submodules. The forward must not change the module.
`split` then adds a submodule, the part: a plain `nn.BatchNorm2d` with the same tensors. The new forward calls the part,
then the other submodules. Rules then see ordinary modules.

The trace shows one path only. So each call checks that the module's public attributes that are numbers, strings or None
have not changed. Other attributes, and the train or eval modes of its modules, are not checked.
"""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from rooftop.nn.hooks import has_hooks
from rooftop.rewrites.tracing import OwnThreadTracer

KINDS: tuple[type[_BatchNorm], ...] = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
PART = "rooftop_norm"
"""The name of the part: the plain batch norm that is a submodule of a split norm."""
CHECKS = [kind._check_input_dim for kind in KINDS]
TENSORS = ("weight", "bias", "running_mean", "running_var")
PLAIN = (bool, int, float, complex, str, bytes, type(None))
# Functions by which a forward checks the shape of its input. The plain norm checks the shape again.
QUESTIONS = (getattr, operator.eq, operator.ne, operator.gt, operator.ge, operator.lt, operator.le, torch._assert)
SIGNATURE = inspect.signature(functional.batch_norm)


class OtherPathError(RuntimeError, TypeError):
    """A call takes another path through the model than the trace. The message says where.

    This error is also a TypeError, because some code asks by `iter(x)` or `len(x)` whether a value is a sequence.
    """


class Chain:
    """The replaced `forward` of a split norm. It calls the plain batch norm inside the norm, and then the norm's other
    submodules, by name.
    """

    def __init__(self, norm: nn.Module, names: Sequence[str]) -> None:
        self.norm, self.names = norm, tuple(names)
        self.note_attributes()

    def note_attributes(self) -> None:
        """Record the norm's attributes. Each later call raises an error if one of them has changed."""
        self.attributes = _attributes(self.norm)

    def __call__(self, input: Any) -> Any:
        # compiled code has a fixed path, and older versions of torch.compile cannot trace this comparison
        if not torch.compiler.is_compiling() and _attributes(self.norm) != self.attributes:
            raise OtherPathError(
                f"an attribute of a {type(self.norm).__name__} has changed: this call may take another path than the "
                "trace used for folding (an Engine with fold=False does not fold)"
            )
        input = self.norm.get_submodule(PART)(input)
        for name in self.names:
            input = self.norm.get_submodule(name)(input)
        return input


def _attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes (plain values) on which a forward's control flow may depend."""
    return {name: value for name, value in vars(module).items() if name[0] != "_" and isinstance(value, PLAIN)}


def is_split(module: nn.Module) -> bool:
    """Whether `split` has replaced the module by a chain of a plain batch norm and other submodules."""
    return isinstance(vars(module).get("forward"), Chain)


def split(norm: nn.Module) -> str | None:
    """Split a subclass of a batch norm in place, if its forward normalizes and then only calls submodules in a chain.
    Otherwise return why the norm is not split.

    The plain batch norm that this adds (`PART`) shares the norm's tensors. `unsplit` undoes the split.
    """
    assert isinstance(norm, _BatchNorm)
    kind = next((kind for kind in KINDS if isinstance(norm, kind)), None)
    if norm.training:
        return "it is in training mode"
    if has_hooks(norm):
        return "it has hooks"
    if "forward" in vars(norm):
        return "its forward was replaced"
    names = _chain_of(norm) if kind is not None and not hasattr(norm, PART) else None
    if kind is None or names is None:
        return f"it is a {type(norm).__name__}, which may do more than a batch norm"
    plain = kind(0, norm.eps, norm.momentum, affine=False, track_running_stats=False)
    vars(plain).update(training=False, num_features=norm.num_features, affine=norm.affine)
    plain.track_running_stats = norm.track_running_stats
    for mine, others in ((plain._parameters, norm._parameters), (plain._buffers, norm._buffers)):
        mine.update({name: tensor for name, tensor in others.items() if name in mine})  # type: ignore[arg-type, misc]
    norm.add_module(PART, plain)
    norm.__dict__["forward"] = Chain(norm, names)
    return None


def unsplit(norm: nn.Module) -> None:
    """Undo `split`: remove the plain batch norm inside the norm, and restore the `forward` of the norm's class."""
    del norm._modules[PART]
    del norm.__dict__["forward"]


# ---- the trace -----------------------------------------------------------------------------------------------------


class _Tracer(OwnThreadTracer):
    proxy_buffer_attributes = True

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def _chain_of(norm: _BatchNorm) -> list[str] | None:
    """A norm's forward may call `batch_norm` and then a chain of modules. Return the names of these modules, without
    plain `nn.Identity`; None if the forward does anything else.
    """
    try:
        copied = copy.deepcopy(norm)
        if type(norm)._check_input_dim in CHECKS:
            vars(copied)["_check_input_dim"] = lambda input: None  # torch.fx cannot trace this check
        before = dict(vars(copied))
        with torch.random.fork_rng([]):
            graph = _Tracer().trace(copied)
        after = vars(copied)
    except Exception:  # a forward may fail in any way on inputs that are not tensors
        return None
    if before.keys() != after.keys() or any(before[name] is not after[name] for name in before):
        return None
    nodes = list(graph.nodes)
    norms = [node for node in nodes if node.target is functional.batch_norm]
    inputs = [node for node in nodes if node.op == "placeholder"]
    if len(norms) != 1 or len(inputs) != 1 or not _is_plain(norms[0], inputs[0], norm):
        return None
    chain = [norms[0]]
    while (following := _only_user(chain[-1])) is not None and following.op != "output":
        if following.op != "call_module" or following.args != (chain[-1],) or following.kwargs:
            return None
        chain.append(following)
    known = {*inputs, *chain, *(node for node in nodes if node.op in ("get_attr", "output") or _asks(node))}
    if following is None or following.args != (chain[-1],) or known != set(nodes):
        return None
    names = [str(node.target) for node in chain[1:]]
    return [name for name in names if not returns_its_input(norm.get_submodule(name))]


def _is_plain(call: fx.Node, input: fx.Node, norm: _BatchNorm) -> bool:
    """Whether a call is the batch norm of the input, with the module's own tensors and constant statistics."""
    try:
        bound = SIGNATURE.bind(*call.args, **call.kwargs)
    except TypeError:
        return False
    bound.apply_defaults()
    given: dict[str, Any] = bound.arguments
    own = all(_is_own(given[name], name, norm) for name in TENSORS)
    return own and given["input"] is input and given["training"] is False and given["eps"] == norm.eps


def _is_own(value: Any, name: str, norm: _BatchNorm) -> bool:
    if name in vars(norm):  # a plain attribute, in place of a parameter or buffer
        return False
    if isinstance(getattr(norm, name), Tensor):
        return isinstance(value, fx.Node) and value.op == "get_attr" and value.target == name
    return value is None


def _only_user(node: fx.Node) -> fx.Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 else None


def _asks(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in QUESTIONS and all(map(_asks, node.users))


def returns_its_input(module: nn.Module) -> bool:
    """Whether a module is a plain `nn.Identity`."""
    return type(module) is nn.Identity and not has_hooks(module) and "forward" not in vars(module)
