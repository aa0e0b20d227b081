"""Norms of sums over ranks: the real kernel runs on the CPU, where each rank is a thread (`cuda_of_ranks`)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rooftop.kernels.norms import rank_sums as module
from rooftop.kernels.norms.rank_sums import Mailboxes, kernel_of, norm_of_rank_sum, norm_of_rank_sum_reference
from rooftop.kernels.operands.cuda_texts import cuda_text
from rooftop.testing import assert_as_accurate

Ranks = Callable[[int, Callable[[int], Any]], list[Any]]
Parameters = dict[str, Tensor | None]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WORDS = 16384

# ranks, rows, columns, dtype, RMS norm. The cases have packs of eight, four and two elements and single elements,
# several packs for a thread, blocks of 4, 8 and 16 warps, and each number of ranks.
WAYS = [
    (1, 3, 64, BF16, True),
    (2, 3, 1024, BF16, True),
    (2, 1, 4096, BF16, True),
    (2, 2, 8200, FP16, False),
    (3, 2, 333, FP16, False),
    (4, 5, 130, FP32, False),
    (5, 2, 1604, BF16, True),
    (6, 1, 7, FP32, True),
    (7, 2, 1, BF16, False),
    (8, 4, 96, BF16, False),
]
OTHERS = [kernel_of(64, BF16, FP32, 2, False)[0], kernel_of(64, BF16, BF16, 2, True)[0]]
KERNELS = [*(kernel_of(columns, dtype, dtype, ranks, rms)[0] for ranks, _, columns, dtype, rms in WAYS), *OTHERS]


@pytest.fixture
def on_ranks(compile_for_cpu: Callable[[str, Sequence[str]], None], cuda_of_ranks: Ranks) -> Ranks:
    """Run a call on each rank; all kernels are compiled together."""
    compile_for_cpu(cuda_text(*module.RANK_SUM_FILES), list(dict.fromkeys(KERNELS)))
    return cuda_of_ranks


def mailboxes(ranks: int, words: int = WORDS) -> tuple[list[Mailboxes], list[Tensor]]:
    """The mailboxes of all ranks, and their memory."""
    memory = [torch.zeros(Mailboxes.bytes_of(ranks, words), dtype=torch.uint8) for _ in range(ranks)]
    addresses, here = [each.data_ptr() for each in memory], torch.device("cpu")
    stops = [torch.zeros(1, dtype=torch.int32) for _ in range(ranks)]
    return [Mailboxes.at(addresses, stops[rank], rank, words, here) for rank in range(ranks)], memory


def tensors(ranks: int, shape: Sequence[int], dtype: torch.dtype, rms: bool) -> tuple[list[Tensor], Parameters]:
    """The partial rows of each rank, and the other tensors."""
    torch.manual_seed(ranks + sum(shape))
    partials = [(torch.randn(*shape) + 0.3).to(dtype) for _ in range(ranks)]
    rest: Parameters = {"residual": torch.randn(*shape).to(dtype)}
    for name in ("weight", "bias", "input_bias"):
        rest[name] = None if rms and name == "bias" else (torch.randn(shape[-1]) + 0.5).to(dtype)
    return partials, rest


def eager(partials: Sequence[Tensor], rest: Parameters, rms: bool) -> tuple[Tensor, Tensor]:
    """A sum over the ranks, the additions and the norm, each rounded."""
    total = sum(partials[1:], start=partials[0])
    for term in (rest["input_bias"], rest["residual"]):
        total = total if term is None else total + term
    if rms:
        return F.rms_norm(total, total.shape[-1:], rest["weight"], 1e-5), total
    return F.layer_norm(total, total.shape[-1:], rest["weight"], rest["bias"], 1e-5), total


def exact(partials: Sequence[Tensor], rest: Parameters, rms: bool) -> tuple[Tensor, Tensor]:
    doubles = {name: None if each is None else each.double() for name, each in rest.items()}
    return eager([each.double() for each in partials], doubles, rms)


def computed(on_ranks: Ranks, partials: Sequence[Tensor], rest: Parameters, rms: bool) -> list[tuple[Tensor, Tensor]]:
    """(y, total) of each rank."""
    made, _memory = mailboxes(len(partials))
    return on_ranks(len(made), lambda rank: norm_of_rank_sum(partials[rank], mailboxes=made[rank], rms=rms, **rest))  # type: ignore[arg-type]


def assert_gate(found: list[tuple[Tensor, Tensor]], partials: Sequence[Tensor], rest: Parameters, rms: bool) -> None:
    for rank, pair in enumerate(found):
        for name, ours, plain, truth in zip(
            ("y", "total"), pair, eager(partials, rest, rms), exact(partials, rest, rms), strict=True
        ):
            assert_as_accurate(ours, plain, truth, what=f"{name} of rank {rank}")
            assert torch.equal(ours, found[0][0 if name == "y" else 1])


@pytest.mark.parametrize(("ranks", "rows", "columns", "dtype", "rms"), WAYS)
def test_gate_of_the_kernel_and_the_same_bits_on_all_ranks(
    ranks: int, rows: int, columns: int, dtype: torch.dtype, rms: bool, on_ranks: Ranks
) -> None:
    partials, rest = tensors(ranks, (rows, columns), dtype, rms)
    found = computed(on_ranks, partials, rest, rms)
    assert_gate(found, partials, rest, rms)
    reference = norm_of_rank_sum_reference(partials, rms=rms, **rest)  # type: ignore[arg-type]
    assert torch.equal(found[0][1], reference[1])
    assert_gate([reference], partials, rest, rms)


@pytest.mark.parametrize("absent", [("residual",), ("input_bias",), ("weight", "bias"), ("residual", "input_bias")])
def test_what_is_not_given_is_left_out(absent: tuple[str, ...], on_ranks: Ranks) -> None:
    partials, rest = tensors(8, (4, 96), BF16, False)
    rest |= dict.fromkeys(absent)
    assert_gate(computed(on_ranks, partials, rest, False), partials, rest, False)


def test_views_float32_parameters_and_more_dimensions(on_ranks: Ranks) -> None:
    partials, rest = tensors(2, (2, 3, 64), BF16, False)
    wide = {name: each.float() for name, each in rest.items() if each is not None}
    assert rest["residual"] is not None
    misaligned = torch.cat((torch.zeros(1, dtype=BF16), partials[1].flatten()))[1:].view(2, 3, 64)
    assert misaligned.data_ptr() % 16
    spread = rest["residual"].transpose(0, 1).contiguous().transpose(0, 1)
    found = computed(on_ranks, [partials[0], misaligned], wide | {"residual": spread}, False)
    assert_gate(found, partials, rest, False)


def test_a_large_offset_does_not_swamp_the_variance(on_ranks: Ranks) -> None:
    partials, rest = tensors(4, (5, 130), FP32, False)
    partials = [2500 + each for each in partials]
    found = computed(on_ranks, partials, rest | dict.fromkeys(("residual", "input_bias")), False)
    truth = F.layer_norm(found[0][1].double(), (130,), rest["weight"].double(), rest["bias"].double())  # type: ignore[union-attr]
    assert_as_accurate(found[0][0], truth.float(), truth)


def test_what_is_not_finite_stays_in_its_row(on_ranks: Ranks) -> None:
    partials, rest = tensors(4, (5, 130), FP32, False)
    clean = computed(on_ranks, partials, rest, False)
    partials[2][1, 7], partials[0][3, 9] = torch.nan, torch.inf
    for (y, total), (expected, _) in zip(computed(on_ranks, partials, rest, False), clean, strict=True):
        assert y[[1, 3]].isnan().all()
        assert total[1, 7].isnan()
        assert total[3, 9] == torch.inf
        assert torch.equal(y[[0, 2, 4]], expected[[0, 2, 4]])


def test_no_rows(on_ranks: Ranks) -> None:
    partials, rest = tensors(2, (0, 64), BF16, True)
    made, _memory = mailboxes(2)
    for y, total in on_ranks(2, lambda rank: norm_of_rank_sum(partials[rank], mailboxes=made[rank], rms=True, **rest)):  # type: ignore[arg-type]
        assert y.shape == total.shape == (0, 64)
    assert made[0].state.tolist() == [0, 0]


CALLS = [(1, 1024), (3, 1024), (2, 1024), (1, 1024)] * 6


def many_calls(on_ranks: Ranks) -> None:
    """Make calls of changing sizes, in which ranks are late at random. The calls are counted only in `state`, as in
    replays of a graph."""
    given = [tensors(2, shape, BF16, True) for shape in CALLS]
    made, _memory = mailboxes(2, words=3 * 512)

    def calls(rank: int) -> list[tuple[Tensor, Tensor]]:
        found, drawn = [], random.Random(rank)
        for partials, rest in given:
            time.sleep(drawn.choice([0.0, 0.0, 0.01]))
            found.append(norm_of_rank_sum(partials[rank], mailboxes=made[rank], rms=True, **rest))  # type: ignore[arg-type]
        return found

    for partials_and_rest, *found in zip(given, *on_ranks(2, calls), strict=True):
        assert_gate(found, *partials_and_rest, True)
    assert made[0].state.tolist() == made[1].state.tolist() == [len(CALLS), 0]


def test_many_calls(on_ranks: Ranks) -> None:
    many_calls(on_ranks)


def test_numbers_of_calls_may_overflow(on_ranks: Ranks) -> None:
    partials, rest = tensors(2, (3, 1024), BF16, True)
    made, _memory = mailboxes(2)
    for each in made:
        each.state[0] = 2**31 - 2
    for _ in range(4):
        found = on_ranks(2, lambda rank: norm_of_rank_sum(partials[rank], mailboxes=made[rank], rms=True, **rest))  # type: ignore[arg-type]
        assert_gate(found, partials, rest, True)
    assert made[0].state.tolist() == [-(2**31) + 2, 0]


def test_a_wait_for_a_rank_that_never_comes_can_be_ended(on_ranks: Ranks) -> None:
    partials, rest = tensors(2, (3, 1024), BF16, True)
    made, _memory = mailboxes(2)

    def call(rank: int) -> float:
        begin = time.monotonic()
        if rank == 0:
            norm_of_rank_sum(partials[0], mailboxes=made[0], rms=True, **rest)  # type: ignore[arg-type]
            return time.monotonic() - begin
        time.sleep(0.3)
        made[0].stop.fill_(1)
        return 0.0

    assert on_ranks(2, call)[0] >= 0.3


MUTANTS = {
    "no wait": ("here = here && (sender == rank || words[sender][i] >> 32 == call);", ";"),
    "any number": ("words[sender][i] >> 32 == call", "words[sender][i] >> 32"),
    "own part first": (
        "add(sender == rank ? own[chunk] : data_of<T, WIDTH>(words[sender]), values[chunk]);",
        "const int from = (rank + sender) % RANKS;\n"
        "            add(from == rank ? own[chunk] : data_of<T, WIDTH>(words[from]), values[chunk]);",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(
    mutant: str,
    monkeypatch: pytest.MonkeyPatch,
    compile_for_cpu: Callable[[str, Sequence[str]], None],
    cuda_of_ranks: Ranks,
) -> None:
    source, (old, new) = cuda_text(*module.RANK_SUM_FILES), MUTANTS[mutant]
    assert source.count(old) == 1
    changed = source.replace(old, new)
    monkeypatch.setattr(module, "cuda_text", lambda *names: changed)
    compile_for_cpu(changed, [kernel_of(1024, BF16, BF16, 2, True)[0], kernel_of(96, FP32, FP32, 3, False)[0]])
    if mutant == "own part first":
        with pytest.raises(AssertionError):
            order_of_the_ranks(cuda_of_ranks)
    else:
        with pytest.raises(AssertionError):
            many_calls(cuda_of_ranks)


def order_of_the_ranks(on_ranks: Ranks) -> None:
    """Parts that cancel, so that another order gives another sum."""
    partials, rest = tensors(3, (2, 96), FP32, False)
    partials = [partials[0] + 1e6, partials[1] * 1e-2, partials[2] - 1e6]
    for y, total in computed(on_ranks, partials, rest, False):
        reference = norm_of_rank_sum_reference(partials, **rest)  # type: ignore[arg-type]
        assert torch.equal(total, reference[1])
        torch.testing.assert_close(y, reference[0])


def test_parts_are_added_in_the_order_of_the_ranks(on_ranks: Ranks) -> None:
    order_of_the_ranks(on_ranks)


def test_what_does_not_fit_is_refused(on_ranks: Ranks) -> None:
    made = mailboxes(2, words=100)[0][0]
    partials, rest = tensors(2, (4, 96), BF16, False)
    with pytest.raises(ValueError, match="4 rows of 96 elements take 192 words, a mailbox has 100"):
        norm_of_rank_sum(partials[0], mailboxes=made, **rest)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"not torch\.float64"):
        norm_of_rank_sum(partials[0].double(), None, made)
    with pytest.raises(ValueError, match="a row of 16,385 elements does not fit"):
        norm_of_rank_sum(torch.zeros(1, 16385), None, made)
    with pytest.raises(ValueError, match="an RMS norm has no bias"):
        norm_of_rank_sum(partials[0], None, made, bias=rest["bias"], rms=True)
    with pytest.raises(ValueError, match="expected residual of shape"):
        norm_of_rank_sum(partials[0], partials[0][:1], made)


def test_rows_on_the_cpu_are_refused() -> None:
    with pytest.raises(ValueError, match="expected tensors on a GPU"):
        norm_of_rank_sum(torch.zeros(1, 8), None, mailboxes(2)[0][0])
