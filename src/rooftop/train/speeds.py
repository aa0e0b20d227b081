"""How fast a training is beside what this machine can do: its flops, and the least time of a step.

Of a step each rank must at least: do its share of the flops; read its weights forward and backward and write their
gradients; and, in the optimizer, read weights, gradients and state and write weights and state. All that as if it were
one kernel is the fused roof. Micro-batches are one batch to it, activations stay on the chip, recomputation and
communication take nothing: a bound that no training can beat.
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
from rooftop.train.gpt_trainer import GptTrainer

STATES = 2  # of Adam: running means of the gradient and of its square


@dataclass(frozen=True)
class StepRoof:
    """What this machine could do at best in a step of a rank.

    Attributes:
        ms: the fused roof.
        flops: of the rank.
        peak: the fastest measured matrix rate in the dtype, flop/s.
    """

    ms: float
    flops: float
    peak: float

    def percent(self, ms: float) -> float:
        """Of roof, of a step that took so long."""
        return 100 * self.ms / ms

    def mfu(self, ms: float) -> float:
        """Model flops utilization: flops of the model, without recomputation, per second and peak; 0 to 1."""
        return self.flops / (ms / 1e3) / self.peak


def step_cost(trainer: GptTrainer) -> Cost:
    """Of one step of one rank."""
    training = trainer.training
    flops = training.config.flops_per_token(training.length) * training.tokens_per_step // trainer.layout.world_size
    model, main = list(trainer.model.parameters()), list(trainer.weights.named.values())
    held = sum(weight.numel() for weight in model) * training.dtype.itemsize  # of shared ones too all are computed with
    stepped = sum(local_of(weight).nbytes for weight in main)
    copied = held if trainer.narrow else 0  # what the model gets of the float32 weights
    read = 2 * held + stepped + stepped + STATES * stepped  # forward, backward; weights, gradients, state
    written = stepped + stepped + STATES * stepped + copied
    return Cost(read, written, {matrix_precision(torch.empty(0, dtype=training.dtype, device=trainer.device)): flops})


def step_roof(trainer: GptTrainer, ceilings: Ceilings) -> StepRoof:
    """Of one step of one rank, on a device with these ceilings.

    Raises:
        ValueError: the device's rate in this dtype was not measured.
    """
    cost = step_cost(trainer)
    ((precision, flops),) = cost.flops.items()
    return StepRoof(roof(cost, ceilings).ms, flops, ceilings.peak(precision))


def peak_bytes(device: torch.device) -> int:
    """The most memory so far: on a GPU of tensors, on a CPU of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024  # Linux counts in KiB
