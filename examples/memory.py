"""The memory of a training step, ways to reduce it, and what fills a GPU that has run out of memory.

    python examples/memory.py [--depth 8] [--width 512] [--batch 2048]

Three figures are easily confused. *Allocated* is the memory that live tensors hold. *Reserved* is the memory that
PyTorch's allocator has taken from the GPU, in use or kept for later; other programs see this figure. *Peak* is the
largest amount allocated at any time, and decides whether a step fits. `track()` returns the peak of a block of code.

The same step runs in four ways. A forward pass for training keeps the values that the backward pass needs, so its peak
grows with depth. A forward pass without gradients frees each intermediate result at once. Checkpointing keeps only the
inputs of each block and recomputes the rest. Half the batch halves the activations, but not the memory of the
parameters.

All four ways run on the CPU. On a GPU the example then runs out of memory on purpose, within a limit that it sets, and
shows the modules and lines that hold the memory (`explained_memory`).
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rooftop.hardware import explained_memory, memory_summary, release, track

MIB = 1 << 20
LIMIT_BYTES = 512 * MIB  # limit that the example sets for itself on a GPU, in order to run out of memory


class Block(nn.Module):
    """x + W2 gelu(W1 norm(x)): keeps about ten values for each of its inputs, for the backward pass."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # (B, width)
        hidden: Tensor = nn.functional.gelu(self.up(self.norm(x)))  # (B, 4 * width)
        return x + self.down(hidden)


class Network(nn.Module):
    """Blocks, one after another; `checkpointed` keeps only the input of each."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.checkpointed = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


def train_step(network: Network, x: Tensor) -> None:
    network(x).square().mean().backward()
    network.zero_grad()


def show(name: str, network: Network, x: Tensor, training: bool = True) -> None:
    """Run one step, and print how far its peak rose above the memory allocated before."""
    with track(x.device) as memory:
        if training:
            train_step(network, x)
        else:
            with torch.no_grad():
                network(x)
    print(f"{name:36} {memory.peak_increase_bytes / MIB:10,.1f} MiB at most")


def run_out(network: Network, x: Tensor) -> None:
    """Train on larger and larger batches until the limit is reached, and print the explanation in the error."""
    release()
    limit = (torch.cuda.memory_allocated() + LIMIT_BYTES) / torch.cuda.get_device_properties(x.device).total_memory
    torch.cuda.set_per_process_memory_fraction(limit)
    try:
        with explained_memory(network, most=3):
            while True:
                train_step(network, x)
                x = torch.cat([x, x])
    except torch.OutOfMemoryError as error:
        print("\n" + "\n".join(error.__notes__))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=2048)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = Network(options.depth, options.width).to(device)
    x = torch.randn(options.batch, options.width, device=device)

    show("forward without gradients", network, x, training=False)
    show("training step", network, x)
    network.checkpointed = True
    show("training step, checkpointed", network, x)
    network.checkpointed = False
    show("training step, half the batch", network, x[: options.batch // 2])

    print("\ndevice    allocated   reserved       peak       free  of total (MiB; -: not counted)")
    for memory in memory_summary():
        figures = (memory.allocated_bytes, memory.reserved_bytes, memory.peak_bytes, memory.free_bytes)
        cells = " ".join("         -" if each is None else f"{each / MIB:10,.0f}" for each in figures)
        print(f"{memory.device:8} {cells} {memory.total_bytes / MIB:10,.0f}")
    if device.type == "cuda":
        run_out(network, x)
    else:
        print("\nThe explanation of an out-of-memory error needs an NVIDIA GPU: it reads the allocator's snapshot.")


if __name__ == "__main__":
    main()
