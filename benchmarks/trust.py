"""Check the reports of `rooftop analyze`: analyze public models in fresh processes, and compare with a plain timing.

    python benchmarks/trust.py [--out benchmarks/results/h200/trust.json] [--processes 5] [--more] [--only TEXT ...]
    python benchmarks/trust.py --advice [--out benchmarks/results/h200/trust_advice.json]

The plain timing shares no code with Rooftop. It has three parts. "Steady" times ten steps between two events, repeated
without a synchronization. "Latency" times single steps from an idle GPU by the host's clock. "Busy" is the union of the
kernels of some steps in PyTorch's profiler. All three are measured before and after each analysis, in the same process.
The steady time is also measured between the phases of the analysis. For steady and latency, the lowest tenth of the
times counts, because other work on a shared host only adds to them, for seconds at a time.

`--advice` applies the first three items of advice that a script can apply. In the same process, it times the program
with each item, in turn with the original program. If the original has become more than 3% slower or faster than in the
report, the host's speed has changed, and the gain is counted separately.

The script exits with 1 if a case misses one of these limits. The wall time must be within 3% of steady, and the latency
within 5%. The launch gap must equal steady minus busy within 0.3 ms or 3% of the wall time. The percent of roof must
agree within 3% between processes. No row may be above 102% of its roof. If the plain timings of different moments
differ by more than these limits, the host's speed changed. Such a run cannot judge a time, and counts as `varied`. Its
report must be marked as disturbed, or its time must lie between the two plain timings.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from trust_models import CASES, Case, Workload

from rooftop.whole_files import write_json

TOLERANCES = {"wall": 0.03, "latency": 0.05, "gap": 0.03, "percent": 0.03}
LEAST_GAP_MS = 0.3
MOST_PERCENT = 102.0
ADVICE_TOLERANCE = 0.30


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200/trust.json"))
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument(
        "--only", default=[""], nargs="+", metavar="TEXT", help="run only cases whose names contain one of these"
    )
    parser.add_argument(
        "--more", action="store_true", help="add the results of these processes to the results in --out"
    )
    parser.add_argument(
        "--advice", action="store_true", help="apply the reports' advice, and time the changed programs"
    )
    parser.add_argument("--quick", action="store_true", help="small models on the CPU, to test the script")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    cases = [case for case in CASES if any(text in case.name for text in options.only)]
    device = "cpu" if options.quick else "cuda"
    if options.worker:
        worker(cases, device, options.out, options.advice)
        return 0
    runs = earlier_processes(options.out) if options.more else []
    rows: Any = []
    for _ in range(1 if options.advice else options.processes):
        runs.append(fresh_process(options))
        if runs[-1]["environment"]["device"] != runs[0]["environment"]["device"]:
            raise RuntimeError(f"{options.out} has results of another device: give another --out.")
        names = list(runs[0]["rows"])
        rows = (
            runs[0]["rows"]
            if options.advice
            else [merged(name, [run["rows"][name] for run in runs if name in run["rows"]]) for name in names]
        )
        measured_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        result = {"environment": runs[0]["environment"], "measured_at": measured_at, "results": rows}
        # written after each process, so that a failing process loses no other results
        write_json(options.out, result)
    print(advice_table(rows) if options.advice else table(rows))
    missed = [] if options.advice else [problem for row in rows for problem in problems(row)]
    for problem in missed:
        print("MISSED", problem)
    return 1 if missed else 0


def earlier_processes(path: Path) -> list[dict[str, Any]]:
    """Read the results of each process from a file."""
    found = json.loads(path.read_text())
    count = max(len(row["runs"]) for row in found["results"])
    return [
        {
            "environment": found["environment"],
            "rows": {r["case"]: r["runs"][i] for r in found["results"] if r["runs"][i:]},
        }
        for i in range(count)
    ]


def fresh_process(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all cases in a separate process."""
    out = options.out.with_suffix(".running.json")  # written after each case, since this process may be killed
    out.parent.mkdir(parents=True, exist_ok=True)
    out.unlink(missing_ok=True)
    flags = [flag for flag in ("--advice", "--quick") if getattr(options, flag[2:])]
    words = [sys.executable, __file__, "--worker", "--out", str(out), *flags, "--only", *options.only]
    status = subprocess.run(words, check=False).returncode
    if not out.exists():
        raise RuntimeError(f"A process ended with status {status} before its first case: see its output.")
    found: dict[str, Any] = json.loads(out.read_text())
    out.unlink()
    return found


def worker(cases: list[Case], device: str, out: Path, follow: bool) -> None:
    from rooftop.hardware import measure_ceilings

    began = time.perf_counter()
    ceilings = measure_ceilings(device)
    environment = {
        "device": ceilings.device,
        "versions": dict(ceilings.versions),
        "ceilings_s": time.perf_counter() - began,
        "ceilings": ceilings.to_dict(),
    }
    rows: dict[str, Any] = {}
    for case in cases:
        torch.manual_seed(0)
        began = time.perf_counter()
        try:
            rows[case.name] = followed(case, device) if follow else trusted(case.build(device), device)
        except Exception as error:
            rows[case.name] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        print(f"{case.name} in {time.perf_counter() - began:.1f} s", brief(rows[case.name]), flush=True)
        if device == "cuda":
            torch.cuda.empty_cache()
        out.write_text(json.dumps({"environment": environment, "rows": rows}))


def brief(row: dict[str, Any]) -> str:
    """One process's measurements of a case, in one line."""
    names = (
        "wall_ms",
        "wall_interval_ms",
        "latency_ms",
        "busy_ms",
        "percent_of_roof",
        "analysis_s",
        "kernels",
        "phases_s",
    )
    text = {name: row[name] for name in names if name in row}
    plain = [f"{p['steady_ms']:.2f} ({p['median_ms']:.2f}), {p['latency_ms']:.2f}" for p in row.get("plain", [])]
    above = [f"{a['name']} {a['percent']:.0f}%" for a in row.get("above", [])[:3]]
    followed = [
        f"{f['title'][:24]} {f['named_ms']:.2f} {f['gained_ms']} {f['why_not'][:80]}" for f in row.get("followed", [])
    ]
    return f"plain {plain} {text} {above} {followed} {row.get('error', '')}"


def trusted(work: Workload, device: str) -> dict[str, Any]:
    """Analyze a case, and time it plainly."""
    import rooftop

    before = plainly(work.run, device)
    began, aside_s = time.perf_counter(), 0.0
    phases, between = dict[str, float](), list[float]()

    def progress(what: str, done: float) -> None:
        nonlocal aside_s
        if what in phases:
            return
        asked = time.perf_counter()
        phases[what] = round(asked - began - aside_s, 2)
        if what in ("profiling", "timing the step again"):
            between.append(_lower_tenth(steady_times(work.run, device, 0.1, 0.3)))
            aside_s += time.perf_counter() - asked

    report = rooftop.analyze(work.model, *work.args, **work.kwargs, **work.analyzed(), progress=progress)
    seconds = time.perf_counter() - began - aside_s
    after = plainly(work.run, device)
    summary = report.summary
    above = [
        {"name": r.name, "phase": r.phase, "shapes": r.shapes, "dtype": r.dtype, "percent": r.percent_of_roof}
        | {"bound": r.bound, "calls": r.calls, "us": 1e3 * r.measured_ms / r.calls, "bytes": r.bytes // r.calls}
        for r in report.ops
        if (r.percent_of_roof or 0.0) > 100.0
    ]
    return {
        "plain": [asdict(before), asdict(after)],
        "steady_ms": [before.steady_ms, *between, after.steady_ms],
        "wall_ms": summary.wall_ms,
        "wall_interval_ms": [summary.wall_low_ms, summary.wall_high_ms],
        "latency_ms": summary.latency_ms,
        "busy_ms": summary.busy_ms,
        "launch_gap_ms": report.gaps.launch_gap_ms,
        "percent_of_roof": summary.percent_of_roof,
        "disturbed": summary.disturbed,
        "kernels": summary.kernels,
        "operators": sum(row.calls for row in report.ops),
        "coverage": report.coverage,
        "analysis_s": seconds,
        "phases_s": phases,
        "above": sorted(above, key=lambda r: -r["percent"])[:8],
        "advice": [[item.title, item.gain_ms] for item in report.advice],
        "notes": list(report.notes),
    }


# ---- the plain timing, which shares nothing with Rooftop ------------------------------------------------------------


@dataclass
class Plainly:
    """Times of a step in ms (see the top of this file)."""

    steady_ms: float
    latency_ms: float
    busy_ms: float
    median_ms: float  # median time of a step, over the series of ten


def plainly(step: Callable[[], Any], device: str) -> Plainly:
    steady = steady_times(step, device)
    alone = []
    synchronize(device)
    time.sleep(0.5)  # a GPU that has just run at its power limit is not idle at once
    for _ in range(10):
        synchronize(device)
        began = time.perf_counter()
        step()
        synchronize(device)
        alone.append(1e3 * (time.perf_counter() - began))
    busy_ms = _busy_ms(step) if device == "cuda" else 0.0
    return Plainly(_lower_tenth(steady), _lower_tenth(alone), busy_ms, statistics.median(steady))


def steady_times(step: Callable[[], Any], device: str, lead_s: float = 0.2, seconds: float = 0.6) -> list[float]:
    """Time steps for about this many seconds. Each time is the mean of ten steps in a row (on a CPU, of one step)."""
    for _ in range(3):
        step()
    if device == "cpu":
        times = []
        for _ in range(7):
            began = time.perf_counter()
            step()
            times.append(1e3 * (time.perf_counter() - began))
        return times
    synchronize(device)
    began = time.perf_counter()
    step()
    torch.cuda.synchronize()
    rough_s = time.perf_counter() - began
    for _ in range(max(3, int(lead_s / rough_s))):
        step()
    tens = []
    for _ in range(max(2, min(20, int(seconds / (10 * rough_s))))):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(10):
            step()
        end.record()
        tens.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 10 for start, end in tens]


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _lower_tenth(times: list[float]) -> float:
    return sorted(times)[(len(times) - 1) // 10]


def _busy_ms(step: Callable[[], Any], steps: int = 5, lead_s: float = 0.3) -> float:
    """Busy time of the last steps of a series, since a power limit lowers the clocks only after the first steps."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        lead, began = 0, time.perf_counter()
        while time.perf_counter() - began < lead_s:
            step()
            lead += 1
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    _detach_profiler()
    spans = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in profiler.profiler.kineto_results.events()
        if "CUDA" in str(event.device_type())
    )
    spans = spans[round(len(spans) * lead / (lead + steps)) :]
    busy_ns = reached = 0
    for start, end in spans:
        busy_ns += max(0, end - max(start, reached))
        reached = max(reached, end)
    return busy_ns / 1e6 / steps


def _detach_profiler() -> None:
    """Detach CUPTI, which PyTorch's profiler leaves attached, and which would slow down host-bound steps."""
    with open("/proc/self/maps") as maps:
        path = next((line.split()[-1] for line in maps if "libcupti.so" in line), None)
    if path is not None:
        ctypes.CDLL(path).cuptiFinalize()


# ---- several processes together -------------------------------------------------------------------------------------


def merged(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    failed = [row["error"] for row in rows if "error" in row]
    if failed:
        return {"case": name, "error": failed[0]}
    steady = [min(row["steady_ms"]) for row in rows]
    alone = [min(p["latency_ms"] for p in row["plain"]) for row in rows]
    busy = [statistics.fmean(p["busy_ms"] for p in row["plain"]) for row in rows]
    varied = [apart(row["steady_ms"]) > TOLERANCES["wall"] for row in rows]
    latency_varied = [
        v or apart(p["latency_ms"] for p in row["plain"]) > TOLERANCES["latency"]
        for row, v in zip(rows, varied, strict=True)
    ]
    percents = [row["percent_of_roof"] for row, v in zip(rows, varied, strict=True) if not (v or row["disturbed"])]
    return {
        "case": name,
        "steady_ms": steady,
        "wall_ms": [row["wall_ms"] for row in rows],
        "wall_off": [row["wall_ms"] / ms - 1 for row, ms in zip(rows, steady, strict=True)],
        "latency_off": [(row["latency_ms"] or row["wall_ms"]) / ms - 1 for row, ms in zip(rows, alone, strict=True)],
        "gap_ms": [row["launch_gap_ms"] for row in rows],
        "gap_off_ms": [r["launch_gap_ms"] - (s - b) for r, s, b in zip(rows, steady, busy, strict=True)],
        "busy_ms": [row["busy_ms"] for row in rows],
        "varied": varied,
        "latency_varied": latency_varied,
        "percent_of_roof": [row["percent_of_roof"] for row in rows],
        "percent_apart": apart(percents),
        "most_above": max((a["percent"] for row in rows for a in row["above"]), default=100.0),
        "above": [a for row in rows for a in row["above"]][:12],
        "analysis_s": [row["analysis_s"] for row in rows],
        "disturbed": [row["disturbed"] for row in rows],
        "runs": rows,
    }


def apart(values: Iterable[float]) -> float:
    """(largest - smallest) / smallest."""
    found = list(values)
    return max(found) / min(found) - 1 if found else 0.0


def judged(row: dict[str, Any], what: str) -> list[float]:
    """Drop the values of runs in which the host's speed changed."""
    otherwise = row["latency_varied" if what == "latency_off" else "varied"]
    return [value for value, varied in zip(row[what], otherwise, strict=True) if not varied]


def problems(row: dict[str, Any]) -> Iterator[str]:
    name = row["case"]
    if "error" in row:
        yield f"{name}: {row['error']}"
        return
    for what in ("wall", "latency"):
        worst = max(judged(row, f"{what}_off"), key=abs, default=0.0)
        if abs(worst) > TOLERANCES[what]:
            yield f"{name}: {what} is {100 * worst:+.1f}% off"
    for run, varied in zip(row["runs"], row["varied"], strict=True):
        low, high = min(run["steady_ms"]), max(run["steady_ms"])
        if varied and not (run["disturbed"] or low * 0.97 <= run["wall_ms"] <= high * 1.03):
            yield (
                f"{name}: the host's times varied from {low:.2f} to {high:.2f} ms, and the report of "
                f"{run['wall_ms']:.2f} ms is not marked as disturbed"
            )
    for off_ms, wall_ms in zip(judged(row, "gap_off_ms"), judged(row, "wall_ms"), strict=True):
        if abs(off_ms) > max(LEAST_GAP_MS, TOLERANCES["gap"] * wall_ms):
            yield f"{name}: launch gap is {off_ms:+.2f} ms off"
    if row["percent_apart"] > TOLERANCES["percent"]:
        yield f"{name}: percent of roof differs by {100 * row['percent_apart']:.1f}% between processes"
    if row["most_above"] > MOST_PERCENT:
        yield f"{name}: a row has {row['most_above']:.0f}% of its roof"


def table(rows: list[dict[str, Any]]) -> str:
    heads = ("steady", "wall off", "latency", "gap off", "% of roof", "apart", "row", "s", "varied")
    lines = [f"{'case':44} " + " ".join(f"{head:>9}" for head in heads)]
    for row in rows:
        if "error" in row:
            lines.append(f"{row['case']:44} {row['error'][:100]}")
            continue
        figures = [
            f"{statistics.fmean(row['steady_ms']):9.2f}",
            *(f"{100 * max(judged(row, what), key=abs, default=0.0):+8.1f}%" for what in ("wall_off", "latency_off")),
            f"{max(judged(row, 'gap_off_ms'), key=abs, default=0.0):+9.2f}",
            f"{statistics.fmean(row['percent_of_roof']):9.2f}",
            f"{100 * row['percent_apart']:8.1f}%",
            f"{row['most_above']:9.0f}",
            f"{statistics.fmean(row['analysis_s']):9.1f}",
            f"{sum(row['varied']):7d}/{len(row['varied'])}",
        ]
        lines.append(f"{row['case']:44} " + " ".join(figures))
    return "\n".join(lines)


# ---- the advice, followed -------------------------------------------------------------------------------------------


@dataclass
class Followed:
    """An item of advice with its predicted gain and its real gain."""

    title: str
    named_ms: float
    interval_ms: list[float | None] = field(default_factory=list)
    before_ms: float | None = None
    """Times of the original program, measured in turn with the changed program."""
    gained_ms: float | None = None
    gained_busy_ms: float | None = None
    """The decrease in GPU busy time. If the real gain differs from this, the step is host-bound."""
    why_not: str = ""


def followed(case: Case, device: str) -> dict[str, Any]:
    import rooftop

    work = case.build(device)
    report = rooftop.analyze(work.model, *work.args, **work.kwargs, **work.analyzed())
    named = [item for item in report.advice if way_of(item) is not None][:3]
    row: dict[str, Any] = {"wall_ms": report.summary.wall_ms, "busy_ms": report.summary.busy_ms, "followed": []}
    del work
    for item in named:
        result = Followed(item.title, item.gain_ms, [item.low_ms, item.high_ms])
        try:
            way = way_of(item)
            assert way is not None
            result.before_ms, result.gained_ms, result.gained_busy_ms = gained(case, way, device)
        except Exception as error:
            result.why_not = f"{type(error).__name__}: {str(error)[:200]}"
        row["followed"].append(asdict(result))
        torch._dynamo.reset()
        if device == "cuda":
            torch.cuda.empty_cache()
    return row


Way = Callable[[Case, str], tuple[Callable[[], Any], int]]
"""Creates the program with the advice applied. Also returns how many original steps one of its steps makes."""


def gained(case: Case, way: Way, device: str) -> tuple[float, float, float]:
    """The original step's steady time, and the steady and busy time that the change saves. Both versions take turns."""
    changed, steps = way(case, device)
    plain = case.build(device, fused=way is in_graph).run  # the fused optimizer is a separate item of advice
    before, after = list[float](), list[float]()
    for _ in range(3):
        before += steady_times(plain, device)
        after += steady_times(changed, device)
    busy_ms = _busy_ms(plain) - _busy_ms(changed) / steps if device == "cuda" else 0.0
    before_ms = _lower_tenth(before)
    return before_ms, before_ms - _lower_tenth(after) / steps, busy_ms


def in_graph(case: Case, device: str) -> tuple[Callable[[], Any], int]:
    work = case.build(device, capturable=True, fused=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work.run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work.run()

    def replay(_owner: Workload = work) -> None:
        graph.replay()

    return replay, 1


def twice_the_batch(case: Case, device: str) -> tuple[Callable[[], Any], int]:
    return case.build(device, batches=2).run, 2


def channels_last(case: Case, device: str) -> tuple[Callable[[], Any], int]:
    work = case.build(device)
    work.model.to(memory_format=torch.channels_last)
    work.args = tuple(
        x.to(memory_format=torch.channels_last) if isinstance(x, Tensor) and x.dim() == 4 else x for x in work.args
    )
    return work.run, 1


def in_bfloat16(case: Case, device: str) -> tuple[Callable[[], Any], int]:
    work = case.build(device)
    work.around = lambda: torch.autocast(device, dtype=torch.bfloat16)
    return work.run, 1


def compiled(case: Case, device: str, mode: str = "default") -> tuple[Callable[[], Any], int]:
    work = case.build(device)
    work.called = torch.compile(work.model, mode=mode)
    for _ in range(5):
        work.run()
    return work.run, 1


def compiled_and_replayed(case: Case, device: str) -> tuple[Callable[[], Any], int]:
    return compiled(case, device, "reduce-overhead")


def fused(case: Case, device: str) -> tuple[Callable[[], Any], int]:
    return case.build(device, fused=True).run, 1


WAYS: dict[str, Way] = {
    "CUDA graph": in_graph,
    "Double the batch": twice_the_batch,
    "channels last": channels_last,
    "bfloat16": in_bfloat16,
    "Fuse pointwise": compiled,
    "fused kernels": fused,
}


def way_of(item: Any) -> Way | None:
    way = next((way for words, way in WAYS.items() if words in item.title), None)
    return compiled_and_replayed if way is compiled and "reduce-overhead" in item.command else way


def advice_table(rows: dict[str, Any]) -> str:
    # pairs: [runs with unchanged host speed, runs with changed host speed]
    lines, hits, count, losses = [], [0, 0], [0, 0], 0
    for name, row in rows.items():
        for item in row.get("followed", []):
            gained, before = item["gained_ms"], item["before_ms"]
            hit = gained is not None and abs(gained / item["named_ms"] - 1) <= ADVICE_TOLERANCE
            varied = before is not None and apart((before, row["wall_ms"])) > TOLERANCES["wall"]
            hits[varied] += hit
            count[varied] += 1
            losses += gained is not None and gained < 0
            text = f"{gained:8.2f}" if gained is not None else item["why_not"][:60]
            text += f" ({item['gained_busy_ms']:.2f} busy)" if item.get("gained_busy_ms") else ""
            mark = ("" if hit else " x") + (f" varied: {row['wall_ms']:.2f}, {before:.2f} ms" if varied else "")
            lines.append(f"{name:44} {item['title'][:40]:40} {item['named_ms']:8.2f} {text}{mark}")
        if "error" in row:
            lines.append(f"{name:44} {row['error'][:100]}")
    lines.append(f"{hits[0]} of {count[0]} within {ADVICE_TOLERANCE:.0%}; {losses} losses")
    if count[1]:
        lines.append(
            f"{hits[1]} of {count[1]} for steps that had become more than 3% slower or faster since the report"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
