"""Embeddings: rows of a table looked up, with a gradient that is fast for any distribution of tokens and deterministic.

Forward copies rows, bound by memory: a program copies a piece of several of them. Backward adds up the gradients of
equal tokens: tokens are sorted (stably, so that equal ones stay in their order) and each program adds the runs of one
chunk in float32. A run within a chunk is finished; the pieces of runs that cross a boundary, at most two a chunk, are
in the same order a list of the same kind, 16 times shorter, that the same kernel adds up, until one chunk is left. So a
token that is everywhere keeps many programs busy, nothing is added atomically, and the order of additions depends on
the tokens alone. Bound by memory: gradients are read once, the table of gradients is written once with zeros and once
with what there is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rooftop.cost import Call, Cost, cost_of, distinct_bytes, precision_of
from rooftop.kernels.lookups.tables import OF_ANY, OF_LINES, RUNS
from rooftop.kernels.operands.checks import check_tensors
from rooftop.kernels.operands.dtypes import FLOATS, INDICES, accumulator_dtype
from rooftop.kernels.operands.launch_data import power_of_two
from rooftop.kernels.operands.references import by_reference
from rooftop.launch.operators import (
    by_formula,
    differentiable,
    differentiable_by_formula,
    in_pytorch,
    operator,
)
from rooftop.launch.symbolic import recorded_whole
from rooftop.launch.triton_launch import INTERPRETED, launch, require_triton

# ---- reference -------------------------------------------------------------------------------------------------


def embedding_backward_reference(dy: Tensor, tokens: Tensor, rows: int, padding: int) -> Tensor:
    """The gradient (V, D) of the table from dy (N, D) and tokens (N,); added up in float32, or float64 for float64."""
    inside = accumulator_dtype(dy.dtype)
    values = dy.to(inside).masked_fill((tokens == padding)[:, None], 0.0)
    return torch.zeros(rows, dy.shape[1], dtype=inside, device=dy.device).index_add_(0, tokens, values).to(dy.dtype)


# ---- implementations -------------------------------------------------------------------------------------------


def _forward(input: Tensor, weight: Tensor) -> Tensor:
    rows, width = weight.shape
    size = weight.element_size()
    by_kernel = weight.dtype != torch.float64 and (weight.device.type == "cuda" or INTERPRETED)
    whole = weight.stride(1) == 1 and (width * size | weight.stride(0) * size | weight.data_ptr()) % 16 == 0
    if not (by_kernel and whole and input.numel()):
        return torch.embedding(weight, input)
    if input.device.type == "cpu" and not bool(((input >= 0) & (input < rows)).all()):
        raise IndexError(f"embedding: index out of range: tokens must be from 0 to {rows - 1}")
    require_triton()
    from rooftop.kernels.lookups.triton_kernels.embeddings import gather_rows

    result = torch.empty((*input.shape, width), dtype=weight.dtype, device=weight.device)
    config = OF_LINES if weight.stride(0) * size % 128 == 0 else OF_ANY
    columns = min(config.columns, power_of_two(width))
    grid = (-(-input.numel() // config.rows), -(-width // columns))
    sizes = (input.numel(), width, rows, weight.stride(0))
    tile = {"ROWS": config.rows, "COLUMNS": columns, "num_warps": config.warps}
    tokens = input.reshape(-1).contiguous()  # reshaped alone it may keep its strides
    launch(gather_rows, grid, weight.device, weight, tokens, result, *sizes, debug=True, **tile)
    return result


def _backward(dy: Tensor, tokens: Tensor, rows: int, padding: int) -> Tensor:
    """dy (N, D), tokens (N,)."""
    if by_reference(dy):
        return embedding_backward_reference(dy, tokens, rows, padding)
    require_triton()
    from rooftop.kernels.lookups.triton_kernels.embeddings import add_runs

    width = dy.shape[1]
    table = torch.zeros(rows, width, dtype=dy.dtype, device=dy.device)
    if dy.numel() == 0 or rows == 0:
        return table
    dy = dy if dy.stride(1) == 1 else dy.contiguous()
    if rows < 1 << 31:
        tokens = tokens.to(torch.int32)  # half the work of sorting
    ordered, order = torch.sort(tokens, stable=True)
    values, stride, places = dy, dy.stride(0), order
    columns = min(RUNS.columns, power_of_two(width))
    tile = {"CHUNK": RUNS.chunk, "AHEAD": RUNS.ahead, "COLUMNS": columns, "num_warps": RUNS.warps}
    while True:
        items = ordered.numel()
        chunks = -(-items // RUNS.chunk)
        sums = torch.empty(2 * chunks, width, dtype=torch.float32, device=dy.device)
        sum_tokens = torch.empty(2 * chunks, dtype=ordered.dtype, device=dy.device)
        tensors, sizes = (values, places, ordered, table, sums, sum_tokens), (items, width, rows, padding, stride)
        grid, indirect = (chunks, -(-width // columns)), values is dy
        launch(add_runs, grid, dy.device, *tensors, *sizes, INDIRECT=indirect, **tile)
        if chunks == 1:
            return table
        values, stride, places, ordered = sums, width, order, sum_tokens


# ---- registration ----------------------------------------------------------------------------------------------


@operator("embedding")
def _embedding(input: Tensor, weight: Tensor, padding: int) -> Tensor:
    return _forward(input, weight)


@torch.library.register_fake("rooftop::embedding")
def _(input: Tensor, weight: Tensor, padding: int) -> Tensor:
    return weight.new_empty((*input.shape, weight.shape[1]))


in_pytorch("embedding", lambda input, weight, padding: torch.nn.functional.embedding(input, weight))


@operator("embedding_backward")
def _embedding_backward(dy: Tensor, input: Tensor, rows: int, padding: int) -> Tensor:
    return _backward(dy.reshape(input.numel(), dy.shape[-1]), input.reshape(-1), rows, padding)


@torch.library.register_fake("rooftop::embedding_backward")
def _(dy: Tensor, input: Tensor, rows: int, padding: int) -> Tensor:
    return dy.new_empty((rows, dy.shape[-1]))


def _save(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: Tensor) -> None:  # type: ignore[type-arg]
    input, weight, padding = inputs
    ctx.save_for_backward(input)
    ctx.rest = (weight.shape[0], padding)  # type: ignore[attr-defined]


def _differentiate(ctx: torch.autograd.function.FunctionCtx, dy: Tensor) -> tuple[None, Tensor, None]:
    (input,) = ctx.saved_tensors  # type: ignore[attr-defined]
    rows, padding = ctx.rest  # type: ignore[attr-defined]
    return None, _embedding_backward(dy, input, rows, padding), None


differentiable("embedding", _differentiate, _save)


def _formula(input: Tensor, weight: Tensor, padding: int) -> Tensor:
    return torch.nn.functional.embedding(input, weight, None if padding < 0 else padding)


def _backward_formula(dy: Tensor, input: Tensor, rows: int, padding: int) -> Tensor:
    inside = accumulator_dtype(dy.dtype)
    tokens = input.reshape(-1)
    values = dy.reshape(tokens.shape[0], dy.shape[-1]).to(inside).masked_fill((tokens == padding)[:, None], 0.0)
    return values.new_zeros(rows, dy.shape[-1]).index_add(0, tokens, values).to(dy.dtype)


by_formula("embedding", _formula)
differentiable_by_formula("embedding_backward", _backward_formula)


@cost_of("rooftop::embedding")
def _forward_cost(call: Call) -> Cost:
    """As of `aten::embedding`: the rows taken as different, up to all of the table."""
    table, input, out = call["weight"], call["input"], call.out
    read = min(distinct_bytes([table]), out.numel() * out.element_size())
    return Cost(read + distinct_bytes([input]), distinct_bytes([out]))


@cost_of("rooftop::embedding_backward")
def _backward_cost(call: Call) -> Cost:
    """Each element of the gradient is added once; the table of gradients is written whole."""
    dy = call["dy"]
    flops = {precision_of(dy.dtype): dy.numel()}
    return Cost(distinct_bytes([dy, call["input"]]), distinct_bytes([call.out]), flops)


# ---- public ----------------------------------------------------------------------------------------------------


@recorded_whole
def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """weight[input]; arguments as of `torch.nn.functional.embedding`.

    Args:
        input: any shape, int32 or int64, tokens from 0 to V - 1. Others raise on the CPU, and on a GPU stop the program
            with a device error, as PyTorch's.
        weight: (V, D), bfloat16, float16, float32 or float64.
        padding_idx: a token whose row gets no gradient; negative ones count from the end.
        max_norm, norm_type, scale_grad_by_freq, sparse: refused unless they are PyTorch's defaults.

    Returns:
        (*input.shape, D). The gradient of the weight is added up in float32 (float64 for float64) in an order that
        depends on the tokens alone: the same bits each time.

    Raises:
        TypeError: no dense tensors, or dtypes that do not fit.
        ValueError: shapes or devices that do not fit, a padding_idx outside of the table.
        NotImplementedError: max_norm, scale_grad_by_freq, sparse.
    """
    for name, given in (("max_norm", max_norm), ("scale_grad_by_freq", scale_grad_by_freq), ("sparse", sparse)):
        if given is not None and given is not False:
            raise NotImplementedError(f"embedding: {name} is not supported: use torch.nn.functional.embedding for it")
    _check(input, weight, padding_idx)
    padding = -1 if padding_idx is None else padding_idx % weight.shape[0]
    result: Tensor = _embedding(input, weight, padding)
    return result


def _check(input: Tensor, weight: Tensor, padding_idx: int | None) -> None:
    check_tensors("embedding", INDICES, input=input)
    check_tensors("embedding", FLOATS, (), ("input", input), weight=weight)
    if weight.dim() != 2:
        raise ValueError(f"embedding: expected a weight of shape (V, D), got {tuple(weight.shape)}")
    rows = weight.shape[0]
    if rows == 0 and input.numel():
        raise ValueError(f"embedding: weight of shape {tuple(weight.shape)} has a row for none of the tokens of input")
    if padding_idx is not None and not isinstance(padding_idx, (int, torch.SymInt)):
        raise TypeError(f"embedding: padding_idx must be an int or None, got {type(padding_idx).__name__}")
    if padding_idx is not None and not -rows <= padding_idx < rows:
        raise ValueError(f"embedding: padding_idx {padding_idx} is out of range for {rows} rows")
