"""Get this machine's ceilings for a program. Only the ceilings that the program needs are measured.

A program's needs are known after it has run: the precisions of its operators, and whether it copies between host and
device. So `analyze` measures after the run. A recording measures the ceilings that most programs need before its
program runs, while the device's memory is still free; after the run it measures only missing ceilings. Both in an
analysis and in a recording, operators above their roof raise the ceilings.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rooftop.analysis.profiling import Profile, Progress
from rooftop.analysis.raising import raised_and_kept
from rooftop.hardware import measure_ceilings
from rooftop.hardware.ceilings import Ceilings
from rooftop.hardware.defaults import usual_defaults
from rooftop.words import first_line

LIKELY = {"cpu": ("fp32", "bf16"), "cuda": ("fp32", "tf32", "bf16", "fp16")}
"""Precisions that a program probably needs. Other precisions take long to measure, because their products are slow:
float64, and float16 on a CPU.
"""


def likely_ceilings(device: torch.device) -> Ceilings:
    """Measure, before a program runs, the ceilings that it will probably need."""
    return measure_ceilings(device, precisions=LIKELY[device.type], transfers=True, links=False)


def machine_ceilings(profile: Profile, progress: Progress = lambda what, fraction: None) -> tuple[Ceilings, list[str]]:
    """The ceilings that a step needs, raised if its operators surpassed them, and notes for the report.

    A step needs the rates of its operators' precisions and of bfloat16, which advice may propose. A step that copies
    also needs the rates between host and device. Only missing ceilings are measured now.
    """
    precisions = {"bf16"}.union(*(op.record.cost.flops for op in profile.operators if op.record.cost is not None))
    transfers = profile.plain.has_transfers
    found = measure_ceilings(profile.device, progress=progress, precisions=precisions, transfers=transfers, links=False)
    return raised_and_kept(found, profile.operators, profile.device)


def completed_ceilings(likely: Ceilings, profile: Profile) -> tuple[Ceilings, list[str]]:
    """The ceilings of a program that has run: those measured before the run (`likely`), and the ceilings that were
    missing.

    The measurement needs memory that the program left free. If the measurement runs out of memory, the result is
    `likely`, with a note.
    """
    try:
        with _torch_as_before(likely):
            return machine_ceilings(profile)
    except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
        return likely, [f"The extra ceilings that this program needs could not be measured: {first_line(error)}"]


@contextmanager
def _torch_as_before(likely: Ceilings) -> Iterator[None]:
    """Within the block, use torch's default settings and, on a CPU, the number of threads with which `likely` was
    measured. Afterwards restore the settings that the program has made.
    """
    threads = torch.get_num_threads()
    if likely.kind == "cpu":
        torch.set_num_threads(likely.threads)
    try:
        with usual_defaults():
            yield
    finally:
        torch.set_num_threads(threads)
