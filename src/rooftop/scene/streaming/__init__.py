"""Load pages to the device when frames need them: `Renderer(scene, pool_bytes=...)`. docs/scene.md explains streaming.

Read in this order: `page_graph.py` (all pages of a scene, and the pages that each needs), `slots.py` (which page is in
which slot), `requests.py` (the page requests of the culling kernels), `streamed_cull.py` (culling with absent pages),
`answers.py` (how the host reads the requests), `plans.py` (which pages to load, and which to evict for them),
`loading.py` (threads that read, check and upload pages), `page_reader.cpp` (threads and plans in C++), `admission.py`
(making pages visible to kernels), `page_table.py` (how the host sends the positions of pages to the device), and
`pool.py`, which combines all of these for a renderer.
"""
