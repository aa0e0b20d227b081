"""The fused layer norm in CUDA C++: the reference, and the kernels themselves on the CPU (`cuda_on_cpu`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rooftop.cost import CountingMode
from rooftop.kernels import add_layer_norm_cuda, layer_norm
from rooftop.kernels.norms import cuda_norms as module
from rooftop.kernels.operands.cuda_texts import cuda_text
from rooftop.launch import count_launches, cuda
from rooftop.testing import assert_as_accurate

HALVES = [torch.bfloat16, torch.float16]
Inputs = list[Tensor | None]  # x, residual, input_bias, weight, bias


def tensors(rows: int, columns: int, dtype: torch.dtype, absent: tuple[int, ...] = ()) -> Inputs:
    torch.manual_seed(rows + columns)
    shapes = [(rows, columns), (rows, columns), (columns,), (columns,), (columns,)]
    return [None if i in absent else (torch.randn(shape) + 0.5).to(dtype) for i, shape in enumerate(shapes)]


def ours(
    x: Tensor, residual: Tensor | None, input_bias: Tensor | None, *parameters: Tensor | None
) -> tuple[Tensor, Tensor]:
    return add_layer_norm_cuda(x, residual, x.shape[-1], *parameters, input_bias=input_bias)


def eager(
    x: Tensor, residual: Tensor | None, input_bias: Tensor | None, *parameters: Tensor | None
) -> tuple[Tensor, Tensor]:
    total = x if input_bias is None else x + input_bias
    total = total if residual is None else total + residual
    return F.layer_norm(total, x.shape[-1:], *parameters), total


def results(function: object, inputs: Inputs, dy: Tensor, dtotal: Tensor) -> list[Tensor]:
    """y, total, and the gradients of all inputs that exist."""
    leaves = [t.detach().clone().requires_grad_() if t is not None else None for t in inputs]
    y, total = function(*leaves)  # type: ignore[operator]
    torch.autograd.backward([y, total], [dy.to(y.dtype), dtotal.to(y.dtype)])
    return [y.detach(), total.detach(), *(t.grad for t in leaves if t is not None and t.grad is not None)]


def assert_gate(inputs: Inputs, device: str = "cpu") -> None:
    inputs = [t.to(device) if t is not None else None for t in inputs]
    assert inputs[0] is not None
    dy, dtotal = torch.randn_like(inputs[0]), torch.randn_like(inputs[0])
    exact = [t.double() if t is not None else None for t in inputs]
    found = (results(ours, inputs, dy, dtotal), results(eager, inputs, dy, dtotal))
    names = [
        "y",
        "total",
        "dx",
        *(
            n
            for n, t in zip(("dresidual", "dinput_bias", "dweight", "dbias"), inputs[1:], strict=True)
            if t is not None
        ),
    ]
    for name, *values in zip(names, *found, results(eager, exact, dy.double(), dtotal.double()), strict=True):
        assert_as_accurate(*values, what=f"{name} of {tuple(inputs[0].shape)} {inputs[0].dtype}")


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("shape", [(5, 7), (33, 768), (9, 1000), (2, 3, 64)])
def test_gate(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = tensors(1, 1, dtype)
    torch.manual_seed(sum(shape))
    inputs = [torch.randn(shape if i < 2 else shape[-1:]).to(dtype) for i in range(5)]
    assert_gate(inputs)


# One shape for each way to process rows: several rows in a block of one warp, several warps, rows longer than a tile;
# packs of eight, four and two elements, and single elements.
WAYS = [
    (7, 200, torch.bfloat16, "add_layer_norm<__nv_bfloat16, __nv_bfloat16, 8, 1, 1>"),
    (67, 1, torch.bfloat16, "add_layer_norm<__nv_bfloat16, __nv_bfloat16, 1, 8, 1>"),
    (5, 1004, torch.float16, "add_layer_norm<__half, __half, 4, 8, 1>"),
    (3, 1026, torch.float16, "add_layer_norm<__half, __half, 2, 8, 4>"),
    (3, 333, torch.float32, "add_layer_norm<float, float, 1, 16, 1>"),
    (2, 16_392, torch.bfloat16, "add_layer_norm_long<__nv_bfloat16, __nv_bfloat16, 8, 32>"),
]
OTHERS = [
    "add_layer_norm<__nv_bfloat16, float, 1, 8, 1>",
    "add_layer_norm<float, float, 1, 32, 1>",
    "add_layer_norm<float, float, 2, 4, 1>",
    "add_layer_norm_long<float, float, 4, 32>",
]


@pytest.fixture
def launches(compile_for_cpu: Callable[[str, Sequence[str]], None], cuda_on_cpu: Counter[str]) -> Counter[str]:
    """The launches on the CPU, whose kernels are compiled together."""
    compile_for_cpu(cuda_text(*module.CUDA_FILES), [*(kernel for *_, kernel in WAYS), *OTHERS])
    return cuda_on_cpu


@pytest.mark.parametrize(("rows", "columns", "dtype", "kernel"), WAYS)
def test_gate_of_the_kernels_on_the_cpu(
    rows: int, columns: int, dtype: torch.dtype, kernel: str, launches: Counter[str]
) -> None:
    inputs = tensors(rows, columns, dtype)
    assert module.kernel_for(inputs[0], inputs[1], inputs[2:])[0] == kernel  # type: ignore[arg-type]
    assert_gate(inputs)
    assert launches == {kernel.partition("<")[0]: 1}


@pytest.mark.parametrize("absent", [(1,), (2,), (3, 4), (1, 2)])
def test_what_is_not_given_is_left_out(absent: tuple[int, ...], launches: Counter[str]) -> None:
    inputs = tensors(3, 64, torch.bfloat16, absent)
    y, total = ours(*inputs)  # type: ignore[arg-type]
    exact = eager(*(t.double() if t is not None else None for t in inputs))  # type: ignore[arg-type]
    plain = eager(*inputs)  # type: ignore[arg-type]
    assert_as_accurate(y, plain[0], exact[0])
    assert_as_accurate(total, plain[1], exact[1])
    assert launches == {"add_layer_norm": 1}


def test_nothing_added_is_the_twin_and_its_sum_is_x() -> None:
    x, _, _, weight, bias = tensors(6, 96, torch.float16)
    assert x is not None
    y, total = add_layer_norm_cuda(x, None, 96, weight, bias)
    assert torch.equal(y, layer_norm(x, 96, weight, bias))
    assert total is x


def test_views_float32_parameters_and_rows_that_are_misaligned(launches: Counter[str]) -> None:
    base, residual = torch.randn(6, 40).bfloat16(), torch.randn(34, 6).bfloat16().t()
    weight, bias = torch.randn(34), torch.randn(34)
    x = base[:, 3:37]
    y, total = add_layer_norm_cuda(x, residual, 34, weight, bias)
    doubles = [t.double() for t in (x, residual)]
    exact = F.layer_norm(doubles[0] + doubles[1], (34,), weight.double(), bias.double())
    assert_as_accurate(y, exact.bfloat16(), exact)
    assert torch.equal(total, x + residual)
    assert launches == {"add_layer_norm": 1}


def test_a_large_offset_does_not_swamp_the_variance(launches: Counter[str]) -> None:
    torch.manual_seed(0)
    x = 1e4 + torch.randn(9, 777)
    exact = F.layer_norm(x.double(), (777,))
    assert_as_accurate(add_layer_norm_cuda(x, None, 777)[0], F.layer_norm(x, (777,)), exact)
    long = 1e4 + torch.randn(1, 16_400)  # the mean, near 1e4, is rounded to 1e-3
    exact = F.layer_norm(long.double(), (16_400,)).float()
    torch.testing.assert_close(add_layer_norm_cuda(long, None, 16_400)[0], exact, rtol=1e-3, atol=2e-3)


def test_a_bad_row_stays_alone_and_runs_are_alike(launches: Counter[str]) -> None:
    x, residual = torch.randn(5, 50), torch.randn(5, 50)
    x[1, 3], x[4, 0] = float("nan"), float("inf")
    first, second = (add_layer_norm_cuda(x, residual, 50)[0] for _ in range(2))
    assert first[[1, 4]].isnan().all()
    torch.testing.assert_close(first[[0, 2, 3]], F.layer_norm((x + residual)[[0, 2, 3]], (50,)), rtol=1e-5, atol=1e-5)
    assert torch.equal(first.nan_to_num(), second.nan_to_num())


def test_no_rows() -> None:
    x = torch.randn(0, 16, requires_grad=True)
    y, total = add_layer_norm_cuda(x, x, 16)
    (y.sum() + total.sum()).backward()
    assert x.grad is not None
    assert y.shape == total.shape == x.grad.shape == (0, 16)


def test_rows_of_no_elements(launches: Counter[str]) -> None:
    x = torch.empty(3, 0, requires_grad=True)
    y, total = add_layer_norm_cuda(x, x, 0, torch.empty(0))
    (y.sum() + total.sum()).backward()
    assert x.grad is not None
    assert y.shape == total.shape == x.grad.shape == (3, 0)
    assert not launches


def test_gradients_against_finite_differences() -> None:
    inputs = [t.double().requires_grad_() for t in tensors(3, 5, torch.float64) if t is not None]
    assert torch.autograd.gradcheck(ours, inputs)
    for one in range(2):  # the gradients of each result alone
        assert torch.autograd.gradcheck(lambda *args: ours(*args)[one], inputs)  # noqa: B023


def test_operator_checks_of_torch_library() -> None:
    inputs = [t.requires_grad_() for t in tensors(4, 6, torch.float32) if t is not None]
    operator = torch.ops.rooftop.add_layer_norm_cuda.default
    torch.library.opcheck(operator, (*inputs, 1e-5, torch.float32))
    torch.library.opcheck(operator, (inputs[0].detach(), None, None, None, None, 1e-5, torch.float32))


def test_compiled_whole_and_under_autocast() -> None:
    inputs = tensors(6, 32, torch.bfloat16)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), ours(*inputs))  # type: ignore[arg-type]
    with torch.autocast("cpu", torch.bfloat16):
        assert [t.dtype for t in ours(*inputs)] == [torch.bfloat16] * 2  # type: ignore[arg-type]


def test_cost_is_what_a_person_counts() -> None:
    with CountingMode() as counted:
        ours(*tensors(10, 40, torch.float16))  # type: ignore[arg-type]
    (cost,) = (r.cost for r in counted.records if r.name == "rooftop::add_layer_norm_cuda")
    assert cost is not None
    assert (cost.total_flops, cost.read_bytes) == (9 * 400, 2 * (800 + 120))
    assert cost.write_bytes == 2 * 800 + 4 * 20


@pytest.mark.parametrize(
    ("residual", "more", "error", "message"),
    [
        (torch.randn(3, 5), {}, ValueError, r"residual of shape \(3, 4\), like input, got \(3, 5\)"),
        (torch.randn(3, 4).half(), {}, TypeError, "expected residual of torch.float32, like input, got torch.float16"),
        (1.0, {}, TypeError, "residual must be a tensor, got float"),
        (torch.randn(3, 4, device="meta"), {}, ValueError, "input is on cpu, residual on meta"),
        (None, {"input_bias": torch.randn(3)}, ValueError, r"of shape \(4,\), got \(3,\)"),
        (None, {"weight": torch.randn(3)}, ValueError, r"weight of shape \(4,\), got \(3,\)"),
    ],
)
def test_wrong_arguments(residual: object, more: dict[str, Tensor], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        add_layer_norm_cuda(torch.randn(3, 4), residual, 4, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_each_configuration_compiles_without_spills_and_fits_a_block(arch: str) -> None:
    pytest.importorskip("cuda.core")
    for config in module.CUDA:
        for columns in (config.columns, config.columns - 1):  # 16 bytes at a time, and single elements
            x = torch.empty(4, columns, dtype=torch.bfloat16)
            name, grid, block = module.kernel_for(x, x, [x[0], x[0], x[0]])
            kernel = cuda.compile(cuda_text(*module.CUDA_FILES), name, arch=arch)
            kernel.check(grid, block)
            assert kernel.binary.spill_bytes == 0, kernel
        assert config.elements * config.warps * 32 == config.columns
        assert config.rows == 1 or config.warps == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("columns", [1, 7, 64, 200, 512, 768, 1000, 1024, 2048, 4096, 8192, 11_008, 16_384, 50_257])
def test_gate_on_a_gpu(columns: int, dtype: torch.dtype) -> None:
    with count_launches() as launches:
        assert_gate(tensors(67, columns, dtype), "cuda")
    assert any(name.startswith("add_layer_norm") for name in launches)


@pytest.mark.gpu
@pytest.mark.large
def test_more_than_two_billion_elements_on_a_gpu() -> None:
    x = torch.randn(131_073, 16_384, device="cuda", dtype=torch.bfloat16)  # 2^31 + 16384
    y, total = add_layer_norm_cuda(x, x, 16_384)
    for row in (0, 65_536, 131_072):
        torch.testing.assert_close(total[row], 2 * x[row])
        torch.testing.assert_close(y[row], F.layer_norm(2 * x[row], (16_384,)), rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_captured_in_a_cuda_graph() -> None:
    x, residual, *_ = (t.cuda() for t in tensors(64, 768, torch.float16) if t is not None)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, total = add_layer_norm_cuda(x, residual, 768)
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(y, F.layer_norm(x + residual, (768,)), rtol=1e-2, atol=1e-2)
