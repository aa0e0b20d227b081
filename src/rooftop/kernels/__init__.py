"""Dense operators at or near the roof: one file for each family."""

from rooftop.kernels.cuda_interpolations import trilinear_interpolate_cuda
from rooftop.kernels.cuda_norms import add_layer_norm_cuda
from rooftop.kernels.norms import layer_norm
from rooftop.kernels.softmaxes import log_softmax, softmax

__all__ = ["add_layer_norm_cuda", "layer_norm", "log_softmax", "softmax", "trilinear_interpolate_cuda"]
