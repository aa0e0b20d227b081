"""Small triangles in CUDA C++: `rasterize_clusters.cu`, which draws the same pixels as `rasterize.rasterize`.

With one thread for each triangle, every vertex is decoded and transformed about six times. Here a block for each
cluster does so once, and keeps the vertices in shared memory.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from rooftop.scene.rendering import trials
from rooftop.scene.rendering.cuda_sources import blocks_on, compiled, with_pieces
from rooftop.scene.rendering.memory import FrameMemory
from rooftop.scene.rendering.uploads import Uploaded

THREADS = 128  # of a block: a cluster has at most as many triangles
BLOCKS_OF_A_MULTIPROCESSOR = 64  # more than run at once, so that new blocks replace those that finish early

RECORDED = "records" in trials.ON


@cache
def source() -> str:
    """The CUDA C++."""
    file = Path(__file__)
    if not RECORDED:
        return trials.defines() + with_pieces(str(file))
    pieces, own = with_pieces(str(file.with_name("recorded_pieces.py"))), file.with_name("rasterize_recorded.cu")
    return trials.defines() + pieces + own.read_text(encoding="utf-8")


def draw(scene: Uploaded, now: Uploaded, memory: FrameMemory, second: int, one_sided: int) -> None:
    """Draw the small triangles of a pass's visible clusters into `pixels`; other triangles go to the list of large
    ones.

    Args:
        scene, now: `buffers.Resident`, `buffers.Views`.
        second, one_sided: as in `rasterize.rasterize`.
    """
    of = memory.tensors
    if RECORDED:
        _draw_recorded(scene, now, memory, second, one_sided)
        return
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


def _draw_recorded(scene: Uploaded, now: Uploaded, memory: FrameMemory, second: int, one_sided: int) -> None:
    of = memory.tensors
    counted = of["fragments"].numel() > 0
    kernel = compiled(source(), f"rasterize_clusters<{'true' if counted else 'false'}>", memory.device)
    blocks = blocks_on(memory.device, BLOCKS_OF_A_MULTIPROCESSOR)
    kernel.launch(
        blocks, THREADS, scene.tensors["words"], now.tensors["lens"], now.tensors["pictures"], of["to_view"],
        of["records"], of["ranks"][second], of["counters"], of["pixels"], of["fragments"] if counted else None,
        of["large"], of["visible"].shape[1], len(of["large"]), memory.canvas.cameras, second, one_sided,
    )  # fmt: skip
