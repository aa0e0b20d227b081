"""`read_sound` reads the sound of a file as a tensor, exact to the sample.

Encoders add samples before the sound (1024 for AAC, 312 for Opus, 1105 for MP3) and after it. Like players,
`read_sound` removes as many of these samples as the file states. Decoding always starts at the beginning of the file:
in AAC, MP3 and Opus a sample depends on all samples before it, so decoding after a seek would return other values.
Sound after the requested end is not decoded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from rooftop.errors import InputError
from rooftop.media.containers import Container
from rooftop.media.errors import DamagedSoundError
from rooftop.media.opening import Source, said, seconds_of

if TYPE_CHECKING:
    from rooftop.media.pyav import av

SCALES = {"u8": (128, 128.0), "s16": (0, 32768.0), "s32": (0, 2147483648.0), "flt": (0, 1.0), "dbl": (0, 1.0)}
"""For FFmpeg's sample formats: the value of silence, and the difference between the values of 1.0 and silence. Planar
formats, whose names end with "p", have the same values.
"""

HEAD_BYTES = 1 << 16
JITTERS_A_SECOND = 200  # packet times may differ from the sample count by 5 ms, because Matroska stores times in ms
# maximum silence that the jumps in time of a track may insert in total: 6 minutes of two channels at 48 kHz
MAX_SILENCE_BYTES = 1 << 27
BACK_S = 1  # maximum overlap of a packet with the sound before it
LOSSLESS = ("pcm_", "flac")
TOLD_LENGTH = ("wav", "w64", "flac", "aiff", "caf", "au")  # formats whose header states the length of the sound


class Sound(NamedTuple):
    """Sound as a tensor.

    Attributes:
        samples: (C, N) float32 in -1..1; codecs that store floating-point numbers (AAC, Opus, MP3) may exceed
            this range slightly.
        rate_hz: samples per second.
        start_s: time of the first sample, in seconds on the clock of the file.
    """

    samples: Tensor
    rate_hz: int
    start_s: float


def read_sound(
    path_or_bytes: str | os.PathLike[str] | bytes, start_s: float = 0.0, end_s: float | None = None, track: int = 0
) -> Sound:
    """Read the sound of a file, or a part of it.

        sound = read_sound("walk.mp4")                          # Sound(samples (2, N), 48000, 0.0)
        sound = read_sound("walk.mp4", start_s=1.5, end_s=2.0)  # (2, 24000)

    Times are on the clock of the file, as in `VideoReader`. Gaps between packets become silence. All samples
    are in memory together: 11 MB per minute of one channel at 48 kHz.

    Args:
        path_or_bytes: a file of sound or of video, or the content of one.
        start_s, end_s: in seconds. The result begins with the sample nearest to `start_s`, and ends before the sample
            nearest to `end_s`.
        track: index of the sound stream, from 0 on.

    Raises:
        InputError: there is no such file, the file has no sound or no such track, or there is no sound between these
            times.
        DamagedSoundError: a position cannot be decoded, or the file ends early. The `sound` of this error is the sound
            before that position.
        MissingExtraError: PyAV is not installed.
    """
    if not 0 <= start_s < float("inf") or (end_s is not None and not start_s < end_s < float("inf")):
        raise InputError(f"sound from {start_s} s to {end_s} s: expected a start of 0 or later and an end after it")
    source = Source(path_or_bytes)
    with Container(source) as container:
        streams = container.audio()
        if not 0 <= track < len(streams):
            raise InputError(
                f"track {track} of {source.name}: it has {len(streams)} audio tracks, 0 to {len(streams) - 1}"
            )
        if streams[track].codec_context is None:
            raise InputError(f"{source.name} contains sound in a codec that this FFmpeg cannot decode: convert it")
        return _Track(container, streams[track]).read(Fraction(start_s), None if end_s is None else Fraction(end_s))


class _Broken(Exception):
    """A position of the sound cannot be decoded."""


class _Part(NamedTuple):
    """The part of a track from position `first` to `end`. With a frame, it is the frame's last `end - first` samples;
    the frame's earlier samples belong to the part before, or lie before time 0. Without a frame, it is silence."""

    first: int
    end: int
    frame: av.AudioFrame | None


class _Track:
    """One stream of sound. Positions count samples from time 0 of the file's clock."""

    def __init__(self, container: Container, stream: av.AudioStream) -> None:
        self.container, self.stream, self.name = container, stream, container.source.name
        self.rate, self.channels = 0, 0  # set from the first frame
        self.lossless = stream.codec_context.codec.canonical_name.startswith(LOSSLESS)
        self.position: int | None = None  # position of the next sample
        self.silence = 0

    def read(self, start_s: Fraction, end_s: Fraction | None) -> Sound:
        parts: list[Tensor] = []
        begin = 0
        low: int | None = None
        high: int | None = None
        broken: _Broken | None = None
        try:
            for part in self._parts():
                if low is None:
                    low, high = round(start_s * self.rate), None if end_s is None else round(end_s * self.rate)
                if high is not None and part.first >= high:
                    break
                if part.end > low:  # samples before `low` are decoded, but not returned
                    samples = self._samples(part)
                    begin = begin if parts else max(part.first, low)
                    parts.append(samples[:, max(0, low - part.first) : None if high is None else high - part.first])
                if high is not None and part.end >= high:
                    break
        except _Broken as error:
            broken = error
        if not parts:
            parts.append(torch.empty(self.channels, 0))
            begin = round(start_s * self.rate)
        sound = Sound(torch.cat(parts, 1), self.rate, float(Fraction(begin, self.rate or 1)))
        if broken is not None:
            raise self._damaged(broken, sound) from broken
        if sound.samples.shape[1] == 0:
            there = Fraction(self.position or 0, self.rate or 1)
            raise InputError(
                f"no sound of {self.name} from {float(start_s):.6g} s on"
                f"{'' if end_s is None else f' to {float(end_s):.6g} s'}: it ends at {float(there):.6g} s"
            )
        return sound

    def _damaged(self, broken: _Broken, sound: Sound) -> DamagedSoundError:
        last = None if self.position is None else float(Fraction(self.position, self.rate))
        until = "none of it can be decoded" if last is None else f"it is intact up to {last:.3f} s"
        return DamagedSoundError(f"the sound of {self.name} cannot be decoded: {broken}; {until}", last, sound)

    def _samples(self, part: _Part) -> Tensor:
        """The samples of a part, (C, N) float32."""
        count = part.end - part.first
        return torch.zeros(self.channels, count) if part.frame is None else _samples(part.frame)[:, -count:]

    def _parts(self) -> Iterator[_Part]:
        """Iterate over consecutive parts, with silence in the gaps."""
        for frame in self._frames():
            if self.rate == 0:
                self.rate, self.channels = frame.sample_rate, len(frame.layout.channels)
                if self.rate < 1 or self.channels < 1:
                    raise _Broken(f"it has {self.channels} channels at {self.rate} Hz")
            if (frame.sample_rate, len(frame.layout.channels)) != (self.rate, self.channels):
                raise _Broken(
                    f"from {self.channels} channels at {self.rate} Hz it changes to {len(frame.layout.channels)} at "
                    f"{frame.sample_rate} Hz"
                )
            at, count = self._position(frame), frame.samples
            if self.position is None:
                self.position = 0 if at is None else at
            elif at is not None and abs(at - self.position) * JITTERS_A_SECOND > self.rate:
                gap = at - self.position
                self.silence += max(0, gap)
                if gap < -BACK_S * self.rate or 4 * self.channels * self.silence > MAX_SILENCE_BYTES:
                    raise _Broken(f"times jump by {gap / self.rate:.3f} s")
                if gap > 0:
                    yield _Part(self.position, at, None)
                    self.position = at
                count += min(gap, 0)  # the frame overlaps sound that was returned already
            end = self.position + max(count, 0)
            first = max(self.position, 0)  # sound before time 0 is dropped
            self.position = end
            if end > first:
                yield _Part(first, end, frame)

    def _position(self, frame: av.AudioFrame) -> int | None:
        """The position of the sample nearest to the frame's time, computed in integers, because fractions are slow and
        AAC has 47 frames a second."""
        base = self.stream.time_base
        if frame.pts is None or base is None:
            return None
        above = (frame.pts * base.numerator * 1_000_000 - self.container.start_us * base.denominator) * self.rate
        below = base.denominator * 1_000_000
        return (2 * above + below) // (2 * below)

    def _frames(self) -> Iterator[av.AudioFrame]:
        """Decode the track from its beginning.

        Raises:
            _Broken: a position cannot be decoded; raised after all frames before it.
        """
        error_of_ffmpeg = self.container.av.FFmpegError
        context, count, end, frame_samples = self.stream.codec_context, 0, None, 0
        packets = self.container.input.demux(self.stream)
        while True:
            try:
                packet = next(packets, None)
            except error_of_ffmpeg as error:
                raise _Broken(f"the rest of the file cannot be read: {said(error)}") from error
            if packet is None or (packet.size == 0 and packet.dts is None):  # an empty packet only drains the decoder
                break
            if packet.is_corrupt and not self.lossless:
                raise _Broken("a packet is damaged or incomplete")
            # A truncated last packet of PCM is valid up to its end, and FLAC's decoder itself detects invalid data.
            ends_within = packet.is_corrupt and not (
                self.container.format == "wav" and _streamed(self.container.source)
            )
            count += 1
            if packet.pts is not None:
                end = packet.pts + (packet.duration or 0)
            try:
                for frame in context.decode(packet):
                    frame_samples = frame.samples
                    yield frame
            except (error_of_ffmpeg, ValueError) as error:
                raise _Broken(f"a packet cannot be decoded ({said(error)})") from error
            if ends_within:
                raise _Broken("a packet is incomplete")
        try:
            yield from context.decode(None)
        except (error_of_ffmpeg, ValueError) as error:
            raise _Broken(f"its last packets cannot be decoded ({said(error)})") from error
        self._check_end(count, end, frame_samples)

    def _check_end(self, count: int, end: int | None, frame_samples: int) -> None:
        """Check that the file has all the sound that its header states."""
        if "mp4" in self.container.format and count < len(self.stream.index_entries):
            raise _Broken(f"the file ends after {count} of {len(self.stream.index_entries)} packets")
        whole: Fraction | None = None
        base = self.stream.time_base
        if self.container.format in TOLD_LENGTH and self.stream.duration and base:
            whole = self.stream.duration * base
            there = Fraction(self.position or 0, self.rate or 1)
        elif "matroska" in self.container.format and end is not None and base:
            whole, there = seconds_of(self.stream.metadata.get("DURATION")), end * base
        # Some headers count the samples that the encoder added before or after the sound, others do not.
        slack = Fraction(1, self.rate or 1) if self.lossless else Fraction(2 * frame_samples, self.rate or 1)
        if whole is not None and there + slack + (base or 0) < whole:
            raise _Broken(f"the file ends after {float(there):.3f} of {float(whole):.3f} s")


def _streamed(source: Source) -> bool:
    """Whether the header of a WAV file does not state the length, as if a program wrote the file into a pipe."""
    with source.open() as file:
        head = file.read(HEAD_BYTES)
    at = head.find(b"data")
    return at >= 0 and head[at + 4 : at + 8] in (bytes(4), b"\xff" * 4)


def _samples(frame: av.AudioFrame) -> Tensor:
    """Convert a frame's samples to (C, N) float32, in new memory."""
    name = frame.format.name
    if name.removesuffix("p") not in SCALES:
        raise _Broken(f"samples of format {name} are not supported")
    silence, one = SCALES[name.removesuffix("p")]
    array = frame.to_ndarray()  # (C, N), or (1, N * C) if not planar
    values = torch.from_numpy(array)
    if not frame.format.is_planar:
        values = values.view(-1, len(frame.layout.channels)).T
    if values.dtype == torch.float32:
        return values.contiguous()
    exact = torch.float64 if name.removesuffix("p") in ("s32", "dbl") else torch.float32
    return ((values.to(exact) - silence) / one).to(torch.float32).contiguous()
