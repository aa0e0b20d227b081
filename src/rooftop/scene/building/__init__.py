"""Build geometry files: check meshes, cut them into clusters, simplify them level by level, and write pages."""
