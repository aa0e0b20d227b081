"""Files of a Gpt's weights are written, read by the stage that owns them, exchanged with transformers, and refused."""

from __future__ import annotations

import errno
import json
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rooftop.errors import InputError, WeightsError
from rooftop.models.gpt.configs import GptConfig
from rooftop.models.gpt.network import Gpt
from rooftop.models.gpt.weights import (
    gpt_state_dict,
    hugging_face_state_dict,
    load_gpt,
    load_gpt_weights,
    read_gpt_config,
    save_gpt,
)
from rooftop.models.weights import safetensors_files

safetensors = pytest.importorskip("safetensors.torch")

GPT = GptConfig(vocabulary=17, layers=3, width=24, heads=4, kv_heads=4, hidden=40, positions=12)
LLAMA = GptConfig(vocabulary=31, layers=3, width=24, heads=4, kv_heads=2, hidden=40, positions=12, norm="rms",
                  position="rope", activation="swiglu", biases=False, tied=False)  # fmt: skip
both = pytest.mark.parametrize("config", [GPT, LLAMA], ids=["gpt", "llama"])
TOKENS = torch.arange(24).view(2, 12) % 17


def made_up(config: GptConfig, **options: Any) -> Gpt:
    """Weights in which each element has a different value."""
    model, generator = Gpt(config, **options), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=generator)
    return model.eval()


def same(model: Gpt, other: Gpt) -> bool:
    found, expected = model.state_dict(), other.state_dict()
    return found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)


@both
@pytest.mark.parametrize("file_bytes", [10**9, 8000, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_and_loaded(config: GptConfig, file_bytes: int, dtype: torch.dtype, tmp_path: Path) -> None:
    model = made_up(config, dtype=dtype)
    save_gpt(model, tmp_path / "model", file_bytes=file_bytes)
    files = sorted((tmp_path / "model").glob("*.safetensors"))
    largest = max(sum(t.nbytes for t in safetensors.load_file(file).values()) for file in files)
    if file_bytes == 10**9:
        assert [file.name for file in files] == ["model.safetensors"]
    elif file_bytes == 8000:
        assert 2 < len(files) < 30
        assert largest <= 8000
    else:  # one tensor each
        assert len(files) == len(hugging_face_state_dict(model.state_dict(), config))
    assert read_gpt_config(tmp_path / "model") == config
    again = load_gpt(tmp_path / "model", dtype=dtype)
    assert same(again, model)
    assert (again.head.output.weight is again.embedding.tokens.weight) == config.tied
    assert list(tmp_path.iterdir()) == [tmp_path / "model"]
    assert next(load_gpt(tmp_path / "model").parameters()).dtype == torch.float32


@both
@torch.no_grad()
def test_exchanged_with_transformers(config: GptConfig, tmp_path: Path, torchvision_models: ModuleType) -> None:
    transformers = pytest.importorskip("transformers")
    model = made_up(config)
    save_gpt(model, tmp_path / "ours", file_bytes=8000)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    torch.testing.assert_close(theirs(TOKENS).logits, model(TOKENS), atol=1e-4, rtol=1e-4)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="6KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    assert same(load_gpt(tmp_path / "theirs"), model)


@both
def test_a_stage_reads_its_own_and_no_more(config: GptConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made_up(config)
    save_gpt(model, tmp_path / "model", file_bytes=8000)
    read: list[str] = []
    part = safetensors_files.TensorFiles.part
    monkeypatch.setattr(
        safetensors_files.TensorFiles, "part", lambda self, key, *where: read.append(key) or part(self, key, *where)
    )
    load_gpt_weights(Gpt(config), tmp_path / "model")
    assert len(read) == len(set(read)) == len(hugging_face_state_dict(model.state_dict(), config))
    read.clear()
    stage = Gpt(config, layers=range(1, 2), pre_process=False, post_process=False)
    load_gpt_weights(stage, tmp_path / "model")
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in stage.state_dict().items())
    assert all(".1." in key for key in read)
    assert len(read) == len(set(read)) == (12 if config is GPT else 9)
    read.clear()
    last = Gpt(config, layers=range(0), pre_process=False)
    load_gpt_weights(last, tmp_path / "model")
    assert torch.equal(last.head.output.weight, model.head.output.weight)
    assert len(read) == (3 if config is GPT else 2)


MASK = torch.ones(12, 12, dtype=torch.bool).tril()[None, None]
FREQUENCIES = torch.tensor([1, 1e4 ** (-1 / 3), 1e4 ** (-2 / 3)])
OLDER = {
    "a mask": (GPT, "h.0.attn.bias", MASK),
    "a mask of bytes": (GPT, "h.2.attn.bias", MASK.to(torch.uint8)),
    "what is hidden": (GPT, "h.1.attn.masked_bias", torch.tensor(-1e4)),
    "frequencies": (replace(LLAMA, tied=True), "model.layers.0.self_attn.rotary_emb.inv_freq", FREQUENCIES),
}


@pytest.mark.parametrize("what", OLDER)
def test_keys_of_older_files(what: str, tmp_path: Path) -> None:
    """Keys of a GPT-2 without a head and with causal masks, of a Llama with frequencies, and with a tied head."""
    config, key, tensor = OLDER[what]
    model = made_up(config)
    theirs = hugging_face_state_dict(model.state_dict(), config)
    short = {key.removeprefix("transformer."): value.contiguous().clone() for key, value in theirs.items()}
    short |= {key: tensor.clone(), "lm_head.weight": model.head.output.weight.detach().clone()}
    found = gpt_state_dict(short, config)
    assert all(torch.equal(found[key], value) for key, value in model.state_dict().items())
    safetensors.save_file(short, tmp_path / "one.safetensors")
    other = Gpt(config)
    report = load_gpt_weights(other, tmp_path / "one.safetensors")
    assert same(other, model)
    assert set(report.unneeded_keys) == {key, "lm_head.weight"}
    assert "2 of the file are not needed" in str(report)
    wrong = short | {key: -tensor if tensor.is_floating_point() else ~tensor}
    safetensors.save_file(wrong, tmp_path / "wrong.safetensors")
    with pytest.warns(UserWarning, match=f"{key} is not loaded: the model computes it from the config"):
        gpt_state_dict(wrong, config)
    with pytest.warns(UserWarning, match=rf"wrong\.safetensors: {key} of the file are left out"):
        report = load_gpt_weights(other, tmp_path / "wrong.safetensors")
    assert report.differing_keys == (key,)


# ---- a head that the config ties -----------------------------------------------------------------------------------

TIED = [GPT, replace(LLAMA, tied=True)]
tied = pytest.mark.parametrize("config", TIED, ids=["gpt", "llama"])
EMBEDDING = {GPT: "transformer.wte.weight", TIED[1]: "model.embed_tokens.weight"}


def folder_with(
    changes: Callable[[dict[str, Tensor]], None], config: GptConfig, folder: Path, size: int = 8000
) -> Path:
    """A folder of a saved tied model with changed tensors. If there are several files, the index is unchanged."""
    save_gpt(made_up(config), folder, file_bytes=size)
    last = sorted(folder.glob("*.safetensors"))[-1]
    tensors = safetensors.load_file(last)
    changes(tensors)
    safetensors.save_file(tensors, last, metadata={"format": "pt"})
    return folder


@tied
@pytest.mark.parametrize("size", [10**9, 8000])
@torch.no_grad()
def test_another_head_than_the_embedding_is_kept(
    config: GptConfig, size: int, tmp_path: Path, torchvision_models: ModuleType
) -> None:
    transformers = pytest.importorskip("transformers")
    head = torch.randn(config.vocabulary, config.width, generator=torch.Generator().manual_seed(1))
    folder = folder_with(lambda tensors: tensors.update({"lm_head.weight": head}), config, tmp_path / "model", size)
    assert read_gpt_config(folder).tied
    model = load_gpt(folder).eval()
    assert not model.config.tied
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    torch.testing.assert_close(model(TOKENS), theirs(TOKENS).logits, atol=1e-4, rtol=1e-4)
    save_gpt(model, tmp_path / "again")
    assert same(load_gpt(tmp_path / "again"), model)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
    assert torch.equal(again(TOKENS).logits, theirs(TOKENS).logits)
    for stage in (Gpt(config), Gpt(config, layers=range(1)), Gpt(config, layers=range(0), pre_process=False)):
        before = {key: value.clone() for key, value in stage.state_dict().items()}
        if stage.embedding is not None or stage.head is not None:
            with pytest.raises(WeightsError, match=r"lm_head.weight differs from the embedding.*tied=False"):
                load_gpt_weights(stage, folder)
        assert all(torch.equal(value, before[key]) for key, value in stage.state_dict().items())
    untied = gpt_state_dict(theirs.state_dict(), replace(config, tied=False))
    assert all(torch.equal(untied[key], value) for key, value in model.state_dict().items())
    with pytest.raises(WeightsError, match=r"lm_head.weight differs from the embedding.*tied=False"):
        gpt_state_dict(theirs.state_dict(), config)


@tied
@torch.no_grad()
def test_a_tied_weight_under_the_heads_name_alone(
    config: GptConfig, tmp_path: Path, torchvision_models: ModuleType
) -> None:
    transformers = pytest.importorskip("transformers")

    def rename(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors.pop(EMBEDDING[config])

    folder = folder_with(rename, config, tmp_path / "model", 10**9)
    model = load_gpt(folder).eval()
    assert model.config.tied
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    torch.testing.assert_close(model(TOKENS), theirs(TOKENS).logits, atol=1e-4, rtol=1e-4)


@tied
def test_heads_of_tied_models_that_do_not_fit(config: GptConfig, tmp_path: Path) -> None:
    head = torch.ones(config.vocabulary + 1, config.width)
    folder = folder_with(lambda tensors: tensors.update({"lm_head.weight": head}), config, tmp_path / "model")
    with pytest.raises(WeightsError, match=rf"lm_head.weight has shape \({config.vocabulary + 1}, 24\)"):
        load_gpt(folder)
    model = made_up(config)
    state = model.state_dict()
    two = state | {"head.output.weight": state["head.output.weight"] + 1}
    with pytest.raises(WeightsError, match="the config ties them"):
        hugging_face_state_dict(two, config)
    other = Gpt(config)
    before = {key: value.clone() for key, value in other.state_dict().items()}
    with pytest.raises(WeightsError, match="but the model ties them: build it with tied=False"):
        other.load_state_dict(two)
    with pytest.raises(WeightsError, match=r"0\.head\.output\.weight differs from 0\.embedding"):
        torch.nn.Sequential(other).load_state_dict({f"0.{key}": value for key, value in two.items()})
    assert all(torch.equal(value, before[key]) for key, value in other.state_dict().items())
    other.load_state_dict(state)
    assert same(other, model)
    model.head.output.weight = torch.nn.Parameter(model.head.output.weight.detach() + 1)
    with pytest.raises(WeightsError, match="the config ties them"):
        save_gpt(model, tmp_path / "untied")
    assert not (tmp_path / "untied").exists()


def test_tensors_that_the_index_leaves_out_are_loaded_or_refused(tmp_path: Path) -> None:
    extra = {"model.extra": torch.ones(1)}
    folder = folder_with(lambda tensors: tensors.update(extra), LLAMA, tmp_path / "extra")
    with pytest.raises(WeightsError, match=r"1 unexpected: model\.extra"):
        load_gpt(folder)
    twice = {"model.embed_tokens.weight": torch.ones(31, 24)}
    folder = folder_with(lambda tensors: tensors.update(twice), LLAMA, tmp_path / "twice")
    with pytest.raises(WeightsError, match=r"both have model\.embed_tokens\.weight"):
        load_gpt(folder)


Tensors = dict[str, Tensor]


def _without(tensors: Tensors) -> Tensors:
    return {key: value for key, value in tensors.items() if "layers.2.mlp.up_proj" not in key}


WRONG: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "missing": (_without, "1 missing: model.layers.2.mlp.up_proj.weight"),
    "unexpected": (lambda t: t | {"model.extra": torch.ones(1)}, "1 unexpected: model.extra"),
    "twice": (lambda t: t | {"norm.weight": torch.ones(24)}, "both stand for model.norm.weight"),
    "shape": (lambda t: t | {"lm_head.weight": torch.ones(32, 24)}, r"lm_head.weight has shape \(32, 24\)"),
    "part": (
        lambda t: t | {"model.layers.0.self_attn.k_proj.weight": torch.ones(24, 24)},
        r"k_proj.weight has shape \(24, 24\), the config expects \(12, 24\)",
    ),
    "quantized": (
        lambda t: t | {"model.norm.weight": torch.ones(24, dtype=torch.int8)},
        "model.norm.weight holds integers or 8-bit floats",
    ),
    "in eight bits": (
        lambda t: t | {"model.norm.weight": torch.ones(24, dtype=torch.float8_e4m3fn)},
        "model.norm.weight holds integers or 8-bit floats",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_tensors_that_do_not_fit(what: str, tmp_path: Path) -> None:
    change, message = WRONG[what]
    tensors = change({k: v.clone() for k, v in hugging_face_state_dict(made_up(LLAMA).state_dict(), LLAMA).items()})
    with pytest.raises(WeightsError, match=message):
        gpt_state_dict(tensors, LLAMA)
    safetensors.save_file(tensors, tmp_path / "wrong.safetensors")
    model, untouched = Gpt(LLAMA), Gpt(LLAMA)
    untouched.load_state_dict(model.state_dict())
    with pytest.raises(WeightsError, match=message) as caught:
        load_gpt_weights(model, tmp_path / "wrong.safetensors")
    assert str(tmp_path / "wrong.safetensors") in str(caught.value)
    assert same(model, untouched)  # nothing is copied unless all tensors fit


def test_a_folder_may_be_in_the_home_folder_or_behind_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    model = made_up(LLAMA)
    save_gpt(model, "~/model")
    assert same(load_gpt("~/model"), model)
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    save_gpt(model, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert same(load_gpt(tmp_path / "empty"), model)


def test_a_state_dict_of_another_config() -> None:
    with pytest.raises(WeightsError, match=r"embedding\.tokens\.weight has 31 rows, the config expects 30"):
        hugging_face_state_dict(made_up(LLAMA).state_dict(), replace(LLAMA, vocabulary=30))


def test_folders_that_cannot_be_read(tmp_path: Path) -> None:
    model = made_up(LLAMA)
    with pytest.raises(InputError, match=r"config\.json does not exist"):
        load_gpt(tmp_path)
    with pytest.raises(InputError, match=r"is not a \.safetensors file, nor a folder"):
        load_gpt_weights(model, tmp_path / "nowhere")
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"pytorch_model\.bin is pickled, so save the model as safetensors: from_pre"):
        load_gpt_weights(model, tmp_path)
    with pytest.raises(WeightsError, match=r"it is pickled, so save the model as safetensors: from_pretrained"):
        load_gpt_weights(model, tmp_path / "pytorch_model.bin")
    save_gpt(model, tmp_path / "model", file_bytes=8000)
    second = sorted((tmp_path / "model").glob("*.safetensors"))[1]
    content = second.read_bytes()
    second.write_bytes(content[:100])
    with pytest.raises(WeightsError, match=f"{second.name} is damaged"):
        load_gpt(tmp_path / "model")
    second.unlink()
    with pytest.raises(InputError, match=f"lacks {second.name}"):
        load_gpt(tmp_path / "model")
    second.write_bytes(sorted((tmp_path / "model").glob("*.safetensors"))[0].read_bytes())
    with pytest.raises(WeightsError, match="do not belong together"):
        load_gpt(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(WeightsError, match="has no weight_map"):
        load_gpt(tmp_path / "model")
    for text, message in (("{", "cannot be read as JSON"), ("[]", "holds a list"), ("{}", "model_type None")):
        (tmp_path / "model" / "config.json").write_text(text)
        with pytest.raises(WeightsError, match=message):
            load_gpt(tmp_path / "model")


def test_what_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note").write_text("mine")
    with pytest.raises(InputError, match="already exists"):
        save_gpt(made_up(GPT), tmp_path / "full")
    with pytest.raises(ValueError, match="expected a whole model, got a pipeline stage"):
        save_gpt(Gpt(GPT, pre_process=False), tmp_path / "stage")
    with pytest.raises(WeightsError, match=r"has no embedding\.tokens\.weight"):
        hugging_face_state_dict(Gpt(GPT, pre_process=False).state_dict(), GPT)

    def fails(*_: object, **__: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(safetensors, "save_file", fails)
    with pytest.raises(OSError, match=r"new cannot be written: no space left"):
        save_gpt(made_up(GPT), tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_a_full_disk_is_an_error_of_the_system(tmp_path: Path) -> None:
    """The library safetensors raises an error of its own, which does not name the file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: '.*new'") as failure:
            save_gpt(made_up(GPT), tmp_path / "new")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert failure.value.errno == errno.EFBIG
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("model", "file_bytes", "error", "message"),
    [
        (nn.Linear(2, 2), 1, TypeError, r"expected a rooftop\.models\.Gpt, got Linear"),
        (Gpt(GPT, device="meta"), 1, ValueError, "is on the meta device"),
        (Gpt(GPT, device="meta"), 0, ValueError, "file_bytes must be an int of at least 1, got 0"),
    ],
)
def test_wrong_calls_of_save(model: Any, file_bytes: int, error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        save_gpt(model, tmp_path / "new", file_bytes=file_bytes)


@pytest.mark.parametrize("dtype", ["bfloat16", torch.int32, torch.float8_e4m3fn, torch.complex64], ids=str)
def test_dtypes_that_no_model_has(dtype: Any, tmp_path: Path) -> None:
    """Copied to such a dtype, weights would lose almost all of their digits."""
    save_gpt(made_up(GPT), tmp_path / "model")
    with pytest.raises(TypeError, match=r"dtype must be one of .*, got"):
        load_gpt(tmp_path / "model", dtype=dtype)


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    save_gpt(made_up(GPT), tmp_path / "model")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "float32"
    assert same(load_gpt(tmp_path / "model"), made_up(GPT))
