"""`rooftop media bench`: frames a second of a video, by device and number of streams."""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.table import Table

from rooftop.analysis.text import WIDTH
from rooftop.cli.media_options import resize_option
from rooftop.cli.progress import progress_bar
from rooftop.errors import RooftopError
from rooftop.media import NoVideoDecoderError, VideoReader

MOST_STREAMS = 256

EXAMPLES = """\b
Examples:
  rooftop media bench walk.mp4
  rooftop media bench walk.mp4 --device cuda --streams 1,4,16 --resize 224x224 --json
"""


@dataclass(frozen=True)
class Rate:
    """Of one device and number of streams: frames of all streams a second of a clock; or why there are none."""

    device: str
    streams: int
    frames: int
    seconds: float
    reason: str | None = None

    @property
    def fps(self) -> float:
        return self.frames / self.seconds if self.seconds else 0.0


class _Streams(click.ParamType[tuple[int, ...]]):
    """Numbers with commas between."""

    name = "N,N"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(int(each) for each in str(value).split(","))
        except ValueError:
            numbers = ()
        if not numbers or not all(1 <= each <= MOST_STREAMS for each in numbers):
            self.fail(f"{value!r}: expected numbers from 1 to {MOST_STREAMS}, such as 1,8", param, ctx)
        return numbers


@click.command("bench", epilog=EXAMPLES)
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--device", "devices", default="cpu,cuda", show_default=True, metavar="NAME,NAME", help="What decodes.")
@click.option("--streams", type=_Streams(), default="1,8", show_default=True, help="Readers at a time, in threads.")
@resize_option
@click.option(
    *("--seconds", "seconds"),
    type=click.FloatRange(min=0.1, max=600),
    default=3.0,
    show_default=True,
    help="For each device and number of streams.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def bench_command(
    file: Path,
    devices: str,
    streams: tuple[int, ...],
    resize: tuple[int, int] | None,
    seconds: float,
    as_json: bool,
) -> None:
    """Measure how many frames of FILE a second become tensors here: by the CPU, and by the GPU's NVDEC.

    Every stream is a reader of its own that goes through the file again and again; the first frame of each is not
    counted. Frames are RGB uint8 on the device that decodes.
    """
    named = [each.strip() for each in devices.split(",")]
    cases = [(device, count) for device in named for count in streams]
    rates = []
    with progress_bar() as show:
        with VideoReader(file, device="auto", resize=resize) as auto:
            chosen, why = str(auto.device), auto.fallback_reason
            size = (auto.height, auto.width)
        for done, (device, count) in enumerate(cases):
            show(f"{device}, {count} streams", done / len(cases))
            rates.append(measure(file, device, count, resize, seconds))
    if as_json:
        click.echo(json.dumps(_told(file, size, rates, chosen, why), indent=1))
        return
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    console.print(_table(rates))
    console.print(f'device="auto" takes {chosen}: {_why_auto(chosen, why)}', soft_wrap=True, markup=False)


def measure(file: Path, device: str, streams: int, resize: tuple[int, int] | None, seconds: float) -> Rate:
    """The rate of some readers at once.

    Raises:
        RooftopError: of one of them; on a device that does not decode this, the reason is in the result instead.
    """
    try:
        readers = [VideoReader(file, device=device, resize=resize) for _ in range(streams)]
    except NoVideoDecoderError as error:
        return Rate(device, streams, 0, 0.0, str(error))
    counts, failures = [0] * streams, list[BaseException]()
    ready = threading.Barrier(streams + 1)
    ended = threading.Event()

    def work(number: int) -> None:
        try:
            frames = iter(readers[number])
            next(frames)
            ready.wait()
            while not ended.is_set():
                for _ in frames:
                    counts[number] += 1
                    if ended.is_set():
                        break
                else:
                    frames = iter(readers[number])
        except BaseException as error:
            failures.append(error)
            ready.abort()

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(streams)]
    for each in threads:
        each.start()
    try:
        ready.wait()
        began = time.perf_counter()
        ended.wait(seconds)
    except threading.BrokenBarrierError:
        began = time.perf_counter()
    finally:
        ended.set()
        for each in threads:
            each.join()
    if readers[0].device.type == "cuda":
        torch.cuda.synchronize(readers[0].device)
    took = time.perf_counter() - began
    for reader in readers:
        reader.close()
    if failures:
        raise next((each for each in failures if isinstance(each, RooftopError)), failures[0])
    return Rate(device, streams, sum(counts), took)


def _table(rates: list[Rate]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("device", "streams", "frames/s", "of each", "ms a frame"):
        table.add_column(name, no_wrap=True, justify="left" if name == "device" else "right")
    table.add_column("", overflow="fold")
    said: set[str] = set()
    for each in rates:
        if each.reason is not None:
            table.add_row(each.device, str(each.streams), "-", "-", "-", "" if each.device in said else each.reason)
            said.add(each.device)
            continue
        a_frame = f"{1e3 / each.fps:.3f}" if each.frames else "-"
        table.add_row(each.device, str(each.streams), f"{each.fps:.1f}", f"{each.fps / each.streams:.1f}", a_frame)
    return table


def _why_auto(chosen: str, why: str | None) -> str:
    return why or f"NVDEC of {chosen} decodes this video, and it is large enough to pay"


def _told(file: Path, size: tuple[int, int], rates: list[Rate], chosen: str, why: str | None) -> dict[str, object]:
    return {
        "file": str(file),
        "size": list(size),
        "threads_of_torch": torch.get_num_threads(),
        "rates": [{**asdict(each), "fps": each.fps} for each in rates],
        "auto": {"device": chosen, "why": _why_auto(chosen, why)},
    }
