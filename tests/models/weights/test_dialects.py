"""With weights from other libraries, our models have the outputs of the original models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rooftop.errors import WeightsError
from rooftop.models import SwinTransformer, load, load_report
from rooftop.models.detr.network import Detr, sine_positions
from rooftop.models.vision.resnet import BasicBlock
from rooftop.models.vision.swin import V2
from rooftop.models.weights.dialects import DETR, RESNET, SWIN, Dialect, converted

DETR_OPTIONS: dict[str, Any] = {
    "num_classes": 6,
    "queries": 5,
    "width": 16,
    "heads": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "feed_forward": 24,
}
SWIN_OPTIONS: dict[str, Any] = {"embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4), "num_classes": 5}
TABLES = ("relative_position_index", "relative_coords_table")
CONSTANT = (*TABLES, "attn_mask", "k_bias")  # buffers that follow from the window or are zero; all others are random


@torch.no_grad()
def randomized(model: nn.Module) -> nn.Module:
    """Randomize all parameters and buffers, with sizes that keep the activations near one."""
    generator = torch.Generator().manual_seed(0)
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith(CONSTANT):
            continue
        if not value.is_floating_point():
            value.random_(1, 100, generator=generator)
        elif value.dim() > 1:
            value.normal_(0, value[0].numel() ** -0.5, generator=generator)
        elif name.endswith(("running_var", "weight")):
            value.uniform_(0.5, 1.5, generator=generator)
        else:
            value.normal_(0, 0.2, generator=generator)
    return model.eval()


@torch.no_grad()
def assert_same_outputs(ours: nn.Module, theirs: Callable[[Tensor], Tensor], size: int) -> None:
    x = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))
    expected, found = theirs(x), ours.eval()(x)
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * max(1.0, float(expected.abs().max())))


@pytest.fixture(scope="session")
def timm(torchvision_models: ModuleType) -> ModuleType:
    return pytest.importorskip("timm")


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "resnext50_32x4d", "wide_resnet50_2"])
def test_resnets_of_timm(name: str, timm: Any, tmp_path: Path) -> None:
    theirs = randomized(timm.create_model(name, num_classes=7))
    torch.save(theirs.state_dict(), tmp_path / "timm.pth")
    ours = load(name, tmp_path / "timm.pth", num_classes=7)
    assert_same_outputs(ours, theirs, 64)
    assert all(torch.equal(value, theirs.state_dict()[key]) for key, value in ours.state_dict().items())


@pytest.mark.parametrize(
    ("name", "origin", "size", "loaded", "computed"),
    [
        ("swin_t", "swin_tiny_patch4_window7_224", 224, 173, 12),
        ("swin_v2_t", "swinv2_tiny_window8_256", 256, 209, 24),
    ],
)
def test_swin_transformers_of_timm(
    name: str, origin: str, size: int, loaded: int, computed: int, timm: Any, tmp_path: Path
) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    theirs = randomized(timm.create_model(origin))
    save_file(theirs.state_dict(), tmp_path / "timm.safetensors")
    report = load_report(name, tmp_path / "timm.safetensors")
    assert (report.fits, report.origin, len(report.used), len(report.computed_keys)) == (True, "timm", loaded, computed)
    assert all(key.endswith(TABLES) for key in report.computed_keys)
    used = [key for keys in report.used.values() for key in keys]
    assert sorted(used) == sorted(theirs.state_dict())  # each exactly once, including the parts of a bias
    assert_same_outputs(load(name, tmp_path / "timm.safetensors"), theirs, size)


@pytest.mark.parametrize("name", ["swin_s", "swin_b", "swin_v2_s", "swin_v2_b"])
def test_keys_and_shapes_of_larger_ones(name: str, timm: Any, tmp_path: Path) -> None:
    size = {"s": "small", "b": "base"}[name[-1]]
    with torch.device("meta"):
        theirs = timm.create_model(
            f"swinv2_{size}_window8_256" if "v2" in name else f"swin_{size}_patch4_window7_224", num_classes=3
        )
    tensors = {key: torch.zeros(()).expand(value.shape) for key, value in theirs.state_dict().items()}
    torch.save(tensors, tmp_path / "timm.pth")
    assert load_report(name, tmp_path / "timm.pth", num_classes=3).fits


@pytest.mark.parametrize("version", [1, 2])
def test_microsofts_merging_is_the_end_of_a_stage(version: int, timm: Any) -> None:
    """timm reads Microsoft's files itself, so its result is compared with Rooftop's."""
    origin = timm.models.swin_transformer if version == 1 else timm.models.swin_transformer_v2
    build = origin.SwinTransformer if version == 1 else origin.SwinTransformerV2
    window, size = (7, 56) if version == 1 else (8, 64)
    sizes = {"embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4), "window_size": window, "img_size": size}
    theirs = randomized(build(**sizes, num_classes=5, drop_path_rate=0.0))
    file = microsoft(theirs.state_dict())
    again = build(**sizes, num_classes=5)
    again.load_state_dict(origin.checkpoint_filter_fn(dict(file), again))
    assert all(torch.equal(value, theirs.state_dict()[key]) for key, value in again.state_dict().items())

    found = converted(file, SWIN, "a Swin Transformer")
    assert found.origin == "Microsoft"
    assert found.unneeded == ("layers.0.blocks.1.attn_mask", "layers.0.blocks.0.attn.relative_position_index")
    ours = SwinTransformer((4, 4), window_size=(window, window), **SWIN_OPTIONS, **versioned(version))
    lacking, unexpected = ours.load_state_dict(found.tensors, strict=False)
    assert all(key.endswith(TABLES) for key in lacking)
    assert not unexpected
    assert_same_outputs(ours, theirs, size)


def microsoft(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same weights with microsoft/Swin-Transformer's names, and with the buffers of its files."""
    file = {
        key.replace("layers.1.downsample", "layers.0.downsample").replace("head.fc.", "head."): value
        for key, value in tensors.items()
    }
    file["layers.0.blocks.1.attn_mask"] = torch.zeros(4, 49, 49)
    file["layers.0.blocks.0.attn.relative_position_index"] = torch.zeros(49, 49, dtype=torch.long)
    return file


def versioned(version: int) -> dict[str, Any]:
    return {} if version == 1 else {key: V2[key] for key in ("block", "downsample_layer")}


def test_the_table_of_coordinates_tells_windows_apart(tmp_path: Path, timm: Any) -> None:
    """In Swin V2, only the table of coordinates has a shape that depends on the window, and files may lack this
    table."""
    with torch.device("meta"):
        shapes = timm.create_model("swinv2_tiny_window8_256").state_dict()
    theirs = {key: torch.zeros(()).expand(value.shape) for key, value in shapes.items()}
    table = "layers.0.blocks.0.attn.relative_coords_table"
    torch.save({**theirs, table: torch.zeros(1, 31, 31, 2)}, tmp_path / "window16.pth")
    with pytest.raises(WeightsError, match=r"1 of another shape: features\.1\.0\.attn\.relative_coords_table"):
        load("swin_v2_t", tmp_path / "window16.pth")


@pytest.mark.parametrize(("name", "layer_type"), [("resnet18", "basic"), ("resnet50", "bottleneck")])
def test_resnets_of_hugging_face(name: str, layer_type: str, torchvision_models: ModuleType, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    wide = 4 if layer_type == "bottleneck" else 1
    config = transformers.ResNetConfig(
        depths=[2] * 4 if wide == 1 else [3, 4, 6, 3],
        hidden_sizes=[64 * 2**i * wide for i in range(4)],
        layer_type=layer_type,
        num_labels=7,
    )
    theirs = randomized(transformers.ResNetForImageClassification(config))
    torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin")
    ours = load(name, tmp_path / "pytorch_model.bin", num_classes=7)
    assert_same_outputs(ours, lambda x: theirs(x).logits, 64)


class MmAttention(nn.Module):
    """mmcv's attention, with torch's attention as `attn`."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.attn(x, key, value)[0]


class MmFeedForward(nn.Module):
    """mmcv's FFN: `layers` of (linear, relu, dropout), linear, dropout."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        first = nn.Sequential(nn.Linear(16, hidden), nn.ReLU(), nn.Dropout(0.0))
        self.layers = nn.Sequential(first, nn.Linear(hidden, 16), nn.Dropout(0.0))


class MmLayer(nn.Module):
    """MMDetection 3's encoder layer, and its decoder layer, which attends twice."""

    def __init__(self, crossed: bool) -> None:
        super().__init__()
        self.self_attn = MmAttention()
        if crossed:
            self.cross_attn = MmAttention()
        self.ffn = MmFeedForward(24)
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(3 if crossed else 2))

    def forward(
        self, x: Tensor, positions: Tensor, memory: Tensor | None = None, placed: Tensor | None = None
    ) -> Tensor:
        norms = iter(self.norms)
        x = next(norms)(x + self.self_attn(x + positions, x + positions, x))
        if memory is not None:
            x = next(norms)(x + self.cross_attn(x + positions, placed, memory))
        return next(norms)(x + self.ffn.layers(x))


class MmDetr(nn.Module):
    """DETR as in the sources of MMDetection 3, on torchvision's ResNet-18, for images without padding."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        conv = nn.ModuleDict({"conv": nn.Conv2d(512, 16, 1)})
        self.neck = nn.ModuleDict({"convs": nn.ModuleList([conv])})
        self.bbox_head = nn.ModuleDict(
            {"fc_cls": nn.Linear(16, 7), "reg_ffn": MmFeedForward(16), "fc_reg": nn.Linear(16, 4)}
        )
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(MmLayer(False) for _ in range(2))})
        decoders = nn.ModuleList(MmLayer(True) for _ in range(2))
        self.decoder = nn.ModuleDict({"layers": decoders, "post_norm": nn.LayerNorm(16)})
        self.query_embedding = nn.Embedding(5, 16)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        x = images
        for part in list(self.backbone.children())[:-2]:  # without pooling and head
            x = part(x)
        x = self.neck["convs"][0]["conv"](x)
        positions = sine_positions(torch.zeros((len(x), *x.shape[2:]), dtype=torch.bool), 16)
        cells = x.flatten(2).transpose(1, 2)
        for layer in self.encoder["layers"]:
            cells = layer(cells, positions)
        queries = self.query_embedding.weight.expand(len(x), -1, -1)
        objects = torch.zeros_like(queries)
        for layer in self.decoder["layers"]:
            objects = layer(objects, queries, cells, cells + positions)
        objects = self.decoder["post_norm"](objects)
        boxes = self.bbox_head["fc_reg"](self.bbox_head["reg_ffn"].layers(objects).relu()).sigmoid()
        return self.bbox_head["fc_cls"](objects), boxes


VERSION_2 = {  # new names in version 3; old names in DETRHead and its transformer
    "neck.convs.0.conv.": "bbox_head.input_proj.",
    "query_embedding.": "bbox_head.query_embedding.",
    "encoder.": "bbox_head.transformer.encoder.",
    "decoder.": "bbox_head.transformer.decoder.",
    ".self_attn.": ".attentions.0.",
    ".cross_attn.": ".attentions.1.",
    ".ffn.": ".ffns.0.",
}
# DETRHead of version 2 reads these older names if its own _version is below 2.
BEFORE = {
    ".attentions.0.": ".self_attn.",
    ".attentions.1.": ".multihead_attn.",
    ".ffns.0.": ".ffn.",
    ".post_norm.": ".norm.",
}


def replaced(tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    found = {}
    for key, value in tensors.items():
        for old, new in names.items():
            if old.startswith(".") or key.startswith(old):
                key = key.replace(old, new)
        found[key] = value
    return found


@pytest.mark.parametrize("version", ["3", "2", "before 2.12"])
def test_a_detr_of_mmdetection(version: str, torchvision_models: Any) -> None:
    theirs = randomized(MmDetr(torchvision_models.resnet18()))
    tensors = {key: value for key, value in theirs.state_dict().items() if not key.startswith("backbone.fc.")}
    if version != "3":
        tensors = replaced(tensors, VERSION_2)
    if version == "before 2.12":
        tensors = replaced(tensors, BEFORE)
    found = converted(tensors, DETR, "a DETR")
    assert found.origin == f"MMDetection {3 if version == '3' else 2}"
    assert found.unneeded
    assert all(key.endswith("num_batches_tracked") for key in found.unneeded)

    ours = Detr(BasicBlock, (2, 2, 2, 2), **DETR_OPTIONS).eval()
    ours.load_state_dict(found.tensors, strict=True)
    images = torch.randn(2, 3, 64, 96, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits, boxes = theirs(images)
        predicted = ours(images)
    torch.testing.assert_close(predicted.logits, logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(predicted.boxes, boxes, rtol=0, atol=1e-5)
    assert logits.std() > 0.1


@pytest.mark.parametrize("dialects", [RESNET, SWIN, DETR])
def test_a_sign_belongs_to_one_dialect_of_all(dialects: tuple[Dialect, ...]) -> None:
    signs = [each.sign for each in (*RESNET, *SWIN, *DETR)]
    assert len(set(signs)) == len(signs)
    for each in dialects:
        assert converted({each.sign: torch.zeros(1)}, dialects, "a model").origin == each.origin


def test_keys_that_do_not_go_together() -> None:
    zeros = torch.zeros(2)
    both = {"patch_embed.proj.weight": zeros, "head.fc.bias": zeros, "head.bias": zeros}
    with pytest.raises(WeightsError, match=r"head\.fc\.bias and head\.bias of the file both belong to head\.bias"):
        converted(both, SWIN, "a Swin Transformer")
    with pytest.raises(
        WeightsError, match=r"no weights of a ResNet: the keys are none\. Expected torchvision or timm's"
    ):
        converted({}, RESNET, "a ResNet")
    parts = {f"layers.0.blocks.0.attn.{part}_bias": torch.zeros(size) for part, size in (("q", 2), ("v", 3))}
    with pytest.raises(WeightsError, match=r"of one shape, but the file has .*q_bias \(2,\), .*v_bias \(3,\)"):
        converted({"patch_embed.proj.weight": zeros, **parts}, SWIN, "a Swin Transformer")
    packed = {"layers.0.blocks.0.attn.q_bias": zeros, "layers.0.blocks.0.attn.qkv.bias": zeros}
    with pytest.raises(WeightsError, match=r"q_bias and .*qkv\.bias of the file both belong to features"):
        converted({"patch_embed.proj.weight": zeros, **packed}, SWIN, "a Swin Transformer")
