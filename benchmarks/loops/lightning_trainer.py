"""Train with validation by Lightning's Trainer, which passes forward and backward to the optimizer as a closure."""

from __future__ import annotations

import argparse
import logging
import tempfile
import warnings
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from loop_clock import LoopClock
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    def __init__(self, width: int, clock: LoopClock) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
        )
        self.clock = clock

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        self.last = loss.detach()
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("validation", F.cross_entropy(self.net(batch[0]), batch[1]))

    def on_train_batch_end(self, *batch: Any) -> None:
        self.clock.step(self.last)

    def on_validation_start(self) -> None:
        self.clock.pause()

    def on_train_epoch_start(self) -> None:
        self.clock.go_on()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    from sklearn.datasets import load_digits

    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    lightning.seed_everything(7, verbose=False)
    found = load_digits(return_X_y=True)
    images, targets = torch.tensor(found[0], dtype=torch.float32) / 16, torch.tensor(found[1])
    large = options.device == "cuda"
    clock = LoopClock(options.device)
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_epochs=4,
            accelerator="gpu" if large else "cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(
            Classifier(4096 if large else 768, clock),
            DataLoader(TensorDataset(images[:1280], targets[:1280]), batch_size=64, shuffle=True),
            DataLoader(TensorDataset(images[1280:], targets[1280:]), batch_size=128),
        )
    clock.finish()


if __name__ == "__main__":
    main()
