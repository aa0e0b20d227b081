"""Compute random 32-bit words from a key, a step and a position, and numbers from these words, in PyTorch.

The generator is Philox 4x32-10 (Salmon, Moraes, Dror, Shaw 2011, "Parallel Random Numbers: As Easy as 1, 2, 3"). The
key has 64 bits. The counter consists of two numbers of 64 bits: the element's position divided by four, and the step.
One evaluation of the generator, a block, returns the four words of four consecutive elements.

A uniform number is the upper 24 bits of its word, divided by 2^24. In float64, a uniform number consists of the upper
27 bits of its word, and below them the upper 26 bits of the element's word in a second block, whose counter differs
only in the highest bit of the step. A normal number is the quantile of its word, so each normal number needs one word,
and no word is rejected. The normal distribution is symmetric and reaches 6.3 standard deviations. The quantile is a
polynomial of degree 7 in each octave of the tail's probability (as in Cheung, Lee, Luk, Villasenor 2007, "Hardware
Generation of Arbitrary Random Number Distributions From Uniform Distributions Via the Inversion Method"). The
polynomial is computed in integers, so the numbers are the same everywhere. Logarithms and cosines would differ between
libraries, and a compiler may or may not fuse a floating point product with a sum.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def random_key(seed: int, name: str) -> int:
    """The generator's key for a name: the name's BLAKE2b hash of 64 bits, keyed by the seed.

    Args:
        seed: from 0 to 2^64 - 1.
        name: name of the random tensor, such as the parameter's name in the whole model.

    Returns:
        An int from -2^63 to 2^63 - 1.

    Raises:
        TypeError: seed is not an int, or name is not a str.
        ValueError: seed is out of range.
    """
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"random_key: seed must be an int, got {type(seed).__name__}")
    if not isinstance(name, str):
        raise TypeError(f"random_key: name must be a str, got {type(name).__name__}")
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"random_key: seed must be from 0 to 2^64 - 1, got {seed}")
    hashed = hashlib.blake2b(name.encode(), digest_size=8, key=seed.to_bytes(8, "little"))
    return int.from_bytes(hashed.digest(), "little", signed=True)


# The attribute `_dynamo_marked_constant` makes torch.compile record the key as a constant. The public function for this
# purpose, torch.compiler.assume_constant_result, would import the compiler.
random_key._dynamo_marked_constant = True  # type: ignore[attr-defined]

WORD = 0xFFFFFFFF  # 32 bits, all set
Words = TypeVar("Words", Tensor, NDArray[np.int64])


def philox_reference(counter: Sequence[Words], key: int) -> list[Words]:
    """Philox 4x32-10 of a counter of four words and a 64-bit key; words are int64 from 0 to 2^32 - 1, as tensors or
    NumPy arrays."""
    c0, c1, c2, c3 = counter
    k0, k1 = key & WORD, key >> 32 & WORD
    for _ in range(10):
        first, second = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # the products wrap; `& WORD` also removes the sign bits
        c0, c2 = (second >> 32 & WORD) ^ c1 ^ k0, (first >> 32 & WORD) ^ c3 ^ k1
        c1, c3 = second & WORD, first & WORD
        k0, k1 = k0 + 0x9E3779B9 & WORD, k1 + 0xBB67AE85 & WORD
    return [c0, c1, c2, c3]


def words_reference(place: Tensor, key: int, step: int | Tensor, more: bool = False, grouped: bool = False) -> Tensor:
    """Compute the random words of elements from their positions in the whole tensor. Words and positions are int64.
    `step`: an int, or an int64 tensor of shape (). `more`: compute the words for the additional bits of float64
    numbers. `grouped`: the positions (N,) form whole groups of four, each from 4 k to 4 k + 3.
    """
    if grouped:
        return torch.stack(_philox(_counter(place[::4] >> 2, step, more), key), -1).flatten()
    c0, c1, c2, c3 = _philox(_counter(place >> 2, step, more), key)
    lane = place & 3
    return torch.where(lane < 2, torch.where(lane == 0, c0, c1), torch.where(lane == 2, c2, c3))


FEW = 1 << 12


def _philox(counter: list[Tensor], key: int) -> list[Tensor]:
    """Compute `philox_reference`. On a CPU, up to `FEW` blocks are computed by NumPy, in at most half the time of
    PyTorch, because NumPy's calls have less overhead.
    """
    if counter[0].is_cpu and counter[0].numel() <= FEW:
        return [torch.from_numpy(words) for words in philox_reference([each.numpy() for each in counter], key)]
    return philox_reference(counter, key)


def _counter(block: Tensor, step: int | Tensor, more: bool) -> list[Tensor]:
    halves = (step & WORD, step >> 32 | (1 << 31 if more else 0))
    return [block & WORD, block >> 32, *(torch.zeros_like(block) + half for half in halves)]


def uniforms_reference(words: Tensor, more: Tensor | None = None) -> Tensor:
    """Compute float64 numbers in [0, 1), from 24 bits of one word or from 53 bits of two words."""
    if more is None:
        return (words >> 8).double() * 2.0**-24
    return (((words >> 5) << 26) | (more >> 6)).double() * 2.0**-53


# Polynomials in u for the normal quantile of 1 - p. The tail's probability p is (1 + t) * 2^-(octave + 2) with t from 0
# to 1, and u is 2 t - 1. Row `octave` has the coefficients of u^0 to u^7, times 2^28, of the polynomial through the
# quantiles at the 8 Chebyshev nodes of -1 <= u <= 1.
QUANTILES = (
    (85534084, -88488531, 4647939, -1928232, 317229, -102874, 29209, -8839),
    (238141573, -62331987, 6420754, -1442018, 335350, -86869, 28065, -7918),
    (353800840, -50118460, 6167113, -1302986, 309498, -80098, 25986, -7345),
    (449881628, -42822035, 5724806, -1202045, 287117, -74515, 24245, -6864),
    (533496096, -37881143, 5312585, -1119100, 268335, -69822, 22775, -6458),
    (608335613, -34269764, 4957863, -1049399, 252435, -65833, 21520, -6110),
    (676592149, -31490629, 4656067, -990088, 238824, -62404, 20436, -5809),
    (739687006, -29271136, 4398020, -939042, 227043, -59423, 19491, -5545),
    (798601034, -27448296, 4175332, -894637, 216742, -56807, 18658, -5313),
    (854043393, -25918150, 3981243, -855630, 207651, -54491, 17919, -5106),
    (906545690, -24610982, 3810471, -821061, 199560, -52423, 17257, -4920),
    (956518127, -23478131, 3658909, -790181, 192305, -50565, 16660, -4752),
    (1004284801, -22484500, 3523343, -762399, 185756, -48883, 16118, -4600),
    (1050106876, -21604078, 3401236, -737247, 179810, -47352, 15625, -4461),
    (1094198345, -20817138, 3290562, -714344, 174381, -45952, 15173, -4334),
    (1136737076, -20108418, 3189686, -693383, 169400, -44666, 14756, -4216),
    (1177872753, -19465906, 3097276, -674111, 164810, -43478, 14371, -4108),
    (1217732716, -18880009, 3012234, -656316, 160564, -42378, 14014, -4007),
    (1256426339, -18342958, 2933650, -639822, 156622, -41356, 13682, -3913),
    (1294048368, -17848392, 2860759, -624482, 152949, -40402, 13372, -3825),
    (1330681504, -17391044, 2792918, -610169, 149517, -39509, 13081, -3743),
    (1366398430, -16966513, 2729577, -596775, 146301, -38672, 12808, -3665),
    (1401263422, -16571089, 2670268, -584207, 143280, -37885, 12551, -3592),
    (1435333643, -16201621, 2614585, -572384, 140434, -37143, 12309, -3524),
    (1468660193, -15855413, 2562179, -561238, 137749, -36443, 12080, -3459),
    (1501288966, -15530142, 2512744, -550706, 135208, -35779, 11863, -3397),
    (1533261361, -15223798, 2466013, -540735, 132801, -35150, 11657, -3338),
    (1564614873, -14934629, 2421752, -531277, 130516, -34553, 11462, -3283),
    (1595383582, -14661099, 2379751, -522290, 128343, -33984, 11275, -3230),
    (1625598579, -14401859, 2339827, -513737, 126273, -33443, 11098, -3179),
    (1655288312, -14155715, 2301816, -505585, 124298, -32925, 10928, -3131),
    (1684478893, -13921609, 2265572, -497802, 122412, -32431, 10766, -3085),
)


def normal_quantiles_reference(words: Tensor) -> Tensor:
    """The normal quantile of (word + 1/2) / 2^32 in float32, with an error below 2e-7.

    The computation uses fixed-point integers with 28 fractional bits. The tail's probability is the integer `tail`
    divided by 2^33. Each octave of the tail's probability has a separate polynomial.
    """
    negative = words < 1 << 31
    tail = torch.where(negative, words, WORD - words) << 1 | 1
    leading = (tail & ~(tail >> 1)).float()  # the bit after the leading 1 is cleared, so rounding keeps the exponent
    octave = 158 - (leading.view(torch.int32) >> 23)
    place = (tail << (octave + 1) & WORD) - (1 << 31)  # u, with 31 fractional bits
    rows = quantile_table(words.device)[octave]  # (..., 8)
    total = rows[..., 7].long()
    for power in range(6, -1, -1):
        total = rows[..., power] + (total * place + (1 << 30) >> 31)
    return torch.where(negative, -total, total).float() * 2.0**-28


@cache
def quantile_table(device: torch.device) -> Tensor:
    """The coefficients of `normal_quantiles_reference` for the kernels, int32, cached per device."""
    return torch.tensor(QUANTILES, dtype=torch.int32, device=device)


@dataclass(frozen=True)
class Values:
    """The distribution of random numbers: shift + scale * u, limited to [low, high], with u uniform in [0, 1) or
    standard normal. For a normal number, a random word is scaled linearly to the range from `lower_word` up to and
    including `lower_word + last_word`; u is the quantile of the scaled word. Numbers are computed in float64, where the
    product of two float32 numbers is exact and the sum rounds once. The float64 result is then rounded to float32 and
    to the dtype. Only float64 uniform numbers are not rounded to float32.
    """

    normal: bool
    scale: float
    shift: float
    low: float
    high: float
    lower_word: int = 0
    last_word: int = WORD


def values_reference(
    values: Values, place: Tensor, key: int, step: int, dtype: torch.dtype, grouped: bool = False
) -> Tensor:
    """Random numbers with the distribution `values`, for the elements at the int64 positions `place` of a whole tensor.
    `grouped`: the positions (N,) form whole groups of four, each from 4 k to 4 k + 3.
    """
    words = words_reference(place, key, step, grouped=grouped)
    if values.normal:
        words = values.lower_word + (words * values.last_word + words >> 32 & WORD)
        plain = normal_quantiles_reference(words).double()
    else:
        more = words_reference(place, key, step, True, grouped) if dtype == torch.float64 else None
        plain = uniforms_reference(words, more)
    exact = plain * values.scale + values.shift
    if values.normal or dtype != torch.float64:
        exact = exact.float()
    return exact.clamp(values.low, values.high).to(dtype)
