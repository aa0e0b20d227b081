"""Checkpoints of training: the choice among the weights of a file, its description, and refused files."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from rooftop.errors import WeightsError
from rooftop.models import load, load_report, resnet18
from rooftop.models.loading import FAMILIES, UNREGISTERED
from rooftop.models.registry import builtin_models
from rooftop.models.weights.checkpoint_contents import weights_in
from rooftop.models.weights.files import read_weights

Tensors = dict[str, Tensor]
SMALL: dict[str, Any] = {"num_classes": 3, "channels": 4}  # 16 times narrower than it is published


class Lightning(nn.Module):
    """Keeps its model in an attribute, like a LightningModule."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def averaged(model: nn.Module) -> nn.Module:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "parallel": nn.DataParallel,
    "compiled": lambda model: torch.compile(model),  # type: ignore[dict-item,return-value]
    "averaged": averaged,
    "lightning": Lightning,
}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return resnet18(**SMALL)


@pytest.fixture(scope="module")
def plain(model: nn.Module) -> Tensors:
    return model.state_dict()


@pytest.fixture(scope="module")
def other(plain: Tensors) -> Tensors:
    """Averaged weights: other values under the same keys."""
    return {key: value * 0.5 if value.is_floating_point() else value for key, value in plain.items()}


def saved(content: Any, folder: Path) -> Path:
    torch.save(content, folder / "checkpoint.pth")
    return folder / "checkpoint.pth"


def is_loaded(path: Path, expected: Tensors, **options: Any) -> bool:
    found = load("resnet18", path, **SMALL, **options).state_dict()
    return found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)


@cache
def small() -> nn.Module:
    return resnet18(**SMALL)


@given(names=st.lists(st.sampled_from(sorted(WRAPPERS)), max_size=5).filter(lambda names: names.count("compiled") < 2))
@settings(max_examples=25, deadline=None)
@example(["lightning", "averaged", "lightning"])  # the key of the count has fewer prefixes than the weights' keys
@example(["averaged", "lightning", "averaged", "lightning"])
def test_wrappers_in_any_order(names: list[str]) -> None:
    wrapped, plain = small(), small().state_dict()
    for name in names:
        wrapped = WRAPPERS[name](wrapped)
    found = weights_in({"state_dict": wrapped.state_dict(), "epoch": 3})
    assert found.tensors.keys() == plain.keys()
    assert all(torch.equal(found.tensors[key], value) for key, value in plain.items())
    assert found.averaged == ("averaged" in names)


def test_a_compiled_part_of_a_model(plain: Tensors, tmp_path: Path) -> None:
    torch.manual_seed(0)
    parts = resnet18(**SMALL)
    parts.layer1 = torch.compile(nn.DataParallel(parts.layer1))  # type: ignore[assignment]
    state = parts.state_dict()
    assert "layer1._orig_mod.module.0.conv1.weight" in state
    assert is_loaded(saved({"model": state}, tmp_path), plain)
    with pytest.raises(WeightsError, match=r"both mean layer1\.0\.conv1\.weight"):
        weights_in(state | {"layer1.0.conv1.weight": torch.ones(1)})


@pytest.mark.parametrize(
    "name",
    ["state_dict_ema", "ema", "model_ema", "ema_model", "ema_state_dict", "swa_model", "averaged_model", "polyak"],
)
@pytest.mark.parametrize("beside", ["state_dict", None])
def test_averages_are_taken_and_said(
    name: str, beside: str | None, plain: Tensors, other: Tensors, tmp_path: Path
) -> None:
    content: dict[str, Any] = {name: other, "epoch": 3, "optimizer": {"state": {0: {"step": torch.ones(1)}}}}
    if beside:
        content[beside] = plain
    path = saved(content, tmp_path)
    assert is_loaded(path, other)
    report = load_report("resnet18", path, **SMALL)
    assert report.averaged
    assert f"taken: {name} (averaged weights)" in str(report)
    if beside:
        assert report.others == (beside,)
        assert f"not taken: {beside}" in str(report)
        assert is_loaded(path, plain, part=beside)
        said = load_report("resnet18", path, part=beside, **SMALL)
        assert (said.averaged, said.taken) == (False, f"{beside} (weights, not averaged)")


def test_averages_within(plain: Tensors, other: Tensors, tmp_path: Path) -> None:
    """RT-DETR and others save their EMA object in this form; here with DataParallel's prefix."""
    ema = {"module": {f"module.{key}": value for key, value in other.items()}, "updates": 7, "decay": 0.9}
    path = saved({"model": plain, "ema": ema, "ema_decay": 0.9}, tmp_path)
    assert is_loaded(path, other)
    assert load_report("resnet18", path, **SMALL).taken == "ema/module (averaged weights)"


def test_averages_of_a_callback(plain: Tensors, other: Tensors, tmp_path: Path) -> None:
    """Lightning saves the states of its callbacks, most of which are not weights."""
    theirs, ours = ({f"model.{key}": value for key, value in each.items()} for each in (other, plain))
    kept = {"EMA{'decay': 0.9}": {"ema_state_dict": theirs, "step": 3}, "Swag": {"swa": {"decay": torch.ones(1)}}}
    path = saved({"state_dict": ours, "callbacks": kept}, tmp_path)
    assert is_loaded(path, other)
    assert is_loaded(path, plain, part="state_dict/model.")


def test_averages_beside_what_they_average(plain: Tensors, other: Tensors, tmp_path: Path) -> None:
    """ema_pytorch saves the averages and the trained weights in one module, next to the model itself."""
    both = {f"online_model.{key}": value for key, value in plain.items()}
    both |= {f"ema_model.{key}": value for key, value in other.items()} | {"step": torch.tensor(3)}
    path = saved({"model": plain, "ema": both}, tmp_path)
    assert is_loaded(path, other)
    assert is_loaded(path, plain, part="ema/online_model.")


def test_averages_without_names_are_refused(plain: Tensors, other: Tensors, tmp_path: Path) -> None:
    """torch_ema saves averages in this form. The weights in the same file are not those with which the training was
    evaluated."""
    path = saved({"model": plain, "ema": {"decay": 0.9, "shadow_params": [*other.values()]}}, tmp_path)
    with pytest.raises(WeightsError, match="ema/shadow_params, without the names"):
        load("resnet18", path, **SMALL)
    assert is_loaded(path, plain, part="model")


def test_an_averaged_model(plain: Tensors, tmp_path: Path) -> None:
    """The model is from torch.optim.swa_utils, which counts what it has averaged."""
    model = resnet18(**SMALL)
    average = AveragedModel(model)
    average.update_parameters(model)
    with torch.no_grad():
        model.fc.bias.add_(1)
    average.update_parameters(model)
    path = saved(average.state_dict(), tmp_path)
    assert is_loaded(path, average.module.state_dict())
    report = load_report("resnet18", path, **SMALL)
    assert report.fits
    assert report.taken == "all tensors (averaged weights of 2 steps)"
    assert "taken: all tensors (averaged weights of 2 steps)" in str(report)


def test_lightnings_averages(plain: Tensors, other: Tensors, tmp_path: Path) -> None:
    """Lightning's callback WeightAveraging saves averages in this form."""
    theirs, ours = ({f"model.{key}": value for key, value in each.items()} for each in (other, plain))
    content = {"state_dict": theirs, "current_model_state": ours, "averaging_state": {"n_averaged": torch.tensor(3)},
               "callbacks": {}, "loops": {"fit_loop": {"state_dict": {}}}}  # fmt: skip
    path = saved(content, tmp_path)
    assert is_loaded(path, other)
    report = load_report("resnet18", path, **SMALL)
    assert report.taken == "state_dict/model. (averaged weights)"
    assert is_loaded(path, plain, part="current_model_state/model.")
    beside = ours | {"criterion.weight": torch.ones(3)}
    with pytest.raises(WeightsError, match=r"1 unexpected: criterion\.weight"):
        load("resnet18", saved({"state_dict": beside}, tmp_path), **SMALL)
    copies = ours | {f"ema.module.{key}": value for key, value in other.items()} | {"ema.n_averaged": torch.tensor(5)}
    path = saved({"state_dict": copies}, tmp_path)
    assert is_loaded(path, other)
    assert load_report("resnet18", path, **SMALL).taken == "state_dict/ema. (averaged weights of 5 steps)"
    assert is_loaded(path, plain, part="state_dict/model.")


def test_several_models_are_refused_with_the_choices(plain: Tensors, other: Tensors, tmp_path: Path) -> None:
    both = {f"student.{k}": v for k, v in plain.items()} | {f"teacher.{k}": v for k, v in other.items()}
    path = saved({"state_dict": both}, tmp_path)
    message = (
        r"checkpoint\.pth holds the weights of several models, 'state_dict/student\.' \(122 tensors\), 'state_dict"
    )
    with pytest.raises(WeightsError, match=message):
        load("resnet18", path, **SMALL)
    assert is_loaded(path, other, part="state_dict/teacher.")
    with pytest.raises(WeightsError, match=r"has no part 'ema': expected one of 'state_dict/student\.'"):
        load("resnet18", path, **SMALL, part="ema")
    path = saved({"model": plain, "state_dict": other}, tmp_path)
    with pytest.raises(WeightsError, match=r"several models, 'model' \(122 tensors\), 'state_dict'"):
        read_weights(path)
    with pytest.raises(WeightsError, match=r"several models, 'ema' .* 'swa_model'"):
        read_weights(saved({"ema": plain, "swa_model": other, "model": plain}, tmp_path))


BUILDERS = {name: entry.build for name, entry in builtin_models().items()
            if entry.build.__module__.rpartition(".")[2] in ("resnet", "swin", "hybrid")}  # fmt: skip
BUILDERS |= {build.__name__: build for build in UNREGISTERED}


NAMES = ["resnext50_32x4d", "swin_t", "swin_v2_t", "hybrid_t", *(build.__name__ for build in UNREGISTERED)]


@pytest.mark.parametrize("name", NAMES)
def test_every_family(name: str, tmp_path: Path) -> None:
    with torch.device("meta"):
        shapes = BUILDERS[name]().state_dict()
    state = {f"_orig_mod.model.module.{key}": torch.zeros((), dtype=value.dtype).expand(value.shape)
             for key, value in shapes.items()}  # fmt: skip
    path = saved({"state_dict": state, "state_dict_ema": {f"module.{key}": value for key, value in state.items()}},
                 tmp_path)  # fmt: skip
    report = load_report(name, path)
    assert report.fits
    assert (report.averaged, report.others) == (True, ("state_dict/model.",))
    assert len(FAMILIES) == 5
