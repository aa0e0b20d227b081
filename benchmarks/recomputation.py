"""Recomputation of a model's blocks: memory of a token, time of forward and backward, and whether gradients stay.

    python benchmarks/recomputation.py [--out benchmarks/results/h100/recomputation.json]

Each model has a few blocks of a preset's size, in bfloat16, on one GPU. All kinds take turns. `bytes_per_token` is what
a block more takes of the allocator between forward and backward, beside its weights. Gradients are compared with those
without recomputation bit for bit.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rooftop.hardware import devices
from rooftop.hardware.timing import compare
from rooftop.models import gpt_config, parallel_gpt
from rooftop.models.gpt import Gpt

KINDS: tuple[bool | str, ...] = (False, "selective", "full")
MODELS = {"gpt2-xl": (8, 1024), "llama-7b": (2, 4096), "llama-70b": (1, 4096)}  # sequences, and tokens of each
BLOCKS = {"gpt2-xl": 6, "llama-7b": 4, "llama-70b": 2}
VOCABULARY = 1024  # the head and the embedding are not what is measured
LEAST_SAVED = 1 / 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="show on a CPU that the script runs")
    options = parser.parse_args()
    device = "cpu" if options.quick else "cuda"
    rows = [row for name in MODELS for row in rows_of(name, device)]
    for row in rows:
        print(json.dumps(row))
    if options.out is not None:
        found = next(d.to_dict() for d in devices() if d.kind == device)
        result = {"device": found, "torch": torch.__version__, "rows": rows}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    wrong = [row for row in rows if not row["same_gradients"]]
    for row in wrong:
        print("WRONG", row)
    return 1 if wrong else 0


def rows_of(name: str, device: str) -> list[dict[str, Any]]:
    """Of each kind of recomputation."""
    (batch, length), blocks = MODELS[name], BLOCKS[name]
    config = replace(gpt_config(name), layers=blocks, vocabulary=VOCABULARY, dropout=0.0, attention_dropout=0.0)
    if device == "cpu":
        batch, length, blocks = 1, 8, 2
        config = replace(config, layers=blocks, width=64, hidden=128, heads=4, kv_heads=4)
    tokens = torch.randint(VOCABULARY, (batch, length), device=device)
    models = {kind: model_of(config, kind, device) for kind in KINDS}
    steps = {str(kind): step_of(model, tokens) for kind, model in models.items()}
    for step in steps.values():  # kernels are compiled
        step()
    expected = gradients_of(models[False], steps["False"])
    kept = {kind: kept_per_block(config, kind, tokens, device) / tokens.numel() for kind in KINDS}
    times = compare(steps, device=device, seconds=0.1 if device == "cpu" else 3.0)
    rows = []
    for kind, model in models.items():
        found = gradients_of(model, steps[str(kind)])
        rows.append({
            "model": name, "blocks": blocks, "batch": batch, "length": length, "recompute": str(kind),
            "bytes_per_token": kept[kind], "saved": 1 - kept[kind] / kept[False] if kept[False] else 0.0,
            "ms": times[str(kind)].median_ms,
            "longer": times[str(kind)].median_ms / times["False"].median_ms - 1,
            "same_gradients": all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)),
        })  # fmt: skip
    return rows


def model_of(config: Any, kind: bool | str, device: str) -> Gpt:
    return parallel_gpt(config, seed=1, recompute=kind, device=device, dtype=torch.bfloat16)


def step_of(model: Gpt, tokens: torch.Tensor) -> Callable[[], None]:
    """Forward and backward."""

    def step() -> None:
        model.zero_grad()
        model(tokens, tokens).backward()

    return step


def gradients_of(model: Gpt, step: Callable[[], None]) -> list[torch.Tensor]:
    step()
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return found


def kept_per_block(config: Any, kind: bool | str, tokens: torch.Tensor, device: str) -> float:
    """Bytes of one block more, between forward and backward."""
    if device == "cpu":
        return 0.0
    kept = []
    for layers in (1, 2):
        model = model_of(replace(config, layers=layers), kind, device)
        model(tokens, tokens).backward()
        model.zero_grad()
        before = torch.cuda.memory_allocated()
        loss = model(tokens, tokens)
        kept.append(torch.cuda.memory_allocated() - before)
        del loss, model
    return kept[1] - kept[0]


if __name__ == "__main__":
    raise SystemExit(main())
