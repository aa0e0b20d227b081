"""Flops of public networks, by Rooftop and by PyTorch's FlopCounterMode, forward and in training.

    python benchmarks/flop_totals.py [--out benchmarks/results/cpu/flop_totals.json] [NAME ...]

Only matrix work is compared (products, convolutions, attention, recurrent layers): FlopCounterMode counts nothing else.
The networks are in bfloat16, where elementwise arithmetic counts as float32, so that matrix work is counted separately.
Tensors are fake, and operators are chosen as on a GPU, so the script needs neither a GPU nor the networks' memory. The
script needs torchvision, timm and transformers.

If the two counters differ by more than 1%, a count by hand decides. `by_hand` explains this count. It uses the
published sizes of a network's layers and the products that each gradient needs, and does not look at operators:

    training = 3 x forward, minus the gradient of the images or tokens, plus half of attention's forward (attention
               computes its scores again: five products backward for two forward)
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

import rooftop
from rooftop.analysis.as_on_gpu import as_on_gpu
from rooftop.analysis.without_values import answered_without_values
from rooftop.cost.accounting import tensors_in
from rooftop.hardware import ceilings_of
from rooftop.whole_files import write_json

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
Build = Callable[[], tuple[nn.Module, Inputs]]


@dataclass(frozen=True)
class Network:
    """A public network, its input, and how to count it by hand.

    Attributes:
        build: creates the module in its usual precision, and its arguments.
        stem: flops of the input's gradient, which training does not compute; equal to the first layer's forward flops.
        attention: forward flops of the two products of all attention layers, by definition (half for causal ones).
        by_hand: forward matrix flops counted by hand; None: not counted, because FlopCounterMode agrees with Rooftop.
        why: the reason why the two counters differ.
    """

    build: Build
    stem: int
    attention: int = 0
    by_hand: int | None = None
    why: str = ""


def torchvision_model(path: str, size: int, batch: int) -> Build:
    def build() -> tuple[nn.Module, Inputs]:
        from torchvision.models import get_model

        extra = {"weights_backbone": None, "aux_loss": True} if "deeplab" in path else {}
        return get_model(path, weights=None, **extra), ((torch.randn(batch, 3, size, size),), {})

    return build


def video(frames: int, size: int) -> Build:
    def build() -> tuple[nn.Module, Inputs]:
        from torchvision.models.video import r3d_18

        return r3d_18(), ((torch.randn(2, 3, frames, size, size),), {})

    return build


def timm_model(name: str, size: int, batch: int) -> Build:
    def build() -> tuple[nn.Module, Inputs]:
        import timm

        return timm.create_model(name, pretrained=False), ((torch.randn(batch, 3, size, size),), {})

    return build


def mamba(layers: int, length: int) -> Build:
    def build() -> tuple[nn.Module, Inputs]:
        from transformers import MambaConfig, MambaForCausalLM

        config = MambaConfig(num_hidden_layers=layers, use_cache=False)
        return MambaForCausalLM(config), ((torch.randint(100, (2, length)),), {})

    return build


def t5(length: int, answer: int) -> Build:
    def build() -> tuple[nn.Module, Inputs]:
        from transformers import T5Config, T5ForConditionalGeneration

        config = T5Config(d_model=768, d_ff=3072, num_layers=12, num_heads=12)  # t5-base
        tokens = {"input_ids": torch.randint(100, (4, length)), "decoder_input_ids": torch.randint(100, (4, answer))}
        return T5ForConditionalGeneration(config), ((), {**tokens, "use_cache": False})

    return build


def whisper(answer: int) -> Build:
    def build() -> tuple[nn.Module, Inputs]:
        from transformers import WhisperConfig, WhisperForConditionalGeneration

        heads = {"encoder_attention_heads": 12, "decoder_attention_heads": 12}
        layers = {"encoder_layers": 12, "decoder_layers": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072}
        model = WhisperForConditionalGeneration(WhisperConfig(d_model=768, **heads, **layers))  # whisper-small
        sound = torch.randn(2, 80, 3000)
        return model, ((sound,), {"decoder_input_ids": torch.randint(100, (2, answer)), "use_cache": False})

    return build


def qwen(layers: int, length: int) -> Build:
    def build() -> tuple[nn.Module, Inputs]:
        from transformers import Qwen2Config, Qwen2ForCausalLM

        heads = {"num_attention_heads": 14, "num_key_value_heads": 2, "num_hidden_layers": layers, "use_cache": False}
        config = Qwen2Config(hidden_size=896, intermediate_size=4864, tie_word_embeddings=True, **heads)
        return Qwen2ForCausalLM(config), ((torch.randint(100, (1, length)),), {})

    return build


def segformer(size: int) -> Build:
    def build() -> tuple[nn.Module, Inputs]:
        from transformers import SegformerConfig, SegformerForSemanticSegmentation

        return SegformerForSemanticSegmentation(SegformerConfig()), ((torch.randn(2, 3, size, size),), {})

    return build


def bert(length: int) -> Build:
    def build() -> tuple[nn.Module, Inputs]:
        from transformers import BertConfig, BertForMaskedLM

        return BertForMaskedLM(BertConfig()), ((torch.randint(100, (8, length)),), {})

    return build


class WordLanguageModel(nn.Module):
    """The LSTM of pytorch/examples (word_language_model), with the sizes of its README for WikiText-2."""

    def __init__(self, words: int = 33278, width: int = 650, layers: int = 2) -> None:
        super().__init__()
        self.encoder = nn.Embedding(words, width)
        self.rnn = nn.LSTM(width, width, layers, dropout=0.5)
        self.decoder = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.decoder(self.rnn(self.encoder(tokens))[0])


class Generator(nn.Sequential):
    """The generator of pytorch/examples (dcgan)."""

    def __init__(self, noise: int = 100, width: int = 64, colours: int = 3) -> None:
        sizes = [noise, 8 * width, 4 * width, 2 * width, width, colours]
        layers: list[nn.Module] = []
        for index, (inputs, outputs) in enumerate(pairwise(sizes)):
            stride, padding = (1, 0) if index == 0 else (2, 1)
            layers += [nn.ConvTranspose2d(inputs, outputs, 4, stride, padding, bias=False)]
            layers += [nn.BatchNorm2d(outputs), nn.ReLU()] if outputs != colours else [nn.Tanh()]
        super().__init__(*layers)


def convolution(batch: int, inputs: int, outputs: int, positions: int, taps: int) -> int:
    return 2 * batch * inputs * outputs * positions * taps


def convnext_tiny(batch: int) -> int:
    """Forward flops of ConvNeXt-T (Liu et al. 2022, table 9): widths 96, 192, 384, 768, depths 3, 3, 9, 3. Each block
    has a 7x7 depthwise convolution and an MLP that is 4 times as wide."""
    flops, side = convolution(batch, 3, 96, 56 * 56, 16), 56
    for index, (width, depth) in enumerate(zip((96, 192, 384, 768), (3, 3, 9, 3), strict=True)):
        if index:
            side //= 2
            flops += convolution(batch, width // 2, width, side * side, 4)
        flops += depth * convolution(batch, 1, width, side * side, 49)
        flops += depth * 2 * convolution(batch, width, 4 * width, side * side, 1)
    return flops + 2 * batch * 768 * 1000


def generator(batch: int) -> int:
    """Forward flops of transposed convolutions, which multiply each input element with 16 taps of each output
    channel."""
    sizes = [(100, 512, 1), (512, 256, 4), (256, 128, 8), (128, 64, 16), (64, 3, 32)]
    return sum(convolution(batch, inputs, outputs, side * side, 16) for inputs, outputs, side in sizes)


def word_language_model(steps: int, batch: int) -> int:
    """Forward flops of two LSTM layers of four gates, with two 650 x 650 products per gate, and of the product with the
    vocabulary."""
    return 2 * steps * batch * (2 * 4 * 2 * 650 * 650 + 650 * 33278)


def t5_attention(length: int, answer: int) -> int:
    """Attention flops of T5: 4 B S_q S_k 768 in each of 12 layers of self and cross attention. All pairs count, because
    the decoder's mask is a tensor."""
    return 12 * 4 * 4 * 768 * (length**2 + answer**2 + answer * length)


def whisper_attention(answer: int) -> int:
    """Attention flops of Whisper, as for T5, with 1500 audio positions. The decoder's self-attention counts only pairs
    on or below the diagonal."""
    return 12 * 4 * 2 * 768 * (1500**2 + answer * (answer + 1) // 2 + answer * 1500)


def vit_base(batch: int, tokens: int) -> int:
    """Forward flops of ViT-B: patches, 12 layers with 12 products of 768 x 768 per token (4 in attention, 8 in the
    MLP), and the head."""
    layer = 2 * batch * tokens * 12 * 768 * 768
    return convolution(batch, 3, 768, tokens - 1, 256) + 12 * layer + vit_attention(batch, tokens) + 2 * batch * 768_000


def vit_attention(batch: int, tokens: int) -> int:
    return 12 * 4 * batch * tokens**2 * 768


def segformer_attention(batch: int) -> int:
    """Attention flops of SegFormer: two layers in each of four stages. Each layer has 256 keys, since the network
    reduces longer sequences of keys (Xie et al. 2021, table 6)."""
    return 2 * 4 * batch * 256 * (128**2 * 32 + 64**2 * 64 + 32**2 * 160 + 16**2 * 256)


def qwen_2(layers: int, length: int) -> int:
    """Forward flops of Qwen2-0.5B: products with weights of 896 x 896 (queries, output), 896 x 128 (keys, values), 896
    x 4864 (3 in the MLP) and 896 x the vocabulary, and attention."""
    layer = 2 * length * 896 * (2 * 896 + 2 * 128 + 3 * 4864)
    return layers * layer + qwen_attention(layers, length) + 2 * length * 896 * 151_936


def qwen_attention(layers: int, length: int) -> int:
    """Attention flops for the query-key pairs on or below the diagonal."""
    return layers * 4 * 896 * length * (length + 1) // 2


GROUPED = "FlopCounterMode counts a grouped convolution's gradient as if it had one group"
NETWORKS: dict[str, Network] = {
    "ConvNeXt-T b64": Network(
        torchvision_model("convnext_tiny", 224, 64),
        stem=convolution(64, 3, 96, 56 * 56, 16),
        by_hand=convnext_tiny(64),
        why=GROUPED,
    ),
    "EfficientNet-V2-S b16": Network(
        torchvision_model("efficientnet_v2_s", 384, 16), stem=convolution(16, 3, 24, 192 * 192, 9), why=GROUPED
    ),
    "RegNet-Y-8GF b16": Network(
        torchvision_model("regnet_y_8gf", 224, 16), stem=convolution(16, 3, 32, 112 * 112, 9), why=GROUPED
    ),
    "MobileNetV4 conv-M b16 (timm)": Network(
        timm_model("mobilenetv4_conv_medium", 256, 16), stem=convolution(16, 3, 32, 128 * 128, 9), why=GROUPED
    ),
    "MaxViT-T b8": Network(
        torchvision_model("maxvit_t", 224, 8),
        stem=convolution(8, 3, 64, 112 * 112, 9),
        why=GROUPED,
    ),
    "DeepLabV3 ResNet-50 b4": Network(
        torchvision_model("deeplabv3_resnet50", 512, 4), stem=convolution(4, 3, 64, 256 * 256, 49)
    ),
    "ViT-B/16 b16": Network(
        torchvision_model("vit_b_16", 224, 16),
        stem=convolution(16, 3, 768, 14 * 14, 256),
        attention=vit_attention(16, 197),
        by_hand=vit_base(16, 197),
        why="FlopCounterMode has no formula for nn.MultiheadAttention's operator for inference",
    ),
    "R3D-18 b2": Network(video(16, 112), stem=convolution(2, 3, 64, 16 * 56 * 56, 3 * 49)),
    "DCGAN generator b64": Network(
        lambda: (Generator(), ((torch.randn(64, 100, 1, 1),), {})),
        stem=convolution(64, 100, 512, 1, 16),
        by_hand=generator(64),
    ),
    "Mamba 4 layers, 2x64": Network(mamba(4, 64), stem=0, why=GROUPED),
    "T5-base 4x512 to 4x128": Network(t5(512, 128), stem=0, attention=t5_attention(512, 128)),
    "Whisper-small 2x30 s": Network(
        whisper(64), stem=convolution(2, 80, 768, 3000, 3), attention=whisper_attention(64)
    ),
    "SegFormer-B0 b2": Network(
        segformer(512), stem=convolution(2, 3, 32, 128 * 128, 49), attention=segformer_attention(2), why=GROUPED
    ),
    "BERT-base 8x512": Network(bert(512), stem=0, attention=12 * 4 * 8 * 512 * 512 * 768),
    "Qwen2-0.5B 4 layers 1x4096": Network(
        qwen(4, 4096),
        stem=0,
        attention=qwen_attention(4, 4096),
        by_hand=qwen_2(4, 4096),
        why="FlopCounterMode counts the pairs that a causal mask hides",
    ),
    "LSTM language model 35x20": Network(
        lambda: (WordLanguageModel(), ((torch.randint(33278, (35, 20)),), {})),
        stem=0,
        by_hand=word_language_model(35, 20),
        why="FlopCounterMode has no formula for recurrent layers",
    ),
}


def by_rooftop(module: nn.Module, inputs: Inputs, train: bool) -> tuple[int, list[str]]:
    """Matrix flops that Rooftop predicts, and the operators for which it has no cost formula."""
    options = {"ceilings": ceilings_of("h200"), "dtype": torch.bfloat16, "train": train}
    report = rooftop.predict(module, *inputs[0], **inputs[1], **options)
    flops = sum(row.flops_by_precision.get("bf16", 0) for row in report.ops)
    return flops, sorted({row.name for row in report.ops if row.uncovered})


def by_flop_counter(module: nn.Module, inputs: Inputs, train: bool) -> int:
    """Matrix flops that FlopCounterMode counts."""
    fakes = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(tensor: Tensor) -> Tensor:
        dtype = torch.bfloat16 if tensor.is_floating_point() else tensor.dtype
        meta = torch.empty(tensor.shape, dtype=dtype, device="meta")
        return FakeTensor(fakes, meta, torch.device("cpu")).requires_grad_(tensor.requires_grad)

    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    state, (args, kwargs) = tree_map_only(Tensor, fake, (state, inputs))
    module.train(train)
    with (
        answered_without_values(),
        fakes,
        FlopCounterMode(display=False) as counter,
        as_on_gpu(),
        torch.set_grad_enabled(train),
    ):
        output = torch.func.functional_call(module, state, args, kwargs)
        roots = [t for t in tensors_in(output) if t.requires_grad]
        torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
    return counter.get_total_flops()


@dataclass(frozen=True)
class Row:
    network: str
    mode: str
    rooftop_gflop: float
    counter_gflop: float
    by_hand_gflop: float | None
    uncovered: list[str]
    why: str

    @property
    def agrees(self) -> bool:
        return abs(self.rooftop_gflop - self.counter_gflop) <= 0.01 * self.counter_gflop

    @property
    def is_right(self) -> bool:
        """Whether Rooftop's count agrees with the count by hand, or with FlopCounterMode if nobody counted by hand."""
        trusted = self.by_hand_gflop if self.by_hand_gflop is not None else self.counter_gflop
        return not self.uncovered and abs(self.rooftop_gflop - trusted) <= 0.01 * trusted


def rows(name: str, network: Network) -> list[Row]:
    module, inputs = network.build()
    (forward, uncovered), (trained, uncovered_training) = (by_rooftop(module, inputs, train) for train in (False, True))
    forward_counter, trained_counter = (by_flop_counter(module, inputs, train) for train in (False, True))
    trusted = network.by_hand
    if trusted is None and abs(forward - forward_counter) <= 0.01 * forward_counter:
        trusted = forward_counter
    training_by_hand = 3 * trusted - network.stem + network.attention // 2 if trusted is not None else None
    billions = 1e9
    return [
        Row(
            name,
            mode,
            ours / billions,
            theirs / billions,
            by_hand / billions if by_hand is not None else None,
            missing,
            network.why,
        )
        for mode, ours, theirs, by_hand, missing in (
            ("forward", forward, forward_counter, network.by_hand, uncovered),
            ("training", trained, trained_counter, training_by_hand, uncovered_training),
        )
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "networks",
        nargs="*",
        metavar="NAME",
        help="measure only networks whose names begin with one of these (default: all)",
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    missing = [name for name in ("torchvision", "timm", "transformers") if find_spec(name) is None]
    if missing:
        parser.error(f"not installed: {', '.join(missing)} (pip install {' '.join(missing)}, built for this torch)")
    warnings.filterwarnings("ignore")
    chosen = {n: of for n, of in NETWORKS.items() if not options.networks or n.startswith(tuple(options.networks))}
    print(f"{'matrix work, GFLOP':32} {'':9} {'Rooftop':>10} {'FlopCounter':>12} {'by hand':>10}")
    results = []
    for name, network in chosen.items():
        for row in rows(name, network):
            results.append(row)
            by_hand = f"{row.by_hand_gflop:10.2f}" if row.by_hand_gflop is not None else " " * 10
            note = "" if row.agrees else row.why if row.is_right else "WRONG"
            if row.uncovered:
                note += f" uncovered: {', '.join(row.uncovered)}"
            print(
                f"{name:32} {row.mode:9} {row.rooftop_gflop:10.2f} {row.counter_gflop:12.2f} {by_hand}  {note}",
                flush=True,
            )
    if options.out is not None:
        versions = {name: sys.modules[name].__version__ for name in ("torch", "torchvision", "timm", "transformers")}
        result = {"versions": versions, "rows": [asdict(row) for row in results]}
        write_json(options.out, result)
    wrong = [f"{row.network} {row.mode}" for row in results if not row.is_right]
    if wrong:
        print(f"wrong: {', '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
