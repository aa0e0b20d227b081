"""The Triton kernels of embeddings and of trilinear interpolation."""
