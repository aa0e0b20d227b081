"""For any arguments, the public operators return what PyTorch returns, or say which argument is wrong.

A table lists all operators with their PyTorch counterparts. The laws over the table cover wrong types, dtypes, shapes
and devices, empty, strided, repeated and huge tensors, and tensors of inference mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rooftop import kernels

Sizes = dict[str, int]
Arguments = dict[str, Any]


@dataclass(frozen=True)
class Public:
    """A public function. Each of its tensors has a name and named dimensions ("M N"), whose sizes are in `sizes`.
    `theirs` computes the same from the same tensors. `keywords` are the other arguments; `ours_alone` derives some of
    them from the tensors."""

    name: str
    shapes: dict[str, str]
    theirs: Callable[..., Any]
    keywords: Arguments
    integers: tuple[str, ...] = ()  # arguments that are tokens or classes, below the size V
    fixed: tuple[str, ...] = ()  # dimensions that cannot have another size
    most: int = 1 << 62  # sizes that a dimension can have
    normalized: bool = False  # normalized_shape follows from the last dimension
    ours_alone: Callable[[Arguments], Arguments] = lambda arguments: {}

    def ours(self, **arguments: Any) -> Any:
        more = {**self._more(arguments), **self.ours_alone(arguments)}
        return getattr(kernels, self.name)(**arguments, **more)

    def peer(self, **arguments: Any) -> Any:
        return self.theirs(**arguments, **self._more(arguments))

    def _more(self, arguments: Arguments) -> Arguments:
        if not self.normalized:
            return self.keywords
        given = arguments["input"]
        return {**self.keywords, "normalized_shape": given.shape[-1:] if isinstance(given, Tensor) else (6,)}


def elementwise(name: str, theirs: Callable[..., Tensor]) -> Public:
    return Public(name, {"input": "M N"}, lambda input: theirs(input), {})


def reduction(name: str, theirs: Callable[..., Tensor], **keywords: Any) -> Public:
    return Public(name, {"input": "M N"}, theirs, {"dim": 1, **keywords})


def added_norm(name: str) -> Public:
    rms = name == "add_rms_norm"
    shapes = {"input": "M N", "residual": "M N", "weight": "N", **({} if rms else {"bias": "N"}), "input_bias": "N"}

    def theirs(
        input: Tensor,
        residual: Tensor,
        weight: Tensor,
        input_bias: Tensor,
        normalized_shape: Any,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> tuple[Tensor, Tensor]:
        total = input + input_bias + residual
        if rms:
            return F.rms_norm(total, normalized_shape, weight, eps), total
        return F.layer_norm(total, normalized_shape, weight, bias, eps), total

    return Public(name, shapes, theirs, {"eps": 1e-5} if rms else {}, normalized=True)


def scaled_dot_product(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value)


def written_out(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.mT / math.sqrt(max(1, query.shape[-1]))).softmax(-1) @ value


def merged(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    lse = torch.logaddexp(lse_a, lse_b)
    return out_a * (lse_a - lse).exp()[..., None] + out_b * (lse_b - lse).exp()[..., None], lse


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pairs = cos.shape[-1]
    a, b, rest = x.split([pairs, pairs, x.shape[-1] - 2 * pairs], -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


def trilinear(features: Tensor, points: Tensor) -> Tensor:
    near = torch.stack(((1 - points) / 2, (1 + points) / 2), -1)  # (B, 3, 2)
    weights = torch.einsum("bi,bj,bk->bijk", *near.unbind(1)).flatten(1)
    return torch.einsum("bc,bcf->bf", weights, features)


def conv_lstm(gates: Tensor, cell: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
    i, f, c, o = (gates + added).chunk(4, 1)
    if gates.shape[1] != 4 * cell.shape[1] or gates.shape != added.shape or gates.dim() != 4:
        raise ValueError("expected four gates of each cell")
    cell = f.sigmoid() * cell + i.sigmoid() * c.tanh()
    return o.sigmoid() * cell.tanh(), cell


def conv_lstms(gates: Tensor, kernel: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    outputs, (height, width) = [], kernel.shape[2:]
    for step in gates:
        padded = F.pad(hidden, ((width - 1) // 2, width // 2, (height - 1) // 2, height // 2))
        recurrent = F.conv2d(padded, kernel) if step.numel() else step.detach() + 0 * kernel.sum() * hidden.sum()
        hidden, cell = conv_lstm(step, cell, recurrent)
        outputs.append(hidden)
    return torch.stack(outputs), cell


def windows(query_key_value: Tensor, bias: Tensor, padding: Tensor, heads: int, window: tuple[int, int]) -> Tensor:
    """Unshifted windows of two heads, each with 2 x 2 positions."""
    batch, height, width, channels = query_key_value.shape
    if bias.shape != (2, 4, 4) or padding.shape != (channels,):
        raise ValueError("expected a bias of each head and pair, and one vector beyond the map")
    tall, wide = height + height % 2, width + width % 2
    padded = padding.expand(batch, tall, wide, channels).clone()
    padded[:, :height, :width] = query_key_value
    cut = padded.reshape(batch, tall // 2, 2, wide // 2, 2, 3, 2, channels // 6).permute(5, 0, 1, 3, 6, 2, 4, 7)
    query, key, value = cut.flatten(-3, -2)  # (B, down, across, heads, 4, D)
    attended = (query @ key.mT * (channels // 6) ** -0.5 + bias).softmax(-1) @ value
    joined = attended.unflatten(-2, (2, 2)).permute(0, 1, 4, 2, 5, 3, 6)
    return joined.reshape(batch, tall, wide, channels // 3)[:, :height, :width]


def dropped(x: Tensor, p: float, key: int) -> Tensor:
    """For p = 1 / 2, the first bit of each number decides."""
    numbers = kernels.random_uniform(x.shape, key, device=x.device)
    return torch.where(numbers < p, 0.0, x / (1 - p))


def sites_of_a_line(arguments: Arguments) -> Arguments:
    """The neighbours of each site are the site before, itself and the site after."""
    features = arguments["features"]
    count, device = (len(features), features.device) if isinstance(features, Tensor) and features.dim() else (4, "cpu")
    neighbours = torch.arange(count, device=device)[:, None] + torch.arange(-1, 2, device=device)
    return {"neighbours": torch.where(neighbours < count, neighbours, -1).int()}


def along_a_line(features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    padded = F.pad(features, (0, 0, 1, 1))
    return torch.einsum("mtk,ntk->mn", torch.stack((padded[:-2], padded[1:-1], padded[2:]), 1), weight) + bias


def pooled_along_a_line(features: Tensor, average: bool) -> Tensor:
    """All values that equal a maximum get its gradient."""
    nothing = 0.0 if average else -math.inf
    padded = F.pad(features, (0, 0, 1, 1), value=nothing)
    around = torch.stack((padded[:-2], padded[1:-1], padded[2:]), 1)
    if average:
        ones = F.pad(torch.ones_like(features), (0, 0, 1, 1))
        return around.sum(1) / (ones[:-2] + ones[1:-1] + ones[2:])
    best = around.amax(1).detach()
    taken = torch.where(around == best[:, None], around, 0.0).sum(1)
    return best + taken - taken.detach()


def thirds(arguments: Arguments) -> Arguments:
    """Every third row belongs to the same batch element."""
    features = arguments["features"]
    count, device = (len(features), features.device) if isinstance(features, Tensor) and features.dim() else (4, "cpu")
    return {"batch": torch.arange(count, device=device) % 3, "batch_size": 3}


def pooled_by_thirds(features: Tensor, average: bool) -> Tensor:
    if features.dim() != 2:
        raise ValueError("expected rows")
    parts = [features[third::3] for third in range(3)]
    return torch.stack([p.sum(0) / max(1, len(p)) if average or not len(p) else p.amax(0) for p in parts])


def two_pages_each(arguments: Arguments) -> Arguments:
    """Sequence b has the pages b and b + 1, whatever their number, and all their positions except b."""
    query, keys = arguments["query"], arguments["keys"]
    whole = isinstance(query, Tensor) and isinstance(keys, Tensor) and query.dim() == 3 and keys.dim() == 4
    batch, count, page, device = (len(query), len(keys), keys.shape[2], query.device) if whole else (2, 6, 5, "cpu")
    row, each = torch.arange(batch, device=device), torch.arange(min(2, count), device=device)
    return {"pages": (row[:, None] + each) % max(1, count), "lengths": (len(each) * page - row).clamp(min=0)}


def of_two_pages(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    if query.dim() != 3 or keys.shape != values.shape or keys.dim() != 4 or keys.shape[1] != query.shape[1]:
        raise ValueError("expected queries (B, H, D) and keys and values (N, H, P, D)")
    more = two_pages_each({"query": query, "keys": keys})
    key, value = (t[more["pages"]].transpose(1, 2).flatten(2, 3) for t in (keys, values))  # (B, H, 2 P, D)
    seen = torch.arange(key.shape[2], device=key.device) < more["lengths"][:, None]
    found = F.scaled_dot_product_attention(query[:, :, None], key, value, seen[:, None, None])
    return found[:, :, 0].nan_to_num()  # a sequence without positions has no result


HEAD, WINDOWS = "B H S D", {"heads": 2, "window": (2, 2)}
PUBLIC = [
    elementwise("relu", torch.relu),
    elementwise("sigmoid", torch.sigmoid),
    elementwise("tanh", torch.tanh),
    elementwise("silu", F.silu),
    elementwise("gelu", F.gelu),
    Public("add", {"input": "M N", "other": "N"}, torch.add, {}),
    Public("mul", {"input": "M N", "other": "N"}, torch.mul, {}),
    Public("axpy", {"a": "M 1", "x": "M N", "y": "N"}, lambda a, x, y: a * x + y, {}),
    Public("layer_norm", {"input": "M N", "weight": "N", "bias": "N"}, F.layer_norm, {}, normalized=True),
    Public("rms_norm", {"input": "M N", "weight": "N"}, F.rms_norm, {"eps": 1e-5}, normalized=True),
    *(added_norm(name) for name in ("add_layer_norm", "add_layer_norm_cuda", "add_rms_norm")),
    Public("softmax", {"input": "M N", "mask": "N"}, lambda input, mask: (input + mask).softmax(-1), {}),
    Public("log_softmax", {"input": "M N", "mask": "N"}, lambda input, mask: (input + mask).log_softmax(-1), {}),
    *(reduction(name, getattr(torch, name)) for name in ("sum", "mean", "amax", "amin", "argmax", "argmin")),
    reduction("norm", torch.linalg.vector_norm),
    Public("cross_entropy", {"input": "M V", "target": "M", "weight": "V"}, F.cross_entropy, {}, integers=("target",)),
    Public(
        "linear_cross_entropy",
        {"hidden": "M K", "weight": "V K", "target": "M", "bias": "V"},
        lambda hidden, weight, target, bias: F.cross_entropy(F.linear(hidden, weight, bias), target),
        {},
        integers=("target",),
    ),
    Public("embedding", {"input": "M N", "weight": "V K"}, F.embedding, {}, integers=("input",)),
    Public(
        "conv_act",
        {"input": "B K H S", "weight": "N K 3 3", "bias": "N", "residual": "B N H S"},
        lambda input, weight, bias, residual, padding, activation: F.silu(
            F.conv2d(input, weight, bias, padding=padding) + residual
        ),
        {"padding": 1, "activation": "silu"},
    ),
    Public(
        "linear_act",
        {"input": "M K", "weight": "N K", "bias": "N", "residual": "M N"},
        lambda input, weight, bias, residual, activation: F.gelu(F.linear(input, weight, bias)) + residual,
        {"activation": "gelu"},
    ),
    Public("max_pool2d", {"input": "B H S D"}, F.max_pool2d, {"kernel_size": 3, "stride": 2, "padding": 1}),
    Public("matmul", {"input": "M K", "other": "K N"}, torch.matmul, {}),
    Public("attention", dict.fromkeys(("query", "key", "value"), HEAD), scaled_dot_product, {}, most=256),
    Public(
        "merge_attention_states",
        {"out_a": HEAD, "lse_a": "B H S", "out_b": HEAD, "lse_b": "B H S"},
        merged,
        {},
    ),
    Public(
        "paged_attention",
        {"query": "B H D", **dict.fromkeys(("keys", "values"), "N H S D")},
        of_two_pages,
        {},
        most=256,
        ours_alone=two_pages_each,
    ),
    Public("rope", {"x": "B H S D", "cos": "S C", "sin": "S C"}, turned, {}, fixed=("C", "D")),
    Public(
        "rope_pair",
        {"query": "B H S D", "key": "B G S D", "cos": "S C", "sin": "S C"},
        lambda query, key, cos, sin: (turned(query, cos, sin), turned(key, cos, sin)),
        {},
        fixed=("C", "D"),
    ),
    Public("swiglu", {"gate": "M N", "up": "M N"}, lambda gate, up: F.silu(gate) * up, {}),
    Public("counter_dropout", {"x": "M N"}, dropped, {"p": 0.5, "key": 3}),
    Public("conv_lstm_gates", {"gates": "M 8 H S", "cell": "M 2 H S", "added": "M 8 H S"}, conv_lstm, {}),
    Public(
        "conv_lstm_sequence",
        {"gates": "2 M 8 H S", "kernel": "8 2 3 3", "hidden": "M 2 H S", "cell": "M 2 H S"},
        conv_lstms,
        {},
    ),
    Public(
        "sparse_conv",
        {"features": "M K", "weight": "N 3 K", "bias": "N"},
        along_a_line,
        {},
        ours_alone=sites_of_a_line,
    ),
    *(
        Public(
            name,
            {"features": "M K"},
            partial(function, average="avg" in name),
            {},
            ours_alone=sites_of_a_line if function is pooled_along_a_line else thirds,
        )
        for name, function in (
            ("sparse_max_pool", pooled_along_a_line),
            ("sparse_avg_pool", pooled_along_a_line),
            ("sparse_global_max_pool", pooled_by_thirds),
            ("sparse_global_avg_pool", pooled_by_thirds),
        )
    ),
    Public("window_attention", {"query_key_value": "B H S 72", "bias": "2 4 4", "padding": "72"}, windows, WINDOWS),
    *(
        Public(name, {"features": "M 8 K", "points": "M 3"}, trilinear, {})
        for name in ("trilinear_interpolate", "trilinear_interpolate_cuda")
    ),
]
# functions that compute nothing themselves; below, functions without tensors among their arguments
NO_OPERATORS = {"AttentionPlan", "decompositions", "fused"} | {
    f"{name}_plan"
    for name in ("attention", "conv_act", "layer_norm", "linear_act", "max_pool2d", "reduction", "softmax")
}
NO_TENSORS = {"Box", "random_key", "random_normal", "random_uniform"}
SIZES = {"B": 2, "H": 3, "G": 2, "S": 5, "D": 8, "C": 4, "M": 4, "N": 6, "K": 3, "V": 7}
WITHOUT_GRADIENT = {"argmax", "argmin", "max_pool2d", "paged_attention"}
NAMES = {  # words that messages use in place of an argument's name
    **dict.fromkeys(("add", "mul", "axpy"), ("tensors",)),
    **dict.fromkeys((p.name for p in PUBLIC if p.normalized), ("normalized_shape",)),
    "relu": ("relu of booleans",),
    "merge_attention_states": ("outputs", "log-sum-exps"),
    "trilinear_interpolate": ("cells",),
    "trilinear_interpolate_cuda": ("cells",),
}

each_public = pytest.mark.parametrize("public", PUBLIC, ids=lambda p: p.name)
each_argument = pytest.mark.parametrize(
    ("public", "argument"), [pytest.param(p, a, id=f"{p.name}-{a}") for p in PUBLIC for a in p.shapes]
)


def shape_of(public: Public, argument: str, sizes: Sizes = SIZES) -> tuple[int, ...]:
    return tuple(sizes[each] if each in sizes else int(each) for each in public.shapes[argument].split())


def tensors_of(public: Public, sizes: Sizes = SIZES, **options: Any) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    found = {}
    for argument in public.shapes:
        shape = shape_of(public, argument, sizes)
        if argument in public.integers:
            found[argument] = torch.randint(max(1, sizes["V"]), shape, generator=generator).to(**options)
        else:
            found[argument] = torch.rand(shape, generator=generator).to(**options)
    return found


def learned(public: Public, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that get a gradient. The tables of rotary embeddings and the weights of classes get none."""
    without = {"cos", "sin", *public.integers, *(["weight"] if public.name == "cross_entropy" else [])}
    return {name: t for name, t in tensors.items() if name not in without}


def outcome(public: Public, function: Callable[..., Any], tensors: dict[str, Tensor]) -> list[Tensor]:
    """Results, then gradients."""
    leaves = {name: t.detach() for name, t in tensors.items()}
    wanted = learned(public, leaves) if public.name not in WITHOUT_GRADIENT else {}
    for leaf in wanted.values():
        leaf.requires_grad_()
    found = function(**leaves)
    outputs = list(found) if isinstance(found, (tuple, list)) else [found]
    if not wanted:
        return outputs
    weights = [torch.linspace(0.5, 1, y.numel(), dtype=y.dtype, device=y.device).reshape(y.shape) for y in outputs]
    return [*outputs, *torch.autograd.grad(outputs, list(wanted.values()), weights, allow_unused=True)]


def assert_as_torch(public: Public, tensors: dict[str, Tensor], copied: bool = False) -> None:
    """Results and gradients are PyTorch's. If PyTorch raises an error, Rooftop raises TypeError or ValueError.
    `copied`: PyTorch gets copies."""
    copies = {name: t.clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    try:
        expected = outcome(public, public.peer, copies if copied else tensors)
    except (RuntimeError, ValueError, IndexError):
        with pytest.raises((TypeError, ValueError), match=f"^{public.name}: "):
            outcome(public, public.ours, tensors)
        return
    found = outcome(public, public.ours, tensors)
    if public.name in MEANS_OF_LOSSES and tensors["target"].numel() == 0:  # PyTorch's mean of no elements is NaN
        expected = [torch.zeros_like(expected[0]), *expected[1:]]
    torch.testing.assert_close(found, expected, equal_nan=True)


MEANS_OF_LOSSES = ("cross_entropy", "linear_cross_entropy")
"""Without a target they are 0, so that a training step without targets does no harm."""


def refused(public: Public, arguments: Arguments, argument: str | None, *kinds: type[Exception]) -> None:
    """The message names the function and the argument, or (None) one of the arguments that contradict each other."""
    with pytest.raises(kinds) as caught:
        public.ours(**arguments)
    message = str(caught.value)
    assert message.startswith((f"{public.name}: ", "fused: ")), message
    assert any(
        name in message for name in ([argument] if argument else [*public.shapes, *NAMES.get(public.name, ())])
    ), message


def test_the_table_has_every_public_function() -> None:
    assert {p.name for p in PUBLIC} == set(kernels.__all__) - NO_OPERATORS - NO_TENSORS


@each_public
def test_as_torch_on_what_fits(public: Public) -> None:
    assert_as_torch(public, tensors_of(public))


@each_argument
@pytest.mark.parametrize("wrong", [[1.0, 2.0], None, "x"], ids=["list", "None", "str"])
def test_no_tensor(public: Public, argument: str, wrong: Any) -> None:
    tensors = {**tensors_of(public), argument: wrong}
    try:
        public.ours(**tensors)
    except TypeError:
        refused(public, tensors, argument, TypeError)
    else:
        assert wrong is None, "only None is accepted in place of a tensor"


@each_argument
def test_sparse(public: Public, argument: str) -> None:
    tensors = tensors_of(public)
    tensors[argument] = tensors[argument].to_sparse()
    refused(public, tensors, argument, TypeError)


@each_argument
def test_complex_numbers(public: Public, argument: str) -> None:
    tensors = tensors_of(public)
    tensors[argument] = tensors[argument].to(torch.complex64)
    refused(public, tensors, argument, TypeError)


@each_argument
@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.float64, torch.bfloat16], ids=str)
def test_another_dtype(public: Public, argument: str, dtype: torch.dtype) -> None:
    tensors = tensors_of(public)
    tensors[argument] = tensors[argument].to(dtype)
    with torch.no_grad():
        try:
            found = public.ours(**tensors)
        except (TypeError, ValueError):
            refused(public, tensors, None, TypeError)
            return
        exact = {name: t if name in public.integers else t.double() for name, t in tensors.items()}
        expected = public.peer(**exact)
    for y, truth in zip(*((r if isinstance(r, tuple) else (r,)) for r in (found, expected)), strict=True):
        torch.testing.assert_close(y.double(), truth.double(), rtol=0.02, atol=0.02)


@each_argument
def test_on_another_device(public: Public, argument: str) -> None:
    tensors = tensors_of(public)
    if len(tensors) == 1:
        return
    tensors[argument] = tensors[argument].to("meta")
    refused(public, tensors, None, ValueError)


@each_argument
def test_another_shape(public: Public, argument: str) -> None:
    for change in (lambda t: t[None], lambda t: torch.cat((t, t[..., :1]), -1), lambda t: t.flatten()[0]):
        tensors = tensors_of(public)
        tensors[argument] = change(tensors[argument])
        try:
            public.ours(**tensors)
        except (TypeError, ValueError):
            refused(public, tensors, None, ValueError)
        else:
            assert_as_torch(public, tensors)


def dimensions(public: Public) -> Iterator[str]:
    return (d for d in SIZES if any(d in shape.split() for shape in public.shapes.values()))


@pytest.mark.parametrize(
    ("public", "dimension"), [pytest.param(p, d, id=f"{p.name}-{d}") for p in PUBLIC for d in dimensions(p)]
)
def test_no_elements(public: Public, dimension: str) -> None:
    tensors = tensors_of(public, {**SIZES, dimension: 0})
    if dimension not in public.fixed:
        assert_as_torch(public, tensors)


@each_argument
def test_strides(public: Public, argument: str) -> None:
    tensors = tensors_of(public)
    for strided in laid_out_otherwise(tensors[argument]):
        assert_as_torch(public, {**tensors, argument: strided})


def laid_out_otherwise(plain: Tensor) -> Iterator[Tensor]:
    backwards = tuple(reversed(range(plain.dim())))
    yield torch.stack((plain, plain), -1)[..., 0]  # every second element
    yield plain.permute(backwards).contiguous().permute(backwards)
    yield plain[:1].expand(plain.shape)
    yield torch.cat((plain.flatten()[:1], plain.flatten()))[1:].reshape(plain.shape)  # not aligned to 16 bytes


WITH_ITS_ATTENTION = ("attention", "paged_attention")


@pytest.mark.gpu
@each_public
def test_on_a_gpu(public: Public, monkeypatch: pytest.MonkeyPatch) -> None:
    """Valid arguments, strides, and dimensions of size 0. (With 0 classes, PyTorch's kernels stop the process. Norms of
    rows without elements are compared on the CPU, and so are tables without columns, because PyTorch's backward writes
    to them. PyTorch's attention assumes that every address is a multiple of 16, and has no derivative for empty
    tensors.)"""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # for convolutions
    tensors = tensors_of(public, device="cuda")
    assert_as_torch(public, tensors)
    for argument, plain in tensors.items():
        for strided in laid_out_otherwise(plain):
            assert_as_torch(public, {**tensors, argument: strided}, copied=public.name in WITH_ITS_ATTENTION)
    for dimension in set(dimensions(public)) - {"V", *public.fixed, *("N" * bool(public.normalized))}:
        sizes = {**SIZES, dimension: 0}
        if (public.name, dimension) == ("embedding", "K"):
            found = outcome(public, public.ours, tensors_of(public, sizes, device="cuda"))
            expected = outcome(public, public.peer, tensors_of(public, sizes))
            torch.testing.assert_close(found, expected, check_device=False)
        elif public.name == "attention":
            empty = tensors_of(public, sizes, device="cuda")
            torch.testing.assert_close(outcome(public, public.ours, empty), outcome(public, written_out, empty))
        else:
            assert_as_torch(public, tensors_of(public, sizes, device="cuda"))


LARGE = {"B": 2, "H": 4, "G": 2, "S": 257, "D": 64, "C": 32, "M": 1001, "N": 2600, "K": 768, "V": 5003}
IN_FLOAT32 = {"lse_a", "lse_b", "points", "cos", "sin"}


def assert_the_same_bits(public: Public, sizes: Sizes, dtype: torch.dtype, device: str) -> None:
    """Ten runs, forward and backward."""
    tensors = {
        name: t.to(dtype) if t.is_floating_point() and name not in IN_FLOAT32 else t
        for name, t in tensors_of(public, sizes, device=device).items()
    }
    first = outcome(public, public.ours, tensors)
    for _ in range(9):  # one by one: results on a GPU may take gigabytes
        for found, expected in zip(outcome(public, public.ours, tensors), first, strict=True):
            assert torch.equal(found, expected)


@each_public
def test_ten_runs_have_the_same_bits(public: Public) -> None:
    assert_the_same_bits(public, SIZES, torch.bfloat16, "cpu")


@pytest.mark.gpu
@each_public
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_ten_runs_have_the_same_bits_on_a_gpu(public: Public, dtype: torch.dtype) -> None:
    # Attention back ends and cuDNN's weight gradients are deterministic only with this setting.
    torch.use_deterministic_algorithms(public.name in ("attention", "conv_act", "conv_lstm_sequence"))
    try:
        assert_the_same_bits(public, LARGE, dtype, "cuda")
    finally:
        torch.use_deterministic_algorithms(False)


@each_public
def test_tensors_of_inference_mode(public: Public) -> None:
    plain = tensors_of(public)
    with torch.no_grad():
        expected = public.ours(**plain)
    with torch.inference_mode():
        tensors = tensors_of(public)
        torch.testing.assert_close(public.ours(**tensors), expected)
    # tensors created in inference mode also work outside of it if none needs a gradient
    torch.testing.assert_close(public.ours(**tensors), expected)


@each_public
def test_compiled_whole_for_sizes_that_change(public: Public) -> None:
    torch._dynamo.reset()
    names = list(public.shapes)
    compiled = torch.compile(
        lambda *tensors: public.ours(**dict(zip(names, tensors, strict=True))),
        fullgraph=True,
        dynamic=True,
        backend="eager",
    )
    for sizes in (SIZES, {**SIZES, "M": 9, "S": 3, "N": 5, "B": 4}):
        tensors = tensors_of(public, sizes)
        torch.testing.assert_close(compiled(*tensors.values()), public.ours(**tensors))


HUGE = {"M": (1 << 21) + 1, "N": 1 << 11, "K": 1 << 11, "V": 1 << 18, "S": 1 << 17, "H": 1 << 7, "D": 256, "C": 128}


@each_public
def test_more_than_two_billion_elements(public: Public) -> None:
    """The test checks shapes on meta tensors, because real tensors would not fit in memory."""
    sizes = {**SIZES, **HUGE}
    tensors = {
        name: torch.empty(
            shape_of(public, name, sizes),
            dtype=torch.int64 if name in public.integers else torch.bfloat16 if "lse" not in name else torch.float32,
            device="meta",
        )
        for name in public.shapes
    }
    assert max(t.numel() for t in tensors.values()) > 1 << 31
    wanted = learned(public, tensors) if public.name not in WITHOUT_GRADIENT else {}
    for leaf in wanted.values():
        leaf.requires_grad_()
    found, expected = public.ours(**tensors), public.peer(**{n: t.detach() for n, t in tensors.items()})
    for y, truth in zip(*((r if isinstance(r, tuple) else (r,)) for r in (found, expected)), strict=True):
        assert y.shape == truth.shape
        assert y.is_meta
    if wanted:
        outputs = found if isinstance(found, tuple) else (found,)
        gradients = torch.autograd.grad(outputs, list(wanted.values()), [torch.empty_like(y) for y in outputs])
        assert [g.shape for g in gradients] == [t.shape for t in wanted.values()]


WRONG_NUMBERS = [
    ("softmax", {"scale": "x"}),
    ("log_softmax", {"scale": [1.0]}),
    ("attention", {"scale": "x"}),
    ("embedding", {"padding_idx": 1.5}),
    *((name, {"ignore_index": 1.5}) for name in ("cross_entropy", "linear_cross_entropy")),
    *((name, {"label_smoothing": "x"}) for name in ("cross_entropy", "linear_cross_entropy")),
    *((name, {"z_loss": None}) for name in ("cross_entropy", "linear_cross_entropy")),
    ("add", {"alpha": "x"}),
    ("gelu", {"approximate": 1}),
    ("softmax", {"dim": 0.5}),
    ("sum", {"dim": 0.5}),
    ("norm", {"ord": "fro"}),
    ("layer_norm", {"normalized_shape": 6.0}),
]


@pytest.mark.parametrize(("name", "wrong"), WRONG_NUMBERS, ids=lambda each: each if isinstance(each, str) else "")
def test_what_is_no_number(name: str, wrong: Arguments) -> None:
    public = next(each for each in PUBLIC if each.name == name)
    (argument,) = wrong
    with pytest.raises((TypeError, ValueError), match=f"^({name}|fused): .*{argument}"):
        getattr(kernels, name)(**tensors_of(public), **wrong)
