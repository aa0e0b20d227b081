"""Generation compared with transformers' `generate`: greedy text, unequal prompts, the end of the context, laws of
sampling, a cache that is shared, waited for and given back, and errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from rooftop.cost import CountingMode
from rooftop.hardware import ceilings_of
from rooftop.models import Gpt, GptConfig, continue_greedily, generate, gpt_config
from rooftop.models.gpt.configs import config_of
from rooftop.models.gpt.generation import Generation, groups_of, step_cost
from rooftop.models.gpt.sampling import Sampling
from rooftop.models.gpt.weights import gpt_state_dict

THEIRS: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 97},
    "gpt2 untied": {"vocab_size": 17, "n_inner": 50, "activation_function": "gelu", "tie_word_embeddings": False},
    "llama": {"vocab_size": 61},
    "llama in groups": {"vocab_size": 127, "num_key_value_heads": 2},
    "llama of one head of keys": {"vocab_size": 31, "num_key_value_heads": 1, "tie_word_embeddings": True},
}
SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_positions": 40, "n_embd": 48, "n_layer": 2, "n_head": 6, "bos_token_id": 0, "eos_token_id": 0},
    "llama": {"max_position_embeddings": 40, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6,
              "intermediate_size": 70},
}  # fmt: skip
GPT = GptConfig(vocabulary=97, layers=2, width=24, heads=4, kv_heads=4, hidden=40, positions=40)
LLAMA = GptConfig(vocabulary=61, layers=2, width=24, heads=4, kv_heads=2, hidden=40, positions=40, norm="rms",
                  position="rope", activation="swiglu", biases=False, tied=False)  # fmt: skip
both = pytest.mark.parametrize("config", [GPT, LLAMA], ids=["gpt", "llama"])
all_of_theirs = pytest.mark.parametrize("kind", THEIRS)
UNEQUAL = [7, 1, 19, 4, 33, 39]

Pair = tuple[Any, Gpt]


def randomize(model: nn.Module) -> None:
    """Parameters with which the text does not repeat a single token."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                deviation = 0.5 if "wte" in name or "wpe" in name or "embed" in name else parameter.shape[-1] ** -0.5
                parameter.normal_(0, deviation, generator=generator)
            elif name.endswith("weight"):
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0, 0.2, generator=generator)


@pytest.fixture(scope="session")
def hugging_face(torchvision_models: ModuleType) -> Callable[[str], Pair]:
    """(theirs, ours) with the same weights, in eval mode."""
    transformers = pytest.importorskip("transformers")

    @cache
    def build(kind: str) -> Pair:
        family = kind.split()[0]
        names = {"gpt2": ("GPT2Config", "GPT2LMHeadModel"), "llama": ("LlamaConfig", "LlamaForCausalLM")}[family]
        given = getattr(transformers, names[0])(**SIZES[family] | THEIRS[kind], attn_implementation="eager")
        theirs = getattr(transformers, names[1])(given).eval()
        randomize(theirs)
        config = config_of(given.to_dict())
        ours = Gpt(config).eval()
        ours.load_state_dict(gpt_state_dict(theirs.state_dict(), config))
        return theirs, ours

    return build


@cache
def small(config: GptConfig) -> Gpt:
    model = Gpt(config).eval()
    randomize(model)
    return model


def texts(lengths: list[int], vocabulary: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in lengths]


def by_theirs(theirs: Any, prompt: list[int], count: int) -> list[int]:
    """The text of a single prompt, up to the model's number of positions."""
    count = min(count, 40 - len(prompt))
    tokens = torch.tensor([prompt])
    found = theirs.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return found[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


# ---- greedy --------------------------------------------------------------------------------------------------------


@all_of_theirs
def test_greedy_text_is_theirs_token_for_token(kind: str, hugging_face: Callable[[str], Pair]) -> None:
    theirs, ours = hugging_face(kind)
    prompts = texts(UNEQUAL, ours.config.vocabulary)
    expected = [by_theirs(theirs, prompt, 40) for prompt in prompts]
    assert [len(prompt) + len(new) for prompt, new in zip(prompts, expected, strict=True)] == [40] * 6
    assert len({token for new in expected for token in new}) > 3
    assert generate(ours, prompts, 40, page=4) == expected
    for alone in (1, 3, 5):  # the shortest, a medium one, the longest
        assert generate(ours, [prompts[alone]], 40) == [expected[alone]]


@all_of_theirs
def test_a_batch_of_equal_prompts(kind: str, hugging_face: Callable[[str], Pair]) -> None:
    theirs, ours = hugging_face(kind)
    tokens = torch.tensor(texts([9, 9, 9], ours.config.vocabulary))
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 12}
    expected = theirs.generate(tokens, attention_mask=torch.ones_like(tokens), **options)[:, 9:]
    assert generate(ours, list(tokens), 12) == expected.tolist()


@both
@pytest.mark.parametrize(
    "options", [{"batch": 2}, {"pages": 11}, {"page": 1}, {"page": 3, "batch": 3, "pages": 20}, {"page": 64}]
)
def test_rows_and_pages_are_a_matter_of_memory_alone(config: GptConfig, options: dict[str, int]) -> None:
    prompts = texts(UNEQUAL, config.vocabulary)
    options = {"page": 4, **options}
    generation = Generation(small(config), prompts, 12, **options)
    new: list[list[int]] = [[] for _ in prompts]
    for index, token in generation:
        new[index].append(token)
    expected = [
        continue_greedily(small(config), torch.tensor([prompt]), min(12, 40 - len(prompt)))[0].tolist()
        for prompt in prompts
    ]
    assert [prompt + tokens for prompt, tokens in zip(prompts, new, strict=True)] == expected
    assert generation.cache.free == generation.cache.pages


def test_tokens_come_one_step_after_another() -> None:
    prompts = texts([3, 5], 97)
    generation = iter(Generation(small(GPT), prompts, 4))
    assert [next(generation)[0] for _ in range(2)] == [1, 0]  # the longest prompt is the first of its group
    assert Counter(index for index, _ in generation) == {0: 3, 1: 3}


def test_it_can_be_left_and_begun_anew() -> None:
    generation = Generation(small(LLAMA), texts([3, 5], 61), 9)
    whole = list(generation)
    for index, _ in enumerate(generation):
        if index == 4:
            break
    assert list(generation) == whole
    running = iter(generation)
    next(running)
    with pytest.raises(ValueError, match="already running"):
        next(iter(generation))
    running.close()
    assert generation.cache.free == generation.cache.pages


def test_a_stop_token_ends_its_sequence_and_nobody_elses() -> None:
    model, prompts = small(GPT), texts([6, 2, 11], 97)
    whole = generate(model, prompts, 20)
    stop = whole[1][7]
    expected = [new[: new.index(stop) + 1] if stop in new else new for new in whole]
    assert expected != whole
    assert generate(model, prompts, 20, stop=[stop]) == expected
    assert generate(model, prompts, 20, stop=[stop], batch=1) == expected


def test_no_tokens_are_asked_for() -> None:
    assert generate(small(GPT), texts([3, 2], 97), 0) == [[], []]
    assert generate(small(GPT), [], 5) == []


def test_prompts_are_read_in_groups_of_about_one_length() -> None:
    groups = groups_of([3, 10, 9, 2, 10, 50], 20)
    assert groups == [[5], [1, 4], [2, 0], [3]]
    assert sorted(place for group in groups_of(UNEQUAL, 1000) for place in group) == list(range(6))
    assert groups_of([], 10) == []


# ---- sampling ------------------------------------------------------------------------------------------------------

OPTIONS: dict[str, Any] = {"temperature": 0.9, "top_k": 20, "top_p": 0.9}


@both
def test_what_is_drawn_is_a_function_of_seed_sequence_and_position(config: GptConfig) -> None:
    model, prompts = small(config), texts(UNEQUAL, config.vocabulary)
    whole = generate(model, prompts, 20, seed=3, **OPTIONS)
    assert generate(model, prompts, 20, seed=3, **OPTIONS) == whole
    assert generate(model, prompts, 20, seed=3, batch=2, page=2, **OPTIONS) == whole
    turned = generate(model, prompts[::-1], 20, seed=3, sequences=range(5, -1, -1), **OPTIONS)
    assert turned[::-1] == whole
    assert [generate(model, [prompts[i]], 20, seed=3, sequences=[i], **OPTIONS)[0] for i in range(6)] == whole
    assert generate(model, prompts, 20, seed=4, **OPTIONS) != whole
    # It makes no difference where a text is continued, because the same position has the same random number.
    assert generate(model, [prompts[0] + whole[0][:5]], 15, seed=3, **OPTIONS) == [whole[0][5:]]


def test_equal_prompts_have_texts_of_their_own() -> None:
    new = generate(small(GPT), texts([4], 97) * 8, 16, temperature=1.0)
    assert len(set(map(tuple, new))) == 8


def test_limits_of_sampling_are_greedy() -> None:
    model, prompts = small(GPT), texts([4, 9], 97)
    greedy = generate(model, prompts, 20)
    for options in ({"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-6}):
        assert generate(model, prompts, 20, **{"temperature": 1.0, "seed": 5, **options}) == greedy


def test_texts_are_drawn_as_often_as_they_are_probable() -> None:
    """The first tokens of 1,000 sequences, compared with the model's probabilities."""
    model, prompt = small(GPT), texts([4], 97)[0]
    with torch.no_grad():
        probable = model(torch.tensor([prompt]))[0, -1].double().softmax(-1)
    first = Counter(new[0] for new in generate(model, [prompt] * 1000, 1, temperature=1.0))
    found = torch.tensor([first[token] for token in range(97)]) / 1000
    deviation = (probable * (1 - probable) / 1000).sqrt()
    assert ((found - probable).abs() < 5 * deviation + 1e-3).all()
    assert len(first) > 5


# ---- the cache -----------------------------------------------------------------------------------------------------


def test_a_cache_that_is_too_small_says_what_it_takes() -> None:
    page_bytes = 2 * GPT.layers * GPT.kv_width * 4 * 4  # keys and values of four positions in float32
    with pytest.raises(
        ValueError, match=rf"takes 6 pages of 4 positions, but the cache has 5: .*pages=6 \({7 * page_bytes:,} bytes"
    ):
        generate(small(GPT), texts([3, 13], 97), 9, page=4, pages=5)
    assert len(generate(small(GPT), texts([3, 13], 97), 9, page=4, pages=6)[1]) == 9


def test_a_cache_that_no_machine_holds_says_so() -> None:
    with pytest.raises(
        MemoryError, match=r"the cache of keys of \(2, \d+, 2, 16, \d+\) needs [\d,]+ bytes, but the host"
    ):
        generate(small(LLAMA), [[1]], 3, pages=10**12)


def test_memory_is_that_of_the_sequences() -> None:
    generation = Generation(small(LLAMA), texts([1, 30], 61), 4, page=4)
    assert generation.cache.pages == 1 + 9  # pages of 4 and 33 positions: the last token is not read again
    assert generation.cache.bytes == 11 * 4 * 2 * LLAMA.layers * LLAMA.kv_width * 4
    assert Generation(small(LLAMA), texts([1, 30], 61), 4, page=4, batch=1).cache.pages == 9


# ---- cost ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "device", "precision"),
    [(torch.bfloat16, "cuda", "bf16"), (torch.float16, "cuda", "fp16"), (torch.float32, "cpu", "fp32")],
)
def test_the_operations_of_a_step_are_those_of_matrix_products(dtype: torch.dtype, device: str, precision: str) -> None:
    """With the rate of elementwise arithmetic, the roof of 64 rows was 2.5 times as high."""
    assert set(step_cost(gpt_config("llama-7b"), 64, 64 * 500, dtype, device=device).flops) == {precision}


@both
def test_a_step_costs_its_weights_and_the_positions_before(config: GptConfig) -> None:
    config = replace(config, width=256, hidden=700)
    cost = step_cost(config, rows=3, positions=50, dtype=torch.bfloat16)
    model = small(config)
    looked_up = {"embedding.tokens.weight", "embedding.positions.weight"}
    weights = sum(t.numel() for name, t in model.state_dict().items() if name not in looked_up)
    weights += 3 * config.width * (2 if config.position == "learned" else 1)
    assert cost.read_bytes == 2 * (weights + 2 * config.layers * config.kv_width * 47)
    assert cost.write_bytes == 2 * 2 * config.layers * config.kv_width * 3
    generation = Generation(model, texts([10, 20, 17], config.vocabulary), 2)
    tokens = iter(generation)
    assert [next(tokens)[0] for _ in range(3)] == [1, 2, 0]
    with CountingMode() as counted:
        assert len(list(tokens)) == 3
    assert generation.steps == [(3, 50)]
    of_operators = sum(record.cost.total_flops for record in counted.records if record.cost is not None)
    assert cost.total_flops < of_operators < 1.05 * cost.total_flops  # norms, activations and the like


def test_a_roof_of_what_was_decoded() -> None:
    h200 = ceilings_of("h200")
    generation = Generation(small(GPT), texts([5, 6], 97), 3)
    assert generation.decode_roof_ms(h200) == 0
    list(generation)
    assert generation.prompt_tokens == 11
    assert generation.steps == [(2, 13), (2, 15)]
    assert generation.prefill_s > 0
    assert generation.decode_s > 0
    assert 0 < generation.decode_roof_ms(h200) < 1
    seven = step_cost(gpt_config("llama-7b"), 1, 1000, torch.bfloat16)
    assert 13.2e9 < seven.read_bytes < 14.1e9


# ---- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "options", "error", "message"),
    [
        (
            [[0] * 40],
            {},
            ValueError,
            "prompt 0 has 40 tokens, and the model has 40 positions, .*shorten it to at most 39",
        ),
        ([[0] * 90], {}, ValueError, "prompt 0 has 90 tokens"),
        ([[1], []], {}, ValueError, "prompt 1 is empty"),
        ([[1, 97]], {}, ValueError, "tokens of prompt 0 are from 1 to 97, but the model's are from 0 to 96"),
        ([[-1]], {}, ValueError, "from -1 to -1"),
        (["text"], {}, TypeError, "prompt 0 is text: give its tokens"),
        ("text", {}, TypeError, "expected a list of prompts"),
        (torch.zeros(2, 3, dtype=torch.int64), {}, TypeError, "expected a list of prompts"),
        ([torch.zeros(3)], {}, TypeError, r"expected tokens \(S,\), int64 or int32, as prompt 0"),
        ([[1]], {"max_new_tokens": -1}, ValueError, "max_new_tokens must be an int, 0 or more, got -1"),
        ([[1]], {"temperature": -1.0}, ValueError, "temperature must be 0"),
        ([[1]], {"top_k": 0}, ValueError, "top_k must be at least 1"),
        ([[1]], {"top_k": 1.5}, TypeError, "top_k must be an int"),
        ([[1]], {"top_p": 0.0}, ValueError, "top_p must be more than 0"),
        ([[1]], {"seed": -1}, ValueError, "seed must be from 0"),
        ([[1]], {"batch": 0}, ValueError, "batch must be at least 1"),
        ([[1]], {"pages": 0}, ValueError, "pages must be at least 1, got 0"),
        ([[1]], {"page": 0}, ValueError, "page must be at least 1, got 0"),
        ([[1]], {"page": None}, TypeError, "page must be an int, got None"),
        ([[1]], {"batch": "2"}, TypeError, "batch must be an int, got '2'"),
        ([[1]], {"batch": True}, TypeError, "batch must be an int, got True"),
        ([[1]], {"pages": 1.5}, TypeError, "pages must be an int, got 1.5"),
        ([[1.5, 2]], {}, TypeError, "prompt 0 must be ints, got 1.5"),
        ([["1"]], {}, TypeError, "prompt 0 must be ints, got '1'"),
        ([[True]], {}, TypeError, "prompt 0 must be ints, got True"),
        ([[1], None], {}, TypeError, "prompt 1 must be a sequence of ints, got None"),
        ([{1, 2}], {}, TypeError, "prompt 0 must be a sequence of ints, got {1, 2}"),
        ([torch.ones(3, dtype=torch.int64, device="meta")], {}, TypeError, "expected tokens .* on meta"),
        (b"text", {}, TypeError, "expected a list of prompts"),
        (None, {}, TypeError, "expected a list of prompts"),
        ([[1]], {"stop": "abc"}, TypeError, "stop must be a sequence of ints, got 'abc'"),
        ([[1]], {"stop": 5}, TypeError, "stop must be a sequence of ints, got 5"),
        ([[1]], {"stop": [1.5]}, TypeError, "stop must be ints, got 1.5"),
        ([[1]], {"sequences": [1.5]}, TypeError, "sequences must be ints, got 1.5"),
        ([[1]], {"sequences": [2**31]}, ValueError, "a sequence number must be from 0"),
        ([[1]], {"temperature": "1"}, TypeError, "temperature must be a number"),
        ([[1]], {"sequences": [1, 2]}, ValueError, "expected one sequence number for each of 1 prompts, got 2"),
        ([[1]], {"sequences": [-1], "temperature": 1.0}, ValueError, "a sequence number must be from 0"),
    ],
)
def test_wrong_calls(prompts: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        generate(small(GPT), prompts, **{"max_new_tokens": 5, **options})


def test_stages_parts_of_sequences_and_models_in_training_mode_are_refused() -> None:
    with pytest.raises(ValueError, match="expected a whole model, got a pipeline stage"):
        generate(Gpt(GPT, layers=range(1)).eval(), [[1]], 1)
    with pytest.raises(ValueError, match=r"training mode: call model\.eval"):
        generate(Gpt(GPT), [[1]], 1)
    part = Gpt(GPT).eval()
    part.split_along = object()  # as if other ranks had the rest of each sequence
    with pytest.raises(ValueError, match="ranks split each sequence"):
        generate(part, [[1]], 1)


def test_only_models_with_values() -> None:
    with pytest.raises(TypeError, match=r"expected a rooftop\.models\.Gpt, got Linear"):
        generate(nn.Linear(2, 2), [[1]], 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="on the meta device"):
        generate(Gpt(GPT, device="meta").eval(), [[1]], 1)
    with pytest.raises(TypeError, match="sampling must be a Sampling or None, got 'greedy'"):
        Generation(small(GPT), [[1]], 1, "greedy")  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}], ids=str)
def test_a_model_that_gives_no_numbers_is_an_error(options: dict[str, Any]) -> None:
    """NaN may appear in the prompt or in a later step. The tokens before that step are still reported."""
    broken = Gpt(LLAMA).eval()
    with torch.no_grad():
        broken.head.norm.weight[0] = torch.nan
    with pytest.raises(FloatingPointError, match=r"after 2 tokens of prompt 0 .* the model gives NaN .* damaged$"):
        generate(broken, [[1, 2]], 3, **options)
    model = Gpt(LLAMA).eval()
    randomize(model)
    told = generate(model, [[1, 2]], 3, **options)[0]
    with torch.no_grad():
        model.embedding.tokens.weight[told[0]] = torch.nan  # the untied head can choose it, and its embedding is NaN
    generation, come = Generation(model, [[1, 2]], 3, Sampling(**options)), []
    with pytest.raises(FloatingPointError, match="after 3 tokens of prompt 0 and its continuation the model"):
        come.extend(generation)
    assert come == [(0, told[0])]
    assert generation.cache.free == generation.cache.pages


def test_modes_around_it_change_nothing() -> None:
    model, prompts = small(LLAMA), [[1, 2, 3], [4]]
    expected = generate(model, prompts, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert generate(model, prompts, 6) == expected
    with torch.inference_mode():
        assert generate(model, prompts, 6) == expected
        made_within = Generation(model, prompts, 6)
    tokens: list[list[int]] = [[], []]
    for index, token in made_within:
        tokens[index].append(token)
    assert tokens == expected


def test_ints_of_any_kind_are_tokens() -> None:
    expected = generate(small(LLAMA), [[1, 2, 3]], 6)
    kinds = (range(1, 4), (1, 2, 3), b"\x01\x02\x03", numpy.arange(1, 4), torch.arange(1, 4), list(torch.arange(1, 4)))
    for prompt in kinds:
        assert generate(small(LLAMA), [prompt], 6) == expected  # type: ignore[list-item]
    stop = expected[0][2]
    for stops in ([stop], torch.tensor([stop]), numpy.array([stop])):
        assert generate(small(LLAMA), [[1, 2, 3]], 6, stop=stops) == [expected[0][: expected[0].index(stop) + 1]]  # type: ignore[arg-type]


# ---- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@both
@pytest.mark.parametrize("options", [{}, OPTIONS | {"seed": 2}], ids=["greedy", "sampled"])
def test_a_gpu_has_the_cpus_text(config: GptConfig, options: dict[str, Any]) -> None:
    config = replace(config, width=64)
    model = Gpt(config).eval()
    randomize(model)
    prompts = texts(UNEQUAL, config.vocabulary)
    expected = generate(model, prompts, 30, **options)
    model.cuda()
    assert generate(model, prompts, 30, **options) == expected
    assert generate(model, prompts, 30, batch=2, page=4, **options) == expected


@pytest.mark.gpu
def test_a_step_on_a_gpu_is_one_graph() -> None:
    model = small(replace(LLAMA, width=128)).to("cuda", torch.bfloat16)
    generation = Generation(model, texts([5, 3], 61), 30, Sampling(temperature=1.0, top_p=0.9))
    list(generation)
    with torch.profiler.profile(acc_events=True) as profile:
        list(generation)
    launches = Counter(event.name for event in profile.events())
    assert launches["cudaGraphLaunch"] == len(generation.steps) == 29
