"""Stage 3 in two launches of CUDA C++ (`persistent_cull.cu`); it finds the same clusters as `level_cull.py`.

A level of a tree is little work for a GPU, and `level_cull.py` launches a kernel for each level. Here warps without
work at one level continue with the next, and nothing waits for a level to end. A second launch tests the clusters. All
groups are known before the second launch, so none of its warps waits for another warp, and the second launch can have
more warps than the first.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor

from rooftop.scene.rendering.cuda_sources import blocks_on, compiled, with_pieces
from rooftop.scene.rendering.memory import FrameMemory
from rooftop.scene.rendering.uploads import Uploaded
from rooftop.scene.streaming.answers import RequestBuffers

THREADS = 128  # threads per block
BLOCKS_OF_A_MULTIPROCESSOR = 3  # with more blocks, each would wait longer until others add tree nodes to the queue
BLOCKS_OF_GROUPS = 9  # blocks per multiprocessor for groups; these blocks do not wait for each other


@cache
def source() -> str:
    """The CUDA C++ source of this module's kernels: `pieces.cu`, then `persistent_cull.cu`."""
    return with_pieces(__file__)


def cull(
    scene: Uploaded,
    now: Uploaded,
    then: Uploaded,
    memory: FrameMemory,
    history: int,
    second: int,
    requests: RequestBuffers | None = None,
) -> None:
    """Find the visible clusters and, in the first pass, the hidden clusters. The traversal starts from the nodes that
    `cull_instances` (first pass) or `ask_again` (second pass) listed, and from the groups that `ask_again` listed.

    Args:
        scene, now, then: `buffers.Resident`, `buffers.Views`, and `buffers.Views` of the previous frame.
        history, second: as in `level_cull.cull_nodes`.
        requests: buffers for page requests, if pages may be absent.
    """
    of, device = memory.tensors, memory.device
    meshes = ("nodes", "mesh", "instance_mesh", "instance_scale")
    pairs = ("to_view", "before", "hzb_before", "hzb_at", "counters")
    where = (
        *(scene.tensors[name] for name in meshes), now.tensors["lens"], then.tensors["lens"],
        now.tensors["pictures"], *(of[name] for name in pairs), of["groups"],
    )  # fmt: skip
    views = (memory.places, memory.canvas.cameras, of["hzb_at"].shape[1], memory.frame.pixel_error)

    def launch(name: str, of_a_multiprocessor: int, first: tuple[Any, ...], lists: tuple[Tensor, ...]) -> None:
        blocks, rooms = blocks_on(device, of_a_multiprocessor), map(len, (of["groups"], *lists))
        kernel = compiled(source(), name, device)
        kernel.launch(blocks, THREADS, *first, *where, *lists, *rooms, *views, history, second)

    launch("persistent_cull", BLOCKS_OF_A_MULTIPROCESSOR, (), (of["nodes"][0], of["hidden_children"]))
    pages = tuple(scene.tensors[name] for name in ("words", "page_at", "mesh_steps"))
    asked = ("group_page", "first_group", "wanted")
    of_requests = (None,) * 3 if requests is None else tuple(requests.tensors[name] for name in asked)
    groups = f"cull_groups<{'false' if requests is None else 'true'}>"
    launch(groups, BLOCKS_OF_GROUPS, (*pages, *of_requests), (of["found"], of["hidden_clusters"]))
