"""What all families share: dtypes, checks, rows, and pieces of kernels."""
