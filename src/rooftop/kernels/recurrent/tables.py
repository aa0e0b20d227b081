"""Launch parameters of the kernels of the gates of a ConvLSTM."""

from __future__ import annotations

from rooftop.kernels.operands.launch_data import ElementsConfig

# A thread has 4 elements of up to 9 tensors in forward and up to 11 in backward, which fit in its registers without
# spills. `benchmarks/tuning/conv_lstms.py` tries other sizes. These values are not measured yet.
FORWARD = ElementsConfig(elements=512, warps=4, measured=False)
BACKWARD = ElementsConfig(elements=512, warps=4, measured=False)
