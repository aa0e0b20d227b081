"""SwiGLU, the smallest family and the first one to read."""
