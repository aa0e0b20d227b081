"""The Triton kernels of attentions, in a file for each file of operators or of launches that starts them."""
