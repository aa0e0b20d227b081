"""Modules that call the operators of `rooftop.kernels`, with the names and arguments of `torch.nn`."""

from rooftop.nn.embeddings import Embedding
from rooftop.nn.gated import SwiGLU
from rooftop.nn.linears import LinearAct
from rooftop.nn.losses import CrossEntropyLoss
from rooftop.nn.norms import LayerNorm, RMSNorm
from rooftop.nn.replacing import KINDS, Replacement, replace
from rooftop.nn.softmaxes import LogSoftmax, Softmax

__all__ = [
    "KINDS",
    "CrossEntropyLoss",
    "Embedding",
    "LayerNorm",
    "LinearAct",
    "LogSoftmax",
    "RMSNorm",
    "Replacement",
    "Softmax",
    "SwiGLU",
    "replace",
]
