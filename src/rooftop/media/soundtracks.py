"""The sound track of a written video: packets copied from another file, or encoded samples."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from rooftop.errors import InputError
from rooftop.media.containers import Container
from rooftop.media.errors import DamagedVideoError
from rooftop.media.opening import Source, said

if TYPE_CHECKING:
    from rooftop.media.pyav import av

CHANNELS = {1: "mono", 2: "stereo", 3: "2.1", 4: "4.0", 5: "5.0", 6: "5.1", 7: "6.1", 8: "7.1"}
"""FFmpeg's layout names, by the number of channels."""

USUAL = {".webm": "libopus", ".ogg": "libopus", ".avi": "pcm_s16le", ".wmv": "wmav2"}
"""Default encoders of sound by the file's suffix; aac for other suffixes. AVI cannot state how many samples an encoder
adds before the sound, so the default for AVI is PCM, which adds none."""

ENCODED_AT_ONCE = 1 << 14  # samples


class Timed(NamedTuple):
    """A packet, and the time in seconds, on the clock of the written video, at which the packet's sound begins."""

    seconds: Fraction
    packet: av.Packet[av.AudioStream]


class CopiedSound:
    """Copies the packets of all sound streams of a file, without encoding them again.

    Args:
        container: the container to which the sound is added.
        path: path of the file with the sound.
        start_s: time on the file's clock that becomes 0 in the written video. If it is above 0, packets that begin
            before this time are dropped.

    Raises:
        InputError: the file does not exist or has no sound, or the container does not support the codec.
    """

    def __init__(self, container: av.container.OutputContainer, path: str | os.PathLike[str], start_s: float) -> None:
        if not 0 <= start_s < float("inf"):
            raise InputError(f"sound_start_s={start_s}: expected 0 seconds or more")
        self.name = str(path)
        self._input = Container(Source(path))
        try:
            self._streams = {}
            for stream in self._input.audio():
                if stream.codec_context is None:
                    raise InputError(f"the sound of {self.name} is in a codec that this FFmpeg does not know")
                name = stream.codec_context.codec.canonical_name
                try:
                    copy = container.add_stream_from_template(stream, opaque=True)
                except ValueError as error:
                    raise InputError(
                        f"a {container.format.name} file cannot hold the {name} sound of {self.name}: write an .mkv "
                        "file, leave the sound out (rooftop media transcode --no-sound), or encode it again "
                        "(writer.write_sound(*read_sound(path)[:2]))"
                    ) from error
                self._streams[stream.index] = copy
                if stream.language:
                    copy.metadata["language"] = stream.language
        except BaseException:
            self.close()
            raise
        self._start = Fraction(self._input.start_us, 1_000_000) + Fraction(start_s)
        self._packets = self._all(Fraction(start_s) > 0)
        self._next: Timed | None = None

    def _all(self, from_within: bool) -> Iterator[Timed]:
        """Yield the packets in file order, with times on the clock of the written video: this clock is 0 at `start_s`
        seconds after the start of the sound file.

        Raises:
            DamagedVideoError: a packet is damaged, or the file cannot be read further.
        """
        packets = self._input.input.demux(tuple(self._input.audio()))
        while True:
            try:
                packet = next(packets, None)
            except self._input.av.FFmpegError as error:
                raise DamagedVideoError(f"the sound of {self.name} cannot be read further: {said(error)}") from error
            if packet is None:
                return
            if packet.size == 0 or packet.dts is None or packet.time_base is None:
                continue  # an empty packet only drains a decoder
            if packet.is_corrupt:
                raise DamagedVideoError(f"the sound of {self.name} has a damaged or incomplete packet")
            base = packet.time_base
            begin = packet.pts if packet.pts is not None else packet.dts
            if from_within and begin * base < self._start:
                continue
            ticks = round(self._start / base)
            packet.dts -= ticks
            packet.pts = begin - ticks
            packet.stream = self._streams[packet.stream_index]
            yield Timed(packet.pts * base, packet)

    def until(self, seconds: Fraction | None) -> Iterator[av.Packet[av.AudioStream]]:
        """Yield the remaining packets that begin before `seconds`, a time of the written video, or all remaining
        packets if `seconds` is None."""
        while True:
            self._next = self._next or next(self._packets, None)
            if self._next is None or (seconds is not None and self._next.seconds >= seconds):
                return
            packet, self._next = self._next.packet, None
            yield packet

    def finish(self) -> None:
        """Do nothing: copied sound needs no encoding."""

    def close(self) -> None:
        self._input.close()


class EncodedSound:
    """Encodes samples as they arrive.

    Args:
        container: the container to which the encoded sound is added.
        codec: the name of an FFmpeg encoder.
        channels, rate_hz: number of channels and sample rate.

    Raises:
        InputError: the encoder is unknown, the container does not support the encoder's output, or the rate is not
            supported.
    """

    def __init__(self, container: av.container.OutputContainer, codec: str, channels: int, rate_hz: int) -> None:
        import av  # without `load_av`: the `VideoWriter` that creates this object has already checked PyAV

        try:
            encoder = av.Codec(codec, "w")
        except ValueError as error:
            raise InputError(f"no encoder {codec!r} in this FFmpeg: expected aac, libopus, flac, ...") from error
        if encoder.type != "audio":
            raise InputError(f"{codec!r} encodes {encoder.type}: expected an encoder of sound, such as aac")
        rates = encoder.audio_rates
        if rates and rate_hz not in rates:
            raise InputError(f"{codec} does not encode {rate_hz} Hz: expected one of {', '.join(map(str, rates))}")
        if channels not in CHANNELS:
            raise InputError(f"{channels} channels of sound: expected 1 to {max(CHANNELS)}")
        try:
            stream = container.add_stream(codec, rate=rate_hz)
        except ValueError as error:
            raise InputError(f"a {container.format.name} file cannot hold {codec} sound: {error}") from error
        assert isinstance(stream, av.AudioStream)
        self._stream = stream
        self._stream.layout = CHANNELS[channels]
        self.av, self.codec, self.channels, self.rate_hz = av, codec, channels, rate_hz
        self._given = 0
        self._waiting: deque[av.Packet[av.AudioStream]] = deque()

    def write(self, samples: Tensor) -> None:
        """Encode samples (C, N) of a floating-point dtype."""
        for part in samples.split(ENCODED_AT_ONCE, 1):
            array = part.to(torch.float32).contiguous().numpy()
            frame = self.av.AudioFrame.from_ndarray(array, format="fltp", layout=CHANNELS[self.channels])
            frame.sample_rate, frame.pts, frame.time_base = self.rate_hz, self._given, Fraction(1, self.rate_hz)
            self._given += part.shape[1]
            self._waiting.extend(self._stream.encode(frame))

    def until(self, seconds: Fraction | None) -> Iterator[av.Packet[av.AudioStream]]:
        """Yield the remaining packets that begin before `seconds`, a time of the written video, or all remaining
        packets if `seconds` is None."""
        while self._waiting:
            packet = self._waiting[0]
            late = seconds is not None and packet.pts is not None and packet.pts * packet.time_base >= seconds
            if late:
                return
            yield self._waiting.popleft()

    def finish(self) -> None:
        """Encode the remaining samples."""
        self._waiting.extend(self._stream.encode(None))

    def close(self) -> None:
        self._waiting.clear()


def usual_codec(suffix: str) -> str:
    """The default encoder of sound for a file with this suffix."""
    return USUAL.get(suffix.lower(), "aac")
