"""`rooftop generate`: text as it is generated, figures next to the roof, JSON, and one clear line for any error."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rooftop.cli import generate as verb
from rooftop.cli.main import main
from rooftop.hardware import ceilings_of
from rooftop.models import Gpt, GptConfig, generate, gpt_config, load_gpt, save_gpt
from rooftop.models.gpt.rope_scaling import RopeScaling
from rooftop.models.gpt.tokenizing import ByteTokenizer
from rooftop.parallel import Layout
from rooftop.train.checkpoints.trained_models import load_trained_gpt
from rooftop.train.checkpoints.trainings import save_training
from rooftop.train.gpt.trainer import GptTrainer
from rooftop.train.gpt.training import GptTraining
from rooftop.train.tokens.tokens import Tokens

pytest.importorskip("safetensors")

LLAMA = GptConfig(vocabulary=256, layers=2, width=24, heads=4, kv_heads=2, hidden=40, positions=64, norm="rms",
                  position="rope", activation="swiglu", biases=False, tied=False)  # fmt: skip
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small untrained Llama, whose texts do not repeat themselves."""
    model, generator = Gpt(LLAMA), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.5 * parameter.shape[1] ** -0.5, generator=generator)
    folder = tmp_path_factory.mktemp("weights") / "llama"
    save_gpt(model, folder)
    return folder


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `rooftop generate ...` on the CPU with the ceilings of some machine; return (status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def measured(device: torch.device, *, precisions: set[str], transfers: bool, links: bool, **_: Any) -> Any:
        assert precisions in ({"fp32"}, {"bf16"})  # other ceilings would only take time
        assert not transfers
        assert not links
        return ceilings_of("h200")

    monkeypatch.setattr(verb, "measure_ceilings", measured)

    def call(*words: object) -> tuple[int, str, str]:
        status = main(["generate", *map(str, words), "--device", "cpu"])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def expected(folder: Path, prompts: list[str], count: int, **options: Any) -> list[str]:
    bytes_ = ByteTokenizer()
    new = generate(load_gpt(folder).eval(), [bytes_.encode(prompt) for prompt in prompts], count, **options)
    return [bytes_.decode(tokens) for tokens in new]


def test_text_on_stdout_and_figures_on_stderr(run: Run, folder: Path) -> None:
    status, out, err = run("--weights", folder, "--bytes", "--prompt", "Hello", "--max-new-tokens", 20)
    assert status == 0
    assert out == f"Hello{expected(folder, ['Hello'], 20)[0]}\n"
    first, second = err.splitlines()
    assert re.fullmatch(r"prompts: 5 tokens in [\d,.]+ ms, float32 on cpu; cache of [\d,]+ bytes", first)
    rate, steps, roof, percent = re.search(
        r"decoding: ([\d,.]+) tokens/s, (\d+) steps of .* roof ([\d.]+) ms, ([\d.]+)% of roof", second
    ).groups()  # type: ignore[union-attr]
    assert float(rate.replace(",", "")) > 0
    assert int(steps) == 19
    assert float(roof) > 0
    assert 0 <= float(percent) < 100


def test_texts_of_several_prompts_follow_one_another(run: Run, folder: Path) -> None:
    prompts = ["one and a long one", "zwölf", "x"]
    words = [word for prompt in prompts for word in ("--prompt", prompt)]
    status, out, _ = run("--weights", folder, "--bytes", *words, "--max-new-tokens", 13, "--no-roof")
    assert status == 0
    texts = expected(folder, prompts, 13)
    assert out == "\n".join(f"{prompt}{text}\n" for prompt, text in zip(prompts, texts, strict=True))


def test_text_is_told_as_it_comes(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(verb, "_echo", told.append)
    run("--weights", folder, "--bytes", "--prompt", "ab", "--prompt", "c", "--max-new-tokens", 9, "--no-roof")
    before = told[: told.index("\n")]
    assert len(before) > 4
    assert max(map(len, before)) < 8


def test_what_is_drawn_follows_from_the_seed(run: Run, folder: Path) -> None:
    words = ("--weights", folder, "--bytes", "--prompt", "Hello", "--max-new-tokens", 20, "--no-roof")
    options = ("--temperature", 0.7, "--top-k", 50, "--top-p", 0.9)
    drawn = run(*words, *options, "--seed", 3)[1]
    given = expected(folder, ["Hello"], 20, temperature=0.7, top_k=50, top_p=0.9, seed=3)[0]
    assert drawn == f"Hello{given}\n"
    assert run(*words, *options, "--seed", 4)[1] != drawn != run(*words)[1]


def test_json_is_not_written_over_what_is_read(run: Run, folder: Path) -> None:
    config = folder / "config.json"
    before = config.read_bytes()
    status, _, err = run("--weights", folder, "--bytes", "--prompt", "Hello", "--json", config)
    assert status == 2
    assert "is an input: give another name" in err
    assert config.read_bytes() == before


def test_json_has_the_same(run: Run, folder: Path, tmp_path: Path) -> None:
    words = ("--weights", folder, "--bytes", "--prompt", "Hello", "--prompt", "b", "--max-new-tokens", 5)
    status, out, err = run(*words, "--json", "-")
    assert (status, err) == (0, "")
    told = json.loads(out)
    texts = expected(folder, ["Hello", "b"], 5)
    assert [(text["prompt"], text["text"]) for text in told["texts"]] == [("Hello", texts[0]), ("b", texts[1])]
    assert [len(text["tokens"]) for text in told["texts"]] == [5, 5]
    figures = told["figures"]
    assert (figures["prompt_tokens"], figures["steps"], figures["decoded_tokens"]) == (6, 4, 8)
    assert figures["roof_ms"] > 0
    assert figures["percent_of_roof"] == pytest.approx(100 * figures["roof_ms"] / figures["decode_ms"])
    assert (
        figures["cache_bytes"] == 3 * 16 * 2 * 2 * 12 * 4
    )  # a page for each sequence and the unused page, 16 positions, 2 layers, float32
    status, out, err = run(*words, "--json", "text.json")
    assert status == 0
    assert err.endswith("text, tokens, times and rates: text.json\n")
    assert json.loads((tmp_path / "text.json").read_text())["texts"] == told["texts"]


def test_the_tokenizer_beside_the_weights_and_the_token_that_ends_a_text(
    run: Run, folder: Path, tmp_path: Path
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    mine = tmp_path / "mine"
    save_gpt(load_gpt(folder), mine)
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=dict(zip(letters, range(256), strict=True)), merges=[])
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(mine / "tokenizer.json"))
    words = ("--weights", mine, "--prompt", "Über uns", "--max-new-tokens", 30, "--json", "-")
    whole = json.loads(run(*words)[1])["texts"][0]
    assert whole["tokens"] == generate(load_gpt(mine).eval(), [tokenizer.encode("Über uns").ids], 30)[0]
    assert whole["text"] == tokenizer.decode(whole["tokens"])
    stop = whole["tokens"][12]
    (mine / "generation_config.json").write_text(json.dumps({"eos_token_id": stop}))
    ended = json.loads(run(*words)[1])["texts"][0]["tokens"]
    assert ended == whole["tokens"][: whole["tokens"].index(stop) + 1]
    assert json.loads(run(*words)[1])["texts"][0]["text"] == tokenizer.decode(ended[:-1])
    out = run(*words[:-2], "--no-roof")[1]
    assert out == f"Über uns{tokenizer.decode(ended[:-1])}\n"  # the end itself is not text


def test_weights_of_one_file_and_untrained_ones(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = folder / "model.safetensors"
    words = ("--bytes", "--prompt", "Hello", "--max-new-tokens", 6, "--no-roof")
    assert run("--weights", file, *words)[1] == run("--weights", folder, *words)[1]
    monkeypatch.setitem(verb.PRESETS, "llama-1b", replace(gpt_config("llama-1b"), layers=1, width=64, hidden=64))
    untrained = [run("--model", "llama-1b", "--random-weights", seed, *words[1:]) for seed in (1, 1, 2)]
    assert untrained[0][0] == 0
    assert untrained[0][2].endswith("random weights: the text means nothing\n")
    assert untrained[0][1] == untrained[1][1] != untrained[2][1]


def test_no_new_tokens(run: Run, folder: Path) -> None:
    status, out, err = run("--weights", folder, "--bytes", "--prompt", "a", "--prompt", "b", "--max-new-tokens", 0)
    assert (status, out) == (0, "a\n\nb\n")
    assert err.count("\n") == 1


def test_up_to_the_last_position_of_the_model(run: Run, folder: Path) -> None:
    told = json.loads(run("--weights", folder, "--bytes", "--prompt", "x" * 60, "--json", "-")[1])
    assert len(told["texts"][0]["tokens"]) == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--bytes"], "expected exactly one of --weights DIR|FILE and --random-weights SEED"),
        (["--weights", "{folder}", "--random-weights", "0"], "expected exactly one of --weights"),
        (["--random-weights", "0"], "expected --model NAME, one of gpt2, "),
        (
            ["--random-weights", "0", "--model", "gtp2"],
            "'gtp2' is not a language model (did you mean gpt2?): there are",
        ),
        (["--weights", "nowhere"], "'nowhere' does not exist"),
        (["--weights", "{folder}"], "tokenizer.json is missing:"),
        (["--weights", "{folder}", "--bytes", "--top-k", "3"], "also give a --temperature above 0, such as 1"),
        (["--weights", "{folder}", "--bytes", "--top-p", "0"], "0.0 is not in the range"),
        (
            ["--weights", "{folder}", "--bytes", "--prompt", "x" * 64],
            "prompt 2 has 64 tokens, but the model has 64 positions",
        ),
        (["--weights", "{folder}", "--bytes", "--prompt", ""], "prompt 2 has no tokens"),
        (["--weights", "{folder}", "--bytes", "--prompt", "a\udc80"], "prompt 2 is not text in UTF-8"),
        (["--weights", "{folder}", "--bytes", "--temperature", "nan"], "'nan' is not a number"),
        (["--weights", "{folder}", "--bytes", "--temperature", "inf"], "temperature must be 0 (the most probable"),
        (["--weights", "{folder}", "--bytes", "--temperature", "1", "--top-p", "nan"], "'nan' is not a number"),
        (["--weights", "{folder}", "--bytes", "--json", "no/text.json"], "there is no folder no"),
    ],
)
def test_wrong_calls(run: Run, folder: Path, words: list[str], message: str) -> None:
    status, out, err = run("--prompt", "Hello", *(word.replace("{folder}", str(folder)) for word in words))
    assert (status, out) == (2, "")
    assert err.startswith("rooftop: error: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("started", "words", "message"),
    [
        (1, ["--tensor-parallel-size", "2"], "needs 2 processes, but there is only this one: start them by "
         "torchrun --nproc-per-node 2 -m rooftop generate ... --tensor-parallel-size 2, or leave the "
         "option out"),
        (2, [], "--tensor-parallel-size 1 needs 1 process, but the launcher started 2 processes: start rooftop "
         "generate without the launcher, or give --tensor-parallel-size 2"),
        (4, ["--tensor-parallel-size", "2"], "needs 2 processes, but the launcher started 4 processes"),
        (3, ["--tensor-parallel-size", "3"], "heads=4 is not divisible by tp=3"),
        (3, ["--tensor-parallel-size", "3"], "a model of 2 layers can be split among 1, 2, 4 ranks"),
        (8, ["--tensor-parallel-size", "8"], "can be split among 1, 2, 4 ranks"),
        (2, ["--tensor-parallel-size", "0"], "0 is not in the range"),
        (2, ["--pipeline-parallel-size", "2"], "No such option --pipeline-parallel-size"),
    ],
)  # fmt: skip
def test_ranks_that_do_not_fit_are_refused_before_they_meet(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, started: int, words: list[str], message: str
) -> None:
    if started > 1:
        variables = {"RANK": "0", "WORLD_SIZE": str(started), "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(verb, "join", lambda *_, **__: pytest.fail("ranks communicated before the error"))
    status, out, err = run("--weights", folder, "--bytes", "--prompt", "Hello", *words)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_prompts_in_a_locale_without_their_characters(run: Run, folder: Path) -> None:
    """In such a locale, Python turns the UTF-8 bytes into surrogates."""
    options = ("--weights", folder, "--bytes", "--max-new-tokens", 3, "--no-roof")
    status, out, _ = run(*options, "--prompt", "h\udcc3\udca9")
    assert (status, out) == run(*options, "--prompt", "hé")[:2]
    assert (status, out[:2]) == (0, "hé")


def test_a_terminal_without_the_characters_of_a_text(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = BytesIO()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", TextIOWrapper(written, encoding="latin-1", write_through=True))
        status = main(["generate", "--weights", str(folder), "--bytes", "--prompt", "é€", "--max-new-tokens", "0"])
    assert (status, written.getvalue()) == (0, b"\xe9?\n")


def test_weights_that_give_no_numbers(run: Run, tmp_path: Path) -> None:
    model = Gpt(LLAMA)
    with torch.no_grad():
        model.head.norm.weight.fill_(torch.nan)
    save_gpt(model, tmp_path / "broken")
    status, _, err = run("--weights", "broken", "--bytes", "--prompt", "Hello", "--json", "text.json")
    assert status == 1
    assert "after 5 tokens of prompt 0 and its continuation the model gives NaN or infinity" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "text.json").exists()
    status, out, err = run("--weights", "broken", "--bytes", "--prompt", "Hello")
    assert (status, out) == (1, "Hello\n")


def test_a_model_that_does_not_fit_into_memory(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(verb.PRESETS, "gpt2", replace(LLAMA, vocabulary=2**45))
    words = ("--model", "gpt2", "--random-weights", "0", "--prompt", "Hello")
    status, _, err = run(*words)
    assert status == 1
    assert err.startswith("rooftop: error: gpt2 does not fit into the memory of cpu (the CPU cannot allocate ")
    assert err.endswith("; try --dtype bf16, fewer prompts or fewer --max-new-tokens\n")
    monkeypatch.setattr(verb, "_config", lambda *_: torch.empty(2**50))  # where no message of its own is expected
    status, _, err = run(*words)
    assert err.startswith("rooftop: error: out of memory: the CPU cannot allocate ")
    assert err.endswith("; use smaller sizes, or free memory\n")


def test_what_fails(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, _, err = run("--weights", folder, "--model", "gpt2", "--bytes", "--prompt", "Hello")
    assert status == 2
    assert "config.json describes another model than --model gpt2 (vocabulary 256 instead of 50257, layers 2" in err
    assert err.endswith(": leave --model out\n")
    (folder / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    try:
        status, _, err = run("--weights", folder, "--prompt", "Hello")
    finally:
        (folder / "tokenizer.json").unlink()
    assert status == 1
    assert 'pip install "rooftop[text]"' in err


def test_more_than_the_roof_is_an_error_of_the_measurement() -> None:
    figures: dict[str, Any] = {"prompt_tokens": 1, "prefill_ms": 1.0, "steps": 2, "decode_ms": 4.0, "device": "cpu"}
    figures |= {"tokens_per_s": 500.0, "roof_ms": 6.0, "percent_of_roof": 150.0, "without_roof": None}
    figures |= {"dtype": "float32", "cache_bytes": 1, "tensor_parallel_size": 1}
    assert "faster than the roof, so the ceilings are wrong" in verb._lines(figures)[-1]


def test_a_head_that_the_config_ties(run: Run, tmp_path: Path) -> None:
    """The file's own head chooses the tokens, and the command says so on stderr."""
    safetensors = pytest.importorskip("safetensors.torch")
    save_gpt(Gpt(replace(LLAMA, tied=True)), tmp_path / "model")
    tensors = safetensors.load_file(tmp_path / "model" / "model.safetensors")
    head = torch.randn(256, 24, generator=torch.Generator().manual_seed(3))
    safetensors.save_file(tensors | {"lm_head.weight": head}, tmp_path / "model" / "model.safetensors")
    words = ("--weights", tmp_path / "model", "--bytes", "--prompt", "roof", "--max-new-tokens", 9, "--json", "-")
    status, out, _ = run(*words)
    model = load_gpt(tmp_path / "model").eval()
    assert status == 0
    assert torch.equal(model.head.output.weight, head)
    assert json.loads(out)["texts"][0]["tokens"] == generate(model, [list(b"roof")], 9)[0]
    assert "the weights have a separate head," in run(*words[:-2])[2]


def test_more_tokens_than_positions(run: Run, folder: Path) -> None:
    """Too large a number of tokens is refused before weights are read. The default is the largest number that fits."""
    words = ("--weights", folder, "--bytes", "--prompt", "Hello", "--no-roof")
    status, out, err = run(*words, "--max-new-tokens", 60)
    assert (status, out) == (2, "")
    assert "--max-new-tokens 60 and the 5 tokens of prompt 1 exceed the model's 64 positions" in err
    assert "give at most 59, or shorten the prompt" in err
    assert run(*words, "--max-new-tokens", 59)[1] == run(*words)[1] != ""


TRAINED = replace(LLAMA, head_size=8, window=5, window_layers=(1,), head_norms=True, tied=True,
                  rope_scaling=RopeScaling(kind="linear", factor=2.0))  # fmt: skip


@pytest.mark.parametrize("text", [True, False])
def test_the_folder_of_a_training(text: bool, run: Run, tmp_path: Path) -> None:
    """The command loads the last step of a training, or a named one. A model trained on text has bytes as tokens."""
    tokens = Tokens([np.frombuffer(b"The roof of a house. " * 20, np.uint8)], "text", text=text)
    training = GptTraining(config=TRAINED, length=16, global_batch=2, micro_batch=2, learning_rate=0.01)
    layout = Layout()
    trainer = GptTrainer(training, tokens, layout, layout.process_groups(), torch.device("cpu"))
    for _ in range(2):
        trainer.advance()
    first = save_training(tmp_path / "run", trainer)
    model = load_trained_gpt(tmp_path / "run").eval()
    assert model.config == TRAINED
    for name, weight in trainer.weights.named.items():
        assert torch.equal(model.get_parameter(name), weight)
    for folder in (tmp_path / "run", first):
        words = ("--weights", folder, "--prompt", "The roof", "--max-new-tokens", 9, "--no-roof")
        status, out, err = run(*words, *(() if text else ("--bytes",)))
        assert status == 0, err
        bytes_ = ByteTokenizer()
        assert out == f"The roof{bytes_.decode(generate(model, [bytes_.encode('The roof')], 9)[0])}\n"
    status, _, err = run("--weights", tmp_path / "run", "--model", "gpt2", "--prompt", "a")
    assert (status, "was trained with another model than gpt2" in err) == (2, True) or not text
    (first / "rank-00000.safetensors").write_bytes(b"half")
    status, _, err = run("--weights", tmp_path / "run", "--bytes", "--prompt", "a", "--max-new-tokens", 1)
    assert status == 2
    assert "rank-00000.safetensors, which has the tensor embedding.tokens.weight, has 4 bytes" in err
    (first / "training.json").write_text("{}")
    assert "is not a file of rooftop train gpt --save" in run("--weights", first, "--prompt", "a")[2]
