"""A network of convolution and attention, compared with a ResNet and a Swin transformer trained for the same time.

    python benchmarks/hybrids.py [--data digits] [--seconds 60] [--repeats 3] [--out FILE]
    python benchmarks/hybrids.py --data photographs/ --models resnet50 hybrid_s swin_t --seconds 600 --compile

Each network uses its task's recipe. A trial of `--trial` steps measures the time of a step after a warm-up. The run
then has as many steps as fit into `--seconds`, so the learning rate schedule ends when the time ends. For each seed,
the networks run in turn. The time of evaluation does not count.

    metric     accuracy on the held-out images after the last step: mean and standard deviation over seeds
    steps      of a run;  ms: of a step;  millions: of parameters
    paired     the hybrid's accuracy minus the parent's with the same seed: mean and standard error

`--quick` tests the script.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from programs import Results

from rooftop.hardware import ceilings_of, measure_ceilings
from rooftop.train.fitting import fit
from rooftop.train.fitting.records import EvaluationRecord, Facts, Fitted, StepRecord
from rooftop.train.recipes import Recipe
from rooftop.train.tasks import Task, find_task

MODELS = ("resnet", "hybrid", "swin")
CHILD = "hybrid"
WARM_UP = 5  # the first steps of a trial, which are not timed


class Clock:
    """Records when a run reported each step."""

    def __init__(self) -> None:
        self.times: list[tuple[int, float]] = []

    def began(self, facts: Facts, task: Task) -> None: ...

    def stepped(self, records: list[StepRecord]) -> None:
        self.times.append((records[-1].step, time.perf_counter()))

    def evaluated(self, record: EvaluationRecord) -> None: ...

    def noted(self, note: str) -> None: ...

    def ended(self, fitted: Fitted, model: Any) -> None: ...

    @property
    def step_s(self) -> float:
        """Mean seconds of a step after the warm-up."""
        (first, began), (last, ended) = next(each for each in self.times if each[0] >= WARM_UP), self.times[-1]
        return (ended - began) / (last - first)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits")
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="tasks or models to train")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--trial", type=int, default=40, help="number of steps in the trial that measures a step's time"
    )
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/hybrids.json"))
    parser.add_argument("--quick", action="store_true", help="test the script")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() and not options.quick else "cpu"
    if options.quick:
        options.seconds, options.repeats, options.trial = 0.2, 2, WARM_UP + 3
    ceilings = ceilings_of("h200") if options.quick else measure_ceilings(device)
    results = Results(options.out, ceilings)
    steps, step_ms = {}, {}
    for name in options.models:
        step_s = timed(name, options, device)
        steps[name], step_ms[name] = max(1, int(options.seconds / step_s)), 1e3 * step_s
    reached: dict[str, list[float]] = {name: [] for name in options.models}
    for seed in range(options.repeats):
        for name in options.models:
            task, recipe = built(name, options, device, steps[name], seed)
            fitted = fit(task, recipe, device=device)
            assert fitted.last is not None
            reached[name].append(fitted.last.values["accuracy"])
    child = next((name for name in options.models if name.startswith(CHILD)), None)
    for name, found in reached.items():
        task, _ = built(name, options, device, 1, 0)
        row = {"model": name, "data": options.data, "seconds": options.seconds, "steps": steps[name]}
        row |= {"ms": step_ms[name], "millions": sum(each.numel() for each in task.model.parameters()) / 1e6}
        row |= {"accuracy": statistics.mean(found), "deviation": deviation(found), "seeds": found}
        if child is not None and name != child:
            apart = [mine - theirs for mine, theirs in zip(reached[child], found, strict=True)]
            row |= {"paired": statistics.mean(apart), "paired_error": deviation(apart) / math.sqrt(len(apart))}
        results.add(row)
    return 0


def built(name: str, options: argparse.Namespace, device: str, steps: int, seed: int) -> tuple[Task, Recipe]:
    data = None if options.data == "digits" else options.data
    build, defaults = find_task(name, data, device)
    run = {"steps": steps, "seed": seed, "compile": options.compile}
    recipe = Recipe.of(defaults).updated({"run": run, "evaluation": {"every": 1e6}})
    torch.manual_seed(seed)
    return build(data, recipe), recipe


def timed(name: str, options: argparse.Namespace, device: str) -> float:
    """Seconds of a step."""
    task, recipe = built(name, options, device, options.trial, 0)
    task.valid, clock = None, Clock()
    fit(task, recipe, device=device, observers=[clock], interval=1 if device == "cpu" else WARM_UP)
    return clock.step_s


def deviation(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


if __name__ == "__main__":
    raise SystemExit(main())
