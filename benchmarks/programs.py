"""The programs that several benchmarks run, the libraries that they compare with, and the result file that they write
case by case."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from rooftop.hardware import Ceilings
from rooftop.models import resnet50
from rooftop.whole_files import write_json


@dataclass
class Step:
    """A model in training or evaluation mode, with its arguments. `training` has `rooftop.analyze`'s arguments for a
    training step."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    training: dict[str, Any]

    def __post_init__(self) -> None:
        self.model.train(bool(self.training))

    def run(self) -> Any:
        """Run one step, as `rooftop.analyze` would."""
        if not self.training:
            with torch.no_grad():
                return self.model(*self.args, **self.kwargs)
        for parameter in self.model.parameters():
            parameter.grad = None
        loss = self.loss(self.model(*self.args, **self.kwargs))
        loss.backward()
        return loss.detach()

    def loss(self, out: Any) -> Tensor:
        """The tensor from which backward starts: the loss function's result, or the loss that the model returns."""
        make: Callable[[Any], Tensor] | None = self.training.get("loss")
        loss: Tensor = make(out) if make is not None else out.loss
        return loss


def resnet_step(
    batch: int,
    train: bool = False,
    dtype: torch.dtype = torch.float32,
    channels_last: bool = False,
    device: str = "cuda",
    size: int = 224,
) -> Step:
    """ResNet-50 on random images."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model = resnet50().to(device=device, dtype=dtype, memory_format=layout)
    x = torch.randn(batch, 3, size, size, device=device, dtype=dtype).to(memory_format=layout)
    labels = torch.randint(1000, (batch,), device=device)
    training = {"train": True, "loss": lambda logits: cross_entropy(logits, labels)} if train else {}
    return Step(model, (x,), {}, training)


def gpt2_step(
    batch: int, tokens: int = 512, train: bool = False, dtype: torch.dtype = torch.float32, device: str = "cuda"
) -> Step:
    """transformers' GPT-2 with random weights on random tokens. It has 124 million parameters; on a CPU it is tiny."""
    import transformers

    transformers.logging.set_verbosity_error()
    tiny = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 1000} if device == "cpu" else {}
    config = transformers.GPT2Config(use_cache=False, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, **tiny)
    model = transformers.GPT2LMHeadModel(config).to(device=device, dtype=dtype)
    ids = torch.randint(config.vocab_size, (batch, tokens), device=device)
    labels = {"labels": ids} if train else {}
    return Step(model, (ids,), labels, {"train": True, "loss": lambda out: out.loss} if train else {})


def imported(name: str) -> Any:
    """The module, or a message that says why it cannot be imported."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        return f"not installed: {error.name}"
    except (ImportError, OSError, RuntimeError) as error:  # such as a build for another CUDA, torch or Python
        return f"cannot be imported: {str(error).splitlines()[0]}"


class Results:
    """The rows of a benchmark. The file is written after each row, so an interrupted run loses nothing."""

    def __init__(self, path: Path, ceilings: Ceilings) -> None:
        self._path = path
        self.rows: list[dict[str, Any]] = []
        self._environment = {
            "device": ceilings.device,
            "versions": {**ceilings.versions, "torch": torch.__version__},
            "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }

    def add(self, row: dict[str, Any]) -> None:
        """Add a row, write the file, and print the row's short values."""
        self.rows.append(row)
        content = {"environment": self._environment, "results": self.rows}
        write_json(self._path, content)
        short = {key: value for key, value in row.items() if isinstance(value, (str, int, float))}
        print(*(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in short.items()), sep="  ", flush=True)
