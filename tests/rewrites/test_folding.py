"""A folded model returns what the model returns. Parts that cannot be folded stay, with the reason."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rooftop import models
from rooftop.inference import Engine, fold_norms, fuse_convolutions
from rooftop.models.detr.network import Detr, FrozenBatchNorm
from rooftop.models.vision.resnet import Bottleneck
from rooftop.rewrites.splitting import OtherPathError

# the other networks only have more of the same layers
RESNETS = ("resnet18", "resnext50_32x4d")


@torch.no_grad()
def randomized(model: nn.Module) -> nn.Module:
    """Draw all parameters and norm buffers so that activations stay near one, and set evaluation mode."""
    torch.manual_seed(0)
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if value.dim() > 1:
            nn.init.normal_(value, std=value[0].numel() ** -0.5)
        elif name.endswith(("running_var", "weight")):
            nn.init.uniform_(value, 0.5, 1.5)
        elif value.is_floating_point():
            nn.init.normal_(value, std=0.2)
    return model.eval()


def assert_same(actual: Any, expected: Any) -> None:
    """Within 1e-5 of the largest value."""
    pairs = [(actual, expected)] if isinstance(actual, Tensor) else list(zip(actual, expected, strict=True))
    for got, wanted in pairs:
        if isinstance(got, Tensor):
            assert got.shape == wanted.shape
            assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max()
        else:
            assert_same(got, wanted)


@pytest.mark.parametrize("name", RESNETS)
@torch.no_grad()
def test_every_resnet_folds_wholly(name: str) -> None:
    with torch.device("meta"):
        model = getattr(models, name)(num_classes=10)
    model = randomized(model.to_empty(device="cpu"))
    norms = [key for key, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)]
    engine = Engine(model)
    assert list(engine.report.folded) == norms
    assert not engine.report.left
    assert engine.report.folded["layer2.0.downsample.1"] == "layer2.0.downsample.0"
    assert not any(isinstance(b, Tensor) for b in engine.model.buffers())  # the statistics are removed, not just unused
    x = torch.randn(2, 3, 48, 33)
    assert_same(engine(x), model(x))


@pytest.mark.parametrize("norm", [FrozenBatchNorm, nn.BatchNorm2d])
@torch.no_grad()
def test_detr_folds_its_backbone_though_its_own_forward_cannot_be_traced(norm: type[nn.Module]) -> None:
    model = Detr(Bottleneck, (1, 1, 1, 1), 5, 7, 32, 4, 2, 3, 48, norm=norm)
    engine = Engine(randomized(model))
    assert len(engine.report.folded) == 1 + 4 * 4
    assert engine.report.folded["backbone.0.body.bn1"] == "backbone.0.body.conv1"
    assert not engine.report.left
    images = [torch.randn(3, 70, 101), torch.randn(3, 96, 64)]
    found = engine(images)
    assert type(found) is type(model(images))
    assert_same(found, model(images))
    batch, padding = torch.randn(2, 3, 64, 64), torch.zeros(2, 64, 64, dtype=torch.bool)
    assert_same(engine(batch, padding=padding), model(batch, padding))


@torch.no_grad()
def test_a_swin_has_nothing_to_fold() -> None:
    model = randomized(models.swin_t(depths=(1, 1, 2, 1), num_classes=10))
    engine = Engine(model)
    assert not engine.report.folded
    assert not engine.report.left
    x = torch.randn(1, 3, 64, 50)
    assert torch.equal(engine(x), model(x))


@torch.no_grad()
def test_batch_norms_after_recurrent_layers_stay() -> None:
    model = randomized(models.next_frame_network(filters=4))
    engine = Engine(model)
    assert set(engine.report.left) == {"norms.0", "norms.1"}
    x = torch.rand(1, 3, 8, 8, 1)
    assert_same(engine(x), model(x))


LAYERS: dict[str, tuple[Callable[[bool], nn.Module], type[nn.Module], tuple[int, ...]]] = {
    "linear": (lambda bias: nn.Linear(6, 8, bias), nn.BatchNorm1d, (5, 6)),
    "1d": (lambda bias: nn.Conv1d(6, 8, 3, bias=bias), nn.BatchNorm1d, (2, 6, 9)),
    "2d": (lambda bias: nn.Conv2d(6, 8, 3, 2, 1, bias=bias), nn.BatchNorm2d, (2, 6, 9, 8)),
    "3d": (lambda bias: nn.Conv3d(6, 8, 2, bias=bias), nn.BatchNorm3d, (2, 6, 4, 5, 6)),
    "groups": (lambda bias: nn.Conv2d(6, 8, 3, groups=2, bias=bias), nn.BatchNorm2d, (2, 6, 9, 8)),
    "depthwise": (lambda bias: nn.Conv2d(6, 12, 3, groups=6, bias=bias), nn.BatchNorm2d, (2, 6, 9, 8)),
    "reflected": (
        lambda bias: nn.Conv2d(6, 8, 3, padding=1, padding_mode="reflect", bias=bias),
        nn.BatchNorm2d,
        (2, 6, 9, 8),
    ),
    "transposed 1d": (lambda bias: nn.ConvTranspose1d(6, 8, 3, 2, bias=bias), nn.BatchNorm1d, (2, 6, 9)),
    "transposed 2d": (lambda bias: nn.ConvTranspose2d(6, 8, 3, 2, 1, 1, bias=bias), nn.BatchNorm2d, (2, 6, 4, 5)),
    "transposed 3d": (lambda bias: nn.ConvTranspose3d(6, 8, 2, bias=bias), nn.BatchNorm3d, (2, 6, 3, 4, 5)),
    "transposed groups": (
        lambda bias: nn.ConvTranspose2d(6, 8, 3, groups=2, bias=bias),
        nn.BatchNorm2d,
        (2, 6, 4, 5),
    ),
    "frozen": (lambda bias: nn.Conv2d(6, 8, 3, bias=bias), FrozenBatchNorm, (2, 6, 9, 8)),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layer", LAYERS)
@torch.no_grad()
def test_each_kind_of_layer(layer: str, bias: bool) -> None:
    build, norm, shape = LAYERS[layer]
    convolution = build(bias)
    channels = convolution.out_features if isinstance(convolution, nn.Linear) else convolution.out_channels
    model = randomized(nn.Sequential(convolution, norm(channels)))
    engine = Engine(model)
    assert engine.report.folded == {"1": "0"}
    x = torch.randn(shape)
    assert_same(engine(x), model(x))
    with pytest.raises((ValueError, OtherPathError), match=f"expected {len(shape)}D input"):
        engine(x[0])  # the branch that a convolution without its norm would take


@torch.no_grad()
def test_a_norm_without_weights_and_one_of_another_precision() -> None:
    model = randomized(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=False), nn.ReLU())).double()
    engine = Engine(model, dtype=torch.float64, output_dtype=None)
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    torch.testing.assert_close(engine(x), model(x), rtol=1e-13, atol=1e-13)


class Torchvisions(nn.Module):
    """A frozen norm with its own arithmetic and shapes, and an eps that is not an attribute."""

    def __init__(self, channels: int, slope: float = 1.0) -> None:
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.ones(channels))
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight * (self.running_var + 1e-3).rsqrt()
        y = x * scale.view(1, -1, 1, 1) + (self.bias - self.running_mean * scale).view(1, -1, 1, 1)
        return F.leaky_relu(y, self.slope)


@torch.no_grad()
def test_frozen_norms_are_judged_by_what_they_do() -> None:
    x = torch.randn(2, 3, 8, 8)
    for slope, folds in ((1.0, True), (0.1, False)):
        model = randomized(nn.Sequential(nn.Conv2d(3, 4, 3), Torchvisions(4, slope)))
        engine = Engine(model)
        assert bool(engine.report.folded) == folds
        assert_same(engine(x), model(x))
    assert "does more than multiply and add" in engine.report.left["1"]


class Wired(nn.Module):
    """Parts for the networks below."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.other = nn.Conv2d(4, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)


class ConvolutionTwice(Wired):
    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.bn(self.conv(x)))


class ConvolutionTwiceNormTwice(Wired):
    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(self.bn(self.conv(x))))


class NormTwice(Wired):
    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x)) + self.bn(self.other(x))


class TwoConsumers(Wired):
    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.bn(y) + y


class ChangedBetween(Wired):
    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        y += 1
        return self.bn(y)


class ReluBetween(Wired):
    def forward(self, x: Tensor) -> Tensor:
        return self.bn(F.relu(self.conv(x)))


class NormFirst(Wired):
    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.bn(x))


class WeightRead(Wired):
    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x)) * self.conv.weight.mean()


class Unused(Wired):
    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class Sized(Wired):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose2d(4, 4, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x, output_size=[14, 14]))


class TwoNames(Wired):
    def __init__(self) -> None:
        super().__init__()
        self.again = self.conv

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x))


class Optional(Wired):
    """A module with two branches. A trace would see only one of them."""

    def forward(self, x: Tensor, plain: bool = False) -> Tensor:
        y = self.conv(x)
        return y if plain else self.bn(y)


LEFT: dict[type[Wired], str] = {
    ConvolutionTwice: "conv is called 2 times",
    ConvolutionTwiceNormTwice: "it is called 2 times",
    NormTwice: "it is called 2 times",
    TwoConsumers: "the output of conv is used elsewhere, too",
    ChangedBetween: ", not a convolution",
    ReluBetween: "follows relu, not a convolution",
    NormFirst: "follows x, not a convolution",
    WeightRead: "the tensors of conv are read by other code",
    Unused: "no trace shows which module it follows",
    Sized: "conv is called with other arguments besides its input",
    TwoNames: "conv has 2 names",
    Optional: "the model cannot be traced: its argument plain may be left out",
}


@pytest.mark.parametrize("kind", LEFT)
@torch.no_grad()
def test_what_the_structure_does_not_allow_is_left_and_said(kind: type[Wired]) -> None:
    model = randomized(kind())
    engine = Engine(model)
    assert not engine.report.folded
    assert LEFT[kind] in engine.report.left["bn"]
    assert "bn: left" in str(engine.report)
    x = torch.randn(2, 4, 6, 6)
    assert torch.equal(engine(x), model(x))


class Clipped(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).clamp(-1, 1)


@torch.no_grad()
def test_norms_that_are_not_quite_batch_norms_are_left() -> None:
    hooked = nn.Conv2d(4, 4, 1)
    hooked.register_forward_hook(lambda module, given, result: result * 2)
    batch = nn.BatchNorm2d(4, track_running_stats=False)
    infinite = nn.BatchNorm2d(4)
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(4, 4, 1), Clipped(4)),
        nn.Sequential(hooked, nn.BatchNorm2d(4)),
        nn.Sequential(nn.Conv2d(4, 4, 1), batch),
        nn.Sequential(nn.Conv2d(4, 4, 1), infinite),
    )
    randomized(model)
    infinite.bias[0] = float("nan")
    engine = Engine(model)
    assert [why.partition(",")[0] for why in engine.report.left.values()] == [
        "it is a Clipped",
        "1.0 has hooks",
        "it normalizes by the statistics of each batch",
        "the folded weights would not be finite",
    ]
    x = torch.randn(2, 4, 3, 3)
    torch.testing.assert_close(engine(x), model(x), rtol=0, atol=0, equal_nan=True)


class NormAct(nn.BatchNorm2d):
    """A norm with the modules after it in one class, and a forward of its own, as timm writes it."""

    def __init__(self, channels: int, act: nn.Module | None = None, **options: Any) -> None:
        super().__init__(channels, **options)
        self.drop = nn.Identity()
        self.act = act or nn.ReLU(inplace=True)

    def normalized(self, x: Tensor) -> Tensor:
        torch._assert(x.ndim == 4, f"expected 4D input (got {x.ndim}D input)")
        batch = self.training or (self.running_mean is None and self.running_var is None)
        return F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, batch, self.momentum or 0.0, self.eps
        )

    def forward(self, input: Tensor) -> Tensor:
        return self.act(self.drop(self.normalized(input)))  # type: ignore[no-any-return]


class Renamed(nn.BatchNorm2d):
    """A subclass with its parent's forward."""


@pytest.mark.parametrize(
    "norm",
    [
        NormAct(4),
        NormAct(4, nn.SiLU(), affine=False),
        NormAct(4, nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU())),
        Renamed(4, eps=0.1),
    ],
    ids=["relu", "without weights", "another convolution", "the parent's forward"],
)
@torch.no_grad()
def test_a_norm_with_its_activation_in_one_class_is_folded(norm: nn.Module) -> None:
    model = randomized(nn.Sequential(nn.Conv2d(4, 4, 3), norm, nn.Identity(), nn.Conv2d(4, 4, 1)))
    x = torch.randn(2, 4, 6, 6)
    expected = model(x)
    folding = fold_norms(model)
    assert folding.folded == {"1": "0"}
    assert not folding.left
    assert_same(model(x), expected)
    assert fold_norms(model).folded == {}, "a second time"
    assert_same(model(x), expected)
    model.load_state_dict(dict(model.state_dict()))
    assert_same(model(x), expected)
    fusing = fuse_convolutions(model)
    assert_same(model(x), expected)
    if isinstance(norm, NormAct):
        assert fusing.fused["0"] == (
            "bias, silu"
            if isinstance(norm.act, nn.SiLU)
            else "bias, relu"
            if norm.affine and isinstance(norm.act, nn.ReLU)
            else "bias"
        )
    with pytest.raises(OtherPathError):
        norm(x[:, :, :4, :4])


class Scaled(NormAct):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


class Weighted(NormAct):
    def forward(self, input: Tensor) -> Tensor:
        return self.act(self.normalized(input) + self.bias.view(-1, 1, 1))  # type: ignore[no-any-return]


class Residual(NormAct):
    def forward(self, input: Tensor) -> Tensor:
        return self.act(self.normalized(input)) + input  # type: ignore[no-any-return]


class OfAnother(NormAct):
    """Normalizes by the statistics in other buffers."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.register_buffer("other_mean", torch.ones(channels))

    def normalized(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.other_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)


class OtherEps(NormAct):
    def normalized(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, 0.5)


class ByBatch(NormAct):
    def normalized(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)


class Asking(NormAct):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if input.shape[0] > 1 else input


@pytest.mark.parametrize("kind", [Scaled, Weighted, Residual, OfAnother, OtherEps, ByBatch, Asking])
@torch.no_grad()
def test_a_norm_that_is_more_than_a_chain_is_left_as_it_was(kind: type[NormAct]) -> None:
    model = randomized(nn.Sequential(nn.Conv2d(4, 4, 3), kind(4)))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x = torch.randn(2, 4, 6, 6)
    expected = model(x)
    assert list(fold_norms(model).left) == ["1"]
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (nn.Sequential(nn.ReLU(), NormAct(4)), "it follows 0, a ReLU"),
        (nn.Sequential(nn.Conv2d(4, 4, 3), NormAct(4)), "it is in training mode"),
        (nn.Sequential(nn.Conv2d(4, 4, 3), *[NormAct(4)] * 2), "it has 2 names in the model"),
    ],
    ids=["no convolution", "training", "two names"],
)
@torch.no_grad()
def test_a_split_norm_that_stays_is_put_together_again(model: nn.Module, why: str) -> None:
    randomized(model)
    model[1].train("training" in why)  # type: ignore[index]
    names = list(model.state_dict())
    assert why in fold_norms(model).left["1"]
    assert list(model.state_dict()) == names
    assert "forward" not in vars(model[1])  # type: ignore[index]


@torch.no_grad()
def test_a_norm_with_hooks_is_not_split() -> None:
    model = randomized(nn.Sequential(nn.Conv2d(4, 4, 3), NormAct(4)))
    calls: list[str] = []
    model[1].register_forward_hook(lambda *given: calls.append("called"))  # type: ignore[index]
    x = torch.randn(2, 4, 6, 6)
    expected = model(x)
    assert "1" in fold_norms(model).left
    assert torch.equal(model(x), expected)
    assert calls == ["called"] * 2


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_convolution_whose_output_a_backward_hook_reads_is_not_folded() -> None:
    model = randomized(nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)))
    model[0].register_backward_hook(lambda *given: None)  # type: ignore[index]
    x = torch.randn(2, 4, 6, 6)
    expected = model(x)
    assert fold_norms(model).left == {"1": "0 has hooks"}
    assert torch.equal(model(x), expected)


@torch.no_grad()
def test_a_trace_calls_no_hook() -> None:
    """The parts of a module with hooks are still folded."""
    model = randomized(nn.Sequential(nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)), nn.Conv2d(4, 4, 1)))
    calls: list[Tensor] = []
    model[0].register_forward_hook(lambda module, given, result: calls.append(result) or result * 2)  # type: ignore[index]
    x = torch.randn(2, 4, 6, 6)
    expected = model(x)
    assert fold_norms(model).folded == {"0.1": "0.0"}
    assert_same(model(x), expected)
    assert len(calls) == 2


class Norms:
    """Norms that look like a chain; only `AsksItsPart` is one."""

    class CalledNorm(NormAct):
        rooftop_norm = "a name that the part would have"

    class PlainWeight(NormAct):
        def __init__(self, channels: int) -> None:
            super().__init__(channels)
            del self.weight
            self.weight = torch.full((channels,), 3.0)

    class Counting(NormAct):
        calls = 0

        def forward(self, input: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(input)

    class Keeping(NormAct):
        last: Any = None

        def forward(self, input: Tensor) -> Tensor:
            self.last = super().forward(input)
            return self.last  # type: ignore[no-any-return]

    class AsksItsPart(NormAct):
        """The trace depends on the mode of another module, which stays as it is."""

        def forward(self, input: Tensor) -> Tensor:
            x = self.normalized(input)
            return self.act(self.drop(x) if self.drop.training else x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [kind for name, kind in vars(Norms).items() if name[0] != "_"])
@torch.no_grad()
def test_a_split_norm_goes_on_as_it_did(kind: type[NormAct]) -> None:
    model = randomized(nn.Sequential(nn.Conv2d(4, 4, 3), kind(4)))
    model[1].drop = nn.Hardtanh(-0.1, 0.1).train()  # type: ignore[index]
    names = list(model.state_dict())
    x = torch.randn(2, 4, 6, 6)
    expected = model(x)
    folding = fold_norms(model)
    assert bool(folding.folded) == (kind is Norms.AsksItsPart)
    assert repr(model)
    assert_same(model(x), expected)
    if folding.left:
        assert f"it is a {kind.__name__}, which may do more" in folding.left["1"]
        assert list(model.state_dict()) == names


class Switched(NormAct):
    use = True

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.use = True
        self.slope = nn.Parameter(torch.ones(1))

    def forward(self, input: Tensor) -> Tensor:
        x = self.normalized(input)
        return self.act(x) if self.use else x  # type: ignore[no-any-return]


@torch.no_grad()
def test_a_split_norm_that_changes_afterwards_is_another_path() -> None:
    model = randomized(nn.Sequential(nn.Conv2d(4, 4, 3), Switched(4)))
    x = torch.randn(2, 4, 6, 6)
    norm: Any = model[1]
    norm.act = nn.SiLU()
    expected = model(x)
    norm.act = nn.ReLU()
    fold_norms(model)
    assert norm.slope is not None, "only the tensors of the norm are removed"
    assert norm.weight is norm.running_mean is None
    norm.act = nn.SiLU()
    assert_same(model(x), expected)
    norm.use = False
    with pytest.raises(OtherPathError, match="an attribute of a Switched has changed"):
        model(x)


class ReadsANorm(nn.Module):
    def __init__(self, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.conv, self.bn, self.read = nn.Conv2d(4, 4, 3), NormAct(4), read

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn(self.conv(x))
        weight = self.read(self.bn)
        return y if weight is None else y * weight.view(1, -1, 1, 1)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "read", [lambda bn: bn.weight, lambda bn: getattr(bn, "bias", None), lambda bn: bn.running_var]
)
@torch.no_grad()
def test_tensors_of_a_split_norm_that_others_read_stay(read: Callable[[Any], Any]) -> None:
    model = randomized(ReadsANorm(read))
    x = torch.randn(2, 4, 6, 6)
    expected = model(x)
    assert fold_norms(model).left == {"bn": "its tensors are read by other code"}
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("name", ["weight", "bias"])
@torch.no_grad()
def test_a_convolution_with_a_plain_tensor_is_left(name: str) -> None:
    convolution = nn.Conv2d(4, 4, 3)
    value = getattr(convolution, name).detach().clone()
    delattr(convolution, name)
    setattr(convolution, name, value)
    model = randomized(nn.Sequential(convolution, nn.BatchNorm2d(4)))
    x = torch.randn(2, 4, 6, 6)
    expected = model(x)
    assert fold_norms(model).left == {"1": f"the {name} of 0 is a plain attribute, neither a parameter nor a buffer"}
    assert torch.equal(model(x), expected)


@torch.no_grad()
def test_a_replaced_forward_is_not_traced_as_the_one_of_its_class() -> None:
    model = randomized(nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)))
    model.forward = lambda x: model[1](F.relu(model[0](x)))  # type: ignore[method-assign, index, operator]
    x = torch.randn(2, 4, 6, 6)
    expected = model(x)
    assert "its forward was replaced" in fold_norms(model).left["1"]
    assert torch.equal(model(x), expected)


class Frozen(nn.Module):
    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.rand(4) + 0.5)
        self.function = function

    def affine(self, x: Tensor) -> Tensor:
        mean, var, weight, bias = (
            t.view(1, -1, 1, 1) for t in (self.running_mean, self.running_var, self.weight, self.bias)
        )
        return (x - mean) * (weight * (var + 1e-5).rsqrt()) + bias  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


@pytest.mark.parametrize(
    "function",
    [
        lambda norm, x: norm.affine(x.flip(1)),
        lambda norm, x: norm.affine(x - x.mean(1, True)),
        lambda norm, x: norm.affine(F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)),
        lambda norm, x: norm.affine(x).clamp(-8, 8),
    ],
    ids=["flipped", "centred", "averaged", "clamped"],
)
@torch.no_grad()
def test_a_frozen_norm_that_mixes_values_is_left(function: Callable[[Any, Tensor], Tensor]) -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3), Frozen(function)).eval()
    assert "does more than multiply and add" in fold_norms(model).left["1"]
    plain = nn.Sequential(nn.Conv2d(4, 4, 3), Frozen(lambda norm, x: norm.affine(x))).eval()
    assert fold_norms(plain).folded == {"1": "0"}


@torch.no_grad()
@pytest.mark.parametrize("register", ["register_module_forward_hook", "register_module_full_backward_hook"])
def test_hooks_of_all_modules_are_neither_called_nor_lost(register: str) -> None:
    model = randomized(nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU()))
    calls: list[str] = []
    hook = getattr(nn.modules.module, register)(lambda *given: calls.append("called"))
    try:
        assert fold_norms(model).left == {"1": "hooks for all modules are registered"}
        assert fuse_convolutions(model).left == {"0": "hooks for all modules are registered"}
    finally:
        hook.remove()
    assert not calls
    assert fold_norms(model).folded == {"1": "0"}


@torch.no_grad()
def test_a_trace_draws_no_random_numbers_of_the_program() -> None:
    class Drawing(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            torch.rand(3)
            return super().forward(x)  # type: ignore[no-any-return]

    model = randomized(Drawing(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)))
    before = torch.get_rng_state()
    fold_norms(model)
    assert torch.equal(torch.get_rng_state(), before)


@torch.no_grad()
def test_a_scripted_part_stays() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)).eval())
    model = nn.Sequential(scripted, nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)).eval()
    x = torch.randn(2, 4, 6, 6)
    expected = model(x)
    assert fold_norms(model).folded == {"2": "1"}
    fuse_convolutions(model)
    assert_same(model(x), expected)


@torch.no_grad()
def test_a_norm_of_another_dimension_is_another_path() -> None:
    model = randomized(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    fold_norms(model)
    with pytest.raises(OtherPathError, match=r"expected 2D input \(got 3D input\)"):
        model(torch.randn(2, 4, 4))


@torch.no_grad()
def test_a_path_that_changed_after_folding_is_not_fused() -> None:
    class Flagged(Wired):
        flag = False

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            return self.bn(F.relu(y) if self.flag else y)  # type: ignore[no-any-return]

    model = randomized(Flagged())
    fold_norms(model)
    model.flag = True  # type: ignore[assignment]
    assert fuse_convolutions(model).fused["conv"] == "bias"


def hiding() -> nn.Module:
    model = Wired()
    model.buffers = []  # type: ignore[method-assign, assignment]
    return model


def locked() -> nn.Module:
    model = Wired()
    model.lock = threading.Lock()  # type: ignore[assignment]
    return model


@pytest.mark.parametrize("fold", [fold_norms, fuse_convolutions])
@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (
            hiding,
            TypeError,
            "the attribute buffers of the model hides the method buffers of torch.nn.Module: rename it",
        ),
        (locked, TypeError, "Wired cannot be copied for its trace .TypeError: cannot pickle"),
        (lambda: nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d()), ValueError, "call the model once first"),
        (lambda: Wired().to("meta"), ValueError, "is on the meta device"),
        (lambda: "resnet50", TypeError, "got str"),
    ],
    ids=["hidden", "lock", "lazy", "meta", "str"],
)
def test_what_cannot_be_traced_is_said(
    fold: Callable[[Any], Any], build: Callable[[], Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        fold(build())


class Iterating(Wired):
    """Code that reads parameters without naming them."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn(self.conv(x))
        return y + sum(p.abs().sum() for p in self.conv.parameters())  # type: ignore[no-any-return]


@torch.no_grad()
def test_tensors_that_are_read_by_iterating_stay() -> None:
    model = randomized(Iterating())
    x = torch.randn(2, 4, 6, 6)
    expected = model(x)
    assert fold_norms(model).left == {"bn": "the tensors of conv are read by other code"}
    assert torch.equal(model(x), expected)


class Choosing(nn.Module):
    """A block whose argument may be left out: its caller's trace shows which choice is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
        y: Tensor = self.bn(self.conv(x))
        return y if shortcut is None else y + shortcut


class Caller(nn.Module):
    def __init__(self, ask: bool = False) -> None:
        super().__init__()
        self.first, self.second = Choosing(), Choosing()
        self.conv, self.bn = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.ask = ask

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(self.bn(self.conv(x))), x)  # type: ignore[no-any-return]


class Looking(Choosing):
    """torch.fx cannot trace through this block."""

    def forward(self, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
        if x.sum() > 0:
            return super().forward(x, shortcut)
        return super().forward(-x, shortcut)


@torch.no_grad()
def test_a_block_with_an_optional_argument_is_traced_within_its_caller() -> None:
    model = randomized(Caller())
    x = torch.randn(2, 4, 6, 6)
    expected = model(x)
    assert fold_norms(model).folded == {"first.bn": "first.conv", "second.bn": "second.conv", "bn": "conv"}
    assert_same(model(x), expected)


@torch.no_grad()
def test_such_a_block_does_not_keep_its_caller_from_being_traced() -> None:
    model = Caller()
    model.second = Looking()
    randomized(model)
    x = torch.randn(2, 4, 6, 6)
    expected = model(x)
    folding = fold_norms(model)
    assert "bn" in folding.folded
    assert "second.bn" in folding.left
    assert_same(model(x), expected)


@torch.no_grad()
def test_a_module_that_returns_its_input_may_stand_before_the_norm() -> None:
    between = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Identity(), nn.BatchNorm2d(4), nn.Identity(), nn.ReLU())
    model = randomized(between)
    x = torch.randn(2, 4, 6, 6)
    expected = model(x)
    assert fold_norms(model).folded == {"2": "0"}
    assert fuse_convolutions(model).fused == {"0": "bias, relu"}
    assert_same(model(x), expected)


def test_a_norm_that_is_training_is_left() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    assert "training mode" in fold_norms(model).left["1"]
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module, got str"):
        fold_norms("resnet50")  # type: ignore[arg-type]


class Bypassed(nn.Module):
    """A module that cannot be traced and does not call the forward of its submodule, which can be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.part = TwoNames()
        del self.part.again
        self.way = "forward"

    def forward(self, x: Tensor, unknown: Any = None) -> Tensor:
        if self.way == "convolution":
            return self.part.conv(x) + 1
        if self.way == "shape":
            return x.new_zeros(self.part.conv(x).shape)
        return self.part.bn(x) if self.way == "norm" else self.part(x)


@pytest.mark.parametrize("way", ["convolution", "shape", "norm"])
@torch.no_grad()
def test_a_call_past_the_trace_is_an_error_and_not_a_wrong_number(way: str) -> None:
    model = randomized(Bypassed())
    engine = Engine(model)
    assert engine.report.folded == {"part.bn": "part.conv"}
    x = torch.randn(1, 4, 5, 5)
    assert_same(engine(x), model(x))
    engine.model.way = way
    with pytest.raises((RuntimeError, TypeError), match=r"fold=False|unsupported operand"):
        engine(x)
    model.way = way
    assert torch.equal(Engine(model, fold=False)(x), model(x))


@torch.no_grad()
def test_an_untraceable_part_does_not_keep_the_rest_from_folding() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x) if x.sum() > 0 else -self.body(x)

    model = randomized(nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), Counting(), nn.BatchNorm2d(4)))
    engine = Engine(model)
    assert engine.report.folded == {"1": "0", "2.body.1": "2.body.0"}
    assert engine.report.left == {"3": "it follows 2, a Counting"}
    for x in (torch.rand(1, 4, 3, 3), -torch.rand(1, 4, 3, 3)):
        assert_same(engine(x), model(x))


class Asks(nn.Module):
    """Does more with a tensor than with anything else, as some forwards that take lists or tensors."""

    def __init__(self, question: Callable[[Any], bool], more: bool) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.question, self.more = question, more

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        y = (y * 2 if self.more else y) if self.question(y) else -y
        return self.norm(y).relu()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "question",
    [
        lambda y: isinstance(y, Tensor),
        lambda y: isinstance(y, (list, Tensor)) and not isinstance(y, nn.Parameter),
        torch.is_tensor,
        lambda y: torch.is_tensor(y),
    ],
)
@pytest.mark.parametrize("more", [True, False])
@torch.no_grad()
def test_a_forward_that_asks_for_a_tensor_is_traced_as_it_runs(question: Callable[[Any], bool], more: bool) -> None:
    model = randomized(Asks(question, more))
    x = torch.randn(2, 4, 5, 5)
    engine = Engine(model, fuse=True)
    assert not engine.report.folded
    assert "isinstance" not in globals()
    assert_same(engine(x), model(x))


@pytest.mark.parametrize("kinds", [list, (tuple, dict), nn.Parameter])
@torch.no_grad()
def test_a_forward_that_asks_for_something_else_is_folded(kinds: Any) -> None:
    model = randomized(Asks(lambda y: not isinstance(y, kinds), more=False))
    x = torch.randn(2, 4, 5, 5)
    engine = Engine(model)
    assert engine.report.folded == {"norm": "conv"}
    assert_same(engine(x), model(x))


class Takes(nn.Module):
    """Takes one image or two, and asks about sizes, as code for exporters does."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.other, self.norm = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x: Any) -> Tensor:
        if isinstance(x, Tensor):
            return self.norm(self.conv(x))  # type: ignore[no-any-return]
        height = x[0].shape[2]
        if isinstance(height, Tensor):
            return self.norm(self.conv(x[0]))  # type: ignore[no-any-return]
        return self.norm(self.conv(x[0]) + self.other(x[1]))  # type: ignore[no-any-return]


@torch.no_grad()
def test_only_results_of_layers_are_known_to_be_tensors() -> None:
    model = randomized(Takes())
    engine = Engine(model)
    x = torch.randn(2, 4, 5, 5)
    assert_same(engine([x, x + 1]), model([x, x + 1]))
    assert_same(engine(x), model(x))


@torch.no_grad()
def test_code_that_asks_whether_a_value_is_a_sequence_goes_on() -> None:
    """As the outputs of transformers do."""

    class Probes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(unprobed(self.conv(x)))  # type: ignore[no-any-return]

    model = randomized(Probes())
    expected = model(torch.ones(2, 4, 5, 5))
    assert fold_norms(model).folded == {"norm": "conv"}
    assert_same(model(torch.ones(2, 4, 5, 5)), expected)


def unprobed(value: Any) -> Any:
    if type(value) is Tensor or isinstance(value, torch.fx.Proxy):
        return value
    with pytest.raises(TypeError):
        iter(value)
    with pytest.raises(TypeError):
        len(value)
    return value


@torch.no_grad()
def test_what_stands_for_a_tensor_never_claims_to_be_one() -> None:
    """PyTorch's C++ code believes `__class__`: it took such an object for a tensor, and read foreign memory."""
    model = randomized(nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU()))
    fold_norms(model)
    sealed = model[0](torch.randn(2, 4, 5, 5))
    fuse_convolutions(model)
    promise = model[1](model[0](torch.randn(2, 4, 5, 5)))
    for stand_in in (sealed, promise):
        assert type(stand_in) is not Tensor
        assert not isinstance(stand_in, Tensor)


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
@torch.no_grad()
def test_folded_weights_keep_their_layout(kind: type[nn.Module]) -> None:
    model = randomized(nn.Sequential(kind(4, 6, 3), nn.BatchNorm2d(6))).to(memory_format=torch.channels_last)
    x = torch.randn(2, 4, 9, 9).to(memory_format=torch.channels_last)
    expected = model(x)
    fold_norms(model)
    assert model[0].folded.weight.is_contiguous(memory_format=torch.channels_last)  # type: ignore[index, union-attr]
    found = model(x)
    assert_same(found, expected)
    assert found.stride() == expected.stride()


@pytest.mark.parametrize("use", [lambda y: y * 2, lambda y: y + y, lambda y: -y, torch.relu, lambda y: y.relu()])
@torch.no_grad()
def test_any_other_use_of_a_folded_result_says_that_the_path_differs(use: Callable[[Any], Any]) -> None:
    class Turns(nn.Module):
        other = False

        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            return use(y) if Turns.other else self.norm(y)  # type: ignore[no-any-return]

    model = randomized(Turns())
    assert fold_norms(model).folded == {"norm": "conv"}
    Turns.other = True
    with pytest.raises(OtherPathError, match="takes another path through the model than the trace"):
        model(torch.randn(2, 4, 5, 5))


@torch.no_grad()
def test_norms_are_folded_only_into_the_given_kinds() -> None:
    model = randomized(nn.Sequential(nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(8, 3)))
    assert fold_norms(model, into=(nn.Conv2d,)).left == {"1": "it follows 0, a Conv1d"}


@torch.no_grad()
def test_a_split_norm_is_compiled_in_one_graph() -> None:
    model = randomized(nn.Sequential(nn.Conv2d(4, 4, 3), NormAct(4), nn.Conv2d(4, 4, 1)))
    x = torch.randn(2, 4, 6, 6)
    expected = model(x)
    fold_norms(model)
    assert_same(torch.compile(model, backend="aot_eager", fullgraph=True)(x), expected)


def test_a_trace_leaves_other_threads_alone() -> None:
    """torch.fx replaces methods of `nn.Module` for all threads while it traces."""
    other = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    x, expected = torch.ones(2, 4), other(torch.ones(2, 4))
    over, errors = threading.Event(), []

    def run() -> None:
        while not over.is_set():
            try:
                assert torch.equal(other(x), expected)
            except Exception as error:
                errors.append(error)

    def trace() -> None:
        try:
            blocks = (nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)) for _ in range(15))
            fold_norms(nn.Sequential(*blocks).eval())
        except Exception as error:
            errors.append(error)

    call = nn.Module.__call__
    threads = [threading.Thread(target=each) for each in (run, trace, trace, trace)]
    for thread in threads:
        thread.start()
    for thread in threads[1:]:
        thread.join()
    over.set()
    threads[0].join()
    assert not errors, errors[0]
    assert nn.Module.__call__ is call
