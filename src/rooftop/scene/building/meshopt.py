"""Call meshoptimizer, which groups clusters and simplifies meshes. No other module calls it.

meshoptimizer's Python package wraps only some functions. So this module calls meshoptimizer's C library directly. These
calls also release the GIL, so that threads run in parallel. Pointers are plain addresses: the caller must keep the
arrays alive and in C order.
"""

from __future__ import annotations

import ctypes
import functools

import numpy as np
import numpy.typing as npt

from rooftop.errors import MissingExtraError

Array = npt.NDArray[np.generic]

ABSOLUTE = 1 << 2  # flag: return errors in the units of the positions
NO_LIMIT = 1e18  # an error limit larger than any mesh; float32 can still represent its square

_P, _SIZE, _F, _U = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_float, ctypes.c_uint
_SIGNATURES: dict[str, tuple[type, list[type]]] = {
    "meshopt_generateVertexRemap": (_SIZE, [_P, _P, _SIZE, _P, _SIZE, _SIZE]),
    "meshopt_partitionClusters": (_SIZE, [_P, _P, _SIZE, _P, _SIZE, _SIZE, _SIZE]),
    "meshopt_simplifyWithAttributes": (
        _SIZE,
        [_P, _P, _SIZE, _P, _SIZE, _SIZE, _P, _SIZE, _P, _SIZE, _P, _SIZE, _F, _U, _P],
    ),
}


@functools.cache
def library() -> ctypes.CDLL:
    """Load the C library; its functions have the names of meshoptimizer's C header.

    Raises:
        MissingExtraError: meshoptimizer is not installed.
    """
    try:
        from meshoptimizer._loader import lib_path
    except ImportError as error:
        raise MissingExtraError('building a scene needs meshoptimizer: pip install "rooftop[scene]"') from error
    loaded = ctypes.CDLL(lib_path)
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def address(array: Array) -> int:
    """The address of an array in C order."""
    assert array.flags.c_contiguous
    return array.ctypes.data


def same_rows(rows: Array, used: npt.NDArray[np.uint32] | None = None) -> tuple[int, npt.NDArray[np.uint32]]:
    """Number the distinct rows in order of first appearance. Rows with equal bytes get the same number.

    Args:
        rows: (N, K), at most 256 bytes each.
        used: indices of the rows to number; this order counts as the order of appearance. By default all rows.

    Returns:
        the count of distinct rows, and the number of each row (N,); 2^32 - 1 for unused rows.
    """
    numbers = np.empty(len(rows), np.uint32)
    if not len(rows):
        return 0, numbers
    indices, count = (None, len(rows)) if used is None else (address(used), used.size)
    width = rows.itemsize * rows.shape[1]
    remap = library().meshopt_generateVertexRemap
    return int(remap(address(numbers), indices, count, address(rows), len(rows), width)), numbers


def partition(
    corners: npt.NDArray[np.uint32], counts: npt.NDArray[np.uint32], vertices: int, size: int
) -> npt.NDArray[np.uint32]:
    """Partition clusters into parts of about `size` clusters (at most 11/8 of `size`) that share many vertices; return
    the part of each cluster.

    Args:
        corners: the vertices of all clusters' corners, cluster by cluster.
        counts: (C,) number of corners of each cluster.
        vertices: number of vertices; all of `corners` are below it.
    """
    parts = np.empty(len(counts), np.uint32)
    library().meshopt_partitionClusters(
        address(parts), address(corners), len(corners), address(counts), len(counts), vertices, size
    )
    return parts
