"""Rules for convolutions: fold norms into them, fuse the operations after them, and compute max pools without
indices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rooftop.kernels import max_pool2d
from rooftop.kernels.convolutions.conv_acts import geometry_of
from rooftop.kernels.convolutions.launches import copied
from rooftop.kernels.convolutions.tables import Problem, choose
from rooftop.rewrites.candidates import Call, Candidate, Rule, Times, only_on_gpu, some
from rooftop.rewrites.folding import fold_norms
from rooftop.rewrites.format_rules import ChannelsLast
from rooftop.rewrites.fusing import fuse_convolutions, lay_out_depthwise, settled
from rooftop.rewrites.module_rules import share_of
from rooftop.rewrites.pooling import replace_pools
from rooftop.rewrites.timed_alone import alone_ms, filled, shape_of_result

JOINED = ("relu", "gelu", "silu", "sigmoid", "hardtanh", "hardswish", "aten::add")
"""Parts of the names of operators that the kernel of a convolution can also compute."""
NORMS, MAX_POOL = ("batch_norm",), "max_pool2d_with_indices"
CONVOLUTIONS = ("aten::convolution", "aten::_convolution")
HOPPER_SMS = 132


class FoldNorms(Rule):
    """Fold batch norms into the convolution or linear layer before them.

    On a GPU the folded bias still takes a pass over the images, because cuDNN computes convolutions without a bias.
    """

    name = "fold-norms"

    def predicted_ms(self, times: Times) -> float:
        share = share_of(times, "batch_norm", _bias_added) if times.device_ms is not None else 1.0
        return times.gain_ms(share * times.of("batch_norm"), times.count("batch_norm"))

    def apply(self, candidate: Candidate) -> str:
        folded = len(fold_norms(candidate.model).folded)
        candidate.frozen |= folded > 0
        return _norms_folded(folded)


class FuseConvolutions(Rule):
    """Fuse 2-D convolutions with norm, bias, sum and activation in one of Rooftop's kernels.

    Batch norms are folded first. Folding alone can be slower, because the bias then takes a pass of its own. With this
    rule, the kernel of the convolution adds the bias.
    """

    name = "fuse-convolutions"
    opaque = True

    def refusal(self, candidate: Candidate) -> str | None:
        return only_on_gpu(candidate)

    def absent(self, times: Times) -> str | None:
        return times.lack("convolution")

    def predicted_ms(self, times: Times) -> float:
        convolutions = convolutions_of(times.calls)
        shapes = {shape_of_result(call) for call in convolutions}
        joined = [call for call in times.calls if _takes_one(call, shapes, JOINED)]
        norms = [call for call in times.calls if _takes_one(call, shapes, NORMS)]
        joined_ms, biases_ms = sum(call.ms for call in joined), sum(map(bias_ms, convolutions))
        norms_ms = sum(call.ms for call in norms)
        inside = share_inside(convolutions)
        # If the convolution's kernel does not compute the operators after it, one more pass computes them all. This
        # pass gains only if it replaces two operators, or a norm that takes longer than a pass.
        outside_ms = joined_ms if norms_ms + biases_ms > 0 else 0.0
        if norms and inside < 1 and times.device_ms is not None:
            outside_ms += norms_ms * max(0.0, share_of(times, NORMS[0], _passed))
        saved_ms = inside * (joined_ms + norms_ms + biases_ms) + (1 - inside) * outside_ms
        return times.gain_ms(saved_ms, sum(call.count for call in joined + norms))

    def apply(self, candidate: Candidate) -> str:
        folded = len(fold_norms(candidate.model, into=(nn.Conv2d,)).folded)
        candidate.frozen |= folded > 0
        fused = fuse_convolutions(candidate.model).fused
        if not fused:
            return _norms_folded(folded)
        if ChannelsLast.name in candidate.changes:
            lay_out_depthwise(candidate.model)
        run = candidate.call

        def call(*args: Any, **kwargs: Any) -> Any:
            return settled(run(*args, **kwargs))

        candidate.prepare(call)
        candidate.frozen |= ChannelsLast.name in candidate.changes
        what = f"{some(len(fused), 'convolution')} fused with the operators after them"
        return f"{what}, {_norms_folded(folded)}" if folded else what


class Pools(Rule):
    """Compute max pools without writing the positions of the maxima."""

    name = "pools"
    opaque = True

    def refusal(self, candidate: Candidate) -> str | None:
        return only_on_gpu(candidate)

    def absent(self, times: Times) -> str | None:
        return times.lack(MAX_POOL)

    def predicted_ms(self, times: Times) -> float:
        share = share_of(times, MAX_POOL, _pooled) if times.device_ms is not None else 0.5
        return times.gain_ms(share * times.of(MAX_POOL))

    def apply(self, candidate: Candidate) -> str:
        return some(len(replace_pools(candidate.model)), "max pool")


def _norms_folded(count: int) -> str:
    return f"{some(count, 'norm')} folded" if count else ""


def convolutions_of(calls: Sequence[Call]) -> list[Call]:
    """The forward calls of convolutions."""
    return [call for call in calls if call.operator.name() in CONVOLUTIONS]


def share_inside(convolutions: Sequence[Call]) -> float:
    """The share of the values in the convolutions' outputs that come from kernels that also compute the operations
    after the convolution. The share is computed for relu on a Hopper GPU with 132 SMs. With other activations and GPUs,
    there may be fewer such kernels.
    """
    results = {id(call): call.count * shape_of_result(call).numel() for call in convolutions}
    inside = sum(results[id(call)] for call in convolutions if _is_inside(call))
    return inside / every if (every := sum(results.values())) else 0.0


def _is_inside(call: Call) -> bool:
    images, weight, _, stride, padding, dilation, transposed, _, groups = call.arguments[:9]
    if call.operator is not torch.ops.aten.convolution.default or images.dim() != 4 or transposed:
        return False
    stride, padding, dilation = (each * 2 if len(each) == 1 else each for each in (stride, padding, dilation))
    geometry = geometry_of(images, weight, stride, padding, dilation, groups)
    last, boxes = images.is_contiguous(memory_format=torch.channels_last), copied(images, weight, None, geometry)
    problem = Problem(geometry, False, False, images.dtype, "cuda", True, last, boxes, True, HOPPER_SMS, 9)
    return choose(problem).backend not in ("library", "reference")


def _takes_one(call: Call, shapes: Iterable[torch.Size], names: Sequence[str]) -> bool:
    """Whether the operator that `call` describes has one of the names, and its first argument is a tensor with one of
    the shapes (those of convolutions' results).
    """
    if not any(name in call.operator.name() for name in names):
        return False
    return bool(call.arguments) and isinstance(call.arguments[0], Tensor) and call.arguments[0].shape in shapes


def bias_ms(call: Call) -> float:
    """The device time in ms that the `call.count` calls of a convolution take to add their bias."""
    input, weight, bias, *rest = filled(call)
    if bias is None:
        return 0.0
    with torch.no_grad():
        with_bias = alone_ms(lambda: call.operator(input, weight, bias, *rest), call.device)
        without = alone_ms(lambda: call.operator(input, weight, None, *rest), call.device)
    return call.ms * max(0.0, 1 - without / with_bias) if with_bias > 0 else 0.0


def _pooled(
    input: Tensor, kernel: list[int], stride: Sequence[int] = (), padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,), ceil_mode: bool = False,
) -> object:  # fmt: skip
    """Compute a max pool of images without writing the indices of the maxima."""
    if input.dim() != 4:
        return functional.max_pool2d(input, kernel, list(stride) or None, list(padding), list(dilation), ceil_mode)
    sizes = (each if len(each) != 1 else each[0] for each in (kernel, stride or kernel, padding, dilation))
    window, steps, padded, apart = sizes
    return max_pool2d(input, window, steps, padded, apart, ceil_mode)


def _passed(input: Tensor, *_: Any) -> object:
    """Read and write all images once by an operator that does little else, to time such a pass over memory."""
    return input.relu_()


def _bias_added(input: Tensor, weight: Tensor | None, *_: Any) -> object:
    """The pass that adds the bias of a folded norm to images. A linear layer needs no such pass, because its product
    adds the bias.
    """
    if input.dim() < 4:
        return None
    return input.add_(input.new_ones(input.shape[1]).view(1, -1, *(1,) * (input.dim() - 2)))
