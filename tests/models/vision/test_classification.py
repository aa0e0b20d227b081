"""Each photograph gets the classes that the model finds most probable, in order, whatever the batches."""

from __future__ import annotations

import runpy
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from rooftop import models
from rooftop.errors import InputError, ModelRunError, TargetError, WeightsError
from rooftop.models import classify, images, load_classifier, load_images
from rooftop.models.images import Preprocessing
from rooftop.models.vision.classification import imagenet_classes

ROOT = Path(__file__).parents[3]
COLOURS = ("red", "green", "blue")
SMALL = Preprocessing(resize=8, crop=8)


class Colours(nn.Module):
    """Logits are weighted means of the channels: each of the first three classes k is the k-th colour of COLOURS."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.head = nn.Linear(3, classes)
        nn.init.zeros_(self.head.bias)
        nn.init.zeros_(self.head.weight)
        self.head.weight.data[:3] = torch.eye(3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:  # (B, 3, H, W)
        self.calls += 1
        return self.head(x.mean((2, 3)))


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    """Seven photographs in shades of blue, red and green, in the order of their names."""
    folder = tmp_path / "photographs"
    folder.mkdir()
    random = np.random.default_rng(0)
    for number, colour in enumerate(("blue", "red", "green", "green", "blue", "red", "blue")):
        pixels = random.integers(0, 100, (11 + number, 17, 3), dtype=np.uint8)
        pixels[..., COLOURS.index(colour)] += 100
        Image.fromarray(pixels).save(folder / f"{number}-{colour}.png")
    return folder


def test_the_names_are_torchvisions(torchvision_models: ModuleType) -> None:
    assert list(imagenet_classes()) == torchvision_models.ResNet50_Weights.DEFAULT.meta["categories"]
    assert len(imagenet_classes()) == 1000


def test_each_photograph_gets_its_own_classes_in_order(photographs: Path) -> None:
    later = photographs.parent / "a.png"  # sorts before the folder, but is passed after it
    Image.new("RGB", (9, 9), (0, 200, 0)).save(later)
    found = classify(Colours(), [photographs, later], preprocessing=SMALL, classes=COLOURS, batch_size=3)
    assert [photo.path for photo in found] == [*sorted(photographs.iterdir()), later]
    for photo in found[:-1]:
        assert photo.guesses[0].name == photo.path.stem.split("-")[1]
    assert found[-1].guesses[0].name == "green"


def test_probabilities_are_the_softmax_of_the_logits(photographs: Path) -> None:
    model = Colours()
    found = classify(model, [photographs], preprocessing=SMALL)
    expected = model(load_images([photographs], SMALL)).double().softmax(1)
    for photo, probabilities in zip(found, expected, strict=True):
        order = probabilities.argsort(descending=True).tolist()
        assert [guess.index for guess in photo.guesses] == order
        assert [guess.probability for guess in photo.guesses] == pytest.approx(probabilities[order].tolist(), rel=1e-5)
        assert [guess.name for guess in photo.guesses] == [None] * 3


def test_a_thousand_classes_have_imagenets_names(photographs: Path) -> None:
    (first, *_) = classify(Colours(1000), [photographs], preprocessing=SMALL)
    assert len(first.guesses) == 5
    assert (first.guesses[0].index, first.guesses[0].name) == (2, "great white shark")


@pytest.mark.parametrize(("top", "given"), [(1, 1), (3, 3), (99, 3)])
def test_at_most_top_classes(top: int, given: int, photographs: Path) -> None:
    (first, *_) = classify(Colours(), [photographs], preprocessing=SMALL, top=top)
    assert len(first.guesses) == given
    if given == 3:
        assert sum(guess.probability for guess in first.guesses) == pytest.approx(1)


def small_network() -> nn.Sequential:
    """A network that depends on the rest of its batch unless it is in evaluation mode."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(288, 7)
    )


@pytest.mark.parametrize("batch_size", [2, 3, 6, 7, 8])
def test_batches_make_no_difference(batch_size: int, photographs: Path) -> None:
    model = small_network()
    alone = [classify(model, [path], preprocessing=SMALL, top=7)[0] for path in sorted(photographs.iterdir())]
    together = classify(model, [photographs], preprocessing=SMALL, top=7, batch_size=batch_size)
    for one, same in zip(alone, together, strict=True):
        assert one.path == same.path
        assert [guess.index for guess in one.guesses] == [guess.index for guess in same.guesses]
        probabilities = [guess.probability for guess in same.guesses]
        assert [guess.probability for guess in one.guesses] == pytest.approx(probabilities, rel=1e-5)


def test_photographs_are_decoded_while_the_model_works(photographs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first batch ends only when the second is decoded, so working on one after the other would never end."""
    decoded, read = [], images.read_image
    fourth = threading.Event()

    def noted(path: Path) -> Image.Image:
        decoded.append(path)
        if len(decoded) == 4:
            fourth.set()
        return read(path)

    class Waits(Colours):
        def forward(self, x: Tensor) -> Tensor:
            assert fourth.wait(120), f"only {len(decoded)} decoded"
            return super().forward(x)

    monkeypatch.setattr(images, "read_image", noted)
    found = classify(Waits(), [photographs], preprocessing=SMALL, batch_size=2)
    assert [photo.path for photo in found] == sorted(photographs.iterdir())


def test_the_model_is_left_as_it_was(photographs: Path) -> None:
    model = small_network().train()
    model[1].eval()  # frozen statistics
    flags = [module.training for module in model.modules()]
    state = {key: value.clone() for key, value in model.state_dict().items()}
    classify(model, [photographs], preprocessing=SMALL)
    assert [module.training for module in model.modules()] == flags
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())
    with pytest.raises(RuntimeError):
        # images of a size that does not fit the head
        classify(model, [photographs], preprocessing=Preprocessing(resize=9, crop=9))
    assert [module.training for module in model.modules()] == flags


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_models_dtype_is_used(dtype: torch.dtype, photographs: Path) -> None:
    found = classify(Colours().to(dtype), [photographs], preprocessing=SMALL, top=1)
    expected = classify(Colours(), [photographs], preprocessing=SMALL, top=1)
    for a, b in zip(found, expected, strict=True):
        assert a.guesses[0].index == b.guesses[0].index
        assert a.guesses[0].probability == pytest.approx(b.guesses[0].probability, rel=1e-2)


def test_a_model_without_parameters(photographs: Path) -> None:
    means = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    found = classify(means, [photographs], preprocessing=SMALL, classes=COLOURS, top=1)
    assert [photo.guesses[0].name for photo in found] == [photo.path.stem.split("-")[1] for photo in found]


def test_one_damaged_photograph_among_good_ones_is_named(photographs: Path) -> None:
    model = Colours()
    good = sorted(photographs.iterdir())[4]
    half = photographs / "5-half.png"
    half.write_bytes(good.read_bytes()[:200])
    with pytest.raises(InputError, match=r"5-half\.png cannot be read"):
        classify(model, [photographs], preprocessing=SMALL, batch_size=2)
    half.write_text("no image")
    calls = model.calls
    with pytest.raises(InputError, match=r"5-half\.png is not an image"):
        classify(model, [photographs], preprocessing=SMALL, batch_size=2)
    assert model.calls == calls  # reported before any work
    whole = [path for path in sorted(photographs.iterdir()) if path != half]
    with pytest.warns(UserWarning, match=r"skipped: .*5-half\.png is not an image"):
        found = classify(model, [photographs], preprocessing=SMALL, batch_size=2, on_error="skip")
    assert found == classify(model, whole, preprocessing=SMALL, batch_size=2)
    fractions: list[float] = []
    (photographs / "9-last.png").write_text("no image")
    with pytest.warns(UserWarning, match="skipped"):
        classify(
            model, [photographs], preprocessing=SMALL, batch_size=2, on_error="skip",
            progress=lambda said, fraction: fractions.append(fraction),
        )  # fmt: skip
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1
    (photographs / "9-last.png").unlink()
    with pytest.raises(InputError, match="none of 1 photographs can be read"), pytest.warns(match="5-half"):
        classify(model, [half], preprocessing=SMALL, on_error="skip")
    with pytest.raises(InputError, match='"raise" or "skip"'):
        classify(model, [photographs], on_error="ignore")


def test_logits_that_are_not_finite_name_the_photograph(photographs: Path) -> None:
    model = Colours()
    model.head.weight.data[1, 1] = 1e30
    with pytest.raises(ModelRunError, match=r"output for .*0-blue\.png is not finite: its weights .* dtype"):
        classify(model.half(), [photographs], preprocessing=SMALL)

    class OnlyGreenFails(Colours):
        def forward(self, x: Tensor) -> Tensor:
            logits = super().forward(x)
            return logits.masked_fill(logits.argmax(1, keepdim=True) == 1, float("nan"))

    with pytest.raises(ModelRunError, match=r"output for .*2-green\.png is not finite"):
        classify(OnlyGreenFails(), [photographs], preprocessing=SMALL, batch_size=4)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (lambda x: x, r"gave shape \(7, 3, 8, 8\) for 7 photographs, expected logits \(B, classes\)"),
        (lambda x: x.mean((2, 3))[:1], r"gave shape \(1, 3\) for 7 photographs"),
        (lambda x: {"logits": x}, "gave dict for 7 photographs"),
    ],
)
def test_outputs_that_are_no_logits(output: Callable[[Tensor], object], message: str, photographs: Path) -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> object:
            return output(x)

    with pytest.raises(ModelRunError, match=message):
        classify(Net(), [photographs], preprocessing=SMALL)


def test_a_batch_that_does_not_fit_into_memory(photographs: Path) -> None:
    """PyTorch raises a RuntimeError if the CPU's memory is too small."""
    huge = type("Huge", (Colours,), {"forward": lambda self, x: x.new_empty(2**50)})()
    message = r"7 photographs at once do not fit into memory \(the CPU cannot allocate .*\); use a smaller batch"
    with pytest.raises(ModelRunError, match=message):
        classify(huge, [photographs], preprocessing=SMALL)


def test_wrong_calls(photographs: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="got 2 names of classes, but the model has 3 classes"):
        classify(Colours(), [photographs], preprocessing=SMALL, classes=("a", "b"))
    with pytest.raises(InputError, match="expected a list of the names of 3 classes, got the text 'abc'"):
        classify(Colours(), [photographs], preprocessing=SMALL, classes="abc")
    for options in ({"top": 1.5}, {"batch_size": "2"}):
        with pytest.raises(TypeError, match="expected top and batch_size to be ints, got"):
            classify(Colours(), [photographs], preprocessing=SMALL, **options)
    for options in ({"top": 0}, {"batch_size": 0}, {"batch_size": -1}):
        with pytest.raises(ValueError, match="expected top and batch_size of at least 1, got"):
            classify(Colours(), [photographs], preprocessing=SMALL, **options)
    with pytest.raises(InputError, match="does not exist"):
        classify(Colours(), [tmp_path / "missing.jpg"])


def test_progress_is_told_after_each_batch(photographs: Path) -> None:
    told: list[tuple[str, float]] = []
    classify(Colours(), [photographs], preprocessing=SMALL, batch_size=3, progress=lambda *step: told.append(step))
    assert [what for what, _ in told] == ["classified 3 of 7", "classified 6 of 7", "classified 7 of 7"]
    assert [fraction for _, fraction in told] == [3 / 7, 6 / 7, 1.0]


def test_a_classifier_has_the_classes_of_its_file(resnet18_file: Path) -> None:
    model, preprocessing = load_classifier("resnet18", resnet18_file)
    assert isinstance(model, models.ResNet)
    assert model.fc.out_features == 3
    assert not any(module.training for module in model.modules())
    assert preprocessing == Preprocessing()
    saved = torch.load(resnet18_file, weights_only=True)
    assert all(torch.equal(value, saved[key]) for key, value in model.state_dict().items())


def test_a_resnet_of_torchvision_finds_the_same(
    resnet18_file: Path, photographs: Path, torchvision_models: ModuleType
) -> None:
    ours, preprocessing = load_classifier("resnet18", str(resnet18_file))
    theirs = torchvision_models.resnet18(num_classes=3)
    theirs.load_state_dict(torch.load(resnet18_file, weights_only=True))
    transform = torchvision_models.ResNet18_Weights.DEFAULT.transforms()
    (found,) = classify(ours, [photographs / "1-red.png"], preprocessing=preprocessing)
    with Image.open(photographs / "1-red.png") as photo, torch.inference_mode():
        expected = theirs.eval()(transform(photo)[None])[0].softmax(0)
    assert [guess.probability for guess in found.guesses] == expected.sort(descending=True).values.tolist()


def test_classifiers_that_do_not_exist(resnet18_file: Path, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="did you mean resnet18"):
        load_classifier("resnet8", resnet18_file)
    with pytest.raises(WeightsError, match=r"does not fit the model.*fits resnet18\(num_classes=3\)"):
        load_classifier("resnet34", resnet18_file)
    torch.save({"fc.bias": torch.zeros(())}, tmp_path / "scalar.pth")
    with pytest.raises(WeightsError, match=r"fc\.bias \(file \(\), model \(1000,\)\)"):
        load_classifier("resnet18", tmp_path / "scalar.pth")


def test_the_example_makes_an_index(
    resnet18_file: Path, photographs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(photographs), "--model", "resnet18", "--weights", str(resnet18_file), "--at-least", "0"]
    script = str(ROOT / "examples" / "classify.py")
    monkeypatch.setattr(sys, "argv", [script, *words])
    runpy.run_path(script, run_name="__main__")
    names = ", ".join(str(path) for path in sorted(photographs.iterdir()))
    assert capsys.readouterr().out.splitlines() == [f"class {index}: {names}" for index in range(3)]
