"""Sums, means, extremes and norms over any dimensions."""
