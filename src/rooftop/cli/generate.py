"""`rooftop generate`: generate text with a language model, and report percent of roof."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from click.core import ParameterSource

from rooftop.cli.outputs import STANDARD_OUTPUT, check_json, write_json
from rooftop.cli.progress import progress_bar
from rooftop.debugging import memory_error_as
from rooftop.errors import InputError, ModelRunError
from rooftop.hardware import measure_ceilings
from rooftop.models.gpt.configs import PRESETS, gpt_config
from rooftop.models.gpt.generation import Generation
from rooftop.models.gpt.network import Gpt
from rooftop.models.gpt.sampling import Sampling
from rooftop.models.gpt.switches import GptConfig
from rooftop.models.gpt.tokenizing import TOKENIZER, ByteTokenizer, Decoder, FileTokenizer, Tokenizer, stop_tokens
from rooftop.models.gpt.weights import CONFIG, config_of_files, empty_gpt, load_gpt_weights, read_gpt_config
from rooftop.parallel import Layout, join, launched
from rooftop.parallel.exchanges import Group
from rooftop.train.checkpoints.trained_models import holds_training, load_trained_gpt, saved_training
from rooftop.words import counted


def run(
    context: click.Context,
    model: str | None,
    weights: Path | None,
    seed: int | None,
    prompts: tuple[str, ...],
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float,
    draws: int,
    by_bytes: bool,
    tensor_parallel_size: int,
    where: torch.device,
    dtype: torch.dtype | None,
    json_path: Path | None,
    with_roof: bool,
) -> None:
    """Run the command that `rooftop.cli.commands.generate:command` describes."""
    if (weights is None) == (seed is None):
        raise click.UsageError(
            "expected exactly one of --weights DIR|FILE and --random-weights SEED (an untrained model)"
        )
    if temperature == 0 and (top_k is not None or top_p < 1):
        raise click.UsageError("--top-k and --top-p need sampling: also give a --temperature above 0, such as 1")
    try:
        sampling = Sampling(temperature, top_k, top_p, draws)
    except ValueError as error:  # the range checks of the options accept NaN and infinity
        raise click.UsageError(str(error)) from error
    rank = _rank(tensor_parallel_size, where)
    prompts = tuple(_unicode(number, prompt) for number, prompt in enumerate(prompts, 1))
    check_json(json_path, [] if weights is None else [weights])
    folder = weights if weights is None or weights.is_dir() else weights.parent
    training = None
    if weights is not None and weights.is_dir() and holds_training(weights):
        training = saved_training(weights)
        by_bytes = by_bytes or (training.text is True and not (weights / TOKENIZER).is_file())
    tokenizer: Tokenizer = ByteTokenizer() if by_bytes or folder is None else FileTokenizer(folder / TOKENIZER)
    stop = stop_tokens(folder) if folder is not None and not by_bytes else []
    said = training.config if training is not None else _config(model, weights)
    if training is not None and model is not None and gpt_config(model) != said:
        raise InputError(f"{weights} was trained with another model than {model}: leave --model out")
    if model is not None and folder is not None and (folder / CONFIG).is_file() and training is None:
        _check_model(model, folder)
    config = said if weights is None or training is not None else config_of_files(said, weights)
    tokens = [tokenizer.encode(prompt) for prompt in prompts]
    chosen_count = context.get_parameter_source("max_new_tokens") is not ParameterSource.DEFAULT
    _check(config, tokens, max_new_tokens if chosen_count else 0)  # check before the weights are read
    layout = _layout(config, tensor_parallel_size)
    kind = dtype or (torch.bfloat16 if where.type == "cuda" else torch.float32)
    settings = {
        "model": config,
        "weights": weights,
        "random_weights": seed,
        "dtype": kind,
        "prompts": tokens,
        "max_new_tokens": max_new_tokens,
        "sampling": sampling,
        "stop": stop,
    }
    with _ranks(layout, where, settings) as (group, place):
        try:
            with memory_error_as(partial(_too_large, config, place)):
                network = _network(config, weights, seed, place, kind, group)
                generation = Generation(network, tokens, max_new_tokens, sampling, stop=stop)
                new = _told(
                    generation, tokenizer, prompts, tokens, _silent if rank or json_path == STANDARD_OUTPUT else _echo
                )
        except FloatingPointError as error:  # in float16, the message ends with the dtypes to try
            raise ModelRunError(f"{error}{' (--dtype)' if kind == torch.float16 else ''}") from error
    if rank:
        return  # only the first rank reports
    figures = _figures(generation, with_roof)
    if json_path is not None:
        texts = [
            {"prompt": prompt, "text": _text(tokenizer, before, after, generation.stop), "tokens": after}
            for prompt, before, after in zip(prompts, tokens, new, strict=True)
        ]
        chosen = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": draws}
        source = {"model": model, "weights": str(weights) if weights else None, "random_weights": seed}
        if write_json(json_path, {**source, "sampling": chosen, "texts": texts, "figures": figures}):
            return
    if config.tied != said.tied:
        click.echo("the weights have a separate head, although the config ties the head to the embedding", err=True)
    for line in _lines(figures):
        click.echo(line, err=True)
    if seed is not None:
        click.echo("random weights: the text means nothing", err=True)
    if json_path is not None:
        click.echo(f"text, tokens, times and rates: {json_path}", err=True)


# ---- the model -----------------------------------------------------------------------------------------------------


def _config(model: str | None, weights: Path | None) -> GptConfig:
    """Return the config of the named preset, or of config.json in the folder of the weights."""
    if model is not None:
        return gpt_config(model)
    folder = weights if weights is None or weights.is_dir() else weights.parent
    if folder is None or not (folder / CONFIG).is_file():
        raise click.UsageError(
            f"expected --model NAME, one of {', '.join(PRESETS)}, or weights with a {CONFIG} in the same folder"
        )
    return read_gpt_config(folder)


def _check_model(model: str, folder: Path) -> None:
    """Raise InputError if the config.json beside the weights describes another model than the preset `model`. Dropout
    does not matter, because generation does not use it."""
    said = replace(read_gpt_config(folder), dropout=0.0, attention_dropout=0.0)
    named = gpt_config(model)
    if said != named:
        wrong = [each.name for each in fields(said) if getattr(said, each.name) != getattr(named, each.name)]
        given = ", ".join(f"{name} {getattr(said, name)!r} instead of {getattr(named, name)!r}" for name in wrong)
        raise InputError(f"{folder / CONFIG} describes another model than --model {model} ({given}): leave --model out")


def _name(config: GptConfig) -> str:
    return next((name for name, known in PRESETS.items() if known == config), f"a model of {config.layers} layers")


def _too_large(config: GptConfig, place: torch.device, words: str) -> ModelRunError:
    """The error for a model and a cache that need more memory than `place` has."""
    remedy = "try --device cpu, or share it among more GPUs: --tensor-parallel-size"
    if place.type == "cpu":
        remedy = "try --dtype bf16, fewer prompts or fewer --max-new-tokens"
    return ModelRunError(f"{_name(config)} does not fit into the memory of {place} ({words}); {remedy}")


def _check(config: GptConfig, prompts: Sequence[Sequence[int]], count: int) -> None:
    for number, tokens in enumerate(prompts, 1):
        if not tokens:
            raise InputError(f"prompt {number} has no tokens: give at least one character")
        if len(tokens) >= config.positions:
            raise InputError(
                f"prompt {number} has {counted(len(tokens), 'token')}, but the model has {config.positions:,} "
                f"positions: shorten it to at most {config.positions - 1:,} tokens"
            )
        if max(tokens) >= config.vocabulary:
            raise InputError(
                f"the tokenizer returns token {max(tokens)}, but the vocabulary of the model has {config.vocabulary} "
                "tokens: use the tokenizer of this model"
            )
    for number, tokens in enumerate(prompts, 1):
        if len(tokens) + count > config.positions:
            raise InputError(
                f"--max-new-tokens {count:,} and the {counted(len(tokens), 'token')} of prompt {number} exceed the "
                f"model's {config.positions:,} positions: give at most {config.positions - len(tokens):,}, or shorten "
                "the prompt"
            )


def _network(
    config: GptConfig, weights: Path | None, seed: int | None, where: torch.device, dtype: torch.dtype, group: Group
) -> Gpt:
    """Load the model onto its device in eval mode, without a second copy of the weights. Each rank reads only its own
    weights. Without a file of weights, draw random weights.
    """
    if weights is not None and weights.is_dir() and holds_training(weights):
        return load_trained_gpt(weights, device=where, dtype=dtype, group=group).eval()
    network = empty_gpt(config, device=where, dtype=dtype, group=group)
    if weights is not None:
        load_gpt_weights(network, weights)
    else:
        network.initialize(torch.Generator(where).manual_seed(seed or 0))
    return network.eval()


# ---- the ranks -----------------------------------------------------------------------------------------------------


def _rank(tensor: int, where: torch.device) -> int:
    """Return the number of this rank, without communication.

    Raises:
        InputError: the launcher started a different number of ranks, or its environment variables are wrong.
        click.UsageError: --device names one GPU for all ranks.
    """
    try:
        launch = launched()
    except ValueError as error:
        raise InputError(str(error)) from error
    if launch.size != tensor:
        alone = launch.launcher == "alone"
        got = "there is only this one" if alone else f"the launcher started {launch.size} processes"
        start = f"torchrun --nproc-per-node {tensor} -m rooftop generate ... --tensor-parallel-size {tensor}"
        remedy = f"start them by {start}" if tensor > 1 else "start rooftop generate without the launcher"
        other = "leave the option out" if launch.size == 1 else f"give --tensor-parallel-size {launch.size}"
        raise InputError(
            f"--tensor-parallel-size {tensor} needs {tensor} process{'es' if tensor > 1 else ''}, but {got}: {remedy}, "
            f"or {other}"
        )
    if tensor > 1 and where.index is not None:
        raise click.UsageError(f"--device {where}: each rank uses the GPU with its own number: give --device cuda")
    return launch.rank


def _layout(config: GptConfig, tensor: int) -> Layout:
    """Return the layout of `tensor` tensor parallel ranks.

    Raises:
        InputError: the ranks cannot split the model.
    """
    sizes = {
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "feed_forward": config.hidden,
        "vocabulary": config.vocabulary,
    }

    def misfit(ranks: int) -> str:
        try:
            Layout(tp=ranks).check(ranks, **sizes, axes=("tp",))
        except ValueError as error:
            # leave out the error's last sentence: it says only that no layout of this number of ranks fits
            return str(error).partition(". ")[0]
        return ""

    if wrong := misfit(tensor):
        fitting = [str(ranks) for ranks in range(1, config.heads + 1) if not misfit(ranks)]
        raise InputError(
            f"--tensor-parallel-size {tensor}: {wrong}; {_name(config)} can be split among {', '.join(fitting)} "
            "ranks: give one of these, and start the same number of processes"
        )
    return Layout(tp=tensor)


@contextmanager
def _ranks(layout: Layout, where: torch.device, settings: Mapping[str, object]) -> Iterator[tuple[Group, torch.device]]:
    """Yield the process group of all ranks, and the device of this rank. A single rank gets (None, where)."""
    if layout.tp == 1:
        yield None, where
        return
    with join(layout, settings=settings, device=where.type) as world:
        yield layout.process_groups()["tp"], world.device


def _silent(text: str) -> None:
    """Print nothing: replaces `_echo` on all ranks but the first, and if standard output is for JSON."""


# ---- the text ------------------------------------------------------------------------------------------------------


def _unicode(number: int, prompt: str) -> str:
    """Decode the text of a prompt from the command line as UTF-8. Python passes each byte that the locale cannot decode
    as a surrogate character. `number` counts the prompts from 1.
    """
    try:
        return prompt.encode(errors="surrogateescape").decode()
    except UnicodeError as error:
        raise InputError(f"prompt {number} is not text in UTF-8: {error}") from error


def _echo(text: str) -> None:
    """Write text to standard output, with "?" for characters that its encoding cannot represent."""
    try:
        click.echo(text, nl=False)
    except UnicodeEncodeError as error:  # Python has written nothing yet
        click.echo(text.encode(error.encoding, "replace").decode(error.encoding), nl=False)


def _told(
    generation: Generation,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    tokens: Sequence[Sequence[int]],
    echo: Callable[[str], None],
) -> list[list[int]]:
    """Generate: return the new tokens of each prompt. Print one prompt's text after the other, each new token of the
    first unfinished prompt as soon as it arrives.
    """
    new: list[list[int]] = [[] for _ in prompts]
    held = ["" for _ in prompts]  # the text of each prompt, held back until the texts of earlier prompts are complete
    decoders = [Decoder(tokenizer, before) for before in tokens]
    current = 0
    echo(prompts[0])

    def go_on() -> int:
        """Print the held-back texts of prompt `current` and of those after it, up to and including the first unfinished
        prompt. Return the index of that prompt, or the number of prompts if all have ended.
        """
        place = current
        while place < len(prompts):
            echo(held[place])
            held[place] = ""
            if not generation.ended(place):
                break
            echo("\n")
            place += 1
            if place < len(prompts):
                echo(f"\n{prompts[place]}")
        return place

    try:
        for index, token in generation:
            new[index].append(token)
            ended = generation.ended(index)
            if not (ended and token in generation.stop):
                held[index] += decoders[index].add(token)
            if ended:
                held[index] += decoders[index].rest()
            if index == current:
                current = go_on()
    except BaseException:
        echo("\n")  # the error begins on a line of its own
        raise
    if current < len(prompts):  # no new tokens were requested
        go_on()
    return new


def _text(tokenizer: Tokenizer, before: Sequence[int], after: Sequence[int], stop: Set[int]) -> str:
    """The text that the new tokens add to a prompt, without the token that ends the text."""
    decoder = Decoder(tokenizer, before)
    return "".join(decoder.add(token) for token in after if token not in stop) + decoder.rest()


# ---- times and rates -----------------------------------------------------------------------------------------------


def _figures(generation: Generation, with_roof: bool) -> dict[str, Any]:
    """Return the measurements for JSON: times in ms, rates in tokens per second. If the roof is unknown, its fields are
    null, and `without_roof` is the reason. With several ranks, `cache_bytes` and `roof_ms` are those of one
    rank.
    """
    decoded, seconds = sum(rows for rows, _ in generation.steps), generation.decode_s
    figures: dict[str, Any] = {
        "device": str(generation.device),
        "tensor_parallel_size": generation.ranks,
        "dtype": str(generation.dtype).removeprefix("torch."),
        "prompt_tokens": generation.prompt_tokens,
        "prefill_ms": 1e3 * generation.prefill_s,
        "steps": len(generation.steps),
        "decoded_tokens": decoded,
        "decode_ms": 1e3 * seconds,
        "tokens_per_s": decoded / seconds if seconds else None,
        "cache_bytes": generation.cache.bytes,
        "roof_ms": None,
        "percent_of_roof": None,
        "without_roof": None if with_roof else "--no-roof",
    }
    if with_roof and generation.steps:
        with progress_bar() as progress:
            ceilings = measure_ceilings(
                generation.device,
                progress=progress,
                precisions=generation.decode_precisions(),
                transfers=False,
                links=False,
            )
        try:
            figures["roof_ms"] = generation.decode_roof_ms(ceilings)
            figures["percent_of_roof"] = 100 * figures["roof_ms"] / figures["decode_ms"]
        except ValueError as error:  # the rate in this dtype was not measured
            figures["without_roof"] = str(error)
    return figures


def _lines(figures: dict[str, Any]) -> list[str]:
    ranks, device = figures["tensor_parallel_size"], figures["device"]
    place = device if ranks == 1 else f"{ranks} x {torch.device(device).type}"
    lines = [
        f"prompts: {counted(figures['prompt_tokens'], 'token')} in {figures['prefill_ms']:,.1f} ms, "
        f"{figures['dtype']} on {place}; cache of {figures['cache_bytes']:,} bytes{'' if ranks == 1 else ' on each'}"
    ]
    if not figures["steps"]:
        return lines
    step_ms = figures["decode_ms"] / figures["steps"]
    lines.append(
        f"decoding: {figures['tokens_per_s']:,.1f} tokens/s, {figures['steps']:,} steps of {step_ms:,.3f} ms each"
    )
    if figures["percent_of_roof"] is not None:
        roof_ms = figures["roof_ms"] / figures["steps"]
        lines[-1] += f"; roof {roof_ms:,.3f} ms, {figures['percent_of_roof']:.1f}% of roof"
        if ranks > 1:
            lines.append("roof: each rank reads its part of weights and cache; communication counts as free")
        if figures["percent_of_roof"] > 100:
            lines.append(
                "the steps are faster than the roof, so the ceilings are wrong: measure again with rooftop ceilings "
                "--refresh"
            )
    elif figures["without_roof"] != "--no-roof":
        lines.append(f"no roof: {figures['without_roof']}")
    return lines
