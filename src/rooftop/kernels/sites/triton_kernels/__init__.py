"""The Triton kernels of sites, in a file for each file of operators or of launches that starts them."""
