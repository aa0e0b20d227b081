"""Check the arguments of `rooftop.optimize` before anything runs."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from rooftop.nn.contents import Contents
from rooftop.nn.hidden_methods import check_methods
from rooftop.optimization.optimized import OptimizedModule, hooked, unusual_context

WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def check_arguments(
    module: nn.Module,
    train: bool,
    loss: Callable[[Any], Tensor] | None,
    optimizer: torch.optim.Optimizer | None,
    min_gain: float,
    budget_s: float,
    exact: bool,
    progress: Callable[[str, float], None],
) -> None:
    """Raise TypeError or ValueError for wrong arguments; the message has the remedy."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"optimize: module must be a torch.nn.Module, got {type(module).__name__}")
    if isinstance(module, OptimizedModule):
        raise TypeError("optimize: this module is already optimized: pass the original, `module.original`")
    if not train and (loss is not None or optimizer is not None):
        raise ValueError("optimize: loss and optimizer are for a training step: pass train=True")
    if loss is not None and not callable(loss):
        raise TypeError(f"optimize: loss must be a function of the output, got {type(loss).__name__}")
    if isinstance(min_gain, bool) or not isinstance(min_gain, int | float) or not 0 <= min_gain < 1:
        raise ValueError(f"optimize: min_gain must be at least 0 and below 1, such as 0.02, got {min_gain!r}")
    number = isinstance(budget_s, int | float) and not isinstance(budget_s, bool)
    if not number or not budget_s > 0:
        raise ValueError(f"optimize: budget_s must be a number of seconds above 0, got {budget_s!r}")
    if isinstance(budget_s, int) and budget_s > sys.float_info.max:
        raise ValueError("optimize: budget_s is larger than a float can be: for no limit, pass float('inf')")
    if not isinstance(train, bool):
        raise TypeError(f"optimize: train must be True or False, got {train!r}")
    if not isinstance(exact, bool):
        raise TypeError(f"optimize: exact must be True or False, got {exact!r}")
    if not callable(progress):
        raise TypeError(f"optimize: progress must be a function of (activity, fraction), got {progress!r}")
    _check_model(module)
    if train and (hooks := _hooked_tensor(module)):
        raise ValueError(f"optimize: {hooks} has hooks, which the search would call: remove them first")
    if optimizer is not None:
        _check_optimizer(optimizer, module)
    if why := unusual_context():
        raise ValueError(
            f"optimize: {why}, which the comparison with the original does not cover: turn it off around this call"
        )


def _hooked_tensor(module: nn.Module) -> str:
    """The name of a parameter with hooks; "" if there is none."""
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            return name
    return ""


def _check_model(module: nn.Module) -> None:
    check_methods(module, "optimize")
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        raise TypeError("optimize: a TorchScript module cannot be changed: pass the model that it was made from")
    parts = Contents.of(module).modules
    if isinstance(module, WRAPPERS):
        raise TypeError(f"optimize: pass the model inside this {type(module).__name__}, then wrap the faster module")
    if isinstance(module, torch._dynamo.OptimizedModule) or any(part._compiled_call_impl for part in parts):
        raise TypeError(
            "optimize: this model is compiled: pass the uncompiled model, and the rule `compile` compiles it"
        )
    if any(nn.parameter.is_lazy(tensor) for part in parts for tensor in part.parameters()):
        raise ValueError("optimize: some parameters have no size yet: call the model once first")
    tensors = [*module.parameters(), *module.buffers()]
    if any(tensor.is_meta for tensor in tensors):
        raise ValueError("optimize: the model is on the meta device, without values: load weights first")
    if any(tensor.is_inference() for tensor in tensors):
        raise ValueError(
            "optimize: the model has inference tensors, which do not record changes: create it outside of "
            "torch.inference_mode()"
        )
    if where := hooked(module):
        raise ValueError(f"optimize: {where} has hooks, which a faster copy would not call: remove them first")
    if _has_any_global_hook():
        raise ValueError(
            "optimize: global module hooks are registered (for example by register_module_forward_hook), and a faster "
            "copy might skip them: remove these hooks first"
        )


def _check_optimizer(optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimize: optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    own = {id(parameter) for parameter in module.parameters()}
    if any(id(p) not in own for group in optimizer.param_groups for p in group["params"]):
        raise ValueError("optimize: the optimizer has parameters that are not the module's")
    arguments = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    if any(each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD for each in arguments):
        raise ValueError(
            f"optimize: {type(optimizer).__name__} needs a closure that repeats forward and backward: leave the "
            "optimizer out"
        )


def check_drawn(arguments: Any) -> tuple[Any, ...]:
    """The result of `draw`; raises TypeError if it is not a tuple."""
    if not isinstance(arguments, tuple):
        raise TypeError(f"optimize: draw must return a tuple of arguments, got {type(arguments).__name__}")
    return arguments


def check_shapes(shapes: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """The requested shapes, without repetitions."""
    if not isinstance(shapes, Sequence):
        raise TypeError(f"optimize: shapes must be a list of shapes such as [(1, 3, 224, 224)], got {shapes!r}")
    found: dict[tuple[int, ...], None] = {}
    for shape in shapes:
        sizes = tuple(shape) if isinstance(shape, Sequence) and not isinstance(shape, str) else None
        if sizes is None or any(isinstance(n, bool) or not isinstance(n, Integral) or n < 0 for n in sizes):
            raise ValueError(f"optimize: each of shapes must be a shape such as (1, 3, 224, 224), got {shape!r}")
        found[tuple(map(int, sizes))] = None  # NumPy's integers also count
    return list(found)
