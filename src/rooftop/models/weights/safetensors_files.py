"""Read tensors, or parts of tensors, from one safetensors file, or from several with an index in Hugging Face's format.

with TensorFiles(Path("Llama-2-7b-hf")) as files:
    files.keys()
    files.part("model.norm.weight", (0, 4096), None, transposed=False)
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

from torch import Tensor

from rooftop.errors import InputError, MissingExtraError, WeightsError
from rooftop.models.weights.file_checks import called

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
AS_SAFETENSORS = "save the model as safetensors: from_pretrained(...).save_pretrained(FOLDER) of transformers"
FLOATING = ("F64", "F32", "F16", "BF16")
"""safetensors' names of the floating-point dtypes, except those with 8 bits, which need scales."""


class TensorFiles:
    """The tensors of one safetensors file or of the files of an index, read one at a time."""

    def __init__(self, path: Path) -> None:
        self._library = safetensors_library()
        self._opened: dict[Path, Any] = {}
        self._places = self._found(path)

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._opened.values():
            file.__exit__(None, None, None)

    def keys(self) -> tuple[str, ...]:
        """The keys of all files."""
        return tuple(self._places)

    def shape_and_kind(self, key: str) -> tuple[tuple[int, ...], bool]:
        """Shape of a tensor, and whether it is floating point with at least 16 bits; does not read the tensor."""
        view = self._file(self._places[key]).get_slice(key)
        return tuple(view.get_shape()), view.get_dtype() in FLOATING

    def whole(self, key: str) -> Tensor:
        """Read a whole tensor to the CPU."""
        found: Tensor = self._file(self._places[key]).get_tensor(key)
        return found

    def part(self, key: str, rows: tuple[int, int], columns: tuple[int, int] | None, transposed: bool) -> Tensor:
        """Read a part of a tensor to the CPU.

        Args:
            key: key of the tensor.
            rows, columns: index ranges (first, end) of the part; `end` is not included. `columns` None: all dimensions
                after the first are read whole.
            transposed: whether to return a part of the transpose, with its `rows` and `columns`; ignored if `columns`
                is None.
        """
        view = self._file(self._places[key]).get_slice(key)
        if columns is None:
            found: Tensor = view[slice(*rows)]
        elif transposed:
            found = view[slice(*columns), slice(*rows)].T
        else:
            found = view[slice(*rows), slice(*columns)]
        return found

    def _found(self, path: Path) -> dict[str, Path]:
        """Map each key to its file, and check that an index and its files belong together."""
        if (path / ONE_FILE).is_file() or path.is_file():
            file = path if path.is_file() else path / ONE_FILE
            return dict.fromkeys(self._file(file).keys(), file)
        if not (path / INDEX).is_file():
            pickled = next(iter(sorted(path.glob("pytorch_model*.bin"))), None) if path.is_dir() else None
            hint = "" if pickled is None else f": {pickled.name} is pickled, so {AS_SAFETENSORS}"
            raise InputError(f"{path} is not a .safetensors file, nor a folder with {ONE_FILE} or {INDEX}{hint}")
        index = read_json(path / INDEX).get("weight_map")
        if not isinstance(index, dict) or not index:
            raise WeightsError(f"{path / INDEX} has no weight_map: expected an index as written by transformers")
        places = {key: path / Path(str(name)).name for key, name in index.items()}
        if absent := sorted({file.name for file in places.values() if not file.is_file()}):
            raise InputError(f"{path} lacks {', '.join(absent[:3])}, which {INDEX} lists: download all files")
        held = {file: set(self._file(file).keys()) for file in set(places.values())}
        for key, file in places.items():
            if key not in held[file]:
                raise WeightsError(
                    f"{file} has no {key}, although {INDEX} lists it there: the files do not belong together"
                )
        for file, keys in held.items():
            if other := min((key for key in keys if places.get(key, file) != file), default=None):
                raise WeightsError(
                    f"{file} and {places[other].name} both have {other}: the files do not belong together"
                )
            places |= dict.fromkeys(sorted(keys - set(places)), file)  # keys that the index omits
        return places

    def _file(self, path: Path) -> Any:
        if path not in self._opened:
            try:
                self._opened[path] = self._library.safe_open(path, framework="pt", device="cpu").__enter__()
            except (self._library.SafetensorError, OSError) as error:
                raise unreadable_safetensors(path, error) from error
        return self._opened[path]


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file.

    Raises:
        WeightsError: the file cannot be read, or holds no JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise WeightsError(f"{path} holds a {type(content).__name__}: expected a JSON object")
    return content


def unreadable_safetensors(path: Path, error: Exception) -> WeightsError:
    """Create the error for a file that the library `safetensors` cannot read."""
    pickled = path.suffix.lower() == ".bin" and zipfile.is_zipfile(path)
    hint = f" (it is pickled, so {AS_SAFETENSORS})" if pickled else called(path)
    return WeightsError(
        f"{path} is damaged or not a safetensors file ({error}){hint}. Expected a file written by "
        "safetensors.torch.save_file"
    )


def safetensors_library() -> Any:
    """The module `safetensors`, with `safetensors.torch` loaded.

    Raises:
        MissingExtraError: safetensors is not installed.
    """
    try:
        import safetensors.torch
    except ImportError as error:
        raise MissingExtraError('.safetensors files need safetensors: pip install "rooftop[weights]"') from error
    return safetensors
