"""Classification: digits and folders of images, held-out parts, and files that `rooftop classify` accepts."""

from __future__ import annotations

import io
import json
import tarfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from rooftop.cli import train_task
from rooftop.cli.main import main
from rooftop.data.device_images import DecodingChoice, DeviceImages
from rooftop.data.samples import sample
from rooftop.errors import InputError
from rooftop.media.images import ImageDecoder
from rooftop.models import load
from rooftop.models.images import preprocess, read_image
from rooftop.models.weights.files import preprocessing_of
from rooftop.train.fitting import fit
from rooftop.train.fitting.exports import export_weights
from rooftop.train.recipes import Recipe, prepare_model
from rooftop.train.reports.terminal import Terminal
from rooftop.train.stopping import Stop
from rooftop.train.tasks import Task, classification, find_task
from rooftop.train.tasks.classification import accuracies, cross_entropy, held_out

load_file = pytest.importorskip("safetensors.torch").load_file
SMALL: dict[str, dict[str, Any]] = {
    "resnet": {"channels": 8},
    "swin": {"embed_dim": 12, "depths": [1, 1], "num_heads": [2, 4]},
    "hybrid": {"channels": 8, "depths": [1, 1, 1, 1], "num_heads": [2, 4]},
}
COLOURS = {"blue": (30, 40, 220), "red": (220, 40, 30)}


def built(name: str, data: str | None, *values: str, **options: Any) -> tuple[Task, Recipe]:
    build, defaults = find_task(name, data)
    recipe = Recipe.of(defaults).updated({"model": {"options": options}, "loading": {"how": "here"}})
    recipe = recipe.with_values(values)
    torch.manual_seed(0)
    return build(data, recipe), recipe


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twenty noisy pictures of each colour."""
    chance = np.random.default_rng(0)
    for name, colour in COLOURS.items():
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for number in range(20):
            pixels = np.clip(np.array(colour) + chance.normal(0, 20, (24, 32, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "pictures" / name / f"{number}.png")
    return tmp_path / "pictures"


@pytest.mark.parametrize("name", SMALL)
def test_each_network_learns_digits(name: str) -> None:
    pytest.importorskip("sklearn")
    task, _ = built(name, "digits", **SMALL[name])
    assert task.prepare is not None
    batch = task.prepare(task.collate([task.train[number] for number in range(32)]))
    optimizer = torch.optim.AdamW(task.model.parameters(), 0.01)
    losses = []
    for _ in range(30):
        losses.append(task.loss(task.model, batch))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0]
    pictures = task.examples(task.model.eval(), torch.device("cpu"))  # type: ignore[misc]
    assert len(pictures) == 12
    assert all("%" in caption for caption, _ in pictures)


def test_digits_of_training_are_shifted_and_held_out_ones_are_not() -> None:
    pytest.importorskip("sklearn")
    task, _ = built("resnet", None, **SMALL["resnet"])
    assert task.valid is not None
    assert (len(task.train), len(task.valid)) == (1500, 297)
    seen = [sample(task.train, 3, 0, epoch)[0].values for epoch in range(8)]
    assert torch.equal(seen[0], sample(task.train, 3, 0, 0)[0].values)
    assert any(not torch.equal(seen[0], other) for other in seen[1:])
    assert torch.equal(sample(task.valid, 3, 0, 0)[0].values, sample(task.valid, 3, 0, 1)[0].values)


@given(st.lists(st.integers(0, 4), min_size=8, max_size=60))
@settings(max_examples=20, deadline=None)
def test_a_tenth_of_each_class_is_held_out(labels: list[int]) -> None:
    train, valid = held_out(labels)
    assert sorted((*train, *valid)) == list(range(len(labels)))
    counts, out = Counter(labels), Counter(labels[number] for number in valid)
    assert out == {label: max(1, count // 10) for label, count in counts.items()}
    assert (train, valid) == held_out(labels)


def test_a_folder_of_classes_becomes_a_file_that_classify_takes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("safetensors")
    task, recipe = built("resnet", str(folder), "run.epochs=4", "run.batch=9", "optimizer.lr=0.05", channels=8)
    assert task.valid is not None
    assert (len(task.train), len(task.valid)) == (36, 4)
    fitted = fit(task, recipe, device="cpu")
    assert fitted.last is not None
    assert fitted.last.values["accuracy"] == 1.0
    weights = folder.parent / "best.safetensors"
    export_weights(weights, task.model, task.metadata)
    words = ["--weights", str(weights), "--json", "-", "--device", "cpu"]
    assert main(["classify", str(folder / "red" / "0.png"), *words]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["model"] == "resnet18"
    assert said["photographs"][0]["classes"][0]["name"] == "red"
    assert load("resnet18", weights).fc.out_features == 2  # type: ignore[union-attr]
    assert main(["classify", str(folder / "red"), "--weights", str(weights), "--model", "resnet50"]) == 2
    assert "has weights of resnet18, got the model resnet50" in capsys.readouterr().err


def test_a_photograph_goes_into_the_model_as_in_validation(folder: Path) -> None:
    from rooftop.models.weights.trained_files import trained_file

    pytest.importorskip("safetensors")
    task, _ = built("resnet", str(folder), channels=8)
    weights = folder.parent / "best.safetensors"
    export_weights(weights, task.model, task.metadata)
    preprocessing = preprocessing_of("resnet18", weights)
    samples: Any = task.valid
    path = samples.name(0)
    assert task.prepare is not None
    (seen, _) = task.prepare(task.collate([samples[0]]))
    torch.testing.assert_close(preprocess(read_image(path), preprocessing), seen[0], rtol=0, atol=1e-6)
    found = trained_file(weights)
    assert found is not None
    assert found.classes == ("blue", "red")


@pytest.mark.parametrize("name", ["resnet", "swin", "hybrid"])
def test_a_model_trained_on_small_images_is_tested_on_larger_ones(name: str, folder: Path, tmp_path: Path) -> None:
    """As in FixRes, the last evaluation uses larger images, and `classify` prepares photographs in the same way."""
    values = ["augment.size=16", "augment.test_size=24", "run.steps=2", "run.batch=4", "loading.how=here"]
    task, recipe = built(name, str(folder), *values, **SMALL[name])
    sides: list[tuple[bool, int]] = []
    task.model.register_forward_pre_hook(lambda model, args: sides.append((model.training, args[0].shape[-1])))
    done = fit(task, recipe, device="cpu", out=tmp_path / "run")
    assert set(sides) == {(True, 16), (False, 24)}
    assert done.last is not None
    assert 0 <= done.last.values["accuracy"] <= 1
    preprocessing = preprocessing_of(task.metadata["model"], tmp_path / "run" / "last.safetensors")
    assert preprocessing.crop == 24


def test_train_and_val_have_the_same_classes(folder: Path) -> None:
    (folder / "train").mkdir()
    for name in COLOURS:
        (folder / name).rename(folder / "train" / name)
    with pytest.raises(InputError, match=r"has train/ but no val/"):
        built("resnet", str(folder), channels=8)
    (folder / "val" / "red").mkdir(parents=True)
    (folder / "train" / "red" / "0.png").rename(folder / "val" / "red" / "0.png")
    with pytest.raises(InputError, match="have different classes: only one of them has blue"):
        built("resnet", str(folder), channels=8)
    (folder / "val" / "blue").mkdir(parents=True)
    (folder / "train" / "blue" / "0.png").rename(folder / "val" / "blue" / "0.png")
    task, _ = built("resnet", str(folder), channels=8)
    assert task.valid is not None
    assert (len(task.train), len(task.valid)) == (38, 2)


def sharded(folder: Path, to: Path, parts: dict[str, range]) -> Path:
    """The pictures of `folder` in tar files, one for each part; the numbers of its pictures of each colour."""
    for part, numbers in parts.items():
        (to / part).mkdir(parents=True, exist_ok=True)
        with tarfile.open(to / part / "0.tar", "w") as tar:
            for number in numbers:
                for label, name in enumerate(COLOURS):
                    content = (folder / name / f"{number}.png").read_bytes()
                    for ending, value in (("png", content), ("cls", str(label).encode())):
                        member = tarfile.TarInfo(f"{name}-{number}.{ending}")
                        member.size = len(value)
                        tar.addfile(member, io.BytesIO(value))
    return to


@pytest.mark.parametrize("parts", [{"": range(20)}, {"train": range(18), "val": range(18, 20)}])
def test_tar_files_train_as_folders_do(
    folder: Path, tmp_path: Path, parts: dict[str, range], capsys: pytest.CaptureFixture[str]
) -> None:
    """The command trains, validates and exports a model with the names of classes.txt."""
    data = sharded(folder, tmp_path / "shards", parts)
    (data / "classes.txt").write_text("\n".join(COLOURS))
    words = ["--set", "run.epochs=3", "--set", "run.batch=9", "--set", "optimizer.lr=0.05", "--device", "cpu"]
    words += ["--set", "model.options={channels=8}", "--set", "loading.how=here", "--no-page"]
    out = tmp_path / "run"
    assert main(["train", "resnet", "--data", str(data), "--out", str(out), *words]) == 0
    said = capsys.readouterr().out
    assert "36 images, 4 held out" in said
    assert "best accuracy 1 at" in said
    words = ["--weights", str(out / "best.safetensors"), "--json", "-", "--device", "cpu"]
    assert main(["classify", str(folder / "red" / "0.png"), *words]) == 0
    assert json.loads(capsys.readouterr().out)["photographs"][0]["classes"][0]["name"] == "red"


def test_tar_files_that_do_not_fit(folder: Path, tmp_path: Path) -> None:
    data = sharded(folder, tmp_path / "shards", {"": range(3)})
    (data / "classes.txt").write_text("blue\nblue\n")
    with pytest.raises(InputError, match=r"classes.txt has the name blue several times"):
        built("resnet", str(data), channels=8)
    (data / "classes.txt").write_text("blue\n")
    with pytest.raises(InputError, match=r"classes.txt has 1 names, but the data have 2 classes"):
        built("resnet", str(data), channels=8)
    (data / "classes.txt").unlink()
    task, _ = built("resnet", str(data), channels=8)
    assert task.metadata["classes"] == ["0", "1"]
    with tarfile.open(data / "1.tar", "w") as tar:
        for ending, value in (("png", (folder / "red" / "0.png").read_bytes()), ("cls", b"red")):
            member = tarfile.TarInfo(f"more.{ending}")
            member.size = len(value)
            tar.addfile(member, io.BytesIO(value))
    task, _ = built("resnet", str(data), channels=8)  # a damaged sample: a training stops at it, or skips it
    assert task.valid is not None
    with pytest.raises(InputError, match=r"more.cls cannot be read: invalid literal"):
        [samples[number] for samples in (task.train, task.valid) for number in range(len(samples))]


def test_a_class_of_one_image_is_an_error_with_a_remedy(folder: Path) -> None:
    for name in COLOURS:
        for number in range(1, 20):
            (folder / name / f"{number}.png").unlink()
    with pytest.raises(InputError, match=r"one image for each class, and one for each class is held out: expected at"):
        built("resnet", str(folder), channels=8)


def test_damaged_images_are_skipped_wherever_they_are(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two images are damaged: the first one, whose size the task reads, and one that reports show as an example."""
    labels = [label for label in range(2) for _ in range(20)]
    _, out = held_out(labels)
    every = sorted(str(path) for path in folder.rglob("*.png"))
    for path in {every[0], every[out[0]]}:
        Path(path).write_bytes(b"no image")
    words = ["--set", "run.epochs=1", "--set", "run.batch=9", "--set", "model.options={channels=8}", "--device", "cpu"]
    words += ["--set", "loading.how=here", "--data", str(folder)]
    first, second = (str(folder.parent / name) for name in ("first", "second"))
    assert main(["train", "resnet", "--out", first, *words]) != 0
    assert "is not an image that Pillow can read" in capsys.readouterr().err
    assert main(["train", "resnet", "--out", second, "--set", "faults.damaged=skip", *words]) == 0
    said = capsys.readouterr()
    assert "was skipped" in said.out + said.err
    for path in folder.rglob("*.png"):
        path.write_bytes(b"no image")
    with pytest.raises(InputError, match=r"the first 40 images cannot be read, e.g. .*is not an image"):
        built("resnet", str(folder), channels=8)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (("model.name=alexnet",), "'alexnet' is neither a built-in model .*resnet18"),
        (("model.num_classes=3",), "model.num_classes is 3, but the data have 10 classes"),
        (("model.options={depth=3}",), "resnet18 cannot be built with model.options .*depth"),
    ],
)
def test_a_recipe_that_does_not_fit(values: tuple[str, ...], problem: str) -> None:
    pytest.importorskip("sklearn")
    with pytest.raises((InputError, ValueError), match=problem):
        built("resnet", None, *values)


def test_no_such_folder() -> None:
    with pytest.raises(InputError, match="--data nowhere is not a folder: expected digits, a folder with train/"):
        built("resnet", "nowhere")


def test_fine_tuning_begins_with_the_weights_of_a_file(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("safetensors")
    first, _ = built("resnet", None, channels=8)
    export_weights(tmp_path / "first.safetensors", first.model, first.metadata)
    weights = f"model.weights={tmp_path / 'first.safetensors'}"
    second, recipe = built("resnet", None, weights, "model.num_classes=12", channels=8)
    assert prepare_model(second, recipe)[0].endswith("new for 12 classes: fc.weight, fc.bias")
    ours, theirs = first.model.state_dict(), second.model.state_dict()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours if not key.startswith("fc."))
    assert theirs["fc.bias"].shape == (12,)
    assert second.metadata["classes"][9:] == ["9", "class 10", "class 11"]


def test_labels_are_smoothed_in_training_only_and_targets_may_be_mixed() -> None:
    model, images, labels = torch.nn.Linear(3, 4), torch.randn(5, 3), torch.tensor([0, 1, 2, 3, 0])
    plain = torch.nn.functional.cross_entropy(model(images), labels)
    assert not torch.equal(cross_entropy(model.train(), (images, labels), 0.3), plain)
    assert torch.equal(cross_entropy(model.eval(), (images, labels), 0.3), plain)
    targets = torch.nn.functional.one_hot(labels, 4).float()
    torch.testing.assert_close(cross_entropy(model, (images, targets)), plain)


def test_accuracy_and_the_best_five() -> None:
    logits = torch.eye(12)
    labels = torch.arange(12).roll(1)
    found = accuracies(torch.nn.Identity(), (logits, labels), top=5)
    assert found["accuracy"].tolist() == [0.0] * 12
    assert found["top5"].shape == (12,)
    assert accuracies(torch.nn.Identity(), (logits, torch.arange(12)), top=5)["top5"].mean() == 1


class PillowsDecoder(ImageDecoder):
    """A stand-in for a GPU's decoder."""

    def __init__(self, device: torch.device) -> None:
        super().__init__("cpu")


def test_the_faster_decoding_is_measured_once_and_kept(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that is resumed decodes as it began, so its weights have the bits of a run that was not stopped."""
    choices = iter([DecodingChoice("gpu", "2 images/s by the GPU, 1 by the CPU")] * 2)
    monkeypatch.setattr(classification, "faster_decoding", lambda *args, **options: next(choices))
    monkeypatch.setattr(classification, "DeviceImages", partial(DeviceImages, decoder_of=PillowsDecoder))
    words = ["train", "resnet", "--data", str(folder), "--device", "cpu", "--no-page", "--set", "run.batch=8"]
    words += ["--set", "model.options={channels=4}", "--set", "augment.size=16", "--set", "loading.how='threads'"]
    begin = [*words, "--set", "augment.decode='auto'", "--set", "run.steps=6"]
    assert main([*begin, "--out", str(tmp_path / "whole")]) == 0
    assert "images are decoded by the GPU: 2 images/s by the GPU, 1 by the CPU\n" in capsys.readouterr().out

    stops = Stop()

    class Stops(Terminal):
        def stepped(self, records: list[Any]) -> None:
            stops.requested = records[-1].step == 2

    with monkeypatch.context() as patched:
        patched.setattr(train_task, "Terminal", Stops)
        patched.setattr(train_task, "fit", partial(fit, stop=stops))
        main([*begin, "--out", str(tmp_path / "stopped")])
    assert 'decode = "gpu"' in (tmp_path / "stopped" / "recipe.toml").read_text()
    assert not (tmp_path / "stopped" / "last.safetensors").exists()
    resume = [*words[:4], "--device", "cpu", "--no-page", "--out", str(tmp_path / "stopped"), "--resume"]
    assert main(resume) == 0  # `choices` has nothing left to measure
    assert next(choices, None) is None
    found, expected = (load_file(tmp_path / name / "last.safetensors") for name in ("stopped", "whole"))
    assert all(torch.equal(found[key], value) for key, value in expected.items())


def test_on_a_cpu_nothing_is_measured(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "resnet", "--data", str(folder), "--device", "cpu", "--no-page", "--set", "run.steps=1"]
    words += ["--set", "model.options={channels=4}", "--set", "augment.size=16", "--set", "run.batch=4"]
    assert main([*words, "--out", str(tmp_path / "auto"), "--set", "augment.decode='auto'"]) == 0
    assert "images are decoded by the CPU: the training runs on the CPU\n" in capsys.readouterr().out
    assert main([*words, "--out", str(tmp_path / "gpu"), "--set", "augment.decode='gpu'"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "augment.decode=gpu needs a GPU, but the training runs on cpu: use augment.decode=cpu" in err
    auto = [*words, "--out", str(tmp_path / "ablation"), "--set", "augment.decode='auto'", "--ablate", "augment.flip"]
    assert main(auto) == 2
    assert "expected augment.decode cpu or gpu" in capsys.readouterr().err
