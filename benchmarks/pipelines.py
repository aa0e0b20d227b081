"""Rooftop's pipeline schedules compared with PyTorch's schedules (compiled blocks), with FSDP2, and with an ideal
pipeline.

    python benchmarks/pipelines.py [--out benchmarks/results/h100/pipelines.json]

The model is llama-1b with 24 layers, in bfloat16, with sequences of 4,096 tokens and eight micro-batches of one. Two
things are timed:

    step        a step of `GptTrainer`: float32 weights next to the bfloat16 ones, clipping, AdamW
    gradients   only forward and backward, with bfloat16 weights; PyTorch runs the same Llama in plain torch.nn with
                each block compiled (`parallel_native.py`). PyTorch's zero-bubble schedule refuses compiled blocks.

Rooftop's schedules are launched by the host, and replayed from a CUDA graph. A pipeline without bubbles and transfers
would take the faster of the two times on one GPU, divided by the number of ranks. `beside_bubble_free` is the time of a
step relative to this ideal. Steps are timed one by one after a warm-up. Figures are medians on the slowest rank. One
more step, under the profiler, shows how long ranks compute.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parallel_native import Llama, cross_entropy_of, fill, share
from timelines import STEP, communication
from torch import Tensor, nn
from worlds import Ended, Row, largest, rows_of, told, written

from rooftop.models import gpt_config
from rooftop.models.gpt.blocks import rotation_of
from rooftop.models.gpt.stages import GptStages, layers_of_stages, parallel_gpt_stages
from rooftop.parallel import Layout, Pipeline, defer_weight_gradients, join, launched, schedule_of, simulate
from rooftop.train import GptTrainer, GptTraining, Replayed, Tokens

LAYERS, MICRO_BATCHES, STEPS, WARM_UP = 24, 8, 5, 5
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv")
PEERS = {"1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B", "zbv": "ScheduleZBVZeroBubble"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="+", choices=("step", "gradients"), default=("step", "gradients"))
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=SCHEDULES)
    parser.add_argument("--layers", type=int, default=LAYERS, help="number of layers (default %(default)s)")
    parser.add_argument("--ours", action="store_true", help="leave out PyTorch's schedules")
    parser.add_argument("--ranks", type=int, default=max(1, torch.cuda.device_count()))
    parser.add_argument("--quick", action="store_true", help="test the script on a CPU, with gloo")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(options)
    passed = ["--only", *options.only, "--schedules", *options.schedules, "--layers", str(options.layers)]
    passed += [*(["--quick"] if options.quick else []), *(["--ours"] if options.ours else [])]
    try:
        keep = partial(written, out=options.out, quick=options.quick, complete=False)
        rows = rows_of(__file__, sorted({1, options.ranks}), passed, keep)
    except Ended as ended:
        return ended.status
    with_ideal(rows)
    written(rows, options.out, quick=options.quick, complete=True)
    return 0


def with_ideal(rows: list[Row]) -> None:
    """Add `beside_bubble_free` to each row of several ranks: the row's time, relative to the fastest time of one GPU
    divided by the number of ranks."""
    alone: dict[str, float] = {}
    for row in rows:
        if row["ranks"] == 1 and row["variant"].startswith("rooftop"):
            alone[row["what"]] = min(row["ms"], alone.get(row["what"], row["ms"]))
    for row in rows:
        if row["ranks"] > 1 and "ms" in row:
            row["beside_bubble_free"] = row["ms"] / (alone[row["what"]] / row["ranks"])


def worker(options: argparse.Namespace) -> int:
    kind = "cpu" if options.quick else "cuda"
    with join(Layout(pp=launched().size), device=kind, timeout_s=100.0) as world:
        for what, make in (("step", steps), ("gradients", gradients)):
            if what in options.only:
                found = make(world.device, options)
                rows = ({"ranks": world.size, "layers": options.layers, "what": what, **row} for row in found)
                told(rows, options.worker)
    return 0


def training_of(quick: bool, layers: int = LAYERS, **changes: Any) -> GptTraining:
    """The training of a model with 24 layers by default, since 4 ranks cannot split llama-1b's 22 layers evenly."""
    length = 64 if quick else 4096
    config = replace(gpt_config("llama-1b"), positions=length, layers=layers)
    if quick:
        config = replace(config, width=64, heads=8, kv_heads=4, hidden=96, vocabulary=128)
    dtype = torch.float32 if quick else torch.bfloat16
    return GptTraining(config=config, length=length, global_batch=MICRO_BATCHES, micro_batch=1, dtype=dtype, **changes)


def layers_of(name: str, ranks: int, layers: int) -> dict[str, int]:
    return {"layers_per_virtual_stage": layers // (2 * ranks)} if name == "interleaved" else {}


def ways(device: torch.device, name: str) -> dict[str, bool]:
    """The schedules to run, and whether each is replayed from a CUDA graph. Without a graph, the host limits every
    schedule."""
    launched_too = {"": False} if device.type != "cuda" or name in ("", "1f1b") else {}
    return launched_too | ({", replayed": True} if device.type == "cuda" else {})


# ---- steps -------------------------------------------------------------------------------------------------------


def steps(device: torch.device, options: argparse.Namespace) -> Iterator[Row]:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    variants: dict[str, tuple[Layout, dict[str, Any], bool]] = {}
    for name in options.schedules if ranks > 1 else ("",):
        for way, replayed in ways(device, name).items():
            if ranks == 1:
                variants[f"rooftop{way}"] = Layout(), {"cuda_graph": replayed}, False
                continue
            changes = {"pipeline_schedule": name, "cuda_graph": replayed} | layers_of(name, ranks, options.layers)
            variants[f"rooftop, {name}{way}"] = Layout(pp=ranks), changes, False
    if ranks > 1:
        variants["rooftop, FSDP2"] = Layout(ranks), {"sum_once": True}, True
    for name, (layout, changes, shared) in variants.items():
        training = training_of(options.quick, options.layers, **changes)
        made = torch.Generator().manual_seed(0)
        numbers = torch.randint(training.config.vocabulary, (training.length * 64 + 1,), generator=made)
        trainer = GptTrainer(
            training, Tokens([numbers.numpy()], "random"), layout, layout.process_groups(), device, fully_shard=shared
        )
        loss = float(trainer.advance()[0])
        row = {"variant": name, "first_loss": loss, **summary(times(trainer.advance, device))}
        row |= computing(trainer.advance, device)
        if trainer.schedule is not None:
            row["bubble"] = simulate(trainer.schedule).bubble
        del trainer
        yield {**row, **peak(device)}


def peak(device: torch.device) -> dict[str, float]:
    """Return the peak memory since the last call, and free cached memory."""
    if device.type != "cuda":
        return {}
    found = largest(torch.cuda.max_memory_allocated() / 2**30)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return {"peak_gib": found}


# ---- forward and backward alone ----------------------------------------------------------------------------------


def gradients(device: torch.device, options: argparse.Namespace) -> Iterator[Row]:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    training = training_of(options.quick, options.layers)
    made = torch.Generator().manual_seed(0)
    text = torch.randint(training.config.vocabulary, (MICRO_BATCHES, training.length + 1), generator=made).to(device)
    tokens, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    groups = Layout(pp=ranks).process_groups()
    for name in (name for name in options.schedules if name != "gpipe") if ranks > 1 else ("1f1b",):
        for way, replayed in ways(device, name).items():
            run, model = ours(name, training, groups, tokens, targets, replayed)
            yield measured(f"rooftop, {name}{way}" if ranks > 1 else f"rooftop{way}", run, model, device)
            del run, model
    peers: dict[str, Callable[[], tuple[Callable[[], object], nn.Module]]] = {}
    if options.ours:
        return
    if ranks == 1:
        peers["PyTorch, compiled"] = lambda: alone(training, tokens, targets)
    else:
        peers["PyTorch, FSDP2, compiled"] = lambda: peer_shared(training, tokens, targets)
        for name, kind in PEERS.items():
            compiled = name != "zbv"  # this schedule refuses compiled blocks
            way = "compiled" if compiled else "not compiled"
            peers[f"PyTorch, {name}, {way}"] = lambda kind=kind, compiled=compiled: peer(
                kind, training, tokens, targets, groups["pp"], compiled
            )
    for name, make in peers.items():
        try:
            run, model = make()
            row = measured(name, run, model, device)
        except Exception as error:
            row = {"variant": name, "failed": f"{type(error).__name__}: {' '.join(str(error).split())[-300:]}"}
        with suppress(NameError):
            del run, model
        yield row


def measured(name: str, run: Callable[[], object], model: nn.Module, device: torch.device) -> Row:
    found = summary(times(run, device)) | computing(run, device)
    norms = [p.grad.float().norm() for p in model.parameters() if p.grad is not None]
    return {"variant": name, **found, "gradient": float(torch.stack(norms).norm()), **peak(device)}


def ours(
    name: str, training: GptTraining, groups: Any, tokens: Tensor, targets: Tensor, replayed: bool
) -> tuple[Callable[[], object], GptStages]:
    ranks, device = dist.get_world_size() if dist.is_initialized() else 1, tokens.device
    layout = Layout(pp=ranks)
    schedule = schedule_of(name, ranks, MICRO_BATCHES, 2 if name == "interleaved" else None)
    model = parallel_gpt_stages(
        training.config, layout, groups, schedule, seed=1, length=training.length, device=device, dtype=training.dtype
    )
    pipeline = Pipeline(
        schedule,
        group=groups["pp"],
        shape=model.shape_between(1, tokens.shape[1]),
        dtype=training.dtype,
        device=device,
        deferral=defer_weight_gradients(model) if schedule.splits_backward else None,
    )

    def compute(stage: int, number: int, given: Tensor | None) -> Tensor:
        input = tokens[number : number + 1] if given is None else given
        last = stage + 1 == schedule.stages
        made = model(stage, input, targets[number : number + 1] if last else None, reduction="sum")
        return made / targets.numel() if last else made

    def run() -> tuple[Tensor, ...]:
        model.zero_grad(set_to_none=True)
        return tuple(pipeline.run(compute))

    return Replayed(run, device) if replayed else run, model


# ---- PyTorch's side ----------------------------------------------------------------------------------------------


class Stage(nn.Module):
    """Some layers of the same Llama in plain torch.nn, with the embedding in the first stage and the head in the
    last."""

    def __init__(
        self, training: GptTraining, layers: range, ends: tuple[bool, bool], device: torch.device, compiled: bool
    ) -> None:
        super().__init__()
        config, (self.first, self.last) = training.config, ends
        with torch.device("meta"):
            whole = Llama(config)
        self.tok_embeddings = whole.tok_embeddings if self.first else None
        self.layers = nn.ModuleDict({str(layer): whole.layers[str(layer)] for layer in layers})
        self.norm, self.output = (whole.norm, whole.output) if self.last else (None, None)
        self.to_empty(device=device)
        fill(self, config, 1, device)  # type: ignore[arg-type]
        self.to(training.dtype)
        self.rotation = rotation_of(torch.arange(training.length, device=device), config)
        if compiled:
            for block in self.layers.values():
                block.forward = torch.compile(block.forward, backend=backend(device))  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens (B, S) or the previous stage's result (B, S, W) to this stage's result (B, S, W), or in the last
        stage to logits (B, S, V)."""
        if self.tok_embeddings is not None:
            x = self.tok_embeddings(x)
        for block in self.layers.values():
            x = block(x, *self.rotation)
        return self.output(self.norm(x)) if self.output is not None and self.norm is not None else x


def backend(device: torch.device) -> str:
    return "inductor" if device.type == "cuda" else "aot_eager"


def loss_with(targets: Tensor, compiled: bool = True) -> Callable[[Tensor, Tensor], Tensor]:
    """A micro-batch's share of the loss of all targets."""
    made = torch.compile(cross_entropy_of, backend=backend(targets.device)) if compiled else cross_entropy_of
    return lambda logits, target: made(logits, target) * target.numel() / targets.numel()


def alone(training: GptTraining, tokens: Tensor, targets: Tensor) -> tuple[Callable[[], object], nn.Module]:
    model = Stage(training, range(training.config.layers), (True, True), tokens.device, True)
    loss_of = loss_with(targets)

    def run() -> None:
        model.zero_grad(set_to_none=True)
        for number in range(MICRO_BATCHES):
            loss_of(model(tokens[number : number + 1]), targets[number : number + 1]).backward()

    return run, model


def peer(
    kind: str, training: GptTraining, tokens: Tensor, targets: Tensor, group: Any, compiled: bool
) -> tuple[Callable[[], object], nn.Module]:
    from torch.distributed import pipelining

    ranks, rank = dist.get_world_size(), dist.get_rank()
    stages = ranks if kind == "Schedule1F1B" else 2 * ranks

    def rank_of(stage: int) -> int:
        turned = kind == "ScheduleZBVZeroBubble" and stage >= ranks
        return stages - 1 - stage if turned else stage % ranks

    here = [stage for stage in range(stages) if rank_of(stage) == rank]
    placement = [[stage for stage in range(stages) if rank_of(stage) == each] for each in range(ranks)]
    layers = layers_of_stages(training.config, placement, training.length)
    modules = nn.ModuleList(
        Stage(training, layers[number], (number == 0, number + 1 == stages), tokens.device, compiled) for number in here
    )
    between = torch.empty(1, tokens.shape[1], training.config.width, device=tokens.device, dtype=training.dtype)
    between.requires_grad_()  # the stage sends this tensor's gradient back
    made = [
        pipelining.PipelineStage(
            module,
            number,
            stages,
            tokens.device,
            input_args=tokens[:1] if number == 0 else between,
            output_args=between.new_empty(1, tokens.shape[1], training.config.vocabulary)
            if number + 1 == stages
            else between,
            group=group,
        )
        for number, module in zip(here, modules, strict=True)
    ]
    given = made[0] if kind == "Schedule1F1B" else made
    schedule = getattr(pipelining, kind)(given, MICRO_BATCHES, loss_fn=loss_with(targets, compiled), scale_grads=False)

    def run() -> object:
        modules.zero_grad(set_to_none=True)
        first = [tokens] if 0 in here else []
        return schedule.step(*first, target=targets if stages - 1 in here else None)

    return run, modules


def peer_shared(training: GptTraining, tokens: Tensor, targets: Tensor) -> tuple[Callable[[], object], nn.Module]:
    """The FSDP2 peer. Its data ranks gather weights and sum gradients once a step, and keep both in float32."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    device = tokens.device
    model = Stage(replace(training, dtype=torch.float32), range(training.config.layers), (True, True), device, True)
    share(model, Layout(ranks).mesh(device.type)["dp"], training.dtype)  # type: ignore[arg-type]
    loss_of, own = loss_with(targets), range(rank, MICRO_BATCHES, ranks)

    def run() -> None:
        model.zero_grad(set_to_none=True)
        for number in own:
            last: Any = number == own[-1]
            model.set_requires_gradient_sync(last)  # type: ignore[operator]
            model.set_is_last_backward(last)  # type: ignore[operator]
            model.set_reshard_after_backward(last)  # type: ignore[operator]
            loss_of(model(tokens[number : number + 1]), targets[number : number + 1]).backward()

    return run, model


# ---- timing ------------------------------------------------------------------------------------------------------


def times(run: Callable[[], object], device: torch.device) -> list[float]:
    """The times of single steps on the slowest rank, after a warm-up."""
    found = []
    for number in range(WARM_UP + STEPS if device.type == "cuda" else 2):
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
        if number >= WARM_UP:
            found.append(largest(first.elapsed_time(last)))
    return found


def computing(run: Callable[[], object], device: torch.device) -> dict[str, float]:
    """How long the busiest and the least busy rank compute in a step, and how long ranks only wait for transfers. In
    the rest of the step, they are idle."""
    if device.type != "cuda":
        return {}
    with tempfile.NamedTemporaryFile(suffix=".json") as trace:
        with torch.profiler.profile(acc_events=True) as profile, torch.profiler.record_function(STEP):
            run()
            torch.cuda.synchronize()
        profile.export_chrome_trace(trace.name)
        found = communication(Path(trace.name))
    own = found.busy_ms - found.exposed_ms
    return {
        "most_computing_ms": largest(own),
        "least_computing_ms": -largest(-own),
        "exposed_ms": largest(found.exposed_ms),
    }


def summary(found: list[float]) -> dict[str, float]:
    ms = statistics.median(found)
    return {"ms": ms, "spread": (max(found) - min(found)) / ms}


if __name__ == "__main__":
    sys.exit(main())
