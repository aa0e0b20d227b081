"""The network of Keras's example that predicts the next frame of a video with ConvLSTM layers (`layer.py`).

network = next_frame_network()
load_keras_weights(network, "next_frame.keras")
future = predict_frames(network, frames, 10)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rooftop.launch.symbolic import refuse_proxies
from rooftop.models.conv_lstm.layer import FIRST, LAST, ConvLSTM2D, States
from rooftop.nn.modes import evaluating

WIDE = 8  # with fewer output channels, cuDNN does not use tensor cores for float32


class FramesConvolution(nn.Conv3d):
    """A 3x3x3 convolution over frames, (N, C, T, H, W) -> (N, O, T, H, W), as one 2-D convolution of all frames.

    The three kernel slices (taps) in time become 3 * O output channels, which are then shifted in time and added. So
    the frames (T, N, H, W, C) are read in place; a 3-D convolution would need a copy in a different memory order.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels, 3, padding=1)

    def forward(self, x: Tensor, ahead: bool = True) -> Tensor:
        """Compute each output frame from the previous, the current and (with `ahead`) the next input frame.

        Frames beyond the ends are zeros.
        """
        frames = x.permute(2, 0, 1, 3, 4)  # (T, N, C, H, W)
        weight = self.weight if ahead else self.weight[:, :, :2]
        weight = weight.permute(2, 0, 1, 3, 4).flatten(0, 1)  # (3 * O, C, 3, 3), grouped by the tap in time
        channels = len(weight)
        if frames.is_cuda and channels < WIDE:
            weight = F.pad(weight, (0, 0, 0, 0, 0, 0, 0, WIDE - channels))
        taps = F.conv2d(frames.flatten(0, 1), weight, padding=1).unflatten(0, frames.shape[:2])[:, :, :channels]
        before, at, *after = taps.split(self.out_channels, 2)  # (T, N, O, H, W) each, indexed by the input frame
        nothing = torch.zeros_like(at[:1])
        y = at + torch.cat((nothing, before[:-1]))
        if ahead:
            y = y + torch.cat((after[0][1:], nothing))
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)[:, None, None]
        return y.permute(1, 2, 0, 3, 4)


class NextFrameNetwork(nn.Module):
    """A network that predicts the next frame of a video.

    The network is that of Keras's example "Next-Frame Video Prediction with Convolutional LSTMs". With
    `every_frame=False`, the network is a variant that returns only one frame.

    The network has three ConvLSTM layers (relu). A batch norm with Keras's defaults (epsilon 0.001, momentum 0.99)
    follows the first and the second layer. The head is a 3x3x3 convolution over the frames, or for `every_frame=False`
    a 3x3 convolution of the last hidden state.

    Args:
        channels: channels of the frames; 1 for grey, 3 for colour.
        filters: filters of each ConvLSTM layer.
        kernel_sizes: kernel sizes of the three layers.
        every_frame: return the predicted next frame for each step, instead of only for the last step.
        data_format: "channels_last", (N, T, H, W, C), or "channels_first", (N, T, C, H, W).
    """

    def __init__(
        self,
        channels: int = 1,
        filters: int = 64,
        kernel_sizes: Sequence[int] = (5, 3, 1),
        every_frame: bool = True,
        data_format: str = LAST,
    ) -> None:
        super().__init__()
        if len(kernel_sizes) != 3:
            raise ValueError(f"NextFrameNetwork: expected three kernel sizes, got {kernel_sizes!r}")
        self.every_frame, self.data_format = every_frame, data_format
        inputs = (channels, filters, filters)
        self.layers = nn.ModuleList(
            ConvLSTM2D(c, filters, k, padding="same", activation="relu", data_format=data_format, return_sequences=True)
            for c, k in zip(inputs, kernel_sizes, strict=True)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(filters, eps=1e-3, momentum=0.01) for _ in range(2))
        self.head: nn.Conv2d | nn.Conv3d
        self.head = FramesConvolution(filters, channels) if every_frame else nn.Conv2d(filters, channels, 3, padding=1)
        nn.init.xavier_uniform_(self.head.weight)
        nn.init.zeros_(self.head.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """Predict frames in [0, 1], in the input's layout: (N, T, ...) with every_frame, (N, ...) without.

        Args:
            x: (N, T, H, W, C), or (N, T, C, H, W) with channels_first.
        """
        refuse_proxies(self, x)
        return self.logits(x).sigmoid()

    def logits(self, x: Tensor, ahead: bool = True) -> Tensor:
        """Predict logits, for `binary_cross_entropy_with_logits`: half precision needs this loss.

        Args:
            x: as in `forward`.
            ahead: as in `frames_of`. Train with False. With True, the head would see the next step's state, which
                contains the frame to predict, so the network would learn to copy this frame.
        """
        hidden, _ = self.features(x)
        return self.frames_of(hidden, ahead)

    def features(self, x: Tensor, states: Sequence[States | None] = (None, None, None)) -> tuple[Tensor, list[States]]:
        """Compute the last layer's hidden states, and each layer's final state.

        The hidden states are (N, T, ...), or (N, 1, ...) with every_frame=False.

        Args:
            x: as in `forward`.
            states: the initial state of each layer.
        """
        after = []
        for index, (layer, state) in enumerate(zip(self.layers, states, strict=True)):
            last_only = index == 2 and not self.every_frame
            x, found = layer.unrolled(x, state, last_only=last_only)  # type: ignore[operator]
            after.append(found)
            if index < 2:
                x = self._normalized(x, self.norms[index])
        return x, after

    def frames_of(self, hidden: Tensor, ahead: bool = True) -> Tensor:
        """Compute the head's logits for hidden states (N, T, ...).

        The logits are (N, T, ...), or (N, ...) with every_frame=False.

        Args:
            hidden: hidden states of the last layer.
            ahead: whether the head computes frame t from the hidden states of steps t - 1, t and t + 1, as in Keras's
                example. If False, the head does not read step t + 1: it computes each frame
                as if step t were the last step, as in prediction. With every_frame=False, `ahead` has no effect.
        """
        if self.every_frame:
            return self._from_channels_first(self.head(self._channels_first(hidden), ahead))
        last = hidden[:, -1]
        if self.data_format == FIRST:
            return self.head(last)
        return self.head(last.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)

    def _normalized(self, x: Tensor, norm: nn.Module) -> Tensor:
        """Normalize all frames (N, T, ...) as one batch, without a copy. In memory, T stays before N, as in the results
        of `ConvLSTM2D`."""
        flat = x.transpose(0, 1).flatten(0, 1)  # (T * N, ...)
        y = norm(flat) if self.data_format == FIRST else norm(flat.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return y.unflatten(0, (x.shape[1], x.shape[0])).transpose(0, 1)

    def _channels_first(self, x: Tensor) -> Tensor:
        """Permute (N, T, H, W, C) or (N, T, C, H, W) to (N, C, T, H, W)."""
        return x.permute(0, 4, 1, 2, 3) if self.data_format == LAST else x.transpose(1, 2)

    def _from_channels_first(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 4, 1) if self.data_format == LAST else x.transpose(1, 2)


def next_frame_network(**options: Any) -> NextFrameNetwork:
    """The network of Keras's example for grey frames: 746,689 parameters, including 256 running statistics of norms.

    The network maps frames (N, T, H, W, 1) in [0, 1] to the next frames, (N, T, H, W, 1). Train the network with binary
    cross entropy and Adam, on targets shifted by one frame. The options are the arguments of `NextFrameNetwork`.
    """
    return NextFrameNetwork(**{"channels": 1, **options})


def colour_next_frame_network(**options: Any) -> NextFrameNetwork:
    """The network for colour frames: 759,491 parameters, including 256 running statistics of norms.

    The network maps frames (N, T, H, W, 3) in [0, 1] to the next frame, (N, H, W, 3).

    The last ConvLSTM returns only its last state, which a 3x3 convolution converts to a frame. Train the network with
    the mean absolute error and Adam. The options are the arguments of `NextFrameNetwork`.
    """
    return NextFrameNetwork(**{"channels": 3, "every_frame": False, **options})


def predict_frames(network: NextFrameNetwork, frames: Tensor, count: int) -> Tensor:
    """Predict the next frames of a video, each from the given frames and the frames predicted before it.

    The layers' states are kept, so each predicted frame after the first costs one step. The frames are the same as if
    the network ran over the whole video for each frame. The network runs in evaluation mode, without gradients; then
    the previous mode is restored.

    Args:
        network: a network that predicts one frame or all frames.
        frames: (N, T, H, W, C) or (N, T, C, H, W), in the network's data_format; T at least 1.
        count: number of frames to predict, at least 1.

    Returns:
        (N, count, ...), in [0, 1].

    Raises:
        ValueError: count or the shape of the frames is wrong.
    """
    if not isinstance(count, int) or count < 1:
        raise ValueError(f"predict_frames: count must be a positive integer, got {count!r}")
    with evaluating(network), torch.no_grad():
        return _rolled_out(network, frames, count)


def _rolled_out(network: NextFrameNetwork, frames: Tensor, count: int) -> Tensor:
    """Predict frame by frame: each predicted frame is the input of the next step."""
    hidden, states = network.features(frames)
    predicted = []
    while True:
        # A 3x3x3 head uses the last two steps, followed by a step of zeros.
        recent = hidden[:, -2:]
        frame = network.frames_of(recent).sigmoid()
        predicted.append(frame[:, -1] if network.every_frame else frame)
        if len(predicted) == count:
            return torch.stack(predicted, 1)
        step, states = network.features(predicted[-1][:, None].to(frames.dtype), states)
        hidden = torch.cat((recent[:, -1:], step), 1)
