"""Layers that are split among ranks agree with one process, forward and backward, even if there are more ranks than
heads of keys and values. Each rank has the part of the weights that its record describes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rooftop.parallel import (
    ColumnParallelLinear,
    ModelGradients,
    ParallelMLP,
    ParallelSelfAttention,
    RowParallelLinear,
    VocabParallelEmbedding,
    copy_to_ranks,
    gather_of_ranks,
    shards_of,
    tensor_linears,
)
from rooftop.parallel.exchanges import Group, own_part
from rooftop.parallel.tensor_linears import SEQUENCE

Run = Callable[..., list[Any]]
Make = Callable[..., nn.Module]
WIDTH = 16
F64 = torch.float64


def column(**options: Any) -> nn.Module:
    return ColumnParallelLinear(WIDTH, {"gate": 12, "up": 20}, activation="gelu_tanh", **options)


def row(**options: Any) -> nn.Module:
    return RowParallelLinear(WIDTH, 10, **options)


def attention(**options: Any) -> nn.Module:
    return ParallelSelfAttention(WIDTH, 8, 8, **options)


def grouped_attention(**options: Any) -> nn.Module:
    return ParallelSelfAttention(WIDTH, 8, 2, **options)


def attention_of_one_key(**options: Any) -> nn.Module:
    return ParallelSelfAttention(WIDTH, 8, 1, bias=False, **options)


def normed_attention(**options: Any) -> nn.Module:
    """Norms of queries and keys, a window, and heads whose total size differs from the width."""
    return ParallelSelfAttention(WIDTH, 8, 2, head_features=6, out_bias=False, norms_epsilon=1e-5, window=3, **options)


def mlp(**options: Any) -> nn.Module:
    return ParallelMLP(WIDTH, 24, "gelu", **options)


def gated_mlp(**options: Any) -> nn.Module:
    return ParallelMLP(WIDTH, 12, "swiglu", bias=False, **options)


def table(**options: Any) -> nn.Module:
    return VocabParallelEmbedding(19, WIDTH, **options)


LAYERS: list[Make] = [
    column,
    row,
    attention,
    grouped_attention,
    attention_of_one_key,
    normed_attention,
    mlp,
    gated_mlp,
    table,
]


def whole(make: Make) -> nn.Module:
    module = make().double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    return module


def given(make: Make) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    if make is table:
        return torch.randint(19, (3, 8), generator=generator)
    return torch.randn(3, 8, WIDTH, generator=generator, dtype=F64)


def computed(module: nn.Module, x: Tensor, dy: Tensor, enter: Callable[[Tensor], Tensor], leave: Any) -> list[Tensor]:
    """The result, and the gradient of x if it is not a token."""
    leaf = x.clone().requires_grad_(x.is_floating_point())
    y = leave(module(enter(leaf)))
    y.backward(dy)
    return [y.detach()] if leaf.grad is None else [y.detach(), leaf.grad]


def gradient_of_result(make: Make, y: Tensor) -> Tensor:
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(3), dtype=F64)


def compared(make: Make, sequence_parallel: bool) -> dict[str, float]:
    """The largest differences from one process, for the result, the input's gradient and the parameters' gradients."""
    group: Group = dist.group.WORLD
    one = whole(make)
    module = make(group=group, sequence_parallel=sequence_parallel).double()
    shards = shards_of(module)
    with torch.no_grad():
        for name, parameter in one.named_parameters():
            part = shards[name].of(parameter) if name in shards else parameter
            module.get_parameter(name).copy_(part)
    x = given(make)
    with torch.no_grad():
        dy = gradient_of_result(make, one(x))
    expected = computed(one, x, dy, lambda x: x, lambda y: y)
    columns = isinstance(module, ColumnParallelLinear)

    def enter(x: Tensor) -> Tensor:
        if isinstance(module, RowParallelLinear):  # a row layer's input is a part of the features
            return own_part(copy_to_ranks(x, group), -1, group)
        split = sequence_parallel and make is not table
        return own_part(copy_to_ranks(x, group), SEQUENCE, group) if split else x

    def leave(y: Tensor) -> Tensor:
        return y if columns or not sequence_parallel else gather_of_ranks(y, SEQUENCE, group)

    if columns:  # each rank's result has a part of each of the two halves
        ranks, rank = group.size(), group.rank()
        pieces = [torch.cat([p.chunk(ranks, -1)[rank] for p in t.split([12, 20], -1)], -1) for t in (expected[0], dy)]
        expected[0], dy = pieces
    elif sequence_parallel:  # when gathered, each rank's share of the loss comes from its own positions
        mask = torch.zeros_like(dy)
        own_part(mask, SEQUENCE, group).fill_(1)
        dy = dy * mask
    found = computed(module, x, dy, enter, leave)
    ModelGradients(module, {"tp": group}, sequence_parallel=sequence_parallel).sum_()
    apart = {str(i): float((a - b).abs().max()) for i, (a, b) in enumerate(zip(found, expected, strict=True))}
    for name, parameter in one.named_parameters():
        assert parameter.grad is not None
        part = shards[name].of(parameter.grad) if name in shards else parameter.grad
        mine = module.get_parameter(name).grad
        assert mine is not None
        apart[name] = float((mine - part).abs().max())
    return apart


def all_compared(makes: list[Make]) -> dict[str, float]:
    return {
        f"{make.__name__} {sequence} {what}": apart
        for make in makes
        for sequence in (False, True)
        for what, apart in compared(make, sequence).items()
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_layers_are_those_of_one_process(ranks: int, on_ranks: Run) -> None:
    for rank, found in enumerate(on_ranks(ranks, all_compared, LAYERS)):
        assert len(found) > 2 * 3 * (len(LAYERS) - 1)
        for what, apart in found.items():
            assert apart < 1e-12, (rank, what)


def parts_here() -> dict[str, Any]:
    group = dist.group.WORLD
    module = ParallelSelfAttention(WIDTH, 8, 2, group=group)
    counting = torch.arange((8 + 2 + 2) * 2)  # rows of the whole weight, of heads with two features
    table = VocabParallelEmbedding(6, 3, group=group)
    return {
        "parts": module.qkv.parts,
        "rows": module.qkv.shards["bias"].of(counting).tolist(),
        "first": [piece.first for piece in module.qkv.shards["bias"].pieces],
        "tokens": table.shards["weight"].of(torch.arange(18).view(6, 3))[:, 0].tolist(),
        "columns": RowParallelLinear(8, 2, group=group).shards["weight"].of(torch.arange(16).view(2, 8))[0].tolist(),
    }


def test_who_holds_what(on_ranks: Run) -> None:
    """Four ranks, each with two query heads; each of the two heads of keys and values is shared by two ranks."""
    found = on_ranks(4, parts_here)
    assert all(each["parts"] == {"query": 4, "key": 2, "value": 2} for each in found)
    assert [each["rows"] for each in found] == [
        [0, 1, 2, 3, 16, 17, 20, 21],
        [4, 5, 6, 7, 16, 17, 20, 21],
        [8, 9, 10, 11, 18, 19, 22, 23],
        [12, 13, 14, 15, 18, 19, 22, 23],
    ]
    assert [each["first"] for each in found] == [[True, True, True], [True, False, False]] * 2
    assert [each["tokens"] for each in found] == [[0, 3], [6, 9], [12, 15], [0, 0]]  # the last rank has only padding
    assert [each["columns"] for each in found] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def refusals() -> list[str]:
    group = dist.group.WORLD
    calls: list[Callable[[], object]] = [
        lambda: ColumnParallelLinear(8, {"query": 16, "key": 9}, group=group),
        lambda: ColumnParallelLinear(8, {"gate": 8, "up": 8}, padded=True, group=group),
        lambda: RowParallelLinear(9, 8, group=group),
        lambda: ParallelSelfAttention(18, 9, group=group),
        lambda: ParallelSelfAttention(24, 12, 3, group=group),
        lambda: ParallelSelfAttention(16, 3),
        lambda: ParallelMLP(8, 9, group=group),
        lambda: ColumnParallelLinear(8, 8, group=group)(torch.zeros(2, 8), torch.zeros(2, 8)),
        lambda: RowParallelLinear(8, 8, group=group)(torch.zeros(2, 4), torch.zeros(2, 8)),
        lambda: RowParallelLinear(8, 8, group=group, sequence_parallel=True)(torch.zeros(1, 3, 4)),
    ]
    said = []
    for call in calls:
        with pytest.raises(ValueError, match=r"split|residual|padded|divide") as error:
            call()
        said.append(str(error.value))
    with pytest.raises(IndexError, match="out of range") as wrong:
        VocabParallelEmbedding(5, 3, group=group)(torch.tensor([0, 5]))
    return [*said, str(wrong.value)]


def test_errors_say_what_would_fit(on_ranks: Run) -> None:
    first, second = on_ranks(2, refusals, limit_s=150.0)
    assert first == second
    expected = [
        "key=9 cannot be split among 2 ranks: its number of indivisible blocks, 9, is not divisible by 2; use 1, 3, 9",
        "padded allows only a single layer, got gate, up",
        "RowParallelLinear: in_features=9 cannot be split among 2 ranks",
        "heads=9 and kv_heads=9 cannot be split among 2 ranks: use 1, 3, 9 ranks",
        "heads=12 and kv_heads=3 cannot be split among 2 ranks: use 1, 3, 6, 12 ranks",
        "width=16, heads=3 and kv_heads=3 must be at least 1, kv_heads must divide heads, and heads must divide width",
        "features=9 cannot be split among 2 ranks",
        "add it after a row layer",
        "does not accept a residual: add it to the result",
        "dimension -2 of (1, 3, 8) cannot be split among 2 ranks",
        "token 5 of a vocabulary of 5",
    ]
    for said, part in zip(first, expected, strict=True):
        assert part in said


@pytest.mark.parametrize(("heads", "kv_heads"), [(0, None), (-2, None), (4, 0), (4, -2)])
def test_heads_that_are_none(heads: int, kv_heads: int | None) -> None:
    given = heads if kv_heads is None else kv_heads
    with pytest.raises(ValueError, match=f"heads={heads} and kv_heads={given} must be at least 1"):
        ParallelSelfAttention(WIDTH, heads, kv_heads)


def by_hand(module: ParallelSelfAttention, x: Tensor, window: int) -> Tensor:
    """Computed for each position: scores of the window's keys, their softmax, and the weighted mean of the values."""
    query, key, value = (
        part.unflatten(-1, (-1, module.head_features)) for part in module.qkv(x).split([48, 12, 12], -1)
    )
    query, key = (
        t / (t.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
        for t, norm in ((query, module.query_norm), (key, module.key_norm))
    )
    rows = []
    for place in range(x.shape[1]):
        first = max(0, place - window + 1)
        keys, values = (t[:, first : place + 1].repeat_interleave(4, 2) for t in (key, value))  # (B, n, H, D)
        weights = ((query[:, place, None] * keys).sum(-1) / 6**0.5).softmax(1)
        rows.append((weights[..., None] * values).sum(1).flatten(1))
    return module.out(torch.stack(rows, 1))


@pytest.mark.parametrize("window", [1, 3, 7, 8, 20])
def test_a_window_is_of_the_last_positions(window: int) -> None:
    module = whole(lambda: ParallelSelfAttention(WIDTH, 8, 2, head_features=6, norms_epsilon=1e-5, window=window))
    x = given(attention)
    torch.testing.assert_close(module(x), by_hand(module, x, window), rtol=1e-9, atol=1e-9)
    for begin in range(8):  # the queries are the last positions of a longer row of keys
        query, key, value = torch.randn(3, 1, 8, 8, 6, dtype=F64)
        whole_text = module.attend(query, key[:, :2], value[:, :2])
        last = module.attend(query[:, :, begin:], key[:, :2], value[:, :2])
        torch.testing.assert_close(last, whole_text[:, :, begin:], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("options", [{"window": 0}, {"head_features": 0}])
def test_windows_and_heads_of_nothing(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        ParallelSelfAttention(WIDTH, 8, **options)


def under_autocast() -> tuple[list[torch.dtype], float]:
    group = dist.group.WORLD
    module, x = ParallelMLP(WIDTH, 24, group=group), torch.randn(2, 4, WIDTH, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)
    y.float().sum().backward()
    gradients = [x.grad, *(p.grad for p in module.parameters())]
    return [y.dtype, *(g.dtype for g in gradients if g is not None)], float(y.detach().float().abs().max())


def test_autocast_is_as_of_linear_layers(on_ranks: Run) -> None:
    for dtypes, size in on_ranks(2, under_autocast):
        assert dtypes == [torch.bfloat16] + 5 * [torch.float32]
        assert size > 0


def order_of_calls() -> list[str]:
    """The order of the products and exchanges in a column layer's backward."""
    seen: list[str] = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.mm.default:
                seen.append("product")
            return func(*args, **(kwargs or {}))

    begin = tensor_linears.start_sum

    def watched(x: Tensor, group: Group) -> Callable[[], Tensor]:
        seen.append("start")
        wait = begin(x, group)

        def waited() -> Tensor:
            seen.append("wait")
            return wait()

        return waited

    module = ColumnParallelLinear(8, 8, group=dist.group.WORLD)
    y = module(torch.randn(3, 8, requires_grad=True))
    tensor_linears.start_sum = watched
    try:
        with Products():
            y.sum().backward()
    finally:
        tensor_linears.start_sum = begin
    return seen


def test_the_input_s_gradient_is_on_its_way_while_the_weight_s_is_computed(on_ranks: Run) -> None:
    assert on_ranks(2, order_of_calls) == [["product", "start", "product", "wait"]] * 2
