"""The names of `spconv.pytorch`, so that a network written for it runs with another import.

import rooftop.sparse.pytorch as spconv
from rooftop.sparse.pytorch import SparseConvTensor, functional as Fsp, ops
from rooftop.sparse.pytorch.utils import PointToVoxel
"""

from rooftop.sparse import *  # noqa: F403
from rooftop.sparse import __all__ as _names
from rooftop.sparse import convolutions as conv
from rooftop.sparse import functional, modules
from rooftop.sparse import functional as ops
from rooftop.sparse import tensor as core
from rooftop.sparse.pytorch import utils

__all__ = [*_names, "conv", "core", "functional", "modules", "ops", "utils"]
