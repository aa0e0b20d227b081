"""The Triton kernels of convolutions and max pools."""
