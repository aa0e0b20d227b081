"""A model and its dropout are the same bit for bit in every layout: parts drawn separately are parts of the whole."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rooftop.kernels import Box, counter_dropout, random_key, random_normal
from rooftop.parallel.randomness import Boxes, Constant, Normal, Stream, Uniform, init_on_meta, materialize

WIDTH, HEADS, FEATURES, TOKENS = 16, 8, 4, 32
RULES = [
    ("*.bias", Constant(0.0)),
    ("*norm.weight", Constant(1.0)),
    ("*.output.weight", Normal(std=0.02 / math.sqrt(2), low=-0.04, high=0.04)),
    ("*.gate.weight", Uniform(-0.1, 0.1)),
    ("*", Normal(std=0.02)),
]


class Layer(nn.Module):
    """A packed projection to heads, a projection back, a gate and a norm, for `parts` ranks."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.packed = nn.Linear(WIDTH, 3 * HEADS * FEATURES // parts)
        self.output = nn.Linear(HEADS * FEATURES // parts, WIDTH)
        self.gate = nn.Linear(WIDTH, WIDTH // parts, bias=False)
        self.norm = nn.LayerNorm(WIDTH)


class Model(nn.Module):
    """Two layers between an embedding and a head that share their weight."""

    def __init__(self, parts: int = 1, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS // parts, WIDTH)
        self.layers = nn.ModuleList(Layer(parts) for _ in range(2))
        self.head = nn.Linear(WIDTH, TOKENS // parts, bias=False)
        self.head.weight = self.embedding.weight
        self.to(dtype)


def boxes_of(rank: int, parts: int) -> dict[str, Boxes]:
    """Heads, columns and rows, as tensor parallelism cuts them."""
    found: dict[str, Boxes] = {"embedding.weight": Box.shard((TOKENS, WIDTH), 0, rank, parts)}
    for layer in ("layers.0", "layers.1"):
        found[f"{layer}.packed.weight"] = Box.shard((3, HEADS, FEATURES, WIDTH), 1, rank, parts)
        found[f"{layer}.packed.bias"] = Box.shard((3, HEADS, FEATURES), 1, rank, parts)
        found[f"{layer}.output.weight"] = Box.shard((WIDTH, HEADS * FEATURES), 1, rank, parts)
        found[f"{layer}.gate.weight"] = Box.shard((WIDTH, WIDTH), 0, rank, parts)
    return found


def cut(whole: Tensor, box: Boxes | None, shape: Sequence[int]) -> Tensor:
    """The part of a whole tensor."""
    if box is None:
        return whole
    boxes = [box] if isinstance(box, Box) else box
    return torch.cat([each.of(whole).flatten() for each in boxes]).view(*shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_made_in_parts_is_made_whole_and_split(parts: int, dtype: torch.dtype) -> None:
    whole = dict(init_on_meta(lambda: Model(dtype=dtype), RULES, seed=5).named_parameters())
    for rank in range(parts):
        boxes = boxes_of(rank, parts)
        part = init_on_meta(lambda: Model(parts, dtype), RULES, seed=5, boxes=boxes)
        for name, parameter in part.named_parameters():
            assert torch.equal(parameter, cut(whole[name], boxes.get(name), parameter.shape)), name
            assert parameter.dtype == dtype


def test_of_a_whole_model_on_meta_only_parts_are_made() -> None:
    boxes = {name: box for name, box in boxes_of(1, 4).items() if "packed" not in name}
    whole, part = (init_on_meta(Model, RULES, seed=5, boxes=each) for each in (None, boxes))
    assert part.embedding.weight.shape == (TOKENS // 4, WIDTH)
    assert torch.equal(part.layers[1].output.weight, whole.layers[1].output.weight[:, 8:16])


def test_tied_parameters_stay_one() -> None:
    model = init_on_meta(Model, RULES, seed=5)
    assert model.head.weight is model.embedding.weight
    assert len(list(model.parameters())) == len(list(Model().parameters()))


def test_rules_give_what_they_say() -> None:
    model = init_on_meta(Model, RULES, seed=5)
    layer = model.layers[0]
    assert torch.equal(layer.norm.weight, torch.ones(WIDTH))
    assert torch.equal(layer.packed.bias, torch.zeros(3 * HEADS * FEATURES))
    assert 0.09 < layer.gate.weight.abs().max() < 0.1
    assert 0.03 < layer.output.weight.abs().max() <= 0.04
    key = random_key(5, "layers.0.packed.weight")
    assert torch.equal(layer.packed.weight, random_normal(layer.packed.weight.shape, key, std=0.02))
    assert not torch.equal(layer.packed.weight, model.layers[1].packed.weight)


def test_a_stage_of_a_pipeline_has_the_names_of_the_whole() -> None:
    whole = init_on_meta(Model, RULES, seed=5)
    stage = init_on_meta(lambda: Layer(1), RULES, seed=5, whole_name=lambda name: f"layers.1.{name}")
    for name, parameter in stage.named_parameters():
        assert torch.equal(parameter, whole.layers[1].get_parameter(name))


def test_what_is_not_on_meta_is_left_and_what_parameters_carry_is_kept() -> None:
    model = Model()
    before = model.layers[0].gate.weight
    with torch.device("meta"):
        model.layers[1] = Layer(1)
        model.layers[1].register_buffer("scale", torch.ones(3))
    model.layers[1].gate.weight.requires_grad_(False).cut_along = 1
    assert materialize(model, RULES, Stream(5)) is model
    assert model.layers[0].gate.weight is before
    gate = model.layers[1].gate.weight
    assert isinstance(gate, nn.Parameter)
    assert (gate.cut_along, gate.requires_grad, model.layers[1].packed.weight.requires_grad) == (1, False, True)
    assert not model.layers[1].scale.is_meta


def test_several_boxes_follow_each_other() -> None:
    """Grouped queries with 8 heads of queries and 4 of keys and values, for four ranks."""
    rows = (8 + 4 + 4) * FEATURES
    whole = Stream(1).normal_(torch.empty(rows, WIDTH), "packed")
    for rank in range(4):
        first = [2 * rank, 8 + rank, 12 + rank]
        boxes = [
            Box((16, FEATURES, WIDTH), (head, 0, 0), (count, FEATURES, WIDTH))
            for head, count in zip(first, (2, 1, 1), strict=True)
        ]
        part = Stream(1).normal_(torch.empty(rows // 4, WIDTH), "packed", boxes)
        expected = cut(whole, boxes, part.shape)
        assert torch.equal(part, expected)
        x = expected.clone().requires_grad_()
        dropped = Stream(1).dropout(x, "drop", 0.5, 0, boxes)
        assert torch.equal(dropped, cut(Stream(1).dropout(whole, "drop", 0.5, 0), boxes, part.shape))
        assert torch.autograd.grad(dropped.sum(), x)[0].unique().tolist() == [0, 2]


@given(st.integers(1, 3), st.sampled_from([1, 2, 4, 8]), st.sampled_from(["tensor", "sequence", "context", "data"]))
@settings(max_examples=40, deadline=None)
def test_dropout_is_the_same_in_every_layout(batch: int, parts: int, layout: str) -> None:
    """(batch, sequence, width), cut by one of these."""
    shape = (8 * batch, 16, 24)
    x = torch.randn(shape, dtype=torch.float64).requires_grad_()
    stream = Stream(3)
    whole = stream.dropout(x, "layers.0.dropout", 0.3, 11)
    (gradient,) = torch.autograd.grad(whole.square().sum(), x)
    for rank in range(parts):
        if layout == "context":
            box = Box.zigzag(shape, 1, rank, parts)
        else:
            box = Box.shard(shape, {"data": 0, "sequence": 1, "tensor": 2}[layout], rank, parts)
        held = box.of(x).detach().requires_grad_()
        part = stream.dropout(held, "layers.0.dropout", 0.3, 11, box)
        assert torch.equal(part, box.of(whole))
        assert torch.equal(torch.autograd.grad(part.square().sum(), held)[0], box.of(gradient))


def test_dropout_by_seed_name_and_step() -> None:
    x = torch.ones(1000)
    y = Stream(3).dropout(x, "a", 0.5, 1)
    assert torch.equal(y, counter_dropout(x, 0.5, random_key(3, "a"), step=1))
    others = [Stream(4).dropout(x, "a", 0.5, 1), Stream(3).dropout(x, "b", 0.5, 1), Stream(3).dropout(x, "a", 0.5, 2)]
    assert all(not torch.equal(y, other) for other in others)
    assert Stream(3).dropout(x, "a", 0.5, 1, training=False) is x
    assert Stream(3).dropout(x, "a", 0.0, 1) is x


def test_dropout_is_compiled_whole() -> None:
    stream = Stream(3)

    def layer(x: Tensor, step: int) -> Tensor:
        return stream.dropout(x.sin(), "a", 0.5, step, Box.shard((4, 12), 1, 1, 3))

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 4)
    for step in (1, 2, 3):
        assert torch.equal(compiled(x, step), layer(x, step))


def test_a_tensor_with_any_strides_is_filled() -> None:
    plain, turned = torch.empty(6, 4), torch.empty(4, 6).t()
    assert Stream(0).uniform_(turned, "w") is turned
    assert torch.equal(turned, Stream(0).uniform_(plain, "w"))
    parameter = nn.Parameter(torch.empty(6, 4))
    assert torch.equal(Stream(0).uniform_(parameter, "w"), plain)


def test_wrong_arguments() -> None:
    stream, whole = Stream(0), Box.whole((4, 4))
    with pytest.raises(
        ValueError, match=r"w: a tensor of shape \(3,\) does not consist of boxes of the sizes \[\(4, 4\)\]"
    ):
        stream.normal_(torch.empty(3), "w", whole)
    with pytest.raises(ValueError, match="whole rows of the first dimension"):
        stream.normal_(torch.empty(2, 16), "w", [Box.whole((8,)), Box.whole((24,))])
    with pytest.raises(ValueError, match="d: a tensor of shape"):
        stream.dropout(torch.ones(3), "d", 0.5, 0, [whole, whole])
    with pytest.raises(ValueError, match=r"no rule matches embedding.weight: add a rule; the patterns are \*.bias"):
        init_on_meta(Model, RULES[:1], seed=0)
    with pytest.raises(ValueError, match=r"got boxes for layers.9.bias, but the module has no such tensors on meta"):
        init_on_meta(Model, RULES, seed=0, boxes={"layers.9.bias": whole})
    with pytest.raises(ValueError, match=r"layers.0.gate.weight has shape \(16, 16\), which fits neither"):
        init_on_meta(Model, RULES, seed=0, boxes={"layers.0.gate.weight": whole})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_made_on_a_gpu_is_that_made_on_the_cpu(dtype: torch.dtype) -> None:
    for rank in range(2):
        boxes = boxes_of(rank, 2)
        here, there = (
            init_on_meta(lambda: Model(2, dtype), RULES, seed=5, boxes=boxes, device=device)
            for device in ("cpu", "cuda")
        )
        for ours, theirs in zip(here.parameters(), there.parameters(), strict=True):
            assert theirs.is_cuda
            assert torch.equal(ours, theirs.cpu())
