"""Find a model's weights in a checkpoint: the state dict, its averages (EMA, SWA), and the prefixes of its keys.

    found = weights_in(torch.load("checkpoint.pth"))
    found.tensors          # by the model's keys
    found.taken            # "state_dict_ema (averaged weights)"

| saved by | contents of the file | weights that are loaded |
|---|---|---|
| `torch.save(model.state_dict(), path)` | tensors | these tensors |
| scripts | tensors under `state_dict`, `model` or another key of `PLAIN` | these tensors |
| timm, variants of DETR, YOLO | also averages under `state_dict_ema`, `model_ema` or `ema` | the averages |
| `AveragedModel` of torch.optim.swa_utils | `n_averaged`, and keys with the prefix `module.` | the averages |
| Lightning | `state_dict`, keys with the model's attribute as prefix, e.g. `model.` | the weights of that model |
| Lightning's `WeightAveraging` | averages in `state_dict`, weights in `current_model_state` | the averages |
| callbacks of Lightning | `state_dict`, and averages in the state of a callback, under `callbacks` | the averages |
| ema_pytorch | `online_model.` and `ema_model.` under one key | the averages |

Prefixes and infixes that `DataParallel`, `torch.compile`, FSDP and activation checkpointing add to keys are removed in
any order. A file with several models raises an error that names them: choose one with `part`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rooftop.errors import WeightsError
from rooftop.models.weights.dialects import DETR, HYBRID, NEXT_FRAME, RESNET, SWIN

PLAIN = ("state_dict", "model", "model_state_dict", "module", "net", "network", "current_model_state")
"""Keys under which scripts save the state dict of a model."""

AVERAGED = re.compile(r"(^|[_./])(ema|swa|averaged?|avg|polyak|shadow)([_./]|$)", re.IGNORECASE)
"""Matches keys that name averages of weights: exponential moving averages (EMA) or stochastic weight averages (SWA)."""

ONLINE = "online_model."
"""ema_pytorch's prefix for the trained weights, which it stores next to the averaged weights."""

COUNT = "n_averaged"
"""The key under which `AveragedModel` stores how many states of the model it has averaged."""

WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""Texts that DataParallel, `torch.compile`, FSDP and activation checkpointing insert into the keys of a model."""

SIGNS = (
    *(dialect.sign for dialect in (*RESNET, *SWIN, *HYBRID, *DETR, *NEXT_FRAME)),
    "embedding.tokens.weight", "transformer.wte.weight", "wte.weight", "model.embed_tokens.weight",
    "embed_tokens.weight",
)  # fmt: skip
"""Keys of tensors by which Rooftop's models are recognized in a state dict, in all dialects (naming schemes of
libraries). Each model has a key that is one of these, or that ends with one of them.
"""


@dataclass(frozen=True)
class Contents:
    """The weights of one model that were found in a checkpoint file.

    Attributes:
        tensors: the model's tensors by their keys, without prefixes.
        taken: a text that names the chosen weights of the file, and says whether they are averaged.
        averaged: whether the tensors are averages over training steps.
        others: names of other weights in the file, as values for `part`.
    """

    tensors: dict[str, Tensor]
    taken: str
    averaged: bool = False
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Candidate:
    name: str  # position of the model in the file: the path of keys, and the prefix
    tensors: dict[str, Tensor]
    averaged: bool


def weights_in(content: Any, part: str | None = None) -> Contents:
    """Find the weights of one model in the contents of a checkpoint file.

    If a file has weights and their averages, the averages are returned, because training evaluates with them.

    Args:
        content: the result of `torch.load`.
        part: which weights of the file to return: a name in `Contents.others`, or a name that an error message lists.
            None: the only model, or its averages.

    Raises:
        WeightsError: there are no weights, several models, several averages, no such part, or two tensors for one key.
    """
    candidates = [each for found in _state_dicts(content) for each in _models_in(found)]
    if not candidates:
        raise WeightsError(f"holds {_named(content)}: expected what torch.save(model.state_dict(), path) writes")
    chosen = candidates
    if part is not None:
        chosen = [each for each in candidates if each.name == part]
        if not chosen:
            names = ", ".join(repr(each.name) for each in candidates)
            raise WeightsError(f"has no part {part!r}: expected one of {names}")
    elif any(each.averaged for each in candidates):
        chosen = [each for each in candidates if each.averaged]
    elif (nameless := next(_nameless_averages(content), None)) is not None:
        raise WeightsError(
            f"holds averaged weights as a list under {nameless}, without the names of the parameters: choose other "
            f"weights by part={candidates[0].name!r}, or save the model that has the averages"
        )
    if len(chosen) > 1:
        names = ", ".join(f"{each.name!r} ({len(each.tensors)} tensors)" for each in chosen)
        raise WeightsError(
            f"holds the weights of several models, {names}: choose one by part=, or save only the model that you want"
        )
    found = chosen[0]
    words = f"averaged weights{_count(found)}" if found.averaged else "weights, not averaged"
    taken = f"{found.name or 'all tensors'} ({words})"
    others = tuple(each.name for each in candidates if each is not found)
    tensors = {key: value for key, value in found.tensors.items() if not (found.averaged and key == COUNT)}
    return Contents(tensors, taken, found.averaged, others)


def _count(candidate: _Candidate) -> str:
    count = candidate.tensors.get(COUNT)
    return f" of {int(count)} steps" if count is not None and count.numel() == 1 else ""


def _named(content: Any) -> str:
    return ", ".join(map(str, list(content)[:5])) if isinstance(content, Mapping) else type(content).__name__


# ---- where state dicts are -----------------------------------------------------------------------------------------


def _state_dicts(content: Any, path: tuple[str, ...] = ()) -> Iterator[_Candidate]:
    """Find the state dicts in the contents of a checkpoint file. Yield each with a name: the keys that lead to it,
    joined by "/". `path` has the keys that lead to `content`."""
    if not isinstance(content, Mapping) or len(path) > 3:
        return
    if all(isinstance(key, str) and isinstance(value, Tensor) for key, value in content.items()):
        if content or not path:
            name = "/".join(path)
            yield _Candidate(name, dict(content), AVERAGED.search(name) is not None)
        return
    lightnings = {"averaging_state", "current_model_state"} <= set(content)
    callbacks = content.get("callbacks") if not path else None
    for name, state in callbacks.items() if isinstance(callbacks, Mapping) else ():
        for found in _state_dicts(state, ("callbacks", str(name))):
            if found.averaged and _prefixes(found.tensors):
                yield found
    for key, value in content.items():
        if not isinstance(key, str) or not (key in PLAIN or AVERAGED.search(key)) or key == "averaging_state":
            continue
        for found in _state_dicts(value, (*path, key)):
            averaged = found.averaged or (lightnings and key == "state_dict")
            yield _Candidate(found.name, found.tensors, averaged)


def _nameless_averages(content: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the path (the keys that lead to it, joined by "/") of each list of averaged tensors. Such lists, which
    torch_ema saves, lack the names of the tensors."""
    if not isinstance(content, Mapping) or len(path) > 3:
        return
    for key, value in content.items():
        here = (*path, str(key))
        if isinstance(value, (list, tuple)) and value and all(isinstance(each, Tensor) for each in value):
            if AVERAGED.search("/".join(here)):
                yield "/".join(here)
        elif path or AVERAGED.search(str(key)):
            yield from _nameless_averages(value, here)


# ---- prefixes ------------------------------------------------------------------------------------------------------


def _models_in(found: _Candidate) -> Iterator[_Candidate]:
    """Split a state dict into the models that it contains, by the prefixes of its keys. The prefixes are removed."""
    tensors = _unwrapped(found.tensors)
    prefixes = _prefixes(tensors)
    averaged = found.averaged or COUNT in tensors
    counts = [key for key in tensors if key == COUNT or key.endswith(f".{COUNT}")]
    if prefixes in ([], [""]):
        yield _Candidate(found.name, tensors, averaged)
        return
    for prefix in prefixes:
        own = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        if len(prefixes) == 1:  # all other keys also belong to the only model, and must not be lost
            others = {key: value for key, value in tensors.items() if not key.startswith(prefix)}
            own |= {key: value for key, value in others.items() if key not in own}
        # keys of `n_averaged` of each AveragedModel around this model
        around = [key for key in counts if prefix.startswith(key.removesuffix(COUNT))]
        if around:
            own = {key: value for key, value in own.items() if key not in around} | {COUNT: tensors[around[-1]]}
        mine = COUNT in own or AVERAGED.search(prefix) is not None or (averaged and not prefix.endswith(ONLINE))
        yield _Candidate(f"{found.name}/{prefix}" if found.name else prefix, own, mine)


def _unwrapped(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Remove from the keys the prefixes and infixes that wrappers (`WRAPPERS`) have added.

    Raises:
        WeightsError: two tensors have the same key after the removal.
    """
    keys = {key: key for key in tensors}
    while rest := [key for key in keys.values() if key != COUNT]:
        wrapper = next((each for each in WRAPPERS if all(key.startswith(each) for key in rest)), None)
        if wrapper is None:
            break
        keys = {key: now.removeprefix(wrapper) if now != COUNT else now for key, now in keys.items()}
    found: dict[str, str] = {}
    for key, now in keys.items():
        first, *inner = now.split(".")
        name = ".".join([first, *(each for each in inner[:-1] if f"{each}." not in WRAPPERS), *inner[-1:]])
        if name in found and name.rpartition(".")[2] != COUNT:  # averaged models may be nested, each with a counter
            raise WeightsError(f"has {found[name]} and {key}, which both mean {name}: save only one of them")
        found.setdefault(name, key)
    return {name: tensors[key] for name, key in found.items()}


def _prefixes(tensors: Mapping[str, Tensor]) -> list[str]:
    """Find the prefix of each model's keys in a state dict with one or several models.

    Each model has a tensor whose key ends with one of the `SIGNS` (keys by which Rooftop's models are recognized). The
    text before the sign is the model's prefix; "" if there is none. A prefix that begins with a shorter prefix is left
    out.
    """
    ends = [key.removesuffix(sign) for sign in SIGNS for key in tensors if key == sign or key.endswith(f".{sign}")]
    shortest: list[str] = []
    for prefix in sorted(set(ends), key=lambda each: (len(each), each)):
        if not any(prefix.startswith(each) for each in shortest):
            shortest.append(prefix)
    return shortest
