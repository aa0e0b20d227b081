"""Pages on the device as they are needed: `Renderer(scene, pool_bytes=...)`. docs/scene.md explains it.

Read in this order: `page_graph.py` (all pages of a scene, and which needs which), `slots.py` (which page is in which
slot), `requests.py` (what the culls ask for), `streamed_cull.py` (the cull where pages may be absent), `answers.py`
(how the host reads what was asked for), `plans.py` (what is loaded, and what goes for it), `loading.py` (threads that
read, check and upload), `admission.py` (what makes pages visible to kernels), and `pool.py`, which brings all of it
together for a renderer.
"""
