"""Convolutions fused with the operations that follow them, and max pools: windows over images."""
