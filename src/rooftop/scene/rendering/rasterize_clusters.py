"""Draw small triangles in CUDA C++ (`rasterize_clusters.cu`), with the same pixels as `rasterize.rasterize`.

With one thread per triangle, every vertex is decoded and transformed about six times. Here one block per cluster
decodes and transforms each vertex once, and keeps the vertices in shared memory.
"""

from __future__ import annotations

from functools import cache

from rooftop.scene.rendering.cuda_sources import blocks_on, compiled, with_pieces
from rooftop.scene.rendering.memory import FrameMemory
from rooftop.scene.rendering.uploads import Uploaded

THREADS = 128  # threads of a block; a cluster has at most this many triangles
BLOCKS_OF_A_MULTIPROCESSOR = 64  # more blocks than run at once, so that new blocks replace those that finish early


@cache
def source() -> str:
    """The CUDA C++ source of this module's kernels: `pieces.cu`, `records.cu`, then `rasterize_clusters.cu`."""
    return with_pieces(__file__, "records.cu")


def draw(scene: Uploaded, now: Uploaded, memory: FrameMemory, second: int, one_sided: int) -> None:
    """Draw the small triangles of a pass's visible clusters into `pixels`; other triangles are appended to the
    list of large triangles.

    Args:
        scene, now: `buffers.Resident`, `buffers.Views`.
        second, one_sided: as in `rasterize.rasterize`.
    """
    of = memory.tensors
    counted = of["fragments"].numel() > 0
    kernel = compiled(source(), f"rasterize_clusters<{'true' if counted else 'false'}>", memory.device)
    blocks = blocks_on(memory.device, BLOCKS_OF_A_MULTIPROCESSOR)
    kernel.launch(
        blocks, THREADS, scene.tensors["words"], now.tensors["lens"], now.tensors["pictures"], of["to_view"],
        of["records"], of["ranks"][second], of["counters"], of["pixels"], of["fragments"] if counted else None,
        of["large"], of["visible"].shape[1], len(of["large"]), memory.canvas.cameras, second, one_sided,
    )  # fmt: skip
