"""Train a small GPT-2 with random weights on random tokens by transformers' Trainer."""

from __future__ import annotations

import argparse
import os
import tempfile
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from loop_clock import LoopClock
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments


class Clocked(TrainerCallback):
    def __init__(self, clock: LoopClock) -> None:
        self.clock = clock

    def on_step_end(self, *given: Any, **named: Any) -> None:
        self.clock.step()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    large = options.device == "cuda"
    torch.manual_seed(3)
    length, width, layers = (512, 768, 12) if large else (32, 96, 2)
    config = GPT2Config(vocab_size=1000, n_positions=length, n_embd=width, n_layer=layers, n_head=4)
    tokens = torch.randint(1000, (256, length))
    clock = LoopClock(options.device)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=options.steps,
            per_device_train_batch_size=8,
            use_cpu=not large,
            report_to=[],
            save_strategy="no",
            logging_steps=10,
            disable_tqdm=True,
            seed=3,
        )
        trainer = Trainer(
            GPT2LMHeadModel(config),
            arguments,
            train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
            callbacks=[Clocked(clock)],
        )
        trainer.train()
    clock.losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    clock.finish()


if __name__ == "__main__":
    main()
