"""Rewrites: changes that make a model faster. Each rewrite can be applied to a copy of the model.

`rooftop.inference.Engine` applies the rewrites for inference directly. `rooftop.optimize` tries each rewrite on the
user's model, and keeps those that are correct and faster.
"""

from rooftop.rewrites.attention_rules import AttentionBackend
from rooftop.rewrites.candidates import Candidate, Rule, Times
from rooftop.rewrites.compiler_rules import Compile, CompileBlocks
from rooftop.rewrites.convolution_rules import FoldNorms, FuseConvolutions, Pools
from rooftop.rewrites.format_rules import Autocast, ChannelsLast, TensorFloat32
from rooftop.rewrites.graph_rules import CudaGraphs
from rooftop.rewrites.liger_rules import Liger
from rooftop.rewrites.memory_rules import Checkpointing
from rooftop.rewrites.module_rules import Constants, Kernels
from rooftop.rewrites.optimizer_rules import FusedOptimizer

RULES: tuple[Rule, ...] = (
    FoldNorms(),
    FuseConvolutions(),
    Pools(),
    Kernels(),
    Liger(),
    Constants(),
    AttentionBackend("cudnn"),
    AttentionBackend("flash"),
    AttentionBackend("efficient"),
    ChannelsLast(),
    Autocast(),
    TensorFloat32(),
    FusedOptimizer(),
    Checkpointing(),
    CompileBlocks(),
    Compile(),
    Compile("reduce-overhead"),
    CudaGraphs(),
)
"""All rules in the order of application: first those that change modules, then formats, then how the model runs."""

__all__ = [
    "RULES",
    "AttentionBackend",
    "Autocast",
    "Candidate",
    "ChannelsLast",
    "Checkpointing",
    "Compile",
    "CompileBlocks",
    "Constants",
    "CudaGraphs",
    "FoldNorms",
    "FuseConvolutions",
    "FusedOptimizer",
    "Kernels",
    "Liger",
    "Pools",
    "Rule",
    "TensorFloat32",
    "Times",
]
