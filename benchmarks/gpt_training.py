"""GPT-2 (124 M) trained on one GPU: the steps of `rooftop train gpt` compared with the same recipe in PyTorch,
compiled.

    python benchmarks/gpt_training.py [--out benchmarks/results/h100/gpt_training.json] [--micro-batch 16 32 64]

Both sides use sequences of 1,024 tokens, bfloat16, AdamW with float32 weights and moments, gradients clipped to norm 1,
tied weights, and the loss of all positions. PyTorch's side is written as nanoGPT's readers would write it
today: autocast, `scaled_dot_product_attention`, fused AdamW, tokens already on the device, a vocabulary padded to
50,304 so that its matrix products are aligned. It runs eagerly, compiled, and (`--autotune`) compiled with
max-autotune. Ours reads its tokens from a file and has a vocabulary of 50,257. It runs with separate launches, and
replayed from a CUDA graph. The first losses of the two sides must agree within 1%, or the run fails. Both losses are
near the logarithm of the vocabulary.

    tokens_per_s       median of rounds in which all variants take turns; spread: from the slowest to the fastest round
    percent_of_roof    percent of the fused roof of a step (`rooftop.train.gpt.speeds`), which is the same for all
                       variants
    mfu                the rate of the model's flops over that of the fastest matrix product in the same run
    first_s            seconds until the end of the third step, including compilation; less with warm caches
    peak_gib           peak memory of tensors

`--trials` adds replayed steps of Rooftop with one change each:

    chunk N      the loss computes N rows of logits at a time, and reads and writes the float32 gradient of the head's
                 weight once for each chunk
    split        the gradient of a weight is the sum of 2 to 4 products over parts of the tokens, if the tiles of one
                 product would leave multiprocessors idle
    flash        FlashAttention-2 instead of cuDNN's attention

`--quick` tests the script on a CPU, with a tiny model.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from programs import Results
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from rooftop.hardware import Ceilings, measure_ceilings
from rooftop.kernels.losses import linear_losses
from rooftop.kernels.matmuls import matmuls
from rooftop.models import GptConfig, gpt_config
from rooftop.parallel import Layout
from rooftop.train import GptTrainer, GptTraining, StepRoof, Tokens, step_roof

ROUNDS, STEPS = 5, 20
LEARNING_RATE, CLIP, DECAY = 6e-4, 1.0, 0.1
PADDED = 50304
QUICK = GptConfig(vocabulary=97, layers=2, width=32, heads=2, kv_heads=2, hidden=128, positions=32)

TILE = (128, 256)  # the tile of cuBLAS's matrix product on Hopper
MOST_PARTS, BUSY = 4, 0.9  # at most 4 parts of the tokens; a mean share of 0.9 busy multiprocessors is enough

Step = Callable[[], Tensor]
"""Makes a training step, and returns its loss, () on the device."""


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.next_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Run the block on x (B, S, W). The result has the same shape."""
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        down: Tensor = self.down(gelu(self.up(self.next_norm(x)), approximate="tanh"))
        return x + down


class Gpt2(nn.Module):
    """GPT-2 as a reader of its paper would write it, with a padded vocabulary."""

    def __init__(self, config: GptConfig, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = (
            nn.Embedding(vocabulary, config.width),
            nn.Embedding(config.positions, config.width),
        )
        self.blocks = nn.ModuleList(Block(config.width, config.heads) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                deep = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * config.layers) if deep else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss, (), of tokens and targets (B, S)."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.norm(x) @ self.tokens.weight.t()
        return cross_entropy(logits.flatten(0, 1), targets.flatten())


def plain(config: GptConfig, batch: int, device: torch.device, mode: str | None) -> Step:
    """A training step in PyTorch. `mode` is torch.compile's mode; None: not compiled."""
    torch.manual_seed(0)
    model: Any = Gpt2(config, PADDED if config.vocabulary == 50257 else config.vocabulary).to(device)
    decayed = [each for each in model.parameters() if each.dim() > 1]
    rest = [each for each in model.parameters() if each.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": DECAY}, {"params": rest, "weight_decay": 0.0}],
        lr=LEARNING_RATE,
        betas=(0.9, 0.95),
        fused=True,
    )
    parameters = list(model.parameters())
    if mode is not None:
        model = torch.compile(model, mode=None if mode == "default" else mode)
    text = torch.randint(config.vocabulary, (batch, config.positions + 1), device=device)
    tokens, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def step() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            loss: Tensor = model(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach().clone()

    return step


def trainer_of(config: GptConfig, batch: int, device: torch.device, *, replayed: bool) -> GptTrainer:
    """A trainer that reads random tokens."""
    training = GptTraining(
        config=config,
        length=config.positions,
        global_batch=batch,
        micro_batch=batch,
        learning_rate=LEARNING_RATE,
        weight_decay=DECAY,
        clip=CLIP,
        dtype=torch.bfloat16,
        cuda_graph=replayed,
    )
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(config.vocabulary, (8 * batch * config.positions + 1,), generator=generator)
    layout = Layout()
    return GptTrainer(training, Tokens([text.numpy()], "random tokens"), layout, layout.process_groups(), device)


# ---- trials ------------------------------------------------------------------------------------------------------


@contextmanager
def chunked(rows: int) -> Iterator[None]:
    """Make the loss compute this many rows of logits at a time."""
    usual = linear_losses.LEAST_CHUNK_ROWS, linear_losses.MOST_CHUNK_ROWS
    linear_losses.LEAST_CHUNK_ROWS = linear_losses.MOST_CHUNK_ROWS = rows
    try:
        yield
    finally:
        linear_losses.LEAST_CHUNK_ROWS, linear_losses.MOST_CHUNK_ROWS = usual


def parts_for(rows: int, columns: int, processors: int) -> int:
    """The smallest number of parts whose tiles keep the multiprocessors busy; if none does, the number that comes
    closest."""
    tiles = math.ceil(rows / TILE[0]) * math.ceil(columns / TILE[1])
    shares = {n: n * tiles / processors / math.ceil(n * tiles / processors) for n in range(1, MOST_PARTS + 1)}
    return next((n for n, share in shares.items() if share >= BUSY), max(shares, key=shares.__getitem__))


@contextmanager
def split_gradients() -> Iterator[None]:
    """Compute gradients of weights as sums over parts of the tokens, if one product has too few tiles."""
    usual = matmuls._products

    def products(dz: Tensor, x: Tensor | None, weight: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        processors = torch.cuda.get_device_properties(dz.device).multi_processor_count if dz.is_cuda else 132
        parts = 1 if x is None else parts_for(dz.shape[1], x.shape[1], processors)
        if x is None or parts == 1 or len(dz) % parts:
            return usual(dz, x, weight)
        left, right = (each.unflatten(0, (parts, -1)) for each in (dz, x))
        dweight = torch.bmm(left.mT, right).sum(0)  # (N, K)
        return usual(dz, None, weight)[0], dweight

    matmuls._products = products
    try:
        yield
    finally:
        matmuls._products = usual


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Run attention by FlashAttention-2 instead of cuDNN."""
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


TRIALS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    **{f"chunk {rows}": lambda rows=rows: chunked(rows) for rows in (2048, 8192, 16384)},
    "split": split_gradients,
    "flash": without_cudnn,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--micro-batch", type=int, nargs="+", default=[32])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument(
        "--autotune", action="store_true", help="also run PyTorch compiled with max-autotune, which takes minutes"
    )
    parser.add_argument(
        "--trials", nargs="+", choices=TRIALS, default=[], help="also run Rooftop's steps with one change each"
    )
    parser.add_argument(
        "--no-peers", action="store_true", help="run only Rooftop's variants; each replayed step needs 10 GiB"
    )
    parser.add_argument("--quick", action="store_true", help="test the script on a CPU")
    options = parser.parse_args()
    device = torch.device("cpu" if options.quick else "cuda")
    config = QUICK if options.quick else replace(gpt_config("gpt2"), dropout=0.0)
    if options.quick:
        options.micro_batch, options.rounds = [2], 1
    ceilings = measure_ceilings(device)
    results = Results(options.out or Path("benchmarks/results/gpt_training.json"), ceilings)
    wrong = False
    for batch in options.micro_batch:
        peers: dict[str, str | None] = (
            {"PyTorch": None} if options.quick else {"PyTorch": None, "PyTorch, compiled": "default"}
        )
        if options.no_peers:
            peers = {}
        elif options.autotune:
            peers["PyTorch, compiled, max-autotune"] = "max-autotune-no-cudagraphs"
        count = 1 if options.quick else STEPS
        wrong |= not compared(config, batch, device, ceilings, results, peers, options.trials, options.rounds, count)
    return int(wrong)


def compared(
    config: GptConfig,
    batch: int,
    device: torch.device,
    ceilings: Ceilings,
    results: Results,
    peers: Mapping[str, str | None],
    trials: Sequence[str],
    rounds: int,
    count: int,
) -> bool:
    """Add a row for each variant, and return whether their first losses agree.

    Args:
        peers: how each peer is compiled (see `plain`).
        trials: names of `TRIALS`.
    """
    trainers = {"rooftop": trainer_of(config, batch, device, replayed=False)}
    if device.type == "cuda":
        trainers["rooftop, replayed"] = trainer_of(config, batch, device, replayed=True)
    roof = step_roof(trainers["rooftop"], ceilings)
    changes = {f"rooftop, {name}": TRIALS[name]() for name in trials}
    for name in changes:
        trainers[name] = trainer_of(config, batch, device, replayed=device.type == "cuda")
    made: dict[str, Callable[[], Step]] = {
        name: lambda trainer=trainer: lambda: trainer.advance()[0] for name, trainer in trainers.items()
    } | {name: lambda mode=mode: plain(config, batch, device, mode) for name, mode in peers.items()}
    steps, first, losses, peaks = dict[str, Step](), dict[str, float](), dict[str, float](), dict[str, float]()
    for name, make in made.items():
        gc.collect()
        before = memory(device, reset=True)
        began = time.perf_counter()
        with changes.get(name, nullcontext()):
            steps[name] = make()
            losses[name] = steps[name]().item()
            for _ in range(3):  # the fourth step captures the graph
                last = steps[name]()
            last.item()
        first[name], peaks[name] = time.perf_counter() - began, memory(device) - before
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(timed(step, count))
    tokens = batch * config.positions
    for name, seconds in times.items():
        rates = [tokens / each for each in seconds]
        ms = 1e3 * statistics.median(seconds)
        results.add(row(name, batch, statistics.median(rates), rates, ms, roof, first[name], peaks[name], losses[name]))
    return max(losses.values()) < 1.01 * min(losses.values())


def row(
    name: str,
    batch: int,
    rate: float,
    rates: list[float],
    ms: float,
    roof: StepRoof,
    first_s: float,
    peak: float,
    loss: float,
) -> dict[str, Any]:
    return {
        "variant": name,
        "micro_batch": batch,
        "tokens_per_s": rate,
        "spread": max(rates) / min(rates),
        "ms": ms,
        "percent_of_roof": roof.percent(ms),
        "mfu": roof.mfu(ms),
        "first_s": first_s,
        "peak_gib": peak / 2**30,
        "first_loss": loss,
    }


def timed(step: Step, count: int) -> float:
    """Mean seconds per step over several steps in a row, until the last loss is available."""
    step().item()
    began = time.perf_counter()
    for _ in range(count):
        last = step()
    last.item()
    return (time.perf_counter() - began) / count


def memory(device: torch.device, *, reset: bool = False) -> float:
    """Peak bytes of tensors. With `reset`, restart the peak and return the bytes in use. 0 on a CPU."""
    if device.type != "cuda":
        return 0.0
    if reset:
        torch.cuda.reset_peak_memory_stats(device)
        return float(torch.cuda.memory_allocated(device))
    return float(torch.cuda.max_memory_allocated(device))


if __name__ == "__main__":
    raise SystemExit(main())
