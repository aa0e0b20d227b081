"""The Triton kernels of convolutions, in one file for each file of operators or launches."""
