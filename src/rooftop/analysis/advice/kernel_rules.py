"""Rules about kernels that could be merged, and about kernels that are slower than similar ones."""

from __future__ import annotations

from collections import defaultdict

from rooftop.analysis.advice.compiler_layouts import compiler_lays_out_channels_last
from rooftop.analysis.advice.format_rules import channels_last_ms
from rooftop.analysis.advice.fusion import fused
from rooftop.analysis.advice.shape_rules import padded_ms
from rooftop.analysis.findings import LEAST_GAIN, Findings
from rooftop.analysis.formats import percent_text
from rooftop.analysis.report_contents import Advice, OperatorRow

CALLED_MS = 0.1
"""Assumed time in ms that the CPU takes to check the guards of a compiled function each time it is called, before its
kernels run."""
AHEAD = 0.5
"""If the host needs less than this share of the GPU's busy time after compilation, the host stays ahead of the GPU in
the compiled step, too. (The compiled step launches fewer kernels but checks guards, so its host time may exceed
the present host time.)"""


def pointwise_fusion(findings: Findings) -> list[Advice]:
    """Advise torch.compile for operators that it would fuse into kernels that move less memory (see `fusion`).

    torch.compile also changes the layout of images and pads matrix products; the gain includes both. This rule advises
    the CUDA graph mode of torch.compile if the step can be captured and the host is the bottleneck, or would be with
    faster kernels.
    """
    found = fused(findings.operators, findings.ceilings)
    if not found.operators or findings.traced_more_ms is None:
        return []
    kernels = f"{found.kernels} fused kernels" if found.kernels > 1 else "one fused kernel"
    evidence = (
        f"{found.operators} activations, sums, norms, casts and copies take {found.now_ms:.2f} ms; {kernels} would "
        f"take {found.after_ms:.2f} ms and move only values that other kernels need"
    )
    labelled_ms = found.now_ms - found.after_ms
    laid_out_ms, padding_ms = saved_by_layout_ms(findings), saved_by_padding_ms(findings)
    for ms, words in ((laid_out_ms, "lays images out channels last"), (padding_ms, "pads matrix products")):
        if ms > 0:
            labelled_ms += ms
            evidence += f"; the compiler also {words}: {ms:.2f} ms of the gain"
    busy_ms = findings.summary.busy_ms - findings.undisturbed_ms(labelled_ms)
    keeps_ahead = findings.summary.device_bound and (findings.host_ms or 0.0) < AHEAD * busy_ms
    replayed = findings.on_gpu and findings.capturable and not keeps_ahead
    if replayed:
        saved_ms = findings.saved_in_graph_ms(labelled_ms)
        evidence += f"; replay from a CUDA graph also removes the launch gap of {findings.gaps.launch_gap_ms:.2f} ms"
        if findings.summary.device_bound and findings.host_ms is not None:
            evidence += f" (without a graph, the host's {findings.host_ms:.2f} ms for launches might set the pace)"
    else:
        saved_ms = findings.saved_ms(labelled_ms, -findings.launched_ms(found.operators - found.kernels))
    return [
        Advice(
            "Fuse pointwise operators into their neighbours",
            evidence + findings.said_of_tracing,
            saved_ms - (findings.traced_more_ms or 0.0) - (0.0 if findings.on_gpu else CALLED_MS),
            'torch.compile(model, mode="reduce-overhead")' if replayed else "torch.compile(model)",
        )
    ]


def saved_by_layout_ms(findings: Findings) -> float:
    """Time in ms that a step saves in convolutions and poolings if torch.compile stores images channels last; 0 if it
    does not store them so."""
    if not compiler_lays_out_channels_last(findings.operators, findings.on_gpu):
        return 0.0
    after = channels_last_ms(findings)
    # only convolutions and poolings: what other operators gain is part of the gain of fusing (`fused`)
    return sum(
        op.measured_ms - after[id(op)]
        for op in findings.operators
        if id(op) in after and any(part in op.record.name for part in ("convolution", "max_pool2d"))
    )


def saved_by_padding_ms(findings: Findings) -> float:
    """Time in ms that a step saves if torch.compile pads matrix products. It pads only products that become faster."""
    after = padded_ms(findings)
    return sum(op.measured_ms - after[id(op)] for op in findings.operators if id(op) in after)


def uneven_kernels(findings: Findings) -> list[Advice]:
    """Advise on operators that are slow for some shapes: those whose percent of roof is below the 75th percentile over
    the same operator's shapes.
    """
    families: dict[tuple[str, str], list[OperatorRow]] = defaultdict(list)
    for row in findings.rows:
        if row.percent_of_roof is not None and not row.flagged and row.bound != "launch":
            families[row.name, row.phase].append(row)
    advice = []
    for (name, phase), rows in families.items():
        if len(rows) < 3:
            continue
        attainable = sorted(row.percent_of_roof or 0.0 for row in rows)[int(0.75 * len(rows))]
        slow = [row for row in rows if (row.percent_of_roof or 0.0) < attainable]
        time_ms = sum(row.measured_ms for row in slow)
        gain_ms = time_ms - sum(100 * row.roof_ms / attainable for row in slow)
        if not slow:
            continue
        advice.append(
            Advice(
                f"Speed up {name.split('::')[-1]} ({phase})",
                f"{sum(row.calls for row in slow)} calls take {time_ms:.2f} ms at "
                f"{percent_text(100 * sum(row.roof_ms for row in slow) / time_ms)} of roof; a quarter of the "
                f"operator's shapes reach {percent_text(attainable)} in this run",
                findings.saved_ms(gain_ms),
            )
        )
    return advice


def layer_norms(findings: Findings) -> list[Advice]:
    """Advise Rooftop's layer norm, timed now on the shapes of the step."""
    if findings.ceilings.kind != "cuda" or findings.plain is None:
        return []
    rows = [row for row in findings.rows if row.name in LAYER_NORMS and row.measured_ms > 0]
    if sum(row.measured_ms - row.roof_ms for row in rows) < LEAST_GAIN * findings.summary.wall_ms:
        return []  # layer norms at their roof cannot gain enough to be worth timing
    from rooftop.analysis.advice.alternatives import layer_norms_ms

    now_ms, times_ms = sum(row.measured_ms for row in rows), layer_norms_ms(rows, findings.device)
    ours_ms = sum(min(row.measured_ms, ms) for row, ms in zip(rows, times_ms, strict=True))
    roof_ms = sum(row.roof_ms for row in rows)
    return [
        Advice(
            "Use rooftop.kernels.layer_norm",
            f"{sum(row.calls for row in rows)} layer norms take {now_ms:.2f} ms at {100 * roof_ms / now_ms:.0f}% of "
            f"roof; rooftop.kernels.layer_norm, timed on these shapes here, reaches {100 * roof_ms / ours_ms:.0f}%",
            findings.saved_ms(now_ms - ours_ms),
            "from rooftop.kernels import layer_norm",
        )
    ]


LAYER_NORMS = ("aten::native_layer_norm", "aten::native_layer_norm_backward")
