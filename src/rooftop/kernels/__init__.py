"""Dense operators at or near the roof: one file for each family."""

from rooftop.kernels.norms import layer_norm

__all__ = ["layer_norm"]
