"""Several concurrent jobs that query models on one or more GPUs, by threads, streams, graphs, processes, MPS or
batches.

    python benchmarks/serving.py [--jobs 4] [--gpus 1] [--out benchmarks/results/h100/serving.json]
    python benchmarks/serving.py --table benchmarks/results/h100/serving.json    # print that file as a Markdown table

Each job queries its own ResNet-50 (bfloat16, channels last) with images, and sends the next request as soon as it has
the answer. After a warm-up, the script measures the answers a second of all jobs together, and the time that a job
waits for an answer.

| way | |
|---|---|
| one | one job, one model: what a GPU does for it alone |
| threads | a thread of one process for each job, with a stream and a model of its own |
| streams | one thread launches all jobs' work, each on a stream of its own |
| graphs | the same, each a replay of a CUDA graph |
| processes | a process for each job; the GPU gives them turns |
| mps | the same, under a CUDA MPS server, which is started for it: their kernels run at the same time |
| batch | all jobs' images in one call of one model |

Jobs are assigned to the GPUs in turn. If this machine cannot run a way, the way's row says so.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from programs import Results, resnet_step
from torch import Tensor

from rooftop.hardware import measure_ceilings

WARM_UP = 0.25  # share of the time that does not count
BATCHES = (1, 8, 64)
WAYS = ("one", "threads", "streams", "graphs", "processes", "mps", "batch")
GPU_ALONE = ("streams", "graphs", "mps")
Answers = list[tuple[float, float]]
"""For each request, its time and its answer's time in seconds, by `time.perf_counter`, which is the same in all
processes."""


@dataclass(frozen=True)
class Case:
    """The requests of a measurement.

    Attributes:
        batch: images of a request.
        jobs: number of concurrent jobs.
        devices: the devices to which jobs are assigned in turn.
        size: side of an image, in pixels.
        seconds: duration of the measurement.
    """

    batch: int
    jobs: int
    devices: tuple[str, ...]
    size: int
    seconds: float

    def device(self, job: int) -> str:
        return self.devices[job % len(self.devices)]


class Asking:
    """One job: its model, its images, and on a GPU its own stream."""

    def __init__(self, case: Case, job: int, times: int = 1) -> None:
        self.device = torch.device(case.device(job))
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        step = resnet_step(times * case.batch, dtype=dtype, channels_last=True, device=str(self.device), size=case.size)
        self.model, (self.images,) = step.model, step.args
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.graph: torch.cuda.CUDAGraph | None = None

    def current(self) -> Any:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def launch(self) -> Tensor | None:
        """Launch a request. On a GPU, the answer is available once the stream is synchronized."""
        with self.current(), torch.inference_mode():
            if self.graph is not None:
                self.graph.replay()
                return None
            answer: Tensor = self.model(self.images)
            return answer

    def wait(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()

    def capture(self) -> None:
        """Capture a CUDA graph that later requests replay."""
        for _ in range(3):
            self.launch()
        self.wait()
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(graph, stream=self.stream):
            self.model(self.images)
        self.graph = graph


def asked(asking: Asking, until: float) -> Answers:
    """Send requests, each after the answer to the one before, until the time `until`."""
    answers = []
    while (began := time.perf_counter()) < until:
        asking.launch()
        asking.wait()
        answers.append((began, time.perf_counter()))
    return answers


# ---- ways ------------------------------------------------------------------------------------------------------------


def one(case: Case) -> Answers:
    asking = Asking(case, 0)
    asking.launch()
    asking.wait()
    return asked(asking, time.perf_counter() + case.seconds)


def batch(case: Case) -> Answers:
    """All jobs wait for the whole batch. Each batch counts as one answer per job."""
    each = case.jobs // len(case.devices)
    together = [Asking(case, number, times=each) for number in range(len(case.devices))]
    return [answer for answer in _in_threads(together, case.seconds) for _ in range(each)]


def threads(case: Case) -> Answers:
    return _in_threads([Asking(case, job) for job in range(case.jobs)], case.seconds)


def _in_threads(askings: Sequence[Asking], seconds: float) -> Answers:
    for asking in askings:
        asking.launch()
        asking.wait()
    found: list[Answers] = [[] for _ in askings]
    until = time.perf_counter() + seconds

    def run(number: int) -> None:
        found[number] = asked(askings[number], until)

    running = [threading.Thread(target=run, args=(number,)) for number in range(len(askings))]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return [answer for answers in found for answer in answers]


def streams(case: Case) -> Answers:
    return _by_one_thread([Asking(case, job) for job in range(case.jobs)], case.seconds)


def graphs(case: Case) -> Answers:
    askings = [Asking(case, job) for job in range(case.jobs)]
    for asking in askings:
        asking.capture()
    return _by_one_thread(askings, case.seconds)


def _by_one_thread(askings: Sequence[Asking], seconds: float) -> Answers:
    """One thread serves all jobs. It waits for the oldest request, then launches that job's next request."""
    for asking in askings:
        asking.launch()
        asking.wait()
    until, answers = time.perf_counter() + seconds, []
    began = []
    for asking in askings:
        began.append(time.perf_counter())
        asking.launch()
    while time.perf_counter() < until:
        for number, asking in enumerate(askings):
            asking.wait()
            answers.append((began[number], time.perf_counter()))
            began[number] = time.perf_counter()
            asking.launch()
    for asking in askings:
        asking.wait()
    return answers


def processes(case: Case) -> Answers:
    context = multiprocessing.get_context("forkserver")  # a forked process cannot use the parent's CUDA context
    context.set_forkserver_preload(["torch"])
    places = {name: value for name, value in os.environ.items() if name.startswith("CUDA_MPS_")}
    ready, start, found = context.Barrier(case.jobs + 1), context.Value("d", 0.0), context.SimpleQueue()
    running = [context.Process(target=_job, args=(case, job, places, ready, start, found)) for job in range(case.jobs)]
    for process in running:
        process.start()
    ready.wait(120)
    start.value = time.perf_counter() + case.seconds
    ready.wait(120)
    answers = [answer for _ in running for answer in found.get()]
    for process in running:
        process.join()
    return answers


def _job(case: Case, job: int, places: dict[str, str], ready: Any, until: Any, found: Any) -> None:
    """Run a job in a separate process, which finds the MPS server by its environment."""
    os.environ.update(places)
    if case.device(job) == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // case.jobs))
    asking = Asking(case, job)
    asking.launch()
    asking.wait()
    ready.wait(120)
    ready.wait(120)
    found.put(asked(asking, until.value))


def mps(case: Case) -> Answers:
    with mps_server():
        return processes(case)


@contextmanager
def mps_server() -> Iterator[None]:
    """Run a CUDA MPS server, as this user, for the processes that are started within the block."""
    with tempfile.TemporaryDirectory() as folder:
        places = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        before = {name: os.environ.get(name) for name in places}
        os.environ.update(places)
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
        try:
            yield
        finally:
            subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, check=False)
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})


RUN: dict[str, Callable[[Case], Answers]] = {
    "one": one,
    "threads": threads,
    "streams": streams,
    "graphs": graphs,
    "processes": processes,
    "mps": mps,
    "batch": batch,
}


# ---- figures ---------------------------------------------------------------------------------------------------------


def missing(way: str, case: Case) -> str:
    """The reason why this machine cannot run a way; "" if it can."""
    if way in GPU_ALONE and case.devices[0] == "cpu":
        return "needs a GPU"
    if way == "mps" and shutil.which("nvidia-cuda-mps-control") is None:
        return "needs nvidia-cuda-mps-control"
    return ""


def figures(answers: Answers, case: Case) -> dict[str, float]:
    """The row's figures, from the answers after the warm-up and the time until the last answer."""
    first = min(began for began, _ in answers) + WARM_UP * case.seconds
    counted = [(began, ended) for began, ended in answers if began >= first]
    if len(counted) < 2:
        raise RuntimeError(f"{len(answers)} answers in {case.seconds:g} s are too few to count: give more --seconds")
    latencies_ms = sorted(1e3 * (ended - began) for began, ended in counted)
    return {
        "images_per_s": case.batch * len(counted) / (max(ended for _, ended in counted) - first),
        "median_ms": statistics.median(latencies_ms),
        "p99_ms": latencies_ms[min(len(latencies_ms) - 1, int(0.99 * len(latencies_ms)))],
    }


def row_of(way: str, case: Case) -> dict[str, Any]:
    """Measure a way, or say why this machine cannot run it."""
    row: dict[str, Any] = {"way": way, "batch": case.batch, "jobs": 1 if way == "one" else case.jobs}
    row["gpus"] = 0 if case.devices[0] == "cpu" else len(case.devices)
    why = missing(way, case)
    return row | ({"missing": why} if why else figures(RUN[way](case), case))


def table(path: Path) -> str:
    """Format a file of results as a Markdown table, with a row for each way and columns for each batch."""
    found = json.loads(path.read_text())
    rows = found["results"]
    batches = sorted({row["batch"] for row in rows})
    head = ["", *(f"{each} image{'s' if each > 1 else ''}: images/s | median ms | p99 ms" for each in batches)]
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * 3 * len(batches)}"]
    for way in dict.fromkeys(row["way"] for row in rows):
        cells = [way]
        for each in batches:
            row = next((row for row in rows if row["way"] == way and row["batch"] == each), {})
            if "images_per_s" in row:
                cells += [f"{row['images_per_s']:,.0f}", f"{row['median_ms']:.2f}", f"{row['p99_ms']:.2f}"]
            else:
                cells += [row.get("missing", "not measured"), "", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"{found['environment']['device']}, {rows[0]['gpus']} of them."])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h100/serving.json"))
    parser.add_argument(
        "--table", type=Path, metavar="FILE", help="print this file of results as a table, and measure nothing"
    )
    parser.add_argument("--jobs", type=int, default=4, metavar="N", help="number of concurrent jobs; 4 by default")
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="number of GPUs; 1 by default")
    parser.add_argument(
        "--only", nargs="+", choices=WAYS, default=WAYS, metavar="WAY", help=f"ways to measure: {', '.join(WAYS)}"
    )
    parser.add_argument("--seconds", type=float, default=4.0, metavar="S", help="seconds for each row; 4 by default")
    parser.add_argument("--quick", action="store_true", help="small images on the CPU, to test the script")
    options = parser.parse_args()
    if options.table is not None:
        print(table(options.table))
        return 0
    if options.jobs % options.gpus:
        parser.error(f"--jobs {options.jobs} cannot be spread evenly over --gpus {options.gpus}: give a multiple of it")
    devices = ("cpu",) if options.quick else tuple(f"cuda:{number}" for number in range(options.gpus))
    results = Results(options.out, measure_ceilings(devices[0]))
    for batch_size in (1,) if options.quick else BATCHES:
        case = Case(batch_size, options.jobs, devices, 32 if options.quick else 224, options.seconds)
        for way in options.only:
            results.add(row_of(way, case))
    return 0


if __name__ == "__main__":
    sys.exit(main())
