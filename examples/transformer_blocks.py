"""Three blocks of today's networks, once with torch.nn and once with Rooftop: the same state, the same results.

    python examples/transformer_blocks.py [--device cuda] [--width 768] [--seed 0]

The blocks are a GPT-2 block between its embedding and its loss, a Llama block (RMS norm, rotary embedding, SwiGLU) and
a Swin block (attention in shifted windows). Each pair of classes has the same parameters under the same names, so a
checkpoint of either class also loads into the other. On a GPU the script times the eager forward pass of both.
`benchmarks/kernels/blocks.py` times the blocks at sizes that fill a GPU, and from CUDA graphs. At the end
`rooftop.nn.replace` shows what it can replace by itself.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rooftop.nn
from rooftop.hardware import compare
from rooftop.kernels import attention, linear_cross_entropy, rope_pair, window_attention

# ---- GPT-2: tokens in, loss out ------------------------------------------------------------------------------------


class Gpt(nn.Module):
    """An embedding, one block, and the loss of the next token."""

    def __init__(self, width: int, heads: int, tokens: int) -> None:
        super().__init__()
        self.heads = heads
        self.wte = nn.Embedding(tokens, width)
        self.ln_1 = nn.LayerNorm(width)
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.ln_2 = nn.LayerNorm(width)
        self.c_fc = nn.Linear(width, 4 * width)
        self.c_out = nn.Linear(4 * width, width)
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, tokens, bias=False)

    def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
        """Return the loss, (), of tokens (B, S) and the tokens that follow them (B, S)."""
        x = self.wte(tokens)  # (B, S, W)
        query, key, value = heads_of(self.c_attn(self.ln_1(x)), self.heads)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)  # (B, H, S, D)
        x = x + self.c_proj(seen.transpose(1, 2).flatten(2))
        x = x + self.c_out(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))
        logits = self.lm_head(self.ln_f(x))  # (B, S, V)
        return F.cross_entropy(logits.flatten(0, 1), following.flatten())


class RooftopGpt(nn.Module):
    """`Gpt` with Rooftop's operators: matrix products include additions and activations, and the logits are never
    stored."""

    def __init__(self, width: int, heads: int, tokens: int) -> None:
        super().__init__()
        self.heads = heads
        self.wte = rooftop.nn.Embedding(tokens, width)
        self.ln_1 = rooftop.nn.LayerNorm(width)
        self.c_attn = rooftop.nn.LinearAct(width, 3 * width)
        self.c_proj = rooftop.nn.LinearAct(width, width)
        self.ln_2 = rooftop.nn.LayerNorm(width)
        self.c_fc = rooftop.nn.LinearAct(width, 4 * width, activation="gelu_tanh")
        self.c_out = rooftop.nn.LinearAct(4 * width, width)
        self.ln_f = rooftop.nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, tokens, bias=False)

    def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
        """Return the loss, (), of tokens (B, S) and the tokens that follow them (B, S)."""
        x = self.wte(tokens)  # (B, S, W)
        query, key, value = heads_of(self.c_attn(self.ln_1(x)), self.heads)
        seen = attention(query, key, value, is_causal=True)  # (B, H, S, D)
        x = self.c_proj(seen.transpose(1, 2).flatten(2), residual=x)
        x = self.c_out(self.c_fc(self.ln_2(x)), residual=x)
        return linear_cross_entropy(self.ln_f(x), self.lm_head.weight, following)


def heads_of(packed: Tensor, heads: int) -> tuple[Tensor, ...]:
    """Split packed (B, S, 3 W) into query, key and value, each a view (B, H, S, D)."""
    return packed.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


# ---- Llama ---------------------------------------------------------------------------------------------------------


class Llama(nn.Module):
    """A Llama block with torch.nn."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Run the block on x (B, S, W), with cos and sin (S, D / 2). The result has x's shape."""
        query, key, value = heads_of(self.qkv(self.norm_1(x)), self.heads)
        query, key = turned(query, cos, sin), turned(key, cos, sin)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        gate, up = self.up(self.norm_2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class RooftopLlama(nn.Module):
    """`Llama` with Rooftop's operators."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = rooftop.nn.RMSNorm(width, eps=1e-5), rooftop.nn.RMSNorm(width, eps=1e-5)
        self.qkv, self.out = (rooftop.nn.LinearAct(width, n * width, bias=False) for n in (3, 1))
        self.up = rooftop.nn.LinearAct(width, 4 * width, bias=False)
        self.down = rooftop.nn.LinearAct(2 * width, width, bias=False)
        self.act = rooftop.nn.SwiGLU()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Run the block on x (B, S, W), with cos and sin (S, D / 2). The result has x's shape."""
        query, key, value = heads_of(self.qkv(self.norm_1(x)), self.heads)
        query, key = rope_pair(query, key, cos, sin)
        seen = attention(query, key, value, is_causal=True)
        x = self.out(seen.transpose(1, 2).flatten(2), residual=x)
        return self.down(self.act(self.up(self.norm_2(x))), residual=x)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x (B, H, S, D) by the angles of its positions, in the dtype of the tables."""
    a, b = x.to(cos.dtype).chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def angles(positions: int, features: int) -> tuple[Tensor, Tensor]:
    """The tables (cos, sin) of a rotary embedding, each (positions, features / 2)."""
    table = torch.outer(torch.arange(positions), 1e4 ** -torch.linspace(0, 1, features // 2 + 1)[:-1])
    return table.cos(), table.sin()


# ---- Swin ----------------------------------------------------------------------------------------------------------


class Swin(nn.Module):
    """A Swin block with torch.nn; its windows are shifted."""

    def __init__(self, width: int, heads: int, window: int = 4) -> None:
        super().__init__()
        self.heads, self.window = heads, window
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.bias_table = nn.Parameter(torch.randn((2 * window - 1) ** 2, heads))

    def forward(self, x: Tensor) -> Tensor:
        """Run the block on x (B, H, W, C), with H and W multiples of the window. The result has x's shape."""
        bias, mask = position_bias(self.bias_table, self.window), shift_mask(x, self.window)
        query, key, value = heads_of(self.qkv(to_windows(self.norm1(x), self.window)), self.heads)
        scores = query @ key.mT * query.shape[-1] ** -0.5  # (B windows, heads, area, area)
        scores = scores.unflatten(0, (x.shape[0], -1)) + bias  # (B, windows, heads, area, area)
        kept = scores.masked_fill(~mask, float("-inf")).softmax(-1).flatten(0, 1)
        x = x + from_windows(self.proj((kept @ value).transpose(1, 2).flatten(2)), x, self.window)
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class RooftopSwin(nn.Module):
    """`Swin` with Rooftop's operators: the attention reads its windows from the map, so nothing is rolled, cut or
    joined."""

    def __init__(self, width: int, heads: int, window: int = 4) -> None:
        super().__init__()
        self.heads, self.window = heads, window
        self.norm1, self.norm2 = rooftop.nn.LayerNorm(width), rooftop.nn.LayerNorm(width)
        self.qkv, self.proj = rooftop.nn.LinearAct(width, 3 * width), rooftop.nn.LinearAct(width, width)
        self.fc1 = rooftop.nn.LinearAct(width, 4 * width, activation="gelu")
        self.fc2 = rooftop.nn.LinearAct(4 * width, width)
        self.bias_table = nn.Parameter(torch.randn((2 * window - 1) ** 2, heads))

    def forward(self, x: Tensor) -> Tensor:
        """Run the block on x (B, H, W, C), with H and W multiples of the window. The result has x's shape."""
        bias, window = position_bias(self.bias_table, self.window), (self.window,) * 2
        shift = (self.window // 2,) * 2
        x = self.proj(window_attention(self.qkv(self.norm1(x)), bias, self.heads, window, shift), residual=x)
        return self.fc2(self.fc1(self.norm2(x)), residual=x)


def to_windows(x: Tensor, window: int) -> Tensor:
    """Shift x (B, H, W, C) by half a window, and cut it into windows (B windows, area, C)."""
    shifted = x.roll((-(window // 2),) * 2, (1, 2))
    return shifted.unflatten(2, (-1, window)).unflatten(1, (-1, window)).transpose(2, 3).flatten(0, 2).flatten(1, 2)


def from_windows(windows: Tensor, like: Tensor, window: int) -> Tensor:
    """Undo `to_windows`."""
    batch, height, width, _ = like.shape
    x = windows.unflatten(1, (window, window)).unflatten(0, (batch, height // window, width // window))
    return x.transpose(2, 3).flatten(1, 2).flatten(2, 3).roll((window // 2,) * 2, (1, 2))


def position_bias(table: Tensor, window: int) -> Tensor:
    """The bias (heads, area, area): the table's value for the offset of each pair of positions in a window."""
    at = torch.arange(window, device=table.device)
    places = torch.stack(torch.meshgrid(at, at, indexing="ij")).flatten(1)  # (2, area)
    apart = places[:, :, None] - places[:, None] + window - 1
    return table[apart[0] * (2 * window - 1) + apart[1]].permute(2, 0, 1)


def shift_mask(x: Tensor, window: int) -> Tensor:
    """The mask (windows, 1, area, area): True for pairs of positions of a shifted window that are also neighbours in
    the image."""
    shift = window // 2
    rows, columns = (torch.arange(n, device=x.device) for n in x.shape[1:3])
    parts = [(at >= n - window).long() + (at >= n - shift) for at, n in zip((rows, columns), x.shape[1:3], strict=True)]
    part = parts[0][:, None] * 3 + parts[1]  # (H, W): the part of the image from which a shifted position comes
    windows = part.unflatten(1, (-1, window)).unflatten(0, (-1, window)).transpose(1, 2).flatten(2).flatten(0, 1)
    return (windows[:, :, None] == windows[:, None])[:, None]


# ---- comparison of both --------------------------------------------------------------------------------------------

PAIRS = {"gpt": (Gpt, RooftopGpt), "llama": (Llama, RooftopLlama), "swin": (Swin, RooftopSwin)}


def pair(name: str, width: int = 768, heads: int = 12, tokens: int = 50257) -> tuple[nn.Module, nn.Module]:
    """(torch's block, Rooftop's block) with equal parameters; `tokens`: vocabulary size of the GPT."""
    more = {"tokens": tokens} if name == "gpt" else {}
    theirs, ours = (kind(width, heads, **more) for kind in PAIRS[name])
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def inputs(
    name: str, width: int = 768, heads: int = 12, tokens: int = 50257, batch: int = 2, size: int = 16
) -> tuple[Tensor, ...]:
    """The inputs of a block; `size`: number of positions, or side of an image."""
    if name == "gpt":
        text = torch.randint(tokens, (batch, size + 1))
        return text[:, :-1], text[:, 1:]
    if name == "llama":
        return torch.randn(batch, size, width), *angles(size, width // heads)
    return (torch.randn(batch, size, size, width),)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--width", type=int, default=768, help="number of features; a multiple of 24")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    on_gpu = torch.device(options.device).type == "cuda"
    for name in PAIRS:
        blocks = [block.to(options.device) for block in pair(name, options.width)]
        given = [x.to(options.device) for x in inputs(name, options.width)]
        with torch.no_grad():
            theirs, ours = (block(*given) for block in blocks)
        apart = (theirs - ours).abs().max() / theirs.abs().max()
        shown = f"{name}: results differ by {apart:.1e} of the largest"
        if on_gpu:
            calls = {kind: partial(block, *given) for kind, block in zip(("torch", "rooftop"), blocks, strict=True)}
            times = compare(calls, device=options.device, seconds=0.05)
            shown += "; " + ", ".join(f"{kind} {timing.median_ms:.3f} ms" for kind, timing in times.items())
        print(shown)
    if not on_gpu:
        print("No times without a GPU: on a CPU Rooftop's operators are plain PyTorch, too.")
    print("rooftop.nn.replace swaps these modules of the torch.nn blocks:")
    originals = nn.ModuleDict({name: pair(name, options.width)[0] for name in PAIRS})
    print(rooftop.nn.replace(originals, only=rooftop.nn.KINDS))


if __name__ == "__main__":
    main()
