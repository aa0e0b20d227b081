"""Whole transformer blocks built from torch.nn and from Rooftop: GPT-2 (tokens to loss), Llama and Swin, in ms.

    python benchmarks/kernels/blocks.py [--out benchmarks/results/h200/blocks.json] [--only gpt llama swin]

The blocks are those of examples/transformer_blocks.py in bfloat16. Each block has one listed size, and with `--drawn`
also a random one (`--seed` repeats it). Inference and training (forward and all gradients) are called eagerly, and
replayed from a CUDA graph, which shows the time of the kernels. Both libraries run plain and through torch.compile.
Variants are interleaved, and figures are medians. The roof is the fused roof of torch's block at the ceilings measured
in the same run. It counts one transfer each of inputs, parameters and results. Variants that cannot be captured are
only called eagerly, with a message. The file is written after each row. `--quick` tests the script on a CPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import rooftop
from rooftop.hardware import Ceilings, ceilings_of, compare, measure_ceilings
from rooftop.hardware.graphs import captured
from rooftop.launch import repeated_calls
from rooftop.whole_files import write_json

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "transformer_blocks.py"
Call = Callable[[], object]
Size = dict[str, int]  # arguments for the example's functions `pair` and `inputs`


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--only", nargs="+", choices=sorted(SIZES), default=sorted(SIZES), help="these blocks")
    parser.add_argument(
        "--seed", type=int, default=random.SystemRandom().randrange(1 << 16), help="seed of the drawn sizes"
    )
    parser.add_argument("--drawn", action="store_true", help="also time a random size of each block")
    parser.add_argument("--quick", action="store_true", help="a tiny run on the CPU, to test the script")
    options = parser.parse_args()
    if not options.quick and not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU; --quick tests the script on a CPU")
    if not options.quick:
        repeated_calls.build()
    ceilings = ceilings_of("h200") if options.quick else measure_ceilings("cuda")
    environment = {"device": ceilings.device, "versions": dict(ceilings.versions)}
    found: dict[str, Any] = {"environment": environment, "dtype": "bfloat16", "seed": options.seed, "rows": []}
    for name in options.only:
        sizes = [QUICK] if options.quick else SIZES[name](random.Random(options.seed))
        for size in sizes if options.drawn else sizes[:1]:
            for row in measure_block(name, size, ceilings, "cpu" if options.quick else "cuda"):
                found["rows"].append(row)
                if options.out:
                    write_json(options.out, found)


# ---- sizes -------------------------------------------------------------------------------------------------------

QUICK: Size = {"width": 48, "heads": 3, "tokens": 100, "batch": 2, "size": 8}


def gpt_sizes(draw: random.Random) -> list[Size]:
    heads = draw.randint(8, 24)
    drawn = {"width": 64 * heads, "heads": heads, "tokens": 50257, "batch": 4, "size": draw.randint(500, 1500)}
    return [{"width": 768, "heads": 12, "tokens": 50257, "batch": 8, "size": 1024}, drawn]


def llama_sizes(draw: random.Random) -> list[Size]:
    heads = draw.randint(8, 32)
    drawn = {"width": 128 * heads, "heads": heads, "batch": 2, "size": draw.randint(500, 3000)}
    return [{"width": 4096, "heads": 32, "batch": 2, "size": 4096}, drawn]


def swin_sizes(draw: random.Random) -> list[Size]:
    """Swin's sizes, where `size` is the side of the image, in windows of 4."""
    heads = draw.randint(3, 12)
    drawn = {"width": 32 * heads, "heads": heads, "batch": 16, "size": 4 * draw.randint(6, 20)}
    return [{"width": 192, "heads": 6, "batch": 64, "size": 56}, drawn]


SIZES: dict[str, Callable[[random.Random], list[Size]]] = {"gpt": gpt_sizes, "llama": llama_sizes, "swin": swin_sizes}

# ---- measuring ---------------------------------------------------------------------------------------------------


def measure_block(name: str, size: Size, ceilings: Ceilings, device: str) -> list[dict[str, Any]]:
    """A row for inference and one for training: ms of each variant, eager and replayed."""
    torch._dynamo.reset()
    blocks = example()
    known = {key: size[key] for key in ("width", "heads", "tokens") if key in size}
    pair = [block.to(device, torch.bfloat16) for block in blocks.pair(name, **known)]
    given = [x.to(device) for x in blocks.inputs(name, **size)]
    given[0] = given[0].to(torch.bfloat16).requires_grad_() if given[0].is_floating_point() else given[0]
    modules: dict[str, Any] = dict(zip(("torch", "rooftop"), pair, strict=True))
    backend = "inductor" if device == "cuda" else "aot_eager"
    modules |= {f"{key}, compiled": torch.compile(m, dynamic=False, backend=backend) for key, m in modules.items()}
    rows = []
    for direction, step in (("inference", inference), ("training", training)):
        calls = {key: step(module, given) for key, module in modules.items()}
        report = rooftop.predict(pair[0], *given, ceilings=ceilings, train=direction == "training")
        row: dict[str, Any] = {"block": name, **size, "direction": direction, "unit": "ms"}
        row["day"] = time.strftime("%Y-%m-%d", time.gmtime())
        row |= {"roof": report.summary.fused_roof_ms, "op_roof": report.summary.op_roof_ms}
        row["eager"] = times(calls, device)
        row["graph"] = times(replays(calls), device) if device == "cuda" else {}
        rows.append(row)
        shown = "  ".join(f"{key} {row['graph'].get(key, 0):.3f} (eager {ms:.3f})" for key, ms in row["eager"].items())
        print(f"{name} {size} {direction} fused roof {row['roof']:.3f} ms  {shown}", flush=True)
    return rows


def example() -> Any:
    """The module of the example, registered because compiled code looks it up by name."""
    name = EXAMPLE.stem
    if name not in sys.modules:
        specification = importlib.util.spec_from_file_location(name, EXAMPLE)
        assert specification is not None
        assert specification.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def inference(module: nn.Module, given: list[Tensor]) -> Call:
    def step() -> Tensor:
        with torch.no_grad():
            return module(*given)  # type: ignore[no-any-return]

    return step


def training(module: nn.Module, given: list[Tensor]) -> Call:
    wanted = [*module.parameters(), *(x for x in given if x.requires_grad)]

    def step() -> tuple[Tensor, ...]:
        y = module(*given)
        return torch.autograd.grad(y, wanted, torch.ones_like(y))

    return step


def replays(calls: dict[str, Call]) -> dict[str, Call]:
    found = {}
    for name, call in calls.items():
        try:
            found[name] = captured(call, STREAM)
        except RuntimeError as error:  # torch's gradient of an embedding synchronizes
            torch.cuda.synchronize()
            print(f"{name} cannot be captured: {str(error)[:80]}")
    return found


def times(calls: dict[str, Call], device: str) -> dict[str, float]:
    """ms of each variant."""
    if not calls:
        return {}
    found = compare(calls, device=device, seconds=0.1, warm_up_seconds=0.05)
    return {name: timing.median_ms for name, timing in found.items()}


if __name__ == "__main__":
    STREAM = torch.cuda.Stream() if torch.cuda.is_available() else None
    main()
