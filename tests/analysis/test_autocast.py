"""The prediction of autocast from a float32 step agrees with PyTorch's autocast, and recorded calls can be repeated."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import rooftop
from rooftop import models
from rooftop.analysis import repeating
from rooftop.analysis.advice import alternatives, autocast
from rooftop.analysis.advice.alternatives import repeated_ratios
from rooftop.analysis.advice.autocast import cast_host_ms, under_autocast
from rooftop.analysis.instruments import MeasuredOperator
from rooftop.analysis.repeating import AS_IT_WAS, Form, Times, tensor_like, times_again
from rooftop.cost import CallSpec, CountingMode, Record, TensorSpec

CASTS = {"aten::_to_copy", "aten::copy_", "aten::detach", "aten::empty", "aten::t", "aten::view", "aten::transpose"}


class Residual(nn.Module):
    """Products, a pointwise function and a sum of both precisions."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.relu(self.widen(x)))


class Perceptron(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 8), nn.Tanh())


class Encoder(nn.Module):
    """Operators that a GPU's autocast computes in float32 and the CPU's leaves in bfloat16: norms, softmax, sums."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x)).softmax(-1).exp()
        return self.last(y / y.sum(-1, keepdim=True)).log_softmax(-1)


def phase() -> tuple[str, str]:
    return "", "backward" if torch._C._current_graph_task_id() >= 0 else "forward"


def recorded(step: Callable[[], Tensor]) -> list[Record]:
    with CountingMode(phase) as counted:
        step().sum().backward()
    return counted.records


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (models.model_entry("resnet18").build, (2, 3, 32, 32)),
        (Residual, (4, 16)),
        (Perceptron, (4, 16)),
        (Encoder, (64, 16)),
    ],
    ids=["resnet18", "residual", "perceptron", "encoder"],
)
def test_operators_take_the_types_that_autocast_gives_them(build: Callable[[], nn.Module], shape: list[int]) -> None:
    module, x = build().train(), torch.randn(*shape)

    def mixed() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out: Tensor = module(x)
        return out.float()

    full = recorded(lambda: module(x))
    expected = [(r.name, r.dtype) for r in recorded(mixed) if r.name not in CASTS and r.phase == "forward"]
    predicted = [
        (record.name, "bfloat16" if recast.bytes_ratio < 0.75 else "float32")
        for record, recast in zip(full, under_autocast(full, "cpu"), strict=True)
        if record.name not in CASTS and record.phase == "forward"
    ]
    names = {name for name, _ in expected} & {name for name, _ in predicted}
    moving = names - {"aten::sum", "aten::add_"}  # the sum is the step's own; the rest are counters of batch norms
    assert [item for item in predicted if item[0] in moving] == [item for item in expected if item[0] in moving]


def test_weights_are_cast_once_and_activations_where_they_meet_a_product() -> None:
    layer, x = nn.Linear(16, 8), torch.randn(4, 16)

    def twice() -> Tensor:
        return layer(x) + layer(x)

    records = recorded(twice)
    casts = {kind: [r.casts for r in under_autocast(records, kind) if r.casts] for kind in ("cpu", "cuda")}
    # Casts of bias, input and weight for the first product, none for the second, and on a GPU those of the last sum's
    # inputs.
    assert casts == {"cpu": [(8, 4 * 16, 16 * 8)], "cuda": [(8, 4 * 16, 16 * 8), (4 * 8,)]}


def test_losses_take_float32() -> None:
    layer, x, labels = nn.Linear(16, 8), torch.randn(4, 16), torch.zeros(4, dtype=torch.long)
    records = recorded(lambda: nn.functional.cross_entropy(layer(x), labels))
    by_name = dict(zip((r.name for r in records if r.phase == "forward"), under_autocast(records, "cpu"), strict=False))
    assert by_name["aten::_log_softmax"].bytes_ratio == 1.0
    assert by_name["aten::_log_softmax"].casts == (32,)
    assert by_name["aten::addmm"].bytes_ratio == 0.5


def images(channels_last: bool = False) -> list[Record]:
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    x = torch.randn(2, 3, 14, 14)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    return recorded(lambda: layers(x))


CPU = torch.device("cpu")
OTHER = Form(torch.bfloat16, channels_last=True)


def specs(records: list[Record]) -> list[CallSpec]:
    return [record.spec for record in records if record.spec is not None and record.name in alternatives._TIMED_AGAIN]


def test_recorded_calls_run_again_in_another_type_and_layout() -> None:
    found = specs(images())
    assert len(found) == 6  # convolution, batch norm and pooling, forward and backward
    again = times_again([(spec, form) for spec in found for form in (AS_IT_WAS, OTHER)], CPU)
    assert all(times is not None and 0 < times.best_ms <= times.median_ms for times in again)


def test_attention_and_products_run_again() -> None:
    def attention() -> Tensor:
        q, k, v = (torch.randn(2, 4, 16, 8, requires_grad=True) for _ in range(3))
        attended: Tensor = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return attended

    layer = nn.Linear(16, 8)
    for spec in specs(recorded(lambda: layer(torch.randn(4, 16)))):
        assert times_again([(spec, Form(torch.bfloat16))], CPU)[0] is not None
    assert all(spec["is_causal"] for spec in specs(recorded(attention)))


def test_layouts_are_recorded() -> None:
    first, last = (specs(images(channels_last=given))[0].args[0] for given in (False, True))
    assert not first.channels_last
    assert last.channels_last
    assert first != last


def test_what_cannot_run_again_is_not_timed() -> None:
    refused, taken = times_again([(specs(images())[0], form) for form in (Form(torch.float8_e4m3fn), AS_IT_WAS)], CPU)
    assert refused is None
    assert taken is not None


def test_norms_poolings_and_resizing_run_again_in_another_layout() -> None:
    """A batch norm is repeated through its public function, the other operators as recorded."""
    layers = nn.Sequential(
        *(nn.GroupNorm(2, 4), nn.AvgPool2d(2), nn.Upsample(scale_factor=2, mode="bilinear")),
        *(nn.Upsample(7, mode="bicubic"), nn.Upsample(8, mode="nearest"), nn.Upsample(9, mode="nearest-exact")),
        nn.AdaptiveAvgPool2d(3),
    )
    found = specs(recorded(lambda: layers(torch.randn(2, 4, 8, 8, requires_grad=True))))
    assert len(found) == 14
    again = times_again([(spec, Form(channels_last=True)) for spec in found], CPU)
    assert [spec.name for spec, times in zip(found, again, strict=True) if times is None] == []


def test_an_image_of_one_pixel_stays_channels_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout after a pooling is the one that PyTorch gives it. The weight of a 1 x 1 convolution takes the layout
    of its model."""
    layers = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 6, 1), nn.Upsample(scale_factor=8))
    found = specs(recorded(lambda: layers(torch.randn(2, 4, 6, 6))))
    made = []

    def remembered(spec: TensorSpec, form: Form, device: torch.device) -> Tensor:
        made.append((spec.shape, form.channels_last))
        return tensor_like(spec, form, device)

    monkeypatch.setattr(repeating, "tensor_like", remembered)
    assert None not in times_again([(spec, Form(channels_last=True)) for spec in found], CPU)
    assert ((6, 4, 1, 1), True) in made
    assert {last for shape, last in made if len(shape) == 4 and shape[0] == 2 and shape[2:] == (1, 1)} == {False}


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize(
    "norm",
    [
        *(nn.InstanceNorm2d(8), nn.InstanceNorm2d(8, affine=True), nn.BatchNorm2d(8, affine=False)),
        *(nn.BatchNorm2d(8, affine=False, track_running_stats=False), nn.BatchNorm2d(8, track_running_stats=False)),
    ],
)
def test_norms_with_and_without_weights_and_statistics_run_again(norm: nn.Module, train: bool) -> None:
    norm = norm.train(train)
    found = specs(recorded(lambda: norm(torch.randn(4, 8, 6, 6, requires_grad=True))))
    assert len(found) == 2
    for form in (AS_IT_WAS, OTHER):
        assert None not in times_again([(spec, form) for spec in found], CPU)


class Watching(TorchDispatchMode):
    def __init__(self) -> None:
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


def test_neither_defaults_nor_modes_of_the_program_meet_calls_that_are_made_again() -> None:
    spec = specs(images())[0]
    dtype = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"), Watching() as watching:
            (taken,) = times_again([(spec, AS_IT_WAS)], CPU)
            assert torch.empty(1).is_meta
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(dtype)
    assert taken is not None
    assert watching.seen == 1  # ours


@pytest.mark.parametrize(("free_bytes", "taken"), [(10_000_000, True), (1_000, False)])
def test_a_call_for_which_there_is_no_room_is_not_made(
    free_bytes: int, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = specs(recorded(lambda: nn.Linear(16, 8)(torch.randn(4, 16))))[0]
    monkeypatch.setattr(repeating, "_free_bytes", lambda device: free_bytes)
    assert (times_again([(spec, AS_IT_WAS)], CPU) != [None]) is taken


def test_a_slow_call_on_a_cpu_runs_once_and_none_begins_when_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = specs(recorded(lambda: nn.Linear(16, 8)(torch.randn(4, 16))))[0]
    runs = []
    plain = repeating._Repeated.run

    def run(call: Any) -> None:
        plain(call)
        runs.append(call)
        call.ms = 1e3 * slow_s
        now[0] += slow_s

    now, slow_s = [0.0], 1.0
    monkeypatch.setattr(repeating._Repeated, "run", run)
    monkeypatch.setattr(repeating, "perf_counter", lambda: now[0])
    monkeypatch.setattr(repeating, "MOST_SECONDS", 3.0)
    found = times_again([(spec, AS_IT_WAS)] * 6, CPU)
    assert [times and times.median_ms for times in found] == [1000.0] * 4 + [None] * 2
    assert len(runs) == 4
    slow_s = 0.001
    assert len(times_again([(spec, AS_IT_WAS)], CPU, repeats=3)) == 1
    assert len(runs) == 4 + 1 + 3


def test_small_calls_go_by_their_larger_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(16, 8)
    large = specs(recorded(lambda: layer(torch.randn(64, 16))))[0]
    small = specs(recorded(lambda: layer(torch.randn(2, 16))))[0]
    asked = []

    def fake(calls: list[tuple[CallSpec, Form]], device: torch.device) -> list[Times | None]:
        asked.extend(spec for spec, _ in calls)
        return [Times(ms, ms) for ms in (2.0 if form == AS_IT_WAS else 1.0 for _, form in calls)]

    monkeypatch.setattr(alternatives, "times_again", fake)
    operators = [
        MeasuredOperator(record, ms, ())
        for rows, ms in ((64, 97.0), (2, 1.0))
        for record in recorded(lambda rows=rows: layer(torch.randn(rows, 16)))
        if record.spec in (large, small)
    ]
    ratios = repeated_ratios(operators, Form(torch.bfloat16), CPU)
    assert ratios[large] == ratios[small] == 0.5
    assert small not in asked


def test_a_convolution_that_was_not_timed_gains_as_others_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Depthwise convolutions become faster with another layout, pointwise ones do not."""
    layers = (nn.Conv2d(8, 16, 3, groups=8), nn.Conv2d(4, 16, 3, groups=4), nn.Conv2d(8, 16, 1), nn.Conv2d(4, 16, 1))
    found = [specs(recorded(lambda layer=layer: layer(torch.randn(1, layer.in_channels, 9, 9))))[0] for layer in layers]

    def timed(calls: list[tuple[CallSpec, Form]], device: torch.device) -> list[Times]:
        halves = [1.0 if form == AS_IT_WAS or spec["groups"] == 1 else 0.5 for spec, form in calls]
        return [Times(ms, ms) for ms in halves]

    monkeypatch.setattr(alternatives, "times_again", timed)
    monkeypatch.setattr(alternatives, "MOST_CALLS", 2)
    operators = [
        MeasuredOperator(Record(spec.name, (), "float32", "cpu", "", "forward", None, spec=spec), ms, ())
        for spec, ms in zip(found, (30.0, 2.0, 20.0, 1.0), strict=True)
    ]
    assert list(repeated_ratios(operators, Form(channels_last=True), CPU).values()) == [0.5, 1.0, 0.5, 1.0]


@pytest.mark.gpu
@pytest.mark.parametrize("parameters", [0, 1, 2])
def test_rooftops_layer_norm_is_timed_on_the_shapes_of_a_row(parameters: int) -> None:
    forward, backward = (
        alternatives._layer_norm_ms(torch.device("cuda", 0), backward, 512, 1024, parameters, "float32")
        for backward in (False, True)
    )
    assert 0 < forward < backward


@pytest.mark.gpu
def test_calls_made_again_take_as_long_on_a_gpu_as_their_kernels_in_a_step() -> None:
    """Products and attention that were recorded, forward and backward."""
    net = nn.Sequential(nn.Linear(2048, 2048), nn.GELU(), nn.Linear(2048, 2048)).cuda().half()
    report = rooftop.analyze(net, torch.randn(4096, 2048, device="cuda").half(), train=True)
    in_step = {row.shapes: row.measured_ms / row.calls for row in report.ops if row.name in ("aten::mm", "aten::addmm")}
    found = specs(recorded(lambda: net(torch.randn(4096, 2048, device="cuda").half()).sum()))
    again = times_again([(spec, AS_IT_WAS) for spec in found], torch.device("cuda"))
    assert len(found) == 5  # the input of the first layer needs no gradient
    for spec, times in zip(found, again, strict=True):
        shapes = tuple(item.shape for item in spec.args if isinstance(item, TensorSpec))
        assert times is not None
        if shapes in in_step:
            assert times.median_ms == pytest.approx(in_step[shapes], rel=0.25)


@pytest.mark.gpu
def test_a_transformer_takes_the_types_that_autocast_gives_it() -> None:
    """GPT-2 mixes both dtypes: its norms, powers and sums of residuals stay in float32."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=100, use_cache=False)
    module = transformers.GPT2LMHeadModel(config).cuda().train()
    ids = torch.randint(100, (2, 32), device="cuda")
    full = recorded(lambda: module(ids, labels=ids).loss)

    def mixed() -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss: Tensor = module(ids, labels=ids).loss
        return loss

    real = [(r.name, r.dtype) for r in recorded(mixed) if r.name not in CASTS and r.phase == "forward"]
    predicted = [
        (record.name, "bfloat16" if recast.bytes_ratio < 0.75 else "float32")
        for record, recast in zip(full, under_autocast(full, "cuda"), strict=True)
        if record.name not in CASTS and record.phase == "forward"
    ]
    products = {"aten::addmm", "aten::mm", "aten::bmm", "aten::native_layer_norm", "aten::pow", "aten::_log_softmax"}
    assert [item for item in predicted if item[0] in products] == [item for item in real if item[0] in products]
    casts = sum(len(recast.casts) for recast in under_autocast(full, "cuda"))
    made = sum(r.name in ("aten::_to_copy", "aten::copy_") for r in recorded(mixed) if r.phase == "forward")
    assert casts == pytest.approx(made, rel=0.25)


@pytest.mark.parametrize("training", [False, True])
def test_a_cast_costs_what_autocast_adds_to_a_launch(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def slow_under_autocast(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        now[0] += 0.021 if torch.is_autocast_enabled("cpu") else 0.001
        return x + weight

    monkeypatch.setattr(autocast, "linear", slow_under_autocast)
    monkeypatch.setattr(autocast, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(autocast, "LAYERS", 2)
    casts = 2 if training else 1  # casts per layer
    assert cast_host_ms("cpu", training) == pytest.approx(20 / casts)
