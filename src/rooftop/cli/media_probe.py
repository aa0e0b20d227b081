"""`rooftop media probe`: show what is in a video."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click
from rich.table import Table
from rich.text import Text

from rooftop.cli.consoles import output_console
from rooftop.cli.outputs import write_json
from rooftop.media import VideoInfo, probe
from rooftop.words import counted


def run_probe(file: Path, json_path: Path | None) -> None:
    """Run the command that `rooftop.cli.commands.media_probe:probe_command` describes."""
    info = probe(file)
    if write_json(json_path, asdict(info)):
        return
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _lines(info):
        table.add_row(name, Text(value))
    output_console().print(table)


def _lines(info: VideoInfo) -> list[tuple[str, str]]:
    mirrored = ", mirrored" if info.mirrored else ""
    turned = f", stored {info.coded_width} x {info.coded_height}" if info.rotation_degrees or info.mirrored else ""
    stretched = f", pixel width / height {info.pixel_aspect:.4g}" if info.pixel_aspect != 1 else ""
    rate = "variable, on average " if info.variable_frame_rate else ""
    access = (
        f"reading one frame decodes at most {counted(info.longest_gop, 'frame')}"
        if info.seekable
        else "every read starts at the beginning of the file"
    )
    lines = [
        ("file", f"{click.format_filename(info.source)} ({info.size_bytes:,} bytes, {info.container})"),
        ("video", f"{info.codec}{f' ({info.profile})' if info.profile else ''}, {info.pixel_format}, {info.bits} bits"),
        ("size", f"{info.width} x {info.height}{turned}{stretched}{', interlaced' if info.interlaced else ''}"),
        ("colours", _colours(info)),
        ("rate", f"{rate}{info.fps:.6g} frames/s, {info.bit_rate_bps / 1e6:.4g} Mbit/s"),
        ("frames", f"{info.frames:,}, {info.key_frames:,} of them key frames; {access}"),
        ("time", f"{info.duration_s:.3f} s from {info.start_s:.3f} s on"),
    ]
    if info.rotation_degrees or info.mirrored:
        lines.insert(3, ("turned", f"{info.rotation_degrees} degrees counterclockwise{mirrored}"))
    lines += [
        ("audio", f"{each.codec}, {each.rate_hz:,} Hz, {counted(each.channels, 'channel')}") for each in info.audio
    ]
    if info.discontinuity:
        lines.append(("clock", info.discontinuity))
    return [*lines, ("damage", info.damage or "none seen in the packets")]


def _colours(info: VideoInfo) -> str:
    if info.colours is None:
        return "RGB" if info.pixel_format.startswith(("rgb", "bgr", "gbr", "pal", "argb", "abgr")) else "not supported"
    assumed = info.colours.assumed
    matrix = f"{info.colours.matrix}{' (assumed)' if 'matrix' in assumed else ''}"
    extent = f"{'full' if info.colours.full_range else 'limited'} range{' (assumed)' if 'range' in assumed else ''}"
    return f"{matrix}, {extent}{f', {info.hdr}' if info.hdr else ''}"
