"""SwiGLU: the smallest family of kernels, and a good one to read first."""
