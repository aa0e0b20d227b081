"""The peak of a block is the peak of its live tensors, even when blocks are nested."""

from __future__ import annotations

import pytest
import torch

from rooftop.hardware.memory import memory_summary, release, track

KB = 1024


def kilobytes(count: int) -> torch.Tensor:
    return torch.zeros(count * KB // 4)


def test_the_peak_counts_what_lives_at_the_same_time() -> None:
    x = kilobytes(100)  # existed before, so it does not count
    with track("cpu") as block:
        y = x + 1
        y = y.view(-1, 4).relu()  # the sum is freed afterwards
        y.mul_(2)
    assert (block.before_bytes, block.after_bytes) == (0, 100 * KB)
    assert block.peak_bytes == block.peak_increase_bytes == 200 * KB
    del y
    assert block.after_bytes == 100 * KB


def test_views_and_what_was_there_count_nothing() -> None:
    x = kilobytes(100)
    with track("cpu") as block:
        x.view(2, -1)[0].add_(1)
    assert block.peak_bytes == 0


def test_resized_and_copied_in_storages_count() -> None:
    with track("cpu") as block:
        out = torch.empty(0)
        out.resize_(1 << 10)
        given = torch.tensor([1.0, 2.0])
    assert block.after_bytes == 4 * KB + 8
    assert out.untyped_storage().nbytes() + given.untyped_storage().nbytes() == block.after_bytes


def test_saved_activations_live_until_the_backward_pass() -> None:
    weight = kilobytes(10).requires_grad_()
    with track("cpu") as block:
        loss = (weight.exp() * weight.exp()).sum()
        held = block.after_bytes
        loss.backward()
    assert held == 20 * KB + 4  # both exponentials (no Python object holds them), and the loss
    assert block.after_bytes == 10 * KB + 4  # the gradient, and the loss
    assert weight.grad is not None


def test_nested_blocks_on_the_cpu() -> None:
    with track("cpu") as outer:
        a = kilobytes(50)
        with track("cpu") as inner:
            kilobytes(30)
            b = kilobytes(20)
        del a
    assert (inner.peak_bytes, inner.after_bytes) == (30 * KB, 20 * KB)
    assert (outer.peak_bytes, outer.after_bytes) == (80 * KB, 20 * KB)
    del b


def test_an_error_leaves_the_figures() -> None:
    with pytest.raises(KeyError), track("cpu") as block:  # noqa: PT012 - the figures are of the block
        kilobytes(5)
        raise KeyError
    assert block.peak_bytes == 5 * KB


class Counter:
    """The allocator's counters of one GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.peak = 0
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: self.now)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.peak)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: self.reset())

    def reset(self) -> None:
        self.peak = self.now

    def allocate(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)


@pytest.mark.parametrize("early", [0, 900])
def test_an_inner_block_does_not_forget_the_peak_of_the_outer(early: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Counter(monkeypatch)
    gpu.allocate(10_000)
    gpu.allocate(-9_900)
    with track("cuda:0") as outer:
        gpu.allocate(early)
        gpu.allocate(-early)
        with track("cuda:0") as first:
            gpu.allocate(500)
            gpu.allocate(-500)
        with track("cuda:0") as second:
            gpu.allocate(7)
    assert (first.before_bytes, first.peak_bytes, first.after_bytes) == (100, 600, 100)
    assert (second.peak_bytes, second.peak_increase_bytes, second.after_bytes) == (107, 7, 107)
    assert outer.peak_bytes == 100 + max(early, 500)


@pytest.mark.parametrize("device", ["meta", f"cuda:{torch.cuda.device_count()}"])
def test_a_device_that_is_not_here_is_refused(device: str) -> None:
    with pytest.raises(ValueError, match=rf"track\({device}\): expected cpu or a GPU"), track(device):
        pass


def test_the_summary_ends_with_the_cpu() -> None:
    host = memory_summary()[-1]
    assert host.device == "cpu"
    assert host.free_bytes is not None
    assert 0 < host.free_bytes < host.total_bytes
    assert len(release()) == torch.cuda.device_count() == len(memory_summary()) - 1


@pytest.mark.gpu
def test_on_a_gpu_blocks_and_releases_are_those_of_the_allocator() -> None:
    torch.cuda.synchronize()
    size = (64 << 20) + -(-release()[0].fragmented_bytes >> 21 << 21)  # too large for any block that other tests left
    with track() as outer:
        torch.empty(2 * size, dtype=torch.uint8, device="cuda")
        with track("cuda") as inner:
            x = torch.empty(size, dtype=torch.uint8, device="cuda")
    assert (inner.peak_increase_bytes, outer.peak_increase_bytes) == (size, 2 * size)
    assert outer.after_bytes - outer.before_bytes == size
    summary = memory_summary()[0]
    assert summary.allocated_bytes == torch.cuda.memory_allocated()
    assert summary.limit_bytes is None
    held = release()[0]  # x lies in the block released before, so the other half of this block cannot be given back
    assert held.fragmented_bytes >= size
    assert held.allocated_bytes >= x.nbytes
    assert held.allocated_bytes + held.fragmented_bytes == torch.cuda.memory_reserved()
    del x
    assert release()[0].released_bytes >= 2 * size


def test_control_flow_is_tracked_and_works_afterwards() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.cond(x.sum() > 0, lambda y: y.repeat(100), lambda y: y.repeat(100) - 1, (x,))
        return found

    x = torch.ones(1000)
    with track("cpu") as tracked:
        result = program(x)
    assert tracked.after_bytes >= result.nbytes == 400_000
    assert program(x).shape == (100_000,)  # would fail if PyTorch had cached a failed compilation
