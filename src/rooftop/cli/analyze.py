"""`rooftop analyze`: how far a model is from the limits of this machine, and why."""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any

import click
import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor
from torch.nn.functional import cross_entropy

from rooftop.analysis import Report, analyze, fake_tensors, predict
from rooftop.analysis.counters import KernelCounters, KernelRow, counted_step, hardware_counters, kernel_rows
from rooftop.analysis.counters_table import counters_table
from rooftop.analysis.program import Program
from rooftop.analysis.ranks.lockstep import distributed, first_rank, on_all_ranks, process_group, several_ranks
from rooftop.analysis.scripts import ScriptRun, run_script
from rooftop.analysis.text import renderable
from rooftop.cli.consoles import output_console
from rooftop.cli.device_option import pick_device
from rooftop.cli.outputs import STANDARD_OUTPUT, check_outputs, prints_aside
from rooftop.cli.progress import progress_bar
from rooftop.cli.targets import DTYPES, OTHER_INPUTS, Target, resolve_target
from rooftop.cli.words import Words
from rooftop.errors import CeilingsFileError, InputError, MeasurementError, ModelRunError, TargetError
from rooftop.hardware.ceilings import Ceilings, ceilings_of


def run(
    words: Words,
    target: str,
    script_arguments: tuple[str, ...],
    inputs: tuple[str, ...],
    train: bool,
    device: str | None,
    dtype: str | None,
    channels_last: bool,
    compile_mode: str | None,
    machine: str | None,
    ceilings: Path | None,
    trace: Path | None,
    counters: bool,
    step_only: bool,
    json_path: Path | None,
    output: Path | None,
    no_html: bool,
    rows: int,
) -> int | None:
    """Run the command that `rooftop.cli.commands.analyze:command` describes."""
    if no_html and output is not None:
        raise click.UsageError(f"--no-html writes no page, and -o names one ({output}): leave out one of them")
    html_path = None if no_html else output or _usual_page(target, train, machine)
    if not first_rank():  # only the first rank writes and prints
        json_path = html_path = trace = None
    check_outputs({"HTML": [html_path], "JSON": [trace]}, json_path)
    if trace is not None and trace.exists() and not trace.is_file():
        raise click.BadParameter(f"{trace} is not a regular file", param_hint="--trace")
    if html_path is not None:
        _check_plotly()
    _check_combination(target, script_arguments, machine, compile_mode, trace, counters)
    if machine is not None:
        _check_prediction({"--channels-last": channels_last, "--ceilings": ceilings, "--device": device})
    if target.endswith(".py"):
        _check_script_options(
            target, {"--input": inputs, "--train": train, "--dtype": dtype, "--channels-last": channels_last}
        )
    given_ceilings = Ceilings.load(ceilings) if ceilings is not None else None
    kind = DTYPES[dtype] if dtype else None
    if step_only:
        found = resolve_target(target, inputs, pick_device(device), kind, channels_last)
        training = _training(found) if train else {}
        counted_step(Program(found.model, found.args, dict(found.kwargs), **training, compile=compile_mode or False))
        return None
    if target.endswith(".py"):
        show = partial(_show_script, json_path=json_path, html_path=html_path, trace=trace, rows=rows)
        run = run_script(
            target,
            script_arguments,
            device=pick_device(device),
            ceilings=given_ceilings,
            trace=trace,
            before_exit=show,
        )
        try:
            show(run)
        finally:
            if words.ends_process:  # restore the script's sys.argv, sys.path etc. for its threads and exit functions
                run.resume()
        return run.status
    launches = _counted(words) if counters else []
    with prints_aside(json_path), progress_bar() as progress, _naming_the_inputs():
        if machine is not None:
            report = _predicted(target, inputs, train, kind, machine)
        else:
            with process_group(pick_device(device)) as where, _told_once():
                found = _on_each_rank(lambda: resolve_target(target, inputs, where, kind, channels_last))
                report = analyze(
                    distributed(found.model, where) if train else found.model,
                    *found.args,
                    **_keywords(found, analyze),
                    **(_training(found) if train else {}),
                    compile=compile_mode or False,
                    trace=trace,
                    ceilings=given_ceilings,
                    name=target,
                    progress=progress,
                )
    if not first_rank():
        return None
    _show(report, json_path, html_path, trace, rows, kernel_rows(launches) if counters else None)
    return None


def _show(
    report: Report,
    json_path: Path | None,
    html_path: Path | None,
    trace: Path | None,
    rows: int,
    counted: list[KernelRow] | None = None,
) -> None:
    """Write the files, print the table, and name the written files. With `--json -`, the JSON alone is printed."""
    if html_path is not None:
        report.to_html(html_path)
    if json_path == STANDARD_OUTPUT:
        click.echo(json.dumps(report.to_dict(), indent=1))
        return
    if json_path is not None:
        report.to_json(json_path)
    console = output_console()
    console.print(renderable(report, rows))
    if counted is not None:
        console.print(counters_table(counted, report, rows))
    for what, path in (("report", json_path), ("report", html_path), ("trace", trace)):
        if path is not None and path.exists():  # without enough steps there is no trace, and a note says so
            click.echo(f"{what}: {path}")


def _usual_page(target: str, train: bool, machine: str | None) -> Path:
    """The default path of the page. Training and prediction have their own, so that they keep a measured page."""
    parts = [target, *(["training"] if train else []), *(["on", Path(machine).stem] if machine else [])]
    return Path(f"rooftop-{re.sub(r'[^A-Za-z0-9_.-]+', '-', '-'.join(parts))}.html")


def _show_script(run: ScriptRun, json_path: Path | None, html_path: Path | None, trace: Path | None, rows: int) -> None:
    """Show the report of a script. If the script failed, first print the traceback as Python does.

    Raises:
        InputError: the script succeeded, but there is nothing to report.
        ModelRunError: the script raised.
        KeyboardInterrupt: the script was interrupted.
    """
    if isinstance(run.error, SystemExit) and not isinstance(run.error.code, (int, NoneType)):
        with suppress(Exception):  # like Python, print nothing if the value cannot be printed
            click.echo(str(run.error.code), err=True)
    if run.traceback:
        click.echo(run.traceback, err=True, nl=False)
    if run.report is not None:
        _show(run.report, json_path, html_path, trace, rows)
    if isinstance(run.error, KeyboardInterrupt):
        raise run.error
    if run.error is not None and not isinstance(run.error, SystemExit):
        raise ModelRunError(run.problem) from run.error
    if run.report is None and first_rank():
        if run.status == 0:
            raise InputError(run.problem)
        click.echo(f"rooftop: no report: {run.problem}", err=True)


@contextmanager
def _naming_the_inputs() -> Iterator[None]:
    """Add to an error of the model how to give it other inputs."""
    try:
        yield
    except ModelRunError as error:
        if "ran out of memory" in str(error):
            raise
        raise ModelRunError(f"{error}. {OTHER_INPUTS}") from error.__cause__


def _on_each_rank(work: Callable[[], Target]) -> Target:
    """Run a function and return its result. If it fails on any of several ranks, all ranks raise the same
    MeasurementError, which names the rank that failed earliest."""
    if not several_ranks():
        return work()
    here: list[Target] = []
    on_all_ranks(lambda: here.append(work()))  # exchange only success or failure: a target may not be picklable
    return here[0]


@contextmanager
def _told_once() -> Iterator[None]:
    """If one rank fails, report this only once: the failed rank prints the error, and the other ranks end silently.

    The failed rank prints before it ends its process group. Ending the group may wait, and meanwhile another rank may
    end. torchrun then kills all ranks, so a message printed after the wait could be lost.
    """
    try:
        yield
    except MeasurementError as error:
        named = re.match(r"rank (\d+) of \d+ failed", str(error))
        if named is None or not several_ranks() or "--debug" in sys.argv:
            raise
        if int(named[1]) == dist.get_rank():
            click.echo(f"rooftop: error: {error}", err=True)
        raise click.exceptions.Exit(1) from error


def _counted(words: Sequence[str]) -> list[KernelCounters]:
    """Repeat this command for one step in a second process, and return the hardware counters that ncu reads there."""
    with Console(stderr=True).status("Nsight Compute counts each kernel of one step"):
        verb = words.index("analyze") + 1
        return hardware_counters([sys.executable, "-m", "rooftop", *words[:verb], "--counted-step", *words[verb:]])


def _check_combination(
    target: str,
    arguments: Sequence[str],
    machine: str | None,
    compile_mode: str | None,
    trace: Path | None,
    counters: bool,
) -> None:
    """Refuse options that exclude each other, before anything runs.

    Raises:
        click.UsageError: options exclude each other.
    """
    script = target.endswith(".py")
    if arguments and not script:
        raise click.UsageError(f"only scripts accept arguments, got {' '.join(arguments)!r} for {target!r}")
    if script and (machine or compile_mode):
        option = "--predict" if machine else "--compile"
        raise click.UsageError(
            f"{option} needs a model, but a script runs unchanged: name a callable in the script instead, {target}:NAME"
        )
    if machine and (compile_mode or trace):
        raise click.UsageError("--predict runs nothing, so there is nothing to compile or to trace")
    if counters and (script or machine or "RANK" in os.environ):
        raise click.UsageError("--counters needs a model in one process: it excludes scripts, --predict and torchrun")
    if machine is not None:
        _ceilings_of(machine)


WITHOUT = {
    "--channels-last": "has no roofs for layouts",
    "--ceilings": "names the machine itself",
    "--device": "runs nothing",
}
"""For each option that a prediction excludes: the reason."""


def _check_prediction(options: dict[str, Any]) -> None:
    """Refuse options that a prediction would ignore.

    Raises:
        click.UsageError: such an option is given.
    """
    given = [name for name, value in options.items() if value]
    if given:
        why = " and ".join(WITHOUT[each] for each in given)
        raise click.UsageError(
            f"{', '.join(given)} cannot be combined with --predict, which {why}: leave out one of them"
        )


def _check_script_options(script: str, options: dict[str, Any]) -> None:
    """Refuse options that would change the model of a script.

    Raises:
        click.UsageError: such an option is given.
    """
    given = [name for name, value in options.items() if value]
    if given:
        raise click.UsageError(
            f"{', '.join(given)}: not for a whole script, which runs unchanged; name a callable in the script instead, "
            f"{script}:NAME"
        )


def _ceilings_of(machine: str) -> Ceilings:
    try:
        return ceilings_of(machine)
    except CeilingsFileError:
        raise
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--predict") from error


def _predicted(target: str, inputs: Sequence[str], train: bool, dtype: torch.dtype | None, machine: str) -> Report:
    """Make the report of `--predict`. The model is built with fake tensors, so even a large model's weights take no
    memory."""
    with fake_tensors():
        found = resolve_target(target, inputs, None, None)
        training: dict[str, Any] = {}
        if train:
            loss = _ClassLoss() if found.classifies else None
            training = {
                "train": True,
                "loss": loss,
                "optimizer": partial(torch.optim.SGD, lr=LEARNING_RATE, momentum=MOMENTUM, foreach=True),
            }
        against = _ceilings_of(machine)
        keywords = _keywords(found, predict)
        return predict(found.model, *found.args, **keywords, **training, ceilings=against, dtype=dtype, name=target)


def _keywords(found: Target, function: Callable[..., Report]) -> Mapping[str, Any]:
    """Return the model's keyword arguments, after checking that the library function has no argument of the same name.

    Raises:
        TargetError: a keyword has the name of one of the function's own arguments.
    """
    own = set(inspect.signature(function).parameters) & set(found.kwargs)
    if own:
        raise TargetError(
            f"{found.name!r} returned the keyword {min(own)!r}, which is also an argument of "
            f"rooftop.{function.__name__}: return it as a positional argument: in `arguments` of "
            "(nn.Module, arguments, keywords)"
        )
    return found.kwargs


LEARNING_RATE, MOMENTUM = 1e-4, 0.9
"""Options of the optimizer step of `--train`."""


def _training(found: Target) -> dict[str, Any]:
    """Return the arguments of `analyze` for a training step with SGD and momentum. Such a step changes the weights."""
    parameters = [p for p in found.model.parameters() if p.requires_grad]  # type: ignore[attr-defined]
    arguments: dict[str, Any] = {
        "train": True,
        "optimizer": torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM),
    }
    if found.classifies:
        arguments["loss"] = _ClassLoss()
    return arguments


class _ClassLoss:
    """Cross-entropy with random labels, drawn once."""

    def __init__(self) -> None:
        self._labels: Tensor | None = None

    def __call__(self, logits: Tensor) -> Tensor:  # (B, classes)
        if self._labels is None:
            self._labels = torch.randint(logits.shape[1], logits.shape[:1], device=logits.device)
        return cross_entropy(logits, self._labels)


def _check_plotly() -> None:
    """Check, before any work starts, that plotly, which draws the charts, is installed."""
    from rooftop.analysis.page import require_plotly

    require_plotly()
