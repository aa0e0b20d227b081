"""Render frames of virtual geometry: one file for each stage, in Warp, for the GPU and the CPU.

A frame begins with init_context. Then instance_cull, level_cull, rasterize and hzb run twice: in the first pass for
geometry that was visible in the last frame, in the second for geometry that has become visible since.
emit_depth_targets and base_pass follow. `buffers.py` declares the buffers that stages share. On a GPU, the CUDA C++
kernels persistent_cull, sort_clusters, rasterize_clusters, reduce_tiles and base_pixels compute the same results
faster.
"""

from rooftop.launch.warp_launch import start_warp

start_warp("pictures of scenes", "scene")
