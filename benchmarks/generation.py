"""Text generation compared with transformers: milliseconds per new token, tokens a second, and percent of the roof.

    python benchmarks/generation.py [--out benchmarks/results/h200/generation.json] [--only llama-7b-1]
    python benchmarks/generation.py --only shared [--ranks 2]

GPT-2 XL and Llamas of 1 and 7 billion parameters generate greedily after prompts of 128 tokens, in bfloat16 with random
weights. Ours is `rooftop.models.generate`, with a paged cache and each step replayed from a CUDA graph. The peer is
transformers' `generate`, with a dynamic cache, and with a static cache, for which transformers compiles the model. All
variants have the same weights. The time of a token is the time difference between a long and a short text, divided by
the difference in tokens. So prompts, compilation and capture do not count. Figures are medians. The roof of a step is
the time to read the weights and the cache once (`step_cost`), at the ceilings measured in the same run.

`shared` needs several GPUs. It runs the Llama of 7 billion parameters on one GPU and on `--ranks` tensor parallel GPUs,
started by torchrun. The sums over the ranks are measured twice: with NCCL, and with one kernel that also computes the
following norm (`rooftop.parallel.norm_sums`). `norm_sums_refused` says why that kernel was not used. The roof is the
time in which a rank reads its part of the weights and cache; communication counts as zero time. `speedup` is the time
of one GPU over that of several.

`agree` is the number of tokens of the first text on which a peer and Rooftop agree before they first differ. In
bfloat16, rounding decides near ties. `--peers none` leaves transformers out. `--peers static` leaves out only the
dynamic cache, which is not compiled. `--quick` tests the script on a CPU, with ranks that use gloo.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from programs import Results
from torch import Tensor

from rooftop.cost import roof
from rooftop.hardware import Ceilings, ceilings_of, measure_ceilings
from rooftop.models import Generation, Gpt, generate, gpt_config
from rooftop.models.gpt import generation as generation_module
from rooftop.models.gpt.configs import GptConfig, hugging_face_config
from rooftop.models.gpt.generation import step_cost
from rooftop.models.gpt.layouts import parallel_gpt
from rooftop.models.gpt.weights import hugging_face_state_dict
from rooftop.parallel import Layout, join, launched
from rooftop.parallel.norm_sums import NormSums

Texts = list[list[int]]
Make = Callable[[int], Texts]  # maps a number of new tokens to the new tokens of each prompt
SHORT, REPEATS = 8, 5


@dataclass(frozen=True)
class Case:
    """A model, the batch size, the tokens per prompt, and the new tokens per sequence."""

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

    def lengths(self, small: bool) -> tuple[int, int]:
        """The number of tokens in a prompt, and the number of new tokens."""
        return (8, 24) if small else (self.prompt, self.new)


CASES = (Case("gpt2-xl", 1), Case("llama-1b", 1), Case("llama-1b", 16), Case("llama-7b", 1), Case("llama-7b", 16))
SHARED = Case("llama-7b", 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*(case.name for case in CASES), "shared"]
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200/generation.json"))
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--peers", choices=("none", "static", "all"), default="all", help="peers to compare with")
    parser.add_argument(
        "--ranks", type=int, help="number of ranks that share a model [default: 2, or fewer if there are fewer GPUs]"
    )
    parser.add_argument("--quick", action="store_true", help="a tiny run on the CPU, to test the script")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--by-nccl", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(options.worker, options.quick, options.by_nccl)
    if not options.quick and not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU; --quick tests the script on a CPU")
    ranks = options.ranks or (2 if options.quick or torch.cuda.device_count() > 1 else 1)
    if not options.quick and ranks > torch.cuda.device_count():
        parser.error(f"--ranks {ranks}: expected at most one for each of {torch.cuda.device_count()} GPUs")
    ceilings = ceilings_of("h200") if options.quick else measure_ceilings("cuda")
    results = Results(options.out, ceilings)
    failed = False
    for case in CASES:
        if case.name not in options.only:
            continue
        try:
            for row in measured(case, ceilings, options.quick, options.peers):
                results.add(row)
        except Exception:  # continue, because the other cases are still useful
            traceback.print_exc()
            failed = True
        gc.collect()
        if not options.quick:
            torch.cuda.empty_cache()
    if "shared" in options.only and ranks > 1:
        try:
            for row in shared(ranks, ceilings, options.quick):
                results.add(row)
        except Exception:
            traceback.print_exc()
            failed = True
    return int(failed)


# ---- one process ---------------------------------------------------------------------------------------------------


def measured(case: Case, ceilings: Ceilings, small: bool, peers: str) -> Iterator[dict[str, Any]]:
    device, dtype = ("cpu", torch.float32) if small else ("cuda", torch.bfloat16)
    config = case.config(small)
    prompt, new = case.lengths(small)
    torch.manual_seed(0)
    model = Gpt(config, device=device, dtype=dtype).eval()
    prompts = torch.randint(config.vocabulary, (case.batch, prompt), device=device)
    variants: dict[str, Make] = {"rooftop": lambda count: generate(model, prompts.tolist(), count)}
    if peers != "none":
        theirs = by_transformers(model, prompts)
        variants |= {name: make for name, make in theirs.items() if peers == "all" or "static" in name}
    step = roof_ms(case, config, small, ceilings)
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
            "agree": agreeing(texts, ours),
        }


def roof_ms(case: Case, config: GptConfig, small: bool, ceilings: Ceilings) -> float:
    """The roof of the step halfway between the end of the short text and the end of the long text."""
    prompt, new = case.lengths(small)
    middle = prompt + (SHORT + new) // 2
    dtype = torch.float32 if small else torch.bfloat16
    return roof(step_cost(config, case.batch, case.batch * middle, dtype), ceilings).ms


def agreeing(texts: Texts, ours: Texts) -> int:
    """The number of leading tokens of the first text that are equal in both."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(texts[0], ours[0], strict=False)))


def per_token_ms(make: Make, new: int, device: str) -> tuple[float, float]:
    """The median time per token and its spread, from time differences between a long and a short text."""

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
    """transformers' model with our weights, in the same dtype and on the same device."""
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
        raise RuntimeError(
            f"the weights do not fit transformers' model: missing {left[:3]}, unexpected {unexpected[:3]}"
        )
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
    """Recompute the buffers that no checkpoint stores: the config determines the rotary embeddings' frequencies."""
    import transformers

    for name, module in theirs.named_modules():
        if name.endswith("rotary_emb"):
            fresh = type(module)(config=config).to(device)
            parent = theirs.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], fresh)
    if any(buffer.is_meta for buffer in theirs.buffers()):
        raise RuntimeError(
            f"transformers {transformers.__version__} has non-persistent buffers that this script cannot compute"
        )


# ---- several ranks -------------------------------------------------------------------------------------------------


def shared(ranks: int, ceilings: Ceilings, small: bool) -> Iterator[dict[str, Any]]:
    """Measure the same model on one rank, then on several."""
    config, (prompt, new) = SHARED.config(small), SHARED.lengths(small)
    alone: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for count, by_nccl in ((1, False), (ranks, True), (ranks, False)):
            found = Path(folder, f"{count}.json")
            start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
            options = ["--quick"] * small + ["--by-nccl"] * by_nccl
            subprocess.run([*start, __file__, *options, "--worker", str(found)], check=True)
            told = json.loads(found.read_text())
            alone = alone or told
            step = roof_ms(SHARED, config.of_rank(count), small, ceilings)
            yield {
                "case": f"{SHARED.name}, shared",
                "variant": f"rooftop, {count} {'rank' if count == 1 else 'ranks'}{', sums by NCCL' if by_nccl else ''}",
                "ranks": count,
                "batch": SHARED.batch,
                "prompt": prompt,
                "new": new,
                "ms": told["ms"],
                "spread": told["spread"],
                "tokens_per_s": 1e3 * SHARED.batch / told["ms"],
                "roof_ms": step,
                "percent_of_roof": 100 * step / told["ms"],
                "speedup": alone["ms"] / told["ms"],
                "peak_bytes": told["peak_bytes"],
                "norm_sums_refused": told["norm_sums_refused"],
                "agree": agreeing(told["texts"], alone["texts"]),
            }


def worker(path: Path, small: bool, by_nccl: bool) -> int:
    """Run one rank of `shared`. Rank 0 writes its measurements to a file."""
    layout, config = Layout(tp=launched().size), SHARED.config(small)
    device, dtype = ("cpu", torch.float32) if small else ("cuda", torch.bfloat16)
    prompt, new = SHARED.lengths(small)
    with join(layout, device=device, timeout_s=120.0) as world:
        groups = layout.process_groups()
        model = parallel_gpt(config, layout, groups, seed=0, device=world.device, dtype=dtype).eval()
        drawn = torch.Generator().manual_seed(0)
        prompts = torch.randint(config.vocabulary, (SHARED.batch, prompt), generator=drawn).tolist()

        refused: list[str | None] = []

        def make(count: int) -> Texts:
            generation = Generation(model, prompts, count)
            texts: Texts = [[] for _ in prompts]
            for index, token in generation:
                texts[index].append(token)
            refused[:] = [generation.norm_sums_refused]
            return texts

        asked = patch.object(generation_module, "norm_sums", lambda *_: NormSums(reason="asked for NCCL"))
        with asked if by_nccl else nullcontext():
            texts = make(new)
            ms, spread = per_token_ms(make, new, device)
        peak = None if small else torch.cuda.max_memory_allocated(world.device)
        if world.rank == 0:
            told = {"ms": ms, "spread": spread, "texts": texts, "peak_bytes": peak, "norm_sums_refused": refused[0]}
            path.write_text(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
