"""Hardware counters of every kernel of one step, from Nsight Compute (`ncu`).

Rooftop computes the bytes and flops that a step needs. The chip's own counters measure the bytes that the kernels
moved, and how busy the kernels kept the chip:

    [sys.executable, "-m", "rooftop", "analyze", "resnet50", "--counted-step"]     a program that calls `counted_step`
      -> ncu runs it and counts between cudaProfilerStart and cudaProfilerStop     `hardware_counters`
      -> one `KernelCounters` for each launch, one `KernelRow` for each kernel     `parse_counters`, `kernel_rows`

ncu runs the kernels one at a time and empties the caches before each. So a kernel finds its inputs in DRAM, although in
the real step the inputs may still be in L2. A kernel's last results may still be in L2 when ncu reads the counters. So
a kernel may move fewer bytes than required. If a kernel moves far more bytes than required, a better kernel would avoid
that traffic.
"""

from __future__ import annotations

import csv
import math
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from rooftop.analysis.profiling import COMPILED_WARM_UP_STEPS, WARM_UP_STEPS
from rooftop.analysis.program import Program
from rooftop.errors import MeasurementError

TIMEOUT_S = 900.0

# Field of `KernelCounters` -> metric. All metrics exist from Turing to Blackwell, but GeForce Blackwell counts no DRAM
# bytes. An H200 counts all these metrics in one pass. sm__throughput, the usual measure of the multiprocessors, would
# need nine passes. Before each pass, ncu restores all memory that the kernel may have written.
METRICS = {
    "ms": "gpu__time_duration.sum",
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_written_bytes": "dram__bytes_write.sum",
    "l2_bytes": "lts__t_bytes.sum",
    "issue_percent": "sm__inst_executed.avg.pct_of_peak_sustained_elapsed",
    "tensor_percent": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "occupancy_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
    "shared_bytes": "launch__shared_mem_per_block",
}
SCALES = {"ms": 1e-6}  # ncu's base units are ns and bytes

OPTIONS = (
    *("--csv", "--page", "raw", "--print-units", "base"),
    *("--print-kernel-base", "mangled"),  # Rooftop demangles the names, as PyTorch's profiler does
    *("--profile-from-start", "off"),
    *("--target-processes", "application-only"),  # profile only the program, without the compiler's workers
    *("--graph-profiling", "node"),  # profile the kernels of a CUDA graph one by one
    *("--clock-control", "none"),  # keep the clocks as in the other measurements
    *("--cache-control", "all"),
)

NO_GPU = "hardware counters need an NVIDIA GPU, and torch {torch} can use none on this machine"
NO_NCU = (
    "hardware counters need ncu (NVIDIA Nsight Compute), and it is neither on PATH nor in $CUDA_HOME/bin, "
    "/usr/local/cuda/bin or /opt/nvidia/nsight-compute; it comes with the CUDA toolkit, or alone: "
    "sudo apt-get install cuda-nsight-compute-{cuda} (from NVIDIA's repository)"
)
NO_PERMISSION = (
    "the driver lets only administrators read hardware counters (ERR_NVGPUCTRPERM). For one run: run the same command "
    "as root; in a container: start the container with --cap-add=SYS_ADMIN; for every user of this machine: "
    "echo 'options nvidia NVreg_RestrictProfilingToAdminUsers=0' | sudo tee /etc/modprobe.d/nvidia-profiling.conf, "
    "then sudo update-initramfs -u and reboot"
)


@dataclass(frozen=True)
class KernelCounters:
    """One launch of a kernel. A counter that this chip lacks is nan.

    Attributes:
        name: the kernel's name, as in PyTorch's profiler and `OperatorRow.kernels`.
        ms: duration, with empty caches at its start.
        dram_read_bytes, dram_written_bytes: bytes moved between L2 and DRAM.
        l2_bytes: bytes moved through L2, both read and written.
        issue_percent: executed instructions, as a share of the largest possible number.
        tensor_percent: time in which the tensor cores worked, as a share of the duration.
        occupancy_percent: resident warps of an active multiprocessor, as a share of the largest possible number.
        registers: registers of each thread.
        shared_bytes: shared memory of each block.
        grid, block: (x, y, z), in blocks and in threads.
    """

    name: str
    ms: float
    dram_read_bytes: float
    dram_written_bytes: float
    l2_bytes: float
    issue_percent: float
    tensor_percent: float
    occupancy_percent: float
    registers: float
    shared_bytes: float
    grid: tuple[int, ...]
    block: tuple[int, ...]

    @property
    def dram_bytes(self) -> float:
        return self.dram_read_bytes + self.dram_written_bytes


@dataclass(frozen=True)
class KernelRow:
    """All launches of the kernels with one name: totals, and means weighted by time."""

    name: str
    launches: tuple[KernelCounters, ...]

    @property
    def calls(self) -> int:
        return len(self.launches)

    @property
    def ms(self) -> float:
        return sum(launch.ms for launch in self.launches)

    @property
    def dram_bytes(self) -> float:
        return sum(launch.dram_bytes for launch in self.launches)

    @property
    def l2_bytes(self) -> float:
        return sum(launch.l2_bytes for launch in self.launches)

    @property
    def dram_rate(self) -> float:
        """Bytes/s between L2 and DRAM while the kernels ran."""
        return 1e3 * self.dram_bytes / self.ms if self.ms > 0 else math.nan

    @property
    def issue_percent(self) -> float:
        return self._mean("issue_percent")

    @property
    def tensor_percent(self) -> float:
        return self._mean("tensor_percent")

    @property
    def occupancy_percent(self) -> float:
        return self._mean("occupancy_percent")

    def _mean(self, name: str) -> float:
        total = sum(launch.ms * getattr(launch, name) for launch in self.launches)
        return total / self.ms if self.ms > 0 else math.nan

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: the totals and the launches, None for counters that this chip lacks."""
        totals = ("calls", "ms", "dram_bytes", "l2_bytes", "issue_percent", "tensor_percent", "occupancy_percent")
        plain = {"name": self.name, **{name: getattr(self, name) for name in totals}}
        launches = [{k: v for k, v in asdict(launch).items() if k != "name"} for launch in self.launches]
        return {**_without_nan(plain), "launches": [_without_nan(launch) for launch in launches]}


def _without_nan(plain: dict[str, Any]) -> dict[str, Any]:
    return {name: None if isinstance(v, float) and math.isnan(v) else v for name, v in plain.items()}


def hardware_counters(arguments: Sequence[str], timeout_s: float = TIMEOUT_S) -> list[KernelCounters]:
    """Run a command under ncu and return the hardware's counts for its step, one entry for each kernel launch.

    PyTorch's cached GPU memory is released first, because the command needs memory.

    Args:
        arguments: a command line that calls `counted_step` once, e.g. [sys.executable, "-m", "rooftop", "analyze",
            "resnet50", "--counted-step"].
        timeout_s: time limit of the command. For a step of thousands of kernels, ncu takes minutes.

    Raises:
        MeasurementError: there is no GPU, no ncu or no permission to read the counters. The error is also raised if the
            command failed, ran no kernel or did not finish in time. The message says what to do.
    """
    if not torch.cuda.is_available():
        raise MeasurementError(NO_GPU.format(torch=torch.__version__))
    ncu = find_ncu()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory(prefix="rooftop-counters-") as folder:
        log = Path(folder, "ncu.csv")
        metrics = ",".join(METRICS.values())
        command = [ncu, *OPTIONS, "--metrics", metrics, "--log-file", str(log), *arguments]
        status, output = _run(command, timeout_s)
        found = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    if "ERR_NVGPUCTRPERM" in found + output:
        raise MeasurementError(NO_PERMISSION)
    if status != 0:
        raise MeasurementError(f"hardware counters: {ncu} ended with status {status}: {_complaint(found, output)}")
    launches = parse_counters(found)
    if not launches:
        raise MeasurementError(f"hardware counters: the step ran no kernel on a GPU: {_complaint(found, output)}")
    return launches


def find_ncu() -> str:
    """Path of ncu: on PATH, in the CUDA toolkit, or the newest separate installation.

    Raises:
        MeasurementError: ncu is not installed.
    """
    toolkits = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    folders = [f"{toolkit}/bin" for toolkit in (*toolkits, "/usr/local/cuda")]
    alone = sorted(Path("/opt/nvidia/nsight-compute").glob("*"), key=_version, reverse=True)
    for path in (None, *folders, *map(str, alone)):
        found = shutil.which("ncu", path=path)
        if found is not None:
            return found
    raise MeasurementError(NO_NCU.format(cuda=(torch.version.cuda or "13.0").replace(".", "-")))


def _version(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", path.name)]


def _run(command: Sequence[str], timeout_s: float) -> tuple[int, str]:
    """(exit status, stdout and stderr) of a command. At the time limit or after an exception, the command and its child
    processes are killed."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    with process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise MeasurementError(
                f"hardware counters: ncu did not finish within {timeout_s:g} s, since it takes long for each kernel: "
                "try a model with fewer layers"
            ) from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output


def _complaint(found: str, output: str) -> str:
    """The text of an error: ncu's first messages and the last line of the program's output."""
    lines = [line for line in (found + "\n" + output).splitlines() if line.startswith(("==ERROR==", "==WARNING=="))]
    last = [line for line in output.splitlines() if line.strip() and not line.startswith("==")][-1:]
    words = " ".join(line.split("==", 2)[-1].strip().removeprefix("rooftop: error: ") for line in [*lines[:2], *last])
    return words or "it said nothing"


def parse_counters(text: str) -> list[KernelCounters]:
    """The launches in the output of `ncu --csv --page raw --print-units base`, in order.

    The first line names the columns, the second their units; every other line is a launch. Lines that begin with "=="
    are messages.

    Raises:
        MeasurementError: the table lacks a needed column.
    """
    lines = [line for line in text.splitlines() if line and not line.startswith("==")]
    table = csv.DictReader(lines)
    missing = {"ID", "Kernel Name", "Grid Size", "Block Size", METRICS["ms"]} - set(table.fieldnames or ())
    if lines and missing:
        raise MeasurementError(f"hardware counters: ncu's table has no column {', '.join(sorted(missing))}")
    return [_launch(row) for row in table if row["ID"]]


def _launch(row: dict[str, str]) -> KernelCounters:
    values = {field: SCALES.get(field, 1.0) * _number(row.get(metric)) for field, metric in METRICS.items()}
    return KernelCounters(
        name=profiler_name(row["Kernel Name"]),
        grid=_three(row["Grid Size"]),
        block=_three(row["Block Size"]),
        **values,
    )


def _number(text: str | None) -> float:
    """ "1,234.5" as a number; nan for a missing value ("", "n/a")."""
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return math.nan


def _three(text: str) -> tuple[int, ...]:
    """Parse "(132, 1, 1)"."""
    return tuple(int(number) for number in re.findall(r"\d+", text))


LONGEST_DEMANGLED = 1024


def profiler_name(symbol: str) -> str:
    """A kernel's symbol as PyTorch's profiler shows it: demangled, unless the mangled symbol has more than 1024
    characters."""
    return symbol if len(symbol) > LONGEST_DEMANGLED else torch._C._demangle(symbol)


def kernel_rows(launches: Iterable[KernelCounters]) -> list[KernelRow]:
    """One row for all launches of kernels with the same name, the longest time first."""
    groups: dict[str, list[KernelCounters]] = defaultdict(list)
    for launch in launches:
        groups[launch.name].append(launch)
    rows = [KernelRow(name, tuple(group)) for name, group in groups.items()]
    return sorted(rows, key=lambda row: -row.ms)


# ---- in the counted program ----------------------------------------------------------------------------------------


def counted_step(program: Program) -> None:
    """Warm a program up as in `analyze`, then run one more step, in which ncu counts.

    Without ncu, this runs an ordinary step. The program's state is preserved.

    Raises:
        ModelRunError: the program raised.
        MeasurementError: the program does not run on a GPU.
    """
    if program.device.type != "cuda":
        raise MeasurementError(f"hardware counters exist only on a GPU, but {program.name} runs on {program.device}")
    with program.preserved():
        for _ in range(COMPILED_WARM_UP_STEPS if program.compiled else WARM_UP_STEPS):
            program.step()
        torch.cuda.synchronize(program.device)
        torch.cuda.profiler.start()
        try:
            program.step()
            torch.cuda.synchronize(program.device)
        finally:
            torch.cuda.profiler.stop()
