"""Softmax and cross entropy by clusters of blocks. The same kernels run on the CPU (`cuda_on_cpu`), with the same
launch code as on a GPU."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rooftop.errors import CompilationError
from rooftop.kernels import cross_entropy, log_softmax, softmax
from rooftop.kernels.losses import losses
from rooftop.kernels.operands.cuda_texts import cuda_text
from rooftop.kernels.operands.launch_data import Device
from rooftop.kernels.softmaxes import clusters as module
from rooftop.kernels.softmaxes import launches as softmax_launches
from rooftop.kernels.softmaxes import plans, softmaxes, tables
from rooftop.kernels.softmaxes.tables import ClusterConfig
from rooftop.launch import count_launches, cuda
from rooftop.testing import assert_as_accurate

ANY = 1 << 30
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
IGNORED = -100
# Blocks of a cluster, rows at a time in shared memory, and number of clusters that run at once. This number is small,
# so that rows are left for clusters that become free. "many" has the kernels of "three", but most clusters get no row.
# Each further shape takes the compilers seconds.
HALF, SINGLE = torch.bfloat16, torch.float32
HOPPER = Device(triton=True, processors=2, shared_bytes=1 << 20, cuda=9)
SHAPES = {"one": (1, 1, 1), "two": (2, 1, 2), "three": (3, 2, 2), "ahead": (4, 3, 1), "many": (3, 2, 99)}


# The dtypes and variants (logarithm of softmax, label smoothing of cross entropy) that the gates test. Compiling each
# of them takes most of a second. Each occurs with every shape, and each pair of them with some shape.
PLAIN_HALF, PLAIN_SINGLE = [(HALF, False), (SINGLE, True)], [(HALF, True), (SINGLE, False)]
OF_SOFTMAX = {"one": PLAIN_HALF, "two": PLAIN_SINGLE, "three": PLAIN_HALF, "ahead": PLAIN_SINGLE, "many": PLAIN_HALF}
OF_LOSSES = {"one": PLAIN_SINGLE, "two": PLAIN_SINGLE, "three": PLAIN_HALF, "ahead": PLAIN_SINGLE, "many": PLAIN_HALF}


def table(name: str) -> tuple[ClusterConfig, ...]:
    blocks, stages, _ = SHAPES[name]
    return tuple(ClusterConfig(0, ANY, blocks, 64, 4, stages, odd=odd) for odd in (False, True))


@pytest.fixture
def clusters(
    cuda_on_cpu: Counter[str], compile_for_cpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], Counter[str]]]:
    """Gives a function that turns clusters on and returns the launches."""
    monkeypatch.setattr(module, "is_installed", lambda: True)
    take_device(monkeypatch, HOPPER)
    for family in (softmaxes, losses):
        monkeypatch.setattr(family, "by_reference", lambda x: False)

    def turn_on(name: str) -> Counter[str]:
        names = [
            module.kernel_name(kernel, dtype, variant, config)
            for config in table(name)
            for kernel, pairs in (
                ("softmax", {*OF_SOFTMAX[name], (SINGLE, False), (HALF, False)}),
                ("softmax_backward", {*OF_SOFTMAX[name], (SINGLE, False)}),
                ("cross_entropy", OF_LOSSES[name]),
            )
            for dtype, variant in sorted(pairs, key=str)
        ]
        compile_for_cpu(cuda_text(*module.CUDA_FILES), names)
        kind = type(cuda.compile(cuda_text(*module.CUDA_FILES), names[0]))
        for one in ("CLUSTER_FORWARD", "CLUSTER_BACKWARD", "CLUSTER_FUSED"):
            monkeypatch.setattr(tables, one, table(name))
        plans.forget()
        monkeypatch.setattr(kind, "active_clusters", lambda *_: SHAPES[name][2])
        return cuda_on_cpu

    yield turn_on
    plans.forget()


def plan(table: tables.Table, x: Tensor, result: Tensor, facts: Device = HOPPER) -> module.Plan | None:
    """The plan of a table's clusters for these rows; None if they are not used."""
    rows = module.Rows(x.shape[1], (x.dtype, result.dtype), (module.start_of(x), module.start_of(result)))
    entry = module.entry_for(table, rows)
    found = module.planned(entry, rows, facts) if entry is not None else None
    return found if isinstance(found, module.Plan) else None


def take_device(monkeypatch: pytest.MonkeyPatch, facts: Device) -> None:
    for each in (module, plans):
        monkeypatch.setattr(each, "device_facts", lambda device: facts)


def rows(count: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(count + columns)
    return (2 * torch.randn(count, columns) + 1).to(dtype)


def softmax_both_ways(x: Tensor, dy: Tensor, scale: float, log: bool) -> list[Tensor]:
    y = softmax_launches.forward(x, None, scale, log, x.dtype)
    return [y, softmax_launches.backward(dy, y, None, scale, log, x.dtype)]


def by_torch(x: Tensor, dy: Tensor, scale: float, log: bool) -> list[Tensor]:
    x = x.detach().requires_grad_()
    y = (torch.log_softmax if log else torch.softmax)(x * scale, -1)
    return [y.detach(), torch.autograd.grad(y, x, dy)[0]]


@pytest.mark.parametrize(
    ("name", "columns", "dtype", "log"),
    [
        (name, columns, dtype, log)
        for name, columns in (
            *(("one", 1), ("two", 1024), ("ahead", 1001), ("three", 130), ("one", 1001), ("three", 1), ("many", 1024)),
        )
        for dtype, log in OF_SOFTMAX[name]
    ],
)
def test_gate_of_softmax(name: str, columns: int, dtype: torch.dtype, log: bool, clusters: Any) -> None:
    launches = clusters(name)
    x, scale = rows(7, columns, dtype), 0.7
    dy = torch.randn(7, columns).to(dtype)
    found = (softmax_both_ways(x, dy, scale, log), by_torch(x, dy, scale, log))
    for what, *values in zip(("y", "dx"), *found, by_torch(x.double(), dy.double(), scale, log), strict=True):
        assert_as_accurate(*values, what=f"{what} of {columns} {dtype}")
    assert launches == {"softmax_cluster": 1, "softmax_backward_cluster": 1}


def fused(x: Tensor, target: Tensor, terms: losses.Terms, inverse: Tensor | None) -> list[Tensor]:
    """Losses of float32 rows that are too long for a cluster are float64; the callers convert them."""
    dx = torch.full_like(x, math.nan).contiguous()
    return [losses.losses_of_rows(x, target, terms, inverse, dx)[0].float(), dx]


def losses_by_torch(x: Tensor, target: Tensor, terms: losses.Terms, inverse: float) -> list[Tensor]:
    x = x.detach().requires_grad_()
    loss = F.cross_entropy(
        x, target, ignore_index=terms.ignore_index, label_smoothing=terms.label_smoothing, reduction="none"
    )
    loss = loss + terms.z_loss * x.logsumexp(1).square() * (target != terms.ignore_index)
    return [loss.detach(), torch.autograd.grad(loss.sum() * inverse, x)[0]]


@pytest.mark.parametrize(
    ("name", "columns", "dtype", "smoothed"),
    [
        (name, columns, dtype, smoothed)
        for name, columns in (
            *(("one", 40), ("two", 1024), ("ahead", 1001), ("three", 130), ("three", 40), ("one", 1001)),
            ("many", 1024),
        )
        for dtype, smoothed in OF_LOSSES[name]
    ],
)
def test_gate_of_cross_entropy(name: str, columns: int, dtype: torch.dtype, smoothed: bool, clusters: Any) -> None:
    smoothing, z_loss = (0.1, 1e-2) if smoothed else (0.0, 0.0)
    launches = clusters(name)
    x, target = rows(13, columns, dtype), torch.randint(columns, (13,))
    target[[1, 2, 7, 12]] = IGNORED
    target[0], target[3] = columns - 1, 0
    terms = losses.Terms(None, IGNORED, smoothing, z_loss)
    ours = fused(x, target, terms, torch.tensor(0.125))
    plain = [losses_by_torch(x.float(), target, terms, 0.125)[0], losses_by_torch(x, target, terms, 0.125)[1]]
    exact = losses_by_torch(x.double(), target, terms, 0.125)
    for what, *values in zip(("losses", "dx"), ours, plain, exact, strict=True):
        assert_as_accurate(*values, what=f"{what} of {columns} {dtype}")
    assert launches == {"cross_entropy_cluster": 1}


@pytest.mark.parametrize("name", ["one", "two", "ahead"])
@pytest.mark.parametrize(("columns", "apart"), [(1001, 0), (1001, 23), (1001, 2), (1024, 0)])
def test_the_gradient_may_take_the_place_of_the_logits(columns: int, apart: int, name: str, clusters: Any) -> None:
    """Rows may have gaps of `apart` elements, which stay unchanged."""
    launches = clusters(name)
    x, target = rows(9, columns, torch.bfloat16), torch.randint(columns, (9,))
    around = torch.full((9, columns + apart), math.nan, dtype=x.dtype)
    x = around[:, :columns].copy_(x)
    target[4] = IGNORED
    terms = losses.Terms(None, IGNORED, 0.1, 1e-3)
    expected = fused(x.contiguous(), target, terms, None)
    found = losses.losses_of_rows(x, target, terms, None, x)[0]
    assert launches["cross_entropy_cluster"] == 2
    exactly = {"rtol": 0, "atol": 0} if apart == 0 else {}  # rows with gaps are summed in another order
    torch.testing.assert_close([found, x], expected, **exactly)
    assert around[:, columns:].isnan().all()


@pytest.mark.parametrize("name", ["one", "two"])
def test_certain_rows_large_offsets_and_targets_that_are_no_class(name: str, clusters: Any) -> None:
    clusters(name)
    x, target = rows(6, 500), torch.arange(6)
    x[0, 0] += 30
    x[1] += 1e4
    terms = losses.Terms(None, IGNORED, 0.0, 0.0)
    ours, exact = fused(x, target, terms, None), losses_by_torch(x.double(), target, terms, 1.0)
    for mine, truth in zip(ours, exact, strict=True):
        torch.testing.assert_close(mine.double(), truth, rtol=1e-5, atol=1e-6)
    target[2], target[3] = 500, -1
    wrong = fused(x, target, terms, None)
    assert all(t[2:4].isnan().all() for t in wrong)
    assert all(torch.equal(a[[0, 1, 4, 5]], b[[0, 1, 4, 5]]) for a, b in zip(wrong, ours, strict=True))


@pytest.mark.parametrize("name", ["one", "three"])
@pytest.mark.parametrize("log", [False, True])
def test_infinities_and_nan_do_what_they_do_in_pytorch(log: bool, name: str, clusters: Any) -> None:
    clusters(name)
    x = rows(7, 333)
    x[1, 3], x[2, 4], x[4, ::2], x[6, 0] = math.nan, math.inf, -math.inf, -math.inf
    x[3] = -math.inf
    x[5] -= 300  # one block of the cluster has only excluded elements (-inf)
    x[5, :166] = -math.inf
    y = softmax_launches.forward(x, None, 1.0, log, x.dtype)
    expected = torch.log_softmax(x, -1) if log else torch.softmax(x, -1)
    torch.testing.assert_close(y, expected, equal_nan=True, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["one", "three"])
@pytest.mark.parametrize("log", [False, True])
def test_rows_at_the_ends_of_the_range(log: bool, name: str, clusters: Any) -> None:
    clusters(name)
    highest = torch.finfo(torch.float32).max
    x = rows(5, 333)
    x[0], x[1, 7], x[2, 9], x[3, 5:] = -highest, 3e38, -highest, -highest
    x[4, :200] = highest
    y = softmax_launches.forward(x, None, 1.0, log, x.dtype)
    torch.testing.assert_close(y, torch.log_softmax(x, -1) if log else torch.softmax(x, -1), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("scale", [0.0, 1e-300, 1e-45, 1e39])
def test_scales_that_are_no_normal_float32_go_to_triton(
    scale: float, clusters: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clusters("one")
    monkeypatch.setattr(module, "softmax_forward", lambda *_: pytest.fail("clusters were launched"))
    monkeypatch.setattr(softmax_launches, "launch", lambda *_, **__: None)
    softmax_launches.forward(rows(2, 40), None, scale, False, torch.float32)


@pytest.mark.parametrize("name", ["one", "three"])
def test_a_row_of_nan_leaves_its_neighbours_alone(name: str, clusters: Any) -> None:
    """Rows of 333 elements share 16-byte groups."""
    clusters(name)
    x, dy = rows(5, 333), torch.randn(5, 333)
    expected = softmax_both_ways(x, dy, 1.0, False)
    x[2] = math.nan
    for found, clean in zip(softmax_both_ways(x, dy, 1.0, False), expected, strict=True):
        assert found[2].isnan().all()
        assert torch.equal(found[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


def test_rows_apart_and_four_runs_alike(clusters: Any) -> None:
    launches = clusters("ahead")
    base = rows(12, 1024, torch.bfloat16)
    x = base[::2, 8:520]  # an offset of 16 bytes, and rows 4 KiB apart
    first, *others = [softmax_launches.forward(x, None, 1.0, False, x.dtype) for _ in range(4)]
    assert_as_accurate(first, torch.softmax(x, -1), torch.softmax(x.double(), -1))
    assert all(torch.equal(first, other) for other in others)
    assert launches == {"softmax_cluster": 4}


@pytest.mark.parametrize(
    ("x", "dtype"),
    [
        (torch.randn(4, 64).half()[:, 1:33], torch.float16),  # begins at another offset than the result
        (torch.randn(4, 64).half(), torch.float32),
        (torch.randn(4, 64).double(), torch.float64),
        (torch.randn(4, 1 << 18), torch.float32),  # more than shared memory holds
    ],
)
def test_what_clusters_do_not_serve(x: Tensor, dtype: torch.dtype, clusters: Any) -> None:
    clusters("one")
    facts = HOPPER._replace(shared_bytes=SHARED_BYTES)
    assert plan(tables.CLUSTER_FORWARD, x, torch.empty(x.shape, dtype=dtype), facts) is None


def test_the_table_decides_by_bytes_and_by_where_rows_begin(clusters: Any) -> None:
    clusters("one")
    entries = (
        ClusterConfig(100, 200, 1, 32, 1),
        ClusterConfig(200, 400, 2, 32, 1),
        ClusterConfig(0, 400, 4, 32, 1, odd=True),
    )
    for columns, blocks in ((48, None), (56, 1), (96, 1), (104, 2), (192, 2), (200, 4), (208, None), (33, 4)):
        x = torch.zeros(2, columns - (columns == 200), dtype=torch.float16)
        found = plan(entries, x, x.clone())
        assert (found.config.blocks if found else None) == blocks, columns
    assert plan((), torch.zeros(2, 96), torch.zeros(2, 96)) is None


def test_odd_rows_but_those_that_begin_at_multiples_of_some_bytes(clusters: Any) -> None:
    clusters("one")
    entries = (tables.OddRows(0, ANY, unless=4),)
    for columns, served in ((2048, False), (2052, False), (2050, False), (2049, True)):
        x = torch.zeros(2, columns, dtype=torch.float16)
        assert (plan(entries, x, x.clone()) is not None) == served, columns
    padded = torch.zeros(2, 2056, dtype=torch.float16)[:, :2049]  # rows are whole groups apart, and end within a group
    assert plan((tables.OddRows(0, ANY),), padded, padded) is not None
    assert plan(entries, padded, padded) is None


SHARED_BYTES = 232_448  # bytes for a block on an H200


@pytest.mark.parametrize(("table", "tensors"), [("CLUSTER_FORWARD", 1), ("CLUSTER_BACKWARD", 2), ("CLUSTER_FUSED", 1)])
@pytest.mark.parametrize("element_bytes", [2, 4])
def test_the_longest_rows_of_each_entry_fit(table: str, tensors: int, element_bytes: int) -> None:
    for entry in getattr(tables, table):
        plan = module._planned(entry, entry.row_bytes // element_bytes, element_bytes, tensors, SHARED_BYTES)
        assert plan is not None, entry
        assert entry.stages + 2 <= 8, entry  # row counts that are remembered


@given(groups=st.integers(1, 1 << 15), tensors=st.integers(1, 2), stages=st.integers(1, 2))
def test_odd_rows_get_clusters_that_hold_them(groups: int, tensors: int, stages: int) -> None:
    """From 400 groups on, there is a cluster in which at most a quarter of the lanes have no group."""
    found = module.fullest(groups, tensors, stages, SHARED_BYTES)
    for config in found:
        part_groups = -(-groups // config.blocks)
        assert config.threads * config.held >= part_groups
        assert config.threads % 32 == 0
        assert module._shared_bytes(config.blocks, stages, tensors, part_groups) <= SHARED_BYTES
    assert groups < 400 or groups / (found[0].blocks * found[0].threads * found[0].held) > 0.75


def test_rows_that_no_cluster_holds_are_not_planned(clusters: Any) -> None:
    clusters("one")
    assert module.fullest(16 * 512 * 8 + 1, 1, 1, SHARED_BYTES) == []
    x = torch.zeros(2, 10_001)
    assert plan((tables.OddRows(0, ANY),), x, x.clone(), HOPPER._replace(shared_bytes=2048)) is None


def test_odd_rows_of_every_length_by_the_clusters_that_fit_them(clusters: Any, monkeypatch: Any) -> None:
    launches = clusters("one")
    take_device(monkeypatch, HOPPER._replace(shared_bytes=SHARED_BYTES))
    monkeypatch.setattr(tables, "CLUSTER_FORWARD", (tables.OddRows(0, ANY),))
    x = rows(5, 1543)
    assert_as_accurate(softmax_launches.forward(x, None, 1.0, False, x.dtype), x.softmax(-1), x.double().softmax(-1))
    assert launches == {"softmax_cluster": 1}


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_compile_for_sm_90_without_spills_and_nothing_older(dtype: torch.dtype) -> None:
    pytest.importorskip("cuda.core")
    kernels = (("softmax", 1), ("softmax_backward", 2), ("cross_entropy", 1))
    for (kernel, tensors), variant in itertools.product(kernels, (False, True)):
        config = ClusterConfig(0, ANY, 8, 512, 8)
        name = module.kernel_name(kernel, dtype, variant, config)
        compiled = cuda.compile(cuda_text(*module.CUDA_FILES), name, arch="sm_90")
        plan = module._planned(config, 262_144 // dtype.itemsize, dtype.itemsize, tensors, SHARED_BYTES)
        assert plan is not None
        compiled.check(16, config.threads, plan.shared_bytes, config.blocks)
        assert compiled.binary.spill_bytes <= 64, compiled  # a few words shared by all rows
        assert compiled.max_threads_per_block >= 512
    with pytest.raises(CompilationError, match="clusters and bulk copies need sm_90"):
        cuda.compile(cuda_text(*module.CUDA_FILES), "softmax_cluster<float, false, 512, 8, 4, 2, true>", arch="sm_80")


def test_memory_is_read_in_bulk_and_written_16_bytes_at_a_time() -> None:
    pytest.importorskip("cuda.core")
    ptx = cuda.compile(
        cuda_text(*module.CUDA_FILES), "softmax_cluster<__nv_bfloat16, false, 512, 8, 4, 2, true>", arch="sm_90"
    ).ptx
    for instruction in ("cp.async.bulk.shared::cluster.global", "ld.shared.v4.u32", "st.global.v4.b32"):
        assert instruction in ptx, instruction
    assert "ld.global" not in ptx


GPU_SIZES = [1000, 16_384, 32_768, 50_257, 65_536, 128_256, 262_144]
GPU_SHAPES = {"four": (4, 512, 8, 1), "eight": (8, 512, 8, 1), "ahead": (8, 256, 8, 2)}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", GPU_SIZES)
@pytest.mark.parametrize("name", GPU_SHAPES)
def test_gate_on_a_gpu(name: str, columns: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    both = tuple(ClusterConfig(0, ANY, *GPU_SHAPES[name], odd=odd) for odd in (False, True))
    for one in ("CLUSTER_FORWARD", "CLUSTER_BACKWARD", "CLUSTER_FUSED"):
        monkeypatch.setattr(tables, one, both)
    x, dy = rows(301, columns, dtype).cuda(), torch.randn(301, columns, device="cuda").to(dtype)
    with count_launches() as launches:
        for log in (False, True):
            found = (softmax_both_ways(x, dy, 0.7, log), by_torch(x, dy, 0.7, log))
            for values in zip(*found, by_torch(x.double(), dy.double(), 0.7, log), strict=True):
                assert_as_accurate(*values)
        target = torch.randint(columns, (301,), device="cuda")
        target[::7] = IGNORED
        terms = losses.Terms(None, IGNORED, 0.1, 1e-3)
        plain = [losses_by_torch(x.float(), target, terms, 1.0)[0], losses_by_torch(x, target, terms, 1.0)[1]]
        exact = losses_by_torch(x.double(), target, terms, 1.0)
        for values in zip(fused(x, target, terms, None), plain, exact, strict=True):
            assert_as_accurate(*values)
    found_kernels = {kernel.partition("<")[0] for kernel in launches}
    if columns * dtype.itemsize <= 1 << 17:  # the row fits into the clusters of all three kernels
        assert {"softmax_cluster", "softmax_backward_cluster", "cross_entropy_cluster"} <= found_kernels


@pytest.mark.gpu
def test_public_functions_use_clusters_where_the_table_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for one in ("CLUSTER_FORWARD", "CLUSTER_BACKWARD", "CLUSTER_FUSED"):
        monkeypatch.setattr(tables, one, (ClusterConfig(0, ANY, 4, 512, 8),))
    x = rows(64, 32_768, torch.bfloat16).cuda().requires_grad_()
    target = torch.randint(32_768, (64,), device="cuda")
    with count_launches() as launches:
        for function in (softmax, log_softmax):
            function(x).sum().backward()
        cross_entropy(x, target).backward()
    assert {name.partition("<")[0] for name in launches} >= {
        "softmax_cluster",
        "softmax_backward_cluster",
        "cross_entropy_cluster",
    }


@pytest.mark.gpu
def test_captured_in_a_cuda_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "CLUSTER_FORWARD", (ClusterConfig(0, ANY, 1, 512, 8),))
    x = rows(1024, 32_768, torch.bfloat16).cuda()  # more rows than clusters
    softmax(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = softmax(x)
    x.normal_()
    graph.replay()
    torch.testing.assert_close(y, torch.softmax(x, -1))
