"""Dense operators at or near the roof: one file for each family."""

from rooftop.kernels.cuda_interpolations import trilinear_interpolate_cuda
from rooftop.kernels.cuda_norms import add_layer_norm_cuda
from rooftop.kernels.gated import swiglu
from rooftop.kernels.linear_losses import linear_cross_entropy
from rooftop.kernels.losses import cross_entropy
from rooftop.kernels.matmuls import linear_act, linear_act_plan, matmul
from rooftop.kernels.norms import layer_norm
from rooftop.kernels.reductions import amax, amin, argmax, argmin, mean, norm, sum
from rooftop.kernels.rotary import rope, rope_pair
from rooftop.kernels.softmaxes import log_softmax, softmax

__all__ = [
    "add_layer_norm_cuda",
    "amax",
    "amin",
    "argmax",
    "argmin",
    "cross_entropy",
    "layer_norm",
    "linear_act",
    "linear_act_plan",
    "linear_cross_entropy",
    "log_softmax",
    "matmul",
    "mean",
    "norm",
    "rope",
    "rope_pair",
    "softmax",
    "sum",
    "swiglu",
    "trilinear_interpolate_cuda",
]
