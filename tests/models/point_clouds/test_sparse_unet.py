"""MinkUNet and the sparse U-Net agree at the sites with a dense network of the same weights."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rooftop.hardware.graphs import captured
from rooftop.models import MinkUNet, SparseUNet, minkunet18, minkunet34
from rooftop.models.point_clouds.sparse_unet import Block, Up, UShape
from rooftop.sparse import SparseConv3d, SparseConvTensor, SparseInverseConv3d, SubMConv3d

GRID = (17, 9, 14)  # odd sizes: a site in the last cell must not get lost
BUILDERS = {
    "minkunet": lambda: MinkUNet((1, 2, 1, 1, 1, 1, 2, 1), 3, 5, (4, 6, 8, 10, 8, 6, 5, 4)),
    "unet": lambda: SparseUNet(3, 5, (4, 6, 8)),
}


@pytest.fixture(params=BUILDERS)
def model(request: pytest.FixtureRequest) -> UShape:
    """A small network in float64 for inference, whose norms have an effect."""
    torch.manual_seed(1)
    model: UShape = BUILDERS[request.param]().double().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            nn.init.normal_(module.running_mean, std=0.2)
            nn.init.uniform_(module.running_var, 0.5, 2)
            nn.init.normal_(module.bias, std=0.2)
    return model


def cloud(sites: int = 60, batch: int = 2, seed: int = 0) -> SparseConvTensor:
    """Random sites in random order, including the last cell of each batch element."""
    draw = torch.Generator().manual_seed(seed)
    cells = GRID[0] * GRID[1] * GRID[2]
    flat = torch.cat([b * cells + torch.randperm(cells - 1, generator=draw)[: sites - 1] for b in range(batch)])
    flat = torch.cat([flat, cells * torch.arange(1, batch + 1) - 1])
    flat = flat[torch.randperm(len(flat), generator=draw)]
    indices = torch.stack(torch.unravel_index(flat, (batch, *GRID)), 1).int()
    features = torch.randn(len(indices), 3, dtype=torch.float64, generator=draw)
    return SparseConvTensor(features, indices, GRID, batch)


def at_sites(grid: Tensor, indices: Tensor) -> Tensor:
    return grid.movedim(1, -1)[tuple(indices.long().t())]


class DenseTwin:
    """Computes a network by dense convolutions, with zero results where there is no site.

    `finer` maps each indice_key to the mask to which an inverse convolution returns.
    """

    def __init__(self) -> None:
        self.finer: dict[str, Tensor] = {}

    def __call__(self, module: nn.Module, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Map values (B, C, z, y, x) and a mask (B, 1, z, y, x) of 0 and 1 to new values and a new mask."""
        if isinstance(module, SubMConv3d):
            return F.conv3d(x, module.weight.permute(0, 4, 1, 2, 3), padding=1) * mask, mask
        if isinstance(module, SparseConv3d):
            self.finer[module.indice_key] = mask
            step = {"stride": module.stride[0], "padding": module.padding[0]}
            ones = torch.ones(1, 1, *module.kernel_size, dtype=mask.dtype)
            return F.conv3d(x, module.weight.permute(0, 4, 1, 2, 3), **step), F.conv3d(mask, ones, **step).clamp(max=1)
        if isinstance(module, SparseInverseConv3d):
            mask, weight = self.finer[module.indice_key], module.weight.permute(4, 0, 1, 2, 3)
            padding = (module.kernel_size[0] - 1) // 2
            full = F.conv_transpose3d(x, weight, stride=2)[:, :, padding:, padding:, padding:]
            missing = [n for dim in (4, 3, 2) for n in (0, mask.shape[dim] - full.shape[dim])]
            return F.pad(full, missing) * mask, mask
        if isinstance(module, nn.BatchNorm1d):
            figures = (module.running_mean, module.running_var, module.weight, module.bias, False, 0.0, module.eps)
            return F.batch_norm(x, *figures) * mask, mask
        if isinstance(module, nn.ReLU):
            return x.relu(), mask
        if isinstance(module, nn.Linear):
            return F.linear(x.movedim(1, -1), module.weight, module.bias).movedim(-1, 1) * mask, mask
        if isinstance(module, Block):
            shortcut = x if module.shortcut is None else self(module.shortcut, x, mask)[0]
            y, _ = self(module.second, *self(module.first, x, mask))
            return (y + shortcut).relu(), mask
        for child in module.children():
            x, mask = self(child, x, mask)
        return x, mask

    def whole(self, model: UShape, x: Tensor, mask: Tensor) -> Tensor:
        levels = [self(model.stem, x, mask)]
        for stage in model.encoder:
            levels.append(self(stage, *levels[-1]))
        y, mask = levels.pop()
        for stage in model.decoder:
            assert isinstance(stage, Up)
            y, mask = self(stage.up, y, mask)
            y, mask = self(stage.blocks, torch.cat([y, levels.pop()[0]], 1), mask)
        return self(model.head, y, mask)[0]


def dense_twin(model: UShape, x: SparseConvTensor) -> Tensor:
    """Logits at the sites of x, computed on the whole grid. For a MinkUNet the grid is enlarged to multiples of 16."""
    larger = [-(-size // 16) * 16 for size in GRID] if isinstance(model, MinkUNet) else GRID
    grid, mask = (
        SparseConvTensor(features, x.indices, larger, x.batch_size).dense()
        for features in (x.features, torch.ones_like(x.features[:, :1]))
    )
    return at_sites(DenseTwin().whole(model, grid, mask), x.indices)


def test_logits_are_those_of_the_dense_network_of_the_same_weights(model: UShape) -> None:
    x = cloud()
    y = model(x)
    assert (y.spatial_shape, y.batch_size) == (list(GRID), 2)
    assert y.indices is x.indices
    torch.testing.assert_close(y.features, dense_twin(model, x), rtol=1e-9, atol=1e-9)


def test_gradients_are_those_of_the_dense_network(model: UShape) -> None:
    x = cloud()
    x.features.requires_grad_()
    inputs = [x.features, *model.parameters()]
    gradient = torch.randn(len(x.indices), 5, dtype=torch.float64)
    ours = torch.autograd.grad(model(x).features, inputs, gradient)
    theirs = torch.autograd.grad(dense_twin(model, x), inputs, gradient)
    for found, exact in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-8, atol=1e-8)
        assert found.abs().max() > 0


@pytest.mark.parametrize("model", ["minkunet"], indirect=True)
def test_a_larger_grid_changes_nothing(model: UShape) -> None:
    x = cloud()
    larger = SparseConvTensor(x.features, x.indices, [33, 40, 16], x.batch_size)
    torch.testing.assert_close(model(larger).features, model(x).features)


def test_elements_of_a_batch_do_not_see_each_other_and_rows_stay_theirs(model: UShape) -> None:
    both = cloud()
    order = torch.randperm(len(both.indices), generator=torch.Generator().manual_seed(3))
    shuffled = SparseConvTensor(both.features[order], both.indices[order], GRID, 2)
    logits = model(both).features
    torch.testing.assert_close(model(shuffled).features, logits[order])
    for element in range(2):
        rows = both.indices[:, 0] == element
        indices = both.indices[rows]
        indices[:, 0] = 0
        alone = SparseConvTensor(both.features[rows], indices, GRID, 1)
        torch.testing.assert_close(model(alone).features, logits[rows])


@pytest.mark.parametrize("sites", [0, 1])
def test_a_cloud_of_hardly_any_points(model: UShape, sites: int) -> None:
    x = SparseConvTensor(torch.randn(sites, 3, dtype=torch.float64), torch.tensor([[0, 16, 8, 13]])[:sites], GRID, 1)
    torch.testing.assert_close(model(x).features, dense_twin(model, x))
    logits = model.train()(x).features
    assert logits.shape == (sites, 5)
    logits.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    assert all(torch.isfinite(b).all() for b in model.buffers())


def test_training_learns_a_small_cloud_by_heart(model: UShape) -> None:
    x = cloud(20)
    labels = (x.indices.sum(1) % 5).long()
    optimizer = torch.optim.Adam(model.train().parameters(), lr=0.03)
    losses = []
    for _ in range(10):
        loss = F.cross_entropy(model(x).features, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.85 * losses[0], losses
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


def test_one_rulebook_serves_all_layers_of_a_level_and_another_call(model: UShape) -> None:
    x = cloud()
    kept = model(x).indice_dict
    levels = len(model.encoder)
    assert set(kept) == {f"level{n}" for n in range(levels + 1)} | {f"down{n}" for n in range(1, levels + 1)}
    again = SparseConvTensor(2 * x.features, x.indices, GRID, 2, indice_dict=kept)
    found = model(again)
    assert all(found.indice_dict[key] is rulebook for key, rulebook in kept.items())
    torch.testing.assert_close(found.features, model(x.replace_feature(2 * x.features)).features)


def with_bounds(model: UShape, rows: int) -> UShape:
    """A copy whose strided convolutions are bounded to this many rows of outputs."""
    twin = copy.deepcopy(model)
    for module in twin.modules():
        if isinstance(module, SparseConv3d):
            module.num_out_act_bound = rows
    return twin


@pytest.mark.parametrize("training", [False, True])
def test_bounds_of_the_outputs_change_nothing(model: UShape, training: bool) -> None:
    x = cloud()
    bounded = with_bounds(model.train(training), 300)
    torch.testing.assert_close(bounded(x).features, model(x).features)
    for ours, plain in zip(bounded.buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(ours, plain)


@pytest.mark.gpu
def test_with_bounds_a_graph_captures_the_network_and_its_rulebooks(model: UShape) -> None:
    model = with_bounds(model, 300).float().cuda()
    x, other = (cloud(seed=seed) for seed in range(2))
    indices, features = x.indices.cuda(), x.features.float().cuda()
    found: list[Tensor] = []

    @torch.no_grad()
    def call() -> None:
        found[:] = [model(SparseConvTensor(features, indices, GRID, 2)).features]

    replay = captured(call)
    indices.copy_(other.indices)
    features.copy_(other.features)
    replay()
    replayed = found[0].clone()
    call()
    torch.testing.assert_close(replayed, found[0], rtol=1e-5, atol=1e-5)


def test_the_sizes_are_those_published() -> None:
    """Tang et al. 2020, table 2: MinkowskiNet with two blocks in each stage has 21.7 million parameters."""
    with torch.device("meta"):
        small, large = minkunet18(4, 19), minkunet34(4, 19)
    assert round(sum(p.numel() for p in small.parameters()) / 1e6, 1) == 21.7
    for network, layers in ((small, [2] * 8), (large, [2, 3, 4, 6, 2, 2, 2, 2])):
        down, up = [len(stage[1]) for stage in network.encoder], [len(stage.blocks) for stage in network.decoder]
        assert [*down, *up] == layers


def test_wrong_layouts_say_what_is_expected() -> None:
    with pytest.raises(ValueError, match=r"expected 8 numbers in layers and in planes, got \[2, 2\] and \[32, "):
        MinkUNet((2, 2), 4, 19)
    with pytest.raises(ValueError, match="at least one level"):
        SparseUNet(4, 19, ())


def test_what_is_no_sparse_tensor(model: UShape) -> None:
    with pytest.raises(TypeError, match=r"takes a rooftop\.sparse\.SparseConvTensor, got Tensor"):
        model(torch.zeros(3, 4))
