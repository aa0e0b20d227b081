"""Building geometry files: meshes checked, cut into clusters, simplified level by level, written as pages."""
