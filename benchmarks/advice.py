"""The gains that advice predicts, compared with the gains measured after following the advice, on this GPU.

    python benchmarks/advice.py [--out benchmarks/results/h200/advice.json]

Each case is analyzed. Then the program is changed as one item of the advice says, and both versions are timed
interleaved in this process. The gain compares the fastest steps, since other work on the host only lengthens steps. On
a shared host, steps get longer by a third or more if a step keeps the host nearly as busy as the GPU. The medians are
reported too.

`disturbance` says how much the host's speed changed. It is the larger of two ratios: between the program's step time
when analyzed and when timed, and between median and fastest step. A case disturbed by more than 10% is measured again,
at most twice, and the quietest attempt counts. The script exits with 1 if the gain of a CUDA graph differs from the
prediction by more than 25%, or that of bfloat16 or channels last by more than 30%. Cases that were disturbed each time
are marked and not judged.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from programs import Results, Step, gpt2_step, resnet_step
from torch import nn
from torch.utils.data import DataLoader, Dataset

import rooftop
from rooftop.hardware import Ceilings, compare, measure_ceilings
from rooftop.hardware.graphs import captured
from rooftop.hardware.timing import Timing, timing_of
from rooftop.kernels import layer_norm

SECONDS = 1.5
QUIET = 1.1
ATTEMPTS = 3
TOLERANCES = {"graph": 0.25, "bfloat16": 0.30, "channels last": 0.30}


@dataclass
class Case:
    """A program, a word from the advice's title, and the program changed as the advice says."""

    name: str
    build: Callable[[], Step]
    changes: dict[str, Callable[[Step], Callable[[], Any]]]


def in_graph(step: Step) -> Callable[[], Any]:
    replay = captured(step.run)

    def replayed(owner: Step = step) -> Any:  # keeps the model and its inputs, whose memory the graph uses
        return replay()

    return replayed


def in_bfloat16(step: Step) -> Callable[[], Any]:
    def run() -> Any:
        with torch.autocast(step.args[0].device.type, dtype=torch.bfloat16):
            out = step.model(*step.args, **step.kwargs)
            loss = step.loss(out) if step.training else out
        if step.training:
            loss.backward()
        return loss

    def whole() -> Any:
        if step.training:
            for parameter in step.model.parameters():
                parameter.grad = None
            return run()
        with torch.no_grad():
            return run()

    return whole


def channels_last(step: Step) -> Callable[[], Any]:
    model = step.model.to(memory_format=torch.channels_last)
    args = tuple(x.to(memory_format=torch.channels_last) for x in step.args)
    return Step(model, args, step.kwargs, step.training).run


def with_layer_norm(step: Step) -> Callable[[], Any]:
    for module in step.model.modules():
        if isinstance(module, nn.LayerNorm):
            module.forward = _layer_norm_of(module)  # type: ignore[method-assign]
    return step.run


def _layer_norm_of(module: nn.LayerNorm) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: layer_norm(x, module.normalized_shape, module.weight, module.bias, module.eps)


def cases(quick: bool) -> list[Case]:
    device = "cpu" if quick else "cuda"
    large, small, rows, tokens = (2, 2, 2, 16) if quick else (256, 64, 32, 512)
    size = 32 if quick else 224

    def resnet(batch: int, **kind: Any) -> Callable[[], Step]:
        return lambda: resnet_step(batch, device=device, size=size, **kind)

    def gpt2(batch: int, length: int = tokens, **kind: Any) -> Callable[[], Step]:
        return lambda: gpt2_step(batch, length, device=device, **kind)

    formats = {"bfloat16": in_bfloat16, "channels last": channels_last}
    half = {"dtype": torch.bfloat16}
    return [
        Case("ResNet-50 inference batch 1", resnet(1), {"graph": in_graph}),
        Case("GPT-2 inference batch 1, 64 tokens", gpt2(1, 64), {"graph": in_graph}),
        Case(f"ResNet-50 inference batch {large}", resnet(large), formats),
        Case(f"ResNet-50 training batch {small}", resnet(small, train=True), formats),
        Case(f"ResNet-50 inference batch {large} bfloat16", resnet(large, **half), {"channels last": channels_last}),
        Case(
            f"ResNet-50 training batch {small} bfloat16",
            resnet(small, train=True, **half),
            {"channels last": channels_last},
        ),
        *(  # with the smaller batch the host would soon be slower than the GPU
            Case(
                f"ResNet-50 training batch {batch} channels last",
                resnet(batch, train=True, channels_last=True),
                {"bfloat16": in_bfloat16},
            )
            for batch in (small, large)
        ),
        Case(f"GPT-2 inference batch 8, {tokens} tokens", gpt2(8), {"bfloat16": in_bfloat16}),
        Case(f"GPT-2 training batch 8, {tokens} tokens", gpt2(8, train=True), {"bfloat16": in_bfloat16}),
        Case(
            f"GPT-2 training batch {rows}, {tokens} tokens, bfloat16",
            gpt2(rows, train=True, **half),
            {"layer_norm": with_layer_norm},
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200/advice.json"))
    parser.add_argument("--quick", action="store_true", help="tiny programs on the CPU, to test the script")
    parser.add_argument(
        "--only",
        default=[""],
        nargs="+",
        metavar="TEXT",
        help="only cases whose names contain one of these; the file keeps its other rows",
    )
    options = parser.parse_args()
    device = "cpu" if options.quick else "cuda"
    ceilings = measure_ceilings(device)
    results, rows = Results(options.out, ceilings), []
    if options.only != [""] and options.out.exists():
        kept = json.loads(options.out.read_text())["results"]
        results.rows = [row for row in kept if not any(text in row["case"] for text in options.only)]
    for case in (each for each in cases(options.quick) if any(text in each.name for text in options.only)):
        for row in verified(case, ceilings, device):
            results.add(row)
            rows.append(row)
        if device == "cuda":
            torch.cuda.empty_cache()
    for host_case in (waiting, unpinned, loading) if "" in options.only else ():
        results.add(host_case(ceilings, device))
    missed = [row for row in rows if abs(row["predicted_ms"] / row["real_ms"] - 1) > TOLERANCES.get(row["advice"], 9)]
    for row in missed:
        verdict = "FAILED" if row["disturbance"] <= QUIET else "DISTURBED"
        print(
            verdict, row["case"], row["advice"], f"{row['predicted_ms']:.2f} promised, {row['real_ms']:.2f} ms gained"
        )
    return 1 if any(row["disturbance"] <= QUIET for row in missed) else 0


def verified(case: Case, ceilings: Ceilings, device: str) -> list[dict[str, Any]]:
    """A row for each change, taken from the attempt in which the host was quietest."""
    quietest: dict[str, dict[str, Any]] = {}
    for _ in range(ATTEMPTS if device == "cuda" else 1):
        for row in measured(case, ceilings, device):
            before = quietest.setdefault(row["advice"], row)
            if row["disturbance"] < before["disturbance"]:
                quietest[row["advice"]] = row
        if all(row["disturbance"] <= QUIET for row in quietest.values()):
            break
    return list(quietest.values())


def measured(case: Case, ceilings: Ceilings, device: str) -> list[dict[str, Any]]:
    """The gains that the report predicted, and the real gain of each change."""
    step = case.build()
    began = time.perf_counter()
    report = rooftop.analyze(step.model, *step.args, ceilings=ceilings, **step.kwargs, **step.training)
    seconds = time.perf_counter() - began
    rows = []
    for word, change in case.changes.items():
        if device == "cpu" and word in ("graph", "layer_norm"):
            continue
        plain, changed = case.build(), change(case.build())
        row = row_of(case.name, word, report, *compared(plain.run, changed, device))
        rows.append({**row, "analysis_s": seconds, "busy_ms": report.summary.busy_ms})
    return rows


def compared(as_is: Callable[[], Any], changed: Callable[[], Any], device: str) -> tuple[Timing, Timing]:
    """Time both programs, interleaved, long enough that some steps of each are undisturbed even on a shared host."""
    times = compare({"as is": as_is, "changed": changed}, device=device, seconds=SECONDS if device == "cuda" else 0.1)
    return times["as is"], times["changed"]


def row_of(
    name: str, word: str, report: rooftop.Report, as_is: Timing, changed: Timing, steps: int = 1
) -> dict[str, Any]:
    """The first advice whose title has the word, and the measured gain. One call of `changed` runs `steps` steps."""
    promised = [item for item in report.advice if word.lower() in item.title.lower()]
    return {
        "case": name,
        "advice": word,
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "predicted_ms": promised[0].gain_ms if promised else 0.0,
        "real_ms": as_is.best_ms - changed.best_ms / steps,
        "wall_ms": report.summary.wall_ms,
        "as_is_ms": as_is.best_ms,
        "changed_ms": changed.best_ms / steps,
        "median_as_is_ms": as_is.median_ms,
        "median_changed_ms": changed.median_ms / steps,
        "disturbance": disturbance(report.summary.wall_ms, as_is, changed),
        "evidence": promised[0].evidence if promised else "",
    }


def disturbance(analyzed_ms: float, as_is: Timing, changed: Timing) -> float:
    apart = max(analyzed_ms / as_is.best_ms, as_is.best_ms / analyzed_ms)
    return max(apart, as_is.median_ms / as_is.best_ms, changed.median_ms / changed.best_ms)


class Waiting:
    """A chain of small matrix products. With `asks`, the host waits for a value after every fourth product."""

    def __init__(self, device: str, asks: bool) -> None:
        self.weight = torch.randn(1024, 1024, device=device) / 1024**0.5
        self.asks = asks

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        for index in range(120):
            x = x @ self.weight
            if index % 4 == 3 and self.asks and not x[0, 0].item() < float("inf"):
                raise ValueError("diverged")
        return x


def waiting(ceilings: Ceilings, device: str) -> dict[str, Any]:
    """A step with calls of `.item()`."""
    x = torch.randn(64 if device == "cpu" else 1024, 1024, device=device)
    report = rooftop.analyze(Waiting(device, asks=True), x, ceilings=ceilings)
    asking, silent = Waiting(device, asks=True), Waiting(device, asks=False)
    times = compared(lambda: asking(x), lambda: silent(x), device)
    return row_of("120 products, thirty .item()", "wait", report, *times)


def unpinned(ceilings: Ceilings, device: str) -> dict[str, Any]:
    """A batch of images copied to the GPU from memory that is not pinned."""
    images = torch.randn(2 if device == "cpu" else 256, 3, 224, 224)
    pinned = images.pin_memory() if device == "cuda" else images

    def step(x: torch.Tensor) -> torch.Tensor:
        return x.to(device, non_blocking=True).mul_(2).sum()

    weight = torch.ones(1, device=device)  # so that analyze knows on which device the step runs
    report = rooftop.analyze(lambda x, weight: step(x) * weight, images, weight, ceilings=ceilings)
    times = compared(lambda: step(images), lambda: step(pinned), device)
    return row_of("256 images to the GPU", "pin", report, *times)


class SlowImages(Dataset[torch.Tensor]):
    """Images whose decoding takes the host 2 ms each."""

    def __len__(self) -> int:
        return 16 * 40

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.002)
        return torch.full((3, 224, 224), float(index))


def loading(ceilings: Ceilings, device: str) -> dict[str, Any]:
    """A training loop that waits for its data loader."""
    step = resnet_step(16, train=True, device=device, size=64 if device == "cpu" else 224)
    labels = torch.randint(1000, (16,), device=device)

    def epoch(workers: int, recording: Any) -> Timing:
        loader = DataLoader(SlowImages(), batch_size=16, num_workers=workers, persistent_workers=workers > 0)
        durations, began = [], time.perf_counter()
        for images in loader:
            loss = nn.functional.cross_entropy(step.model(images.to(device)), labels)
            loss.backward()
            if device == "cuda":
                torch.cuda.synchronize()
            durations.append(1e3 * (time.perf_counter() - began))
            began = time.perf_counter()
            if recording is not None:
                recording.step()
        return timing_of(durations[5:])

    with rooftop.recording(step.model, ceilings=ceilings) as recording:
        epoch(0, recording)
    return row_of("a loop over slow images", "load data", recording.report, epoch(0, None), epoch(4, None))


if __name__ == "__main__":
    sys.exit(main())
