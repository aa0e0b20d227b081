"""The `rooftop` command: find the verb, run it, and print every error as one line.

Exit status: 0 success, 1 failure, 2 wrong arguments, 130 interrupted. `--debug` also prints the traceback.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Sequence

import click

import rooftop
from rooftop.cli.lazy_groups import LazyGroup, Verb
from rooftop.cli.words import Words
from rooftop.errors import FAILURE, InputError, RooftopError, TargetError
from rooftop.words import did_you_mean

# Verb -> its line in `rooftop --help`. `_place` returns the import path of the verb's command.
VERBS = {
    "analyze": "Show how far a model is from the limits of this machine, and why.",
    "ceilings": "Measure the limits of this machine: bandwidths, matrix rates, launch costs.",
    "checkpoint": "Inspect, convert and export the checkpoints of a training.",
    "classify": "Classify photographs and videos with an image model.",
    "compare": "Compare two reports of `rooftop analyze`.",
    "crossover": "Find the size above which the GPU beats the CPU, with and without transfers.",
    "data": "Measure how fast training data can be read, and what bounds a training.",
    "detect": "Detect objects on photographs with a DETR.",
    "device": "Describe the GPUs and the CPU of this machine.",
    "doctor": "Check what works on this machine, and print the command that fixes each problem.",
    "generate": "Generate text with a language model, and report percent of roof.",
    "ladder": "Measure ever faster versions of one computation, from a first kernel to the roof.",
    "map": "Call a model or your own function for every file, on all GPUs or a cluster.",
    "media": "Inspect, decode, transcode and benchmark video files; check and build FFmpeg.",
    "optimize": "Make a model faster: check and time changes one by one, and keep those that gain time.",
    "predict-video": "Predict the next frames of a clip, and show them beside the real frames.",
    "report": "Turn a JSON report into HTML.",
    "scene": "Build, inspect, render and view virtual geometry: meshes with levels of detail.",
    "train": "Train a model in one process or, under torchrun, in many, and report percent of roof.",
}

GROUPS = ("checkpoint", "data", "media", "scene")
"""Groups defined in `rooftop.cli`. All other verbs, `train` included, are defined in `rooftop.cli.commands`."""


def _place(verb: str) -> str:
    return f"rooftop.cli{'' if verb in GROUPS else '.commands'}.{verb.replace('-', '_')}:command"


WRONG_CALL = (click.UsageError, TargetError, InputError)


@click.group(
    cls=LazyGroup,
    verbs={verb: Verb(_place(verb), line) for verb, line in VERBS.items()},
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Start with: rooftop analyze resnet50",
)
@click.version_option(rooftop.__version__, prog_name="rooftop")
@click.option("--debug", is_flag=True, help="Show the full traceback of an error.")
def command(debug: bool) -> None:
    """How far is your PyTorch model from the limits of this machine?

    Rooftop measures the machine and counts the bytes and flops of each operator of the model. The report
    shows how far each operator and module is from its limit, and how to close the gap.
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status. Print errors as one line on stderr.

    Args:
        arguments: the words after `rooftop`. If None, use the arguments of this process; the caller must then end the
            process.
    """
    typed = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in typed  # --debug may come before or after the verb
    words = Words((word for word in typed if word != "--debug"), ends_process=arguments is None)
    try:
        result = command.main(words, prog_name="rooftop", standalone_mode=False, obj=words)
        return result if isinstance(result, int) else 0
    except (KeyboardInterrupt, click.Abort):
        return _fail("interrupted", 130, debug)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)  # the help, unchanged
        return 2
    except click.ClickException as error:
        return _fail(_message(error) + _hint(error, words), 2 if isinstance(error, WRONG_CALL) else 1, debug)
    except BrokenPipeError:  # the program that reads the output (head, less) has ended
        sys.stderr.close()
        return 1
    except (RooftopError, OSError) as error:
        return _fail(str(error), 2 if isinstance(error, WRONG_CALL) else 1, debug, error)
    except Exception as error:
        if lack := _memory_in_words(error):
            what = lack if "out of memory" in lack else f"out of memory: {lack}"
            return _fail(f"{what}; use smaller sizes, or free memory", 1, debug, error)
        note = "" if debug else " (an unexpected error: run again with --debug for the traceback)"
        return _fail(f"{type(error).__name__}: {error}{note}", 1, debug, error)


def _memory_in_words(error: Exception) -> str:
    """A short text about an out-of-memory error, on a GPU or on the CPU; "" for any other error."""
    if "torch" not in sys.modules:  # PyTorch did not raise the error, and may be damaged
        return (str(error) or "MemoryError") if isinstance(error, MemoryError) else ""
    from rooftop.debugging.out_of_memory import memory_error_in_words

    return memory_error_in_words(error) or ""


def _message(error: click.ClickException) -> str:
    """Return click's message. For an unknown name, suggest the nearest known name."""
    said = error.format_message()
    if isinstance(error, click.NoSuchOption):
        known = [name for option in (error.ctx.command.params if error.ctx else ()) for name in option.opts]
        return f"No such option {error.option_name}{did_you_mean(error.option_name, [*known, '--help', '--debug'])}"
    kind = error.param.type if isinstance(error, click.BadParameter) and error.param is not None else None
    wrong = re.search(r"'([^']*)' is not one of", said)
    if isinstance(kind, click.Choice) and wrong is not None:
        return said.rstrip(".") + did_you_mean(wrong[1], map(str, kind.choices))
    return said


def _hint(error: click.ClickException, words: Sequence[str]) -> str:
    """Return a hint where to find help or, for an option unknown to `rooftop`, how to pass the option to the script."""
    script = next((word for word in words if word.endswith(".py")), None)
    if isinstance(error, click.NoSuchOption) and script in words[1:2]:
        return f" (put the script's own arguments after --: {script} -- {error.option_name})"
    return f" (try: {error.ctx.command_path} --help)" if isinstance(error, click.UsageError) and error.ctx else ""


def _fail(message: str, status: int, debug: bool, error: BaseException | None = None) -> int:
    if debug:
        traceback.print_exc()
    line = "rooftop: error: " + " ".join(message.split())
    if debug or "RANK" not in os.environ or _first_to_say(_failure_behind(error) or line):
        click.echo(line, err=True)
    return status


def _failure_behind(error: BaseException | None) -> str | None:
    """Return the text of the rank failure that caused `error`, or None. If several ranks failed, this is the earliest
    failure, with the same text on all ranks.
    """
    while error is not None:
        failure = getattr(error, FAILURE, None)
        if isinstance(failure, str):
            return failure
        error = error.__cause__
    return None


def _first_to_say(failure: str) -> bool:
    """Whether this rank prints the failure. All ranks report the same text, so only the rank that is the first in time
    to report it prints it."""
    from rooftop.analysis.ranks.lockstep import first_to_say

    return first_to_say(failure)


def run() -> None:
    """Entry point of the installed `rooftop` script."""
    sys.exit(main())
