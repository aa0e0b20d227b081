"""Continue a clip with a next-frame network, and compare the result with the real frames.

    network = load_next_frame_network("digits.pth")  # the file determines channels and filters
    found = continue_clip(network, frames[:10], frames[10:], 20)
    found.frames, found.errors, found.errors_of_repeating

`errors_of_repeating` is the baseline: the errors of a prediction that repeats the last frame. A network whose errors
are no lower has learned nothing about motion.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rooftop.debugging import memory_error_as
from rooftop.errors import ModelRunError, WeightsError
from rooftop.models.conv_lstm.keras_weights import as_torch, read_keras_weights
from rooftop.models.conv_lstm.layer import LAST
from rooftop.models.conv_lstm.network import NextFrameNetwork, predict_frames
from rooftop.models.loading import KERAS, load
from rooftop.models.weights.dialects import NEXT_FRAME, converted
from rooftop.models.weights.files import read_weights, weights_file
from rooftop.words import counted

LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601: Keras and Pillow convert to grey with these weights


@dataclass(frozen=True)
class Continuation:
    """The network's continuation of a clip.

    Frames are (C, H, W) in 0..1 on the CPU, with the network's number of channels C.

    Attributes:
        frames: (T, C, H, W), the predicted frames.
        real: (R, C, H, W), the real frames to compare with; R is at most T.
        errors: (R,), mean absolute error of each predicted frame.
        errors_of_repeating: (R,), errors of a prediction that repeats the last frame of the context.
    """

    frames: Tensor
    real: Tensor
    errors: Tensor
    errors_of_repeating: Tensor


def load_next_frame_network(weights: str | Path) -> NextFrameNetwork:
    """Load a `NextFrameNetwork` with the weights of a file; the file determines channels, filters, kernels and head.

    Args:
        weights: a file of a format that `load` accepts: torch.save, safetensors or Keras.

    Raises:
        InputError: the file does not exist.
        WeightsError: the file is damaged, or from another network.
        MissingExtraError: see `rooftop.models.load`.
    """
    path = weights_file("next_frame_network", Path(weights))
    options = _options(path)
    network = load("next_frame_network" if options["every_frame"] else "colour_next_frame_network", path, **options)
    assert isinstance(network, NextFrameNetwork)
    return network


def _options(path: Path) -> dict[str, Any]:
    """Infer the options for building the network whose weights are in a file, from the shapes of the kernels."""
    kernels, heads = _keras_kernels(path) if path.suffix.lower() in KERAS else _kernels(path)
    if (
        [each.dim() for each in kernels] != [4, 4, 4]
        or len(heads) != 1
        or heads[0].dim() not in (4, 5)
        or kernels[0].shape[1] not in (1, 3)
    ):
        raise WeightsError(
            f"{path} is not from a network that predicts the next frame: expected three ConvLSTM2D layers, the first "
            f"for grey or colour frames, and a convolution; got {counted(len(kernels), 'ConvLSTM2D layer')} with "
            f"kernels {[tuple(each.shape) for each in kernels]} and {counted(len(heads), 'convolution')} with kernels "
            f"{[tuple(each.shape) for each in heads]}"
        )
    return {
        "channels": kernels[0].shape[1],
        "filters": max(1, kernels[0].shape[0] // 4),
        "kernel_sizes": tuple(tuple(each.shape[2:]) for each in kernels),
        "every_frame": heads[0].dim() == 5,
    }


def _kernels(path: Path) -> tuple[list[Tensor], list[Tensor]]:
    """Read the kernels of the ConvLSTM layers and of the head (the last convolution) from a file of torch.save or
    safetensors."""
    tensors = read_weights(path)
    try:
        tensors = converted(tensors, NEXT_FRAME, "a next-frame network").tensors
    except WeightsError as error:
        raise WeightsError(f"{path}: {error}") from error
    names = [f"layers.{number}.kernel" for number in range(3)]
    return [tensors[name] for name in names if name in tensors], [tensors[n] for n in ("head.weight",) if n in tensors]


def _keras_kernels(path: Path) -> tuple[list[Tensor], list[Tensor]]:
    """Read the kernels of the ConvLSTM layers and of the convolutions from a file of Keras, in torch's layout."""
    layers = read_keras_weights(path)
    return (
        [as_torch(each)["kernel"] for each in layers if each.kind == "conv_lstm2d"],
        [as_torch(each)["weight"] for each in layers if each.kind in ("conv2d", "conv3d")],
    )


def continue_clip(
    network: NextFrameNetwork,
    context: Tensor,
    real: Tensor,
    count: int,
    progress: Callable[[str, float], None] = lambda what, fraction: None,
) -> Continuation:
    """Predict the frames after the context, each from the context and the frames predicted before it, and compare the
    predictions with the real frames.

    Args:
        network: the network, on its device.
        context: (T, 3, H, W), floating-point frames in 0..1, T at least 1. For a grey network, the frames are converted
            to grey.
        real: (R, 3, H, W), the real frames after the context. R may be 0; frames beyond `count` are ignored.
        count: number of frames to predict, at least 1.
        progress: called with (text that names the current activity, fraction of the frames that are predicted).

    Raises:
        TypeError: frames are not floating point.
        ValueError: `count` or the shape of the context is wrong.
        ModelRunError: the GPU's memory is too small, or a predicted frame is not finite.
    """
    for name, frames in (("context", context), ("real", real)):
        if not frames.is_floating_point():
            raise TypeError(f"continue_clip: {name} must be floating point in 0..1, got {frames.dtype}: divide by 255")
    weight = network.head.weight
    assert isinstance(weight, Tensor)
    seen = _as_network(network, context)
    done = 0

    def one_more(*_: object) -> None:
        nonlocal done
        done += 1
        progress("predicting", done / count)

    progress("predicting", 0.0)
    hook = network.head.register_forward_hook(one_more)  # the head runs once per predicted frame
    last = network.data_format == LAST
    message = f"frames of {' x '.join(map(str, context.shape[2:]))} do not fit into the memory of {weight.device}"
    try:
        with memory_error_as(lambda words: ModelRunError(f"{message} ({words}): shrink them")):
            x = seen[None].to(device=weight.device, dtype=weight.dtype)  # (1, T, C, H, W)
            found = predict_frames(network, x.permute(0, 1, 3, 4, 2) if last else x, count)[0]
    finally:
        hook.remove()
    frames = (found.permute(0, 3, 1, 2) if last else found).float().cpu()
    if not bool(torch.isfinite(frames).all()):
        raise ModelRunError("the predicted frames are not finite (nan or inf): the weights are damaged")
    real = _as_network(network, real[:count])
    errors, repeating = ((each - real).abs().mean((1, 2, 3)) for each in (frames[: len(real)], seen[-1:]))
    return Continuation(frames, real, errors, repeating)


def _as_network(network: NextFrameNetwork, frames: Tensor) -> Tensor:
    """Convert (T, 3, H, W) to the network's channels, (T, C, H, W)."""
    first = network.layers[0]
    if first.in_channels == frames.shape[1]:
        return frames
    weights = torch.tensor(LUMA, dtype=frames.dtype, device=frames.device)
    return (frames * weights[:, None, None]).sum(1, keepdim=True)
