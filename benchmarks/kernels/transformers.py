"""Rotary embeddings, SwiGLU, embeddings and merged attention compared with torch, torch.compile and Liger, in TB/s.

    python benchmarks/kernels/transformers.py [--out benchmarks/results/h200/transformers.json] [--only rope swiglu]

Tensors are bfloat16. Each operator runs in listed sizes, and the first three also in a random size (`--seed` repeats
them). The operator's own cost says how many bytes must move. The roof follows from that cost and the ceilings measured
in the same run. Variants are interleaved, with two sets of inputs; figures are medians. Each direction is replayed from
a CUDA graph, which shows the kernels, and called eagerly. Peers that are not installed, or cannot run a size, are left
out with a message. Calls that cannot be captured are only timed eagerly. The file is written after each row.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from repeating import after_repeats
from torch import Tensor

from rooftop.cost import Cost, CountingMode, roof
from rooftop.hardware import Ceilings, compare, measure_ceilings
from rooftop.hardware.graphs import captured, waits_for_gpu
from rooftop.hardware.timing import rotated
from rooftop.kernels import embedding, merge_attention_states, rope_pair, swiglu
from rooftop.launch import repeated_calls
from rooftop.whole_files import write_json

Function = Callable[..., Any]
Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """One size: its name, its inputs, and the variants that take them. Inputs with `requires_grad` get a gradient."""

    operator: str
    size: dict[str, int | str]
    inputs: Callable[[], list[Tensor]]
    variants: dict[str, Function]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--only", nargs="+", choices=sorted(CASES), default=sorted(CASES), help="these operators")
    parser.add_argument(
        "--seed", type=int, default=random.SystemRandom().randrange(1 << 16), help="seed of the drawn sizes"
    )
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU")
    repeated_calls.build()
    ceilings = measure_ceilings("cuda")
    environment = {"device": ceilings.device, "versions": dict(ceilings.versions)}
    found: dict[str, Any] = {"environment": environment, "dtype": "bfloat16", "seed": options.seed, "rows": []}
    for name in options.only:
        for case in CASES[name](random.Random(options.seed)):
            found["rows"] += measure_case(case, ceilings)
            if options.out:
                write_json(options.out, found)


# ---- cases -------------------------------------------------------------------------------------------------------


def values(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype).requires_grad_()


def rope_cases(draw: random.Random) -> list[Case]:
    """Queries (B, H, S, D), and keys with a fourth as many heads. Both are views of (B, S, H, D), as projections return
    them."""

    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * torch.cat((cos, cos), -1).to(x.dtype) + torch.cat((-b, a), -1) * torch.cat((sin, sin), -1).to(
            x.dtype
        )

    def plain(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return turned(query, cos, sin), turned(key, cos, sin)

    found: dict[str, Function] = {"rooftop": rope_pair, "torch": plain, "compile": compiled(plain)}
    try:
        from liger_kernel.ops.rope import LigerRopeFunction

        def liger(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
            tables = [torch.cat((t, t), -1)[None].to(query.dtype) for t in (cos, sin)]
            return LigerRopeFunction.apply(query, key, *tables)

        found["liger"] = liger
    except ImportError:
        print("liger-kernel is not installed: left out")

    def case(positions: int, width: int) -> Case:
        heads, batch = 4096 // width, max(1, 32768 // positions)

        def inputs() -> list[Tensor]:
            flat = [values(batch, positions, h, width).detach() for h in (heads, heads // 4)]
            # leaves, because autograd computes the gradient of a view on the stream that created the view
            pair = [t.transpose(1, 2).requires_grad_() for t in flat]
            angles = torch.outer(torch.arange(positions), 1e4 ** -torch.linspace(0, 1, width // 2))
            return [*pair, angles.cos().cuda(), angles.sin().cuda()]

        return Case("rope", {"batch": batch, "heads": heads, "positions": positions, "features": width}, inputs, found)

    return [case(4096, 128), case(draw.randint(500, 8000), 64)]


def swiglu_cases(draw: random.Random) -> list[Case]:
    """Gate and up packed in one tensor, as one matrix product returns them."""

    def plain(packed: Tensor) -> Tensor:
        gate, up = packed.chunk(2, -1)
        return F.silu(gate) * up

    found: dict[str, Function] = {"rooftop": swiglu, "torch": plain, "compile": compiled(plain)}
    try:
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        found["liger"] = lambda packed: LigerSiLUMulFunction.apply(*packed.chunk(2, -1))
    except ImportError:
        print("liger-kernel is not installed: left out")

    def case(columns: int) -> Case:
        rows = (1 << 27) // columns
        return Case("swiglu", {"rows": rows, "columns": columns}, lambda: [values(rows, 2 * columns)], found)

    return [case(14336), case(4096), case(8 * draw.randint(128, 4096))]


def embedding_cases(draw: random.Random) -> list[Case]:
    """Tokens in three distributions: as in text (few are frequent), all equal, and uniformly random."""
    plain: Function = lambda weight, tokens: F.embedding(tokens, weight)  # noqa: E731
    ours: Function = lambda weight, tokens: embedding(tokens, weight)  # noqa: E731
    found = {"rooftop": ours, "torch": plain, "compile": compiled(plain)}

    def case(rows: int, width: int, kind: str) -> Case:
        def inputs() -> list[Tensor]:
            uniform = torch.rand(32768, device="cuda")
            tokens = {"text": rows**uniform - 1, "even": rows * uniform, "one": 0 * uniform}[kind]
            return [values(rows, width), tokens.long().clamp(0, rows - 1)]

        return Case("embedding", {"tokens": 32768, "rows": rows, "features": width, "kind": kind}, inputs, found)

    drawn = case(draw.randint(1000, 200_000), 8 * draw.randint(32, 512), "text")
    return [case(128_256, 4096, "text"), case(50_257, 768, "even"), case(50_257, 768, "one"), drawn]


def merge_cases(draw: random.Random) -> list[Case]:
    """Two partial results of attention to merge."""

    def plain(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
        lse = torch.logaddexp(lse_a, lse_b)
        weights = [(part - lse).exp()[..., None] for part in (lse_a, lse_b)]
        return (weights[0] * out_a + weights[1] * out_b).to(out_a.dtype), lse

    found: dict[str, Function] = {"rooftop": merge_attention_states, "torch": plain, "compile": compiled(plain)}

    def case(batch: int, positions: int, width: int) -> Case:
        shape = (batch, 32, positions)

        def inputs() -> list[Tensor]:
            return [t for _ in range(2) for t in (values(*shape, width), values(*shape, dtype=torch.float32))]

        size: dict[str, int | str] = {"batch": batch, "heads": 32, "positions": positions, "features": width}
        return Case("merge_attention_states", size, inputs, found)

    return [case(4, 4096, 128)]


CASES: dict[str, Callable[[random.Random], list[Case]]] = {
    "rope": rope_cases,
    "swiglu": swiglu_cases,
    "embedding": embedding_cases,
    "merge": merge_cases,
}


def compiled(function: Function) -> Function:
    return torch.compile(function, dynamic=False)


# ---- measuring ---------------------------------------------------------------------------------------------------


def measure_case(case: Case, ceilings: Ceilings) -> list[dict[str, Any]]:
    """A row for each direction: TB/s of each variant, replayed and eager."""
    torch._dynamo.reset()
    sets = [case.inputs() for _ in range(2)]
    costs = counted(case, sets[0])
    calls: dict[str, dict[str, tuple[Call, Call | None]]] = {"forward": {}, "backward": {}}
    for name, function in case.variants.items():
        try:
            ahead, back = variant(function, sets)
        except Exception as error:
            print(f"{name} cannot do {case.operator} {case.size}: {type(error).__name__}: {str(error)[:100]}")
            continue
        calls["forward"][name], calls["backward"][name] = ahead, back
    rows = []
    for direction, variants in calls.items():
        cost = costs[direction]
        eager = rates({name: both[0] for name, both in variants.items()}, cost, 1)
        replayed = rates({name: both[1] for name, both in variants.items() if both[1]}, cost, len(sets))
        top = cost.bytes / roof(cost, ceilings).ms / 1e9
        row = {"operator": case.operator, **case.size, "direction": direction, "roof": top, "unit": "TB/s"}
        rows.append({**row, "graph": replayed, "eager": eager})
        shown = "  ".join(f"{name} {replayed.get(name, 0):.2f} (eager {rate:.2f})" for name, rate in eager.items())
        print(f"{case.operator} {case.size} {direction} roof {top:.2f} TB/s  {shown}", flush=True)
    return rows


def counted(case: Case, inputs: list[Tensor]) -> dict[str, Cost]:
    """The cost of Rooftop's operator, forward and backward."""
    with CountingMode() as mode:
        backward(*taped(case.variants["rooftop"], inputs))
    costs = {record.name: record.cost for record in mode.records if record.name.startswith("rooftop::")}
    forward_cost = costs[f"rooftop::{case.operator}"]
    # the backward of a rotation is a rotation
    backward_cost = costs.get(f"rooftop::{case.operator}_backward", forward_cost)
    assert forward_cost is not None
    assert backward_cost is not None
    return {"forward": forward_cost, "backward": backward_cost}


def variant(function: Function, sets: list[list[Tensor]]) -> list[tuple[Call, Call | None]]:
    """Pairs of calls (eager, replayed or None), for forward and for backward."""
    plain = [[t.detach() for t in inputs] for inputs in sets]
    with torch.cuda.stream(STREAM):  # autograd runs a backward on the stream of its forward
        tapes = [taped(function, inputs) for inputs in sets]
    return [both(function, plain), both(backward, tapes)]


def both(fn: Callable[..., object], sets: list[Any]) -> tuple[Call, Call | None]:
    eager = rotated(fn, sets)
    with torch.cuda.stream(STREAM):
        waits = waits_for_gpu(eager)  # torch's embedding gradient waits for the GPU
    return eager, None if waits else captured(lambda: [fn(*each) for each in sets], STREAM)


def taped(function: Function, inputs: list[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """(outputs, inputs that get a gradient, gradients of the outputs)."""
    found = after_repeats(function, *inputs)
    outputs = list(found) if isinstance(found, (tuple, list)) else [found]
    return outputs, [t for t in inputs if t.requires_grad], [torch.randn_like(y) for y in outputs]


def backward(outputs: list[Tensor], inputs: list[Tensor], gradients: list[Tensor]) -> None:
    torch.autograd.grad(outputs, inputs, gradients, retain_graph=True)


def rates(variants: dict[str, Any], cost: Cost, sets: int) -> dict[str, float]:
    """TB/s of each variant."""
    if not variants:
        return {}
    with torch.cuda.stream(STREAM):
        times = compare(variants, device="cuda", seconds=0.03, warm_up_seconds=0.02)
    return {name: sets * cost.bytes / timing.median_ms / 1e9 for name, timing in times.items()}


if __name__ == "__main__":
    STREAM = torch.cuda.Stream() if torch.cuda.is_available() else None
    main()
