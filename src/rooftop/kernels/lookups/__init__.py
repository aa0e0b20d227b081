"""Rows and corners of a table read by index: embeddings and trilinear interpolation."""
