"""Dense operators at or near the roof: one file for each family."""

from rooftop.kernels.norms import layer_norm
from rooftop.kernels.softmaxes import log_softmax, softmax

__all__ = ["layer_norm", "log_softmax", "softmax"]
