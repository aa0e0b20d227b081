"""When libraries ask for values, fake tensors give the answers of a real run of the same program."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rooftop
from rooftop.analysis import fake_tensors
from rooftop.analysis.without_values import answered_without_values
from rooftop.cost import CountingMode
from rooftop.errors import InputError, ModelRunError
from rooftop.hardware import ceilings_of
from rooftop.hardware.ceilings import Ceilings


@pytest.fixture(scope="module")
def h200() -> Ceilings:
    return ceilings_of("h200")


@pytest.mark.parametrize("bounds", [(-2.0, 2.0), (1.0, 1.5)], ids=["wide", "narrow"])
def test_networks_that_draw_truncated_normals_can_be_built_without_values(bounds: tuple[float, float]) -> None:
    """PyTorch draws until all values are within the limits, and asks the tensor whether they are."""
    with fake_tensors():
        layer = nn.Linear(8, 8)
        nn.init.trunc_normal_(layer.weight, 0.0, 1.0, *bounds)
    real = torch.empty(1000)
    with answered_without_values():
        nn.init.trunc_normal_(real, 0.0, 1.0, *bounds)
    assert bounds[0] <= float(real.min()) <= float(real.max()) <= bounds[1]


@pytest.mark.parametrize("family", ["Llama", "Mistral"])
def test_a_decoder_is_causal_as_it_is_when_run(family: str, transformers: ModuleType, h200: Ceilings) -> None:
    """With fake tensors, transformers created a mask: all pairs were counted, and shared heads were copied."""
    heads, shared, length, layers, width = 4, 2, 32, 1, 64
    config = getattr(transformers, f"{family}Config")(
        hidden_size=width,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=shared,
        vocab_size=100,
        use_cache=False,
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    tokens = torch.randint(100, (2, length))
    with torch.no_grad(), CountingMode() as run:
        model(tokens)
    report = rooftop.predict(model, tokens, ceilings=h200, dtype=torch.bfloat16)
    predicted = [row for row in report.ops if "attention" in row.name]
    # Flops for the pairs of a query and a visible key: two products of 16 features for each.
    products = layers * 2 * heads * (length * (length + 1) // 2) * 2 * 2 * (width // heads)
    assert sum(row.flops_by_precision["bf16"] for row in predicted) == products
    actual = [r.cost.total_flops for r in run.records if r.cost is not None and "attention" in r.name]
    assert sum(row.flops for row in predicted) == sum(actual)


def test_positions_of_several_sequences_in_a_row_are_still_found(transformers: ModuleType) -> None:
    from transformers import masking_utils

    with answered_without_values():
        found = masking_utils.find_packed_sequence_indices(torch.tensor([[0, 1, 2, 0, 1]]))
    assert found.tolist() == [[0, 0, 0, 1, 1]]


def ctc(log_probs: Tensor, targets: Tensor, inputs: Any, labels: Any) -> Tensor:
    return F.ctc_loss(log_probs, targets, inputs, labels)


@pytest.mark.parametrize("concatenated", [False, True])
def test_the_ctc_loss_is_counted_as_when_run(concatenated: bool, h200: Ceilings) -> None:
    log_probs = torch.randn(50, 4, 20).log_softmax(-1).requires_grad_()
    targets = torch.randint(1, 20, (40,) if concatenated else (4, 10))
    lengths = torch.full((4,), 50), torch.full((4,), 10)
    report = rooftop.predict(ctc, log_probs, targets, *lengths, ceilings=h200, train=True)
    with CountingMode() as run:
        ctc(log_probs, targets, *lengths).backward()
    for direction in ("aten::_ctc_loss", "aten::_ctc_loss_backward"):
        (row,) = [row for row in report.ops if row.name == direction]
        (actual,) = [r.cost for r in run.records if r.name == direction]
        assert actual is not None
        assert row.flops == actual.total_flops


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_grouped_products_are_counted_as_when_run(dtype: torch.dtype, h200: Ceilings) -> None:
    """PyTorch's function for fake tensors accepts only bfloat16: a mixture of experts in float32 was refused."""
    rows, experts = torch.randn(16, 8, dtype=dtype, requires_grad=True), torch.randn(2, 8, 24, dtype=dtype)
    experts.requires_grad_()
    ends = torch.tensor([8, 16], dtype=torch.int32)

    def step() -> None:
        torch._grouped_mm(rows, experts, offs=ends).square().sum().backward()

    with CountingMode() as run:
        step()
    actual = [r.cost.total_flops for r in run.records if r.cost is not None and r.name == "aten::_grouped_mm"]
    predicted = [row for row in rooftop.predict(step, ceilings=h200).ops if row.name == "aten::_grouped_mm"]
    assert sum(row.calls for row in predicted) == len(actual) == 3
    assert sum(row.flops for row in predicted) == sum(actual) == 3 * 2 * 16 * 8 * 24
    with pytest.raises(ModelRunError, match="RuntimeError"):
        rooftop.predict(lambda: torch._grouped_mm(rows[:, :4], experts, offs=ends), ceilings=h200)


def test_what_pytorch_reads_on_its_own_is_named_as_such(h200: Ceilings) -> None:
    """A program passes lengths as lists. PyTorch puts the lengths into a tensor and reads that tensor."""
    log_probs, targets = torch.randn(50, 4, 20, requires_grad=True), torch.randint(1, 20, (4, 10))
    with pytest.raises(InputError, match="cannot be predicted: its operators depend on values"):
        rooftop.predict(lambda x, y: ctc(x, y, [50] * 4, [10] * 4), log_probs, targets, ceilings=h200, train=True)


def test_a_network_without_values_is_predicted_as_one_with_them(h200: Ceilings) -> None:
    class Drawn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            nn.init.trunc_normal_(self.linear.weight, std=0.02)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    real = rooftop.predict(Drawn(), torch.randn(2, 8), ceilings=h200)
    with fake_tensors():
        fake = rooftop.predict(Drawn(), torch.randn(2, 8), ceilings=h200)
    assert real.summary == fake.summary


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.sparse.mm(x.to_sparse(), x),
        lambda x: x.to_sparse_csr() @ x,
        lambda x: x.to_sparse(1) * 2,
        lambda x: torch.sparse.mm(SPARSE, SPARSE),
    ],
)
def test_how_much_a_sparse_tensor_stores_is_a_matter_of_values(function: Any, h200: Ceilings) -> None:
    with pytest.raises(InputError, match="depend on values"):
        rooftop.predict(function, torch.eye(8), ceilings=h200)


SPARSE = torch.eye(8).to_sparse()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_entries_of_a_sparse_tensor_count_as_different(h200: Ceilings) -> None:
    def product(x: Tensor) -> Tensor:
        entries = torch.sparse_coo_tensor(torch.zeros(2, 5, dtype=torch.int64), torch.ones(5), (8, 8))
        return torch.sparse.mm(entries.coalesce(), x)

    report = rooftop.predict(product, torch.eye(8), ceilings=h200)
    assert sum(row.flops for row in report.ops if row.name in ("aten::mm", "aten::_sparse_addmm")) == 2 * 5 * 8


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_an_optimizer_of_sparse_gradients_is_predicted_as_it_runs(h200: Ceilings) -> None:
    net, indices = nn.Embedding(10, 4, sparse=True), torch.arange(6)
    report = rooftop.predict(net, indices, ceilings=h200, train=True, optimizer=torch.optim.SparseAdam)
    predicted = [(row.flops, row.bytes) for row in report.ops if row.phase == "optimizer"]
    optimizer = torch.optim.SparseAdam(net.parameters())
    for _ in range(2):
        net(indices).sum().backward()
        with CountingMode() as counted:
            optimizer.step()
        optimizer.zero_grad()
    costs = [record.cost for record in counted.records if record.cost is not None]
    assert sum(flops for flops, _ in predicted) == sum(cost.total_flops for cost in costs) > 0
    assert sum(moved for _, moved in predicted) == sum(cost.bytes for cost in costs)
