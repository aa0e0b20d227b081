"""Export weights to a safetensors file, with the task's metadata in its header.

export_weights(out / "best.safetensors", model, {"model": "resnet18", "classes": ["cat", "dog"]})
exported_metadata(out / "best.safetensors")["model"]
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rooftop.errors import InputError
from rooftop.models.weights.safetensors_files import safetensors_library
from rooftop.train.checkpoints.files import METADATA, read_header, sync_folder
from rooftop.whole_files import whole_file


def check_exportable(model: nn.Module, metadata: Mapping[str, Any]) -> None:
    """Check before a training that `export_weights` can write the model and its metadata.

    Raises:
        InputError: a value of the model's state dict is not a tensor that safetensors stores, or a value of the
            metadata is not JSON.
    """
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise InputError(
                f"the model's state {name} is a {type(value).__name__}: a file of weights contains only tensors: keep "
                "this value outside the model, or return a tensor from get_extra_state"
            )
        dense = value.layout is torch.strided
        if not dense or not _storable(value.dtype):
            raise InputError(
                f"the model's state {name} is {value.dtype if dense else value.layout}, which a safetensors file "
                "cannot store: register the buffer with persistent=False, or keep it as a dense tensor of another dtype"
            )
    for key, each in metadata.items():
        try:
            json.dumps({key: each})
        except (TypeError, ValueError) as error:
            raise InputError(
                f"the task's metadata[{key!r}] is not JSON ({error}): expected strings, numbers, None, and lists and "
                "dicts of them, e.g. tensor.tolist()"
            ) from error


def _storable(dtype: torch.dtype) -> bool:
    library = safetensors_library()
    try:
        library.torch.save({"": torch.empty(0, dtype=dtype)})
    except (KeyError, ValueError, RuntimeError):  # RuntimeError: quantized dtypes
        return False
    return True


def export_weights(path: Path, model: nn.Module, metadata: Mapping[str, Any]) -> None:
    """Write the state dict of a model atomically.

    Args:
        metadata: JSON values, written to the header's metadata under "rooftop".

    Raises:
        OSError: the file cannot be written; an existing file stays unchanged.
        MissingExtraError: safetensors is not installed.
    """
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in model.state_dict().items()}
    library = safetensors_library()
    try:
        content = library.torch.save(tensors, metadata={"format": "pt", METADATA: json.dumps(dict(metadata))})
        with whole_file(path) as temporary, temporary.open("wb") as file:
            file.write(_ordered_header(content))
            file.write(memoryview(content)[8 + _header_bytes(content) :])
            file.flush()
            os.fsync(file.fileno())
        sync_folder(path.parent)
    except OSError as error:
        raise OSError(f"{path} cannot be written ({error.strerror or error}): make room, then resume") from error


def _header_bytes(content: bytes) -> int:
    return int.from_bytes(content[:8], "little")


def _ordered_header(content: bytes) -> bytes:
    """The header of a safetensors file with sorted metadata. safetensors itself writes metadata in random order, so
    equal weights would have different files.
    """
    header = json.loads(content[8 : 8 + _header_bytes(content)])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the tensors
    return len(text).to_bytes(8, "little") + text


def exported_metadata(path: Path) -> dict[str, Any]:
    """Read the metadata that `export_weights` wrote; empty for files of other programs.

    Raises:
        InputError: the file cannot be read, or is not a safetensors file.
    """
    try:
        _, header = read_header(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as a safetensors file: {error}") from error
    found = json.loads(header.get("__metadata__", {}).get(METADATA, "{}"))
    return found if isinstance(found, dict) else {}
