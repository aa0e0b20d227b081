"""Image classification: shared code of the tasks for ResNets, Swin Transformers and hybrids.

--data is one of

    digits       scikit-learn's 1797 handwritten digits, 8 x 8 pixels
    a folder     with train/ and val/, each with one subfolder of images per class
    a folder     with one subfolder of images per class; a tenth of each class is held out
    a folder     of tar files in webdataset's layout, or with such tar files in train/ and val/; classes.txt in the
                 folder has one class name per line

The first image determines the default size of all images. If its shorter side has at most `SMALL` pixels, all images
are cropped to squares of this side, and the model has a stem for small images. Otherwise all images are cropped to
224 x 224.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import default_collate

from rooftop.data import ImageFolder, ImageTransform, Part, TarShards
from rooftop.data.device_images import DecodingChoice, DeviceImages, EncodedImages, encoded_batch, faster_decoding
from rooftop.data.image_transforms import MARGIN
from rooftop.data.pixels import Normalizer, Pixels
from rooftop.data.samples import DAMAGE, Samples
from rooftop.data.tar_shards import UNREADABLE
from rooftop.doctor.extras import Extra
from rooftop.errors import InputError
from rooftop.models import builtin_models
from rooftop.models.images import MEAN, STD, Preprocessing
from rooftop.models.registry import model_entry
from rooftop.models.vision.classification import guessed
from rooftop.models.weights.trained_files import plain_preprocessing
from rooftop.train.recipes import Recipe, mixer
from rooftop.train.tasks.finding import Values, over
from rooftop.train.tasks.generated.digits import SCIKIT_LEARN, TRAINED_ON, digits
from rooftop.train.tasks.task import Task
from rooftop.user_paths import user_path

Data = TypeVar("Data", ImageFolder, TarShards)

DIGITS = "digits"
SMALL = 64  # if the shorter side of the first image has at most this many pixels, all images are cropped to that side
USUAL_SIZE = 224
DIGIT_SIZE = 8
HELD_OUT = 10  # if the folder has no train/ and val/, one in this many images of each class is held out, at least one
TRIED = 100  # number of images to try for the usual size, because damaged images may be skipped
SHOWN = 12  # number of examples on the page
SHOWN_SIDE = 192  # minimum length of the sides of an example, in pixels
TOP = 5

GPU: Values = {"run": {"precision": "bf16", "channels_last": True}, "augment": {"rand_augment_on": "gpu"}}
"""Recipe values for any image network on a GPU."""


@dataclass(frozen=True)
class Family:
    """A family of models that a task trains, with the defaults of its recipe.

    Attributes:
        usual: name of the default model for photographs.
        small: name of the default model for small images.
        small_options: builder options for small images.
        off: builder options that switch off regularization which is on by default in the builder but not in the recipe.
        digits, folders: recipe values for digits and for folders of images.
        gpu: values that override `digits` and `folders` on a GPU.
        folders_on_gpu: values that override `folders` and `gpu` for folders on a GPU.
    """

    usual: str
    small: str
    small_options: Mapping[str, Any]
    off: Mapping[str, Any]
    digits: Values
    folders: Values
    gpu: Values
    folders_on_gpu: Values

    def defaults(self, data: str | None, cuda: bool) -> Values:
        """The recipe values that the task uses by default, for training on the CPU or (`cuda`) on a GPU."""
        if data in (None, DIGITS):
            return over(self.digits, self.gpu) if cuda else self.digits
        return over(over(self.folders, self.gpu), self.folders_on_gpu) if cuda else self.folders


def needed_packages(data: str | None) -> list[Extra]:
    """The optional packages that the data need."""
    return [SCIKIT_LEARN] if data in (None, DIGITS) else []


def classification(data: str | None, recipe: Recipe, family: Family) -> Task:
    """Build the task of training a family of models on digits or on a folder of images.

    Raises:
        InputError: the folder does not exist, there is only one class, or the recipe does not fit the model.
        TargetError: there is no such model.
        MissingExtraError: the data are digits, but scikit-learn is not installed.
    """
    found = _digits(recipe) if data in (None, DIGITS) else _folder(user_path(str(data)), recipe)
    model, told = _model(recipe, family, found)
    alter = mixer(recipe.mix, told["options"]["num_classes"]) if recipe.mix.mixup or recipe.mix.cutmix else None
    return Task(
        model=model,
        train=found.train,
        valid=found.valid,
        loss=partial(cross_entropy, label_smoothing=recipe.mix.label_smoothing),
        metrics=partial(accuracies, top=TOP if len(found.classes) > 2 * TOP else 0),
        best="accuracy",
        maximize=True,
        collate_train=None if found.arrive is None else encoded_batch,
        arrive=found.arrive,
        decoding=found.decoding,
        prepare=partial(_normalized, Normalizer(MEAN, STD, channels_last=recipe.run.channels_last)),
        alter=alter,
        examples=partial(_examples, found),
        metadata=told,
        unit="images",
    )


def cross_entropy(model: nn.Module, batch: Sequence[Tensor], label_smoothing: float = 0.0) -> Tensor:
    """Compute the cross entropy of images (N, 3, H, W) and labels (N,), or targets (N, classes) of mixed images.

    Labels are smoothed in training, but not in evaluation.
    """
    images, targets = batch
    smoothing = label_smoothing if model.training else 0.0
    return F.cross_entropy(model(images).float(), targets, label_smoothing=smoothing)


def _normalized(normalizer: Normalizer, batch: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Normalize the images of a batch (images, labels)."""
    pixels, labels = batch
    return normalizer(pixels), labels


def accuracies(model: nn.Module, batch: Sequence[Tensor], top: int = 0) -> dict[str, Tensor]:
    """Whether each image's true class is the most probable class; with `top`, also whether the true class is among the
    `top` most probable classes."""
    images, labels = batch
    logits = model(images)
    found = {"accuracy": (logits.argmax(1) == labels).float()}
    if top:
        found[f"top{top}"] = (logits.topk(top, 1).indices == labels[:, None]).any(1).float()
    return found


# ---- data ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Images:
    """Training images and held-out images.

    Attributes:
        classes: names of the classes.
        size: side of a training image in pixels.
        preprocessing: preprocessing of photographs as in validation.
        arrive: decodes the training images on a GPU; None: the CPU decodes.
        decoding: how images are decoded, as in `Task`.
    """

    train: Samples
    valid: Samples
    classes: tuple[str, ...]
    size: int
    preprocessing: Preprocessing
    arrive: DeviceImages | None = None
    decoding: Callable[[torch.device], DecodingChoice] | None = None


class DigitImages:
    """Scikit-learn's digits as images of three channels, with their classes.

    Args:
        numbers: indices of scikit-learn's digits.
        transform: transforms an image, uint8 (3, 8, 8).
    """

    def __init__(self, numbers: slice, transform: ImageTransform) -> None:
        images, labels = digits()
        self.images = (images[numbers] * 255).round().to(torch.uint8)
        self.labels = labels[numbers].tolist()
        self.transform = transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor | Pixels, int]:
        return self._made(index, None)

    def draw(self, index: int, generator: np.random.Generator) -> tuple[Tensor | Pixels, int]:
        return self._made(index, generator)

    def _made(self, index: int, generator: np.random.Generator | None) -> tuple[Tensor | Pixels, int]:
        image = self.images[index].expand(3, -1, -1)
        return self.transform(image, generator), self.labels[index]


def held_out(labels: Sequence[int]) -> tuple[list[int], list[int]]:
    """Indices of the training samples and of the held-out samples: a tenth of each class, at least one.

    The indices do not depend on the recipe's seed. So runs with any seed are evaluated on the same images, and no run
    trains on them.
    """
    order = np.random.default_rng(0).permutation(len(labels)).tolist()
    of_class: dict[int, list[int]] = {}
    for number in order:
        of_class.setdefault(labels[number], []).append(number)
    out = {number for those in of_class.values() for number in those[: max(1, len(those) // HELD_OUT)]}
    return [number for number in range(len(labels)) if number not in out], sorted(out)


def _digits(recipe: Recipe) -> _Images:
    transforms = _transforms(recipe, DIGIT_SIZE)
    train, valid = DigitImages(slice(TRAINED_ON), transforms[0]), DigitImages(slice(TRAINED_ON, None), transforms[1])
    return _Images(train, valid, tuple(map(str, range(10))), transforms[0].size, _preprocessing(transforms[1]))


def _folder(folder: Path, recipe: Recipe) -> _Images:
    if not folder.is_dir():
        raise InputError(
            f"--data {folder} is not a folder: expected digits, a folder with train/ and val/, or a folder with one "
            "subfolder of images per class or with tar files"
        )
    parted = (folder / "train").is_dir()
    roots = (folder / "train", folder / "val") if parted else (folder, folder)
    if parted and not roots[1].is_dir():
        raise InputError(f"{folder} has train/ but no val/: call the folder of held-out images val")
    of_kind = _of_shards if any(roots[0].glob("*.tar")) else _of_folders
    return of_kind(folder, roots, recipe)


def _of_folders(folder: Path, roots: tuple[Path, Path], recipe: Recipe) -> _Images:
    (images, valid), transforms = _with_transforms(ImageFolder, roots, recipe)
    on_gpu = recipe.augment.decode == "gpu"
    train = EncodedImages(images, recipe.augment.gpu_share) if on_gpu else images
    if len(train.classes) < 2:
        raise InputError(f"{roots[0]} has one class, {train.classes[0]}: expected one subfolder of images per class")
    if tuple(train.classes) != tuple(valid.classes):
        differing = sorted(set(train.classes) ^ set(valid.classes))
        raise InputError(
            f"{roots[0]} and {roots[1]} have different classes: only one of them has {', '.join(differing[:5])}"
        )
    parts: tuple[Samples, Samples] = (train, valid)
    if roots[0] == roots[1]:
        parts = _parts(folder, train, valid, train.labels)
    loading = recipe.loading
    decoding = partial(faster_decoding, images, recipe.run.batch, how=loading.how, workers=loading.workers)
    arrive = DeviceImages(transforms[0]) if on_gpu else None
    return _Images(*parts, tuple(train.classes), transforms[0].size, _preprocessing(transforms[1]), arrive, decoding)


def _with_transforms(
    kind: type[Data], roots: tuple[Path, Path], recipe: Recipe
) -> tuple[tuple[Data, Data], tuple[ImageTransform, ImageTransform]]:
    """Open the training data and the validation data from the folders `roots`, and create the image transforms of both.
    If both are the same folder, its files are listed only once."""
    train = kind(roots[0])
    valid = copy.copy(train) if roots[0] == roots[1] else kind(roots[1])
    transforms = _transforms(recipe, _usual_size(train))
    train.transform, valid.transform = transforms
    return (train, valid), transforms


def _of_shards(folder: Path, roots: tuple[Path, Path], recipe: Recipe) -> _Images:
    (train, valid), transforms = _with_transforms(TarShards, roots, recipe)
    labels = train.labels()
    count = max(chain(labels, valid.labels() if roots[0] != roots[1] else ())) + 1
    if min(labels) < UNREADABLE or count < 2:
        raise InputError(f"{roots[0]} has classes from {min(labels)} to {max(labels)}: expected 0, 1 and so on")
    parts = (train, valid) if roots[0] != roots[1] else _parts(folder, train, valid, labels)
    return _Images(*parts, _class_names(folder, count), transforms[0].size, _preprocessing(transforms[1]))


def _class_names(folder: Path, count: int) -> tuple[str, ...]:
    """Read the class names from classes.txt; without this file, the names are the class numbers."""
    file = folder / "classes.txt"
    if not file.is_file():
        return tuple(map(str, range(count)))
    names = tuple(line.strip() for line in file.read_text("utf-8").splitlines() if line.strip())
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"{file} has the name {twice} several times: expected a different name for each class")
    if len(names) < count:
        raise InputError(f"{file} has {len(names)} names, but the data have {count} classes")
    return names


def _parts(folder: Path, train: Samples, valid: Samples, labels: Sequence[int]) -> tuple[Samples, Samples]:
    """Take the training samples from `train`, and the held-out samples from `valid`.

    Both data sets, `train` and `valid`, contain all samples, with different transforms.
    """
    trained, out = held_out(labels)
    if not trained:
        raise InputError(
            f"{folder} has one image for each class, and one for each class is held out: expected at least two, or "
            "the folders train/ and val/"
        )
    return Part(train, trained), Part(valid, out)


def _usual_size(images: Samples) -> int:
    """The side to which images are cropped: the side of the first readable image if it is small, or else 224.

    Raises:
        InputError: none of the first `TRIED` images can be read.
    """
    problem: Exception | None = None
    for index in range(min(TRIED, len(images))):
        try:
            shorter: int = min(images[index][0].shape[1:])  # (3, H, W)
            return shorter if shorter <= SMALL else USUAL_SIZE
        except DAMAGE as error:
            problem = problem or error
    raise InputError(f"the first {min(TRIED, len(images))} images cannot be read, e.g. {problem}")


def _transforms(recipe: Recipe, usual: int) -> tuple[ImageTransform, ImageTransform]:
    """Create the transforms for training and for validation."""
    size = recipe.augment.size or usual
    return (
        ImageTransform(size, recipe.augment, train=True, normalize=False),
        ImageTransform(recipe.augment.test_size or size, recipe.augment, train=False, normalize=False),
    )


def _preprocessing(transform: ImageTransform) -> Preprocessing:
    """The preprocessing with which `rooftop classify` prepares photographs, the same as in validation."""
    margin = MARGIN if transform.augment.crop < 1 else 1.0
    return Preprocessing(round(transform.size * margin), transform.size)


# ---- the model -------------------------------------------------------------------------------------------------


def _model(recipe: Recipe, family: Family, found: _Images) -> tuple[nn.Module, dict[str, Any]]:
    """Build the model, and the metadata of its exported weights."""
    chosen, small = recipe.model, found.size <= SMALL
    name = chosen.name or (family.small if small else family.usual)
    entry = model_entry(name) if ":" not in name else None
    if entry is None or not entry.classifies:
        raise InputError(f"model.name is {name!r}: expected {', '.join(builtin_models())}")
    classes = chosen.num_classes or len(found.classes)
    if classes < len(found.classes):
        raise InputError(f"model.num_classes is {classes}, but the data have {len(found.classes)} classes")
    options = {**(family.small_options if small else {}), **family.off, **chosen.options}
    options["num_classes"] = classes
    try:
        model = entry.build(**options)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name} cannot be built with model.options {dict(chosen.options)}: {error}") from error
    names = [*found.classes, *(f"class {number}" for number in range(len(found.classes), classes))]
    told = {
        "model": name,
        "options": {option: list(value) if isinstance(value, tuple) else value for option, value in options.items()},
        "classes": names,
        "preprocessing": plain_preprocessing(found.preprocessing),
    }
    return model, told


# ---- pictures --------------------------------------------------------------------------------------------------


def _examples(found: _Images, model: nn.Module, device: torch.device) -> list[tuple[str, Image.Image]]:
    """Draw some held-out images with the model's predictions."""
    count = min(SHOWN, len(found.valid))
    numbers, samples, labels = [], [], []
    for number in (place * len(found.valid) // count for place in range(count)):
        with suppress(*DAMAGE):  # the evaluation has already reported a damaged image
            image, label = found.valid[number]
            numbers.append(number)
            samples.append(image)
            labels.append(label)
    if not samples:
        return []
    images = Normalizer(MEAN, STD)(default_collate(samples))
    guesses = guessed(model, images.to(device), numbers, None, 1, "images")
    shown = []
    for image, label, (guess, *_) in zip(images, labels, guesses, strict=True):
        said = found.classes[guess.index] if guess.index < len(found.classes) else f"class {guess.index}"
        right = "" if guess.index == label else f", but it is {found.classes[label]}"
        shown.append((f"{said} {guess.probability:.0%}{right}", _picture(image)))
    return shown


def _picture(image: Tensor) -> Image.Image:
    """Convert a normalized image (3, H, W) to a picture, enlarged if it is small."""
    mean, std = (torch.tensor(each)[:, None, None] for each in (MEAN, STD))
    pixels = ((image * std + mean).clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    picture = Image.fromarray(pixels)
    scale = -(-SHOWN_SIDE // min(picture.size))
    size = (picture.width * scale, picture.height * scale)
    return picture if scale <= 1 else picture.resize(size, Image.Resampling.NEAREST)
