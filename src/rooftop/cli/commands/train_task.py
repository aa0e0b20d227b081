"""`rooftop train NAME|my_pkg.task:build`: the group that finds tasks by name, with the tasks' options and help."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from rooftop.cli.commands import names
from rooftop.cli.commands.deferred import done_by
from rooftop.cli.commands.number_ranges import NumberRange
from rooftop.cli.repeated_options import refuse_repeated_options
from rooftop.words import did_you_mean

OWN = "my_pkg.task:build"

GROUP_EXAMPLES = """\b
Start with:
  rooftop train resnet --data digits
  rooftop train resnet50 --data photographs/
  rooftop train gpt --data-path book.txt
  rooftop train my_pkg.task:build --data FOLDER

my_pkg.task:build is your own function, build(data, recipe). It returns a rooftop.train.tasks.task.Task: a model, its
loss, its data and its metrics. docs/train.md shows such a task in 30 lines.
"""

DATA = {
    **dict.fromkeys(
        ("resnet", "swin", "hybrid"),
        "digits, a folder with train/ and val/, or a folder with one subfolder per class or with tar files",
    ),
    "detr": "shapes (generated), or a folder in COCO's form",
    "conv_lstm": "digits (generated, moving), or a folder of videos",
    "sparse_unet": "scans (generated)",
}
"""For each task: the data that --data accepts."""

BETWEEN = re.compile(r",(?=\s*(?:\w+\.[a-z_]+\s*(?:[=,]|$)|,|$))")
"""Matches commas between switches, but not commas in a list of values."""

KNOWN = (*names.TASKS, *names.CLASSIFIERS)
"""The names of tasks, and of models that a task trains: `train resnet50` is `train resnet --set
model.name=resnet50`.
"""

SMALL = {"detr": "shapes", "sparse_unet": "scans"}
"""For each task: the default of --data, which the examples in the help also use. Other tasks use digits."""


def usual_data(name: str) -> str | None:
    """Return the default of --data for a built-in task or model; None for a task that the user wrote."""
    return SMALL.get(task_of(name), "digits") if name in KNOWN else None


def examples_of(name: str) -> str:
    """Return the text below the options in a task's help."""
    data = usual_data(name) or "FOLDER"
    switches = "\n".join(f"  {section:11} {values}" for section, values in names.SWITCHES.items())
    return f"""\b
Examples:
  rooftop train {name} --data {data}
  rooftop train {name} --data {data} --epochs 20 --set optimizer.lr=0.01 --set ema.decay=0.99
  rooftop train {name} --data {data} --print-recipe > recipe.toml
  rooftop train {name} --data {data} --config recipe.toml --out runs/second
  rooftop train {name} --data {data} --out runs/second --resume
  rooftop train {name} --data {data} --out runs/worth --set ema.decay=0.99 --ablate ema.decay,schedule.warmup=0
  torchrun --nproc-per-node 2 -m rooftop.train {name} --data {data}

\b
In the folder of a run:
  recipe.toml          all switches, in the format of --config
  call.json            the words of the command, which --resume reads
  metrics.jsonl        a line for each step and each evaluation
  page.html            curves and examples; open it while the training runs
  tensorboard/         event files, for tensorboard --logdir runs
  checkpoints/         what --resume continues from
  best.safetensors     weights of the best evaluation; last.safetensors has those of the last step

Recipe: each task has its own recipe, which also depends on --data and the device. --config replaces values of this
recipe, and --set replaces values of the task and of --config. --epochs, --seed, --weights and --num-classes are short
forms of --set. docs/train-recipes.md explains each switch.

\b
Switches, as --set SECTION.NAME=VALUE:
{switches}

Ablation: --ablate trains the recipe, and the recipe without each of the switches, with --repeats seeds each. "Without"
means with the default, which is off for most switches, or with the value given as SECTION.NAME=VALUE. The table shows
the effect of each switch on the validation data, and whether this effect exceeds the noise. After an interruption,
--resume continues the ablation.

Ctrl-C and SIGTERM save and end the training. --resume gives the same results as a run without interruption.
"""


def task_of(name: str) -> str:
    """Return the name of a built-in task. `name` is this task's name, or the name of a model that this task trains."""
    if name in names.TASKS:
        return name
    return next((task for task in ("swin", "hybrid") if name.startswith(task)), "resnet")


class Tasks(click.Group):
    """A group of commands and tasks. A name that is not a command is a built-in task or a task of the user."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.commands, *names.TASKS]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name in self.commands:
            return super().get_command(ctx, name)
        return task_command(name) if name in KNOWN or ":" in name else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the first word names, as click does.

        Raises:
            click.UsageError: no task has that name; the message suggests the nearest names.
        """
        name = args[0] if args else ""
        if name and not name.startswith("-") and self.get_command(ctx, name) is None:
            listed = self.list_commands(ctx)
            near = did_you_mean(name, [*listed, *KNOWN]) or f": expected {', '.join(listed)} or {OWN}"
            own = f" (a task of your own is MODULE:FUNCTION: {name}:build)" if "." in name else near
            raise click.UsageError(f"No such task {name!r}{own}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            rows = [(name, command.get_short_help_str(80)) for name, command in self.commands.items()]
            rows += names.TASKS.items()
            formatter.write_dl([*rows, (OWN, "Train the task that your function returns.")])


def task_command(name: str) -> click.Command:
    """Return the command that trains a task."""

    def run(**options: Any) -> Any:
        return _run(name=name, **options)

    own = f"Train the task that {name} returns." if ":" in name else f"Train {name}."
    line = names.TASKS.get(name, own)
    data = DATA[task_of(name)] if name in KNOWN else "passed to your function, e.g. a folder"
    text = f"{line}\n\n--data is {data}. Without torchrun, one process trains; under torchrun, each process is a rank."
    for option in reversed(_options(data)):
        run = option(run)
    command = click.command(name, help=text, epilog=examples_of(name))(run)
    return refuse_repeated_options(command)


@done_by("rooftop.cli.train_task:train_task")
def _run(**options: Any) -> Any: ...


def _switch_names(context: click.Context, option: click.Parameter, texts: tuple[str, ...]) -> tuple[str, ...]:
    """Parse the values of --ablate, which may contain commas, be repeated, or both."""
    found = tuple(word.strip() for text in texts for word in BETWEEN.split(text))
    if "" in found:
        raise click.BadParameter("expected switches separated by commas, e.g. mix.mixup,ema.decay")
    return found


def _options(data: str) -> list[Callable[[Any], Any]]:
    file, folder = click.Path(path_type=Path), click.Path(path_type=Path, file_okay=False)
    return [
        click.option("--data", metavar="WHAT", help=f"What to train on: {data}."),
        click.option(
            "--config",
            type=file,
            metavar="FILE|NAME",
            help=f"A recipe in TOML, or a published recipe ({', '.join(names.RECIPES)}). The recipe's values replace "
            "the task's values.",
        ),
        click.option(
            "--set",
            "values",
            multiple=True,
            metavar="SECTION.NAME=VALUE",
            help="Change one value of the recipe, e.g. optimizer.lr=0.01. Repeat for several.",
        ),
        click.option("--out", type=folder, metavar="DIR", help="Folder of the run.  [default: runs/NAME]"),
        click.option(
            "--resume",
            is_flag=True,
            help="Continue the run in --out, with its recipe and its data. If the folder has no run, start one.",
        ),
        click.option(
            "--device",
            type=click.Choice(["cuda", "cpu"]),
            help="Device to train on.  [default: cuda if there is a GPU]",
        ),
        click.option(
            "--epochs",
            type=NumberRange(min=0, min_open=True),
            metavar="X",
            help="Number of passes over the training data (run.epochs).",
        ),
        click.option("--seed", type=click.IntRange(min=0), metavar="N", help="Seed of all random numbers (run.seed)."),
        click.option(
            "--weights", metavar="NAME|FILE", help="Weights to start from: a published name or a file (model.weights)."
        ),
        click.option(
            "--num-classes",
            type=click.IntRange(min=1),
            metavar="N",
            help="Number of classes of the head (model.num_classes).",
        ),
        click.option(
            "--ablate",
            multiple=True,
            callback=_switch_names,
            metavar="SECTION.NAME,...",
            help="Instead of training once, measure the effect of these switches of the recipe. NAME=VALUE compares "
            "the recipe with this value.",
        ),
        click.option(
            "--repeats",
            type=click.IntRange(min=1),
            metavar="N",
            help="Number of seeds for each recipe of an ablation.  [default: 3]",
        ),
        click.option("--page/--no-page", default=True, help="Whether to write page.html."),
        click.option("--print-recipe", is_flag=True, help="Print the whole recipe as TOML, without training."),
    ]
