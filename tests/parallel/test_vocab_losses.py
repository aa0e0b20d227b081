"""The loss of a shared vocabulary is PyTorch's loss of all logits, although no rank ever has all logits. The tests
include vocabularies that the ranks do not divide, logits scaled by 1000, smoothing, z-loss, and targets that do not
count."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from rooftop.parallel import (
    copy_to_ranks,
    vocab_losses,
    vocab_parallel_cross_entropy,
    vocab_parallel_linear_cross_entropy,
)
from rooftop.testing import assert_as_accurate

Run = Callable[..., list[Any]]
VOCABULARIES = (17, 127, 31123)
ROWS, FEATURES = 13, 6
OPTIONS: list[dict[str, Any]] = [
    {},
    {"reduction": "sum", "label_smoothing": 0.1},
    {"reduction": "none", "z_loss": 0.01},
    {"label_smoothing": 1.0, "z_loss": 0.1, "ignore_index": 3},
]


def problem(vocabulary: int, scale: float, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """(logits (ROWS, V), target (ROWS,)). The target includes the first and the last class, -100 and 3."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (torch.randn(ROWS, vocabulary, generator=generator, dtype=torch.float64) * scale).to(dtype)
    target = torch.randint(vocabulary, (ROWS,), generator=generator)
    target[:5] = torch.tensor([0, vocabulary - 1, -100, 3, 3])
    return logits, target


def of_torch(logits: Tensor, target: Tensor, z_loss: float = 0.0, reduction: str = "mean", **options: Any) -> Tensor:
    ignored = options.get("ignore_index", -100)
    target = target.where((target >= 0) | (target == ignored), 0)  # -100 is not a class if it is not ignored
    losses = functional.cross_entropy(logits, target, reduction="none", **options)
    counted = target != ignored
    losses = losses + torch.where(counted, z_loss * logits.logsumexp(-1).square(), 0.0)
    return losses if reduction == "none" else losses.sum() / (counted.sum() if reduction == "mean" else 1)


def targets_for(target: Tensor, options: dict[str, Any]) -> Tensor:
    return target.where((target >= 0) | (options.get("ignore_index", -100) == -100), 0)


def own_columns(whole: Tensor, padding: float) -> tuple[Tensor, int]:
    """This rank's columns of (..., V), padded to the same number on each rank, and how many of them are classes."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    columns = -(-whole.shape[-1] // ranks)
    padded = functional.pad(whole, (0, columns * ranks - whole.shape[-1]), value=padding)
    part = padded[..., rank * columns : (rank + 1) * columns]
    return part.contiguous(), max(0, min(columns, whole.shape[-1] - rank * columns))


def apart(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference; relative to the largest number if that is above 1."""
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max()) / max(1.0, float(theirs.abs().max()))


def compared(vocabularies: tuple[int, ...], scales: tuple[float, ...]) -> dict[str, float]:
    """Differences of losses and gradients from PyTorch's."""
    found = {}
    for vocabulary, scale, options in ((v, s, o) for v in vocabularies for s in scales for o in OPTIONS):
        logits, target = problem(vocabulary, scale)
        target = targets_for(target, options)
        whole = logits.clone().requires_grad_()
        expected = of_torch(whole, target, **options)
        factor = torch.linspace(1, 2, ROWS, dtype=torch.float64) if expected.dim() else torch.tensor(3.0).double()
        expected.backward(factor)
        assert whole.grad is not None
        part, classes = own_columns(logits, 1e6)  # padding that would be the largest logit
        part.requires_grad_()
        loss = vocab_parallel_cross_entropy(part, target, dist.group.WORLD, vocabulary=vocabulary, **options)
        loss.backward(factor)
        assert part.grad is not None
        wanted, _ = own_columns(whole.grad, 0.0)
        name = f"{vocabulary} {scale} {options}"
        found[f"{name} loss"] = apart(loss.detach(), expected.detach())
        found[f"{name} gradient"] = apart(part.grad, wanted)
        assert not part.grad[:, classes:].any()
    return found


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_it_is_that_of_torch(ranks: int, on_ranks: Run) -> None:
    vocabularies = VOCABULARIES if ranks == 4 else VOCABULARIES[:2]
    for found in on_ranks(ranks, compared, vocabularies, (1.0, 1000.0)):
        for what, difference in found.items():
            assert difference < 1e-12, what


def with_columns_of_minus_infinity() -> dict[str, float]:
    """Like `compared`, but all of one rank's logits of a row are -inf, as for classes that are ruled out."""
    logits, _ = problem(16, 3.0)
    target = torch.arange(ROWS) % 8  # rows of the first half
    logits[3:9, 8:] = -torch.inf
    whole, (part, _) = logits.clone().requires_grad_(), own_columns(logits, 0.0)
    of_torch(whole, target).backward()
    assert whole.grad is not None
    part.requires_grad_()
    loss = vocab_parallel_cross_entropy(part, target, dist.group.WORLD)
    loss.backward()
    assert part.grad is not None
    wanted = of_torch(logits, target)
    return {"loss": apart(loss.detach(), wanted), "gradient": apart(part.grad, own_columns(whole.grad, 0.0)[0])}


def test_classes_may_be_ruled_out_on_a_whole_rank(on_ranks: Run) -> None:
    for found in on_ranks(2, with_columns_of_minus_infinity):
        for what, difference in found.items():
            assert difference < 1e-12, what


def without_targets() -> list[float]:
    """Losses and largest gradients if no target counts."""
    found = []
    for dtype in (torch.float64, torch.float32, torch.float16):
        logits, target = problem(16, 1.0, dtype)
        ignored = torch.full_like(target, -100)
        part = own_columns(logits, 0.0)[0].requires_grad_()
        loss = vocab_parallel_cross_entropy(part, ignored, dist.group.WORLD)
        loss.backward()
        hidden, weight = (torch.randn(n, 8).to(dtype).requires_grad_() for n in (ROWS, 8))
        other = vocab_parallel_linear_cross_entropy(hidden, weight, ignored, dist.group.WORLD)
        other.backward()
        gradients = [each.grad.abs().max() for each in (part, hidden, weight) if each.grad is not None]
        found += [float(each) for each in (loss, other, *gradients)]
    return found


def test_where_no_target_counts_the_loss_and_its_gradients_are_zero(on_ranks: Run) -> None:
    assert on_ranks(2, without_targets) == [[0.0] * 15] * 2


@contextmanager
def largest() -> Iterator[list[int]]:
    """Yields a list with the number of elements of the largest tensor that an operator has created."""
    seen = [0]

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for each in out if isinstance(out, tuple | list) else (out,):
                seen[0] = max(seen[0], each.numel() if isinstance(each, Tensor) else 0)
            return out

    with Watching():
        yield seen


def memory() -> dict[str, int]:
    """The largest tensors, forward and backward, of the loss and of the loss with the head; and all logits."""
    group, vocabulary, rows = dist.group.WORLD, 1000, 64
    logits, _ = own_columns(torch.randn(rows, vocabulary), 0.0)
    target = torch.randint(vocabulary, (rows,), generator=torch.Generator().manual_seed(0))
    logits.requires_grad_()
    with largest() as plain:
        vocab_parallel_cross_entropy(logits, target, group, vocabulary=vocabulary, label_smoothing=0.1).backward()
    hidden, weight = torch.randn(rows, 8, requires_grad=True), torch.randn(250, 8, requires_grad=True)
    with largest() as with_head:
        vocab_parallel_linear_cross_entropy(hidden, weight, target, group, chunk_size=16).backward()
    return {"own": logits.numel(), "plain": plain[0], "with head": with_head[0], "chunk": 16 * 250}


def test_the_logits_are_never_gathered(on_ranks: Run) -> None:
    for sizes in on_ranks(4, memory):
        assert sizes["plain"] == sizes["own"] == 64 * 1000 // 4
        assert sizes["with head"] == sizes["chunk"]


def in_chunks() -> bool:
    """Whether chunks of rows give the same results as all rows at once."""
    logits, target = problem(127, 3.0)
    part, _ = own_columns(logits, 0.0)
    found = []
    for elements in (vocab_losses.CHUNK_ELEMENTS, 300):
        vocab_losses.CHUNK_ELEMENTS, before = elements, vocab_losses.CHUNK_ELEMENTS
        leaf = part.clone().requires_grad_()
        loss = vocab_parallel_cross_entropy(leaf, target, dist.group.WORLD, vocabulary=127, label_smoothing=0.1)
        loss.backward()
        vocab_losses.CHUNK_ELEMENTS = before
        found.append((loss.detach(), leaf.grad))
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))  # type: ignore[arg-type]


def test_rows_come_in_chunks(on_ranks: Run) -> None:
    assert all(on_ranks(2, in_chunks))


def with_head(vocabularies: tuple[int, ...]) -> dict[str, float]:
    """Differences of the loss with the head from PyTorch's."""
    group, found = dist.group.WORLD, {}
    for vocabulary, options in ((v, o) for v in vocabularies for o in OPTIONS if o.get("reduction") != "none"):
        generator = torch.Generator().manual_seed(vocabulary)
        hidden, weight = (torch.randn(n, FEATURES, generator=generator).double() for n in (ROWS, vocabulary))
        target = targets_for(problem(vocabulary, 1.0)[1], options)
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        expected = of_torch(leaves[0] @ leaves[1].t() * 10, target, **options)
        (3 * expected).backward()
        part = own_columns(weight.t(), 1e3)[0].t().contiguous().requires_grad_()
        mine = hidden.clone().requires_grad_()
        for chunk in (None, 4):
            mine.grad = part.grad = None
            loss = vocab_parallel_linear_cross_entropy(
                copy_to_ranks(mine, group) * 10, part, target, group, vocabulary=vocabulary, chunk_size=chunk, **options
            )
            (3 * loss).backward()
            wanted = own_columns(leaves[1].grad.t(), 0.0)[0].t()
            name = f"{vocabulary} {options} {chunk}"
            found[f"{name} loss"] = apart(loss.detach(), expected.detach())
            found[f"{name} hidden"] = apart(mine.grad, leaves[0].grad)
            found[f"{name} weight"] = apart(part.grad, wanted)
    return found


def test_with_the_head_it_is_that_of_torch(on_ranks: Run) -> None:
    for found in on_ranks(4, with_head, VOCABULARIES):
        for what, difference in found.items():
            assert difference < 1e-12, what


def half(scale: float) -> list[tuple[Tensor, Tensor]]:
    """Results in bfloat16: (losses, gradient of this rank's columns)."""
    logits, target = problem(127, scale, torch.bfloat16)
    leaf = own_columns(logits, 0.0)[0].requires_grad_()
    loss = vocab_parallel_cross_entropy(leaf, target, dist.group.WORLD, vocabulary=127, reduction="none")
    loss.float().sum().backward()
    assert leaf.grad is not None
    return [(loss.detach(), leaf.grad)]


@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_bfloat16_is_as_accurate_as_torch(scale: float, on_ranks: Run) -> None:
    logits, target = problem(127, scale, torch.bfloat16)
    losses, gradients = [], []
    for dtype in (torch.bfloat16, torch.float64):
        leaf = logits.clone().to(dtype).requires_grad_()
        losses.append(functional.cross_entropy(leaf, target, reduction="none"))
        losses[-1].sum().backward()
        gradients.append(leaf.grad)
    of_ranks = [each for rank in on_ranks(4, half, scale) for each in rank]
    for loss, _ in of_ranks:
        assert_as_accurate(loss, losses[0].detach(), losses[1].detach(), what="loss")
    whole = torch.cat([gradient for _, gradient in of_ranks], 1)[:, :127]
    assert_as_accurate(whole, gradients[0], gradients[1], what="gradient")


def in_float16() -> float:
    """The relative error of a weight's gradient under a loss scale, with so many rows that a mean would underflow."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 4, generator=generator).half() for n in (1 << 15, 16))
    target = torch.randint(16, (1 << 15,), generator=generator)
    part = own_columns(weight.t(), 0.0)[0].t().contiguous().requires_grad_()
    (vocab_parallel_linear_cross_entropy(hidden, part, target, dist.group.WORLD).float() * 2.0**15).backward()
    exact = weight.double().requires_grad_()
    (functional.cross_entropy(hidden.double() @ exact.t(), target) * 2.0**15).backward()
    wanted = own_columns(exact.grad.t(), 0.0)[0].t()
    return float((part.grad - wanted).norm() / wanted.norm())


def test_float16_waits_for_the_loss_scale(on_ranks: Run) -> None:
    assert max(on_ranks(2, in_float16)) < 2e-3


def test_alone_it_is_the_kernel_s() -> None:
    logits, target = problem(17, 3.0)
    padded = functional.pad(logits, (0, 3), value=1e6)
    for options in OPTIONS:
        aim = targets_for(target, options)
        expected = of_torch(logits, aim, **options)
        torch.testing.assert_close(vocab_parallel_cross_entropy(padded, aim, None, vocabulary=17, **options), expected)
    hidden, weight = torch.randn(2, 13, 4), torch.randn(17, 4)
    aim = target.expand(2, 13)
    loss = vocab_parallel_linear_cross_entropy(hidden, weight, aim, None)
    torch.testing.assert_close(loss, functional.cross_entropy((hidden @ weight.t()).flatten(0, 1), aim.flatten()))


def refusals() -> list[str]:
    group, zeros, target = dist.group.WORLD, torch.zeros(4, 8), torch.zeros(4, dtype=torch.int64)
    calls: list[tuple[type[Exception], Callable[[], object]]] = [
        (ValueError, lambda: vocab_parallel_cross_entropy(zeros, target + 15, group, vocabulary=15)),
        (ValueError, lambda: vocab_parallel_cross_entropy(zeros, target, group, vocabulary=17)),
        (ValueError, lambda: vocab_parallel_cross_entropy(zeros, target[:3], group)),
        (ValueError, lambda: vocab_parallel_cross_entropy(zeros[0, 0], target[0], group)),
        (TypeError, lambda: vocab_parallel_cross_entropy(zeros, target.int(), group)),
        (ValueError, lambda: vocab_parallel_cross_entropy(zeros, target, group, label_smoothing=2.0)),
        (ValueError, lambda: vocab_parallel_linear_cross_entropy(zeros, zeros, target, group, reduction="none")),
        (ValueError, lambda: vocab_parallel_linear_cross_entropy(zeros, zeros.t(), target, group)),
        (ValueError, lambda: vocab_parallel_linear_cross_entropy(zeros, zeros[0], target, group)),
        (ValueError, lambda: vocab_parallel_linear_cross_entropy(zeros, zeros, target, group, chunk_size=-1)),
        (ValueError, lambda: vocab_parallel_linear_cross_entropy(zeros, zeros, target, group, chunk_size=0)),
        (TypeError, lambda: vocab_parallel_linear_cross_entropy(zeros, zeros.double(), target, group)),
    ]
    said = []
    for kind, call in calls:
        with pytest.raises(kind) as error:
            call()
        said.append(str(error.value))
    return said


def test_what_is_refused_is_so_on_every_rank(on_ranks: Run) -> None:
    first, second = on_ranks(2, refusals, limit_s=150.0)
    assert first == second
    expected = [
        "target 15 at index 0 is not a class: expected 0 to 14",
        "a vocabulary of 17 over 2 ranks needs 9 columns on each rank, got 8",
        "expected target of shape (4,)",
        "expected logits (..., columns), got a scalar",
        "target must be class indices of int64",
        "label_smoothing must be from 0 to 1, got 2.0",
        "reduction must be 'mean' or 'sum', got 'none'",
        "expected hidden (..., H), weight (columns, H)",
        "expected hidden (..., H), weight (columns, H)",
        "chunk_size must be a positive int or None, got -1",
        "chunk_size must be a positive int or None, got 0",
        "hidden is torch.float32, weight torch.float64",
    ]
    for said, part in zip(first, expected, strict=True):
        assert part in said
