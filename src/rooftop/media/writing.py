"""`VideoWriter` writes tensors as a video file, under a temporary name until the file is complete."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from operator import index as as_integer
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rooftop.errors import InputError
from rooftop.media.colours import CODES, WEIGHTS, Colours, rgb_to_yuv, usual_matrix
from rooftop.media.errors import VideoWriteError
from rooftop.media.forms import DTYPES
from rooftop.media.nvenc import ENCODER, OTHERWISE, why_no_nvenc
from rooftop.media.opening import said
from rooftop.media.pyav import load_av
from rooftop.media.soundtracks import CopiedSound, EncodedSound, usual_codec
from rooftop.media.written_files import PICTURES, usual_encoder, why_unreadable
from rooftop.user_paths import user_path
from rooftop.words import did_you_mean

if TYPE_CHECKING:
    from rooftop.media.pyav import av

# ticks per second if frames have times; the duration of a frame at 24, 25, 30 or 60 Hz or at NTSC's rates is a whole
# number of ticks
TICKS = 120_000
AVI_SLACK_S = Fraction(1, 1000)  # maximum distance of a given time from a multiple of 1 / fps
# in these files, a packet's duration ends when the next packet is decoded
DURATIONS_OF_DECODING = (".mp4", ".mov", ".m4v")
SEVERAL_FILES = 1  # AVFMT_NOFILE: the format opens its files itself, such as the parts of a playlist
MOST_FPS = {"avi": 1000, "matroska": 1000, "webm": 1000, "flv": 1000, "asf": 1000, "gif": 100}
"""Maximum frames per second of some FFmpeg formats. For AVI, FFmpeg would replace a rate above 1000 by 600. The other
formats count time in milliseconds (GIF: in hundredths of a second).
"""
DISK_ERRORS = (errno.EIO, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EMFILE, errno.ENFILE, errno.ESTALE)
FULL_RANGE = ("mjpeg", "ljpeg", "amv")  # encoders of JPEG, whose standard has only full range
TICKS_MPEG4 = 60_000  # ticks per second for MPEG-4, whose header stores this number in 16 bits
UNTIMED_X265 = 2  # in videos of up to this many frames, x265 leaves decoding times uninitialized
MOST_IN_A_RATE = 2**31 - 1  # numerator of a rate in FFmpeg
MOST_TICKS = 2**61  # FFmpeg's times are 64-bit integers
NARROWEST_X265 = 64  # for narrower frames, x265 (in PyAV 18) writes out of bounds in `Lookahead::cuTree`


class VideoWriter:
    """Write frames as a video. The complete file gets its name on close. After an error, no file is left.

        with VideoWriter("out.mp4", fps=30) as writer:
            writer.write(frames)            # (3, H, W) or (T, 3, H, W), any number of times

        with VideoWriter("out.mp4", fps=30, sound_from="in.mp4") as writer: ...  # copies the sound unchanged

    If the `with` block ends with an error, or after `discard()`, no new file is left, and an older file of that name is
    unchanged.

    Args:
        path: path of the file; its suffix names the format (.mp4, .mkv, .webm, .avi, .mov, ...).
        fps: frames a second. Frames written with times are shown at those times instead. In an AVI file, times must be
            multiples of 1 / fps.
        codec: the name of an FFmpeg encoder: libx264, libx265, libvpx-vp9, libsvtav1, mpeg4, ffv1, h264_nvenc, ...; or
            "auto": h264_nvenc if a GPU of this machine encodes a test clip, and libx264 if not. "auto" accepts no
            `options`.
        pixel_format: FFmpeg's name of the format. A format of more than 8 bits (yuv420p10le) preserves more precision
            of floating frames than yuv420p. The default is yuv420p if the encoder supports it, or else the encoder's
            first format.
        bit_rate_bps: bits per second that the encoder aims at; None: the encoder's default quality.
        options: options of the encoder, such as {"crf": "18", "preset": "fast"}.
        matrix: bt601, bt709, bt2020, fcc or smpte240m; the file states the matrix. By default the matrix that players
            assume for this size.
        full_range: True if black is 0 and white 255; False if black is 16 and white 235. Encoders of JPEG (mjpeg,
            ljpeg, amv) and pixel formats named yuvj... always have full range.
        pad: whether a size that does not fit the pixel format (odd, with yuv420p) is padded by repeating the last row
            and column. If False, such a size raises `InputError`.
        sound_from: a file from which all sound streams are copied, packet for packet.
        sound_start_s: the time on the clock of `sound_from` that becomes 0 in the video. If it is above 0, packets that
            begin before this time are dropped.
        cut_sound: whether sound packets that begin after the end of the last frame (its time plus its duration) are
            dropped. If False, all sound is kept.

    Attributes:
        size: (height, width) of the video; None before the first frame.
        encoder: the video's encoder; for "auto", the encoder that was chosen.
        fallback_reason: why "auto" did not choose h264_nvenc; None in all other cases. The size of the first frame may
            still change `encoder` and `fallback_reason`.

    Raises:
        InputError: the suffix, encoder, pixel format or an argument is unknown, the folder does not exist, `sound_from`
            has no sound, or the format does not support the sound.
        MissingExtraError: PyAV is not installed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        fps: float | Fraction,
        codec: str = "libx264",
        *,
        pixel_format: str | None = None,
        bit_rate_bps: int | None = None,
        options: Mapping[str, str] | None = None,
        matrix: str | None = None,
        full_range: bool = False,
        pad: bool = False,
        sound_from: str | os.PathLike[str] | None = None,
        sound_start_s: float = 0.0,
        cut_sound: bool = False,
    ) -> None:
        self.av = load_av()
        self.path = user_path(path)
        if not self.path.name:
            raise InputError(f"{self.path} is a folder: expected the name of a file")
        self.frames = 0
        # The temporary name does not contain the final name, which may be too long to extend, and may contain "%",
        # which FFmpeg would expand.
        self._partial = self.path.with_name(f".{os.getpid()}-{id(self):x}.partial{self.path.suffix}").absolute()
        self._closed = False
        self._container: av.container.OutputContainer | None = None
        self._stream: av.VideoStream | None = None
        self._sound: CopiedSound | EncodedSound | None = None
        if matrix is not None and matrix not in WEIGHTS:
            raise InputError(
                f"matrix {matrix!r} is not known: expected one of {', '.join(WEIGHTS)}{did_you_mean(matrix, WEIGHTS)}"
            )
        self.fps = _rate(fps)
        self.codec, self.matrix, self.pad = codec, matrix, pad
        self.full_range = full_range or codec in FULL_RANGE or (pixel_format or "").startswith("yuvj")
        self.bit_rate_bps, self.cut_sound = bit_rate_bps, cut_sound
        self.options = {name: str(value) for name, value in (options or {}).items()}  # a number is accepted too
        if codec == "auto" and options:
            raise InputError(f'options {self.options} belong to one encoder: pass its name as codec, not "auto"')
        self.fallback_reason = why_no_nvenc(pixel_format or "yuv420p") if codec == "auto" else None
        self.encoder = codec if codec != "auto" else OTHERWISE if self.fallback_reason else ENCODER
        self.pixel_format = self._pick_format(pixel_format)
        if not self.path.parent.is_dir():
            raise InputError(f"{self.path.parent} is not a folder: create it before you write {self.path.name} there")
        try:
            taken = self.path.is_dir()
        except OSError as error:
            raise InputError(f"{self.path} cannot be written: {said(error)}. Give another name") from error
        if taken:
            raise InputError(f"{self.path} is a folder: expected the name of a file")
        self._timed = False
        self._ticks_a_second = self.fps if self.path.suffix.lower() == ".avi" else Fraction(TICKS)
        if self.encoder == "mpeg4":
            self._ticks_a_second = min(self._ticks_a_second, Fraction(TICKS_MPEG4))
        self._last_tick = -1
        self._last_duration: int | None = None  # duration of the last frame in ticks
        self._first_tick = 0
        self._begin: int | None = None  # ticks by which decoding starts before display
        self._held: list[av.Packet[av.VideoStream]] = []
        self.size: tuple[int, int] | None = None
        try:
            self._container = self.av.open(f"file:{self._partial}", "w")  # without "file:", "a:b.mp4" is a URL
        except OSError as error:
            self.discard()
            raise self._refused(error) from error
        except (self.av.FFmpegError, ValueError) as error:
            self.discard()
            raise InputError(
                f"{self.path}: FFmpeg writes no format with this suffix; expected .mp4, .mkv, .webm, .avi or another"
            ) from error
        self._format = self._container.format.name
        if self.fps > (most := MOST_FPS.get(self._format, self.fps)):
            self.discard()
            raise InputError(
                f"fps={fps} for {self.path}: {self._format} stores at most {most} frames a second. Give a lower fps, "
                "or the suffix .mp4"
            )
        self._is_picture = self._format == PICTURES
        if self._is_picture:
            self._container.container_options["update"] = "1"  # one file, not a numbered one for each frame
        elif int(self._container.format.flags) & SEVERAL_FILES:
            self.discard()
            raise InputError(f"{self.path}: {self._format} only lists other files: expected one file, such as .mp4")
        if sound_from is not None:
            self._add_video()
            try:
                self._sound = CopiedSound(self._container, sound_from, sound_start_s)
            except BaseException:
                self.discard()
                raise

    def _pick_format(self, wanted: str | None) -> str:
        try:
            codec = self.av.Codec(self.encoder, "w")
        except self.av.codec.codec.UnknownCodecError as error:
            there = [
                name for name in ("libx264", "libx265", "libvpx-vp9", "libsvtav1", "mpeg4", "ffv1") if self._has(name)
            ]
            raise InputError(f"no encoder {self.encoder!r} in this FFmpeg: it has {', '.join(there)}") from error
        if codec.type != "video":
            raise InputError(f"{self.encoder!r} encodes {codec.type}: expected an encoder of video, such as libx264")
        names = [each.name for each in codec.video_formats or []]
        if wanted is None:
            return "yuv420p" if "yuv420p" in names or not names else names[0]
        if names and wanted not in names:
            raise InputError(f"{self.encoder} does not encode {wanted!r}: expected one of {', '.join(names)}")
        try:
            self.av.VideoFormat(wanted, 16, 16)
        except ValueError as error:
            raise InputError(
                f"pixel format {wanted!r} is not known: expected one of FFmpeg's names, such as yuv420p"
            ) from error
        return wanted

    def _has(self, name: str) -> bool:
        with suppress(self.av.codec.codec.UnknownCodecError):
            return self.av.Codec(name, "w").is_encoder
        return False

    def write(self, frames: Tensor, times: Sequence[float] | Tensor | None = None, until: float | None = None) -> None:
        """Add one frame or several.

        Args:
            frames: (3, H, W) or (T, 3, H, W), on any device; uint8, or floating in 0..1 (other values are clipped). The
                first call determines the size.
            times: increasing times in seconds at which the frames are shown. Pass times in all calls or in none.
            until: the time in seconds until which the last frame is shown, if no other frame follows. `until` requires
                `times`. The default is the last time plus 1 / fps.

        Raises:
            InputError: a shape, dtype or size is not as expected, a pixel or time is not finite, a time is negative,
                times do not increase, or the pixel format does not allow the size.
            VideoWriteError: the encoder refuses its settings. After this error, the writer is closed and leaves no
                file.
            DamagedVideoError: the copied sound cannot be read further. After this error, the writer is closed and
                leaves no file.
        """
        if self._closed:
            raise VideoWriteError(f"{self.path} is closed already: open another VideoWriter")
        if not isinstance(frames, Tensor):
            raise InputError(
                f"frames are {type(frames).__name__}: expected a tensor (3, H, W) or (T, 3, H, W). Convert an RGB "
                "array (H, W, 3) with torch.from_numpy(array).permute(2, 0, 1)"
            )
        if frames.dim() not in (3, 4) or frames.shape[-3] != 3:
            raise InputError(f"frames of shape {tuple(frames.shape)}: expected (3, H, W) or (T, 3, H, W)")
        if frames.dtype not in DTYPES:
            raise InputError(f"frames of {frames.dtype}: expected uint8, or floating values in 0..1")
        if isinstance(times, (int, float)):
            raise InputError(f"times are {times!r}: expected a sequence of seconds, one for each frame")
        batch = frames.detach()[None] if frames.dim() == 3 else frames.detach()
        seconds = None if times is None else [float(each) for each in times]
        if seconds is not None and len(seconds) != len(batch):
            raise InputError(f"{len(seconds)} times for {len(batch)} frames: expected one time for each frame")
        if len(batch) == 0:
            return
        if self._is_picture and self.frames + len(batch) > 1:
            raise InputError(
                f"{self.frames + len(batch)} frames for {self.path}: a {self.path.suffix} file holds one picture. "
                "Use a suffix of a video, such as .mp4, or `rooftop media decode` for one picture per frame"
            )
        if self.frames and self._timed != (seconds is not None):
            raise InputError("some frames have times and some do not: pass times for all frames or for none")
        ticks = self._ticks(seconds, len(batch))
        last = None if until is None else self._until(until, ticks[-1], timed=seconds is not None)
        if batch.is_floating_point() and not bool(torch.isfinite(batch).all()):
            raise InputError("frames with values that are not finite (nan or inf): expected 0..1")
        if not self.frames:
            self._check_size(batch.shape[-2], batch.shape[-1])
        elif self._given != batch.shape[-2:]:
            given, before = "x".join(map(str, batch.shape[-2:])), "x".join(map(str, self._given))
            raise InputError(
                f"frames of {given} pixels after frames of {before}: all frames of a video must have one size"
            )
        try:
            if not self.frames:
                self._start(timed=seconds is not None)
            self._last_duration = last
            for pixels, tick in zip(batch, ticks, strict=True):
                frame, self._last_tick = self._frame(pixels.cpu(), tick), tick
                self._first_tick = tick if self.frames == 0 else self._first_tick
                self._encode(frame)
                self.frames += 1
                self._mux_sound(tick * self._time_base)
        except (self.av.FFmpegError, ValueError, OverflowError, OSError) as error:
            self.discard()
            raise self._refused(error) from error
        except BaseException:
            self.discard()
            raise

    def write_sound(self, samples: Tensor, rate_hz: int, codec: str | None = None) -> None:
        """Add sound. Its first sample is at time 0, even if `times` shows the first frame later. The first call must
        come before the first frame; more calls may follow at any time.

        Args:
            samples: (C, N) of a floating-point dtype, in -1..1, on any device, with 1 to 8 channels.
            rate_hz: samples a second.
            codec: an FFmpeg encoder of sound: aac, libopus, libmp3lame, flac, pcm_s16le, ...; by default one that suits
                the suffix of the file.

        Raises:
            InputError: a shape or dtype is not as expected, the rate or codec differs from earlier calls, a sample is
                not finite, `sound_from` was given too, or a frame is already written at the first call.
            VideoWriteError: the encoder refuses the settings or the samples. The writer is then closed, and leaves no
                file.
        """
        if self._closed or self._container is None:
            raise VideoWriteError(f"{self.path} is closed already: open another VideoWriter")
        if not isinstance(samples, Tensor):
            raise InputError(f"samples are {type(samples).__name__}: expected a tensor (C, N), floating in -1..1")
        if samples.dim() != 2 or not samples.is_floating_point():
            raise InputError(f"samples {tuple(samples.shape)} of {samples.dtype}: expected (C, N), floating in -1..1")
        if not bool(torch.isfinite(samples).all()):
            raise InputError("samples that are not finite (nan or inf): expected -1..1")
        if isinstance(self._sound, CopiedSound):
            raise InputError(
                f"{self.path} gets its sound from {self._sound.name}: leave out sound_from to write other sound"
            )
        if self._sound is None:
            if self.frames:
                raise InputError(
                    "the first sound must be written before the first frame, because a file lists all its streams "
                    "at the beginning"
                )
            self._add_video()
            wanted = codec or usual_codec(self.path.suffix)
            self._sound = EncodedSound(self._container, wanted, samples.shape[0], as_integer(rate_hz))
        before = (self._sound.channels, self._sound.rate_hz, self._sound.codec)
        given = (samples.shape[0], rate_hz, codec or self._sound.codec)
        if given != before:
            raise InputError(f"sound with (channels, Hz, codec) {given} after {before}: a stream cannot change these")
        if samples.shape[1] == 0:
            return
        try:
            self._sound.write(samples.detach().cpu())
        except (self.av.FFmpegError, ValueError, OSError) as error:
            self.discard()
            raise self._refused(error, f"{self._sound.codec} of {rate_hz} Hz") from error

    def close(self) -> None:
        """Write the remaining data and give the file its final name.

        Raises:
            VideoWriteError: no frame was written, or the file could not be finished. No file is left.
            DamagedVideoError: the copied sound cannot be read to its end. No file is left.
        """
        if self._closed:
            return
        if not self.frames:
            self.discard()
            raise VideoWriteError(f"no frames were written to {self.path}: a video needs at least one")
        assert self._container is not None
        try:
            shown_s = 1 / self.fps if self._last_duration is None else self._last_duration * self._time_base
            end = self._last_tick * self._time_base + shown_s if self.cut_sound else None
            if self._sound is not None:
                self._sound.finish()
            self._mux_sound(end)
            self._encode(None)
            self._container.close()
            usual = usual_encoder(self.path.suffix.lower(), self._container.default_video_codec)
            self._container = None
            self._check_readable(usual)
            os.replace(self._partial, self.path)
        except (self.av.FFmpegError, ValueError, OSError) as error:
            raise self._refused(error) from error
        finally:
            self.discard()

    def discard(self) -> None:
        """Stop writing and delete the unfinished file. After `close`, this does nothing."""
        self._closed = True
        if self._sound is not None:
            self._sound.close()
        if self._container is not None:
            container, self._container = self._container, None
            with suppress(self.av.FFmpegError, ValueError, OSError):
                container.close()
        with suppress(OSError):  # a suffix may be too long for a file
            self._partial.unlink(missing_ok=True)

    def _check_readable(self, usual: str) -> None:
        why = why_unreadable(self._partial, self._format, self.encoder, self.frames)
        if why is not None:
            fitting = "" if usual == self.encoder else f'codec="{usual}", which suits this suffix, or '
            raise VideoWriteError(
                f"{self.path} was not written: a {self.path.suffix} file with {self.encoder} cannot be read: {why}. "
                f"Use {fitting}the suffix .mkv, which suits most codecs"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.discard()

    def __del__(self) -> None:
        if getattr(self, "_closed", True) is False:
            self.discard()

    def _refused(self, error: BaseException, who: str | None = None) -> VideoWriteError:
        if isinstance(error, VideoWriteError):
            return error
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            return VideoWriteError(
                f"{self.path} was not written: the disk is full ({said(error)}). Free space in {self.path.parent}, or "
                "write to another disk"
            )
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            return VideoWriteError(f"{self.path} was not written: {said(error)}. Check the disk of {self.path.parent}")
        who = who or f"{self.encoder} with {self.pixel_format} and options {self.options}"
        return VideoWriteError(
            f"{self.path} was not written: {who} says: {said(error)}. "
            "Try other options, another codec or another suffix"
        )

    def _ticks(self, seconds: list[float] | None, count: int) -> list[int]:
        if seconds is None:
            return list(range(self._last_tick + 1, self._last_tick + 1 + count))
        if not all(0 <= each < float("inf") for each in seconds):
            raise InputError("times must be finite and 0 or more")
        rate = self._ticks_a_second
        ticks = [round(each * rate) for each in seconds]
        if max(ticks) > MOST_TICKS:
            raise InputError(f"a frame at {max(seconds):.6g} s: expected at most {float(MOST_TICKS / rate):.6g} s")
        before = self._last_tick
        for tick, each in zip(ticks, seconds, strict=True):
            if rate == self.fps and abs(tick / rate - Fraction(each)) > AVI_SLACK_S:
                raise InputError(
                    f"a frame at {each:.6f} s: in AVI, frames lie only at multiples of 1/{float(rate):.6g} s, "
                    "which fps sets. Choose another fps, or another suffix such as .mp4"
                )
            if tick <= before:
                raise InputError(
                    f"a frame has the time {float(tick / rate):.6f} s, but the frame before it has the time "
                    f"{float(before / rate):.6f} s: expected times that increase (by at least 1/{float(rate):.6g} s)"
                )
            before = tick
        return ticks

    def _until(self, until: float, last_tick: int, timed: bool) -> int:
        """Convert `until`, the end of the last frame in seconds, to the duration of that frame in ticks."""
        ticks = round(until * self._ticks_a_second) - last_tick if 0 <= until < float("inf") else 0
        if not timed or not 0 < ticks <= MOST_TICKS:
            raise InputError(f"until={until}: expected a value in seconds above the last time, together with times")
        return ticks

    def _check_size(self, height: int, width: int) -> None:
        if height < 1 or width < 1:
            raise InputError(f"frames of {height}x{width} pixels: expected at least one pixel")
        parts = self.av.VideoFormat(self.pixel_format, 64, 64).components
        chroma = parts[min(1, len(parts) - 1)]
        self._down, self._across, self._bits = 64 // chroma.height, 64 // chroma.width, parts[0].bits
        self._given = torch.Size((height, width))
        self._extra = (-height % self._down, -width % self._across)
        if self.encoder == "libx265" and width < NARROWEST_X265:
            raise InputError(
                f"frames of {height}x{width} pixels (height x width): libx265 needs a width of {NARROWEST_X265} or "
                "more; use libx264"
            )
        if any(self._extra) and not self.pad:
            raise InputError(
                f"frames of {height}x{width} pixels (height x width): {self.pixel_format} needs a multiple of "
                f"{self._down}x{self._across}. Give VideoWriter(pad=True) to repeat the last row and column, or "
                'pixel_format="yuv444p"'
            )

    def _start(self, timed: bool) -> None:
        assert self._container is not None
        self._timed = timed
        height, width = (size + extra for size, extra in zip(self._given, self._extra, strict=True))
        if self.encoder == ENCODER and self.codec == "auto":
            self.fallback_reason = why_no_nvenc(self.pixel_format, height, width)
            if self.fallback_reason and self._stream is not None:  # FFmpeg cannot remove a stream
                raise VideoWriteError(f'{self.path} was not written: {self.fallback_reason}. Use codec="{OTHERWISE}"')
            self.encoder = OTHERWISE if self.fallback_reason else ENCODER
        self._colours = Colours(self.matrix or usual_matrix(height, width), self.full_range)
        self._time_base = 1 / self._ticks_a_second if timed else 1 / self.fps
        stream = self._add_video()
        stream.height, stream.width, stream.pix_fmt = height, width, self.pixel_format
        self.size = height, width
        context = stream.codec_context
        context.time_base = self._time_base
        if self.pixel_format.startswith(("yuv", "nv", "p0")):
            context.colorspace = CODES[self._colours.matrix]
            context.color_range = 2 if self.full_range else 1
        if self.bit_rate_bps is not None:
            context.bit_rate = self.bit_rate_bps

    def _add_video(self) -> av.VideoStream:
        """Add the video stream before the sound streams. The first frame sets the video's size later."""
        if self._stream is None:
            assert self._container is not None
            options = dict(self.options)
            # without this option, x265 prints a message
            if self.encoder == "libx265" and "log-level" not in options.get("x265-params", ""):
                options["x265-params"] = ":".join(filter(None, (options.get("x265-params"), "log-level=error")))
            try:
                stream = self._container.add_stream(self.encoder, rate=self.fps, options=options)
            except (self.av.FFmpegError, ValueError) as error:
                self.discard()
                raise self._refused(error) from error
            assert isinstance(stream, self.av.VideoStream)
            self._stream = stream
        return self._stream

    def _encode(self, frame: av.VideoFrame | None) -> None:
        assert self._container is not None
        assert self._stream is not None
        packets = [*self._held, *self._stream.encode(frame)]
        if frame is None and self.encoder == "libx265" and self.frames <= UNTIMED_X265:
            for packet in packets:
                packet.dts = packet.pts  # x265 does not reorder a video of at most UNTIMED_X265 frames
        # Hold back the last packet, since its duration must be set. This packet need not belong to the last frame,
        # but it is the end of the decoding clock.
        self._held = packets[-1:] if frame is not None else []
        by_decoding = self.path.suffix.lower() in DURATIONS_OF_DECODING
        if packets and self._begin is None and packets[0].dts is not None:
            self._begin = self._first_tick - packets[0].dts
        for packet in packets[: len(packets) - len(self._held)]:
            if self._last_duration is not None and packet.dts is not None:
                end = self._last_tick + self._last_duration
                if by_decoding and frame is None and packet is packets[-1]:
                    packet.duration = end - packet.dts - (self._begin or 0)
                elif packet.pts == self._last_tick:
                    packet.duration = self._last_duration
            self._container.mux(packet)

    def _mux_sound(self, until: Fraction | None) -> None:
        """Write the sound that begins before `until`, so that sound and pictures are interleaved. If `until` is None,
        write all remaining sound."""
        if self._sound is not None and self._container is not None:
            for packet in self._sound.until(until):
                self._container.mux(packet)

    def _frame(self, pixels: Tensor, tick: int) -> av.VideoFrame:
        """Convert (3, H, W) to a frame in the pixel format."""
        values = pixels.float() / 255 if pixels.dtype == torch.uint8 else pixels.float().clamp(0, 1)
        if any(self._extra):
            values = F.pad(values, (0, self._extra[1], 0, self._extra[0]), mode="replicate")
        name = self.pixel_format
        if name.startswith("yuv") and "a" not in name and (self._bits == 8 or name.endswith("le")):
            dtype = torch.uint8 if self._bits == 8 else torch.int32
            planes = rgb_to_yuv(values, self._colours, self._bits, self._down, self._across, dtype)
            frame = self.av.VideoFrame(values.shape[2], values.shape[1], name)
            for plane, data in zip(frame.planes, planes, strict=True):
                _fill(plane, data.numpy() if self._bits == 8 else data.numpy().astype("<u2"))
        else:  # swscale converts RGB to formats with another channel order, grey, or interleaved chroma
            deep = self._bits > 8
            array = (values * (65535 if deep else 255)).round_().to(torch.int32).permute(1, 2, 0).numpy()
            array = np.ascontiguousarray(array.astype(np.uint16 if deep else np.uint8))
            frame = self.av.VideoFrame.from_ndarray(array, format="rgb48le" if deep else "rgb24")
            flags = self.av.video.reformatter.Interpolation
            frame = frame.reformat(
                format=name,
                src_color_range=2,
                dst_color_range=2 if self.full_range else 1,
                dst_colorspace=CODES[self._colours.matrix] if self._colours.matrix != "bt601" else 5,
                interpolation=flags.AREA | flags.ACCURATE_RND,
            )
        if name.startswith(("yuv", "nv", "p0")):
            frame.colorspace, frame.color_range = CODES[self._colours.matrix], 2 if self.full_range else 1
        frame.pts, frame.time_base = tick, self._time_base
        return frame


def _rate(fps: float | Fraction) -> Fraction:
    try:
        exact = Fraction(fps) if isinstance(fps, (int, Fraction)) else Fraction(float(0.0 + fps))
        rate = exact.limit_denominator(1001)
    except (TypeError, ValueError, OverflowError):
        rate = Fraction(0)
    if rate <= 0:
        raise InputError(f"fps={fps!r}: expected a number above 0, at least 1/1001, such as 25 or 30000/1001")
    if rate.numerator > MOST_IN_A_RATE:
        raise InputError(f"fps={fps!r}: FFmpeg's rates are fractions of 32-bit integers, so expected a lower fps")
    return rate


def _fill(plane: av.video.plane.VideoPlane, data: np.ndarray) -> None:
    """Copy rows of (H, W) into a plane, whose rows in memory may be longer."""
    row_bytes = data.shape[1] * data.itemsize
    rows = np.zeros((plane.height, plane.line_size), dtype=np.uint8)
    rows[: data.shape[0], :row_bytes] = np.ascontiguousarray(data).view(np.uint8).reshape(data.shape[0], row_bytes)
    plane.update(rows.tobytes()[: plane.buffer_size])
