"""Train a ResNet as reference scripts of image classification do. The learning rate warms up and decays, and only some
parameters have weight decay. The script uses label smoothing, mixup and averaged weights, and it evaluates and saves a
checkpoint after each epoch."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from loop_clock import LoopClock
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x))))))


def network(channels: int, blocks: int) -> nn.Sequential:
    stem = [nn.Conv2d(3, channels, 3, stride=2, padding=1), nn.BatchNorm2d(channels), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]
    return nn.Sequential(*stem, *[Block(channels) for _ in range(blocks)], *head)


def groups(model: nn.Module) -> list[dict]:
    """Two parameter groups, so that norms and biases have no weight decay."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 1e-4},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader, device: str) -> float:
    model.eval()
    right = sum(int((model(x.to(device)).argmax(1) == y.to(device)).sum()) for x, y in loader)
    model.train()
    return right / len(loader.dataset)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    device, large = options.device, options.device == "cuda"
    torch.manual_seed(2)
    count, side, batch = (4096, 64, 128) if large else (240, 16, 8)
    images, labels = torch.randn(count, 3, side, side), torch.randint(10, (count,))
    loader = DataLoader(TensorDataset(images, labels), batch_size=batch, shuffle=True, drop_last=True)
    held_out = DataLoader(TensorDataset(images[:256], labels[:256]), batch_size=64)
    model = network(128 if large else 16, 8 if large else 2).to(device)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    optimizer = torch.optim.SGD(groups(model), lr=0.1, momentum=0.9, nesterov=True)
    warm_up = LinearLR(optimizer, 0.1, total_iters=1)
    schedule = SequentialLR(optimizer, [warm_up, CosineAnnealingLR(optimizer, options.epochs)], [1])
    loss_of = nn.CrossEntropyLoss(label_smoothing=0.1)
    clock = LoopClock(device)
    with tempfile.TemporaryDirectory() as folder:
        for epoch in range(options.epochs):
            clock.go_on()
            for x, y in loader:
                x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
                share = float(torch.distributions.Beta(0.2, 0.2).sample())
                mixed = share * x + (1 - share) * x.flip(0)
                logits = model(mixed)
                loss = share * loss_of(logits, y) + (1 - share) * loss_of(logits, y.flip(0))
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                average.update_parameters(model)
                clock.step(loss)
            clock.pause()
            schedule.step()
            print(f"epoch {epoch}: {evaluate(model, held_out, device):.2f}, {evaluate(average, held_out, device):.2f}")
            torch.save({"model": model.state_dict(), "ema": average.state_dict()}, Path(folder) / f"{epoch}.pth")
    clock.finish()


if __name__ == "__main__":
    main()
