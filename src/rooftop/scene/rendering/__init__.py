"""Frames of virtual geometry: one file for each stage, in Warp, for the GPU and the CPU.

A frame begins with init_context. Then instance_cull, level_cull and rasterize run twice, with an hzb after each: for
what was visible in the last frame, and for what has become visible since. emit_depth_targets and base_pass follow.
`buffers.py` declares their shared buffers. On a GPU, persistent_cull, sort_clusters, rasterize_clusters,
reduce_tiles and base_pixels do the same in CUDA C++.
"""

from rooftop.launch.warp_launch import start_warp

start_warp("pictures of scenes", "scene")
