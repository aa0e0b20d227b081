"""`rooftop.optimize` compared with eager PyTorch and torch.compile, on models that are not ours.

    python benchmarks/optimize.py [--only resnet50 gpt2:1 ...] [--mode inference|training|both] [--budget 60]
        [--out benchmarks/results/h100/optimize.json]

Each row is a public model at one batch, in bfloat16, with random weights and without dropout; texts have 512 tokens. A
row runs in its own process, with an empty cache of compiled code and a time limit from its turn on; each GPU of the
machine takes the next row. The search comes first, so its seconds are those of a first start. Then the eager model,
`torch.compile` (default, and reduce-overhead for inference at batch 1) and the module of `rooftop.optimize` are called
in turns, as users call them. `without` is the time of the kept rules that neither compile nor capture graphs.

Rows are written as they come. A way that raises is an entry of the row's `errors`, and a row that fails as a whole or
runs out of time keeps what it had. Exits with 1 if the optimized module of a row is slower than the faster of eager and
torch.compile's default by more than the spread of the timings, or if a row has errors.
"""

from __future__ import annotations

import argparse
import copy
import fcntl
import importlib
import importlib.util
import json
import math
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import rooftop
from rooftop.hardware import compare

SECONDS = 0.5
BUDGET_S = 60.0
LIMIT_S = 400.0
CLOSE = 0.3
"""A prediction is close if it is off by at most this share of the measured gain, or of `SMALL` of the step."""
SMALL = 0.02
AT_ONCE = 2
"""Processes for each GPU: one builds its model while the other has its turn."""
POLL_S = 0.2
Row = dict[str, Any]
Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A public model.

    Attributes:
        name, package: the model's, and where it comes from.
        build: from the batch to the model and a call's arguments.
        batches: small and large, for inference. training: batch of a training step.
    """

    name: str
    package: str
    build: Callable[[int], Built]
    batches: tuple[int, int]
    training: int


def images(package: str, name: str, size: int = 224, **options: float) -> Callable[[int], Built]:
    def build(batch: int) -> Built:
        module: Any = importlib.import_module("torchvision.models" if package == "torchvision" else package)
        made = getattr(module, name)(**options) if package == "torchvision" else module.create_model(name, **options)
        return made, (torch.randn(batch, 3, size, size),), {}

    return build


def texts(kind: str, tokens: int = 512, **config: Any) -> Callable[[int], Built]:
    def build(batch: int) -> Built:
        transformers: Any = importlib.import_module("transformers")
        made = getattr(transformers, f"{kind}Config")(**config)
        model = getattr(transformers, f"{kind}Model")(made)
        given = torch.randint(made.vocab_size, (batch, tokens))
        return model, (), {"input_ids": given, "use_cache": False} if kind != "Bert" else {"input_ids": given}

    return build


GPT2 = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
TINY = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 50}
BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LLAMA = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}
CASES = {
    case.name: case
    for case in (
        Case("resnet50", "torchvision", images("torchvision", "resnet50"), (1, 128), 128),
        Case("gpt2", "transformers", texts("GPT2", **GPT2), (1, 16), 8),
        Case("bert", "transformers", texts("Bert", **BERT), (1, 32), 16),
        Case("llama_300m", "transformers", texts("Llama", **LLAMA), (1, 16), 4),
        Case("swin_t", "torchvision", images("torchvision", "swin_t", stochastic_depth_prob=0.0), (1, 128), 64),
        Case("vit_base_patch16_224", "timm", images("timm", "vit_base_patch16_224"), (1, 128), 64),
        Case(
            "convnext_tiny",
            "torchvision",
            images("torchvision", "convnext_tiny", stochastic_depth_prob=0.0),
            (1, 128),
            64,
        ),
        Case(
            "efficientnet_b0",
            "torchvision",
            images("torchvision", "efficientnet_b0", stochastic_depth_prob=0.0, dropout=0.0),
            (1, 128),
            128,
        ),
        Case(
            "mobilenet_v3_large", "torchvision", images("torchvision", "mobilenet_v3_large", dropout=0.0), (1, 128), 128
        ),
        Case("densenet121", "torchvision", images("torchvision", "densenet121"), (1, 64), 64),
        Case("regnet_y_8gf", "torchvision", images("torchvision", "regnet_y_8gf"), (1, 128), 64),
        Case("mixer_b16_224", "timm", images("timm", "mixer_b16_224"), (1, 128), 64),
        Case("tiny_gpt2", "transformers", texts("GPT2", 8, **GPT2, **TINY), (1, 2), 2),
    )
}
TELLING = (("resnet50", 1), ("resnet50", 128), ("gpt2", 1), ("bert", 32), ("llama_300m", 1), ("swin_t", 128))
"""The rows that come first: a run that is cut off has them."""
QUICK = "tiny_gpt2"


@dataclass(frozen=True)
class Job:
    """One row to measure."""

    name: str
    batch: int
    mode: str

    def __str__(self) -> str:
        return f"{self.name} batch {self.batch} {self.mode}"


def jobs(only: Sequence[str], batch: str, mode: str) -> list[Job]:
    """The chosen rows, the most telling ones first.

    Args:
        only: names of models, or "model:batch"; none: all.
    """
    found = [Job(name, size, "inference") for name, size in TELLING]
    for case in CASES.values():
        if case.name != QUICK:
            found += [Job(case.name, size, "inference") for size in case.batches]
    found += [Job(case.name, case.training, "training") for case in CASES.values() if case.name != QUICK]

    def wanted(job: Job) -> bool:
        if mode not in ("both", job.mode):
            return False
        if job.mode == "inference" and batch != "both" and job.batch != CASES[job.name].batches[batch == "large"]:
            return False
        return not only or job.name in only or f"{job.name}:{job.batch}" in only

    return [job for job in dict.fromkeys(found) if wanted(job)]


# ---- one row, in its own process -----------------------------------------------------------------------------------


def measured(
    job: Job, device: torch.device, budget_s: float, note: Callable[[Row], None], turn: Callable[[], object]
) -> Row:
    """One row: ms of each way, what the search kept, and how long it took.

    Args:
        note: called with the row after each stage.
        turn: returns when the device is free for this row.
    """
    train = job.mode == "training"
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    row: Row = {"model": job.name, "batch": job.batch, "mode": job.mode, "ms": {}, "errors": {}, "seconds": {}}
    model, args, kwargs = CASES[job.name].build(job.batch)
    turn()
    row["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    note(row)
    model = model.to(device, dtype).train(train)
    given = [moved(each, device, dtype) for each in args]
    named = {name: moved(each, device, dtype) for name, each in kwargs.items()}
    ways: dict[str, Callable[[], Any]] = {"eager": step(model, given, named, train)}

    def found() -> Callable[[], Any]:
        began = time.perf_counter()
        loss = loss_of if train else None
        result = rooftop.optimize(model, *given, train=train, loss=loss, budget_s=budget_s, **named)
        row["seconds"]["optimize"] = time.perf_counter() - began
        row["search"] = {"before": result.before_ms, "after": result.after_ms, "without": result.without_ms}
        row["kept"], row["changes"] = result.kept, result.to_dict()["changes"]
        row["checked"], row["unchecked"] = result.checked, result.unchecked
        row["predictions"] = predictions(row["changes"], result.before_ms)

        def run() -> Any:
            output = step(result.module, given, named, train)()
            assert not result.module.unproven, result.module.unproven
            return output

        return run

    def compiled(mode: str) -> Callable[[], Callable[[], Any]]:
        def make() -> Callable[[], Any]:
            began = time.perf_counter()
            other = copy.deepcopy(model)  # transformers marks a compiled model: it would be no longer the proven one
            faster = torch.compile(other, mode=None if mode == "default" else mode)
            run = step(faster, given, named, train, mode == "reduce-overhead")
            for _ in range(3):  # compiling, warming up, capturing
                run()
            row["seconds"][f"compile {mode}"] = time.perf_counter() - began  # with what the search has cached
            return run

        return make

    makers = {"optimize": found, "compile default": compiled("default")}
    if not train and device.type == "cuda" and job.batch == 1:  # graphs gain nothing for a large one
        makers["compile reduce-overhead"] = compiled("reduce-overhead")
    for name, make in makers.items():
        try:
            ways[name] = make()
        except Exception as error:
            row["errors"][name] = said(error)
        note(row)
        for _ in range(2):
            ways["eager"]()
        times = compare(ways, device=device, seconds=SECONDS)
        row["ms"] = {way: timing.median_ms for way, timing in times.items()}
        row["spread"] = {way: timing.spread for way, timing in times.items()}
        note(row)
    return row


def predictions(changes: Iterable[Row], step_ms: float) -> list[Row]:
    """Predicted and measured gains of the changes that were timed, and whether they are close."""
    return [
        {
            "rule": change["rule"],
            "predicted_ms": change["predicted_ms"],
            "measured_ms": change["measured_ms"],
            "close": abs(change["predicted_ms"] - change["measured_ms"])
            <= max(CLOSE * abs(change["measured_ms"]), SMALL * step_ms),
        }
        for change in changes
        if change["measured_ms"] is not None
    ]


def moved(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.to(device, dtype) if value.is_floating_point() else value.to(device)


def step(
    model: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], train: bool, marks: bool = False
) -> Callable[[], Any]:
    """A call as users make it: without gradients, or forward and backward from the sum of the first output."""

    def infer() -> Any:
        with torch.no_grad():
            if marks:
                torch.compiler.cudagraph_mark_step_begin()
            return model(*args, **kwargs)

    def training() -> None:
        loss_of(model(*args, **kwargs)).backward()

    return training if train else infer


def loss_of(output: Any) -> Tensor:
    first: Tensor = output if isinstance(output, Tensor) else output[0]
    return first.float().square().mean()


def said(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:500]}"


def run_row(job: Job, options: argparse.Namespace) -> int:
    """Measure one row, and write it to `--into` after each stage."""
    row: Row = {"model": job.name, "batch": job.batch, "mode": job.mode, "ms": {}, "errors": {}}

    def note(known: Row) -> None:
        nonlocal row
        row = known
        partial = options.into.with_suffix(".partial")
        partial.write_text(json.dumps(row))
        partial.replace(options.into)

    with options.turns.open("w") as turns:  # locked until the row is done

        def turn() -> None:
            fcntl.flock(turns, fcntl.LOCK_EX)

        try:
            note(measured(job, torch.device("cpu" if options.quick else "cuda"), options.budget, note, turn))
        except BaseException as error:
            traceback.print_exc()
            note({**row, "errors": {**row["errors"], "row": said(error)}})
    return 0


# ---- all rows ------------------------------------------------------------------------------------------------------


def row_of(job: Job, gpu: int | None, turns: Path, options: argparse.Namespace) -> Row:
    """A row measured in another process.

    Args:
        gpu: the GPU that the process sees; None: none.
        turns: a file that the processes of a GPU lock in turns.
    """
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        into = Path(folder) / "row.json"
        words = [sys.executable, str(Path(__file__).resolve()), "--row", job.name, str(job.batch), job.mode]
        words += [
            "--into",
            str(into),
            "--turns",
            str(turns),
            "--budget",
            str(options.budget),
            *(["--quick"] if options.quick else []),
        ]
        surroundings = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}
        if gpu is not None:
            seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
            surroundings["CUDA_VISIBLE_DEVICES"] = seen.split(",")[gpu] if seen else str(gpu)
        log_path, why = Path(folder) / "log.txt", ""
        with log_path.open("w") as log_file:  # a group of its own, with the compiler's helpers
            process = subprocess.Popen(
                words, env=surroundings, stdout=log_file, stderr=log_file, start_new_session=True
            )
            try:
                status = ended(process, into, options.limit)
                why = f"not done after {options.limit:.0f} s" if status is None else f"exit status {status}"
                why = why if status != 0 else ""
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        log = log_path.read_text(errors="replace")
        why += f": {log.strip()[-500:]}" if why else ""
        if options.logs is not None:
            options.logs.mkdir(parents=True, exist_ok=True)
            (options.logs / f"{job}.txt".replace(" ", "-")).write_text(log)
        row: Row = {"model": job.name, "batch": job.batch, "mode": job.mode, "ms": {}, "errors": {}}
        row = json.loads(into.read_text()) if into.exists() else row
    if why:
        row["errors"]["row"] = why
    row["wall_s"] = time.perf_counter() - began
    return row


def ended(process: subprocess.Popen[bytes], into: Path, limit_s: float) -> int | None:
    """The exit status of a row's process; None if it takes more than `limit_s` to start, or from its turn on."""
    began, has_turn = time.perf_counter(), False
    while process.poll() is None:
        if into.exists() and not has_turn:
            began, has_turn = time.perf_counter(), True
        if time.perf_counter() - began > (limit_s if has_turn else 2 * limit_s):
            return None
        time.sleep(POLL_S)
    return process.returncode


def slower(row: Row) -> bool:
    """Whether the optimized module is slower than eager and the compiler's default, beyond the spread."""
    ms, spread = row["ms"], row.get("spread", {})
    rivals = [name for name in ("eager", "compile default") if name in ms]
    if "optimize" not in ms or not rivals:
        return False
    best = min(rivals, key=lambda name: ms[name])
    return bool(ms["optimize"] > ms[best] * (1 + max(spread[best], spread["optimize"])))


def failed(rows: Sequence[Row], quick: bool) -> bool:
    """Whether a row has errors, or the optimized module is slower; the times of a quick run do not count."""
    return any(row["errors"] or (slower(row) and not quick) for row in rows)


def in_words(row: Row) -> str:
    figures = ", ".join(f"{name} {ms:.3g}" for name, ms in row["ms"].items())
    words = [f"{row['model']} batch {row['batch']} {row['mode']}: {figures or 'no times'} ms"]
    if "kept" in row:
        words.append(f"kept {', '.join(row['kept']) or 'nothing'} in {row['seconds']['optimize']:.0f} s")
    if row.get("search", {}).get("without") is not None:
        words.append(f"{row['search']['without']:.3g} ms without compiler and graphs")
    words += [f"{way} failed: {error}" for way, error in row["errors"].items()]
    return "; ".join(words) + (" SLOWER" if slower(row) else "")


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Geometric means of the gain over each other way, for small and large batches, and the share of predictions that
    are close."""
    found: dict[str, Any] = {}
    for what, chosen in (
        ("small batch", [row for row in rows if row["mode"] == "inference" and row["batch"] == 1]),
        ("large batch", [row for row in rows if row["mode"] == "inference" and row["batch"] > 1]),
        ("training", [row for row in rows if row["mode"] == "training"]),
    ):
        for way in ("eager", "compile default", "compile reduce-overhead", "best"):
            gains = []
            for row in chosen:
                others = {name: ms for name, ms in row["ms"].items() if name != "optimize"}
                rival = min(others.values()) if way == "best" and others else others.get(way)
                if rival is not None and "optimize" in row["ms"]:
                    gains.append(rival / row["ms"]["optimize"])
            if gains:
                found[f"{what}, over {way}"] = math.exp(sum(map(math.log, gains)) / len(gains))
    close = [each["close"] for row in rows for each in row.get("predictions", [])]
    if close:
        found["predictions"], found["predictions within 30%"] = len(close), sum(close) / len(close)
    return found


def main() -> int:
    """Measure, write the rows, and return whether something is slower."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="MODEL[:BATCH]", default=[], help="only these models or rows")
    parser.add_argument("--batch", choices=("small", "large", "both"), default="both", help="of inference")
    parser.add_argument("--mode", choices=("inference", "training", "both"), default="both")
    parser.add_argument("--budget", type=float, default=BUDGET_S, metavar="SECONDS", help="of each search")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="SECONDS", help="of each row")
    parser.add_argument("--total", type=float, default=math.inf, metavar="SECONDS", help="start no row after this")
    parser.add_argument("--quick", action="store_true", help="a tiny model on the CPU, to try the script")
    parser.add_argument("--out", type=Path, help="where the results go, as JSON")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="where the standard error of each row goes")
    parser.add_argument("--row", nargs=3, metavar=("MODEL", "BATCH", "MODE"), help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--turns", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row is not None:
        return run_row(Job(options.row[0], int(options.row[1]), options.row[2]), options)
    if options.quick:
        chosen = [Job(QUICK, CASES[QUICK].batches[0], "inference"), Job(QUICK, CASES[QUICK].training, "training")]
    else:
        chosen = jobs(options.only, options.batch, options.mode)
    waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in chosen:
        if importlib.util.find_spec(CASES[job.name].package) is None:
            print(f"{job}: left out, {CASES[job.name].package} is not installed", flush=True)
        else:
            waiting.put(job)
    gpus: list[int | None] = [None] if options.quick else list(range(torch.cuda.device_count()))
    if not gpus:
        parser.error("there is no GPU: --quick tries the script on the CPU")
    rows: list[Row] = []
    began, lock = time.perf_counter(), threading.Lock()

    def work(gpu: int | None, turns: Path) -> None:
        while time.perf_counter() - began < options.total:
            try:
                job = waiting.get_nowait()
            except queue.Empty:
                return
            row = row_of(job, gpu, turns, options)
            with lock:
                rows.append(row)
                print(in_words(row), flush=True)
                if options.out is not None:
                    text = json.dumps({"torch": torch.__version__, "results": rows, "summary": summary(rows)}, indent=1)
                    options.out.write_text(text + "\n")

    with tempfile.TemporaryDirectory() as folder:
        places = [(gpu, Path(folder) / f"turns{gpu}") for gpu in gpus]
        workers = [threading.Thread(target=work, args=place) for place in places for _ in range(AT_ONCE)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    for what, value in summary(rows).items():
        print(f"{what}: {value:.3g}")
    return int(failed(rows, options.quick))


if __name__ == "__main__":
    sys.exit(main())
