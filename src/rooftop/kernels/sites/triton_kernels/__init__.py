"""The Triton kernels of sites, in one file for each file of operators or launches."""
