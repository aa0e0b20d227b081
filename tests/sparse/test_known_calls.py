"""Calls of sparse convolutions, norms and rulebooks that are made in C++: the same bits, with any number of sites."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from rooftop import sparse
from rooftop.kernels.sites import sparse_convs, tables
from rooftop.launch import INTERPRETED, cpp_extensions, known_calls, repeated_calls
from rooftop.sparse import rulebook

pytest.importorskip("triton")
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="without kernels nothing is planned")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
GRID = [9, 10, 8]
CELLS = 9 * 10 * 8


@pytest.fixture(autouse=True)
def compiled() -> None:
    if INTERPRETED or torch.cuda.is_available():
        if cpp_extensions.compiler() is None:
            pytest.skip("no C++ compiler")
        repeated_calls.build()


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Skip checks of values on the CPU, as on a GPU. Sort and list small tables like large ones."""
    for name in ("_check_values", "check_reverse", "_check_order"):
        monkeypatch.setattr(sparse_convs, name, lambda *_: None)
    monkeypatch.setattr(sparse_convs, "_plain", lambda neighbours, *_: neighbours)
    monkeypatch.setattr(rulebook, "checks_values", lambda _: False)
    monkeypatch.setattr(tables, "SORTED_FROM", 150)
    monkeypatch.setattr(tables, "LISTED_FROM", 100)
    known_calls.forget()
    yield
    known_calls.forget()


def cloud(sites: int, device: str) -> Tensor:
    cell = torch.randperm(CELLS)[:sites]
    return torch.stack([cell * 0, cell // 80, cell // 8 % 10, cell % 8], 1).int().to(device)


def network(bound: int | None) -> nn.Module:
    torch.manual_seed(3)
    return sparse.SparseSequential(
        sparse.SubMConv3d(4, 8, (3, 3, 1), indice_key="fine"),
        sparse.SparseBatchNorm(8),
        sparse.SparseConv3d(8, 6, (3, 3, 1), 2, (1, 1, 0), bias=False, indice_key="down", num_out_act_bound=bound),
        sparse.SparseBatchNorm(6),
        sparse.SparseInverseConv3d(6, 4, (3, 3, 1), "down"),
    )


def step(model: nn.Module, indices: Tensor, features: Tensor) -> list[Tensor]:
    """The result, the gradients, and the statistics of the norms."""
    model.zero_grad()
    leaf = features.clone().requires_grad_()
    y = model(sparse.SparseConvTensor(leaf, indices, GRID, 1)).features
    y.float().square().sum().backward()
    gradients = [each.grad.clone() for each in (leaf, *model.parameters()) if each.grad is not None]
    return [y.detach(), *gradients, *(each.clone() for each in model.buffers())]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bound", [None, 400])
@pytest.mark.usefixtures("unchecked")
def test_any_number_of_sites_has_the_bits_of_python(device: str, bound: int | None) -> None:
    numbers = [139, 141, 137, 143, 160, 140] if device == "cpu" else [*range(90, 360, 7), 256, 320, 1, 16, 2]
    dtype = torch.float32 if device == "cpu" else torch.float16
    ours, pythons = (network(bound).to(device, dtype) for _ in range(2))
    made: list[int] = []
    for sites in numbers:
        indices = cloud(sites, device)
        features = torch.randn(sites, 4, device=device, dtype=dtype)
        with repeated_calls.in_python():
            expected = step(pythons, indices, features)
        before = repeated_calls.calls_made()
        assert all(map(torch.equal, step(ours, indices, features), expected)), sites
        made.append(repeated_calls.calls_made() - before)
    assert max(made) >= 5, repeated_calls.reasons  # for a few sites, Python decides and observes the first calls again


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("unchecked")
def test_plans_do_not_depend_on_the_number_of_sites(device: str) -> None:
    conv = sparse.SubMConv3d(16, 16, 3, bias=False).to(device, torch.float16)

    def call(sites: int) -> int:
        indices, before = cloud(sites, device), repeated_calls.calls_made()
        with torch.no_grad():
            conv(sparse.SparseConvTensor(torch.ones(sites, 16, device=device).half(), indices, GRID, 1))
        return repeated_calls.calls_made() - before

    for sites in (161, 163, 165, 167, 169, 171):
        call(sites)
    assert [call(sites) for sites in (173, 175, 177, 155)] == [3] * 4, repeated_calls.reasons


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("unchecked")
def test_inference_mode(device: str) -> None:
    conv = sparse.SparseConv3d(4, 4, (3, 1, 1), 2, bias=False).to(device, torch.float16)
    indices = cloud(100, device)
    features = torch.ones(100, 4, device=device).half()
    with torch.no_grad():
        expected = conv(sparse.SparseConvTensor(features, indices, GRID, 1))
    before = repeated_calls.calls_made()
    with torch.inference_mode():
        found = [conv(sparse.SparseConvTensor(features, indices, GRID, 1)) for _ in range(5)]
    assert all(torch.equal(each.features, expected.features) for each in found)
    assert all(torch.equal(each.indices, expected.indices) for each in found)
    assert repeated_calls.calls_made() - before >= 3, repeated_calls.reasons


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("unchecked")
def test_hooks_double_use_and_second_backward(device: str) -> None:
    conv = sparse.SubMConv3d(4, 4, 3, bias=False).to(device)
    conv = conv.half() if device == "cuda" else conv
    indices = cloud(120, device)
    features = torch.randn(120, 4, device=device, dtype=conv.weight.dtype, requires_grad=True)
    x = sparse.SparseConvTensor(features, indices, GRID, 1)
    seen: list[tuple[int, ...]] = []
    before = repeated_calls.calls_made()
    for _ in range(6):
        y = conv(x).features
        y.register_hook(lambda gradient: seen.append(tuple(gradient.shape)))
        once = torch.autograd.grad(y.sum(), features, retain_graph=True)[0]
        twice = torch.autograd.grad((y + y).sum(), features)[0]
        assert torch.allclose(twice, 2 * once, rtol=1e-2, atol=1e-2)
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(y.sum(), features)
    assert seen.count((120, 4)) >= 12
    assert repeated_calls.calls_made() - before >= 12, repeated_calls.reasons  # slopes of a sum are expanded, too


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreted run")
def test_all_through_the_interpreter(interpreted: Callable[..., int]) -> None:
    if cpp_extensions.compiler() is None:
        pytest.skip("no C++ compiler")
    assert interpreted(__file__) >= 3
