"""Checkpointing recomputes blocks with the same gradients, and is applied only if memory is the limit."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rooftop.rewrites import Candidate, Checkpointing, Times
from rooftop.rewrites.candidates import Memory


class Block(nn.Module):
    """Counts its forwards, and drops some values."""

    forwards = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        Block.forwards += 1
        return self.dropout(self.layer(x)).relu() * scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, scale=2.0)
        return x


def gradients(candidate: Candidate, x: Tensor) -> list[Tensor]:
    torch.manual_seed(3)
    loss = candidate.call(x).square().sum()
    return list(torch.autograd.grad(loss, list(candidate.model.parameters())))


def test_gradients_are_the_same_bits_from_blocks_computed_twice() -> None:
    model, x = Net().train(), torch.randn(16, 8)
    plain, changed = (Candidate.of(model, None, training=True) for _ in range(2))
    assert Checkpointing().apply(changed) == "3 Block"
    Block.forwards = 0
    expected = gradients(plain, x)
    assert Block.forwards == 3
    got = gradients(changed, x)
    assert Block.forwards == 3 + 6
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert "forward" not in vars(model.blocks[0]), "the original model must stay unchanged"


def test_it_is_for_steps_that_need_most_of_the_memory() -> None:
    little, much = (Times(1.0, (), memory=Memory(peak * 10**9, 80 * 10**9)) for peak in (30, 70))
    assert Checkpointing().absent(little) == "memory is not the limit: a step needs 30.0 of 80.0 GB"
    assert Checkpointing().absent(much) is None


def test_it_needs_a_gpu_whose_memory_is_measured() -> None:
    candidate = Candidate.of(Net().train(), None, training=True)
    assert "needs a GPU" in str(Checkpointing().refusal(candidate))
