"""A training recipe as data: all switches with their defaults, read from TOML and from `section.name=value`.

    recipe = Recipe.of({"run": {"epochs": 20}, "optimizer": {"name": "adamw", "lr": 1e-3}})
    recipe = recipe.with_values(["mix.mixup=0.2", "ema.decay=0.999"])

A switch that is off costs nothing. By default all optional techniques are off, except momentum, weight decay, the
cosine schedule with its warm-up, `run.sync_norms` and `run.sum_in_backward`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from rooftop.errors import InputError
from rooftop.user_paths import user_path
from rooftop.words import did_you_mean, nearest

PUBLISHED = Path(__file__).parent / "published"


@dataclass(frozen=True)
class Run:
    """Length, batch and precision of a training.

    Attributes:
        epochs: passes over the training data.
        steps: number of optimizer steps; a number above 0 replaces epochs.
        batch: samples per optimizer step, summed over all ranks.
        accumulate: forward and backward passes per step (gradient accumulation); each pass has batch / (ranks x
            accumulate) samples.
        seed: seed of initial values, sample order and augmentation.
        precision: "fp32", "bf16" (autocast), or "fp16" (autocast with a gradient scaler).
            Source: Micikevicius et al. 2018, arXiv:1710.03740.
        channels_last: whether the model and image batches are channels last in memory.
        compile: whether to compile the model with torch.compile.
        replay: whether to replay the model's forward and backward pass from CUDA graphs, on one GPU. This helps if
            kernel launches limit the speed: with small models, small batches, or CPU cores busy with decoding images.
            Source: Nguyen et al. 2021, "Accelerating PyTorch with CUDA Graphs".
        sync_norms: whether batch norms use statistics of the whole batch over all ranks. Source: Peng et al. 2018,
            "MegDet", arXiv:1711.07240.
        sum_in_backward: whether to sum gradients over ranks during the backward pass. False: after the backward pass.
            Source: Li et al. 2020, "PyTorch Distributed", arXiv:2006.15704.
        deterministic: whether to use PyTorch's deterministic algorithms, which are slower on a GPU.
    """

    epochs: float = 10.0
    steps: int = 0
    batch: int = 64
    accumulate: int = 1
    seed: int = 0
    precision: str = "fp32"
    channels_last: bool = False
    compile: bool = False
    replay: bool = False
    sync_norms: bool = True
    sum_in_backward: bool = True
    deterministic: bool = False


@dataclass(frozen=True)
class Optimizer:
    """The optimizer and its options.

    Attributes:
        name: "sgd", "adamw", or "muon" (torch.optim.Muon for matrices of hidden layers, AdamW for all others).
            Source: AdamW: Loshchilov and Hutter 2019, arXiv:1711.05101; Muon: Jordan et al. 2024,
            https://kellerjordan.github.io/posts/muon.
        lr: the highest learning rate.
        momentum: momentum of SGD and Muon; Muon's authors use 0.95.
        nesterov: Nesterov's momentum, for SGD and Muon; Muon's authors use it.
            Source: Sutskever et al. 2013.
        betas: decay of AdamW's two moments.
        eps: AdamW's epsilon, which is added to the divisor.
        weight_decay: weight decay of all parameters except norms' parameters and biases.
        norm_weight_decay: weight decay of norms' parameters. Source: He et al. 2019, "Bag of Tricks", arXiv:1812.01187.
        bias_weight_decay: weight decay of biases and of position tables. Source: He et al. 2019, arXiv:1812.01187.
        layer_decay: ratio of a layer's learning rate to that of the next layer; 1: off. Source: Howard and Ruder 2018,
            arXiv:1801.06146; Bao et al. 2021, arXiv:2106.08254.
        clip: maximum norm of the gradient; 0: off. Source: Pascanu et al. 2013, arXiv:1211.5063.
    """

    name: str = "sgd"
    lr: float = 0.1
    momentum: float = 0.9
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-4
    norm_weight_decay: float = 0.0
    bias_weight_decay: float = 0.0
    layer_decay: float = 1.0
    clip: float = 0.0


@dataclass(frozen=True)
class Schedule:
    """The learning rate over the run.

    Attributes:
        name: "constant", "cosine" or "wsd" (warm up, stay constant, decay linearly).
            Source: cosine: Loshchilov and Hutter 2017, arXiv:1608.03983; wsd: Hu et al. 2024, arXiv:2404.06395.
        warmup: fraction of all steps in which the learning rate rises linearly from 0. Source: Goyal et al. 2017,
            arXiv:1706.02677.
        decay: fraction of all steps for the final decay of "wsd".
        least: learning rate at the end of the decay, as a fraction of the highest rate.
    """

    name: str = "cosine"
    warmup: float = 0.05
    decay: float = 0.2
    least: float = 0.0


@dataclass(frozen=True)
class Mix:
    """Techniques that mix the samples of a batch or smooth its targets.

    Attributes:
        label_smoothing: fraction of a target that is spread over all classes.
            Source: Szegedy et al. 2016, arXiv:1512.00567.
        mixup: alpha of the Beta distribution of mixup; 0: off. Source: Zhang et al. 2018, arXiv:1710.09412.
        cutmix: alpha of the Beta distribution of CutMix; 0: off. If mixup is on too, each pair of samples uses mixup or
            CutMix at random. Source: Yun et al. 2019, arXiv:1905.04899.
    """

    label_smoothing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0


@dataclass(frozen=True)
class Augment:
    """Augmentation of single images, drawn for each sample and epoch.

    Attributes:
        crop: least area of a random crop, as a fraction of the image; 1: off. Source: Szegedy et al. 2015,
            arXiv:1409.4842.
        flip: probability of a horizontal flip. Source: Krizhevsky et al. 2012.
        shift: maximum random shift along each axis, as a fraction of the image's side; 0: off.
        jitter: strength of colour jitter: brightness, contrast and saturation change by factors within 1 +- jitter, in
            a random order; 0: off. Source: Howard 2013, arXiv:1312.5402.
        hue: maximum change of the hue in colour jitter, as a fraction of the colour circle, up to 0.5; 0: off.
        rand_augment: number of operations of RandAugment; 0: off. Source: Cubuk et al. 2020, arXiv:1909.13719.
        magnitude: strength of RandAugment's operations, from 0 to 10.
        rand_augment_on: "cpu" or "gpu": device that applies RandAugment's operations; both devices compute the same
            pixels. In a training on a GPU, the default of Rooftop's image tasks is "gpu".
        erase: probability of random erasing. Source: Zhong et al. 2020, arXiv:1708.04896.
        repeats: copies of each sample in a batch, each with its own augmentation. An epoch has the same number of steps
            as without repeats, so an epoch has fewer different samples. Source: Hoffer et al. 2020, arXiv:1901.09335.
        decode: device that decodes and crops the JPEGs of the training images: "cpu", "gpu", or "auto". "auto" chooses
            the GPU if the GPU decodes more than 2.5 times as many images a second as the CPU, because the GPU also has
            to train. rooftop train measures both at the start. The pixels that a GPU decodes differ slightly from those
            that a CPU decodes.
        gpu_share: with decode = "gpu", the fraction of the images that the GPU decodes; the CPU decodes the others. A
            GPU that decodes all images has less time for the step.
        detail: minimum ratio of a random crop's side, in decoded pixels, to the side of the training image. With a
            ratio below 1, the CPU decodes more JPEGs at 1/2, 1/4 or 1/8 of their size than with 1, which is faster but
            blurs the crops.
        size: side of the training images in pixels; 0: the task's default.
        test_size: side of the validation images; 0: as in training. A size above the training size often raises the
            accuracy. Source: Touvron et al. 2019, "FixRes", arXiv:1906.06423.
    """

    crop: float = 1.0
    flip: float = 0.0
    shift: float = 0.0
    jitter: float = 0.0
    hue: float = 0.0
    rand_augment: int = 0
    magnitude: float = 9.0
    rand_augment_on: str = "cpu"
    erase: float = 0.0
    repeats: int = 1
    decode: str = "cpu"
    gpu_share: float = 1.0
    detail: float = 1.0
    size: int = 0
    test_size: int = 0


@dataclass(frozen=True)
class Model:
    """The model and its options.

    Attributes:
        name: name of a model of the task; "": the task's default.
        weights: a file of initial weights, or the name of published weights; "": random weights.
        num_classes: classes of the model; 0: the number in the data.
        frozen: shell patterns of modules to freeze; their norms stay in evaluation mode.
        dropout: dropout probability of the model's dropout layers. A model without dropout layers gets dropout before
            its last linear layer. Source: Srivastava et al. 2014.
        stochastic_depth: probability of skipping the last block; the probability falls linearly to 0 at the first
            block. Source: Huang et al. 2016, arXiv:1603.09382.
        options: further arguments of the model's builder.
    """

    name: str = ""
    weights: str = ""
    num_classes: int = 0
    frozen: tuple[str, ...] = ()
    dropout: float = 0.0
    stochastic_depth: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Ema:
    """Exponential moving average of the weights, used for evaluation and export.

    Attributes:
        decay: decay of the moving average; 0: off. Source: Polyak and Juditsky 1992; Tarvainen and Valpola 2017,
            arXiv:1703.01780.
        every: steps between updates of the average.
    """

    decay: float = 0.0
    every: int = 1


@dataclass(frozen=True)
class Evaluation:
    """Validation, and early stopping.

    Attributes:
        every: epochs between evaluations; the last epoch is always evaluated.
        patience: number of consecutive evaluations without a new best value of the task's `best` metric, after which
            training stops; 0: never. Source: Prechelt 1998.
        batch: samples per forward pass, summed over all ranks; 0: as in training, run.batch / run.accumulate.
    """

    every: float = 1.0
    patience: int = 0
    batch: int = 0


@dataclass(frozen=True)
class Faults:
    """Reactions to faults.

    Attributes:
        not_finite: action at a loss or gradient that is not finite: "stop", or "skip" the step.
        most_skipped: maximum number of consecutive skipped steps.
        damaged: action at a sample that cannot be read: "stop", or "skip" the sample.
    """

    not_finite: str = "stop"
    most_skipped: int = 10
    damaged: str = "stop"


@dataclass(frozen=True)
class Loading:
    """How to load samples.

    Attributes:
        how: "here" (in the training loop), "threads", "processes", or "auto" (the fastest of these, measured at the
            start).
        workers: number of threads or processes per rank; 0: the usable CPUs divided by the ranks on the machine,
            at most 32.
        ahead: number of batches that the threads or processes of a rank make in advance, all together.
    """

    how: str = "auto"
    workers: int = 0
    ahead: int = 4


@dataclass(frozen=True)
class Recipe:
    """All sections of a recipe."""

    run: Run = Run()
    model: Model = field(default_factory=Model)
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    mix: Mix = Mix()
    augment: Augment = Augment()
    ema: Ema = Ema()
    evaluation: Evaluation = Evaluation()
    faults: Faults = Faults()
    loading: Loading = Loading()

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Recipe:
        """Create the default recipe with these values, by section and name.

        Raises:
            InputError: a section or name is unknown, or a value has a wrong type or is out of range.
        """
        return cls().updated(values)

    @classmethod
    def read(cls, path: str | Path, before: Recipe | None = None) -> Recipe:
        """Read a recipe from a TOML file or by the name of a published recipe.

        Values that the file does not set come from `before`, or from the defaults. A published recipe is complete, so
        `before` has no effect on it.

        Raises:
            InputError: the file cannot be read, is not TOML, or has a value that does not fit.
        """
        path = user_path(path)
        if not path.exists() and not path.suffix:
            path, before = _published(path), None
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InputError(f"{path} is not TOML: {error}") from error
        return (before or cls()).updated(values, str(path))

    def updated(self, values: Mapping[str, Any], source: str = "recipe") -> Recipe:
        """Return this recipe with values replaced, by section and name.

        Raises:
            InputError: as in `of`.
        """
        recipe = self
        for section, given in values.items():
            if section not in _names(recipe):
                raise InputError(f"{source}: there is no section {section!r}: expected {_expected(section, recipe)}")
            if not isinstance(given, Mapping):
                raise InputError(f"{source}: {section} is {given!r}: expected a section, e.g. [{section}]")
            old = getattr(recipe, section)
            hints = get_type_hints(type(old))
            checked = {}
            for name, value in given.items():
                if name not in hints:
                    raise InputError(f"{source}: {section} has no {name!r}: expected {_expected(name, old)}")
                checked[name] = _value(value, hints[name], f"{source}: {section}.{name}")
            recipe = replace(recipe, **{section: replace(old, **checked)})
        recipe.check(source)
        return recipe

    def with_values(self, texts: Iterable[str]) -> Recipe:
        """Return this recipe with values from texts `section.name=value`; a value is TOML, or text without quotes.

        Raises:
            InputError: as in `of`; also if a text is not of the form `section.name=value`.
        """
        recipe = self
        for text in texts:
            path, equals, written = text.partition("=")
            section, dot, name = path.strip().partition(".")
            if not (equals and dot and section and name):
                raise InputError(f"{text!r}: expected SECTION.NAME=VALUE, e.g. optimizer.lr=0.01")
            try:
                value = tomllib.loads(f"value = {written}")["value"]
            except tomllib.TOMLDecodeError:
                value = written.strip()
            recipe = recipe.updated({section: {name: value}}, text)
        return recipe

    def plain(self) -> dict[str, Any]:
        """All values, by section and name, as types of JSON and TOML."""
        return dataclasses.asdict(self)

    def toml(self) -> str:
        """This recipe as the text of a TOML file; `read` of that file returns an equal recipe."""
        return "\n\n".join(
            f"[{section}]\n" + "\n".join(f"{name} = {_toml(value)}" for name, value in values.items())
            for section, values in self.plain().items()
        )

    def check(self, source: str = "recipe") -> None:
        """Check that all values are in range and compatible.

        Raises:
            InputError: a value is wrong; the message says what is expected.
        """
        for path, test, expected in _RULES:
            section, name = path.split(".")
            value = getattr(getattr(self, section), name)
            if not test(value):
                raise InputError(f"{source}: {path} is {value!r}: expected {expected}")


def _among(*names: str) -> tuple[Any, str]:
    return (lambda value: value in names), " or ".join(repr(name) for name in names)


def _between(low: float, high: float) -> tuple[Any, str]:
    return (lambda value: low <= value <= high), f"a number from {low:g} to {high:g}"


def _from(low: float) -> tuple[Any, str]:
    return (lambda value: low <= value < float("inf")), f"a number of at least {low:g}"


_RULES: list[tuple[str, Any, str]] = [
    ("run.epochs", lambda value: 0 < value < float("inf"), "a number above 0"),
    ("run.steps", *_from(0)),
    ("run.batch", *_from(1)),
    ("run.accumulate", *_from(1)),
    ("run.seed", lambda value: 0 <= value < 2**63, "an integer from 0 to 2**63 - 1"),
    ("run.precision", *_among("fp32", "bf16", "fp16")),
    ("optimizer.name", *_among("sgd", "adamw", "muon")),
    ("optimizer.lr", *_from(0)),
    ("optimizer.momentum", *_between(0, 1)),
    ("optimizer.betas", lambda value: all(0 <= each < 1 for each in value), "two numbers from 0 to below 1"),
    ("optimizer.eps", *_from(0)),
    ("optimizer.weight_decay", *_from(0)),
    ("optimizer.norm_weight_decay", *_from(0)),
    ("optimizer.bias_weight_decay", *_from(0)),
    ("optimizer.layer_decay", *_between(0, 1)),
    ("optimizer.clip", *_from(0)),
    ("schedule.name", *_among("constant", "cosine", "wsd")),
    ("schedule.warmup", *_between(0, 1)),
    ("schedule.decay", *_between(0, 1)),
    ("schedule.least", *_between(0, 1)),
    ("mix.label_smoothing", *_between(0, 1)),
    ("mix.mixup", *_from(0)),
    ("mix.cutmix", *_from(0)),
    ("augment.crop", lambda value: 0 < value <= 1, "a number above 0, up to 1"),
    ("augment.flip", *_between(0, 1)),
    ("augment.shift", *_between(0, 1)),
    ("augment.jitter", *_between(0, 1)),
    ("augment.hue", *_between(0, 0.5)),
    ("augment.rand_augment", *_from(0)),
    ("augment.magnitude", *_between(0, 10)),
    ("augment.rand_augment_on", *_among("cpu", "gpu")),
    ("augment.erase", *_between(0, 1)),
    ("augment.repeats", *_from(1)),
    ("augment.decode", *_among("cpu", "gpu", "auto")),
    ("augment.gpu_share", lambda value: 0 < value <= 1, "a number above 0, up to 1"),
    ("augment.detail", lambda value: 0 < value <= 1, "a number above 0, up to 1"),
    ("augment.size", *_from(0)),
    ("augment.test_size", *_from(0)),
    ("model.num_classes", *_from(0)),
    ("model.options", lambda value: "num_classes" not in value, "no 'num_classes' here: set model.num_classes"),
    ("model.dropout", *_between(0, 1)),
    ("model.stochastic_depth", *_between(0, 1)),
    ("ema.decay", *_between(0, 1)),
    ("ema.every", *_from(1)),
    ("evaluation.every", lambda value: 0 < value < float("inf"), "a number above 0"),
    ("evaluation.patience", *_from(0)),
    ("evaluation.batch", *_from(0)),
    ("faults.not_finite", *_among("stop", "skip")),
    ("faults.most_skipped", *_from(0)),
    ("faults.damaged", *_among("stop", "skip")),
    ("loading.how", *_among("auto", "here", "threads", "processes")),
    ("loading.workers", *_from(0)),
    ("loading.ahead", *_from(1)),
]


def published_recipes() -> dict[str, Path]:
    """The names of the published recipes that come with Rooftop, for `Recipe.read`, e.g. "resnet50-v2"."""
    return {path.stem: path for path in sorted(PUBLISHED.glob("*.toml"))}


def _published(name: Path) -> Path:
    """The file of a published recipe.

    Raises:
        InputError: there is no recipe with that name.
    """
    named = published_recipes()
    if str(name) not in named:
        raise InputError(
            f"{name} is neither a file nor a published recipe{did_you_mean(name, named)}: expected a file or one of "
            f"{', '.join(named)}"
        )
    return named[str(name)]


def _names(of: Any) -> list[str]:
    return [each.name for each in fields(of)]


def _expected(given: str, of: Any) -> str:
    return " or ".join(nearest(given, _names(of)) or _names(of))


def _value(value: Any, hint: Any, where: str) -> Any:
    """Convert a value to the type of a field: an integer becomes a float, a list becomes a tuple."""
    if get_origin(hint) is tuple:
        kinds = get_args(hint)
        if not isinstance(value, list | tuple) or (kinds[-1] is not ... and len(value) != len(kinds)):
            count = "texts" if kinds[-1] is ... else f"{len(kinds)} values"
            raise InputError(f"{where} is {value!r}: expected a list of {count}")
        return tuple(_value(each, kinds[0], where) for each in value)
    if get_origin(hint) is dict:
        if not isinstance(value, Mapping):
            raise InputError(f"{where} is {value!r}: expected a table of names and values")
        for name, each in value.items():
            if not _is_plain(each):
                raise InputError(
                    f"{where}.{name} is {each!r}, which a recipe cannot store: expected a finite number, a text, true, "
                    "false, or a list or table of these; leave the name out for the builder's default"
                )
        return dict(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not hint:
        kind = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}[hint]
        meant = _meant(value, hint)
        raise InputError(f"{where} is {value!r}: expected {kind}{f': write {meant}' if meant else ''}")
    return value


def _is_plain(value: Any) -> bool:
    """Whether `_toml` can write a value, so that reading the text returns the same value."""
    if isinstance(value, Mapping):
        return all(isinstance(name, str) and _is_plain(each) for name, each in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))


def _meant(value: Any, hint: type) -> str:
    """The probable meaning of a value of a wrong type in TOML: 0.9 for the text ".9"; "" if there is none."""
    if hint is bool:
        return str(value).lower() if str(value).lower() in ("true", "false") else ""
    if isinstance(value, bool) or hint not in (int, float):
        return ""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return ""
    return str(hint(number)) if math.isfinite(number) and hint(number) == number else ""


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(name)} = {_toml(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(each) for each in value) + "]"
    return json.dumps(value, ensure_ascii=False)
