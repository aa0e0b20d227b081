"""The rules for distinct memory, and a call's information about its operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from rooftop.cost import FREE, Call, Cost, CountingMode, distinct_bytes, matrix_precision, precision_of, tensor_bytes
from rooftop.cost.accounting import stored_elements, tensors_in

aten = torch.ops.aten


def call(func: Any, *args: Any, **kwargs: Any) -> Call:
    return Call(func, args, kwargs, func(*args, **kwargs))


def test_costs_add_up_by_precision() -> None:
    total = Cost(1, 2, {"fp32": 3}) + Cost(10, 20, {"fp32": 30, "bf16": 5}) + FREE
    assert total == Cost(11, 22, {"fp32": 33, "bf16": 5})
    assert (total.bytes, total.total_flops) == (33, 38)


def test_repeated_elements_count_once() -> None:
    row = torch.rand(6)
    assert tensor_bytes(row.expand(4, 6)) == 6 * 4
    assert tensor_bytes(torch.rand(1).expand(1000)) == 4


def test_skipped_elements_do_not_count() -> None:
    assert tensor_bytes(torch.rand(10)[::2]) == 5 * 4


def test_overlapping_windows_count_the_memory_below_them() -> None:
    assert tensor_bytes(torch.rand(10).unfold(0, 3, 1)) == 10 * 4


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3)])
def test_nothing_has_no_bytes(shape: tuple[int, ...]) -> None:
    assert tensor_bytes(torch.rand(shape)) == 0
    assert distinct_bytes([torch.rand(shape), None]) == 0
    assert tensor_bytes(None) == 0


def test_a_scalar_is_one_element() -> None:
    assert tensor_bytes(torch.tensor(1.0)) == 4


def test_the_same_tensor_twice_counts_once() -> None:
    tensor = torch.rand(4, 6)
    assert distinct_bytes([tensor, tensor]) == 24 * 4
    assert distinct_bytes([tensor, tensor.view(6, 4), tensor.t()]) == 24 * 4
    assert distinct_bytes([tensor, tensor.clone()]) == 2 * 24 * 4


def test_disjoint_views_of_one_memory_add_up() -> None:
    packed = torch.rand(5, 3 * 8)
    query, key, value = packed.chunk(3, dim=1)
    assert distinct_bytes([query, key]) == 2 * 5 * 8 * 4
    assert distinct_bytes([query, key, value]) == 5 * 24 * 4


def test_overlapping_views_count_their_union_even_in_a_larger_memory() -> None:
    memory = torch.rand(1000)
    assert distinct_bytes([memory[1:11], memory[0:10]]) == 11 * 4
    assert distinct_bytes([memory[0:10], memory[100:110]]) == 20 * 4


def test_fake_and_meta_tensors_count_as_real_ones() -> None:
    def count() -> int:
        tensor = torch.empty(4, 6)
        return distinct_bytes([tensor, tensor[:2], tensor.expand(3, 4, 6), torch.empty(6)])

    real = count()
    assert real == (24 + 6) * 4
    with FakeTensorMode():
        assert count() == real
    with torch.device("meta"):
        assert count() == real


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state")
def test_sparse_tensors_count_their_indices_and_their_values() -> None:
    coordinates = torch.eye(4).to_sparse()
    assert tensor_bytes(coordinates) == 4 * 2 * 8 + 4 * 4
    assert distinct_bytes([coordinates, coordinates, coordinates.values()]) == 4 * 2 * 8 + 4 * 4
    rows = coordinates.to_sparse_csr()  # five pointers to rows, four columns; the values may be those of `coordinates`
    assert tensor_bytes(rows) == (4 + 1) * 8 + 4 * 8 + 4 * 4
    assert tensor_bytes(torch.eye(4).to_sparse_csc()) == tensor_bytes(rows)
    blocks = torch.eye(4).to_sparse_bsr((2, 2))  # three pointers, two blocks of four
    assert tensor_bytes(blocks) == (2 + 1) * 8 + 2 * 8 + 2 * 4 * 4
    assert (stored_elements(coordinates), stored_elements(rows), stored_elements(blocks)) == (4, 4, 8)


def test_sparse_tensors_that_share_their_values_count_them_once() -> None:
    indices, values = torch.tensor([[0, 1], [2, 0]]), torch.rand(2, 3)
    left, right = (
        torch.sparse_coo_tensor(i, values, (3, 3, 3), check_invariants=False) for i in (indices, indices.clone())
    )
    assert distinct_bytes([left, right]) == 2 * (4 * 8) + 6 * 4


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_nested_tensors_count_what_they_hold() -> None:
    nested = torch.nested.nested_tensor([torch.rand(2, 8), torch.rand(3, 8)])
    assert distinct_bytes([nested, nested]) == (2 + 3) * 8 * 4
    assert tensor_bytes(nested.transpose(1, 2)) == (2 + 3) * 8 * 4


def test_looking_into_a_sparse_tensor_is_no_part_of_the_program() -> None:
    sparse = torch.eye(4).to_sparse()
    with CountingMode() as counted:
        tensor_bytes(sparse)
    assert counted.records == []


def test_arguments_go_by_their_schema_names_with_defaults() -> None:
    bias, left, right = torch.rand(5), torch.rand(3, 4), torch.rand(4, 5)
    addmm = call(aten.addmm.default, bias, left, right, alpha=2)
    assert addmm["self"] is bias
    assert addmm["mat2"] is right
    assert (addmm["beta"], addmm["alpha"]) == (1, 2)
    assert "mat1" in addmm
    assert "weight" not in addmm
    assert addmm.get("weight", 7) == 7


def test_out_arguments_are_written_and_not_read() -> None:
    left, right, out = torch.rand(3), torch.rand(3), torch.empty(3)
    add = call(aten.add.out, left, right, out=out)
    assert _same(add.read_tensors, [left, right])
    assert _same(add.written_tensors, [out])


def test_what_is_changed_in_place_is_written_once() -> None:
    left, right = torch.rand(3), torch.rand(3)
    add = call(aten.add_.Tensor, left, right)
    assert add.in_place
    assert _same(add.read_tensors, [left, right])
    assert _same(add.written_tensors, [left])
    assert not call(aten.add.Tensor, left, right).in_place


def test_lists_that_are_changed_without_being_returned_are_results() -> None:
    parameters, gradients = [torch.rand(3), torch.rand(2)], [torch.rand(3), torch.rand(2)]
    add = call(aten._foreach_add_.List, parameters, gradients)
    assert add.in_place
    assert _same(add.written_tensors, parameters)
    assert _same(add.results[0], parameters)


def test_results_follow_the_schema() -> None:
    pooled, indices = call(aten.max_pool2d_with_indices.default, torch.rand(1, 1, 4, 4), [2, 2]).results
    assert pooled.dtype == torch.float32
    assert indices.dtype == torch.int64


def _same(left: list[Tensor], right: list[Tensor]) -> bool:
    return [id(tensor) for tensor in left] == [id(tensor) for tensor in right]


def test_elementwise_arithmetic_on_halves_is_single() -> None:
    assert precision_of(torch.bfloat16) == "fp32"
    assert precision_of(torch.int64) == "fp32"
    assert precision_of(torch.float64) == "fp64"


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [
        (torch.float64, "fp64"),
        (torch.float32, "fp32"),
        (torch.float16, "fp16"),
        (torch.bfloat16, "bf16"),
        (torch.float8_e4m3fn, "fp8"),
        (torch.int8, "fp32"),
    ],
)
def test_matrix_products_run_at_the_peak_of_their_type(dtype: torch.dtype, precision: str) -> None:
    assert matrix_precision(torch.empty(2, 2, dtype=dtype)) == precision


def test_tf32_follows_the_switches_of_pytorch() -> None:
    with FakeTensorMode():
        tensor = torch.empty(2, 2, device="cuda")
    matmul, convolution = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = matmul.fp32_precision, convolution.fp32_precision
    try:
        matmul.fp32_precision, convolution.fp32_precision = "ieee", "tf32"
        assert matrix_precision(tensor) == "fp32"
        assert matrix_precision(tensor, convolution=True) == "tf32"
        matmul.fp32_precision, convolution.fp32_precision = "tf32", "ieee"
        assert matrix_precision(tensor) == "tf32"
        assert matrix_precision(tensor, convolution=True) == "fp32"
    finally:
        matmul.fp32_precision, convolution.fp32_precision = before
    assert matrix_precision(torch.empty(2, 2)) == "fp32"


@dataclass
class Branch:
    tensor: Tensor
    other: Branch | None = None


def test_tensors_are_found_in_dataclasses_that_name_each_other() -> None:
    a, b = torch.ones(1), torch.ones(2)
    first, second = Branch(a), Branch(b)
    first.other, second.other = second, first
    assert [id(tensor) for tensor in tensors_in({"in": [first], "class": Branch})] == [id(a), id(b)]


def test_tensors_are_found_in_nests_that_hold_themselves() -> None:
    a, b = torch.ones(1), torch.ones(2)
    listed: list[object] = [a]
    named: dict[str, object] = {"b": b, "a": (listed,)}
    named["itself"] = named
    listed += [listed, named]
    assert [id(tensor) for tensor in tensors_in(listed)] == [id(a), id(b)]
    assert [id(tensor) for tensor in tensors_in([listed, [listed]])] == [id(a), id(b), id(a), id(b)]
