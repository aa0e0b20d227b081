"""Prepare images for training or validation: crop them to a square, augment and normalize them.

    transform = ImageTransform(224, {"crop": 0.35, "flip": 0.5, "rand_augment": 2}, train=True)
    transform(image, np.random.default_rng(0))         # (3, 224, 224) float32

In training: a random crop of a random shape (Szegedy et al. 2015, "Going deeper with convolutions"), a horizontal
flip, a shift, colour jitter, RandAugment, and random erasing (Zhong et al. 2020). `augment` switches each of these on.
All random numbers are drawn before decoding, so a JPEG is decoded only at the size that its crop needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from rooftop.data.colour_jitter import Colour, draw_jitter, jittered
from rooftop.data.device_augment import encoded
from rooftop.data.pixels import NO_OPERATIONS, Pixels, colour_constants
from rooftop.data.rand_augment import Operation, apply_operations, draw_operations
from rooftop.errors import InputError
from rooftop.media.images import MEAN, STD, RgbPixels, normalized, rgb_pixels
from rooftop.words import did_you_mean

ASPECTS = (3 / 4, 4 / 3)  # range of width / height of random crops
ERASED_PARTS, ERASED_ASPECTS = (0.02, 1 / 3), (0.3, 3.3)
TRIES = 10  # maximum number of attempts to draw a crop, or a rectangle to erase, that fits into the image
MARGIN = 256 / 224  # shorter side of the resized image / side of its central square, in validation, as for ImageNet
JUDGED_REDUCTION = 2.0  # the decoder shrinks validation images to no less than twice the resized size
# Images with a higher ratio of sides are cut before resizing. Without the cut, 5000 x 1 pixels took 1 GB and 2 s.
LONGEST = 16
VECTORIZED = torch.backends.cpu.get_cpu_capability().startswith("AVX")
"""Whether PyTorch resizes uint8 images with vector instructions. PyTorch resizes a crop of 350 x 290 pixels in 0.17 ms
with vector instructions, and in 1.3 ms without; Pillow takes 0.52 ms.
"""


@dataclass(frozen=True)
class _Augment:
    """Settings of the image augmentation. By default, all augmentation is off."""

    crop: float = 1.0
    flip: float = 0.0
    shift: float = 0.0
    jitter: float = 0.0
    hue: float = 0.0
    rand_augment: int = 0
    magnitude: float = 9.0
    rand_augment_on: str = "cpu"
    erase: float = 0.0
    detail: float = 1.0


@dataclass(frozen=True)
class Drawn:
    """The random changes of one image.

    Attributes:
        crop: left, top, right and bottom edge, as fractions of width and height; None: the central square.
        flip: whether the image is flipped horizontally.
        shift: shift to the right and down, in pixels of the result.
        jitter: colour changes, in the order of application.
        operations: operations of RandAugment.
        erased: top, left, bottom and right edge of the erased part, in pixels of the result; None: nothing is erased.
    """

    crop: tuple[float, float, float, float] | None = None
    flip: bool = False
    shift: tuple[int, int] = (0, 0)
    jitter: tuple[Colour, ...] = ()
    operations: tuple[Operation, ...] = ()
    erased: tuple[int, int, int, int] | None = None


class ImageTransform:
    """Converts an image to (3, size, size) float32, or to `Pixels`.

    Args:
        size: side in pixels.
        augment: augmentation in training, as an object or a mapping with some of these settings. `crop` is the minimum
            area of a random crop, as a fraction of the image (1: off). `flip` and `erase` are probabilities. `shift` is
            the maximum shift, as a fraction of the side. `jitter` is the strength of colour jitter, and `hue` the
            maximum change of the hue, as a fraction of the colour circle. `rand_augment` is a number of operations, and
            `magnitude` their strength, 0 to 10. With `rand_augment_on` "gpu", the `Normalizer` applies these operations
            on the device; the resulting pixels are the same as with "cpu". `detail` is the minimum ratio of a
            random crop's side, in decoded pixels, to `size`. `augment` None: no augmentation.
        train: whether images are augmented. Validation resizes the shorter side and uses the central square. The
            shorter side becomes 256/224 of `size`, as for ImageNet, if `augment.crop` is below 1, else `size`.
        mean, std: mean and standard deviation of the red, green and blue values in 0..1.
        normalize: whether this transform normalizes images; if not, it returns `Pixels`, which a `Normalizer`
            normalizes on the device.

    Raises:
        InputError: an argument is out of range.
    """

    def __init__(
        self,
        size: int,
        augment: Any = None,
        *,
        train: bool = False,
        mean: Sequence[float] = MEAN,
        std: Sequence[float] = STD,
        normalize: bool = True,
    ) -> None:
        if not _is_a(Integral, size) or size < 1:
            raise InputError(f"size is {size!r}: expected an integer of 1 or more")
        self.size, self.train, (self.mean, self.std) = size, train, colour_constants(mean, std)
        self.augment, self.normalize = _augment_of(augment), normalize
        if self.later and normalize:
            raise InputError(
                "augment.rand_augment_on is 'gpu', but this transform normalizes images: pass normalize=False, and "
                "normalize batches by a Normalizer"
            )

    def __call__(self, image: Image.Image | Tensor, generator: np.random.Generator | None = None) -> Tensor | Pixels:
        """Return the image as (3, size, size) float32 if `normalize` is set, else as `Pixels`.

        Args:
            image: RGB, or RGBA, whose alpha is ignored; or (3, H, W) uint8 on the CPU.
            generator: source of random numbers; None: no augmentation.

        Raises:
            InputError: the image is not RGB or RGBA, or the tensor has another shape or dtype.
        """
        if isinstance(image, Tensor):
            image = _image_of(image)
        elif image.mode in ("RGBA", "RGBX"):
            image = image.convert("RGB")  # without alpha
        elif image.mode != "RGB":
            raise InputError(f'the image has mode "{image.mode}": expected RGB, so call image.convert("RGB") first')
        return self.apply(image, self.draw(image.width, image.height, generator))

    def decode(
        self, path_or_bytes: str | bytes, generator: np.random.Generator | None, name: str | None
    ) -> tuple[RgbPixels | Image.Image, Drawn]:
        """Decode a file's image, no larger than needed, and draw its changes. Errors are those of `rgb_pixels`."""
        drawn = Drawn()

        def reduction(width: int, height: int) -> float:
            nonlocal drawn
            drawn = self.draw(width, height, generator)
            return self.reduction(width, height, drawn)

        return rgb_pixels(path_or_bytes, reduction, name), drawn

    def draw(self, width: int, height: int, generator: np.random.Generator | None) -> Drawn:
        """Draw the changes of an image of this size."""
        augment = self.augment
        if not self.train or generator is None:
            return Drawn()
        crop = _draw_crop(augment.crop, width / height, generator) if augment.crop < 1 else None
        flip = augment.flip > 0 and generator.random() < augment.flip
        most = round(augment.shift * self.size)
        shift = tuple(generator.integers(-most, most + 1, size=2).tolist()) if most else (0, 0)
        jitter = draw_jitter(augment.jitter, augment.hue, generator) if augment.jitter or augment.hue else ()
        operations = draw_operations(augment.rand_augment, augment.magnitude, generator) if augment.rand_augment else ()
        erased = None
        if augment.erase > 0 and generator.random() < augment.erase:
            erased = _draw_erased(self.size, generator)
        return Drawn(crop, bool(flip), shift, jitter, operations, erased)

    def reduction(self, width: int, height: int, drawn: Drawn) -> float:
        """The greatest factor by which the decoder may divide the image's width and height, before the transform
        resizes the image to its final size."""
        if drawn.crop is not None:
            left, top, right, bottom = drawn.crop
            return min((right - left) * width, (bottom - top) * height) / self.size / self.augment.detail
        gap = 1.0 if self.train else JUDGED_REDUCTION
        return min(width, height) / self.shorter_side / gap

    def apply(self, image: RgbPixels | Image.Image, drawn: Drawn) -> Tensor | Pixels:
        """Apply drawn changes to an RGB image, which is a Pillow image or (H, W, 3) uint8.

        Returns (3, size, size) float32 if `normalize` is set, else `Pixels`.
        """
        if drawn.crop is not None:
            pixels = resized(image, self.size, drawn.crop)
            if drawn.flip:  # a flip after resizing gives the same pixels as a flip before
                pixels = pixels.flip(1)
            now = drawn.jitter or (drawn.operations and not self.later)
            if not (self.normalize or now) and drawn.shift == (0, 0):
                return self.pixels(pixels, drawn)
            image = Image.fromarray(pixels.numpy())
        else:
            image = self._central(image if isinstance(image, Image.Image) else Image.fromarray(image))
            if drawn.flip:
                image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if drawn.shift != (0, 0):
            right, down = drawn.shift
            image = image.crop((-right, -down, self.size - right, self.size - down))  # fills with black
        image = jittered(image, drawn.jitter)
        if not self.later:
            image = apply_operations(image, drawn.operations)
        if not self.normalize:
            return self.pixels(torch.from_numpy(np.array(image)), drawn)  # a writable copy
        values = normalized(image, self.mean, self.std)
        if drawn.erased is not None:
            top, left, bottom, right = drawn.erased
            values.numpy()[:, top:bottom, left:right] = 0.0
        return values

    @property
    def later(self) -> bool:
        """Whether the `Normalizer`, instead of this transform, applies the drawn operations of RandAugment."""
        return self.train and self.augment.rand_augment > 0 and self.augment.rand_augment_on == "gpu"

    def pixels(self, values: Tensor, drawn: Drawn) -> Pixels:
        """Make the `Pixels` of an image, (size, size, 3) uint8: the image, and the drawn changes that the `Normalizer`
        applies later."""
        operations = encoded(drawn.operations, self.size) if self.later else NO_OPERATIONS
        return Pixels(values, torch.tensor(drawn.erased or (0, 0, 0, 0), dtype=torch.int16), operations)

    def _centre(self, image: Image.Image, resized: tuple[int, int]) -> Image.Image:
        """Cut out the central square of a very long image, so that only the square is resized."""
        start: list[float] = []
        end: list[float] = []
        for length, new in zip(image.size, resized, strict=True):
            first = round((new - self.size) / 2)
            start.append(first * length / new)
            end.append(min((first + self.size) * length / new, length))
        return image.resize((self.size, self.size), Image.Resampling.BILINEAR, (start[0], start[1], end[0], end[1]))

    @property
    def shorter_side(self) -> int:
        """The shorter side, in pixels, to which the whole image is resized before the central square is cut out."""
        return round(self.size * MARGIN) if self.augment.crop < 1 else self.size

    def _central(self, image: Image.Image) -> Image.Image:
        side, short = self.shorter_side, min(image.size)
        resized = (side * image.width // short, side * image.height // short)
        if max(resized) > LONGEST * side:
            return self._centre(image, resized)
        if resized != image.size:
            image = image.resize(resized, Image.Resampling.BILINEAR)
        left, top = round((image.width - self.size) / 2), round((image.height - self.size) / 2)
        return image.crop((left, top, left + self.size, top + self.size))


def box(crop: tuple[float, float, float, float], width: int, height: int) -> tuple[int, int, int, int]:
    """Convert a crop from fractions to whole pixels, (left, top, right, bottom), at least 1 x 1 pixel."""
    left, top, right, bottom = crop
    (x0, x1), (y0, y1) = _span(left, right, width), _span(top, bottom, height)
    return x0, y0, x1, y1


def _span(start: float, end: float, length: int) -> tuple[int, int]:
    first = min(round(start * length), length - 1)
    return first, max(first + 1, round(end * length))


def resized(image: RgbPixels | Image.Image, size: int, crop: tuple[float, float, float, float]) -> Tensor:
    """Resize a crop of an RGB image bilinearly with antialiasing; return (size, size, 3) uint8.

    The results of PyTorch and of Pillow differ by at most 1 of 255.
    """
    if isinstance(image, Image.Image):
        part = np.array(image.crop(box(crop, image.width, image.height)))
    else:
        left, top, right, bottom = box(crop, image.shape[1], image.shape[0])
        part = np.ascontiguousarray(image[top:bottom, left:right])  # PyTorch resizes contiguous pixels faster
    if not VECTORIZED:
        return torch.from_numpy(np.array(Image.fromarray(part).resize((size, size), Image.Resampling.BILINEAR)))
    # `part[None]` would have other strides, and then PyTorch would make planar pixels, which takes twice as long.
    pixels = torch.from_numpy(part).unsqueeze(0).permute(0, 3, 1, 2)  # (1, 3, H, W), channels last
    # For a single image, PyTorch uses one thread, independent of torch.set_num_threads.
    values = F.interpolate(pixels, (size, size), mode="bilinear", antialias=True)
    return values.permute(0, 2, 3, 1).squeeze(0)  # no copy


def _augment_of(given: Any) -> _Augment:
    if given is None:
        return _Augment()
    known = _Augment.__dataclass_fields__
    if isinstance(given, Mapping):
        for name in given:
            if name not in known:
                raise InputError(
                    f"augment has no {name!r}: expected some of {', '.join(known)}{did_you_mean(name, known)}"
                )
        found = _Augment(**given)
    else:
        found = _Augment(**{name: getattr(given, name) for name in known if hasattr(given, name)})
    for name in known:
        if name == "rand_augment_on":
            continue
        value, kind = getattr(found, name), Integral if name == "rand_augment" else Real
        if not _is_a(kind, value):
            raise InputError(
                f"augment.{name} is {value!r}: expected {'an integer' if kind is Integral else 'a number'}"
            )
    if not (0 < found.crop <= 1 and all(0 <= value <= 1 for value in (found.flip, found.shift, found.erase))):
        raise InputError(f"{found}: expected crop, flip, shift and erase from 0 to 1, and crop above 0")
    if not 0 < found.detail <= 1:
        raise InputError(f"{found}: expected detail above 0, up to 1")
    if not (0 <= found.jitter <= 1 and 0 <= found.hue <= 0.5):
        raise InputError(f"{found}: expected jitter from 0 to 1, and hue from 0 to 0.5")
    if found.rand_augment_on not in ("cpu", "gpu"):
        raise InputError(f"augment.rand_augment_on is {found.rand_augment_on!r}: expected 'cpu' or 'gpu'")
    if found.rand_augment < 0 or not 0 <= found.magnitude <= 10:
        raise InputError(f"{found}: expected rand_augment of 0 or more, and magnitude from 0 to 10")
    return found


def _is_a(kind: Any, value: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _image_of(pixels: Tensor) -> Image.Image:
    if pixels.dim() != 3 or pixels.shape[0] != 3 or pixels.dtype != torch.uint8 or not pixels.numel():
        raise InputError(
            f"an image has shape {tuple(pixels.shape)} and dtype {pixels.dtype}: expected (3, H, W), torch.uint8"
        )
    return Image.fromarray(np.ascontiguousarray(pixels.permute(1, 2, 0).numpy()))


def _draw_crop(
    least_area: float, aspect: float, generator: np.random.Generator
) -> tuple[float, float, float, float] | None:
    """Draw a crop: left, top, right and bottom as fractions; None (the central square) if no drawn shape fits."""
    for _ in range(TRIES):
        area = generator.uniform(least_area, 1.0)
        shape = math.exp(generator.uniform(math.log(ASPECTS[0]), math.log(ASPECTS[1])))
        width, height = math.sqrt(area * shape / aspect), math.sqrt(area / shape * aspect)
        if width <= 1 and height <= 1:
            left, top = generator.random() * (1 - width), generator.random() * (1 - height)
            return left, top, left + width, top + height
    return None


def _draw_erased(size: int, generator: np.random.Generator) -> tuple[int, int, int, int] | None:
    for _ in range(TRIES):
        area = generator.uniform(*ERASED_PARTS) * size * size
        shape = math.exp(generator.uniform(math.log(ERASED_ASPECTS[0]), math.log(ERASED_ASPECTS[1])))
        width, height = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if 0 < width < size and 0 < height < size:
            top, left = generator.integers(size - height + 1), generator.integers(size - width + 1)
            return int(top), int(left), int(top) + height, int(left) + width
    return None
