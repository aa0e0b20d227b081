"""`rooftop optimize`: make a model faster, and check and measure each change."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import click
import torch
from rich.table import Table
from torch import nn

from rooftop.analysis.formats import time_text
from rooftop.cli.consoles import output_console
from rooftop.cli.device_option import pick_device
from rooftop.cli.outputs import check_outputs, prints_aside, write_json
from rooftop.cli.progress import progress_bar
from rooftop.cli.targets import DTYPES, OTHER_INPUTS, resolve_target
from rooftop.errors import InputError, ModelRunError, RooftopError, TargetError
from rooftop.optimization import Change, Optimized, optimize
from rooftop.optimization.draws import in_words
from rooftop.optimization.optimized import LEAST_BYTES
from rooftop.optimization.page import render_page
from rooftop.rewrites import RULES
from rooftop.rewrites.candidates import NEEDS_A_GPU
from rooftop.whole_files import write_whole
from rooftop.words import counted, did_you_mean, in_a_line

SHOWN = {"kept": "green", "refused": "yellow", "failed": "red"}


def run(
    target: str,
    inputs: tuple[str, ...],
    shapes: tuple[str, ...],
    train: bool,
    device: str | None,
    dtype: str | None,
    rules: tuple[str, ...],
    exact: bool,
    min_gain: float,
    budget: float,
    plan: Path | None,
    save: Path | None,
    json_path: Path | None,
    output: Path | None,
) -> None:
    """Run the command that `rooftop.cli.commands.optimize:command` describes."""
    if plan is not None and rules:
        raise click.UsageError("--plan sets the rules: leave --rule out")
    if target.endswith(".py"):
        raise TargetError(f"{target} is a script: expected a model, such as package.module:callable that returns one")
    known = [rule.name for rule in RULES]
    for rule in rules:
        if rule not in known:
            close = did_you_mean(rule, known)
            raise click.BadParameter(f"{rule!r} is not one of {', '.join(known)}{close}", param_hint="--rule")
    check_outputs({"HTML": [output], "JSON": [save]}, json_path)
    sizes = [_shape(text) for text in shapes]
    with prints_aside(json_path):
        found = resolve_target(target, inputs, pick_device(device), DTYPES[dtype] if dtype else None)
    assert isinstance(found.model, nn.Module), "a target that is not a script is a module"
    with prints_aside(json_path), progress_bar() as progress:
        try:
            optimized = optimize(
                found.model,
                *found.args,
                train=train,
                shapes=sizes,
                rules=list(rules) or None,
                exact=exact,
                min_gain=min_gain,
                budget_s=budget,
                plan=plan,
                progress=progress,
                **found.kwargs,
            )
        except InputError:  # the error is about the plan
            raise
        except (TypeError, ValueError, torch.OutOfMemoryError) as error:
            raise ModelRunError(str(error)) from error
        except Exception as error:
            if isinstance(error, RooftopError) or not (type(error) is RuntimeError or _is_of_the_model(error)):
                raise  # not an error of PyTorch's operators or of the user's model
            given = in_words((found.args, dict(found.kwargs)))
            raise ModelRunError(f"{target} raised {in_a_line(error)} for the inputs {given}. {OTHER_INPUTS}") from error
        except KeyboardInterrupt:
            if save is not None:
                click.echo(f"{save} was not written", err=True)
            raise
    if save is not None:
        optimized.save(save)
    if output is not None:
        write_whole(output, render_page(optimized, target))
    if write_json(json_path, optimized.to_dict()):
        return
    _show(optimized, target)
    for what, path in (("plan", save), ("results", json_path), ("page", output)):
        if path is not None:
            click.echo(f"{what}: {path}")


def _is_of_the_model(error: Exception) -> bool:
    """Whether an error was raised inside the call of a module, and so by the user's model: the search handles the
    errors of candidates itself.
    """
    return any(frame.name == "_call_impl" for frame in traceback.extract_tb(error.__traceback__))


def _shape(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+(x\d+)*", text):
        raise click.BadParameter(f"{text!r} is not a shape such as 8x3x224x224", param_hint="--shape")
    return tuple(int(size) for size in text.split("x"))


def _show(found: Optimized, target: str) -> None:
    console = output_console()
    ratio = found.before_ms / found.after_ms
    gain = f"{ratio:.2f} times as fast" if found.kept else _why_nothing(found)
    before, after = time_text(found.before_ms), time_text(found.after_ms)
    console.print(f"{target}: {before} -> {after} a step, {gain} (noise {found.noise:.1%})")
    if found.kept and found.noise > 1 - found.after_ms / found.before_ms > 0:
        console.print("The noise exceeds the gain: the machine is busy. Optimize again when it is quiet.")
    if found.without_ms is not None:
        console.print(f"Without compiler and graphs: {time_text(found.without_ms)}.")
    table = Table(box=None, pad_edge=False)
    for name in ("rule", "verdict", "predicted", "measured", "error", "what, and why"):
        table.add_column(name, justify="right" if name in ("predicted", "measured", "error") else "left")
    elsewhere = [change.rule for change in found.changes if _not_here(change)]
    for change in found.changes:
        if change.rule not in elsewhere:
            table.add_row(*_row(change), style=SHOWN.get(change.verdict, "dim"))
    console.print(table)
    if elsewhere:
        console.print(f"Only on a GPU: {', '.join(elsewhere)}.", highlight=False)
    if any(change.error is not None for change in found.changes):
        console.print(
            "Predicted, measured: time saved per step. Error: of the changed results, relative to the allowed error.",
            highlight=False,
        )
    if found.checked:
        console.print(f"Checked on {', '.join(found.checked)}.", highlight=False)
    for what, why in found.unchecked.items():
        console.print(f"Not checked on {what}: {why}.", highlight=False)
    console.print(
        f"Proven for {'; '.join(found.proven)}: only these calls run the faster model (--shape adds shapes).",
        highlight=False,
    )
    for difference in found.differs:
        console.print(f"Different from the plan: {difference}.", style="yellow", highlight=False)


def _why_nothing(found: Optimized) -> str:
    """Say why `optimize` kept none of the changes that it tried."""
    if not found.changes:
        return "the plan has no changes"
    waiting = sum(change.verdict == "not tried" for change in found.changes)
    return f"nothing was kept, and {counted(waiting, 'rule')} not tried" if waiting else "no change saves time"


def _not_here(change: Change) -> bool:
    """Whether a rule was refused because the model is not on a GPU."""
    return change.verdict == "refused" and change.reason.startswith(NEEDS_A_GPU)


def _row(change: Change) -> list[str]:
    predicted = time_text(change.predicted_ms) if change.predicted_ms > 0 else ""
    measured = "" if change.measured_ms is None else time_text(change.measured_ms)
    error = "" if change.error is None else f"{change.error:.2f}"
    first = f"first call {change.first_call_s:.0f} s" if (change.first_call_s or 0) >= 1 else ""
    bytes_ = change.bytes or 0
    memory = f"{bytes_ / 1e6:+.0f} MB of GPU memory" if abs(bytes_) >= LEAST_BYTES else ""
    return [
        change.rule,
        change.verdict,
        predicted,
        measured,
        error,
        "; ".join(filter(None, (change.where, change.reason, first, memory))),
    ]
