"""Triton functions and kernels that several families launch or call."""
