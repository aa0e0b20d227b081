"""Fully sharded data parallelism: shard parameters, gradients and optimizer state over the data ranks by PyTorch's
FSDP2.

                     +-- rows of rank 0 --+                       +-- rows of rank 0, summed
    a block's        |                    |  all-gather, compute, |
    parameters       +-- rows of rank 1 --+  free                 +-- rows of rank 1, summed
                        float32, with the                            float32, for the optimizer
                        optimizer's state

Each rank holds some rows of each parameter. A unit, such as a block, has whole parameters only while it computes,
unless it is in `kept`. While a unit computes, the next unit's parameters are gathered. Tensor parallelism is
independent of this sharding: data ranks shard a tensor parallel rank's part in the same way as a whole parameter.

PyTorch's `fully_shard` implements this sharding. This file applies `fully_shard` so that results equal those of every
other layout. Gradients are sums over the data ranks, as in `ModelGradients`, and each rank draws initial values only
for its own rows.

Source: Rajbhandari et al. 2020, "ZeRO" (arXiv:1910.02054); Zhao et al. 2023, "PyTorch FSDP" (arXiv:2304.11277).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rooftop.kernels import Box
from rooftop.parallel.exchanges import Group
from rooftop.parallel.shards import Piece, Shard


def fully_sharded(
    model: nn.Module,
    units: Sequence[nn.Module],
    data: Group,
    *,
    device_type: str,
    dtype: torch.dtype | None = None,
    kept: Sequence[nn.Module] = (),
) -> None:
    """Shard a model's parameters over data ranks, in place. Every rank of the group must call this.

    Afterwards, parameters are DTensors, and each rank holds some of their rows. Backward stores sums over the data
    ranks in the parameters' `.grad`. So divide the sum of the losses by the number of targets on all ranks. Call the
    model itself instead of its parts, since only a call of the model gathers the model's own parameters. All ranks must
    run the same units in the same order. Within a unit, ranks may use different parameters (since torch 2.13); an
    unused parameter gets a gradient of 0.

    Args:
        model: the model, preferably on the meta device, so that no rank ever holds the whole model. `to_empty` later
            allocates the model's memory.
        units: modules in the model, in the order in which they run. Each module's parameters are gathered together,
            shortly before it runs. The model itself is the last unit, with the remaining parameters. Modules that share
            a parameter must be in one unit.
        data: the ranks; at least two.
        device_type: the group's device type, "cuda" or "cpu".
        dtype: the dtype in which parameters are gathered and used; None: their own dtype. The stored parameters, their
            gradients and the sums keep their own dtype, so float32 parameters lose no precision.
        kept: units whose parameters stay gathered from forward to backward, preferably the last units of forward.
            The model's own parameters always stay gathered.

    Raises:
        ValueError: there are fewer than two ranks; there are no parameters, or they have several dtypes; a unit is not
            in the model or is repeated; or a `kept` module is not a unit.
    """
    if data is None or data.size() < 2:
        raise ValueError(
            "fully_sharded: there are no other data parallel ranks to share the parameters with: leave fully_sharded "
            "out"
        )
    wide = _one_dtype(model)
    _check_units(model, units, kept)
    mesh = DeviceMesh.from_group(data, device_type, mesh_dim_names=("dp",))
    # Blocks return views of kernels' results. Nothing changes these views in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    # Inputs are not cast: the cosines and sines of rotary positions must stay float32.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=wide, cast_forward_inputs=False)
    for module in (*units, model):
        stays = module is model or any(module is each for each in kept)
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=not stays)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # a plain sum, since gloo has no averages
        if hasattr(module, "set_reduce_scatter_unused_params"):  # since torch 2.13
            module.set_reduce_scatter_unused_params(True, recurse=False)


def sum_in_backward(model: nn.Module, wanted: bool) -> None:
    """Set whether backward of a sharded model sums gradients over the data ranks, until the next call of this function.

    If `wanted` is True, each rank keeps only its own rows of the sums. If it is False, each rank accumulates whole
    gradients, which take more memory, until a later backward sums them.
    """
    from torch.distributed.fsdp import FSDPModule

    assert isinstance(model, FSDPModule)
    model.set_is_last_backward(wanted)
    model.set_requires_gradient_sync(wanted)


def free_gathered(model: nn.Module) -> None:
    """Free the gathered parameters of a sharded model after a forward pass without backward.

    If the units that stay gathered for backward were not freed, the next forward would ignore values that are loaded in
    between.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _one_dtype(model: nn.Module) -> torch.dtype:
    """Return the common dtype of all parameters, in which their gradients are summed. Raise ValueError if their dtypes
    differ."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if len(dtypes) != 1:
        found = " and ".join(sorted(str(dtype) for dtype in dtypes)) or "none"
        raise ValueError(
            f"fully_sharded: expected all parameters in one dtype, in which gradients are summed, got {found}: convert "
            f"the model, and set the compute dtype by dtype="
        )
    return dtypes.pop()


def _check_units(model: nn.Module, units: Sequence[nn.Module], kept: Sequence[nn.Module]) -> None:
    inside = {id(module) for module in model.modules() if module is not model}
    if any(id(unit) not in inside for unit in units):
        raise ValueError("fully_sharded: expected units that are modules in the model, and not the model itself")
    if len({id(unit) for unit in units}) != len(units):
        raise ValueError("fully_sharded: a unit is given twice")
    if not {id(unit) for unit in kept} <= {id(unit) for unit in units}:
        raise ValueError("fully_sharded: expected kept to contain only units")


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, detached but in the tensor's memory. An unsharded tensor is returned
    unchanged."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def part_like(parameter: Tensor, whole: Tensor) -> Tensor:
    """This rank's part of a whole tensor, split like a sharded parameter and on the parameter's device. For a parameter
    that is not sharded, return `whole` unchanged."""
    if not isinstance(parameter, DTensor):
        return whole
    start, rows = _rows_here(parameter)
    return sharded_like(parameter, whole[start : start + rows].to(parameter.device, copy=True))


def sharded_like(parameter: Tensor, local: Tensor) -> Tensor:
    """A tensor sharded like a parameter, with `local` as this rank's part. For a parameter that is not sharded, return
    `local` unchanged."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def shard_here(parameter: Tensor, shard: Shard | None) -> Shard:
    """This data rank's part of a sharded parameter.

    Args:
        parameter: the parameter.
        shard: the tensor parallel rank's part, which data ranks shard further; None: the whole parameter.
    """
    held = shard or Shard((Piece(Box.whole(parameter.shape)),))
    return held.rows(*_rows_here(parameter)) if isinstance(parameter, DTensor) else held


def _rows_here(parameter: DTensor) -> tuple[int, int]:
    """(first row, number of rows) of this rank. All ranks have the same number of rows, except that the last ranks may
    have fewer."""
    index, count = parameter.device_mesh.get_local_rank(), parameter.device_mesh.size()
    rows = -(-parameter.shape[0] // count)
    start = min(index * rows, parameter.shape[0])
    return start, min(rows, parameter.shape[0] - start)
