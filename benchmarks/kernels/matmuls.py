"""linear_act compared with torch, torch.compile and the bare product, in TFLOP/s of the product.

    python benchmarks/kernels/matmuls.py [--out benchmarks/results/h200/matmuls.json] [--seed 7] [--only 512x4096x4096]

The operator is y = activation(x @ weight.T + bias) + residual in bfloat16, at the listed shapes and three random ones
(`--seed` repeats them). "linear" is the product with only its bias, the best that a library can do. Variants are
interleaved, and figures are medians. Each variant is called eagerly, and replayed from a CUDA graph over enough sets of
operands that the next set is never in L2. The roof follows from the operator's own cost and the ceilings measured in
the same run. Liger has no such operator.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rooftop.cost import CountingMode, roof
from rooftop.hardware import Ceilings, compare, measure_ceilings
from rooftop.hardware.graphs import captured
from rooftop.hardware.timing import rotated
from rooftop.kernels import linear_act, linear_act_plan
from rooftop.launch import repeated_calls
from rooftop.whole_files import write_json

TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda t: t,
    "relu": torch.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda t: functional.gelu(t, approximate="tanh"),
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
}
# (M, N, K, activation, residual)
CASES = (
    (4096, 4096, 4096, "sigmoid", False),
    (4096, 4096, 4096, "gelu", False),
    (512, 4096, 4096, "sigmoid", False),
    (512, 4096, 4096, "gelu", False),
    (8192, 8192, 8192, "gelu", False),
    (4096, 3072, 768, "gelu_tanh", False),
    (4096, 768, 3072, "none", True),
    (64, 4096, 4096, "silu", False),
    (4096, 4096, 4095, "silu", False),
)
BOTH_WAYS = (CASES[1], CASES[3])
SPANS = ((65, 1024), (1024, 4096), (4096, 8192))  # ranges of M, N and K of the drawn cases, in multiples of 8
ROTATED_BYTES = 120_000_000  # more than twice the size of the L2 cache
SECONDS = 0.04
Case = tuple[int, int, int, str, bool]
Operands = tuple[Tensor, Tensor, Tensor, Tensor | None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures as JSON; the file is rewritten after each case")
    parser.add_argument(
        "--seed", type=int, default=random.SystemRandom().randrange(1 << 16), help="seed of the drawn shapes"
    )
    parser.add_argument("--only", nargs="+", metavar="MxNxK", help="measure only cases of these shapes")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU")
    repeated_calls.build()
    ceilings = measure_ceilings("cuda")
    environment = {"device": ceilings.device, "versions": dict(ceilings.versions)}
    rows: list[dict[str, Any]] = []
    for case in (*CASES, *drawn(options.seed)):
        if options.only and "x".join(map(str, case[:3])) not in options.only:
            continue
        for backward in (False, True) if case in BOTH_WAYS else (False,):
            rows.append(measure_case(case, backward, ceilings))
            if options.out:
                found = {"environment": environment, "dtype": "bfloat16", "seed": options.seed, "rows": rows}
                write_json(options.out, found)


def drawn(seed: int) -> list[Case]:
    """Draw a random case from each range."""
    draw = random.Random(seed)
    return [
        (*(8 * draw.randint(low // 8, high // 8) for _ in range(3)), draw.choice(sorted(TORCH)), draw.random() < 0.5)  # type: ignore[misc]
        for low, high in SPANS
    ]


def measure_case(case: Case, backward: bool, ceilings: Ceilings) -> dict[str, Any]:
    """TFLOP/s of each variant, replayed and eager. With `backward`, one call is forward and backward."""
    m, n, k, activation, residual = case
    one = 2 * (m * k + n * k + m * n * (1 + residual))
    sets = [_operands(case, backward) for _ in range(max(1, min(8, -(-ROTATED_BYTES // one))))]
    dy = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
    replayed, eager = {}, {}
    for name, function in functions(activation).items():
        call = _with_backward(function, dy) if backward else function
        with torch.set_grad_enabled(backward):
            eager[name] = rotated(call, sets)  # type: ignore[arg-type]
            replayed[name] = captured(lambda call=call: [call(*each) for each in sets], STREAM)  # type: ignore[misc]
    flops = 2 * m * n * k * (3 if backward else 1)
    rates: dict[str, dict[str, float]] = {}
    for how, variants, count in (("graph", replayed, len(sets)), ("eager", eager, 1)):
        with torch.cuda.stream(STREAM), torch.set_grad_enabled(backward):
            times = compare(variants, device="cuda", seconds=SECONDS, warm_up_seconds=SECONDS / 2)
        rates[how] = {name: count * flops / t.median_ms / 1e9 for name, t in times.items()}
    with CountingMode() as counted, torch.set_grad_enabled(backward):
        (_with_backward(linear_act_of(activation), dy) if backward else linear_act_of(activation))(*sets[0])
    floor = flops / sum(roof(record.cost, ceilings).ms for record in counted.records if record.cost) / 1e9
    with torch.set_grad_enabled(backward):
        plan = str(linear_act_plan(*sets[0][:3], activation, sets[0][3]))
    row = {"shape": [m, n, k], "activation": activation, "residual": residual, "backward": backward, "plan": plan}
    what = f"{m} x {n} x {k} {activation}{' + residual' * residual}{', forward and backward' * backward}"
    figures = "  ".join(
        f"{name} {rate:.0f} (eager {rates['eager'][name]:.0f})" for name, rate in rates["graph"].items()
    )
    print(f"{what}: roof {floor:.0f} TFLOP/s  {figures}\n    {plan}", flush=True)
    return {**row, "roof": floor, "unit": "TFLOP/s", **rates}


Function = Callable[..., Tensor]


def linear_act_of(activation: str) -> Function:
    return lambda x, weight, bias, residual: linear_act(x, weight, bias, activation, residual)


def functions(activation: str) -> dict[str, Function]:
    """The variants."""

    def plain(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None) -> Tensor:
        y = TORCH[activation](functional.linear(x, weight, bias))
        return y if residual is None else y + residual

    torch._dynamo.reset()
    return {
        "rooftop": linear_act_of(activation),
        "torch": plain,
        "compile": torch.compile(plain, dynamic=False),
        "linear": lambda x, weight, bias, residual: functional.linear(x, weight, bias),
    }


def _with_backward(function: Function, dy: Tensor) -> Function:
    def call(*operands: Tensor | None) -> Any:
        wanted = [t for t in operands[:3] if t is not None]
        return torch.autograd.grad(function(*operands), wanted, dy)

    return call


def _operands(case: Case, backward: bool) -> Operands:
    m, n, k, _, residual = case

    def random_(*size: int) -> Tensor:
        return torch.randn(*size, device="cuda", dtype=torch.bfloat16)

    x, weight, bias = random_(m, k), random_(n, k) / k**0.5, random_(n)
    added = random_(m, n) if residual else None
    return (*(t.requires_grad_(backward) for t in (x, weight, bias)), added)  # type: ignore[return-value]


if __name__ == "__main__":
    STREAM = torch.cuda.Stream() if torch.cuda.is_available() else None
    main()
