"""The cost of work, independent of its implementation: the bytes that must be moved, the flops that must be done, and
the roof that follows from both.
"""

from rooftop.cost.accounting import (
    FREE,
    Call,
    Cost,
    counted_for,
    distinct_bytes,
    matrix_precision,
    precision_of,
    tensor_bytes,
)
from rooftop.cost.counting import CallSpec, CountingMode, Record, TensorSpec
from rooftop.cost.lookup import covered_operators
from rooftop.cost.registry import cost_of
from rooftop.cost.roofs import Roof, raise_ceilings, roof

__all__ = [
    "FREE",
    "Call",
    "CallSpec",
    "Cost",
    "CountingMode",
    "Record",
    "Roof",
    "TensorSpec",
    "cost_of",
    "counted_for",
    "covered_operators",
    "distinct_bytes",
    "matrix_precision",
    "precision_of",
    "raise_ceilings",
    "roof",
    "tensor_bytes",
]
