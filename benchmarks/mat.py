"""Expressions of Mats beside OpenCV and torch on the CPU, and beside torch and torch.compile on a GPU.

    python benchmarks/mat.py [--out benchmarks/results/h200/mat.json] [--device cuda] [--quick]

Images of 3840 x 2160 x 3 bytes and of as many float32 numbers, random, and regions of them. On the CPU in milliseconds,
each variant as its user would write it, into memory that is there; OpenCV does one operation after the other. On a GPU
also in TB/s of the bytes that must move (each operand once, the result once), replayed from a CUDA graph over several
sets of images where one would stay in L2, beside the roof at the ceilings measured in the same run. Every variant's
result is compared with the expression's first. `--quick`: small images, for tests.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rooftop.cost import Cost, roof
from rooftop.hardware import Ceilings, compare, measure_ceilings
from rooftop.hardware.timing import captured, rotated
from rooftop.mat import Mat, MatExpr, Scalar, maximum

ROWS, COLUMNS, CHANNELS = 2160, 3840, 3
QUICK = (36, 64)
SETS_BYTES = 512 << 20  # beyond what an L2 holds

Expression = Callable[..., MatExpr]
EXPRESSIONS: dict[str, tuple[int, Expression]] = {
    # name: how many operands, and the expression
    "add": (2, lambda a, b: a + b),
    "greater": (2, lambda a, b: a > b),
    "blend": (2, lambda a, b: a * 0.5 + b * 0.5),
    "weighted": (2, lambda a, b: a * 0.3 + b * 0.7),
    "each channel": (1, lambda a: a + Scalar(5, 6, 7)),
    "five": (5, lambda a, b, c, d, e: maximum(a + b + c - d, e)),
}


def with_opencv(name: str, dtype: str) -> Callable[..., Any]:
    """The same by OpenCV, into `out`."""
    import cv2

    return {
        "add": lambda a, b, out: cv2.add(a, b, out),
        "greater": lambda a, b, out: cv2.compare(a, b, cv2.CMP_GT, out),
        "blend": lambda a, b, out: cv2.addWeighted(a, 0.5, b, 0.5, 0, out),
        "weighted": lambda a, b, out: cv2.addWeighted(a, 0.3, b, 0.7, 0, out),
        "each channel": lambda a, out: cv2.add(a, (5, 6, 7, 0), out),
        "five": lambda a, b, c, d, e, out: cv2.max(cv2.subtract(cv2.add(cv2.add(a, b, out), c, out), d, out), e, out),
    }[name]


def with_torch(name: str, dtype: str) -> Callable[..., Tensor]:
    """The same by torch, in the narrowest dtype that does not overflow, saturated once."""
    wide = torch.int16 if dtype == "uint8" else torch.float32

    def store(x: Tensor) -> Tensor:
        if dtype == "float32":
            return x
        return (x.round() if x.is_floating_point() else x).clamp(0, 255).to(torch.uint8)

    return {
        "add": lambda a, b: store(a.to(wide) + b),
        "greater": lambda a, b: (a > b).to(torch.uint8) * 255,
        "blend": lambda a, b: store(a * 0.5 + b * 0.5),
        "weighted": lambda a, b: store(a * 0.3 + b * 0.7),
        "each channel": lambda a: store(a.to(wide) + torch.tensor((5, 6, 7), dtype=wide, device=a.device)),
        "five": lambda a, b, c, d, e: torch.maximum(store(a.to(wide) + b + c - d), e),
    }[name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="+", choices=EXPRESSIONS, default=list(EXPRESSIONS))
    parser.add_argument("--quick", action="store_true", help="small images")
    parser.add_argument("--seconds", type=float, default=0.5, help="of measuring each variant")
    options = parser.parse_args()
    ceilings = measure_ceilings(options.device)
    found: dict[str, Any] = {
        "environment": {"device": ceilings.device, "versions": dict(ceilings.versions)},
        "threads": torch.get_num_threads(),
        "rows": [],
    }
    size = QUICK if options.quick else (ROWS, COLUMNS)
    for name in options.only:
        for dtype in ("uint8", "float32"):
            for region in (False, True):
                row = {"expression": name, "dtype": dtype, "region": region, "size": [*size, CHANNELS]}
                if options.device == "cuda":
                    row |= on_gpu(name, dtype, region, size, options.seconds, ceilings)
                else:
                    row |= on_cpu(name, dtype, region, size, options.seconds)
                figures = "  ".join(f"{key} {value:.3f}" for key, value in row["ms"].items())
                print(f"{name:12} {dtype:8} {'region' if region else 'whole':6} ms: {figures}", flush=True)
                found["rows"].append(row)
                if options.out:
                    options.out.parent.mkdir(parents=True, exist_ok=True)
                    options.out.write_text(json.dumps(found, indent=1) + "\n")


def images(count: int, dtype: str, region: bool, size: tuple[int, int], device: str) -> list[Tensor]:
    """Random images (rows, columns, channels), or regions of larger ones."""
    rows, columns = size
    shape = (rows + 16, columns + 16, CHANNELS) if region else (rows, columns, CHANNELS)
    whole = [torch.randint(0, 256, shape, dtype=torch.uint8, device=device) for _ in range(count)]
    numbers = [each if dtype == "uint8" else each.float() for each in whole]
    return [each[8 : rows + 8, 8 : columns + 8] if region else each for each in numbers]


def on_cpu(name: str, dtype: str, region: bool, size: tuple[int, int], seconds: float) -> dict[str, Any]:
    count, expression = EXPRESSIONS[name]
    given = images(count, dtype, region, size, "cpu")
    mats, arrays = [Mat(each) for each in given], [each.numpy() for each in given]
    expected = expression(*mats).to_mat()
    result, other = Mat(expected.size, expected.type()), np.empty_like(expected.numpy())
    plain, opencv = with_torch(name, dtype), with_opencv(name, dtype)
    calls: dict[str, Callable[[], object]] = {
        "rooftop": lambda: result.assign(expression(*mats)),
        "opencv": lambda: opencv(*arrays, other),
        "torch": lambda: plain(*given),
    }
    for key, value in {"opencv": torch.from_numpy(opencv(*arrays, other)), "torch": plain(*given)}.items():
        check(name, key, value, expected.tensor())
    return {
        "ms": {
            key: each.median_ms
            for key, each in compare(calls, device="cpu", seconds=seconds, warm_up_seconds=seconds / 4).items()
        }
    }


def on_gpu(
    name: str, dtype: str, region: bool, size: tuple[int, int], seconds: float, ceilings: Ceilings
) -> dict[str, Any]:
    count, expression = EXPRESSIONS[name]
    item = 1 if dtype == "uint8" else 4
    elements = size[0] * size[1] * CHANNELS
    stored = 1 if name == "greater" else item
    cost = Cost(count * elements * item, elements * stored, {})
    sets = [images(count, dtype, region, size, "cuda") for _ in range(max(2, -(-SETS_BYTES // cost.bytes)))]
    plain = with_torch(name, dtype)
    torch._dynamo.reset()
    compiled = torch.compile(plain, dynamic=False)
    prepared = []
    for each in sets:
        mats = [Mat(x) for x in each]
        prepared.append((mats, expression(*mats).to_mat()))
    for key, function in {"torch": plain, "compile": compiled}.items():
        check(name, key, function(*sets[0]), prepared[0][1].tensor())
    eager: dict[str, Callable[[], object]] = {
        "rooftop": rotated(lambda mats, out: out.assign(expression(*mats)), prepared),
        "torch": rotated(lambda *each: plain(*each), sets),
        "compile": rotated(lambda *each: compiled(*each), sets),
    }
    replay: dict[str, Callable[[], object]] = {
        "rooftop": captured(lambda: [out.assign(expression(*mats)) for mats, out in prepared]),
        "torch": captured(lambda: [plain(*each) for each in sets]),
        "compile": captured(lambda: [compiled(*each) for each in sets]),
    }
    ms = {key: each.median_ms / len(sets) for key, each in compare(replay, device="cuda", seconds=seconds).items()}
    return {
        "ms": ms,
        "eager_ms": {key: each.median_ms for key, each in compare(eager, device="cuda", seconds=seconds).items()},
        "tb_per_s": {key: cost.bytes / each / 1e9 for key, each in ms.items()},
        "roof_tb_per_s": cost.bytes / roof(cost, ceilings).ms / 1e9,
        "percent_of_roof": 100 * roof(cost, ceilings).ms / ms["rooftop"],
    }


def check(name: str, key: str, value: Tensor, expected: Tensor) -> None:
    """One level of 255 apart where the others round twice or in float32."""
    error = float((value.double() - expected.double().reshape(value.shape)).abs().max())
    saturated_on_the_way = name == "five" and key == "opencv"
    if error > 1 and not saturated_on_the_way:
        raise SystemExit(f"{name}: {key} is {error} away from the expression's value")


if __name__ == "__main__":
    main()
