"""`SparseModule` and modules that need no sparse kernels, with spconv's names.

A `SparseSequential` may mix sparse modules with plain modules, such as `torch.nn.ReLU`. A plain module receives
only the features.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rooftop.launch.repeated_calls import repeated
from rooftop.sparse.site_norms import site_norm
from rooftop.sparse.tensor import SparseConvTensor
from rooftop.words import counted


class SparseModule(nn.Module):
    """Base class of modules that map a `SparseConvTensor` to a `SparseConvTensor` or a dense tensor.

    Users can derive their own modules from this class.

    Args:
        name: stored as the attribute `name`, as in spconv; it has no effect.
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.name = name


def check_input(module: SparseModule, x: Any, ndim: int | None = None) -> None:
    """Raise `TypeError` unless x is a sparse tensor, and `ValueError` unless its grid has `ndim` dimensions (None: any
    number).
    """
    if not isinstance(x, SparseConvTensor):
        raise TypeError(
            f"{type(module).__name__} takes a rooftop.sparse.SparseConvTensor, got {type(x).__name__}: "
            "torch.nn.Sequential passes only features, so use SparseSequential"
        )
    if ndim is not None and x.dims != ndim:
        raise ValueError(f"{type(module).__name__} expects grids of {ndim} dimensions, got {x}")


def is_spconv_module(module: nn.Module) -> bool:
    """Whether a `SparseSequential` passes the whole sparse tensor to this module, not only the features."""
    return isinstance(module, SparseModule)


class SparseSequential(SparseModule):
    """Run modules in order. Pass modules as positional arguments, in one `OrderedDict`, or by keyword. `add` appends
    a module.


    A `SparseModule` gets the sparse tensor; any other module gets only the features (N, C). After `ToDense`, or any
    module that returns a dense tensor, modules get that dense tensor. Empty inputs also pass through all modules, so
    that results have the right channels. A `torch.nn.BatchNorm1d` is computed like `SparseBatchNorm`, except that a
    subclass with its own `forward` runs that `forward`.
    """

    def __init__(self, *modules: Any, **named: nn.Module) -> None:
        super().__init__()
        ordered = len(modules) == 1 and isinstance(modules[0], OrderedDict)
        pairs = modules[0].items() if ordered else enumerate(modules)
        for name, module in [*pairs, *named.items()]:
            self.add(module, str(name))

    def __getitem__(self, index: int | slice) -> nn.Module:
        """Return a module by index, or a `SparseSequential` of a slice that keeps the modules' names."""
        if isinstance(index, slice):
            return SparseSequential(OrderedDict(list(self._modules.items())[index]))
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for {counted(len(self), 'module')}")
        return list(self._modules.values())[index]  # type: ignore[return-value]

    def __len__(self) -> int:
        return len(self._modules)

    def add(self, module: nn.Module, name: str | None = None) -> None:
        """Append a module. If `name` is None, the module's index in the sequence is its name.

        Raises:
            TypeError: the argument is not a module.
            ValueError: the name is already in use.
        """
        name = str(len(self)) if name is None else name
        if not isinstance(module, nn.Module):
            raise TypeError(f"SparseSequential takes modules, got {type(module).__name__} as {name!r}")
        if name in self._modules:
            raise ValueError(f"SparseSequential already has a module {name!r}: give the new module another name")
        self.add_module(name, module)

    def forward(self, x: Any) -> Any:
        for name, module in self._modules.items():
            if is_spconv_module(module) or not isinstance(x, SparseConvTensor):  # type: ignore[arg-type]
                x = module(x)  # type: ignore[misc]
            elif _is_plain(module) and differs_from_torch(module, x):
                x = batch_normalized(module, x)
            elif isinstance(module, BATCH_NORMS) and not _is_plain(module) and module.training and x.padded:
                raise ValueError(
                    f"module {name!r}, {type(module).__name__}, would include rows of {x} that are not sites: use a "
                    f"BatchNorm1d, or no num_out_act_bound before this module"
                )
            else:
                features = module(x.features)  # type: ignore[misc]
                if not isinstance(features, Tensor):
                    raise TypeError(
                        f"module {name!r}, {type(module).__name__}, returned {type(features).__name__} for the "
                        "features: derive it from SparseModule so that it gets the sparse tensor"
                    )
                x = x.replace_feature(features)
        return x


class SparseBatchNorm(nn.BatchNorm1d, SparseModule):
    """Apply `torch.nn.BatchNorm1d` to the features, over the sites of all batch elements.

    Fewer than two sites have no variance, so the running statistics are then used and do not change. If the tensor
    is marked as `padded`, statistics exclude rows that are not sites. A dense tensor is normalized as by
    `torch.nn.BatchNorm1d`.
    """

    def __init__(self, num_features: int, *arguments: Any, name: str | None = None, **options: Any) -> None:
        nn.BatchNorm1d.__init__(self, num_features, *arguments, **options)
        self.name = name

    def forward(self, x: Any) -> Any:
        return batch_normalized(self, x) if isinstance(x, SparseConvTensor) else super().forward(x)


class SparseReLU(nn.ReLU, SparseModule):
    """Apply `torch.nn.ReLU` to the features, or to a dense tensor."""

    def __init__(self, inplace: bool = False, name: str | None = None) -> None:
        nn.ReLU.__init__(self, inplace)
        self.name = name

    def forward(self, x: Any) -> Any:
        forward = super().forward
        return x.replace_feature(forward(x.features)) if isinstance(x, SparseConvTensor) else forward(x)


class SparseIdentity(SparseModule):
    """Return the input."""

    def forward(self, x: SparseConvTensor) -> SparseConvTensor:
        return x


class ToDense(SparseModule):
    """Convert to a dense tensor (B, C, *spatial_shape), with zeros in cells without a site."""

    def forward(self, x: SparseConvTensor) -> Tensor:
        return x.dense()


class RemoveGrid(SparseModule):
    """Return the input. In spconv, this module frees a dense table. Rooftop has no such table, and keeps the module
    for networks that use it."""

    def forward(self, x: SparseConvTensor) -> SparseConvTensor:
        return x


# ---- batch norm ------------------------------------------------------------------------------------------------

BATCH_NORMS = (nn.BatchNorm1d, nn.SyncBatchNorm)


def _is_plain(module: nn.Module | None) -> TypeGuard[nn.BatchNorm1d]:
    """Whether the module is a `torch.nn.BatchNorm1d`, or a subclass without its own `forward`."""
    return isinstance(module, nn.BatchNorm1d) and type(module).forward is nn.BatchNorm1d.forward


def differs_from_torch(norm: nn.BatchNorm1d, x: SparseConvTensor) -> bool:
    """Whether the result may differ from `torch.nn.BatchNorm1d`: batch statistics are used, and x is padded or has
    fewer than two rows."""
    return (norm.training or norm.running_mean is None) and (x.padded or x.features.shape[0] < 2)


def batch_normalized(norm: nn.BatchNorm1d, x: SparseConvTensor) -> SparseConvTensor:
    """Apply `norm` to the sites of x, as `SparseBatchNorm` does."""
    if not differs_from_torch(norm, x):
        return x.replace_feature(nn.BatchNorm1d.forward(norm, x.features))
    if x.padded:
        return x.replace_feature(_normalized_by_sites(norm, x.features, x.rows_with_sites()))
    return x.replace_feature(_normalized_by_running(norm, x.features))


def _normalized_by_running(norm: nn.BatchNorm1d, features: Tensor) -> Tensor:
    mean, var = norm.running_mean, norm.running_var
    if mean is None or var is None:  # a single row equals its mean, and gets no gradient
        features = features - features
        dtype = features.dtype if norm.weight is None else norm.weight.dtype
        mean = torch.zeros(norm.num_features, dtype=dtype, device=features.device)
        var = torch.ones_like(mean)
    return F.batch_norm(features, mean, var, norm.weight, norm.bias, False, 0.0, norm.eps)


def _normalized_by_sites(norm: nn.BatchNorm1d, features: Tensor, sites: Tensor) -> Tensor:
    """Normalize rows (N, C) by the statistics of the rows that `sites` (N,) marks. The host does not wait for the
    number of sites."""
    running = (norm.running_mean, norm.running_var)
    y, mean, var, count, _, _ = site_norm(features, sites, norm.weight, norm.bias, *running, norm.eps)
    if norm.training and norm.running_mean is not None:
        _update(norm, mean, var, count)
    return y  # type: ignore[no-any-return]


@torch.no_grad()
def _update(norm: nn.BatchNorm1d, mean: Tensor, var: Tensor, count: Tensor) -> None:
    """Update the running statistics with the unbiased variance, as `torch.nn.BatchNorm1d` does."""
    running_mean, running_var, batches = norm.running_mean, norm.running_var, norm.num_batches_tracked
    if running_mean is None or running_var is None or batches is None:
        raise ValueError("cannot update the running statistics of a batch norm that has none")
    _follow(running_mean, running_var, batches, mean, var, count, norm.momentum)


@repeated
def _follow(
    running_mean: Tensor, running_var: Tensor, batches: Tensor, mean: Tensor, var: Tensor, counts: Tensor,
    momentum: float | None,
) -> Tensor:  # fmt: skip
    """Update the running statistics in place if there are at least two sites. Return the unbiased variance."""
    count = counts[0]
    enough = count > 1
    batches += enough
    share = enough / batches.clamp(min=1) if momentum is None else enough * momentum
    unbiased = var * count / (count - 1).clamp(min=1)
    running_mean.lerp_(mean.to(running_mean.dtype), share.to(running_mean.dtype))
    running_var.lerp_(unbiased.to(running_var.dtype), share.to(running_var.dtype))
    return unbiased
