"""Weights of Hugging Face in a model that is split among ranks, and back. Each rank reads only its own part, the
results are those of transformers, and the ranks together write the same files as one process."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rooftop.models.gpt import weights as gpt_weights
from rooftop.models.gpt.configs import GptConfig
from rooftop.models.gpt.layouts import parallel_gpt
from rooftop.models.gpt.network import Gpt
from rooftop.models.gpt.weights import load_gpt, load_gpt_weights, save_gpt
from rooftop.models.weights import safetensors_files
from rooftop.parallel import Layout, shards_of

pytest.importorskip("safetensors.torch")

Run = Callable[..., list[Any]]

GPT = GptConfig(vocabulary=17, layers=2, width=24, heads=4, kv_heads=4, hidden=40, positions=12)
LLAMA = GptConfig(vocabulary=31, layers=2, width=24, heads=4, kv_heads=2, hidden=40, positions=12, norm="rms",
                  position="rope", activation="swiglu", biases=False, tied=False)  # fmt: skip
CONFIGS = {"gpt": GPT, "llama": LLAMA}
LAYOUTS = {2: [Layout(1, 2)], 4: [Layout(1, 4), Layout(2, 2, sequence_parallel=True)]}
TOKENS = torch.arange(24).view(2, 12) % 17


def written(folder: Path, kind: str) -> Path:
    """A folder in several files, written by transformers, of a model in which every weight has a different value."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = Gpt(CONFIGS[kind]).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    save_gpt(model, folder / "ours")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "ours")
    theirs.save_pretrained(folder / "theirs", max_shard_size="8KB")
    return folder / "theirs"


def exchanged(kind: str, layout: Layout, source: Path, target: Path) -> tuple[int, int, torch.Tensor]:
    """The numbers of elements that this rank read and holds, and the logits. The first data rank's group writes the
    weights."""
    groups = layout.process_groups()
    model = parallel_gpt(CONFIGS[kind], layout, groups, seed=5).eval()
    read = 0
    part = safetensors_files.TensorFiles.part

    def counted(self: Any, *where: Any) -> torch.Tensor:
        nonlocal read
        found = part(self, *where)
        read += found.numel()
        return found

    safetensors_files.TensorFiles.part = counted  # type: ignore[method-assign]
    try:
        load_gpt_weights(model, source)
    finally:
        safetensors_files.TensorFiles.part = part  # type: ignore[method-assign]
    shards, state = shards_of(model), model.state_dict()
    held = {
        value.data_ptr(): sum(prod(piece.box.size) for piece in shards[name].pieces)
        if name in shards
        else value.numel()
        for name, value in state.items()
    }
    if layout.coordinates(dist.get_rank())["dp"] == 0:
        save_gpt(model, target, file_bytes=4000)
        with pytest.raises(gpt_weights.InputError, match="already exists"):
            save_gpt(model, target)
    dist.barrier()
    with torch.no_grad():
        logits = model(TOKENS)
    return read, sum(held.values()), logits


@pytest.mark.parametrize("world", LAYOUTS)
@pytest.mark.parametrize("kind", CONFIGS)
def test_in_any_layout_what_transformers_has(
    kind: str, world: int, on_ranks: Run, tmp_path: Path, torchvision_models: ModuleType
) -> None:
    transformers = pytest.importorskip("transformers")
    source = written(tmp_path, kind)
    with torch.no_grad():
        expected = transformers.AutoModelForCausalLM.from_pretrained(source).eval()(TOKENS).logits
    whole = load_gpt(source)
    for number, layout in enumerate(LAYOUTS[world]):
        target = tmp_path / f"split{number}"
        for read, held, logits in on_ranks(world, exchanged, kind, layout, source, target):
            assert read == held  # a rank reads its own part once
            torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        again = load_gpt(target).state_dict()
        assert again.keys() == whole.state_dict().keys()
        assert all(torch.equal(value, again[name]) for name, value in whole.state_dict().items())
        back = transformers.AutoModelForCausalLM.from_pretrained(target).eval()
        with torch.no_grad():
            torch.testing.assert_close(back(TOKENS).logits, expected, rtol=0, atol=0)


def refused(kind: str, source: Path) -> str:
    layout = Layout(1, 2)
    model = parallel_gpt(CONFIGS[kind], layout, seed=5)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        load_gpt_weights(model, source)
    except gpt_weights.WeightsError as error:
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        return str(error)
    return "nothing"


def test_weights_of_another_size_are_refused_on_every_rank(
    on_ranks: Run, tmp_path: Path, torchvision_models: ModuleType
) -> None:
    source = written(tmp_path, "gpt")
    for said in on_ranks(2, refused, "llama", source):
        assert "the keys do not fit the config" in said
