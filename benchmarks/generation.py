"""Text generation beside transformers: milliseconds for each new token, tokens a second, and percent of the roof.

    python benchmarks/generation.py [--out benchmarks/results/h200/generation.json] [--only llama-7b-1]

GPT-2 XL and Llamas of 1 and 7 billion parameters in bfloat16, random weights, greedy, after prompts of 128 tokens: ours
(`rooftop.models.generate`: paged cache, the step a CUDA graph) beside transformers' `generate` with a static cache,
compiled as it does by itself, and with a dynamic one. All have the same weights. What a token takes is the difference
of a long and a short text, by the tokens between them, so that prompts, compilation and capture do not count; medians.
The roof of a step reads weights and the cache's positions once (`step_cost`), at the ceilings of the same run.

`agree` says how many tokens of the first text a peer has as we do before the first that differs: in bfloat16 near ties
are decided by rounding. `--peers none` leaves transformers out, `--peers static` its dynamic cache, which is not
compiled; `--quick` shows on a CPU that the script runs.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from programs import Results
from torch import Tensor

from rooftop.cost import roof
from rooftop.hardware import Ceilings, ceilings_of, measure_ceilings
from rooftop.models import Gpt, generate, gpt_config
from rooftop.models.generation import step_cost
from rooftop.models.gpt_configs import GptConfig, hugging_face_config
from rooftop.models.gpt_weights import hugging_face_state_dict

Texts = list[list[int]]
Make = Callable[[int], Texts]  # new tokens -> those of each prompt
SHORT, REPEATS = 8, 5


@dataclass(frozen=True)
class Case:
    """A model, sequences at once, tokens of each prompt, and new ones."""

    model: str
    batch: int
    prompt: int = 128
    new: int = 512

    @property
    def name(self) -> str:
        return f"{self.model}-{self.batch}"

    def config(self, small: bool) -> GptConfig:
        config = gpt_config(self.model)
        sizes = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 4 if config.kv_heads == config.heads else 2}
        return replace(config, **sizes, hidden=64, vocabulary=97, positions=64) if small else config


CASES = (Case("gpt2-xl", 1), Case("llama-1b", 1), Case("llama-1b", 16), Case("llama-7b", 1), Case("llama-7b", 16))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.name for case in CASES]
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200/generation.json"))
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--peers", choices=("none", "static", "all"), default="all", help="what to stand beside")
    parser.add_argument("--quick", action="store_true", help="tiny, on the CPU: shows that the script runs")
    options = parser.parse_args()
    if not options.quick and not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU; --quick shows on a CPU that the script runs")
    ceilings = ceilings_of("h200") if options.quick else measure_ceilings("cuda")
    results = Results(options.out, ceilings)
    failed = False
    for case in CASES:
        if case.name not in options.only:
            continue
        try:
            for row in measured(case, ceilings, options.quick, options.peers):
                results.add(row)
        except Exception:  # the other cases are worth having
            traceback.print_exc()
            failed = True
        gc.collect()
        if not options.quick:
            torch.cuda.empty_cache()
    return int(failed)


def measured(case: Case, ceilings: Ceilings, small: bool, peers: str) -> Iterator[dict[str, Any]]:
    device, dtype = ("cpu", torch.float32) if small else ("cuda", torch.bfloat16)
    config = case.config(small)
    prompt, new = (8, 24) if small else (case.prompt, case.new)
    torch.manual_seed(0)
    model = Gpt(config, device=device, dtype=dtype).eval()
    prompts = torch.randint(config.vocabulary, (case.batch, prompt), device=device)
    variants: dict[str, Make] = {"rooftop": lambda count: generate(model, prompts.tolist(), count)}
    if peers != "none":
        theirs = by_transformers(model, prompts)
        variants |= {name: make for name, make in theirs.items() if peers == "all" or "static" in name}
    middle = prompt + (SHORT + new) // 2  # of the tokens between the short and the long text
    step = roof(step_cost(config, case.batch, case.batch * middle, dtype), ceilings).ms
    ours: Texts = []
    for variant, make in variants.items():
        texts = make(new)  # compiles, captures
        ours = ours or texts
        token_ms, spread = per_token_ms(make, new, device)
        yield {
            "case": case.name,
            "variant": variant,
            "batch": case.batch,
            "prompt": prompt,
            "new": new,
            "ms": token_ms,
            "spread": spread,
            "tokens_per_s": 1e3 * case.batch / token_ms,
            "roof_ms": step,
            "percent_of_roof": 100 * step / token_ms,
            "agree": sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(texts[0], ours[0], strict=False))),
        }


def per_token_ms(make: Make, new: int, device: str) -> tuple[float, float]:
    """The median of some differences of a long and a short text, by the tokens between them, and their spread."""

    def seconds(count: int) -> float:
        begin = time.perf_counter()
        texts = make(count)
        if device == "cuda":
            torch.cuda.synchronize()
        assert all(len(text) == count for text in texts)
        return time.perf_counter() - begin

    each = [1e3 * (seconds(new) - seconds(SHORT)) / (new - SHORT) for _ in range(REPEATS)]
    return statistics.median(each), (max(each) - min(each)) / statistics.median(each)


def by_transformers(model: Gpt, prompts: Tensor) -> dict[str, Make]:
    """Theirs with our weights, in the same dtype and on the same device."""
    import transformers

    transformers.logging.set_verbosity_error()
    weight = next(model.parameters())
    config = transformers.AutoConfig.for_model(**hugging_face_config(model.config))
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=weight.dtype)
    theirs = theirs.to_empty(device=weight.device).eval()
    reset_buffers(theirs, config, weight.device)
    missing, unexpected = theirs.load_state_dict(
        hugging_face_state_dict(model.state_dict(), model.config), strict=False
    )
    left = [key for key in missing if key != "lm_head.weight" or not model.config.tied]
    if left or unexpected:
        raise RuntimeError(f"transformers' model does not fit: missing {left[:3]}, unexpected {unexpected[:3]}")
    theirs.tie_weights()
    mask = torch.ones_like(prompts)

    def with_cache(kind: str) -> Make:
        def make(count: int) -> Texts:
            found = theirs.generate(
                prompts, attention_mask=mask, do_sample=False, min_new_tokens=count, max_new_tokens=count,
                cache_implementation=kind, pad_token_id=0, eos_token_id=None,
            )  # fmt: skip
            texts: Texts = found[:, prompts.shape[1] :].tolist()
            return texts

        return make

    return {"transformers, static": with_cache("static"), "transformers, dynamic": with_cache("dynamic")}


def reset_buffers(theirs: Any, config: Any, device: torch.device) -> None:
    """What follows from the config and is in no file: the frequencies of rotary embeddings."""
    import transformers

    for name, module in theirs.named_modules():
        if name.endswith("rotary_emb"):
            fresh = type(module)(config=config).to(device)
            parent = theirs.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], fresh)
    if any(buffer.is_meta for buffer in theirs.buffers()):
        raise RuntimeError(f"transformers {transformers.__version__} keeps buffers that this script does not know")


if __name__ == "__main__":
    sys.exit(main())
