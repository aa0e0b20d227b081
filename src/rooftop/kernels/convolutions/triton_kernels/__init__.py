"""The Triton kernels of convolutions, in a file for each file of operators or of launches that starts them."""
