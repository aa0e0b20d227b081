"""Tables of norms in Triton: rows at odd addresses, long rows, and what RMS norms and norms of sums take.

    python benchmarks/tuning/norms.py [--out norms.json] [--seconds 50] [--quick]

Decides FORWARD_SHIFTED, BACKWARD_SHIFTED, FORWARD_LONG and BACKWARD_LONG of `norm_launches.py`. "plain": rows at odd
addresses are loaded one element at a time. "table": as the tables are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from candidates import QUICK, Call, Settings, Task, main, randn
from torch import Tensor
from torch.nn import functional

from rooftop.kernels import norm_launches as launches
from rooftop.kernels.norm_launches import BackwardConfig, ForwardConfig, LongConfig

ELEMENTS = 1 << 27
EPSILON = 1e-5
Both = tuple[Callable[[], list[Tensor]], Callable[[], list[Tensor]]]  # ours and PyTorch's


def both(direction: str, rows: int, columns: int) -> Both:
    """`direction`: forward or backward, after "rms " or "add " where it is not layer norm."""
    torch.manual_seed(0)
    rms, adds = direction.startswith("rms"), direction.startswith("add")
    x, dy, residual = (randn(rows, columns) for _ in range(3))
    weight, bias = randn(columns), None if rms else randn(columns)
    if direction.endswith("backward"):
        return _backward(dy, residual if adds else None, x, weight, bias)

    def ours() -> list[Tensor]:
        found = launches.forward(x, residual if adds else None, None, weight, bias, EPSILON, rms)
        return list(found[: 2 if adds else 1])

    def plain() -> list[Tensor]:
        total = x + residual if adds else x
        return [_norm(total, weight, bias), total] if adds else [_norm(total, weight, bias)]

    return ours, plain


def _norm(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return functional.rms_norm(x, (x.shape[1],), weight, EPSILON)
    return functional.layer_norm(x, (x.shape[1],), weight, bias, EPSILON)


def _backward(dy: Tensor, residual: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None) -> Both:
    values = x.float()
    mean = None if bias is None else values.mean(1)
    rstd = ((values if mean is None else values - mean[:, None]).square().mean(1) + EPSILON).rsqrt()
    del values
    dweight, dbias = torch.empty_like(weight), None if bias is None else torch.empty_like(bias)
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias) if t is not None]
    y = _norm(leaves[0], leaves[1], leaves[2] if bias is not None else None)

    def ours() -> list[Tensor]:
        dx = launches.backward(dy, residual, x, weight, mean, rstd, dweight, dbias)
        return [t for t in (dx, dweight, dbias) if t is not None]

    def plain() -> list[Tensor]:
        dx, *rest = torch.autograd.grad(y, leaves, dy, retain_graph=True)
        return [dx if residual is None else dx + residual, *rest]

    return ours, plain


def check(direction: str, columns: int) -> None:
    """As many rows as are as divisible by 16 as those that are timed."""
    rows = 9 if QUICK else 64 + ELEMENTS // columns % 16
    ours, plain = both(direction, rows, columns)
    for mine, theirs in zip(ours(), plain(), strict=True):
        limit = 3e-2 * max(1.0, theirs.float().abs().max().item())
        torch.testing.assert_close(mine.float(), theirs.float(), rtol=0, atol=limit)


def ours(direction: str, rows: int, columns: int) -> Call:
    return both(direction, rows, columns)[0]


def plain(direction: str, rows: int, columns: int) -> Call:
    return both(direction, rows, columns)[1]


def task(direction: str, columns: int, candidates: dict[str, Settings]) -> Task:
    if QUICK:  # short rows, of the same kernels
        columns = 131 if columns % 2 else 136
    rows = 16 if QUICK else ELEMENTS // columns
    tensors = (3 if "backward" in direction else 2) + (2 if direction == "add forward" else "add" in direction)
    moved, call = 2 * tensors * rows * columns, partial(ours, direction, rows, columns)
    peers = {"torch": partial(plain, direction, rows, columns)}
    return Task(f"{direction} {columns}", moved, candidates, call, partial(check, direction, columns), peers)


TABLE: dict[str, Settings] = {"table": {}}
PLAIN: dict[str, Settings] = {"plain": {(launches, "SHIFTED_FROM"): 1 << 30}}


def tables(name: str, config: Callable[..., object], *values: tuple[int, ...], one: bool = True) -> dict[str, Settings]:
    """Tables of one entry (or not a table) by its fields."""
    return {f"{v}": {(launches, name): (config(*v),) if one else config(*v)} for v in values}


def shifted(direction: str, *values: tuple[int, ...]) -> dict[str, Settings]:
    return tables(f"{direction}_SHIFTED", partial(BackwardConfig, 1 << 30), *values)


def long(direction: str, *values: tuple[int, ...]) -> dict[str, Settings]:
    return tables(f"{direction}_LONG", LongConfig, *values, one=False)


HELD: dict[str, Settings] = {"held": {(launches, "FORWARD"): (ForwardConfig(65536, 1, 16384, 32),)}}
TASKS = (
    task("forward", 2601, PLAIN | TABLE | shifted("FORWARD", (1, 512, 2, 12, 1), (1, 1024, 4, 4, 3))),
    task("backward", 2601, PLAIN | TABLE | shifted("BACKWARD", (1, 1024, 4, 2, 4), (1, 1024, 4, 3, 3))),
    task("forward", 50257, PLAIN | TABLE | long("FORWARD", (8192, 32, 1, 1), (8192, 16, 1, 3), (4096, 16, 2, 3))),
    task("backward", 50257, PLAIN | TABLE | long("BACKWARD", (1024, 4, 8, 3), (2048, 8, 4, 3))),
    task("forward", 262144, TABLE | long("FORWARD", (16384, 32, 1, 2))),
    task("forward", 65536, TABLE | HELD),
    task("forward", 12287, PLAIN | TABLE),
    task("backward", 12287, PLAIN | TABLE),
    task("forward", 1001, PLAIN | TABLE),
    task("backward", 1001, PLAIN | TABLE),
    *(task(name, 4096, TABLE) for name in ("rms forward", "rms backward", "add forward", "add backward")),
)

if __name__ == "__main__":
    main(TASKS, __doc__)
