"""Compare the speed of a training with the limits of this machine: its flops per second with the fastest measured rate,
and its time per step with the minimum time (roof).

In a step each rank must at least compute its share of the flops, read its weights in forward and backward, and write
their gradients. The rank's optimizer must read weights, gradients and state, and write weights and state. The fused
roof is the minimum time of all this work in one kernel. This kernel treats all micro-batches as one batch, keeps
activations on the chip, and neither recomputes nor communicates. So no step can be faster than the fused roof.
"""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass

import torch

from rooftop.cost import Cost, matrix_precision
from rooftop.cost.roofs import roof
from rooftop.hardware.ceilings import Ceilings
from rooftop.parallel.sharded_data import local_of
from rooftop.train.gpt.trainer import GptTrainer

STATES = 2  # tensors of Adam's state: running means of the gradient and of its square


@dataclass(frozen=True)
class StepRoof:
    """The limits of this machine for a step of a rank.

    Attributes:
        ms: the fused roof (see the top of this file), in milliseconds.
        flops: the rank's share of the model's flops in a step, without recomputation.
        peak: fastest measured rate of matrix products in the training's dtype, in flop/s.
    """

    ms: float
    flops: float
    peak: float

    def percent(self, ms: float) -> float:
        """The percentage of the roof that a step of this duration reaches."""
        return 100 * self.ms / ms

    def mfu(self, ms: float) -> float:
        """Model flops utilization (MFU), 0 to 1: the model's flops per second, without recomputation, over the peak."""
        return self.flops / (ms / 1e3) / self.peak


def step_cost(trainer: GptTrainer) -> Cost:
    """The minimum cost of one step of one rank: bytes of weights, gradients and optimizer state, and the rank's share
    of the model's flops. Activations, recomputation and communication do not count."""
    training = trainer.training
    flops = training.config.flops_per_token(training.length) * training.tokens_per_step // trainer.layout.world_size
    model, main = list(trainer.model.parameters()), list(trainer.weights.named.values())
    held = sum(weight.numel() for weight in model) * training.dtype.itemsize  # includes shared weights
    stepped = sum(local_of(weight).nbytes for weight in main)
    copied = held if trainer.narrow else 0  # bytes of the narrow weights, which the optimizer writes
    read = 2 * held + stepped + stepped + STATES * stepped  # forward, backward; optimizer: weights, gradients, state
    written = stepped + stepped + STATES * stepped + copied
    return Cost(read, written, {matrix_precision(torch.empty(0, dtype=training.dtype, device=trainer.device)): flops})


def step_roof(trainer: GptTrainer, ceilings: Ceilings) -> StepRoof:
    """The fused roof of one step of one rank, on a device with these ceilings.

    Raises:
        ValueError: the device's rate in the training's dtype was not measured.
    """
    cost = step_cost(trainer)
    ((precision, flops),) = cost.flops.items()
    return StepRoof(roof(cost, ceilings).ms, flops, ceilings.peak(precision))


def peak_bytes(device: torch.device) -> int:
    """Peak memory of this process so far: of its tensors on a GPU, or of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024  # Linux counts in KiB
