"""Variants of a rooftop.sparse network (with spconv's modules, with bounds on outputs), and the cost of its work."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rooftop import sparse
from rooftop.cost import Cost, matrix_precision, tensor_bytes
from rooftop.models.point_clouds.sparse_unet import UShape

ROOM = 1.05  # upper bound on rows, as a multiple of the cloud's number of outputs
GRANULE = 1024  # bounds are rounded up to a multiple of this


def in_spconv(model: nn.Module, spconv: Any) -> Any:
    """Copy a network, and replace its sparse modules by modules of `spconv` with the same arguments and weights. The
    copy takes and returns spconv's tensors."""
    if isinstance(model, sparse.SparseConvolution):
        twin = _convolution(model, spconv)
        twin.load_state_dict(model.state_dict())
        return twin.to(model.weight.device, model.weight.dtype).train(model.training)
    children = OrderedDict((name, in_spconv(child, spconv)) for name, child in model.named_children())
    if isinstance(model, sparse.SparseSequential):
        return spconv.SparseSequential(children).train(model.training)
    if isinstance(model, UShape):
        return UShapeOfSpconv(children, model.multiple, spconv).train(model.training)
    twin = copy.deepcopy(model)
    twin._modules.update(children)
    return twin


class UShapeOfSpconv(nn.Module):
    """`UShape` for spconv's tensors, since the model's own forward takes only Rooftop's.

    Its result stays on the enlarged grid. Sites and features equal the model's.
    """

    stem: nn.Module
    encoder: nn.ModuleList
    decoder: nn.ModuleList
    head: nn.Module

    def __init__(self, parts: OrderedDict[str, nn.Module], multiple: int, spconv: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self.multiple, self.tensor = multiple, spconv.SparseConvTensor

    def forward(self, x: Any) -> Any:
        shape = [-(-size // self.multiple) * self.multiple for size in x.spatial_shape]
        levels = [self.stem(self.tensor(x.features, x.indices, shape, x.batch_size))]
        for stage in self.encoder:
            levels.append(stage(levels[-1]))
        y = levels.pop()
        for stage in self.decoder:
            y = stage(y, levels.pop())
        return y.replace_feature(self.head(y.features))


def _convolution(conv: sparse.SparseConvolution, spconv: Any) -> Any:
    kind = getattr(spconv, type(conv).__name__)
    arguments = (conv.in_channels, conv.out_channels, conv.kernel_size)
    options: dict[str, Any] = {"bias": conv.bias is not None, "indice_key": conv.indice_key}
    if not conv.inverse:
        options |= {"stride": conv.stride, "padding": conv.padding, "dilation": conv.dilation}
    return kind(*arguments, **options)


def bounded(model: nn.Module, x: sparse.SparseConvTensor) -> nn.Module:
    """Copy a network, and fix the number of outputs of its strided convolutions to slightly more than x needs, so that
    a CUDA graph can capture it."""
    found: dict[str, int] = {}

    def count(name: str) -> Callable[[nn.Module, Any, sparse.SparseConvTensor], None]:
        return lambda module, inputs, output: found.update({name: len(output.features)})

    counting = copy.deepcopy(model).eval()  # keeps the statistics of the model's norms
    for name, module in counting.named_modules():
        if isinstance(module, sparse.SparseConvolution) and not module.subm and not module.inverse:
            module.register_forward_hook(count(name))
    with torch.no_grad():
        counting(x)
    twin = copy.deepcopy(model)
    for name, rows in found.items():
        conv: Any = twin.get_submodule(name)
        conv.num_out_act_bound = -int(-rows * ROOM // GRANULE) * GRANULE
    return twin


def settle(model: nn.Module, x: sparse.SparseConvTensor) -> None:
    """Set the norms' running statistics from x, as training does. With an untrained network's statistics, features
    would shrink from layer to layer, below float16's range."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm1d)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        model.train()(x)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


def products_of(model: nn.Module, x: sparse.SparseConvTensor) -> list[int]:
    """The flops of each convolution and linear layer, in order: two per pair, input channel and output channel."""
    found: list[int] = []

    def of_convolution(conv: Any, inputs: Any, output: sparse.SparseConvTensor) -> None:
        pairs = int((output.indice_dict[conv.indice_key].neighbours >= 0).sum())
        found.append(2 * pairs * conv.in_channels * conv.out_channels)

    def of_linear(layer: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        found.append(2 * output.numel() * layer.in_features)

    twin = copy.deepcopy(model).to(x.features.dtype).eval()  # counting does not depend on the dtype
    for module in twin.modules():
        if isinstance(module, sparse.SparseConvolution):
            module.register_forward_hook(of_convolution)
        elif isinstance(module, nn.Linear):
            module.register_forward_hook(of_linear)
    with torch.no_grad():
        twin(x)
    return found


def network_cost(model: nn.Module, x: sparse.SparseConvTensor, result: Tensor, training: bool) -> Cost:
    """The flops of all existing pairs, and the bytes that must move: inputs, parameters and result once in each
    direction. A training step also moves the parameters' gradients, and what SGD with momentum reads and writes.

    Only products are counted, in the precision of x's features. The first layer's input needs no gradient.
    """
    flops = products_of(model, x)
    given = tensor_bytes(x.features) + tensor_bytes(x.indices)
    parameters = sum(p.numel() for p in model.parameters())
    precision = matrix_precision(x.features, convolution=True)
    if not training:
        read = given + parameters * x.features.element_size()
        return Cost(read, tensor_bytes(result), {precision: sum(flops)})
    master = 4 * parameters  # float32
    read = 2 * (given + master) + tensor_bytes(result) + 3 * master
    return Cost(read, tensor_bytes(result) + master + 2 * master, {precision: 3 * sum(flops) - flops[0]})
