"""Convolutions with what follows them, and max pools: windows over images."""
