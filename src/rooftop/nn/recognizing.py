"""Recognize RMS norms of other libraries by the results of their forward instead of by their class.

Each library has its own RMS norms (LlamaRMSNorm, Qwen2RMSNorm, T5LayerNorm, GemmaRMSNorm, ...). All these classes
compute

    y = x / sqrt(mean(x^2) + eps) * (offset + weight)        offset: 0, or 1 if weights are initialized to 0

Zhang and Sennrich 2019, "Root Mean Square Layer Normalization". A module that has only one parameter, and neither
buffers nor submodules, is called on a few small inputs with random weights. If every result equals that of the formula,
the module is an RMS norm.
"""

from __future__ import annotations

import copy
import inspect
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rooftop.kernels import rms_norm
from rooftop.kernels.operands.dtypes import FLOATS
from rooftop.nn.hooks import has_hooks

SCALES = (1e-3, 1.0, 100.0)
"""Scales of the inputs. With the smallest scale, eps changes the result, because the mean square is close to eps."""
MOST_COLUMNS = 65536
CLOSE = 2e-5


class RmsNorm(NamedTuple):
    """The parameters of a recognized RMS norm, besides its weight.

    Attributes:
        eps: added to the mean square.
        offset: added to the weight, 0 or 1.
    """

    eps: float
    offset: int


def recognized(module: nn.Module) -> RmsNorm | None:
    """The parameters of the RMS norm that a module computes; None if the module computes anything else."""
    weight = _only_weight(module)
    if weight is None or has_hooks(module) or "forward" in vars(module) or not _takes_one_argument(module):
        return None
    try:
        with torch.no_grad(), torch.random.fork_rng([]):
            return _tried(nn.Module.float(copy.deepcopy(module)).cpu())
    except Exception:  # a forward may raise anything for an unexpected input
        return None


def _only_weight(module: nn.Module) -> Tensor | None:
    """The weight of a module that may be an RMS norm: its only parameter, of one dimension, without buffers or
    submodules."""
    if isinstance(module, Recognized) or type(module).__module__.startswith("torch."):
        return None
    if any(True for _ in module.children()):
        return None
    if any(True for _ in module.buffers()):
        return None
    parameters = list(module.parameters())
    if len(parameters) != 1 or getattr(module, "weight", None) is not parameters[0]:
        return None
    weight = parameters[0]
    plain = type(weight) is nn.Parameter and weight.dtype in FLOATS and not weight.is_meta
    return weight if plain and weight.dim() == 1 and 1 < weight.numel() <= MOST_COLUMNS else None


def _takes_one_argument(module: nn.Module) -> bool:
    """Whether forward has a single argument. Further arguments could change the result."""
    return len(inspect.signature(module.forward).parameters) == 1


def _tried(module: nn.Module) -> RmsNorm | None:
    weight: Any = module.weight
    columns = weight.numel()
    generator = torch.Generator().manual_seed(columns)
    weight.copy_(torch.rand(columns, generator=generator) + 0.5)
    inputs = [scale * torch.randn(3, columns, generator=generator) for scale in SCALES]
    for offset in (0, 1):
        for eps in _numbers(module):
            norm = RmsNorm(eps, offset)
            if all(_agrees(module, x, norm, mode) for x in inputs for mode in (True, False)):
                others = (inputs[1][0], inputs[1].reshape(1, 3, 1, columns), inputs[1][:0], torch.zeros(2, columns))
                return norm if all(_agrees(module, x, norm, True) for x in others) else None
    return None


def _numbers(module: nn.Module) -> list[float]:
    """Candidate values of eps: the floats between 0 and 1 among the module's attributes, and 0."""
    found = [each for each in vars(module).values() if type(each) is float and 0 < each < 1]
    return [*dict.fromkeys(found), 0.0]


def _agrees(module: nn.Module, x: Tensor, norm: RmsNorm, training: bool) -> bool:
    before = x.clone()
    got = module.train(training)(x)
    if type(got) is not Tensor or got.shape != x.shape or got.dtype != x.dtype or not torch.equal(x, before):
        return False
    exact = _by_formula(x.double(), module.weight.double(), norm)  # type: ignore[arg-type, operator, union-attr]
    return bool(torch.allclose(got.double(), exact, rtol=CLOSE, atol=0.0, equal_nan=True))


def _by_formula(x: Tensor, weight: Tensor, norm: RmsNorm) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * (norm.offset + weight)


# ---- the module as Rooftop computes it ------------------------------------------------------------------------------


def substitute(module: nn.Module, norm: RmsNorm) -> None:
    """From now on, let `rooftop.kernels.rms_norm` compute a recognized module. The module's class is replaced by a
    subclass of that class.
    """
    kind: Any = type(module)
    module.__class__ = _class_below(kind)
    module.__dict__["_rms_norm"] = norm


class Recognized:
    """A mixin with the forward of recognized norms. `_class_below` derives a class from the mixin and the module's
    class."""

    _rms_norm: RmsNorm
    _argument: str
    weight: Tensor

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Compute the norm of one tensor (..., columns), whose argument is named as in the original forward. The
        result has the same shape and dtype as the tensor.
        """
        eps, offset = self._rms_norm
        input: Any = keywords.get(self._argument) if keywords else inputs[0] if inputs else None
        as_usual = isinstance(input, Tensor) and input.dtype in FLOATS and input.dim() > 0
        as_usual = as_usual and len(inputs) + len(keywords) == 1 and not torch._C._is_any_autocast_enabled()
        if not as_usual or (not offset and input.dtype != self.weight.dtype):
            return super().forward(*inputs, **keywords)  # type: ignore[misc]
        weight = self.weight.float() + offset if offset else self.weight
        return rms_norm(input, (self.weight.numel(),), weight, eps)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the module's original class, because other processes cannot import a class created at run time."""
        return _loaded, (type(self).__mro__[2],), self.__dict__.copy()


def _loaded(kind: Any) -> nn.Module:
    below = _class_below(kind)
    return below.__new__(below)  # type: ignore[no-any-return]


@cache
def _class_below(kind: Any) -> Any:
    argument = list(inspect.signature(kind.forward).parameters)[1]  # after self
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "_argument": argument}
    return type(kind.__name__, (Recognized, kind), names)
