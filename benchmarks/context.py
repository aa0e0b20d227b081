"""Context parallelism: attention and training on sequences split over GPUs, compared with PyTorch's context parallel.

    python benchmarks/context.py [--out benchmarks/results/h100/context.json] [--only attention documents model]
    python benchmarks/context.py --ranks 1 2 4 --tokens 131072      # how it scales

Each GPU has a process. The processes use NCCL and bfloat16. There are three parts:

    attention   causal attention, forward and backward, with 64 query heads, 8 key heads and 128 features, and with
                llama-1b's heads
    documents   the same with packed documents of 1,024 to 32,768 tokens; PyTorch runs compiled FlexAttention with each
                of its load balancers
    model       llama-1b with 64 k tokens and recomputed blocks: tokens a second of `GptTrainer` on one GPU and on
                several

Each figure is the slowest rank's, the median over rounds in which all variants take turns. Before the rounds, one GPU
does the same work. `efficiency` is t1 / (N tN), where t1 is the time of one GPU and tN the time of N ranks. The results
of all variants are compared with the results of one GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from timelines import STEP, by_kind
from torch import Tensor
from worlds import Ended, largest, ranks_here, rows_of, told, written

from rooftop.models import gpt_config
from rooftop.parallel import TRANSPORTS, Context, ContextAttention, Documents, Layout, Packing, join, launched

ROUNDS, STEPS, WARM_UP = 3, 5, 2
BALANCERS = ("head and tail", "head and tail of each document", "by blocks of the mask")
WRONG = 0.03
"""The maximum allowed error, relative to the largest element. PyTorch's bfloat16 kernels have an error of 0.01."""
Run = Callable[[], tuple[Tensor, ...]]
"""Runs forward and backward of this rank's part, and returns the result and the gradients."""


@dataclass(frozen=True)
class Case:
    """The sizes of an attention to measure."""

    shape: str
    heads: int
    kv_heads: int
    features: int
    length: int
    documents: bool = False

    @property
    def name(self) -> str:
        return f"{self.shape}, {self.length >> 10} k" + (", documents" if self.documents else "")


CASES = (
    Case("64:8 heads of 128", 64, 8, 128, 32768),
    Case("llama-1b", 32, 8, 64, 65536),
    Case("64:8 heads of 128", 64, 8, 128, 65536, documents=True),
)


class Layer:
    """The interface that `ContextAttention` expects of an attention layer."""

    window, weights_dropout, training = None, None, True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="+", choices=("attention", "documents", "model"))
    parser.add_argument(
        "--balancers",
        nargs="+",
        choices=BALANCERS,
        default=BALANCERS,
        help="PyTorch's load balancers for documents (default: all)",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        default=[max(1, torch.cuda.device_count())],
        help="numbers of ranks to measure, in addition to one (default: all GPUs)",
    )
    parser.add_argument("--tokens", type=int, help="tokens per sequence, instead of each case's own number")
    parser.add_argument("--quick", action="store_true", help="test the script on a CPU, with gloo")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(options)
    passed = [each for each in sys.argv[1:] if each not in ("--out", str(options.out))]
    try:
        keep = partial(written, out=options.out, quick=options.quick, complete=False)
        rows = rows_of(__file__, sorted({1, *options.ranks}), passed, keep)
    except Ended as ended:
        return ended.status
    with_efficiency(rows)
    written(rows, options.out, quick=options.quick, complete=True)
    wrong = [row for row in rows if row["variant"].startswith("rooftop") and row.get("largest_error", 0) > WRONG]
    for row in wrong:
        print("WRONG", row)
    return 1 if wrong else 0


def with_efficiency(rows: list[dict[str, Any]]) -> None:
    """Add `efficiency` to each row of N ranks: its speed, divided by N times the speed of one rank."""
    alone = {row["case"]: row["ms"] for row in rows if row["ranks"] == 1 and row["variant"].startswith("rooftop")}
    for row in rows:
        if row["ranks"] > 1 and "ms" in row and row["case"] in alone:
            row["efficiency"] = alone[row["case"]] / row["ms"] / row["ranks"]


def worker(options: argparse.Namespace) -> int:
    wanted = options.only or ("attention", "documents", "model")
    with join(Layout(cp=launched().size), device="cpu" if options.quick else "cuda", timeout_s=120.0) as world:
        for case in CASES:
            if ("documents" if case.documents else "attention") in wanted:
                case = replace(case, length=options.tokens or case.length)
                case = smaller(case) if options.quick else case
                told(attention_rows(case, world.device, options.balancers), options.worker)
        if "model" in wanted:
            told(model_rows(world.device, options.tokens or 65536, options.quick), options.worker)
    return 0


def smaller(case: Case) -> Case:
    return replace(case, heads=4, kv_heads=2, features=16, length=case.length // 64)


# ---- attention ---------------------------------------------------------------------------------------------------


def attention_rows(case: Case, device: torch.device, balancers: Sequence[str]) -> Iterator[dict[str, Any]]:
    ranks, rank = ranks_here()
    made = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shapes = [(1, case.length, heads, case.features) for heads in (case.heads, *(case.kv_heads,) * 2, case.heads)]
    whole = [torch.randn(shape, generator=made, device=device).to(dtype).transpose(1, 2) for shape in shapes]
    documents = documents_of(case.length) if case.documents else None
    pairs = sum(n * (n + 1) // 2 for n in lengths_of(documents, case.length))
    flops = 2 * pairs * case.heads * case.features * 7  # two products forward, five backward
    expected = ours(whole, Context(), Packing.of(case.length, 1, documents))() if rank == 0 or ranks > 1 else ()
    variants: dict[str, tuple[Run, Tensor]] = {}
    group = Layout(cp=ranks).process_groups()["cp"]
    for transport in TRANSPORTS[:3] if ranks > 1 else ("p2p",):
        context = Context(group if ranks > 1 else None, transport)
        packing = context.packing(case.length, documents)
        name = f"rooftop, {transport}" if ranks > 1 else "rooftop"
        variants[name] = ours(whole, context, packing), packing.held[rank].positions(device)
    if ranks > 1:
        variants |= peers(whole, documents, device, balancers)
    times: dict[str, list[float]] = {name: [] for name in variants}
    failed: dict[str, str] = {}
    for _ in range(ROUNDS):
        for name, (run, _positions) in variants.items():
            if name not in failed:
                if not times[name] and rank == 0:
                    print(f"{case.name}, {ranks} ranks: {name}", file=sys.stderr, flush=True)
                try:
                    times[name].append(largest(ms_of(run, device)))
                except Exception as error:  # if a peer cannot run this case, its row says so
                    if name.startswith("rooftop"):
                        raise
                    failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    for name, (run, positions) in variants.items():
        row: dict[str, Any] = {"case": case.name, "ranks": ranks, "variant": name}
        if name in failed:
            yield {**row, "failed": failed[name]}
            continue
        ms = statistics.median(times[name])
        errors = [
            float((a - b.index_select(2, positions)).float().abs().max() / b.float().abs().max())
            for a, b in zip(run(), expected, strict=True)
        ]
        spread = (max(times[name]) - min(times[name])) / ms
        tflops = flops / ranks / ms / 1e9
        row |= {"ms": ms, "spread": spread, "tflops": tflops, "largest_error": largest(max(errors))}
        yield {**row, "kernels_ms": kernels_ms(run) if device.type == "cuda" else {}}


def documents_of(length: int) -> Documents:
    """Documents of 1,024 to 32,768 tokens for sequences of 65,536, evenly distributed on a logarithmic scale."""
    made = torch.Generator().manual_seed(0)
    ends, end = list[int](), 0
    while end < length:
        end += int(length / 64 * 2 ** (5 * torch.rand((), generator=made).item()))
        ends.append(min(end, length))
    return Documents.of_ends(length, [ends])


def lengths_of(documents: Documents | None, length: int) -> list[int]:
    return [length] if documents is None else [end - first for first, end in documents.spans[0]]


def ours(whole: list[Tensor], context: Context, packing: Packing) -> Run:
    chunks = packing.held[context.index]
    query, key, value, dout = (chunks.of(each, 2).transpose(1, 2).contiguous().transpose(1, 2) for each in whole)
    leaves = [each.requires_grad_() for each in (query, key, value)]
    layer: Any = Layer()
    attention = ContextAttention(context, packing)  # all layers share it

    def run() -> tuple[Tensor, ...]:
        out = attention.attended(layer, *leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, dout)

    return run


def peers(
    whole: list[Tensor], documents: Documents | None, device: torch.device, balancers: Sequence[str]
) -> dict[str, tuple[Run, Tensor]]:
    """PyTorch's variants, each with the token positions that this rank holds."""
    if device.type != "cuda":
        return {}
    mesh = Layout(cp=dist.get_world_size()).mesh("cuda")["cp"]
    if documents is None:
        return {f"PyTorch, {how}": ring(whole, how, mesh) for how in ("allgather", "alltoall")}
    return flexible(whole, documents, mesh, balancers)


def ring(whole: list[Tensor], how: str, mesh: Any) -> tuple[Run, Tensor]:
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    groups = whole[0].shape[1] // whole[1].shape[1]
    positions = torch.arange(whole[0].shape[2], device=whole[0].device)
    parts = [each.detach().clone() for each in whole]
    with context_parallel(mesh, buffers=[*parts, positions], buffer_seq_dims=[2] * 4 + [0],
                          no_restore_buffers={*parts, positions}):  # fmt: skip
        pass
    query, key, value, dout = parts
    leaves = [each.requires_grad_() for each in (query, key, value)]

    def run() -> tuple[Tensor, ...]:
        set_rotate_method(how)
        with context_parallel(mesh, buffers=[positions.clone()], buffer_seq_dims=[0]):
            # PyTorch's attention needs as many key heads as query heads
            keys, values = (each.repeat_interleave(groups, 1) for each in leaves[1:])
            out = torch.nn.functional.scaled_dot_product_attention(leaves[0], keys, values, is_causal=True)
            return out.detach(), *torch.autograd.grad(out, leaves, dout)

    return run, positions


def flexible(
    whole: list[Tensor], documents: Documents, mesh: Any, wanted: Sequence[str]
) -> dict[str, tuple[Run, Tensor]]:
    from torch.distributed.tensor.experimental._context_parallel import _attention as experimental
    from torch.distributed.tensor.experimental._context_parallel import _load_balancer as balancing
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    length, device = documents.length, whole[0].device
    number = documents.starts()[0].to(device)
    compiled = torch.compile(flex_attention, dynamic=False)

    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (number[q] == number[k])

    found: dict[str, tuple[Run, Tensor]] = {}
    lengths = [lengths_of(documents, length)]
    balancers: dict[str, Callable[[], Any]] = {
        "head and tail": lambda: balancing._HeadTailLoadBalancer(length, mesh.size(), device),
        "head and tail of each document": lambda: balancing._PerDocumentHeadTailLoadBalancer(
            lengths, mesh.size(), device
        ),
        "by blocks of the mask": lambda: balancing._PTRRLoadBalancer(
            create_block_mask(seen, 1, 1, length, length, device=device, _compile=True), mesh.size()
        ),
    }
    for name in wanted:
        try:
            balancer = balancers[name]()
            mask = experimental._create_cp_block_mask(seen, 1, 1, length, length, mesh, balancer)
            order = balancer._generate_indices(restore=False)
            order = (order[0] if order.dim() == 2 else order).to(device)
            positions = order.chunk(mesh.size())[mesh.get_local_rank()]
            found[f"PyTorch, FlexAttention, {name}"] = flexible_run(whole, positions, mask, compiled, mesh), positions
        except Exception as error:
            words = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}" if str(error) else repr(error)
            found[f"PyTorch, FlexAttention, {name}"] = failing(words), torch.arange(length, device=device)
    return found


def failing(words: str) -> Run:
    def run() -> tuple[Tensor, ...]:
        raise RuntimeError(words)

    return run


def flexible_run(whole: list[Tensor], positions: Tensor, mask: Any, compiled: Any, mesh: Any) -> Run:
    from torch.distributed.tensor.experimental._context_parallel._cp_custom_ops import flex_cp_allgather

    query, key, value, dout = (each.index_select(2, positions).contiguous() for each in whole)
    leaves = [each.requires_grad_() for each in (query, key, value)]
    group = mesh.get_group().group_name

    def run() -> tuple[Tensor, ...]:
        keys, values = flex_cp_allgather(leaves[1], leaves[2], 2, group)
        out = compiled(leaves[0], keys, values, block_mask=mask, enable_gqa=True)
        return out.detach(), *torch.autograd.grad(out, leaves, dout)

    return run


# ---- the model ---------------------------------------------------------------------------------------------------


def model_rows(device: torch.device, length: int, quick: bool) -> Iterator[dict[str, Any]]:
    from rooftop.train import GptTrainer, GptTraining, Tokens

    ranks, _ = ranks_here()
    length = 512 if quick else length
    config = replace(gpt_config("llama-1b"), positions=length)
    if quick:
        config = replace(config, layers=2, width=64, heads=8, kv_heads=4, hidden=96, vocabulary=128)
    numbers = torch.randint(config.vocabulary, (length * 8 + 1,), generator=torch.Generator().manual_seed(0)).numpy()
    tokens = Tokens([numbers], "random tokens")
    times: dict[str, list[float]] = {}
    losses: dict[str, float] = {}
    for transport in TRANSPORTS[:3] if ranks > 1 else (None,):
        training = GptTraining(
            config=config, length=length, global_batch=1, micro_batch=1, recompute=True, transport=transport,
            dtype=torch.float32 if quick else torch.bfloat16,
        )  # fmt: skip
        layout = Layout(cp=ranks)
        trainer = GptTrainer(training, tokens, layout, layout.process_groups(), device, fully_shard=ranks > 1)
        name = f"rooftop, {transport}" if ranks > 1 else "rooftop"
        losses[name] = float(trainer.advance()[0])
        times[name] = [largest(ms_of(trainer.advance, device, 1 - turn, 1)) for turn in (0, 1, 1)]
        del trainer
    for name, found in times.items():
        ms = statistics.median(found)
        spread = (max(found) - min(found)) / ms
        row = {"case": f"llama-1b, {length} tokens, training", "ranks": ranks, "variant": name, "ms": ms}
        yield {**row, "spread": spread, "tokens_per_s": length / ms * 1e3, "first_loss": losses[name]}


# ---- timing ------------------------------------------------------------------------------------------------------


def ms_of(run: Callable[[], object], device: torch.device, warm_up: int = WARM_UP, steps: int = STEPS) -> float:
    for _ in range(warm_up):
        run()
    if device.type != "cuda":
        return 1.0
    if dist.is_initialized():
        dist.barrier()
    torch.cuda.synchronize()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(steps):
        run()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / steps


def kernels_ms(run: Callable[[], object]) -> dict[str, float]:
    """The kernel times of one run, by purpose."""
    run()
    torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as trace:
        with torch.profiler.profile(acc_events=True) as profile, torch.profiler.record_function(STEP):
            run()
            torch.cuda.synchronize()
        profile.export_chrome_trace(trace.name)
        return by_kind(Path(trace.name))


if __name__ == "__main__":
    sys.exit(main())
