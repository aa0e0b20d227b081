"""Train a small GPT on Python's standard library, and compare it with a bigram model of the same text and split.

    python examples/gpt_against_bigram.py [steps]

A bigram model knows only the last byte. The model's probabilities are counts in the training part. The counts are mixed
with the frequencies of single bytes and with a uniform distribution, so that no byte of the validation part has
probability 0. The losses of both models are means over the same bytes of the validation part, in nats.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from rooftop.models import GptConfig
from rooftop.parallel import Layout, join
from rooftop.train import GptTrainer, GptTraining, Tokens, Validation, run_steps, split_tokens

BYTES, LENGTH = 256, 64
BIGRAM, UNIGRAM = 0.98, 0.0199  # weights of the mixture; the rest is the weight of the uniform distribution
STEPS = 450


def standard_library() -> Tokens:
    """The bytes of all modules at the top level of the standard library, by name."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return Tokens([np.fromfile(path, np.uint8) for path in paths], "the standard library", text=True)


def bigram_loss(train: NDArray[np.int64], valid: NDArray[np.int64]) -> float:
    """Mean cross entropy of sequences (N, LENGTH + 1) under the counts of the training bytes, in nats a byte."""
    pairs = np.bincount(train[:-1] * BYTES + train[1:], minlength=BYTES**2).reshape(BYTES, BYTES)
    before = pairs.sum(1, keepdims=True)
    single = pairs.sum(0) / pairs.sum()
    bigram = np.where(before > 0, pairs / np.maximum(before, 1), single)  # a byte that the training part lacks
    mixed = BIGRAM * bigram + UNIGRAM * single + (1 - BIGRAM - UNIGRAM) / BYTES
    return float(-np.log(mixed[valid[:, :-1], valid[:, 1:]]).mean())


def main(steps: int = STEPS) -> None:
    torch.set_num_threads(1)  # more threads would only wait for each other: the layers are small
    train, valid = split_tokens(standard_library(), (90, 10))
    config = GptConfig(vocabulary=BYTES, layers=2, width=64, heads=2, kv_heads=2, hidden=256, positions=LENGTH)
    training = GptTraining(
        config=config,
        length=LENGTH,
        global_batch=16,
        micro_batch=16,
        learning_rate=4e-3,
        warmup=steps // 4,
        decay="linear",
        decay_steps=steps + 1,
    )
    validation = Validation(valid, training, interval=max(1, steps // 3), iters=20)

    places = range(training.global_batch)
    seen = torch.cat([validation.batches.read(number, places) for number in range(20)])[: validation.sequences]
    bigram = bigram_loss(train.read(0, len(train)).numpy(), seen.numpy())
    gpt = float("inf")
    print(f"bigram: {bigram:.3f} nats a byte")

    layout = Layout()
    with join(layout, device="cpu") as world:
        trainer = GptTrainer(training, train, layout, layout.process_groups(), world.device)
        for reports in run_steps(trainer, steps, validation=validation):
            if reports[-1].valid_loss is not None:
                gpt = reports[-1].valid_loss
                print(f"GPT after {reports[-1].step} steps: {gpt:.3f} nats a byte")
    print(f"the GPT is {'better' if gpt < bigram else 'not better'} than the bigram model")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
