"""`rooftop media`: video files."""

from __future__ import annotations

import click

from rooftop.cli.lazy_groups import LazyGroup, Verb

VERBS = {
    "probe": Verb(
        "rooftop.cli.commands.media_probe:probe_command",
        "Show what is in a video: codec, size, colours, frames, times, and whether it is all there.",
    ),
    "decode": Verb("rooftop.cli.commands.media_decode:decode_command", "Decode FILE into pictures, RGB and upright."),
    "transcode": Verb(
        "rooftop.cli.commands.media_transcode:transcode_command",
        "Encode IN anew as OUT, whose suffix names the format.",
    ),
    "bench": Verb(
        "rooftop.cli.commands.media_bench:bench_command",
        "Measure how many frames of FILE a second become tensors here: by the CPU, and by the GPU's NVDEC.",
    ),
    "ffmpeg-check": Verb(
        "rooftop.cli.commands.media_ffmpeg:check_command",
        "Try what FFmpeg can do on this machine: decoders, encoders and filters, on GPUs and in software.",
    ),
    "ffmpeg-build": Verb(
        "rooftop.cli.commands.media_ffmpeg:build_command",
        "Build FFmpeg with cuvid, nvdec, nvenc and filters on the GPU, then try what it can do here.",
    ),
}


@click.group(cls=LazyGroup, verbs=VERBS)
def command() -> None:
    """Look into video files, take them apart, encode them anew, and measure how fast that is here."""
