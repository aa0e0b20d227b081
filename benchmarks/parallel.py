"""One Llama trained in several layouts of GPUs, compared with PyTorch's own FSDP2 and tensor parallelism.

    python benchmarks/parallel.py [--out benchmarks/results/h200/parallel.json] [--only llama-1b-fsdp2 llama-7b-fsdp2]

Each GPU has a process; the processes use NCCL. Each case is a model of 135 million to 7 billion parameters in a layout,
with sequences of 4096 tokens. All cases that fit into the GPUs' memory run, with the most important first. Both sides
start from the same weights, and the losses of their first steps must agree, or the row fails.

Both sides compute in bfloat16, and keep weights, sums of gradients over data ranks and fused AdamW in float32. With
FSDP2, the sharded float32 parameters are gathered in bfloat16. Without FSDP2, there are bfloat16 parameters next to
float32 ones. If each data rank has the whole model ("ddp"), PyTorch sums gradients in bfloat16. Gradients are not
clipped. Rooftop runs without compilation, and with each block compiled. PyTorch is always compiled, and splits the loss
(`loss_parallel`). A further PyTorch variant has asynchronous tensor parallelism, and is noted as absent if that does
not work. "rooftop, trained" is `rooftop.train.GptTrainer`, which makes the steps of `rooftop train gpt`: on one GPU
with a CUDA graph where that is the command's default. It reads its text and computes the norm of the gradient.
"rooftop, halves" computes the halves of a batch alternately. "Replayed" is a step from a CUDA graph; for the trainer,
the graph has everything except the optimizer. For a small model, where the host is the limit, PyTorch also compiles the
whole model with CUDA graphs (mode="reduce-overhead").

    ms, spread         of a step on the slowest rank: the median, and (slowest - fastest) / median
    tflops             TFLOP/s per GPU: matrix products and attention, which counts only the causal half
    percent_of_roof    percent of the fused roof of a step (one pass over weights, gradients and optimizer state; all
                       flops)
    peak_gib           peak memory of tensors, on the rank with the most
    communication_ms   time in which rank 0 communicated or waited for other ranks, from the profiler's timeline of one
                       step; exposed_ms: the part of this time without computation; by_kind_ms: the time of all kernels
                       and copies by kind
    init_s             seconds to create and initialize the model in its layout, on the slowest rank; the first case
                       also compiles kernels. ready_s: init_s plus the first steps, which compile

If a case fails, the others still run, and the run fails. `--timeline DIR` keeps the timelines, for chrome://tracing or
Perfetto. `--quick` tests the script on a CPU, with gloo and without timelines.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing as mp
import os
import queue
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from programs import Results
from timelines import STEP, by_kind, communication
from torch import Tensor

from rooftop.cost import Cost, roof
from rooftop.hardware import Ceilings, ceilings_of, measure_ceilings
from rooftop.hardware.sequences import synchronize
from rooftop.models import Gpt, gpt_config, parallel_gpt
from rooftop.models.gpt.configs import GptConfig
from rooftop.models.gpt.layouts import fully_sharded_gpt
from rooftop.parallel import Layout, ModelGradients
from rooftop.train import AdamW, GptTrainer, GptTraining, MainWeights, Replayed, Tokens

OURS, COMPILED, REPLAYED = "rooftop", "rooftop, blocks compiled", "rooftop, replayed"
NATIVE, ASYNC = "PyTorch, blocks compiled", "PyTorch, asynchronous tensor parallel"
WHOLE = "PyTorch, compiled whole, CUDA graphs"
TRAINED, TRAINED_REPLAYED = "rooftop, trained", "rooftop, trained, replayed"
TRAINED_HALVES = "rooftop, trained, halves, replayed"
INIT = "rooftop, initial values only"
HALVES, HALVES_REPLAYED = "rooftop, halves", "rooftop, halves, replayed"
OF_TENSOR_RANKS = (OURS, HALVES, HALVES_REPLAYED, TRAINED_HALVES, REPLAYED, NATIVE)
PEERS = (NATIVE, ASYNC, WHOLE)
SEED, LEARNING_RATE = 1, 1e-4
FIRST = 3  # number of first steps, which compile and whose losses are compared
LOSS_NOISE = 0.02, 0.05, 0.1
"""Tolerances of the first losses: bfloat16 rounds gradients differently, and Adam's steps follow their signs."""
FEWEST, MOST = 5, 20  # measured steps
SMALL_STEPS = 1  # measured steps of a quick run
JOB_S = 180.0  # seconds after which a variant counts as hanging
INIT_GOAL_S = 10.0  # goal for 7 billion parameters

SMALLEST = replace(  # the sizes of SmolLM, with a tied head
    gpt_config("llama-1b"), vocabulary=49152, layers=30, width=576, heads=9, kv_heads=3, hidden=1536
)


@dataclass(frozen=True)
class Case:
    """A model in a layout.

    Attributes:
        micro_batch: sequences per data rank.
        needs_gib: required memory of each GPU.
        layers: number of layers. A case for one GPU may have fewer layers than the model, so that this GPU computes as
            much as each of several GPUs.
        whole: whether each data rank has the whole model and ranks only sum gradients; False: the ranks share the
            model.
    """

    model: str
    layout: Layout
    micro_batch: int
    needs_gib: int
    variants: tuple[str, ...]
    label: str
    layers: int | None = None
    whole: bool = False

    @property
    def name(self) -> str:
        return f"{self.model}-{self.label}"

    @property
    def shared(self) -> bool:
        return self.layout.dp > 1 and not self.whole

    def config(self, small: bool) -> GptConfig:
        config = SMALLEST if self.model == "llama-135m" else gpt_config(self.model)
        if not small:
            return replace(config, positions=4096, layers=self.layers or config.layers)
        kv_heads = 8 if config.kv_heads == config.heads else 4
        return replace(config, layers=2, width=64, heads=8, kv_heads=kv_heads, hidden=96, vocabulary=128, positions=32)


def tensor_parallel(size: int) -> Layout:
    return Layout(1, size, sequence_parallel=True)


# 7 billion parameters take 16 bytes each for float32 weights, gradients and Adam, which data ranks share. That is 54
# GiB on each of two ranks, plus 0.6 GiB of activations per layer and sequence. On tensor parallel ranks, each parameter
# takes 2 bytes more.
CASES = (
    Case("llama-1b", Layout(2), 4, 70, (OURS, NATIVE, COMPILED, TRAINED), "fsdp2"),
    Case("llama-1b", tensor_parallel(2), 4, 70, (*OF_TENSOR_RANKS, ASYNC, COMPILED), "tp2"),
    Case("llama-1b", Layout(2), 4, 75, (OURS, NATIVE, TRAINED, TRAINED_REPLAYED), "ddp2", whole=True),
    Case("llama-7b", Layout(2), 2, 125, (COMPILED, NATIVE), "fsdp2"),
    Case("llama-7b", Layout(2), 2, 40, (INIT,), "fsdp2-init"),
    Case("llama-7b", tensor_parallel(2), 2, 125, OF_TENSOR_RANKS, "tp2"),
    Case("llama-1b", Layout(), 4, 75, (OURS, NATIVE, COMPILED, TRAINED, TRAINED_REPLAYED), "alone"),
    Case("llama-7b", Layout(), 2, 60, (OURS, NATIVE, COMPILED, REPLAYED, TRAINED, TRAINED_REPLAYED), "eight-layers", 8),
    Case("llama-135m", Layout(), 1, 20, (OURS, NATIVE, WHOLE, COMPILED, REPLAYED, TRAINED, TRAINED_REPLAYED), "alone"),
    Case("llama-7b", Layout(4), 2, 65, (COMPILED, NATIVE), "fsdp4"),
    Case("llama-7b", tensor_parallel(4), 2, 60, (*OF_TENSOR_RANKS, ASYNC), "tp4"),
    Case("llama-7b", Layout(2, 2, sequence_parallel=True), 2, 70, (OURS, NATIVE), "tp2-fsdp2"),
    Case("llama-7b", Layout(8), 2, 60, (COMPILED, NATIVE), "fsdp8"),
    Case("llama-7b", Layout(4, 2, sequence_parallel=True), 2, 70, (OURS, NATIVE), "tp2-fsdp4"),
    Case("llama-7b", tensor_parallel(8), 2, 60, (*OF_TENSOR_RANKS, ASYNC), "tp8"),
)
NAMES = [case.name for case in CASES]


@dataclass(frozen=True)
class Job:
    """A variant of a case, as it is sent to the processes."""

    number: int
    case: Case
    variant: str
    small: bool
    seconds: float
    timeline: str


# ---- the process that starts the others ----------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200/parallel.json"))
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--variants", nargs="+", metavar="NAME", help="run only variants with these names")
    parser.add_argument("--peers", choices=("none", "all"), default="all", help="peers to compare with")
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds to measure each variant")
    parser.add_argument(
        "--timeline", type=Path, metavar="DIR", help="folder for a chrome trace of a step of each variant"
    )
    parser.add_argument("--quick", action="store_true", help="a tiny run on the CPU, to test the script")
    options = parser.parse_args()
    gpus = 2 if options.quick else torch.cuda.device_count()
    if gpus < 1:
        parser.error("needs NVIDIA GPUs; --quick tests the script on a CPU")
    gib = torch.cuda.get_device_properties(0).total_memory / 2**30 if not options.quick else float("inf")
    cases = [case for case in CASES if case.name in options.only]
    fitting = [case for case in cases if case.layout.world_size <= gpus and case.needs_gib <= gib]
    for case in cases:
        if case not in fitting:
            print(f"left out: {case.name} needs {case.layout.world_size} GPUs of {case.needs_gib} GiB", flush=True)
    if options.timeline is not None:
        options.timeline.mkdir(parents=True, exist_ok=True)
    wanted = [
        (case, variant)
        for case in fitting
        for variant in case.variants
        if (options.peers == "all" or variant not in PEERS) and variant in (options.variants or case.variants)
    ]
    timeline = str(options.timeline.resolve()) if options.timeline is not None else ""
    jobs = [
        Job(number, case, variant, options.quick, options.seconds, timeline)
        for number, (case, variant) in enumerate(wanted)
    ]
    ceilings = ceilings_of("h200") if options.quick else measure_ceilings("cuda")
    results = Results(options.out, ceilings)
    failed, losses = not jobs, dict[str, list[float]]()
    for _, together in groupby(jobs, key=lambda job: job.case.layout.world_size):
        for job, row, problem in performed(list(together)):
            if row is not None:
                problem = disagreement(losses.setdefault(job.case.name, row["losses"]), row["losses"])
            if problem and job.variant == ASYNC:
                results.add({"case": job.case.name, "variant": job.variant, "absent": str(problem).strip()[-300:]})
            elif problem:
                print(f"failed: {job.case.name}, {job.variant}: {problem}", file=sys.stderr, flush=True)
                failed = True
            else:
                assert row is not None
                results.add(described(job, row, ceilings))
    return int(failed)


def disagreement(expected: list[float], found: list[float]) -> str:
    """A message about the losses of the first steps, if they differ by more than rounding."""
    apart = [abs(a - b) for a, b in zip(expected, found, strict=True)]
    if all(each <= noise for each, noise in zip(apart, LOSS_NOISE, strict=False)):
        return ""
    return f"its first losses are {found}, but the first variant's are {expected}"


def performed(jobs: list[Job]) -> Iterator[tuple[Job, dict[str, Any] | None, str]]:
    """Yield each job with its measurements or its error. After an error, the remaining jobs run in new processes."""
    left = list(jobs)
    while left:
        for job, row, problem in in_processes(list(left)):
            left.remove(job)
            yield job, row, problem


def in_processes(jobs: list[Job]) -> Iterator[tuple[Job, dict[str, Any] | None, str]]:
    """Run jobs one after another, until all are done or one has failed."""
    context = mp.get_context("spawn")
    ranks = jobs[0].case.layout.world_size
    with tempfile.TemporaryDirectory(prefix="rooftop-parallel-") as folder:
        said: Any = context.Queue()
        processes = [context.Process(target=rank_main, args=(rank, ranks, jobs, folder, said)) for rank in range(ranks)]
        for process in processes:
            process.start()
        try:
            for job in jobs:
                row, problem = heard(said, processes)
                yield job, row, problem
                if problem:
                    return
            for process in processes:
                process.join(JOB_S)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()


def heard(said: Any, processes: list[Any]) -> tuple[dict[str, Any] | None, str]:
    """Wait for the next job's row, or for an error."""
    until = time.monotonic() + JOB_S
    while time.monotonic() < until:
        with suppress(queue.Empty):
            row, problem = said.get(timeout=1.0)
            return row, problem
        gone = [process.exitcode for process in processes if process.exitcode not in (None, 0)]
        if gone:
            with suppress(queue.Empty):  # prefer the error that the rank reported before it ended
                row, problem = said.get(timeout=1.0)
                return row, problem
            return None, f"a rank ended with {gone[0]}"
    return None, f"no rank has reported anything for {JOB_S:.0f} s"


def described(job: Job, row: dict[str, Any], ceilings: Ceilings) -> dict[str, Any]:
    """The values that describe a job in its row."""
    case, config = job.case, job.case.config(job.small)
    said = {"case": case.name, "variant": job.variant, "layout": str(case.layout), "gpus": case.layout.world_size}
    if job.variant == INIT:
        return {**said, "init_s": row["init_s"], "goal_s": INIT_GOAL_S, "peak_gib": row["peak_gib"]}
    tokens = case.micro_batch * case.layout.dp * config.positions // case.layout.world_size  # per GPU
    flops = config.flops_per_token(config.positions) * tokens
    best = roof(least_work(case, config, flops), ceilings).ms
    return {
        **said,
        "micro_batch": case.micro_batch,
        "sequence": config.positions,
        **row,
        "tokens_per_s_per_gpu": 1e3 * tokens / row["ms"],
        "tflops": flops / row["ms"] / 1e9,
        "roof_ms": best,
        "percent_of_roof": 100 * best / row["ms"],
    }


def least_work(case: Case, config: GptConfig, flops: int) -> Cost:
    """The least work of a rank's step: read the weights in forward and in backward, write and read gradients, and read
    and write weights and optimizer state."""
    held = config.parameters // case.layout.tp
    stepped = 4 * held // case.layout.dp
    return Cost(2 * 2 * held + 4 * stepped, 4 * stepped + 2 * held, {"bf16": flops})


# ---- the process of a rank -----------------------------------------------------------------------------------------


def rank_main(rank: int, ranks: int, jobs: list[Job], folder: str, said: Any) -> None:
    """Run all jobs. Rank 0 reports measurements, and any rank reports errors."""
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast does not work everywhere
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    os.environ["LOCAL_RANK"] = os.environ["RANK"] = str(rank)
    small = jobs[0].small
    device = torch.device("cpu") if small else torch.device("cuda", rank)
    try:
        if not small:
            torch.cuda.set_device(device)
        dist.init_process_group(
            "gloo" if small else "nccl",
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=ranks,
            device_id=None if small else device,
        )
        for job in jobs:
            row = measured(job, device)
            if rank == 0:
                said.put((row, ""))
            forget(device)
        meet(device)
        dist.destroy_process_group()
    except Exception:
        said.put((None, traceback.format_exc()))
        said.close()
        said.join_thread()
        os._exit(1)  # the main process ends the other ranks, which may wait for this one


def forget(device: torch.device) -> None:
    """Clear the caches and compiled code that a job leaves in the process."""
    torch._inductor.config._micro_pipeline_tp = False
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


Step = Callable[[Tensor, Tensor], Tensor]


def measured(job: Job, device: torch.device) -> dict[str, Any]:
    case, config = job.case, job.case.config(job.small)
    dtype = torch.float32 if job.small else torch.bfloat16
    groups = case.layout.process_groups()
    if job.variant == INIT:
        init_s, model = initialized(case, config, dtype, device)
        peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
        del model
        return {"init_s": slowest(init_s, device), "peak_gib": slowest(peak, device), "losses": [0.0] * FIRST}
    began = time.perf_counter()
    if job.variant in (OURS, COMPILED, REPLAYED, HALVES, HALVES_REPLAYED):
        halves = job.variant in (HALVES, HALVES_REPLAYED)
        init_s, model = initialized(case, config, dtype, device, halves)
        step: Step = Ours(model, case, groups, dtype, device, job.variant, job.small).step
    elif job.variant in (TRAINED, TRAINED_REPLAYED, TRAINED_HALVES):
        init_s, step = 0.0, trained(job, config, dtype, device)
    else:
        init_s, step = 0.0, native(job, config, dtype, device)
    tokens, targets = own_text(case, config, device)
    losses = [mean_of_data_ranks(step(tokens, targets), groups["dp-cp"], case.layout.dp) for _ in range(FIRST)]
    synchronize(device)
    ready_s = time.perf_counter() - began
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    times = timed(lambda: step(tokens, targets), device, job)
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
    middle = statistics.median(times)
    row: dict[str, Any] = {
        "ms": middle,
        "spread": (max(times) - min(times)) / middle,
        "steps": len(times),
        "peak_gib": slowest(peak, device),
        "ready_s": slowest(ready_s, device),
        "losses": losses,
    }
    if job.variant in (OURS, COMPILED, REPLAYED, HALVES, HALVES_REPLAYED):
        row["init_s"] = slowest(init_s, device)
    return {**row, **on_timeline(lambda: step(tokens, targets), job, device)}


def initialized(
    case: Case, config: GptConfig, dtype: torch.dtype, device: torch.device, halves: bool = False
) -> tuple[float, Gpt]:
    """Create this rank's part of the model in float32. Return (seconds for this, the part)."""
    layout, groups = case.layout, case.layout.process_groups()
    synchronize(device)
    meet(device)
    began = time.perf_counter()
    if case.shared:
        model = fully_sharded_gpt(config, layout, groups, seed=SEED, device=device, compute_dtype=dtype)
    else:
        model = parallel_gpt(config, layout, groups, seed=SEED, halves=halves, device=device)
    synchronize(device)
    return time.perf_counter() - began, model


class Ours:
    """A rank's part of Rooftop's training."""

    def __init__(
        self,
        model: Gpt,
        case: Case,
        groups: Any,
        dtype: torch.dtype,
        device: torch.device,
        variant: str,
        small: bool,
    ) -> None:
        assert model.head is not None
        self.model, self.data = model, groups["dp-cp"]
        layout = case.layout
        self.weights = MainWeights(model, torch.float32 if case.shared else dtype, keep_narrow=True)
        self.gradients = ModelGradients(model, groups, sequence_parallel=layout.sequence_parallel)
        self.weights.answer_for(self.gradients)
        self.optimizer = AdamW(
            self.weights.named.values(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1, weights=self.weights
        )
        self.ranks = layout.dp
        replayed = variant in (REPLAYED, HALVES_REPLAYED) and not small
        self.replayed = Replayed(lambda *given: (self._step(*given),), device, FIRST) if replayed else None
        if dtype == torch.bfloat16:  # the loss is float32
            model.head.forward = torch.autocast(device.type, dtype)(model.head.forward)  # type: ignore[method-assign]
        if variant == COMPILED:
            for block in model.layers.values():
                block.forward = torch.compile(block.forward, backend=backend(small))  # type: ignore[method-assign]

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Make a step, as `Native.step` does. In the replayed variant, the first steps are eager, and later ones replay
        a CUDA graph."""
        return self._step(tokens, targets) if self.replayed is None else self.replayed(tokens, targets)[0]

    def _step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.model(tokens, targets)
        with self.gradients.summing():
            (loss / self.ranks).backward()  # every rank has the same number of targets
        self.gradients.sum_()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def trained(job: Job, config: GptConfig, dtype: torch.dtype, device: torch.device) -> Step:
    """The trainer's step, which reads the same sequences from its text."""
    case = job.case
    training = GptTraining(
        config=config,
        length=config.positions,
        global_batch=case.micro_batch * case.layout.dp,
        micro_batch=case.micro_batch,
        learning_rate=LEARNING_RATE,
        clip=0.0,
        seed=SEED,
        dtype=dtype,
        halves=job.variant == TRAINED_HALVES,
        cuda_graph=job.variant in (TRAINED_REPLAYED, TRAINED_HALVES) and not job.small,
    )
    if job.variant == TRAINED and not case.shared:  # the command's default
        training = replace(training, cuda_graph=training.is_limited_by_launches(case.layout, device.type))
    tokens = Tokens([whole_text(case, config).numpy()], "random tokens")
    groups = case.layout.process_groups()
    trainer = GptTrainer(training, tokens, case.layout, groups, device, fully_shard=case.shared)
    return lambda *_: trainer.advance()[0]


def native(job: Job, config: GptConfig, dtype: torch.dtype, device: torch.device) -> Step:
    from parallel_native import Native
    from torch.distributed.device_mesh import init_device_mesh

    layout = job.case.layout
    mesh = init_device_mesh(device.type, (layout.dp, layout.tp), mesh_dim_names=("dp", "tp"))
    return Native(
        config,
        mesh,
        seed=SEED,
        device=device,
        dtype=dtype,
        length=config.positions,
        backend=backend(job.small),
        learning_rate=LEARNING_RATE,
        async_tensor_parallel=job.variant == ASYNC,
        whole=job.variant == WHOLE,
        shared=job.case.shared,
    ).step


def backend(small: bool) -> str:
    """The back end of torch.compile. The blocks of small models are only traced, which takes most of a quick run."""
    return "eager" if small else "inductor"


def whole_text(case: Case, config: GptConfig) -> Tensor:
    """Random tokens in one row: all sequences of a step, and one more token as the last target."""
    sequences = case.micro_batch * case.layout.dp
    generator = torch.Generator().manual_seed(0)
    return torch.randint(config.vocabulary, (sequences * config.positions + 1,), generator=generator)


def own_text(case: Case, config: GptConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and targets (B, S) of this data rank. All its tensor parallel ranks have the same tokens and targets."""
    every = whole_text(case, config).unfold(0, config.positions + 1, config.positions)
    mine = every.chunk(case.layout.dp)[case.layout.coordinates(dist.get_rank())["dp"]].to(device)
    return mine[:, :-1].contiguous(), mine[:, 1:].contiguous()


# ---- measuring -----------------------------------------------------------------------------------------------------


def mean_of_data_ranks(loss: Tensor, data: Any, ranks: int) -> float:
    total = loss.float().clone()
    dist.all_reduce(total, group=data)
    return float(total) / ranks


def slowest(number: float, device: torch.device) -> float:
    """The largest value over all ranks."""
    found = torch.tensor(number, dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def timed(run: Callable[[], object], device: torch.device, job: Job) -> list[float]:
    """ms of each step on the slowest rank. The host does not wait between steps."""
    run()  # some variants capture a graph in this call
    synchronize(device)
    steps = SMALL_STEPS
    if not job.small:
        begin = time.perf_counter()
        for _ in range(2):
            run()
        synchronize(device)
        each = slowest((time.perf_counter() - begin) / 2, device)
        steps = max(FEWEST, min(MOST, int(job.seconds / each)))
    meet(device)
    if device.type == "cuda":
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        marks[0].record()
        for mark in marks[1:]:
            run()
            mark.record()
        synchronize(device)
        times = [a.elapsed_time(b) for a, b in pairwise(marks)]
    else:
        clock = [time.perf_counter()]
        for _ in range(steps):
            run()
            clock.append(time.perf_counter())
        times = [1e3 * (b - a) for a, b in pairwise(clock)]
    found = torch.tensor(times, dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return [float(each) for each in found]


def on_timeline(run: Callable[[], object], job: Job, device: torch.device) -> dict[str, Any]:
    """The parts of rank 0's step time, from its timeline; empty without GPUs."""
    if device.type != "cuda":
        return {}
    if dist.get_rank() != 0:
        run()
        meet(device)
        run()
        synchronize(device)
        return {}
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        run()
        meet(device)
        synchronize(device)
        with torch.profiler.record_function(STEP):
            run()
            synchronize(device)
    with tempfile.TemporaryDirectory(prefix="rooftop-timeline-") as folder:
        name = f"{job.case.name}-{job.variant}.json".replace(", ", "-").replace(" ", "-")
        path = Path(job.timeline or folder, name)
        profiler.export_chrome_trace(str(path))
        found, kinds = communication(path), by_kind(path)
    return {
        "communication_ms": found.total_ms,
        "exposed_ms": found.exposed_ms,
        "busy_ms": found.busy_ms,
        "by_kind_ms": kinds,
    }


def meet(device: torch.device) -> None:
    dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)


if __name__ == "__main__":
    sys.exit(main())
