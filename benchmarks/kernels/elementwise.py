"""Fused elementwise expressions compared with torch and torch.compile, in TB/s of the bytes that must move.

    python benchmarks/kernels/elementwise.py [--out benchmarks/results/h200/elementwise.json] [--elements 134217728]

Each expression runs forward and backward, in bfloat16 (a sum also in float32), on 2^27 elements. A sum and GELU also
run on 2^20 elements. GELU also runs on three random sizes, most of them odd (`--seed` repeats them). Variants are
interleaved, with several sets of inputs if one set would stay in L2. Figures are medians, replayed from a CUDA graph,
which shows the kernels, and called eagerly. The roof follows from the operator's own cost and the ceilings measured in
the same run. Liger has no general elementwise operator; its GELU and SiLU are parts of gated products, so they are not
compared here. The file is written after each row.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from repeating import after_repeats
from torch import Tensor

from rooftop.cost import Cost, distinct_bytes, roof
from rooftop.hardware import Ceilings, compare, measure_ceilings
from rooftop.hardware.graphs import captured
from rooftop.hardware.timing import rotated
from rooftop.kernels import fused
from rooftop.launch import repeated_calls
from rooftop.whole_files import write_json

ELEMENTS, SMALL = 1 << 27, 1 << 20
SPANS = ((1 << 16, 1 << 20), (1 << 20, 1 << 24), (1 << 24, 1 << 27))
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
Function = Callable[..., Tensor]

EXPRESSIONS: dict[str, tuple[Function, str]] = {
    # name: function, and the layouts of its tensors: f full, r a row, c a column
    "add": (lambda x, y: x + y, "ff"),
    "sigmoid": (lambda x: torch.sigmoid(x), "f"),
    "gelu": (lambda x: F.gelu(x), "f"),
    "gated": (lambda x, y, b: x * torch.sigmoid(y + b), "ffr"),
    "scaled": (lambda x, s: torch.clamp(x * s, -1.0, 1.0), "fc"),
    "four": (lambda a, b, c, d: torch.where(a > b, c * a + b, d), "ffff"),
}
COLUMNS = 4096  # number of columns, for expressions with row or column inputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--elements", type=int, nargs="+", help="other sizes")
    parser.add_argument("--expressions", nargs="+", choices=EXPRESSIONS, default=list(EXPRESSIONS))
    parser.add_argument(
        "--seed", type=int, default=random.SystemRandom().randrange(1 << 16), help="seed of the drawn sizes"
    )
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU")
    drawn = [random.Random(options.seed + i).randint(*span) for i, span in enumerate(SPANS)]
    repeated_calls.build()
    ceilings = measure_ceilings("cuda")
    found: dict[str, Any] = {
        "environment": {"device": ceilings.device, "versions": dict(ceilings.versions)},
        "seed": options.seed,
        "drawn": drawn,
        "rows": [],
    }
    for name in options.expressions:
        sizes = options.elements or [ELEMENTS, *([SMALL] if name in ("add", "gelu") else ())]
        drawn_too = [] if options.elements or name != "gelu" else drawn
        for dtype, elements in [
            *(("bfloat16", n) for n in (*sizes, *drawn_too)),
            *(("float32", n) for n in sizes if name == "add"),
        ]:
            found["rows"] += measure(name, dtype, elements, ceilings)
            if options.out:
                write_json(options.out, found)


def measure(name: str, dtype: str, elements: int, ceilings: Ceilings) -> list[dict[str, Any]]:
    """A row for each direction."""
    function, layouts = EXPRESSIONS[name]
    flat = set(layouts) == {"f"}
    shape = (elements,) if flat else (elements // COLUMNS, COLUMNS)
    bytes_ = elements * DTYPES[dtype].itemsize
    sets = [_inputs(shape, layouts, DTYPES[dtype]) for _ in range(max(2, -(-(256 << 20) // bytes_ // len(layouts))))][
        :16
    ]
    torch._dynamo.reset()
    variants = {"rooftop": fused(function), "torch": function, "compile": torch.compile(function, dynamic=False)}
    rows = []
    # the backward of an addition computes nothing: it only passes gradients on
    for direction in ("forward",) if name == "add" else ("forward", "backward"):
        calls = {key: _calls(variant, direction, sets) for key, variant in variants.items()}
        cost = _cost(function, direction, sets[0])
        eager = _compare({key: each["eager"] for key, each in calls.items()})
        replayed = _compare({key: each["replay"] for key, each in calls.items()})
        row = {
            "expression": name,
            "dtype": dtype,
            "elements": elements,
            "direction": direction,
            "unit": "TB/s",
            "roof": cost.bytes / roof(cost, ceilings).ms / 1e9,
            "graph": {key: len(sets) * cost.bytes / ms / 1e9 for key, ms in replayed.items()},
            "eager": {key: cost.bytes / ms / 1e9 for key, ms in eager.items()},
        }
        rates = "  ".join(f"{key} {rate:.2f} (eager {row['eager'][key]:.2f})" for key, rate in row["graph"].items())  # type: ignore[index]
        print(f"{name:8} {dtype:8} {elements:10,} {direction:8} roof {row['roof']:.2f} TB/s  {rates}", flush=True)
        rows.append(row)
    return rows


def _inputs(shape: tuple[int, ...], layouts: str, dtype: torch.dtype) -> list[Tensor]:
    of = {"f": shape, "r": shape[-1:], "c": (shape[0], 1)}
    return [torch.randn(of[each], device="cuda", dtype=dtype, requires_grad=True) for each in layouts]


def _calls(function: Function, direction: str, sets: list[list[Tensor]]) -> dict[str, Callable[[], object]]:
    """The call, eager and replayed over all sets. Backward computes only gradients of inputs that have the output's
    shape."""
    if direction == "forward":
        return _both(function, [[t.detach() for t in each] for each in sets])
    with torch.cuda.stream(STREAM):  # autograd runs a backward on the stream of its forward
        results = [after_repeats(function, *each) for each in sets]
        taped = [(y, _full(y, each), torch.randn_like(y)) for y, each in zip(results, sets, strict=True)]
    return _both(_backward, taped)


def _full(y: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return [t for t in inputs if t.shape == y.shape]


def _cost(function: Function, direction: str, inputs: list[Tensor]) -> Cost:
    y = function(*inputs).detach()
    if direction == "forward":
        return Cost(distinct_bytes(inputs), distinct_bytes([y]), {})
    return Cost(distinct_bytes([y, *_read_by_backward(function, inputs)]), distinct_bytes(_full(y, inputs)), {})


def _read_by_backward(function: Function, inputs: list[Tensor]) -> list[Tensor]:
    """The tensors that the fused expression saves for backward; none if backward only passes gradients on."""
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        fused(function)(*inputs)
    return kept


def _backward(y: Tensor, wanted: list[Tensor], dy: Tensor) -> None:
    torch.autograd.grad(y, wanted, dy, retain_graph=True)


def _both(fn: Callable[..., object], sets: list[Any]) -> dict[str, Callable[[], object]]:
    return {"eager": rotated(fn, sets), "replay": captured(lambda: [fn(*each) for each in sets], STREAM)}


def _compare(variants: dict[str, Callable[[], object]]) -> dict[str, float]:
    with torch.cuda.stream(STREAM):
        found = compare(variants, device="cuda", seconds=0.03, warm_up_seconds=0.02)
    return {name: timing.median_ms for name, timing in found.items()}


if __name__ == "__main__":
    STREAM = torch.cuda.Stream() if torch.cuda.is_available() else None
    main()
