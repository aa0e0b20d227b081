"""Load weights of Hugging Face's GPT-2 and Llama families into a `Gpt`, and save a `Gpt` in their format.

    model = load_gpt("Llama-2-7b-hf/")     # config.json and *.safetensors
    save_gpt(model, "mine/")               # for transformers' from_pretrained

Tensors are read one at a time, directly into the parameters, so memory never holds two copies of a model. If a tensor
is split among ranks, each rank reads only its own rows and columns. To write, ranks gather the tensors of one file at a
time. `rooftop.models.gpt.keys` lists the names, and the tensors that are packed or transposed.

If the config ties the head to the embedding but the files contain a different head, the model is built untied, as in
transformers.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from rooftop.errors import InputError, WeightsError
from rooftop.models.gpt.configs import config_of, hugging_face_config
from rooftop.models.gpt.keys import (
    InMemory,
    Source,
    check_tensor,
    check_tied_head,
    differing,
    equal,
    matched,
    shape_of_part,
    shapes_of,
    sources,
    with_own_head,
)
from rooftop.models.gpt.network import Gpt
from rooftop.models.gpt.switches import GptConfig
from rooftop.models.weights.load_reports import LoadReport
from rooftop.models.weights.safetensors_files import INDEX, ONE_FILE, TensorFiles, read_json, safetensors_library
from rooftop.parallel import Shard, shards_of
from rooftop.parallel.exchanges import Group
from rooftop.user_paths import user_path

if TYPE_CHECKING:
    from rooftop.models.gpt.stages import GptStages

# ---- in memory -----------------------------------------------------------------------------------------------------


def gpt_state_dict(tensors: Mapping[str, Tensor], config: GptConfig) -> dict[str, Tensor]:
    """Convert the state dict of a Hugging Face model, such as GPT2LMHeadModel, to the state dict of a `Gpt`.

    Gradients under Hugging Face's keys can be converted too: they are packed and transposed like the weights.

    Args:
        tensors: tensors by Hugging Face's keys; the prefix of a model with a head may be missing. A tied weight may
            have the key of the embedding, the key of the head, or both keys. Causal masks and rotary frequencies of
            older models are ignored; a warning names those that differ from the values that the config determines.
        config: the config of the model.

    Raises:
        WeightsError: keys are missing or unexpected, a tensor has a different shape or is not floating point, or the
            head differs from the embedding although the config ties them.
        ValueError: no Hugging Face model supports this config.
    """
    there, shapes = InMemory(tensors), shapes_of(config)
    match = matched(tensors, config)
    check_tied_head(match, config, there)
    for key in differing(match, config, there):
        warnings.warn(
            f"{key} is not loaded: the model computes it from the config, and the file's values differ",
            stacklevel=2,
        )
    result = {}
    for ours, source in sources(config).items():
        keys = [match.given[key] for key in source.keys]
        for index, key in enumerate(keys):
            check_tensor(key, there, shape_of_part(source, index, shapes[ours]))
        parts = [tensors[key] for key in keys]
        parts = [part.T for part in parts] if source.transposed else parts
        result[ours] = torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()
    return result


def hugging_face_state_dict(tensors: Mapping[str, Tensor], config: GptConfig) -> dict[str, Tensor]:
    """Convert the state dict of a whole `Gpt` to Hugging Face's keys.

    A tied head is omitted. The tensors are views of the input's tensors.

    Raises:
        WeightsError: a tensor is missing or has another number of rows than the config says, or the head differs from
            the embedding although the config ties them.
        ValueError: no Hugging Face model supports this config.
    """
    embedding, head = (tensors.get(f"{name}.weight") for name in ("embedding.tokens", "head.output"))
    if config.tied and embedding is not None and head is not None and not equal(embedding, head):
        raise WeightsError(UNTIED)
    return dict(_exported(tensors, config))


def _exported(tensors: Mapping[str, Tensor], config: GptConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield each of Hugging Face's keys with its tensor, as a view if possible."""
    for ours, source in sources(config).items():
        if config.tied and ours == "head.output.weight":
            continue
        if ours not in tensors:
            raise WeightsError(f"the state dict has no {ours}: expected the state dict of a whole Gpt")
        whole = tensors[ours]
        if len(whole) != sum(source.rows):
            raise WeightsError(f"{ours} has {len(whole)} rows, the config expects {sum(source.rows)}")
        for key, part in zip(source.keys, whole.split(list(source.rows)), strict=True):
            yield key, part.T if source.transposed else part


UNTIED = (
    "head.output.weight is not embedding.tokens.weight, but the config ties them, and one of the two would be lost: "
    "call tie(), or build the model with tied=False (dataclasses.replace(config, tied=False))"
)


# ---- files ---------------------------------------------------------------------------------------------------------

CONFIG = "config.json"


def load_gpt(
    folder: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    group: Group = None,
) -> Gpt:
    """Load a model from a folder in Hugging Face's format: config.json, and safetensors files with or without an index.

    Args:
        folder: folder with config.json and the safetensors files.
        device, dtype: device and dtype of the parameters; float32 by default, whatever the dtype in the files is.
        group: tensor parallel ranks that share the model, each of which reads its own part; None: this process has the
            whole model.

    Returns:
        The model, in training mode. The model has a separate head if the head in the files differs from the embedding,
        even if the config ties them.

    Raises:
        InputError: the folder or a file does not exist.
        WeightsError: a file is damaged, the model is of another kind, or tensors do not fit the config.
        MissingExtraError: safetensors is not installed.
        ValueError: the ranks cannot split the heads or features.
    """
    config = config_of_files(read_gpt_config(folder), folder)
    model = empty_gpt(config, device=device, dtype=dtype, group=group)
    load_gpt_weights(model, folder)
    return model


def empty_gpt(
    config: GptConfig,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    group: Group = None,
) -> Gpt:
    """Build a model, or a tensor parallel rank's part, with allocated but uninitialized parameters.

    `device`, `dtype` and `group` are as in `load_gpt`. Raises ValueError if the ranks cannot split the heads or
    features.
    """
    model = Gpt(config, group=group, device="meta", dtype=dtype or torch.float32).to_empty(device=device)
    model.tie()
    return model


def read_gpt_config(folder: str | Path) -> GptConfig:
    """Read the config from a folder in Hugging Face's format.

    Raises:
        InputError: there is no config.json.
        WeightsError: config.json is damaged, or belongs to an unknown kind of model.
    """
    path = user_path(folder) / CONFIG
    if not path.is_file():
        raise InputError(f"{path} does not exist: expected a folder with config.json and .safetensors files")
    given = read_json(path)
    try:
        return config_of(given)
    except WeightsError as error:
        raise WeightsError(f"{path}: {error}") from error


def config_of_files(config: GptConfig, path: str | Path) -> GptConfig:
    """Return the config; untied if the head in the files differs from the embedding, as in transformers.

    Raises:
        InputError, WeightsError, MissingExtraError: as in `load_gpt`.
        ValueError: no Hugging Face model supports this config.
    """
    if not config.tied:
        return config
    with TensorFiles(user_path(path)) as files:
        try:
            return with_own_head(config, files)
        except WeightsError as error:
            raise WeightsError(f"{path}: {error}") from error


@torch.no_grad()
def load_gpt_weights(model: Gpt | GptStages, path: str | Path) -> LoadReport:
    """Copy weights from files into a model, a pipeline stage, or a rank's part.

    Each rank reads only its own tensors.

    If a key is missing or a tensor of the model does not fit, nothing is copied. Ranks need not call this together.

    Args:
        model: a model with the config of the weights, on any device; also a result of `parallel_gpt` or
            `parallel_gpt_stages`.
        path: a folder as in `load_gpt`, or one .safetensors file.

    Returns:
        The report of loaded keys, for this stage or part. The report's `unneeded_keys` are the ignored keys: causal
            masks and rotary frequencies of older files, and a head equal to the embedding. A warning names masks and
            frequencies that differ from the values that the config determines.

    Raises:
        InputError, MissingExtraError: as in `load_gpt`.
        WeightsError: as in `load_gpt`.
        WeightsError: the head differs from the embedding although the config ties them; `config_of_files` returns the
            right config.
        ValueError: no Hugging Face model supports this config.
    """
    path = user_path(path)
    config, state, shards = model.config, model.state_dict(), shards_of(model)
    own = {ours: source for ours, source in sources(config).items() if ours in state}
    if config.tied and "embedding.tokens.weight" in own:
        own.pop("head.output.weight", None)  # the head's weight is the same tensor as the embedding's
    with TensorFiles(path) as files:
        try:
            match = matched(files.keys(), config)
            if "embedding.tokens.weight" in own or "head.output.weight" in own:
                check_tied_head(match, config, files)
            for ours, source in own.items():
                whole = _whole_shape(state[ours], shards.get(ours))
                for index, key in enumerate(source.keys):
                    check_tensor(match.given[key], files, shape_of_part(source, index, whole))
            others = differing(match, config, files)
        except WeightsError as error:
            raise WeightsError(f"{path}: {error}") from error
        for ours, source in own.items():
            for place, start in _held(state[ours], shards.get(ours)):
                _fill(place, start, source, match.given, files)
    report = LoadReport(
        path,
        "Hugging Face",
        used={ours: tuple(match.given[key] for key in source.keys) for ours, source in own.items()},
        unneeded_keys=(*match.following, *([match.tied_head] if match.tied_head else [])),
        differing_keys=tuple(others),
    )
    if others:
        warnings.warn(f"{path}: {report.differences()}", stacklevel=3)
    return report


def _whole_shape(held: Tensor, shard: Shard | None) -> tuple[int, ...]:
    """The shape of the whole tensor of which this rank holds a part.

    If the part is only padding, the first dimension is unknown and not needed.
    """
    return shard.pieces[0].box.shape if shard is not None and shard.pieces else tuple(held.shape)


def _held(held: Tensor, shard: Shard | None) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """Yield the pieces of `held`, a rank's part of a tensor, each with its start in the whole tensor. Padding in `held`
    is set to 0."""
    if shard is None:
        yield held, (0,) * held.dim()
        return
    if shard.padding:
        held[len(held) - shard.padding :] = 0
    for piece, part in shard.parts(held):
        yield part, piece.box.start


def _fill(place: Tensor, start: tuple[int, ...], source: Source, given: Mapping[str, str], files: TensorFiles) -> None:
    """Fill `place` with the part of the whole tensor whose first element has the index `start`.

    The rows of the whole tensor are those of the files' tensors that `source` lists, in order.
    """
    columns = None if place.dim() == 1 else (start[1], start[1] + place.shape[1])
    row = 0  # first row of the next file tensor in the whole tensor
    for key, rows in zip(source.keys, source.rows, strict=True):
        first, last = max(start[0], row), min(start[0] + place.shape[0], row + rows)
        if first < last:
            part = files.part(given[key], (first - row, last - row), columns, source.transposed)
            place[first - start[0] : last - start[0]].copy_(part)
        row += rows


def save_gpt(model: Gpt, folder: str | Path, *, file_bytes: int = 5 * 10**9) -> None:
    """Write a whole model in Hugging Face's format: config.json, and one safetensors file, or several with an index.

    The folder gets its name once all files are written. In addition to the model, at most one file's tensors are in
    memory. If a model is split among ranks, as by `parallel_gpt`, all ranks of one tensor parallel group must call
    this. The first rank of the group writes, and its other ranks return when the folder is complete.

    Args:
        model: the model, on any device.
        folder: a new or an empty folder.
        file_bytes: the maximum total size of a file's tensors, unless a single tensor is larger.

    Raises:
        InputError: the folder is not empty; all ranks raise this.
        WeightsError: the head differs from the embedding although the config ties them.
        TypeError, ValueError: the model is no `Gpt`, a pipeline stage or on the meta device, no Hugging Face model
            supports its config, or `file_bytes` is below 1.
        OSError: the folder cannot be written, e.g. because the disk is full. No folder is left behind.
        MissingExtraError: safetensors is not installed.
    """
    folder = user_path(folder).resolve()  # "." has no name, and a folder cannot replace a link
    if not isinstance(model, Gpt):
        raise TypeError(f"save_gpt: expected a rooftop.models.Gpt, got {type(model).__name__}")
    if type(file_bytes) is not int or file_bytes < 1:
        raise ValueError(f"save_gpt: file_bytes must be an int of at least 1, got {file_bytes!r}")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("save_gpt: the model is on the meta device, so its parameters have no values: load weights")
    if model.embedding is None or model.head is None or len(model.layers) != model.config.layers:
        raise ValueError("save_gpt: expected a whole model, got a pipeline stage")
    config = hugging_face_config(model.config) | {"dtype": str(next(model.parameters()).dtype).removeprefix("torch.")}
    writes = model.group is None or dist.get_rank(model.group) == 0
    if _on_any_rank(model, model.config.tied and not equal(model.head.output.weight, model.embedding.tokens.weight)):
        raise WeightsError(UNTIED)
    if _on_any_rank(model, writes and folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise InputError(f"{folder} already exists: give a new or empty folder")
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        if writes:
            partial.mkdir(parents=True)
        _write(model, partial, file_bytes, writes)
        if writes:
            (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            partial.replace(folder)
        if model.group is not None:
            dist.barrier(model.group)
    except (OSError, safetensors_library().SafetensorError) as error:
        raise _unwritable(folder, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # after a success this folder no longer exists


def _unwritable(folder: Path, error: Exception) -> OSError:
    """Create the error for a folder that cannot be written. The library `safetensors` raises an error of its own, with
    the number of the system's error in its text."""
    number = error.errno if isinstance(error, OSError) else None
    if found := re.search(r"\(os error (\d+)\)", str(error)):
        number = int(found[1])
    if number is None:
        return OSError(f"{folder} cannot be written: {error}")
    return OSError(number, os.strerror(number), str(folder))


def _on_any_rank(model: Gpt, said: bool) -> bool:
    """Whether `said` is True on any tensor parallel rank; all ranks get the same answer."""
    if model.group is None:
        return said
    together = torch.tensor([int(said)], device=next(model.parameters()).device)
    dist.all_reduce(together, group=model.group)
    return bool(together.item())


def _write(model: Gpt, folder: Path, file_bytes: int, writes: bool) -> None:
    save_file = safetensors_library().torch.save_file
    state, shards = model.state_dict(), shards_of(model)
    shapes = shapes_of(model.config)
    sizes = {
        key: part.numel() * state[ours].itemsize
        for ours, source in sources(model.config).items()
        if not (model.config.tied and ours == "head.output.weight")
        for key, part in zip(
            source.keys, torch.empty(shapes[ours], device="meta").split(list(source.rows)), strict=True
        )
    }
    groups: list[list[str]] = [[]]
    size = 0
    for key, bytes_of_key in sizes.items():
        size += bytes_of_key
        if groups[-1] and size > file_bytes:
            groups.append([])
            size = bytes_of_key
        groups[-1].append(key)
    count = len(groups)
    names = [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)] if count > 1 else [ONE_FILE]
    joined = _Joined(model, state, shards, shapes)
    tensors = _exported(joined, model.config)
    for name, keys in zip(names, groups, strict=True):
        contents = {}
        for expected in keys:
            key, tensor = next(tensors)
            assert key == expected
            if writes:
                contents[key] = tensor.to("cpu", memory_format=torch.contiguous_format, copy=True)
        if writes:
            save_file(contents, folder / name, metadata={"format": "pt"})
    if count > 1 and writes:
        places = {key: name for name, keys in zip(names, groups, strict=True) for key in keys}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class _Joined(Mapping[str, Tensor]):
    """The whole tensors of a model that may be split among ranks.

    Reading a tensor is a collective call that gathers it.
    """

    model: Gpt
    state: Mapping[str, Tensor]
    shards: Mapping[str, Shard]
    shapes: Mapping[str, tuple[int, ...]]

    def __getitem__(self, ours: str) -> Tensor:
        held, shard = self.state[ours].detach(), self.shards.get(ours)
        if shard is None:
            return held
        whole = held.new_zeros(self.shapes[ours])
        for piece, part in shard.parts(held):
            if piece.first:  # the other ranks hold copies
                whole[tuple(slice(a, a + n) for a, n in zip(piece.box.start, piece.box.size, strict=True))] = part
        dist.all_reduce(whole, group=self.model.group)
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self.state)

    def __len__(self) -> int:
        return len(self.state)
