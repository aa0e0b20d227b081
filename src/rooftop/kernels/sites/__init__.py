"""Sparse convolution and pooling: operators on sparse sites."""
