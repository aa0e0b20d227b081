"""Operators over sparse sites: convolution and pooling."""
