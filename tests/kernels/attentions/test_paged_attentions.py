"""Attention over pages, both ways: the CPU implementation, and (in a separate process) the Triton kernels
interpreted."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftop.cost import CountingMode
from rooftop.kernels import paged_attention
from rooftop.kernels.attentions.paged_attentions import splits_of
from rooftop.kernels.attentions.tables import MOST_KEYS, MOST_SPLITS, paged_config
from rooftop.launch import INTERPRETED, count_launches
from rooftop.testing import assert_as_accurate, no_waiting_for_gpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def paged(
    lengths: list[int],
    heads: int = 4,
    kv_heads: int = 2,
    width: int = 16,
    page: int = 4,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    spare: int = 3,
) -> tuple[Tensor, ...]:
    """query, keys, values, pages, lengths. Each sequence's pages are at random places, and unused positions are NaN."""
    generator = torch.Generator().manual_seed(sum(lengths) + width)
    needed = [-(-length // page) for length in lengths]
    count = sum(needed) + spare
    keys, values = (torch.randn(count, kv_heads, page, width, generator=generator, dtype=torch.float64) for _ in "kv")
    order = torch.randperm(count, generator=generator)
    pages = torch.full((len(lengths), max([*needed, 0]) + 1), count + 7, dtype=torch.int32)
    used = torch.zeros(count, page, dtype=torch.bool)
    for row, (length, many) in enumerate(zip(lengths, needed, strict=True)):
        own, order = order[:many], order[many:]
        pages[row, :many] = own
        used[own] = (torch.arange(many * page) < length).view(many, page)
    for stored in (keys, values):
        stored.masked_fill_(~used[:, None, :, None], math.nan)
    query = torch.randn(len(lengths), heads, width, generator=generator, dtype=torch.float64)
    tensors = [t.to(dtype).to(device) for t in (query, keys, values)]
    return *tensors, pages.to(device), torch.tensor(lengths, device=device)


def by_torch(query: Tensor, keys: Tensor, values: Tensor, pages: Tensor, lengths: Tensor) -> Tensor:
    """Each sequence alone, with its positions in order, in the dtype of the query."""
    results = []
    for row, length in enumerate(lengths.tolist()):
        own = pages[row, : -(-length // keys.shape[2])].long()
        key, value = (t[own].transpose(0, 1).flatten(1, 2)[:, :length] for t in (keys, values))  # (H_k, T, D)
        grouped = query[row].unflatten(0, (key.shape[0], -1))  # (H_k, G, D)
        results.append(((grouped @ key.mT * query.shape[2] ** -0.5).softmax(-1) @ value).flatten(0, 1))
    return torch.stack(results)


def assert_gate(*tensors: Tensor) -> None:
    with count_launches() as launches:
        found = paged_attention(*tensors)
    if INTERPRETED or found.is_cuda:
        assert launches["attend_pages"] == 1
    exact = by_torch(*(t.double() if t.is_floating_point() else t for t in tensors))
    assert_as_accurate(found, by_torch(*tensors), exact, what=f"{tuple(tensors[0].shape)} {tensors[0].dtype}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (35, 1)])
@pytest.mark.parametrize(
    ("lengths", "width", "page"),
    [([1, 7, 200], 16, 16), ([150], 13, 5), ([64, 0, 65, 1], 64, 64), ([300, 2], 8, 1)],
)
def test_gate(lengths: list[int], width: int, page: int, heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    assert_gate(*paged(lengths, heads, kv_heads, width, page, dtype))


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 20),
    st.integers(1, 9),
)  # fmt: skip
@settings(max_examples=15, deadline=None)
def test_any_shape(lengths: list[int], kv_heads: int, group: int, width: int, page: int) -> None:
    tensors = paged(lengths, kv_heads * group, kv_heads, width, page)
    torch.testing.assert_close(paged_attention(*tensors), by_torch(*tensors), rtol=1e-4, atol=1e-5)


def test_it_is_attention_of_the_last_position() -> None:
    query, keys, values, pages, lengths = paged([9], heads=6, kv_heads=2, page=3)
    key, value = (t[pages[0, :3].long()].transpose(0, 1).flatten(1, 2)[None] for t in (keys, values))
    expected = F.scaled_dot_product_attention(query[:, :, None], key, value, enable_gqa=True)[:, :, 0]
    torch.testing.assert_close(paged_attention(query, keys, values, pages, lengths), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 5, 64, 150, 1000])
def test_a_window_is_of_the_last_positions(window: int, dtype: torch.dtype) -> None:
    lengths = [1, 64, 150, 0, 5]
    query, keys, values, pages, _ = tensors = paged(lengths, 6, 2, 16, 5, dtype)
    found = paged_attention(*tensors, window=window)
    exact, eager = [], []
    for results, wide in ((exact, torch.float64), (eager, dtype)):
        for row, length in enumerate(lengths):
            begin = max(0, length - window)
            own = pages[row, : -(-length // 5)].long()
            key, value = (t[own].to(wide).transpose(0, 1).flatten(1, 2)[:, begin:length] for t in (keys, values))
            grouped = query[row].to(wide).unflatten(0, (2, 3))
            results.append(((grouped @ key.mT / 4).softmax(-1) @ value).flatten(0, 1))
    assert_as_accurate(found, torch.stack(eager), torch.stack(exact), what=f"window of {window} in {dtype}")


@pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter")
def test_windows_of_long_sequences_are_split_among_programs_by_the_interpreter() -> None:
    tensors = paged([1000, 300], 2, 1, 32, 16)
    narrow = tensors[-1].clamp(max=500)
    begin = tensors[-1] - narrow  # all keys before the window are far away
    with count_launches() as launches:
        found = paged_attention(*tensors, window=500)
    assert launches == {"attend_pages": 1, "merge_splits": 1}
    for row, (first, length) in enumerate(zip(begin.tolist(), tensors[-1].tolist(), strict=True)):
        own = tensors[3][row, : -(-length // 16)].long()
        key, value = (t[own].transpose(0, 1).flatten(1, 2)[0, first:length] for t in tensors[1:3])
        expected = (tensors[0][row] @ key.mT / 32**0.5).softmax(-1) @ value
        torch.testing.assert_close(found[row], expected, rtol=1e-4, atol=1e-5)


def test_pages_before_a_window_may_be_freed() -> None:
    query, keys, values, pages, lengths = tensors = paged([23, 4, 0], 2, 1, 8, 5)
    expected = paged_attention(*tensors, window=6)
    freed = pages.clone()
    freed[0, : (23 - 6) // 5] = -1  # positions before page 3 are outside the window
    torch.testing.assert_close(paged_attention(query, keys, values, freed, lengths, window=6), expected)
    doubles = [t.double() if t.is_floating_point() else t for t in (query, keys, values, freed, lengths)]
    torch.testing.assert_close(paged_attention(*doubles, window=6).float(), expected)


def test_windows_that_are_none() -> None:
    tensors = paged([5])
    with pytest.raises(ValueError, match="window must be at least 1 position, got 0"):
        paged_attention(*tensors, window=0)
    with pytest.raises(TypeError, match="window must be an int or None"):
        paged_attention(*tensors, window=2.0)  # type: ignore[arg-type]


def test_where_pages_lie_does_not_matter() -> None:
    query, keys, values, pages, lengths = paged([30, 17, 5])
    found = paged_attention(query, keys, values, pages, lengths)
    order = torch.randperm(len(keys), generator=torch.Generator().manual_seed(1))
    places = order.argsort()
    moved = torch.where(pages < len(keys), places[pages.long().clamp(max=len(keys) - 1)], -5)
    assert torch.equal(paged_attention(query, keys[order], values[order], moved, lengths), found)


def test_what_is_the_same_in_all_values_comes_out_and_a_shift_of_the_keys_changes_nothing() -> None:
    query, keys, values, pages, lengths = paged([70, 3], heads=4, kv_heads=4)
    ones = values.nan_to_num() * 0 + 3.0
    torch.testing.assert_close(paged_attention(query, keys, ones, pages, lengths), torch.full_like(query, 3.0))
    shifted = paged_attention(query, keys + 0.5, values, pages, lengths)
    torch.testing.assert_close(shifted, paged_attention(query, keys, values, pages, lengths), rtol=1e-4, atol=1e-4)


def test_scores_of_thousands() -> None:
    tensors = paged([100, 20], heads=2, kv_heads=1)
    loud = (tensors[0] * 1e4, *tensors[1:])
    exact = by_torch(*(t.double() if t.is_floating_point() else t for t in loud))
    assert paged_attention(*loud).isfinite().all()
    assert_as_accurate(paged_attention(*loud), by_torch(*loud), exact, what="large scores")


def test_a_sequence_of_no_position_attends_to_nothing() -> None:
    query, keys, values, pages, _ = paged([6, 6])
    found = paged_attention(query, keys, values, pages, torch.tensor([0, 6]))
    assert (found[0] == 0).all()
    assert (found[1] != 0).all()
    nothing = paged_attention(query, keys[:0], values[:0], pages[:, :0], torch.tensor([0, 0]))
    assert (nothing == 0).all()


def test_a_scale_and_views_with_any_strides() -> None:
    query, keys, values, pages, lengths = paged([11, 4], heads=4, kv_heads=2, width=8)
    found = paged_attention(query, keys, values, pages, lengths)
    torch.testing.assert_close(paged_attention(query / 2, keys, values, pages, lengths, scale=2 * 8**-0.5), found)
    strided = [torch.stack((t, t), -1)[..., 0] for t in (query, keys, values, pages)]
    torch.testing.assert_close(paged_attention(*strided, lengths), found)
    turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (keys, values)]
    torch.testing.assert_close(paged_attention(query, *turned, pages.long(), lengths.int()), found)


@pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter")
@pytest.mark.parametrize("heads", [1, 3])
def test_long_sequences_are_split_among_programs_by_the_interpreter(heads: int) -> None:
    with count_launches() as launches:
        assert_gate(*paged([1000], heads, 1, 32, 16, torch.bfloat16))
    assert launches == {"attend_pages": 1, "merge_splits": 1}
    with count_launches() as launches:
        assert_gate(*paged([40] * 12, heads, 1, 32, 16))
    assert launches == {"attend_pages": 1}


def test_splits_fill_a_gpu_and_are_no_more_than_there_are_tiles() -> None:
    tile = MOST_KEYS
    assert splits_of(programs=32, room=4096, tile=tile, multiprocessors=132) * 32 >= 2 * 132
    assert splits_of(programs=4096, room=4096, tile=tile, multiprocessors=132) == 1
    assert splits_of(programs=1, room=tile, tile=tile, multiprocessors=132) == 1
    assert splits_of(programs=1, room=3 * tile, tile=tile, multiprocessors=132) == 3
    assert splits_of(programs=1, room=1 << 20, tile=tile, multiprocessors=132) == MOST_SPLITS


@pytest.mark.skipif(not INTERPRETED, reason="on the CPU such pages are refused")
def test_pages_and_lengths_that_the_kernel_does_not_find_are_nan() -> None:
    query, keys, values, pages, lengths = paged([9, 9, 9, 9])
    pages[1, 1], pages[2, 0] = len(keys), -1
    lengths[3] = pages.shape[1] * keys.shape[2] + 1
    for dtype in (torch.float32, torch.float64):  # the kernel, and the reference
        floats = [t.to(dtype) for t in (query, keys, values)]
        found = torch.ops.rooftop.paged_attention(*floats, pages, lengths, 0.25, None)
        assert not found[0].isnan().any()
        assert found[1:].isnan().all()
    for empty in (
        (keys[:0], values[:0], pages),
        (keys, values, pages[:, :0]),
        (keys[:, :, :0], values[:, :, :0], pages),
    ):
        found = torch.ops.rooftop.paged_attention(query, *empty, torch.tensor([0, 1, 0, 9]), 0.25, None)
        assert (found[::2] == 0).all()
        assert found[1::2].isnan().all()


def test_operator_checks_of_torch_library() -> None:
    torch.library.opcheck(torch.ops.rooftop.paged_attention.default, (*paged([5, 0, 9]), 0.25, None))
    torch.library.opcheck(torch.ops.rooftop.paged_attention.default, (*paged([5], 3, 3), 0.25, 5))
    torch.library.opcheck(torch.ops.rooftop.paged_attention.default, (*paged([9, 2], 3, 3), 0.25, None, 4))


def test_compiled_whole() -> None:
    tensors = paged([5, 13])
    compiled = torch.compile(lambda *t: paged_attention(*t) * 2, fullgraph=True, backend="aot_eager", dynamic=False)
    torch.testing.assert_close(compiled(*tensors), 2 * paged_attention(*tensors))


def test_cost_is_what_a_person_counts() -> None:
    query, keys, values, pages, lengths = paged([5, 12], heads=6, kv_heads=2, width=8, page=4)
    with CountingMode() as counted:
        paged_attention(query, keys, values, pages, lengths, positions=17)
        paged_attention(query, keys, values, pages, lengths)
    known, least = (r.cost for r in counted.records if r.name.startswith("rooftop"))
    assert known is not None
    assert least is not None
    assert known.total_flops == 17 * 6 * (4 * 8 + 5)
    assert known.read_bytes == 4 * query.numel() + 8 * 2 + 4 * 2 * 17 * 2 * 8 + 4 * 5  # five pages of the table
    assert known.write_bytes == 4 * query.numel()
    assert least.total_flops == 2 * 6 * (4 * 8 + 5)


def test_a_derivative_is_refused() -> None:
    query, keys, values, pages, lengths = paged([5, 12])
    with pytest.raises(NotImplementedError, match=r"paged_attention has no gradient: .* use attention for training"):
        paged_attention(query, keys.requires_grad_(), values, pages, lengths)
    with torch.no_grad():
        paged_attention(query, keys, values, pages, lengths)
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(lambda q: paged_attention(q, keys.detach(), values, pages, lengths), (query,), (query,))


QUERY, KEYS = torch.zeros(2, 4, 8), torch.zeros(5, 2, 3, 8)
PAGES, LENGTHS = torch.zeros(2, 2, dtype=torch.int64), torch.tensor([1, 6])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"query": [1.0]}, TypeError, "query must be a tensor, got list"),
        ({"pages": PAGES.float()}, TypeError, "pages must be int32 or int64, got torch.float32"),
        ({"query": QUERY.int()}, TypeError, "query must be bfloat16"),
        ({"values": KEYS.half()}, TypeError, "query is torch.float32, values torch.float16: convert one of them"),
        ({"keys": KEYS.to("meta")}, ValueError, "query is on cpu, keys on meta"),
        ({"query": QUERY[0]}, ValueError, r"expected query \(B, H, D\), D up to 256, got \(4, 8\)"),
        ({"query": QUERY[..., :7]}, ValueError, r"keys and values of one shape \(N, H_k, P, 7\)"),
        ({"query": QUERY[:, :3]}, ValueError, "the 2 heads of keys must divide the 3 heads of query"),
        ({"lengths": LENGTHS[:1]}, ValueError, r"expected pages \(2, W\) and lengths \(2,\)"),
        (
            {"lengths": torch.tensor([1, 7])},
            ValueError,
            "from 0 to 6, the capacity of 2 pages of 3 positions, got 1 to 7",
        ),
        ({"lengths": torch.tensor([-1, 2])}, ValueError, "got -1 to 2"),
        ({"pages": torch.tensor([[0, 1], [5, 0]])}, ValueError, "pages must be from 0 to 4, got 5"),
        ({"scale": "x"}, TypeError, "scale must be a number or None"),
        ({"scale": math.nan}, ValueError, "scale must be finite, got nan"),
        ({"positions": 1.5}, TypeError, "positions must be an int or None"),
        ({"positions": -1}, ValueError, "positions, a total over all sequences, must be 0 or more, got -1"),
    ],
)
def test_wrong_arguments(arguments: dict[str, object], error: type[Exception], message: str) -> None:
    given = {"query": QUERY, "keys": KEYS, "values": KEYS, "pages": PAGES, "lengths": LENGTHS}
    with pytest.raises(error, match=f"paged_attention: .*{message}"):
        paged_attention(**given | arguments)  # type: ignore[arg-type]


@pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted")
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 8, 71])
def test_kernels_compile_for_sm_90_without_spills(
    group: int, width: int, dtype: str, spilled_bytes: Callable[[str], int]
) -> None:
    triton = pytest.importorskip("triton")
    from rooftop.kernels.attentions.triton_kernels.paged_attentions import attend_pages

    config = paged_config(group, width, 2 if dtype == "bf16" else 4)
    constants = {"PAGE": 16, "GROUP": group, "ROWS": config.rows, "WIDTH": width, "BLOCK": width, "WIDEN": False}
    constants |= {"KEYS": config.keys, "SPLITS": 8}
    floats = {**dict.fromkeys(("query", "keys", "values", "out"), f"*{dtype}"), "partial": "*fp32", "scale": "fp32"}
    floats |= {"partial_lse": "*fp32", "pages": "*i64", "lengths": "*i64"}
    names = attend_pages.arg_names
    types = {name: "constexpr" if name in constants else floats.get(name, "i32") for name in names}
    whole = {f"{what}_{step}" for what in ("key", "value") for step in ("page", "head", "position")}
    aligned = [i for i, name in enumerate(names) if types[name].startswith("*") or name in whole | {"query_head"}]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = triton.compiler.ASTSource(attend_pages, types, constants, attributes)
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    options = {"num_warps": config.warps, "num_stages": config.stages}
    compiled = triton.compile(source, target=target, options=options)
    assert spilled_bytes(compiled.asm["ptx"]) == 0
    assert compiled.metadata.shared <= 99 * 1024, "the limit of a block's shared memory on the smallest current GPU"


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreted run")
def test_all_of_the_above_through_the_interpreter(interpreted: Callable[..., int]) -> None:
    assert interpreted(__file__, "-k", "not (operator_checks or compile or wrong_arguments or cost)") > 40


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 32), (32, 8), (12, 12), (64, 1), (71, 1)])
@pytest.mark.parametrize(
    ("lengths", "width", "page"),
    [([1, 70, 2000], 64, 16), ([5000], 128, 64), ([33] * 40, 80, 16), ([300, 0], 256, 48), ([999], 96, 1)],
)
def test_gate_on_a_gpu(
    lengths: list[int], width: int, page: int, heads: int, kv_heads: int, dtype: torch.dtype
) -> None:
    assert_gate(*paged(lengths, heads, kv_heads, width, page, dtype, "cuda"))


@pytest.mark.gpu
def test_a_graph_is_replayed_while_sequences_grow() -> None:
    query, keys, values, pages, _ = paged([500, 130], 8, 2, 64, 16, torch.bfloat16, "cuda")
    at = torch.tensor([1, 1], device="cuda")
    paged_attention(query, keys, values, pages, at)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = paged_attention(query, keys, values, pages, at)
    for length in (1, 100, 130):
        at.copy_(torch.tensor([length, 130]))
        with no_waiting_for_gpu():
            graph.replay()
        assert torch.equal(found, paged_attention(query, keys, values, pages, at))


@pytest.mark.gpu
@pytest.mark.large
def test_pages_beyond_two_billion_elements_on_a_gpu() -> None:
    query, keys, values, pages, lengths = paged([300], 8, 8, 128, 16, torch.bfloat16, "cuda")
    expected = paged_attention(query, keys, values, pages, lengths)
    far = (1 << 31) // (8 * 16 * 128) + 3
    for_all = [t.new_empty(far + len(t), *t.shape[1:]) for t in (keys, values)]
    for large, small in zip(for_all, (keys, values), strict=True):
        large[far:] = small
    moved = torch.where(pages < len(keys), pages + far, pages)
    assert torch.equal(paged_attention(query, *for_all, moved, lengths), expected)
