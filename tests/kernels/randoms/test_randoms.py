"""Random numbers and dropout, both ways: the CPU implementation, and (in a separate process) the Triton kernels
interpreted. The distributions are those of `test_random_words.py`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rooftop.cost import CountingMode
from rooftop.kernels import Box, counter_dropout, random_key, random_normal, random_uniform
from rooftop.kernels.randoms import randoms
from rooftop.kernels.randoms.words import words_reference
from rooftop.launch import INTERPRETED, count_launches

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
KEY = random_key(7, "weight")
BOXES = {
    "whole": Box.whole((5, 7)),
    "columns": Box.shard((64, 32), 1, 1, 4),
    "heads": Box.shard((3, 8, 4, 6), 1, 1, 2),
    "zigzag": Box.zigzag((2, 32, 5), 1, 1, 4),
    "spread": Box((6, 7, 5, 9), (1, 2, 0, 1), (4, 3, 2, 7), (1, 2, 3, 1)),
    "far": Box((1 << 40,), (1 << 35,), (100,)),
    "nothing": Box((4, 6), (0, 0), (4, 0)),
    "several programs": Box((9, 1200), (2, 100), (5, 1044)),
}
KINDS: dict[str, Callable[..., Tensor]] = {
    "uniform": lambda box, **more: random_uniform(box, KEY, low=-0.7, high=1.3, step=1 << 40, **more),
    "normal": lambda box, **more: random_normal(box, KEY, mean=0.3, std=1.7, step=3, **more),
    "truncated": lambda box, **more: random_normal(box, KEY, mean=0.3, std=1.7, low=-1, high=2.5, **more),
}


def ramp(box: Box, dtype: torch.dtype) -> Tensor:
    return torch.linspace(-3, 3, math.prod(box.size)).to(dtype).view(box.size)


def rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 as kernels store it: Triton's interpreter truncates to bfloat16, a GPU rounds."""
    if dtype == torch.bfloat16 and INTERPRETED:
        return (value.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    return value.to(dtype)


def assert_the_same_bits(box: Box, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers, dropout and its gradient have the bits that the CPU computes."""
    x, kernels = ramp(box, dtype), (INTERPRETED or device == "cuda") and dtype != torch.float64 and 0 not in box.size
    with count_launches() as launches:
        found = [make(box, dtype=dtype, device=device) for make in KINDS.values()]
        leaf = x.to(device).requires_grad_()
        y = counter_dropout(leaf, 0.3, KEY, step=5, box=box)
        found += [y.detach(), *torch.autograd.grad(y, leaf, x.to(device) + 1)]
    assert launches == ({"random_fill": 3, "dropout_tile": 2} if kernels else {})
    with monkeypatch.context() as patch:
        patch.setattr(randoms, "_by_reference", lambda dtype, device: True)
        if dtype == torch.bfloat16 and INTERPRETED:
            expected = [make(box) for make in KINDS.values()]
            expected[0] = expected[0].clamp(max=randoms._below(1.3, dtype))
            expected += [counter_dropout(t.float(), 0.3, KEY, step=5, box=box) for t in (x, x + 1)]
        else:
            expected = [make(box, dtype=dtype) for make in KINDS.values()]
            expected += [counter_dropout(t, 0.3, KEY, step=5, box=box) for t in (x, x + 1)]
    for ours, right in zip(found, expected, strict=True):
        assert torch.equal(ours.cpu(), rounded(right, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BOXES)
def test_the_same_bits_from_kernels(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_the_same_bits(BOXES[name], dtype, "cpu", monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BOXES)
def test_the_same_bits_on_a_gpu(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_the_same_bits(BOXES[name], dtype, "cuda", monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_millions_of_the_same_bits_on_a_gpu(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """All octaves of the normal distribution, odd and even rows."""
    for box in (Box.whole((3, 1 << 20)), Box.whole((1001, 1023)), Box.shard((512, 4096), 1, 3, 8)):
        assert_the_same_bits(box, dtype, "cuda", monkeypatch)


@pytest.mark.gpu
@pytest.mark.large
def test_more_than_two_billion_elements_on_a_gpu() -> None:
    count = (1 << 31) + 24
    numbers = random_normal((count,), KEY, dtype=torch.bfloat16, device="cuda")
    kept = counter_dropout(torch.ones_like(numbers), 0.5, KEY)
    for start in (0, (1 << 31) - 8, count - 8):
        box = Box((count,), (start,), (8,))
        assert torch.equal(numbers[start : start + 8].cpu(), random_normal(box, KEY, dtype=torch.bfloat16))
        ones = torch.ones(8, dtype=torch.bfloat16)
        assert torch.equal(kept[start : start + 8].cpu(), counter_dropout(ones, 0.5, KEY, box=box))


@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from([*KINDS, "dropout"]),
    data=st.data(),
)
@settings(max_examples=40 if INTERPRETED else 150, deadline=None)
def test_a_part_has_what_the_whole_has_there(
    shape: list[int], dtype: torch.dtype, kind: str, data: st.DataObject
) -> None:
    starts = [data.draw(st.integers(0, extent - 1)) for extent in shape]
    paces = [data.draw(st.integers(1, 3)) for _ in shape]
    sizes = [
        data.draw(st.integers(0, 1 + (extent - 1 - start) // pace))
        for extent, start, pace in zip(shape, starts, paces, strict=True)
    ]
    box, whole = Box(tuple(shape), tuple(starts), tuple(sizes), tuple(paces)), Box.whole(shape)
    if kind == "dropout":
        x = ramp(whole, dtype)
        found = counter_dropout(box.of(x), 0.4, KEY, box=box)
        expected = counter_dropout(x, 0.4, KEY)
    else:
        found, expected = (KINDS[kind](each, dtype=dtype) for each in (box, whole))
    assert torch.equal(found, box.of(expected))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_other_dtypes_have_the_numbers_of_float32(dtype: torch.dtype) -> None:
    for kind in ("normal", "truncated"):
        plain = KINDS[kind]((400,))
        assert torch.equal(KINDS[kind]((400,), dtype=dtype), rounded(plain, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-1.0, 0.0), (-2.0, -1.0), (0.3, 0.7), (1.0, 1.02)])
def test_uniform_numbers_are_below_the_upper_bound(low: float, high: float, dtype: torch.dtype) -> None:
    numbers = random_uniform((4096,), KEY, low=low, high=high, dtype=dtype)
    assert numbers.double().max() < high
    least = low if dtype == torch.float64 else float(rounded(torch.tensor([low]), dtype))
    assert numbers.double().min() >= least
    assert len(numbers.unique()) > 2


def test_dropout_is_where_the_words_are_small() -> None:
    x = torch.randn(7, 11)
    x[0, 0], x[3, 4] = math.nan, math.inf
    words = words_reference(torch.arange(77), KEY, 9).view(7, 11)
    y = counter_dropout(x, 0.25, KEY, step=9)
    assert torch.equal(y == 0, words < 1 << 30)
    kept = y != 0
    torch.testing.assert_close(y[kept], x[kept] * (4 / 3), equal_nan=True)
    assert torch.equal(counter_dropout(x, 0.0, KEY).nan_to_num(), x.nan_to_num())
    assert torch.equal(counter_dropout(x, 1.0, KEY), torch.zeros(7, 11))


def test_views_with_any_strides() -> None:
    base = torch.randn(12, 10)
    for view in (base[::2], base.t(), base[:, 1::3], base[:1].expand(7, 10)):
        assert torch.equal(counter_dropout(view, 0.5, KEY), counter_dropout(view.contiguous(), 0.5, KEY))
    x = base.clone().requires_grad_()
    counter_dropout(x, 0.5, KEY).sum().backward()  # an expanded gradient: all strides 0
    assert torch.equal(x.grad, counter_dropout(torch.ones(12, 10), 0.5, KEY))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("step", [0, 5, (1 << 31) + 7, (1 << 63) - 1])
def test_a_step_in_a_tensor_drops_the_same(step: int, dtype: torch.dtype) -> None:
    for name in ("whole", "columns", "nothing", "several programs"):
        x, box = ramp(BOXES[name], dtype).requires_grad_(), BOXES[name]
        found = counter_dropout(x, 0.3, KEY, step=torch.tensor(step), box=box)
        expected = counter_dropout(x, 0.3, KEY, step=step, box=box)
        assert torch.equal(found, expected)
        assert torch.equal(*(torch.autograd.grad(y, x, torch.ones_like(y))[0] for y in (found, expected)))


def test_a_step_that_changes_before_backward_is_found() -> None:
    x, step = torch.randn(6, 8, requires_grad=True), torch.tensor(3)
    y = counter_dropout(x, 0.5, KEY, step=step)
    step += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_replay_of_a_graph_drops_by_its_step(dtype: torch.dtype) -> None:
    x, step = torch.randn(64, 48, dtype=dtype, device="cuda"), torch.zeros((), dtype=torch.int64, device="cuda")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        counter_dropout(x, 0.5, KEY, step=step)
    with torch.cuda.graph(graph, stream=stream):
        y = counter_dropout(x, 0.5, KEY, step=step)
    for number in (3, 1 << 40):
        step.fill_(number)
        graph.replay()
        assert torch.equal(y, counter_dropout(x, 0.5, KEY, step=number))


def test_forward_computed_again_drops_the_same() -> None:
    x = torch.randn(6, 8, requires_grad=True)

    def block(x: Tensor) -> Tensor:
        return counter_dropout(x.sin(), 0.5, KEY, step=2).square()

    (plain,) = torch.autograd.grad(block(x).sum(), x)
    (again,) = torch.autograd.grad(checkpoint(block, x, use_reentrant=False, preserve_rng_state=False).sum(), x)
    assert torch.equal(plain, again)


def test_gradients_against_finite_differences() -> None:
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    box = Box.shard((4, 10), 1, 1, 2)
    assert torch.autograd.gradcheck(lambda x: counter_dropout(x, 0.4, KEY, step=3, box=box), x)
    assert torch.autograd.gradgradcheck(lambda x: counter_dropout(x, 0.4, KEY, step=3, box=box) ** 2, x)


def test_forward_mode_is_refused() -> None:
    x = torch.randn(4)
    with pytest.raises(NotImplementedError, match="no forward-mode derivative: use x \\* counter_dropout"):
        torch.func.jvp(lambda x: counter_dropout(x, 0.5, KEY), (x,), (x,))


def test_operator_checks_of_torch_library() -> None:
    sizes, strides, offset = BOXES["columns"].index_map()
    place = (sizes, strides, offset, KEY, 1)
    x = torch.randn(64, 8, requires_grad=True)
    for there in (None, torch.tensor(1)):
        operands = (x, 0.5, KEY, 1, sizes, strides, offset, there)
        torch.library.opcheck(torch.ops.rooftop.counter_dropout.default, operands)
    end = (torch.float32, torch.device("cpu"))
    torch.library.opcheck(torch.ops.rooftop.random_uniform.default, (*place, 0.0, 1.0, *end))
    torch.library.opcheck(torch.ops.rooftop.random_normal.default, (*place, 0.0, 1.0, -2.0, 2.0, *end))


def test_compiled_whole() -> None:
    box = BOXES["columns"]

    def both(x: Tensor, step: int) -> Tensor:
        return counter_dropout(x, 0.5, KEY, step=step, box=box) + random_normal(box, KEY, step=step, low=-1.0)

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    x = torch.randn(64, 8, requires_grad=True)
    for step in (1, 2, 3):
        y = compiled(x, step)
        assert torch.equal(y, both(x, step))
        assert torch.equal(*(torch.autograd.grad(each.sum(), x)[0] for each in (y, both(x, step))))


def test_compiled_once_for_all_steps_in_a_tensor() -> None:
    compiled = torch.compile(
        lambda x, step: counter_dropout(x, 0.5, KEY, step=step) + 1, fullgraph=True, backend="aot_eager"
    )
    x = torch.randn(64, 8)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in (1, 2, 3):
            assert torch.equal(compiled(x, torch.tensor(step)), counter_dropout(x, 0.5, KEY, step=step) + 1)


def test_on_meta_there_are_shapes() -> None:
    for make in (random_normal, random_uniform):
        assert make((1 << 20, 1 << 20), KEY, device="meta").shape == (1 << 20, 1 << 20)


def test_cost_is_what_a_person_counts() -> None:
    x = torch.ones(10, 40, requires_grad=True)
    with CountingMode() as counted:
        counter_dropout(x, 0.5, KEY).backward(torch.ones(10, 40))
        random_normal((5, 6), KEY)
    costs = [r.cost for r in counted.records if r.name.startswith("rooftop::")]
    assert [(c.total_flops, c.read_bytes, c.write_bytes) for c in costs if c] == [
        *[(400, 1600, 1600)] * 2,
        (60, 0, 120),
    ]


def test_numbers_and_sizes_of_numpy() -> None:
    shape, half = tuple(np.array([2, 3])), np.float32(0.5)
    assert torch.equal(random_uniform(shape, 7, low=half), random_uniform((2, 3), 7, low=0.5))
    assert torch.equal(random_uniform(shape, 7, high=np.int64(2)), random_uniform((2, 3), 7, high=2.0))
    assert torch.equal(random_normal(shape, 7, mean=half, std=half), random_normal((2, 3), 7, mean=0.5, std=0.5))
    low, high = np.float32(-1), np.float32(1)
    assert torch.equal(random_normal(shape, 7, low=low, high=high), random_normal((2, 3), 7, low=-1.0, high=1.0))
    x = torch.ones(4, 8)
    assert torch.equal(counter_dropout(x, half, 7), counter_dropout(x, 0.5, 7))  # type: ignore[arg-type]
    sizes: Any = (torch.tensor(2), 3)
    assert torch.equal(random_normal(sizes, 7), random_normal((2, 3), 7))


FIVE = Box((4,) * 5, (1,) * 5, (2,) * 5)
X = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: random_normal(3, 0), TypeError, "random_normal: box must be a Box or a shape, got int"),  # type: ignore[arg-type]
        (lambda: random_normal((3,), "a"), TypeError, "random_normal: key must be an int, got str"),  # type: ignore[arg-type]
        (lambda: random_normal((3,), 1 << 63), ValueError, "key must be from"),
        (lambda: random_uniform((3,), 0, step=-1), ValueError, "random_uniform: step must be from 0"),
        (lambda: random_uniform((3,), 0, dtype=torch.int32), TypeError, "dtype must be bfloat16"),
        (lambda: random_uniform((3,), 0, low=1, high=1), ValueError, "low must be below high"),
        (lambda: random_uniform((3,), 0, high=math.inf), ValueError, "high must be finite, got inf"),
        (lambda: random_normal((3,), 0, std=-1.0), ValueError, "std must not be negative, got -1.0"),
        (lambda: random_normal((3,), 0, mean=math.nan), ValueError, "mean must be finite, got nan"),
        (lambda: random_uniform((3,), 0, low="0"), TypeError, "random_uniform: low must be a number, got str"),  # type: ignore[arg-type]
        (lambda: random_normal((3,), 0, high=None), TypeError, "random_normal: high must be a number, got NoneType"),  # type: ignore[arg-type]
        (lambda: random_normal((2.5,), 0), TypeError, r"the sizes of box must be ints, got \(2.5,\)"),  # type: ignore[arg-type]
        (
            lambda: random_normal((3,), 0, low=5.0),
            ValueError,
            "a normal distribution with mean 0.0 and std 1.0 has almost no values between 5.0",
        ),
        (lambda: random_normal((3,), 0, low=1.0, high=0.0), ValueError, "low must be below high, got 1.0 and 0.0"),
        (lambda: random_uniform((2, -3), 0), ValueError, r"sizes of box must not be negative, got \(2, -3\)"),
        (
            lambda: random_normal(FIVE, 0),
            ValueError,
            "5 dimensions after merging, expected at most 4: cut it into several",
        ),
        (lambda: counter_dropout([1.0], 0.5, 0), TypeError, "x must be a tensor, got list"),  # type: ignore[arg-type]
        (lambda: counter_dropout(X.to_sparse(), 0.5, 0), TypeError, "x must be dense"),
        (lambda: counter_dropout(X.int(), 0.5, 0), TypeError, "x must be bfloat16"),
        (lambda: counter_dropout(X, None, 0), TypeError, "counter_dropout: p must be a number, got NoneType"),  # type: ignore[arg-type]
        (lambda: counter_dropout(X, 1.5, 0), ValueError, "p must be from 0 to 1, got 1.5"),
        (lambda: counter_dropout(X, math.nan, 0), ValueError, "p must be from 0 to 1"),
        (lambda: counter_dropout(X, 0.5, 0, step=2.0), TypeError, "step must be an int, got float"),  # type: ignore[arg-type]
        (
            lambda: counter_dropout(X, 0.5, 0, step=torch.tensor(2.0)),
            TypeError,
            "must be int64, of shape \\(\\) and on cpu",
        ),
        (lambda: counter_dropout(X, 0.5, 0, step=torch.tensor([2])), TypeError, r"got torch.int64, \(1,\) and cpu"),
        (lambda: counter_dropout(X, 0.5, 0, step=torch.tensor(2, device="meta")), TypeError, "and meta"),
        (lambda: counter_dropout(X, 0.5, 0, box=(2, 3)), TypeError, "box must be a Box or None, got tuple"),  # type: ignore[arg-type]
        (
            lambda: counter_dropout(X, 0.5, 0, box=Box.whole((4,))),
            ValueError,
            r"x has shape \(2, 3\), but the box has another number of elements",
        ),
    ],
)
def test_wrong_arguments(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
