"""Cost of reductions, scans and distances: the input is read once, with some flops per input element and some per
result.

A sum of n elements counts n additions. A variance counts, for each element, 1 flop for the mean and 3 flops for the
squared deviation.
"""

from __future__ import annotations

from math import prod

from torch import Tensor

from rooftop.cost.accounting import Call, Cost, tensor_bytes
from rooftop.cost.formulas.matmuls import matrix_flops, merged
from rooftop.cost.formulas.streaming import Flops, arithmetic, aten, cover, moved_once, streaming
from rooftop.cost.registry import cost_of

# operator: (flops per input element, flops per result)
REDUCTIONS: dict[str, tuple[int, int]] = {
    "_aminmax": (2, 0),
    "_foreach_max": (1, 0),
    "_foreach_norm": (2, 1),
    "_foreach_powsum": (2, 0),
    "_is_all_true": (1, 0),
    "_is_any_true": (1, 0),
    "all": (1, 0),
    "amax": (1, 0),
    "amin": (1, 0),
    "aminmax": (2, 0),
    "any": (1, 0),
    "argmax": (1, 0),
    "argmin": (1, 0),
    "bincount": (1, 0),
    "count_nonzero": (1, 0),
    "dist": (3, 1),
    "hash_tensor": (1, 0),
    "histc": (2, 0),
    "linalg__powsum": (2, 0),
    "linalg_vector_norm": (2, 1),
    "logsumexp": (4, 2),  # max, subtract, exp, add; log, add
    "max": (1, 0),
    "mean": (1, 1),
    "min": (1, 0),
    "nansum": (2, 0),
    "native_norm": (2, 1),
    "norm": (2, 1),
    "prod": (1, 0),
    "std": (4, 3),
    "std_mean": (4, 3),
    "sum": (1, 0),
    "var": (4, 2),
    "var_mean": (4, 2),
}

for _name, (_per_input, _per_result) in REDUCTIONS.items():
    cost_of(f"aten::{_name}")(streaming(_per_input, per="self", and_per_result=_per_result))

SCANS: dict[str, Flops] = {
    "_cummax_helper": 1,
    "_cummin_helper": 1,
    "cummax": 1,
    "cummin": 1,
    "cumprod": 1,
    "cumsum": 1,
    "logcumsumexp": 4,
}
cover(SCANS, lambda flops: streaming(flops, per="self"))

# Comparisons of whole tensors return a Python bool, so flops are counted per element of `self`.
cover({"allclose": 4, "equal": 1}, lambda flops: streaming(flops, per="self"))


@cost_of("aten::_local_scalar_dense")
def item(call: Call) -> Cost:
    """`.item()`: the host reads one element."""
    return Cost(call["self"].element_size(), 0)


@cost_of("aten::_assert_async", "aten::_functional_assert_async")
def assertion(call: Call) -> Cost:
    """The assertion reads one truth value."""
    return Cost(tensor_bytes(call["self"]), 0)


@cost_of("aten::trace")
def trace(call: Call) -> Cost:
    """A trace reads and adds only the diagonal."""
    diagonal = min(call["self"].shape)
    return Cost(diagonal * call["self"].element_size(), tensor_bytes(call.out), arithmetic(diagonal, [call.out]))


@cost_of("aten::_euclidean_dist")
def euclidean_distances(call: Call) -> Cost:
    """Cost of the distances of all pairs of rows by |x|² + |y|² - 2 x·y: a matrix product, and a few more flops."""
    left, right = call["x1"], call["x2"]  # (..., m, d), (..., n, d)
    # |x|² and |y|²: a square and a sum for each element; for each distance: two sums, a scale, a root
    pointwise = 2 * (left.numel() + right.numel()) + 4 * call.out.numel()
    flops = merged(matrix_flops(left, call.out.numel() * left.shape[-1]), arithmetic(pointwise, [left]))
    return moved_once(call, flops)


@cost_of("aten::_pdist_forward")
def pair_distances(call: Call) -> Cost:
    """Cost of the distances of all pairs of different rows, each pair counted once: subtract, power, add for each
    coordinate, and a root."""
    points: Tensor = call["self"]
    flops = call.out.numel() * (3 * points.shape[-1] + 1)
    return Cost(tensor_bytes(points), tensor_bytes(call.out), arithmetic(flops, [points]))


@cost_of("aten::_pdist_backward")
def pair_distances_backward(call: Call) -> Cost:
    """For each pair and coordinate, backward subtracts, scales, and adds to the gradients of both rows."""
    flops = 4 * call["pdist"].numel() * call["self"].shape[-1]
    return moved_once(call, arithmetic(flops, call.read_tensors))


@cost_of("aten::renorm")
def renorm(call: Call) -> Cost:
    """The operator computes the norm of each slice (2 flops for each element), and scales the slice."""
    return streaming(3, per="self")(call)


@cost_of("aten::_cdist_forward")
def cdist(call: Call) -> Cost:
    """Cost of distances between all pairs of rows: subtract, power, add for each coordinate, and a root."""
    flops = call.out.numel() * (3 * call["x1"].shape[-1] + 1)
    return moved_once(call, arithmetic(flops, call.read_tensors))


@cost_of("aten::_cdist_backward")
def cdist_backward(call: Call) -> Cost:
    """Cost of the gradient of the first operand: subtract, scale and add for each pair and coordinate."""
    flops = 3 * prod(call["cdist"].shape) * call["x1"].shape[-1]
    return moved_once(call, arithmetic(flops, call.read_tensors))


cost_of(*aten("linalg_cross"))(streaming(3))
