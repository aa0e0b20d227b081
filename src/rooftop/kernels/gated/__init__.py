"""SwiGLU, the smallest family: read it first."""
