"""Pipeline schedules of our own, beside PyTorch's with the same stages, FSDP2, and a pipeline without bubbles.

    python benchmarks/pipelines.py [--out benchmarks/results/h100/pipelines.json]

llama-1b with 24 layers, sequences of 4,096 tokens, eight micro-batches of one, bfloat16 with float32 weights and AdamW.
A step of one GPU, divided by the ranks, is what a pipeline without bubbles and transfers would take:
`beside_bubble_free` is a step by that. PyTorch's schedules (`torch.distributed.pipelining`) run the modules of our
stages, so that only the schedules and transfers differ; their rows are forward and backward alone, and so are ours
beside them ("gradients"). Of each variant, steps are timed one by one after two others; the median of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rooftop.hardware import devices
from rooftop.models import gpt_config
from rooftop.models.gpt_stages import GptStages, parallel_gpt_stages
from rooftop.parallel import Layout, Pipeline, defer_weight_gradients, join, launched, schedule_of, simulate
from rooftop.train import GptTrainer, GptTraining, Tokens

MICRO_BATCHES, STEPS = 8, 5
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv")
PEERS = {"1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B", "zbv": "ScheduleZBVZeroBubble"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--ranks", type=int, default=max(1, torch.cuda.device_count()))
    parser.add_argument("--quick", action="store_true", help="show on a CPU that the script runs, by gloo")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(options)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in sorted({1, options.ranks}):
            found = Path(folder, f"{ranks}.json")
            start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            passed = ["--quick"] if options.quick else []
            status = subprocess.run([*start, __file__, *passed, "--worker", str(found)]).returncode
            if status:
                return status
            rows += json.loads(found.read_text())
    alone = {row["what"]: row["ms"] for row in rows if row["ranks"] == 1}
    for row in rows:
        if row["ranks"] > 1 and "ms" in row:
            row["beside_bubble_free"] = row["ms"] / (alone[row["what"]] / row["ranks"])
    device = next(d.to_dict() for d in devices() if d.kind == ("cpu" if options.quick else "cuda"))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"device": device, "torch": torch.__version__, "rows": rows}, indent=1)
        options.out.write_text(text + "\n")
    for row in rows:
        print(json.dumps(row))
    return 0


def worker(options: argparse.Namespace) -> int:
    rows: list[dict[str, Any]] = []
    kind = "cpu" if options.quick else "cuda"
    with join(Layout(pp=launched().size), device=kind, timeout_s=100.0) as world:
        for make in (trained, gradients_only):
            for row in make(world.device, options.quick):
                rows.append({"ranks": world.size, **row})
                if world.rank == 0:
                    print(json.dumps(rows[-1]), flush=True)
        if world.rank == 0:
            options.worker.write_text(json.dumps(rows))
    return 0


def training_of(quick: bool, **changes: Any) -> GptTraining:
    length = 64 if quick else 4096
    config = replace(gpt_config("llama-1b"), positions=length, layers=24)  # of 22, which have no half of a half
    if quick:
        config = replace(config, layers=4, width=64, heads=8, kv_heads=4, hidden=96, vocabulary=128)
    dtype = torch.float32 if quick else torch.bfloat16
    return GptTraining(config=config, length=length, global_batch=MICRO_BATCHES, micro_batch=1, dtype=dtype, **changes)


def trained(device: torch.device, quick: bool) -> Iterator[dict[str, Any]]:
    """Whole steps of `GptTrainer`."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    variants: dict[str, tuple[Layout, dict[str, Any], bool]] = {"one GPU": (Layout(), {}, False)}
    if ranks > 1:
        variants = {
            name: (Layout(pp=ranks), {"pipeline_schedule": name} | layers_of(name, ranks, quick), False)
            for name in SCHEDULES
        }
        variants["FSDP2"] = (Layout(ranks), {}, True)
    for name, (layout, changes, shared) in variants.items():
        training = training_of(quick, **changes)
        numbers = torch.randint(
            training.config.vocabulary, (training.length * 64 + 1,), generator=torch.Generator().manual_seed(0)
        )
        trainer = GptTrainer(
            training, Tokens([numbers.numpy()], "random"), layout, layout.process_groups(), device, fully_shard=shared
        )
        loss = float(trainer.advance()[0])
        found = times(trainer.advance, device)
        row = {"what": "step", "variant": name, "first_loss": loss, **summary(found)}
        if trainer.schedule is not None:
            row["bubble"] = simulate(trainer.schedule).bubble
        if device.type == "cuda":
            row["peak_gib"] = largest(torch.cuda.max_memory_allocated() / 2**30)
        del trainer
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        yield row


def layers_of(name: str, ranks: int, quick: bool) -> dict[str, int]:
    layers = training_of(quick).config.layers
    return {"layers_per_virtual_stage": layers // (2 * ranks)} if name == "interleaved" else {}


# ---- forward and backward alone ----------------------------------------------------------------------------------


def gradients_only(device: torch.device, quick: bool) -> Iterator[dict[str, Any]]:
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    training = training_of(quick)
    config, length = training.config, training.length
    made = torch.Generator().manual_seed(0)
    text = torch.randint(config.vocabulary, (MICRO_BATCHES, length + 1), generator=made).to(device)
    tokens, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    layout = Layout(pp=ranks)
    groups = layout.process_groups()
    names = tuple(PEERS) if ranks > 1 else ("1f1b",)
    for name in names:
        stages = 2 if name == "interleaved" else None
        schedule = schedule_of(name, ranks, MICRO_BATCHES, stages)
        model = parallel_gpt_stages(
            config, layout, groups, schedule, seed=1, length=length, device=device, dtype=training.dtype
        )
        runs: dict[str, Callable[[], object]] = {"rooftop": ours(model, schedule, groups, tokens, targets)}
        if ranks > 1:
            runs["PyTorch"] = peer(PEERS[name], model, schedule.stages, tokens, targets, groups["pp"], rank)
        for who, run in runs.items():
            row = {"what": "gradients", "variant": f"{who}, {name}" if ranks > 1 else "one GPU"}
            try:
                model.zero_grad(set_to_none=True)
                found = times(run, device)
            except Exception as error:
                if who == "rooftop":
                    raise
                yield {**row, "failed": f"{type(error).__name__}: {' '.join(str(error).split())[-300:]}"}
                continue
            norms = [p.grad.float().norm() for p in model.parameters() if p.grad is not None]
            yield {**row, **summary(found), "gradient": float(torch.stack(norms).norm())}


def ours(model: GptStages, schedule: Any, groups: Any, tokens: Tensor, targets: Tensor) -> Callable[[], object]:
    pipeline = Pipeline(
        schedule,
        group=groups["pp"],
        shape=model.shape_between(1, tokens.shape[1]),
        dtype=next(model.parameters()).dtype,
        device=tokens.device,
        deferral=defer_weight_gradients(model) if schedule.splits_backward else None,
    )

    def compute(stage: int, number: int, given: Tensor | None) -> Tensor:
        input = tokens[number : number + 1] if given is None else given
        last = stage + 1 == schedule.stages
        made = model(stage, input, targets[number : number + 1] if last else None, reduction="sum")
        return made / targets.numel() if last else made

    def run() -> object:
        model.zero_grad(set_to_none=True)
        return pipeline.run(compute)

    return run


class Stage(nn.Module):
    """A stage of ours as PyTorch's schedules call it; the last one gives what its loss takes."""

    def __init__(self, model: GptStages, number: int, last: bool) -> None:
        super().__init__()
        self.stage, self.last = model.stages[number], last

    def forward(self, x: Tensor) -> Tensor:
        if not self.last:
            made: Tensor = self.stage(x)
            return made
        positions = torch.arange(x.shape[1], device=x.device)
        hidden, update = self.stage.through_layers(x, positions)
        return hidden if update is None else hidden + update


def peer(
    kind: str, model: GptStages, stages: int, tokens: Tensor, targets: Tensor, group: Any, rank: int
) -> Callable[[], object]:
    from torch.distributed import pipelining

    modules = {number: Stage(model, number, number + 1 == stages) for number in model.stages}
    dtype = next(model.parameters()).dtype
    between = torch.empty(1, tokens.shape[1], model.config.width, device=tokens.device, dtype=dtype)
    between.requires_grad_()  # its gradient goes back
    made = [
        pipelining.PipelineStage(
            module,
            number,
            stages,
            tokens.device,
            input_args=tokens[:1] if number == 0 else between,
            output_args=between,
            group=group,
        )
        for number, module in modules.items()
    ]

    def loss_of(hidden: Tensor, target: Tensor) -> Tensor:
        assert model.head is not None
        loss: Tensor = model.head(hidden, None, target, reduction="sum")
        return loss / targets.numel()

    given = made[0] if kind == "Schedule1F1B" else made
    schedule = getattr(pipelining, kind)(given, MICRO_BATCHES, loss_fn=loss_of, scale_grads=False)

    def run() -> object:
        model.zero_grad(set_to_none=True)
        first = [tokens] if 0 in modules else []
        return schedule.step(*first, target=targets if stages - 1 in modules else None)

    return run


# ---- timing ------------------------------------------------------------------------------------------------------


def times(run: Callable[[], object], device: torch.device) -> list[float]:
    """Of single steps after two others, the slowest rank's."""
    found = []
    for number in range(2 + STEPS):
        if dist.is_initialized():
            dist.barrier()
        if device.type != "cuda":
            run()
            found.append(1.0)
            continue
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        first.record()
        run()
        last.record()
        last.synchronize()
        if number >= 2:
            found.append(largest(first.elapsed_time(last)))
    return found


def summary(found: list[float]) -> dict[str, float]:
    ms = statistics.median(found)
    return {"ms": ms, "spread": (max(found) - min(found)) / ms}


def largest(value: float) -> float:
    """Of all ranks."""
    if not dist.is_initialized():
        return value
    found = torch.tensor(value, dtype=torch.float64, device="cuda" if "nccl" in dist.get_backend() else "cpu")
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


if __name__ == "__main__":
    sys.exit(main())
