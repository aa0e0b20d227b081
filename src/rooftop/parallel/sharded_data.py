"""Fully sharded data parallelism: data ranks share parameters, gradients and optimizer, by PyTorch's FSDP2.

                     +-- rows of rank 0 --+                       +-- rows of rank 0, summed
    a block's        |                    |  all-gather, computed |
    parameters       +-- rows of rank 1 --+  with, let go         +-- rows of rank 1, summed
                        float32, with the                            float32, what the optimizer steps
                        optimizer's state

Each rank holds some rows of each parameter. A unit, such as a block, has its parameters whole only while it computes;
the next one's are on their way meanwhile. What a rank holds of a tensor parallel layer is shared among the data ranks
just as what is whole: the two ways of splitting know nothing of each other.

`fully_shard` of PyTorch does all this. Here is how it is applied so that the numbers are those of every other layout:
gradients are sums over the data ranks, as `ModelGradients` has them, and initial values are drawn for the rows that a
rank holds and for nothing else.

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
    """Share a model's parameters among data ranks, in place. Every rank of the group must call it.

    Afterwards parameters are DTensors, of which each rank has rows; backward leaves in them the sum over the data
    ranks: a loss that is a mean must be divided by the targets of all ranks. Call the model itself, not its parts: its
    own parameters are gathered then.

    Args:
        model: best on the meta device, so that no rank ever holds the whole; then `to_empty` gives it memory.
        units: modules in the model whose parameters are gathered together, each shortly before it runs, in order. The
            model itself is the last one, with what no unit has. Modules that share a parameter belong to one unit.
        data: the ranks; at least two.
        device_type: "cuda" or "cpu", of the group.
        dtype: in which is computed and gathered; None: that of the parameters. They, their gradients and the sums of
            these have that of the parameters, so that of float32 ones nothing is lost.
        kept: units whose parameters stay gathered from forward to backward; best the ones that end forward.

    Raises:
        ValueError: fewer than two ranks, parameters of several dtypes or none, units that are not in the model or given
            twice, or `kept` ones that are no units.
    """
    if data is None or data.size() < 2:
        raise ValueError("fully_sharded: there are no data parallel ranks to share the parameters: leave it out")
    wide = _one_dtype(model)
    _check_units(model, units, kept)
    mesh = DeviceMesh.from_group(data, device_type, mesh_dim_names=("dp",))
    # Blocks give views of what their kernels made, which nothing changes in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    # Inputs are not cast: the cosines and sines of positions are float32, and in bfloat16 they would be of no use.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=wide, cast_forward_inputs=False)
    for module in (*units, model):
        stays = module is model or any(module is each for each in kept)
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=not stays)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # a plain sum; gloo has no other


def sum_in_backward(model: nn.Module, wanted: bool) -> None:
    """Say whether the next backward of a shared model sums gradients over the data ranks, which each has rows of.

    Without, they are added up as a whole on each rank, which takes their memory, until a backward sums them.
    """
    from torch.distributed.fsdp import FSDPModule

    assert isinstance(model, FSDPModule)
    model.set_is_last_backward(wanted)
    model.set_requires_gradient_sync(wanted)


def _one_dtype(model: nn.Module) -> torch.dtype:
    """That of all parameters, in which their gradients are summed."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if len(dtypes) != 1:
        found = " and ".join(sorted(str(dtype) for dtype in dtypes)) or "none"
        raise ValueError(
            f"fully_sharded: expected parameters of one dtype, in which gradients are summed, got {found}: convert the "
            "model, and give the dtype to compute in as dtype="
        )
    return dtypes.pop()


def _check_units(model: nn.Module, units: Sequence[nn.Module], kept: Sequence[nn.Module]) -> None:
    inside = {id(module) for module in model.modules() if module is not model}
    if any(id(unit) not in inside for unit in units):
        raise ValueError("fully_sharded: expected units that are modules in the model, and not the model itself")
    if len({id(unit) for unit in units}) != len(units):
        raise ValueError("fully_sharded: a unit is given twice")
    if not {id(unit) for unit in kept} <= {id(unit) for unit in units}:
        raise ValueError("fully_sharded: expected as kept only modules that are among the units")


def local_of(tensor: Tensor) -> Tensor:
    """What this rank holds of a shared tensor, or another tensor itself; the same memory, without gradients."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def part_like(parameter: Tensor, whole: Tensor) -> Tensor:
    """Of a whole tensor what this rank holds of such a parameter, shared in the same way; on its device."""
    if not isinstance(parameter, DTensor):
        return whole
    start, rows = _rows_here(parameter)
    local = whole[start : start + rows].to(parameter.device, copy=True)
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def shard_here(parameter: Tensor, shard: Shard | None) -> Shard:
    """What this rank holds of a parameter that has been shared, of which its tensor parallel rank has `shard`.

    Args:
        shard: None: the whole parameter.
    """
    held = shard or Shard((Piece(Box.whole(parameter.shape)),))
    return held.rows(*_rows_here(parameter)) if isinstance(parameter, DTensor) else held


def _rows_here(parameter: DTensor) -> tuple[int, int]:
    """(first row, rows) of this rank: as many for each, the last ones have fewer."""
    index, count = parameter.device_mesh.get_local_rank(), parameter.device_mesh.size()
    rows = -(-parameter.shape[0] // count)
    start = min(index * rows, parameter.shape[0])
    return start, min(rows, parameter.shape[0] - start)
