"""Stage 3 in one launch, in CUDA C++: `persistent_cull.cu`, which finds the same clusters as `level_cull.py`.

A level of a tree is little work for a GPU, and `level_cull.py` needs a launch for each. Here warps without work at one
level continue with the next, or with the clusters, and nothing waits for a level to end.
"""

from __future__ import annotations

from functools import cache

from rooftop.scene.rendering import trials
from rooftop.scene.rendering.cuda_sources import blocks_on, compiled, with_pieces
from rooftop.scene.rendering.memory import FrameMemory
from rooftop.scene.rendering.uploads import Uploaded
from rooftop.scene.streaming.answers import RequestBuffers

THREADS = 128  # of a block
BLOCKS_OF_GROUPS = 9
BLOCKS_OF_A_MULTIPROCESSOR = 3  # more of them wait longer for each other's nodes


@cache
def source() -> str:
    """The CUDA C++."""
    return trials.defines() + with_pieces(__file__)


def cull(
    scene: Uploaded,
    now: Uploaded,
    then: Uploaded,
    memory: FrameMemory,
    history: int,
    second: int,
    requests: RequestBuffers | None = None,
) -> None:
    """Find the visible clusters and, in the first pass, the hidden ones, from the roots and groups in the lists.

    Args:
        scene, now, then: `buffers.Resident`, `buffers.Views` and those of the previous frame. history, second: as in
        `level_cull.cull_nodes`.
        requests: if pages may be absent.
    """
    of = memory.tensors
    streamed = "false" if requests is None else "true"
    kernel = compiled(source(), f"persistent_cull<{streamed}>", memory.device)
    asked = [None] * 3 if requests is None else [requests.tensors[n] for n in ("group_page", "first_group", "wanted")]
    blocks = blocks_on(memory.device, BLOCKS_OF_A_MULTIPROCESSOR)
    meshes = ("words", "page_at", "nodes", "mesh", "mesh_steps", "instance_mesh", "instance_scale")
    pairs = ("to_view", "before", "hzb_before", "hzb_at", "counters")
    lists = (of["nodes"][0], of["groups"], of["found"], of["hidden_children"], of["hidden_clusters"])
    arguments = (
        *(scene.tensors[name] for name in meshes), now.tensors["lens"], then.tensors["lens"],
        now.tensors["pictures"], *(of[name] for name in pairs), *lists, *map(len, lists), memory.places,
        memory.canvas.cameras, of["hzb_at"].shape[1], memory.frame.pixel_error, history, second, *asked,
    )  # fmt: skip
    kernel.launch(blocks, THREADS, *arguments)
    if "groups" in trials.ON:
        kernel = compiled(source(), f"cull_groups<{streamed}>", memory.device)
        kernel.launch(blocks_on(memory.device, BLOCKS_OF_GROUPS), THREADS, *arguments)
