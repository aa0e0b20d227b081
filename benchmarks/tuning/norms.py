"""Tune norms of short rows, rows at odd addresses and long rows, by Triton's kernels and by cluster kernels.

    python benchmarks/tuning/norms.py [--out norms.json] [--seconds 60] [--quick]

The tables are CLUSTER_* ("staged": blocks of a cluster, warps, blocks on an SM, stages), FORWARD, FORWARD_SHIFTED,
BACKWARD_SHIFTED, FORWARD_LONG, FORWARD_LONG_ODD and BACKWARD_LONG of `norms/tables.py`. "plain" loads rows at odd
addresses one element at a time. "table" is the entry that the tables have now.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from candidates import QUICK, Call, Settings, Task, main, randn
from torch import Tensor
from torch.nn import functional

from rooftop.kernels.norms import clusters, launches, plans, tables
from rooftop.kernels.norms.tables import BackwardConfig, ClusterConfig, ForwardConfig, LongConfig
from rooftop.launch import count_launches

ELEMENTS = 1 << 27
EPSILON = 1e-5
Both = tuple[Callable[[], list[Tensor]], Callable[[], list[Tensor]]]  # ours and PyTorch's


def both(direction: str, rows: int, columns: int) -> Both:
    """Our call and PyTorch's. `direction` is forward or backward, with a prefix "rms " or "add " for norms other than
    layer norm."""
    torch.manual_seed(0)
    rms, adds = direction.startswith("rms"), direction.startswith("add")
    x, dy, residual = (randn(rows, columns) for _ in range(3))
    weight, bias = randn(columns), None if rms else randn(columns)
    if direction.endswith("backward"):
        return _backward(dy, residual if adds else None, x, weight, bias)

    def ours() -> list[Tensor]:
        found = launches.forward(x, residual if adds else None, None, weight, bias, EPSILON, rms, x.dtype)
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
    """Check on fewer rows. Their number has the same divisibility by 16 as in the timing."""
    rows = 9 if QUICK else 64 + ELEMENTS // columns % 16
    ours, plain = both(direction, rows, columns)
    with count_launches() as counted:
        found = ours()
    staged = clusters.config_for(
        tables.CLUSTER_BACKWARD if "backward" in direction else tables.CLUSTER_FORWARD, columns
    )
    if staged is not None and not QUICK and not any("staged" in name for name in counted):
        raise ValueError(
            f"the cluster kernel {staged} did not run for {columns} columns"
        )  # Triton's kernel ran instead
    for mine, theirs in zip(found, plain(), strict=True):
        limit = 3e-2 * max(1.0, theirs.float().abs().max().item())
        torch.testing.assert_close(mine.float(), theirs.float(), rtol=0, atol=limit)


def ours(direction: str, rows: int, columns: int) -> Call:
    return both(direction, rows, columns)[0]


def plain(direction: str, rows: int, columns: int) -> Call:
    return both(direction, rows, columns)[1]


def task(direction: str, columns: int, candidates: dict[str, Settings]) -> Task:
    if QUICK:  # short rows that use the same kernels
        columns = 131 if columns % 2 else 136
    rows = 16 if QUICK else ELEMENTS // columns
    tensors = (3 if "backward" in direction else 2) + (2 if direction == "add forward" else "add" in direction)
    moved, call = 2 * tensors * rows * columns, partial(ours, direction, rows, columns)
    peers, proof = {"torch": partial(plain, direction, rows, columns)}, partial(check, direction, columns)
    return Task(f"{direction} {columns}", moved, candidates, call, proof, peers, changed=plans.forget)


TABLE: dict[str, Settings] = {"table": {}}
PLAIN: dict[str, Settings] = {"plain": {(tables, "SHIFTED_FROM"): 1 << 30}}


def tabled(name: str, config: Callable[..., object], *values: tuple[int, ...], one: bool = True) -> dict[str, Settings]:
    """A candidate's settings: its fields, as a table with one entry or as a plain value."""
    return {f"{v}": {(tables, name): (config(*v),) if one else config(*v)} for v in values}


def shifted(direction: str, *values: tuple[int, ...]) -> dict[str, Settings]:
    return tabled(f"{direction}_SHIFTED", partial(BackwardConfig, 1 << 30), *values)


def long(name: str, *values: tuple[int, ...]) -> dict[str, Settings]:
    return tabled(f"{name}_LONG", LongConfig, *values, one=False)


def long_odd(*values: tuple[int, ...]) -> dict[str, Settings]:
    return tabled("FORWARD_LONG_ODD", LongConfig, *values, one=False)


def staged(direction: str, *values: tuple[int, ...]) -> dict[str, Settings]:
    """values: blocks per cluster, warps per block, blocks per SM, stages."""
    return {f"staged {v}": {(tables, f"CLUSTER_{direction}"): (ClusterConfig(1, 1 << 30, *v),)} for v in values}


def forward(*values: tuple[int, ...]) -> dict[str, Settings]:
    """values: rows per tile, elements per block, warps."""
    return TABLE | tabled("FORWARD", partial(ForwardConfig, 1 << 30), *values)


def of_fours(columns: int) -> dict[str, Settings]:
    """Triton's kernels and the cluster kernels, for rows that begin at multiples of 8 bytes (rows of 30005
    columns: at multiples of 2 bytes)."""
    none: Settings = {(tables, name): () for name in ("FORWARD_FOURS", "FORWARD_FOURS_RMS")}
    tiles = ((4096, 8), (8192, 8), (8192, 16), (4096, 16), (2048, 8), (16384, 16), (8192, 32))
    by_triton: dict[str, Settings] = {}
    for block, warps in tiles:
        table = (ForwardConfig(1 << 30, 1, block, warps),)
        names = (*none, (tables, "FORWARD"))
        by_triton[f"(1, {block}, {warps})"] = {(tables, "CLUSTER_FORWARD"): (), **dict.fromkeys(names, table)}
    by_clusters = {name: none | of for name, of in staged("FORWARD", *STAGED_OF_FOURS[columns]).items()}
    return TABLE | by_triton | by_clusters


STAGED_OF_FOURS = {  # rows that begin at multiples of 8 bytes
    6004: ((1, 6, 4, 2), (1, 6, 3, 3)),
    12004: ((1, 12, 2, 3), (2, 6, 2, 3), (2, 6, 4, 2)),
    16204: ((1, 16, 1, 3), (2, 8, 2, 2), (2, 8, 2, 3)),
    21036: ((1, 21, 1, 3), (2, 11, 2, 2), (2, 11, 1, 5), (4, 6, 2, 3)),
    24404: ((1, 24, 1, 2), (2, 12, 2, 2), (4, 6, 2, 3)),
    30004: ((2, 15, 1, 3), (4, 8, 2, 2), (4, 8, 1, 5)),
    30005: ((2, 15, 1, 3), (4, 8, 2, 2), (4, 8, 1, 5)),
    40004: ((4, 10, 2, 2), (4, 10, 1, 3), (8, 5, 2, 3)),
    50252: ((4, 13, 2, 2), (4, 13, 1, 2), (8, 7, 2, 3)),
}
NOT_HELD: dict[str, Settings] = {"not held": {(tables, "FORWARD_HELD"): ForwardConfig(1, 1, 16, 4)}}
TASKS = (
    task(
        "backward",
        16384,
        TABLE | staged("BACKWARD", (1, 16, 1, 3), (2, 8, 2, 3), (1, 32, 1, 3), (2, 16, 1, 6), (4, 8, 2, 6)),
    ),
    task("forward", 894, TABLE | PLAIN | staged("FORWARD", (1, 1, 16, 3), (1, 2, 8, 3), (1, 2, 12, 2), (1, 4, 8, 2))),
    task(
        "backward",
        334,
        TABLE
        | {"shifted": {(tables, "BACKWARD_PAIRS"): ()}}
        | tabled("BACKWARD_PAIRS", BackwardConfig, (512, 2, 256, 2, 6, 3, True), (512, 1, 256, 1, 16, 3, True)),
    ),
    task("backward", 894, TABLE | PLAIN | staged("BACKWARD", (1, 1, 16, 3), (1, 2, 8, 3))),
    task("forward", 1002, TABLE | PLAIN),
    task("forward", 2601, TABLE | staged("FORWARD", (1, 4, 6, 3), (1, 4, 8, 2), (1, 3, 8, 2))),
    task(
        "forward",
        50257,
        TABLE
        | staged("FORWARD", (4, 13, 1, 5), (4, 13, 2, 2), (2, 25, 1, 2), (8, 7, 2, 4))
        | long_odd((4096, 8, 64, 1), (8192, 8, 64, 1), (2048, 8, 64, 1, False)),
    ),
    task("backward", 50257, TABLE | staged("BACKWARD", (4, 13, 1, 4), (8, 7, 2, 3), (8, 13, 1, 8))),
    task("backward", 12287, TABLE | staged("BACKWARD", (1, 13, 1, 4), (2, 7, 2, 4))),
    task("forward", 12287, TABLE | staged("FORWARD", (1, 13, 2, 2), (1, 13, 3, 1), (1, 16, 2, 2))),
    task(
        "forward",
        262144,
        TABLE
        | staged("FORWARD", (8, 32, 1, 1))
        | long("FORWARD", (8192, 16, 64, 1), (8192, 16, 64, 3), (4096, 8, 64, 4)),
    ),
    task("forward", 65536, TABLE | NOT_HELD | staged("FORWARD", (4, 16, 1, 4), (8, 8, 2, 3), (4, 16, 1, 2))),
    task(
        "forward",
        131072,
        TABLE | NOT_HELD | staged("FORWARD", (8, 16, 1, 2), (4, 32, 1, 1)) | long("FORWARD", (8192, 16, 64, 3)),
    ),
    task("forward", 16384, TABLE | staged("FORWARD", (1, 16, 1, 3), (1, 16, 2, 1), (1, 32, 1, 3))),
    task("backward", 65536, TABLE | staged("BACKWARD", (4, 16, 1, 3), (8, 8, 2, 3))),
    task("forward", 1001, TABLE | PLAIN | staged("FORWARD", (1, 1, 16, 3), (1, 1, 24, 3), (1, 2, 12, 3))),
    task("backward", 2601, TABLE | staged("BACKWARD", (1, 4, 4, 3), (1, 6, 3, 3))),
    task("forward", 7251, TABLE | staged("FORWARD", (1, 10, 2, 3), (1, 8, 3, 2), (1, 10, 3, 1))),
    task("backward", 7251, TABLE | staged("BACKWARD", (1, 8, 2, 3), (1, 15, 1, 4))),
    task("backward", 32768, TABLE | staged("BACKWARD", (2, 16, 1, 3), (4, 8, 2, 3))),
    task("forward", 20815, TABLE | staged("FORWARD", (1, 21, 1, 3), (1, 21, 1, 2), (1, 24, 1, 3))),
    task("backward", 20815, TABLE | staged("BACKWARD", (2, 11, 1, 5), (4, 6, 2, 4))),
    task("backward", 1001, TABLE | staged("BACKWARD", (1, 1, 16, 3), (1, 2, 8, 3))),
    task("forward", 32768, TABLE | staged("FORWARD", (2, 16, 1, 4), (2, 16, 1, 2), (1, 32, 1, 1))),
    *(task(name, 16384, TABLE) for name in ("rms backward", "add forward")),
    *(
        task(direction, columns, TABLE | PLAIN | shifted("FORWARD", (1, 512, 1, 16, 1), (4, 128, 2, 8, 1)))
        for direction in ("forward", "rms forward", "add forward")
        for columns in (201, 381, 505)
    ),
    *(task(name, columns, TABLE | PLAIN) for name in ("rms forward", "add forward") for columns in (601, 839)),
    *(
        task(direction, columns, of_fours(columns))
        for direction in ("forward", "rms forward")
        for columns in STAGED_OF_FOURS
    ),
    task("forward", 768, forward((2, 256, 2), (4, 256, 4), (2, 256, 4), (2, 1024, 4), (4, 1024, 4), (1, 256, 1))),
    task("forward", 928, forward((2, 256, 2), (4, 256, 4), (2, 256, 4), (2, 1024, 4), (4, 1024, 4), (1, 512, 2))),
    task("forward", 1024, forward((2, 1024, 4), (1, 1024, 2), (4, 1024, 4), (2, 512, 4), (1, 1024, 4))),
    task("forward", 512, forward((2, 512, 1), (8, 512, 4), (4, 512, 4), (2, 512, 2))),
    task("forward", 256, forward((8, 256, 4), (4, 256, 1), (16, 256, 4))),
)

if __name__ == "__main__":
    main(TASKS, __doc__)
