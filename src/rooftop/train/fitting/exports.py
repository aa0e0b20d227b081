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

from torch import nn

from rooftop.errors import InputError
from rooftop.models.weights.safetensors_files import safetensors_library
from rooftop.train.checkpoints.files import METADATA, read_header, sync_folder

TEMPORARY = ".unfinished"


def export_weights(path: Path, model: nn.Module, metadata: Mapping[str, Any]) -> None:
    """Write the state dict of a model atomically.

    Args:
        metadata: JSON values, written to the header's metadata under "rooftop".

    Raises:
        OSError: the file cannot be written; an existing file stays unchanged.
        MissingExtraError: safetensors is not installed.
    """
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in model.state_dict().items()}
    temporary = path.with_name(f".{path.name}{TEMPORARY}")
    library = safetensors_library()
    try:
        content = library.torch.save(tensors, metadata={"format": "pt", METADATA: json.dumps(dict(metadata))})
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(f"{path} cannot be written ({error.strerror or error}): make room, then resume") from error


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
