"""Expressions of Mats, conversions and masked copies, compared with OpenCV, torch and (on a GPU) torch.compile.

    python benchmarks/mat.py [--out benchmarks/results/h200/mat.json] [--device cuda] [--quick]

The inputs are random images of 3840 x 2160 x 3 bytes or float32 numbers, and regions of such images. On the CPU,
figures are milliseconds. Each variant is written as its user would write it, with its result in existing memory. OpenCV
runs one operation after the other. On a GPU, figures are also TB/s of the bytes that must move: each operand and the
result once, or for masked copies the mask and the chosen elements. Calls are replayed from a CUDA graph, over several
sets of images if one set would stay in L2. The roof follows from the ceilings measured in the same run. Every variant's
result is compared with ours first. `--quick` takes small images, for tests.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from rooftop.cost import Cost, roof
from rooftop.hardware import Ceilings, compare, measure_ceilings
from rooftop.hardware.graphs import captured
from rooftop.hardware.timing import rotated
from rooftop.mat import CV_8U, Mat, MatExpr, Scalar, maximum
from rooftop.whole_files import write_json

ROWS, COLUMNS, CHANNELS = 2160, 3840, 3
QUICK = (36, 64)
WARM_UP_SECONDS = 1.5
SETS_BYTES = 512 << 20  # more bytes than an L2 cache holds

Into = Callable[..., Mat]


def assigned(expression: Callable[..., MatExpr]) -> Into:
    return lambda out, *mats: out.assign(expression(*mats))


OPERATIONS: dict[str, tuple[int, Into]] = {
    # name: the number of images, and the operation that writes to `out`
    "add": (2, assigned(lambda a, b: a + b)),
    "greater": (2, assigned(lambda a, b: a > b)),
    "blend": (2, assigned(lambda a, b: a * 0.5 + b * 0.5)),
    "weighted": (2, assigned(lambda a, b: a * 0.3 + b * 0.7)),
    "each channel": (1, assigned(lambda a: a + Scalar(5, 6, 7))),
    "five": (5, assigned(lambda a, b, c, d, e: maximum(a + b + c - d, e))),
    "masked": (1, lambda out, a, mask: a.copyTo(out, mask)),  # a disc
    "converted": (1, lambda out, a: a.convertTo(out.depth(), 1 / 255 if a.depth() == CV_8U else 255, 0, out)),
}


def with_opencv(name: str, dtype: str) -> Callable[..., Any]:
    """The operations by OpenCV, which write to `out`."""
    import cv2

    return {
        "add": lambda a, b, out: cv2.add(a, b, out),
        "greater": lambda a, b, out: cv2.compare(a, b, cv2.CMP_GT, out),
        "blend": lambda a, b, out: cv2.addWeighted(a, 0.5, b, 0.5, 0, out),
        "weighted": lambda a, b, out: cv2.addWeighted(a, 0.3, b, 0.7, 0, out),
        "each channel": lambda a, out: cv2.add(a, (5, 6, 7, 0), out),
        "masked": lambda a, mask, out: cv2.copyTo(a, mask, out),
        "converted": lambda a, out: (
            cv2.convertScaleAbs(a, out, 255, 0)
            if dtype == "float32"
            else cv2.multiply(a, (1 / 255, 1 / 255, 1 / 255, 0), out, dtype=cv2.CV_32F)
        ),
        "five": lambda a, b, c, d, e, out: cv2.max(cv2.subtract(cv2.add(cv2.add(a, b, out), c, out), d, out), e, out),
    }[name]


def with_torch(name: str, dtype: str, device: str) -> Callable[..., Tensor]:
    """The operations by torch, in the narrowest dtype that does not overflow, with one saturation at the end."""
    wide = torch.int16 if dtype == "uint8" else torch.float32

    def store(x: Tensor) -> Tensor:
        if dtype == "float32":
            return x
        return (x.round() if x.is_floating_point() else x).clamp(0, 255).to(torch.uint8)

    shift = torch.tensor((5, 6, 7), dtype=wide, device=device)
    return {
        "add": lambda a, b: store(a.to(wide) + b),
        "greater": lambda a, b: (a > b).to(torch.uint8) * 255,
        "blend": lambda a, b: store(a * 0.5 + b * 0.5),
        "weighted": lambda a, b: store(a * 0.3 + b * 0.7),
        "masked": lambda a, mask: torch.where(mask[..., None] != 0, a, 0),
        "converted": lambda a: a * (1 / 255) if dtype == "uint8" else (a * 255).round().clamp(0, 255).to(torch.uint8),
        "each channel": lambda a: store(a.to(wide) + shift),
        "five": lambda a, b, c, d, e: torch.maximum(store(a.to(wide) + b + c - d), e),
    }[name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="+", choices=OPERATIONS, default=list(OPERATIONS))
    parser.add_argument("--quick", action="store_true", help="small images")
    parser.add_argument("--seconds", type=float, default=0.5, help="seconds to measure each variant")
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
                row = {"operation": name, "dtype": dtype, "region": region, "size": [*size, CHANNELS]}
                if options.device == "cuda":
                    row |= on_gpu(name, dtype, region, size, options.seconds, ceilings)
                else:
                    row |= on_cpu(name, dtype, region, size, options.seconds)
                figures = "  ".join(f"{key} {value:.3f}" for key, value in row["ms"].items())
                print(f"{name:12} {dtype:8} {'region' if region else 'whole':6} ms: {figures}", flush=True)
                found["rows"].append(row)
                if options.out:
                    write_json(options.out, found)


def images(count: int, dtype: str, region: bool, size: tuple[int, int], device: str) -> list[Tensor]:
    """Random images (rows, columns, channels), or regions of larger ones."""
    rows, columns = size
    shape = (rows + 16, columns + 16, CHANNELS) if region else (rows, columns, CHANNELS)
    whole = [torch.randint(0, 256, shape, dtype=torch.uint8, device=device) for _ in range(count)]
    numbers = [each if dtype == "uint8" else each.float() for each in whole]
    return [each[8 : rows + 8, 8 : columns + 8] if region else each for each in numbers]


def operands(name: str, dtype: str, region: bool, size: tuple[int, int], device: str) -> list[Tensor]:
    """The operands of an operation: images, and for "masked" also a mask (rows, columns)."""
    given = images(OPERATIONS[name][0], dtype, region, size, device)
    if name == "masked":
        y, x = (torch.linspace(-1, 1, n, device=device) for n in size)
        given.append((y[:, None] ** 2 + x**2 < 0.7).to(torch.uint8))
    return given


def result_like(name: str, image: Tensor) -> Tensor:
    """Zeros for the result of an operation on such images."""
    dtype = torch.uint8 if name == "greater" else image.dtype
    if name == "converted":
        dtype = torch.float32 if image.dtype == torch.uint8 else torch.uint8
    return torch.zeros(image.shape, dtype=dtype, device=image.device)


def on_cpu(name: str, dtype: str, region: bool, size: tuple[int, int], seconds: float) -> dict[str, Any]:
    operation = OPERATIONS[name][1]
    given = operands(name, dtype, region, size, "cpu")
    mats, arrays = [Mat(each) for each in given], [each.numpy() for each in given]
    result, other = Mat(result_like(name, given[0])), result_like(name, given[0]).numpy()
    plain, opencv = with_torch(name, dtype, "cpu"), with_opencv(name, dtype)
    calls: dict[str, Callable[[], object]] = {
        "rooftop": lambda: operation(result, *mats),
        "opencv": lambda: opencv(*arrays, other),
        "torch": lambda: plain(*given),
    }
    operation(result, *mats)  # the first call imports modules
    # long enough for Rooftop to compile the expression, which it does once uncompiled runs have cost as much
    end = perf_counter() + WARM_UP_SECONDS * (seconds > 0.1)
    while perf_counter() < end:
        operation(result, *mats)
    operation(result, *mats)
    for key, value in {"opencv": torch.from_numpy(opencv(*arrays, other)), "torch": plain(*given)}.items():
        check(name, key, value, result.tensor())
    return {
        "ms": {
            key: each.median_ms
            for key, each in compare(calls, device="cpu", seconds=seconds, warm_up_seconds=seconds / 4).items()
        }
    }


def on_gpu(
    name: str, dtype: str, region: bool, size: tuple[int, int], seconds: float, ceilings: Ceilings
) -> dict[str, Any]:
    operation = OPERATIONS[name][1]
    first = operands(name, dtype, region, size, "cuda")
    like = result_like(name, first[0])
    cost = Cost(sum(each.numel() * each.element_size() for each in first), like.numel() * like.element_size(), {})
    if name == "masked":  # a masked copy neither reads nor writes elements that are not chosen
        chosen = int(first[1].count_nonzero()) * CHANNELS * like.element_size()
        cost = Cost(first[1].numel() + chosen, chosen, {})
    sets = [first, *(operands(name, dtype, region, size, "cuda") for _ in range(max(1, SETS_BYTES // cost.bytes)))]
    plain = with_torch(name, dtype, "cuda")
    torch._dynamo.reset()
    compiled = torch.compile(plain, dynamic=False)
    prepared = []
    for each in sets:
        mats = [Mat(x) for x in each]
        prepared.append((operation(Mat(torch.zeros_like(like)), *mats), mats))
    for key, function in {"torch": plain, "compile": compiled}.items():
        check(name, key, function(*sets[0]), prepared[0][0].tensor())
    eager: dict[str, Callable[[], object]] = {
        "rooftop": rotated(lambda out, mats: operation(out, *mats), prepared),
        "torch": rotated(lambda *each: plain(*each), sets),
        "compile": rotated(lambda *each: compiled(*each), sets),
    }
    replay: dict[str, Callable[[], object]] = {
        "rooftop": captured(lambda: [operation(out, *mats) for out, mats in prepared]),
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
    """Compare a result with ours. It may differ by one level of 255, since peers round twice or in float32."""
    error = float((value.double() - expected.double().reshape(value.shape)).abs().max())
    saturated_on_the_way = name == "five" and key == "opencv"
    if error > 1 and not saturated_on_the_way:
        raise SystemExit(f"{name}: {key} differs from ours by {error}")


if __name__ == "__main__":
    main()
