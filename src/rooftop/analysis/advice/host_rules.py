"""Advice about host and device: launches, waits, transfers, data, batch size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from rooftop.analysis.findings import Findings, waits_for_device
from rooftop.analysis.report_contents import Advice
from rooftop.hardware.page_faults import KEEP_MEMORY, MANY
from rooftop.words import counted


def launch_gap(findings: Findings) -> list[Advice]:
    """Advise a CUDA graph, or a larger batch if the step cannot be captured. A CUDA graph and a larger batch remove the
    same gap, so only one of them is advised.

    In a replayed graph, each kernel starts right after the previous one. A graph cannot contain a step in which the
    host waits for values. For such a step a larger batch helps, because the host launches a larger batch in the same
    time as a smaller one, unless the host's own work grows with the batch.
    """
    if findings.ceilings.kind != "cuda" or findings.gaps.launch_gap_ms <= 0 or not findings.summary.busy_ms:
        return []
    return _graph(findings) if findings.capturable else _larger_batch(findings)


def _graph(findings: Findings) -> list[Advice]:
    kernels, gap_ms, wall_ms = findings.summary.kernels, findings.gaps.launch_gap_ms, findings.summary.wall_ms
    evidence = (
        f"launch gap {gap_ms:.2f} ms of {wall_ms:.2f} ms: the GPU waits while the host launches {kernels} kernels"
    )
    if findings.summary.samples and findings.batched and not findings.summary.device_bound:
        evidence += f"; a batch of {2 * findings.summary.samples} would hide part of this gap"
    if findings.refuses_capture:
        evidence += "; for this the optimizer needs capturable=True, and fused=True to launch no extra kernels"
    gain_ms = gap_ms - (findings.traced_more_ms or 0.0)
    return [
        Advice(
            "Replay the step from a CUDA graph",
            evidence + findings.said_of_tracing,
            gain_ms,
            'torch.compile(model, mode="reduce-overhead")',
            low_ms=gain_ms - (wall_ms - findings.quiet_wall_ms),
        )
    ]


def _larger_batch(findings: Findings) -> list[Advice]:
    wall_ms, busy_ms, samples = findings.summary.wall_ms, findings.summary.busy_ms, findings.summary.samples
    if not samples or not findings.batched or findings.summary.device_bound or findings.host_works:
        return []
    doubled_ms = max(wall_ms, 2 * busy_ms) / 2
    return [
        Advice(
            f"Double the batch to {2 * samples}",
            f"the GPU is busy for {busy_ms:.2f} ms of {wall_ms:.2f} ms and could do the work of two steps while the "
            "host launches one, if the GPU's memory holds both; the gain compares times for the same number of samples",
            wall_ms - doubled_ms,
        )
    ]


def host_synchronizations(findings: Findings) -> list[Advice]:
    """Advise against host waits for GPU values: after the host has waited for the GPU, the GPU waits for the host."""
    if findings.plain is None or not findings.plain.waiting_ms:
        return []
    places = Counter(
        f"{_short(op.record.name)} at {op.record.place}" for op in findings.operators if waits_for_device(op)
    )
    named = "; ".join(f"{place} ({count} times)" if count > 1 else place for place, count in places.most_common(4))
    return [
        Advice(
            "Do not wait for the GPU inside the step",
            f"the GPU was idle for {findings.plain.waiting_ms:.2f} ms after the host had waited for it"
            + (f": {named}" if named else ""),
            min(findings.plain.waiting_ms, findings.gaps.launch_gap_ms),
            "keep values on the GPU (torch.where, masks), log them every few steps, copy with non_blocking=True",
        )
    ]


def _short(name: str) -> str:
    return {"aten::_local_scalar_dense": ".item()"}.get(name, name.removeprefix("aten::"))


def unpinned_transfers(findings: Findings) -> list[Advice]:
    """Advise pinned memory: copies from pageable memory go through a buffer of the driver, copies from pinned memory do
    not.
    """
    if findings.plain is None:
        return []
    rates, gain_ms, total_ms, count = findings.ceilings.transfers, 0.0, 0.0, 0
    for kernel in findings.plain.kernels:
        if "Pageable" not in kernel.name:
            continue
        direction = "host_to_device" if "HtoD" in kernel.name else "device_to_host"
        pageable, pinned = rates.get(f"{direction}_pageable", 0.0), rates.get(f"{direction}_pinned", 0.0)
        if pageable and pinned:
            gain_ms += kernel.ms * max(0.0, 1 - pageable / pinned)
        total_ms += kernel.ms
        count += 1
    places = dict.fromkeys(
        op.record.place for op in findings.operators if op.record.place and any("Pageable" in k for k in op.kernels)
    )
    return [
        Advice(
            "Pin the host's memory",
            f"{counted(count, 'transfer')} between the GPU and host memory that is not pinned: {total_ms:.2f} ms"
            + (f" ({', '.join(list(places)[:4])})" if places else ""),
            gain_ms,
            "DataLoader(..., pin_memory=True); x.to(device, non_blocking=True)",
        )
    ]


def data_loading(findings: Findings) -> list[Advice]:
    """Advise on a loader whose batches are not ready when the step needs them."""
    if findings.plain is None:
        return []
    # the loading time was measured in a single step, which may have been slow, so it may exceed the wall time
    loading_ms = gain_ms = min(findings.plain.loading_ms, findings.summary.wall_ms)
    if findings.on_gpu:  # loading that overlaps the GPU's work is already hidden
        gain_ms = min(loading_ms, findings.gaps.launch_gap_ms)
    return [
        Advice(
            "Load data in parallel with the step",
            f"the step waits {loading_ms:.2f} ms of {findings.summary.wall_ms:.2f} ms for its DataLoader",
            gain_ms,
            "DataLoader(..., num_workers=4, persistent_workers=True, prefetch_factor=4)",
        )
    ]


def freed_memory(findings: Findings) -> list[Advice]:
    """Advise keeping freed memory: on a CPU, malloc returns pages to the system and requests them again in each
    step."""
    faults, threads = findings.faults, findings.ceilings.threads
    if faults.count < MANY:
        return []
    return [
        Advice(
            "Keep freed memory in the process",
            f"each step takes {faults.count:,.0f} pages of memory from the system again; the system needs "
            f"{faults.system_ms:.2f} ms for them, all threads together",
            faults.step_ms(threads),
            KEEP_MEMORY,
            low_ms=faults.system_ms / threads,
        )
    ]


HOST_RULES: tuple[Callable[[Findings], list[Advice]], ...] = (
    launch_gap,
    host_synchronizations,
    unpinned_transfers,
    data_loading,
    freed_memory,
)
