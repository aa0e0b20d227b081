"""Assign each target its own query at the lowest total cost: the linear assignment problem, for a batch.

Two functions find assignments of the same total cost. `assign_on_host` calls scipy for one problem after another; if
the costs are on a GPU, the host waits for the GPU. `assign_batched` solves all problems in lockstep, in plain PyTorch,
and never waits. `assign_batched` uses shortest augmenting paths (Jonker and Volgenant 1987, in the form of Crouse 2016,
"On implementing 2D rectangular assignment algorithms", which scipy also uses). For M targets and at least M queries,
`assign_batched` takes M (M + 1) / 2 steps of about two dozen kernel launches each on a GPU, for any batch size. Use
`assign_batched` for few targets, in a CUDA graph, or when the host has other work.

A cost that is NaN or infinite counts as `WORST`. A pair with this cost is assigned only if no assignment avoids
it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rooftop.errors import MissingExtraError

WORST = 1e5
"""Costs are clamped to -WORST..WORST. In float64, a sum of a hundred such costs is exact to seven decimal places."""
FORBIDDEN = 1e9
"""The cost of a target that does not exist. This cost exceeds any total of the real costs of up to 5,000 pairs."""


def assign_on_host(cost: Tensor, valid: Tensor) -> Tensor:
    """Assign with scipy on the host.

    Args:
        cost: (B, M, Q), any floating dtype: the cost of each pair of target and query.
        valid: bool (B, M), which targets exist.

    Returns:
        int64 (B, M) on the device of `cost`: the query of each target. -1: the target does not exist, or no query is
        left for the target because there are more targets than queries.

    Raises:
        ValueError: shapes do not match.
        MissingExtraError: scipy is not installed.
    """
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError as error:
        raise MissingExtraError('matching on the host needs scipy: pip install "rooftop[detection]"') from error
    _check(cost, valid)
    costs, there = _finite(cost).cpu().numpy(), valid.cpu()
    queries = torch.full(valid.shape, -1)
    for problem, present, row in zip(costs, there, queries, strict=True):
        targets = present.nonzero()[:, 0]
        chosen, columns = linear_sum_assignment(problem[targets.numpy()])
        row[targets[torch.from_numpy(chosen)]] = torch.from_numpy(columns)
    return queries.to(cost.device)


@torch.no_grad()
def assign_batched(cost: Tensor, valid: Tensor) -> Tensor:
    """Solve all assignment problems in lockstep on the device of the costs; the host does not wait for the device.

    The arguments and the total cost are the same as for `assign_on_host`, and the result has the same form. If several
    assignments have the lowest cost, the two functions may choose different ones.
    """
    _check(cost, valid)
    cost = _finite(cost)
    batch, targets, queries = cost.shape
    if not targets or not queries:
        return torch.full_like(valid, -1, dtype=torch.int64)
    if targets <= queries:
        return _augmented(cost, valid)
    # The search starts from the smaller side: here each query looks for a target. A query gets a padding target (one
    # that does not exist) only if no real target is left.
    of_queries = cost.masked_fill(~valid[..., None], FORBIDDEN).transpose(1, 2)
    chosen = _augmented(of_queries, torch.ones_like(of_queries[..., 0], dtype=torch.bool))  # (B, Q)
    numbers = torch.arange(queries, device=cost.device).expand(batch, -1)
    found = torch.full_like(valid, -1, dtype=torch.int64).scatter(1, chosen, numbers)
    return found.masked_fill(~valid, -1)


def _augmented(cost: Tensor, active: Tensor) -> Tensor:
    """Assign a column to each active row (B, R), for costs (B, R, C) with R <= C; inactive rows get -1.

    Rows are added one by one. Each row searches for the cheapest augmenting path to a free column; then the columns
    along this path are reassigned.
    """
    batch, rows, columns = cost.shape
    numbers = torch.arange(columns, device=cost.device)
    row_prices, column_prices = cost.new_zeros((batch, rows)), cost.new_zeros((batch, columns))
    column_of = torch.full_like(active, -1, dtype=torch.int64)
    row_of = torch.full_like(column_prices, -1, dtype=torch.int64)
    for row in range(rows):
        started = active[:, row]
        sink, distance, lengths, came_from, seen = _search(cost, row_prices, column_prices, row_of, row, started)
        # Each visited row except `row` holds a visited column. The update of the prices keeps the reduced costs
        # non-negative.
        slack = torch.where(seen, distance[:, None] - lengths, 0)  # (B, C)
        held = column_of.clamp(min=0)
        gains = torch.where(column_of >= 0, slack.gather(1, held), 0)
        gains[:, row] = torch.where(started, distance, 0)
        row_prices += gains
        column_prices -= slack
        column, going = sink, started
        for _ in range(row + 1):
            taker = came_from.gather(1, column[:, None])  # (B, 1)
            left = column_of.gather(1, taker)[:, 0]
            row_of = torch.where(going[:, None] & (numbers == column[:, None]), taker, row_of)
            kept = torch.where(going, column, left)
            column_of = column_of.scatter(1, taker, kept[:, None])
            going = going & (taker[:, 0] != row)
            column = torch.where(going, left, column)
            if _over(~going):
                break
    return column_of


def _search(
    cost: Tensor, row_prices: Tensor, column_prices: Tensor, row_of: Tensor, first: int, started: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Run Dijkstra's search from row `first` to the nearest free column.

    Returns:
        The nearest free column (B,), its distance from the row (B,), the shortest distance found to each column (B, C;
        inf if not reached), the row from which each column was reached (B, C), and whether its distance is final
        (B, C).
    """
    batch, _, columns = cost.shape
    numbers = torch.arange(columns, device=cost.device)
    lengths = torch.full_like(column_prices, torch.inf)
    came_from = torch.full_like(row_of, first)
    seen = torch.zeros_like(row_of, dtype=torch.bool)
    distance = cost.new_zeros(batch)
    row = torch.full_like(row_of[:, 0], first)
    sink = torch.zeros_like(row)
    open_ = started
    for _ in range(first + 1):  # every step except the last settles a column that an earlier row holds
        of_row = cost.gather(1, row[:, None, None].expand(-1, 1, columns))[:, 0]  # (B, C)
        reached = (distance - row_prices.gather(1, row[:, None])[:, 0])[:, None] + of_row - column_prices
        better = (reached < lengths) & ~seen & open_[:, None]
        lengths = torch.where(better, reached, lengths)
        came_from = torch.where(better, row[:, None], came_from)
        nearest, column = lengths.masked_fill(seen, torch.inf).min(dim=1)
        distance = torch.where(open_, nearest, distance)
        seen = seen | (open_[:, None] & (numbers == column[:, None]))
        sink = torch.where(open_, column, sink)
        holder = row_of.gather(1, column[:, None])[:, 0]
        open_ = open_ & (holder >= 0)
        row = torch.where(open_, holder, row)
        if _over(~open_):
            break
    return sink, distance, lengths, came_from, seen


def _over(done: Tensor) -> bool:
    """Whether `done` (B,) is True for the whole batch. Always False on a GPU, because the check would wait for it."""
    return done.device.type == "cpu" and bool(done.all())


def _finite(cost: Tensor) -> Tensor:
    """Convert costs to float64 and clamp them to -WORST..WORST; NaN and both infinities become WORST."""
    return cost.detach().double().nan_to_num(WORST, WORST, WORST).clamp(-WORST, WORST)


def _check(cost: Tensor, valid: Tensor) -> None:
    if cost.dim() != 3 or valid.shape != cost.shape[:2] or valid.dtype != torch.bool:
        raise ValueError(
            f"cost has shape {tuple(cost.shape)}, and `valid` is {valid.dtype} {tuple(valid.shape)}: expected cost "
            "(B, M, Q), and `valid` torch.bool (B, M)"
        )
