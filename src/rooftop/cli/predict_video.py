"""`rooftop predict-video`: show predicted frames of a clip next to the real frames."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
from PIL import Image
from torch import Tensor, nn

from rooftop.cli.commands.predict_video import USUAL_CONTEXT, USUAL_SIDE, VIDEOS
from rooftop.cli.media_options import CLOCK_SLACK_S, end_of, first_position
from rooftop.cli.outputs import check_writable, write_json
from rooftop.cli.progress import progress_bar
from rooftop.cli.trained_models import engine_of, seeded
from rooftop.errors import InputError
from rooftop.media import VideoReader, VideoWriter
from rooftop.models import NextFrameNetwork, colour_next_frame_network, next_frame_network
from rooftop.models.conv_lstm.layer import States
from rooftop.models.conv_lstm.video import Continuation, continue_clip, load_next_frame_network
from rooftop.whole_files import whole_file
from rooftop.words import counted

MAX_SIDE = 16384  # libx264's limit in pixels

Size = tuple[int, int]
Progress = Callable[[str, float], None]


class Clip(NamedTuple):
    """The frames of a video that the command needs, (T, 3, H, W) each. `context` has the last frames before `after_s`
    seconds; `real` has at most `--frames` frames from `after_s` on, to compare with the prediction."""

    context: Tensor
    real: Tensor
    after_s: float
    fps: float


def run(
    clip: Path,
    weights: Path | None,
    seed: int | None,
    frames: int,
    after: float | None,
    context: int | None,
    size: Size | None,
    colour: bool | None,
    where: torch.device,
    dtype: torch.dtype | None,
    output: Path | None,
    picture: Path | None,
    json_path: Path | None,
) -> None:
    """Run the command that `rooftop.cli.commands.predict_video:command` describes."""
    if (weights is None) == (seed is None):
        raise click.UsageError(
            "expected exactly one of --weights FILE and --random-weights SEED (an untrained network)"
        )
    video = output or Path(f"{clip.stem}-predicted.mp4")
    picture = picture or video.with_suffix(".png")
    _check_outputs(video, picture, [clip] if weights is None else [clip, weights])
    with progress_bar() as progress:
        shown = _read(clip, size, after, context, frames, progress)
        network = _ByEngine(_network(weights, seed, colour), where, dtype)
        # open the output before the long work
        with VideoWriter(video, shown.fps, options={"crf": "18"}, pad=True) as writer:
            found = continue_clip(network, shown.context, shown.real, frames, progress)
            progress("writing", 0.0)
            real = _with_black(found)
            writer.write(_rgb(torch.cat((real, found.frames), 3)))
            _write(writer, picture, torch.cat([torch.cat(list(row), 2) for row in (real, found.frames)], 1))
    told = _told(clip, weights, seed, network, shown, found, video, picture)
    if not write_json(json_path, told):
        click.echo("\n".join(_lines(told)))


def _check_outputs(video: Path, picture: Path, inputs: Sequence[Path]) -> None:
    """Check the output files before the work begins.

    Raises:
        click.BadParameter: a file cannot be written, has a name with another suffix, or is an input file.
    """
    for path, suffixes, option in ((video, VIDEOS, "--output"), (picture, (".png",), "--picture")):
        check_writable(path, inputs)
        if path.suffix.lower() not in suffixes:
            raise click.BadParameter(f"{path}: expected a name with {' or '.join(suffixes)}", param_hint=option)


def _read(
    path: Path, size: Size | None, after: float | None, context: int | None, frames: int, progress: Progress
) -> Clip:
    """Read the context (the frames before `after`), and the real frames from `after` on, to compare with the predicted.

    If `after` is None, the network predicts the last `frames` frames of the video.

    Raises:
        InputError: the file is not a video, has too few frames, or ends before `after`.
        DamagedVideoError: a frame that is needed cannot be decoded.
    """
    progress("reading", 0.0)
    with VideoReader(path) as whole:
        shorter = min(whole.height, whole.width)
        scale = min(1.0, USUAL_SIDE / shorter)
        size = size or (round(whole.height * scale), round(whole.width * scale))
    if max(size[0], 2 * size[1]) > MAX_SIDE:
        raise InputError(
            f"two frames of {size[1]} x {size[0]} side by side exceed the limit of H.264, {MAX_SIDE} pixels on a "
            "side. Give a smaller --size"
        )
    with VideoReader(path, dtype=torch.float32, resize=size) as reader:
        times = reader.times
        count = len(times)
        end = end_of(reader)
        if after is None:
            cut = count - frames
            if cut < 1:
                raise InputError(
                    f"{path} is too short: it has {counted(count, 'frame')}, and the network needs at least one frame "
                    f"before the last {frames}. Give fewer --frames, or --after {end:.3f} to predict beyond its end"
                )
        else:
            if not 0 <= after <= end + CLOCK_SLACK_S:
                raise InputError(f"--after {after:g}: expected seconds from 0 to {end:.3f}, where {path} ends")
            cut = first_position(reader, after)
        wanted = context or max(1, min(USUAL_CONTEXT, cut))
        if cut < wanted:
            raise InputError(
                f"{path} is too short: {cut} of its {count} frames come before the first predicted frame, but the "
                f"network needs {wanted}. Give a smaller --context, or a later --after"
            )
        after_s = float(times[cut]) if cut < count else end
        positions = range(cut - wanted, min(count, cut + frames))
        pixels = torch.empty(len(positions), 3, *size)
        for place, position in enumerate(positions):
            pixels[place] = reader[position]
            progress("reading", (place + 1) / len(positions))
        return Clip(pixels[:wanted], pixels[wanted:], after_s, reader.fps)


def _network(weights: Path | None, seed: int | None, colour: bool | None) -> NextFrameNetwork:
    if weights is not None:
        network = load_next_frame_network(weights)
        if colour is not None and colour != _is_colour(network):
            wrong = "--colour" if colour else "--grey"
            raise InputError(f"{weights} belongs to a network for {_colour(network)} frames: leave out {wrong}")
        return network
    with seeded(seed or 0):
        return colour_next_frame_network() if colour else next_frame_network()


class _ByEngine(NextFrameNetwork):
    """A next-frame network whose recurrent layers run in an inference engine. The head, one convolution per frame, runs
    in float32 outside the engine.
    """

    def __init__(self, network: NextFrameNetwork, where: torch.device, dtype: torch.dtype | None) -> None:
        nn.Module.__init__(self)
        # no layout conversion: the network's 4-D tensors are states (N, H, W, F), whose channels are last already
        self._engine = engine_of(_Layers(network), "the network", where, dtype, channels_last=False)
        self.every_frame, self.data_format = network.every_frame, network.data_format
        self.layers, self.head = network.layers, network.head

    def features(self, x: Tensor, states: Sequence[States | None] = (None, None, None)) -> tuple[Tensor, list[States]]:
        found: tuple[Tensor, list[States]] = self._engine(x, list(states))
        return found


class _Layers(nn.Module):
    """The network's recurrent layers: (frames, states before them) -> (hidden states, states after the frames)."""

    def __init__(self, network: NextFrameNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor, states: list[States | None]) -> tuple[Tensor, list[States]]:
        return self.network.features(x, states)


def _is_colour(network: NextFrameNetwork) -> bool:
    return bool(network.layers[0].in_channels == 3)


def _colour(network: NextFrameNetwork) -> str:
    return "colour" if _is_colour(network) else "grey"


def _with_black(found: Continuation) -> Tensor:
    """Append black frames to the real frames (T, C, H, W), so that there are as many as predicted frames."""
    black = torch.zeros_like(found.frames[len(found.real) :])
    return torch.cat((found.real, black))


def _rgb(frames: Tensor) -> Tensor:
    """Convert frames (..., C, H, W) with one or three channels to three channels."""
    return frames.expand(*frames.shape[:-3], 3, *frames.shape[-2:])


def _write(writer: VideoWriter, picture: Path, pixels: Tensor) -> None:
    """Save the picture (C, H, W) and the writer's video. Both files have temporary names until they are complete."""
    array = (_rgb(pixels) * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous().numpy()
    with whole_file(picture) as temporary:
        Image.fromarray(array).save(temporary, format="PNG")
        writer.close()


def _told(
    clip: Path,
    weights: Path | None,
    seed: int | None,
    network: NextFrameNetwork,
    shown: Clip,
    found: Continuation,
    video: Path,
    picture: Path,
) -> dict[str, Any]:
    """Return the results as plain data for JSON."""
    compared = len(found.real) > 0
    return {
        "clip": str(clip),
        "weights": None if weights is None else str(weights),
        "random_seed": seed,
        "colours": _colour(network),
        "size": list(found.frames.shape[2:]),
        "fps": shown.fps,
        "after_s": shown.after_s,
        "context": len(shown.context),
        "frames": len(found.frames),
        "real_frames": len(found.real),
        "error": found.errors.mean().item() if compared else None,
        "error_of_repeating": found.errors_of_repeating.mean().item() if compared else None,
        "errors": found.errors.tolist(),
        "errors_of_repeating": found.errors_of_repeating.tolist(),
        "video": str(video),
        "picture": str(picture),
    }


def _lines(told: dict[str, Any]) -> list[str]:
    clip, video, picture = (click.format_filename(told[key]) for key in ("clip", "video", "picture"))
    seed, count, real = told["random_seed"], told["frames"], told["real_frames"]
    weights = (
        f"random, seed {seed}: the network is untrained, so its prediction means nothing"
        if seed is not None
        else click.format_filename(told["weights"])
    )
    lines = [
        f"{clip}: {counted(count, 'frame')} predicted after {told['after_s']:.3f} s, from the {told['context']} "
        f"before; {told['size'][1]} x {told['size'][0]}, {told['colours']}",
        f"weights: {weights}",
    ]
    if real:
        lines.append(
            f"mean absolute error, 0 to 1, of {counted(real, 'frame')}: predicted {told['error']:.4f}, "
            f"last frame repeated {told['error_of_repeating']:.4f}"
        )
    if real < count:
        lines.append(
            f"the clip ends after {real} of these {counted(count, 'frame')}: the real frames after that are black"
        )
    return [*lines, f"video: {video}", f"picture: {picture}"]
