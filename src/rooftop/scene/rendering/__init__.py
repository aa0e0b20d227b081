"""Render frames of virtual geometry. Each stage is one source file with kernels in Warp, for the GPU and the CPU.

A frame begins with init_context. Then come two passes of culling, rasterize and hzb: the first pass (instance_cull,
level_cull) draws geometry that was visible in the previous frame, the second pass (level_cull) draws geometry that has
become visible since. Without occlusion culling or without a previous frame, one pass draws everything. Finally
base_pass writes the outputs; if no output needs base_pass, emit_depth_targets writes them. `buffers.py` declares the
buffers that stages share. On a GPU, the CUDA C++ kernels persistent_cull, sort_clusters, rasterize_clusters,
reduce_tiles and base_pixels compute the same results faster.
"""

from rooftop.launch.warp_launch import start_warp

start_warp("pictures of scenes", "scene")
