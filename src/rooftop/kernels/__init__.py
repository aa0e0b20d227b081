"""Dense operators at or near the roof: one file for each family."""

from rooftop.kernels.cuda_interpolations import trilinear_interpolate_cuda
from rooftop.kernels.cuda_norms import add_layer_norm_cuda
from rooftop.kernels.linear_losses import linear_cross_entropy
from rooftop.kernels.losses import cross_entropy
from rooftop.kernels.norms import layer_norm
from rooftop.kernels.softmaxes import log_softmax, softmax

__all__ = [
    "add_layer_norm_cuda",
    "cross_entropy",
    "layer_norm",
    "linear_cross_entropy",
    "log_softmax",
    "softmax",
    "trilinear_interpolate_cuda",
]
