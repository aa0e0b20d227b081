"""`rooftop classify`: show the classes of photographs and videos."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
from rich.table import Table
from rich.text import Text

from rooftop.cli.consoles import output_console
from rooftop.cli.outputs import check_json, write_json
from rooftop.cli.progress import progress_bar
from rooftop.cli.trained_models import engine_of, seeded, skipped_ones_named
from rooftop.cluster.by_engine import ClassifierByEngine
from rooftop.errors import InputError, MissingExtraError
from rooftop.media import DamagedVideoError, VideoReader
from rooftop.media.images import SUFFIXES, check_images, find_images
from rooftop.media.reading import VIDEO_SUFFIXES
from rooftop.models import (
    Classified,
    ClassifiedFrame,
    Guess,
    SampledVideo,
    classify,
    classify_video,
    load_classifier,
    model_entry,
)
from rooftop.models.images import IMAGENET
from rooftop.models.weights.trained_files import trained_file


def run(
    paths: tuple[str, ...],
    model: str | None,
    weights: str | None,
    seed: int | None,
    top: int,
    every: float,
    where: torch.device,
    dtype: torch.dtype | None,
    batch_size: int,
    skip_unreadable: bool,
    json_path: Path | None,
) -> None:
    """Run the command that `rooftop.cli.commands.classify:command` describes."""
    if weights is not None and seed is not None:
        raise click.UsageError("expected either --weights or --random-weights SEED (an untrained model), got both")
    pictures, videos = _told_apart(paths)
    found = find_images(pictures)
    check_json(json_path, [*found, *videos, *([] if weights is None else [Path(weights)])])
    if not skip_unreadable:
        check_images(found)  # check the files before any download begins
    for video in videos:
        VideoReader(video).close()
    trained = None if weights is None else trained_file(weights)
    model = model or (trained.model if trained else "resnet50")
    classes = trained.classes or None if trained else None
    if seed is None:
        weights = weights or "DEFAULT"
        classifier, preprocessing = load_classifier(model, weights)
    else:
        with seeded(seed):
            classifier, preprocessing = model_entry(model).build().eval(), IMAGENET
    by_engine = ClassifierByEngine(engine_of(classifier, model, where, dtype))
    on_error = "skip" if skip_unreadable else "raise"
    with skipped_ones_named(), progress_bar() as progress:
        photographs = classify(
            by_engine,
            found,
            preprocessing=preprocessing,
            classes=classes,
            top=top,
            batch_size=batch_size,
            on_error=on_error,
            progress=progress,
        )
        clips = []
        for video in videos:
            frames = SampledVideo.for_model(by_engine, video, preprocessing, every=every)
            clips.append(_Clip(video, frames.device, frames.fallback_reason, [], None))
            try:
                shown = classify_video(
                    by_engine, frames, classes=classes, top=top, batch_size=batch_size, progress=progress
                )
                for frame in shown:
                    clips[-1].frames.append(frame)
            except DamagedVideoError as error:  # report the damage after the results
                clips[-1].damage = error
    plain = {"photographs": [_plain(photo) for photo in photographs], "videos": [clip.plain() for clip in clips]}
    if not write_json(json_path, {"model": model, "weights": weights, "seed": seed, **plain}):
        _show(photographs, clips)
        if seed is not None:
            click.echo("random weights: the results mean nothing")
        if json_path is not None:
            click.echo(f"classes: {json_path}")
    for clip in clips:
        if clip.damage is not None:
            raise clip.damage


def _told_apart(paths: Sequence[str]) -> tuple[list[Path], list[Path]]:
    """Separate photographs (and folders of photographs) from videos by suffix; both lists keep the order of `paths`. A
    file with another suffix is opened first as a photograph, then as a video. A file that is neither counts as a
    photograph.
    """
    pictures: list[Path] = []
    videos: list[Path] = []
    for path in map(Path, paths):
        known = path.suffix.lower() in SUFFIXES or not path.is_file()
        a_video = path.suffix.lower() in VIDEO_SUFFIXES and not path.is_dir()
        (videos if a_video or (not known and _is_video(path)) else pictures).append(path)
    return pictures, videos


def _is_video(path: Path) -> bool:
    try:
        check_images([path])
    except InputError:
        try:
            VideoReader(path).close()
        except (InputError, MissingExtraError):
            return False  # the file is then reported as an unreadable photograph
        return True
    return False


@dataclass
class _Clip:
    """The classes found in the frames of a video. `damage` is the error at which decoding ended; None if the whole
    video was decoded.
    """

    path: Path
    device: torch.device
    fallback_reason: str | None
    frames: list[ClassifiedFrame]
    damage: DamagedVideoError | None

    def plain(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "device": str(self.device),
            "fallback_reason": self.fallback_reason,
            "damage": None if self.damage is None else str(self.damage),
            "frames": [
                {"position": each.position, "time": each.time, "classes": [asdict(guess) for guess in each.guesses]}
                for each in self.frames
            ],
        }


def _show(photographs: Sequence[Classified], clips: Sequence[_Clip]) -> None:
    console = output_console()
    if photographs:
        of_photographs = (([click.format_filename(photo.path)], photo.guesses) for photo in photographs)
        console.print(_table(["photograph"], of_photographs))
    if any(clip.frames for clip in clips):
        of_frames = (
            ([click.format_filename(clip.path) if number == 0 else "", f"{frame.time:.3f} s"], frame.guesses)
            for clip in clips
            for number, frame in enumerate(clip.frames)
        )
        console.print(_table(["video", "time"], of_frames))
    for clip in clips:
        if clip.fallback_reason is not None:
            click.echo(f"{click.format_filename(clip.path)}: decoded on the CPU: {clip.fallback_reason}")


def _table(what: Sequence[str], rows: Iterable[tuple[list[str], tuple[Guess, ...]]]) -> Table:
    """One line per class. The first line of a photograph names the photograph."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column(what[0], overflow="fold")
    for name in what[1:]:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("class", overflow="fold")
    table.add_column("probability", justify="right", no_wrap=True)
    for called, guesses in rows:
        for rank, guess in enumerate(guesses):
            first = [Text(each) for each in (called if rank == 0 else [""] * len(what))]  # not parsed as markup
            table.add_row(*first, Text(guess.name or f"class {guess.index}"), f"{guess.probability:.1%}")
    return table


def _plain(photo: Classified) -> dict[str, Any]:
    return {"path": str(photo.path), "classes": [asdict(guess) for guess in photo.guesses]}
