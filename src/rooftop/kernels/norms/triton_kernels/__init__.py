"""The Triton kernels of norms, in one file for each file of operators or launches."""
