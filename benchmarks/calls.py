"""The host time of a call, in microseconds and by part, compared with torch's functions and torch.compile.

    python benchmarks/calls.py [--out benchmarks/results/h100/calls.json] [--only layer_norm softmax] [--no-compile]

The host issues a burst of calls, fewer than a GPU's queue holds, and does not wait for the GPU. So only the host's time
is measured. Inputs are small, so the host limits the speed. Variants take turns. Figures are the median of `--rounds`,
and the spread between rounds, since a host's speed varies. Modes:

    inference        under torch.no_grad; "inference_mode" likewise
    forward          with inputs that require gradients
    both             forward and backward
    hooked           likewise, with hooks that see each saved tensor, as in a checkpointed block; without torch.compile

`rooftop` is a call as users make it: C++ repeats the call once it has recorded it (launch/repeated_calls.py). `why`
says why a call still runs in Python. `python` is the same call made in Python. `torch` does the same work by torch's
own functions, by several functions in a row where torch has no fused function. Variants with "compiled" are calls of a
program of torch.compile. The call in Python, in inference, has these parts:

    checks           the public function up to its operators, and back
    way              from the call of an operator to its implementation (launch/fast_path.py)
    choosing         the operator's decisions, and all its work that is not listed below
    results          allocation of the results' memory
    launch           launching the kernels, from their arguments to the driver; on a CPU, the computation itself
    dispatcher       time in PyTorch's dispatcher, which `way` replaces

`--quick` tests the script on a CPU, where every figure includes the computation itself.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from programs import Results
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from rooftop import kernels
from rooftop.hardware import ceilings_of, measure_ceilings
from rooftop.launch import operators, repeated_calls, triton_launch
from rooftop.launch.compiled_kernels import Compiled

BURST = 40
"""Number of calls in a burst. A GPU's queue holds about a thousand kernels."""
Run = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """A function of ours and its counterpart in torch.

    Attributes:
        made: creates the inputs, on a device.
        ours, torch: the functions, which take these inputs.
        learned: the first N inputs get gradients if their dtype is floating; None: all inputs do.
    """

    name: str
    made: Callable[[torch.device], tuple[Any, ...]]
    ours: Callable[..., Any]
    torch: Callable[..., Any]
    learned: int | None = None


def randn(*sizes: int) -> Callable[[torch.device], Tensor]:
    dtype = lambda device: torch.bfloat16 if device.type == "cuda" else torch.float32  # noqa: E731
    return lambda device: torch.randn(*sizes, device=device, dtype=dtype(device))


def inputs(*made: Callable[[torch.device], Any]) -> Callable[[torch.device], tuple[Any, ...]]:
    return lambda device: tuple(each(device) for each in made)


def integers(below: int, *sizes: int) -> Callable[[torch.device], Tensor]:
    return lambda device: torch.randint(below, sizes, device=device)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.rms_norm(total, total.shape[-1:], weight), total


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


ROWS, WIDTH, CLASSES = 64, 256, 50_257
CASES = (
    Case(
        "layer_norm",
        inputs(randn(ROWS, WIDTH), randn(WIDTH), randn(WIDTH)),
        lambda x, w, b: kernels.layer_norm(x, (WIDTH,), w, b),
        lambda x, w, b: F.layer_norm(x, (WIDTH,), w, b),
    ),
    Case(
        "layer_norm_tokens",  # (batch, tokens, features), as transformers call it
        inputs(randn(2, ROWS // 2, WIDTH), randn(WIDTH), randn(WIDTH)),
        lambda x, w, b: kernels.layer_norm(x, (WIDTH,), w, b),
        lambda x, w, b: F.layer_norm(x, (WIDTH,), w, b),
    ),
    Case(
        "rms_norm",
        inputs(randn(ROWS, WIDTH), randn(WIDTH)),
        lambda x, w: kernels.rms_norm(x, (WIDTH,), w),
        lambda x, w: F.rms_norm(x, (WIDTH,), w),
    ),
    Case(
        "add_rms_norm",
        inputs(randn(ROWS, WIDTH), randn(ROWS, WIDTH), randn(WIDTH)),
        lambda x, r, w: kernels.add_rms_norm(x, r, (WIDTH,), w),
        add_rms_norm,
    ),
    Case("softmax", inputs(randn(ROWS, WIDTH)), kernels.softmax, lambda x: F.softmax(x, -1)),
    Case("cross_entropy", inputs(randn(ROWS, WIDTH), integers(WIDTH, ROWS)), kernels.cross_entropy, F.cross_entropy),
    Case("softmax_classes", inputs(randn(8, CLASSES)), kernels.softmax, lambda x: F.softmax(x, -1)),  # in CUDA C++
    Case("cross_entropy_classes", inputs(randn(8, CLASSES), integers(8, 8)), kernels.cross_entropy, F.cross_entropy),
    Case("sum", inputs(randn(ROWS, WIDTH)), lambda x: kernels.sum(x, -1), lambda x: x.sum(-1)),
    Case("sum_all", inputs(randn(1 << 20)), kernels.sum, torch.sum),
    Case("amax", inputs(randn(ROWS, WIDTH)), lambda x: kernels.amax(x, -1), lambda x: x.amax(-1)),
    Case("log_softmax", inputs(randn(ROWS, WIDTH)), kernels.log_softmax, lambda x: F.log_softmax(x, -1)),
    Case("embedding", inputs(integers(ROWS, ROWS), randn(ROWS, WIDTH)), kernels.embedding, F.embedding),
    Case("silu", inputs(randn(ROWS, WIDTH)), kernels.silu, F.silu),
    Case("swiglu", inputs(randn(ROWS, WIDTH), randn(ROWS, WIDTH)), kernels.swiglu, lambda g, u: F.silu(g) * u),
    Case(
        "linear_act",
        inputs(randn(ROWS, WIDTH), randn(WIDTH, WIDTH), randn(WIDTH)),
        lambda x, w, b: kernels.linear_act(x, w, b, "gelu"),
        lambda x, w, b: F.gelu(F.linear(x, w, b)),
    ),
    Case("rope", inputs(randn(1, 4, ROWS, 64), randn(ROWS, 32), randn(ROWS, 32)), kernels.rope, rope, 1),
    Case(
        "attention",
        inputs(randn(1, 4, ROWS, 64), randn(1, 4, ROWS, 64), randn(1, 4, ROWS, 64)),
        lambda q, k, v: kernels.attention(q, k, v, is_causal=True),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    ),
)
NAMES = [case.name for case in CASES]


def keep(saved: Tensor) -> Tensor:
    """A hook for saved tensors that changes nothing."""
    return saved


MODES: dict[str, tuple[bool, Callable[[], AbstractContextManager[Any]]]] = {  # whether backward follows
    "inference": (False, torch.no_grad),
    "inference_mode": (False, torch.inference_mode),
    "forward": (False, nullcontext),
    "both": (True, nullcontext),
    "hooked": (True, lambda: saved_tensors_hooks(keep, keep)),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h100/calls.json"))
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-compile", action="store_true", help="skip torch.compile, which takes seconds per case")
    parser.add_argument("--quick", action="store_true", help="run on the CPU, to test the script")
    options = parser.parse_args()
    if not options.quick and not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU; --quick tests the script on a CPU")
    device = torch.device("cpu" if options.quick else "cuda")
    rounds, compiled = (3, False) if options.quick else (options.rounds, not options.no_compile)
    if not options.quick:
        repeated_calls.build()
    results = Results(options.out, ceilings_of("h200") if options.quick else measure_ceilings("cuda"))
    for case in CASES:
        if case.name in options.only:
            for row in rows_of(case, device, rounds, compiled):
                results.add(row)
    return 0


def rows_of(case: Case, device: torch.device, rounds: int, compiled: bool) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    given = case.made(device)
    for each in given[: case.learned]:
        if each.is_floating_point():
            each.requires_grad_()
    check(case, given)
    variants = {"rooftop": case.ours, "torch": case.torch}
    if compiled:
        torch._dynamo.reset()  # torch.compile recompiles a function only a limited number of times per process
        variants |= {
            f"{name}, compiled": torch.compile(variants[name], fullgraph=True) for name in ("torch", "rooftop")
        }
    for mode, (backward, within) in MODES.items():
        timed = [name for name in variants if mode != "hooked" or "compiled" not in name]
        runs = {name: run_of(variants[name], given, backward) for name in timed}
        runs |= {name.replace("rooftop", "python"): in_python(runs[name]) for name in timed if "rooftop" in name}
        with within():
            taken = in_turn(runs, device, rounds)
            before = repeated_calls.calls_made()
            runs["rooftop"]()
            made = repeated_calls.calls_made() - before
        row: dict[str, Any] = {"case": case.name, "mode": mode, "unit": "us"}
        row |= {name: statistics.median(found) for name, found in taken.items()}
        row["by_torch"] = row["rooftop"] / row["torch"]
        row["made_in_cpp"] = made
        row["why"] = dict(repeated_calls.reasons)
        row["spread"] = {name: (max(each) - min(each)) / statistics.median(each) for name, each in taken.items()}
        if mode == "inference":
            with within(), repeated_calls.in_python():
                row["parts"] = parts(lambda: case.ours(*given), device, rounds, row["python"])
        yield row


def check(case: Case, given: tuple[Any, ...]) -> None:
    """Check before timing that Rooftop's function and torch's return the same result."""
    with torch.no_grad():
        for ours, theirs in zip(results_of(case.ours(*given)), results_of(case.torch(*given)), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05)


def results_of(made: Any) -> list[Tensor]:
    return list(made) if isinstance(made, tuple) else [made]


def run_of(function: Callable[..., Any], given: tuple[Any, ...], backward: bool) -> Run:
    if not backward:
        return lambda: function(*given)
    leaves = [each for each in given if isinstance(each, Tensor) and each.requires_grad]
    with torch.no_grad():
        slope = torch.ones_like(results_of(function(*given))[0])
    return lambda: torch.autograd.grad(results_of(function(*given))[0], leaves, slope, allow_unused=True)


def in_python(run: Run) -> Run:
    """The same call, made in Python. Each burst switches to Python once, so single calls do not pay for the switch."""

    def all_of_it() -> Any:
        return run()

    all_of_it.within = repeated_calls.in_python  # type: ignore[attr-defined]
    return all_of_it


def in_turn(runs: dict[str, Run], device: torch.device, rounds: int) -> dict[str, list[float]]:
    """The microseconds of each variant in each round."""
    for run in runs.values():
        for _ in range(5):  # compiles the call and records it for C++
            run()
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds):
        for name in sorted(runs, reverse=number % 2 == 1):
            taken[name].append(host_us(runs[name], device))
    return taken


def host_us(run: Run, device: torch.device) -> float:
    """The host's microseconds for one call, measured while the device's queue has room."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    with getattr(run, "within", nullcontext)():
        began = time.perf_counter()
        for _ in range(BURST):
            run()
        took = time.perf_counter() - began
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e6 * took / BURST


# ---- by part -----------------------------------------------------------------------------------------------------


class Calls(TorchDispatchMode):
    """Records the calls of Rooftop's operators within the block, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "rooftop":
            self.found.append((func, args))
        return func(*args, **(kwargs or {}))


def parts(run: Run, device: torch.device, rounds: int, whole: float) -> dict[str, float]:
    """The microseconds of each part of a call; empty if the call runs PyTorch's own function and no Rooftop
    operator."""
    with Calls() as calls:
        run()
    called = [(func, args) for func, args in calls.found if func._opname in operators._declared]
    if not called:
        return {}
    operations = [(operators._declared[func._opname], args) for func, args in called]
    fakes = [each.signature(*args).fake for each, args in operations if hasattr(each.signature, "fake")]
    runs: dict[str, Run] = {
        "called": lambda: [each.call(*args) for each, args in operations],
        "run": lambda: [each.run(*args) for each, args in operations],
        "dispatched": lambda: [func(*args) for func, args in called],
        "results": lambda: [fake() for fake in fakes],
    }
    found = {name: statistics.median(each) for name, each in in_turn(runs, device, rounds).items()}
    with without_launches():
        found["bare"] = statistics.median(in_turn({"bare": runs["run"]}, device, rounds)["bare"])
    launch = found["run"] - found["bare"]
    return {
        "checks": whole - found["called"],
        "way": found["called"] - found["run"],
        "choosing": found["bare"] - found["results"],
        "results": found["results"],
        "launch": launch,
        "dispatcher": found["dispatched"] - found["run"],
    }


@contextmanager
def without_launches() -> Iterator[None]:
    """Skip the launches of Triton kernels. Computation on the CPU still runs."""
    try:
        from triton.runtime.jit import JITFunction
    except ImportError:
        yield
        return
    with (
        patch.object(triton_launch, "start", lambda *arguments: None),
        patch.object(Compiled, "launch", lambda *arguments: None),
        patch.object(JITFunction, "run", lambda self, *arguments, **options: None),
    ):
        yield


if __name__ == "__main__":
    sys.exit(main())
