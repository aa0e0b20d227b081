"""A model is loaded by name with weights from any source: completely and correctly, or with one error that says what to
do."""

from __future__ import annotations

import hashlib
import inspect
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"  # Keras decides at import
os.environ.setdefault("KERAS_HOME", tempfile.mkdtemp())

import pytest
import torch
from torch import Tensor, nn

from rooftop import models
from rooftop.errors import InputError, MissingExtraError, TargetError, WeightsError
from rooftop.models import detr_resnet50, load, load_report, next_frame_network, resnet18, swin_t
from rooftop.models.images import Preprocessing
from rooftop.models.loading import FAMILIES, UNREGISTERED
from rooftop.models.weights.files import WEIGHTS, Weights

NAMES = [*models.builtin_models(), *(build.__name__ for build in UNREGISTERED)]
DETR: dict[str, Any] = {
    "num_classes": 5,
    "queries": 7,
    "width": 32,
    "heads": 4,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "feed_forward": 48,
}


SMALL: dict[str, Any] = {"num_classes": 3, "channels": 4}  # a ResNet 16 times narrower than it is published


@torch.no_grad()
def randomized(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    for value in (*model.parameters(), *model.buffers()):
        value.random_(1, 100, generator=generator) if not value.is_floating_point() else value.uniform_(
            0.5, 1.5, generator=generator
        )
    return model


def assert_same(ours: nn.Module, expected: dict[str, Tensor]) -> None:
    found = ours.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[key], value) for key, value in expected.items())


@pytest.fixture(scope="module")
def state() -> dict[str, Tensor]:
    """A narrow ResNet-18 of three classes."""
    return randomized(resnet18(**SMALL)).state_dict()


@pytest.fixture
def file(state: dict[str, Tensor], tmp_path: Path) -> Path:
    torch.save(state, tmp_path / "mine.pth")
    return tmp_path / "mine.pth"


def test_every_builder_of_a_model_has_a_name() -> None:
    """All public functions that build one of the models without further arguments."""
    built = {kind.__name__ for kind in FAMILIES}
    functions = [getattr(models, name) for name in models.__all__ if inspect.isfunction(getattr(models, name))]
    builders = {each.__name__ for each in functions if inspect.signature(each).return_annotation in built}
    assert builders - {"load_detector"} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_models_own_file(name: str, tmp_path: Path) -> None:
    build = getattr(models, name)
    with torch.device("meta"):
        expected = build().state_dict()
    torch.save({key: torch.zeros((), dtype=v.dtype).expand(v.shape) for key, v in expected.items()}, tmp_path / "x.pth")
    report = load_report(name, tmp_path / "x.pth")
    assert report.fits
    assert (list(report.used), report.computed_keys, report.unneeded_keys) == (list(expected), (), ())


@pytest.mark.parametrize("suffix", [".pth", ".pt", ".bin", ".safetensors"])
def test_kinds_of_files(suffix: str, state: dict[str, Tensor], tmp_path: Path) -> None:
    path = tmp_path / f"mine{suffix}"
    if suffix == ".safetensors":
        pytest.importorskip("safetensors.torch").save_file(state, path)
    else:
        torch.save(state, path)
    for weights in (path, str(path)):
        model = load("resnet18", weights, **SMALL)
        assert_same(model, state)
        assert model.training
    assert_same(resnet18(weights=path, **SMALL), state)  # builders read the same files


@pytest.mark.parametrize("wrap", ["model", "state_dict", "model_state_dict"])
@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_checkpoints_of_training(wrap: str, prefix: str, state: dict[str, Tensor], tmp_path: Path) -> None:
    torch.save({wrap: {prefix + key: value for key, value in state.items()}, "epoch": 3}, tmp_path / "checkpoint.pth")
    assert_same(load("resnet18", tmp_path / "checkpoint.pth", **SMALL), state)


def test_a_published_name(state: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(state, tmp_path / "file")
    sha256 = hashlib.sha256((tmp_path / "file").read_bytes()).hexdigest()[:8]
    weights = Weights(f"resnet18-{sha256}.pth", Preprocessing())
    monkeypatch.setitem(WEIGHTS, "resnet18", {"IMAGENET1K_V1": weights})
    with pytest.raises(WeightsError, match="the server cannot be reached"):
        load("resnet18", "IMAGENET1K_V1")
    (tmp_path / "file").rename(tmp_path / weights.file)
    monkeypatch.setenv("ROOFTOP_WEIGHTS_URL", tmp_path.as_uri())
    assert_same(load("resnet18", "IMAGENET1K_V1", **SMALL), state)
    with pytest.raises(InputError, match="next_frame_network has none of these: give a file"):
        load("next_frame_network", "IMAGENET1K_V1")


def test_half_precision_is_widened(state: dict[str, Tensor], tmp_path: Path) -> None:
    half = {key: value.half() if value.is_floating_point() else value for key, value in state.items()}
    torch.save(half, tmp_path / "half.pth")
    model = load("resnet18", tmp_path / "half.pth", **SMALL)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert torch.equal(model.get_parameter("fc.weight"), half["fc.weight"].float())


def test_a_detr_of_hugging_face(torchvision_models: ModuleType, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    save_file = pytest.importorskip("safetensors.torch").save_file
    config = transformers.DetrConfig(
        use_timm_backbone=False,
        backbone_config=transformers.ResNetConfig(out_features=["stage4"], depths=[3, 4, 6, 3]),
        num_labels=5,
        num_queries=7,
        d_model=32,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_layers=1,
        decoder_layers=1,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
    )
    torch.manual_seed(0)
    theirs = transformers.DetrForObjectDetection(config).eval()
    with torch.no_grad():
        for value in (*theirs.parameters(), *theirs.buffers()):
            if value.dim() == 1:
                value.uniform_(0.5, 1.0)
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    report = load_report("detr_resnet50", tmp_path / "model.safetensors", **DETR)
    packed = report.used["transformer.encoder.layers.0.self_attn.in_proj_weight"]
    assert [key[-13:] for key in packed] == ["k_proj.weight", "q_proj.weight", "v_proj.weight"]  # in the file's order
    ours = load("detr_resnet50", tmp_path / "model.safetensors", **DETR).eval()
    images = torch.randn(2, 3, 64, 96)
    with torch.no_grad():
        found, expected = ours(images), theirs(images)
    torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.boxes, expected.pred_boxes, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("suffix", [".keras", ".weights.h5", ".h5"])
def test_a_network_of_keras(suffix: str, tmp_path: Path) -> None:
    keras = pytest.importorskip("keras")
    pytest.importorskip("h5py")
    layers, options = keras.layers, {"padding": "same", "activation": "relu", "return_sequences": True}
    inputs = x = layers.Input((None, 8, 8, 1))
    for kernel in (5, 3):
        x = layers.BatchNormalization()(layers.ConvLSTM2D(4, kernel, **options)(x))
    x = layers.ConvLSTM2D(4, 1, **options)(x)
    theirs = keras.Model(inputs, layers.Conv3D(1, 3, activation="sigmoid", padding="same")(x))
    generator = torch.Generator().manual_seed(0)
    for weight in theirs.weights:
        weight.assign(torch.rand(tuple(weight.shape), generator=generator) * 0.3 + 0.05)
    path = tmp_path / f"network{suffix}"
    theirs.save_weights(path) if suffix == ".weights.h5" else theirs.save(path)
    ours = load("next_frame_network", path, filters=4).eval()
    video = torch.rand(2, 3, 8, 8, 1, generator=generator)
    with torch.no_grad():
        torch.testing.assert_close(ours(video), theirs(video), rtol=0, atol=1e-5)
    report = load_report("next_frame_network", path, filters=4)
    assert report.fits
    assert (report.origin, len(report.used), len(report.computed_keys)) == ("Keras", 19, 2)
    with pytest.raises(WeightsError, match=r"does not fit next_frame_network: \d+ of another shape: layers\.0"):
        load("next_frame_network", path, filters=8)
    with pytest.raises(WeightsError, match="2 batch_normalization, 1 conv3d, 3 conv_lstm2d; the model needs"):
        load("resnet18", path)


def test_a_next_frame_network_of_torch(tmp_path: Path) -> None:
    expected = randomized(next_frame_network(filters=4)).state_dict()
    torch.save(expected, tmp_path / "network.pth")
    assert_same(load("next_frame_network", tmp_path / "network.pth", filters=4), expected)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet5", r"'resnet5' is not a built-in model \(did you mean resnet50\?\): there are "),
        ("detr_resnet_50", r"did you mean detr_resnet50"),
        ("swin_tiny", r"did you mean swin_t"),
        ("xyz", r"'xyz' is not a built-in model: there are resnet18, .*colour_next_frame_network$"),
    ],
)
def test_names_that_are_none(name: str, message: str, file: Path) -> None:
    for function in (load, load_report):
        with pytest.raises(TargetError, match=message):
            function(name, file)


def test_wrong_calls(file: Path) -> None:
    wrong: Any = None
    with pytest.raises(TypeError, match=r"weights is None: expected a file or a published name; resnet18\(\) builds"):
        load("resnet18", wrong)
    with pytest.raises(TypeError, match="classes"):
        load("resnet18", file, classes=3)
    with pytest.raises(InputError, match=r"is a folder; resnet18 has DEFAULT, IMAGENET1K_V1, or give a file"):
        load("resnet18", file.parent)
    with pytest.raises(InputError, match="is neither a file nor"):
        load("resnet18", file.with_name("none.safetensors"))


@pytest.mark.parametrize("suffix", [".pth", ".safetensors", ".keras", ".h5"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[:0], "is damaged"),
        (lambda content: content[: len(content) // 2], "is damaged"),
        (lambda content: b"<html>not found</html>", "is damaged"),
    ],
    ids=["empty", "truncated", "a page"],
)
def test_damaged_files(
    suffix: str, damage: Callable[[bytes], bytes], message: str, state: dict[str, Tensor], tmp_path: Path
) -> None:
    pytest.importorskip("h5py")
    path = tmp_path / f"mine{suffix}"
    if suffix == ".safetensors":
        pytest.importorskip("safetensors.torch").save_file(state, path)
    else:
        torch.save(state, path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(
        WeightsError, match=rf"mine\{suffix} is damaged or (no|not a) .*Expected a file written by "
    ) as caught:
        load("resnet18" if suffix in (".pth", ".safetensors") else "next_frame_network", path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_without_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    (tmp_path / "x.safetensors").write_bytes(b"x")
    with pytest.raises(MissingExtraError, match=r'pip install "rooftop\[weights\]"'):
        load("resnet18", tmp_path / "x.safetensors")


def test_another_number_of_classes(file: Path, tmp_path: Path) -> None:
    message = r"mine\.pth has 3 classes, resnet18 was built for 1000: pass num_classes=3, or strict=False"
    with pytest.raises(WeightsError, match=message):
        load("resnet18", file, channels=4)
    torch.save(detr_resnet50(**DETR).state_dict(), tmp_path / "detr.pth")
    with pytest.raises(WeightsError, match="has 5 classes, detr_resnet50 was built for 20: pass num_classes=5"):
        load("detr_resnet50", tmp_path / "detr.pth", **{**DETR, "num_classes": 20})


def test_a_new_head(file: Path, state: dict[str, Tensor]) -> None:
    torch.manual_seed(3)
    expected = resnet18(num_classes=4, channels=4).state_dict()
    torch.manual_seed(3)
    found = load("resnet18", file, num_classes=4, channels=4, strict=False).state_dict()
    for key, value in found.items():
        assert torch.equal(value, (expected if key.startswith("fc.") else state)[key])
    report = load_report("resnet18", file, num_classes=4, channels=4)
    assert report.mismatched == {"fc.weight": ((3, 32), (4, 32)), "fc.bias": ((3,), (4,))}


def test_quantized_weights_are_refused(state: dict[str, Tensor], tmp_path: Path) -> None:
    """Copied integers would silently give the model wrong weights."""
    torch.save({**state, "fc.weight": torch.ones(3, 32, dtype=torch.int8)}, tmp_path / "int8.pth")
    with pytest.raises(
        WeightsError, match=r"does not fit resnet18: 1 quantized: fc\.weight \(torch\.int8\)\. 121 keys"
    ):
        load("resnet18", tmp_path / "int8.pth", **SMALL)
    with pytest.raises(WeightsError, match=r"1 quantized: fc\.weight \(torch\.int8\)\.$"):  # and not "fits resnet18"
        resnet18(weights=tmp_path / "int8.pth", **SMALL)
    model = load("resnet18", tmp_path / "int8.pth", **SMALL, strict=False)
    assert not model.get_parameter("fc.weight").eq(1).any()
    report = load_report("resnet18", tmp_path / "int8.pth", **SMALL)
    assert report.quantized == {"fc.weight": torch.int8}
    torch.save({**state, "fc.weight": torch.ones(3, 32).to(torch.float8_e4m3fn)}, tmp_path / "float8.pth")
    assert load_report("resnet18", tmp_path / "float8.pth", **SMALL).quantized == {"fc.weight": torch.float8_e4m3fn}
    counts = {key: value.float() if key.endswith("tracked") else value for key, value in state.items()}
    torch.save(counts, tmp_path / "counts.pth")  # counts are float if a user has cast the whole state dict
    assert load_report("resnet18", tmp_path / "counts.pth", **SMALL).fits


def test_what_does_not_fit_is_said_and_changes_nothing(state: dict[str, Tensor], tmp_path: Path) -> None:
    path = tmp_path / "odd.pth"
    renames = {f"layer4.{i}.bn2.bias": f"layer4.{i}.bn2.beta" for i in range(2)}
    torch.save({renames.get(key, key): value for key, value in state.items()}, path)
    message = (
        r"odd\.pth \(its keys are named as in torchvision or timm\) does not fit resnet18: 2 missing: "
        r"layer4\.0\.bn2\.bias, layer4\.1\.bn2\.bias; 2 unexpected: layer4\.0\.bn2\.beta, layer4\.1\.bn2\.beta\. "
        r"120 keys fit: strict=False"
    )
    with pytest.raises(WeightsError, match=message):
        load("resnet18", path, **SMALL)
    model = load("resnet18", path, **SMALL, strict=False)
    assert torch.equal(model.get_parameter("layer4.0.bn2.bias"), torch.zeros(32))
    assert torch.equal(model.get_parameter("layer4.0.bn2.weight"), state["layer4.0.bn2.weight"])


def test_another_model_is_named(tmp_path: Path) -> None:
    file = tmp_path / "mine.pth"
    torch.save(resnet18(num_classes=3).state_dict(), file)  # as wide as the built-in models
    with pytest.raises(WeightsError, match=r"does not fit resnet34: .*The file fits resnet18\(num_classes=3\)$"):
        load("resnet34", file, num_classes=3)
    with pytest.raises(WeightsError, match=r"mine\.pth: no weights of a Swin Transformer: the keys are conv1\.weight"):
        load("swin_t", file)
    with pytest.raises(WeightsError, match=r"no weights of a DETR: .*MMDetection 3's, with query_embedding\.weight"):
        load("detr_resnet50", file, strict=False)
    torch.save({"conv1.weight": torch.zeros(1), "fc.scale": torch.zeros(1)}, tmp_path / "none.pth")
    with pytest.raises(
        WeightsError, match=r"^no key of .*none\.pth \(its keys are named as in torchvision or timm\) fits resnet18"
    ):
        load("resnet18", tmp_path / "none.pth", strict=False)
    torch.save({}, tmp_path / "no_keys.pth")
    with pytest.raises(WeightsError, match="the keys are none"):
        load("resnet18", tmp_path / "no_keys.pth")


def test_a_report_has_every_key_once(tmp_path: Path) -> None:
    """The report lists every key of the file and of the model, including renamed, missing and misshapen ones."""
    model = swin_t(num_classes=3)
    file = {
        (key.replace("features.0", "patch_embed.0") if key == "features.0.2.bias" else key): value
        for key, value in model.state_dict().items()
        if not key.endswith(("features.7.1.norm2.bias", "features.1.0.attn.relative_position_index"))
    }
    torch.save({**file, "norm.bias": torch.zeros(5)}, tmp_path / "odd.pth")
    report = load_report("swin_t", tmp_path / "odd.pth", num_classes=3)
    assert report.missing_keys == ("features.0.2.bias", "features.7.1.norm2.bias")
    assert report.unexpected_keys == ("patch_embed.0.2.bias",)
    assert report.mismatched == {"norm.bias": ((5,), (768,))}
    assert report.computed_keys == ("features.1.0.attn.relative_position_index",)
    of_model = [*report.used, *report.missing_keys, *report.mismatched, *report.computed_keys]
    assert sorted(of_model) == sorted(model.state_dict())
    of_file = [key for keys in report.used.values() for key in keys]
    assert sorted([*of_file, *report.unexpected_keys, *report.unneeded_keys, "norm.bias"]) == sorted(file)
    assert str(report) == (
        f"{tmp_path / 'odd.pth'} (torchvision): 181 of the model's 185 keys are loaded; 1 are computed by the model: "
        "features.1.0.attn.relative_position_index; 2 missing: features.0.2.bias, features.7.1.norm2.bias; "
        "1 unexpected: patch_embed.0.2.bias; 1 of another shape: norm.bias (file (5,), model (768,))"
    )


def test_a_report_loads_nothing_and_draws_no_random_numbers(file: Path) -> None:
    before = torch.get_rng_state()
    assert load_report("resnet18", file, **SMALL).fits
    assert torch.equal(torch.get_rng_state(), before)
