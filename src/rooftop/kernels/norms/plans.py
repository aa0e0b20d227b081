"""Choose the kernels that compute a norm. A plan and its reason depend only on the tables and on the properties of a
call.

`launches.py` launches exactly the kernels that a plan lists, so a plan shows which kernels run. Plans are cached, since
choosing a plan takes the host longer than launching it. Call `forget` after a change of the tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from rooftop.kernels.norms import clusters, tables
from rooftop.kernels.norms.clusters import Staged
from rooftop.kernels.norms.tables import BackwardConfig, ClusterConfig, ForwardConfig, LongConfig
from rooftop.kernels.operands.dtypes import HALVES
from rooftop.kernels.operands.launch_data import Constants, Device, device_facts, power_of_two
from rooftop.kernels.operands.references import why_reference
from rooftop.kernels.operands.strided_rows import unit
from rooftop.launch import known_calls

# ---- plans --------------------------------------------------------------------------------------------------

Backend = Literal["tiles", "shifted", "long", "clusters", "reference"]


@dataclass(frozen=True)
class Launch:
    """One launch: a kernel, on the rows from `start` to `stop`.

    Attributes:
        kernel: the kernel's name.
        grid: number of programs in each dimension; empty for a cluster kernel, whose grid depends on the device.
        sizes: the kernel's arguments after its tensors: rows, columns and strides. If the kernel has the constant UNIT,
            columns and strides are in units of UNIT elements. A cluster kernel also has its number of stages.
        constants: the kernel's constants, and its number of warps.
        staged: the launch of a cluster kernel.
        slots: number of rows of partial sums that the kernel writes in backward. `slots` is not used for cluster
            kernels, which write one row per cluster.
    """

    kernel: str
    start: int
    stop: int
    grid: tuple[int, ...]
    sizes: tuple[int, ...]
    constants: Constants = field(default_factory=dict)
    staged: Staged | None = None
    slots: int = 0


@dataclass(frozen=True)
class NormPlan:
    """How a norm or its gradients are computed.

    Attributes:
        backend: "tiles" (a program keeps whole rows in registers), "shifted" (as "tiles", for unaligned rows, with
            loads of 16 bytes), "long" (a program reads a row twice, block by block), "clusters" (CUDA C++: rows are
            staged in the shared memory of a cluster of blocks), "reference" (plain PyTorch).
        launches: the launches, in order. The last rows (up to seven) may need a different kernel from all other rows.
        reason: why this plan was chosen.
        refused: from the backend "clusters" to the reason why it cannot compute these rows. Empty if "clusters" was
            chosen, or was not considered because the table has no cluster kernel for these rows.
    """

    backend: Backend
    launches: tuple[Launch, ...]
    reason: str
    refused: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        kernels = " and ".join(dict.fromkeys(each.kernel for each in self.launches))
        return f"{self.backend}{f' ({kernels})' if kernels else ''}: {self.reason}"


# ---- facts of a call --------------------------------------------------------------------------------------


class Forward(NamedTuple):
    """The properties of a call that computes a norm of rows x (M, N), or of a sum of rows. Rows have unit column
    stride.

    Attributes:
        dtype, result: dtypes of x and y.
        weight, bias, residual: dtypes; None for absent tensors.
        strides: row strides of x and of the residual, in elements; 0 without a residual.
        aligned: whether x and the residual begin at multiples of 16 bytes.
        adds: whether a residual or an input bias is added.
    """

    rows: int
    columns: int
    dtype: torch.dtype
    result: torch.dtype
    weight: torch.dtype | None
    bias: torch.dtype | None
    residual: torch.dtype | None
    strides: tuple[int, int]
    aligned: bool
    adds: bool
    rms: bool
    device: Device


class Backward(NamedTuple):
    """The properties of a call that computes the gradients of a norm of rows x (M, N).

    Attributes:
        dtype, slope, weight: dtypes of x, dy and the weight.
        added: the dtype of a gradient that is added to dx; None without such a gradient.
        strides: row strides of dy, of the added gradient (0 without one), and of x, in elements.
        aligned: whether dy, the added gradient and x begin at multiples of 16 bytes.
        sums: whether the gradients of weight and bias are needed.
    """

    rows: int
    columns: int
    dtype: torch.dtype
    slope: torch.dtype
    weight: torch.dtype | None
    added: torch.dtype | None
    strides: tuple[int, int, int]
    aligned: bool
    sums: tuple[bool, bool]
    rms: bool
    device: Device


def forward_call(
    x: Tensor, residual: Tensor | None, input_bias: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    rms: bool, result: torch.dtype,
) -> Forward:  # fmt: skip
    """The properties of a call with the arguments of `launches.forward`."""
    rows, columns = x.shape
    aligned, added, stride, adds = x.data_ptr() % 16 == 0, None, 0, input_bias is not None
    if residual is not None:
        added, stride, adds = residual.dtype, residual.stride(0), True
        aligned = aligned and residual.data_ptr() % 16 == 0
    of_weight, of_bias = weight.dtype if weight is not None else None, bias.dtype if bias is not None else None
    return Forward(
        rows, columns, x.dtype, result, of_weight, of_bias, added, (x.stride(0), stride), aligned, adds, rms,
        device_facts(x.device),
    )  # fmt: skip


def backward_call(
    dy: Tensor, dtotal: Tensor | None, x: Tensor, weight: Tensor | None, rms: bool, sums: tuple[bool, bool]
) -> Backward:
    """The properties of a call with the arguments of `launches.backward`."""
    rows, columns = x.shape
    aligned, added, stride = x.data_ptr() % 16 == 0 and dy.data_ptr() % 16 == 0, None, 0
    if dtotal is not None:
        added, stride = dtotal.dtype, dtotal.stride(0)
        aligned = aligned and dtotal.data_ptr() % 16 == 0
    strides = (dy.stride(0), stride, x.stride(0))
    of_weight = weight.dtype if weight is not None else None
    return Backward(
        rows, columns, x.dtype, dy.dtype, of_weight, added, strides, aligned, sums, rms, device_facts(x.device)
    )


def gradients_of(call: Forward) -> Backward:
    """The backward call that computes all gradients of a norm, from contiguous gradients of the norm's results."""
    columns, (stride, _) = call.columns, call.strides
    added = call.dtype if call.adds else None
    strides = (columns, columns * call.adds, columns if call.adds else stride)  # a sum is contiguous
    sums = (call.weight is not None, call.bias is not None)
    return Backward(
        call.rows, columns, call.dtype, call.result, call.weight, added, strides, call.adds or call.aligned, sums,
        call.rms, call.device,
    )  # fmt: skip


def without_kernels(dtype: torch.dtype, columns: int, triton: bool) -> str | None:
    """The reason why plain PyTorch computes the norm; None if kernels do. `triton`: whether Triton's kernels run on the
    device.
    """
    return "rows have no elements, so nothing is launched" if columns == 0 else why_reference(dtype, triton)


# ---- forward ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def choose_forward(call: Forward) -> NormPlan:
    """The plan that computes a norm."""
    why = without_kernels(call.dtype, call.columns, call.device.triton)
    if why is not None:
        return NormPlan("reference", (), why)
    columns, group = call.columns, unit(call.columns, *call.strides)
    fours = _fours(call, group)
    if fours is not None:
        reason = (
            f"rows begin at multiples of 8 bytes, and rows of up to {fours.columns} elements are faster in registers "
            "than staged"
        )
        return NormPlan("tiles", (_forward_tiles(call, group, fours),), reason)
    entry = clusters.config_for(tables.CLUSTER_FORWARD, columns)
    staged = _staged_forward(call, entry) if entry is not None else None
    if isinstance(staged, tuple):
        assert entry is not None
        return NormPlan("clusters", staged, _why_staged(entry))
    refused = {} if staged is None else {"clusters": staged}
    shifting = config_for(tables.FORWARD_SHIFTED, columns) if columns % 2 else None
    parts = _forward_parts(call, shifting is not None or entry is not None or tables.FORWARD_LONG_ODD.shifted)
    if shifting is not None and parts[0].shifted:
        first, *rest = parts
        launches = [_forward_shifted(call, shifting, first.stop)]
        launches += [_forward_unshifted(call, group, each)[1] for each in rest]
        return NormPlan("shifted", tuple(launches), _WHY_SHIFTED, refused)
    backend, launch, reason = _forward_unshifted(call, group, Part(0, call.rows, False))
    if backend == "long" and parts[0].shifted:
        return NormPlan(backend, tuple(_forward_long(call, group, part) for part in parts), reason, refused)
    return NormPlan(backend, (launch,), reason, refused)


def _fours(call: Forward, group: int) -> ForwardConfig | None:
    """Launch parameters for half precision rows that begin at multiples of 8 bytes, but not of 16 bytes, in a norm that
    adds no residual and no input bias. None for all other calls.
    """
    if call.adds or group != 4 or call.dtype.itemsize != 2 or call.columns < tables.FOURS_FROM:
        return None
    return config_for(tables.FORWARD_FOURS_RMS if call.rms else tables.FORWARD_FOURS, call.columns)


def _forward_parts(call: Forward, worthwhile: bool) -> list[Part]:
    strides = call.strides if call.residual is not None else call.strides[:1]
    return parts_of(call.rows, call.columns, _fetched(call), strides, call.aligned and worthwhile)


def _fetched(call: Forward) -> list[torch.dtype]:
    """The dtypes of the tensors whose rows forward loads."""
    return [call.dtype] if call.residual is None else [call.dtype, call.residual]


def _staged_forward(call: Forward, entry: ClusterConfig) -> tuple[Launch, ...] | str:
    """The launches of cluster kernels, or the reason why these kernels cannot be used."""
    if call.adds:
        return "a sum precedes the norm"
    if call.result != call.dtype:
        return "the result and the rows differ in dtype"
    given, parameters = (call.dtype,), (call.weight, call.bias)
    return _staged("norm_forward_staged", call, entry, _forward_parts(call, True), given, parameters, call.strides[:1])


def _forward_unshifted(call: Forward, group: int, part: Part) -> tuple[Backend, Launch, str]:
    """Return (back end, launch, reason) for a range of rows that the kernel loads without a shift (see `parts_of`). If
    a row fits in a program's registers, a program computes a tile of whole rows. Otherwise it reads each row block by
    block.
    """
    columns, size = call.columns, call.dtype.itemsize
    narrow = group * size < 16 and columns > 256
    config = config_for(tables.FORWARD_NARROW, columns) if narrow else None
    reason = f"rows begin at multiples of {group * size} bytes: fewer warps for each row are faster"
    if config is None:
        config = config_for(tables.FORWARD, columns)
        reason = f"a program holds a row of up to {config.columns if config else 0} elements"
    if config is None and group == 8 and size == 2 and not call.adds:
        config = config_for((tables.FORWARD_HELD,), columns)
        reason = f"rows of whole groups of 16 bytes: {tables.FORWARD_HELD.warps} warps hold one row"
    if config is None:
        return "long", _forward_long(call, group, part), f"no program holds a row of {columns} elements"
    return "tiles", _forward_tiles(call, group, config, part), reason


def _forward_tiles(call: Forward, group: int, config: ForwardConfig, part: Part | None = None) -> Launch:
    start, stop, _ = part or (0, call.rows, False)
    constants = tile(config, call.columns) | {"RMS": call.rms, "UNIT": group}
    grid = (-(-(stop - start) // config.rows),)
    return Launch("norm_forward", start, stop, grid, _forward_sizes(call, group, stop - start), constants)


def _forward_shifted(call: Forward, config: BackwardConfig, stop: int) -> Launch:
    constants = shifted_tile(config, call.columns, _fetched(call), call.device) | {"RMS": call.rms}
    grid = (persistent(config, call.device, stop // config.rows, 8 // config.rows),)
    return Launch("norm_forward_shifted", 0, stop, grid, (stop, call.columns), constants)


def _forward_long(call: Forward, group: int, part: Part) -> Launch:
    start, stop, shifted = part
    config = tables.FORWARD_LONG if group > 1 else tables.FORWARD_LONG_ODD
    constants = long_tile(config, _fetched(call), call.device)
    constants |= {"SHIFT": shifted and config.shifted, "RMS": call.rms, "UNIT": group}
    grid = (persistent(config, call.device, stop - start),)
    return Launch("norm_forward_long", start, stop, grid, _forward_sizes(call, group, stop - start), constants)


def _forward_sizes(call: Forward, group: int, rows: int) -> tuple[int, ...]:
    return (rows, call.columns // group, *(stride // group for stride in call.strides))


# ---- backward --------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def choose_backward(call: Backward) -> NormPlan:
    """The plan for the gradients of a norm."""
    why = without_kernels(call.dtype, call.columns, call.device.triton)
    if why is not None:
        return NormPlan("reference", (), why)
    pairs = _pairs(call)
    strides = call.strides if call.added is not None else call.strides[::2]
    parts = parts_of(call.rows, call.columns, _fetched_backward(call), strides, call.aligned and pairs is None)
    entry = clusters.config_for(tables.CLUSTER_BACKWARD, call.columns)
    staged = _staged_backward(call, entry, parts) if entry is not None else None
    last = _last(call)
    if isinstance(staged, tuple):
        assert entry is not None
        return NormPlan("clusters", staged + last, _why_staged(entry))
    refused = {} if staged is None else {"clusters": staged}
    chosen = [_backward_part(call, part, pairs) for part in parts]
    launches = tuple(launch for _, of_part, _ in chosen for launch in of_part)
    backend, _, reason = chosen[0]
    return NormPlan(backend, launches + last, reason, refused)


def _pairs(call: Backward) -> BackwardConfig | None:
    """Launch parameters for short half precision rows whose length is even, but not a multiple of four; None for all
    other rows.
    """
    of_pairs = call.dtype.itemsize == 2 and call.columns % 4 == 2 and call.columns > tables.SHIFTED_FROM
    return config_for(tables.BACKWARD_PAIRS, call.columns) if of_pairs else None


def _fetched_backward(call: Backward) -> list[torch.dtype]:
    """The dtypes of the tensors whose rows backward loads."""
    return [call.slope, call.dtype] if call.added is None else [call.slope, call.added, call.dtype]


def _staged_backward(call: Backward, entry: ClusterConfig, parts: list[Part]) -> tuple[Launch, ...] | str:
    """The launches of cluster kernels, or the reason why these kernels cannot be used."""
    if not any(call.sums):
        return "no gradient of weight or bias is needed"
    if call.added is not None:
        return "another gradient is added"
    given = (call.slope, call.dtype)
    return _staged("norm_backward_staged", call, entry, parts, given, (call.weight,), call.strides[::2])


def _last(call: Backward) -> tuple[Launch, ...]:
    """The launch that adds the partial sums, if a gradient of weight or bias is needed."""
    if not any(call.sums):
        return ()
    grid = (-(-call.columns // tables.ADD_PARTIAL_SUMS["COLUMNS"]),)
    return (Launch("add_partial_sums", 0, call.rows, grid, (), _sums(call) | tables.ADD_PARTIAL_SUMS),)


def _sums(call: Backward) -> Constants:
    return {"SUM_WEIGHT": call.sums[0], "SUM_BIAS": call.sums[1]}


def _backward_part(call: Backward, part: Part, pairs: BackwardConfig | None) -> tuple[Backend, tuple[Launch, ...], str]:
    """Return (back end, launches, reason of this choice) for one range of rows. The launches compute dx, and each
    program's partial sums for the gradients of weight and bias.
    """
    start, stop, shifted = part
    rows, columns, group = stop - start, call.columns, unit(call.columns, *call.strides)
    sizes = (rows, columns // group, *(stride // group for stride in call.strides))
    # In dy * weight - mean(dy * weight), both products dy * weight must be rounded in the same way. Otherwise equal
    # terms would not cancel. Products of half precision are exact in float32; products of float32 must not be fused
    # with the subtraction.
    exact: Constants = {"enable_fp_fusion": all(t is None or t in HALVES for t in (call.slope, call.weight))}
    constants = {"RMS": call.rms, **_sums(call), **exact}
    config = pairs or config_for(tables.BACKWARD_SHIFTED if shifted else tables.BACKWARD, columns)
    if config is None:
        reason = f"no program holds a row of {columns} elements: sums of the rows are taken first"
        return "long", _backward_long(call, part, sizes, constants | {"SHIFT": shifted, "UNIT": group}), reason
    programs = persistent(config, call.device, -(-rows // config.rows), 8 // config.rows if shifted else 1)
    if shifted:
        constants |= shifted_tile(config, columns, _fetched_backward(call), call.device)
        shape, slots = (rows, columns), programs * config.rows
        launch = Launch("norm_backward_shifted", start, stop, (programs,), shape, constants, slots=slots)
        return "shifted", (launch,), _WHY_SHIFTED
    constants |= tile(config, columns) | {"HOLD": config.hold, "AGAIN": config.again, "UNIT": group}
    constants["STAGES"] = stages(config, _fetched_backward(call), columns, call.device)
    launch = Launch("norm_backward", start, stop, (programs,), sizes, constants, slots=programs)
    reason = f"a program holds a row of up to {config.columns} elements"
    return "tiles", (launch,), reason if pairs is None else f"pairs of elements: {reason}, and needs no shift"


def _backward_long(call: Backward, part: Part, sizes: tuple[int, ...], constants: Constants) -> tuple[Launch, Launch]:
    """The launches for rows that do not fit in a program's registers: sums along the rows, then dx by blocks of
    columns.
    """
    start, stop, shifted = part
    rows, config = stop - start, tables.BACKWARD_LONG
    blocks = -(-(call.columns + 7 * shifted) // config.block)
    most = max(1, config.programs_per_sm * call.device.processors // blocks)
    chunks = max(8, min(rows, most) // 8 * 8) if shifted else max(1, min(rows, most))
    of_sums = {key: constants[key] for key in ("RMS", "enable_fp_fusion", "SHIFT", "UNIT")} | tables.ROW_SUMS
    row_sums = Launch("norm_row_sums", start, stop, (rows,), (*sizes[:3], sizes[4]), of_sums)
    constants = constants | long_tile(config, _fetched_backward(call), call.device)
    return row_sums, Launch("norm_backward_long", start, stop, (blocks, chunks), sizes, constants, slots=chunks)


# ---- clusters of blocks ----------------------------------------------------------------------------------------------


def _staged(
    kernel: str, call: Forward | Backward, entry: ClusterConfig, parts: Sequence[Part],
    given: tuple[torch.dtype, ...], parameters: tuple[torch.dtype | None, ...], strides: tuple[int, ...],
) -> tuple[Launch, ...] | str:  # fmt: skip
    """The launches of cluster kernels, or the reason why these kernels cannot be used. `given`: the dtype of x, in
    backward the dtypes of dy and x."""
    why = clusters.refused(call.rows, call.columns, given, parameters, strides, call.aligned, call.device)
    if why is not None:
        return why
    of_parameters = next((dtype for dtype in parameters if dtype is not None), call.dtype)
    launches = []
    for start, stop, _ in parts:
        rows = stop - start
        staged = clusters.staged(kernel, entry, call.dtype, of_parameters, rows, call.columns, call.rms, call.device)
        if staged is None:
            return "shared memory has no room for such rows"
        sizes = (rows, call.columns, *strides, staged.stages)
        launches.append(Launch(kernel, start, stop, (), sizes, staged=staged))
    return tuple(launches)


def _why_staged(entry: ClusterConfig) -> str:
    kind = {None: "", True: " that are not whole groups of 16 bytes", False: " of whole groups of 16 bytes"}[entry.odd]
    return f"rows of {entry.least} to {entry.most} elements{kind} are faster staged in shared memory, as measured"


# ---- table entries, and their parameters for a row ---------------------------------------------------------

_WHY_SHIFTED = "rows begin at unaligned addresses: loads of 16 bytes with a shift are faster than narrow loads"
Config = TypeVar("Config", ForwardConfig, BackwardConfig)


def config_for(table: Sequence[Config], columns: int) -> Config | None:
    """Launch parameters for rows of `columns` elements; None if a row does not fit in a tile."""
    for config in table:
        if columns <= config.columns:
            return config
    return None


class Part(NamedTuple):
    """A range of rows, and whether the kernel loads these rows with a shift (see `parts_of`)."""

    start: int
    stop: int
    shifted: bool


def parts_of(
    rows: int, columns: int, dtypes: Sequence[torch.dtype], strides: Sequence[int], worthwhile: bool
) -> list[Part]:
    """Split the rows of (M, N) tensors into a range that is loaded with a shift and a range that is loaded without a
    shift. The shifted range is the largest multiple of eight rows. A shift means that the kernel loads the groups of
    16 bytes that enclose an unaligned row.

    No row is loaded with a shift if `worthwhile` is false, if an element does not have two bytes, if N is a multiple of
    four or below `tables.SHIFTED_FROM`, or if rows are not contiguous.
    """
    odd = worthwhile and columns >= tables.SHIFTED_FROM and columns % 4 != 0 and rows >= 8
    if not odd or any(d.itemsize != 2 for d in dtypes) or any(stride != columns for stride in strides):
        return [Part(0, rows, False)]
    main = rows // 8 * 8
    return [Part(0, main, True)] + ([Part(main, rows, False)] if main < rows else [])


def tile(config: ForwardConfig | BackwardConfig, columns: int) -> Constants:
    """Kernel constants for tiles of whole rows that forward and backward share: rows per tile, and number and size of
    the blocks of a row.
    """
    block = min(config.block, power_of_two(columns))
    blocks = -(-columns // block)
    even = blocks * block == columns
    return {"ROWS": config.rows, "BLOCKS": blocks, "COLUMNS": block, "EVEN": even, "num_warps": config.warps}


def shifted_tile(config: BackwardConfig, columns: int, dtypes: Sequence[torch.dtype], device: Device) -> Constants:
    """Launch parameters of the kernels for unaligned rows, which read at most seven elements of a neighbouring row."""
    constants = tile(config, columns + 7)
    del constants["EVEN"]
    fetched = stages(config, dtypes, columns + 7, device)
    return {**constants, "WHOLE": columns // constants["COLUMNS"], "STAGES": fetched}


def long_tile(config: LongConfig, dtypes: Sequence[torch.dtype], device: Device) -> Constants:
    """Launch parameters of the kernels for long rows."""
    fetched = stages(config, dtypes, config.block, device)
    return {"COLUMNS": config.block, "STAGES": fetched, "num_warps": config.warps}


def stages(config: BackwardConfig | LongConfig, dtypes: Sequence[torch.dtype], columns: int, device: Device) -> int:
    """The number of pipeline stages in `config`, or fewer if shared memory has no room for them beside the scratch
    space that the sums along rows need.
    """
    rows = config.rows if isinstance(config, BackwardConfig) else 1
    elements = rows * min(-(-columns // config.block) * config.block, power_of_two(columns))
    stage_bytes = elements * sum(dtype.itemsize for dtype in dtypes)
    return max(1, min(config.stages, (device.shared_bytes - stage_bytes // 2 - 2048) // stage_bytes))


def persistent(config: BackwardConfig | LongConfig, device: Device, tiles: int, multiple: int = 1) -> int:
    """The number of programs that loop over `tiles` tiles: at most `config.programs_per_sm` per SM, and a multiple of
    `multiple`.
    """
    most = config.programs_per_sm * device.processors
    return max(multiple, min(tiles, most) // multiple * multiple)


def forget() -> None:
    """Drop all cached plans and device properties. Call this function after a change of the tables."""
    for made in (choose_forward, choose_backward, device_facts):
        made.cache_clear()
    known_calls.forget()
