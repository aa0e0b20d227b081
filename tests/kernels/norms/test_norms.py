"""The norms, both ways: the CPU implementation, and (in a separate process) the Triton kernels interpreted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftop.cost import CountingMode
from rooftop.kernels import add_layer_norm, add_rms_norm, layer_norm, layer_norm_plan, rms_norm
from rooftop.kernels.norms import plans, tables
from rooftop.kernels.norms.tables import ForwardConfig, LongConfig
from rooftop.kernels.operands.launch_data import Device
from rooftop.launch import INTERPRETED, count_launches
from rooftop.testing import assert_as_accurate

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HALVES = DTYPES[1:]
NORMS = ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm")
EPS = torch.finfo(torch.float32).eps  # for an RMS norm, and for its float64 reference
Inputs = list[Tensor | None]


def ours(name: str, x: Tensor, weight: Tensor | None = None, *more: Tensor | None) -> tuple[Tensor, ...]:
    """more: bias if the norm has one; residual and input_bias if it adds them."""
    shape = x.shape[-1:]
    if name == "layer_norm":
        return (layer_norm(x, shape, weight, *more),)
    if name == "rms_norm":
        return (rms_norm(x, shape, weight, EPS),)
    if name == "add_layer_norm":
        bias, residual, input_bias = more
        return add_layer_norm(x, residual, shape, weight, bias, input_bias=input_bias)
    residual, input_bias = more
    return add_rms_norm(x, residual, shape, weight, EPS, input_bias=input_bias)


def eager(name: str, x: Tensor, weight: Tensor | None = None, *more: Tensor | None) -> tuple[Tensor, ...]:
    total = x
    if name.startswith("add"):
        for term in (more[-1], more[-2]):
            total = total if term is None else total + term
    if name.endswith("rms_norm"):
        y = F.rms_norm(total, x.shape[-1:], weight, EPS)
    else:
        y = F.layer_norm(total, x.shape[-1:], weight, more[0])
    return (y, total) if name.startswith("add") else (y,)


ARGUMENTS = {
    "layer_norm": ("x", "weight", "bias"),
    "rms_norm": ("x", "weight"),
    "add_layer_norm": ("x", "weight", "bias", "residual", "input_bias"),
    "add_rms_norm": ("x", "weight", "residual", "input_bias"),
}


def inputs_of(name: str, *shape: int, dtype: torch.dtype = torch.float32, without: tuple[str, ...] = ()) -> Inputs:
    torch.manual_seed(sum(shape))
    made: Inputs = []
    for argument in ARGUMENTS[name]:
        full = argument in ("x", "residual")
        tensor = (2 * torch.randn(shape) + 1 if full else torch.randn(shape[-1])).to(dtype)
        made.append(None if argument in without else tensor)
    return made


def results(function: Callable[..., Any], name: str, inputs: Inputs, gradients: list[Tensor]) -> dict[str, Tensor]:
    """y, the total if there is one, and the gradients of all inputs."""
    leaves = [t.detach().clone().requires_grad_() if t is not None else None for t in inputs]
    outputs = function(name, *leaves)
    torch.autograd.backward(outputs, [g.to(y.dtype) for g, y in zip(gradients, outputs, strict=False)])
    found = {key: y.detach() for key, y in zip(("y", "total"), outputs, strict=False)}
    named = zip(ARGUMENTS[name], leaves, strict=True)
    return found | {f"d{key}": t.grad for key, t in named if t is not None and t.grad is not None}


@pytest.fixture(autouse=True)
def plans_of_these_tables() -> Iterator[None]:
    """Forget the plans, because tests change the tables."""
    plans.forget()
    yield
    plans.forget()


def planned(name: str, inputs: Inputs) -> Counter[str]:
    """The kernels of forward and backward, according to the plans."""
    x, weight, *more = inputs
    bias = more.pop(0) if name.endswith("layer_norm") else None
    residual, input_bias = more or (None, None)
    call = partial(layer_norm_plan, x, x.shape[-1:], weight, bias)  # type: ignore[union-attr]
    call = partial(call, residual=residual, input_bias=input_bias, rms=name.endswith("rms_norm"))
    launches = call().launches + call(direction="backward").launches
    return Counter(each.staged.kernel if each.staged else each.kernel for each in launches)


def assert_gate(name: str, inputs: Inputs, kernels: tuple[str, ...] = (), device: str = "cpu") -> None:
    """Outputs and gradients pass the numerics gate, and (interpreted, or on a GPU) come from the kernels."""
    inputs = [t.to(device) if t is not None else None for t in inputs]
    x = inputs[0]
    assert x is not None
    gradients = [torch.randn_like(x) for _ in range(2)]
    with count_launches() as launches:
        found = results(ours, name, inputs, gradients)
    if (INTERPRETED or device == "cuda") and x.numel():
        assert launches == planned(name, inputs)
        assert set(kernels) <= launches.keys()
    plain = results(eager, name, inputs, gradients)
    doubles = [t.double() if t is not None else None for t in inputs]
    exact = results(eager, name, doubles, [g.double() for g in gradients])
    assert found.keys() == exact.keys()
    for key in found:
        assert_as_accurate(found[key], plain[key], exact[key], what=f"{name}: {key} of {tuple(x.shape)} {x.dtype}")


PLAIN = ("norm_forward", "norm_backward")
SHIFTED = ("norm_forward_shifted", "norm_backward_shifted")
LONG = ("norm_forward_long", "norm_row_sums", "norm_backward_long")


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *(((5, 7), dtype) for dtype in DTYPES),
        *(
            ((2, 3, 64), torch.bfloat16),
            ((5, 768), torch.float16),
            ((0, 16), torch.float32),
            ((3, 1000), torch.float32),
            ((9, 138), torch.bfloat16),  # pairs of elements: without a shift
        ),
    ],
)
def test_gate(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert_gate("layer_norm", inputs_of("layer_norm", *shape, dtype=dtype), PLAIN)


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("name", NORMS[1:])
def test_gate_of_the_other_norms(name: str, dtype: torch.dtype) -> None:
    assert_gate(name, inputs_of(name, 5, 200, dtype=dtype), PLAIN)


# Eight or more rows with an odd number of half precision elements. The remainder modulo eight is left to the plain
# kernels.
@pytest.mark.parametrize(
    ("name", "rows", "columns", "dtype"),
    [
        *((name, 16, 131, torch.bfloat16) for name in NORMS),
        *(("layer_norm", 9, 251, torch.float16), ("layer_norm", 9, 517, torch.float16)),
        *(("add_rms_norm", 8, 1021, torch.float16), ("layer_norm", 8, 518, torch.bfloat16)),
    ],
)
def test_gate_of_rows_at_odd_addresses(name: str, rows: int, columns: int, dtype: torch.dtype) -> None:
    """In forward, the plain kernel computes rows of an even length and rows of more than 256 elements."""
    kernels = SHIFTED if rows % 8 == 0 else SHIFTED + PLAIN
    if columns % 2 == 0 or columns > 256:
        kernels = (PLAIN[0], *kernels[1:])
    assert_gate(name, inputs_of(name, rows, columns, dtype=dtype), kernels)


@pytest.fixture
def short_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so short that rows of a few hundred elements are long rows."""
    for table in ("FORWARD", "BACKWARD", "FORWARD_SHIFTED", "BACKWARD_SHIFTED"):
        monkeypatch.setattr(tables, table, ())
    monkeypatch.setattr(tables, "FORWARD_HELD", ForwardConfig(1, 1, 16, 4))
    for config in ("FORWARD_LONG", "FORWARD_LONG_ODD", "BACKWARD_LONG"):
        monkeypatch.setattr(tables, config, LongConfig(64, 4, 2, 2))
    monkeypatch.setattr(tables, "ROW_SUMS", {"COLUMNS": 128, "num_warps": 4})


@pytest.mark.parametrize(("columns", "dtype"), [(136, torch.float32), (203, torch.bfloat16)])
@pytest.mark.parametrize("name", NORMS)
def test_gate_of_rows_longer_than_a_tile(name: str, columns: int, dtype: torch.dtype, short_tiles: None) -> None:
    assert_gate(name, inputs_of(name, 9, columns, dtype=dtype), LONG)


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_gate_of_long_rows_of_fours(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "FOURS_FROM", 100)
    for table in ("FORWARD_FOURS", "FORWARD_FOURS_RMS"):
        monkeypatch.setattr(tables, table, (ForwardConfig(1000, 1, 64, 4),))
    monkeypatch.setattr(tables, "FORWARD", ())  # an empty table, so that the kernel of FORWARD_FOURS is chosen
    assert_gate(name, inputs_of(name, 5, 204, dtype=torch.bfloat16), PLAIN)


# With one element, the variance is 0 and 1 / std is large, so the normalized sum must be the stored one.
@pytest.mark.parametrize("dtype", HALVES)
def test_gate_of_rows_of_one_element(dtype: torch.dtype) -> None:
    for name in ("layer_norm", "add_layer_norm"):
        assert_gate(name, inputs_of(name, 67, 1, dtype=dtype), PLAIN)


# bfloat16, because for a few float32 sums PyTorch's largest error can be 0 by luck.
@given(st.sampled_from(NORMS), st.integers(1, 17), st.integers(32, 200), st.sets(st.sampled_from(ARGUMENTS[NORMS[2]])))
@settings(max_examples=6 if INTERPRETED else 25, deadline=None)
def test_gate_of_any_shape_with_and_without_arguments(name: str, rows: int, columns: int, absent: set[str]) -> None:
    inputs = inputs_of(name, rows, columns, dtype=torch.bfloat16, without=tuple(absent - {"x"}))
    assert_gate(name, inputs)


def test_rows_are_normal_and_a_shift_changes_nothing() -> None:
    x = 2 * torch.randn(17, 300) + 1
    y = layer_norm(x, 300)
    torch.testing.assert_close(y.mean(1), torch.zeros(17), rtol=0, atol=1e-5)
    torch.testing.assert_close(y.var(1, unbiased=False), torch.ones(17), rtol=1e-4, atol=0)
    torch.testing.assert_close(layer_norm(x + 64, 300), y, rtol=1e-3, atol=1e-4)


def test_rows_have_mean_square_one_and_scale_changes_nothing() -> None:
    x = torch.randn(17, 300)
    y = rms_norm(x, 300)
    torch.testing.assert_close(y.square().mean(1), torch.ones(17), rtol=1e-4, atol=0)
    torch.testing.assert_close(rms_norm(8 * x, 300), y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_default_epsilon_is_that_of_pytorch(dtype: torch.dtype) -> None:
    x = (1e-3 * torch.randn(4, 64)).to(dtype)
    torch.testing.assert_close(rms_norm(x, 64), F.rms_norm(x, (64,)))
    torch.testing.assert_close(rms_norm(x.double(), 64), F.rms_norm(x.double(), (64,)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_result_is_the_norm_of_the_sum_that_is_returned(dtype: torch.dtype) -> None:
    x, weight, bias, residual, input_bias = inputs_of("add_layer_norm", 9, 136, dtype=dtype)
    assert x is not None
    y, total = add_layer_norm(x, residual, 136, weight, bias, input_bias=input_bias)
    assert torch.equal(y, layer_norm(total, 136, weight, bias))
    y, total = add_rms_norm(x, residual, 136, weight)
    assert torch.equal(y, rms_norm(total, 136, weight))
    assert add_layer_norm(x, None, 136)[1] is x
    assert add_rms_norm(x, None, 136)[1] is x


def test_a_sum_that_is_not_used_further_and_one_that_alone_is() -> None:
    for name in NORMS[2:]:
        inputs = [t.double().requires_grad_() for t in inputs_of(name, 4, 6) if t is not None]
        for one in range(2):
            mine = torch.autograd.grad(ours(name, *inputs)[one].square().sum(), inputs[0])
            theirs = torch.autograd.grad(eager(name, *inputs)[one].square().sum(), inputs[0])
            torch.testing.assert_close(mine, theirs)


def test_a_large_offset_does_not_swamp_the_variance(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x = 1e4 + torch.randn(9, 333)
    assert_gate("layer_norm", [x, None, None])
    assert layer_norm(x, 333).std(unbiased=False).item() == pytest.approx(1, abs=0.01)
    monkeypatch.setattr(tables, "FORWARD", ())
    monkeypatch.setattr(tables, "FORWARD_LONG_ODD", LongConfig(32, 4, 2, 1))
    plans.forget()
    torch.testing.assert_close(layer_norm(x, 333), F.layer_norm(x.double(), (333,)).float(), rtol=1e-3, atol=2e-3)


def test_views_with_any_strides() -> None:
    base = torch.randn(40, 130)
    for view in (base[::2], base[:, 5:70], base.t(), base[:, ::2], base[3:4].expand(7, 130)):
        shape = view.shape[-1:]
        torch.testing.assert_close(layer_norm(view, shape), F.layer_norm(view, shape), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(rms_norm(view, shape), F.rms_norm(view, shape), rtol=1e-5, atol=1e-5)
    x, residual = base[:, 3:37], torch.randn(34, 40).t()
    y, total = add_layer_norm(x, residual, 34)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(y, F.layer_norm(total, (34,)), rtol=1e-5, atol=1e-5)


def test_odd_rows_that_are_misaligned_or_lie_apart() -> None:
    base = torch.randn(16 * 131 + 1).bfloat16()
    for x in (base[1:].view(16, 131), torch.randn(16, 140).bfloat16()[:, :131]):
        exact = F.layer_norm(x.double(), (131,))
        assert_as_accurate(layer_norm(x, 131), exact.bfloat16(), exact)


def test_weights_and_gradients_with_any_strides() -> None:
    x, weight, bias = torch.randn(6, 40), torch.randn(40, 3)[:, 1], torch.randn(1).expand(40)
    assert_gate("layer_norm", [x, weight, bias])
    mine, theirs = (t.requires_grad_() for t in (x.clone(), x.clone()))
    layer_norm(mine, 40, weight).sum().backward()  # an expanded gradient: all strides 0
    F.layer_norm(theirs, (40,), weight).sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wanted", ["x", "weight", "bias", "residual", "input_bias"])
def test_a_gradient_comes_alone(wanted: str) -> None:
    for name in (NORMS[2], NORMS[3]):
        if wanted in ARGUMENTS[name]:
            inputs = inputs_of(name, 5, 48)
            leaf = inputs[ARGUMENTS[name].index(wanted)]
            assert leaf is not None
            leaf.requires_grad_()
            (mine,) = torch.autograd.grad(sum(t.square().sum() for t in ours(name, *inputs)), leaf)  # type: ignore[arg-type]
            (theirs,) = torch.autograd.grad(sum(t.square().sum() for t in eager(name, *inputs)), leaf)  # type: ignore[arg-type]
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("rows", [0, 3])
def test_rows_of_no_elements_have_empty_gradients(name: str, rows: int) -> None:
    inputs, gradients = inputs_of(name, rows, 0), [torch.empty(rows, 0)] * 2
    mine, theirs = (results(function, name, inputs, gradients) for function in (ours, eager))
    assert {key: (t.shape, t.dtype) for key, t in mine.items()} == {
        key: (t.shape, t.dtype) for key, t in theirs.items()
    }
    torch._dynamo.reset()  # the same function is compiled for each norm
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    assert compiled(name, *inputs)[0].shape == (rows, 0)


def test_several_normalized_dimensions() -> None:
    x, weight = torch.randn(4, 3, 5, 6), torch.randn(5, 6)
    torch.testing.assert_close(layer_norm(x, (5, 6), weight), F.layer_norm(x, (5, 6), weight), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rms_norm(x, (5, 6), weight), F.rms_norm(x, (5, 6), weight), rtol=1e-5, atol=1e-5)
    y, total = add_rms_norm(x, x, (5, 6), weight)
    torch.testing.assert_close((y, total), (F.rms_norm(2 * x, (5, 6), weight), 2 * x), rtol=1e-5, atol=1e-5)


# Odd rows share groups of elements with their neighbours, whose elements must not be used.
@pytest.mark.parametrize(("columns", "dtype"), [(50, torch.float32), (131, torch.bfloat16)])
def test_a_bad_row_stays_alone(columns: int, dtype: torch.dtype) -> None:
    x = torch.randn(8, columns).to(dtype)
    x[1, 3], x[4, 0], x[6, -1] = float("nan"), float("inf"), float("nan")
    good = [0, 2, 3, 5, 7]
    for norm in (layer_norm, rms_norm):
        y = norm(x, columns)
        assert y[[1, 6]].isnan().all()
        assert torch.equal(y[good], norm(x[good].contiguous(), columns))


def test_float32_weights_with_half_precision_rows() -> None:
    x, weight, bias = (t for t in inputs_of("layer_norm", 8, 131) if t is not None)
    x = x.bfloat16()
    exact = F.layer_norm(x.double(), (131,), weight.double(), bias.double())
    assert_as_accurate(layer_norm(x, 131, weight, bias), exact.bfloat16(), exact)


def assert_same_bits(name: str, inputs: Inputs, runs: int) -> None:
    assert inputs[0] is not None
    gradients = [torch.randn_like(inputs[0]) for _ in range(2)]
    first, *others = [results(ours, name, inputs, gradients) for _ in range(runs)]
    assert all(torch.equal(first[key], other[key]) for other in others for key in first)


def test_three_runs_give_the_same_bits() -> None:
    assert_same_bits("add_layer_norm", inputs_of("add_layer_norm", 9, 139, dtype=torch.bfloat16), 3)


@pytest.mark.parametrize("name", NORMS)
def test_gradients_against_finite_differences(name: str) -> None:
    inputs = [t.double().requires_grad_() for t in inputs_of(name, 3, 5) if t is not None]
    assert torch.autograd.gradcheck(lambda *args: ours(name, *args), inputs)


def test_on_meta_tensors_only_shapes_are_made() -> None:
    x = torch.empty(3, 5, device="meta")
    assert layer_norm(x, 5).shape == rms_norm(x, 5).shape == (3, 5)
    assert [t.shape for t in add_rms_norm(x, x, 5)] == [(3, 5)] * 2


@pytest.mark.parametrize("name", ["add_rms_norm"] if INTERPRETED else NORMS)
def test_operator_checks_of_torch_library(name: str) -> None:
    x, weight, *more = (t.requires_grad_() for t in inputs_of(name, 4, 6) if t is not None)
    arguments = [x, *more[-2:], weight, *more[:-2]] if name.startswith("add") else [x, weight, *more]
    torch.library.opcheck(getattr(torch.ops.rooftop, name).default, (*arguments, 1e-5, torch.float32))


def test_compiled_whole() -> None:
    for name in (NORMS[0], NORMS[3]):
        inputs = [t.requires_grad_() for t in inputs_of(name, 6, 32) if t is not None]
        compiled = torch.compile(lambda *args, name=name: ours(name, *args)[0] * 2, fullgraph=True, backend="aot_eager")
        expected = 2 * ours(name, *inputs)[0]
        found = compiled(*inputs)
        torch.testing.assert_close(found, expected)
        gradients = [torch.autograd.grad(y.square().sum(), inputs) for y in (found, expected)]
        torch.testing.assert_close(*gradients)


def test_autocast_gives_the_dtypes_of_pytorch() -> None:
    x = torch.randn(4, 32).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert layer_norm(x, 32).dtype == F.layer_norm(x, (32,)).dtype == torch.bfloat16
        assert rms_norm(x, 32).dtype == F.rms_norm(x, (32,)).dtype == torch.bfloat16
        assert [t.dtype for t in add_layer_norm(x, x, 32)] == [torch.bfloat16] * 2


@pytest.mark.parametrize(
    ("name", "forward", "backward"),  # flops for each element; bytes read and written in units of 4 (M = 10, N = 40)
    [
        ("layer_norm", (7, 480, 420), (13, 400 + 400 + 40 + 20, 480)),
        ("rms_norm", (4, 440, 410), (9, 400 + 400 + 40 + 10, 440)),
        ("add_layer_norm", (9, 920, 820), (14, 1200 + 40 + 20, 480)),
        ("add_rms_norm", (6, 880, 810), (10, 1200 + 40 + 10, 440)),
    ],
)
def test_cost_is_what_a_person_counts(name: str, forward: tuple[int, int, int], backward: tuple[int, int, int]) -> None:
    inputs = [t.requires_grad_() for t in inputs_of(name, 10, 40) if t is not None]
    with CountingMode() as counted:
        outputs = ours(name, *inputs)
        torch.autograd.backward(outputs, [torch.rand(10, 40) for _ in outputs])
    costs = {r.name: r.cost for r in counted.records}
    for operator, (flops, read, written) in ((name, forward), ("norm_backward", backward)):
        cost = costs[f"rooftop::{operator}"]
        assert cost is not None
        assert (cost.total_flops, cost.read_bytes, cost.write_bytes) == (flops * 400, 4 * read, 4 * written)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.randn(3, 4), 5), ValueError, r"expected input of shape \(\.\.\., 5\), got \(3, 4\)"),
        ((torch.randn(4), (3, 4)), ValueError, "expected input of shape"),
        ((torch.randn(3, 4), ()), ValueError, "at least one dimension"),
        ((torch.ones(3, 4, dtype=torch.int64), 4), TypeError, "input must be bfloat16"),
        (([1.0, 2.0], 2), TypeError, "input must be a tensor, got list"),
        ((torch.randn(3, 4), 4.0), TypeError, "int or a sequence of ints, got 4.0"),
        ((torch.randn(3, 4), 4, [1.0] * 4), TypeError, "weight must be a tensor, got list"),
        ((torch.eye(4).to_sparse(), 4), TypeError, "input must be dense"),
        ((torch.randn(3, 4), 4, torch.randn(3)), ValueError, r"expected weight of shape \(4,\), got \(3,\)"),
        ((torch.randn(3, 4), 4, torch.randn(4, device="meta")), ValueError, "input is on cpu, weight on meta"),
    ],
)
def test_wrong_arguments(arguments: tuple[object, ...], error: type[Exception], message: str) -> None:
    for norm in (layer_norm, rms_norm):
        with pytest.raises(error, match=message):
            norm(*arguments)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("residual", "more", "error", "message"),
    [
        (torch.randn(3, 5), {}, ValueError, r"residual of shape \(3, 4\), like input, got \(3, 5\)"),
        (torch.randn(3, 4).half(), {}, TypeError, "expected residual of torch.float32, like input, got torch.float16"),
        (1.0, {}, TypeError, "residual must be a tensor, got float"),
        (None, {"input_bias": torch.randn(3)}, ValueError, r"input_bias of shape \(4,\), got \(3,\)"),
    ],
)
def test_wrong_terms(residual: object, more: dict[str, Tensor], error: type[Exception], message: str) -> None:
    for norm in (add_layer_norm, add_rms_norm):
        with pytest.raises(error, match=message):
            norm(torch.randn(3, 4), residual, 4, **more)  # type: ignore[operator]


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreted run")
def test_all_of_the_above_through_the_interpreter(interpreted: Callable[[str], int]) -> None:
    files = (__file__, str(Path(__file__).with_name("test_clusters.py")))
    assert interpreted(*files, "-k", "not (without_spills or memory_is_read)") > 84


@pytest.mark.parametrize("columns", [1000, 4096, 8192, 16384, 262_144])
@pytest.mark.parametrize("tensors", [2, 3])  # backward fetches dy and x, and for a norm of a sum also its gradient
def test_what_is_fetched_ahead_fits_in_shared_memory(tensors: int, columns: int) -> None:
    h200 = Device(triton=True, processors=132, shared_bytes=232_448, cuda=9)
    config = plans.config_for(tables.BACKWARD, columns) or tables.BACKWARD_LONG
    length = columns if isinstance(config, tables.BackwardConfig) else config.block
    count = plans.stages(config, [torch.float32] * tensors, length, h200)
    height = config.rows if isinstance(config, tables.BackwardConfig) else 1
    assert count == 1 or 4 * height * length * tensors * count < 232_448


GPU_SIZES = (1, 7, 64, 100, 200, 334, 512, 768, 1000, 1001, 1024, 1536, 2048, 2601, 3072, 4096, 4099, 5120, 6145, 8192)
GPU_LONG_SIZES = (6004, 11008, 12287, 16384, 20815, 24_404, 30_004, 32768, 40_005, 50257, 262144)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("columns", GPU_SIZES + GPU_LONG_SIZES)
def test_gate_on_a_gpu(columns: int, name: str, dtype: torch.dtype) -> None:
    if columns == 1 and name.endswith("rms_norm"):
        pytest.skip("an RMS norm of one element is its sign")
    assert_gate(name, inputs_of(name, 67, columns, dtype=dtype), device="cuda")


@pytest.mark.parametrize(("eps", "error"), [("x", TypeError), ([1e-5], TypeError), (float("nan"), ValueError)])
@pytest.mark.parametrize("name", NORMS)
def test_eps_must_be_a_finite_number(name: str, eps: Any, error: type[Exception]) -> None:
    function = {"layer_norm": layer_norm, "rms_norm": rms_norm}.get(name) or partial(
        {"add_layer_norm": add_layer_norm, "add_rms_norm": add_rms_norm}[name], residual=None
    )
    with pytest.raises(error, match=f"^{name}: eps must be"):
        function(torch.zeros(2, 4), normalized_shape=4, eps=eps)


@pytest.mark.parametrize("eps", [np.finfo(np.float32).eps, np.float16(1e-3), np.int64(1)])
def test_eps_may_be_a_number_of_numpy(eps: Any) -> None:
    x = torch.randn(2, 4)
    for function in (layer_norm, rms_norm):
        assert torch.equal(function(x, 4, eps=eps), function(x, 4, eps=float(eps)))
    assert torch.equal(add_layer_norm(x, x, 4, eps=eps)[0], add_layer_norm(x, x, 4, eps=float(eps))[0])
    assert torch.equal(add_rms_norm(x, x, 4, eps=eps)[0], add_rms_norm(x, x, 4, eps=float(eps))[0])


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("columns", [16_384, 16_383])  # 2^31 + 16384 elements, and rows at odd addresses
def test_more_than_two_billion_elements_on_a_gpu(columns: int) -> None:
    x = torch.randn(131_080, columns, device="cuda", dtype=torch.bfloat16)
    y = layer_norm(x, columns)
    for row in (0, 65_536, 131_072, 131_079):
        torch.testing.assert_close(y[row], F.layer_norm(x[row], (columns,)), rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [1000, 1001, 50257])
def test_ten_runs_give_the_same_bits_on_a_gpu(columns: int) -> None:
    inputs = [t.cuda() for t in inputs_of("add_layer_norm", 1000, columns, dtype=torch.bfloat16) if t is not None]
    assert_same_bits("add_layer_norm", inputs, 10)  # type: ignore[arg-type]


@pytest.mark.gpu
def test_compiled_by_inductor_on_a_gpu() -> None:
    x, weight, bias = (t.cuda() for t in inputs_of("layer_norm", 64, 768) if t is not None)
    compiled = torch.compile(lambda x, w, b: layer_norm(x, 768, w, b).relu(), fullgraph=True)
    torch.testing.assert_close(compiled(x, weight, bias), layer_norm(x, 768, weight, bias).relu())
