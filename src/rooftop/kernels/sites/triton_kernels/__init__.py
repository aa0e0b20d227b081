"""The Triton kernels of sparse convolutions and of pooling over sites."""
