"""Weights of Hugging Face's GPT-2 and Llama in a `Gpt`, and back.

    model = load_gpt("Llama-2-7b-hf/")     # config.json and *.safetensors
    save_gpt(model, "mine/")               # which transformers' from_pretrained reads

Theirs and ours differ in what is packed and what is transposed: GPT-2's matrices are (in, out) there; Llama keeps
queries, keys and values apart, and gate and up; ours lie one after another in the rows of one matrix. Rotary pairs are
(i, i + D / 2) in both, so that nothing is reordered. A tied head has no tensor of its own in a file.

Files are read and written one tensor at a time, straight into parameters: a model, or a stage of one, is never there
twice. Of a tensor that is split among ranks, each reads its own rows and columns alone; to write, ranks join one file's
tensors at a time. Source of the names: transformers 4 and 5, `modeling_gpt2.py` and `modeling_llama.py`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rooftop.errors import InputError, MissingExtraError, WeightsError
from rooftop.models.gpt import Gpt
from rooftop.models.gpt_configs import GptConfig, config_of, hugging_face_config, hugging_face_kind
from rooftop.parallel import Shard, shards_of

# ---- the names -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """What one of our tensors is made of.

    Attributes:
        keys: theirs, of the tensors that lie one after another in its rows.
        rows: of each.
        transposed: whether theirs are (in, out).
    """

    keys: tuple[str, ...]
    rows: tuple[int, ...]
    transposed: bool = False


OUTSIDE = {
    "gpt2": {
        "embedding.tokens": "transformer.wte",
        "embedding.positions": "transformer.wpe",
        "head.norm": "transformer.ln_f",
        "head.output": "lm_head",
    },
    "llama": {
        "embedding.tokens": "model.embed_tokens",
        "head.norm": "model.norm",
        "head.output": "lm_head",
    },
}
"""Our modules and theirs, outside of the layers."""

LAYER: dict[str, dict[str, tuple[str, ...]]] = {
    "gpt2": {
        "attention_norm": ("ln_1",),
        "attention.qkv": ("attn.c_attn",),
        "attention.out": ("attn.c_proj",),
        "mlp_norm": ("ln_2",),
        "mlp.up": ("mlp.c_fc",),
        "mlp.down": ("mlp.c_proj",),
    },
    "llama": {
        "attention_norm": ("input_layernorm",),
        "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.out": ("self_attn.o_proj",),
        "mlp_norm": ("post_attention_layernorm",),
        "mlp.up": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.down": ("mlp.down_proj",),
    },
}
"""The same within one."""

LAYERS = {"gpt2": "transformer.h", "llama": "model.layers"}
"""What is before the number of a layer."""

UNNEEDED = re.compile(r"\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$")
"""Keys of older files: causal masks and the frequencies of rotary embeddings, which follow from the config."""


def sources(config: GptConfig) -> dict[str, Source]:
    """Our key -> what it is made of, of the whole model.

    Raises:
        ValueError: neither a GPT-2 nor a Llama.
    """
    kind = hugging_face_kind(config)
    found = {}
    for ours, theirs in OUTSIDE[kind].items():
        rows = {"embedding.tokens": config.vocabulary, "embedding.positions": config.positions,
                "head.norm": config.width, "head.output": config.vocabulary}[ours]  # fmt: skip
        if ours == "head.output" and config.tied:
            theirs = OUTSIDE[kind]["embedding.tokens"]
        found[f"{ours}.weight"] = Source((f"{theirs}.weight",), (rows,))
        if ours == "head.norm" and kind == "gpt2":
            found[f"{ours}.bias"] = Source((f"{theirs}.bias",), (rows,))
    for layer in range(config.layers):
        for ours, names in LAYER[kind].items():
            keys = [f"{LAYERS[kind]}.{layer}.{name}" for name in names]
            norm = ours.endswith("norm")
            rows_of_parts = _rows(ours, config) if len(names) > 1 else (sum(_rows(ours, config)),)
            for parameter in ("weight", "bias") if kind == "gpt2" or (config.biases and not norm) else ("weight",):
                found[f"layers.{layer}.{ours}.{parameter}"] = Source(
                    tuple(f"{key}.{parameter}" for key in keys),
                    rows_of_parts,
                    transposed=kind == "gpt2" and parameter == "weight" and not norm,
                )
    return found


def _rows(ours: str, config: GptConfig) -> tuple[int, ...]:
    """Of the parts of a module in a layer."""
    if ours == "attention.qkv":
        return config.width, config.kv_width, config.kv_width
    if ours == "mlp.up":
        return (config.hidden,) * (2 if config.activation == "swiglu" else 1)
    return (config.width,)


def _matched(keys: Iterable[str], config: GptConfig) -> dict[str, str]:
    """Their name of each tensor that we need -> the key under which it was given.

    Keys may lack what a model with a head puts before them ("transformer.", "model.").

    Raises:
        WeightsError: keys are missing, unexpected or there twice.
    """
    wanted = {key for source in sources(config).values() for key in source.keys}
    prefix = LAYERS[hugging_face_kind(config)].partition(".")[0] + "."
    found: dict[str, str] = {}
    unexpected = []
    for key in keys:
        name = key if key in wanted else f"{prefix}{key}"
        if name in found:
            raise WeightsError(f"{found[name]} and {key} are both {name}")
        if name in wanted:
            found[name] = key
        elif not UNNEEDED.search(key) and not (config.tied and key == "lm_head.weight"):
            unexpected.append(key)
    missing = sorted(wanted - set(found))
    problems = [
        f"{len(names)} {kind}: {', '.join(names[:3])}{', and so on' if len(names) > 3 else ''}"
        for kind, names in (("missing", missing), ("unexpected", unexpected))
        if names
    ]
    if problems:
        raise WeightsError(f"the keys do not fit the config: {'; '.join(problems)}. Expected those of {_named(config)}")
    return found


def _named(config: GptConfig) -> str:
    kind = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM"}[hugging_face_kind(config)]
    return f"a {kind} of {config.layers} layers, {'tied' if config.tied else 'with a head of its own'}"


def _shape(source: Source, part: int, ours: tuple[int, ...]) -> tuple[int, ...]:
    """That a part has with them; `ours`: of the whole tensor."""
    shape = (source.rows[part], *ours[1:])
    return shape[::-1] if source.transposed else shape


def _shapes(config: GptConfig) -> dict[str, tuple[int, ...]]:
    """Of our tensors, the whole model's."""
    return {key: tuple(value.shape) for key, value in Gpt(config, device="meta").state_dict().items()}


# ---- in memory -----------------------------------------------------------------------------------------------------


def gpt_state_dict(tensors: Mapping[str, Tensor], config: GptConfig) -> dict[str, Tensor]:
    """The state dict of a `Gpt` made of that of a GPT2LMHeadModel or a LlamaForCausalLM.

    Also of gradients by their names, since packing and transposing do to them what they do to weights.

    Args:
        tensors: by their keys, with or without what a model with a head puts before them; a tied head may be there.
        config: which of the two it is, and the sizes.

    Raises:
        WeightsError: keys are missing or unexpected, or tensors of another shape or of whole numbers.
        ValueError: a config that is neither a GPT-2's nor a Llama's.
    """
    given, shapes = _matched(tensors, config), _shapes(config)
    result = {}
    for ours, source in sources(config).items():
        parts = [tensors[given[key]] for key in source.keys]
        for index, part in enumerate(parts):
            _check(source.keys[index], tuple(part.shape), part.is_floating_point(), _shape(source, index, shapes[ours]))
        parts = [part.T for part in parts] if source.transposed else parts
        result[ours] = torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()
    return result


def hugging_face_state_dict(tensors: Mapping[str, Tensor], config: GptConfig) -> dict[str, Tensor]:
    """The way back: of a whole `Gpt`'s state dict. A tied head is left out; what is not packed shares memory.

    Raises:
        WeightsError: a tensor of the model is missing.
        ValueError: a config that is neither a GPT-2's nor a Llama's.
    """
    return dict(_exported(tensors, config))


def _exported(tensors: Mapping[str, Tensor], config: GptConfig) -> Iterator[tuple[str, Tensor]]:
    """Their keys and tensors, views where they can be; each once."""
    for ours, source in sources(config).items():
        if config.tied and ours == "head.output.weight":
            continue
        if ours not in tensors:
            raise WeightsError(f"the state dict has no {ours}: expected that of a whole Gpt")
        whole = tensors[ours]
        for key, part in zip(source.keys, whole.split(list(source.rows)), strict=True):
            yield key, part.T if source.transposed else part


def _check(key: str, shape: tuple[int, ...], floating: bool, expected: tuple[int, ...]) -> None:
    if shape != expected:
        raise WeightsError(f"{key} is of shape {shape}, the config expects {expected}")
    if not floating:
        raise WeightsError(f"{key} holds whole numbers: quantized weights are not loaded, save them as real ones")


# ---- files ---------------------------------------------------------------------------------------------------------

ONE_FILE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
FLOATING = ("F64", "F32", "F16", "BF16")
"""What safetensors calls the dtypes that are loaded."""


def load_gpt(folder: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> Gpt:
    """A model from a folder as Hugging Face writes it: config.json, and one safetensors file or several and an index.

    Args:
        folder: with these files.
        device, dtype: of the parameters; float32 if not given, whatever the files have.

    Returns:
        In training mode.

    Raises:
        InputError: no such folder, or files are not there.
        WeightsError: damaged, of another kind of model, or tensors that do not fit the config.
        MissingExtraError: safetensors is not installed.
    """
    model = Gpt(read_gpt_config(folder), device="meta", dtype=dtype or torch.float32).to_empty(device=device)
    model.tie()
    load_gpt_weights(model, folder)
    return model


def read_gpt_config(folder: str | Path) -> GptConfig:
    """The config in a folder as Hugging Face writes it.

    Raises:
        InputError: there is no config.json.
        WeightsError: it is damaged, or not that of a model that is known here.
    """
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise InputError(f"{path} is not there: expected a folder with config.json and .safetensors files")
    try:
        return config_of(_json(path))
    except WeightsError as error:
        raise WeightsError(f"{path}: {error}") from error


@torch.no_grad()
def load_gpt_weights(model: Gpt, path: str | Path) -> None:
    """Copy weights from files into a model, a stage of one, or a rank's part, which read no more than their own.

    Nothing is copied unless all keys are there and all tensors of the model fit. Ranks need not call it together.

    Args:
        model: on any device, with the config of the weights; also as `parallel_gpt` makes it.
        path: a folder as of `load_gpt`, or one .safetensors file.

    Raises:
        InputError, WeightsError, MissingExtraError: as of `load_gpt`.
        ValueError: a config that is neither a GPT-2's nor a Llama's.
    """
    path = Path(path)
    config, state, shards = model.config, model.state_dict(), shards_of(model)
    own = {ours: source for ours, source in sources(config).items() if ours in state}
    if config.tied and "embedding.tokens.weight" in own:
        own.pop("head.output.weight", None)  # the same tensor
    with _Files(path) as files:
        try:
            given = _matched(files.keys(), config)
            for ours, source in own.items():
                whole = _whole_shape(state[ours], shards.get(ours))
                for index, key in enumerate(source.keys):
                    shape, floating = files.shape_and_kind(given[key])
                    _check(key, shape, floating, _shape(source, index, whole))
        except WeightsError as error:
            raise WeightsError(f"{path}: {error}") from error
        for ours, source in own.items():
            for place, start in _held(state[ours], shards.get(ours)):
                _fill(place, start, source, given, files)


def _whole_shape(held: Tensor, shard: Shard | None) -> tuple[int, ...]:
    """Of the tensor of which a rank holds this; its first dimension is not known where all is padding, nor needed."""
    return shard.pieces[0].box.shape if shard is not None and shard.pieces else tuple(held.shape)


def _held(held: Tensor, shard: Shard | None) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """What a rank holds of a tensor, in pieces, each with where it begins in the whole one; padding becomes 0."""
    if shard is None:
        yield held, (0,) * held.dim()
        return
    if shard.padding:
        held[len(held) - shard.padding :] = 0
    for piece, part in shard.parts(held):
        yield part, piece.box.start


def _fill(place: Tensor, start: tuple[int, ...], source: Source, given: Mapping[str, str], files: _Files) -> None:
    """Copies into a tensor what files have from `start` on, of all tensors whose rows it crosses."""
    columns = None if place.dim() == 1 else (start[1], start[1] + place.shape[1])
    row = 0  # where the next of theirs begins
    for key, rows in zip(source.keys, source.rows, strict=True):
        first, last = max(start[0], row), min(start[0] + place.shape[0], row + rows)
        if first < last:
            part = files.part(given[key], (first - row, last - row), columns, source.transposed)
            place[first - start[0] : last - start[0]].copy_(part)
        row += rows


def save_gpt(model: Gpt, folder: str | Path, *, file_bytes: int = 5 * 10**9) -> None:
    """Write a whole model as Hugging Face does: config.json, and one safetensors file or several and an index.

    The folder appears when all is written. At most one file's tensors are in memory beside the model. Of a model that
    is split among ranks, as `parallel_gpt` makes it, all tensor parallel ranks of one group call this; the first of
    them writes, and the others return when the folder is there.

    Args:
        model: on any device.
        folder: not there yet, or empty.
        file_bytes: the most that the tensors of a file take, unless one alone takes more.

    Raises:
        InputError: the folder has something in it; on all ranks.
        ValueError: a stage, or a model that is neither a GPT-2 nor a Llama.
        MissingExtraError: safetensors is not installed.
    """
    folder = Path(folder)
    if model.embedding is None or model.head is None or len(model.layers) != model.config.layers:
        raise ValueError("save_gpt: expected a whole model, got a stage")
    config = hugging_face_config(model.config) | {"dtype": str(next(model.parameters()).dtype).removeprefix("torch.")}
    writes = model.group is None or dist.get_rank(model.group) == 0
    _agreed(model, folder.exists() and (not folder.is_dir() or any(folder.iterdir())) if writes else False, folder)
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
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # which is gone if all went well


def _agreed(model: Gpt, taken: bool, folder: Path) -> None:
    """Raises on all ranks where the folder is taken on the one that writes."""
    if model.group is not None:
        said = torch.tensor([int(taken)], device=next(model.parameters()).device)
        dist.all_reduce(said, group=model.group)
        taken = bool(said.item())
    if taken:
        raise InputError(f"{folder} is there already: give a new folder, or an empty one")


def _write(model: Gpt, folder: Path, file_bytes: int, writes: bool) -> None:
    save_file = _safetensors().torch.save_file
    state, shards = model.state_dict(), shards_of(model)
    shapes = _shapes(model.config)
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
    """The whole tensors of a model, of which ranks may hold parts: joined when they are asked for, by all ranks."""

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
            if piece.first:  # others hold the same
                whole[tuple(slice(a, a + n) for a, n in zip(piece.box.start, piece.box.size, strict=True))] = part
        dist.all_reduce(whole, group=self.model.group)
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self.state)

    def __len__(self) -> int:
        return len(self.state)


class _Files:
    """The tensors of one safetensors file or of those of an index, read one at a time."""

    def __init__(self, path: Path) -> None:
        self._open = _safetensors().safe_open
        self._error = _safetensors().SafetensorError
        self._opened: dict[Path, Any] = {}
        self._places = self._found(path)

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._opened.values():
            file.__exit__(None, None, None)

    def keys(self) -> tuple[str, ...]:
        """Of all files."""
        return tuple(self._places)

    def shape_and_kind(self, key: str) -> tuple[tuple[int, ...], bool]:
        """Of a tensor, and whether it holds real numbers; without reading it."""
        view = self._file(self._places[key]).get_slice(key)
        return tuple(view.get_shape()), view.get_dtype() in FLOATING

    def part(self, key: str, rows: tuple[int, int], columns: tuple[int, int] | None, transposed: bool) -> Tensor:
        """Rows and columns of a tensor, from and to, on the CPU; of one that is transposed, as if it were not."""
        view = self._file(self._places[key]).get_slice(key)
        if columns is None:
            found: Tensor = view[slice(*rows)]
        elif transposed:
            found = view[slice(*columns), slice(*rows)].T
        else:
            found = view[slice(*rows), slice(*columns)]
        return found

    def _found(self, path: Path) -> dict[str, Path]:
        """Key -> file."""
        if (path / ONE_FILE).is_file() or path.is_file():
            file = path if path.is_file() else path / ONE_FILE
            return dict.fromkeys(self._file(file).keys(), file)
        if not (path / INDEX).is_file():
            raise InputError(f"{path} is no .safetensors file, nor a folder with {ONE_FILE} or {INDEX}")
        index = _json(path / INDEX).get("weight_map")
        if not isinstance(index, dict) or not index:
            raise WeightsError(f"{path / INDEX} has no weight_map: expected an index as transformers writes it")
        places = {key: path / Path(str(name)).name for key, name in index.items()}
        if absent := sorted({file.name for file in places.values() if not file.is_file()}):
            raise InputError(f"{path} lacks {', '.join(absent[:3])}, which {INDEX} names: download all files")
        held = {file: set(self._file(file).keys()) for file in set(places.values())}
        for key, file in places.items():
            if key not in held[file]:
                raise WeightsError(f"{file} has no {key}, which {INDEX} says it has: the files do not belong together")
        return places

    def _file(self, path: Path) -> Any:
        if path not in self._opened:
            try:
                self._opened[path] = self._open(path, framework="pt", device="cpu").__enter__()
            except (self._error, OSError) as error:
                raise WeightsError(f"{path} is damaged or no safetensors file ({error})") from error
        return self._opened[path]


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise WeightsError(f"{path} holds a {type(content).__name__}: expected an object")
    return content


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise MissingExtraError('.safetensors files need safetensors: pip install "rooftop[weights]"') from error
    return safetensors
