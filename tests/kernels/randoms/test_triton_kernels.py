"""The generator and the quantiles of the Triton kernels agree with published answers and the reference."""

from __future__ import annotations

import pytest
import torch

from rooftop.kernels.randoms.words import WORD, normal_quantiles_reference, quantile_table
from rooftop.launch import INTERPRETED

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
random_kernels = pytest.importorskip("rooftop.kernels.randoms.triton_kernels")
philox, normal = random_kernels.philox, random_kernels.normal

KNOWN = (  # counters, keys, answers of Philox 4x32-10, from the tests of Random123 (kat_vectors)
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((WORD, WORD, WORD, WORD), (WORD, WORD), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)

on_each = pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=[] if INTERPRETED else pytest.mark.skip(reason="kernels run only interpreted")),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)


@triton.jit
# (7, 4) int64: for four counters, the words of the counter and then those of the key; (4, 4) int64
def generate(words, out):
    column = tl.arange(0, 4)
    c0 = tl.load(words + column).to(tl.uint32)
    c1 = tl.load(words + 4 + column).to(tl.uint32)
    c2 = tl.load(words + 8 + column).to(tl.uint32)
    c3 = tl.load(words + 12 + column).to(tl.uint32)
    k0 = tl.load(words + 16 + column).to(tl.uint32)
    k1 = tl.load(words + 20 + column).to(tl.uint32)
    c0, c1, c2, c3 = philox(c0, c1, c2, c3, k0, k1)
    tl.store(out + column, c0.to(tl.int64))
    tl.store(out + 4 + column, c1.to(tl.int64))
    tl.store(out + 8 + column, c2.to(tl.int64))
    tl.store(out + 12 + column, c3.to(tl.int64))


@triton.jit
def quantiles(words, table, out, BLOCK: tl.constexpr):  # (N,) int64; (32, 8); (N,) float32
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + place, normal(tl.load(words + place).to(tl.uint32), table))


@on_each
def test_published_answers(device: str) -> None:
    columns = [(*counter, *key) for counter, key, _ in KNOWN] + [(0,) * 6]
    words = torch.tensor(columns).t().contiguous().to(device)
    out = torch.empty(4, 4, dtype=torch.int64, device=device)
    generate[(1,)](words, out)
    assert [tuple(column) for column in out.t().tolist()] == [answer for *_, answer in KNOWN] + [KNOWN[0][2]]


@on_each
def test_quantiles_of_words_in_all_octaves(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    below = torch.cat([torch.randint(0, 1 << bits, (64,), generator=generator) for bits in range(32)])  # 2048
    words = torch.cat((below, WORD - below)).to(device)
    out = torch.empty(words.shape, dtype=torch.float32, device=device)
    quantiles[(len(words) // 1024,)](words, quantile_table(words.device), out, BLOCK=1024)
    assert torch.equal(out.cpu(), normal_quantiles_reference(words.cpu()))
