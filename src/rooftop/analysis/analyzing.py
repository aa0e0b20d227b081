"""`rooftop.analyze`: measure a step, compare it with its roofs, and propose changes that close the gaps."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from rooftop.analysis.machine_ceilings import machine_ceilings
from rooftop.analysis.profiling import Progress, profile_program
from rooftop.analysis.program import Program
from rooftop.analysis.ranks.lockstep import SharedProgram, several_ranks
from rooftop.analysis.ranks.measuring import measure_ranks
from rooftop.analysis.ranks.recorded import with_ranks
from rooftop.analysis.report import Report
from rooftop.analysis.reporting import report_of
from rooftop.cost.accounting import tensors_in
from rooftop.hardware.ceilings import Ceilings, require_ceilings


def analyze(
    target: Callable[..., Any],
    *args: Any,
    train: bool = False,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    compile: bool | str = False,
    trace: str | os.PathLike[str] | None = None,
    ceilings: Ceilings | None = None,
    name: str | None = None,
    progress: Progress = lambda what, fraction: None,
    **kwargs: Any,
) -> Report:
    """Measure how far one step of a model is from the limits of this machine, and why.

    The model runs on its parameters' device. The arguments are neither moved nor cast. After the analysis, the model's
    weights, buffers, gradients and train flags, the arguments and the random state are as before. If `optimizer` is
    given, its steps change the weights. If the step changes an argument (a cache of keys and values), each run begins
    with the original argument. NumPy arrays are not restored.

    Args:
        target: an `nn.Module` or any other callable. A module runs in eval mode without gradients; with `train=True`
            it runs forward and backward in training mode. Any other callable is called directly.
        *args, **kwargs: arguments of the program.
        train: also run the backward pass.
        optimizer: also step this optimizer.
        loss: computes the loss from the output. Without `loss`, a one-element output is the loss; other outputs get
            fixed random gradients.
        compile: compile the target first: True, or a mode of `torch.compile` ("reduce-overhead").
        trace: also write the profiler's trace of one step to this file, for Perfetto or chrome://tracing.
        ceilings: ceilings to compare with. If None, the ceilings that the step needs are measured on this machine
            (cached, under 30 s the first time), and any ceiling that an operator has surpassed is raised.
        name: the target's name in the report.
        progress: called with (the current activity, fraction done).

    Raises:
        TypeError, ValueError: an argument is wrong.
        CeilingsFileError: the ceilings are for another kind of device.
        ModelRunError: the model raised or ran out of memory.

    Example:
        >>> report = rooftop.analyze(model, x)
        >>> print(report.table())
        >>> report.to_html("report.html")
    """
    program_of = SharedProgram if several_ranks() else Program
    program = program_of(target, args, kwargs, train=train, optimizer=optimizer, loss=loss, compile=compile)
    if ceilings is not None:
        require_ceilings(ceilings, "analyze").require_kind(program.device.type)
    _require_data(program)
    mode = "training" if train else "inference" if program.module is not None else "callable"

    def report() -> Report:
        profile = profile_program(program, lambda what, done: progress(what, 0.5 * done), trace)
        against, notes = ceilings, list[str]()
        if against is None:
            against, notes = machine_ceilings(profile, lambda what, done: progress(what, 0.5 + 0.5 * done))
        notes += program.notes
        return report_of(
            profile,
            against,
            target=name or program.name,
            mode=mode,
            inputs=list(tensors_in([args, kwargs])),
            samples=program.samples,
            batched=program.is_batched,
            root_type=type(target).__name__ if program.module is not None else "step",
            notes=notes,
        )

    if not isinstance(program, SharedProgram):
        return report()
    # rank 0 measures while the other ranks run the same steps; every rank gets rank 0's report
    of_first = program.lead(report)
    ranks = measure_ranks(program, program.device)
    assert ranks is not None
    return with_ranks(of_first, ranks)


def _require_data(program: Program) -> None:
    """Refuse fake tensors: they have shapes but no data, so nothing can be measured on them.

    Raises:
        ValueError: the program has fake tensors.
    """
    parameters = program.module.parameters() if program.module is not None else ()
    if any(isinstance(tensor, FakeTensor) for tensor in (*parameters, *tensors_in([program.args, program.kwargs]))):
        raise ValueError(
            f"analyze measures, but {program.name} or its input is a fake tensor, which has no data: use "
            "rooftop.predict, which needs no data"
        )
