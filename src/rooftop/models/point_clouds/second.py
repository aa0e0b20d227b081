"""The backbone of SECOND: from the voxels of a LiDAR scan to a bird's-eye view map.

Yan et al. 2018, "SECOND: Sparsely Embedded Convolutional Detection", section 3.2, with the layers, norms and keys of
OpenPCDet's `VoxelBackBone8x`, which many detectors for road scenes use.

    backbone = second_backbone()
    bev = backbone(x)  # (B, 256, H / 8, W / 8) for a grid of 41 x H x W
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from rooftop.errors import WeightsError
from rooftop.launch.symbolic import refuse_proxies
from rooftop.sparse import SparseConv3d, SparseConvTensor, SparseSequential, SubMConv3d

PREFIX = "backbone_3d."  # prefix of the backbone's keys in a detector of OpenPCDet
CHECKPOINT = "model_state"  # key of the state dict in a checkpoint of OpenPCDet


class SecondBackbone(nn.Module):
    """Four stages of submanifold convolutions, and a convolution that halves the height.

    Each stage after the first halves the grid of the previous stage.

    Args:
        in_channels: channels of a voxel.
    """

    def __init__(self, in_channels: int = 4) -> None:
        super().__init__()
        self.conv_input = kept(in_channels, 16, "subm1")
        self.conv1 = SparseSequential(kept(16, 16, "subm1"))
        self.conv2 = stage(16, 32, 1, 2)
        self.conv3 = stage(32, 64, 1, 3)
        self.conv4 = stage(64, 64, (0, 1, 1), 4)
        self.conv_out = SparseSequential(
            SparseConv3d(64, 128, (3, 1, 1), (2, 1, 1), bias=False, indice_key="spconv_down2"), norm(128), nn.ReLU()
        )

    def forward(self, x: SparseConvTensor) -> Tensor:
        """Compute the bird's-eye view map.

        Args:
            x: voxels with `in_channels`, on a grid (D, H, W) of at least 25 x 1 x 1, which the kernels need.

        Returns:
            (B, 128 * d, h, w): the channels of the d height levels are concatenated. d is 2 if D is 41; h and w are H /
            8 and W / 8, rounded up. Cells that no voxel reaches are zero.

        Raises:
            ValueError: the grid is too small.
        """
        refuse_proxies(self, x)
        dense = self.stages(x)[-1].dense()  # (B, 128, d, h, w)
        return dense.flatten(1, 2)

    def stages(self, x: SparseConvTensor) -> tuple[SparseConvTensor, ...]:
        """Compute the voxels after each stage (16, 32, 64 and 64 channels) and after the last convolution (128).

        Some detectors also use the voxels of the four stages.
        """
        x = self.conv_input(x)
        found = []
        for layer in (self.conv1, self.conv2, self.conv3, self.conv4, self.conv_out):
            x = layer(x)
            found.append(x)
        return tuple(found)


# ---- parts -----------------------------------------------------------------------------------------------------


def norm(channels: int) -> nn.BatchNorm1d:
    """A batch norm with OpenPCDet's epsilon and momentum."""
    return nn.BatchNorm1d(channels, eps=1e-3, momentum=0.01)


def kept(channels: int, out: int, key: str) -> SparseSequential:
    """A submanifold convolution, whose output has the same active sites as its input, then norm and ReLU."""
    return SparseSequential(SubMConv3d(channels, out, 3, bias=False, indice_key=key), norm(out), nn.ReLU())


def stage(channels: int, out: int, padding: int | Sequence[int], number: int) -> SparseSequential:
    """A stage: a convolution that halves the grid, then two submanifold convolutions."""
    halved = SparseConv3d(channels, out, 3, 2, padding, bias=False, indice_key=f"spconv{number}")
    key = f"subm{number}"
    return SparseSequential(SparseSequential(halved, norm(out), nn.ReLU()), kept(out, out, key), kept(out, out, key))


# ---- weights ---------------------------------------------------------------------------------------------------


def second_state_dict(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """Extract the backbone's tensors from a checkpoint of OpenPCDet.

    Args:
        checkpoint: the checkpoint as `torch.load` returns it, or the state dict of the detector or of the backbone.

    Raises:
        WeightsError: the checkpoint contains no backbone.
    """
    tensors = checkpoint.get(CHECKPOINT, checkpoint)
    if any(key.startswith(PREFIX) for key in tensors):
        tensors = {key.removeprefix(PREFIX): tensor for key, tensor in tensors.items() if key.startswith(PREFIX)}
    if "conv_input.0.weight" not in tensors:
        raise WeightsError(
            f"expected OpenPCDet's VoxelBackBone8x, with the key {PREFIX}conv_input.0.weight; "
            f"got {', '.join(list(tensors)[:5]) or 'nothing'}"
        )
    return dict(tensors)


# ---- by name ---------------------------------------------------------------------------------------------------


def second_backbone(in_channels: int = 4) -> SecondBackbone:
    """The backbone for voxels with `in_channels`, by default x, y, z and reflectance."""
    return SecondBackbone(in_channels)
