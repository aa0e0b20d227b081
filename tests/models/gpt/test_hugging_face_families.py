"""Folders of Llama, Mistral, Qwen2 and Qwen3, written by transformers, give transformers' logits, gradients and greedy
text."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from rooftop.errors import WeightsError
from rooftop.models import Gpt, generate, load_gpt, save_gpt
from rooftop.models.gpt.blocks import rotary_frequencies
from rooftop.models.gpt.configs import config_of
from rooftop.models.gpt.generation import Generation
from rooftop.models.gpt.sampling import Sampling
from rooftop.models.gpt.weights import gpt_state_dict

pytest.importorskip("safetensors")

SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5}  # fmt: skip
LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 32}  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"
WINDOWS = {"use_sliding_window": True, "sliding_window": 5}

FOLDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 3": ("Llama", {"rope_parameters": LLAMA_3 | {"rope_theta": 500.0}}),
    "llama 3, old": ("Llama", {"rope_scaling": LLAMA_3, "rope_theta": 500.0}),
    "linear scaling": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}}),
    "linear scaling, old": ("Llama", {"rope_scaling": {"type": "linear", "factor": 3.0}}),
    "biases of attention": ("Llama", {"attention_bias": True}),
    "biases of the MLP": ("Llama", {"mlp_bias": True}),
    "narrow heads": ("Llama", {"head_dim": 4, "attention_bias": True, "mlp_bias": True}),
    "wide heads": ("Llama", {"head_dim": 12, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": 7}),
    "mistral, its own position": ("Mistral", {"sliding_window": 1, "head_dim": 10}),
    "mistral, no window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2, windows": ("Qwen2", {**WINDOWS, "max_window_layers": 2, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3, all": ("Qwen3", {"head_dim": 6, "attention_bias": True, **WINDOWS,
                             "layer_types": [FULL, SLIDING, SLIDING, FULL]}),
}  # fmt: skip
every = pytest.mark.parametrize("what", FOLDERS)
TOKENS = torch.randint(61, (2, 40), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def folders(torchvision_models: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """family -> (transformers' model in eval mode, the folder that it wrote)."""
    transformers = pytest.importorskip("transformers")

    @cache
    def written(what: str) -> tuple[Any, Path]:
        family, changes = FOLDERS[what]
        config = getattr(transformers, f"{family}Config")(**SIZES | changes, attn_implementation="eager")
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator) * 0.3
                parameter.copy_(noise if parameter.dim() > 1 else parameter + noise)
        folder = tmp_path_factory.mktemp("folders") / "theirs"
        model.save_pretrained(folder)
        return model, folder

    return written


@every
@torch.no_grad()
def test_logits_are_transformers(what: str, folders: Any, tmp_path: Path) -> None:
    theirs, folder = folders(what)
    ours = load_gpt(folder).eval()
    expected = theirs(TOKENS).logits
    torch.testing.assert_close(ours(TOKENS), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    assert sum(parameter.numel() for parameter in ours.parameters()) == ours.config.parameters
    save_gpt(ours, tmp_path / "ours")
    transformers = pytest.importorskip("transformers")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    torch.testing.assert_close(again(TOKENS).logits, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@every
def test_greedy_text_is_transformers(what: str, folders: Any) -> None:
    """All tokens are equal, for prompts of different lengths together. transformers runs without its cache, which has
    faults."""
    theirs, folder = folders(what)
    ours, prompts = load_gpt(folder).eval(), [TOKENS[0, :9], TOKENS[1, :2]]
    found = generate(ours, prompts, 20)
    for prompt, new in zip(prompts, found, strict=True):
        tokens = prompt[None]
        with torch.no_grad():
            for _ in range(20):
                tokens = torch.cat((tokens, theirs(tokens).logits[:, -1].argmax(-1, keepdim=True)), 1)
        assert new == tokens[0, len(prompt) :].tolist()


@pytest.mark.parametrize("what", ["llama 3", "mistral", "qwen3, all"])
def test_gradients_are_transformers(what: str, folders: Any) -> None:
    theirs, _ = folders(what)
    config = config_of(theirs.config.to_dict())
    ours = Gpt(config)
    ours.load_state_dict(gpt_state_dict(theirs.state_dict(), config))
    theirs.zero_grad()
    loss = theirs(TOKENS, labels=TOKENS).loss
    loss.backward()
    found = ours(TOKENS[:, :-1], TOKENS[:, 1:])
    found.backward()
    torch.testing.assert_close(found, loss, rtol=1e-5, atol=1e-5)
    expected = gpt_state_dict({name: p.grad for name, p in theirs.named_parameters()}, config)
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=1e-5, msg=name)


@every
def test_frequencies_are_transformers(what: str, folders: Any) -> None:
    theirs, _ = folders(what)
    found = rotary_frequencies(config_of(theirs.config.to_dict()))
    torch.testing.assert_close(found, theirs.model.rotary_emb.inv_freq, rtol=1e-6, atol=0)


def test_a_window_counts_less(folders: Any) -> None:
    """Bytes and flops of a step: layers with a window read only the window's keys and values, the other layers read
    all."""
    model = load_gpt(folders("qwen2, windows")[1]).eval()
    generation = Generation(model, [TOKENS[0, :9]], 3, Sampling())
    assert len(list(generation)) == 3
    assert generation.steps == [(1, 10), (1, 11)]
    assert generation._windowed == [5, 5]


@pytest.mark.parametrize(
    ("what", "changes", "message"),
    [
        ("qwen3", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_parameters is of rope_type 'yarn'"),
        ("qwen2", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("mistral", {"model_type": "mixtral"}, "model_type 'mixtral'"),
    ],
)
def test_what_stays_refused_names_the_field(
    what: str, changes: dict[str, Any], message: str, folders: Any, tmp_path: Path
) -> None:
    given = json.loads((folders(what)[1] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(given | changes))
    with pytest.raises(WeightsError, match=message) as error:
        load_gpt(tmp_path)
    assert str(tmp_path / "config.json") in str(error.value)
