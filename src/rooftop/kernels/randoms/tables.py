"""Launch parameters of random numbers and dropout."""

from __future__ import annotations

from rooftop.kernels.operands.launch_data import ElementsConfig

# A thread computes eight elements: two blocks of the generator, whose instructions overlap. The parameters in this file
# are not measured yet; `benchmarks/tuning/randoms.py` compares them with other parameters.
FILL = ElementsConfig(elements=1024, warps=4, measured=False)
DROPOUT = ElementsConfig(elements=1024, warps=4, measured=False)
