"""Rotary position embeddings: rotate each pair (a, b) of a head's features by an angle that grows with the position.

(a, b) -> (a cos - b sin, b cos + a sin). Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position
Embedding". Pairs are (i, i + R / 2), as in GPT-NeoX and Llama, or neighbours (2 i, 2 i + 1), as in the paper. The
operator is bound by memory: one kernel reads and writes queries and keys once, and reads the tables of cosines and
sines once for every `RotaryConfig.heads` heads. The gradient is the rotation by the negative angle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftop.cost import Cost, distinct_bytes, precision_of
from rooftop.kernels.attentions.tables import ROTARY, RotaryConfig
from rooftop.kernels.operands.checks import check_tensors, is_integer
from rooftop.kernels.operands.dtypes import FLOATS, accumulator_dtype
from rooftop.kernels.operands.launch_data import Constants, power_of_two
from rooftop.kernels.operands.references import by_reference
from rooftop.launch.operators import declare, no_tangents
from rooftop.launch.repeated_calls import repeated
from rooftop.launch.symbolic import recorded_whole
from rooftop.launch.triton_launch import launch, require_triton

# ---- reference -------------------------------------------------------------------------------------------------


def rope_reference(
    x: Tensor, cos: Tensor, sin: Tensor, starts: Tensor | None, offset: int, interleaved: bool, conjugate: bool
) -> Tensor:
    """Compute `rope` in plain PyTorch, in float32 (float64 for float64): x (B, H, S, D), tables (B or 1, T, R / 2),
    starts (B,).
    """
    inside = accumulator_dtype(x.dtype)
    places = torch.arange(x.shape[2], device=x.device) + offset  # (S,)
    places = places.expand(x.shape[0], -1) if starts is None else places + starts[:, None]  # (B, S)
    cosine, sine = (_looked_up(table, places).to(inside) for table in (cos, sin))  # (B, 1, S, R / 2)
    if conjugate:
        sine = -sine
    pairs = cos.shape[-1]
    values = x[..., : 2 * pairs].to(inside)
    a, b = (values[..., ::2], values[..., 1::2]) if interleaved else values.split(pairs, -1)
    turned = (a * cosine - b * sine, b * cosine + a * sine)
    rotated = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat((rotated.to(x.dtype), x[..., 2 * pairs :]), -1)


def _looked_up(table: Tensor, places: Tensor) -> Tensor:
    """The rows of a table (B or 1, T, P) at the positions (B, S); NaN for positions outside the table."""
    positions = table.shape[1]
    if positions == 0:
        return table.new_full((places.shape[0], 1, places.shape[1], table.shape[2]), torch.nan)
    batch = torch.arange(places.shape[0], device=table.device)[:, None] if table.shape[0] > 1 else 0
    known = (places >= 0) & (places < positions)
    return table[batch, places.clamp(0, positions - 1)].masked_fill(~known[..., None], torch.nan)[:, None]


# ---- limits -----------------------------------------------------------------------------------------------------


MOST_PAIRS = ROTARY[-1].pairs


def rotary_config(pairs: int) -> RotaryConfig:
    """Launch parameters for heads with `pairs` rotated pairs of features, at most `MOST_PAIRS`."""
    return next(config for config in ROTARY if pairs <= config.pairs)


# ---- implementations -------------------------------------------------------------------------------------------


def _rotate(
    tensors: Sequence[tuple[Tensor, Tensor]],
    cos: Tensor,
    sin: Tensor,
    starts: Tensor | None,
    offset: int,
    interleaved: bool,
    conjugate: bool,
) -> None:
    """Write the rotated x to y, both (B, H, S, D), for one or two pairs (x, y) of tensors; y may be x itself."""
    x, y = tensors[0]
    if by_reference(x):
        for source, target in tensors:
            target.copy_(rope_reference(source, cos, sin, starts, offset, interleaved, conjugate))
        return
    require_triton()
    from rooftop.kernels.attentions.triton_kernels.rotary import rotate

    batches, heads, positions, width = x.shape
    other, other_y = tensors[1] if len(tensors) > 1 else (x[:, :0], y[:, :0])
    pairs = cos.shape[-1]
    config = rotary_config(pairs)
    groups, other_groups = (-(-count // config.heads) for count in (heads, other.shape[1]))
    rows = min(config.positions, power_of_two(positions))
    cos, sin = (table if table.stride(-1) == 1 else table.contiguous() for table in (cos, sin))
    constants: Constants = {"HAS_STARTS": starts is not None, "INTERLEAVED": interleaved, "CONJUGATE": conjugate}
    rest = width - 2 * pairs
    constants |= {"WIDTH": width, "PAIRS": pairs, "BLOCK": power_of_two(pairs), "POSITIONS": rows}
    constants |= {"REST": power_of_two(rest) if rest else 0, "HEADS": config.heads, "num_warps": config.warps}
    sources = [t if t.stride(-1) == 1 else t.contiguous() for t in (x, other)]
    sizes = (groups, heads, other.shape[1], positions, offset, cos.shape[1])
    strides = [s for t in (sources[0], y, sources[1], other_y) for s in t.stride()[:3]]
    strides += [s for table in (cos, sin) for s in (table.stride(0) if table.shape[0] > 1 else 0, table.stride(1))]
    memory = (sources[0], y, sources[1], other_y, cos, sin, starts.contiguous() if starts is not None else None)
    grid = (batches * -(-positions // max(1, rows)) * (groups + other_groups),)
    if width:
        launch(rotate, grid, x.device, *memory, *sizes, *strides, **constants)


def _like(x: Tensor) -> Tensor:
    """Allocate a result for x: with x's strides if the features of x are contiguous, else contiguous."""
    return torch.empty_like(x) if x.stride(-1) == 1 else x.new_empty(x.shape)


# ---- operators -------------------------------------------------------------------------------------------------


class Rope(NamedTuple):
    """Rotate x and `other` (a second tensor or None); if `conjugate`, by the negative angles."""

    x: Tensor
    other: Tensor | None
    cos: Tensor
    sin: Tensor
    starts: Tensor | None
    offset: int
    interleaved: bool
    conjugate: bool

    def run(self) -> tuple[Tensor, Tensor]:
        x, other = self[:2]
        y, other_y = self.fake()
        _rotate([(x, y)] if other is None else [(x, y), (other, other_y)], *self[2:])
        return y, other_y

    def fake(self) -> tuple[Tensor, Tensor]:
        return _like(self.x), self.x.new_empty(0) if self.other is None else _like(self.other)

    def in_pytorch(self) -> tuple[Tensor, Tensor]:
        x, other, tables = self.x, self.other, self[2:]
        return rope_reference(x, *tables), x.new_empty(0) if other is None else rope_reference(other, *tables)

    def keep(self, made: tuple[Tensor, Tensor]) -> tuple[Any, ...]:
        """Keep the shapes and dtypes of the rotated tensors, and the remaining arguments, for backward."""
        return (*(None if t is None else (t.shape, t.dtype) for t in self[:2]), *self[2:])

    @staticmethod
    def gradients(
        kept: tuple[Any, ...], wanted: Sequence[bool], dy: Tensor | None, dother: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Rotate the gradients of the results by the negated angles. The same operator computes this rotation, so the
        gradient can be differentiated as well.
        """
        (shape, dtype), of_other, *tables, conjugate = kept
        if dy is None:
            assert dother is not None
            dy = dother.new_zeros(shape, dtype=dtype)
        if of_other is None:
            dother = None
        elif dother is None:
            dother = dy.new_zeros(of_other[0], dtype=of_other[1])
        arguments: list[Any] = [dy, dother, *tables, not conjugate]
        dx, dother_x = _rope(*arguments)
        return dx, None if of_other is None else dother_x

    def cost(self, made: tuple[Tensor, Tensor]) -> Cost:
        return _cost(*self[:5], made if self.other is not None else made[:1])


class RopeInPlace(NamedTuple):
    """Rotate x and `other` (a second tensor or None) in place."""

    x: Tensor
    other: Tensor | None
    cos: Tensor
    sin: Tensor
    starts: Tensor | None
    offset: int
    interleaved: bool

    def run(self) -> None:
        tensors = [(t, t) for t in self[:2] if t is not None]
        _rotate(tensors, *self[2:], conjugate=False)

    def fake(self) -> None:
        return None

    def cost(self, made: None) -> Cost:
        return _cost(*self[:5], self[:2])


_rope = declare("rope", Rope, known=True)
_rope_in_place = declare("rope_", RopeInPlace, mutates=("x", "other"))


def _cost(
    x: Tensor, other: Tensor | None, cos: Tensor, sin: Tensor, starts: Tensor | None, written: Sequence[Tensor | None]
) -> Cost:
    """Flops: 6 per rotated pair. Only those rows of the tables that belong to the S positions count as read."""
    (batches, heads, positions, _), pairs = x.shape, cos.shape[-1]
    rows = positions * (batches if cos.shape[0] > 1 or starts is not None else 1)
    table_bytes = min(rows, cos.shape[0] * cos.shape[1]) * pairs * (cos.element_size() + sin.element_size())
    rotated = batches * positions * pairs * (heads + (other.shape[1] if other is not None else 0))
    read = distinct_bytes([x, other, starts]) + table_bytes
    return Cost(read, distinct_bytes(written), {precision_of(x.dtype): 6 * rotated})


# ---- public ----------------------------------------------------------------------------------------------------


@repeated
@recorded_whole
def rope(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    offset: int | Tensor = 0,
    inplace: bool = False,
) -> Tensor:
    """Rotary position embedding of queries or keys.

    Args:
        x: (B, H, S, D), bfloat16, float16, float32 or float64; any strides (the transposed view of (B, S, H, D) is read
            and written without a copy). (H, S, D) and (S, D) are accepted as well.
        cos, sin: (T, R / 2), or (B, T, R / 2) for one table per sequence: T positions, and R <= D rotated features.
            Features that are not rotated are copied. The tables may have any dtype that x may have, whatever
            the dtype of x. The tables get no gradient.
        interleaved: whether pairs are neighbours (2 i, 2 i + 1) instead of (i, i + R / 2).
        offset: position of x's first row in the tables: an int for all sequences, or a tensor of (B,) integers.
        inplace: write the result to x. Not allowed if autograd tracks x.

    Returns:
        A tensor like x, or x itself if `inplace`. The arithmetic is float32 (float64 for float64). If the offset is an
        int or a tensor on the CPU, positions outside the tables raise an error. If the offset is a tensor on a GPU, the
        results at such positions are NaN.

    Raises:
        TypeError: a tensor's layout is not `torch.strided`, or its dtype is wrong.
        ValueError: a shape, device or position is wrong. With `inplace`, ValueError is also raised if x has overlapping
            memory, if the features of x are not contiguous, or if autograd tracks x.
        NotImplementedError: the tables require a gradient, or forward-mode differentiation is active.
    """
    return _apply("rope", (x,), cos, sin, interleaved, offset, inplace)[0]


@repeated
@recorded_whole
def rope_pair(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    offset: int | Tensor = 0,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    """`rope` of queries (B, H, S, D) and keys (B, H_k, S, D) in one kernel; H_k may differ from H."""
    query, key = _apply("rope_pair", (query, key), cos, sin, interleaved, offset, inplace)
    return query, key


def _apply(
    name: str,
    tensors: tuple[Tensor, ...],
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    offset: int | Tensor,
    inplace: bool,
) -> list[Tensor]:
    """Check the arguments of `rope` or `rope_pair`, and return the rotated tensors in the shapes of the arguments."""
    _check(name, tensors, cos, sin, offset, inplace)
    no_tangents(name, *tensors, instead="the formula in plain PyTorch")
    whole = [_unsqueezed(t) if inplace or t.dim() == 4 else t.reshape((1,) * (4 - t.dim()) + t.shape) for t in tensors]
    cos, sin = (t if t.dim() == 3 else t[None] for t in (cos, sin))
    starts, first = (offset, 0) if isinstance(offset, Tensor) else (None, offset)
    other = whole[1] if len(whole) > 1 else None
    if inplace:
        _rope_in_place(whole[0], other, cos, sin, starts, first, interleaved)
        return list(tensors)
    rotated = _rope(whole[0], other, cos, sin, starts, first, interleaved, False)
    return [y if x.dim() == 4 else y.reshape(x.shape) for x, y in zip(tensors, rotated, strict=False)]


def _unsqueezed(x: Tensor) -> Tensor:
    while x.dim() < 4:
        x = x.unsqueeze(0)
    return x


def _check(
    name: str, tensors: tuple[Tensor, ...], cos: Tensor, sin: Tensor, offset: int | Tensor, inplace: bool
) -> None:
    names = ("x",) if len(tensors) == 1 else ("query", "key")
    x = tensors[0]
    check_tensors(name, FLOATS, **dict(zip(names, tensors, strict=True)), cos=cos, sin=sin)
    for argument, tensor in zip(names, tensors, strict=True):
        if not 2 <= tensor.dim() <= 4:
            raise ValueError(
                f"{name}: expected {argument} of shape (B, H, S, D), (H, S, D) or (S, D), got {tuple(tensor.shape)}"
            )
    if len(tensors) > 1:
        _check_pair(name, *tensors)
    _check_tables(name, names[0], x, cos, sin)
    _check_offset(name, x, cos.shape[-2], offset)
    if inplace:
        _check_in_place(name, names, tensors)


def _check_pair(name: str, query: Tensor, key: Tensor) -> None:
    if query.dtype != key.dtype:
        raise TypeError(f"{name}: query is {query.dtype}, key {key.dtype}: convert one of them")
    same = query.dim() == key.dim() and query.shape[-2:] == key.shape[-2:] and query.shape[:-3] == key.shape[:-3]
    if not same:
        raise ValueError(
            f"{name}: query {tuple(query.shape)} and key {tuple(key.shape)} must agree in all but the number of heads"
        )


def _check_tables(name: str, argument: str, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    batch = x.shape[0] if x.dim() == 4 else 1
    # not `cos.shape[0] in (1, batch)`: `in` finds no equal size if one of the sizes is symbolic
    fits = cos.dim() == 2 or (cos.dim() == 3 and (cos.shape[0] == 1 or cos.shape[0] == batch))
    if cos.shape != sin.shape or not fits:
        raise ValueError(
            f"{name}: expected cos and sin of one shape (T, R / 2) or ({batch}, T, R / 2), "
            f"got {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    pairs, width = cos.shape[-1], x.shape[-1]
    if 2 * pairs > width:
        repeated = f"; if the tables contain each angle twice, give cos[..., :{width // 2}]" if pairs == width else ""
        raise ValueError(
            f"{name}: tables of {pairs} pairs rotate {2 * pairs} features, {argument} has {width}{repeated}"
        )
    if not 0 < pairs <= MOST_PAIRS:
        raise ValueError(f"{name}: tables must have 1 to {MOST_PAIRS} pairs, got {pairs}")
    if cos.requires_grad or sin.requires_grad:
        raise NotImplementedError(f"{name}: gradients of cos and sin are not supported: detach them")


def _check_offset(name: str, x: Tensor, table_positions: int, offset: int | Tensor) -> None:
    positions = x.shape[-2]
    if isinstance(offset, Tensor):
        batch = x.shape[0] if x.dim() == 4 else 1
        if offset.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name}: offset must be int32 or int64, got {offset.dtype}")
        if tuple(offset.shape) != (batch,) or offset.device != x.device:
            raise ValueError(
                f"{name}: expected offset ({batch},) on {x.device}, got {tuple(offset.shape)} on {offset.device}"
            )
        if offset.device.type != "cpu" or torch.compiler.is_compiling() or not offset.numel() or not positions:
            return
        first, last = int(offset.min()), int(offset.max()) + positions
    else:
        if not is_integer(offset):
            raise TypeError(f"{name}: offset must be an int or a tensor, got {offset!r}")
        first, last = offset, offset + positions
    if first < 0 or last > table_positions:
        raise ValueError(
            f"{name}: positions {first} to {last - 1} are not all in tables of {table_positions} positions"
        )


def _check_in_place(name: str, names: tuple[str, ...], tensors: tuple[Tensor, ...]) -> None:
    for argument, tensor in zip(names, tensors, strict=True):
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise ValueError(f"{name}: autograd tracks {argument}, so it cannot be changed in place: use inplace=False")
        if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise ValueError(f"{name}: inplace=True needs {argument} without overlapping memory: use inplace=False")
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(
                f"{name}: inplace=True needs the features of {argument} side by side in memory, got strides "
                f"{tensor.stride()}"
            )
