"""Rules for formats: memory layouts of images, and precisions. Only the user may allow a lower precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rooftop.kernels.convolutions.launches import channels_fastest
from rooftop.kernels.operands.dtypes import HALVES
from rooftop.nn.hooks import has_hooks
from rooftop.rewrites.candidates import Call, Candidate, Rule, Times, only_on_gpu, some
from rooftop.rewrites.fusing import lay_out_depthwise
from rooftop.rewrites.structures import mapped
from rooftop.rewrites.timed_alone import alone_ms, repeated, shape_of_result

CONVOLUTIONS_2D = (nn.Conv2d, nn.ConvTranspose2d)
FUSED = "rooftop::conv_act"
TIMED = 0.9
"""Image operators are timed alone, the slowest first, until they account for this share of the time of all image
operators.
"""
VIEWS = ("view", "permute", "transpose", "expand", "slice", "select", "as_strided", "detach", "alias")
"""Parts of the names of operators that only make views."""


class ChannelsLast(Rule):
    """Store weights of 2-D convolutions, and inputs with four dimensions, channels last. In training, the weights
    belong to the original and keep their layout, so each call copies them to channels last.
    """

    name = "channels-last"
    trains = True

    def absent(self, times: Times) -> str | None:
        return times.lack("convolution")

    def predicted_ms(self, times: Times) -> float:
        # for each convolution, the forward copies the weight and the backward copies the weight's gradient
        copies = 2 * times.count("convolution_backward")
        return times.gain_ms(gain_channels_last(_of_images(times.calls)), -copies)

    def apply(self, candidate: Candidate) -> str:
        if candidate.training:
            every = [module for module in candidate.model.modules() if isinstance(module, nn.Conv2d)]
            copied = [module for module in every if _is_copied(module)]
            for each in copied:
                each.__dict__["forward"] = _Copied(each)
            if copied:
                _run_channels_last(candidate)
            return some(len(copied), "convolution")
        convolutions = [
            module
            for module in candidate.model.modules()
            # if a norm was folded into a convolution, the convolution's submodule `folded` has the weight
            if isinstance(module, CONVOLUTIONS_2D) and module.weight is not None
        ]
        for module in convolutions:
            weight = module.weight.detach().contiguous(memory_format=torch.channels_last)
            module._parameters["weight"] = nn.Parameter(weight, requires_grad=module.weight.requires_grad)
        if not convolutions:
            return ""
        lay_out_depthwise(candidate.model)
        candidate.frozen = True
        _run_channels_last(candidate)
        return some(len(convolutions), "convolution")


def _run_channels_last(candidate: Candidate) -> None:
    run = candidate.call

    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = mapped((args, kwargs), _channels_last)
        return mapped(run(*args, **kwargs), Tensor.contiguous)

    candidate.prepare(call)


def _is_copied(module: nn.Module) -> bool:
    """Whether `_Copied` can replace a module's forward: it is an `nn.Conv2d`, no subclass, whose forward was not
    replaced, and it has no hooks."""
    return type(module) is nn.Conv2d and "forward" not in vars(module) and not has_hooks(module)


class _Copied:
    """The replaced `forward` of a convolution: each call copies the weight to channels last, and convolves with the
    copy.
    """

    def __init__(self, module: nn.Conv2d) -> None:
        self.module = module

    def __call__(self, input: Tensor) -> Tensor:
        module = self.module
        weight = module.weight.contiguous(memory_format=torch.channels_last)
        return module._conv_forward(input, weight, module.bias)


def _channels_last(tensor: Tensor) -> Tensor:
    images = tensor.dim() == 4 and tensor.is_floating_point()
    return tensor.contiguous(memory_format=torch.channels_last) if images else tensor


def _of_images(calls: Sequence[Call]) -> list[Call]:
    """The calls whose first argument is an image. An image is a tensor with the shape of a convolution's argument or
    result. Calls that only make views are left out.
    """
    shapes: set[torch.Size] = set()
    for call in calls:
        if call.operator is torch.ops.aten.convolution.default or call.operator.name() == FUSED:
            shapes |= {call.arguments[0].shape, shape_of_result(call)}
        elif "convolution_backward" in call.operator.name():
            shapes |= {each.shape for each in call.arguments[:2]}  # the gradient of the result, and the input
    return [
        call
        for call in calls
        if isinstance(call.arguments[0] if call.arguments else None, Tensor)
        and call.arguments[0].dim() == 4
        and call.arguments[0].shape in shapes
        and not any(name in call.operator.name() for name in VIEWS)
    ]


def gain_channels_last(calls: Sequence[Call]) -> float:
    """The time in ms that convolutions and other image operators save if their tensors are channels last.

    Each operator is timed alone, in its own layout and channels last. The slowest operators are timed first, and timing
    ends when most of the time is known, because libraries take long for the first call of each shape. Only the ratio of
    both times is used: operators take longer in the model than alone, since caches contain other data there.
    """
    every_ms = sum(call.ms for call in calls)
    known_ms = now_ms = last_ms = 0.0
    with torch.no_grad():
        for call in sorted(calls, key=lambda call: -call.ms):
            if known_ms >= TIMED * every_ms > 0:
                break
            known_ms += call.ms
            now_ms += call.count * _timed_once(call, "as it is", _now_ms)
            last_ms += call.count * _timed_once(call, "channels last", _last_ms)
    return (1 - last_ms / now_ms) * every_ms if now_ms > 0 else 0.0


def _timed_once(call: Call, form: str, time: Callable[[Call], float]) -> float:
    if form not in call.alone:
        call.alone[form] = time(call)
    return call.alone[form]


def _now_ms(call: Call) -> float:
    return alone_ms(repeated(call), call.device)


def _last_ms(call: Call) -> float:
    given = mapped(call.arguments, lambda t: torch.ones_like(t, device=call.device, memory_format=_of(t)))
    if call.operator.name() == FUSED:
        images, weight, *others = given
        if 1 < images.shape[1] == weight.shape[0] and weight.shape[1] == 1 and weight.dtype in HALVES:
            given = images, channels_fastest(weight), *others  # as `lay_out_depthwise` stores the weight
    return alone_ms(lambda: call.operator(*given), call.device)


def _of(tensor: Tensor) -> torch.memory_format:
    return torch.channels_last if tensor.dim() == 4 else torch.contiguous_format


class Autocast(Rule):
    """Compute matrix products and convolutions in bfloat16, by autocast."""

    name = "bf16-autocast"
    trains = True
    opt_in = True

    def predicted_ms(self, times: Times) -> float:
        return times.of("convolution", "mm") / 2

    def apply(self, candidate: Candidate) -> str:
        run, device = candidate.call, candidate.device.type

        def call(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(device, torch.bfloat16):
                return run(*args, **kwargs)

        candidate.prepare(call)
        return "the whole model"


@contextmanager
def in_tf32() -> Iterator[None]:
    """Within the block, float32 products and convolutions may use TF32. Restore the program's switches afterwards.

    PyTorch has older switches (`allow_tf32`) and newer ones (`fp32_precision`). Once a program has set only the newer
    ones, reading the older ones raises an error; the block then sets the newer ones.
    """
    products, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    convolutions: Any = cudnn.conv  # type: ignore[attr-defined]
    newer = products.fp32_precision, convolutions.fp32_precision
    try:
        older = products.allow_tf32, cudnn.allow_tf32
    except RuntimeError:
        older = None
    try:
        if older is None:
            products.fp32_precision = convolutions.fp32_precision = "tf32"
        else:
            products.allow_tf32 = cudnn.allow_tf32 = True
        yield
    finally:
        if older is not None:
            products.allow_tf32, cudnn.allow_tf32 = older
        products.fp32_precision, convolutions.fp32_precision = newer


class TensorFloat32(Rule):
    """Compute float32 matrix products and convolutions in TF32 on tensor cores."""

    name = "tf32"
    trains = True
    opt_in = True

    def refusal(self, candidate: Candidate) -> str | None:
        return only_on_gpu(candidate)

    def predicted_ms(self, times: Times) -> float:
        return times.of("convolution", "mm") / 2

    def apply(self, candidate: Candidate) -> str:
        run = candidate.call

        def call(*args: Any, **kwargs: Any) -> Any:
            with in_tf32():
                return run(*args, **kwargs)

        candidate.prepare(call)
        return "the whole model's forward" if candidate.training else "the whole model"
