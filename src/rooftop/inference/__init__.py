"""A trained model made ready to answer: norms folded away, half precision, CUDA graphs.

engine = Engine(model)
logits = engine(images)
"""

from rooftop.inference.engine import Engine, EngineReport
from rooftop.inference.folding import Folding, fold_norms
from rooftop.inference.graphs import GraphReport

__all__ = ["Engine", "EngineReport", "Folding", "GraphReport", "fold_norms"]
