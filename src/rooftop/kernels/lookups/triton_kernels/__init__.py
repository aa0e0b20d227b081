"""The Triton kernels of lookups, in a file for each file of operators or of launches that starts them."""
