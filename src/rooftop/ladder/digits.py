"""Train a network on the handwritten digits of scikit-learn (1,797 images of 8 x 8): once in PyTorch, and once in each
tool with only the ladder's kernels. The network has two layers:

    h = sigmoid(x W1^T + b1)         y = sigmoid(h W2^T + b2)

The loss is the cross entropy, summed over the ten sigmoids and averaged over the batch. The gradient before the last
sigmoid is y - one_hot(target), divided by the batch size. The other gradients are matrix products:

    dz2 = (y - one_hot) / batch      dz1 = (dz2 W2) * h (1 - h)
    W2 -= rate * dz2^T h             W1 -= rate * dz1^T x           b -= rate * sum of dz over the batch
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

PLAIN, SIGMOID, GRADIENT, STEP = range(4)
"""The operation that the kernel applies to a product before it stores the result, numbered as in layer.cu."""

HIDDEN, BATCH, RATE = 32, 64, 1.0
EPOCHS, FEW_EPOCHS = 20, 3  # epochs on a GPU, and epochs where kernels are interpreted
TRAINING = 1437  # number of images for training; accuracy is measured on the remaining 360


class Operations(Protocol):
    """The operations of a training step of the digits network, implemented in one tool. Each operation writes its
    result into a tensor that the caller passes.
    """

    def product(
        self, a: Tensor, b: Tensor, c: Tensor, epilogue: int, extra: Tensor | None = None, rate: float = 0.0
    ) -> None:
        """Compute c (M, N) from the product of a (M, K) and b (K, N), which may be transposed views."""

    def output_gradient(self, y: Tensor, target: Tensor, dz: Tensor) -> None:
        """Compute dz = (y - one_hot(target)) / M, where y and dz are (M, N), and target is (M,) int64."""

    def bias_step(self, dz: Tensor, bias: Tensor, rate: float) -> None:
        """Subtract rate times the sum of dz (M, N) over M from bias (N,)."""


@dataclass(frozen=True)
class Parameters:
    """The network's parameters: w1 (HIDDEN, 64), b1 (HIDDEN,), w2 (10, HIDDEN), b2 (10,)."""

    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor


def initial(device: torch.device, seed: int = 0) -> Parameters:
    """The initial parameters, which are the same in every run."""
    random = torch.Generator().manual_seed(seed)
    shapes = ((HIDDEN, 64), (HIDDEN,), (10, HIDDEN), (10,))
    values = [torch.randn(shape, generator=random) / shape[-1] ** 0.5 for shape in shapes]
    return Parameters(*(value.to(device) for value in values))


def step(operations: Operations, parameters: Parameters, x: Tensor, target: Tensor, rate: float) -> None:
    """One step of gradient descent on images x (B, 64) of digits target (B,)."""
    p, batch = parameters, x.shape[0]
    h, dz1 = x.new_empty(batch, HIDDEN), x.new_empty(batch, HIDDEN)
    y, dz2 = x.new_empty(batch, 10), x.new_empty(batch, 10)
    operations.product(x, p.w1.t(), h, SIGMOID, p.b1)
    operations.product(h, p.w2.t(), y, SIGMOID, p.b2)
    operations.output_gradient(y, target, dz2)
    operations.product(dz2, p.w2, dz1, GRADIENT, h)  # the product must read w2 before the step changes it
    operations.product(dz2.t(), h, p.w2, STEP, rate=rate)
    operations.product(dz1.t(), x, p.w1, STEP, rate=rate)
    operations.bias_step(dz2, p.b2, rate)
    operations.bias_step(dz1, p.b1, rate)


def step_in_pytorch(parameters: Parameters, x: Tensor, target: Tensor, rate: float) -> None:
    """The step of gradient descent that `step` makes, computed with autograd."""
    tensors = [value.detach().requires_grad_() for value in vars(parameters).values()]
    w1, b1, w2, b2 = tensors
    z = torch.sigmoid(x @ w1.t() + b1) @ w2.t() + b2
    hot = torch.nn.functional.one_hot(target, 10).to(z.dtype)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(z, hot, reduction="sum") / x.shape[0]
    gradients = torch.autograd.grad(loss, tensors)
    with torch.no_grad():
        for tensor, gradient in zip(tensors, gradients, strict=True):
            tensor.sub_(gradient, alpha=rate)


def train(operations: Operations | None, x: Tensor, target: Tensor, epochs: int) -> Parameters:
    """Train for `epochs` epochs and return the parameters. Every call uses the same order of batches. If `operations`
    is None, PyTorch trains.
    """
    parameters = initial(x.device)
    random = torch.Generator().manual_seed(1)
    for _ in range(epochs):
        for chosen in torch.randperm(len(x), generator=random)[: len(x) // BATCH * BATCH].split(BATCH):
            batch, labels = x[chosen.to(x.device)], target[chosen.to(x.device)]
            if operations is None:
                step_in_pytorch(parameters, batch, labels, RATE)
            else:
                step(operations, parameters, batch, labels, RATE)
    return parameters


def accuracy(parameters: Parameters, x: Tensor, target: Tensor) -> float:
    """The share of images whose digit has the largest output."""
    p = parameters
    z = torch.sigmoid(x @ p.w1.t() + p.b1) @ p.w2.t() + p.b2
    return float((z.argmax(1) == target).double().mean())


def images(device: torch.device) -> tuple[Tensor, Tensor]:
    """All images (1797, 64), with values from -1 to 1, in a fixed random order, and their digits.

    Raises:
        ImportError: scikit-learn is not installed.
    """
    from sklearn.datasets import load_digits

    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(2))
    x = torch.from_numpy(found.data).float() / 8 - 1
    return x[order].to(device), torch.from_numpy(found.target).long()[order].to(device)


def train_and_compare(tools: Mapping[str, Operations], device: torch.device) -> Sequence[str]:
    """Train the network with each tool and with PyTorch. Return a sentence that compares the accuracies."""
    try:
        x, target = images(device)
    except ImportError:
        return ('The network on handwritten digits needs scikit-learn: pip install "rooftop[ladder]"',)
    shares, epochs = {}, EPOCHS if device.type == "cuda" else FEW_EPOCHS
    for name, operations in {**tools, "PyTorch": None}.items():
        parameters = train(operations, x[:TRAINING], target[:TRAINING], epochs)
        shares[name] = accuracy(parameters, x[TRAINING:], target[TRAINING:])
    said = ", ".join(f"{100 * share:.1f}% in {name}" for name, share in shares.items())
    tested = len(x) - TRAINING
    return (
        f"A network 64-{HIDDEN}-10 was trained with these kernels on {TRAINING:,} handwritten digits for "
        f"{epochs} epochs. Of {tested} other digits it recognizes {said}.",
    )
