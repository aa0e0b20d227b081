"""The ceilings of this machine that a program is compared with: only those that it needs are measured.

What a program needs is known when it has run: the precisions of its operators, and whether it copies between host and
device. `analyze` measures then. A recording measures before its program what most programs need, while the device's
memory is still free, and afterwards only what is missing. Either way, operators above their roof raise the ceilings.
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

LIKELY = {"cpu": ("fp32", "bf16"), "cuda": ("fp32", "tf32", "bf16", "fp16")}
"""Precisions that a program probably needs. The others take their time: float64 is slow, and so is float16 on a CPU."""


def likely_ceilings(device: torch.device) -> Ceilings:
    """The ceilings that a program probably needs which has not run yet."""
    return measure_ceilings(device, precisions=LIKELY[device.type], transfers=True, links=False)


def machine_ceilings(profile: Profile, progress: Progress = lambda what, fraction: None) -> tuple[Ceilings, list[str]]:
    """The ceilings that a step needs, raised by its operators; with notes for the reader.

    Besides the precisions of its operators these are the one that advice may propose, bfloat16, and the rates between
    host and device if it copies. Measured now are only those that nobody has measured.
    """
    precisions = {"bf16"}.union(*(op.record.cost.flops for op in profile.operators if op.record.cost is not None))
    copies = any("HtoD" in kernel.name or "DtoH" in kernel.name for kernel in profile.plain.kernels)
    found = measure_ceilings(profile.device, progress=progress, precisions=precisions, transfers=copies, links=False)
    return raised_and_kept(found, profile.operators, profile.device)


def completed_ceilings(likely: Ceilings, profile: Profile) -> tuple[Ceilings, list[str]]:
    """The ceilings of a program that has run, of which the likely ones were measured before it.

    What the program left of the device must do. If that is not enough, the ceilings are those of before, and a note
    says so.
    """
    try:
        with _torch_as_before(likely):
            return machine_ceilings(profile)
    except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
        reason = str(error).partition("\n")[0]
        return likely, [f"What this program needs beyond the usual ceilings could not be measured after it: {reason}"]


@contextmanager
def _torch_as_before(likely: Ceilings) -> Iterator[None]:
    """Threads as those ceilings had them; what the program has set is put back."""
    threads = torch.get_num_threads()
    if likely.kind == "cpu":
        torch.set_num_threads(likely.threads)
    try:
        with usual_defaults():
            yield
    finally:
        torch.set_num_threads(threads)
