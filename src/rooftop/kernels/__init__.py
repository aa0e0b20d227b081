"""Operators that run at or near the speed limit of the hardware, one package per family."""

from rooftop.kernels.attentions.attentions import attention, attention_plan
from rooftop.kernels.attentions.paged_attentions import paged_attention
from rooftop.kernels.attentions.plans import AttentionPlan
from rooftop.kernels.attentions.rotary import rope, rope_pair
from rooftop.kernels.attentions.states import merge_attention_states
from rooftop.kernels.attentions.window_attentions import window_attention
from rooftop.kernels.convolutions.conv_acts import conv_act, conv_act_plan
from rooftop.kernels.convolutions.max_pools import max_pool2d, max_pool2d_plan
from rooftop.kernels.elementwise.elementwise import add, axpy, fused, gelu, mul, relu, sigmoid, silu, tanh
from rooftop.kernels.gated.gated import swiglu
from rooftop.kernels.lookups.cuda_interpolations import trilinear_interpolate_cuda
from rooftop.kernels.lookups.embeddings import embedding
from rooftop.kernels.lookups.interpolations import trilinear_interpolate
from rooftop.kernels.losses.linear_losses import linear_cross_entropy
from rooftop.kernels.losses.losses import cross_entropy
from rooftop.kernels.matmuls.matmuls import linear_act, linear_act_plan, matmul
from rooftop.kernels.norms.cuda_norms import add_layer_norm_cuda
from rooftop.kernels.norms.norms import layer_norm, rms_norm
from rooftop.kernels.norms.sum_norms import add_layer_norm, add_rms_norm, layer_norm_plan
from rooftop.kernels.randoms.boxes import Box
from rooftop.kernels.randoms.randoms import counter_dropout, random_normal, random_uniform
from rooftop.kernels.randoms.words import random_key
from rooftop.kernels.recurrent.conv_lstm_sequences import conv_lstm_sequence
from rooftop.kernels.recurrent.conv_lstms import conv_lstm_gates
from rooftop.kernels.reductions.reductions import amax, amin, argmax, argmin, mean, norm, reduction_plan, sum
from rooftop.kernels.sites.sparse_convs import sparse_conv
from rooftop.kernels.sites.sparse_global_pools import sparse_global_avg_pool, sparse_global_max_pool
from rooftop.kernels.sites.sparse_pools import sparse_avg_pool, sparse_max_pool
from rooftop.kernels.softmaxes.softmaxes import log_softmax, softmax, softmax_plan
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
    "layer_norm_plan",
    "linear_act",
    "linear_act_plan",
    "linear_cross_entropy",
    "log_softmax",
    "matmul",
    "max_pool2d",
    "max_pool2d_plan",
    "mean",
    "merge_attention_states",
    "mul",
    "norm",
    "paged_attention",
    "random_key",
    "random_normal",
    "random_uniform",
    "reduction_plan",
    "relu",
    "rms_norm",
    "rope",
    "rope_pair",
    "sigmoid",
    "silu",
    "softmax",
    "softmax_plan",
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
