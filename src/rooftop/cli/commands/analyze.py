"""`rooftop analyze`: arguments, options and help."""

from __future__ import annotations

from pathlib import Path

import click

from rooftop.cli.commands.deferred import done_by
from rooftop.cli.commands.target_options import device_option, dtype_option, input_option
from rooftop.cli.outputs import json_option
from rooftop.words import did_you_mean

EXAMPLES = """\b
Examples:
  rooftop analyze resnet50
  rooftop analyze resnet50 --train --input 64x3x224x224 --dtype bf16
  rooftop analyze resnet50 --input my_photographs/
  rooftop analyze my_pkg.net:build --input 8x3x224x224 --json report.json
  rooftop analyze my_pkg.text:build --input 8x128:int64:50257
  rooftop analyze my_pkg.net:build --compile max-autotune
  rooftop analyze my_pkg.net:build --train --predict h200
  rooftop analyze train.py -- --epochs 1
  torchrun --nproc-per-node 8 -m rooftop analyze train.py    one report, with a table of the ranks
"""


def _known_mode(context: click.Context, option: click.Parameter, mode: str | None) -> str | None:
    """Check the mode of --compile.

    Raises:
        click.BadParameter: torch.compile has no such mode, or the word after --compile is the target.
    """
    if mode is None:
        return None
    import torch

    modes = torch._inductor.list_mode_options()
    if mode not in modes:
        raise click.BadParameter(
            f"{mode!r} is not one of {', '.join(modes)}{did_you_mean(mode, modes)}; to use the default mode, put "
            "--compile after TARGET"
        )
    return mode


@click.command(epilog=EXAMPLES)
@click.argument("target")
@click.argument("script_arguments", metavar="[-- SCRIPT ARGUMENTS]", nargs=-1, type=click.UNPROCESSED)
@input_option
@click.option("--train", is_flag=True, help="Analyze a training step: forward, backward and an SGD step.")
@device_option
@dtype_option
@click.option("--channels-last", is_flag=True, help="Use the channels-last layout for images and convolution weights.")
@click.option(
    "--compile",
    "compile_mode",
    is_flag=False,
    flag_value="default",
    callback=_known_mode,
    metavar="[MODE]",
    help="Compile the model with torch.compile first, in MODE (default, reduce-overhead, max-autotune). Without "
    "MODE, put this option after TARGET.",
)
@click.option(
    "--predict",
    "machine",
    metavar="MACHINE",
    help="Do not run TARGET; predict the shortest times of its operators and of the whole step on another machine: "
    "h100, h200, or a ceilings file measured there.",
)
@click.option(
    "--ceilings",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Use the ceilings in this file instead of measuring them. A step on a GPU needs a GPU's ceilings, a step on a "
    "CPU a CPU's.",
)
@click.option("--trace", type=click.Path(path_type=Path), help="Also write a trace of one step, for Perfetto.")
@click.option("--counters", is_flag=True, help="Also show the GPU's hardware counters of each kernel (needs ncu).")
@click.option("--counted-step", "step_only", is_flag=True, hidden=True)
@json_option("the report")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Path of the HTML report.  [default: rooftop-TARGET.html; --train adds -training, --predict -on-MACHINE]",
)
@click.option("--no-html", is_flag=True, help="Write no HTML report.")
@click.option(
    "--rows",
    type=click.IntRange(min=0),
    default=12,
    show_default=True,
    help="Number of operators in the printed table.",
)
@click.pass_obj
@done_by("rooftop.cli.analyze:run")
def command() -> None:
    """Show how far TARGET is from the limits of this machine, and why.

    TARGET is a built-in model, a callable or a script. A built-in model has a name such as resnet50. A callable is
    given as package.module:callable, and returns a module, (module, inputs), (module, {name: input}) or (module,
    arguments, {name: input}). A Python script runs unchanged, with the words after -- as its arguments.

    Rooftop times every operator and compares it with its roof: the shortest time in which this machine could move the
    operator's bytes and do its arithmetic. The distance from the wall time to the roof of the whole model is split into
    three gaps: slow kernels, missing fusion, and waiting for the host.
    """
