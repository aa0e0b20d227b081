"""Predict the least time of a training step on another machine, and the batch size that it would need there.

    python examples/predict.py [--machine h200] [--layers 12] [--width 768] [--tokens 1024]

Nothing is run and nothing is allocated: the model is built on fake tensors, which have shapes but no data. Each
operator is assumed to take its roof time, at ceilings measured on the other machine. The result is a lower bound for
eager PyTorch, because real kernels are slower. The prediction still shows, before you buy or rent the machine, whether
launches (then a larger batch is free), memory or arithmetic bound the step. It also shows what bfloat16 changes.

`--machine` accepts the name of a machine that Rooftop knows, or a file that `rooftop ceilings -o FILE` wrote on the
other machine.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import rooftop
from rooftop.analysis import fake_tensors
from rooftop.errors import CeilingsFileError
from rooftop.hardware import ceilings_of, known_machines

VOCABULARY = 32_000


class LanguageModel(nn.Module):
    """Maps token numbers (B, T) to scores of the next token (B, T, vocabulary)."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, max(1, width // 64), 4 * width, 0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)  # (B, T, width)
        later = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=x.dtype)
        for layer in self.layers:
            x = layer(x, src_mask=later, is_causal=True)
        scores: Tensor = self.head(x)
        return scores


def loss(scores: Tensor) -> Tensor:
    """The target is the first token everywhere, because a prediction has no values, only shapes."""
    targets = torch.zeros(scores.shape[:-1], dtype=torch.int64).flatten()
    return nn.functional.cross_entropy(scores.flatten(0, -2), targets)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="h200", help=f"{', '.join(known_machines())}, or a ceilings file")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    options = parser.parse_args()
    try:
        ceilings = ceilings_of(options.machine)
    except (ValueError, CeilingsFileError) as error:
        raise SystemExit(f"error: {error}") from error

    with fake_tensors():
        model = LanguageModel(options.layers, options.width)
    parameters = sum(each.numel() for each in model.parameters())
    print(f"{parameters / 1e6:,.0f} M parameters, {options.tokens} tokens, AdamW, on {ceilings.device}, at best:")
    for batch in options.batches:
        for dtype in (torch.float32, torch.bfloat16):
            with fake_tensors():
                tokens = torch.zeros(batch, options.tokens, dtype=torch.int64)
            report = rooftop.predict(
                model, tokens, ceilings=ceilings, train=True, optimizer=torch.optim.AdamW, loss=loss, dtype=dtype
            )
            found = report.summary
            launch = max(0.0, report.gaps.launch_gap_ms) / found.wall_ms
            rate = batch * options.tokens / found.wall_ms * 1e3
            print(
                f"  batch {batch:4} {str(dtype).removeprefix('torch.'):9} {found.wall_ms:9,.2f} ms a step, "
                f"{rate:12,.0f} tokens/s, {launch:4.0%} of it waiting for launches"
            )


if __name__ == "__main__":
    main()
