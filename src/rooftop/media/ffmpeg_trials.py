"""Run single trials of FFmpeg: FFmpeg processes a small moving picture, and the resulting frames are checked.

The picture is smooth and moves. So a codec at high quality hardly changes the picture, while a missing, stale, shifted
or reordered frame differs strongly. Frames from hardware are compared with frames that the same FFmpeg computes in
software. The standards of VC-1, H.264, VP8 and newer codecs define every decoded sample exactly. So the check is
strict: each sample may differ by at most 2 of 255 levels. Older standards allow differences in the cosine transform,
and these accumulate over frames. So for older codecs, the average difference is checked.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from rooftop.errors import InputError, MissingExtraError
from rooftop.media.pyav import load_av

WIDTH, HEIGHT, FRAMES = 320, 240, 10  # larger than the minimum sizes of NVDEC (144 x 144) and NVENC (192 x 128)
# maximum difference between decoders' results, in levels of 255; maximum mean difference if the codec is not `exact`
SAME_LEVELS = 2.0
LIKE_LEVELS = 4.0  # maximum mean difference after encoding, or between two scaling filters, in levels of 255
RAW = ("-f", "rawvideo")
# FFmpeg's message if frames in host memory reach a filter that accepts only a device's frames
NO_DEVICE_FRAMES = "Impossible to convert between the formats"

Status = Literal["works", "fails", "not built in", "not tried"]


@dataclass(frozen=True)
class FFmpegAbility:
    """The result of a trial of FFmpeg.

    Attributes:
        part: "library" of the driver, "device", "decode", "encode" or "filter".
        what: the codec, filter, library or kind of device.
        way: the decoder, encoder or option that was tried; "" if there is only one.
        status: "works" only if the frames were correct. A library is only loaded, not tried.
        note: the reason if the trial failed; otherwise details, such as a version.
    """

    part: Literal["library", "device", "decode", "encode", "filter"]
    what: str
    way: str
    status: Status
    note: str = ""


class Codec(NamedTuple):
    """A codec to test: its software decoders, and the encoders for its clip with their options. The first available
    encoder is used."""

    name: str
    bits: int
    encoders: tuple[tuple[str, Mapping[str, str]], ...]
    decoders: tuple[str, ...]
    cuvid: str

    @property
    def exact(self) -> bool:
        """Whether all decoders return the same frames."""
        return self.name not in ("mpeg1video", "mpeg2video", "mpeg4", "mjpeg")

    @property
    def title(self) -> str:
        return self.name if self.bits == 8 else f"{self.name}, {self.bits} bits"


_X264 = {"preset": "veryfast"}  # with B-frames, so that frames must be reordered
_X265 = {"preset": "ultrafast", "x265-params": "log-level=none"}
_VPX = {"deadline": "realtime", "cpu-used": "8"}
_AV1 = (("libsvtav1", {"preset": "12"}), ("libaom-av1", {"cpu-used": "8"}), ("librav1e", {"speed": "10"}))
_BEST = {"qmin": "2", "qmax": "2"}
CODECS = (
    Codec("h264", 8, (("libx264", _X264), ("libopenh264", {"b:v": "2M"})), ("h264",), "h264_cuvid"),
    Codec("h264", 10, (("libx264", _X264),), ("h264",), "h264_cuvid"),
    Codec("hevc", 8, (("libx265", _X265), ("libkvazaar", {})), ("hevc",), "hevc_cuvid"),
    Codec("hevc", 10, (("libx265", _X265),), ("hevc",), "hevc_cuvid"),
    Codec("vp8", 8, (("libvpx", _VPX),), ("vp8", "libvpx"), "vp8_cuvid"),
    Codec("vp9", 8, (("libvpx-vp9", _VPX),), ("vp9", "libvpx-vp9"), "vp9_cuvid"),
    Codec("vp9", 10, (("libvpx-vp9", _VPX),), ("vp9", "libvpx-vp9"), "vp9_cuvid"),
    Codec("av1", 8, _AV1, ("libdav1d", "libaom-av1"), "av1_cuvid"),
    Codec("av1", 10, _AV1, ("libdav1d", "libaom-av1"), "av1_cuvid"),
    Codec("mpeg1video", 8, (("mpeg1video", _BEST),), ("mpeg1video",), "mpeg1_cuvid"),
    Codec("mpeg2video", 8, (("mpeg2video", _BEST),), ("mpeg2video",), "mpeg2_cuvid"),
    Codec("mpeg4", 8, (("mpeg4", _BEST), ("libxvid", _BEST)), ("mpeg4",), "mpeg4_cuvid"),
    Codec("mjpeg", 8, (("mjpeg", _BEST),), ("mjpeg",), "mjpeg_cuvid"),
    Codec("vc1", 8, (), ("vc1",), "vc1_cuvid"),
)


class FilterTrial(NamedTuple):
    """A filter that runs on a device's frames, and software filters with the same result."""

    name: str
    device: str
    graph: str  # the input is an uploaded frame, and the result is downloaded
    twin: str
    inputs: str = "hwupload"
    size: tuple[int, int] = (WIDTH, HEIGHT)
    download: str = "yuv420p"  # the pixel format of the filter's output


_TWO = "split[a][b];[b]crop=64:64:0:0,hwupload[y];[a]hwupload[x];[x][y]"
_ONTO = "split[a][b];[b]crop=64:64:0:0[y];[a][y]overlay=32:16"
_FULL = "setparams=range=tv,scale=in_range=tv:out_range=pc"
_HALF = (WIDTH // 2, HEIGHT // 2)
_TURNED = (HEIGHT, WIDTH)
FILTERS = (
    FilterTrial("hwupload_cuda", "cuda", "", "null", inputs="hwupload_cuda"),
    FilterTrial("scale_cuda", "cuda", "scale_cuda=160:120", "scale=160:120", size=_HALF),
    FilterTrial("yadif_cuda", "cuda", "yadif_cuda", "yadif"),
    FilterTrial("bwdif_cuda", "cuda", "bwdif_cuda", "bwdif"),
    FilterTrial("overlay_cuda", "cuda", "overlay_cuda=32:16", _ONTO, _TWO),
    FilterTrial("thumbnail_cuda", "cuda", "thumbnail_cuda=9", "trim=end_frame=1", "trim=end_frame=1,hwupload"),
    FilterTrial("chromakey_cuda", "cuda", "chromakey_cuda=0x00FF00", "null", download="yuva420p"),  # nothing is green
    FilterTrial("colorspace_cuda", "cuda", "colorspace_cuda=range=pc", _FULL, "setparams=range=tv,hwupload"),
    FilterTrial("scale_npp", "cuda", "scale_npp=160:120", "scale=160:120", size=_HALF),
    FilterTrial("transpose_npp", "cuda", "transpose_npp=clock", "transpose=clock", size=_TURNED),
    FilterTrial("sharpen_npp", "cuda", "sharpen_npp", "null"),  # sharpening hardly changes a smooth picture
    FilterTrial("scale_vaapi", "vaapi", "scale_vaapi=160:120", "scale=160:120", size=_HALF, download="nv12"),
    FilterTrial("scale_qsv", "qsv", "scale_qsv=160:120", "scale=160:120", size=_HALF, download="nv12"),
    FilterTrial("scale_vulkan", "vulkan", "scale_vulkan=160:120", "scale=160:120", size=_HALF),
    FilterTrial("transpose_opencl", "opencl", "transpose_opencl=clock", "transpose=clock", size=_TURNED),
)


class Ran(NamedTuple):
    """The output of a run of FFmpeg, and why the run failed ("" if it succeeded)."""

    output: bytes
    failure: str


class Trials:
    """Runs one FFmpeg on the test picture, each time for at most `timeout_s` seconds. The temporary folder exists until
    `close`.

    Attributes:
        decoders, encoders, filters, devices: the names that this FFmpeg lists; devices come from `-hwaccels`.
    """

    def __init__(self, ffmpeg: Path, version: str, timeout_s: float) -> None:
        self.ffmpeg, self.timeout_s = ffmpeg, timeout_s
        release = re.match(r"n?(\d+)\.(\d+)", version)
        old = release is not None and (int(release[1]), int(release[2])) < (5, 1)
        self._every_frame = ("-vsync" if old else "-fps_mode", "passthrough")  # write each frame exactly once
        self._folder = tempfile.TemporaryDirectory(prefix="rooftop-ffmpeg-")
        self.folder = Path(self._folder.name)
        for bits in (8, 10):
            (self.folder / f"picture-{bits}").write_bytes(picture(bits).tobytes())

    @cached_property
    def decoders(self) -> tuple[str, ...]:
        return self._listed("-decoders", r" [A-Z.]{6} (\w\S*)")

    @cached_property
    def encoders(self) -> tuple[str, ...]:
        return self._listed("-encoders", r" [A-Z.]{6} (\w\S*)")

    @cached_property
    def filters(self) -> tuple[str, ...]:
        return self._listed("-filters", r" [A-Z.|]{2,3} (\w\S*) +\S*->")

    @cached_property
    def devices(self) -> tuple[str, ...]:
        return self._listed("-hwaccels", r"(\w+)$")

    def close(self) -> None:
        self._folder.cleanup()

    def run(self, *words: str) -> Ran:
        """Run FFmpeg with these arguments."""
        command = (str(self.ffmpeg), "-hide_banner", "-nostdin", "-y", "-loglevel", "level+verbose", *words)
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=self.timeout_s)
        except subprocess.TimeoutExpired:
            return Ran(b"", f"it did not finish within {self.timeout_s:g} s")
        log = done.stderr.decode(errors="replace")
        return Ran(done.stdout, reason_in(log, done.returncode) if done.returncode else "")

    def _listed(self, option: str, line: str) -> tuple[str, ...]:
        """Parse the names in one of FFmpeg's lists. Lines of the legend above a list have "=" where the other lines
        have a name."""
        ran = self.run(option)
        if ran.failure:
            raise InputError(f"{self.ffmpeg} does not answer to {option}: {ran.failure}")
        lines = ran.output.decode(errors="replace").splitlines()
        return tuple(dict.fromkeys(found[1] for each in lines if (found := re.match(line, each))))

    # ---- clips and their decoders -----------------------------------------------------------------------------------

    def make_clip(self, codec: Codec) -> tuple[Path | None, FFmpegAbility]:
        """Make a clip with the codec's first software encoder that this FFmpeg has, and return the result of that trial
        too. If this FFmpeg has no such encoder, PyAV's own FFmpeg encodes the clip, so that decoders can still be
        tested."""
        there = [each for each in codec.encoders if each[0] in self.encoders]
        if there:
            name, options = there[0]
            clip, failure = self.encode(name, options, codec.bits, full_range=codec.name == "mjpeg")
            return clip, FFmpegAbility("encode", codec.title, name, "fails" if failure else "works", failure)
        clip, note = self._clip_by_pyav(codec)
        names = ", ".join(name for name, _ in codec.encoders)
        return clip, FFmpegAbility("encode", codec.title, "software", "not built in", f"{names}; {note}")

    def _clip_by_pyav(self, codec: Codec) -> tuple[Path | None, str]:
        """Make a clip with PyAV. Returns the clip (None if encoding failed) and a note about the encoder."""
        try:
            av = load_av()
        except MissingExtraError:
            return None, "PyAV, which may have an encoder, is not installed"
        there = [each for each in codec.encoders if each[0] in av.codecs_available]
        if not there:
            return None, "PyAV has no such encoder either"
        (name, options), clip = there[0], self.folder / f"{codec.name}-{codec.bits}-by-pyav.mkv"
        try:
            with _quiet_svt(), av.open(str(clip), "w") as container:
                stream = container.add_stream(name, rate=25, options=dict(options))
                stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, software_pixels(codec)
                for planes in picture(codec.bits):
                    frame = av.VideoFrame.from_ndarray(planes.reshape(-1, WIDTH), format=software_pixels(codec))
                    container.mux(stream.encode(frame))
                container.mux(stream.encode(None))
        except av.FFmpegError as error:
            return None, f"PyAV's {name} fails: {error.strerror}"
        return clip, f"the clip was made by PyAV's {name}"

    def encode(
        self, encoder: str, options: Mapping[str, str], bits: int, pixels: str = "", full_range: bool = False
    ) -> tuple[Path | None, str]:
        """Encode the test picture; return the clip, or the reason why the encoder failed. If a pixel format is given,
        the picture is first converted to it."""
        clip = self.folder / f"{encoder}-{bits}.mkv"
        convert = ("-pix_fmt", pixels) if pixels else ()
        settings = [word for name, value in options.items() for word in (f"-{name}", value)]
        words = (*self._picture(bits, full_range), "-c:v", encoder, *settings, *convert, str(clip))
        failure = self.run(*words).failure
        return (None, failure) if failure else (clip, "")

    def decode(self, clip: Path, words: Sequence[str], pixels: str, graph: str = "") -> tuple[np.ndarray | None, str]:
        """Decode a clip with these arguments. Returns frames (T, N) as levels from 0 to 255, or the reason of a
        failure.

        `pixels` is the format in which the decoder or the filter graph outputs frames. For any
        other `pixels`, FFmpeg would convert the frames.
        """
        graph_words = ("-vf", graph) if graph else ()
        every = self._every_frame
        ran = self.run(*words, "-i", str(clip), *graph_words, *every, "-pix_fmt", pixels, *RAW, "pipe:1")
        return (None, ran.failure) if ran.failure else (levels(ran.output, pixels), "")

    def decode_by_software(self, codec: Codec, clip: Path) -> tuple[np.ndarray | None, FFmpegAbility]:
        """Decode with the codec's first software decoder that this FFmpeg has. The frames count as correct if they
        resemble the encoded picture. If this FFmpeg has no such decoder, PyAV decodes the clip."""
        there = [name for name in codec.decoders if name in self.decoders]
        if not there:
            frames = _decoded_by_pyav(clip)
            note = ", ".join(codec.decoders) + ("" if frames is None else "; the reference frames are PyAV's")
            return frames, FFmpegAbility("decode", codec.title, "software", "not built in", note)
        frames, failure = self.decode(clip, ("-c:v", there[0]), software_pixels(codec))
        failure = failure or unlike(frames, levels_of_picture(codec.bits), LIKE_LEVELS, on_average=True)
        if failure:
            return None, FFmpegAbility("decode", codec.title, there[0], "fails", failure)
        return frames, FFmpegAbility("decode", codec.title, there[0], "works")

    def decode_by_device(self, codec: Codec, clip: Path, device: str, right: np.ndarray) -> FFmpegAbility:
        """Decode with `-hwaccel DEVICE`.

        The frames are downloaded by a filter that accepts only frames in the device's memory. So the trial fails if
        FFmpeg silently falls back to software.
        """
        decoder = f"{codec.name}_qsv" if device == "qsv" else codec.name
        words = ("-hwaccel", device, "-hwaccel_output_format", device, "-c:v", decoder)
        if decoder not in self.decoders:
            note = f"this FFmpeg has no decoder {decoder}"
            return FFmpegAbility("decode", codec.title, f"-hwaccel {device}", "not built in", note)
        pixels = "nv12" if codec.bits == 8 else "p010le"
        frames, failure = self.decode(clip, words, pixels, f"hwdownload,format={pixels}")
        if failure.startswith(NO_DEVICE_FRAMES):
            failure = f"{device} does not decode this here: FFmpeg falls back to software"
        failure = failure or unlike(frames, right, SAME_LEVELS, on_average=not codec.exact)
        return FFmpegAbility("decode", codec.title, f"-hwaccel {device}", "fails" if failure else "works", failure)

    def decode_by_cuvid(self, codec: Codec, clip: Path, right: np.ndarray) -> FFmpegAbility:
        """Decode with NVIDIA's own decoder, `-c:v X_cuvid`."""
        if codec.cuvid not in self.decoders:
            return FFmpegAbility("decode", codec.title, codec.cuvid, "not built in")
        frames, failure = self.decode(clip, ("-c:v", codec.cuvid), "nv12" if codec.bits == 8 else "p010le")
        failure = failure or unlike(frames, right, SAME_LEVELS, on_average=not codec.exact)
        return FFmpegAbility("decode", codec.title, codec.cuvid, "fails" if failure else "works", failure)

    # ---- encoders, devices, filters ---------------------------------------------------------------------------------

    def encode_by_nvenc(self, encoder: str, bits: int) -> FFmpegAbility:
        """Encode the test picture with NVENC, and decode it by software. The trial succeeds if the result resembles the
        picture."""
        name = encoder.removesuffix("_nvenc")
        codec = next((each for each in CODECS if (each.name, each.bits) == (name, bits)), None)
        title = name if bits == 8 else f"{name}, {bits} bits"
        if encoder not in self.encoders:
            return FFmpegAbility("encode", title, encoder, "not built in")
        clip, failure = self.encode(encoder, {}, bits, "yuv420p" if bits == 8 else "p010le")
        if clip is None or codec is None:
            note = failure or "there is no check for this encoder"
            return FFmpegAbility("encode", title, encoder, "fails" if failure else "not tried", note)
        frames, decoded = self.decode_by_software(codec, clip)
        if decoded.status == "not built in":
            if frames is None:
                return FFmpegAbility("encode", title, encoder, "not tried", "there is no decoder to check it")
            failure = unlike(frames, levels_of_picture(bits), LIKE_LEVELS, on_average=True)
            return FFmpegAbility("encode", title, encoder, "fails" if failure else "works", failure)
        return FFmpegAbility("encode", title, encoder, decoded.status, decoded.note)

    def open_device(self, device: str, number: int | None = None) -> FFmpegAbility:
        """Open a device, upload frames to it and download them: the downloaded frames must be identical. A drm device
        is only opened."""
        title = device if number is None else f"{device} {number}"
        if device not in self.devices:
            return FFmpegAbility("device", title, "", "not built in")
        opened = ("-init_hw_device", f"{device}=d" + ("" if number is None else f":{number}"))
        if device == "drm":  # for drm, hwupload rejects frames in host memory
            node = next(iter(sorted(Path("/dev/dri").glob("renderD*"))), None)
            if node is None:
                return FFmpegAbility("device", title, "", "fails", "there is no /dev/dri/renderD*")
            failure = self.run("-init_hw_device", f"drm=d:{node}", *self._picture(8), "-f", "null", "-").failure
            return FFmpegAbility("device", title, "", "fails" if failure else "works", failure or f"{node} opens")
        pixels = "yuv420p" if device == "opencl" else "nv12"  # every device except opencl gets nv12
        graph = f"format={pixels},hwupload,hwdownload,format={pixels}"
        words = (*opened, "-filter_hw_device", "d", *self._picture(8), "-vf", graph, "-pix_fmt", pixels)
        ran = self.run(*words, *RAW, "pipe:1")
        failure = ran.failure or unlike(levels(ran.output, pixels), levels_of_picture(8), 0)
        return FFmpegAbility("device", title, "", "fails" if failure else "works", failure)

    def filter_on_device(self, trial: FilterTrial) -> FFmpegAbility:
        """Run a device's filter, and compare its frames with those of the equivalent software filter."""
        if trial.name not in self.filters:
            return FFmpegAbility("filter", trial.name, "", "not built in")
        upload = "nv12" if trial.download == "nv12" else "yuv420p"
        before = f"format={upload},{trial.inputs}" + ("," if trial.graph and not trial.inputs.endswith("]") else "")
        graph = f"{before}{trial.graph},hwdownload,format={trial.download}"
        output = ("-pix_fmt", "yuv420p", *self._every_frame, *RAW, "pipe:1")
        device = ("-init_hw_device", f"{trial.device}=d", "-filter_hw_device", "d")
        ran = self.run(*device, *self._picture(8), "-filter_complex", graph, *output)
        if ran.failure:
            return FFmpegAbility("filter", trial.name, "", "fails", ran.failure)
        twin = self.run(*self._picture(8), "-filter_complex", trial.twin, *output)
        if twin.failure:
            note = f"its software counterpart fails: {twin.failure}"
            return FFmpegAbility("filter", trial.name, "", "not tried", note)
        failure = unlike(
            levels(ran.output, "yuv420p", trial.size), levels(twin.output, "yuv420p", trial.size), SAME_LEVELS, True
        )
        return FFmpegAbility("filter", trial.name, "", "fails" if failure else "works", failure)

    def _picture(self, bits: int, full_range: bool = False) -> tuple[str, ...]:
        """The arguments that make FFmpeg read the test picture."""
        pixels = "yuv420p10le" if bits == 10 else "yuvj420p" if full_range else "yuv420p"
        size = ("-video_size", f"{WIDTH}x{HEIGHT}", "-framerate", "25")
        return (*RAW, "-pixel_format", pixels, *size, "-i", str(self.folder / f"picture-{bits}"))


@contextmanager
def _quiet_svt() -> Iterator[None]:
    """Set SVT_LOG within the block. Without this variable, SVT-AV1 writes to stderr at any log level of FFmpeg."""
    before = os.environ.get("SVT_LOG")
    os.environ["SVT_LOG"] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ["SVT_LOG"]
        else:
            os.environ["SVT_LOG"] = before


def _decoded_by_pyav(clip: Path) -> np.ndarray | None:
    """Decode a clip to frames (T, N) float32: the N samples of all planes, as levels from 0 to 255. None if PyAV is not
    installed or cannot decode the clip."""
    try:
        av = load_av()
    except MissingExtraError:
        return None
    try:
        with av.open(str(clip)) as container:
            frames = [(frame.format.name, frame.to_ndarray().tobytes()) for frame in container.decode(video=0)]
    except av.FFmpegError:
        return None
    return np.concatenate([levels(data, pixels) for pixels, data in frames]) if frames else None


# ---- frames ----------------------------------------------------------------------------------------------------------


@cache
def picture(bits: int) -> np.ndarray:
    """The test picture, (T, N) uint8 (uint16 for 10 bits): T frames of N samples. Each frame has the luma plane, then
    two chroma planes of half its height and half its width."""
    y, x = np.ogrid[0:HEIGHT, 0:WIDTH]
    y, x = y / 2, x / 2  # in pixels of chroma
    number = np.arange(FRAMES)[:, None, None]
    wave = 2 * np.pi / 96  # smooth; per frame, luma moves 7 pixels of chroma, and the chroma planes move 5
    luma = 125 + 90 * np.cos(wave * (x - 7 * number)) * np.cos(wave * y / 2)
    half = (slice(None), slice(0, HEIGHT, 2), slice(0, WIDTH, 2))
    blue, red = 128 + 60 * np.cos(wave * (x + 5 * number)), 128 + 60 * np.cos(wave * (y + 5 * number))
    planes = (luma, *(np.broadcast_to(each, luma.shape)[half] for each in (blue, red)))
    frames = np.concatenate([plane.reshape(FRAMES, -1) for plane in planes], axis=1)  # (T, N)
    scale = 1 << (bits - 8)
    frames = np.rint(frames * scale).astype(np.uint8 if bits == 8 else np.uint16)
    frames.flags.writeable = False  # all callers get the same array
    return frames


def levels_of_picture(bits: int) -> np.ndarray:
    """The test picture as levels from 0 to 255, (T, N) float32."""
    return picture(bits).astype(np.float32) / (1 << (bits - 8))


def software_pixels(codec: Codec) -> str:
    """The pixel format in which a software decoder returns a clip of this codec."""
    return "yuv420p10le" if codec.bits == 10 else "yuvj420p" if codec.name == "mjpeg" else "yuv420p"


def levels(data: bytes, pixels: str, size: tuple[int, int] = (WIDTH, HEIGHT)) -> np.ndarray:
    """Convert raw frames to (T, N) float32: the N samples of all planes, plane after plane, as levels from 0 to 255. An
    incomplete frame is dropped.
    """
    wide = pixels in ("p010le", "yuv420p10le")
    samples = size[0] * size[1] * 3 // 2
    values = np.frombuffer(data, np.dtype("<u2") if wide else np.uint8, count=len(data) // (2 if wide else 1))
    frames = values[: len(values) // samples * samples].reshape(-1, samples).astype(np.float32)  # (T, N)
    if wide:
        frames /= 256 if pixels == "p010le" else 4  # p010le stores ten bits in the upper bits of 16
    if pixels in ("nv12", "p010le"):  # values of the two chroma planes alternate
        luma = size[0] * size[1]
        frames = np.concatenate([frames[:, :luma], frames[:, luma::2], frames[:, luma + 1 :: 2]], axis=1)
    return frames


def unlike(got: np.ndarray | None, right: np.ndarray, limit: float, on_average: bool = False) -> str:
    """Describe how frames differ from the correct ones; "" if the difference is at most `limit` levels (in any sample,
    or on average)."""
    if got is None or got.shape != right.shape:
        count = 0 if got is None else len(got)
        return f"{count} frames come out, not {len(right)}"
    differences = np.abs(got - right)
    each = differences.mean(axis=1) if on_average else differences.max(axis=1)  # (T,)
    wrong = np.flatnonzero(each > limit)
    if len(wrong) == 0:
        return ""
    how = "on average" if on_average else "at most"
    return f"{len(wrong)} of {len(right)} frames are wrong, by {each.max():.0f} of 255 levels {how}"


LOG_LINE = re.compile(r"(?:\[[^\]]* @ [^\]]*\] )*\[(\w+)\] (.*)")  # [h264 @ 0x55d0] [error] message
ONLY_A_NUMBER = re.compile(r"Device creation failed: -?\d+$")


def reason_in(log: str, status: int) -> str:
    """Find the reason of a failure in FFmpeg's log: the first error, since it causes the later errors. An error from
    opening a device takes precedence, because a decoder without a device may log an earlier error."""
    errors: list[str] = []
    of_devices: list[str] = []
    before = last = ""
    for line in log.splitlines():
        found = LOG_LINE.match(line)
        if found is None:
            last = line.strip() or last
            continue
        of_device, level, said = line.startswith("[AVHWDeviceContext"), found[1], found[2].strip(" .")
        if ONLY_A_NUMBER.match(said):  # the library logged the reason just before, but not as an error
            of_device, said = of_device or bool(before), before or said
        if level in ("error", "fatal", "panic"):
            (of_devices if of_device else errors).append(said)
        elif of_device:
            before = said
    if status < 0:
        return f"it was ended by signal {-status}"
    return next(iter(of_devices + errors), last.rstrip(".")) or f"exit status {status}"
