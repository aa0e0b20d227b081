"""`rooftop media transcode`: convert a video to another codec, size or rate, and leave its sound unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from rooftop.cli.media_options import CLOCK_SLACK_S, check_last, check_times, end_of, first_position
from rooftop.cli.progress import progress_bar
from rooftop.errors import InputError
from rooftop.media import VideoInfo, VideoReader, VideoWriter, probe
from rooftop.media.pyav import load_av
from rooftop.words import counted

USUAL = {".webm": "libvpx-vp9", ".avi": "mpeg4"}  # encoders by suffix; other suffixes use libx264
WITH_CRF = ("libx264", "libx265", "libvpx-vp9", "libsvtav1", "libaom-av1", "libvpx")
HELD_S = 0.002  # a last frame whose duration differs more from 1 / rate needs its own end time
CHROMA = ("yuv420p", "yuv422p", "yuv444p")


def run_transcode(
    source: Path,
    out: Path,
    codec: str | None,
    resize: tuple[int, int] | None,
    fps: float | None,
    start: float | None,
    end: float | None,
    crf: int | None,
    no_sound: bool,
    device: str,
) -> None:
    """Run the command that `rooftop.cli.commands.media_transcode:transcode_command` describes."""
    check_times(start, end)
    if out.exists() and source.exists() and out.samefile(source):
        raise click.UsageError(f"{out} is the input file: give OUT another name")
    codec = codec or USUAL.get(out.suffix.lower(), "libx264")
    if crf is not None and codec not in WITH_CRF:
        raise click.UsageError(f"--crf does not apply to {codec}, only to {', '.join(WITH_CRF)}")
    info = probe(source)
    pixel_format = _pixel_format(info, codec)
    deep = pixel_format is not None and "10" in pixel_format
    reader = VideoReader(source, device=device, resize=resize, dtype=torch.float32 if deep else torch.uint8)
    first = first_position(reader, start)
    if start and first == len(reader):
        raise InputError(f"no frame of {source} begins at {start} s or later: it ends at {end_of(reader):.3f} s")
    begin = float(reader.times[first]) if start else 0.0  # this time becomes 0 in the output, for the sound too
    rate, last_s = reader.constant_rate, float(reader.durations[-1])
    held = rate is not None and abs(last_s - 1 / rate) > HELD_S
    if rate is None and out.suffix.lower() == ".avi":
        # AVI times are ticks of a grid, and some ticks have no frame
        rate, held = reader.index.grid(reader.time_base), True
    writer = VideoWriter(
        out,
        fps or rate or reader.fps,
        codec,
        pixel_format=pixel_format,
        options=None if crf is None else {"crf": str(crf)},
        matrix=reader.colours.matrix,
        full_range=reader.colours.full_range,
        pad=True,
        sound_from=source if info.audio and not no_sound else None,
        sound_start_s=begin,
        cut_sound=end is not None,
    )
    timed = fps is None and (rate is None or held or (not start and info.start_s > CLOCK_SLACK_S))
    with progress_bar() as show, writer, reader:
        for pixels, time, until in _frames(reader, first, begin, end, fps, show):
            writer.write(pixels, times=[time] if timed else None, until=until if timed else None)
    _tell(info, reader, writer, no_sound)


def _frames(
    reader: VideoReader,
    first: int,
    begin: float,
    end: float | None,
    fps: float | None,
    show: Callable[[str, float], None],
) -> Iterator[tuple[Tensor, float, float]]:
    """Yield frames from position `first` on, with their start and end times in seconds after `begin`. The times are
    those of the file or, if `fps` is given, those of this constant rate."""
    until = end if end is not None else end_of(reader)
    given = 0
    position = first - 1
    for pixels, time, duration in reader.timed(first):
        position += 1
        if end is not None and time >= until - CLOCK_SLACK_S:
            return
        show(f"{time:.1f} s", min(1.0, (time - begin) / max(until - begin, 1e-9)))
        if fps is None:
            yield pixels, max(0.0, time - begin), min(time + duration, until) - begin
            continue
        # Write the frame once for each output tick at which it is shown. The first frame also fills earlier ticks, so
        # that the video begins at 0.
        while begin + given / fps < min(time + duration, until) - CLOCK_SLACK_S:
            yield pixels, given / fps, (given + 1) / fps
            given += 1
    check_last(reader, position)


def _pixel_format(info: VideoInfo, codec: str) -> str | None:
    """The encoder's pixel format that is closest to the source; None stands for the encoder's default."""
    av: Any = load_av()
    if codec == "auto" or codec not in av.codecs_available:
        return None  # the writer raises, with an error that names the codec
    has = [each.name for each in av.Codec(codec, "w").video_formats or []]
    chroma = info.pixel_format.removesuffix("le").removesuffix("10").removesuffix("12").replace("yuvj", "yuv")
    chroma = chroma if chroma in CHROMA else "yuv420p"
    depths = ("10le", "") if info.bits > 8 else ("",)
    for depth in depths:
        for each in (chroma, "yuv420p"):
            if each + depth in has:
                return each + depth
    return None


def _tell(info: VideoInfo, reader: VideoReader, writer: VideoWriter, no_sound: bool) -> None:
    name = click.format_filename(writer.path)
    sound = "no sound" if not info.audio else "sound left out" if no_sound else f"{info.audio[0].codec} sound copied"
    height, width = writer.size or (reader.height, reader.width)
    padded = (height, width) != (reader.height, reader.width)
    filled = f" (padded from {reader.width} x {reader.height})" if padded else ""
    click.echo(
        f"{name}: {counted(writer.frames, 'frame')} of {width} x {height}{filled}, {writer.encoder} "
        f"{writer.pixel_format}, {sound}; decoded on {reader.device}"
    )
    for reason in (reader.fallback_reason, writer.fallback_reason):
        if reason:
            click.echo(f"note: {reason}", err=True)
    if info.bits > 8 and "10" not in writer.pixel_format:
        click.echo(
            f"note: {info.bits} bits per channel became 8, because {writer.encoder} supports no more for this video",
            err=True,
        )
    if info.hdr:
        click.echo(
            f"note: OUT does not record that its brightness follows {info.hdr}, so players will show it with low "
            "contrast",
            err=True,
        )
