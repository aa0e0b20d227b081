"""Load pages to the device when frames need them: `Renderer(scene, pool_bytes=...)`. docs/scene.md explains streaming.

Read in this order: `page_graph.py` (all pages of a scene, and the pages that each needs), `slots.py` (which page is in
which slot), `requests.py` (the culls' requests), `streamed_cull.py` (culling with absent pages), `answers.py` (how the
host reads the requests), `plans.py` (what to load, and what to evict for it), `loading.py` (threads that read, check
and upload), `page_reader.cpp` (the same threads and plans in C++), `admission.py` (making pages visible to kernels),
`page_table.py` (how the host sends the positions of pages to the device), and `pool.py`, which combines all of these
for a renderer.
"""
