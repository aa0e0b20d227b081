"""DETR has the keys of facebookresearch's and the numbers of Hugging Face's, whatever the sizes of the images."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rooftop.cost import CountingMode
from rooftop.errors import WeightsError
from rooftop.inference import Engine
from rooftop.models.detr import pad_images
from rooftop.models.detr.network import Detr, detr_resnet50, detr_resnet101, sine_positions
from rooftop.models.detr.weights import detr_state_dict, load_detr_weights
from rooftop.models.vision.resnet import BasicBlock, Bottleneck

SMALL: dict[str, Any] = {
    "num_classes": 5,
    "queries": 7,
    "width": 32,
    "heads": 4,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "feed_forward": 48,
}
SIZES = [(70, 101), (96, 64), (33, 104)]
IMAGES = [torch.randn(3, *size, generator=torch.Generator().manual_seed(i)) for i, size in enumerate(SIZES)]


def small(block: type[BasicBlock | Bottleneck] = BasicBlock, **options: Any) -> Detr:
    return Detr(block, (1, 1, 1, 1), **{**SMALL, **options}).eval()


@torch.no_grad()
def randomize(model: nn.Module) -> None:
    """Randomize all parameters and norm buffers, with sizes that keep the activations near one."""
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if value.dim() > 1:
            nn.init.normal_(value, std=value[0].numel() ** -0.5)
        elif name.endswith(("running_var", "weight")):
            nn.init.uniform_(value, 0.5, 1.5)
        elif value.is_floating_point():
            nn.init.normal_(value, std=0.2)


@pytest.fixture(scope="session")
def hugging_face(torchvision_models: ModuleType) -> Callable[..., nn.Module]:
    """Builds transformers' DETR of the size of `small`, randomized, on its own ResNet."""
    transformers = pytest.importorskip("transformers")

    @cache
    def build(layer_type: str = "basic", **options: Any) -> nn.Module:
        widths = [64 * 2**i * (4 if layer_type == "bottleneck" else 1) for i in range(4)]
        config = transformers.DetrConfig(
            use_timm_backbone=False,
            backbone_config=transformers.ResNetConfig(
                out_features=["stage4"], depths=[1] * 4, hidden_sizes=widths, layer_type=layer_type
            ),
            num_labels=SMALL["num_classes"],
            num_queries=SMALL["queries"],
            d_model=SMALL["width"],
            encoder_attention_heads=SMALL["heads"],
            decoder_attention_heads=SMALL["heads"],
            encoder_layers=SMALL["encoder_layers"],
            decoder_layers=SMALL["decoder_layers"],
            encoder_ffn_dim=SMALL["feed_forward"],
            decoder_ffn_dim=SMALL["feed_forward"],
            **options,
        )
        torch.manual_seed(0)
        model = transformers.DetrForObjectDetection(config).eval()
        randomize(model)
        return model

    return build


def version_4(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The names of transformers 4, which the published files use."""
    renamed = {}
    for key, value in tensors.items():
        key = key.replace("model.backbone.", "model.backbone.conv_encoder.")
        renamed[key.replace(".o_proj.", ".out_proj.").replace(".mlp.fc", ".fc")] = value
    return renamed


# The numbers of parameters in the trained files of facebookresearch/detr.
@pytest.mark.parametrize(
    ("build", "parameters", "trained", "keys"),
    [(detr_resnet50, 41_524_768, 41_302_368, 458), (detr_resnet101, 60_464_672, 60_242_272, 713)],
)
def test_size(build: Callable[..., Detr], parameters: int, trained: int, keys: int) -> None:
    with torch.device("meta"):
        model = build()
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == trained
    assert len(model.state_dict()) == keys
    assert f"{parameters:,} parameters" in (build.__doc__ or "")


def test_keys_are_facebookresearchs() -> None:
    with torch.device("meta"):
        shapes = {key: tuple(value.shape) for key, value in detr_resnet50().state_dict().items()}
    norm = ("weight", "bias", "running_mean", "running_var")
    attention = {"in_proj_weight": (768, 256), "in_proj_bias": (768,)}
    attention |= {"out_proj.weight": (256, 256), "out_proj.bias": (256,)}
    layer = {f"self_attn.{key}": shape for key, shape in attention.items()}
    layer |= {"linear1.weight": (2048, 256), "linear1.bias": (2048,), "linear2.weight": (256, 2048)}
    layer |= dict.fromkeys(("linear2.bias", "norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"), (256,))
    decoder = layer | {f"multihead_attn.{key}": shape for key, shape in attention.items()}
    decoder |= {"norm3.weight": (256,), "norm3.bias": (256,)}
    expected = {f"transformer.encoder.layers.{i}.{key}": shape for i in range(6) for key, shape in layer.items()}
    expected |= {f"transformer.decoder.layers.{i}.{key}": shape for i in range(6) for key, shape in decoder.items()}
    expected |= {"transformer.decoder.norm.weight": (256,), "transformer.decoder.norm.bias": (256,)}
    expected |= {"class_embed.weight": (92, 256), "class_embed.bias": (92,), "query_embed.weight": (100, 256)}
    for i, out in enumerate((256, 256, 4)):
        expected |= {f"bbox_embed.layers.{i}.weight": (out, 256), f"bbox_embed.layers.{i}.bias": (out,)}
    expected |= {"input_proj.weight": (256, 2048, 1, 1), "input_proj.bias": (256,)}
    expected |= {f"backbone.0.body.bn1.{key}": (64,) for key in norm}
    found = {key: shape for key, shape in shapes.items() if ".body.layer" not in key and ".body.conv1" not in key}
    assert found == expected


def test_the_backbone_is_torchvisions_with_frozen_norms(torchvision_models: ModuleType) -> None:
    theirs = torchvision_models.resnet18()
    randomize(theirs)
    ours = Detr(BasicBlock, (2, 2, 2, 2), **SMALL).train().backbone[0].body
    keys = {k: v for k, v in theirs.state_dict().items() if "fc." not in k and "num_batches" not in k}
    assert list(ours.state_dict()) == list(keys)
    ours.load_state_dict(keys)
    theirs.avgpool, theirs.fc = nn.Identity(), nn.Identity()
    x = torch.randn(2, 3, 64, 96)
    torch.testing.assert_close(ours(x).flatten(1), theirs.eval()(x), rtol=1e-5, atol=1e-5)
    assert all(torch.equal(v, keys[k]) for k, v in ours.state_dict().items())  # training did not change the statistics


@pytest.mark.parametrize(("block", "layer_type"), [(BasicBlock, "basic"), (Bottleneck, "bottleneck")])
def test_logits_and_boxes_are_hugging_faces(
    block: type[BasicBlock | Bottleneck], layer_type: str, hugging_face: Callable[..., Any]
) -> None:
    theirs = hugging_face(layer_type)
    ours = small(block)
    tensors = detr_state_dict(theirs.state_dict())
    before = detr_state_dict(version_4(theirs.state_dict()))
    assert all(torch.equal(before.pop(key), value) for key, value in tensors.items())
    assert not before
    ours.load_state_dict(tensors, strict=True)
    batch, padding = pad_images(IMAGES)
    with torch.no_grad():
        expected = theirs(batch, (~padding).long())
        whole = theirs(batch)
        for found, reference in ((ours(IMAGES), expected), (ours(batch, padding), expected), (ours(batch), whole)):
            torch.testing.assert_close(found.logits, reference.logits, rtol=0, atol=1e-5)
            torch.testing.assert_close(found.boxes, reference.pred_boxes, rtol=0, atol=1e-5)
    assert not torch.allclose(expected.logits, whole.logits, atol=1e-2)  # the mask matters


def test_a_timm_backbone_is_known(hugging_face: Callable[..., Any]) -> None:
    pytest.importorskip("timm")
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        theirs = transformers.DetrForObjectDetection(transformers.DetrConfig(num_labels=91))
        ours = detr_resnet50()
    for names in (dict, version_4):
        shapes = {k: v.shape for k, v in detr_state_dict(names(theirs.state_dict())).items()}
        assert shapes == {k: v.shape for k, v in ours.state_dict().items()}


def test_every_decoder_layer_predicts(hugging_face: Callable[..., Any]) -> None:
    theirs, ours = hugging_face(), small()
    ours.load_state_dict(detr_state_dict(theirs.state_dict()))
    x, _ = pad_images(IMAGES)
    with torch.no_grad():
        found = ours(x)
        hidden = theirs(x, output_hidden_states=True).decoder_hidden_states
        normed = [theirs.model.decoder.layernorm(h) for h in hidden[1:-1]]
    assert len(found.auxiliary) == SMALL["decoder_layers"] - 1
    for earlier, objects in zip(found.auxiliary, normed, strict=True):
        torch.testing.assert_close(earlier.logits, theirs.class_labels_classifier(objects), rtol=0, atol=1e-5)
        torch.testing.assert_close(earlier.boxes, theirs.bbox_predictor(objects).sigmoid(), rtol=0, atol=1e-5)
    ours.auxiliary = False
    last = ours(x)
    assert last.auxiliary == ()
    torch.testing.assert_close(last.logits, found.logits)


def test_padding_changes_nothing_but_where_the_features_end() -> None:
    """For images whose sides are multiples of 32 and whose border is black, results differ only by rounding."""
    model = small()
    randomize(model)
    body = model.backbone[0].body
    for module in body.modules():  # without any bias, black stays black
        if hasattr(module, "running_mean"):
            module.running_mean.zero_()
            module.bias.zero_()
    image = torch.zeros(3, 160, 192)
    image[:, :32, :32] = torch.randn(3, 32, 32)
    alone = model([image])
    beside = model([image, torch.randn(3, 256, 224)])
    torch.testing.assert_close(beside.logits[0], alone.logits[0], rtol=0, atol=1e-4)
    torch.testing.assert_close(beside.boxes[0], alone.boxes[0], rtol=0, atol=1e-4)


# As in MMDetection's description of DETRHead.forward_single: a 1x1 projection of the map; a mask that is zero inside
# each image and one in its padding, interpolated to the map; and the heads on the result of every decoder layer.
def given_to_the_transformer(model: Detr, images: Any, padding: Tensor | None = None) -> tuple[Tensor | None, ...]:
    """Cells (B, S, D), positions (B, S, D), queries (Q, D) and which cells may be attended to (B, 1, 1, S)."""
    seen: list[tuple[Tensor | None, ...]] = []
    handle = model.transformer.register_forward_pre_hook(lambda _, arguments: seen.append(arguments))
    with torch.no_grad():
        model(images, padding)
    handle.remove()
    return seen[0]


def test_each_layer_gives_logits_and_boxes_of_each_query() -> None:
    """all_cls_scores (layers, batch, queries, classes + 1) and all_bbox_preds (layers, batch, queries, 4), 0..1."""
    model = small()
    randomize(model)
    with torch.no_grad():
        found = model(IMAGES)
    layers = (*found.auxiliary, found)
    scores, boxes = (torch.stack([layer[i] for layer in layers]) for i in range(2))
    shape = (SMALL["decoder_layers"], len(IMAGES), SMALL["queries"])
    assert scores.shape == (*shape, SMALL["num_classes"] + 1)
    assert boxes.shape == (*shape, 4)
    assert ((boxes > 0) & (boxes < 1)).all()
    # each query has its own result
    assert len({tuple(layer.logits.flatten().tolist()) for layer in layers}) == len(layers)


def test_cells_are_the_projected_map() -> None:
    model = small()
    randomize(model)
    batch, padding = pad_images(IMAGES)
    cells, positions, queries, _ = given_to_the_transformer(model, batch, padding)
    with torch.no_grad():
        x = model.backbone(batch)  # (B, C, h, w)
    weight = model.input_proj.weight[:, :, 0, 0]
    projected = torch.einsum("bchw,dc->bhwd", x, weight) + model.input_proj.bias
    torch.testing.assert_close(cells, projected.flatten(1, 2), rtol=1e-5, atol=1e-5)
    assert positions is not None
    assert positions.shape == (len(IMAGES), x.shape[-2] * x.shape[-1], SMALL["width"])
    assert queries is model.query_embed.weight


@pytest.mark.parametrize(
    "sizes",
    [SIZES, [(64, 96), (64, 96)], [(1, 1), (200, 130)], [(33, 31), (32, 32), (31, 33)], [(129, 40), (65, 161)]],
    ids=str,
)
def test_the_mask_is_that_of_the_nearest_pixels(sizes: list[tuple[int, int]]) -> None:
    """A cell (i, j) of an h x w map is padding if pixel (i H // h, j W // w) of the H x W batch is padding."""
    batch, padding = pad_images([torch.randn(3, *size) for size in sizes])
    assert [(~mask).nonzero().max(0).values.tolist() for mask in padding] == [[h - 1, w - 1] for h, w in sizes]
    assert [int((~mask).sum()) for mask in padding] == [h * w for h, w in sizes]
    *_, allowed = given_to_the_transformer(small(), batch, padding)
    height, width = batch.shape[2:]
    rows, columns = -(-height // 32), -(-width // 32)
    expected = [
        [i * height // rows < h and j * width // columns < w for i in range(rows) for j in range(columns)]
        for h, w in sizes
    ]
    assert allowed is not None
    assert allowed[:, 0, 0].tolist() == expected


def test_a_batch_without_padding_needs_no_mask() -> None:
    """The mask is None if the batch has no padding."""
    model = small()
    randomize(model)
    x = torch.stack((IMAGES[0], IMAGES[0].flip(-1)))
    nothing = torch.zeros(2, *x.shape[2:], dtype=torch.bool)
    *_, allowed = given_to_the_transformer(model, x)
    assert allowed is None
    *_, allowed = given_to_the_transformer(model, list(x))
    assert allowed is None  # images of one size fill the batch
    with torch.no_grad():
        torch.testing.assert_close(model(x).logits, model(x, nothing).logits, rtol=0, atol=1e-5)
        assert torch.equal(model(list(x)).logits, model(x).logits)


def test_cells_of_padding_are_not_seen() -> None:
    """The map's values in padding do not change the logits and boxes of any layer. The values of all other cells do
    change them."""
    model = small()
    randomize(model)
    batch, padding = pad_images([image[:, :70] for image in IMAGES], multiple=64)
    *_, allowed = given_to_the_transformer(model, batch, padding)
    assert allowed is not None
    with torch.no_grad():
        x = model.backbone(batch)
        seen = allowed.reshape(len(x), 1, *x.shape[2:])
        assert seen.any(dim=(1, 2, 3)).all()
        assert not seen.all(dim=(1, 2, 3)).any()  # every image has padding
        outputs = []
        for place in (torch.zeros_like(seen), ~seen, seen):
            model.backbone = Given(torch.where(place, 10 * torch.randn_like(x), x))
            found = model(batch, padding)
            outputs.append(torch.stack([torch.cat(each[:2], -1) for each in (found, *found.auxiliary)]))
    before, changed_padding, changed_image = outputs
    torch.testing.assert_close(changed_padding, before, rtol=0, atol=1e-5)
    assert not torch.allclose(changed_image, before, atol=1e-2)


class Given(nn.Module):
    """A backbone that returns this map for any input."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.x = x

    def forward(self, _: Tensor) -> Tensor:
        return self.x


def test_images_of_a_batch_do_not_see_each_other() -> None:
    """An image's results do not depend on the other images of the batch or on their order, if the batch keeps its
    size."""
    model = small()
    randomize(model)
    batch, padding = pad_images(IMAGES)
    others, other_padding = batch.clone(), padding.clone()
    others[1:] = 10 * torch.randn_like(batch[1:])
    other_padding[1:] = False
    with torch.no_grad():
        found, beside_others = model(batch, padding), model(others, other_padding)
        turned = model(batch.flip(0), padding.flip(0))
    for layer, beside, back in zip(*((x, *x.auxiliary) for x in (found, beside_others, turned)), strict=True):
        for i in range(2):
            torch.testing.assert_close(beside[i][0], layer[i][0], rtol=0, atol=1e-5)
            torch.testing.assert_close(back[i].flip(0), layer[i], rtol=0, atol=1e-5)
    assert not torch.allclose(beside_others.logits[1:], found.logits[1:], atol=1e-2)


def test_an_image_wholly_padding_is_finite_and_leaves_the_others_alone() -> None:
    model = small().train()
    batch, padding = pad_images(IMAGES)
    with torch.no_grad():
        model.eval()
        expected = model(batch, padding).logits[0]
        padding[1] = True
        found = model(batch, padding)
    torch.testing.assert_close(found.logits[0], expected)
    assert found.logits.isfinite().all()
    assert found.boxes.isfinite().all()
    out = model.train()(batch, padding)
    (out.logits.sum() + out.boxes.sum()).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_positions_run_to_two_pi_and_tell_all_cells_apart() -> None:
    padding = torch.ones(2, 9, 12, dtype=torch.bool)
    padding[0, :5, :7] = False
    padding[1, :9, :12] = False
    found = sine_positions(padding, 32).unflatten(1, (9, 12))
    assert found[0, 4, 6, [0, 1, 16, 17]].tolist() == pytest.approx([0, 1, 0, 1], abs=1e-5)
    first = math.sin(2 * math.pi / 5), math.sin(2 * math.pi / 7)
    assert (found[0, 0, 0, 0].item(), found[0, 0, 0, 16].item()) == pytest.approx(first, abs=1e-5)
    distances = torch.cdist(found[1].flatten(0, 1), found[1].flatten(0, 1)) + 10 * torch.eye(108)
    assert distances.min() > 0.05


def test_half_precision_has_no_nan() -> None:
    batch, padding = pad_images(IMAGES)
    padding[1] = True
    found = small().bfloat16()(batch.bfloat16(), padding)
    assert found.logits.dtype == torch.bfloat16
    assert found.logits.isfinite().all()


def test_autocast() -> None:
    model = small()
    expected = model(IMAGES)
    with torch.autocast("cpu", torch.bfloat16):
        found = model(IMAGES)
    assert found.logits.dtype == torch.bfloat16
    torch.testing.assert_close(found.logits.float(), expected.logits, rtol=0, atol=0.1)
    torch.testing.assert_close(found.boxes.float(), expected.boxes, rtol=0, atol=0.05)


def test_every_trained_parameter_gets_a_gradient() -> None:
    model = small().train()
    randomize(model)
    found = model(IMAGES)
    sum(each.logits.square().sum() + each.boxes.square().sum() for each in (found, *found.auxiliary)).backward()
    without = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {n for n, _ in model.named_parameters() if ".body.conv1" in n or ".body.layer1" in n}
    # The first layer attends to zeros, so that only biases matter there.
    assert without - {"transformer.decoder.layers.0.self_attn.in_proj_weight"} == frozen
    assert all(p.requires_grad for p in small(norm=nn.BatchNorm2d).parameters())


def operators(call: Callable[[], object]) -> list[str]:
    with CountingMode() as counted:
        call()
    return [record.name for record in counted.records]


@torch.no_grad()
def test_sums_are_computed_with_the_norms_after_them() -> None:
    """Each encoder layer has two sums, each decoder layer three. The first decoder layer's sum with zeros is not
    computed."""
    names = operators(lambda: small()(IMAGES))
    assert names.count("rooftop::add_layer_norm") == 2 * 2 + 3 * 3 - 1
    assert names.count("rooftop::layer_norm") == 2


@torch.no_grad()
def test_an_engine_computes_once_what_does_not_depend_on_the_images() -> None:
    """The engine computes these once: the positions of a batch without padding, the first queries of the objects, and
    the weights of all layers side by side."""
    model = small()
    randomize(model)
    batch, padding = pad_images(IMAGES)
    engine = Engine(model)
    assert sorted(name.rpartition(".")[2] for name in engine.report.constants) == [
        *["beginning"] * SMALL["decoder_layers"], "packed_projection", "unpadded_positions",
    ]  # fmt: skip
    for args in ((batch,), (batch, padding), (batch[:1],), (batch[:, :, :64],), (batch,)):
        found, expected = engine(*args), model(*args)
        torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=1e-5)
        torch.testing.assert_close(found.boxes, expected.boxes, rtol=0, atol=1e-5)
    names = operators(lambda: engine(batch))
    assert not set(names) & {"aten::cumsum", "aten::sin", "aten::cos", "aten::pow", "aten::cat"}
    layers = SMALL["encoder_layers"] + 2 * SMALL["decoder_layers"]
    assert sum("scaled_dot_product" in name for name in names) == layers - 1
    model.transformer.decoder.layers[0].norm1.bias.add_(1.0)
    model.transformer.decoder.layers[1].multihead_attn.in_proj_weight.mul_(2.0)
    changed = model(batch).logits
    assert not torch.allclose(changed, engine(batch).logits, atol=1e-3)
    torch.testing.assert_close(changed, model(batch, torch.zeros_like(padding)).logits, rtol=0, atol=1e-5)


def test_captured_whole() -> None:
    model = small(encoder_layers=1, decoder_layers=2)
    batch, padding = pad_images(IMAGES)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(batch, padding), model(batch, padding))


def test_weights_from_files(tmp_path: Path) -> None:
    model = detr_resnet50(**SMALL)
    randomize(model)
    expected = model.state_dict()
    torch.save({"model": expected}, tmp_path / "detr.pth")
    found = detr_resnet50(weights=tmp_path / "detr.pth", **SMALL).state_dict()
    assert all(torch.equal(found[key], value) for key, value in expected.items())


def test_wrong_weights(tmp_path: Path, resnet18_file: Path) -> None:
    model, path = small(), tmp_path / "detr.pth"
    torch.save(model.state_dict(), path)
    with pytest.raises(WeightsError, match="has 5 classes, the model 91: build it with num_classes=5"):
        load_detr_weights(small(num_classes=91), path)
    with pytest.raises(WeightsError, match="does not fit the model"):
        load_detr_weights(small(queries=8), path)
    with pytest.raises(WeightsError, match=r"three\.pth: no weights of a DETR"):
        load_detr_weights(model, resnet18_file)
    with pytest.raises(WeightsError, match="cannot be read: No such file"):
        load_detr_weights(model, tmp_path / "missing.pth")
    names = ("model.query_position_embeddings.weight", "model.encoder.layers.0.self_attn.q_proj.bias")
    with pytest.raises(WeightsError, match=r"the file has .*self_attn\.q_proj\.bias but no k, v"):
        detr_state_dict({name: torch.zeros(6) for name in names})


def test_a_backbone_of_its_own(tmp_path: Path) -> None:
    from rooftop.models import resnet50

    backbone = resnet50(num_classes=3)
    randomize(backbone)
    torch.save(backbone.state_dict(), tmp_path / "resnet50.pth")
    body = detr_resnet50(backbone_weights=tmp_path / "resnet50.pth", **SMALL).backbone[0].body.state_dict()
    theirs = backbone.state_dict()
    assert all(torch.equal(value, theirs[key]) for key, value in body.items())


def test_images_are_padded_right_and_below() -> None:
    batch, padding = pad_images(IMAGES, multiple=32)
    assert batch.shape == (3, 3, 96, 128)
    for image, place, mask in zip(IMAGES, batch, padding, strict=True):
        _, h, w = image.shape
        assert torch.equal(place[:, :h, :w], image)
        assert not mask[:h, :w].any()
        assert (~mask).sum() == h * w
        assert place.abs().sum().item() == pytest.approx(image.abs().sum().item(), rel=1e-5)


@pytest.mark.parametrize(
    ("images", "padding", "message"),
    [
        ([], None, "zero images"),
        (torch.zeros(0, 3, 8, 8), None, "zero images"),
        (torch.zeros(1, 3, 8, 8, dtype=torch.uint8), None, "images are torch.uint8"),
        (torch.zeros(1, 3, 0, 8), None, "images without pixels"),
        (torch.zeros(1, 4, 8, 8), None, "expected \\(B, 3, H, W\\)"),
        ([torch.zeros(3, 8, 8), torch.zeros(1, 8, 8)], None, "image 1 is \\(1, 8, 8\\), expected \\(3, H, W\\)"),
        ([torch.zeros(3, 8, 8), torch.zeros(3, 8, 8, dtype=torch.uint8)], None, "image 1 is torch.uint8 on cpu, and"),
        ([torch.zeros(3, 8, 8)], torch.zeros(1, 8, 8, dtype=torch.bool), "is for a batch"),
        (torch.zeros(1, 3, 8, 8), torch.zeros(1, 8, 8), "torch.float32 \\(1, 8, 8\\), expected torch.bool"),
        (torch.zeros(1, 3, 8, 8), torch.zeros(1, 8, 9, dtype=torch.bool), "expected torch.bool \\(1, 8, 8\\)"),
    ],
)
def test_wrong_images(images: Any, padding: Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small()(images, padding)


@pytest.mark.parametrize("options", [{"width": 30}, {"heads": 5}, {"decoder_layers": 0}])
def test_wrong_options(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"width|decoder_layers"):
        small(**options)
