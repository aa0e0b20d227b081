"""The names of `spconv.pytorch`, so that a network for spconv runs after only changing its import.

import rooftop.sparse.pytorch as spconv
from rooftop.sparse.pytorch import SparseConvTensor, functional as Fsp, ops
from rooftop.sparse.pytorch.modules import SparseModule
from rooftop.sparse.pytorch.utils import PointToVoxel
"""

import sys

from rooftop.sparse import *  # noqa: F403
from rooftop.sparse import SparseIdentity as Identity
from rooftop.sparse import __all__ as _names
from rooftop.sparse import convolutions as conv
from rooftop.sparse import functional, modules
from rooftop.sparse import functional as ops
from rooftop.sparse import pooling as pool
from rooftop.sparse import tensor as core
from rooftop.sparse.pytorch import utils

__all__ = [*_names, "Identity", "conv", "core", "functional", "modules", "ops", "pool", "utils"]

for _name, _module in (
    ("conv", conv), ("core", core), ("functional", functional), ("modules", modules), ("ops", ops), ("pool", pool),
):  # fmt: skip
    sys.modules[f"{__name__}.{_name}"] = _module  # so that `from rooftop.sparse.pytorch.conv import ...` works
