"""Train a CNN on images of digits, with a DataLoader, a test loop after each epoch, and a falling learning rate."""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from loop_clock import LoopClock
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout = nn.Dropout(0.25)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:  # (B, 1, 28, 28)
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        x = F.relu(self.fc1(self.dropout(x).flatten(1)))
        return F.log_softmax(self.fc2(x), dim=1)


def digits() -> tuple[Tensor, Tensor]:
    """Images (N, 1, 28, 28) of scikit-learn's digits, and their labels."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16
    return F.interpolate(images, size=(28, 28), mode="bilinear"), torch.tensor(found.target)


def train(
    model: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer, device: str, clock: LoopClock
) -> None:
    model.train()
    for index, (images, targets) in enumerate(loader):
        images, targets = images.to(device), targets.to(device)
        optimizer.zero_grad()
        loss = F.nll_loss(model(images), targets)
        loss.backward()
        optimizer.step()
        clock.step(loss)
        if index % 10 == 0:
            print(f"batch {index}: loss {loss.item():.6f}")


@torch.no_grad()
def test(model: nn.Module, loader: DataLoader, device: str) -> None:
    model.eval()
    correct = 0
    for images, targets in loader:
        correct += (model(images.to(device)).argmax(1) == targets.to(device)).sum().item()
    print(f"test: {correct} of {len(loader.dataset)} right")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    torch.manual_seed(1)
    images, targets = digits()
    copies = 16 if options.device == "cuda" else 1
    train_set = TensorDataset(images[:1280].repeat(copies, 1, 1, 1), targets[:1280].repeat(copies))
    train_loader = DataLoader(train_set, batch_size=64, shuffle=True)
    test_loader = DataLoader(TensorDataset(images[1280:], targets[1280:]), batch_size=256)
    model = Net().to(options.device)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    clock = LoopClock(options.device)
    for _ in range(options.epochs):
        clock.go_on()
        train(model, train_loader, optimizer, options.device, clock)
        clock.pause()
        test(model, test_loader, options.device)
        scheduler.step()
    clock.finish()


if __name__ == "__main__":
    main()
