"""Softmax and its logarithm along any dimension."""
