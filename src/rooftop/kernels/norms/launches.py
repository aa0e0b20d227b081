"""How the kernels of layer norm and RMS norm are launched: parameters by the length of a row, as tables.

`forward` and `backward` serve both norms, with and without a sum in front; `norms.py` and `sum_norms.py` have the
operators. Rows for which `CLUSTER_*` of `tables.py` have an entry go to `clusters.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from rooftop.kernels.norms import clusters, tables
from rooftop.kernels.norms.tables import BackwardConfig, ForwardConfig, LongConfig
from rooftop.kernels.operands.dtypes import HALVES
from rooftop.kernels.operands.launch_data import Constants, power_of_two
from rooftop.kernels.operands.strided_rows import unit
from rooftop.launch.triton_launch import launch, processors, require_triton, shared_memory_bytes

# ---- which entry of a table -------------------------------------------------------------------------------------


Config = TypeVar("Config", ForwardConfig, BackwardConfig)


def config_for(table: Sequence[Config], columns: int) -> Config | None:
    """The parameters for rows of so many elements; None where they are too long for a tile."""
    for config in table:
        if columns <= config.columns:
            return config
    return None


def tile(config: ForwardConfig | BackwardConfig, columns: int) -> Constants:
    """Launch parameters that all kernels of tiles share."""
    block = min(config.block, power_of_two(columns))
    blocks = -(-columns // block)
    even = blocks * block == columns
    return {"ROWS": config.rows, "BLOCKS": blocks, "COLUMNS": block, "EVEN": even, "num_warps": config.warps}


def shifted_tile(config: BackwardConfig, columns: int, tensors: Sequence[Tensor]) -> Constants:
    """Of kernels for rows at odd addresses, which reach up to seven elements into a neighbour's."""
    constants = tile(config, columns + 7)
    del constants["EVEN"]
    return {**constants, "WHOLE": columns // constants["COLUMNS"], "STAGES": stages(config, tensors, columns + 7)}


def stages(config: BackwardConfig | LongConfig, tensors: Sequence[Tensor], columns: int) -> int:
    """As many as the configuration says, or as fit into shared memory beside the scratch space of the sums."""
    rows = config.rows if isinstance(config, BackwardConfig) else 1
    elements = rows * min(-(-columns // config.block) * config.block, power_of_two(columns))
    stage_bytes = elements * sum(t.element_size() for t in tensors)
    return max(1, min(config.stages, (shared_memory_bytes(tensors[0]) - stage_bytes // 2 - 2048) // stage_bytes))


Parts = list[tuple[int, int, bool]]  # first row, row after the last, whether rows are loaded with a shift


def parts_of(columns: int, tensors: Sequence[Tensor], worthwhile: bool = True) -> Parts:
    """Rows of (M, N) tensors, and which of them are loaded with a shift: if `worthwhile`, as many as eight divides.

    The others, and all where elements have four bytes, four divides N, or rows do not follow each other, go without.
    """
    rows = tensors[0].shape[0]
    odd = worthwhile and columns >= tables.SHIFTED_FROM and columns % 4 != 0 and rows >= 8
    if not odd or any(t.element_size() != 2 or t.stride(0) != columns or t.data_ptr() % 16 for t in tensors):
        return [(0, rows, False)]
    main = rows // 8 * 8
    return [(0, main, True)] + ([(main, rows, False)] if main < rows else [])


def persistent(config: BackwardConfig | LongConfig, tensor: Tensor, tiles: int, multiple: int = 1) -> int:
    """How many programs share the tiles; a multiple of `multiple`, as the number of tiles is."""
    most = config.programs_per_sm * processors(tensor)
    return max(multiple, min(tiles, most) // multiple * multiple)


def exact_products(*tensors: Tensor | None) -> dict[str, bool]:
    """In dy * weight - mean(dy * weight) both products must be rounded alike, or what should cancel does not.

    Products of half precision are exact in float32; those of float32 must not be fused with the subtraction.
    """
    return {"enable_fp_fusion": all(t is None or t.dtype in HALVES for t in tensors)}


@cache
def _kernels() -> tuple[Any, Any]:
    """The modules of Triton's kernels, for tiles and for long rows; a look-up from the second call on."""
    require_triton()
    from rooftop.kernels.norms.triton_kernels import long_norms, norms

    return norms, long_norms


# ---- forward ---------------------------------------------------------------------------------------------------


def forward(
    x: Tensor,
    residual: Tensor | None,
    input_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    rms: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """(y, total, mean, rstd) by the Triton kernels, y in `dtype`.

    total is None where nothing is added, mean is None of an RMS norm. x, residual
    (M, N) have unit column stride; the others (N,) are contiguous.
    """
    rows, columns = x.shape
    adds = residual is not None or input_bias is not None
    y = torch.empty((rows, columns), dtype=dtype, device=x.device)
    total = torch.empty((rows, columns), dtype=x.dtype, device=x.device) if adds else None
    mean = None if rms else torch.empty(rows, dtype=torch.float32, device=x.device)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    shifts = columns % 4 != 0 and (
        (columns % 2 != 0 and config_for(tables.FORWARD_SHIFTED, columns) is not None)
        or clusters.forward_config(columns) is not None
        or (config_for(tables.FORWARD, columns) is None and tables.FORWARD_LONG_ODD.shifted)
    )
    parts = parts_of(columns, [x] if residual is None else [x, residual], shifts)
    if len(parts) == 1:
        _forward(x, residual, (input_bias, weight, bias), (y, total, mean, rstd), eps, parts[0][2])
        return y, total, mean, rstd
    for start, stop, shifted in parts:
        x_rows, residual_rows, *outputs = _rows(start, stop, x, residual, y, total, mean, rstd)
        _forward(x_rows, residual_rows, (input_bias, weight, bias), outputs, eps, shifted)
    return y, total, mean, rstd


def _rows(start: int, stop: int, *tensors: Tensor | None) -> list[Any]:
    return [t[start:stop] if t is not None else None for t in tensors]


def _forward(
    x: Tensor,
    residual: Tensor | None,
    parameters: tuple[Tensor | None, ...],
    outputs: Sequence[Tensor | None],
    eps: float,
    shifted: bool,
) -> None:
    norms, long_norms = _kernels()
    rows, columns = x.shape
    rms = outputs[2] is None
    _, weight, bias = parameters
    residual_stride = residual.stride(0) if residual is not None else 0
    group = unit(columns, x.stride(0), residual_stride)
    config, plan = None, None
    if outputs[1] is None:
        if group == 4 and x.element_size() == 2 and columns >= tables.FOURS_FROM:
            config = config_for(tables.FORWARD_FOURS_RMS if rms else tables.FORWARD_FOURS, columns)
        if config is None and outputs[0].dtype == x.dtype:  # type: ignore[union-attr]
            plan = clusters.forward_plan(x, (weight, bias), rms)
    if plan is not None:
        y, _, *statistics = outputs
        plan.launch(x, weight, bias, y, *statistics, rows, columns, x.stride(0), plan.stages, eps)
        return
    tensors = (x, residual, *parameters, *outputs)
    sizes = (rows, columns // group, x.stride(0) // group, residual_stride // group, eps)
    narrow = group * x.element_size() < 16 and columns > 256
    config = (
        config
        or (config_for(tables.FORWARD_NARROW, columns) if narrow else None)
        or config_for(tables.FORWARD, columns)
    )
    if config is None and group == 8 and x.element_size() == 2 and outputs[1] is None:
        config = config_for((tables.FORWARD_HELD,), columns)
    if shifted and (of_shifted := config_for(tables.FORWARD_SHIFTED, columns)) is not None:
        programs = persistent(of_shifted, x, rows // of_shifted.rows, 8 // of_shifted.rows)
        constants = shifted_tile(of_shifted, columns, [x] if residual is None else [x, residual])
        kernel = norms.norm_forward_shifted
        launch(kernel, (programs,), x.device, *tensors, rows, columns, eps, RMS=rms, **constants)
    elif config is not None:
        grid, constants = (-(-rows // config.rows),), tile(config, columns)
        launch(norms.norm_forward, grid, x.device, *tensors, *sizes, RMS=rms, UNIT=group, **constants)
    else:
        long = tables.FORWARD_LONG if group > 1 else tables.FORWARD_LONG_ODD
        constants = long_tile(long, [x] if residual is None else [x, residual])
        constants |= {"SHIFT": shifted and long.shifted, "UNIT": group}
        grid = (persistent(long, x, rows),)
        launch(long_norms.norm_forward_long, grid, x.device, *tensors, *sizes, RMS=rms, **constants)


def long_tile(config: LongConfig, tensors: Sequence[Tensor]) -> Constants:
    """Launch parameters of the kernels for long rows."""
    return {"COLUMNS": config.block, "STAGES": stages(config, tensors, config.block), "num_warps": config.warps}


# ---- backward --------------------------------------------------------------------------------------------------


def backward(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    dweight: Tensor | None,
    dbias: Tensor | None,
) -> Tensor:
    """dx, with `dtotal` added, by the Triton kernels; fills dweight and dbias where they are not None.

    dy, dtotal, x (M, N) have unit column stride, weight (N,) is contiguous. `mean` is None of an RMS norm.
    """
    columns = x.shape[1]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    sums: Constants = {"SUM_WEIGHT": dweight is not None, "SUM_BIAS": dbias is not None}
    parts = parts_of(columns, [dy, x] if dtotal is None else [dy, x, dtotal], _pairs(x) is None)
    of_parts = []
    for start, stop, shifted in parts:
        rows = [dy, dtotal, x, mean, rstd, dx]
        dys, dtotals, xs, *others = rows if len(parts) == 1 else _rows(start, stop, *rows)
        of_parts.append(_Part((dys, dtotals, xs, weight, *others), shifted, any(sums.values())))
    partial = torch.empty((sum(part.slots for part in of_parts), 2, columns), dtype=torch.float32, device=x.device)
    constants = {"RMS": mean is None, **sums, **exact_products(dy, weight)}
    slots = 0
    for part in of_parts:
        _backward(part, partial[slots:] if slots else partial, constants)
        slots += part.slots
    if any(sums.values()):
        grid = (-(-columns // tables.ADD_PARTIAL_SUMS["COLUMNS"]),)
        gradients = (dweight, dbias)
        launch(
            _kernels()[0].add_partial_sums,
            grid,
            x.device,
            partial,
            *gradients,
            slots,
            columns,
            **sums,
            **tables.ADD_PARTIAL_SUMS,
        )
    return dx


def _pairs(x: Tensor) -> BackwardConfig | None:
    of_pairs = x.element_size() == 2 and x.shape[1] % 4 == 2 and x.shape[1] > tables.SHIFTED_FROM
    return config_for(tables.BACKWARD_PAIRS, x.shape[1]) if of_pairs else None


class _Part:
    """How some of the rows are worked on, and how many partial sums that gives.

    tensors: dy, dtotal, x, weight, mean, rstd, dx. sums: whether those of weight or bias are wanted.
    """

    def __init__(self, tensors: tuple[Any, ...], shifted: bool, sums: bool) -> None:
        self.tensors, self.shifted = tensors, shifted
        dy, dtotal, x, weight, mean, *_ = tensors
        rows, columns = x.shape
        self.config = config = _pairs(x) or config_for(tables.BACKWARD_SHIFTED if shifted else tables.BACKWARD, columns)
        self.plan = clusters.backward_plan(dy, x, weight, mean is None) if sums and dtotal is None else None
        if self.plan is not None:
            self.slots = self.plan.clusters
        elif config is None:
            blocks = -(-(columns + 7 * shifted) // tables.BACKWARD_LONG.block)
            most = max(1, tables.BACKWARD_LONG.programs_per_sm * processors(x) // blocks)
            chunks = max(8, min(rows, most) // 8 * 8) if shifted else max(1, min(rows, most))
            self.grid: tuple[int, ...] = (blocks, chunks)
            self.slots = chunks
        else:
            programs = persistent(config, x, -(-rows // config.rows), 8 // config.rows if shifted else 1)
            self.grid, self.slots = (programs,), programs * (config.rows if shifted else 1)


def _backward(part: _Part, partial: Tensor, constants: Constants) -> None:
    norms, long_norms = _kernels()
    tensors = part.tensors
    dy, dtotal, x, weight, mean, rstd, dx = tensors
    rows, columns = dx.shape
    if part.plan is not None:
        strides = (dy.stride(0), x.stride(0))
        part.plan.launch(dy, x, weight, mean, rstd, dx, partial, rows, columns, *strides, part.plan.stages)
        return
    config = part.config
    fetched = [t for t in (dy, dtotal, x) if t is not None]
    dtotal_stride = dtotal.stride(0) if dtotal is not None else 0
    group = unit(columns, x.stride(0), dy.stride(0), dtotal_stride)
    sizes = (rows, columns // group, dy.stride(0) // group, dtotal_stride // group, x.stride(0) // group)
    if config is None:
        row_sums = torch.empty((3, rows), dtype=torch.float32, device=x.device)
        common = {"SHIFT": part.shifted, "UNIT": group}
        of_sums = {key: constants[key] for key in ("RMS", "enable_fp_fusion")} | common | tables.ROW_SUMS
        arguments = (dy, x, weight, mean, rstd, row_sums, *sizes[:3], sizes[4])
        launch(long_norms.norm_row_sums, (rows,), x.device, *arguments, **of_sums)
        constants = constants | common | long_tile(tables.BACKWARD_LONG, fetched)
        all_tensors = (*tensors[:-1], row_sums, dx, partial)
        launch(long_norms.norm_backward_long, part.grid, x.device, *all_tensors, *sizes, **constants)
    elif part.shifted:
        constants = constants | shifted_tile(config, columns, fetched)
        launch(norms.norm_backward_shifted, part.grid, x.device, *tensors, partial, rows, columns, **constants)
    else:
        constants = constants | tile(config, columns) | {"HOLD": config.hold, "AGAIN": config.again, "UNIT": group}
        constants["STAGES"] = stages(config, fetched, columns)
        launch(norms.norm_backward, part.grid, x.device, *tensors, partial, *sizes, **constants)
