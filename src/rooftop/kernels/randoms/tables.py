"""Launch parameters of random numbers and dropout."""

from __future__ import annotations

from rooftop.kernels.operands.launch_data import ElementsConfig

# Eight elements per thread are two blocks of the generator, whose rounds overlap. These parameters are not measured
# yet; `benchmarks/tuning/randoms.py` compares them with others.
FILL = ElementsConfig(elements=1024, warps=4, measured=False)
DROPOUT = ElementsConfig(elements=1024, warps=4, measured=False)
