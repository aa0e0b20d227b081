"""Call an operator's implementation directly, without PyTorch's dispatcher.

For an operator written in Python, a call through the dispatcher takes the host longer than the launch of a small
kernel. A call does not need the dispatcher if no compiler, mode, transform or profiler is active. If one of them is
active (such as torch.compile, a FakeTensor mode or vmap), the call uses the dispatcher.

`benchmarks/calls.py` measures the time saved. If the row "dispatcher" of this benchmark is less than a tenth of the
time of a call, this file can be removed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_PLAIN = (Tensor, torch.nn.Parameter)
_LISTS = (list, tuple)
_NO_TENSORS = frozenset(
    (type(None), bool, int, float, str, torch.dtype, torch.device)
)  # types of most arguments that are not tensors
# Looked up once, because every call uses these functions.
_include_set = torch._C._dispatch_tls_local_include_set
_is_included = torch._C._dispatch_tls_is_dispatch_key_included
# the dispatch key that autograd sets for `is_grads_batched`; `torch.func` sets another key
_VMAP_MODE: Any = torch._C._parse_dispatch_key("VmapMode")
_function_modes = torch._C._len_torch_function_stack
_profiler_enabled = torch._C._autograd._profiler_enabled
# The dispatch keys of a thread without modes and transforms, outside and inside inference mode. They are read in a new
# thread, because this thread may have modes, transforms or inference mode.
with ThreadPoolExecutor(1) as _thread:
    _UNWATCHED = _thread.submit(_include_set).result()
    _INFERRING = _thread.submit(torch.inference_mode()(_include_set)).result()

# ---- observers of a call ------------------------------------------------------------------------------------------


def is_plain(arguments: Sequence[Any]) -> bool:
    """Whether no mode, `torch.func` transform or profiler has to see a call. A compiler, forward-mode differentiation
    or autograd may still have to see it.
    """
    return _include_set() == _UNWATCHED and _unseen(arguments)


def only_infers(arguments: Sequence[Any]) -> bool:
    """Whether a call runs in inference mode, and no mode, `torch.func` transform or profiler has to see it."""
    return torch.is_inference_mode_enabled() and _include_set() == _INFERRING and _unseen(arguments)


def _unseen(arguments: Sequence[Any]) -> bool:
    return _function_modes() == 0 and not _profiler_enabled() and _are_plain(arguments)


def _are_plain(arguments: Sequence[Any]) -> bool:
    """Whether each tensor among the arguments, including those in lists, has the type Tensor or Parameter itself (no
    subclass), and is not on the meta device, not lazily negated (`is_neg`), and not the zeros of `_is_zerotensor`.
    """
    for argument in arguments:
        kind = type(argument)
        if kind in _NO_TENSORS:
            continue
        if kind in _PLAIN:
            if argument.is_meta or argument.is_neg() or argument._is_zerotensor():
                return False
        elif isinstance(argument, Tensor) or (isinstance(argument, _LISTS) and not _are_plain(argument)):
            return False
    return True


def requires_grad(arguments: Sequence[Any]) -> bool:
    """Whether any tensor among the arguments, or in lists among the arguments, requires a gradient."""
    for argument in arguments:
        kind = type(argument)
        if kind in _NO_TENSORS:
            continue
        if isinstance(argument, Tensor):
            if argument.requires_grad:
                return True
        elif isinstance(argument, _LISTS) and requires_grad(argument):
            return True
    return False


def in_forward_mode() -> bool:
    """Whether forward-mode differentiation is active."""
    return forward_ad._current_level >= 0


def transformed(arguments: Sequence[Any]) -> bool:
    """Whether a transform of `torch.func` or forward-mode differentiation applies to any of the tensors, or autograd
    computes a batch of gradients at once (`is_grads_batched`).
    """
    if _is_included(_VMAP_MODE):
        return True
    for argument in arguments:
        if isinstance(argument, Tensor):
            if torch._C._functorch.is_functorch_wrapped_tensor(argument):
                return True
            if in_forward_mode() and forward_ad.unpack_dual(argument).tangent is not None:
                return True
        elif isinstance(argument, _LISTS) and transformed(argument):
            return True
    return False


def unwatched(*arguments: Any) -> bool:
    """Whether nothing besides autograd observes operators on these tensors: no compiler, mode, transform or profiler is
    active, and all tensors are plain.
    """
    return not torch.compiler.is_compiling() and not in_forward_mode() and is_plain(arguments)


def computed_on_cpu(*tensors: Any) -> bool:
    """Whether PyTorch's own functions may compute on these tensors instead of an operator, which saves time on the
    host. The tensors must be dense and on the CPU, no mode or profiler may observe operators, and no gradient may be
    needed.
    """
    recorded = torch.is_grad_enabled()
    for t in tensors:
        if t is None:
            continue
        if type(t) not in _PLAIN or not t.is_cpu or t.layout != torch.strided or (recorded and t.requires_grad):
            return False
    return not torch.is_autocast_enabled("cpu") and unwatched(*tensors)


# ---- autograd without the dispatcher ------------------------------------------------------------------------------


def recording(name: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that autograd records.

    Args:
        name: name of the operator.
        forward: computes the results from (ctx, *arguments).
        backward: computes gradients of the arguments from (ctx, wanted, *slopes). `wanted` says which arguments need a
            gradient, and `slopes` are the gradients of the results.
    """

    def backward_of(ctx: Any, *slopes: Any) -> Any:
        return backward(ctx, ctx.needs_input_grad, *slopes)

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward_of)}
    made: Any = type(f"GeneratedBackwardFor_rooftop_{name}_default", (torch.autograd.Function,), methods)
    # Call the base class's `apply`, without the transform handling of Function.apply, because transformed calls use the
    # dispatcher.
    return super(torch.autograd.Function, made).apply  # type: ignore[no-any-return]


def recording_lists(
    name: str, forward: Callable[..., Any], backward: Callable[..., Any], gives_list: bool
) -> Callable[..., Any]:
    """The same as `recording`, for an operator whose arguments or results are lists of tensors. Autograd gets the
    tensors of the lists one by one.
    """

    def forward_of_each(ctx: Any, counts: Sequence[int | None], *flat: Any) -> Any:
        """Run `forward` on arguments that autograd passes one by one. `counts`: for each argument, its length if it is
        a list of tensors, else None.
        """
        ctx.counts, rest = counts, iter(flat)
        output = forward(ctx, *(next(rest) if n is None else list(islice(rest, n)) for n in counts))
        return tuple(output) if gives_list else output

    def backward_of_each(ctx: Any, wanted: Sequence[bool], *slopes: Any) -> tuple[Any, ...]:
        rest = iter(wanted[1:])
        of_arguments = [next(rest) if n is None else list(islice(rest, n)) for n in ctx.counts]
        found = backward(ctx, of_arguments, list(slopes)) if gives_list else backward(ctx, of_arguments, *slopes)
        flat: list[Tensor | None] = [None]  # `counts` has no gradient
        for count, gradient in zip(ctx.counts, found, strict=True):
            flat += [gradient] if count is None else [None] * count if gradient is None else gradient
        return tuple(flat)

    record = recording(name, forward_of_each, backward_of_each)

    def recorded(*arguments: Any) -> Any:
        counts: list[int | None] = []
        flat: list[Any] = []
        for each in arguments:
            is_list = isinstance(each, list | tuple) and all(isinstance(item, Tensor) for item in each)
            counts.append(len(each) if is_list else None)
            flat += each if is_list else [each]
        output = record(counts, *flat)
        return list(output) if gives_list else output

    return recorded
