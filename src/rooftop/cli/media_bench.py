"""`rooftop media bench`: measure the decoded frames per second of a video, by device and number of streams."""

from __future__ import annotations

import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.table import Table

from rooftop.cli.consoles import output_console
from rooftop.cli.outputs import write_json
from rooftop.cli.progress import progress_bar
from rooftop.errors import RooftopError
from rooftop.media import NoVideoDecoderError, VideoReader
from rooftop.media.nvdec import WORTH_PIXELS
from rooftop.words import counted


@dataclass(frozen=True)
class Rate:
    """Frames per second of all streams, for one device and number of streams; or the reason why there is no rate."""

    device: str
    streams: int
    frames: int
    seconds: float
    reason: str | None = None

    @property
    def fps(self) -> float:
        return self.frames / self.seconds if self.seconds else 0.0


def run_bench(
    file: Path,
    devices: str,
    streams: tuple[int, ...],
    resize: tuple[int, int] | None,
    seconds: float,
    json_path: Path | None,
) -> None:
    """Run the command that `rooftop.cli.commands.media_bench:bench_command` describes."""
    named = [each.strip() for each in devices.split(",")]
    cases = [(device, count) for device in named for count in streams]
    rates = []
    with progress_bar() as show:
        with VideoReader(file, device="auto", resize=resize) as auto:
            chosen, why = str(auto.device), auto.fallback_reason
            size = (auto.height, auto.width)
        for done, (device, count) in enumerate(cases):
            show(f"{device}, {counted(count, 'stream')}", done / len(cases))
            rates.append(measure(file, device, count, resize, seconds))
    if write_json(json_path, _told(file, size, rates, chosen, why)):
        return
    console = output_console(highlight=False)
    console.print(_table(rates))
    console.print(f'device="auto" chooses {chosen}: {_why_auto(chosen, why)}', soft_wrap=True, markup=False)


def measure(file: Path, device: str, streams: int, resize: tuple[int, int] | None, seconds: float) -> Rate:
    """Measure the rate of several concurrent readers.

    Raises:
        RooftopError: a reader failed. If the device cannot decode this video, the result contains the reason instead.
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
    for name in ("device", "streams", "frames/s", "frames/s a stream", "ms a frame, all streams"):
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
    return why or f"NVDEC of {chosen} decodes this video, and its frames have at least {WORTH_PIXELS:,} pixels"


def _told(file: Path, size: tuple[int, int], rates: list[Rate], chosen: str, why: str | None) -> dict[str, object]:
    return {
        "file": str(file),
        "size": list(size),
        "threads_of_torch": torch.get_num_threads(),
        "rates": [{**asdict(each), "fps": each.fps} for each in rates],
        "auto": {"device": chosen, "why": _why_auto(chosen, why)},
    }
