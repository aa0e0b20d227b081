"""The rule for Liger's kernels (https://github.com/linkedin/Liger-Kernel). If the package is installed,
`liger_kernel.transformers.functional` computes norms and SwiGLU.

Liger's own patches replace classes and functions of transformers for the whole process. This rule changes only modules
of the candidate, and recognizes them by what they compute.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rooftop.nn.hooks import has_hooks
from rooftop.nn.recognizing import recognized
from rooftop.rewrites.candidates import Candidate, Rule, Times, counted_kinds, only_on_gpu
from rooftop.rewrites.module_rules import OF_NORMS, Norms, gain_norms

PACKAGE, FUNCTIONS = "liger_kernel", "liger_kernel.transformers.functional"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
"""Names of the linear layers of a SwiGLU in transformers' models."""
EPS = 1e-6
Function = Callable[[Tensor], Tensor]


class Liger(Rule):
    """Compute layer norms, RMS norms and SwiGLU by Liger's kernels."""

    name = "liger-kernel"
    kind = "kernels"
    opaque = True
    trains = True

    def refusal(self, candidate: Candidate) -> str | None:
        if reason := only_on_gpu(candidate):
            return reason
        return None if importlib.util.find_spec(PACKAGE) else "not installed: pip install liger-kernel"

    def absent(self, times: Times) -> str | None:
        return times.lack(*OF_NORMS, "silu", "sigmoid")

    def predicted_ms(self, times: Times) -> float:
        functions = importlib.import_module(FUNCTIONS)

        def layer_norm(x: Tensor, shape: Any, weight: Tensor | None, bias: Tensor | None, eps: float) -> object:
            if weight is None or bias is None or len(shape) != 1:  # `apply` does not replace such a norm
                return nn.functional.layer_norm(x, shape, weight, bias, eps)
            return functions.liger_layer_norm(x, weight, bias, eps)

        def rms_norm(x: Tensor) -> object:
            return functions.liger_rms_norm(x, x.new_ones(x.shape[-1]), EPS, 0.0, "llama", False)

        return gain_norms(times, Norms(layer_norm, rms_norm))

    def apply(self, candidate: Candidate) -> str:
        functions = importlib.import_module(FUNCTIONS)
        kinds = []
        for module in candidate.model.modules():
            if "forward" in vars(module) or has_hooks(module):
                continue
            if (made := _by_liger(module, functions)) is not None:
                kind, function = made
                module.__dict__["forward"] = _Forward(module.forward, function, next(module.parameters()).dtype)
                kinds.append(kind)
        return counted_kinds(kinds)


class _Forward:
    """The forward of a module that Liger computes.

    Args:
        usual: the module's own forward, for calls with anything other than one tensor of the weights' dtype.
    """

    def __init__(self, usual: Callable[..., Any], function: Function, dtype: torch.dtype) -> None:
        self.usual, self.function, self.dtype = usual, function, dtype

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        given = [*inputs, *keywords.values()]
        if len(given) == 1 and isinstance(given[0], Tensor) and given[0].dtype == self.dtype and given[0].numel():
            return self.function(given[0])
        return self.usual(*inputs, **keywords)


def _by_liger(module: nn.Module, functions: Any) -> tuple[str, Function] | None:
    """(kind of the module, function of Liger that computes it); None for other modules."""
    weight: Any = getattr(module, "weight", None)
    if type(module) is nn.LayerNorm and len(module.normalized_shape) == 1 and module.bias is not None:
        # weights are looked up in each call, because the rule for CUDA graphs exchanges them during a capture
        layer: Any = module
        return "LayerNorm", lambda x: functions.liger_layer_norm(x, layer.weight, layer.bias, layer.eps)
    norm = recognized(module)
    if type(module) is nn.RMSNorm and len(module.normalized_shape) == 1 and weight is not None and module.eps:
        eps, offset = module.eps, 0
    elif norm is not None:
        eps, offset = norm
    else:
        return _swiglu(module, functions) if is_swiglu(module) else None
    casting = "gemma" if offset else "llama"  # "llama" rounds before the product with the weight, "gemma" after it
    layer = module
    return "RMSNorm", lambda x: functions.liger_rms_norm(x, layer.weight, eps, float(offset), casting, False)


def _swiglu(module: Any, functions: Any) -> tuple[str, Function]:
    gate, up, down = (getattr(module, name) for name in PROJECTIONS)
    return "SwiGLU", lambda x: down(functions.liger_swiglu(gate(x), up(x)))


def is_swiglu(module: nn.Module) -> bool:
    """Whether a module with three projections computes down(silu(gate(x)) * up(x)), by a trial with small
    projections.
    """
    parts = dict(module.named_children())
    if not all(type(parts.get(name)) is nn.Linear for name in PROJECTIONS):
        return False
    if any(has_hooks(part) for part in parts.values()) or any(True for _ in module.parameters(recurse=False)):
        return False
    same: Any = copy.copy(module)
    same._modules = dict(module._modules)
    with torch.random.fork_rng([]), torch.no_grad():
        torch.default_generator.manual_seed(0)  # `torch.manual_seed` would change the generators of GPUs, too
        for name, sizes in zip(PROJECTIONS, ((4, 6), (4, 6), (6, 4)), strict=True):
            same._modules[name] = nn.Linear(*sizes)
        x = torch.randn(5, 4)
        try:
            got = same(x)
        except Exception:  # the forward may need other arguments or sizes
            return False
        expected = same.down_proj(nn.functional.silu(same.gate_proj(x)) * same.up_proj(x))
        return type(got) is Tensor and got.shape == expected.shape and bool(torch.allclose(got, expected))
