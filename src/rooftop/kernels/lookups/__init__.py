"""Read rows or corners of a table by index: embeddings and trilinear interpolation."""
