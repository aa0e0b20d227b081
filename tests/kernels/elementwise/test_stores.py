"""Expressions stored into existing memory: strided results, repeating operands, float64, one kernel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rooftop.kernels.elementwise.stores import row_of, store_fused
from rooftop.launch import INTERPRETED
from rooftop.launch.triton_launch import count_launches

pytest.importorskip("triton")
launches = pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="kernels run on a GPU")
DEVICE = "cpu" if INTERPRETED else "cuda"


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 9).to(
        DEVICE, dtype
    )


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreted run")
def test_kernels_on_the_cpu(interpreted: Callable[..., int]) -> None:
    assert interpreted(__file__) == 49


def test_what_repeats_runs_along_the_innermost_dimension() -> None:
    out = torch.empty(6, 4, dtype=torch.float32).t()  # (4, 6)
    with pytest.raises(ValueError, match="with rows, the last dimension of out must have the smallest stride"):
        store_fused("tt: float32(a0 + a1)", [torch.ones(4, 6)], [], out, [row_of((1, 1, 1), torch.float32)])


@launches
@pytest.mark.parametrize("columns", [slice(0, 40), slice(3, 20), slice(7, 8)])
def test_regions_are_written_and_nothing_beside_them(columns: slice) -> None:
    a, b = drawn(9, 40), drawn(40, 9, seed=1).t()
    whole = torch.full((9, 40), 7.0, dtype=torch.float64, device=DEVICE)
    expected = whole.clone()
    with count_launches() as counted:
        store_fused(
            "ttn: a0 * (float64(a2) + 0.0) + a1 / 3", [a[2:8, columns], b[2:8, columns]], [0.5], whole[2:8, columns]
        )
    assert sum(counted.values()) == 1
    expected[2:8, columns] = a[2:8, columns] * 0.5 + b[2:8, columns] / 3
    assert torch.equal(whole, expected)


@launches
@pytest.mark.parametrize("begins", [(0, 0, 0), (8, 8, 8), (16, 4, 8), (1, 2, 3), (0, 0, 5), (13, 0, 0)])
@pytest.mark.parametrize("columns", [5, 40, 2100])
def test_regions_begin_anywhere(begins: tuple[int, int, int], columns: int) -> None:
    """Short and long rows, operands of several widths, and a single row."""
    x, y = (drawn(4, columns + 16, seed=n) for n in range(2))
    bytes_, numbers = (x.abs().clamp(0, 200)).to(torch.uint8), y.float()
    whole = torch.full((4, columns + 16), 7.0, device=DEVICE)
    expected = whole.clone()
    for rows in (slice(0, 4), slice(2, 3)):
        a, b, out, wanted = (
            each[rows, begin : begin + columns]
            for each, begin in zip((bytes_, numbers, whole, expected), (*begins, begins[2]), strict=True)
        )
        with count_launches() as counted:
            store_fused("tt: float32(a0) + a1", [a, b], [], out)
        assert sum(counted.values()) == 1
        wanted.copy_(a.float() + b)
        assert torch.equal(whole, expected)


@launches
def test_launches_are_found_again_by_how_tensors_lie() -> None:
    """The same expression is stored for tensors with various layouts, each of them twice."""
    x = drawn(6, 50, dtype=torch.float32)
    for _ in range(2):
        for given in (x, x[1:4], x[:, 3:40], x[:, 4:40], x[::2], x.t(), x[0], x[0, 3:7]):
            out = torch.empty(given.shape, device=DEVICE)
            for number in (2.0, 3.0):
                store_fused("tn: a0 * a1", [given], [number], out)
                assert torch.equal(out, given * number)


@launches
def test_float64_is_rounded_after_each_operation() -> None:
    a, b, c = (drawn(5000, seed=n) for n in range(3))
    out = torch.empty_like(a)
    store_fused("ttt: a0 * a1 + a2 / a0", [a, b, c], [], out)
    assert torch.equal(out, a * b + c / a)


@launches
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.uint8])
@pytest.mark.parametrize("channels", [1, 2, 3, 7])
def test_numbers_that_repeat_along_the_last_dimension(channels: int, dtype: torch.dtype) -> None:
    """Stores to a whole tensor, a region, a region of one short row, and tiles of short rows."""
    x = drawn(5, 1400, channels, dtype=torch.float32)
    numbers = [1.0, 20.0, 200.0, -0.0 if dtype.is_floating_point else 0, 5.0, 6.0, 7.0][:channels]
    program = "tt: float32(a0) / float32(a1)"
    for given in (x, x[1:4, 5:900], x[2:3, 1:4], x[:, 3:20]):
        out = torch.empty_like(x)[: given.shape[0], : given.shape[1]]
        store_fused(program, [given], [], out, [row_of(numbers, dtype)])
        assert torch.equal(out, given / torch.tensor(numbers, device=DEVICE))


@launches
def test_zeros_of_both_signs_are_different_rows() -> None:
    x, out = torch.ones(2, 2, device=DEVICE), torch.empty(2, 2, device=DEVICE)
    for zero in (0.0, -0.0):
        store_fused("tt: a0 * a1", [x], [], out, [row_of((zero, 1.0), torch.float32)])
        assert torch.equal(out.signbit(), torch.tensor([[zero.hex()[0] == "-", False]] * 2, device=DEVICE))


@launches
def test_dimensions_that_do_not_merge() -> None:
    x = drawn(4, 4, 4, 4, 4, 4, 4)[tuple([slice(0, 3)] * 7)]
    out = torch.zeros((4,) * 7, dtype=torch.float64, device=DEVICE)[tuple([slice(1, 4)] * 7)]
    store_fused("t: a0 + 1", [x], [], out)
    assert torch.equal(out, x + 1)


@launches
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_every_integer_of_32_bits_is_the_same_in_float64(dtype: torch.dtype) -> None:
    limits = torch.iinfo(dtype)
    few = torch.linspace(limits.min, limits.max, 1000, dtype=torch.float64).to(torch.int64)
    x = torch.cat([few, torch.tensor([limits.min, limits.max, limits.max // 2, 0, 1, 2])]).to(DEVICE, dtype)
    out = torch.empty(x.shape, dtype=torch.float64, device=DEVICE)
    store_fused("t: float64(a0)", [x], [], out)
    assert torch.equal(out.view(torch.int64), x.double().view(torch.int64))  # zero has no sign


@launches
@pytest.mark.parametrize(("dtype", "reach"), [(torch.float32, 22), (torch.float64, 51)])
def test_nearest_integers_as_far_as_they_reach(dtype: torch.dtype, reach: int) -> None:
    """Halves are rounded to even, zeros keep their sign, and beyond 31 bits the lower 32 bits count."""
    edges = [sign * 2.0**n + more for n in range(reach) for sign in (1, -1) for more in (-1, -0.5, 0, 0.5, 1.5)]
    near = torch.nextafter(torch.tensor(0.5, dtype=dtype), torch.tensor([0.0, 1.0], dtype=dtype))
    x = torch.cat([torch.tensor([*edges, -0.0, 2.0**reach, -(2.0**reach)], dtype=dtype), near, -near]).to(DEVICE)
    out = torch.empty(x.shape, dtype=torch.int32, device=DEVICE)
    with count_launches() as counted:
        store_fused("t: nearest(a0)", [x], [], out)
    assert counted == {"store_nearest": 1}
    assert torch.equal(out, x.round().to(torch.int64).to(torch.int32))


@launches
def test_numbers_of_float64_by_their_bits() -> None:
    x = drawn(100)
    for number in (0.3, -0.0, 1e300, float("inf"), 5e-324):
        out = torch.empty_like(x)
        bits = torch.tensor(number, dtype=torch.float64).view(torch.int64).item()
        store_fused("tn: a0 * float64_of_bits(a1)", [x], [int(bits)], out)
        assert torch.equal(out.view(torch.int64), (x * number).view(torch.int64))


@launches
def test_what_is_refused() -> None:
    x = drawn(4)
    with pytest.raises(TypeError, match="the result has dtype"):
        store_fused("t: a0 + 1", [x], [], x.float())
    with pytest.raises(TypeError, match="exp is not computed in float64"):
        store_fused("t: exp(a0)", [x], [], x)
    with pytest.raises(TypeError, match="nearest needs a floating point dtype"):
        store_fused("t: nearest(a0)", [x.int()], [], x.int())
    with pytest.raises(TypeError, match="float64_of_bits needs int64"):
        store_fused("tn: a0 * float64_of_bits(a1)", [x], [0.5], x)
    with pytest.raises(ValueError, match="does not take"):
        store_fused("tt: a0 + a1", [x], [], x)


@launches
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_of_zeros_a_negative_has_the_other_sign(dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, -0.0, 1.0, float("inf")], dtype=dtype, device=DEVICE)
    out = torch.empty_like(x)
    store_fused("t: -a0", [x], [], out)
    assert torch.equal(out.signbit(), (-x).signbit())
    store_fused("t: 1.0 / -a0", [x], [], out)
    assert torch.equal(out, 1.0 / -x)
