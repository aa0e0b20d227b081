"""Names of the special methods of objects that stand for a tensor in a model's forward."""

from __future__ import annotations

# Methods that Python looks up in the type of a tensor, except the methods for sums, which each class defines itself.
SPECIAL_METHODS = (
    "__neg__", "__pos__", "__abs__", "__sub__", "__rsub__", "__isub__", "__mul__", "__rmul__", "__imul__",
    "__truediv__", "__rtruediv__", "__itruediv__", "__floordiv__", "__rfloordiv__", "__mod__", "__rmod__", "__pow__",
    "__rpow__", "__ipow__", "__matmul__", "__rmatmul__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__",
    "__getitem__", "__setitem__", "__len__", "__iter__", "__contains__", "__bool__", "__array__", "__deepcopy__",
)  # fmt: skip
