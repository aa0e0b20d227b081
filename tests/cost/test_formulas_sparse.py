"""Costs of sparse tensors and of graph networks' operators against counts done by hand.

The matrices: `coo()` and `csr()` are 4x5 with four elements, in rows 0, 0, 1, 3. As coordinates, the matrices take 4 *
2 * 8 bytes of indices and 4 * 4 of values; as compressed rows 5 * 8 bytes of row pointers, 4 * 8 of columns, 4 * 4 of
values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rooftop.cost import FREE, Call, Cost, CountingMode
from rooftop.cost.lookup import formula_for

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage"),
]

aten = torch.ops.aten


class Hand(NamedTuple):
    """One operator, a program that runs it last, and its cost counted by hand."""

    operator: str
    run: Callable[[], object]
    flops: int
    read: int
    write: int


COO = 4 * 2 * 8 + 4 * 4
CSR_INDICES = 5 * 8 + 4 * 8
CSR = CSR_INDICES + 4 * 4
# Six blocks of 2x2 in two rows of blocks: every element of a 4x6 matrix.
BSR = 3 * 8 + 6 * 8 + 24 * 4


def x(*shape: int) -> Tensor:
    return torch.rand(*shape)


def coo(columns: int = 5) -> Tensor:
    indices = torch.tensor([[0, 0, 1, 3], [0, 2, 1, 4 % columns]])
    return torch.sparse_coo_tensor(indices, torch.rand(4), (4, columns)).coalesce()


def csr() -> Tensor:
    return coo().to_sparse_csr()


def bsr() -> Tensor:
    return x(4, 6).to_sparse_bsr((2, 2))


def leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()


def scattered() -> Tensor:
    """Three elements at two places of a 4x5 matrix."""
    return torch.sparse_coo_tensor(torch.tensor([[0, 0, 1], [0, 0, 1]]), torch.rand(3), (4, 5))


def train(layer: nn.Module, make: Callable[..., torch.optim.Optimizer], **options: Any) -> None:
    """One step on a table of 10 rows of 3 elements; the three indices name rows 1, 1 and 4."""
    optimizer = make(layer.parameters(), lr=0.1, **options)
    layer(torch.tensor([[1, 1, 4]])).sum().backward()
    optimizer.step()


def embedding() -> nn.Module:
    return nn.Embedding(10, 3, sparse=True)


PRODUCTS = [
    # 2 nnz n; the four columns address four of five rows.
    Hand("mm", lambda: coo() @ x(5, 3), 2 * 4 * 3, COO + 4 * 3 * 4, 4 * 3 * 4),
    Hand("mm", lambda: csr() @ x(5, 3), 2 * 4 * 3, CSR + 4 * 3 * 4, 4 * 3 * 4),
    # Six blocks have two columns each, which are more than the six existing rows.
    Hand("mm", lambda: bsr() @ x(6, 3), 2 * 24 * 3, BSR + 6 * 3 * 4, 4 * 3 * 4),
    Hand("mv", lambda: coo() @ x(5), 2 * 4, COO + 4 * 4, 4 * 4),
    # From the right: four rows address all four columns of the dense factor.
    Hand("mm", lambda: x(3, 4) @ csr(), 2 * 3 * 4, CSR + 3 * 4 * 4, 3 * 5 * 4),
    Hand("bmm", lambda: torch.bmm(torch.stack([coo(), coo()]), x(2, 5, 3)), 2 * 8 * 3, 8 * 28 + 8 * 12, 2 * 4 * 3 * 4),
    # With beta 0 the addend is not read; `torch.sparse.mm` calls this operator with beta 0.
    Hand(
        "_sparse_addmm",
        lambda: torch.sparse.mm(leaf(coo()), x(5, 3)),
        2 * 4 * 3,
        COO + 4 * 3 * 4,
        4 * 3 * 4,
    ),
    Hand(
        "_sparse_addmm",
        lambda: torch.sparse.addmm(x(4, 3), leaf(coo()), x(5, 3)),
        2 * 4 * 3 + 4 * 3,
        COO + 4 * 3 * 4 + 4 * 3 * 4,
        4 * 3 * 4,
    ),
    # A linear layer with sparse weights (4, 5) on two rows.
    Hand("addmm", lambda: F.linear(x(2, 5), csr(), x(4)), 2 * 2 * 4 + 2 * 4, CSR + 2 * 4 * 4 + 4 * 4, 2 * 4 * 4),
    # The result has a row wherever the matrix has one: three rows, in hybrid coordinates.
    Hand("hspmm", lambda: torch.hspmm(coo(), x(5, 3)), 2 * 4 * 3, COO + 4 * 3 * 4, 3 * 8 + 3 * 3 * 4),
    # The sum of two sparse matrices: at least three rows of 3 from the product, and the addend's elements.
    Hand(
        "sspaddmm",
        lambda: torch.sspaddmm(coo(3), coo(), x(5, 3)),
        2 * 4 * 3 + 13,
        COO + COO + 4 * 3 * 4,
        13 * 20,
    ),
    # The product of two sparse matrices: at least one multiply-add for each of the result's five elements (20 bytes
    # each).
    Hand("mm", lambda: coo() @ coo().t(), 2 * 3, 2 * COO, 3 * 20),
    Hand("_sparse_sparse_matmul", lambda: torch.sparse.mm(leaf(coo()), coo().t()), 2 * 3, 2 * COO, 3 * 20),
    # Each element of the pattern takes 2 k flops and the addition of the addend.
    Hand(
        "sparse_sampled_addmm",
        lambda: torch.sparse.sampled_addmm(csr(), x(4, 3), x(3, 5)),
        2 * 4 * 3 + 4,
        CSR + (4 * 3 + 3 * 4) * 4,
        CSR,
    ),
    Hand(
        "sparse_sampled_addmm",
        lambda: torch.sparse.sampled_addmm(csr(), x(4, 3), x(3, 5), beta=0.0),
        2 * 4 * 3,
        CSR_INDICES + (4 * 3 + 3 * 4) * 4,
        CSR,
    ),
    Hand(
        "_sparse_mm_reduce_impl",
        lambda: torch.sparse.mm(csr(), x(5, 3), reduce="mean"),
        2 * 4 * 3 + 4 * 3,
        CSR + 4 * 3 * 4,
        4 * 3 * 4,
    ),
    # Both gradients; the positions of the maxima are int64.
    Hand(
        "_sparse_mm_reduce_impl_backward",
        lambda: torch.sparse.mm(leaf(csr()), leaf(x(5, 3)), reduce="amax").backward(torch.ones(4, 3)),
        2 * (2 * 4 * 3),
        CSR + 4 * 3 * 4 + 4 * 3 * 8 + 4 * 3 * 4,
        CSR + 5 * 3 * 4,
    ),
    # Backward of a product with a dense leaf: Aᵀ g, in which all four rows of g are addressed.
    Hand(
        "mm",
        lambda: (coo() @ leaf(x(5, 3))).backward(torch.ones(4, 3)),
        2 * 4 * 3,
        COO + 4 * 3 * 4,
        5 * 3 * 4,
    ),
]

CONVERSIONS = [
    # Three elements: 3 * 2 comparisons to sort them, one addition where two meet.
    Hand("_coalesce", lambda: scattered().coalesce(), 3 * 2 + 1, 3 * 20, 2 * 20),
    Hand("_to_dense", lambda: coo().to_dense(), 0, COO, 20 * 4),
    Hand("_to_dense", lambda: csr().to_dense(), 0, CSR, 20 * 4),
    # Each element is compared with zero; all of them are stored.
    Hand("_to_sparse", lambda: torch.ones(4, 5).to_sparse(), 20, 20 * 4, 20 * (16 + 4)),
    Hand("_to_sparse_csr", lambda: torch.ones(4, 5).to_sparse_csr(), 20, 20 * 4, 5 * 8 + 20 * (8 + 4)),
    Hand("_to_sparse_csc", lambda: torch.ones(4, 5).to_sparse_csc(), 20, 20 * 4, 6 * 8 + 20 * (8 + 4)),
    Hand("_to_sparse_bsr", lambda: torch.ones(4, 6).to_sparse_bsr((2, 2)), 24, 24 * 4, BSR),
    # Columns and values stay where they are: row indices are read, pointers written.
    Hand("_to_sparse_csr", lambda: coo().to_sparse_csr(), 0, 4 * 8, 5 * 8),
    # Both rows of coordinates are one new tensor; the values stay.
    Hand("_to_sparse", lambda: csr().to_sparse(), 0, CSR_INDICES, 2 * 4 * 8),
    Hand(
        "_convert_indices_from_coo_to_csr",
        lambda: torch._convert_indices_from_coo_to_csr(torch.tensor([0, 0, 1, 3]), 4),
        0,
        4 * 8,
        5 * 8,
    ),
    Hand(
        "_convert_indices_from_csr_to_coo",
        lambda: torch._convert_indices_from_csr_to_coo(torch.tensor([0, 2, 3, 3, 4]), torch.tensor([0, 2, 1, 4])),
        0,
        CSR_INDICES,
        2 * 4 * 8,
    ),
    Hand(
        "_validate_compressed_sparse_indices",
        lambda: torch._validate_compressed_sparse_indices(
            True, torch.tensor([0, 2, 3, 3, 4]), torch.tensor([0, 2, 1, 4]), 4, 5, 4
        ),
        4,
        CSR_INDICES,
        0,
    ),
    # Two diagonals of four, of which seven elements lie inside.
    Hand(
        "_spdiags",
        lambda: torch.sparse.spdiags(x(2, 4), torch.tensor([0, 1]), (4, 4)),
        0,
        7 * 4 + 2 * 8,
        7 * 20,
    ),
    # Reads the elements of the dense tensor that the mask selects, and the indices of the mask.
    Hand("sparse_mask", lambda: x(4, 5).sparse_mask(coo()), 0, 4 * 4 + 64, COO),
    Hand("sparse_mask", lambda: coo().sparse_mask(coo()), 0, COO + 64, COO),
    Hand("clone", lambda: coo().clone(), 0, COO, COO),
    Hand("_to_copy", lambda: csr().double(), 0, CSR, CSR_INDICES + 4 * 8),
    Hand("cat", lambda: torch.cat([coo(), coo()]), 0, 2 * COO, 2 * COO),
    # Rows 0 and 1 have three of the four elements; all row indices must be looked at.
    Hand("index_select", lambda: coo().index_select(0, torch.tensor([0, 1])), 0, 64 + 3 * 4 + 2 * 8, 3 * 20),
    Hand("copy_sparse_to_sparse_", lambda: aten.copy_sparse_to_sparse_(coo(), coo()), 0, COO, COO),
]

ARITHMETIC = [
    Hand("relu", lambda: coo().relu(), 4, COO, COO),
    Hand("mul", lambda: csr() * 2, 4, CSR, CSR),
    Hand("mul_", lambda: coo().mul_(2), 4, 4 * 4, 4 * 4),
    Hand("add", lambda: coo() + coo(), 4, 2 * COO, COO),
    # Four elements of the dense factor are needed.
    Hand("mul", lambda: coo() * x(4, 5), 4, COO + 4 * 4, COO),
    # The dense sum is written completely, but changes at only four places.
    Hand("add", lambda: x(4, 5) + coo(), 4, COO + 20 * 4, 20 * 4),
    Hand("add_", lambda: x(4, 5).add_(coo(), alpha=-0.1), 2 * 4, COO + 4 * 4, 4 * 4),
    Hand("_sparse_softmax", lambda: torch.sparse.softmax(coo(), 1), 5 * 4, COO, COO),
    Hand("_sparse_log_softmax", lambda: torch.sparse.log_softmax(coo(), 1), 5 * 4, COO, COO),
    Hand(
        "_sparse_softmax_backward_data",
        lambda: torch.sparse.softmax(leaf(coo()), 1).to_dense().backward(torch.ones(4, 5)),
        4 * 4,
        2 * COO,
        COO,
    ),
    Hand(
        "_sparse_log_softmax_backward_data",
        lambda: torch.sparse.log_softmax(leaf(coo()), 1).to_dense().backward(torch.ones(4, 5)),
        4 * 4,
        2 * COO,
        COO,
    ),
    # Three rows are not empty.
    Hand("_sparse_sum", lambda: torch.sparse.sum(coo(), 1), 4, COO, 3 * (8 + 4)),
    Hand(
        "_sparse_sum_backward",
        lambda: torch.sparse.sum(leaf(coo()), 1).to_dense().backward(torch.ones(4)),
        0,
        3 * (8 + 4) + 64,
        COO,
    ),
    Hand("sum", lambda: coo().sum(), 4, COO, 4),
]

# The gradient of an embedding names its three rows: 24 bytes of indices and 3 * 3 * 4 of values.
TRAINING = [
    # SGD changes two rows (three as far as a cost can tell) of the table in place: 2 flops for each element.
    Hand("add_", lambda: train(embedding(), torch.optim.SGD), 2 * 9, 24 + 36 + 36, 36),
    Hand("_coalesce", lambda: train(embedding(), torch.optim.SparseAdam), 3 * 2 + 3, 24 + 36, 16 + 24),
    Hand("sparse_mask", lambda: train(embedding(), torch.optim.SparseAdam), 0, 24 + 16, 16 + 24),
    # The gradient of a bag has the indices of the input; each row is the gradient of its bag, added once.
    Hand(
        "_embedding_bag_backward",
        lambda: train(nn.EmbeddingBag(10, 3, sparse=True, mode="sum"), torch.optim.SGD),
        9,
        4 + 24 + 8,  # the gradient is one number for all, the bag begins at one place
        36,
    ),
    Hand(
        "_embedding_bag_per_sample_weights_backward",
        lambda: F.embedding_bag(
            torch.tensor([[1, 1, 4]]), leaf(x(10, 3)), mode="sum", per_sample_weights=leaf(x(1, 3))
        ).backward(torch.ones(1, 3)),
        2 * 9,
        36 + 12 + 24 + 8,
        3 * 4,
    ),
    # Two of ten rows: norms 2, scale 1.
    Hand("embedding_renorm_", lambda: F.embedding(torch.tensor([1, 4]), x(10, 3), max_norm=0.1), 3 * 6, 24 + 16, 24),
]

GRAPHS = [
    Hand(
        "index_add_",
        lambda: x(4, 3).index_add_(0, torch.tensor([0, 0, 1]), x(3, 3)),
        9,
        36 + 36 + 3 * 8,
        36,
    ),
    Hand(
        "scatter_reduce_",
        lambda: x(4, 3).scatter_reduce_(0, torch.tensor([[0], [0], [1]]).expand(3, 3), x(3, 3), "amax"),
        9,
        36 + 36 + 3 * 8,
        36,
    ),
    Hand(
        "segment_reduce",
        lambda: torch.segment_reduce(x(6, 3), "sum", lengths=torch.tensor([2, 4])),
        18,
        18 * 4 + 2 * 8,
        6 * 4,
    ),
    # A sum repeats its gradient, a mean divides it, and a maximum looks up the source's position.
    *(
        Hand(
            "_segment_reduce_backward",
            lambda reduce=reduce: torch.segment_reduce(
                leaf(x(6, 3)), reduce, lengths=torch.tensor([2, 4]), unsafe=True
            ).backward(torch.ones(2, 3)),
            flops,
            6 * 4 + 2 * 8 + more,
            18 * 4,
        )
        for reduce, flops, more in (("sum", 0, 0), ("mean", 18, 0), ("max", 18, (6 + 18) * 4))
    ),
]


@pytest.mark.parametrize("hand", [*PRODUCTS, *CONVERSIONS, *ARITHMETIC, *TRAINING, *GRAPHS], ids=lambda h: h.operator)
def test_cost_is_what_a_person_counts(hand: Hand) -> None:
    with CountingMode() as counted:
        hand.run()
    records = [record for record in counted.records if record.name == f"aten::{hand.operator}"]
    assert records, f"the program ran only {sorted({record.name for record in counted.records})}"
    cost = records[-1].cost
    assert cost is not None, records[-1].uncovered
    assert (cost.total_flops, cost.read_bytes, cost.write_bytes) == (hand.flops, hand.read, hand.write)


def test_wrapping_indices_and_values_in_a_tensor_moves_nothing() -> None:
    indices, values, rows = torch.tensor([[0, 1], [1, 0]]), x(2), csr()
    with CountingMode() as counted:
        torch.sparse_coo_tensor(indices, values, (2, 2))
        torch.sparse_csr_tensor(rows.crow_indices(), rows.col_indices(), rows.values(), (4, 5), check_invariants=False)
    assert {record.name: record.cost for record in counted.records if "sparse" in record.name} == {
        "aten::_sparse_coo_tensor_with_dims_and_tensors": FREE,
        "aten::sparse_compressed_tensor": FREE,
    }


@pytest.mark.parametrize(
    ("operator", "arguments", "out", "expected"),
    [
        # Two of four kept: (16, 16) stands for (16, 32); 2-byte values, 2 bytes of places for each four of them.
        (
            aten._sparse_semi_structured_mm.default,
            (x(16, 16).half(), torch.zeros(16, 2, dtype=torch.int16), x(32, 8).half()),
            x(16, 8).half(),
            (2 * 16 * 16 * 8, 16 * 16 * 2 + 16 * 2 * 2 + 32 * 8 * 2, 16 * 8 * 2),
        ),
        (
            aten._sparse_semi_structured_addmm.default,
            (x(16, 1).half(), x(16, 16).half(), torch.zeros(16, 2, dtype=torch.int16), x(32, 8).half()),
            x(16, 8).half(),
            (2 * 16 * 16 * 8 + 16 * 8, 16 * 2 + 16 * 16 * 2 + 16 * 2 * 2 + 32 * 8 * 2, 16 * 8 * 2),
        ),
        (
            aten._sparse_semi_structured_linear.default,
            (x(8, 32).half(), x(16, 16).half(), torch.zeros(16, 2, dtype=torch.int16)),
            x(8, 16).half(),
            (2 * 8 * 16 * 16, 8 * 32 * 2 + 16 * 16 * 2 + 16 * 2 * 2, 8 * 16 * 2),
        ),
        # (16, 32) in one buffer of 16 * 18 halves.
        (
            aten._cslt_sparse_mm.default,
            (x(16 * 18).half(), x(32, 8).half(), x(16).half()),
            x(16, 8).half(),
            (2 * 16 * 8 * 16 + 16 * 8, (16 * 18 + 32 * 8 + 16) * 2, 16 * 8 * 2),
        ),
    ],
    ids=lambda value: value.name() if isinstance(value, torch._ops.OpOverload) else "",
)
def test_two_of_four_elements_are_half_the_products(
    operator: Any, arguments: Any, out: Any, expected: tuple[int, int, int]
) -> None:
    formula = formula_for(operator)
    assert formula is not None
    cost = formula(Call(operator, arguments, {}, out))
    assert (cost.total_flops, cost.read_bytes, cost.write_bytes) == expected


PROGRAMS: dict[str, Callable[[], object]] = {
    "coordinates @ dense": lambda: (leaf(coo()) @ leaf(x(5, 3))).sum().backward(),
    "compressed @ dense": lambda: (leaf(csr()) @ leaf(x(5, 3))).sum().backward(),
    "sparse.mm": lambda: torch.sparse.mm(leaf(coo()), leaf(x(5, 3))).sum().backward(),
    "softmax": lambda: torch.sparse.softmax(leaf(coo()), 1).to_dense().sum().backward(),
    "sum": lambda: torch.sparse.sum(leaf(coo()), 0).to_dense().sum().backward(),
    "scatter_reduce": lambda: (
        torch.zeros(4, 3)
        .scatter_reduce(0, torch.tensor([[0], [0], [1]]).expand(3, 3), leaf(x(3, 3)), "mean")
        .sum()
        .backward()
    ),
    **{
        name: lambda make=make, options=options: train(embedding(), make, **options)
        for name, make, options in (
            ("SGD", torch.optim.SGD, {}),
            ("SGD with momentum", torch.optim.SGD, {"momentum": 0.9}),
            ("Adagrad", torch.optim.Adagrad, {}),
            ("SparseAdam", torch.optim.SparseAdam, {}),
        )
    },
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_operator_of_a_sparse_program_is_uncovered(program: str) -> None:
    with CountingMode() as counted:
        PROGRAMS[program]()
    assert {(record.name, record.uncovered) for record in counted.records if record.cost is None} == set()


@pytest.mark.parametrize("columns", [1, 64])
def test_a_sparse_product_costs_less_than_the_dense_one_and_no_more_than_its_share(columns: int) -> None:
    matrix, dense = (x(64, 64) > 0.9).float(), x(64, columns)

    def cost(left: Tensor) -> Cost:
        with CountingMode() as counted:
            left @ dense
        assert counted.records[-1].cost is not None
        return counted.records[-1].cost

    share = matrix.count_nonzero().item() / matrix.numel()
    for sparse in (matrix.to_sparse(), matrix.to_sparse_csr()):
        assert cost(sparse).total_flops == share * cost(matrix).total_flops
        assert cost(sparse).read_bytes < cost(matrix).read_bytes
