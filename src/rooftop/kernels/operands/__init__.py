"""Code that all families share: dtypes, checks, rows, and functions that kernels call."""
