"""The norms' kernels for staged rows, their launch parameters, and runs on a GPU. On the CPU (`cuda_on_cpu`), a Triton
kernel adds up their partial sums, which needs Triton's interpreter. So these tests run together with the interpreted
tests of `test_norms.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rooftop.kernels import layer_norm, rms_norm
from rooftop.kernels.norms import clusters as norm_clusters
from rooftop.kernels.norms import plans, tables
from rooftop.kernels.norms.clusters import kernel_name, layout
from rooftop.kernels.norms.tables import ClusterConfig
from rooftop.kernels.operands.cuda_texts import cuda_text
from rooftop.launch import INTERPRETED, count_launches, cuda
from rooftop.testing import assert_as_accurate

BFLOAT16, HALF, SINGLE = torch.bfloat16, torch.float16, torch.float32
FORWARD, BACKWARD = "norm_forward_staged", "norm_backward_staged"
NOTHING_ELSE = {FORWARD: 1, BACKWARD: 1}
in_interpreted_run = pytest.mark.skipif(not INTERPRETED, reason="runs within test_norms.py")


def inputs_of(name: str, rows: int, columns: int, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """dy, x, weight, and for a layer norm the bias."""
    torch.manual_seed(rows + columns)
    full = [torch.randn(rows, columns), 2 * torch.randn(rows, columns) + 1]
    short = [torch.randn(columns) for _ in range(2 if name == "layer_norm" else 1)]
    return [t.to(dtype).to(device) for t in full + short]


def results(norm: Callable[..., Tensor], dy: Tensor, *inputs: Tensor) -> list[Tensor]:
    """y, and the gradients of x, weight and bias."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    y = norm(leaves[0], leaves[0].shape[-1:], *leaves[1:], eps=1e-5)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


OURS: dict[str, Callable[..., Tensor]] = {"layer_norm": layer_norm, "rms_norm": rms_norm}
EAGER: dict[str, Callable[..., Tensor]] = {"layer_norm": F.layer_norm, "rms_norm": F.rms_norm}


def assert_gate(name: str, inputs: list[Tensor]) -> None:
    found, plain = results(OURS[name], *inputs), results(EAGER[name], *inputs)
    exact = results(EAGER[name], *(t.double() for t in inputs))
    for what, *values in zip(("y", "dx", "dweight", "dbias"), found, plain, exact, strict=False):
        assert_as_accurate(*values, what=f"{name}: {what} of {tuple(inputs[1].shape)} {inputs[1].dtype}")


@pytest.fixture
def take(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[ClusterConfig], None]]:
    """Set one entry in both tables."""

    def entry(config: ClusterConfig) -> None:
        forget()
        monkeypatch.setattr(tables, "CLUSTER_FORWARD", (config,))
        monkeypatch.setattr(tables, "CLUSTER_BACKWARD", (config,))

    yield entry
    forget()


def forget() -> None:
    """Forget that the kernels were checked on the CPU, because a GPU runs other code."""
    plans.forget()
    norm_clusters.ready.cache_clear()


def config(blocks: int, warps: int, stages: int) -> ClusterConfig:
    return ClusterConfig(1, 1000, blocks, warps, stages=stages)


# A single block with one warp and with two; rows that fill a part of the last chunk; clusters whose last blocks have
# less work or none (40 columns are five groups for eight blocks); odd rows, and rows of whole groups.
CASES: list[tuple[str, int, int, torch.dtype, ClusterConfig, int]] = [
    ("layer_norm", 16, 131, BFLOAT16, config(1, 1, 2), 1),
    ("layer_norm", 40, 901, BFLOAT16, config(2, 1, 3), 2),
    ("rms_norm", 24, 517, HALF, config(1, 2, 2), 2),
    ("layer_norm", 9, 40, HALF, config(8, 1, 3), 1),
]


@pytest.fixture
def compiled(compile_for_cpu: Callable[[str, Sequence[str]], None]) -> None:
    names = [
        kernel_name(kernel, entry, dtype, dtype, chunks, name == "rms_norm")
        for name, _, _, dtype, entry, chunks in CASES
        for kernel in (FORWARD, BACKWARD)
    ]
    compile_for_cpu(cuda_text(*norm_clusters.CUDA_FILES), names)


@in_interpreted_run
@pytest.mark.parametrize(("name", "rows", "columns", "dtype", "entry", "chunks"), CASES)
def test_gate(
    name: str,
    rows: int,
    columns: int,
    dtype: torch.dtype,
    entry: ClusterConfig,
    chunks: int,
    take: Any,
    compiled: None,
    cuda_on_cpu: Counter[str],
) -> None:
    take(entry)
    assert_gate(name, inputs_of(name, rows, columns, dtype))
    assert cuda_on_cpu == NOTHING_ELSE


@in_interpreted_run
def test_without_parameters_views_and_rows_that_eight_does_not_divide(
    take: Any, compiled: None, cuda_on_cpu: Counter[str]
) -> None:
    take(CASES[0][4])
    with count_launches() as triton:
        assert_gate("layer_norm", inputs_of("layer_norm", 19, 131, BFLOAT16))
    assert not {"norm_forward", "norm_backward"} & triton.keys()
    assert set(cuda_on_cpu) == set(NOTHING_ELSE)
    cuda_on_cpu.clear()
    x = torch.randn(16, 144).bfloat16()[:, :136]
    torch.testing.assert_close(layer_norm(x, 136), torch.layer_norm(x, [136]))
    assert cuda_on_cpu[FORWARD] == 1
    for other in (torch.randn(16, 139).bfloat16()[:, :131], torch.randn(16 * 131 + 1).bfloat16()[1:].view(16, 131)):
        layer_norm(other, 131)
    layer_norm(torch.randn(16, 131), 131)
    assert cuda_on_cpu[FORWARD] == 1, "bulk copies cannot fetch these rows"


# Rows share groups of elements with their neighbours, whose elements must not be used.
@in_interpreted_run
def test_a_bad_row_stays_alone_and_runs_are_alike(take: Any, compiled: None, cuda_on_cpu: Counter[str]) -> None:
    take(CASES[1][4])
    x = torch.randn(16, 901).bfloat16()
    x[1, 3], x[4, 0], x[6, -1] = float("nan"), float("inf"), float("nan")
    y = layer_norm(x, 901)
    assert y[[1, 4, 6]].isnan().all()
    good = torch.nn.functional.layer_norm(x[[0, 2, 3, 5, 7]].float(), (901,))
    torch.testing.assert_close(y[[0, 2, 3, 5, 7]].float(), good, rtol=1e-2, atol=1e-2)
    inputs = inputs_of("layer_norm", 16, 901, BFLOAT16)
    first, second = (results(layer_norm, *inputs) for _ in range(2))
    assert all(map(torch.equal, first, second))


@in_interpreted_run
def test_a_large_offset_does_not_swamp_the_variance(take: Any, compiled: None, cuda_on_cpu: Counter[str]) -> None:
    take(CASES[1][4])
    x = (1024 + 4 * torch.randn(8, 901).round()).bfloat16()  # multiples of 4 up to 1024, multiples of 8 above
    assert_gate(
        "layer_norm", [torch.randn(8, 901).bfloat16(), x, torch.ones(901).bfloat16(), torch.zeros(901).bfloat16()]
    )
    assert cuda_on_cpu == NOTHING_ELSE


def test_stages_and_blocks_fit_in_shared_memory() -> None:
    limit = 232_448
    assert layout(ClusterConfig(1, 16_384, 1, 16), 16_384, 4, 2, limit) == (2048, 4, 3)
    # float32 weights need more memory
    assert layout(ClusterConfig(1, 16_384, 1, 16, 1, 8), 16_384, 4, 4, limit)[2] == 2
    assert layout(ClusterConfig(1, 50_257, 4, 13), 50_257, 2, 4, limit) == (1571, 4, 3)
    assert layout(ClusterConfig(1, 262_144, 1, 32), 262_144, 2, 4, limit)[2] < 1


@pytest.mark.parametrize("rms", [False, True])
def test_kernels_compile_without_spills(rms: bool) -> None:
    pytest.importorskip("cuda.core")
    for name, chunks, blocks, warps in ((FORWARD, 4, 8, 32), (BACKWARD, 4, 1, 16), (BACKWARD, 2, 1, 32)):
        entry = ClusterConfig(1, 1 << 20, blocks, warps)
        for parameter in (BFLOAT16, SINGLE):
            kernel = cuda.compile(
                cuda_text(*norm_clusters.CUDA_FILES),
                kernel_name(name, entry, BFLOAT16, parameter, chunks, rms),
                arch="sm_90",
            )
            kernel.check(8 * blocks, 32 * warps, 200_000, blocks)
            # If a thread has only 64 registers, some constants are read again for each row.
            assert kernel.binary.spill_bytes <= (64 if warps == 32 else 0), kernel


@pytest.mark.parametrize("name", [FORWARD, BACKWARD])
def test_memory_is_read_in_bulk_and_written_16_bytes_at_a_time(name: str) -> None:
    pytest.importorskip("cuda.core")
    kernel = kernel_name(name, ClusterConfig(1, 1 << 20, 1, 16), BFLOAT16, BFLOAT16, 4, False)
    ptx = cuda.compile(cuda_text(*norm_clusters.CUDA_FILES), kernel, arch="sm_90").ptx
    for instruction in ("cp.async.bulk.shared::cluster.global", "ld.shared.v4.u32", "st.global.v4.b32"):
        assert instruction in ptx, instruction


GPU_CASES = [
    (1001, ClusterConfig(1, 1 << 20, 1, 1, 12)),
    (2601, ClusterConfig(1, 1 << 20, 1, 4, 4)),
    (16_384, ClusterConfig(1, 1 << 20, 1, 16)),
    (16_383, ClusterConfig(1, 1 << 20, 2, 9)),
    (50_257, ClusterConfig(1, 1 << 20, 4, 13)),
    (50_256, ClusterConfig(1, 1 << 20, 8, 7, 2)),
]


@pytest.mark.parametrize(("columns", "entry"), GPU_CASES)
def test_what_is_tested_on_a_gpu_is_taken_there(columns: int, entry: ClusterConfig) -> None:
    for element_bytes, parameter_bytes in ((2, 4), (4, 2)):  # forward, backward
        _, chunks, stages = layout(entry, columns, element_bytes, parameter_bytes, 232_448)
        assert chunks <= norm_clusters.MOST_CHUNKS
        assert stages >= 2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BFLOAT16, HALF])
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize(("columns", "entry"), GPU_CASES)
def test_gate_on_a_gpu(columns: int, entry: ClusterConfig, name: str, dtype: torch.dtype, take: Any) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs bulk copies and clusters of Hopper")
    take(entry)
    with count_launches() as launches:
        assert_gate(name, inputs_of(name, 1000, columns, dtype, "cuda"))
    assert {kernel.partition("<")[0] for kernel in launches} == {FORWARD, BACKWARD, "add_partial_sums"}


@pytest.mark.gpu
def test_ten_runs_give_the_same_bits_on_a_gpu(take: Any) -> None:
    take(GPU_CASES[4][1])
    inputs = inputs_of("layer_norm", 1000, 50_257, BFLOAT16, "cuda")
    first, *others = (results(layer_norm, *inputs) for _ in range(10))
    assert all(all(map(torch.equal, first, other)) for other in others)
