"""Ladders: one piece of work done better rung by rung, in CUDA C++ and in Triton, each measured against the roof.

    rooftop ladder vector|indexing|reduction|matmul|layer

`LADDERS` names them; `build` makes one, `climb` checks and times its rungs. What each rung changes, and why that should
be faster, is in docs/ladder.md. No rung is the operator to use: those are in `rooftop.kernels`.
"""

from __future__ import annotations

from rooftop.ladder.climbing import Climb, Outcome, climb
from rooftop.ladder.rungs import LADDERS, Ladder, Rung, build

__all__ = ["LADDERS", "Climb", "Ladder", "Outcome", "Rung", "build", "climb"]
