"""A prediction for a GPU counts the operators that PyTorch would choose there, whatever code calls them, and leaves no
trace."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import rooftop
from rooftop.analysis import Report
from rooftop.analysis.as_on_gpu import as_on_gpu
from rooftop.analysis.gpu_operators import CHOSEN_BY_DEVICE
from rooftop.cost import CountingMode, counted_for
from rooftop.hardware import ceilings_of
from rooftop.hardware.ceilings import Ceilings


@pytest.fixture(scope="module")
def h200() -> Ceilings:
    return ceilings_of("h200")


def names(report: Report, phase: str | None = None) -> set[str]:
    working = (row for row in report.ops if (row.bytes or row.uncovered) and phase in (None, row.phase))
    return {row.name.removeprefix("aten::") for row in working}


def products(report: Report, precision: str = "bf16") -> int:
    """Flops of matrix work of a model in bfloat16."""
    return sum(row.flops_by_precision.get(precision, 0) for row in report.ops)


RECURRENT: dict[str, tuple[Callable[..., nn.Module], int]] = {
    "lstm": (nn.LSTM, 4),
    "gru": (nn.GRU, 3),
    "tanh": (nn.RNN, 1),
    "relu": (lambda *args, **kwargs: nn.RNN(*args, nonlinearity="relu", **kwargs), 1),
}


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_layers_are_one_call(kind: str, batch_first: bool, h200: Ceilings) -> None:
    """Two layers in two directions: in each gate a product with the input and one with the hidden state."""
    make, gates = RECURRENT[kind]
    steps, batch, inputs, hidden = 10, 4, 16, 32
    model = make(inputs, hidden, 2, bidirectional=True, dropout=0.1, batch_first=batch_first)
    x = torch.randn((batch, steps, inputs) if batch_first else (steps, batch, inputs))
    forward = 2 * steps * batch * gates * hidden * 2 * ((inputs + hidden) + (2 * hidden + hidden))
    for train, times in ((False, 1), (True, 3)):
        report = rooftop.predict(model, x, ceilings=h200, train=train, dtype=torch.bfloat16)
        assert names(report, "forward") == {"zeros", "_cudnn_rnn"}
        assert names(report, "backward") == ({"_cudnn_rnn_backward"} if train else set())
        assert products(report) == times * forward
        assert report.coverage == 1


def test_recurrent_layers_of_all_kinds_are_near_each_other(h200: Ceilings) -> None:
    """Counted step by step, a GRU took 13 ms while an LSTM took 0.05 ms."""
    x = torch.randn(64, 8, 256)
    lstm, gru, rnn = (
        rooftop.predict(kind(256, 256), x, ceilings=h200, train=True).summary.op_roof_ms
        for kind in (nn.LSTM, nn.GRU, nn.RNN)
    )
    assert rnn < gru < lstm < 5 * rnn


def test_an_lstm_with_projections(h200: Ceilings) -> None:
    steps, batch, inputs, hidden, projected = 10, 4, 16, 32, 8
    model = nn.LSTM(inputs, hidden, proj_size=projected)
    report = rooftop.predict(model, torch.randn(steps, batch, inputs), ceilings=h200, dtype=torch.bfloat16)
    assert products(report) == 2 * steps * batch * (4 * hidden * (inputs + projected) + hidden * projected)


@pytest.mark.parametrize("kind", RECURRENT)
def test_packed_sequences_cost_the_steps_that_they_have(kind: str, h200: Ceilings) -> None:
    make, gates = RECURRENT[kind]
    inputs, hidden, lengths = 16, 32, torch.tensor([10, 7, 7, 2])
    packed = pack_padded_sequence(torch.randn(10, 4, inputs), lengths)
    report = rooftop.predict(make(inputs, hidden), packed, ceilings=h200, train=True, dtype=torch.bfloat16)
    assert {"_cudnn_rnn", "_cudnn_rnn_backward"} < names(report)
    assert products(report) == 3 * 2 * int(lengths.sum()) * gates * hidden * (inputs + hidden)


def test_packed_sequences_can_be_padded_again(h200: Ceilings) -> None:
    model = nn.GRU(16, 32)

    def run(packed: Any) -> Tensor:
        output, lengths = pad_packed_sequence(model(packed)[0], batch_first=True)
        assert (output.shape, lengths.shape) == ((4, 10, 32), (4,))
        return output.sum()

    packed = pack_padded_sequence(torch.randn(10, 4, 16), torch.tensor([10, 7, 7, 2]))
    assert "aten::_cudnn_rnn" in {row.name for row in rooftop.predict(run, packed, ceilings=h200).ops}


def test_without_cudnn_steps_are_counted(h200: Ceilings) -> None:
    with torch.backends.cudnn.flags(enabled=False):
        report = rooftop.predict(nn.GRU(16, 32), torch.randn(5, 2, 16), ceilings=h200)
    assert "_cudnn_rnn" not in names(report)


@pytest.mark.parametrize(
    ("cell", "fused"), [(nn.LSTMCell, "_thnn_fused_lstm_cell"), (nn.GRUCell, "_thnn_fused_gru_cell")]
)
@pytest.mark.parametrize("bias", [True, False])
def test_cells_have_a_kernel_for_their_gates(cell: type[nn.Module], fused: str, bias: bool, h200: Ceilings) -> None:
    report = rooftop.predict(cell(16, 32, bias=bias), torch.randn(4, 16), ceilings=h200, train=True)
    assert fused in names(report, "forward")
    assert any(name.startswith(f"{fused}_backward") for name in names(report, "backward"))
    assert "sigmoid" not in names(report)


MASKS: dict[str, Callable[[int], Tensor] | None] = {
    "no mask": None,
    "boolean": lambda length: torch.ones(length, length, dtype=torch.bool),
    "added": lambda length: torch.zeros(length, length),
}


@pytest.mark.parametrize(
    ("leading", "mask", "train"),  # each pair of them
    [
        pytest.param(leading, mask, (i + j) % 2 == 1, id=f"{len(leading) + 2}D-{mask}-{(i + j) % 2 == 1}")
        for i, leading in enumerate([(), (8,), (2, 4), (2, 2, 2)])
        for j, mask in enumerate(MASKS)
    ],
)
def test_attention_of_any_dimensions(leading: tuple[int, ...], mask: str, train: bool, h200: Ceilings) -> None:
    """Two products forward. Backward has four products, or five if one kernel computes the scores again."""
    length, width = 64, 32
    query = torch.randn(*leading, length, width, requires_grad=True)
    made = MASKS[mask]
    given = made(length) if made is not None else None

    def attend(query: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, query, query, attn_mask=given)

    report = rooftop.predict(attend, query, ceilings=h200, train=train)
    rows = [row for row in report.ops if row.name.endswith(("::mm", "::bmm")) or "attention" in row.name]
    product = 2 * torch.Size(leading).numel() * length * length * width
    fused = any("attention" in row.name for row in rows)
    assert fused or len(leading) != 2
    # The softmax inside a kernel counts too.
    matrix = sum(row.flops for row in rows)
    assert matrix == pytest.approx((2 + train * (5 if fused else 4)) * product, rel=0.12 if fused else 0)
    assert report.coverage == 1


def test_attention_inside_another_function_is_found(h200: Ceilings) -> None:
    """`F.multi_head_attention_forward` hid the attention: with dropout, seven times the layer's bytes were counted."""
    x = torch.randn(4, 2048, 512)
    with_dropout, without = (
        rooftop.predict(
            nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, dropout=dropout),
            x,
            ceilings=h200,
            train=True,
            dtype=torch.bfloat16,
        )
        for dropout in (0.1, 0.0)
    )
    for report in (with_dropout, without):
        kernel = "_scaled_dot_product_flash_attention"
        assert {name for name in names(report) if "attention" in name} == {kernel, f"{kernel}_backward"}
        assert "bmm" not in names(report)
    assert without.summary.bytes < with_dropout.summary.bytes < 1.3 * without.summary.bytes
    assert products(with_dropout) == products(without)
    tokens, layer = 4 * 2048, 4 * 512 * 512 + 2 * 512 * 2048
    attention = 4 * 4 * 2048 * 2048 * 512
    # The gradient of the layer's input is not needed, so the first product has no gradient of its input.
    assert products(without) == 3 * 2 * tokens * layer - 2 * tokens * 3 * 512 * 512 + attention * 7 // 2


def test_shared_key_heads_are_not_copied(h200: Ceilings) -> None:
    query, key = torch.randn(2, 8, 64, 32), torch.randn(2, 2, 64, 32)

    def attend(query: Tensor, key: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)

    report = rooftop.predict(attend, query, key, ceilings=h200, dtype=torch.bfloat16)
    assert names(report) == {"_scaled_dot_product_flash_attention"}
    assert products(report) == 2 * 2 * 2 * 8 * (64 * 65 // 2) * 32


ALL = [
    *(SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION),
    SDPBackend.MATH,
]


@pytest.mark.parametrize(
    ("dtype", "width", "allowed", "kernel"),
    [
        (torch.bfloat16, 36, ALL, "flash"),  # rows are padded to 40
        (torch.bfloat16, 512, ALL, "efficient"),
        (torch.bfloat16, 64, [SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH], "cudnn"),
        (torch.float32, 64, ALL, "efficient"),
        (torch.float32, 33, ALL, None),
        (torch.float64, 64, ALL, None),
        (torch.bfloat16, 64, [SDPBackend.MATH], None),
    ],
)
def test_the_kernel_is_the_one_that_a_gpu_has(
    dtype: torch.dtype, width: int, allowed: list[SDPBackend], kernel: str | None, h200: Ceilings
) -> None:
    """Dtype, width and disabled backends decide which attention kernel runs, as in PyTorch's sdp_utils.cpp."""
    query = torch.randn(2, 4, 64, width)
    with sdpa_kernel(allowed):
        report = rooftop.predict(lambda q: F.scaled_dot_product_attention(q, q, q), query, ceilings=h200, dtype=dtype)
    expected = set() if kernel is None else {f"_scaled_dot_product_{kernel}_attention"}
    assert {name for name in names(report) if "attention" in name} == expected
    assert ("bmm" in names(report)) == (kernel is None)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_composite_operators_are_replaced_in_any_mode_of_autograd(context: Any, h200: Ceilings) -> None:
    model, x = nn.Sequential(nn.RMSNorm(16), nn.Dropout(), nn.GRU(16, 32)), torch.randn(5, 4, 16)

    def run(x: Tensor) -> Any:
        with context():
            return model(x)

    assert names(rooftop.predict(run, x, ceilings=h200)) == {"_fused_rms_norm", "native_dropout", "zeros", "_cudnn_rnn"}


def test_norms_and_dropout_are_one_kernel_each_way(h200: Ceilings) -> None:
    model, x = nn.Sequential(nn.RMSNorm(16), nn.Dropout()), torch.randn(5, 4, 16, requires_grad=True)
    report = rooftop.predict(model, x, ceilings=h200, train=True)
    assert names(report, "forward") == {"_fused_rms_norm", "native_dropout"}
    assert names(report, "backward") == {"_fused_rms_norm_backward", "native_dropout_backward"}


def fakes(mode: FakeTensorMode, device: str) -> Callable[[Tensor], Tensor]:
    def fake(tensor: Tensor) -> Tensor:
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return FakeTensor(mode, meta, torch.device(device))

    return fake


def counted(run: Callable[[], Any], as_gpu: bool) -> Counter[str]:
    with torch.no_grad(), counted_for("cuda"), CountingMode() as mode:
        if as_gpu:
            with as_on_gpu():
                run()
        else:
            run()
    return Counter(r.name for r in mode.records if r.cost is None or r.cost.bytes or r.cost.total_flops)


FORWARD: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "rms_norm": (lambda x, w: F.rms_norm(x, (16,), w), (torch.randn(4, 16), torch.randn(16))),
    "rms_norm, other dtype": (lambda x, w: F.rms_norm(x, (16,), w), (torch.randn(4, 16).half(), torch.randn(16))),
    "rms_norm, channels last": (
        lambda x: F.rms_norm(x, (8,)),
        (torch.randn(2, 4, 8, 8).to(memory_format=torch.channels_last),),
    ),
    "rms_norm, half a channel": (lambda x: F.rms_norm(x[..., :4], (4,)), (torch.randn(2, 4, 8, 8),)),
    "dropout": (lambda x: F.dropout(x, 0.5), (torch.randn(4, 16),)),
    "dropout of all": (lambda x: F.dropout(x, 1.0), (torch.randn(4, 16),)),
    "dropout of none": (lambda x: F.dropout(x, 0.0), (torch.randn(4, 16),)),
    "dropout in place": (lambda x: F.dropout(x, 0.5, inplace=True), (torch.randn(4, 16),)),
    "lstm_cell": (
        lambda x, h, w, v, b: torch.lstm_cell(x, (h, h), w, v, b, b),
        (torch.randn(4, 16), torch.randn(4, 32), torch.randn(128, 16), torch.randn(128, 32), torch.randn(128)),
    ),
    "batch_norm": (lambda x: F.instance_norm(x), (torch.randn(2, 3, 8, 8),)),
    "group_norm": (lambda x: F.group_norm(x, 2), (torch.randn(2, 4, 8, 8),)),
    "convolutions": (
        lambda x, w: F.conv_transpose2d(F.conv2d(x, w, groups=4), w, groups=4),
        (torch.randn(2, 4, 8, 8), torch.randn(4, 1, 3, 3)),
    ),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), (torch.randn(2, 3, 8, 8),)),
    "embedding_bag": (
        lambda words, table: F.embedding_bag(words, table),
        (torch.randint(10, (4, 3)), torch.randn(10, 16)),
    ),
    "solve": (torch.linalg.solve, (torch.randn(8, 8), torch.randn(8, 2))),
}


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("name", FORWARD)
def test_the_operators_are_those_of_tensors_of_a_gpu(name: str) -> None:
    """PyTorch itself is the reference: in forward it runs on fake tensors of a GPU that does not exist."""
    if name in ("rms_norm", "rms_norm, half a channel") and not torch.backends.cuda.is_built():
        pytest.skip("a build for CPUs does not know that CUDA has a kernel for this operator")
    call, tensors = FORWARD[name]
    results = []
    for device, as_gpu in (("cpu", True), ("cuda:0", False)):
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        given = [fakes(mode, device)(t) for t in tensors]
        with mode:
            results.append(counted(lambda given=given: call(*given), as_gpu))
    same_cost = {"aten::cudnn_batch_norm": "aten::native_batch_norm"}
    assert results[0] == Counter({same_cost.get(n, n): count for n, count in results[1].items()})


def small_network() -> nn.Module:
    return nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(3)])


OPTIMIZERS = [
    *(torch.optim.Adadelta, torch.optim.Adafactor, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW),
    *(torch.optim.Adamax, torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop),
    *(torch.optim.Rprop, torch.optim.SGD),
]


def step_launches(optimizer: Callable[..., Any], h200: Ceilings) -> int:
    report = rooftop.predict(small_network(), torch.randn(2, 8), ceilings=h200, train=True, optimizer=optimizer)
    assert report.coverage == 1
    return sum(row.calls for row in report.ops if row.phase == "optimizer" and row.bytes)


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_optimizers_choose_lists_as_they_do_on_a_gpu(kind: Any, h200: Ceilings) -> None:
    left_to_itself = step_launches(kind, h200)
    if kind is not torch.optim.Adafactor:  # uses foreach kernels only if requested
        assert left_to_itself == step_launches(lambda p: kind(p, foreach=True), h200)
    if kind is not torch.optim.ASGD:  # computes its step sizes one by one even with foreach
        assert left_to_itself <= step_launches(lambda p: kind(p, foreach=False), h200)


def test_an_optimizer_keeps_what_its_user_chose(h200: Ceilings) -> None:
    lists = step_launches(torch.optim.Adam, h200)
    assert step_launches(lambda p: torch.optim.Adam(p, foreach=False), h200) > lists
    assert step_launches(lambda p: torch.optim.Adam(p, fused=True), h200) < lists
    rate = torch.tensor(0.1)  # with this tensor as learning rate, Adam does not use foreach kernels
    assert step_launches(lambda p: torch.optim.Adam(p, lr=rate), h200) > lists
    assert step_launches(lambda p: torch.optim.SGD(p, differentiable=False, foreach=None), h200) == 1


def test_the_hosts_count_of_steps_is_no_work_of_the_gpu(h200: Ceilings) -> None:
    report = rooftop.predict(small_network(), torch.randn(2, 8), ceilings=h200, train=True, optimizer=torch.optim.AdamW)
    optimizer = [row for row in report.ops if row.phase == "optimizer" and row.bytes]
    assert {row.name for row in optimizer if not row.name.startswith("aten::_foreach_")} == set()
    assert all(len(row.shapes) % 3 == 0 for row in optimizer)  # lists of the three weights, not of the step counts


def test_gradients_are_clipped_as_lists_in_a_loop_of_ones_own(h200: Ceilings) -> None:
    network = small_network()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)

    def step(x: Tensor) -> None:
        network(x).sum().backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    report = rooftop.predict(step, torch.randn(2, 8), ceilings=h200)
    calls = Counter({row.name: row.calls for row in report.ops if "foreach" in row.name})
    assert calls == {"aten::_foreach_norm": 1, "aten::_foreach_mul_": 1, "aten::_foreach_add_": 1}


@pytest.mark.parametrize(("dtype", "precision"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16"), (None, "fp16")])
def test_autocast_of_a_gpu_casts(dtype: torch.dtype | None, precision: str, h200: Ceilings) -> None:
    """Without a GPU, PyTorch ignores this autocast, and all products were counted as float32."""
    model, x = nn.Sequential(nn.Linear(16, 32), nn.GRU(32, 8)), torch.randn(5, 4, 16)

    def run(x: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=dtype):
            return model(x)[0].float().sum()

    report = rooftop.predict(run, x, ceilings=h200, train=True)
    assert products(report, precision) == 20 * 2 * (2 * 16 * 32 + 3 * 3 * 8 * (32 + 8))


def real_step() -> None:
    """A step of a program that is not being predicted."""
    network = nn.Sequential(nn.RMSNorm(8), nn.Dropout(), nn.GRU(8, 8))
    optimizer = torch.optim.Adam(network.parameters())
    output, _ = network(torch.randn(3, 2, 8))
    q = output.unsqueeze(0)
    F.scaled_dot_product_attention(q, q, q, dropout_p=0.1).sum().backward()
    optimizer.step()


def counted_step() -> list[str]:
    with CountingMode() as mode:
        real_step()
    return [record.name for record in mode.records]


def in_a_thread(run: Callable[[], list[str]]) -> list[str]:
    found: list[list[str]] = []
    thread = threading.Thread(target=lambda: found.append(run()))
    thread.start()
    thread.join()
    return found[0]


def test_programs_in_other_threads_keep_their_operators() -> None:
    before = counted_step()
    with as_on_gpu():
        during = in_a_thread(counted_step)
    assert during == before


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_remains(fails: bool, h200: Ceilings) -> None:
    before = counted_step()
    types = list(torch.utils._foreach_utils._foreach_supported_types)

    def run(x: Tensor) -> Tensor:
        if fails:
            raise KeyError("broken")
        return F.dropout(x)

    try:
        rooftop.predict(run, torch.randn(4), ceilings=h200)
    except rooftop.errors.ModelRunError:
        assert fails
    assert counted_step() == before
    assert type(torch.utils._foreach_utils._foreach_supported_types) is list
    assert torch.utils._foreach_utils._foreach_supported_types == types


def test_several_at_once() -> None:
    """The replaced kernels belong to the process, so the last user removes them."""
    before = counted_step()
    with as_on_gpu():
        with as_on_gpu():
            pass
        x = torch.randn(4, 16)
        assert counted(lambda: F.dropout(x), as_gpu=False) == {"aten::native_dropout": 1}
    assert counted_step() == before


def overloads(functions: Iterable[Any]) -> list[str]:
    return [function.name() for function in functions]


@pytest.mark.parametrize("name", overloads(CHOSEN_BY_DEVICE))
def test_only_composite_operators_are_replaced(name: str) -> None:
    """Only composite operators let calls from other threads fall back to PyTorch's own composition."""
    assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
    assert not torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutogradCPU")


IMPORTS_LATE = """
import torch
import rooftop

def step(x):
    from torch.nn.attention.flex_attention import flex_attention
    return flex_attention(x, x, x).sum()

x = torch.randn(1, 1, 128, 16, requires_grad=True)
ceilings = rooftop.hardware.ceilings_of("h200")
print([op.name for op in rooftop.predict(step, x, ceilings=ceilings, train=True).ops])
"""


def test_a_program_may_import_flex_attention_when_it_runs() -> None:
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", IMPORTS_LATE], capture_output=True, text=True)
    assert "higher_order::flex_attention_backward" in ran.stdout, ran.stderr
