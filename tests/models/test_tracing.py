"""Models and modules under torch.fx, torch.jit.trace, torch.export and torch.onnx: traced programs return the same
results."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils._pytree import tree_leaves

import rooftop.nn
from rooftop import models
from rooftop.models.vision.resnet import BasicBlock

SWIN: dict[str, Any] = {"num_classes": 5, "embed_dim": 12, "depths": (1, 2), "num_heads": (2, 4), "window_size": (4, 4)}
SIZES = {"vocabulary": 32, "positions": 16, "width": 16, "layers": 1, "heads": 2, "kv_heads": 1, "hidden": 32}
LAYERS = {"encoder_layers": 1, "decoder_layers": 2}
DETR: dict[str, Any] = {"num_classes": 3, "width": 16, "heads": 2, "queries": 4, "feed_forward": 16, **LAYERS}


class Small(nn.Module):
    """One module of each kind that `replace` knows, except the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(11, 8), nn.Linear(8, 8)
        self.norm, self.rms = nn.LayerNorm(8), nn.RMSNorm(8)
        self.softmax, self.log_softmax = nn.Softmax(-1), nn.LogSoftmax(-1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.rms(self.linear(self.norm(self.embedding(tokens))))
        return self.log_softmax(x * self.softmax(x))


def replaced() -> nn.Module:
    model = Small()
    assert len(rooftop.nn.replace(model, only=rooftop.nn.KINDS).swapped) == 5
    return model


def random(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1))


TOKENS, ROWS = torch.tensor([[1, 5, 10, 0]]), random(3, 8)
Case = tuple[Callable[[], nn.Module], tuple[Tensor, ...]]
TRACEABLE: dict[str, Case] = {  # by torch.fx
    "replaced": (replaced, (TOKENS,)),
    "LinearAct": (lambda: rooftop.nn.LinearAct(8, 4, activation="gelu"), (ROWS,)),
    "LayerNorm": (lambda: rooftop.nn.LayerNorm(8), (ROWS,)),
    "RMSNorm": (lambda: rooftop.nn.RMSNorm(8), (ROWS,)),
    "SwiGLU": (rooftop.nn.SwiGLU, (ROWS,)),
    "CrossEntropyLoss": (rooftop.nn.CrossEntropyLoss, (ROWS, torch.tensor([0, 7, 3]))),
    "CrossEntropyLoss of probabilities": (rooftop.nn.CrossEntropyLoss, (ROWS, ROWS.flip(0).softmax(-1))),
    "ResNet": (lambda: models.ResNet(BasicBlock, (1, 1, 1, 1), 4), (random(2, 3, 32, 32),)),
    "Swin": (lambda: models.swin_t(**SWIN), (random(2, 3, 40, 48),)),
    "Swin V2": (lambda: models.swin_v2_t(**SWIN), (random(2, 3, 40, 48),)),
}
UNTRACEABLE: dict[str, Case] = {
    "Detr": (lambda: models.Detr(BasicBlock, (1, 1, 1, 1), **DETR), (random(1, 3, 64, 64),)),
    "ConvLSTM2D": (lambda: models.ConvLSTM2D(2, 3, 3, padding="same"), (random(2, 3, 6, 6, 2),)),
    "Gpt": (lambda: models.Gpt(models.GptConfig(**SIZES, position="rope", norm="rms")), (TOKENS,)),
}
ALL = TRACEABLE | UNTRACEABLE
quiet = pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")


def built(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    make, inputs = ALL[name]
    torch.manual_seed(0)
    return make().eval(), inputs


def assert_same(program: Any, model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """The same values, and the same gradients of the trained parameters."""
    for given, expected in zip(tree_leaves(program(*inputs)), tree_leaves(model(*inputs)), strict=True):
        torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-5)
    parameters = [each for each in model.parameters() if each.requires_grad]
    if not parameters:
        return
    for function in (model, program):
        model.zero_grad()
        program.zero_grad()
        sum(each.square().sum() for each in tree_leaves(function(*inputs)) if each.requires_grad).backward()
        names = [name for name, each in model.named_parameters() if each.requires_grad]
        gradients = [dict(function.named_parameters())[name].grad for name in names]
        if function is model:
            expected = [None if each is None else each.clone() for each in gradients]
    torch.testing.assert_close(gradients, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", TRACEABLE)
def test_torch_fx_traces_it(name: str) -> None:
    model, inputs = built(name)
    assert_same(torch.fx.symbolic_trace(model), model, inputs)


@quiet
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
def test_torch_jit_traces_it(name: str, grad: bool) -> None:
    model, inputs = built(name)
    with torch.set_grad_enabled(grad):
        program = torch.jit.trace(model, inputs, strict=False, check_trace=False)
    assert_same(program, model, inputs)


@pytest.mark.parametrize("name", ALL)
def test_it_is_exported(name: str) -> None:
    model, inputs = built(name)
    with torch.no_grad():
        program = torch.export.export(model, inputs).module()
    assert_same(program, model, inputs)


@pytest.mark.parametrize("name", UNTRACEABLE)
def test_what_torch_fx_cannot_trace_says_what_to_do(name: str) -> None:
    model, _ = built(name)
    with pytest.raises(NotImplementedError, match=rf"{name}: torch.fx cannot trace .* use torch.export.export, or"):
        torch.fx.symbolic_trace(model)


def test_a_conv_lstm_in_a_model_is_one_node() -> None:
    model = nn.Sequential(models.ConvLSTM2D(2, 3, 3, padding="same"), nn.Flatten()).eval()
    program = torch.fx.symbolic_trace(model)
    assert [node.target for node in program.graph.nodes if node.op == "call_module"] == ["0", "1"]
    assert_same(program, model, (random(2, 3, 6, 6, 2),))


def test_a_training_swin_is_traced() -> None:
    model = models.swin_t(**SWIN, stochastic_depth_prob=0.5)
    program, x = torch.fx.symbolic_trace(model), random(4, 3, 32, 32)
    torch.manual_seed(0)
    given = program(x)
    torch.manual_seed(0)
    torch.testing.assert_close(given, model(x))


@pytest.mark.parametrize("build", ["swin_t", "swin_v2_t"])
def test_features_have_the_names_and_values_of_torchvisions(build: str, torchvision_models: ModuleType) -> None:
    extraction = importlib.import_module("torchvision.models.feature_extraction")
    options = {**SWIN, "patch_size": [4, 4], "window_size": [4, 4]}
    theirs_of = torchvision_models.swin_transformer
    parts = {}
    if build == "swin_v2_t":
        parts = {"block": theirs_of.SwinTransformerBlockV2, "downsample_layer": theirs_of.PatchMergingV2}
    theirs = theirs_of.SwinTransformer(**options, **parts).eval()
    ours = getattr(models, build)(**SWIN).eval()
    ours.load_state_dict(theirs.state_dict())
    nodes = [
        "features.0",
        "features.1.0",
        "features.2",
        "features.3.0",
        "features.3.1.norm2",
        "features.3",
        "norm",
        "head",
    ]
    x = random(2, 3, 40, 48)
    with torch.no_grad():
        given, expected = (extraction.create_feature_extractor(model, nodes)(x) for model in (ours, theirs))
    assert list(given) == list(expected) == nodes
    for node in nodes:
        torch.testing.assert_close(given[node], expected[node], rtol=1e-4, atol=1e-5)


@quiet
@pytest.mark.parametrize("name", ["Swin", "Swin V2"])
def test_images_of_other_sizes_go_through_a_traced_swin(name: str) -> None:
    """Maps of odd size, and maps that one window covers, although the model was traced with neither."""
    model, inputs = built(name)
    for program in (torch.fx.symbolic_trace(model), torch.jit.trace(model, inputs, check_trace=False)):
        for shape in ((1, 3, 44, 36), (3, 3, 20, 16), (2, 3, 16, 70)):
            x = random(*shape)
            torch.testing.assert_close(program(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["Swin", "Swin V2"])
def test_a_swin_is_exported_for_images_of_any_size(name: str) -> None:
    model, inputs = built(name)
    sizes = {0: Dim("batch"), 2: Dim("height", min=32, max=512), 3: Dim("width", min=32, max=512)}
    program = torch.export.export(model, inputs, dynamic_shapes=(sizes,)).module()
    for shape in ((1, 3, 44, 36), (3, 3, 100, 70)):
        x = random(*shape)
        torch.testing.assert_close(program(x), model(x), rtol=1e-4, atol=1e-5)


# ---- ONNX ----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # warnings of torch.onnx and its translator
@pytest.mark.parametrize("name", ["replaced", "LinearAct", "Swin", "Swin V2", "Detr", "ConvLSTM2D", "Gpt"])
def test_onnx_gives_the_same(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="torch.onnx.export needs onnxscript")
    runtime = pytest.importorskip("onnxruntime", reason="runs the exported model")
    model, inputs = built(name)
    file = str(tmp_path / "model.onnx")
    torch.onnx.export(model, inputs, file, dynamo=True, verbose=False)
    session = runtime.InferenceSession(file)
    names = [each.name for each in session.get_inputs()]
    given = session.run(None, {name: each.numpy() for name, each in zip(names, inputs, strict=True)})
    with torch.no_grad():
        for ours, expected in zip(given, tree_leaves(model(*inputs)), strict=True):
            torch.testing.assert_close(torch.from_numpy(ours), expected, rtol=1e-3, atol=1e-4)
