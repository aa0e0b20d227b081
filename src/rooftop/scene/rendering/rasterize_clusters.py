"""Small triangles in CUDA C++: `rasterize_clusters.cu`, which draws the same pixels as `rasterize.rasterize`.

With one thread for each triangle, every vertex is decoded and transformed about six times. A block for each cluster
does so once, and keeps the vertices in shared memory.
"""

from __future__ import annotations

from functools import cache

from rooftop.scene.rendering.cuda_sources import blocks_on, compiled, with_pieces
from rooftop.scene.rendering.memory import FrameMemory
from rooftop.scene.rendering.uploads import Uploaded

THREADS = 128  # of a block: a cluster has at most as many triangles
BLOCKS_OF_A_MULTIPROCESSOR = 64  # more than run at once: early finishers make room


@cache
def source() -> str:
    """The CUDA C++."""
    return with_pieces(__file__)


def draw(scene: Uploaded, now: Uploaded, memory: FrameMemory, second: int, one_sided: int) -> None:
    """The visible clusters of a pass into `pixels`; other triangles go to the list of large ones.

    Args:
        scene, now: `buffers.Resident`, `buffers.Views`.
        second, one_sided: as in `rasterize.rasterize`.
    """
    of = memory.tensors
    kernel = compiled(source(), "rasterize_clusters", memory.device)
    blocks = blocks_on(memory.device, BLOCKS_OF_A_MULTIPROCESSOR)
    meshes = ("words", "page_at", "mesh", "mesh_steps", "instance_mesh", "instance_scale")
    visible, fragments = of["visible"][second], of["fragments"] if of["fragments"].numel() else None
    kernel.launch(
        blocks, THREADS, *(scene.tensors[name] for name in meshes), now.tensors["lens"],
        now.tensors["pictures"], of["to_view"], visible,
        of["ranks"][second], of["counters"], of["pixels"], fragments, of["large"], len(visible), len(of["large"]),
        memory.places, memory.canvas.cameras, second, one_sided,
    )  # fmt: skip
