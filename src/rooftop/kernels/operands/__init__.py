"""Code that all families of kernels share: dtypes, checks, rows, and functions that kernels call."""
