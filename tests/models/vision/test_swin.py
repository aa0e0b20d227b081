"""Every Swin Transformer is torchvision's: keys, shapes, order, initial values, outputs and gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rooftop import models
from rooftop.cost import CountingMode
from rooftop.inference import Engine
from rooftop.models import SwinTransformer, load_classifier
from rooftop.models.vision.swin import PatchMergingV2, StochasticDepth, SwinBlockV2

NAMES = ("swin_b", "swin_s", "swin_t", "swin_v2_b", "swin_v2_s", "swin_v2_t")
SMALL = {"patch_size": [2, 2], "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "num_classes": 5}


def pair(version: int, origin: ModuleType, **options: Any) -> tuple[SwinTransformer, nn.Module]:
    """A small network and torchvision's, each built after the same seed."""
    options = {**SMALL, "window_size": [3, 5], "stochastic_depth_prob": 0.0, **options}
    theirs = origin.swin_transformer
    parts: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    if version == 2:
        parts[0].update(block=SwinBlockV2, downsample_layer=PatchMergingV2)
        parts[1].update(block=theirs.SwinTransformerBlockV2, downsample_layer=theirs.PatchMergingV2)
    torch.manual_seed(0)
    ours = SwinTransformer(**options, **parts[0])
    torch.manual_seed(0)
    return ours, theirs.SwinTransformer(**options, **parts[1])


def randomized(model: nn.Module, like: nn.Module) -> None:
    """Both networks get the same random parameters, including biases and norms."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3 if parameter.dim() > 1 else 0.5)
    like.load_state_dict(model.state_dict(), strict=True)
    model.load_state_dict(like.state_dict(), strict=True)


def learned(model: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor | None]]:
    out = model(x)
    out.square().sum().backward()
    return out, [p.grad for p in model.parameters()]


def assert_close(ours: tuple[Tensor, list[Tensor]], theirs: tuple[Tensor, list[Tensor]]) -> None:
    """Within 1e-5 of the largest value of each tensor (or of 0.01, for gradients that nearly cancel)."""
    for a, b in zip([ours[0], *ours[1]], [theirs[0], *theirs[1]], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5 * max(0.01, float(b.detach().abs().max())))


@pytest.mark.parametrize("name", NAMES)
def test_state_dict_is_torchvisions_and_its_size_is_documented(name: str, torchvision_models: ModuleType) -> None:
    with torch.device("meta"):
        ours, theirs = getattr(models, name)(), getattr(torchvision_models, name)()
    assert [(k, v.shape, v.dtype) for k, v in ours.state_dict().items()] == [
        (k, v.shape, v.dtype) for k, v in theirs.state_dict().items()
    ]
    assert [name for name, _ in ours.named_modules()] == [name for name, _ in theirs.named_modules()]
    count = sum(p.numel() for p in ours.parameters())
    assert f"{count:,} parameters" in (getattr(models, name).__doc__ or "")
    depths = [m.p for net in (ours, theirs) for n, m in net.named_modules() if n.endswith("stochastic_depth")]
    assert depths[: len(depths) // 2] == depths[len(depths) // 2 :]


def test_swin_t_has_the_published_size() -> None:
    with torch.device("meta"):
        model = models.swin_t()
    assert sum(p.numel() for p in model.parameters()) == 28_288_354
    assert len(model.state_dict()) == 185


@pytest.mark.parametrize("version", [1, 2])
def test_initialization_follows_the_same_random_numbers(version: int, torchvision_models: ModuleType) -> None:
    ours, theirs = pair(version, torchvision_models)
    for (name, a), b in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


SIZES = {
    "whole windows": (24, 40),
    "odd, padded": (33, 71),
    "one window in height, several across": (6, 40),
    "windows larger than the map": (5, 4),
}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES.keys())
def test_outputs_and_gradients_are_torchvisions(
    size: tuple[int, int], train: bool, version: int, torchvision_models: ModuleType
) -> None:
    ours, theirs = pair(version, torchvision_models)
    randomized(ours, theirs)
    x = torch.randn(2, 3, *size)
    assert_close(learned(ours.train(train), x), learned(theirs.train(train), x))


@pytest.mark.parametrize("version", [1, 2])
def test_real_widths_and_windows(version: int, torchvision_models: ModuleType) -> None:
    window = [7, 7] if version == 1 else [8, 8]
    options = {"patch_size": [4, 4], "embed_dim": 96, "num_heads": [3, 6], "window_size": window}
    ours, theirs = pair(version, torchvision_models, **options)
    randomized(ours, theirs)
    x = torch.randn(1, 3, 70, 90)
    assert_close(learned(ours.eval(), x), learned(theirs.eval(), x))


@pytest.mark.parametrize("version", [1, 2])
def test_stochastic_depth_and_dropout_draw_the_same_random_numbers(
    version: int, torchvision_models: ModuleType
) -> None:
    """Dropout agrees only if the map is one window: torchvision draws numbers for windows, Rooftop for maps."""
    options = {"depths": [2], "num_heads": [2], "window_size": [4, 4], "dropout": 0.2, "stochastic_depth_prob": 0.5}
    ours, theirs = pair(version, torchvision_models, **options)
    randomized(ours, theirs)
    x, found = torch.randn(6, 3, 8, 8), []
    for model in (ours, theirs):
        torch.manual_seed(5)
        found.append(learned(model.train(), x))
    assert_close(*found)


@pytest.mark.parametrize("version", [1, 2])
def test_dropout_of_attention_weights_is_torchvisions(version: int, torchvision_models: ModuleType) -> None:
    """With the same seed the same weights are dropped. torchvision draws numbers for windows, Rooftop for maps cut into
    windows."""
    ours, theirs = pair(version, torchvision_models, attention_dropout=0.3)
    randomized(ours, theirs)
    x, found = torch.randn(2, 3, 14, 22), []
    for model in (ours, theirs):
        torch.manual_seed(5)
        found.append(learned(model.train(), x))
    assert_close(*found)
    dropped, kept = ours(x), ours.eval()(x)
    assert not torch.allclose(dropped, kept)
    torch.testing.assert_close(kept, theirs.eval()(x), rtol=1e-4, atol=1e-4)


def test_a_rate_of_dropped_attention_that_is_none() -> None:
    with pytest.raises(ValueError, match=r"a probability of attention_dropout must be between 0 and 1, got 1\.5"):
        SwinTransformer(**SMALL, window_size=[3, 5], attention_dropout=1.5)


def test_stochastic_depth_keeps_the_mean() -> None:
    depth = StochasticDepth(0.25).train()
    torch.manual_seed(0)
    y = depth(torch.ones(4000, 2, 3))
    assert y.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert (y.flatten(1).std(1) == 0).all()  # a whole image
    assert abs(float(y.mean()) - 1) < 0.05
    assert (StochasticDepth(1.0).train()(torch.ones(3, 1)) == 0).all()
    assert (depth.eval()(torch.ones(3, 1)) == 1).all()


def test_attention_is_the_operator() -> None:
    with torch.device("meta"):
        model, x = models.swin_t().eval(), torch.empty(1, 3, 224, 224)
    with CountingMode() as counted:
        model(x)
    names = [record.name for record in counted.records]
    assert names.count("rooftop::window_attention") == 12
    assert not {name for name in names if "roll" in name or "softmax" in name}


@torch.no_grad()
def test_sums_are_computed_with_the_norms_after_them() -> None:
    """Ten of the twelve sums in six blocks are fused with the next norm. The last sum of each of the two stages is
    not."""
    model = SwinTransformer(**{**SMALL, "depths": [2, 4]}, window_size=[3, 5]).eval()
    with CountingMode() as counted:
        model(torch.randn(1, 3, 12, 20))
    names = [record.name for record in counted.records]
    assert names.count("rooftop::add_layer_norm") == 10
    assert names.count("aten::add") == 2


@torch.no_grad()
def test_blocks_that_are_watched_or_replaced_give_what_they_give_alone() -> None:
    model = SwinTransformer(**{**SMALL, "depths": [2, 3]}, window_size=[3, 5]).eval()
    for parameter in model.parameters():
        parameter.normal_(0, 0.3)
    x, seen = torch.randn(1, 3, 12, 20), []
    expected = model(x)
    hook = model.features[3][1].register_forward_hook(lambda _, inputs, output: seen.append((*inputs, output)))
    torch.testing.assert_close(model(x), expected)
    before, after = seen[0]
    torch.testing.assert_close(model.features[3][1](before), after)
    hook.remove()
    model.features[3][1] = nn.Sequential(model.features[3][1])
    torch.testing.assert_close(model(x), expected)
    model.features[3] = type(model.features[3])()
    assert torch.equal(model.features[3](before), before)  # a stage without blocks


@pytest.mark.parametrize("version", [1, 2])
@torch.no_grad()
def test_an_engine_computes_what_depends_on_parameters_once(version: int, torchvision_models: ModuleType) -> None:
    model, _ = pair(version, torchvision_models)
    for parameter in model.parameters():
        parameter.normal_(0, 0.3)
    x = torch.randn(2, 3, 33, 71)
    engine = Engine(model.eval(), constants=False)
    assert engine.report.constants == ()
    with CountingMode() as all_of_it:
        expected = engine(x)
    torch.testing.assert_close(expected, model(x))
    engine = Engine(model)
    assert len(engine.report.constants) == 4 * version
    for _ in range(2):
        assert torch.equal(engine(x), expected)
    with CountingMode() as counted:
        engine(x)
    before, names = ([record.name for record in each.records] for each in (all_of_it, counted))
    assert not set(names) & {"aten::index", "aten::sigmoid", "aten::exp", "aten::clamp"}
    assert (before.count("aten::index"), before.count("aten::clone") - names.count("aten::clone")) == (4, 4)
    assert engine.report.constants_bytes > 0
    model.features[1][0].attn.qkv.bias.add_(1.0)
    for name, parameter in model.named_parameters():
        if "relative_position_bias_table" in name or "cpb_mlp" in name:
            parameter.mul_(3.0)
    assert not torch.allclose(model(x), expected)  # the model itself is not frozen
    assert torch.equal(engine(x), expected)


@pytest.mark.parametrize("version", [1, 2])
def test_autocast_trains(version: int, torchvision_models: ModuleType) -> None:
    ours, theirs = pair(version, torchvision_models)
    randomized(ours, theirs)
    x, out = torch.randn(2, 3, 33, 41), []
    for model in (ours, theirs):
        with torch.autocast("cpu", torch.bfloat16):
            out.append(learned(model, x))
    exact, _ = learned(theirs, x)
    assert out[0][0].dtype == torch.bfloat16
    assert all(gradient is not None and gradient.isfinite().all() for gradient in out[0][1])
    error, plain = ((each[0].float() - exact).norm().item() for each in out)
    assert error < 1.5 * plain


def test_compiled_whole(torchvision_models: ModuleType) -> None:
    ours, theirs = pair(1, torchvision_models, depths=[2], num_heads=[2])
    randomized(ours, theirs)
    x = torch.randn(2, 3, 14, 22)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    assert_close(learned(compiled, x), learned(theirs, x))


def test_an_empty_batch_gives_an_empty_result(torchvision_models: ModuleType) -> None:
    assert pair(1, torchvision_models)[0].eval()(torch.randn(0, 3, 16, 16)).shape == (0, 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": (3, 6)}, "expected as many depths as num_heads"),
        ({"window_size": (7,)}, "two numbers each for patch_size and window_size"),
        ({"num_heads": (3, 6, 12, 25)}, "25 heads do not divide 768 channels"),
        ({"stochastic_depth_prob": 1.5}, "between 0 and 1, got"),
    ],
)
def test_wrong_options(options: dict[str, object], message: str) -> None:
    with torch.device("meta"), pytest.raises(ValueError, match=message):
        models.swin_t(**options)


def test_a_classifier_has_the_classes_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small: Callable[..., SwinTransformer] = lambda **o: SwinTransformer(**{**SMALL, "window_size": (3, 3), **o})  # noqa: E731
    saved = small(num_classes=4)
    torch.save(saved.state_dict(), tmp_path / "four.pth")
    entry = models.ModelEntry(small)
    monkeypatch.setattr("rooftop.models.vision.classification.model_entry", lambda name: entry)
    model, preprocessing = load_classifier("swin_t", tmp_path / "four.pth")
    assert isinstance(model, SwinTransformer)
    assert model.head.out_features == 4
    assert preprocessing.crop == 224
