"""Dense operators at or near the roof: one file for each family."""

from rooftop.kernels.attention_plans import AttentionPlan
from rooftop.kernels.attention_states import merge_attention_states
from rooftop.kernels.attentions import attention, attention_plan
from rooftop.kernels.boxes import Box
from rooftop.kernels.conv_acts import conv_act, conv_act_plan
from rooftop.kernels.conv_lstm_sequences import conv_lstm_sequence
from rooftop.kernels.conv_lstms import conv_lstm_gates
from rooftop.kernels.cuda_interpolations import trilinear_interpolate_cuda
from rooftop.kernels.cuda_norms import add_layer_norm_cuda
from rooftop.kernels.elementwise import add, axpy, fused, gelu, mul, relu, sigmoid, silu, tanh
from rooftop.kernels.embeddings import embedding
from rooftop.kernels.gated import swiglu
from rooftop.kernels.interpolations import trilinear_interpolate
from rooftop.kernels.linear_losses import linear_cross_entropy
from rooftop.kernels.losses import cross_entropy
from rooftop.kernels.matmuls import linear_act, linear_act_plan, matmul
from rooftop.kernels.max_pools import max_pool2d
from rooftop.kernels.norms import layer_norm, rms_norm
from rooftop.kernels.paged_attentions import paged_attention
from rooftop.kernels.random_words import random_key
from rooftop.kernels.randoms import counter_dropout, random_normal, random_uniform
from rooftop.kernels.reductions import amax, amin, argmax, argmin, mean, norm, sum
from rooftop.kernels.rotary import rope, rope_pair
from rooftop.kernels.softmaxes import log_softmax, softmax
from rooftop.kernels.sparse_convs import sparse_conv
from rooftop.kernels.sparse_global_pools import sparse_global_avg_pool, sparse_global_max_pool
from rooftop.kernels.sparse_pools import sparse_avg_pool, sparse_max_pool
from rooftop.kernels.sum_norms import add_layer_norm, add_rms_norm
from rooftop.kernels.window_attentions import window_attention
from rooftop.launch.operators import decompositions

__all__ = [
    "AttentionPlan",
    "Box",
    "add",
    "add_layer_norm",
    "add_layer_norm_cuda",
    "add_rms_norm",
    "amax",
    "amin",
    "argmax",
    "argmin",
    "attention",
    "attention_plan",
    "axpy",
    "conv_act",
    "conv_act_plan",
    "conv_lstm_gates",
    "conv_lstm_sequence",
    "counter_dropout",
    "cross_entropy",
    "decompositions",
    "embedding",
    "fused",
    "gelu",
    "layer_norm",
    "linear_act",
    "linear_act_plan",
    "linear_cross_entropy",
    "log_softmax",
    "matmul",
    "max_pool2d",
    "mean",
    "merge_attention_states",
    "mul",
    "norm",
    "paged_attention",
    "random_key",
    "random_normal",
    "random_uniform",
    "relu",
    "rms_norm",
    "rope",
    "rope_pair",
    "sigmoid",
    "silu",
    "softmax",
    "sparse_avg_pool",
    "sparse_conv",
    "sparse_global_avg_pool",
    "sparse_global_max_pool",
    "sparse_max_pool",
    "sum",
    "swiglu",
    "tanh",
    "trilinear_interpolate",
    "trilinear_interpolate_cuda",
    "window_attention",
]
