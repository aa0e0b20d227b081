"""`rooftop.predict` counts what `analyze` would count, runs nothing, changes nothing, and is marked as a prediction."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rooftop
from rooftop.analysis import Report, fake_tensors
from rooftop.errors import InputError, ModelRunError
from rooftop.hardware import ceilings_of
from rooftop.hardware.ceilings import Ceilings
from rooftop.models import resnet18
from rooftop.models.vision.resnet import BasicBlock, ResNet


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These models are too small to need threads, which would wait for each other while other programs use the
    cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


Build = Callable[[], tuple[nn.Module, Tensor, dict[str, Any]]]


@pytest.fixture(scope="module")
def h200() -> Ceilings:
    return ceilings_of("h200")


def mean_logit(output: Any) -> Tensor:
    """A loss of a language model that needs no labels."""
    loss: Tensor = output.logits.logsumexp(-1).mean()
    return loss


def convolutional() -> tuple[nn.Module, Tensor, dict[str, Any]]:
    return ResNet(BasicBlock, (1, 1, 1, 1)), torch.randn(4, 3, 32, 32), {}


NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}


def language(transformers: ModuleType, **changes: Any) -> Build:
    def build() -> tuple[nn.Module, Tensor, dict[str, Any]]:
        settings = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 100, **NO_DROPOUT, **changes}
        config = transformers.GPT2Config(**settings, bos_token_id=0, eos_token_id=0)
        return transformers.GPT2LMHeadModel(config), torch.randint(100, (2, 32)), {"loss": mean_logit}

    return build


def small_net() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 2))


def images() -> Tensor:
    return torch.randn(2, 3, 8, 8)


def counts(report: Report) -> dict[tuple[Any, ...], tuple[int, int, int]]:
    """(name, phase, shapes) -> calls, flops, bytes of the operators that do something."""
    working = (row for row in report.ops if row.flops or row.bytes)
    return {(row.name, row.phase, row.shapes): (row.calls, row.flops, row.bytes) for row in working}


@pytest.mark.parametrize(("network", "train"), [("convolutional", False), ("convolutional", True), ("language", True)])
def test_the_totals_are_those_of_a_run(
    network: str, train: bool, transformers: ModuleType, ceilings: Ceilings, h200: Ceilings
) -> None:
    """With a CPU's ceilings, the counts agree operator by operator. With a GPU's ceilings, the counts agree except for
    attention, which is another operator on a GPU.

    (Dropout is another operator on a GPU as well, but the model has none.)"""
    model, x, extra = convolutional() if network == "convolutional" else language(transformers)()
    extra = extra if train else {}
    measured = rooftop.analyze(model, x, ceilings=ceilings, train=train, **extra)
    assert counts(rooftop.predict(model, x, ceilings=ceilings, train=train, **extra)) == counts(measured)
    on_gpu = rooftop.predict(model, x, ceilings=h200, train=train, **extra)
    both = [{row: of for row, of in counts(r).items() if "attention" not in row[0]} for r in (measured, on_gpu)]
    assert both[0] == both[1]
    assert on_gpu.summary.flops == measured.summary.flops
    assert on_gpu.summary.bytes == pytest.approx(measured.summary.bytes, rel=0.01)
    assert on_gpu.summary.parameters == measured.summary.parameters


def test_fake_weights_give_the_same_prediction(transformers: ModuleType, h200: Ceilings) -> None:
    for build in (convolutional, language(transformers)):
        totals = []
        for context in (nullcontext(), fake_tensors()):
            with context:
                model, x, extra = build()
                report = rooftop.predict(model, x, ceilings=h200, train=True, **extra)
            totals.append((report.summary, counts(report)))
        assert totals[0] == totals[1]


@pytest.mark.parametrize("train", [False, True])
def test_a_prediction_takes_seconds(train: bool, h200: Ceilings) -> None:
    with fake_tensors():
        model, x = resnet18(), torch.randn(8, 3, 224, 224)
    began = time.process_time()
    rooftop.predict(model, x, ceilings=h200, train=train)
    assert time.process_time() - began < 5


def test_weights_may_be_real_fake_or_on_the_meta_device(h200: Ceilings) -> None:
    with fake_tensors():
        fake, fake_input = nn.Linear(8, 4), torch.randn(2, 8)
    real_input = torch.randn(2, 8)
    predictions = [
        rooftop.predict(nn.Linear(8, 4), real_input, ceilings=h200, train=True),
        rooftop.predict(nn.Linear(8, 4, device="meta"), real_input, ceilings=h200, train=True),
        rooftop.predict(fake, real_input, ceilings=h200, train=True),
        rooftop.predict(fake, fake_input, ceilings=h200, train=True),
    ]
    assert len({json.dumps(report.to_dict()["ops"]) for report in predictions}) == 1
    assert predictions[0].summary.flops == 2 * 3 * 8 * 4 * 2 - 2 * 2 * 8 * 4 + 2 * 4 + 2 * 4  # no input gradient


@settings(max_examples=4, deadline=None)
@given(batch=st.integers(1, 9), width=st.integers(1, 40), features=st.integers(1, 40))
def test_a_product_is_counted_by_hand_in_any_dtype(h200: Ceilings, batch: int, width: int, features: int) -> None:
    layer, x = nn.Linear(width, features, bias=False), torch.randn(batch, width)
    for dtype, precision, size in ((None, "fp32", 4), (torch.bfloat16, "bf16", 2), (torch.float64, "fp64", 8)):
        (row,) = [r for r in rooftop.predict(layer, x, ceilings=h200, dtype=dtype).ops if r.bytes]
        assert row.flops_by_precision == {precision: 2 * batch * width * features}
        assert row.bytes == size * (batch * width + width * features + batch * features)
        assert row.dtype == str(dtype or torch.float32).removeprefix("torch.")
    assert layer.weight.dtype == torch.float32


def test_nothing_of_a_model_changes(h200: Ceilings) -> None:
    net, x = small_net(), images()
    net[1].eval()
    net(x).sum().backward()
    parameters = [(p, p.clone(), p.grad) for p in net.parameters()]
    buffers = [(b, b.clone()) for b in net.buffers()]
    flags, random_state = [m.training for m in net.modules()], torch.get_rng_state()
    rooftop.predict(net, x, ceilings=h200, train=True, optimizer=torch.optim.AdamW, dtype=torch.bfloat16)
    assert [m.training for m in net.modules()] == flags
    assert torch.equal(torch.get_rng_state(), random_state)
    for now, (p, value, gradient) in zip(net.parameters(), parameters, strict=True):
        assert now is p
        assert torch.equal(p, value)
        assert p.grad is gradient
    assert all(now is b and torch.equal(b, value) for now, (b, value) in zip(net.buffers(), buffers, strict=True))


def test_a_traced_model_gets_no_gradients(h200: Ceilings) -> None:
    """TorchScript copies its own tensors."""
    model = nn.Sequential(torch.jit.trace(nn.Linear(4, 4), torch.randn(2, 4)), nn.Linear(4, 4))
    report = rooftop.predict(model, torch.randn(2, 4), ceilings=h200, train=True)
    assert {row.phase for row in report.ops} >= {"forward", "backward"}
    assert [parameter.grad for parameter in model.parameters()] == [None] * 4


@pytest.mark.parametrize("has_stepped", [False, True])
def test_nothing_of_a_model_changes_that_a_callable_holds(has_stepped: bool, h200: Ceilings) -> None:
    """PyTorch's fake mode really computes in-place work whose tensors are all real (weight decay, counts of
    batches)."""
    net, x = small_net(), images()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.5, weight_decay=0.5)

    def step(x: Tensor) -> None:
        net(x).sum().backward()
        optimizer.step()

    if has_stepped:
        step(x)
    gradients = [p.grad for p in net.parameters()]
    weights = {name: value.clone() for name, value in net.state_dict().items()}
    state = {p: {name: value.clone() for name, value in of.items()} for p, of in optimizer.state.items()}
    report = rooftop.predict(step, x, ceilings=h200)
    assert {row.phase for row in report.ops} == {"forward", "backward", "optimizer"}
    assert all(p.grad is g for p, g in zip(net.parameters(), gradients, strict=True))
    assert all(torch.equal(value, weights[name]) for name, value in net.state_dict().items())
    assert {p: set(of) for p, of in optimizer.state.items()} == {p: set(of) for p, of in state.items()}
    assert all(torch.equal(value, state[p][name]) for p, of in optimizer.state.items() for name, value in of.items())
    step(x)  # the original function still works


def test_what_trains_goes_on_where_it_stood(h200: Ceilings) -> None:
    """Learning rates, schedulers and gradients that a callable changes are restored, wherever the callable changes
    them."""
    net, x = small_net(), images()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    net(x).sum().backward()

    def step(x: Tensor) -> None:
        optimizer.param_groups[0]["lr"] *= 3
        net[0].requires_grad_(False)
        optimizer.zero_grad()
        net(x).sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})

    (group,) = optimizer.param_groups
    before, schedule, gradients = dict(group), scheduler.state_dict(), [p.grad for p in net.parameters()]
    rooftop.predict(step, x, ceilings=h200)
    assert optimizer.param_groups == [group]
    assert group == before
    assert scheduler.state_dict() == schedule
    assert all(p.requires_grad and p.grad is g for p, g in zip(net.parameters(), gradients, strict=True))


def test_tensors_that_are_neither_parameters_nor_buffers(h200: Ceilings) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scales = nn.Linear(8, 8), {"all": [torch.ones(8)]}

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * self.scales["all"][0]

    report = rooftop.predict(Scaled(), torch.randn(2, 8), ceilings=h200, train=True)
    assert counts(report)["aten::mul", "forward", ((2, 8), (8,))] == (1, 16, 4 * (16 + 8 + 16))


def test_a_gpu_steps_its_optimizer_on_lists(ceilings: Ceilings, h200: Ceilings) -> None:
    """By default, PyTorch steps all parameters at once on a GPU, and one after the other on a CPU."""

    def launches(against: Ceilings, **options: Any) -> int:
        def optimizer(parameters: Any) -> torch.optim.Optimizer:
            return torch.optim.Adam(parameters, **options)

        report = rooftop.predict(small_net(), images(), ceilings=against, train=True, optimizer=optimizer)
        return sum(row.calls for row in report.ops if row.phase == "optimizer" and row.bytes)

    assert launches(h200) == launches(h200, foreach=True) < launches(h200, foreach=False) == launches(ceilings)
    assert launches(h200, fused=True) < launches(h200)


def test_attention_with_dropout_is_one_kernel_on_a_gpu(
    transformers: ModuleType, ceilings: Ceilings, h200: Ceilings
) -> None:
    model, x, extra = language(transformers, attn_pdrop=0.1)()
    on_cpu, on_gpu = (
        {row.name for row in rooftop.predict(model, x, ceilings=where, train=True, **extra).ops}
        for where in (ceilings, h200)
    )
    assert "aten::_safe_softmax" in on_cpu
    assert "aten::_safe_softmax" not in on_gpu
    assert {n for n in on_gpu if "attention" in n} == {
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_efficient_attention_backward",
    }


def test_a_prediction_is_a_lower_bound(h200: Ceilings) -> None:
    """The wall time is the longer of two sums: the operators' roof times, and the host's launch times."""
    report = rooftop.predict(small_net(), images(), ceilings=h200)
    summary, gaps = report.summary, report.gaps
    assert gaps.kernel_gap_ms == 0
    assert summary.busy_ms == summary.op_roof_ms == pytest.approx(sum(row.roof_ms for row in report.ops))
    assert summary.kernels == sum(row.calls for row in report.ops if row.bytes)
    assert summary.wall_ms == max(summary.op_roof_ms, summary.kernels * h200.launch_eager_ms)
    assert gaps.launch_gap_ms == pytest.approx(summary.wall_ms - summary.op_roof_ms)
    assert (summary.repeats, summary.samples) == (0, 2)


def test_the_report_says_that_it_is_predicted(h200: Ceilings, tmp_path: Path) -> None:
    report = rooftop.predict(small_net(), images(), ceilings=h200, name="small")
    heading = report.table().splitlines()[1]
    assert "predicted" in heading
    assert "measured" not in report.table().split("note:")[0]
    assert "Predicted for NVIDIA H200" in report.table()
    assert report.device == {"kind": "cuda", "name": "NVIDIA H200"}
    report.to_html(tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "predicted" in page
    assert '<button type="button">measured</button>' not in page
    report.to_json(tmp_path / "r.json")
    plain = json.loads((tmp_path / "r.json").read_text())
    assert plain["predicted"] is True
    assert {row["percent_of_roof"] for row in plain["ops"]} == {None}
    assert Report.from_json(tmp_path / "r.json") == report


def test_a_decoder_of_a_billion_parameters(transformers: ModuleType, h200: Ceilings, tmp_path: Path) -> None:
    """A training step of 2048 tokens, with a sixteenth of the 32 layers of a model of 7 billion parameters. The
    prediction is compared with the usual 6 flops for each parameter and token, plus attention."""
    layers = 2
    config = transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=layers, num_attention_heads=32, vocab_size=32000
    )
    with fake_tensors():
        model = transformers.LlamaForCausalLM(config)
        report = rooftop.predict(
            model,
            torch.randint(32000, (1, 2048)),
            ceilings=h200,
            train=True,
            loss=mean_logit,
            optimizer=torch.optim.AdamW,
            dtype=torch.bfloat16,
        )
    parameters = report.summary.parameters
    assert parameters == 6_738_415_616 - 30 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096)
    products = 6 * (parameters - 32000 * 4096) * 2048  # the embedding is looked up
    attention = layers * (4 + 10) * 2048 * 2048 / 2 * 4096  # two products forward, five backward, half of them masked
    assert report.summary.flops == pytest.approx(products + attention, rel=0.03)
    assert report.coverage == 1
    for path in (tmp_path / "r.json", tmp_path / "r.html"):
        report.to_json(path) if path.suffix == ".json" else report.to_html(path)
        assert path.stat().st_size < 10_000_000


def looks(x: Tensor) -> Tensor:
    return x if x.sum().item() > 0 else -x


@pytest.mark.parametrize(
    "function",
    [looks, torch.nonzero, lambda x: x[x > 0], lambda x: x if (x > 0).any() else -x, Tensor.tolist, Tensor.numpy],
)
def test_what_depends_on_values_cannot_be_predicted(function: Callable[[Tensor], Any], h200: Ceilings) -> None:
    with pytest.raises(InputError, match="cannot be predicted: its operators depend on values"):
        rooftop.predict(function, torch.randn(4), ceilings=h200)


def test_a_model_that_raises_is_named_with_its_line(h200: Ceilings) -> None:
    def broken(x: Tensor) -> Tensor:
        return x @ torch.ones(3, 3)

    line = broken.__code__.co_firstlineno + 1
    with pytest.raises(
        ModelRunError, match=rf"broken raised .* for inputs 2x4:float32: .*test_predicting\.py:{line}\)"
    ):
        rooftop.predict(broken, torch.randn(2, 4), ceilings=h200)


def test_an_error_of_the_model_is_only_raised(h200: Ceilings, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch also logged the traceback of an operator that failed on fake tensors."""
    logged: list[logging.LogRecord] = []
    monkeypatch.setattr(logging.Logger, "callHandlers", lambda _, record: logged.append(record))
    with pytest.raises(ModelRunError, match="same reduction dim"):
        rooftop.predict(nn.Linear(4, 4), torch.ones(2, 5), ceilings=h200)
    assert logged == []


def test_a_module_with_a_generator_of_its_own(h200: Ceilings) -> None:
    """Copying the generator raised SystemError."""

    class Noisy(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + torch.rand(x.shape, generator=self.random))

    model, model_state = Noisy(4, 4), torch.Generator().manual_seed(1)
    model.random = model_state
    before = model_state.get_state()
    assert rooftop.predict(model, torch.ones(2, 4), ceilings=h200).summary.flops > 0
    assert torch.equal(model_state.get_state(), before)


def test_machines_that_do_not_exist(h200: Ceilings, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'b9000' is neither a known machine \(.*h200.*\) nor a ceilings file"):
        ceilings_of("b9000")
    with pytest.raises(TypeError, match=r"ceilings='h200'.*rooftop\.hardware\.ceilings_of"):
        rooftop.predict(nn.ReLU(), torch.ones(3), ceilings="h200")  # type: ignore[arg-type]
    h200.save(tmp_path / "there.json")
    assert ceilings_of(tmp_path / "there.json") == h200


class Locked(nn.Linear):
    """An object that cannot be copied."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"target": nn.Flatten()}, InputError, "nothing to predict: Flatten runs no operator with"),
        ({"target": nn.Linear(3, 3), "args": [torch.randn(0, 3)]}, InputError, "or all results are empty tensors"),
        ({"target": Locked()}, InputError, r"with fake tensors failed \(TypeError: cannot pickle"),
        (
            {"args": [torch.eye(3).to_sparse()]},
            InputError,
            "times cannot be predicted with a sparse tensor: pass dense ones",
        ),
        ({"dtype": "bf16"}, TypeError, r"predict\(dtype='bf16'\): expected a floating-point dtype"),
        ({"dtype": torch.int8}, TypeError, "expected a floating-point dtype"),
        (
            {"train": True, "optimizer": "sgd"},
            TypeError,
            r"predict\(optimizer=str\): expected a function that creates an optimizer",
        ),
        ({"train": True, "optimizer": lambda parameters: None}, TypeError, "the function returned None"),
        (
            {"train": True, "optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))])},
            TypeError,
            r"predict\(optimizer=SGD\): expected a function that creates an optimizer",
        ),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], message: str, ceilings: Ceilings) -> None:
    values: dict[str, Any] = {"target": nn.Linear(3, 3), "args": [torch.ones(2, 3)], **arguments}
    with pytest.raises(error, match=message):
        rooftop.predict(values.pop("target"), *values.pop("args"), ceilings=ceilings, **values)


def test_predictions_in_several_threads_do_not_find_each_others_tensors(h200: Ceilings) -> None:
    errors: list[BaseException] = []

    def predict() -> None:
        try:
            for _ in range(3):
                rooftop.predict(small_net(), images(), ceilings=h200, train=True)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=predict) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_a_lazy_module_is_to_be_run_first(h200: Ceilings) -> None:
    net = nn.LazyLinear(8)
    with pytest.raises(InputError, match="run the model once"):
        rooftop.predict(net, torch.ones(4, 8), ceilings=h200)
    net(torch.ones(4, 8))
    assert rooftop.predict(net, torch.ones(4, 8), ceilings=h200).summary.flops
