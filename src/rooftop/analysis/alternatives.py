"""Rooftop's own kernels, timed on the shapes of somebody's step: what advice promises is measured where it is given."""

from __future__ import annotations

from functools import lru_cache
from math import prod

import torch

from rooftop.analysis.report import OperatorRow
from rooftop.hardware.timing import measure

SECONDS = 0.05


def layer_norm_ms(row: OperatorRow) -> float:
    """Time in ms of one call of Rooftop's layer norm, forward or backward, on the shapes of a row of the table."""
    backward = row.name.endswith("_backward")
    # native_layer_norm(x, weight, bias), native_layer_norm_backward(dy, x, mean, rstd, weight, bias)
    x = row.shapes[1] if backward else row.shapes[0]
    parameters = row.shapes[4:] if backward else row.shapes[1:]
    columns = prod(parameters[0]) if parameters else x[-1]
    return _layer_norm_ms(backward, prod(x) // max(1, columns), columns, len(parameters), row.dtype)


@lru_cache(maxsize=256)
def _layer_norm_ms(backward: bool, rows: int, columns: int, parameters: int, dtype: str) -> float:
    import rooftop.kernels  # noqa: F401  (registers torch.ops.rooftop)

    kind = getattr(torch, dtype)
    x = torch.randn(rows, columns, device="cuda", dtype=kind)
    weight = torch.randn(columns, device="cuda", dtype=kind) if parameters > 0 else None
    bias = torch.randn(columns, device="cuda", dtype=kind) if parameters > 1 else None
    operators = torch.ops.rooftop
    with torch.no_grad(), torch.random.fork_rng(["cuda"]):
        if not backward:
            return measure(
                lambda: operators.layer_norm(x, weight, bias, 1e-5), device="cuda", seconds=SECONDS, graph=True
            ).median_ms
        dy = torch.randn_like(x)
        _, mean, rstd = operators.layer_norm(x, weight, bias, 1e-5)
        mask = [weight is not None, bias is not None]
        return measure(
            lambda: operators.layer_norm_backward(dy, x, weight, bias, mean, rstd, mask),
            device="cuda",
            seconds=SECONDS,
            graph=True,
        ).median_ms
