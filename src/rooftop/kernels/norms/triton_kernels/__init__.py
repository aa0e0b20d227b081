"""The Triton kernels of norms, in a file for each file of operators or of launches that starts them."""
