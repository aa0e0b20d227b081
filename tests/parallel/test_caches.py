"""Hugging Face's models return caches by default. DataParallel gives the same results as the model alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rooftop.parallel.data_parallel import DataParallel, gather, scatter

TWO = ["cpu"] * 2
SMALL = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture(scope="module")
def transformers(torchvision_models: ModuleType) -> Iterator[ModuleType]:
    module = pytest.importorskip("transformers")
    module.logging.set_verbosity_error()
    yield module
    module.logging.set_verbosity_warning()


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(20, (5, 6), generator=torch.Generator().manual_seed(1))


def decoder(transformers: ModuleType, name: str, **options: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**SMALL, **options)
        return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def assert_same(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "options"),
    [("Llama", HEADS), ("Mistral", {**HEADS, "sliding_window": 4}), ("Mamba", {"state_size": 4})],
    ids=["keys and values", "sliding windows", "states"],
)
def test_a_cache_goes_on_as_that_of_the_whole_batch(
    name: str, options: dict[str, Any], transformers: ModuleType, ids: Tensor
) -> None:
    model = decoder(transformers, name, **options)
    argument = "cache_params" if name == "Mamba" else "past_key_values"
    with torch.no_grad():
        whole, parallel = model(ids, use_cache=True), DataParallel(model, TWO)(ids, use_cache=True)
        assert type(parallel) is type(whole)
        assert type(parallel[argument]) is type(whole[argument])
        assert_same(parallel.logits, whole.logits)
        following = [model(ids[:, :1], **{argument: out[argument]}).logits for out in (parallel, whole)]
        assert_same(*following)


def test_a_cache_of_an_encoder_and_a_decoder(transformers: ModuleType, ids: Tensor) -> None:
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=20, **sizes)).eval()
    with torch.no_grad():
        outs = [run(input_ids=ids, decoder_input_ids=ids[:, :3]) for run in (DataParallel(model, TWO), model)]
        assert_same(outs[0].logits, outs[1].logits)
        following = [
            model(
                encoder_outputs=(out.encoder_last_hidden_state,),
                decoder_input_ids=ids[:, 3:4],
                past_key_values=out.past_key_values,
            ).logits
            for out in outs
        ]
        assert_same(*following)


def test_hidden_states_and_losses_of_a_tokenizers_batch(transformers: ModuleType, ids: Tensor) -> None:
    model = decoder(transformers, "Llama", **HEADS)
    batch = transformers.BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    assert [share["input_ids"].shape for share in scatter(batch, TWO)] == [(3, 6), (2, 6)]
    with torch.no_grad():
        parallel, whole = (
            run(**batch, labels=ids, output_hidden_states=True) for run in (DataParallel(model, TWO), model)
        )
    assert_same(parallel.hidden_states, whole.hidden_states)
    assert_same((parallel.loss * torch.tensor([3, 2])).sum() / 5, whole.loss)


def test_caches_as_inputs_and_unknown_ones_are_refused(transformers: ModuleType, ids: Tensor) -> None:
    model = decoder(transformers, "Llama", **HEADS)
    with torch.no_grad():
        cache = model(ids).past_key_values
    for given in (cache, transformers.DynamicCache()):
        with pytest.raises(TypeError, match=r"DynamicCache cannot be split: the module writes .* call the module its"):
            DataParallel(model, TWO)(ids, past_key_values=given)
    other = copy.deepcopy(cache)
    other.layers[0].somewhere = torch.ones(5)
    with pytest.raises(TypeError, match=r"DynamicLayer cannot be gathered: .* its attribute 'somewhere' is unknown"):
        gather([other, other], "cpu")
    with pytest.raises(TypeError, match="replicas returned caches of different classes"):
        gather([cache, other], "cpu")
