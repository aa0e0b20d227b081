"""Launch parameters of the kernels of random numbers and dropout."""

from __future__ import annotations

from rooftop.kernels.operands.launch_data import ElementsConfig

# Eight elements per thread are two blocks of the generator, whose rounds overlap. `benchmarks/tuning/randoms.py` tries
# other numbers of elements; none has been timed yet.
FILL = ElementsConfig(elements=1024, warps=4, measured=False)
DROPOUT = ElementsConfig(elements=1024, warps=4, measured=False)
