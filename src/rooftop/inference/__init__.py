"""Inference of trained models: norms folded, convolutions fused, half precision, CUDA graphs.

engine = Engine(model)
logits = engine(images)
"""

from rooftop.inference.engine import Engine, EngineReport
from rooftop.rewrites.folding import Folding, fold_norms
from rooftop.rewrites.fusing import Fusing, fuse_convolutions
from rooftop.rewrites.graphs import GraphReport

__all__ = ["Engine", "EngineReport", "Folding", "Fusing", "GraphReport", "fold_norms", "fuse_convolutions"]
