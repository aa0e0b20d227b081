"""Ladders: the same computation in ever faster versions, called rungs. Each rung is checked, measured and compared with
the roof.

    rooftop ladder vector|indexing|reduction|matmul|layer    kernels in CUDA C++ and in Triton
    rooftop ladder python                                    one function, from plain Python to the roof
    rooftop ladder memory                                    rate and latency of each level of the memory

`LADDERS` lists the ladders of kernels; `build` makes one, and `climb` checks and times its rungs. docs/ladder.md
explains what each rung changes and why that should be faster. The rungs are for learning; the operators to use are in
`rooftop.kernels`. docs/speed.md is the guide to the `python` ladder.

Names are loaded when they are first used, because worker processes import this package but do not need torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rooftop.first_use import on_first_use

if TYPE_CHECKING:
    from rooftop.ladder.climbing import Climb, Outcome, climb
    from rooftop.ladder.rungs import LADDERS, Ladder, Rung, build

__all__ = ["LADDERS", "Climb", "Ladder", "Outcome", "Rung", "build", "climb"]

__getattr__, __dir__ = on_first_use(
    __name__, {".climbing": "Climb Outcome climb", ".rungs": "LADDERS Ladder Rung build"}
)
