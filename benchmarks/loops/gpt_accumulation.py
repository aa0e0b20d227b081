"""Train a small GPT on the standard library's source text, with gradient accumulation, autocast and GradScaler.

If GradScaler is enabled, its first scale overflows, so that it skips steps.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from loop_clock import LoopClock
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C)
        q, k, v = self.attend(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, H, T, D)
        x = x + self.project(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, tokens: int, length: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:  # (B, T)
        h = self.token(x) + self.place(torch.arange(x.shape[1], device=x.device))
        return F.cross_entropy(self.head(self.norm(self.blocks(h))).flatten(0, 1), targets.flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--eval-every", type=int, default=25)
    options = parser.parse_args()
    device, large = options.device, options.device == "cuda"
    torch.manual_seed(1337)
    text = "".join(pydoc_data.topics.topics.values())
    characters = sorted(set(text))
    data = torch.tensor([characters.index(c) for c in text[:100_000]])
    length, batch, accumulated = (1024, 8, 5) if large else (64, 4, 4)
    model = GPT(len(characters), length, *((768, 12, 12) if large else (96, 4, 3))).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=large)
    scaler = torch.amp.GradScaler(device, enabled=large, init_scale=2.0**60)
    context = torch.autocast("cuda", torch.float16) if large else nullcontext()

    def get_batch() -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(data) - length, (batch,))
        x = torch.stack([data[start : start + length] for start in starts])
        y = torch.stack([data[start + 1 : start + 1 + length] for start in starts])
        return x.to(device), y.to(device)

    @torch.no_grad()
    def estimate_loss() -> float:
        model.eval()
        losses = [model(*get_batch()).item() for _ in range(10)]
        model.train()
        return sum(losses) / len(losses)

    clock = LoopClock(device)
    x, y = get_batch()
    for step in range(options.steps):
        if step % options.eval_every == 0:
            clock.pause()
            print(f"step {step}: loss {estimate_loss():.4f}")
            clock.go_on()
        for _ in range(accumulated):
            with context:
                loss = model(x, y) / accumulated
            x, y = get_batch()  # loads the next batch while the GPU runs the forward pass
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        clock.step(loss)
    clock.finish()


if __name__ == "__main__":
    main()
