"""The Triton kernels of lookups, in one file for each file of operators or launches."""
