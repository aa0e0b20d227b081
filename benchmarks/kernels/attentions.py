"""Attention by each of PyTorch's back ends and by the back end that Rooftop chooses, forward and backward, in TFLOP/s.

    python benchmarks/kernels/attentions.py [--out benchmarks/results/h200/attentions.json] [--seconds 50]

Tensors are bfloat16, with about 16384 positions in all and 2048 features over the heads. The script runs listed sizes
and three random ones (`--seed` repeats them). "sdpa" is plain `torch.nn.functional.scaled_dot_product_attention`.
Variants are interleaved and replayed from CUDA graphs, and figures are medians. Flops count only the query-key pairs
that the mask allows. The roof follows from the operator's own cost and the ceilings measured in the same run. `RULES`
in `rooftop.kernels.attentions.attentions` follow from these rows. A back end that cannot run a size is left out. The
file is written after each row; after `--seconds` no further size is started.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from repeating import after_repeats
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from rooftop.cost import Cost, CountingMode, roof
from rooftop.hardware import Ceilings, compare, measure_ceilings
from rooftop.hardware.graphs import captured
from rooftop.kernels import attention, attention_plan
from rooftop.whole_files import write_json

POSITIONS = (16384, 4096, 1024, 512, 256, 128)
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
Calls = dict[str, Callable[[], object]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--seconds", type=float, default=50, help="seconds after which no further size is started")
    parser.add_argument(
        "--seed", type=int, default=random.SystemRandom().randrange(1 << 16), help="seed of the drawn sizes"
    )
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU")
    draw, began = random.Random(options.seed), time.perf_counter()
    drawn = [
        (draw.randint(*span), width, True) for span, width in (((130, 900), 64), ((900, 5000), 128), ((64, 8000), 96))
    ]
    listed = [(positions, width, causal) for positions in POSITIONS for width in (128, 64) for causal in (True, False)]
    ceilings = measure_ceilings("cuda")
    environment = {"device": ceilings.device, "versions": dict(ceilings.versions)}
    found: dict[str, Any] = {"environment": environment, "dtype": "bfloat16", "seed": options.seed, "rows": []}
    for positions, width, causal in listed[:4] + drawn + listed[4:]:
        if time.perf_counter() - began > options.seconds:
            print("out of time: the other sizes are left out")
            break
        found["rows"] += measure_size(positions, width, causal, ceilings)
        if options.out:
            write_json(options.out, found)


def measure_size(positions: int, width: int, causal: bool, ceilings: Ceilings) -> list[dict[str, Any]]:
    """A row for each direction: TFLOP/s of each variant."""
    batch, heads = max(1, 16384 // positions), 2048 // width
    shape = (batch, positions, heads, width)
    tensors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(4)]
    *inputs, dout = [t.requires_grad_() for t in tensors]
    costs = counted(inputs, dout, causal)
    size = {"positions": positions, "features": width, "heads": heads, "batch": batch, "causal": causal}
    rows = []
    for direction, calls in (("forward", forwards(inputs, causal)), ("backward", backwards(inputs, dout, causal))):
        plan = attention_plan(*inputs, is_causal=causal, direction=direction)  # type: ignore[arg-type]
        with torch.cuda.stream(STREAM):
            times = compare(calls, device="cuda", seconds=0.03, warm_up_seconds=0.02)
        flops = costs[direction].flops["bf16"]
        rates = {name: flops / timing.median_ms / 1e9 for name, timing in times.items()}
        top = flops / roof(costs[direction], ceilings).ms / 1e9
        rows.append(
            {**size, "direction": direction, "chosen": plan.backend, "roof": top, "unit": "TFLOP/s", "rates": rates}
        )
        shown = "  ".join(f"{name} {rate:.0f}" for name, rate in rates.items())
        print(f"{direction:8} {size} roof {top:.0f} TFLOP/s, {plan.backend} chosen: {shown}", flush=True)
    return rows


def counted(inputs: list[Tensor], dout: Tensor, causal: bool) -> dict[str, Cost]:
    with CountingMode() as mode:
        torch.autograd.grad(attention(*inputs, is_causal=causal), inputs, dout)
    costs = {record.name: record.cost for record in mode.records if record.cost is not None}
    return {"forward": costs["rooftop::attention"], "backward": costs["rooftop::attention_backward"]}


def variants(causal: bool) -> dict[str, Callable[..., Tensor]]:
    plain = partial(F.scaled_dot_product_attention, is_causal=causal)

    def limited(backend: SDPBackend, *inputs: Tensor) -> Tensor:
        with sdpa_kernel([backend]):
            return plain(*inputs)

    found: dict[str, Callable[..., Any]] = {"rooftop": partial(attention, is_causal=causal), "sdpa": plain}
    return found | {name: partial(limited, backend) for name, backend in BACKENDS.items()}


def forwards(inputs: list[Tensor], causal: bool) -> Calls:
    plain = [t.detach() for t in inputs]
    return able({name: partial(function, *plain) for name, function in variants(causal).items()}, inputs)


def backwards(inputs: list[Tensor], dout: Tensor, causal: bool) -> Calls:
    calls: Calls = {}
    with torch.cuda.stream(STREAM):  # autograd runs a backward on the stream of its forward
        for name, function in variants(causal).items():
            try:
                out = after_repeats(function, *inputs)
            except RuntimeError:
                continue
            calls[name] = partial(torch.autograd.grad, out, inputs, dout, retain_graph=True)
    return able(calls, inputs)


def able(calls: Calls, inputs: list[Tensor]) -> Calls:
    """The variants that can run this size, as replays of CUDA graphs: a sample of one eager call would include the
    host's time."""
    found: Calls = {}
    for name, call in calls.items():
        try:
            with torch.cuda.stream(STREAM):
                call()
            torch.cuda.synchronize()
            found[name] = captured(call, STREAM)
        except RuntimeError as error:
            print(f"{name} is left out: {str(error)[:100]}")
    return found


if __name__ == "__main__":
    STREAM = torch.cuda.Stream() if torch.cuda.is_available() else None
    main()
