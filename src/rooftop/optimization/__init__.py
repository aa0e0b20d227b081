"""Make a user's model faster. Each change is proven and measured in the whole model, or refused with the reason.

found = rooftop.optimize(model, x)
print(found)
y = found.module(x)
"""

from rooftop.optimization.optimized import Change, Optimized, OptimizedModule
from rooftop.optimization.optimizing import optimize

__all__ = ["Change", "Optimized", "OptimizedModule", "optimize"]
