"""`rooftop media decode`: decode the frames of a video into pictures, or into one array."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import click
import numpy as np
import torch
from PIL import Image
from torch import Tensor

from rooftop.cli.media_options import CLOCK_SLACK_S, check_last, check_times, end_of, first_position
from rooftop.cli.progress import progress_bar
from rooftop.errors import InputError
from rooftop.media import VideoReader
from rooftop.whole_files import whole_file
from rooftop.words import counted

JPEG_QUALITY = 95
PICTURES = {".png": "png", ".jpg": "jpg", ".jpeg": "jpg", ".bmp": "png", ".webp": "png", ".tif": "png", ".tiff": "png"}
DIGITS = 6


def run_decode(
    file: Path,
    out: Path,
    every: int,
    start: float | None,
    end: float | None,
    resize: tuple[int, int] | None,
    device: str,
    suffix: str | None,
) -> None:
    """Run the command that `rooftop.cli.commands.media_decode:decode_command` describes."""
    check_times(start, end)
    one = out.suffix.lower() == ".npy"
    if one and suffix is not None:
        raise click.UsageError(f"--format {suffix} is for a folder: {out.name} is one array")
    if out.suffix.lower() in PICTURES and not out.is_dir():
        raise click.UsageError(
            f"{out.name} names a single picture: give a folder, to get one picture per frame, such as -o {out.stem}/ "
            f"--format {PICTURES[out.suffix.lower()]}"
        )
    with VideoReader(file, device=device, resize=resize) as reader:
        first = first_position(reader, start)
        if start and first == len(reader):
            raise InputError(f"no frame of {file} begins at {start} s or later: it ends at {end_of(reader):.3f} s")
        frames: _Folder | _Array = _Array(out) if one else _Folder(out, suffix or "png")
        with progress_bar() as show, frames:
            count = _decode(reader, frames, first, every, end, show)
    if not count:
        until = "the end" if end is None else f"{end} s"
        raise InputError(
            f"no frame of {file} begins between {start or 0} s and {until}: the video runs from "
            f"{float(reader.times[0]):.3f} to {end_of(reader):.3f} s"
        )
    size = f"{reader.width} x {reader.height}"
    why = f" ({reader.fallback_reason})" if reader.fallback_reason else ""
    click.echo(f"{counted(count, 'frame')} of {size} in {click.format_filename(out)}, decoded on {reader.device}{why}")


def _decode(
    reader: VideoReader,
    frames: _Folder | _Array,
    first: int,
    every: int,
    end: float | None,
    show: Callable[[str, float], None],
) -> int:
    """Decode and write the frames. Returns the number of written frames."""
    until = end if end is not None else end_of(reader)
    begin = float(reader.times[first])
    number = first - 1
    for number, (pixels, time, _) in enumerate(reader.timed(first), first):
        if end is not None and time >= end - CLOCK_SLACK_S:
            return frames.count
        if (number - first) % every == 0:
            frames.add(number, pixels)
            show(f"frame {number}", min(1.0, (time - begin) / max(until - begin, 1e-9)))
    check_last(reader, number)
    return frames.count


class _Folder:
    """Write frames as separate files. After an error the files stay, and a message says so."""

    def __init__(self, path: Path, suffix: str) -> None:
        if path.exists() and not path.is_dir():
            raise InputError(f"{path} is a file: expected a folder, or a name that ends in .npy")
        self.path, self.suffix, self.count = path, suffix, 0

    def add(self, number: int, pixels: Tensor) -> None:
        """Write a frame, (3, H, W) uint8."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"the folder {self.path} cannot be created ({error.strerror}): give another folder"
            ) from error
        with whole_file(self.path / f"{number:0{DIGITS}}.{self.suffix}") as partial:
            if self.suffix == "npy":
                np.save(partial, pixels.cpu().numpy())
            else:
                picture = Image.fromarray(pixels.permute(1, 2, 0).contiguous().cpu().numpy())
                picture.save(partial, quality=JPEG_QUALITY)
        self.count += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self.count:
            click.echo(f"kept: {counted(self.count, 'frame')} in {click.format_filename(self.path)}", err=True)


class _Array:
    """Write frames into one .npy file, (T, 3, H, W) uint8. The file has a temporary name until it is complete."""

    def __init__(self, path: Path) -> None:
        if path.is_dir():
            raise InputError(f"{path} is a folder: expected the name of a file")
        if not path.parent.is_dir():
            raise InputError(f"{path.parent} is not a folder: create it first, or give another folder")
        if path.exists() and not path.is_file():
            raise InputError(f"{path} is a device or a pipe: expected the name of a file")
        path = path.resolve()  # the file to which a link points is written, and the link stays
        self.path, self.count = path, 0
        self._partial = path.with_name(f".{path.stem}.{os.getpid()}.partial.npy")
        self._shape: tuple[int, ...] = ()

    def add(self, number: int, pixels: Tensor) -> None:
        """Write a frame, (3, H, W) uint8."""
        if not self.count:
            self._shape = tuple(pixels.shape)
            self._write_header(most=True)
        self._file.write(pixels.to("cpu", torch.uint8).contiguous().numpy().tobytes())
        self.count += 1

    def _write_header(self, most: bool) -> None:
        """Write the header at the beginning of the file. The header's length does not depend on the number of frames,
        which is known only at the end."""
        count = 10**9 if most else self.count
        header = {"descr": "|u1", "fortran_order": False, "shape": (count, *self._shape)}
        self._file.seek(0)
        np.lib.format.write_array_header_1_0(self._file, header)

    def __enter__(self) -> Self:
        self._file: BinaryIO = self._partial.open("wb+")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with self._file:
                if error is None and self.count:
                    self._write_header(most=False)
            if error is None and self.count:
                os.replace(self._partial, self.path)
        finally:
            self._partial.unlink(missing_ok=True)
