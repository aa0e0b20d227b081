"""Fine-tuning: start a training from existing weights.

    started = start_from(model, "resnet50.pth", num_classes=7)
    print(started)  # ... 318 of the model's 320 keys are loaded; new for 7 classes: fc.weight, fc.bias

The file may have the keys of any library that `rooftop.models.loading` supports. All weights except the head's must
fit: if the file has a different number of classes, or no head, the model keeps its new head.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from rooftop.errors import WeightsError
from rooftop.models.loading import matched
from rooftop.models.weights.load_reports import LoadReport


@dataclass(frozen=True)
class Started:
    """A report on the weights from which a training starts.

    Attributes:
        report: which keys of the file and of the model were loaded.
        renewed: keys of the model's head that keep their initial values.
        num_classes: number of classes of the model.
    """

    report: LoadReport
    renewed: tuple[str, ...]
    num_classes: int

    def __str__(self) -> str:
        report = self.report
        total = len(report.used) + len(self.renewed) + len(report.computed_keys)
        parts = [f"{report.path} ({report.origin}): {len(report.used)} of the model's {total} keys are loaded"]
        if report.averaged:
            parts.append(f"taken: {report.taken}")
        if self.renewed:
            parts.append(f"new for {self.num_classes} classes: {', '.join(self.renewed)}")
        if report.unexpected_keys:
            shown = ", ".join(report.unexpected_keys[:3]) + (", and so on" if len(report.unexpected_keys) > 3 else "")
            parts.append(f"{len(report.unexpected_keys)} of the file's keys are not in the model: {shown}")
        return "; ".join(parts)


def start_from(model: nn.Module, weights: str | Path, num_classes: int, *, name: str = "") -> Started:
    """Load weights into a model. A head whose number of classes differs from the file keeps its initial values.

    Args:
        model: a model on any device, in any dtype.
        weights: a file; or a published name, which also needs `name`.
        num_classes: number of classes that the model was built for.
        name: the model's builder, e.g. "resnet50".

    Raises:
        InputError: `weights` is neither a name nor a file.
        WeightsError: the file cannot be read, or weights other than the head's do not fit.
        MissingExtraError: safetensors or h5py is needed and not installed.
    """
    report, tensors = matched(model, weights, name=name)
    renewed = {key for key, shapes in report.mismatched.items() if _is_of_classes(shapes[0], shapes[1], num_classes)}
    heads = {key.rpartition(".")[0] for key in renewed} or {_last(model)}
    renewed |= {key for key in report.missing_keys if key.rpartition(".")[0] in heads}
    wrong = [f"{key} is missing" for key in report.missing_keys if key not in renewed]
    wrong += [
        f"{key} is {found} in the file and {expected} in the model"
        for key, (found, expected) in report.mismatched.items()
        if key not in renewed
    ]
    wrong += [f"{key} is {dtype}" for key, dtype in report.quantized.items()]
    if wrong or not report.used:
        raise WeightsError(
            f"{report.path} (key names: {report.origin}) does not fit {type(model).__name__}: "
            f"{'; '.join(wrong[:3]) or 'the file has none of its keys'}{'; and so on' if len(wrong) > 3 else ''}. "
            f"Only the head may differ, for another number of classes: {num_classes} were requested"
        )
    model.load_state_dict({key: tensors[key] for key in report.used}, strict=False)
    in_order = tuple(key for key in model.state_dict() if key in renewed)
    return Started(report, in_order, num_classes)


def _is_of_classes(found: tuple[int, ...], expected: tuple[int, ...], num_classes: int) -> bool:
    """Whether two shapes differ in one dimension only, and its size in `expected` is the number of classes, or one
    more: a detector has the additional class "no object"."""
    if len(found) != len(expected):
        return False
    differing = [size for other, size in zip(found, expected, strict=True) if other != size]
    return len(differing) == 1 and differing[0] in (num_classes, num_classes + 1)


def _last(model: nn.Module) -> str:
    """Path of the model's last module with parameters, the head. A file with only a backbone lacks this module."""
    return [name for name, _ in model.named_parameters()][-1].rpartition(".")[0]
