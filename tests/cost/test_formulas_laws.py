"""Laws that costs obey for all shapes."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftop.cost import Cost, CountingMode

sizes = st.integers(1, 9)
shapes = st.lists(sizes, min_size=2, max_size=4)

UNARY: list[Callable[[Tensor], Tensor]] = [F.relu, F.gelu, torch.exp, lambda t: t * 2, lambda t: t + t]
unary = st.sampled_from(UNARY)


def cost(run: Callable[[], object]) -> Cost:
    """The total cost of a program, all of whose operators must have a formula."""
    with CountingMode() as counted:
        run()
    total = Cost()
    for record in counted.records:
        assert record.cost is not None, f"{record.name}: {record.uncovered}"
        total = total + record.cost
    return total


@given(shapes, unary, st.randoms())
def test_a_transposed_tensor_costs_as_much(shape: list[int], operator: Callable[[Tensor], Tensor], random) -> None:
    source = torch.rand(shape)
    order = random.sample(range(len(shape)), len(shape))
    assert cost(lambda: operator(source.permute(order))) == cost(lambda: operator(source))


@given(shapes, unary, sizes)
def test_expanding_adds_no_bytes_to_read(shape: list[int], operator: Callable[[Tensor], Tensor], times: int) -> None:
    source = torch.rand(shape)
    expanded = source.expand(times, *shape)
    assert cost(lambda: operator(expanded)).read_bytes == cost(lambda: operator(source)).read_bytes


@given(shapes)
def test_the_same_tensor_twice_is_read_once(shape: list[int]) -> None:
    source, other = torch.rand(shape), torch.rand(shape)
    assert 2 * cost(lambda: source * source).read_bytes == cost(lambda: source * other).read_bytes


@given(shapes, unary)
def test_a_skipping_view_reads_what_it_shows(shape: list[int], operator: Callable[[Tensor], Tensor]) -> None:
    source = torch.rand(shape[0] * 3, *shape[1:])
    assert cost(lambda: operator(source[::3])).read_bytes == source[::3].numel() * 4


BATCHED: dict[str, Callable[[int], object]] = {
    "linear": lambda n: F.linear(torch.rand(n, 8), torch.rand(4, 8), torch.rand(4)),
    "convolution": lambda n: F.conv2d(torch.rand(n, 3, 8, 8), torch.rand(4, 3, 3, 3), stride=2),
    "max_pool": lambda n: F.max_pool2d(torch.rand(n, 3, 8, 8), 2),
    "layer_norm": lambda n: F.layer_norm(torch.rand(n, 8), (8,), torch.rand(8)),
    "batch_norm": lambda n: F.batch_norm(torch.rand(n, 3, 4), torch.zeros(3), torch.ones(3), training=True),
    "attention": lambda n: F.scaled_dot_product_attention(*(torch.rand(n, 2, 5, 8) for _ in range(3)), is_causal=True),
    "embedding": lambda n: F.embedding(torch.zeros(n, 4, dtype=torch.int64), torch.rand(10, 8)),
    "cross_entropy": lambda n: F.cross_entropy(torch.rand(n, 7), torch.zeros(n, dtype=torch.int64)),
    "sort": lambda n: torch.rand(n, 16).sort(),
    "resize": lambda n: F.interpolate(torch.rand(n, 3, 4, 4), scale_factor=2, mode="bilinear"),
}


@settings(deadline=None)
@given(st.sampled_from(sorted(BATCHED)), sizes)
def test_twice_the_batch_costs_at_most_twice(program: str, batch: int) -> None:
    once, twice = cost(lambda: BATCHED[program](batch)), cost(lambda: BATCHED[program](2 * batch))
    assert once.bytes < twice.bytes <= 2 * once.bytes
    assert once.total_flops <= twice.total_flops <= 2 * once.total_flops


@given(sizes, sizes, sizes)
def test_the_backward_of_a_product_is_two_products(m: int, k: int, n: int) -> None:
    left, right = torch.rand(m, k, requires_grad=True), torch.rand(k, n, requires_grad=True)
    out = left @ right
    gradient = torch.ones(m, n)
    assert cost(lambda: out.backward(gradient)).flops == {"fp32": 2 * 2 * m * k * n}


@settings(deadline=None)
@given(sizes, sizes, st.integers(4, 9), st.integers(1, 3), st.integers(1, 3), st.integers(0, 1))
def test_the_backward_of_a_convolution_is_two_convolutions(
    channels: int, filters: int, size: int, kernel: int, stride: int, padding: int
) -> None:
    source = torch.rand(2, channels, size, size, requires_grad=True)
    weight = torch.rand(filters, channels, kernel, kernel, requires_grad=True)
    forward = cost(lambda: F.conv2d(source, weight, stride=stride, padding=padding))
    out = F.conv2d(source, weight, stride=stride, padding=padding)
    gradient = torch.ones_like(out)
    assert cost(lambda: out.backward(gradient)).flops == {"fp32": 2 * forward.flops["fp32"]}


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 4), st.integers(0, 3), st.integers(1, 3))
def test_a_convolution_reads_what_influences_it(
    size: int, kernel: int, stride: int, padding: int, dilation: int
) -> None:
    """The input elements counted are those that have a gradient."""
    if size + 2 * padding < dilation * (kernel - 1) + 1:
        return
    source = torch.rand(1, 1, size, requires_grad=True)
    weight = torch.ones(1, 1, kernel)
    options = {"stride": stride, "padding": padding, "dilation": dilation}
    F.conv1d(source, weight, **options).sum().backward()
    assert source.grad is not None
    touched = int((source.grad != 0).sum())
    assert cost(lambda: F.conv1d(source.detach(), weight, **options)).read_bytes == (touched + kernel) * 4


@given(st.integers(1, 12), st.integers(1, 12), st.integers(-13, 13))
def test_triangles_read_what_they_keep(rows: int, columns: int, diagonal: int) -> None:
    ones = torch.ones(rows, columns)
    for triangle in (torch.tril, torch.triu):
        kept = int(triangle(ones, diagonal).sum())
        assert cost(lambda triangle=triangle: triangle(ones, diagonal)).read_bytes == kept * 4


@given(sizes, sizes)
def test_a_causal_mask_and_its_complement_see_every_pair_once(queries: int, keys: int) -> None:
    from rooftop.cost.formulas.attentions import visible_pairs

    visible = torch.ones(queries, keys, dtype=torch.bool).tril()
    assert visible_pairs(queries, keys, True) == int(visible.sum())
    assert visible_pairs(queries, keys, False) == queries * keys
