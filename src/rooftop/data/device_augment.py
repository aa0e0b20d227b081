"""Apply RandAugment on the device that trains; the CPU only chooses the random operations.

    pixels = Pixels(values, erased, operations)      # from an ImageTransform with rand_augment_on="gpu"
    values = augmented(pixels.values, pixels.operations)

The CPU then has more time to decode images. Each image of a batch has its own list of operations. On a GPU, two kernel
launches apply the first operation of every image's list, the next two launches the second operation, and so on. The
resulting pixels are the same as Pillow's, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from PIL import Image
from torch import Tensor

from rooftop.data.rand_augment import FILL, NAMES, Operation, apply_operations, factor_of, matrix_of
from rooftop.errors import InputError
from rooftop.launch.triton_launch import INTERPRETED, has_triton, launch

ENTRIES = 9
"""Number of values in an encoded operation: the index in `NAMES`, the strength, the factor for colours, and the six
entries of the matrix. The factor is computed on the host, because a kernel would round its argument to float32.
"""
BLOCK, TABLE_BLOCK = 1024, 2048
WARPS = 4


def encoded(operations: Sequence[Operation], size: int) -> Tensor:
    """Encode operations on images of size x size pixels as numbers: (len(operations), ENTRIES) float64."""
    rows = [
        [NAMES.index(each.name), each.strength, factor_of(each.strength), *matrix_of(each, size, size)]
        for each in operations
    ]
    return torch.tensor(rows, dtype=torch.float64).view(-1, ENTRIES)


def augmented(images: Tensor, operations: Tensor) -> Tensor:
    """Apply to each image its own operations, in order.

    Args:
        images: (N, size, size, 3) uint8; operations are encoded for this size.
        operations: (N, count, ENTRIES) float64 on the same device, from `encoded`.

    Returns:
        uint8 of the same shape as `images`; `images` itself if there are no operations.

    Raises:
        ValueError: a shape, dtype or device differs from those described above.
        InputError: the images are on a GPU, but Triton is not installed.
    """
    _check(images, operations)
    count = operations.shape[1]
    if not images.numel() or not count:
        return images
    if images.is_cuda and not has_triton():
        raise InputError("RandAugment on a GPU needs Triton, which is not installed: set augment.rand_augment_on=cpu")
    if (images.is_cuda or INTERPRETED) and has_triton():
        images, operations = images.contiguous(), operations.contiguous()
        for number in range(count):
            images = _by_kernels(images, operations[:, number])
        return images
    return torch.stack([_by_pillow(*each) for each in zip(images, operations, strict=True)])


def _check(images: Tensor, operations: Tensor) -> None:
    if images.dim() != 4 or images.shape[3] != 3 or images.dtype != torch.uint8:
        raise ValueError(f"augmented: images must be (N, H, W, 3) uint8, got {tuple(images.shape)} {images.dtype}")
    if images.shape[1] != images.shape[2] and operations.numel():
        raise ValueError(f"augmented: operations are encoded for square images, but images are {tuple(images.shape)}")
    if operations.shape != (len(images), operations.shape[1] if operations.dim() > 1 else 0, ENTRIES):
        raise ValueError(
            f"augmented: operations must be ({len(images)}, count, {ENTRIES}), got {tuple(operations.shape)}"
        )
    if operations.dtype != torch.float64 or operations.device != images.device:
        raise ValueError(
            f"augmented: operations must be float64 on {images.device}, got {operations.dtype} on {operations.device}"
        )


def _by_kernels(images: Tensor, operations: Tensor) -> Tensor:
    """Apply one operation to each image; `operations` is (N, ENTRIES)."""
    from rooftop.data import augment_kernels

    count, height, width, _ = images.shape
    device = images.device
    tables = torch.empty((count, 3, 256), dtype=torch.uint8, device=device)
    out = torch.empty_like(images)
    # Pillow rounds the product and the sum. A fused multiply-add rounds only the sum.
    exact = {"num_warps": WARPS, "enable_fp_fusion": False}
    stride = operations.stride(0)
    launch(
        augment_kernels.write_tables, (count, 3), device, images, operations, tables, height * width, stride,
        BLOCK=TABLE_BLOCK, **exact,
    )  # fmt: skip
    launch(
        augment_kernels.apply_operation, (-(-height * width // BLOCK), count), device, images, operations, tables, out,
        height, width, stride, *FILL, BLOCK=BLOCK, **exact,
    )  # fmt: skip
    return out


def _by_pillow(image: Tensor, operations: Tensor) -> Tensor:
    drawn = [Operation(NAMES[int(code)], strength) for code, strength, *_ in operations.tolist()]
    changed = apply_operations(Image.fromarray(image.contiguous().numpy()), drawn)
    return torch.frombuffer(bytearray(changed.tobytes()), dtype=torch.uint8).view(image.shape)
