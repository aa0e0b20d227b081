"""The backbone of SECOND agrees with a dense network of the same weights, and has OpenPCDet's keys."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rooftop.errors import WeightsError
from rooftop.models import SecondBackbone, second_backbone
from rooftop.models.point_clouds.second import second_state_dict
from rooftop.sparse import SparseConvTensor, SubMConv3d

GRID = (41, 24, 16)
CONVOLUTIONS = {  # shapes of OpenPCDet's VoxelBackBone8x, spconv 2: (out, kernel, in)
    "conv_input.0": (16, 3, 3, 3, 4),
    "conv1.0.0": (16, 3, 3, 3, 16),
    "conv2.0.0": (32, 3, 3, 3, 16),
    "conv2.1.0": (32, 3, 3, 3, 32),
    "conv2.2.0": (32, 3, 3, 3, 32),
    "conv3.0.0": (64, 3, 3, 3, 32),
    "conv3.1.0": (64, 3, 3, 3, 64),
    "conv3.2.0": (64, 3, 3, 3, 64),
    "conv4.0.0": (64, 3, 3, 3, 64),
    "conv4.1.0": (64, 3, 3, 3, 64),
    "conv4.2.0": (64, 3, 3, 3, 64),
    "conv_out.0": (128, 3, 1, 1, 64),
}


@pytest.fixture(scope="module")
def backbone() -> SecondBackbone:
    """A backbone for inference whose norms have an effect."""
    torch.manual_seed(1)
    backbone = second_backbone().eval()
    for module in backbone.modules():
        if isinstance(module, nn.BatchNorm1d):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.02, 0.1)
            nn.init.normal_(module.bias, std=0.2)
    return backbone


def voxels(sites: int = 200, batch: int = 2) -> SparseConvTensor:
    draw = torch.Generator().manual_seed(0)
    cells = batch * GRID[0] * GRID[1] * GRID[2]
    flat = torch.randperm(cells, generator=draw)[:sites]
    indices = torch.stack(torch.unravel_index(flat, (batch, *GRID)), 1).int()
    return SparseConvTensor(torch.randn(sites, 4, generator=draw), indices, GRID, batch)


def dense_twin(backbone: SecondBackbone, x: SparseConvTensor) -> Tensor:
    """Compute every convolution on the whole grid, with zero results where there is no site."""
    grid = x.dense()
    mask = x.replace_feature(torch.ones(len(x.indices), 1)).dense()
    layers = [module for module in backbone.modules() if not list(module.children())]
    for conv, norm in zip(layers[::3], layers[1::3], strict=True):  # every third module is a ReLU
        same = isinstance(conv, SubMConv3d)
        step = {"padding": 1} if same else {"stride": tuple(conv.stride), "padding": tuple(conv.padding)}
        if not same:
            mask = F.conv3d(mask, torch.ones(1, 1, *conv.kernel_size), **step).clamp(max=1)
        grid = F.conv3d(grid, conv.weight.permute(0, 4, 1, 2, 3), **step)
        figures = (norm.running_mean, norm.running_var, norm.weight, norm.bias, False, 0.0, 1e-3)
        grid = F.batch_norm(grid, *figures).relu() * mask
    return grid.flatten(1, 2)


def test_the_map_is_that_of_the_dense_network(backbone: SecondBackbone) -> None:
    x = voxels()
    bev = backbone(x)
    assert bev.shape == (2, 256, 3, 2)
    torch.testing.assert_close(bev, dense_twin(backbone, x), rtol=1e-4, atol=1e-4)
    assert (bev != 0).float().mean() > 0.1


def test_elements_of_a_batch_do_not_see_each_other(backbone: SecondBackbone) -> None:
    both = voxels()
    rows = both.indices[:, 0] == 1
    alone = SparseConvTensor(both.features[rows], both.indices[rows] - torch.tensor([1, 0, 0, 0]).int(), GRID, 1)
    torch.testing.assert_close(backbone(alone)[0], backbone(both)[1])


def test_stages_have_the_strides_and_channels_of_detectors(backbone: SecondBackbone) -> None:
    found = backbone.stages(voxels())
    assert [stage.features.shape[1] for stage in found] == [16, 32, 64, 64, 128]
    shapes = [[41, 24, 16], [21, 12, 8], [11, 6, 4], [5, 3, 2], [2, 3, 2]]
    assert [stage.spatial_shape for stage in found] == shapes


def test_gradients_reach_every_weight_and_the_voxels() -> None:
    torch.manual_seed(0)
    backbone, x = second_backbone(), voxels(400)
    x.features.requires_grad_()
    backbone(x).square().sum().backward()
    for tensor in (x.features, *backbone.parameters()):
        assert tensor.grad is not None
        assert torch.isfinite(tensor.grad).all()
        assert tensor.grad.abs().max() > 0


def test_without_voxels_the_map_is_empty(backbone: SecondBackbone) -> None:
    bev = backbone(voxels(0))
    assert bev.shape == (2, 256, 3, 2)
    assert not bev.any()


def test_a_grid_that_is_too_small_is_refused(backbone: SecondBackbone) -> None:
    features, origin = torch.ones(1, 4), torch.zeros(1, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match="does not fit into spatial_shape"):
        backbone(SparseConvTensor(features, origin, (24, 8, 8), 1))
    assert backbone(SparseConvTensor(features, origin, (25, 1, 1), 1)).shape == (1, 128, 1, 1)


def test_keys_and_shapes_are_those_of_openpcdet(backbone: SecondBackbone) -> None:
    shapes = {key: tuple(tensor.shape) for key, tensor in backbone.state_dict().items()}
    norms = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    expected = {f"{name}.weight": shape for name, shape in CONVOLUTIONS.items()}
    for name, (out, *_) in CONVOLUTIONS.items():
        norm = f"{name[:-1]}1"
        expected |= {f"{norm}.{key}": () if key == "num_batches_tracked" else (out,) for key in norms}
    assert shapes == expected
    assert {(m.eps, m.momentum) for m in backbone.modules() if isinstance(m, nn.BatchNorm1d)} == {(1e-3, 0.01)}


@pytest.mark.parametrize("prefix", ["", "backbone_3d."])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_checkpoint_of_a_detector_loads(backbone: SecondBackbone, tmp_path: Path, prefix: str, wrapped: bool) -> None:
    tensors = {prefix + key: tensor for key, tensor in backbone.state_dict().items()}
    if prefix:
        tensors |= {"backbone_2d.blocks.0.1.weight": torch.ones(2), "dense_head.conv_cls.bias": torch.ones(3)}
    torch.save({"epoch": 80, "it": 1, "model_state": tensors} if wrapped else tensors, tmp_path / "second.pth")
    other = second_backbone().eval()
    other.load_state_dict(second_state_dict(torch.load(tmp_path / "second.pth", weights_only=True)))
    x = voxels()
    assert torch.equal(other(x), backbone(x))


def test_what_has_no_backbone_is_refused() -> None:
    with pytest.raises(WeightsError, match=r"expected OpenPCDet's VoxelBackBone8x.*got vfe.pfn_layers.0.weight"):
        second_state_dict({"model_state": {"vfe.pfn_layers.0.weight": torch.ones(1)}})
