"""Read photographs as upright RGB tensors, (3, H, W) or (H, W, 3) uint8.

    from rooftop.media import find_images, read_image, read_images

    read_image("cat.jpg")                                  # (3, H, W)
    for path, pixels in read_images(["holiday/"]): ...     # decoded ahead by threads
    for path, pixels in read_images(["holiday/"], device="auto"): ...  # JPEGs by a GPU's NVJPEG, if there is one

On the CPU, Pillow decodes every format that it knows. If simplejpeg is installed, it decodes JPEGs to the same pixels
in less time. Only the first picture of a file is read, and rotated by its EXIF orientation. Transparent areas become
white, 16-bit values are scaled to 8 bits, and CMYK and palettes become RGB. A GPU decodes only JPEGs (`nvjpeg.py`); the
CPU decodes all other formats.
"""

from __future__ import annotations

import io
import math
import os
import struct
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from rooftop.errors import InputError
from rooftop.media import jpegs, nvjpeg
from rooftop.media.ahead import in_order, usual_threads
from rooftop.media.jpegs import ORIENTATION
from rooftop.media.nvdec import gpu_of
from rooftop.media.nvjpeg import NoImageDecoderError
from rooftop.user_paths import user_path

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm"}
MAX_PIXELS = 178_956_970  # 512 MiB of RGB, Pillow's own limit, which other libraries disable for the whole process
LAYOUTS = ("chw", "hwc")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # mean and standard deviation of ImageNet, RGB in 0..1
GPU_BATCH = 8  # files that NVJPEG decodes in one call
GPU_THREADS = 4  # maximum number of threads with a GPU, since each thread keeps a batch in memory

DAMAGE = (
    OSError, SyntaxError, ValueError, TypeError, LookupError, EOFError, ArithmeticError, RuntimeError, struct.error,
    zlib.error, Image.DecompressionBombError,
)  # fmt: skip
"""Pillow's errors for damaged and hostile files."""

ImagePath = str | os.PathLike[str]
RgbPixels = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
Given = TypeVar("Given")
Result = TypeVar("Result")


class NamedImage(NamedTuple):
    """A photograph: its path, and its pixels, (3, H, W) or (H, W, 3) uint8."""

    path: Path
    pixels: Tensor


def find_images(paths: Sequence[ImagePath]) -> list[Path]:
    """List the photographs at `paths`, in the order of `paths`: each given file, and the photographs in each given
    folder (without subfolders). The photographs of one folder are sorted by name.

    Raises:
        InputError: `paths` is a single path, a path does not exist, or a folder has no photographs.
    """
    if isinstance(paths, (str, bytes, os.PathLike)):
        raise InputError(f"paths: expected a list of photographs and folders, got {paths!r}")
    found: list[Path] = []
    for path in map(user_path, paths):
        if path.is_dir():
            inside = sorted(p for p in path.iterdir() if p.suffix.lower() in SUFFIXES and p.is_file())
            if not inside:
                raise InputError(f"{path} has no photographs ({', '.join(sorted(SUFFIXES))})")
            found += inside
        elif path.exists():
            found.append(path)
        else:
            raise InputError(f"{path} does not exist")
    return found


def check_images(paths: Sequence[ImagePath]) -> None:
    """Read the beginning of each file, in order to find files that are not images before the work starts.

    Raises:
        InputError: a file is not an image.
    """
    for path in paths:
        with _opened(path):
            pass


def read_image(path_or_bytes: ImagePath | bytes, device: str | torch.device = "cpu", layout: str = "chw") -> Tensor:
    """Read one photograph as (3, H, W) or (H, W, 3) uint8.

    Args:
        path_or_bytes: a file, or the content of one.
        device, layout: as in `ImageDecoder`.

    Raises:
        InputError: the file is not an image, is damaged or truncated, or has more than `MAX_PIXELS` pixels.
        NoImageDecoderError: as in `ImageDecoder`.
    """
    return ImageDecoder(device, layout, threads=1).decode(path_or_bytes)


def read_images(
    paths: Sequence[ImagePath],
    device: str | torch.device = "cpu",
    layout: str = "chw",
    threads: int | None = None,
    on_error: str = "raise",
) -> Iterator[NamedImage]:
    """Read photographs and folders of photographs in the order of `find_images`, decoded ahead by threads.

    Arguments and errors are as in `ImageDecoder`, which also provides statistics afterwards.
    """
    return ImageDecoder(device, layout, threads, on_error).read(paths)


def pillow_image(
    path_or_bytes: ImagePath | bytes | memoryview,
    reduction: Callable[[int, int], float] | None = None,
    name: str | None = None,
) -> Image.Image:
    """Open a photograph as Pillow's RGB, rotated by its EXIF orientation; transparent parts become white.

    Args:
        path_or_bytes: a file, or the content of one.
        reduction: a function of the upright width and height that returns the maximum factor by which both may shrink.
            A JPEG is then decoded at 1/2, 1/4 or 1/8 of its size: the smallest of these sizes that the factor allows.
        name: the photograph's name in error messages.

    Raises:
        InputError: the file is not an image, is damaged or truncated, or has more than `MAX_PIXELS` pixels.
    """
    with _opened(path_or_bytes, name) as image:
        _reduce(image, reduction)
        return _upright_rgb(image)


def rgb_pixels(
    path_or_bytes: ImagePath | bytes | memoryview,
    reduction: Callable[[int, int], float] | None = None,
    name: str | None = None,
) -> RgbPixels | Image.Image:
    """Read a photograph as `pillow_image` does, but return an array if that is faster.

    Returns:
        (H, W, 3) uint8, writable, if libjpeg-turbo decodes the file without Pillow (`jpegs.py`); if not, Pillow's RGB
        image. Both have the same pixels.

    Arguments and errors are those of `pillow_image`.
    """
    with _opened(path_or_bytes, name) as image:
        whole = image.size
        _reduce(image, reduction)
        if image.size == whole and jpegs.decodes(image):
            pixels = jpegs.rgb_pixels(_content_of(path_or_bytes))
            if pixels is not None:
                return pixels
        return _upright_rgb(image)


def _content_of(path_or_bytes: ImagePath | bytes | memoryview) -> bytes | memoryview:
    return path_or_bytes if isinstance(path_or_bytes, (bytes, memoryview)) else user_path(path_or_bytes).read_bytes()


def _reduce(image: Image.Image, reduction: Callable[[int, int], float] | None) -> None:
    """Let Pillow decode a JPEG at a smaller size, if `reduction` allows it. Other formats keep their size."""
    if reduction is None:
        return
    width, height = image.size
    turned = image.getexif().get(ORIENTATION, 1) in (5, 6, 7, 8)
    factor = max(1.0, reduction(height, width) if turned else reduction(width, height))
    image.draft(None, (math.ceil(width / factor), math.ceil(height / factor)))


def normalized(image: Image.Image, mean: Sequence[float] = MEAN, std: Sequence[float] = STD) -> Tensor:
    """Convert an RGB image to (3, H, W) float32: (value / 255 - mean) / std.

    NumPy computes the values, with the same bits as torch. Operators of torch would start a team of threads for each
    thread that prepares images.
    """
    pixels = np.asarray(image)  # (H, W, 3)
    values = np.empty((3, *pixels.shape[:2]), dtype=np.float32)
    for channel, value in enumerate(values):  # in place, channel by channel, so that a channel stays in the cache
        np.divide(pixels[..., channel], np.float32(255), out=value)
        value -= np.float32(mean[channel])
        value /= np.float32(std[channel])
    return torch.from_numpy(values)


@dataclass(frozen=True)
class ImageFile:
    """A file that has the header of an image.

    Attributes:
        name: the file's name in error messages.
        content: the whole file.
        shape: (H, W) as stored.
        orientation: the EXIF number of the stored orientation.
        against: why NVJPEG must not decode the file, or None.
    """

    name: str
    content: bytes | memoryview
    shape: tuple[int, int]
    orientation: int
    against: str | None

    @classmethod
    def of(cls, path_or_bytes: ImagePath | bytes, name: str | None = None) -> ImageFile:
        """Read a file and its header.

        Raises:
            InputError: as in `pillow_image`.
        """
        name = name or _name_of(path_or_bytes)
        with _errors_of(name):
            content = path_or_bytes if isinstance(path_or_bytes, bytes) else user_path(path_or_bytes).read_bytes()
        with _opened(content, name) as image:
            against = nvjpeg.reason_against(image, content)
            return cls(name, content, (image.height, image.width), image.getexif().get(ORIENTATION, 1), against)

    @property
    def upright_size(self) -> tuple[int, int]:
        """Width and height after the EXIF rotation."""
        return self.shape if self.orientation in (5, 6, 7, 8) else self.shape[::-1]  # type: ignore[return-value]


Source = ImagePath | bytes | ImageFile


class ImageDecoder:
    """Decodes photographs, one or many.

        decoder = ImageDecoder("auto", on_error="skip")
        for path, pixels in decoder.read(["holiday/"]): ...
        print(decoder.device, decoder.fallback_reason, decoder.by_pillow, decoder.skipped)

    Args:
        device: "cpu"; "cuda" or "cuda:1", a GPU whose NVJPEG decodes JPEGs (Pillow decodes the rest); or "auto": a GPU
            if NVJPEG is available, and the CPU if not. NVJPEG's colours are close to libjpeg's, but not equal. The
            colours differ most at colour edges with subsampled chroma.
        layout: "chw" for (3, H, W), or "hwc" for (H, W, 3), contiguous: `rooftop.mat.Mat` and OpenCV accept "hwc"
            directly (OpenCV's own order is blue, green, red).
        threads: number of decoding threads; None: one for each CPU, at most 8. With a GPU, at most 4 threads are used.
            At most two photographs per thread are in memory on the CPU, and eight per thread with a GPU.
        on_error: "raise"; or "skip" unreadable files, with a warning for each.

    Attributes:
        device: the device of the tensors.
        fallback_reason: why "auto" chose the CPU; None in all other cases.
        by_pillow: number of files that Pillow decoded although `device` is a GPU, by format.
        skipped: (path, problem) for each skipped file.

    Raises:
        InputError: an invalid argument.
        NoImageDecoderError: for device "cuda", if NVJPEG is not available.
    """

    def __init__(
        self,
        device: str | torch.device = "cpu",
        layout: str = "chw",
        threads: int | None = None,
        on_error: str = "raise",
    ) -> None:
        if layout not in LAYOUTS:
            raise InputError(f'layout {layout!r} is not known: expected "chw" or "hwc"')
        if on_error not in ("raise", "skip"):
            raise InputError(f'on_error {on_error!r} is not known: expected "raise" or "skip"')
        if threads is not None and threads < 1:
            raise InputError(f"threads={threads}: expected 1 or more")
        self.layout, self.threads, self.on_error = layout, threads or usual_threads(), on_error
        self.device, self.fallback_reason = _device_of(device)
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._lock = Lock()
        self.by_pillow: Counter[str] = Counter()
        self.skipped: list[tuple[Path, str]] = []

    def decode(self, path_or_bytes: ImagePath | bytes) -> Tensor:
        """Decode one photograph. Errors are raised as in `read_image`, even with `on_error` "skip"."""
        (found,) = self._decoded([path_or_bytes])
        if isinstance(found, InputError):
            raise found
        return self._handed_over(found)

    def decode_each(self, files: Sequence[ImageFile]) -> list[Tensor | InputError]:
        """Decode several files. Returns, for each file, its pixels or the error that says why it cannot be read."""
        found = self._decoded(files)
        return [self._handed_over(each) if isinstance(each, Tensor) else each for each in found]

    def read(self, paths: Sequence[ImagePath]) -> Iterator[NamedImage]:
        """Read photographs and folders of photographs in the order of `find_images`, decoded ahead.

        Raises:
            InputError: as in `find_images` (raised by this call); or a file is unreadable and not skipped (raised when
                the iterator reaches the file).
        """
        return self._read(find_images(paths))

    def _read(self, paths: Sequence[Path]) -> Iterator[NamedImage]:
        on_gpu = self._stream is not None
        threads, size = (min(self.threads, GPU_THREADS), GPU_BATCH) if on_gpu else (self.threads, 1)
        groups = (paths[start : start + size] for start in range(0, len(paths), size))
        done = in_order(lambda group: (group, self._decoded(group)), groups, threads, threads * (1 if on_gpu else 2))
        for path, found in (each for group in done for each in zip(*group, strict=True)):
            if isinstance(found, Tensor):
                yield NamedImage(path, self._handed_over(found))
            elif self.on_error == "raise":
                raise found
            else:
                self.skipped.append((path, str(found)))
                warnings.warn(f"skipped: {found}", stacklevel=2)

    def _decoded(self, group: Sequence[Source]) -> list[Tensor | InputError]:
        """Decode files. Returns, for each file, its tensor or its error. GPU work is complete on return."""
        if self._stream is None:
            return [_or_error(self._on_cpu, each) for each in group]
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            found = self._by_either(group, lambda contents: nvjpeg.decode(contents, self.device))
            self._stream.synchronize()
        return found

    def _on_cpu(self, source: Source) -> Tensor:
        if isinstance(source, ImageFile):
            return _tensor(rgb_pixels(source.content, name=source.name), self.layout)
        return _tensor(rgb_pixels(source), self.layout)

    def _by_either(
        self, group: Sequence[Source], decode: Callable[[Sequence[bytes | memoryview]], list[Tensor]]
    ) -> list[Tensor | InputError]:
        """Decode the JPEGs that NVJPEG supports with `decode`, and the rest with Pillow. `decode` returns (3, H, W) for
        each file, or raises `RuntimeError` if it refuses a file."""
        files = [each if isinstance(each, ImageFile) else _or_error(ImageFile.of, each) for each in group]
        jpegs = [file for file in files if isinstance(file, ImageFile) and file.against is None]
        # One batch at a time, because `decode` needs an idle stream: it writes at once to freed memory, which earlier
        # work of the stream could still read.
        with self._lock:
            decoded = dict(zip(map(id, jpegs), self._by_nvjpeg(jpegs, decode), strict=True))
        found: list[Tensor | InputError] = []
        for file in files:
            pixels = decoded.get(id(file))
            if isinstance(file, ImageFile) and pixels is None:
                self.by_pillow[file.against or "JPEG that NVJPEG refuses"] += 1
                found.append(_or_error(self._moved, file))
            else:
                found.append(file if isinstance(file, InputError) else pixels)  # type: ignore[arg-type]
        return found

    def _by_nvjpeg(
        self, files: list[ImageFile], decode: Callable[[Sequence[bytes | memoryview]], list[Tensor]]
    ) -> list[Tensor | None]:
        """Decode files upright in the requested layout; None for a file that `decode` refuses, or whose size differs
        from Pillow's."""
        if not files:
            return []
        try:
            decoded = decode([file.content for file in files])
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError:  # NVJPEG's error does not name the file
            if self._stream is not None:
                torch.cuda.synchronize(self.device)  # the GPU may still write the other images
            if len(files) == 1:
                return [None]
            half = len(files) // 2
            return [*self._by_nvjpeg(files[:half], decode), *self._by_nvjpeg(files[half:], decode)]
        found = [
            _laid_out(nvjpeg.turned(pixels, file.orientation), self.layout) if pixels.shape[1:] == file.shape else None
            for file, pixels in zip(files, decoded, strict=True)
        ]
        if self._stream is not None:
            self._stream.synchronize()  # wait for the copies, because the memory of `decoded` is freed next
        return found

    def _moved(self, file: ImageFile) -> Tensor:
        """Decode a file by Pillow, and copy the pixels to the GPU."""
        with _opened(file.content, file.name) as image:
            upright = _upright_rgb(image)
        return _tensor(upright, self.layout).to(self.device)

    def _handed_over(self, pixels: Tensor) -> Tensor:
        """Keep the allocator from reusing a tensor's memory until the caller's stream has finished with the tensor."""
        if pixels.is_cuda:
            pixels.record_stream(torch.cuda.current_stream(pixels.device))
        return pixels


@contextmanager
def _opened(path_or_bytes: ImagePath | bytes | memoryview, name: str | None = None) -> Iterator[Image.Image]:
    """Open a file's header as Pillow's image; an error in the `with` block names the file."""
    name = name or _name_of(path_or_bytes)
    with (
        _errors_of(name),
        Image.open(
            user_path(path_or_bytes) if isinstance(path_or_bytes, (str, os.PathLike)) else io.BytesIO(path_or_bytes)
        ) as image,
    ):
        if image.width * image.height > MAX_PIXELS:
            raise InputError(
                f"{name} cannot be read: it has {image.width} x {image.height} pixels, more than {MAX_PIXELS:,}"
            )
        yield image


def _name_of(path_or_bytes: ImagePath | bytes | memoryview) -> str:
    if isinstance(path_or_bytes, (bytes, memoryview)):
        return f"image of {len(path_or_bytes):,} bytes"
    return str(os.fspath(path_or_bytes))


@contextmanager
def _errors_of(name: str) -> Iterator[None]:
    """Turn Pillow's errors for files that are not images, are damaged or are huge into an error that names the file."""
    try:
        yield
    except UnidentifiedImageError as error:
        raise InputError(f"{name} is not an image that Pillow can read") from error
    except InputError:
        raise
    except DAMAGE as error:
        raise InputError(f"{name} cannot be read: {error}") from error


def _upright_rgb(image: Image.Image) -> Image.Image:
    image.load()
    # `exif_transpose` copies even an image that it does not rotate. For a JPEG of 500 x 375 pixels, this takes as long
    # as decoding. A copy is needed only if the image is memory-mapped from its file, because the file will be closed.
    turned = image.getexif().get(ORIENTATION, 1) != 1
    upright: Image.Image = ImageOps.exif_transpose(image) if turned else image.copy() if image.readonly else image
    if upright.mode == "F":
        raise ValueError("its pixels are floating-point numbers of unknown range: save it with 8 or 16 bits")
    if upright.mode.startswith("I"):  # 16-bit: Pillow would clip, not scale
        values = np.asarray(upright, dtype=np.float64)
        if values.size and not 0 <= values.min() <= values.max() <= 65535:
            raise ValueError(f"its pixels are {values.min():.0f} to {values.max():.0f}: save it with 8 or 16 bits")
        upright = Image.fromarray((values / 257).round().astype(np.uint8))
    if upright.has_transparency_data:  # transparent pixels have a meaningless colour, so white replaces it
        upright = upright.convert("RGBA")
        upright = Image.alpha_composite(Image.new("RGBA", upright.size, "white"), upright)
    return upright if upright.mode == "RGB" else upright.convert("RGB")


def _tensor(image: RgbPixels | Image.Image, layout: str) -> Tensor:
    """Convert an image to a tensor with NumPy: torch's operators would start a team of threads for each decoding
    thread."""
    pixels = np.array(image) if isinstance(image, Image.Image) else image  # (H, W, 3)
    return torch.from_numpy(pixels if layout == "hwc" else np.ascontiguousarray(pixels.transpose(2, 0, 1)))


def _laid_out(pixels: Tensor, layout: str) -> Tensor:
    """Bring (3, H, W) to the requested layout, contiguous."""
    return (pixels if layout == "chw" else pixels.permute(1, 2, 0)).contiguous()


def _or_error(function: Callable[[Given], Result], given: Given) -> Result | InputError:
    try:
        return function(given)
    except InputError as error:
        return error


def _device_of(device: str | torch.device) -> tuple[torch.device, str | None]:
    """Return the device of the tensors, and why "auto" did not choose a GPU (None if it did)."""
    wanted, may_be_cpu = gpu_of(device)
    if wanted is None:
        return torch.device("cpu"), None
    reason = nvjpeg.missing(wanted)
    if reason is None:
        return wanted, None
    if not may_be_cpu:
        raise NoImageDecoderError(
            f'photographs cannot be decoded on {wanted}: {reason}. Use device="cpu" (or "auto") and move what you '
            'need: pixels.to("cuda")'
        )
    return torch.device("cpu"), reason
