"""A small GPT learns a text byte by byte, and then continues it: greedily, and by sampling.

    python examples/generate_text.py [--text FILE] [--steps 300] [--batch 16] [--prompt "import "] [--new 200]

Without --text the script reads the examples beside this one, so that the model writes something that looks like Python.
The network is trained for seconds on a GPU and for minutes on a CPU; the text it writes then looks right but makes no
sense.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from rooftop.models import Generation, Gpt, gpt_config
from rooftop.models.gpt import ByteTokenizer, Decoder, Sampling

LENGTH = 128  # bytes of a training sequence
CONFIG = replace(
    gpt_config("llama-1b"), vocabulary=256, layers=4, width=128, heads=4, kv_heads=2, hidden=352, positions=512
)


def train(model: Gpt, text: bytes, steps: int, batch: int) -> float:
    """Train and return the loss of the last step, in nats per byte."""
    device = next(model.parameters()).device
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device, torch.int64)
    length = min(LENGTH, len(data) - 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
    loss = torch.zeros(())
    for _ in range(steps):
        starts = torch.randint(len(data) - length, (batch,), device=device)
        tokens = data[starts[:, None] + torch.arange(length + 1, device=device)]  # (B, S + 1)
        loss = model(tokens[:, :-1], tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16, help="sequences per step")
    parser.add_argument("--prompt", default="import ")
    parser.add_argument("--new", type=int, default=200, help="number of bytes to generate")
    options = parser.parse_args()
    files = [options.text] if options.text else sorted(Path(__file__).parent.glob("*.py"))
    text = b"\n".join(path.read_bytes() for path in files)
    torch.manual_seed(0)
    model = Gpt(CONFIG, device="cuda" if torch.cuda.is_available() else "cpu")
    print(f"{len(text):,} bytes, {CONFIG.parameters:,} parameters")
    print(f"loss {train(model, text, options.steps, options.batch):.3f} nats a byte")
    model.eval()
    tokenizer = ByteTokenizer()
    prompt = tokenizer.encode(options.prompt)
    for name, sampling in {"most probable": Sampling(), "drawn": Sampling(temperature=0.8, top_p=0.95)}.items():
        generation, decoder = Generation(model, [prompt], options.new, sampling), Decoder(tokenizer, prompt)
        print(f"\n--- {name}\n{options.prompt}", end="")
        for _, token in generation:
            print(decoder.add(token), end="", flush=True)
        print(decoder.rest())
        if generation.steps:
            print(f"--- {len(generation.steps) / generation.decode_s:,.0f} bytes/s")


if __name__ == "__main__":
    main()
