"""A trained model made ready to answer: norms folded away, convolutions fused, half precision, CUDA graphs.

engine = Engine(model)
logits = engine(images)
"""

from rooftop.inference.engine import Engine, EngineReport
from rooftop.inference.folding import Folding, fold_norms
from rooftop.inference.fusing import Fusing, fuse_convolutions
from rooftop.inference.graphs import GraphReport

__all__ = ["Engine", "EngineReport", "Folding", "Fusing", "GraphReport", "fold_norms", "fuse_convolutions"]
