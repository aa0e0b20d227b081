"""Frames of virtual geometry: one file for each stage, in Warp, for the GPU and the CPU.

A frame is init_context; then twice, for what was visible in the last frame and for what has come into view since,
instance_cull, level_cull and rasterize; an hzb after each; emit_depth_targets; base_pass. `buffers.py` declares what
they share. On a GPU, persistent_cull, sort_clusters, rasterize_clusters and reduce_tiles do the same in CUDA C++.
"""

from rooftop.launch.warp_launch import start_warp

start_warp("pictures of scenes", "scene")
