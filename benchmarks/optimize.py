"""`rooftop.optimize` compared with eager PyTorch and torch.compile, on models from other libraries.

    python benchmarks/optimize.py [--only resnet50 gpt2:1 bert:training level3 ...] [--mode inference|training|both]
        [--budget 60] [--total 480] [--out benchmarks/results/h100/optimize.json]

Each row is a public model at one batch, with random weights and without dropout: thirteen architectures in bfloat16
(texts of 512 tokens), and twelve networks of KernelBench's level 3 (`level3.py`), which are in float32 in KernelBench,
too. A training step is forward, backward and AdamW. The search runs first, so its seconds include everything that a
first start compiles. Then the eager model, `torch.compile` (default; reduce-overhead for inference at batch 1;
max-autotune for three rows with `--autotune`) and the module of `rooftop.optimize` take turns, called as users call
them. `without` is the module's time with only those kept rules that neither compile nor capture graphs.

Compiling needs CPU cores and no GPU. So two rows (`--at-once`) run for each GPU, each in its own process, with its own
cores and an empty cache of compiled code. A row locks the GPU while it times variants, checks their results and
captures graphs. It releases the GPU while it compiles. The search's clock stops while the row waits for the GPU again.

Each row is written to the file after each of its stages. If a variant raises, the error becomes an entry of the row's
`errors`. A row that fails as a whole or runs out of time keeps what it has measured. A second run with the same `--out`
measures only rows that are missing or incomplete. With `--plans FOLDER`, a row saves its plan there. If the folder
already has the row's plan, the row applies it instead of searching. With `--uncompiled`, the search has no rules that
compile or capture graphs, and is compared only with eager PyTorch. The script exits with 1 if a row has errors. It
also exits with 1 if an optimized module is slower than the faster of eager and torch.compile's default by more than the
spread of the timings.
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
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import level3
import torch
from torch import Tensor, nn

import rooftop
from rooftop.hardware import compare
from rooftop.optimization import searching
from rooftop.optimization.deadlines import Deadline
from rooftop.optimization.optimized import Change
from rooftop.optimization.profiles import HOW_IT_RUNS
from rooftop.rewrites import RULES

SECONDS = 0.5
BUDGET_S = 60.0
LIMIT_S = 400.0
LEAST_S = 40.0
"""No row starts if less time is left, because building a model and the first measurements take this long."""
CLOSE = 0.3
"""A prediction is close if its error is at most this share of the measured gain, or at most `SMALL` of the step."""
SMALL = 0.02
AT_ONCE = 2
"""Number of rows that run at a time for each GPU. A search compiles for about half of its time. Each row gets eight of
16 cores."""
LEARNING_RATE = 1e-6
POLL_S = 0.2
Row = dict[str, Any]
Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A public model.

    Attributes:
        name, package: the model's name, and the package that has it.
        build: takes the batch size and returns the model and a call's arguments.
        batches: batch sizes for inference: a small and a large one, or only one.
        training: batch size of a training step; None: no training.
        dtype: the model's dtype on a GPU.
    """

    name: str
    package: str
    build: Callable[[int], Built]
    batches: tuple[int, ...]
    training: int | None = None
    dtype: torch.dtype = torch.bfloat16


def images(package: str, name: str, size: int = 224, **options: float) -> Callable[[int], Built]:
    """A network without random depth, with these further options."""

    def build(batch: int) -> Built:
        module: Any = importlib.import_module("torchvision.models" if package == "torchvision" else package)
        if package != "torchvision":
            return module.create_model(name, **options), (torch.randn(batch, 3, size, size),), {}
        made = getattr(module, name)(**options)
        for part in made.modules():
            if isinstance(part, importlib.import_module("torchvision.ops").StochasticDepth):
                part.p = 0.0
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


def of_level3(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> Callable[[int], Built]:
    return lambda batch: (make(), (torch.rand(batch, *shape[1:]),), {})


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
        Case("swin_t", "torchvision", images("torchvision", "swin_t"), (1, 128), 64),
        Case("vit_base_patch16_224", "timm", images("timm", "vit_base_patch16_224"), (1, 128), 64),
        Case("convnext_tiny", "torchvision", images("torchvision", "convnext_tiny"), (1, 128), 64),
        Case("efficientnet_b0", "torchvision", images("torchvision", "efficientnet_b0", dropout=0.0), (1, 128), 128),
        Case(
            "mobilenet_v3_large", "torchvision", images("torchvision", "mobilenet_v3_large", dropout=0.0), (1, 128), 128
        ),
        Case("densenet121", "torchvision", images("torchvision", "densenet121"), (1, 64), 64),
        Case("regnet_y_8gf", "torchvision", images("torchvision", "regnet_y_8gf"), (1, 128), 64),
        Case("mobilenetv4_conv_small", "timm", images("timm", "mobilenetv4_conv_small"), (1, 128), 128),
        Case("mixer_b16_224", "timm", images("timm", "mixer_b16_224"), (1, 128), 64),
        Case("tiny_gpt2", "transformers", texts("GPT2", 8, **GPT2, **TINY), (1, 2), 2),
        *(
            Case(name, "torch", of_level3(make, shape), (shape[0],), None, torch.float32)
            for name, (_, make, shape) in level3.NETWORKS.items()
        ),
    )
}
TELLING = (
    *("resnet50:128", "gpt2:1", "bert:32", "llama_300m:1", "swin_t:128", "llama_300m:training", "mini_gpt_block"),
    *("resnet50:1", "vit_base_patch16_224:128", "resnet50:training", "efficientnet_b0:128", "unet_softmax"),
    *("convnext_tiny:128", "swin_t:1", "gpt2:training", "efficientnet_b0:1", "mobilenet_v1", "mamba2"),
)
"""The rows that run first, so that a run that is cut off has them."""
AUTOTUNED = ("resnet50:128", "vit_base_patch16_224:128", "llama_300m:16")
QUICK = "tiny_gpt2"


@dataclass(frozen=True)
class Job:
    """One row to measure."""

    name: str
    batch: int
    mode: str

    def __str__(self) -> str:
        return f"{self.name} batch {self.batch} {self.mode}"

    @property
    def key(self) -> str:
        """The row's name for `--only`, such as "gpt2:1" or "gpt2:training"."""
        return f"{self.name}:{self.batch if self.mode == 'inference' else self.mode}"

    def named(self, name: str) -> bool:
        """Whether a name in `--only` or `TELLING` selects this row."""
        if name == "level3":
            return self.name in level3.NETWORKS
        model, _, rest = name.partition(":")
        return self.name.startswith(model) and rest in ("", self.key.partition(":")[2])


def jobs(only: Sequence[str], batch: str, mode: str) -> list[Job]:
    """The chosen rows, with the most informative ones first.

    Args:
        only: prefixes of model names, with or without ":batch" or ":training", or "level3"; empty: all rows.
    """
    cases = [case for case in CASES.values() if case.name != QUICK]
    every = [Job(case.name, size, "inference") for case in cases for size in case.batches]
    every += [Job(case.name, case.training, "training") for case in cases if case.training is not None]
    found = [job for name in TELLING for job in every if job.named(name)] + every

    def wanted(job: Job) -> bool:
        if mode not in ("both", job.mode):
            return False
        if job.mode == "inference" and batch != "both" and (job.batch == 1) is not (batch == "small"):
            return False
        return not only or any(map(job.named, only))

    return [job for job in dict.fromkeys(found) if wanted(job)]


# ---- one row, in a separate process --------------------------------------------------------------------------------


class Turn:
    """A file lock that gives a GPU to one process at a time.

    Attributes:
        waited_s: total seconds spent waiting for the GPU after releasing it.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")
        self.waited_s = 0.0

    def __enter__(self) -> Turn:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()  # which unlocks it

    def take(self) -> None:
        """Wait for the GPU and lock it."""
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def pass_on(self) -> None:
        """Free unused GPU memory, and release the GPU to other processes."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def take_back(self) -> None:
        """Wait for the GPU again, while this class's clock stops."""
        began = time.perf_counter()
        self.take()
        self.waited_s += time.perf_counter() - began

    def perf_counter(self) -> float:
        """The time in seconds, without the time spent waiting for the GPU."""
        return time.perf_counter() - self.waited_s

    @contextmanager
    def away(self) -> Iterator[None]:
        """Release the GPU for a block that hardly uses it, such as compiling."""
        self.pass_on()
        try:
            yield
        finally:
            self.take_back()


@contextmanager
def search_in(turn: Turn) -> Iterator[None]:
    """Make a search release the GPU during first calls, and exclude the time spent waiting for it."""

    class Away(Deadline):
        def __enter__(self) -> Deadline:
            turn.pass_on()
            return super().__enter__()

        def __exit__(
            self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
        ) -> None:
            try:
                super().__exit__(kind, error, tb)
            finally:
                turn.take_back()

    before: Any = searching.Deadline, searching.time
    turn.waited_s = 0.0
    searching.Deadline, searching.time = Away, turn  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        searching.Deadline, searching.time = before  # type: ignore[misc]


def measured(
    job: Job,
    device: torch.device,
    turn: Turn,
    note: Callable[[Row], None],
    budget_s: float = BUDGET_S,
    plan: Path | None = None,
    autotune: bool = False,
    uncompiled: bool = False,
) -> Row:
    """Measure one row: ms of each variant, the changes that the search kept, and the seconds that it took.

    Args:
        note: called with the row after each stage.
        plan: the plan's file. If it exists, it is applied instead of a search; if not, the search writes it.
        autotune: also measure max-autotune.
        uncompiled: neither compile nor capture graphs, and compare only with eager PyTorch.
    """
    train, case = job.mode == "training", CASES[job.name]
    dtype = case.dtype if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    row: Row = {"model": job.name, "batch": job.batch, "mode": job.mode, "ms": {}, "errors": {}, "seconds": {}}
    model, args, kwargs = case.build(job.batch)
    turn.take()
    row["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    row["cores"] = len(os.sched_getaffinity(0))
    note(row)
    model = model.to(device, dtype).train(train)
    given = [moved(each, device, dtype) for each in args]
    named = {name: moved(each, device, dtype) for name, each in kwargs.items()}
    optimizer = adamw(model) if train else None
    ways: dict[str, Callable[[], Any]] = {"eager": step(model, given, named, optimizer)}

    def said(what: str, fraction: float = 0.0) -> None:
        print(f"{turn.perf_counter() - began:6.1f} s {what}", file=sys.stderr, flush=True)

    def found() -> Callable[[], Any]:
        loss = loss_of if train else None
        known: dict[str, Any] = {"plan": plan} if plan is not None and plan.exists() else {}
        if uncompiled:
            known["rules"] = [rule.name for rule in RULES if not rule.opt_in and rule.kind not in HOW_IT_RUNS]
        with search_in(turn):
            started = turn.perf_counter()
            result = rooftop.optimize(
                model,
                *given,
                train=train,
                loss=loss,
                optimizer=optimizer,
                budget_s=budget_s,
                progress=said,
                **known,
                **named,
            )
            row["seconds"]["plan" if "plan" in known else "optimize"] = turn.perf_counter() - started
        row["search"] = {"before": result.before_ms, "after": result.after_ms, "without": result.without_ms}
        row["kept"], row["changes"] = result.kept, result.to_dict()["changes"]
        row["checked"], row["unchecked"] = result.checked, result.unchecked
        row["predictions"] = predictions(row["changes"], result.before_ms)
        print(result, file=sys.stderr, flush=True)
        if plan is not None and "plan" not in known:
            plan.parent.mkdir(parents=True, exist_ok=True)
            result.save(plan)
        run = step(result.module, given, named, result.optimizer)

        def proven() -> Any:
            output = run()
            assert not result.module.unproven, result.module.unproven
            return output

        return proven

    def compiled(mode: str) -> Callable[[], Any]:
        started = turn.perf_counter()
        other = copy.deepcopy(model)  # keeps the proven model, since transformers marks a model that it compiles
        faster = torch.compile(other, mode=None if mode == "default" else mode)
        run = step(faster, given, named, adamw(other) if train else None, mode == "reduce-overhead")
        with turn.away() if mode != "max-autotune" else nullcontext():  # max-autotune times kernels while it compiles
            for _ in range(3):  # the calls compile, warm up and capture
                run()
        row["seconds"][f"compile {mode}"] = turn.perf_counter() - started  # the search has filled the caches
        return run

    makers: dict[str, Callable[[], Callable[[], Any]]] = {"optimize": found}
    if not uncompiled:
        makers["compile default"] = partial(compiled, "default")
        if not train and device.type == "cuda" and job.batch == 1:  # a large batch gains nothing from CUDA graphs
            makers["compile reduce-overhead"] = partial(compiled, "reduce-overhead")
    if autotune and job.key in AUTOTUNED:
        makers["compile max-autotune"] = partial(compiled, "max-autotune")
    began = turn.perf_counter()
    for name, make in makers.items():
        said(name)
        try:
            ways[name] = make()
        except Exception as error:
            traceback.print_exc()
            row["errors"][name] = in_short(error)
        note(row)
        for _ in range(2):
            ways["eager"]()
        times = compare(ways, device=device, seconds=SECONDS)
        row["ms"] = {way: timing.median_ms for way, timing in times.items()}
        row["spread"] = {way: timing.spread for way, timing in times.items()}
        note(row)
    row["done"] = True
    said("done")
    return row


def predictions(changes: Iterable[Row], step_ms: float) -> list[Row]:
    """The predicted and the measured gain of each timed change, and whether they are close."""
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


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


def step(
    model: Callable[..., Any],
    args: list[Any],
    kwargs: dict[str, Any],
    optimizer: torch.optim.Optimizer | None,
    marks: bool = False,
) -> Callable[[], Any]:
    """A call as users make it: a training step if there is an optimizer, inference without gradients if there is
    none."""

    def infer() -> Any:
        with torch.no_grad():
            if marks:
                torch.compiler.cudagraph_mark_step_begin()
            return model(*args, **kwargs)

    def training() -> None:
        assert optimizer is not None
        optimizer.zero_grad()
        loss_of(model(*args, **kwargs)).backward()
        optimizer.step()

    return infer if optimizer is None else training


def loss_of(output: Any) -> Tensor:
    first: Tensor = output if isinstance(output, Tensor) else output[0]
    return first.float().square().mean()


def in_short(error: BaseException) -> str:
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

    device = torch.device("cpu" if options.quick else "cuda")
    plan = options.plans / f"{job.key.replace(':', '-')}.json" if options.plans is not None else None
    try:
        with Turn(options.turns) as turn:
            note(measured(job, device, turn, note, options.budget, plan, options.autotune, options.uncompiled))
    except BaseException as error:
        traceback.print_exc()
        note({**row, "errors": {**row["errors"], "row": in_short(error)}})
    return 0


# ---- all rows ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where a row runs: a GPU (None: the CPU), and the CPU cores.

    Attributes:
        turns: the file that the processes on a GPU lock in turn.
    """

    gpu: int | None
    cores: tuple[int, ...]
    turns: Path


def places(gpus: Sequence[int | None], at_once: int, folder: Path) -> list[Place]:
    """`at_once` places for each GPU. All places together have the machine's CPU cores, and no two places share a
    physical core."""
    cores, count = (
        sorted(os.sched_getaffinity(0), key=first_sibling),
        len(gpus) * (at_once if gpus[0] is not None else 1),
    )
    share = max(1, len(cores) // count)
    shares = [tuple(cores[i * share : (i + 1) * share]) or tuple(cores) for i in range(count)]
    return [Place(gpus[i % len(gpus)], own, folder / f"turns{i % len(gpus)}") for i, own in enumerate(shares)]


def first_sibling(core: int) -> tuple[int, int]:
    """A sort key for cores, by which the two threads of a physical core are neighbours."""
    siblings = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
    first = re.match(r"\d+", siblings.read_text()) if siblings.exists() else None
    return (int(first[0]) if first is not None else core), core


def row_of(job: Job, place: Place, left_s: float, options: argparse.Namespace) -> Row:
    """Measure a row in another process, which is stopped after its time limit or after `left_s`."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        into = Path(folder) / "row.json"
        pinned = ["taskset", "-c", ",".join(map(str, place.cores))] if shutil.which("taskset") else []
        words = [*pinned, sys.executable, str(Path(__file__).resolve()), "--row", job.name, str(job.batch), job.mode]
        words += ["--into", str(into), "--turns", str(place.turns), "--budget", str(options.budget)]
        words += ["--quick"] if options.quick else []
        words += ["--autotune"] if options.autotune else []
        words += ["--uncompiled"] if options.uncompiled else []
        words += ["--plans", str(options.plans)] if options.plans is not None else []
        surroundings = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(options.cache or folder)}
        surroundings["TORCHINDUCTOR_COMPILE_THREADS"] = str(len(place.cores))
        if place.gpu is not None:
            seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
            surroundings["CUDA_VISIBLE_DEVICES"] = seen.split(",")[place.gpu] if seen else str(place.gpu)
        log_path, why = Path(folder) / "log.txt", ""
        with log_path.open("w") as log_file:  # a separate process group, which includes the compiler's workers
            process = subprocess.Popen(
                words, env=surroundings, stdout=log_file, stderr=log_file, start_new_session=True
            )
            try:
                status = ended(process, into, options.limit, left_s)
                why = f"not done after {time.perf_counter() - began:.0f} s"
                why = why if status is None else f"exit status {status}" if status else ""
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


def ended(process: subprocess.Popen[bytes], into: Path, limit_s: float, left_s: float) -> int | None:
    """The exit status of a row's process, or None if it runs out of time. It has twice `limit_s` until its first turn,
    then `limit_s`, and `left_s` in all."""
    began = start = time.perf_counter()
    has_turn = False
    while process.poll() is None:
        if into.exists() and not has_turn:
            start, has_turn = time.perf_counter(), True
        now = time.perf_counter()
        if now - start > (limit_s if has_turn else 2 * limit_s) or now - began > left_s:
            return None
        time.sleep(POLL_S)
    return process.returncode


def slower(row: Row) -> bool:
    """Whether the optimized module is slower than the faster of eager and torch.compile's default, beyond the
    spread."""
    ms, spread = row["ms"], row.get("spread", {})
    rivals = [name for name in ("eager", "compile default") if name in ms]
    if "optimize" not in ms or not rivals:
        return False
    best = min(rivals, key=lambda name: ms[name])
    return bool(ms["optimize"] > ms[best] * (1 + max(spread[best], spread["optimize"])))


def failed(rows: Sequence[Row], quick: bool) -> bool:
    """Whether a row has errors or an optimized module is slower. With `quick`, only errors count."""
    return any(row["errors"] or (slower(row) and not quick) for row in rows)


def in_words(row: Row) -> str:
    figures = ", ".join(f"{name} {ms:.3g}" for name, ms in row["ms"].items())
    words = [f"{row['model']} batch {row['batch']} {row['mode']}: {figures or 'no times'} ms"]
    if "kept" in row:
        seconds = row["seconds"].get("optimize") or row["seconds"]["plan"]
        words.append(f"kept {', '.join(row['kept']) or 'nothing'} in {seconds:.0f} s")
    if row.get("search", {}).get("without") is not None:
        words.append(f"{row['search']['without']:.3g} ms without compiler and graphs")
    words += [f"{way} failed: {error}" for way, error in row["errors"].items()]
    lines = ["; ".join(words) + (" SLOWER" if slower(row) else "")]
    return "\n    ".join([*lines, *(str(Change(**change)) for change in row.get("changes", []))])


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The geometric mean of the gain over each other variant, for small and large batches, and the share of close
    predictions."""
    found: dict[str, Any] = {}
    others = [row for row in rows if row["model"] not in level3.NETWORKS]
    for what, chosen in (
        ("small batch", [row for row in others if row["mode"] == "inference" and row["batch"] == 1]),
        ("large batch", [row for row in others if row["mode"] == "inference" and row["batch"] > 1]),
        ("training", [row for row in others if row["mode"] == "training"]),
        ("level 3", [row for row in rows if row["model"] in level3.NETWORKS]),
    ):
        for way in ("eager", "compile default", "compile reduce-overhead", "compile max-autotune", "best"):
            gains = []
            for row in chosen:
                rivals = {name: ms for name, ms in row["ms"].items() if name != "optimize"}
                rival = min(rivals.values()) if way == "best" and rivals else rivals.get(way)
                if rival is not None and "optimize" in row["ms"]:
                    gains.append(rival / row["ms"]["optimize"])
            if gains:
                found[f"{what}, over {way}"] = math.exp(sum(map(math.log, gains)) / len(gains))
    close = [each["close"] for row in rows for each in row.get("predictions", [])]
    if close:
        found["predictions"], found["predictions within 30%"] = len(close), sum(close) / len(close)
    return found


def main() -> int:
    """Measure and write the rows, and return 1 if one has failed or is slower."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="ROW",
        default=[],
        help="rows to measure: MODEL, MODEL:BATCH, MODEL:training or level3",
    )
    parser.add_argument("--batch", choices=("small", "large", "both"), default="both", help="batch sizes for inference")
    parser.add_argument("--mode", choices=("inference", "training", "both"), default="both")
    parser.add_argument("--budget", type=float, default=BUDGET_S, metavar="SECONDS", help="budget of each search")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="SECONDS", help="time limit of each row")
    parser.add_argument(
        "--total", type=float, default=math.inf, metavar="SECONDS", help="stop all rows after this time"
    )
    parser.add_argument(
        "--at-once", type=int, default=AT_ONCE, metavar="N", help="rows that run at a time for each GPU"
    )
    parser.add_argument(
        "--autotune", action="store_true", help=f"also measure max-autotune, for {', '.join(AUTOTUNED)}"
    )
    parser.add_argument(
        "--uncompiled",
        action="store_true",
        help="search without compiling and CUDA graphs, and compare only with eager PyTorch",
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model on the CPU, to test the script")
    parser.add_argument(
        "--out", type=Path, help="JSON file for the results; rows that it already has are not measured again"
    )
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="folder for the log of each row")
    parser.add_argument(
        "--plans",
        type=Path,
        metavar="FOLDER",
        help="folder to which plans are saved; a row whose plan is there applies it instead of searching",
    )
    parser.add_argument(
        "--cache",
        type=Path,
        metavar="FOLDER",
        help="keep compiled code in this folder, so that a second run continues the tuning of a row that was cut off",
    )
    parser.add_argument("--row", nargs=3, metavar=("MODEL", "BATCH", "MODE"), help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--turns", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row is not None:
        return run_row(Job(options.row[0], int(options.row[1]), options.row[2]), options)
    if options.quick:
        chosen = [Job(QUICK, CASES[QUICK].batches[0], "inference"), Job(QUICK, 2, "training")]
    else:
        chosen = jobs(options.only, options.batch, options.mode)
        if unknown := [name for name in options.only if not any(job.named(name) for job in chosen)]:
            parser.error(f"no row is named {unknown[0]!r}: {', '.join(job.key for job in jobs([], 'both', 'both'))}")
    rows: list[Row] = []
    if options.out is not None and options.out.exists():
        rows = [row for row in json.loads(options.out.read_text())["results"] if row.get("done")]
    done = {Job(row["model"], row["batch"], row["mode"]) for row in rows}
    waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in chosen:
        if importlib.util.find_spec(CASES[job.name].package) is None:
            print(f"{job}: left out, {CASES[job.name].package} is not installed", flush=True)
        elif job not in done:
            waiting.put(job)
    gpus: list[int | None] = [None] if options.quick else list(range(torch.cuda.device_count()))
    if not gpus:
        parser.error("needs an NVIDIA GPU; --quick tests the script on the CPU")
    began, lock = time.perf_counter(), threading.Lock()

    def work(place: Place) -> None:
        while (left_s := options.total - (time.perf_counter() - began)) > LEAST_S:
            try:
                job = waiting.get_nowait()
            except queue.Empty:
                return
            row = row_of(job, place, left_s, options)
            with lock:
                rows.append(row)
                print(in_words(row), flush=True)
                if options.out is not None:
                    text = json.dumps({"torch": torch.__version__, "results": rows, "summary": summary(rows)}, indent=1)
                    partial_file = options.out.with_suffix(".partial")
                    partial_file.write_text(text + "\n")
                    partial_file.replace(options.out)

    with tempfile.TemporaryDirectory() as folder:
        workers = [threading.Thread(target=work, args=[place]) for place in places(gpus, options.at_once, Path(folder))]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    for what, value in summary(rows).items():
        print(f"{what}: {value:.3g}")
    return int(failed(rows, options.quick))


if __name__ == "__main__":
    sys.exit(main())
