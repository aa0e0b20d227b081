"""The config of a decoder-only transformer: sizes and switches, and the numbers of parameters and flops.

    config = GptConfig(vocabulary=256, layers=2, width=64, heads=4, kv_heads=4, hidden=256, positions=100)
    config.parameters                    # 122880
    config.flops_per_token(100)          # of a training step
    small = replace(config, layers=1)    # dataclasses.replace

The switches cover GPT-2, Llama, Mistral, Qwen2 and Qwen3. Sources: Jiang et al. 2023, "Mistral 7B" (sliding-window
attention); Yang et al. 2024, "Qwen2 Technical Report" (biases of queries, keys and values); Yang et al. 2025, "Qwen3
Technical Report" (norms of queries and keys). `rooftop.models.gpt.configs` has published configurations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Literal

from rooftop.models.gpt.rope_scaling import RopeScaling
from rooftop.parallel.layouts import Layout

SIZES = ("vocabulary", "layers", "width", "heads", "kv_heads", "head_size", "hidden", "positions", "window")
CHOICES = {
    "norm": ("layer", "rms"),
    "position": ("learned", "rope"),
    "activation": ("gelu", "gelu_tanh", "swiglu"),
}


@dataclass(frozen=True, kw_only=True)
class GptConfig:
    """Sizes and switches of a decoder.

    Attributes:
        vocabulary: number of tokens, V.
        layers: number of layers, L.
        width: features of a position, W.
        heads: number of query heads.
        kv_heads: number of key-value heads, a divisor of `heads`. A smaller number than `heads` means grouped-query
            attention.
        head_size: features of a head; None: W divided by the number of heads.
        hidden: features in the hidden layer of the MLP.
        positions: the maximum length of a sequence.
        norm: type of the norm before each sublayer and after the last sublayer, "layer" or "rms".
        position: "learned" adds a learned vector per position to the token embedding; "rope" rotates queries and keys,
            in pairs of features (i, i + D / 2).
        rope_base: base of the rotation angles, which are position / rope_base ** (2 i / D). Ignored for learned
            positions.
        rope_scaling: scaling of the frequencies for longer texts; None: no scaling.
        activation: activation of the MLP, "gelu", "gelu_tanh" or "swiglu" (with a gate).
        biases: whether linear layers and layer norms have biases. RMS norms and the head never have biases.
        qkv_biases, out_biases, mlp_biases: whether there are biases in the linear layers of queries, keys and values
            (`qkv_biases`), of attention's result (`out_biases`) and of the MLP (`mlp_biases`); None: as `biases`.
        head_norms: whether RMS norms normalize each head's queries and keys before the rotation.
        window: number of positions to which a position attends, including itself; None: to all positions up to itself.
        window_layers: indices of the layers whose attention has the window; None: all layers.
        tied: whether head and embedding share their weight.
        dropout: dropout probability of the embedding and of each sublayer's result.
        attention_dropout: dropout probability of the attention weights. With a probability above 0, PyTorch operators
            compute attention instead of a fused kernel.
        epsilon: epsilon of the norms.

    Raises:
        ValueError: a size is not a positive int, the heads do not divide the width, a probability is below 0 or not
            below 1, a switch is unknown, or settings do not go together.
    """

    vocabulary: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int | None = None
    hidden: int
    positions: int
    norm: Literal["layer", "rms"] = "layer"
    position: Literal["learned", "rope"] = "learned"
    rope_base: float = 1e4
    rope_scaling: RopeScaling | None = None
    activation: Literal["gelu", "gelu_tanh", "swiglu"] = "gelu_tanh"
    biases: bool = True
    qkv_biases: bool | None = None
    out_biases: bool | None = None
    mlp_biases: bool | None = None
    head_norms: bool = False
    window: int | None = None
    window_layers: tuple[int, ...] | None = None
    tied: bool = True
    dropout: float = 0.0
    attention_dropout: float = 0.0
    epsilon: float = 1e-5

    def __post_init__(self) -> None:
        for name in SIZES:
            size = getattr(self, name)
            if size is None and name in ("head_size", "window"):
                continue
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"GptConfig: {name} must be a positive int, got {size!r}")
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(f"GptConfig: {name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        for name in ("dropout", "attention_dropout"):
            value = getattr(self, name)
            if not (_is_number(value) and 0 <= value < 1):
                raise ValueError(f"GptConfig: {name} must be a number of at least 0 and less than 1, got {value!r}")
        for name in ("rope_base", "epsilon"):
            value = getattr(self, name)
            if not (_is_number(value) and 0 < value < math.inf):
                raise ValueError(f"GptConfig: {name} must be a positive number, got {value!r}")
        if self.head_size is None and self.width % self.heads:
            raise ValueError(
                f"GptConfig: {self.heads} heads do not divide a width of {self.width}: give head_size, the features of "
                "a head"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"GptConfig: {self.kv_heads} kv_heads do not divide {self.heads} heads")
        if self.position == "rope" and self.head_features % 2:
            raise ValueError(
                f"GptConfig: rope rotates pairs of features, but a head has {self.head_features} features: expected an "
                "even number"
            )
        if self.rope_scaling is not None and self.position != "rope":
            raise ValueError("GptConfig: rope_scaling is only for position='rope', got learned positions")
        if self.window_layers is not None and (self.window is None or not self._are_layers(self.window_layers)):
            raise ValueError(
                f"GptConfig: window_layers must be distinct indices of the {self.layers} layers, together with a "
                f"window, got {self.window_layers} and the window {self.window}"
            )
        self._write_in_one_way()

    def _are_layers(self, numbers: tuple[int, ...]) -> bool:
        return len(set(numbers)) == len(numbers) and set(numbers) <= set(range(self.layers))

    def _write_in_one_way(self) -> None:
        """Normalize equivalent settings, so that configs of the same model compare equal."""
        found: dict[str, Any] = {}
        if self.head_size is not None and self.head_size * self.heads == self.width:
            found["head_size"] = None
        linear = {
            "qkv_biases": self.has_qkv_biases, "out_biases": self.has_out_bias, "mlp_biases": self.has_mlp_biases
        }  # fmt: skip
        biases = all(linear.values()) if self.norm == "rms" else self.biases  # an RMS norm has no bias
        found |= {name: None if has == biases else has for name, has in linear.items()} | {"biases": biases}
        if self.window_layers is not None:
            found["window_layers"] = tuple(sorted(self.window_layers))
            if len(self.window_layers) == self.layers:
                found["window_layers"] = None
            elif not self.window_layers:
                found["window_layers"] = found["window"] = None
        for name, value in found.items():
            object.__setattr__(self, name, value)

    @property
    def head_features(self) -> int:
        """Features of a head, D."""
        return self.head_size or self.width // self.heads

    @property
    def query_width(self) -> int:
        """Number of query features of a position, over all heads."""
        return self.heads * self.head_features

    @property
    def kv_width(self) -> int:
        """Number of key features of a position, over all heads; the number of value features is the same."""
        return self.kv_heads * self.head_features

    @property
    def has_qkv_biases(self) -> bool:
        """Whether the linear layers of queries, keys and values have biases."""
        return self.biases if self.qkv_biases is None else self.qkv_biases

    @property
    def has_out_bias(self) -> bool:
        """Whether the output projection of attention has a bias."""
        return self.biases if self.out_biases is None else self.out_biases

    @property
    def has_mlp_biases(self) -> bool:
        """Whether the linear layers of the MLP have biases."""
        return self.biases if self.mlp_biases is None else self.mlp_biases

    def of_rank(self, ranks: int) -> GptConfig:
        """The config of one tensor parallel rank's part: its heads, hidden features and tokens.

        The result's `parameters` counts one rank's parameters, including the padding of the vocabulary. With fewer
        `kv_heads` than ranks, each rank has one key-value head. `rooftop.parallel.Layout.check` checks whether a number
        of ranks is valid.
        """
        if ranks == 1:
            return self
        return replace(
            self,
            heads=self.heads // ranks,
            kv_heads=max(1, self.kv_heads // ranks),
            head_size=self.head_features,
            hidden=self.hidden // ranks,
            vocabulary=-(-self.vocabulary // ranks),
        )

    def check_layout(self, layout: Layout, ranks: int, **more: Any) -> None:
        """Call `layout.check` with the sizes that tensor parallel ranks split, and with the arguments `more`.

        Raises:
            ValueError: see `rooftop.parallel.Layout.check`.
        """
        layout.check(
            ranks,
            heads=self.heads,
            kv_heads=self.kv_heads,
            hidden=self.width,
            feed_forward=self.hidden,
            vocabulary=self.vocabulary,
            **more,
        )

    def window_of(self, layer: int) -> int | None:
        """The window of a layer's attention; None: no window."""
        return self.window if self.window_layers is None or layer in self.window_layers else None

    @property
    def windowed_layers(self) -> int:
        """The number of layers with the window."""
        return sum(self.window_of(layer) is not None for layer in range(self.layers))

    @property
    def layer_weights(self) -> int:
        """The number of elements of a layer's matrices, each of which costs one multiply-add per token."""
        attention = self.width * (2 * self.query_width + 2 * self.kv_width)
        return attention + self.width * self.hidden * (3 if self.activation == "swiglu" else 2)

    @property
    def parameters(self) -> int:
        """The number of elements of all parameters; a tied weight counts once."""
        norm = self.width * (2 if self.norm == "layer" and self.biases else 1)
        up = self.hidden * (2 if self.activation == "swiglu" else 1)
        biases = self.query_width + 2 * self.kv_width if self.has_qkv_biases else 0
        biases += self.width if self.has_out_bias else 0
        biases += up + self.width if self.has_mlp_biases else 0
        biases += 2 * self.head_features if self.head_norms else 0
        embeddings = self.vocabulary * (1 if self.tied else 2)
        embeddings += self.positions if self.position == "learned" else 0
        return embeddings * self.width + self.layers * (self.layer_weights + biases + 2 * norm) + norm

    def flops_per_token(self, length: int, training: bool = True) -> int:
        """The flops of all matrix products of a sequence, divided by its number of tokens.

        For attention, only the pairs that a causal mask keeps are counted, about half of all pairs: (length + 1) / 2
        keys per token, or fewer with a window. The embedding lookup and recomputation are not counted.

        Args:
            length: tokens of the sequence.
            training: count forward and backward, three times the forward flops. If False, count only forward.

        Raises:
            ValueError: the length is not positive.
        """
        if length < 1:
            raise ValueError(f"flops_per_token: length must be positive, got {length}")
        products = 2 * (self.layers * self.layer_weights + self.vocabulary * self.width)
        windowed, seen = self.windowed_layers, min(length, self.window or length)
        pairs = (self.layers - windowed) * length * (length + 1) // 2
        pairs += windowed * (seen * (seen + 1) // 2 + (length - seen) * seen)
        attention = 4 * self.query_width * pairs // length  # two matrix products, 2 flops per multiply-add
        return (products + attention) * (3 if training else 1)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
