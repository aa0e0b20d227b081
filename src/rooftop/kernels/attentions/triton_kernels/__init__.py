"""The Triton kernels of attentions, in one file for each file of operators or launches."""
