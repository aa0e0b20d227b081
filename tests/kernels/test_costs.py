"""Every `rooftop::` operator can be traced, has a derivative or refuses one, and has a cost that was counted by hand.

`rooftop analyze` therefore knows the roof of a model that uses them all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rooftop
from rooftop import kernels
from rooftop.cost import CountingMode
from rooftop.cost.lookup import formula_for
from rooftop.hardware import ceilings_of
from rooftop.kernels.attentions.states import merge_into
from rooftop.kernels.matmuls import matmuls

ELSEWHERE = {
    "sparse_rulebook",
    "sparse_row_blocks",
    "sparse_row_order",
    "sparse_row_pairs",
    "site_norm",
    "site_norm_backward",
}  # operators of rooftop.sparse, if it was imported
OPERATORS = sorted(  # the kernels' operators, each registered when its file is imported
    name.removeprefix("rooftop::")
    for name in torch._C._dispatch_get_all_op_names()
    if name.startswith("rooftop::") and "." not in name and name.removeprefix("rooftop::") not in ELSEWHERE
)
X = torch.rand(4, 6, generator=torch.Generator().manual_seed(0))
GATES, STATE = X.reshape(1, 8, 3, 1), X.flatten()[:6].reshape(1, 2, 3, 1)  # two features at three places
STEPS, RECURRENT = torch.stack((GATES, GATES + 1)), torch.linspace(-1, 1, 48).reshape(8, 2, 3, 1)
ROW, OTHER = X[0].clone(), X.flip(0)
CLASSES = torch.tensor([0, 2, 5, 1])
HIDDEN, HEAD = X[:, :3].contiguous(), X.flatten()[:18].reshape(6, 3)
HEADS = torch.linspace(-1, 1, 2 * 3 * 5 * 4).reshape(2, 3, 5, 4)  # 120 elements, 30 rows
LSE = HEADS[..., 0].contiguous()
PAGES = torch.tensor([[0, 1], [1, 0], [1, 1]]), torch.tensor([6, 3, 5])  # pages of three sequences, and their lengths
ANGLES = HEADS[0, 0, :, :2].contiguous()  # (5, 2)
CELLS, POINTS = torch.rand(4, 8, 3, generator=torch.Generator().manual_seed(1)), X[:, :3].contiguous()

MAP = torch.linspace(-1, 1, 108).reshape(1, 3, 3, 12)  # a map of 3 x 3 positions
PAIR_BIAS, BEYOND = torch.linspace(-1, 1, 32).reshape(2, 4, 4), ROW.repeat(2)
LINE = torch.tensor([[-1, 0, 1], [0, 1, 2], [1, 2, 3], [2, 3, -1]], dtype=torch.int32)  # four sites in a row: 10 pairs
TAPS = torch.linspace(-1, 1, 18).reshape(2, 3, 3)


def windowed(packed: Tensor, bias: Tensor, padding: Tensor) -> Tensor:
    return kernels.window_attention(packed, bias, 2, (2, 2), (1, 1), padding=padding)


def learn(function: Callable[..., Any], *tensors: Tensor) -> None:
    """Run forward and backward, with gradients of all floating point tensors."""
    leaves = [t.detach().clone().requires_grad_() if t.is_floating_point() else t for t in tensors]
    found = function(*leaves)
    outputs = found if isinstance(found, tuple) else (found,)
    torch.autograd.backward(outputs, [torch.full_like(y, 0.5) for y in outputs])


def norm_of_sum(function: Callable[..., Any]) -> None:
    bias = () if function is kernels.add_rms_norm else (ROW,)
    function(X, OTHER, 6, ROW.clone(), *bias, input_bias=ROW.flip(0))


Count = tuple[int, int, int]  # flops, bytes read, bytes written
F4, I8 = 4, 8  # bytes of an element
CASES: dict[str, tuple[Callable[[], Any], Count]] = {
    # 5 for normalizing, 1 each for weight and bias; mean and 1 / std of 4 rows are written
    "layer_norm": (lambda: kernels.layer_norm(X, 6, ROW, OTHER[0].clone()), (7 * 24, F4 * 36, F4 * 32)),
    "rms_norm": (lambda: kernels.rms_norm(X, 6, ROW), (4 * 24, F4 * 30, F4 * 28)),
    "norm_backward": (
        lambda: learn(lambda x, w, b: kernels.layer_norm(x, 6, w, b), X, ROW, ROW),
        (13 * 24, F4 * (48 + 6 + 8), F4 * 36),
    ),
    "add_layer_norm": (lambda: norm_of_sum(kernels.add_layer_norm), (9 * 24, F4 * (48 + 18), F4 * (48 + 8))),
    "add_layer_norm_cuda": (lambda: norm_of_sum(kernels.add_layer_norm_cuda), (9 * 24, F4 * 66, F4 * 56)),
    "add_rms_norm": (lambda: norm_of_sum(kernels.add_rms_norm), (6 * 24, F4 * (48 + 12), F4 * (48 + 4))),
    # maximum, subtraction, exponential, sum, division; the mask
    "softmax": (lambda: kernels.softmax(X, mask=ROW), (6 * 24, F4 * 30, F4 * 24)),
    "softmax_backward": (lambda: learn(kernels.softmax, X), (4 * 24, F4 * 48, F4 * 24)),
    # squares, their sum, and a root for each row
    "reduce": (lambda: kernels.norm(X, dim=1), (2 * 24 + 4, F4 * 24, F4 * 4)),
    "reduce_backward": (lambda: learn(lambda x: kernels.amax(x, 1), X), (4 * 24, F4 * (4 + 24 + 4), F4 * 24)),
    "swiglu": (lambda: kernels.swiglu(X, OTHER), (6 * 24, F4 * 48, F4 * 24)),
    "swiglu_backward": (lambda: learn(kernels.swiglu, X, OTHER), (12 * 24, F4 * 72, F4 * 48)),
    # three sigmoids, two tanh, f c + i g, o times, four sums
    "conv_lstm_gates": (
        lambda: kernels.conv_lstm_gates(GATES, STATE.clone(), added=GATES.clone()),
        ((3 * 4 + 2 * 5 + 4 + 4) * 6, F4 * (48 + 6), F4 * 12),
    ),
    # the same activations and their slopes; 3 for the cell, 3 for its gradient, 9 products
    "conv_lstm_gates_backward": (
        lambda: learn(kernels.conv_lstm_gates, GATES, STATE),
        ((3 * 6 + 2 * 7 + 15) * 6, F4 * (24 + 18), F4 * 30),
    ),
    # two steps: a convolution with its sums for the second step, and the gates of both
    "conv_lstm_sequence": (
        lambda: kernels.conv_lstm_sequence(STEPS, RECURRENT),
        (2 * 3 * 48 + (2 * 26 + 4) * 6, F4 * (48 + 48), F4 * (12 + 6)),
    ),
    # The operator computes two gradients of one convolution, the backward of the gates in both steps, and the sum of
    # two gradients of one state. It reads the sums, the first result, the cells, and the gradients of results and cell.
    # It writes the gradients of gates, kernel and cell.
    "conv_lstm_sequence_backward": (
        lambda: learn(kernels.conv_lstm_sequence, STEPS, RECURRENT),
        (4 * 3 * 48 + (2 * 47 + 1) * 6, F4 * (48 + 48 + 6 + 12 + 12 + 6), F4 * (48 + 48 + 6)),
    ),
    # four rows, which use three of the table's six rows
    "embedding": (lambda: kernels.embedding(CLASSES, HEAD), (0, F4 * 12 + I8 * 4, F4 * 12)),
    "embedding_backward": (lambda: learn(kernels.embedding, CLASSES, HEAD), (12, F4 * 12 + I8 * 4, F4 * 18)),
    # maximum, subtraction, exponential, sum; a loss and two statistics of each row are written
    "cross_entropy": (lambda: kernels.cross_entropy(X, CLASSES, reduction="none"), (4 * 24, F4 * 24 + I8 * 4, F4 * 12)),
    "cross_entropy_backward": (
        lambda: learn(lambda x, t: kernels.cross_entropy(x, t, reduction="none"), X, CLASSES),
        (3 * 24, F4 * (24 + 4 + 8) + I8 * 4, F4 * 24),
    ),
    "cross_entropy_with_gradient": (
        lambda: learn(kernels.cross_entropy, X, CLASSES),
        (5 * 24, F4 * 24 + I8 * 4, F4 * 25),
    ),
    "scale_gradient": (lambda: torch.ops.rooftop.scale_gradient(X, torch.tensor(0.5)), (24, F4 * 25, F4 * 24)),
    # reads only the factor, to see whether it is 1
    "scale_gradient_": (lambda: torch.ops.rooftop.scale_gradient_(X.clone(), torch.tensor(0.5)), (0, F4, 0)),
    # three matrix products
    "linear_cross_entropy": (
        lambda: learn(kernels.linear_cross_entropy, HIDDEN, HEAD, CLASSES),
        (3 * 2 * 24 * 3 + 5 * 24, F4 * 30 + I8 * 4, F4 * (30 + 2)),
    ),
    # a window of three lines at four places; a line has four pixels; one channel in and one out
    "conv_act": (
        lambda: kernels.conv_act(X.reshape(1, 1, 6, 4), ROW[:3].reshape(1, 1, 3, 1), OTHER[0, :1], activation="relu"),
        (2 * 16 * 3 + 2 * 16, F4 * (24 + 3 + 1), F4 * 16),
    ),
    # a window of three lines at four places; a line has four pixels
    "max_pool2d": (lambda: kernels.max_pool2d(X.reshape(1, 1, 6, 4), (3, 1), 1), (3 * 16, F4 * 24, F4 * 16)),
    # ten pairs of three input and two output channels; the bias of each result; the table of four by three
    "sparse_conv": (
        lambda: kernels.sparse_conv(HIDDEN, TAPS, ROW[:2], LINE, pair_count=10),
        (2 * 10 * 6 + 8, F4 * (12 + 18 + 2 + 12), F4 * 8),
    ),
    # if the number of pairs is unknown, the cost assumes one pair for each result
    "sparse_conv_backward": (
        lambda: learn(lambda x, w, b: kernels.sparse_conv(x, w, b, LINE), HIDDEN, TAPS, ROW[:2]),
        (2 * 2 * 4 * 6 + 8, F4 * (8 + 12 + 18 + 12), F4 * (12 + 18 + 2)),
    ),
    # at least a sum for each result, and a division; the number of neighbours is written too
    "sparse_pool": (lambda: kernels.sparse_avg_pool(HIDDEN, LINE), (2 * 12, F4 * (12 + 12), F4 * (12 + 4))),
    # a comparison and a sum for each result; gradient, result, features and table
    "sparse_pool_backward": (
        lambda: learn(lambda x: kernels.sparse_max_pool(x, LINE), HIDDEN),
        (2 * 12, F4 * (12 + 12 + 12 + 12), F4 * 12),
    ),
    # six batch elements, four of which have one site each: a sum for each feature, a division for each result
    "sparse_global_pool": (
        lambda: kernels.sparse_global_avg_pool(HIDDEN, CLASSES, 6),
        (12 + 18, F4 * 12 + I8 * 4, F4 * (18 + 6)),
    ),
    # a comparison and a sum of ties for each feature, a division for each result
    "sparse_global_pool_backward": (
        lambda: learn(lambda x: kernels.sparse_global_max_pool(x, CLASSES, 6), HIDDEN),
        (2 * 12 + 18, F4 * (18 + 18 + 12 + 6) + I8 * 4, F4 * 12),
    ),
    "linear_act": (
        lambda: kernels.linear_act(HIDDEN, HEAD, ROW, "relu", OTHER),
        (2 * 24 * 3 + 3 * 24, F4 * (12 + 18 + 6 + 24), F4 * 24),
    ),
    # a clamp
    "activation": (lambda: matmuls.activation_of(X, "relu"), (24, F4 * 24, F4 * 24)),
    "linear_act_backward": (
        lambda: learn(lambda x, w, b: kernels.linear_act(x, w, b, "relu"), HIDDEN, HEAD, ROW),
        (2 * 24, F4 * 48, F4 * 30),
    ),
    # 150 pairs of a query and a key
    "attention": (lambda: kernels.attention(HEADS, HEADS + 1, HEADS + 2), (150 * (2 * 8 + 5), F4 * 360, F4 * 150)),
    "attention_backward": (
        lambda: learn(kernels.attention, HEADS, HEADS + 1, HEADS + 2),
        (150 * (2 * 20 + 6), F4 * (5 * 120 + 30), F4 * 360),
    ),
    # four windows of four positions in two heads of two features, and the bias and the mask of each pair
    "window_attention": (lambda: windowed(MAP, PAIR_BIAS, BEYOND), (128 * (2 * 4 + 7), F4 * (108 + 32 + 12), F4 * 36)),
    "window_attention_backward": (
        lambda: learn(windowed, MAP, PAIR_BIAS, BEYOND),
        (128 * (2 * 10 + 9), F4 * (36 + 108 + 32 + 12), F4 * (108 + 32 + 12)),
    ),
    "merge_attention_states": (
        lambda: kernels.merge_attention_states(HEADS, LSE, HEADS + 1, LSE + 1),
        (3 * 120 + 11 * 30, F4 * 300, F4 * 150),
    ),
    "merge_attention_states_": (
        lambda: merge_into(HEADS.clone(), LSE.clone(), HEADS + 1, LSE + 1),
        (3 * 120 + 11 * 30, F4 * 300, F4 * 150),
    ),
    "merge_attention_states_backward": (
        lambda: learn(kernels.merge_attention_states, HEADS, LSE, HEADS + 1, LSE + 1),
        (5 * 120 + 15 * 30, F4 * 450, F4 * 300),
    ),
    # 14 positions in three pages of five, with one head of keys for five heads of queries
    "paged_attention": (
        lambda: kernels.paged_attention(HEADS[0], HEADS[:, :1], HEADS[:, 1:2], *PAGES, positions=14),
        (14 * 5 * (4 * 4 + 5), F4 * (60 + 2 * 14 * 4) + I8 * (3 + 3), F4 * 60),
    ),
    # four products and two sums of each pair of features
    "rope": (lambda: kernels.rope_pair(HEADS, HEADS + 1, ANGLES, ANGLES + 1), (6 * 120, F4 * (240 + 20), F4 * 240)),
    "rope_": (
        lambda: kernels.rope(HEADS.clone(), ANGLES, ANGLES + 1, inplace=True),
        (6 * 60, F4 * (120 + 20), F4 * 120),
    ),
    "trilinear_interpolate": (lambda: kernels.trilinear_interpolate(CELLS, POINTS), (2 * 96, F4 * 108, F4 * 12)),
    "trilinear_interpolate_cuda": (
        lambda: kernels.trilinear_interpolate_cuda(CELLS, POINTS),
        (2 * 96, F4 * 108, F4 * 12),
    ),
    "trilinear_interpolate_backward": (
        lambda: learn(kernels.trilinear_interpolate, CELLS, POINTS),
        (3 * 96, F4 * 120, F4 * 108),
    ),
    "trilinear_interpolate_cuda_backward": (
        lambda: learn(kernels.trilinear_interpolate_cuda, CELLS, POINTS),
        (3 * 96, F4 * 120, F4 * 108),
    ),
    # a product for each element, kept or not; the mask is created, not read
    "counter_dropout": (lambda: kernels.counter_dropout(X, 0.5, 3), (24, F4 * 24, F4 * 24)),
    # a product and a sum
    "random_normal": (lambda: kernels.random_normal((4, 6), 3), (2 * 24, 0, F4 * 24)),
    "random_uniform": (lambda: kernels.random_uniform((4, 6), 3), (2 * 24, 0, F4 * 24)),
    "fused": (lambda: kernels.axpy(2.0, X, ROW), (2 * 24, F4 * 30, F4 * 24)),
}


WITHOUT_AUTOGRAD = {  # their callers refuse tensors that need gradients, or they take no tensors
    "activation", "max_pool2d", "merge_attention_states_", "paged_attention", "random_normal", "random_uniform",
    "rope_", "scale_gradient_",
}  # fmt: skip


def test_every_operator_is_here() -> None:
    assert set(CASES) == set(OPERATORS)


@pytest.mark.parametrize("name", OPERATORS)
def test_it_costs_what_a_person_counts(name: str) -> None:
    call, count = CASES[name]
    with CountingMode() as counted:
        call()
    cost = next(r.cost for r in reversed(counted.records) if r.name == f"rooftop::{name}")
    assert cost is not None
    assert (cost.total_flops, cost.read_bytes, cost.write_bytes) == count


@pytest.mark.parametrize("name", OPERATORS)
def test_it_has_a_fake_a_formula_and_autograd(name: str) -> None:
    overload = getattr(torch.ops.rooftop, name).default
    assert formula_for(overload) is not None
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    assert has(overload.name(), "Meta") or has(overload.name(), "CompositeImplicitAutograd")
    assert has(overload.name(), "Autograd") == (name not in WITHOUT_AUTOGRAD)


class Everything(nn.Module):
    """A model that calls each public operator once."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(6, 6)), nn.Parameter(torch.rand(6))
        self.table = nn.Parameter(torch.rand(7, 6))

    def forward(self, x: Tensor) -> Tensor:
        """x (4, 6); returns a scalar."""
        x = x + kernels.embedding(CLASSES, self.table)
        x = kernels.rms_norm(kernels.layer_norm(x, 6, self.bias, self.bias), 6, self.bias)
        for add_norm in (kernels.add_layer_norm, kernels.add_layer_norm_cuda, kernels.add_rms_norm):
            y, total = add_norm(x, x.flip(0), 6, self.bias)
            x = y + total
        for activation in (kernels.relu, kernels.sigmoid, kernels.tanh, kernels.silu, kernels.gelu):
            x = kernels.mul(kernels.add(x, activation(x)), 0.5)
        x = kernels.axpy(0.5, x, kernels.linear_act(x, self.weight, self.bias, "gelu", x))
        x = kernels.matmul(x, self.weight) + kernels.swiglu(x, x.flip(1))
        images, windows = x.reshape(1, 2, 3, 4), self.weight.reshape(2, 2, 3, 3)
        x = x + kernels.conv_act(images, windows, padding=1, activation="gelu").reshape(4, 6)
        x = x + kernels.max_pool2d(images.detach(), 3, 1, 1).reshape(4, 6)
        x = x + kernels.sparse_conv(x, self.weight[:, None].expand(6, 3, 6), self.bias, LINE)
        x = x + kernels.sparse_max_pool(x, LINE) + kernels.sparse_avg_pool(x, LINE)
        for pool in (kernels.sparse_global_max_pool, kernels.sparse_global_avg_pool):
            x = x + pool(x, CLASSES, 6).sum(0)
        x = kernels.counter_dropout(x, 0.5, 3) + kernels.random_normal((4, 6), 3) + kernels.random_uniform((4, 6), 3)
        for reduce in (kernels.sum, kernels.mean, kernels.amax, kernels.amin, kernels.norm):
            x = x + reduce(x, 1, keepdim=True)
        x = x + kernels.argmax(x, 1, keepdim=True) - kernels.argmin(x, 1, keepdim=True)
        hidden, cell = kernels.conv_lstm_gates(x.reshape(1, 8, 3, 1), x.flatten()[:6].reshape(1, 2, 3, 1))
        x = x + (hidden + cell).flatten()
        hidden, cell = kernels.conv_lstm_sequence(x.reshape(2, 1, 4, 3, 1), x.flatten()[:12].reshape(4, 1, 3, 1))
        x = x + hidden.sum() + cell.sum()
        packed, bias = x.flatten()[:12].expand(1, 2, 3, 12), x.flatten()[:16].reshape(1, 4, 4)
        x = x + kernels.window_attention(packed, bias, 1, (2, 2), (1, 1)).reshape(4, 6)
        stored = x.detach().reshape(2, 1, 3, 4)
        x = x + kernels.paged_attention(x.detach().reshape(3, 2, 4), stored, stored, *PAGES).reshape(4, 6)
        heads = x.reshape(1, 2, 3, 4)
        query, key = kernels.rope_pair(heads, kernels.rope(heads, *2 * (ANGLES[:3],)), *2 * (ANGLES[:3],))
        parts = [kernels.attention(query, each, heads, return_lse=True) for each in (key, heads)]
        heads, lse = kernels.merge_attention_states(*parts[0], *parts[1])
        x = x + kernels.softmax(heads.reshape(4, 6)) - kernels.log_softmax(x)
        for interpolate in (kernels.trilinear_interpolate, kernels.trilinear_interpolate_cuda):
            x = x + interpolate(x[:, None].expand(4, 8, 6), x[:, :3])
        loss = kernels.linear_cross_entropy(x, self.weight, CLASSES) + kernels.cross_entropy(x, CLASSES) + lse.sum()
        return loss + kernels.cross_entropy(x, CLASSES, reduction="none").sum()


@pytest.mark.parametrize("predicted", [False, True], ids=["measured", "predicted"])
def test_a_model_of_all_operators_is_covered(predicted: bool) -> None:
    h200 = ceilings_of("h200")
    if predicted:
        report = rooftop.predict(Everything(), X, train=True, ceilings=h200)
    else:  # arbitrary ceilings: measuring this machine takes longer
        report = rooftop.analyze(Everything(), X, train=True, ceilings=replace(h200, kind="cpu"))
    assert report.coverage == 1.0
    assert [row.name for row in report.uncovered] == []
    used = {row.name.removeprefix("rooftop::") for row in report.ops}
    others = {"activation", "merge_attention_states_", "rope_", "scale_gradient"}
    assert set(OPERATORS) - used == others, "the model cannot use in-place operators without autograd, nor retain_graph"
