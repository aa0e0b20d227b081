"""Copy under a mask on a GPU, by one kernel that reads the mask and the selected elements, and writes only the selected
elements.

The kernel is memory-bound if the mask consists of contiguous areas, as most masks do. At the edges of areas, and
everywhere in a random mask, the kernel stores numbers one by one. For bytes, this takes several times as long as
storing wide words.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from rooftop.kernels.operands.repeating_numbers import COLUMNS as TABLE
from rooftop.kernels.operands.repeating_numbers import table_of
from rooftop.kernels.operands.strided_rows import LINE_BYTES, from_line
from rooftop.launch.strides import Dims, merged
from rooftop.launch.triton_launch import Repeated, require_triton
from rooftop.mat.remembered import remember

# Numbers that a program copies. A program has 64 threads. If the numbers are bytes, each thread copies two words of 16
# bytes; if the numbers are wider, more words, because fewer programs are launched faster.
_NUMBERS = 2048
_WARPS = 2
_launches: dict[Any, list[Repeated]] = {}
_MOST_LAUNCHES = 1024


def copy_by_kernel(source: Tensor, target: Tensor, mask: Tensor) -> None:
    """Copy the elements whose mask is not 0.

    Args:
        source: a tensor with the target's shape and dtype, or one element (channels,) on the CPU.
        target: (..., channels), with contiguous channels, as integers that carry the bits.
        mask: uint8 or bool, (..., 1) for whole elements or (..., channels).
    """
    if not target.numel():
        return
    marked = mask.view(torch.uint8)
    if source.dim() == 1:
        some, some_lead = table_of(source.numpy().tobytes(), source.dtype, target.device).numbers, 0
    else:
        some, some_lead = from_line(source)
    into, into_lead = from_line(target)
    marks, marks_lead = from_line(marked)
    leads = (some_lead, into_lead, marks_lead)
    odd = marks.data_ptr() % LINE_BYTES
    lie = tuple([(each.shape, each.stride()) for each in (source, target, marked)])
    key = (lie, leads, odd, target.dtype, target.device)
    found = _launches.get(key)
    if found is None:
        found = list(_launches_of(source, target, marked, leads, odd))
        if len(found) == 1:
            remember(_launches, key, found, _MOST_LAUNCHES)
    for each in found:
        each(some, into, marks)


def _launches_of(source: Tensor, target: Tensor, mask: Tensor, leads: Sequence[int], odd: int) -> Iterator[Repeated]:
    """Yield one launch if at most three dimensions remain after merging. If more remain, yield one launch for each
    index of the leading dimensions.

    Args:
        leads: distances from the pointers of source, target and mask to the first element: in numbers for source and
            target, in marks (bytes of the mask) for the mask.
        odd: the address of the mask modulo 16 bytes.
    """
    require_triton()
    from rooftop.mat.masked_copy_kernels import masked_copy

    channels = target.shape[-1]
    per = channels // mask.shape[-1]  # numbers for each mark (byte of the mask)
    is_value = source.dim() == 1
    dims, columns = _dims(None if is_value else source, target, mask)
    word = math.gcd(LINE_BYTES // target.element_size(), columns, *leads[:2])
    word = math.gcd(word, *(step for _, steps in dims for step in steps[:2]))
    in_group = word // math.gcd(word, per)  # marks
    mask_word = math.gcd(in_group, odd, leads[2], *(steps[2] for _, steps in dims))
    sizes = (word, word, mask_word)
    while len(dims) < 2:
        dims.insert(0, (1, (0, 0, 0)))
    *outer, (over, across), (inner_rows, down) = dims
    rows, words = over * inner_rows, columns // word
    in_program = _NUMBERS // word
    width = min(in_program, 1 << (words - 1).bit_length())
    height = min(in_program // width, 1 << (rows - 1).bit_length())
    spans = [columns + sum((size - 1) * steps[n] for size, steps in dims) for n in range(3)]
    constants = {
        "CHANNELS": channels if is_value else 0, "TABLE": TABLE, "PER": per, "MARKS": in_group, "MASK_WORD": mask_word,
        "WORDS": in_group * per // word, "WORD": word, "WIDE": max(*spans, rows * columns) >= 2**31,
        "ROWS": height, "COLUMNS": width, "num_warps": _WARPS,
    }  # fmt: skip
    grid = (-(-rows // height) * -(-words // width),)
    moves = [step // by for n, by in enumerate(sizes) for step in (across[n], down[n])]
    for index in product(*(range(size) for size, _ in outer)):
        begins = [lead + sum(i * steps[n] for i, (_, steps) in zip(index, outer, strict=True))
                  for n, lead in enumerate(leads)]  # fmt: skip
        given = [*[begin // by for begin, by in zip(begins, sizes, strict=True)], rows, inner_rows, words, *moves]
        yield Repeated(masked_copy, grid, target.device, [0, 0, 0, *given], (0, 1, 2), **constants)


def _dims(source: Tensor | None, target: Tensor, mask: Tensor) -> tuple[Dims, int]:
    """Merge adjacent dimensions that each tensor traverses with a single stride.

    Returns:
        (size, steps of source, target and mask) of each dimension except the last one, outermost first; and the number
        of contiguous numbers in the last dimension.
    """
    nowhere = (0,) * target.dim()
    strides = [nowhere if source is None else source.stride(), target.stride(), mask.stride()]
    dims = merged(target.shape[:-1], *(each[:-1] for each in strides))
    channels = target.shape[-1]
    beside = (0 if source is None else channels, channels, mask.shape[-1])
    if dims and dims[-1][1] == beside:
        return dims[:-1], dims[-1][0] * channels
    return dims, channels
