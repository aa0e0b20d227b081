"""Activation recomputation in a model's blocks: memory per token, and time of forward and backward.

    python benchmarks/recomputation.py [--out benchmarks/results/h100/recomputation.json]

Each model has a few blocks of a preset's size, in bfloat16, on one GPU. All kinds of recomputation take turns. They are
replayed from CUDA graphs, so that launch time does not count. `bytes_per_token` is the memory that one more block keeps
between forward and backward, in addition to its weights. Each tensor that selective recomputation recomputes is
compared with the forward pass's tensor, bit for bit. Gradients are not compared, because cuDNN's attention sums them in
another order in each run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from rooftop.hardware import devices
from rooftop.hardware.timing import compare
from rooftop.models import gpt_config, parallel_gpt
from rooftop.models.gpt.network import Gpt
from rooftop.parallel import recomputing
from rooftop.whole_files import write_json

KINDS: tuple[bool | str, ...] = (False, "selective", "full")
MODELS = {"gpt2-xl": (8, 1024), "llama-7b": (2, 4096), "llama-70b": (1, 4096)}  # (sequences, tokens per sequence)
BLOCKS = {"gpt2-xl": 6, "llama-7b": 4, "llama-70b": 2}
VOCABULARY = 1024  # small, because embedding and head are not measured


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="test the script on a CPU")
    options = parser.parse_args()
    device = "cpu" if options.quick else "cuda"
    rows = [row for name in MODELS for row in rows_of(name, device)]
    for row in rows:
        print(json.dumps(row))
    if options.out is not None:
        found = next(d.to_dict() for d in devices() if d.kind == device)
        result = {"device": found, "torch": torch.__version__, "rows": rows}
        write_json(options.out, result)
    wrong = [row for row in rows if row["recompute"] == "selective" and row["other_tensors"] != 0]
    for row in wrong:
        print("WRONG", row)
    return 1 if wrong else 0


def rows_of(name: str, device: str) -> list[dict[str, Any]]:
    """Measure each kind of recomputation, one row each."""
    (batch, length), blocks = MODELS[name], BLOCKS[name]
    config = replace(gpt_config(name), layers=blocks, vocabulary=VOCABULARY, dropout=0.0, attention_dropout=0.0)
    if device == "cpu":
        batch, length, blocks = 1, 8, 2
        config = replace(config, layers=blocks, width=64, hidden=128, heads=4, kv_heads=4)
    tokens = torch.randint(VOCABULARY, (batch, length), device=device)
    models = {kind: model_of(config, kind, device) for kind in KINDS}
    steps = {str(kind): step_of(model, tokens) for kind, model in models.items()}
    for step in steps.values():  # compiles the kernels
        step()
    made, other = made_again_and_other(steps["selective"])
    kept = {kind: kept_per_block(config, kind, tokens, device) / tokens.numel() for kind in KINDS}
    times = compare(steps, device=device, seconds=0.1 if device == "cpu" else 2.0, graph=device == "cuda")
    rows: list[dict[str, Any]] = []
    for kind in models:
        rows.append({
            "model": name, "blocks": blocks, "batch": batch, "length": length, "recompute": str(kind),
            "bytes_per_token": kept[kind], "saved": 1 - kept[kind] / kept[False] if kept[False] else 0.0,
            "ms": times[str(kind)].median_ms,
            "longer": times[str(kind)].median_ms / times["False"].median_ms - 1,
        })  # fmt: skip
        if kind == "selective":
            rows[-1] |= {"tensors_made_again": made, "other_tensors": other}
    return rows


def model_of(config: Any, kind: bool | str, device: str) -> Gpt:
    return parallel_gpt(config, seed=1, recompute=kind, device=device, dtype=torch.bfloat16)


def step_of(model: Gpt, tokens: torch.Tensor) -> Callable[[], None]:
    """A step that runs forward and backward."""

    def step() -> None:
        model.zero_grad()
        model(tokens, tokens).backward()

    return step


def made_again_and_other(step: Callable[[], None]) -> tuple[int, int]:
    """The number of tensors that a step recomputed, and how many of them differ from the forward pass's tensors."""
    equal: list[bool] = []

    class Compared(recomputing._Recipe):
        def __init__(self, make: Any, sources: Any, made: Any) -> None:
            super().__init__(make, sources, made)
            self.of_forward = [each.detach().clone() for each in made]

        def take(self, place: int) -> torch.Tensor:
            found = super().take(place)
            equal.append(torch.equal(found, self.of_forward[place]))
            return found

    with patch.object(recomputing, "_Recipe", Compared):
        step()
    return len(equal), equal.count(False)


def kept_per_block(config: Any, kind: bool | str, tokens: torch.Tensor, device: str) -> float:
    """Bytes that one more block keeps between forward and backward."""
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
