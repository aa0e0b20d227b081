"""Operators with windows over images: convolutions fused with the operations that follow them, and max pools."""
