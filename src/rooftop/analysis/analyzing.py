"""`rooftop.analyze`: measure a step, put its floors beside it, say what would close the gaps."""

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
    """How far one step of a model is from what this machine can do, and why.

    The model runs where its parameters are, on the arguments as they are. Its weights, buffers, gradients and train
    flags, the arguments and the random state are the same afterwards (with `optimizer`, its steps do change the
    weights). Where the step changes an object that it is given (a cache of keys and values), each run begins with the
    object as given.

    Args:
        target: an `nn.Module`, run in eval mode without gradients, or with `train=True` in training mode, forward and
            backward; or any other callable, run as it is.
        *args, **kwargs: its arguments.
        train: also run the backward pass.
        optimizer: also step this optimizer.
        loss: makes the loss from the output. Without it a one-element output is the loss; others are sent back with
            fixed random gradients.
        compile: compile the target with `torch.compile` first: True, or one of its modes ("reduce-overhead").
        trace: also write the profiler's trace of one step to this file, for Perfetto or chrome://tracing.
        ceilings: what to compare with; None measures what the step needs of this machine (cached, under 30 s the first
            time) and raises what an operator has surpassed.
        name: what the report calls the target.
        progress: called with (what is being done, fraction done).

    Raises:
        TypeError, ValueError: wrong arguments.
        CeilingsFileError: the ceilings are those of another kind of device.
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
    of_first = program.lead(report)  # rank 0 measures, the others run each of its steps with it; all get its report
    ranks = measure_ranks(program, program.device)
    assert ranks is not None
    return with_ranks(of_first, ranks)


def _require_data(program: Program) -> None:
    """Fake tensors have shapes and no data: nothing can be measured on them.

    Raises:
        ValueError: the program has some.
    """
    parameters = program.module.parameters() if program.module is not None else ()
    if any(isinstance(tensor, FakeTensor) for tensor in (*parameters, *tensors_in([program.args, program.kwargs]))):
        raise ValueError(
            f"analyze measures, but {program.name} or its input is a fake tensor, which has no data: "
            "rooftop.predict needs none"
        )
