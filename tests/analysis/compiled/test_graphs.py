"""A compiled program is analyzed as it runs: its graphs, breaks and recompilations, and its kernels with cost and
module.

Each compilation takes seconds, so programs that several tests use are compiled once.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rooftop
import rooftop.models
from rooftop.analysis.compiled.graphs import CompiledGraphs
from rooftop.analysis.report import Report
from rooftop.analysis.report_contents import OperatorRow
from rooftop.errors import ModelRunError
from rooftop.hardware.ceilings import Ceilings

PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::convolution", "aten::convolution_backward")
FLOAT = 4

# Warnings of torch about what it compiles; none concerns the analyzed program.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.*")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """These models are too small for threads, which would wait for each other on a machine with other work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Keep one test's compilation from counting as a recompilation of another test's code."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def hooks() -> tuple[Any, ...]:
    from torch._dynamo import utils
    from torch._functorch import config as functorch_config
    from torch._inductor import compile_fx
    from torch._inductor import config as inductor_config

    logger = logging.getLogger("torch._dynamo.symbolic_convert.__graph_breaks")
    return (
        compile_fx.compile_fx,
        utils._compilation_metrics,
        functorch_config.enable_autograd_cache,
        inductor_config.fx_graph_cache,
        inductor_config.trace.provenance_tracking_level,
        inductor_config.cpp.enable_kernel_profile,
        logger.level,
        logger.propagate,
        tuple(logger.handlers),
    )


class Net(nn.Module):
    """A convolution, its norm, a pooling and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).relu().mean((2, 3)))  # (N, 3, H, W) -> (N, 10)


class Block(nn.Module):
    """A residual block over an embedding, as in a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)  # (B, T, 32)
        return x + self.down(nn.functional.gelu(self.up(self.norm(x)))).softmax(-1)


@dataclass(frozen=True)
class Analyzed:
    """A training step, analyzed with and without compilation, and the state that the first analysis left."""

    model: nn.Module
    state_before: dict[str, Tensor]
    hooks_before: tuple[Any, ...]
    hooks_after: tuple[Any, ...]
    compiled: Report
    eager: Report


def analyzed(model: nn.Module, x: Tensor, ceilings: Ceilings) -> Analyzed:
    torch._dynamo.reset()
    hooks_before, state_before = hooks(), copy.deepcopy(model.state_dict())
    compiled = rooftop.analyze(model, x, train=True, compile=True, ceilings=ceilings)
    hooks_after = hooks()
    eager = rooftop.analyze(model, x, train=True, ceilings=ceilings)
    return Analyzed(model, state_before, hooks_before, hooks_after, compiled, eager)


@pytest.fixture(scope="module")
def net(round_ceilings: Ceilings) -> Analyzed:
    return analyzed(Net().eval(), torch.randn(4, 3, 16, 16), round_ceilings)


@pytest.fixture(scope="module")
def block(round_ceilings: Ceilings) -> Analyzed:
    return analyzed(Block().eval(), torch.randint(0, 50, (2, 16)), round_ceilings)


@pytest.fixture(params=["net", "block"])
def both(request: pytest.FixtureRequest) -> Analyzed:
    found: Analyzed = request.getfixturevalue(request.param)
    return found


def product_flops(report: Report) -> int:
    return sum(row.flops for row in report.ops if row.name in PRODUCTS)


def test_nearly_all_the_time_of_a_compiled_step_has_a_cost(both: Analyzed) -> None:
    compiled = both.compiled
    assert compiled.coverage >= 0.9
    assert any(row.name.startswith("inductor::") for row in compiled.ops)
    for row in compiled.ops:
        free = row.name in ("aten::detach", "aten::new_empty_strided", "aten::view")
        assert free or row.uncovered or row.bytes > 0, row


def test_the_graphs_and_their_kernels_are_counted(both: Analyzed) -> None:
    compiled = both.compiled
    compilation = compiled.compilation
    assert compilation is not None
    assert compilation.graphs == len({row.phase for row in compiled.ops})
    inside = [row for row in compiled.ops if row.name.startswith("inductor::") or row.name in PRODUCTS]
    assert compilation.kernels == sum(row.calls for row in inside)
    assert compilation.seconds > 0
    assert compilation.graph_breaks == compilation.recompilations == ()


def test_products_do_the_flops_that_they_do_uncompiled(both: Analyzed) -> None:
    compiled, eager = both.compiled, both.eager
    assert product_flops(compiled) == product_flops(eager) > 0


def test_fusion_moves_fewer_bytes_and_computes_about_the_same(both: Analyzed) -> None:
    compiled, eager = both.compiled, both.eager
    assert compiled.summary.bytes < eager.summary.bytes
    assert compiled.summary.flops == pytest.approx(eager.summary.flops, rel=0.1)


def test_the_account_of_a_compiled_step_balances(both: Analyzed) -> None:
    report = both.compiled
    summary, gaps = report.summary, report.gaps
    parts = summary.fused_roof_ms + gaps.fusion_headroom_ms + gaps.kernel_gap_ms + gaps.launch_gap_ms
    assert parts == pytest.approx(summary.wall_ms)
    assert sum(row.flops for row in report.ops) == report.modules.flops == summary.flops
    assert Report.from_dict(report.to_dict()).compilation == report.compilation


def row_of(report: Report, name: str, phase: str = "forward", module: str | None = None) -> OperatorRow:
    found = [r for r in report.ops if r.name == name and r.phase == phase and module in (None, *r.modules)]
    assert len(found) == 1, [(r.name, r.phase, r.modules) for r in report.ops]
    return found[0]


def test_kernels_belong_to_the_modules_that_their_nodes_share(net: Analyzed) -> None:
    report = net.compiled
    assert row_of(report, "aten::convolution").modules == ("conv",)
    assert row_of(report, "aten::convolution_backward", "backward").modules == ("conv",)
    assert row_of(report, "aten::addmm").modules == ("head",)
    assert {m for r in report.ops if r.name == "aten::mm" for m in r.modules} == {"head"}
    # The norm is fused with the activation and the pooling, which belong to the model itself.
    fused = next(r for r in report.ops if "mean_relu" in r.name)
    assert fused.modules == ("",)


def test_a_backward_convolution_does_its_own_work_alone(net: Analyzed) -> None:
    """Inductor also lists the norm's backward pass here, which a separate kernel computes."""
    report = net.compiled
    activation, image, weight = 4 * 8 * 16 * 16, 4 * 3 * 16 * 16, 8 * 3 * 3 * 3
    convolution = row_of(report, "aten::convolution_backward", "backward")
    assert convolution.bytes == FLOAT * (activation + image + 2 * weight + 8)
    norm = next(r for r in report.ops if r.phase == "backward" and "native_batch_norm_backward" in r.name)
    per_channel = 8 * FLOAT
    # Reads the activation, the gradient of the pooled values, and four values of each channel; writes the gradient of
    # the activation, of scale and of shift.
    assert norm.bytes == 2 * activation * FLOAT + 4 * 8 * FLOAT + 4 * per_channel + 2 * per_channel
    assert norm.flops > 10 * activation


def test_an_input_laid_out_for_a_convolution_is_read_and_written(net: Analyzed) -> None:
    counter, image, weight = 8, 4 * 3 * 16 * 16 * FLOAT, 8 * 27 * FLOAT
    copies = next(r for r in net.compiled.ops if r.name == "inductor::fused_add_copy_")
    assert copies.bytes == 2 * (counter + image + weight)


class Pointwise(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return ((x * 2 + y).exp() - x).tanh()


def test_a_fused_chain_costs_its_inputs_and_its_output(ceilings: Ceilings) -> None:
    report = rooftop.analyze(Pointwise(), torch.randn(64, 33), torch.randn(33), compile=True, ceilings=ceilings)
    (row,) = report.ops
    assert row.bytes == (64 * 33 + 33 + 64 * 33) * FLOAT
    assert row.flops == 5 * 64 * 33
    assert report.compilation is not None
    assert (report.compilation.graphs, report.compilation.kernels) == (1, 1)


# Breaks and recompilations.


class Printing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x.relu() + 1
        print("still running")
        return x.softmax(-1)


def line_of(model: type[nn.Module], text: str) -> str:
    lines, first = inspect.getsourcelines(model.forward)
    return f"{__file__}:{first + next(number for number, line in enumerate(lines) if text in line)}"


def test_a_graph_break_is_listed_with_its_line(ceilings: Ceilings, capsys: pytest.CaptureFixture[str]) -> None:
    report = rooftop.analyze(Printing(), torch.randn(4, 8), compile=True, ceilings=ceilings)
    assert report.compilation is not None
    (found,) = report.compilation.graph_breaks
    assert found.line == line_of(Printing, "print(")
    assert found.reason
    assert 0 < found.seconds < report.compilation.seconds
    assert report.compilation.graphs == 2
    assert report.coverage >= 0.9
    assert found.line in report.table()
    assert "Graph Break" not in capsys.readouterr().err


class Shared(nn.Module):
    """A compiled part that gets another shape at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.compile(Pointwise())

    def forward(self, *xs: Tensor) -> list[Tensor]:
        return [self.inner(x, x) for x in xs]


def test_a_recompilation_is_listed_with_its_function_and_its_reason(ceilings: Ceilings) -> None:
    shapes = [torch.randn(4, 8), torch.randn(5, 8)]
    report = rooftop.analyze(Shared(), *shapes, ceilings=ceilings)
    assert report.compilation is not None
    (again,) = report.compilation.recompilations
    assert again.line == f"{__file__}:{Pointwise.forward.__code__.co_firstlineno}"
    assert again.function == "forward"
    assert "expected 4, actual 5" in again.reason
    assert 0 < again.seconds < report.compilation.seconds
    assert report.compilation.graphs == 2
    assert report.coverage >= 0.9


# Nothing is left behind.


class Watchable(nn.Module):
    """A program that uses what an analysis replaces: module calls, profiler labels and `is_compiling`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.profiler.record_function("layer"):
            x = self.layer(x)
        return x.sin() if torch.compiler.is_compiling() else x.cos()


def test_what_is_watched_is_compiled_as_ever(round_ceilings: Ceilings) -> None:
    """The functions that an analysis puts in place of PyTorch's neither become part of the graphs nor break them."""
    report = rooftop.analyze(Watchable(), torch.ones(4, 8), compile=True, ceilings=round_ceilings)
    assert report.compilation is not None
    assert report.compilation.graphs == 1
    assert report.compilation.graph_breaks == ()
    assert report.compilation.recompilations == ()


def test_the_model_and_the_compiler_are_as_before(both: Analyzed) -> None:
    assert both.compiled.compilation is not None
    assert both.hooks_after == both.hooks_before
    assert not both.model.training
    assert both.model._compiled_call_impl is None
    assert all(p.grad is None for p in both.model.parameters())
    assert all(torch.equal(value, both.state_before[name]) for name, value in both.model.state_dict().items())


class Raising(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x.relu() + 1
        torch._dynamo.graph_break()
        raise RuntimeError("no more")


def test_the_compiler_is_put_back_when_the_step_raises(ceilings: Ceilings) -> None:
    before, model = hooks(), Raising().train()
    with pytest.raises(ModelRunError, match="no more"):
        rooftop.analyze(model, torch.randn(8), compile=True, ceilings=ceilings)
    assert hooks() == before
    assert model.training


def test_the_compiler_is_put_back_when_compiling_raises(ceilings: Ceilings, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("cannot lower this")

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx_inner", failing)
    before = hooks()
    with pytest.raises(ModelRunError, match="cannot lower this"):
        rooftop.analyze(Pointwise(), torch.randn(8), torch.randn(8), compile=True, ceilings=ceilings)
    assert hooks() == before


def test_a_graph_that_cannot_be_read_still_runs_and_says_why(
    ceilings: Ceilings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*args: Any) -> Any:
        raise KeyError("val")

    monkeypatch.setattr("rooftop.analysis.compiled.graphs.kernel_works", failing)
    report = rooftop.analyze(Pointwise(), torch.randn(8), torch.randn(8), compile=True, ceilings=ceilings)
    (row,) = report.uncovered
    assert row.uncovered == "its compiled graph could not be read: KeyError: 'val'"
    assert report.coverage == 0


# Code that was compiled earlier.


def test_code_that_an_earlier_analysis_compiled_is_known_to_the_next(ceilings: Ceilings) -> None:
    compiled, inputs = torch.compile(Pointwise()), (torch.randn(8, 4), torch.randn(4))
    first = rooftop.analyze(compiled, *inputs, ceilings=ceilings)
    second = rooftop.analyze(compiled, *inputs, ceilings=ceilings)
    assert first.compilation is not None
    assert second.compilation is None  # nothing was compiled
    assert second.coverage == first.coverage == 1
    assert [row.bytes for row in second.ops] == [row.bytes for row in first.ops] == [(32 + 4 + 32) * FLOAT]


def test_the_recorder_passes_results_through() -> None:
    """Code compiled while graphs are recorded computes the right results outside `analyze`, too."""
    inputs = torch.randn(8, 4), torch.randn(4)
    with CompiledGraphs() as recorded:
        found = torch.compile(Pointwise())(*inputs)
    torch.testing.assert_close(found, Pointwise()(*inputs))
    (graph,) = recorded.graphs.values()
    assert len(graph.works) == 1
    assert not graph.problem
    assert not graph.backward


@pytest.mark.parametrize("shown", [False, True], ids=["kernels-hidden", "kernels-shown"])
def test_code_compiled_before_any_analysis_is_uncovered_not_dropped(shown: bool, ceilings: Ceilings) -> None:
    compiled, inputs = torch.compile(Pointwise()), (torch.randn(64, 4), torch.randn(4))
    with torch.no_grad(), torch._inductor.config.patch({"cpp.enable_kernel_profile": shown, "fx_graph_cache": False}):
        compiled(*inputs)
    report = rooftop.analyze(compiled, *inputs, ceilings=ceilings)
    assert report.compilation is None
    assert report.coverage == 0
    (row,) = report.uncovered
    assert "compiled before the analysis: the operators" in row.uncovered
    assert row.measured_ms > 0


# On a GPU: kernels of Triton, libraries, and CUDA graphs.


@pytest.fixture
def gpu_network(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor]:
    if request.param == "resnet":
        # The compiler wants channels last. With another layout it rearranges the weights at each step, which moves
        # bytes.
        model = rooftop.models.resnet18().to("cuda", memory_format=torch.channels_last)
        return model, torch.randn(8, 3, 64, 64, device="cuda").contiguous(memory_format=torch.channels_last)
    transformers = request.getfixturevalue("transformers")
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(n_layer=2, n_embd=256, n_head=4, vocab_size=1000, use_cache=False, **ends)
    return transformers.GPT2LMHeadModel(config).cuda(), torch.randint(0, 1000, (4, 128), device="cuda")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("mode", [True, "reduce-overhead"], ids=["plain", "cuda-graphs"])
@pytest.mark.parametrize("gpu_network", ["resnet", "gpt2"], indirect=True)
def test_nearly_all_the_gpu_time_of_a_compiled_network_has_a_cost(
    gpu_network: tuple[nn.Module, Tensor], mode: bool | str, train: bool, round_ceilings: Ceilings
) -> None:
    model, x = gpu_network
    ceilings = replace(round_ceilings, kind="cuda")
    report = rooftop.analyze(model, x, train=train, compile=mode, ceilings=ceilings)
    eager = rooftop.analyze(model, x, train=train, ceilings=ceilings)
    assert report.coverage >= 0.9, report.uncovered
    assert report.compilation is not None
    assert report.compilation.graphs == 1 + train
    assert report.summary.flops == pytest.approx(eager.summary.flops, rel=0.1)
    assert report.summary.bytes < eager.summary.bytes
    assert sum(row.measured_ms for row in report.ops) <= 1.1 * report.summary.busy_ms
    assert {row.phase for row in report.ops} >= ({"forward", "backward"} if train else {"forward"})
