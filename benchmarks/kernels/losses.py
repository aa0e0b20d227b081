"""Cross entropy from logits and from hidden states, compared with torch, torch.compile and Liger: forward plus
backward, in ms.

    python benchmarks/kernels/losses.py [--out benchmarks/results/h200/losses.json]

Tensors are bfloat16, with the mean over 8192 rows, for the listed numbers of classes and three random ones (`--seed`
repeats them). Forward and backward are timed together, since some variants compute the gradient in forward and some in
backward. They are replayed from a CUDA graph, which shows the kernels' time, and called eagerly. Variants are
interleaved, with two sets of inputs; figures are medians. Liger waits for the GPU to count rows. A graph cannot contain
this wait, so Liger is timed eagerly. From logits, the roof counts one read of the logits and one write of their
gradient; from hidden states, it counts three matrix products. The ceilings are measured in the same run. For hidden
states, peak memory is reported, too. Peers that are not installed, or cannot run a size, are left out with a message.
No size is started after `--seconds`; the file is written after each size.
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
from torch import Tensor

from rooftop.cost import Cost, roof
from rooftop.hardware import Ceilings, compare, measure_ceilings
from rooftop.hardware.graphs import captured, waits_for_gpu
from rooftop.hardware.timing import rotated
from rooftop.kernels import cross_entropy, linear_cross_entropy
from rooftop.launch import repeated_calls
from rooftop.whole_files import write_json

CLASSES = (128256, 32000, 50257, 8192, 1024, 262144)
SPANS = ((1000, 16384), (16384, 65536), (65536, 262144))
LINEAR = ((8192, 4096, 128256), (8192, 768, 50257))  # rows, features, classes
ROWS = 8192
Loss = Callable[..., Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--classes", type=int, nargs="+", default=CLASSES, help="other numbers of classes")
    parser.add_argument(
        "--seed", type=int, default=random.SystemRandom().randrange(1 << 16), help="seed of the drawn sizes"
    )
    parser.add_argument("--seconds", type=float, default=45, help="seconds after which no further size is started")
    parser.add_argument(
        "--only", choices=("logits", "hidden"), help="measure only from logits, or only from hidden states"
    )
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU")
    began = time.perf_counter()
    drawn = [random.Random(options.seed + i).randint(*span) for i, span in enumerate(SPANS)]
    repeated_calls.build()
    ceilings = measure_ceilings("cuda")
    environment = {"device": ceilings.device, "versions": dict(ceilings.versions)}
    found: dict[str, Any] = {"environment": environment, "dtype": "bfloat16", "seed": options.seed, "drawn": drawn}
    found |= {"unit": "ms", "logits": [], "hidden": []}
    first, *others = dict.fromkeys((*options.classes, *drawn))
    logits = [("logits", partial(measure_logits, classes, ceilings)) for classes in (first, *others)]
    hidden = [("hidden", partial(measure_linear, *shape, ceilings)) for shape in LINEAR]
    for place, measured in (logits[0], hidden[0], *logits[1:], *hidden[1:]):
        if options.only not in (None, place):
            continue
        if time.perf_counter() - began > options.seconds:
            print(f"{options.seconds:.0f} s have passed: the remaining cases are left out")
            break
        found[place].append(measured())
        if options.out:
            write_json(options.out, found)


def measure_logits(classes: int, ceilings: Ceilings) -> dict[str, Any]:
    """ms of forward and backward from logits."""
    torch._dynamo.reset()
    variants: dict[str, Loss] = {
        "rooftop": cross_entropy,
        "rooftop separable": lambda x, t: cross_entropy(x, t, fused=False),
        "torch": F.cross_entropy,
        "compile": torch.compile(F.cross_entropy, dynamic=False),
    }
    try:
        from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

        # Liger overwrites the logits with the gradient, so each run gets a copy. The time of the copy alone is
        # measured, too.
        variants["liger and copy"] = lambda x, t: LigerCrossEntropyFunction.apply(x.clone(), t, None, -100)[0]
        variants["copy"] = lambda x, t: x.clone()[0, 0] * 1.0
    except ImportError:
        print("liger-kernel is not installed: left out")
    sets = [(_random(ROWS, classes), torch.randint(classes, (ROWS,), device="cuda")) for _ in range(2)]
    bytes_ = 2 * ROWS * classes
    row = {"rows": ROWS, "classes": classes, "roof": roof(Cost(bytes_ + 8 * ROWS, bytes_), ceilings).ms}
    return _measure(row, variants, sets, wanted=1)


def measure_linear(rows: int, features: int, classes: int, ceilings: Ceilings) -> dict[str, Any]:
    """ms of forward and backward from hidden states, and MiB of peak memory in addition to the inputs."""
    torch._dynamo.reset()

    def plain(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight), target)

    variants: dict[str, Loss] = {
        "rooftop": linear_cross_entropy,
        "torch": plain,
        "compile": torch.compile(plain, dynamic=False),
    }
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

        variants["liger"] = lambda h, w, t: LigerFusedLinearCrossEntropyFunction.apply(h, w, t)[0]
    except ImportError:
        print("liger-kernel is not installed: left out")
    sets = [
        (_random(rows, features), _random(classes, features), torch.randint(classes, (rows,), device="cuda"))
        for _ in range(2)
    ]
    read, flops = 2 * (rows + classes) * features + 8 * rows, 6 * rows * features * classes
    limit = roof(Cost(read, read - 8 * rows, {"bf16": flops}), ceilings).ms
    row = {"rows": rows, "features": features, "classes": classes, "roof": limit}
    return _measure(row, variants, sets, wanted=2, memory=True)


def _measure(
    row: dict[str, Any], variants: dict[str, Loss], sets: list[Any], wanted: int, memory: bool = False
) -> dict[str, Any]:
    """Measure the variants. The first `wanted` inputs get a gradient."""
    calls: dict[str, dict[str, Callable[[], object]]] = {}
    peaks: dict[str, float] = {}
    for name, loss in variants.items():

        def step(*inputs: Tensor, loss: Loss = loss) -> object:
            return torch.autograd.grad(loss(*inputs), inputs[:wanted])

        try:
            with torch.cuda.stream(STREAM):
                step(*sets[0])
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                step(*sets[0])
                torch.cuda.synchronize()
                peaks[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
            eager = rotated(step, sets)
            calls[name] = {"eager": eager}
            with torch.cuda.stream(STREAM):
                waits = waits_for_gpu(eager)
            if not waits:
                calls[name]["replay"] = captured(lambda step=step: [step(*each) for each in sets], STREAM)
        except Exception as error:
            torch.cuda.empty_cache()
            print(f"{name} cannot do {row['classes']} classes: {type(error).__name__}: {str(error)[:100]}")
    eager, replayed = (_compare(calls, how) for how in ("eager", "replay"))
    row["graph"] = {name: t.median_ms / len(sets) for name, t in replayed.items()}
    row["eager"] = {name: t.median_ms for name, t in eager.items()}
    row["graph"] |= {f"{name}, eager": ms for name, ms in row["eager"].items() if name not in replayed}
    if memory:
        row["peak_mib"] = peaks
    times = "  ".join(f"{name} {ms:.3f} (eager {row['eager'].get(name, ms):.3f})" for name, ms in row["graph"].items())
    shape = f"{row['rows']} x " + (f"{row['features']} x " if "features" in row else "") + f"{row['classes']}"
    print(f"{shape}: roof {row['roof']:.3f} ms  {times}", flush=True)
    if memory:
        print("  peak: " + "  ".join(f"{name} {mib:.0f} MiB" for name, mib in peaks.items()), flush=True)
    return row


def _compare(calls: dict[str, dict[str, Callable[[], object]]], how: str) -> dict[str, Any]:
    with torch.cuda.stream(STREAM):
        return compare(
            {name: both[how] for name, both in calls.items() if how in both},
            device="cuda",
            seconds=0.03,
            warm_up_seconds=0.02,
        )


def _random(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16).requires_grad_()


if __name__ == "__main__":
    STREAM = torch.cuda.Stream() if torch.cuda.is_available() else None
    main()
