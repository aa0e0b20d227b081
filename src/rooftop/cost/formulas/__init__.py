"""Formulas for the operators of aten, a file for each family; importing this package registers them all.

Each formula follows the operator's definition, not an implementation; tests check them against counts done by hand.
"""

from rooftop.cost.formulas import (
    attentions,
    convolutions,
    elementwise,
    indexing,
    interpolation,
    losses,
    matmuls,
    metadata,
    movement,
    norms,
    optimizers,
    ordering,
    pooling,
    prims,
    random_numbers,
    recurrent,
    reductions,
    softmaxes,
    transforms,
)

__all__ = [
    "attentions",
    "convolutions",
    "elementwise",
    "indexing",
    "interpolation",
    "losses",
    "matmuls",
    "metadata",
    "movement",
    "norms",
    "optimizers",
    "ordering",
    "pooling",
    "prims",
    "random_numbers",
    "recurrent",
    "reductions",
    "softmaxes",
    "transforms",
]
