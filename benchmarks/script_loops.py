"""Check that `rooftop analyze SCRIPT` reports a loop's step time as the loop's own clock does, and does not change the
loop.

    python benchmarks/script_loops.py [--quick] [--out benchmarks/results/h200/script_loops.json] [--only NAME ...]

Each loop of `benchmarks/loops/` runs plainly, under `rooftop analyze`, and plainly again. The table has the step time
by the loop's own clock in both plain runs (from the third step on), the step time in the report, and their ratio. The
table also has the ratio of the reported time to the loop's own clock in the analyzed run, after the watched steps. The
table says whether losses, exit status and the loop's output are the same in all runs. If the two plain runs differ by
more than half of the tolerance, the machine's speed varied, and only the clock of the analyzed run counts. If other
processes do a loop's work, the loop itself has no steps, and the table says whether the report names these processes.
`--quick` runs small sizes on the CPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

from loops.loop_clock import MARK

from rooftop.hardware import devices, measure_ceilings
from rooftop.whole_files import write_json

LOOPS = Path(__file__).with_name("loops")
TOLERANCE = {"cpu": 0.20, "cuda": 0.10}
TIMEOUT_S = 600


@dataclass(frozen=True)
class Loop:
    """A script of `loops/`: the packages it needs, its number of ranks, its exit status, and whether other processes do
    its work."""

    name: str
    needs: tuple[str, ...] = ()
    ranks: int = 1
    status: int = 0
    elsewhere: bool = False
    arguments: tuple[str, ...] = ()


CASES = (
    Loop("mnist_cnn", ("sklearn",)),
    Loop("gpt_accumulation"),
    Loop("lightning_trainer", ("lightning", "sklearn")),
    Loop("transformers_trainer", ("transformers", "accelerate")),
    Loop("accelerate_loop", ("accelerate",)),
    Loop("gan_two_optimizers"),
    Loop("lbfgs_closure"),
    Loop("inference_only"),
    Loop("ddp_torchrun", ranks=2),
    Loop("grad_scaler"),
    Loop("image_reference"),
    Loop("compiled"),
    Loop("weights_by_hand", status=3),
    Loop("hogwild", elsewhere=True),
    Loop("hogwild", elsewhere=True, arguments=("--start", "fork")),
)


@dataclass
class Result:
    """The results of a loop. `own_ms` is the step time by its own clock in the plain runs. `late_ms` is the time of the
    steps after the first 12 in all three runs, of which the second is analyzed. `varied` means that the plain runs
    differ too much to judge the report by them."""

    loop: str
    own_ms: list[float] = field(default_factory=list)
    late_ms: list[float] = field(default_factory=list)
    reported_ms: float | None = None
    ratio: float | None = None
    ratio_same_run: float | None = None
    varied: bool = False
    percent_of_roof: float | None = None
    statuses: list[int] = field(default_factory=list)
    same_losses: bool | None = None
    same_status: bool = False
    same_output: bool | None = None
    ranks: dict[str, Any] | None = None
    names_others: bool | None = None
    longer_by_s: float = 0.0
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Ended:
    """A process that ended: its exit status, seconds, output, and the values in its LOOP line."""

    status: int
    seconds: float
    printed: str
    said: dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="small sizes on the CPU, to test the script")
    parser.add_argument("--only", nargs="*", default=[], help="these loops")
    options = parser.parse_args()
    device = "cpu" if options.quick else "cuda"
    out = options.out or Path(__file__).parent / "results" / ("cpu" if options.quick else "h200") / "script_loops.json"
    if device == "cpu":
        os.environ["OMP_NUM_THREADS"] = "1"  # on a busy machine, two threads would wait for each other
    described = next(found for found in devices() if found.kind == device)
    ceilings = measured_ceilings(device)
    results, left_out = [], []
    for loop in CASES:
        if options.only and loop.name not in options.only:
            continue
        missing = [module for module in loop.needs if importlib.util.find_spec(module) is None]
        if missing:
            left_out.append(f"{loop.name}: {', '.join(missing)} is not installed")
            print(f"{loop.name:24} left out: {', '.join(missing)} is not installed", flush=True)
            continue
        result = tried(loop, device, ceilings)
        results.append(result)
        print(line(result), flush=True)
        plain = {
            "device": described.name,
            "versions": {"torch": version("torch"), "python": sys.version.split()[0]},
            "tolerance": TOLERANCE[device],
            "left_out": left_out,
            "results": [asdict(result) for result in results],
        }
        write_json(out, plain)
    return 1 if any(result.problems for result in results) else 0


def measured_ceilings(device: str) -> Path:
    """A file with the ceilings, which are measured once for all loops."""
    path = Path(tempfile.mkdtemp()) / "ceilings.json"
    measure_ceilings(device).save(path)
    return path


def tried(loop: Loop, device: str, ceilings: Path) -> Result:
    """Run the loop plainly, under `rooftop analyze`, and plainly again."""
    result = Result(" ".join([loop.name, *loop.arguments]))
    with tempfile.TemporaryDirectory() as folder:
        report_path = Path(folder) / "report.json"
        before = ended(loop, device)
        # the script prints to the same pipe as the report's table, which comes after its output
        options = ["--no-html", "--json", str(report_path), "--ceilings", str(ceilings), "--device", device]
        analyzed = ended(loop, device, options)
        after = ended(loop, device)
        report = json.loads(report_path.read_text()) if report_path.exists() else None
    result.longer_by_s = round(analyzed.seconds - fmean([before.seconds, after.seconds]), 1)
    result.statuses = [before.status, analyzed.status, after.status]
    result.same_status = before.status == analyzed.status == loop.status
    plain, again, watched = (printed_by_loop(each.printed) for each in (before, after, analyzed))
    result.same_output = plain == watched[: len(plain)]
    if not result.same_output and plain != again:
        result.same_output = None  # unknown, since even the two plain runs differ
    if before.said.get("losses"):
        result.same_losses = before.said["losses"] == analyzed.said.get("losses")
        if not result.same_losses and before.said["losses"] != after.said["losses"]:
            result.same_losses = None  # unknown, since even the two plain runs differ
    if report is None:
        result.problems.append("there is no report")
        return result
    result.own_ms = [run.said["step_ms"] for run in (before, after) if "step_ms" in run.said]
    result.late_ms = [run.said["late_ms"] for run in (before, analyzed, after) if run.said.get("late_ms")]
    result.notes = report["notes"]
    result.percent_of_roof = report["summary"]["percent_of_roof"]
    result.reported_ms = report["summary"]["wall_ms"]
    result.ranks = report["ranks"]
    if loop.elsewhere:
        result.names_others = any("processes of multiprocessing" in note for note in report["notes"])
    else:
        result.ratio = result.reported_ms / fmean(result.own_ms)
        plain_late_ms = [run.said["late_ms"] for run in (before, after) if run.said.get("late_ms")]
        result.varied = any(apart(ms) > TOLERANCE[device] / 2 for ms in (result.own_ms, plain_late_ms))
        if analyzed.said.get("late_ms"):
            result.ratio_same_run = result.reported_ms / analyzed.said["late_ms"]
    result.problems += problems(loop, result, device)
    return result


def apart(times_ms: list[float]) -> float:
    """(longest - shortest) / shortest; 0 without times."""
    return max(times_ms) / min(times_ms) - 1 if times_ms else 0.0


def problems(loop: Loop, result: Result, device: str) -> list[str]:
    """A message for each difference that should not exist."""
    found = []
    if not result.same_status:
        found.append("another exit status")
    if result.same_losses is False:
        found.append("other losses")
    if result.ratio is not None and abs(result.ratio - 1) > TOLERANCE[device] and not result.varied:
        found.append(f"the reported step is {result.ratio:.2f} times the loop's own step time in the plain runs")
    if result.ratio_same_run is not None and abs(result.ratio_same_run - 1) > TOLERANCE[device]:
        found.append(f"the reported step is {result.ratio_same_run:.2f} times the loop's own step time in the same run")
    if loop.elsewhere and not result.names_others:
        found.append("the report does not name the other processes")
    if loop.ranks > 1 and (result.ranks is None or len(result.ranks["rows"]) != loop.ranks):
        found.append("the report does not have all ranks")
    return found


def ended(loop: Loop, device: str, analysis: list[str] | None = None) -> Ended:
    """Run a loop to its end. `analysis`: options of `rooftop analyze`, under which the loop then runs."""
    script = str(LOOPS / f"{loop.name}.py")
    words = ["--device", device, *loop.arguments]
    command = [sys.executable]
    if loop.ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(loop.ranks)]
    if analysis is None:
        command += [script, *words]
    else:
        command += ["-m", "rooftop", "analyze", script, *analysis, "--", *words]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    seconds = time.perf_counter() - began
    if MARK not in done.stdout:
        print(done.stdout[-2000:], done.stderr[-4000:], file=sys.stderr)
    said = re.findall(rf"^{MARK}(.*)$", done.stdout, re.MULTILINE)
    return Ended(done.returncode, seconds, done.stdout, json.loads(said[-1]) if said else {})


def printed_by_loop(text: str) -> list[str]:
    """The lines that the loop printed, with times removed."""
    return [each for each in text.splitlines() if not each.startswith((MARK, "{'train_runtime'"))]


def line(result: Result) -> str:
    own = " ".join(f"{ms:8.2f}" for ms in result.own_ms) or f"{'-':>8}"
    reported = (
        f"{result.reported_ms:8.2f}" if result.reported_ms is not None and result.ratio is not None else f"{'-':>8}"
    )
    ratio, same_run = (f"{r:5.2f}" if r is not None else "    -" for r in (result.ratio, result.ratio_same_run))
    varied = " (the machine varied)" if result.varied else ""
    answers = {True: "same", False: "OTHER", None: "-"}
    return (
        f"{result.loop:24} own {own} ms  reported {reported} ms  ratio {ratio}{varied}, same run {same_run}"
        f"  losses {answers[result.same_losses]:5}"
        f" status {answers[result.same_status]:5} output {answers[result.same_output]:5} +{result.longer_by_s:.1f} s"
        + (f"  {'; '.join(result.problems)}" if result.problems else "")
    )


if __name__ == "__main__":
    sys.exit(main())
