"""`rooftop media`: the group of commands for video files."""

from __future__ import annotations

import click

from rooftop.cli.lazy_groups import LazyGroup, Verb

VERBS = {
    "probe": Verb(
        "rooftop.cli.commands.media_probe:probe_command",
        "Show what is in a video (codec, size, colours, frames, times), and check that it is complete.",
    ),
    "decode": Verb(
        "rooftop.cli.commands.media_decode:decode_command", "Decode FILE into upright RGB pictures, or into one array."
    ),
    "transcode": Verb(
        "rooftop.cli.commands.media_transcode:transcode_command",
        "Transcode IN to OUT. The suffix of OUT sets the format.",
    ),
    "bench": Verb(
        "rooftop.cli.commands.media_bench:bench_command",
        "Measure decoding speed: frames per second of FILE as tensors, by the CPU and by the GPU's NVDEC.",
    ),
    "ffmpeg-check": Verb(
        "rooftop.cli.commands.media_ffmpeg:check_command",
        "Test FFmpeg's decoders, encoders and filters on this machine, on GPUs and in software.",
    ),
    "ffmpeg-build": Verb(
        "rooftop.cli.commands.media_ffmpeg:build_command",
        "Build FFmpeg with cuvid, nvdec, nvenc and GPU filters, then test it.",
    ),
}


@click.group(cls=LazyGroup, verbs=VERBS)
def command() -> None:
    """Inspect, decode, transcode and benchmark video files; check and build FFmpeg."""
